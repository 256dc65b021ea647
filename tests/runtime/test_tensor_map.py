"""Tensor maps on the host: the rules, what the driver is given, which maps are kept, and a launch that takes one."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from leanconv import CudaError
from leanconv.plan import Launch, Number, Plan, Pointer, TensorMap
from leanconv.runtime import driver, tensor_map
from leanconv.runtime import launch as launch_module
from leanconv.runtime.compile import compile_source, source
from leanconv.runtime.tensor_map import Slot, encode, encoder

TILED = TensorMap("x", "float32", (64, 30, 20), (512, 16384), box=(32, 6, 5), traversal=(1, 2, 1), swizzle=128)
#: NHWC of 3 images, 3 x 5 filters, padding 1 and 2, stride 2 and 1, dilation 1 and 3
IM2COL = TensorMap(
    "x", "float16", (64, 30, 20, 3), (128, 3840, 76800), lower=(-2, -1), upper=(2 - 4 * 3, 1 - 2), channels=64,
    pixels=128, traversal=(1, 1, 2, 1), swizzle=128, promotion=256,
)  # fmt: skip


def test_what_follows_from_a_map() -> None:
    assert (TILED.name, replace(TILED, suffix="tile").name) == ("x_map", "x_tile")
    assert TILED.ctype == "const __grid_constant__ leanconv::TensorMap"
    assert TILED.extents == (32, 3, 5) and TILED.copy_bytes == 4 * 32 * 3 * 5 and not TILED.im2col
    assert IM2COL.extents == (64, 128) and IM2COL.copy_bytes == 2 * 64 * 128 and IM2COL.im2col
    assert TILED.why_not() == [] == IM2COL.why_not()
    assert replace(TILED, traversal=()).steps == (1, 1, 1)


@pytest.mark.parametrize(
    "spec, change, part",
    [
        (TILED, {"element": "float64"}, "element='float64' is not among float32, float16, bfloat16"),
        (TILED, {"shape": (), "strides": ()}, "a tiled map has 1 to 5"),
        (TILED, {"shape": (8,) * 6, "strides": (32,) * 5}, "has 6 axes; a tiled map has 1 to 5"),
        (IM2COL, {"shape": (8, 8), "strides": (32,)}, "has 2 axes; an im2col map has 3 to 5"),
        (TILED, {"strides": (512,)}, "strides=(512,) are not those of all axes of shape=(64, 30, 20) but"),
        (TILED, {"strides": (520, 16384)}, "strides=(520, 16384) are not all multiples of 16 bytes"),
        (TILED, {"strides": (0, 16384)}, "positive and below 2^40"),
        (TILED, {"strides": (512, 2**40)}, "positive and below 2^40"),
        (TILED, {"shape": (64, 0, 20)}, "has an extent that is not within 1 and 2^31"),
        (TILED, {"shape": (64, 30, 2**31 + 1)}, "has an extent that is not within 1 and 2^31"),
        (TILED, {"traversal": (1, 2)}, "traversal=(1, 2) has not one step for each axis"),
        (TILED, {"traversal": (1, 9, 1)}, "traversal=(1, 9, 1) has a step that is not within 1 and 8"),
        (TILED, {"traversal": (2, 1, 1)}, "the machine ignores the step of the innermost axis; it must be 1"),
        (TILED, {"box": (32, 6)}, "box=(32, 6) has not one extent for each axis"),
        (TILED, {"box": (32, 257, 1)}, "box=(32, 257, 1) has an extent that is not within 1 and 256"),
        (TILED, {"box": (32, 0, 1)}, "box=(32, 0, 1) has an extent that is not within 1 and 256"),
        (TILED, {"pixels": 7}, "pixels=7 is for im2col maps; this one has box=(32, 6, 5)"),
        (TILED, {"lower": (1,)}, "lower=(1,) is for im2col maps"),
        (TILED, {"box": (31, 6, 5), "swizzle": 0}, "31 innermost elements of float32 are 124 bytes, no multiple of 16"),
        (TILED, {"swizzle": 48}, "swizzle=48 is none of 0, 32, 64 and 128 bytes"),
        (TILED, {"swizzle": 64}, "swizzle=64 needs rows of as many bytes, and the innermost elements have 128"),
        (TILED, {"box": (16, 6, 5)}, "swizzle=128 needs rows of as many bytes, and the innermost elements have 64"),
        (TILED, {"box": (256, 256, 8), "swizzle": 0}, "a copy has 1048576 bytes, and a barrier can expect 1048575"),
        (TILED, {"promotion": 32}, "promotion=32 is none of 0, 64, 128 and 256 bytes"),
        (IM2COL, {"lower": (-2,)}, "lower=(-2,) has not one number for each of the 2 axes of pixels"),
        (IM2COL, {"lower": (-129, 0)}, "lower=(-129, 0) is not within -128 and 127, for a map of 4 axes"),
        (IM2COL, {"upper": (0, 128)}, "upper=(0, 128) is not within -128 and 127"),
        (IM2COL, {"upper": (-10, -21)}, "leave no pixel of shape=(64, 30, 20, 3)"),
        (IM2COL, {"channels": 0}, "channels=0 is not within 1 and 256"),
        (IM2COL, {"channels": 257}, "channels=257 is not within 1 and 256"),
        (IM2COL, {"pixels": 1025}, "pixels=1025 is not within 1 and 1024"),
        (IM2COL, {"pixels": 0}, "pixels=0 is not within 1 and 1024"),
        (IM2COL, {"traversal": (1, 1, 2, 2)}, "the step from image to image must be 1"),
        (IM2COL, {"written": True}, "written=True: stores through an im2col map"),
        (IM2COL, {"channels": 60}, "60 innermost elements of float16 are 120 bytes, no multiple of 16"),
        (IM2COL, {"channels": 32}, "swizzle=128 needs rows of as many bytes"),
    ],
)  # fmt: skip
def test_each_rule_is_told(spec: TensorMap, change: dict[str, Any], part: str) -> None:
    reasons = replace(spec, **change).why_not()
    assert any(part in reason for reason in reasons), reasons


@pytest.mark.parametrize(
    "rank, corner, fits", [(3, -32768, True), (3, -32769, False), (5, -16, True), (5, -17, False), (5, 16, False)]
)
def test_corners_have_fewer_bits_the_more_axes_there_are(rank: int, corner: int, fits: bool) -> None:
    strides = tuple(64 * 100**i for i in range(rank - 1))
    spec = TensorMap(
        "x", "float32", (16, *(100,) * (rank - 1)), strides, lower=(corner,) * (rank - 2), upper=(0,) * (rank - 2),
        channels=16, pixels=8,
    )  # fmt: skip
    assert (spec.why_not() == []) == fits


# The driver


class FakeLibrary:
    """As much of libcuda as encoding needs; keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.code = 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name in ("cuDriverGetVersion", "cuDeviceGetCount"):
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_int))[0] = 13000
            if name.startswith("cuTensorMap"):
                return self.encode(name, *arguments)
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int, *driver._SIGNATURES[name])(call)

    def encode(self, name: str, made: int, element: int, rank: int, pointer: int, *rest: Any) -> int:
        def numbers(address: int, kind: Any, count: int) -> tuple[int, ...]:
            return tuple((kind * count).from_address(address)) if count else ()

        u32, u64, i32 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32
        assert made % 64 == 0 and all(rest[:3])
        shape, strides = numbers(rest[0], u64, rank), numbers(rest[1], u64, rank - 1)
        if name.endswith("Tiled"):
            how = (numbers(rest[2], u32, rank),)
            steps, *tail = rest[3:]
        else:
            how = (numbers(rest[2], i32, rank - 2), numbers(rest[3], i32, rank - 2), *rest[4:6])
            steps, *tail = rest[6:]
        self.calls.append((name, element, pointer, shape, strides, how, numbers(steps, u32, rank), tuple(tail)))
        ctypes.memset(made, len(self.calls), 128)
        return self.code


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLibrary]:
    fake = FakeLibrary()
    driver.driver.cache_clear()
    monkeypatch.setattr(driver, "_open_library", lambda: fake)
    yield fake
    driver.driver.cache_clear()


