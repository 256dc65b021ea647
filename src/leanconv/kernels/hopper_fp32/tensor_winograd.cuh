// Winograd's F(2, 3) along rows on tensor cores in float32's accuracy (or TF32's), for sm_90a: filters of 3 columns and more,
// unit stride.
//
// Two neighbouring outputs take four products instead of six (pair_states.cuh), each product three of float16:
//   2 · 3 / 1.5 flops a product of float32: 989 / 2 = 495 TFLOP/s of direct arithmetic at 1.83 GHz
// Reached on an H200, 3 x 3 in NHWC, burst and sustained: 280 / 248 TFLOP/s with 512 filters and channels, 275 / 247 with 256,
// 247 / 222 with 128, 212 / 191 with 64; one product of 256 466 / 439. With 64 filters: 9 x 9 281 / 254, 31 x 31 293 / 260.
// NCHW: 246 / 221 with 256.
//
// A tile is 64 pairs of outputs and up to 128 filters. The structure is that of tensor_gemm (tensor_gemm.cuh): the same
// rings, producers and fragments, with these differences:
//   - A stage of pixels is 64 channels of the 128 pixels and some more that a segment of a filter row sees, three columns,
//     each copied once. Where a row of outputs ends, two more pixels follow, so that each pair finds its four side by side.
//   - Both warpgroups read the same pixels. Each makes two of the four states, 64 registers of fragments, and multiplies
//     them with filters of its own: 64 pairs x 128 filters x 2 states are 128 sums a thread. A product has 64 rows of one
//     state, for each state has filters of its own. Scales belong to a pair's state: 64 channels of it.
//   - A column that segments of three leave at the end of a row has stages of its own behind all others, with two states
//     instead of four.
//   - 64 filters leave room for the sums of two rows of outputs. Their pairs share the states of the rows of pixels that both
//     see, and the filters of one row of pixels stay in the ring for the next one: rows are the inner loop.
//   - A tile may have one row of outputs of all images: it leaves out the filter rows that this row sees beside the image.
//   - Pairs of blocks have the same 128 filters, each brings half of them to both; then the warpgroups multiply in turns.
//     Else they take no turns: while one converts, the other multiplies as it is.
//   - At the end the warpgroups exchange half of their sums; then the first has the even outputs, the second the odd ones.
// Per stage and 128 filters, or 64 in two rows, the tensor core works 3072 cycles, as in tensor_gemm, of some 5100. Twice as
// many values are converted: 420 of the loop's 800 instructions. From the L2 cache come 163 KB, to
// each of two blocks with the same filters 98 KB, with two rows 99 KB.
#pragma once

#include <kernels/hopper_fp32/pair_pixels.cuh>
#include <device/ptx/barrier.cuh>
#include <device/ptx/registers.cuh>
#include <device/ptx/wgmma.cuh>
#include <kernels/hopper_fp32/settled_filters.cuh>
#include <kernels/hopper_fp32/tensor_output.cuh>
#include <kernels/hopper_fp32/tensor_pixels.cuh>
#include <kernels/hopper_fp32/tensor_products.cuh>

