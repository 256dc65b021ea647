"""The layers behind calls of aten::convolution: sizes, operations, what PyTorch would run, and which are selected."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch

from leanconv.arrays.memory import lies_channels_last
from leanconv.options import FUNCTIONS, PRECISIONS, Layout, Op, Precision
from leanconv.problem import ConvProblem

_DTYPES = torch.float32, torch.float16, torch.bfloat16

#: What decides which layers are taken: a pattern of names, modules, or a function of the problem.
Selection = Callable[[ConvProblem], bool] | str | torch.nn.Module | Iterable["str | torch.nn.Module"] | None


@dataclass(frozen=True)
class Options:
    """All arguments of aten::convolution besides tensors."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


_precision_of: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)


#: PyTorch's word for what its convolutions of float32 may round; before PyTorch 2.9, whether they may
conv_precision: Callable[[], Any] = (
    torch._C._get_cudnn_allow_tf32 if _precision_of is None else partial(_precision_of, "cuda", "conv")
)


#: the switch of before, which is read in half the time
_tf32_switch: Callable[[], bool] = torch._C._get_cudnn_allow_tf32


def precision_asked() -> tuple[Callable[[], Any], Any]:
    """What says soonest what convolutions of float32 may round, where the same is asked in each call; and what it says
    now.

    The switch of before raises RuntimeError where convolutions and recurrent layers differ, and PyTorch tells who first
    asks it of the new ones.
    """
    if not torch.is_warn_always_enabled():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return _tf32_switch, _tf32_switch()
        except RuntimeError:
            pass
    return conv_precision, conv_precision()


def tf32_allowed() -> bool:
    """Whether PyTorch's convolutions of float32 may round their factors to 10 bits: its default."""
    return conv_precision() in ("tf32", True)


def stricter(one: Precision, other: Precision) -> Precision:
    return PRECISIONS[min(PRECISIONS.index(one), PRECISIONS.index(other))]


def options_of(given: Any, axes: int) -> Options:
    """Of a layer of so many axes: PyTorch takes one number for all of them."""
    stride, padding, dilation, transposed, output_padding, groups = given

    def each(numbers: Any) -> tuple[int, ...]:
        return tuple(numbers) * axes if len(numbers) == 1 else tuple(numbers)

    return Options(each(stride), each(padding), each(dilation), bool(transposed), each(output_padding), int(groups))


#: leanconv's function for each operation on so many axes
FUNCTION_OF: dict[tuple[Op, int], str] = {(each.op, each.axes): name for name, each in FUNCTIONS.items()}


@dataclass(frozen=True)
class Operation:
    """One of the three operations of a layer: leanconv's name for it, and the layer's sizes as images (n, c, h, w) or
    volumes (n, c, d, h, w)."""

    when: str
    op: Op
    x_shape: tuple[int, ...]
    w_shape: tuple[int, ...]
    layout: Layout
    signals: bool
    bias: bool = False


def operations(x: Any, w: Any, options: Options, bias: bool = False) -> tuple[Operation, Operation, Operation]:
    """Forward, gradient of the input, gradient of the filters. A transposed layer is the gradient of another one."""
    signals = x.dim() == 3
    layout = _layout(x, w)
    x_shape, w_shape = tuple(x.shape), tuple(w.shape)
    if options.transposed and x.dim() in _DIMENSIONS:
        x_shape = _transposed_shape(x, w, options)
    if signals:
        x_shape, w_shape = (*x_shape[:2], 1, *x_shape[2:]), (*w_shape[:2], 1, *w_shape[2:])
    forward: Op = "dgrad" if options.transposed else "fprop"
    backward: Op = "fprop" if options.transposed else "dgrad"
    return (
        Operation("forward", forward, x_shape, w_shape, layout, signals, bias),
        Operation("backward, input", backward, x_shape, w_shape, layout, signals),
        Operation("backward, filters", "wgrad", x_shape, w_shape, layout, signals),
    )


#: of signals, images and volumes, with batch and channels
_DIMENSIONS = 3, 4, 5


