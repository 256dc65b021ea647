// Implicit GEMM: the convolution as a matrix product whose im2col matrix is formed on the way into shared memory and
// never written down (im2win paper, Algorithm 1; Chetlur et al. 2014). No workspace.
//
// Arithmetic per output: 2 * C/g * R * S flops. A block of tile_k filters x tile_pixels pixels reads, per reduction
// index, tile_k + tile_pixels floats for 2 * tile_k * tile_pixels flops: 128 x 128 makes 32 flops a byte from L2, so
// large layers are bound by FMA issue. A thread of 8x8 outputs issues 64 FMAs, 4 shared loads and about 4 other
// instructions per reduction index: at most 89 % of the FP32 peak; cuBLAS reaches 75 % (50 of 67 TFLOP/s on an H200),
// and that is the figure to approach. Layers with few channels (C * R * S < 64 or so) are bound by writing the output.
#pragma once

#include <lib/epilogue.cuh>
#include <lib/micro_kernel.cuh>
#include <lib/ptx.cuh>
#include <lib/tile_loader.cuh>

namespace leanconv {

// Block b computes tile b % tiles_k of filters, of group (b / tiles_k) % groups, for pixel tile b / tiles_k / groups:
// blocks that run together share their pixels.
template <class Problem, class Tuning>
__device__ __forceinline__ void implicit_gemm(const float* __restrict__ x, const float* __restrict__ w,
                                              const float* __restrict__ bias, float* __restrict__ y, long long batch) {
    using Tiles = Tiling<Tuning>;
    constexpr bool dealt = !Problem::vector_store;
    constexpr bool nhwc = Problem::nhwc;
    using Filters = FilterLoader<Problem, Tuning, nhwc && dealt>;
    using Pixels = typename Select<nhwc, PixelLoaderNHWC<Problem, Tuning, false>,
                                   PixelLoaderNCHW<Problem, Tuning, dealt>>::type;
    constexpr int depth = Tuning::tile_reduction, stages = Tuning::stages;
    constexpr int pitch_k = row_pitch<Tuning::tile_k>, pitch_pixels = row_pitch<Tuning::tile_pixels>;
    constexpr int stage_floats = depth * (pitch_k + pitch_pixels);
    constexpr int tiles_k = ceil_div(Problem::group_k, Tuning::tile_k);
    constexpr int steps = ceil_div(Reduction<Problem>::size, depth);
    static_assert(depth % 2 == 0 && depth >= 4, "fragments alternate between two register buffers across steps");
    static_assert(stages >= 2, "one stage is computed on while others are under way");

    float* const tiles = reinterpret_cast<float*>(shared_memory());
    void* const scratch = tiles + stages * stage_floats;
    const auto stage_k = [&](int step) { return tiles + step % stages * stage_floats; };
    const auto stage_pixels = [&](int step) { return stage_k(step) + depth * pitch_k; };

    const Tiles tiling;
    const int tile_k = blockIdx.x % tiles_k;
    const int group = blockIdx.x / tiles_k % Problem::groups;
    const Offset<Problem> first_pixel =
        static_cast<Offset<Problem>>(blockIdx.x / tiles_k / Problem::groups) * Tuning::tile_pixels;
    const Offset<Problem> pixels = static_cast<Offset<Problem>>(batch) * (Problem::p * Problem::q);

    Filters filters(w, group, tile_k);
    Pixels image(x, pixels, first_pixel, group, scratch);
    __syncthreads();  // the pixel loader's table

#pragma unroll
    for (int step = 0; step < stages - 1; ++step) {
        if (step < steps) {
            image.fetch();
            filters.load(stage_k(step));
            image.load(stage_pixels(step));
        }
        cp_async_commit_group();
    }

    float acc[Tuning::thread_k][Tuning::thread_pixels] = {};
    float w_fragment[2][Tuning::thread_k], x_fragment[2][Tuning::thread_pixels];
    const int at_k = tiling.k + tiling.lane_k * 4, at_pixel = tiling.pixel + tiling.lane_pixel * 4;
    const auto read = [&](int step, int row, int buffer) {
        load_fragments<Tuning::thread_k, Tiles::lanes_k * 4>(w_fragment[buffer], stage_k(step) + row * pitch_k + at_k);
        load_fragments<Tuning::thread_pixels, Tiles::lanes_pixels * 4>(
            x_fragment[buffer], stage_pixels(step) + row * pitch_pixels + at_pixel);
    };

    cp_async_wait_group<stages - 2>();
    __syncthreads();
    read(0, 0, 0);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
#pragma unroll
        for (int row = 0; row < depth; ++row) {
            if (row == depth - 1) {
                // The next step has landed for everybody, and everybody has read the last of the step before this one.
                cp_async_wait_group<stages - 2>();
                __syncthreads();
                read(step + 1, 0, (row + 1) % 2);
            } else {
                read(step, row + 1, (row + 1) % 2);
            }
            if (row == 0) image.fetch();
            if (row == 1) {
                // The stage that the step before this one was computed on is free: see the barrier above.
                if (step + stages - 1 < steps) {
                    filters.load(stage_k(step + stages - 1));
                    image.load(stage_pixels(step + stages - 1));
                }
                cp_async_commit_group();
            }
            outer_product(acc, w_fragment[row % 2], x_fragment[row % 2]);
        }
    }
    store_tile<Problem, Tuning, dealt>(acc, tiling, bias, y, pixels, first_pixel, group, tile_k * Tuning::tile_k);
}

}  // namespace leanconv
