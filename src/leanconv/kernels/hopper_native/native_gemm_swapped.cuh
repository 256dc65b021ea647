// native_gemm_swapped: native_gemm_16bit with the operands of the products swapped (swap AB); float16 or bfloat16 in NHWC.
//
//   y[k, m] = sum over r, s, c of w[k, r, s, c] * x[m + (r, s), c]        k: filter, m: output pixel
//
// Filters are the rows of a product and pixels its columns. A wgmma of 64 rows x n columns x 16 takes n / 2 cycles and reads
// (64 + n) * 32 bytes of shared memory: with 64 filters as columns, as in native_gemm_16bit, all 128 bytes a cycle that there are,
// with 256 pixels 80.
//
// Requires   as native_gemm_16bit, but one phase: no strides of gradients. No residual, and no output that is added to.
// Numerics   as native_gemm_16bit: exact products, sums stay in the tensor core over the whole reduction.
// CTA tile   64 * m_tiles * warpgroups pixels x 64 filters for one warpgroup or for each of them. Persistent.
// Roles      warpgroups 0..n-1  consumers: wgmma with both operands in shared memory, epilogue, stores
//            warpgroup n        producer: one thread issues all TMA copies, those of native_gemm_16bit
// Pipelines  stages   full: bytes of the copies -> consumers, empty: a lane of each consumer warp -> producer
// Outputs    A thread has pairs of neighbouring pixels of two filters. Matrices of 8 x 8 are transposed between lanes (movmatrix) to
//            pairs of neighbouring filters, and a warpgroup brings 64 pixels x 64 filters together in shared memory, from where each
//            warp stores rows of 128 bytes.
// Registers  128 sums of 240 with 256 columns.
// Work       2 C/g R S flops an output. For a stage of 64 channels of 512 pixels and 64 filters: products 1024 cycles, shared memory
//            1216 (operands 640, copies 576), where native_gemm_16bit's largest tile of 64 filters has 1664 for as many; of 256
//            pixels and 128 filters 1024 and 1024 (640 and 384), where it has 1152.
#pragma once

#include <device/ptx/movmatrix.cuh>
#include <kernels/hopper_native/native_gemm_16bit.cuh>

namespace leanconv {

// One warpgroup's products of all tiles of the CTA: 64 filters x `pixels`, of those of a tile all or its part.
template <class Problem, class Tuning>
struct SwappedConsumer {
    using Ring = GemmRing<Problem, Tuning>;
    using Tiles = GemmTiles<Problem, Tuning>;
    using T = typename Problem::result;
    static constexpr int rounders = 0;
    static constexpr bool alike = Tuning::filters > 64;  // all warpgroups have the pixels of the tile, and filters of their own
    static constexpr int pixels = alike ? Ring::pixels : Ring::pixels / Tuning::warpgroups;
    static_assert(Tuning::filters == (alike ? 64 * Tuning::warpgroups : 64), "a warpgroup has 64 filters");
    static_assert(pixels % 64 == 0 && pixels <= 256, "so many columns has a product");
    static_assert(Tuning::split == 1 && !adds<Problem>, "outputs are stored once, by one CTA");
    using Output = OutputNhwc<Problem, 64>;
    static_assert(Output::row_bytes == 128 && Ring::Output::warp_bytes == Output::warp_bytes, "64 pixels of a warpgroup in its staging");

    static __device__ __forceinline__ void store(const float (&sums)[pixels / 2], Bias<Problem> bias, T* y, const Tiles& tiles,
                                                 const Ring& ring, int warpgroup, Offset<Problem> first_pixel, int group, int k) {
        const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        unsigned char* const staging = ring.outputs_of(4 * warpgroup);
        Term<Problem> terms[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int own = k + 16 * warp + 8 * half + lane / 4;
            terms[half] = term_of<Problem>(bias, group * Problem::group_k + own, own < Problem::group_k);
        }
#pragma unroll
        for (int part = 0; part < pixels / 64; ++part) {
            barrier_sync(1 + warpgroup, 128);  // the pixels before have been read
#pragma unroll
            for (int eight = 0; eight < 8; ++eight)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float v[2];
#pragma unroll
                    for (int i = 0; i < 2; ++i) v[i] = finish<Problem>(sums[(8 * part + eight) * 4 + 2 * half + i], terms[half], 0.0f);
                    *Output::pair_at(staging, 8 * eight + lane / 4, 2 * warp + half, lane % 4) = movmatrix_trans(rounded_pair(T{}, v));
                }
            barrier_sync(1 + warpgroup, 128);
#pragma unroll
            for (int pass = 0; pass < 4; ++pass) {
                const int row = 16 * warp + 4 * pass + lane / 8, unit = lane % 8, exist = Problem::group_k - (k + 8 * unit);
                const Place place = tiles.place(first_pixel + 64 * part + row);
                unsigned words[4];
                ld_shared_v4_u32(words, Output::unit_at(staging, row, unit));
                if (place.count > 0 && exist > 0)
                    Output::store_unit(y + place.offset * Problem::k + group * Problem::group_k + k + 8 * unit, words, exist);
            }
        }
    }

    static __device__ __forceinline__ void consume(Bias<Problem> bias, T* y, const Tiles& tiles, const Ring& ring, int warpgroup,
                                                   Offset<Problem> first_tile, Offset<Problem> step) {
        const int lane = threadIdx.x % 32, first_row = alike ? 0 : warpgroup * pixels;
        // Bytes from a stage's filters to those of the warpgroup.
        const int own = alike ? warpgroup * (Tuning::mirrored ? Ring::box_bytes : 64 * Ring::row_bytes) : 0;
        RingPlace<Tuning::stages> place;
        for (Offset<Problem> tile = first_tile; tile < tiles.count(); tile += step) {
            float sums[pixels / 2];
            int before = 0;
            wgmma_fence(sums);
            for (int stage = ring.first; stage < ring.end; ++stage) {
                mbarrier_wait_parity(ring.full(place.stage), place.parity);
                wgmma_fence();
#pragma unroll
                for (int block = 0; block < Tuning::stage_blocks; ++block) {
                    const auto a = ring.filter_operand(place.stage, block) + own;
                    const MatrixDescriptor b = matrix_descriptor(
                        ring.pixels_of(place.stage, block) + first_row * Ring::row_bytes, 0, 8 * Ring::row_bytes, Ring::row_bytes);
#pragma unroll
                    for (int i = 0; i < Tuning::channel_block / 16; ++i)
                        multiply(typename Problem::element{}, sums, a + Ring::filter_step * i, b + 32 * i,
                                 stage > ring.first || block > 0 || i > 0);
                }
                wgmma_commit_group();
                if (stage > ring.first) {
                    // The products of the stage before are done while these are under way.
                    wgmma_wait_group<1>();
                    mbarrier_arrive_warp(ring.empty(before), lane);
                }
                before = place.stage;
                place.advance();
            }
            wgmma_wait_group<0>(sums);
            mbarrier_arrive_warp(ring.empty(before), lane);
            store(sums, bias, y, tiles, ring, warpgroup, tiles.first_pixel(tile) + first_row, tiles.group(tile),
                  tiles.filters(tile) * Tuning::filters + (alike ? 64 * warpgroup : 0));
        }
    }
};

template <class Problem, class Tuning>
__device__ __forceinline__ void native_gemm_swapped(const TensorMap& x, const TensorMap& w, Bias<Problem> bias,
                                                    typename Problem::result* y, long long batch) {
    run_roles<Problem, Tuning, SwappedConsumer<Problem, Tuning>>(x, w, bias, y, batch);
}

}  // namespace leanconv
