// Launches that start while the one before them still runs: griddepcontrol, from compute capability 9.0 on.
// NOTE: each header of ptx/ wraps one kind of PTX instruction, a function an instruction, named after it. The CPU
// emulator has a twin of each, found first on the include path; kernels therefore include them with angle brackets.
#pragma once

namespace leanconv {

// griddepcontrol.wait: until the launch before this one has ended, and what it wrote is seen by this thread.
// NOTE: for kernels whose Launch `waits`; others wait before anything else. All that read or overwrite what an earlier launch
// of the call has written, or read, must wait. What was there before the first launch of the call may be read at once: that
// launch is an ordinary one, so all before it had ended.
__device__ __forceinline__ void griddepcontrol_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

}  // namespace leanconv
