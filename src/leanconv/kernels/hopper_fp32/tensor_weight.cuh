// Gradient of the filters on tensor cores in float32's accuracy (or TF32's), for sm_90a.
//
// dw[k, tap, c] = sum over pixels of x[pixel + tap, c] dy[pixel, k]: a matrix product whose reduction, all output pixels of
// all images, is long, and neither of whose operands is known before. Each float32 is the sum of two float16
// (tensor_split.cuh), a product three products, as in tensor_gemm.cuh.
//
// A block has `warpgroups` consumers of 64 weights each, one warpgroup that converts dy, and one that copies. Where neighbours
// in a filter's row see neighbouring pixels (unit stride along rows), x is converted once for up to three of them: they meet
// dy, which lies in shared memory, moved by a row of pixels each (WeightGrid in tensor_weight_tiles.cuh).
// For a stage of 64 pixels, 128 channels, 3 taps and 64 filters:
//   tensor cores   3 taps of 12 wgmma m64n64k16 a consumer                        2304 cycles
//   issue slots    of a consumer's warp 260 instructions to convert x, 70 for each tap, products and sums (110 where
//                  filters have scales of their own); 330 to convert dy          some 1300 cycles of each scheduler
//   shared memory  copies in 400, dy read and written 290, x read 256, products 1152: 2100 cycles
//   L2             50 KiB: at 22 bytes a cycle 2330 cycles
// A stage takes some 4700 cycles: each consumer converts, multiplies and adds in turn, and two of them do not hide that.
// Without shared taps tiles have 128 weights and 128 filters, 4000 cycles for 1536 of tensor cores, where the converters of
// dy are the bound, 1400 for 64 filters; or 192 and 64, 3050 for 1152.
// Reached on an H200, 3 x 3, 32 images of 56 x 56, 256 channels and filters, burst: 171 TFLOP/s in NHWC with a workspace, 127
// without, where 16 blocks at most share a tile; 122 and 95 in NCHW. Without shared taps 120, 105, 87 and 72.
// Scales are powers of two: of x one for each weight's row and stage, of dy one for each filter and stage, or for all filters.
#pragma once

#include <device/epilogue.cuh>
#include <device/ptx/barrier.cuh>
#include <device/ptx/load.cuh>
#include <device/ptx/registers.cuh>
#include <device/ptx/wgmma.cuh>
#include <kernels/hopper_fp32/tensor_weight_copies.cuh>
#include <kernels/hopper_fp32/tensor_weight_operands.cuh>
#include <kernels/hopper_fp32/tensor_gemm.cuh>

namespace leanconv {

// The two rows of the tile that a thread has in operand A lie so far apart: where pixels are rows they are neighbours, which
// one load reads.
template <class Tuning>
constexpr int row_step = Tuning::x_rows ? 1 : 8;
template <class Tuning>
__device__ __forceinline__ int row_of_thread(int warpgroup) {
    return warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 * (Tuning::x_rows ? 2 : 1);
}

// Operand A of one stage: two weights of a thread, four sixteens of pixels.
template <class Problem, class Tuning>
struct WeightFragments {
    static constexpr bool exact = Tuning::products == 3, shared = Tuning::taps > 1;
    unsigned high[4][4], low[exact ? 4 : 1][4];
    float down[2];

    // Something of every fragment.
    __device__ __forceinline__ unsigned all() const {
        unsigned bits = 0;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            bits ^= high[i / 4][i % 4];
            if constexpr (exact) bits ^= low[i / 4][i % 4];
        }
        return bits;
    }

    // `row` of the tile and the one `row_step` behind it.
    __device__ __forceinline__ void load(const unsigned char* x, const PixelFactors<Problem, Tuning>& factors, int row, int t) {
        float values[2][4][4];
        read(values, x, row, t);
        if (!shared && factors.apart) factors.multiply(values, t);
#pragma unroll
        for (int i = 0; i < 2; ++i) down[i] = split_row<exact, shared>(high, low, i, values[i], unscaled_header());
    }

    // For one of the taps that share x.
    __device__ __forceinline__ void load_moved(const unsigned char* x, const PixelFactors<Problem, Tuning>& factors, int row,
                                               int t, int moved) {
        float values[2][4][4];
        read(values, x, row, t);
        factors.multiply_moved(values, t, moved);
#pragma unroll
        for (int i = 0; i < 2; ++i) down[i] = split_row<exact>(high, low, i, values[i], unscaled_header());
    }

    // Whether a row of this lane's has an infinity or NaN: its scale is the least of all.
    __device__ __forceinline__ bool infinite() const { return fmaxf(down[0], down[1]) > power_of_two(127 + 113); }

