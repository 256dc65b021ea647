"""Describe a call: validate its arguments, find the device that runs it, make its problem.

There is one function for each public one, with the same arguments. All raise as the call itself would. Nothing is
computed here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from leanconv import dtypes
from leanconv.arrays import Shape
from leanconv.arrays.operands import AxisOrder, Operands, check_dtypes, filter_operands, layer_operands
from leanconv.call import arguments
from leanconv.call.weights import PreparedWeights, kernel_beside
from leanconv.dtypes import DtypeName
from leanconv.problem import BORDERS, PRECISIONS, ConvProblem, FilterProblem, Layout, Op, Problem
from leanconv.runtime.launch import device_index

#: Why gradients of filters refuse ``batch_invariant``.
NO_IMAGES_BITS = (
    "batch_invariant=True: the gradient of the filters is a sum over the images of a batch, so another batch has "
    "another one; forward layers and gradients of the input take it"
)


@dataclass(frozen=True)
class Described:
    """All that a call's arrays and arguments determine: `bind` makes a ready call from it."""

    problem: Problem
    operands: Operands
    #: GPU that runs it, None for the CPU; differs from where the operands lie only for NumPy arrays
    device: int | None
    #: of the result, as the library shows it
    shape: Shape
    #: what ``w`` was, where the caller gave prepared filters
    weights: PreparedWeights | None = None
    algorithm: str = "auto"
    #: bytes, as given by the caller or the environment; None for neither
    workspace_limit: int | None = None

    @property
    def given(self) -> tuple[Any, Any, Any, Any]:
        """x, w, bias and out as the ready call takes them."""
        operands = self.operands
        return operands.x, operands.w if self.weights is None else self.weights, operands.bias, operands.out


def conv2d(
    x: Any, w: Any, bias: Any, out: Any, workspace_limit: Any, stride: Any, padding: Any, dilation: Any, groups: Any,
    batch_invariant: Any, layout: Any, algorithm: Any, precision: Any, activation: Any, device: Any,
) -> Described:  # fmt: skip
    """Describe a call of `leanconv.conv2d`."""
    operands, axes = layer_operands(x, _filters(w), bias, out, ("x", "w"), layout, arguments.LAYOUTS)
    problem = conv_problem(
        *_shapes(operands, axes), stride, padding, dilation, groups, dtype=operands.dtype, layout=axes.layout,
        precision=precision, activation=activation, batch_invariant=batch_invariant,
    )  # fmt: skip
    shape = axes.shown(_as_many((problem.n, problem.k, problem.p, problem.q), operands.x))
    return _layer(problem, operands, w, shape, device, algorithm, workspace_limit)


