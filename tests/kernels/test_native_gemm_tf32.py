"""TF32 on tensor cores: both factors rounded to the nearest.

More is in test_tensor_cores.py and test_native_phases.py.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from leanconv.call.choose import NoAlgorithmError, choose, for_kept_filters
from leanconv.call.explain import NOMINAL
from leanconv.cpu import oracle
from leanconv.problem import ConvProblem
from leanconv.words import parse_problem
from tests import emulator, proof
from tests.cases import TARGETS, draw_conv
from tests.cases_tensor import TF32_CASES
from tests.variants import NAMED

TF32 = NAMED["native_gemm_tf32"]


@pytest.mark.parametrize("kernel", [TF32, NAMED["native_gemm_window_tf32"]], ids=lambda kernel: kernel.strategy)
@pytest.mark.parametrize("op", ["fprop", "dgrad"])
def test_both_factors_are_rounded_to_the_nearest(op, kernel):
    """Positive factors, cut off, would make results smaller by 7e-4; rounded, their errors have both signs."""
    problem = ConvProblem(1, 32, 6, 6, 32, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", precision="tf32", op=op)
    given = draw_conv(problem, "positive")
    out = problem.operands[-1]
    given[out.role] = np.full(out.shape, np.nan, "float32")
    config = next(iter(kernel.configs(problem, TARGETS[0])))
    proof.run_on_emulator(kernel.plan(problem, config, TARGETS[0]), given)
    read = problem.operands[0].role
    exact = oracle.conv2d(problem, given[read], given["w"])
    assert abs(float((given[out.role] / exact - 1).mean())) < 3e-5


def test_integers_of_eleven_bits_are_exact():
    problem = next(case.problem for case in TF32_CASES if case.name == "tf32-copies-long-nhwc")
    problem = problem.plain
    random = np.random.default_rng(3)
    x = random.integers(-2047, 2048, problem.x_shape).astype("float32")
    w = random.integers(-1, 2, problem.w_shape).astype("float32")
    y = np.full(problem.y_shape, np.nan, "float32")
    config = next(iter(TF32.configs(problem, TARGETS[0])))
    proof.run_on_emulator(TF32.plan(problem, config, TARGETS[0]), {"x": x, "w": w, "bias": None, "y": y})
    assert (y == oracle.conv2d(problem, x, w)).all()


def test_filters_are_rounded_where_all_windows_read_padding():
    """Such a layer's gradient needs no filters; the layer itself multiplies them by zeros."""
    problem = ConvProblem(2, 32, 1, 6, 32, 1, 3, stride=(2, 1), padding=(1, 1, 1, 1), layout="NHWC", precision="tf32")
    proof.check(TF32, problem, kinds=("zero-mean",))


@pytest.mark.parametrize("op", ["fprop", "dgrad"])
def test_filters_of_all_slices_are_rounded(op):
    """So many that the launch which rounds those of one slice alone would end before the last."""
    problem = ConvProblem(
        1, 8, 5, 6, 16, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", precision="tf32", op=op, d=3, t=3, padding_d=(1, 1)
    )
    proof.check(TF32, problem, kinds=("zero-mean",))


@pytest.mark.parametrize(("filters", "split", "stages"), [(32, 1, 8), (64, 1, 4), (64, 2, 5), (128, 4, 6)])
def test_filters_rounded_in_place_are_those_rounded_before(filters, split, stages):
    """Bit by bit, by CTAs that have several tiles, whose copies land in another order than they began in."""
    problem = parse_problem("conv:n1,c256,h11,w12,k64,r1,NHWC,tf32") if split == 1 else None
    problem = problem or parse_problem("conv:n1,c256,h7,k256,r1,NHWC,tf32")
    target = replace(TARGETS[0], multiprocessors=1) if split == 1 else TARGETS[0]
    config = next(
        config
        for config in TF32.configs(problem, TARGETS[0])
        if (config.filters, config.split, config.in_place) == (filters, split, True)
    )
    given, out, found = draw_conv(problem, "zero-mean"), problem.operands[-1], []
    for in_place in (True, False):
        found.append(np.full(out.shape, np.nan, "float32"))
        each = replace(config, stages=stages, in_place=in_place)
        emulator.run_plan(TF32.plan(problem, each, target), {**given, out.role: found[-1]}, orders=emulator.ORDERS)
    assert np.isfinite(found[0]).all()
    assert (found[0] == found[1]).all()


@pytest.mark.parametrize(("filters", "split", "in_place"), [(32, 4, True), (64, 8, False), (128, 16, True)])
def test_a_block_of_a_cluster_stores_eight_filters(filters, split, in_place):
    problem = parse_problem("conv:n1,c1024,h5,w6,k136,r1,NHWC,tf32,bias")
    config = next(
        config
        for config in TF32.configs(problem, TARGETS[0])
        if (config.filters, config.split, config.in_place) == (filters, split, in_place)
    )
    proof.check(TF32, problem, config, kinds=("zero-mean",))


