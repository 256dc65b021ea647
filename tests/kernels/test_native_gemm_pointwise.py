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


def tile_cases() -> list[tuple[int, bool, tuple[int, int], bool]]:
    """Every way of copying pixels with every tile that it has, of larger images and of several in a tile, forward and
    of a gradient."""
    found = []
    for way in WAYS:
        for m_tiles, columns in TILES:
            for few in (False, True):
                if configs(layer(way, few), m_tiles=m_tiles, columns=columns):
                    found += [(way, few, (m_tiles, columns), gradient) for gradient in (False, True)]
    return found


def layer(way: int, few: bool) -> ConvProblem:
    h, w = (FEW_PIXELS if few else WAYS)[way]
    return replace(SMALL, n=9 if few else 3, h=h, w=w, k=264)


CASES = tile_cases()


def test_every_way_has_tiles_of_its_own():
    assert {way for way, *_ in CASES} == set(WAYS)
    assert {tile for way, _, tile, _ in CASES if way != 1} == set(TILES)


@pytest.mark.parametrize(
    ("way", "few", "tile", "gradient"),
    selection.marked(CASES, CASES[::3], lambda case: (case, "-".join(map(str, case)))),
)
def test_every_tile_is_right(way: int, few: bool, tile: tuple[int, int], gradient: bool):
    problem = layer(way, few)
    if gradient:
        problem = replace(problem, c=264, k=40, **GRADIENT)
    config = configs(problem, m_tiles=tile[0], columns=tile[1], split=1)[0]
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


#: Rows of pixels by 16, 8, 4 and 2 bytes; a stride of rows alone differs; gradients of images of even numbers.
SIZES = (16, 24, (2, 2)), (14, 14, (2, 2)), (8, 26, (2, 2)), (13, 13, (2, 2)), (9, 12, (1, 2)), (15, 28, (3, 2))
STRIDED = [replace(SMALL, h=h, w=w, stride=stride, k=136) for h, w, stride in SIZES]
STRIDED += [replace(each, c=136, k=40, **GRADIENT) for each in STRIDED[:3]]


@pytest.mark.parametrize("problem", STRIDED, ids=lambda p: f"{p.op}-{p.h}x{p.w}-{p.stride[0]}")
def test_a_stride_of_two_columns(problem: ConvProblem):
    """With few and with many columns; a gradient writes the zeros between its pixels too, so there is one launch."""
    tried = 0
    for columns in (64, 128, 192):
        for config in configs(problem, columns=columns, split=1)[:1]:
            assert len(POINTWISE.plan(problem, config, HOPPER).launches) == 1
            proof.check(POINTWISE, problem, config, kinds=("positive",))
            tried += 1
    assert tried > 1


@pytest.mark.parametrize("columns", [128, 256])
@pytest.mark.parametrize("way", [8, 4])
def test_residuals_are_loaded_while_others_are_stored(way: int, columns: int):
    """Of two parts of a tile and of four, in place too: the output may be the residual."""
    problem = replace(layer(way, False), add=True, scale=True)
    config = configs(problem, columns=columns, m_tiles=1, split=1)[0]
    proof.check(POINTWISE, problem, config, kinds=("zero-mean",))


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
        ({"stride": (2, 1)}, "stride=(2, 1)"), ({"stride": (1, 3)}, "every second one"),
        ({"padding": (1, 0, 0, 0)}, "padding=(1, 0, 0, 0)"),
        ({**GRADIENT, "h": 6, "stride": (1, 2)}, "stride=(1, 2) of 6x8 pixels, not (2, 2) of even numbers"),
        ({**GRADIENT, "stride": (2, 2)}, "stride=(2, 2) of 5x8 pixels, not (2, 2) of even numbers"),
        ({"op": "dgrad", "activation": None, "h": 6, "stride": (2, 2)}, "with a bias or accumulate=True"),
        ({**GRADIENT, "accumulate": True, "h": 6, "stride": (2, 2)}, "with a bias or accumulate=True"),
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


def test_auto_takes_it_where_it_was_measured_to_be_quicker():
    """Forward and for gradients, one image and many; not where an odd number of pixels has few channels."""
    large = replace(SMALL, n=32, c=1024, k=512, h=14, w=14)
    for problem in (large, replace(large, n=1), replace(large, c=512, k=1024, **GRADIENT), replace(large, h=28, w=28)):
        assert choose(problem, HOPPER).algorithm is POINTWISE
    few = replace(SMALL, n=64, c=96, k=256, h=27, w=27)
    assert choose(few, HOPPER).algorithm.stem == "native_gemm_nchw"


