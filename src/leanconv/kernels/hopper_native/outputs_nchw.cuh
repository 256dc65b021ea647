// From a warpgroup's accumulators of 64 pixels to the output of native_gemm_nchw: what follows the sums, rounding to 16 bits, stores.
//
// A thread holds pairs of neighbouring filters of two pixels, which lie far apart in NCHW. Neighbouring pixels are adjacent
// there, but for the zeros between rows. So the warpgroup transposes its outputs in shared memory, `width` filters at a time,
// where it leaves out these zeros, and stores as many of a filter's outputs at once as are aligned in every image: eight, 16
// bytes, where an image has a multiple of eight. Where outputs are not adjacent, threads store them one by one.
#pragma once

#include <device/ptx/sync.cuh>
#include <kernels/hopper_native/accumulators.cuh>
#include <kernels/hopper_native/linear_pixels.cuh>

namespace leanconv {

// `filters_`: those of a tile, or of a CTA's share of it.
template <class Problem, class Tuning, int filters_ = Tuning::filters>
struct OutputNchw {
    using T = typename Problem::result;
    using Output = LinearOutput<Problem, Tuning>;
    static constexpr int filters = filters_, count = filters / 2, width = filters < 64 ? filters : 64;
    using D = Depth<Problem>;
    static constexpr int64 image = static_cast<int64>(DepthPhases<Problem>::out) * Problem::out_h * Problem::out_w;
    static constexpr bool whole = Phase<Problem>::whole;
    static constexpr int together = gcd(output_pixels<Problem>, 8);
    // NOTE: rows of filters lie 36 words apart: of eight pixels and four pairs of filters no two words are in one bank.
    static constexpr int pitch = 72;
    static constexpr int units = (64 + 2 * (together - 1)) / together;  // of a row

    // The term of filter k of the group, which exists as `first` does where filters come by whole widths. Read-only loads pass the
    // stores to shared memory, so that those of many filters are under way together, where a thread has registers for that and
    // no residuals hold them.
    static __device__ __forceinline__ Term<Problem> term_in(Bias<Problem> bias, int group, int k, int first) {
        constexpr bool ahead = !Problem::add && Tuning::consumer_registers >= 224;
        const bool exists = (Problem::group_k % width == 0 ? first : k) < Problem::group_k;
        return term_of<Problem, ahead>(bias, group * Problem::group_k + k, exists);
    }

