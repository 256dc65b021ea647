// winograd1d: Im2col-Winograd, gamma_alpha(n, r): one-dimensional Winograd along the rows, fused into one kernel (Zhang et
// al. 2024). Any filter height, and any width from 2 on: wide rows are cut into column blocks of r columns, each one more
// filter row whose pixels begin further right. No workspace; packed weights, alpha / S times the filters' size for each kernel
// that a row is cut for (alpha * ceil(S / r) / S with column blocks), are the only extra memory.
//
//   y = A^T * sum over c, r of (G w[c, r]) o (B^T x[c, row + r])      for each tile of n outputs of a row
//
// Requires   float32; unit stride, along the depth any in the forward pass; unit dilation along the row; of volumes at most 12
//            filter rows; at precision fp32, of filters of 4 columns and more, 128 products an output in the mean.
// Volumes    each slice of a filter is a row block, one after the other; r above is (t, r).
// Numerics   float32; alpha = 16 keeps sums of one step apart (Tuning::promoted).
// CTA tile   tile_k filters x `tiles` tiles of outputs (`rows` rows of them) x all alpha states x `channels` a step
// Roles      a warp multiplies the states of its number; with Tuning::producers four more warps copy and transform
// Pipelines  filters and raw pixels   `stages` steps of cp.async (producers: named barriers full, empty)
//            transformed tiles        two steps of channels, a part of the next one made with each filter row
// One stage  wait for the copies; barrier; per channel read fragments and multiply; after the first channel begin later
//            copies, after the second transform a part of the next tiles (winograd_product.cuh)
// Work       counted: alpha = n + S - 1 products a tile, filter row and channel instead of n * S: 2.25 times fewer for
//            (6,3), 2.5 for (5,4) and (4,5), 4.5 for (9,8) and (8,9). Per filter row, channel and tile, for each tile_k
//            filters, (rows + R - 1) / (rows * R) input transforms of about 27 (alpha 8) or 120 (alpha 16) operations.
// Floor      FMA issue, as implicit_gemm.
// Measured   figure: winograd1d winograd1d/pytorch mean only=g8* = 1.51
//            figure: winograd1d winograd1d/implicit_gemm mean = 2.13
//            figure: winograd1d winograd1d tflops-most = 122
//            figure: wide-filters winograd1d/implicit_gemm mean = 2.07
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
    static constexpr int width = Problem::tile_w - Problem::out_w + 1;  // of a filter row, or of a column block
    static __device__ __forceinline__ void filter(float (&state)[Problem::states], const float (&w)[width]) {
        multiply_row_pairs<typename Problem::g>(state, w);
    }
};

template <class Problem, class Tuning>
__device__ __forceinline__ void winograd1d(const float* __restrict__ x, const float* __restrict__ prepared,
                                           BiasIn<Problem> bias, float* __restrict__ y, long long batch) {
    winograd_convolution<Problem, Tuning, Transform1d<Problem>>(x, prepared, bias, y, batch);
}

template <class Problem, class Tuning>
__device__ __forceinline__ void winograd1d_filters(const float* __restrict__ w, float* __restrict__ prepared) {
    winograd_filters<Problem, Tuning, Transform1d<Problem>>(w, prepared);
}

}  // namespace leanconv
