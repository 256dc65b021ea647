// Packed weights of native_gemm_nchw: what a stage has, `channel_block` channels of one tap of a tile's filters, is contiguous.
// Within a stage [8-channel vector][filter], 16 bytes each. Bytes: the filters read and written once. They pass through shared
// memory: rows of w are read as they lie, and neighbouring filters are written together.
#pragma once

#include <device/element.cuh>
#include <device/index.cuh>
#include <device/ptx/memory.cuh>
#include <kernels/hopper_native/gradient_phases.cuh>

namespace leanconv {

// Where 8-channel vectors lie among packed weights, counted in vectors. Channels are rounded up to k16 steps, and filters to
// whole tiles.
template <class Problem, class Tuning>
struct PackedFilters {
    static constexpr int taps = GradientPhases<Problem>::taps, of_block = Tuning::channel_block / 8;
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

// The layer's filters that a CTA packs: `together` filters of `vectors` of channels, all taps. In shared memory they lie in rows as
// in w: a filter's channels and taps, or of a gradient, whose channels and filters are exchanged, a channel's.
template <class Problem, class Tuning>
struct PackedTogether {
    using F = PackedFilters<Problem, Tuning>;
    static constexpr bool gradient = Problem::gradient;
    static constexpr int taps = LayerSlices<Problem>::t * Problem::layer_r * Problem::layer_s;
    static constexpr int together = Tuning::together, channels = Tuning::vectors * 8;
    static constexpr int rows = gradient ? channels : together, in_row = gradient ? together : channels;
    // Elements of a row; NOTE: 16 bytes more keep eight filters' elements of one tap in different banks.
    static constexpr int pitch = ceil_div(in_row * taps, 8) * 8 + 8;
    static constexpr int of_row = gradient ? Problem::group_k : Problem::group_c;  // in w
    static constexpr int wide = gcd(gcd(of_row * taps, in_row * taps), 8);         // elements that are aligned in every row
    static_assert(F::filters % together == 0, "a tile has whole CTAs' filters");

    unsigned short* shared;
    int group, first_filter, first_channel;
    __device__ __forceinline__ explicit PackedTogether(int block) : shared(reinterpret_cast<unsigned short*>(shared_memory())) {
        constexpr int of_channels = ceil_div(F::vectors, Tuning::vectors), of_filters = F::filters / together;
        first_channel = block % of_channels * channels, first_filter = block / of_channels % of_filters * together;
        group = block / (of_channels * of_filters);
    }
    // Rows and elements of them that exist are copied.
    __device__ __forceinline__ void load(ElementsIn<Problem> w) const {
        const int first_row = gradient ? first_channel : first_filter, first = gradient ? first_filter : first_channel;
        const int exist = min(rows, (gradient ? Problem::group_c : Problem::group_k) - first_row);
        const int length = max(0, min(in_row, of_row - first)) * taps / wide;
        const auto* from = w + (static_cast<int64>(group) * Problem::group_k * Problem::group_c + static_cast<int64>(first_row) * of_row +
                                first) * taps;
        for (int i = threadIdx.x; i < exist * length; i += Tuning::threads) {
            const int row = i / length, at = i % length * wide;
            const auto* const own = from + static_cast<int64>(row) * of_row * taps + at;
            unsigned short* const to = shared + row * pitch + at;
            if constexpr (wide == 8) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(own);
            else if constexpr (wide == 4) *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(own);
            else if constexpr (wide == 2) *reinterpret_cast<unsigned*>(to) = *reinterpret_cast<const unsigned*>(own);
            else *to = own->bits;
        }
    }
    // Eight channels of a tap of the layer.
    __device__ __forceinline__ uint4 vector(int filter, int number, int tap) const {
        unsigned words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            unsigned two[2] = {};
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int c = number * 8 + 2 * i + j;
                if (first_filter + filter < Problem::group_k && first_channel + c < Problem::group_c)
                    two[j] = shared[(gradient ? c : filter) * pitch + (gradient ? filter : c) * taps + tap];
            }
            words[i] = two[0] | two[1] << 16;
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
};

// The filters of a gradient's phase are those of the layer with channels and filters exchanged, of each `apart`-th tap, backwards
// from the last.
template <class Problem, class Tuning>
__device__ __forceinline__ void pack_filters(ElementsIn<Problem> w, ElementsOut<Problem> prepared) {
    using F = PackedFilters<Problem, Tuning>;
    using Slices = LayerSlices<Problem>;
    constexpr int taps = F::slices * F::taps;
    const PackedTogether<Problem, Tuning> own(blockIdx.x);
    own.load(w);
    __syncthreads();
    uint4* const to = reinterpret_cast<uint4*>(prepared + Problem::first_prepared);
    for (int i = threadIdx.x; i < taps * Tuning::vectors * Tuning::together; i += Tuning::threads) {
        const int number = i / Tuning::together % Tuning::vectors, vector = own.first_channel / 8 + number;
        const int filter = own.first_filter + i % Tuning::together;
        int tap = i / (Tuning::together * Tuning::vectors), slice = 0;
        if constexpr (F::slices > 1) slice = tap / F::taps, tap %= F::taps;
        const int row = tap / Problem::s, column = tap % Problem::s;
        int in_layer = Problem::gradient && GradientPhases<Problem>::count == 1
                           ? (Problem::last_row - row * Problem::apart_h) * Problem::layer_s + Problem::last_column -
                                 column * Problem::apart_w
                           : tap;
        if constexpr (FilterDepth<Problem>::volume)
            in_layer += (Problem::gradient ? Slices::last - slice * Slices::apart : slice) * (Problem::layer_r * Problem::layer_s);
        if (vector >= F::vectors) continue;
        uint4* const stage = to + F::stage(own.group, filter / Tuning::filters, slice * F::blocks + vector / F::of_block,
                                           GradientPhases<Problem>::place(tap));
        stage[vector % F::of_block * Tuning::filters + filter % Tuning::filters] = own.vector(i % Tuning::together, number, in_layer);
    }
}

}  // namespace leanconv
