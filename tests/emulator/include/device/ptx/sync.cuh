// The CPU twin of ptx/sync.cuh: same names, same signatures, the rules of the PTX manual checked at each call.
#pragma once

#include <device/ptx/memory.cuh>

namespace leanconv {

inline void barrier_sync(int number, int threads, EMULATOR_SITE) {
    emulator::named_barrier(true, number, threads, site);
}

inline void barrier_arrive(int number, int threads, EMULATOR_SITE) {
    emulator::named_barrier(false, number, threads, site);
}

// Three times the barrier: all have said so, all have read it, and it is forgotten.
inline bool barrier_or(int number, int threads, bool predicate, EMULATOR_SITE) {
    static bool any[8][16];
    bool& said = any[emulator::cluster_rank()][number & 15];
    said |= predicate;
    emulator::named_barrier(true, number, threads, site);
    const bool result = said;
    emulator::named_barrier(true, number, threads, site);
    said = false;
    emulator::named_barrier(true, number, threads, site);
    return result;
}

inline int zero_after(unsigned) { return 0; }

inline unsigned cluster_rank() { return emulator::cluster_rank(); }

inline void cluster_barrier(EMULATOR_SITE) { emulator::cluster_barrier(site); }

inline float cluster_load(const float* shared, unsigned rank, EMULATOR_SITE) {
    return emulator::cluster_load(shared, rank, site);
}

struct alignas(8) Mbarrier {
    unsigned long long state;
};

inline void mbarrier_init(Mbarrier* barrier, int count, EMULATOR_SITE) { emulator::mbarrier_init(barrier, count, site); }

inline void fence_mbarrier_init() { emulator::fence_mbarrier_init(); }

inline void mbarrier_inval(Mbarrier* barrier, EMULATOR_SITE) { emulator::mbarrier_inval(barrier, site); }

inline void mbarrier_arrive(Mbarrier* barrier, EMULATOR_SITE) { emulator::mbarrier_arrive(barrier, site); }

inline void mbarrier_arrive_warp(Mbarrier* barrier, int lane, EMULATOR_SITE) {
    if (lane == 0) emulator::mbarrier_arrive(barrier, site);
}

inline void mbarrier_arrive_warp(Mbarrier* barrier, Mbarrier* next, int lane, EMULATOR_SITE) {
    mbarrier_arrive_warp(barrier, lane, site);
    mbarrier_arrive_warp(next, lane, site);
}

inline void mbarrier_arrive_cluster(Mbarrier* barrier, unsigned rank, EMULATOR_SITE) {
    emulator::mbarrier_arrive_cluster(barrier, rank, site);
}

inline void mbarrier_arrive_expect_tx(Mbarrier* barrier, unsigned bytes, EMULATOR_SITE) {
    emulator::mbarrier_expect_tx(barrier, bytes, site);
    emulator::mbarrier_arrive(barrier, site);
}

inline void mbarrier_expect_tx(Mbarrier* barrier, unsigned bytes, EMULATOR_SITE) {
    emulator::mbarrier_expect_tx(barrier, bytes, site);
}

inline bool mbarrier_test_wait_parity(Mbarrier* barrier, unsigned parity, EMULATOR_SITE) {
    return emulator::mbarrier_test_wait(barrier, parity, site);
}

inline bool mbarrier_try_wait_parity(Mbarrier* barrier, unsigned parity, EMULATOR_SITE) {
    return emulator::mbarrier_test_wait(barrier, parity, site);
}

inline void mbarrier_wait_parity(Mbarrier* barrier, unsigned parity, EMULATOR_SITE) {
    emulator::mbarrier_wait(barrier, parity, site);
}

// Launches run one after the other here, but what earlier ones write is out of reach until a thread of the cluster waits.
inline void griddepcontrol_wait() { emulator::wait_for_launches(); }

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

}  // namespace leanconv
