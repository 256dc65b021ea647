"""16-bit elements on tensor cores: the rows that copies bring, long sums.

More is in test_tensor_cores.py and test_native_phases.py.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanconv.bench import columns
from leanconv.bench.suites import parse_problem
from leanconv.call.choose import by_model
from leanconv.call.explain import NOMINAL
from leanconv.cpu import oracle
from leanconv.dtypes import DTYPES
from leanconv.kernels import cost
from leanconv.problem import ConvProblem
from tests import proof, selection
from tests.cases import TARGETS, draw_conv
from tests.cases_16bit import NATIVE_CASES
from tests.kernels.tensor_cores import LAYERS
from tests.variants import NAMED

NHWC = NAMED["native_gemm_16bit"]
LAYER = LAYERS[NHWC.stem]


def named(name):
    return next(case.problem for case in NATIVE_CASES if case.name == f"{name}-nhwc")


def test_small_outputs_share_the_reduction_over_a_cluster():
    problem = named("float16-copies-long")
    config = next(iter(NHWC.configs(replace(problem, c=1024), TARGETS[0])))
    assert config.split > 1
    for split in (2, 4, 8):
        longer = replace(problem, c=256)
        config = next(c for c in NHWC.configs(longer, TARGETS[0]) if c.split == split)
        proof.check(NHWC, longer, config, kinds=("zero-mean",))


#: Filters of a tile, CTAs that share them, and changes of a problem; each stores 32, 32, 96 and 32 bytes of a pixel.
SHARES: list[tuple[int, int, dict[str, Any]]] = [
    (32, 2, {}), (128, 8, {"k": 67}), (192, 4, {"dtype": "bfloat16"}), (256, 16, {"c": 2048, "r": 1, "s": 1, "k": 248}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("filters", "split", "changes"), selection.marked(SHARES, SHARES[1:], lambda each: (each, str(each)))
)
@pytest.mark.parametrize("op", ["fprop", "dgrad"])
def test_a_block_of_a_cluster_stores_few_filters(op, filters, split, changes):
    """With a bias and a residual, as rows of whole sectors."""
    problem = replace(named("float16-copies-long"), **{"c": 256} | changes)
    if op == "dgrad":
        problem = replace(
            problem, op=op, c=problem.k // 8 * 8, k=problem.c, bias=False, scale=False, add=False, activation=None
        )
    config = next(c for c in NHWC.configs(problem, TARGETS[0]) if (c.filters, c.split) == (filters, split))
    proof.check(NHWC, problem, config, kinds=("zero-mean",))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_long_sums_of_one_sign_are_cut_by_less_than_a_unit(dtype):
    """The tensor core rounds toward zero: 2304 positive products lose at most 2^-23 of the sum each sixteen."""
    problem = ConvProblem(1, 256, 4, 4, 32, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", dtype=dtype)
    given = draw_conv(problem, "positive")
    y = np.full(problem.y_shape, np.nan, dtype)
    config = next(iter(NHWC.configs(problem, TARGETS[0])))
    proof.run_on_emulator(NHWC.plan(problem, config, TARGETS[0]), {**given, "y": y})
    exact = oracle.conv2d(problem, given["x"], given["w"])
    cut = 2304 / 16 * 2.0**-23
    assert float((abs(y.astype(np.float64) - exact) / exact).max()) <= DTYPES[dtype].roundoff + cut


@pytest.mark.parametrize(("op", "channels", "prepared"), [("fprop", 64, 0), ("dgrad", 64, 0), ("dgrad", 12, 1)])
def test_filters_are_read_as_they_lie(op, channels, prepared):
    """Of a gradient where copies can: its layer's channels are whole 16 bytes."""
    problem = replace(LAYER, op=op, c=channels, bias=False, activation=None)
    config = next(iter(NHWC.configs(problem, TARGETS[0])))
    plan = NHWC.plan(problem, config, TARGETS[0])
    assert (len(plan.launches), len(plan.prepare), plan.workspace_bytes) == (1, prepared, 0)
    assert bool(plan.prepared_bytes) is bool(prepared)


