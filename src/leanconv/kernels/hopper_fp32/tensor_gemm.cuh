// Implicit GEMM on tensor cores in float32's accuracy (or TF32's), for sm_90a.
//
// y[pixel, k] = sum over taps and channels of x[pixel + tap, c] w[k, c, tap]: a matrix product whose matrix of pixels exists
// only in shared memory. Each float32 is the sum of two float16 (tensor_split.cuh), a product three products:
//   2 · 3 flops a product of float32; the tensor cores start 4096 flops a cycle and multiprocessor: 989 / 3 = 330 TFLOP/s
//   at 1.83 GHz, of which power leaves 233 (a third of what cuBLAS reaches in float16)
// Reached on an H200, 3 x 3 in NHWC, burst and sustained: 237 / 204 TFLOP/s with 256 filters and channels, 194 / 177 with 128,
// 137 / 133 with 64; flat in NCHW 217 / 190, 160 / 151 and 101 / 103; 1 x 1 with 256 161 / 146. One product (tensor_running.cuh)
// 522 with 256.
//
// A block has `warpgroups` consumers of 64 pixels each and one warpgroup of producers, which fill two rings: pixels
// (float32, 64 reduction elements; tensor_pixels.cuh) and prepared filters (float16, hi and lo, `chunk` filters;
// filter_layout.cuh). For each stage of pixels a consumer
//   1. loads its 32 values a thread, and finds the largest of each row: 2 shuffles
//   2. scales and splits them into fragments of operand A: 32 registers
//   3. for each chunk of filters issues 4 x 3 wgmma into a partial sum, the small products first
//   4. adds the partial sum, times the row's inverse scale, to its float32 sums: 2^-24 rounding, where the tensor core cuts
// 128 pixels x 256 filters: 128 sums, two partial sums of 32 and 32 of fragments, of 240 registers. Per stage the tensor core
// works 3072 cycles, and the four schedulers issue some 620 for steps 1, 2 and 4 of both warpgroups.
// Blocks stay: a block computes tile after tile, so that the stores of one and the copies of the next overlap. The tiles that
// are left when all blocks have had equally many, or all where there are few, are shared: the `split` blocks of a cluster
// share such a tile's reduction, and each block stores its share of the filters.
#pragma once

#include <device/ptx/barrier.cuh>
#include <device/ptx/registers.cuh>
#include <device/ptx/wgmma.cuh>
#include <kernels/hopper_fp32/settled_filters.cuh>
#include <kernels/hopper_fp32/tensor_output.cuh>
#include <kernels/hopper_fp32/tensor_pixels.cuh>
#include <kernels/hopper_fp32/tensor_products.cuh>
#include <kernels/hopper_fp32/tensor_running.cuh>
#include <kernels/hopper_fp32/tensor_values.cuh>

namespace leanconv {

// Operand A of one stage: two rows of a thread, four sixteens of reduction elements.
template <class Problem, class Tuning>
struct PixelFragments : SplitFragments<Tuning::products == 3> {
    using Base = SplitFragments<Tuning::products == 3>;
    using Base::down, Base::exact, Base::high, Base::low;

