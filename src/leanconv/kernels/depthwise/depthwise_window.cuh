// depthwise_window: one filter, or several, for each channel; the rows of the image pass through registers once.
//
//   y[n, k, p, q] = sum over r, s of x[n, k / group_k, p * stride + r * dilation - pad, ...] * w[k, r, s]
//
// Requires   one channel a group; NCHW or NHWC; at most 81 taps.
// Volumes    a thread computes a strip of `slices` slices of outputs. A window is the same row of all slices that these read.
// Numerics   float32 FMAs in direct order; float16 and bfloat16 are widened, and rounded once.
// CTA tile   NCHW: `threads` strips of `columns` outputs x `rows` rows. NHWC: `channels` neighbouring filters of
//            threads / channels strips, their filters in shared memory.
// Thread     a strip. `whole`: loads all rows that it reads at once, so that one latency passes (small filters). Else it
//            walks down: it reads each input row of its window once, (columns - 1) * stride + S pixels, and adds it to the
//            sums of all R rows of outputs that it reaches. Neighbouring threads share windows through the L1: they are
//            neighbouring channels in NHWC and neighbouring strips in NCHW.
// One step   (walking) load the row after the next; R * S * columns FMAs on this row; store the row that is complete.
// Registers  walking: R * S weights, (span + unrolled) * columns sums, (ahead + 1) windows, 25 for addresses.
// Work       2 * R * S flops for 8 bytes an output: the memory copy bandwidth bounds filters up to about 7x7, FMA
//            issue larger ones. 7 columns of a 7x7 filter: 13 loads for 343 FMAs.
// Measured   figure: depthwise depthwise_window/pytorch mean = 1.54
//            figure: depthwise-nchw depthwise_window/pytorch mean = 1.35
// Explored (H200, 51895f6): with one row in flight instead of two, 7x7 filters were 8 to 10 % slower.
#pragma once

#include <kernels/depthwise/window.cuh>