namespace leanconv {

// Where the outputs of pairs lie: in NHWC one of the two of each pair, and both of flat pairs, of half of the filters.
template <class Problem, class Tuning>
struct PairOutputs : TensorTiles<Pairs<Problem, Tuning>, Tuning> {
    using Pixels = TensorPixels<Pairs<Problem, Tuning>, Tuning>;
    static constexpr bool both = Tuning::flat;
    struct Numbers {
        Offset<Problem> count;
        int odd, height;
        __device__ __forceinline__ Place place(Offset<Problem> number) const {
            if constexpr (Tuning::flat) {
                const Offset<Problem> n = number / Pixels::of_image;
                const int in_image = static_cast<int>(number - n * Pixels::of_image);
                return {static_cast<int64>(n) * Problem::k * (Problem::p * Problem::q) + 2 * in_image,
                        number < count && in_image < Pixels::image};
            } else {
                constexpr int pairs = Pairs<Problem, Tuning>::q;
                const Offset<Problem> row = number / pairs;
                const int q = static_cast<int>(number - row * pairs) * 2 + odd;
                const bool exists = number < count && q < Problem::q;
                if constexpr (Tuning::one_row) {
                    return {(static_cast<int64>(row) * Problem::p + height) * Problem::q + q, exists};
                } else if constexpr (Tuning::heights == 1) {
                    return {static_cast<int64>(row) * Problem::q + q, exists};
                } else {
                    constexpr int rows = Pairs<Problem, Tuning>::p;
                    const Offset<Problem> n = row / rows;
                    const int p = static_cast<int>(row - n * rows) * Tuning::heights + height;
                    return {(static_cast<int64>(n) * Problem::p + p) * Problem::q + q, exists && p < Problem::p};
                }
            }
        }
    };
    Numbers numbers;
    __device__ __forceinline__ PairOutputs(long long batch, int odd, int height = 0)
        : TensorTiles<Pairs<Problem, Tuning>, Tuning>(batch), numbers{count_of(batch), odd, height} {}
    // Of one row where tiles are such.
    static __device__ __forceinline__ Offset<Problem> count_of(long long batch) {
        if constexpr (Tuning::one_row) return static_cast<Offset<Problem>>(batch) * Pairs<Problem, Tuning>::q;
        return Pixels{batch}.count();
    }
};

// Flat pairs: each warpgroup sends what the other needs of half of the filters. Then sums[0] of the first half are even and
// odd outputs by turns, 8 each: the first warpgroup has those of the first half of the filters.
template <int at_once, int chunks, int count>
__device__ __forceinline__ void exchange_filters(float (&sums)[2][chunks][count], float* shared, int warpgroup, int thread,
                                                 float (&outputs)[chunks * count / 8][8]) {
    constexpr int half = chunks * count / 2, part = at_once / 2;
    static_assert(half % part == 0 && part % 8 == 0, "sums are exchanged in equal parts of whole filters");
    float* const mine = shared + warpgroup * at_once * 128 + thread;
    const float* const others = shared + (1 - warpgroup) * at_once * 128 + thread;
    const auto first = [&](int i) -> float& { return sums[0][i / count][i % count]; };
    const auto second = [&](int i) -> float& { return sums[1][i / count][i % count]; };
#pragma unroll
    for (int from = 0; from < half; from += part) {
#pragma unroll
        for (int i = from; i < from + part; ++i) {
            // s1 and s0 + s1 of the second half, or s2 and s2 + s3 of the first
            const float one = warpgroup == 0 ? second(half + i) : second(i);
            mine[(i - from) * 256] = one;
            mine[(i - from) * 256 + 128] = (warpgroup == 0 ? first(half + i) : first(i)) + one;
        }
        barrier_sync(14, 256);
#pragma unroll
        for (int i = from; i < from + part; ++i) {
            const float one = warpgroup == 0 ? second(i) : second(half + i);
            const float two = (warpgroup == 0 ? first(i) : first(half + i)) + one;
            const float other = others[(i - from) * 256], both = others[(i - from) * 256 + 128];
            outputs[i / 8 * 2][i % 8] = warpgroup == 0 ? two + other : both + one;
            outputs[i / 8 * 2 + 1][i % 8] = warpgroup == 0 ? one - both : other - two;
        }
        barrier_sync(14, 256);
    }
}

// The two warpgroups send each other the sums of their second states. Then sums[0] are outputs, even ones in the first. The
// second warpgroup's pairs are in reverse order, and those of its first state have the other sign.
template <int at_once, int chunks, int count>
__device__ __forceinline__ void exchange_states(float (&sums)[2][chunks][count], float* shared, int warpgroup, int thread) {
    constexpr int all = chunks * count;
    static_assert(all % at_once == 0 && at_once % 4 == 0, "sums are exchanged in equal parts");
    const float sign = warpgroup == 0 ? 1.0f : -1.0f;
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
            sum = fmaf(sign, sums[1][(first + i) / count][(first + i) % count], sum) + others[(i ^ 2) * 128];
        }
        barrier_sync(14, 256);
    }
}

template <bool flat, int chunks, int count, int entries>
__device__ __forceinline__ const auto& all_outputs(const float (&sums)[chunks][count], const float (&both)[entries][8]) {
    if constexpr (flat) return both;
    else return in_sixteens(sums);
}

