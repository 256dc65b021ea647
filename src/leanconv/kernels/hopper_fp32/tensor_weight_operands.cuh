// How x and dy become operands of the products of the filters' gradient: x fragments of operand A, in registers; dy pairs
// of float16 in shared memory, as operand B can lie nowhere else. Neither is transposed: where pixels are rows (NHWC) they
// are the rows of B too (MN-major), and where pixels lie together, so they do in B (K-major).
#pragma once

#include <device/ptx/bulk_copy.cuh>
#include <device/ptx/convert.cuh>
#include <device/ptx/load.cuh>
#include <device/ptx/wgmma.cuh>
#include <kernels/hopper_fp32/tensor_weight_factors.cuh>
#include <kernels/hopper_fp32/tensor_weight_tiles.cuh>

namespace leanconv {

// Row of 8 that the lanes of group g have: loads of 16 bytes by a quarter of a warp, and stores of 8 by a half, meet each
// bank once under the swizzle of 128 bytes.
__device__ __forceinline__ int bit_reversed(int g) { return g % 2 * 4 + g / 2 % 2 * 2 + g / 4; }

// Scales that know nothing of the other operand.
__device__ __forceinline__ SplitHeader unscaled_header() { return {1.0f, 253, {0, 0}}; }

// Where the inverse scale of a chunk's filter goes: lane t of four has filters 8 i + 2 t and one more in its sums.
template <class Problem, class Tuning>
__device__ __forceinline__ int scale_place(int filter) {
    return filter % 8 / 2 * WeightRings<Problem, Tuning>::scale_pitch + filter / 8 * 2 + filter % 2;
}

// And where one of a warp's filters says which scale all of its have, or 0: lane t reads those of four warps.
template <class Problem, class Tuning>
__device__ __forceinline__ int same_scale_place(int t, int warp) {
    return t * WeightRings<Problem, Tuning>::scale_pitch + 16 + warp;
}

// The scales of a lane's filters. Where all of a warp's filters reach 2^-8 of the chunk's largest dy, of code `most`, they
// have one and the same, that of all other warps too: pairs of float16 have digits enough.
template <int count>
struct FilterScales {
    float up[count], down[count];
    bool same;
    __device__ __forceinline__ FilterScales(const float (&largest)[count], unsigned most) {
        const unsigned top = 2 * most - 126;  // the largest biased exponent that dy of this code can have
        const float of_all = most > 63 ? power_of_two(top) : 0.0f, least = of_all * power_of_two(127 - 8);
        bool near = of_all > 0.0f;
#pragma unroll
        for (int j = 0; j < count; ++j) near = near && (largest[j] == 0.0f || (largest[j] >= least && largest[j] < 2 * of_all));
        same = __all_sync(0xffffffffu, near);
#pragma unroll
        for (int j = 0; j < count; ++j) {
            const RowScale scale(same ? of_all : largest[j], unscaled_header());
            up[j] = scale.up, down[j] = scale.down;
        }
    }
};

// One warp's share of a chunk of dy whose pixels become rows: 16 filters of 64 pixels or a window. A lane has four filters,
// and every eighth pixel.
template <class Problem, class Tuning>
struct SplitRows {
    using Rings = WeightRings<Problem, Tuning>;
    using Grid = WeightGrid<Problem, Tuning>;
    static constexpr int eights = Grid::window / 8;
    int warp, t, row;
    bool first;  // of the lanes that have the same filters
    float v[eights][4];

    __device__ __forceinline__ explicit SplitRows(int thread)
        : warp(thread / 32), t(thread % 4), row(bit_reversed(thread % 32 / 4)), first(thread % 32 < 4) {}

