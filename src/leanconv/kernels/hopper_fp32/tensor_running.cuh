// The consumers of tensor_gemm with one product (TF32 accuracy): hi * hi alone, and a scale that runs along the reduction.
//
//   x * s = hi: 11 bits, as many as TF32 has;   x w = hi hi / (s_x s_w)
//
// Numerics   A row's sums stay valid while its scale does. So a row of pixels keeps one scale from its first stage on, with
//            which the largest number so far is below 2^11. Four binary places are spare. A larger number makes the row take a
//            smaller scale; its sums are multiplied by the quotient, a power of two, which rounds nothing. Normally
//            distributed pixels make that rare; rows of zeros need nothing. Numbers down to 2^-25 of the largest in the window
//            keep 11 bits; smaller ones lose less than 2^-35 of that largest.
// CTA tile   64 * warpgroups pixels x mma_n filters: one MMA tile. Sums stay in the tensor core over the whole reduction.
// One stage  4 wgmma (k16 steps) of this stage. Between them: load the next stage's pixels, find maxima, split them. The next
//            stage's first wgmma is issued before these are waited for.
// Registers  no partial sums; operand A of two stages.
// Work       of a stage of 128 pixels x 256 filters:
//              tensor core    4 products of 128 cycles for each of two warpgroups: 1024 cycles
//              shared memory  copies write 32 KiB of pixels and 32 of filters; loads read 32, products 64: 1280 cycles;
//                             1115 where a copy of pixels serves a row of 3 taps (rows of 56 pixels)
//              issue          some 170 instructions a warp, two warps a scheduler: 340 cycles
// Measured   figure: opencnn-nhwc-tf32 tensor_gemm/tf32 mean = 1.04
// Explored (H200, 4835d9c): 3x3, NHWC, 256 filters and channels, busy card: 522 TFLOP/s; 474 with a copy for each tap,
//            458 before conversion and products were interleaved.
#pragma once

#include <device/ptx/mma.cuh>
#include <device/ptx/sync.cuh>
#include <device/pipeline/outputs.cuh>
#include <kernels/hopper_fp32/tensor_stage.cuh>

namespace leanconv {

// The scale of one row of pixels.
struct RunningScale {
    static constexpr unsigned spare = 4;  // binary places for larger numbers
    unsigned biased;                      // exponent
    bool begun;                           // whether the row has had anything but zeros

    __device__ __forceinline__ explicit RunningScale(const SplitHeader& header) : biased(header.most), begun(false) {}

