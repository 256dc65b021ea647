"""Boxes, and filters given as products of a column and a row: small images, all states of steps, bands and strips."""

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
    add("shape-250x250", 1, 40, 131, 250, 250, border="reflect")
    add("shape-500x400", 1, 33, 70, 500, 400, border="reflect101")
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


def _box_cases() -> list[Case]:
    found = []

    def add(name: str, *shape: int, thorough: bool = False, reduction: str = "sum", **rest: Any) -> None:
        found.append(Case(f"box-{name}", filter_problem(*shape, reduction=reduction, **rest), thorough))

    for i, border in enumerate(BORDERS):
        add(f"border-{border}", 2, 71, 405, 5, 7, border=border, thorough=border == "reflect101")
        add(f"border-{border}-min", 1, 37, 261, 20, 31, border=border, reduction=("min", "max")[i % 2])
        add(f"border-{border}-over-image", 1, 5, 3, 17, 14, border=border)
        add(f"border-{border}-one-pixel", 2, 1, 1, 5, 4, border=border, reduction="max")
    # Windows that are gone through, and those of whole groups: all binary digits, ends and beginnings; several chunks.
    shapes = [
        (1, 1),
        (1, 2),
        (2, 1),
        (3, 12),
        (4, 13),
        (15, 14),
        (16, 15),
        (17, 16),
        (9, 23),
        (33, 33),
        (31, 64),
        (63, 63),
    ]
    for kh, kw in shapes:
        add(f"shape-{kh}x{kw}", 1, 75, 265, kh, kw, border="constant", thorough=(kh, kw) == (31, 64))
    for anchor in range(4):
        add(f"lead-{anchor}", 1, 33, 150, 3, 29 + anchor, anchor=(2, anchor), border="wrap")
    add("shape-200x300", 1, 90, 140, 200, 300, border="reflect")
    # Whole strips on vector edges; and as many groups along a row that eight are added up.
    add("shape-65x70", 2, 300, 264, 65, 70, border="wrap")
    add("shape-40x290-min", 1, 50, 160, 40, 290, border="constant", reduction="min")
    add("shape-17x18", 1, 100, 264, 17, 18, border="constant", reduction="max", dtype="int16")
    add("shape-70x150-max", 1, 150, 140, 70, 150, border="reflect", reduction="max", thorough=True)
    for h, w in ((1, 517), (263, 1), (32, 128), (33, 129), (64, 260)):
        add(f"size-{h}x{w}", 1, h, w, 5, 3)
    add("int32", 1, 39, 300, 7, 5, dtype="int32", border="wrap")
    add("empty-batch", 0, 9, 9, 3, 3)
    add("pitch-aligned", 2, 33, 390, 5, 5, gap=10, y_gap=2, rows_between=1)
    add("pitch-odd", 2, 33, 390, 5, 15, gap=3, y_gap=1, rows_between=2, border="reflect")
    for dtype, result in (("uint8", None), ("int16", "float32"), ("float16", None), ("float64", None)):
        add(f"type-{dtype}", 2, 43, 403, 7, 16, border="reflect", dtype=dtype, out_dtype=result, gap=1, y_gap=1)
        reduction = "min" if dtype == "uint8" else "max"
        add(f"type-{dtype}-{reduction}", 1, 43, 264, 7, 6, border="reflect", dtype=dtype, reduction=reduction)
    add("channels-3", 2, 39, 120, 9, 17, dtype="uint8", channels=3)
    add("valid", 2, 43, 270, 4, 15, valid=True, y_gap=2)
    add("bands", 1, 1100, 3, 3, 3, border="wrap")
    return found


def _median_cases() -> list[Case]:
    found = []

    def add(
        name: str, height: int, width: int, size: int, *, batch: int = 1, thorough: bool = False, **rest: Any
    ) -> None:
        problem = filter_problem(batch, height, width, size, size, reduction="median", **rest)
        found.append(Case(f"median-{name}", problem, thorough))

    for i, border in enumerate(BORDERS):
        add(f"border-{border}", 21, 405, (3, 5, 7)[i % 3], batch=2, border=border, thorough=border == "reflect101")
        add(f"border-{border}-over-image", 3, 2, 7, border=border)
    for size in (3, 5, 7):
        add(f"size-{size}", 35, 264, size, dtype="uint8", border="replicate")
    add("float64", 19, 140, 5, dtype="float64", gap=1, y_gap=1, border="constant")
    add("float16-channels-3", 19, 90, 3, dtype="float16", channels=3)
    add("valid", 23, 150, 5, valid=True, dtype="int16")
    return found


SEPARABLE_CASES = (*_separable_cases(), *_box_cases(), *_median_cases())
