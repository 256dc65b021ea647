"""Mbarriers on the emulator: a ring of stages that bulk copies fill, and each way to break it."""

from __future__ import annotations

import numpy as np
import pytest

from leanconv.runtime.compile import compile_source
from tests.emulator import EmulatorError, run_source
from tests.emulator.test_emulator_barriers import swapped, without
from tests.emulator.test_emulator_bulk import ARGUMENTS, MAKE, SHARED, play, unit, words

#: One thread fills three stages that two warps read, steps ahead; rounds alternate the parity of both barriers.
RING = """
Mbarrier* empty = full + 3;
if (t == 0) {
    for (int k = 0; k < 3; ++k) {
        /* init full */ mbarrier_init(full + k, 1);
        /* init empty */ mbarrier_init(empty + k, 64);
    }
    /* fence */ fence_mbarrier_init();
}
/* meet */ __syncthreads();
if (t / 32 == at[0]) {
    for (int k = 0; k < n && t % 32 == 0; ++k) {
        const int stage = k % 3, parity = k / 3 & 1;
        /* wait empty */ mbarrier_wait_parity(empty + stage, parity ^ 1);
        /* expect */ mbarrier_arrive_expect_tx(full + stage, 512);
        /* copy */ cp_async_bulk_shared_global(s + stage * 128, x + k * 128, 512, full + stage);
    }
} else {
    int sum = 0;
    for (int k = 0; k < n; ++k) {
        const int stage = k % 3, parity = k / 3 & 1;
        /* wait full */ mbarrier_wait_parity(full + stage, parity);
        /* read */ sum = 3 * sum + s[stage * 128 + 127 - t];
        /* say empty */ mbarrier_arrive(empty + stage);
    }
    y[b * 96 + t] = sum;
}
"""
STEPS = 11


@pytest.fixture(params=[0, 1, 2], ids=["first warp", "middle warp", "last warp"])
def producer(request):
    return request.param


def run_ring(body, producer, grid=2):
    x = words(128 * STEPS)
    y = np.zeros(96 * grid, np.int32)
    return x, play(body, x, y, at=(producer,), block=96, grid=grid, n=STEPS)


