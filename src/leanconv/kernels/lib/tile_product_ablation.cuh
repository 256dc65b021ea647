// The main loop of lib/tile_product.cuh without one of the things that make it fast, to measure what each is worth:
// Tuning::prefetch off, a step is loaded, waited for and computed on; Tuning::micro_kernel off, every product reads both
// its operands from shared memory instead of registers. (Tuning::vector_loads off, shared memory is read in words of 32
// bits: load_fragments in lib/micro_kernel.cuh.)
//
// Measured on an H200 (ablation of suite im2win): 0.88 of the speed without prefetch, 0.82 without vector loads, 0.18
// without the micro-kernel.
#pragma once

#include <lib/tile_product.cuh>

namespace leanconv {

template <class Problem, class Tuning, class Filters, class Pixels>
struct TileProductAblation : TileProduct<Problem, Tuning, Filters, Pixels> {
    using Whole = TileProduct<Problem, Tuning, Filters, Pixels>;
    using Whole::Whole;
    using Sum = typename Whole::Sum;
    static constexpr int depth = Whole::depth;
    static constexpr int stages = Tuning::prefetch ? Tuning::stages : 1;

    __device__ __forceinline__ void multiply(Sum (&acc)[Tuning::thread_k][Tuning::thread_pixels], int step, int row) {
        if constexpr (Tuning::micro_kernel) {
            Whole::multiply(acc, row);
        } else {
            constexpr int lanes = Tiling<Tuning>::lanes_k;
            const volatile float* from = this->stage_k(step) + row * Filters::pitch + this->at_k;
#pragma unroll
            for (int i = 0; i < Tuning::thread_k; ++i)
#pragma unroll
                for (int j = 0; j < Tuning::thread_pixels; ++j) {
                    const volatile float* pixel = this->x.address(this->stage_pixels(step), row, j);
                    acc[i][j] = product_add<Problem>(from[i / 4 * lanes * 4 + i % 4], *pixel, acc[i][j]);
                }
        }
    }

    __device__ __forceinline__ void run(Sum (&acc)[Tuning::thread_k][Tuning::thread_pixels], int steps) {
        if constexpr (!Tuning::prefetch) plain(acc, steps);
        else if constexpr (!Tuning::micro_kernel) from_shared(acc, steps);
        else Whole::run(acc, steps);
    }

    // One stage, stage 0 at every step.
    __device__ __forceinline__ void plain(Sum (&acc)[Tuning::thread_k][Tuning::thread_pixels], int steps) {
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            this->pixels.fetch();
            this->load(0);
            this->store(0);
            cp_async_commit_group();
            cp_async_wait_group<0>();
            __syncthreads();
#pragma unroll
            for (int row = 0; row < depth; ++row) {
                if constexpr (Tuning::micro_kernel) {
                    this->read(0, row);
                    this->read_late(0, row);
                }
                multiply(acc, 0, row);
            }
            __syncthreads();
        }
    }

    // Without registers in between, a stage is in use until its last row has been multiplied.
    __device__ __forceinline__ void from_shared(Sum (&acc)[Tuning::thread_k][Tuning::thread_pixels], int steps) {
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
