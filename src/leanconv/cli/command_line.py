"""What the command lines share: settings, exit codes, errors on one line."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

import typer

from leanconv.runtime.compile import CompileError
from leanconv.runtime.driver import CudaError

#: Exit codes: something of ours failed; the command or its files are at fault; Ctrl-C, as shells have it.
FAILED, MISTAKE, INTERRUPTED = 1, 2, 130


def new_app(name: str, description: str) -> typer.Typer:
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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal cannot show is a question mark, and no error
            stream.reconfigure(errors="replace")
    try:
        app(args=None if arguments is None else list(arguments), prog_name=name)
    except (CudaError, CompileError, ImportError, MemoryError) as error:
        _complain(error)
        sys.exit(FAILED)
    except (ValueError, TypeError, OverflowError, OSError) as error:
        _complain(error)
        sys.exit(MISTAKE)


def _complain(error: Exception) -> None:
    text = str(error)
    if isinstance(error, OSError) and error.strerror and error.filename:
        text = f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError):
        text = f"memory is not enough: {error}" if text else "memory is not enough"
    print(f"error: {text}", file=sys.stderr)
