"""Layers without groups by machine code (`machine_code`): direct convolution, with no copy of the windows.

A tile of neighbouring outputs times some vectors of filters stays in registers. For every row of taps, tap and channel
a vector of weights is loaded, and a pixel's number is multiplied with it in all lanes. That takes no more loads than a
matrix product does, which would need the windows as a matrix first. Sums are chains of multiply-adds in direct order:
rows of taps, taps, channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, product
from typing import Any, NamedTuple

import numpy as np

from leanconv.cpu.channels import Rows, aligned, rows_of
from leanconv.cpu.layers import alone, finish
from leanconv.cpu.machine_code import MOST_CODE, Code, Kernel, Tabled, Vectors, address, function, reads, widest
from leanconv.cpu.transpose_code import copy_of, copy_transposed, to_channels_first, to_channels_last
from leanconv.dtypes import item_bytes
from leanconv.kernels.contract import ceil_div
from leanconv.problem import ConvProblem

#: Bytes of pixels and results that are transposed at a time, and of weights of more than the cache holds.
STRIP_BYTES, BLOCK_BYTES = 1 << 20, 1 << 19
#: Channels below which pixels are read where they are, and bytes of weights that stay in the second level.
FEW_CHANNELS, CACHED = 8, 5 << 18

#: Bytes of pixels that are vectors of weights. They are copied where channels are so many bytes apart, and more of them
#: than the processor remembers the pages of.
PIXEL_BYTES, FAR_BYTES, FEW_PAGES = 1 << 18, 4096, 64
#: The most bytes of weights that are kept for the next call of a small layer.
KEPT_BYTES = 192 << 10
#: Channels that are unrolled.
UNROLLED = 4
#: The most taps of a row with which channels are unrolled beside padding.
FEW_TAPS = 8

# as in machine_code; and two registers more, which are the caller's
_TABLE, _ROWS = 7, 6
_X, _W, _Y, _COUNT, _FROM, _WEIGHTS, _LEFT, _TILES, _FILTERS, _TAPS = 9, 10, 11, 0, 2, 8, 1, 3, 5, 12


class Dense(NamedTuple):
    """What is compiled in."""

    vectors: Vectors
    channels: int
    #: vectors of filters, and rows of taps
    filters: int
    rows: int
    width: int
    outputs: int
    taps: int
    stride: int
    dilation: int
    padding: int
    #: bytes from one pixel of the image, and from one row that taps read, to the next
    pixel: int
    row: int
    #: and from one channel to the next
    channel: int
    #: bytes from the weights of one row of taps, tap, channel and vector of filters to those of the next
    weights: tuple[int, int, int, int]
    #: bytes from one pixel of results, and from one vector of filters, to the next; and how far the last vector is back
    result: int
    vector: int
    back: int

    @property
    def tile(self) -> tuple[int, int]:
        return tile_of(self.filters, self.vectors.size)


def tile_of(filters: int, size: int) -> tuple[int, int]:
    """Vectors of filters at a time, of registers of so many bytes, and the most outputs: three where two would leave
    one alone."""
    together = 3 if size == 64 and filters % 2 and filters % 3 == 0 else 2
    return together, ((32 if size == 64 else 16) - 2) // together - 1


def assemble(layer: Dense) -> bytes:
    """The code: rows of outputs, tiles of a row, vectors of filters, rows of taps, taps, channels."""
    code, size = Code(layer.vectors), layer.vectors.size
    registers = layer.vectors.registers
    together, most = layer.tile
    across = ceil_div(layer.outputs, ceil_div(layer.outputs, most))
    of_row, of_tap, of_channel, of_vector = layer.weights
    # pixels in place of weights, all of one tap, overlap as the results do; of packed filters the last vector is whole
    weights_back = layer.back if of_tap == 0 else 0

    def channel(outputs: list[tuple[int, int]], some: int, c: int) -> None:
        for j in range(some):
            code.load(registers - 1 - j, (_WEIGHTS, c * of_channel + j * of_vector))
        for number, (i, at) in enumerate(outputs):
            where = _FROM, at * layer.pixel + c * layer.channel
            if some == 1 and size == 64:
                code.multiply_add_one(i, registers - 1, where)
                continue
            one = registers - 1 - some - number % 2
            code.broadcast(one, where)
            for j in range(some):
                code.multiply_add_of(i * some + j, registers - 1 - j, one)

    def numbers(outputs: list[tuple[int, int]], some: int, count: int, at_once: int) -> None:
        """So many channels, one after another, or those of several taps; the pixels' address then is what follows."""
        if times := count // at_once:
            code.set(_COUNT, times)
            with code.repeated(_COUNT):
                for c in range(at_once):
                    channel(outputs, some, c)
                code.add(_FROM, at_once * layer.channel)
                code.add(_WEIGHTS, at_once * of_channel)
        rest = count % at_once
        for c in range(rest):
            channel(outputs, some, c)
        if rest:
            code.add(_FROM, rest * layer.channel)
            code.add(_WEIGHTS, rest * of_channel)

    def taps(outputs: list[tuple[int, int]], some: int, times: int, at_once: int) -> None:
        """Some taps that find the same outputs."""
        step, every, channels = layer.dilation * layer.pixel, layer.channels * layer.channel, layer.channels
        if not outputs:
            code.add(_WEIGHTS, times * of_tap)
            code.add(_FROM, times * step)
        elif step == every and of_tap == channels * of_channel:
            numbers(outputs, some, times * channels, at_once)
        else:
            code.set(_TAPS, times)
            with code.repeated(_TAPS):
                numbers(outputs, some, channels, at_once)
                code.add(_FROM, step - every)
                code.add(_WEIGHTS, of_tap - channels * of_channel)

    def vectors(tile: list[list[tuple[int, int]]], count: int, some: int) -> None:
        """Some vectors of filters, for a tile."""
        for i in range(count * some):
            code.clear(i)
        code.set(_COUNT, 0)
        code.sum_of(_FROM, _X, _COUNT)
        code.sum_of(_WEIGHTS, _W, _COUNT)
        code.read(_LEFT, (_TABLE, 24))
        alike = [[(i, at - tap * layer.dilation) for i, at in outputs] for tap, outputs in enumerate(tile)]
        with code.repeated(_LEFT):
            for outputs, same in groupby(alike):
                few = layer.taps <= FEW_TAPS or len(outputs) == count
                taps(outputs, some, len(list(same)), UNROLLED if few else 1)
            code.add(_FROM, layer.row - layer.taps * layer.dilation * layer.pixel)
            code.add(_WEIGHTS, of_row - layer.taps * of_tap)
        for i in range(count):
            for j in range(some):
                code.store(i * some + j, (_Y, i * layer.result + j * layer.vector))

    def tile(first: int, count: int) -> None:
        found, (groups, left) = reads(layer, first, count), divmod(layer.filters, together)
        if layer.back and not left:  # the last vector overlaps the one before: alone
            groups, left = groups - 1, together
        if groups:
            code.set(_FILTERS, groups)
            with code.repeated(_FILTERS):
                vectors(found, count, together)
                code.add(_Y, together * layer.vector)
                code.add(_W, together * of_vector)
        for i in range(left):
            if i == left - 1 and layer.back:
                code.add(_Y, -layer.back)
                code.add(_W, -weights_back)
            vectors(found, count, 1)
            code.add(_Y, layer.vector)
            code.add(_W, of_vector)
        code.add(_Y, count * layer.result - layer.filters * layer.vector + layer.back)
        code.add(_W, weights_back - layer.filters * of_vector)
        code.add(_X, count * layer.stride * layer.pixel)

    firsts = range(0, layer.outputs, across)
    with code.repeated(_ROWS):
        code.read_row((_X, _W, _Y), _TABLE)
        sizes = [(first, min(across, layer.outputs - first)) for first in firsts]
        place = 0
        for _, same in groupby(sizes, key=lambda each: (reads(layer, *each), each[1])):
            alike = list(same)
            code.set(_TILES, len(alike))
            with code.repeated(_TILES):
                tile(place, alike[0][1])
            place += sum(count for _, count in alike)
        code.add(_TABLE, 32)
    return code.finish()


