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

// Where the pixels of a thread's two pairs lie in a stage, and how its states are made of three of them each.
template <class Problem, class Tuning>
struct PairPixels {
    using P = Pairs<Problem>;
    using Rings = TensorRings<P, Tuning>;
    int line[2], sharer;

    __device__ __forceinline__ PairPixels(Offset<Problem> first_pair, int pair, int sharer) : sharer(sharer) {
        const int in_row = static_cast<int>(first_pair % P::q);
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

// Elements of channels that have factors; in rows the four of a sixteen are neighbours.
__device__ __forceinline__ void scale_channels(float (&x)[2][4][4], const float* factors, bool scaled, int t) {
    if (!scaled) return;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        const float factor = factors[j / 4 * 16 + 4 * t + j % 4];
        x[0][j / 4][j % 4] *= factor, x[1][j / 4][j % 4] *= factor;
    }
}

// The warpgroup's state `own` of 64 channels as operand A.
template <class Problem, class Tuning, class Fragments>
__device__ __forceinline__ void load_state(Fragments& fragments, int own, const PairPixels<Problem, Tuning>& pixels,
                                           const unsigned char* shared, const float* factors, bool scaled, int t,
                                           const SplitHeader& header) {
    float x[2][4][4];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const int i = j % 2, sixteen = j / 2;
        float a[4], b[4];
        pixels.load_four(a, shared, i, own == 0 ? 0 : 1, t, sixteen);
        pixels.load_four(b, shared, i, own == 0 ? 2 : 2 - 2 * pixels.sharer, t, sixteen);
#pragma unroll
        for (int e = 0; e < 4; ++e) x[i][sixteen][e] = own == 0 ? pixels.first(a[e], b[e]) : pixels.second(a[e], b[e]);
    }
    scale_channels(x, factors, scaled, t);
#pragma unroll
    for (int i = 0; i < 2; ++i)
        fragments.down[i] = split_row<Fragments::exact>(fragments.high, fragments.low, i, x[i], header);
}

// Both at once: each pixel is loaded once.
template <class Problem, class Tuning, class Fragments>
__device__ __forceinline__ void load_states(Fragments (&fragments)[2], const PairPixels<Problem, Tuning>& pixels,
                                            const unsigned char* shared, const float* factors, bool scaled, int t,
                                            const SplitHeader& header) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float x[2][4][4];
#pragma unroll
        for (int sixteen = 0; sixteen < 4; ++sixteen) {
            float d[3][4];
#pragma unroll
            for (int j = 0; j < 3; ++j) pixels.load_four(d[j], shared, i, j, t, sixteen);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                x[0][sixteen][e] = pixels.first(d[0][e], d[2][e]);
                x[1][sixteen][e] = pixels.second(d[1][e], pixels.sharer == 0 ? d[2][e] : d[0][e]);
            }
        }
        scale_channels(x, factors, scaled, t);
