"""Convolutions with the signatures of torch.nn.functional, and gradients of any order, on the GPU by leanconv."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_variadic

from leanconv import options as rules
from leanconv.call import lookup
from leanconv.call.resolve import check_axes, layer_problem, transposed_axis
from leanconv.call.weights import PreparedWeights
from leanconv.dtypes import DTYPES
from leanconv.options import Activation, Precision, padding_word, sides_for
from leanconv.torch import epilogue, operators
from leanconv.torch.switches import without_axis

Numbers = int | Sequence[int]
#: what functions take by name alone
_NAMED = "precision", "batch_invariant", "activation", "scale", "add"
_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
_tracing: Callable[[], Any] = torch._C._get_tracing_state
_is_compiling = torch.compiler.is_compiling


def conv2d(
    input: torch.Tensor,
    weight: torch.Tensor | PreparedWeights,
    bias: torch.Tensor | None = None,
    stride: Numbers = 1,
    padding: str | Numbers = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    *,
    precision: Precision = "fp32",
    batch_invariant: bool = False,
    activation: Activation = None,
    scale: torch.Tensor | None = None,
    add: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve images with filters, as ``torch.nn.functional.conv2d`` does; differentiable, to any order.

    ``y[n,k,p,q] = bias[k] + sum over c,r,s of weight[k,c,r,s] * input[n,c, p*stride - padding + r*dilation, ...]``

    Args:
        input: images (n, c, h, w), or (c, h, w); float32, float16 or bfloat16 on a GPU, float64 too on the CPU, where
            PyTorch itself computes. In channels_last the result is channels_last.
        weight: filters (k, c / groups, r, s) of the same dtype and device; or, where no gradient is wanted, what
            `leanconv.prepare_weights` made of them.
        bias: (k,) or None.
        stride, padding, dilation, groups: as PyTorch's; ``padding`` may be ``"same"`` or ``"valid"``, or four numbers:
            (top, bottom, left, right).
        precision: the least precise arithmetic that is allowed, as in `leanconv.conv2d`. PyTorch's switches for TF32
            have no influence.
        batch_invariant: an image has the same bits in the result of any batch, and so has its gradient; that of the
            filters is a sum over the images. See `leanconv.conv2d`.
        activation, scale, add: what follows the sum, as in `leanconv.conv2d`:
            ``y = activation(scale[k] * sum + bias[k] + add)``. Without gradients one kernel computes it, and 16 bits
            are rounded once. Where a gradient is recorded, with respect to any of the tensors and to any order, the
            convolution is followed by PyTorch's own functions, which round each by itself; so it is inside torch.func.

    Returns:
        y of shape (n, k, p, q), or (k, p, q), on the current stream.

    Raises:
        ValueError, TypeError: an argument breaks a rule, which the message names; NoAlgorithmError, a ValueError,
            where nothing fits. RuntimeError, PyTorch's own, where a tensor that backward needs was changed in place.

    Works inside torch.compile (one operator in the graph, no break), torch.func.vmap, autocast (which computes in its
    16-bit type), checkpoints and CUDA graphs. A warm call does not wait for the GPU. Equal calls give equal bits.

    >>> import torch
    >>> from leanconv.torch import conv2d
    >>> x, w = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3, requires_grad=True)
    >>> conv2d(x, w, padding=1).sum().backward()
    >>> w.grad[0, 0].tolist()
    [[9.0, 12.0, 9.0], [12.0, 16.0, 12.0], [9.0, 12.0, 9.0]]
    """
    if has_torch_function_variadic(input, weight, bias, scale, add):
        handed = input, weight, bias, stride, padding, dilation, groups
        named = precision, batch_invariant, activation, scale, add
        return _handed_on(conv2d, *handed, **dict(zip(_NAMED, named, strict=True)))
    _check_arrays(2, input, weight, bias, (torch.Tensor, PreparedWeights))
    stride, dilation = _pair("stride", stride, 1), _pair("dilation", dilation, 1)
    sides: tuple[int, ...]
    if isinstance(padding, str):
        sides = _word_sides(padding, weight.shape[-2:], stride, dilation)
    else:
        sides = _sides(padding, 2)
    rest = stride, sides, dilation, groups, precision, batch_invariant
    if activation is not None or scale is not None or add is not None:
        return _fused(2, input, weight, bias, scale, add, activation, *rest)
    if input.dim() == 3:
        return without_axis(_conv2d(input.unsqueeze(0), weight, bias, *rest), 0)
    return _conv2d(input, weight, bias, *rest)


