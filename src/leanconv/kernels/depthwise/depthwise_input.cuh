// depthwise_input: gradient of a depthwise layer's input, any stride and several filters a channel; dy is read once.
//
//   dx[n, c, i, j] = sum over m, r, s of dy[n, c * group_k + m, (i + pad - r * dilation) / stride, ...] * w[.., r, s]
//
// and bias[c], where it is a transposed layer.
//
// Requires   one channel a group; NCHW or NHWC; at most 81 taps and 160 sums.
// Numerics   float32 FMAs in direct order; float16 and bfloat16 are widened, and rounded once.
// CTA tile   NCHW: `threads` strips of `columns` columns of dx x `rows` groups of rows. NHWC: `channels` neighbouring
//            channels of threads / channels strips, their filters in shared memory.
// Thread     a strip, a multiple of the stride wide, so that the compiler knows which taps fall on which columns. Rows of dx
//            form groups of stride_h, of which a row of dy completes one: group g has rows g * stride_h - top and on, and
//            gets tap rows r from row g - r * dilation_h / stride_h of dy. The groups that a row reaches are in registers,
//            as a ring or moved from group to group.
// One step   load the next row of dy; R * S * columns / stride_w FMAs on this one, a filter after the other; store a group.
// Registers  R * S weights, live * stride_h * columns sums, 2 windows, 45 for addresses.
// Work       2 * R * S / (stride_h * stride_w) flops a filter for 4 bytes written and, with one filter a channel,
//            4 / (stride_h * stride_w) read: memory bounds it.
// Measured   figure: depthwise-dgrad depthwise_input/pytorch mean = 1.58
#pragma once

#include <kernels/depthwise/window.cuh>

namespace leanconv {

// What a thread keeps, and which columns of dy its strip of dx reads.
template <class Problem, class Tuning>
struct DepthwiseInputShape {
    static constexpr int columns = Tuning::columns, taps = Problem::r * Problem::s;
    static constexpr int span = (Problem::r - 1) * Problem::dilation_h / Problem::stride_h, live = span + 1;
    // weights of a channel
    static constexpr int filters = Problem::group_k * taps;
    static constexpr int first_group = Problem::pad_top / Problem::stride_h;
    static constexpr int strips = ceil_div(Problem::w, columns), bands = ceil_div(Problem::row_groups, Tuning::rows);
    static_assert(columns % Problem::stride_w == 0, "the taps fall on the same columns of all strips");

    // Tap s of column e of the strip falls on column `steps / stride_w` of dy, counted from that of the strip; or on none.
    __host__ __device__ static constexpr int steps(int e, int s) { return e + Problem::pad_left - s * Problem::dilation_w; }
    __host__ __device__ static constexpr bool overlaps(int e, int s) { return steps(e, s) % Problem::stride_w == 0; }
    __host__ __device__ static constexpr int extreme(int sign) {
        bool found = false;
        int result = 0;
        for (int e = 0; e < columns; ++e)
            for (int s = 0; s < Problem::s; ++s) {
                const int at = steps(e, s) / Problem::stride_w;
                if (overlaps(e, s) && (!found || sign * at > sign * result)) found = true, result = at;
            }
        return result;
    }
    static constexpr int first = extreme(-1), window = extreme(1) - first + 1;
    // in which pixel of the window
    __host__ __device__ static constexpr int pixel_of(int e, int s) { return steps(e, s) / Problem::stride_w - first; }

