// tensor_gemm_sync: implicit GEMM on tensor cores by mma.sync; float32 in, float32 accuracy (or TF32's) out. From sm_80 on.
//
//   y[m, k] = sum over r, s, c of x[m + (r, s), c] * w[k, r, s, c]        m: output pixel, k: filter
//
// Requires   tensor cores of sm_80 or newer; 16-byte aligned tensors; with groups, at least 16 channels in each.
// Numerics   float32 = hi + lo (two float16, scaled per row, split.cuh); one product = 3 mma; partial sums promoted to float32
//            every 64. With `products` 1 hi alone.
// CTA tile   32 * warps pixels x n_tiles * mma_n filters x 64 reduction elements a stage; one tile a CTA.
// Roles      every warp copies and converts 32 pixels of its own, which no other warp reads, and multiplies them with all filters
//            of the tile; all threads copy filters (cp.async).
// Pipelines  pixels   one stage a warp, no barrier: the next copies begin when the warp has its fragments in registers
//            filters  filter_stages MMA tiles, cp.async groups and one __syncthreads an MMA tile
// One stage  wait for the pixels; 64 values a lane, row maximum (2 shuffles), scale, split: 64 registers; begin the copies of the
//            next 64 elements; for each MMA tile of filters and `step` filters of it: 48 mma m16n8k16 into 16 partial sums, the small
//            products first; acc += partial * inverse scale.
// Registers  32 x 128: 128 acc + 64 operand + 16 partial + 24 filters of 255.
// Work       2 * 3 flops of float16 for 2 of float32. A multiprocessor computes 2048 flops of float16 in a cycle (sm_80), 1024
//            (sm_86, sm_89, sm_120; a GeForce half of it), 4096 (sm_90, where this loop gets 1800): 683, 341, 171 and 600 of
//            float32; FMAs reach 128 (sm_80) or 256. A warp issues 3 mma, 1 multiply-add and half an ldmatrix for a stage and
//            filter, and some 500 instructions for a stage besides. Filters take 85 bytes of shared memory an mma: 43 of 128
//            bytes a cycle where a scheduler's tensor core starts one every 8 cycles (sm_80).
// Measured   figure: opencnn-nhwc-tf32 tensor_gemm_sync/tf32 mean = 0.51
// Explored (H200, d4df8b1): 256 channels and filters: 436 flops a cycle and multiprocessor. An mma takes 1 / 1800 of a
//            cycle for each of its flops, the rest 10 cycles for each pixel, stage and 128 filters.
#pragma once

#include <device/ptx/memory.cuh>
#include <device/ptx/mma.cuh>
#include <device/ptx/sync.cuh>
#include <device/pipeline/outputs.cuh>
#include <kernels/mma_sync/warp_pixels.cuh>

namespace leanconv {

// What the tiles shared with other kernels ask of a tuning.
template <class Given>
struct WarpTuning : Given {
    static_assert(Given::warps % 2 == 0, "tiles come in 64 pixels");
    static constexpr int warpgroups = Given::warps / 2;
};

// The ring of packed filters, which all threads copy, an MMA tile at a time.
template <class Problem, class Tuning>
struct FilterRing {
    using F = TensorFilters<Problem, Tuning>;
    static constexpr int threads = 32 * Tuning::warps, stages = Tuning::filter_stages, total = F::stages * F::n_tiles;
    static_assert(stages >= 2, "one stage is multiplied with while others are under way");
    static_assert(F::stage_bytes % (16 * threads) == 0, "all threads copy equally much");
    unsigned char* shared;
    const unsigned char* fragments;
    int slot = 0;    // of the MMA tile that is multiplied with
    int copied = 0;  // MMA tiles whose copies have begun

