"""The arguments and options that several commands have, those of a measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leanconv.dtypes import GPU_LAYERS, INTEGER_LAYERS
from leanconv.options import LAYOUTS, PRECISIONS

_LAYOUTS, _LEVELS = ", ".join(LAYOUTS), ", ".join(PRECISIONS)

What = Annotated[str, typer.Argument(metavar="SUITE|PROBLEM", help="A suite's name, or conv:… or filter:….")]
Layout = Annotated[str | None, typer.Option("--layout", help=f"Memory layout, for suites of layers: {_LAYOUTS}.")]
Precision = Annotated[
    str | None,
    typer.Option("--precision", help=f"Precision level, for suites of layers: {_LEVELS}. Peers stay as they are."),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help=f"Element type, for suites of layers: {', '.join((*GPU_LAYERS, *INTEGER_LAYERS))}."),
]
Operation = Annotated[
    str | None, typer.Option("--op", help="Operation, for suites of layers: fprop, dgrad (of the input) or wgrad.")
]
Only = Annotated[str | None, typer.Option("--only", help="Pattern of problem names, such as 'conv1*'.")]
Batch = Annotated[int | None, typer.Option("--batch", help="Images, instead of the suite's number.")]
Quick = Annotated[bool, typer.Option("--quick", help="Rougher figures in a quarter of the time.")]
Seconds = Annotated[float | None, typer.Option("--seconds", help="Begin no further problem after this time.")]
Resume = Annotated[
    Path | None,
    typer.Option("--resume", metavar="FILE", help="Results of a run whose missing problems to measure and add."),
]
Out = Annotated[Path | None, typer.Option("--out", help="Results file; by default below benchmarks/results.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Also draw bars into this .png, .svg or .pdf.")]
Gpu = Annotated[str, typer.Option("--device", help="cuda or cuda:N.")]
LIMIT = "Bytes of GPU memory that an algorithm may take for scratch and packed weights, such as 0 or 64MiB."
Limit = Annotated[str | None, typer.Option("--workspace-limit", metavar="BYTES", help=LIMIT)]
Revision = Annotated[str | None, typer.Option("--revision", help="Git revision to record where there is no checkout.")]


def patterns(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))
