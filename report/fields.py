"""Fields: single figures in texts, filled from the results files.

In a page::

    <!-- figure: opencnn-nhwc auto/pytorch mean -->4.25<!-- /figure -->
    <!-- figure: modes network=vgg16,mode=fp32 torch_graph_us/leanconv_graph_us mean -->3.78<!-- /figure -->

and in a comment of the sources ``figure: opencnn-nhwc auto/pytorch mean = 4.25``. The words are FILE WHAT STAT and
settings; FILE is a results file below ``benchmarks/results/nvidia-h200``, or with its folder ``cpu/choice``.

Of a suite WHAT is one of `SIDES`, ``others`` (the quickest of all peers), an algorithm of ours or
``ALGORITHM:prepared`` (packed weights kept), or two of them: ``WHO/AGAINST`` is the time of AGAINST over that of WHO,
layer by layer. STAT is ``mean`` (geometric), ``least``,
``most``, ``count`` (layers that have both) or ``missing`` (the others). Of one side: one of `VALUES` with ``-mean``,
``-least`` or ``-most``, or bare for a single layer; ``name`` says which peer it is. ``only=PATTERN`` chooses layers by
their names.

Of a record WHAT is two words, rows and values: ``key=PATTERN,…`` chooses rows, ``field`` or ``field/field`` is their
value. ``key=A/B`` is the value of B's rows over that of the row of A that is otherwise alike, the least where several
are. STAT is as above. ``in=ms``, ``in=s`` and ``in=%`` give another unit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from leanconv.bench.format import quantity, size
from leanconv.bench.results import GROUPS, Group, Results, Row, geometric_mean, right
from leanconv.runtime.files import write_text
from report import records

#: A field of a page: its words and what stands in it; and of a comment.
FIELD = re.compile(r"<!-- figure: ([^>]*?) -->(.*?)<!-- /figure -->", re.DOTALL)
COMMENT = re.compile(r"^([ \t]*(?:(?://|#).*)?\bfigure: )(\S[^\n]*?) = \S+(?: [kMG]B)?", re.MULTILINE)
#: Where the results are; the list of older files, to which a page may link instead of saying why each is used.
_FOLDER, OLDER = "nvidia-h200", "performance.md#files-of-earlier-kernels"
#: Groups of peers by the name that fields give them.
SIDES = {
    "pytorch": "PyTorch", "pytorch-same": "PyTorch, same layout", "tf32": "TF32", "tf32-same": "TF32, same layout",
    "16-bit": "PyTorch, 16 bits", "16-bit-same": "PyTorch, 16 bits, same layout", "compile": "torch.compile",
    "compile-tf32": "torch.compile, TF32", "compile-16-bit": "torch.compile, 16 bits", "lean": "lean", "cudnn": "best",
    "cufft": "cuFFT", "causal_conv1d": "causal_conv1d", "im2col": "im2col", "torch": "torch", "npp": "NPP",
    "cupy": "CuPy", "opencv": "OpenCV", "cutlass": "CUTLASS", "cutlass-tf32": "CUTLASS, TF32",
    "cvcuda": "CV-CUDA", "cucim": "cuCIM",
}  # fmt: skip
_GROUPS = {group.name: group for group in GROUPS}
#: What a row of a suite says, by the name that fields give it, and how it is written.
VALUES: dict[str, tuple[Callable[[Row], float | None], Callable[[float], str]]] = {
    "us": (lambda row: row.us, quantity),
    "sustained": (lambda row: row.us_sustained, quantity),
    "tflops": (lambda row: row.tflops, quantity),
    "ceiling": (lambda row: 100 * row.ceiling_share, "{:.0f}".format),
    "error": (lambda row: row.error, "{:.1e}".format),
    "workspace": (lambda row: row.workspace_bytes, lambda value: size(round(value))),
    "packed": (lambda row: row.prepared_bytes, lambda value: size(round(value))),
}
#: What makes rows of a record alike.
_ALIKE = ("network", "problem", "mode", "pass", "batch", "optimiser", "seed", "gpus", "own_statistics", "bucket_mb")
_UNITS = {"ms": 1e-3, "s": 1e-6, "%": 100.0}


def ratio(value: float) -> str:
    """A ratio as all texts write it.

    >>> ratio(4.2512), ratio(12.04)
    ('4.25', '12.0')
    """
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def group_of(name: str) -> Group:
    """The group of peers that fields give this name."""
    return _GROUPS[SIDES[name]]


def side(results: Results, problem: str, name: str) -> Row | None:
    """The row of one side on a problem. Raises ValueError where the whole file has none of this name."""
    if name in SIDES:
        return results.peer(problem, group_of(name))
    if name == "best":
        return results.own(problem)
    if name == "others":
        theirs = (row for row in results.of(problem) if not row.engine.startswith("leanconv") and right(row))
        return min(theirs, key=lambda row: row.us, default=None)
    if name == "auto" and "schema" not in results.machine:
        # NOTE: leaves with the last file that does not have what a call picks, which takes no workspace
        ours = (row for row in results.of(problem) if row.engine == "leanconv" and not row.workspace_bytes)
        return min((row for row in ours if right(row)), key=lambda row: row.us, default=None)
    algorithm, _, way = name.partition(":")
    engine = "leanconv" + (f":{way}" if way else ":auto" if algorithm == "auto" else "")
    known = [
        row
        for row in results.rows
        if row.engine == engine and algorithm in (row.algorithm.replace(" ", "-"), "auto", "best")
    ]
    if not known:
        raise ValueError(f"the file has no rows of {name!r}")
    return min((row for row in known if row.problem == problem and right(row)), key=lambda row: row.us, default=None)


def _statistic(name: str, values: Sequence[float], of: int, write: Callable[[float], str], total: bool = False) -> str:
    """A statistic of values that ``of`` problems or rows could have; the mean of a ``total`` is arithmetic."""
    if name == "count":
        return str(len(values))
    if name == "missing":
        return str(of - len(values))
    if not values:
        raise ValueError("there are no such rows")
    if not name:
        if len(values) > 1:
            raise ValueError(f"{len(values)} layers have it; a statistic or only= makes it one figure")
        return write(values[0])
    means = {"mean": (lambda each: sum(each) / len(each)) if total else geometric_mean, "least": min, "most": max}
    if name not in means:
        raise ValueError(f"{name!r} is no statistic")
    return write(means[name](values))


def of_suite(results: Results, what: str, stat: str, only: str = "*") -> str:
    """A figure of a suite's results. Raises ValueError where there is none."""
    problems = [name for name in results.problems if fnmatchcase(name, only)]
    if not problems:
        raise ValueError(f"no layer is called {only!r}")
    every = len(problems) + sum(fnmatchcase(name, only) for name in results.missing)
    who, _, against = what.partition("/")
    rows = [side(results, problem, who) for problem in problems]
    if against:
        pairs = zip(rows, (side(results, problem, against) for problem in problems), strict=True)
        ratios = [other.us / row.us for row, other in pairs if row and other]
        if not ratios and stat != "missing":
            raise ValueError(f"no layer has rows of both {who} and {against}")
        return _statistic(stat, ratios, every, ratio)
    if stat == "name":
        names = [each.name for each in GROUPS for row in rows if row and fnmatchcase(row.engine, each.engine)]
        return " or ".join(dict.fromkeys(names))
    name, _, of = stat.partition("-")
    if name in ("count", "missing"):
        name, of = "us", name
    if name not in VALUES:
        raise ValueError(f"{name!r} is none of {', '.join(VALUES)}, count, missing")
    get, write = VALUES[name]
    values = [value for row in rows if row and (value := get(row)) is not None]
    return _statistic(of, values, every, write, total=name in ("workspace", "packed"))


