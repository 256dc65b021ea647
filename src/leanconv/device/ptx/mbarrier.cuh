// Barriers in shared memory that count arrivals and bytes: mbarrier, from compute capability 9.0 on.
// NOTE: each header of ptx/ wraps one kind of PTX instruction, a function an instruction, named after it. The CPU
// emulator has a twin of each, found first on the include path; kernels therefore include them with angle brackets.
#pragma once

#include <device/ptx/shared.cuh>

namespace leanconv {

// A phase is complete when `count` threads have arrived and as many bytes have landed as were expected; the next one
// begins at once. Phases have parities 0, 1, 0, ... in turn, and a thread waits for the parity of the phase it means.
// NOTE: on a barrier whose first phase has not completed, a wait for parity 1 goes on at once: so a producer finds a
// ring of fresh stages free.
struct alignas(8) Mbarrier {
    unsigned long long state;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// mbarrier.init: by one thread, before the others know of it by a barrier of the block; count is 1 to 2^20 - 1.
__device__ __forceinline__ void mbarrier_init(Mbarrier* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" :: "r"(shared_address(barrier)), "r"(count) : "memory");
}

// fence.mbarrier_init: makes the inits of this thread known to the copies that shall signal on them.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

// mbarrier.inval: the memory serves as memory again.
__device__ __forceinline__ void mbarrier_inval(Mbarrier* barrier) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];\n" :: "r"(shared_address(barrier)) : "memory");
}

// mbarrier.arrive: one arrival. What the thread wrote before is seen by those who wait.
// NOTE: the compiler may move it above the use of what was loaded from a stage; arrive after the values have been used.
__device__ __forceinline__ void mbarrier_arrive(Mbarrier* barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];\n" :: "r"(shared_address(barrier)) : "memory");
}

// mapa + mbarrier.arrive: one arrival at the barrier that block `rank` of the cluster has where this one has `barrier`.
// NOTE: that block may not have left the kernel. What this thread wrote before is seen by its own block alone, which is all
// that memory needs which only copies write; a release to the cluster waits until all accesses of the thread have been
// performed, and cost tensor_winograd half of its speed.
__device__ __forceinline__ void mbarrier_arrive_cluster(Mbarrier* barrier, unsigned rank) {
    unsigned address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(address) : "r"(shared_address(barrier)), "r"(rank));
    asm volatile("mbarrier.arrive.release.cta.shared::cluster.b64 _, [%0];\n" :: "r"(address) : "memory");
}

// mbarrier.arrive.expect_tx: first `bytes` more to expect in this phase, then one arrival.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(Mbarrier* barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;\n"
                 :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// mbarrier.expect_tx: `bytes` more to expect in this phase.
__device__ __forceinline__ void mbarrier_expect_tx(Mbarrier* barrier, unsigned bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;\n"
                 :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// mbarrier.test_wait.parity: whether the phase of this parity is complete, the latest or the one before it.
__device__ __forceinline__ bool mbarrier_test_wait_parity(Mbarrier* barrier, unsigned parity) {
    unsigned complete;
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(complete) : "r"(shared_address(barrier)), "r"(parity) : "memory");
    return complete != 0;
}

// mbarrier.try_wait.parity: the same, and may sleep for a while before it answers.
__device__ __forceinline__ bool mbarrier_try_wait_parity(Mbarrier* barrier, unsigned parity) {
    unsigned complete;
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(complete) : "r"(shared_address(barrier)), "r"(parity) : "memory");
    return complete != 0;
}

// Waits until the phase of this parity is complete.
__device__ __forceinline__ void mbarrier_wait_parity(Mbarrier* barrier, unsigned parity) {
    while (!mbarrier_try_wait_parity(barrier, parity)) {
    }
}
#endif

}  // namespace leanconv