def check_ring(body, producer):
    x, y = run_ring(body, producer)
    read = x.reshape(STEPS, 128)[:, ::-1][:, :96]
    sums = sum(3 ** (STEPS - 1 - k) * read[k].astype(np.int64) for k in range(STEPS)).astype(np.int32)
    expected = np.where(np.arange(96) // 32 == producer, 0, sums)
    np.testing.assert_array_equal(y.reshape(2, 96), np.broadcast_to(expected, (2, 96)))


#: The same with one arrival of each warp and the producer's bytes expected apart from its arrival.
APART = (
    RING.replace("mbarrier_init(empty + k, 64)", "mbarrier_init(empty + k, 2)")
    .replace("/* say empty */ ", "/* gather */ __syncwarp();\n/* say empty */ if (t % 32 == 0) ")
    .replace("mbarrier_arrive_expect_tx(full + stage, 512);", "mbarrier_expect_tx(full + stage, 512);")
    .replace("512, full + stage);", "512, full + stage);\n/* arrive */ mbarrier_arrive(full + stage);")
)
#: The same with loops of the kernel's own around each way to look.
LOOKS = RING.replace(
    "mbarrier_wait_parity(full + stage, parity)", "while (!mbarrier_test_wait_parity(full + stage, parity)) {}"
).replace(
    "mbarrier_wait_parity(empty + stage, parity ^ 1)", "while (!mbarrier_try_wait_parity(empty + stage, parity ^ 1)) {}"
)


@pytest.mark.parametrize("body", [RING, APART, LOOKS, RING.replace("fence_mbarrier_init", "fence_proxy_async")])
def test_a_ring_of_stages(body, producer):
    check_ring(body, producer)


#: Lanes copy, and their copies arrive.
LANES = (
    RING.replace("mbarrier_init(full + k, 1)", "mbarrier_init(full + k, 32)")
    .replace("k < n && t % 32 == 0", "k < n")
    .replace("/* expect */ mbarrier_arrive_expect_tx(full + stage, 512);\n", "")
    .replace(
        "/* copy */ cp_async_bulk_shared_global(s + stage * 128, x + k * 128, 512, full + stage);",
        "/* copy */ cp_async_16(s + stage * 128 + t % 32 * 4, x + k * 128 + t % 32 * 4, true);\n"
        "/* arrive */ cp_async_mbarrier_arrive(full + stage);",
    )
)


def test_copies_of_lanes_arrive_when_they_have_landed(producer):
    check_ring(LANES, producer)
    # a wait for all copies lands them too, and changes nothing of their arrivals
    waits = LANES.replace("} else {", "cp_async_wait_group<0>();\n} else {")
    assert waits != LANES
    check_ring(waits, producer)
    early = LANES.replace("cp_async_mbarrier_arrive(full + stage)", "mbarrier_arrive(full + stage)")
    said = "a race|arrives? in phase|is stuck|completes before thread|nobody has waited for the copies"
    for broken in (early, without(LANES, "wait full"), without(LANES, "wait empty"), swapped(LANES, "copy", "arrive")):
        with pytest.raises(EmulatorError, match=said):
            run_ring(broken, producer)
    with pytest.raises(EmulatorError, match="is stuck[^$]*phase 0, 0 of 32 arrivals"):
        run_ring(without(LANES, "arrive"), producer)


UNDER_WAY = "use-after-poison[^$]*of shared memory of block[^$]*it is under way: no wait has seen the 512 bytes land"
STUCK = "the block is stuck[^$]*waits in mbarrier_wait_parity.byte 16[34][0-9]*, [01]. at unit.cu:[^$]*"
#: A reader before its copy has landed; where it comes before the copy's issue, the barriers get out of step.
EARLY = f"{UNDER_WAY}|{STUCK}"
#: Threads that have not seen one phase when the next one is complete, in one order or another.
OVERTAKEN = f"under way|completes before thread|{STUCK}"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (without(RING, "wait full"), EARLY),
        (RING.replace("(full + stage, parity)", "(full + stage, parity ^ 1)"), EARLY),
        (RING.replace("(full + stage, parity)", "(full + stage, 0)"), UNDER_WAY),
        (swapped(RING, "wait full", "read"), UNDER_WAY),
        # one warp of the two, one lane of a warp
        (RING.replace("/* wait full */", "if (t < 32 || (t < 64 && at[0] == 0))"), EARLY),
        (RING.replace("/* wait full */", "if (t % 32 != 17)"), EARLY),
        (LOOKS.replace("while (!mbarrier_test_wait", "if (!mbarrier_test_wait"), UNDER_WAY),
        # the stage is free before it has been read: the next copy is under way
        (swapped(RING, "read", "say empty"), UNDER_WAY),
        (swapped(without(APART, "gather"), "read", "say empty"), OVERTAKEN),
        (without(APART, "gather"), OVERTAKEN),
        (without(RING, "wait empty"), "arrives in phase .*, which has all its 1 arrivals and still expects"),
        (without(APART, "wait empty"), "are under way: no wait has seen the copy at unit.cu:.* land|arrives in phase"),
        (RING.replace("parity ^ 1)", "parity)"), STUCK + "phase 0, 0 of 64 arrivals"),
        (RING.replace("parity ^ 1)", "1)"), f"arrives in phase|are under way|{STUCK}"),
        (without(RING, "say empty"), STUCK + "phase 0, 0 of 64 arrivals, 0 bytes expected"),
        (without(RING, "copy"), STUCK + "phase 0, 1 of 1 arrivals, 512 bytes expected and not landed"),
        (RING.replace("empty + k, 64", "empty + k, 65"), STUCK + "phase 0, 64 of 65 arrivals"),
        (RING.replace("empty + k, 64", "empty + k, 63"), OVERTAKEN),
        (RING.replace("full + k, 1", "full + k, 2"), STUCK + "phase 0, 1 of 2 arrivals"),
        # bytes that are expected: none, too few, too many
        (
            RING.replace("mbarrier_arrive_expect_tx(full + stage, 512)", "mbarrier_arrive(full + stage)"),
            f"{UNDER_WAY}|completes while 512 bytes are under way that it was not told to expect",
        ),
        (without(APART, "expect"), "completes while 512 bytes are under way|512 bytes more have landed in phase 0"),
        (RING.replace("stage, 512)", "stage, 496)"), "16 bytes more have landed in phase 0 than were expected"),
        (RING.replace("stage, 512)", "stage, 528)"), STUCK + "16 bytes expected and not landed"),
        (RING.replace("128, 512, full", "128, 528, full"), "16 bytes more have landed|are under way: no wait has seen"),
        # barriers that are not there, or not known
        (
            without(RING, "fence"),
            "copies do not know of the mbarrier at shared byte 16384: thread 0 has made it at unit",
        ),
        (RING.replace("/* fence */", "} if (t == 1) {"), "copies do not know of the mbarrier at shared byte 16384"),
        (without(RING, "init full"), "no mbarrier has been initialised at shared byte 16384"),
        (without(RING, "init empty"), "no mbarrier has been initialised at shared byte 16408"),
        (without(RING, "meet"), "no mbarrier has been initialised at shared byte"),
        (
            RING.replace("full + k, 1);", "full, 1);"),
            "there is an mbarrier at shared byte 16384 already, initialised at",
        ),
        # a consumer that changes its stage: the next copy may come before what it wrote
        (
            RING.replace("/* say empty */", "s[stage * 128 + 127 - t] = 0;"),
            "has been written by a thread, and no fence",
        ),
    ],
)
def test_a_broken_ring_is_reported(body, message, producer):
    with pytest.raises(EmulatorError, match=message):
        run_ring(body, producer)