def conv1d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Numbers = 1,
    padding: str | Numbers = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    *,
    precision: Precision = "fp32",
    batch_invariant: bool = False,
    activation: Activation = None,
    scale: torch.Tensor | None = None,
    add: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve signals with filters, as ``torch.nn.functional.conv1d`` does; differentiable, to any order.

    ``y[n,k,q] = bias[k] + sum over c,s of weight[k,c,s] * input[n,c, q*stride - padding + s*dilation]``

    Args:
        input: signals (n, c, w), or (c, w). weight: filters (k, c / groups, s), which may not be packed ones.
        padding: a number, or two, left and right. All else as in `conv2d`, which computes this as images of one row,
            without copies.

    Returns:
        y of shape (n, k, q), or (k, q).
    """
    if has_torch_function_variadic(input, weight, bias, scale, add):
        handed = input, weight, bias, stride, padding, dilation, groups
        named = precision, batch_invariant, activation, scale, add
        return _handed_on(conv1d, *handed, **dict(zip(_NAMED, named, strict=True)))
    _check_arrays(1, input, weight, bias)
    stride, dilation = _single("stride", stride, 1, 1), _single("dilation", dilation, 1, 1)
    sides: tuple[int, ...]
    if isinstance(padding, str):
        sides = _word_sides(padding, (1, weight.shape[-1]), stride, dilation)
    elif isinstance(padding, (tuple, list)) and len(padding) == 2:
        sides = _sides([0, 0, *padding], 2)
    else:
        sides = _single("padding", padding, 0, 0)
    given = stride, sides, dilation, groups, precision, batch_invariant
    if activation is not None or scale is not None or add is not None:
        return _fused(1, input, weight, bias, scale, add, activation, *given)
    x = input.unsqueeze(-2) if input.dim() == 3 else input.unsqueeze(0).unsqueeze(-2)
    if _is_compiling():
        y = without_axis(_conv2d(x, weight.unsqueeze(-2), bias, *given), -2)
        return y if input.dim() == 3 else without_axis(y, 0)
    try:
        y = without_axis(_conv2d(x, weight.unsqueeze(-2), bias, *given), -2)
    except ValueError:
        _refuse_signals(input, weight, bias, *given[:4])
        raise
    return y if input.dim() == 3 else without_axis(y, 0)


def conv_transpose2d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers = 0,
    output_padding: Numbers = 0,
    groups: int = 1,
    dilation: Numbers = 1,
    *,
    precision: Precision = "fp32",
    batch_invariant: bool = False,
) -> torch.Tensor:
    """The transposed convolution, as ``torch.nn.functional.conv_transpose2d``; differentiable, to any order.

    It is the gradient of a convolution with respect to its input (`leanconv.conv2d_input`).

    Args:
        input: images (n, c, p, q), or (c, p, q). weight: filters (c, k / groups, r, s). bias: (k,) or None; on the GPU
            16-bit results are rounded once, with it.
        output_padding: rows and columns more at the lower right end; less than stride or dilation.
        All else as in `conv2d`.

    Returns:
        y of shape (n, k, h, w) with ``h = (p - 1) * stride - 2 * padding + dilation * (r - 1) + output_padding + 1``.
    """
    if has_torch_function_variadic(input, weight, bias):
        handed = input, weight, bias, stride, padding, output_padding, groups, dilation
        return _handed_on(conv_transpose2d, *handed, precision=precision, batch_invariant=batch_invariant)
    _check_arrays(2, input, weight, bias)
    _check_filled(2, input, weight)
    stride, dilation = _pair("stride", stride, 1), _pair("dilation", dilation, 1)
    padding, output_padding = _pair("padding", padding, 0), _pair("output_padding", output_padding, 0)
    given = weight, bias, stride, padding, output_padding, groups, dilation, precision, batch_invariant
    y = _transposed(input.unsqueeze(0) if input.dim() == 3 else input, *given)
    return without_axis(y, 0) if input.dim() == 3 else y


def conv_transpose1d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers = 0,
    output_padding: Numbers = 0,
    groups: int = 1,
    dilation: Numbers = 1,
    *,
    precision: Precision = "fp32",
    batch_invariant: bool = False,
) -> torch.Tensor:
    """The transposed convolution of signals, as ``torch.nn.functional.conv_transpose1d``; differentiable.

    Args:
        input: signals (n, c, q), or (c, q). weight: filters (c, k / groups, s). All else as in `conv_transpose2d`.

    Returns:
        y of shape (n, k, w), or (k, w).
    """
    if has_torch_function_variadic(input, weight, bias):
        handed = input, weight, bias, stride, padding, output_padding, groups, dilation
        return _handed_on(conv_transpose1d, *handed, precision=precision, batch_invariant=batch_invariant)
    _check_arrays(1, input, weight, bias)
    _check_filled(1, input, weight)
    x = input.unsqueeze(-2) if input.dim() == 3 else input.unsqueeze(0).unsqueeze(-2)
    given = (
        _single("stride", stride, 1, 1), _single("padding", padding, 0, 0),
        _single("output_padding", output_padding, 0, 0), groups, _single("dilation", dilation, 1, 1),
    )  # fmt: skip
    y = without_axis(_transposed(x, weight.unsqueeze(-2), bias, *given, precision, batch_invariant), -2)
    return y if input.dim() == 3 else without_axis(y, 0)


def conv3d(
    input: torch.Tensor,
    weight: torch.Tensor | PreparedWeights,
    bias: torch.Tensor | None = None,
    stride: Numbers = 1,
    padding: str | Numbers = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    *,
    precision: Precision = "fp32",
    batch_invariant: bool = False,
    activation: Activation = None,
    scale: torch.Tensor | None = None,
    add: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve volumes with filters, as ``torch.nn.functional.conv3d`` does; differentiable, to any order.

    Args:
        input: volumes (n, c, d, h, w), or (c, d, h, w). In channels_last_3d the result is channels_last_3d. weight:
            filters (k, c / groups, t, r, s). All else as in `conv2d`.
        padding: also six numbers, (front, back, top, bottom, left, right): ``(2, 0, 1, 1, 1, 1)`` makes a layer of
            3 x 3 x 3 taps causal, without a padded copy. `CausalConv3d` is such a layer, and computes videos in parts.

    Returns:
        y of shape (n, k, z, p, q), or (k, z, p, q).

    >>> import torch
    >>> from leanconv.torch import conv3d
    >>> conv3d(torch.ones(1, 1, 3, 1, 1), torch.ones(1, 1, 3, 1, 1), padding=(2, 0, 0, 0, 0, 0)).flatten().tolist()
    [1.0, 2.0, 3.0]
    """
    if has_torch_function_variadic(input, weight, bias, scale, add):
        handed = input, weight, bias, stride, padding, dilation, groups
        named = precision, batch_invariant, activation, scale, add
        return _handed_on(conv3d, *handed, **dict(zip(_NAMED, named, strict=True)))
    _check_arrays(3, input, weight, bias, (torch.Tensor, PreparedWeights))
    stride, dilation = _three("stride", stride, 1), _three("dilation", dilation, 1)
    sides: tuple[int, ...]
    if isinstance(padding, str):
        sides = _word_sides(padding, weight.shape[-3:], stride, dilation)
    else:
        sides = _sides(padding, 3)
    if activation is not None or scale is not None or add is not None:
        rest = stride, sides, dilation, groups, precision, batch_invariant
        return _fused(3, input, weight, bias, scale, add, activation, *rest)
    given = weight, bias, stride, sides, dilation, groups, precision, batch_invariant
    way: Callable[..., Any] = _prepared if isinstance(weight, PreparedWeights) else operators.conv3d
    if _becomes_onnx():
        way = _conv2d
    return without_axis(way(input.unsqueeze(0), *given), 0) if input.dim() == 4 else way(input, *given)


