// The stages of a reduction over pixels that a block of native_weight_nhwc and native_weight_nchw sums.
#pragma once

#include <device/ptx/sync.cuh>

namespace leanconv {

// Those of `all` pixels, so many a stage, are shared evenly by `split_k` slices of `split` blocks.
template <class Tuning>
struct StageShare {
    int first, end;
    __device__ __forceinline__ StageShare(long long all, int pixels, int slice) {
        const long long stages = (all + pixels - 1) / pixels;
        const int number = Tuning::split == 1 ? slice : slice * Tuning::split + static_cast<int>(cluster_rank());
        first = static_cast<int>(stages * number / (Tuning::split_k * Tuning::split));
        end = static_cast<int>(stages * (number + 1) / (Tuning::split_k * Tuning::split));
    }
};

}  // namespace leanconv
