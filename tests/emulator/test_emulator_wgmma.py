"""wgmma on the emulator: products held against NumPy, and the rounding of the tensor core."""

from __future__ import annotations

import numpy as np
import pytest

from leanconv.plan import Number, Pointer
from leanconv.runtime.compile import compile_source
from tests import emulator
from tests.emulator import ORDERS, EmulatorError, run_source

ARGUMENTS = (Pointer("x", "int"), Pointer("w", "int"), Pointer("y", written=True), Number("int", "n"))
#: B's stage, A's stage behind it, then mbarriers.
A_BYTES, BARRIERS, SHARED = 32768, 65536, 65536 + 64


def unit(body):
    return (
        f"{emulator.ALL_PTX}"
        "using namespace leanconv;\n"
        'extern "C" __global__ void __launch_bounds__(384) '
        "probe(const int* __restrict__ x, const int* __restrict__ w, float* y, int n) {\n"
        "  unsigned char* s = shared_memory_for_swizzles();\n"
        "  int* words = reinterpret_cast<int*>(s);\n"
        f"  Mbarrier* full = reinterpret_cast<Mbarrier*>(s + {BARRIERS});\n"
        "  const int t = threadIdx.x; (void)words; (void)full; (void)n; (void)x; (void)w;\n"
        f"{body}\n}}\n"
    )


def play(body, a, b, y, *, n=0, block=128, orders=ORDERS):
    """``a`` is what the threads read as x, ``b`` as w."""
    values = {"x": a.view(np.int32).reshape(-1), "w": b.view(np.int32).reshape(-1), "y": y, "n": n}
    run_source(unit(body), "probe", ARGUMENTS, values, block=block, shared_bytes=SHARED, orders=orders)
    return y


def halves(values, kind="f16"):
    """Bits of float16 or bfloat16, and what they mean."""
    if kind == "f16":
        rounded = values.astype(np.float16)
        return rounded.view(np.uint16), rounded.astype(np.float64)
    bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def operand(rows, k=64, kind="f16", seed=0):
    rng = np.random.default_rng(seed)
    return halves(rng.standard_normal((rows, k)), kind)


