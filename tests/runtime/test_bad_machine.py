"""What goes wrong on a user's machine: driver, compiler and cache that are missing, old, corrupt or full."""

from __future__ import annotations

import builtins
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import thread as pools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanconv import ConvProblem, CudaError, CudaUnavailableError, OutOfMemoryError, conv2d, explain
from leanconv.call.choose import choose
from leanconv.call.explain import NOMINAL
from leanconv.plan import Launch, Target
from leanconv.runtime import cache, driver, errors, launch
from leanconv.runtime import compile as compiler
from leanconv.runtime.launch import why_no_gpu
from tests.messages import says
from tests.runtime.fake_driver import FakeDriver
from tests.variants import NAMED

FROM_SOURCE = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}
X, W = np.ones((2, 4, 6, 6), np.float32), np.ones((8, 4, 3, 3), np.float32)


# The driver and the compiler


def test_no_driver(fresh_driver: pytest.MonkeyPatch) -> None:
    def absent() -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    fresh_driver.setattr(driver, "_open_library", absent)
    with says(CudaUnavailableError, "no NVIDIA driver was found", "libcuda.so.1", "NumPy arrays run on the CPU"):
        conv2d(X, W, device="cuda")
    told = explain(conv2d, X, W, device="cuda")
    assert "no NVIDIA driver was found" in told.where
    assert "no NVIDIA driver was found" in str(why_no_gpu())
    assert told.chosen == choose(told.problem, NOMINAL).algorithm.name
    assert conv2d(X, W).max() == 36


@pytest.mark.parametrize(
    "library, parts",
    [
        (FakeDriver(version=11080), ["too old", "supports CUDA 11.8", "12.0", "update the driver"]),
        (FakeDriver(missing=("cuMemAlloc_v2",)), ["too old", "cuMemAlloc_v2"]),
        (FakeDriver(init=100), ["no usable GPU", "(100)"]),
        (FakeDriver(devices=0), ["no usable GPU", "it lists no device"]),
    ],
    ids=["old", "ancient", "broken", "no GPU"],
)
def test_an_old_or_useless_driver(library: Any, parts: list[str], fresh_driver: pytest.MonkeyPatch) -> None:
    fresh_driver.setattr(driver, "_open_library", lambda: library)
    with says(CudaUnavailableError, *parts):
        conv2d(X, W, device="cuda")


def test_a_device_that_is_not_there_and_memory_that_is_not(fresh_driver: pytest.MonkeyPatch) -> None:
    fresh_driver.setattr(driver, "_open_library", FakeDriver)
    with says(ValueError, "cuda:7 does not exist", "1 GPU"):
        conv2d(X, W, device="cuda:7")
    assert why_no_gpu() is None
    with says(OutOfMemoryError, "12345 bytes"):
        launch.open_device(0).allocate(12345)


def test_a_gpu_that_is_too_old(fresh_driver: pytest.MonkeyPatch) -> None:
    fresh_driver.setattr(driver, "_open_library", lambda: FakeDriver(attributes={0: {75: 7, 76: 7}}))
    with says(CudaUnavailableError, "compute capability 7.7", "8.0 (Ampere)"):
        conv2d(X, W, device="cuda")
    assert "compute capability 7.7" in explain(conv2d, X, W, device="cuda").where
    assert "compute capability 7.7" in str(why_no_gpu())


def test_the_oldest_gpus_that_are_served(fresh_driver: pytest.MonkeyPatch) -> None:
    fresh_driver.setattr(driver, "_open_library", lambda: FakeDriver(attributes={0: {75: 8, 76: 8}}))
    assert launch.open_device(0).target.arch == "sm_88" and why_no_gpu() is None


def test_machine_code_that_the_driver_refuses(fresh_driver: pytest.MonkeyPatch) -> None:
    fresh_driver.setattr(driver, "_open_library", lambda: FakeDriver(version=12040))
    with says(CudaError, "cuModuleLoadData", "supports CUDA 12.4", "leanconv[cu12]"):
        driver.driver().fail(222, "cuModuleLoadData")


