"""wgmma on the emulator: each way to use it too early or wrongly, alone and in a pipeline of copies and products."""

from __future__ import annotations

import numpy as np
import pytest

from leanconv.runtime.compile import CompileError, compile_source
from tests.emulator import EmulatorBuildError, EmulatorError
from tests.emulator.test_emulator_barriers import without
from tests.emulator.test_emulator_wgmma import fragments, gathered, laid_out, multiply, operand, play, unit

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
        (
            before("wait", "wgmma_fence(sums);"),
            "wgmma_fence: names sums of the wgmma at unit.cu:.*, which is under way",
        ),
        # the wait: none, of no group, of an older one, of one thread alone
        (dropped("wait"), TOO_EARLY),
        (dropped("commit"), TOO_EARLY + "|names sums of the wgmma at unit.cu:.*, which is still under way"),
        (changed("wgmma_wait_group<0>(sums, a)", "wgmma_wait_group<1>()"), TOO_EARLY),
        (
            lambda body: without(body.replace("i < 32; ++i)", "i < 32; ++i);"), "wait", "read"),
            "wgmma: thread .* leaves the kernel without having waited for it\n  at unit.cu:",
        ),
        (
            changed("group<0>(sums, a)", "group<0>(a)"),
            "does not name sums of the wgmma at unit.cu:.*, which is complete",
        ),
        (changed("group<0>(sums, a)", "group<0>(sums)"), "does not name fragments of A of the wgmma at unit.cu"),
        # operands
        (dropped("proxy"), "operand B: shared byte .* has been written by a thread, and no fence_proxy_async"),
        (dropped("meet"), "operand B: shared byte .* has been written|of operand B, was overwritten before"),
        (
            before("wait", "words[3] += 1;"),
            "shared byte 12, of operand B, was overwritten before the wgmma_wait_group at unit.cu",
        ),
        (
            before("wait", "cp_async_16(s + 2048, w, true);"),
            "cp_async: the wgmma at unit.cu:.* may still read shared bytes 2048 to 2064",
        ),
        # all threads, alike
        (before("fence", "if (t < 96)"), "has written|no wgmma_fence.. names"),
        (changed("/* multiply */", "if (t != 5)"), "warp divergence: .*|has different|stuck[^$]*wgmma_wait_group"),
        (
            changed("b + k * 32, ", "b + (t < 32 ? k : 0) * 32, "),
            "threads .* of one warpgroup have different descriptors of B",
        ),
        (changed("k > 0)", "k > 0 || t < 32)"), "threads .* of one warpgroup disagree whether to add"),
        # descriptors
        (
            changed("matrix_descriptor(s, ", "matrix_descriptor(s + 8, "),
            "matrix_descriptor: shared byte 8 is misaligned",
        ),
        (
            changed("matrix_descriptor(s, ", "matrix_descriptor(s + 112, "),
            "and 32 bytes from there leave the row of 128",
        ),
        (changed("1024, 128)", "1024, 48)"), "swizzle 48 is none of 0, 32, 64 and 128"),
        (changed("1024, 128)", "1000, 128)"), "stride 1000 is no multiple of 16"),
        (changed("(s, 0, 1024, 128)", "(s, 8, 1024, 0)"), "leading 8 is no multiple of 16"),
        (changed("(s, 0, 1024, 128)", "(s + 63488, 0, 1024, 128)"), "wgmma: B takes shared bytes .* of 65600"),
        (changed("b + k * 32", "MatrixDescriptor{b.bits | 1ull << 49}"), "has bits that it must not have"),
    ],
)
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
    body = "float sums[32] = {}; wgmma_fence(sums); wgmma_f16(sums, MatrixDescriptor{0}, MatrixDescriptor{0}, true);"
    with pytest.raises(EmulatorError, match="wgmma: thread .* is in none of four whole neighbouring warps"):
        play(body, np.zeros(4, np.int32), np.zeros(4, np.int32), np.zeros(4, np.float32), block=96)


def test_a_number_of_columns_that_is_not_wrapped_is_refused():
    with pytest.raises(EmulatorBuildError, match="32, 64, 96, 128, 192 or 256 columns"):
        play(
            "float sums[40] = {}; wgmma_f16(sums, MatrixDescriptor{}, MatrixDescriptor{}, true);",
            *[np.zeros(4, np.float32)] * 3,
        )


