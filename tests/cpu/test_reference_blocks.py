"""How the CPU engine cuts layers: blocks, bands of columns, runs of a row; against the oracle, with cuts everywhere."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from leanconv import conv2d
from leanconv.cpu import CPU_ALGORITHMS, channels, dense_code, direct, layers, oracle
from leanconv.cpu.direct import Direct
from leanconv.cpu.layers import LayerAlgorithm
from leanconv.problem import ConvProblem
from tests.cases import draw_conv
from tests.cpu_engine import by_name


def some_layers(count: int, one_channel: bool = False) -> list[ConvProblem]:
    """Small layers of every kind, among them windows that see nothing but padding."""
    rng, found = np.random.default_rng(3), []
    while len(found) < count:
        groups = int(rng.integers(1, 7)) if one_channel else int(rng.choice([1, 1, 2]))
        c, k = (groups, groups * int(rng.choice([1, 1, 2, 3]))) if one_channel else (3 * groups, 2 * groups)
        h, w, r, s = (int(rng.integers(1, most)) for most in (8, 40, 6, 6))
        unit = rng.random() < 0.5
        problem = ConvProblem(
            int(rng.integers(1, 3)), c, h, w, k, r, s,
            stride=(1, 1) if unit else tuple(map(int, rng.integers(1, 4, 2))),  # type: ignore[arg-type]
            dilation=(1, 1) if unit else tuple(map(int, rng.integers(1, 4, 2))),  # type: ignore[arg-type]
            padding=tuple(map(int, rng.integers(0, 14, 4))), groups=groups, bias=bool(rng.integers(2)),  # type: ignore[arg-type]
            layout=str(rng.choice(["NCHW", "NHWC", "CHWN"])), activation="relu" if rng.integers(2) else None,  # type: ignore[arg-type]
        )  # fmt: skip
        if problem.p > 0 and problem.q > 0:
            found.append(problem)
    return found


def far_layers(count: int, one_channel: bool) -> list[ConvProblem]:
    """Layers of few outputs, most of whose windows cover many more pixels than they read, and more than the image."""
    rng, found = np.random.default_rng(4), []
    while len(found) < count:
        groups = int(rng.integers(1, 4))
        c, k = (groups, 2 * groups) if one_channel else (3 * groups, 2 * groups)
        h, w, r, s, p, q = (int(rng.integers(1, most)) for most in (8, 8, 5, 5, 7, 12))
        steps = [int(rng.choice([1, 2, rng.integers(5, 60)])) for _ in range(4)]
        if rng.random() < 0.5:  # what Winograd computes
            steps[:3] = 1, 1, 1
        (across, down, apart, dilation), sides = steps, []
        for needed in (p - 1) * down + (r - 1) * dilation + 1 - h, (q - 1) * across + (s - 1) * apart + 1 - w:
            before = int(rng.integers(max(1, needed + 1)))
            sides += [before, needed - before]
        if min(sides) >= 0:
            found.append(
                ConvProblem(
                    2, c, h, w, k, r, s, stride=(down, across), dilation=(dilation, apart), padding=tuple(sides),  # type: ignore[arg-type]
                    groups=groups, bias=bool(rng.integers(2)), layout=str(rng.choice(["NCHW", "NHWC", "CHWN"])),  # type: ignore[arg-type]
                )
            )  # fmt: skip
    return found


def read(problem: ConvProblem) -> tuple[Any, Any, Any]:
    """The two arrays that a problem reads, and its bias or None."""
    inputs = draw_conv(problem, "zero-mean")
    bias = inputs.pop("bias")
    return *inputs.values(), bias  # type: ignore[return-value]


def check(algorithm: Any, problem: ConvProblem) -> None:
    given = read(problem)
    error = oracle.relative_error(algorithm.run(problem, *given), oracle.conv2d(problem, *given))
    assert error < 1e-6, (algorithm.name, problem, error)


@pytest.mark.parametrize(
    "algorithm", [a for a in CPU_ALGORITHMS if isinstance(a, LayerAlgorithm)], ids=lambda a: a.name
)
def test_blocks_and_bands_of_columns(algorithm: LayerAlgorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "most_pixels", lambda pixel_bytes, budget: 5)
    cut = 0
    for problem in some_layers(150):
        if not algorithm.reasons(problem, None):
            cut += problem.q > 7
            check(algorithm, problem)
    assert cut > 15 or algorithm.name in ("winograd2d", "single_channel")  # which take few of them


def test_a_band_that_sees_only_padding_has_its_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "most_pixels", lambda pixel_bytes, budget: 5)
    problem = ConvProblem(1, 2, 1, 3, 4, 1, 2, padding=(0, 0, 20, 20), bias=True)
    for algorithm in CPU_ALGORITHMS:
        if isinstance(algorithm, LayerAlgorithm) and not algorithm.reasons(problem, None):
            check(algorithm, problem)


@pytest.mark.parametrize(
    "algorithm", [a for a in CPU_ALGORITHMS if isinstance(a, LayerAlgorithm)], ids=lambda a: a.name
)
@pytest.mark.parametrize("pixels", [5, None], ids=["cut", "whole"])
def test_windows_that_cover_far_more_than_they_read(
    algorithm: LayerAlgorithm, pixels: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pixels is not None:
        monkeypatch.setattr(layers, "most_pixels", lambda pixel_bytes, budget: pixels)
    some = far_layers(300, one_channel=algorithm.name == "single_channel")
    every = [replace(problem, op=op, bias=False, activation=None) for op in ("dgrad", "wgrad") for problem in some]
    able = [problem for problem in some + every if not algorithm.reasons(problem, None)]
    for problem in able:
        check(algorithm, problem)
    assert sum(bool(layers.far_blocks(problem)) for problem in able) > 8 or algorithm.name in ("winograd2d", "fourier")


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "CHWN"])
@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
def test_memory_follows_the_outputs_and_not_the_dilated_filter(op: Any, layout: Any) -> None:
    far = ConvProblem(
        2,
        4,
        4,
        4,
        8,
        3,
        3,
        padding="same",
        dilation=(100_000, 100_000),
        op=op,
        layout=layout,  # type: ignore[arg-type]
    )
    # of each filter only the middle row and column meet the images
    given = read(far)
    for algorithm in CPU_ALGORITHMS:
        if algorithm.solves == "conv2d" and not algorithm.reasons(far, None):
            tracemalloc.start()
            got = algorithm.run(far, *given)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < 1 << 20, (algorithm.name, peak)
            near = replace(far, dilation=(4, 4), padding=(4, 4, 4, 4))  # whose other taps meet none either
            np.testing.assert_allclose(got, algorithm.run(near, *given), rtol=1e-5, atol=1e-5)


def test_single_channel_where_the_padding_is_wider_than_what_is_read() -> None:
    problem = ConvProblem(1, 1, 1, 6, 1, 1, 1, stride=(1, 60), padding=(0, 0, 2, 2))
    check(by_name("single_channel"), problem)
    check(by_name("single_channel"), replace(problem, s=2, r=2, padding=(3, 3, 3, 0), bias=True))


@pytest.mark.parametrize("run", [1, 1 << 20], ids=["cut-rows", "whole-rows"])
def test_depthwise(run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By NumPy, as where there is no machine code."""
    monkeypatch.setattr(channels, "widest", lambda: 0)
    monkeypatch.setattr(direct, "FILTER_BYTES", run)
    monkeypatch.setattr(direct, "LEAST_RUN", run)
    for problem in some_layers(200, one_channel=True):
        check(Direct(), problem)


