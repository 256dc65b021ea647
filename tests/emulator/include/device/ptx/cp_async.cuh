// The CPU twin of ptx/cp_async.cuh: same names, same signatures, the rules of the PTX manual checked at each call.
#pragma once

#include <device/ptx/memory.cuh>
#include <device/ptx/sync.cuh>

namespace leanconv {

inline void cp_async_8(void* shared, const void* global, bool valid, EMULATOR_SITE) {
    emulator::cp_async(shared, global, 8, valid, site);
}

inline void cp_async_mbarrier_arrive(Mbarrier* barrier, EMULATOR_SITE) { emulator::cp_async_mbarrier_arrive(barrier, site); }

}  // namespace leanconv
