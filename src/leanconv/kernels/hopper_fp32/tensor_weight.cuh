// tensor_weight: gradient of the filters on Hopper tensor cores (wgmma); float32 in, float32 (or TF32) accuracy out.
//
//   dw[k, tap, c] = sum over pixels of x[pixel + tap, c] * dy[pixel, k]        pixel: all output pixels of all images
//
// Requires   sm_90a; at least 16 channels and filters a group if there are several; fewer than 2^31 output pixels.
// Volumes    x by an im2col map of five axes; slices of a filter are rows behind one another.
// Numerics   float32 = hi + lo (two float16; split.cuh); one product = 3 wgmma; partial sums of 64 pixels added in float32.
//            Scales are powers of two: of x one for each weight's row and stage, of dy one for each filter and stage, or for
//            all filters. Factors of pixels (tensor_weight_tiles.cuh) where x and dy vary in opposite directions.
// CTA tile   64 * warpgroups weights (tap, channel) x 64 * n_tiles filters, 64 pixels a stage; or, with unit stride along
//            rows, 64 * warpgroups channels x up to 3 taps x 64 filters: x is converted once for all taps of a row.
//            Split-K by cluster (`split`), or through a workspace (`split_k`), in fixed order, no atomics.
// Roles      warpgroups 0..n-1  consumers: load x, split it into operand A, wgmma, scale and add, store
//            warpgroup n        converters: dy into operand B, two float16, in shared memory
//            warpgroup n+1      producers: x and dy (TMA boxes, or cp.async of elements); codes of the pixels' factors
// Pipelines  x       x_stages      full: producers -> consumers, empty: consumers -> producers
//            dy      dy_stages     full: producers -> converters (and scanners), empty: back
//            split   split_stages  full: converters -> consumers, empty: consumers -> converters
//            codes   16 stages     full: scanners -> converters and consumers
// One stage  64 pixels, 128 channels, 3 taps, 64 filters; bounds:
//   tensor cores   3 taps of 12 wgmma m64n64k16 a consumer                        2304 cycles
//   issue slots    of a consumer's warp 260 instructions to convert x, 70 for each tap, products and sums (110 where
//                  filters have scales of their own); 330 to convert dy          some 1300 cycles of each scheduler
//   shared memory  copies in 400, dy read and written 290, x read 256, products 1152: 2100 cycles
//   L2             50 KiB: at 22 bytes a cycle 2330 cycles
// Explored (H200, abe409f): a stage takes some 4700 cycles: each consumer converts, multiplies and adds one after the
//            other, and two of them do not hide that. Without shared taps 128 weights x 128 filters take 4000 for 1536
//            of tensor cores: the converters of dy are the bound.
// Measured   figure: opencnn-nhwc-wgrad tensor_weight/pytorch mean = 1.53
//            figure: opencnn-nchw-wgrad tensor_weight/pytorch mean = 1.19
#pragma once

#include <device/epilogue.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/mma.cuh>
#include <device/ptx/sync.cuh>
#include <kernels/hopper_fp32/tensor_stage.cuh>
#include <kernels/hopper_fp32/tensor_weight_operands.cuh>

namespace leanconv {

// The two rows of the tile that a thread has in operand A are so many rows apart: by TMA neighbours, which one load reads.
template <class Tuning>
constexpr int row_step = Tuning::x_tma ? 1 : 8;
template <class Tuning>
__device__ __forceinline__ int row_of_thread(int warpgroup) {
    return warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 * (Tuning::x_tma ? 2 : 1);
}

// Operand A of one stage: two weights of a thread, four k16 steps of pixels. `row` is a row of the tile, the other one is
// `row_step` behind it.
template <class Problem, class Tuning>
struct WeightFragments : SplitFragments<Tuning::products == 3> {
    using Base = SplitFragments<Tuning::products == 3>;
    using Base::inverse_scale, Base::exact, Base::high, Base::low;
    using Factors = PixelFactors<Problem, Tuning>;

    __device__ __forceinline__ void load(const unsigned char* x, const Factors& factors, int row, int t) {
        float values[2][4][4];
        read(values, x, row, t);
        if (Tuning::taps == 1 && factors.apart) factors.multiply(values, t);
        split<(Tuning::taps > 1)>(values);
    }
    // For one of the taps that share x.
    __device__ __forceinline__ void load_shifted(const unsigned char* x, const Factors& factors, int row, int t, int shift) {
        float values[2][4][4];
        read(values, x, row, t);
        factors.multiply_shifted(values, t, shift);
        split<false>(values);
    }
    // Whatever the factors are.
    __device__ __forceinline__ void load_unscaled(const unsigned char* x, int row, int t) {
        float values[2][4][4];
        read(values, x, row, t);
        split<false>(values);
    }

