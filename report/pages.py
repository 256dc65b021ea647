"""Tables and figures inside the documents, made from the committed results files.

A document holds blocks such as::

    <!-- made: standings im2win together=im2win,im2win_fused -->
    <!-- /made -->

The words after ``made:`` are what to make (`MAKERS`), the results file it is made of (``im2win``, ``im2win-nhwc``,
``opencnn-relaxed``, ``networks``), and settings. ``python -m report pages`` writes what belongs between the two lines,
for each machine that has such a file; figures go to ``docs/pictures/<machine>-<file>-<what>.png``. Nothing outside the
blocks changes. Blocks ``made by research:`` are those of ``python -m research pages``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, get_args

from leanconv.bench import families
from leanconv.bench.format import Table
from leanconv.bench.results import Results
from leanconv.bench.suites import LAYOUTS, suite_names
from leanconv.bench.tables import STANDINGS_CELL, about_layouts, heading, legend, standings, summary
from leanconv.dtypes import GPU_LAYERS
from leanconv.options import PRECISIONS, Op
from leanconv.runtime.files import write_text
from report import (
    comparisons,
    cpu,
    figures,
    first_calls,
    layers,
    modes,
    networks,
    numerics,
    records,
    refit,
    training,
)


def named(results: Path, stem: str) -> list[Path]:
    return sorted(results.glob(f"*/{stem}.json"))


def on_a_gpu(path: Path) -> Results | None:
    """The results of a suite, where there are any and of a GPU."""
    results = Results.read(path)
    return results if results.machine.get("gpu") and results.rows else None


_VERSIONS = ("driver", "cuda", "nvrtc", "cudnn", "torch", "cupy", "numpy", "scipy", "opencv", "leanconv")


@dataclass(frozen=True)
class Maker:
    """What blocks of one name hold for each results file: a text or, with what it ``shows`` in words, a picture.

    ``make`` is given what ``read`` finds in the file, then a text's settings by name, each a list, or the path of the
    picture. ``command`` makes such files; {} stands for suite and options.
    """

    make: Callable[..., Any]
    command: str = "leanconv bench {}"
    shows: str = ""
    read: Callable[[Path], Any] = records.read
    files: Callable[[Path, str], Sequence[Path]] = named


def _summaries(path: Path) -> str:
    results = Results.read(path)
    machine = results.machine
    versions = ", ".join(f"{name} {machine[name]}" for name in _VERSIONS if machine.get(name))
    parts = [
        f"## {heading(results)}",
        f"Measured {machine['date']}, {records.revision(machine)}; {versions}.",
        records.table(summary(results)),
    ]
    if results.own_algorithms():
        parts += [f"Each algorithm over all problems ({STANDINGS_CELL}):", records.table(standings(results))]
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in legend(results))])


def suites(results: Path, _: str = "") -> list[Path]:
    """The results files of whole suites: machine by machine in the order of the suites."""
    names = suite_names()
    settings = [layout.lower() for layout in LAYOUTS], PRECISIONS, GPU_LAYERS, get_args(Op)
    named = re.compile(f"({'|'.join(names)})" + "".join(f"(-({'|'.join(words)}))?" for words in settings))
    found = ((named.fullmatch(path.stem), path) for path in results.glob("*/*.json"))
    ordered = sorted((path.parent.name, names.index(match[1]), path.name, path) for match, path in found if match)
    return [path for *_, path in ordered]


def captioned(results: Results, caption: str | Callable[..., str], table: Callable[..., Table], **settings: Any) -> str:
    """A table with what was measured and what it says; settings go to both."""
    said = caption if isinstance(caption, str) else caption(results, **settings)
    words = f"{records.origin(results.machine)}.", about_layouts(results), said
    return f"{' '.join(filter(None, words))}\n\n{records.table(table(results, **settings))}"


def _families(results: Results, **_: Sequence[str]) -> str:
    meanings = "; ".join(f"{group.name}: {group.meaning}" for group in families.PEERS)
    return f"× is {families.RATIO_CELL}. {meanings}."


def _engines(results: Results, algorithm: Sequence[str]) -> str:
    return f"How many times faster {algorithm[0]} is: {families.RATIO_CELL}."


#: Tables by their name, each with the sentence that says what it has.
TABLES: dict[str, tuple[str | Callable[..., str], Callable[..., Table]]] = {
    "standings": (
        f"× is the {STANDINGS_CELL}.", lambda results, together=(): standings(results, [together] if together else []),
    ),
    "speeds": ("Effective TFLOP/s, counted as direct convolution.", comparisons.speeds),
    "memory": (
        "Memory beside input, filters and output.",
        lambda results, algorithms: comparisons.memory(results, *algorithms),
    ),
    "families": (_families, lambda results, algorithm: families.family_table(results, *algorithm)),
    "engines": (_engines, lambda results, algorithm: comparisons.engines(results, *algorithm)),
    "targets": ("The time of the filters' transform is part of every figure.", families.goal_table),
}  # fmt: skip


def _errors(record: dict[str, Any], algorithms: Sequence[str]) -> str:
    """Tables of the errors of the kernels of Im2col-Winograd and some peers, for each kind of data."""
    entries = [numerics.Entry(**entry) for entry in record["entries"] if entry["problem"].startswith("Γ")]
    # a GPU's record has the NumPy engine's errors too, which stand in the CPU's own
    on_gpu = [entry for entry in entries if entry.where == "GPU"]
    chosen = [e for e in on_gpu or entries if any(fnmatchcase(e.algorithm, pattern) for pattern in algorithms)]
    parts = []
    for data in dict.fromkeys(entry.data for entry in chosen):
        table = numerics.kernel_table([entry for entry in chosen if entry.data == data])
        parts.append(f"{records.origin(record | {'gpu': record['machine']})}. Data: {data}.\n\n{table}")
    return "\n\n".join(parts)


MAKERS: dict[str, Maker] = {
    **{
        name: Maker(partial(captioned, caption=caption, table=table), read=on_a_gpu)
        for name, (caption, table) in TABLES.items()
    },
    "speed-figure": Maker(figures.speed, shows="Bars: TFLOP/s of each algorithm on each layer", read=on_a_gpu),
    "memory-figure": Maker(
        figures.memory, shows="Bars: memory of each layer by algorithm, as a multiple of its tensors", read=on_a_gpu
    ),
    "families-figure": Maker(figures.families, shows="Lines: TFLOP/s on every problem of each family", read=on_a_gpu),
    "summaries": Maker(_summaries, read=Path, files=suites),
    "errors": Maker(_errors, "python -m report numerics"),
    "numerics": Maker(numerics.section, "python -m report numerics"),
    "waits": Maker(first_calls.section, "python -m report first-calls"),
    "cpu": Maker(cpu.section, "python -m report cpu"),
    "layers": Maker(layers.section, "python -m report layers"),
    "others": Maker(layers.others, "python -m report layers --others"),
    "modes": Maker(modes.section, "python -m report modes"),
    "networks": Maker(networks.section, "python -m report networks"),
    "training": Maker(training.section, "examples/train_cnn.py --json"),
    "losses-figure": Maker(
        training.draw, "examples/train_cnn.py --json", shows="Lines: the loss by step, of each engine and seed"
    ),
    "processes": Maker(training.processes, "examples/train_cnn.py --json"),
    "tuning": Maker(refit.section, "python -m report refit"),
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
            parts += filter(None, [maker.make(content, **settings)])
            continue
        picture = pictures / f"{path.parent.name}-{stem}-{what.removesuffix('-figure')}.png"
        if draw:
            maker.make(content, picture)
        link = Path(os.path.relpath(picture, page.parent)).as_posix()
        gpu = (content.machine if isinstance(content, Results) else content["machine"])["gpu"]
        parts.append(f"![{maker.shows}, on {gpu}]({link})")
    return "\n\n".join(parts) or f"Not measured yet: `{maker.command.format(asked(stem))}` makes these figures."


def asked(stem: str) -> str:
    """The suite and the options of which `default_path` puts the results into a file of this name."""
    suite, options = stem.removesuffix("-ablation"), ""
    for setting, values in (("precision", PRECISIONS), ("layout", LAYOUTS)):
        for value in values:
            if suite.endswith(f"-{value.lower()}"):
                suite, options = suite.removesuffix(f"-{value.lower()}"), f" --{setting} {value}{options}"
    return f"{suite}{options}"


def fill_all(docs: Path, results: Path, **how: Any) -> Iterator[Path]:
    """Fill the blocks of every document below ``docs``; yields those that change. Arguments and errors as of `fill`."""
    for page in sorted(docs.glob("**/*.md")):
        text = page.read_text(encoding="utf-8")
        filled = fill(text, page, results, docs / "pictures", **how)
        if filled != text:
            write_text(page, filled)
            yield page
