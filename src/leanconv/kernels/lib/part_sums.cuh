// The second launch of gradients whose parts went through a workspace: their sums, in the order of the parts.
#pragma once

#include <lib/epilogue.cuh>
#include <lib/index.cuh>
#include <lib/ptx/shared.cuh>

namespace leanconv {

// A block has 32 weights, one a lane. Each warp adds every `sum_warps`-th of their parts, then the first warp what all have
// added.
template <class Problem, class Tuning>
__device__ __forceinline__ void sum_parts(const float* __restrict__ workspace, typename Problem::element* __restrict__ dw) {
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
    dw[at] = from_float<typename Problem::element>(finish<Problem>(total, 0.0f, held_by<Problem>(dw + at, true)));
}

}  // namespace leanconv
