// native_gemm_pointwise: 1x1 convolution on Hopper tensor cores (wgmma): a matrix product for each image; float16 or bfloat16 in
// NCHW, sums in float32.
//
//   y[n, k, p] = sum over c of w[k, c] * x[n, c, p]        p: pixel of an image
//
// Filters are the rows of a product and pixels its columns, those of all images behind one another. So both operands are read as
// they lie, x MN-major and w K-major, and the sums of a filter are neighbours in y: nothing is transposed, no launch packs filters.
//
// Requires   sm_90a; NCHW; filters of one tap, no padding; rows of w of whole 16 bytes. Stride 1, or every second column.
// Gradient   of an input: w is read as it lies too, an operand that is MN-major. Where the number of pixels is odd, the filters of
//            a group must be even. Of a layer of stride 2 x 2 with an even number of rows and columns: the zeros between pixels are
//            stored with them.
// Odd        numbers of pixels: even and odd channels have sums of their own (odd_pixels.cuh). Forward, operand A comes from
//            registers then: filters' rows are loaded and sorted there.
// Numerics   as native_gemm_16bit: exact products, sums stay in the tensor core over the whole reduction; of an odd number of
//            pixels two sums are added at the end.
// CTA tile   64 * m_tiles * warpgroups filters x `columns` pixels; a stage has channel_block channels of both. Persistent. Where tiles
//            are few, a cluster of `split` CTAs shares the reduction of one (split-K), and each CTA stores its share of the pixels.
// Roles      warpgroups 0..n-1  consumers: wgmma with both operands in shared memory, epilogue, stores
//            warpgroup n        producer (pointwise_stages.cuh): one thread copies filters by TMA. Pixels come by TMA too where an
//                               image has whole 16 bytes of them, a row of a channel each; else all lanes copy them (cp.async), 8
//                               or 4 bytes at a time, to where TMA would; at a stride lanes load whole pieces of rows and store
//                               every second pixel.
// Pipelines  stages   full: bytes of the copies, and each producer's cp.async, or each producer warp -> consumers
//                     empty: a lane of each consumer warp -> producer
// One stage  wait full; for each k16 step m_tiles wgmma; commit; wait for the wgmma of the stage before and release that one. With
//            operand A in registers: load it, wait for the wgmma of the stage before, sort it, multiply.
// Columns    that are no pixel hold what lay there before, or its neighbours; they are multiplied and not stored.
// Registers  m_tiles * columns / 2 sums, of an odd number of pixels twice as many, of 232; at a stride of 208.
// Work       2 C/g flops an output; peak 4096 flops a cycle and multiprocessor. Copied for a stage of 64 channels: 128 bytes a
//            filter, and 8 KiB for each 64 pixels: for 128 x 256 at full speed 48 bytes a cycle. A wgmma of 64 filters x n pixels x
//            16 takes n / 2 cycles and reads (64 + n) * 32 bytes.
// Explored (H200, bbc837f4): a copy of 32 lanes takes 11 to 13 cycles of a multiprocessor, whether of 4 or of 8 bytes a lane, if
//            its address differs by constants from the one before (20 with its own arithmetic). Columns of all images behind one
//            another are 4 to 10 % quicker than tiles of one image each; tiles of 200 columns, the last 8 by a wgmma of their own,
//            up to 1.4 times slower than of 192. At a stride: with one stage under way instead of two 1.4 times slower.
#pragma once

#include <device/element.cuh>
#include <device/epilogue.cuh>
#include <device/index.cuh>
#include <device/pipeline/rings.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/mma.cuh>
#include <device/ptx/sync.cuh>
#include <device/ptx/tma.cuh>
#include <kernels/hopper_native/accumulators.cuh>
#include <kernels/hopper_native/odd_pixels.cuh>
#include <kernels/hopper_native/pointwise_stages.cuh>

