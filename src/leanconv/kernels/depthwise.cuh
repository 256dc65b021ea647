// One filter for each channel (or several): the rows of the image pass through registers once.
//
// Arithmetic per output: 2 * R * S flops for 8 bytes, one pixel read and one written. At 4.2 TB/s and 67 TFLOP/s the copy
// of the image bounds filters up to about 7x7, and FMA issue larger ones. So small filters should take the time of a
// device copy of input and output, large ones what a well-tuned SGEMM reaches (75 % of the peak).
//
// A thread owns a strip of `columns` outputs of one channel and walks down `rows` rows of outputs. It reads each input
// row of its window once, columns * stride + S - 1 pixels, and adds it to all the sums that it reaches: those of R
// outputs of a column. Neighbouring threads are neighbouring channels in NHWC and neighbouring strips in NCHW, so that
// they find in the L1 what their windows share. 8 columns of a 7x7 filter: 14 loads for 392 FMAs.
// Measured on an H200 (128 images): 256 x 56 x 56 with 3x3 filters 1.17 (NHWC) and 1.28 times the copy, 96 x 56 x 56 with
// 7x7 filters 1.9 and 2.1 times, at 26 and 23 TFLOP/s.
#pragma once

#include <lib/epilogue.cuh>
#include <lib/index.cuh>
#include <lib/ptx/shared.cuh>

namespace leanconv {

// What a thread keeps, and how far its windows reach.
template <class Problem, class Tuning>
struct DepthwiseShape {
    static constexpr int columns = Tuning::columns;
    // pixels of a window, and rows of outputs that are summed at the same time
    static constexpr int window = (columns - 1) * Problem::stride_w + (Problem::s - 1) * Problem::dilation_w + 1;
    static constexpr int span = (Problem::r - 1) * Problem::dilation_h / Problem::stride_h, live = span + 1;
    static constexpr int taps = Problem::r * Problem::s;
    // filters in shared memory: an odd pitch, so that the lanes of a warp meet different banks
    static constexpr int pitch = taps | 1;
    static constexpr int strips = ceil_div(Problem::q, columns), bands = ceil_div(Problem::p, Tuning::rows);
    // Some window of a strip leaves the image, or the last strip is not whole.
    static constexpr bool checked = Problem::padded || Problem::q % columns != 0;
    // Rows of NCHW whose columns come in aligned fours: the middle of a window is loaded in vectors.
    static constexpr bool vectors = !Problem::nhwc && Problem::stride_w == 1 && columns % 4 == 0 && Problem::w % 4 == 0 &&
                                    Problem::pad_left >= 0 && Problem::pad_left + columns <= window;
    static constexpr bool vector_stores = !Problem::nhwc && columns % 4 == 0 && Problem::q % 4 == 0;

    // Whether some output reads pixel `at` of the window, and whether the vectors bring it.
    __host__ __device__ static constexpr bool read(int at) {
        for (int s = 0; s < Problem::s; ++s) {
            const int from = at - s * Problem::dilation_w;
            if (from >= 0 && from % Problem::stride_w == 0 && from / Problem::stride_w < columns) return true;
        }
        return false;
    }
    __host__ __device__ static constexpr bool in_vector(int at) {
        return vectors && at >= Problem::pad_left && at < Problem::pad_left + columns;
    }
};

// Four adjacent elements, aligned to all of them.
__device__ __forceinline__ void load_four(float (&v)[4], const float* from) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
}
template <class T>
__device__ __forceinline__ void load_four(float (&v)[4], const T* from) {
    Packed<T, 4> four;
    four.load(from, true);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = four.value(i);
}

