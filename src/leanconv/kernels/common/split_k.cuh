// The second launch of split-K: adds the partial sums of a workspace, in their order.
#pragma once

#include <device/epilogue.cuh>
#include <device/index.cuh>
#include <device/ptx/memory.cuh>

namespace leanconv {

// A block has 32 weights, one a lane, or `width` times as many where there are many. Each warp adds every `sum_warps`-th of
// their partial sums, then the first warp what all have added.
template <class Problem, class Tuning>
__device__ __forceinline__ void sum_split_k(const float* __restrict__ workspace, ElementsOut<Problem> dw) {
    constexpr int64 weights = static_cast<int64>(Problem::k) * Problem::group_c * filter_taps<Problem>;
    constexpr int warps = Tuning::sum_warps, width = Tuning::width;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int64 at = static_cast<int64>(blockIdx.x) * (32 * width) + lane;
    float* const shared = reinterpret_cast<float*>(shared_memory());
    float total[width] = {};
#pragma unroll(8 / width)
    for (int split = warp; split < Tuning::split_k; split += warps)
#pragma unroll
        for (int i = 0; i < width; ++i)
            if (at + 32 * i < weights) total[i] += workspace[split * weights + at + 32 * i];
    if constexpr (warps > 1) {
#pragma unroll
        for (int i = 0; i < width; ++i) shared[(warp * width + i) * 32 + lane] = total[i];
        __syncthreads();
        if (warp > 0) return;
    }
#pragma unroll
    for (int i = 0; i < width; ++i) {
        if (at + 32 * i >= weights) return;
#pragma unroll
        for (int other = 1; other < warps; ++other) total[i] += shared[(other * width + i) * 32 + lane];
        typename Problem::element* const to = dw + at + 32 * i;
        *to = from_float<typename Problem::element>(finish<Problem>(total[i], 0.0f, held_by<Problem>(to, true)));
    }
}

}  // namespace leanconv
