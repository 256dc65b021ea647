"""Named barriers and register pools on the emulator: warps in roles, and each way to miscount at a barrier."""

from __future__ import annotations

import numpy as np
import pytest

from leanconv.runtime.compile import CompileError, compile_source
from tests import emulator
from tests.emulator import EmulatorBuildError, EmulatorError
from tests.emulator.test_emulator import floats, play, poisoned

#: One warp fills two stages that the others read, steps ahead: barriers 1 and 2 say full, 3 and 4 empty.
PIPELINE = """
const int lane = t % 32;
if (t / 32 == producer) {
    for (int k = 0; k < n; ++k) {
        const int stage = k % 2;
        /* wait empty */ if (k >= 2) barrier_sync(3 + stage, 96);
        /* write */ s[stage * 32 + lane] = x[k * 32 + lane];
        /* say full */ barrier_arrive(1 + stage, 96);
    }
} else {
    float sum = 0;
    for (int k = 0; k < n; ++k) {
        const int stage = k % 2;
        /* wait full */ barrier_sync(1 + stage, 96);
        /* read */ sum = 2 * sum + s[stage * 32 + 31 - lane];
        /* say empty */ if (k + 2 < n) barrier_arrive(3 + stage, 96);
    }
    y[i] = sum;
}
"""
STEPS = 7


def swapped(body, first, second):
    """``body`` with two of its marked lines, one right behind the other, in the other order."""
    lines = body.splitlines()
    a, b = (next(i for i, line in enumerate(lines) if f"/* {mark} */" in line) for mark in (first, second))
    assert b == a + 1
    lines[a], lines[b] = lines[b], lines[a]
    return "\n".join(lines)


def without(body, *marks):
    lines = body.splitlines()
    kept = [line for line in lines if not any(f"/* {mark} */" in line for mark in marks)]
    assert len(kept) == len(lines) - len(marks)
    return "\n".join(kept)


def run_pipeline(body, producer):
    """One unit for all producers: the argument has both numbers."""
    x, body = floats(32 * STEPS), f"const int producer = n / 16; n %= 16;\n{body}"
    y = play(body, x, np.zeros(192, np.float32), block=96, grid=2, n=STEPS + 16 * producer)
    return x.reshape(STEPS, 32), y.reshape(2, 3, 32)


@pytest.fixture(params=[0, 1, 2], ids=["first warp", "middle warp", "last warp"])
def producer(request):
    return request.param


def check_pipeline(body, producer):
    x, y = run_pipeline(body, producer)
    expected = np.broadcast_to(sum(2 ** (STEPS - 1 - k) * x[k, ::-1] for k in range(STEPS)), (2, 3, 32)).copy()
    expected[:, producer] = 0
    np.testing.assert_array_equal(y, expected)


def test_a_producer_warp_feeds_the_others(producer):
    check_pipeline(PIPELINE, producer)


@pytest.mark.parametrize(
    "broken",
    [
        swapped(PIPELINE, "write", "say full"),
        swapped(PIPELINE, "wait empty", "write"),
        swapped(PIPELINE, "read", "say empty"),
        swapped(PIPELINE, "wait full", "read"),
        # in step by the other side's barriers alone: enough for two stages, not for one
        without(
            PIPELINE.replace("barrier_arrive(1", "barrier_sync(1").replace("k % 2", "0"), "wait empty", "say empty"
        ),
        without(PIPELINE.replace("barrier_arrive(3", "barrier_sync(3"), "wait full", "say full"),
    ],
    ids=["full before written", "written before empty", "empty before read", "read before full", "no empty", "no full"],
)
def test_a_barrier_in_the_wrong_place_is_a_race(broken, producer):
    with pytest.raises(EmulatorError, match="a race"):
        run_pipeline(broken, producer)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        # who does not wait comes round before the others have been there
        ("wait empty", "barrier [1-4]: thread .* arrives a second time, when (32|64) of 96 threads"),
        ("wait full", "barrier [1-4]: thread .* arrives a second time, when (32|64) of 96 threads"),
        ("say empty", "is stuck[^$]*waits in barrier_sync.3, 96. at unit.cu[^$]*at barrier 3 of block 0: 32 of 96"),
        ("say full", "is stuck[^$]*waits in barrier_sync.1, 96. at unit.cu[^$]*at barrier 1 of block 0: 64 of 96"),
    ],
)
def test_a_missing_half_of_a_barrier_is_reported(missing, message, producer):
    with pytest.raises(EmulatorError, match=message):
        run_pipeline(without(PIPELINE, missing), producer)


#: The same, but the producer's copies are under way for one step before it says that they are there.
COPIES = (
    PIPELINE.replace("s[stage * 32 + lane] = x[k * 32 + lane];", "COPY")
    .replace("/* say full */", "if (k == 0) continue;\nWAIT<1>();")
    .replace("barrier_arrive(1 + stage", "barrier_arrive(2 - stage")
    .replace("} else {", "/* the last */ WAIT<0>(); barrier_arrive(1 + (n - 1) % 2, 96);\n} else {")
    .replace("COPY", "cp_async_4(s + stage * 32 + lane, x + k * 32 + lane, true); cp_async_commit_group();")
)


