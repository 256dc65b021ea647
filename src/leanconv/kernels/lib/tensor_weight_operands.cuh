// How x and dy come to the products of the filters' gradient: x as float32, for fragments of operand A; dy as pairs of
// float16, operand B, which only shared memory can hold. Neither is transposed: pixels, the reduction, stay the rows.
#pragma once

#include <lib/ptx/bulk_copy.cuh>
#include <lib/ptx/convert.cuh>
#include <lib/tensor_weight_tiles.cuh>

namespace leanconv {

// The producers: thread 0 copies x, thread 32 dy.
template <class Problem, class Tuning>
__device__ __forceinline__ void copy_operands(const TensorMap& x, const TensorMap& dy, long long batch,
                                              const WeightTiles<Problem, Tuning>& tile,
                                              const WeightRings<Problem, Tuning>& rings,
                                              const PartRange<Problem, Tuning>& range, int thread) {
    using Tiles = WeightTiles<Problem, Tuning>;
    using Rings = WeightRings<Problem, Tuning>;
    if (thread == 0) {
        RingPlace<Tuning::x_stages> place;
        for (int stage = range.first; stage < range.end; ++stage, place.advance()) {
            mbarrier_wait_parity(rings.x_free(place.stage), place.parity ^ 1);
            Mbarrier* const full = rings.x_full(place.stage);
            mbarrier_arrive_expect_tx(full, Rings::x_bytes);
            const Pixel<Problem> from(static_cast<Offset<Problem>>(stage) * split_depth, batch);
            const int h = from.p * Problem::stride_h - Problem::pad_top, w = from.q * Problem::stride_w - Problem::pad_left;
            for (int i = 0; i < Tiles::tile_pieces; ++i) {
                // NOTE: pieces past the last repeat it; what is computed from them is never stored.
                const int next = tile.first_piece + i, piece = next < Tiles::pieces ? next : Tiles::pieces - 1;
                const int tap = piece / Tiles::of_tap, c = piece % Tiles::of_tap * Tiles::piece;
                cp_async_bulk_tensor_im2col_shared_global(
                    rings.x(place.stage) + i * Rings::piece_bytes, x, full, tile.group * Problem::group_c + c, w, h,
                    static_cast<int>(from.n), static_cast<unsigned short>(tap % Problem::s * Problem::dilation_w),
                    static_cast<unsigned short>(tap / Problem::s * Problem::dilation_h));
            }
        }
    } else if (thread == 32) {
        RingPlace<Tuning::dy_stages> place;
        const int first = tile.group * Problem::group_k + tile.first_filter;
        for (int stage = range.first; stage < range.end; ++stage)
            for (int chunk = 0; chunk < Tuning::chunks; ++chunk, place.advance()) {
                mbarrier_wait_parity(rings.dy_free(place.stage), place.parity ^ 1);
                Mbarrier* const full = rings.dy_full(place.stage);
                mbarrier_arrive_expect_tx(full, Rings::dy_bytes);
                for (int i = 0; i < Tiles::chunk / Tiles::piece; ++i)
                    cp_async_bulk_tensor_shared_global(rings.dy(place.stage) + i * Rings::piece_bytes, dy, full,
                                                       first + chunk * Tiles::chunk + i * Tiles::piece,
                                                       stage * split_depth);
            }
    }
}

// Row of 8 that the lanes of group g have: loads of 16 bytes by a quarter of a warp, and stores of 8 by a half, meet each
// bank once under the swizzle of 128 bytes.
__device__ __forceinline__ int bit_reversed(int g) { return g % 2 * 4 + g / 2 % 2 * 2 + g / 4; }

// One warp's share of a chunk of dy: 16 filters of 64 pixels. A lane has four filters, and every eighth pixel.
template <class Problem, class Tuning>
struct SplitColumns {
    using Rings = WeightRings<Problem, Tuning>;
    int warp, t, row;
    bool first;  // of the lanes that have the same filters
    float v[8][4];

    __device__ __forceinline__ explicit SplitColumns(int thread)
        : warp(thread / 32), t(thread % 4), row(bit_reversed(thread % 32 / 4)), first(thread % 32 < 4) {}

