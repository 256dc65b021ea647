"""The search: time the candidates of problems, check their values, keep all times in a table."""

from __future__ import annotations

import statistics
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import ceil, inf
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from leanconv import api
from leanconv.call import arguments, words
from leanconv.call.ahead import checked_problems
from leanconv.call.choose import Candidate, from_table
from leanconv.call.run import roles_of
from leanconv.plan import Plan
from leanconv.problem import Problem
from leanconv.reference import CPU_ALGORITHMS
from leanconv.runtime import env, launch
from leanconv.runtime.compile import Compiled, CompileError, source
from leanconv.runtime.driver import CudaError, OutOfMemoryError
from leanconv.runtime.launch import Device, Executable
from leanconv.runtime.progress import progress as progress_bar
from leanconv.runtime.threads import cores
from leanconv.runtime.timing import Clock, GpuClock
from leanconv.tuning import tables
from leanconv.tuning.buffers import Buffers, buffers, difference, random_block, terms_of
from leanconv.tuning.candidates import MOST, candidates_of, independent, tolerance
from leanconv.tuning.tables import Entry, Table, Timed

#: A winner is this much quicker than what was chosen before, which keeps its place otherwise.
DISPLACES = 0.98
#: Microseconds of a sample, and calls that it has at most and at least.
_SAMPLE_US, _CALLS = 300.0, (2, 24)
#: Samples of a candidate before it is compared; it is stopped after the first if it is so much slower than the best,
#: and does not come into the final rounds if it is more than so much slower.
_FIRST_SAMPLES, _HOPELESS, _FINAL = 3, 1.5, 1.06
_FINAL_ROUNDS = 6
#: Problems whose kernels are compiled while one is timed.
_AHEAD = 12
#: What a compiler or a launch says where a kernel needs more than there is.
_RESOURCES = ("too much shared data", "too many resources", "out of resources", "OUT_OF_RESOURCES", "exceeds available")

#: Microseconds of other libraries for a problem, by engine, and their versions.
Peers = Callable[[Problem, Clock], tuple[Mapping[str, float], str]]


class WrongResultError(RuntimeError):
    """Candidates computed wrong values; the message names them. Their times are in no table."""


@dataclass(frozen=True)
class Tuned:
    """What tuning one problem gave."""

    problem: Problem
    winner: Candidate
    us: float
    #: microseconds of what the cost model chooses; None where it was not timed
    model_us: float | None
    timed: int
    skipped: int
    peers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Tuning:
    """What `tune` did; ``str`` of it is a sentence."""

    problems: tuple[Tuned, ...]
    #: problems that the mode left untuned
    missing: tuple[Problem, ...]
    seconds: float
    path: Path | None

    @property
    def timed(self) -> int:
        """Candidates that were timed."""
        return sum(each.timed for each in self.problems)

    def __str__(self) -> str:
        better = [each.model_us / each.us for each in self.problems if each.model_us]
        gain = f", {statistics.geometric_mean(better):.3f} times as fast as the cost model's choice" if better else ""
        text = f"{len(self.problems)} problems tuned{gain}: {self.timed} candidates timed in {self.seconds:.1f} s"
        text += f"; {self.path}" if self.path else ""
        return text + (f"; {len(self.missing)} problems are in no table" if self.missing else "")


