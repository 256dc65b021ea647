"""The filters' gradient on tensor cores: its loaders and tiles, what is kept on data of every range, and limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanconv.call.choose import choose
from leanconv.cpu import oracle
from leanconv.kernels.hopper_fp32.tensor_weight import TensorWeightConfig
from leanconv.problem import ConvProblem
from leanconv.runtime.compile import INCLUDE
from tests import emulator, proof, selection
from tests.cases import KINDS, TARGETS, Case
from tests.cases_weight import LAYER, RANGES, WEIGHT_CASES, as_seen, drawn, in_sequential_sums, opposed
from tests.kernels.breaks import scales
from tests.kernels.patching import Patch, broken_kernels
from tests.variants import NAMED

TENSOR_WEIGHT, PARTS = NAMED["tensor_weight"], NAMED["tensor_weight_split_k"]
HOPPER = TARGETS[0]


def _ways(case: Case) -> list[tuple[str, TensorWeightConfig]]:
    """A configuration of each tile: alone, with a cluster, and with parts."""
    ways: dict[Any, tuple[str, TensorWeightConfig]] = {}
    for name in (TENSOR_WEIGHT.stem, PARTS.stem):
        for config in NAMED[name].configs(case.problem, HOPPER):
            if config.split in (1, 4):
                tile = config.warpgroups, config.chunks, config.taps, config.split
                ways.setdefault((name, *tile), (name, config))
    return list(ways.values())


def _every() -> list[Any]:
    """All layers in all ways; ``make test`` plays each layer once, in every second layout, ways by turns."""
    found, chosen = [], []
    for turn, case in enumerate(WEIGHT_CASES):
        ways = _ways(case)
        for i, (name, config) in enumerate(ways):
            tile = f"{config.warpgroups}x{config.chunks}x{config.taps}-split{config.split}-parts{config.parts}"
            found.append((name, case, config, f"{case.name}-{name}-{tile}"))
            chosen += [found[-1]] if case.in_turn and i == 5 * turn % len(ways) else []
    return selection.marked(found, chosen, lambda each: (each[:3], each[3]))


@pytest.mark.parametrize(("name", "case", "config"), _every())
def test_every_tile_and_way_of_reading(name: str, case: Case, config: TensorWeightConfig) -> None:
    proof.check(NAMED[name], case.problem, config, kinds=KINDS[:1])


def played(
    x: np.ndarray,
    dy: np.ndarray,
    problem: ConvProblem = LAYER,
    kernels: Path = INCLUDE,
    name: str = TENSOR_WEIGHT.stem,
    **tuning: Any,
) -> np.ndarray:
    """What the kernel computes."""
    wishes = {"warpgroups": 2, "chunks": 1, "split": 1, "taps": 1} | tuning
    configs = NAMED[name].configs(problem, HOPPER)
    config = next(c for c in configs if all(getattr(c, name) == value for name, value in wishes.items()))
    dw = np.full(problem.y_shape, np.nan, np.float32)
    plan = NAMED[name].plan(problem, config, HOPPER)
    emulator.run_plan(plan, {"x": x, "dy": dy, "dw": dw}, kernels=kernels, orders=("ascending",))
    return dw


def lost(kind: str, kernels: Path = INCLUDE, taps: int = 1) -> float:
    """The kernel's error on data of this kind, as `in_sequential_sums` counts it."""
    x, dy = drawn(kind)
    return in_sequential_sums(played(x, dy, kernels=kernels, taps=taps), x, dy)


#: Of kinds of data those that the others do not stand for.
MOST_TELLING = ("normal", "outlier", "filters-apart", "sparse", "tiny", "zeros", "opposed", "unseen")


RANGES_AND_TAPS = [(kind, taps) for kind in RANGES for taps in (1, 3)]
TELLING = [(kind, 1) for kind in MOST_TELLING] + [
    (kind, 3) for kind in ("normal", "filters-apart", "opposed", "unseen")
]