    // Copies the next MMA tile, if there is one, into a slot. A group of copies is closed in either case.
    __device__ __forceinline__ void copy(int to) {
        if (copied < total) {
#pragma unroll
            for (int i = 0; i < F::stage_bytes / (16 * threads); ++i) {
                const int at = (i * threads + threadIdx.x) * 16;
                cp_async_16(shared + to * F::stage_bytes + at, fragments + at, true);
            }
            fragments += F::stage_bytes;
            ++copied;
        }
        cp_async_commit_group();
    }
    // NOTE: the slot before the current one is free: a barrier of all threads came since they multiplied with it.
    __device__ __forceinline__ void copy_next() { copy(slot == 0 ? stages - 1 : slot - 1); }
    // NOTE: the zero as in warp_pixels.cuh, for the addresses of fragments.
    __device__ __forceinline__ const unsigned char* current() const {
        return shared + slot * F::stage_bytes + zero_after(copied);
    }
    __device__ __forceinline__ void advance() { slot = slot + 1 == stages ? 0 : slot + 1; }
};

// Operand B of 8 filters and half of 64 reduction elements: two registers for each k16 step. The order in memory is that of
// wgmma: rows of 128 bytes, whose units of 16 bytes row i has permuted by i % 8.
__device__ __forceinline__ void load_filters(unsigned (&to)[2][2], const unsigned char* rows, int half, int lane) {
    unsigned four[4];
    ldmatrix(four, rows + lane % 8 * 128 + ((4 * half + lane / 8) ^ lane % 8) * 16);
    to[0][0] = four[0], to[0][1] = four[1];
    to[1][0] = four[2], to[1][1] = four[3];
}

// The products of one stage with `step` filters from number 16 * `first` on, added to the sums of 2 x 16 pixels.
template <class Problem, class Tuning, int n16>
__device__ __forceinline__ void multiply(float (&sums)[2][n16][8], int first,
                                         const WarpFragments<Problem, Tuning> (&pixels)[2], const unsigned char* filters,
                                         int lane) {
    using F = TensorFilters<Problem, Tuning>;
    constexpr int n8 = Tuning::step / 8;
    unsigned high[2][n8][2][2];
    float partial[2][n8][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < n8; ++n) load_filters(high[half][n], filters + n * 1024, half, lane);
    if constexpr (Tuning::products == 3) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 2 * n8; ++j)
                mma_f16(partial[j % 2][j / 2], pixels[j % 2].low[i], high[i / 2][j / 2][i % 2]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unsigned low[n8][2][2];
#pragma unroll
            for (int n = 0; n < n8; ++n) load_filters(low[n], filters + F::half_bytes + n * 1024, half, lane);
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < 2 * n8; ++j)
                    mma_f16(partial[j % 2][j / 2], pixels[j % 2].high[2 * half + i], low[j / 2][i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 2 * n8; ++j)
            mma_f16(partial[j % 2][j / 2], pixels[j % 2].high[i], high[i / 2][j / 2][i % 2]);
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int i = 0; i < 4 * n8; ++i) {
            float& sum = sums[j][first + i / 8][i % 8];
            sum = fmaf(partial[j][i / 4][i % 4], pixels[j].inverse_scale[i / 2 % 2], sum);
        }
}

template <class Problem, class Given>
__device__ __forceinline__ void tensor_gemm_sync(const float* x, const float* prepared_filters, Bias<Problem> bias, float* y,
                                                 long long batch) {
    using Tuning = WarpTuning<Given>;
    using F = TensorFilters<Problem, Tuning>;
    using Pixels = WarpPixels<Problem, Tuning>;
    using Ring = FilterRing<Problem, Tuning>;
    constexpr int n16 = F::filters / 16, steps = F::mma_n / Tuning::step;
    const TensorTiles<Problem, Tuning> tiles(batch);
    static_assert(TensorTiles<Problem, Tuning>::pixels == Tuning::warps * Pixels::pixels, "a warp has 32 pixels of the tile");
    const Offset<Problem> tile = blockIdx.x;
    const int group = tiles.group(tile), warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, t = lane % 4;
    const float* const prepared = prepared_filters + Problem::first_prepared;
    const SplitHeader header = *reinterpret_cast<const SplitHeader*>(prepared);
    const bool scaled = reinterpret_cast<const unsigned*>(prepared)[F::flags_at + group] != 0;
    unsigned char* const shared = shared_memory();
    const Pixels pixels(x, batch, tiles.first_pixel(tile) + threadIdx.x, group, lane, shared + warp * Pixels::bytes);
    Ring ring{shared + Tuning::warps * Pixels::bytes, reinterpret_cast<const unsigned char*>(prepared + F::fragments_at) +
                                                          F::fragment(group, tiles.filters(tile), 0, 0)};
    float sums[2][n16][8] = {};

    // In the order of their groups: pixels of stage s + 1, then as many MMA tiles of filters as stage s multiplies with.
    pixels.copy(0);
    cp_async_commit_group();
#pragma unroll
    for (int i = 0; i < Ring::stages - 1; ++i) ring.copy(i);
#pragma unroll 1
    for (int stage = 0; stage < F::stages; ++stage) {
        cp_async_wait_group<(F::n_tiles < Ring::stages - 1 ? F::n_tiles : Ring::stages - 1)>();
        __syncwarp();
        const float* const factors = prepared + F::factors_at + (group * F::stages + stage) * split_depth;
        WarpFragments<Problem, Tuning> fragments[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) fragments[i].load(pixels, 16 * i + row, t, scaled, factors, header);
        __syncwarp();  // the stage has been read
        if (stage + 1 < F::stages) pixels.copy(stage + 1);
        cp_async_commit_group();
#pragma unroll
        for (int mma_tile = 0; mma_tile < F::n_tiles; ++mma_tile) {
            // NOTE: the first MMA tiles were copied before the pixels of the next stage, which are not waited for.
            if (mma_tile < Ring::stages - 1) cp_async_wait_group<Ring::stages - 1>();
            else cp_async_wait_group<Ring::stages - 2>();
            __syncthreads();
            ring.copy_next();
            const unsigned char* const filters = ring.current();
#pragma unroll
            for (int i = 0; i < steps; ++i)
                multiply<Problem, Tuning>(sums, (mma_tile * steps + i) * (Tuning::step / 16), fragments,
                                          filters + i * Tuning::step * 128, lane);
            ring.advance();
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
        store_sums<Problem, Tuning, false>(sums[i], 0, prepared, bias, y, batch, tiles, tile, warp * 32 + 16 * i + row, t);
}

}  // namespace leanconv
