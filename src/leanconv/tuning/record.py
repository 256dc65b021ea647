"""The recorder: problems of calls that no table has, timed afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from leanconv import options
from leanconv.call import bind, lookup
from leanconv.perf import tables
from leanconv.problem import Problem
from leanconv.runtime import env
from leanconv.tuning.search import TuningResult, is_tuned, tune


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
    mode = env.tuning_mode() if mode is None else options.one_of("mode", mode, env.TUNING_MODES)
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
