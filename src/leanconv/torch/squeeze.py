"""Squeeze-and-excite, ``y = x * gate(w2 @ activation(w1 @ mean(x) + b1) + b2)``, by one kernel where that is quicker.

`SqueezeExcite` is what `leanconv.torch.fuse` makes of a block. The operator ``leanconv::squeeze_excite`` is what the
backend of torch.compile makes of one. It has no derivative of its own: where a gradient is recorded, and inside
transforms of torch.func, it is PyTorch's functions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import register_flop_formula

from leanconv.arrays import arrays_of
from leanconv.call.host_call import torch_epilogue
from leanconv.dtypes import DTYPES
from leanconv.kernels.common import squeeze_excite as kernel
from leanconv.plan import Plan
from leanconv.runtime import launch
from leanconv.runtime.bounded_cache import BoundedCache
from leanconv.runtime.compile import CompileError
from leanconv.runtime.driver import CudaUnavailableError
from leanconv.runtime.threads import side_by_side
from leanconv.torch import comparing, epilogue, operators, patterns
from leanconv.torch.fused_layer import FusedConv
from leanconv.torch.packed import signature
from leanconv.torch.switches import compiling, on_gpu

F = torch.nn.functional
_ROLES = "x", "w1", "b1", "w2", "b2", "y"
_HARD = "hardsigmoid"


class Way(NamedTuple):
    """How a block is computed with images of one kind."""

    runs: str
    problem: Any
    why: str
    #: the kernel's; None where PyTorch computes
    plan: Plan | None = None
    device: int | None = None


class Calls:
    """Calls of blocks, and how those of each kind are computed."""

    def __init__(self) -> None:
        self._ways: BoundedCache[Any, tuple[Way, Any, Any]] = BoundedCache(256)

    @property
    def ways(self) -> tuple[Way, ...]:
        """How blocks have been computed so far."""
        return tuple(way for way, _, _ in self._ways.values())

    def run(self, activation: str | None, gate: str, *given: Any) -> Any:
        """The result for images on a GPU, w1, b1, w2 and b2; None where PyTorch is to compute it."""
        input = given[0]
        try:
            addresses = [0 if each is None else each.data_ptr() for each in given]
            usable = all(each is None or (at and not at & 15) for at, each in zip(addresses, given, strict=True))
            signatures = (None if each is None else signature(each) for each in given[1:])
            images = input.shape, input.stride(), input.dtype, input.device, input.is_neg()
            key = usable, activation, gate, *images, *signatures
        except (RuntimeError, AttributeError):  # a tensor without memory or sizes
            return None
        ready = self._ways.get(key) or self._ways.recall(key)
        if ready is None:
            ready = _ready(decide(activation, gate, *given), input, usable)
            self._ways.keep(key, ready)
        _, stream, run = ready
        if run is None:
            return None
        y = torch.empty_like(input)
        run(stream(), (*addresses, y.data_ptr()))
        return y


def _ready(way: Way, input: Any, usable: bool) -> tuple[Way, Any, Any]:
    """How, the stream, and what runs it there. ``usable``: whether all addresses are multiples of 16."""
    arrays = arrays_of(input)
    if not usable:
        way = Way("PyTorch", way.problem, "its memory starts at no multiple of 16 bytes")
    if way.plan is None or way.device is None or arrays is None:
        return way, None, None
    try:
        run = launch.open_device(way.device).executable(way.plan, _ROLES)
    except (CudaUnavailableError, CompileError) as error:
        warnings.warn(f"leanconv leaves {way.problem} to PyTorch: {error}", RuntimeWarning, stacklevel=2)
        return Way("PyTorch", way.problem, str(error).splitlines()[0]), None, None
    return way, arrays.fast_stream(way.device), run


def decide(
    activation: str | None, gate: str, x: Any, w1: Any, b1: Any, w2: Any, b2: Any, *, compiled: bool = False
) -> Way:  # fmt: skip
    """How a block is computed, of whose tensors only what is beside values matters.

    ``compiled``: whether what PyTorch would run otherwise is what inductor compiles.
    """
    arrays = arrays_of(x)
    index = None if arrays is None else arrays.device(x)
    dtype = DTYPES.get(str(x.dtype).removeprefix("torch."))
    c, squeezed, window = x.shape[1:2], w1.shape[:1], (1,) * (w1.dim() - 2)
    shapes = {w1: (*squeezed, *c, *window), b1: squeezed, w2: (*c, *squeezed, *window), b2: c}
    given = [each for each in shapes if each is not None]
    what = f"squeeze-excite of {tuple(x.shape)}"
    kinds = {(each.dtype, each.device) for each in (x, *given)}
    if index is None or dtype is None or len(kinds) > 1:
        return Way("PyTorch", what, f"images of {x.dtype} on {x.device}, or layers of something else")
    last = _is_last(x)
    dense = [_is_last(each) is not None and not each.is_neg() for each in (x, *given)]
    fits = x.dim() == w1.dim() and all(each.shape == shapes[each] for each in given)
    if not fits or not x.numel() or not all(dense):
        return Way("PyTorch", what, "its shape or its memory is not one for leanconv")
    problem = kernel.SqueezeExciteProblem(
        x.shape[0], x.shape[1], x.shape[2:].numel(), w1.shape[0], dtype.name, bool(last), activation, gate,
        b1 is not None, b2 is not None,
    )  # fmt: skip
    try:
        target = launch.open_device(index).target
    except CudaUnavailableError as error:
        return Way("PyTorch", problem, str(error).splitlines()[0])
    if reasons := kernel.why_not(problem, target):
        return Way("PyTorch", problem, reasons[0])
    share = kernel.predicted_cycles(problem, target) / comparing.squeeze_cycles(problem, target, compiled)
    others = "inductor's" if compiled else "PyTorch's four"
    why = f"one launch is expected to take {share:.2f} of the time of {others}"
    if share >= 1:
        return Way("PyTorch", problem, why)
    return Way("leanconv: squeeze_excite", problem, why, kernel.plan(problem, target), index)


def _is_last(tensor: Any) -> bool | None:
    """Whether a dense tensor has its channels last; None for others."""
    if tensor.is_contiguous():
        return False
    form = operators.CHANNELS_LAST.get(tensor.dim())
    return True if form and tensor.is_contiguous(memory_format=form) else None


def load(ways: Iterable[Way]) -> None:
    """Compile and load the kernels of blocks, side by side."""
    each = dict.fromkeys((way.device, one) for way in ways if way.plan is not None for one in way.plan.launches)
    side_by_side([partial(launch.open_device(index).load, one) for index, one in each if index is not None])


def gates(input: Any, axes: int, first: Callable[..., Any], second: Callable[..., Any], hard: bool) -> Any:
    """What the images are multiplied with, by PyTorch's mean and a block's two layers. Images have so many axes behind
    their channels."""
    pixels = tuple(range(-axes, 0))  # of images without a batch too
    found = second(first(input.mean(pixels, keepdim=True)))
    return F.hardsigmoid(found) if hard else found


class SqueezeExcite(torch.nn.Module):
    """What `fuse` puts in place of squeeze-and-excite: ``y = input * gate(second(first(mean of input)))``.

    Its layers are the `FusedConv` that the model has otherwise. On a GPU one kernel computes all of it for images of
    which that is expected to be quicker; else they do, with PyTorch's mean and product.
    """

    def __init__(self, first: FusedConv, second: FusedConv, hard: bool, names: tuple[str, str], name: str) -> None:
        super().__init__()
        self.names, self.hard, self.name, self.axes = ("first", "second"), hard, name, first.weight.dim() - 2
        self.what = "+".join(("mean", first.what, second.what, *(("hardsigmoid",) * hard), "mul"))
        if names[0] != names[1] and {*names}.isdisjoint(dir(self)):
            self.names = names
        for each, layer in zip(self.names, (first, second), strict=True):
            self.add_module(each, layer)
        self.train(False)
        self._begin()

    def _begin(self) -> None:
        self._calls = Calls()

    def __getstate__(self) -> dict[str, Any]:
        """What is decided is not copied."""
        return {name: value for name, value in self.__dict__.items() if name != "_calls"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    @property
    def layers(self) -> tuple[Any, Any]:
        """The two layers of the means: `FusedConv`, or what somebody has put in their place."""
        first, second = (self._modules[name] for name in self.names)
        return first, second

    @property
    def ways(self) -> tuple[Any, ...]:
        """How it has been computed so far on a GPU, and its layers by themselves."""
        return (*self._calls.ways, *(way for layer in self.layers for way in getattr(layer, "ways", ())))

    def forward(self, input: Any) -> Any:
        """The block's result."""
        if compiling() or type(input) is not torch.Tensor or not on_gpu(input):
            return self._composed(input)
        first, second = self.layers
        if any(type(each) is not FusedConv or patterns.has_hooks(each) for each in (first, second)):
            return self._composed(input)
        given = self._given(input)
        if operators.needs_operators(*given):
            return self._composed(input)
        y = self._calls.run(*self._functions(), *given)
        return self._composed(input) if y is None else y

    def _given(self, input: Any) -> tuple[Any, ...]:
        first, second = self.layers
        return input, first.weight, first.bias, second.weight, second.bias

    def _functions(self) -> tuple[str | None, str]:
        """The activation between its layers, and the gate."""
        first, second = self.layers
        return first.activation, _HARD if self.hard else str(second.activation)

    def _composed(self, input: Any) -> Any:
        return gates(input, self.axes, *self.layers, self.hard) * input

    def decide(self, input: Any) -> Way:
        """How it is computed with such images, of which only what is beside values matters."""
        return decide(*self._functions(), *self._given(input))