namespace leanconv {

// A warpgroup's sums of a tile.
template <class Problem, class Tuning>
struct PointwiseSums {
    using Ring = PointwiseRing<Problem, Tuning>;
    using Tiles = PointwiseTiles<Problem, Tuning>;
    using T = typename Problem::result;
    static constexpr int columns = Tuning::columns, count = columns / 2;
    static constexpr int m_tiles = Tuning::m_tiles, split = Tuning::split;
    static constexpr bool odd = Tiles::odd;
    using Odd = OddPixels<odd ? Tuning::channel_block : 32>;
    static constexpr bool in_registers = odd && !Tuning::mirrored;  // operand A
    float sums[m_tiles][count];
    // Of odd channels, where their columns are one pixel behind.
    float behind[odd ? m_tiles : 1][odd ? count : 1];
    unsigned a[in_registers ? 2 * m_tiles : 1][Odd::pairs][4];

    __device__ __forceinline__ void fence() {
        if constexpr (odd) wgmma_fence(sums, behind);
        else wgmma_fence(sums);
    }
    // Waits for all products.
    __device__ __forceinline__ void finish() {
        if constexpr (in_registers) wgmma_wait_group<0>(sums, behind, a);
        else if constexpr (odd) wgmma_wait_group<0>(sums, behind);
        else wgmma_wait_group<0>(sums);
        if constexpr (odd) {
#pragma unroll
            for (int m = 0; m < m_tiles; ++m) add_moved(sums[m], behind[m], threadIdx.x % 32);
        }
    }
    // The products of a stage: first of even channels, then of odd ones.
    __device__ __forceinline__ void multiply_sorted(const Ring& ring, int stage, int warpgroup, bool add) {
#pragma unroll
        for (int i = 0; i < 2 * Odd::pairs; ++i)
#pragma unroll
            for (int m = 0; m < m_tiles; ++m) {
                const int parity = i / Odd::pairs, pair = i % Odd::pairs;
                auto& to = parity ? behind[m] : sums[m];
                const auto b = ring.pixel_operand(stage) + 16 * 128 * i;
                if constexpr (in_registers) {
                    multiply(typename Problem::element{}, to, a[2 * m + parity][pair], b, add || pair > 0);
                } else {
                    const auto filters = ring.filter_operand(stage, warpgroup * m_tiles + m) + Ring::filter_step * i;
                    multiply(typename Problem::element{}, to, filters, b, add || pair > 0);
                }
            }
    }
    // Waits for the products of the stage before, and loads the filters of this one.
    __device__ __forceinline__ void load_filters(const Ring& ring, int stage, int warpgroup) {
        OddFilters<Tuning::channel_block> loaded[m_tiles];
#pragma unroll
        for (int m = 0; m < m_tiles; ++m)
            loaded[m].load(ring.filters_of(stage) + (warpgroup * m_tiles + m) * Ring::m64, threadIdx.x / 32 % 4, threadIdx.x % 32);
        wgmma_wait_group<0>(sums, behind, a);
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) loaded[m].sort(a[2 * m], a[2 * m + 1]);
        wgmma_fence(sums, behind, a);
    }
    // The products of a stage.
    __device__ __forceinline__ void multiply_stage(const Ring& ring, int stage, int warpgroup, bool add) {
#pragma unroll
        for (int i = 0; i < Tuning::channel_block / 16; ++i)
#pragma unroll
            for (int m = 0; m < m_tiles; ++m) {
                const auto a = ring.filter_operand(stage, warpgroup * m_tiles + m) + Ring::filter_step * i;
                multiply(typename Problem::element{}, sums[m], a, ring.pixel_operand(stage) + 16 * 128 * i, add || i > 0);
            }
    }
    // To the output; those of a cluster are added before, and each CTA stores its share of the pixels.
    __device__ __forceinline__ void store(const typename Ring::Output& output, T* y, const Ring& ring, long long batch,
                                          int tile, int warpgroup) const {
        const int first_k = Tiles::first_filter(tile) + warpgroup * m_tiles * 64 + threadIdx.x / 32 % 4 * 16;
        if constexpr (split == 1) {
#pragma unroll
            for (int m = 0; m < m_tiles; ++m) output.template store<columns>(sums[m], y, batch, tile, 0, first_k + m * 64);
        } else {
            // The ring is not needed any more: this is the only tile of the cluster.
            constexpr int share = columns / split;
            float* const own = reinterpret_cast<float*>(ring.base);
            barrier_sync(1, Ring::threads);  // the stages of this CTA have been read
#pragma unroll
            for (int i = 0; i < m_tiles * count; ++i) own[i * Ring::threads + threadIdx.x] = sums[i / count][i % count];
            meet_in_cluster();
            float added[m_tiles][share / 2];
            add_shares<split, Ring::threads>(added, own);
            meet_in_cluster();
#pragma unroll
            for (int m = 0; m < m_tiles; ++m)
                output.template store<share>(added[m], y, batch, tile, static_cast<int>(cluster_rank()) * share, first_k + m * 64);
        }
    }
};

