"""The disk cache, kernel arguments, array strides and the road to the driver, on a machine without a GPU."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanconv import ConvProblem, CudaError, FilterProblem, conv2d, filter2d
from leanconv.arrays import TorchArrays
from leanconv.arrays.memory import lay_out, row_pitched
from leanconv.call.choose import choose
from leanconv.plan import Launch, Number, Plan, Pointer, Target
from leanconv.runtime import cache, env, launch
from leanconv.runtime.compile import INCLUDE, Compiled
from tests.runtime.fake_driver import launch_config

TARGET = Target("sm_90a", 132, 227 * 1024, 228 * 1024)


def first_launch(problem: ConvProblem | FilterProblem) -> Launch:
    return choose(problem, TARGET).plan(problem, TARGET).launches[0]


CONV = ConvProblem(n=1, c=4, h=8, w=8, k=8, r=3, s=3)


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("LEANCONV_CACHE_DIR", str(tmp_path))
    return tmp_path / "kernels"


# Environment


def test_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LEANCONV_CACHE_DIR", str(tmp_path / "here"))
    assert env.cache_dir() == tmp_path / "here" and cache.directory() == tmp_path / "here" / "kernels"
    monkeypatch.delenv("LEANCONV_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert env.cache_dir() == tmp_path / "caches" / "leanconv"
    monkeypatch.setenv("LEANCONV_NO_CACHE", "1")
    assert cache.directory() is None
    for off in ("0", ""):
        monkeypatch.setenv("LEANCONV_NO_CACHE", off)
        assert cache.directory() is not None
    monkeypatch.setenv("LEANCONV_TUNING_DIR", "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert env.tuning_dir() == tmp_path / "data" / "leanconv"


# Disk cache


def test_entries_keep_code_and_figures(own_cache: Path) -> None:
    code = Compiled(bytes(range(256)) * 9 + b"\n{}", "implicit_gemm", "sm_90a", 128, 8, 16)
    cache.store("a" * 64, code)
    assert cache.load("a" * 64) == code
    assert cache.load("b" * 64) is None
    (path,) = own_cache.iterdir()
    assert path.suffix == ".cubin" and path.read_bytes().startswith(code.cubin)
    assert cache.size() == (1, path.stat().st_size)
    size = path.stat().st_size
    assert cache.clear() == (1, size)
    assert cache.size() == (0, 0) and cache.load("a" * 64) is None


def test_only_the_stores_own_files_are_counted_and_removed(own_cache: Path) -> None:
    cache.store("a" * 64, Compiled(b"x", "f", "sm_80", 1, 0, 0))
    theirs = [own_cache / name for name in ("notes.txt", "mine.cubin", ".hidden")]
    ours = own_cache / f".{'b' * 64}.k3x"  # left by a process that died
    for path in (*theirs, ours):
        path.write_bytes(b"precious")
        os.utime(path, (0, 0))
    (own_cache / "folder").mkdir()
    os.utime(own_cache / "folder", (0, 0))
    (own_cache / f".{'c' * 64}.f9_").write_bytes(b"being written")
    finished = (own_cache / f"{'a' * 64}.cubin").stat().st_size
    assert cache.clear() == (1, finished + len(b"precious"))
    assert {path.name for path in own_cache.iterdir()} == {
        "notes.txt", "mine.cubin", ".hidden", "folder", f".{'c' * 64}.f9_"
    }  # fmt: skip


def test_the_store_can_be_switched_off(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANCONV_NO_CACHE", "1")
    cache.store("a" * 64, Compiled(b"x", "f", "sm_80", 1, 0, 0))
    assert cache.load("a" * 64) is None and not own_cache.exists()


def test_the_key_follows_all_that_decides_the_code(some_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = first_launch(CONV)
    base = cache.key(made, "sm_90a")
    assert cache.key(first_launch(CONV), "sm_90a") == base
    assert cache.key(made, "sm_100a") != base
    assert cache.key(first_launch(ConvProblem(n=1, c=4, h=8, w=9, k=8, r=3, s=3)), "sm_90a") != base
    with monkeypatch.context() as patch:
        patch.setitem(cache.compiler.OPTIONS, "std", "c++20")
        assert cache.key(made, "sm_90a") != base
    with monkeypatch.context() as patch:
        patch.setattr(cache, "compiler_version", lambda: "nvrtc 99.0")
        assert cache.key(made, "sm_90a") != base
    assert cache.key(made, "sm_90a") == base


def forget_headers() -> None:
    cache.headers.cache_clear()
    cache._headers.cache_clear()


def test_the_key_follows_every_included_header(
    some_compiler: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = first_launch(CONV)
    forget_headers()
    names = set(cache._headers(made.header))
    assert {made.header, "device/ptx/memory.cuh"} < names
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((INCLUDE / name).read_bytes())
    base = cache.key(made, "sm_90a")
    try:
        monkeypatch.setattr(cache, "INCLUDE", tmp_path)
        for name in sorted(names):
            original = (tmp_path / name).read_bytes()
            forget_headers()
            assert cache.key(made, "sm_90a") == base, "where the package lies must not matter"
            (tmp_path / name).write_bytes(original + b"// changed\n")
            forget_headers()
            assert cache.key(made, "sm_90a") != base, name
            (tmp_path / name).write_bytes(original)
    finally:
        forget_headers()


def test_a_real_kernel_goes_through_the_cache(nvrtc: None, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = first_launch(FilterProblem(1, 8, 8, 3, 3, (1, 1), x_pitch=8, x_step=64, y_pitch=8, y_step=64))
    fresh = cache.compiled(made, "sm_90a")
    assert fresh.cubin.startswith(b"\x7fELF") and fresh.registers > 8 and fresh.symbol == made.symbol

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("compiled although it lies on disk")

    monkeypatch.setattr(cache.compiler, "compile_launch", refuse)
    assert cache.compiled(made, "sm_90a") == fresh


RACER = """
import sys
from leanconv.runtime import cache
from leanconv.runtime.compile import Compiled
me = int(sys.argv[1])
mine = Compiled(bytes([me]) * (200_000 + me), "f", "sm_90a", me, 0, 0)
seen = set()
for turn in range(150):
    cache.store("shared", mine)
    found = cache.load("shared")
    if found is not None:  # another's entry, whole
        assert found.cubin == bytes([found.registers]) * (200_000 + found.registers), "torn entry"
        seen.add(found.registers)
    if turn % 50 == 49:
        cache.clear()
