// Products of 16-bit elements by the tensor cores, both operands in shared memory.
#pragma once

#include <lib/element.cuh>
#include <lib/ptx/wgmma.cuh>

namespace leanconv {

// A product of 64 pixels and all filters, by the type of the elements.
template <int count, int transposed>
__device__ __forceinline__ void multiply(float16, float (&sums)[count], Descriptor<transposed> a, MatrixDescriptor b, bool add) {
    wgmma_f16(sums, a, b, add);
}
template <int count, int transposed>
__device__ __forceinline__ void multiply(bfloat16, float (&sums)[count], Descriptor<transposed> a, MatrixDescriptor b, bool add) {
    wgmma_bf16(sums, a, b, add);
}

}  // namespace leanconv