def conv_transpose3d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers = 0,
    output_padding: Numbers = 0,
    groups: int = 1,
    dilation: Numbers = 1,
    *,
    precision: Precision = "fp32",
    batch_invariant: bool = False,
) -> torch.Tensor:
    """The transposed convolution of volumes, as ``torch.nn.functional.conv_transpose3d``; differentiable.

    Args:
        input: volumes (n, c, z, p, q), or (c, z, p, q). weight: filters (c, k / groups, t, r, s). All else as in
            `conv_transpose2d`.

    Returns:
        y of shape (n, k, d, h, w), or (k, d, h, w).
    """
    if has_torch_function_variadic(input, weight, bias):
        handed = input, weight, bias, stride, padding, output_padding, groups, dilation
        return _handed_on(conv_transpose3d, *handed, precision=precision, batch_invariant=batch_invariant)
    _check_arrays(3, input, weight, bias)
    _check_filled(3, input, weight)
    stride, dilation = _three("stride", stride, 1), _three("dilation", dilation, 1)
    padding, output_padding = _three("padding", padding, 0), _three("output_padding", output_padding, 0)
    given = weight, bias, stride, padding, output_padding, groups, dilation, precision, batch_invariant
    y = _transposed(input.unsqueeze(0) if input.dim() == 4 else input, *given)
    return without_axis(y, 0) if input.dim() == 4 else y