def test_the_driver_gets_what_the_map_says(library: FakeLibrary) -> None:
    assert encode(TILED, 2**47 + 16) == b"\1" * 128
    assert encode(IM2COL, 4096) == b"\2" * 128
    flat = TensorMap("w", "bfloat16", (4096,), (), box=(64,), swizzle=128, promotion=128)
    encode(flat, 32)
    # innermost first; no interleaving, swizzle, promotion, zeros outside
    assert library.calls == [
        ("cuTensorMapEncodeTiled", 7, 2**47 + 16, (64, 30, 20), (512, 16384), ((32, 6, 5),), (1, 2, 1), (0, 3, 0, 0)),
        (
            "cuTensorMapEncodeIm2col", 6, 4096, (64, 30, 20, 3), (128, 3840, 76800), ((-2, -1), (-10, -1), 64, 128),
            (1, 1, 2, 1), (0, 3, 3, 0),
        ),
        ("cuTensorMapEncodeTiled", 9, 32, (4096,), (), ((64,),), (1,), (0, 3, 2, 0)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "element, number",
    [("float32", 7), ("float16", 6), ("bfloat16", 9), ("int8", 0), ("uint8", 0), ("int16", 1), ("uint16", 1),
     ("int32", 3), ("uint32", 2)],
)  # fmt: skip
@pytest.mark.parametrize("swizzle, swizzle_number", [(0, 0), (32, 1), (64, 2), (128, 3)])
def test_numbers_of_the_driver(
    element: str, number: int, swizzle: int, swizzle_number: int, library: FakeLibrary
) -> None:
    row = (swizzle or 128) // TensorMap("x", element, (), ()).element_bytes
    encode(TensorMap("x", element, (1024, 8), (4096,), box=(row, 8), swizzle=swizzle), 64)
    (call,) = library.calls
    assert call[1] == number and call[-1] == (0, swizzle_number, 0, 0)


def test_rules_and_refusals_are_raised(library: FakeLibrary) -> None:
    with pytest.raises(
        ValueError, match=r"x_map cannot be made: swizzle=64 needs .*; the array starts at 0x8, no mult"
    ):
        encode(replace(TILED, swizzle=64), 8)
    assert library.calls == []
    library.code = 1
    with pytest.raises(CudaError, match="cuTensorMapEncodeTiled failed"):
        encode(TILED, 16)


def test_maps_are_kept_by_pointer_and_the_least_recently_used_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def made(spec: TensorMap, pointer: int) -> bytes:
        seen.append((spec, pointer))
        return bytes([len(seen)]) * 128

    monkeypatch.setattr(tensor_map, "encode", made)
    monkeypatch.setattr(tensor_map, "KEPT", 2)
    kept = encoder(TILED)
    assert [kept(p)[0] for p in (16, 32, 16, 48, 16, 32)] == [1, 2, 1, 3, 1, 4]
    assert seen == [(TILED, 16), (TILED, 32), (TILED, 48), (TILED, 32)]


def test_a_map_that_cannot_be_made_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(spec: TensorMap, pointer: int) -> bytes:
        raise CudaError("no")

    monkeypatch.setattr(tensor_map, "encode", refuse)
    slot = Slot(encoder(TILED))
    for _ in range(2):
        with pytest.raises(CudaError):
            slot.point_to(16)


def test_many_threads_share_an_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_map, "encode", lambda spec, pointer: bytes([pointer]) * 128)
    monkeypatch.setattr(tensor_map, "KEPT", 3)
    kept = encoder(TILED)
    wrong: list[int] = []

    def work(first: int) -> None:
        wrong.extend(p for i in range(2000) if kept(p := (first + i) % 7) != bytes([p]) * 128)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_slot_is_filled_when_the_pointer_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def made(spec: TensorMap, pointer: int) -> bytes:
        calls.append(pointer)
        return bytes(range(pointer, pointer + 128))

    monkeypatch.setattr(tensor_map, "encode", made)
    kept = encoder(TILED)
    first, second = Slot(kept), Slot(kept)
    assert first.address % 64 == 0 == second.address % 64
    for pointer in (16, 16, 32, 16):
        first.point_to(pointer)
        assert ctypes.string_at(first.address, 128) == bytes(range(pointer, pointer + 128))
    second.point_to(32)
    assert ctypes.string_at(second.address, 128) == bytes(range(32, 160))
    assert calls == [16, 32]


