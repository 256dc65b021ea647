// Products of 16-bit elements by the tensor cores, by the type of the elements.
#pragma once

#include <device/element.cuh>
#include <device/ptx/wgmma.cuh>

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

}  // namespace leanconv
