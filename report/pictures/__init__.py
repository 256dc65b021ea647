"""The drawings on the pages of the algorithms: one module for each, named as its file in docs/pictures."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

NAMES = (
    "im2win",
    "implicit_gemm",
    "layouts",
    "tensor_gemm",
    "tensor_window",
    "tensor_winograd",
    "winograd1d",
    "winograd1d_wide",
    "winograd2d",
)


def draw_all(folder: Path) -> Iterator[Path]:
    """Draw every picture into ``folder``; yields the files."""
    for name in NAMES:
        path = folder / f"{name.replace('_', '-')}.svg"
        import_module(f"report.pictures.{name}").draw(path)
        yield path
