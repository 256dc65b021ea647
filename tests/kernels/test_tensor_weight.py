"""The filters' gradient on tensor cores: its loaders and tiles, factors of pixels. More is in test_tensor_cores.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from leanconv.call.choose import choose
from leanconv.kernels.hopper_fp32.tensor_weight import TensorWeightConfig
from leanconv.problem import ConvProblem
from research.bounds import absolute_error
from tests import proof, selection
from tests.cases import KINDS, TARGETS, Case
from tests.cases_weight import WEIGHT_CASES, as_seen, opposed
from tests.kernels.tensor_cores import WEIGHT, in_sequential_sums
from tests.variants import NAMED

TENSOR_WEIGHT, SPLIT_K = NAMED["tensor_weight"], NAMED["tensor_weight_split_k"]
HOPPER = TARGETS[0]


def _ways(case: Case) -> list[tuple[str, TensorWeightConfig]]:
    """A configuration of each tile: alone, with a cluster, and with split-K."""
    ways: dict[Any, tuple[str, TensorWeightConfig]] = {}
    for name in (TENSOR_WEIGHT.stem, SPLIT_K.stem):
        for config in NAMED[name].configs(case.problem, HOPPER):
            if config.split in (1, 4):
                tile = config.warpgroups, config.n_tiles, config.taps, config.split
                ways.setdefault((name, *tile), (name, config))
    return list(ways.values())


def _every() -> list[Any]:
    """All layers in all ways; ``make test`` plays each layer once, in every second layout, ways by turns."""
    found, chosen = [], []
    for turn, case in enumerate(WEIGHT_CASES):
        ways = _ways(case)
        for i, (name, config) in enumerate(ways):
            tile = f"{config.warpgroups}x{config.n_tiles}x{config.taps}-split{config.split}-split_k{config.split_k}"
            found.append((name, case, config, f"{case.name}-{name}-{tile}"))
            chosen += [found[-1]] if case.in_turn and i == 5 * turn % len(ways) else []
    return selection.marked(found, chosen, lambda each: (each[:3], each[3]))


@pytest.mark.parametrize(("name", "case", "config"), _every())
def test_every_tile_and_way_of_reading(name: str, case: Case, config: TensorWeightConfig) -> None:
    proof.check(NAMED[name], case.problem, config, kinds=KINDS[:1])


#: Of the ways through the kernels, where x and dy vary in opposite directions, a few for ``make test``.
OPPOSED = [
    (layout, name, stride, n_tiles)
    for layout in ("NHWC", "NCHW", "CHWN")
    for name in (TENSOR_WEIGHT.stem, SPLIT_K.stem)
    for stride in (1, 2)
    for n_tiles in (1, 2, 3)
]
TELLING_OPPOSED = [
    ("NHWC", SPLIT_K.stem, 1, 2), ("NCHW", TENSOR_WEIGHT.stem, 2, 2), ("CHWN", SPLIT_K.stem, 2, 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "name", "stride", "n_tiles"),
    selection.marked(OPPOSED, TELLING_OPPOSED, lambda way: (way, "-".join(map(str, way)))),
)
def test_pixels_of_opposite_scales(layout: str, name: str, stride: int, n_tiles: int) -> None:
    """Each weight's products lie near one, and x and dy vary by 10^24 among 64 pixels."""
    size = 12 * stride
    problem = ConvProblem(2, 32, size, size, 68, 1, 1, stride=(stride, stride), layout="NHWC", op="wgrad")
    random = np.random.default_rng(7)
    ramps = opposed(problem, 12)
    x = random.standard_normal(problem.x_shape) * as_seen(problem, ramps)[..., None]
    dy = random.standard_normal(problem.operands[1].shape) / ramps[..., None]
    problem = replace(problem, layout=layout)  # type: ignore[arg-type]
    way = replace(WEIGHT, stem=name, problem=problem).tuned(n_tiles=n_tiles)
    x, dy = x.astype(np.float32), dy.astype(np.float32)
    assert absolute_error(way.last, way.played(x, dy), x, dy) <= 1


def test_filters_of_another_group_decide_no_factor() -> None:
    """Bulk copies bring filters of the next group behind those of a group."""
    problem = ConvProblem(2, 32, 8, 8, 72, 1, 1, groups=2, layout="NHWC", op="wgrad")
    random = np.random.default_rng(8)
    x, dy = random.standard_normal(problem.x_shape), random.standard_normal(problem.operands[1].shape)
    dy[..., 36:] *= opposed(problem, 12)[..., None]
    x, dy = x.astype(np.float32), dy.astype(np.float32)
    assert in_sequential_sums(replace(WEIGHT, problem=problem).played(x, dy), x, dy, problem) <= 3


def test_rings_fit_and_hold_what_is_under_way() -> None:
    for case in WEIGHT_CASES:
        for config in TENSOR_WEIGHT.configs(case.problem, HOPPER):
            assert config.x_stages >= 2 and config.dy_stages > config.n_tiles
            assert config.split_stages >= max(config.partials, config.n_tiles)
            registers = 65536 // config.threads // 8 * 8
            assert config.converter_registers <= registers and config.producer_registers <= registers
            used = config.warpgroups * config.consumer_registers + config.converter_registers
            assert used + config.producer_registers <= registers * config.threads // 128


def test_auto_takes_tensor_cores_and_no_workspace_unless_it_may() -> None:
    layer = ConvProblem(64, 64, 56, 56, 64, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", op="wgrad")
    for limit in (None, 10**8):
        chosen = choose(layer, HOPPER, limit=limit)
        config: Any = chosen.config
        assert chosen.algorithm.stem == "tensor_weight" and (config.split_k > 1) == (limit is not None)
    for least in (TENSOR_WEIGHT, SPLIT_K):
        for each in least.configs(layer, HOPPER):
            assert (least.workspace_bytes(layer, each) > 0) == (least is SPLIT_K)
    assert choose(replace(layer, precision="ieee"), HOPPER).algorithm.name == "implicit_gemm_weight"
    for target in TARGETS[1:]:
        assert choose(layer, target, limit=10**8).algorithm.name.startswith("implicit_gemm_weight")
