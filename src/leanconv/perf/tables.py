"""Tables of tuned problems: what candidates took on one GPU model, and which of them is chosen.

A user's table is a file of JSON, one for each GPU model, ``<gpu>.json``: first the ``format`` and the ``gpu`` it holds
for, then ``problems``, a line for each, by its words (`leanconv.words`)::

    {"format": 2, "gpu": {"name": "NVIDIA H200", ...}, "problems": {
    "conv:n8,c64,...": {"winners": {"auto": 0}, "timed": [{"algorithm": ..., "config": ..., "us": ...}, ...], ...},
    }}

``winners`` has the number of the chosen candidate for each limit of workspace; ``peers`` what other libraries took. A
candidate counts as long as the kernels it was timed with (``kernels``, a hash of the sources of each) are those of this
version.

The shipped table, ``perf/<gpu>/winners.json``, has the same form with the winners alone. It is made for a release and
valid for the release: each winner has a hash of its machine code (``code``, made by ``compiler``), which `leanconv tune
--verify` compares. The user's tables come first, then those of bundles, then the shipped one. Whatever cannot be read
is a miss, which a warning names once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from leanconv import words
from leanconv.plan import Plan, Target
from leanconv.problem import Problem
from leanconv.runtime import bundle, env
from leanconv.runtime import cache as kernel_cache
from leanconv.runtime.errors import LeanconvError, warn_once
from leanconv.runtime.files import PATIENCE, read_bytes, read_json, whole

#: Counts up when what a table says has another meaning: others are refused by name.
FORMAT = 2
#: A folder for each GPU model, with what was measured there: ``winners.json``, ``fits.json``.
SHIPPED = Path(__file__).resolve().parent
#: The source of a choice.
USER, BUNDLE, SHIPPED_TABLE, MODEL = "your table", "the bundle's table", "the shipped table", "the cost model"
#: No number of bytes or of samples, and no time, is as great.
_MOST = 1 << 63
#: The key of a choice without a limit in ``winners``.
NO_LIMIT = "auto"

_LINE = re.compile(r'^("(?:conv|filter):[^"\n]*"): (\{.*\}),?$', re.MULTILINE)
#: Comments; and first strings and characters, in which there is none.
_COMMENT = re.compile(rb"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])')|//[^\n]*|/\*.*?\*/""", re.DOTALL)


class TableError(LeanconvError, ValueError):
    """A table that cannot be read, or is not to be overwritten; the message has its path."""

    #: of another version of leanconv: ``"older"`` or ``"newer"``
    age = ""


