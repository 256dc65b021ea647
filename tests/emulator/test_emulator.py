"""The emulator itself: it computes what CUDA would, and reports each thing that a GPU would not forgive."""

from __future__ import annotations

import numpy as np
import pytest

from leanconv.plan import Launch, Number, Plan, Pointer
from tests import emulator
from tests.emulator import ORDERS, EmulatorBuildError, EmulatorError, build, cache_dir, run_plan, run_source

X = Pointer("x")
Y = Pointer("y", written=True)
N = Number("int", "n")


def play(body, x, y, *, block=64, grid=1, cluster=1, shared_floats=64, n=0, orders=ORDERS):
    dims = f"__cluster_dims__({cluster}, 1, 1) " if cluster > 1 else ""
    unit = (
        f"{emulator.ALL_PTX}"
        "using namespace leanconv;\n"
        f'extern "C" __global__ void {dims}__launch_bounds__(1024) '
        "probe(const float* __restrict__ x, float* y, int n) {\n"
        "  float* s = reinterpret_cast<float*>(shared_memory());\n"
        "  const int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;\n  (void)s; (void)i; (void)n;\n"
        f"{body}\n}}\n"
    )
    values = {"x": x, "y": y, "n": n}
    how = {"grid": grid, "block": block, "cluster": cluster, "shared_bytes": 4 * shared_floats, "orders": orders}
    run_source(unit, "probe", (X, Y, N), values, **how)
    return y


def floats(count):
    return np.arange(1, count + 1, dtype=np.float32)


def poisoned(count):
    return np.full(count, np.nan, np.float32)


REVERSE = "s[t] = x[i]; __syncthreads(); y[i] = s[63 - t];"


def test_an_array_that_is_given_twice_is_one_memory():
    y = floats(64)
    np.testing.assert_array_equal(play("y[i] = 2 * x[i];", y, y), 2 * floats(64))
    with pytest.raises(EmulatorError, match="a race"):
        play("y[i] = x[i + 1 & 63];", y, y)


def test_barrier_separates_writers_from_readers():
    y = play(REVERSE, floats(128), poisoned(128), grid=2)
    np.testing.assert_array_equal(y.reshape(2, 64), floats(128).reshape(2, 64)[:, ::-1])


@pytest.mark.parametrize("body", [REVERSE.replace("__syncthreads();", ""), REVERSE.replace("syncthreads", "syncwarp")])
def test_missing_barrier_is_a_race(body):
    with pytest.raises(EmulatorError, match="a race"):
        play(body, floats(128), poisoned(128), grid=2)


def test_write_after_read_race_shows():
    # Each round overwrites what a later thread of the round before has not read yet.
    body = "float sum = 0; for (int k = 0; k < 3; ++k) { s[t] = k + x[t]; __syncthreads(); sum += s[t + 33 & 63]; %s }"
    expected = 3 * np.roll(floats(64), -33) + 3
    y = play(body % "__syncthreads();" + " y[t] = sum;", floats(64), poisoned(64))
    np.testing.assert_array_equal(y, expected)
    with pytest.raises(EmulatorError, match="a race"):
        play(body % "" + " y[t] = sum;", floats(64), poisoned(64))