    __device__ __forceinline__ void load(const unsigned char* dy, const PixelFactors<Problem, Tuning>& factors) {
        if constexpr (Tuning::dy_rows) {
            const unsigned char* const piece = dy + warp / 2 * Rings::dy_piece_bytes + row * 128;
            const int unit = (warp % 2 * 4 + t) ^ row;
#pragma unroll
            for (int i = 0; i < eights; ++i) {
                const float4 four = *reinterpret_cast<const float4*>(piece + i * 1024 + unit * 16);
                v[i][0] = four.x, v[i][1] = four.y, v[i][2] = four.z, v[i][3] = four.w;
            }
        } else {
            // NOTE: columns of four filters further on lie 8 banks further on: a load of a warp meets each bank once.
            const float* const first = reinterpret_cast<const float*>(dy) + (16 * warp + 4 * t) * Rings::dy_pitch + row;
#pragma unroll
            for (int i = 0; i < eights; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) v[i][j] = first[j * Rings::dy_pitch + 8 * i];
        }
        // NOTE: what no tap sees must not decide a scale.
        if constexpr (Grid::used % 8 != 0)
#pragma unroll
            for (int j = 0; j < 4; ++j) v[eights - 1][j] = row < Grid::used % 8 ? v[eights - 1][j] : 0.0f;
        if (factors.apart) divide(factors);
    }

    __device__ __forceinline__ void divide(const PixelFactors<Problem, Tuning>& factors) {
#pragma unroll
        for (int i = 0; i < eights; ++i) {
            const float down = factors.down(8 * i + row);
#pragma unroll
            for (int j = 0; j < 4; ++j) v[i][j] = v[i][j] * down * down;
        }
    }

    // Splits the columns with a scale for each, from the largest of its 64 pixels.
    __device__ __forceinline__ void store(unsigned char* to, float* scales, const PixelFactors<Problem, Tuning>& factors) const {
        float up[4], largest[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            largest[j] = fabsf(v[0][j]);
#pragma unroll
            for (int i = 1; i < eights; ++i) largest[j] = fmaxf(largest[j], fabsf(v[i][j]));
#pragma unroll
            for (int apart = 4; apart < 32; apart *= 2)
                largest[j] = fmaxf(largest[j], __shfl_xor_sync(0xffffffffu, largest[j], apart));
        }
        const FilterScales<4> scale(largest, factors.most);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            up[j] = scale.up[j];
            if (first) scales[scale_place<Problem, Tuning>(16 * warp + 4 * t + j)] = scale.down[j];
        }
        if (first) scales[same_scale_place<Problem, Tuning>(t, warp)] = scale.same ? scale.down[0] : 0.0f;
        unsigned char* const high = to + row * 128 + ((2 * warp + t / 2) ^ row) * 16 + t % 2 * 8;
#pragma unroll
        for (int i = 0; i < eights; ++i) {
            uint2 packed;
            packed.x = cvt_rn_f16x2_f32(v[i][0] * up[0], v[i][1] * up[1]);
            packed.y = cvt_rn_f16x2_f32(v[i][2] * up[2], v[i][3] * up[3]);
            *reinterpret_cast<uint2*>(high + i * 1024) = packed;
            if constexpr (Tuning::products == 3) {
                uint2 rest;
                rest.x = rest_of(v[i][0], v[i][1], up[0], up[1], packed.x);
                rest.y = rest_of(v[i][2], v[i][3], up[2], up[3], packed.y);
                *reinterpret_cast<uint2*>(high + Rings::half_bytes + i * 1024) = rest;
            }
        }
    }

    // As split_low, for neighbours of different scales.
    static __device__ __forceinline__ unsigned rest_of(float a, float b, float up_a, float up_b, unsigned high) {
        const float first = cvt_f32_f16(static_cast<unsigned short>(high));
        const float second = cvt_f32_f16(static_cast<unsigned short>(high >> 16));
        return cvt_rn_f16x2_f32(fmaf(a, up_a, -first), fmaf(b, up_b, -second));
    }
};

// One warp's share of a chunk of dy in columns: 16 filters of 64 pixels. A lane has half of a filter's.
template <class Problem, class Tuning>
struct SplitColumns {
    using Rings = WeightRings<Problem, Tuning>;
    int filter, half;
    float v[32];

    __device__ __forceinline__ explicit SplitColumns(int thread)
        : filter(thread / 32 * 16 + thread % 32 / 16 * 8 + thread % 8), half(thread / 8 % 2) {}

