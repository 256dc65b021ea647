// Implicit GEMM on tensor cores in float32's accuracy (or TF32's), by products of single warps: for GPUs from compute
// capability 8.0 on that have no wgmma.
//
// The arithmetic is that of tensor_gemm.cuh: each float32 is the sum of two float16 (tensor_split.cuh), a product three
// products, so that 2 · 3 flops of float16 make 2 of float32. Of dense float16 a multiprocessor computes in a cycle
//   2048 flops (sm_80), 1024 (sm_86, sm_89, sm_120; a GeForce half of it), 4096 (sm_90, where this loop gets 1800)
// which bounds float32-grade products to 683, 341, 171 and 600 flops a cycle; FMAs to 128 (sm_80) or 256.
//
// A warp computes 32 pixels and all filters of the tile: each pixel is converted by one warp. Per 64 reduction elements it
//   1. loads its 64 values a lane, finds the largest of each row (2 shuffles), scales and splits them: 64 registers
//   2. starts the copies of its next 64 elements of 32 pixels (tensor_warp_pixels.cuh)
//   3. for each chunk of filters, which the block copies in turn into a ring, and each 16 of them (`step`): 48 products
//      m16n8k16 into 16 partial sums, the small products first; adds these, times the row's inverse scale, to its sums
// 32 x 128: 128 sums, 64 registers of fragments, 16 partial sums and 24 of filters, of 255 registers.
// Per stage and filter a warp issues 3 products, 1 multiply-add and half an ldmatrix; per stage some 500 for steps 1 and 2.
// Fragments of filters take 85 bytes of shared memory a product: 43 of its 128 bytes a cycle where a scheduler's tensor core
// starts a product every 8 cycles (sm_80).
// Measured on an H200 (256 to 256 filters 3 x 3, NHWC): 114 TFLOP/s, 436 flops a cycle and multiprocessor; with one product
// 220. A product takes 1 / 1800 of a cycle for each of its flops, the rest 10 cycles for each pixel, stage and 128 filters.
#pragma once

#include <device/ptx/barrier.cuh>
#include <device/ptx/copy.cuh>
#include <device/ptx/mma.cuh>
#include <device/ptx/shared.cuh>
#include <kernels/hopper_fp32/tensor_output.cuh>
#include <kernels/mma_sync/tensor_warp_pixels.cuh>

namespace leanconv {

// What the tiles shared with other kernels ask of a tuning.
template <class Given>
struct WarpTuning : Given {
    static_assert(Given::warps % 2 == 0, "tiles come in 64 pixels");
    static constexpr int warpgroups = Given::warps / 2, split = 1;
    static constexpr bool flat = false;
};

// The ring of prepared filters, which all threads copy, a chunk at a time.
template <class Problem, class Tuning>
struct FilterRing {
    using F = TensorFilters<Problem, Tuning>;
    static constexpr int threads = 32 * Tuning::warps, stages = Tuning::filter_stages, total = F::stages * F::chunks;
    static_assert(stages >= 2, "one stage is multiplied with while others are under way");
    static_assert(F::stage_bytes % (16 * threads) == 0, "all threads copy equally much");
    unsigned char* shared;
    const unsigned char* fragments;
    int slot = 0;    // of the chunk that is multiplied with
    int copied = 0;  // chunks whose copies have begun