@pytest.fixture
def some_launch() -> Launch:
    algorithm = NAMED["implicit_gemm"]
    problem = ConvProblem(n=1, c=1, h=4, w=4, k=1, r=1, s=1)
    target = Target("sm_90a", 132)
    return algorithm.plan(problem, next(iter(algorithm.configs(problem, target))), target).launches[0]


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("LEANCONV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(errors, "_warned", set())
    return tmp_path / "cache"


def test_no_compiler(some_launch: Launch, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actual = builtins.__import__

    def without_cuda_core(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("cuda.core"):
            raise ModuleNotFoundError("No module named 'cuda'")
        return actual(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_cuda_core)
    with says(CudaUnavailableError, "NVRTC", "pip install 'leanconv[cu13]'", "No module named 'cuda'"):
        cache.compiled(some_launch, "sm_90a")


def test_no_nvrtc_library(some_launch: Launch, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class DynamicLibNotFoundError(RuntimeError): ...

    def refuse(*arguments: Any) -> Any:
        raise compiler.CompileError("", "", "") from DynamicLibNotFoundError('Failure finding "libnvrtc.so"')

    with monkeypatch.context() as patch, says(CudaUnavailableError, "NVRTC", "leanconv[cu13]", "libnvrtc.so"):
        patch.setattr(compiler, "compile_launch", refuse)
        patch.setattr(cache, "compiler_version", lambda: "nvrtc 13.0")
        cache.compiled(some_launch, "sm_90a")
    monkeypatch.setattr(cache.sys, "path", [])
    monkeypatch.setattr(builtins, "__import__", lambda *a, **k: refuse())
    cache.compiler_version.cache_clear()
    with says(CudaUnavailableError, "NVRTC", "leanconv[cu13]"):
        cache.compiler_version()
    cache.compiler_version.cache_clear()


ENDS = """
import threading, time
from leanconv.runtime.compile import compile_source
body = "".join(f"x[{i}] = x[{i + 1}] * x[{i + 7}] + sinf(x[{i}]);" for i in range(30))
begun = threading.Event()
def work():
    for i in range(10_000):
        begun.set()
        compile_source(f'extern "C" __global__ void f{i}(float* x) {{ {body} }}', f"f{i}", "sm_80")
threading.Thread(target=work, daemon=True).start()
begun.wait()
time.sleep(0.3)
"""


def test_a_process_ends_while_a_daemon_thread_compiles(nvrtc: None) -> None:
    """In 10 of 18 timings NVRTC's library ended before its thread, and the process with a signal."""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, env=FROM_SOURCE)
        assert done.returncode == 0, done.stderr


def test_a_daemon_thread_compiles_in_one_that_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process' end waits for threads of pools, which are daemons where their pool's maker is one."""
    ran: list[threading.Thread] = []

    def compile_it(*given: str) -> None:
        ran.append(threading.current_thread())

    monkeypatch.setattr(compiler, "_compile_source", compile_it)
    for daemon in (True, False):
        thread = threading.Thread(target=compiler.compile_source, args=("", "f", "sm_80"), daemon=daemon)
        thread.start()
        thread.join()
    of_daemon, own = ran
    assert of_daemon in pools._threads_queues
    assert own is thread, "any other thread is waited for as it is"


def test_threads_import_the_compiler_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    actual, within, most = builtins.__import__, [], [0]

    def slow(name: str, *rest: Any, **more: Any) -> Any:
        if name != "cuda.core":
            return actual(name, *rest, **more)
        within.append(name)
        most[0] = max(most[0], len(within))
        time.sleep(0.05)
        within.pop()
        raise ModuleNotFoundError("a test")

    def compile_one() -> None:
        with pytest.raises(ImportError, match="a test"):
            compiler.compile_source("", "f", "sm_80")

    monkeypatch.setattr(builtins, "__import__", slow)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: compile_one(), range(4)))
    assert most == [1], "two threads that import cuda.core at the same time see half of it"


# The disk cache


@pytest.fixture
def counted(some_compiler: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """compile_launch replaced by one that is instant and noted, and needs no NVRTC."""
    calls: list[str] = []

    def instant(made: Launch, arch: str) -> compiler.Compiled:
        calls.append(arch)
        return compiler.Compiled(b"machine\ncode" * 100, made.symbol, arch, 40, 4, 8)

    monkeypatch.setattr(compiler, "compile_launch", instant)
    return calls


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
        lambda data: data.replace(b'"registers": 40', b'"register": 40'),
        lambda data: data.rpartition(b"\n")[0] + b"\n[1, 2]",
        lambda data: os.urandom(5000),
        lambda data: data.rpartition(b"\n")[0] + b"\n" + b"[" * 100_000 + b"]" * 100_000,
        lambda data: data.replace(b'"registers": 40', b'"registers": "many"'),
    ],
    ids=["empty", "half", "cut", "bit", "field", "list", "noise", "deep", "words"],
)
def test_a_corrupt_entry_is_a_miss_and_is_replaced(
    damage: Any, some_launch: Launch, own_cache: Path, counted: list[str]
) -> None:
    first = cache.compiled(some_launch, "sm_90a")
    assert cache.compiled(some_launch, "sm_90a") == first and len(counted) == 1
    (path,) = (own_cache / "kernels").iterdir()
    good = path.read_bytes()
    path.write_bytes(damage(good))
    with pytest.warns(RuntimeWarning, match="is compiled again, as it cannot be used"):
        assert cache.compiled(some_launch, "sm_90a") == first and len(counted) == 2
    assert path.read_bytes() == good
    assert cache.compiled(some_launch, "sm_90a") == first and len(counted) == 2


def test_an_unwritable_cache_warns_once_and_works(some_launch: Launch, own_cache: Path, counted: list[str]) -> None:
    own_cache.parent.mkdir(exist_ok=True)
    own_cache.write_text("a file where the folder should be")  # also refused to root, whom permissions do not stop
    with pytest.warns(RuntimeWarning, match=f"{re.escape(str(own_cache))}.*LEANCONV_CACHE_DIR"):
        cache.compiled(some_launch, "sm_90a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.compiled(some_launch, "sm_90a").registers == 40
    assert counted == ["sm_90a"] * 2
    assert cache.size() == (0, 0) and cache.clear() == (0, 0)


def test_a_disk_that_fills_leaves_nothing_behind(
    some_launch: Launch, own_cache: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        cache.compiled(some_launch, "sm_90a")
    assert list((own_cache / "kernels").iterdir()) == []


def test_a_daemon_thread_ends_without_a_word_where_the_process_has_ended_its_pools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def submit(*given: Any) -> Any:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    seen: list[Any] = []
    monkeypatch.setattr(pools.ThreadPoolExecutor, "submit", submit)
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
    thread = threading.Thread(target=compiler.compile_source, args=("", "f", "sm_80"), daemon=True)
    thread.start()
    thread.join()
    assert seen == [SystemExit], "which Python prints nothing of"
