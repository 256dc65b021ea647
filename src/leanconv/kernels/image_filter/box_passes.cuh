// box_passes: what all pixels of a large box make (box.cuh), in two launches: along columns from the image into the result,
// then along rows of the result, in place.
//
//   v[i, j] = op over u of x[i + u - anchor_y, j]                                                the column pass
//   y[i, j] = delta + w * op over z of v[i, j + z - anchor_x]                                    the row pass
//
// Requires   results of the type of the sums, as large as the image; one channel; boxes of 33 x 33 and more; a row fits into
//            shared memory.
// Numerics   as box.cuh, no difference is taken: a sum of n along an axis is off by at most n / 16 + 32 roundings.
// Groups     A line is cut into groups of 16. Let n - 1 = 16 * whole + rest. The windows of 16 outputs that begin at group a
//            are an end of group a | `rest` elements and whole - 1 groups, in all of them | a beginning of the 16 elements from
//            16 * (a + whole) + rest on, which enter. Of what enters, the sums of all 16 and of the last `rest` are kept in
//            shared memory: the middle of the windows of later groups consists of these. What leaves is read again.
// Column     A block marches down a strip of 32 * columns columns. A warp has 16 rows of a step: it loads those that enter and
// pass       those that leave, keeps the sums, and after a barrier stores 16 rows of results.
// Row pass   A block has a row in shared memory, extended by the border; a thread makes 16 neighbouring outputs of it.
// Work       an output takes five operations along an axis and n / 256 shared loads of 32 bits. Of an image of float32, 8 bytes
//            are read and 4 written, then 4 read and 4 written; L2 may serve what leaves, and what the column pass wrote last.
// Measured   figure: filter-large box_passes/cucim mean = 11.7
#pragma once

#include <kernels/image_filter/box.cuh>

namespace leanconv {

// How windows of `taps` places lie in groups of 16.
template <int taps>
struct Groups {
    static constexpr int whole = (taps - 1) / 16, rest = (taps - 1) % 16;
    // The middle of windows consists of the last places of one group, where there are such, and all of others.
    static constexpr int first = rest > 0 ? 0 : 1;
    static_assert(whole >= 2, "smaller boxes are left to box.cuh");
};

// The sums that groups keep for others: of all 16, and of the last `rest`.
template <class Op, int rest, class T, int columns>
__device__ __forceinline__ void sums_of(T (&all)[columns], T (&last)[columns], const T (&v)[16][columns]) {
#pragma unroll
    for (int c = 0; c < columns; ++c) {
        T first = v[0][c], second = v[15][c];
#pragma unroll
        for (int e = 1; e < 16 - rest; ++e) first = Op::of(first, v[e][c]);
#pragma unroll
        for (int e = 14; e >= 16 - rest; --e) second = Op::of(v[e][c], second);
        all[c] = rest == 0 ? first : Op::of(first, second);
        last[c] = second;
    }
}

// The results of 16 windows, in place of what enters: `middle` is what all of them have.
template <class Op, class T, int columns>
__device__ __forceinline__ void join(T (&enters)[16][columns], const T (&leaves)[16][columns], const T (&middle)[columns]) {
#pragma unroll
    for (int c = 0; c < columns; ++c) {
#pragma unroll
        for (int e = 1; e < 16; ++e) enters[e][c] = Op::of(enters[e - 1][c], enters[e][c]);
        T end = Op::of(leaves[15][c], middle[c]);
#pragma unroll
        for (int e = 15; e >= 0; --e) {
            enters[e][c] = Op::of(end, enters[e][c]);
            if (e > 0) end = Op::of(leaves[e - 1][c], end);
        }
    }
}

// A strip's rows in the registers of a warp, `columns` neighbours a lane.
template <class Problem, int columns>
struct StripRows {
    using T = typename Arithmetic<typename Problem::sum>::type;
    using In = typename InMemory<typename Problem::element, T>::type;
    using Border = typename Problem::border;

    const In* from;
    const int first_row, height, count;  // `count` of the lane's columns lie inside the image
    const int64 pitch;
    const T value;
    const bool vectors;