@pytest.mark.parametrize(
    ("call", "source"),
    [
        ("__shfl_sync(~0u, v, 5)", lambda t: 5),
        ("__shfl_sync(~0u, v, t + 1, 8)", lambda t: t // 8 * 8 + (t + 1) % 8),
        ("__shfl_up_sync(~0u, v, 3)", lambda t: t - 3 if t >= 3 else t),
        ("__shfl_down_sync(~0u, v, 3)", lambda t: t + 3 if t + 3 < 32 else t),
        ("__shfl_down_sync(~0u, v, 1, 4)", lambda t: t + 1 if t % 4 < 3 else t),
        ("__shfl_up_sync(~0u, v, 1, 4)", lambda t: t - 1 if t % 4 > 0 else t),
        ("__shfl_xor_sync(~0u, v, 9)", lambda t: t ^ 9),
        (
            "(t & 16) ? __shfl_xor_sync(0xffff0000u, v, 1) : __shfl_xor_sync(0x0000ffffu, v, 2)",
            lambda t: t ^ 1 if t & 16 else t ^ 2,
        ),
    ],
)
def test_shuffles(call, source):
    y = play(f"const float v = x[i]; y[i] = {call};", floats(64), poisoned(64))
    np.testing.assert_array_equal(y, [floats(64)[t // 32 * 32 + source(t % 32)] for t in range(64)])


def test_shuffles_move_doubles_and_integers():
    body = "double d = x[i] + 0.5; long long l = -i;"
    body += "y[i] = float(__shfl_xor_sync(~0u, d, 1) + __shfl_xor_sync(~0u, l, 1));"
    t = np.arange(64)
    np.testing.assert_array_equal(play(body, floats(64), poisoned(64)), floats(64)[t ^ 1] + 0.5 - (t ^ 1))


def test_votes():
    body = (
        "const unsigned active = __activemask(); const unsigned odd = __ballot_sync(~0u, t & 1);"
        "const bool any = __any_sync(~0u, t == 40);"
        "const bool all = __all_sync(~0u, t >= 32);"
        "y[i] = __popc(odd) * 100 + any * 10 + all + 1000 * (odd == 0xaaaaaaaau) + 2000 * (active == ~0u);"
    )
    np.testing.assert_array_equal(play(body, floats(64), poisoned(64)), [4600] * 32 + [4611] * 32)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("if (t < 40) __syncthreads();", "barrier divergence: .* has left the kernel"),
        ("if (t == 3) return; __syncthreads();", "barrier divergence: .* has left the kernel"),
        ("if (t < 32) {\n__syncthreads();\n} else {\n__syncthreads();\n}", "waits in another __syncthreads"),
        ("if (t < 32) __syncthreads();\n__syncwarp(); if (t >= 32) __syncthreads();", "waits in another __syncthreads"),
        ("if (t % 32 < 31) __shfl_xor_sync(~0u, t, 1);", "has left the kernel"),
        ("if (t % 2) __syncthreads(); else __syncwarp();", "the block is stuck"),
        ("if (t % 32 < 16)\n__syncwarp();\nelse\n__syncwarp();", "warp divergence"),
        ("__shfl_xor_sync(t % 2 ? ~0u : 0x55555555u, t, 2);", "warp divergence"),
        ("__syncwarp(1u);", "does not name it"),
        ("if (t % 32 < 16) __shfl_xor_sync(0xffffu, t, 16);", "does not name"),
        ("__shfl_sync(~0u, t, 0, 12);", "no power of two"),
    ],
)
def test_divergence_is_reported(body, message):
    with pytest.raises(EmulatorError, match=message):
        play(body, floats(64), poisoned(64))


def test_mask_must_not_name_lanes_beyond_the_block():
    with pytest.raises(EmulatorError, match="which the block does not have"):
        play("__syncwarp();", floats(1), poisoned(1), block=48)
    y = play("y[t] = __shfl_xor_sync(t < 32 ? ~0u : 0xffffu, x[t], 1);", floats(48), poisoned(48), block=48)
    np.testing.assert_array_equal(y, floats(48)[np.arange(48) ^ 1])


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("y[i] = x[i + 1];", "byte 256 of argument 0, which has 256 bytes"),
        ("y[i] = x[i - 1];", "byte -4 of argument 0"),
        ("y[i + 1] = x[i];", "byte 256 of argument 1"),
        ("y[i] = reinterpret_cast<const float4*>(x)[t / 4 + 1].x;", "byte 25. of argument 0|byte 256 of argument 0"),
        ("y[i] = x[i + 70000];", "of argument 0"),
        ("s[t + 1] = x[i];", "byte 256 of shared memory of block 0"),
        ("s[-1 - t] = x[i];", "byte -.* of shared memory of block 0"),
    ],
)
def test_out_of_bounds_is_reported(body, what):
    with pytest.raises(EmulatorError, match=f"use-after-poison[^$]*{what}[^$]*in block 0 of 1, thread"):
        play(body, floats(64), poisoned(64))


