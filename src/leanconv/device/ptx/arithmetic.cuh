// Conversions between float and the 16-bit floating-point types, as their bits (cvt), the largest of floats (max), products
// of bytes (dp4a).
#pragma once

namespace leanconv {

// cvt.f32.f16: exact, subnormals included.
__device__ __forceinline__ float cvt_f32_f16(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;\n" : "=f"(value) : "h"(bits));
    return value;
}

// cvt.rn.f16.f32: to the nearest, of two the even one; from 65520 on to infinity.
__device__ __forceinline__ unsigned short cvt_rn_f16_f32(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;\n" : "=h"(bits) : "f"(value));
    return bits;
}

// cvt.rn.bf16.f32: to the nearest, of two the even one. The way back is a shift and needs no instruction of its own.
__device__ __forceinline__ unsigned short cvt_rn_bf16_f32(float value) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;\n" : "=h"(bits) : "f"(value));
    return bits;
}

// cvt.rn.f16x2.f32 and cvt.rn.bf16x2.f32: two at once, rounded as above, the first in the lower half as it lies in memory.
// NOTE: the instruction names them the other way round.
__device__ __forceinline__ unsigned cvt_rn_f16x2_f32(float first, float second) {
    unsigned bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(bits) : "f"(second), "f"(first));
    return bits;
}
__device__ __forceinline__ unsigned cvt_rn_bf16x2_f32(float first, float second) {
    unsigned bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(bits) : "f"(second), "f"(first));
    return bits;
}

// max.NaN.f32: NaN where either is; on sm_80 and later.
__device__ __forceinline__ float max_nan_f32(float a, float b) {
    float largest;
    asm("max.NaN.f32 %0, %1, %2;\n" : "=f"(largest) : "f"(a), "f"(b));
    return largest;
}

// cvt.rn.tf32.f32: float32 of 10 digits, to the nearest, of two the even one; on sm_90 and later.
__device__ __forceinline__ unsigned cvt_rn_tf32_f32(float value) {
    unsigned bits;
    asm("cvt.rn.tf32.f32 %0, %1;\n" : "=r"(bits) : "f"(value));
    return bits;
}

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