    // Copies the next chunk, if there is one, into a slot. A group of copies is closed in either case.
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
    // NOTE: the slot before the current one is free: all threads have met since they multiplied with it.
    __device__ __forceinline__ void copy_next() { copy(slot == 0 ? stages - 1 : slot - 1); }
    // NOTE: the zero as in tensor_warp_pixels.cuh, for the addresses of fragments.
    __device__ __forceinline__ const unsigned char* current() const {
        return shared + slot * F::stage_bytes + zero_after(copied);
    }
    __device__ __forceinline__ void advance() { slot = slot + 1 == stages ? 0 : slot + 1; }
};

// Operand B of 8 filters and half of 64 reduction elements: two registers for each sixteen. The order in memory is that of
// wgmma: rows of 128 bytes, whose units of 16 bytes row i has permuted by i % 8.
__device__ __forceinline__ void load_filters(unsigned (&to)[2][2], const unsigned char* rows, int half, int lane) {
    unsigned four[4];
    ldmatrix(four, rows + lane % 8 * 128 + ((4 * half + lane / 8) ^ lane % 8) * 16);
    to[0][0] = four[0], to[0][1] = four[1];
    to[1][0] = four[2], to[1][1] = four[3];
}

// The products of one stage with `step` filters from the sixteen `first` on, added to the sums of 2 x 16 pixels.
template <class Problem, class Tuning, int sixteens>
__device__ __forceinline__ void multiply(float (&sums)[2][sixteens][8], int first,
                                         const WarpFragments<Problem, Tuning> (&pixels)[2], const unsigned char* filters,
                                         int lane) {
    using F = TensorFilters<Problem, Tuning>;
    constexpr int eights = Tuning::step / 8;
    unsigned high[2][eights][2][2];
    float partial[2][eights][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < eights; ++n) load_filters(high[half][n], filters + n * 1024, half, lane);
    if constexpr (Tuning::products == 3) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 2 * eights; ++j)
                mma_f16(partial[j % 2][j / 2], pixels[j % 2].low[i], high[i / 2][j / 2][i % 2]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unsigned low[eights][2][2];
#pragma unroll
            for (int n = 0; n < eights; ++n) load_filters(low[n], filters + F::half_bytes + n * 1024, half, lane);
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < 2 * eights; ++j)
                    mma_f16(partial[j % 2][j / 2], pixels[j % 2].high[2 * half + i], low[j / 2][i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 2 * eights; ++j)
            mma_f16(partial[j % 2][j / 2], pixels[j % 2].high[i], high[i / 2][j / 2][i % 2]);
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int i = 0; i < 4 * eights; ++i) {
            float& sum = sums[j][first + i / 8][i % 8];
            sum = fmaf(partial[j][i / 4][i % 4], pixels[j].down[i / 2 % 2], sum);
        }
}

template <class Problem, class Given>
__device__ __forceinline__ void tensor_gemm_sync(const float* x, const float* prepared_filters, const float* bias, float* y,
                                                 long long batch) {
    using Tuning = WarpTuning<Given>;
    using F = TensorFilters<Problem, Tuning>;
    using Pixels = WarpPixels<Problem, Tuning>;
    using Ring = FilterRing<Problem, Tuning>;
    constexpr int sixteens = F::filters / 16, steps = F::chunk / Tuning::step;
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
    float sums[2][sixteens][8] = {};

    // In the order of their groups: pixels of stage s + 1, then as many chunks of filters as stage s multiplies with.
    pixels.copy(0);
    cp_async_commit_group();
#pragma unroll
    for (int i = 0; i < Ring::stages - 1; ++i) ring.copy(i);
#pragma unroll 1
    for (int stage = 0; stage < F::stages; ++stage) {
        cp_async_wait_group<(F::chunks < Ring::stages - 1 ? F::chunks : Ring::stages - 1)>();
        __syncwarp();
        const float* const factors = prepared + F::factors_at + (group * F::stages + stage) * split_depth;
        WarpFragments<Problem, Tuning> fragments[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) fragments[i].load(pixels, 16 * i + row, t, scaled, factors, header);
        __syncwarp();  // the stage has been read
        if (stage + 1 < F::stages) pixels.copy(stage + 1);
        cp_async_commit_group();
#pragma unroll
        for (int chunk = 0; chunk < F::chunks; ++chunk) {
            // NOTE: the first chunks were copied before the pixels of the next stage, which are not waited for.
            if (chunk < Ring::stages - 1) cp_async_wait_group<Ring::stages - 1>();
            else cp_async_wait_group<Ring::stages - 2>();
            __syncthreads();
            ring.copy_next();
            const unsigned char* const filters = ring.current();
#pragma unroll
            for (int i = 0; i < steps; ++i)
                multiply<Problem, Tuning>(sums, (chunk * steps + i) * (Tuning::step / 16), fragments,
                                          filters + i * Tuning::step * 128, lane);
            ring.advance();
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
        store_sums<Problem, Tuning>(sums[i], 0, prepared, bias, y, batch, tiles, tile, warp * 32 + 16 * i + row, t);
}

}  // namespace leanconv
