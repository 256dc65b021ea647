// tensor_winograd: F(2, 3) along rows on Hopper tensor cores (wgmma); float32 in, float32 accuracy out (TF32 accuracy with one
// product).
//
//   two neighbouring outputs, a pair, from 4 pixels and 3 filter columns by 4 products instead of 6 (filter_layout.cuh);
//   wider filter rows are sums of segments of three columns
//
// Requires   sm_90a; filters of 3 columns and more, unit stride; rows may be dilated; 16 channels and more, of groups
//            multiples of 32. NHWC: channels in fours; NCHW: outputs as large as the input, rows of even length, pixels in fours.
// Volumes    NHWC: maps of five axes; NCHW: linear pixels of all slices. Slices of a filter are rows behind one another.
// Numerics   as tensor_gemm: each product is 3 wgmma of split float32. Scales belong to a pair's state: 64 channels of it.
// CTA tile   64 pairs x up to 128 filters x 64 channels of one segment a stage; persistent; split-K by cluster.
//            With 64 filters: pairs of two output rows. They share the states of the rows of pixels that both read, and the
//            filters of one row of pixels stay in the ring for the next one: rows are the inner loop.
//            With `one_row`: one output row of all images; the tile leaves out the filter rows outside the image.
// Roles      warpgroups 0, 1  consumers of the same pixels: the first has states 0 and 1, the second 3 and 2, each with
//                             filters of its own; a product has 64 rows of one state
//            warpgroup 2      producers, as in tensor_gemm. With multicast, pairs of CTAs have the same 128 filters, and each
//                             copies half of them to both
// Pipelines  pixels   pixel_stages   each pixel once; two more follow where a row of outputs ends, so that every pair finds its
//                                    four side by side
//            filters  filter_stages  every other stage belongs to a warpgroup; multicast_empty: both CTAs -> the copying one
// One stage  wait full(pixels); load; compute two states; split the first; per MMA tile: wait full(filters), 4 k16 steps x 3
//            wgmma, commit; in NHWC split the second state under the first products; promote; release. A column that segments of three
//            leave has stages of its own, behind all others, with one state a warpgroup.
// Tile end   the warpgroups exchange half of their sums; then, NHWC, the first has the even outputs, the second the odd ones;
//            NCHW: each has both outputs of half of the filters.
// Registers  128 acc + 64 operand of 240.
// Work       2 * 3 / 1.5 flops a product: peak 989 / 2 = 495 TFLOP/s of direct convolution at 1.83 GHz. Per stage and 128
//            filters the tensor core works 3072 cycles; conversion is 420 of the loop's 800 instructions. 163 KB
//            come from the L2 cache, 98 KB with multicast, 99 KB with two rows.
// Measured   figure: opencnn-nhwc tensor_winograd/pytorch mean = 4.21
//            figure: opencnn-nhwc tensor_winograd tflops-most = 253
//            figure: opencnn tensor_winograd/pytorch mean = 3.03
//            figure: opencnn-nhwc-tf32 tensor_winograd/tf32 mean = 1.17
//            figure: wide-filters tensor_winograd/tensor_gemm mean = 1.43
#pragma once

#include <device/ptx/mma.cuh>
#include <device/ptx/sync.cuh>
#include <kernels/hopper_fp32/pair_pixels.cuh>
#include <kernels/hopper_fp32/speculative_filters.cuh>
#include <device/pipeline/outputs.cuh>
#include <device/pipeline/pixels.cuh>
#include <kernels/hopper_fp32/tensor_stage.cuh>

