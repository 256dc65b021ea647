"""Groups of few channels on tensor cores, forward and both gradients: what tiles share, and what groups must not."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest

from leanconv.call.explain import NOMINAL
from leanconv.cpu import oracle
from leanconv.kernels import cost
from leanconv.kernels.common.split_k import MOST_PIXELS
from leanconv.kernels.mma_sync.native_gemm_groups import sectors, windows_of
from leanconv.problem import ConvProblem
from tests import emulator, proof
from tests.cases import TARGETS, draw_conv
from tests.cases_16bit import NATIVE_CASES
from tests.cases_tensor import TF32_GROUP_CASES
from tests.variants import NAMED

GEMM, WEIGHT, SPLIT_K = (
    NAMED[name] for name in ("native_gemm_groups", "native_weight_groups", "native_weight_groups_split_k")
)
CASES = [case for case in (*NATIVE_CASES, *TF32_GROUP_CASES) if "groups-" in case.name]
GROUPS = [case for case in CASES if not GEMM.reasons(case.problem, TARGETS[0])]
WEIGHTS = [case for case in CASES if not WEIGHT.reasons(case.problem, TARGETS[0])]
LAYER = ConvProblem(32, 256, 56, 56, 256, 3, 3, padding=(1, 1, 1, 1), groups=32, layout="NHWC", dtype="float16")
TF32 = replace(LAYER, dtype="float32", precision="tf32")


def named(name):
    return next(case.problem for case in CASES if case.name == f"{name}-nhwc")


@pytest.mark.parametrize("case", GROUPS, ids=lambda case: case.name)
def test_right_with_the_configuration_that_differs_most(case):
    """The best guess, which other tests run, has the fewest filters; the last of the extremes has the most."""
    *_, last = proof.extreme_configs(GEMM, case.problem, TARGETS[0])
    proof.check(GEMM, case.problem, last, kinds=("zero-mean",))


@pytest.mark.parametrize("case", WEIGHTS, ids=lambda case: case.name)
def test_gradients_of_filters_are_right(case):
    for algorithm in (WEIGHT, SPLIT_K):
        *_, last = proof.extreme_configs(algorithm, case.problem, TARGETS[0])
        proof.check(algorithm, case.problem, last, kinds=("zero-mean",))
    shared = next(c for c in WEIGHT.configs(case.problem, TARGETS[0]) if c.split > 1)
    proof.check(WEIGHT, case.problem, shared, kinds=("zero-mean",))


def test_a_block_computes_several_tiles():
    problem = named("float16-groups-fours")
    config = next(c for c in GEMM.configs(problem, TARGETS[0]) if c.filters == 24)
    config, small = replace(config, rows=4, columns=4, min_blocks=1), replace(TARGETS[0], multiprocessors=2)
    assert config.tiles(windows_of(problem))[1] > 2 * config.workers(windows_of(problem), small)
    proof.check(GEMM, problem, config, kinds=("zero-mean",), target=small)


@pytest.mark.parametrize(
    "name", ["float16-groups-fours", "float16-groups-twelves", "bfloat16-groups-eights", "tf32-groups-fours"]
)
def test_what_is_not_finite_stays_in_its_group(name):
    """Eight filters of several groups are multiplied with zeros where channels are others', and half an mma is zero."""
    problem = replace(named(name), activation=None, bias=False, scale=False, add=False)
    given = draw_conv(problem, "zero-mean")
    x, w = given["x"], given["w"]
    x[0, 3, 4, 5], x[1, 0, 0, 17], x[1, 5, 6, 11] = np.inf, np.nan, -np.inf
    y = np.full(problem.y_shape, np.nan, problem.dtype)
    config = next(iter(GEMM.configs(problem, TARGETS[0])))
    emulator.run_plan(GEMM.plan(problem, config, TARGETS[0]), {**given, "y": y})
    with np.errstate(invalid="ignore"):
        right = oracle.conv2d(problem, x, w)
    assert np.isnan(right).any() and np.isinf(right).any()
    assert np.array_equal(np.isnan(y), np.isnan(right)) and np.array_equal(np.isinf(y), np.isinf(right))
    assert np.array_equal(y[np.isinf(y)] > 0, right[np.isinf(y)] > 0)


