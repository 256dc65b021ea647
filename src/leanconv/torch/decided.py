"""A layer with images of one shape: what was decided, and what computes a call that is as the one before.

Such a call is known by one guard (`switches.alike`), which checks most of what a call depends on. A function that is
made once checks the rest (addresses, stream, device) and computes; it returns None where the long way must decide.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from leanconv.call import bind
from leanconv.call.gpu_call import PreparedCall
from leanconv.call.resolve import of_problem
from leanconv.options import limit_of
from leanconv.runtime.bounded_cache import BoundedCache
from leanconv.runtime.compile import CompileError
from leanconv.runtime.driver import CudaUnavailableError
from leanconv.torch import recorded
from leanconv.torch.deciding import Choice, Deciding
from leanconv.torch.layers import precision_asked
from leanconv.torch.packed import (
    CastFilters,
    PackedFilters,
    lowered,
    memory_of,
    signature,
    signature_of,
    source_of,
    version_of,
)
from leanconv.torch.quick import Quick, launcher, recorded_taken, taken, through_layers
from leanconv.torch.report import Calls, Line
from leanconv.torch.switches import (
    address,
    alike,
    capturing,
    is_lazy,
    left_to_cudnn,
    left_to_pytorch,
    of_cudnn,
    quick_left,
    quick_recorded,
    saved_hooks,
    uses_cudnn,
)

#: Bytes of packed filters that one patch keeps at most, where LEANCONV_WORKSPACE_LIMIT does not say less.
MOST_PACKED = 512 << 20
#: what autocast casts, and to what: None where it is off
_CAST = torch.float32, torch.float16, torch.bfloat16
_TYPES = None, torch.float16, torch.bfloat16
#: Layers that one patch knows at most.
MOST_LAYERS = 4096
#: How often each layer looks at how it is called before it does so seldom: once in so many calls that are not as the
#: one before, such as the first of an epoch and of an evaluation.
_MOST_LOOKS, _SELDOM = 8, 64
#: By their identity, filters whose training a CUDA graph has captured: PyTorch does not count what its replays change.
_in_graphs: dict[int, weakref.ref[Any]] = {}


class Layer:
    """A layer with images of one shape: what was decided."""

    __slots__ = (
        "alike", "backward", "bias", "call", "captured", "cudnn", "dtype", "function", "given", "input",
        "is_float32", "key", "line", "looks", "memory", "options", "outside", "packed", "problem", "quick", "ready",
        "recorded", "recorded_call", "tf32", "trains", "version", "weight", "weight_ref", "word",
    )  # fmt: skip

    def __init__(
        self, key: tuple[Any, ...], choice: Choice, input: Any, weight: Any, bias: Any, options: tuple[Any, ...],
        gone: Callable[[Any], Any],
    ) -> None:  # fmt: skip
        self.key = key
        self.call, self.ready, self.line, self.options = choice.call, choice.ready, choice.line, options
        #: as of `Choice`
        self.captured, self.outside = choice.captured, choice.outside
        #: ``gone`` is called where the filters are freed
        self.weight_ref = weakref.ref(weight, gone)
        self.weight, self.bias = signature(weight), None if bias is None else signature(bias)
        self.input = input.data_ptr() & 15, input.get_device(), input.is_neg()
        #: of a layer that PyTorch gives to cuDNN as it is: cuDNN's arguments
        is_left = self.call is None and key[-1] is None
        self.cudnn = of_cudnn(input, weight, bias, options) if is_left else None
        #: kept filters, what computes with them, and its ready call
        self.packed: tuple[PackedFilters, Callable[..., Any], Any] | None = None
        #: what the call computes, where filters may be kept for it; and how often they had changed at the call before
        self.problem, self.version = choice.problem, -1
        #: by the gradients that are wanted, of images and of filters, and by whether a CUDA graph captures the call:
        #: the lines of all that is left to PyTorch, forward and backward, if all is; else None
        self.backward: dict[tuple[bool, bool, bool], tuple[Line, ...] | None] = {}
        #: whether tensors, and the modes and transforms that the dispatcher goes by, are as at the call before: of
        #: images, and where the layer is taken of filters and a bias; None where it cannot be said
        self.alike: Callable[..., bool] | None = None
        #: what computes a call whose tensors are alike, without a gradient and with one; None: the long way
        self.quick: Quick | None = None
        self.recorded: Quick | None = None
        #: whether the filters were trained when `recorded` was made
        self.trains = False
        #: what `recorded` records of a layer that leanconv takes, forward or backward
        self.recorded_call: recorded.RecordedCall | None = None
        #: how often it was called otherwise
        self.looks = 0
        #: see `known`
        self.word: tuple[Any, Any] = (None, None)
        _, self.function, *_, self.given, self.tf32, self.dtype = key
        self.is_float32 = input.dtype is torch.float32
        self.memory = memory_of(input, weight, bias)

    def knows(self, input: Any, weight: Any, bias: Any) -> bool:
        """Whether tensors are alike those of `look`."""
        if self.alike is None or (bias is None) is not (self.bias is None):
            return False
        asked, word = self.word
        try:
            return self.alike(*self._guarded(input, weight, bias)) and (asked is None or asked() == word)
        except RuntimeError:  # which one of the two that tell it raises
            return False

    def _guarded(self, input: Any, weight: Any, bias: Any) -> tuple[Any, ...]:
        """What a guard is made of: PyTorch's convolution asks itself what filters and a bias are like."""
        if self.call is None:
            return (input,)
        return (input, weight) if bias is None else (input, weight, bias)

    def look(self, input: Any, weight: Any, bias: Any) -> None:
        """Let the next call with tensors alike skip the key. One that is called otherwise each time seldom looks."""
        self.looks += 1
        if (bias is None) is not (self.bias is None) or (self.looks > _MOST_LOOKS and self.looks % _SELDOM):
            return
        ready = self.call is not None and self.dtype is None
        if ready and not (self.fits(input, bias) and signature(weight) == self.weight):
            return
        self.recorded = self.quick = None
        self.alike = alike(*self._guarded(input, weight, bias))
        if self.alike is None or self.outside or self.call is not None:
            return
        cudnn = self.cudnn is not None and bias is None
        self.quick = quick_left(self.known(), self.line.ticks, self.options, self.tf32, cudnn, self.input[0] == 0)

    def known(self) -> tuple[Any, ...]:
        """What a call must be like that is as the one before, which `functions` and `module_call` ask.

        The function, whether there is a bias, options, the guard and whether it is one of images alone, what tells
        PyTorch's word for TF32, the word, and the type of autocast, where these matter.
        """
        asked, word = precision_asked() if self.dtype is None and self.is_float32 else (None, None)
        self.word = asked, word
        return self.function, self.bias is not None, self.given, self.alike, self.call is None, asked, word, self.dtype

    def fits(self, input: Any, bias: Any) -> bool:
        """Whether the ready call is one for these tensors too; shape and memory order of the images are the same."""
        at = address(input)
        return (
            at is not None
            and at != 0
            and (at & 15, input.get_device(), input.is_neg()) == self.input
            and (None if bias is None else signature(bias)) == self.bias
        )


