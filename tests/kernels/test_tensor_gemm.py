"""Convolution on tensor cores: its loaders and tiles, what is kept on data of every range, and limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanconv.cpu import oracle
from leanconv.kernels.common.input_gradient import single_parts
from leanconv.kernels.hopper_fp32.filters import DEPTH, prepared_floats, stages_of
from leanconv.kernels.hopper_fp32.tensor_gemm import TensorConfig
from leanconv.options import Layout
from leanconv.problem import ConvProblem
from leanconv.runtime.compile import INCLUDE
from tests import emulator, proof, selection
from tests.cases import KINDS, TARGETS, Case
from tests.cases_tensor import LAYER, RANGES, TENSOR_CASES, drawn, in_sequential_sums, with_no_numbers
from tests.kernels.breaks import scales
from tests.kernels.patching import Patch, broken_kernels
from tests.variants import NAMED, VARIANTS

TENSOR_GEMM = NAMED["tensor_gemm"]
HOPPER = TARGETS[0]


pytestmark = pytest.mark.usefixtures("one_block_settles")


def _ways(case: Case) -> list[TensorConfig]:
    """A configuration of each kind: with one and two chunks of filters, each way that pixels come, and a split."""
    configs = list(TENSOR_GEMM.configs(case.problem, HOPPER))
    kinds: dict[Any, TensorConfig] = {}
    for config in configs:
        if config.filters <= 128:
            split = min(config.split, 2)
            kind = config.flat, config.row_lines > 0, config.spacing > 0, config.partials, config.chunks > 1, split
            kinds.setdefault(kind, config)
    return list(kinds.values())


def _every() -> list[Any]:
    """All layers in all ways; ``make test`` plays half of the layers, layouts by turns, and planes in their layers."""
    found, chosen = [], []
    for turn, case in enumerate(TENSOR_CASES):
        ways = sorted(_ways(case), key=lambda config: config.spacing > 0)
        in_planes = [config for config in ways if config.spacing] if "planes" in case.name else []
        for i, config in enumerate(ways):
            kind = "taps" if config.row_lines else "rows" if config.rows else "flat" if config.flat else "columns"
            if config.spacing:
                kind = "planes"
            name = f"{case.name}-{kind}-{config.chunks}x{config.chunk}-p{config.partials}-split{config.split}"
            found.append((case, config, name))
            if in_planes:
                chosen += [found[-1]] if config is in_planes[turn % len(in_planes)] else []
            elif case.in_turn and turn % 2 == 0 and i == turn // 2 % len(ways):
                chosen.append(found[-1])
    return selection.marked(found, chosen, lambda each: (each[:2], each[2]))


@pytest.mark.parametrize(("case", "config"), _every())
def test_every_way_of_reading_pixels(case: Case, config: TensorConfig) -> None:
    proof.check(TENSOR_GEMM, case.problem, config, kinds=KINDS[:1])


@pytest.mark.parametrize(
    ("layout", "warpgroups"),
    [
        ("NHWC", 3),
        ("NCHW", 4),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in (("NHWC", 4), ("NCHW", 3))),
    ],
)
def test_tiles_of_more_warpgroups(layout: str, warpgroups: int) -> None:
    problem = ConvProblem(2, 32, 10, 12, 64, 3, 3, padding=(1, 1, 1, 1), layout=layout)  # type: ignore[arg-type]
    config = next(c for c in TENSOR_GEMM.configs(problem, HOPPER) if c.warpgroups == warpgroups)
    proof.check(TENSOR_GEMM, problem, config, kinds=KINDS[:1])


@pytest.mark.parametrize(
    ("layout", "way"),
    [("NHWC", "rows"), ("NCHW", "columns"), pytest.param("NCHW", "flat", marks=pytest.mark.exhaustive)],
)
def test_a_tile_that_is_left_is_shared(layout: str, way: str) -> None:
    """Of five tiles each of four blocks has one, and two of them share the last one."""
    few = replace(HOPPER, multiprocessors=4)
    problem = ConvProblem(2, 64, 9, 32, 64, 3, 3, padding=(1, 1, 1, 1), layout=layout)  # type: ignore[arg-type]
    kind = way == "rows", way == "flat"
    configs = TENSOR_GEMM.configs(problem, few)
    config = next(c for c in configs if (c.rows, c.flat) == kind and (c.split, c.filters, c.pixels) == (2, 64, 128))
    (launch,) = TENSOR_GEMM.plan(problem, config, few).launches
    assert launch.grid == 4
    proof.check(TENSOR_GEMM, problem, config, kinds=KINDS[:1], target=few)


def test_blocks_have_stages_of_every_part_of_a_gradient() -> None:
    pad = (2, 2, 2, 2)
    problem = ConvProblem(1, 64, 14, 14, 352, 5, 5, (2, 2), pad, layout="NHWC", precision="fp32", op="dgrad")
    splits = set()
    for config in TENSOR_GEMM.configs(problem, HOPPER):
        splits.add(config.split)
        for part in single_parts(problem):
            stages = stages_of(part.problem, config.piece)
            assert -(-stages // config.split) * (config.split - 1) < stages, config
    assert splits > {1}


def played(x: np.ndarray, w: np.ndarray, problem: ConvProblem = LAYER, kernels: Path = INCLUDE) -> np.ndarray:
    """What the kernel computes."""
    config = next(c for c in TENSOR_GEMM.configs(problem, HOPPER) if (c.filters, c.split) == (64, 1))
    y = np.full(problem.y_shape, np.nan, np.float32)
    plan = TENSOR_GEMM.plan(problem, config, HOPPER)
    emulator.run_plan(plan, {"x": x, "w": w, "bias": None, "y": y}, kernels=kernels, orders=("ascending",))
    return y


def lost(kind: str, kernels: Path = INCLUDE) -> float:
    """The kernel's error on data of this kind, as `in_sequential_sums` counts it."""
    x, w = drawn(kind)
    return in_sequential_sums(played(x, w, kernels=kernels), x, w)


