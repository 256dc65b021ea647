// From the accumulators of a warpgroup to an output in NHWC: the sum over a cluster, what follows the sums, rounding,
// stores.
#pragma once

#include <device/ptx/memory.cuh>
#include <device/ptx/sync.cuh>
#include <kernels/hopper_native/accumulators.cuh>

namespace leanconv {

// The terms of a group's filters k and k + 1, as far as these exist: as the filter `first` does where `together`. Such loads pass
// the stores to shared memory between which they stand. Explored (H200, 6f49aa5): layers of 1x1 filters with a bias take up to
// 10 % less time than with loads that wait.
template <class Problem, bool together>
__device__ __forceinline__ void load_terms(Term<Problem> (&to)[2], Bias<Problem> bias, int group, int k, int first) {
    const int filter = group * Problem::group_k + k;
#pragma unroll
    for (int i = 0; i < 2; ++i)
        to[i] = term_of<Problem, true>(bias, filter + i, (together ? first : k + i) < Problem::group_k);
}

// Stores of 16 pixels x `filters` by one warp.
//
// A thread holds pairs of neighbouring filters of two pixels in every eight, which would be stores of 4 bytes, or of 8 where
// outputs are float32. Each warp transposes them in shared memory of its own, 16 pixels x `width` filters at a time, and stores 16
// bytes a lane: rows of the output are stored in whole sectors, wherever their pixels lie. A residual takes the same way in: it is
// brought to the L2 cache while the products are computed, loaded as outputs are stored, `ahead` times `width` filters before,
// and lies where the outputs will.
template <class Problem, int filters>
struct OutputNhwc {
    using T = typename Problem::result;
    static constexpr int element_bytes = sizeof(T), unit = 16 / element_bytes;
    static constexpr int bytes = filters * element_bytes, row_bytes = bytes % 128 == 0 ? 128 : bytes % 64 == 0 ? 64 : 32;
    static constexpr int width = row_bytes / element_bytes;
    static constexpr int rows = 16, warp_bytes = rows * row_bytes, units = row_bytes / 16, passes = rows * units / 32;
    static constexpr bool vectors = Problem::k % unit == 0 && Problem::group_k % unit == 0, staged = Problem::add && vectors;
    static constexpr int rounds = filters / width, most = element_bytes == 2 ? 4 : 2, ahead = rounds < most ? rounds : most;
    static_assert(Problem::nhwc, "filters are adjacent");
    static_assert(filters % width == 0, "a tile has whole passes");

    // 16 bytes of a pixel. They are swizzled so that the pairs of a warp's stores, of half a warp's where they have 8 bytes, and
    // the units of a quarter of its loads, meet each bank once.
    static __device__ __forceinline__ unsigned char* unit_at(unsigned char* shared, int row, int at) {
        const int swizzle = element_bytes == 2 ? row * row_bytes / 128 : row % 4 * 2 + row / 4 % 2;
        return shared + row * row_bytes + (at ^ swizzle % units) * 16;
    }
    // Filters 8 i + 2 t and the one behind it.
    static __device__ __forceinline__ unsigned* pair_at(unsigned char* shared, int row, int i, int t) {
        if constexpr (element_bytes == 2) return reinterpret_cast<unsigned*>(unit_at(shared, row, i) + 4 * t);
        else return reinterpret_cast<unsigned*>(unit_at(shared, row, 2 * i + t / 2) + t % 2 * 8);
    }
    static __device__ __forceinline__ void load_pair(float (&to)[2], const unsigned* from) {
        if constexpr (element_bytes == 2) {
            const unsigned word = *from;
#pragma unroll
            for (int i = 0; i < 2; ++i) to[i] = to_float(T{static_cast<unsigned short>(word >> 16 * i)});
        } else {
            const float2 two = *reinterpret_cast<const float2*>(from);
            to[0] = two.x, to[1] = two.y;
        }
    }
    static __device__ __forceinline__ void store_pair(unsigned* to, const float (&v)[2]) {
        if constexpr (element_bytes == 2) *to = rounded_pair(T{}, v);
        else *reinterpret_cast<float2*>(to) = make_float2(v[0], v[1]);
    }

