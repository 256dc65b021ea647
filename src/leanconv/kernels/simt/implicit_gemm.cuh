// Implicit GEMM: the convolution as a matrix product whose im2col matrix is formed on the way into shared memory and
// never written down (im2win paper, Algorithm 1; Chetlur et al. 2014). No workspace.
//
// Arithmetic per output: 2 * C/g * R * S flops. A block of tile_k filters x tile_pixels pixels reads, per reduction
// index, tile_k + tile_pixels floats for 2 * tile_k * tile_pixels flops: 128 x 96 makes 27 flops a byte from L2, so
// large layers are bound by FMA issue. A thread of 8x12 outputs issues 96 FMAs, 5 shared loads and about 9 other
// instructions per reduction index: at most 87 % of the FP32 peak; cuBLAS reaches 76 % (51 of 67 TFLOP/s on an H200),
// and that is the figure to approach: measured (suite im2win) up to 47 TFLOP/s in NCHW and NHWC, 52 in CHWN, where both
// operands arrive in copies of 16 bytes. Layers with few channels (C * R * S < 64 or so) are bound by writing the
// output.
//
// Elements of 16 bits are loaded into registers, converted and stored, where floats are copied. For a step of 16 indices
// of that tile a thread has 1536 FMAs, 28 conversions and, in NCHW, 16 loads and 16 stores in place of 28 copies; fewer
// addresses make up for it: 1766 instructions a step beside 1775 of float32, in NHWC 908 beside 926 for 8 indices, in
// CHWN 1731 beside 1707 (sm_90a). They halve the bytes that blocks read and write.
#pragma once

#include <kernels/simt/narrow_filters.cuh>
#include <kernels/simt/tiled_convolution.cuh>

namespace leanconv {

template <class Problem, class Tuning>
__device__ __forceinline__ void implicit_gemm(const typename Problem::element* __restrict__ x,
                                              const typename Problem::element* __restrict__ w,
                                              const typename Problem::element* __restrict__ bias,
                                              typename Problem::element* __restrict__ y, long long batch) {
    constexpr bool interleaved = !Problem::vector_store, nhwc = Problem::nhwc;
    using FiltersAlong = typename Select<narrow<Problem>, NarrowFilterLoader<Problem, Tuning, nhwc && interleaved>,
                                         FilterLoader<Problem, Tuning, nhwc && interleaved>>::type;
    using Filters = typename Select<Problem::chwn, FilterLoaderAcross<Problem, Tuning>, FiltersAlong>::type;
    using Pixels = typename Select<nhwc, PixelLoaderAlong<Problem, Tuning, false, ImageNHWC<Problem>>,
                                   PixelLoaderAcross<Problem, Tuning, interleaved>>::type;
    tiled_convolution<Problem, Tuning, interleaved, !interleaved, Filters, Pixels, FlatPixels<Problem>>(x, w, bias, y, batch);
}

}  // namespace leanconv
