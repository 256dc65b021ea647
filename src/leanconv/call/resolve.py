"""Resolve a call: from arrays and options to a problem, and to where it runs. Nothing is computed here.

`resolve` validates what a caller gave and raises as the call itself would. `layer_problem` and `filter_problem` have
the rules on sizes; who knows sizes but has no arrays calls them by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from leanconv import dtypes, options
from leanconv.arrays import Shape
from leanconv.arrays.operands import Operands, as_epilogue, check_dtypes, filter_operands, layer_operands, together
from leanconv.call.weights import PreparedWeights, refuse_integer_volumes
from leanconv.dtypes import DtypeName
from leanconv.options import FUNCTIONS, FilterOptions, Kept, LayerOptions, Layout, Options
from leanconv.problem import ConvProblem, FilterProblem, Problem
from leanconv.volumes.images import as_images

#: Why gradients of filters refuse ``batch_invariant``.
NO_IMAGES_BITS = (
    "batch_invariant=True: the gradient of the filters is a sum over the images of a batch, so another batch has "
    "another one; forward layers and gradients of the input take it"
)


def _names(requested: LayerOptions) -> tuple[str, str]:
    """What the caller calls the two arrays. In leanconv.torch a gradient of the input is a transposed layer, which has
    the arguments of a layer."""
    function = FUNCTIONS[requested.function]
    return ("input", "weight") if requested.differentiated and function.op != "wgrad" else function.names


@dataclass(frozen=True)
class Resolved:
    """All that a call's arrays and options determine: `bind` makes a ready call of it."""

    problem: Problem
    operands: Operands
    #: GPU that runs it, None for the CPU; differs from where the operands lie only for NumPy arrays
    device: int | None
    #: of the result, as the library shows it
    shape: Shape
    #: what ``w`` was, where the caller gave packed weights
    weights: PreparedWeights | None = None
    algorithm: str = "auto"
    #: bytes, as given by the caller or the environment; None for neither
    workspace_limit: int | None = None

    @property
    def kept(self) -> Kept:
        """Whether filters stay packed: those of NumPy arrays on a GPU are packed in each call."""
        return "" if self.weights is None or self.operands.device is None else self.weights.kept

    @property
    def given(self) -> tuple[Any, Any, Any, Any]:
        """x, w, bias and out as the ready call takes them, an `Epilogue` in place of the bias where there is more."""
        operands = self.operands
        bias = together(operands.bias, operands.scale, operands.add)
        return operands.x, operands.w if self.weights is None else self.weights, bias, operands.out


def resolve(requested: Options, x: Any, w: Any, bias: Any = None, out: Any = None) -> Resolved:
    """The problem of a call, and its operands. Raises ValueError and TypeError as the call does."""
    if isinstance(requested, LayerOptions):
        return _resolve_layer(requested, x, w, bias, out)
    return _resolve_filter(requested, x, w, out)


