"""What is to be computed: frozen, hashable descriptions, and the only shape arithmetic in the project."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod
from typing import Any, ClassVar, Literal, get_args

from leanconv import options
from leanconv.arrays.memory import lay_out
from leanconv.dtypes import FILTERS, LAYERS, DtypeName, filter_sum, item_bytes, one_of, result_of, weights_of
from leanconv.images.borders import BORDERS, BorderName
from leanconv.options import Layout, Op, Precision, Reduction


@dataclass(frozen=True)
class Operand:
    """An array that a problem reads or writes: its role, its shape, axes in memory order, its element type."""

    role: str
    shape: tuple[int, ...]
    dtype: DtypeName
    written: bool = False


def _make_plain(problem: Any, names: tuple[str, ...]) -> None:
    """Make the named fields of a problem ints: NumPy's integers become Python's, whose arithmetic does not overflow."""
    for name in names:
        value = getattr(problem, name)
        if type(value) is not int:
            object.__setattr__(problem, name, options.integer(name, value, -inf, inf))


def _are_ints(value: Any, count: int, least: float = -inf, most: float = inf) -> bool:
    plain = type(value) is tuple and len(value) == count
    return plain and all([type(each) is int and least <= each <= most for each in value])


@dataclass(frozen=True)
class ConvProblem:
    """One convolution layer (cross-correlation, as in every deep-learning framework).

    ``y[n,k,p,q] = bias[k] + sum over c,r,s of w[k,c,r,s] * x[n, c, p*stride - top + r*dilation, ...]``

    Layout ``NCHW`` means x is N·C·H·W, w is K·(C/groups)·R·S and y is N·K·P·Q; ``NHWC`` means x is N·H·W·C,
    w is K·R·S·(C/groups) and y is N·P·Q·K; ``CHWN`` means x is C·H·W·N, w is (C/groups)·R·S·K and y is K·P·Q·N. All
    of them are contiguous.

    Operation ``dgrad`` is the gradient of that with respect to its input. All numbers are those of the forward layer;
    the arrays are dy, the gradient of the layer's output, w, and dx, the gradient of its input. There is no activation:
    ``dx[n,c,h,w] = bias[c] + sum over k,r,s of w[k,c,r,s] * dy[n,k,p,q]`` where ``p*stride - top + r*dilation = h``, as
    for q. With a bias it is a transposed layer of dy, and nothing can be accumulated.

    Operation ``wgrad`` is the gradient with respect to the filters, again by the numbers of the forward layer: the
    arrays are x, dy, and dw, which has the shape of w. There is no activation:
    ``dw[k,c,r,s] = sum over n,p,q of dy[n,k,p,q] * x[n, c, p*stride - top + r*dilation, ...]``. With ``bias`` there is
    another result, the gradient of the bias: ``sum over n,p,q of dy[n,k,p,q]``.

    ``accumulate``: the result is added to what the output holds, before the activation.

    ``scale`` and ``add`` are of forward layers: ``y = activation(scale[k] * sum + bias[k] + add)``, with a float32
    number for each filter and a residual, an array like y. ``activation`` is as ``options.activation_of`` returns it.

    ``batch_invariant``: an image has the same bits in the result of every batch. The gradient of the filters, a sum
    over the images, has no such promise.

    ``dtype`` is the type of x. Floating-point layers have it in all arrays. With int8 or uint8, w is int8, bias and y
    are int32, sums are exact in every precision, and there is no gradient.

    ``stride``, ``padding`` and ``dilation`` are as in `leanconv.conv2d`, and kept as pairs and four sides.

    A layer of volumes has ``d`` slices, filters of ``t`` slices, and ``z`` slices of output; the sums are over t too:
    ``y[n,k,z,p,q] = bias[k] + sum over c,t,r,s of w[k,c,t,r,s] * x[n, c, z*stride_d - front + t*dilation_d, ...]``.
    The slices come before the rows in all arrays: ``NCHW`` means N·C·D·H·W, ``NHWC`` N·D·H·W·C, and there is no other
    layout. ``padding_d`` is front and back. Images are volumes of one slice, with filters of one.

    Raises ValueError and TypeError as `leanconv.conv2d` does for these options, and TypeError for sizes that are not
    integers; but four sides of padding may be negative, as gradients have them. Whether a layer can have these sizes,
    `leanconv.explain` says.
    """

    kind: ClassVar[Literal["conv2d"]] = "conv2d"
    #: numbers that are given at each call
    scalars: ClassVar[tuple[str, ...]] = ()

    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    s: int
    stride: tuple[int, int] = (1, 1)
    #: top, bottom, left, right, in pixels; negative in problems made by ``as_forward`` and its like
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    dtype: DtypeName = "float32"
    layout: Layout = "NCHW"
    precision: Precision = "fp32"
    bias: bool = False
    activation: str | None = None
    op: Op = "fprop"
    accumulate: bool = False
    batch_invariant: bool = False
    d: int = 1
    t: int = 1
    stride_d: int = 1
    padding_d: tuple[int, int] = (0, 0)
    dilation_d: int = 1
    scale: bool = False
    add: bool = False

    def __post_init__(self) -> None:
        _make_plain(self, ("n", "c", "h", "w", "k", "r", "s", "groups", "d", "t", "stride_d", "dilation_d"))
        plain = {type(self.dtype), type(self.layout), type(self.precision), type(self.op)} == {str}
        flags = self.bias, self.accumulate, self.batch_invariant, self.scale, self.add
        plain = plain and {type(each) for each in flags} == {bool}
        plain = plain and self.dtype in LAYERS and self.layout in options.LAYOUTS and self.op in options.OPS
        plain = plain and self.precision in options.PRECISIONS
        if not plain or not 1 <= self.groups <= options.MOST:
            self._check_words()
        object.__setattr__(self, "activation", options.activation_of(self.activation))
        for name in ("stride", "dilation"):
            if not _are_ints(getattr(self, name), 2, 1, options.MOST):
                object.__setattr__(self, name, options.pair(name, getattr(self, name), 1))
        if not _are_ints(self.padding, 4):
            padding = options.sides_of(self.padding)
            sides = options.sides_for(padding, (self.r, self.s), self.stride, self.dilation)
            object.__setattr__(self, "padding", sides)
        if not _are_ints(self.padding_d, 2):
            object.__setattr__(self, "padding_d", options.pair("padding_d", self.padding_d, 0, "two: (front, back)"))
        for name in ("stride_d", "dilation_d"):
            object.__setattr__(self, name, options.integer(name, getattr(self, name), 1) if self.is_volume else 1)
        if self.is_volume and self.layout == "CHWN":
            raise ValueError("layout='CHWN' is of images; volumes are 'NCHW' or 'NHWC', with the slices before H")

    @cached_property
    def is_volume(self) -> bool:
        """Whether there is an axis of slices, of input, filters or output."""
        return (self.d, self.t, self.padding_d) != (1, 1, (0, 0))

    @cached_property
    def z(self) -> int:
        """Output slices; zero or negative when the dilated filter does not fit the padded input."""
        return (self.d + sum(self.padding_d) - self.dilation_d * (self.t - 1) - 1) // self.stride_d + 1

    def _check_words(self) -> None:
        options.integer("groups", self.groups, 1)
        known: tuple[tuple[Any, ...], ...] = options.PRECISIONS, options.LAYOUTS, options.OPS
        for name, words in zip(("precision", "layout", "op"), known, strict=True):
            object.__setattr__(self, name, options.one_of(name, getattr(self, name), words))
        object.__setattr__(self, "dtype", one_of(options.FIRST[self.op], self.dtype, LAYERS))
        for name in ("bias", "accumulate", "batch_invariant", "scale", "add"):
            object.__setattr__(self, name, options.yes_or_no(name, getattr(self, name)))

    @cached_property
    def p(self) -> int:
        """Output height; zero or negative when the dilated filter does not fit the padded input."""
        top, bottom, _, _ = self.padding
        return (self.h + top + bottom - self.dilation[0] * (self.r - 1) - 1) // self.stride[0] + 1

    @cached_property
    def q(self) -> int:
        """Output width; zero or negative when the dilated filter does not fit the padded input."""
        _, _, left, right = self.padding
        return (self.w + left + right - self.dilation[1] * (self.s - 1) - 1) // self.stride[1] + 1

    @property
    def taps(self) -> int:
        """Taps of a filter."""
        return self.t * self.r * self.s

    @property
    def window(self) -> str:
        """The filter's size in words: ``3x3``, of volumes ``3x3x3``."""
        return "x".join(map(str, (self.t, self.r, self.s)[0 if self.is_volume else 1 :]))

    @property
    def pixels(self) -> int:
        """Output pixels of one channel, of all images."""
        return self.n * self.z * self.p * self.q

    @property
    def group_c(self) -> int:
        """Input channels that one filter sees."""
        return self.c // self.groups

    @property
    def group_k(self) -> int:
        """Filters in one group."""
        return self.k // self.groups

    @property
    def is_empty(self) -> bool:
        """Whether there are no images: then the output has no elements or, of filters, is zero."""
        return self.n == 0

    @property
    def itemsize(self) -> int:
        return item_bytes(self.dtype)

    @property
    def images(self) -> int:
        return self.n

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """What a kernel reads, two arrays and perhaps bias, scale and residual, then what it writes."""
        first, second, written = {"dgrad": ("dy", "w", "dx"), "wgrad": ("x", "dy", "dw")}.get(self.op, ("x", "w", "y"))
        weights, result = weights_of(self.dtype), result_of(self.dtype)
        bias_shape = (self.c if self.op == "dgrad" else self.k,)
        bias = (Operand("bias", bias_shape, result, written=self.op == "wgrad"),) if self.bias else ()
        scale = (Operand("scale", (self.k,), "float32"),) if self.scale else ()
        add = (Operand("add", self.y_shape, result),) if self.add else ()
        beside = self._layer_output if self.op == "wgrad" else self.w_shape
        y = Operand(written, self.y_shape, result, written=True)
        return (Operand(first, self.x_shape, self.dtype), Operand(second, beside, weights), *bias, *scale, *add, y)

    @cached_property
    def plain(self) -> ConvProblem:
        """The layer without what follows its sums: no bias of a forward layer, no scale, residual or activation."""
        return replace(self, bias=self.bias and self.op != "fprop", scale=False, add=False, activation=None)

    @property
    def fuses(self) -> bool:
        """Whether more follows the sums than a bias and a ReLU."""
        return self.scale or self.add or self.activation not in (None, "relu")

    @property
    def x_shape(self) -> tuple[int, ...]:
        """Shape, in memory order, of the first array that the operation reads: x, or dy for the input's gradient."""
        return self._layer_output if self.op == "dgrad" else self._layer_input

    @property
    def w_shape(self) -> tuple[int, ...]:
        """Shape of the layer's filters, axes in memory order."""
        return self._lay_out(self.k, self.group_c, self.t, self.r, self.s)

    @cached_property
    def y_shape(self) -> tuple[int, ...]:
        """Shape, in memory order, of the array that the operation writes."""
        if self.op == "wgrad":
            return self.w_shape
        return self._layer_input if self.op == "dgrad" else self._layer_output

    @property
    def _layer_input(self) -> tuple[int, ...]:
        return self._lay_out(self.n, self.c, self.d, self.h, self.w)

    @property
    def _layer_output(self) -> tuple[int, ...]:
        return self._lay_out(self.n, self.k, self.z, self.p, self.q)

    def _lay_out(self, first: int, channels: int, slices: int, *extent: int) -> tuple[int, ...]:
        return lay_out(self.layout, first, channels, *((slices,) * self.is_volume), *extent)

    def as_forward(self) -> ConvProblem:
        """The forward convolution that computes this gradient of a layer of unit stride.

        Its input is the gradient of the layer's output, its output the gradient of the layer's input; its filters are
        the layer's with input and output channels of a group exchanged and rows and columns reversed. Padding is
        ``dilation * (r - 1) - top``, and so on: negative where the layer pads by more than its filter reaches, which
        means that windows begin inside the image. Raises ValueError unless this is ``dgrad`` with unit strides.
        """
        if self.op != "dgrad" or (self.stride_d, *self.stride) != (1, 1, 1):
            raise ValueError(f"op={self.op!r} with stride={self.stride} is no forward convolution")
        reach = [d * (extent - 1) for d, extent in zip(self.dilation, (self.r, self.s), strict=True)]
        top, bottom, left, right = self.padding
        padding = (reach[0] - top, reach[0] - bottom, reach[1] - left, reach[1] - right)
        slices = self.dilation_d * (self.t - 1)
        padding_d = slices - self.padding_d[0], slices - self.padding_d[1]
        return replace(
            self, op="fprop", c=self.k, d=self.z, h=self.p, w=self.q, k=self.c, padding=padding, padding_d=padding_d
        )

    @cached_property
    def flops(self) -> int:
        """Operations of the direct convolution, a multiply-add counted as two; padding is counted as work.

        A gradient takes each product of the forward layer once, so its count is the same.
        """
        return 2 * self.pixels * self.k * self.group_c * self.taps

    @cached_property
    def bytes(self) -> int:
        """Fewest bytes to move: every input read once, every output written once."""
        return sum(prod(o.shape) * item_bytes(o.dtype) * (1 + (o.written and self.accumulate)) for o in self.operands)

    @property
    def terms(self) -> int:
        """Products that an element of the result sums, padding included."""
        channels = self.group_k if self.op == "dgrad" else self.group_c
        return self.pixels if self.op == "wgrad" else channels * self.taps

    def __str__(self) -> str:
        axes = 3 if self.is_volume else 2
        layout = self.layout.replace("H", "DH") if self.is_volume else self.layout
        stride, dilation = (self.stride_d, *self.stride)[-axes:], (self.dilation_d, *self.dilation)[-axes:]
        padding = (*self.padding_d, *self.padding)[-2 * axes :]
        shape = "x".join(map(str, (self.n, self.c, *(self.d, self.h, self.w)[-axes:])))
        text = f"{self.op} {layout} {self.dtype} {shape} k{self.k} {self.window}"
        text += f" stride {','.join(map(str, stride))} padding {','.join(map(str, padding))}"
        text += f" dilation {','.join(map(str, dilation))} groups {self.groups} precision {self.precision}"
        text += " bias" * self.bias + " scale" * self.scale + " add" * self.add + f" {self.activation or ''}".rstrip()
        return text + " accumulate" * self.accumulate + " batch_invariant" * self.batch_invariant