def test_fragments_that_were_handed_over_stay_so_when_others_come_back():
    """One fence for four blocks, of which the first comes back before the last is multiplied."""

    def edit(body):
        head, tail = body.split("for (int k = 0; k < 4; ++k)\n    /* multiply */")
        rest = tail[tail.index("/* commit */") :]
        steps = "wgmma_f16(sums, a[0], b, false);\nwgmma_commit_group();\n"
        steps += "wgmma_f16(sums, a[1], b + 32, true);\nwgmma_commit_group();\n/* one */ wgmma_wait_group<1>(a[0]);\n"
        steps += "wgmma_f16(sums, a[2], b + 64, true); wgmma_f16(sums, a[3], b + 96, true);\n"
        return head + steps + rest.replace("<0>(sums, a)", "<0>(sums, a[1], a[2], a[3])")

    y, expected = multiply(edit=edit)
    assert np.linalg.norm(y - expected) < 1e-6 * np.linalg.norm(expected)
    with pytest.raises(EmulatorError, match="no wgmma_fence.. names its fragments of A"):
        multiply(edit=lambda body: edit(body).replace("a[2], b + 64", "a[0], b + 64"))
    with pytest.raises(EmulatorError, match="does not name fragments of A of the wgmma at unit.cu"):
        multiply(edit=lambda body: edit(body).replace("<1>(a[0])", "<1>()"))


#: One thread brings stages of B; two warpgroups multiply them by their own A into two partial sums in turn, one under
#: way while the other is added up. One arrival of each frees a stage.
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
    float even[16], odd[16], total[16] = {};
    unsigned first[4][4], second[4][4];
    const auto multiply = [&](int k, float (&sums)[16], unsigned (&a)[4][4]) {
        for (int i = 0; i < 16; ++i)
            /* fragments */ a[i / 4][i % 4] = x[(((group * n + k) * 4 + i / 4) * 128 + thread) * 4 + i % 4];
        const int stage = k % 3;
        /* wait full */ mbarrier_wait_parity(full + stage, k / 3 & 1);
        const MatrixDescriptor b = matrix_descriptor(s + stage * 4096, 0, 1024, 128);
        /* fence */ wgmma_fence(sums, a);
        for (int i = 0; i < 4; ++i) wgmma_f16(sums, a[i], b + 32 * i, i > 0);
        /* commit */ wgmma_commit_group();
        /* early */
    };
    const auto add = [&](int k, float (&sums)[16]) {
        for (int i = 0; i < 16; ++i) total[i] += sums[i];
        /* say empty */ if (thread == 0) mbarrier_arrive(empty + k % 3);
    };
    for (int k = 0; k < n; k += 4) {
        multiply(k, even, first);
        multiply(k + 1, odd, second);
        wgmma_wait_group<1>(even, first);
        add(k, even);
        multiply(k + 2, even, first);
        wgmma_wait_group<1>(odd, second);
        add(k + 1, odd);
        multiply(k + 3, odd, second);
        wgmma_wait_group<1>(even, first);
        add(k + 2, even);
        wgmma_wait_group<0>(odd, second);
        add(k + 3, odd);
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
            lambda body: without(body, "say empty").replace(
                "/* early */", "if (!thread) mbarrier_arrive(empty + stage);"
            ),
            "cp_async_bulk_shared_global: the wgmma at unit.cu:.* may still read shared bytes .*: nobody has waited",
        ),
        (
            changed("empty + k % 3);\n    };", "empty + (k + 1) % 3);\n    };"),
            "may still read|under way|arrives in phase|stuck",
        ),
        (dropped("wait full"), "operand B: shared bytes .* are under way|may still read shared bytes"),
        (changed("(full + stage, k / 3 & 1)", "(full + stage, 0)"), "operand B: .* under way|stuck|completes before"),
        (changed("group<1>(even, first)", "group<2>()"), TOO_EARLY),
        (changed("group<1>(even, first)", "group<1>(even, odd, first)"), "names sums of the wgmma .* still under way"),
        (changed("group<0>(odd, second)", "group<1>()"), TOO_EARLY),
        # one set of sums, or of fragments, for what is under way and what comes next
        (
            changed("multiply(k + 1, odd, second)", "multiply(k + 1, even, second)"),
            "names sums of the wgmma .*, which is under way",
        ),
        (changed("multiply(k + 1, odd, second)", "multiply(k + 1, odd, first)"), TOO_EARLY),
        (dropped("commit"), "does not name|names sums|under way|" + TOO_EARLY),
        (changed("up<240>", "up<248>"), "set_registers_up<248>.*: the block asks for 520 registers .* 504"),
    ],
)
def test_a_broken_pipeline_is_reported(edit, message):
    with pytest.raises(EmulatorError, match=message):
        run_pipeline(edit(PIPELINE))


