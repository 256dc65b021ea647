"""wgmma on the emulator: products held against NumPy, the tensor core's rounding, and each way to use it too early."""

from __future__ import annotations

import emulator
import numpy as np
import pytest
from emulator import ORDERS, EmulatorBuildError, EmulatorError, run_source
from test_emulator_barriers import without

from leanconv.plan import Number, Pointer
from leanconv.runtime.compile import CompileError, compile_source

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


@pytest.mark.parametrize("from_shared", [False, True], ids=["registers", "shared"])
@pytest.mark.parametrize(
    ("n", "swizzle", "kind"),
    [(32, 64, "f16"), (64, 128, "f16"), (64, 128, "bf16"), (64, 0, "f16"), (96, 32, "bf16"), (128, 128, "f16"),
     (192, 128, "bf16"), (256, 128, "f16")],
)  # fmt: skip
def test_products(n, swizzle, kind, from_shared):
    y, expected = multiply(n, swizzle, kind, from_shared)
    assert np.linalg.norm(y - expected) < 1e-6 * np.linalg.norm(expected)


# The rounding


def rounded(a, b, block=16, guard=2, sum=0.0):
    """Rows of a times rows of b as the tensor core adds them up, its model once more in NumPy."""
    total = np.full(len(a), sum)
    for k in range(0, a.shape[1], block):
        terms = np.concatenate([total[:, None], a[:, k : k + block] * b[:, k : k + block]], axis=1)
        exponent = np.frexp(np.abs(terms).max(axis=1))[1] - 1
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


# The rules

CHANGED = "has written to its (sums|fragments of A) since the last wgmma_fence.. that names them[^$]*at unit.cu"
TOO_EARLY = "use-after-poison[^$]*it is (sums|fragments of A) of the wgmma at unit.cu:.*, and no wgmma_wait_group"


def before(mark, text):
    return lambda body: body.replace(f"/* {mark} */", f"{text}\n/* {mark} */")


def dropped(*marks):
    return lambda body: without(body, *marks)


def changed(old, new):
    def edit(body):
        assert old in body
        return body.replace(old, new)

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (dropped("fence"), "no wgmma_fence.. names its sums since they were the thread's own\n  at unit.cu:"),
        (changed("wgmma_fence(sums, a)", "wgmma_fence(sums)"), "no wgmma_fence.. names its fragments of A"),
        (changed("wgmma_fence(sums, a)", "wgmma_fence(a)"), "no wgmma_fence.. names its sums"),
        (before("multiply", "a[k][1] ^= 1,"), CHANGED),
        (before("multiply", "sums[7] += k == 0,"), CHANGED),
        # in flight: read, written, of A, of the sums
        (before("commit", "sums[0] += 1;"), TOO_EARLY),
        (before("wait", "y[0] = sums[31];"), TOO_EARLY),
        (before("wait", "if (t == 77) a[3][3] = 0;"), TOO_EARLY),
        (before("wait", "wgmma_fence(sums);"), "wgmma_fence: names sums of the wgmma at unit.cu:.*, which is under way"),
        # the wait: none, of no group, of an older one, of one thread alone
        (dropped("wait"), TOO_EARLY),
        (dropped("commit"), TOO_EARLY + "|names sums of the wgmma at unit.cu:.*, which is still under way"),
        (changed("wgmma_wait_group<0>(sums, a)", "wgmma_wait_group<1>()"), TOO_EARLY),
        (lambda body: without(body.replace("i < 32; ++i)", "i < 32; ++i);"), "wait", "read"), "wgmma: thread .* leaves the kernel without having waited for it\n  at unit.cu:"),
        (changed("group<0>(sums, a)", "group<0>(a)"), "does not name sums of the wgmma at unit.cu:.*, which is complete"),
        (changed("group<0>(sums, a)", "group<0>(sums)"), "does not name fragments of A of the wgmma at unit.cu"),
        # operands
        (dropped("proxy"), "operand B: shared byte .* has been written by a thread, and no fence_proxy_async"),
        (dropped("meet"), "operand B: shared byte .* has been written|of operand B, was overwritten before"),
        (before("wait", "words[3] += 1;"), "shared byte 12, of operand B, was overwritten before the wgmma_wait_group at unit.cu"),
        (before("wait", "cp_async_16(s + 2048, w, true);"), "cp_async: the wgmma at unit.cu:.* may still read shared bytes 2048 to 2064"),
        # all threads, alike
        (before("fence", "if (t < 96)"), "has written|no wgmma_fence.. names"),
        (changed("/* multiply */", "if (t != 5)"), "warp divergence: .*|has different|stuck[^$]*wgmma_wait_group"),
        (changed("b + k * 32, ", "b + (t < 32 ? k : 0) * 32, "), "threads .* of one warpgroup have different descriptors of B"),
        (changed("k > 0)", "k > 0 || t < 32)"), "threads .* of one warpgroup disagree whether to add"),
        # descriptors
        (changed("matrix_descriptor(s, ", "matrix_descriptor(s + 128, "), "B begins at shared byte 128, in row 1 of a pattern of its 128-byte"),
        (changed("matrix_descriptor(s, ", "matrix_descriptor(s + 8, "), "matrix_descriptor: shared byte 8 is misaligned"),
        (changed("matrix_descriptor(s, ", "matrix_descriptor(s + 112, "), "and 32 bytes from there leave the row of 128"),
        (changed("1024, 128)", "512, 128)"), "B has a stride of 512 bytes, no multiple of the 1024 of a pattern"),
        (changed("1024, 128)", "1024, 48)"), "swizzle 48 is none of 0, 32, 64 and 128"),
        (changed("1024, 128)", "1000, 128)"), "stride 1000 is no multiple of 16"),
        (changed("(s, 0, 1024, 128)", "(s, 8, 1024, 0)"), "leading 8 is no multiple of 16"),
        (changed("(s, 0, 1024, 128)", "(s + 63488, 0, 1024, 128)"), "row 17 of B takes shared bytes .* of 65600"),
        (changed("b + k * 32", "MatrixDescriptor{b.bits | 1ull << 49}"), "has bits that it must not have"),
    ],
)  # fmt: skip
def test_rules(edit, message):
    with pytest.raises(EmulatorError, match=message):
        multiply(edit=edit)


