// From sums to the output tensor: bias, activation, what the output holds; stores of four elements where rows allow them.
#pragma once

#include <device/element.cuh>
#include <device/index.cuh>
#include <device/ptx/sync.cuh>

namespace leanconv {

// The sum that the `split` blocks of a cluster have at `shared`, each in its own shared memory, added in the order of ranks.
template <int split>
__device__ __forceinline__ float cluster_sum(const float* shared) {
    float sum = cluster_load(shared, 0);
#pragma unroll
    for (int rank = 1; rank < split; ++rank) sum += cluster_load(shared, rank);
    return sum;
}

// A result before its rounding: bias and activation; `held` is what the output holds, where results are added to it.
template <class Problem, class Sum>
__device__ __forceinline__ Sum finish(Sum value, Sum bias, Sum held = 0) {
    if constexpr (Problem::bias) value = add(value, bias);
    if constexpr (Problem::accumulate) value = add(value, held);
    // NOTE: written so that NaN stays NaN, as in PyTorch; fmaxf would turn it into zero.
    return Problem::relu ? (value < 0 ? 0 : value) : value;
}

// What the output holds at `at`, which is read only where it exists and results are added to it.
template <class Problem, class T>
__device__ __forceinline__ auto held_by(const T* at, bool exists) {
    using Sum = decltype(to_sum(*at));
    if constexpr (Problem::accumulate) return exists ? to_sum(*at) : Sum(0);
    else return Sum(0);
}

// Four values along the contiguous axis, `step` elements apart, of which those below `count` elements exist.
template <class T>
__device__ __forceinline__ void store_four(T* to, const T (&v)[4], int step, int count, bool vector) {
    if (vector) {
        if (count > 0) store_vector(to, v);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i * step < count) to[i * step] = v[i];
    }
}

}  // namespace leanconv