def run(algorithm, problem, given):
    """The result of the best guess on the emulator."""
    out = problem.operands[-1]
    given[out.role] = np.full(out.shape, np.nan, out.dtype)
    config = next(iter(algorithm.configs(problem, TARGETS[0])))
    proof.run_on_emulator(algorithm.plan(problem, config, TARGETS[0]), given)
    return given[out.role]


SMALL_TF32 = ConvProblem(2, 24, 9, 11, 24, 3, 3, padding=(1, 1, 1, 1), groups=6, layout="NHWC", precision="tf32")


@pytest.mark.parametrize(("algorithm", "op"), [(GEMM, "fprop"), (GEMM, "dgrad"), (WEIGHT, "wgrad")])
def test_float32_is_rounded_to_the_nearest(algorithm, op):
    """Positive factors, cut off, would make results smaller by 7e-4; rounded, their errors have both signs."""
    problem = replace(SMALL_TF32, op=op)
    given = draw_conv(problem, "positive")
    y = run(algorithm, problem, given)
    first, second, *_ = problem.operands
    exact = oracle.conv2d(problem, given[first.role], given[second.role])
    errors = y / exact - 1
    assert abs(float(errors.mean())) < 3e-5 and 1e-5 < float(np.abs(errors).max()) < 2**-10


@pytest.mark.parametrize(("algorithm", "op"), [(GEMM, "fprop"), (GEMM, "dgrad"), (WEIGHT, "wgrad")])
def test_integers_of_eleven_bits_are_exact(algorithm, op):
    problem = replace(SMALL_TF32, op=op)
    random, (first, second, *_) = np.random.default_rng(3), problem.operands
    given = {first.role: random.integers(-2047, 2048, first.shape).astype("float32"), "bias": None}
    given[second.role] = random.integers(-1, 2, second.shape).astype("float32")
    assert (run(algorithm, problem, given) == oracle.conv2d(problem, given[first.role], given[second.role])).all()


@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize(("algorithm", "op"), [(GEMM, "fprop"), (GEMM, "dgrad"), (WEIGHT, "wgrad")])
def test_neighbouring_windows_meet_each_bank_once(algorithm, op, stride):
    """Rows of 16 bytes of eight windows, or, where lanes load by themselves, of 32 bytes of four."""
    problem = replace(TF32, h=28, w=28, stride=stride, op=op)
    windows, (count, size) = windows_of(problem), (4, 8) if op == "wgrad" else (8, 4)
    for config in algorithm.configs(problem, TARGETS[0]):
        row, pitch = config.row_pixels(windows) * windows.rows.step, config.pitch(config.channels(windows), windows)
        places = [each // config.across * row + each % config.across for each in range(count)]
        assert len({place * pitch * 4 % 32 // size for place in places}) == count, config


def test_filters_are_read_where_they_lie():
    for layer, op in product((LAYER, TF32), ("fprop", "dgrad")):
        problem, launches = replace(layer, op=op), 1
        plan = GEMM.plan(problem, next(iter(GEMM.configs(problem, TARGETS[0]))), TARGETS[0])
        assert (len(plan.launches), plan.prepare, plan.prepared_bytes, plan.workspace_bytes) == (launches, (), 0, 0)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"groups": 1}, "groups=1: it computes groups of few channels"),
        ({"layout": "CHWN"}, "layout='CHWN' is neither 'NCHW' nor 'NHWC'"),
        ({"groups": 128}, "leaves 2 in a group, no multiple of 4"),
        ({"c": 252, "groups": 63, "k": 252}, "c=252 is no multiple of 8"),
        ({"dtype": "float32", "precision": "tf32", "c": 126, "groups": 63, "k": 252}, "c=126 is no multiple of 4"),
        ({"dtype": "float32"}, "it rounds float32 to TF32, and precision='fp32' was requested"),
        ({"groups": 2, "r": 5, "s": 5}, "filters of 128 channels x 5x5 take 400 registers of a thread"),
        ({"dtype": "int8"}, "dtype='int8'"),
    ],
)
def test_limits(changed, why):
    assert why in "; ".join(GEMM.reasons(replace(LAYER, **changed), TARGETS[0]))


