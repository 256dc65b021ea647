"""Compile before the first call: the kernels of many problems, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

from leanconv import options
from leanconv.call import bind
from leanconv.call.resolve import check_problem
from leanconv.problem import Problem, is_problem
from leanconv.runtime import cache, launch
from leanconv.runtime.driver import CudaUnavailableError
from leanconv.runtime.progress import progress as progress_bar
from leanconv.runtime.threads import cores, side_by_side
from leanconv.volumes.images import computed


@dataclass(frozen=True)
class PrecompileResult:
    """What `precompile` did; ``str`` of it is a sentence."""

    #: different problems, and different kernels that they need
    problems: int
    kernels: int
    #: how many of the kernels this process compiled; the others were on disk, loaded already, or another one's work
    compiled: int
    seconds: float

    def __str__(self) -> str:
        ready = f"{self.kernels} kernels of {self.problems} problems are ready"
        return f"{ready}: {self.compiled} compiled, {self.seconds:.2f} s on {cores()} cores"


def precompile(
    problems: Iterable[Problem],
    *,
    device: str = "cuda",
    algorithm: str = "auto",
    workspace_limit: int | None = None,
    progress: bool = True,
) -> PrecompileResult:
    """Compile and load the kernels of many problems, on all cores, so that the first calls do not wait for them.

    Without it, the first call with each shape compiles its kernels; those for tensor cores take longest.

    Args:
        problems: ConvProblem and FilterProblem, in any order and number; equal ones count once. A call finds its
            kernels if its shapes, layout, dtype, bias, activation and precision are those of the problem.
        device: ``"cuda"`` or ``"cuda:N"``.
        algorithm, workspace_limit: as the calls will give them (see `conv2d`).
        progress: whether to show a progress bar; there is none where standard error is not a terminal.

    Returns:
        PrecompileResult: how many kernels there are, how many of them were compiled, and how long it took.

    Raises:
        ValueError, TypeError: something is not a problem, or one that breaks a rule; NoAlgorithmError where nothing
        fits. CudaUnavailableError: no driver, GPU or compiler. CompileError: the compiler refused a kernel.

    >>> import leanconv
    >>> layers = [leanconv.ConvProblem(8, 64, 56, 56, k, 3, 3, padding=(1, 1, 1, 1)) for k in (64, 128)]
    >>> leanconv.precompile(layers).problems  # doctest: +SKIP
    2
    """
    begun = perf_counter()
    if str(device) == "cpu":
        raise ValueError("device='cpu': kernels are compiled for GPUs only; give 'cuda' or 'cuda:N'")
    index, limit = options.device_index(device), options.limit_of(workspace_limit)
    different = list(dict.fromkeys(map(computed, checked_problems(problems))))
    on = _device(index)
    chosen = [bind.load(problem, index, algorithm, limit) for problem in different]
    needed = [each for loaded in chosen for each in loaded.plan.all_launches if each.grid]
    kernels = {cache.key(each, on.target.arch): each for each in needed}
    before = len(cache.made)
    with progress_bar(len(kernels), progress) as begin:
        begin(f"compiling {len(kernels)} kernels")
        work = [partial(on.load, each) for each in kernels.values()]
        side_by_side(work, lambda: begin(f"compiling {len(kernels)} kernels"))
    compiled = sum(name in kernels for name in cache.made[before:])
    return PrecompileResult(len(different), len(kernels), compiled, perf_counter() - begun)


def _device(index: int) -> launch.Device:
    try:
        return launch.open_device(index)
    except CudaUnavailableError as error:
        raise CudaUnavailableError(f"precompile needs the GPU that the kernels are for: {error}") from error


def checked_problems(problems: Any, function: str = "precompile") -> Iterator[Problem]:
    """The problems that ``function`` is given.

    Raises TypeError for something else, ValueError for one that breaks a rule.
    """
    if isinstance(problems, str) or is_problem(problems) or not isinstance(problems, Iterable):
        raise TypeError(
            f"problems is of type {type(problems).__name__}; give a list: leanconv.{function}([problem]). Suites are "
            f"for the command line: leanconv {function} resnet-50"
        )
    for i, problem in enumerate(problems):
        if not is_problem(problem):
            kind = type(problem).__name__
            raise TypeError(f"problems[{i}] is of type {kind}; it must be a ConvProblem or a FilterProblem")
        check_problem(problem)
        yield problem