// One warpgroup's products of all tiles of the CTA.
template <class Problem, class Tuning>
__device__ __forceinline__ void consume(Bias<Problem> bias, typename Problem::result* y,
                                        const PointwiseTiles<Problem, Tuning>& tiles,
                                        const PointwiseRing<Problem, Tuning>& ring, long long batch, int warpgroup) {
    using Ring = PointwiseRing<Problem, Tuning>;
    const int lane = threadIdx.x % 32;
    const typename Ring::Output output{
        lane, reinterpret_cast<typename Problem::result*>(ring.outputs_of(threadIdx.x / 32)), bias};
    RingPlace<Tuning::stages> place;
    for (int tile = blockIdx.x / Tuning::split; tile < tiles.count; tile += gridDim.x / Tuning::split) {
        PointwiseSums<Problem, Tuning> tile_sums;
        int before = 0;
        if constexpr (Problem::add) {
            const int first_k = Ring::Tiles::first_filter(tile) + warpgroup * Tuning::m_tiles * 64 + threadIdx.x / 32 % 4 * 16;
#pragma unroll
            for (int m = 0; m < Tuning::m_tiles; ++m) output.fetch_residuals(y, batch, tile, first_k + m * 64, Tuning::columns);
        }
        tile_sums.fence();
        for (int stage = ring.first; stage < ring.end; ++stage) {
            mbarrier_wait_parity(ring.full(place.stage), place.parity);
            // Not by the producers, who have later stages under way.
            if constexpr (!Ring::by_tma) fence_proxy_async();
            if constexpr (tile_sums.in_registers) tile_sums.load_filters(ring, place.stage, warpgroup);
            else wgmma_fence();
            if constexpr (tile_sums.odd) tile_sums.multiply_sorted(ring, place.stage, warpgroup, stage > ring.first);
            else tile_sums.multiply_stage(ring, place.stage, warpgroup, stage > ring.first);
            wgmma_commit_group();
            if (stage > ring.first) {
                // The products of the stage before are done while these are under way.
                if constexpr (!tile_sums.in_registers) wgmma_wait_group<1>();
                mbarrier_arrive_warp(ring.empty(before), lane);
            }
            before = place.stage;
            place.advance();
        }
        tile_sums.finish();
        mbarrier_arrive_warp(ring.empty(before), lane);
        tile_sums.store(output, y, ring, batch, tile, warpgroup);
    }
}

// `x` is a tensor map, or the tensor where lanes copy.
template <class Problem, class Tuning, class Source>
__device__ __forceinline__ void native_gemm_pointwise(const Source& x, const TensorMap& w, Bias<Problem> bias,
                                                      typename Problem::result* y, long long batch) {
    static_assert(!Problem::nhwc && !Problem::chwn, "the pixels of a channel are neighbours");
    const PointwiseRing<Problem, Tuning> ring;
    const PointwiseTiles<Problem, Tuning> tiles(batch);
    if (threadIdx.x == 0) ring.init();
    __syncthreads();
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == Tuning::warpgroups) {
        set_registers_down<Tuning::producer_registers>();
        produce<Problem, Tuning>(x, w, tiles, ring, batch);
        if constexpr (Tuning::split > 1) {
            // NOTE: the warp of the thread that copied converges before the barriers that all threads take part in.
            __syncwarp();
            meet_in_cluster();
            meet_in_cluster();
        }
    } else {
        set_registers_up<Tuning::consumer_registers>();
        consume<Problem, Tuning>(bias, y, tiles, ring, batch, warpgroup);
    }
}

}  // namespace leanconv
