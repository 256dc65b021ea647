"""Layers of 8-bit integers: exact on every road from an array to its int32 result, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from leanconv import ConvProblem, conv1d, conv2d, conv2d_input, dtypes, explain, prepare_weights
from leanconv.bench import run_suite
from leanconv.call.choose import choose
from leanconv.cpu import CPU_ALGORITHMS, oracle
from leanconv.options import PRECISIONS
from tests import emulator, proof
from tests.cases import ALL, TARGETS
from tests.messages import says
from tests.oracles import oracle_conv
from tests.stand_ins import HostDevice
from tests.variants import NAMED, VARIANTS

TYPES = ("int8", "uint8")
DIRECT, WORDS = (NAMED[name] for name in ("direct", "implicit_gemm_dp4a"))
LAYER = ConvProblem(2, 8, 9, 10, 6, 3, 3, padding=(1, 1, 1, 1), bias=True, activation="relu", dtype="int8")
SAME: dict[str, Any] = {"padding": 1, "activation": "relu"}
#: As many products as int32 can sum, whatever the values.
MOST = {"int8": 131071, "uint8": 65793}


def draw(problem: ConvProblem, extreme: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Arrays of all values; ``extreme``: of the least and the largest alone."""
    rng = np.random.default_rng(5)
    made = []
    for operand in problem.operands[:-1]:
        low, high = (-99999, 99999) if operand.dtype == "int32" else (np.iinfo(operand.dtype).min, 127)
        high = 255 if operand.dtype == "uint8" else high
        values = np.array([low, high]) if extreme else np.arange(low, high + 1)
        made.append(rng.choice(values, operand.shape).astype(operand.dtype))
    x, w, *bias = made
    return x, w, bias[0] if bias else None


@cache
def exact(problem: ConvProblem, extreme: bool) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray | None], np.ndarray]:
    """The drawn arrays and the answer, for all algorithms."""
    drawn = draw(problem, extreme)
    return drawn, oracle_conv(problem, *drawn)


