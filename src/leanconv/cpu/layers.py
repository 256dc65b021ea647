"""What the CPU engine's algorithms of layers share.

Blocks that stay in the cache, the padded copy of the input that one block reads, and two layouts that they compute in,
with a third that is transposed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, lru_cache
from typing import Literal, NamedTuple

import numpy as np

from leanconv.cpu.blas import one_thread
from leanconv.dtypes import DtypeName, accumulator, is_integer, is_narrow, item_bytes, largest_product
from leanconv.kernels.contract import CpuAlgorithm, ceil_div
from leanconv.problem import ConvProblem
from leanconv.runtime import env
from leanconv.runtime.threads import over_blocks

#: Bytes of temporaries that a block may take, and the fewest output pixels that keep a matrix product efficient.
#: Explored (two cores with 1 MiB of second-level cache each, 0bd16dc): 1 to 4 MiB are within 5 %, 256 KiB costs 20 %.
BLOCK_BYTES = 2 << 20
LEAST_PIXELS = 384
#: Elements of a buffer that is quicker cleared whole than at its four sides.
SMALL = 8192
#: How many times the pixels that they read windows may cover: beyond that, these pixels are copied one by one.
FAR = 4


class Block(NamedTuple):
    """Images ``first`` to ``last`` and output rows ``top`` to ``bottom``, ends excluded."""

    first: int
    last: int
    top: int
    bottom: int

    @property
    def images(self) -> int:
        return self.last - self.first

    @property
    def rows(self) -> int:
        return self.bottom - self.top

    def of(self, problem: ConvProblem, array: np.ndarray) -> np.ndarray:
        """The block's part of an array that lies as the output, a view."""
        images, rows = array[self.first : self.last], slice(self.top, self.bottom)
        return images[:, :, rows] if problem.layout == "NCHW" else images[:, rows]


