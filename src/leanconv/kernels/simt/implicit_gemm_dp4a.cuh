// Convolution of 8-bit integers with channels last: implicit GEMM on words of four neighbouring channels, the width of a
// bank, whose product is one dp4a (the bank-width model of Chen et al. 2017 with n = 4). Sums are exact, in 32 bits.
//
// Arithmetic per output: 2 * C/g * R * S operations by C/g * R * S / 4 dp4a. Seen as words, this is the float32 kernel on
// a fourth of the channels: the same loaders, the same tile, the same loop, dp4a in place of the FMA. An H200 starts 64
// dp4a a cycle and multiprocessor, half as many as FMAs: 132 TOP/s from registers (measured), which is the figure to
// approach. As each takes two cycles, loads and addresses hide better than beside FMAs: 117 TOP/s on 256 channels of
// 56 x 56, 97 to 107 on ResNet's layers of 3x3 (32 images), where float32 reaches 40 to 44 TFLOP/s; 43 and 77 where a
// pixel is one word (C = 4), with a tap to decode for each. Where four does not divide C/g, words are made of bytes.
#pragma once

#include <kernels/simt/loose_words.cuh>
#include <kernels/simt/tiled_convolution.cuh>

namespace leanconv {

template <class Problem, class Tuning>
__device__ __forceinline__ void implicit_gemm_dp4a(const typename Problem::element* __restrict__ x,
                                            const typename Problem::filter* __restrict__ w,
                                            const typename Problem::result* __restrict__ bias,
                                            typename Problem::result* __restrict__ y, long long batch) {
    static_assert(Problem::nhwc, "four neighbouring channels are a word");
    constexpr bool interleaved = !Problem::vector_store, loose_words = loose<typename Problem::element>;
    using Filters = typename Select<loose_words, LooseFilterLoader<Problem, Tuning, interleaved>,
                                    FilterLoader<Problem, Tuning, interleaved>>::type;
    using Image = typename Select<loose_words, ImageLoose<Problem>, ImageNHWC<Problem>>::type;
    using Pixels = PixelLoaderAlong<Problem, Tuning, false, Image>;
    tiled_convolution<Problem, Tuning, interleaved, !interleaved, Filters, Pixels, FlatPixels<Problem>>(x, w, bias, y, batch);
}

}  // namespace leanconv