# The operator

_NAME = "squeeze_excite"
_library = torch.library.Library("leanconv", "FRAGMENT")
_library.define(
    f"{_NAME}(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, str? activation, str gate) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
OPERATOR: Any = torch.ops.leanconv.squeeze_excite.default
_calls = Calls()


def _gates(x: Any, w1: Any, b1: Any, w2: Any, b2: Any, activation: str | None, gate: str) -> Any:
    axes = x.dim() - 2
    convolve = getattr(F, f"conv{axes}d")

    def layer(w: Any, b: Any, activation: str | None) -> Callable[[Any], Any]:
        return lambda means: torch_epilogue(convolve(means, w, b), axes, None, None, None, activation)

    hard = gate == _HARD
    return gates(x, axes, layer(w1, b1, activation), layer(w2, b2, None if hard else gate), hard)


def _by_pytorch(x: Any, *given: Any) -> Any:
    return _gates(x, *given) * x


def _kernel(x: Any, *given: Any) -> Any:
    *parameters, activation, gate = given
    y = _calls.run(activation, gate, x, *parameters) if on_gpu(x) else None
    return torch.mul(_gates(x, *given), x, out=torch.empty_like(x)) if y is None else y


for _key in ("CPU", "CUDA"):
    _library.impl(_NAME, _kernel, _key)
_library.impl(_NAME, epilogue.unless_recorded(OPERATOR, _by_pytorch, 5), "Autograd")
_library.impl(_NAME, _by_pytorch, "FuncTorchBatched")
torch.library.register_fake(f"leanconv::{_NAME}", lambda x, *given: torch.empty_like(x), lib=_library)
register_flop_formula(torch.ops.leanconv.squeeze_excite)(
    lambda x_shape, w1_shape, b1, w2_shape, *rest, out_shape: 2 * x_shape[0] * (prod(w1_shape) + prod(w2_shape))
)
