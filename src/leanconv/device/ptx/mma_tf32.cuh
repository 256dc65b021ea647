// Products of TF32 by a warp (mma.sync), from compute capability 8.0 on. mma.cuh has those of 16 bits.
#pragma once

namespace leanconv {

// mma.sync.aligned.m16n8k8.row.col.f32 of TF32. A register holds one element:
//   a[i]: row g, or g + 8 where i is odd; column t, from i = 2 on t + 4                        (16 x 8)
//   b[i]: reduction element t, for i = 1 t + 4; column g                                       (8 x 8)
// An ldmatrix of rows of four float32 gives such fragments of A.
// NOTE: the tensor core reads 10 bits of each mantissa and drops the others: round before (cvt_rn_tf32_f32).
__device__ __forceinline__ void mma_tf32(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};\n"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace leanconv
