// Short filters along the rows of a plane, one for each channel or several: the causal convolutions of sequence models.
//
// Arithmetic per output: 2 * S flops for 8 bytes, one sample read and one written. At 4.2 TB/s and 67 TFLOP/s the copy
// bounds filters of up to 60 taps; this kernel is for those of some ten, and should take the time of a device copy.
//
// A block computes a part of one row, so that what depends on the row is computed once and the taps are the same for all
// its threads. A thread has `fours` times four adjacent outputs, a block's width apart: all its loads are 128 bits wide
// (of four floats), neighbours in a warp, and under way before the first is used. What the windows of neighbouring
// threads share comes from the L1. With 4 taps a thread has 16 bytes of its own in flight for each of its fours.
#pragma once

#include <device/epilogue.cuh>
#include <device/index.cuh>
#include <device/adjacent.cuh>

namespace leanconv {

// What four adjacent outputs read.
template <class Problem, class Tuning>
struct RowShape {
    // Windows begin `lead` pixels behind a multiple of four.
    static constexpr int lead = ((-Problem::pad_left) % 4 + 4) % 4;
    static constexpr int loads = (lead + 3 + (Problem::s - 1) * Problem::dilation_w) / 4 + 1;
    static constexpr int tile = Tuning::fours * Tuning::threads * 4, tiles = ceil_div(Problem::q, tile);

    static_assert(Problem::group_c == 1 && !Problem::nhwc && !Problem::chwn, "one channel a group, planes of pixels");
    static_assert(Problem::r == 1 && Problem::stride_h == 1 && Problem::stride_w == 1, "one row of taps, every pixel");
    static_assert(Problem::w % 4 == 0 && Problem::q % 4 == 0, "pixels and results come in aligned fours");
};

template <class Problem, class Tuning>
__device__ __forceinline__ void depthwise_row(const typename Problem::element* __restrict__ x,
                                              const typename Problem::element* __restrict__ w,
                                              const typename Problem::element* __restrict__ bias,
                                              typename Problem::element* __restrict__ y, long long batch) {
    using Shape = RowShape<Problem, Tuning>;
    using T = typename Problem::element;
    constexpr int fours = Tuning::fours, loads = Shape::loads, taps = Problem::s;

    // Blocks are numbered along a row, then rows, filters, images.
    const int row = static_cast<int>(blockIdx.x / Shape::tiles), p = row % Problem::p, k = row / Problem::p % Problem::k;
    const int n = row / (Problem::p * Problem::k), i = p - Problem::pad_top;
    const int first = static_cast<int>(blockIdx.x % Shape::tiles) * Shape::tile + 4 * static_cast<int>(threadIdx.x);
    const bool inside = static_cast<unsigned>(i) < static_cast<unsigned>(Problem::h);
    const T* const from =
        x + ((static_cast<int64>(n) * Problem::c + k / Problem::group_k) * Problem::h + (inside ? i : 0)) * Problem::w;
    T* const to = y + static_cast<int64>(row) * Problem::q;

    float pixel[fours][loads][4];
#pragma unroll
    for (int u = 0; u < fours; ++u)
#pragma unroll
        for (int v = 0; v < loads; ++v) {
            const int at = first + u * Tuning::threads * 4 - Problem::pad_left - Shape::lead + 4 * v;
            load_adjacent(pixel[u][v], from + at, inside && static_cast<unsigned>(at) < static_cast<unsigned>(Problem::w));
        }
    float tap[taps];
#pragma unroll
    for (int s = 0; s < taps; ++s) tap[s] = to_float(w[k * taps + (Problem::reversed ? taps - 1 - s : s)]);
    const float b = Problem::bias ? to_float(bias[k]) : 0.0f;

#pragma unroll
    for (int u = 0; u < fours; ++u) {
        const int q = first + u * Tuning::threads * 4;
        if (q >= Problem::q) return;
        float sum[4] = {};
#pragma unroll
        for (int s = 0; s < taps; ++s)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int at = Shape::lead + e + s * Problem::dilation_w;
                sum[e] = fmaf(tap[s], pixel[u][at / 4][at % 4], sum[e]);
            }
        T v[4];
#pragma unroll
        for (int e = 0; e < 4; ++e)
            v[e] = from_float<T>(finish<Problem>(sum[e], b, held_by<Problem>(to + q + e, true)));
        store_vector_of(to + q, v);
    }
}

}  // namespace leanconv