    // Makes room for `largest`. Returns what the sums so far must be multiplied by.
    __device__ __forceinline__ float make_room(float largest) {
        const unsigned exponent = biased_exponent(largest);
        float ratio = 1.0f;
        if (exponent + biased > 268) {
            const unsigned next = 268 - spare - exponent;
            if (begun) ratio = biased - next < 127 ? power_of_two(127 + next - biased) : 0.0f;
            biased = next;
        }
        begun |= largest != 0.0f;
        return ratio;
    }
    // The largest magnitude of a row, of which a thread has a quarter.
    static __device__ __forceinline__ float largest_of(const float (&x)[4][4]) {
        float largest = fabsf(x[0][0]);
#pragma unroll
        for (int j = 1; j < 16; ++j) largest = fmaxf(largest, fabsf(x[j / 4][j % 4]));
        const float of_two = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        return fmaxf(of_two, __shfl_xor_sync(0xffffffffu, of_two, 2));
    }
    // A row's quarter of 64 elements as fragments, registers `row` and `row` + 2 of each k16 step.
    __device__ __forceinline__ void convert(unsigned (&fragments)[4][4], int row, const float (&x)[4][4]) const {
        const float scale = power_of_two(biased);
#pragma unroll
        for (int j = 0; j < 8; ++j)
            fragments[j / 2][j % 2 * 2 + row] = split_high(x[j / 2][j % 2 * 2], x[j / 2][j % 2 * 2 + 1], scale);
    }
    __device__ __forceinline__ float inverse_scale(const SplitHeader& header) const {
        return power_of_two(254 - biased) * header.inverse_scale;
    }
};

// A consumer warpgroup: all tiles of the CTA.
template <class Problem, class Tuning>
__device__ __forceinline__ void consume_running(const float* prepared_filters, Bias<Problem> bias, float* y, long long batch,
                                                const TensorTiles<Problem, Tuning>& tiles,
                                                const TensorRings<Problem, Tuning>& rings, int warpgroup) {
    using F = TensorFilters<Problem, Tuning>;
    using Fragments = unsigned[4][4];
    static_assert(F::n_tiles == 1 && Tuning::products == 1, "one product takes all filters of a tile");
    constexpr int count = Tuning::mma_n / 2;
    const float* const prepared = prepared_filters + Problem::first_prepared;
    const SplitHeader header = *reinterpret_cast<const SplitHeader*>(prepared);
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, t = lane % 4;
    const int first_row = warpgroup * 64 + warp * 16, row = first_row + spread_row(lane / 4);
    RingPlace<Tuning::pixel_stages> pixel_place, release_place;
    RingPlace<Tuning::filter_stages> filter_place;
    ResidentValuesOf<Problem, Tuning> images;
    for (TileWalk<Problem, Tuning> walk(tiles); walk.valid(); walk.advance()) {
        const Offset<Problem> tile = walk.tile;
        const int group = tiles.group(tile);
        const bool scaled = reinterpret_cast<const unsigned*>(prepared)[F::flags_at + group] != 0;
        const float* const factors = prepared + F::factors_at + group * F::stages * split_depth;
        const TapMask<Problem, Tuning> mask(tiles, tile, row);
        prefetch_tile<Problem, Tuning>(bias, y, tiles, tile, first_row, lane);
        if constexpr (F::resident) images.begin(tiles, walk, row);
        int at[2] = {row, row + 8};
        if constexpr (F::by_row) {
            const int in_row = static_cast<int>(tiles.first_pixel(tile) % Problem::q);
#pragma unroll
            for (int i = 0; i < 2; ++i) at[i] += (in_row + at[i]) / Problem::q * (Problem::s - 1);
        }
        RunningScale scales[2] = {RunningScale(header), RunningScale(header)};
        float sums[1][count], ratio[2];
        Fragments even, odd;
        int stage = walk.first;

        float x[2][4][4];
        const auto load = [&](int of_stage) {
            if constexpr (F::resident) {
                images.load(x, rings, factors + of_stage * split_depth, scaled, t, of_stage);
                return;
            }
            const int tap = of_stage % F::tap_stages;
            if (tap == 0) mbarrier_wait_parity(rings.pixels_full(pixel_place.stage), pixel_place.parity);
            StageValues<Problem, Tuning>::load(x, rings.pixel_stage(pixel_place.stage), factors + of_stage * split_depth,
                                               scaled, {at[0] + tap, at[1] + tap}, t, mask, of_stage);
            if (tap == F::tap_stages - 1) pixel_place.advance();
        };
        const auto make_room = [&] {
            if constexpr (F::resident) images.zero_outside(x);
#pragma unroll
            for (int i = 0; i < 2; ++i) ratio[i] = scales[i].make_room(RunningScale::largest_of(x[i]));
        };
        int before = -1;
        const auto multiply = [&](Fragments& now, Fragments& next) {
            const int here = filter_place.stage;
            const bool more = stage + 1 < walk.end;
            mbarrier_wait_parity(rings.filters_full(here), filter_place.parity);
            const MatrixDescriptor filters = matrix_descriptor(rings.filter_stage(here), 0, 1024, 128);
            wgmma_fence(now);
            wgmma_f16(sums[0], now[0], filters, true);
            wgmma_commit_group();
            // The products of the stage before are finished while this one runs.
            wgmma_wait_group<1>(next);
            if (before >= 0) mbarrier_arrive_warp(rings.filters_empty(before), lane);
            before = here;
            if (more) load(stage + 1);
            wgmma_f16(sums[0], now[1], filters + 32, true);
            if (more) make_room();
            wgmma_f16(sums[0], now[2], filters + 64, true);
            if (more) scales[0].convert(next, 0, x[0]);
            wgmma_f16(sums[0], now[3], filters + 96, true);
            wgmma_commit_group();
            filter_place.advance();
            // NOTE: released after the products that read the loaded values were issued (ld_shared_v4 says why).
            __syncwarp();
            if constexpr (F::resident) {
                images.stages.release(rings, stage, lane);
            } else if (stage % F::tap_stages == F::tap_stages - 1) {
                mbarrier_arrive_warp(rings.pixels_empty(release_place.stage), lane);
                release_place.advance();
            }
            if (more) scales[1].convert(next, 1, x[1]);
            // NOTE: the four warps wait for the products together, and the compiler must know that all threads of a warp do.
            if (more && __any_sync(0xffffffffu, barrier_or(2 + warpgroup, 128, ratio[0] != 1.0f || ratio[1] != 1.0f))) {
                wgmma_wait_group<0>(sums[0], now);
#pragma unroll
                for (int i = 0; i < count; ++i) sums[0][i] *= ratio[i / 2 % 2];
                wgmma_before_fence(sums[0]);
            }
        };
#pragma unroll
        for (int i = 0; i < count; ++i) sums[0][i] = 0.0f;
        wgmma_fence(sums[0]);
        load(stage);
        make_room();
#pragma unroll
        for (int i = 0; i < 2; ++i) scales[i].convert(even, i, x[i]);
        while (true) {
            multiply(even, odd);
            if (++stage == walk.end) break;
            multiply(odd, even);
            if (++stage == walk.end) break;
        }
        wgmma_wait_group<0>(sums[0], even, odd);
        mbarrier_arrive_warp(rings.filters_empty(before), lane);
        const float back[2] = {scales[0].inverse_scale(header), scales[1].inverse_scale(header)};
#pragma unroll
        for (int i = 0; i < count; ++i) sums[0][i] *= back[i / 2 % 2];
        store_tile<Problem, Tuning>(as_n16(sums), walk.shared_tile, rings, prepared, bias, y, batch, tiles, tile, row, t);
    }
}

}  // namespace leanconv
