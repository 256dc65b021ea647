"""What the command lines share: settings, exit codes, errors on one line, and the options of a measurement."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from leanconv.runtime.driver import CudaError

#: Exit codes: something of ours failed; the command or its files are at fault.
FAILED, MISTAKE = 1, 2


class Layout(str, Enum):
    """Memory layouts."""

    NCHW = "NCHW"
    NHWC = "NHWC"
    CHWN = "CHWN"


What = Annotated[str, typer.Argument(metavar="SUITE|PROBLEM", help="A suite's name, or conv:… or filter:….")]
InLayout = Annotated[Layout | None, typer.Option("--layout", help="Memory layout, for suites of layers.")]
Precision = Annotated[
    str | None,
    typer.Option("--precision", help="Tier, for suites of layers: ieee, fp32, relaxed, tf32. Peers stay as they are."),
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
Revision = Annotated[str | None, typer.Option("--revision", help="Git revision to record where there is no checkout.")]


def patterns(text: str) -> tuple[str, ...]:
    """The patterns that an option lists between commas."""
    return tuple(filter(None, text.split(",")))


def new_app(name: str, description: str) -> typer.Typer:
    """An application without commands."""
    return typer.Typer(
        name=name,
        help=description,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def run(app: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> None:
    """Run an application and exit: 0, 1 where something of leanconv's own failed, 2 for a mistake in the command.

    ``name`` is what the user types for the application, ``arguments`` are by default those of this process.
    """
    try:
        app(args=None if arguments is None else list(arguments), prog_name=name)
    except (CudaError, ImportError) as error:
        _complain(error)
        sys.exit(FAILED)
    except (ValueError, TypeError, OSError) as error:
        _complain(error)
        sys.exit(MISTAKE)


def _complain(error: Exception) -> None:
    text = str(error)
    if isinstance(error, OSError) and error.strerror and error.filename:
        text = f"{error.filename}: {error.strerror}"
    print(f"error: {text}", file=sys.stderr)