def test_odd_array_sizes_are_fenced_to_the_byte():
    body = "if (t < n) y[t] = x[t];"
    np.testing.assert_array_equal(play(body, floats(7), poisoned(7), n=7), floats(7))
    with pytest.raises(EmulatorError, match="byte 28 of argument 0"):
        play(body, floats(7), poisoned(8), n=8)


def test_misaligned_vector_access_is_reported():
    good = "if (t < 16) { float4 v = reinterpret_cast<const float4*>(x)[t]; reinterpret_cast<float4*>(y)[t] = v; }"
    np.testing.assert_array_equal(play(good, floats(64), poisoned(64)), floats(64))
    for bad in (
        "if (t < 15) { float4 v = *reinterpret_cast<const float4*>(x + 4 * t + 1); y[t] = v.x + v.w; }",
        "if (t < 15) *reinterpret_cast<float4*>(y + 4 * t + 2) = reinterpret_cast<const float4*>(x)[t];",
        "if (t < 15) *reinterpret_cast<float2*>(y + 2 * t + 1) = *reinterpret_cast<const float2*>(x + 2 * t);",
    ):
        with pytest.raises(EmulatorError, match="misaligned address"):
            play(bad, floats(64), poisoned(64))


def test_shared_memory_starts_as_nan_in_every_block():
    y = play("y[i] = s[t]; __syncthreads(); s[t] = x[i];", floats(128), np.zeros(128, np.float32), grid=2)
    assert np.isnan(y).all()


COPY = (
    "cp_async_4(s + t, x + t, true); cp_async_commit_group(); cp_async_4(s + 64 + t, x + 64 + t, t % 2 == 0);"
    "cp_async_commit_group();"
)


def test_cp_async_moves_data_and_fills_zero():
    body = COPY + "cp_async_wait_group<0>(); __syncthreads(); y[t] = s[63 - t]; y[64 + t] = s[127 - t];"
    y = play(body, floats(128), poisoned(128), shared_floats=128)
    expected = floats(128).reshape(2, 64)
    expected[1, 1::2] = 0
    np.testing.assert_array_equal(y.reshape(2, 64), expected[:, ::-1])


def test_cp_async_waits_for_the_oldest_groups():
    body = COPY + "cp_async_wait_group<1>(); __syncthreads(); y[t] = s[63 - t];"
    np.testing.assert_array_equal(play(body, floats(128), poisoned(64), shared_floats=128), floats(64)[::-1])


@pytest.mark.parametrize(
    "body",
    [
        COPY + "__syncthreads(); y[t] = s[63 - t];",
        COPY + "cp_async_wait_group<2>(); __syncthreads(); y[t] = s[63 - t];",
        COPY + "cp_async_wait_group<1>(); __syncthreads(); y[t] = s[127 - t];",
        COPY + "cp_async_wait_group<0>(); y[t] = s[63 - t];",
        "cp_async_4(s + t, x + t, true); cp_async_wait_group<0>(); __syncthreads(); y[t] = s[t];",  # no commit
        # the copy into s may land before the other threads have read it
        "s[t] = x[t]; __syncthreads(); float v = s[63 - t]; cp_async_4(s + t, x + 64 + t, true);"
        "cp_async_commit_group(); y[t] = v; cp_async_wait_group<0>();",
    ],
    ids=[
        "no wait",
        "too few waited for",
        "newest not waited for",
        "no barrier",
        "no commit",
        "overwrites what is read",
    ],
)
def test_cp_async_races_show(body):
    with pytest.raises(EmulatorError, match="a race"):
        play(body, floats(128), poisoned(64), shared_floats=128)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("cp_async_16(s + 4 * t + 1, x + 4 * t, true);", "shared byte .* is misaligned"),
        ("cp_async_16(s + 4 * t, x + 4 * t + 1, true);", "global address .* is misaligned"),
        ("cp_async_16(s + 4 * t + 4, x + 4 * t, true);", "writes shared bytes"),
        ("cp_async_4(s + t, x + 200 + t, true);", "of argument 0"),
    ],
)
def test_cp_async_rules(body, message):
    with pytest.raises(EmulatorError, match=message):
        play(body, floats(256), poisoned(1), shared_floats=256)


