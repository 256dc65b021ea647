// Winograd's F(2, 3) along rows on tensor cores in float32's accuracy (or TF32's), for sm_90a: filters 3 wide, unit stride.
//
// Two neighbouring outputs take four products instead of six (lib/pair_states.cuh), each product three of float16:
//   2 · 3 / 1.5 flops a product of float32: 989 / 2 = 495 TFLOP/s of direct arithmetic at 1.83 GHz; of what power leaves of
//   it, some 340, shared memory takes its share first
// A tile is 64 pairs of outputs and up to 128 filters. The structure is that of tensor_gemm (tensor_gemm.cuh): the same
// rings, producers, fragments and turns, and these differences:
//   - A stage of pixels is 64 channels of the 128 pixels and some more that one filter row sees, each copied once. Where a
//     row of outputs ends, two more pixels follow, so that each pair finds its four side by side.
//   - Both warpgroups read the same pixels. Each makes two of the four states, and multiplies them with filters of its own:
//     64 pairs x 128 filters x 2 states are 128 sums a thread. Scales belong to a pair's state: 64 channels of it.
//   - At the end the warpgroups exchange half of their sums; then the first has the even outputs, the second the odd ones.
// Per stage the tensor core works 3072 cycles. Shared memory moves 16 bytes a cycle of filters in and 64 to the tensor core.
#pragma once

#include <lib/pair_states.cuh>
#include <lib/ptx/barrier.cuh>
#include <lib/ptx/registers.cuh>
#include <lib/ptx/wgmma.cuh>
#include <lib/tensor_output.cuh>
#include <lib/tensor_pixels.cuh>
#include <lib/tensor_products.cuh>

namespace leanconv {

// What the copies and tiles see: a pixel is a pair of outputs, which are two columns apart, and a tap is a filter row.
template <class Problem>
struct Pairs : Problem {
    static constexpr int q = ceil_div(Problem::q, 2), s = 1, stride_w = 2;
};

// Where one of the two outputs of each pair lies.
template <class Problem, class Tuning>
struct PairOutputs : TensorTiles<Pairs<Problem>, Tuning> {
    struct Numbers {
        Offset<Problem> count;
        int odd;
        __device__ __forceinline__ Place place(Offset<Problem> number) const {
            constexpr int pairs = Pairs<Problem>::q;
            const Offset<Problem> row = number / pairs;
            const int q = static_cast<int>(number - row * pairs) * 2 + odd;
            return {static_cast<int64>(row) * Problem::q + q, number < count && q < Problem::q};
        }
    };
    Numbers numbers;
    __device__ __forceinline__ PairOutputs(long long batch, int odd)
        : TensorTiles<Pairs<Problem>, Tuning>(batch),
          numbers{static_cast<Offset<Problem>>(batch) * (Problem::p * Pairs<Problem>::q), odd} {}
};

// Pair of 8 that the lanes of group g have: so ld.shared.v4 of a quarter of a warp meets each bank once, though the swizzle
// of tensor copies makes neighbouring rows exchange neighbouring units, and pairs are two rows apart.
__device__ __forceinline__ int spread_pair(int g) { return g / 4 * 4 + g % 2 * 2 + g % 4 / 2; }

// Where the pixels of a thread's two pairs lie in a stage, how its states are made of three of them each, and the factors of
// their channels.
template <class Problem, class Tuning>
struct PairPixels {
    using P = Pairs<Problem>;
    using F = TensorFilters<P, Tuning>;
    using Rings = TensorRings<P, Tuning>;
    const float* prepared;
    const float* factors;
    int pair, sharer, line[2];