@pytest.mark.parametrize(
    ("kind", "taps"), selection.marked(RANGES_AND_TAPS, TELLING, lambda each: (each, f"{each[0]}-{each[1]}"))
)
def test_errors_on_data_of_every_range(kind: str, taps: int) -> None:
    """At most twice what a sequential float32 sum loses, on normal data less than it loses; of a hundredth of the
    products, eleven a weight, a sequential sum loses next to nothing, and of log-normal data one product may be nearly
    all that a filter has."""
    assert lost(kind, taps=taps) <= {"normal": 1, "sparse": 3, "log-normal": 4}.get(kind, 2)


def test_pixels_together_are_split_as_well() -> None:
    """In NCHW other code splits x and dy."""
    problem = replace(LAYER, layout="NCHW")
    for kind in ("normal", "filters-apart"):
        x, dy = drawn(kind)
        moved = [np.ascontiguousarray(each.transpose(0, 3, 1, 2)) for each in (x, dy)]
        dw = played(*moved, problem).transpose(0, 2, 3, 1)
        assert in_sequential_sums(dw, x, dy) <= 1.5


@pytest.mark.parametrize(("kind", "taps", "patch"), selection.every_third(scales.TENSOR_WEIGHT))
def test_errors_of_broken_scales_show(kind: str, taps: int, patch: Patch, tmp_path: Path) -> None:
    """What the data of other tests cannot tell: each part of the split is needed by some data."""
    assert not lost(kind, broken_kernels(tmp_path, patch), taps) <= 2


#: Of the ways through the kernels, where x and dy vary in opposite directions, a few for ``make test``.
OPPOSED = [
    (layout, name, stride, chunks)
    for layout in ("NHWC", "NCHW", "CHWN")
    for name in (TENSOR_WEIGHT.stem, PARTS.stem)
    for stride in (1, 2)
    for chunks in (1, 2, 3)
]
TELLING_OPPOSED = [
    ("NHWC", PARTS.stem, 1, 2), ("NCHW", TENSOR_WEIGHT.stem, 2, 2), ("CHWN", PARTS.stem, 2, 1),
]  # fmt: skip


def _in_layout(layout: str, array: np.ndarray) -> np.ndarray:
    axes = {"NHWC": (0, 1, 2, 3), "NCHW": (0, 3, 1, 2), "CHWN": (3, 1, 2, 0)}[layout]
    return np.ascontiguousarray(array.transpose(axes).astype(np.float32))


@pytest.mark.parametrize(
    ("layout", "name", "stride", "chunks"),
    selection.marked(OPPOSED, TELLING_OPPOSED, lambda way: (way, "-".join(map(str, way)))),
)
def test_pixels_of_opposite_scales(layout: str, name: str, stride: int, chunks: int) -> None:
    """Each weight's products lie near one, and x and dy vary by 10^24 among 64 pixels."""
    size = 12 * stride
    problem = ConvProblem(2, 32, size, size, 68, 1, 1, stride=(stride, stride), layout="NHWC", op="wgrad")
    random = np.random.default_rng(7)
    ramps = opposed(problem, 12)
    x = random.standard_normal(problem.x_shape) * as_seen(problem, ramps)[..., None]
    dy = random.standard_normal(problem.operands[1].shape) / ramps[..., None]
    problem = replace(problem, layout=layout)  # type: ignore[arg-type]
    x, dy = _in_layout(layout, x), _in_layout(layout, dy)
    dw = played(x, dy, problem, name=name, chunks=chunks, **({} if name == TENSOR_WEIGHT.stem else {"split": 1}))
    assert oracle.absolute_error(problem, dw, x, dy) <= 1


def test_filters_of_another_group_decide_no_factor() -> None:
    """Bulk copies bring filters of the next group behind those of a group."""
    problem = ConvProblem(2, 32, 8, 8, 72, 1, 1, groups=2, layout="NHWC", op="wgrad")
    random = np.random.default_rng(8)
    x, dy = random.standard_normal(problem.x_shape), random.standard_normal(problem.operands[1].shape)
    dy[..., 36:] *= opposed(problem, 12)[..., None]
    x, dy = x.astype(np.float32), dy.astype(np.float32)
    assert in_sequential_sums(played(x, dy, problem), x, dy, problem) <= 3


