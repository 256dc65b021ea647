// Float32 as a sum of two float16: how tensor cores that multiply float16 reach float32's accuracy.
//
//   x * s = hi + lo, both float16;   x w = (hi hi + hi lo + lo hi) / (s_x s_w)
//
// Each half keeps 11 bits. The pair keeps 22 where lo is no subnormal: for all numbers down to 2^-17 of the largest.
// Scales s are powers of two, so multiplying by them rounds nothing:
//   pixels    one scale for each row of pixels and 64 reduction elements, from the largest of these 64. It is found when the
//             row lies in registers. With one scale for several rows, an outlier would cost its neighbours their accuracy.
//   filters   one scale for each filter, made with the packed filters (tensor_filters.cuh).
//   channels  where the channels of the filters differ by more than 2^12, each channel's exponent moves from the filters to the
//             pixels. Otherwise channels of opposite scales would lose their bits. Pixels of channels without weights become
//             zeros, and decide no scale. At strides above 1 a pixel meets some taps only; there each tap of a channel counts
//             as a channel of its own.
// The tensor core rounds its sums toward zero. So it adds up 64 elements, the small products first, and float32 additions
// promote these partial sums.
#pragma once

#include <device/index.cuh>
#include <device/ptx/arithmetic.cuh>

namespace leanconv {

// Reduction elements that share a scale, and whose products the tensor core adds up.
constexpr int split_depth = 64;

// 2^e for the biased exponent e of a normal number.
__device__ __forceinline__ float power_of_two(unsigned biased) { return __uint_as_float(biased << 23); }
__device__ __forceinline__ unsigned biased_exponent(float value) { return __float_as_uint(value) >> 23 & 255; }
// The biased exponent of a positive number, subnormal ones too: from -22 on.
__device__ __forceinline__ int whole_exponent(float value) {
    const bool small = value < 1e-30f;
    return static_cast<int>(biased_exponent(small ? value * power_of_two(127 + 64) : value)) - (small ? 64 : 0);
}

// Magnitudes of finite numbers. Others decide no scale.
__device__ __forceinline__ float finite_magnitude(float value) {
    const float magnitude = fabsf(value);
    return magnitude <= 3.402823466e38f ? magnitude : 0.0f;
}

// The head of packed filters: what holds for all their pixels.
struct SplitHeader {
    float inverse_scale;  // 2^-F, of the filters
    unsigned most;        // the largest biased exponent of a scale of pixels: its inverse is no zero
    unsigned unused[2];
};

// The scale of a row whose largest magnitude is given, and its inverse, which the row's products are multiplied by.
// NOTE: infinities and NaN become NaN: hi keeps them, and lo is their difference.
struct RowScale {
    float scale, inverse_scale;
    __device__ __forceinline__ RowScale(float largest, const SplitHeader& header) {
        unsigned biased = 268 - biased_exponent(largest);
        if (biased > header.most) biased = header.most;
        scale = power_of_two(biased);
        inverse_scale = power_of_two(254 - biased) * header.inverse_scale;
    }
};

// The high halves of two neighbours, packed.
__device__ __forceinline__ unsigned split_high(float a, float b, float scale) { return cvt_rn_f16x2_f32(a * scale, b * scale); }

// Their low halves. NOTE: a * scale is exact, so the multiply-add subtracts without an error.
__device__ __forceinline__ unsigned split_low(float a, float b, float scale, unsigned high) {
    const float first = cvt_f32_f16(static_cast<unsigned short>(high));
    const float second = cvt_f32_f16(static_cast<unsigned short>(high >> 16));
    return cvt_rn_f16x2_f32(fmaf(a, scale, -first), fmaf(b, scale, -second));
}

template <bool strict>
__device__ __forceinline__ float larger(float a, float b) {
    if constexpr (strict) return max_nan_f32(a, b);
    else return fmaxf(a, b);
}

// A row of 64 elements, a quarter in each of four neighbouring lanes, as registers `row` and `row` + 2 of operand A's fragment
// for each k16 step. Returns the row's inverse scale. `strict`: a NaN counts as the largest.
template <bool exact, bool strict = false, int lows, int k_steps>
__device__ __forceinline__ float split_row(unsigned (&high)[k_steps][4], unsigned (&low)[lows][4], int row,
                                           const float (&x)[k_steps][4], const SplitHeader& header) {
    float largest = fabsf(x[0][0]);
#pragma unroll
    for (int j = 1; j < 4 * k_steps; ++j) largest = larger<strict>(largest, fabsf(x[j / 4][j % 4]));
    largest = larger<strict>(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = larger<strict>(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    const RowScale scale(largest, header);
#pragma unroll
    for (int j = 0; j < 2 * k_steps; ++j) {
        const float a = x[j / 2][j % 2 * 2], b = x[j / 2][j % 2 * 2 + 1];
        unsigned& packed = high[j / 2][j % 2 * 2 + row];
        packed = split_high(a, b, scale.scale);
        if constexpr (exact) low[j / 2][j % 2 * 2 + row] = split_low(a, b, scale.scale, packed);
    }
    return scale.inverse_scale;
}

// Operands have an order of their own within 16 reduction elements, or 16 filters: the four that a thread has in an
// instruction, 2t, 2t + 1, 2t + 8 and 2t + 9, are neighbours 4t to 4t + 3 in memory. The place of an element, and its inverse.
__host__ __device__ constexpr int place_of(int element) { return element % 4 / 2 * 8 + element / 4 * 2 + element % 2; }
__host__ __device__ constexpr int element_at(int place) { return place % 8 / 2 * 4 + place / 8 * 2 + place % 2; }

// The same where they are four apart in memory: t, t + 4, t + 8 and t + 12 (filter_layout.cuh).
__host__ __device__ constexpr int column_at(int place) { return place % 8 / 2 + 4 * (place % 2 + place / 8 * 2); }

// The row, of 8, that the lanes of group g have. ld.shared.v4 of a quarter warp has no bank conflicts in this order: the
// swizzle of tensor copies exchanges neighbouring 16 bytes of neighbouring rows.
__device__ __forceinline__ int spread_row(int g) { return g % 2 * 4 + g / 2; }

}  // namespace leanconv
