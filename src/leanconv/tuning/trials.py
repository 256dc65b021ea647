"""What is worth timing for a problem, and its candidates on their way: compiled, checked, timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import ceil, inf
from typing import TYPE_CHECKING, Any

import numpy as np

from leanconv.call.choose import Candidate, by_model, predicted, room
from leanconv.call.gpu_call import roles_of
from leanconv.cpu import CPU_ALGORITHMS
from leanconv.dtypes import DTYPES, is_integer
from leanconv.kernels import ALGORITHMS
from leanconv.perf import tables
from leanconv.perf.tables import Entry, Timed
from leanconv.plan import Plan, Target
from leanconv.problem import Problem
from leanconv.runtime.compile import Compiled, CompileError, source
from leanconv.runtime.driver import CudaError, OutOfMemoryError
from leanconv.runtime.launch import Device, Executable
from leanconv.runtime.threads import cores
from leanconv.runtime.timing import Clock
from leanconv.tuning.buffers import Buffers, buffers, difference, random_block, terms_of

#: Candidates of a problem, and how much longer than the quickest of all one may be predicted to take. Explored
#: (H200, 9e1bf5b): of 72 problems of ResNet-50, opencnn and image filters the winner was predicted to take 1.23 times
#: as long at most, and was at most the tenth. For 78 problems timed-candidates.json has times of candidates behind the
#: tenth, which in three of them are quicker, by 6 to 8 % (71b0507c). Sixteen are a third more to compile and to time.
MOST = 10
SLOWEST = 1.35
#: The best of each algorithm are timed up to this: models of two algorithms differ more than two times of one model.
OWN_BEST, SLOWEST_BEST = 2, 2.0


def candidates_of(problem: Problem, target: Target, limit: int | None, most: int = MOST) -> list[Candidate]:
    """The candidates of ``auto`` that are worth timing, the cost model's own choice first, then by predicted time.

    Raises NoAlgorithmError where nothing fits.
    """
    first = by_model(problem, target, "auto", limit)
    found: list[tuple[float, int, Candidate]] = []
    for algorithm in ALGORITHMS:
        if algorithm.by_name_only or algorithm.reasons(problem, target):
            continue
        space = room(algorithm, problem, "auto", limit)
        for place, (cost, config) in enumerate(predicted(algorithm, problem, target, space)):
            found.append((cost, place, Candidate(algorithm, (), config, cost)))
    quickest = min((cost for cost, _, _ in found), default=inf)
    found.sort(key=lambda each: each[0])
    chosen = [first]
    for cost, place, candidate in found:
        near = cost <= SLOWEST * quickest or (place < OWN_BEST and cost <= SLOWEST_BEST * quickest)
        if near and len(chosen) < most and _key(candidate) != _key(first):
            chosen.append(candidate)
    return chosen


def _key(candidate: Candidate) -> tuple[str, object]:
    return candidate.algorithm.stem, candidate.config


#: Those that share least with others, and run the most problems, come first.
_INDEPENDENT = ("direct", "direct_weight", "implicit_gemm", "implicit_gemm_weight", "im2win_fused", "depthwise_input")


def independent(problem: Problem, target: Target, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Algorithms in plain float32 whose results others are compared with; two where the first is among candidates, to
    compare it with the other.

    Image filters are compared with the CPU engine.
    """
    found = []
    able = {a.stem: a for a in ALGORITHMS if a.precision == "ieee" and not a.reasons(problem, target)}
    for name in dict.fromkeys((*(name for name in _INDEPENDENT if name in able), *able)):
        best = next(iter(able[name].within(problem, target, workspace=0)), None)
        if best is not None:
            found.append(Candidate(able[name], (), best[1], best[0]))
        if found and (len(found) == 2 or all(each.algorithm is not found[0].algorithm for each in candidates)):
            break
    return found


def tolerance(problem: Problem, terms: int) -> float:
    """By how much two results may differ, relative to their norm, in the precision of ``problem``; of sums of ``terms``
    products."""
    if problem.kind == "filter2d" and problem.result != problem.sums:
        # sums of another order may round to the neighbour
        rounding = 1e-2 if is_integer(problem.result) else 4 * DTYPES[problem.result].roundoff
        return 1e-5 + 8 * DTYPES["float32"].roundoff * terms**0.5 + rounding
    if is_integer(problem.dtype):
        return 0.0
    allowed = {"ieee": 0.0, "fp32": 0.0, "relaxed": 2e-4, "tf32": 4e-3}[problem.precision]
    rounding = 0.0 if problem.dtype == "float32" else 4 * DTYPES[problem.dtype].roundoff
    return 1e-5 + 8 * DTYPES["float32"].roundoff * terms**0.5 + allowed + rounding


if TYPE_CHECKING:
    from concurrent.futures import Future

#: Microseconds of a sample, and calls that it has at least and at most.
_SAMPLE_US, _CALLS = 300.0, (2, 24)
#: What a compiler or a launch says where a kernel needs more than there is.
_RESOURCES = ("too much shared data", "too many resources", "out of resources", "OUT_OF_RESOURCES", "exceeds available")


class Skipped(Exception):
    """A candidate runs out of resources; the message says of which."""


