"""Every environment variable that leanconv reads, one line each. They are read at each use, not at import."""

from __future__ import annotations

import os
from pathlib import Path

#: name -> what it does; the README's table is this one
VARIABLES = {
    "LEANCONV_CACHE_DIR": "folder of the compiled kernels (default: $XDG_CACHE_HOME/leanconv or ~/.cache/leanconv)",
    "LEANCONV_NO_CACHE": "1: neither read nor write the folder of compiled kernels",
}


def cache_dir() -> Path:
    """The folder that LEANCONV_CACHE_DIR names, else the user's cache folder."""
    named = os.environ.get("LEANCONV_CACHE_DIR")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "leanconv"


def cache_disabled() -> bool:
    """Whether LEANCONV_NO_CACHE is set to anything but an empty string or 0."""
    return os.environ.get("LEANCONV_NO_CACHE", "0") not in ("", "0")
