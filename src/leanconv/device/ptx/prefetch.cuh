// Fetching ahead of use.
// NOTE: each header of ptx/ wraps one kind of PTX instruction, a function an instruction, named after it. The CPU
// emulator has a twin of each, found first on the include path; kernels therefore include them with angle brackets.
#pragma once

namespace leanconv {

// prefetch.global.L2: the line of memory that holds `at` is brought to the L2 cache; nothing waits for it.
__device__ __forceinline__ void prefetch_l2(const void* at) {
    asm volatile("prefetch.global.L2 [%0];\n" :: "l"(at));
}

}  // namespace leanconv