    template <bool strict>
    __device__ __forceinline__ void split(const float (&values)[2][4][4]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) inverse_scale[i] = split_row<exact, strict>(high, low, i, values[i], unscaled_header());
    }
    // Whether a row of this lane's has an infinity or NaN: its scale is the least of all.
    __device__ __forceinline__ bool infinite() const { return fmaxf(inverse_scale[0], inverse_scale[1]) > power_of_two(127 + 113); }

    // NOTE: by TMA neighbouring lanes have every second pixel, whose units of 16 bytes the swizzle puts into banks of their own:
    // half a warp, with the pixels of four lanes and eight channels, has no bank conflicts.
    static __device__ __forceinline__ void read(float (&values)[2][4][4], const unsigned char* x, int row, int t) {
        using Rings = WeightRings<Problem, Tuning>;
        unsigned two[2];
        if constexpr (Tuning::x_tma) {
            const int channel = row % 32;
            const unsigned char* const box = x + row / 32 * Rings::x_box_bytes;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int pixel = 2 * t + j % 2;
                const unsigned char* const at = box + pixel * 128 + (channel / 4 ^ pixel) * 16 + channel % 4 * 4;
#pragma unroll
                for (int step = 0; step < 4; ++step) {
                    ld_shared_v2_u32(two, reinterpret_cast<const float*>(at + (2 * step + j / 2) * 1024));
                    values[0][step][j] = __uint_as_float(two[0]), values[1][step][j] = __uint_as_float(two[1]);
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    ld_shared_v2_u32(two, reinterpret_cast<const float*>(x) + (row + 8 * i) * Tuning::x_pitch + 8 * j + 2 * t);
                    values[i][j / 2][j % 2 * 2] = __uint_as_float(two[0]);
                    values[i][j / 2][j % 2 * 2 + 1] = __uint_as_float(two[1]);
                }
        }
    }
};