@dataclass(frozen=True)
class Timed:
    """A candidate of a problem and the microseconds that it took, whatever prepares its filters included."""

    #: the algorithm, or its strategy: `Algorithm.stem`
    algorithm: str
    config: Mapping[str, int]
    #: None where it did not run, or was wrong
    us: float | None
    #: a hash of the sources of each of its kernels, by the kernel's name
    kernels: Mapping[str, str] = field(default_factory=dict)
    workspace: int = 0
    prepared: int = 0
    #: samples that ``us`` is the median of; few where it was far behind
    runs: int = 0
    #: why there is no time
    why: str = ""
    #: a hash of the machine code, of winners of a shipped table
    code: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells candidates of a problem apart."""
        return self.algorithm, *sorted(self.config.items())

    def fits(self, limit: int | None, auto: bool) -> bool:
        """Whether a choice with this limit may take it; of no limit ``auto`` takes no workspace (`choose.room`)."""
        if limit is None:
            return not (auto and self.workspace)
        return self.workspace + self.prepared <= limit


@dataclass(frozen=True)
class Entry:
    """What is known of one problem."""

    timed: tuple[Timed, ...] = ()
    #: by limit of workspace, as `limit_key` writes it
    winners: Mapping[str, Timed] = field(default_factory=dict)
    #: microseconds by engine, such as ``torch-fp32``
    peers: Mapping[str, float] = field(default_factory=dict)
    #: versions of the peers
    versions: str = ""

    def winner(self, limit: int | None, among: Container[str] | None = None) -> Timed | None:
        """The candidate for ``auto``, or the quickest of the strategies ``among``; None where there is none."""
        if among is None:
            return self.winners.get(limit_key(limit))
        known = [t for t in self.timed if t.algorithm in among and t.us is not None and t.fits(limit, auto=False)]
        return min(known, key=lambda t: t.us or 0, default=None)

    def merged(self, newer: Entry) -> Entry:
        """Both; what is newer replaces what is older."""
        timed = {each.key: each for each in (*self.timed, *newer.timed)}
        winners = {limit: timed.get(each.key, each) for limit, each in {**self.winners, **newer.winners}.items()}
        peers = {**self.peers, **newer.peers}
        return Entry(tuple(timed.values()), winners, peers, newer.versions or self.versions)

    def as_json(self) -> str:
        """One line."""
        timed = sorted(self.timed, key=lambda t: (t.us is None, t.us))
        places = {each.key: i for i, each in enumerate(timed)}
        record: dict[str, Any] = {
            "winners": {limit: places[each.key] for limit, each in self.winners.items() if each.key in places},
            "timed": [{k: v for k, v in vars(each).items() if v not in ("", None, {})} for each in timed],
        }
        if self.peers:
            record |= {"peers": dict(self.peers), "versions": self.versions}
        return json.dumps(record, separators=(",", ":"))

    @classmethod
    def from_json(cls, record: Any) -> Entry:
        """Raises ValueError, TypeError, KeyError or the like for what is no entry; unknown fields are ignored."""
        known = Timed.__dataclass_fields__
        timed = tuple(Timed(**{"us": None} | {k: v for k, v in each.items() if k in known}) for each in record["timed"])
        for each in timed:
            texts = each.algorithm, each.why, each.code, *each.kernels.values()
            typed = all(isinstance(text, str) for text in texts)
            typed &= all(isinstance(value, (int, str)) for value in each.config.values())
            counts = each.workspace, each.prepared, each.runs
            typed &= all(isinstance(number, int) and 0 <= number < _MOST for number in counts)
            if not typed or not (each.us is None or _is_time(each.us)):
                raise ValueError(f"{each} is no candidate")
        winners = {str(limit): timed[place] for limit, place in record["winners"].items() if 0 <= place < len(timed)}
        limits = [limit for limit in winners if limit != NO_LIMIT]
        limited = all(limit.isdecimal() and int(limit) < _MOST for limit in limits)
        if not limited or not all(won.us for won in winners.values()):
            raise ValueError(f"winners {winners}")
        peers = {str(name): us for name, us in record.get("peers", {}).items()}
        if not all(map(_is_time, peers.values())):
            raise ValueError(f"peers that took {peers}")
        return cls(timed, winners, peers, str(record.get("versions", "")))


def _is_time(us: Any) -> bool:
    """Whether these are microseconds. Whole numbers of JSON have no end, which no float could be compared with."""
    return isinstance(us, (int, float)) and not isinstance(us, bool) and 0 < us < _MOST


def limit_key(limit: int | None) -> str:
    """How a limit of workspace is written in ``winners``."""
    return NO_LIMIT if limit is None else str(limit)


def gpu_record(target: Target) -> dict[str, Any]:
    """What a table says of its GPU: another one's times mean nothing here."""
    return {"name": target.model, "arch": target.arch, "multiprocessors": target.multiprocessors}


def slug(model: str) -> str:
    """A GPU model as files are called: ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")


def path_of(folder: Path, model: str) -> Path:
    """The table of a GPU model in a folder of the user's, or in the package's."""
    return folder / slug(model) / "winners.json" if folder == SHIPPED else folder / f"{slug(model)}.json"


@cache
def source_version(*headers: str) -> str:
    """A hash of kernel headers and of what they include, which comments and spaces do not change. Raises
    FileNotFoundError where there is no such header."""
    sources: dict[str, bytes] = {}
    for header in headers:
        if not (found := kernel_cache.headers(header)):
            raise FileNotFoundError(f"there is no kernel header {header!r}")
        sources |= found
    digest = hashlib.sha256()
    for name, text in sorted(sources.items()):
        digest.update(name.encode() + b"\0" + b"".join(_COMMENT.sub(rb"\1", text).split()) + b"\0")
    return digest.hexdigest()[:12]


def kernels_of(plan: Plan) -> dict[str, str]:
    """The versions of a plan's kernels: hashes of their sources, which comments and spaces do not change."""
    return {launch.symbol: source_version(launch.header) for launch in plan.every_launch}


def changed(timed: Timed, plan: Plan) -> list[str]:
    """The kernels of ``plan`` that are others than those that were timed."""
    return [name for name, version in kernels_of(plan).items() if timed.kernels.get(name) != version]


