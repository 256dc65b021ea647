"""Work on several cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def side_by_side(work: Sequence[Callable[[], object]], done: Callable[[], object] = lambda: None) -> None:
    """Do each piece of work, as many at a time as there are cores; ``done`` is called after each, in this thread.

    The first error ends it: pieces that have not begun are dropped, and the error is raised.
    """
    with ThreadPoolExecutor(max(1, min(len(work), cores()))) as pool:
        futures = [pool.submit(each) for each in work]
        try:
            for future in as_completed(futures):
                future.result()
                done()
        finally:
            for future in futures:
                future.cancel()
