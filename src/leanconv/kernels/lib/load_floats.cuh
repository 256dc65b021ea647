// Adjacent elements of any type, loaded by one instruction and widened to floats.
#pragma once

#include <lib/element.cuh>
#include <lib/vector.cuh>

namespace leanconv {

// One element or four, to all of which `from` is aligned; zeros where it is not valid.
template <int count>
__device__ __forceinline__ void load_floats(float (&to)[count], const float* from, bool valid) {
    static_assert(count == 1 || count == 4, "one element or four");
#pragma unroll
    for (int i = 0; i < count; ++i) to[i] = 0.0f;
    if constexpr (count == 4) {
        if (valid) load_vector(to, from);
    } else {
        if (valid) to[0] = *from;
    }
}
template <int count, class T>
__device__ __forceinline__ void load_floats(float (&to)[count], const T* from, bool valid) {
    Packed<T, count> packed;
    packed.load(from, valid);
#pragma unroll
    for (int i = 0; i < count; ++i) to[i] = packed.value(i);
}

}  // namespace leanconv
