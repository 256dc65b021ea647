"""The search: time the candidates of problems, check their values, keep all times in a table; and the recorder of
problems of calls that no table has, which are timed afterwards."""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from time import perf_counter

from leanconv import options, words
from leanconv.call import bind, lookup
from leanconv.call.choose import Candidate, from_table
from leanconv.call.precompile import checked_problems
from leanconv.perf import tables
from leanconv.perf.tables import Entry, Table, Timed
from leanconv.problem import Problem
from leanconv.runtime import env, launch
from leanconv.runtime.driver import CudaError
from leanconv.runtime.errors import LeanconvError
from leanconv.runtime.launch import Device
from leanconv.runtime.progress import progress as progress_bar
from leanconv.runtime.timing import Clock, GpuClock
from leanconv.tuning.buffers import Buffers, buffers
from leanconv.tuning.trials import MOST, Check, Compiler, Running, Skipped, Work, candidates_of, key_of
from leanconv.volumes.images import computed

#: A winner is this much quicker than what was chosen before, which keeps its place otherwise.
DISPLACES = 0.98
#: Samples of a candidate before it is compared; it is stopped after the first if it is so much slower than the best,
#: and does not come into the final rounds if it is more than so much slower.
_FIRST_SAMPLES, _HOPELESS, _FINAL = 3, 1.5, 1.06
_FINAL_ROUNDS = 6
#: A candidate that was so much slower than the best is not timed again when its kernels have changed.
_OUTDATED = 1.25
#: Seconds that a thread that compiles may keep the interpreter from the one that times; Python's default is longer.
_SWITCH_S = 3e-4
#: Problems whose kernels are compiled while one is timed.
_AHEAD = 12

#: Microseconds of other libraries for a problem, by engine, and their versions.
Peers = Callable[[Problem, Clock], tuple[Mapping[str, float], str]]


class WrongResultError(LeanconvError, RuntimeError):
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
class TuningResult:
    """What `tune` did; ``str`` of it is a sentence."""

    problems: tuple[Tuned, ...]
    #: problems that the mode, or the time, left untuned
    missing: tuple[Problem, ...]
    seconds: float
    path: Path | None

    @property
    def timed(self) -> int:
        return sum(each.timed for each in self.problems)

    def __str__(self) -> str:
        from statistics import geometric_mean

        better = [each.model_us / each.us for each in self.problems if each.model_us]
        gain = f", {geometric_mean(better):.3f} times as fast as the cost model's choice" if better else ""
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
    seconds: float | None = None,
    progress: bool = True,
) -> TuningResult:
    """Time what could compute each problem on this GPU, and let ``auto`` take the quickest from now on.

    Candidates are the configurations of all algorithms whose predicted time is near the best. They are compiled side by
    side while others are timed, with inputs that are not in the cache; values are compared with an independent
    algorithm's. All times go into the table of this GPU model, after each problem, so that nothing is lost if it ends
    early, and what a table has already is not timed again. Of several processes that tune for one table, one does, and
    the others wait and read.

    Args:
        problems: ConvProblem and FilterProblem; equal ones count once, those without any image or with
            ``batch_invariant`` not at all.
        device: ``"cuda"`` or ``"cuda:N"``.
        workspace_limit: as the calls will give it (see `conv2d`).
        path: the folder of the table; by default the user's (LEANCONV_TUNING_DIR).
        mode: ``"on"``; ``"read-only"``, which writes no file and keeps the times for this process; ``"frozen"``, which
            times nothing and names what no table has. By default what LEANCONV_TUNING says.
        again: whether to time anew what a table has.
        most: candidates of a problem that are timed at most.
        peers: whether to time PyTorch's own convolution too, which `leanconv.torch.enable` compares with; by default
            where PyTorch has been imported and sees the GPU.
        seconds: begin no further problem after this time; those that are left are ``missing`` in the result.
        progress: whether to show a progress bar; there is none where standard error is not a terminal.

    Returns:
        TuningResult: each problem's winner with its time; ``str`` of it is a sentence.

    Raises:
        ValueError, TypeError: something is not a problem, or one that breaks a rule; TableError: the table is another
        GPU's, or a newer version's. NoAlgorithmError where nothing fits. CudaUnavailableError: no driver, GPU or
        compiler. CompileError, CudaError: a candidate fails otherwise than by running out of resources.
        WrongResultError, at the end: a candidate computed wrong values.

    >>> import leanconv
    >>> layer = leanconv.ConvProblem(8, 64, 56, 56, 64, 3, 3, padding=(1, 1, 1, 1))
    >>> print(leanconv.tune([layer]))  # doctest: +SKIP
    """
    mode = env.tuning_mode() if mode is None else options.one_of("mode", mode, env.CALL_MODES)
    different = [*dict.fromkeys(tables.as_timed(each) for each in checked_problems(problems, "tune") if is_tuned(each))]
    index, limit = options.device_index(device, gpu_only=True), options.limit_of(workspace_limit)
    if seconds is not None and not options.number("seconds", seconds) >= 0:
        raise ValueError(f"seconds={seconds!r} is less than 0")
    on = launch.open_device(index)
    if not on.target.model:
        raise ValueError(f"{device!r} has no name, so there is no table for it")
    if mode in ("frozen", "off"):
        lacking = [p for p in different if not any(e.winner(limit) for _, e in tables.known(computed(p), on.target))]
        return TuningResult((), tuple(lacking), 0.0, None)
    folder = tables.user_folder(path)
    with GpuClock.opened(index) as clock:
        search = Search(on, clock, folder, limit, mode == "on", again, most, _pytorch(peers))
        return search.run(different, progress, seconds)


