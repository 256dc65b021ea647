// Named barriers of a block.
// NOTE: each header of ptx/ wraps one kind of PTX instruction, a function an instruction, named after it. The CPU
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

// bar.red.or.pred: the same as barrier_sync, and whether the predicate of any of these threads is true.
__device__ __forceinline__ bool barrier_or(int number, int threads, bool predicate) {
    int any;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.b32 p, %3, 0;\nbar.red.or.pred q, %1, %2, p;\nselp.b32 %0, 1, 0, q;\n}\n"
                 : "=r"(any) : "r"(number), "r"(threads), "r"(static_cast<int>(predicate)) : "memory");
    return any != 0;
}

// Zero, which no compiler knows: a barrier whose number it is part of cannot come before `value` is there.
// NOTE: ptxas moves a barrier up past arithmetic in registers, also past an empty asm that names them and past a loop.
__device__ __forceinline__ int zero_after(unsigned value) {
    int zero;
    asm("{\n.reg .b32 bits;\npopc.b32 bits, %1;\nshr.u32 %0, bits, 6;\n}\n" : "=r"(zero) : "r"(value));
    return zero;
}

}  // namespace leanconv