def test_cp_async_reads_nothing_when_invalid():
    body = "cp_async_4(s + t, x + 4096 + t, false); cp_async_commit_group(); cp_async_wait_group<0>(); y[t] = s[t];"
    np.testing.assert_array_equal(play(body, floats(64), poisoned(64)), np.zeros(64))


#: Each block sums, in rank order, what its cluster's blocks have left at the mirrored place of their shared memory.
CLUSTER_SUM = (
    "s[t] = x[i];\ncluster_barrier();\nfloat sum = 0;\n"
    "for (unsigned r = 0; r < n; ++r) sum = sum * 2 + cluster_load(s + 63 - t, r);\n"
    "y[i] = sum + 10000 * cluster_rank();\n/* done reading */ cluster_barrier();"
)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_a_cluster_reduces_in_rank_order(size):
    grid = 3 * size
    y = play(CLUSTER_SUM, floats(64 * grid), poisoned(64 * grid), grid=grid, cluster=size, n=size)
    x = floats(64 * grid).reshape(3, size, 64)[:, :, ::-1]
    total = sum(x[:, r] * 2 ** (size - 1 - r) for r in range(size))
    expected = total[:, None] + 10000 * np.arange(size)[None, :, None]
    np.testing.assert_array_equal(y.reshape(3, size, 64), expected)


def test_a_launch_says_how_large_its_clusters_are(tmp_path):
    (tmp_path / "swap.cuh").write_text(
        f"{emulator.ALL_PTX}"
        "namespace leanconv { "
        "template <typename P, typename T> void swap(const float* x, float* y) {"
        " float* s = reinterpret_cast<float*>(shared_memory()); const int t = threadIdx.x, i = blockIdx.x * 64 + t;"
        " s[t] = x[i]; cluster_barrier(); y[i] = cluster_load(s + t, T::blocks - 1 - cluster_rank());"
        " cluster_barrier(); } }"
    )
    tuning = (("blocks", 4),)
    launch = Launch("swap.cuh", "leanconv::swap", (), tuning, (X, Y), grid=8, block=64, shared_bytes=256, cluster=4)
    y = poisoned(512)
    run_plan(Plan((launch,)), {"x": floats(512), "y": y}, kernels=tmp_path)
    np.testing.assert_array_equal(y.reshape(2, 4, 64), floats(512).reshape(2, 4, 64)[:, ::-1])


def test_blocks_of_a_cluster_keep_their_own_barriers_warps_and_shared_memory():
    """Rank 0 meets more barriers than rank 1, which only shuffles; a block may not be a whole number of warps."""
    body = (
        "s[t] = x[i];\nif (cluster_rank() == 0)\nfor (int k = 0; k < 3; ++k) {"
        "__syncthreads(); const float v = s[(t + 1) % 48]; __syncthreads(); s[t] = v; }\n"
        "else s[t] = __shfl_xor_sync(t < 32 ? ~0u : 0xffffu, s[t], 1);\n"
        "cluster_barrier();\ny[i] = cluster_load(s + t, 1 - cluster_rank());\ncluster_barrier();"
    )
    y = play(body, floats(192), poisoned(192), grid=4, block=48, cluster=2, shared_floats=48)
    x = floats(192).reshape(2, 2, 48)
    expected = np.stack([x[:, 1, np.arange(48) ^ 1], np.roll(x[:, 0], -3, axis=-1)], axis=1)
    np.testing.assert_array_equal(y.reshape(2, 2, 48), expected)