def test_direct_without_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_code, "widest", lambda: 0)
    monkeypatch.setattr(Direct, "budget", 1)
    monkeypatch.setattr(layers, "LEAST_PIXELS", 5)
    for problem in some_layers(100):
        check(Direct(), problem)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_layers_of_one_tap_read_no_pixel_behind_the_last(layout: Any, dtype: str) -> None:
    """One channel of it, too, where a vector of pixels is as long as all weights of a vector of filters."""
    rng = np.random.default_rng(5)
    for c, k, (h, w) in product((1, 2, 3), (1, 7, 8, 16, 20, 33), ((6, 6), (1, 37), (9, 15))):
        problem = ConvProblem(2, c, h, w, k, 1, 1, layout=layout, dtype=dtype)
        size = 2 * c * h * w
        memory = np.full(size + 99, np.nan, dtype)
        memory[:size] = rng.integers(-9, 9, size)
        x = memory[:size].reshape(problem.x_shape)
        filters = rng.integers(-9, 9, problem.w_shape).astype(dtype)
        expected = oracle.conv2d(problem, x, filters)
        for algorithm in CPU_ALGORITHMS:
            if not algorithm.reasons(problem, None):
                result = conv2d(x, filters, layout=layout, algorithm=algorithm.name)
                np.testing.assert_allclose(result, expected, atol=1e-4, err_msg=f"{algorithm.name} {c} {k} {h} {w}")
