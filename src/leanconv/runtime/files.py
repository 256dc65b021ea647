"""The only reader of files, which waits for none, and the only writer: a file appears whole, or not at all.

And a lock between processes, of several hosts where the file system has such locks: what one of them makes, the others
need not make too. One file holds all locks. Each lock is one byte of it, which the system frees when the process ends.
Where there are no such locks, a file for each stands for it.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

#: bytes of a file that are read at most; 25,000 tuned problems take as many
MOST = 1 << 28
#: Bytes of a name's stem, and of its suffix, that a temporary name has at most.
MOST_OF_NAME = 64


def open_regular(path: Path | str, trusted: bool = False) -> BinaryIO:
    """A regular file, opened to be read. Raises ValueError for what is none.

    Neither a FIFO, which would be waited for, nor a device, which may have no end, is opened. A ``trusted`` file has no
    link in its place and belongs to this user or to root; PermissionError for any other.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    # NOTE: what is checked is what is open, not what has the name
    number = os.open(path, flags | (getattr(os, "O_NOFOLLOW", 0) if trusted else 0))
    try:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is no regular file")
        if trusted and not is_ours(status):
            raise PermissionError(f"{path} belongs to user {status.st_uid}, neither this user nor root")
        return open(number, "rb")
    except BaseException:
        os.close(number)
        raise


def is_ours(status: os.stat_result) -> bool:
    """Whether a file belongs to this user or to root."""
    return not hasattr(os, "geteuid") or status.st_uid in (os.geteuid(), 0)


def read_bytes(path: Path | str, most: int = MOST, trusted: bool = False) -> bytes:
    """The content of a file that `open_regular` opens. Raises ValueError for more than ``most`` bytes, too."""
    with open_regular(path, trusted) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"{path} has {size} bytes, and {most} are read at most")
        return file.read(size)


def read_json(text: str | bytes) -> Any:
    """What JSON says; ValueError for what is none, or is nested too deep to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


@contextmanager
def whole(path: Path | str, follow: bool = True) -> Iterator[Path]:
    """A new empty file beside ``path`` to write to; it takes the place of ``path`` when the block ends without error.

    Where ``path`` is a symlink, the file that it points to is replaced. A replaced file keeps its mode; a new one gets
    the mode that the umask leaves. The name of the new file is ``.<stem>.<random><suffix>``: libraries read the format
    of a picture from the suffix. What is no regular file, such as ``/dev/stdout`` or a named pipe, cannot be replaced:
    the new file is a temporary one then, whose bytes are written there. Without ``follow`` whatever has the name, a
    symlink or a pipe too, makes way for the new file: for folders where others may plant them.

    If the block raises, the new file is removed and ``path`` stays as it was. An OSError about the new file names
    ``path``.

    >>> with whole("/dev/null") as file:
    ...     _ = file.write_text("nothing")
    """
    target, mode = Path(os.path.realpath(path) if follow else path), _mode(path, follow)
    if mode is not None and not stat.S_ISREG(mode):
        if follow:
            with _passed_on(Path(path)) as file:
                yield file
            return
        mode = None
    # the whole name may have 255 bytes: a long stem is cut, and a long suffix, which names no format, is left out
    stem = os.fsencode(target.stem)[:MOST_OF_NAME].decode(errors="ignore")
    suffix = target.suffix if len(os.fsencode(target.suffix)) <= MOST_OF_NAME else ""
    beside = target.with_name(f".{stem}.{os.urandom(4).hex()}{suffix}")
    try:
        # NOTE: os.open applies the umask, which Python cannot read without changing it for all threads. Until the new
        # file has the mode of the old one, nobody else may read it.
        made = True
        try:
            try:
                os.close(os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666 if mode is None else 0o600))
            except OSError:
                made = False
                raise
            yield beside
            if mode is not None:
                os.chmod(beside, stat.S_IMODE(mode))
            os.replace(beside, target)
        except BaseException:
            # a Ctrl-C may come as soon as the file is there
            if made:
                beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(beside), beside):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _mode(path: Path | str, follow: bool = True) -> int | None:
    """The mode of what is there; None where nothing is, or opening a file beside it says what is wrong."""
    try:
        # NOTE: of the path as it was given: /dev/stdout is real, what realpath makes of it where it is a pipe is not
        return os.stat(path, follow_symlinks=follow).st_mode
    except OSError:
        return None


def folder_of_new(path: Path | str) -> Path:
    """The folder in which `whole` makes its new file."""
    mode = _mode(path)
    if mode is None or stat.S_ISREG(mode):
        return Path(os.path.realpath(path)).parent
    return Path(tempfile.gettempdir())


@contextmanager
def _passed_on(path: Path) -> Iterator[Path]:
    """A new file whose bytes ``path`` gets when the block ends without error: libraries seek in what they write."""
    _refuse_folder(path)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"file{path.suffix}")
        try:
            file.touch()
            yield file
            with open(file, "rb") as source, open(path, "wb") as target:
                shutil.copyfileobj(source, target)
        except OSError as error:
            if error.errno is not None and error.filename in (None, str(file), file):
                raise OSError(error.errno, error.strerror, str(path)) from error
            raise


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))


def check_writable(path: Path | str) -> None:
    """Raise OSError where `write_text` would, to be asked before hours of work. Nothing is left there."""
    path = Path(path)
    _refuse_folder(path)
    if path.exists() and not path.is_file():  # opening a pipe would wait for its reader
        return
    folder = Path(os.path.realpath(path)).parent
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_text(path: Path | str, text: str) -> None:
    """Write a text file in UTF-8, and the folders that it lies in."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as file:
        file.write_text(text, encoding="utf-8")


