"""``python -m report COMMAND``: what measures for the project's pages, and what makes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from leanconv.cli import command_line

app = command_line.new_app("report", "Measure what docs/ publishes, and make its pages from the committed results.")

Docs = Annotated[Path, typer.Option("--docs", help="Folder of the pages.")]
Records = Annotated[Path, typer.Option("--results", help="Folder of the results files.")]
Sources = Annotated[Path, typer.Option("--sources", help="Folder of the sources, whose comments have figures too.")]
DOCS, RESULTS, SOURCES = Path("docs"), Path("benchmarks/results"), Path("src/leanconv")


@app.command()
def pages(docs: Docs = DOCS, results: Records = RESULTS, sources: Sources = SOURCES) -> None:
    """Fill the tables, pictures and figures of README.md, docs/ and the sources from the results files."""
    from report.fields import Fields, fill_sources
    from report.pages import fill_all

    fields = Fields(results)
    for changed in (*fill_all(docs, results, fields), *fill_sources(sources, fields)):
        print(changed)


def _simple(name: str, module: str, what: str) -> None:
    """A command that measures, and needs no more than where the results go."""

    @app.command(name, help=what)
    def command(results: Records = RESULTS, revision: command_line.Revision = None) -> None:
        print(import_module(f"report.{module}").measure(results, revision))


_simple("numerics", "numerics", "Measure errors against float64 of every algorithm that this machine can run.")
_simple("first-calls", "first_calls", "Measure how long the first run of a network waits for its kernels, on this GPU.")
_simple("large", "large", "Measure layers of volumes that are large for a card: memory, time, errors.")
_simple("at-scale", "at_scale", "Simulate many processes that start at once, on this machine, without a GPU.")


@app.command()
def cpu(
    results: Records = RESULTS, seconds: command_line.Seconds = None, revision: command_line.Revision = None
) -> None:
    """Measure the CPU engine beside other libraries on this machine, and its choice; rows of this revision stay."""
    from report.cpu import measure

    print(measure(results, revision, seconds))


@app.command()
def refit(results: Records = RESULTS) -> None:
    """Fit the cost models to the timed candidates, without a GPU; a page says how well they choose then."""
    from report.refit import measure

    for path in measure(results):
        print(path)


@app.command()
def modes(
    names: Annotated[list[str] | None, typer.Argument(help="Networks; by default all.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="fp32, tf32-fp32, tf32 or 16-bit; by default all.")] = None,
    only: Annotated[list[str] | None, typer.Option("--pass", help="forward or training; by default both.")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Under torch.compile too.")] = False,
    tuned: Annotated[bool, typer.Option("--tune", help="Tuned too; use an empty LEANCONV_TUNING_DIR.")] = False,
    way: Annotated[
        str | None,
        typer.Option(
            help="Of rows that are there the times alone of: graph, eager, tuned, fused, sustained, compile or "
            "backend; of steps graph, eager, tuned or compile."
        ),
    ] = None,
    seconds: command_line.Seconds = None,
    results: Records = RESULTS,
    revision: command_line.Revision = None,
) -> None:
    """Measure whole networks in several arithmetics on this machine's GPU; what the file has of this revision stays."""
    from report.modes import measure
    from report.networks import MODES, NETWORKS, PASSES, WAYS

    alone = _known("way", [way], WAYS)[0] if way else ""
    chosen = (_known("network", names, NETWORKS), _known("mode", mode, MODES), _known("pass", only, PASSES))
    print(measure(results, revision, *chosen, seconds, compiled, tuned, alone))


def _known(what: str, given: Sequence[str] | None, names: Iterable[str]) -> tuple[str, ...]:
    if unknown := sorted(set(given or ()) - set(names)):
        raise typer.BadParameter(f"no {what} is called {', '.join(unknown)}; there are {', '.join(names)}")
    return tuple(given or names)


@app.command()
def layers(
    of: Annotated[
        str, typer.Argument(help="layers, group-layers, volume-layers or step-layers: the results file.")
    ] = "layers",
    results: Records = RESULTS,
    seconds: command_line.Seconds = None,
    revision: command_line.Revision = None,
) -> None:
    """Time what is chosen for the layers of torchvision's networks on this machine's GPU, beside PyTorch's."""
    from report.layers import NETWORKS, measure

    (name,) = _known("file", [of], NETWORKS)
    print(measure(results, name, seconds, revision))


@app.command()
def older(
    run: Annotated[bool, typer.Option("--run", help="Run them one after the other.")] = False,
    seconds: Annotated[float, typer.Option(min=0, help="With --run: begin no further one after this time.")] = 500,
    only: Annotated[
        list[str] | None, typer.Option(help="Files such as conv3d, or 'modes resnet*'; again for more, in their order.")
    ] = None,
    ahead: Annotated[
        int,
        typer.Option(min=0, help="With --run: compile so many networks at a time before, in a quarter of the time."),
    ] = 0,
    out: Annotated[Path, typer.Option("--out", help="Folder that the new results files go to.")] = Path("build/older"),
    results: Records = RESULTS,
    revision: command_line.Revision = None,
) -> None:
    """List what measures anew the files of earlier kernels, or run it on this machine's GPU; a second run goes on."""
    from report import older as study

    found = study.chosen(study.plan(results, out), only or ())
    for line in study.run(found, results, out, seconds, revision, ahead) if run else [study.listing(found)]:
        print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    command_line.run(app, "python -m report", arguments)


if __name__ == "__main__":
    main()
