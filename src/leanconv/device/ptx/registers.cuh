// Registers that warps pass to each other: setmaxnreg.
// NOTE: each header of ptx/ wraps one kind of PTX instruction, a function an instruction, named after it. The CPU
// emulator has a twin of each, found first on the include path; kernels therefore include them with angle brackets.
#pragma once

namespace leanconv {

// setmaxnreg: the registers of each thread of four neighbouring warps, which all execute it.
// NOTE: only for an architecture by its full name: sm_90a has it, sm_90 and sm_120 do not.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(__CUDA_ARCH_FEAT_SM100_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM120_ALL)
constexpr bool register_pools = true;
#else
constexpr bool register_pools = false;
#endif
template <int count>
__device__ __forceinline__ void set_registers_up() {
    static_assert(count >= 24 && count <= 256 && count % 8 == 0, "setmaxnreg takes multiples of 8 from 24 to 256");
    static_assert(register_pools || count == 0, "setmaxnreg needs an architecture by its full name, such as sm_90a");
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" :: "n"(count));
}
template <int count>
__device__ __forceinline__ void set_registers_down() {
    static_assert(count >= 24 && count <= 256 && count % 8 == 0, "setmaxnreg takes multiples of 8 from 24 to 256");
    static_assert(register_pools || count == 0, "setmaxnreg needs an architecture by its full name, such as sm_90a");
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" :: "n"(count));
}

}  // namespace leanconv
