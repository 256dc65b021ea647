// Vectors in the distributed shared memory of a cluster (mapa, ld.shared::cluster), from compute capability 9.0 on.
#pragma once

#include <device/ptx/memory.cuh>

namespace leanconv {

__device__ __forceinline__ void cluster_load_v4(float (&to)[4], const float* shared, unsigned rank);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// mapa + ld.shared::cluster.v4: the four floats that block `rank` of the cluster has where this block has `shared`, a multiple
// of 16 bytes. What holds for cluster_load (sync.cuh) holds here.
__device__ __forceinline__ void cluster_load_v4(float (&to)[4], const float* shared, unsigned rank) {
    unsigned address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(address) : "r"(shared_address(shared)), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3]) : "r"(address) : "memory");
}
#endif

}  // namespace leanconv