@pytest.mark.parametrize("kind", RANGES)
def test_errors_on_data_of_every_range(kind: str) -> None:
    """At most twice what a sequential float32 sum loses; on normal data less than it loses."""
    assert lost(kind) <= (1 if kind == "normal" else 2)


@pytest.mark.parametrize(("kind", "patch"), selection.every_third(scales.TENSOR_GEMM))
def test_errors_of_broken_scales_show(kind: str, patch: Patch, tmp_path: Path) -> None:
    """What the data of other tests cannot tell: each part of the split is needed by some data."""
    assert not lost(kind, broken_kernels(tmp_path, patch)) <= 2


@pytest.mark.parametrize("kind", ["channels-apart", "unseen", "normal"])
def test_channels_of_several_filters_tell_whether_they_are_small(kind: str) -> None:
    """Of filters of one tap a block of the first launch has four; a single one would doubt nearly always."""
    problem = replace(LAYER, r=1, s=1, padding=(0, 0, 0, 0))
    x, w = drawn(kind, problem)
    assert in_sequential_sums(played(x, w, problem), x, w, problem) <= 2


def test_filters_too_far_apart_for_one_scale() -> None:
    """The scale of the smallest, which the sums keep until the end, would be no number."""
    x, w = drawn("normal")
    w[1], w[2] = w[1] * np.float32(1e20), w[2] * np.float32(1e-20)
    y, reference = played(x, w), oracle.conv2d(LAYER, x, w)
    for k in (0, 1):
        assert np.linalg.norm(y[..., k] - reference[..., k]) < 1e-6 * np.linalg.norm(reference[..., k])
    assert np.abs(y[..., 2]).max() < 1e-18


def test_an_outlier_leaves_its_neighbours_alone() -> None:
    x, w = drawn("outlier")
    y, reference = played(x, w), oracle.conv2d(LAYER, x, w)
    plain = oracle.sequential_float32(LAYER, x, w)
    unseen = np.ones(y.shape, bool)
    unseen[0, 2:5, 3:6] = False
    assert np.linalg.norm((y - reference)[unseen]) < np.linalg.norm((plain - reference)[unseen])


@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "CHWN"])
def test_taps_of_opposite_scales_at_a_stride(layout: Layout) -> None:
    """At stride 2 every other column of pixels meets the middle tap alone."""
    problem = ConvProblem(4, 40, 6, 12, 64, 3, 3, stride=(1, 2), padding=(1, 1, 1, 1), layout="NHWC")
    random = np.random.default_rng(9)
    x, w = random.standard_normal(problem.x_shape), random.standard_normal(problem.w_shape)
    x[:, :, 1::2] *= 1e12
    w[:, :, [0, 2]] *= 1e-12
    axes = {"NHWC": (0, 1, 2, 3), "NCHW": (0, 3, 1, 2), "CHWN": (3, 1, 2, 0)}[layout]
    x, w = (np.ascontiguousarray(each.transpose(axes).astype(np.float32)) for each in (x, w))
    problem = replace(problem, layout=layout)
    assert oracle.absolute_error(problem, played(x, w, problem), x, w) <= 1


