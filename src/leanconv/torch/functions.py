"""The functions of torch.nn.functional while `enable` lasts: layers are decided before PyTorch's dispatcher is asked.

A kernel in Python below the dispatcher costs several µs, whatever it does. So `conv1d`, `conv2d`, `conv3d` and their
transposed look a layer up first, by its filters, its options and the shape of its images:

- What is left to PyTorch goes to aten::_convolution, which is what PyTorch's own kernel of aten::convolution calls. The
  gradient is recorded as before, where it is left to PyTorch too.
- What leanconv takes, and needs no gradient, is a ready call. Filters that have not changed are packed once; under
  autocast, cast once.
- What leanconv takes, forward or backward, and needs a gradient, is a `Recorded`, if it saves enough to be worth it.
- Everything else goes to PyTorch's function, so to the kernels that `registration` has registered: modes, tracers,
  transforms of torch.func, classes of tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.jit import _builtins

from leanconv.call import bind
from leanconv.call.gpu_call import PreparedCall
from leanconv.call.resolve import of_problem
from leanconv.options import limit_of
from leanconv.runtime.bounded_cache import BoundedCache
from leanconv.torch import recorded
from leanconv.torch.decided import Layer, memory_of, taken, through_layers
from leanconv.torch.deciding import Deciding
from leanconv.torch.layers import conv_precision, tf32_allowed
from leanconv.torch.packed import CastFilters, PackedFilters, lowered, signature, signature_of, version_of
from leanconv.torch.report import Count, Line
from leanconv.torch.switches import (
    address,
    any_autocast,
    autocast_dtype,
    autocast_type,
    capturing,
    compiling,
    dispatch_modes,
    function_modes,
    grad_enabled,
    is_default_device_alone,
    is_lazy,
    left_to_cudnn,
    left_to_pytorch,
    on_gpu,
    quick_recorded,
    saved_hooks,
    tracing,
    transforms,
    uses_cudnn,
)

F = torch.nn.functional
#: Bytes of packed filters that one patch keeps at most, where LEANCONV_WORKSPACE_LIMIT does not say less.
MOST_PACKED = 512 << 20
#: what autocast casts, and to what: None where it is off
_CAST = torch.float32, torch.float16, torch.bfloat16
_TYPES = None, torch.float16, torch.bfloat16
#: classes of parameters whose functions nobody replaces
_KINDS = torch.Tensor, torch.nn.Parameter
#: Layers that one patch knows at most.
MOST_LAYERS = 4096

#: what is switched on; the last one decides
active: list[Deciding] = []
#: its layers that were called last, by the identity of their filters; nothing where nothing is active
latest: dict[int, Layer] = {}
_Tensor = torch.Tensor


def switched() -> None:
    """Tell calls that `active` has changed."""
    global latest
    latest = active[-1].layers.latest if active else {}


class Layers:
    """All layers that one `Patch` has decided so, and what it keeps of their filters."""

    def __init__(self, patch: Deciding) -> None:
        self._patch = weakref.ref(patch)
        self.known: BoundedCache[Any, Layer] = BoundedCache(MOST_LAYERS)
        #: by the identity of their filters, those that were called last
        self.latest: dict[int, Layer] = {}
        #: by the filters' identity, and the type of autocast
        self._packed: dict[tuple[int, Any], tuple[Any, PackedFilters]] = {}
        #: by the lines that they are of
        self._counts: dict[tuple[int, ...], Count] = {}

    def clear(self) -> None:
        """Drop everything, but what was counted."""
        self.count()
        self._counts.clear()
        self.known.clear()
        self.latest.clear()
        self._packed.clear()

    @property
    def packed_bytes(self) -> int:
        """Bytes of packed and cast filters that are kept."""
        return sum(packed.nbytes for _, packed in list(self._packed.values()))

    def count(self) -> None:
        """Bring all calls into their lines."""
        for each in list(self._counts.values()):
            each.add()

    def _count(self, lines: tuple[Line, ...]) -> Count:
        return self._counts.setdefault(tuple(map(id, lines)), Count(lines))

    def refresh(self, weight: Any = None) -> None:
        """Drop packed filters: all, or those of a layer that is trained, since optimisers may change it unseen."""
        if weight is None:
            dropped = list(self._packed.values())
        else:
            dropped = [kept for dtype in _TYPES if (kept := self._packed.get((id(weight), dtype))) is not None]
        for _, packed in dropped:
            packed.refresh()

    def decide(self, key: tuple[Any, ...], function: Function, input: Any, weight: Any, bias: Any) -> Layer | None:
        """The layer of a call that has not been seen; None for one that the dispatcher decides."""
        *_, options, _, dtype = key
        patch = self._patch()
        given = function.given(input, weight, bias, *options)
        if given is None or patch is None or dtype not in _TYPES:
            return None
        if dtype is None and bias is not None and bias.dtype is not input.dtype:  # PyTorch's function refuses it
            return None
        x, w, added = input, weight, bias
        if dtype is not None:
            if any(each is not None and each.dtype not in _CAST for each in (input, weight, bias)):
                return None
            # of what autocast casts, only shape, strides and alignment matter
            x, w, added = (
                each if each is None or each.dtype is dtype else torch.empty_like(each, dtype=dtype, device=each.device)
                for each in (input, weight, bias)
            )
        # lists are what the dispatcher gives
        numbers = [[*each] if type(each) is tuple else each for each in given]
        at, latest = key[0], self.latest
        layer = Layer(
            key, patch.choice(x, w, added, numbers, weight), x, weight, bias, given, lambda _: latest.pop(at, None)
        )
        # PyTorch does not count changes of the tensors of inference mode
        if weight.is_inference() or (dtype is not None and bias is not None and bias.is_inference()):
            layer.problem = None
        if not capturing() and self._kept(weight, bias, dtype) is not None:
            self.pack(layer, function, x, weight, bias, dtype)
        self.known.keep(key, layer)
        self._is_latest(layer)
        return layer

    def seen(self, key: tuple[Any, ...], weight: Any) -> Layer | None:
        """The layer of a call that has been decided."""
        layer = self.known.get(key) or self.known.recall(key)
        if layer is None or layer.weight_ref() is not weight:
            return None
        self._is_latest(layer)
        return layer

    def _is_latest(self, layer: Layer) -> None:
        if len(self.latest) >= MOST_LAYERS:
            self.latest.clear()
        self.latest[layer.key[0]] = layer

    def forget(self, layer: Layer) -> None:
        """Let the next call decide anew."""
        self.known.pop(layer.key, None)
        self.latest.pop(layer.key[0], None)

    def record(self, layer: Layer, input: Any, weight: Any, bias: Any) -> Any:
        """A call whose gradient is recorded."""
        if saved_hooks(True) is not None:
            # a checkpoint: its recomputation ends where the last tensor is saved, which Python does after the call
            return layer.function.original(input, weight, bias, *layer.given)
        dtype, patch = layer.dtype, self._patch()
        mask = input.requires_grad, weight.requires_grad
        if mask in layer.backward:
            left = layer.backward[mask]
        elif patch is None:
            left = None
        else:
            given = lowered(input, dtype), lowered(weight, dtype), lowered(bias, dtype), layer.options, mask, weight
            left = layer.backward[mask] = patch.left_recorded(*given)
        if layer.recorded is None and layer.alike is not None:
            if left is None:
                layer.recorded = through_layers(layer, _record, self)
            else:
                counted = self._count(left)
                layer.recorded = quick_recorded(
                    layer.known(), counted, self._packed, self.refresh, layer.tf32, layer.options
                )
        if left is not None:
            if self._packed:  # for passes without a gradient; ours would drop it in the backward pass
                self.refresh(weight)
            for line in left:
                line.calls += 1
            # which casts as PyTorch's own
            return left_to_pytorch(input, weight, bias, layer.options, layer.tf32)
        x, w, added = lowered(input, dtype), lowered(weight, dtype), lowered(bias, dtype)
        call = layer.call
        if call is None or patch is None:
            layer.line.calls += 1
            call = partial(_left, layer.options, layer.tf32)
        elif layer.fits(x, bias) and signature(weight) == layer.weight:
            layer.line.calls += 1
        elif is_lazy(x) or is_lazy(w) or is_lazy(added):
            return layer.function.original(input, weight, bias, *layer.given)
        else:
            call = partial(_anew, patch, layer.options)
        return recorded.record(x, w, added, call, layer.options, active)

    def compute(self, layer: Layer, input: Any, weight: Any, bias: Any, known: bool) -> Any:
        """A call without a gradient; ``known``: its tensors are alike those of the call before."""
        dtype, tf32 = layer.dtype, layer.tf32
        if layer.call is None or (layer.eager is not None and not capturing()):
            (layer.eager or layer.line).calls += 1
            if layer.cudnn is not None and bias is None and uses_cudnn():
                return left_to_cudnn(input, weight, layer.cudnn, tf32)
            return left_to_pytorch(input, weight, bias, layer.options, tf32)
        x = input if dtype is None or input.dtype is dtype else input.to(dtype)
        # of tensors that are alike only their memory is asked
        if not known or dtype is not None or layer.memory != memory_of(x, weight, bias):
            if not layer.fits(x, bias):
                return self.anew(layer, x, weight, bias, dtype, tf32)
            if signature(weight) != layer.weight:
                # other memory: the next call decides anew
                self.forget(layer)
                return self.anew(layer, x, weight, bias, dtype, tf32)
        if layer.packed is None and layer.problem is not None and not capturing():
            version = version_of(weight, bias, dtype)
            if version == layer.version:
                self.pack(layer, layer.function, x, weight, bias, dtype)
                layer.quick = None
            layer.version = version
        kept = layer.packed
        if layer.quick is None and layer.alike is not None:
            layer.quick = taken(layer) or through_layers(layer, _compute, self)
        if kept is None:
            if dtype is None:
                layer.line.calls += 1
                return layer.call(x, weight, bias)
            if layer.problem is None:  # autocast keeps its casts for a while, and nothing is kept here
                return layer.function.original(input, weight, bias, *layer.given)
        else:
            packed, ready, _ = kept
            version = weight._version if dtype is None else version_of(weight, bias, dtype)
            if version != packed.version:
                packed.version = version
            elif not capturing():  # a CUDA graph packs what the filters are when it is replayed
                current = packed.current(weight, bias, version)
                if current is not None:
                    layer.line.calls += 1
                    return ready(x, *current)
        layer.line.calls += 1
        if dtype is None:
            return layer.call(x, weight, bias)
        return layer.call(x, lowered(weight, dtype), lowered(bias, dtype))

    def anew(self, layer: Layer, x: Any, weight: Any, bias: Any, dtype: Any, tf32: bool) -> Any:
        """A call without a gradient, of tensors that lie otherwise than those of the layer."""
        if is_lazy(x) or is_lazy(weight) or is_lazy(bias):
            return layer.function.original(x, weight, bias, *layer.given)
        patch = self._patch()
        w, added = weight, bias
        if dtype is not None:
            w, added = lowered(weight, dtype), lowered(bias, dtype)
        choice = None if patch is None else patch.choice(x, w, added, layer.options, weight)
        if choice is not None:
            choice.line.calls += 1
        if choice is None or choice.call is None:
            return left_to_pytorch(x, w, added, layer.options, tf32)
        return choice.call(x, w, added)

    def _kept(self, weight: Any, bias: Any, dtype: Any) -> PackedFilters | None:
        kept = self._packed.get((id(weight), dtype))
        fits = kept is not None and kept[0]() is weight and kept[1].signature == signature_of(weight, bias, dtype)
        return kept[1] if kept is not None and fits else None

    def _drop(self, at: tuple[int, Any]) -> None:
        kept = self._packed.pop(at, None)
        if kept is not None:
            kept[1].release()

    def pack(self, layer: Layer, function: Function, x: Any, weight: Any, bias: Any, dtype: Any) -> None:
        """Let a layer keep its filters, if its call packs them or they are cast, and if there is room."""
        problem, layer.problem = layer.problem, None
        if problem is None:
            return
        limit = limit_of(None)
        room = (MOST_PACKED if limit is None else min(limit, MOST_PACKED)) - self.packed_bytes
        packed = kept = self._kept(weight, bias, dtype)
        if packed is None:
            if dtype is None:
                packed = PackedFilters(weight, function.axes)
            else:
                packed = CastFilters(weight, bias, function.axes, dtype)
        room -= packed.needed
        version = version_of(weight, bias, dtype)
        current = packed.current(weight, bias, version) if room >= 0 else None
        if current is None:
            layer.problem = problem if room >= 0 else None
            return
        weights, added = current
        x = x.detach().unsqueeze(-2) if function.axes == 1 else x.detach()
        added = None if added is None else added.detach()
        call = bind.bind(replace(of_problem(problem, x, weights.array, added, limit), weights=weights))
        if isinstance(call, PreparedCall):
            if call.kept_bytes > room:
                return
        elif dtype is None:
            return
        if kept is None:
            packed.version = version
            drop, at = self._drop, (id(weight), dtype)
            drop(at)
            self._packed[at] = weakref.ref(weight, lambda _: drop(at)), packed
        packed.layers.append(layer)
        layer.packed, layer.quick = (packed, function.ready(call), call), None


def _record(quick: tuple[Any, ...], x: Any, w: Any, bias: Any, layer: Layer) -> Any:
    layers = quick[-1]()
    return None if layers is None else layers.record(layer, x, w, bias)


def _compute(quick: tuple[Any, ...], x: Any, w: Any, bias: Any, layer: Layer) -> Any:
    layers = quick[-1]()
    return None if layers is None else layers.compute(layer, x, w, bias, True)


def _left(given: Any, tf32: bool, x: Any, w: Any, bias: Any) -> Any:
    return left_to_pytorch(x, w, bias, given, tf32)


def _anew(patch: Deciding, given: Any, x: Any, w: Any, bias: Any) -> Any:
    return patch.convolution(x, w, bias, *given)


class Function:
    """One of the functions: what it takes, and PyTorch's own."""

    def __init__(self, name: str, axes: int, transposed: bool) -> None:
        self.name, self.axes, self.transposed = name, axes, transposed
        self.original = getattr(F, name)
        self.convolve = _convolve(self)
        self.replacement = _replacement(self)

    def ready(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function of tensors, packed filters and a bias, of a ready call with images."""
        if self.axes == 1:
            return lambda x, w, bias: call(x.unsqueeze(-2), w, bias, None).squeeze(-2)
        return lambda x, w, bias: call(x, w, bias, None)

    def given(
        self, input: Any, weight: Any, bias: Any, stride: Any = 1, padding: Any = 0, *more: Any
    ) -> tuple[Any, ...] | None:
        """The arguments of aten::convolution besides tensors; None for what it does not take as it is."""
        names = ("output_padding", "groups", "dilation") if self.transposed else ("dilation", "groups")
        if len(more) > len(names) or input.dim() != self.axes + 2 or weight.dim() != self.axes + 2:
            return None
        if input.is_complex() or weight.is_complex() or None in (address(input), address(weight)):
            return None
        if input.is_neg() or input.is_conj() or is_lazy(weight) or is_lazy(bias):
            return None
        if type(weight) not in _KINDS or (bias is not None and type(bias) not in _KINDS):
            return None
        rest = {"output_padding": 0, "groups": 1, "dilation": 1} | dict(zip(names, more, strict=False))
        numbers = [_each(each, self.axes) for each in (stride, padding, rest["dilation"], rest["output_padding"])]
        if None in numbers or type(rest["groups"]) is not int:
            return None
        return *numbers[:3], self.transposed, numbers[3], rest["groups"]


def _each(value: Any, axes: int) -> tuple[int, ...] | None:
    """An option as one number for each axis; None for words and anything strange."""
    if type(value) is int:
        return (value,) * axes
    if type(value) is tuple and len(value) in (1, axes) and all([type(each) is int for each in value]):
        return value * axes if len(value) == 1 else value
    return None


def _convolve(function: Function) -> Callable[[Any, Any, Any, tuple[Any, ...]], Any]:
    """What a function computes while something is active; the modules of `module_forward` call it too."""

    def convolve(input: Any, weight: Any, bias: Any, options: tuple[Any, ...], ignored: bool = False) -> Any:
        # NOTE: what a call reads here for the first time since the layer before costs more than what it computes: in a
        # network nothing of it is in the processor's nearest caches
        try:
            layer = latest.get(id(weight))
            known = False
            if (
                layer is not None
                and type(input) is _Tensor
                and not input.is_nested  # of whose sizes TensorGuards would end the process
                and (ignored or not function_modes())
                and not dispatch_modes()  # some of which they overlook
                and forward_ad._current_level < 0
            ):
                # whether gradients are enabled no guard sees
                recorded = grad_enabled() and (
                    input.requires_grad or weight.requires_grad or (type(bias) in _KINDS and bias.requires_grad)
                )
                quick = layer.recorded if recorded else layer.quick
                known = (
                    quick is not None
                    and quick[1] is function
                    and quick[2] is (bias is not None)
                    and options == quick[3]
                    and (
                        (quick[4](input) if bias is None else quick[4](input, bias))
                        if quick[5]
                        else (quick[4](input, weight) if bias is None else quick[4](input, weight, bias))
                    )
                    and (quick[6] is None or quick[6] == conv_precision())
                    and (quick[7] is None or quick[7] is autocast_type())
                )
        except (TypeError, RuntimeError, AttributeError, IndexError):
            known = False
        if known:
            y = quick[0](quick, input, weight, bias, layer)
            if y is not None:
                return y
        return _otherwise(function, input, weight, bias, options, ignored)

    return convolve


def _otherwise(function: Function, input: Any, weight: Any, bias: Any, options: tuple[Any, ...], ignored: bool) -> Any:
    """A call that is not as the one before."""
    original = function.original
    if not active or (function_modes() and not ignored) or forward_ad._current_level >= 0:
        plain = type(input) is torch.Tensor and type(weight) in _KINDS and (bias is None or type(bias) in _KINDS)
        if plain and not ignored and active and is_default_device_alone():
            with torch._C.DisableTorchFunction():
                return function.convolve(input, weight, bias, options, True)
        return original(input, weight, bias, *options)
    try:
        layers = active[-1].layers
        if (
            type(input) is not torch.Tensor
            or not on_gpu(input)
            or dispatch_modes()
            or transforms() is not None
            or tracing() is not None
        ):
            return original(input, weight, bias, *options)
        dtype = autocast_dtype() if any_autocast() else None
        key = id(weight), function, input.shape, input.stride(), input.dtype, options, tf32_allowed(), dtype
        layer = layers.latest.get(id(weight))
        if layer is None or layer.key != key or layer.weight_ref() is not weight:
            layer = layers.seen(key, weight)
    except (TypeError, RuntimeError, AttributeError, IndexError):
        return original(input, weight, bias, *options)
    if layer is None:
        layer = layers.decide(key, function, input, weight, bias)
        if layer is None:
            return original(input, weight, bias, *options)
    known = layer.knows(input, weight, bias)
    if not known and (dtype is not None or not any_autocast()):
        layer.look(input, weight, bias)
    if not grad_enabled() or not (
        input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return layers.compute(layer, input, weight, bias, known)
    return layers.record(layer, input, weight, bias)


def _replacement(function: Function) -> Callable[..., Any]:
    original, convolve = function.original, function.convolve

    def convolution(input: Any, weight: Any, bias: Any = None, *options: Any, **named: Any) -> Any:
        if compiling() or named:
            return original(input, weight, bias, *options, **named)
        return convolve(input, weight, bias, options)

    # it is found, and so pickled, as PyTorch's
    convolution.__name__ = convolution.__qualname__ = function.name
    convolution.__module__ = F.__name__
    convolution.__doc__ = original.__doc__
    return convolution


FUNCTIONS = [
    Function(name, axes, transposed)
    for name, axes, transposed in (
        ("conv1d", 1, False),
        ("conv2d", 2, False),
        ("conv3d", 3, False),
        ("conv_transpose1d", 1, True),
        ("conv_transpose2d", 2, True),
        ("conv_transpose3d", 3, True),
    )
]


def install() -> None:
    """Put ours in place of PyTorch's functions, unless somebody has replaced them already."""
    for each in FUNCTIONS:
        if getattr(F, each.name) is each.original:
            # TorchScript compiles calls of either as the operator
            _builtins._register_builtin(each.replacement, f"aten::{each.name}")
            setattr(F, each.name, each.replacement)


def remove() -> None:
    """Put PyTorch's functions back."""
    for each in FUNCTIONS:
        if getattr(F, each.name) is each.replacement:
            setattr(F, each.name, each.original)
