"""Tensor maps: 128 bytes that the driver encodes for an array, made at the first use of its pointer, and kept.

Encoding takes the host about a microsecond and does not wait. It reads neither the array nor the GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache, partial

from leanconv.plan import TensorMap
from leanconv.runtime.driver import driver

#: bytes of a map, and what its address is a multiple of wherever the driver or a kernel reads it
BYTES, ALIGNMENT = 128, 64

#: numbers of the driver; it has no signed types below 32 bits, and copies bytes whatever they mean
_ELEMENTS = {
    "uint8": 0, "int8": 0, "uint16": 1, "int16": 1, "uint32": 2, "int32": 3, "float16": 6, "float32": 7, "bfloat16": 9,
}  # fmt: skip
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
#: maps of one array's kind that are kept
KEPT = 64
_NO_INTERLEAVE = 0
_FILL_ZEROS = 0


def aligned(nbytes: int, alignment: int) -> ctypes.Array[ctypes.c_char]:
    """``nbytes`` of zeros at a multiple of ``alignment``."""
    memory = ctypes.create_string_buffer(nbytes + alignment)
    return (ctypes.c_char * nbytes).from_buffer(memory, -ctypes.addressof(memory) % alignment)


def encode(spec: TensorMap, pointer: int) -> bytes:
    """The map of the array at ``pointer``, encoded by the driver.

    Raises ValueError naming each rule that ``spec`` or ``pointer`` breaks, CudaError where the driver refuses it.
    """
    reasons = spec.why_not()
    if pointer % 16:
        reasons.append(f"the array starts at {pointer:#x}, no multiple of 16 bytes")
    if reasons:
        raise ValueError(f"{spec.name} cannot be made: {'; '.join(reasons)}")
    u32, u64, i32 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32
    rank = spec.rank
    encoded = aligned(BYTES, ALIGNMENT)
    # a map of one axis has no strides, but the driver requires an address for them
    head = (encoded, _ELEMENTS[spec.element], rank, pointer, (u64 * rank)(*spec.shape), (u64 * rank)(*spec.strides))
    tail = (_NO_INTERLEAVE, _SWIZZLES[spec.swizzle], _PROMOTIONS[spec.promotion], _FILL_ZEROS)
    steps = (u32 * rank)(*spec.steps)
    if spec.im2col:
        lower, upper = ((i32 * (rank - 2))(*corner) for corner in (spec.lower, spec.upper))
        driver().check("cuTensorMapEncodeIm2col", *head, lower, upper, spec.channels, spec.pixels, steps, *tail)
    else:
        driver().check("cuTensorMapEncodeTiled", *head, (u32 * rank)(*spec.box), steps, *tail)
    return encoded.raw


def encoder(spec: TensorMap) -> Callable[[int], bytes]:
    """The maps of ``spec`` by pointer: encoded at the first use of a pointer, the `KEPT` last used kept."""
    return lru_cache(maxsize=KEPT)(partial(encode, spec))


class Slot:
    """128 bytes at a multiple of 64 that the address of a kernel parameter may point to.

    ``point_to`` writes the map of another pointer into it, and does nothing while the pointer stays. As the rest of a
    block of arguments it serves one call at a time.
    """

    __slots__ = ("_encoder", "_memory", "_pointer", "address")

    def __init__(self, encoder: Callable[[int], bytes]) -> None:
        self._encoder = encoder
        self._memory = aligned(BYTES, ALIGNMENT)
        self._pointer = -1
        self.address = ctypes.addressof(self._memory)

    def point_to(self, pointer: int) -> None:
        """Make it the map of the array at ``pointer``; raises what ``encode`` does, and then stays as it was."""
        if pointer != self._pointer:
            self._memory.raw = self._encoder(pointer)
            self._pointer = pointer