@pytest.mark.parametrize(
    ("channels", "groups", "blocks"),
    [
        (256, 1, {64}), (64, 1, {64}), (96, 1, {32, 64}), (24, 1, {32}), (40, 1, {16, 64}), (8, 1, {16}),
        (80, 1, {16, 32}), (144, 1, {16, 32, 64}), (96, 4, {32}), (144, 4, {16}),
    ],
)  # fmt: skip
def test_rows_are_few_or_have_few_zeros(channels, groups, blocks):
    problem = replace(LAYER, c=channels * groups, groups=groups)
    configs = list(NHWC.configs(problem, TARGETS[0]))
    assert {config.channel_block for config in configs} == blocks
    for config in configs:
        taps = problem.r * problem.s * -(-channels // config.channel_block)
        assert taps % config.stage_blocks == 0 and config.stages >= 3


def test_zeros_at_the_end_of_wide_rows_add_nothing():
    problem = ConvProblem(1, 144, 3, 3, 16, 1, 2, layout="NHWC", dtype="float16")
    smallest = min(NHWC.configs(problem, TARGETS[0]), key=lambda config: config.threads * config.sums)
    for block in (16, 32, 64):
        config = next(
            each
            for each in NHWC.configs(problem, TARGETS[0])
            if each.channel_block == block and (each.threads, each.sums) == (smallest.threads, smallest.sums)
        )
        proof.check(NHWC, problem, config, kinds=("zero-mean",))


def test_predictions_are_what_was_measured():
    """Layers of torchvision's networks on an H200, whole calls of what the cost model chose."""
    path = Path(__file__).resolve().parents[2] / "benchmarks/results/nvidia-h200/layers.json"
    found, speeds = [], type(NHWC).speeds.of(NOMINAL)
    for row in columns.read(path)["rows"]:
        problem = parse_problem(row["problem"])
        if row["algorithm"] == "native_gemm" and problem.groups == 1:
            choice = by_model(problem, NOMINAL, "native_gemm", row["limit"])
            if choice.algorithm is NHWC:
                # of a gradient a launch rearranged the filters then
                bytes_moved = 4 * problem.k * problem.c * problem.taps
                launch = speeds.packing + bytes_moved / NOMINAL.bytes_per_cycle if problem.op == "dgrad" else 0
                found.append((row["us"], (choice.cost + launch) / 1980 / row["us"]))
    assert len(found) > 50
    assert statistics.median(abs(ratio - 1) for _, ratio in found) < 0.08
    assert all(0.75 < ratio < 1.25 for us, ratio in found if us < 10)


def test_what_strides_pass_over_is_not_read_forward_and_written_as_zeros_backward():
    layer = replace(LAYER, n=32, c=256, h=56, w=56, k=512, r=1, s=1, padding=(0, 0, 0, 0), bias=False, activation=None)
    strided = replace(layer, stride=(2, 2))
    assert cost.moved_bytes(layer) == layer.bytes
    x, y = 2 * 32 * 256 * 56**2, 2 * 32 * 512 * 28**2
    assert cost.moved_bytes(strided) == x / 4 + y + 2 * 256 * 512
    # nine taps two pixels apart read the same pixels that one does, and nine neighbouring taps all of them
    dilated = replace(strided, r=3, s=3, dilation=(2, 2), padding=(2, 2, 2, 2))
    assert cost.moved_bytes(dilated) == x / 4 + y + 2 * 256 * 512 * 9
    assert cost.moved_bytes(replace(dilated, dilation=(1, 1), padding=(1, 1, 1, 1))) == dilated.bytes
    beside = {
        (problem.layout, problem.stride[0], problem.r): cost.fitted(NHWC, problem, NOMINAL).beside
        for layout in ("NHWC", "NCHW")
        for each in (layer, strided, replace(strided, r=3, s=3, padding=(1, 1, 1, 1)))
        for problem in [replace(each, layout=layout, op="dgrad")]
    }
    speeds = cost.GpuSpeeds.of(NOMINAL)
    assert beside["NHWC", 1, 1] == beside["NCHW", 1, 1] == beside["NHWC", 2, 3] == 0
    # of four pixels one is written by a phase; zeros are stored by 16 bytes
    assert beside["NHWC", 2, 1] == pytest.approx(3 / 4 * x / NOMINAL.bytes_per_cycle)
    single = replace(strided, op="dgrad", c=12)
    assert cost.fitted(NHWC, single, NOMINAL).beside == pytest.approx(speeds.zeros[0] * x / 2 * 12 / 256)
    assert beside["NCHW", 2, 1] == pytest.approx((speeds.zeros[1] + speeds.scattered / 4) * x / 2)
    assert beside["NCHW", 2, 3] == pytest.approx(speeds.scattered * x / 2)
    added = replace(strided, op="dgrad", accumulate=True)
    assert cost.fitted(NHWC, added, NOMINAL).beside == 0


def test_copies_of_short_rows_packing_and_single_stores_count():
    def cycles(**changes):
        layer = replace(LAYER, n=32, h=28, w=28, c=64, k=64, bias=False, activation=None)
        return min(time for time, _ in NHWC.timed(replace(layer, **changes), NOMINAL))

    speeds = type(NHWC).speeds.of(NOMINAL)
    assert cycles(c=16) > 0.98 * cycles(c=32)  # as many rows, of half the bytes
    assert cycles(op="dgrad") == cycles(), "nothing is packed"
    packing = speeds.packing + 2 * 2 * 12 * 64 * 9 / NOMINAL.bytes_per_cycle
    # those of 16 lie in rows that are partly outside
    assert cycles(op="dgrad", c=12) > cycles(op="dgrad", c=16) + 0.99 * packing
    assert cycles(k=60) > 1.35 * cycles()
    # a tile's filters that do not exist are not stored
    assert cycles(k=20) < 0.7 * cycles(k=60)


@pytest.mark.parametrize(
    ("words", "stem"),
    [
        ("n8,c64,d16,h56,k230,t1,r3,stride1x2x2,pad0x1x1,NDHWC", "sync"),  # 116 and 160 us
        ("n8,c256,h64,k255,r1,NHWC", "16bit"),  # 55 and 63
        ("n1,c64,h256,k21,r1,NHWC", "16bit"),  # 11 and 12.5, the quickest of either 9.4 and 10.7
    ],
)
def test_filters_of_no_whole_16_bytes_run_the_quicker_strategy(words, stem):
    """Explored (H200, 808aeb02 and 7470b3a5), operands not in the cache."""
    problem = parse_problem(f"conv:{words},bfloat16")
    assert by_model(problem, NOMINAL, "auto", 0).algorithm.stem == f"native_gemm_{stem}"