class Part(NamedTuple):
    """What one thread computes: images, filters, output rows or columns ``first`` to ``last``, its end excluded; of a
    gradient of filters their input channels, "C"."""

    axis: Literal["N", "K", "P", "Q", "C"]
    first: int
    last: int

    def of_output(self, problem: ConvProblem, y: np.ndarray) -> np.ndarray:
        """The part's outputs, a view."""
        at = problem.layout.index({"N": "N", "K": "C", "P": "H", "Q": "W", "C": "C"}[self.axis])
        some = slice(self.first, self.last)
        if self.axis == "C" and problem.groups > 1:
            at, some = problem.layout.index("N"), self._filters(problem)
        return y[tuple([slice(None)] * at + [some])]

    def _filters(self, problem: ConvProblem) -> slice:
        """Those of the groups whose channels these are."""
        return slice(*(end // problem.group_c * problem.group_k for end in (self.first, self.last)))

    def layer(
        self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None
    ) -> tuple[ConvProblem, np.ndarray, np.ndarray, np.ndarray | None]:
        """The layer of the part's outputs alone, and its operands."""
        some, channels = slice(self.first, self.last), problem.layout.index("C")
        if self.axis == "N":
            return replace(problem, n=self.last - self.first), x[some], w, bias
        if self.axis == "K":
            part = self.problem(problem)
            if problem.groups > 1:
                c = slice(
                    self.first // problem.group_k * problem.group_c, self.last // problem.group_k * problem.group_c
                )
                x = x[tuple([slice(None)] * channels + [c])]
            return part, x, w[some], None if bias is None else bias[some]
        if self.axis == "C":
            before = [slice(None)] * channels
            grad = w if problem.groups == 1 else w[tuple([*before, self._filters(problem)])]
            return self.problem(problem), x[tuple([*before, some])], grad, None
        return *alone(problem, x, "PQ".index(self.axis), self.first, self.last), w, bias

    def problem(self, problem: ConvProblem) -> ConvProblem:
        """The layer of the part's outputs alone."""
        count = self.last - self.first
        if self.axis == "N":
            return replace(problem, n=count)
        if self.axis == "K":
            groups = max(1, problem.groups * count // problem.k)
            return replace(problem, k=count, groups=groups, c=problem.group_c * groups)
        if self.axis == "C":
            groups = max(1, problem.groups * count // problem.c)
            return replace(problem, c=count, groups=groups, k=problem.group_k * groups)
        axis = "PQ".index(self.axis)
        covered = (count - 1) * problem.stride[axis] + ((problem.r, problem.s)[axis] - 1) * problem.dilation[axis] + 1
        (top, bottom, left, right) = problem.padding
        if axis == 0:
            return replace(problem, h=covered, padding=(0, 0, left, right))
        return replace(problem, w=covered, padding=(top, bottom, 0, 0))


#: Cost from which a layer is computed by several threads: a half of a millisecond; and operations below which none
#: costs as much.
LEAST_COST, SMALL_WORK = 1e8, 1 << 17


@lru_cache(maxsize=4096)
def _parts_for(algorithm: LayerAlgorithm, problem: ConvProblem, threads: int) -> tuple[Part, ...]:
    """The parts in which a layer is computed by so many threads; none where one is as quick."""
    cost = algorithm.cost(problem) if problem.op == "fprop" else float(problem.flops)
    if cost < LEAST_COST:
        return ()
    found: list[tuple[float, tuple[Part, ...]]] = []
    lengths: dict[Literal["N", "K", "P", "Q", "C"], tuple[int, int]] = {"N": (problem.n, 1)}
    if problem.op == "wgrad":  # a sum over images and pixels
        lengths = {"C": (problem.c, problem.group_c if problem.groups > 1 else 1)}
    if problem.op == "fprop":
        step = problem.group_k if problem.groups > 1 else 1
        lengths |= {"K": (problem.k, step), "P": (problem.p, 1), "Q": (problem.q, 1)}
    for axis, (length, step) in lengths.items():
        count = min(threads, length // step)
        each = ceil_div(length // step, max(1, count)) * step
        parts = tuple(Part(axis, first, min(length, first + each)) for first in range(0, length, each))
        if len(parts) > 1 and all(_takes(algorithm, problem, each) for each in parts):
            part = parts[0].problem(problem)
            longest = algorithm.cost(part) if problem.op == "fprop" else float(part.flops)
            found.append((longest * ceil_div(len(parts), threads), parts))
    least = min(found, key=lambda pair: pair[0], default=(cost, ()))
    return least[1] if least[0] < 0.8 * cost else ()


def _takes(algorithm: LayerAlgorithm, problem: ConvProblem, part: Part) -> bool:
    """Whether it computes a part, too, whose rows are shorter and whose windows may see more padding on average."""
    x, w = (np.broadcast_to(np.zeros((), problem.dtype), shape) for shape in (problem.x_shape, problem.w_shape))
    return problem.op != "fprop" or not algorithm.reasons(part.layer(problem, x, w, None)[0], None)


#: Just below the 32 MiB that glibc's threshold grows to.
_KEPT_BYTES = 31 << 20


@cache
def keep_freed_memory() -> None:
    """Have the C library keep the memory of temporaries for the next call.

    glibc gives arrays above a threshold pages of their own, of which each costs a fault. The threshold grows to the
    largest that was freed: one is made and freed here, untouched. Explored (EPYC, one thread, 2aecdf5): without it Γ8
    on 64 channels of 56 x 56 pixels took 1900 faults a call, and 7.7 ms instead of 2.8 in NCHW.
    """
    np.empty(_KEPT_BYTES, np.uint8)


def most_pixels(pixel_bytes: int, budget: int) -> int:
    return max(LEAST_PIXELS, budget // max(1, pixel_bytes))


def blocks(problem: ConvProblem, pixel_bytes: int, budget: int = BLOCK_BYTES) -> Iterator[Block]:
    """Cut the output into strips of rows of one image or, where images are small, into several whole images.

    ``pixel_bytes`` is what the temporaries of one output pixel take.
    """
    pixels = most_pixels(pixel_bytes, budget)
    rows = min(problem.p, max(1, pixels // problem.q))
    if rows == problem.p:
        images = max(1, pixels // (problem.p * problem.q))
        for first in range(0, problem.n, images):
            yield Block(first, min(problem.n, first + images), 0, problem.p)
        return
    rows = ceil_div(problem.p, ceil_div(problem.p, rows))
    for image in range(problem.n):
        for top in range(0, problem.p, rows):
            yield Block(image, image + 1, top, min(problem.p, top + rows))


def alone(problem: ConvProblem, x: np.ndarray, axis: int, first: int, last: int) -> tuple[ConvProblem, np.ndarray]:
    """The layer of output rows (``axis`` 0) or columns (1) ``first`` to ``last`` alone, and what it reads of ``x``.

    That is a view. Where windows cover far more than they read, it is a copy of the pixels that they read, and the
    layer's stride and dilation are those at which they lie there.
    """
    taps, length = ((problem.r, problem.h), (problem.s, problem.w))[axis]
    stride, dilation, count = problem.stride[axis], problem.dilation[axis], last - first
    begin, covered = first * stride - problem.padding[2 * axis], (count - 1) * stride + (taps - 1) * dilation + 1
    low, high = max(0, begin), min(length, begin + covered)
    along, sides = axis + (2 if problem.layout == "NCHW" else 1), (0, 0)
    source = x.swapaxes(0, along)
    if _is_far(taps, count, stride, dilation):
        step, apart = (taps, 1) if dilation == 1 else (1, count)
        x = np.zeros((*x.shape[:along], taps * count, *x.shape[along + 1 :]), x.dtype)
        target = x.swapaxes(0, along)
        for tap in range(taps):
            outputs, pixels = inside(begin + tap * dilation, stride, count, length)
            target[tap * apart :: step][outputs] = source[pixels]
        stride, dilation = step, apart
    elif low < high:
        x, sides = source[low:high].swapaxes(0, along), (low - begin, begin + covered - high)
    else:  # nothing but padding
        x = np.zeros((*x.shape[:along], covered, *x.shape[along + 1 :]), x.dtype)
    (sh, sw), (dh, dw), (top, bottom, left, right) = problem.stride, problem.dilation, problem.padding
    size = x.shape[along]
    if axis == 0:
        return replace(problem, h=size, stride=(stride, sw), dilation=(dilation, dw), padding=(*sides, left, right)), x
    return replace(problem, w=size, stride=(sh, stride), dilation=(dh, dilation), padding=(top, bottom, *sides)), x


def inside(at: int, stride: int, count: int, length: int) -> tuple[slice, slice]:
    """Which of ``count`` outputs have a tap's pixel inside an axis of ``length``, and these pixels; ``at`` is the first
    output's, and ``stride`` lies between them."""
    low, high = max(0, ceil_div(-at, stride)), min(count, ceil_div(length - at, stride))
    if low >= high:
        return slice(0), slice(0)
    return slice(low, high), slice(at + low * stride, at + (high - 1) * stride + 1, stride)


def _is_far(taps: int, count: int, stride: int, dilation: int) -> bool:
    return (count - 1) * stride + (taps - 1) * dilation >= FAR * taps * count


def far_blocks(problem: ConvProblem) -> list[Block]:
    """The blocks to compute one by one of a layer whose windows cover far more than they read; none of any other."""
    if max(*problem.stride, *problem.dilation) <= FAR:
        return []
    every = list(blocks(problem, problem.c * problem.r * problem.s * item_bytes(problem.dtype)))
    rows = _is_far(problem.r, every[0].rows, problem.stride[0], problem.dilation[0])
    far = rows or _is_far(problem.s, problem.q, problem.stride[1], problem.dilation[1])
    return every if far else []


def block_alone(problem: ConvProblem, x: np.ndarray, block: Block) -> tuple[ConvProblem, np.ndarray]:
    """The layer of a block's outputs alone, and what it reads of x."""
    part, x = alone(replace(problem, n=block.images), x[block.first : block.last], 0, block.top, block.bottom)
    return alone(part, x, 1, 0, problem.q)


def is_in_one_part(problem: ConvProblem) -> bool:
    return problem.q <= 4 * LEAST_PIXELS and max(problem.stride + problem.dilation) <= FAR


def in_parts(
    problem: ConvProblem,
    x: np.ndarray,
    pixel_bytes: int,
    compute: Callable[[ConvProblem, np.ndarray], np.ndarray],
    budget: int = BLOCK_BYTES,
) -> np.ndarray:
    """The result of ``compute(problem, x)``: of long rows in bands of columns, where a block has whole rows, and of
    windows that cover far more than they read block by block, so that memory and time follow the outputs.

    A part is a layer of its own. ``pixel_bytes`` is what the temporaries of one output pixel take.
    """
    if is_in_one_part(problem):
        return compute(problem, x)  # as the two rules below say, without a look at blocks
    columns, far = most_pixels(pixel_bytes, budget), far_blocks(problem)
    # the bands' results are copied once more: of rows not much longer than a block that costs more than it saves
    if problem.q <= 4 * columns and not far:
        return compute(problem, x)
    y = np.empty(problem.y_shape, x.dtype)
    for block in far:
        block.of(problem, y)[...] = in_parts(*block_alone(problem, x, block), pixel_bytes, compute, budget)
    if far:
        return y
    columns = ceil_div(problem.q, ceil_div(problem.q, columns))
    for first in range(0, problem.q, columns):
        last = min(problem.q, first + columns)
        into = y[..., first:last] if problem.layout == "NCHW" else y[:, :, first:last]
        into[...] = compute(*alone(problem, x, 1, first, last))
    return y


class PaddedInput:
    """The input rows that a block reads, with zeros around them, in one buffer that all blocks use in turn."""

    def __init__(self, problem: ConvProblem, x: np.ndarray, width: int | None = None) -> None:
        """``width`` is the number of columns of the buffer, by default those that the outputs need."""
        self.problem = problem
        self.x = x
        self.width = width or (problem.q - 1) * problem.stride[1] + (problem.s - 1) * problem.dilation[1] + 1
        self.buffer = np.empty(0, x.dtype)

    def load(self, block: Block) -> np.ndarray:
        """The rows of ``block``: shape (C, images, rows, width) for NCHW, (images, rows, width, C) for NHWC."""
        problem = self.problem
        rows = (block.rows - 1) * problem.stride[0] + (problem.r - 1) * problem.dilation[0] + 1
        size = block.images * rows * self.width * problem.c
        if self.buffer.size < size:
            self.buffer = np.empty(size, self.x.dtype)
        source = self.x[block.first : block.last]
        if problem.layout == "NCHW":
            padded = self.buffer[:size].reshape(problem.c, block.images, rows, self.width)
        else:
            padded = self.buffer[:size].reshape(block.images, rows, self.width, problem.c)
        first_row = block.top * problem.stride[0] - problem.padding[0]
        # Where padding is negative the first columns of the image are left out.
        top, left, skipped = max(0, -first_row), max(0, problem.padding[2]), max(0, -problem.padding[2])
        bottom = min(rows, problem.h - first_row)
        right = min(self.width, left + problem.w - skipped)
        if size < SMALL or top >= bottom or left >= right:
            padded[...] = 0
        else:
            # one view with the axes (images, rows, columns, channels) serves both layouts
            target = padded.transpose(1, 2, 3, 0) if problem.layout == "NCHW" else padded
            target[:, :top] = 0
            target[:, bottom:] = 0
            target[:, top:bottom, :left] = 0
            target[:, top:bottom, right:] = 0
        if top >= bottom or left >= right:
            return padded
        at_rows, at_columns = slice(first_row + top, first_row + bottom), slice(skipped, skipped + right - left)
        if problem.layout == "NCHW":
            # NOTE: NumPy copies in the memory order of the target only if both sides are given in that order.
            padded[:, :, top:bottom, left:right] = source[:, :, at_rows, at_columns].transpose(1, 0, 2, 3)
        else:
            padded[:, top:bottom, left:right] = source[:, at_rows, at_columns]
        return padded


def parts(
    problem: ConvProblem, x: np.ndarray, y: np.ndarray, bias: np.ndarray | None, pixel_bytes: int,
    budget: int = BLOCK_BYTES, width: int | None = None, tile_rows: int = 1,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:  # fmt: skip
    """For each block the padded rows that it reads, for whole tiles, and its part of ``y``, to be written.

    Bias and activation follow before the next block, while the part is in the cache.
    """
    padded = PaddedInput(problem, x, width)
    for block in blocks(problem, pixel_bytes, budget):
        part, rows = block.of(problem, y), ceil_div(block.rows, tile_rows) * tile_rows
        yield padded.load(block._replace(bottom=block.top + rows)), part
        finish(problem, part, bias)


def windows(problem: ConvProblem, padded: np.ndarray) -> np.ndarray:
    """Every window of ``padded`` as a view: (C, R, S, images, P, Q) for NCHW, (images, P, Q, R, S, C) for NHWC."""
    at = padded.strides
    (sh, sw), (dh, dw) = problem.stride, problem.dilation
    if problem.layout == "NCHW":
        channels, images, height, width = padded.shape
        strides = (at[0], dh * at[2], dw * at[3], at[1], sh * at[2], sw * at[3])
    else:
        images, height, width, channels = padded.shape
        strides = (at[0], sh * at[1], sw * at[2], dh * at[1], dw * at[2], at[3])
    rows = (height - (problem.r - 1) * dh - 1) // sh + 1
    columns = (width - (problem.s - 1) * dw - 1) // sw + 1
    taps, outputs = (problem.r, problem.s), (images, rows, columns)
    shape = (channels, *taps, *outputs) if problem.layout == "NCHW" else (*outputs, *taps, channels)
    # as_strided takes longer
    return np.ndarray(shape, padded.dtype, padded, 0, strides)


def finish(problem: ConvProblem, y: np.ndarray, bias: np.ndarray | None) -> None:
    """Add ``bias`` and apply the activation in place, while the block is still in the cache."""
    if bias is not None:
        y += bias.reshape([problem.k if axis == "C" else 1 for axis in problem.layout])
    if problem.activation == "relu":
        np.maximum(y, 0, out=y)


def shared_limits(problem: ConvProblem, ops: tuple[str, ...] = ("fprop",), transforms: bool = False) -> list[str]:
    """What an algorithm of the CPU engine that computes ``ops`` cannot do. ``transforms``: it transforms tiles."""
    reasons = []
    if problem.op not in ops:
        reasons.append(f"on the CPU it computes op {' and '.join(map(repr, ops))}, not {problem.op!r}")
    if transforms and is_integer(problem.dtype):
        reasons.append(f"its transforms are made for fractions, and sums of {problem.dtype} are exact")
    if problem.accumulate:
        reasons.append("accumulate=True: on the CPU results are stored, not added to what the output holds")
    return reasons


def product_cost(problem: ConvProblem) -> float:
    """Cost of the matrix products of a layer, in operations at the full speed of BLAS: the unit of all ``cost``.

    Fewer than 16 filters in a group leave most of a vector register idle, and in NHWC most of a cache line as well.
    A pass over an array counts 80 for each element copied; these figures were fitted on two cores.
    """
    idle = max(1.0, 16 / max(1, problem.group_k))
    return problem.flops * (idle if problem.layout == "NCHW" else idle * idle)


def is_transposed(problem: ConvProblem) -> bool:
    """Whether a layer is computed in NCHW, which it is not in."""
    small = problem.groups > 1 and problem.group_c > 1 and max(problem.group_c, problem.group_k) < 16
    return problem.layout == "CHWN" or (problem.layout == "NHWC" and problem.op == "fprop" and small)


class LayerAlgorithm(CpuAlgorithm):
    """An algorithm for layers. It computes in NCHW and NHWC; a layer in CHWN is transposed to NCHW, and back.
    Float16 and bfloat16 are computed in float32, and the result is rounded once. Integers of 8 bits are computed in
    float32 where no sum can pass 2**24, else in float64: both are exact there, and have BLAS. Bias and activation
    follow in int32, where a sum with its bias wraps around as on a GPU.

    With the batch innermost neither the rows nor the channels of an image are contiguous, and the matrix products that
    do the arithmetic here need one of the two. Small groups in NHWC are transposed as well: their channels are short
    runs (32 groups of 4 on 28 x 28 pixels took three times as long as in NCHW).
    """

    solves = "conv2d"

    #: what a call costs beside `compute_cost`, in its unit, more than one of `Im2col`
    call_cost = 0.0
    #: bytes of temporaries of a block
    budget = BLOCK_BYTES

    def pixel_bytes(self, problem: ConvProblem) -> int:
        """Bytes of temporaries of one output pixel; 0 where rows of any length may be computed at once."""
        return 0

    def compute(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        """The result, a new contiguous array, of a problem in NCHW or NHWC."""

        def one(part: ConvProblem, seen: np.ndarray) -> np.ndarray:
            y = np.empty(part.y_shape, x.dtype)
            self.fill(part, seen, w, bias, y)
            return y

        return in_parts(problem, x, self.pixel_bytes(problem), one, self.budget)

    def fill(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, y: np.ndarray) -> None:
        """Write the result of a forward pass, which is not empty, to ``y``; for what has no `compute` of its own."""
        raise NotImplementedError

    @abstractmethod
    def compute_cost(self, problem: ConvProblem) -> float:
        """A guess at the time that `compute` takes, in the unit of `product_cost`."""

    def cost(self, problem: ConvProblem) -> float:
        """That of `compute`: transposing takes every algorithm the same time."""
        problem = replace(problem, layout="NCHW") if is_transposed(problem) else problem
        return self.call_cost + self.compute_cost(problem)

    def run(
        self,
        problem: ConvProblem,
        x: np.ndarray,
        w: np.ndarray,
        bias: np.ndarray | None = None,
        value: float = 0,
        delta: float = 0,
    ) -> np.ndarray:
        if is_integer(problem.dtype):
            return self._of_integers(problem, x, w, bias)
        if is_narrow(problem.dtype):
            wide = accumulator(problem.dtype).name
            y = self.run(
                replace(problem, dtype=wide),
                x.astype(wide),
                w.astype(wide),
                None if bias is None else bias.astype(wide),
            )
            with np.errstate(over="ignore"):  # to infinity, as on a GPU
                return y.astype(x.dtype)
        if 0 in problem.y_shape:
            return np.empty(problem.y_shape, x.dtype)
        keep_freed_memory()
        if not is_transposed(problem):
            return self._on_threads(problem, x, w, bias)
        there, back = ((3, 0, 1, 2), (1, 2, 3, 0)) if problem.layout == "CHWN" else ((0, 3, 1, 2), (0, 2, 3, 1))
        x, w = (np.ascontiguousarray(array.transpose(there)) for array in (x, w))
        y = self._on_threads(replace(problem, layout="NCHW"), x, w, bias)
        return np.ascontiguousarray(y.transpose(back))

    def _on_threads(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        """`compute`, by several threads where the layer is large enough to be cut into parts."""
        threads = env.threads() if problem.flops > SMALL_WORK else 1
        parts = _parts_for(self, problem, threads) if threads > 1 else ()
        matrices = min(problem.group_k, problem.group_c * problem.r * problem.s, problem.p * problem.q) > 1
        with one_thread(problem.flops, matrices), np.errstate(invalid="ignore", over="ignore"):
            if not parts:
                return self.compute(problem, x, w, bias)
            y = np.empty(problem.y_shape, x.dtype)

            def one(part: Part) -> None:
                # in here a second time: so no product of a part takes several threads of BLAS
                with one_thread(problem.flops), np.errstate(invalid="ignore", over="ignore"):
                    part.of_output(problem, y)[...] = self.compute(*part.layer(problem, x, w, bias))

            over_blocks(one, parts, threads)
        return y

    def _of_integers(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        products = problem.group_c * problem.r * problem.s
        wide: DtypeName = "float32" if products * largest_product(problem.dtype) <= 2**24 else "float64"
        sums = replace(problem, dtype=wide, bias=False, activation=None)
        y = self.run(sums, x.astype(wide), w.astype(wide)).astype(np.int32)
        finish(problem, y, bias)
        return y
