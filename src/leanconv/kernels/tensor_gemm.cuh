// Implicit GEMM on tensor cores in float32's accuracy (or TF32's), for sm_90a.
//
// y[pixel, k] = sum over taps and channels of x[pixel + tap, c] w[k, c, tap]: a matrix product whose matrix of pixels exists
// only in shared memory. Each float32 is the sum of two float16 (lib/tensor_split.cuh), a product three products:
//   2 · 3 flops a product of float32; the tensor cores start 4096 flops a cycle and multiprocessor: 989 / 3 = 330 TFLOP/s
//   at 1.83 GHz, of which power leaves 233 (a third of what cuBLAS reaches in float16)
// Reached on an H200, 3 x 3 in NHWC, burst and sustained: 237 / 204 TFLOP/s with 256 filters and channels, 194 / 177 with 128,
// 137 / 133 with 64; flat in NCHW 217 / 190, 160 / 151 and 101 / 103; 1 x 1 with 256 161 / 146; one product of 256 432 / 394.
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
// Blocks stay: a block computes tile after tile, so that the stores of one and the copies of the next overlap. The tiles that
// are left when all blocks have had equally many, or all where there are few, are shared: the `split` blocks of a cluster
// share such a tile's reduction, and each block stores its share of the filters.
#pragma once

#include <lib/ptx/barrier.cuh>
#include <lib/ptx/registers.cuh>
#include <lib/ptx/wgmma.cuh>
#include <lib/tensor_output.cuh>
#include <lib/tensor_pixels.cuh>
#include <lib/tensor_products.cuh>

namespace leanconv {

// The two pixels of a thread where taps may see beyond the sides of the image that flat copies do not know.
template <class Problem, class Tuning>
struct SeenTaps {
    static constexpr bool any = Tuning::flat && Problem::padded;
    int p[any ? 2 : 1], q[any ? 2 : 1], apart;

    __device__ __forceinline__ SeenTaps(const TensorTiles<Problem, Tuning>& tiles, Offset<Problem> tile, int row)
        : apart(Problem::chwn ? static_cast<int>(tiles.numbers.batch) : 1) {
        if constexpr (any) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                tiles.numbers.position(tiles.first_pixel(tile) + row + 8 * i, p[i], q[i]);
                p[i] -= Problem::pad_top, q[i] -= Problem::pad_left;
            }
        }
    }
    // Where in its box of flat pixels the 32 of piece `number` begin.
    __device__ __forceinline__ int first(int number) const {
        return Tuning::flat ? flat_shift<Problem, Tuning>(number / TensorFilters<Problem, Tuning>::of_tap, apart) & 3 : 0;
    }
    // Whether piece `number` of the reduction lies inside the image for pixel i.
    __device__ __forceinline__ bool inside(int i, int number) const {
        const int tap = number / TensorFilters<Problem, Tuning>::of_tap;
        return static_cast<unsigned>(p[i] + tap / Problem::s * Problem::dilation_h) < Problem::h &&
               static_cast<unsigned>(q[i] + tap % Problem::s * Problem::dilation_w) < Problem::w;
    }
};

// Operand A of one stage: two rows of a thread, four sixteens of reduction elements.
template <class Problem, class Tuning>
struct PixelFragments : SplitFragments<Tuning::products == 3> {
    using Rings = TensorRings<Problem, Tuning>;
    using Base = SplitFragments<Tuning::products == 3>;
    using Base::down, Base::exact, Base::high, Base::low;

    // Element j of the four of a sixteen, which the host permuted where they are neighbours in shared memory.
    static __device__ __forceinline__ int element(int t, int j) { return Tuning::rows ? 4 * t + j : 2 * t + j % 2 + j / 2 * 8; }

