// Sums stay in the tensor core from the first product of a tile to the last, instead of partial sums of 64 that float32
// additions add up. All products of a sum must have one scale then, so all pixels have it.
#pragma once

#define LEANCONV_FIXED_SCALES
#include "tensor_parts.cuh"

namespace leanconv {

// The products of one stage and one chunk of filters, added to the sums.
template <class Fragments, int count>
__device__ __forceinline__ void add_products(float (&sums)[count], const Fragments& pixels, const unsigned char* filters) {
    const MatrixDescriptor high = matrix_descriptor(filters, 0, 1024, 128);
    if constexpr (Fragments::exact) {
        const MatrixDescriptor low = matrix_descriptor(filters + 2 * count * split_depth * 2, 0, 1024, 128);
#pragma unroll
        for (int i = 0; i < Fragments::k_steps; ++i) wgmma_f16(sums, pixels.low[i], high + 32 * i, true);
#pragma unroll
        for (int i = 0; i < Fragments::k_steps; ++i) wgmma_f16(sums, pixels.high[i], low + 32 * i, true);
    }
#pragma unroll
    for (int i = 0; i < Fragments::k_steps; ++i) wgmma_f16(sums, pixels.high[i], high + 32 * i, true);
}

// What the sums of all products are multiplied by: the scale of pixels and that of the filters' header.
template <int n_tiles, int count>
__device__ __forceinline__ void scale_sums(float (&sums)[n_tiles][count], float inverse_scale) {
#pragma unroll
    for (int i = 0; i < n_tiles * count; ++i) sums[i / count][i % count] *= inverse_scale;
}

// `consume` of tensor_gemm.cuh without partial sums.
template <class Problem, class Tuning>
__device__ __forceinline__ void consume_unpromoted(const float* prepared_filters, Bias<Problem> bias, float* y,
                                                   long long batch, const TensorTiles<Problem, Tuning>& tiles,
                                                   const TensorRings<Problem, Tuning>& rings, int warpgroup) {
    using F = TensorFilters<Problem, Tuning>;
    constexpr int count = Tuning::mma_n / 2;
    static_assert(Tuning::split == 1, "tiles that a cluster shares are not taken apart");
    const float* const prepared = prepared_filters + Problem::first_prepared;
    const SplitHeader header = *reinterpret_cast<const SplitHeader*>(prepared);
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, t = lane % 4;
    const int row = warpgroup * 64 + warp * 16 + spread_row(lane / 4);
    RingPlace<Tuning::pixel_stages> pixel_place;
    RingPlace<Tuning::filter_stages> filter_place, done_place;
    const PingPongOf<Tuning> ping_pong(warpgroup);
    for (TileWalk<Problem, Tuning> walk(tiles); walk.valid(); walk.advance()) {
        const Offset<Problem> tile = walk.tile;
        const int group = tiles.group(tile);
        const bool scaled = reinterpret_cast<const unsigned*>(prepared)[F::flags_at + group] != 0;
        const float* factors = prepared + F::factors_at + group * F::stages * split_depth;
        const TapMask<Problem, Tuning> seen(tiles, tile, row);
        float sums[F::n_tiles][count], inverse_scale = 0.0f;
#pragma unroll
        for (int i = 0; i < F::n_tiles * count; ++i) sums[i / count][i % count] = 0.0f;
        for (int stage = walk.first; stage < walk.end; ++stage) {
            PixelFragments<Problem, Tuning> pixels;
            mbarrier_wait_parity(rings.pixels_full(pixel_place.stage), pixel_place.parity);
            pixels.load(rings.pixel_stage(pixel_place.stage), factors + stage * split_depth, scaled, row, t, header, seen,
                        stage);
            inverse_scale = pixels.inverse_scale[0];
#pragma unroll
            for (int n_tile = 0; n_tile < F::n_tiles; ++n_tile) {
                mbarrier_wait_parity(rings.filters_full(filter_place.stage), filter_place.parity);
                if (n_tile == 0) ping_pong.wait(pixels);
                if (n_tile == 0) wgmma_fence(sums[n_tile], pixels.high, pixels.low);
                else wgmma_fence(sums[n_tile]);
                add_products(sums[n_tile], pixels, rings.filter_stage(filter_place.stage));
                wgmma_commit_group();
                filter_place.advance();
                if (n_tile == 0) {
                    __syncwarp();
                    if (lane == 0) mbarrier_arrive(rings.pixels_empty(pixel_place.stage));
                    pixel_place.advance();
                } else {
                    wgmma_wait_group<1>(sums[n_tile - 1]);
                    if (lane == 0) mbarrier_arrive(rings.filters_empty(done_place.stage));
                    done_place.advance();
                }
            }
            ping_pong.pass(stage == walk.end - 1 && walk.is_last());
            wgmma_wait_group<0>(sums[F::n_tiles - 1], pixels.high, pixels.low);
            if (lane == 0) mbarrier_arrive(rings.filters_empty(done_place.stage));
            done_place.advance();
        }
        scale_sums(sums, inverse_scale);
        store_sums<Problem, Tuning>(as_n16(sums), 0, prepared, bias, y, batch, tiles, tile, row, t);
    }
}

// `multiply_stage` of tensor_winograd.cuh without partial sums, channels last. Gives what the sums are multiplied by.
template <bool scaled, int first, int end, int accs, int count, class Pixels, class Problem, class Tuning>
__device__ __forceinline__ float multiply_unpromoted(float (&sums)[2][accs][count], const Pixels& pixels,
                                                     const TensorRings<Problem, Tuning>& rings,
                                                     RingPlace<Tuning::pixel_stages>& pixel_place,
                                                     OwnFilters<Problem, Tuning>& own_filters, int stage, int lane,
                                                     const SplitHeader& header) {
    constexpr bool kept = OwnFilters<Problem, Tuning>::kept;
    SplitFragments<Tuning::products == 3> fragments[2];
    mbarrier_wait_parity(rings.pixels_full(pixel_place.stage), pixel_place.parity);
    float x[2][2][4][4];
    load_states<scaled>(x, pixels, rings.base, pixel_place.stage * TensorRings<Problem, Tuning>::pixel_bytes, stage, lane % 4);
    split_state(fragments[0], x[0], header);
#pragma unroll
    for (int i = 0; i < 2 * (end - first); ++i) {
        const int own = i / (end - first), part = kept ? end - 1 - i % (end - first) : first + i % (end - first);
        auto& states = fragments[own];
        auto& now = sums[own][part];
        const int place = own_filters.stage(kept ? own : i, kept && part > 0);
        if (!kept || part == 0) mbarrier_wait_parity(rings.filters_full(place), own_filters.place.parity);
        wgmma_fence(now, states.high, states.low);
        add_products(now, states, rings.filter_stage(place));
        wgmma_commit_group();
        int zero = 0;
        if (i == 0) {
            split_state(fragments[1], x[1], header);
            zero = zero_after(fragments[1].token());
            __syncwarp();
            if (lane == 0) mbarrier_arrive(rings.pixels_empty(pixel_place.stage + zero));
            pixel_place.advance();
        }
        wgmma_wait_group<0>(now, states.high, states.low);
        if ((!kept || part > 0) && lane == 0) mbarrier_arrive(rings.filters_empty(place));
        own_filters.advance(false);
    }
    if (first == 0) own_filters.advance(true);
    return fragments[0].inverse_scale[0];
}

// And `consume_pairs`.
template <class Problem, class Tuning, bool scaled>
__device__ __forceinline__ void consume_pairs_unpromoted(const float* prepared_filters, Bias<Problem> bias, float* y,
                                                         long long batch,
                                                         const TensorTiles<Pairs<Problem, Tuning>, Tuning>& tiles,
                                                         const TensorRings<Pairs<Problem, Tuning>, Tuning>& rings,
                                                         int warpgroup) {
    using F = TensorFilters<Pairs<Problem, Tuning>, Tuning>;
    using Rings = TensorRings<Pairs<Problem, Tuning>, Tuning>;
    static_assert(Tuning::split == 1 && !Tuning::linear, "neither tiles that a cluster shares nor linear pixels are taken apart");
    static_assert(F::rest == 0, "nor rows of which segments leave a column");
    static_assert(!Tuning::one_row, "nor tiles of one row of outputs");
    static_assert(Tuning::multicast == 1 && !Tuning::ping_pong, "nor multicast, nor ping-pong");
    constexpr int count = Tuning::mma_n / 2, accs = F::n_tiles * F::output_rows, k_steps = F::filters / 16;
    const float* const prepared = prepared_filters + Problem::first_prepared;
    const SplitHeader header = *reinterpret_cast<const SplitHeader*>(prepared);
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, t = lane % 4;
    PairPixels<Problem, Tuning> pixels(prepared, warp, lane, warpgroup);
    RingPlace<Tuning::pixel_stages> pixel_place;
    OwnFilters<Pairs<Problem, Tuning>, Tuning> own(warpgroup);
    for (TileWalk<Pairs<Problem, Tuning>, Tuning> walk(tiles); walk.valid(); walk.advance()) {
        pixels.begin(tiles, walk.tile);
        float sums[2][accs][count], inverse_scale = 0.0f;
#pragma unroll
        for (int i = 0; i < 2 * accs * count; ++i) sums[i / count / accs][i / count % accs][i % count] = 0.0f;
        if constexpr (F::output_rows == 1) {
            for (int stage = walk.first; stage < walk.end; ++stage)
                inverse_scale = multiply_unpromoted<scaled, 0, accs>(sums, pixels, rings, pixel_place, own, stage, lane, header);
        } else {
            for (int first = 0; first < F::row_stages; ++first) {
                multiply_unpromoted<scaled, 0, 1>(sums, pixels, rings, pixel_place, own, first, lane, header);
                for (int row = 1; row < F::read_rows - 1; ++row)
                    multiply_unpromoted<scaled, 0, accs>(sums, pixels, rings, pixel_place, own,
                                                          row * F::row_stages + first, lane, header);
                inverse_scale = multiply_unpromoted<scaled, 1, accs>(sums, pixels, rings, pixel_place, own,
                                                             F::stages - F::row_stages + first, lane, header);
            }
        }
        scale_sums(sums[0], inverse_scale);
        scale_sums(sums[1], inverse_scale);
        float* const exchanged = reinterpret_cast<float*>(rings.base + Rings::shared_bytes);
        exchange_states<Tuning::exchange>(sums, exchanged, warpgroup, thread);
        const auto& all = as_n16(sums[0]);
#pragma unroll
        for (int height = 0; height < F::output_rows; ++height) {
            const PairOutputs<Problem, Tuning> outputs(batch, warpgroup, height);
            const auto& of_row = reinterpret_cast<const float (&)[k_steps][8]>(all[height * k_steps]);
            store_sums<Problem, Tuning>(of_row, 0, prepared, bias, y, batch, outputs, walk.tile, pixels.pair, t,
                                        pixels.apart);
        }
    }
}

template <class Problem, class Tuning>
__device__ __forceinline__ void tensor_gemm_unpromoted(const TensorMap& x, const float* prepared, Bias<Problem> bias,
                                                       float* y, long long batch) {
    const TensorRings<Problem, Tuning> rings;
    const TensorTiles<Problem, Tuning> tiles(batch);
    if (threadIdx.x == 0) rings.init();
    __syncthreads();
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == Tuning::warpgroups) {
        set_registers_down<Tuning::producer_registers>();
        produce<Problem, Tuning>(x, prepared, batch, tiles, rings, threadIdx.x % 128);
    } else {
        set_registers_up<Tuning::consumer_registers>();
        consume_unpromoted<Problem, Tuning>(prepared, bias, y, batch, tiles, rings, warpgroup);
    }
}

