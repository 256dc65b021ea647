// A matrix of 16-bit elements that a warp holds, transposed (movmatrix): from compute capability 7.5 on.
#pragma once

namespace leanconv {

// movmatrix.trans: of a matrix of 8 x 8 elements a lane has elements 2 t and 2 t + 1 of row g (mma.cuh); it gets those of
// column g.
__device__ __forceinline__ unsigned movmatrix_trans(unsigned row) {
    unsigned column;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(column) : "r"(row));
    return column;
}

}  // namespace leanconv