// The pixels of a window whose first column is `column`, of an image row that begins at `row`; zeros outside, and
// everywhere unless the row is `inside` the image.
template <class Problem, class Tuning, class Shape = DepthwiseShape<Problem, Tuning>>
__device__ __forceinline__ void load_window(float (&window)[Shape::window], const typename Problem::element* row,
                                            int column, bool inside) {
    constexpr int pixel = Problem::nhwc ? Problem::c : 1;
    if constexpr (Shape::vectors) {
#pragma unroll
        for (int v = 0; v < Shape::columns; v += 4) {
            float four[4] = {};
            const int at = column + Problem::pad_left + v;
            if (inside && at < Problem::w) load_four(four, row + at);
#pragma unroll
            for (int i = 0; i < 4; ++i) window[Problem::pad_left + v + i] = four[i];
        }
    }
#pragma unroll
    for (int k = 0; k < Shape::window; ++k) {
        if (!Shape::read(k) || Shape::in_vector(k)) continue;
        const bool exists = !Shape::checked || static_cast<unsigned>(column + k) < static_cast<unsigned>(Problem::w);
        window[k] = inside && exists ? to_float(row[(column + k) * pixel]) : 0.0f;
    }
}

template <class Problem, class Tuning>
__device__ __forceinline__ void depthwise(const typename Problem::element* __restrict__ x,
                                          const typename Problem::element* __restrict__ w,
                                          const typename Problem::element* __restrict__ bias,
                                          typename Problem::element* __restrict__ y, long long batch) {
    using Shape = DepthwiseShape<Problem, Tuning>;
    using T = typename Problem::element;
    constexpr int columns = Shape::columns, live = Shape::live, span = Shape::span, taps = Shape::taps;
    constexpr int channel_tiles = ceil_div(Problem::k, Tuning::channels), in_block = Tuning::threads / Tuning::channels;
    static_assert(Problem::group_c == 1 && !Problem::chwn, "one channel a group, images outermost");

    // Which strip of which band of which filter's output. NCHW: strips, bands, filters, images; a block of NHWC has a
    // tile of filters, and of the others some after each other.
    int k, strip, band;
    int64 n;
    if constexpr (Problem::nhwc) {
        const int first = static_cast<int>(blockIdx.x % channel_tiles) * Tuning::channels;
        const int local = threadIdx.x % Tuning::channels;
        k = first + local;
        const int64 rest = static_cast<int64>(blockIdx.x / channel_tiles) * in_block + threadIdx.x / Tuning::channels;
        strip = static_cast<int>(rest % Shape::strips);
        band = static_cast<int>(rest / Shape::strips % Shape::bands);
        n = rest / (Shape::strips * Shape::bands);
    } else {
        const int64 number = static_cast<int64>(blockIdx.x) * Tuning::threads + threadIdx.x;
        strip = static_cast<int>(number % Shape::strips);
        const int64 rest = number / Shape::strips;
        band = static_cast<int>(rest % Shape::bands);
        k = static_cast<int>(rest / Shape::bands % Problem::k);
        n = rest / (static_cast<int64>(Shape::bands) * Problem::k);
    }

    float filter[taps];
    if constexpr (Problem::nhwc) {
        // Filters of neighbouring channels lie taps apart; shared memory makes one coalesced copy of them.
        float* const filters = reinterpret_cast<float*>(shared_memory());
        const int first = k - static_cast<int>(threadIdx.x % Tuning::channels);
        const int wanted = min(Tuning::channels, Problem::k - first) * taps;
        const T* const from = w + static_cast<int64>(first) * taps;
#pragma unroll 1
        for (int i = threadIdx.x; i < wanted; i += Tuning::threads)
            filters[i / taps * Shape::pitch + i % taps] = to_float(from[i]);
        __syncthreads();
        // blocks have whole warps, of which some threads may be left over
        if (k >= Problem::k || n >= batch || threadIdx.x / Tuning::channels >= in_block) return;
        const float* const mine = filters + threadIdx.x % Tuning::channels * Shape::pitch;
#pragma unroll
        for (int i = 0; i < taps; ++i) filter[i] = mine[Problem::reversed ? taps - 1 - i : i];
    } else {
        if (n >= batch) return;
        const T* const mine = w + static_cast<int64>(k) * taps;
#pragma unroll
        for (int i = 0; i < taps; ++i) filter[i] = to_float(mine[Problem::reversed ? taps - 1 - i : i]);
    }

    const int c = k / Problem::group_k, first_q = strip * columns, first_p = band * Tuning::rows;
    const int column = first_q * Problem::stride_w - Problem::pad_left;
    constexpr int row_step = Problem::w * (Problem::nhwc ? Problem::c : 1);
    const T* const image = Problem::nhwc ? x + n * Problem::h * row_step + c : x + (n * Problem::c + c) * Problem::h * row_step;
    constexpr int out_pixel = Problem::nhwc ? Problem::k : 1, out_row = Problem::q * out_pixel;
    T* const result = (Problem::nhwc ? y + n * Problem::p * out_row + k : y + (n * Problem::k + k) * Problem::p * out_row) +
        static_cast<int64>(first_p) * out_row + first_q * out_pixel;
    const bool vector = Shape::vector_stores && reinterpret_cast<unsigned long long>(y) % (4 * item<Problem>) == 0;
    const float b = Problem::bias ? to_float(bias[k]) : 0.0f;
    const int total = min(Tuning::rows, Problem::p - first_p) + span;

    // Input row `at` from the first that the band sees; zeros outside the image.
    const int first_i = first_p * Problem::stride_h - Problem::pad_top;
    const auto load = [&](float(&to)[Shape::window], int at) {
        const int i = first_i + at;
        const bool inside = static_cast<unsigned>(i) < static_cast<unsigned>(Problem::h);
        load_window<Problem, Tuning>(to, image + static_cast<int64>(i) * row_step, column, inside);
    };

    float sum[live][columns] = {};
    float window[Shape::window], next[Shape::window];
    load(window, 0);
    // Input rows of step t reach the outputs of rows t - span ... t of the band, of which the first is then complete.
    // `turn`: in which place of the ring row t is summed; without a ring it is always the last. While a row is summed
    // the next one is under way.
    const auto step = [&](int t, int turn) {
#pragma unroll
        for (int j = 0; j < Problem::stride_h; ++j) {
            load(next, t * Problem::stride_h + j + 1);
#pragma unroll
            for (int r = 0; r < Problem::r; ++r) {
                if (r * Problem::dilation_h % Problem::stride_h != j) continue;
                float(&to)[columns] = sum[(turn + live - r * Problem::dilation_h / Problem::stride_h) % live];
#pragma unroll
                for (int s = 0; s < Problem::s; ++s)
#pragma unroll
                    for (int q = 0; q < columns; ++q)
                        to[q] = fmaf(filter[r * Problem::s + s],
                                     window[q * Problem::stride_w + s * Problem::dilation_w], to[q]);
            }
#pragma unroll
            for (int k = 0; k < Shape::window; ++k)
                if (Shape::read(k)) window[k] = next[k];
        }
        float(&done)[columns] = sum[(turn + 1) % live];
        if (t >= span) {
            T* const to = result + static_cast<int64>(t - span) * out_row;
#pragma unroll
            for (int q = 0; q < columns; q += 4) {
                T v[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if (q + e >= columns) continue;
                    const T* const at = to + (q + e) * out_pixel;
                    v[e] = from_float<T>(finish<Problem>(done[q + e], b, held_by<Problem>(at, first_q + q + e < Problem::q)));
                }
                if (vector) {
                    if (first_q + q < Problem::q) store_vector_of(to + q, v);
                } else {
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (q + e < columns && first_q + q + e < Problem::q) to[(q + e) * out_pixel] = v[e];
                }
            }
        }
#pragma unroll
        for (int q = 0; q < columns; ++q) done[q] = 0.0f;
    };
    if constexpr (Tuning::ring) {
#pragma unroll 1
        for (int t = 0; t < total; t += live) {
#pragma unroll
            for (int turn = 0; turn < live; ++turn)
                if (t + turn < total) step(t + turn, turn);
        }
    } else {
#pragma unroll 1
        for (int t = 0; t < total; ++t) {
            step(t, span);
            // the complete row was set to zero, and becomes the next one
#pragma unroll
            for (int i = 0; i < span; ++i)
#pragma unroll
                for (int q = 0; q < columns; ++q) sum[i][q] = sum[i + 1][q];
#pragma unroll
            for (int q = 0; q < columns; ++q) sum[span][q] = 0.0f;
        }
    }
}

}  // namespace leanconv