class Table:
    """A table in memory. A line is found and parsed when its problem is first looked up."""

    def __init__(
        self, gpu: Mapping[str, Any], lines: Mapping[str, Any] | None = None, body: str = "", compiler: str = "",
        name: str = "a table",
    ) -> None:  # fmt: skip
        """``lines`` has what each problem has in the file, as JSON or an Entry; or ``body`` is the lines themselves.

        ``compiler`` is the version that made the machine code of a shipped table, ``name`` that of the file.
        """
        self.gpu, self.compiler, self.name = dict(gpu), compiler, name
        self._known: dict[str, Any] = dict(lines or {})
        self._body = body

    @classmethod
    def read(cls, path: Path) -> Table:
        """Raises OSError where a file is not there or refused, TableError where it is damaged or of another version."""
        try:
            text = (bundle.table(path) or read_bytes(path)).decode(errors="replace")
        except ValueError as error:
            raise TableError(str(error)) from None
        head, _, body = text.partition('"problems": {\n')
        # as we write it; else as anybody may
        ours = body.endswith("\n}}\n")
        try:
            header = read_json(head + '"problems": {}}' if ours else text)
            form, gpu, lines = header["format"], dict(header["gpu"]), dict(header["problems"])
            compiler = str(header.get("compiler", ""))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise TableError(f"{path} is no table of tuned problems, or a damaged one: {error}") from None
        if form != FORMAT:
            age = "older" if isinstance(form, int) and form < FORMAT else "newer"
            refused = TableError(f"{path} is of an {age} version of leanconv: its format is {form}, not {FORMAT}")
            refused.age = age
            raise refused
        return cls(gpu, lines, "\n" + body if ours else "", compiler, str(path))

    @property
    def _lines(self) -> dict[str, Any]:
        """Everything, by problem. Raises TableError where a line is none."""
        if self._body:
            found = {json.loads(key): entry for key, entry in _LINE.findall(self._body)}
            if len(found) != self._body.count("\n") - 2:
                raise TableError(f"{self.name} is a damaged table: a line cannot be read, or is there twice")
            self._known, self._body = {**found, **self._known}, ""
        return self._known

    def _find(self, key: str) -> Any:
        if key in self._known or not self._body:
            return self._known.get(key)
        start = f"\n{json.dumps(key)}: "
        at = self._body.find(start)
        return None if at < 0 else self._body[at + len(start) : self._body.index("\n", at + 1)].rstrip(",")

    def get(self, problem: Problem | str) -> Entry | None:
        """What is known of a problem; None for nothing and, with a warning at the first, for what cannot be read."""
        key = problem if isinstance(problem, str) else words.format_problem(problem)
        entry = self._find(key)
        if entry is not None and not isinstance(entry, Entry):
            try:
                entry = Entry.from_json(read_json(entry) if isinstance(entry, str) else entry)
            except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
                text = f"{self.name} has nothing that can be read for {key}: {type(error).__name__}: {error}"
                warn_once(f"entries of {self.name}", text[:500])
                return None
            self._known[key] = entry
        return entry

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._lines))

    def __len__(self) -> int:
        return len(self._lines)

    def merged(self, newer: Table) -> Table:
        """Both, problem by problem."""
        both = Table(self.gpu, self._lines)
        for key in newer:
            old, new = both.get(key), newer.get(key)
            if new is not None:
                both._lines[key] = new if old is None else old.merged(new)
        return both

    def text(self) -> str:
        """As a file has it; what has not been looked up stays as it was read."""
        lines = ",\n".join(f"{json.dumps(key)}: {_as_text(entry)}" for key, entry in sorted(self._lines.items()))
        lines = f"\n{lines}\n" if lines else ""
        compiler = f'"compiler": {json.dumps(self.compiler)}, ' if self.compiler else ""
        return f'{{"format": {FORMAT}, "gpu": {json.dumps(self.gpu)}, {compiler}"problems": {{{lines}}}}}\n'


def _as_text(entry: Any) -> str:
    if isinstance(entry, Entry):
        return entry.as_json()
    return entry if isinstance(entry, str) else json.dumps(entry, separators=(",", ":"))


def update(path: Path, newer: Table) -> Table:
    """Merge a table into the file at ``path``, which is replaced as a whole, under a lock; returns what it holds now.

    A damaged file is kept as ``.damaged``, one of an older version as ``.older``. Raises TableError for one of another
    GPU, or of a newer version, which stays as it is; OSError where it cannot be written, or another process keeps it
    locked.
    """
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(path) + ".lock", timeout=PATIENCE):
        with suppress(FileNotFoundError):
            newer = _read_for(path, newer.gpu).merged(newer)
        with whole(path) as file:
            file.write_text(newer.text(), encoding="utf-8")
    return newer


