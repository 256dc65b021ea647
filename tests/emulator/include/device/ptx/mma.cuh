// The CPU twin of ptx/mma.cuh: same names, same signatures, the rules of the PTX manual checked at each call.
#pragma once

#include <device/ptx/shared.cuh>

namespace leanconv {

inline void mma_f16(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2], EMULATOR_SITE) {
    emulator::mma(false, sums, a, b, site);
}
inline void mma_bf16(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2], EMULATOR_SITE) {
    emulator::mma(true, sums, a, b, site);
}

template <int count>
inline void ldmatrix(unsigned (&to)[count], const void* row, EMULATOR_SITE) {
    static_assert(count == 1 || count == 2 || count == 4, "ldmatrix loads one, two or four matrices");
    emulator::ldmatrix(to, count, row, false, site);
}
template <int count>
inline void ldmatrix_trans(unsigned (&to)[count], const void* row, EMULATOR_SITE) {
    static_assert(count == 1 || count == 2 || count == 4, "ldmatrix loads one, two or four matrices");
    emulator::ldmatrix(to, count, row, true, site);
}

}  // namespace leanconv
