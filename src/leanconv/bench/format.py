"""Figures as people read them, and the table that every page and terminal prints."""

from __future__ import annotations

import math

#: The heads of the columns, then the lines.
Table = tuple[list[str], list[list[str]]]


def quantity(value: float | None) -> str:
    """A figure with three significant digits and no exponent; a dash for None.

    >>> quantity(1234.5), quantity(0.04177), quantity(None)
    ('1234', '0.0418', '–')
    """
    if value is None:
        return "–"
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{min(9, max(0, 2 - magnitude))}f}"


def significant(value: float, digits: int = 5) -> float:
    """A figure as results files have it: rounded to so many significant digits, which no repetition holds.

    >>> significant(1341.928), significant(1.1161867e-06)
    (1341.9, 1.1162e-06)
    """
    return float(f"{value:.{digits}g}")


def size(count: int | None) -> str:
    """Bytes in the largest unit that fits; a dash for None.

    >>> size(153_000_000)
    '153 MB'
    """
    if count is None:
        return "–"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{quantity(count / scale)} {unit}"
    return f"{count}"


def duration(us: float) -> str:
    """Microseconds in the largest unit that fits.

    >>> duration(45678)
    '45.7 ms'
    """
    for unit, scale in (("s", 1e6), ("ms", 1e3)):
        if us >= scale:
            return f"{quantity(us / scale)} {unit}"
    return f"{quantity(us)} µs"