    // Windows of dy, as load_window takes them.
    static constexpr bool checked = true;
    static constexpr int row_pixels = Problem::q, pixel = Problem::nhwc ? Problem::k : 1;
    static constexpr bool vectors = !Problem::nhwc && columns / Problem::stride_w % 4 == 0 && Problem::q % 4 == 0;
    static constexpr int lead = (first % 4 + 4) % 4;
    static constexpr bool vector_stores = !Problem::nhwc && columns % 4 == 0 && Problem::w % 4 == 0;
    __host__ __device__ static constexpr bool read(int at) {
        for (int e = 0; e < columns; ++e)
            for (int s = 0; s < Problem::s; ++s)
                if (overlaps(e, s) && pixel_of(e, s) == at) return true;
        return false;
    }
};

template <class Problem, class Tuning>
__device__ __forceinline__ void depthwise_input(ElementsIn<Problem> dy, ElementsIn<Problem> w, ElementsIn<Problem> bias,
                                                ElementsOut<Problem> dx, long long batch) {
    using Shape = DepthwiseInputShape<Problem, Tuning>;
    using T = typename Problem::element;
    constexpr int columns = Shape::columns, live = Shape::live, span = Shape::span, taps = Shape::taps;
    constexpr int stride = Problem::stride_h, multiplier = Problem::group_k;
    constexpr int channel_tiles = ceil_div(Problem::c, Tuning::channels), in_block = Tuning::threads / Tuning::channels;
    static_assert(Problem::group_c == 1 && !Problem::chwn, "one channel a group, images outermost");
    static_assert(!Problem::relu, "a gradient has no activation");

    // Which strip of which band of which channel. NCHW: strips, bands, channels, images; a block of NHWC has a tile of
    // channels, and of the others some after each other.
    int c, strip, band;
    int64 n;
    if constexpr (Problem::nhwc) {
        c = static_cast<int>(blockIdx.x % channel_tiles) * Tuning::channels + threadIdx.x % Tuning::channels;
        const int64 rest = static_cast<int64>(blockIdx.x / channel_tiles) * in_block + threadIdx.x / Tuning::channels;
        strip = static_cast<int>(rest % Shape::strips);
        band = static_cast<int>(rest / Shape::strips % Shape::bands);
        n = rest / (Shape::strips * Shape::bands);
    } else {
        const int64 number = static_cast<int64>(blockIdx.x) * Tuning::threads + threadIdx.x;
        strip = static_cast<int>(number % Shape::strips);
        const int64 rest = number / Shape::strips;
        band = static_cast<int>(rest % Shape::bands);
        c = static_cast<int>(rest / Shape::bands % Problem::c);
        n = rest / (static_cast<int64>(Shape::bands) * Problem::c);
    }

    // The channel's filters: one stays in registers; several are read where they are, in NHWC in shared memory.
    float filter[taps];
    const float* mine = nullptr;
    const T* const own = w + static_cast<int64>(c) * Shape::filters;
    if constexpr (Problem::nhwc) {
        float* const filters = reinterpret_cast<float*>(shared_memory());
        const int first_c = c - static_cast<int>(threadIdx.x % Tuning::channels);
        const int count = min(Tuning::channels, Problem::c - first_c) * Shape::filters;
        const T* const from = w + static_cast<int64>(first_c) * Shape::filters;
#pragma unroll 1
        for (int i = threadIdx.x; i < count; i += Tuning::threads)
            filters[i / Shape::filters * Problem::filter_pitch + i % Shape::filters] = to_float(from[i]);
        __syncthreads();
        // blocks have whole warps, of which some threads may be left over
        if (c >= Problem::c || n >= batch || threadIdx.x / Tuning::channels >= in_block) return;
        mine = filters + threadIdx.x % Tuning::channels * Problem::filter_pitch;
    } else {
        if (n >= batch) return;
    }
    const auto read_filter = [&](int m) {
#pragma unroll
        for (int i = 0; i < taps; ++i) filter[i] = Problem::nhwc ? mine[m * taps + i] : to_float(own[m * taps + i]);
    };
    if constexpr (multiplier == 1) read_filter(0);

    constexpr int dy_row = Problem::q * Shape::pixel, out_pixel = Problem::nhwc ? Problem::c : 1;
    constexpr int out_row = Problem::w * out_pixel;
    // from one filter's dy to the next one's
    constexpr int64 apart = Problem::nhwc ? 1 : static_cast<int64>(Problem::p) * Problem::q;
    const int first_j = strip * columns, column = first_j / Problem::stride_w + Shape::first;
    const int first_p = Shape::first_group + band * Tuning::rows - span;
    const T* const grad = Problem::nhwc ? dy + n * Problem::p * dy_row + c * multiplier
                                        : dy + (n * Problem::k + c * multiplier) * apart;
    T* const result = (Problem::nhwc ? dx + n * Problem::h * out_row + c : dx + (n * Problem::c + c) * Problem::h * out_row) +
        first_j * out_pixel;
    const bool vector = Shape::vector_stores && reinterpret_cast<unsigned long long>(dx) % (4 * item<Problem>) == 0;
    const int total = min(Tuning::rows, Problem::row_groups - band * Tuning::rows) + span;

    const auto load = [&](WindowPixels<Shape, T>& to, int t, int m) {
        const int p = first_p + t;
        const bool inside = static_cast<unsigned>(p) < static_cast<unsigned>(Problem::p);
        load_window<Shape>(to, grad + m * apart + static_cast<int64>(p) * dy_row, column, inside);
    };

    // Rows are brought to the L2 cache some steps before they are loaded. Explored (H200, a6365f6): 5 to 9 % faster in
    // NHWC, nothing gained in NCHW.
    constexpr int ahead = Problem::nhwc ? 2 : 0;
    const auto prefetch = [&](int t) {
        const int p = first_p + t;
        if constexpr (ahead > 0) {
            if (t < total && static_cast<unsigned>(p) < static_cast<unsigned>(Problem::p))
                for (int m = 0; m < multiplier; ++m)
                    prefetch_pixels<columns / Problem::stride_w, Problem::q, Shape::pixel>(
                        grad + m * apart + static_cast<int64>(p) * dy_row, first_j / Problem::stride_w);
        }
    };
#pragma unroll 1
    for (int t = 1; t < ahead; ++t) prefetch(t);
    const float b = Problem::bias ? to_float(bias[c]) : 0.0f;
    float sum[live][stride][columns] = {};
    WindowPixels<Shape, T> window, next;
    load(window, 0, 0);
    // Row t of dy completes its own group of rows of dx and reaches `span` groups below. `slot`: the place of the group in
    // the ring; without a ring it is always the first.
    const auto step = [&](int t, int slot) {
        float(&done)[stride][columns] = sum[slot];
        prefetch(t + ahead);
#pragma unroll 1
        for (int m = 0; m < multiplier; ++m) {
            const bool last = m + 1 == multiplier;
            if constexpr (multiplier > 1) read_filter(m);
            load(next, t + last, last ? 0 : m + 1);
#pragma unroll
            for (int r = 0; r < Problem::r; ++r) {
                const int below = r * Problem::dilation_h;
                float(&to)[columns] = sum[(slot + below / stride) % live][below % stride];
#pragma unroll
                for (int s = 0; s < Problem::s; ++s)
#pragma unroll
                    for (int e = 0; e < columns; ++e)
                        if (Shape::overlaps(e, s)) to[e] = fmaf(filter[r * Problem::s + s], window[Shape::pixel_of(e, s)], to[e]);
            }
            window = next;
        }
#pragma unroll
        for (int o = 0; o < stride; ++o) {
            const int i = (first_p + t) * stride - Problem::pad_top + o;
            if (t < span || i < 0 || i >= Problem::h) continue;
            T* const to = result + static_cast<int64>(i) * out_row;
#pragma unroll
            for (int j = 0; j < columns; j += 4) {
                T v[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if (j + e >= columns) continue;
                    const T* const at = to + (j + e) * out_pixel;
                    v[e] = from_float<T>(finish<Problem>(done[o][j + e], b, held_by<Problem>(at, first_j + j + e < Problem::w)));
                }
                if (vector) {
                    if (first_j + j < Problem::w) store_vector(to + j, v);
                } else {
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (j + e < columns && first_j + j + e < Problem::w) to[(j + e) * out_pixel] = v[e];
                }
            }
        }
#pragma unroll
        for (int o = 0; o < stride; ++o)
#pragma unroll
            for (int e = 0; e < columns; ++e) done[o][e] = 0.0f;
    };
    if constexpr (Tuning::ring) {
#pragma unroll 1
        for (int t = 0; t < total; t += live) {
#pragma unroll
            for (int slot = 0; slot < live; ++slot)
                if (t + slot < total) step(t + slot, slot);
        }
    } else {
#pragma unroll 1
        for (int t = 0; t < total; ++t) {
            step(t, 0);
            // the complete group was set to zero, and becomes the last one
#pragma unroll
            for (int i = 0; i < span; ++i)
#pragma unroll
                for (int o = 0; o < stride; ++o)
#pragma unroll
                    for (int e = 0; e < columns; ++e) sum[i][o][e] = sum[i + 1][o][e];
#pragma unroll
            for (int o = 0; o < stride; ++o)
#pragma unroll
                for (int e = 0; e < columns; ++e) sum[span][o][e] = 0.0f;
        }
    }
}

// Without a bias.
template <class Problem, class Tuning>
__device__ __forceinline__ void depthwise_input(ElementsIn<Problem> dy, ElementsIn<Problem> w, ElementsOut<Problem> dx,
                                                long long batch) {
    depthwise_input<Problem, Tuning>(dy, w, nullptr, dx, batch);
}

}  // namespace leanconv
