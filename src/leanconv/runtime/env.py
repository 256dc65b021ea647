"""Every environment variable that leanconv reads, at each use, not at import; docs/command-line.md has their table."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from leanconv.runtime.errors import warn_once
from leanconv.runtime.threads import cores

T = TypeVar("T")
#: What `leanconv.tune` and `leanconv.record_tuning` may be told, and LEANCONV_TUNING.
CALL_MODES = ("on", "read-only", "frozen")
TUNING_MODES = (*CALL_MODES, "off")

_UNITS = {
    "": 1, "b": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4,
    "kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4,
}  # fmt: skip


def cache_dir() -> Path | None:
    """The folder that LEANCONV_CACHE_DIR names, else the user's cache folder.

    None, with a warning at the first time, where the user has no home: neither HOME nor an entry in the list of users.
    """
    # NOTE: platformdirs gives a folder called "~" below the current one there
    try:
        return _folder("LEANCONV_CACHE_DIR", "XDG_CACHE_HOME", ".cache")
    except RuntimeError as error:
        folder = os.environ.get("LEANCONV_CACHE_DIR") or "~/.cache"
        warn_once(
            folder,
            f"compiled kernels cannot be kept: {folder} is in a home folder, and this user has none ({error}); every "
            "process compiles them again. Set LEANCONV_CACHE_DIR to a writable folder.",
        )
        return None


def _folder(own: str, base: str, usual: str) -> Path:
    """The folder that the variable ``own`` names, else leanconv's in the one that ``base`` names or the usual one."""
    if named := os.environ.get(own):
        return Path(named).expanduser()
    root = os.environ.get(base)
    return (Path(root) if root else Path.home() / usual) / "leanconv"


def bundles() -> list[Path]:
    """The files that LEANCONV_BUNDLE names, between colons as in PATH (semicolons on Windows).

    One in a home folder that cannot be found is left as it is written, ``~`` first.
    """
    return [_expanded(Path(each)) for each in os.environ.get("LEANCONV_BUNDLE", "").split(os.pathsep) if each]


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def cache_disabled() -> bool:
    """Whether LEANCONV_NO_CACHE is set to anything but an empty string or 0."""
    return os.environ.get("LEANCONV_NO_CACHE", "0") not in ("", "0")


def cache_limit() -> int:
    """Bytes that the folder of compiled kernels may take; what LEANCONV_CACHE_LIMIT says, if it is such a number."""
    return _or_usual("LEANCONV_CACHE_LIMIT", partial(parse_bytes, "LEANCONV_CACHE_LIMIT"), "1GiB")


def _or_usual(name: str, parse: Callable[[str], T], usual: str) -> T:
    """What a variable says; the usual, with a warning at the first time, where it says nothing that is known."""
    try:
        return parse(os.environ.get(name) or usual)
    except ValueError as error:
        warn_once(name, f"{error}; {usual} is taken")
        return parse(usual)


def mistakes() -> list[str]:
    found = []
    checks: dict[str, Callable[[str], object]] = {
        "LEANCONV_CACHE_LIMIT": partial(parse_bytes, "LEANCONV_CACHE_LIMIT"),
        "LEANCONV_THREADS": _positive,
        "LEANCONV_TUNING": _known_mode,
        "LEANCONV_WORKSPACE_LIMIT": partial(parse_bytes, "LEANCONV_WORKSPACE_LIMIT"),
    }
    for name, check in checks.items():
        try:
            if text := os.environ.get(name):
                check(text)
        except ValueError as error:
            found.append(str(error))
    return found


def parse_bytes(name: str, text: str) -> int:
    """Bytes in words: a whole number and, if wanted, a unit (kB, MB, GB, TB; KiB, MiB, GiB, TiB) in any case.

    Raises ValueError that calls the text ``name``.
    """
    match = re.fullmatch(r"\s*([0-9]+)\s*([a-z]*)\s*", text.lower(), re.ASCII)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{name}={text!r} is no number of bytes; write one such as 0, 1048576, 512KiB or 64MiB")
    return _number(name, match[1]) * _UNITS[match[2]]


def _number(name: str, digits: str) -> int:
    try:
        return int(digits)
    except ValueError:
        raise ValueError(f"{name} has {len(digits)} digits, which are too many") from None


def workspace_limit() -> int | None:
    """Bytes that LEANCONV_WORKSPACE_LIMIT allows; None where it is absent or empty. ValueError for no bytes."""
    text = os.environ.get("LEANCONV_WORKSPACE_LIMIT")
    return parse_bytes("LEANCONV_WORKSPACE_LIMIT", text) if text else None


def _positive(text: str) -> int:
    match = re.fullmatch(r"\s*([0-9]+)\s*", text, re.ASCII)
    number = 0 if match is None else _number("LEANCONV_THREADS", match[1])
    if number == 0:
        raise ValueError(f"LEANCONV_THREADS={text!r} is no number of threads; write 1 or more")
    return number


def threads() -> int:
    """Threads that a call on the CPU may take: what LEANCONV_THREADS says, else the cores that the process may use."""
    return _or_usual("LEANCONV_THREADS", _positive, str(cores())) if "LEANCONV_THREADS" in os.environ else cores()


def _known_mode(mode: str) -> str:
    if mode not in TUNING_MODES:
        raise ValueError(f"LEANCONV_TUNING={mode!r} is not known; choose one of {', '.join(TUNING_MODES)}")
    return mode


def tuning_mode() -> str:
    """What LEANCONV_TUNING says, if it is one of TUNING_MODES."""
    return _or_usual("LEANCONV_TUNING", _known_mode, "on")


def tuning_dir() -> Path | None:
    """The folder that LEANCONV_TUNING_DIR names, else the user's data folder; None for a user who has no home."""
    # NOTE: the first choice of a process needs it, and importing platformdirs takes longer than choosing
    try:
        return _folder("LEANCONV_TUNING_DIR", "XDG_DATA_HOME", ".local/share")
    except RuntimeError:
        return None


def _raw_reader(name: str) -> Callable[[], Any]:
    try:
        stored: Any = os.environ._data  # type: ignore[attr-defined]
        return partial(stored.get, os.environ.encodekey(name))
    except AttributeError:
        return partial(os.environ.get, name)


#: LEANCONV_WORKSPACE_LIMIT as it is stored in os.environ. Each warm call reads it, and os.environ.get takes longer
raw_workspace_limit = _raw_reader("LEANCONV_WORKSPACE_LIMIT")
