// Asynchronous copies of two words (cp.async of 8 bytes).
#pragma once

#include <device/ptx/memory.cuh>

namespace leanconv {

// cp.async.ca, 8 bytes global -> shared without a register in between; a false `valid` reads nothing and writes zeros.
// Both addresses must be aligned to 8 bytes.
__device__ __forceinline__ void cp_async_8(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n"
                 :: "r"(shared_address(shared)), "l"(global), "r"(valid ? 8 : 0) : "memory");
}

}  // namespace leanconv