def of_record(record: dict[str, Any], chosen: str, value: str, stat: str, unit: str = "") -> str:
    """A figure of a record's rows. Raises ValueError where there is none, KeyError for a field that no row has."""
    rows = record.get("rows") or record.get("entries") or []
    keys = {key: pattern for key, _, pattern in (word.partition("=") for word in chosen.split(","))}
    for key in keys:
        if not any(key in row for row in rows):
            raise KeyError(f"no row has {key!r}")
    against = next((key for key, pattern in keys.items() if "/" in pattern), None)
    mine = _matching(rows, keys | ({against: keys[against].partition("/")[0]} if against else {}))
    if against:
        others = _matching(rows, keys | {against: keys[against].partition("/")[2]})
        alike = [key for key in _ALIKE if key != against]
        pairs = [(row, [o for o in others if all(o.get(key) == row.get(key) for key in alike)]) for row in mine]
        values = [min(_number(o, value) for o in same) / _number(row, value) for row, same in pairs if same]
    else:
        above, _, below = value.partition("/")
        having = [row for row in mine if all(_has(row, name) for name in (above, below) if name)]
        values = [_number(row, above) / (_number(row, below) if below else 1) for row in having]
    if not mine:
        raise ValueError(f"no row is {chosen}")
    write: Callable[[float], str] = ratio if against or "/" in value else _writer(value)
    if unit:
        values = [each * _UNITS[unit] for each in values]
        write = "{:.0f}".format if unit == "%" else quantity
    return _statistic(stat, values, len(mine), write)


