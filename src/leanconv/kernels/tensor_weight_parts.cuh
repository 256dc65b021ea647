// The filters' gradient on tensor cores in two launches: as many blocks as keep the GPU busy share a tile, their sums go
// through a workspace of parts * K * C/g * R * S floats, and a second launch adds them in the order of the parts.
//
// Arithmetic as in tensor_weight.cuh; the second launch reads each part once, from L2 where they are few.
#pragma once

#include <tensor_weight.cuh>

namespace leanconv {

template <class Problem, class Tuning, class X, class DY>
__device__ __forceinline__ void tensor_weight_parts(const X& x, const DY& dy, float* workspace, long long batch) {
    tensor_weight<Problem, Tuning>(x, dy, workspace, batch);
}

// A thread adds a weight's parts with a number of its warp's, modulo `warps`; then the first warp adds these.
template <class Problem, class Tuning>
__device__ __forceinline__ void tensor_weight_sum(const float* __restrict__ workspace, float* __restrict__ dw) {
    constexpr int64 weights = static_cast<int64>(Problem::k) * Problem::group_c * (Problem::r * Problem::s);
    constexpr int warps = Tuning::sum_warps;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int64 at = static_cast<int64>(blockIdx.x) * 32 + lane;
    float* const shared = reinterpret_cast<float*>(shared_memory());
    float total = 0.0f;
    if (at < weights) {
#pragma unroll 8
        for (int part = warp; part < Tuning::parts; part += warps) total += workspace[part * weights + at];
    }
    shared[threadIdx.x] = total;
    __syncthreads();
    if (warp > 0 || at >= weights) return;
#pragma unroll
    for (int other = 1; other < warps; ++other) total += shared[other * 32 + lane];
    dw[at] = finish<Problem>(total, 0.0f, held_by<Problem>(dw + at, true));
}

}  // namespace leanconv