// Where a warpgroup finds its filters in their ring, of which every other stage is its own.
template <class Problem, class Tuning>
struct OwnFilters {
    using F = TensorFilters<Problem, Tuning>;
    static constexpr int steps = 2 * F::chunks, all = Tuning::filter_stages;
    // Those of a row are in half of the ring for two rows of pixels: for the second row of outputs in the next one.
    static constexpr bool kept = F::heights > 1;
    // Some stages of pixels have filters of fewer states than others.
    static constexpr bool mixed = F::rest > 0;
    // Or stages of pixels take all stages of filters, and find each where it was.
    static constexpr bool fixed = !kept && !mixed && all == 2 * steps;
    static_assert(all % 2 == 0, "every other stage of filters is a warpgroup's own");
    static_assert(!kept || all == 4 * steps, "the ring has the filters of two rows");
    int warpgroup;
    RingPlace<kept && !mixed ? 2 : fixed ? 1 : all / 2> place;

    __device__ __forceinline__ explicit OwnFilters(int warpgroup) : warpgroup(warpgroup) {}
    // The stage of the i-th products, those with filters of this row of pixels, or of the one `before`, of so many states.
    template <int states = 2>
    __device__ __forceinline__ int stage(int i, bool before) const {
        if constexpr (kept && mixed)
            return 2 * ((place.stage + i + (before ? all / 2 - states : 0)) % (all / 2)) + warpgroup;
        if constexpr (kept) return (place.stage ^ static_cast<int>(before)) * (2 * steps) + 2 * i + warpgroup;
        return 2 * (fixed ? i : place.stage) + warpgroup;
    }
    // The phase in which those of this row of pixels land.
    __device__ __forceinline__ unsigned parity(int i) const {
        if constexpr (kept && mixed) return place.parity ^ static_cast<unsigned>(place.stage + i >= all / 2);
        return place.parity;
    }
    template <int states = 2>
    __device__ __forceinline__ void advance(bool of_row) {
        if constexpr (kept && mixed) {
#pragma unroll
            for (int i = 0; i < states && of_row; ++i) place.advance();
        } else if (of_row == (kept || fixed)) place.advance();
    }
};

// One warpgroup's products of a stage of pixels with chunks of filters, or for rows of outputs, `first` to `end` - 1.
template <bool scaled, int first, int end, int parts, int count, class Pixels, class Place, class Problem, class Tuning>
__device__ __forceinline__ void multiply_stage(float (&sums)[2][parts][count], const Pixels& pixels,
                                               const TensorRings<Problem, Tuning>& rings,
                                               Place& pixel_place,
                                               OwnFilters<Problem, Tuning>& own_filters, const Turns<Tuning>& turns,
                                               bool last, int stage, int lane, const SplitHeader& header) {
    constexpr bool kept = OwnFilters<Problem, Tuning>::kept, planes = TensorFilters<Problem, Tuning>::planes;
    SplitFragments<Tuning::products == 3> fragments[2];
    float x[2][2][4][4];
    if constexpr (planes) {
        load_states<scaled>(x, pixels, pixel_place, rings, stage, lane % 4);
    } else {
        mbarrier_wait_parity(rings.pixels_full(pixel_place.stage), pixel_place.parity);
        load_states<scaled>(x, pixels, rings.base, pixel_place.stage * TensorRings<Problem, Tuning>::pixel_bytes, stage,
                            lane % 4);
    }
    split_state(fragments[0], x[0], header);
    if (Tuning::flat) split_state(fragments[1], x[1], header);
#pragma unroll
    for (int i = 0; i < 2 * (end - first); ++i) {
        // Of rows of outputs the second comes first, which lets go of its filters.
        const int own = i / (end - first), part = kept ? end - 1 - i % (end - first) : first + i % (end - first);
        auto& states = fragments[own];
        const int place = own_filters.stage(kept ? own : i, kept && part > 0);
        if (!kept || part == 0) mbarrier_wait_parity(rings.filters_full(place), own_filters.parity(own));
        if (i == 0) turns.wait(states);
        const unsigned char* const filters = rings.filter_stage(place);
        float partial[count];
        wgmma_fence(partial, states.high, states.low);
        begin_products(partial, states, filters);
        end_products(partial, states, filters);
        wgmma_commit_group();
        // The second state is made while products of the first are under way; flat ones, whose loads take longer, before.
        // NOTE: zero_after has it made before the products are waited for, behind which the compiler would move it.
        int zero = 0;
        if (!Tuning::flat && i == 0) {
            split_state(fragments[1], x[1], header);
            zero = zero_after(fragments[1].all());
        }
        if (i == (Tuning::flat ? end - first : 0)) {
            // NOTE: not before the products that take the loaded values (ld_shared_v4 says why).
            __syncwarp();
            if constexpr (planes) {
                pixel_place.release(rings, stage, lane);
            } else {
                if (lane == 0) mbarrier_arrive(rings.pixels_free(pixel_place.stage + zero));
                pixel_place.advance();
            }
        }
        if (i == 2 * (end - first) - 1) turns.pass(last);
        wgmma_wait_group<0>(partial, states.high, states.low);
        if ((!kept || part > 0) && lane == 0) mbarrier_arrive(rings.filters_free(place));
        own_filters.advance(false);
        promote(sums[own][part], partial, states.down);
    }
    if (first == 0) own_filters.advance(true);
}

