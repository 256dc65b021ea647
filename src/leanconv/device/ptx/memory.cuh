// Shared memory and addresses in it; loads and stores as they are written (ld, st); asynchronous copies of words and
// vectors (cp.async); counters in global memory (atom); prefetch.
//
// NOTE: each header of ptx/ wraps one kind of PTX instruction, a function an instruction, named after it. The CPU emulator
// has a twin of each, found first on the include path; kernels therefore include them with angle brackets.
#pragma once

namespace leanconv {

// The block's dynamic shared memory, aligned to 128 bytes; its size is Launch.shared_bytes of the host half.
// Kernels take all their shared memory from here, so that the emulator can poison and fence it.
__device__ __forceinline__ unsigned char* shared_memory() {
    extern __shared__ __align__(128) unsigned char leanconv_shared_memory[];
    return leanconv_shared_memory;
}

// The same, aligned to 1024 bytes, where each swizzle pattern of tensor copies begins.
__device__ __forceinline__ unsigned char* shared_memory_for_swizzles() {
    extern __shared__ __align__(1024) unsigned char leanconv_swizzled_shared_memory[];
    return leanconv_swizzled_shared_memory;
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// ld.shared.v4: four neighbours, from a multiple of 16 bytes.
// NOTE: for stages that the next bulk copy overwrites. An arrival that declares the stage free does not wait for the loads
// before it, and the compiler moves their first use behind it, past any empty asm: the values came from the next stage in
// one run of some. Arrive after the wgmma or mma that the values go into. The emulator reports copies that are issued before.
__device__ __forceinline__ void ld_shared_v4(float (&to)[4], const float* from) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3]) : "r"(shared_address(from)) : "memory");
}
__device__ __forceinline__ void ld_shared_v4(unsigned (&to)[4], const unsigned* from) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(from)) : "memory");
}

// Loads and stores exactly as they are written, which the compiler would join or split: ld.shared, st.global.

// ld.shared.u16, .u32: an element at a multiple of its size, with zeros above it.
__device__ __forceinline__ unsigned ld_shared_u16(const void* shared) {
    unsigned short value;
    asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(value) : "r"(shared_address(shared)) : "memory");
    return value;
}
__device__ __forceinline__ unsigned ld_shared_u32(const void* shared) {
    unsigned value;
    asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(value) : "r"(shared_address(shared)) : "memory");
    return value;
}

// ld.shared.v2.u32, .v4.u32: two and four words, at a multiple of 8 and 16 bytes.
__device__ __forceinline__ void ld_shared_v2_u32(unsigned (&to)[2], const void* shared) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];\n" : "=r"(to[0]), "=r"(to[1]) : "r"(shared_address(shared)) : "memory");
}
__device__ __forceinline__ void ld_shared_v4_u32(unsigned (&to)[4], const void* shared) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(shared)) : "memory");
}

// st.global.v2.f32, .v4.f32: two and four words, at a multiple of 8 and 16 bytes.
__device__ __forceinline__ void st_global_v2(float* to, float a, float b) {
    asm volatile("st.global.v2.f32 [%0], {%1, %2};\n" :: "l"(to), "f"(a), "f"(b) : "memory");
}
__device__ __forceinline__ void st_global_v4(float* to, const float (&v)[4]) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};\n" :: "l"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
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

// cp.async.wait_group: waits until at most `pending` of this thread's latest groups are still in flight.
template <int pending>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;\n" :: "n"(pending) : "memory");
}

// atom.add: adds to a counter in global memory and gives what it was. Release and acquire: writes that this thread has
// observed, and those of its block before a barrier, are visible to whoever reads the counter after it.
__device__ __forceinline__ unsigned atom_add_acq_rel(unsigned* counter, unsigned value) {
    unsigned before;
    asm volatile("atom.add.acq_rel.gpu.u32 %0, [%1], %2;\n" : "=r"(before) : "l"(counter), "r"(value) : "memory");
    return before;
}

// ld.acquire: what was written before the additions that it observes is visible to loads that follow.
__device__ __forceinline__ unsigned ld_acquire(const unsigned* counter) {
    unsigned value;
    asm volatile("ld.acquire.gpu.u32 %0, [%1];\n" : "=r"(value) : "l"(counter) : "memory");
    return value;
}

// prefetch.global.L2: the line of memory that holds `at` is brought to the L2 cache; nothing waits for it.
__device__ __forceinline__ void prefetch_l2(const void* at) {
    asm volatile("prefetch.global.L2 [%0];\n" :: "l"(at));
}

}  // namespace leanconv
