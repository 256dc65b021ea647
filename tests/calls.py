"""Work of the host that does not depend on the machine: how many functions a call calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def calls_of(function: Callable[[], Any]) -> list[str]:
    """The names of all functions of Python and of C that are called by ``function()``, in order, the first included."""
    names: list[str] = []

    def seen(frame: Any, event: str, given: Any) -> None:
        if event in ("call", "c_call"):
            names.append(given.__name__ if event == "c_call" else frame.f_code.co_name)

    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(None)
    return names[: len(names) - 1 - names[::-1].index("setprofile")]
