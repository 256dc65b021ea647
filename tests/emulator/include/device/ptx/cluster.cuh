// The CPU twin of ptx/cluster.cuh: same names, same signatures.
#pragma once

#include <device/ptx/sync.cuh>

namespace leanconv {

inline void cluster_load_v4(float (&to)[4], const float* shared, unsigned rank, EMULATOR_SITE) {
    emulator::check_cluster_vector(shared, site);
    for (int i = 0; i < 4; ++i) to[i] = emulator::cluster_load(shared + i, rank, site);
}

}  // namespace leanconv
