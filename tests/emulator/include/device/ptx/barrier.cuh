// The CPU twin of ptx/barrier.cuh: same names, same signatures, the rules of the PTX manual checked at each call.
#pragma once

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

}  // namespace leanconv
