"""A call in the words of the package: its arguments checked, its place found, its problem made.

One function for each public one, whose arguments they take by their names. All raise as the call itself would. Nothing
is computed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from leanconv.arrays import Arrays, MemoryOrder, Operands, Shape, gather
from leanconv.arrays.memory import row_pitched
from leanconv.call import arguments
from leanconv.call.weights import PreparedWeights, kernel_beside
from leanconv.dtypes import FILTERS
from leanconv.problem import PRECISIONS, ConvProblem, FilterProblem, Layout, Problem
from leanconv.runtime.launch import ALIGNMENT, device_index


@dataclass(frozen=True)
class Described:
    """A call as far as its arrays and arguments decide it: what `bind` makes a ready call of."""

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
    #: of x, w and the result in memory, where it is not the one that the library shows
    order: MemoryOrder = None
    #: which of x, w and bias cannot be read as they lie
    copies: tuple[bool, bool, bool] = (False, False, False)
    #: whether the result can be written to ``out`` as it lies
    out_direct: bool = True

    @property
    def given(self) -> tuple[Any, Any, Any, Any]:
        """x, w, bias and out as the ready call takes them."""
        operands = self.operands
        return operands.x, operands.w if self.weights is None else self.weights, operands.bias, operands.out


def conv2d(
    x: Any, w: Any, bias: Any, out: Any, workspace_limit: Any, stride: Any, padding: Any, dilation: Any, groups: Any,
    layout: Any, algorithm: Any, precision: Any, activation: Any, device: Any,
) -> Described:  # fmt: skip
    """Describe a call of `leanconv.conv2d`."""
    layer = _Layer(x, w, bias, out, "x", layout, arguments.LAYOUTS)
    problem = conv_problem(
        *layer.logical_shapes, stride, padding, dilation, groups, dtype=layer.dtype, layout=layer.layout,
        precision=precision, activation=activation,
    )  # fmt: skip
    shape = layer.shown((problem.n, problem.k, problem.p, problem.q))
    return layer.described(problem, shape, device, algorithm, workspace_limit)


def conv1d(
    x: Any, w: Any, bias: Any, out: Any, workspace_limit: Any, stride: Any, padding: Any, dilation: Any, groups: Any,
    layout: Any, algorithm: Any, precision: Any, activation: Any, device: Any,
) -> Described:  # fmt: skip
    """Describe a call of `leanconv.conv1d`: a layer of images of one row."""
    layer = _Layer(x, w, bias, out, "x", layout, arguments.LAYOUTS_1D)
    problem = conv1d_problem(
        *layer.logical_shapes, stride, padding, dilation, groups, dtype=layer.dtype, layout=layer.layout,
        precision=precision, activation=activation,
    )  # fmt: skip
    shape = layer.shown((problem.n, problem.k, problem.q))
    return layer.described(problem, shape, device, algorithm, workspace_limit)


def conv2d_input(
    grad: Any, w: Any, bias: None, out: Any, workspace_limit: Any, input_shape: Any, stride: Any, padding: Any,
    dilation: Any, groups: Any, layout: Any, algorithm: Any, precision: Any, device: Any,
) -> Described:  # fmt: skip
    """Describe a call of `leanconv.conv2d_input`."""
    layer = _Layer(grad, w, bias, out, "grad", layout, arguments.LAYOUTS)
    input_shape = arguments.sizes("input_shape", input_shape, 4)
    grad_shape, w_shape, _ = layer.logical_shapes
    forward = conv_problem(
        layer.logical(input_shape), w_shape, None, stride, padding, dilation, groups, dtype=layer.dtype,
        layout=layer.layout, precision=precision, activation=None, name="input_shape",
    )  # fmt: skip
    expected = (forward.n, forward.k, forward.p, forward.q)
    if grad_shape != expected:
        operands = layer.operands
        raise ValueError(
            f"grad has shape {tuple(operands.x.shape)}, but the output has {layer.shown(expected)} for "
            f"input_shape={input_shape}, w of shape {tuple(operands.w.shape)}, stride={stride!r}, padding={padding!r}, "
            f"dilation={dilation!r} and groups={groups}"
        )
    return layer.described(replace(forward, op="dgrad"), input_shape, device, algorithm, workspace_limit)


def filter2d(
    image: Any, kernel: Any, bias: None, out: Any, workspace_limit: Any, border: Any, anchor: Any, device: Any
) -> Described:
    """Describe a call of `leanconv.filter2d`; its algorithms need no workspace, and ``bias`` is None."""
    operands = gather(image, kernel_beside(image, kernel), bias, out, ("image", "kernel"))
    arrays, home = operands.arrays, operands.device
    dtype = arguments.check_dtypes({name: arrays.dtype(array) for name, array in operands.inputs.items()}, FILTERS)
    shape = tuple(operands.x.shape)
    problem = filter_problem(shape, tuple(operands.w.shape), border, anchor, dtype)
    check_out(operands, shape, dtype)
    place = _place(operands, device)
    copy_image, out_direct = False, True
    if home is not None:
        pitched = _row_pitched(arrays, operands.x, problem.itemsize)
        copy_image = pitched is None
        if pitched is not None:
            problem = replace(problem, x_pitch=pitched[0], x_step=pitched[1])
        if out is not None:
            pitched = _row_pitched(arrays, out, problem.itemsize)
            out_direct = pitched is not None
            if pitched is not None:
                problem = replace(problem, y_pitch=pitched[0], y_step=pitched[1])
    copies = (copy_image, not _readable(arrays, operands.w), False)
    return Described(problem, operands, place, shape, copies=copies, out_direct=out_direct)


class _Layer:
    """What the calls of a layer have in common: operands, dtype, layout, and how shapes are read in it."""

    def __init__(
        self, x: Any, w: Any, bias: Any, out: Any, name: str, layout: str | None, layouts: Sequence[str]
    ) -> None:
        """``name`` is what the caller calls x; ``layouts`` are `arguments.LAYOUTS`, or those of signals."""
        self.weights = w if isinstance(w, PreparedWeights) else None
        self.operands = gather(x, w if self.weights is None else self.weights.array, bias, out, (name, "w"))
        arrays, x = self.operands.arrays, self.operands.x
        if layout is not None:
            arguments.one_of("layout", layout, layouts)
        inputs = self.operands.inputs
        self.dtype = arguments.check_dtypes({each: arrays.dtype(array) for each, array in inputs.items()})
        channels_first, channels_last = layouts[:2]
        self._axes = len(channels_first)
        #: PyTorch shows N, C, ... whatever the order in memory; by default that of the input, if it is one of the two
        #: that PyTorch itself has a name for
        self._keeps_shape = arrays.keeps_shape
        if layout is None:
            layout = channels_first
            if self._keeps_shape and len(x.shape) == self._axes and not arrays.is_contiguous(x):
                last = arrays.is_contiguous(x, _axes(channels_first, channels_last))
                layout = channels_last if last else channels_first
        #: the shown axes of the logical ones, and the other way round
        self._to_shown, self._to_logical = _axes(channels_first, layout), _axes(layout, channels_first)
        #: in memory, of what is not shown as it lies
        self._order = self._to_shown if self._keeps_shape and layout != channels_first else None
        #: of the problem, in which a row is an image too
        self.layout = arguments.LAYOUTS[layouts.index(layout)]

    @property
    def logical_shapes(self) -> tuple[Shape, Shape, Shape | None]:
        """The shapes of x and w in the order N, C, ..., and that of the bias."""
        bias = self.operands.bias
        x, w = (self.logical(tuple(array.shape)) for array in (self.operands.x, self.operands.w))
        return x, w, None if bias is None else tuple(bias.shape)

    def logical(self, shape: Shape) -> Shape:
        """A shape as the library shows it in the order N, C, ..."""
        if self._keeps_shape or len(shape) != self._axes:
            return shape
        return tuple(shape[axis] for axis in self._to_logical)

    def shown(self, shape: Shape) -> Shape:
        """A shape N, C, ... as the library shows it."""
        return shape if self._keeps_shape else tuple(shape[axis] for axis in self._to_shown)

    def described(
        self, problem: ConvProblem, shape: Shape, device: Any, algorithm: str, workspace_limit: Any
    ) -> Described:
        """The call that computes ``problem``, with a result of ``shape``."""
        operands, order = self.operands, self._order
        arrays, bias, out = operands.arrays, operands.bias, operands.out
        check_out(operands, shape, problem.dtype)
        return Described(
            problem,
            operands,
            _place(operands, device),
            shape,
            weights=self.weights,
            algorithm=algorithm,
            workspace_limit=arguments.workspace_limit(workspace_limit),
            order=order,
            copies=(
                not _readable(arrays, operands.x, order),
                not _readable(arrays, operands.w, order),
                bias is not None and not _readable(arrays, bias),
            ),
            out_direct=out is None or _readable(arrays, out, order),
        )


def _axes(have: str, want: str) -> tuple[int, ...]:
    """Where the axes named by ``want`` are among those named by ``have``."""
    return tuple(have.index(axis) for axis in want)


def check_out(operands: Operands, shape: Shape, dtype: str) -> None:
    """Raise ValueError unless ``out``, where there is one, can take the result."""
    arrays, out = operands.arrays, operands.out
    if out is None:
        return
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"out has shape {tuple(out.shape)}; the result has {tuple(shape)}")
    if arrays.dtype(out) != dtype:
        raise ValueError(f"out has dtype {arrays.dtype(out)}; the result has {dtype}")
    repeats = any(length > 1 and stride == 0 for length, stride in zip(shape, arrays.strides(out), strict=True))
    if repeats and 0 not in shape:
        raise ValueError(f"out has strides {arrays.strides(out)}: several of its elements are the same memory")


def _readable(arrays: Arrays, array: Any, order: MemoryOrder = None) -> bool:
    """Whether a kernel can use the array as it lies."""
    return arrays.is_contiguous(array, order) and arrays.misalignment(array) % ALIGNMENT == 0


def _row_pitched(arrays: Arrays, array: Any, itemsize: int) -> tuple[int, int] | None:
    """Row pitch and image step where a filter can use the array as it lies, else None."""
    if arrays.misalignment(array) % itemsize or arrays.negated(array):
        return None
    return row_pitched(tuple(array.shape), arrays.strides(array), itemsize)


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
    dtype: str,
    layout: Layout,
    precision: str,
    activation: str | None,
    name: str = "x",
) -> ConvProblem:
    """The problem of a convolution; ``x_shape`` is (n, c, h, w) and ``w_shape`` (k, c / groups, r, s).

    Messages call ``x_shape`` by ``name``.
    """
    _check_axes({name: x_shape, "w": w_shape}, 4)
    arguments.one_of("precision", precision, PRECISIONS)
    arguments.one_of("activation", activation, arguments.ACTIVATIONS)
    groups = arguments.integer("groups", groups, 1)
    stride, dilation = arguments.pair("stride", stride, 1), arguments.pair("dilation", dilation, 1)
    n, c, h, w = x_shape
    k, group_c, r, s = w_shape
    if min(c, h, w) < 1:
        raise ValueError(
            f"{name} has {n} images of {c} channels, {h} rows and {w} columns; only its batch may be empty"
        )
    if min(w_shape) < 1:
        raise ValueError(f"w has {k} filters of {group_c} channels, {r} rows and {s} columns; it must not be empty")
    if c % groups:
        raise ValueError(f"in_channels={c} is not divisible by groups={groups}")
    if k % groups:
        raise ValueError(f"out_channels={k} is not divisible by groups={groups}")
    if group_c != c // groups:
        raise ValueError(
            f"w has {group_c} channels, but {name} has in_channels={c} and groups={groups}: "
            f"each filter must have {c // groups}"
        )
    if bias_shape is not None and tuple(bias_shape) != (k,):
        raise ValueError(f"bias has shape {tuple(bias_shape)}; it must have shape ({k},), a number a filter")
    sides = arguments.four_sides(padding, (r, s), stride, dilation)
    problem = ConvProblem(
        n=n, c=c, h=h, w=w, k=k, r=r, s=s, stride=stride, padding=sides, dilation=dilation, groups=groups, dtype=dtype,
        layout=layout, precision=precision, bias=bias_shape is not None,
        activation="relu" if activation == "relu" else None,
    )  # fmt: skip
    if problem.p < 1 or problem.q < 1:
        top, bottom, left, right = sides
        raise ValueError(
            f"the output would be {max(problem.p, 0)}x{max(problem.q, 0)}: a {r}x{s} filter with dilation {dilation} "
            f"covers {dilation[0] * (r - 1) + 1}x{dilation[1] * (s - 1) + 1} pixels, the padded input has "
            f"{h + top + bottom}x{w + left + right}"
        )
    return problem


def _check_axes(shapes: dict[str, Sequence[int]], axes: int) -> None:
    """Raise ValueError unless all named shapes have that many axes."""
    for name, shape in shapes.items():
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
    **options: Any,
) -> ConvProblem:
    """The problem of a convolution along one axis, as images of one row; ``x_shape`` is (n, c, w).

    ``padding`` is a number, (left, right) or a word; everything else is as in `conv_problem`.
    """
    _check_axes({"x": x_shape, "w": w_shape}, 3)
    if isinstance(padding, (tuple, list)):
        if len(padding) not in (1, 2):
            raise ValueError(f"padding={padding!r} must be an integer, (left, right), 'same' or 'valid'")
        padding = (0, 0, padding[0], padding[-1])
    elif not isinstance(padding, str):
        padding = (0, padding)
    (n, c, w), (k, group_c, s) = x_shape, w_shape
    return conv_problem(
        (n, c, 1, w), (k, group_c, 1, s), bias_shape, (1, arguments.single("stride", stride, 1)), padding,
        (1, arguments.single("dilation", dilation, 1)), groups, **options,
    )  # fmt: skip


def filter_problem(
    image_shape: Sequence[int], kernel_shape: Sequence[int], border: Any, anchor: Any, dtype: str
) -> FilterProblem:
    """The problem of filtering contiguous images (…, h, w)."""
    if len(image_shape) < 2:
        raise ValueError(f"image has shape {tuple(image_shape)}; it must have 2 dimensions or more (..., h, w)")
    if len(kernel_shape) != 2:
        raise ValueError(f"kernel has {len(kernel_shape)} dimensions, shape {tuple(kernel_shape)}; it must have 2")
    kh, kw = kernel_shape
    if kh < 1 or kw < 1:
        raise ValueError(f"kernel has shape {tuple(kernel_shape)}; it must not be empty")
    *leading, h, w = image_shape
    batch = 1
    for length in leading:
        batch *= length
    return FilterProblem(
        batch=batch, h=h, w=w, kh=kh, kw=kw, anchor=arguments.anchor_of(anchor, kh, kw),
        border=arguments.border_name(border), dtype=dtype, x_pitch=w, x_step=h * w, y_pitch=w, y_step=h * w,
    )  # fmt: skip


def check_problem(problem: Any) -> None:
    """Raise what a call with the arguments of ``problem`` would; a caller may have written it by hand."""
    if problem.kind == "filter2d":
        image_shape = (problem.batch, problem.h, problem.w)
        filter_problem(image_shape, problem.w_shape, problem.border, problem.anchor, problem.dtype)
        return
    arguments.one_of("layout", problem.layout, arguments.LAYOUTS)
    if problem.op == "dgrad" and (problem.bias or problem.activation):
        raise ValueError("op='dgrad', the gradient of a layer's input, has no bias and no activation")
    arguments.integer("groups", problem.groups, 1)
    conv_problem(
        (problem.n, problem.c, problem.h, problem.w), (problem.k, problem.group_c, problem.r, problem.s), None,
        problem.stride, problem.padding, problem.dilation, problem.groups, dtype=problem.dtype,
        layout=problem.layout, precision=problem.precision, activation=problem.activation,
    )  # fmt: skip