@pytest.mark.parametrize(("kind", "taps"), [("normal", 1), ("opposed", 1), ("normal", 3), ("opposed", 3)])
def test_what_is_no_number_reaches_just_the_weights_that_see_it(kind: str, taps: int, tmp_path: Path) -> None:
    x, dy = drawn(kind)
    numbers = {(1, 5, 7, 9): np.inf, (1, 5, 0, 5): np.inf, (2, 0, 11, 6): np.nan}
    for at, number in numbers.items():
        x[at] = number
    dy[2, 3, 4, 11], dy[5, 6, 7, 20] = np.nan, -np.inf
    dw = played(x, dy, taps=taps)
    if (kind, taps) == ("normal", 3):
        # Converted once for all taps of a row, they reach also the one that does not see them.
        patch = Patch("infinities are converted once", "WeightFragments::infinite", "return {{=> false &&}}")
        broken = broken_kernels(tmp_path, patch)
        assert np.isfinite(played(x, dy, kernels=broken, taps=taps)).sum() < np.isfinite(dw).sum()
    expected = np.ones(dw.shape, bool)
    expected[..., 9], expected[[11, 20]] = False, False
    # In the first column no output has the last tap of a row, in the last column and the first row none has the first.
    expected[:, :, :2, 5], expected[:, :2, 1:, 6] = False, False
    np.testing.assert_array_equal(np.isfinite(dw), expected)
    for at in numbers:
        x[at] = 0
    dy[2, 3, 4, 11], dy[5, 6, 7, 20] = 0, 0
    exact = oracle.conv2d(LAYER, x, dy)
    assert oracle.relative_error(dw[expected], exact[expected]) < 2e-6


def test_one_product_keeps_eleven_bits() -> None:
    problem = replace(LAYER, precision="tf32")
    x, dy = drawn("normal")
    error = oracle.relative_error(played(x, dy, problem), oracle.conv2d(problem, x, dy))
    assert 1e-4 < error < 5e-4


def test_limits_name_the_rule() -> None:
    small = ConvProblem(1, 24, 8, 8, 24, 3, 3, groups=3, op="wgrad")
    assert "groups=3 leaves 8 channels in a group, fewer than 16" in TENSOR_WEIGHT.why_not(small, HOPPER)
    assert "op='fprop' is not the gradient of the filters" in TENSOR_WEIGHT.why_not(replace(LAYER, op="fprop"), HOPPER)
    for target in TARGETS[1:]:
        assert any(target.arch in reason for reason in TENSOR_WEIGHT.why_not(LAYER, target))
    exact = replace(LAYER, precision="ieee")
    assert any("'fp32'" in reason for reason in TENSOR_WEIGHT.reasons(exact, HOPPER))


def test_rings_fit_and_hold_what_is_under_way() -> None:
    for case in WEIGHT_CASES:
        for config in TENSOR_WEIGHT.configs(case.problem, HOPPER):
            assert config.shared_bytes <= HOPPER.shared_per_block
            assert config.x_stages >= 2 and config.dy_stages > config.chunks
            assert config.split_stages >= max(config.partials, config.chunks)
            registers = 65536 // config.threads // 8 * 8
            assert config.converter_registers <= registers and config.producer_registers <= registers
            used = config.warpgroups * config.consumer_registers + config.converter_registers
            assert used + config.producer_registers <= registers * config.threads // 128


def test_auto_takes_tensor_cores_and_no_workspace_unless_it_may() -> None:
    layer = ConvProblem(64, 64, 56, 56, 64, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", op="wgrad")
    for limit in (None, 10**8):
        chosen = choose(layer, HOPPER, limit=limit)
        config: Any = chosen.config
        assert chosen.algorithm.stem == "tensor_weight" and (config.parts > 1) == (limit is not None)
    for least in (TENSOR_WEIGHT, PARTS):
        for each in least.configs(layer, HOPPER):
            assert (least.workspace_bytes(layer, each) > 0) == (least is PARTS)
    assert choose(replace(layer, precision="ieee"), HOPPER).algorithm.name == "implicit_gemm_weight"
    for target in TARGETS[1:]:
        assert choose(layer, target, limit=10**8).algorithm.name.startswith("implicit_gemm_weight")