def _handed_on(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """A call that classes of its arguments, such as the proxies of torch.fx, or a function mode look at first."""
    tensors = *given[:3], named.get("scale"), named.get("add")
    return handle_torch_function(function, tensors, *given, **named)


def _check_arrays(axes: int, input: Any, weight: Any, bias: Any, kinds: Any = torch.Tensor) -> None:
    """Raise TypeError or ValueError unless these are images, or signals, filters for them, and a bias or None."""
    check_input(axes, input)
    if not isinstance(weight, kinds):
        raise TypeError(f"weight is of type {type(weight).__qualname__}; it must be a tensor of PyTorch, as input is")
    if bias is not None and not isinstance(bias, torch.Tensor):
        raise TypeError(f"bias is of type {type(bias).__qualname__}; it must be a tensor of PyTorch, or None")
    if len(weight.shape) != axes + 2:
        check_axes("weight", weight.shape, axes + 2, batch=False)


def check_input(axes: int, input: Any) -> None:
    """Raise TypeError or ValueError unless these are images, or signals or volumes, of so many axes."""
    if not isinstance(input, torch.Tensor):
        raise TypeError(
            f"input is of type {type(input).__qualname__}; leanconv.torch takes tensors of PyTorch, leanconv.conv2d "
            "and its like those of NumPy and CuPy too"
        )
    if input.dim() - axes not in (1, 2):
        check_axes("input", input.shape, axes + 2)


def _check_filled(axes: int, input: Any, weight: Any) -> None:
    """Raise ValueError where a transposed layer is given nothing but a batch that may be empty."""
    if _tracing() is not None:  # sizes are tensors then
        return
    if min(input.shape[-axes - 1 :]) < 1:
        raise ValueError(f"input has shape {tuple(input.shape)}; only its batch may be empty")
    if min(weight.shape) < 1:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; it must not be empty")


def _word_sides(word: str, window: Any, stride: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[int, ...]:
    taps = window if _tracing() is None else map(int, window)
    return sides_for(padding_word(word), tuple(taps), stride, dilation)


def _becomes_onnx() -> bool:
    """Whether a call is recorded for a file of ONNX: it is PyTorch's own there, which becomes Conv."""
    return (_tracing() is not None or _is_compiling()) and torch.onnx.is_in_onnx_export()


def _conv2d(x: Any, w: Any, bias: Any, *options: Any) -> torch.Tensor:
    if _becomes_onnx():
        stride, sides, *rest = options[:4]
        if len(sides) == 2 * len(stride):  # two for each axis, the first axis first
            around = [side for at in range(len(sides) - 2, -1, -2) for side in sides[at : at + 2]]
            x, sides = torch.nn.functional.pad(x, around), 0
        return getattr(torch.nn.functional, f"conv{len(stride)}d")(x, w, bias, stride, sides, *rest)
    return (_prepared if isinstance(w, PreparedWeights) else operators.conv2d)(x, w, bias, *options)


def _fused(*given: Any) -> torch.Tensor:
    return epilogue.of_axes(_conv2d if _becomes_onnx() else None, *given)


def _prepared(x: Any, w: PreparedWeights, bias: Any, *options: Any) -> torch.Tensor:
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, w.array, bias)):
        raise ValueError("packed weights are for calls without gradients: call it under torch.no_grad(), or pass w")
    with torch.no_grad():
        return lookup.run(operators.requested_of(f"conv{len(options[0])}d", None, *options), x, w, bias)


