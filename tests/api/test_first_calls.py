"""Kernels compiled side by side and before the first call, and the bounds of all that is kept."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import leanconv
from leanconv import ConvProblem, FilterProblem, NoAlgorithmError, conv2d
from leanconv.call import bind, lookup
from leanconv.cli import doctor
from leanconv.plan import Launch, Pointer
from leanconv.runtime import cache, env, errors, kernels
from leanconv.runtime.bounded_cache import BoundedCache
from leanconv.runtime.compile import Compiled, CompileError
from leanconv.runtime.driver import CudaError
from leanconv.runtime.kernels import Kernels
from leanconv.runtime.threads import cores, side_by_side
from tests.cases import TARGETS

LAYERS = [ConvProblem(2, 8, 9, 9, k, 3, 3, padding=(1, 1, 1, 1)) for k in (4, 8, 12)]


def launch(number: int, shared_bytes: int = 0) -> Launch:
    return Launch(
        "kernels/direct/direct.cuh", "f", (("number", number),), (), (Pointer("x"),), 1, 32, shared_bytes=shared_bytes
    )


class FakeDriver:
    """Loads and unloads modules by number."""

    def __init__(self) -> None:
        self.loaded: set[int] = set()
        self.number = 0
        self.modes: list[int] = []
        self.shared: list[int] = []
        self.large_clusters = 0

    def check(self, name: str, *arguments: Any) -> None:
        if name == "cuModuleLoadData":
            self.number += 1
            self.loaded.add(self.number)
            arguments[0]._obj.value = self.number
        elif name == "cuModuleGetFunction":
            arguments[0]._obj.value = 1000 + arguments[1].value
        elif name == "cuModuleUnload":
            assert self.modes and self.modes[-1] == 2, "a capture elsewhere would be broken"
            self.loaded.remove(arguments[0])
        elif name == "cuFuncSetAttribute" and arguments[1] == 14:  # non-portable sizes of clusters are allowed
            self.large_clusters += arguments[2]
        elif name == "cuFuncSetAttribute":
            self.shared.append(arguments[2])
        else:
            assert name == "cuThreadExchangeStreamCaptureMode"
            cell = arguments[0]._obj
            self.modes.append(cell.value)
            cell.value = 0


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """`cache.compiled` without a compiler: counts, and takes as long as ``takes`` says."""
    state: dict[str, Any] = {"compiled": 0, "takes": 0.0, "at_once": 0, "most": 0}
    lock = threading.Lock()

    def compiled(each: Launch, arch: str) -> Compiled:
        with lock:
            state["compiled"] += 1
            state["at_once"] += 1
            state["most"] = max(state["most"], state["at_once"])
        time.sleep(state["takes"])
        with lock:
            state["at_once"] -= 1
        return Compiled(b"code", "f", arch, 1, 0, 0)

    monkeypatch.setattr(cache, "compiled", compiled)
    monkeypatch.setattr(cache, "key", lambda each, arch, compiler=None: str(each.problem))
    return state


# What was not used for long is dropped


def test_recent_entries_stay_and_old_ones_go() -> None:
    kept: BoundedCache[int, str] = BoundedCache(10)
    for i in range(1000):
        kept.keep(i, str(i))
        assert kept.recall(0) == "0", "used all the time"
    assert all(kept.recall(i) == str(i) for i in range(991, 1000))
    assert kept.recall(500) is None
    assert len(kept) <= 10
    kept.clear()
    assert kept.recall(0) is kept.recall(999) is None


def test_recent_serves_many_threads() -> None:
    kept: BoundedCache[int, int] = BoundedCache(50)
    wrong = []

    def use(start: int) -> None:
        for i in range(5000):
            key = (start * 7 + i) % 200
            found = kept.recall(key)
            if found is None:
                kept.keep(key, key)
            elif found != key:
                wrong.append((key, found))

    threads = [threading.Thread(target=use, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(kept) <= 50 + len(threads)


# Kernels on a device


def test_kernels_that_nothing_uses_are_unloaded(monkeypatch: pytest.MonkeyPatch, store: Any) -> None:
    monkeypatch.setattr(kernels, "KEPT", 3)
    driver = FakeDriver()
    loaded = Kernels(driver, "sm_90a")  # type: ignore[arg-type]
    held = loaded.get(launch(0))
    for number in range(1, 30):
        loaded.get(launch(number))
    gc.collect()
    loaded.get(launch(30))
    assert len(driver.loaded) <= 2 * 3 + 2
    assert 1 in driver.loaded and loaded.get(launch(0)) is held, "a ready call holds it"
    assert set(driver.modes) <= {0, 2} and driver.modes[-1] == 0, "the thread's capture mode is as it was"
    compiled = store["compiled"]
    loaded.get(launch(5))
    assert store["compiled"] == compiled + 1, "loaded again"


def test_kernels_in_graphs_are_never_unloaded(monkeypatch: pytest.MonkeyPatch, store: Any) -> None:
    monkeypatch.setattr(kernels, "KEPT", 2)
    driver = FakeDriver()
    loaded = Kernels(driver, "sm_90a")  # type: ignore[arg-type]
    loaded.keep_for_graphs([loaded.get(launch(0))])
    for number in range(1, 20):
        loaded.get(launch(number))
    gc.collect()
    loaded.get(launch(20))
    assert 1 in driver.loaded and len(driver.loaded) <= 2 * 2 + 3


def test_a_module_that_cannot_be_unloaded_is_left(monkeypatch: pytest.MonkeyPatch, store: Any) -> None:
    monkeypatch.setattr(kernels, "KEPT", 1)

    class Stubborn(FakeDriver):
        def check(self, name: str, *arguments: Any) -> None:
            super().check(name, *arguments)
            if name == "cuModuleUnload":
                raise CudaError("the context is gone")

    driver = Stubborn()
    loaded = Kernels(driver, "sm_90a")  # type: ignore[arg-type]
    for number in range(6):
        loaded.get(launch(number))
        gc.collect()
    assert driver.modes[-1] == 0


def test_the_most_shared_memory_of_a_kernel_is_asked_for_once(store: Any) -> None:
    driver = FakeDriver()
    loaded = Kernels(driver, "sm_90a")  # type: ignore[arg-type]
    for shared in (1000, 100_000, 60_000, 100_000, 200_000):
        loaded.get(launch(0, shared))
    assert driver.shared == [100_000, 200_000] and store["compiled"] == 1


def test_clusters_of_more_than_eight_blocks_are_asked_for_once(store: Any) -> None:
    driver = FakeDriver()
    loaded = Kernels(driver, "sm_90a")  # type: ignore[arg-type]
    for number, cluster in ((0, 8), (1, 16), (1, 16), (2, 1)):
        loaded.get(replace(launch(number), cluster=cluster))
    assert driver.large_clusters == 1 and driver.shared == []


def test_different_kernels_compile_at_the_same_time_and_equal_ones_once(store: Any) -> None:
    store["takes"] = 0.2
    loaded = Kernels(FakeDriver(), "sm_90a")  # type: ignore[arg-type]
    wanted = [launch(number % 4) for number in range(16)]
    threads = [threading.Thread(target=loaded.get, args=(each,)) for each in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store["compiled"] == 4 and store["most"] == 4


def test_a_kernel_that_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch, store: Any) -> None:
    loaded = Kernels(FakeDriver(), "sm_90a")  # type: ignore[arg-type]
    right = cache.compiled

    def fails(each: Launch, arch: str) -> Compiled:
        raise CompileError("no", "", "")

    monkeypatch.setattr(cache, "compiled", fails)
    for _ in range(2):
        with pytest.raises(CompileError):
            loaded.get(launch(0))
    monkeypatch.setattr(cache, "compiled", right)
    assert loaded.get(launch(0)).function == 1001


def test_the_first_error_ends_work_side_by_side() -> None:
    done = []

    def fails() -> None:
        raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"):
        side_by_side([fails, *[lambda: (time.sleep(0.01), done.append(1))] * 200])
    assert len(done) < 200
    side_by_side([])
    side_by_side([lambda: done.clear()] * 3, lambda: done.append(2))
    assert 1 <= cores() and done.count(2) >= 1


# Compile before the first call


def test_compile_makes_first_calls_warm(some_compiler: None, host_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Launch] = []

    def load(each: Launch) -> None:
        loaded.append(each)
        if len(loaded) > 2:  # the others are on disk
            cache.made.append(cache.key(each, host_device.target.arch, ""))

    monkeypatch.setattr(cache, "made", ["an earlier one"])
    monkeypatch.setattr(host_device, "load", load, raising=False)
    image = FilterProblem(1, 8, 8, 3, 3, (1, 1), x_pitch=8, x_step=64, y_pitch=8, y_step=64)
    made = leanconv.precompile([*LAYERS, LAYERS[0], image], progress=False)
    assert made.problems == 4 and made.kernels == len(loaded) == len(set(loaded)) >= 4
    assert made.compiled == len(loaded) - 2
    assert f"{made.kernels} kernels of 4 problems are ready: {made.compiled} compiled" in str(made)
    assert all(bind.is_loaded(problem, 0) for problem in LAYERS) and not bind.is_loaded(replace(LAYERS[0], n=3), 0)


def test_compile_takes_the_algorithm_that_the_calls_name(
    some_compiler: None, host_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Launch] = []
    monkeypatch.setattr(host_device, "load", loaded.append, raising=False)
    leanconv.precompile(LAYERS[:1], algorithm="direct", progress=False)
    assert {each.symbol for each in loaded} == {"direct"}
    with pytest.raises(NoAlgorithmError):
        leanconv.precompile([replace(LAYERS[0], bias=True, op="fprop", stride=(2, 2))], algorithm="winograd2d")


def test_compile_makes_prepared_calls_warm_too(
    some_compiler: None, host_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls without packed weights have a main kernel of their own; those with them have the other one."""
    loaded: list[Launch] = []
    monkeypatch.setattr(host_device, "load", loaded.append, raising=False)
    monkeypatch.setattr(host_device, "target", TARGETS[0])
    layer = ConvProblem(32, 64, 56, 56, 64, 3, 3, padding=(1, 1, 1, 1), layout="NHWC")
    leanconv.precompile([layer], algorithm="tensor_winograd", progress=False)
    mains = [dict(each.tuning).get("validates", False) for each in loaded if each.symbol == "tensor_winograd"]
    assert sorted(mains) == [False, True]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([LAYERS[0], 3], r"problems\[1\] is of type int; it must be a ConvProblem or a FilterProblem"),
        ([None], r"problems\[0\] is of type NoneType"),
        (LAYERS[0], r"problems is of type ConvProblem; give a list: leanconv.precompile\(\[problem\]\)"),
        ("resnet-50", "Suites are for the command line: leanconv precompile resnet-50"),
        (np.array(1), r"problems is of type ndarray; give a list: leanconv.precompile\(\[problem\]\)"),
    ],
)
def test_what_is_no_problem_is_refused(given: Any, message: str, host_device: Any) -> None:
    with pytest.raises(TypeError, match=message):
        leanconv.precompile(given)
    with pytest.raises(ValueError, match="device='cpu': kernels are compiled for GPUs only; give 'cuda' or 'cuda:N'"):
        leanconv.precompile(LAYERS, device="cpu")


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (True, TypeError, "bundle=True is no path; give a str or a pathlib.Path"),
        (b"x", TypeError, "bundle=b'x' is no path"),
        ("\0", ValueError, r"bundle='\\x00' has a null character"),
    ],
)
def test_what_is_no_path_of_a_bundle_is_refused_before_anything_is_compiled(
    given: Any, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "compiled", None)
    with pytest.raises(kind, match=message):
        leanconv.precompile(LAYERS, bundle=given, progress=False)


