"""The only progress bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(total: int, wanted: bool = True) -> Iterator[Callable[[str], None]]:
    """One bar of ``total`` steps on standard error; gives the function to call with the name of each step that begins.

    The bar disappears at the end. There is none where standard error is not a terminal, or without ``wanted``.
    """
    if not wanted or not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=total)
        begun = 0

        def begin(name: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=name)
            begun += 1

        yield begin
