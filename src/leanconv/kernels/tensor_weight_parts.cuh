// The filters' gradient on tensor cores in two launches: as many blocks as keep the GPU busy share a tile, their sums go
// through a workspace of parts * K * C/g * R * S floats, and a second launch adds them in the order of the parts.
//
// Arithmetic as in tensor_weight.cuh; the second launch reads each part once, from L2 where they are few.
#pragma once

#include <lib/part_sums.cuh>
#include <tensor_weight.cuh>

namespace leanconv {

template <class Problem, class Tuning, class X, class DY>
__device__ __forceinline__ void tensor_weight_parts(const X& x, const DY& dy, float* workspace, long long batch) {
    tensor_weight<Problem, Tuning>(x, dy, workspace, batch);
}

}  // namespace leanconv