def check(problem: ConvProblem, y: np.ndarray, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> None:
    assert y.shape == problem.y_shape and y.dtype == np.int32
    np.testing.assert_array_equal(y, oracle_conv(problem, x, w, bias))


# The problem


def test_types_of_operands_and_bytes() -> None:
    problem = replace(LAYER, dtype="uint8")
    assert [each.dtype for each in problem.operands] == ["uint8", "int8", "int32", "int32"]
    assert problem.bytes == 2 * 8 * 90 + 6 * 8 * 9 + 4 * 6 + 4 * 2 * 6 * 90
    assert {each.dtype for each in replace(LAYER, dtype="float16").operands} == {"float16"}
    assert {name: dtypes.most_products(name) for name in TYPES} == MOST


@pytest.mark.parametrize("dtype", TYPES)
def test_the_bound_of_sums_is_tight(dtype: Any) -> None:
    """As many products of the largest size, of either sign, as int32 can sum."""
    largest = 255 if dtype == "uint8" else -128
    for sign in (1, -1):
        x, w = np.full((1, MOST[dtype], 1, 1), largest, dtype), np.full((1, MOST[dtype], 1, 1), -128, np.int8)
        if sign < 0 and dtype == "int8":
            w[...] = 127
        exact = int(x[0, 0, 0, 0]) * int(w[0, 0, 0, 0]) * MOST[dtype]
        assert -(2**31) <= exact < 2**31 and conv2d(x, w).item() == exact
    more = np.full((1, MOST[dtype] + 1, 1, 1), 1, dtype)
    message = f"has {MOST[dtype] + 1} products: their sum could overflow int32; {dtype} by int8 takes at most"
    with says(ValueError, message, str(MOST[dtype])):
        conv2d(more, more.astype(np.int8))
    with says(ValueError, message):
        explain(ConvProblem(1, MOST[dtype] + 1, 1, 1, 1, 1, 1, dtype=dtype))
    halves = MOST[dtype] + 1 - (MOST[dtype] + 1) % 2  # two groups of half as many products
    conv2d(np.ones((1, halves, 1, 1), dtype), np.ones((2, halves // 2, 1, 1), np.int8), groups=2)


# On the CPU


@pytest.mark.parametrize("layout", ALL)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "algorithm", [a for a in CPU_ALGORITHMS if a.solves == "conv2d" and not a.volumes], ids=lambda a: a.stem
)
def test_the_cpu_engine_is_exact(algorithm: Any, dtype: Any, layout: Any) -> None:
    problem = replace(LAYER, dtype=dtype, layout=layout)
    if algorithm.stem.startswith(("winograd", "fourier")):
        assert f"and sums of {dtype} are exact" in algorithm.reasons(problem, None)[0]
        return
    if algorithm.reasons(problem, None):  # one channel is all that it takes
        problem = replace(problem, c=1)
        assert not algorithm.reasons(problem, None)
    # sums beyond 2**24, of which float32 has not all
    deep = replace(problem, c=1200 if problem.c > 1 else 1, n=1)
    for layer, extreme in ((problem, False), (problem, True), (deep, True)):
        drawn, answer = exact(layer, extreme)
        y = algorithm.run(layer, *drawn)
        assert y.shape == layer.y_shape and y.dtype == np.int32
        np.testing.assert_array_equal(y, answer)


@pytest.mark.parametrize("dtype", TYPES)
def test_large_odd_sums_of_the_cpu_engine(dtype: Any, rng: np.random.Generator) -> None:
    """The largest values are powers of two: float32 holds their sums far beyond 2**24."""
    x, w = rng.integers(100, 128, (1, 1500, 1, 64)).astype(dtype), rng.integers(100, 128, (8, 1500, 1, 1), np.int8)
    expected = np.einsum("nchw,kcrs->nkhw", x.astype(np.int64), w.astype(np.int64))
    assert expected.min() < 2**24 * 2 and (expected % 2 == 1).any()
    np.testing.assert_array_equal(conv2d(x, w), expected)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_is_exact(precision: Any) -> None:
    problem = replace(LAYER, precision=precision)
    x, w, bias = draw(problem)
    check(problem, conv2d(x, w, bias, precision=precision, **SAME), x, w, bias)
    assert oracle.error_bound(problem, x, w, bias) == 0


def test_a_bias_wraps_around() -> None:
    x, w = np.full((1, 1, 1, 1), 100, np.int8), np.ones((1, 1, 1, 1), np.int8)
    most = np.full(1, 2**31 - 1, np.int32)
    assert conv2d(x, w, most).item() == -(2**31) + 99
    problem = ConvProblem(1, 1, 1, 1, 1, 1, 1, bias=True, dtype="int8")
    y = np.zeros((1, 1, 1, 1), np.int32)
    plan = DIRECT.plan(problem, next(iter(DIRECT.configs(problem, TARGETS[0]))), TARGETS[0])
    proof.run_on_emulator(plan, {"x": x, "w": w, "bias": most, "y": y})
    assert y.item() == -(2**31) + 99


@pytest.mark.parametrize("dtype", TYPES)
def test_tensors_of_pytorch_on_the_cpu(dtype: Any) -> None:
    torch = pytest.importorskip("torch")
    problem = replace(LAYER, dtype=dtype)
    arrays = draw(problem)
    x, w, bias = (torch.from_numpy(array) for array in arrays)
    y = conv2d(x, w, bias, **SAME)
    assert y.dtype == torch.int32 and y.is_contiguous()
    check(problem, y.numpy(), *arrays)
    last = conv2d(x.to(memory_format=torch.channels_last), w, bias, **SAME)
    assert torch.equal(last, y) and last.is_contiguous(memory_format=torch.channels_last)
    innermost = conv2d(x, w, bias, layout="CHWN", **SAME)
    assert torch.equal(innermost, y) and innermost.permute(1, 2, 3, 0).is_contiguous()
    out = torch.empty_like(y)
    assert conv2d(x, w, bias, out=out, **SAME) is out and torch.equal(out, y)
    assert torch.equal(conv2d(x[0], w, bias, **SAME), y[0])
    assert torch.equal(conv2d(x, w, bias, algorithm="direct", **SAME), y)
    empty = conv2d(x[:0], w, bias, **SAME)
    assert empty.shape == (0, *y.shape[1:]) and empty.dtype == torch.int32
    told = explain(conv2d, x, w, bias, **SAME)
    assert told.where == "NumPy engine on the CPU" and told.chosen == "im2col"


def test_signals_and_outputs_of_a_callers_own() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.integers(-128, 128, (2, 3, 20)).astype(np.int8), rng.integers(-128, 128, (4, 3, 5)).astype(np.int8)
    y = conv1d(x, w, padding=2)
    np.testing.assert_array_equal(y, conv2d(x[:, :, None], w[:, :, None], padding=(0, 2))[:, :, 0])
    out = np.empty((2, 20, 4), np.int32).transpose(0, 2, 1)
    assert conv1d(x, w, padding=2, out=out) is out
    np.testing.assert_array_equal(out, y)


def test_an_output_that_shares_bytes_with_an_input() -> None:
    memory = np.zeros(400, np.uint8)
    x, w = memory[:100].reshape(1, 1, 10, 10), np.ones((1, 1, 1, 1), np.int8)
    with says(ValueError, "out overlaps x in memory"):
        conv2d(x, w, out=memory.view(np.int32).reshape(1, 1, 10, 10))
    # the output's last bytes are beyond those that 8-bit elements would have
    memory = np.zeros(500, np.uint8)
    with says(ValueError, "out overlaps x in memory"):
        conv2d(memory[396:496].reshape(1, 1, 10, 10), w, out=memory[:400].view(np.int32).reshape(1, 1, 10, 10))
    conv2d(memory[400:].reshape(1, 1, 10, 10), w, out=memory[:400].view(np.int32).reshape(1, 1, 10, 10))


# On stand-ins for a GPU, whose kernels are the oracle


@pytest.mark.parametrize("layout", ALL)
@pytest.mark.parametrize("dtype", TYPES)
def test_arrays_of_numpy_and_cupy_on_a_gpu(layout: Any, dtype: Any, fake_cupy: Any, host_device: HostDevice) -> None:
    problem = replace(LAYER, layout=layout, dtype=dtype)
    x, w, bias = draw(problem)
    check(problem, conv2d(x, w, bias, layout=layout, device="cuda", **SAME), x, w, bias)
    there = [fake_cupy.asarray(array) for array in (x, w, bias)]
    y = conv2d(*there, layout=layout, **SAME)
    assert y.dtype == np.int32
    check(problem, y.host, x, w, bias)
    out = fake_cupy.empty(problem.y_shape, np.int32)
    assert conv2d(*there, layout=layout, out=out, **SAME) is out
    np.testing.assert_array_equal(out.host, y.host)
    # the same arrays again find the ready call
    np.testing.assert_array_equal(conv2d(*there, layout=layout, **SAME).host, y.host)
    with says(ValueError, "out has dtype float32; the result has int32"):
        conv2d(*there, layout=layout, out=fake_cupy.empty(problem.y_shape, np.float32), **SAME)


@pytest.mark.parametrize("dtype", TYPES)
def test_tensors_of_pytorch_on_a_gpu(dtype: Any, torch_on_device: HostDevice) -> None:
    import torch

    problem = replace(LAYER, dtype=dtype)
    arrays = draw(problem)
    given = [torch.from_numpy(array) for array in arrays]
    y = conv2d(*given, **SAME)
    assert y.dtype == torch.int32 and len(torch_on_device.launches) == 1
    check(problem, y.numpy(), *arrays)
    kept = conv2d(given[0], prepare_weights(given[1]), given[2], **SAME)
    assert torch.equal(kept, y)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
def test_layers_of_integers_on_a_real_one(dtype: Any) -> None:
    for layout in ALL:
        problem = replace(LAYER, dtype=dtype, layout=layout)
        x, w, bias = draw(problem, extreme=True)
        check(problem, conv2d(x, w, bias, layout=layout, device="cuda", **SAME), x, w, bias)


# What is refused


def test_types_that_do_not_go_together() -> None:
    x, w, bias = draw(LAYER)
    with says(TypeError, "w has dtype float32 and x int8; they must be the same"):
        conv2d(x, w.astype(np.float32))
    with says(TypeError, "w has dtype uint8 and x uint8; with uint8 it must be int8"):
        conv2d(x.view(np.uint8), w.view(np.uint8))
    with says(TypeError, "w has dtype int8 and x float32; they must be the same"):
        conv2d(x.astype(np.float32), w)
    with says(TypeError, "bias has dtype int8 and x int8; with int8 it must be int32"):
        conv2d(x, w, np.zeros(6, np.int8))
    with says(TypeError, "bias has dtype float32 and x uint8; with uint8 it must be int32"):
        conv2d(x.view(np.uint8), w, np.zeros(6, np.float32))
    for other in (np.float32, np.int8, np.int64):
        with says(ValueError, f"out has dtype {np.dtype(other).name}; the result has int32"):
            conv2d(x, w, bias, padding=1, out=np.empty(LAYER.y_shape, other))
    with says(TypeError, "grad has dtype int8; gradients are of floating-point layers"):
        conv2d_input(np.zeros(LAYER.y_shape, np.int8), w, x.shape, padding=1)
    with says(TypeError, "has dtype uint8; gradients are of floating-point layers"):
        explain(replace(LAYER, op="dgrad", dtype="uint8", bias=False, activation=None))
    with says(TypeError, "w has dtype uint8; supported are"):
        prepare_weights(w.view(np.uint8))


def test_algorithms_that_know_no_integers_say_so() -> None:
    for algorithm in VARIANTS:
        if algorithm.solves == "conv2d" and algorithm.stem not in ("direct", "implicit_gemm_dp4a"):
            assert "dtype='int8' is" in "; ".join(algorithm.reasons(LAYER, TARGETS[0])), algorithm.stem


# Words of four channels


def test_what_words_are_made_for() -> None:
    def why(problem: ConvProblem) -> str:
        return "; ".join(WORDS.reasons(problem, TARGETS[0]))

    last = replace(LAYER, layout="NHWC")
    assert not why(last) and not why(replace(last, dtype="uint8", groups=2))
    assert "layout='NCHW' is not NHWC, where neighbouring channels are one word" in why(LAYER)
    assert not why(replace(last, c=6)) and not why(replace(last, groups=4, k=8))
    assert "dtype='float16' is neither int8 nor uint8" in why(replace(last, dtype="float16"))
    assert choose(last, TARGETS[0]).algorithm is WORDS
    assert explain(LAYER, device="cuda").chosen == "direct"
    assert choose(replace(last, c=3, k=64), TARGETS[0]).algorithm is WORDS


@pytest.mark.parametrize("dtype", [pytest.param("int8", marks=pytest.mark.exhaustive), "uint8"])
def test_kernels_are_exact_at_the_bound_of_sums(dtype: Any) -> None:
    """As many products of the largest size as int32 can sum, and as many words of them as fit."""
    for algorithm, channels in ((DIRECT, MOST[dtype]), (WORDS, MOST[dtype] // 4 * 4)):
        problem = ConvProblem(1, channels, 1, 1, 2, 1, 1, layout="NHWC", dtype=dtype)
        x = np.full(problem.x_shape, 255 if dtype == "uint8" else -128, dtype)
        w = np.full(problem.w_shape, -128, np.int8)
        w[1] = 127
        y = np.zeros(problem.y_shape, np.int32)
        config = next(iter(algorithm.configs(problem, TARGETS[0])))
        plan = algorithm.plan(problem, config, TARGETS[0])
        emulator.run_plan(plan, {"x": x, "w": w, "bias": None, "y": y}, orders=("ascending",))
        np.testing.assert_array_equal(y.ravel(), [int(x.flat[0]) * sign * channels for sign in (-128, 127)])


def test_loose_words_are_those_of_channels_that_do_not_come_in_fours() -> None:
    for c, groups, words, kind in ((8, 1, 2, ""), (6, 1, 2, "loose_"), (3, 1, 1, "loose_"), (12, 2, 4, "loose_")):
        problem = replace(LAYER, layout="NHWC", c=c, groups=groups, k=8, dtype="uint8")
        config = next(iter(WORDS.configs(problem, TARGETS[0])))
        constants = dict(WORDS.plan(problem, config, TARGETS[0]).launches[0].problem)
        assert constants["c"] == words and constants["group_c"] == words // groups
        assert (constants["channel_bytes"], constants["group_bytes"]) == (c, c // groups)
        assert constants["element"] == f"leanconv::{kind}uint8x4" and constants["filter"] == f"leanconv::{kind}int8x4"
        assert (config.stages == 2) == bool(kind)


def test_words_have_the_offsets_of_their_bytes() -> None:
    """Offsets of 32 bits reach as many bytes of words as they do of integers."""
    for n, wide in ((1, False), (2**31 // (64 * 64 * 64) + 1, True)):
        problem = ConvProblem(n, 64, 64, 64, 8, 1, 1, layout="NHWC", dtype="int8")
        config = next(iter(WORDS.configs(problem, TARGETS[0])))
        (launch,) = WORDS.plan(problem, config, TARGETS[0]).launches
        constants = dict(launch.problem)
        assert (constants["wide"], constants["c"], constants["group_c"]) == (wide, 16, 16)
        assert constants["element"] == constants["filter"] == "leanconv::int8x4" and constants["result"] == "int"


def test_the_benchmark_counts_no_error() -> None:
    what = "conv:n1,c8,h9,w9,k4,r3,s3,NCHW,int8,bias"
    how: dict[str, Any] = {"device": "cpu", "quick": True, "progress": False, "engines": ("leanconv", "torch-cpu")}
    results = run_suite(what, **how)
    assert results.rows and all(row.error == 0 and row.dtype == "int8" for row in results.rows)
    assert {(row.engine, row.ceiling) for row in results.rows} == {("leanconv", "copy")}