def test_cluster_barrier_is_a_block_barrier_too():
    body = REVERSE.replace("__syncthreads", "cluster_barrier")
    for size in (1, 2):
        y = play(body, floats(128), poisoned(128), grid=2, cluster=size)
        np.testing.assert_array_equal(y.reshape(2, 64), floats(128).reshape(2, 64)[:, ::-1])


@pytest.mark.parametrize(
    "body",
    [
        CLUSTER_SUM.replace("cluster_barrier", "__syncthreads", 1),
        # one reads, the other is read
        "s[t] = x[i]; __syncthreads(); if (cluster_rank() == 0) y[t] = cluster_load(s + t, 1);\ncluster_barrier();",
        "s[t] = x[i]; __syncthreads(); if (cluster_rank() == 1) y[t] = cluster_load(s + t, 0);\ncluster_barrier();",
        # what is still being read gets written over
        "s[t] = x[i];\ncluster_barrier();\nif (cluster_rank() == 0) y[t] = cluster_load(s + t, 1); else s[t] = 0;\n"
        "cluster_barrier();",
        "s[t] = x[i];\ncluster_barrier();\nif (cluster_rank() == 1) y[t] = cluster_load(s + t, 0); else s[t] = 0;\n"
        "cluster_barrier();",
        # its own block's copies have landed, but the other block does not know
        "cp_async_4(s + t, x + i, true); cp_async_commit_group();\ncluster_barrier();\ncp_async_wait_group<0>();"
        "y[i] = cluster_load(s + t, 1 - cluster_rank());\ncluster_barrier();",
    ],
    ids=["no barrier", "first reads", "last reads", "last overwrites", "first overwrites", "copy not waited for"],
)
def test_missing_cluster_barrier_is_a_race(body):
    with pytest.raises(EmulatorError, match="a race"):
        play(body, floats(128), poisoned(128), grid=2, cluster=2, n=2)


@pytest.mark.parametrize("reader", ["true", "cluster_rank() == 0", "cluster_rank() == 1"])
def test_a_block_may_not_leave_while_another_reads_from_it(reader):
    body = f"s[t] = x[i];\ncluster_barrier();\nif ({reader}) y[i] = cluster_load(s + t, 1 - cluster_rank());"
    with pytest.raises(EmulatorError, match="cluster_load: block [01], rank [01], has left the kernel"):
        play(body, floats(128), np.zeros(128, np.float32), grid=2, cluster=2)
    y = play(body + "\ncluster_barrier();", floats(128), np.zeros(128, np.float32), grid=2, cluster=2)
    swapped = floats(128).reshape(2, 64)[::-1]
    mask = {"true": [1, 1], "cluster_rank() == 0": [1, 0], "cluster_rank() == 1": [0, 1]}[reader]
    np.testing.assert_array_equal(y.reshape(2, 64), swapped * np.array(mask)[:, None])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("y[i] = cluster_load(s + t, 2);", "cluster_load: rank 2 of a cluster of 2"),
        ("y[i] = cluster_load(s + t, cluster_rank() - 1);", "cluster_load: rank 4294967295 of a cluster of 2"),
        ("y[i] = cluster_load(s + t + 1, 0);", "cluster_load: reads shared bytes 256 to 260 of 256"),
        ("y[i] = cluster_load(s + t - 1, 0);", "cluster_load: reads shared bytes -4 to 0 of 256"),
        ("y[i] = cluster_load(x + t, 0);", "cluster_load: reads shared bytes"),
        (
            "y[i] = cluster_load(reinterpret_cast<float*>(reinterpret_cast<char*>(s) + 2), 0);",
            "cluster_load: shared byte 2 is misaligned",
        ),
        (
            "float four[4]; cluster_load_v4(four, s + 4 * (t / 4) + 2, 0); y[i] = four[0];",
            "cluster_load_v4: shared byte 8 is misaligned",
        ),
        ("s[64 + t] = 0;", "shared memory of block [0123], which has 256 bytes"),
        ("if (t == 3) return;", "barrier divergence: thread .* waits in cluster_barrier, thread 3 of block . has left"),
        (
            "if (cluster_rank() == 1) return;",
            "barrier divergence: thread .* of block [02] waits in cluster_barrier, thread .* of block [13] has left",
        ),
        ("if (t < 32)\ncluster_barrier();\n", "waits in another cluster_barrier"),
        ("if (cluster_rank() == 0)\ncluster_barrier();\n", "waits in another cluster_barrier"),
        (
            "if (t < 32) __syncthreads();",
            "the cluster is stuck[^$]*thread 0 of block 0: waits in __sync[^$]*thread 32 of block 0: waits in cluster",
        ),
        ("if (cluster_rank() == 0 && t % 2) __syncwarp();", "the cluster is stuck[^$]*with mask ffffffff"),
    ],
)
def test_cluster_rules(body, message):
    with pytest.raises(EmulatorError, match=message):
        play(body + "\ncluster_barrier();", floats(256), poisoned(256), grid=4, cluster=2)


