"""mma.sync, ldmatrix and the conversions of pairs on the emulator: products held against NumPy, and their rules."""

from __future__ import annotations

import numpy as np
import pytest

from leanconv.plan import Number, Pointer
from leanconv.runtime.compile import compile_source
from tests import emulator
from tests.emulator import EmulatorError, run_source
from tests.emulator.test_emulator_wgmma import operand, rounded

ARGUMENTS = (Pointer("x", "int"), Pointer("w", "int"), Pointer("y", "int", written=True), Number("int", "n"))
SHARED = 32768


def unit(body):
    return (
        f"{emulator.ALL_PTX}"
        "using namespace leanconv;\n"
        'extern "C" __global__ void __launch_bounds__(128) '
        "probe(const int* __restrict__ x, const int* __restrict__ w, int* y, int n) {\n"
        "  unsigned char* s = shared_memory();\n"
        "  int* words = reinterpret_cast<int*>(s);\n"
        "  const int t = threadIdx.x, lane = t % 32, warp = t / 32; (void)words; (void)n; (void)lane; (void)warp;\n"
        f"{body}\n}}\n"
    )


def play(body, x, w, y, *, n=0, block=32):
    values = {"x": x.view(np.int32).reshape(-1), "w": w.view(np.int32).reshape(-1), "y": y.view(np.int32), "n": n}
    run_source(unit(body), "probe", ARGUMENTS, values, block=block, shared_bytes=SHARED)
    return y


# ldmatrix

LOAD = "for (int i = t; i < 128; i += 32) words[i] = x[i];\n__syncthreads();\n"


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count, trans):
    """Rows in any place: those of matrix m lie from the end backwards."""
    x = np.arange(256, dtype=np.uint16)
    name = "ldmatrix_trans" if trans else "ldmatrix"
    body = LOAD + (
        f"unsigned a[{count}];\n{name}(a, s + (lane < {8 * count} ? (31 - lane) * 16 : 1));\n"
        f"for (int i = 0; i < {count}; ++i) y[t * {count} + i] = a[i];\n"
    )
    y = play(body, x, x, np.zeros(32 * count, np.int32)).view(np.uint16).reshape(32, count, 2)
    rows = x.reshape(32, 8)[::-1].reshape(4, 8, 8)
    lane = np.arange(32)
    for m in range(count):
        matrix = rows[m].T if trans else rows[m]
        for i in range(2):
            np.testing.assert_array_equal(y[:, m, i], matrix[lane // 4, lane % 4 * 2 + i])


# mma.sync: 64 x 64 sums of four warps, 16 rows each; A by rows from one place in shared memory, B from another.
# Filters lie by rows of reduction elements, or (.trans) reduction elements by rows of filters.

PRODUCT = """
for (int i = t; i < 2048; i += 128) words[i] = x[i], words[2048 + i] = w[i];
/* meet */ __syncthreads();
const unsigned char* a_rows = s + warp * 16 * 128;
float sums[8][4] = {};
for (int k = 0; k < 4; ++k) {
    unsigned a[4], b[2];
    /* load a */ ldmatrix(a, a_rows + lane % 16 * 128 + k * 32 + lane / 16 * 16);
    for (int j = 0; j < 8; ++j) {
        /* load b */ ldmatrix(b, s + 8192 + (j * 8 + lane % 8) * 128 + k * 32 + lane / 8 % 2 * 16);
        /* multiply */ mma_KIND(sums[j], a, b);
    }
}
for (int j = 0; j < 8; ++j)
    for (int i = 0; i < 4; ++i)
        y[(warp * 16 + lane / 4 + i / 2 * 8) * 64 + j * 8 + lane % 4 * 2 + i % 2] = __float_as_int(sums[j][i]);
"""
TRANSPOSED = PRODUCT.replace(
    "ldmatrix(b, s + 8192 + (j * 8 + lane % 8) * 128 + k * 32 + lane / 8 % 2 * 16)",
    "ldmatrix_trans(b, s + 8192 + (k * 16 + lane % 16) * 128 + j * 16)",
)


def product(body=PRODUCT, kind="f16", transposed=False):
    a, a_values = operand(64, 64, kind)
    b, b_values = operand(64, 64, kind, seed=1)
    given = np.ascontiguousarray(b.T) if transposed else b
    y = play(body.replace("KIND", kind), a, given, np.zeros(4096, np.float32), block=128).reshape(64, 64)
    return y, a_values, b_values


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_products(kind, transposed):
    y, a, b = product(TRANSPOSED if transposed else PRODUCT, kind, transposed)
    np.testing.assert_allclose(y, a @ b.T, rtol=0, atol=2e-5)
    for column in (0, 37):
        expected = rounded(a, np.broadcast_to(b[column], a.shape), block=8, guard=1)
        np.testing.assert_array_equal(y[:, column], expected)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("/* meet */ __syncthreads();", "", "a race"),
        (
            "k * 32 + lane / 16 * 16",
            "k * 32 + lane / 16 * 8",
            "ldmatrix: shared byte .* is misaligned, no multiple of 16[^$]*at unit.cu:",
        ),
        ("a_rows + lane", "a_rows + 32768 + lane", "ldmatrix: takes shared bytes .* of 32768"),
        ("/* multiply */", "if (lane != 7)", "warp divergence|stuck"),
        ("/* load a */", "if (lane < 16)", "warp divergence|stuck"),
        (
            "mma_KIND(sums[j], a, b);",
            "if (lane < 16)\nmma_KIND(sums[j], a, b);\nelse\nmma_KIND(sums[j], a, b);",
            "warp divergence",
        ),
    ],
)
def test_rules(old, new, message):
    assert old in PRODUCT
    with pytest.raises(EmulatorError, match=message):
        product(PRODUCT.replace(old, new))


