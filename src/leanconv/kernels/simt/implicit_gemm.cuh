// implicit_gemm: convolution as a matrix product on FP32 cores (im2win paper, Algorithm 1; Chetlur et al. 2014). The im2col
// matrix exists only in shared memory. No workspace.
//
//   y[m, k] = sum over r, s, c of x[m * stride + (r, s) * dilation, c] * w[k, r, s, c]      m: output pixel, k: filter
//
// Requires   nothing: any shape, group count and layout, images and volumes; float32, float16 or bfloat16.
// Volumes    slices of a filter are rows behind one another: a tap is (t, r, s), an output pixel has a slice z.
// Numerics   one chain of float32 FMAs for each output; blocks of a cluster add their chains in the order of their ranks.
// CTA tile   tile_k filters x tile_pixels pixels x tile_reduction indices a stage, all Tuning's; a thread has
//            thread_k x thread_pixels sums; split-K by cluster.
// Roles      all warps load, multiply and store.
// Pipelines  both operands   `stages` steps of cp.async; 16-bit elements pass through registers in two stages
// One stage  wait for the copies; barrier; per index read the next fragments and multiply; after the first index look up
//            the taps of a later step, after the second begin its copies (tile_product.cuh)
// Work       2 * C/g * R * S flops an output. Per index a block reads tile_k + tile_pixels floats for
//            2 * tile_k * tile_pixels flops: 128 x 96 makes 27 flops a byte from L2, so large layers are bound by FMA
//            issue. A thread of 8 x 12 outputs issues 96 FMAs, 5 shared loads and about 9 other instructions per index:
//            at most 96 / 110 of the FP32 peak. Layers with C * R * S below 64 or so are bound by writing the output.
// 16 bits    per step of 16 indices of that tile 1536 FMAs, 28 conversions and, in NCHW, 16 loads and 16 stores in place
//            of 28 copies; fewer addresses make up for it: 1766 instructions beside 1775 of float32, in NHWC 908 beside
//            926 for 8 indices, in CHWN 1731 beside 1707 (sm_90a). Blocks read and write half the bytes.
// Measured   figure: im2win implicit_gemm/pytorch mean = 1.05
//            figure: im2win implicit_gemm tflops-most = 45.8
//            figure: im2win-nhwc implicit_gemm tflops-most = 45.9
//            figure: im2win-chwn implicit_gemm tflops-most = 49.7
//            In CHWN both operands arrive in copies of 16 bytes.
#pragma once

#include <kernels/simt/tiled_convolution.cuh>

namespace leanconv {

template <class Problem, class Tuning>
__device__ __forceinline__ void implicit_gemm(ElementsIn<Problem> x, ElementsIn<Problem> w, BiasIn<Problem> bias,
                                              ElementsOut<Problem> y, long long batch) {
    constexpr bool interleaved = !Problem::vector_store, nhwc = Problem::nhwc;
    using FiltersAlong = typename Select<narrow<Problem>, NarrowFilterLoader<Problem, Tuning, nhwc && interleaved>,
                                         FilterLoader<Problem, Tuning, nhwc && interleaved>>::type;
    using Filters = typename Select<Problem::chwn, FilterLoaderAcross<Problem, Tuning>, FiltersAlong>::type;
    using Pixels = typename Select<nhwc, PixelLoaderAlong<Problem, Tuning, false, ImageNHWC<Problem>>,
                                   PixelLoaderAcross<Problem, Tuning, interleaved>>::type;
    tiled_convolution<Problem, Tuning, interleaved, !interleaved, Filters, Pixels, FlatPixels<Problem>>(x, w, bias, y, batch);
}

}  // namespace leanconv
