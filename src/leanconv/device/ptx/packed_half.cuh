// Arithmetic of two float16 at once (fma): on sm_53 and later.
#pragma once

namespace leanconv {

// fma.rn.f16x2: two products and sums at once, each rounded once, to the nearest, of two the even one; subnormals included.
__device__ __forceinline__ unsigned fma_rn_f16x2(unsigned a, unsigned b, unsigned c) {
    unsigned sums;
    asm("fma.rn.f16x2 %0, %1, %2, %3;\n" : "=r"(sums) : "r"(a), "r"(b), "r"(c));
    return sums;
}

}  // namespace leanconv