    static __device__ __forceinline__ void load_four(float (&four)[4], const unsigned char* stage, int row, int t, int sixteen,
                                                     int first) {
        const unsigned char* const half = stage + sixteen / 2 * Rings::half_bytes;
        if constexpr (Tuning::rows) {
            const int unit = (sixteen % 2 * 4 + t) ^ row % 8;
            ld_shared_v4(four, reinterpret_cast<const float*>(half + row * 128 + unit * 16));
            return;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int channel = element(t, j);
            if constexpr (Tuning::flat) {
                const unsigned char* const granule = half + row / 32 * Rings::granule_bytes;
                const float* const column = reinterpret_cast<const float*>(granule) + row % 32 + first;
                four[j] = __uint_as_float(ld_shared_u32(column + (sixteen % 2 * 16 + channel) * Rings::flat_pitch));
            } else {
                const float* const column = reinterpret_cast<const float*>(stage) + row;
                four[j] = __uint_as_float(ld_shared_u32(column + (sixteen * 16 + channel) * Rings::pitch));
            }
        }
    }

    __device__ __forceinline__ void load(const unsigned char* shared, const float* factors, bool scaled, int row, int t,
                                         const SplitHeader& header, const SeenTaps<Problem, Tuning>& seen, int stage) {
        float x[2][4][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int first = seen.first(2 * stage + half);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                load_four(x[i % 2][2 * half + i / 2], shared, row + i % 2 * 8, t, 2 * half + i / 2, first);
        }
        if constexpr (SeenTaps<Problem, Tuning>::any) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const bool inside = seen.inside(i, 2 * stage + half);
#pragma unroll
                    for (int j = 0; j < 8; ++j) {
                        float& value = x[i][2 * half + j / 4][j % 4];
                        value = inside ? value : 0.0f;
                    }
                }
        }
        if (scaled) {
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                const float factor = factors[j / 4 * 16 + element(t, j % 4)];
                x[0][j / 4][j % 4] = x[0][j / 4][j % 4] * factor * factor;
                x[1][j / 4][j % 4] = x[1][j / 4][j % 4] * factor * factor;
            }
        }
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
    for (TileWalk<Problem, Tuning> walk(tiles); walk.valid(); walk.advance()) {
        const Offset<Problem> tile = walk.tile;
        const int group = tiles.group(tile);
        const bool scaled = reinterpret_cast<const unsigned*>(prepared)[F::flags_at + group] != 0;
        const float* factors = prepared + F::factors_at + group * F::stages * split_depth;
        const SeenTaps<Problem, Tuning> seen(tiles, tile, row);
        float sums[F::chunks][count];
#pragma unroll
        for (int chunk = 0; chunk < F::chunks; ++chunk)
#pragma unroll
            for (int i = 0; i < count; ++i) sums[chunk][i] = 0.0f;

        for (int stage = walk.first; stage < walk.end; ++stage) {
            PixelFragments<Problem, Tuning> pixels;
            mbarrier_wait_parity(rings.pixels_full(pixel_place.stage), pixel_place.parity);
            pixels.load(rings.pixel_stage(pixel_place.stage), factors + stage * split_depth, scaled, row, t, header, seen,
                        stage);
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
                    if (lane == 0) mbarrier_arrive(rings.pixels_free(pixel_place.stage));
                    pixel_place.advance();
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
template <class Problem, class Tuning, class Source>
__device__ __forceinline__ void tensor_gemm(const Source& x, const float* prepared, const float* bias, float* y,
                                            long long batch) {
    const TensorRings<Problem, Tuning> rings;
    const TensorTiles<Problem, Tuning> tiles(batch);
    if (threadIdx.x == 0) rings.init();
    __syncthreads();
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == Tuning::warpgroups) {
        set_registers_down<Tuning::producer_registers>();
        produce<Problem, Tuning>(x, prepared, batch, tiles, rings, threadIdx.x % 128);
        if (TileWalk<Problem, Tuning>(tiles).meets()) {
            // NOTE: the warps of lanes that copied alone meet again before the barriers that all threads take part in.
            __syncwarp();
            if constexpr (Tuning::split > 1) meet_in_cluster(), meet_in_cluster();
        }
    } else {
        set_registers_up<Tuning::consumer_registers>();
        consume<Problem, Tuning>(prepared, bias, y, batch, tiles, rings, warpgroup);
    }
}

}  // namespace leanconv
