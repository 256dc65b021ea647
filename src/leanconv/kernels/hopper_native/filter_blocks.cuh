// Filters of native_gemm_16bit and its relatives: how copies bring those of a channel block of one tap to shared memory, and how
// products read them there.
#pragma once

#include <device/index.cuh>
#include <device/ptx/mma.cuh>
#include <device/ptx/sync.cuh>
#include <device/ptx/tma.cuh>

namespace leanconv {

// `filters` rows of `channel_block` channels. `mirrored`: as they lie in the layer whose gradient this is: boxes of `columns` of what
// are filters here, of `channel_block` rows.
template <class Problem, class Tuning>
struct FilterBlock {
    static constexpr int row_bytes = Tuning::channel_block * sizeof(typename Problem::element);
    static constexpr int filter_bytes = Tuning::filters * row_bytes;
    static_assert(row_bytes == 128 || row_bytes == 64 || row_bytes == 32, "a row is as long as a swizzle's span");
    static_assert(filter_bytes % 1024 == 0, "operands begin where swizzle patterns do");
    // Bytes that copies bring. Where filters are fewer than a tile's, what others are computed from is arbitrary and never stored.
    // Explored (H200, 50452dcc): beside one of 2 to 3 cycles for a row inside the array, a copy takes some 5 for one outside.
    static constexpr int copied_bytes = Tuning::mirrored ? filter_bytes : Tuning::copied_filters * row_bytes;
    static constexpr int columns = Tuning::filters % 64 == 0 ? 64 : 32, column_bytes = columns * sizeof(typename Problem::element);
    static constexpr int box_bytes = Tuning::channel_block * column_bytes;
    static_assert(!Tuning::mirrored || (Tuning::filters % columns == 0 && box_bytes % 1024 == 0), "boxes begin there too");
    // Bytes from 16 reduction elements to the next.
    static constexpr int filter_step = Tuning::mirrored ? 16 * column_bytes : 32;

    static __device__ __forceinline__ Descriptor<Tuning::mirrored> operand(const unsigned char* from) {
        if constexpr (Tuning::mirrored) return transposed_descriptor(from, box_bytes, 8 * column_bytes, column_bytes);
        else return matrix_descriptor(from, 0, 8 * row_bytes, row_bytes);
    }
};

// The number among the layer's taps of one that a phase of its gradient has: each `apart`-th, backwards from the last
// (kernels/common/input_gradient.py).
template <class Problem>
__device__ __forceinline__ int layer_tap(const FilterTap<Problem>& at) {
    const int slice = Problem::last_slice - at.t * Problem::apart_d, row = Problem::last_row - at.r * Problem::apart_h;
    return (slice * Problem::layer_r + row) * Problem::layer_s + Problem::last_column - at.s * Problem::apart_w;
}

// The copies of the filters of a channel block of a tap: its channels from `c` on, filters from the `filter`-th of the group on.
template <class Problem, class Tuning>
__device__ __forceinline__ void copy_filters(unsigned char* to, const TensorMap& w, Mbarrier* full, int group, int filter, int tap,
                                             int c) {
    using Filters = FilterBlock<Problem, Tuning>;
    if constexpr (Tuning::mirrored) {
        const int in_layer = layer_tap(FilterTap<Problem>(tap));
#pragma unroll
        for (int i = 0; i < Tuning::filters / Filters::columns; ++i)
            cp_async_bulk_tensor_shared_global(to + i * Filters::box_bytes, w, full, filter + i * Filters::columns, in_layer,
                                               group * Problem::group_c + c);
    } else {
        // A map begins where the array does: the filters of a gradient's phase lie so many rows of channels further.
        constexpr int first_row = static_cast<int>(Problem::first_weight / Problem::group_c);
        static_assert(Problem::first_weight % Problem::group_c == 0, "filters begin with a row of channels");
        cp_async_bulk_tensor_shared_global(to, w, full, c, first_row + tap, group * Problem::group_k + filter);
    }
}

}  // namespace leanconv