    // The 64 pixels from linear index `first` on, and `filters` of the group from `first_k` on.
    static __device__ __forceinline__ void store(const float (&sums)[count], unsigned char* shared, Bias<Problem> bias, T* y,
                                                 long long batch, int first, int group, int first_k, int warpgroup) {
        const int lane = threadIdx.x % 32, own = first + threadIdx.x % 128 / 32 * 16 + lane / 4, pair = lane % 4 * 2;
        const Output at[2] = {Output(own), Output(own + 8)};
        const bool exists[2] = {at[0].exists(batch), at[1].exists(batch)};
        T* to[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = Problem::first_p + at[half].p * Problem::step_p;
            const int column = Problem::first_q + at[half].q * Problem::step_q;
            int n = at[half].n, slice = 0;
            if constexpr (D::volume) {
                const int volume = n / D::z;
                slice = DepthPhases<Problem>::first + (n - volume * D::z) * DepthPhases<Problem>::step;
                n = volume;
            }
            const int64 channel = static_cast<int64>(n) * Problem::k + group * Problem::group_k;
            to[half] = y + (channel + first_k + pair) * image + row * Problem::out_w + column;
            if constexpr (D::volume) to[half] += static_cast<int64>(slice) * (Problem::out_h * Problem::out_w);
        }
        const int begin = Output(first).before(batch), end = Output(first + 64).before(batch);
        const int aligned = begin - begin % together;
        T* const square = reinterpret_cast<T*>(shared);
        T* columns[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) columns[half] = square + pair * pitch + at[half].before(batch) - aligned;
        const WidthStores stores(y, group, first_k, begin, end, aligned);
#pragma unroll
        for (int k0 = 0; k0 < filters; k0 += width) {
            if (Problem::group_k % filters != 0 && first_k + k0 >= Problem::group_k) break;
            // Where a thread has registers for them, all residuals of these filters are under way together.
            constexpr bool early = Problem::add && Tuning::consumer_registers >= 160;
            float residual[early ? width / 8 : 1][2][2];
            if constexpr (early) {
#pragma unroll
                for (int of = 0; of < width / 2; ++of) {
                    const int k = k0 + of / 4 * 8 + of % 2, half = of / 2 % 2;
                    const bool is = exists[half] && first_k + k + pair < Problem::group_k;
                    residual[of / 4][half][of % 2] = held_by<Problem>(bias, to[half] + k * image, is);
                }
            }
            if (whole) barrier_sync(1 + warpgroup, 128);  // the filters before have been read
#pragma unroll
            for (int vector = 0; vector < width; vector += 8) {
                const int k = first_k + k0 + vector + pair;
                const int of = first_k + k0;
                const Term<Problem> terms[2] = {term_in(bias, group, k, of), term_in(bias, group, k + 1, of)};
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float v[2];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        float held;
                        if constexpr (early) held = residual[vector / 8][half][i];
                        else held = held_by<Problem>(bias, to[half] + (k0 + vector + i) * image,
                                                     exists[half] && k + i < Problem::group_k);
                        v[i] = finish<Problem>(sums[(k0 + vector) / 2 + 2 * half + i], terms[i], held);
                    }
                    const unsigned both = rounded_pair(T{}, v);
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const T value{static_cast<unsigned short>(both >> 16 * i)};
                        if (whole && exists[half]) columns[half][(vector + i) * pitch] = value;
                        if (!whole && exists[half] && k + i < Problem::group_k)
                            to[half][(k0 + vector + i) * image] = value;
                    }
                }
            }
            if (!whole) continue;
            barrier_sync(1 + warpgroup, 128);
            stores.store(square, k0, first_k);
        }
    }

    // A thread's share of the stores of `width` filters. Whole units: the same one of every `step`-th filter. The outputs before
    // the first and behind the last whole one: the same of every `edge_step`-th filter.
    struct WidthStores {
        static constexpr int step = 128 / units, edges = 2 * together, edge_step = 128 / edges;
        T* to;
        T* edge_to;
        int column, filter, edge_column, edge_filter;  // columns of the square
        __device__ __forceinline__ WidthStores(T* y, int group, int first_k, int begin, int end, int aligned) {
            const int thread = threadIdx.x % 128;
            column = thread % units * together, filter = thread / units;
            to = place(y, group, first_k, aligned + column);
            if (filter >= step || aligned + column < begin || aligned + column + together > end) filter = width;
            // NOTE: where a unit has both ends, its outputs are those before the first whole one.
            const int before = begin - aligned, whole_end = (end - aligned) / together * together, edge = thread % edges;
            const int first_end = before == 0 ? 0 : min(together, end - aligned);
            edge_column = edge < together ? edge : whole_end + edge - together, edge_filter = thread / edges;
            edge_to = place(y, group, first_k, aligned + edge_column);
            const bool first = edge < together && edge >= before && edge < first_end;
            const bool last = edge >= together && edge_column >= first_end && aligned + edge_column < end;
            if (!first && !last) edge_filter = width;
        }
        static __device__ __forceinline__ T* place(T* y, int group, int first_k, int number) {
            const int n = number / static_cast<int>(image);
            return y + (static_cast<int64>(n) * Problem::k + group * Problem::group_k + first_k) * image +
                   (number - n * static_cast<int>(image));
        }
        __device__ __forceinline__ void store(const T* square, int k0, int first_k) const {
            const int exist = min(width, Problem::group_k - first_k - k0);
#pragma unroll
            for (int i = 0; i < width; i += step)
                if (filter + i < exist)
                    copy_together(to + (k0 + filter + i) * image, square + (filter + i) * pitch + column);
            if constexpr (together > 1) {
#pragma unroll
                for (int i = 0; i < width; i += edge_step)
                    if (edge_filter + i < exist)
                        edge_to[(k0 + edge_filter + i) * image] = square[(edge_filter + i) * pitch + edge_column];
            }
        }
    };
    static __device__ __forceinline__ void copy_together(T* to, const T* from) {
        if constexpr (together == 8) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
        else if constexpr (together == 4) *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
        else if constexpr (together == 2) *reinterpret_cast<unsigned*>(to) = *reinterpret_cast<const unsigned*>(from);
        else *to = *from;
    }
};