    __device__ __forceinline__ void load(T (&to)[columns], int n) const {
        const int i = border_index<Border>(first_row + n, height);
#pragma unroll
        for (int c = 0; c < columns; ++c) to[c] = value;
        if (!Border::maps_inside && i < 0) return;
        const In* const at = from + i * pitch;
        if (vectors) {
            if constexpr (columns == 4) {
                FourElements<In> four;
                four.load(at);
                four.widen_to(to);
            } else if constexpr (columns == 2 && same_type<In, float>) {
                load_adjacent(to, at);
            } else {
#pragma unroll
                for (int c = 0; c < columns; ++c) to[c] = widen<T>(at[c]);
            }
        } else {
#pragma unroll
            for (int c = 0; c < columns; ++c)
                if (c < count) to[c] = widen<T>(at[c]);
        }
    }
};

template <class Problem, class Tuning, class T>
__device__ __forceinline__ void box_columns(const Image<typename InMemory<typename Problem::element, T>::type, T, T>& image,
                                            int strip, int top, int rows) {
    using G = Groups<Problem::r>;
    using Op = typename Problem::op;
    constexpr int columns = Tuning::columns, warps = Tuning::warps, slots = G::whole + 2 * warps, width = 32 * columns;
    const int warp = warp_number(), lane = threadIdx.x % 32, j = strip * width + lane * columns;
    const bool vectors = (strip + 1) * width <= image.width && aligned(image.x, image.x_pitch) &&
                         aligned(image.y, image.y_pitch);
    const int count = min(columns, image.width - j);
    const StripRows<Problem, columns> source{image.x + j, top - Problem::anchor_y, image.height, count, image.x_pitch,
                                             image.value, vectors};
    // Of group k, counted from the first that is kept, slot k % slots.
    T* const kept_all = reinterpret_cast<T*>(shared_memory()) + lane * columns;
    T* const kept_last = kept_all + slots * width;
    const int groups = ceil_div(rows, 16);
    int slot = warp;
#pragma unroll 1
    for (int first = -G::whole; first < groups; first += warps) {
        const int group = first + warp;
        T enters[16][columns], leaves[16][columns];
        if (group < groups) {
#pragma unroll
            for (int e = 0; e < 16; ++e) source.load(enters[e], 16 * group + Problem::r - 1 + e);
            if (group >= 0) {
#pragma unroll
                for (int e = 0; e < 16; ++e) source.load(leaves[e], 16 * group + e);
            }
            T all[columns], last[columns];
            sums_of<Op, G::rest>(all, last, enters);
#pragma unroll
            for (int c = 0; c < columns; ++c) {
                kept_all[slot * width + c] = all[c];
                if (G::rest > 0) kept_last[slot * width + c] = last[c];
            }
        }
        __syncthreads();  // the step's sums are there
        if (group >= 0 && group < groups) {
            T middle[columns];
            int from = slot + slots - G::whole;  // of the oldest group in reach, of which the last are wanted
            from -= from >= slots ? slots : 0;
            const int begin = G::rest > 0 ? 0 : 1;
            if (begin == 1) from = from + 1 == slots ? 0 : from + 1;
#pragma unroll
            for (int c = 0; c < columns; ++c) middle[c] = (begin == 0 ? kept_last : kept_all)[from * width + c];
#pragma unroll 8
            for (int k = begin + 1; k < G::whole; ++k) {
                from = from + 1 == slots ? 0 : from + 1;
#pragma unroll
                for (int c = 0; c < columns; ++c) middle[c] = Op::of(middle[c], kept_all[from * width + c]);
            }
            join<Op>(enters, leaves, middle);
#pragma unroll
            for (int e = 0; e < 16; ++e) {
                const int i = 16 * group + e;
                if (i >= rows) continue;
                T* const to = image.y + (top + i) * image.y_pitch + j;
                if (vectors) {
                    if constexpr (columns == 4) {
                        const T four[4] = {enters[e][0], enters[e][1], enters[e][2], enters[e][3]};
                        store_vector(to, four);
                    } else if constexpr (columns == 2 && same_type<T, float>) {
                        *reinterpret_cast<float2*>(to) = make_float2(enters[e][0], enters[e][1]);
                    } else {
#pragma unroll
                        for (int c = 0; c < columns; ++c) to[c] = enters[e][c];
                    }
                } else {
#pragma unroll
                    for (int c = 0; c < columns; ++c)
                        if (c < count) to[c] = enters[e][c];
                }
            }
        }
        slot = slot + warps < slots ? slot + warps : slot + warps - slots;
    }
}

// A row in shared memory: groups of 16 lie 20 words apart, so that threads that read a group each meet all banks.
template <class Problem, class T>
struct ExtendedRow {
    static constexpr int pitch = sizeof(T) == 4 ? 20 : 18;
    static __device__ __forceinline__ int place(int q) { return q / 16 * pitch + q % 16; }

