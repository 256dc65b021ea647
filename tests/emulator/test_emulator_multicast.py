"""Copies to several blocks of a cluster on the emulator: a ring of stages of which each block brings a part to both,
and arrivals at the other one's mbarriers."""

from __future__ import annotations

import numpy as np
import pytest

from leanconv.runtime.compile import compile_source
from tests.emulator import EmulatorError, run_source
from tests.emulator.test_emulator_barriers import swapped, without
from tests.emulator.test_emulator_bulk import ARGUMENTS, SHARED, unit, words

#: Thread 32 of each block brings half of each stage to both; the first warp reads all of it and tells both when it has.
PAIR = """
Mbarrier* empty = full + 3;
const int own = cluster_rank();
if (t == 0) {
    for (int k = 0; k < 3; ++k) {
        mbarrier_init(full + k, 1);
        mbarrier_init(empty + k, 2);
    }
    fence_mbarrier_init();
}
/* meet */ cluster_barrier();
if (t == 32) {
    for (int k = 0; k < n; ++k) {
        const int stage = k % 3, parity = k / 3 & 1;
        /* wait empty */ mbarrier_wait_parity(empty + stage, parity ^ 1);
        /* expect */ mbarrier_arrive_expect_tx(full + stage, 256);
        int* to = s + stage * 64 + own * 32;
        /* copy */ cp_async_bulk_multicast_shared_global(to, x + k * 64 + own * 32, 128, full + stage, 3);
    }
} else if (t < 32) {
    int sum = 0;
    for (int k = 0; k < n; ++k) {
        const int stage = k % 3, parity = k / 3 & 1;
        /* wait full */ mbarrier_wait_parity(full + stage, parity);
        /* read */ sum = 3 * sum + s[stage * 64 + 63 - t] - s[stage * 64 + t];
        /* gather */ __syncwarp();
        /* say empty */ if (t < 2) mbarrier_arrive_cluster(empty + stage, t);
    }
    y[b * 32 + t] = sum;
}
/* leave */ cluster_barrier();
"""
STEPS = 8


def play(body, grid=4, cluster=2):
    x, y = words(64 * STEPS), np.zeros(32 * grid, np.int32)
    x[:] = x * x % 1009
    values = {"x": x, "y": y, "at": np.zeros(1, np.int32), "n": STEPS}
    how = {"grid": grid, "block": 64, "cluster": cluster, "shared_bytes": SHARED + 64}
    run_source(unit(body), "probe", ARGUMENTS, values, **how)
    return x.reshape(STEPS, 64).astype(np.int64), y.reshape(grid, 32)


def test_each_block_brings_a_half_to_both():
    x, y = play(PAIR)
    expected = sum(3 ** (STEPS - 1 - k) * (x[k, ::-1][:32] - x[k, :32]) for k in range(STEPS))
    np.testing.assert_array_equal(y, np.broadcast_to(expected.astype(np.int32), y.shape))


UNDER_WAY = "under way"
STUCK = "the cluster is stuck"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        # a block tells itself alone, or the other one alone, or one of them twice
        (PAIR.replace("if (t < 2)", "if (t == own)"), STUCK),
        (PAIR.replace("if (t < 2)", "if (t == 1 - own)"), STUCK),
        (PAIR.replace("(empty + stage, t)", "(empty + stage, own)"), f"{UNDER_WAY}|{STUCK}|completes before thread"),
        (without(PAIR, "say empty"), STUCK),
        # the stage is free in one block alone when it is copied to
        (
            PAIR.replace("mbarrier_init(empty + k, 2)", "mbarrier_init(empty + k, 1)"),
            f"{UNDER_WAY}|completes before|{STUCK}",
        ),
        (without(PAIR, "wait empty"), f"{UNDER_WAY}|arrives in phase"),
        (swapped(without(PAIR, "gather"), "read", "say empty"), UNDER_WAY),
        # receivers: one, the wrong one, none, more than there are
        (PAIR.replace("full + stage, 3)", "full + stage, 1)"), STUCK),
        (PAIR.replace("full + stage, 3)", "full + stage, 1 << own)"), STUCK),
        (PAIR.replace("full + stage, 3)", "full + stage, 0)"), "no block receives the copy"),
        (PAIR.replace("full + stage, 3)", "full + stage, 7)"), "rank 2 of a cluster of 2"),
        (PAIR.replace("(empty + stage, t)", "(empty + stage, t + 1)"), f"rank 2 of a cluster of 2|{STUCK}"),
        # each expects its own half, both bring the same one
        (
            PAIR.replace(
                "mbarrier_arrive_expect_tx(full + stage, 256)", "mbarrier_arrive_expect_tx(full + stage, 128)"
            ),
            "not",
        ),
        (
            PAIR.replace("int* to = s + stage * 64 + own * 32", "int* to = s + stage * 64"),
            "are under way: no wait has seen the copy",
        ),
        # the other one's mbarriers are not there yet, or not there any more
        (without(PAIR, "meet"), "no mbarrier has been initialised|copies do not know"),
        (without(PAIR, "leave"), "has left the kernel"),
    ],
)
def test_a_broken_pair_is_reported(body, message):
    with pytest.raises(EmulatorError, match=message):
        play(body)


def test_the_compiler_takes_the_same_text(nvrtc):
    assert compile_source(unit(PAIR), "probe", "sm_90a").cubin