def test_a_grid_is_a_whole_number_of_clusters():
    for grid, size in ((3, 2), (32, 32)):
        with pytest.raises(EmulatorError, match=f"a grid of {grid} blocks in clusters of {size}"):
            play("y[i] = 0;", floats(1), poisoned(64 * grid), grid=grid, cluster=size)


def test_undefined_arithmetic_is_reported():
    for body, message in (
        ("y[t] = (n + t) * 65536;", "signed integer overflow"),
        ("y[t] = 1 << (n + t);", "shift exponent"),
        ("float a[4] = {}; for (int k = 0; k <= t; ++k) a[k] = 1; y[t] = a[0];", "stack-buffer-overflow|out of bounds"),
        ("y[t] = n / (t - 5);", "division by zero"),
        ("__builtin_assume(t < 60); y[t] = 0;", "assume of something false"),
    ):
        with pytest.raises(EmulatorError, match=message):
            play(body, floats(64), poisoned(64), n=40000)


def test_stacks_are_clean_for_the_next_block():
    """This frame reaches where the emulator's own last frame of the block before was."""
    body = "volatile char a[32]; volatile int c[2]; for (int k = 0; k < 32; ++k) a[k] = k;"
    y = play(body + "c[t & 1] = a[n % 32]; y[i] = c[t & 1];", floats(1), poisoned(192), grid=3, n=7)
    np.testing.assert_array_equal(y, np.full(192, 7))


def test_scalars_and_null_pointers_arrive():
    arguments = (
        *(Pointer("bias"), Pointer("y", written=True), Number("long long", "a", -(2**40))),
        *(Number("float", "b"), Number("unsigned", "c", 2**32 - 1), Number("bool", "d", 1)),
    )
    unit = (
        'extern "C" __global__ void probe(const float* bias, float* y, long long a, float b, unsigned c, bool d) {'
        " if (threadIdx.x == 0) { y[0] = bias == nullptr; y[1] = a; y[2] = b; y[3] = c; y[4] = d; y[5] = gridDim.x; } }"
    )
    y = poisoned(6)
    run_source(unit, "probe", arguments, {"bias": None, "y": y, "b": 1.5}, grid=1)
    np.testing.assert_array_equal(y, [1, -(2**40), 1.5, 2**32, 1, 1])
    with pytest.raises(KeyError, match="float b"):
        run_source(unit, "probe", arguments, {"bias": None, "y": y})


def test_a_kernel_may_not_write_what_it_takes_as_const():
    with pytest.raises(EmulatorError, match="takes as const"):
        play("const_cast<float*>(x)[t] = 0;", floats(64), poisoned(1))


