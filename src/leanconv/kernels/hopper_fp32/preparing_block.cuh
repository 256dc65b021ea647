// What the threads that prepare filters together share: a whole block of a launch that does nothing else, or those of a main
// kernel that prepare again, which is rare. Then the code is small, not quick: a main kernel of 106 KB took 47 us instead of 37
// on an H200 when a launch of some 30 KB came before it, of a single block or of many (docs/algorithms/tensor-cores.md).
#pragma once

#include <device/ptx/barrier.cuh>
#include <device/ptx/shared.cuh>

namespace leanconv {

// A tuning for the first `count` threads of a block, whose shared memory begins at `first_byte`.
template <class Tuning, int count, int first_byte = 0>
struct Small : Tuning {
    static constexpr int threads = count, shared_at = first_byte;
    static constexpr bool small = true;
};
template <class Tuning> __host__ __device__ constexpr bool is_small(decltype(Tuning::small)*) { return Tuning::small; }
template <class Tuning> __host__ __device__ constexpr bool is_small(...) { return false; }

template <class Tuning>
__device__ __forceinline__ float* shared_floats() {
    if constexpr (is_small<Tuning>(nullptr)) return reinterpret_cast<float*>(shared_memory() + Tuning::shared_at);
    else return reinterpret_cast<float*>(shared_memory());
}
template <class Tuning>
__device__ __forceinline__ void sync_threads() {
    if constexpr (is_small<Tuning>(nullptr)) barrier_sync(12, Tuning::threads);
    else __syncthreads();
}

// The largest of a warp's values, each by itself.
template <int count>
__device__ __forceinline__ void largest_of_warp(float (&values)[count]) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2)
#pragma unroll
        for (int i = 0; i < count; ++i) values[i] = fmaxf(values[i], __shfl_xor_sync(0xffffffffu, values[i], lanes));
}

// And of a block's; `shared` takes as many for each warp, and is free again after the next barrier.
template <class Tuning, int count>
__device__ __forceinline__ void largest_of_block(float (&values)[count], float* shared) {
    constexpr int warps = Tuning::threads / 32;
    largest_of_warp(values);
    sync_threads<Tuning>();
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int i = 0; i < count; ++i) shared[i * warps + threadIdx.x / 32] = values[i];
    }
    sync_threads<Tuning>();
#pragma unroll
    for (int i = 0; i < count; ++i)
#pragma unroll
        for (int warp = 0; warp < warps; ++warp) values[i] = fmaxf(values[i], shared[i * warps + warp]);
}

}  // namespace leanconv