def tune(
    problems: Iterable[Problem],
    *,
    device: str = "cuda",
    workspace_limit: int | None = None,
    path: Path | str | None = None,
    mode: str | None = None,
    again: bool = False,
    most: int = MOST,
    peers: bool | None = None,
    progress: bool = True,
) -> Tuning:
    """Time what could compute each problem on this GPU, and let ``auto`` take the quickest from now on.

    Candidates are the configurations of all algorithms whose predicted time is near the best. They are compiled side by
    side while others are timed, with inputs that are not in the cache; values are compared with an independent
    algorithm's. All times go into the table of this GPU model, after each problem, so that nothing is lost if it ends
    early, and what a table has already is not timed again. Of several processes that tune for one table, one does, and
    the others wait and read.

    Args:
        problems: ConvProblem and FilterProblem; equal ones count once, those without any image not at all.
        device: ``"cuda"`` or ``"cuda:N"``.
        workspace_limit: as the calls will give it (see `conv2d`).
        path: the folder of the table; by default the user's (LEANCONV_TUNING_DIR).
        mode: ``"on"``; ``"read-only"``, which writes no file and keeps the times for this process; ``"frozen"``, which
            times nothing and names what no table has. By default what LEANCONV_TUNING says.
        again: whether to time anew what a table has.
        most: candidates of a problem that are timed at most.
        peers: whether to time PyTorch's own convolution too, which `leanconv.torch.enable` compares with; by default
            where PyTorch has been imported and sees the GPU.
        progress: whether to show a progress bar; there is none where standard error is not a terminal.

    Returns:
        Tuning: each problem's winner with its time; ``str`` of it is a sentence.

    Raises:
        ValueError, TypeError: something is not a problem, or one that breaks a rule; TableError: the table is another
        GPU's, or a newer version's. NoAlgorithmError where nothing fits. CudaUnavailableError: no driver, GPU or
        compiler. CompileError, CudaError: a candidate fails otherwise than by running out of resources.
        WrongResultError, at the end: a candidate computed wrong values.

    >>> import leanconv
    >>> layer = leanconv.ConvProblem(8, 64, 56, 56, 64, 3, 3, padding=(1, 1, 1, 1))
    >>> print(leanconv.tune([layer]))  # doctest: +SKIP
    """
    mode = env.tuning_mode() if mode is None else arguments.one_of("mode", mode, env.TUNING_MODES)
    different = [each for each in dict.fromkeys(checked_problems(problems)) if not each.is_empty]
    index, limit = launch.device_index(device), arguments.workspace_limit(workspace_limit)
    on = launch.open_device(index)
    if not on.target.model:
        raise ValueError(f"{device!r} has no name, so there is no table for it")
    if mode in ("frozen", "off"):
        lacking = [p for p in different if not any(e.winner("auto", limit) for _, e in tables.known(p, on.target))]
        return Tuning((), tuple(lacking), 0.0, None)
    folder = tables.user_folder(path)
    with GpuClock.opened(index) as clock:
        search = Search(on, clock, folder, limit, mode == "on", again, most, _pytorch(peers))
        return search.run(different, progress)


def _pytorch(wanted: bool | None) -> Peers | None:
    """What times PyTorch. Raises ImportError where it is wanted and not installed."""
    if wanted is False or (wanted is None and "torch" not in sys.modules):
        return None
    from leanconv.torch import peer

    return lambda problem, clock: (peer.times(problem, clock), peer.versions())


