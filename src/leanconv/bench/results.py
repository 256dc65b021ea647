"""The results of a run of the benchmark: rows, the file of them, and comparisons with groups of peers."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from leanconv.bench import columns
from leanconv.dtypes import DTYPES, is_narrow
from leanconv.options import Layout

#: The layouts that cuDNN and PyTorch compute in; PyTorch would copy another into one of them in each call.
PEER_LAYOUTS: tuple[Layout, ...] = ("NCHW", "NHWC")
#: A peer whose error is larger computes something else, and is not compared with. TF32 has its own engines.
_MOST = 1e-4
#: The same at precision tf32.
_MOST_TF32 = 2e-3
#: The engine and the name of what a call without ``algorithm=`` runs.
AUTO_ENGINE, AUTO = "leanconv:auto", "auto"


#: How the warning about a result of more than one run begins.
_SEVERAL = "measured in several runs"


def key_of(config: object) -> str:
    """Six digits for a configuration, such as a tile: a row says which one ran, and a test whether it still would."""
    return hashlib.sha1(repr(config).encode(), usedforsecurity=False).hexdigest()[:6]


@dataclass(frozen=True)
class Row:
    """One engine's algorithm on one problem. Times in microseconds; ``tflops`` counts the direct convolution's work.

    ``ceiling_share`` is the time that ``ceiling`` allows, over the time taken: above 1 for algorithms that do less
    arithmetic than the direct one, or by another unit. ``error`` is relative to float64, on ``checked``; None says that
    the output held NaN or infinity. ``variant`` is empty but in an ablation, which runs an algorithm in several.
    ``dtype`` is that of the arrays.
    """

    problem: str
    engine: str
    algorithm: str
    us: float
    us_low: float
    us_high: float
    runs: int
    tflops: float
    ceiling: str
    ceiling_share: float
    l2: str
    workspace_bytes: int | None
    error: float | None
    checked: str
    registers: int | None = None
    spill_bytes: int | None = None
    note: str = ""
    variant: str = ""
    #: bytes of packed weights, which depend on the filters only and can be kept for later calls
    prepared_bytes: int = 0
    dtype: str = "float32"
    #: on a GPU, where it was asked for: the mean of calls back to back on a card that has been at work for a while
    us_sustained: float | None = None
    #: the precision level that leanconv was asked for
    precision: str = "fp32"
    #: `key_of` the configuration of what a call picked; files before 2026-11-28 have none
    config: str = ""


@dataclass
class Results:
    """Rows with the machine they were measured on; ``absent`` and ``skipped`` say what was not measured, and why."""

    machine: dict[str, Any]
    suite: str
    layout: str | None
    problems: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    skipped: list[dict[str, str]] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    #: problems that the run did not come to
    missing: list[str] = field(default_factory=list)
    #: the requested precision level, where it is not the suite's own
    precision: str | None = None
    #: likewise the element type and the operation
    dtype: str | None = None
    op: str | None = None
    #: whether Ctrl-C ended this process' run; not in files
    interrupted = False

    @property
    def title(self) -> str:
        """Suite, layout, precision level, element type and operation, as headings have them."""
        return " ".join(filter(None, (self.suite, self.layout, self.precision, self.dtype, self.op)))

    @property
    def place(self) -> str:
        """The GPU, or the CPU where there was none."""
        return str(self.machine.get("gpu") or self.machine.get("cpu"))

    @property
    def own_failed(self) -> bool:
        return any(entry["engine"].startswith("leanconv") for entry in self.failed)

    def write(self, path: Path) -> None:
        """Write the file in columns; it appears whole or not at all. What is empty, or nowhere but a default, is left
        out; a reason for which several problems were skipped is said once.
        """
        usual = {each.name: each.default for each in fields(Row)}
        said = [name for name in usual if any(getattr(row, name) != usual[name] for row in self.rows)]
        content = {each.name: getattr(self, each.name) for each in fields(self)} | {
            "problems": [{"problem": name, **about} for name, about in self.problems.items()],
            "rows": [{name: getattr(row, name) for name in said} for row in self.rows],
            "skipped": _grouped(self.skipped, list(self.problems)),
        }
        kept = {name: value for name, value in content.items() if value not in (None, [], {})}
        columns.write(path, {**kept, "problems": content["problems"], "rows": content["rows"]})

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read a results file. Raises ValueError naming the file when it is not one."""
        try:
            content = {"layout": None} | columns.read(path)
            if (schema := content["machine"].get("schema", columns.SCHEMA)) != columns.SCHEMA:
                raise ValueError(f"it is of schema {schema}, and this version reads schema {columns.SCHEMA}")
            content["problems"] = {each.pop("problem"): each for each in content["problems"]}
            content["rows"] = [Row(**row) for row in content["rows"]]
            content["skipped"] = _apart(content.get("skipped", ()), list(content["problems"]))
            read = cls(**content)
            for row in read.rows:
                if row.problem not in read.problems or not 0 < row.us < math.inf:
                    raise ValueError(f"a row of {row.engine} on {row.problem!r} took {row.us} µs")
            return read
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a results file of leanconv bench: {error}") from error

    def refuse_other(self, other: Results) -> None:
        """Raise ValueError unless ``other`` was measured as this was: suite and settings, GPU, versions, revision."""
        free = ("date", "ceilings", "kernels", *(("cpu", "cores", "memory_bytes") if self.machine.get("gpu") else ()))
        settings = ("suite", "layout", "precision", "dtype", "op")
        one, two = ({**each.machine, **{key: getattr(each, key) for key in settings}} for each in (self, other))
        for key in (key for key in one | two if key not in free):
            if (mine := one.get(key)) != (its := two.get(key)):
                raise ValueError(f"two runs do not go together: {key} is {mine!r} in one, {its!r} in the other")

    def joined(self, other: Results, order: Sequence[str]) -> Results:
        """One result of two runs on the same machine, its problems in ``order``; those in both come from ``other``.

        The machine's record is that of the first run; a row's share of the ceiling stays that of its own run. Raises
        ValueError as refuse_other does.
        """
        self.refuse_other(other)
        problems = {**self.problems, **other.problems}

        def kept(entries: list[dict[str, str]]) -> list[dict[str, str]]:
            return [entry for entry in entries if entry["problem"] not in other.problems]

        before = [text for text in (*self.warnings, *other.warnings) if not text.startswith(_SEVERAL)]
        both = f"{_SEVERAL}, the last from {other.machine['date']} on"
        return replace(
            self,
            problems={name: problems[name] for name in order if name in problems},
            rows=[row for row in self.rows if row.problem not in other.problems] + other.rows,
            absent=self.absent | other.absent,
            skipped=kept(self.skipped) + other.skipped,
            failed=kept(self.failed) + other.failed,
            warnings=list(dict.fromkeys([*before, both])),
            missing=[name for name in self.missing if name not in problems or name in other.missing],
        )

    def of(self, problem: str) -> list[Row]:
        return [row for row in self.rows if row.problem == problem]

    def own(self, problem: str, algorithms: Collection[str] | None = None) -> Row | None:
        """leanconv's fastest row on a problem, of all its algorithms or of those named.

        ``"auto"`` among the names is the row of what a call picks.
        """
        names = self.own_algorithms() if algorithms is None else algorithms
        engines = {"leanconv": names, AUTO_ENGINE: self._picked if AUTO in names else ()}
        return _fastest(row for row in self.of(problem) if row.algorithm in engines.get(row.engine, ()) and right(row))

    @property
    def _picked(self) -> set[str]:
        return {row.algorithm for row in self.rows if row.engine == AUTO_ENGINE}

    @property
    def headline(self) -> list[str] | None:
        """Whose row stands for leanconv: what a call picks, where that was measured, else the fastest (None)."""
        return [AUTO] if self._picked else None

    def own_algorithms(self) -> list[str]:
        """Names of leanconv's algorithms that have a row, in the order of the rows."""
        return list(dict.fromkeys(row.algorithm for row in self.rows if row.engine == "leanconv"))

    def peers(self, problem: str) -> dict[str, Row]:
        """The fastest row of each group of peers that has one."""
        fastest = {group.name: self.peer(problem, group) for group in GROUPS}
        return {name: row for name, row in fastest.items() if row}

    def peer(self, problem: str, group: Group) -> Row | None:
        """The fastest row of a group of peers that passes."""
        layout = self.problems[problem].get("layout")
        return _fastest(row for row in self.of(problem) if group.holds(row, layout) and right(row))

    def groups(self) -> list[str]:
        """Names of the groups that have a row, in the order of GROUPS."""
        present = {name for problem in self.problems for name in self.peers(problem)}
        return [group.name for group in GROUPS if group.name in present]

    def counted(self, algorithms: Collection[str] | None = None) -> str:
        """Of how many layers each group's ratio to leanconv, or the best of ``algorithms``, is; what a caption says."""
        every, parts = len(self.problems) + len(self.missing), []
        for name in self.groups():
            count = len(self.ratios(name, algorithms))
            parts.append(f"× {name}: {count} of {every}" + (f", {every - count} missing" if count < every else ""))
        return f"Layers with both figures: {'; '.join(parts)}."

    def ratios(self, group: str, algorithms: Collection[str] | None = None) -> list[float]:
        """How many times faster leanconv, or the best of ``algorithms``, is than a group, where both ran."""
        peers, ratios = next(each for each in GROUPS if each.name == group), []
        for problem in self.problems:
            own, peer = self.own(problem, algorithms), self.peer(problem, peers)
            if own and peer:
                ratios.append(peer.us / own.us)
        return ratios