    // To shared memory: the two pixels of a thread, and pairs of filters from `first_k` of the group on, with the sums from
    // `first` on.
    template <int count>
    static __device__ __forceinline__ void stage(const float (&sums)[count], int first, unsigned char* shared, Bias<Problem> bias,
                                                 const T* y, const Place (&place)[2], int group, int first_k, int lane) {
        const int g = lane / 4, t = lane % 4;
        // NOTE: all residuals are read before the first store to shared memory, which the compiler does not let them pass.
        float residual[staged ? width / 8 : 1][2][2];
        if constexpr (staged) {
#pragma unroll
            for (int i = 0; i < width / 4; ++i) load_pair(residual[i / 2][i % 2], pair_at(shared, g + 8 * (i % 2), i / 2, t));
        }
#pragma unroll
        for (int eight = 0; eight < width / 8; ++eight) {
            const int k = first_k + eight * 8 + 2 * t, filter = group * Problem::group_k + k;
            Term<Problem> terms[2];
            float v[2];
            load_terms<Problem, Problem::group_k % width == 0>(terms, bias, group, k, first_k);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float held;
                    if constexpr (staged) {
                        held = residual[eight][half][i];
                    } else {
                        const bool exists = place[half].count > 0 && k + i < Problem::group_k;
                        held = held_by<Problem>(bias, y + place[half].offset * Problem::k + filter + i, exists);
                    }
                    v[i] = finish<Problem>(sums[first + eight * 4 + 2 * half + i], terms[i], held);
                }
                store_pair(pair_at(shared, g + 8 * half, eight, t), v);
            }
        }
    }

    // The residuals of `width` filters from k on, as the warp's lanes store outputs.
    static __device__ __forceinline__ void load_residuals(unsigned (&to)[passes][4], Bias<Problem> bias, const T* y,
                                                          const Place (&place)[passes], int group, int k, int lane) {
#pragma unroll
        for (int pass = 0; pass < passes; ++pass) {
            const int unit_k = k + (pass * 32 + lane) % units * unit;
            const T* const at = y + place[pass].offset * Problem::k + group * Problem::group_k + unit_k;
            if (place[pass].count > 0 && unit_k < Problem::group_k) load_residual(to[pass], bias, at);
        }
    }

    static __device__ __forceinline__ void store_unit(T* to, const unsigned (&words)[4], int exist) {
        if constexpr (vectors) {
            *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
        } else {
#pragma unroll
            for (int i = 0; i < unit; ++i) {
                if (i >= exist) continue;
                if constexpr (element_bytes == 2) to[i] = T{static_cast<unsigned short>(words[i / 2] >> i % 2 * 16)};
                else to[i] = __uint_as_float(words[i]);
            }
        }
    }

    // 16 pixels from `first_pixel` on, and `filters` of the group from `first_k` on. `shared` is this warp's.
    template <class Tiles, int count>
    static __device__ __forceinline__ void store(const float (&sums)[count], unsigned char* shared, Bias<Problem> bias, T* y,
                                                 const Tiles& tiles, Offset<Problem> first_pixel, int group, int first_k,
                                                 int lane) {
        Place pair[2] = {}, place[passes];
        if constexpr (adds<Problem> && !staged) {
#pragma unroll
            for (int half = 0; half < 2; ++half) pair[half] = tiles.place(first_pixel + lane / 4 + 8 * half);
        }
#pragma unroll
        for (int i = 0; i < passes; ++i) place[i] = tiles.place(first_pixel + (i * 32 + lane) / units);
        unsigned residuals[ahead][passes][4] = {};
        if constexpr (staged) {
#pragma unroll
            for (int i = 0; i < ahead; ++i) load_residuals(residuals[i], bias, y, place, group, first_k + i * width, lane);
        }
#pragma unroll
        for (int i = 0; i < rounds; ++i) {
            const int k = first_k + i * width;
            if (Problem::group_k % filters != 0 && k >= Problem::group_k) break;
            __syncwarp();  // the filters before have been read
            if constexpr (staged) {
#pragma unroll
                for (int pass = 0; pass < passes; ++pass) {
                    const int at = pass * 32 + lane;
                    const unsigned (&four)[4] = residuals[i % ahead][pass];
                    *reinterpret_cast<uint4*>(unit_at(shared, at / units, at % units)) =
                        make_uint4(four[0], four[1], four[2], four[3]);
                }
                if (i + ahead < rounds)
                    load_residuals(residuals[i % ahead], bias, y, place, group, k + ahead * width, lane);
                __syncwarp();
            }
            stage(sums, i * width / 2, shared, bias, y, pair, group, k, lane);
            __syncwarp();
            constexpr int at_once = staged ? passes : 1;
#pragma unroll
            for (int first = 0; first < passes; first += at_once) {
                unsigned words[at_once][4];
#pragma unroll
                for (int j = 0; j < at_once; ++j) {
                    const int at = (first + j) * 32 + lane;
                    if constexpr (staged) ld_shared_v4_u32(words[j], unit_at(shared, at / units, at % units));
                }
#pragma unroll
                for (int j = 0; j < at_once; ++j) {
                    const int pass = first + j, at = pass * 32 + lane, unit_k = k + at % units * unit;
                    if (place[pass].count == 0 || unit_k >= Problem::group_k) continue;
                    if constexpr (!staged) ld_shared_v4_u32(words[j], unit_at(shared, at / units, at % units));
                    store_unit(y + place[pass].offset * Problem::k + group * Problem::group_k + unit_k, words[j],
                               Problem::group_k - unit_k);
                }
            }
        }
    }
};

}  // namespace leanconv