def _transposed(
    x: Any, w: Any, bias: Any, stride: Any, padding: Any, more: Any, groups: Any, dilation: Any, *options: Any
) -> torch.Tensor:
    if type(groups) is not int or groups < 1:
        groups = rules.integer("groups", groups, 1)
    if _becomes_onnx():
        function = getattr(torch.nn.functional, f"conv_transpose{len(stride)}d")
        return function(x, w, bias, stride, padding, more, groups, dilation)
    if _tracing() is not None:  # sizes are tensors then, which no operator takes for numbers
        operator = torch.ops.leanconv.conv_transpose2d if x.dim() == 4 else torch.ops.leanconv.conv_transpose3d
        return operator(x, w, bias, stride, padding, more, groups, dilation, *options)
    if x.shape[1] != w.shape[0]:
        raise ValueError(f"weight has {w.shape[0]} channels, but input has {x.shape[1]}: they must be the same")
    if x.shape[1] % groups:
        raise ValueError(f"in_channels={x.shape[1]} is not divisible by groups={groups}")
    filters = w.shape[1] * groups
    if bias is not None:
        _check_bias(bias, x, filters)
    shape, sides = [x.shape[0], filters], []
    ends: list[int] = []
    cut: list[int] = []
    for axis in range(len(stride)):
        if more[axis] >= max(stride[axis], dilation[axis]):
            raise ValueError(f"output_padding={tuple(more)} must be less than stride={stride} or dilation={dilation}")
        along = transposed_axis(
            x.shape[2 + axis], stride[axis], padding[axis], dilation[axis], w.shape[2 + axis], more[axis]
        )
        shape.append(along.extent)
        sides.append(along.inner)
        ends += along.padding
        cut += along.cut
    if min(shape[2:]) < 1:
        raise ValueError(
            f"the output would be {'x'.join(map(str, shape[2:]))} for input of shape {tuple(x.shape)}, weight of shape "
            f"{tuple(w.shape)}, stride={stride}, padding={padding}, dilation={dilation} and output_padding={more}"
        )
    if bias is not None and bias.dtype != x.dtype:  # autocast casts both
        bias = bias.to(x.dtype)
    gradient = operators.conv2d_input if x.dim() == 4 else operators.conv3d_input
    y = gradient(x, w, bias, (*shape[:2], *sides), stride, tuple(ends), dilation, groups, *options)
    if any(cut):
        # the last axis first
        around = [side for at in range(len(cut) - 2, -1, -2) for side in (-cut[at], cut[at + 1])]
        if bias is not None:
            outside = torch.nn.functional.pad(torch.zeros_like(y[:1, :1], dtype=torch.bool), around, value=True)
            ones = (1,) * len(stride)
            return torch.where(outside, bias.to(y.dtype).view(-1, *ones), torch.nn.functional.pad(y, around))
        y = torch.nn.functional.pad(y, around)
    return y


