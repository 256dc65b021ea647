"""Filters that are given as products of a column and a row: small images, all states of steps, bands and strips."""

from __future__ import annotations

from typing import Any

from leanconv.images.borders import BORDERS
from tests.cases import Case, filter_problem


def _separable_cases() -> list[Case]:
    found = []

    def add(name: str, *shape: int, thorough: bool = False, rank: int = 1, **rest: Any) -> None:
        found.append(Case(f"separable-{name}", filter_problem(*shape, rank=rank, **rest), thorough))

    # Two strips and a few steps: windows wholly inside, and tails.
    for border in BORDERS:
        add(f"border-{border}", 2, 71, 405, 5, 7, border=border, thorough=border == "reflect101")
        add(f"border-{border}-over-image", 1, 5, 3, 17, 14, border=border)
        add(f"border-{border}-one-pixel", 2, 1, 1, 5, 4, border=border)
    # Filters that are unrolled, and looped over: a ring of weights at a time, with all rests.
    for kh, kw in ((1, 1), (1, 2), (2, 1), (3, 3), (4, 9), (15, 15), (1, 33), (33, 1), (31, 38), (47, 45), (63, 64)):
        add(f"shape-{kh}x{kw}", 1, 75, 265, kh, kw, border="constant", thorough=(kh, kw) == (47, 45))
    add("shape-127x127", 1, 150, 131, 127, 127, border="wrap")
    for h, w in ((1, 517), (263, 1), (32, 128), (33, 129), (64, 260)):
        add(f"size-{h}x{w}", 1, h, w, 5, 3)
    add("rank-2", 1, 71, 260, 9, 9, rank=2, border="replicate", thorough=True)
    add("rank-3", 1, 40, 133, 20, 11, rank=3, border="reflect")
    add("int32", 1, 39, 300, 7, 5, dtype="int32", border="wrap", rank=2)
    add("empty-batch", 0, 9, 9, 3, 3)
    add("pitch-aligned", 2, 33, 390, 5, 5, gap=10, y_gap=2, rows_between=1)
    add("pitch-odd", 2, 33, 390, 5, 5, gap=3, y_gap=1, rows_between=2, border="reflect")
    for anchor in ((0, 0), (0, 6), (4, 0), (4, 6), (1, 5)):
        add(f"anchor-{anchor[0]}-{anchor[1]}", 1, 42, 280, 5, 7, anchor=anchor)
    for dtype, result in (
        ("uint8", None),
        ("uint8", "float32"),
        ("int16", None),
        ("float16", None),
        ("bfloat16", None),
        ("float32", "uint8"),
        ("float64", None),
        ("int32", "float64"),
        ("uint8", "int16"),
    ):
        name = f"type-{dtype}" + f"-{result}" * bool(result)
        add(
            name,
            2,
            43,
            403,
            7,
            6,
            border="reflect",
            dtype=dtype,
            out_dtype=result,
            gap=1,
            y_gap=1,
            thorough=dtype == "float64",
        )
        add(f"{name}-vectors", 1, 39, 264, 5, 9, border="constant", dtype=dtype, out_dtype=result)
    for channels in (2, 3, 4, 5):
        for border in ("reflect101", "constant"):
            dtype = "uint8" if border == "reflect101" else "float32"
            add(f"channels-{channels}-{border}", 2, 39, 120, 9, 7, border=border, dtype=dtype, channels=channels)
    add("channels-3-63x63", 1, 70, 130, 63, 63, channels=3, dtype="uint8", border="wrap", thorough=True)
    add("channels-3-wide", 1, 70, 80, 5, 64, channels=3, dtype="uint8", anchor=(4, 0), border="replicate")
    add("channels-3-rank-2", 1, 34, 48, 9, 8, channels=3, dtype="float16", border="replicate", rank=2, anchor=(0, 7))
    add("valid", 2, 43, 270, 4, 5, valid=True, y_gap=2)
    add("valid-channels", 1, 80, 100, 9, 13, valid=True, dtype="uint8", channels=3)
    # More rows than a block marches down: bands.
    add("bands", 1, 1100, 3, 3, 3, border="wrap")
    return found


SEPARABLE_CASES = tuple(_separable_cases())
