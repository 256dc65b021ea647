"""A GPU with a clock of its own, on which candidates take what a test says: tuning without a GPU."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leanconv.call.choose import Candidate
from leanconv.perf import tables
from leanconv.plan import Launch, Plan
from leanconv.problem import ConvProblem, Problem
from leanconv.runtime import launch
from leanconv.runtime.compile import Compiled
from leanconv.tuning import search
from leanconv.tuning.search import Search
from leanconv.tuning.trials import candidates_of
from tests.stand_ins import HostDevice

MODEL = "NVIDIA Stand-in"
LAYER = ConvProblem(1, 4, 6, 6, 8, 3, 3, padding=(1, 1, 1, 1))
LAYERS = tuple(replace(LAYER, k=k) for k in (8, 16, 24))


class Stage:
    """The device as a `Clock`: launching a plan moves its hands by ``times(plan)``, 300 µs by default."""

    cache_bytes = 0

    def __init__(self, device: HostDevice) -> None:
        device.target = replace(device.target, model=MODEL)
        self.device, self.target = device, device.target
        self.now = 0.0
        self.times: Callable[[Plan], float] = lambda plan: 300.0
        #: what compiling a launch raises, and what a plan's result is multiplied with
        self.fails: Callable[[Launch], Exception | None] = lambda launch: None
        self.factor: Callable[[Plan], float] = lambda plan: 1.0
        self.started: list[Plan] = []
        self._executable, self._compiled = device.executable, device.compiled
        device.executable = self.executable  # type: ignore[method-assign]
        device.compiled = self.compiled  # type: ignore[method-assign]
        self._lock = threading.Lock()

    def executable(self, plan: Plan, roles: Sequence[str]) -> launch.Executable:
        with self._lock:
            run = self._executable(plan, roles)
        self.started.append(plan)
        ran = False

        def timed(stream: int, values: Sequence[float]) -> None:
            """The first run computes, and is what a test may look at; the others take their time."""
            nonlocal ran
            with self._lock:
                self.now += self.times(plan)
                if ran:
                    return
                ran = True
                run(stream, values)
                factor = self.factor(plan)
                if factor != 1.0:
                    at = int(values[list(roles).index(plan.outputs[0])])
                    ctypes.c_float.from_address(at).value *= factor

        return timed

    def compiled(self, plan: Plan) -> list[Compiled]:
        """Of one launch, as the tuner compiles them."""
        error = self.fails(plan.launches[0])
        if error is not None:
            raise error
        return self._compiled(plan)

    def warm_up(self, call: Callable[[], Any]) -> None:
        call()

    def sample(self, calls: Sequence[Callable[[], Any]]) -> float:
        before = self.now
        for call in calls:
            call()
        return (self.now - before) / len(calls)

    def candidates(self, problem: Problem = LAYER, most: int = 4) -> list[Candidate]:
        return candidates_of(problem, self.target, None, most)

    def plan(self, candidate: Candidate, problem: Problem = LAYER) -> Plan:
        return candidate.plan(problem, self.target)

    def search(self, folder: Path, **how: Any) -> Search:
        return Search(self.device, self, folder, **({"most": 4} | how))


@pytest.fixture
def stage(host_device: HostDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Stage]:
    """The user's tables are in ``tmp_path``, and no table is shipped."""
    monkeypatch.setenv("LEANCONV_TUNING_DIR", str(tmp_path))
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")
    made = Stage(host_device)

    @contextmanager
    def opened(index: int) -> Iterator[Stage]:
        yield made

    monkeypatch.setattr(search.GpuClock, "opened", opened)
    tables.forget()
    yield made
    tables.forget()
