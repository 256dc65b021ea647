// The CPU twin of ptx/cluster.cuh: same names, same signatures, the rules of the PTX manual checked at each call.
#pragma once

namespace leanconv {

inline unsigned cluster_rank() { return emulator::cluster_rank(); }

inline void cluster_barrier(EMULATOR_SITE) { emulator::cluster_barrier(site); }

inline float cluster_load(const float* shared, unsigned rank, EMULATOR_SITE) {
    return emulator::cluster_load(shared, rank, site);
}

}  // namespace leanconv
