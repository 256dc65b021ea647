// Implicit GEMM on tensor cores for float16 and bfloat16, sums in float32, for sm_90a. NHWC.
//
// y[pixel, k] = sum over taps and channels of x[pixel + tap, c] w[k, tap, c]: a matrix product whose matrix of pixels exists
// only in shared memory. 2 C/g R S flops an output; the tensor cores start 4096 flops a cycle and multiprocessor, 989 TFLOP/s
// at 1.83 GHz, of which power leaves two thirds.
//
// Both operands come from shared memory as tensor copies leave them: pixels by an im2col map, filters by a tiled map straight
// from w, so nothing is prepared and no thread touches an element before the output. A block has one warpgroup of producers,
// of which one thread issues all copies, and `warpgroups` consumers of `blocks` x 64 pixels each; all of them multiply with the
// same filters. Of the pixels and filters of a stage, depth d:
//   copied:     (pixels + filters) · 2 d bytes for 2 · pixels · filters · d flops: at full speed 48 bytes a cycle for
//               128 x 256, 37 for 256 x 192
//   multiplied: a product of 64 pixels x n filters x 16 takes n / 2 cycles and reads (64 + n) · 32 bytes: 80 bytes a cycle for
//               256 filters, 96 for 128, all 128 for 64
// Sums stay in the tensor core over the whole reduction. It rounds toward zero, each step of 16 by less than 2^-23 of the sum:
// under 2^-11, half a unit of float16, as long as a reduction has fewer than 2^16 elements.
// Blocks stay: a block computes tile after tile, and the copies of the next tile overlap the stores of this one. Where there
// are few tiles, a cluster of `split` blocks shares a tile's reduction instead, and each block stores its share of the filters.
//
// On an H200, 3x3, 256 channels and filters, tile 128 x 256: 743 TFLOP/s burst, 661 sustained; the tensor
// cores are busy in 90 % of the cycles.
#pragma once

#include <kernels/hopper_native/narrow_product.cuh>
#include <device/ptx/barrier.cuh>
#include <device/ptx/registers.cuh>
#include <device/ptx/wgmma.cuh>
#include <kernels/hopper_native/tensor_narrow_output.cuh>
#include <kernels/hopper_fp32/tensor_output.cuh>
#include <kernels/hopper_fp32/tensor_pixels.cuh>

namespace leanconv {

// The tuning as tiles and copies of tensor_gemm know it: `warpgroups` are sixty-fours of pixels.
template <class Tuning>
struct TileTuning : Tuning {
    static constexpr int warpgroups = Tuning::warpgroups * Tuning::blocks, chunk = Tuning::filters, chunks = 1;
    static constexpr int products = 1;
    static constexpr bool rows = true, flat = false;
};
template <class Problem, class Tuning> using NarrowTiles = TensorTiles<Problem, TileTuning<Tuning>>;

// Shared memory: a ring of stages, each `pieces` times the pixels and the filters of `piece` channels of one tap; what the
// warps of consumers turn their outputs around in; and the barriers.
template <class Problem, class Tuning>
struct NarrowRing {
    static constexpr int item = sizeof(typename Problem::element);
    static constexpr int stored = Tuning::filters / Tuning::split;  // filters that a block stores
    using Output = typename Select<item == 2, NarrowOutput<Problem, stored>, PairOutput<Problem, stored>>::type;
    static constexpr int pixels = NarrowTiles<Problem, Tuning>::pixels, row_bytes = Tuning::piece * item;
    static constexpr int pixel_bytes = pixels * row_bytes, filter_bytes = Tuning::filters * row_bytes;
    static constexpr int stage_bytes = Tuning::pieces * (pixel_bytes + filter_bytes);
    static_assert(row_bytes == 128 || row_bytes == 64 || row_bytes == 32, "a row is as long as a swizzle's span");
    static_assert(pixel_bytes % 1024 == 0 && filter_bytes % 1024 == 0, "operands begin where swizzle patterns do");
    static constexpr int of_tap = ceil_div(Problem::group_c, Tuning::piece), all = Problem::r * Problem::s * of_tap;
    static_assert(all % Tuning::pieces == 0, "a reduction has whole stages");
    static_assert(Problem::groups == 1 || Problem::group_c % Tuning::piece == 0, "a row has channels of one group");
    // Stages of one block: all of them, or its share where the blocks of a cluster split them.
    static constexpr int stages = all / Tuning::pieces, share = ceil_div(stages, Tuning::split);
    static_assert(share * (Tuning::split - 1) < stages, "each block of a cluster has stages");
    static constexpr int outputs_at = Tuning::stages * stage_bytes;
    static constexpr int barriers_at = outputs_at + 4 * Tuning::warpgroups * Output::bytes_of_warp;
    static constexpr int sums = Tuning::blocks * Tuning::filters / 2, threads = 128 * Tuning::warpgroups;
    static_assert(Tuning::split == 1 || sums * threads * 4 <= outputs_at, "the ring takes the sums of a tile");
    unsigned char* base;
    int first, end;

