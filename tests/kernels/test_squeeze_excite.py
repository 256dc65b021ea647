"""Squeeze-and-excite in one launch: by a block or a cluster, in both layouts and every type, and broken on purpose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - so that NumPy knows bfloat16
import numpy as np
import pytest

from leanconv.cpu import oracle
from leanconv.kernels.common import squeeze_excite
from leanconv.kernels.common.squeeze_excite import SqueezeExciteProblem
from leanconv.plan import Launch, Target
from leanconv.runtime.compile import INCLUDE, compile_source, source
from tests import emulator
from tests.cases import TARGETS
from tests.kernels.patching import Patch, broken_kernels

HOPPER, AMPERE = TARGETS[:2]
#: Of a gate that both rounds and halves an element: what rounds it once.
BOUNDS = {"float32": 5e-7, "float16": 2**-11, "bfloat16": 2**-8}
CASES = {
    "silu": SqueezeExciteProblem(2, 24, 35, 6, "float16", True, "silu", "sigmoid"),
    "hard": SqueezeExciteProblem(3, 24, 49, 5, "float32", False, "relu", "hardsigmoid"),
    "vectors": SqueezeExciteProblem(1, 13, 64, 16, "float16", False, "gelu", "sigmoid", False),
    "single": SqueezeExciteProblem(1, 7, 37, 3, "bfloat16", True, None, "hardsigmoid", True, False),
    "odd": SqueezeExciteProblem(2, 5, 9, 2, "bfloat16", False, "relu", "sigmoid"),
    "pairs": SqueezeExciteProblem(1, 36, 3, 33, "float32", True, "relu", "sigmoid", False, False),
    # more channels than a block of 512 has places for, and a single pixel
    "many": SqueezeExciteProblem(1, 2056, 5, 3, "float32", True, "relu", "sigmoid"),
    "pixel": SqueezeExciteProblem(1, 16, 1, 4, "float32", False, "relu", "sigmoid"),
}  # fmt: skip


def drawn(problem: SqueezeExciteProblem) -> dict[str, Any]:
    """Images whose channels have means of their own, and layers whose gates are neither all zero nor all one."""
    random, (n, c, s) = np.random.default_rng(7), (problem.n, problem.c, problem.squeezed)
    x = random.standard_normal((n, problem.pixels, c)) + random.standard_normal((n, 1, c))
    x = x if problem.nhwc else np.swapaxes(x, 1, 2)
    given = {"x": x, "w1": random.standard_normal((s, c)) / c**0.5, "w2": random.standard_normal((c, s))}
    given |= {"b1": random.standard_normal(s), "b2": random.standard_normal(c)}
    made = {role: np.ascontiguousarray(each).astype(problem.dtype) for role, each in given.items()}
    return {**made, "b1": made["b1"] if problem.bias1 else None, "b2": made["b2"] if problem.bias2 else None}


def expected(problem: SqueezeExciteProblem, given: dict[str, Any]) -> np.ndarray:
    torch = pytest.importorskip("torch")
    x, w1, w2, b1, b2 = (
        None if each is None else torch.from_numpy(each.astype(np.float64))
        for each in (given[role] for role in ("x", "w1", "w2", "b1", "b2"))
    )
    functions = {None: lambda v: v, **{name: getattr(torch.nn.functional, name) for name in ("relu", "silu", "gelu")}}
    h = functions[problem.activation](torch.nn.functional.linear(x.mean(1 if problem.nhwc else 2), w1, b1))
    gates = getattr(torch.nn.functional, problem.gate)(torch.nn.functional.linear(h, w2, b2))
    result: np.ndarray = (x * gates.unsqueeze(1 if problem.nhwc else 2)).numpy()
    return result


def error_of(problem: SqueezeExciteProblem, launch: Launch, kernels: Path = INCLUDE) -> float:
    given = drawn(problem)
    y = np.full(given["x"].shape, np.nan, problem.dtype)
    emulator.run_launch(launch, {**given, "y": y}, kernels=kernels)
    return float(oracle.relative_error(y.astype(np.float64), expected(problem, given)))


def launch_of(problem: SqueezeExciteProblem, target: Target) -> Launch:
    (launch,) = squeeze_excite.plan(problem, target).launches
    return launch


@pytest.mark.parametrize("name", CASES)
def test_right_by_a_block_and_by_a_cluster(name: str) -> None:
    problem = CASES[name]
    launches = [
        launch_of(problem, target) for target in (HOPPER, AMPERE, replace(HOPPER, multiprocessors=2 * problem.n))
    ]
    assert [launch.cluster for launch in launches] == [16, 1, 2]
    for launch in launches:
        assert error_of(problem, launch) <= BOUNDS[problem.dtype]


def test_blocks_of_an_image_fill_the_gpu_or_find_it_again() -> None:
    first = SqueezeExciteProblem(32, 32, 112 * 112, 8, "float16", True, "silu", "sigmoid")
    late = replace(first, c=1152, pixels=49, squeezed=48)
    found = [
        squeeze_excite.blocks_of_image(each, HOPPER) for each in (first, late, replace(late, n=1), replace(late, n=256))
    ]
    assert found == [8, 4, 16, 2]
    assert squeeze_excite.blocks_of_image(first, AMPERE) == 1


def test_what_it_cannot_run() -> None:
    def why(problem: SqueezeExciteProblem) -> str:
        return "; ".join(squeeze_excite.why_not(problem, TARGETS[3]))

    assert not any(why(each) for each in CASES.values())
    assert "float64" in why(replace(CASES["hard"], dtype="float64"))
    assert "1025 channels of a pixel are more than 1024 threads load" in why(replace(CASES["pairs"], c=1025))
    assert "2**31 elements" in why(replace(CASES["hard"], pixels=2**27))
    assert "bytes of shared memory" in why(replace(CASES["hard"], c=20000))


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
def test_kernels_keep_their_registers(target: Target) -> None:
    for c, pixels, squeezed in ((32, 12544, 8), (1152, 49, 48)):
        for dtype, nhwc in (("float16", True), ("float32", True), ("bfloat16", False)):
            problem = SqueezeExciteProblem(32, c, pixels, squeezed, dtype, nhwc, "silu", "sigmoid")  # type: ignore[arg-type]
            launch = launch_of(problem, target)
            figure = compile_source(source(launch), launch.symbol, target.arch)
            assert not figure.advice and figure.registers * launch.block * launch.min_blocks <= 65536
            # a word or two of some kernels, once for a whole image
            assert max(figure.spill_bytes, figure.stack_bytes) <= 8, problem


def broken(case: str, name: str, change: str, where: str = "squeeze_excite", **more: Any) -> Any:
    return pytest.param(Patch(name, where, change, **more), case, id=name)


BREAKS = [
    broken("silu", "sums are read before they are there",
           "{{meet<split>();}} for (int i = tid; i < c; i += threads) { float sum"),
    broken("silu", "means are read before they are there",
           "{{__syncthreads();}} dense_rows<typename Problem::activation"),
    broken("silu", "numbers of others are read before they are there", "{{meet<split>();}} gather_rows<squeezed"),
    broken("silu", "numbers are read before they are gathered", "gather_rows<...>(all_h, own_h); {{__syncthreads();}}"),
    broken("silu", "gates are read before they are there", "{{meet<split>();}} gather_rows<c, ...>(all, own)"),
    broken("silu", "blocks leave while others read",
           "gather_rows<c, ...>(all, own); {{meet<split>() => __syncthreads()}}"),
    broken("silu", "threads are added in no order", "if (half >= workers) continue; {{__syncthreads();}}"),
    broken("single", "threads that do not exist are added", "worker < half {{&& worker + half < workers}}"),
    broken("silu", "blocks take the pixels behind theirs", "min(..., {{(rank + 1) * share => pixels}})"),
    broken("hard", "channels of others are left as they are", "{{own[i] = 0.0f;}}"),
    broken("hard", "a lane has a sum of its own", "{{sum_of_lanes<32>(sum) => sum}}"),
    broken("silu", "rows that do not exist are read", "{{row < rows => true}}", "dense_rows", times=2, only=0),
    broken("silu", "lanes are not added", "sum = {{sum_of_lanes<lanes>(sum) => sum}}", "dense_rows"),
    broken("silu", "rows are those of the first block", "cluster_load(own + i, {{i % split => 0}})", "gather_rows"),
    broken("hard", "the gate is not scaled", "{{* (1.0f / 6.0f)}}", "Hardsigmoid"),
]  # fmt: skip


@pytest.mark.parametrize(("patch", "name"), BREAKS)
def test_broken_kernels_fail(patch: Patch, name: str, tmp_path: Path) -> None:
    kernels, problem = broken_kernels(tmp_path, patch), CASES[name]
    try:
        error = error_of(problem, launch_of(problem, HOPPER), kernels)
    except emulator.EmulatorError:
        return
    assert not error <= 2 * BOUNDS[problem.dtype]