def test_what_is_no_number_reaches_just_the_outputs_that_see_it() -> None:
    x, w, unseen = with_no_numbers()
    np.testing.assert_array_equal(np.isfinite(played(x, w)), unseen)


def test_filters_that_are_no_numbers_leave_the_others_alone() -> None:
    x, w = drawn("normal")
    reference = played(x, w)
    w[3, 1, 2, 7], w[40, 0, 0, 0] = np.inf, np.nan
    y = played(x, w)
    others = [k for k in range(64) if k not in (3, 40)]
    assert not np.isfinite(y[..., [3, 40]]).any()
    np.testing.assert_array_equal(y[..., others], reference[..., others])


def drawn_for_one_product(kind: str, problem: ConvProblem) -> tuple[np.ndarray, np.ndarray]:
    """As `drawn`; in pixels-apart each pixel has a scale of its own: windows see larger ones again and again."""
    x, w = drawn("normal" if kind == "pixels-apart" else kind, problem)
    if kind == "pixels-apart":
        scales = np.power(10.0, np.random.default_rng(0).uniform(-9, 9, (problem.h, problem.w, 1)))
        x = (x * scales).astype(np.float32)
    return x, w


def lost_by_one_product(kind: str, problem: ConvProblem = LAYER, kernels: Path = INCLUDE) -> float:
    """The relative error of tier tf32 on data of this kind."""
    problem = replace(problem, precision="tf32")
    x, w = drawn_for_one_product(kind, problem)
    return oracle.relative_error(played(x, w, problem, kernels), oracle.conv2d(problem, x, w))


def _ranges_for_one_product() -> list[Any]:
    every = [*RANGES, "pixels-apart"]
    chosen = ("normal", "outlier", "channels-apart", "pixels-apart")
    return selection.marked(every, [kind for kind in every if kind in chosen], lambda kind: ((kind,), kind))


@pytest.mark.parametrize("kind", _ranges_for_one_product())
def test_one_product_keeps_eleven_bits(kind: str) -> None:
    """On data of every range: a row's scale makes room for what is larger, and leaves four places for it at first."""
    assert lost_by_one_product(kind) < 4e-4
    assert kind != "normal" or lost_by_one_product(kind) > 1e-4


@pytest.mark.parametrize(("kind", "patch"), selection.every_third(scales.ONE_PRODUCT))
def test_broken_scales_of_one_product_show(kind: str, patch: Patch, tmp_path: Path) -> None:
    assert not lost_by_one_product(kind, kernels=broken_kernels(tmp_path, patch)) < 4e-4


def test_one_product_leaves_what_is_no_number_where_it_is_seen() -> None:
    x, w, unseen = with_no_numbers()
    y = played(x, w, replace(LAYER, precision="tf32"))
    np.testing.assert_array_equal(np.isfinite(y), unseen)


def test_the_order_of_the_batch_does_not_matter() -> None:
    problem = replace(LAYER, n=3)
    x, w = drawn("normal", problem)
    y = played(x, w, problem)
    np.testing.assert_array_equal(played(x[::-1].copy(), w, problem), y[::-1])


def test_limits_name_the_rule() -> None:
    small = ConvProblem(1, 24, 8, 8, 24, 3, 3, groups=3)
    assert "groups=3 leaves 8 channels in a group, fewer than 16" in TENSOR_GEMM.why_not(small, HOPPER)
    many = ConvProblem(1, 9000, 8, 8, 8, 1, 1)
    assert "a filter has 9000 channels, more than 8192" in TENSOR_GEMM.why_not(many, HOPPER)
    for target in TARGETS[1:]:
        assert any(target.arch in reason for reason in TENSOR_GEMM.why_not(LAYER, target))
    exact = replace(LAYER, precision="ieee")
    assert any("'fp32'" in reason for reason in TENSOR_GEMM.reasons(exact, HOPPER))


