"""First layers: the kernels of few channels on layers as networks have them, small, with every tile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from leanconv.call.choose import choose
from leanconv.cpu import oracle
from leanconv.kernels.common.split_k import MOST_PIXELS
from leanconv.kernels.mma_sync.native_weight_rows import NativeWeightRows
from leanconv.plan import Target
from leanconv.problem import ConvProblem
from tests import emulator, proof, selection
from tests.cases import KINDS, TARGETS
from tests.variants import NAMED

HOPPER = replace(TARGETS[0], model="NVIDIA H200")
COL2IM, ROWS, WEIGHT_ROWS = (NAMED[n] for n in ("tensor_gemm_sync_col2im", "native_gemm_rows", "native_weight_rows"))
#: One of each kind: overlapping windows at a stride, three filter tiles, one channel, patches, slices.
LAYERS = {
    "stem": ConvProblem(1, 3, 22, 46, 20, 7, 7, stride=(2, 2), padding=(3, 3, 3, 3)),
    "filters": ConvProblem(2, 3, 9, 18, 196, 3, 3, stride=(2, 2), padding=(1, 1, 1, 1)),
    "one-channel": ConvProblem(1, 1, 11, 21, 66, 5, 3, padding=(2, 2, 1, 1), dilation=(1, 1)),
    "patches": ConvProblem(1, 3, 16, 24, 72, 4, 4, stride=(4, 4)),
    "eleven": ConvProblem(1, 3, 27, 35, 36, 11, 11, stride=(4, 4), padding=(2, 2, 2, 2)),
    "slices": ConvProblem(
        1, 2, 9, 14, 24, 5, 5, stride=(2, 2), padding=(2, 2, 2, 2), d=5, t=3, stride_d=2, padding_d=(1, 1)
    ),
}  # fmt: skip


def _every() -> list[Any]:
    """Every tile; ``make test`` plays one for each layer and kernel, in turn."""
    found, chosen = [], []
    for turn, (name, layer) in enumerate(LAYERS.items()):
        for algorithm, op in ((COL2IM, "dgrad"), (ROWS, "fprop"), (WEIGHT_ROWS, "wgrad")):
            layouts = ("NHWC",) if algorithm is WEIGHT_ROWS else ("NCHW", "NHWC")
            dtypes = ("float32", "float16") if algorithm is COL2IM else ("float16", "bfloat16")
            ways = []
            for layout in layouts:
                for dtype in dtypes:
                    problem = replace(layer, op=op, layout=layout, dtype=dtype)  # type: ignore[arg-type]
                    for i, (_, config) in enumerate(algorithm.within(problem, HOPPER)):
                        ways.append((algorithm, problem, config, f"{algorithm.stem}-{name}-{layout}-{dtype}-{i}"))
            found += ways
            # float32 takes the emulator longest: the first layer alone
            cheap = [way for way in ways if way[1].dtype != "float32" or turn == 0]
            chosen.append(cheap[turn * 7 % len(cheap)])
            if algorithm is ROWS:  # in the other layout too
                chosen.append(cheap[(turn * 7 + len(cheap) // 2) % len(cheap)])
    return selection.marked(found, chosen, lambda each: (each[:3], each[3]))


@pytest.mark.parametrize(("algorithm", "problem", "config"), _every())
def test_first_layers(algorithm: Any, problem: ConvProblem, config: Any) -> None:
    proof.check(algorithm, problem, config, kinds=KINDS[:1], target=HOPPER)


@pytest.mark.parametrize(("dtype", "layout"), [("float32", "NHWC"), ("float16", "NHWC"), ("float16", "NCHW")])
def test_what_is_not_finite_reaches_the_pixels_of_its_windows_alone(dtype: str, layout: str) -> None:
    """Phases without a tap are not multiplied with zeros, and neither is what lies behind a window's row."""
    rng = np.random.default_rng(3)
    for algorithm, op in ((COL2IM, "dgrad"), *(((ROWS, "fprop"),) if dtype == "float16" else ())):
        problem = replace(LAYERS["stem"], layout=layout, dtype=dtype, op=op)  # type: ignore[arg-type]
        read, filters, *_, written = problem.operands
        x, w = (rng.standard_normal(each.shape).astype(dtype) for each in (read, filters))
        pixels = x if layout == "NHWC" else np.moveaxis(x, 1, -1)
        pixels[0, 3, 5, 1], pixels[0, -2, -1, 0] = np.inf, np.nan
        result = np.zeros(written.shape, dtype)
        config = next(iter(algorithm.configs(problem, HOPPER)))
        emulator.run_plan(
            algorithm.plan(problem, config, HOPPER), {read.role: x, "w": w, written.role: result, "bias": None}
        )
        right = oracle.conv2d(problem, np.nan_to_num(x, nan=0, posinf=0), w, None)
        met = oracle.conv2d(problem, (~np.isfinite(x)).astype(np.float32), np.ones_like(w), None) > 0
        assert np.array_equal(~np.isfinite(result), met)
        assert np.allclose(result[~met], right[~met], rtol=1e-2, atol=1e-2)