#: Fragments come through a ring of two stages: loaded, multiplied, and only then is the stage free.
FRAGMENTS = """
Mbarrier* empty = full + 2;
if (t == 0) {
    for (int k = 0; k < 2; ++k) {
        mbarrier_init(full + k, 1);
        mbarrier_init(empty + k, 128);
    }
    fence_mbarrier_init();
}
for (int i = t; i < 256; i += 256) words[8192 + i] = w[i];
fence_proxy_async();
__syncthreads();
if (t >= 128) {
    for (int k = 0; k < n && t == 128; ++k) {
        mbarrier_wait_parity(empty + k % 2, (k / 2 & 1) ^ 1);
        mbarrier_arrive_expect_tx(full + k % 2, 2048);
        /* copy */ cp_async_bulk_shared_global(s + k % 2 * 2048, x + k * 512, 2048, full + k % 2);
    }
} else {
    float sums[16] = {};
    for (int k = 0; k < n; ++k) {
        unsigned a[4];
        mbarrier_wait_parity(full + k % 2, k / 2 & 1);
        /* load */ ld_shared_v4(a, reinterpret_cast<unsigned*>(s) + k % 2 * 512 + t * 4);
        /* early */
        wgmma_fence(sums, a);
        wgmma_f16(sums, a, matrix_descriptor(s + 32768, 128, 256, 0), true);
        /* say empty */ mbarrier_arrive(empty + k % 2);
        wgmma_commit_group();
        wgmma_wait_group<0>(sums, a);
    }
    for (int i = 0; i < 16; ++i) y[t * 16 + i] = sums[i];
}
"""


def run_fragments(body):
    (a, a_values), (b, b_values) = operand(64, 96), operand(32, 16, seed=1)
    y = play(body, fragments(a), laid_out(b, 0)[0], np.zeros(64 * 32, np.float32), n=6, block=256)
    return gathered(y, 32), a_values @ np.tile(b_values, 6).T


def test_a_stage_is_free_when_products_have_used_what_was_loaded():
    y, expected = run_fragments(FRAGMENTS)
    np.testing.assert_allclose(y, expected, rtol=0, atol=3e-5)
    early = before("early", "mbarrier_arrive(empty + k % 2);")(without(FRAGMENTS, "say empty"))
    late = "cp_async_bulk_shared_global: what thread .* loads at unit.cu:.* may not have come: no product has used it"
    with pytest.raises(EmulatorError, match=late + "[^$]*at unit.cu:"):
        run_fragments(early)


def test_the_compiler_takes_the_same_texts_for_one_architecture(nvrtc):
    for body in (PIPELINE, FRAGMENTS):
        made = compile_source(unit(body).replace("bounds__(384)", "bounds__(384, 1)"), "probe", "sm_90a")
        assert made.spill_bytes == made.stack_bytes == 0
        assert not made.advice
    for arch in ("sm_80", "sm_100a", "sm_120"):
        with pytest.raises(CompileError, match="wgmma_fence"):
            compile_source(unit(PIPELINE), "probe", arch)


def test_products_that_wait_for_each_other_are_advised_of(nvrtc):
    body = "float sums[32] = {};\nunsigned a[4] = {1, 2, 3, 4};\nwgmma_fence(sums, a);\n"
    body += "for (int k = 0; k < n; ++k) wgmma_f16(sums, a, MatrixDescriptor{1}, true), sums[3] += 1;\n"
    body += "wgmma_commit_group();\nwgmma_wait_group<0>(sums, a);\ny[t] = sums[3];"
    (advice,) = compile_source(unit(body), "probe", "sm_90a").advice
    assert "wgmma.mma_async instructions are serialized" in advice
