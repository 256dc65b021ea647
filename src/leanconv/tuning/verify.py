"""Whether tables still hold: their winners are today's, compute right values, and take the time that they took."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from leanconv import words
from leanconv.call.choose import Candidate, untimed
from leanconv.call.explain import NOMINAL
from leanconv.perf import tables
from leanconv.perf.tables import NO_LIMIT, SHIPPED_TABLE, Entry, Table, Timed
from leanconv.plan import Plan, Target
from leanconv.runtime import cache, launch
from leanconv.runtime.launch import Device
from leanconv.runtime.threads import cores
from leanconv.runtime.timing import Clock
from leanconv.tuning.buffers import buffers
from leanconv.tuning.trials import Check, Compiler, Running, Work

#: Samples of a winner.
_SAMPLES = 5


@dataclass(frozen=True)
class Verdict:
    """What became of one winner of a table."""

    problem: str
    winner: Timed
    #: why it is none any more, or what is wrong with its values; empty where it holds
    why: str = ""
    wrong: bool = False
    #: microseconds now; None where it was not timed
    us: float | None = None


def winners(table: Table) -> Iterator[tuple[str, int | None, Timed]]:
    """Every problem's winners, with the limit of workspace that each is for."""
    for key in table:
        entry = table.get(key)
        for limit, winner in () if entry is None else entry.winners.items():
            yield key, None if limit == NO_LIMIT else int(limit), winner


def todays(key: str, limit: int | None, winner: Timed, target: Target, source: str) -> Candidate | str:
    """A winner as one of today's candidates, or why it is none. Kernels of a shipped table are not looked at."""
    try:
        problem = words.parse_problem(key)
    except ValueError as error:
        return str(error)
    candidate = untimed(winner, problem, target, "auto", limit)
    if candidate is None:
        return "it can no longer run, or is no configuration any more"
    names = [] if source == SHIPPED_TABLE else tables.changed(winner, candidate.plan(problem, target))
    return f"kernels have changed: {', '.join(names)}" if names else candidate


def target_of(table: Table) -> Target | None:
    """The GPU that a table is for, where this machine can tell: its first one, or an H200."""
    targets = [NOMINAL] if launch.why_no_gpu() else [NOMINAL, launch.open_device(0).target]
    return next((target for target in targets if tables.gpu_record(target) == table.gpu), None)


def holding(table: Table, source: str) -> str:
    """How many of a table's winners hold as far as `todays` looks, in words; nothing where this machine cannot tell."""
    target = target_of(table)
    if target is None:
        return ""
    held = [not verdict.why for verdict in verify(table, target, source)]
    seen = "can run" if source == SHIPPED_TABLE else "are of today's kernels"
    return f"{sum(held)} of {len(held)} entries {seen}"


def code_of(plan: Plan, arch: str) -> str:
    """A hash of the machine code of a plan's launches; compiles what is not on disk."""
    codes = [cache.compiled(launch, arch).code for launch in plan.every_launch]
    return hashlib.sha256("".join(codes).encode()).hexdigest()[:16]


def verify_code(table: Table, target: Target, every: int = 1) -> Iterator[Verdict]:
    """Compare the machine code of every winner of a shipped table, or of ``every`` so many, with what was timed.

    Raises ValueError where the compiler is another one than that of the table.
    """
    if table.compiler != cache.compiler_version():
        raise ValueError(f"the table has machine code of {table.compiler}, and this is {cache.compiler_version()}")

    def verdict(found: tuple[str, int | None, Timed]) -> Verdict:
        key, limit, winner = found
        candidate = todays(key, limit, winner, target, SHIPPED_TABLE)
        if isinstance(candidate, str):
            return Verdict(key, winner, candidate)
        same = code_of(candidate.plan(words.parse_problem(key), target), target.arch) == winner.code
        return Verdict(key, winner, "" if same else "its machine code has changed")

    with ThreadPoolExecutor(cores()) as pool:
        yield from pool.map(verdict, list(winners(table))[::every])


def verify(
    table: Table, target: Target, source: str, device: Device | None = None, clock: Clock | None = None
) -> Iterator[Verdict]:
    """Check every winner; on a ``device`` also its values, by another algorithm, and its time."""
    if device is None or clock is None:
        for key, limit, winner in winners(table):
            found = todays(key, limit, winner, target, source)
            yield Verdict(key, winner, found if isinstance(found, str) else "")
        return
    with Compiler(device) as compiler:
        works: list[tuple[str, Timed, Work | str]] = []
        for key, limit, winner in winners(table):
            found = todays(key, limit, winner, target, source)
            if isinstance(found, str):
                works.append((key, winner, found))
            else:
                works.append((key, winner, Work(words.parse_problem(key), [found], Entry(), device, compiler)))
        for key, winner, work in works:
            yield Verdict(key, winner, work) if isinstance(work, str) else _verdict(key, winner, work, device, clock)


def _verdict(key: str, winner: Timed, work: Work, device: Device, clock: Clock) -> Verdict:
    (candidate,) = work.new
    plans = [work.plans[id(each)] for each in (candidate, *work.references)]
    with buffers(device, work.problem, plans, clock.cache_bytes) as arrays:
        run = work.executable(candidate)
        error = Check(device, work, arrays).error(candidate, run)
        if error is not None:
            return Verdict(key, winner, error, wrong=True)
        running = Running(clock, arrays, run)
        for _ in range(_SAMPLES):
            running.sample()
        return Verdict(key, winner, us=running.us)


def files(folder: Path | None = None) -> Iterator[tuple[str, Path]]:
    """Every table there is: whose it is, and its file."""
    places = tables.folders() if folder is None else [(tables.USER, folder)]
    for source, place in places:
        for path in sorted(place.glob("*/winners.json" if source == SHIPPED_TABLE else "*.json")):
            yield source, path
