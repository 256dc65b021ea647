// From a warpgroup's sums of 64 pixels to the output of tensor_window: bias, activation, the one rounding to 16 bits, and stores.
//
// A thread holds pairs of neighbouring filters of two pixels, which lie far apart in NCHW. Neighbouring pixels are neighbours
// there, but for the zeros between rows. So the warpgroup turns its outputs around in shared memory, `part` filters at a time,
// where it leaves out these zeros, and stores as many of a filter's outputs at once as lie aligned in every image: eight, 16
// bytes, where an image has a multiple of eight. Where outputs do not lie side by side, threads store them one by one.
#pragma once

#include <lib/element.cuh>
#include <lib/epilogue.cuh>
#include <lib/pixel_windows.cuh>
#include <lib/ptx/barrier.cuh>

namespace leanconv {

template <class Problem, class Tuning>
struct WindowOutputs {
    using T = typename Problem::result;
    using Output = WindowOutput<Problem, Tuning>;
    static constexpr int filters = Tuning::filters, count = filters / 2;
    static constexpr int64 image = static_cast<int64>(Problem::out_h) * Problem::out_w;
    static constexpr bool whole = Phase<Problem>::whole;
    static constexpr int together = gcd(Problem::p * Problem::q, 8), part = filters < 64 ? filters : 64;
    // NOTE: rows of filters lie 36 words apart: lanes of eight pixels and four pairs of filters meet each bank once.
    static constexpr int pitch = 72, bytes = whole ? part * pitch * 2 : 0;
    static constexpr int units = (64 + 2 * (together - 1)) / together;  // of a row

    // Sum i of a thread, of filter `k` of the group: `at` is where it goes.
    static __device__ __forceinline__ T result(float sum, float added, const T* at, bool exists) {
        return from_float<T>(finish<Problem>(sum, added, held_by<Problem>(at, exists)));
    }
    static __device__ __forceinline__ float bias_of(const T* bias, int group, int k) {
        return Problem::bias && k < Problem::group_k ? to_float(bias[group * Problem::group_k + k]) : 0.0f;
    }

    // The 64 pixels from number `first` on, and `filters` of the group from `first_k` on.
    static __device__ __forceinline__ void store(const float (&sums)[count], unsigned char* shared, const T* bias, T* y,
                                                 long long batch, int first, int group, int first_k, int warpgroup) {
        const int lane = threadIdx.x % 32, own = first + threadIdx.x % 128 / 32 * 16 + lane / 4, pair = lane % 4 * 2;
        const Output at[2] = {Output(own), Output(own + 8)};
        const bool exists[2] = {at[0].exists(batch), at[1].exists(batch)};
        T* to[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = Problem::first_p + at[half].p * Problem::step_p;
            const int column = Problem::first_q + at[half].q * Problem::step_q;
            const int64 channel = static_cast<int64>(at[half].n) * Problem::k + group * Problem::group_k;
            to[half] = y + (channel + first_k + pair) * image + row * Problem::out_w + column;
        }
        if constexpr (!whole) {
#pragma unroll
            for (int i = 0; i < count; ++i) {
                const int filter = i / 4 * 8 + i % 2, half = i / 2 % 2;
                if (!exists[half] || first_k + pair + filter >= Problem::group_k) continue;
                const float added = bias_of(bias, group, first_k + pair + filter);
                to[half][filter * image] = result(sums[i], added, to[half] + filter * image, true);
            }
        } else {
            const int begin = Output(first).before(batch), end = Output(first + 64).before(batch);
            const int aligned = begin - begin % together;
            T* const square = reinterpret_cast<T*>(shared);
            const int column[2] = {at[0].before(batch) - aligned, at[1].before(batch) - aligned};
#pragma unroll
            for (int of_part = 0; of_part < filters; of_part += part) {
                const int part_k = first_k + of_part;
                if (Problem::group_k % filters != 0 && part_k >= Problem::group_k) break;
                barrier_sync(1 + warpgroup, 128);  // the part before has been read
#pragma unroll
                for (int i = 0; i < part / 2; ++i) {
                    const int filter = i / 4 * 8 + i % 2, half = i / 2 % 2, k = part_k + pair + filter;
                    const bool stored = exists[half] && k < Problem::group_k;
                    const T value = result(sums[of_part / 2 + i], bias_of(bias, group, k),
                                           to[half] + (of_part + filter) * image, stored);
                    if (exists[half]) square[(pair + filter) * pitch + column[half]] = value;
                }
                barrier_sync(1 + warpgroup, 128);
                store_part(square, y, group, part_k, begin, end, aligned);
            }
        }
    }

    // Outputs `begin` to `end` of the images, of `part` filters; the columns of `square` begin with the one of number `aligned`.
    static __device__ __forceinline__ void store_part(const T* square, T* y, int group, int first_k, int begin, int end,
                                                      int aligned) {
        for (int item = threadIdx.x % 128; item < units * part; item += 128) {
            const int filter = item / units, number = aligned + item % units * together, k = first_k + filter;
            if (number >= end || (Problem::group_k % filters != 0 && k >= Problem::group_k)) continue;
            const int n = number / static_cast<int>(image);
            const T* const from = square + filter * pitch + (number - aligned);
            T* const to = y + (static_cast<int64>(n) * Problem::k + group * Problem::group_k + k) * image +
                          (number - n * static_cast<int>(image));
            if (number >= begin && number + together <= end) {
                copy_together(to, from);
            } else {
#pragma unroll
                for (int i = 0; i < together; ++i)
                    if (number + i >= begin && number + i < end) to[i] = from[i];
            }
        }
    }
    static __device__ __forceinline__ void copy_together(T* to, const T* from) {
        if constexpr (together == 8) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
        else if constexpr (together == 4) *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
        else if constexpr (together == 2) *reinterpret_cast<unsigned*>(to) = *reinterpret_cast<const unsigned*>(from);
        else *to = *from;
    }
};

}  // namespace leanconv
