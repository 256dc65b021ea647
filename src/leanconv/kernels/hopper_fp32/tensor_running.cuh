// Tier tf32's consumers of tensor_gemm: one product of float16 for one of float32, sums in the tensor core over the whole
// reduction.
//
//   x · s = hi: 11 bits, as many as TF32 has;   x w ≈ hi·hi / (s_x s_w)
//
// Sums stay as they are as long as their row's scale does. So a row of pixels has one scale from its first stage on, with
// which the largest number seen so far is below 2^11. Four binary places are left for larger ones; where one is too large
// even so, the row takes a smaller scale, and its sums are multiplied by the quotient of the two, which rounds nothing. Pixels
// of normal distribution make that rare, and rows of zeros have sums that need nothing. A number down to 2^-25 of the largest
// that its window holds keeps its 11 bits; smaller ones lose less than 2^-35 of that largest.
//
// Nothing is added in ordinary registers, and no partial sums are kept. That leaves registers for the fragments of the next
// stage, which are made between the products of this one; and the next one's first product is issued before these are waited
// for. Of one stage of 128 pixels x 256 filters:
//   tensor core    4 products of 128 cycles each for both warpgroups: 1024 cycles
//   shared memory  copies in 32 KiB of pixels and 32 of filters, loads 32 and reads 64 for the products: 1280 cycles; 1115
//                  where a copy of pixels serves a row of 3 taps
//   issue          some 170 instructions a warp, two warps a scheduler: 340 cycles
// Reached on an H200, 3 x 3 in NHWC, busy card: 522 TFLOP/s with 256 filters and channels; 474 with a copy for each tap, and 458
// before conversion and products were interleaved; 332 with 128 filters (192 x 128), 206 with 64.
#pragma once

#include <device/ptx/barrier.cuh>
#include <device/ptx/wgmma.cuh>
#include <kernels/hopper_fp32/tensor_output.cuh>
#include <kernels/hopper_fp32/tensor_products.cuh>
#include <kernels/hopper_fp32/tensor_values.cuh>

namespace leanconv {

// The scale of one row of pixels.
struct RunningScale {
    static constexpr unsigned spare = 4;  // binary places for larger numbers
    unsigned biased;                      // exponent
    bool begun;                           // whether the row has had anything but zeros

    __device__ __forceinline__ explicit RunningScale(const SplitHeader& header) : biased(header.most), begun(false) {}

