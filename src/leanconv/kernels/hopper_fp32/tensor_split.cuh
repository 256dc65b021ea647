// Float32 as two halves of 16 bits: how tensor cores that multiply float16 reach float32's accuracy.
//
//   x · s = hi + lo, both float16;   x w ≈ (hi·hi + hi·lo + lo·hi) / (s_x s_w)
//
// Both keep 11 bits, so the pair keeps 22 where lo is no subnormal: for all numbers down to 2^-17 of the largest.
// Scales s are powers of two, so that multiplying by them rounds nothing:
//   - pixels: one for each row of pixels and block of 64 reduction elements, from the largest of these 64. It is known when
//     the row lies in registers. One scale for several rows would let an outlier ruin its neighbours.
//   - filters: one for each filter, made with the prepared filters (tensor_filters.cuh).
//   - channels: where the channels of the filters differ by more than 2^12, each channel's exponent moves from the filters to
//     the pixels; otherwise channels of opposite scales would lose what they have. Pixels of channels without weights become
//     zeros, which decide no scale. At strides above 1, where a pixel meets some taps only, each tap of a channel counts as
//     one.
// The tensor core rounds its sums toward zero. So it adds up one block of 64 elements, the small products first, and
// ordinary float32 additions add the blocks.
#pragma once

#include <device/index.cuh>
#include <device/ptx/convert.cuh>

namespace leanconv {

// Reduction elements that share a scale, and that are added up by the tensor core.
constexpr int split_depth = 64;

// 2^e for the biased exponent e of a normal number.
__device__ __forceinline__ float power_of_two(unsigned biased) { return __uint_as_float(biased << 23); }
__device__ __forceinline__ unsigned biased_exponent(float value) { return __float_as_uint(value) >> 23 & 255; }
// The biased exponent of a positive number, subnormal ones too: from -22 on.
__device__ __forceinline__ int whole_exponent(float value) {
    const bool small = value < 1e-30f;
    return static_cast<int>(biased_exponent(small ? value * power_of_two(127 + 64) : value)) - (small ? 64 : 0);
}

// What prepared filters say about all of their pixels: lies before them.
struct SplitHeader {
    float down;       // 2^-F: what products of scaled filters are multiplied by
    unsigned most;    // the largest biased exponent that a scale of pixels may have, so that its inverse is no zero
    unsigned unused[2];
};

// The scale of a row whose largest magnitude is given, and what its products are multiplied by afterwards.
// NOTE: infinities and NaN become NaN: hi keeps them, and lo is their difference.
struct RowScale {
    float up, down;
    __device__ __forceinline__ RowScale(float largest, const SplitHeader& header) {
        unsigned biased = 268 - biased_exponent(largest);
        if (biased > header.most) biased = header.most;
        up = power_of_two(biased);
        down = power_of_two(254 - biased) * header.down;
    }
};

// Two neighbours as packed halves of the first kind.
__device__ __forceinline__ unsigned split_high(float a, float b, float up) { return cvt_rn_f16x2_f32(a * up, b * up); }

// And what is left of them, of the second kind. NOTE: a · up is exact, so the multiply-add subtracts without an error.
__device__ __forceinline__ unsigned split_low(float a, float b, float up, unsigned high) {
    const float first = cvt_f32_f16(static_cast<unsigned short>(high));
    const float second = cvt_f32_f16(static_cast<unsigned short>(high >> 16));
    return cvt_rn_f16x2_f32(fmaf(a, up, -first), fmaf(b, up, -second));
}

template <bool strict>
__device__ __forceinline__ float larger(float a, float b) {
    if constexpr (strict) return max_nan_f32(a, b);
    else return fmaxf(a, b);
}

// A row of 64 elements (or as many as sixteens), a quarter in each of four neighbouring lanes, as registers `row` and
// `row` + 2 of a fragment of operand A for each sixteen. Gives what the row's products are multiplied by.
// `strict`: a NaN counts as largest of all.
template <bool exact, bool strict = false, int lows, int sixteens>
__device__ __forceinline__ float split_row(unsigned (&high)[sixteens][4], unsigned (&low)[lows][4], int row,
                                           const float (&x)[sixteens][4], const SplitHeader& header) {
    float largest = fabsf(x[0][0]);
#pragma unroll
    for (int j = 1; j < 4 * sixteens; ++j) largest = larger<strict>(largest, fabsf(x[j / 4][j % 4]));
    largest = larger<strict>(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = larger<strict>(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    const RowScale scale(largest, header);
#pragma unroll
    for (int j = 0; j < 2 * sixteens; ++j) {
        const float a = x[j / 2][j % 2 * 2], b = x[j / 2][j % 2 * 2 + 1];
        unsigned& packed = high[j / 2][j % 2 * 2 + row];
        packed = split_high(a, b, scale.up);
        if constexpr (exact) low[j / 2][j % 2 * 2 + row] = split_low(a, b, scale.up, packed);
    }
    return scale.down;
}

// Where in the 16 reduction elements, or 16 filters, of one instruction neighbours lie when the four that a thread has,
// 2t, 2t + 1, 2t + 8 and 2t + 9, shall be neighbours 4t to 4t + 3 in memory; and the way back.
__host__ __device__ constexpr int place_of(int element) { return element % 4 / 2 * 8 + element / 4 * 2 + element % 2; }
__host__ __device__ constexpr int element_at(int place) { return place % 8 / 2 * 4 + place / 8 * 2 + place % 2; }

// And when they shall be four apart: t, t + 4, t + 8 and t + 12 (pair_states.cuh).
__host__ __device__ constexpr int column_at(int place) { return place % 8 / 2 + 4 * (place % 2 + place / 8 * 2); }

// Row of 8 pixels that the lanes of group g have: so ld.shared.v4 of a quarter of a warp meets each bank once, though the
// swizzle of tensor copies makes neighbouring rows exchange neighbouring units.
__device__ __forceinline__ int spread_row(int g) { return g % 2 * 4 + g / 2; }

}  // namespace leanconv