def why_never(tensor: Any, w: Any, options: Options, axes: tuple[int, ...] = _DIMENSIONS) -> str:
    """Why a layer of such tensors is not for leanconv; empty if it may be."""
    if tensor.dim() not in axes:
        return f"it has {tensor.dim()} dimensions"
    if w.dtype not in _DTYPES or tensor.dtype != w.dtype:
        return f"its dtypes are {tensor.dtype} and {w.dtype}"
    if tensor.device != w.device:
        return f"its devices are {tensor.device} and {w.device}"
    if not tensor.numel() or not w.numel():
        return "it has no elements"
    if options.transposed and any(map(operator.ge, options.output_padding, options.stride)):
        return f"output_padding={options.output_padding} is not below stride={options.stride}"
    return ""


def is_channels_last(x: Any, w: Any) -> bool:
    """Whether PyTorch's result lies channels last on CUDA: if the images or the filters do."""
    return any(lies_channels_last(tuple(each.shape), tuple(each.stride())) for each in (x, w) if each.dim() > 3)


def _layout(x: Any, w: Any) -> Layout:
    return "NHWC" if is_channels_last(x, w) else "NCHW"


def _transposed_shape(x: Any, w: Any, options: Options) -> tuple[int, ...]:
    """Shape of the result of a transposed layer."""
    sides = (
        (side - 1) * stride - 2 * pad + dilation * (taps - 1) + more + 1
        for side, taps, stride, pad, dilation, more in zip(
            x.shape[2:], w.shape[2:], options.stride, options.padding, options.dilation, options.output_padding,
            strict=True,
        )
    )  # fmt: skip
    return (x.shape[0], w.shape[1] * options.groups, *sides)


def with_rows(numbers: tuple[int, ...], fill: int) -> tuple[int, ...]:
    """Numbers of two axes or three; signals are images of one row."""
    return (fill, *numbers) if len(numbers) == 1 else numbers


# Which layers

_SELECTIONS = "give names, modules, or a function of the problem"
_CONVOLUTIONS = (
    torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d, torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d,
    torch.nn.ConvTranspose3d,
)  # fmt: skip


def check_model(model: Any) -> None:
    """Raise TypeError unless it is a module."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; it must be a torch.nn.Module")


def weights_of(model: torch.nn.Module) -> Iterable[tuple[str, Any]]:
    """Name and filters of each convolution module, None for those that are computed in each call; the name of the model
    itself is that of its class."""
    check_model(model)
    for name, module in model.named_modules():
        if isinstance(module, _CONVOLUTIONS):
            own = vars(module)
            yield name or type(module).__name__, own["_parameters"].get("weight", own.get("weight"))


class Weights:
    """Whether the filters of a layer are among some; ``kept`` are those, so that an id stays one of theirs."""

    def __init__(self, kept: list[Any]) -> None:
        self.kept = [weight for weight in kept if weight is not None]
        self.ids = {*map(id, self.kept)}

    def __call__(self, identity: int | None, problem: ConvProblem) -> bool:
        return identity in self.ids


def selected(
    selection: Selection, argument: str, model: torch.nn.Module | None
) -> Callable[[int | None, ConvProblem], bool] | None:
    """A function of filters and problem that says whether a layer is selected."""
    if selection is None:
        return None
    if not isinstance(selection, (str, torch.nn.Module)) and callable(selection):
        belongs = selection

        def ask(identity: int | None, problem: ConvProblem) -> bool:
            try:
                return bool(belongs(problem))
            except (ValueError, TypeError) as error:  # with which a layer that cannot run is left
                raise RuntimeError(f"{argument} raised {type(error).__name__}: {error}") from error

        return ask
    single = isinstance(selection, (str, torch.nn.Module))
    if not single and not isinstance(selection, Iterable):
        raise TypeError(f"{argument} is of type {type(selection).__name__}; {_SELECTIONS}")
    wanted: list[Any] = [selection] if single else list(selection)  # type: ignore[arg-type]
    kept: list[Any] = []
    for each in wanted:
        if isinstance(each, torch.nn.Module):
            found = [weight for _, weight in weights_of(each)]
            if not found:
                raise ValueError(f"{argument} has a {type(each).__name__} in which there is no convolution")
        elif not isinstance(each, str):
            kind = type(each).__name__
            raise TypeError(f"{argument} has a {kind}; {_SELECTIONS}")
        elif model is None:
            raise ValueError(f"{argument}={each!r} is the name of a layer: give the model that it is of")
        else:
            found = [weight for name, weight in weights_of(model) if fnmatchcase(name, each)]
            if not found:
                raise ValueError(f"{argument}={each!r} fits the name of no convolution of the model")
        kept += found
    return Weights(kept)