def test_speeds_are_compared_with_what_multiplies() -> None:
    """Shares of a ceiling are those of tensor cores, a third of it where three products are one."""
    for algorithm in VARIANTS:
        of_tensor_cores = algorithm.family in selection.TENSOR_CORES
        if algorithm.stem == "native_gemm_tf32":
            assert algorithm.arithmetic(replace(LAYER, precision="tf32")) == "tf32"
            continue
        narrow = algorithm.family == "hopper_native"
        assert algorithm.arithmetic(LAYER) == ("fp16" if narrow else "fp16x3" if of_tensor_cores else "fp32")
        one_product = algorithm.arithmetic(replace(LAYER, precision="tf32"))
        assert one_product == ("fp16" if of_tensor_cores else "fp32")


def test_prepared_filters_have_room_for_all_that_is_written() -> None:
    """The host's figure is the device's: the fragments begin and end where `prepared_floats` says."""
    for case in TENSOR_CASES:
        for config in TENSOR_GEMM.configs(case.problem, HOPPER):
            plan = TENSOR_GEMM.plan(case.problem, config, HOPPER)
            assert plan.prepared_bytes == TENSOR_GEMM.prepared_bytes(case.problem)
            if case.problem.op == "fprop":
                head, every = prepared_floats(case.problem, config)
                assert head % 4 == 0 and 4 * every <= plan.prepared_bytes


def test_rings_fit_and_hold_what_is_under_way() -> None:
    for case in TENSOR_CASES:
        for config in TENSOR_GEMM.configs(case.problem, HOPPER):
            assert config.shared_bytes <= HOPPER.shared_per_block
            assert config.pixel_stages >= 2 and config.filter_stages >= max(config.partials, config.chunks)
            assert DEPTH % config.piece == 0


def test_small_outputs_split_the_reduction() -> None:
    """Seven by seven pixels of one image are one tile for each 64 filters or more: clusters share them."""
    problem = ConvProblem(1, 512, 7, 7, 512, 3, 3, padding=(1, 1, 1, 1), layout="NHWC")
    assert next(iter(TENSOR_GEMM.configs(problem, HOPPER))).split > 1
    large = replace(problem, n=128)
    assert next(iter(TENSOR_GEMM.configs(large, HOPPER))).split == 1


def test_planes_serve_small_images() -> None:
    """In NCHW, by 32 channels, where lanes can have channels in different banks and shared memory holds the images."""
    small = ConvProblem(128, 512, 7, 7, 512, 3, 3, padding=(1, 1, 1, 1), layout="NCHW")

    def spacings(**changes: Any) -> set[int]:
        return {config.spacing for config in TENSOR_GEMM.configs(replace(small, **changes), HOPPER)}

    assert next(iter(TENSOR_GEMM.configs(small, HOPPER))).spacing == 8
    assert spacings() == spacings(c=32) == {0, 8}
    assert spacings(h=14, w=14) == {0, 2} and spacings(h=9, w=10) == {0, 4}
    others: list[dict[str, Any]] = [
        {"layout": "NHWC"},
        {"layout": "CHWN"},
        {"c": 40},
        {"h": 8, "w": 8},
        {"h": 1, "w": 1},
    ]
    for changes in [
        *others,
        {"h": 28, "w": 29},
        {"r": 7, "padding": (3, 3, 2, 2), "s": 5},
        {"stride": (2, 2), "op": "dgrad"},
    ]:
        assert spacings(**changes) == {0}, changes


def test_long_rows_have_a_copy_for_all_taps() -> None:
    """Rows of 56 pixels are copied once for three taps, those of 7 for each tap; other layers have no such copies."""
    long = ConvProblem(32, 256, 56, 56, 256, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", precision="tf32")

    def best(**changes: Any) -> TensorConfig:
        return next(iter(TENSOR_GEMM.configs(replace(long, **changes), HOPPER)))

    assert best().row_lines == 136 and best(n=96, h=7, w=7).row_lines == 0
    others: list[dict[str, Any]] = [{"stride": (2, 2)}, {"c": 96}, {"dilation": (1, 2)}, {"layout": "NCHW"}]
    for changes in [*others, {"precision": "fp32"}]:
        configs = TENSOR_GEMM.configs(replace(long, **changes), HOPPER)
        assert not any(config.row_lines for config in configs), changes
