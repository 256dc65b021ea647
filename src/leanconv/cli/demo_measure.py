"""What the demo measures: the time and the error of an algorithm on a layer, or on the photograph through a filter."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from leanconv import api
from leanconv.bench.suites import dense_filter
from leanconv.call.bind import load
from leanconv.call.choose import algorithms_of, choose, consider
from leanconv.cpu import oracle
from leanconv.images import filters
from leanconv.problem import ConvProblem, Problem
from leanconv.runtime import env, launch
from leanconv.runtime.timing import Timing, time_cpu, time_gpu


@dataclass(frozen=True)
class Measured:
    """One algorithm on one problem: its time, its error against float64, and the error that it may have."""

    what: str
    algorithm: str
    where: str
    chosen: bool
    us: float
    gflops: float
    error: float
    bound: float

    @property
    def right(self) -> bool:
        """Whether the error keeps its bound; NaN does not."""
        return self.error <= self.bound


def measure_layer(what: str, problem: ConvProblem, photo: np.ndarray, gpu: bool, budget_s: float) -> list[Measured]:
    """Run every algorithm that takes the layer, on the CPU and, with ``gpu``, on the first GPU."""
    random = np.random.default_rng(0)
    x = _input(problem, photo, random)
    fan_in = problem.group_c * problem.r * problem.s
    w = random.standard_normal(problem.w_shape, np.float32) * np.float32((2 / fan_in) ** 0.5)
    bias = random.standard_normal(problem.k, np.float32) * np.float32(0.1)
    answer, bound = oracle.conv2d(problem, x, w, bias), oracle.error_bound(problem, x, w, bias)
    lines = []
    limit = env.workspace_limit()  # the calls below obey it too
    for where in ("CPU", "GPU") if gpu else ("CPU",):
        target = launch.open_device(0).target if where == "GPU" else None
        chosen = choose(problem, target, limit=limit).algorithm
        for algorithm in algorithms_of(target):
            if consider(algorithm, problem, target, algorithm.stem, limit).reasons:
                continue
            call = partial(
                api.conv2d, x, w, bias, problem.stride, problem.padding, problem.dilation, problem.groups,
                algorithm=algorithm.stem, activation=problem.activation, device="cuda" if where == "GPU" else None,
            )  # fmt: skip
            y = call()
            if where == "GPU":
                us = _time_on_gpu(problem, algorithm.stem, {"x": x, "w": w, "bias": bias}, y, budget_s).median_us
            else:
                us = time_cpu(call, budget_s=budget_s, warm_up=False).median_us
            error = oracle.relative_error(y, answer)
            gflops = problem.flops / us * 1e-3
            lines.append(Measured(what, algorithm.stem, where, algorithm is chosen, us, gflops, error, bound))
    return lines


def _input(problem: ConvProblem, photo: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """The middle of the photograph, normalised as networks want it, where the layer is a first one; else noise."""
    if problem.c != 3:
        return random.standard_normal(problem.x_shape, np.float32)
    top, left = (photo.shape[1] - problem.h) // 2, (photo.shape[2] - problem.w) // 2
    patch = photo[:, top : top + problem.h, left : left + problem.w]
    patch = (patch - patch.mean((1, 2), keepdims=True)) / patch.std((1, 2), keepdims=True)
    return np.ascontiguousarray(np.broadcast_to(patch, problem.x_shape))


def measure_filter(words: str, photo: np.ndarray, gpu: bool, budget_s: float) -> tuple[np.ndarray, list[Measured]]:
    """The photograph through one filter: the result, and a line for each place where it ran."""
    kernel = filters.from_words(words)
    problem = dense_filter(len(photo), *photo.shape[1:], *kernel.shape)
    answer, bound = oracle.filter2d(problem, photo, kernel), oracle.filter_error_bound(problem, photo, kernel)
    lines = []
    result = photo
    for where in ("CPU", "GPU") if gpu else ("CPU",):
        call = partial(api.filter2d, photo, kernel, device="cuda" if where == "GPU" else None)
        result = call()
        if where == "GPU":
            chosen = choose(problem, launch.open_device(0).target).algorithm.name
            us = _time_on_gpu(problem, "auto", {"x": photo, "w": kernel}, result, budget_s).median_us
        else:
            chosen = choose(problem, None).algorithm.name
            us = time_cpu(call, budget_s=budget_s, warm_up=False).median_us
        error = oracle.relative_error(result, answer)
        what = f"{words}, {problem.batch}×{problem.h}×{problem.w}"
        lines.append(Measured(what, chosen, where, True, us, problem.flops / us * 1e-3, error, bound))
    return result, lines


def _time_on_gpu(problem: Problem, name: str, inputs: dict[str, np.ndarray], y: np.ndarray, budget_s: float) -> Timing:
    """GPU time of one call, the arrays lying there already."""
    loaded = load(problem, 0, name)
    values = {"bias": None, **inputs, "y": y.copy(), **dict.fromkeys(problem.scalars, 0)}
    with launch.resident(loaded.device, loaded.plan, values) as call:
        return time_gpu(call, cold=problem.kind == "filter2d", budget_s=budget_s)
