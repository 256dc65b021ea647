"""Work on several cores."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: its affinity and, in a container, the quota of its control group."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, _quota(cgroup)))


@cache
def _quota(cgroup: Path) -> int:
    """Cores that a control group grants. It is read once: that takes as long as a small call."""
    with suppress(OSError, ValueError, ZeroDivisionError):  # no control group, or one that does not tell
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if quota != "max" and float(quota) > 0:
            return math.ceil(float(quota) / float(period))
    return sys.maxsize


def side_by_side(
    work: Sequence[Callable[[], object]], done: Callable[[], object] = lambda: None, threads: int | None = None
) -> None:
    """Do each piece of work, so many at a time, by default as there are cores; ``done`` is called after each, in this
    thread.

    The first error ends it: pieces that have not begun are dropped, and the error is raised.
    """
    from concurrent.futures import ThreadPoolExecutor, as_completed  # logging, and more

    with ThreadPoolExecutor(max(1, min(len(work), cores() if threads is None else threads))) as pool:
        futures = [pool.submit(each) for each in work]
        try:
            for future in as_completed(futures):
                future.result()
                done()
        finally:
            for future in futures:
                future.cancel()


class _Pool:
    """Threads that stay for the next call. A call made in one of them runs there alone."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), threading.local()
        self._executor: Any = None
        self._size = 0

    def run(self, work: Callable[[T], object], items: Sequence[T], count: int) -> None:
        if count <= 1 or len(items) <= 1 or getattr(self._inside, "yes", False):
            for item in items:
                work(item)
            return
        # each thread takes the next item when it is done with one; the caller's is one of them
        rest, wrong = iter(items), threading.Event()
        lock = threading.Lock()

        def take() -> None:
            self._inside.yes = True
            try:
                while not wrong.is_set():
                    with lock:
                        item = next(rest, rest)
                    if item is rest:
                        return
                    work(item)  # type: ignore[arg-type]
            except BaseException:
                wrong.set()
                raise
            finally:
                self._inside.yes = False

        futures = [self._threads(count - 1).submit(take) for _ in range(min(count, len(items)) - 1)]
        try:
            take()
        finally:
            for future in futures:
                future.cancel()
            done = [future for future in futures if not future.cancelled()]
            errors = [error for error in (future.exception() for future in done) if error is not None]
        if errors:
            raise errors[0]

    def _threads(self, count: int) -> Any:
        from concurrent.futures import ThreadPoolExecutor  # logging, and more

        with self._lock:
            if self._size < count:
                self._executor, self._size = ThreadPoolExecutor(count, "leanconv"), count
            return self._executor

    def after_fork(self) -> None:
        """In the new process, which has none of the threads."""
        self.__init__()  # type: ignore[misc]


_POOL = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_POOL.after_fork)


def over_blocks(work: Callable[[T], object], blocks: Sequence[T], threads: int) -> None:
    """``work`` of every block, by so many threads, the caller's among them; in order where that is one.

    The first error ends it: blocks that have not begun are dropped, and the error is raised. NumPy and BLAS release the
    interpreter's lock, so blocks of some 100 microseconds or more gain by it.
    """
    _POOL.run(work, blocks, threads)
