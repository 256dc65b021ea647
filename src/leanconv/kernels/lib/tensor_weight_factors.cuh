// Factors of pixels: what the split of x and dy needs where both vary by much among the 64 pixels of a stage.
//
// A scale of x holds for the 64 pixels of a weight, one of dy for those of a filter, and a pair of float16 keeps what is
// above 2^-40 of the largest. So a product of a small x and a large dy is lost where another pixel has a large x and a small
// dy. With b the largest magnitude of a pixel's dy in the tile, x b and dy / b have the same products, and their scales
// lose nothing: no x b of a row is larger than the products that the row has in the tile, and each pixel's dy / b
// reaches 1. As b stands a power of four, so that its root h, from 2^-75 to 2^63, is a power of two in one byte, and x h h
// and dy / h / h are exact.
//
// Where all pixels' dy reach 2^-10 of the largest, x cannot lose by it, and factors are left out. Pixels without dy have
// factor 0: their x counts for nothing, and must not decide a scale.
#pragma once

#include <lib/ptx/barrier.cuh>
#include <lib/ptx/load.cuh>
#include <lib/tensor_weight_tiles.cuh>

namespace leanconv {

// The biased exponent of h for a largest magnitude b: h^2 <= b < 4 h^2. 0 stands for no dy at all.
__device__ __forceinline__ int root_code(float largest) {
    const bool small = largest < 1e-30f;
    const int biased = static_cast<int>(biased_exponent(small ? largest * power_of_two(127 + 64) : largest));
    return largest > 0 ? (biased + (small ? 127 - 64 : 127)) / 2 : 0;
}
constexpr int infinite_code = (255 + 127) / 2;

// The largest dy of a pixel, number thread % 64, in half of a chunk's filters. `finite`: of numbers alone.
template <class Problem, class Tuning, bool finite>
__device__ __forceinline__ float largest_of_pixel(const unsigned char* dy, int chunk,
                                                  const WeightTiles<Problem, Tuning>& tile, int thread) {
    using Rings = WeightRings<Problem, Tuning>;
    const int pixel = thread % split_depth, half = thread / split_depth;
    const auto magnitude = [](float value) { return finite ? finite_magnitude(value) : fabsf(value); };
    float largest = 0.0f;
    if constexpr (Tuning::dy_rows) {
        // NOTE: behind the filters of a group bulk copies bring those of the next.
        constexpr bool foreign = Problem::groups > 1 && Problem::group_k % WeightTiles<Problem, Tuning>::chunk != 0;
        const int left = Problem::group_k - tile.first_filter - chunk * WeightTiles<Problem, Tuning>::chunk - half * 32;
        const unsigned char* const row = dy + half * Rings::piece_bytes + pixel * 128;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float4 four = *reinterpret_cast<const float4*>(row + (i ^ pixel % 8) * 16);
            const float most = fmaxf(fmaxf(magnitude(four.x), magnitude(four.y)), fmaxf(magnitude(four.z), magnitude(four.w)));
            if (!foreign || 4 * i < left) largest = fmaxf(largest, most);
        }
    } else {
        const float* const first = reinterpret_cast<const float*>(dy) + half * 32 * Rings::dy_pitch + pixel;
#pragma unroll
        for (int i = 0; i < 32; ++i) largest = fmaxf(largest, magnitude(first[i * Rings::dy_pitch]));
    }
    return largest;
}

// The factors of a stage's pixels, which the converters find together.
template <class Problem, class Tuning>
struct PixelFactors {
    static constexpr int least_apart = 4;  // in powers of four
    static_assert(WeightRings<Problem, Tuning>::converter_warps == 4, "each thread has half of a pixel's dy");
    unsigned char* codes;
    int pair;
    bool apart, infinite;

    // NOTE: `given` is room of two by turns: who writes there has met those who read what was there before.
    __device__ __forceinline__ PixelFactors(unsigned char* given, float largest, int thread) : codes(given) {
        codes[thread] = static_cast<unsigned char>(root_code(largest));
        barrier_sync(14, 128);
        int first = 0, second = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int two = static_cast<int>(ld_shared_u16(codes + half * split_depth + thread % 32 * 2));
            first = max(first, two & 255), second = max(second, two >> 8);
        }
        const int most = static_cast<int>(__reduce_max_sync(0xffffffffu, static_cast<unsigned>(max(first, second))));
        const int least = static_cast<int>(__reduce_min_sync(0xffffffffu, static_cast<unsigned>(min(first, second))));
        apart = least + least_apart < most, infinite = most == infinite_code;
        pair = first | second << 8;
    }

    // Tells the consumers, behind the scales of the stage's first chunk: lane t of four finds the codes of its pixels, 2 t
    // and 2 t + 1 of each eight, in 16 bytes, or all ones where there are no factors.
    __device__ __forceinline__ void publish(float* scales, int lane) const {
        unsigned char* const to = reinterpret_cast<unsigned char*>(scales + lane % 4 * WeightRings<Problem, Tuning>::scale_pitch + 16);
        reinterpret_cast<unsigned short*>(to)[lane / 4] = static_cast<unsigned short>(apart ? pair : 0xffff);
    }

    // 1 / h of a pixel; any number where it has no dy.
    __device__ __forceinline__ float down(int pixel) const {
        return power_of_two(254 - max(static_cast<int>(codes[pixel]), static_cast<int>(codes[split_depth + pixel])));
    }
};

// Multiplies a thread's x, those of two rows in the order of operand A, by the factors of their pixels.
__device__ __forceinline__ void multiply_by_factors(float (&x)[2][4][4], const float* scales) {
    unsigned codes[4];
    ld_shared_v4_u32(codes, scales + 16);
    if (codes[0] == 0xffffffffu) return;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float h = power_of_two(codes[i / 4] >> i % 4 * 8 & 255);
#pragma unroll
        for (int row = 0; row < 2; ++row) x[row][i / 4][i % 4] = x[row][i / 4][i % 4] * h * h;
    }
}

}  // namespace leanconv
