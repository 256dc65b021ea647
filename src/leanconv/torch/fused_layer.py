"""A layer of a fused model: a convolution, its bias, a residual and an activation in one kernel, or by PyTorch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.autograd import forward_ad

from leanconv.arrays import arrays_of
from leanconv.arrays.operands import together
from leanconv.call import bind, lookup
from leanconv.call.choose import NoAlgorithmError
from leanconv.call.gpu_call import Loaded
from leanconv.call.host_call import torch_epilogue
from leanconv.call.resolve import layer_problem, resolve
from leanconv.dtypes import DTYPES
from leanconv.options import (
    FUNCTIONS,
    LAYOUTS_OF,
    Kept,
    LayerOptions,
    Layout,
    Precision,
    activation_parts,
    layer_options,
    limit_of,
)
from leanconv.problem import ConvProblem
from leanconv.runtime.bounded_cache import BoundedCache
from leanconv.runtime.compile import CompileError
from leanconv.runtime.driver import CudaUnavailableError
from leanconv.torch import comparing, operators
from leanconv.torch.deciding import Decision
from leanconv.torch.layers import stricter, tf32_allowed
from leanconv.torch.packed import PackedFilters, signature
from leanconv.torch.switches import alike, capturing, compiling, dispatch_modes, on_gpu, tracing, transforms

F = torch.nn.functional
_DTYPES = torch.float32, torch.float16, torch.bfloat16
_INPLACE: dict[str, Callable[[Any, float], Any]] = {
    "relu": lambda y, _: y.relu_(),
    "relu6": lambda y, _: F.relu6(y, inplace=True),
    "leaky_relu": lambda y, slope: F.leaky_relu(y, slope, inplace=True),
    "elu": lambda y, alpha: F.elu(y, alpha, inplace=True),
    "silu": lambda y, _: F.silu(y, inplace=True),
    "hardswish": lambda y, _: F.hardswish(y, inplace=True),
    "sigmoid": lambda y, _: y.sigmoid_(),
    "tanh": lambda y, _: y.tanh_(),
}

_NOT_COPIED = "_ways", "_kept", "_ones", "_quick", "_looks"
#: as of `leanconv.torch.decided.Layer`
_MOST_LOOKS, _SELDOM = 8, 64
#: how often all that was chosen has been dropped, as after tuning
_forgotten = [0]


def _choose_anew() -> None:
    _forgotten[0] += 1


bind.also_forget.append(_choose_anew)


class Way(NamedTuple):
    """How a layer is computed with images of one kind."""

    runs: str
    #: what is computed: shapes where that is no problem of ours
    problem: ConvProblem | str
    why: str
    #: a call of leanconv's; None where PyTorch computes alone
    requested: LayerOptions | None = None
    #: what that call computes, and on which GPU
    kernel: ConvProblem | None = None
    device: int | None = None
    #: whether the call is `comparing.one_pass`, behind PyTorch's convolution
    behind: bool = False


class Quick(NamedTuple):
    """A call as the one before, known by a guard: see `leanconv.torch.decided`."""

    check: Callable[..., bool]
    call: Callable[..., Any]
    weights: Any
    #: address of the filters, alignment of the images and of the residual
    at: tuple[Any, ...]
    tf32: bool
    forgotten: int

    def fits(self, parameters: Any, input: Any, add: Any) -> bool:
        """Whether a call is one."""
        w_at, aligned, add_aligned = self.at
        if type(input) is not torch.Tensor or input.is_nested or dispatch_modes() or _forgotten[0] != self.forgotten:
            return False
        weight, bias = parameters["weight"], parameters["bias"]
        if add is None:
            if add_aligned is not None:
                return False
            same = self.check(input, weight) if bias is None else self.check(input, weight, bias)
        else:
            if add_aligned is None or type(add) is not torch.Tensor or add.is_nested:
                return False
            same = self.check(input, weight, add) if bias is None else self.check(input, weight, bias, add)
            same = same and add.data_ptr() & 15 == add_aligned
        return (
            same
            and input.data_ptr() & 15 == aligned
            and weight.data_ptr() == w_at
            and (input.dtype is not torch.float32 or self.tf32 is tf32_allowed())
        )


class FusedConv(torch.nn.Module):
    """What `fuse` puts in place of a convolution and what follows it: ``y = activation(conv(input) + bias + add)``.

    ``weight`` and ``bias`` are those of the convolution, a batch normalisation folded into them. On a GPU it decides
    for each kind of images, as `enable` does, who is expected to be quicker.
    """

    #: what it is made of, such as "conv+bn+relu", and the convolution's name in the model
    what: str
    name: str
    #: what a residual is added to in place, whose type the result has then: the convolution's "result", or the
    #: "residual"; empty where it is added to neither
    into = ""
    #: whether a normalisation is folded into it, which takes the channels of a signal without a batch for samples
    needs_batch = False

    def __init__(
        self, conv: Any, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None, what: str, name: str,
        precision: Precision,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", None if bias is None else torch.nn.Parameter(bias, requires_grad=False))
        self.stride, self.padding, self.dilation, self.groups = conv.stride, conv.padding, conv.dilation, conv.groups
        self.activation, self.what, self.name, self.precision = activation, what, name, precision
        self.train(False)
        self._begin()

    def _begin(self) -> None:
        self._ways: BoundedCache[Any, Way] = BoundedCache(256)
        self._kept: PackedFilters | None = None
        self._ones: torch.Tensor | None = None
        self._quick: Quick | None = None
        self._looks = 0

    def __getstate__(self) -> dict[str, Any]:
        """What is decided and packed is not copied."""
        return {name: value for name, value in self.__dict__.items() if name not in _NOT_COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    def extra_repr(self) -> str:
        """Sizes and options."""
        k, c, *window = self.weight.shape
        more = "" if self.activation is None else f", activation={self.activation!r}"
        sizes = f"{c * self.groups}, {k}, kernel_size={tuple(window)}"
        return f"{sizes}, stride={self.stride}, padding={self.padding}{more}"

    @property
    def ways(self) -> tuple[Way, ...]:
        """How it has been computed so far on a GPU."""
        return tuple(self._ways.values())

    def forward(self, input: Any, add: Any = None) -> Any:
        """The layer's result; ``add`` is a residual."""
        if compiling():
            return self._composed(self._convolved(input, self.bias), add)
        quick = self._quick
        tangents = forward_ad._current_level >= 0
        if quick is not None and not tangents and quick.fits(self._parameters, input, add):
            own = self._parameters["bias"]
            return quick.call(input, quick.weights, together(own, None, add), None)
        if tangents or transforms() is not None or tracing() is not None:
            return self._composed(self._convolved(input, self.bias), add)
        weight, bias = self.weight, self.bias
        if type(input) is not torch.Tensor or not on_gpu(input) or not operators.is_plain(input, add):
            return self._by_pytorch(input, add)
        try:
            key = (
                input.shape, input.stride(), input.dtype, input.device, None if add is None else add.shape,
                add is None or add.dtype, tf32_allowed(), signature(weight), _forgotten[0],
            )  # fmt: skip
            way = self._ways.get(key) or self._ways.recall(key)
        except (RuntimeError, AttributeError):  # a tensor without memory or sizes
            return self._by_pytorch(input, add)
        if way is None:
            way = self.decide(input, add)
            self._ways.keep(key, way)
        if way.requested is None or self._is_recorded(input, add):
            return self._by_pytorch(input, add)
        beside = together(bias, None, add)
        if way.behind:
            ones = self._ones_like(weight)
            if ones is None:
                return self._by_pytorch(input, add)
            return lookup.run(way.requested, self._convolved(input, None), ones, beside)
        if weight.is_inference():  # whose changes PyTorch does not count
            return lookup.run(way.requested, input, weight, beside)
        kept = self._kept
        if kept is None or kept.signature != signature(weight):
            kept = self._kept = PackedFilters(weight, 2, "quickest")
        y = lookup.run(way.requested, input, kept.weights, beside)
        self._look(way.requested, kept.weights, input, add)
        return y

    def _look(self, requested: LayerOptions, weights: Any, input: Any, add: Any) -> None:
        """Let the next call that is as this one skip the keys. A layer that is called otherwise each time seldom
        looks."""
        self._looks += 1
        given = [each for each in (input, self.weight, self.bias, add) if each is not None]
        if (self._looks > _MOST_LOOKS and self._looks % _SELDOM) or any(each.requires_grad for each in given):
            return
        check = alike(*given)
        if check is not None:
            call = bind.bind(resolve(requested, input, weights, together(self.bias, None, add)))
            at = self.weight.data_ptr(), input.data_ptr() & 15, None if add is None else add.data_ptr() & 15
            self._quick = Quick(check, call, weights, at, tf32_allowed(), _forgotten[0])

    def _ones_like(self, weight: Any) -> Any:
        """Filters of one tap that are 1; None in the capture of a CUDA graph, whose memory they would be."""
        ones = self._ones
        if ones is None or ones.dtype != weight.dtype or ones.device != weight.device:
            if capturing():
                return None
            shape = (weight.shape[0], *(1,) * (weight.dim() - 1))
            ones = self._ones = torch.ones(shape, dtype=weight.dtype, device=weight.device)
        return ones

    def _is_recorded(self, input: Any, add: Any) -> bool:
        given = input, add, self.weight, self.bias
        return torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in given)

    # By PyTorch

    def _convolved(self, input: Any, bias: Any) -> Any:
        axes = len(self.stride)
        if axes == 1 and self.needs_batch and not isinstance(input, fx.Proxy) and input.dim() == 2:
            raise ValueError(
                f"{self.name} has a batch normalisation folded into it: its signals need an axis of samples"
            )
        convolve = getattr(F, f"conv{axes}d")
        return convolve(input, self.weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def _composed(self, y: Any, add: Any) -> Any:
        dtype = getattr(add, "dtype", None)
        if self.into and dtype is not None and dtype is not y.dtype:
            y, add = (y + add).to(y.dtype if self.into == "result" else dtype), None
        return torch_epilogue(y, len(self.stride), None, None, add, self.activation)

    def _by_pytorch(self, input: Any, add: Any) -> Any:
        """PyTorch's convolution, and what follows in place, where nothing else has to know of its result."""
        y = self._convolved(input, self.bias)
        if type(y) is not torch.Tensor or self._is_recorded(y, add):
            return self._composed(y, add)
        if add is not None:
            alike = type(add) is torch.Tensor and (add.shape, add.dtype, add.device) == (y.shape, y.dtype, y.device)
            if not alike:
                return self._composed(y, add)
            y = y.add_(add)
        name, number = activation_parts(self.activation) if self.activation else ("", 0.0)
        inplace = _INPLACE.get(name)
        return self._composed(y, None) if inplace is None else inplace(y, number)

    # Who computes

    def decide(self, input: Any, add: Any = None) -> Way:
        """How it is computed with such images and such a residual, of which only what is beside values matters."""
        arrays, axes = arrays_of(input), self.weight.dim() - 2
        index = None if arrays is None else arrays.device(input)
        shape = f"{tuple(input.shape)} by {tuple(self.weight.shape)}"
        if index is None or input.dtype not in _DTYPES or self.weight.dtype != input.dtype:
            return Way("PyTorch", shape, f"its dtypes are {input.dtype} and {self.weight.dtype}")
        if self.weight.device != input.device or input.dim() != axes + 2 or not input.numel():
            return Way("PyTorch", shape, "its shape or its place is not one for leanconv")
        requested = self._requested(input)
        try:
            problem, of_result = self._problem(input, add, requested)
            why = _why_not(add, input, of_result)
            return Way("PyTorch", problem, why) if why else self._quickest(requested, problem, index)
        except (ValueError, TypeError) as error:
            return Way("PyTorch", shape, str(error))
        except (CudaUnavailableError, CompileError) as error:
            warnings.warn(f"leanconv leaves {shape} to PyTorch: {error}", RuntimeWarning, stacklevel=2)
            return Way("PyTorch", shape, str(error).splitlines()[0])

    def _quickest(self, requested: LayerOptions, problem: ConvProblem, index: int) -> Way:
        """The fused kernel; PyTorch's convolution with one pass behind it; or PyTorch alone."""
        behind = _loaded(single := comparing.one_pass(problem), index, "") if comparing.parts(problem) > 1 else None
        whole = _loaded(problem, index, "quickest")
        if whole is None and behind is None:
            return Way("PyTorch", problem, "no algorithm can run it")
        target = (whole or behind).device.target  # type: ignore[union-attr]
        passes = comparing.passes_cycles(problem, target)
        cycles = math.inf if behind is None else comparing.one_pass_cycles(behind, single)
        tf32 = tf32_allowed() and problem.dtype == "float32"
        decision = Decision("", "no algorithm can run it")
        if whole is not None:
            # filters stay packed, in CUDA graphs too
            decision = comparing.fused(whole, problem, tf32, min(passes, cycles), packed=True)
        if decision.name:
            return Way(f"leanconv: {decision.name}", problem, decision.why, requested, problem, index)
        if behind is not None and cycles < passes:
            runs = f"PyTorch, then leanconv: {behind.choice.algorithm.name}"
            return Way(runs, problem, decision.why, self._pass_options(requested), single, index, True)
        return Way("PyTorch", problem, decision.why)

    def _pass_options(self, requested: LayerOptions) -> LayerOptions:
        return layer_options(
            requested.function, groups=self.weight.shape[0], layout=requested.layout, activation=self.activation,
            differentiated=True,
        )  # fmt: skip

    def _requested(self, input: Any) -> LayerOptions:
        axes = self.weight.dim() - 2
        single = input.dtype is torch.float32 and tf32_allowed()
        precision = self.precision if single else stricter(self.precision, "fp32")
        last = axes > 1 and any(operators.is_channels_last(each) for each in (input, self.weight))
        numbers = self.stride, self.padding, self.dilation
        stride, padding, dilation = (n[0] if axes == 1 and isinstance(n, tuple) else n for n in numbers)
        return layer_options(
            f"conv{axes}d", stride, padding, dilation, self.groups, LAYOUTS_OF[axes][last], "auto", precision,
            self.activation, differentiated=True,
        )  # fmt: skip

    def _problem(self, input: Any, add: Any, requested: LayerOptions) -> tuple[ConvProblem, tuple[int, ...]]:
        """What is computed, and the shape of the result."""
        axes = FUNCTIONS[requested.function].axes
        dtype = DTYPES[str(input.dtype).removeprefix("torch.")].name
        bias = None if self.bias is None else (self.weight.shape[0],)
        layout: Layout = "NHWC" if LAYOUTS_OF[axes].index(requested.layout) else "NCHW"
        problem = layer_problem(requested, tuple(input.shape), tuple(self.weight.shape), bias, dtype, layout)
        shape = (problem.n, problem.k, *(problem.z, problem.p, problem.q)[-axes:])
        return replace(problem, add=add is not None), shape


def _loaded(problem: ConvProblem, index: int, kept: Kept) -> Loaded | None:
    """What is chosen for a problem; None where nothing fits."""
    try:
        return bind.load(problem, index, "auto", limit_of(None), kept)
    except NoAlgorithmError:
        return None


def _why_not(add: Any, input: Any, shape: tuple[int, ...]) -> str:
    """Why a residual cannot be added by the kernel; empty if it can."""
    if add is None:
        return ""
    if not isinstance(add, torch.Tensor) or tuple(add.shape) != shape:
        return f"its residual has shape {tuple(add.shape)}, and the result {shape}"
    if (add.dtype, add.device) != (input.dtype, input.device):
        return f"its residual is {add.dtype} on {add.device}"
    return ""
