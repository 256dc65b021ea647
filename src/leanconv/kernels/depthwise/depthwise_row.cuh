// depthwise_row: short filters along the rows of each channel: the causal convolutions of sequence models.
//
//   y[n, k, p, q] = sum over s of x[n, k / group_k, p - pad_top, q + s * dilation - pad] * w[k, 0, s]
//
// Requires   one channel a group; NCHW; one row of taps, of up to 26 to 29 by the padding, dilated fewer; unit stride; rows of w
//            and q pixels in multiples of four.
// Numerics   float32 FMAs in direct order; float16 and bfloat16 are widened, and rounded once.
// CTA tile   a segment of one row: what depends on the row is computed once, and all threads have the same taps.
// Thread     `vectors` times four adjacent outputs, a block's width apart: all loads are of four pixels, neighbours in a
//            warp, and in flight before the first is used. Neighbouring threads share windows through the L1.
// Work       2 * S flops for 8 bytes an output: the memory copy bandwidth bounds filters of up to 60 taps; this kernel
//            is for those of some ten. With 4 taps a thread has 16 bytes of its own in flight for each vector.
// Measured   figure: depthwise-wide depthwise_row/pytorch mean = 4.05
#pragma once

#include <device/element.cuh>
#include <device/epilogue.cuh>
#include <device/index.cuh>

namespace leanconv {

// What four adjacent outputs read.
template <class Problem, class Tuning>
struct RowShape {
    // Windows begin `lead` pixels behind a multiple of four.
    static constexpr int lead = ((-Problem::pad_left) % 4 + 4) % 4;
    static constexpr int loads = (lead + 3 + (Problem::s - 1) * Problem::dilation_w) / 4 + 1;
    static constexpr int tile = Tuning::vectors * Tuning::threads * 4, tiles = ceil_div(Problem::q, tile);

    static_assert(Problem::group_c == 1 && !Problem::nhwc && !Problem::chwn, "one channel a group, pixels of a channel adjacent");
    static_assert(Problem::r == 1 && Problem::stride_h == 1 && Problem::stride_w == 1, "one row of taps, every pixel");
    static_assert(Problem::w % 4 == 0 && Problem::q % 4 == 0, "pixels and results are aligned vectors");
};

template <class Problem, class Tuning>
__device__ __forceinline__ void depthwise_row(ElementsIn<Problem> x, ElementsIn<Problem> w, BiasIn<Problem> bias,
                                              ElementsOut<Problem> y, long long batch) {
    using Shape = RowShape<Problem, Tuning>;
    using T = typename Problem::element;
    constexpr int vectors = Tuning::vectors, loads = Shape::loads, taps = Problem::s;

    // Blocks are numbered along a row, then rows, filters, images.
    const int row = static_cast<int>(blockIdx.x / Shape::tiles), p = row % Problem::p, k = row / Problem::p % Problem::k;
    const int n = row / (Problem::p * Problem::k), i = p - Problem::pad_top;
    const int first = static_cast<int>(blockIdx.x % Shape::tiles) * Shape::tile + 4 * static_cast<int>(threadIdx.x);
    const bool inside = static_cast<unsigned>(i) < static_cast<unsigned>(Problem::h);
    const T* const from =
        x + ((static_cast<int64>(n) * Problem::c + k / Problem::group_k) * Problem::h + (inside ? i : 0)) * Problem::w;
    T* const to = y + static_cast<int64>(row) * Problem::q;

    float pixel[vectors][loads][4];
#pragma unroll
    for (int u = 0; u < vectors; ++u)
#pragma unroll
        for (int v = 0; v < loads; ++v) {
            const int at = first + u * Tuning::threads * 4 - Problem::pad_left - Shape::lead + 4 * v;
            load_adjacent(pixel[u][v], from + at, inside && static_cast<unsigned>(at) < static_cast<unsigned>(Problem::w));
        }
    float tap[taps];
#pragma unroll
    for (int s = 0; s < taps; ++s) tap[s] = to_float(w[k * taps + (Problem::reversed ? taps - 1 - s : s)]);
    const Term<Problem> term = term_of<Problem>(bias, k);

#pragma unroll
    for (int u = 0; u < vectors; ++u) {
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
            v[e] = from_float<T>(finish<Problem>(sum[e], term, held_by<Problem>(bias, to + q + e, true)));
        store_vector(to + q, v);
    }
}

}  // namespace leanconv