def is_tuned(problem: Problem) -> bool:
    """Whether times decide: not where there is nothing to compute, or one choice is for all batches."""
    return not (problem.is_empty or problem.batch_invariant)


def _pytorch(wanted: bool | None) -> Peers | None:
    """What times PyTorch. Raises ImportError where it is requested and not installed."""
    if wanted is False or (wanted is None and "torch" not in sys.modules):
        return None
    from leanconv.torch import measured_time

    return lambda problem, clock: (measured_time.times(problem, clock), measured_time.versions())


class Search:
    """A run of `tune`: one device, one clock, one table."""

    def __init__(
        self, device: Device, clock: Clock, folder: Path, limit: int | None = None, write: bool = True,
        again: bool = False, most: int = MOST, peers: Peers | None = None,
    ) -> None:  # fmt: skip
        self._device, self._clock, self._target = device, clock, device.target
        self._path = tables.path_of(folder, device.target.model)
        self._folder, self._limit, self._write = folder, limit, write
        self._again, self._most, self._peers = again, most, peers
        self._wrong: list[str] = []
        self._warm = False
        #: by what computes them, the problems that other libraries compute
        self._given: dict[Problem, list[Problem]] = {}

    def run(self, problems: Sequence[Problem], progress: bool = True, seconds: float | None = None) -> TuningResult:
        """Tune what computes every problem, in order, or those that can be begun in so many seconds."""
        for each in problems:
            self._given.setdefault(computed(each), []).append(each)
        problems = [*self._given]
        begun, interval = perf_counter(), sys.getswitchinterval()
        done: list[Tuned] = []
        missing: tuple[Problem, ...] = ()
        sys.setswitchinterval(_SWITCH_S)
        try:
            with self._turn(), Compiler(self._device) as compiler, progress_bar(len(problems), progress) as begin:
                self._table = self._known()
                works: deque[Work] = deque()
                left = deque(problems)
                while left or works:
                    if seconds is not None and perf_counter() - begun > seconds:
                        missing = (*(work.problem for work in works), *left)
                        break
                    while left and len(works) < _AHEAD:
                        works.append(self._work(left.popleft(), compiler))
                    work = works.popleft()
                    begin(f"{words.format_problem(work.problem)}, {len(work.new)} candidates")
                    done.append(self._tune(work))
        finally:
            sys.setswitchinterval(interval)
            # calls that are ready were chosen before
            lookup.forget()
        if self._wrong:
            raise WrongResultError("wrong values, which are not chosen:\n" + "\n".join(self._wrong))
        return TuningResult(tuple(done), missing, perf_counter() - begun, self._path if self._write else None)

    def _work(self, problem: Problem, compiler: Compiler) -> Work:
        entry = self._table.get(problem) or Entry()
        first, *others = candidates_of(problem, self._target, self._limit, self._most)
        if not self._again:
            # what was far behind with other kernels is not timed with these
            fitting = (each for each in entry.timed if each.fits(self._limit, auto=problem.kind == "conv2d"))
            times = {each.key: each.us for each in fitting if each.us is not None}
            most = _OUTDATED * min(times.values(), default=inf)
            others = [each for each in others if times.get(key_of(each), 0.0) <= most]
        return Work(problem, [first, *others], entry, self._device, compiler, self._again)

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
            with suppress(ValueError):  # a damaged line
                return empty.merged(tables.table_of(self._folder, self._target) or empty)
            return empty
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

    def _tune(self, work: Work) -> Tuned:
        """Time what is new of a problem, and decide."""
        problem, entry = work.problem, work.entry
        if work.new:
            plans = [work.plans[id(each)] for each in (*work.new, *work.references)]
            with buffers(self._device, problem, plans, self._clock.cache_bytes) as arrays:
                entry = entry.merged(Entry(tuple(self._times(work, arrays))))
        peers = entry.peers
        if self._peers is not None:
            entry, peers = self._with_peers(self._peers, problem, entry)
        winner = self._winner(work, entry)
        entry = entry.merged(Entry(winners={tables.limit_key(self._limit): winner}))
        self.keep(problem, entry)
        by_key = {each.key: each for each in entry.timed}
        model = by_key.get(key_of(work.candidates[0]))
        chosen = from_table(winner, problem, self._target, "auto", self._limit, tables.USER) or work.candidates[0]
        times = [by_key[key_of(each)].us for each in work.new]
        return Tuned(
            problem, replace(chosen, us=winner.us), winner.us or inf, model.us if model else None,
            len(times) - times.count(None), times.count(None), peers,
        )  # fmt: skip

    def _with_peers(self, time: Peers, problem: Problem, entry: Entry) -> tuple[Entry, Mapping[str, float]]:
        """What is known of a problem, with the times of other libraries; and these of the problem that was given. One
        of volumes that is computed as images keeps them in an entry of its own."""
        found: list[Mapping[str, float]] = []
        for given in self._given[problem]:
            known = entry if given == problem else self._table.get(given) or Entry()
            if self._again or not known.peers:
                peers, versions = time(given, self._clock)
                known = known.merged(Entry(peers=peers, versions=versions))
                if given != problem:
                    self.keep(given, known)
            if given == problem:
                entry = known
            found.append(known.peers)
        return entry, found[0]

    def _winner(self, work: Work, entry: Entry) -> Timed:
        """The quickest that today's kernels have, if it is enough quicker than what was chosen before."""
        able = [each for each in entry.timed if each.us is not None and self._is_current(work, each)]
        if not able:
            kind = WrongResultError if self._wrong else CudaError
            reasons = dict.fromkeys(f"{each.algorithm}: {each.why}" for each in entry.timed if each.why)
            raise kind(f"no candidate is left for {words.format_problem(work.problem)}: {'; '.join(reasons)}")
        best = min(able, key=lambda each: each.us or inf)
        before = entry.winners.get(tables.limit_key(self._limit))
        keys = [before.key if before else None, key_of(work.candidates[0])]
        incumbent = next((each for key in keys for each in able if each.key == key), None)
        assert best.us is not None
        if incumbent is not None and incumbent.us is not None and best.us > DISPLACES * incumbent.us:
            return incumbent
        return best

    def _is_current(self, work: Work, timed: Timed) -> bool:
        return timed.fits(self._limit, auto=work.problem.kind == "conv2d") and (
            timed.key in work.keys
            or from_table(timed, work.problem, self._target, "auto", self._limit, tables.USER) is not None
        )

    def _times(self, work: Work, arrays: Buffers) -> Iterator[Timed]:
        """Every new candidate of a problem, timed or with the reason why not."""
        check = Check(self._device, work, arrays)
        running: dict[int, Running] = {}
        best = inf
        for i, candidate in enumerate(work.new):
            try:
                # the cost model's choice is timed whatever it spills
                run = work.executable(candidate, spills=i == 0)
                error = check.error(candidate, run)
            except Skipped as reason:
                yield work.timed(candidate, None, 0, str(reason))
                continue
            if error is not None:
                self._wrong.append(f"{words.format_problem(work.problem)}: {candidate.algorithm.name} {error}")
                yield work.timed(candidate, None, 0, f"wrong: {error}")
                continue
            each = running[i] = Running(self._clock, arrays, run)
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


