// im2win and im2win_fused without fragments in registers: every product reads both its operands from shared memory.
#pragma once

#define TileProduct TileProductOfCalls
#include <kernels/simt/tile_product.cuh>
#undef TileProduct

namespace leanconv {

template <class Problem, class Tuning, class Filters, class Pixels>
struct TileProduct : TileProductOfCalls<Problem, Tuning, Filters, Pixels> {
    using Whole = TileProductOfCalls<Problem, Tuning, Filters, Pixels>;
    using Whole::depth;
    using Whole::stages;
    using Whole::Whole;
    using Sum = typename Problem::sum;

    __device__ __forceinline__ void multiply(Sum (&acc)[Tuning::thread_k][Tuning::thread_pixels], int step, int row) {
        constexpr int lanes = Tiling<Tuning>::lanes_k;
        const volatile float* from = this->stage_k(step) + row * Filters::pitch + this->at_k;
#pragma unroll
        for (int i = 0; i < Tuning::thread_k; ++i)
#pragma unroll
            for (int j = 0; j < Tuning::thread_pixels; ++j) {
                const volatile float* pixel = address(this->x, this->stage_pixels(step), row, j);
                acc[i][j] = product_add<Problem>(from[i / 4 * lanes * 4 + i % 4], *pixel, acc[i][j]);
            }
    }

    // A stage is in use until its last row has been multiplied.
    __device__ __forceinline__ void run(Sum (&acc)[Tuning::thread_k][Tuning::thread_pixels], int steps) {
#pragma unroll
        for (int step = 0; step < stages - 1; ++step) {
            if (step < steps) {
                this->pixels.fetch();
                this->load(step);
                this->store(step);
            }
            cp_async_commit_group();
        }
        cp_async_wait_group<stages - 2>();
        __syncthreads();
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
#pragma unroll
            for (int row = 0; row < depth; ++row) {
                multiply(acc, step, row);
                if (Whole::held && row == Whole::store_row) this->store(step + stages - 1);
                if (row == depth - 1) {
                    cp_async_wait_group<stages - 2>();
                    __syncthreads();
                }
                if (row == 0) this->pixels.fetch();
                if (row == 1) {
                    if (step + stages - 1 < steps) this->load(step + stages - 1);
                    cp_async_commit_group();
                }
            }
        }
    }
};

}  // namespace leanconv

#include <kernels/papers/im2win.cuh>
#include <kernels/simt/im2win_fused.cuh>

namespace leanconv {

// Where the pixel of output j lies for reduction index `row`.
template <class Tuning>
__device__ __forceinline__ const float* address(const PixelRows<Tuning>& x, const float* stage, int row, int j) {
    using Rows = PixelRows<Tuning>;
    return stage + row * Rows::pitch + x.at + j / 4 * Rows::lanes * 4 + j % 4;
}

template <class Problem, class Tuning>
__device__ __forceinline__ const float* address(const RunRows<Problem, Tuning>& x, const float* stage, int row, int j) {
    using R = Runs<Problem, Tuning>;
    const int e = x.element(row, j), lanes = Tiling<Tuning>::lanes_pixels;
    return stage + row / Problem::s * R::line_floats + e / 4 * R::fragments * 4 + x.at + j / 4 * lanes * 4 + e % 4;
}

}  // namespace leanconv
