"""Convolution on tensor cores: its loaders and tiles, and how filters are scaled. More is in test_tensor_cores.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from leanconv.cpu import oracle
from leanconv.kernels.common.input_gradient import single_phases
from leanconv.kernels.common.split_gemm import DEPTH, stages_of
from leanconv.kernels.hopper_fp32.tensor_gemm import TensorConfig
from leanconv.options import Layout
from leanconv.problem import ConvProblem
from research.bounds import absolute_error
from tests import proof, selection
from tests.cases import KINDS, TARGETS, Case
from tests.cases_tensor import LAYER, TENSOR_CASES, drawn
from tests.kernels.tensor_cores import GEMM
from tests.variants import NAMED

TENSOR_GEMM = NAMED["tensor_gemm"]
HOPPER = TARGETS[0]


pytestmark = pytest.mark.usefixtures("one_block_validates")


def _ways(case: Case) -> list[TensorConfig]:
    """A configuration of each kind: with one and two chunks of filters, each way that pixels come, and a split."""
    configs = list(TENSOR_GEMM.configs(case.problem, HOPPER))
    kinds: dict[Any, TensorConfig] = {}
    for config in configs:
        if config.filters <= 128:
            split = min(config.split, 2)
            way = config.rows, config.linear, config.row_pixels > 0, config.spacing > 0
            kind = *way, config.partials, config.n_tiles > 1, split
            kinds.setdefault(kind, config)
    return list(kinds.values())


def _every() -> list[Any]:
    """All layers in all ways; ``make test`` plays half of the layers, layouts in rotation, and of those of resident
    images all but two that others stand for."""
    found, chosen = [], []
    for turn, case in enumerate(TENSOR_CASES):
        ways = sorted(_ways(case), key=lambda config: config.spacing > 0)
        in_resident = [config for config in ways if config.spacing] if "resident" in case.name else []
        for i, config in enumerate(ways):
            kind = "taps" if config.row_pixels else "rows" if config.rows else "linear" if config.linear else "columns"
            if config.spacing:
                kind = "resident"
            name = f"{case.name}-{kind}-{config.n_tiles}x{config.mma_n}-p{config.partials}-split{config.split}"
            found.append((case, config, name))
            if in_resident:
                stood_for = case.name in ("resident-nchw", "one-product-resident-one-by-one")
                chosen += [found[-1]] if not stood_for and config is in_resident[turn % len(in_resident)] else []
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


def test_blocks_have_stages_of_every_part_of_a_gradient() -> None:
    pad = (2, 2, 2, 2)
    problem = ConvProblem(1, 64, 14, 14, 352, 5, 5, (2, 2), pad, layout="NHWC", precision="fp32", op="dgrad")
    splits = set()
    for config in TENSOR_GEMM.configs(problem, HOPPER):
        splits.add(config.split)
        for phase in single_phases(problem):
            stages = stages_of(phase.problem, config.channel_block)
            assert -(-stages // config.split) * (config.split - 1) < stages, config
    assert splits > {1}


@pytest.mark.parametrize("kind", ["channels-apart", "unseen", "normal"])
def test_channels_of_several_filters_tell_whether_they_are_small(kind: str) -> None:
    """Of filters of one tap a block of the first launch has four; a single one would be invalid nearly always."""
    assert GEMM.on(r=1, s=1, padding=(0, 0, 0, 0)).lost(kind)[1] <= 2


def test_filters_too_far_apart_for_one_scale() -> None:
    """The scale of the smallest, which the sums keep until the end, would be no number."""
    x, w = drawn("normal")
    w[1], w[2] = w[1] * np.float32(1e20), w[2] * np.float32(1e-20)
    y, reference = GEMM.played(x, w), oracle.conv2d(LAYER, x, w)
    for k in (0, 1):
        assert np.linalg.norm(y[..., k] - reference[..., k]) < 1e-6 * np.linalg.norm(reference[..., k])
    assert np.abs(y[..., 2]).max() < 1e-18


@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "CHWN"])
def test_taps_of_opposite_scales_at_a_stride(layout: Layout) -> None:
    """At stride 2 every other column of pixels meets the middle tap alone."""
    problem = ConvProblem(4, 40, 6, 12, 64, 3, 3, stride=(1, 2), padding=(1, 1, 1, 1), layout="NHWC")
    random = np.random.default_rng(9)
    x, w = random.standard_normal(problem.x_shape), random.standard_normal(problem.w_shape)
    x[:, :, 1::2] *= 1e12
    w[:, :, [0, 2]] *= 1e-12
    x, w = x.astype(np.float32), w.astype(np.float32)
    way = replace(GEMM, problem=replace(problem, layout=layout))
    assert absolute_error(problem, way.played(x, w), x, w) <= 1


def test_rings_fit_and_hold_what_is_under_way() -> None:
    for case in TENSOR_CASES:
        for config in TENSOR_GEMM.configs(case.problem, HOPPER):
            assert config.shared_bytes <= HOPPER.shared_per_block
            assert config.pixel_stages >= 2 and config.filter_stages >= max(config.partials, config.n_tiles)
            assert DEPTH % config.channel_block == 0


def test_small_outputs_split_the_reduction() -> None:
    """Seven by seven pixels of one image are one tile for each 64 filters or more: clusters share them."""
    problem = ConvProblem(1, 512, 7, 7, 512, 3, 3, padding=(1, 1, 1, 1), layout="NHWC")
    assert next(iter(TENSOR_GEMM.configs(problem, HOPPER))).split > 1
    large = replace(problem, n=128)
    assert next(iter(TENSOR_GEMM.configs(large, HOPPER))).split == 1


def test_resident_images_serve_small_images() -> None:
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

    assert best().row_pixels == 136 and best(n=96, h=7, w=7).row_pixels == 0
    others: list[dict[str, Any]] = [{"stride": (2, 2)}, {"c": 96}, {"dilation": (1, 2)}, {"layout": "NCHW"}]
    for changes in [*others, {"precision": "fp32"}]:
        configs = TENSOR_GEMM.configs(replace(long, **changes), HOPPER)
        assert not any(config.row_pixels for config in configs), changes
