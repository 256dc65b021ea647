"""One problem's candidates on their way: compiled, checked, timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from leanconv.call.choose import Candidate
from leanconv.call.gpu_call import roles_of
from leanconv.cpu import CPU_ALGORITHMS
from leanconv.perf import tables
from leanconv.perf.tables import Entry, Timed
from leanconv.plan import Plan
from leanconv.problem import Problem
from leanconv.runtime.compile import Compiled, CompileError, source
from leanconv.runtime.driver import CudaError, OutOfMemoryError
from leanconv.runtime.launch import Device, Executable
from leanconv.runtime.threads import cores
from leanconv.runtime.timing import Clock
from leanconv.tuning.buffers import Buffers, buffers, difference, random_block, terms_of
from leanconv.tuning.candidates import independent, tolerance

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
    return candidate.algorithm.name, *sorted(constants_of(candidate).items())
