// Winograd's F(2, 3) along rows on tensor cores in float32's accuracy (or TF32's), for sm_90a: filters of 3 columns and more,
// unit stride.
//
// Two neighbouring outputs take four products instead of six (lib/pair_states.cuh), each product three of float16:
//   2 · 3 / 1.5 flops a product of float32: 989 / 2 = 495 TFLOP/s of direct arithmetic at 1.83 GHz
// Reached on an H200, 3 x 3 in NHWC, burst and sustained: 281 / 246 TFLOP/s with 512 filters and channels, 270 / 238 with 256,
// 222 / 213 with 128, 138 / 149 with 64; one product of 256 429 / 410.
//
// A tile is 64 pairs of outputs and up to 128 filters. The structure is that of tensor_gemm (tensor_gemm.cuh): the same
// rings, producers and fragments, with these differences:
//   - A stage of pixels is 64 channels of the 128 pixels and some more that a segment of a filter row sees, three columns,
//     each copied once. Where a row of outputs ends, two more pixels follow, so that each pair finds its four side by side.
//   - Both warpgroups read the same pixels. Each makes two of the four states, 64 registers of fragments, and multiplies
//     them with filters of its own: 64 pairs x 128 filters x 2 states are 128 sums a thread. A product has 64 rows of one
//     state, for each state has filters of its own. Scales belong to a pair's state: 64 channels of it.
//   - No turns: while one warpgroup converts, the other multiplies as it is.
//   - At the end the warpgroups exchange half of their sums; then the first has the even outputs, the second the odd ones.
// Per stage the tensor core works 3072 cycles, as in tensor_gemm, but shared memory takes in twice as many filters, and
// twice as many values are converted.
#pragma once

#include <lib/pair_states.cuh>
#include <lib/ptx/barrier.cuh>
#include <lib/ptx/registers.cuh>
#include <lib/ptx/wgmma.cuh>
#include <lib/tensor_output.cuh>
#include <lib/tensor_pixels.cuh>
#include <lib/tensor_products.cuh>

namespace leanconv {

// What the copies and tiles see: a pixel is a pair of outputs, which are two columns apart.
template <class Problem>
struct Pairs : Problem {
    static constexpr int q = ceil_div(Problem::q, 2), stride_w = 2;
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
        for (int i = 0; i < 2; ++i) line[i] = 2 * (pair + i) + (in_row + pair + i) / P::q * 2 + sharer;
    }
    __device__ __forceinline__ void load_four(float (&four)[4], const unsigned char* stage, int at, int t, int sixteen) const {
        const int unit = (sixteen % 2 * 4 + t) ^ at % 8;
        ld_shared_v4(four, reinterpret_cast<const float*>(stage + sixteen / 2 * Rings::half_bytes + at * 128 + unit * 16));
    }
};