    __device__ __forceinline__ PairPixels(const float* prepared, int pair, int sharer)
        : prepared(prepared), pair(pair), sharer(sharer) {
        factors = prepared + F::factors_at;
    }
    __device__ __forceinline__ void begin(const TensorTiles<P, Tuning>& tiles, Offset<Problem> tile) {
        if constexpr (Problem::groups > 1) factors = prepared + F::factors_at + tiles.group(tile) * F::stages * split_depth;
        const int in_row = static_cast<int>(tiles.first_pixel(tile) % P::q);
#pragma unroll
        for (int i = 0; i < 2; ++i) line[i] = 2 * (pair + 8 * i) + (in_row + pair + 8 * i) / P::q * 2 + sharer;
    }
    __device__ __forceinline__ void load_four(float (&four)[4], const unsigned char* stage, int i, int further, int t,
                                              int sixteen) const {
        const int at = line[i] + further, unit = (sixteen % 2 * 4 + t) ^ at % 8;
        ld_shared_v4(four, reinterpret_cast<const float*>(stage + sixteen / 2 * Rings::half_bytes + at * 128 + unit * 16));
    }
    // Of the three pixels from d0 or d1 on.
    __device__ __forceinline__ float first(float a, float c) const { return a - c; }
    __device__ __forceinline__ float second(float b, float other) const { return fmaf(sharer == 0 ? 1.0f : -1.0f, other, b); }
};

// Row i of a stage of the warpgroup's state `own`, as operand A.
template <bool scaled, class Problem, class Tuning, class Fragments>
__device__ __forceinline__ void load_state(Fragments& fragments, int own, int i,
                                           const PairPixels<Problem, Tuning>& pixels, const unsigned char* shared,
                                           int stage, int t, const SplitHeader& header) {
    float x[4][4];
#pragma unroll
    for (int sixteen = 0; sixteen < 4; ++sixteen) {
        float a[4], b[4];
        pixels.load_four(a, shared, i, own == 0 ? 0 : 1, t, sixteen);
        pixels.load_four(b, shared, i, own == 0 ? 2 : 2 - 2 * pixels.sharer, t, sixteen);
#pragma unroll
        for (int e = 0; e < 4; ++e) x[sixteen][e] = own == 0 ? pixels.first(a[e], b[e]) : pixels.second(a[e], b[e]);
        if constexpr (scaled) {
#pragma unroll
            for (int e = 0; e < 4; ++e) x[sixteen][e] *= pixels.factors[stage * split_depth + 16 * sixteen + 4 * t + e];
        }
    }
    fragments.down[i] = split_row<Fragments::exact>(fragments.high, fragments.low, i, x, header);
}

// The two warpgroups send each other the sums of their second states. Then sums[0] are outputs, even ones in the first.
template <int at_once, int chunks, int count>
__device__ __forceinline__ void exchange_states(float (&sums)[2][chunks][count], float* shared, int warpgroup, int thread) {
    constexpr int all = chunks * count;
    static_assert(all % at_once == 0, "sums are exchanged in equal parts");
    float* const mine = shared + warpgroup * at_once * 128 + thread;
    const float* const others = shared + (1 - warpgroup) * at_once * 128 + thread;
#pragma unroll
    for (int first = 0; first < all; first += at_once) {
#pragma unroll
        for (int i = 0; i < at_once; ++i) mine[i * 128] = sums[1][(first + i) / count][(first + i) % count];
        barrier_sync(14, 256);
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            float& sum = sums[0][(first + i) / count][(first + i) % count];
            const float both = sum + sums[1][(first + i) / count][(first + i) % count], other = others[i * 128];
            sum = warpgroup == 0 ? both + other : other - both;
        }
        barrier_sync(14, 256);
    }
}

