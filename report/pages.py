"""Tables and figures inside the documents, made from the committed results files.

A document holds blocks such as::

    <!-- made: standings im2win together=im2win,im2win_fused -->
    <!-- /made -->

The words after ``made:`` are what to make (`MAKERS`), the results file it is made of (``im2win``, ``im2win-nhwc``,
``opencnn-nhwc``, ``modes``), and settings. ``python -m report pages`` writes what belongs between the two lines,
for each machine that has such a file; figures go to ``docs/pictures/<machine>-<file>-<what>.png``. Outside the blocks
only the fields of report/fields.py change. Blocks ``made by research:`` are those of ``python -m research pages``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from leanconv.bench import families, plots, provenance
from leanconv.bench.format import Table
from leanconv.bench.results import Results
from leanconv.bench.suites import LAYOUTS, suite_names
from leanconv.bench.tables import STANDINGS_CELL, about_layouts, standings
from leanconv.dtypes import GPU_LAYERS
from leanconv.options import PRECISIONS, Op
from leanconv.runtime.files import write_text
from report import (
    at_scale,
    comparisons,
    cpu,
    figures,
    first_calls,
    large,
    layers,
    network_tables,
    numerics,
    performance,
    records,
    refit,
    training,
)
from report.fields import OLDER, Fields


def named(results: Path, stem: str) -> list[Path]:
    return sorted(results.glob(f"*/{stem}.json"))


def on_a_gpu(path: Path, read: Callable[[Path], Results] = Results.read) -> Results | None:
    """The results of a suite, where there are any and of a GPU."""
    results = read(path)
    return results if results.machine.get("gpu") and results.rows else None


_suite = partial(on_a_gpu, read=records.checked_suite)


@dataclass(frozen=True)
class Maker:
    """What blocks of one name hold for each results file: a text or, with what it ``shows`` in words, a picture.

    ``make`` is given what ``read`` finds in the file, then a text's settings by name, each a list, or the path of the
    picture.
    """

    make: Callable[..., Any]
    shows: str = ""
    read: Callable[[Path], Any] = records.checked
    files: Callable[[Path, str], Sequence[Path]] = named


def suites(results: Path, only: str = "") -> list[Path]:
    """The results files of whole suites, or of the one named: machine by machine in the order of the suites."""
    names = [name for name in suite_names() if only in ("", name)]
    settings = [layout.lower() for layout in LAYOUTS], PRECISIONS, GPU_LAYERS, get_args(Op)
    named = re.compile(f"({'|'.join(names)})" + "".join(f"(-({'|'.join(words)}))?" for words in settings))
    found = ((named.fullmatch(path.stem), path) for path in results.glob("*/*.json"))
    ordered = sorted((path.parent.name, names.index(match[1]), path.name, path) for match, path in found if match)
    return [path for *_, path in ordered]


def _all_suites(where: Path) -> list[Results]:
    """Of a folder of results, ``FOLDER/every-suite``; or of one suite there, ``FOLDER/SUITE``."""
    paths = suites(where.parent, "" if where.name == "every-suite" else where.name)
    return [content for path in paths if (content := _suite(path))]


def captioned(results: Results, caption: str | Callable[..., str], table: Callable[..., Table], **settings: Any) -> str:
    """A table with what was measured and what it says; settings go to both."""
    said = caption if isinstance(caption, str) else caption(results, **settings)
    words = f"{records.origin(results.machine)}.", about_layouts(results), said
    return f"{' '.join(filter(None, words))}\n\n{records.table(table(results, **settings))}"


def _families(results: Results, **_: Sequence[str]) -> str:
    meanings = "; ".join(f"{group.name}: {group.meaning}" for group in families.PEERS)
    return f"× is {families.RATIO_CELL}. {meanings}."


def _standings(results: Results, **_: Sequence[str]) -> str:
    every = len(results.problems) + len(results.missing)
    both = {name: len(results.ratios(name, results.headline)) for name in results.groups()}
    lacking = [f"× {name} {count} of {every}" for name, count in both.items() if count < every]
    counted = f" Problems with both times: {', '.join(lacking)}." if lacking else ""
    if (whole := performance.layers_of(results)) > every:
        counted += f" {every} of the suite's {whole} layers were run."
    return f"× is the {STANDINGS_CELL}.{counted}"


#: Tables by their name, each with the sentence that says what it has.
TABLES: dict[str, tuple[str | Callable[..., str], Callable[..., Table]]] = {
    "standings": (
        _standings, lambda results, together=(): standings(results, [together] if together else []),
    ),
    "speeds": ("Effective TFLOP/s, counted as direct convolution.", comparisons.speeds),
    "picks": ("× is PyTorch's time over ours, PyTorch in its better layout.", comparisons.picks),
    "memory": ("Memory beside input, filters and output.", comparisons.memory),
    "families": (_families, lambda results, algorithm: families.family_table(results, *algorithm)),
    "targets": ("The time of the filters' transform is part of every figure.", families.goal_table),
}  # fmt: skip


MAKERS: dict[str, Maker] = {
    **{
        name: Maker(partial(captioned, caption=caption, table=table), read=_suite)
        for name, (caption, table) in TABLES.items()
    },
    "speed-figure": Maker(figures.speed, shows="Bars: TFLOP/s of each algorithm on each layer", read=_suite),
    "ratio-figure": Maker(
        figures.ratios, shows="Dots: how many times as fast as PyTorch each algorithm is on each layer", read=_suite
    ),
    "filter-figure": Maker(plots.curves, shows="Lines: speed of each library over the filter's size", read=_suite),
    "large": Maker(large.section),
    "suites": Maker(performance.suites, read=_all_suites, files=lambda results, stem: [results / stem]),
    "below": Maker(performance.below, read=_all_suites, files=lambda results, stem: [results / stem]),
    "peers": Maker(performance.peers, read=_all_suites, files=lambda results, stem: [results / stem]),
    "older": Maker(performance.older, read=provenance.older, files=lambda results, _: [results]),
    "numerics": Maker(numerics.section),
    "waits": Maker(first_calls.section),
    "starts": Maker(at_scale.section),
    "cpu": Maker(cpu.section),
    "cpu-calls": Maker(cpu.calls_section),
    "layers": Maker(layers.section),
    "modes": Maker(network_tables.section),
    "slower": Maker(network_tables.slower),
    "network-energy": Maker(network_tables.energy),
    "short": Maker(network_tables.short),
    "strict": Maker(network_tables.strict),
    "fused": Maker(network_tables.fused),
    "networks-figure": Maker(
        network_tables.picture, shows="Dots: how many times as fast as PyTorch whole networks run in three modes"
    ),
    "training": Maker(training.section),
    # computed from the timed candidates, which say themselves of which kernels they are
    "tuning": Maker(refit.section, read=records.read),
}


def fill(
    text: str, page: Path, results: Path, pictures: Path, draw: bool = True, makers: Mapping[str, Maker] = MAKERS,
    mark: str = "made",
) -> str:  # fmt: skip
    """``text`` of the document ``page`` with its blocks made anew from the files below ``results``.

    Without ``draw`` figures are named and not drawn. Raises ValueError for a block that is not understood.
    """

    def make(match: re.Match[str]) -> str:
        try:
            content = _make(match[2], page, results, pictures, draw, makers)
        except (KeyError, ValueError, IndexError, TypeError) as error:
            raise ValueError(f"{page}: block {match[2]!r}: {type(error).__name__}: {error}") from error
        return f"{match[1]}\n{content}\n\n{match[4]}"

    return re.sub(rf"(<!-- {mark}: ([^\n]*?) -->\n)(.*?)(<!-- /made -->)", make, text, flags=re.DOTALL)


def _make(words: str, page: Path, results: Path, pictures: Path, draw: bool, makers: Mapping[str, Maker]) -> str:
    what, stem, *rest = words.split()
    if what not in makers:
        raise ValueError(f"{what!r} is none of {', '.join(makers)}")
    maker = makers[what]
    settings = {name: value.split(",") for name, _, value in (word.partition("=") for word in rest)}
    parts: list[str] = []
    for path in maker.files(results, stem):
        content = maker.read(path)
        if content is None:
            continue
        if not maker.shows:
            parts += filter(None, [maker.make(content, **settings), _reason(path, page, pictures)])
            continue
        picture = pictures / f"{path.parent.name}-{stem}-{what.removesuffix('-figure')}.png"
        if draw:
            maker.make(content, picture)
        link = Path(os.path.relpath(picture, page.parent)).as_posix()
        gpu = (content.machine if isinstance(content, Results) else content["machine"])["gpu"]
        parts += filter(None, [f"![{maker.shows}, on {gpu}]({link})", _reason(path, page, pictures)])
    if not parts:
        raise ValueError(f"there is no file {stem}.json with results of a GPU below {results}")
    return "\n\n".join(parts)


#: Characters of a reason from which on a block links to the page that has all reasons.
_LONG = 240


def _reason(path: Path, page: Path, pictures: Path) -> str:
    """Why a file of earlier kernels is shown; the pictures lie in a folder beside that page."""
    why = records.reason(path)
    if len(why) < _LONG:
        return why and f"Not measured anew yet: {why}"
    link = Path(os.path.relpath(pictures.parent, page.parent)) / OLDER
    return f"Some of this was measured with earlier kernels or choices: [which]({link.as_posix()})."


def texts(docs: Path) -> list[Path]:
    """The README beside the folder of documents, where there is one, and every document."""
    return [page for page in (docs.parent / "README.md", *sorted(docs.glob("**/*.md"))) if page.is_file()]


def fill_all(docs: Path, results: Path, fields: Fields | None = None, **how: Any) -> Iterator[Path]:
    """Fill the blocks, and with ``fields`` the fields, of all `texts`; yields what changes. Errors as of `fill`."""
    for page in texts(docs):
        text = page.read_text(encoding="utf-8")
        filled = fill(text, page, results, docs / "pictures", **how)
        filled = fields.fill(filled, page) if fields else filled
        if filled != text:
            write_text(page, filled)
            yield page