def test_a_null_pointer_is_encoded_too() -> None:
    slot = Slot(lambda pointer: b"n" * 128)
    slot.point_to(0)
    assert ctypes.string_at(slot.address, 128) == b"n" * 128


# A launch

KERNEL = """#include <device/ptx/tma.cuh>
namespace leanconv {
// Doubles a matrix, tile by tile: in through a map, out through another one.
template <typename Problem, typename Tuning>
__device__ __forceinline__ void doubled(const TensorMap& x_map, const TensorMap& y_map) {
    float* tile = reinterpret_cast<float*>(shared_memory_for_swizzles());
    Mbarrier* full = reinterpret_cast<Mbarrier*>(shared_memory_for_swizzles() + Tuning::bytes);
    const int row = blockIdx.x * Tuning::rows;
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(full, Tuning::bytes);
        cp_async_bulk_tensor_shared_global(tile, x_map, full, 0, row);
    }
    __syncthreads();
    mbarrier_wait_parity(full, 0);
    for (int i = threadIdx.x; i < Tuning::bytes / 4; i += blockDim.x) tile[i] *= 2;
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        cp_async_bulk_tensor_global_shared(y_map, tile, 0, row);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read<0>();
    }
}
}  // namespace leanconv
"""


def doubling() -> tuple[Launch, np.ndarray]:
    """The launch of KERNEL on a matrix, and the matrix."""
    x = np.random.default_rng(0).standard_normal((21, 32)).astype(np.float32)
    maps = tuple(
        TensorMap(role, "float32", x.shape[::-1], x.strides[:1], box=(32, 8), swizzle=128, written=role == "y")
        for role in "xy"
    )
    tuning = (("rows", 8), ("bytes", 1024))
    return Launch("doubled.cuh", "leanconv::doubled", (), tuning, maps, grid=3, block=64, shared_bytes=1032), x