// The same of the column that segments leave, of which a warpgroup has one state.
template <bool scaled, int first, int end, int parts, int count, class Pixels, class Problem, class Tuning>
__device__ __forceinline__ void multiply_rest(float (&sums)[2][parts][count], const Pixels& pixels,
                                              const TensorRings<Problem, Tuning>& rings,
                                              RingPlace<Tuning::pixel_stages>& pixel_place,
                                              OwnFilters<Problem, Tuning>& own_filters, const Turns<Tuning>& turns, bool last,
                                              int stage, int lane, const SplitHeader& header) {
    constexpr bool kept = OwnFilters<Problem, Tuning>::kept;
    SplitFragments<Tuning::products == 3> fragments;
    float x[2][4][4];
    mbarrier_wait_parity(rings.pixels_full(pixel_place.stage), pixel_place.parity);
    load_rest<scaled>(x, pixels, rings, pixel_place.stage * TensorRings<Problem, Tuning>::pixel_bytes, stage, lane % 4);
    split_state(fragments, x, header);
#pragma unroll
    for (int i = 0; i < end - first; ++i) {
        const int part = kept ? end - 1 - i : first + i;
        const int place = own_filters.template stage<1>(0, kept && part > 0);
        if (!kept || part == 0) mbarrier_wait_parity(rings.filters_full(place), own_filters.parity(0));
        if (i == 0) turns.wait(fragments);
        const unsigned char* const filters = rings.filter_stage(place);
        float partial[count];
        wgmma_fence(partial, fragments.high, fragments.low);
        begin_products(partial, fragments, filters);
        end_products(partial, fragments, filters);
        wgmma_commit_group();
        if (i == 0) {
            // NOTE: not before the products that take the loaded values (ld_shared_v4 says why).
            __syncwarp();
            if (lane == 0) mbarrier_arrive(rings.pixels_free(pixel_place.stage));
            pixel_place.advance();
        }
        if (i == end - first - 1) turns.pass(last);
        wgmma_wait_group<0>(partial, fragments.high, fragments.low);
        if ((!kept || part > 0) && lane == 0) mbarrier_arrive(rings.filters_free(place));
        own_filters.template advance<1>(false);
        promote(sums[0][part], partial, fragments.down);
    }
    if (first == 0) own_filters.template advance<1>(true);
}