    static __device__ __forceinline__ void read(float (&values)[2][4][4], const unsigned char* x, int row, int t) {
        using Rings = WeightRings<Problem, Tuning>;
        if constexpr (Tuning::x_rows) load_rows(values, x, row, t);
        else {
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    unsigned two[2];
                    ld_shared_v2_u32(two, reinterpret_cast<const float*>(x) + (row + 8 * i) * Rings::x_pitch + 8 * j + 2 * t);
                    values[i][j / 2][j % 2 * 2] = __uint_as_float(two[0]);
                    values[i][j / 2][j % 2 * 2 + 1] = __uint_as_float(two[1]);
                }
        }
    }

    // NOTE: neighbouring lanes have every second pixel, whose units of 16 bytes the swizzle puts into banks of their own: half
    // a warp, with the pixels of four lanes and eight channels, meets each bank once.
    static __device__ __forceinline__ void load_rows(float (&values)[2][4][4], const unsigned char* x, int row, int t) {
        const int channel = row % 32;
        const unsigned char* const piece = x + row / 32 * WeightRings<Problem, Tuning>::piece_bytes;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int pixel = 2 * t + j % 2;
            const unsigned char* const at = piece + pixel * 128 + (channel / 4 ^ pixel) * 16 + channel % 4 * 4;
#pragma unroll
            for (int sixteen = 0; sixteen < 4; ++sixteen) {
                unsigned two[2];
                ld_shared_v2_u32(two, reinterpret_cast<const float*>(at + (2 * sixteen + j / 2) * 1024));
                values[0][sixteen][j] = __uint_as_float(two[0]), values[1][sixteen][j] = __uint_as_float(two[1]);
            }
        }
    }
};

