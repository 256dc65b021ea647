// The CPU twin of kernels/lib/ptx/barrier.cuh: same names, same signatures, the rules of the PTX manual checked at each call.
#pragma once

namespace leanconv {

inline void barrier_sync(int number, int threads, EMULATOR_SITE) {
    emulator::named_barrier(true, number, threads, site);
}

inline void barrier_arrive(int number, int threads, EMULATOR_SITE) {
    emulator::named_barrier(false, number, threads, site);
}

inline int zero_after(unsigned) { return 0; }

}  // namespace leanconv
