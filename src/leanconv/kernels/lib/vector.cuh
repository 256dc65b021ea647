// Several neighbouring elements moved by one instruction.
#pragma once

namespace leanconv {

template <class T, int count>
struct alignas(sizeof(T) * count) Vector {
    static_assert(sizeof(T) * count <= 16, "the widest access is 128 bits");
    T v[count];
};

template <int count, class T>
__device__ __forceinline__ Vector<T, count> load_vector(const T* from) {
    return *reinterpret_cast<const Vector<T, count>*>(from);
}

template <class T, int count>
__device__ __forceinline__ void store_vector(T* to, const Vector<T, count>& vector) {
    *reinterpret_cast<Vector<T, count>*>(to) = vector;
}

}  // namespace leanconv
