// tensor_gemm: implicit GEMM on Hopper tensor cores (wgmma); float32 in, float32 accuracy out (TF32 accuracy with one product).
//
//   y[m, k] = sum over r, s, c of x[m + (r, s), c] * w[k, r, s, c]        m: output pixel, k: filter
//
// Requires   sm_90a; 16-byte aligned tensors; with several groups at least 16 channels in each. NHWC, NCHW, CHWN.
// Volumes    rows by maps of five axes, linear pixels or columns; slices of a filter are rows behind one another.
// Numerics   float32 = hi + lo, two float16, scaled per row of pixels and per filter (split.cuh). One product = 3 wgmma, the
//            small ones first. The tensor core rounds its sums toward zero; so partial sums of 64 elements are promoted to
//            float32 sums, which round to nearest.
// CTA tile   64 * warpgroups pixels x n_tiles * mma_n filters; stages of 64 reduction elements; persistent CTAs. The tiles that
//            are left when all CTAs have had equally many, or all where there are few, are split along K by a cluster.
// Roles      warpgroups 0..n-1  consumers: load, scale, split, wgmma, promote, store
//            warpgroup n        producers: pixels (TMA, bulk copies or cp.async: pixels.cuh), packed filters (bulk copies)
// Pipelines  pixels   pixel_stages   float32                        full: producers -> consumers, empty: consumers -> producers
//            filters  filter_stages  float16 hi and lo, mma_n each  the same
// One stage  wait full(pixels); load 32 values a thread; row maximum (2 shuffles); scale and split into operand A;
//            per MMA tile: wait full(filters); 4 k16 steps x 3 wgmma; commit; acc += partial * inverse scale of the row;
//            release both stages. With `ping_pong` one warpgroup multiplies while the others load and split.
// Registers  128 acc + 64 partial + 32 operand of 240, for 128 pixels x 256 filters.
// Work       2 flops a product, 3 wgmma for one: peak 989 / 3 = 330 TFLOP/s at 1.83 GHz, 233 at the power limit. Per stage of
//            128 x 256 the tensor core works 3072 cycles; the four schedulers issue some 620 for both warpgroups.
// Measured   figure: opencnn-nhwc tensor_gemm/pytorch mean = 3.46
//            figure: opencnn-nhwc tensor_gemm tflops-most = 210
//            figure: opencnn tensor_gemm/pytorch mean = 2.99
#pragma once

#include <device/ptx/mma.cuh>
#include <device/ptx/sync.cuh>
#include <kernels/hopper_fp32/speculative_filters.cuh>
#include <device/pipeline/outputs.cuh>
#include <device/pipeline/pixels.cuh>
#include <kernels/hopper_fp32/tensor_stage.cuh>
#include <kernels/hopper_fp32/tensor_running.cuh>

namespace leanconv {

// Operand A of one stage: a thread has two rows of pixels, and a quarter of the 64 reduction elements of each.
template <class Problem, class Tuning>
struct PixelFragments : SplitFragments<Tuning::products == 3> {
    using Base = SplitFragments<Tuning::products == 3>;
    using Base::inverse_scale, Base::exact, Base::high, Base::low;

