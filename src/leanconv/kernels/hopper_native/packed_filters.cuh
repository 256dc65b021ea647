// Packed weights of native_gemm_nchw: what a stage has, `channel_block` channels of one tap of a tile's filters, is contiguous.
// Within a stage [8-channel vector][filter], 16 bytes each. Bytes: the filters read and written once.
#pragma once

#include <device/element.cuh>
#include <device/index.cuh>

namespace leanconv {

// Where 8-channel vectors lie among packed weights, counted in vectors. Channels are rounded up to k16 steps, and filters to
// whole tiles.
template <class Problem, class Tuning>
struct PackedFilters {
    static constexpr int taps = Problem::r * Problem::s, of_block = Tuning::channel_block / 8;
    static constexpr int vectors = ceil_div(Problem::group_c, 16) * 2, blocks = vectors / of_block;
    // Of volumes all blocks of a filter's slice come before those of the next.
    static constexpr int slices = FilterDepth<Problem>::t, all_blocks = slices * blocks;
    static_assert(blocks * of_block == vectors, "channel blocks are whole");
    static constexpr int tiles = ceil_div(Problem::group_k, Tuning::filters), filters = tiles * Tuning::filters;
    static constexpr int64 of_group = static_cast<int64>(slices * taps) * vectors * filters;

    static __host__ __device__ constexpr int64 stage(int group, int tile, int block, int tap) {
        return (((static_cast<int64>(group) * tiles + tile) * all_blocks + block) * taps + tap) * of_block * Tuning::filters;
    }
};

// The slices of the layer's filters, and which of them a gradient's phase has.
template <class Problem, class = void>
struct LayerSlices {
    static constexpr int t = 1, last = 0, apart = 0;
};
template <class Problem>
struct LayerSlices<Problem, Void<decltype(Problem::layer_t)>> {
    static constexpr int t = Problem::layer_t, last = Problem::last_slice, apart = Problem::apart_d;
};

// A thread writes a vector. Neighbouring threads have neighbouring taps, which are adjacent in w.
// The filters of a gradient's phase are those of the layer with channels and filters exchanged, of each `apart`-th tap,
// backwards from the last.
template <class Problem, class Tuning>
__device__ __forceinline__ void pack_filters(ElementsIn<Problem> w, ElementsOut<Problem> prepared) {
    using F = PackedFilters<Problem, Tuning>;
    using Slices = LayerSlices<Problem>;
    constexpr int layer_taps = Slices::t * Problem::layer_r * Problem::layer_s;
    constexpr int64 channel = static_cast<int64>(Problem::gradient ? Problem::group_k : 1) * layer_taps;
    constexpr int64 filter_of = static_cast<int64>(Problem::gradient ? 1 : Problem::group_c) * layer_taps;
    const int64 number = static_cast<int64>(blockIdx.x) * Tuning::threads + threadIdx.x;
    if (number >= Problem::groups * F::of_group) return;
    constexpr int taps = F::slices * F::taps;
    int tap = static_cast<int>(number % taps), slice = 0;
    if constexpr (F::slices > 1) slice = tap / F::taps, tap %= F::taps;
    const int vector = static_cast<int>(number / taps % F::vectors);
    const int filter = static_cast<int>(number / (taps * F::vectors) % F::filters);
    const int group = static_cast<int>(number / F::of_group);
    const int row = tap / Problem::s, column = tap % Problem::s;
    int in_layer = Problem::gradient ? (Problem::last_row - row * Problem::apart_h) * Problem::layer_s +
                                                 Problem::last_column - column * Problem::apart_w
                                           : tap;
    if constexpr (FilterDepth<Problem>::volume)
        in_layer += (Problem::gradient ? Slices::last - slice * Slices::apart : slice) * (Problem::layer_r * Problem::layer_s);
    const int64 of_group = static_cast<int64>(Problem::group_k) * Problem::group_c * layer_taps;
    const typename Problem::element* from = w + group * of_group + filter * filter_of + vector * 8 * channel + in_layer;
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        unsigned two[2] = {};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int c = 2 * i + j;
            if (filter < Problem::group_k && vector * 8 + c < Problem::group_c) two[j] = from[c * channel].bits;
        }
        words[i] = two[0] | two[1] << 16;
    }
    uint4* const to = reinterpret_cast<uint4*>(prepared + Problem::first_prepared) +
                      F::stage(group, filter / Tuning::filters, slice * F::blocks + vector / F::of_block, tap);
    to[vector % F::of_block * Tuning::filters + filter % Tuning::filters] = make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace leanconv