#: Two warps read in turn. Where the copy of a stage that the other one reads is late, the parity of the next one passes
#: before that has begun: so they wait until that stage is free.
TURNS = RING.replace("mbarrier_init(empty + k, 64)", "mbarrier_init(empty + k, 32)").replace(
    "/* wait full */",
    "if (k % 2 != t / 32 - (t / 32 > at[0])) continue;\n"
    "/* wait free */ mbarrier_wait_parity(empty + stage, parity ^ 1);\n/* wait full */",
)


def test_copies_land_in_another_order_than_they_began_in(producer):
    x, y = run_ring(TURNS, producer)
    read = x.reshape(STEPS, 128)[:, ::-1][:, :96].astype(np.int64)
    turn = np.arange(96) // 32
    turn -= turn > producer
    mine = [k % 2 == turn for k in range(STEPS)]
    sums = np.zeros(96, np.int64)
    for k in range(STEPS):
        sums = np.where(mine[k], 3 * sums + read[k], sums)
    expected = np.where(np.arange(96) // 32 == producer, 0, sums.astype(np.int32))
    np.testing.assert_array_equal(y.reshape(2, 96), np.broadcast_to(expected, (2, 96)))
    with pytest.raises(EmulatorError, match=UNDER_WAY + "|arrives in phase"):
        run_ring(without(TURNS, "wait free"), producer, grid=8)


def test_a_changed_stage_is_free_behind_a_fence(producer):
    check_ring(RING.replace("/* say empty */", "s[stage * 128 + 127 - t] = 0; fence_proxy_async();"), producer)


def test_the_report_names_who_waits_where():
    with pytest.raises(EmulatorError) as report:
        run_ring(without(RING, "copy"), 1)
    text = str(report.value)
    for line in (
        "from thread 0: waits in mbarrier_wait_parity(byte 16384, 0) at unit.cu:",
        "from thread 32: waits in mbarrier_wait_parity(byte 16408, 0) at unit.cu:",
        "from thread 33: has left the kernel",
        "mbarrier at byte 16384 of block 0, made at unit.cu:",
    ):
        assert line in text


# Single rules

WAITED = (
    f"{MAKE}if (t == 0) {{\nmbarrier_arrive_expect_tx(full, 256);\n"
    "/* copy */ cp_async_bulk_shared_global(s, x, 256, full);\n}\n"
    "/* wait */ mbarrier_wait_parity(full, 0);\ny[t] = s[t];\n"
)
NOT_WAITED = without(WAITED, "wait")


def test_one_thread_may_wait_for_all_that_it_then_meets():
    body = WAITED.replace("/* wait */", "if (t == 9)").replace("y[t] =", "__syncthreads(); y[t] =")
    np.testing.assert_array_equal(play(body, words(64), np.zeros(64, np.int32)), words(64))
    with pytest.raises(EmulatorError, match="no wait has seen the 256 bytes land that thread 0 copies at unit.cu"):
        play(body.replace("__syncthreads(); y[t] =", "y[t] ="), words(64), np.zeros(64, np.int32))


def test_a_barrier_counts_threads_without_copies():
    """Halves of a block take turns: each waits for what the other has written in the phase before."""
    body = (
        "if (t < 2) mbarrier_init(full + t, 32);\n__syncthreads();\nconst int half = t / 32;\n"
        "for (int k = 0; k < 5; ++k) {\nif (half) mbarrier_wait_parity(full, k & 1); else if (k) "
        "mbarrier_wait_parity(full + 1, ~k & 1);\n"
        "s[t] = k == 0 && !half ? x[t] : 2 * s[t ^ 63];\nmbarrier_arrive(full + half);\n}\ny[t] = s[t];"
    )
    y = play(body, words(64), np.zeros(64, np.int32))
    np.testing.assert_array_equal(y[:32], words(32) * 2**8)
    np.testing.assert_array_equal(y[32:], words(32)[::-1] * 2**9)
    for broken in (body.replace("full, k & 1", "full, 0"), body.replace("full + 1, ~k & 1", "full + 1, 1")):
        with pytest.raises(EmulatorError, match=f"a race|completes before thread|{STUCK}|is stuck"):
            play(broken, words(64), np.zeros(64, np.int32))


def test_a_barrier_may_be_made_anew_when_it_has_been_given_up():
    body = WAITED + (
        "__syncthreads();\nif (t == 0) {\nmbarrier_inval(full);\n*reinterpret_cast<long long*>(full) = 5;\n"
        "mbarrier_init(full, 64);\n}\n__syncthreads();\ns[t] = 2 * x[t];\nmbarrier_arrive(full);\n"
        "mbarrier_wait_parity(full, 0);\ny[t] = s[63 - t];"
    )
    np.testing.assert_array_equal(play(body, words(64), np.zeros(64, np.int32)), 2 * words(64)[::-1])


def test_each_block_has_its_own_barriers():
    body = f"{WAITED.replace('y[t]', 'y[b * 64 + t]')}".replace("global(s, x", "global(s, x + b * 64")
    np.testing.assert_array_equal(play(body, words(256), np.zeros(256, np.int32), grid=4), words(256))
    text = unit("if (b % 2) {\n" + body + "}\ncluster_barrier();\nif (b % 2 == 0) {\n" + body + "}\n")
    y = np.zeros(256, np.int32)
    values = {"x": words(256), "y": y, "at": words(1), "n": 0}
    how = {"grid": 4, "block": 64, "cluster": 2, "shared_bytes": SHARED + 64}
    run_source(text, "probe", ARGUMENTS, values, **how)
    np.testing.assert_array_equal(y, words(256))


def test_who_looks_now_and_then_may_do_other_things():
    body = WAITED.replace(
        "mbarrier_wait_parity(full, 0);", "int done = 0;\nwhile (!mbarrier_test_wait_parity(full, 0)) ++done;"
    )
    np.testing.assert_array_equal(play(body, words(64), np.zeros(64, np.int32)), words(64))
    with pytest.raises(EmulatorError, match="is stuck[^$]*looks again and again at unit.cu:"):
        play(without(body, "copy"), words(64), np.zeros(64, np.int32))


BYTES = "reinterpret_cast<Mbarrier*>(reinterpret_cast<char*>(full) + 4)"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"if (t == 0) mbarrier_init({BYTES}, 1);", "mbarrier_init: shared byte 16388 is misaligned, no multiple of 8"),
        ("if (t == 0) mbarrier_init(full + 8, 1);", "mbarrier_init: takes shared bytes 16448 to 16456 of 16448"),
        ("if (t == 0) mbarrier_init(reinterpret_cast<Mbarrier*>(y), 1);", "mbarrier_init: takes shared bytes"),
        ("mbarrier_init(full, 1);", "there is an mbarrier at shared byte 16384 already"),
        ("if (t == 0) mbarrier_init(full, 0);", "count 0 is not among 1 to 1048575"),
        ("if (t == 0) mbarrier_init(full, 1 << 20);", "count 1048576 is not among 1 to 1048575"),
        ("mbarrier_arrive(full);", "mbarrier_arrive: no mbarrier has been initialised at shared byte 16384"),
        ("mbarrier_wait_parity(full, 0);", "mbarrier_wait_parity: no mbarrier has been initialised"),
        ("mbarrier_inval(full);", "mbarrier_inval: no mbarrier has been initialised"),
        (
            MAKE + "if (t == 0) mbarrier_inval(full);\n__syncthreads();\nmbarrier_arrive(full);",
            "no mbarrier has been init",
        ),
        (MAKE + "mbarrier_wait_parity(full, 2);", "parity 2 is none of 0 and 1"),
        (
            MAKE + "if (t < 63) mbarrier_wait_parity(full, 0); else mbarrier_inval(full);",
            "thread .* waits for the mbarrier",
        ),
        (MAKE + "y[t] = *reinterpret_cast<int*>(full);", "it is an mbarrier, made at unit.cu"),
        (MAKE + "s[4096] = 0;", "it is an mbarrier, made at unit.cu"),
        (MAKE + "if (t == 0) mbarrier_expect_tx(full, 1 << 20);", "would expect 1048576 bytes, and can 1048575"),
        (MAKE + "for (int k = 0; k < 3; ++k) mbarrier_expect_tx(full, 16000);", "would expect 1056000 bytes"),
        (
            MAKE + "if (t == 0) mbarrier_expect_tx(full, 16);",
            "the block ends in phase 0 with 16 bytes expected and not",
        ),
        (
            NOT_WAITED.replace("y[t] = s[t];", ""),
            "the block ends, and nobody has waited for these 256 bytes",
        ),
        (NOT_WAITED.replace("y[t] = s[t];", "mbarrier_inval(full);"), "nobody has waited at the mbarrier"),
        (
            NOT_WAITED.replace("y[t] = s[t];", "if (t == 0) mbarrier_init(reinterpret_cast<Mbarrier*>(s), 1);"),
            "the copy at unit.cu:.* brings shared byte 0",
        ),
        (
            NOT_WAITED.replace("= s[t];", "= 0; s[t] = 1;"),
            "use-after-poison[^$]*WRITE[^$]*it is under way",
        ),
    ],
)
def test_rules_of_mbarriers(body, message):
    with pytest.raises(EmulatorError, match=message):
        play(body, words(64), np.zeros(64, np.int32))


def test_the_compiler_takes_the_same_texts(nvrtc):
    for body in (RING, APART, LOOKS):
        for arch in ("sm_90a", "sm_100a", "sm_120") if body is RING else ("sm_90a",):
            assert compile_source(unit(body), "probe", arch).cubin