// The products of one stage and one chunk of filters, the small ones first.
template <class Problem, class Tuning>
__device__ __forceinline__ void multiply_weights(float (&partial)[32], const WeightFragments<Problem, Tuning>& weights,
                                                 const unsigned char* split) {
    constexpr int step = split_step<Tuning>;
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

// Adds a chunk's partial sums, times the inverse scales of their rows and columns: one instruction for a sum where all columns
// have one scale, which a row's is multiplied with before.
__device__ __forceinline__ void promote_scaled(float (&sums)[32], const float (&partial)[32], const float (&down)[2],
                                               const float* scales) {
    float same[4];
    ld_shared_v4(same, scales + 16);
    if (fminf(fminf(same[0], same[1]), fminf(same[2], same[3])) > 0.0f) {
        const float both[2] = {down[0] * same[0], down[1] * same[0]};
#pragma unroll
        for (int i = 0; i < 32; ++i) sums[i] = fmaf(partial[i], both[i / 2 % 2], sums[i]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float four[4];
        ld_shared_v4(four, scales + 4 * i);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float& sum = sums[8 * i + j];
            sum = fmaf(partial[8 * i + j], down[j / 2 % 2] * four[j / 4 * 2 + j % 2], sum);
        }
    }
}

// Stores a thread's sums from number `first` on, which is even: four of them are two rows and two columns.
template <class Problem, class Tuning, int count>
__device__ __forceinline__ void store_weights(float* dw, const float (&sums)[count], int first,
                                              const WeightTiles<Problem, Tuning>& tile, int row, int t) {
    constexpr int share = Tuning::taps, of_row = WeightRow<Problem, Tuning>::of_row;
    const WeightRow<Problem, Tuning> rows[2] = {WeightRow<Problem, Tuning>(tile.first_row + row),
                                                WeightRow<Problem, Tuning>(tile.first_row + row + row_step<Tuning>)};
    constexpr bool pairs = Tuning::x_rows && Tuning::parts > 1;  // two channels at a time: a workspace is aligned
#pragma unroll
    for (int i = 0; i < count; ++i) {
        if (pairs && i / 2 % 2) continue;
        const bool second = (first + i) / 2 % 2;
        const int part = second ? rows[1].tap : rows[0].tap, s = part % of_row * share + (first + i) / 32 % share;
        const int channel = second ? rows[1].channel : rows[0].channel;
        const int of_eight = share == 1 ? (first + i) / 4 * 8 : (first + i) / (32 * share) * 64 + (first + i) % 32 / 4 * 8;
        const int in_group = tile.first_filter + of_eight + 2 * t + i % 2;
        if (part >= WeightTiles<Problem, Tuning>::taps || s >= Problem::s) continue;
        if (channel >= Problem::group_c || in_group >= Problem::group_k) continue;
        constexpr int taps = Problem::r * Problem::s;
        const int tap = part / of_row * Problem::s + s;
        const int64 k = tile.group * Problem::group_k + in_group;
        const int64 at = Problem::nhwc ? (k * taps + tap) * Problem::group_c + channel
            : Problem::chwn            ? (static_cast<int64>(channel) * taps + tap) * Problem::k + k
                                       : (k * Problem::group_c + channel) * taps + tap;
        if constexpr (pairs) *reinterpret_cast<float2*>(dw + at) = make_float2(sums[i], sums[i + 2]);
        else if constexpr (Tuning::parts > 1) dw[at] = sums[i];
        else dw[at] = finish<Problem>(sums[i], 0.0f, held_by<Problem>(dw + at, true));
    }
}

// One warpgroup's products.
template <class Problem, class Tuning>
__device__ __forceinline__ void sum_weights(float* dw, const WeightTiles<Problem, Tuning>& tile,
                                            const WeightRings<Problem, Tuning>& rings,
                                            const PartRange<Problem, Tuning>& range, int warpgroup) {
    using Rings = WeightRings<Problem, Tuning>;
    using Grid = WeightGrid<Problem, Tuning>;
    constexpr int chunks = Tuning::chunks, taps = Tuning::taps, partials = Tuning::partials;
    static_assert(taps == 1 || (chunks == 1 && partials == 1), "taps share x one after the other");
    static_assert(partials == 1 || partials == 2, "one partial sum, or two in turn");
    static_assert(Tuning::split_stages >= (Tuning::turns ? chunks : partials),
                  "a warpgroup multiplies with so many stages before the others free one");
    const int lane = threadIdx.x % 32, t = lane % 4, row = row_of_thread<Tuning>(warpgroup);
    RingPlace<Tuning::x_stages> x_place;
    RingPlace<Tuning::split_stages> place, done;
    RingPlace<Rings::code_stages> code_place;
    float sums[chunks * taps][32];
#pragma unroll
    for (int chunk = 0; chunk < chunks * taps; ++chunk)
#pragma unroll
        for (int i = 0; i < 32; ++i) sums[chunk][i] = 0.0f;

    if (range.first < range.end) {
        const Turns<Tuning> turns(warpgroup);
        for (int stage = range.first; stage < range.end; ++stage, code_place.advance()) {
            WeightFragments<Problem, Tuning> weights;
            const PixelFactors<Problem, Tuning> factors(rings, code_place);
            mbarrier_wait_parity(rings.x_full(x_place.stage), x_place.parity);
            // NOTE: or NVRTC 13.0 keeps the places of two loads in registers, and has too few for the rest.
            const int fresh = taps > 1 ? row + zero_after(static_cast<unsigned>(stage)) : row;
            weights.load(rings.x(x_place.stage), factors, fresh, t);
            float partial[partials][32];
            if constexpr (taps > 1) {
                // Where factors of pixels, or infinities, tell the taps apart, each has x converted anew.
                const bool anew = factors.apart || __any_sync(0xffffffffu, weights.infinite());
                const unsigned char* const x = rings.x(x_place.stage);
                mbarrier_wait_parity(rings.split_full(place.stage), place.parity);
#pragma unroll
                for (int tap = 0; tap < taps; ++tap) {
                    const int moved = Grid::moved(tap);
                    if (anew) weights.load_moved(x, factors, row, t, moved);
                    if (tap == 0) turns.wait(weights);
                    wgmma_fence(partial[0], weights.high, weights.low);
                    multiply_weights(partial[0], weights, rings.split(place.stage) + moved * 128);
                    wgmma_commit_group();
                    if (tap == (anew ? taps - 1 : 0)) {
                        __syncwarp();
                        if (lane == 0) mbarrier_arrive(rings.x_free(x_place.stage));
                    }
                    if (tap == taps - 1) turns.pass(stage == range.end - 1);
                    wgmma_wait_group<0>(partial[0], weights.high, weights.low);
                    promote_scaled(sums[tap], partial[0], weights.down, rings.scales(place.stage) + t * Rings::scale_pitch);
                }
                __syncwarp();
                if (lane == 0) mbarrier_arrive(rings.split_free(place.stage));
                x_place.advance();
                place.advance();
                continue;
            }
#pragma unroll
            for (int chunk = 0; chunk < chunks; ++chunk) {
                float (&now)[32] = partial[chunk % partials];
                mbarrier_wait_parity(rings.split_full(place.stage), place.parity);
                if (chunk == 0) turns.wait(weights);
                if (chunk == 0 || partials == 1) wgmma_fence(now, weights.high, weights.low);
                else wgmma_fence(now);
                multiply_weights(now, weights, rings.split(place.stage));
                wgmma_commit_group();
                place.advance();
                if (chunk == 0) {
                    // NOTE: not before the products that take the loaded values (ld_shared_v4 says why).
                    __syncwarp();
                    if (lane == 0) mbarrier_arrive(rings.x_free(x_place.stage));
                    x_place.advance();
                }
                if (partials == 2 && chunk > 0) {
                    // The sums of the chunk before are added while these products are under way.
                    float (&before)[32] = partial[(chunk - 1) % 2];
                    wgmma_wait_group<1>(before);
                    promote_scaled(sums[chunk - 1], before, weights.down, rings.scales(done.stage) + t * Rings::scale_pitch);
                    __syncwarp();
                    if (lane == 0) mbarrier_arrive(rings.split_free(done.stage));
                    done.advance();
                }
                if (chunk == chunks - 1) turns.pass(stage == range.end - 1);
                if (partials == 1 || chunk == chunks - 1) {
                    wgmma_wait_group<0>(now, weights.high, weights.low);
                    promote_scaled(sums[chunk], now, weights.down, rings.scales(done.stage) + t * Rings::scale_pitch);
                    __syncwarp();
                    if (lane == 0) mbarrier_arrive(rings.split_free(done.stage));
                    done.advance();
                }
            }
        }
    }
    constexpr int count = 32 * chunks * taps;
    const float (&all)[count] = reinterpret_cast<const float (&)[count]>(sums);
    if constexpr (Tuning::split == 1) {
        store_weights<Problem, Tuning>(dw, all, 0, tile, row, t);
    } else {
        constexpr int threads = 128 * Tuning::warpgroups, share = count / Tuning::split;
        static_assert(count % Tuning::split == 0 && share % 2 == 0, "the blocks of a cluster share a thread's sums evenly");
        static_assert(count * threads * 4 <= Rings::bytes, "the rings take the sums of a tile");
        float* const mine = reinterpret_cast<float*>(rings.base) + threadIdx.x;
        barrier_sync(15, threads);  // the stages of this block have been read
#pragma unroll
        for (int i = 0; i < count; ++i) mine[i * threads] = all[i];
        meet_in_cluster();
        const int first = static_cast<int>(cluster_rank()) * share;
        float total[share];
#pragma unroll
        for (int i = 0; i < share; ++i) {
            total[i] = cluster_load(mine + (first + i) * threads, 0);
#pragma unroll
            for (int other = 1; other < Tuning::split; ++other) total[i] += cluster_load(mine + (first + i) * threads, other);
        }
        meet_in_cluster();
        store_weights<Problem, Tuning>(dw, total, first, tile, row, t);
    }
}

// `dw` is the gradient, or with several parts room for as many.
template <class Problem, class Tuning, class X, class DY>
__device__ __forceinline__ void tensor_weight(const X& x, const DY& dy, float* dw, long long batch) {
    using Tiles = WeightTiles<Problem, Tuning>;
    static_assert(Tuning::converter_registers <= 65536 / (128 * (Tuning::warpgroups + 2)) / 8 * 8,
                  "setmaxnreg.dec is no legal instruction for more registers than a thread has");
    const WeightRings<Problem, Tuning> rings;
    const int number = static_cast<int>(blockIdx.x) / Tuning::split, part = number / Tiles::count;
    const Tiles tile(number % Tiles::count);
    if (threadIdx.x == 0) rings.init();
    __syncthreads();
    const PartRange<Problem, Tuning> range(batch, part);
    const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
    if (warpgroup < Tuning::warpgroups) {
        set_registers_up<Tuning::consumer_registers>();
        constexpr int64 weights = static_cast<int64>(Problem::k) * Problem::group_c * (Problem::r * Problem::s);
        sum_weights<Problem, Tuning>(dw + part * weights, tile, rings, range, warpgroup);
        return;
    }
    if (warpgroup == Tuning::warpgroups) {
        set_registers_down<Tuning::converter_registers>();
        split_dy<Problem, Tuning>(tile, rings, range, batch, thread);
    } else {
        set_registers_down<Tuning::producer_registers>();
        copy_operands<Problem, Tuning>(x, dy, batch, tile, rings, range, thread);
    }
    if constexpr (Tuning::split > 1) {
        // NOTE: the warps of lanes that copied alone meet again before the barriers that all threads take part in.
        __syncwarp();
        meet_in_cluster();
        meet_in_cluster();
    }
}

}  // namespace leanconv