def test_copies_that_their_own_thread_has_waited_for_are_seen_behind_a_named_barrier(producer):
    check_pipeline(COPIES.replace("WAIT", "cp_async_wait_group"), producer)
    for broken in (
        COPIES.replace("WAIT<1>();", ""),
        COPIES.replace("WAIT<1>", "WAIT<2>"),
        COPIES.replace("WAIT<0>();", ""),
    ):
        with pytest.raises(EmulatorError, match="a race"):
            run_pipeline(broken.replace("WAIT", "cp_async_wait_group"), producer)


@pytest.mark.parametrize(("apart", "ahead", "behind"), [(0, "ascending", "descending"), (2, "descending", "ascending")])
def test_a_warp_is_as_far_ahead_and_as_far_behind_as_its_own_barriers_permit(apart, ahead, behind):
    """Two warps meet time and again; the third one meets nobody and looks at where they are."""
    body = (
        f"if (t / 32 == {apart}) {{ y[t % 32] = s[t % 32]; return; }}\n"
        "for (int k = 0; k < 5; ++k) { s[t % 32] = k; barrier_sync(5, 64); }"
    )
    for order, seen in ((ahead, np.nan), (behind, 4)):
        y = play(body, floats(1), np.zeros(32, np.float32), block=96, orders=(order,))
        np.testing.assert_array_equal(y, np.full(32, seen, np.float32))


def test_the_rest_of_a_block_meets_when_producers_have_left():
    body = (
        "s[t] = x[i];\n__syncthreads();\nif (t < 32) return;\n"
        "const float v = s[127 - t];\nbarrier_sync(NUMBER, 96);\nif (t < 96) s[t] = v;\n"
        "barrier_sync(NUMBER, 96);\ny[i] = t < 96 ? s[127 - t] : v;"
    )
    how = {"block": 128, "shared_floats": 128}
    t = np.arange(128)
    mirror = np.where((t >= 32) & (t < 96), t, 127 - t)
    for number in (0, 15):
        y = play(body.replace("NUMBER", str(number)), floats(256), np.zeros(256, np.float32), grid=2, **how)
        expected = floats(256).reshape(2, 128)[:, mirror] * (t >= 32)
        np.testing.assert_array_equal(y.reshape(2, 128), expected)
    with pytest.raises(EmulatorError, match="barrier divergence: .* waits in __syncthreads, .* has left the kernel"):
        play(body.replace("barrier_sync(NUMBER, 96)", "__syncthreads()"), floats(128), poisoned(128), **how)
    with pytest.raises(EmulatorError, match="is stuck[^$]*from thread 32: waits in barrier_sync.0, 128. at"):
        play(body.replace("NUMBER, 96", "0, 128"), floats(128), poisoned(128), **how)


def test_a_part_of_a_warp_at_the_end_of_a_block_counts_whole():
    body = "s[t] = x[t];\nbarrier_sync(1, 64);\ny[t] = s[47 - t];"
    np.testing.assert_array_equal(play(body, floats(48), poisoned(48), block=48), floats(48)[::-1])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("barrier_sync(16, 64);", r"barrier_sync\(16, 64\): number 16 is not among 0 to 15\n  at unit.cu:"),
        ("barrier_arrive(-1, 64);", r"barrier_arrive\(-1, 64\): number -1 is not among 0 to 15"),
        ("barrier_sync(1, 48);", "48 threads are no whole warps"),
        ("barrier_sync(1, 0);", "0 threads are no whole warps"),
        ("barrier_arrive(1, 96);", "96 threads meet in a block of 64"),
        ("barrier_sync(1, t < 32 ? 64 : 32);", r"barrier divergence: .* in barrier_sync\(1, \d\d\), .*\(1, \d\d\) at"),
        ("barrier_sync(1 + t / 32, 64);", r"the block is stuck[^$]*thread 0: [^$]*\(1, 64\)[^$]*32: [^$]*\(2, 64\)"),
        ("if (t == 7) barrier_arrive(1, 32);", r"thread 7 is in barrier_arrive\(1, 32\), thread \d+ has left"),
        ("if (t != 7) barrier_arrive(1, 32);", r"thread \d+ is in barrier_arrive\(1, 32\), thread 7 has left"),
        ("if (t == 7) barrier_sync(1, 32);", "warp divergence: thread 7 is in .*, thread .* has left the kernel"),
        ("if (t % 2)\nbarrier_sync(1, 32);\nelse\nbarrier_sync(1, 32);", "warp divergence: .* at unit.cu"),
        ("if (t % 2) barrier_arrive(1, 32); else barrier_sync(1, 32);", "warp divergence: .* barrier_sync"),
        ("barrier_arrive(1 + t % 2, 32);", "warp divergence: .* barrier_arrive.2, 32"),
        ("if (t % 2) barrier_sync(1, 64); else __syncwarp();", "the block is stuck[^$]*barrier_sync.1, 64"),
        ("if (t < 32) barrier_arrive(1, 64);", "barrier 1: the block ends when 32 of 64 threads have arrived"),
        ("barrier_sync(1, 64); if (t < 32) barrier_arrive(1, 64);", "barrier 1: the block ends when 32 of 64"),
        ("if (t < 32) for (int k = 0; k < 2; ++k) barrier_arrive(1, 64);", "barrier 1: .* arrives a second time"),
        ("if (t < 32) barrier_sync(0, 64); else __syncthreads();", "barrier divergence: .*__syncthreads"),
        ("if (t >= 32) barrier_sync(0, 64); else __syncthreads();", "barrier divergence: .*__syncthreads"),
        (
            "if (t < 32) barrier_sync(1, 64); else __syncthreads();",
            "the block is stuck[^$]*barrier_sync[^$]*__syncthreads",
        ),
    ],
)
def test_named_barrier_rules(body, message):
    with pytest.raises(EmulatorError, match=message):
        play(body, floats(64), poisoned(64))


