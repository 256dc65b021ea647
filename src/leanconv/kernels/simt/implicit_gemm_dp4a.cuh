// implicit_gemm_dp4a: convolution of 8-bit integers, channels last. The elements are words of four neighbouring channels,
// the width of a bank (the bank-width model of Chen et al. 2017 with n = 4); the product of two words is one dp4a.
//
//   y[m, k] = sum over r, s, c of x[m * stride + (r, s) * dilation, c] * w[k, r, s, c]      as implicit_gemm
//
// Requires   NHWC; int8 or uint8 pixels. Where four does not divide C/g, words are made of bytes (loose_words.cuh).
// Numerics   exact, in 32 bits.
// CTA tile, roles, pipelines: those of implicit_gemm on a fourth of the channels, dp4a in place of the FMA.
// Work       C/g * R * S / 4 dp4a an output. An H200 starts 64 dp4a a cycle and multiprocessor, half as many as FMAs; as
//            each takes two cycles, loads and addresses hide better than beside FMAs.
// Measured   figure: resnet-50-nhwc-int8 implicit_gemm_dp4a tflops-mean = 86.6
//            figure: resnet-50-nhwc-int8 implicit_gemm_dp4a tflops-most = 106
// Explored (H200, 874369e): 132 TOP/s from registers; 43 and 77 where a pixel is one word (C = 4), with a tap to decode
//            for each.
#pragma once

#include <kernels/simt/loose_words.cuh>
#include <kernels/simt/tiled_convolution.cuh>

namespace leanconv {

template <class Problem, class Tuning>
__device__ __forceinline__ void implicit_gemm_dp4a(const typename Problem::element* __restrict__ x,
                                            const typename Problem::filter* __restrict__ w,
                                            BiasIn<Problem> bias,
                                            typename Problem::result* __restrict__ y, long long batch) {
    static_assert(Problem::nhwc, "four neighbouring channels are a word");
    constexpr bool interleaved = !Problem::vector_store;
    using Filters = FilterLoader<Problem, Tuning, interleaved>;
    using Pixels = PixelLoaderAlong<Problem, Tuning, false, ImageNHWC<Problem>>;
    tiled_convolution<Problem, Tuning, interleaved, !interleaved, Filters, Pixels, FlatPixels<Problem>>(x, w, bias, y, batch);
}

}  // namespace leanconv
