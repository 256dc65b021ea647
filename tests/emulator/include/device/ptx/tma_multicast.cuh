// The CPU twin of ptx/tma_multicast.cuh.
#pragma once

#include <device/ptx/tma.cuh>

namespace leanconv {

inline void cp_async_bulk_tensor_multicast_shared_global(void* shared, const TensorMap& map, Mbarrier* barrier,
                                                         unsigned short destinations, int c0, int c1, int c2, EMULATOR_SITE) {
    const int at[] = {c0, c1, c2};
    emulator::tensor_multicast(shared, &map, barrier, destinations, 3, at, site);
}

}  // namespace leanconv
