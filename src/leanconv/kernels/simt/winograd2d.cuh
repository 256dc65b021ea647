// winograd2d: openCNN's two-dimensional Winograd F(m x m, 3 x 3), fused into one kernel (Castro et al. 2021): input
// transform, one outer product for each of the alpha x alpha states (alpha = m + 2), output transform. No workspace; packed
// weights, 16/9 or 36/9 of the filters' size, are the only extra memory.
//
//   y = A^T [ sum over c of (G w[c] G^T) o (B^T x[c] B) ] A      for each tile of m x m outputs
//
// Requires   float32; 3 x 3 filters of unit stride and dilation.
// Volumes    slices of a filter are further steps, and c above is (t, c).
// Numerics   float32; m = 4 is for "relaxed".
// CTA tile, roles, pipelines: those of winograd1d, with one step a chunk of channels.
// Work       counted, m = 2: 16 products a tile and channel instead of 36, 2.25 times fewer; m = 4: 36 instead of 144,
//            4 times fewer. Per channel and tile, for each tile_k filters, an input transform of 32 (m = 2) or about
//            150 (m = 4) operations.
// Floor      FMA issue, as implicit_gemm.
// Measured   figure: opencnn winograd2d/pytorch mean = 1.31
//            figure: opencnn winograd2d/lean mean = 2.05
//            figure: opencnn winograd2d tflops-most = 72.6
//            figure: opencnn-chwn winograd2d tflops-most = 83.0
#pragma once

#include <kernels/simt/winograd_convolution.cuh>
#include <kernels/simt/winograd_filters.cuh>
#include <kernels/simt/winograd_transform.cuh>

namespace leanconv {

// y = M x for a matrix of either kind.
template <class M>
__device__ __forceinline__ void multiply_pairs(float (&y)[M::rows], const float (&x)[M::columns]) {
    if constexpr (M::rows_in_pairs()) multiply_row_pairs<M>(y, x);
    else multiply_column_pairs<M>(y, x);
}

// y = M x M^T, both row by row.
template <class M>
__device__ __forceinline__ void multiply_both_sides(float (&y)[M::rows * M::rows],
                                                    const float (&x)[M::columns * M::columns]) {
    float half[M::rows][M::columns];  // M x
#pragma unroll
    for (int j = 0; j < M::columns; ++j) {
        float from[M::columns], to[M::rows];
#pragma unroll
        for (int i = 0; i < M::columns; ++i) from[i] = x[i * M::columns + j];
        multiply_pairs<M>(to, from);
#pragma unroll
        for (int i = 0; i < M::rows; ++i) half[i][j] = to[i];
    }
#pragma unroll
    for (int i = 0; i < M::rows; ++i) {
        float to[M::rows];
        multiply_pairs<M>(to, half[i]);
#pragma unroll
        for (int j = 0; j < M::rows; ++j) y[i * M::rows + j] = to[j];
    }
}

template <class Problem>
struct Transform2d {
    static constexpr int outputs = Problem::out_h * Problem::out_w;
    static_assert(Problem::r == 3 && Problem::s == 3 && Problem::taps == 1, "a filter is transformed as a whole");

    static __device__ __forceinline__ void input(float (&state)[Problem::states], const float (&x)[Problem::states]) {
        multiply_both_sides<typename Problem::bt>(state, x);
    }
    static __device__ __forceinline__ void output(float (&y)[outputs], const float (&sum)[Problem::states]) {
        multiply_both_sides<typename Problem::at>(y, sum);
    }
    static __device__ __forceinline__ void filter(float (&state)[Problem::states], const float (&w)[9]) {
        multiply_both_sides<typename Problem::g>(state, w);
    }
};

template <class Problem, class Tuning>
__device__ __forceinline__ void winograd2d(const float* __restrict__ x, const float* __restrict__ prepared,
                                           BiasIn<Problem> bias, float* __restrict__ y, long long batch) {
    static_assert(Problem::stride_h == 1 && Problem::stride_w == 1 && Problem::dilation_h == 1 &&
                      Problem::dilation_w == 1, "the outputs of a tile read neighbouring pixels");
    winograd_convolution<Problem, Tuning, Transform2d<Problem>>(x, prepared, bias, y, batch);
}

template <class Problem, class Tuning>
__device__ __forceinline__ void winograd2d_filters(const float* __restrict__ w, float* __restrict__ prepared) {
    winograd_filters<Problem, Tuning, Transform2d<Problem>>(w, prepared);
}

}  // namespace leanconv
