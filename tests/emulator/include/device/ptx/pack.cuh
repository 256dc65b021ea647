// The CPU twin of ptx/pack.cuh: same names, same signatures.
#pragma once

namespace leanconv {

inline unsigned saturated(int value, int low, int high, unsigned mask) {
    return static_cast<unsigned>(value < low ? low : value > high ? high : value) & mask;
}

inline unsigned cvt_pack_sat_u16_s32(int high, int low) {
    return saturated(high, 0, 65535, 0xffff) << 16 | saturated(low, 0, 65535, 0xffff);
}
inline unsigned cvt_pack_sat_s16_s32(int high, int low) {
    return saturated(high, -32768, 32767, 0xffff) << 16 | saturated(low, -32768, 32767, 0xffff);
}

inline unsigned cvt_pack_sat_u8_s32(int high, int low, unsigned rest) {
    return rest << 16 | saturated(high, 0, 255, 0xff) << 8 | saturated(low, 0, 255, 0xff);
}
inline unsigned cvt_pack_sat_s8_s32(int high, int low, unsigned rest) {
    return rest << 16 | saturated(high, -128, 127, 0xff) << 8 | saturated(low, -128, 127, 0xff);
}

}  // namespace leanconv
