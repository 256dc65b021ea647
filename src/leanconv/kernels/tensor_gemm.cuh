// Implicit GEMM on tensor cores in float32's accuracy (or TF32's), for sm_90a.
//
// y[pixel, k] = sum over taps and channels of x[pixel + tap, c] w[k, c, tap]: a matrix product whose matrix of pixels exists
// only in shared memory. Each float32 is the sum of two float16 (lib/tensor_split.cuh), a product three products:
//   2 · 3 flops a product of float32; the tensor cores start 4096 flops a cycle and multiprocessor: 989 / 3 = 330 TFLOP/s
//   at 1.83 GHz, of which power leaves two thirds (a third of what cuBLAS reaches in float16: 256 burst, 219 sustained)
//
// A block has `warpgroups` consumers of 64 pixels each and one warpgroup of producers, which fill two rings: pixels
// (float32, 64 reduction elements; lib/tensor_pixels.cuh) and prepared filters (float16, hi and lo, `chunk` filters;
// lib/tensor_filters.cuh). For each stage of pixels a consumer
//   1. loads its 32 values a thread, and finds the largest of each row: 2 shuffles
//   2. scales and splits them into fragments of operand A: 32 registers
//   3. for each chunk of filters issues 4 x 3 wgmma into a partial sum, the small products first
//   4. adds the partial sum, times the row's inverse scale, to its float32 sums: 2^-24 rounding, where the tensor core cuts
// 128 pixels x 256 filters: 128 sums, two partial sums of 32 and 32 of fragments, of 240 registers. Per stage the tensor core
// works 3072 cycles, and the four schedulers issue some 620 for steps 1, 2 and 4 of both warpgroups.
// Blocks stay: a block computes tile after tile, so that the stores of one and the copies of the next overlap.
#pragma once

#include <lib/ptx/barrier.cuh>
#include <lib/ptx/registers.cuh>
#include <lib/ptx/wgmma.cuh>
#include <lib/tensor_output.cuh>
#include <lib/tensor_pixels.cuh>

namespace leanconv {

// Operand A of one stage: two rows of a thread, four sixteens of reduction elements.
template <class Tuning>
struct PixelFragments {
    static constexpr bool exact = Tuning::products == 3;
    unsigned high[4][4], low[exact ? 4 : 1][4];
    float down[2];  // what the products of the two rows are multiplied by

    template <class Rings>
    __device__ __forceinline__ void load(const unsigned char* stage, const float* factors, bool scaled, int row, int t,
                                         const SplitHeader& header) {
        float x[2][16];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int sixteen = 0; sixteen < 4; ++sixteen) {
                float (&four)[4] = reinterpret_cast<float (&)[4]>(x[i][4 * sixteen]);
                if constexpr (Tuning::rows) {
                    const unsigned char* half = stage + sixteen / 2 * Rings::half_bytes + (row + 8 * i) * 128;
                    const int unit = (sixteen % 2 * 4 + t) ^ row % 8;
                    ld_shared_v4(four, reinterpret_cast<const float*>(half + unit * 16));
                } else {
                    const float* column = reinterpret_cast<const float*>(stage) + row + 8 * i;
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        four[j] = __uint_as_float(
                            ld_shared_u32(column + (sixteen * 16 + 2 * t + j % 2 + j / 2 * 8) * Rings::pitch));
                }
            }
        }
        if (scaled) {
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                const float factor = factors[j / 4 * 16 + (Tuning::rows ? 4 * t + j % 4 : 2 * t + j % 2 + j % 4 / 2 * 8)];
                x[0][j] *= factor, x[1][j] *= factor;
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float largest = fabsf(x[i][0]);
#pragma unroll
            for (int j = 1; j < 16; ++j) largest = fmaxf(largest, fabsf(x[i][j]));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
            const RowScale scale(largest, header);
            down[i] = scale.down;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float a = x[i][2 * j], b = x[i][2 * j + 1];
                unsigned& packed = high[j / 2][j % 2 * 2 + i];
                packed = split_high(a, b, scale.up);
                if constexpr (exact) low[j / 2][j % 2 * 2 + i] = split_low(a, b, scale.up, packed);
            }
        }
    }
};