def test_an_empty_batch_needs_no_kernel(host_device: Any) -> None:
    assert leanconv.precompile([replace(LAYERS[0], n=0)], progress=False).kernels == 0


# The bounds of what calls keep


def test_ready_calls_are_bounded(host_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: BoundedCache[Any, Any] = BoundedCache(8)
    monkeypatch.setattr(lookup, "_calls", kept)
    monkeypatch.setattr(bind, "_loaded", BoundedCache(8))
    w = np.ones((2, 1, 3, 3), np.float32)
    for width in range(4, 44):
        conv2d(np.ones((1, 1, 4, width), np.float32), w, device="cuda")
        conv2d(np.ones((1, 1, 4, 4), np.float32), w, device="cuda")
    assert len(kept) <= 8
    assert host_device.executables == 40, "the one in use stays ready"


# The disk store


def entry(name: int, nbytes: int, age: float) -> Path:
    cache.store(f"{name:064x}", Compiled(bytes(nbytes), "f", "sm_80", 1, 0, 0))
    folder = cache.directory()
    assert folder is not None
    path = folder / f"{name:064x}.cubin"
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_the_store_drops_what_was_not_used_for_longest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LEANCONV_CACHE_DIR", str(tmp_path))
    paths = [entry(i, 10_000, age=100 - i) for i in range(10)]
    (tmp_path / "kernels" / "notes.txt").write_bytes(bytes(100_000))
    assert cache.shrink(200_000) == 0
    assert cache.shrink(80_000) > 0
    left = [path for path in paths if path.exists()]
    assert left == paths[-len(left) :] and cache.size()[1] <= 60_000 and len(left) >= 5
    assert (tmp_path / "kernels" / "notes.txt").exists()


def test_use_keeps_an_entry_and_storing_shrinks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LEANCONV_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "key", lambda each, arch, compiler=None: f"{0:064x}")
    first, second = entry(0, 10_000, age=100), entry(1, 10_000, age=50)
    cache.compiled(launch(0), "sm_80")  # found on disk: used now
    monkeypatch.setattr(cache, "_stores", iter(range(cache._SHRINK_EVERY, 10**6)))
    monkeypatch.setenv("LEANCONV_CACHE_LIMIT", "28kB")
    entry(2, 10_000, age=0)
    assert first.exists() and not second.exists()