// One warpgroup's products of all tiles of the block.
template <class Problem, class Tuning, bool scaled>
__device__ __forceinline__ void consume_pairs(const float* prepared_filters, const float* bias, float* y, long long batch,
                                              const TensorTiles<Pairs<Problem>, Tuning>& tiles,
                                              const TensorRings<Pairs<Problem>, Tuning>& rings, int warpgroup,
                                              Offset<Problem> first_tile, Offset<Problem> step) {
    using F = TensorFilters<Pairs<Problem>, Tuning>;
    using Rings = TensorRings<Pairs<Problem>, Tuning>;
    using Fragments = SplitFragments<Tuning::products == 3>;
    static_assert(Tuning::warpgroups == 2 && F::states == 4, "two warpgroups share the four states of F(2, 3)");
    static_assert(Tuning::filter_stages % 2 == 0, "every other stage of filters is a warpgroup's own");
    constexpr int count = Tuning::chunk / 2;
    static_assert(Tuning::filter_stages >= 2 * F::chunks, "each warpgroup multiplies with the chunks of a state at once");
    const float* const prepared = prepared_filters + Problem::first_prepared;
    const SplitHeader header = *reinterpret_cast<const SplitHeader*>(prepared);
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, t = lane % 4;
    const int pair = warp * 16 + spread_pair(lane / 4);
    const StageRange<Pairs<Problem>, Tuning> range;
    const PairOutputs<Problem, Tuning> outputs(batch, warpgroup);
    PairPixels<Problem, Tuning> pixels(prepared, pair, warpgroup);
    RingPlace<Tuning::pixel_stages> pixel_place;
    RingPlace<Tuning::filter_stages> filter_place;
    filter_place.stage = warpgroup;
    // While the products of one step are under way, the fragments of the next are made: a step is a state of 64 channels.
    Fragments fragments[2];
    if (first_tile < tiles.count()) {
        pixels.begin(tiles, first_tile);
        mbarrier_wait_parity(rings.pixels_full(pixel_place.stage), pixel_place.parity);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            load_state<scaled>(fragments[0], 0, i, pixels, rings.pixel_stage(pixel_place.stage), range.first, t, header);
    }
    for (Offset<Problem> tile = first_tile; tile < tiles.count(); tile += step) {
        float sums[2][F::chunks][count];
#pragma unroll
        for (int i = 0; i < 2 * F::chunks * count; ++i) sums[i / count / F::chunks][i / count % F::chunks][i % count] = 0.0f;

        for (int stage = range.first; stage < range.end; ++stage) {
            const bool last = stage == range.end - 1, more = !last || tile + step < tiles.count();
            const int next_stage = last ? range.first : stage + 1;
#pragma unroll
            for (int own = 0; own < 2; ++own) {
                Fragments &now = fragments[own], &next = fragments[1 - own];
#pragma unroll
                for (int chunk = 0; chunk < F::chunks; ++chunk) {
                    mbarrier_wait_parity(rings.filters_full(filter_place.stage), filter_place.parity);
                    const unsigned char* const filters = rings.filter_stage(filter_place.stage);
                    float partial[count];
                    wgmma_fence(partial, now.high, now.low);
                    begin_products(partial, now, filters);
                    end_products(partial, now, filters);
                    wgmma_commit_group();
                    if (own == 1 && chunk == 0) {
                        // NOTE: not before the products that take the loaded values (ld_shared_v4 says why).
                        __syncwarp();
                        if (lane == 0) mbarrier_arrive(rings.pixels_free(pixel_place.stage));
                        pixel_place.advance();
                        if (last && more) pixels.begin(tiles, tile + step);
                        if (more) mbarrier_wait_parity(rings.pixels_full(pixel_place.stage), pixel_place.parity);
                    }
                    if (own == 0 || more) {
#pragma unroll
                        for (int i = 2 * chunk / F::chunks; i < 2 * (chunk + 1) / F::chunks; ++i)
                            load_state<scaled>(next, 1 - own, i, pixels, rings.pixel_stage(pixel_place.stage),
                                               own == 0 ? stage : next_stage, t, header);
                        // NOTE: without, the conversion would come after the wait (zero_after says why).
                        const unsigned made = F::chunks == 1 ? next.all() : next.of_row(chunk);
                        barrier_sync(3 + warpgroup + zero_after(made), 128);
                    }
                    wgmma_wait_group<0>(partial, now.high, now.low);
                    if (lane == 0) mbarrier_arrive(rings.filters_free(filter_place.stage));
                    filter_place.advance(), filter_place.advance();
                    promote(sums[own][chunk], partial, now.down);
                }
            }
        }
        exchange_states<Tuning::exchange>(sums, reinterpret_cast<float*>(rings.base + Rings::shared_bytes), warpgroup, thread);
        const auto& all = in_sixteens(sums[0]);
        if constexpr (Tuning::split == 1) {
            store_sums<Problem, Tuning>(all, 0, prepared, bias, y, batch, outputs, tile, pair, t);
        } else {
            constexpr int sixteens = F::filters / 16;
            float* const mine = reinterpret_cast<float*>(rings.base);
            const int at = threadIdx.x;
            barrier_sync(15, 128 * Tuning::warpgroups);  // the stages of this block have been read
#pragma unroll
            for (int i = 0; i < sixteens * 8; ++i) mine[i * 128 * Tuning::warpgroups + at] = all[i / 8][i % 8];
            meet_in_cluster();
            SharedSums<Pairs<Problem>, Tuning, sixteens> share;
            share.gather(mine, at);
            meet_in_cluster();
            store_sums<Problem, Tuning>(share.sums, share.first, prepared, bias, y, batch, outputs, tile, pair, t);
        }
    }
}

// `x` is a tensor map of pixels in rows.
template <class Problem, class Tuning, class Source>
__device__ __forceinline__ void tensor_winograd(const Source& x, const float* prepared, const float* bias, float* y,
                                                long long batch) {
    static_assert(Problem::nhwc && Phase<Problem>::whole, "outputs are those of whole images, channels last");
    static_assert(Problem::s == 3 && Problem::stride_h == 1 && Problem::stride_w == 1 && Problem::dilation_w == 1,
                  "filters are 3 wide and move pixel by pixel");
    const TensorRings<Pairs<Problem>, Tuning> rings;
    const TensorTiles<Pairs<Problem>, Tuning> tiles(batch);
    if (threadIdx.x == 0) rings.init();
    __syncthreads();
    // NOTE: the same for all threads of a warp, which lets the compiler have stages and descriptors in uniform registers.
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    const Offset<Problem> first = blockIdx.x / Tuning::split, step = gridDim.x / Tuning::split;
    if (warpgroup == Tuning::warpgroups) {
        set_registers_down<Tuning::producer_registers>();
        produce<Pairs<Problem>, Tuning>(x, prepared, batch, tiles, rings, threadIdx.x % 128, first, step);
        if constexpr (Tuning::split > 1) {
            // NOTE: the warps of lanes that copied alone meet again before the barriers that all threads take part in.
            __syncwarp();
            meet_in_cluster();
            meet_in_cluster();
        }
    } else {
        set_registers_up<Tuning::consumer_registers>();
        const unsigned* const flags = reinterpret_cast<const unsigned*>(prepared + Problem::first_prepared) +
                                      TensorFilters<Pairs<Problem>, Tuning>::flags_at;
        bool scaled = false;
        for (int group = 0; group < Problem::groups; ++group) scaled |= flags[group] != 0;
        if (scaled) consume_pairs<Problem, Tuning, true>(prepared, bias, y, batch, tiles, rings, warpgroup, first, step);
        else consume_pairs<Problem, Tuning, false>(prepared, bias, y, batch, tiles, rings, warpgroup, first, step);
    }
}

}  // namespace leanconv
