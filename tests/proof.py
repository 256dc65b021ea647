"""One question asked of every algorithm: does this plan, run here, give the right answer on this problem?

``check`` asks it, of the emulator or of a GPU. Outputs are poisoned before the run, gaps between rows must stay as they
were, and the error against float64 must keep the bound of the precision level.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from itertools import islice
from typing import Any

import numpy as np

from leanconv.cpu import oracle
from leanconv.cpu.epilogue import activated, finish
from leanconv.dtypes import DTYPES, LAYERS, is_integer, is_narrow
from leanconv.kernels.contract import Config, GpuAlgorithm
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem, FilterProblem, Problem
from tests import cases, emulator
from tests.oracles import FILTERS_AXIS

#: ``run(plan, values)`` executes a plan on arrays and scalars by name and fills ``y``.
Runner = Callable[[Plan, dict[str, Any]], None]

#: What unwritten outputs hold. The integer is as unlikely a sum as any.
POISON = {
    **dict.fromkeys(LAYERS, np.nan),
    "int32": np.int32(-1431655766),
    "int16": np.int16(-21846),
    "uint16": np.uint16(43690),
    "int8": np.int8(-86),
    "uint8": np.uint8(170),
}
#: Configurations that are looked at in search of extremes.
MOST_CONFIGS = 10000


class WrongAnswer(AssertionError):
    """The kernel ran to its end, and its result is wrong."""


#: Whether every plan is played in every order of threads and copies, as ``make test-all`` does.
every_order = False


def orders_of(plan: Plan) -> tuple[str, ...]:
    """The orders that a plan is played in: in ``make test`` two of the three, by turns."""
    (*_, last) = plan.every_launch or plan.launches
    turn = zlib.crc32(f"{last.problem} {last.tuning}".encode()) % len(emulator.ORDERS)
    return tuple(order for i, order in enumerate(emulator.ORDERS) if every_order or i != turn)


def run_on_emulator(plan: Plan, values: dict[str, Any]) -> None:
    """Run a plan on the CPU."""
    emulator.run_plan(plan, values, orders=orders_of(plan))


def run_in_another_order(plan: Plan, values: dict[str, Any]) -> None:
    """Run it in the one that `run_on_emulator` leaves out."""
    left = [order for order in emulator.ORDERS if order not in orders_of(plan)]
    emulator.run_plan(plan, values, orders=left or emulator.ORDERS[-1:])


def run_on_gpu(plan: Plan, values: dict[str, Any]) -> None:
    """Run a plan on the first GPU. Outputs are uploaded too, so that their poison is there."""
    from leanconv.runtime.launch import open_device, run_on_host_arrays

    scratch = {"workspace": plan.workspace_bytes, "prepared": plan.prepared_bytes}
    poisoned = {role: np.full(nbytes, 0xFF, np.uint8) for role, nbytes in scratch.items() if nbytes}
    run_on_host_arrays(open_device(0), plan, {"bias": None, **values, **poisoned})


def extreme_configs(algorithm: GpuAlgorithm, problem: Problem, target: Target) -> Iterator[Config]:
    """Few configurations that have it all: the best guess first, then the smallest and the largest value of every
    tuning number, and every split.

    Kinds, which are types of configurations and what they answer to questions of yes or no, are looked at one by one.
    """
    kinds: dict[Any, list[Config]] = {}
    for config in islice(algorithm.configs(problem, target), MOST_CONFIGS):
        kinds.setdefault((type(config), *decisions(config)), []).append(config)
    yield from dict.fromkeys(config for alike in kinds.values() for config in _cover(alike))


def decisions(config: Config) -> list[tuple[str, Any]]:
    """What a configuration answers to questions of yes or no, and the types that it names."""
    return [
        (name, value) for name, value in config.constants() if not isinstance(value, int) or isinstance(value, bool)
    ]


def _cover(alike: list[Config]) -> list[Config]:
    """The first of ``alike``, then as few as a greedy choice needs to have the extremes of every number."""
    wanted: set[tuple[str, Any]] = set()
    for field in fields(alike[0]):
        values = {getattr(config, field.name) for config in alike}
        wanted |= {(field.name, value) for value in (values if field.name == "split" else (min(values), max(values)))}
    chosen = [alike[0]]
    while missing := wanted.difference(*(config.constants() for config in chosen)):
        chosen.append(max(alike, key=lambda config: len(missing.intersection(config.constants()))))
    return chosen


def check(
    algorithm: GpuAlgorithm,
    problem: Problem,
    config: Config | None = None,
    run: Runner = run_on_emulator,
    *,
    kinds: tuple[str, ...] = cases.KINDS,
    change: Callable[[Plan], Plan] = lambda plan: plan,
    target: Target = cases.TARGETS[0],
) -> None:
    """Run ``problem`` with ``config`` (the best guess when None); raises where the answer is not right.

    ``change`` may replace the plan by another one that must give the same answer.
    """
    if config is None:
        config = next(iter(algorithm.configs(problem, target)))
    plan = change(algorithm.plan(problem, config, target))
    for kind in kinds:
        if isinstance(problem, ConvProblem):
            _check_conv(problem, plan, run, kind)
        else:
            _check_filter(problem, plan, run, kind)


def _check_conv(problem: ConvProblem, plan: Plan, run: Runner, kind: str) -> None:
    written = problem.operands[-1]
    inputs = cases.draw_conv(problem, kind)
    y = np.full(problem.y_shape, POISON[written.dtype], written.dtype)
    if problem.accumulate:
        y[...] = cases.draw(np.random.default_rng(1), problem.y_shape, kind, written.dtype)
        if is_integer(problem.dtype):
            y >>= 1  # the sum stays within 32 bits
    reference, bound = expected(problem, y, inputs)
    run(plan, {**inputs, written.role: y})
    _compare(y, reference, bound, f"{problem} {kind}")
    if is_narrow(problem.dtype):
        _check_rounding(y, reference, DTYPES[problem.dtype].roundoff, f"{problem} {kind}")


def expected(problem: ConvProblem, y: np.ndarray, inputs: dict[str, Any]) -> tuple[np.ndarray, float]:
    """The answer, and the error that it may have; ``y`` is what the output holds before."""
    first, second, *_ = problem.operands
    given = inputs[first.role], inputs[second.role]
    if not (problem.accumulate or problem.fuses):
        return oracle.conv2d(problem, *given, inputs["bias"]), oracle.error_bound(problem, *given, inputs["bias"])
    stored, axis = replace(problem.plain, accumulate=False), FILTERS_AXIS[problem.layout]
    sums, last = oracle.conv2d(stored, *given), DTYPES[problem.dtype].roundoff * is_narrow(problem.dtype)
    bias, scale = inputs["bias"] if problem.op == "fprop" else None, inputs.get("scale")
    held = inputs.get("add", y if problem.accumulate else None)
    before = finish(sums.copy(), axis, bias, scale, held, None)
    reference = before if problem.activation is None else activated(problem.activation, before.copy())
    # That of the sums alone, which no activation makes larger than 1.2 times; a few roundings of float32; the last one.
    size, norm = np.linalg.norm, max(float(np.linalg.norm(reference)), 1e-30)
    error = 1.2 * (oracle.error_bound(stored, *given) - last) * size(finish(sums.copy(), axis, None, scale, None, None))
    error += 2.0**-22 * sum(float(size(each)) for each in (sums, before, reference)) + last * norm
    return reference, 0.0 if is_integer(problem.dtype) else float(error) / norm


def _check_rounding(y: np.ndarray, reference: np.ndarray, roundoff: float, what: str) -> None:
    """Each result must be the nearest number, but for the little that a float32 sum is off."""
    summed = 64 * oracle.FLOAT32_UNIT * max(1.0, float(np.abs(reference).max(initial=0.0)))
    excess = np.abs(y.astype(np.float64) - reference) - roundoff * np.abs(reference)
    most = float(excess.max(initial=0.0))
    if most > summed:
        raise WrongAnswer(f"{what}: error of one element exceeds half a unit in the last place by {most:.3g}")


def _check_filter(problem: FilterProblem, plan: Plan, run: Runner, kind: str) -> None:
    inputs, scalars = cases.draw_filter(problem, kind)
    poison = POISON[problem.result]
    high, wide = problem.h, problem.w * problem.channels
    x, images = _strided((problem.batch * problem.d, high, wide), problem.x_pitch, problem.x_step, problem.dtype)
    shape = problem.batch * problem.filters * problem.out_d, problem.out_h, problem.out_w * problem.channels
    y, result = _strided(shape, problem.y_pitch, problem.y_step, problem.result)
    images[...] = inputs["x"].reshape(images.shape)
    run(plan, {"x": x, "w": inputs["w"], "y": y, **scalars})
    reference = oracle.filter2d(problem, inputs["x"], inputs["w"], **scalars).reshape(result.shape)
    bound = oracle.filter_error_bound(problem, inputs["x"], inputs["w"], **scalars)
    if problem.sums == "float32" and not is_integer(problem.result) and 0 < result.size < 16:
        # Of a few outputs the sequential sum's own error says little; the worst case of any order of summation does.
        sizes = {name: abs(value) for name, value in scalars.items()}
        plain = replace(problem, dtype="float32", out_dtype=None)
        most = oracle.filter2d(plain, *(abs(inputs[role].astype(np.float64)) for role in "xw"), **sizes)
        terms = problem.kh * problem.kw + 1
        bound = max(bound, float(terms * 2.0**-24 * np.linalg.norm(most) / np.linalg.norm(reference)))
    _compare(result, reference, bound, f"{problem} {kind}")
    if problem.result != problem.sums:
        _check_nearest(problem, result, reference, f"{problem} {kind}")
    result[...] = poison
    if not np.array_equal(y, np.full_like(y, poison), equal_nan=not is_integer(problem.result)):
        raise WrongAnswer(f"{problem} {kind}: the kernel wrote between the rows of the output")


def _check_nearest(problem: FilterProblem, result: np.ndarray, reference: np.ndarray, what: str) -> None:
    """Each result must be the nearest that its type has, but for the little that a sum is off."""
    if not is_integer(problem.result):
        return _check_rounding(result, reference, DTYPES[problem.result].roundoff, what)
    off = np.abs(result.astype(np.float64) - reference).max(initial=0.0)
    if off > 0.5 + 64 * oracle.FLOAT32_UNIT * max(1.0, float(np.abs(reference).max(initial=0.0))):
        raise WrongAnswer(f"{what}: error of one element exceeds a half: {off:.6g}")
    return None


def _strided(shape: tuple[int, int, int], pitch: int, step: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """A buffer of poison that ends with its last element, and the images (images, rows, elements) in it as a view."""
    images, high, wide = shape
    size = (images - 1) * step + (high - 1) * pitch + wide if images else 0
    buffer = np.full(size, POISON[dtype], dtype)
    item = buffer.itemsize
    return buffer, np.lib.stride_tricks.as_strided(buffer, shape, (step * item, pitch * item, item))


def _compare(result: np.ndarray, reference: np.ndarray, bound: float, what: str) -> None:
    error = oracle.relative_error(result, reference)
    if error <= bound:
        return
    least = 1e-4 * max(1.0, float(np.abs(reference).max(initial=0.0)))
    off = ~np.isclose(result.astype(np.float64), reference, rtol=max(1e-3, 2 * bound), atol=least)
    places = np.argwhere(off)
    shown = ", ".join(f"{tuple(map(int, p))}: {result[tuple(p)]} for {reference[tuple(p)]:.6g}" for p in places[:5])
    raise WrongAnswer(f"{what}: error {error:.3g} exceeds {bound:.3g}; {len(places)} of {result.size} far off; {shown}")


def wide_offsets(algorithm: GpuAlgorithm, problem: ConvProblem, config: Config, target: Target) -> Plan:
    """The plan of ``problem`` with the kernels of a batch whose tensors are too large for 32-bit offsets."""
    # alike modulo four, for kernels that know by the batch how images lie in vectors of four
    huge = replace(problem, n=problem.n + 4 * (1 + 2**31 // (problem.c * problem.h * problem.w)))
    wide, narrow = (algorithm.plan(each, config, target) for each in (huge, problem))
    assert all(dict(launch.problem)["wide"] for launch in wide.launches)
    assert not any(dict(launch.problem)["wide"] for launch in narrow.launches)
    launches = zip(narrow.launches, wide.launches, strict=True)
    return replace(
        narrow,
        launches=tuple(replace(small, problem=big.problem, shared_bytes=big.shared_bytes) for small, big in launches),
        unprepared=(),
    )


def same_constants(plan: Plan, constants: Mapping[str, int | bool | str]) -> Plan:
    """The plan with some of its kernels' ``Problem`` constants replaced."""
    launches = tuple(
        replace(launch, problem=tuple((key, constants.get(key, value)) for key, value in launch.problem))
        for launch in plan.launches
    )
    return replace(plan, launches=launches, unprepared=())
