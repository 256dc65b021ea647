// Four neighbouring elements moved by one 128-bit instruction.
#pragma once

namespace leanconv {

__device__ __forceinline__ void load_vector(float (&to)[4], const float* from) {
    const float4 v = *reinterpret_cast<const float4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}
__device__ __forceinline__ void load_vector(unsigned (&to)[4], const unsigned* from) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

__device__ __forceinline__ void store_vector(float* to, const float (&v)[4]) {
    *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
}
__device__ __forceinline__ void store_vector(unsigned* to, const unsigned (&v)[4]) {
    *reinterpret_cast<uint4*>(to) = make_uint4(v[0], v[1], v[2], v[3]);
}

// To global memory, as data that will not be read soon.
// NOTE: an intrinsic, because the compiler split ordinary 128-bit stores of results into four of 32 bits.
__device__ __forceinline__ void stream_vector(float* to, const float (&v)[4]) {
    __stcs(reinterpret_cast<float4*>(to), make_float4(v[0], v[1], v[2], v[3]));
}
__device__ __forceinline__ void stream_vector(unsigned* to, const unsigned (&v)[4]) {
    __stcs(reinterpret_cast<uint4*>(to), make_uint4(v[0], v[1], v[2], v[3]));
}

}  // namespace leanconv