    // Makes room for `largest`. Gives what the sums so far must be multiplied by.
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
    // The largest magnitude of a row, of which the thread has a quarter.
    static __device__ __forceinline__ float largest_of(const float (&x)[4][4]) {
        float largest = fabsf(x[0][0]);
#pragma unroll
        for (int j = 1; j < 16; ++j) largest = fmaxf(largest, fabsf(x[j / 4][j % 4]));
        const float of_two = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        return fmaxf(of_two, __shfl_xor_sync(0xffffffffu, of_two, 2));
    }
    // A row's quarter of 64 elements as fragments, `row` and `row` + 2 of each sixteen.
    __device__ __forceinline__ void convert(unsigned (&fragments)[4][4], int row, const float (&x)[4][4]) const {
        const float up = power_of_two(biased);
#pragma unroll
        for (int j = 0; j < 8; ++j)
            fragments[j / 2][j % 2 * 2 + row] = split_high(x[j / 2][j % 2 * 2], x[j / 2][j % 2 * 2 + 1], up);
    }
    __device__ __forceinline__ float down(const SplitHeader& header) const {
        return power_of_two(254 - biased) * header.down;
    }
};

// One warpgroup's products of all tiles of the block.
template <class Problem, class Tuning>
__device__ __forceinline__ void consume_running(const float* prepared_filters, const float* bias, float* y, long long batch,
                                                const TensorTiles<Problem, Tuning>& tiles,
                                                const TensorRings<Problem, Tuning>& rings, int warpgroup) {
    using F = TensorFilters<Problem, Tuning>;
    using Fragments = unsigned[4][4];
    static_assert(F::chunks == 1 && Tuning::products == 1, "one product takes all filters of a tile");
    constexpr int count = Tuning::chunk / 2;
    const float* const prepared = prepared_filters + Problem::first_prepared;
    const SplitHeader header = *reinterpret_cast<const SplitHeader*>(prepared);
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, t = lane % 4;
    const int row = warpgroup * 64 + warp * 16 + spread_row(lane / 4);
    RingPlace<Tuning::pixel_stages> pixel_place, taken_place;
    RingPlace<Tuning::filter_stages> filter_place;
    PlaneValuesOf<Problem, Tuning> planes;
    for (TileWalk<Problem, Tuning> walk(tiles); walk.valid(); walk.advance()) {
        const Offset<Problem> tile = walk.tile;
        const int group = tiles.group(tile);
        const bool scaled = reinterpret_cast<const unsigned*>(prepared)[F::flags_at + group] != 0;
        const float* const factors = prepared + F::factors_at + group * F::stages * split_depth;
        const SeenTaps<Problem, Tuning> seen(tiles, tile, row);
        if constexpr (F::planes) planes.begin(tiles, walk, row);
        int lines[2] = {row, row + 8};
        if constexpr (F::by_row) {
            const int in_row = static_cast<int>(tiles.first_pixel(tile) % Problem::q);
#pragma unroll
            for (int i = 0; i < 2; ++i) lines[i] += (in_row + lines[i]) / Problem::q * (Problem::s - 1);
        }
        RunningScale scales[2] = {RunningScale(header), RunningScale(header)};
        float sums[1][count], ratio[2];
        Fragments even, odd;
        int stage = walk.first;

        float x[2][4][4];
        const auto load = [&](int of_stage) {
            if constexpr (F::planes) {
                planes.load(x, rings, factors + of_stage * split_depth, scaled, t, of_stage);
                return;
            }
            const int tap = of_stage % F::tap_stages;
            if (tap == 0) mbarrier_wait_parity(rings.pixels_full(pixel_place.stage), pixel_place.parity);
            StageValues<Problem, Tuning>::load(x, rings.pixel_stage(pixel_place.stage), factors + of_stage * split_depth,
                                               scaled, {lines[0] + tap, lines[1] + tap}, t, seen, of_stage);
            if (tap == F::tap_stages - 1) pixel_place.advance();
        };
        const auto make_room = [&] {
            if constexpr (F::planes) planes.hide(x);
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
            // The products of the stage before are done while this one is under way.
            wgmma_wait_group<1>(next);
            if (before >= 0 && lane == 0) mbarrier_arrive(rings.filters_free(before));
            before = here;
            if (more) load(stage + 1);
            wgmma_f16(sums[0], now[1], filters + 32, true);
            if (more) make_room();
            wgmma_f16(sums[0], now[2], filters + 64, true);
            if (more) scales[0].convert(next, 0, x[0]);
            wgmma_f16(sums[0], now[3], filters + 96, true);
            wgmma_commit_group();
            filter_place.advance();
            // NOTE: not before the products that take the loaded values (ld_shared_v4 says why).
            __syncwarp();
            if constexpr (F::planes) {
                planes.stages.release(rings, stage, lane);
            } else if (stage % F::tap_stages == F::tap_stages - 1) {
                if (lane == 0) mbarrier_arrive(rings.pixels_free(taken_place.stage));
                taken_place.advance();
            }
            if (more) scales[1].convert(next, 1, x[1]);
            // NOTE: the four warps wait for the products together, and the compiler must know that it is all threads of a warp.
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
        if (lane == 0) mbarrier_arrive(rings.filters_free(before));
        const float back[2] = {scales[0].down(header), scales[1].down(header)};
#pragma unroll
        for (int i = 0; i < count; ++i) sums[0][i] *= back[i / 2 % 2];
        const auto& all = in_sixteens(sums);
        if (!walk.together) {
            store_sums<Problem, Tuning>(all, 0, prepared, bias, y, batch, tiles, tile, row, t);
        } else if constexpr (Tuning::split > 1) {
            store_sums_of_cluster<Problem, Tuning>(all, rings, prepared, bias, y, batch, tiles, tile, row, t);
        }
    }
}

}  // namespace leanconv
