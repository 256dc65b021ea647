// Accumulators of wgmma: 16-bit products added to them by element type, and the rounding of a
// pair of neighbouring filters, as a thread holds them.
#pragma once

#include <device/element.cuh>
#include <device/epilogue.cuh>
#include <device/ptx/mma.cuh>

namespace leanconv {

// Adds to the sums of 64 rows the products of `a`, in shared memory or in registers, and `b`, in shared memory.
template <int count, class A, int transposed>
__device__ __forceinline__ void multiply(float16, float (&sums)[count], const A& a, Descriptor<transposed> b, bool add) {
    wgmma_f16(sums, a, b, add);
}
template <int count, class A, int transposed>
__device__ __forceinline__ void multiply(bfloat16, float (&sums)[count], const A& a, Descriptor<transposed> b, bool add) {
    wgmma_bf16(sums, a, b, add);
}

// Two neighbours, rounded, as they lie in memory.
__device__ __forceinline__ unsigned rounded_pair(float16, const float (&v)[2]) { return cvt_rn_f16x2_f32(v[0], v[1]); }
__device__ __forceinline__ unsigned rounded_pair(bfloat16, const float (&v)[2]) { return cvt_rn_bf16x2_f32(v[0], v[1]); }

}  // namespace leanconv
