// The CPU twin of ptx/load.cuh: same names, same signatures; the sanitizers see every access.
#pragma once

namespace leanconv {

inline unsigned ld_shared_u8(const void* shared) { return *static_cast<const unsigned char*>(shared); }
inline unsigned ld_shared_u16(const void* shared) { return *static_cast<const unsigned short*>(shared); }
inline unsigned ld_shared_u32(const void* shared) { return *static_cast<const unsigned*>(shared); }

inline void ld_shared_v2_u32(unsigned (&to)[2], const void* shared) {
    const uint2 v = *static_cast<const uint2*>(shared);
    to[0] = v.x, to[1] = v.y;
}
inline void ld_shared_v4_u32(unsigned (&to)[4], const void* shared) {
    const uint4 v = *static_cast<const uint4*>(shared);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

inline void st_global_v2(float* to, float a, float b) { *reinterpret_cast<float2*>(to) = make_float2(a, b); }
inline void st_global_v4(float* to, const float (&v)[4]) { *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]); }

}  // namespace leanconv
