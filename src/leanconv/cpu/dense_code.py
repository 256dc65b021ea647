"""Layers without groups by machine code (`machine_code`): direct convolution, with no copy of the windows.

A tile of neighbouring outputs times some vectors of filters stays in registers. For every row of taps, tap and channel
a vector of weights is loaded, and a pixel's number is multiplied with it in all lanes. That takes no more loads than a
matrix product does, which would need the windows as a matrix first. Sums are chains of multiply-adds in direct order:
rows of taps, taps, channels.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np

from leanconv.cpu.channels import Rows, aligned, rows_of
from leanconv.cpu.layers import alone, finish
from leanconv.cpu.machine_code import MOST_CODE, Code, Kernel, Vectors, function, reads, widest
from leanconv.dtypes import item_bytes
from leanconv.kernels.contract import ceil_div
from leanconv.problem import ConvProblem

#: Bytes of pixels and results that are transposed at a time.
STRIP_BYTES = 1 << 20
#: Bytes of a vector's results that are transposed back at a time, and of weights that stay in the second level.
RESULT_BYTES, CACHED = 32 << 10, 5 << 18

#: Vectors of filters at a time, and channels that are unrolled.
TOGETHER, UNROLLED = 2, 4
#: The most taps of a row with which channels are unrolled, and with which the code is quick: code that the processor's
#: cache of instructions does not hold takes three times as long.
FEW_TAPS, QUICK_TAPS = 8, 40

# as in machine_code; and a register more, which is the caller's
_TABLE, _ROWS = 7, 6
_X, _W, _Y, _COUNT, _FROM, _WEIGHTS, _LEFT, _TILES, _FILTERS = 9, 10, 11, 0, 2, 8, 1, 3, 5


class Dense(NamedTuple):
    """What is compiled in. Weights lie as (vectors of filters, R, S, C, lanes)."""

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
    #: bytes from one pixel of results, and from one vector of filters, to the next; and how far the last vector is back
    result: int
    vector: int
    back: int


def assemble(layer: Dense) -> bytes:
    """The code: rows of outputs, tiles of a row, vectors of filters, rows of taps, taps, channels."""
    code, size, item = Code(layer.vectors), layer.vectors.size, layer.vectors.item
    registers = layer.vectors.registers
    most = (registers - 4) // TOGETHER
    across = ceil_div(layer.outputs, ceil_div(layer.outputs, most))
    at_once = UNROLLED if layer.taps <= FEW_TAPS else 1
    of_vector = layer.rows * layer.taps * layer.channels * size

    def channel(outputs: list[tuple[int, int]], some: int, c: int, weight: int) -> None:
        for j in range(some):
            code.load(registers - 1 - j, (_WEIGHTS, weight * size + j * of_vector))
        for number, (i, at) in enumerate(outputs):
            one = registers - 3 - number % 2
            code.broadcast(one, (_FROM, at * layer.pixel + c * item))
            for j in range(some):
                code.multiply_add_of(i * some + j, registers - 1 - j, one)

    def vectors(tile: list[list[tuple[int, int]]], count: int, some: int) -> None:
        """Some vectors of filters, for a tile."""
        for i in range(count * some):
            code.clear(i)
        code.set(_COUNT, 0)
        code.sum_of(_FROM, _X, _COUNT)
        code.sum_of(_WEIGHTS, _W, _COUNT)
        code.read(_LEFT, (_TABLE, 24))
        unrolled = layer.channels // at_once * at_once
        with code.repeated(_LEFT):
            for outputs in tile:
                if unrolled and outputs:
                    code.set(_COUNT, layer.channels // at_once)
                    with code.repeated(_COUNT):
                        for c in range(at_once):
                            channel(outputs, some, c, c)
                        code.add(_FROM, at_once * item)
                        code.add(_WEIGHTS, at_once * size)
                    code.add(_FROM, -unrolled * item)
                elif unrolled:
                    code.add(_WEIGHTS, unrolled * size)
                for c in range(unrolled, layer.channels if outputs else 0):
                    channel(outputs, some, c, c - unrolled)
                code.add(_WEIGHTS, (layer.channels - unrolled) * size)
            code.add(_FROM, layer.row)
        for i in range(count):
            for j in range(some):
                code.store(i * some + j, (_Y, i * layer.result + j * layer.vector))

    def tile(first: int, count: int) -> None:
        found, groups, left = reads(layer, first, count), layer.filters // TOGETHER, layer.filters % TOGETHER
        if layer.back and not left:  # the last vector overlaps the one before: alone
            groups, left = groups - 1, TOGETHER
        if groups:
            code.set(_FILTERS, groups)
            with code.repeated(_FILTERS):
                vectors(found, count, TOGETHER)
                code.add(_Y, TOGETHER * layer.vector)
                code.add(_W, TOGETHER * of_vector)
        for i in range(left):
            if i == left - 1 and layer.back:
                code.add(_Y, -layer.back)
            vectors(found, count, 1)
            code.add(_Y, layer.vector)
            code.add(_W, of_vector)
        code.add(_Y, count * layer.result - layer.filters * layer.vector + layer.back)
        code.add(_W, -layer.filters * of_vector)
        code.add(_X, count * layer.stride * layer.pixel)

    firsts = range(0, layer.outputs, across)
    with code.repeated(_ROWS):
        for register, at in ((_X, 0), (_W, 8), (_Y, 16)):
            code.read(register, (_TABLE, at))
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
    most = (layer.vectors.registers - 4) // TOGETHER
    tiles = min(ceil_div(layer.outputs, most), 3 + 2 * ceil_div(layer.padding, most * layer.stride))
    reach = max(layer.row, layer.width * layer.pixel, layer.rows * layer.taps * layer.channels * layer.vectors.size)
    reach = max(reach, layer.outputs * layer.result) * max(2, layer.filters)
    if reach >= 2**31 or tiles * layer.taps * most * 4 * 30 > 4 * MOST_CODE:
        return None
    return function(assemble(layer))


def lanes_for(problem: ConvProblem) -> int:
    """Filters of a vector of the machine code for a layer; 0 where there is none for it."""
    item = item_bytes(problem.dtype)
    if widest() == 0 or problem.groups > 1 or item not in (4, 8) or problem.layout == "CHWN":
        return 0
    lanes = widest() // item
    while lanes > problem.k and lanes * item > 32:
        lanes //= 2
    return lanes if lanes <= problem.k else 0


def cost(problem: ConvProblem, lanes: int) -> float:
    """In the unit of `layers.product_cost`. Explored (Xeon with AVX-512, one thread): with 14 outputs a tile the code
    is a quarter quicker than a product of matrices; with fewer it waits for weights, above all those of the third level
    of the cache."""
    most = (32 if widest() == 64 else 16) // TOGETHER - 2
    across, vectors = ceil_div(problem.q, ceil_div(problem.q, most)), ceil_div(problem.k, lanes)
    weights = problem.r * problem.s * problem.c * vectors * lanes
    wanted = 16 if weights * item_bytes(problem.dtype) > CACHED else 6
    filters = (vectors + 0.4 * (vectors % TOGETHER)) * lanes
    speed = 2.0 if problem.s > QUICK_TAPS else 0.85 if problem.r * problem.s == 1 else 0.7
    products = problem.flops / problem.k * filters * speed * max(1.0, wanted / across)
    if problem.layout == "NHWC":
        return products + 65.0 * weights
    moved = 60.0 * problem.c * problem.h * problem.w + 65.0 * problem.k * problem.p * problem.q
    return products + 65.0 * weights + problem.n * moved


def compute(problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, y: np.ndarray) -> bool:
    """Write a layer, in NCHW or NHWC, to ``y``; False where there is no code for it."""
    lanes = lanes_for(problem)
    if lanes == 0:
        return False
    vectors = ceil_div(problem.k, lanes)
    weights = aligned((vectors, problem.r, problem.s, problem.c, lanes), x.dtype)
    by_tap = w.transpose(0, 2, 3, 1) if problem.layout == "NCHW" else w
    whole = problem.k // lanes
    split = by_tap[: whole * lanes].reshape(whole, lanes, problem.r, problem.s, problem.c)
    np.copyto(weights[:whole], split.transpose(0, 2, 3, 4, 1))
    if vectors > whole:  # the last filters, some of them for the second time
        np.copyto(weights[-1], by_tap[-lanes:].transpose(1, 2, 3, 0))
    if problem.layout == "NHWC":
        if x.strides[3] != x.itemsize:
            x = np.ascontiguousarray(x)
        done = _rows(problem, lanes, x.strides, False).run(x, weights, y)
    else:
        done = _transposed(problem, lanes, x, weights, y)
    if done:
        finish(problem, y, bias)
    return done


def _transposed(problem: ConvProblem, lanes: int, x: np.ndarray, weights: np.ndarray, y: np.ndarray) -> bool:
    """A layer in NCHW, by strips of rows whose pixels have their channels together, and whose results their filters."""
    row = max(problem.c * problem.w * problem.stride[0], problem.k * problem.q) * x.itemsize
    rows = ceil_div(problem.p, ceil_div(problem.p, max(1, STRIP_BYTES // row)))
    vectors, whole = len(weights), problem.k // lanes
    for top in range(0, problem.p, rows):
        bottom = min(problem.p, top + rows)
        part, seen = alone(problem, x, 0, top, bottom) if rows < problem.p else (problem, x)
        strip = _rows_of_strip(part, lanes)
        for n in range(problem.n):
            pixels = aligned((part.h, part.w, part.c), x.dtype)
            np.copyto(pixels, seen[n].transpose(1, 2, 0))
            made = aligned((vectors, part.p * part.q, lanes), x.dtype)
            if not strip.run(pixels, weights, made):
                return False
            into = y[n, :, top:bottom].reshape(problem.k, -1)
            split = into[: whole * lanes].reshape(whole, lanes, -1)
            step = RESULT_BYTES // (lanes * x.itemsize)
            for first in range(0, into.shape[1] if whole else 0, step):
                some = slice(first, first + step)
                np.copyto(split[:, :, some], made[:whole, some].swapaxes(1, 2))
            if vectors > whole:
                np.copyto(into[-lanes:], made[-1].T)
    return True


def _rows_of_strip(part: ConvProblem, lanes: int) -> Rows:
    item = item_bytes(part.dtype)
    return _rows(part, lanes, (0, part.w * part.c * item, part.c * item, item), True)


@lru_cache(maxsize=512)
def _rows(problem: ConvProblem, lanes: int, strides: tuple[int, ...], in_vectors: bool) -> Rows:
    """The code for images with such strides, and its rows; ``in_vectors``: of one image, with results by vectors of
    filters."""
    item = item_bytes(problem.dtype)
    vectors, size = ceil_div(problem.k, lanes), lanes * item
    pixels = problem.p * problem.q
    result, vector = (size, pixels * size) if in_vectors else (problem.k * item, size)
    back = 0 if in_vectors else (vectors * lanes - problem.k) * item
    layer = Dense(
        Vectors(lanes, item), problem.c, vectors, problem.r, problem.w, problem.q, problem.s, problem.stride[1],
        problem.dilation[1], problem.padding[2], strides[2], problem.dilation[0] * strides[1], result, vector, back,
    )  # fmt: skip
    images = 1 if in_vectors else problem.n
    return rows_of(problem, images, strides, problem.s * problem.c * size, 0, problem.q * result, kernel(layer))
