// depthwise_input: gradient of a depthwise layer's input, any stride and several filters a channel; dy is read once.
//
//   dx[n, c, i, j] = sum over m, r, s of dy[n, c * group_k + m, (i + pad - r * dilation) / stride, ...] * w[.., r, s]
//
// and bias[c], where it is a transposed layer.
//
// Requires   one channel a group; NCHW or NHWC; at most 81 taps and 160 sums.
// Volumes    a thread computes a strip of `slices` slices of dx, a multiple of their stride; of dy it reads the same row of all
//            slices that meet these.
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
// Measured   figure: depthwise-dgrad depthwise_input/pytorch mean = 1.60
#pragma once

#include <kernels/depthwise/window.cuh>

namespace leanconv {

// The slices of dx that a thread computes, and those of dy that it reads a row of at once; one of each of images.
template <class Problem, class Tuning, bool volume = Depth<Problem>::volume>
struct InputSlices {
    static constexpr int slices = 1, first = 0, deep = 1, tiles = 1;
    __host__ __device__ static constexpr bool overlaps(int, int) { return true; }
    __host__ __device__ static constexpr bool read(int) { return true; }
    __host__ __device__ static constexpr int slice_of(int, int) { return 0; }
};
template <class Problem, class Tuning>
struct InputSlices<Problem, Tuning, true> {
    using D = Depth<Problem>;
    static constexpr int slices = Tuning::slices, tiles = ceil_div(D::d, slices);
    static_assert(slices % D::stride == 0, "the taps fall on the same slices of all tiles");
    // Tap t of slice e of the tile falls on slice `steps / stride` of dy, counted from that of the tile; or on none.
    __host__ __device__ static constexpr int steps(int e, int t) { return e + D::pad - t * D::dilation; }
    __host__ __device__ static constexpr bool overlaps(int e, int t) { return steps(e, t) % D::stride == 0; }
    __host__ __device__ static constexpr int extreme(int sign) {
        bool found = false;
        int result = 0;
        for (int e = 0; e < slices; ++e)
            for (int t = 0; t < D::t; ++t) {
                const int at = steps(e, t) / D::stride;
                if (overlaps(e, t) && (!found || sign * at > sign * result)) found = true, result = at;
            }
        return result;
    }
    static constexpr int first = extreme(-1), deep = extreme(1) - first + 1;
    __host__ __device__ static constexpr int slice_of(int e, int t) { return steps(e, t) / D::stride - first; }
    __host__ __device__ static constexpr bool read(int at) {
        for (int e = 0; e < slices; ++e)
            for (int t = 0; t < D::t; ++t)
                if (overlaps(e, t) && slice_of(e, t) == at) return true;
        return false;
    }
};

// What a thread keeps, and which columns of dy its strip of dx reads.
template <class Problem, class Tuning>
struct DepthwiseInputShape {
    static constexpr int columns = Tuning::columns, taps = filter_taps<Problem>;
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
    using Slices = InputSlices<Problem, Tuning>;
    using D = Depth<Problem>;
    using T = typename Problem::element;
    constexpr int columns = Shape::columns, live = Shape::live, span = Shape::span, taps = Shape::taps;
    constexpr int stride = Problem::stride_h, multiplier = Problem::group_k, slices = Slices::slices;
    constexpr int channel_tiles = ceil_div(Problem::c, Tuning::channels), in_block = Tuning::threads / Tuning::channels;
    static_assert(Problem::group_c == 1 && !Problem::chwn, "one channel a group, images outermost");
    static_assert(identity<typename Problem::activation>, "a gradient has no activation");

