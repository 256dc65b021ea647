"""``python -m research COMMAND``: the studies, and what fills the pages with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from leanconv.cli import command_line
from leanconv.cli.command_line import FAILED

app = command_line.new_app("research", "Run the studies behind the pages of docs/, and put what they found into them.")

Docs = Annotated[Path, typer.Option("--docs", help="Folder of the pages.")]
Records = Annotated[Path, typer.Option("--results", help="Folder of the results files.")]
DOCS, RESULTS = Path("docs"), Path("research/results")


@app.command()
def pages(docs: Docs = DOCS, results: Records = RESULTS) -> None:
    """Fill the tables and figures of studies, in every page of docs/, from the results files."""
    from research.pages import fill_all

    for page in fill_all(docs, results):
        print(page)


@app.command()
def pictures(docs: Docs = DOCS) -> None:
    """Draw what a block, a warp or a thread of each family computes, without a GPU."""
    from research.pictures import draw

    for path in draw(docs / "pictures"):
        print(path)


@app.command()
def ablation(
    what: command_line.What,
    layout: command_line.Layout = None,
    precision: command_line.Precision = None,
    only: command_line.Only = None,
    algorithms: Annotated[
        str, typer.Option(help="Patterns of the algorithms to take apart; by default those that the suite is about.")
    ] = "",
    batch: command_line.Batch = None,
    quick: command_line.Quick = False,
    seconds: command_line.Seconds = None,
    resume: command_line.Resume = None,
    results: Records = RESULTS,
    out: Annotated[Path | None, typer.Option("--out", help="Results file; by default below research/results.")] = None,
    plot: command_line.Plot = None,
    revision: command_line.Revision = None,
) -> None:
    """Measure kernels without one technique at a time, without peers: im2win, winograd1d, opencnn, or any layers."""
    from leanconv.bench import Results, default_path, plots
    from leanconv.runtime.files import check_writable
    from research.ablation import run_ablation, show
    from research.ablation_pages import draw

    if plot:
        plots.refuse_format(plot)
    for given in filter(None, (out, plot)):
        check_writable(given)
    measured = run_ablation(
        what, layout=layout, precision=precision, only=only, batch=batch, quick=quick,
        revision=revision, algorithms=command_line.patterns(algorithms), seconds=seconds,
        resume=Results.read(resume) if resume else None,
    )  # fmt: skip
    path = out or default_path(measured, bool(algorithms or only or batch or quick), results, "-ablation")
    measured.write(path)
    show(measured)
    print(f"results: {path}")
    if plot:
        draw(measured, plot)
        print(f"plot: {plot}")
    if measured.own_failed:
        raise typer.Exit(FAILED)


@app.command("tensor-ablation")
def tensor_ablation(results: Records = RESULTS, revision: command_line.Revision = None) -> None:
    """Measure tensor-core kernels without one part at a time, and the energy of calls, on a GPU."""
    from research.tensor_ablation import measure

    print(measure(results, revision))


@app.command("bank-width")
def bank_width(results: Records = RESULTS, revision: command_line.Revision = None) -> None:
    """Measure what reading shared memory in units of a bank's width is worth for each element type, on a GPU."""
    from research.bank_width import measure

    print(measure(results, revision))


@app.command("batch-invariance")
def batch_invariance(results: Records = RESULTS, revision: command_line.Revision = None) -> None:
    """Measure what batch_invariant=True costs on this machine's GPU, and compare the bits of images in many batches."""
    from research.batches import measure

    print(measure(results, revision))


@app.command("design-space")
def design_space(
    results: Records = RESULTS,
    each: Annotated[int, typer.Option("--each", help="Configurations to time for each size of filters.", min=1)] = 60,
    revision: command_line.Revision = None,
) -> None:
    """Time configurations of direct_tiled, a sample of all that fit this machine's GPU."""
    from research.design_space import measure

    print(measure(results, each, revision))


@app.command()
def precision(results: Records = RESULTS, revision: command_line.Revision = None) -> None:
    """Compute errors on sparse, scaled and other data with NumPy, without a GPU."""
    from research.precision import measure_machine

    print(measure_machine(results, revision))


@app.command()
def points(
    states: Annotated[
        list[int] | None, typer.Option(help="4, 8 or 16; give it again for more. All by default.")
    ] = None,
    best: Annotated[int, typer.Option(help="Sets to measure besides the known ones.")] = 5,
) -> None:
    """Compare interpolation points of 1-D Winograd by their errors in simulated float32 arithmetic."""
    from leanconv.kernels.winograd_matrices import WIDTHS
    from research.points import CHANNELS, table

    for alpha in states or sorted(WIDTHS):
        if alpha not in WIDTHS:
            raise ValueError(f"states={alpha} is not known; choose one of {', '.join(map(str, sorted(WIDTHS)))}")
        print(f"{alpha} states, {CHANNELS} channels, r × r filters\n\n{table(alpha, best)}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit as the command line of leanconv does."""
    command_line.run(app, "python -m research", arguments)


if __name__ == "__main__":
    main()