def _read_for(path: Path, gpu: Mapping[str, Any]) -> Table:
    """The table at ``path`` if it may be written for this GPU; an empty one for a damaged file, which is renamed."""
    try:
        table = Table.read(path)
        len(table)
    except ValueError as error:
        age = getattr(error, "age", "")
        if age == "newer":
            raise
        path.replace(path.with_suffix(f".{age or 'damaged'}"))
        return Table(gpu)
    if table.gpu != gpu:
        raise TableError(f"{path} is for {_words(table.gpu)}, not for {_words(gpu)}: it is not overwritten")
    return table


def _words(gpu: Mapping[str, Any]) -> str:
    return f"{gpu.get('name')} ({gpu.get('arch')}, {gpu.get('multiprocessors')} multiprocessors)"


# What choose reads: each table is read once

#: folders whose tables come before the user's own, latest last: of `leanconv.record_tuning`
_folders: list[Path] = []
_tables: dict[tuple[Path, Target], Table | None] = {}


def folders() -> Iterator[tuple[str, Path]]:
    """Where tables are, those that win first."""
    for folder in reversed(_folders):
        yield USER, folder
    own = env.tuning_dir()
    if own is not None:
        yield USER, own
    for path in bundle.with_tables():
        yield BUNDLE, path
    yield SHIPPED_TABLE, SHIPPED


def user_folder(given: Path | str | None = None) -> Path:
    """Where tables are written. Raises OSError for a user without a home."""
    folder = Path(given) if given is not None else next((f for s, f in folders() if s == USER), None)
    if folder is None:
        raise OSError("tables have no folder, as this user has no home; set LEANCONV_TUNING_DIR")
    return folder


def table_of(folder: Path, target: Target) -> Table | None:
    """The table of a GPU in a folder; None where there is none that holds for it."""
    key = folder, target
    if key not in _tables:
        found, path = None, path_of(folder, target.model)
        try:
            found = Table.read(path)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, TableError) as error:
            warn_once(str(path), f"a table of tuned problems is not used: {error}")
        _tables[key] = found if found is not None and found.gpu == gpu_record(target) else None
    return _tables[key]


def of_user(target: Target) -> dict[str, str]:
    """The user's own tables of a GPU as one, by the name of its file; for a bundle."""
    found = Table(gpu_record(target))
    for source, folder in reversed([*folders()] if env.tuning_mode() != "off" else []):
        table = table_of(folder, target) if source in (USER, BUNDLE) else None
        found = found if table is None else found.merged(table)
    return {path_of(Path(), target.model).name: found.text()} if len(found) else {}


def keep(folder: Path, target: Target, table: Table) -> None:
    """Let this be what the process knows of a folder's table, whether or not it could be written."""
    _tables[folder, target] = table


def use(folder: Path) -> None:
    """Ask the tables of a folder first from now on."""
    if folder in _folders:
        _folders.remove(folder)
    _folders.append(folder)


def as_timed(problem: Problem) -> Problem:
    """The problem whose times hold for this one: a transposed layer is timed as a gradient, without its bias, and what
    follows a layer's sums, but for a bias and a ReLU, is left out."""
    if problem.kind == "conv2d" and problem.op == "dgrad" and problem.bias:
        return replace(problem, bias=False)
    if problem.kind == "conv2d" and problem.fuses:
        return problem.plain
    return problem


def known(problem: Problem, target: Target) -> Iterator[tuple[str, Entry]]:
    """What each table knows of a problem, the user's first, with the table's name."""
    # what wins with one batch says nothing of a choice for all of them
    if not target.model or env.tuning_mode() == "off" or problem.batch_invariant:
        return
    keys = {words.format_problem(as_timed(problem)): None}
    if problem.kind == "conv2d" and problem.op == "fprop" and (problem.bias or problem.activation):
        keys[words.format_problem(problem.plain)] = None  # which has the same sums
    for source, folder in folders():
        table = table_of(folder, target)
        entry = None if table is None else next((found for key in keys if (found := table.get(key))), None)
        if entry is not None:
            yield source, entry


def peer_us(problem: Problem, target: Target, engine: str) -> float | None:
    """Microseconds that another library took, such as ``torch-fp32``; None where no table has them."""
    return next((e.peers[engine] for _, e in known(problem, target) if engine in e.peers), None)


def forget() -> None:
    """Read every table anew when it is next needed, and no folder but the user's own; for tests."""
    _tables.clear()
    _folders.clear()
