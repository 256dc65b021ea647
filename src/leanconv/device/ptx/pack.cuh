// Two integers packed into one word with saturation (cvt.pack.sat): on sm_72 and later.
#pragma once

namespace leanconv {

// cvt.pack.sat.u16.s32 and .s16.s32: `low` in the lower half.
__device__ __forceinline__ unsigned cvt_pack_sat_u16_s32(int high, int low) {
    unsigned packed;
    asm("cvt.pack.sat.u16.s32 %0, %1, %2;\n" : "=r"(packed) : "r"(high), "r"(low));
    return packed;
}
__device__ __forceinline__ unsigned cvt_pack_sat_s16_s32(int high, int low) {
    unsigned packed;
    asm("cvt.pack.sat.s16.s32 %0, %1, %2;\n" : "=r"(packed) : "r"(high), "r"(low));
    return packed;
}

// cvt.pack.sat.u8.s32.b32 and .s8.s32.b32: `low` in the lowest byte, `high` in the next; the lower half of `rest` becomes the
// upper one.
__device__ __forceinline__ unsigned cvt_pack_sat_u8_s32(int high, int low, unsigned rest) {
    unsigned packed;
    asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;\n" : "=r"(packed) : "r"(high), "r"(low), "r"(rest));
    return packed;
}
__device__ __forceinline__ unsigned cvt_pack_sat_s8_s32(int high, int low, unsigned rest) {
    unsigned packed;
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;\n" : "=r"(packed) : "r"(high), "r"(low), "r"(rest));
    return packed;
}

}  // namespace leanconv
