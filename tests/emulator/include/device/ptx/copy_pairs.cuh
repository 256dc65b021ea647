// The CPU twin of ptx/copy_pairs.cuh: same names, same signatures, the rules of the PTX manual checked at each call.
#pragma once

#include <device/ptx/memory.cuh>

namespace leanconv {

inline void cp_async_8(void* shared, const void* global, bool valid, EMULATOR_SITE) {
    emulator::cp_async(shared, global, 8, valid, site);
}

}  // namespace leanconv