class Layers:
    """All layers that one `Patch` has decided so, and what it keeps of their filters."""

    def __init__(self, patch: Deciding) -> None:
        self._patch = weakref.ref(patch)
        self.known: BoundedCache[Any, Layer] = BoundedCache(MOST_LAYERS)
        #: by the identity of their filters, those that were called last
        self.latest: dict[int, Layer] = {}
        #: by the filters' identity, and the type of autocast
        self._packed: dict[tuple[int, Any], tuple[Any, PackedFilters]] = {}
        #: by the lines that they are of, which the patch keeps
        self._counted: dict[tuple[int, ...], Calls] = {}

    def clear(self) -> None:
        """Drop everything."""
        self.decide_anew()
        self._packed.clear()

    def decide_anew(self) -> None:
        """Drop every layer, and keep packed filters."""
        self.known.clear()
        self.latest.clear()

    @property
    def packed_bytes(self) -> int:
        """Bytes of packed and cast filters that are kept."""
        return sum(packed.nbytes for _, packed in list(self._packed.values()))

    def _together(self, lines: tuple[Line, ...]) -> Calls:
        """What counts a call of all these lines."""
        at = tuple(map(id, lines))
        if at not in self._counted:
            self._counted[at] = calls = Calls()
            for line in lines:
                line.counted.append(calls)
        return self._counted[at]

    def refresh(self, weight: Any = None) -> None:
        """Drop packed filters: all, or those of a layer that is trained, since optimisers may change it unseen."""
        if weight is None:
            dropped = list(self._packed.values())
        else:
            dropped = [kept for dtype in _TYPES if (kept := self._packed.get((id(weight), dtype))) is not None]
        for _, packed in dropped:
            packed.refresh()

    def trained(self, w: Any) -> None:
        """Drop packed filters of a layer whose filters, or a cast of them, get a gradient."""
        if self._packed:
            self.refresh(source_of(w))

    def trained_by_graph(self, weight: Any) -> None:
        """Keep nothing of these filters from now on: a CUDA graph trains them."""
        at, known = id(weight), _in_graphs
        if not _is_in_graph(weight):
            known[at] = weakref.ref(weight, lambda _: known.pop(at, None))
        for dtype in _TYPES:
            self._drop((at, dtype))

    def decide(
        self, key: tuple[Any, ...], function: Any, input: Any, weight: Any, bias: Any, outside: bool = False
    ) -> Layer | None:
        """The layer of a call that has not been seen, or not ``outside`` of CUDA graphs without a gradient; None for
        one that the dispatcher decides."""
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
            x, w, added = (_as_cast(each, dtype) for each in (input, weight, bias))
        # lists are what the dispatcher gives
        numbers = [[*each] if type(each) is tuple else each for each in given]
        at, latest = key[0], self.latest
        layer = Layer(
            key, patch.choice(x, w, added, numbers, weight, outside), x, weight, bias, given,
            lambda _: latest.pop(at, None),
        )  # fmt: skip
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
        captured = capturing()
        if captured:
            self.trained_by_graph(weight)
        if saved_hooks(True) is not None:
            # a checkpoint: its recomputation ends where the last tensor is saved, which Python does after the call
            return layer.function.original(input, weight, bias, *layer.given)
        dtype, patch, trains = layer.dtype, self._patch(), weight.requires_grad
        left = self._left_recorded(layer, input, weight, bias, captured)
        # the guard may be of another call, such as one that a graph has captured
        is_new = not captured and (layer.recorded is None or layer.trains is not trains)
        is_new = is_new and layer.knows(input, weight, bias)
        if left is not None:
            if is_new:
                layer.trains, ticks = trains, self._together(left).ticks
                layer.recorded = quick_recorded(
                    layer.known(), ticks, self._packed, self.refresh, trains, layer.tf32, layer.options
                )
            if self._packed:  # for passes without a gradient; ours would drop it in the backward pass
                self.refresh(weight)
            next(self._together(left).ticks)
            # which casts as PyTorch's own
            return left_to_pytorch(input, weight, bias, layer.options, layer.tf32)
        x, w, added = lowered(input, dtype), lowered(weight, dtype), lowered(bias, dtype)
        if (
            layer.call is None
            or layer.captured is not None
            or (layer.fits(x, bias) and signature(weight) == layer.weight)
        ):
            call = layer.recorded_call = layer.recorded_call or _recorded_call(layer)
            if is_new:
                layer.trains, layer.recorded = trains, recorded_taken(layer, call, trains)
            next((layer.captured or layer.line).ticks)
        elif patch is None or is_lazy(x) or is_lazy(w) or is_lazy(added):
            return layer.function.original(input, weight, bias, *layer.given)
        else:
            if signature(weight) != layer.weight:  # other memory: the next call decides anew
                self.forget(layer)
            call = recorded.RecordedCall(partial(_anew, patch, layer.options), layer.options, looks=0)
        return recorded.record(x, w, added, call)

    def _left_recorded(
        self, layer: Layer, input: Any, weight: Any, bias: Any, captured: bool
    ) -> tuple[Line, ...] | None:
        """What `Patch.left_recorded` says of a call, which is asked once."""
        at, patch = (input.requires_grad, weight.requires_grad, captured), self._patch()
        if at not in layer.backward and patch is not None:
            x, w, added = (_as_cast(each, layer.dtype) for each in (input, weight, bias))
            layer.backward[at] = patch.left_recorded(x, w, added, layer.options, at[:2], weight, captured)
        return layer.backward.get(at)

    def compute(self, layer: Layer, input: Any, weight: Any, bias: Any, known: bool) -> Any:
        """A call without a gradient; ``known``: its tensors are alike those of the call before."""
        dtype, tf32 = layer.dtype, layer.tf32
        if layer.call is None or (layer.captured is not None and capturing()):
            if layer.outside and not capturing():
                made = self.decide(layer.key, layer.function, input, weight, bias, outside=True)
                if made is None:
                    return layer.function.original(input, weight, bias, *layer.given)
                return self.compute(made, input, weight, bias, False)
            next((layer.captured or layer.line).ticks)
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
                next(layer.line.ticks)
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
                    next(layer.line.ticks)
                    return ready(x, *current)
        next(layer.line.ticks)
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
        if patch is None:
            return left_to_pytorch(x, w, added, layer.options, tf32)
        choice = patch.choice(x, w, added, layer.options, weight)
        if choice.outside and not capturing():
            choice = patch.choice(x, w, added, layer.options, weight, outside=True)
        next(choice.line.ticks)
        if choice.call is None:
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

    def pack(self, layer: Layer, function: Any, x: Any, weight: Any, bias: Any, dtype: Any) -> None:
        """Let a layer keep its filters, if what is chosen for kept ones packs them or they are cast, and if there is
        room."""
        problem, layer.problem = layer.problem, None
        if problem is None or _is_in_graph(weight):
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
        try:
            call = bind.bind(replace(of_problem(problem, x, weights.array, added, limit), weights=weights))
        except (CudaUnavailableError, CompileError) as error:  # the call that packs them runs
            warnings.warn(f"leanconv packs filters of {problem} in each call: {error}", RuntimeWarning, stacklevel=2)
            return
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


