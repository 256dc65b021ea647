"""What the demo measures: the time and the error of an algorithm on a layer, or on the photograph through a filter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from leanconv import api
from leanconv.bench.suites import dense_filter
from leanconv.call.bind import load
from leanconv.call.choose import algorithms_of, choose, consider
from leanconv.cpu import oracle
from leanconv.images import filters
from leanconv.plan import Target
from leanconv.problem import ConvProblem, Problem
from leanconv.runtime import env, launch
from leanconv.runtime.timing import time_cpu, time_gpu


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
    def passes(self) -> bool:
        """Whether the error keeps its bound; NaN does not."""
        return self.error <= self.bound


def measure_layer(what: str, problem: ConvProblem, photo: np.ndarray, gpu: bool, budget_s: float) -> list[Measured]:
    """Run every algorithm that takes the layer, on the CPU and, with ``gpu``, on the first GPU."""
    random = np.random.default_rng(0)
    x = _input(problem, photo, random)
    fan_in = problem.group_c * problem.r * problem.s
    w = random.standard_normal(problem.w_shape, np.float32) * np.float32((2 / fan_in) ** 0.5)
    bias = random.standard_normal(problem.k, np.float32) * np.float32(0.1)
    right = oracle.conv2d(problem, x, w, bias), oracle.error_bound(problem, x, w, bias)
    lines = []
    limit = env.workspace_limit()  # the calls below obey it too
    for where, device, target in _places(gpu):
        chosen = choose(problem, target, limit=limit).algorithm
        for algorithm in algorithms_of(target):
            if consider(algorithm, problem, target, algorithm.stem, limit).reasons:
                continue
            call = partial(
                api.conv2d, x, w, bias, problem.stride, problem.padding, problem.dilation, problem.groups,
                algorithm=algorithm.stem, activation=problem.activation, device=device,
            )  # fmt: skip
            about = what, algorithm.stem, where, algorithm is chosen
            lines.append(_measured(call, problem, {"x": x, "w": w, "bias": bias}, right, about, budget_s)[1])
    return lines


def _places(gpu: bool) -> Iterator[tuple[str, str | None, Target | None]]:
    """Where things run: its name, the ``device`` of a call, and what an algorithm is chosen for."""
    yield "CPU", None, None
    if gpu:
        yield "GPU", "cuda", launch.open_device(0).target


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
    right = oracle.filter2d(problem, photo, kernel), oracle.filter_error_bound(problem, photo, kernel)
    lines = []
    result = photo
    what = f"{words}, {problem.batch}×{problem.h}×{problem.w}"
    for where, device, target in _places(gpu):
        call = partial(api.filter2d, photo, kernel, device=device)
        about = what, choose(problem, target).algorithm.name, where, True
        result, line = _measured(call, problem, {"x": photo, "w": kernel}, right, about, budget_s)
        lines.append(line)
    return result, lines


def _measured(
    call: Callable[[], np.ndarray], problem: Problem, inputs: dict[str, np.ndarray], right: tuple[np.ndarray, float],
    about: tuple[str, str, str, bool], budget_s: float,
) -> tuple[np.ndarray, Measured]:  # fmt: skip
    """The result of a call and its line, timed on the CPU, or on the GPU, the arrays lying there already.

    ``right`` are the answer and the error that is allowed, ``about`` the first four fields of the line.
    """
    y, (_, name, where, _) = call(), about
    if where == "CPU":
        us = time_cpu(call, budget_s=budget_s, warm_up=False).median_us
    else:
        loaded = load(problem, 0, name)
        values = {"bias": None, **inputs, "y": y.copy(), **dict.fromkeys(problem.scalars, 0)}
        with launch.resident(loaded.device, loaded.plan, values) as on_gpu:
            us = time_gpu(on_gpu, cold=problem.kind == "filter2d", budget_s=budget_s).median_us
    answer, bound = right
    return y, Measured(*about, us, problem.flops / us * 1e-3, oracle.relative_error(y, answer), bound)