def _grouped(entries: Iterable[dict[str, str]], every: Sequence[str]) -> list[dict[str, Any]]:
    """Entries with the problems that share an engine and a reason, by their places in ``every``, or by names where they
    have none; without them, where they are every one."""
    found: dict[tuple[str, str], list[int | str]] = {}
    places = {name: i for i, name in enumerate(every)}
    for entry in entries:
        name = entry["problem"]
        found.setdefault((entry["engine"], entry["reason"]), []).append(places.get(name, name))
    return [
        {"engine": engine, "reason": reason} | ({} if problems == [*places.values()] else {"problems": problems})
        for (engine, reason), problems in found.items()
    ]


def _apart(groups: Iterable[dict[str, Any]], every: Sequence[str]) -> list[dict[str, str]]:
    """An entry for each problem of each group, problem by problem."""
    entries = [
        {"problem": every[at] if isinstance(at, int) else at, "engine": group["engine"], "reason": group["reason"]}
        for group in groups
        for at in group.get("problems", every)
    ]
    places = {name: i for i, name in enumerate(every)}
    return sorted(entries, key=lambda entry: places.get(entry["problem"], len(places)))


def right(row: Row) -> bool:
    """Whether a row's output is a float32-grade answer, or a TF32 one that was asked for or is from an engine of TF32.

    One of 16-bit elements may be off by their rounding besides.
    """
    if row.precision == "tf32":
        most = _MOST_TF32
    else:
        most = _MOST + DTYPES[row.dtype].roundoff if is_narrow(row.dtype) else _MOST
    return row.error is not None and (row.error <= most or re.search(r"(?<!3x)tf32", row.engine) is not None)


