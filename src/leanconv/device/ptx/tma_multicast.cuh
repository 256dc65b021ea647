// Boxes of tensors that several blocks of a cluster receive (cp.async.bulk.tensor with .multicast::cluster), from compute
// capability 9.0 on.
#pragma once

#include <device/ptx/tma.cuh>

namespace leanconv {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// cp.async.bulk.tensor, global -> shared of all blocks of the cluster in the mask of ranks `destinations`: to the place that each
// has where this one has `shared`, counted by the barrier that it has where this one has `barrier`. What holds for one block, and
// for cp_async_bulk_multicast_shared_global (tma.cuh), holds here.
__device__ __forceinline__ void cp_async_bulk_tensor_multicast_shared_global(
    void* shared, const TensorMap& map, Mbarrier* barrier, unsigned short destinations, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4, %5}], [%2], %6;\n"
                 :: "r"(shared_address(shared)), "l"(&map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2),
                    "h"(destinations) : "memory");
}
#endif

}  // namespace leanconv
