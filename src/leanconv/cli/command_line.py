"""What command lines share: settings, exit codes, errors on one line, and the options that several commands have."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from leanconv.dtypes import GPU_LAYERS, INTEGER_LAYERS
from leanconv.options import LAYOUTS, PRECISIONS
from leanconv.runtime.compile import CompileError
from leanconv.runtime.driver import CudaError

#: Exit codes: something of ours failed; the command or its files are at fault; Ctrl-C, as shells have it.
FAILED, MISTAKE, INTERRUPTED = 1, 2, 130


#: What typer raises for a command, an option or an argument that is not known, missing or has no such value.
_UsageError: Any = typer.BadParameter.__base__


class _Group(typer.core.TyperGroup):
    """Commands that Ctrl-C ends with its own exit code, wherever it comes; typer alone has 1 for it.

    Mistakes in the command are printed on one line, as all others are; typer alone draws a box.
    """

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **more: Any) -> Any:
        if not args:  # which prints the help
            return super().make_context(info_name, args, *rest, **more)
        with _on_one_line():
            return super().make_context(info_name, args, *rest, **more)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _on_one_line():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None


@contextmanager
def _on_one_line() -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        text = " ".join(error.format_message().split()).removesuffix(".").replace(": Value error, ", ": ")
        missing = getattr(error, "param", None)
        if missing is not None and missing.nargs == -1 and text.startswith("Missing argument"):
            # one of several arguments, of which the last that was given is taken for the one behind them
            names = [each.metavar for each in error.ctx.command.params if each.param_type_name == "argument"]
            text = f"Missing argument: give {' and '.join(names)}"
        command = error.ctx.command_path if error.ctx else ""
        print(f"error: {text}{command and f'; see {command} --help'}", file=sys.stderr)
        raise typer.Exit(MISTAKE) from None


def new_app(name: str, description: str, completion: bool = False) -> typer.Typer:
    """An application; ``completion`` adds the options that print and install what completes words in a shell."""
    return typer.Typer(
        name=name,
        cls=_Group,
        help=description,
        no_args_is_help=True,
        add_completion=completion,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def run(app: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> None:
    """Run an application and exit: 0, 1 where something of leanconv's own failed, 2 for a mistake in the command.

    ``name`` is what the user types for the application, ``arguments`` are by default those of this process.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal cannot show is a question mark, and no error
            stream.reconfigure(errors="replace")
    try:
        app(args=None if arguments is None else list(arguments), prog_name=name)
    except (CudaError, CompileError, ImportError, MemoryError) as error:
        complain(error)
        sys.exit(FAILED)
    except (ValueError, TypeError, OverflowError, OSError) as error:
        complain(error)
        sys.exit(MISTAKE)


def complain(error: Exception, about: object = None) -> None:
    """One line on standard error. ``about`` is named in it, where the error does not."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror and error.filename:
        text = f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError):
        text = f"memory is not enough: {error}" if text else "memory is not enough"
    if about is not None and str(about) not in text:
        text = f"{about}: {text}"
    print(f"error: {text}", file=sys.stderr)


_LAYOUTS, _LEVELS = ", ".join(LAYOUTS), ", ".join(PRECISIONS)


def suites_like(incomplete: str) -> list[str]:
    """Names of suites, for a shell that completes words."""
    from leanconv.bench.suites import suite_names

    return [name for name in suite_names() if name.startswith(incomplete)]


What = Annotated[
    str,
    typer.Argument(metavar="SUITE|PROBLEM", help="A suite's name, or conv:… or filter:….", autocompletion=suites_like),
]
_WORK = typer.Argument(
    metavar="SUITE|PROBLEM|MODEL.py:NAME",
    help="A suite's name, conv:… or filter:…, or a module of a file, or a function there that returns one.",
    autocompletion=suites_like,
)
Work = Annotated[str, _WORK]
SomeWork = Annotated[str | None, _WORK]
Inputs = Annotated[
    list[str] | None, typer.Option("--input", help="What a model is called with: 8x3x224x224; again for more.")
]
Backward = Annotated[
    bool | None, typer.Option("--backward/--no-backward", help="A model's gradients too; by default as it trains.")
]
Layout = Annotated[
    str | None, typer.Option("--layout", help=f"Memory layout, for suites of layers and models: {_LAYOUTS}.")
]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision", help=f"Precision level, for suites of layers and models: {_LEVELS}. Peers stay as they are."
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help=f"Element type, for suites of layers: {', '.join((*GPU_LAYERS, *INTEGER_LAYERS))}."),
]
Operation = Annotated[
    str | None, typer.Option("--op", help="Operation, for suites of layers: fprop, dgrad (of the input) or wgrad.")
]
Only = Annotated[str | None, typer.Option("--only", help="Pattern of problem names, such as 'conv1*'.")]
Batch = Annotated[int | None, typer.Option("--batch", min=1, help="Images, instead of the suite's number.")]
Quick = Annotated[bool, typer.Option("--quick", help="Rougher figures in a quarter of the time.")]
Seconds = Annotated[float | None, typer.Option("--seconds", min=0, help="Begin no further problem after this time.")]
Resume = Annotated[
    Path | None,
    typer.Option("--resume", metavar="FILE", help="Results of a run whose missing problems to measure and add."),
]
Out = Annotated[Path | None, typer.Option("--out", help="Results file; by default below benchmarks/results.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Also draw bars into this .png, .svg or .pdf.")]
Gpu = Annotated[str, typer.Option("--device", help="cuda or cuda:N.")]
LIMIT = "Bytes of GPU memory that an algorithm may take for scratch and packed weights, such as 0 or 64MiB."
Limit = Annotated[str | None, typer.Option("--workspace-limit", metavar="BYTES", help=LIMIT)]
Revision = Annotated[
    str | None, typer.Option("--revision", help="Full hash of the clean commit that this is, where there is no git.")
]


def some_path(text: str) -> Path:
    """A path of the command line. Raises what typer does for a bad value where it is empty, as an unset variable of a
    shell makes it: Path("") is the current folder."""
    if not text:
        raise typer.BadParameter("it is empty")
    return Path(text)


def patterns(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))
