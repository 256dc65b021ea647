// The CPU twin of ptx/arithmetic.cuh: same names, same signatures, the rules of the PTX manual checked at each call.
#pragma once

namespace leanconv {

inline float cvt_f32_f16(unsigned short bits) {
    const unsigned sign = static_cast<unsigned>(bits & 0x8000) << 16, exponent = bits >> 10 & 31, rest = bits & 0x3ff;
    // Subnormals are multiples of 2^-24, which float holds exactly.
    if (exponent == 0) {
        const float size = static_cast<float>(rest) * 0x1p-24f;
        return sign ? -size : size;
    }
    const unsigned biased = exponent == 31 ? 255 : exponent + 112;
    return emulator::bit_cast<float>(sign | biased << 23 | rest << 13);
}

inline unsigned short cvt_rn_f16_f32(float value) {
    const unsigned bits = emulator::bit_cast<unsigned>(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return 0x7fff;
    if (size >= 0x477ff000) return static_cast<unsigned short>(sign | 0x7c00);
    // The unit in the last place: 13 bits less than float has, more below 2^-14, where the exponent stays.
    const int exponent = static_cast<int>(size >> 23);
    const int lost = exponent < 113 ? 126 - exponent : 13;
    if (lost > 24) return static_cast<unsigned short>(sign);
    const unsigned whole = (size & 0x7fffff) | 0x800000, kept = whole >> lost;
    const unsigned rest = whole & ((1u << lost) - 1), half = 1u << (lost - 1);
    const unsigned rounded = kept + (rest > half || (rest == half && kept % 2 == 1));
    const unsigned base = exponent < 113 ? 0 : static_cast<unsigned>(exponent - 113) << 10;
    return static_cast<unsigned short>(sign | (base + rounded));
}

inline unsigned short cvt_rn_bf16_f32(float value) {
    const unsigned bits = emulator::bit_cast<unsigned>(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline unsigned cvt_rn_f16x2_f32(float first, float second) {
    return cvt_rn_f16_f32(first) | static_cast<unsigned>(cvt_rn_f16_f32(second)) << 16;
}

inline unsigned cvt_rn_bf16x2_f32(float first, float second) {
    return cvt_rn_bf16_f32(first) | static_cast<unsigned>(cvt_rn_bf16_f32(second)) << 16;
}

inline float max_nan_f32(float a, float b) { return a != a || b != b ? emulator::bit_cast<float>(0x7fffffffu) : a < b ? b : a; }

inline unsigned cvt_rn_tf32_f32(float value) {
    const unsigned bits = emulator::bit_cast<unsigned>(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fffffff;
    return (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
}

template <class A>
inline int dp4a(unsigned a, unsigned b, int sum) {
    unsigned result = static_cast<unsigned>(sum);
    for (int i = 0; i < 4; ++i)
        result += static_cast<unsigned>(static_cast<A>(a >> 8 * i) * static_cast<signed char>(b >> 8 * i));
    return static_cast<int>(result);
}

inline int dp4a_s32_s32(int a, int b, int sum) { return dp4a<signed char>(a, b, sum); }

inline int dp4a_u32_s32(unsigned a, int b, int sum) { return dp4a<unsigned char>(a, b, sum); }

}  // namespace leanconv
