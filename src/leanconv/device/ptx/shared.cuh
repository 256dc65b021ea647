// The block's shared memory, and addresses in it.
// NOTE: each header of ptx/ wraps one kind of PTX instruction, a function an instruction, named after it. The CPU
// emulator has a twin of each, found first on the include path; kernels therefore include them with angle brackets.
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

}  // namespace leanconv
