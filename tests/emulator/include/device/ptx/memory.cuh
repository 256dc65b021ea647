// The CPU twin of ptx/memory.cuh: same names, same signatures, the rules of the PTX manual checked at each call.
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

inline unsigned ld_shared_u16(const void* shared) { return *static_cast<const unsigned short*>(shared); }
inline unsigned ld_shared_u32(const void* shared) { return *static_cast<const unsigned*>(shared); }

inline void ld_shared_v2_u32(unsigned (&to)[2], const void* shared) {
    const uint2 v = *static_cast<const uint2*>(shared);
    to[0] = v.x, to[1] = v.y;
}
inline void ld_shared_v4_u32(unsigned (&to)[4], const void* shared) {
    const uint4 v = *static_cast<const uint4*>(shared);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

inline void st_global_v2(float* to, float a, float b) { *reinterpret_cast<float2*>(to) = make_float2(a, b); }
inline void st_global_v4(float* to, const float (&v)[4]) { *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]); }

inline void cp_async_4(void* shared, const void* global, bool valid, EMULATOR_SITE) {
    emulator::cp_async(shared, global, 4, valid, site);
}

inline void cp_async_16(void* shared, const void* global, bool valid, EMULATOR_SITE) {
    emulator::cp_async(shared, global, 16, valid, site);
}

inline void cp_async_commit_group() { emulator::cp_async_commit_group(); }

template <int pending>
inline void cp_async_wait_group() {
    static_assert(pending >= 0, "cp.async.wait_group takes a number of groups");
    emulator::cp_async_wait_group(pending);
}

inline unsigned atom_add_acq_rel(unsigned* counter, unsigned value) {
    const unsigned before = *counter;
    *counter = before + value;
    return before;
}

// NOTE: only the blocks of a cluster run side by side here: a block that waited for one of a later cluster would wait for ever.
inline unsigned ld_acquire(const unsigned* counter, EMULATOR_SITE) {
    emulator::look_later(site);
    return *counter;
}

// Stricter than the machine, which ignores an address that is no memory: what is fetched must belong to an array.
inline void prefetch_l2(const void* at) { static_cast<void>(*static_cast<const volatile char*>(at)); }

}  // namespace leanconv