    __device__ __forceinline__ void load(const unsigned char* dy, const PixelFactors<Problem, Tuning>& factors) {
        const float4* const column = reinterpret_cast<const float4*>(dy + (filter * Rings::dy_pitch + 32 * half) * 4);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float4 four = column[i];
            v[4 * i] = four.x, v[4 * i + 1] = four.y, v[4 * i + 2] = four.z, v[4 * i + 3] = four.w;
        }
        if (factors.apart) divide(factors);
    }

    __device__ __forceinline__ void divide(const PixelFactors<Problem, Tuning>& factors) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const float down = factors.down(32 * half + i);
            v[i] = v[i] * down * down;
        }
    }

    __device__ __forceinline__ void store(unsigned char* to, float* scales, const PixelFactors<Problem, Tuning>& factors) const {
        float largest = fabsf(v[0]);
#pragma unroll
        for (int i = 1; i < 32; ++i) largest = fmaxf(largest, fabsf(v[i]));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 8));
        const float only[1] = {largest};
        const FilterScales<1> scale(only, factors.most);
        const float up = scale.up[0], down = scale.down[0];
        if (half == 0) {
            scales[scale_place<Problem, Tuning>(filter)] = down;
            const int t = filter % 16;
            if (t < 4) scales[same_scale_place<Problem, Tuning>(t, filter / 16)] = scale.same ? down : 0.0f;
        }
        unsigned char* const line = to + filter * 128;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint4 high, low;
            unsigned* const highs = &high.x;
            unsigned* const lows = &low.x;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float a = v[8 * i + 2 * j], b = v[8 * i + 2 * j + 1];
                highs[j] = split_high(a, b, up);
                if constexpr (Tuning::products == 3) lows[j] = split_low(a, b, up, highs[j]);
            }
            const int unit = (4 * half + i) ^ filter % 8;
            *reinterpret_cast<uint4*>(line + unit * 16) = high;
            if constexpr (Tuning::products == 3) *reinterpret_cast<uint4*>(line + Rings::half_bytes + unit * 16) = low;
        }
    }
};

// Operand B of a chunk's sixteen pixels: where pixels are rows these are eight of 128 bytes after the other eight, where
// they lie together units of a row.
template <class Tuning>
constexpr bool split_in_rows = Tuning::dy_rows || Tuning::taps > 1;
template <class Tuning>
__device__ __forceinline__ auto split_operand(const unsigned char* split) {
    if constexpr (split_in_rows<Tuning>) return transposed_descriptor(split, 0, 1024, 128);
    else return matrix_descriptor(split, 0, 1024, 128);
}
template <class Tuning>
constexpr int split_step = split_in_rows<Tuning> ? 2048 : 32;

// The converters: 128 threads.
template <class Problem, class Tuning>
__device__ __forceinline__ void split_dy(const WeightTiles<Problem, Tuning>& tile, const WeightRings<Problem, Tuning>& rings,
                                         const PartRange<Problem, Tuning>& range, long long batch, int thread) {
    using Rings = WeightRings<Problem, Tuning>;
    static_assert(Tuning::dy_stages > Tuning::chunks, "all chunks of a stage are looked at before the first is converted, and "
                                                      "lanes report a copy when the next is under way");
    RingPlace<Tuning::dy_stages> dy_place;
    RingPlace<Tuning::split_stages> split_place;
    RingPlace<Rings::code_stages> code_place;
    using Split = typename Select<split_in_rows<Tuning>, SplitRows<Problem, Tuning>, SplitColumns<Problem, Tuning>>::type;
    Split values(thread);
#pragma unroll 1
    for (int stage = range.first; stage < range.end; ++stage, code_place.advance()) {
        if constexpr (!Rings::idle) find_codes(rings, tile, dy_place, stage, batch, code_place.stage, thread);
        const PixelFactors<Problem, Tuning> factors(rings, code_place);
#pragma unroll 1
        for (int chunk = 0; chunk < Tuning::chunks; ++chunk, dy_place.advance(), split_place.advance()) {
            mbarrier_wait_parity(rings.dy_full(dy_place.stage), dy_place.parity);
            values.load(rings.dy(dy_place.stage), factors);
            mbarrier_wait_parity(rings.split_free(split_place.stage), split_place.parity ^ 1);
            values.store(rings.split(split_place.stage), rings.scales(split_place.stage), factors);
            fence_proxy_async();
            __syncwarp();
            if (thread % 32 == 0) {
                mbarrier_arrive(rings.split_full(split_place.stage));
                // NOTE: after the stores that the loaded values went into, which an arrival does not pass.
                mbarrier_arrive(rings.dy_free(dy_place.stage));
            }
        }
    }
}

}  // namespace leanconv
