"""Image filters as tensor cores compute them: images wide enough for strips that lie wholly inside, in every type."""

from __future__ import annotations

from typing import Any

from leanconv.images.borders import BORDERS
from tests.cases import Case, filter_problem

TYPES = ("uint8", "int8", "uint16", "int16", "float16", "bfloat16", "float32")


def _cases() -> list[Case]:
    found = []

    def add(name: str, *shape: int, thorough: bool = False, **rest: Any) -> None:
        found.append(Case(f"wide-{name}", filter_problem(*shape, **rest), thorough))

    # Of four strips, or of two twice as wide, one at least lies inside: vectors there, and elements at the edges.
    for i, dtype in enumerate(TYPES):
        thorough = dtype in ("uint8", "bfloat16", "float32")
        add(dtype, 1, 21, 640, 3, 4, dtype=dtype, border=tuple(BORDERS)[i % 5], thorough=thorough)
        for channels in (2, 3, 4):
            kh, kw = ((3, 3), (4, 5), (5, 6))[(i + channels) % 3]
            add(f"{dtype}-{channels}", 1, 17, 512, kh, kw, dtype=dtype, channels=channels, thorough=channels == 3)
    for dtype, result in (("uint8", "float32"), ("uint8", "int16"), ("int16", "uint8"), ("float32", "uint16"),
                          ("float16", "float32"), ("float32", "bfloat16"), ("int8", "float16")):  # fmt: skip
        add(f"{dtype}-{result}", 1, 13, 528, 5, 3, dtype=dtype, out_dtype=result)
    # Windows of one, two and three steps, with and without columns ahead of the filter's.
    for kh, kw, anchor in ((1, 9, 0), (2, 10, 4), (4, 12, 5), (3, 17, 8), (11, 11, 5), (9, 20, 10), (3, 32, 1)):
        add(f"{kh}x{kw}-anchor-{anchor}", 1, 19, 560, kh, kw, anchor=(kh - 1, anchor), dtype="uint8", border="wrap")
        add(f"{kh}x{kw}-anchor-{anchor}-float32", 1, 15, 560, kh, kw, anchor=(0, anchor), border="constant")
    # Rows of which not all are aligned to vectors, of inputs or of outputs; bands of rows.
    add("pitch-odd-in", 2, 15, 640, 3, 3, gap=1, dtype="uint8")
    add("pitch-odd-out", 2, 15, 640, 3, 3, y_gap=1, dtype="uint8")
    add("pitch-odd-out-channels", 1, 15, 640, 3, 3, y_gap=4, dtype="uint8", channels=3)
    # Results that end in the middle of a vector.
    for columns in (401, 402):
        for channels, name in ((1, ""), (3, "-3")):
            gap = -channels * columns % 16
            size = (3, 3) if channels == 1 else (4, 6)  # channels apart
            add(f"columns-{columns}{name}", 1, 9, columns, *size, gap=gap, y_gap=gap, dtype="uint8", channels=channels)
    add("valid-channels", 2, 20, 500, 4, 5, valid=True, dtype="uint8", channels=3)
    add("bands", 1, 300, 400, 3, 3, border="wrap", dtype="float16")
    add("bands-uint8", 1, 52, 528, 3, 3, dtype="uint8")
    add("filters-of-images", 3, 11, 400, 3, 3, per_image=True, filters=2, dtype="uint8")
    return found


TENSOR_FILTER_CASES = tuple(_cases())