    __device__ __forceinline__ NarrowRing() : base(shared_memory_for_swizzles()), first(0), end(stages) {
        if constexpr (Tuning::split > 1) {
            first = static_cast<int>(cluster_rank()) * share;
            end = min(first + share, stages);
        }
    }
    __device__ __forceinline__ unsigned char* pixels_of(int stage, int piece) const {
        return base + stage * stage_bytes + piece * pixel_bytes;
    }
    __device__ __forceinline__ unsigned char* filters_of(int stage, int piece) const {
        return base + stage * stage_bytes + Tuning::pieces * pixel_bytes + piece * filter_bytes;
    }
    __device__ __forceinline__ unsigned char* outputs_of(int warp) const {
        return base + outputs_at + warp * Output::bytes_of_warp;
    }
    __device__ __forceinline__ Mbarrier* full(int stage) const {
        return reinterpret_cast<Mbarrier*>(base + barriers_at) + stage;
    }
    __device__ __forceinline__ Mbarrier* free(int stage) const { return full(Tuning::stages) + stage; }
    // By one thread, before a barrier of the block.
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < Tuning::stages; ++i) {
            mbarrier_init(full(i), 1);
            mbarrier_init(free(i), 4 * Tuning::warpgroups);
        }
        fence_mbarrier_init();
    }
};

// One thread's copies of all stages of the block's tiles.
template <class Problem, class Tuning>
__device__ __forceinline__ void produce_narrow(const TensorMap& x, const TensorMap& w, long long batch,
                                               const NarrowTiles<Problem, Tuning>& tiles,
                                               const NarrowRing<Problem, Tuning>& ring, Offset<Problem> first_tile,
                                               Offset<Problem> step) {
    using Ring = NarrowRing<Problem, Tuning>;
    // A map begins where the array does: the filters of a gradient's part lie so many rows of channels further.
    constexpr int first_row = static_cast<int>(Problem::first_weight / Problem::group_c);
    static_assert(Problem::first_weight % Problem::group_c == 0, "filters begin with a row of channels");
    RingPlace<Tuning::stages> place;
    for (Offset<Problem> tile = first_tile; tile < tiles.count(); tile += step) {
        const RowCopies<Problem, TileTuning<Tuning>> copies(tiles, tile, batch);
        const int first_k = tiles.group(tile) * Problem::group_k + tiles.filters(tile) * Tuning::filters;
        for (int stage = ring.first; stage < ring.end; ++stage) {
            Mbarrier* const full = ring.full(place.stage);
            mbarrier_wait_parity(ring.free(place.stage), place.parity ^ 1);
            mbarrier_arrive_expect_tx(full, Ring::stage_bytes);
#pragma unroll
            for (int piece = 0; piece < Tuning::pieces; ++piece) {
                const int number = stage * Tuning::pieces + piece, tap = number / Ring::of_tap;
                const int c = number % Ring::of_tap * Tuning::piece;
                copies.half(ring.pixels_of(place.stage, piece), x, full, tap, c);
                cp_async_bulk_tensor_shared_global(ring.filters_of(place.stage, piece), w, full, c, first_row + tap, first_k);
            }
            place.advance();
        }
    }
}

// A warpgroup's sums of a tile, whose pixels begin at `first_row`, to the output; those of a cluster are added before.
template <class Problem, class Tuning>
__device__ __forceinline__ void store_narrow(const float (&sums)[Tuning::blocks][Tuning::filters / 2],
                                             const typename Problem::result* bias, typename Problem::result* y,
                                             const NarrowTiles<Problem, Tuning>& tiles,
                                             const NarrowRing<Problem, Tuning>& ring, int first_row, Offset<Problem> tile) {
    using Ring = NarrowRing<Problem, Tuning>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Offset<Problem> first_pixel = tiles.first_pixel(tile) + first_row + warp % 4 * 16;
    const int group = tiles.group(tile), first_k = tiles.filters(tile) * Tuning::filters;
    if constexpr (Tuning::split == 1) {
#pragma unroll
        for (int block = 0; block < Tuning::blocks; ++block)
            Ring::Output::store(sums[block], ring.outputs_of(warp), bias, y, tiles, first_pixel + block * 64, group, first_k,
                                lane);
    } else {
        // Nobody needs the ring any more: this is the only tile of the cluster.
        constexpr int count = Tuning::filters / 2;
        float* const mine = reinterpret_cast<float*>(ring.base);
        barrier_sync(1, Ring::threads);  // the stages of this block have been read
#pragma unroll
        for (int i = 0; i < Ring::sums; ++i) mine[i * Ring::threads + threadIdx.x] = sums[i / count][i % count];
        meet_in_cluster();
        float share[Tuning::blocks][count / Tuning::split];
        add_shares<Tuning::split, Ring::threads>(share, mine);
        meet_in_cluster();
        const int mine_k = first_k + static_cast<int>(cluster_rank()) * (Tuning::filters / Tuning::split);
#pragma unroll
        for (int block = 0; block < Tuning::blocks; ++block)
            Ring::Output::store(share[block], ring.outputs_of(warp), bias, y, tiles, first_pixel + block * 64, group, mine_k,
                                lane);
    }
}

