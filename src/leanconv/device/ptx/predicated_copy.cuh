// Asynchronous copies that only some threads make (cp.async under a predicate).
#pragma once

#include <device/ptx/memory.cuh>

namespace leanconv {

// cp.async.cg, 16 bytes, by those threads alone that are asked to: a predicate, no branch.
__device__ __forceinline__ void cp_async_16_if(bool asked, void* shared, const void* global) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p cp.async.cg.shared.global [%0], [%1], 16;\n}\n"
                 :: "r"(shared_address(shared)), "l"(global), "r"(static_cast<int>(asked)) : "memory");
}

}  // namespace leanconv
