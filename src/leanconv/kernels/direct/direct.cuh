// direct: convolution by its definition; one thread, one output, everything read from global memory. The baseline that
// the im2win paper starts from, and the shortest statement of what the other kernels compute.
//
//   y[n, k, p, q] = sum over c, r, s of x[n, c, p * stride + r * dilation - pad, ...] * w[k, c, r, s]
//
// Requires   forward layers of images; else nothing: any shape, layout and element type; no workspace.
// Numerics   float32 FMAs, or 32-bit integers, in direct order.
// Thread     an output; neighbours are pixels of one filter in NCHW, filters of one pixel in NHWC, images in CHWN.
// Work       2 * C/g * R * S flops an output, two loads an FMA, most of them from L1.
// Measured   figure: im2win direct tflops-most = 6.24
//            figure: im2win-nhwc direct tflops-most = 2.07
//            figure: im2win-chwn direct tflops-most = 2.91
#pragma once

#include <device/epilogue.cuh>

namespace leanconv {

template <class Problem, class Tuning>
__device__ __forceinline__ void direct(const typename Problem::element* __restrict__ x,
                                       const typename Problem::filter* __restrict__ w,
                                       BiasIn<Problem> bias,
                                       typename Problem::result* __restrict__ y, long long batch) {
    constexpr int image = Problem::p * Problem::q;
    const int64 at = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= batch * Problem::k * image) return;
    const auto number = static_cast<Offset<Problem>>(at), images = static_cast<Offset<Problem>>(batch);
    const int64 n = Problem::chwn ? number % images : at / (static_cast<int64>(Problem::k) * image);
    const Offset<Problem> in_image =
        Problem::chwn ? number / images : static_cast<Offset<Problem>>(at - n * Problem::k * image);
    const int k = static_cast<int>(Problem::nhwc ? in_image % Problem::k : in_image / image);
    const int pq = static_cast<int>(Problem::nhwc ? in_image / Problem::k : in_image % image);
    const int p = pq / Problem::q, q = pq % Problem::q, first_c = k / Problem::group_k * Problem::group_c;

    typename Problem::sum sum = 0;
    for (int c = 0; c < Problem::group_c; ++c)
        for (int r = 0; r < Problem::r; ++r)
            for (int s = 0; s < Problem::s; ++s) {
                const int i = p * Problem::stride_h - Problem::pad_top + r * Problem::dilation_h;
                const int j = q * Problem::stride_w - Problem::pad_left + s * Problem::dilation_w;
                if (i < 0 || i >= Problem::h || j < 0 || j >= Problem::w) continue;
                const int tap = r * Problem::s + s;
                const auto pixel = Problem::nhwc
                    ? x[((n * Problem::h + i) * Problem::w + j) * Problem::c + first_c + c]
                : Problem::chwn
                    ? x[((static_cast<int64>(first_c + c) * Problem::h + i) * Problem::w + j) * batch + n]
                    : x[((n * Problem::c + first_c + c) * Problem::h + i) * Problem::w + j];
                const auto weight = Problem::nhwc
                    ? w[(static_cast<int64>(k) * Problem::r * Problem::s + tap) * Problem::group_c + c]
                : Problem::chwn
                    ? w[(static_cast<int64>(c) * (Problem::r * Problem::s) + tap) * Problem::k + k]
                    : w[(static_cast<int64>(k) * Problem::group_c + c) * (Problem::r * Problem::s) + tap];
                sum = multiply_add(to_sum(weight), to_sum(pixel), sum);
            }
    const Term<Problem> term = term_of<Problem>(bias, k);
    y[at] = from_sum<typename Problem::result>(finish<Problem>(sum, term, held_by<Problem>(bias, y + at, true)));
}

}  // namespace leanconv