for _name in ("conv_transpose2d", "conv_transpose3d"):
    operators.define_composite(
        f"{_name}(Tensor x, Tensor w, Tensor? bias, int[] stride, int[] padding, int[] output_padding, int groups, "
        "int[] dilation, str precision, bool batch_invariant) -> Tensor",
        _transposed,
    )


def _check_bias(bias: Any, x: Any, filters: int) -> None:
    if bias.dim() != 1 or bias.shape[0] != filters:
        raise ValueError(f"bias has shape {tuple(bias.shape)}; it must have shape ({filters},), a number a filter")
    if bias.dtype != x.dtype and not _any_autocast():
        raise TypeError(f"bias has dtype {bias.dtype} and input {x.dtype}; they must be the same")


def _pair(name: str, value: Any, least: int) -> tuple[int, ...]:
    """An int, or a sequence of one or two, for both axes.

    Equal calls get the same object: by its identity `layer_options` knows what it has checked.
    """
    if type(value) is tuple and len(value) == 2:
        down, across = value
        if type(down) is int and type(across) is int and down >= least and across >= least:
            return value
    elif type(value) is int and value >= least:
        return _both(value, value)
    return _both(*rules.pair(name, value, least))


def _sides(padding: Any, axes: int) -> tuple[int, ...]:
    """Padding that is a number for each axis, or two: before it and behind."""
    if isinstance(padding, (tuple, list)) and len(padding) == 2 * axes:
        if type(padding) is tuple and all([type(side) is int and side >= 0 for side in padding]):
            return padding
        return _both(*[rules.integer("padding", side, 0) for side in padding])
    return _pair("padding", padding, 0) if axes == 2 else _three("padding", padding, 0)


def _three(name: str, value: Any, least: int) -> tuple[int, ...]:
    """The same for the three axes of volumes."""
    if type(value) is tuple and len(value) == 3 and all([type(each) is int and each >= least for each in value]):
        return value
    return _both(*rules.each_axis(name, value, least, 3))


@lru_cache(maxsize=256, typed=True)
def _both(*numbers: int) -> tuple[int, ...]:
    return numbers


def _refuse_signals(input: Any, weight: Any, bias: Any, stride: Any, sides: Any, dilation: Any, groups: Any) -> None:
    """Raise what `leanconv.conv1d` raises for signals that break a rule: images of one row are what computes them."""
    given = stride[1], sides[len(sides) // 2 :], dilation[1], groups
    requested = rules.layer_options("conv1d", *given, differentiated=True)
    name = str(input.dtype).removeprefix("torch.")
    biases = None if bias is None else tuple(bias.shape)
    if name in DTYPES:
        layer_problem(requested, tuple(input.shape), tuple(weight.shape), biases, DTYPES[name].name, "NCHW")


def _single(name: str, value: Any, down: int, least: int) -> tuple[int, ...]:
    """An option of signals as that of images of one row, for which it is ``down``."""
    across = value[0] if type(value) is tuple and len(value) == 1 else value
    if type(across) is not int or across < least:
        across = rules.single(name, value, least)
    return _both(down, across)
