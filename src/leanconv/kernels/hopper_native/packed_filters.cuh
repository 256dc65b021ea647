// Packed weights of native_gemm_nchw: what a stage has, `channel_block` channels of one tap of a tile's filters, is contiguous.
// Within a stage [8-channel vector][filter], 16 bytes each. Bytes: the filters read and written once. They pass through shared
// memory: rows of w are read as they lie, and neighbouring filters are written together.
#pragma once

#include <device/element.cuh>
#include <device/index.cuh>
#include <device/ptx/memory.cuh>
#include <kernels/hopper_native/linear_pixels.cuh>

namespace leanconv {

// The gradient of a strided layer's input, in one launch: pixels of the input fall into phases, and each phase has taps of its own.
//
// Along an axis of stride s, tap r reads pixel s * i + phase, where r - pad = s * shift + phase, for output i + shift. So that
// pixel's gradient takes output i of the phase's order shifted by -shift. All phases read the same outputs' gradients, which are
// resident once; each has sums of its own. Packed filters have the taps of the first phase first.

// Where there is one phase, its taps are in the order of the filters.
template <class Problem, class = void>
struct GradientPhases {
    static constexpr int count = 1, taps = Problem::r * Problem::s;
    static __host__ __device__ constexpr int place(int tap) { return tap; }
    static __host__ __device__ constexpr int row(int tap) { return tap / Problem::s; }
    static __host__ __device__ constexpr int column(int tap) { return tap % Problem::s; }
};
// `Problem` is a convolution of unit stride that reads what all phases read; its phases_h and phases_w are the layer's stride.
template <class Problem>
struct GradientPhases<Problem, Void<decltype(Problem::layer_top)>> {
    static constexpr int layer_r = Problem::layer_r, layer_s = Problem::layer_s;
    using AxisH = TapAxis<layer_r, Problem::phases_h, 1, Problem::layer_top>;
    using AxisW = TapAxis<layer_s, Problem::phases_w, 1, Problem::layer_left>;
    static constexpr int count = Problem::phases_h * Problem::phases_w, taps = layer_r * layer_s;
    static_assert(AxisH::phases() == Problem::phases_h && AxisW::phases() == Problem::phases_w, "each phase has taps");

    template <class Axis>
    static __host__ __device__ constexpr int taps_of(int phase, int taps, int stride) {
        return (taps - 1 - Axis::first_tap(phase)) / stride + 1;
    }
    static __host__ __device__ constexpr int rows(int phase_h) { return taps_of<AxisH>(phase_h, layer_r, Problem::phases_h); }
    static __host__ __device__ constexpr int columns(int phase_w) { return taps_of<AxisW>(phase_w, layer_s, Problem::phases_w); }
    // How many taps the phases before have.
    static __host__ __device__ constexpr int begin(int phase) {
        int before = 0;
        for (int i = 0; i < phase; ++i) before += rows(i / Problem::phases_w) * columns(i % Problem::phases_w);
        return before;
    }
    // The phase whose tap comes at a place, and that tap of the layer.
    static __host__ __device__ constexpr int phase(int place) {
        int phase = 0;
        for (int i = 1; i < count; ++i) phase += place >= begin(i);
        return phase;
    }
    static __host__ __device__ constexpr int tap(int place) {
        const int phase_h = phase(place) / Problem::phases_w, phase_w = phase(place) % Problem::phases_w;
        const int number = place - begin(phase(place));
        const int r = AxisH::first_tap(phase_h) + number / columns(phase_w) * Problem::phases_h;
        return r * layer_s + AxisW::first_tap(phase_w) + number % columns(phase_w) * Problem::phases_w;
    }
    // Of a tap of the layer: its place among packed filters, and the row and column of `Problem` that it reads.
    static __host__ __device__ constexpr int place(int tap) {
        const int r = tap / layer_s, s = tap % layer_s, phase_h = AxisH::phase(r), phase_w = AxisW::phase(s);
        return begin(phase_h * Problem::phases_w + phase_w) + r / Problem::phases_h * columns(phase_w) + s / Problem::phases_w;
    }
    static __host__ __device__ constexpr int row(int tap) { return AxisH::shift(layer_r - 1) - AxisH::shift(tap / layer_s); }
    static __host__ __device__ constexpr int column(int tap) { return AxisW::shift(layer_s - 1) - AxisW::shift(tap % layer_s); }
};

// A tap by its place among packed filters: of several phases a constant, as its phase says which sums it adds to.
template <class Phases, int number>
struct PhaseTap {
    static constexpr int place = number, phase = Phases::phase(number), of_layer = Phases::tap(number);
    static constexpr bool first = number == Phases::begin(phase);  // of its phase
    static constexpr int phase_before = (phase + Phases::count - 1) % Phases::count;
};
struct OnlyPhaseTap {
    int place, of_layer;
    bool first;
    static constexpr int phase = 0, phase_before = 0;
    __device__ __forceinline__ explicit OnlyPhaseTap(int tap) : place(tap), of_layer(tap), first(tap == 0) {}
};

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