def test_sums_in_flight_keep_their_shape():
    edit = before("commit", "wgmma_f16(reinterpret_cast<float (&)[16]>(sums), a[0], b, true);")
    with pytest.raises(
        EmulatorError, match="its sums are sums of the wgmma at unit.cu:.*, which is under way and has another shape"
    ):
        multiply(edit=edit)


def test_a_warpgroup_is_whole():
    body = "float sums[32] = {}; wgmma_fence(sums); wgmma_f16(sums, matrix_descriptor(s, 0, 1024, 128), {0}, true);"
    with pytest.raises(EmulatorError, match="wgmma: thread .* is in none of four whole neighbouring warps"):
        play(body, np.zeros(4, np.int32), np.zeros(4, np.int32), np.zeros(4, np.float32), block=96)


def test_a_number_of_columns_that_is_not_wrapped_is_refused():
    with pytest.raises(EmulatorBuildError, match="32, 64, 96, 128, 192 or 256 columns"):
        play(
            "float sums[40] = {}; wgmma_f16(sums, MatrixDescriptor{}, MatrixDescriptor{}, true);",
            *[np.zeros(4, np.float32)] * 3,
        )


#: One thread brings stages of B; two warpgroups multiply them by their own A, one block of 64 elements behind, into two
#: partial sums in turn, which they add up themselves. One arrival of each frees a stage.
PIPELINE = """
Mbarrier* empty = full + 3;
if (t == 0) {
    for (int k = 0; k < 3; ++k) {
        mbarrier_init(full + k, 1);
        mbarrier_init(empty + k, 2);
    }
    fence_mbarrier_init();
}
__syncthreads();
if (t >= 256) {
    set_registers_down<24>();
    for (int k = 0; k < n && t == 256; ++k) {
        const int stage = k % 3;
        /* wait empty */ mbarrier_wait_parity(empty + stage, (k / 3 & 1) ^ 1);
        mbarrier_arrive_expect_tx(full + stage, 4096);
        /* copy */ cp_async_bulk_shared_global(s + stage * 4096, w + k * 1024, 4096, full + stage);
    }
} else {
    set_registers_up<240>();
    const int group = t / 128, thread = t % 128;
    float partial[2][16], total[16] = {};
    unsigned a[2][4][4];
    for (int k = 0; k <= n; ++k) {
        const int now = k % 2, stage = k % 3, last = (k + 2) % 3;
        if (k < n) {
            for (int i = 0; i < 16; ++i)
                a[now][i / 4][i % 4] = x[(((group * n + k) * 4 + i / 4) * 128 + thread) * 4 + i % 4];
            /* wait full */ mbarrier_wait_parity(full + stage, k / 3 & 1);
            const MatrixDescriptor b = matrix_descriptor(s + stage * 4096, 0, 1024, 128);
            /* fence */ wgmma_fence(partial[now], a[now]);
            for (int i = 0; i < 4; ++i) wgmma_f16(partial[now], a[now][i], b + 32 * i, i > 0);
            /* commit */ wgmma_commit_group();
            /* early */
            if (k == 0) continue;
            /* wait */ wgmma_wait_group<1>(partial[now ^ 1], a[now ^ 1]);
        } else {
            /* wait for all */ wgmma_wait_group<0>(partial[now ^ 1], a[now ^ 1]);
        }
        for (int i = 0; i < 16; ++i) total[i] += partial[now ^ 1][i];
        /* say empty */ if (thread == 0) mbarrier_arrive(empty + last);
    }
    for (int i = 0; i < 16; ++i) y[t * 16 + i] = total[i];
}
"""
STEPS = 8


