// From the sums of a warpgroup to an output in NHWC: bias, activation, and stores.
//
// Of 16 bits: the one rounding, and stores of 16 bytes. A thread holds pairs of neighbouring filters of two pixels in eight, which would be stores of 4 bytes. Each warp turns them
// around in shared memory of its own, 16 pixels by `width` filters at a time: so a row of the output is stored in whole lines,
// wherever its pixel lies. Of float32: pairs as they are, 8 bytes; four lanes fill a sector of 32.
#pragma once

#include <device/epilogue.cuh>
#include <device/ptx/cluster.cuh>
#include <device/ptx/convert.cuh>
#include <device/ptx/load.cuh>
#include <device/pipeline/rings.cuh>

namespace leanconv {

// Two neighbours, rounded, as they lie in memory.
template <class T>
__device__ __forceinline__ unsigned rounded_pair(float first, float second);
template <>
__device__ __forceinline__ unsigned rounded_pair<float16>(float first, float second) {
    return cvt_rn_f16x2_f32(first, second);
}
template <>
__device__ __forceinline__ unsigned rounded_pair<bfloat16>(float first, float second) {
    return cvt_rn_bf16x2_f32(first, second);
}

// A share of a thread's sums, those of neighbouring filters, added over the blocks of a cluster in the order of their ranks.
// `mine` holds the sums of this block, one thread's next to the other's; between two barriers of the cluster.
template <int split, int threads, int blocks, int count>
__device__ __forceinline__ void add_shares(float (&share)[blocks][count], const float* mine) {
    const int first = static_cast<int>(cluster_rank()) * count;
#pragma unroll
    for (int i = 0; i < blocks * count; ++i) {
        const float* const at = mine + (i / count * split * count + first + i % count) * threads + threadIdx.x;
        float sum = cluster_load(at, 0);
#pragma unroll
        for (int other = 1; other < split; ++other) sum += cluster_load(at, other);
        share[i / count][i % count] = sum;
    }
}

template <class Problem, int filters>
struct NarrowOutput {
    using T = typename Problem::result;
    static constexpr int width = filters % 64 == 0 ? 64 : 32, units = width / 8, row_bytes = 2 * width;
    static constexpr int rows = 16, bytes_of_warp = rows * row_bytes, passes = rows * units / 32;
    static constexpr bool vectors = Problem::k % 8 == 0 && Problem::group_k % 8 == 0;
    static_assert(Problem::nhwc && sizeof(T) == 2, "filters of 16 bits lie side by side");
    static_assert(filters % width == 0, "a tile has whole parts");

    // Eight filters of a pixel. Units trade places so that the pairs of a warp's stores, and the units of a quarter of its
    // loads, meet each bank once.
    static __device__ __forceinline__ unsigned char* unit_at(unsigned char* shared, int row, int unit) {
        return shared + row * row_bytes + (unit ^ row * row_bytes / 128 % units) * 16;
    }

    // The two pixels of a thread, and pairs of filters from `first_k` of the group on.
    template <int count>
    static __device__ __forceinline__ void round_part(const float (&sums)[count], int part, unsigned char* shared, const T* bias,
                                                      const T* y, const Place (&place)[2], int group, int first_k, int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int unit = 0; unit < units; ++unit) {
            const int k = first_k + unit * 8 + 2 * t, filter = group * Problem::group_k + k;
            float b[2] = {};
            if constexpr (Problem::bias) {
#pragma unroll
                for (int i = 0; i < 2; ++i) b[i] = k + i < Problem::group_k ? to_float(bias[filter + i]) : 0.0f;
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float v[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const bool exists = place[half].count > 0 && k + i < Problem::group_k;
                    const float held = held_by<Problem>(y + place[half].offset * Problem::k + filter + i, exists);
                    v[i] = finish<Problem>(sums[(part * units + unit) * 4 + 2 * half + i], b[i], held);
                }
                unsigned char* const to = unit_at(shared, g + 8 * half, unit) + 4 * t;
                *reinterpret_cast<unsigned*>(to) = rounded_pair<T>(v[0], v[1]);
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

    // 16 pixels of a warp, from `first_pixel` on, and `filters` of the group from `first_k` on. `shared` is this warp's.
    template <class Tiles, int count>
    static __device__ __forceinline__ void store(const float (&sums)[count], unsigned char* shared, const T* bias, T* y,
                                                 const Tiles& tiles, Offset<Problem> first_pixel, int group, int first_k,
                                                 int lane) {
        Place pair[2] = {}, place[passes];
        if constexpr (Problem::accumulate) {
#pragma unroll
            for (int half = 0; half < 2; ++half) pair[half] = tiles.numbers.place(first_pixel + lane / 4 + 8 * half);
        }
#pragma unroll
        for (int i = 0; i < passes; ++i) place[i] = tiles.numbers.place(first_pixel + (i * 32 + lane) / units);
#pragma unroll
        for (int part = 0; part < filters / width; ++part) {
            const int k = first_k + part * width;
            if (Problem::group_k % filters != 0 && k >= Problem::group_k) break;
            __syncwarp();  // the part before has been read
            round_part(sums, part, shared, bias, y, pair, group, k, lane);
            __syncwarp();
#pragma unroll
            for (int i = 0; i < passes; ++i) {
                const int at = i * 32 + lane, unit_k = k + at % units * 8;
                if (place[i].count == 0 || unit_k >= Problem::group_k) continue;
                store_unit(y + place[i].offset * Problem::k + group * Problem::group_k + unit_k,
                           unit_at(shared, at / units, at % units), Problem::group_k - unit_k);
            }
        }
    }
};

// The same of float32, which needs no shared memory.
template <class Problem, int filters>
struct PairOutput {
    static constexpr int bytes_of_warp = 0;
    static constexpr bool vectors = Problem::k % 2 == 0 && Problem::group_k % 2 == 0;
    static_assert(Problem::nhwc && sizeof(typename Problem::result) == 4, "filters of float32 lie side by side");

    template <class Tiles, int count>
    static __device__ __forceinline__ void store(const float (&sums)[count], unsigned char*, const float* bias, float* y,
                                                 const Tiles& tiles, Offset<Problem> first_pixel, int group, int first_k,
                                                 int lane) {
        const int g = lane / 4, t = lane % 4;
        const Place places[2] = {tiles.numbers.place(first_pixel + g), tiles.numbers.place(first_pixel + g + 8)};
#pragma unroll
        for (int j = 0; j < count / 4; ++j) {
            const int k = first_k + 8 * j + 2 * t, filter = group * Problem::group_k + k;
            float b[2] = {};
            if constexpr (Problem::bias) {
#pragma unroll
                for (int i = 0; i < 2; ++i) b[i] = k + i < Problem::group_k ? bias[filter + i] : 0.0f;
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (places[half].count == 0) continue;
                float* const to = y + places[half].offset * Problem::k + filter;
                float v[2];
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    v[i] = finish<Problem>(sums[4 * j + 2 * half + i], b[i], held_by<Problem>(to + i, k + i < Problem::group_k));
                if constexpr (vectors) {
                    if (k < Problem::group_k) store_unit(to, v);
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