class Search:
    """A run of `tune`: one device, one clock, one table."""

    def __init__(
        self, device: Device, clock: Clock, folder: Path, limit: int | None = None, write: bool = True,
        again: bool = False, most: int = MOST, peers: Peers | None = None,
    ) -> None:  # fmt: skip
        self._device, self._clock, self._target = device, clock, device.target
        self._path = folder / tables.file_name(device.target.model)
        self._folder, self._limit, self._write = folder, limit, write
        self._again, self._most, self._peers = again, most, peers
        self._wrong: list[str] = []
        self._warm = False

    def run(self, problems: Sequence[Problem], progress: bool = True) -> Tuning:
        """Tune every problem, in order."""
        begun = perf_counter()
        done: list[Tuned] = []
        with self._turn(), _Compiler(self._device) as compiler, progress_bar(len(problems), progress) as begin:
            self._table = self._known()
            works: deque[_Work] = deque()
            left = deque(problems)
            while left or works:
                while left and len(works) < _AHEAD:
                    problem = left.popleft()
                    works.append(_Work(self, problem, self._table.get(problem) or Entry(), compiler))
                work = works.popleft()
                begin(f"{words.format_problem(work.problem)}, {len(work.new)} candidates")
                done.append(self._tune(work))
        # calls that are ready were chosen before
        api.forget()
        if self._wrong:
            raise WrongResultError("wrong values, which are not chosen:\n" + "\n".join(self._wrong))
        return Tuning(tuple(done), (), perf_counter() - begun, self._path if self._write else None)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Of several processes one tunes; what it has found, the next finds in the table."""
        if not self._write:
            yield
            return
        from filelock import FileLock

        self._folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self._path}.tuning.lock"):
            yield

    def _known(self) -> Table:
        """The table as it is now; raises TableError for one that is not to be written."""
        empty = Table(tables.gpu_record(self._target))
        if not self._write:
            return tables.table_of(self._folder, self._target) or empty
        return tables.update(self._path, empty)

    def keep(self, problem: Problem, entry: Entry) -> None:
        """Put what is known of a problem into the table; where it cannot be written, warn and go on."""
        newer = Table(self._table.gpu, {words.format_problem(problem): entry})
        if self._write:
            try:
                self._table = tables.update(self._path, newer)
            except OSError as error:
                warnings.warn(f"times cannot be kept in {self._path}: {error}", RuntimeWarning, stacklevel=2)
                self._write = False
        if not self._write:
            self._table = self._table.merged(newer)
        tables.keep(self._folder, self._target, self._table)

    def _tune(self, work: _Work) -> Tuned:
        """Time what is new of a problem, and decide."""
        problem, entry = work.problem, work.entry
        if work.new:
            plans = [work.plans[id(each)] for each in (*work.new, *work.references)]
            with buffers(self._device, problem, plans, self._clock.cache_bytes) as arrays:
                entry = entry.merged(Entry(tuple(self._times(work, arrays))))
        if self._peers is not None and (work.new or not entry.peers):
            peers, versions = self._peers(problem, self._clock)
            entry = entry.merged(Entry(peers=peers, versions=versions))
        winner = self._winner(work, entry)
        entry = entry.merged(Entry(winners={tables.limit_key(self._limit): winner}))
        self.keep(problem, entry)
        by_key = {each.key: each for each in entry.timed}
        model = by_key.get(_key(work.candidates[0]))
        chosen = next((c for c in work.candidates if _key(c) == winner.key), work.candidates[0])
        times = [by_key[_key(each)].us for each in work.new]
        return Tuned(
            problem, replace(chosen, us=winner.us), winner.us or inf, model.us if model else None,
            len(times) - times.count(None), times.count(None), entry.peers,
        )  # fmt: skip

    def _winner(self, work: _Work, entry: Entry) -> Timed:
        """The quickest that today's kernels have, if it is enough quicker than what was chosen before."""
        able = [each for each in entry.timed if each.us is not None and self._is_current(work, each)]
        if not able:
            kind = WrongResultError if self._wrong else CudaError
            raise kind(f"no candidate is left for {words.format_problem(work.problem)}: {_reasons(entry)}")
        best = min(able, key=lambda each: each.us or inf)
        before = entry.winners.get(tables.limit_key(self._limit))
        keys = [before.key if before else None, _key(work.candidates[0])]
        incumbent = next((each for key in keys for each in able if each.key == key), None)
        assert best.us is not None
        if incumbent is not None and incumbent.us is not None and best.us > DISPLACES * incumbent.us:
            return incumbent
        return best

    def _is_current(self, work: _Work, timed: Timed) -> bool:
        return timed.fits(self._limit, auto=True) and (
            timed.key in work.keys
            or from_table(timed, work.problem, self._target, "auto", self._limit, tables.USER) is not None
        )

    def _times(self, work: _Work, arrays: Buffers) -> Iterator[Timed]:
        """Every new candidate of a problem, timed or with the reason why not."""
        check = _Check(self._device, work, arrays)
        running: dict[int, _Running] = {}
        best = inf
        for i, candidate in enumerate(work.new):
            try:
                # the cost model's choice is timed whatever it spills
                run = work.executable(candidate, spills=i == 0)
                error = check.error(candidate, run)
            except _Skipped as reason:
                yield work.timed(candidate, None, 0, str(reason))
                continue
            if error is not None:
                self._wrong.append(f"{words.format_problem(work.problem)}: {candidate.algorithm.name} {error}")
                yield work.timed(candidate, None, 0, f"wrong: {error}")
                continue
            each = running[i] = _Running(self._clock, arrays, run)
            if not self._warm:
                self._clock.warm_up(each.calls[0])
                self._warm = True
            each.sample()
            while len(each.samples) < _FIRST_SAMPLES and each.us <= _HOPELESS * best:
                each.sample()
            best = min(best, each.us)
        for _ in range(_FINAL_ROUNDS):
            for each in running.values():
                if each.us <= _FINAL * best:
                    each.sample()
            best = min((each.us for each in running.values()), default=inf)
        for i, each in running.items():
            yield work.timed(work.new[i], each.us, len(each.samples))


class _Skipped(Exception):
    """A candidate runs out of resources; the message says of which."""


