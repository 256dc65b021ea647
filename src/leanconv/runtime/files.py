"""The only writer of files: a file appears whole at its place, or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path | str, follow: bool = True) -> Iterator[Path]:
    """A new empty file beside ``path`` to write to; it takes the place of ``path`` when the block ends without error.

    Where ``path`` is a symlink, the file that it points to is replaced. A replaced file keeps its mode; a new one gets
    the mode that the umask leaves. The name of the new file is ``.<stem>.<random><suffix>``: libraries read the format
    of a picture from the suffix. What is no regular file, such as ``/dev/stdout``, cannot be replaced and is written to
    directly. Without ``follow`` whatever has the name, a symlink or a pipe too, makes way for the new file: for folders
    where others may plant them.

    If the block raises, the new file is removed and ``path`` stays as it was. An OSError about the new file names
    ``path``.

    >>> with whole("/dev/null") as file:
    ...     _ = file.write_text("nothing")
    """
    target = Path(os.path.realpath(path) if follow else path)
    try:
        # NOTE: of the path as it was given: /dev/stdout is real, what realpath makes of it where it is a pipe is not
        mode: int | None = os.stat(path, follow_symlinks=follow).st_mode
    except OSError:
        mode = None  # there is no such file, or opening one beside it says what is wrong
    if mode is not None and not stat.S_ISREG(mode):
        if follow:
            yield Path(path)
            return
        mode = None
    # A long stem is cut: the whole name may have 255 bytes.
    beside = target.with_name(f".{target.stem[:64]}.{os.urandom(4).hex()}{target.suffix}")
    try:
        # NOTE: os.open applies the umask, which Python cannot read without changing it for all threads. Until the new
        # file has the mode of the old one, nobody else may read it.
        os.close(os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666 if mode is None else 0o600))
        try:
            yield beside
            if mode is not None:
                os.chmod(beside, stat.S_IMODE(mode))
            os.replace(beside, target)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(beside), beside):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_text(path: Path | str, text: str) -> None:
    """Write a text file in UTF-8, and the folders that it lies in."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as file:
        file.write_text(text, encoding="utf-8")