def test_auto_takes_them_on_hopper() -> None:
    """Where PyTorch's users meet them: the stem of a ResNet."""
    stem = ConvProblem(32, 3, 224, 224, 64, 7, 7, stride=(2, 2), padding=(3, 3, 3, 3), layout="NHWC")
    chosen = {
        (op, dtype): choose(replace(stem, op=op, dtype=dtype), HOPPER, "auto", limit).algorithm.stem  # type: ignore[arg-type]
        for op, dtype, limit in (("fprop", "float16", None), ("wgrad", "bfloat16", 1 << 25), ("dgrad", "float32", None))
    }
    assert list(chosen.values()) == ["native_gemm_rows", "native_weight_rows", "tensor_gemm_sync_col2im"]


def test_auto_takes_rows_in_both_layouts() -> None:
    """Where rows of outputs begin inside of sectors of memory, with tiles of many columns."""
    stem = ConvProblem(32, 3, 224, 224, 64, 7, 7, stride=(2, 2), padding=(3, 3, 3, 3), dtype="float16")
    unaligned = replace(stem, r=3, s=3, padding=(0, 0, 0, 0))  # 111 columns of outputs
    for problem, columns in ((stem, 16), (replace(stem, layout="NHWC"), 16), (unaligned, 128)):
        chosen = choose(problem, HOPPER, "auto")
        assert (chosen.algorithm.stem, chosen.config.tile_columns) == ("native_gemm_rows", columns)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"groups": 3}, "groups=3: it computes layers of one group"),
        ({"dilation": (1, 2)}, "dilated columns: a window's row is no run of neighbours"),
        ({"layout": "CHWN"}, "layout='CHWN' is neither 'NCHW' nor 'NHWC'"),
        ({"c": 60, "r": 9}, "a window has 477 runs of eight elements, more than 64"),
    ],
)
def test_what_rows_decline(change: dict[str, Any], reason: str) -> None:
    problem = replace(ConvProblem(1, 3, 20, 20, 12, 7, 7, layout="NHWC", dtype="float16"), **change)
    assert any(reason in each for each in ROWS.why_not(problem, HOPPER))
    planes = replace(problem, layout="NCHW", op="wgrad")
    assert any("layout='NCHW' is not NHWC" in each for each in WEIGHT_ROWS.why_not(planes, HOPPER))
    old = Target("sm_75", 40, 64 * 1024, 64 * 1024)
    assert any("sm_75 is older than sm_80" in each for each in WEIGHT_ROWS.why_not(replace(problem, op="wgrad"), old))


@pytest.mark.parametrize(("images", "limit", "fits"), [(8, 0, True), (800, 0, False), (800, 2**25, True)])
def test_no_warp_sums_more_pixels_than_a_tensor_core_may(images: int, limit: int, fits: bool) -> None:
    """It rounds toward zero. More blocks share the pixels, if their sums have room; else another kernel does."""
    given = {"stride": (2, 2), "padding": (3, 3, 3, 3), "layout": "NHWC", "dtype": "float16", "op": "wgrad"}
    problem = ConvProblem(images, 3, 224, 224, 64, 7, 7, **given)  # type: ignore[arg-type]
    configs = [config for _, config in NativeWeightRows().within(problem, HOPPER, limit)]
    assert bool(configs) is fits
    assert all(problem.pixels <= MOST_PIXELS * each.warps_p * each.split * each.split_k for each in configs)
    assert choose(problem, HOPPER, "auto", limit).cost > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"groups": 3}, "groups=3: it computes layers of one group"),
        ({"dilation": (2, 1)}, "dilated filters"),
        ({"c": 30}, "7 taps of 30 channels in a filter row are more than 96"),
        ({"k": 9000}, "there are 9000 filters, more than 8192"),
    ],
)
def test_what_col2im_declines(change: dict[str, Any], reason: str) -> None:
    problem = replace(ConvProblem(1, 3, 20, 20, 12, 7, 7, layout="NHWC", op="dgrad"), **change)
    assert any(reason in each for each in COL2IM.why_not(problem, HOPPER))
