// Im2col-Winograd, gamma_alpha(n, r): one-dimensional Winograd along the rows, fused into one kernel. Any filter height,
// and any width: wide rows are cut into pieces of r columns, each one more filter row whose pixels begin further right.
//
// A tile of n outputs of a row takes alpha = n + S - 1 products for each filter row and channel instead of n * S: 2.25
// times fewer for (6,3), 2.5 for (5,4) and (4,5), 4.5 for (9,8) and (8,9). Beside them, per filter row, channel and
// tile: (rows + R - 1) / (rows * R) input transforms for each tile_k filters, of about 27 (alpha 8) or 120 (alpha 16)
// operations. No workspace but the transformed filters, alpha / S times the filters' size.
// Floor: FMA issue. A product loop of this kind reaches 47 TFLOP/s of 67 on an H200 (implicit GEMM in NHWC): 2.25 times
// that would be 106 effective TFLOP/s for (6,3). Measured in NHWC (suite winograd1d): 68 to 90 for (6,3), up to 105 for
// (5,4), up to 132 for (9,8) and (8,9). In pieces, 2.1 to 2.5 times fewer products: 63 to 105 for 8 and 9 columns, 65 to
// 93 for 31 x 31, where implicit GEMM has 39 to 47 and 32 to 43.
#pragma once

#include <kernels/simt/winograd_convolution.cuh>
#include <kernels/simt/winograd_filters.cuh>
#include <kernels/simt/winograd_transform.cuh>

namespace leanconv {

template <class Problem>
struct Transform1d {
    static __device__ __forceinline__ void input(float (&state)[Problem::states], const float (&x)[Problem::states]) {
        multiply_row_pairs<typename Problem::bt>(state, x);
    }
    static __device__ __forceinline__ void output(float (&y)[Problem::out_w], const float (&sum)[Problem::states]) {
        multiply_column_pairs<typename Problem::at>(y, sum);
    }
    static constexpr int width = Problem::tile_w - Problem::out_w + 1;  // of a filter row, or of a piece of it
    static __device__ __forceinline__ void filter(float (&state)[Problem::states], const float (&w)[width]) {
        multiply_row_pairs<typename Problem::g>(state, w);
    }
};

template <class Problem, class Tuning>
__device__ __forceinline__ void winograd1d(const float* __restrict__ x, const float* __restrict__ prepared,
                                           const float* __restrict__ bias, float* __restrict__ y, long long batch) {
    winograd_convolution<Problem, Tuning, Transform1d<Problem>>(x, prepared, bias, y, batch);
}

template <class Problem, class Tuning>
__device__ __forceinline__ void winograd1d_filters(const float* __restrict__ w, float* __restrict__ prepared) {
    winograd_filters<Problem, Tuning, Transform1d<Problem>>(w, prepared);
}

}  // namespace leanconv