def fragments(bits):
    """The registers of all threads: (blocks of 16 elements, 128, 4), of a matrix of 64 rows."""
    thread = np.arange(128)
    row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
    registers = np.empty((bits.shape[1] // 16, 128, 4), np.uint32)
    for k in range(bits.shape[1] // 16):
        for i in range(4):
            r, c = row + i % 2 * 8, 16 * k + column + i // 2 * 8
            registers[k, :, i] = bits[r, c].astype(np.uint32) | bits[r, c + 1].astype(np.uint32) << 16
    return registers


def gathered(y, n):
    """The 64 x n sums, of what each thread has stored, (128, n / 2)."""
    thread, i = np.arange(128)[:, None], np.arange(n // 2)
    out = np.empty((64, n), np.float32)
    out[thread // 32 * 16 + thread % 32 // 4 + i % 4 // 2 * 8, i // 4 * 8 + thread % 4 * 2 + i % 2] = y.reshape(128, -1)
    return out


def transposed(bits, swizzle):
    """The same with lines next to each other: spans of lines behind each other, in each the reduction elements."""
    rows, k = bits.shape
    if not swizzle:  # (8 reduction elements, 16 bytes) behind each other: along the lines first
        tiles = bits.reshape(rows // 8, 8, k // 8, 8).transpose(2, 0, 3, 1)
        return np.ascontiguousarray(tiles).view(np.uint8).reshape(-1), 16 * rows, 128
    tiles = bits.reshape(rows // (swizzle // 2), swizzle // 2, k).transpose(0, 2, 1)
    return laid_out(tiles.reshape(-1, swizzle // 2), swizzle)[0], k * swizzle, 8 * swizzle


def laid_out(bits, swizzle):
    """A matrix as wgmma wants it in shared memory, with what its descriptor needs: bytes, leading, stride."""
    rows, k = bits.shape
    data = np.ascontiguousarray(bits).view(np.uint8).reshape(rows, -1, 16)
    if not swizzle:  # (8 rows, 16 bytes) behind each other: along the reduction first
        tiles = data.reshape(rows // 8, 8, 2 * k // 16, 16).transpose(0, 2, 1, 3)
        return np.ascontiguousarray(tiles).reshape(-1), 128, 16 * k
    assert 2 * k == swizzle
    units = swizzle // 16
    moved = np.empty_like(data)
    for row in range(rows):
        for u in range(units):
            moved[row, u ^ (row * units + u) // 8 % units] = data[row, u]
    return moved.reshape(-1), 0, 8 * swizzle


#: Copies B, and A if it is there, to shared memory; then 16 reduction elements after 16.
STAGE = """
/* store */ for (int i = t; i < B_WORDS; i += 128) words[i] = w[i];
/* store a */ for (int i = t; i < A_WORDS; i += 128) words[8192 + i] = x[i];
/* proxy */ fence_proxy_async();
/* meet */ __syncthreads();
const MatrixDescriptor b = matrix_descriptor(s, LEADING, STRIDE, SWIZZLE);
"""
REGISTERS = """
float sums[COUNT] = {};
unsigned a[BLOCKS][4];
for (int k = 0; k < BLOCKS; ++k)
    for (int i = 0; i < 4; ++i) a[k][i] = x[(k * 128 + t) * 4 + i];
/* fence */ wgmma_fence(sums, a);
for (int k = 0; k < BLOCKS; ++k)
    /* multiply */ wgmma_KIND(sums, a[k], b + k * STEP, k > 0);
/* commit */ wgmma_commit_group();
/* wait */ wgmma_wait_group<0>(sums, a);
for (int i = 0; i < COUNT; ++i)
    /* read */ y[t * COUNT + i] = sums[i];
/* after */
"""
SHARED_A = """
float sums[COUNT] = {};
const MatrixDescriptor a = matrix_descriptor(s + 32768, LEADING, STRIDE, SWIZZLE);
/* fence */ wgmma_fence(sums);
for (int k = 0; k < BLOCKS; ++k)
    /* multiply */ wgmma_KIND(sums, a + k * STEP, b + k * STEP, k > 0);
/* commit */ wgmma_commit_group();
/* wait */ wgmma_wait_group<0>(sums);
for (int i = 0; i < COUNT; ++i)
    /* read */ y[t * COUNT + i] = sums[i];
/* after */
"""


def filled(body, n, swizzle, k, kind="f16", a_words=0):
    """``body`` with the numbers of a product of 64 x k and k x n."""
    leading, stride = (0, 8 * swizzle) if swizzle else (128, 16 * k)
    numbers = {
        "A_WORDS": a_words, "B_WORDS": n * k // 2, "LEADING": leading, "STRIDE": stride, "SWIZZLE": swizzle,
        "COUNT": n // 2, "BLOCKS": k // 16, "STEP": 32 if swizzle else 256, "KIND": kind,
    }  # fmt: skip
    for name, value in numbers.items():
        body = body.replace(name, str(value))
    return body


def multiply(n=64, swizzle=128, kind="f16", from_shared=False, seed=0, edit=lambda body: body, **how):
    k = swizzle // 2 or 32
    a, a_values = operand(64, k, kind, seed)
    b, b_values = operand(n, k, kind, seed + 1)
    given = laid_out(a, swizzle)[0] if from_shared else fragments(a)
    body = edit(filled(STAGE + (SHARED_A if from_shared else REGISTERS), n, swizzle, k, kind, from_shared * 32 * k))
    y = play(body, given, laid_out(b, swizzle)[0], np.full(64 * n, np.nan, np.float32), **how)
    return gathered(y, n), a_values @ b_values.T


SHAPES = [
    *((32, 64, "f16"), (64, 128, "f16"), (64, 128, "bf16"), (64, 0, "f16")),
    *((96, 32, "bf16"), (128, 128, "f16"), (192, 128, "bf16"), (256, 128, "f16")),
]


@pytest.mark.parametrize("from_shared", [False, True], ids=["registers", "shared"])
@pytest.mark.parametrize(("n", "swizzle", "kind"), SHAPES)
def test_products(n, swizzle, kind, from_shared):
    y, expected = multiply(n, swizzle, kind, from_shared)
    assert np.linalg.norm(y - expected) < 1e-6 * np.linalg.norm(expected)


@pytest.mark.parametrize(("n", "swizzle"), [(32, 32), (64, 64), (256, 128)])
def test_products_of_tf32_read_ten_digits(n, swizzle):
    k, rng = swizzle // 4, np.random.default_rng(n)
    a, b = rng.standard_normal((64, k)).astype(np.float32), rng.standard_normal((n, k)).astype(np.float32)
    thread = np.arange(128)
    row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4
    registers = np.empty((k // 8, 128, 4), np.float32)
    for block in range(k // 8):
        for i in range(4):
            registers[block, :, i] = a[row + i % 2 * 8, 8 * block + column + i // 2 * 4]
    # 4 bytes an element lie where two of 2 bytes do
    body = filled(STAGE + REGISTERS, n, swizzle, 2 * k, "tf32").replace("BLOCKS", str(k // 8))
    halved = b.view(np.uint16).reshape(n, 2 * k)
    y = gathered(play(body, registers, laid_out(halved, swizzle)[0], np.full(64 * n, np.nan, np.float32)), n)
    cut_a, cut_b = ((each.view(np.uint32) & ~np.uint32(0x1FFF)).view(np.float32).astype(float) for each in (a, b))
    assert np.linalg.norm(y - cut_a @ cut_b.T) < 1e-6 * np.linalg.norm(y)


BOTH = """
for (int i = t; i < B_WORDS; i += 128) words[i] = w[i];
for (int i = t; i < A_WORDS; i += 128) words[8192 + i] = x[i];
fence_proxy_async();
__syncthreads();
const auto a = A_NAME(s + 32768, A_LEADING, A_STRIDE, SWIZZLE);
const auto b = B_NAME(s, B_LEADING, B_STRIDE, SWIZZLE);
float sums[COUNT] = {};
/* fence */ wgmma_fence(sums);
for (int k = 0; k < BLOCKS; ++k) wgmma_KIND(sums, a + k * A_STEP, b + k * B_STEP, true);
wgmma_commit_group();
wgmma_wait_group<0>(sums);
for (int i = 0; i < COUNT; ++i) y[t * COUNT + i] = sums[i];
"""


def multiply_across(a_across, b_across, swizzle, n=64, k=64, kind="f16", run=play, begin=0):
    """A product whose operands lie by lines or across them, of B from reduction element ``begin`` on."""
    body = BOTH.replace("B_NAME(s,", f"B_NAME(s + {begin * swizzle},")
    stored = []
    for name, rows, across in (("A", 64, a_across), ("B", n, b_across)):
        elements = k + 8 * (begin > 0 and name == "B")
        bits, values = operand(rows, elements, kind, seed=rows + across)
        data, leading, stride = (transposed if across else laid_out)(bits, swizzle)
        step = (2 * stride if swizzle else 2 * leading) if across else 32 if swizzle else 256
        numbers = {"NAME": "transposed_descriptor" if across else "matrix_descriptor", "LEADING": leading}
        for what, value in {**numbers, "STRIDE": stride, "STEP": step, "WORDS": rows * elements // 2}.items():
            body = body.replace(f"{name}_{what}", str(value))
        stored.append((data, values))
    for what, value in {"SWIZZLE": swizzle, "COUNT": n // 2, "BLOCKS": k // 16, "KIND": kind}.items():
        body = body.replace(what, str(value))
    (a, a_values), (b, b_values) = stored
    y = run(body, a, b, np.full(64 * n, np.nan, np.float32))
    return gathered(y, n), a_values @ b_values[:, begin : begin + k].T


@pytest.mark.parametrize(
    ("a_across", "b_across", "swizzle", "n", "k", "kind"),
    [
        (True, True, 128, 128, 64, "f16"), (True, False, 128, 64, 64, "bf16"), (False, True, 128, 256, 64, "f16"),
        (True, True, 64, 96, 32, "f16"), (True, True, 32, 32, 48, "bf16"), (True, True, 0, 64, 32, "f16"),
        (False, False, 0, 64, 64, "f16"),
    ],
)  # fmt: skip
def test_operands_may_lie_across(a_across, b_across, swizzle, n, k, kind):
    y, expected = multiply_across(a_across, b_across, swizzle, n, k, kind)
    assert np.linalg.norm(y - expected) < 1e-6 * np.linalg.norm(expected)


def test_an_operand_across_may_begin_at_any_row_of_its_pattern():
    for begin in (1, 5):
        y, expected = multiply_across(False, True, 128, begin=begin)
        assert np.linalg.norm(y - expected) < 1e-6 * np.linalg.norm(expected)


def test_eight_lines_may_begin_at_any_row_and_lie_any_rows_apart():
    """The window of 8 x 8 pixels: rows of 10, of which a filter tap reads 8 from its own pixel on."""
    data, values = operand(104)
    a, b = data, operand(64, seed=1)
    for row, column in ((0, 0), (1, 2), (2, 1)):
        first = 10 * row + column
        body = BOTH.replace("A_NAME(s + 32768", f"matrix_descriptor(s + {32768 + 128 * first}")
        numbers = {"B_NAME": "matrix_descriptor", "A_LEADING": 0, "B_LEADING": 0, "A_STRIDE": 1280, "B_STRIDE": 1024}
        numbers |= {"A_STEP": 32, "B_STEP": 32, "A_WORDS": 104 * 32, "B_WORDS": 64 * 32, "SWIZZLE": 128, "COUNT": 32}
        for what, value in {**numbers, "BLOCKS": 4, "KIND": "f16"}.items():
            body = body.replace(what, str(value))
        y = gathered(play(body, laid_out(a, 128)[0], laid_out(b[0], 128)[0], np.full(4096, np.nan, np.float32)), 64)
        read = [first + 10 * (pixel // 8) + pixel % 8 for pixel in range(64)]
        expected = values[read] @ b[1].T
        assert np.linalg.norm(y - expected) < 1e-6 * np.linalg.norm(expected)


def test_an_operand_across_has_whole_patterns():
    """It begins with a row, and strides are whole."""
    for change, message in (("s + 64, 8192, 1024", "byte 64 of a pattern"), ("s + 0, 8192, 512", "a stride of 512")):

        def run(body, *arrays, to=change):
            return play(body.replace("s + 0, 8192, 1024", to), *arrays)

        with pytest.raises(EmulatorError, match=message):
            multiply_across(False, True, 128, run=run)


def test_groups_of_lines_may_begin_a_row_apart():
    """So one product has lines of several neighbouring reduction elements: here 64 channels of three pixels."""
    n, k, channels = 192, 64, 64
    bits, values = operand(channels, k + 8)
    data, _, stride = transposed(bits, 128)
    a, a_values = operand(64, k, seed=1)
    body = BOTH
    numbers = {"A_NAME": "matrix_descriptor", "B_NAME": "transposed_descriptor", "A_LEADING": 0, "B_LEADING": 128}
    numbers |= {"A_STRIDE": 1024, "B_STRIDE": stride, "A_STEP": 32, "B_STEP": 2 * stride, "A_WORDS": 64 * k // 2}
    numbers |= {"B_WORDS": channels * (k + 8) // 2, "SWIZZLE": 128, "COUNT": n // 2, "BLOCKS": k // 16, "KIND": "f16"}
    for what, value in numbers.items():
        body = body.replace(what, str(value))
    y = gathered(play(body, laid_out(a, 128)[0], data, np.full(64 * n, np.nan, np.float32)), n)
    expected = np.concatenate([a_values @ values[:, tap : tap + k].T for tap in range(3)], 1)
    assert np.linalg.norm(y - expected) < 1e-6 * np.linalg.norm(expected)


# The rounding


def leading(values):
    """The powers of two in them."""
    mantissa, exponent = np.frexp(np.abs(values))
    return np.ldexp(np.ceil(mantissa), exponent - 1)


def rounded(a, b, block=16, guard=2, sum=0.0):
    """Rows of a times rows of b as the tensor core adds them up, its model once more in NumPy."""
    total, one = np.full(len(a), sum), np.ones(len(a))
    for k in range(0, a.shape[1], block):
        factors = [np.concatenate([first[:, None], x[:, k : k + block]], axis=1) for first, x in ((total, a), (one, b))]
        terms = factors[0] * factors[1]
        exponent = np.frexp((leading(factors[0]) * leading(factors[1])).max(axis=1))[1] - 1
        unit = 2.0 ** (exponent - 23 - guard)
        exact = np.trunc(terms / unit[:, None]).sum(axis=1) * unit
        near = exact.astype(np.float32)
        beyond = np.abs(near.astype(np.float64)) > np.abs(exact)
        total = np.where(beyond, np.nextafter(near, np.float32(0)), near).astype(np.float64)
    return total.astype(np.float32)


#: Sums of n blocks of 64 elements, each stored through shared memory anew; promoted where the kernel adds them itself.
LONG = """
float sums[16] = {}, total[16] = {};
unsigned a[4][4];
for (int block = 0; block < n; ++block) {
    __syncthreads();
    for (int i = t; i < 1024; i += 128) words[i] = w[block * 1024 + i];
    fence_proxy_async();
    __syncthreads();
    const MatrixDescriptor b = matrix_descriptor(s, 0, 1024, 128);
    for (int k = 0; k < 4; ++k)
        for (int i = 0; i < 4; ++i) a[k][i] = x[((block * 4 + k) * 128 + t) * 4 + i];
    wgmma_fence(sums, a);
    for (int k = 0; k < 4; ++k) wgmma_f16(sums, a[k], b + 32 * k, ADD);
    wgmma_commit_group();
    wgmma_wait_group<0>(sums, a);
    if (PROMOTED) for (int i = 0; i < 16; ++i) total[i] += sums[i];
}
for (int i = 0; i < 16; ++i) y[t * 16 + i] = PROMOTED ? total[i] : sums[i];
"""


@pytest.mark.parametrize(
    ("k", "draw", "error"),
    [(2304, "standard_normal", 2.8e-6), (9216, "random", 5.8e-5)],
)
def test_long_sums_lose_what_the_machine_loses(k, draw, error):
    """The errors measured on an H200, and that adding partial sums of 64 elements in float32 mends them."""
    rng = np.random.default_rng(1)
    (a, a_values), (b, b_values) = (halves(getattr(rng, draw)((rows, k))) for rows in (64, 32))
    stages = np.concatenate([laid_out(b[:, i : i + 64], 128)[0] for i in range(0, k, 64)])
    expected = a_values @ b_values.T
    errors = []
    for promoted in (False, True):
        body = LONG.replace("ADD", "k > 0" if promoted else "true").replace("PROMOTED", str(promoted).lower())
        y = np.zeros(64 * 32, np.float32)
        y = gathered(play(body, fragments(a), stages, y, n=k // 64, orders=("ascending",)), 32)
        errors.append(np.linalg.norm(y - expected) / np.linalg.norm(expected))
        if not promoted:
            np.testing.assert_array_equal(y[:, 5], rounded(a_values, np.broadcast_to(b_values[5], a.shape)))
    assert errors[0] == pytest.approx(error, rel=0.1)
    assert errors[1] < 2.8e-7


def test_infinities_and_subnormals():
    a, b = np.zeros((64, 64), np.float16), np.zeros((64, 64), np.float16)
    a[0, 0], a[1, 0], a[2, 0], a[2, 1], a[3, 0], a[4, :] = np.inf, np.nan, np.inf, -np.inf, 2.0**-24, 60000
    b[0, :2], b[1, :], b[2, 0] = 1, 60000, 2.0**-24
    body = filled(STAGE + REGISTERS, 64, 128, 64)
    y = gathered(
        play(body, fragments(a.view(np.uint16)), laid_out(b.view(np.uint16), 128)[0], np.zeros(4096, np.float32)), 64
    )
    with np.errstate(invalid="ignore"):
        expected = a.astype(np.float32) @ b.astype(np.float32).T
    np.testing.assert_allclose(y[:5, :3], expected[:5, :3], rtol=1e-6)
    assert y[3, 2] == 2.0**-48


def test_the_compiler_takes_the_same_texts(nvrtc):
    for n, swizzle, kind in SHAPES:
        for body in (REGISTERS, SHARED_A):
            text = unit(filled(STAGE + body, n, swizzle, swizzle // 2 or 32, kind)).replace(
                "bounds__(384)", "bounds__(128)"
            )
            made = compile_source(text, "probe", "sm_90a")
            assert made.spill_bytes == made.stack_bytes == 0, (n, made.registers, made.spill_bytes)
    across = BOTH.replace("A_NAME", "transposed_descriptor").replace("B_NAME", "transposed_descriptor")
    for name in ("WORDS", "LEADING", "STRIDE", "STEP"):
        across = across.replace(f"A_{name}", "1024").replace(f"B_{name}", "1024")
    assert compile_source(unit(filled(across, 96, 128, 64, "bf16")), "probe", "sm_90a").spill_bytes == 0