// From a warpgroup's accumulators of all phases of 64 pixels to the gradient that native_gemm_nchw computes in one launch.
//
// Pixels of two phases of columns are neighbours: a thread stores both at once, and eight lanes 32 bytes of a row.
// Explored (H200, 390e90a9, 128 to 512 channels): stores of 8 and 16 bytes that pass through shared memory, as in OutputNchw, take 0.95 to
// 1.23 times as long.
template <class Problem, class Tuning>
struct OutputPhases {
    using T = typename Problem::result;
    using Output = LinearOutput<Problem, Tuning>;
    static constexpr int count = Tuning::filters / 2, rows = Problem::phases_h, columns = Problem::phases_w;
    static constexpr int64 image = static_cast<int64>(Problem::out_h) * Problem::out_w;
    static constexpr bool in_pairs = columns == 2 && Problem::out_w % 2 == 0;
    static_assert(columns <= 2, "two neighbours are rounded together");

    // The 64 pixels from linear index `first` on, and the group's filters from `first_k` on.
    static __device__ __forceinline__ void store(const float (&sums)[rows * columns][count], Bias<Problem> bias, T* y,
                                                 long long batch, int first, int group, int first_k) {
        const int lane = threadIdx.x % 32, own = first + threadIdx.x % 128 / 32 * 16 + lane / 4, pair = lane % 4 * 2;
        T* to[2];
        int rows_left[2], columns_left[2];  // in the image, from the first of this place's on
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Output at(own + 8 * half);
            const int64 channel = static_cast<int64>(at.n) * Problem::k + group * Problem::group_k + first_k + pair;
            to[half] = y + channel * image + at.p * rows * Problem::out_w + at.q * columns;
            rows_left[half] = at.exists(batch) ? Problem::out_h - at.p * rows : 0;
            columns_left[half] = Problem::out_w - at.q * columns;
        }
#pragma unroll
        for (int vector = 0; vector < Tuning::filters; vector += 8)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int k = first_k + vector + pair + i;
                const Term<Problem> term = term_of<Problem>(bias, group * Problem::group_k + k, k < Problem::group_k);
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int row = 0; row < rows; ++row) {
                        T* const at = to[half] + (vector + i) * image + row * Problem::out_w;
                        const bool exists = row < rows_left[half] && k < Problem::group_k;
                        float v[2] = {};
#pragma unroll
                        for (int column = 0; column < columns; ++column) {
                            const float held = held_by<Problem>(bias, at + column, exists && column < columns_left[half]);
                            v[column] = finish<Problem>(sums[row * columns + column][vector / 2 + 2 * half + i], term, held);
                        }
                        const unsigned both = rounded_pair(T{}, v);
                        if constexpr (in_pairs) {
                            if (exists) *reinterpret_cast<unsigned*>(at) = both;
                        } else {
#pragma unroll
                            for (int column = 0; column < columns; ++column)
                                if (exists && column < columns_left[half])
                                    at[column] = T{static_cast<unsigned short>(both >> 16 * column)};
                        }
                    }
            }
    }
};

}  // namespace leanconv