def test_what_a_kernel_prints_stays_out_of_its_results():
    np.testing.assert_array_equal(play('printf("%d", t); y[t] = t;', floats(1), poisoned(64)), np.arange(64))


def test_build_error_has_log_options_and_source():
    with pytest.raises(EmulatorBuildError, match=r"unit.cu:[^$]*options: [^$]*sanitize[^$]*source:[^$]*oops"):
        play("oops;", floats(1), poisoned(1))
    with pytest.raises(EmulatorBuildError, match="no_static_shared_memory"):
        play("__shared__ float tile[4];", floats(1), poisoned(1))
    with pytest.raises(EmulatorBuildError, match="undefined symbol: .*nowhere"):
        play("void nowhere(); if (n > 0) nowhere();", floats(1), poisoned(1))


def test_programs_are_kept_and_a_half_built_one_never_appears(monkeypatch, tmp_path):
    play(REVERSE, floats(64), poisoned(64))
    parts = {part.name: part.read_bytes() for part in cache_dir().glob("*.o")}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache_dir().mkdir()
    for name, part in parts.items():  # of the runtime, which take seconds
        (cache_dir() / name).write_bytes(part)
    play(REVERSE, floats(64), poisoned(64))
    made = {f.name: f.stat().st_ino for f in cache_dir().iterdir()}
    others = sorted(name.split("-")[0] for name in made if name not in parts)
    assert others == ["headers", "headers", "probe", "runtime"]
    play(REVERSE, floats(64), poisoned(64))
    assert {f.name: f.stat().st_ino for f in cache_dir().iterdir()} == made
    with pytest.raises(EmulatorBuildError):
        play("oops;", floats(1), poisoned(1))
    assert {f.name for f in cache_dir().iterdir()} == set(made)


def test_what_a_unit_includes_at_any_depth_builds_it_anew_and_nothing_else_does(tmp_path):
    (tmp_path / "outer.cuh").write_text("#pragma once\n  #include <sub/middle.cuh>\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "middle.cuh").write_text('#pragma once\n#include "inner.cuh"\n')
    unit = '#include <outer.cuh>\nextern "C" __global__ void probe(float* y) { y[threadIdx.x] = value; }\n'
    built = []
    for name, content in (("inner", "1"), ("other", "1"), ("inner", "2"), ("other", "2")):
        (tmp_path / "sub" / f"{name}.cuh").write_text(f"constexpr float value = {content};")
        built.append(build(unit, "probe", (Y,), tmp_path))
    assert built[0] == built[1] != built[2] == built[3]


def test_words_of_four_products():
    """Every pair of bytes, of either sign, and sums that wrap around."""
    unit = (
        "#include <device/ptx/arithmetic.cuh>\n"
        'extern "C" __global__ void dots(const int* a, const int* b, int* y) {\n'
        "  const int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        "  y[2 * i] = leanconv::dp4a_s32_s32(a[i], b[i], i);\n"
        "  y[2 * i + 1] = leanconv::dp4a_u32_s32(static_cast<unsigned>(a[i]), b[i], 2147483647);\n}\n"
    )
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-128, 128, (64, 4)).astype(np.int8) for _ in range(2))
    a[:2], b[:2] = -128, (-128, -128, 127, 127)
    y = np.zeros((64, 2), np.int32)
    arguments = (Pointer("a", "int"), Pointer("b", "int"), Pointer("y", "int", written=True))
    values = {"a": a.view(np.int32).ravel(), "b": b.view(np.int32).ravel(), "y": y}
    run_source(unit, "dots", arguments, values, grid=2, block=32)
    wide = b.astype(np.int64)
    np.testing.assert_array_equal(y[:, 0], (a.astype(np.int64) * wide).sum(1) + np.arange(64))
    unsigned = (a.view(np.uint8).astype(np.int64) * wide).sum(1) + 2147483647
    np.testing.assert_array_equal(y[:, 1], unsigned.astype(np.int32))