def test_nothing_is_packed_and_no_memory_is_taken():
    for op in ({}, GRADIENT):
        problem = replace(SMALL, **op)
        plan = POINTWISE.plan(problem, configs(problem)[0], HOPPER)
        assert (len(plan.every_launch), plan.workspace_bytes, plan.prepared_bytes) == (1, 0, 0)


def test_tiles_are_those_that_images_fill():
    """Three images of 49 pixels are 150 columns, and each sum of an odd number is two; of 196 pixels they are 588."""
    assert {each.columns for each in configs(replace(SMALL, h=7, w=7))} == {64, 128}
    assert {each.columns for each in configs(replace(SMALL, h=14, w=14))} == {64, 128, 192, 256}
    assert {each.columns for each in configs(replace(SMALL, n=1, h=6, w=6))} == {64}
    assert {each.filters for each in configs(replace(SMALL, k=128))} == {64 * WARPGROUPS}


def test_lanes_leave_shared_memory_to_the_cache_that_their_copies_pass():
    for way, size in WAYS.items():
        shared = [each.shared_bytes for each in configs(replace(SMALL, n=9, h=size[0], w=size[1], c=512, k=264))]
        assert (max(shared) > 196 * 1024) == (way == 8)


EPILOGUES: dict[str, dict[str, Any]] = {
    "bias": {}, "residual": {"add": True, "scale": True}, "gradient": GRADIENT,
    "accumulate": {"accumulate": True, "scale": True, "activation": "gelu"},
}  # fmt: skip
LAYERS = {way: replace(SMALL, n=32, c=512, k=1024, h=size, w=size) for way, size in ((8, 28), (4, 14), (2, 26), (1, 7))}
LAYERS[2] = replace(LAYERS[2], w=25)
STRIDES = [replace(LAYERS[8], k=512, c=1024, h=size, w=size, stride=(2, 2)) for size in (56, 28, 14)]


#: In `make test` each way of copying pixels and each epilogue twice.
COMPILED = [(way, name) for way in LAYERS for name in EPILOGUES]
USUAL = [each for i, each in enumerate(COMPILED) if (i + i // len(EPILOGUES)) % 2 == 0]


@pytest.mark.parametrize(
    ("way", "epilogue"), selection.marked(COMPILED, USUAL, lambda each: (each, f"{each[1]}-{each[0]}"))
)
def test_it_compiles_without_spills(way: int, epilogue: str):
    """The best guess of each way of copying pixels; no product waits for another."""
    pytest.importorskip("cuda.core", reason="NVRTC comes with the extra leanconv[cu13] or [cu12]")
    problem = replace(LAYERS[way], **EPILOGUES[epilogue])
    config = configs(problem)[0]
    assert config.copied == max(way, 2)
    code = compile_launch(POINTWISE.plan(problem, config, HOPPER).launches[0], "sm_90a")
    assert (code.spill_bytes, code.advice) == (0, ()) and code.registers <= 168


@pytest.mark.parametrize("changes", [{}, {"add": True, "scale": True}, GRADIENT], ids=["bias", "residual", "gradient"])
@pytest.mark.parametrize("problem", STRIDES, ids=lambda p: str(p.w))
def test_strides_compile_without_spills(problem: ConvProblem, changes: dict[str, Any]):
    pytest.importorskip("cuda.core", reason="NVRTC comes with the extra leanconv[cu13] or [cu12]")
    problem = replace(problem, **changes)
    code = compile_launch(POINTWISE.plan(problem, configs(problem)[0], HOPPER).launches[0], "sm_90a")
    assert (code.spill_bytes, code.advice) == (0, ())


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
    by_pixels = re.findall(rb"(mul|mad)\.(\S+)\s+(%\w+), [^;]*(?<!-)\b144000000\b[^;]*;", text)
    narrow = [to for _, kind, to in by_pixels if kind == b"lo.s32"]
    assert len(narrow) < len(by_pixels)
    # columns of all images, and the number of one without whole images before it
    counted = rb"(?:or\.b32\s+%\w+, |sub\.s32\s+%\w+, %\w+, )"
    assert all(re.search(counted + re.escape(to) + rb"[;,]", text) for to in narrow), narrow