// The products of one stage and one chunk of filters, the small ones first.
template <class Tuning, int count>
__device__ __forceinline__ void multiply(float (&partial)[count], const PixelFragments<Tuning>& pixels,
                                         const unsigned char* filters) {
    constexpr int half_bytes = Tuning::chunk * split_depth * 2;
    const MatrixDescriptor high = matrix_descriptor(filters, 0, 1024, 128);
    if constexpr (Tuning::products == 3) {
        const MatrixDescriptor low = matrix_descriptor(filters + half_bytes, 0, 1024, 128);
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_f16(partial, pixels.high[i], low + 32 * i, i > 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_f16(partial, pixels.low[i], high + 32 * i, true);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma_f16(partial, pixels.high[i], high + 32 * i, Tuning::products == 3 || i > 0);
}

template <int count>
__device__ __forceinline__ void promote(float (&sums)[count], const float (&partial)[count], const float (&down)[2]) {
#pragma unroll
    for (int i = 0; i < count; ++i) sums[i] = fmaf(partial[i], down[i / 2 % 2], sums[i]);
}

// One warpgroup's products of all tiles of the block.
template <class Problem, class Tuning>
__device__ __forceinline__ void consume(const float* prepared_filters, const float* bias, float* y, long long batch,
                                        const TensorTiles<Problem, Tuning>& tiles,
                                        const TensorRings<Problem, Tuning>& rings, int warpgroup,
                                        Offset<Problem> first_tile, Offset<Problem> step) {
    using F = TensorFilters<Problem, Tuning>;
    constexpr int count = Tuning::chunk / 2, partials = Tuning::partials;
    static_assert(partials == 1 || partials == 2, "one partial sum, or two in turn");
    static_assert(Tuning::filter_stages >= partials, "each partial sum under way holds a stage of filters");
    const float* const prepared = prepared_filters + Problem::first_prepared;
    const SplitHeader header = *reinterpret_cast<const SplitHeader*>(prepared);
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, t = lane % 4;
    const int row = warpgroup * 64 + warp * 16 + spread_row(lane / 4);
    const StageRange<Problem, Tuning> range;
    RingPlace<Tuning::pixel_stages> pixel_place;
    RingPlace<Tuning::filter_stages> filter_place, done_place;
    for (Offset<Problem> tile = first_tile; tile < tiles.count(); tile += step) {
        const int group = tiles.group(tile);
        const bool scaled = reinterpret_cast<const unsigned*>(prepared)[F::flags_at + group] != 0;
        const float* factors = prepared + F::factors_at + group * F::stages * split_depth;
        float sums[F::chunks][count];
#pragma unroll
        for (int chunk = 0; chunk < F::chunks; ++chunk)
#pragma unroll
            for (int i = 0; i < count; ++i) sums[chunk][i] = 0.0f;

        for (int stage = range.first; stage < range.end; ++stage) {
            PixelFragments<Tuning> pixels;
            mbarrier_wait_parity(rings.pixels_full(pixel_place.stage), pixel_place.parity);
            pixels.template load<TensorRings<Problem, Tuning>>(rings.pixel_stage(pixel_place.stage),
                                                               factors + stage * split_depth, scaled, row, t, header);
            float partial[partials][count];
#pragma unroll
            for (int chunk = 0; chunk < F::chunks; ++chunk) {
                float (&now)[count] = partial[chunk % partials];
                mbarrier_wait_parity(rings.filters_full(filter_place.stage), filter_place.parity);
                if (chunk == 0 || partials == 1) wgmma_fence(now, pixels.high, pixels.low);
                else wgmma_fence(now);
                multiply(now, pixels, rings.filter_stage(filter_place.stage));
                wgmma_commit_group();
                filter_place.advance();
                if (chunk == 0) {
                    // NOTE: not before the products that take the loaded values (ld_shared_v4 says why).
                    __syncwarp();
                    if (lane == 0) mbarrier_arrive(rings.pixels_free(pixel_place.stage));
                    pixel_place.advance();
                }
                if (chunk >= partials - 1) {
                    const int ready = chunk - (partials - 1);
                    if constexpr (partials == 1) wgmma_wait_group<0>(partial[0], pixels.high, pixels.low);
                    else wgmma_wait_group<1>(partial[ready % 2]);
                    if (lane == 0) mbarrier_arrive(rings.filters_free(done_place.stage));
                    done_place.advance();
                    promote(sums[ready], partial[ready % partials], pixels.down);
                }
            }
            if constexpr (partials == 2) {
                constexpr int last = F::chunks - 1;
                wgmma_wait_group<0>(partial[last % 2], pixels.high, pixels.low);
                if (lane == 0) mbarrier_arrive(rings.filters_free(done_place.stage));
                done_place.advance();
                promote(sums[last], partial[last % 2], pixels.down);
            }
        }
        store_sums<Problem, Tuning>(sums, prepared, bias, y, batch, tiles, tile, row, t);
    }
}

// `x` is a tensor map of pixels in rows, or the tensor where they are copied in columns.
template <class Problem, class Tuning, class Source>
__device__ __forceinline__ void tensor_gemm(const Source& x, const float* prepared, const float* bias, float* y,
                                            long long batch) {
    const TensorRings<Problem, Tuning> rings;
    const TensorTiles<Problem, Tuning> tiles(batch);
    if (threadIdx.x == 0) rings.init();
    __syncthreads();
    const int warpgroup = threadIdx.x / 128;
    const Offset<Problem> first = blockIdx.x / Tuning::split, step = gridDim.x / Tuning::split;
    if (warpgroup == Tuning::warpgroups) {
        set_registers_down<Tuning::producer_registers>();
        produce<Problem, Tuning>(x, prepared, batch, tiles, rings, threadIdx.x % 128, first, step);
    } else {
        set_registers_up<Tuning::consumer_registers>();
        consume<Problem, Tuning>(prepared, bias, y, batch, tiles, rings, warpgroup, first, step);
    }
}

}  // namespace leanconv