def run_pipeline(body):
    k = 64 * STEPS
    (a, a_values), (b, b_values) = operand(128, k), operand(32, k, seed=1)
    stages = np.concatenate([laid_out(b[:, i : i + 64], 128)[0] for i in range(0, k, 64)])
    given = np.concatenate([fragments(a[:64]), fragments(a[64:])])
    y = play(body, given, stages, np.zeros(128 * 32, np.float32), n=STEPS, block=384).reshape(2, -1)
    return np.concatenate([gathered(y[0], 32), gathered(y[1], 32)]), a_values @ b_values.T


def test_a_pipeline_of_copies_and_products():
    y, expected = run_pipeline(PIPELINE)
    assert np.linalg.norm(y - expected) < 3e-7 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        # the stage is free when its products have been issued, not made
        (
            lambda body: before("early", "if (thread == 0) mbarrier_arrive(empty + stage);")(without(body, "say empty")),
            "cp_async_bulk_shared_global: the wgmma at unit.cu:.* may still read shared bytes .*: nobody has waited",
        ),
        (changed("empty + last", "empty + stage"), "may still read|under way|arrives in phase|stuck"),
        (dropped("wait full"), "operand B: shared bytes .* are under way|may still read shared bytes"),
        (changed("(full + stage, k / 3 & 1)", "(full + stage, 0)"), "operand B: .* under way|stuck|completes before"),
        (changed("group<1>(partial[now ^ 1], a[now ^ 1])", "group<2>()"), TOO_EARLY),
        (changed("group<1>(partial[now ^ 1], a[now ^ 1])", "group<1>(partial, a[now ^ 1])"), "names sums of the wgmma .* still under way"),
        (changed("group<0>(partial[now ^ 1], a[now ^ 1])", "group<1>()"), TOO_EARLY),
        (changed("now = k % 2", "now = 0"), TOO_EARLY),
        (changed("a[2][4][4]", "a[1][4][4]"), "overflow|out of bounds"),
        # with one set of fragments, the next is loaded while the last is still read
        (lambda body: body.replace("a[now]", "a[0]").replace("a[now ^ 1]", "a[0]"), TOO_EARLY),
        (dropped("commit"), "does not name|names sums|under way|" + TOO_EARLY),
        (changed("up<240>", "up<248>"), "set_registers_up<248>.*: the block asks for 520 registers .* 504"),
    ],
)  # fmt: skip
def test_a_broken_pipeline_is_reported(edit, message):
    with pytest.raises(EmulatorError, match=message):
        run_pipeline(edit(PIPELINE))


def test_the_compiler_takes_the_same_texts(nvrtc):
    for n, swizzle, kind in (
        (32, 64, "bf16"),
        (64, 0, "f16"),
        (96, 32, "bf16"),
        (128, 128, "f16"),
        (192, 128, "bf16"),
        (256, 128, "f16"),
    ):
        for body in (REGISTERS, SHARED_A):
            made = compile_source(
                unit(filled(STAGE + body, n, swizzle, swizzle // 2 or 32, kind).replace("384", "128")),
                "probe",
                "sm_90a",
            )
            assert made.registers > n // 2 or made.spill_bytes, (n, made)
    assert compile_source(unit(PIPELINE), "probe", "sm_90a").spill_bytes == 0
    for arch in ("sm_80", "sm_100a", "sm_120"):
        with pytest.raises(CompileError, match="wgmma_fence"):
            compile_source(unit(PIPELINE), "probe", arch)
