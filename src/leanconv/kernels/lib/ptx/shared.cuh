// The block's shared memory, and addresses in it.
// NOTE: each header of lib/ptx/ wraps one kind of PTX instruction, a function an instruction, named after it. The CPU
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

}  // namespace leanconv
