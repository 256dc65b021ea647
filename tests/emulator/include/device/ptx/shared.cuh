// The CPU twin of ptx/shared.cuh: same names, same signatures, the rules of the PTX manual checked at each call.
#pragma once

namespace leanconv {

inline unsigned char* shared_memory() { return emulator::shared_memory(); }

inline unsigned char* shared_memory_for_swizzles() { return emulator::shared_memory(); }

inline unsigned shared_address(const void* pointer, EMULATOR_SITE) { return emulator::shared_address(pointer, site); }

template <class T>
inline void ld_shared_v4(T (&to)[4], const T* from, EMULATOR_SITE) {
    static_assert(sizeof(T) == 4, "ld.shared.v4 loads four words");
    emulator::ld_shared_v4(to, from, site);
}

}  // namespace leanconv