@pytest.mark.parametrize("call", ["barrier_arrive(1, 32)", "set_registers_up<64>()"])
@pytest.mark.parametrize("lane", [0, 127])
@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_a_lone_lane_is_reported_whether_the_others_leave_before_it_or_after(call, lane, order):
    with pytest.raises(EmulatorError, match=f"warp divergence: thread {lane} is in .*, thread .* has left the kernel"):
        play(f"if (t == {lane}) {call};", floats(1), poisoned(1), block=128, orders=(order,))


def test_barriers_start_anew_in_every_block():
    """Each block's last arrivals complete a barrier, and the next block is played on the same machine."""
    body = "if (t < 32) barrier_arrive(1, 64); else barrier_sync(1, 64);\ny[i] = x[i];"
    np.testing.assert_array_equal(play(body, floats(256), poisoned(256), grid=4), floats(256))
    np.testing.assert_array_equal(play(body, floats(256), poisoned(256), grid=4, cluster=2), floats(256))


REGISTERS = "if (t < 128)\nset_registers_down<24>();\nelse\nset_registers_up<240>();\ny[t] = x[t];"


def test_register_pools_change_no_result():
    np.testing.assert_array_equal(play(REGISTERS, floats(256), poisoned(256), block=256), floats(256))


@pytest.mark.parametrize(
    ("body", "block", "message"),
    [
        (REGISTERS, 96, "set_registers_down<24>.*: thread .* is in none of four whole neighbouring warps"),
        (REGISTERS, 192, "set_registers_up<240>.*: thread .* is in none of four whole neighbouring warps"),
        (REGISTERS.replace("128", "64"), 256, r"warp divergence: .*set_registers_(up<240>|down<24>)\(\) at unit.cu"),
        ("if (t < 64)\nset_registers_up<64>();\nelse\nset_registers_up<72>();", 128, "warp divergence: .*up<(64|72)>"),
        ("if (t < 32)\nset_registers_up<64>();", 128, "warp divergence: .*up<64>.*, thread .* has left the kernel"),
        ("if (t == 127) set_registers_down<64>();", 128, "warp divergence: .*down<64>.*, thread .* has left"),
    ],
)
def test_register_pool_rules(body, block, message):
    with pytest.raises(EmulatorError, match=message):
        play(body, floats(256), poisoned(256), block=block)


@pytest.mark.parametrize("count", [16, 100, 264])
def test_a_count_of_registers_that_the_machine_does_not_have_is_refused(count):
    for way in ("up", "down"):
        with pytest.raises(EmulatorBuildError, match="multiples of 8 from 24 to 256"):
            play(f"set_registers_{way}<{count}>();", floats(1), poisoned(1), block=128)


def unit(body):
    return (
        f"{emulator.ALL_PTX}"
        "using namespace leanconv;\n"
        'extern "C" __global__ void __launch_bounds__(256) probe(const float* x, float* y, int n) {\n'
        "  float* s = reinterpret_cast<float*>(shared_memory());\n"
        f"  const int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;\n{body}\n}}\n"
    )


def test_the_compiler_takes_the_same_text(nvrtc):
    for arch in ("sm_80", "sm_90a", "sm_100a", "sm_120"):
        assert compile_source(unit(PIPELINE.replace("producer", "0")), "probe", arch).cubin
    for arch in ("sm_90a", "sm_100a"):
        assert compile_source(unit(REGISTERS + "(void)s; (void)i; (void)n;"), "probe", arch).cubin
    with pytest.raises(CompileError, match="set_registers_down"):
        compile_source(unit(REGISTERS), "probe", "sm_120")


#: Each half of a block asks whether any of its threads has an odd number.
ANY_ODD = "y[i] = barrier_or(1 + t / 64, 64, x[i] == 1 || x[i] == 3);"


def test_a_barrier_tells_whether_any_thread_says_so():
    x = np.array([0.0, 2.0] * 192, np.float32)
    x[70], x[200] = 1, 3
    y = play(ANY_ODD, x, np.full(384, np.nan, np.float32), block=128, grid=3)
    np.testing.assert_array_equal(y.reshape(6, 64), np.repeat([[0.0], [1], [0], [1], [0], [0]], 64, axis=1))
