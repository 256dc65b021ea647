"""Results of runs that never were, for the tests of what is made of results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from leanconv.bench import columns
from leanconv.bench.results import Results, Row
from leanconv.bench.suites import format_problem
from leanconv.problem import ConvProblem
from report import pages

MACHINE = {
    "gpu": "NVIDIA H200",
    "date": "2026-01-02T03:04:05",
    "schema": columns.SCHEMA,
    "git_revision": "0123456789abcdef" + 24 * "0",
    "git_dirty": False,
    "kernels": {},
    "ceilings": {"fp32_tflops": 50.0, "tf32_tflops": 400.0, "copy_tbytes": 4.0, "how": "made up"},
}
#: What records say of their machine.
ABOUT = {
    "gpu": "NVIDIA X",
    "date": "2026-11-22T00:00:00",
    "cores": 16,
    "schema": columns.SCHEMA,
    "git_revision": "abc" + 37 * "0",
    "git_dirty": False,
    "kernels": {},
}
LAYERS = {"narrow": ConvProblem(1, 2, 9, 9, 3, 3, 3), "wide": ConvProblem(1, 2, 20, 20, 3, 5, 5)}


def row(problem: str, engine: str, algorithm: str, tflops: float, workspace: int = 0, **rest: Any) -> Row:
    """A row by its speed."""
    us = 1000 / tflops
    values = {"ceiling": "fp32", "ceiling_share": 0.5, "l2": "warm", "error": 1e-7, "checked": "all"} | rest
    return Row(problem, engine, algorithm, us, us, us, 5, tflops, workspace_bytes=workspace, **values)


def layers() -> Results:
    """No rows yet, on two layers."""
    about = {
        name: {"words": format_problem(p), "layout": "NCHW", "flops": 10**9, "bytes": 1000, "floor_us": 1.0}
        for name, p in LAYERS.items()
    }
    return Results(dict(MACHINE), "im2win", "NCHW", problems=about)


def suite() -> Results:
    """Our algorithms and some peers on two layers; one peer's answer is wrong."""
    results = layers()
    results.rows = [
        row("narrow", "leanconv", "im2win_fused", 40),
        row("narrow", "leanconv", "im2win", 20, 500),
        row("narrow", "leanconv", "implicit_gemm", 50),
        row("narrow", "cudnn:implicit_gemm-nchw", "implicit_gemm", 10),
        row("narrow", "cudnn:fft_tiling-nchw", "fft_tiling", 80, 10**6),
        row("narrow", "cudnn:winograd_nonfused-nchw", "winograd_nonfused", 90, 10, error=0.5),
        row("narrow", "im2col+cublas", "unfold, bmm", 5, 1000),
        row("wide", "leanconv", "im2win_fused", 20),
        row("wide", "leanconv", "im2win", 30, 600),
        row("wide", "leanconv", "implicit_gemm", 10),
        row("wide", "cudnn:implicit_gemm-nchw", "implicit_gemm", 15),
        row("wide", "im2col+cublas", "unfold, bmm", 5, 3000),
    ]
    return results


def timed(problem: str, engine: str, us: float, **rest: Any) -> Row:
    """A row by its time."""
    values: dict[str, Any] = {
        "algorithm": "a",
        "us_low": us,
        "us_high": us,
        "runs": 5,
        "tflops": 1.0,
        "ceiling": "fp32",
        "ceiling_share": 0.5,
        "l2": "warm",
        "workspace_bytes": 0,
        "error": 1e-7,
        "checked": "all",
    }
    return Row(problem, engine, us=us, **(values | rest))


def in_nhwc() -> Results:
    """Two problems in NHWC, of which one has peers of every kind and a wrong answer of our own."""
    about = {"words": "conv:c1", "layout": "NHWC", "flops": 100, "bytes": 80, "floor_us": 1.0}
    results = Results(dict(MACHINE), "im2win", "NHWC", problems={"a": about, "b": about})
    results.rows = [
        timed("a", "leanconv", 10.0, algorithm="good", registers=99, spill_bytes=0),
        timed("a", "leanconv", 20.0, algorithm="slow"),
        timed("a", "leanconv", 1.0, algorithm="wrong", error=None),
        timed("a", "cudnn:fft-nhwc", 5.0, workspace_bytes=10**9),
        timed("a", "cudnn:implicit_gemm-nhwc", 40.0),
        timed("a", "cudnn:implicit_gemm-nchw", 30.0),
        timed("a", "cudnn:winograd_nonfused-nhwc", 2.0, error=1e-3),
        timed("a", "torch-fp32-nhwc", 20.0),
        timed("a", "torch-fp32-nchw", 3.0),
        timed("b", "leanconv", 10.0),
        timed("b", "torch-fp32-nhwc", 80.0),
    ]
    return results


def in_chwn(results: Results) -> Results:
    """The same in a layout that no peer has."""
    about = {name: entry | {"layout": "CHWN"} for name, entry in results.problems.items()}
    return replace(results, layout="CHWN", problems=about)


def blocks(*words: str, mark: str = "made") -> str:
    """A document of empty blocks."""
    return "".join(f"<!-- {mark}: {each} -->\n<!-- /made -->\n" for each in words)


def filled(folder: Path, *words: str, by: Any = pages) -> str:
    """Such a document as `report.pages`, or those of research, fill it from the results in ``folder``."""
    text = blocks(*words, mark="made" if by is pages else "made by research")
    return str(by.fill(text, folder / "page.md", folder, folder))


def rows_of(table: tuple[list[str], list[list[str]]]) -> dict[str, dict[str, str]]:
    """A table by its first cells and the heads of its columns."""
    columns, lines = table
    return {line[0]: dict(zip(columns, line, strict=True)) for line in lines}
