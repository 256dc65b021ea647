// direct_weight: gradient of the filters by its definition, one warp a weight, everything read from global memory. The
// shortest statement of what the other kernels compute, for every layer of images.
//
//   dw[k, c, r, s] = sum over m of dy[m, k] * x[m * stride + (r, s) * dilation, c]      m: output pixel
//
// Numerics   lane i sums output pixels i, i + 32, ... in the order of memory; then the lanes' sums are added pairwise.
// Work       2 flops for two loads, most of them from L2 or, where neighbouring lanes do not read neighbouring elements
//            (NHWC), a line each.
#pragma once

#include <device/element.cuh>
#include <device/epilogue.cuh>
#include <device/index.cuh>

namespace leanconv {

template <class Problem, class Tuning>
__device__ __forceinline__ void direct_weight(ElementsIn<Problem> x, ElementsIn<Problem> dy, ElementsOut<Problem> dw,
                                              long long batch) {
    constexpr int taps = Problem::r * Problem::s;
    const int64 at = static_cast<int64>(blockIdx.x) * (Tuning::threads / 32) + threadIdx.x / 32;
    if (at >= static_cast<int64>(Problem::k) * Problem::group_c * taps) return;
    // the weight: innermost in memory are its column, its channel, or its filter
    const int tap = static_cast<int>(Problem::nhwc ? at / Problem::group_c % taps : Problem::chwn ? at / Problem::k % taps : at % taps);
    const int k = static_cast<int>(Problem::chwn ? at % Problem::k : at / (static_cast<int64>(Problem::group_c) * taps));
    const int own = static_cast<int>(Problem::nhwc       ? at % Problem::group_c
                                         : Problem::chwn ? at / (static_cast<int64>(Problem::k) * taps)
                                                         : at / taps % Problem::group_c);
    const int c = k / Problem::group_k * Problem::group_c + own, r = tap / Problem::s, s = tap % Problem::s;

    const Offset<Problem> count = static_cast<Offset<Problem>>(batch * (Problem::p * Problem::q));
    typename Problem::sum sum = 0;
    for (Offset<Problem> number = threadIdx.x % 32; number < count; number += 32) {
        const Pixel<Problem> out(number, batch);
        const int i = out.p * Problem::stride_h - Problem::pad_top + r * Problem::dilation_h;
        const int j = out.q * Problem::stride_w - Problem::pad_left + s * Problem::dilation_w;
        if (i < 0 || i >= Problem::h || j < 0 || j >= Problem::w) continue;
        const int64 n = out.n;
        const auto pixel = Problem::nhwc ? x[((n * Problem::h + i) * Problem::w + j) * Problem::c + c]
            : Problem::chwn              ? x[((static_cast<int64>(c) * Problem::h + i) * Problem::w + j) * batch + n]
                                         : x[((n * Problem::c + c) * Problem::h + i) * Problem::w + j];
        const auto passed = Problem::nhwc ? dy[((n * Problem::p + out.p) * Problem::q + out.q) * Problem::k + k]
            : Problem::chwn               ? dy[((static_cast<int64>(k) * Problem::p + out.p) * Problem::q + out.q) * batch + n]
                                          : dy[((n * Problem::k + k) * Problem::p + out.p) * Problem::q + out.q];
        sum = fmaf(to_float(passed), to_float(pixel), sum);
    }
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
    if (threadIdx.x % 32 == 0)
        dw[at] = from_float<typename Problem::element>(finish<Problem>(sum, 0.0f, held_by<Problem>(dw + at, true)));
}

}  // namespace leanconv
