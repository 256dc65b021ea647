"""Tables and figures inside the documents, made from the committed results files.

A document holds blocks such as::

    <!-- made: standings im2win together=im2win,im2win_fused -->
    <!-- /made -->

The words after ``made:`` are what to make, the results file it is made of (``im2win``, ``im2win-nhwc``,
``opencnn-relaxed``, ``im2win-ablation``; ``numerics`` for ``errors``, ``first-calls`` for ``waits``, ``networks``
for ``networks``, ``batch-invariance`` for ``batches``, ``training`` for ``training``, ``training-processes`` for
``processes``, ``tuning`` for ``tuning``, ``bank-width`` for ``banks``, ``design-space`` for ``configurations`` and
``landscape``, ``tensor-ablation`` for ``parts`` and ``energy``, ``choice`` for ``cpu``,
``torchvision-layers`` for ``layers``), and settings.
``python -m report pages`` writes what belongs between the two lines, for each GPU that has such a file; figures go to
``docs/pictures/<gpu>-<file>-<what>.png``. Nothing outside the blocks changes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from leanconv.bench import families
from leanconv.bench.format import Table
from leanconv.bench.results import Results
from leanconv.bench.suites import LAYOUTS
from leanconv.bench.tables import STANDINGS_CELL, about_layouts, standings
from leanconv.options import PRECISIONS
from leanconv.runtime.files import write_text
from report import (
    bank_width,
    batches,
    comparisons,
    cpu,
    design_space,
    figures,
    first_calls,
    layers,
    markdown,
    networks,
    numerics,
    refit,
    tensor_ablation,
    training,
)

_BLOCK = re.compile(r"(<!-- made: ([^\n]*?) -->\n)(.*?)(<!-- /made -->)", re.DOTALL)


def _standings(results: Results, settings: dict[str, list[str]]) -> tuple[str, Table]:
    together = [settings["together"]] if "together" in settings else []
    return f"× is the {STANDINGS_CELL}.", standings(results, together)


def _speeds(results: Results, settings: dict[str, list[str]]) -> tuple[str, Table]:
    return "TFLOP/s of the direct convolution's operations.", comparisons.speeds(results, settings["algorithms"])


def _memory(results: Results, settings: dict[str, list[str]]) -> tuple[str, Table]:
    algorithm, fused = settings["algorithms"]
    return "Memory beside input, filters and output.", comparisons.memory(results, algorithm, fused)


def _ablation(results: Results, settings: dict[str, list[str]]) -> tuple[str, Table]:
    (algorithm,) = settings["algorithm"]
    return f"{algorithm}, {comparisons.ABLATION_CELL}.", comparisons.ablation(results, algorithm)


def _families(results: Results, settings: dict[str, list[str]]) -> tuple[str, Table]:
    (algorithm,) = settings["algorithm"]
    meanings = "; ".join(f"{group.name}: {group.says(results.layout)}" for group in families.PEERS)
    return f"× is {families.RATIO_CELL}. {meanings}.", families.family_table(results, algorithm)


def _engines(results: Results, settings: dict[str, list[str]]) -> tuple[str, Table]:
    (algorithm,) = settings["algorithm"]
    words = f"How many times faster {algorithm} is: {families.RATIO_CELL}."
    return words, comparisons.engines(results, algorithm)


def _targets(results: Results, settings: dict[str, list[str]]) -> tuple[str, Table]:
    return "The time of the filters' transform is part of every figure.", families.goal_table(results)


_TABLES: dict[str, Callable[[Results, dict[str, list[str]]], tuple[str, Table]]] = {
    "standings": _standings,
    "speeds": _speeds,
    "memory": _memory,
    "ablation": _ablation,
    "families": _families,
    "engines": _engines,
    "targets": _targets,
}
#: The function that draws a figure, and the alternative text for readers who do not see it.
_FIGURES: dict[str, tuple[Callable[[Results, Path], None], str]] = {
    "speed-figure": (figures.speed, "Bars: TFLOP/s of each algorithm on each layer"),
    "memory-figure": (figures.memory, "Bars: memory of each algorithm on each layer, as a multiple of its tensors"),
    "families-figure": (figures.families, "Lines: TFLOP/s on every problem of each family"),
    "ablation-figure": (figures.ablation, "Bars: TFLOP/s with all techniques, and without each of them"),
}
#: Results with rows of their own kind.
_SECTIONS: dict[str, Callable[[Sequence[Path]], str]] = {
    "waits": first_calls.section,
    "cpu": cpu.section,
    "layers": layers.section,
    "batches": batches.section,
    "networks": networks.section,
    "configurations": design_space.section,
    "processes": training.processes,
    "tuning": refit.section,
}
#: Records with a picture: what draws it, its alternative text, and what writes the tables below it.
_DRAWN: dict[str, tuple[Callable[[dict[str, Any], Path], None], str, Callable[[dict[str, Any]], str]]] = {
    "parts": (
        tensor_ablation.draw_parts,
        "Bars: TFLOP/s of each kernel, whole and without one part",
        tensor_ablation.parts_section,
    ),
    "energy": (
        tensor_ablation.draw_energy,
        "Bars: energy of an operation by engine and layer",
        tensor_ablation.energy_section,
    ),
}


def fill(text: str, page: Path, results: Path, pictures: Path, draw: bool = True) -> str:
    """``text`` of the document ``page`` with its blocks made anew from the files below ``results``.

    Without ``draw`` figures are named and not drawn. Raises ValueError for a block that is not understood.
    """

    def make(match: re.Match[str]) -> str:
        try:
            content = _make(match[2], page, results, pictures, draw)
        except (KeyError, ValueError, IndexError) as error:
            raise ValueError(f"{page}: block {match[2]!r}: {type(error).__name__}: {error}") from error
        return f"{match[1]}\n{content}\n\n{match[4]}"

    return _BLOCK.sub(make, text)


def _make(words: str, page: Path, results: Path, pictures: Path, draw: bool) -> str:
    what, stem, *rest = words.split()
    known = (*_TABLES, *_FIGURES, "errors", "banks", "landscape", "training", *_DRAWN, *_SECTIONS)
    if what not in known:
        raise ValueError(f"{what!r} is none of {', '.join(known)}")
    settings = {name: value.split(",") for name, _, value in (word.partition("=") for word in rest)}
    if what == "errors":
        return _errors([*sorted(results.glob(f"*/{stem}.json"))], settings["algorithms"])
    if what == "banks":
        return _banks(sorted(results.glob(f"*/{stem}.json")), page, pictures, draw)
    if what == "landscape":
        return _landscape(sorted(results.glob(f"*/{stem}.json")), page, pictures, draw)
    if what == "training":
        return _training(sorted(results.glob(f"*/{stem}.json")), page, pictures, draw)
    if what in _DRAWN:
        return _drawn(what, sorted(results.glob(f"*/{stem}.json")), page, pictures, draw)
    if what in _SECTIONS:
        return _SECTIONS[what](sorted(results.glob(f"*/{stem}.json")))
    parts = []
    for path in sorted(results.glob(f"*/{stem}.json")):
        measured = Results.read(path)
        if not measured.machine.get("gpu") or not measured.rows:
            continue
        if what in _TABLES:
            caption, table = _TABLES[what](measured, settings)
            words = " ".join(
                filter(None, (_origin(measured.machine["gpu"], measured.machine), about_layouts(measured), caption))
            )
            parts.append(f"{words}\n\n{markdown.table(table)}")
        else:
            function, words_for_it = _FIGURES[what]
            picture = pictures / f"{path.parent.name}-{stem}-{what.removesuffix('-figure')}.png"
            if draw:
                function(measured, picture)
            link = Path(os.path.relpath(picture, page.parent)).as_posix()
            parts.append(f"![{words_for_it}, on {measured.machine['gpu']}]({link})")
    return "\n\n".join(parts) if parts else f"Not measured yet: `{_command(stem)}` on a GPU makes these figures."


def _drawn(what: str, paths: Sequence[Path], page: Path, pictures: Path, draw: bool) -> str:
    """The picture of each machine, and its tables."""
    function, words, section = _DRAWN[what]
    parts = []
    for path in paths:
        record = json.loads(path.read_text(encoding="utf-8"))
        picture = pictures / f"{path.parent.name}-{path.stem}-{what}.png"
        if draw:
            function(record, picture)
        link = Path(os.path.relpath(picture, page.parent)).as_posix()
        parts += [f"![{words}, on {record['machine']['gpu']}]({link})", section(record)]
    return "\n\n".join(parts) if parts else "Not measured yet: `python -m report tensor-ablation` makes these figures."


def _banks(paths: Sequence[Path], page: Path, pictures: Path, draw: bool) -> str:
    """The picture of each machine, then the tables of all."""
    parts = []
    for path in paths:
        picture = pictures / f"{path.parent.name}-bank-width.png"
        if draw:
            bank_width.draw(path, picture)
        link = Path(os.path.relpath(picture, page.parent)).as_posix()
        parts.append(f"![Lines: the speed by n over that of n = 1, for each type and filter]({link})")
    return "\n\n".join([*parts, bank_width.section(paths)])


def _training(paths: Sequence[Path], page: Path, pictures: Path, draw: bool) -> str:
    """The tables of all machines, then the loss curves of each."""
    parts = [training.section(paths)]
    for path in paths:
        record = json.loads(path.read_text(encoding="utf-8"))
        picture = pictures / f"{path.parent.name}-training.png"
        if draw:
            training.draw(record, picture)
        link = Path(os.path.relpath(picture, page.parent)).as_posix()
        parts.append(f"![Lines: the loss by step, of each engine and seed, on {record['machine']['gpu']}]({link})")
    return "\n\n".join(parts)


def _errors(paths: Sequence[Path], patterns: Sequence[str]) -> str:
    """Tables of the errors of the kernels of Im2col-Winograd and some peers, for each machine and kind of data."""
    parts = []
    for path in paths:
        record = json.loads(path.read_text(encoding="utf-8"))
        entries = [numerics.Entry(**entry) for entry in record["entries"] if entry["problem"].startswith("Γ")]
        # a GPU's record has the NumPy engine's errors too, which stand in the CPU's own
        on_gpu = [entry for entry in entries if entry.where == "GPU"]
        chosen = [e for e in on_gpu or entries if any(fnmatchcase(e.algorithm, pattern) for pattern in patterns)]
        for data in dict.fromkeys(entry.data for entry in chosen):
            table = numerics.kernel_table([entry for entry in chosen if entry.data == data])
            parts.append(f"{_origin(record['machine'], record)} Data: {data}.\n\n{table}")
    return "\n\n".join(parts) if parts else "Not measured yet: `python -m report numerics` makes these figures."


def _landscape(paths: Sequence[Path], page: Path, pictures: Path, draw: bool) -> str:
    """The picture of the explored configurations, for each machine."""
    parts = []
    for path in paths:
        record = json.loads(path.read_text(encoding="utf-8"))
        picture = pictures / f"{path.parent.name}-{path.stem}.png"
        if draw:
            design_space.draw(record, picture)
        link = Path(os.path.relpath(picture, page.parent)).as_posix()
        words = "Points: TFLOP/s of each configuration over FMAs a cycle of loads from shared memory"
        parts.append(f"![{words}, on {record['machine']['gpu']}]({link})")
    return "\n\n".join(parts) if parts else "Not measured yet: `python -m report design-space` makes this figure."


def _origin(gpu: str, record: dict[str, Any]) -> str:
    return f"{gpu}, {record['date'][:10]}, {markdown.revision(record, digits=12)}."


def _command(stem: str) -> str:
    """The command whose results `default_path` puts into a file of this name."""
    suite, options = stem.removesuffix("-ablation"), ""
    for setting, values in (("precision", PRECISIONS), ("layout", LAYOUTS)):
        for value in values:
            if suite.endswith(f"-{value.lower()}"):
                suite, options = suite.removesuffix(f"-{value.lower()}"), f" --{setting} {value}{options}"
    return f"{'python -m report ablation' if stem.endswith('-ablation') else 'leanconv bench'} {suite}{options}"


def fill_all(docs: Path, results: Path) -> Iterator[Path]:
    """Fill the blocks of every document below ``docs``; yields those that change. Raises ValueError as `fill` does."""
    for page in sorted(docs.glob("**/*.md")):
        text = page.read_text(encoding="utf-8")
        filled = fill(text, page, results, docs / "pictures")
        if filled != text:
            write_text(page, filled)
            yield page
