// The CPU twin of kernels/lib/ptx.cuh: same names, same signatures, and the rules of the PTX manual checked at each call.
#pragma once

namespace leanconv {

inline unsigned char* shared_memory() { return emulator::shared_memory(); }

inline unsigned shared_address(const void* pointer, EMULATOR_SITE) { return emulator::shared_address(pointer, site); }

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

inline unsigned cluster_rank() { return emulator::cluster_rank(); }

inline void cluster_barrier(EMULATOR_SITE) { emulator::cluster_barrier(site); }

inline float cluster_load(const float* shared, unsigned rank, EMULATOR_SITE) {
    return emulator::cluster_load(shared, rank, site);
}

}  // namespace leanconv