def _resolve_layer(requested: LayerOptions, x: Any, w: Any, bias: Any, out: Any) -> Resolved:
    function = FUNCTIONS[requested.function]
    first, second = names = _names(requested)
    weights = w if isinstance(w, PreparedWeights) and function.op != "wgrad" else None
    w = w if weights is None else weights.array
    if requested.differentiated:
        x, w = (each.detach() if hasattr(each, "detach") else each for each in (x, w))
        beside = [each.detach() if hasattr(each, "detach") else each for each in as_epilogue(bias)]
        bias = together(*beside)
    layouts = options.LAYOUTS_OF[function.axes]
    axes_of_w = function.axes + 2
    axes_of_out = axes_of_w if function.op == "wgrad" else None
    integers = function.op == "fprop" and function.axes < 3 and not requested.differentiated
    operands, axes = layer_operands(x, w, bias, out, names, requested.layout, layouts, axes_of_out, integers)
    if requested.differentiated and dtypes.is_integer(operands.dtype):
        raise TypeError(
            f"the input has dtype {operands.dtype}; leanconv.torch takes floating-point numbers (leanconv.conv2d takes "
            "int8 and uint8 too, without gradients)"
        )
    if function.axes == 3:
        refuse_integer_volumes(first, operands.dtype)
    x_shape, w_shape = (axes.logical(tuple(each.shape)) for each in (operands.x, operands.w))
    grad_shape: Shape | None = None
    if function.op != "fprop":
        if dtypes.is_integer(operands.dtype):
            raise TypeError(f"{first} has dtype {operands.dtype}; gradients are of floating-point layers")
        if requested.shape is None:
            raise TypeError(f"{function.shape}=None is no shape; give a tuple of integers")
        name, other = (function.shape, requested.shape) if function.op == "dgrad" else (second, tuple(operands.w.shape))
        check_axes(first, x_shape, axes_of_w)
        check_axes(name, other, axes_of_w)
        if len(x_shape) != len(other):
            said = f"{name}={other}" if function.op == "dgrad" else f"{name} {other}"
            raise ValueError(
                f"{first} has shape {tuple(operands.x.shape)} and {said}: either both have a batch axis, or neither"
            )
        logical = axes.logical(requested.shape)
        if function.op == "dgrad":
            grad_shape, x_shape = x_shape, logical
        else:
            grad_shape, w_shape = w_shape, logical
    problem = layer_problem(
        requested, x_shape, w_shape, None if operands.bias is None else tuple(operands.bias.shape), operands.dtype,
        options.LAYOUTS[layouts.index(axes.layout)],
    )  # fmt: skip
    outputs = (problem.n, problem.k, *(problem.z, problem.p, problem.q)[-function.axes :])[-len(x_shape) :]
    if grad_shape is not None and grad_shape != outputs:
        array, what = (operands.x, f"input_shape={requested.shape}, w of shape {tuple(operands.w.shape)}")
        if function.op == "wgrad":
            array, what = (operands.w, f"x of shape {tuple(operands.x.shape)}, weight_shape={requested.shape}")
        raise ValueError(
            f"grad has shape {tuple(array.shape)}, but the output has {axes.shown(outputs)} for {what}, "
            f"{_said(requested, function.axes)}"
        )
    shape = axes.shown(outputs) if requested.shape is None else requested.shape
    operands.check_out(shape)
    problem = replace(problem, scale=operands.scale is not None, add=operands.add is not None)
    _check_beside(operands, problem, shape)
    place, limit = operands.place(requested.device), requested.workspace_limit
    if place is not None or not operands.arrays.convolves:
        problem = as_images(problem)
    return Resolved(problem, operands, place, shape, weights, requested.algorithm, limit)


def _check_beside(operands: Operands, problem: ConvProblem, shape: Shape) -> None:
    """Raise ValueError unless what follows the sums of a layer is what its type and its shape allow."""
    scale, add = operands.scale, operands.add
    _check_activation(problem)
    if scale is not None and tuple(scale.shape) != (problem.k,):
        raise ValueError(f"scale has shape {tuple(scale.shape)}; it must have shape ({problem.k},), a number a filter")
    if add is not None and tuple(add.shape) != tuple(shape):
        raise ValueError(f"add has shape {tuple(add.shape)}; it must have that of the result, {tuple(shape)}")


def _check_activation(problem: ConvProblem) -> None:
    """Raise ValueError for a layer of integers whose activation makes fractions."""
    if dtypes.is_integer(problem.dtype) and problem.activation not in options.INTEGER_ACTIVATIONS:
        known = ", ".join(map(repr, options.INTEGER_ACTIVATIONS))
        raise ValueError(f"activation={problem.activation!r} makes fractions; layers of {problem.dtype} take {known}")


