"""``python -m report COMMAND``: the commands that make the project's pages, and its studies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from leanconv.cli import command_line, options
from leanconv.cli.command_line import FAILED

app = command_line.new_app("report", "Make the pages of docs/ from committed results; run the studies behind them.")

Docs = Annotated[Path, typer.Option("--docs", help="Folder of the pages.")]
Records = Annotated[Path, typer.Option("--results", help="Folder of the results files.")]
DOCS, RESULTS = Path("docs"), Path("benchmarks/results")


@app.command()
def pages(docs: Docs = DOCS, results: Records = RESULTS) -> None:
    """Fill the tables and figures of every page of docs/ from the results files."""
    from report.pages import fill_all

    for page in fill_all(docs, results):
        print(page)


@app.command()
def performance(docs: Docs = DOCS, results: Records = RESULTS) -> None:
    """Write docs/performance.md from the results files of whole suites."""
    from leanconv.runtime.files import write_text
    from report.performance import page, results_files

    files = results_files(results)
    write_text(docs / "performance.md", page(files))
    print(f"{docs / 'performance.md'}: {len(files)} results files")


@app.command()
def numerics(
    docs: Docs = DOCS,
    results: Records = RESULTS,
    revision: options.Revision = None,
    only_page: Annotated[bool, typer.Option("--only-page", help="Measure nothing: write the page anew.")] = False,
) -> None:
    """Measure errors against float64 on this machine, and write docs/numerics.md from the records of all machines."""
    from report.numerics import measure_machine, write_page

    if not only_page:
        print(measure_machine(results, revision))
    count = write_page(results, docs / "numerics.md")
    print(f"{docs / 'numerics.md'}: {count} machines")


@app.command("first-calls")
def first_calls(results: Records = RESULTS, revision: options.Revision = None) -> None:
    """Measure how long the first run of a network waits for its kernels, on this machine's GPU."""
    from report.first_calls import measure

    print(measure(results, revision))


@app.command("batch-invariance")
def batch_invariance(results: Records = RESULTS, revision: options.Revision = None) -> None:
    """Measure what batch_invariant=True costs on this machine's GPU, and compare the bits of images in many batches."""
    from report.batches import measure

    print(measure(results, revision))


@app.command("tensor-ablation")
def tensor_ablation(results: Records = RESULTS, revision: options.Revision = None) -> None:
    """Measure tensor-core kernels without one part at a time, and the energy of calls, on a GPU."""
    from report.tensor_ablation import measure

    print(measure(results, revision))


@app.command("bank-width")
def bank_width(results: Records = RESULTS, revision: options.Revision = None) -> None:
    """Measure what reading shared memory in units of a bank's width is worth for each element type, on a GPU."""
    from report.bank_width import measure

    print(measure(results, revision))


@app.command()
def refit(
    results: Records = RESULTS,
    tables: Annotated[
        Path | None, typer.Option("--tables", help="Folder of the tables; by default the shipped.")
    ] = None,
) -> None:
    """Fit the cost models to tables of tuned problems, without a GPU; a page says how well they choose then."""
    from leanconv.tuning.tables import SHIPPED
    from report.refit import measure

    for path in measure(results, tables or SHIPPED):
        print(path)


@app.command()
def networks(
    names: Annotated[list[str] | None, typer.Argument(help="Networks; by default all.")] = None,
    results: Records = RESULTS,
    revision: options.Revision = None,
) -> None:
    """Measure whole networks of torchvision on this machine's GPU, with leanconv's convolutions and PyTorch's."""
    from report.networks import NETWORKS, measure

    if unknown := sorted(set(names or ()) - set(NETWORKS)):
        raise typer.BadParameter(f"no network is called {', '.join(unknown)}; there are {', '.join(NETWORKS)}")
    print(measure(results, revision, names or tuple(NETWORKS)))


@app.command()
def cpu(results: Records = RESULTS, revision: options.Revision = None) -> None:
    """Measure the CPU engine's algorithms beside PyTorch on this machine, and whether the choice among them is good."""
    from report.cpu import measure

    print(measure(results, revision))


@app.command()
def layers(results: Records = RESULTS, seconds: options.Seconds = None, revision: options.Revision = None) -> None:
    """Tune the layers of torchvision's networks on this machine's GPU, beside PyTorch's own convolution."""
    from report.layers import measure

    print(measure(results, seconds, revision))


@app.command("design-space")
def design_space(
    results: Records = RESULTS,
    each: Annotated[int, typer.Option("--each", help="Configurations to time for each size of filters.", min=1)] = 60,
    revision: options.Revision = None,
) -> None:
    """Time configurations of direct_tiled, a sample of all that fit this machine's GPU."""
    from report.design_space import measure

    print(measure(results, each, revision))


@app.command()
def precision(docs: Docs = DOCS, results: Records = RESULTS, revision: options.Revision = None) -> None:
    """Compute errors on sparse, scaled and other data with NumPy, without a GPU, and write docs/numerics.md anew."""
    from report.numerics import write_page
    from report.precision import measure_machine

    print(measure_machine(results, revision))
    write_page(results, docs / "numerics.md")


@app.command()
def points(
    states: Annotated[
        list[int] | None, typer.Option(help="4, 8 or 16; give it again for more. All by default.")
    ] = None,
    best: Annotated[int, typer.Option(help="Sets to measure besides the known ones.")] = 5,
) -> None:
    """Compare interpolation points of 1-D Winograd by their errors in simulated float32 arithmetic."""
    from leanconv.winograd import WIDTHS
    from report.points import CHANNELS, table

    for alpha in states or sorted(WIDTHS):
        if alpha not in WIDTHS:
            raise ValueError(f"states={alpha} is not known; choose one of {', '.join(map(str, sorted(WIDTHS)))}")
        print(f"{alpha} states, {CHANNELS} channels, r × r filters\n\n{table(alpha, best)}\n")


@app.command()
def ablation(
    what: options.What,
    layout: options.Layout = None,
    precision: options.Precision = None,
    only: options.Only = None,
    algorithms: Annotated[
        str, typer.Option(help="Patterns of the algorithms to take apart; by default those that the suite is about.")
    ] = "",
    batch: options.Batch = None,
    quick: options.Quick = False,
    seconds: options.Seconds = None,
    resume: options.Resume = None,
    out: options.Out = None,
    plot: options.Plot = None,
    revision: options.Revision = None,
) -> None:
    """Measure kernels with one technique off at a time, without peers: im2win, winograd1d, opencnn, or any layers."""
    from leanconv.bench import Results, default_path, plots
    from report import figures
    from report.ablation import run_ablation, show

    if plot:
        plots.refuse_format(plot)
    results = run_ablation(
        what, layout=layout, precision=precision, only=only, batch=batch, quick=quick,
        revision=revision, algorithms=options.patterns(algorithms), seconds=seconds,
        resume=Results.read(resume) if resume else None,
    )  # fmt: skip
    path = out or default_path(results, bool(algorithms or only or batch or quick), suffix="-ablation")
    results.write(path)
    show(results)
    print(f"results: {path}")
    if plot:
        figures.ablation(results, plot)
        print(f"plot: {plot}")
    if results.own_failed:
        raise typer.Exit(FAILED)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit as the command line of leanconv does."""
    command_line.run(app, "python -m report", arguments)


if __name__ == "__main__":
    main()
