"""A lock between the processes of one host: what one of them makes, the others need not make too.

One file holds all locks. Each lock is one byte of it, which the system frees when the process ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

#: seconds after which a process that keeps a lock is not waited for any longer; a kernel compiles in 0.5
PATIENCE = 30.0
_POLL = 0.01
#: NOTE: closing any descriptor of the file would free all locks that the process has on it, so it stays open
_files: dict[tuple[Path, int], int] = {}


@contextmanager
def process_lock(path: Path, place: int) -> Iterator[bool]:
    """Wait until no other process holds this lock; says whether one did, so that its work may be done.

    ``path`` is the file, made if it is missing, ``place`` the lock's number, below 2⁶². Threads of one process do not
    exclude each other. Where there are no locks (on some file systems), or none within `PATIENCE`, nothing is waited
    for.
    """
    waited = held = False
    file = _open(path)
    until = time.monotonic() + PATIENCE
    while file is not None and not held:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            held = True
        except (BlockingIOError, PermissionError):
            waited = True
            if time.monotonic() > until:
                break
            time.sleep(_POLL)
        except OSError:
            break
    try:
        yield waited
    finally:
        if file is not None and held:
            with suppress(OSError):
                fcntl.lockf(file, fcntl.LOCK_UN, 1, place)


def _open(path: Path) -> int | None:
    """A descriptor of the file in this process; None where it cannot be had."""
    key = (path, os.getpid())
    if key not in _files and fcntl is not None:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            _files.setdefault(key, os.open(path, flags, 0o600))
    return _files.get(key)
