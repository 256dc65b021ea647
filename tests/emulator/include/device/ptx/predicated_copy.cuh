// The CPU twin of ptx/predicated_copy.cuh: same names, same signatures, the rules of the PTX manual checked at each call.
#pragma once

#include <device/ptx/memory.cuh>

namespace leanconv {

inline void cp_async_16_if(bool asked, void* shared, const void* global, EMULATOR_SITE) {
    if (asked) emulator::cp_async(shared, global, 16, true, site);
}

}  // namespace leanconv