def test_the_limit_of_the_store_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.cache_limit() == 2**30
    monkeypatch.setenv("LEANCONV_CACHE_LIMIT", "64MiB")
    assert env.cache_limit() == 64 * 2**20
    monkeypatch.setenv("LEANCONV_CACHE_LIMIT", "much")
    monkeypatch.setattr(errors, "_warned", set())
    with pytest.warns(RuntimeWarning, match="LEANCONV_CACHE_LIMIT='much' is no number of bytes.*; 1GiB is taken"):
        assert env.cache_limit() == 2**30
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert env.cache_limit() == 2**30
    assert env.mistakes() == [f"LEANCONV_CACHE_LIMIT='much' is no number of bytes; {_ONE_SUCH}"]


_ONE_SUCH = "write one such as 0, 1048576, 512KiB or 64MiB"


def test_a_limit_of_0_keeps_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first kernel was removed, and the next 63 were kept."""
    monkeypatch.setenv("LEANCONV_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("LEANCONV_CACHE_LIMIT", "0")
    for i in range(3):
        cache.store(f"{i:064x}", Compiled(bytes(1000), "f", "sm_80", 1, 0, 0))
    assert cache.size() == (0, 0) and "LEANCONV_CACHE_LIMIT=0 keeps no kernel" in doctor._store().text
    monkeypatch.setenv("LEANCONV_TUNING", "of")
    monkeypatch.setenv("LEANCONV_WORKSPACE_LIMIT", "-1")
    told = next(doctor.examine())
    assert told.state == "broken" and "LEANCONV_TUNING='of'" in told.text and "LEANCONV_WORKSPACE_LIMIT=" in told.text
