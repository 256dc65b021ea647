// From the accumulators of a warpgroup to an output in NHWC: the sum over a cluster, what follows the sums, rounding,
// stores.
#pragma once

#include <device/ptx/memory.cuh>
#include <device/ptx/sync.cuh>
#include <kernels/hopper_native/accumulators.cuh>

namespace leanconv {

// The terms of a group's filters k and k + 1, as far as these exist.
template <class Problem>
__device__ __forceinline__ void load_terms(Term<Problem> (&to)[2], Bias<Problem> bias, int group, int k) {
    const int filter = group * Problem::group_k + k;
#pragma unroll
    for (int i = 0; i < 2; ++i) to[i] = term_of<Problem>(bias, filter + i, k + i < Problem::group_k);
}

// Stores of 16 pixels x `filters` by one warp.
//
// 16-bit elements: a thread holds pairs of neighbouring filters of two pixels in every eight, which would be stores of 4 bytes.
// Each warp transposes them in shared memory of its own, 16 pixels x `width` filters at a time, and stores 16 bytes a lane: rows
// of the output are stored in whole sectors, wherever their pixels lie.
template <class Problem, int filters, int element_bytes = sizeof(typename Problem::result)>
struct OutputNhwc {
    using T = typename Problem::result;
    static constexpr int width = filters % 64 == 0 ? 64 : 32, units = width / 8, row_bytes = 2 * width;
    static constexpr int rows = 16, warp_bytes = rows * row_bytes, passes = rows * units / 32;
    static constexpr bool vectors = Problem::k % 8 == 0 && Problem::group_k % 8 == 0;
    static_assert(Problem::nhwc && element_bytes == 2, "filters of 16 bits are adjacent");
    static_assert(filters % width == 0, "a tile has whole passes");

    // Eight filters of a pixel. Units are swizzled so that the pairs of a warp's stores, and the units of a quarter of its loads,
    // meet each bank once.
    static __device__ __forceinline__ unsigned char* unit_at(unsigned char* shared, int row, int unit) {
        return shared + row * row_bytes + (unit ^ row * row_bytes / 128 % units) * 16;
    }

    // To shared memory: the two pixels of a thread, and pairs of filters from `first_k` of the group on, with the sums from
    // `first` on.
    template <int count>
    static __device__ __forceinline__ void stage(const float (&sums)[count], int first, unsigned char* shared, Bias<Problem> bias,
                                                 const T* y, const Place (&place)[2], int group, int first_k, int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int unit = 0; unit < units; ++unit) {
            const int k = first_k + unit * 8 + 2 * t, filter = group * Problem::group_k + k;
            Term<Problem> terms[2];
            float v[2];
            load_terms<Problem>(terms, bias, group, k);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const HeldOutputs<Problem, vectors, 2, T> both(bias, y + place[half].offset * Problem::k + filter,
                                                        place[half].count > 0 && k < Problem::group_k);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const bool exists = place[half].count > 0 && k + i < Problem::group_k;
                    const float held = both.value(i, y + place[half].offset * Problem::k + filter + i, exists);
                    v[i] = finish<Problem>(sums[first + unit * 4 + 2 * half + i], terms[i], held);
                }
                *reinterpret_cast<unsigned*>(unit_at(shared, g + 8 * half, unit) + 4 * t) = rounded_pair(T{}, v);
            }
        }
    }

    static __device__ __forceinline__ void store_unit(T* to, const unsigned char* from, int exist) {
        unsigned words[4];
        ld_shared_v4_u32(words, from);
        if constexpr (vectors) {
            *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (i < exist) to[i] = T{static_cast<unsigned short>(words[i / 2] >> i % 2 * 16)};
        }
    }

    // 16 pixels from `first_pixel` on, and `filters` of the group from `first_k` on. `shared` is this warp's.
    template <class Tiles, int count>
    static __device__ __forceinline__ void store(const float (&sums)[count], unsigned char* shared, Bias<Problem> bias, T* y,
                                                 const Tiles& tiles, Offset<Problem> first_pixel, int group, int first_k,
                                                 int lane) {
        Place pair[2] = {}, place[passes];
        if constexpr (adds<Problem>) {
#pragma unroll
            for (int half = 0; half < 2; ++half) pair[half] = tiles.place(first_pixel + lane / 4 + 8 * half);
        }
#pragma unroll
        for (int i = 0; i < passes; ++i) place[i] = tiles.place(first_pixel + (i * 32 + lane) / units);
#pragma unroll
        for (int i = 0; i < filters / width; ++i) {
            const int k = first_k + i * width;
            if (Problem::group_k % filters != 0 && k >= Problem::group_k) break;
            __syncwarp();  // the filters before have been read
            stage(sums, i * width / 2, shared, bias, y, pair, group, k, lane);
            __syncwarp();
#pragma unroll
            for (int pass = 0; pass < passes; ++pass) {
                const int at = pass * 32 + lane, unit_k = k + at % units * 8;
                if (place[pass].count == 0 || unit_k >= Problem::group_k) continue;
                store_unit(y + place[pass].offset * Problem::k + group * Problem::group_k + unit_k,
                           unit_at(shared, at / units, at % units), Problem::group_k - unit_k);
            }
        }
    }
};

// Float32: pairs as they are, 8 bytes; four lanes fill a sector of 32. No shared memory.
template <class Problem, int filters>
struct OutputNhwc<Problem, filters, 4> {
    static constexpr int warp_bytes = 0;
    static constexpr bool vectors = Problem::k % 2 == 0 && Problem::group_k % 2 == 0;
    static_assert(Problem::nhwc, "filters are adjacent");

    template <class Tiles, int count>
    static __device__ __forceinline__ void store(const float (&sums)[count], unsigned char*, Bias<Problem> bias, float* y,
                                                 const Tiles& tiles, Offset<Problem> first_pixel, int group, int first_k,
                                                 int lane) {
        const int g = lane / 4, t = lane % 4;
        const Place places[2] = {tiles.place(first_pixel + g), tiles.place(first_pixel + g + 8)};
#pragma unroll
        for (int j = 0; j < count / 4; ++j) {
            const int k = first_k + 8 * j + 2 * t, filter = group * Problem::group_k + k;
            Term<Problem> terms[2];
            float v[2];
            load_terms<Problem>(terms, bias, group, k);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (places[half].count == 0) continue;
                float* const to = y + places[half].offset * Problem::k + filter;
                const HeldOutputs<Problem, vectors, 2, float> both(bias, to, k < Problem::group_k);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float held = both.value(i, to + i, k + i < Problem::group_k);
                    v[i] = finish<Problem>(sums[4 * j + 2 * half + i], terms[i], held);
                }
                if constexpr (vectors) {
                    if (k < Problem::group_k) store_adjacent(to, v);
                } else {
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (k + i < Problem::group_k) to[i] = v[i];
                }
            }
        }
    }
};

}  // namespace leanconv