class _Compiler:
    """Compiles launches on all cores but two, while others are timed; of those that are equal one."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(max(1, cores() - 2))
        self._futures: dict[str, Future[list[Compiled]]] = {}

    def __enter__(self) -> _Compiler:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def begin(self, plan: Plan) -> list[Future[list[Compiled]]]:
        """Compile the launches of a plan."""
        found = []
        for each in plan.every_launch:
            key = source(each)
            if key not in self._futures:
                self._futures[key] = self._pool.submit(self._device.compiled, Plan((each,)))
            found.append(self._futures[key])
        return found


class _Work:
    """A problem with its candidates, of which some are new, and their kernels."""

    def __init__(self, search: Search, problem: Problem, entry: Entry, compiler: _Compiler) -> None:
        self.problem, self.entry = problem, entry
        self._device, target = search._device, search._target
        self.candidates = candidates_of(problem, target, search._limit, search._most)
        self.plans: dict[int, Plan] = {id(each): each.plan(problem, target) for each in self.candidates}
        self.keys = {_key(each) for each in self.candidates}
        timed = {(each.key, each.kernels) for each in entry.timed}
        done = [] if search._again else [c for c in self.candidates if (_key(c), self._kernels(c)) in timed]
        self.new = [each for each in self.candidates if each not in done]
        self.references = independent(problem, target, self.new) if self.new and problem.kind == "conv2d" else []
        self.plans |= {id(each): each.plan(problem, target) for each in self.references}
        self._compiled = {id(each): compiler.begin(self.plans[id(each)]) for each in (*self.references, *self.new)}

    def _kernels(self, candidate: Candidate) -> str:
        return tables.kernels_of(self.plans[id(candidate)])

    def executable(self, candidate: Candidate, spills: bool = True) -> Executable:
        """The kernels of a candidate, loaded. Raises _Skipped where they need more than there is."""
        with _resources():
            spilled = sum(code.spill_bytes for each in self._compiled[id(candidate)] for code in each.result())
            if spilled and not spills:
                raise _Skipped(f"{spilled} bytes of registers spill")
            return self._device.executable(self.plans[id(candidate)], roles_of(self.problem))

    def timed(self, candidate: Candidate, us: float | None, runs: int, why: str = "") -> Timed:
        plan = self.plans[id(candidate)]
        return Timed(
            candidate.algorithm.name, _constants(candidate), self._kernels(candidate),
            None if us is None else float(f"{us:.5g}"), plan.workspace_bytes, plan.prepared_bytes, runs, why,
        )  # fmt: skip


class _Running:
    """A candidate that is timed."""

    def __init__(self, clock: Clock, arrays: Buffers, run: Executable) -> None:
        self._clock = clock
        self.samples: list[float] = []
        self.calls = arrays.calls(run, _CALLS[0])
        with _resources():
            first = max(clock.sample(self.calls), 0.5)
        self.calls = arrays.calls(run, min(max(ceil(_SAMPLE_US / first), _CALLS[0]), _CALLS[1]))

    def sample(self) -> None:
        self.samples.append(self._clock.sample(self.calls))

    @property
    def us(self) -> float:
        """The median so far."""
        return statistics.median(self.samples)


class _Check:
    """Compares the values of candidates with those of another algorithm."""

    def __init__(self, device: Device, work: _Work, arrays: Buffers) -> None:
        self._device, self._work, self._arrays = device, work, arrays
        self._wanted: dict[str, np.ndarray] = {}
        for reference in work.references:
            try:
                self._wanted[reference.algorithm.name] = arrays.result(work.executable(reference))
            except _Skipped:
                continue

    def error(self, candidate: Candidate, run: Executable) -> str | None:
        """What is wrong with a candidate's values; None where nothing is."""
        problem = self._work.problem
        with _resources():
            if problem.kind == "filter2d":
                got, wanted = self._filtered(candidate)
                by = "the CPU engine"
            else:
                got = self._arrays.result(run)
                names = [name for name in self._wanted if name != candidate.algorithm.name] or list(self._wanted)
                if not names:
                    return None
                by, wanted = names[0], self._wanted[names[0]]
        error, allowed = difference(got, wanted), tolerance(problem, terms_of(problem))
        return None if error <= allowed else f"differs from {by} by {error:.1e}, and {allowed:.1e} is allowed"

    def _filtered(self, candidate: Candidate) -> tuple[np.ndarray, np.ndarray]:
        """A filter's kernels take images of any size: those of a small one, here and on the CPU."""
        problem: Any = self._work.problem
        h, w = min(problem.h, 100), min(problem.w, 301)
        small = replace(problem, batch=1, h=h, w=w, x_pitch=w, x_step=h * w, y_pitch=w, y_step=h * w)
        plan = candidate.plan(small, self._device.target)
        with buffers(self._device, small, [plan], 0) as arrays:
            got = arrays.result(self._device.executable(plan, roles_of(small)))
        x, kernel = (
            np.resize(random_block(each.dtype, scale, i), each.shape)
            for i, (each, scale) in enumerate(zip(small.operands[:2], (1.0, terms_of(small) ** -0.5), strict=True))
        )
        engine = next(a for a in CPU_ALGORITHMS if a.solves == "filter2d" and not a.why_not(small, None))
        return got, np.asarray(engine.run(small, x, kernel), np.float64).ravel()


@contextmanager
def _resources() -> Iterator[None]:
    """Turns what is raised for want of resources into _Skipped; everything else stays what it is."""
    try:
        yield
    except OutOfMemoryError as error:
        raise _Skipped(str(error)) from error
    except (CompileError, CudaError) as error:
        said = [line for line in str(error).splitlines() if any(text in line for text in _RESOURCES)]
        if not said:
            raise
        raise _Skipped(said[0]) from error


def _constants(candidate: Candidate) -> dict[str, Any]:
    assert candidate.config is not None
    return dict(candidate.config.constants())


def _key(candidate: Candidate) -> tuple[Any, ...]:
    """As `Timed.key`."""
    return candidate.algorithm.name, *sorted(_constants(candidate).items())


def _reasons(entry: Entry) -> str:
    return "; ".join(dict.fromkeys(f"{each.algorithm}: {each.why}" for each in entry.timed if each.why))