// One warpgroup's products of all tiles of the block.
template <class Problem, class Tuning, bool scaled>
__device__ __forceinline__ void consume_pairs(const float* prepared_filters, const float* bias, float* y, long long batch,
                                              const TensorTiles<Pairs<Problem, Tuning>, Tuning>& tiles,
                                              const TensorRings<Pairs<Problem, Tuning>, Tuning>& rings, int warpgroup) {
    using F = TensorFilters<Pairs<Problem, Tuning>, Tuning>;
    using Rings = TensorRings<Pairs<Problem, Tuning>, Tuning>;
    static_assert(Tuning::warpgroups == 2 && F::states == 4, "two warpgroups share the four states of F(2, 3)");
    constexpr int count = Tuning::chunk / 2;
    constexpr int parts = F::chunks * F::heights;  // of the sums of a state
    static_assert(F::heights == 1 || (F::chunks == 1 && !Tuning::flat && Tuning::split == 1),
                  "rows of outputs share states where a tile's filters are one chunk");
    const float* const prepared = prepared_filters + Problem::first_prepared;
    const SplitHeader header = *reinterpret_cast<const SplitHeader*>(prepared);
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, t = lane % 4;
    PairOutputs<Problem, Tuning> outputs(batch, warpgroup);
    using Flat = typename Select<F::planes, PlanePairPixels<Problem, Tuning>, FlatPairPixels<Problem, Tuning>>::type;
    using Pixels = typename Select<Tuning::flat, Flat, PairPixels<Problem, Tuning>>::type;
    Pixels pixels(prepared, warp, lane, warpgroup);
    typename Select<F::planes, PlaneStages<Pairs<Problem, Tuning>, Tuning>, RingPlace<Tuning::pixel_stages>>::type pixel_place;
    OwnFilters<Pairs<Problem, Tuning>, Tuning> own_filters(warpgroup);
    const Turns<Tuning> turns(warpgroup);
    static_assert(!Tuning::turns || F::heights == 1, "turns end with a tile's last stage");
    for (TileWalk<Pairs<Problem, Tuning>, Tuning> walk(tiles); walk.valid(); walk.advance()) {
        const Offset<Problem> tile = walk.place();
        pixels.begin(tiles, tile);
        if constexpr (F::planes) pixel_place.begin(walk);
        float sums[2][parts][count];
#pragma unroll
        for (int i = 0; i < 2 * parts * count; ++i) sums[i / count / parts][i / count % parts][i % count] = 0.0f;

        if constexpr (F::heights == 1) {
            if constexpr (F::rest > 0) {
                static_assert(!Tuning::one_row, "a tile of one row of outputs has stages that follow each other");
                // NOTE: as two loops it spilled 196 bytes of flat tiles that a cluster shares.
                int stage = walk.first;
                do {
                    const bool last = stage == walk.end - 1 && walk.is_last();
                    if (stage < F::whole_stages)
                        multiply_stage<scaled, 0, parts>(sums, pixels, rings, pixel_place, own_filters, turns, last, stage, lane,
                                                         header);
                    else
                        multiply_rest<scaled, 0, parts>(sums, pixels, rings, pixel_place, own_filters, turns, last, stage, lane,
                                                        header);
                } while (++stage < walk.end);
            } else {
                int stage = walk.first;
                do {
                    multiply_stage<scaled, 0, parts>(sums, pixels, rings, pixel_place, own_filters, turns,
                                                     stage == walk.end - 1 && walk.is_last(), stage, lane, header);
                } while (++stage < walk.end);
            }
        } else {
            // Of each segment and its channels, the first row of outputs alone sees the first row of pixels, the second the last.
            for (int first = 0; first < F::row_stages; ++first) {
                multiply_stage<scaled, 0, 1>(sums, pixels, rings, pixel_place, own_filters, turns, false, first, lane,
                                             header);
                for (int stage = first + F::row_stages; stage < F::whole_stages; stage += F::row_stages)
                    multiply_stage<scaled, 0, parts>(sums, pixels, rings, pixel_place, own_filters, turns, false, stage, lane,
                                                     header);
                // NOTE: factors are those of channels; the row of pixels past the last row of filters takes these.
                multiply_stage<scaled, 1, parts>(sums, pixels, rings, pixel_place, own_filters, turns, false,
                                                 F::whole_stages - F::row_stages + first, lane, header);
            }
            if constexpr (F::rest > 0) {
                for (int first = F::whole_stages; first < F::whole_stages + F::rest_row_stages; ++first) {
                    multiply_rest<scaled, 0, 1>(sums, pixels, rings, pixel_place, own_filters, turns, false, first, lane,
                                                header);
                    for (int stage = first + F::rest_row_stages; stage < F::stages; stage += F::rest_row_stages)
                        multiply_rest<scaled, 0, parts>(sums, pixels, rings, pixel_place, own_filters, turns, false, stage,
                                                        lane, header);
                    multiply_rest<scaled, 1, parts>(sums, pixels, rings, pixel_place, own_filters, turns, false,
                                                    F::stages - F::rest_row_stages + first - F::whole_stages, lane, header);
                }
            }
        }
        if constexpr (Tuning::one_row) outputs.numbers.height = tiles.row(tile);
        float* const exchanged = reinterpret_cast<float*>(rings.base + Rings::shared_bytes);
        float both[Tuning::flat ? parts * count / 8 : 1][8];
        if constexpr (Tuning::flat) exchange_filters<Tuning::exchange>(sums, exchanged, warpgroup, thread, both);
        else exchange_states<Tuning::exchange>(sums, exchanged, warpgroup, thread);
        const auto& all = all_outputs<Tuning::flat>(sums[0], both);
        if constexpr (F::heights > 1) {
            constexpr int sixteens = F::filters / 16;
#pragma unroll
            for (int height = 0; height < F::heights; ++height) {
                const PairOutputs<Problem, Tuning> of_height(batch, warpgroup, height);
                const auto& of_row = reinterpret_cast<const float (&)[sixteens][8]>(all[height * sixteens]);
                store_sums<Problem, Tuning>(of_row, 0, prepared, bias, y, batch, of_height, tile, pixels.pair, t, pixels.apart);
            }
        } else if (!walk.together) {
            store_sums<Problem, Tuning>(all, 0, prepared, bias, y, batch, outputs, tile, pixels.pair, t, pixels.apart);
        } else if constexpr (Tuning::split > 1) {
            store_sums_of_cluster<Problem, Tuning>(all, rings, prepared, bias, y, batch, outputs, tile, pixels.pair, t,
                                                   pixels.apart);
        }
    }
}