    __device__ __forceinline__ void load(const unsigned char* shared, const float* factors, bool scaled, int row, int t,
                                         const SplitHeader& header, const SeenTaps<Problem, Tuning>& seen, int stage) {
        float x[2][4][4];
        StageValues<Problem, Tuning>::load(x, shared, factors, scaled, {row, row + 8}, t, seen, stage);
        split(x, header);
    }
    __device__ __forceinline__ void split(const float (&x)[2][4][4], const SplitHeader& header) {
#pragma unroll
        for (int i = 0; i < 2; ++i) down[i] = split_row<exact>(high, low, i, x[i], header);
    }
};

// One warpgroup's products of all tiles of the block.
template <class Problem, class Tuning>
__device__ __forceinline__ void consume(const float* prepared_filters, const float* bias, float* y, long long batch,
                                        const TensorTiles<Problem, Tuning>& tiles,
                                        const TensorRings<Problem, Tuning>& rings, int warpgroup) {
    using F = TensorFilters<Problem, Tuning>;
    constexpr int count = Tuning::chunk / 2, partials = Tuning::partials;
    static_assert(partials == 1 || partials == 2, "one partial sum, or two in turn");
    static_assert(Tuning::filter_stages >= (Tuning::turns ? F::chunks : partials),
                  "a warpgroup multiplies with so many stages of filters before the others free one");
    const float* const prepared = prepared_filters + Problem::first_prepared;
    const SplitHeader header = *reinterpret_cast<const SplitHeader*>(prepared);
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, t = lane % 4;
    const int row = warpgroup * 64 + warp * 16 + spread_row(lane / 4);
    RingPlace<Tuning::pixel_stages> pixel_place;
    RingPlace<Tuning::filter_stages> filter_place, done_place;
    const Turns<Tuning> turns(warpgroup);
    PlaneValuesOf<Problem, Tuning> planes;
    for (TileWalk<Problem, Tuning> walk(tiles); walk.valid(); walk.advance()) {
        const Offset<Problem> tile = walk.tile;
        const int group = tiles.group(tile);
        const bool scaled = reinterpret_cast<const unsigned*>(prepared)[F::flags_at + group] != 0;
        const float* factors = prepared + F::factors_at + group * F::stages * split_depth;
        const SeenTaps<Problem, Tuning> seen(tiles, tile, row);
        if constexpr (F::planes) planes.begin(tiles, walk, row);
        float sums[F::chunks][count];
#pragma unroll
        for (int chunk = 0; chunk < F::chunks; ++chunk)
#pragma unroll
            for (int i = 0; i < count; ++i) sums[chunk][i] = 0.0f;

        for (int stage = walk.first; stage < walk.end; ++stage) {
            PixelFragments<Problem, Tuning> pixels;
            if constexpr (F::planes) {
                float x[2][4][4];
                planes.load(x, rings, factors + stage * split_depth, scaled, t, stage);
                planes.hide(x);
                pixels.split(x, header);
            } else {
                mbarrier_wait_parity(rings.pixels_full(pixel_place.stage), pixel_place.parity);
                pixels.load(rings.pixel_stage(pixel_place.stage), factors + stage * split_depth, scaled, row, t, header, seen,
                            stage);
            }
            float partial[partials][count];
#pragma unroll
            for (int chunk = 0; chunk < F::chunks; ++chunk) {
                float (&now)[count] = partial[chunk % partials];
                mbarrier_wait_parity(rings.filters_full(filter_place.stage), filter_place.parity);
                if (chunk == 0) turns.wait(pixels);
                const unsigned char* const filters = rings.filter_stage(filter_place.stage);
                if (chunk == 0 || partials == 1) wgmma_fence(now, pixels.high, pixels.low);
                else wgmma_fence(now);
                begin_products(now, pixels, filters);
                if (partials == 2 && chunk > 0) {
                    // The sums of the chunk before are added while these products are under way.
                    wgmma_commit_group();
                    wgmma_wait_group<1>(partial[(chunk - 1) % 2]);
                    if (lane == 0) mbarrier_arrive(rings.filters_free(done_place.stage));
                    done_place.advance();
                    promote(sums[chunk - 1], partial[(chunk - 1) % 2], pixels.down);
                }
                end_products(now, pixels, filters);
                wgmma_commit_group();
                filter_place.advance();
                if (chunk == 0) {
                    // NOTE: not before the products that take the loaded values (ld_shared_v4 says why).
                    __syncwarp();
                    if constexpr (F::planes) {
                        planes.stages.release(rings, stage, lane);
                    } else {
                        if (lane == 0) mbarrier_arrive(rings.pixels_free(pixel_place.stage));
                        pixel_place.advance();
                    }
                }
                if (chunk == F::chunks - 1) turns.pass(stage == walk.end - 1 && walk.is_last());
                if (partials == 1 || chunk == F::chunks - 1) {
                    wgmma_wait_group<0>(now, pixels.high, pixels.low);
                    if (lane == 0) mbarrier_arrive(rings.filters_free(done_place.stage));
                    done_place.advance();
                    promote(sums[chunk], now, pixels.down);
                }
            }
        }
        const auto& all = in_sixteens(sums);
        if (!walk.together) {
            store_sums<Problem, Tuning>(all, 0, prepared, bias, y, batch, tiles, tile, row, t);
        } else if constexpr (Tuning::split > 1) {
            store_sums_of_cluster<Problem, Tuning>(all, rings, prepared, bias, y, batch, tiles, tile, row, t);
        }
    }
}

// `x` is a tensor map of pixels in rows, or the tensor where they are copied in columns.
template <class Problem, class Tuning, class Source, class... Filters>
__device__ __forceinline__ void tensor_gemm(const Source& x, const float* prepared, const float* bias, float* y,
                                            long long batch, const Filters*... w) {
    const TensorRings<Problem, Tuning> rings;
    const TensorTiles<Problem, Tuning> tiles(batch);
    if (threadIdx.x == 0) rings.init();
    __syncthreads();
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == Tuning::warpgroups) {
        set_registers_down<Tuning::producer_registers>();
        wait_for_settled_filters<Tuning>(threadIdx.x % 128);
        produce<Problem, Tuning>(x, prepared, batch, tiles, rings, threadIdx.x % 128);
        if (TileWalk<Problem, Tuning>(tiles).meets()) {
            // NOTE: the warps of lanes that copied alone meet again before the barriers that all threads take part in.
            __syncwarp();
            if constexpr (Tuning::split > 1) meet_in_cluster(), meet_in_cluster();
        }
    } else {
        settle_filters<Problem, Tuning, TensorRings<Problem, Tuning>>(prepared, w...);
        set_registers_up<Tuning::consumer_registers>();
        if constexpr (Tuning::partials > 0) consume<Problem, Tuning>(prepared, bias, y, batch, tiles, rings, warpgroup);
        else consume_running<Problem, Tuning>(prepared, bias, y, batch, tiles, rings, warpgroup);
    }
}

}  // namespace leanconv
