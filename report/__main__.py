"""``python -m report COMMAND``: what measures for the project's pages, and what makes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from leanconv.cli import command_line, options

app = command_line.new_app("report", "Measure what docs/ publishes, and make its pages from the committed results.")

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
def numerics(results: Records = RESULTS, revision: options.Revision = None) -> None:
    """Measure errors against float64 of every algorithm that this machine can run."""
    from report.numerics import measure_machine

    print(measure_machine(results, revision))


@app.command("first-calls")
def first_calls(results: Records = RESULTS, revision: options.Revision = None) -> None:
    """Measure how long the first run of a network waits for its kernels, on this machine's GPU."""
    from report.first_calls import measure

    print(measure(results, revision))


@app.command()
def refit(results: Records = RESULTS) -> None:
    """Fit the cost models to the timed candidates, without a GPU; a page says how well they choose then."""
    from report.refit import measure

    for path in measure(results):
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit as the command line of leanconv does."""
    command_line.run(app, "python -m report", arguments)


if __name__ == "__main__":
    main()