#pragma unroll
        for (int own = 0; own < 2; ++own)
            fragments[own].down[i] =
                split_row<Fragments::exact>(fragments[own].high, fragments[own].low, i, x[own], header);
    }
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
template <class Problem, class Tuning>
__device__ __forceinline__ void consume_pairs(const float* prepared_filters, const float* bias, float* y, long long batch,
                                              const TensorTiles<Pairs<Problem>, Tuning>& tiles,
                                              const TensorRings<Pairs<Problem>, Tuning>& rings, int warpgroup,
                                              Offset<Problem> first_tile, Offset<Problem> step) {
    using F = TensorFilters<Pairs<Problem>, Tuning>;
    using Rings = TensorRings<Pairs<Problem>, Tuning>;
    using Fragments = SplitFragments<Tuning::products == 3>;
    static_assert(Tuning::warpgroups == 2 && F::states == 4, "two warpgroups share the four states of F(2, 3)");
    static_assert(Tuning::filter_stages % 2 == 0, "every other stage of filters is a warpgroup's own");
    constexpr int count = Tuning::chunk / 2, partials = Tuning::partials, steps = F::chunks * (Tuning::together ? 2 : 1);
    static_assert(Tuning::filter_stages >= 2 * (Tuning::turns ? steps : partials) - 2 && Tuning::filter_stages >= 2 * partials,
                  "a warpgroup multiplies with so many stages of filters before the others free one");
    const float* const prepared = prepared_filters + Problem::first_prepared;
    const SplitHeader header = *reinterpret_cast<const SplitHeader*>(prepared);
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, t = lane % 4;
    const int pair = warp * 16 + spread_pair(lane / 4);
    const StageRange<Pairs<Problem>, Tuning> range;
    const PairOutputs<Problem, Tuning> outputs(batch, warpgroup);
    RingPlace<Tuning::pixel_stages> pixel_place;
    RingPlace<Tuning::filter_stages> filter_place, done_place;
    const Turns<Tuning> turns(warpgroup);
    filter_place.stage = done_place.stage = warpgroup;
    for (Offset<Problem> tile = first_tile; tile < tiles.count(); tile += step) {
        const int group = tiles.group(tile);
        const bool scaled = reinterpret_cast<const unsigned*>(prepared)[F::flags_at + group] != 0;
        const float* factors = prepared + F::factors_at + group * F::stages * split_depth;
        const PairPixels<Problem, Tuning> pixels(tiles.first_pixel(tile), pair, warpgroup);
        float sums[2][F::chunks][count];
#pragma unroll
        for (int i = 0; i < 2 * F::chunks * count; ++i) sums[i / count / F::chunks][i / count % F::chunks][i % count] = 0.0f;

        for (int stage = range.first; stage < range.end; ++stage) {
            Fragments fragments[Tuning::together ? 2 : 1];
            mbarrier_wait_parity(rings.pixels_full(pixel_place.stage), pixel_place.parity);
            const unsigned char* const shared = rings.pixel_stage(pixel_place.stage);
            const float* const of_stage = factors + stage * split_depth;
            float partial[partials][count];
#pragma unroll
            for (int own = 0; own < 2; ++own) {
                Fragments& now_fragments = fragments[Tuning::together ? own : 0];
                if constexpr (Tuning::together) {
                    if (own == 0) load_states(fragments, pixels, shared, of_stage, scaled, t, header);
                } else {
                    load_state(now_fragments, own, pixels, shared, of_stage, scaled, t, header);
                }
#pragma unroll
                for (int chunk = 0; chunk < F::chunks; ++chunk) {
                    float (&now)[count] = partial[chunk % partials];
                    mbarrier_wait_parity(rings.filters_full(filter_place.stage), filter_place.parity);
                    if (chunk == 0 && !(Tuning::together && own == 1)) turns.wait(now_fragments);
                    const unsigned char* const filters = rings.filter_stage(filter_place.stage);
                    if (chunk == 0 || partials == 1) wgmma_fence(now, now_fragments.high, now_fragments.low);
                    else wgmma_fence(now);
                    begin_products(now, now_fragments, filters);
                    if (partials == 2 && chunk > 0) {
                        // The sums of the chunk before are added while these products are under way.
                        wgmma_commit_group();
                        wgmma_wait_group<1>(partial[(chunk - 1) % 2]);
                        if (lane == 0) mbarrier_arrive(rings.filters_free(done_place.stage));
                        done_place.advance(), done_place.advance();
                        promote(sums[own][chunk - 1], partial[(chunk - 1) % 2], now_fragments.down);
                    }
                    end_products(now, now_fragments, filters);
                    wgmma_commit_group();
                    filter_place.advance(), filter_place.advance();
                    if (chunk == 0 && own == (Tuning::together ? 0 : 1)) {
                        // NOTE: not before the products that take the loaded values (ld_shared_v4 says why).
                        __syncwarp();
                        if (lane == 0) mbarrier_arrive(rings.pixels_free(pixel_place.stage));
                        pixel_place.advance();
                    }
                    const bool last_own = own == 1 || !Tuning::together;
                    if (chunk == F::chunks - 1 && last_own)
                        turns.pass(own == 1 && stage == range.end - 1 && tile + step >= tiles.count());
                    if (partials == 1 || chunk == F::chunks - 1) {
                        wgmma_wait_group<0>(now, now_fragments.high, now_fragments.low);
                        if (lane == 0) mbarrier_arrive(rings.filters_free(done_place.stage));
                        done_place.advance(), done_place.advance();
                        promote(sums[own][chunk], now, now_fragments.down);
                    }
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
        consume_pairs<Problem, Tuning>(prepared, bias, y, batch, tiles, rings, warpgroup, first, step);
    }
}

}  // namespace leanconv
