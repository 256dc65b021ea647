// Accumulators of wgmma: 16-bit products added to them by element type, and the rounding of a
// pair of neighbouring filters, as a thread holds them.
#pragma once

#include <device/element.cuh>
#include <device/epilogue.cuh>
#include <device/ptx/cluster.cuh>
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

__device__ __forceinline__ float round_to_tf32(float value) { return __uint_as_float(cvt_rn_tf32_f32(value)); }

// Of TF32, both in shared memory.
template <int count>
__device__ __forceinline__ void multiply(float, float (&sums)[count], MatrixDescriptor a, MatrixDescriptor b, bool add) {
    wgmma_tf32(sums, a, b, add);
}

// Two neighbours, rounded, as they lie in memory.
__device__ __forceinline__ unsigned rounded_pair(float16, const float (&v)[2]) { return cvt_rn_f16x2_f32(v[0], v[1]); }
__device__ __forceinline__ unsigned rounded_pair(bfloat16, const float (&v)[2]) { return cvt_rn_bf16x2_f32(v[0], v[1]); }

// This CTA's share of a thread's sums, those of neighbouring filters, added over the CTAs of a cluster in the order of their
// ranks. `own` holds the sums of this CTA, those of one thread next to the other's; between two barriers of the cluster.
template <int split, int threads, int blocks, int count>
__device__ __forceinline__ void add_shares(float (&share)[blocks][count], const float* own) {
    const int first = static_cast<int>(cluster_rank()) * count;
#pragma unroll
    for (int i = 0; i < blocks * count; ++i) {
        const float* const at = own + (i / count * split * count + first + i % count) * threads + threadIdx.x;
        share[i / count][i % count] = cluster_sum<split>(at);
    }
}

}  // namespace leanconv