def test_a_part_of_a_warp_cannot_multiply():
    body = "float sums[4] = {}; unsigned a[4] = {}, b[2] = {}; mma_f16(sums, a, b);"
    with pytest.raises(EmulatorError, match="mma: mask ffffffff names lane 16, which the block does not have"):
        play(body, *[np.zeros(4, np.int32)] * 3, block=48)


def test_ldmatrix_waits_for_copies():
    body = (
        "Mbarrier* full = reinterpret_cast<Mbarrier*>(s + 1024);\n"
        "if (t == 0) { mbarrier_init(full, 1); fence_mbarrier_init(); mbarrier_arrive_expect_tx(full, 512);\n"
        "cp_async_bulk_shared_global(s, x, 512, full); }\n__syncthreads();\n"
        "/* wait */ mbarrier_wait_parity(full, 0);\n"
        "unsigned a[4]; ldmatrix(a, s + lane * 16); y[t] = a[3];\n"
    )
    x = np.arange(128, dtype=np.int32)
    np.testing.assert_array_equal(play(body, x, x, np.zeros(32, np.int32)), x[96:])
    with pytest.raises(EmulatorError, match="ldmatrix: shared bytes .* are under way: no wait has seen the copy"):
        play(body.replace("/* wait */ mbarrier_wait_parity(full, 0);", ""), x, x, np.zeros(32, np.int32))


# TF32: 16 x 8 sums of 16 reduction elements; A by ldmatrix of rows of four float32.

PRODUCT_TF32 = """
for (int i = t; i < 256; i += 32) words[i] = x[i];
__syncthreads();
float sums[4] = {};
for (int k = 0; k < 2; ++k) {
    unsigned a[4], b[2];
    ldmatrix(a, s + lane % 16 * 64 + k * 32 + lane / 16 * 16);
    for (int i = 0; i < 4; ++i) a[i] = ROUND(__uint_as_float(a[i]));
    for (int i = 0; i < 2; ++i) b[i] = ROUND(__int_as_float(w[lane / 4 * 16 + k * 8 + i * 4 + lane % 4]));
    mma_tf32(sums, a, b);
}
for (int i = 0; i < 4; ++i) y[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = __float_as_int(sums[i]);
"""


@pytest.mark.parametrize("rounding", ["cvt_rn_tf32_f32", "__float_as_uint"])
def test_products_of_tf32_read_ten_digits(rounding):
    random = np.random.default_rng(0)
    x, w = (random.standard_normal((rows, 16)).astype(np.float32) for rows in (16, 8))
    read = [each.copy().view(np.uint32) for each in (x, w)]
    if rounding.startswith("cvt"):
        read = [each + 0xFFF + (each >> 13 & 1) for each in read]
    a, b = ((each & ~np.uint32(0x1FFF)).view(np.float32).astype(float) for each in read)
    y = play(PRODUCT_TF32.replace("ROUND", rounding), x, w, np.zeros(128, np.float32)).reshape(16, 8)
    np.testing.assert_allclose(y, a @ b.T, rtol=0, atol=4e-6)
    for column in range(8):
        expected = rounded(a, np.broadcast_to(b[column], a.shape), block=4, guard=1)
        np.testing.assert_array_equal(y[:, column], expected)


# Conversions

CONVERT = "for (int i = t; i < n; i += 32) y[i] = CVT(__int_as_float(x[2 * i]), __int_as_float(x[2 * i + 1]));"


def test_pairs_are_converted_with_the_first_in_the_lower_half():
    rng = np.random.default_rng(0)
    special = [
        0,
        -0.0,
        65519,
        65520,
        -1e9,
        2.0**-25,
        2.0**-24,
        6.1e-5,
        1e-8,
        np.inf,
        -np.inf,
        2049,
        2051,
        1.00048828125,
    ]
    x = np.concatenate([special, rng.standard_normal(500) * 10.0 ** rng.integers(-8, 5, 500)]).astype(np.float32)
    n = x.size // 2
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).view(np.uint16)
    y = play(CONVERT.replace("CVT", "cvt_rn_f16x2_f32"), x, x, np.zeros(n, np.int32), n=n).view(np.uint16)
    np.testing.assert_array_equal(y, expected)
    bits = x.view(np.uint32).astype(np.uint64)
    y = play(CONVERT.replace("CVT", "cvt_rn_bf16x2_f32"), x, x, np.zeros(n, np.int32), n=n).view(np.uint16)
    np.testing.assert_array_equal(y, ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16))


def test_the_compiler_takes_the_same_texts(nvrtc):
    for arch in ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120"):
        for body in (
            PRODUCT.replace("KIND", "f16"),
            TRANSPOSED.replace("KIND", "bf16"),
            CONVERT.replace("CVT", "cvt_rn_f16x2_f32"),
        ):
            assert compile_source(unit(body), "probe", arch).spill_bytes == 0
    assert compile_source(unit(CONVERT.replace("CVT", "cvt_rn_bf16x2_f32")), "probe", "sm_80").cubin
    assert compile_source(unit(PRODUCT_TF32.replace("ROUND", "__float_as_uint")), "probe", "sm_80").cubin
    for arch in ("sm_90a", "sm_100a", "sm_120"):
        assert compile_source(unit(PRODUCT_TF32.replace("ROUND", "cvt_rn_tf32_f32")), "probe", arch).cubin


def test_movmatrix_transposes():
    x = np.arange(64, dtype=np.uint16)
    y = play("y[t] = static_cast<int>(movmatrix_trans(static_cast<unsigned>(x[t])));", x, x, np.zeros(32, np.int32))
    np.testing.assert_array_equal(y.view(np.uint16).reshape(8, 8), x.reshape(8, 8).T)
