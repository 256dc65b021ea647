// im2win and im2win_fused without prefetch: a step is loaded, waited for and computed on, in one stage.
#pragma once

#define TileProduct TileProductOfCalls
#include <kernels/simt/tile_product.cuh>
#undef TileProduct

namespace leanconv {

template <class Problem, class Tuning, class Filters, class Pixels>
struct TileProduct : TileProductOfCalls<Problem, Tuning, Filters, Pixels> {
    using TileProductOfCalls<Problem, Tuning, Filters, Pixels>::TileProductOfCalls;
    using Sum = typename Problem::sum;
    static constexpr int stages = 1;

    // Stage 0 at every step.
    __device__ __forceinline__ void run(Sum (&acc)[Tuning::thread_k][Tuning::thread_pixels], int steps) {
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            this->pixels.fetch();
            this->load(0);
            this->store(0);
            cp_async_commit_group();
            cp_async_wait_group<0>();
            __syncthreads();
#pragma unroll
            for (int row = 0; row < Tuning::tile_reduction; ++row) {
                this->read(0, row);
                this->read_late(0, row);
                this->multiply(acc, row);
            }
            __syncthreads();
        }
    }
};

}  // namespace leanconv

#include <kernels/papers/im2win.cuh>
#include <kernels/simt/im2win_fused.cuh>
