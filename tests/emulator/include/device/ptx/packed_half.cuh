// The CPU twin of ptx/packed_half.cuh: same names, same signatures, the rules of the PTX manual checked at each call.
#pragma once

#include <device/ptx/arithmetic.cuh>

namespace leanconv {

// NOTE: exact where a float holds the sum, as it does where float16 holds it.
inline unsigned fma_rn_f16x2(unsigned a, unsigned b, unsigned c) {
    float sums[2];
    for (int i = 0; i < 2; ++i) {
        const auto half = [i](unsigned two) { return cvt_f32_f16(static_cast<unsigned short>(two >> 16 * i)); };
        sums[i] = half(a) * half(b) + half(c);
    }
    return cvt_rn_f16x2_f32(sums[0], sums[1]);
}

}  // namespace leanconv