// The warpgroup's two states of a stage as operands A, each pixel loaded once; neighbouring pairs of a row share one.
template <bool scaled, class Problem, class Tuning, class Fragments>
__device__ __forceinline__ void load_states(Fragments (&fragments)[2], const PairPixels<Problem, Tuning>& pixels,
                                            const unsigned char* shared, int stage, int t, const SplitHeader& header) {
    constexpr bool in_fours = Pairs<Problem>::q % 2 == 0;
    float x[2][2][4][4];
    const float sign = pixels.sharer == 0 ? 1.0f : -1.0f;
#pragma unroll
    for (int sixteen = 0; sixteen < 4; ++sixteen) {
        float d[2][3][4];
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < 3; ++j) {
                if (in_fours && i == 1 && j == 0) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) d[1][0][e] = d[0][2][e];
                } else {
                    pixels.load_four(d[i][j], shared, (in_fours ? pixels.line[0] + 2 * i : pixels.line[i]) + j, t, sixteen);
                }
            }
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                x[0][i][sixteen][e] = d[i][0][e] - d[i][2][e];
                x[1][i][sixteen][e] = fmaf(sign, pixels.sharer == 0 ? d[i][2][e] : d[i][0][e], d[i][1][e]);
            }
        if constexpr (scaled) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float factor = pixels.factors[stage * split_depth + 16 * sixteen + 4 * t + e];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float& value = x[i / 2][i % 2][sixteen][e];
                    value = value * factor * factor;
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        Fragments& one = fragments[i / 2];
        one.down[i % 2] = split_row<Fragments::exact>(one.high, one.low, i % 2, x[i / 2][i % 2], header);
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
    constexpr int steps = 2 * F::chunks;
    const float* const prepared = prepared_filters + Problem::first_prepared;
    const SplitHeader header = *reinterpret_cast<const SplitHeader*>(prepared);
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, t = lane % 4;
    const int pair = warp * 16 + lane / 4 * 2;
    const StageRange<Pairs<Problem>, Tuning> range;
    const PairOutputs<Problem, Tuning> outputs(batch, warpgroup);
    PairPixels<Problem, Tuning> pixels(prepared, pair, warpgroup);
    RingPlace<Tuning::pixel_stages> pixel_place;
    RingPlace<Tuning::filter_stages> filter_place;
    filter_place.stage = warpgroup;
    for (Offset<Problem> tile = first_tile; tile < tiles.count(); tile += step) {
        pixels.begin(tiles, tile);
        float sums[2][F::chunks][count];
#pragma unroll
        for (int i = 0; i < 2 * F::chunks * count; ++i) sums[i / count / F::chunks][i / count % F::chunks][i % count] = 0.0f;

        for (int stage = range.first; stage < range.end; ++stage) {
            Fragments fragments[2];
            mbarrier_wait_parity(rings.pixels_full(pixel_place.stage), pixel_place.parity);
            load_states<scaled>(fragments, pixels, rings.pixel_stage(pixel_place.stage), stage, t, header);
#pragma unroll
            for (int i = 0; i < steps; ++i) {
                Fragments& states = fragments[i / F::chunks];
                mbarrier_wait_parity(rings.filters_full(filter_place.stage), filter_place.parity);
                const unsigned char* const filters = rings.filter_stage(filter_place.stage);
                float partial[count];
                wgmma_fence(partial, states.high, states.low);
                begin_products(partial, states, filters);
                end_products(partial, states, filters);
                wgmma_commit_group();
                if (i == F::chunks) {
                    // NOTE: not before the products that take the loaded values (ld_shared_v4 says why).
                    __syncwarp();
                    if (lane == 0) mbarrier_arrive(rings.pixels_free(pixel_place.stage));
                    pixel_place.advance();
                }
                wgmma_wait_group<0>(partial, states.high, states.low);
                if (lane == 0) mbarrier_arrive(rings.filters_free(filter_place.stage));
                filter_place.advance(), filter_place.advance();
                promote(sums[i / F::chunks][i % F::chunks], partial, states.down);
            }
        }
        exchange_states<Tuning::exchange>(sums, reinterpret_cast<float*>(rings.base + Rings::shared_bytes), warpgroup, thread);
        const auto& all = in_sixteens(sums[0]);
        if constexpr (Tuning::split == 1) {
            store_sums<Problem, Tuning>(all, 0, prepared, bias, y, batch, outputs, tile, pair, t, 1);
        } else {
            store_sums_of_cluster<Problem, Tuning>(all, rings, prepared, bias, y, batch, outputs, tile, pair, t, 1);
        }
    }
}

// `x` is a tensor map of pixels in rows.
template <class Problem, class Tuning, class Source>
__device__ __forceinline__ void tensor_winograd(const Source& x, const float* prepared, const float* bias, float* y,
                                                long long batch) {
    static_assert(Problem::nhwc && Phase<Problem>::whole, "outputs are those of whole images, channels last");
    static_assert(Problem::s >= 3 && Problem::stride_h == 1 && Problem::stride_w == 1 && Problem::dilation_w == 1,
                  "filters are 3 wide or wider and move pixel by pixel");
    const TensorRings<Pairs<Problem>, Tuning> rings;
    const TensorTiles<Pairs<Problem>, Tuning> tiles(batch);
    if (threadIdx.x == 0) rings.init();
    __syncthreads();
    // NOTE: the same for all threads of a warp, which lets the compiler have stages and descriptors in uniform registers.
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    const Offset<Problem> first = blockIdx.x / Tuning::split, step = gridDim.x / Tuning::split;
    if (warpgroup == Tuning::warpgroups) {
        set_registers_down<Tuning::producer_registers>();
        produce<Pairs<Problem>, Tuning>(x, prepared, batch, tiles, rings, threadIdx.x % 128);
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
