// The CPU twin of kernels/lib/ptx/shared.cuh: same names, same signatures, the rules of the PTX manual checked at each call.
#pragma once

namespace leanconv {

inline unsigned char* shared_memory() { return emulator::shared_memory(); }

inline unsigned char* shared_memory_for_swizzles() { return emulator::shared_memory(); }

inline unsigned shared_address(const void* pointer, EMULATOR_SITE) { return emulator::shared_address(pointer, site); }

}  // namespace leanconv
