"""The number of threads that BLAS takes: one during the calls of the CPU engine, what it was before afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from leanconv import conv2d, filter2d, ndimage
from leanconv.cpu import blas, direct, im2col, planes
from leanconv.cpu.blas import ONE_THREAD, OneThread, numpys_libraries, one_thread
from leanconv.runtime.threads import cores

X, W = np.ones((1, 8, 28, 28), np.float32), np.ones((8, 8, 3, 3), np.float32)
IMAGE, KERNEL = np.ones((120, 80), np.float32), np.ones((5, 5), np.float32)


@pytest.fixture
def threads() -> Iterator[Any]:
    """NumPy's BLAS, which takes three threads."""
    found = numpys_libraries()
    if not found:
        pytest.skip("NumPy's BLAS has no number of threads")
    before = [library.num_threads for library in found]
    for library in found:
        library.set_num_threads(3)
    yield found[0]
    for library, number in zip(found, before, strict=True):
        library.set_num_threads(number)


def seen_by(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, threads: Any, fail: bool = False) -> list[int]:
    """The number of threads at each call of a function of ``module``, which raises after that with ``fail``."""
    numbers: list[int] = []
    function = getattr(module, name)

    def recording(*arguments: Any, **options: Any) -> Any:
        numbers.append(threads.num_threads)
        if fail:
            raise MemoryError("made to fail")
        return function(*arguments, **options)

    monkeypatch.setattr(module, name, recording)
    return numbers


CALLS = [
    (im2col, "matmul", lambda: conv2d(X, W, algorithm="im2col")),
    (im2col, "matmul", lambda: conv2d(X.astype(np.float16), W.astype(np.float16), algorithm="im2col")),
    (im2col, "matmul", lambda: conv2d(np.ones((8, 20, 20, 3), np.float32), W, algorithm="im2col", layout="CHWN")),
    # other layouts are computed by machine code on x86
    (direct, "matmul", lambda: conv2d(np.ones((8, 20, 20, 3), np.float32), W, algorithm="direct", layout="CHWN")),
    (planes, "store", lambda: filter2d(np.stack([IMAGE] * 5, -1), KERNEL, channels_last=True)),
    (planes, "store", lambda: ndimage.correlate(IMAGE, KERNEL)),
]


