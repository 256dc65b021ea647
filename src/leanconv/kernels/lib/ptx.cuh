// One wrapper per PTX instruction, named after it, and what else depends on the compiler rather than on the algorithm.
// NOTE: the CPU emulator has its own lib/ptx.cuh with a twin for each function here, found first on the include path;
// kernels therefore write #include <lib/ptx.cuh>, with angle brackets.
#pragma once

namespace leanconv {

// The block's dynamic shared memory, aligned to 128 bytes; its size is Launch.shared_bytes of the host half.
// Kernels take all their shared memory from here, so that the emulator can poison and fence it.
__device__ __forceinline__ unsigned char* shared_memory() {
    extern __shared__ __align__(128) unsigned char leanconv_shared_memory[];
    return leanconv_shared_memory;
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// cp.async.ca, 4 bytes global -> shared without a register in between; a false `valid` reads nothing and writes zero.
// Both addresses must be aligned to 4 bytes.
__device__ __forceinline__ void cp_async_4(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n"
                 :: "r"(shared_address(shared)), "l"(global), "r"(valid ? 4 : 0) : "memory");
}

// cp.async.cg, 16 bytes, past L1; both addresses must be aligned to 16 bytes.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n"
                 :: "r"(shared_address(shared)), "l"(global), "r"(valid ? 16 : 0) : "memory");
}

// cp.async.commit_group: closes the group of this thread's copies issued so far.
__device__ __forceinline__ void cp_async_commit_group() {
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// cp.async.wait_group: waits until at most `pending` of this thread's latest groups are still under way.
template <int pending>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;\n" :: "n"(pending) : "memory");
}

// bar.sync and bar.arrive: a barrier of the block by its number, at which `threads` threads meet, whole warps. Who arrives
// goes on; what it wrote to shared memory before is seen by those who wait. Number 0 is that of __syncthreads.
__device__ __forceinline__ void barrier_sync(int number, int threads) {
    asm volatile("bar.sync %0, %1;\n" :: "r"(number), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_arrive(int number, int threads) {
    asm volatile("bar.arrive %0, %1;\n" :: "r"(number), "r"(threads) : "memory");
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
