// Products of matrices by the tensor cores, a warp at a time: ldmatrix and mma.sync, from compute capability 8.0 on.
// NOTE: each header of ptx/ wraps one kind of PTX instruction, a function an instruction, named after it. The CPU
// emulator has a twin of each, found first on the include path; kernels therefore include them with angle brackets.
//
// Fragments, for the lane with group g = lane / 4 and pair t = lane % 4; a register holds two neighbours, the lower half
// first:
//   a[i]: row g, or g + 8 where i is odd; columns 2 t and 2 t + 1, from i = 2 on 8 more       (16 x 16)
//   b[i]: reduction elements 2 t and 2 t + 1, for i = 1 8 more; column g                       (16 x 8)
//   sums[i]: row g, or g + 8 from i = 2 on; column 2 t, or one more where i is odd             (16 x 8)
#pragma once

#include <device/ptx/shared.cuh>

namespace leanconv {

// mma.sync.aligned.m16n8k16.row.col.f32: sums += a b. All lanes of the warp take part.
// NOTE: the tensor core rounds its running sum toward zero, as wgmma.cuh says.
__device__ __forceinline__ void mma_f16(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};\n"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_bf16(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};\n"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ldmatrix: as many matrices of 8 rows of 16 bytes as there are registers. Lane 8 m + i gives the address of row i of
// matrix m, a multiple of 16; what lanes beyond the last matrix give is not read. A lane gets from each matrix the
// elements 2 t and 2 t + 1 of row g; with .trans, of column g.
__device__ __forceinline__ void ldmatrix(unsigned (&to)[1], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];\n"
                 : "=r"(to[0]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void ldmatrix(unsigned (&to)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];\n"
                 : "=r"(to[0]), "=r"(to[1]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void ldmatrix(unsigned (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void ldmatrix_trans(unsigned (&to)[1], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];\n"
                 : "=r"(to[0]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void ldmatrix_trans(unsigned (&to)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];\n"
                 : "=r"(to[0]), "=r"(to[1]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void ldmatrix_trans(unsigned (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
}

}  // namespace leanconv