@dataclass(frozen=True)
class FilterProblem:
    """One correlation of images with small filters of one size.

    ``y[f,i,j] = delta + sum over u,v of kernel[f,u,v] * x[i + u - anchor_y, j + v - anchor_x]``

    ``batch`` images of ``h`` rows and ``w`` columns, for each of them ``filters`` results. Each result is as large as
    the image; with ``valid`` it has the pixels alone whose windows lie inside, ``y[f,i,j]`` reading from ``x[i,j]`` on,
    and anchor and border are (0, 0) and ``constant``. A pixel has ``channels`` values, which lie side by side and are
    filtered alike. With ``per_image`` each image has ``filters`` of its own. With a ``rank`` there is one filter, the
    sum of so many products of a column and a row, and it is given as these: each column before its row. With a
    ``reduction`` there is no filter: a result is the sum of a window's pixels times one weight, or the least, the
    largest or the middle one of them.
    Volumes have ``d`` slices, images one behind the other, and filters of ``kd`` slices, of which number ``anchor_z``
    lies on the output's; the sum is over these too.

    Rows lie ``x_pitch`` (``y_pitch``) elements apart, images ``x_step`` and results ``y_step`` elements apart.
    ``delta`` and the constant-border value are arguments of the call.

    ``dtype`` is the type of the image, ``out_dtype`` that of the result, by default the same. Both are converted from
    and to ``sum_dtype``, in which the weights are given and sums are taken: float64 where one of the two is float64 or
    int32, else float32. From int32 to int32 it is int32, which wraps around, unless float64 is asked for.

    Raises TypeError for sizes and an anchor that are not integers and for a dtype that `leanconv.filter2d` refuses,
    ValueError for another border, an anchor that is neither two integers nor one for both, and sums of another type.
    """

    batch: int
    h: int
    w: int
    kh: int
    kw: int
    anchor: tuple[int, int]
    border: BorderName = "reflect101"
    dtype: DtypeName = "float32"
    x_pitch: int = 0
    x_step: int = 0
    y_pitch: int = 0
    y_step: int = 0
    filters: int = 1
    #: None where it is the usual one, like the next
    out_dtype: DtypeName | None = None
    sum_dtype: DtypeName | None = None
    channels: int = 1
    valid: bool = False
    per_image: bool = False
    rank: int = 0
    reduction: Reduction | None = None
    d: int = 1
    kd: int = 1
    anchor_z: int = 0

    kind: ClassVar[Literal["filter2d"]] = "filter2d"
    scalars: ClassVar[tuple[str, ...]] = ("value", "delta")
    #: float32's accuracy: kernels may sum in any order, on tensor cores too, and compute large filters by transforms
    precision: ClassVar[Precision] = "fp32"
    #: nothing to choose: only layers have several orders of sums
    batch_invariant: ClassVar[bool] = False

    def __post_init__(self) -> None:
        sizes = ("batch", "h", "w", "kh", "kw", "x_pitch", "x_step", "y_pitch", "y_step", "filters", "channels", "rank")
        _make_plain(self, (*sizes, "d", "kd", "anchor_z"))
        one_of("image", self.dtype, FILTERS)
        options.one_of("border", self.border, tuple(BORDERS))
        if not _are_ints(self.anchor, 2):
            object.__setattr__(self, "anchor", options.pair("anchor", self.anchor, 0, "two: (row, column)"))
        if self.out_dtype is not None and one_of("result (out_dtype)", self.out_dtype, FILTERS) == self.dtype:
            object.__setattr__(self, "out_dtype", None)
        usual = filter_sum(self.dtype, self.result)
        if self.sum_dtype not in (None, usual) and (usual, self.sum_dtype) != ("int32", "float64"):
            raise ValueError(f"sum_dtype={self.sum_dtype!r}: from {self.dtype} to {self.result} sums are {usual}")
        if self.sum_dtype == usual:
            object.__setattr__(self, "sum_dtype", None)
        if self.reduction is not None:
            options.one_of("reduction", self.reduction, get_args(Reduction))
        for name in ("valid", "per_image"):
            object.__setattr__(self, name, options.yes_or_no(name, getattr(self, name)))
        if self.valid:
            object.__setattr__(self, "anchor", (0, 0))
            object.__setattr__(self, "anchor_z", 0)
            object.__setattr__(self, "border", "constant")

    @property
    def result(self) -> DtypeName:
        """The type of the result."""
        return self.out_dtype or self.dtype

    @property
    def sums(self) -> DtypeName:
        """The type of the weights, of all products and of their sums."""
        return self.sum_dtype or filter_sum(self.dtype, self.result)

    @property
    def is_whole(self) -> bool:
        """Whether the filter is given whole, with a weight for each pixel of a window."""
        return not self.rank and self.reduction is None

    def dense(self) -> FilterProblem:
        """The same on images, and with results, that have no gaps."""
        x, y = self.w * self.channels, self.out_w * self.channels
        return replace(self, x_pitch=x, x_step=x * self.h, y_pitch=y, y_step=y * self.out_h)

    @property
    def is_volume(self) -> bool:
        """Whether the images have an axis of slices."""
        return (self.d, self.kd) != (1, 1)

    @property
    def out_d(self) -> int:
        """Slices of a result."""
        return self.d - self.kd + 1 if self.valid else self.d

    @property
    def out_h(self) -> int:
        """Rows of a result; zero or negative where a filter does not fit a ``valid`` image."""
        return self.h - self.kh + 1 if self.valid else self.h

    @property
    def out_w(self) -> int:
        """Columns of a result, in pixels."""
        return self.w - self.kw + 1 if self.valid else self.w

    @property
    def is_empty(self) -> bool:
        """Whether the output has no elements."""
        return self.batch * self.d * self.h * self.w * self.channels == 0

    @property
    def itemsize(self) -> int:
        return item_bytes(self.dtype)

    @property
    def images(self) -> int:
        return self.batch

    @property
    def operands(self) -> tuple[Operand, ...]:
        """What a kernel reads, then what it writes."""
        x, w = Operand("x", self.x_shape, self.dtype), Operand("w", self.w_shape, self.sums)
        return x, w, Operand("y", self.y_shape, self.result, written=True)

    @property
    def x_shape(self) -> tuple[int, ...]:
        """The images as (batch, rows, columns), volumes as (batch, slices, rows, columns); with several channels these
        are the last axis."""
        channels = (self.channels,) * (self.channels != 1)
        return (self.batch, *((self.d,) * self.is_volume), self.h, self.w, *channels)

    @property
    def w_shape(self) -> tuple[int, ...]:
        """The filter; with several of them (filters, rows, columns); before that the batch where each image has its
        own. Of a ``rank``, (rank, rows + columns)."""
        if self.reduction is not None:
            return (1,)
        if self.rank:
            return self.rank, self.kh + self.kw
        batch, filters = (self.batch,) * self.per_image, (self.filters,) * (self.filters != 1)
        return (*batch, *filters, *((self.kd,) * self.is_volume), self.kh, self.kw)

    @property
    def y_shape(self) -> tuple[int, ...]:
        """The results, as the images; with several filters (batch, filters, rows, columns), or channels behind."""
        filters, channels = (self.filters,) * (self.filters != 1), (self.channels,) * (self.channels != 1)
        return (self.batch, *filters, *((self.out_d,) * self.is_volume), self.out_h, self.out_w, *channels)

    @property
    def flops(self) -> int:
        """Operations, a multiply-add counted as two."""
        # of a box of any size three operations along each axis
        taps = self.rank * (self.kh + self.kw) if self.rank else self.kd * self.kh * self.kw if self.is_whole else 3
        return 2 * prod(self.y_shape) * taps

    @property
    def bytes(self) -> int:
        """Fewest bytes to move: the image read once, every output written once."""
        return prod(self.x_shape) * self.itemsize + prod(self.y_shape) * item_bytes(self.result)

    def __str__(self) -> str:
        types = self.dtype if self.result == self.dtype else f"{self.dtype} to {self.result}"
        types += f" in {self.sums}" if self.sum_dtype else ""
        slices, taps = (f"{self.d}x", f"{self.kd}x") if self.is_volume else ("", "")
        size = f"{self.batch}x{slices}{self.h}x{self.w}" + f"x{self.channels}" * (self.channels != 1)
        filters = (f"{self.filters} filters" if self.filters > 1 else "filter") + " an image" * self.per_image
        filters = f"{filters} of rank {self.rank}" if self.rank else filters
        filters = f"{self.reduction} of" if self.reduction else filters
        anchor = f"{self.anchor_z}," * self.is_volume + f"{self.anchor[0]},{self.anchor[1]}"
        where = "valid" if self.valid else f"anchor {anchor} border {self.border}"
        return f"filter2d {types} {size} {filters} {taps}{self.kh}x{self.kw} {where}"


Problem = ConvProblem | FilterProblem