// `x` is a tensor map of pixels in rows, or of flat ones.
template <class Problem, class Tuning, class Source, class... Filters>
__device__ __forceinline__ void tensor_winograd(const Source& x, const float* prepared, const float* bias, float* y,
                                                long long batch, const Filters*... w) {
    static_assert((Tuning::flat ? !Problem::nhwc && !Problem::chwn && Problem::q % 2 == 0 : Problem::nhwc) &&
                      Phase<Problem>::whole,
                  "outputs are those of whole images, channels last, or channels first and no pair in two rows");
    static_assert(Problem::s >= 3 && Problem::stride_h == 1 && Problem::stride_w == 1 && Problem::dilation_w == 1,
                  "filters are 3 wide or wider and move pixel by pixel");
    const TensorRings<Pairs<Problem, Tuning>, Tuning> rings;
    const TensorTiles<Pairs<Problem, Tuning>, Tuning> tiles(batch);
    constexpr int receivers = receivers_of<Tuning>(nullptr);
    if (threadIdx.x == 0) rings.init();
    if constexpr (receivers > 1) meet_in_cluster();
    else __syncthreads();
    // NOTE: the same for all threads of a warp, which lets the compiler have stages and descriptors in uniform registers.
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (warpgroup == Tuning::warpgroups) {
        set_registers_down<Tuning::producer_registers>();
        wait_for_settled_filters<Tuning>(threadIdx.x % 128);
        produce<Pairs<Problem, Tuning>, Tuning>(x, prepared, batch, tiles, rings, threadIdx.x % 128);
        if (TileWalk<Pairs<Problem, Tuning>, Tuning>(tiles).meets()) {
            // NOTE: the warps of lanes that copied alone meet again before the barriers that all threads take part in.
            __syncwarp();
            if constexpr (Tuning::split > 1) meet_in_cluster(), meet_in_cluster();
        }
    } else {
        settle_filters<Problem, Tuning, TensorRings<Pairs<Problem, Tuning>, Tuning>>(prepared, w...);
        set_registers_up<Tuning::consumer_registers>();
        const unsigned* const flags = reinterpret_cast<const unsigned*>(prepared + Problem::first_prepared) +
                                      TensorFilters<Pairs<Problem, Tuning>, Tuning>::flags_at;
        bool scaled = false;
        for (int group = 0; group < Problem::groups; ++group) scaled |= flags[group] != 0;
        if (scaled) consume_pairs<Problem, Tuning, true>(prepared, bias, y, batch, tiles, rings, warpgroup);
        else consume_pairs<Problem, Tuning, false>(prepared, bias, y, batch, tiles, rings, warpgroup);
    }
    if constexpr (receivers > 1) {
        // NOTE: no block leaves while the others still send it filters, or ask it for some.
        __syncwarp();
        meet_in_cluster();
    }
}

}  // namespace leanconv
