// im2win_basic: the im2win paper's Algorithm 2, one thread an output, over the im2win tensor. Kept as the "before" of the
// ablation.
//
// Work       2 * C/g * R * S flops an output for as many loads of four bytes, from L1 at best: a warp shares its pixels'
//            windows or its filter, so about one load an FMA, and as much arithmetic on indices.
// Measured   figure: im2win im2win_basic tflops-most = 1.54
#pragma once

#include <device/epilogue.cuh>
#include <kernels/papers/window_order.cuh>

namespace leanconv {

// Neighbouring threads compute neighbouring pixels of one filter in NCHW, neighbouring filters of one pixel in NHWC.
template <class Problem, class Tuning>
__device__ __forceinline__ void im2win_basic(const float* __restrict__ workspace, const float* __restrict__ w,
                                             BiasIn<Problem> bias, float* __restrict__ y, long long batch) {
    constexpr int image = Problem::p * Problem::q, size = Reduction<Problem>::size;
    const int64 at = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= batch * Problem::k * image) return;
    const int64 n = at / (static_cast<int64>(Problem::k) * image);
    const auto in_image = static_cast<Offset<Problem>>(at - n * Problem::k * image);
    const int k = static_cast<int>(Problem::nhwc ? in_image % Problem::k : in_image / image);
    const int pq = static_cast<int>(Problem::nhwc ? in_image / Problem::k : in_image % image);
    const Pixel<Problem> pixel(static_cast<Offset<Problem>>(n * image + pq), batch);

    using Windows = WindowTensor<Problem>;
    const float* const window = at_byte(workspace, Windows::first(pixel, Window<Problem>(), k / Problem::group_k));
    const float* const filter = w + static_cast<int64>(k) * size;
    float sum = 0.0f;
#pragma unroll 8  // NOTE: left alone, the compiler unrolls all of it where there are 363 taps, and spills on sm_100a
    for (int i = 0; i < size; ++i) {
        const float weight = filter[filter_element<Problem, true>(i)];
        sum = fmaf(weight, *at_byte(window, Windows::tap(i / Windows::run, i % Windows::run)), sum);
    }
    y[at] = finish<Problem>(sum, term_of<Problem>(bias, k), held_by<Problem>(bias, y + at, true));
}

}  // namespace leanconv