@lru_cache(maxsize=256)
def kernel(layer: Dense) -> Kernel | None:
    """A function for a layer; None where there can be none, or for much code."""
    reach = max(layer.row, layer.width * layer.pixel, layer.rows * layer.taps * layer.channels * layer.vectors.size)
    reach = max(reach, layer.outputs * layer.result) * max(2, layer.filters)
    if max(reach, layer.channels * layer.channel) >= 2**31 or _is_much(*layer.tile, layer):
        return None
    return function(assemble(layer))


def _is_much(together: int, most: int, layer: Any) -> bool:
    """Whether a layer would take much code: there are tiles beside padding, and taps of these that find other outputs
    than their neighbours."""
    tiles = min(ceil_div(layer.outputs, most), 3 + 2 * ceil_div(layer.padding, most * layer.stride))
    unrolled = UNROLLED if layer.taps <= FEW_TAPS else 1
    return tiles * min(layer.taps, most + 1) * most * unrolled * 15 * together > 4 * MOST_CODE


def lanes_for(problem: ConvProblem) -> int:
    """Filters of a vector of the machine code for a layer; 0 where there is none for it."""
    item = item_bytes(problem.dtype)
    if widest() == 0 or problem.groups > 1 or item not in (4, 8) or problem.layout == "CHWN":
        return 0
    lanes = widest() // item
    while lanes > problem.k and lanes * item > 32:
        lanes //= 2
    return lanes if lanes <= problem.k else 0


