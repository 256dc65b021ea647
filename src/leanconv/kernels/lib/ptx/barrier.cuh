// Named barriers of a block.
// NOTE: each header of lib/ptx/ wraps one kind of PTX instruction, a function an instruction, named after it. The CPU
// emulator has a twin of each, found first on the include path; kernels therefore include them with angle brackets.
#pragma once

namespace leanconv {

// bar.sync and bar.arrive: a barrier of the block by its number, at which `threads` threads meet, whole warps. Who arrives
// goes on; what it wrote to shared memory before is seen by those who wait. Number 0 is that of __syncthreads.
__device__ __forceinline__ void barrier_sync(int number, int threads) {
    asm volatile("bar.sync %0, %1;\n" :: "r"(number), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_arrive(int number, int threads) {
    asm volatile("bar.arrive %0, %1;\n" :: "r"(number), "r"(threads) : "memory");
}

}  // namespace leanconv