    // 16 neighbours from 16 * group + offset on; four beyond them lie in the row too.
    template <int offset>
    static __device__ __forceinline__ void load(T (&v)[16][1], const T* row, int group) {
        constexpr int lead = offset % 4, vectors = lead == 0 ? 4 : 5;
#pragma unroll
        for (int k = 0; k < vectors; ++k) {
            T four[4];
            const int q = offset - lead + 4 * k;
            load_vector(four, row + (group + q / 16) * pitch + q % 16);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (4 * k + e >= lead && 4 * k + e - lead < 16) v[4 * k + e - lead][0] = four[e];
        }
    }
};

template <class Problem, class Tuning, class T>
__device__ __forceinline__ void box_row(T* y, T weight, T delta, T value, int width, bool vectors) {
    using G = Groups<Problem::s>;
    using Op = typename Problem::op;
    using Border = typename Problem::border;
    using Row = ExtendedRow<Problem, T>;
    constexpr int s = Problem::s, anchor = Problem::anchor_x, threads = 32 * Tuning::warps;
    // Places before the row, in whole vectors.
    constexpr int left = round_up(anchor, 4), lead = left - anchor;
    const int groups = ceil_div(width, 16);
    T* const row = reinterpret_cast<T*>(shared_memory());
    T* const kept_all = row + (groups + G::whole + 3) * Row::pitch;  // of group -whole on
    T* const kept_last = kept_all + groups + G::whole;
    T* const kept_eight = kept_last + groups + G::whole;  // of eight groups from one on
    constexpr bool eights = G::whole > 16;
    // The value of a column outside: of a sum, so many pixels'.
    if (!Border::maps_inside && Problem::weighted) value *= static_cast<T>(Problem::r);
    if constexpr (sizeof(T) == 4) {
        if (vectors) {
#pragma unroll 1
            for (int k = threadIdx.x; k < width / 4; k += threads)
                cp_async_16(row + Row::place(left + 4 * k), y + 4 * k, true);
        }
    }
    // What is not copied: all places, or those outside the image.
    const int copied = vectors && sizeof(T) == 4 ? width : 0, places = (groups + G::whole + 3) * 16 - copied;
#pragma unroll 1
    for (int k = threadIdx.x; k < places; k += threads) {
        const int q = k < left ? k : k + copied, j = border_index<Border>(q - left, width);
        row[Row::place(q)] = q < left + width + s && (Border::maps_inside || j >= 0) ? y[j] : value;
    }
    cp_async_commit_group();
    cp_async_wait_group<0>();
    __syncthreads();  // the row is there
#pragma unroll 1
    for (int k = threadIdx.x; k < groups + G::whole; k += threads) {
        T enters[16][1], all[1], last[1];
        // group k - whole, of which group 0 is entered by 16 * whole + rest ...
        Row::template load<lead + G::rest>(enters, row, k);
        sums_of<Op, G::rest>(all, last, enters);
        kept_all[k] = all[0];
        if (G::rest > 0) kept_last[k] = last[0];
    }
    __syncthreads();  // all sums are there
    if (eights) {
#pragma unroll 1
        for (int k = threadIdx.x; k < groups + G::whole - 8; k += threads) {
            T eight = kept_all[k];
#pragma unroll
            for (int b = 1; b < 8; ++b) eight = Op::of(eight, kept_all[k + b]);
            kept_eight[k] = eight;
        }
        __syncthreads();
    }
#pragma unroll 1
    for (int k = threadIdx.x; k < round_up(groups, 32); k += threads) {
        T enters[16][1], leaves[16][1], middle[1];
        if (k < groups) {
            Row::template load<lead + G::rest>(enters, row, k + G::whole);
            Row::template load<lead>(leaves, row, k);
            middle[0] = (G::rest > 0 ? kept_last : kept_all)[k + G::first];
            int b = G::first + 1;
            if (eights) {
#pragma unroll 8
                for (; b + 8 <= G::whole; b += 8) middle[0] = Op::of(middle[0], kept_eight[k + b]);
            }
#pragma unroll 8
            for (; b < G::whole; ++b) middle[0] = Op::of(middle[0], kept_all[k + b]);
            join<Op>(enters, leaves, middle);
#pragma unroll
            for (int e = 0; e < 16; ++e) {
                T result = enters[e][0];
                if constexpr (Problem::weighted) result *= weight;
                enters[e][0] = result + delta;
            }
        }
        // Results leave by way of shared memory, in whole lines; a warp has its own place behind the sums.
        T* const staging = kept_all + round_up(3 * (groups + G::whole), 4) + threadIdx.x / 32 * 32 * Row::pitch;
        __syncwarp();
        const int lane = threadIdx.x % 32;
        if (k < groups) {
#pragma unroll
            for (int e = 0; e < 16; e += 4) {
                const T four[4] = {enters[e][0], enters[e + 1][0], enters[e + 2][0], enters[e + 3][0]};
                store_vector(staging + lane * Row::pitch + e, four);
            }
        }
        __syncwarp();
        const int begin = 16 * (k - lane), count = min(512, width - begin);
        if (vectors) {
#pragma unroll
            for (int e = 0; e < 16; e += 4) {
                const int at = 32 * e + 4 * lane;
                if (at >= count) continue;
                T four[4];
                load_vector(four, staging + Row::place(at));
                stream_sums(y + begin + at, four);
            }
        } else {
#pragma unroll 1
            for (int at = lane; at < count; at += 32) y[begin + at] = staging[Row::place(at)];
        }
    }
}

// Of the column pass block b has strip b % strips of band (b / strips) % bands of image b / strips / bands; of the row pass
// it has a row, the last ones first: they were written last.
template <class Problem, class Tuning>
__device__ __forceinline__ void box_passes(const typename Problem::element* x, const typename Problem::sum* w,
                                           typename Problem::result* y, typename Problem::sum value,
                                           typename Problem::sum delta, int height, int width, int64 x_pitch, int64 x_step,
                                           int64 y_pitch, int64 y_step, int strips, int bands, int band_rows) {
    using T = typename Arithmetic<typename Problem::sum>::type;
    using In = typename InMemory<typename Problem::element, T>::type;
    static_assert(same_type<typename Problem::result, typename Problem::sum>, "sums wait in the result");
    static_assert(Problem::channels == 1 && Problem::planes == 1 && !Problem::valid, "a row of sums is one of results");
    static_assert(0 <= Problem::anchor_y && Problem::anchor_y < Problem::r, "the anchor lies inside the box");
    static_assert(0 <= Problem::anchor_x && Problem::anchor_x < Problem::s, "the anchor lies inside the box");
    if constexpr (Problem::along_rows) {
        const int row = gridDim.x - 1 - blockIdx.x;
        T* const to = reinterpret_cast<T*>(y) + row / height * y_step + row % height * y_pitch;
        const bool vectors = width % 4 == 0 && aligned(to, 0);
        box_row<Problem, Tuning>(to, reinterpret_cast<const T*>(w)[0], static_cast<T>(delta), static_cast<T>(value), width,
                                 vectors);
    } else {
        const int rest = blockIdx.x / strips, image = rest / bands, top = rest % bands * band_rows;
        const int rows = min(band_rows, height - top);
        if (rows <= 0) return;
        const Image<In, T, T> view{reinterpret_cast<const In*>(x) + image * x_step, reinterpret_cast<T*>(y) + image * y_step,
                                   height, width, height, width, x_pitch, y_pitch, static_cast<T>(value)};
        box_columns<Problem, Tuning, T>(view, blockIdx.x % strips, top, rows);
    }
}

}  // namespace leanconv
