// Asynchronous copies by lanes (cp.async): of two words, and their arrival at a barrier in shared memory.
#pragma once

#include <device/ptx/memory.cuh>
#include <device/ptx/sync.cuh>

namespace leanconv {

// cp.async.ca, 8 bytes global -> shared without a register in between; a false `valid` reads nothing and writes zeros.
// Both addresses must be aligned to 8 bytes.
__device__ __forceinline__ void cp_async_8(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n"
                 :: "r"(shared_address(shared)), "l"(global), "r"(valid ? 8 : 0) : "memory");
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// cp.async.mbarrier.arrive.noinc: one arrival, when all copies that this thread has issued have landed. The thread goes on.
// NOTE: who waits, and reads by products or bulk copies, needs a fence_proxy_async() of its own.
__device__ __forceinline__ void cp_async_mbarrier_arrive(Mbarrier* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" :: "r"(shared_address(barrier)) : "memory");
}
#endif

}  // namespace leanconv