@lru_cache(maxsize=512)
def as_one_row(problem: ConvProblem) -> ConvProblem:
    """A layer of one tap in NHWC that reads each pixel once has all of them in one row, others stay as they are."""
    pixels = problem.n * problem.h * problem.w
    one = problem.layout == "NHWC" and problem.r == problem.s == 1 and problem.y_shape[:3] == problem.x_shape[:3]
    usual = one and problem.stride == problem.dilation == (1, 1) and pixels * max(problem.c, problem.k) < 1 << 26
    return replace(problem, n=1, h=1, w=pixels) if usual and not any(problem.padding) else problem


def cost(problem: ConvProblem, lanes: int) -> float:
    """In the unit of `layers.product_cost`. Explored (Xeon with AVX-512, one thread): the code is a quarter quicker
    than a product of matrices whose windows are copied; with less than 9 outputs a tile it waits for weights. A number
    takes 0.25 ns to be transposed, 0.4 where it cannot be stored in whole lines."""
    row, vectors, size = as_one_row(problem), ceil_div(problem.k, lanes), lanes * item_bytes(problem.dtype)
    pixels = problem.h * problem.w
    if _has_plain_pixels(problem, lanes):
        return 0.8e6 + problem.flops * 0.95 * ceil_div(pixels, lanes) * lanes / pixels * (widest() // size)
    together, most = tile_of(vectors, size)
    across = ceil_div(row.q, ceil_div(row.q, most))
    weights = problem.r * problem.s * problem.c * vectors * lanes
    filters = (vectors + 0.1 * (vectors % together)) * lanes * (widest() // size)
    speed = (0.92 if problem.r * problem.s == 1 else 0.72) * max(1.0, (9.5 if size == 64 else 5.0) / across)
    total = problem.flops / problem.k * filters * speed + 30.0 * weights
    if problem.layout == "NHWC":
        return total
    moved = 30.0 * problem.c * problem.h * problem.w if problem.c >= FEW_CHANNELS else 0.0
    return total + 3e6 + problem.n * (moved + 45.0 * problem.k * problem.p * problem.q)


def compute(problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, y: np.ndarray) -> bool:
    """Write a layer, in NCHW or NHWC, to ``y``; False where there is no code for it."""
    lanes = lanes_for(problem)
    if lanes == 0:
        return False
    way = _channels_last if problem.layout == "NHWC" else _channels_first
    if _has_plain_pixels(problem, lanes) and _lie_together(problem, x, w):
        way = _by_pixels
    done = way(problem, lanes, x, w, y)
    if done:
        finish(problem, y, bias)
    return done


def _pack(lanes: int, w: np.ndarray, weights: np.ndarray) -> None:
    """Filters as vectors of filters of which each has the axes of a filter, and a vector's lanes."""
    whole, rest = len(w) // lanes * lanes, len(w) % lanes > 0
    # the last filters, some of them for the second time
    for some, into in ((w[:whole], weights[: whole // lanes]), (w[-lanes:], weights[-1:]))[not whole : 1 + rest]:
        copy_transposed(some.reshape(len(into), lanes, -1), into)


class _Cuts(NamedTuple):
    """Ranges of filters, and the vectors of each: so many at a time that their weights stay in the cache."""

    vectors: int
    some: int
    ranges: tuple[tuple[int, int, int, int], ...]


@lru_cache(maxsize=512)
def _cuts(problem: ConvProblem, lanes: int) -> _Cuts:
    vectors, size = ceil_div(problem.k, lanes), lanes * item_bytes(problem.dtype)
    of_vector, some = problem.r * problem.s * problem.c * size, vectors
    if vectors * of_vector > CACHED:
        together, _ = tile_of(vectors, size)
        some = min(vectors, together * max(1, BLOCK_BYTES // (together * of_vector)))
    ranges = []
    for first in range(0, vectors, some):
        last = min(problem.k, (first + some) * lanes)
        # the last of them may be fewer than a vector has
        begin = min(first * lanes, last - lanes)
        ranges.append((begin, last, first, first + ceil_div(last - begin, lanes)))
    return _Cuts(vectors, some, tuple(ranges))


class _Filters:
    """The ranges of filters with their weights, which are kept for a second time where ``keeps``."""

    def __init__(self, problem: ConvProblem, lanes: int, w: np.ndarray, keeps: bool) -> None:
        self.cuts, self.lanes, self.w, self.keeps, self.packed = _cuts(problem, lanes), lanes, w, keeps, 0
        vectors = self.cuts.vectors if keeps else self.cuts.some
        self.memory = aligned((vectors, problem.r * problem.s * problem.c, lanes), w.dtype)

    def __iter__(self) -> Iterator[tuple[int, int, np.ndarray]]:
        for begin, last, low, high in self.cuts.ranges:
            weights = self.memory[low:high] if self.keeps else self.memory[: high - low]
            if last > self.packed:
                _pack(self.lanes, self.w[begin:last], weights)
                self.packed = last if self.keeps else 0
            yield begin, last, weights


def _channels_last(problem: ConvProblem, lanes: int, x: np.ndarray, w: np.ndarray, y: np.ndarray) -> bool:
    if x.strides[3] != x.itemsize:
        x = np.ascontiguousarray(x)
    if x.flags.c_contiguous:
        flat = as_one_row(problem)
        problem, x, y = flat, x.reshape(flat.x_shape), y.reshape(flat.y_shape)
    for begin, last, weights in _Filters(problem, lanes, w, False):
        if not _rows(problem, lanes, x.strides, False, last - begin).run(x, weights, y[..., begin:]):
            return False
    return True


def _by_pixels(problem: ConvProblem, lanes: int, x: np.ndarray, w: np.ndarray, y: np.ndarray) -> bool:
    """A layer of one tap in NCHW that reads each pixel once: its pixels are vectors of weights, and its filters pixels
    with their channels together. Nothing is transposed."""
    pixels, item = problem.h * problem.w, x.itemsize
    planes, results = x.reshape(problem.n, problem.c, pixels), y.reshape(problem.n, problem.k, pixels)
    # so many vectors of pixels that all filters find them in the cache
    some = max(1, PIXEL_BYTES // (2 * problem.c * lanes * item)) * 2 * lanes
    far = planes.strides[1] >= FAR_BYTES and problem.c > FEW_PAGES and problem.k > 4 * tile_of(2, lanes * item)[1]
    memory = aligned((problem.c, some), x.dtype) if far else None
    for n, first in product(range(problem.n), range(0, pixels, some)):
        last = min(pixels, first + some)
        # the last of them may be fewer than a vector has
        begin = min(first, last - lanes)
        seen = planes[n, :, begin:last]
        if memory is not None:
            seen, block = memory[:, : last - begin], seen
            np.copyto(seen, block)
        rows = _rows_of_pixels(seen.shape, seen.strides, problem.k, w.strides[0], results.strides[1], lanes)
        if not rows.run(w, seen, results[n, :, begin:]):
            return False
    return True


def _has_plain_pixels(problem: ConvProblem, lanes: int) -> bool:
    one = problem.layout == "NCHW" and problem.r == problem.s == 1 and problem.stride == (1, 1)
    return one and not any(problem.padding) and problem.h * problem.w >= lanes


def _lie_together(problem: ConvProblem, x: np.ndarray, w: np.ndarray) -> bool:
    return bool(x.strides[3] == w.strides[1] == x.itemsize and x.strides[2] == problem.w * x.itemsize)


@lru_cache(maxsize=512)
def _rows_of_pixels(
    shape: tuple[int, ...], strides: tuple[int, ...], filters: int, of_filter: int, result: int, lanes: int
) -> Rows:
    """The code for (channels, pixels), and its only row."""
    (channels, pixels), (of_channel, item) = shape, strides
    vectors, size = ceil_div(pixels, lanes), lanes * item
    layer = Dense(
        Vectors(lanes, item), channels, vectors, 1, filters, filters, 1, 1, 1, 0, of_filter, 0, item,
        (0, 0, of_channel, size), result, size, vectors * size - pixels * item,
    )  # fmt: skip
    code = kernel(layer)
    return Rows(None if code is None else Tabled.of(code, np.array([(0, 0, 0, 1)], np.int64)), False)


class Small:
    """A small layer in NHWC, ready for contiguous arrays: what `compute` finds out takes longer than the layer."""

    def __init__(self, problem: ConvProblem, lanes: int) -> None:
        self.problem, self.lanes, flat = problem, lanes, as_one_row(problem)
        self.shape, self.finishes, dtype = problem.y_shape, problem.activation is not None, np.dtype(problem.dtype)
        row = flat.w * flat.c
        strides = tuple(dtype.itemsize * each for each in (flat.h * row, row, flat.c, 1))
        self.rows = _rows(flat, lanes, strides, False, problem.k)
        self.whole = problem.k // lanes * lanes
        self.taps, self.dtype = problem.r * problem.s * problem.c, dtype
        self.kept: list[tuple[np.ndarray, int]] = []
        packed = self._packed(self.whole), self._packed(lanes) if self.whole < problem.k else None
        self.pack, self.rest = packed
        self.from_rest = (problem.k - lanes) * self.taps * dtype.itemsize
        self.is_ready = self.rows.made is not None and not self.rows.has_empty and self.pack is not None
        self.is_ready = self.is_ready and len(_cuts(flat, lanes).ranges) == 1

    def _packed(self, filters: int) -> Tabled | None:
        lanes, item = self.lanes, self.dtype.itemsize
        of_vector, types = self.taps * lanes * item, (self.dtype, self.dtype)
        source, into = (of_vector, self.taps * item, item), (of_vector, lanes * item, item)
        return copy_of((filters // lanes, lanes, self.taps), source, into, types, 0, widest())

    def compute(
        self, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None, value: float = 0, delta: float = 0
    ) -> np.ndarray:
        y = np.empty(self.shape, self.dtype)
        if not (x.flags.c_contiguous and w.flags.c_contiguous):
            compute(self.problem, x, w, bias, y)
            return y
        try:
            kept = self.kept.pop()
        except IndexError:  # the first call, one beside others, or much memory
            weights = aligned((ceil_div(self.problem.k, self.lanes), self.taps, self.lanes), self.dtype)
            kept = weights, address(weights)
        at, filters, pack, rows = kept[1], address(w), self.pack, self.rows.made
        assert pack is not None and rows is not None
        pack.run(filters, at)
        if self.rest is not None:
            self.rest.run(filters + self.from_rest, at + self.whole * self.taps * self.dtype.itemsize)
        rows.run(address(x), at, address(y))
        if kept[0].nbytes <= KEPT_BYTES:
            self.kept.append(kept)
        if self.finishes or bias is not None:
            with np.errstate(invalid="ignore", over="ignore"):
                finish(self.problem, y, bias)
        return y


def _channels_first(problem: ConvProblem, lanes: int, x: np.ndarray, w: np.ndarray, y: np.ndarray) -> bool:
    """By strips of rows whose pixels have their channels together, but for few channels, and whose results their
    filters."""
    few = problem.c < FEW_CHANNELS
    row = max((not few) * problem.c * problem.w * problem.stride[0], problem.k * problem.q) * x.itemsize
    rows = ceil_div(problem.p, ceil_div(problem.p, max(1, STRIP_BYTES // row)))
    filters = _Filters(problem, lanes, w, problem.n * ceil_div(problem.p, rows) > 1)
    for top in range(0, problem.p, rows):
        bottom = min(problem.p, top + rows)
        part, seen = alone(problem, x, 0, top, bottom) if rows < problem.p else (problem, x)
        for n in range(problem.n):
            pixels = seen[n].transpose(1, 2, 0)
            if not few:
                pixels = aligned(pixels.shape, x.dtype)
                to_channels_last(seen[n : n + 1], pixels[None])
            for begin, last, weights in filters:
                made = aligned((len(weights), part.p, part.q, lanes), x.dtype)
                if not _rows(part, lanes, (0, *pixels.strides), True, last - begin).run(pixels, weights, made):
                    return False
                into, whole = y[n, begin:last, top:bottom], (last - begin) // lanes
                if whole:
                    to_channels_first(made[:whole], into[: whole * lanes].reshape(whole, lanes, part.p, part.q))
                if whole < len(made):
                    to_channels_first(made[-1:], into[None, -lanes:])
    return True


@lru_cache(maxsize=512)
def _rows(problem: ConvProblem, lanes: int, strides: tuple[int, ...], in_vectors: bool, some: int) -> Rows:
    """The code for images with such strides, and its rows, for ``some`` filters; ``in_vectors``: of one image,
    with results by vectors of filters."""
    item = item_bytes(problem.dtype)
    vectors, size = ceil_div(some, lanes), lanes * item
    pixels = problem.p * problem.q
    result, vector = (size, pixels * size) if in_vectors else (problem.k * item, size)
    back = 0 if in_vectors else (vectors * lanes - some) * item
    channel = problem.r * problem.s * size if problem.layout == "NCHW" and problem.c > 1 else size
    tap = problem.c * size if channel == size else size
    layer = Dense(
        Vectors(lanes, item), problem.c, vectors, problem.r, problem.w, problem.q, problem.s, problem.stride[1],
        problem.dilation[1], problem.padding[2], strides[2], problem.dilation[0] * strides[1], strides[3],
        (problem.s * tap, tap, channel, problem.r * problem.s * problem.c * size), result, vector, back,
    )  # fmt: skip
    images = 1 if in_vectors else problem.n
    return rows_of(problem, images, strides, layer.weights[0], 0, problem.q * result, kernel(layer))