FEW_FILTERS = ConvProblem(
    2, 72, 12, 30, 12, 3, 2, groups=3, stride=(5, 2), padding=(2, 1, 3, 4), dilation=(2, 3), op="wgrad"
)


@pytest.mark.parametrize(
    ("algorithm", "problem", "why"),
    [
        (WEIGHT, replace(FEW_FILTERS, precision="tf32"),
         "a tile of windows of 3x2 with stride 5,2 takes more than the 232448 bytes"),
        (WEIGHT, replace(FEW_FILTERS, dtype="float16", c=48, k=264, groups=6), "44 filters make no tile of up to 64"),
        (GEMM, replace(FEW_FILTERS, precision="tf32", op="fprop", c=64, k=88, groups=2, r=3, s=3),
         "44 filters make no tile of up to 128 that a CTA has warps and registers for"),
    ],
)  # fmt: skip
def test_what_no_tile_can_compute_is_refused(algorithm, problem, why):
    assert why in algorithm.reasons(problem, TARGETS[0])[0]
    assert not [*algorithm.configs(problem, TARGETS[0])]


def test_what_is_not_refused_has_a_configuration():
    random, met = Random(7), set()

    def numbers(count, least, most):
        return tuple(random.randint(least, most) for _ in range(count))

    for _ in range(300):
        groups, (c, k, h, w, r, s) = (
            random.choice([2, 3, 8]),
            (*numbers(2, 1, 11), *numbers(2, 1, 29), *numbers(2, 1, 3)),
        )
        problem = ConvProblem(
            1, 4 * c * groups, h, w, 4 * k * groups, r, s, groups=groups, stride=numbers(2, 1, 8),
            dilation=numbers(2, 1, 3), padding=numbers(4, 0, 4), layout=random.choice(["NCHW", "NHWC"]),
        )  # fmt: skip
        way = random.choice([{"dtype": "float16"}, {"precision": "tf32"}])
        for (algorithm, op), target in product(((GEMM, "fprop"), (GEMM, "dgrad"), (WEIGHT, "wgrad")), TARGETS):
            each = replace(problem, op=op, **way)
            if min(problem.p, problem.q) > 0 and not algorithm.reasons(each, target):
                assert next(iter(algorithm.configs(each, target)), None), (each, target)
                met.add((op, each.dtype, target.arch))
    assert len(met) == 3 * (2 * len(TARGETS) - 1), "TF32 not on sm_80"


