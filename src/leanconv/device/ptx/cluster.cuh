// Clusters of thread blocks and their distributed shared memory, from compute capability 9.0 on.
// NOTE: each header of ptx/ wraps one kind of PTX instruction, a function an instruction, named after it. The CPU
// emulator has a twin of each, found first on the include path; kernels therefore include them with angle brackets.
#pragma once

#include <device/ptx/shared.cuh>

namespace leanconv {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// %cluster_ctarank: the number of this block in its cluster (Launch.cluster of the host half).
__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
    return rank;
}

// barrier.cluster: all threads of all blocks of the cluster meet; what they wrote to shared memory is seen after it.
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

// mapa + ld.shared::cluster: the float that block `rank` of the cluster has where this block has `shared`.
// NOTE: a block must not leave while another may still read from it: put a cluster_barrier() before the end.
__device__ __forceinline__ float cluster_load(const float* shared, unsigned rank) {
    unsigned address;
    float value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(address) : "r"(shared_address(shared)), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];\n" : "=f"(value) : "r"(address) : "memory");
    return value;
}
#endif

}  // namespace leanconv