def _said(requested: LayerOptions, axes: int) -> str:
    """The numbers of a layer as a caller writes them."""

    def short(numbers: Sequence[int] | str) -> object:
        given = numbers if isinstance(numbers, str) or axes > 1 else numbers[len(numbers) // 2 :]
        return given[0] if len(set(given)) == 1 else given

    stride, padding, dilation = map(short, (requested.stride, requested.padding, requested.dilation))
    return f"stride={stride}, padding={padding!r}, dilation={dilation} and groups={requested.groups}"


def of_problem(problem: ConvProblem, x: Any, w: Any, bias: Any, workspace_limit: int | None) -> Resolved:
    """The call that computes a problem with two arrays of PyTorch, (n, c, h, w) and filters, or (n, c, d, h, w) and
    filters, also of one slice; and a bias or None."""
    axes = x.dim() - 2
    function = next(each for each in FUNCTIONS.values() if each.op == problem.op and each.axes == axes)
    layouts = options.LAYOUTS_OF[axes]
    layout = layouts[options.LAYOUTS.index(problem.layout)]
    operands, _ = layer_operands(x, w, bias, None, function.names, layout, layouts)
    shape = {
        "fprop": (problem.n, problem.k, *(problem.z, problem.p, problem.q)[-axes:]),
        "dgrad": (problem.n, problem.c, *(problem.d, problem.h, problem.w)[-axes:]),
        "wgrad": (problem.k, problem.group_c, *(problem.t, problem.r, problem.s)[-axes:]),
    }[problem.op]
    problem = as_images(problem)
    return Resolved(problem, operands, operands.device, shape, workspace_limit=workspace_limit)


def _resolve_filter(requested: FilterOptions, image: Any, kernel: Any, out: Any) -> Resolved:
    last = bool(requested.channels_last)
    operands, x_pitch, y_pitch = filter_operands(
        image, kernel, out, requested.dtype, last, "image" if requested.slice_anchor is None else "volume"
    )  # fmt: skip
    problem, shape = filter_problem(requested, tuple(operands.x.shape), tuple(operands.w.shape), operands.dtype)
    problem = replace(problem, out_dtype=operands.result, sum_dtype=operands.w_dtype)
    operands.check_out(shape)
    if x_pitch is not None:
        problem = replace(problem, x_pitch=x_pitch[0], x_step=x_pitch[1])
    if y_pitch is not None:
        problem = replace(problem, y_pitch=y_pitch[0], y_step=y_pitch[1])
    place, limit = operands.place(requested.device), requested.workspace_limit
    return Resolved(problem, operands, place, shape, workspace_limit=limit)


def layer_problem(
    requested: LayerOptions, x_shape: Sequence[int], w_shape: Sequence[int], bias_shape: Sequence[int] | None,
    dtype: DtypeName, layout: Layout,
) -> ConvProblem:  # fmt: skip
    """The problem of a layer of these sizes: of x (n, c, h, w), or (c, h, w), and of w (k, c / groups, r, s), without h
    and r for signals, which are images of one row, and with d and t before them for volumes. Of a gradient they are
    those of the forward layer.
    """
    function = FUNCTIONS[requested.function]
    axes = function.axes
    name, filters = _names(requested)
    if function.op != "fprop":
        name, filters = (function.shape, filters) if function.op == "dgrad" else (name, function.shape)
    check_axes(name, x_shape, axes + 2)
    check_axes(filters, w_shape, axes + 2, batch=False)
    precision = options.one_of("precision", requested.precision, options.PRECISIONS)
    activation = options.activation_of(requested.activation)
    if function.op == "wgrad" and requested.batch_invariant:
        raise ValueError(NO_IMAGES_BITS)
    groups, stride, dilation = requested.groups, requested.stride, requested.dilation
    n, c, *extent = (1, *x_shape)[-axes - 2 :]
    k, group_c, *taps = w_shape
    if min(c, *extent) < 1:
        held = ("signals", "images", "volumes")[axes - 1] + f" of {c} channels"
        raise ValueError(f"{name} has {n} {_listed(held, extent, 'samples')}; only its batch may be empty")
    if min(w_shape) < 1:
        held = _listed(f"{group_c} channels", taps, "taps")
        raise ValueError(f"{filters} has {k} filters of {held}; it must not be empty")
    if c % groups:
        raise ValueError(f"in_channels={c} is not divisible by groups={groups}")
    if k % groups:
        raise ValueError(f"out_channels={k} is not divisible by groups={groups}")
    if group_c != c // groups:
        shown = options.LAYOUTS_OF[axes][options.LAYOUTS.index(layout)]
        raise ValueError(
            f"{filters} has {group_c} channels, but {name} has in_channels={c} and groups={groups}, read as {shown}: "
            f"each filter must have {c // groups}"
        )
    biases, of_each = (c, "channel of the result") if function.op == "dgrad" else (k, "filter")
    if bias_shape is not None and tuple(bias_shape) != (biases,):
        raise ValueError(f"bias has shape {tuple(bias_shape)}; it must have shape ({biases},), a number a {of_each}")
    products = group_c * math.prod(taps)
    if dtypes.is_integer(dtype) and products > dtypes.most_products(dtype):
        window = f"{taps[0]} taps" if axes == 1 else "x".join(map(str, taps))
        raise ValueError(
            f"a filter of {group_c} channels of {window} has {products} products: their sum could overflow "
            f"int32; {dtype} by {dtypes.weights_of(dtype)} takes at most {dtypes.most_products(dtype)}"
        )
    if requested.padding == "same" and any(step != 1 for step in stride):
        raise ValueError(f"padding='same' needs stride=1, got stride={stride[1] if axes == 1 else stride}")
    if axes == 1:
        extent, taps = [1, *extent], [1, *taps]
    sides = options.sides_for(requested.padding, taps, stride, dilation)
    d, h, w = (1, *extent)[-3:]
    t, r, s = (1, *taps)[-3:]
    (stride_d, stride_h, stride_w), (dilation_d, dilation_h, dilation_w) = (1, *stride)[-3:], (1, *dilation)[-3:]
    front, back, top, bottom, left, right = (0, 0, *sides)[-6:]
    problem = ConvProblem(
        n=n, c=c, h=h, w=w, k=k, r=r, s=s, stride=(stride_h, stride_w), padding=(top, bottom, left, right),
        dilation=(dilation_h, dilation_w), groups=groups, dtype=dtype, layout=layout, precision=precision,
        bias=bias_shape is not None or requested.grad_bias, activation=activation, op=function.op,
        batch_invariant=requested.batch_invariant, d=d, t=t, stride_d=stride_d, padding_d=(front, back),
        dilation_d=dilation_d,
    )  # fmt: skip
    outputs = (problem.z, problem.p, problem.q)[-axes:]
    if min(outputs) < 1:
        covered = [step * (count - 1) + 1 for step, count in zip(dilation, taps, strict=True)]
        padded = [side + sides[2 * i] + sides[2 * i + 1] for i, side in enumerate(extent)]
        if axes == 1:
            raise ValueError(
                f"the output would be empty: a filter of {s} taps with dilation {dilation[1]} covers "
                f"{covered[1]} samples, the padded input has {padded[1]}"
            )
        would, window, reach, around = (
            "x".join(map(str, each)) for each in ([max(side, 0) for side in outputs], taps, covered, padded)
        )
        raise ValueError(
            f"the output would be {would}: a {window} filter with dilation {dilation} covers {reach} pixels, the "
            f"padded input has {around}"
        )
    return problem


def _listed(held: str, extent: Sequence[int], along: str) -> str:
    """What is ``held``, and how many slices, rows and columns; of signals one number ``along`` them."""
    words = [along] if len(extent) == 1 else ["slices", "rows", "columns"][-len(extent) :]
    counts = [held, *(f"{count} {word}" for count, word in zip(extent, words, strict=True))]
    return f"{', '.join(counts[:-1])} and {counts[-1]}"


class TransposedAxis(NamedTuple):
    """One axis of a transposed layer, as the gradient of a layer with respect to its input."""

    #: of the result
    extent: int
    #: of that layer's input
    inner: int
    #: what it pads before and behind
    padding: tuple[int, int]
    #: pixels of its input that the result lacks in front, and pixels of the result behind it, which no tap reaches
    cut: tuple[int, int]


def transposed_axis(size: int, stride: int, padding: int, dilation: int, taps: int, more: int) -> TransposedAxis:
    """An axis of ``size`` pixels, with ``more`` pixels of output padding. Sizes may be symbols of PyTorch's."""
    extent = inner = (size - 1) * stride - 2 * padding + dilation * (taps - 1) + 1 + more
    before = after = padding
    front = rest = 0
    if more >= stride:
        # the layer whose input this is would have another output: it pads less at the end, or the rest is zero
        after, rest = max(0, padding - more), max(0, more - padding)
        if rest:
            # where all is zero, the layer's input is one pixel of what its padding would be
            inner = inner - rest
            front = max(0, 1 - inner)
            before, inner = before - front, inner + front
    return TransposedAxis(extent, inner, (before, after), (front, rest))


def check_axes(name: str, shape: Sequence[int], axes: int, *, batch: bool = True) -> None:
    """Raise ValueError unless an array has that many axes, or one less: images, or signals, without a batch."""
    if len(shape) != axes and not (batch and len(shape) == axes - 1):
        raise ValueError(
            f"{name} has {len(shape)} dimensions, shape {tuple(shape)}; it must have {axes}"
            + (f", or {axes - 1} without a batch" if batch else "")
        )


def filter_problem(
    requested: FilterOptions, image: Shape, kernel: Shape, dtype: DtypeName
) -> tuple[FilterProblem, Shape]:
    """The problem of filtering contiguous images (…, h, w), or (…, h, w, channels), and the shape of its result.

    A kernel is (kh, kw), or several are (f, kh, kw); where each image has its own, the images' leading axes come first.
    One that is a ``window`` is (rank, kh + kw).
    """
    volumes = requested.slice_anchor is not None
    if requested.channels_last is None and len(image) == 3 and image[-1] in (3, 4) and not volumes:
        raise ValueError(
            f"image has shape {image}: channels_last=True filters it as a picture of {image[-1]} channels, "
            f"channels_last=False as {image[0]} images of {image[1]}x{image[2]}; say which"
        )
    last = bool(requested.channels_last)
    if volumes:
        return _volume_problem(requested, image, kernel, dtype)
    if len(image) < 2 + last:
        wanted = "3 dimensions or more (..., h, w, channels)" if last else "2 dimensions or more (..., h, w)"
        raise ValueError(f"image has shape {image}; it must have {wanted}")
    *leading, h, w = image[: len(image) - last]
    batch = tuple(leading) if requested.per_image else ()
    rest = kernel[len(batch) :] if requested.window is None else requested.window
    if len(rest) not in (2, 3):
        raise ValueError(
            f"kernel has {len(kernel)} dimensions, shape {kernel}; it must have {len(batch) + 2}, or {len(batch) + 3} "
            f"for several kernels ({'..., ' * bool(batch)}f, kh, kw)"
        )
    if kernel[: len(batch)] != batch:
        raise ValueError(f"kernel has shape {kernel}; with per_image=True it must begin with the images' {batch}")
    filters, kh, kw = (1, *rest)[-3:]
    if min(rest) < 1:
        raise ValueError(f"kernel has shape {kernel}; it must not be empty")
    if requested.valid and (kh > h or kw > w):
        raise ValueError(f"mode='valid': a {kh}x{kw} kernel does not fit into an image of {h}x{w}")
    problem = FilterProblem(
        math.prod(leading), h, w, kh, kw, options.anchor_of(requested.anchor, kh, kw), requested.border, dtype,
        filters=filters, channels=image[-1] if last else 1, valid=requested.valid, per_image=requested.per_image,
        rank=0 if requested.window is None or requested.reduction else kernel[0], reduction=requested.reduction,
    )  # fmt: skip
    shape = (*leading, *rest[:-2], problem.out_h, problem.out_w, *image[len(image) - last :])
    return problem.dense(), shape


def _volume_problem(
    requested: FilterOptions, volume: Shape, kernel: Shape, dtype: DtypeName
) -> tuple[FilterProblem, Shape]:
    """`filter_problem` of volumes (…, d, h, w), or (…, d, h, w, channels), and kernels (kd, kh, kw), or several
    (f, kd, kh, kw); behind the volumes' leading axes where each has its own."""
    last = bool(requested.channels_last)
    if len(volume) < 3 + last:
        wanted = "4 dimensions or more (..., d, h, w, channels)" if last else "3 dimensions or more (..., d, h, w)"
        raise ValueError(f"volume has shape {volume}; it must have {wanted}")
    *leading, d, h, w = volume[: len(volume) - last]
    batch = tuple(leading) if requested.per_image else ()
    rest = kernel[len(batch) :]
    if len(rest) not in (3, 4):
        raise ValueError(
            f"kernel has {len(kernel)} dimensions, shape {kernel}; it must have {len(batch) + 3}, or {len(batch) + 4} "
            f"for several kernels ({'..., ' * bool(batch)}f, kd, kh, kw)"
        )
    if kernel[: len(batch)] != batch:
        raise ValueError(f"kernel has shape {kernel}; with per_image=True it must begin with the volumes' {batch}")
    if min(rest) < 1:
        raise ValueError(f"kernel has shape {kernel}; it must not be empty")
    filters, kd, kh, kw = (1, *rest)[-4:]
    if requested.valid and (kd > d or kh > h or kw > w):
        raise ValueError(f"mode='valid': a {kd}x{kh}x{kw} kernel does not fit into a volume of {d}x{h}x{w}")
    slices = requested.slice_anchor
    assert slices is not None
    if slices >= kd:
        raise ValueError(f"anchor={(slices, *(requested.anchor or ()))} lies outside the {kd}x{kh}x{kw} kernel")
    problem = FilterProblem(
        math.prod(leading), h, w, kh, kw, options.anchor_of(requested.anchor, kh, kw), requested.border, dtype,
        filters=filters, channels=volume[-1] if last else 1, valid=requested.valid, per_image=requested.per_image, d=d,
        kd=kd, anchor_z=kd // 2 if slices == -1 else slices,
    )  # fmt: skip
    inside = problem.out_d, problem.out_h, problem.out_w
    return problem.dense(), (*leading, *rest[:-3], *inside, *volume[len(volume) - last :])


def check_problem(problem: Problem) -> None:
    """Raise what a call with the options of ``problem`` would; a caller may have written it by hand."""
    names = ("batch", "h", "w", "kh", "kw") if problem.kind == "filter2d" else tuple("ncdhwktrs")
    for name in names:
        options.integer(name, getattr(problem, name), 0, math.inf)
    if problem.kind == "filter2d":
        options.integer("filters", problem.filters, 1)
        for part in problem.anchor:
            options.integer("anchor", part, 0)
        options.integer("channels", problem.channels, 0, math.inf)
        requested = options.filter_options(
            problem.border, problem.anchor, channels_last=problem.channels != 1,
            mode="valid" if problem.valid else "same", per_image=problem.per_image,
        )  # fmt: skip
        for name in ("d", "kd", "anchor_z"):
            options.integer(name, getattr(problem, name), 0, math.inf)
        if problem.is_volume:
            requested = requested._replace(slice_anchor=problem.anchor_z)
        if options.integer("rank", problem.rank, 0) or problem.reduction:
            requested = requested._replace(window=(problem.kh, problem.kw), reduction=problem.reduction)
        filter_problem(requested, problem.x_shape, problem.w_shape, problem.dtype)
        return
    if problem.op != "fprop" and dtypes.is_integer(problem.dtype):
        raise TypeError(
            f"{options.FIRST[problem.op]} has dtype {problem.dtype}; gradients are of floating-point layers"
        )
    if problem.op != "fprop" and (problem.activation or problem.scale or problem.add):
        of = "input" if problem.op == "dgrad" else "filters"
        raise ValueError(
            f"op={problem.op!r}, the gradient of a layer's {of}, has no activation, no scale and no residual"
        )
    if problem.op == "wgrad" and problem.batch_invariant:
        raise ValueError(NO_IMAGES_BITS)
    name = options.FIRST[problem.op]
    if problem.is_volume:
        refuse_integer_volumes(name, problem.dtype)
    if problem.scale:
        check_dtypes({name: problem.dtype, "scale": dtypes.accumulator(problem.dtype).name}, dtypes.LAYERS)
    _check_activation(problem)
    deep, axes = problem.is_volume, 3 if problem.is_volume else 2
    stride, padding = (problem.stride_d, *problem.stride), problem.padding_d + problem.padding
    layer = options.layer_options(
        "conv3d" if deep else "conv2d", stride[-axes:], padding[-2 * axes :],
        (problem.dilation_d, *problem.dilation)[-axes:], problem.groups, precision=problem.precision,
        activation=problem.activation, batch_invariant=problem.batch_invariant,
    )  # fmt: skip
    x_shape = problem.n, problem.c, *(problem.d, problem.h, problem.w)[-axes:]
    w_shape = problem.k, problem.group_c, *(problem.t, problem.r, problem.s)[-axes:]
    layer_problem(layer, x_shape, w_shape, None, problem.dtype, problem.layout)