assert seen
"""


def test_many_processes_race(own_cache: Path) -> None:
    racers = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", RACER, str(i)], stderr=subprocess.PIPE, text=True)
        for i in range(1, 6)
    ]
    for racer in racers:
        _, errors = racer.communicate(timeout=120)
        assert racer.returncode == 0, errors
    assert not [path for path in own_cache.iterdir() if path.suffix != ".cubin"], "temporary files left"


# Kernel arguments and launches


class Launched:
    """Plays cuLaunchKernelEx: keeps what a kernel of the given argument types would have read."""

    def __init__(self, formats: str) -> None:
        self.formats = formats
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, config: Any, function: Any, addresses: Any, extra: None) -> int:
        shape, stream, _ = launch_config(config.value)
        pointers = (ctypes.c_void_p * len(self.formats)).from_address(addresses.value)
        values = tuple(
            struct.unpack(f, ctypes.string_at(at, struct.calcsize(f)))[0]
            for f, at in zip(self.formats, pointers, strict=True)
        )
        self.calls.append(((function.value, *shape), stream, values))
        return 0


ROLES = ("x", "w", "bias", "y", "workspace", "prepared", "value", "delta")
ARGUMENTS = (
    Pointer("x"), Number("long long", "batch", 2**40 + 1), Pointer("y", written=True),
    Number("float", "value"), Number("int", "rows", -3), Number("float", "delta"),
    Pointer("bias"),
    Number("double", "scale", 0.1), Number("unsigned", "mask", 2**32 - 1), Number("bool", "flag", 1),
)  # fmt: skip


def a_launch(**more: Any) -> Launch:
    return Launch("f.cuh", "leanconv::f", (), (), ARGUMENTS, grid=7, block=128, shared_bytes=999, **more)


def test_arguments_reach_the_kernel_by_type_and_name() -> None:
    start = Launched("PqPfifPdI?")
    run = launch.make_launcher(start, pytest.fail, [(0xF00, a_launch())], ROLES)
    run(5, (2**47 + 16, 1, 0, 2**46, 3, 5, 1.5, -0.25))
    run(6, (32, 1, 64, 48, 3, 5, float("inf"), 0))
    assert start.calls == [
        ((0xF00, 7, 1, 1, 128, 1, 1, 999), 5, (2**47 + 16, 2**40 + 1, 2**46, 1.5, -3, -0.25, 0, 0.1, 2**32 - 1, True)),
        ((0xF00, 7, 1, 1, 128, 1, 1, 999), 6, (32, 2**40 + 1, 48, float("inf"), -3, 0.0, 64, 0.1, 2**32 - 1, True)),
    ]


def test_integer_scalars() -> None:
    start = Launched("ii")
    made = Launch("f.cuh", "f", (), (), (Number("int", "value"), Number("int", "delta")), grid=1, block=32)
    launch.make_launcher(start, pytest.fail, [(1, made)], ROLES)(0, (0, 0, 0, 0, 0, 0, -(2**31), 7))
    assert start.calls[0][2] == (-(2**31), 7)


def test_a_launch_inside_a_launch_has_its_own_arguments() -> None:
    # a signal handler or a finaliser may call in while a launch is under way
    start = Launched("PqPfifPdI?")
    values = [16, 0, 0, 32, 0, 0, 0.0, 0.0]

    def nested(*arguments: Any) -> int:
        if len(start.calls) < 3:
            values[0] += 16
            start.calls.append(())
            run(0, tuple(values))
        return start(*arguments)

    run = launch.make_launcher(nested, pytest.fail, [(1, a_launch())], ROLES)
    run(0, tuple(values))
    assert [call[2][0] for call in start.calls if call] == [64, 48, 32, 16]


def test_threads_do_not_mix_their_arguments() -> None:
    start = Launched("PqPfifPdI?")
    run = launch.make_launcher(start, pytest.fail, [(1, a_launch())], ROLES)

    def many(thread: int) -> None:
        for i in range(500):
            at = (thread << 32) + 16 * i
            run(thread, (at, 0, at + 1, at + 2, 0, 0, 0.0, 0.0))

    threads = [threading.Thread(target=many, args=(i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(start.calls) == 2000
    for _, stream, values in start.calls:
        assert values[0] >> 32 == stream and values[6] == values[0] + 1 and values[2] == values[0] + 2


def test_a_failing_launch_is_told() -> None:
    codes: list[Any] = []
    made = a_launch()
    launch.make_launcher(lambda *a: 719, lambda *told: codes.append(told), [(1, made)], ROLES)(0, (0,) * 8)
    assert codes == [(719, made)]


def test_several_launches_share_the_values_of_a_call() -> None:
    first = Launch("f.cuh", "f", (), (), (Pointer("x"), Pointer("workspace", written=True)), 3, 64)
    second = Launch(
        "f.cuh",
        "g",
        (),
        (),
        (Number("int", "n", 9), Pointer("y", written=True), Pointer("workspace", written=True)),
        4,
        96,
    )
    seen = []
    readers = {1: Launched("PP"), 2: Launched("iPP")}

    def start(config: Any, function: Any, *rest: Any) -> int:
        seen.append(function.value)
        return readers[function.value](config, function, *rest)

    run = launch.make_launcher(start, pytest.fail, [(1, first), (2, second)], ROLES)
    run(0x51, (16, 0, 0, 32, 48, 64, 0, 0))
    assert seen == [1, 2]
    assert readers[1].calls == [((1, 3, 1, 1, 64, 1, 1, 0), 0x51, (16, 48))]
    assert readers[2].calls == [((2, 4, 1, 1, 96, 1, 1, 0), 0x51, (9, 32, 48))]


def test_architecture_names() -> None:
    assert [launch.arch_name(*c) for c in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))] == [
        "sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120",
    ]  # fmt: skip


def test_run_plan_fills_y(host_device: Any) -> None:
    problem = ConvProblem(n=2, c=3, h=5, w=5, k=4, r=3, s=3, bias=True)
    plan = choose(problem, TARGET).plan(problem, TARGET)
    rng = np.random.default_rng(0)
    arrays = {"x": rng.standard_normal(problem.x_shape), "w": rng.standard_normal(problem.w_shape), "bias": np.ones(4)}
    given = {name: array.astype(np.float32) for name, array in arrays.items()}
    y = np.full(problem.y_shape, np.nan, np.float32)
    launch.run_on_host_arrays(host_device, plan, {**given, "y": y})
    np.testing.assert_allclose(y, conv2d(given["x"], given["w"], given["bias"]), rtol=1e-4, atol=1e-5)
    assert host_device.memory == {}


# Arrays


@pytest.mark.parametrize(
    "index, expected",
    [
        ((slice(None), slice(None), slice(None)), (20, 200)),
        ((slice(None), slice(1, 9), slice(3, 17)), (20, 200)),
        ((slice(None), slice(None, None, 2), slice(None)), (40, 200)),
        ((slice(None), slice(None), slice(None, None, 2)), None),
        ((slice(None), slice(None, None, -1), slice(None)), None),
        ((slice(None, None, 2), slice(None), slice(None)), (20, 400)),
        ((0, slice(None), slice(None)), (20, 200)),
        ((slice(None), slice(4, 5), slice(2, 9)), (7, 200)),
        ((slice(None), slice(None), slice(3, 4)), (20, 200)),
    ],
)
def test_row_pitch(index: Any, expected: Any) -> None:
    images = np.zeros((6, 10, 20), np.float32)[index]
    found = row_pitched(images.shape, images.strides, 4)
    if images.ndim == 2 and expected:
        expected = (expected[0], found[1] if found else None)
    assert found == expected


def test_row_pitch_of_several_leading_axes() -> None:
    images = np.zeros((2, 3, 4, 5), np.float32)
    assert row_pitched(images.shape, images.strides, 4) == (5, 20)
    assert row_pitched((2, 2, 4, 5), images[:, :2].strides, 4) is None
    assert row_pitched((2, 1, 4, 5), images[:, :1].strides, 4) == (5, 60)
    assert row_pitched((3, 4, 5), (0, 20, 4), 4) is None, "one image shown three times"
    assert row_pitched((4, 5), (4, 4), 4) is None, "rows that overlap"


@pytest.mark.parametrize(
    "shape, order", [((2, 3, 4, 5), (0, 2, 3, 1)), ((2, 3, 4, 5), (1, 2, 3, 0)), ((2, 3, 4), (0, 2, 1)),
                     ((2, 3, 4), (1, 2, 0)), ((2, 3, 1, 5), (1, 2, 3, 0)), ((0, 3, 4), (1, 2, 0)), ((2, 3, 4), None)],
)  # fmt: skip
def test_orders_in_memory_of_pytorchs_tensors(shape: tuple[int, ...], order: Any) -> None:
    torch = pytest.importorskip("torch")
    library, plain = TorchArrays(), torch.arange(float(np.prod(shape))).reshape(shape)
    order_or_shown = order or tuple(range(len(shape)))
    strides, distance = {}, 1
    for axis in reversed(order_or_shown):
        strides[axis], distance = distance, distance * max(1, shape[axis])
    copied = library.copy(plain, order)
    assert torch.equal(copied, plain) and library.is_contiguous(copied, order)
    made = library.empty(shape, "float32", None, order)
    assert made.shape == shape and made.dtype == torch.float32
    assert made.stride() == tuple(strides[axis] for axis in range(len(shape)))
    for tensor in (copied, made):
        assert library.is_contiguous(tensor) == (order is None or 0 in shape), "not in the order that is shown"
    # what PyTorch negates lazily must be copied, wherever it lies
    negated = torch._neg_view(copied)
    assert not library.is_contiguous(negated, order)
    assert torch.equal(library.copy(negated, order), -plain)


def test_importing_leanconv_needs_no_gpu_library() -> None:
    code = (
        "import leanconv, sys; assert not {'torch', 'cupy', 'scipy', 'cuda.core', 'cuda.bindings'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# The real kernels, through the whole API, on the emulator


class EmulatedDevice:
    """A GPU whose kernels are the .cuh files run on the CPU under sanitizers; memory is NumPy's."""

    name, target = "emulator", TARGET

    def __init__(self) -> None:
        self.memory: dict[int, np.ndarray] = {}

    def executable(self, plan: Plan, roles: Sequence[str]) -> launch.Executable:
        from tests import emulator

        def run(stream: int, values: Any) -> None:
            given = dict(zip(roles, values, strict=True))
            arrays = {name: v if name in ("value", "delta") else self.memory.get(int(v)) for name, v in given.items()}
            emulator.run_plan(plan, arrays)

        return run

    def allocate(self, nbytes: int) -> int:
        array = np.full(nbytes // 4, np.nan, np.float32)
        self.memory[array.ctypes.data] = array
        return int(array.ctypes.data)

    def free(self, pointer: int) -> None:
        del self.memory[pointer]

    def upload(self, pointer: int, array: np.ndarray) -> None:
        self.memory[pointer][:] = array.ravel()

    def download(self, array: np.ndarray, pointer: int) -> None:
        array[...] = self.memory[pointer].reshape(array.shape)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "CHWN"])