def test_a_launch_takes_tensor_maps(tmp_path: Any) -> None:
    from tests import emulator

    (tmp_path / "doubled.cuh").write_text(KERNEL)
    launch, x = doubling()
    y = np.full_like(x, np.nan)
    emulator.run_plan(Plan((launch,)), {"x": x, "y": y}, kernels=tmp_path)
    np.testing.assert_array_equal(y, 2 * x)
    assert "doubled(const __grid_constant__ leanconv::TensorMap x_map, const" in source(launch)
    # beside a map there may be the pointer of its array
    beside = replace(launch, arguments=(*launch.arguments, Pointer("y", written=True)))
    unit = source(beside).replace("<Problem, Tuning>(x_map, y_map, y)", "<Problem, Tuning>(x_map, y_map)")
    built = emulator.build(unit, "doubled", beside.arguments, tmp_path)
    y[:] = np.nan
    emulator.execute(built, beside.arguments, {"x": x, "y": y}, grid=3, block=64, shared_bytes=1032)
    np.testing.assert_array_equal(y, 2 * x)


def test_tensor_maps_stay_arguments(nvrtc: None) -> None:
    launch, _ = doubling()
    text = source(launch).replace("#include <doubled.cuh>", KERNEL)
    for arch in ("sm_90a", "sm_100a", "sm_120"):
        made = compile_source(text, "doubled", arch)
        assert made.stack_bytes < 128, "the maps have been copied to local memory"


def test_a_map_has_the_size_that_the_driver_writes() -> None:
    assert (tensor_map.BYTES, tensor_map.ALIGNMENT) == (128, 64)


def test_a_launch_follows_the_pointers_of_its_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch is given the map of the pointer of its call, encoded once; two outputs, one of them by a map."""
    encoded: list[tuple[str, int]] = []

    def fake(spec: TensorMap, pointer: int) -> bytes:
        encoded.append((spec.role, pointer))
        return pointer.to_bytes(8, "little") * 16

    monkeypatch.setattr(tensor_map, "encode", fake)
    x = TensorMap("x", "float32", (32, 21), (128,), box=(32, 8))
    y = replace(x, role="y", written=True)
    launched = Launch("f.cuh", "f", (), (), (x, Pointer("z", written=True), y, Number("int", "n", 7)), grid=1, block=32)
    plan = Plan((launched,))
    assert plan.roles == ("x", "z", "y") and plan.outputs == ("z", "y")
    seen = []

    def start(*arguments: Any) -> int:
        addresses = (ctypes.c_void_p * 4).from_address(arguments[-2].value)
        assert addresses[0] % 64 == addresses[2] % 64 == 0
        maps = [ctypes.string_at(addresses[i], 128)[:8] for i in (0, 2)]
        numbers = [ctypes.c_uint64.from_address(addresses[1]).value, ctypes.c_int.from_address(addresses[3]).value]
        seen.append((*(int.from_bytes(each, "little") for each in maps), *numbers))
        return 0

    run = launch_module.make_launcher(start, pytest.fail, [(1, launched)], ("y", "x", "z", "w"))
    for values in ((32, 16, 48, 0), (32, 16, 64, 0), (96, 16, 64, 0), (32, 16, 48, 0)):
        run(0, values)
    assert seen == [(16, 32, 48, 7), (16, 32, 64, 7), (16, 96, 64, 7), (16, 32, 48, 7)]
    assert encoded == [("x", 16), ("y", 32), ("y", 96)]
