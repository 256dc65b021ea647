// The main loop of all tiled products: filters and pixels arrive in shared memory some reduction steps ahead, and every
// thread accumulates its part of the tile in registers. The pixel loader decides how pixels arrive, and its Rows how a
// thread holds them. Words of four 8-bit integers are moved as floats, and are words again only where they are multiplied.
//
// Floats are copied past the registers, and a copy may take some steps. Elements of 16 bits are loaded into registers
// early in a step, and converted and put into shared memory near its end: the FMAs in between, 4 to 12 rows of them,
// hide the latency of the loads, so two stages are enough.
#pragma once

#include <device/element.cuh>
#include <device/index.cuh>
#include <device/ptx/memory.cuh>
#include <kernels/simt/tile.cuh>

namespace leanconv {

// A weight times a pixel, as shared memory has them, added to `sum`.
template <class Problem>
__device__ __forceinline__ typename Problem::sum product_add(float w, float x, typename Problem::sum sum) {
    if constexpr (integer<typename Problem::sum>) {
        const typename Problem::filter weights{__float_as_uint(w)};
        return multiply_add(weights, typename Problem::element{__float_as_uint(x)}, sum);
    } else {
        return multiply_add(w, x, sum);
    }
}

// Explored (H200, 0f7d648, suite im2win): im2win keeps 0.89 of its speed and im2win_fused 0.97 where a step is
// loaded only when the one before has been computed; im2win_fused keeps 0.80 where shared memory is read in words of 32
// bits, and 0.17 where every product reads both its operands from there.
template <class Problem, class Tuning, class Filters, class Pixels>
struct TileProduct {
    using Tiles = Tiling<Tuning>;
    using Rows = typename Pixels::Rows;
    static constexpr int depth = Tuning::tile_reduction;
    static constexpr int stages = Tuning::stages;
    static constexpr int stage_floats = Filters::stage_floats + Rows::stage_floats;
    static constexpr bool held = through_registers<Problem>;  // between load() and store(), in registers
    static constexpr int store_row = depth > 4 ? depth - 2 : depth - 1;
    using Sum = typename Problem::sum;
    static_assert(sizeof(Sum) == 4, "operands are floats in shared memory, or words that pass as such, and so are sums");
    static_assert(depth % 2 == 0 && depth >= 4, "fragments alternate between two register buffers across steps");
    static_assert(stage_floats % 4 == 0 && Filters::stage_floats % 4 == 0,
                  "stages, and the table behind them, begin where loads and copies of 128 bits may");
    static_assert(stages >= 2, "one stage is computed on while others are under way");

    float* tiles;
    Filters& filters;
    Pixels& pixels;
    Rows x;
    float w[2][Tuning::thread_k];
    int at_k;

    __device__ __forceinline__ TileProduct(float* shared, Filters& filters, Pixels& pixels, const Tiles& tiling)
        : tiles(shared), filters(filters), pixels(pixels), x(tiling), at_k(tiling.k + tiling.lane_k * 4) {}

    __device__ __forceinline__ float* stage_k(int step) { return tiles + step % stages * stage_floats; }
    __device__ __forceinline__ float* stage_pixels(int step) { return stage_k(step) + Filters::stage_floats; }

    __device__ __forceinline__ void load(int step) {
        filters.load(stage_k(step));
        pixels.load(stage_pixels(step));
    }

    __device__ __forceinline__ void store(int step) {
        if constexpr (held) {
            filters.store(stage_k(step));
            pixels.store(stage_pixels(step));
        }
    }

    __device__ __forceinline__ void read(int step, int row) {
        load_fragments<Tiles::lanes_k * 4>(w[row % 2], stage_k(step) + row * Filters::pitch + at_k);
        x.read(stage_pixels(step), row);
    }

    // What has to wait until the row before has been multiplied, for want of registers.
    __device__ __forceinline__ void read_late(int step, int row) {
        x.read_late(stage_pixels(step), row);
    }

    __device__ __forceinline__ void multiply(Sum (&acc)[Tuning::thread_k][Tuning::thread_pixels], int row) {
        outer_product<Rows::along_k, Tuning::thread_k, Tuning::thread_pixels>([&](int i, int j) {
            acc[i][j] = product_add<Problem>(w[row % 2][i], x.value(row, j), acc[i][j]);
        });
    }

    // Add `steps` reduction steps to acc. The caller has put a barrier after the loaders' construction.
    __device__ __forceinline__ void run(Sum (&acc)[Tuning::thread_k][Tuning::thread_pixels], int steps) {
#pragma unroll
        for (int step = 0; step < stages - 1; ++step) {
            if (step < steps) {
                pixels.fetch();
                load(step);
                store(step);
            }
            cp_async_commit_group();
        }
        cp_async_wait_group<stages - 2>();
        __syncthreads();
        read(0, 0);
        read_late(0, 0);
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
#pragma unroll
            for (int row = 0; row < depth; ++row) {
                // Behind the last step these are old elements, for a stage that nobody reads: cheaper than a branch, which
                // would keep the stores apart from the FMAs.
                if (held && row == store_row) store(step + stages - 1);
                if (row == depth - 1) {
                    // The next step has landed for everybody, and everybody has read the last of the one before.
                    cp_async_wait_group<stages - 2>();
                    __syncthreads();
                    read(step + 1, 0);
                } else {
                    read(step, row + 1);
                }
                if (row == 0) pixels.fetch();
                if (row == 1) {
                    // The stage that the step before this one was computed on is free: see the barrier above.
                    if (step + stages - 1 < steps) load(step + stages - 1);
                    cp_async_commit_group();
                    // NOTE: costs nothing, and keeps the loads here: the compiler put the FMAs of all rows before them.
                    if constexpr (held) __syncwarp();
                }
                multiply(acc, row);
                if (row == depth - 1) read_late(step + 1, 0);
                else read_late(step, row + 1);
            }
        }
    }
};

}  // namespace leanconv
