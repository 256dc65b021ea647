// Counters in global memory that blocks share.
// NOTE: each header of ptx/ wraps one kind of PTX instruction, a function an instruction, named after it. The CPU
// emulator has a twin of each, found first on the include path; kernels therefore include them with angle brackets.
#pragma once

namespace leanconv {

// atom.add: adds to a counter and gives what it was. Release and acquire: what this thread has seen written, and what its
// block has written before a barrier, is seen by whoever reads the counter after it.
__device__ __forceinline__ unsigned atom_add_acq_rel(unsigned* counter, unsigned value) {
    unsigned before;
    asm volatile("atom.add.acq_rel.gpu.u32 %0, [%1], %2;\n" : "=r"(before) : "l"(counter), "r"(value) : "memory");
    return before;
}

// ld.acquire: what was written before the additions that it sees is there for loads that follow.
__device__ __forceinline__ unsigned ld_acquire(const unsigned* counter) {
    unsigned value;
    asm volatile("ld.acquire.gpu.u32 %0, [%1];\n" : "=r"(value) : "l"(counter) : "memory");
    return value;
}

}  // namespace leanconv