def _matching(rows: Sequence[dict[str, Any]], keys: dict[str, str]) -> list[dict[str, Any]]:
    return [row for row in rows if all(fnmatchcase(str(row.get(key)), pattern) for key, pattern in keys.items())]


def _has(row: dict[str, Any], name: str) -> bool:
    head, _, rest = name.partition(".")
    return head in row and (not rest or rest in row[head])


def _number(row: dict[str, Any], name: str) -> float:
    """A field of a row; ``peers.torch-fp32`` is one of the field ``peers``."""
    head, _, rest = name.partition(".")
    return float(row[head][rest] if rest else row[head])


def _writer(name: str) -> Callable[[float], str]:
    if name.endswith("_bytes"):
        return lambda value: size(round(value))
    if name in ("error", "apart", "sequential"):
        return "{:.1e}".format
    return lambda value: str(int(value)) if value == int(value) else quantity(value)


class Fields:
    """Figures from the files below a folder, each of which is read once."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self.known: dict[Path, Results | dict[str, Any]] = {}

    def path(self, file: str) -> Path:
        return self.results / (f"{file}.json" if "/" in file else f"{_FOLDER}/{file}.json")

    def content(self, file: str) -> Results | dict[str, Any]:
        """The file of a field. Raises ValueError where there is none or it is not fit to be published."""
        path = self.path(file)
        if not path.is_file():
            raise ValueError(f"there is no file {path}")
        if path not in self.known:
            suite = "suite" in records.read(path)
            self.known[path] = records.checked_suite(path) if suite else records.checked(path)
        return self.known[path]

    def figure(self, words: str) -> str:
        """The figure of a field by its words. Raises ValueError and KeyError, which say what there is not."""
        file, *rest = words.split()
        settings = dict(word.split("=", 1) for word in rest if word.startswith(("only=", "in=")))
        what = [word for word in rest if not word.startswith(("only=", "in="))]
        content = self.content(file)
        if isinstance(content, Results):
            if len(what) != 2 or "in" in settings:
                raise ValueError("a field of a suite has the words FILE WHO[/AGAINST] STAT [only=PATTERN]")
            return of_suite(content, what[0], what[1], **settings)
        if len(what) != 3 or "only" in settings:
            raise ValueError("a field of a record has the words FILE KEY=PATTERN,… FIELD[/FIELD] STAT [in=UNIT]")
        chosen, value, stat = what
        return of_record(content, chosen, value, stat, settings.get("in", ""))

    def fill(self, text: str, page: Path) -> str:
        """``text`` of a page or a source with its fields made anew. Raises ValueError for one that cannot be."""
        said = " ".join(text.split())

        def figure(words: str) -> str:
            try:
                found, why = self.figure(words), records.reason(self.path(words.split()[0]))
                if why and page.suffix == ".md" and OLDER not in said and " ".join(why.split()) not in said:
                    raise ValueError(f"the file is of earlier kernels, and the page does not say that {why}")
                return found
            except (KeyError, ValueError, TypeError) as error:
                raise ValueError(f"{page}: figure {' '.join(words.split())!r}: {error.args[0]}") from error

        if page.suffix == ".md":
            return FIELD.sub(lambda match: f"<!-- figure: {match[1]} -->{figure(match[1])}<!-- /figure -->", text)
        return COMMENT.sub(lambda match: f"{match[1]}{match[2]} = {figure(match[2])}", text)


def fill_sources(folder: Path, fields: Fields) -> Iterator[Path]:
    """Fill the fields of all comments below ``folder``; yields the files that change."""
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".cuh", ".py")):
        text = path.read_text(encoding="utf-8")
        filled = fields.fill(text, path)
        if filled != text:
            write_text(path, filled)
            yield path