def test_no_memory_for_filters_is_enough():
    """With a limit of 0 bytes filters are rounded in place; without one a launch may round them."""
    problem = parse_problem("conv:n64,c256,h28,k256,r3,pad1,NHWC,tf32")
    assert not choose(problem, NOMINAL, "native_gemm_tf32", None).config.in_place
    chosen = choose(problem, NOMINAL, "native_gemm_tf32", 0)
    assert chosen.config.in_place
    assert chosen.plan(problem, NOMINAL).prepared_bytes == 0
    with pytest.raises(NoAlgorithmError, match="workspace_limit is 0"):
        choose(replace(problem, op="dgrad"), NOMINAL, "native_gemm_tf32", 0)


def test_filters_that_stay_packed_are_rounded_before():
    """Once for all calls: then each stage takes less."""
    problem = parse_problem("conv:n1,c256,h14,k1024,r1,NHWC,tf32")
    choice, kept = (choose(problem, NOMINAL, "native_gemm_tf32", None, each) for each in ("", "same bits"))
    plan = kept.plan(problem, NOMINAL)
    assert choice.config.in_place and not choice.plan(problem, NOMINAL).prepare
    assert kept.config == next(
        config for cycles, config in TF32.within(problem, NOMINAL) if cycles == kept.cost and not config.in_place
    )
    assert len(plan.prepare) == 1 and plan.prepared_bytes == 4 * 256 * 1024
    rounding = TF32.speeds.of(NOMINAL).packing + 2 * plan.prepared_bytes / NOMINAL.bytes_per_cycle
    assert kept.cost - rounding < choice.cost < kept.cost
    timed = replace(choice, us=6.0, source="a table")
    assert for_kept_filters(timed, problem, NOMINAL) == kept, "whose time is not that of what was timed"
    assert for_kept_filters(kept, problem, NOMINAL) is kept


def test_registers_of_residuals_leave_none_for_rounding():
    """More sums would spill more, as a thread of the producer takes its registers from them."""
    problem = replace(parse_problem("conv:n64,c256,h14,k1024,r1,NHWC,tf32"), bias=True, add=True)
    tiles = {(c.m_tiles, c.filters) for c in TF32.configs(problem, NOMINAL) if c.in_place}
    assert tiles and all(m_tiles == 1 and filters < 256 for m_tiles, filters in tiles)


@pytest.mark.parametrize(
    ("words", "us"),
    [
        ("n1,c64,h56,k256,r1", 3.7),
        ("n1,c256,h14,k1024,r1", 4.8),
        ("n1,c64,h56,k64,r3,pad1", 7.0),
    ],
)
def test_the_quickest_configuration_is_about_as_quick(words, us):
    """Explored (H200): the least of nine configurations, in a graph, with operands in the L2 cache: 0.8 us less than a
    call by itself, which is what is predicted, and 0.4 us more less for a launch that rounds filters."""
    quickest = TF32.within(parse_problem(f"conv:{words},NHWC,tf32"), NOMINAL, inf)[0][0]
    assert quickest / 1980 - 0.8 == pytest.approx(us, rel=0.25)


@pytest.mark.parametrize(
    ("words", "filters", "split", "us"),
    [
        ("c512,h14,k512,r3,stride2,pad1", 64, 8, 11.5),
        ("c2048,h7,k512,r1", 64, 8, 8.5),
        ("c1024,h14,k256,r1", 32, 4, 6.9),
        ("c128,h28,k128,r3,pad1", 32, 4, 7.4),
        ("c256,h14,k256,r3,pad1", 64, 8, 8.6),
        ("c1024,h16,k1024,r3,pad1", 192, 8, 35.0),
    ],
)
def test_few_pixels_are_shared_by_many_blocks(words, filters, split, us):
    """Explored (H200, 808aeb02): the quickest of fourteen configurations, with operands that are not in the cache."""
    cycles, config = TF32.within(parse_problem(f"conv:n1,{words},NHWC,tf32"), NOMINAL, inf)[0]
    assert (config.filters, config.split, config.in_place) == (filters, split, True)
    assert cycles / 1980 == pytest.approx(us, rel=0.2)


@pytest.mark.parametrize(
    ("words", "split", "us"),
    [
        ("c256,h64,k256", 4, 37.7),  # 32 clusters
        ("c512,h64,k256", 4, 60.5),
        ("c512,h32,k512", 8, 43.6),  # 16 clusters
        ("c1024,h32,k512", 8, 72.7),
        ("c128,h28,k128", 8, 14.4),  # 7 clusters
        ("n32,c512,h7,k512", 4, 35.6),  # 26 clusters
    ],
)
def test_clusters_that_find_no_place_wait(words, split, us):
    """Explored (H200, 6f49aa5 and 15b88ad0): 3x3 layers in tiles of 128 pixels and 256 filters."""
    problem = parse_problem(f"conv:{'' if words[0] == 'n' else 'n1,'}{words},r3,pad1,NHWC,tf32")
    (cycles,) = (
        cycles
        for cycles, config in TF32.within(problem, NOMINAL, inf)
        if (config.warpgroups, config.m_tiles, config.filters, config.split) == (2, 1, 256, split)
        and not config.in_place
    )
    assert cycles / 1980 == pytest.approx(us, rel=0.12)
