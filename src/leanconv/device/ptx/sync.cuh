// What threads wait for: named barriers (bar), clusters (barrier.cluster, mapa), barriers that count arrivals and bytes
// (mbarrier), earlier launches (griddepcontrol); and the registers that warps pass to each other (setmaxnreg).
#pragma once

#include <device/ptx/memory.cuh>

namespace leanconv {

// bar.sync and bar.arrive: a named barrier of the block, for `threads` threads, whole warps. Who arrives goes on; what it
// wrote to shared memory before is visible to those who wait. Number 0 is that of __syncthreads.
__device__ __forceinline__ void barrier_sync(int number, int threads) {
    asm volatile("bar.sync %0, %1;\n" :: "r"(number), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_arrive(int number, int threads) {
    asm volatile("bar.arrive %0, %1;\n" :: "r"(number), "r"(threads) : "memory");
}

// bar.red.or.pred: the same as barrier_sync, and whether the predicate of any of these threads is true.
__device__ __forceinline__ bool barrier_or(int number, int threads, bool predicate) {
    int any;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.b32 p, %3, 0;\nbar.red.or.pred q, %1, %2, p;\nselp.b32 %0, 1, 0, q;\n}\n"
                 : "=r"(any) : "r"(number), "r"(threads), "r"(static_cast<int>(predicate)) : "memory");
    return any != 0;
}

// Zero, which no compiler knows: a dependency token. A barrier whose number includes it cannot come before `value` is there.
// NOTE: ptxas moves a barrier up past arithmetic in registers, also past an empty asm that names them and past a loop.
__device__ __forceinline__ int zero_after(unsigned value) {
    int zero;
    asm("{\n.reg .b32 bits;\npopc.b32 bits, %1;\nshr.u32 %0, bits, 6;\n}\n" : "=r"(zero) : "r"(value));
    return zero;
}

// Clusters of thread blocks and their distributed shared memory: from compute capability 9.0 on. Code for older ones may name them
// where it is discarded.
__device__ __forceinline__ unsigned cluster_rank();
__device__ __forceinline__ void cluster_barrier();
__device__ __forceinline__ float cluster_load(const float* shared, unsigned rank);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// %cluster_ctarank: the number of this block in its cluster (Launch.cluster of the host half).
__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
    return rank;
}

// barrier.cluster: all threads of all blocks of the cluster wait for each other; what they wrote to shared memory is visible
// after it.
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
#else
// NOTE: a call that depends on no template parameter counts as a use where it is discarded too (NVRTC 13.5).
__device__ __forceinline__ unsigned cluster_rank() { return 0; }
__device__ __forceinline__ void cluster_barrier() { asm volatile("trap;\n"); }
__device__ __forceinline__ float cluster_load(const float*, unsigned) { return 0.0f; }
#endif

// Barriers in shared memory that count arrivals and bytes: mbarrier, from compute capability 9.0 on.

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

// mbarrier.arrive: one arrival. What the thread wrote before is visible to those who wait.
// NOTE: the compiler may move it above the use of what was loaded from a stage; arrive after the values have been used.
__device__ __forceinline__ void mbarrier_arrive(Mbarrier* barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];\n" :: "r"(shared_address(barrier)) : "memory");
}

// One arrival of a warp, by its first lane.
// NOTE: what the other lanes wrote or read before is ordered only if __syncwarp, or an instruction of the whole warp, lies
// between.
__device__ __forceinline__ void mbarrier_arrive_warp(Mbarrier* barrier, int lane) {
    if (lane == 0) mbarrier_arrive(barrier);
}

// The same at two barriers, one after the other.
__device__ __forceinline__ void mbarrier_arrive_warp(Mbarrier* barrier, Mbarrier* next, int lane) {
    if (lane == 0) {
        mbarrier_arrive(barrier);
        mbarrier_arrive(next);
    }
}

// mapa + mbarrier.arrive: one arrival at the barrier that block `rank` of the cluster has where this one has `barrier`.
// NOTE: that block may not have left the kernel. What this thread wrote before is visible to its own block alone, which is all
// that memory needs which only copies write; a release to the cluster waits until all accesses of the thread have been
// performed. Explored (H200, d2eb937): it cost tensor_winograd half of its speed.
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

// griddepcontrol.wait: until the launch before this one has ended, and what it wrote is visible to this thread.
// NOTE: for kernels whose Launch `waits`; others wait before anything else. All that read or overwrite what an earlier launch
// of the call has written, or read, must wait. What was there before the first launch of the call may be read at once: that
// launch is an ordinary one, so all before it had ended.
__device__ __forceinline__ void griddepcontrol_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

// setmaxnreg: the registers of each thread of four neighbouring warps, which all execute it.
// NOTE: only for an architecture by its full name: sm_90a has it, sm_90 and sm_120 do not.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(__CUDA_ARCH_FEAT_SM100_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM120_ALL)
constexpr bool register_pools = true;
#else
constexpr bool register_pools = false;
#endif
template <int count>
__device__ __forceinline__ void set_registers_up() {
    static_assert(count >= 24 && count <= 256 && count % 8 == 0, "setmaxnreg takes multiples of 8 from 24 to 256");
    static_assert(register_pools || count == 0, "setmaxnreg needs an architecture by its full name, such as sm_90a");
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" :: "n"(count));
}
template <int count>
__device__ __forceinline__ void set_registers_down() {
    static_assert(count >= 24 && count <= 256 && count % 8 == 0, "setmaxnreg takes multiples of 8 from 24 to 256");
    static_assert(register_pools || count == 0, "setmaxnreg needs an architecture by its full name, such as sm_90a");
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" :: "n"(count));
}

}  // namespace leanconv
