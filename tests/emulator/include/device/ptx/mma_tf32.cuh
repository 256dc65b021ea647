// The CPU twin of ptx/mma_tf32.cuh.
#pragma once

#include <device/ptx/memory.cuh>

namespace leanconv {

inline void mma_tf32(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2], EMULATOR_SITE) {
    emulator::mma(emulator::Factors::tf32, sums, a, b, site);
}

}  // namespace leanconv