    // Which strip of which band of which channel. NCHW: strips, bands, slices, channels, images; a block of NHWC has a tile of
    // channels, and of the others some after each other.
    int c, strip, band, first_d = 0;
    int64 n;
    if constexpr (Problem::nhwc) {
        c = static_cast<int>(blockIdx.x % channel_tiles) * Tuning::channels + threadIdx.x % Tuning::channels;
        const int64 rest = static_cast<int64>(blockIdx.x / channel_tiles) * in_block + threadIdx.x / Tuning::channels;
        strip = static_cast<int>(rest % Shape::strips);
        band = static_cast<int>(rest / Shape::strips % Shape::bands);
        n = rest / (Shape::strips * Shape::bands);
        if constexpr (D::volume) {
            first_d = static_cast<int>(n % Slices::tiles) * slices;
            n /= Slices::tiles;
        }
    } else {
        const int64 number = static_cast<int64>(blockIdx.x) * Tuning::threads + threadIdx.x;
        strip = static_cast<int>(number % Shape::strips);
        const int64 rest = number / Shape::strips;
        band = static_cast<int>(rest % Shape::bands);
        if constexpr (D::volume) {
            const int64 of_slices = rest / Shape::bands;
            first_d = static_cast<int>(of_slices % Slices::tiles) * slices;
            c = static_cast<int>(of_slices / Slices::tiles % Problem::c);
            n = of_slices / (static_cast<int64>(Slices::tiles) * Problem::c);
        } else {
            c = static_cast<int>(rest / Shape::bands % Problem::c);
            n = rest / (static_cast<int64>(Shape::bands) * Problem::c);
        }
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
    constexpr int64 apart = Problem::nhwc ? 1 : static_cast<int64>(output_rows<Problem>) * Problem::q;
    const int first_j = strip * columns, column = first_j / Problem::stride_w + Shape::first;
    const int first_p = Shape::first_group + band * Tuning::rows - span;
    const T* const grad = Problem::nhwc ? dy + n * output_rows<Problem> * dy_row + c * multiplier
                                        : dy + (n * Problem::k + c * multiplier) * apart;
    constexpr int height = D::d * Problem::h;
    T* const result = (Problem::nhwc ? dx + n * height * out_row + c : dx + (n * Problem::c + c) * height * out_row) +
        first_j * out_pixel;
    const bool vector = Shape::vector_stores && reinterpret_cast<unsigned long long>(dx) % (4 * item<Problem>) == 0;
    const int total = min(Tuning::rows, Problem::row_groups - band * Tuning::rows) + span;

    // A slice of dy, counted from the first that the tile reads, and row t of it.
    const int first_z = first_d / D::stride + Slices::first;
    const auto row_of = [&](int j, int t) {
        return static_cast<int64>(D::volume ? (first_z + j) * Problem::p + first_p + t : first_p + t) * dy_row;
    };
    const auto exists = [&](int j) { return !D::volume || static_cast<unsigned>(first_z + j) < static_cast<unsigned>(D::z); };
    const auto load = [&](WindowPixels<Shape, T>(&to)[Slices::deep], int t, int m) {
        const bool inside = static_cast<unsigned>(first_p + t) < static_cast<unsigned>(Problem::p);
#pragma unroll
        for (int j = 0; j < Slices::deep; ++j)
            if (Slices::read(j)) load_window<Shape>(to[j], grad + m * apart + row_of(j, t), column, inside && exists(j));
    };

    // Rows are brought to the L2 cache some steps before they are loaded. Explored (H200, a6365f6): 5 to 9 % faster in
    // NHWC, nothing gained in NCHW.
    constexpr int ahead = Problem::nhwc ? 2 : 0;
    const auto prefetch = [&](int t) {
        const int p = first_p + t;
        if constexpr (ahead > 0) {
            if (t < total && static_cast<unsigned>(p) < static_cast<unsigned>(Problem::p))
                for (int m = 0; m < multiplier; ++m)
#pragma unroll
                    for (int j = 0; j < Slices::deep; ++j)
                        if (Slices::read(j) && exists(j))
                            prefetch_pixels<columns / Problem::stride_w, Problem::q, Shape::pixel>(
                                grad + m * apart + row_of(j, t), first_j / Problem::stride_w);
        }
    };
#pragma unroll 1
    for (int t = 1; t < ahead; ++t) prefetch(t);
    const float b = Problem::bias ? to_float(bias[c]) : 0.0f;
    float sum[live][stride][slices][columns] = {};
    WindowPixels<Shape, T> window[Slices::deep], next[Slices::deep];
    load(window, 0, 0);
    // Row t of dy completes its own group of rows of dx and reaches `span` groups below. `slot`: the place of the group in
    // the ring; without a ring it is always the first.
    const auto step = [&](int t, int slot) {
        float(&done)[stride][slices][columns] = sum[slot];
        prefetch(t + ahead);
#pragma unroll 1
        for (int m = 0; m < multiplier; ++m) {
            const bool last = m + 1 == multiplier;
            if constexpr (multiplier > 1) read_filter(m);
            load(next, t + last, last ? 0 : m + 1);
#pragma unroll
            for (int r = 0; r < Problem::r; ++r) {
                const int below = r * Problem::dilation_h;
#pragma unroll
                for (int u = 0; u < slices * D::t; ++u) {
                    const int d = u / D::t, tap = u % D::t;
                    if (!Slices::overlaps(d, tap)) continue;
                    float(&to)[columns] = sum[(slot + below / stride) % live][below % stride][d];
#pragma unroll
                    for (int s = 0; s < Problem::s; ++s)
#pragma unroll
                        for (int e = 0; e < columns; ++e)
                            if (Shape::overlaps(e, s))
                                to[e] = fmaf(filter[(tap * Problem::r + r) * Problem::s + s],
                                             window[Slices::slice_of(d, tap)][Shape::pixel_of(e, s)], to[e]);
                }
            }
#pragma unroll
            for (int j = 0; j < Slices::deep; ++j) window[j] = next[j];
        }
#pragma unroll
        for (int u = 0; u < stride * slices; ++u) {
            const int o = u / slices, d = u % slices, i = (first_p + t) * stride - Problem::pad_top + o;
            if (t < span || i < 0 || i >= Problem::h) continue;
            if (D::volume && D::d % slices != 0 && first_d + d >= D::d) continue;
            T* const to = result + static_cast<int64>(D::volume ? (first_d + d) * Problem::h + i : i) * out_row;
#pragma unroll
            for (int j = 0; j < columns; j += 4) {
                T v[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if (j + e >= columns) continue;
                    const T* const at = to + (j + e) * out_pixel;
                    v[e] = from_float<T>(finish<Problem>(done[o][d][j + e], b, held_by<Problem>(at, first_j + j + e < Problem::w)));
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
        for (int o = 0; o < stride * slices; ++o)
#pragma unroll
            for (int e = 0; e < columns; ++e) done[o / slices][o % slices][e] = 0.0f;
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
                for (int o = 0; o < stride * slices; ++o)
#pragma unroll
                    for (int e = 0; e < columns; ++e) sum[i][o / slices][o % slices][e] = sum[i + 1][o / slices][o % slices][e];
#pragma unroll
            for (int o = 0; o < stride * slices; ++o)
#pragma unroll
                for (int e = 0; e < columns; ++e) sum[span][o / slices][o % slices][e] = 0.0f;
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
