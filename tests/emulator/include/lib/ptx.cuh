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

inline void barrier_sync(int number, int threads, EMULATOR_SITE) {
    emulator::named_barrier(true, number, threads, site);
}

inline void barrier_arrive(int number, int threads, EMULATOR_SITE) {
    emulator::named_barrier(false, number, threads, site);
}

template <int count>
inline void set_registers_up(EMULATOR_SITE) {
    static_assert(count >= 24 && count <= 256 && count % 8 == 0, "setmaxnreg takes multiples of 8 from 24 to 256");
    emulator::set_registers(true, count, site);
}

template <int count>
inline void set_registers_down(EMULATOR_SITE) {
    static_assert(count >= 24 && count <= 256 && count % 8 == 0, "setmaxnreg takes multiples of 8 from 24 to 256");
    emulator::set_registers(false, count, site);
}

inline unsigned cluster_rank() { return emulator::cluster_rank(); }

inline void cluster_barrier(EMULATOR_SITE) { emulator::cluster_barrier(site); }

inline float cluster_load(const float* shared, unsigned rank, EMULATOR_SITE) {
    return emulator::cluster_load(shared, rank, site);
}

}  // namespace leanconv
