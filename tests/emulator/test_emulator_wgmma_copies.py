"""A convolution by tensor copies and wgmma on the emulator: the maps' swizzle is the one that products read."""

from __future__ import annotations

import numpy as np
import pytest

from leanconv.plan import Pointer
from leanconv.runtime.compile import compile_source
from tests import emulator
from tests.emulator import EmulatorError, run_source
from tests.emulator.test_emulator_barriers import without
from tests.emulator.test_emulator_bulk import convolution_map, im2col, map_of
from tests.emulator.test_emulator_wgmma import gathered

#: 64 pixels and 64 filters: for each of 9 filter positions one copy of pixels, one of filters, four products.
CONVOLUTION = """
unsigned char* s = shared_memory_for_swizzles();
Mbarrier* full = reinterpret_cast<Mbarrier*>(s + 16384);
const int t = threadIdx.x;
if (t == 0) {
    mbarrier_init(full, 1);
    fence_mbarrier_init();
}
__syncthreads();
float sums[32] = {};
for (int k = 0; k < 9; ++k) {
    if (t == 0) {
        mbarrier_arrive_expect_tx(full, 16384);
        cp_async_bulk_tensor_im2col_shared_global(s, x_map, full, 0, at[0], at[1], at[2], k % 3, k / 3);
        cp_async_bulk_tensor_shared_global(s + 8192, w_map, full, 0, 64 * k);
    }
    /* landed */ mbarrier_wait_parity(full, k & 1);
    const MatrixDescriptor pixels = matrix_descriptor(s, 0, 1024, 128);
    const MatrixDescriptor filters = matrix_descriptor(s + 8192, 0, 1024, 128);
    wgmma_fence(sums);
    for (int i = 0; i < 4; ++i) wgmma_f16(sums, pixels + 32 * i, filters + 32 * i, true);
    wgmma_commit_group();
    /* wait */ wgmma_wait_group<0>(sums);
}
for (int i = 0; i < 32; ++i) y[t * 32 + i] = sums[i];
"""
CASE = (3, 3), (1, 1), (2, 1), (1, 1)
FIRST = 5


def maps_of(x, w):
    return convolution_map(x, *CASE, 64, 64, swizzle=128), map_of(w.reshape(-1, 64), (64, 64), role="w", swizzle=128)


def unit(body, maps):
    parameters = ", ".join(f"{m.ctype} {m.name}" for m in maps)
    return (
        f"{emulator.ALL_PTX}using namespace leanconv;\n"
        f'extern "C" __global__ void __launch_bounds__(128) probe({parameters}, float* y, const int* at) {{\n{body}}}\n'
    )


def convolve(body=CONVOLUTION):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 9, 7, 64)).astype(np.float16)
    w = rng.standard_normal((3, 3, 64, 64)).astype(np.float16)  # R S K C
    maps = maps_of(x, w)
    y = np.full(4096, np.nan, np.float32)
    image, pixel = divmod(FIRST, 35)
    at = np.array([pixel % 7 - 1, pixel // 7 * 2 - 1, image], np.int32)
    arguments = (*maps, Pointer("y", written=True), Pointer("at", "int"))
    run_source(unit(body, maps), "probe", arguments, {"x": x, "w": w, "y": y, "at": at}, block=128, shared_bytes=16448)
    expected = np.zeros((64, 64))
    for r in range(3):
        for s in range(3):
            expected += im2col(x.astype(np.float64), *CASE, (r, s))[FIRST : FIRST + 64] @ w[r, s].astype(np.float64).T
    return gathered(y, 64), expected


def test_a_convolution():
    y, expected = convolve()
    assert np.linalg.norm(y - expected) < 2e-6 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    "old", ["filters = matrix_descriptor(s + 8192, 0, 1024, 128)", "pixels = matrix_descriptor(s, 0, 1024, 128)"]
)
def test_products_read_the_swizzle_that_copies_made(old):
    y, expected = convolve(CONVOLUTION.replace(old, old.replace("0, 1024, 128)", "16, 1024, 0)")))
    assert not np.linalg.norm(y - expected) < 0.1 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (without(CONVOLUTION, "landed"), "operand A: shared bytes .* are under way: no wait has seen the copy"),
        (
            CONVOLUTION.replace("(full, k & 1)", "(full, 0)"),
            "operand A: shared bytes .* are under way|may still read shared bytes",
        ),
        (
            without(CONVOLUTION, "wait"),
            "wgmma_fence: names sums of the wgmma|may still read shared bytes",
        ),
    ],
)
def test_rules(body, message):
    with pytest.raises(EmulatorError, match=message):
        convolve(body)


def test_the_compiler_takes_the_same_text(nvrtc):
    text = unit(CONVOLUTION, maps_of(np.zeros((1, 9, 7, 64), np.float16), np.zeros((576, 64), np.float16)))
    assert compile_source(text, "probe", "sm_90a").spill_bytes == 0