class Compiler:
    """Compiles launches on all cores but two, while others are timed; of those that are equal one."""

    def __init__(self, device: Device) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self._device = device
        self._pool = ThreadPoolExecutor(max(1, cores() - 2))
        self._futures: dict[str, Future[list[Compiled]]] = {}

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def begin(self, plan: Plan) -> list[Future[list[Compiled]]]:
        found = []
        for each in plan.every_launch:
            key = source(each)
            if key not in self._futures:
                self._futures[key] = self._pool.submit(self._device.compiled, Plan((each,)))
            found.append(self._futures[key])
        return found


class Work:
    """A problem with its candidates, of which some are new, and their kernels."""

    def __init__(
        self,
        problem: Problem,
        candidates: Sequence[Candidate],
        entry: Entry,
        device: Device,
        compiler: Compiler,
        again: bool = False,
    ) -> None:
        """``entry`` is what is known already, and not timed ``again``; what is new begins to be compiled."""
        self.problem, self.entry, self.candidates = problem, entry, candidates
        self._device, target = device, device.target
        self.plans: dict[int, Plan] = {id(each): each.plan(problem, target) for each in candidates}
        self.keys = {key_of(each) for each in candidates}
        known = {each.key: each for each in entry.timed}
        self.new = [
            each for each in candidates
            if again or not (timed := known.get(key_of(each))) or tables.changed(timed, self.plans[id(each)])
        ]  # fmt: skip
        self.references = independent(problem, target, self.new) if self.new and problem.kind == "conv2d" else []
        self.plans |= {id(each): each.plan(problem, target) for each in self.references}
        self._compiled = {id(each): compiler.begin(self.plans[id(each)]) for each in (*self.references, *self.new)}

    def executable(self, candidate: Candidate, spills: bool = True) -> Executable:
        """The kernels of a candidate, loaded. Raises Skipped where they need more than there is."""
        with resources():
            spilled = sum(code.spill_bytes for each in self._compiled[id(candidate)] for code in each.result())
            if spilled and not spills:
                raise Skipped(f"{spilled} bytes of registers spill")
            return self._device.executable(self.plans[id(candidate)], roles_of(self.problem))

    def timed(self, candidate: Candidate, us: float | None, runs: int, why: str = "") -> Timed:
        plan = self.plans[id(candidate)]
        return Timed(
            candidate.algorithm.stem, constants_of(candidate), None if us is None else float(f"{us:.5g}"),
            tables.kernels_of(plan), plan.workspace_bytes, plan.prepared_bytes, runs, why,
        )  # fmt: skip


class Running:
    """A candidate that is timed."""

    def __init__(self, clock: Clock, arrays: Buffers, run: Executable) -> None:
        self._clock = clock
        self.samples: list[float] = []
        self.calls = arrays.calls(run, _CALLS[0])
        with resources():
            first = max(clock.sample(self.calls), 0.5)
        self.calls = arrays.calls(run, min(max(ceil(_SAMPLE_US / first), _CALLS[0]), _CALLS[1]))

    def sample(self) -> None:
        self.samples.append(self._clock.sample(self.calls))

    @property
    def us(self) -> float:
        """The median so far."""
        from statistics import median

        return median(self.samples)


class Check:
    """Compares the values of candidates with those of another algorithm."""

    def __init__(self, device: Device, work: Work, arrays: Buffers) -> None:
        self._device, self._work, self._arrays = device, work, arrays
        self._wanted: dict[str, np.ndarray] = {}
        for reference in work.references:
            try:
                self._wanted[reference.algorithm.stem] = arrays.result(work.executable(reference))
            except Skipped:
                continue

    def error(self, candidate: Candidate, run: Executable) -> str | None:
        """What is wrong with a candidate's values; None where nothing is."""
        problem = self._work.problem
        with resources():
            if problem.kind == "filter2d":
                got, wanted = self._filtered(candidate)
                by = "the CPU engine"
            else:
                got = self._arrays.result(run)
                names = [name for name in self._wanted if name != candidate.algorithm.stem] or list(self._wanted)
                if not names:
                    return None
                by, wanted = names[0], self._wanted[names[0]]
        error, allowed = difference(got, wanted), tolerance(problem, terms_of(problem))
        return None if error <= allowed else f"differs from {by} by {error:.1e}, and {allowed:.1e} is allowed"

    def _filtered(self, candidate: Candidate) -> tuple[np.ndarray, np.ndarray]:
        """A filter's kernels take images of any size: those of a small one, here and on the CPU."""
        problem: Any = self._work.problem
        h, w = min(problem.h, 100), min(problem.w, 301)
        small = replace(problem, batch=1, h=h, w=w).dense()
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
def resources() -> Iterator[None]:
    """Turns what is raised for want of resources into Skipped; everything else stays what it is."""
    try:
        yield
    except OutOfMemoryError as error:
        raise Skipped(str(error)) from error
    except (CompileError, CudaError) as error:
        said = [line for line in str(error).splitlines() if any(text in line for text in _RESOURCES)]
        if not said:
            raise
        raise Skipped(said[0]) from error


def constants_of(candidate: Candidate) -> dict[str, Any]:
    assert candidate.config is not None
    return dict(candidate.config.constants())


def key_of(candidate: Candidate) -> tuple[Any, ...]:
    """As `Timed.key`."""
    return candidate.algorithm.stem, *sorted(constants_of(candidate).items())