@pytest.mark.parametrize(("problem", "most"), [(LAYER, MOST_PIXELS), (TF32, MOST_PIXELS // 2)])
def test_no_warp_sums_more_pixels_than_a_tensor_core_may(problem, most):
    problem, fewest = replace(problem, op="wgrad", n=1600), set()
    for each in (*WEIGHT.configs(problem, TARGETS[0]), *SPLIT_K.configs(problem, TARGETS[0])):
        together = each.warps // (each.filters // 8 // each.blocks) * each.split * each.split_k
        assert problem.pixels <= most * together, each
        fewest.add(each.split * each.split_k)
    assert min(fewest) > 1 < len(fewest)


def test_older_gpus_run_both_and_have_no_clusters():
    old = TARGETS[1]
    assert "sm_80 is older than sm_90, which rounds float32 to TF32 by one instruction" in GEMM.reasons(TF32, old)
    assert not any(each.reasons(replace(TF32, op=op), target) for target in (TARGETS[0], *TARGETS[2:])
                   for each, op in ((GEMM, "fprop"), (GEMM, "dgrad"), (WEIGHT, "wgrad")))  # fmt: skip
    assert not GEMM.reasons(LAYER, old)
    problem = replace(LAYER, op="wgrad")
    assert not WEIGHT.reasons(problem, old) and {c.split for c in WEIGHT.configs(problem, old)} == {1}


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [(GEMM, "float16-gradient-groups-fours-nchw"), (GEMM, "bfloat16-groups-eights-nhwc"),
     (SPLIT_K, "bfloat16-weight-groups-eights-nchw"), (GEMM, "tf32-groups-fours-nchw"),
     (WEIGHT, "tf32-groups-weight-fours-nhwc")],
)  # fmt: skip
def test_wide_offsets(algorithm, name):
    problem = next(case.problem for case in CASES if case.name == name)
    config = next(iter(algorithm.configs(problem, TARGETS[0])))
    wide = proof.wide_offsets(algorithm, problem, config, TARGETS[0])
    proof.check(algorithm, problem, config, kinds=("zero-mean",), change=lambda plan: wide)


def test_whole_rows_of_float32_are_read_at_once():
    """A tile of 16 x 16 pixels of two channels, of images of 14 rows: in sectors of 32 bytes, and one more each."""
    layer = replace(TF32, layout="NCHW", h=14, w=14)
    assert sectors(layer, 2, 16, 16) == 2 * 16 * 3 * 32
    assert sectors(layer, 2, 16, 16, image=(14, 14)) == 2 * (25 + 1) * 32
    assert sectors(layer, 2, 16, 16, image=(14, 24)) == 2 * 14 * 3 * 32
    # speeds of 16 bits are fitted to tiles as they are
    narrow = replace(layer, dtype="float16", precision="fp32")
    assert sectors(narrow, 2, 16, 16, image=(14, 14)) == sectors(narrow, 2, 16, 16) == 2 * 16 * 2 * 32


def test_scattered_stores_of_float32_are_in_the_prediction():
    """Not so in 16 bits; zeros where no phase writes count besides in both."""
    narrow = replace(LAYER, op="dgrad", layout="NCHW", stride=(2, 2))
    wide, speeds = replace(narrow, dtype="float32", precision="tf32"), cost.GpuSpeeds.of(NOMINAL)
    elements = 32 * 256 * 56 * 56
    assert cost.fitted(GEMM, narrow, NOMINAL).beside == pytest.approx(speeds.scattered * elements)
    assert cost.fitted(GEMM, wide, NOMINAL).beside == 0
    one = replace(wide, r=1, s=1, padding=(0, 0, 0, 0))
    assert cost.fitted(GEMM, one, NOMINAL).beside == pytest.approx(speeds.zeros[1] * elements)
    forward = [replace(wide, op="fprop", stride=(stride, stride)) for stride in (1, 2)]
    assert all(cost.fitted(GEMM, each, NOMINAL) == cost.Fitted() for each in forward)


def test_one_of_fifteen_clusters_of_sixteen_waits_in_tf32():
    """Of which two CTAs fit on a multiprocessor: three measured layers took 1.5 to 1.9 times as long as in one wave."""
    layer = replace(TF32, c=120, k=120, groups=5, op="wgrad")
    found = {config: time for time, config in WEIGHT.timed(layer, NOMINAL)}
    config = next(c for c in found if (c.split, c.min_blocks) == (16, 2) and c.tiles(windows_of(layer))[0] == 15)
    fewer = replace(layer, c=96, k=96, groups=4)  # twelve clusters of the same work
    assert found[config] > 1.5 * next(time for time, c in WEIGHT.timed(fewer, NOMINAL) if c == config)