    __device__ __forceinline__ void load(const unsigned char* shared, const float* factors, bool scaled, int row, int t,
                                         const SplitHeader& header, const TapMask<Problem, Tuning>& mask, int stage) {
        float x[2][4][4];
        StageValues<Problem, Tuning>::load(x, shared, factors, scaled, {row, row + 8}, t, mask, stage);
        split(x, header);
    }
    __device__ __forceinline__ void split(const float (&x)[2][4][4], const SplitHeader& header) {
#pragma unroll
        for (int i = 0; i < 2; ++i) inverse_scale[i] = split_row<exact>(high, low, i, x[i], header);
    }
};

// A consumer warpgroup: all tiles of the CTA.
template <class Problem, class Tuning>
__device__ __forceinline__ void consume(const float* prepared_filters, Bias<Problem> bias, float* y, long long batch,
                                        const TensorTiles<Problem, Tuning>& tiles,
                                        const TensorRings<Problem, Tuning>& rings, int warpgroup) {
    using F = TensorFilters<Problem, Tuning>;
    constexpr int count = Tuning::mma_n / 2, partials = Tuning::partials;
    static_assert(partials == 1 || partials == 2, "one partial sum, or two alternately");
    static_assert(Tuning::filter_stages >= (Tuning::ping_pong ? F::n_tiles : partials),
                  "a warpgroup reads so many stages of filters before the others release one");
    const float* const prepared = prepared_filters + Problem::first_prepared;
    const SplitHeader header = *reinterpret_cast<const SplitHeader*>(prepared);
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, t = lane % 4;
    const int first_row = warpgroup * 64 + warp * 16, row = first_row + spread_row(lane / 4);
    RingPlace<Tuning::pixel_stages> pixel_place;
    RingPlace<Tuning::filter_stages> filter_place, done_place;
    const PingPongOf<Tuning> ping_pong(warpgroup);
    ResidentValuesOf<Problem, Tuning> images;
    for (TileWalk<Problem, Tuning> walk(tiles); walk.valid(); walk.advance()) {
        const Offset<Problem> tile = walk.tile;
        const int group = tiles.group(tile);
        const bool scaled = reinterpret_cast<const unsigned*>(prepared)[F::flags_at + group] != 0;
        const float* factors = prepared + F::factors_at + group * F::stages * split_depth;
        const TapMask<Problem, Tuning> mask(tiles, tile, row);
        prefetch_tile<Problem, Tuning>(bias, y, tiles, tile, first_row, lane);
        if constexpr (F::resident) images.begin(tiles, walk, row);
        float sums[F::n_tiles][count] = {};

        for (int stage = walk.first; stage < walk.end; ++stage) {
            PixelFragments<Problem, Tuning> pixels;
            if constexpr (F::resident) {
                float x[2][4][4];
                images.load(x, rings, factors + stage * split_depth, scaled, t, stage);
                images.zero_outside(x);
                pixels.split(x, header);
            } else {
                mbarrier_wait_parity(rings.pixels_full(pixel_place.stage), pixel_place.parity);
                pixels.load(rings.pixel_stage(pixel_place.stage), factors + stage * split_depth, scaled, row, t, header, mask,
                            stage);
            }
            float partial[partials][count];
#pragma unroll
            for (int n_tile = 0; n_tile < F::n_tiles; ++n_tile) {
                float (&now)[count] = partial[n_tile % partials];
                mbarrier_wait_parity(rings.filters_full(filter_place.stage), filter_place.parity);
                if (n_tile == 0) ping_pong.wait(pixels);
                const unsigned char* const filters = rings.filter_stage(filter_place.stage);
                if (n_tile == 0 || partials == 1) wgmma_fence(now, pixels.high, pixels.low);
                else wgmma_fence(now);
                begin_products(now, pixels, filters);
                if (partials == 2 && n_tile > 0) {
                    // Promotes the MMA tile before while these products run.
                    wgmma_commit_group();
                    wgmma_wait_group<1>(partial[(n_tile - 1) % 2]);
                    mbarrier_arrive_warp(rings.filters_empty(done_place.stage), lane);
                    done_place.advance();
                    promote(sums[n_tile - 1], partial[(n_tile - 1) % 2], pixels.inverse_scale);
                }
                end_products(now, pixels, filters);
                wgmma_commit_group();
                filter_place.advance();
                if (n_tile == 0) {
                    // NOTE: released after the products that read the loaded values were issued (ld_shared_v4 says why).
                    __syncwarp();
                    if constexpr (F::resident) {
                        images.stages.release(rings, stage, lane);
                    } else {
                        mbarrier_arrive_warp(rings.pixels_empty(pixel_place.stage), lane);
                        pixel_place.advance();
                    }
                }
                if (n_tile == F::n_tiles - 1) ping_pong.pass(stage == walk.end - 1 && walk.is_last());
                if (partials == 1 || n_tile == F::n_tiles - 1) {
                    wgmma_wait_group<0>(now, pixels.high, pixels.low);
                    mbarrier_arrive_warp(rings.filters_empty(done_place.stage), lane);
                    done_place.advance();
                    promote(sums[n_tile], now, pixels.inverse_scale);
                }
            }
        }
        store_tile<Problem, Tuning>(as_n16(sums), walk.shared_tile, rings, prepared, bias, y, batch, tiles, tile, row, t);
    }
}

// `x`: a tensor map of the pixels; the tensor itself for columns and resident images. `w`: the filters where the launch also
// validates its packed ones (speculative_filters.cuh).
template <class Problem, class Tuning, class Source, class... Filters>
__device__ __forceinline__ void tensor_gemm(const Source& x, const float* prepared, Bias<Problem> bias, float* y,
                                            long long batch, const Filters*... w) {
    const TensorRings<Problem, Tuning> rings;
    const TensorTiles<Problem, Tuning> tiles(batch);
    if (threadIdx.x == 0) rings.init();
    __syncthreads();
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == Tuning::warpgroups) {
        set_registers_down<Tuning::producer_registers>();
        wait_for_validated_filters<TensorRings<Problem, Tuning>, Tuning>(threadIdx.x % 128);
        produce<Problem, Tuning>(x, prepared, batch, tiles, rings, threadIdx.x % 128);
        if (TileWalk<Problem, Tuning>(tiles).shares_tile()) {
            // NOTE: lanes that copied alone reconverge before the barriers that all threads take part in.
            __syncwarp();
            if constexpr (Tuning::split > 1) meet_in_cluster(), meet_in_cluster();
        }
    } else {
        validate_in_place<Problem, Tuning, TensorRings<Problem, Tuning>>(prepared, w...);
        set_registers_up<Tuning::consumer_registers>();
        if constexpr (Tuning::partials > 0) consume<Problem, Tuning>(prepared, bias, y, batch, tiles, rings, warpgroup);
        else consume_running<Problem, Tuning>(prepared, bias, y, batch, tiles, rings, warpgroup);
    }
}

}  // namespace leanconv