// The products of one stage and 64 filters, the small ones first.
template <class Problem, class Tuning>
__device__ __forceinline__ void multiply_weights(float (&partial)[32], const WeightFragments<Problem, Tuning>& weights,
                                                 const unsigned char* split) {
    constexpr int step = k16_bytes<Tuning>;
    const auto high = split_operand<Tuning>(split);
    if constexpr (Tuning::products == 3) {
        const auto low = split_operand<Tuning>(split + WeightRings<Problem, Tuning>::half_bytes);
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_f16(partial, weights.low[i], high + step * i, i > 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_f16(partial, weights.high[i], low + step * i, true);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma_f16(partial, weights.high[i], high + step * i, Tuning::products == 3 || i > 0);
}

// Adds the partial sums of 64 filters, times the inverse scales of their rows and columns: one instruction for a sum where all
// columns have one scale, which a row's is multiplied with before.
__device__ __forceinline__ void promote_scaled(float (&sums)[32], const float (&partial)[32], const float (&inverse_scale)[2],
                                               const float* scales) {
    float same[4];
    ld_shared_v4(same, scales + 16);
    if (fminf(fminf(same[0], same[1]), fminf(same[2], same[3])) > 0.0f) {
        const float both[2] = {inverse_scale[0] * same[0], inverse_scale[1] * same[0]};
        promote(sums, partial, both);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float four[4];
        ld_shared_v4(four, scales + 4 * i);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float& sum = sums[8 * i + j];
            sum = fmaf(partial[8 * i + j], inverse_scale[j / 2 % 2] * four[j / 4 * 2 + j % 2], sum);
        }
    }
}

// Stores a thread's sums from number `first` on, which is even: four of them are two rows and two columns.
template <class Problem, class Tuning, int count>
__device__ __forceinline__ void store_weights(float* dw, const float (&sums)[count], int first,
                                              const WeightTiles<Problem, Tuning>& tile, int row, int t) {
    using Row = WeightRow<Problem, Tuning>;
    constexpr int share = Tuning::taps, of_row = Row::of_row, taps = filter_taps<Problem>;
    const Row rows[2] = {Row(tile.first_row + row), Row(tile.first_row + row + row_step<Tuning>)};
    constexpr bool pairs = Tuning::x_tma && Tuning::split_k > 1;  // two channels at a time: a workspace is aligned
#pragma unroll
    for (int i = 0; i < count; ++i) {
        if (pairs && i / 2 % 2) continue;
        const int number = first + i;
        const bool second = number / 2 % 2;
        const int tap_group = second ? rows[1].tap : rows[0].tap, s = tap_group % of_row * share + number / 32 % share;
        const int channel = second ? rows[1].channel : rows[0].channel;
        const int in_tile = share == 1 ? number / 4 * 8 : number / (32 * share) * 64 + number % 32 / 4 * 8;
        const int in_group = tile.first_filter + in_tile + 2 * t + i % 2;
        if (tap_group >= WeightTiles<Problem, Tuning>::taps || s >= Problem::s) continue;
        if (channel >= Problem::group_c || in_group >= Problem::group_k) continue;
        const int tap = tap_group / of_row * Problem::s + s;
        const int64 k = tile.group * Problem::group_k + in_group;
        const int64 at = Problem::nhwc ? (k * taps + tap) * Problem::group_c + channel
            : Problem::chwn            ? (static_cast<int64>(channel) * taps + tap) * Problem::k + k
                                       : (k * Problem::group_c + channel) * taps + tap;
        if constexpr (pairs) *reinterpret_cast<float2*>(dw + at) = make_float2(sums[i], sums[i + 2]);
        else if constexpr (Tuning::split_k > 1) dw[at] = sums[i];
        else dw[at] = finish<Problem>(sums[i], 0.0f, held_by<Problem>(dw + at, true));
    }
}

// Stores the sums of a warpgroup's tile: the block's own, or its share of those of the cluster, added in the order of ranks
// through the rings, which nobody needs any more.
template <class Problem, class Tuning, int count>
__device__ __forceinline__ void store_tile(float* dw, const float (&sums)[count], const WeightTiles<Problem, Tuning>& tile,
                                           const WeightRings<Problem, Tuning>& rings, int row, int t) {
    if constexpr (Tuning::split == 1) {
        store_weights<Problem, Tuning>(dw, sums, 0, tile, row, t);
    } else {
        constexpr int threads = 128 * Tuning::warpgroups, share = count / Tuning::split;
        static_assert(count % Tuning::split == 0 && share % 2 == 0, "the blocks of a cluster share a thread's sums evenly");
        static_assert(count * threads * 4 <= WeightRings<Problem, Tuning>::bytes, "the rings take the sums of a tile");
        float* const mine = reinterpret_cast<float*>(rings.base) + threadIdx.x;
        barrier_sync(15, threads);  // the stages of this block have been read
#pragma unroll
        for (int i = 0; i < count; ++i) mine[i * threads] = sums[i];
        meet_in_cluster();
        const int first = static_cast<int>(cluster_rank()) * share;
        float total[share];
#pragma unroll
        for (int i = 0; i < share; ++i) total[i] = cluster_sum<Tuning::split>(mine + (first + i) * threads);
        meet_in_cluster();
        store_weights<Problem, Tuning>(dw, total, first, tile, row, t);
    }
}

// One consumer warpgroup: all products of a tile.
template <class Problem, class Tuning>
__device__ __forceinline__ void sum_weights(float* dw, const WeightTiles<Problem, Tuning>& tile,
                                            const WeightRings<Problem, Tuning>& rings,
                                            const StageRange<Problem, Tuning>& range, int warpgroup) {
    using Rings = WeightRings<Problem, Tuning>;
    constexpr int n_tiles = Tuning::n_tiles, taps = Tuning::taps, partials = Tuning::partials;
    static_assert(taps == 1 || (n_tiles == 1 && partials == 1), "taps share x one after the other");
    static_assert(partials == 1 || partials == 2, "one partial sum, or two alternately");
    static_assert(Tuning::split_stages >= (Tuning::ping_pong ? n_tiles : partials),
                  "a warpgroup multiplies with so many stages before the others release one");
    const int lane = threadIdx.x % 32, t = lane % 4, row = row_of_thread<Tuning>(warpgroup);
    RingPlace<Tuning::x_stages> x_place;
    RingPlace<Tuning::split_stages> place, done;
    RingPlace<Rings::code_stages> code_place;
    constexpr int count = 32 * n_tiles * taps;
    float sums[n_tiles * taps][32];
#pragma unroll
    for (int i = 0; i < count; ++i) sums[i / 32][i % 32] = 0.0f;

    if (range.first < range.end) {
        const PingPongOf<Tuning> ping_pong(warpgroup);
        for (int stage = range.first; stage < range.end; ++stage, code_place.advance()) {
            WeightFragments<Problem, Tuning> weights;
            const PixelFactors<Problem, Tuning> factors(rings, code_place);
            mbarrier_wait_parity(rings.x_full(x_place.stage), x_place.parity);
            const unsigned char* const x = rings.x(x_place.stage);
            // NOTE: or NVRTC 13.0 keeps the places of two loads in registers, and has too few for the rest.
            weights.load(x, factors, taps > 1 ? row + zero_after(static_cast<unsigned>(stage)) : row, t);
            float partial[partials][32];
            if constexpr (taps > 1) {
                // Where factors of pixels, or infinities, tell the taps apart, each has x converted anew.
                const bool anew = factors.apart || __any_sync(0xffffffffu, weights.infinite());
                mbarrier_wait_parity(rings.split_full(place.stage), place.parity);
#pragma unroll
                for (int tap = 0; tap < taps; ++tap) {
                    const int shift = ReductionPixels<Problem, Tuning>::shift(tap);
                    if (anew) weights.load_shifted(x, factors, row, t, shift);
                    if (tap == 0) ping_pong.wait(weights);
                    wgmma_fence(partial[0], weights.high, weights.low);
                    multiply_weights(partial[0], weights, rings.split(place.stage) + shift * 128);
                    wgmma_commit_group();
                    if (tap == (anew ? taps - 1 : 0)) warp_arrive(rings.x_empty(x_place.stage), lane);
                    if (tap == taps - 1) ping_pong.pass(stage == range.end - 1);
                    wgmma_wait_group<0>(partial[0], weights.high, weights.low);
                    promote_scaled(sums[tap], partial[0], weights.inverse_scale, rings.scales(place.stage) + t * Rings::scale_pitch);
                }
                warp_arrive(rings.split_empty(place.stage), lane);
                x_place.advance();
                place.advance();
                continue;
            }
#pragma unroll
            for (int i = 0; i < n_tiles; ++i) {
                float (&now)[32] = partial[i % partials];
                mbarrier_wait_parity(rings.split_full(place.stage), place.parity);
                if (i == 0) ping_pong.wait(weights);
                if (i == 0 || partials == 1) wgmma_fence(now, weights.high, weights.low);
                else wgmma_fence(now);
                multiply_weights(now, weights, rings.split(place.stage));
                wgmma_commit_group();
                place.advance();
                if (i == 0) {
                    // NOTE: not before the products that take the loaded values (ld_shared_v4 says why).
                    warp_arrive(rings.x_empty(x_place.stage), lane);
                    x_place.advance();
                }
                if (partials == 2 && i > 0) {
                    // The sums of the filters before are added while these products are under way.
                    float (&before)[32] = partial[(i - 1) % 2];
                    wgmma_wait_group<1>(before);
                    promote_scaled(sums[i - 1], before, weights.inverse_scale, rings.scales(done.stage) + t * Rings::scale_pitch);
                    warp_arrive(rings.split_empty(done.stage), lane);
                    done.advance();
                }
                if (i == n_tiles - 1) ping_pong.pass(stage == range.end - 1);
                if (partials == 1 || i == n_tiles - 1) {
                    wgmma_wait_group<0>(now, weights.high, weights.low);
                    promote_scaled(sums[i], now, weights.inverse_scale, rings.scales(done.stage) + t * Rings::scale_pitch);
                    warp_arrive(rings.split_empty(done.stage), lane);
                    done.advance();
                }
            }
        }
    }
    store_tile<Problem, Tuning>(dw, reinterpret_cast<const float (&)[count]>(sums), tile, rings, row, t);
}

// `dw` is the gradient, or with `split_k` above 1 room for as many partial sums.
template <class Problem, class Tuning, class X, class DY>
__device__ __forceinline__ void tensor_weight(const X& x, const DY& dy, float* dw, long long batch) {
    using Tiles = WeightTiles<Problem, Tuning>;
    static_assert(Tuning::converter_registers <= 65536 / (128 * (Tuning::warpgroups + 2)) / 8 * 8,
                  "setmaxnreg.dec is no legal instruction for more registers than a thread has");
    const WeightRings<Problem, Tuning> rings;
    const int number = static_cast<int>(blockIdx.x) / Tuning::split, slice = number / Tiles::count;
    const Tiles tile(number % Tiles::count);
    if (threadIdx.x == 0) rings.init();
    __syncthreads();
    const StageRange<Problem, Tuning> range(batch, slice);
    const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
    if (warpgroup < Tuning::warpgroups) {
        set_registers_up<Tuning::consumer_registers>();
        constexpr int64 weights = static_cast<int64>(Problem::k) * Problem::group_c * filter_taps<Problem>;
        sum_weights<Problem, Tuning>(dw + slice * weights, tile, rings, range, warpgroup);
        return;
    }
    if (warpgroup == Tuning::warpgroups) {
        set_registers_down<Tuning::converter_registers>();
        split_dy<Problem, Tuning>(tile, rings, range, batch, thread);
    } else {
        set_registers_down<Tuning::producer_registers>();
        WeightProducer<Problem, Tuning>{tile, rings, batch, thread}.copy_operands(x, dy, range);
    }
    if constexpr (Tuning::split > 1) {
        // NOTE: the warps of lanes that copied alone meet again before the barriers that all threads take part in.
        __syncwarp();
        meet_in_cluster();
        meet_in_cluster();
    }
}

}  // namespace leanconv
