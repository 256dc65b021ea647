// im2win: convolution over the im2win tensor (Lu et al. 2023), in two launches. The transform (window_order.cuh) writes
// the tensor, about R / stride times the input; the paper's Algorithm 3 multiplies filters with its windows.
//
//   y[m, k] = sum over c, s, r of win[m, c, s, r] * w[k, c, r, s]      m: output pixel, k: filter
//
// Requires   float32; NCHW or NHWC; a workspace for the tensor.
// CTA tile, roles, pipelines, numerics: those of implicit_gemm. A window's elements are adjacent, so loads need no test
//            against the border and no table.
// Floor      The transform moves the input and the tensor once, at copy bandwidth; FMA issue bounds the product.
// Measured   figure: im2win im2win/pytorch mean = 0.91
//            figure: im2win-nhwc im2win/pytorch mean = 0.89
#pragma once

#include <kernels/simt/tiled_convolution.cuh>
#include <kernels/papers/window_order.cuh>

namespace leanconv {

template <class Problem, class Tuning>
__device__ __forceinline__ void im2win(const float* __restrict__ workspace, const float* __restrict__ w,
                                       BiasIn<Problem> bias, float* __restrict__ y, long long batch) {
    constexpr bool interleaved = !Problem::vector_store, nhwc = Problem::nhwc;
    using Filters = FilterLoader<Problem, Tuning, nhwc && interleaved, true>;
    using Pixels = PixelLoaderAlong<Problem, Tuning, !nhwc && interleaved, WindowTensor<Problem>>;
    using Places = FlatPixels<Problem>;
    tiled_convolution<Problem, Tuning, interleaved, !interleaved, Filters, Pixels, Places>(workspace, w, bias, y, batch);
}

}  // namespace leanconv
