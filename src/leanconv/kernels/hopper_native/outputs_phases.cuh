// From a warpgroup's accumulators of all phases of 64 pixels to the gradient that native_gemm_nchw computes in one launch.
//
// Pixels of two phases of columns are neighbours: a thread stores both at once, and eight lanes 32 bytes of a row.
// Explored (H200, 128 to 512 channels): stores of 8 and 16 bytes that pass through shared memory, as in outputs_nchw.cuh, take 0.95
// to 1.23 times as long.
#pragma once

#include <kernels/hopper_native/accumulators.cuh>
#include <kernels/hopper_native/linear_pixels.cuh>

namespace leanconv {

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