def test_conv2d_on_the_emulated_gpu(layout: Any, host_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = EmulatedDevice()
    monkeypatch.setattr(launch, "open_device", lambda index: emulated)
    rng = np.random.default_rng(5)
    x, w = (rng.standard_normal(lay_out(layout, *s)).astype(np.float32) for s in ((2, 4, 7, 9), (6, 2, 3, 3)))
    bias = rng.standard_normal(6).astype(np.float32)
    arguments: Any = dict(stride=(1, 2), padding=(1, 0, 2, 1), groups=2, activation="relu", layout=layout)
    y = conv2d(x, w, bias, device="cuda", **arguments)
    np.testing.assert_allclose(y, conv2d(x, w, bias, **arguments), rtol=1e-4, atol=1e-5)
    assert emulated.memory == {}


def test_the_first_error_is_told_and_what_can_be_freed_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Faulting(EmulatedDevice):
        def download(self, array: np.ndarray, pointer: int) -> None:
            raise CudaError("an illegal address")

        def free(self, pointer: int) -> None:
            super().free(pointer)
            raise CudaError("cuMemFree_v2 failed")

    device, x = Faulting(), np.ones(4, np.float32)
    with pytest.raises(CudaError, match="an illegal address"):
        plan = Plan((Launch("f.cuh", "f", (), (), (Pointer("x"), Pointer("y", written=True)), grid=1, block=32),))
        launch.run_on_host_arrays(device, plan, {"x": x, "y": x.copy()}, run=lambda stream, values: None)
    assert device.memory == {}


def test_filter2d_on_the_emulated_gpu(host_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = EmulatedDevice()
    monkeypatch.setattr(launch, "open_device", lambda index: emulated)
    rng = np.random.default_rng(6)
    image, kernel = (rng.standard_normal(s).astype(np.float32) for s in ((2, 13, 21), (3, 4)))
    arguments: Any = dict(border="constant", value=2, delta=-1, anchor=(2, 0))
    y = filter2d(image, kernel, device="cuda", **arguments)
    np.testing.assert_allclose(y, filter2d(image, kernel, **arguments), rtol=1e-4, atol=1e-5)
