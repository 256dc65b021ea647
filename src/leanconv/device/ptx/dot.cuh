// Products of four pairs of 8-bit integers, summed in 32 bits: dp4a.
// NOTE: each header of ptx/ wraps one kind of PTX instruction, a function an instruction, named after it. The CPU
// emulator has a twin of each, found first on the include path; kernels therefore include them with angle brackets.
#pragma once

namespace leanconv {

// dp4a.s32.s32: the four signed bytes of `a` times those of `b`, added to `sum`.
__device__ __forceinline__ int dp4a_s32_s32(int a, int b, int sum) {
    int result;
    asm("dp4a.s32.s32 %0, %1, %2, %3;\n" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
    return result;
}

// dp4a.u32.s32: the bytes of `a` are unsigned, those of `b` signed.
__device__ __forceinline__ int dp4a_u32_s32(unsigned a, int b, int sum) {
    int result;
    asm("dp4a.u32.s32 %0, %1, %2, %3;\n" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
    return result;
}

}  // namespace leanconv
