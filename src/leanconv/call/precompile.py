"""Compile before the first call: the kernels of many problems, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from leanconv import options, words
from leanconv.call import bind
from leanconv.call.choose import choose
from leanconv.call.explain import NOMINAL
from leanconv.call.resolve import check_problem
from leanconv.options import Kept
from leanconv.perf import tables
from leanconv.plan import Launch, Target
from leanconv.problem import Problem
from leanconv.runtime import bundle as bundles
from leanconv.runtime import cache, launch
from leanconv.runtime.compile import Compiled, cuda_version
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
    #: the bundle that they are in, and what it holds now; empty where they were loaded instead
    bundle: str = ""

    def __str__(self) -> str:
        where = f"in {self.bundle}" if self.bundle else "ready"
        ready = f"{self.kernels} kernels of {self.problems} problems are {where}"
        return f"{ready}: {self.compiled} compiled, {self.seconds:.2f} s on {cores()} cores"


def _may_stay_packed(problem: Problem) -> bool:
    return problem.kind == "conv2d" and problem.op == "fprop"


def precompile(
    problems: Iterable[Problem],
    *,
    device: str = "cuda",
    algorithm: str = "auto",
    workspace_limit: int | None = None,
    progress: bool = True,
    bundle: Path | str | None = None,
) -> PrecompileResult:
    """Compile and load the kernels of many problems, on all cores, so that the first calls do not wait for them.

    Without it, the first call with each shape compiles its kernels; those for tensor cores take longest.

    Args:
        problems: ConvProblem and FilterProblem, in any order and number; equal ones count once. A call finds its
            kernels if its shapes, layout, dtype, bias, activation and precision are those of the problem.
        device: ``"cuda"`` or ``"cuda:N"``.
        algorithm, workspace_limit: as the calls will give them (see `conv2d`).
        progress: whether to show a progress bar; there is none where standard error is not a terminal.
        bundle: a file to put the kernels in, instead of loading them, with your table of tuned problems of this GPU;
            what is there stays. A process that finds its path in LEANCONV_BUNDLE needs neither NVRTC nor a folder that
            it can write to. Without a GPU the kernels are those of an H200.

    Returns:
        PrecompileResult: how many kernels there are, how many of them were compiled, and how long it took.

    Raises:
        ValueError, TypeError: something is not a problem, or one that breaks a rule; NoAlgorithmError where nothing
        fits. CudaUnavailableError: no driver, GPU or compiler. CompileError: the compiler refused a kernel. With
        ``bundle``, ValueError for a file that is none or was made by another version; OSError.

    >>> import leanconv
    >>> layers = [leanconv.ConvProblem(8, 64, 56, 56, k, 3, 3, padding=(1, 1, 1, 1)) for k in (64, 128)]
    >>> leanconv.precompile(layers).problems  # doctest: +SKIP
    2
    """
    begun = perf_counter()
    if str(device) == "cpu":
        raise ValueError("device='cpu': kernels are compiled for GPUs only; give 'cuda' or 'cuda:N'")
    index, limit = options.device_index(device, gpu_only=True), options.limit_of(workspace_limit)
    different = list(dict.fromkeys(map(computed, checked_problems(problems))))
    path = None if bundle is None else _path(bundle)
    # where filters stay packed something else may run
    ways: tuple[Kept, ...] = ("", "same bits", "quickest")
    each_way = [(each, kept) for each in different for kept in (ways if _may_stay_packed(each) else ways[:1])]
    if path is None:
        on = _device(index)
        target, plans = on.target, [bind.load(each, index, algorithm, limit, kept).plan for each, kept in each_way]
    else:
        target = _target(index)
        plans = [choose(each, target, algorithm, limit, kept).plan(each, target) for each, kept in each_way]
    kernels = {cache.key(each, target.arch, ""): each for plan in plans for each in plan.all_launches if each.grid}
    before = len(cache.made)
    codes: dict[str, Compiled] = {}

    def make(name: str, each: Launch) -> None:
        if path is None:
            on.load(each)
        else:  # what a bundle in use has may be of another compiler
            codes[name] = cache.compiled(each, target.arch, bundled=False)

    with progress_bar(len(kernels), progress) as begin:
        begin(f"compiling {len(kernels)} kernels")
        work = [partial(make, *each) for each in kernels.items()]
        side_by_side(work, lambda: begin(f"compiling {len(kernels)} kernels"))
    compiled = sum(name in kernels for name in cache.made[before:])
    kept = ""
    if path is not None:
        kept = _bundled(path, target, {kernels[name]: code for name, code in codes.items()}, different)
    return PrecompileResult(len(different), len(kernels), compiled, perf_counter() - begun, kept)


def _path(bundle: Any) -> Path:
    try:
        path = Path(bundle)
    except TypeError:
        raise TypeError(f"bundle={bundle!r} is no path; give a str or a pathlib.Path") from None
    if "\0" in str(path):
        raise ValueError(f"bundle={bundle!r} has a null character, which no path may have")
    return path


def _device(index: int) -> launch.Device:
    try:
        return launch.open_device(index)
    except CudaUnavailableError as error:
        raise CudaUnavailableError(f"precompile needs the GPU that the kernels are for: {error}") from error


def _target(index: int) -> Target:
    try:
        return launch.open_device(index).target
    except CudaUnavailableError:
        return NOMINAL


def _bundled(path: Path, target: Target, kernels: dict[Launch, Compiled], problems: list[Problem]) -> str:
    """Put kernels in a bundle, and the table by which they were chosen; says where they are."""
    compiler = cache.compiler_version()
    keys = {cache.key(each, target.arch, compiler): code for each, code in kernels.items()}
    in_words = [words.format_problem(each) for each in problems]
    gpu = target.model or "a GPU", target.arch
    made = bundles.write(path, compiler, cuda_version(), keys, [gpu], in_words, tables.of_user(target))
    return f"{path}, which has {made}"


def bundle_of_folder(path: Path) -> bundles.Bundle:
    """Put all that the folder of compiled kernels has in a bundle: what a program called that ran with this folder.

    Raises CudaUnavailableError where NVRTC, whose version is part of the names, is not installed; ValueError where the
    folder is empty, and as `bundles.write`.
    """
    kernels, compiler, target = cache.stored(), cache.compiler_version(), _target(0)
    if not kernels:
        raise ValueError("the folder of compiled kernels is empty: run the program first, with LEANCONV_CACHE_DIR set")
    found = {code.arch for code in kernels.values()}
    gpus = [(target.model if arch == target.arch else "a GPU", arch) for arch in sorted(found)]
    return bundles.write(path, compiler, cuda_version(), kernels, gpus, (), tables.of_user(target))


def checked_problems(problems: Any, function: str = "precompile") -> Iterator[Problem]:
    """The problems that ``function`` is given.

    Raises TypeError for something else, ValueError for one that breaks a rule.
    """
    try:
        listed = None if isinstance(problems, (str, Problem)) else iter(problems)
    except TypeError:  # as of an array without axes, which is an Iterable by its type
        listed = None
    if listed is None:
        raise TypeError(
            f"problems is of type {type(problems).__name__}; give a list: leanconv.{function}([problem]). Suites are "
            f"for the command line: leanconv {function} resnet-50"
        )
    for i, problem in enumerate(listed):
        if not isinstance(problem, Problem):
            kind = type(problem).__name__
            raise TypeError(f"problems[{i}] is of type {kind}; it must be a ConvProblem or a FilterProblem")
        check_problem(problem)
        yield problem
