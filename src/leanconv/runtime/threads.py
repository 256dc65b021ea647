"""Work on several cores."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path


def cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: its affinity and, in a container, the quota of its control group."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError, ZeroDivisionError):  # no control group, or one that does not tell
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if quota != "max" and float(quota) > 0:
            usable = min(usable, math.ceil(float(quota) / float(period)))
    return max(1, usable)


def side_by_side(work: Sequence[Callable[[], object]], done: Callable[[], object] = lambda: None) -> None:
    """Do each piece of work, as many at a time as there are cores; ``done`` is called after each, in this thread.

    The first error ends it: pieces that have not begun are dropped, and the error is raised.
    """
    from concurrent.futures import ThreadPoolExecutor, as_completed  # logging, and more

    with ThreadPoolExecutor(max(1, min(len(work), cores()))) as pool:
        futures = [pool.submit(each) for each in work]
        try:
            for future in as_completed(futures):
                future.result()
                done()
        finally:
            for future in futures:
                future.cancel()