@pytest.mark.parametrize("module, name, call", CALLS)
def test_one_thread_during_a_call(
    module: Any, name: str, call: Any, threads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = seen_by(monkeypatch, module, name, threads)
    call()
    assert set(numbers) == {1} and threads.num_threads == 3


@pytest.mark.parametrize("module, name, call", CALLS[-2:] + CALLS[:1])
def test_the_number_is_restored_where_a_call_raises(
    module: Any, name: str, call: Any, threads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = seen_by(monkeypatch, module, name, threads, fail=True)
    with pytest.raises(MemoryError, match="made to fail"):
        call()
    assert numbers == [1] and threads.num_threads == 3


def test_calls_side_by_side_restore_what_was_before_the_first(threads: Any) -> None:
    first, second = threading.Event(), threading.Event()

    def hold() -> None:
        with ONE_THREAD:
            first.set()
            assert second.wait(10)

    other = threading.Thread(target=hold)
    other.start()
    assert first.wait(10)
    with ONE_THREAD:
        second.set()
        other.join()
        assert threads.num_threads == 1, "the other call has left, this one has not"
    assert threads.num_threads == 3


def test_many_calls_from_many_threads(threads: Any) -> None:
    wrong: list[int] = []

    def run() -> None:
        for _ in range(300):
            with ONE_THREAD:
                if threads.num_threads != 1:
                    wrong.append(threads.num_threads)

    every = [threading.Thread(target=run) for _ in range(4)]
    for each in every:
        each.start()
    for each in every:
        each.join()
    assert not wrong and threads.num_threads == 3


def test_a_number_set_meanwhile_stays(threads: Any) -> None:
    with ONE_THREAD:
        assert threads.num_threads == 1
        threads.set_num_threads(2)
    assert threads.num_threads == 2


def test_large_products_take_the_cores_that_may_be_used(threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = seen_by(monkeypatch, np, "matmul", threads)
    small, large = np.ones((4, 8), np.float32), np.ones((4, 64, 8), np.float32)
    monkeypatch.setattr(blas, "LEAST_WORK", 2 * 64 * 8 * 8)
    monkeypatch.setattr(blas, "cores", lambda: 2)
    limit = OneThread()
    result = limit.matmul(large, np.ones((8, 8), np.float32))
    assert (result == 8).all() and numbers == [3], "outside a call nothing is changed"
    with limit:
        limit.matmul(small, np.ones((8, 8), np.float32))
        limit.matmul(large, np.ones((8, 8), np.float32))
        assert threads.num_threads == 1
        with limit:
            limit.matmul(large, np.ones((8, 8), np.float32))
        with pytest.raises(ValueError, match="mismatch"):
            limit.matmul(large, np.ones((9, 8), np.float32))
        assert threads.num_threads == 1
    assert numbers[1:] == [1, 2, 1, 2] and threads.num_threads == 3
    threads.set_num_threads(1)
    with limit:
        limit.matmul(large, np.ones((8, 8), np.float32))
    assert numbers[-1] == 1, "never more than before"


class OnOpenMP:
    """As OpenBLAS on OpenMP is: each thread has a number of its own."""

    internal_api, threading_layer = "openblas", "openmp"

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def num_threads(self) -> int:
        return getattr(self._local, "number", 3)

    def set_num_threads(self, number: int) -> None:
        self._local.number = number


def test_a_library_with_a_number_for_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    library = OnOpenMP()
    found = SimpleNamespace(select=lambda user_api: SimpleNamespace(lib_controllers=[library]))
    monkeypatch.setattr(blas, "ThreadpoolController", lambda: found)
    limit, entered, leave, seen = OneThread(), threading.Event(), threading.Event(), []

    def run() -> None:
        with limit:
            seen.append(library.num_threads)
            entered.set()
            assert leave.wait(10)
        seen.append(library.num_threads)

    other = threading.Thread(target=run)
    with limit:
        other.start()
        assert entered.wait(10) and library.num_threads == 1
    assert library.num_threads == 3
    leave.set()
    other.join()
    assert seen == [1, 3]


def test_a_fork_during_a_call_of_another_thread(threads: Any) -> None:
    limit, entered, leave = OneThread(), threading.Event(), threading.Event()

    def hold() -> None:
        with limit:
            entered.set()
            assert leave.wait(10)

    other = threading.Thread(target=hold, daemon=True)
    other.start()
    assert entered.wait(10) and threads.num_threads == 1
    with limit._lock:  # another thread may hold it while this one forks
        limit.after_fork()
    assert threads.num_threads == 3
    with limit:
        assert threads.num_threads == 1
    assert threads.num_threads == 3
    limit._shared.inside = 1  # here the other thread goes on
    leave.set()
    other.join()


def test_tiny_calls_are_spared_the_change() -> None:
    assert one_thread(1000) is not ONE_THREAD and one_thread(10**5) is ONE_THREAD
    assert one_thread(10**5, matrices=True) is not ONE_THREAD and one_thread(10**6, matrices=True) is ONE_THREAD


def test_cores_that_may_be_used(tmp_path: Path) -> None:
    every = cores(tmp_path)
    assert every >= 1
    for name, quota, expected in (
        ("max", "max 100000", every), ("half", "50000 100000", 1), ("more", "150000 100000", min(2, every)),
        ("none", "", every),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpu.max").write_text(quota + "\n")
        assert cores(tmp_path / name) == expected
    for quota, expected in ("-1", every), ("100000", 1):
        (tmp_path / quota / "cpu").mkdir(parents=True)
        (tmp_path / quota / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
        (tmp_path / quota / "cpu" / "cpu.cfs_quota_us").write_text(quota + "\n")
        assert cores(tmp_path / quota) == expected