template <class Problem, class Tuning>
__device__ __forceinline__ void tensor_winograd_unpromoted(const TensorMap& x, const float* prepared, Bias<Problem> bias,
                                                           float* y, long long batch) {
    const TensorRings<Pairs<Problem, Tuning>, Tuning> rings;
    const TensorTiles<Pairs<Problem, Tuning>, Tuning> tiles(batch);
    if (threadIdx.x == 0) rings.init();
    __syncthreads();
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (warpgroup == Tuning::warpgroups) {
        set_registers_down<Tuning::producer_registers>();
        produce<Pairs<Problem, Tuning>, Tuning>(x, prepared, batch, tiles, rings, threadIdx.x % 128);
    } else {
        set_registers_up<Tuning::consumer_registers>();
        const unsigned* const flags = reinterpret_cast<const unsigned*>(prepared + Problem::first_prepared) +
                                      TensorFilters<Pairs<Problem, Tuning>, Tuning>::flags_at;
        bool scaled = false;
        for (int group = 0; group < Problem::groups; ++group) scaled |= flags[group] != 0;
        if (scaled) consume_pairs_unpromoted<Problem, Tuning, true>(prepared, bias, y, batch, tiles, rings, warpgroup);
        else consume_pairs_unpromoted<Problem, Tuning, false>(prepared, bias, y, batch, tiles, rings, warpgroup);
    }
}

}  // namespace leanconv