    __device__ __forceinline__ void load(const unsigned char* dy) {
        const unsigned char* const piece = dy + warp / 2 * Rings::piece_bytes + row * 128;
        const int unit = (warp % 2 * 4 + t) ^ row;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float4 four = *reinterpret_cast<const float4*>(piece + i * 1024 + unit * 16);
            v[i][0] = four.x, v[i][1] = four.y, v[i][2] = four.z, v[i][3] = four.w;
        }
    }

    // Splits the columns with a scale for each, from the largest of its 64 pixels.
    __device__ __forceinline__ void store(unsigned char* to, float* scales) const {
        float up[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float largest = fabsf(v[0][j]);
#pragma unroll
            for (int i = 1; i < 8; ++i) largest = fmaxf(largest, fabsf(v[i][j]));
#pragma unroll
            for (int apart = 4; apart < 32; apart *= 2)
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, apart));
            const RowScale scale(largest, unscaled_header());
            up[j] = scale.up;
            // Column 16 warp + 4 t + j is that of lane (4 t + j) % 8 / 2 in a product, its number there is ...
            const int column = 16 * warp + 4 * t + j;
            if (first) scales[column % 8 / 2 * Rings::scale_pitch + column / 8 * 2 + column % 2] = scale.down;
        }
        unsigned char* const high = to + row * 128 + ((2 * warp + t / 2) ^ row) * 16 + t % 2 * 8;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint2 packed;
            packed.x = cvt_rn_f16x2_f32(v[i][0] * up[0], v[i][1] * up[1]);
            packed.y = cvt_rn_f16x2_f32(v[i][2] * up[2], v[i][3] * up[3]);
            *reinterpret_cast<uint2*>(high + i * 1024) = packed;
            if constexpr (Tuning::products == 3) {
                uint2 rest;
                rest.x = rest_of(v[i][0], v[i][1], up[0], up[1], packed.x);
                rest.y = rest_of(v[i][2], v[i][3], up[2], up[3], packed.y);
                *reinterpret_cast<uint2*>(high + Rings::half_bytes + i * 1024) = rest;
            }
        }
    }

    // Scales that know nothing of the other operand.
    static __device__ __forceinline__ SplitHeader unscaled_header() { return {1.0f, 253, {0, 0}}; }

    // As split_low, for neighbours of different scales.
    static __device__ __forceinline__ unsigned rest_of(float a, float b, float up_a, float up_b, unsigned high) {
        const float first = cvt_f32_f16(static_cast<unsigned short>(high));
        const float second = cvt_f32_f16(static_cast<unsigned short>(high >> 16));
        return cvt_rn_f16x2_f32(fmaf(a, up_a, -first), fmaf(b, up_b, -second));
    }
};

// The converters: 128 threads.
template <class Problem, class Tuning>
__device__ __forceinline__ void split_dy(const WeightRings<Problem, Tuning>& rings, const PartRange<Problem, Tuning>& range,
                                         int thread) {
    RingPlace<Tuning::dy_stages> dy_place;
    RingPlace<Tuning::split_stages> split_place;
    SplitColumns<Problem, Tuning> columns(thread);
#pragma unroll 1
    for (int left = (range.end - range.first) * Tuning::chunks; left > 0; --left) {
        mbarrier_wait_parity(rings.dy_full(dy_place.stage), dy_place.parity);
        columns.load(rings.dy(dy_place.stage));
        mbarrier_wait_parity(rings.split_free(split_place.stage), split_place.parity ^ 1);
        columns.store(rings.split(split_place.stage), rings.scales(split_place.stage));
        fence_proxy_async();
        __syncwarp();
        if (thread % 32 == 0) {
            mbarrier_arrive(rings.split_full(split_place.stage));
            // NOTE: after the stores that the loaded values went into, which an arrival does not pass.
            mbarrier_arrive(rings.dy_free(dy_place.stage));
        }
        dy_place.advance();
        split_place.advance();
    }
}

}  // namespace leanconv