@dataclass(frozen=True)
class Group:
    """Peers that count as one in comparisons: the fastest of them.

    ``engine`` is a pattern of engine names, ``{layout}`` in it the problem's layout: in a layout that no peer has, such
    a group has no row.
    """

    name: str
    meaning: str
    engine: str
    most_workspace: int | None = None

    def holds(self, row: Row, layout: str | None) -> bool:
        """Whether a row belongs to the group."""
        pattern = self.engine.replace("{layout}", (layout or "").lower())
        if self.most_workspace is not None and not (row.workspace_bytes or 0) <= self.most_workspace:
            return False
        return fnmatchcase(row.engine, pattern)


#: cuDNN's implicit_precomp_gemm keeps a table of a few kB and otherwise needs nothing; it counts as without workspace.
TABLE_BYTES = 64 * 1024

GROUPS = (
    Group(
        "lean", "the fastest cuDNN algorithm in any layout with less than 64 kB of workspace", "cudnn*:*", TABLE_BYTES
    ),
    Group("lean, own layout", "the same among those in the problem's layout", "cudnn*:*-{layout}", TABLE_BYTES),
    Group("best", "the fastest of all cuDNN, its algorithms and its graphs, whatever workspace and layout", "cudnn*:*"),
    Group("PyTorch", "PyTorch in the faster of its layouts, strict FP32 with cudnn.benchmark on", "torch-fp32-*"),
    Group("PyTorch, same layout", "the same in the problem's layout", "torch-fp32-{layout}"),
    Group("TF32", "PyTorch with TF32, which rounds operands to 11 bits, in the faster of its layouts", "torch-tf32-*"),
    Group("TF32, same layout", "the same in the problem's layout", "torch-tf32-{layout}"),
    Group(
        "PyTorch, 16 bits",
        "PyTorch in the 16-bit type, on tensor cores, cudnn.benchmark on, in the faster of its layouts",
        "torch-*float16-*",
    ),
    Group("PyTorch, 16 bits, same layout", "the same in the problem's layout", "torch-*float16-{layout}"),
    Group(
        "torch.compile", "torch.compile in the faster layout, strict FP32, default and max-autotune", "compile-fp32-*"
    ),
    Group("torch.compile, TF32", "the same with TF32", "compile-tf32-*"),
    Group("torch.compile, 16 bits", "the same in the 16-bit type", "compile-*float16-*"),
    Group(
        "CUTLASS",
        "CUTLASS' 3xTF32 implicit GEMM in NHWC, three products for one of float32, the fastest tile",
        "cutlass:3xtf32-*",
    ),
    Group("CUTLASS, TF32", "the same with one product, which rounds operands to 11 bits", "cutlass:tf32-*"),
    Group("CUTLASS, 16 bits", "the same in the 16-bit type, sums in float32", "cutlass:*float16-*"),
    Group("cuFFT", "torch.fft in both axes, of layers for filters of 16 taps and more in one", "cufft"),
    Group("causal_conv1d", "the kernels of Mamba's causal layers", "causal_conv1d"),
    Group("im2col", "im2col and cuBLAS", "im2col+cublas"),
    Group("torch", "PyTorch's conv2d with one channel", "torch"),
    Group(
        "NPP",
        "NPP: with its own border, replicate, or with another one, written out beforehand and not timed",
        "npp*",
    ),
    Group("CV-CUDA", "CV-CUDA's conv2d and its filters of boxes", "cvcuda"),
    Group("CuPy", "cupyx.scipy.ndimage", "cupy"),
    Group("cuCIM", "cuCIM's copy of ndimage, with kernels of its own for one axis", "cucim"),
    Group("PyTorch CPU", "PyTorch on the CPU's cores", "torch-cpu"),
    Group("OpenCV", "OpenCV on the CPU", "opencv"),
    Group("SciPy", "scipy.ndimage on the CPU", "scipy"),
)


def _fastest(rows: Iterable[Row]) -> Row | None:
    return min(rows, key=lambda row: row.us, default=None)


def geometric_mean(values: Sequence[float]) -> float:
    """The n-th root of the product. Raises ValueError when empty or when a value is not positive."""
    if not values or min(values) <= 0:
        raise ValueError(f"a geometric mean needs positive values, not {list(values)}")
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))
