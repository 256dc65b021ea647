"""leanconv's own algorithms: on the GPU those of the registry, without one those that run on NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from typing import Any

import leanconv
from leanconv.bench.operands import Operands, as_nchw
from leanconv.bench.peers.base import Candidate, Peer, Unable
from leanconv.bench.results import AUTO, AUTO_ENGINE, key_of
from leanconv.call import bind
from leanconv.call.choose import Candidate as Choice
from leanconv.call.choose import NoAlgorithmError, choose, consider
from leanconv.call.gpu_call import Loaded
from leanconv.call.resolve import resolve
from leanconv.cpu import CPU_ALGORITHMS
from leanconv.images.api import run
from leanconv.kernels import ALGORITHMS
from leanconv.kernels.contract import Algorithm, CpuAlgorithm, GpuAlgorithm
from leanconv.options import LAYOUTS, LAYOUTS_OF, Layout, filter_options
from leanconv.plan import Launch, Plan
from leanconv.problem import ConvProblem, Problem
from leanconv.runtime import cache, launch
from leanconv.runtime.threads import side_by_side
from leanconv.volumes.images import computed


class LeanconvPeer(Peer):
    """What a call without ``algorithm=`` picks, as ``leanconv:auto``, then every algorithm that can run the problem.

    Each has the configuration that a user's call gets.

    One that packs the filters first runs twice: as ``leanconv``, packing them in each call, and as
    ``leanconv:prepared``, given filters of `prepare_weights`.
    """

    name = "leanconv"
    engines = ("leanconv", "leanconv:prepared", AUTO_ENGINE)
    solves = ("conv2d", "filter2d")
    volumes = True
    needs_gpu = False

    def __init__(self, algorithms: Sequence[str] = (), picked_alone: bool = False) -> None:
        """``algorithms`` are patterns of the names that take part; all do where there is none. With ``picked_alone``
        a GPU runs and compiles what a call picks, and nothing else."""
        self._patterns, self._picked_alone = algorithms, picked_alone

    def absent(self) -> str | None:
        return None

    def _algorithms(self, gpu: bool) -> list[Algorithm]:
        known: Sequence[Algorithm] = ALGORITHMS if gpu else CPU_ALGORITHMS
        chosen = [a for a in known if not self._patterns or any(fnmatchcase(a.stem, p) for p in self._patterns)]
        if not chosen:
            names = ", ".join(algorithm.stem for algorithm in known)
            where = "" if gpu else " that run on the CPU; there is no GPU that can be used (`leanconv doctor` says why)"
            raise ValueError(f"algorithms={','.join(self._patterns)!r} matches none of {names}{where}")
        return [] if gpu and self._picked_alone else chosen

    def prepare(self, problems: Sequence[Problem], gpu: bool) -> None:
        """Compile the kernels of all problems, on every core; one after another would take longer than their timing."""
        algorithms, problems = self._algorithms(gpu), [computed(each) for each in problems]
        if gpu:
            compile_ahead(chain(_picked(problems), _plans(algorithms, problems)))

    def candidates(self, problem: Problem, operands: Operands, gpu: bool) -> Iterator[Candidate | Unable]:
        problem = computed(problem)
        if gpu:
            yield from _auto(problem, operands)
        for algorithm in self._algorithms(gpu):
            if problem.kind != algorithm.solves:
                continue
            reasons = algorithm.reasons(problem, launch.open_device(0).target if gpu else None)
            if reasons:
                # what an algorithm of other operations lacks besides is no news
                if not reasons[0].startswith("op="):
                    yield Unable(f"leanconv {algorithm.stem}", "; ".join(reasons))
                continue
            if isinstance(algorithm, GpuAlgorithm):
                yield from _on_gpu(algorithm, problem, operands)
            else:
                layout = getattr(problem, "layout", None)
                call = _call(problem, operands, algorithm, operands.output(layout))
                yield Candidate("leanconv", algorithm.stem, call, layout, None, on_gpu=False, note="CPU")


def _picked(problems: Sequence[Problem]) -> Iterator[Plan]:
    """What calls without ``algorithm=`` run. A problem that nothing fits says so when it is timed."""
    for problem in problems:
        with suppress(Exception):
            yield bind.load(problem, 0).plan


def _auto(problem: Problem, operands: Operands) -> Iterator[Candidate | Unable]:
    """The whole call as a user writes it, filters packed within; also where one of the algorithms is the same call."""
    try:
        loaded = bind.load(problem, 0)
    except NoAlgorithmError as error:
        yield Unable(AUTO_ENGINE, str(error))
        return
    algorithm = loaded.choice.algorithm
    assert isinstance(algorithm, GpuAlgorithm)
    notes = [f"strategy of {algorithm.name}"] if algorithm.strategy else []
    notes += _notes(algorithm, loaded.choice)
    layout = getattr(problem, "layout", None)
    y = operands.output(layout)
    candidate = _candidate(AUTO_ENGINE, algorithm.stem, loaded, _call(problem, operands, None, y), layout, y, notes)
    yield replace(candidate, config=key_of(loaded.choice.config))


def _candidate(
    engine: str, name: str, loaded: Loaded, call: Any, layout: Layout | None, y: Any, notes: Iterable[str]
) -> Candidate:
    plan, compiled = loaded.plan, loaded.device.compiled(loaded.plan)
    arithmetic = loaded.choice.algorithm.arithmetic(loaded.problem)
    return Candidate(
        engine, name, call, layout, plan.workspace_bytes, arithmetic=arithmetic,
        out=y, registers=max(code.registers for code in compiled),
        spill_bytes=sum(code.spill_bytes for code in compiled), note=", ".join(notes),
        prepared_bytes=plan.prepared_bytes,
    )  # fmt: skip


def _plans(algorithms: Sequence[Algorithm], problems: Sequence[Problem]) -> Iterator[Plan]:
    """What the algorithms run for the problems that they can do. One that fails to plan says so when it is timed."""
    target = launch.open_device(0).target
    for algorithm in algorithms:
        for problem in problems:
            if isinstance(algorithm, GpuAlgorithm) and not algorithm.reasons(problem, target):
                with suppress(Exception):
                    plans = list(plans_of(algorithm, problem).values())
                    kept = bind.load(problem, 0, algorithm.stem, kept="quickest").plan
                    yield from plans if kept in plans else [*plans, kept]


def plans_of(algorithm: GpuAlgorithm, problem: Problem) -> dict[int | None, Plan]:
    """What calls run on the first GPU, by ``workspace_limit``: without one and, where that takes a workspace and need
    not, with room for packed weights alone."""
    whole = bind.load(problem, 0, algorithm.stem).plan
    found: dict[int | None, Plan] = {None: whole}
    if whole.workspace_bytes:
        limit = algorithm.prepared_bytes(problem)
        with suppress(NoAlgorithmError):
            found = {limit: bind.load(problem, 0, algorithm.stem, limit).plan, None: whole}
    return found


def choice_of(algorithm: GpuAlgorithm, problem: Problem) -> Choice:
    """What is chosen for a call on the first GPU, of this strategy even where a call takes another."""
    target = launch.open_device(0).target
    chosen = choose(problem, target, algorithm.stem)
    return chosen if chosen.algorithm is algorithm else consider(algorithm, problem, target, algorithm.stem)


def plan_of(algorithm: GpuAlgorithm, problem: Problem) -> Plan:
    return choice_of(algorithm, problem).plan(problem, launch.open_device(0).target)


def compile_ahead(plans: Iterable[Plan]) -> None:
    """Put the kernels of plans into the disk store; without a store nothing is gained, and nothing done.

    What does not compile is passed over here: whoever runs it hears why.
    """
    if cache.directory() is None:
        return
    arch = launch.open_device(0).target.arch
    launches = {cache.key(each, arch): each for plan in plans for each in plan.all_launches}

    def work(each: Launch) -> None:
        with suppress(Exception):
            cache.compiled(each, arch)

    side_by_side([partial(work, each) for each in launches.values()])


def _on_gpu(algorithm: GpuAlgorithm, problem: Problem, operands: Operands) -> Iterator[Candidate]:
    plans = plans_of(algorithm, problem)
    layout = getattr(problem, "layout", None)
    for limit in plans:
        name = algorithm.stem if limit is not None or len(plans) == 1 else f"{algorithm.stem} split-K"
        loaded = bind.load(problem, 0, algorithm.stem, limit)
        y = operands.output(layout)
        call = _call(problem, operands, algorithm, y, limit)
        candidate = _candidate("leanconv", name, loaded, call, layout, y, _notes(algorithm, loaded.choice))
        yield candidate
        kept = bind.load(problem, 0, algorithm.stem, limit, kept="quickest")
        if kept.plan.prepare and problem.kind == "conv2d":
            call = _call(problem, operands, algorithm, y, limit, prepared=True)
            notes = (*_notes(algorithm, kept.choice), "filters prepared before")
            candidate = _candidate("leanconv:prepared", name, kept, call, layout, y, notes)
            yield candidate
        del candidate, call, y  # their memory is given back before the next ones are made


def _notes(algorithm: Algorithm, choice: Choice) -> Iterator[str]:
    """Of several strategies the one that a call takes, and of the kernels of several transforms."""
    if choice.algorithm is not algorithm:
        yield f"runs {choice.algorithm.stem}"
    assert choice.config is not None
    shown = ("states", "column_block", "piece")
    yield from (f"{key}={n}" for key, n in choice.config.constants() if key in shown and n)


def _call(
    problem: Problem, operands: Operands, algorithm: Algorithm | None, y: Any, limit: int | None = None,
    prepared: bool = False,
) -> Any:  # fmt: skip
    """A call of ``algorithm``, or as ``auto`` picks."""
    if operands.problem.kind == "conv2d":
        return _layer_call(operands.problem, operands, algorithm, y, limit, prepared)
    assert problem.kind == "filter2d"
    image, weights = operands.image, operands.weights
    if isinstance(algorithm, CpuAlgorithm):
        # filter2d chooses by itself and takes no name
        return lambda: algorithm.run(problem, image, weights)
    requested = filter_options(
        problem.border, problem.anchor, channels_last=problem.channels > 1, mode="valid" if problem.valid else "same",
        per_image=problem.per_image,
    )  # fmt: skip
    if not problem.is_whole:
        requested = requested._replace(window=(problem.kh, problem.kw), reduction=problem.reduction)
    if algorithm is None:
        return lambda: run(requested, image, weights, 0, 0, y)
    # filter2d takes no name either
    named = replace(resolve(requested, image, weights, None, y), algorithm=algorithm.stem, workspace_limit=limit)
    ready = bind.bind(named)
    return lambda: ready(image, weights, None, y)


def _layer_call(
    problem: ConvProblem, operands: Operands, algorithm: Algorithm | None, y: Any, limit: int | None, prepared: bool
) -> Any:
    x, w, out = operands.x(problem.layout), operands.w(problem.layout), y
    if operands.gpu:
        # PyTorch tensors have the shape of NCHW whatever the order in memory
        x, w, out = (as_nchw(array, problem.layout) for array in (x, w, y))
    w = leanconv.prepare_weights(w) if prepared else w
    axes = 3 if problem.is_volume else 2
    layer: Any = (
        (problem.stride_d, *problem.stride)[-axes:], (*problem.padding_d, *problem.padding)[-2 * axes :],
        (problem.dilation_d, *problem.dilation)[-axes:], problem.groups,
    )  # fmt: skip
    layout = LAYOUTS_OF[axes][LAYOUTS.index(problem.layout)]
    forward, of_input, of_filters = (getattr(leanconv, f"conv{axes}d{end}") for end in ("", "_input", "_weight"))
    how: Any = {
        "layout": layout, "algorithm": algorithm.stem if algorithm else AUTO,
        "precision": problem.precision, "out": out, "workspace_limit": limit,
    }  # fmt: skip
    gradients: dict[str, Any] = {"dgrad": of_input, "wgrad": of_filters}
    shape = tuple(out.shape)
    add = operands.residual(problem.layout)
    add = as_nchw(add, problem.layout) if operands.gpu and add is not None else add
    epilogue: Any = {"activation": problem.activation, "scale": operands.scale, "add": add}

    def call() -> Any:
        if problem.op == "fprop":
            forward(x, w, operands.bias, *layer, **epilogue, **how)
        else:
            gradients[problem.op](x, w, shape, *layer, **how)
        return y

    return call
