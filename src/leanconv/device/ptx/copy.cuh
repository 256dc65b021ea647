// Asynchronous copies of single words and vectors, global -> shared: cp.async.
// NOTE: each header of ptx/ wraps one kind of PTX instruction, a function an instruction, named after it. The CPU
// emulator has a twin of each, found first on the include path; kernels therefore include them with angle brackets.
#pragma once

#include <device/ptx/shared.cuh>

namespace leanconv {

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

}  // namespace leanconv