def conv1d(
    x: Any, w: Any, bias: Any, out: Any, workspace_limit: Any, stride: Any, padding: Any, dilation: Any, groups: Any,
    batch_invariant: Any, layout: Any, algorithm: Any, precision: Any, activation: Any, device: Any,
) -> Described:  # fmt: skip
    """Describe a call of `leanconv.conv1d`: a layer of images of one row."""
    operands, axes = layer_operands(x, _filters(w), bias, out, ("x", "w"), layout, arguments.LAYOUTS_1D)
    problem = conv1d_problem(
        *_shapes(operands, axes), stride, padding, dilation, groups, dtype=operands.dtype,
        layout=arguments.LAYOUTS[arguments.LAYOUTS_1D.index(axes.layout)], precision=precision, activation=activation,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    shape = axes.shown(_as_many((problem.n, problem.k, problem.q), operands.x))
    return _layer(problem, operands, w, shape, device, algorithm, workspace_limit)


def conv2d_input(
    grad: Any, w: Any, bias: None, out: Any, workspace_limit: Any, input_shape: Any, stride: Any, padding: Any,
    dilation: Any, groups: Any, batch_invariant: Any, layout: Any, algorithm: Any, precision: Any, device: Any,
) -> Described:  # fmt: skip
    """Describe a call of `leanconv.conv2d_input`."""
    operands, axes = layer_operands(grad, _filters(w), bias, out, ("grad", "w"), layout, arguments.LAYOUTS)
    _check_gradient("grad", operands.dtype)
    grad_shape, w_shape, _ = _shapes(operands, axes)
    input_shape = arguments.sizes("input_shape", input_shape)
    for name, shape in (("grad", grad_shape), ("input_shape", input_shape)):
        _check_axes(name, shape, 4)
    if len(grad_shape) != len(input_shape):
        raise ValueError(
            f"grad has shape {tuple(operands.x.shape)} and input_shape={input_shape}: "
            "either both have a batch axis, or neither"
        )
    forward = conv_problem(
        axes.logical(input_shape), w_shape, None, stride, padding, dilation, groups, dtype=operands.dtype,
        layout=axes.layout, precision=precision, activation=None, name="input_shape", batch_invariant=batch_invariant,
    )  # fmt: skip
    expected = _as_many((forward.n, forward.k, forward.p, forward.q), operands.x)
    if grad_shape != expected:
        raise ValueError(
            f"grad has shape {tuple(operands.x.shape)}, but the output has {axes.shown(expected)} for "
            f"input_shape={input_shape}, w of shape {tuple(operands.w.shape)}, stride={stride!r}, padding={padding!r}, "
            f"dilation={dilation!r} and groups={groups}"
        )
    return _layer(replace(forward, op="dgrad"), operands, w, input_shape, device, algorithm, workspace_limit)


def conv2d_weight(
    x: Any, grad: Any, bias: Any, out: Any, workspace_limit: Any, weight_shape: Any, stride: Any, padding: Any,
    dilation: Any, groups: Any, batch_invariant: Any, layout: Any, algorithm: Any, precision: Any, device: Any,
) -> Described:  # fmt: skip
    """Describe a call of `leanconv.conv2d_weight`; ``bias`` is where the gradient of the bias goes, or None."""
    options = (weight_shape, stride, padding, dilation, groups, batch_invariant)
    return _weight(x, grad, bias, out, workspace_limit, options, layout, algorithm, precision, device, 4)


def conv1d_weight(
    x: Any, grad: Any, bias: Any, out: Any, workspace_limit: Any, weight_shape: Any, stride: Any, padding: Any,
    dilation: Any, groups: Any, batch_invariant: Any, layout: Any, algorithm: Any, precision: Any, device: Any,
) -> Described:  # fmt: skip
    """Describe a call of `leanconv.conv1d_weight`: a layer of images of one row."""
    options = (weight_shape, stride, padding, dilation, groups, batch_invariant)
    return _weight(x, grad, bias, out, workspace_limit, options, layout, algorithm, precision, device, 3)


def _weight(
    x: Any, grad: Any, bias: Any, out: Any, workspace_limit: Any, options: tuple[Any, ...], layout: Any,
    algorithm: Any, precision: Any, device: Any, many: int,
) -> Described:  # fmt: skip
    """A gradient of filters of ``many`` axes."""
    weight_shape, stride, padding, dilation, groups, batch_invariant = options
    if arguments.yes_or_no("batch_invariant", batch_invariant):
        raise ValueError(NO_IMAGES_BITS)
    layouts: tuple[str, ...] = arguments.LAYOUTS if many == 4 else arguments.LAYOUTS_1D
    operands, axes = layer_operands(x, grad, bias, out, ("x", "grad"), layout, layouts, out_axes=many)
    _check_gradient("x", operands.dtype)
    x_shape, grad_shape, bias_shape = _shapes(operands, axes)
    weight_shape = arguments.sizes("weight_shape", weight_shape)
    for name, shape in (("x", x_shape), ("grad", grad_shape)):
        _check_axes(name, shape, many)
    if len(x_shape) != len(grad_shape):
        raise ValueError(
            f"x has shape {tuple(operands.x.shape)} and grad {tuple(operands.w.shape)}: "
            "either both have a batch axis, or neither"
        )
    forward = (conv_problem if many == 4 else conv1d_problem)(
        x_shape, axes.logical(weight_shape), bias_shape, stride, padding, dilation, groups, dtype=operands.dtype,
        layout=arguments.LAYOUTS[layouts.index(axes.layout)], precision=precision, activation=None,
        filters="weight_shape",
    )  # fmt: skip
    outputs = (forward.p, forward.q) if many == 4 else (forward.q,)
    expected = _as_many((forward.n, forward.k, *outputs), operands.x)
    if grad_shape != expected:
        raise ValueError(
            f"grad has shape {tuple(operands.w.shape)}, but the output has {axes.shown(expected)} for "
            f"x of shape {tuple(operands.x.shape)}, weight_shape={weight_shape}, stride={stride!r}, "
            f"padding={padding!r}, dilation={dilation!r} and groups={groups}"
        )
    return _layer(replace(forward, op="wgrad"), operands, grad, weight_shape, device, algorithm, workspace_limit)


def filter2d(
    image: Any, kernel: Any, bias: None, out: Any, workspace_limit: Any, border: Any, anchor: Any, device: Any
) -> Described:
    """Describe a call of `leanconv.filter2d`; its algorithms need no workspace, and ``bias`` is None."""
    operands, x_pitch, y_pitch = filter_operands(image, kernel_beside(image, kernel), out)
    shape, w_shape = tuple(operands.x.shape), tuple(operands.w.shape)
    problem = filter_problem(shape, w_shape, border, anchor, operands.dtype)
    shape = (*shape[:-2], *w_shape[:-2], *shape[-2:])
    operands.check_out(shape)
    if x_pitch is not None:
        problem = replace(problem, x_pitch=x_pitch[0], x_step=x_pitch[1])
    if y_pitch is not None:
        problem = replace(problem, y_pitch=y_pitch[0], y_step=y_pitch[1])
    return Described(problem, operands, _place(operands, device), shape)


def _check_gradient(name: str, dtype: DtypeName) -> None:
    """Raise TypeError unless layers of this type have gradients."""
    if dtypes.is_integer(dtype):
        raise TypeError(f"{name} has dtype {dtype}; gradients are of floating-point layers")


def _filters(w: Any) -> Any:
    """The array that prepared filters stand for."""
    return w.array if isinstance(w, PreparedWeights) else w


def _shapes(operands: Operands, axes: AxisOrder) -> tuple[Shape, Shape, Shape | None]:
    """The shapes of x and w in the order N, C, ..., and that of the bias."""
    x, w = (axes.logical(tuple(array.shape)) for array in (operands.x, operands.w))
    return x, w, None if operands.bias is None else tuple(operands.bias.shape)


def _as_many(shape: Shape, x: Any) -> Shape:
    """The shape of a result N, K, ... with as many axes as x: without the batch where x has none."""
    return shape[-len(x.shape) :]


def _layer(
    problem: ConvProblem, operands: Operands, w: Any, shape: Shape, device: Any, algorithm: str, limit: Any
) -> Described:
    operands.check_out(shape)
    weights = w if isinstance(w, PreparedWeights) else None
    limit = arguments.workspace_limit(limit)
    return Described(problem, operands, _place(operands, device), shape, weights, algorithm, limit)


def _place(operands: Operands, device: Any) -> int | None:
    """Number of the GPU that runs the call, None for the CPU."""
    home = operands.device
    if device is None or (str(device) == "cpu" and home is None):
        return home
    index = None if str(device) == "cpu" else device_index(device)
    if operands.arrays.moves_to_gpu:
        return index
    if index != home and not (home is not None and str(device) == "cuda"):
        where = "the CPU" if home is None else f"cuda:{home}"
        raise ValueError(f"device={device!r}, but the arrays lie on {where}; move them there, or leave device out")
    return home


def conv_problem(
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    bias_shape: Sequence[int] | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: Any,
    *,
    dtype: DtypeName,
    layout: Layout,
    precision: Any,
    activation: Any,
    name: str = "x",
    filters: str = "w",
    one_axis: bool = False,
    batch_invariant: Any = False,
) -> ConvProblem:
    """The problem of a convolution; ``x_shape`` is (n, c, h, w), or (c, h, w), and ``w_shape`` (k, c / groups, r, s).

    Messages call ``x_shape`` by ``name`` and ``w_shape`` by ``filters``, and speak of signals with ``one_axis``.
    """
    _check_axes(name, x_shape, 4)
    _check_filter_axes(w_shape, 4, filters)
    precision = arguments.one_of("precision", precision, PRECISIONS)
    activation = arguments.one_of("activation", activation, arguments.ACTIVATIONS)
    groups = arguments.integer("groups", groups, 1)
    stride, dilation = arguments.pair("stride", stride, 1), arguments.pair("dilation", dilation, 1)
    n, c, h, w = (1, *x_shape)[-4:]
    k, group_c, r, s = w_shape
    if min(c, h, w) < 1:
        held = f"signals of {c} channels and {w} samples"
        held = held if one_axis else f"images of {c} channels, {h} rows and {w} columns"
        raise ValueError(f"{name} has {n} {held}; only its batch may be empty")
    if min(w_shape) < 1:
        held = f"{group_c} channels and {s} taps" if one_axis else f"{group_c} channels, {r} rows and {s} columns"
        raise ValueError(f"{filters} has {k} filters of {held}; it must not be empty")
    if c % groups:
        raise ValueError(f"in_channels={c} is not divisible by groups={groups}")
    if k % groups:
        raise ValueError(f"out_channels={k} is not divisible by groups={groups}")
    if group_c != c // groups:
        raise ValueError(
            f"{filters} has {group_c} channels, but {name} has in_channels={c} and groups={groups}, read as {layout}: "
            f"each filter must have {c // groups}"
        )
    if bias_shape is not None and tuple(bias_shape) != (k,):
        raise ValueError(f"bias has shape {tuple(bias_shape)}; it must have shape ({k},), a number a filter")
    if dtypes.is_integer(dtype) and group_c * r * s > dtypes.most_products(dtype):
        raise ValueError(
            f"a filter of {group_c} channels of {r}x{s} has {group_c * r * s} products: their sum could overflow "
            f"int32; {dtype} by {dtypes.weights_of(dtype)} takes at most {dtypes.most_products(dtype)}"
        )
    sides = arguments.four_sides(padding, (r, s), stride, dilation)
    problem = ConvProblem(
        n=n, c=c, h=h, w=w, k=k, r=r, s=s, stride=stride, padding=sides, dilation=dilation, groups=groups, dtype=dtype,
        layout=layout, precision=precision, bias=bias_shape is not None, activation=activation,
        batch_invariant=arguments.yes_or_no("batch_invariant", batch_invariant),
    )  # fmt: skip
    if problem.p < 1 or problem.q < 1:
        top, bottom, left, right = sides
        if one_axis:
            raise ValueError(
                f"the output would be empty: a filter of {s} taps with dilation {dilation[1]} covers "
                f"{dilation[1] * (s - 1) + 1} samples, the padded input has {w + left + right}"
            )
        raise ValueError(
            f"the output would be {max(problem.p, 0)}x{max(problem.q, 0)}: a {r}x{s} filter with dilation {dilation} "
            f"covers {dilation[0] * (r - 1) + 1}x{dilation[1] * (s - 1) + 1} pixels, the padded input has "
            f"{h + top + bottom}x{w + left + right}"
        )
    return problem


def _check_axes(name: str, shape: Sequence[int], axes: int) -> None:
    """Raise ValueError unless images, or signals, have that many axes, or one less: no batch."""
    if len(shape) not in (axes, axes - 1):
        raise ValueError(
            f"{name} has {len(shape)} dimensions, shape {tuple(shape)}; it must have {axes}, "
            f"or {axes - 1} without a batch"
        )


def _check_filter_axes(shape: Sequence[int], axes: int, name: str = "w") -> None:
    if len(shape) != axes:
        raise ValueError(f"{name} has {len(shape)} dimensions, shape {tuple(shape)}; it must have {axes}")


def conv1d_problem(
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    bias_shape: Sequence[int] | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: Any,
    *,
    filters: str = "w",
    **options: Any,
) -> ConvProblem:
    """The problem of a convolution along one axis, as images of one row; ``x_shape`` is (n, c, w) or (c, w).

    ``padding`` is a number, (left, right) or a word; everything else is as in `conv_problem`.
    """
    _check_axes("x", x_shape, 3)
    _check_filter_axes(w_shape, 3, filters)
    (*batch, c, w), (k, group_c, s) = x_shape, w_shape
    stride, dilation = arguments.single("stride", stride, 1), arguments.single("dilation", dilation, 1)
    return conv_problem(
        (*batch, c, 1, w), (k, group_c, 1, s), bias_shape, (1, stride),
        (0, 0, *arguments.two_sides(padding, s, stride, dilation)), (1, dilation), groups, one_axis=True,
        filters=filters, **options,
    )  # fmt: skip


def filter_problem(
    image_shape: Sequence[int], kernel_shape: Sequence[int], border: Any, anchor: Any, dtype: DtypeName
) -> FilterProblem:
    """The problem of filtering contiguous images (…, h, w) with a kernel (kh, kw), or with several (f, kh, kw)."""
    if len(image_shape) < 2:
        raise ValueError(f"image has shape {tuple(image_shape)}; it must have 2 dimensions or more (..., h, w)")
    if len(kernel_shape) not in (2, 3):
        raise ValueError(
            f"kernel has {len(kernel_shape)} dimensions, shape {tuple(kernel_shape)}; it must have 2, "
            "or 3 for several kernels (f, kh, kw)"
        )
    filters, kh, kw = (1, *kernel_shape)[-3:]
    if min(kernel_shape) < 1:
        raise ValueError(f"kernel has shape {tuple(kernel_shape)}; it must not be empty")
    *leading, h, w = image_shape
    batch = 1
    for length in leading:
        batch *= length
    return FilterProblem(
        batch=batch, h=h, w=w, kh=kh, kw=kw, anchor=arguments.anchor_of(anchor, kh, kw),
        border=arguments.border_name(border), dtype=dtype, x_pitch=w, x_step=h * w, y_pitch=w, y_step=h * w,
        filters=filters,
    )  # fmt: skip


def check_problem(problem: Any) -> None:
    """Raise what a call with the arguments of ``problem`` would; a caller may have written it by hand."""
    sizes = ("batch", "h", "w", "kh", "kw") if problem.kind == "filter2d" else ("n", "c", "h", "w", "k", "r", "s")
    for name in sizes:
        arguments.integer(name, getattr(problem, name), 0, math.inf)
    if problem.kind == "filter2d":
        arguments.integer("filters", problem.filters, 1)
        check_dtypes({"the problem": problem.dtype}, dtypes.FILTERS)
        arguments.one_of("border", problem.border, BORDERS)
        for part in problem.anchor:
            arguments.integer("anchor", part, 0)
        image_shape = (problem.batch, problem.h, problem.w)
        filter_problem(image_shape, problem.w_shape, problem.border, problem.anchor, problem.dtype)
        return
    check_dtypes({"the problem": problem.dtype}, dtypes.LAYERS)
    arguments.one_of("layout", problem.layout, arguments.LAYOUTS)
    arguments.one_of("op", problem.op, get_args(Op))
    if problem.op != "fprop":
        _check_gradient("the problem", problem.dtype)
    if problem.op == "dgrad" and (problem.bias or problem.activation):
        raise ValueError("op='dgrad', the gradient of a layer's input, has no bias and no activation")
    if problem.op == "wgrad" and problem.activation:
        raise ValueError("op='wgrad', the gradient of a layer's filters, has no activation")
    if problem.op == "wgrad" and problem.batch_invariant:
        raise ValueError(NO_IMAGES_BITS)
    arguments.integer("groups", problem.groups, 1)
    conv_problem(
        (problem.n, problem.c, problem.h, problem.w), (problem.k, problem.group_c, problem.r, problem.s), None,
        problem.stride, problem.padding, problem.dilation, problem.groups, dtype=problem.dtype,
        layout=problem.layout, precision=problem.precision, activation=problem.activation,
        batch_invariant=problem.batch_invariant,
    )  # fmt: skip
