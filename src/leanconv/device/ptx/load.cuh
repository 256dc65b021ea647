// Loads and stores exactly as they are written, which the compiler would join or split: ld.shared, st.global.
// NOTE: each header of ptx/ wraps one kind of PTX instruction, a function an instruction, named after it. The CPU
// emulator has a twin of each, found first on the include path; kernels therefore include them with angle brackets.
#pragma once

#include <device/ptx/shared.cuh>

namespace leanconv {

// ld.shared.u8, .u16, .u32: an element at a multiple of its size, with zeros above it.
__device__ __forceinline__ unsigned ld_shared_u8(const void* shared) {
    unsigned value;
    asm volatile("ld.shared.u8 %0, [%1];\n" : "=r"(value) : "r"(shared_address(shared)) : "memory");
    return value;
}
__device__ __forceinline__ unsigned ld_shared_u16(const void* shared) {
    unsigned short value;
    asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(value) : "r"(shared_address(shared)) : "memory");
    return value;
}
__device__ __forceinline__ unsigned ld_shared_u32(const void* shared) {
    unsigned value;
    asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(value) : "r"(shared_address(shared)) : "memory");
    return value;
}

// ld.shared.v2.u32, .v4.u32: two and four words, at a multiple of 8 and 16 bytes.
__device__ __forceinline__ void ld_shared_v2_u32(unsigned (&to)[2], const void* shared) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];\n" : "=r"(to[0]), "=r"(to[1]) : "r"(shared_address(shared)) : "memory");
}
__device__ __forceinline__ void ld_shared_v4_u32(unsigned (&to)[4], const void* shared) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(shared)) : "memory");
}

// st.global.v2.f32, .v4.f32: two and four words, at a multiple of 8 and 16 bytes.
__device__ __forceinline__ void st_global_v2(float* to, float a, float b) {
    asm volatile("st.global.v2.f32 [%0], {%1, %2};\n" :: "l"(to), "f"(a), "f"(b) : "memory");
}
__device__ __forceinline__ void st_global_v4(float* to, const float (&v)[4]) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};\n" :: "l"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}

}  // namespace leanconv