#: Seconds after which a process that keeps a lock is not waited for any longer. It lives, or the system would have
#: freed the lock; on few cores that many processes share it may compile for a minute.
PATIENCE = 120.0
#: The same where a file stands for the lock, which stays when its process dies.
_PATIENCE_WITH_FILES = 30.0
#: Seconds between two looks at a lock, at first and at most. At most: hundreds of processes may ask one file server.
_FIRST_POLL, _LAST_POLL = 0.01, 0.25
#: NOTE: closing any descriptor of the file would free all locks that the process has on it, so it stays open
_files: dict[tuple[Path, int], int] = {}


@contextmanager
def process_lock(path: Path, place: int, there: Callable[[], bool] = lambda: False) -> Iterator[bool]:
    """Wait until no other process holds this lock, or what it makes is ``there``; says whether one did hold it, so that
    its work may be done.

    ``path`` is the file, made if it is missing, ``place`` the lock's number, below 2⁶². Threads of one process do not
    exclude each other. Where nothing can be written, or no lock be had within `PATIENCE`, nothing is waited for.
    """
    waited, free, take, patience = False, None, _lock_byte, PATIENCE
    begun, poll = time.monotonic(), _FIRST_POLL
    while free is None:
        try:
            free = take(path, place)
        except (BlockingIOError, FileExistsError):
            waited = True
            if there():
                break
            if time.monotonic() - begun > patience:
                with suppress(OSError):  # of a process that died, or sleeps
                    _stand_in(path, place).unlink()
                break
            time.sleep(poll * random.uniform(0.5, 1))
            poll = min(1.5 * poll, _LAST_POLL)
        except OSError as error:
            if take is _make_file or error.errno not in _NO_LOCKS:
                break
            take, patience = _make_file, min(PATIENCE, _PATIENCE_WITH_FILES)
    try:
        yield waited
    finally:
        if free is not None:
            with suppress(OSError):
                free()


def _lock_byte(path: Path, place: int) -> Callable[[], object]:
    """Take a lock of the system; gives what frees it. Raises BlockingIOError where another process has it."""
    file = _open(path)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except PermissionError as error:  # as some systems say it
        raise BlockingIOError from error
    return partial(fcntl.lockf, file, fcntl.LOCK_UN, 1, place)


#: errors of file systems that have no locks
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def _stand_in(path: Path, place: int) -> Path:
    return path.with_name(f"{path.name}.{place:x}")


def _make_file(path: Path, place: int) -> Callable[[], object]:
    """The same by a file that one process alone can make. Raises FileExistsError where another one has."""
    file = _stand_in(path, place)
    os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    return file.unlink


def _open(path: Path) -> int:
    """A descriptor of the file in this process. Raises OSError where it cannot be had."""
    key = (path, os.getpid())
    if key not in _files:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:  # which stands for a lock that another process has
            raise NotADirectoryError(str(error)) from error
        if fcntl is None:
            raise OSError(errno.ENOSYS, "Windows has no such locks")
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
        _files.setdefault(key, os.open(path, flags, 0o600))
    return _files[key]
