"""1x1 convolution of NCHW in 16 bits as products of matrices: every tile and way of copying pixels, clusters, tile
after tile. More is in test_tensor_cores.py."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from leanconv.call.choose import choose
from leanconv.kernels.hopper_native.native_gemm_pointwise import TILES, WARPGROUPS
from leanconv.problem import ConvProblem
from leanconv.runtime.compile import INCLUDE, compile_launch, source
from tests import proof, selection
from tests.cases import TARGETS
from tests.kernels.tensor_cores import GRADIENT
from tests.variants import NAMED

POINTWISE = NAMED["native_gemm_pointwise"]
HOPPER = TARGETS[0]
SMALL = ConvProblem(3, 40, 5, 8, 72, 1, 1, dtype="bfloat16", bias=True, activation="relu")
#: Pixels by TMA, by 8 and 4 bytes, and of an odd number, for which even and odd channels have sums of their own.
WAYS = {8: (16, 20), 4: (14, 14), 2: (9, 26), 1: (15, 15)}
#: The same of images that share a tile.
FEW_PIXELS = {8: (4, 8), 4: (6, 6), 2: (2, 5), 1: (5, 7)}


def configs(problem: ConvProblem, **wanted: int) -> list[Any]:
    every = POINTWISE.configs(problem, HOPPER)
    return [each for each in every if all(getattr(each, name) == value for name, value in wanted.items())]


def tile_cases() -> list[tuple[int, tuple[int, int, int], bool]]:
    """Every way of copying pixels with every tile that it has, forward and of a gradient."""
    found = []
    for way, (h, w) in WAYS.items():
        for m_tiles, segments, columns in TILES:
            size = (h, w) if segments == 1 else FEW_PIXELS[way]
            problem = replace(SMALL, h=size[0], w=size[1], k=264)
            if configs(problem, m_tiles=m_tiles, segments=segments, columns=columns):
                found += [(way, (m_tiles, segments, columns), False), (way, (m_tiles, segments, columns), True)]
    return found


CASES = tile_cases()


def test_every_way_has_tiles_of_its_own():
    assert {way for way, _, _ in CASES} == set(WAYS)
    assert {tile for way, tile, _ in CASES if way != 1} == set(TILES)


@pytest.mark.parametrize(
    ("way", "tile", "gradient"), selection.marked(CASES, CASES[::3], lambda case: (case, "-".join(map(str, case))))
)
def test_every_tile_is_right(way: int, tile: tuple[int, int, int], gradient: bool):
    m_tiles, segments, columns = tile
    h, w = (WAYS if segments == 1 else FEW_PIXELS)[way]
    problem = replace(SMALL, h=h, w=w, k=264)
    if gradient:
        problem = replace(problem, c=264, k=40, **GRADIENT)
    config = configs(problem, m_tiles=m_tiles, segments=segments, columns=columns, split=1)[0]
    assert config.copied == max(way, 2)
    proof.check(POINTWISE, problem, config, kinds=("positive",))


@pytest.mark.parametrize("size", WAYS.values(), ids=str)
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_blocks_compute_tile_after_tile(size: tuple[int, int], gradient: bool):
    """Two CTAs for many tiles: a ring goes round the stages of all of them."""
    few = replace(HOPPER, multiprocessors=2)
    problem = replace(SMALL, n=7, h=size[0], w=size[1], c=136, k=200)
    problem = replace(problem, **GRADIENT) if gradient else problem
    config = next(each for each in POINTWISE.configs(problem, few) if each.stages < 8)
    plan = POINTWISE.plan(problem, config, few)
    assert plan.launches[0].grid == 2
    proof.check(POINTWISE, problem, config, kinds=("zero-mean",), change=lambda _: plan)


FEW = ConvProblem(1, 512, 4, 8, 64, 1, 1, dtype="float16", bias=True)
SPLIT = [
    (2, replace(FEW, n=3, h=6, w=6, add=True)), (4, FEW), (8, replace(FEW, c=1024, dtype="bfloat16")),
    (4, replace(FEW, h=5, w=7)), (4, replace(FEW, c=200, k=512, h=7, w=7, op="dgrad", bias=False)),
]  # fmt: skip


@pytest.mark.parametrize(("split", "problem"), selection.marked(SPLIT, SPLIT[2:], lambda s: (s, str(s[0]))))
def test_a_cluster_shares_a_reduction(split: int, problem: ConvProblem):
    for config in configs(problem, split=split)[:2]:
        proof.check(POINTWISE, problem, config, kinds=("zero-mean",))
    # one CTA has all where a result must not depend on the batch
    assert not [each for each in configs(replace(problem, batch_invariant=True)) if each.split > 1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": "NHWC"}, "'NHWC' is not NCHW"), ({"r": 3}, "3x1 taps are not 1x1"), ({"n": 0}, "n=0"),
        ({"stride": (2, 1)}, "stride=(2, 1)"), ({"padding": (1, 0, 0, 0)}, "padding=(1, 0, 0, 0)"),
        ({"c": 36}, "36 channels of a group are no whole 16 bytes"), ({"dtype": "float32"}, "float32"),
        ({"h": 5, "w": 5, "k": 71, **GRADIENT}, "71 filters of a group, for 25 pixels"),
        ({"n": 2**31, "c": 8}, "tiles"), ({"n": 2**31 - 2**21, "c": 8, "h": 7, "w": 9, "k": 1}, "tiles"),
        ({"n": 1, "c": 8, "h": 2, "w": 2**30 - 1}, "2147483646 pixels"),
        ({"n": 1, "c": 2**20, "h": 1024, "w": 1024}, "no tensor map describes x: strides="),
        ({"op": "wgrad", "bias": False, "activation": None}, "wgrad"),
    ],
    ids=str,
)  # fmt: skip
def test_what_it_cannot_compute_has_a_sentence(changes: dict[str, Any], reason: str):
    assert any(reason in each for each in POINTWISE.why_not(replace(SMALL, **changes), HOPPER))


def test_auto_takes_kernels_that_were_measured():
    """It predicts no time, and runs by name."""
    problem = replace(SMALL, c=1024, k=512, h=14, w=14)
    assert choose(problem, HOPPER).algorithm.stem == "native_gemm_nchw"
    assert choose(problem, HOPPER, "native_gemm_pointwise").algorithm is POINTWISE


def test_nothing_is_packed_and_no_memory_is_taken():
    for op in ({}, GRADIENT):
        problem = replace(SMALL, **op)
        plan = POINTWISE.plan(problem, configs(problem)[0], HOPPER)
        assert (len(plan.every_launch), plan.workspace_bytes, plan.prepared_bytes) == (1, 0, 0)


def test_tiles_are_those_that_images_fill():
    """Few images of 49 pixels: several to a tile; of 196 a tile each, with 200 columns."""
    assert {each.segments for each in configs(replace(SMALL, h=7, w=7))} == {1, 2}
    assert max(each.columns for each in configs(replace(SMALL, h=7, w=7))) == 64
    assert 200 in {each.columns for each in configs(replace(SMALL, h=14, w=14))}
    assert {each.filters for each in configs(replace(SMALL, k=128))} == {64 * WARPGROUPS}


LAYERS = {way: replace(SMALL, n=32, c=512, k=1024, h=size, w=size) for way, size in ((8, 28), (4, 14), (2, 26), (1, 7))}
LAYERS[2] = replace(LAYERS[2], w=25)


@pytest.mark.parametrize("way", LAYERS)
@pytest.mark.parametrize("changes", [{}, {"add": True, "scale": True}, GRADIENT], ids=["bias", "residual", "gradient"])
def test_it_compiles_without_spills(way: int, changes: dict[str, Any]):
    """The best guess of each way of copying pixels; no product waits for another."""
    pytest.importorskip("cuda.core", reason="NVRTC comes with the extra leanconv[cu13] or [cu12]")
    problem = replace(LAYERS[way], **changes)
    config = configs(problem)[0]
    assert config.copied == max(way, 2)
    code = compile_launch(POINTWISE.plan(problem, config, HOPPER).launches[0], "sm_90a")
    assert (code.spill_bytes, code.advice) == (0, ()) and code.registers <= 168


def test_lanes_have_stages_to_begin_while_others_are_announced():
    """Two are begun before one is announced, and consumers hold one: with three stages both sides would wait."""
    room = replace(HOPPER, shared_per_block=80 * 1024)
    for size in WAYS.values():
        for each in POINTWISE.configs(replace(SMALL, h=size[0], w=size[1], c=256), room):
            assert each.stages >= 4


def test_filters_of_huge_images_lie_further_apart_than_an_int_counts():
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC comes with the extra leanconv[cu13] or [cu12]")
    problem = ConvProblem(1, 8, 12000, 12000, 16, 1, 1, dtype="float16")
    code = source(POINTWISE.plan(problem, configs(problem)[0], HOPPER).launches[0]).encode()
    _, program = nvrtc.nvrtcCreateProgram(code, b"kernel.cu", 0, [], [])
    options = [b"--gpu-architecture=compute_90a", b"--std=c++17", f"--include-path={INCLUDE}".encode()]
    assert nvrtc.nvrtcCompileProgram(program, len(options), options)[0] == 0
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    by_pixels = re.findall(rb"(?:mul|mad)\.\S+ [^;]*\b1(?:44000000|43999928)\b[^;]*;", text)
    assert by_pixels and all(b".s64" in each or b".wide" in each or b".u64" in each for each in by_pixels), by_pixels
