"""What tests expect of an error's text."""

from __future__ import annotations

import re
from typing import Any

import pytest


def says(kind: type[Exception], *parts: str) -> Any:
    """pytest.raises, with every part in the message, in order."""
    return pytest.raises(kind, match="(?s)" + ".*".join(map(re.escape, parts)))


def line_of(error: str) -> str:
    """The one line that a mistake is told in."""
    assert error.startswith("error: ") and error.count("\n") == 1 and "Traceback" not in error, error
    return error.strip()
