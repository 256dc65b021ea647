// One, two or four adjacent elements, aligned to all of them, as one load or store; loads widen them to floats.
#pragma once

#include <device/element.cuh>
#include <device/epilogue.cuh>
#include <device/vector.cuh>

namespace leanconv {

// Zeros where it is not valid.
template <int count>
__device__ __forceinline__ void load_adjacent(float (&v)[count], const float* from, bool valid = true) {
    static_assert(count == 1 || count == 2 || count == 4, "one, two or four elements are loaded at once");
#pragma unroll
    for (int i = 0; i < count; ++i) v[i] = 0.0f;
    if (!valid) return;
    if constexpr (count == 4) {
        load_vector(v, from);
    } else if constexpr (count == 2) {
        const float2 two = *reinterpret_cast<const float2*>(from);
        v[0] = two.x, v[1] = two.y;
    } else {
        v[0] = *from;
    }
}
template <int count, class T>
__device__ __forceinline__ void load_adjacent(float (&v)[count], const T* from, bool valid = true) {
    Packed<T, count> packed;
    packed.load(from, valid);
#pragma unroll
    for (int i = 0; i < count; ++i) v[i] = packed.value(i);
}

template <int count>
__device__ __forceinline__ void store_adjacent(float* to, const float (&v)[count]) {
    if constexpr (count == 4) store_vector_of(to, v);
    else if constexpr (count == 2) *reinterpret_cast<float2*>(to) = make_float2(v[0], v[1]);
    else *to = v[0];
}
template <int count, class T>
__device__ __forceinline__ void store_adjacent(T* to, const T (&v)[count]) {
    if constexpr (count == 4) store_vector_of(to, v);
    else if constexpr (count == 2) *reinterpret_cast<unsigned*>(to) = v[0].bits | v[1].bits << 16;
    else *to = v[0];
}

}  // namespace leanconv