namespace leanconv {

// Where the outputs of pairs lie: in NHWC one of each pair; in NCHW both, of half of the filters.
template <class Problem, class Tuning>
struct PairOutputs : TensorTiles<Pairs<Problem, Tuning>, Tuning> {
    using Pixels = TensorPixels<Pairs<Problem, Tuning>, Tuning>;
    static constexpr bool both = Tuning::linear;
    struct Numbers {
        Offset<Problem> count;
        int odd, output_row;
        __device__ __forceinline__ Place place(Offset<Problem> number) const {
            if constexpr (Tuning::linear) {
                const Offset<Problem> n = number / Pixels::of_image;
                const int in_image = static_cast<int>(number - n * Pixels::of_image);
                return {static_cast<int64>(n) * Problem::k * output_pixels<Problem> + 2 * in_image,
                        number < count && in_image < Pixels::image};
            } else {
                constexpr int pairs = Pairs<Problem, Tuning>::q;
                const Offset<Problem> row = number / pairs;
                const int q = static_cast<int>(number - row * pairs) * 2 + odd;
                const bool exists = number < count && q < Problem::q;
                if constexpr (Tuning::one_row) {
                    return {(static_cast<int64>(row) * Problem::p + output_row) * Problem::q + q, exists};
                } else if constexpr (Tuning::output_rows == 1) {
                    return {static_cast<int64>(row) * Problem::q + q, exists};
                } else {
                    constexpr int rows = Pairs<Problem, Tuning>::p;
                    const Offset<Problem> n = row / rows;
                    const int p = static_cast<int>(row - n * rows) * Tuning::output_rows + output_row;
                    return {(static_cast<int64>(n) * Problem::p + p) * Problem::q + q, exists && p < Problem::p};
                }
            }
        }
    };
    Numbers numbers;
    __device__ __forceinline__ PairOutputs(long long batch, int odd, int output_row = 0)
        : TensorTiles<Pairs<Problem, Tuning>, Tuning>(batch), numbers{count_of(batch), odd, output_row} {}
    // Of one row where tiles are such.
    static __device__ __forceinline__ Offset<Problem> count_of(long long batch) {
        if constexpr (Tuning::one_row) return static_cast<Offset<Problem>>(batch) * Pairs<Problem, Tuning>::q;
        return Pixels{batch}.count();
    }
};

// NCHW: each warpgroup sends what the other needs of half of the filters. Then outputs are even and odd ones alternately, 8
// each; the first warpgroup has those of the first half of the filters.
template <int at_once, int n_tiles, int count>
__device__ __forceinline__ void exchange_filters(float (&sums)[2][n_tiles][count], float* shared, int warpgroup, int thread,
                                                 float (&outputs)[n_tiles * count / 8][8]) {
    constexpr int half = n_tiles * count / 2, acc = at_once / 2;
    static_assert(half % acc == 0 && acc % 8 == 0, "sums are exchanged in equal parts of whole filters");
    float* const mine = shared + warpgroup * at_once * 128 + thread;
    const float* const others = shared + (1 - warpgroup) * at_once * 128 + thread;
    const auto first = [&](int i) -> float& { return sums[0][i / count][i % count]; };
    const auto second = [&](int i) -> float& { return sums[1][i / count][i % count]; };
#pragma unroll
    for (int from = 0; from < half; from += acc) {
#pragma unroll
        for (int i = from; i < from + acc; ++i) {
            // s1 and s0 + s1 of the second half, or s2 and s2 + s3 of the first
            const float one = warpgroup == 0 ? second(half + i) : second(i);
            mine[(i - from) * 256] = one;
            mine[(i - from) * 256 + 128] = (warpgroup == 0 ? first(half + i) : first(i)) + one;
        }
        barrier_sync(14, 256);
#pragma unroll
        for (int i = from; i < from + acc; ++i) {
            const float one = warpgroup == 0 ? second(i) : second(half + i);
            const float two = (warpgroup == 0 ? first(i) : first(half + i)) + one;
            const float other = others[(i - from) * 256], both = others[(i - from) * 256 + 128];
            outputs[i / 8 * 2][i % 8] = warpgroup == 0 ? two + other : both + one;
            outputs[i / 8 * 2 + 1][i % 8] = warpgroup == 0 ? one - both : other - two;
        }
        barrier_sync(14, 256);
    }
}

// NHWC: the warpgroups send each other the sums of their second states. Then sums[0] are outputs, even ones in the first. The
// second warpgroup's pairs are in reverse order, and its first state has the other sign.
template <int at_once, int n_tiles, int count>
__device__ __forceinline__ void exchange_states(float (&sums)[2][n_tiles][count], float* shared, int warpgroup, int thread) {
    constexpr int all = n_tiles * count;
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

template <bool linear, int n_tiles, int count, int entries>
__device__ __forceinline__ const auto& all_outputs(const float (&sums)[n_tiles][count], const float (&both)[entries][8]) {
    if constexpr (linear) return both;
    else return as_n16(sums);
}

// Where a warpgroup finds its filters in the ring, of which every other stage is its own.
template <class Problem, class Tuning>
struct OwnFilters {
    using F = TensorFilters<Problem, Tuning>;
    static constexpr int steps = 2 * F::n_tiles, all = Tuning::filter_stages;
    // Filters of a row of pixels stay in half of the ring for two rows: the second row of outputs uses them one row later.
    static constexpr bool kept = F::output_rows > 1;
    // Some stages of pixels have filters of fewer states than others.
    static constexpr bool mixed = F::rest > 0;
    // Or a stage of pixels takes all stages of filters, each at a fixed place.
    static constexpr bool fixed = !kept && !mixed && all == 2 * steps;
    static_assert(all % 2 == 0, "every other stage of filters belongs to a warpgroup");
    static_assert(!kept || all == 4 * steps, "the ring has the filters of two rows");
    int warpgroup;
    RingPlace<kept && !mixed ? 2 : fixed ? 1 : all / 2> place;

    __device__ __forceinline__ explicit OwnFilters(int warpgroup) : warpgroup(warpgroup) {}
    // The stage of the i-th products: filters of this row of pixels, or of the one `before`.
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

// A consumer's products of one stage of pixels with its MMA tiles, or with rows of outputs `first` to `end` - 1. Of the column
// that segments leave a warpgroup has one state.
template <bool scaled, int states, int first, int end, int accs, int count, class Pixels, class Place, class Problem,
          class Tuning>
__device__ __forceinline__ void multiply_stage(float (&sums)[2][accs][count], const Pixels& pixels,
                                               const TensorRings<Problem, Tuning>& rings, Place& pixel_place,
                                               OwnFilters<Problem, Tuning>& own_filters, const PingPongOf<Tuning>& ping_pong,
                                               bool last, int stage, int lane, const SplitHeader& header) {
    constexpr bool kept = OwnFilters<Problem, Tuning>::kept, resident = TensorFilters<Problem, Tuning>::resident;
    constexpr bool late = states == 2 && !Tuning::linear;
    constexpr int of_state = end - first;
    SplitFragments<Tuning::products == 3> fragments[states];
    float x[states][2][4][4];
    if constexpr (resident) {
        load_states<scaled>(x, pixels, pixel_place, rings, stage, lane % 4);
    } else {
        mbarrier_wait_parity(rings.pixels_full(pixel_place.stage), pixel_place.parity);
        const int at = pixel_place.stage * TensorRings<Problem, Tuning>::pixel_bytes;
        if constexpr (states == 2) load_states<scaled>(x, pixels, rings.base, at, stage, lane % 4);
        else load_rest<scaled>(x[0], pixels, rings, at, stage, lane % 4);
    }
    split_state(fragments[0], x[0], header);
    if constexpr (states == 2 && !late) split_state(fragments[1], x[1], header);
#pragma unroll
    for (int i = 0; i < states * of_state; ++i) {
        // The second output row is processed first, because it releases its filter stage.
        const int own = i / of_state, acc = kept ? end - 1 - i % of_state : first + i % of_state;
        auto& operand = fragments[own];
        const int place = own_filters.template stage<states>(kept ? own : i, kept && acc > 0);
        if (!kept || acc == 0) mbarrier_wait_parity(rings.filters_full(place), own_filters.parity(own));
        if (i == 0) ping_pong.wait(operand);
        const unsigned char* const filters = rings.filter_stage(place);
        float partial[count];
        wgmma_fence(partial, operand.high, operand.low);
        begin_products(partial, operand, filters);
        end_products(partial, operand, filters);
        wgmma_commit_group();
        // The second state is split while products of the first run; linear pixels, whose loads take longer, before.
        // NOTE: zero_after orders it before the wait for the products, behind which the compiler would move it.
        int zero = 0;
        if (late && i == 0) {
            split_state(fragments[states - 1], x[states - 1], header);
            zero = zero_after(fragments[states - 1].token());
        }
        if (i == (states == 2 && Tuning::linear ? of_state : 0)) {
            // NOTE: released after the products that read the loaded values were issued (ld_shared_v4 says why).
            __syncwarp();
            if constexpr (resident) {
                pixel_place.release(rings, stage, lane);
            } else {
                mbarrier_arrive_warp(rings.pixels_empty(pixel_place.stage + zero), lane);
                pixel_place.advance();
            }
        }
        if (i == states * of_state - 1) ping_pong.pass(last);
        wgmma_wait_group<0>(partial, operand.high, operand.low);
        if (!kept || acc > 0) mbarrier_arrive_warp(rings.filters_empty(place), lane);
        own_filters.template advance<states>(false);
        promote(sums[own][acc], partial, operand.inverse_scale);
    }
    if (first == 0) own_filters.template advance<states>(true);
}

// A consumer warpgroup: all tiles of the CTA.
template <class Problem, class Tuning, bool scaled>
__device__ __forceinline__ void consume_pairs(const float* prepared_filters, Bias<Problem> bias, float* y, long long batch,
                                              const TensorTiles<Pairs<Problem, Tuning>, Tuning>& tiles,
                                              const TensorRings<Pairs<Problem, Tuning>, Tuning>& rings, int warpgroup) {
    using F = TensorFilters<Pairs<Problem, Tuning>, Tuning>;
    using Rings = TensorRings<Pairs<Problem, Tuning>, Tuning>;
    static_assert(Tuning::warpgroups == 2 && F::states == 4, "two warpgroups share the four states of F(2, 3)");
    constexpr int count = Tuning::mma_n / 2;
    constexpr int accs = F::n_tiles * F::output_rows;  // of the sums of a state
    static_assert(F::output_rows == 1 || (F::n_tiles == 1 && !Tuning::linear && Tuning::split == 1),
                  "rows of outputs share states where a tile's filters are one chunk");
    const float* const prepared = prepared_filters + Problem::first_prepared;
    const SplitHeader header = *reinterpret_cast<const SplitHeader*>(prepared);
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, t = lane % 4;
    PairOutputs<Problem, Tuning> outputs(batch, warpgroup);
    using Linear = typename Select<F::resident, ResidentPairPixels<Problem, Tuning>, LinearPairPixels<Problem, Tuning>>::type;
    using Pixels = typename Select<Tuning::linear, Linear, PairPixels<Problem, Tuning>>::type;
    Pixels pixels(prepared, warp, lane, warpgroup);
    using Resident = ResidentStages<Pairs<Problem, Tuning>, Tuning>;
    typename Select<F::resident, Resident, RingPlace<Tuning::pixel_stages>>::type pixel_place;
    OwnFilters<Pairs<Problem, Tuning>, Tuning> own_filters(warpgroup);
    const PingPongOf<Tuning> ping_pong(warpgroup);
    static_assert(!Tuning::ping_pong || F::output_rows == 1, "the schedule ends with a tile's last stage");
    for (TileWalk<Pairs<Problem, Tuning>, Tuning> walk(tiles); walk.valid(); walk.advance()) {
        const Offset<Problem> tile = walk.place();
        pixels.begin(tiles, tile);
        if constexpr (F::resident) pixel_place.begin(walk);
        float sums[2][accs][count] = {};

        if constexpr (F::output_rows == 1) {
            static_assert(F::rest == 0 || !Tuning::one_row, "a tile of one row of outputs has stages that follow each other");
            // NOTE: as two loops it spilled 196 bytes with linear pixels and split-K.
            int stage = walk.first;
            do {
                const bool last = stage == walk.end - 1 && walk.is_last();
                if (F::rest == 0 || stage < F::whole_stages)
                    multiply_stage<scaled, 2, 0, accs>(sums, pixels, rings, pixel_place, own_filters, ping_pong, last, stage,
                                                       lane, header);
                else if constexpr (F::rest > 0)
                    multiply_stage<scaled, 1, 0, accs>(sums, pixels, rings, pixel_place, own_filters, ping_pong, last, stage,
                                                       lane, header);
            } while (++stage < walk.end);
        } else {
            // In each segment and its channels, only the first output row reads the first row of pixels, only the second the
            // last.
            for (int first = 0; first < F::row_stages; ++first) {
                multiply_stage<scaled, 2, 0, 1>(sums, pixels, rings, pixel_place, own_filters, ping_pong, false, first, lane,
                                                header);
                for (int stage = first + F::row_stages; stage < F::whole_stages; stage += F::row_stages)
                    multiply_stage<scaled, 2, 0, accs>(sums, pixels, rings, pixel_place, own_filters, ping_pong, false,
                                                       stage, lane, header);
                // NOTE: factors belong to channels; the row of pixels past the last row of filters takes these.
                multiply_stage<scaled, 2, 1, accs>(sums, pixels, rings, pixel_place, own_filters, ping_pong, false,
                                                   F::whole_stages - F::row_stages + first, lane, header);
            }
            if constexpr (F::rest > 0) {
                for (int first = F::whole_stages; first < F::whole_stages + F::rest_row_stages; ++first) {
                    multiply_stage<scaled, 1, 0, 1>(sums, pixels, rings, pixel_place, own_filters, ping_pong, false, first,
                                                    lane, header);
                    for (int stage = first + F::rest_row_stages; stage < F::stages; stage += F::rest_row_stages)
                        multiply_stage<scaled, 1, 0, accs>(sums, pixels, rings, pixel_place, own_filters, ping_pong, false,
                                                           stage, lane, header);
                    multiply_stage<scaled, 1, 1, accs>(sums, pixels, rings, pixel_place, own_filters, ping_pong, false,
                                                       F::stages - F::rest_row_stages + first - F::whole_stages, lane,
                                                       header);
                }
            }
        }
        if constexpr (Tuning::one_row) outputs.numbers.output_row = tiles.row(tile);
        float* const exchanged = reinterpret_cast<float*>(rings.base + Rings::shared_bytes);
        float both[Tuning::linear ? accs * count / 8 : 1][8];
        if constexpr (Tuning::linear) exchange_filters<Tuning::exchange>(sums, exchanged, warpgroup, thread, both);
        else exchange_states<Tuning::exchange>(sums, exchanged, warpgroup, thread);
        const auto& all = all_outputs<Tuning::linear>(sums[0], both);
        if constexpr (F::output_rows > 1) {
            constexpr int n16 = F::filters / 16;
#pragma unroll
            for (int output_row = 0; output_row < F::output_rows; ++output_row) {
                const PairOutputs<Problem, Tuning> of_row_outputs(batch, warpgroup, output_row);
                const auto& of_row = reinterpret_cast<const float (&)[n16][8]>(all[output_row * n16]);
                store_sums<Problem, Tuning>(of_row, 0, prepared, bias, y, batch, of_row_outputs, tile, pixels.pair, t,
                                            pixels.apart);
            }
        } else {
            store_tile<Problem, Tuning>(all, walk.shared_tile, rings, prepared, bias, y, batch, outputs, tile, pixels.pair, t,
                                        pixels.apart);
        }
    }
}

// `x`: a tensor map of the pixels. `w`: as in tensor_gemm.
template <class Problem, class Tuning, class Source, class... Filters>
__device__ __forceinline__ void tensor_winograd(const Source& x, const float* prepared, Bias<Problem> bias, float* y,
                                                long long batch, const Filters*... w) {
    static_assert((Tuning::linear ? !Problem::nhwc && !Problem::chwn && Problem::q % 2 == 0 : Problem::nhwc) &&
                      Phase<Problem>::whole,
                  "outputs are those of whole images, channels last, or channels first and no pair in two rows");
    static_assert(Problem::s >= 3 && Problem::stride_h == 1 && Problem::stride_w == 1 && Problem::dilation_w == 1,
                  "filters are 3 wide or wider and move pixel by pixel");
    const TensorRings<Pairs<Problem, Tuning>, Tuning> rings;
    const TensorTiles<Pairs<Problem, Tuning>, Tuning> tiles(batch);
    constexpr int multicast = Tuning::multicast;
    if (threadIdx.x == 0) rings.init();
    if constexpr (multicast > 1) meet_in_cluster();
    else __syncthreads();
    // NOTE: uniform within a warp, so that the compiler keeps stages and descriptors in uniform registers.
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (warpgroup == Tuning::warpgroups) {
        set_registers_down<Tuning::producer_registers>();
        wait_for_validated_filters<TensorRings<Pairs<Problem, Tuning>, Tuning>, Tuning>(threadIdx.x % 128);
        produce<Pairs<Problem, Tuning>, Tuning>(x, prepared, batch, tiles, rings, threadIdx.x % 128);
        if (TileWalk<Pairs<Problem, Tuning>, Tuning>(tiles).shares_tile()) {
            // NOTE: lanes that copied alone reconverge before the barriers that all threads take part in.
            __syncwarp();
            if constexpr (Tuning::split > 1) meet_in_cluster(), meet_in_cluster();
        }
    } else {
        validate_in_place<Problem, Tuning, TensorRings<Pairs<Problem, Tuning>, Tuning>>(prepared, w...);
        set_registers_up<Tuning::consumer_registers>();
        const unsigned* const flags = reinterpret_cast<const unsigned*>(prepared + Problem::first_prepared) +
                                      TensorFilters<Pairs<Problem, Tuning>, Tuning>::flags_at;
        bool scaled = false;
        for (int group = 0; group < Problem::groups; ++group) scaled |= flags[group] != 0;
        if (scaled) consume_pairs<Problem, Tuning, true>(prepared, bias, y, batch, tiles, rings, warpgroup);
        else consume_pairs<Problem, Tuning, false>(prepared, bias, y, batch, tiles, rings, warpgroup);
    }
    if constexpr (multicast > 1) {
        // NOTE: no CTA leaves while the others still send it filters, or announce empty stages to it.
        __syncwarp();
        meet_in_cluster();
    }
}

}  // namespace leanconv