@dataclass
class Recording:
    """What `record_tuning` gives: the problems so far and, after the block, what tuning them gave."""

    #: problem, number of its GPU, limit of workspace; in the order of their first calls
    met: dict[tuple[Problem, int, int | None], None] = field(default_factory=dict)
    #: one for each GPU and limit
    results: list[TuningResult] = field(default_factory=list)

    @property
    def problems(self) -> tuple[Problem, ...]:
        return tuple(dict.fromkeys(problem for problem, _, _ in self.met))

    def __call__(self, problem: Problem, index: int, algorithm: str, limit: int | None) -> None:
        """A call on a GPU was bound."""
        if algorithm == "auto" and is_tuned(problem):
            self.met[problem, index, limit] = None


@contextmanager
def record_tuning(
    path: Path | str | None = None, *, mode: str | None = None, peers: bool | None = None, progress: bool = True
) -> Iterator[Recording]:
    """Record the problem of every call on a GPU in this block, and time afterwards those that no table has.

    Nothing is timed inside a call. At the end of the block `tune` times what is new, for each GPU and each limit of
    workspace of the calls. Calls after the block choose by the table. An exception ends the block without timing.

    Args:
        path: the folder of the tables, which this process reads first from now on; by default the user's.
        mode, peers, progress: as for `tune`. In mode ``"frozen"`` nothing is timed, so a program may keep the block for
            good.

    Yields:
        Recording: ``problems``, and after the block ``results``.

    Raises:
        What `tune` raises, at the end.

    >>> import leanconv
    >>> with leanconv.record_tuning() as recorded:  # doctest: +SKIP
    ...     model(images)
    >>> print(*recorded.results)  # doctest: +SKIP
    """
    mode = env.tuning_mode() if mode is None else options.one_of("mode", mode, env.CALL_MODES)
    if path is not None:
        tables.use(Path(path))
    recorded = Recording()
    # ready calls are bound again, from what is compiled, so that they are recorded
    lookup.forget()
    bind.listeners.append(recorded)
    try:
        yield recorded
    finally:
        bind.listeners.remove(recorded)
    groups: dict[tuple[int, int | None], list[Problem]] = {}
    for problem, index, limit in recorded.met:
        groups.setdefault((index, limit), []).append(problem)
    for (index, limit), problems in groups.items():
        recorded.results.append(
            tune(
                problems,
                device=f"cuda:{index}",
                workspace_limit=limit,
                path=path,
                mode=mode,
                peers=peers,
                progress=progress,
            )
        )