// One warpgroup's products of all tiles of the block.
template <class Problem, class Tuning>
struct NarrowConsumer {
    static __device__ __forceinline__ void consume(const typename Problem::result* bias, typename Problem::result* y,
                                                   const NarrowTiles<Problem, Tuning>& tiles,
                                                   const NarrowRing<Problem, Tuning>& ring, int warpgroup,
                                                   Offset<Problem> first_tile, Offset<Problem> step) {
        using Ring = NarrowRing<Problem, Tuning>;
        const int lane = threadIdx.x % 32, first_row = warpgroup * Tuning::blocks * 64;
        RingPlace<Tuning::stages> place;
        for (Offset<Problem> tile = first_tile; tile < tiles.count(); tile += step) {
            float sums[Tuning::blocks][Tuning::filters / 2];
            int before = 0;
            wgmma_fence(sums);
            for (int stage = ring.first; stage < ring.end; ++stage) {
                mbarrier_wait_parity(ring.full(place.stage), place.parity);
                wgmma_fence();
#pragma unroll
                for (int piece = 0; piece < Tuning::pieces; ++piece) {
                    const MatrixDescriptor a = matrix_descriptor(
                        ring.pixels_of(place.stage, piece) + first_row * Ring::row_bytes, 0, 8 * Ring::row_bytes, Ring::row_bytes);
                    const MatrixDescriptor b = matrix_descriptor(ring.filters_of(place.stage, piece), 0, 8 * Ring::row_bytes,
                                                                 Ring::row_bytes);
#pragma unroll
                    for (int i = 0; i < Tuning::piece / 16; ++i)
#pragma unroll
                        for (int block = 0; block < Tuning::blocks; ++block)
                            multiply(typename Problem::element{}, sums[block], a + (block * 64 * Ring::row_bytes + 32 * i),
                                     b + 32 * i, stage > ring.first || piece > 0 || i > 0);
                }
                wgmma_commit_group();
                if (stage > ring.first) {
                    // The products of the stage before are done while these are under way.
                    wgmma_wait_group<1>();
                    if (lane == 0) mbarrier_arrive(ring.free(before));
                }
                before = place.stage;
                place.advance();
            }
            wgmma_wait_group<0>(sums);
            if (lane == 0) mbarrier_arrive(ring.free(before));
            store_narrow<Problem, Tuning>(sums, bias, y, tiles, ring, first_row, tile);
        }
    }
};

// A block: one warpgroup copies, the others do as `Consumer` says.
template <class Problem, class Tuning, class Consumer>
__device__ __forceinline__ void narrow_block(const TensorMap& x, const TensorMap& w, const typename Problem::result* bias,
                                             typename Problem::result* y, long long batch) {
    const NarrowRing<Problem, Tuning> ring;
    const NarrowTiles<Problem, Tuning> tiles(batch);
    if (threadIdx.x == 0) ring.init();
    __syncthreads();
    const int warpgroup = threadIdx.x / 128;
    const Offset<Problem> first = blockIdx.x / Tuning::split, step = gridDim.x / Tuning::split;
    if (warpgroup == Tuning::warpgroups) {
        set_registers_down<Tuning::producer_registers>();
        if (threadIdx.x % 128 == 0) produce_narrow<Problem, Tuning>(x, w, batch, tiles, ring, first, step);
        if constexpr (Tuning::split > 1) {
            // NOTE: the warp of the thread that copied meets again before the barriers that all threads take part in.
            __syncwarp();
            meet_in_cluster();
            meet_in_cluster();
        }
    } else {
        set_registers_up<Tuning::consumer_registers>();
        Consumer::consume(bias, y, tiles, ring, warpgroup, first, step);
    }
}

template <class Problem, class Tuning>
__device__ __forceinline__ void native_gemm_16bit(const TensorMap& x, const TensorMap& w,
                                                   const typename Problem::result* bias, typename Problem::result* y,
                                                   long long batch) {
    narrow_block<Problem, Tuning, NarrowConsumer<Problem, Tuning>>(x, w, bias, y, batch);
}

}  // namespace leanconv