def _is_in_graph(weight: Any) -> bool:
    kept = _in_graphs.get(id(weight))
    return kept is not None and kept() is weight


def _as_cast(tensor: Any, dtype: Any) -> Any:
    """What stands for a tensor that autocast casts: only its sizes, strides and alignment matter."""
    if tensor is None or dtype is None or tensor.dtype is dtype:
        return tensor
    return torch.empty_like(tensor, dtype=dtype, device=tensor.device)


def _recorded_call(layer: Layer) -> recorded.RecordedCall:
    """How a layer is computed whose gradient is recorded."""
    if layer.call is None or layer.captured is not None:
        return recorded.RecordedCall(partial(_left, layer.options, layer.tf32), layer.options)
    launch, otherwise = launcher(layer.ready, layer.function.axes == 1), layer.call
    if launch is None:
        return recorded.RecordedCall(otherwise, layer.options)

    def call(x: Any, w: Any, bias: Any) -> Any:
        y = launch(x.data_ptr(), w.data_ptr(), 0 if bias is None else bias.data_ptr())
        return otherwise(x, w, bias) if y is None else y

    return recorded.RecordedCall(call, layer.options)


def _compute(quick: tuple[Any, ...], x: Any, w: Any, bias: Any, layer: Layer) -> Any:
    layers = quick[-1]()
    return None if layers is None else layers.compute(layer, x, w, bias, True)


def _left(given: Any, tf32: bool, x: Any, w: Any, bias: Any) -> Any:
    return left_to_pytorch(x, w, bias, given, tf32)


def _anew(patch: Deciding, given: Any, x: Any, w: Any, bias: Any) -> Any:
    return patch.convolution(x, w, bias, *given)
