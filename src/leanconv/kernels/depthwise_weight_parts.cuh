// Gradient of a depthwise layer's filters in two launches: more blocks share a filter than a cluster can have, their sums
// go through a workspace of split * K * R * S floats, and a second launch adds them in the order of the blocks.
//
// Arithmetic as in depthwise_weight.cuh. It is for NHWC: 8 channels are the least that a block can read without waste, and
// 32 are a line of memory, so that a layer of 32 channels keeps 32 multiprocessors busy at most where 8 blocks share a
// filter.
#pragma once

#include <depthwise_weight.cuh>

namespace leanconv {

template <class Problem, class Tuning>
__device__ __forceinline__ void depthwise_weight_parts(const typename Problem::element* __restrict__ x,
                                                       const typename Problem::element* __restrict__ dy,
                                                       float* __restrict__ workspace, long long batch, int rows) {
    constexpr int split = Tuning::split, taps = Problem::r * Problem::s, sums = Tuning::channels * taps;
    const int first_k = static_cast<int>(blockIdx.x) / split * Tuning::channels;
    const int rank = static_cast<int>(blockIdx.x) % split;
    float* const shared = reinterpret_cast<float*>(shared_memory());
    sum_block<Problem, Tuning>(shared, x, dy, first_k, rank, batch, rows);
    float* const to = workspace + (static_cast<int64>(rank) * Problem::k + first_k) * taps;
#pragma unroll 1
    for (int at = threadIdx.x; at < sums && at < (Problem::k - first_k) * taps; at += Tuning::threads) to[at] = shared[at];
}

}  // namespace leanconv
