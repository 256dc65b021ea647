"""Convolution of 16 bits and TF32, channels last, whose taps read one copy of the pixels: each tile, forward and
gradient, the shapes of its boxes, and what it leaves to others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from leanconv.call.choose import choose
from leanconv.kernels.hopper_native.native_gemm_window import TILES
from leanconv.plan import Pointer
from leanconv.problem import ConvProblem
from leanconv.runtime.compile import compile_launch
from tests import proof, selection
from tests.cases import TARGETS
from tests.variants import NAMED

WINDOW, OTHER, TF32 = (NAMED[f"native_gemm_{stem}"] for stem in ("window", "16bit", "window_tf32"))
HOPPER = TARGETS[0]
SMALL = ConvProblem(2, 64, 15, 21, 64, 3, 3, padding=(1, 1, 1, 1), dtype="float16", layout="NHWC")
#: Channels of one block and of several, filters that fill no tile, images that fill no block, uneven taps and padding.
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"c": 40, "k": 72, "padding": (1, 0, 2, 1), "dtype": "bfloat16", "bias": True, "activation": "relu"},
    "tall": {"n": 1, "c": 24, "k": 136, "r": 5, "s": 1, "padding": (2, 2, 0, 0), "scale": True, "activation": "silu"},
    "dilated": {"h": 20, "c": 32, "dilation": (3, 2), "groups": 2, "k": 60, "bias": True, "add": True},
    "gradient": {"c": 72, "op": "dgrad"},
    "gradient-blocks": {"c": 136, "k": 72, "r": 2, "s": 4, "op": "dgrad", "dtype": "bfloat16", "accumulate": True},
}
CASES = [(name, tile) for name in LAYERS for tile in TILES]
#: What makes a layer of 16 bits one of TF32.
IN_TF32: dict[str, Any] = {"dtype": "float32", "precision": "tf32"}


@pytest.mark.parametrize(
    ("name", "tile"),
    selection.marked(CASES, CASES[::3], lambda case: (case, f"{case[0]}-{'-'.join(map(str, case[1]))}")),
)
@pytest.mark.parametrize("kernel", [WINDOW, TF32], ids=lambda kernel: kernel.strategy)
def test_every_tile_is_right(kernel: Any, name: str, tile: tuple[int, int, int]) -> None:
    problem = replace(SMALL, **LAYERS[name] | (IN_TF32 if kernel is TF32 else {}))
    found = [each for each in kernel.configs(problem, HOPPER) if (each.warpgroups, each.m_tiles, each.filters) == tile]
    # with a residual the largest would spill registers
    assert bool(found) == (not problem.add or tile != (2, 2, 128))
    for config in found:
        proof.check(kernel, problem, config, kinds=("zero-mean",))


def test_in_tf32_filters_are_rounded_before_and_pixels_once() -> None:
    """Of a gradient the launch that rounds filters rearranges them: any number of its channels is right."""
    for problem in (replace(SMALL, **IN_TF32), replace(SMALL, op="dgrad", c=35, **IN_TF32)):
        config = next(iter(TF32.configs(problem, HOPPER)))
        plan = TF32.plan(problem, config, HOPPER)
        assert plan.prepared_bytes == 4 * 64 * problem.c * 9 and len(plan.prepare) == 1
        proof.check(TF32, problem, config, kinds=("zero-mean", "ones"))
    assert any("no multiple of 16 bytes" in each for each in TF32.why_not(replace(SMALL, c=35, **IN_TF32), HOPPER))
    grouped = replace(SMALL, c=128, k=128, groups=4, **IN_TF32)
    assert not TF32.why_not(grouped, HOPPER)
    assert any("more than 32 channels" in each for each in TF32.why_not(replace(grouped, groups=2), HOPPER))


@pytest.mark.parametrize("op", ["fprop", "dgrad"])
def test_filters_that_fit_are_copied_once(op: str) -> None:
    """By a CTA that has several tiles, where there is one tile of filters; also where filters fill no tile."""
    few = replace(HOPPER, multiprocessors=2)
    layers = (replace(SMALL, op=op), replace(SMALL, c=24, k=40, op=op, bias=op == "fprop"))
    for kernel, problem in [*((WINDOW, each) for each in layers), (TF32, replace(SMALL, c=32, k=32, op=op, **IN_TF32))]:
        found = [config for config in kernel.configs(problem, few) if config.resident]
        assert found and all(config.tiles(problem) > 2 for config in found)
        proof.check(kernel, problem, found[0], kinds=("zero-mean",), target=few)
    assert not any(config.resident for config in WINDOW.configs(replace(SMALL, k=136, op="fprop"), few))
    assert not any(config.resident for config in WINDOW.configs(SMALL, HOPPER))


def test_boxes_have_the_shape_that_fills_tiles_best() -> None:
    """56 pixels are seven blocks: single ones leave no tile partly empty, four of a box do. 128 are sixteen."""
    for pixels, boxes in ((56, {(1, 1)}), (128, {(2, 2), (1, 4), (4, 1)})):
        problem = replace(SMALL, n=32, h=pixels, w=pixels)
        of_four = [each for each in WINDOW.configs(problem, HOPPER) if each.blocks == 4]
        assert of_four and {(each.box_w, each.box_h) for each in of_four} <= boxes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": "NCHW"}, "'NCHW' is not NHWC"), ({"op": "dgrad", "c": 36}, "36 channels are no whole 16 bytes"),
        ({"stride": (2, 1)}, "stride=(2, 1) is not (1, 1)"), ({"c": 36}, "36 channels of 16 bits"),
        ({"r": 4, "s": 1, "padding": (0, 0, 0, 0)}, "filters have 4 taps: with fewer than 5"),
        ({"h": 90, "w": 90, "r": 31, "s": 31}, "the windows of 31 x 31 taps"),
        ({"h": 90, "w": 90, "dilation": (40, 40)}, "with dilation=(40, 40) do not fit in shared memory"),
    ],
    ids=str,
)  # fmt: skip
def test_what_it_cannot_compute_has_a_sentence(changes: dict[str, Any], reason: str) -> None:
    assert any(reason in each for each in WINDOW.why_not(replace(SMALL, **changes), HOPPER))


@pytest.mark.parametrize(
    "changes", [{}, {"bias": True, "scale": True, "add": True, "activation": "elu"}, {"op": "dgrad"}], ids=str
)
@pytest.mark.parametrize(("kernel", "c"), [(WINDOW, 64), (WINDOW, 32), (TF32, 64)], ids=["64", "32", "tf32"])
def test_it_compiles_without_spills(kernel: Any, c: int, changes: dict[str, Any]) -> None:
    """No product waits for another."""
    pytest.importorskip("cuda.core", reason="NVRTC comes with the extra leanconv[cu13] or [cu12]")
    problem = replace(SMALL, n=8, c=c, h=128, w=128, k=128, **changes | (IN_TF32 if kernel is TF32 else {}))
    for config in kernel.configs(problem, HOPPER):
        code = compile_launch(kernel.plan(problem, config, HOPPER).launches[0], "sm_90a")
        assert (code.spill_bytes, code.advice) == (0, ()) and code.registers <= 168


@pytest.mark.parametrize("op", ["fprop", "dgrad"])
def test_layers_of_few_filters_take_it(op: str) -> None:
    """There the copies for each tap bound native_gemm_16bit; small images leave blocks partly empty."""
    few = replace(SMALL, n=8, c=128, h=256, w=256, op=op)
    if op == "dgrad":
        few = replace(few, c=64, k=128)
    assert choose(few, HOPPER).algorithm is WINDOW
    assert choose(replace(few, n=32, c=128, k=128, h=28, w=28), HOPPER).algorithm is OTHER
    assert choose(replace(few, stride=(2, 2)), HOPPER).algorithm is OTHER


def test_it_needs_no_memory_beside_the_operands() -> None:
    problem = replace(SMALL, op="dgrad")
    plan = WINDOW.plan(problem, next(iter(WINDOW.configs(problem, HOPPER))), HOPPER)
    assert (plan.workspace_bytes, plan.prepared_bytes, len(plan.every_launch)) == (0, 0, 1)
    assert not any(isinstance(each, Pointer) and each.role == "prepared" for each in plan.launches[0].arguments)
