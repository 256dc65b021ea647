// The CPU twin of ptx/mbarrier.cuh: same names, same signatures, the rules of the PTX manual checked at each call.
#pragma once

#include <device/ptx/shared.cuh>

namespace leanconv {

struct alignas(8) Mbarrier {
    unsigned long long state;
};

inline void mbarrier_init(Mbarrier* barrier, int count, EMULATOR_SITE) { emulator::mbarrier_init(barrier, count, site); }

inline void fence_mbarrier_init() { emulator::fence_mbarrier_init(); }

inline void mbarrier_inval(Mbarrier* barrier, EMULATOR_SITE) { emulator::mbarrier_inval(barrier, site); }

inline void mbarrier_arrive(Mbarrier* barrier, EMULATOR_SITE) { emulator::mbarrier_arrive(barrier, site); }

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

inline void mbarrier_wait_parity_cluster(Mbarrier* barrier, unsigned parity, EMULATOR_SITE) {
    emulator::mbarrier_wait(barrier, parity, site);
}

}  // namespace leanconv
