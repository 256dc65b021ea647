"""Machine code for layers, made for the exact problem as the kernels of GPUs are: x86-64, AVX2 or AVX-512.

Here are the instructions and the code of depthwise layers; `dense_code` has that of layers without groups. A depthwise
layer is no matrix product, so BLAS has nothing for it, and NumPy takes far longer than the processor needs: it
multiplies and adds from memory to memory. Here the sums of a tile of outputs stay in registers while all taps pass over
it. Some instructions are encoded here; there is no compiler, and no library beside NumPy.

The code lies in memory that can be written before it can be run, never both. Where a system allows no such memory, on
other processors, and where ``NPY_DISABLE_CPU_FEATURES`` takes X86_V3 and X86_V4 away (AVX2 and AVX512F before NumPy
2.4), there is none.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import platform
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

#: Takes the address of a table of rows, their number, and the addresses of pixels, weights and results. A row has four
#: numbers of 64 bits: how far from these what its first tap reads, that tap's weights and the results are, and how many
#: rows of taps there are.
Kernel = Callable[[int, int, int, int, int], None]

# the arguments of a function on Linux and macOS, and other registers that a function may overwrite but for the last one
_TABLE, _ROWS = 7, 6
_X, _W, _Y, _OFFSET, _FROM, _WEIGHTS, _LEFT, _TILES = 9, 10, 11, 0, 2, 8, 1, 3
#: where the addresses of pixels, weights and results are, and stay
BASES = 13, 14, 15

#: The most outputs that are summed at a time, and bytes of code.
MOST_SUMS, MOST_CODE = 14, 64 << 10


class Vectors(NamedTuple):
    """What a register holds: ``lanes`` numbers of ``item`` bytes."""

    lanes: int
    item: int

    @property
    def size(self) -> int:
        return self.lanes * self.item

    @property
    def registers(self) -> int:
        return 32 if self.size == 64 else 16


@cache
def widest() -> int:
    """Bytes of a register that this processor and system have, 0 where no code can be made for them."""
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform not in ("linux", "darwin"):
        return 0
    for core in ("numpy._core", "numpy.core"):
        try:
            features = importlib.import_module(f"{core}._multiarray_umath").__cpu_features__
        except (ImportError, AttributeError):
            continue
        # since NumPy 2.4 two names stand for the sets that these are in, and alone can be disabled
        if features.get("X86_V4", features.get("AVX512F")):
            return 64
        return 32 if features.get("X86_V3", features.get("AVX2") and features.get("FMA3")) else 0
    return 0


class Depthwise(NamedTuple):
    """What is compiled in: rows of outputs whose channels lie together in memory, at least as many as a vector has."""

    vectors: Vectors
    channels: int
    #: pixels of a row of the image, and of outputs
    width: int
    outputs: int
    #: of a row of filters
    taps: int
    stride: int
    dilation: int
    padding: int
    #: bytes from one pixel, and from one row that taps read, to the next
    pixel: int
    row: int


class Code:
    """Instructions, one after another. Memory operands are ``(base register, distance)``."""

    def __init__(self, vectors: Vectors) -> None:
        self.vectors, self.bytes = vectors, bytearray()
        self._double = vectors.item == 8

    def _vector(
        self, table: int, prefix: int, wide: int, op: int, reg: int, a: int, at: tuple[int, int], unit: int = 0,
        spread: bool = False, short: bool = False,
    ) -> None:  # fmt: skip
        """An instruction with a register, a second one and memory: VEX for 32 bytes, EVEX for 64. ``unit`` bytes are
        read, by default a register's; ``spread``: one number, for all lanes; ``short``: of the first 16 bytes."""
        base, distance = at
        # base registers 4 and 12 would take a further byte
        assert base & 7 != 4
        high, extended = (not reg & 8) << 7 | 0x40, (not base & 8) << 5
        second = wide << 7 | (~a & 15) << 3 | prefix
        if self.vectors.size == 64:
            first = high | extended | (not reg & 16) << 4 | table
            self.bytes += bytes([0x62, first, second | 4, (not short) << 6 | (not a & 16) << 3 | spread << 4, op])
        else:
            self.bytes += bytes([0xC4, high | extended | table, second | (not short) << 2, op])
            unit = 1
        unit = unit or self.vectors.size
        if distance % unit == 0 and -128 <= distance // unit < 128:
            self.bytes += bytes([0x40 | (reg & 7) << 3 | base & 7]) + struct.pack("<b", distance // unit)
        else:
            self.bytes += bytes([0x80 | (reg & 7) << 3 | base & 7]) + struct.pack("<i", distance)

    def _registers(self, table: int, prefix: int, wide: int, op: int, reg: int, a: int, b: int) -> None:
        """An instruction with three registers."""
        self._vector(table, prefix, wide, op, reg, a, (0, 0))
        del self.bytes[-2:]
        if self.vectors.size == 64:  # two bits more of the register
            self.bytes[-4] = self.bytes[-4] & 0x9F | (not b & 16) << 6 | (not b & 8) << 5
        else:
            self.bytes[-3] = self.bytes[-3] & 0xDF | (not b & 8) << 5
        self.bytes += bytes([0xC0 | (reg & 7) << 3 | b & 7])

    def load(self, reg: int, at: tuple[int, int]) -> None:
        self._vector(1, self._double, self._wide(), 0x10, reg, 0, at)

    def store(self, reg: int, at: tuple[int, int]) -> None:
        self._vector(1, self._double, self._wide(), 0x11, reg, 0, at)

    def sum_with(self, reg: int, a: int, at: tuple[int, int]) -> None:
        """reg = a + memory."""
        self._vector(1, self._double, self._wide(), 0x58, reg, a, at)

    def multiply_add(self, reg: int, a: int, at: tuple[int, int]) -> None:
        """reg += a · memory, rounded once."""
        self._vector(2, 1, int(self._double), 0xB8, reg, a, at)

    def multiply_add_one(self, reg: int, a: int, at: tuple[int, int]) -> None:
        """reg += a · one number in all lanes, rounded once; of 64 bytes."""
        self._vector(2, 1, int(self._double), 0xB8, reg, a, at, self.vectors.item, spread=True)

    def _wide(self) -> int:
        """The bit that EVEX wants to be set for doubles."""
        return int(self._double and self.vectors.size == 64)

    def broadcast(self, reg: int, at: tuple[int, int]) -> None:
        """One number in all lanes."""
        self._vector(2, 1, self._wide(), 0x19 if self._double else 0x18, reg, 0, at, self.vectors.item)

    def multiply_add_of(self, reg: int, a: int, b: int) -> None:
        """reg += a · b, of registers, rounded once."""
        self._registers(2, 1, int(self._double), 0xB8, reg, a, b)

    def load_piece(self, reg: int, place: int, at: tuple[int, int]) -> None:
        """16 bytes to such a place of a register; those at the first clear what follows them."""
        if place:
            self._vector(3, 1, 0, 0x18, reg, reg, at, 16)
            self.bytes.append(place)
        else:
            self._vector(1, 0, 0, 0x10, reg, 0, at, 16, short=True)

    def unpack(self, reg: int, a: int, b: int, item: int, *, high: bool) -> None:
        """The lower or higher numbers of each 16 bytes of a and b by turns."""
        wide = item == 8
        self._registers(1, int(wide), int(wide and self.vectors.size == 64), 0x15 if high else 0x14, reg, a, b)

    def clear(self, reg: int) -> None:
        """reg = 0."""
        high = (not reg & 8) << 7
        if self.vectors.size == 64:
            same = (not reg & 16) << 6 | (not reg & 8) << 5 | (not reg & 16) << 4
            self.bytes += bytes([0x62, high | same | 1, (~reg & 15) << 3 | 5, 0x40 | (not reg & 16) << 3, 0xEF])
        else:
            self.bytes += bytes([0xC4, high | 0x40 | (not reg & 8) << 5 | 1, (~reg & 15) << 3 | 5, 0xEF])
        self.bytes += bytes([0xC0 | (reg & 7) * 9])

    def read(self, to: int, at: tuple[int, int]) -> None:
        base, distance = at
        self.bytes += bytes([0x48 | to >> 3 << 2 | base >> 3, 0x8B, 0x80 | (to & 7) << 3 | base & 7])
        self.bytes += struct.pack("<i", distance)

    def sum_of(self, to: int, a: int, b: int) -> None:
        """to = a + b, which is not ``to``."""
        self.move(to, a)
        self.add_of(to, b)

    def move(self, to: int, a: int, opcode: int = 0x89) -> None:
        self.bytes += bytes([0x48 | a >> 3 << 2 | to >> 3, opcode, 0xC0 | (a & 7) << 3 | to & 7])

    def add_of(self, to: int, a: int) -> None:
        self.move(to, a, 0x01)

    def set(self, reg: int, number: int) -> None:
        self.bytes += bytes([0x48 | reg >> 3, 0xC7, 0xC0 | reg & 7]) + struct.pack("<i", number)

    def add(self, reg: int, number: int) -> None:
        if number == 0:
            return
        self.bytes += bytes([0x48 | reg >> 3, 0x81, 0xC0 | reg & 7]) + struct.pack("<i", number)

    def subtract(self, to: int, a: int) -> None:
        self.move(to, a, 0x29)

    @contextmanager
    def unless_zero(self, reg: int) -> Iterator[None]:
        """What follows, but not if a register is zero."""
        self.move(reg, reg, 0x85)
        self.bytes += b"\x0f\x84\0\0\0\0"
        begin = len(self.bytes)
        yield
        self.bytes[begin - 4 : begin] = struct.pack("<i", len(self.bytes) - begin)

    @contextmanager
    def repeated(self, counter: int, step: int = -1, end: int = 0) -> Iterator[None]:
        """What follows, until the counter, to which ``step`` is added each time, is ``end``."""
        begin = len(self.bytes)
        yield
        self.add(counter, step)
        if end:
            self.bytes += bytes([0x48 | counter >> 3, 0x81, 0xF8 | counter & 7]) + struct.pack("<i", end)
        self.bytes += b"\x0f\x85" + struct.pack("<i", begin - len(self.bytes) - 6)  # if they are not equal

    def read_row(self, registers: Iterable[int], table: int) -> None:
        """The first numbers of a row of the table, as addresses."""
        for number, (register, base) in enumerate(zip(registers, BASES, strict=False)):
            self.read(register, (table, 8 * number))
            self.add_of(register, base)

    def finish(self) -> bytes:
        """Registers as the caller wants them, and back; the arguments are where they stay."""
        made = Code(self.vectors)
        for base, argument in zip(BASES, (2, 1, 8), strict=True):
            made.move(base, argument)
        saved, restored = "55 53 41 54 41 55 41 56 41 57", "41 5f 41 5e 41 5d 41 5c 5b 5d"
        every = (bytes.fromhex(saved), made.bytes, self.bytes, bytes.fromhex(restored), b"\xc5\xf8\x77\xc3")
        return b"".join(every)


def reads(layer: Any, first: int, count: int) -> list[list[tuple[int, int]]]:
    """For each tap of a row the outputs of a tile that find a pixel there, and how far that is from the tile's; of a
    `Depthwise` layer, or a `dense_code.Dense` one."""
    columns = [
        [(i, i * layer.stride - layer.padding + tap * layer.dilation) for i in range(count)]
        for tap in range(layer.taps)
    ]
    return [[(i, at) for i, at in each if 0 <= first * layer.stride + at < layer.width] for each in columns]


def assemble(layer: Depthwise) -> bytes:
    """The code: rows of outputs, tiles of a row, vectors of channels, rows of taps; then the taps of a row."""
    code, (lanes, item) = Code(layer.vectors), layer.vectors
    most = min(MOST_SUMS, layer.vectors.registers - 4)
    # tiles of a row are as alike as can be: a short last one would wait for its own sums
    across = -(-layer.outputs // -(-layer.outputs // most))

    def vector(tile: list[list[tuple[int, int]]], count: int) -> None:
        code.sum_of(_FROM, _X, _OFFSET)
        code.sum_of(_WEIGHTS, _W, _OFFSET)
        for i in range(count):
            code.clear(i)
        code.read(_LEFT, (_TABLE, 24))
        with code.repeated(_LEFT):
            for tap, outputs in enumerate(tile):
                weight = layer.vectors.registers - 1 - tap % 4
                if outputs:
                    code.load(weight, (_WEIGHTS, tap * layer.channels * item))
                for i, at in outputs:
                    code.multiply_add(i, weight, (_FROM, at * layer.pixel))
            code.add(_FROM, layer.row)
            code.add(_WEIGHTS, layer.taps * layer.channels * item)
        code.sum_of(_FROM, _Y, _OFFSET)
        for i in range(count):
            code.store(i, (_FROM, i * layer.channels * item))

    def tiles(first: int, count: int, times: int) -> None:
        tile = reads(layer, first, count)
        code.set(_TILES, times)
        with code.repeated(_TILES):
            code.set(_OFFSET, 0)
            with code.repeated(_OFFSET, layer.vectors.size, layer.channels // lanes * layer.vectors.size):
                vector(tile, count)
            if layer.channels % lanes:  # the last channels, some of them for the second time
                code.set(_OFFSET, (layer.channels - lanes) * item)
                vector(tile, count)
            code.add(_X, count * layer.stride * layer.pixel)
            code.add(_Y, count * layer.channels * item)

    firsts = range(0, layer.outputs, across)
    with code.repeated(_ROWS):
        code.read_row((_X, _W, _Y), _TABLE)
        sizes = [(first, min(across, layer.outputs - first)) for first in firsts]
        alike = [(reads(layer, *each), each[1]) for each in sizes]
        place = 0
        for (_, count), same in groupby(alike):
            times = len(list(same))
            tiles(place, count, times)
            place += count * times
        code.add(_TABLE, 32)
    return code.finish()


@lru_cache(maxsize=256)
def kernel(layer: Depthwise) -> Kernel | None:
    """A function for a layer; None where there can be none, or for much code."""
    reach = max(layer.row, layer.width * layer.pixel, layer.taps * layer.channels * layer.vectors.item)
    if reach >= 2**30 or layer.taps * min(layer.outputs, 2 * layer.padding + 3 * MOST_SUMS) * 20 > MOST_CODE:
        return None
    return function(assemble(layer))


def function(code: bytes) -> Kernel | None:
    """A function; None where the system does not let a process run code that it made."""
    try:
        return _function(code)
    except (OSError, AttributeError):  # a system that forbids it, or that has no such functions
        return None


def _function(code: bytes) -> Kernel:
    memory = mmap.mmap(-1, len(code), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE)
    memory.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    if protect(address, len(code), mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno(), "this system lets no process run code that it made")
    number = ctypes.c_long
    made: Any = ctypes.CFUNCTYPE(None, number, number, number, number, number)(address)
    made.memory = memory  # as long as the function lives
    function: Kernel = made
    return function


@cache
def _data_place() -> int:
    """Where CPython's arrays hold the address of their data, 0 where they do not."""
    known, place = np.empty(1), object.__basicsize__
    if platform.python_implementation() != "CPython" or sys.getsizeof(known) < place + 8:
        return 0
    return place if ctypes.c_size_t.from_address(id(known) + place).value == known.ctypes.data else 0


def address(array: np.ndarray) -> int:
    """Of an array's first element, which ``array.ctypes.data`` takes as long to tell as a small layer."""
    place = _data_place()
    return ctypes.c_size_t.from_address(id(array) + place).value if place else array.ctypes.data


class Tabled(NamedTuple):
    """A function with its table of rows, and the address of that, which NumPy takes long to tell."""

    code: Kernel
    table: np.ndarray
    place: int

    @classmethod
    def of(cls, code: Kernel, table: np.ndarray) -> Tabled:
        return cls(code, table, table.ctypes.data)

    def run(self, x: int, w: int, y: int = 0) -> None:
        """All rows of the table, if there are any, with the addresses of arrays."""
        if len(self.table):
            self.code(self.place, len(self.table), x, w, y)