namespace leanconv {

// What a thread keeps besides the window of its strip.
template <class Problem, class Tuning>
struct DepthwiseShape : DepthwiseWindow<Problem, Tuning::columns> {
    // A walking thread sums so many rows of outputs an iteration, while so many rows of the image are in flight.
    static constexpr int unrolled = Problem::unrolled, ahead = Problem::ahead;
    static constexpr int bands = ceil_div(Problem::p, Tuning::rows);
    // Whether some output of a band reads its input row `at`, of so many.
    static constexpr int height = (Tuning::rows - 1) * Problem::stride_h + (Problem::r - 1) * Problem::dilation_h + 1;
    __host__ __device__ static constexpr bool read_row(int at) {
        return reads_place(at, Tuning::rows, Problem::r, Problem::stride_h, Problem::dilation_h);
    }
};

template <class Problem, class Tuning>
__device__ __forceinline__ void depthwise_window(ElementsIn<Problem> x, ElementsIn<Problem> w, BiasIn<Problem> bias,
                                                 ElementsOut<Problem> y, long long batch) {
    using Shape = DepthwiseShape<Problem, Tuning>;
    using Slices = ThreadSlices<Problem, Tuning>;
    using D = Depth<Problem>;
    using T = typename Problem::element;
    constexpr int columns = Shape::columns, span = Shape::span, taps = Shape::taps, slices = Slices::slices;
    constexpr int channel_tiles = ceil_div(Problem::k, Tuning::channels), in_block = Tuning::threads / Tuning::channels;
    static_assert(Problem::group_c == 1 && !Problem::chwn, "one channel a group, images outermost");

    // Which strip of which band of which filter's output. NCHW: strips, bands, slices, filters, images; a block of NHWC has a
    // tile of filters, and of the others some after each other.
    using Count = Offset<Problem>;
    const int local = threadIdx.x % Tuning::channels;
    const int first_k = static_cast<int>(blockIdx.x % channel_tiles) * Tuning::channels;
    Count rest;
    if constexpr (Problem::nhwc)
        rest = static_cast<Count>(blockIdx.x / channel_tiles) * in_block + threadIdx.x / Tuning::channels;
    else rest = static_cast<Count>(blockIdx.x) * Tuning::threads + threadIdx.x;
    const int strip = static_cast<int>(rest % Shape::strips);
    rest /= Shape::strips;
    const int band = static_cast<int>(rest % Shape::bands);
    rest /= Shape::bands;
    int first_z = 0;
    if constexpr (D::volume) {
        first_z = static_cast<int>(rest % Slices::tiles) * slices;
        rest /= Slices::tiles;
    }
    int k = first_k + local;
    if constexpr (!Problem::nhwc) {
        k = static_cast<int>(rest % Problem::k);
        rest /= Problem::k;
    }
    const int64 n = rest;
    // Blocks have whole warps, of which some threads may be left over.
    const bool exists = n < batch && k < Problem::k && (!Problem::nhwc || threadIdx.x / Tuning::channels < in_block);

    const int c = k / Problem::group_k, first_q = strip * columns, first_p = band * Tuning::rows;
    const int column = first_q * Problem::stride_w - Problem::pad_left;
    constexpr int row_step = Problem::w * (Problem::nhwc ? Problem::c : 1);
    const T* const image =
        x + (Problem::nhwc ? n * (D::d * Problem::h) * row_step + c : (n * Problem::c + c) * (D::d * Problem::h) * row_step);
    // Input row `at` from the first that the band reads, of all slices; zeros outside the image.
    const int first_i = first_p * Problem::stride_h - Problem::pad_top, first_d = first_z * D::stride - D::pad;
    const auto load = [&](WindowPixels<Shape, T>(&to)[Slices::deep], int at) {
        const int i = first_i + at;
        const bool inside = exists && static_cast<unsigned>(i) < static_cast<unsigned>(Problem::h);
        if constexpr (D::volume) {
            const T* const row = image + (static_cast<int64>(first_d) * Problem::h + i) * row_step;
#pragma unroll
            for (int j = 0; j < Slices::deep; ++j)
                if (Slices::read(j))
                    load_window<Shape>(to[j], row + static_cast<int64>(j) * Problem::h * row_step, column,
                                       inside && static_cast<unsigned>(first_d + j) < static_cast<unsigned>(D::d));
        } else {
            load_window<Shape>(to[0], image + static_cast<int64>(i) * row_step, column, inside);
        }
    };
    // The first rows are in flight while filters arrive: those of a few windows, or all that the band reads.
    constexpr int windows = Tuning::whole ? Shape::height : Shape::ahead + 1;
    WindowPixels<Shape, T> window[windows][Slices::deep];
#pragma unroll
    for (int i = 0; i < (Tuning::whole ? Shape::height : Shape::ahead); ++i)
        if (!Tuning::whole || Shape::read_row(i)) load(window[i], i);

    const T* const my_filter = w + static_cast<int64>(k) * taps;
    float* const filters = reinterpret_cast<float*>(shared_memory());
    if constexpr (Problem::nhwc) {
        // Filters of neighbouring channels lie taps apart; shared memory makes one coalesced copy of them.
        const int count = min(Tuning::channels, Problem::k - first_k) * taps;
        const T* const from = w + static_cast<int64>(first_k) * taps;
#pragma unroll 8
        for (int i = threadIdx.x; i < count; i += Tuning::threads)
            filters[i / taps * Problem::filter_pitch + i % taps] = to_float(from[i]);
        __syncthreads();
    }
    if (!exists) return;
    const auto weight = [&](int r, int s) {  // r counts the rows of all slices
        const int tap = Problem::reversed ? taps - 1 - r * Problem::s - s : r * Problem::s + s;
        return Problem::nhwc ? filters[local * Problem::filter_pitch + tap] : to_float(my_filter[tap]);
    };

    constexpr int out_pixel = Problem::nhwc ? Problem::k : 1, out_row = Problem::q * out_pixel;
    T* const result = y + static_cast<int64>(first_p) * out_row + first_q * out_pixel +
        (Problem::nhwc ? n * output_rows<Problem> * out_row + k : (n * Problem::k + k) * output_rows<Problem> * out_row);
    const bool vector = Shape::vector_stores && reinterpret_cast<unsigned long long>(y) % (4 * item<Problem>) == 0;
    const Term<Problem> term = term_of<Problem>(bias, k);

    // The sums of row `p` of the band, which are complete, of the thread's slice z.
    const auto store = [&](int p, int z, const float(&done)[columns]) {
        T* to = result + static_cast<int64>(p) * out_row;
        if constexpr (D::volume) {
            if (D::z % slices != 0 && first_z + z >= D::z) return;
            to += static_cast<int64>(first_z + z) * Problem::p * out_row;
        }
#pragma unroll
        for (int q = 0; q < columns; q += 4) {
            T v[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (q + e >= columns) continue;
                const float held = held_by<Problem>(bias, to + (q + e) * out_pixel, first_q + q + e < Problem::q);
                v[e] = from_float<T>(finish<Problem>(done[q + e], term, held));
            }
            if (vector) {
                if (first_q + q < Problem::q) store_vector(to + q, v);
            } else {
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (q + e < columns && first_q + q + e < Problem::q) to[(q + e) * out_pixel] = v[e];
            }
        }
    };

    if constexpr (Tuning::whole) {
        float sum[Tuning::rows][slices][columns] = {};
#pragma unroll
        for (int row = 0; row < filter_rows<Problem>; ++row)
#pragma unroll
            for (int s = 0; s < Problem::s; ++s) {
                // the order in which a walking thread adds
                const int r = row / D::t, t = row % D::t;
                const float tap = weight(t * Problem::r + r, s);
#pragma unroll
                for (int p = 0; p < Tuning::rows; ++p)
#pragma unroll
                    for (int z = 0; z < slices; ++z)
#pragma unroll
                        for (int q = 0; q < columns; ++q)
                            sum[p][z][q] = fmaf(tap, window[p * Problem::stride_h + r * Problem::dilation_h]
                                                           [z * D::stride + t * D::dilation]
                                                           [q * Problem::stride_w + s * Problem::dilation_w], sum[p][z][q]);
            }
#pragma unroll
        for (int p = 0; p < Tuning::rows; ++p)
#pragma unroll
            for (int z = 0; z < slices; ++z)
                if (Problem::p % Tuning::rows == 0 || first_p + p < Problem::p) store(p, z, sum[p][z]);
        return;
    }

    float filter[filter_rows<Problem>][Problem::s];
#pragma unroll
    for (int r = 0; r < filter_rows<Problem>; ++r)
#pragma unroll
        for (int s = 0; s < Problem::s; ++s) filter[r][s] = weight(r, s);
    const int total = min(Tuning::rows, Problem::p - first_p) + span;
    // Sums of an iteration's rows, and of those before them that it reaches.
    float sum[span + Shape::unrolled][slices][columns] = {};
    // Input rows of step t reach the outputs of rows t - span ... t of the band, of which the first is then complete. Its
    // sums are number `slot` of the iteration.
    const auto step = [&](int t, int slot) {
#pragma unroll
        for (int j = 0; j < Problem::stride_h; ++j) {
            const int now = (slot * Problem::stride_h + j) % windows;
            load(window[(now + windows - 1) % windows], t * Problem::stride_h + j + windows - 1);
#pragma unroll
            for (int r = Problem::r - 1; r >= 0; --r) {
                if (r * Problem::dilation_h % Problem::stride_h != j) continue;
                const int back = r * Problem::dilation_h / Problem::stride_h;
#pragma unroll
                for (int u = 0; u < slices * D::t; ++u) {
                    const int z = u / D::t, tap = u % D::t;
                    float(&to)[columns] = sum[span + slot - back][z];
#pragma unroll
                    for (int s = 0; s < Problem::s; ++s)
#pragma unroll
                        for (int q = 0; q < columns; ++q)
                            to[q] = fmaf(filter[tap * Problem::r + r][s],
                                         window[now][z * D::stride + tap * D::dilation]
                                               [q * Problem::stride_w + s * Problem::dilation_w], to[q]);
                }
            }
        }
#pragma unroll
        for (int z = 0; z < slices; ++z)
            if (t >= span) store(t - span, z, sum[slot][z]);
    };
#pragma unroll 1
    for (int t = 0; t < total; t += Shape::unrolled) {
#pragma unroll
        for (int slot = 0; slot < Shape::unrolled; ++slot)
            if (t + slot < total) step(t + slot, slot);
        // the window of the next row becomes the first, and so do the sums after the complete ones
        constexpr int moved = Shape::unrolled * Problem::stride_h % windows;
        WindowPixels<Shape, T> old[windows][Slices::deep];
#pragma unroll
        for (int i = 0; i < windows; ++i)
#pragma unroll
            for (int j = 0; j < Slices::deep; ++j) old[i][j] = window[i][j];
#pragma unroll
        for (int i = 0; i < windows; ++i)
#pragma unroll
            for (int j = 0; j < Slices::deep; ++j) window[i][j] = old[(i + moved) % windows][j];
#pragma unroll
        for (int i = 0; i < span + Shape::unrolled; ++i)
#pragma unroll
            for (int z = 0; z < slices; ++z)
#pragma unroll
                for (int q = 0; q < columns; ++q) sum[i][z][q] = i < span ? sum[i + Shape::unrolled][z][q] : 0.0f;
    }
}

}  // namespace leanconv
