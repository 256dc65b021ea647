// Pixels of one warp for mma.sync: 32 pixels, in stages of 64 reduction elements (filter_layout.cuh) that lie in shared memory as
// float32 until the warp makes operand A of them, in registers. No other warp reads them, so they need no barrier. One stage is
// enough: the copies of the next one are under way while this one multiplies.
//
//   rows: eight lanes copy 32 channels of a pixel, 16 bytes each: for NHWC whose pixels have whole rows of 16 bytes. A pixel
//     takes 256 bytes; odd ones exchange the halves of each 128, so that 128-bit loads meet each bank once.
//   columns: each lane copies one pixel, element by element. Neighbouring lanes have neighbouring pixels, so that NCHW and
//     CHWN are read in whole lines. A column takes 32 floats, permuted so that loads meet each bank once.
#pragma once

#include <device/index.cuh>
#include <device/pipeline/rings.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/sync.cuh>
#include <device/pipeline/filter_layout.cuh>
#include <device/pipeline/split.cuh>

namespace leanconv {

// Element j of the four that a thread has of a k16 step; in rows the host permuted them to be neighbours.
template <class Tuning>
__device__ __forceinline__ int fragment_element(int t, int j) {
    return Tuning::rows ? 4 * t + j : 2 * t + j % 2 + j / 2 * 8;
}

template <class Problem, class Tuning>
struct WarpPixels {
    using F = TensorFilters<Problem, Tuning>;
    static constexpr int pixels = 32, bytes = pixels * split_depth * 4;
    // As aligned as what is copied; no tensor of 32-bit offsets has an element there.
    static constexpr auto nowhere = static_cast<Bytes<Problem>>(Tuning::rows ? -16 : -4);
    const InputStrides<Problem> stride;
    const char* x;
    unsigned char* shared;
    int lane, h, w;         // of the lane's pixel: where its receptive field begins
    Bytes<Problem> offset;  // of that, in bytes; it may lie outside the image

    __device__ __forceinline__ WarpPixels(const float* tensor, long long batch, Offset<Problem> number, int group, int lane,
                                          unsigned char* shared)
        : stride(batch), shared(shared), lane(lane) {
        const auto count = static_cast<Offset<Problem>>(batch) * (Problem::p * Problem::q);
        const bool exists = number < count;
        const Pixel<Problem> pixel(exists ? number : 0, batch);
        h = pixel.p * Problem::stride_h - Problem::pad_top;
        w = pixel.q * Problem::stride_w - Problem::pad_left;
        const Bytes<Problem> place = static_cast<Bytes<Problem>>(h) * Problem::w + static_cast<Bytes<Problem>>(w);
        offset = (static_cast<Bytes<Problem>>(pixel.n) * stride.image + place * stride.pixel) * 4;
        if (!exists) h = -(1 << 30);
        x = reinterpret_cast<const char*>(tensor + static_cast<int64>(group) * Problem::group_c * stride.channel);
    }

    // Where channel block `number` of the reduction begins for the lane's pixel.
    __device__ __forceinline__ Bytes<Problem> block_offset(int number) const {
        const int tap = number / F::tap_blocks;
        const int down = tap / Problem::s * Problem::dilation_h, right = tap % Problem::s * Problem::dilation_w;
        const bool inside = tap < F::taps && static_cast<unsigned>(h + down) < Problem::h &&
                            static_cast<unsigned>(w + right) < Problem::w;
        const auto moved = static_cast<Bytes<Problem>>(down * Problem::w + right) * stride.pixel;
        const auto channel = static_cast<Bytes<Problem>>(number % F::tap_blocks * F::channel_block) * stride.channel;
        return inside ? offset + (moved + channel) * 4 : nowhere;
    }

    // NOTE: the zero is in the way of compilers that keep the addresses of all copies in registers, and then have too few.
    __device__ __forceinline__ void copy_rows(int stage) const {
        constexpr int units = F::channel_block / 4, of_half = 8 / units;  // copies of a channel block, blocks of 32 elements
        static_assert(F::channel_block % 4 == 0 && F::channel_block <= 32, "a channel block has whole units of 16 bytes");
        const int mine = lane % 8 / units, unit = lane % units;
        unsigned char* const to = shared + zero_after(stage) + lane / 8 * 256 + (lane % 8 ^ lane / 8 % 2 * 4) * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int first = stage * F::stage_blocks + half * of_half;
            Bytes<Problem> place[of_half];
#pragma unroll
            for (int i = 0; i < of_half; ++i) place[i] = block_offset(first + i);
            const int c = (first + mine) % F::tap_blocks * F::channel_block + unit * 4;
            const bool exists = Problem::group_c % F::channel_block == 0 || c < Problem::group_c;
#pragma unroll
            for (int i = 0; i < pixels / 4; ++i) {
                Bytes<Problem> from = nowhere;
#pragma unroll
                for (int j = 0; j < of_half; ++j) {
                    const Bytes<Problem> other = __shfl_sync(0xffffffffu, place[j], 4 * i + lane / 8);
                    if (j == mine || of_half == 1) from = other;
                }
                cp_async_16(to + i * 1024 + half * 128, x + from + unit * 16, from != nowhere && exists);
            }
        }
    }

    __device__ __forceinline__ void copy_columns(int stage) const {
        const int64 channel = static_cast<int64>(stride.channel) * 4;
        unsigned char* const to = shared + zero_after(stage);
#pragma unroll
        for (int i = 0; i < F::stage_blocks; ++i) {
            const int number = stage * F::stage_blocks + i, c = number % F::tap_blocks * F::channel_block;
            const Bytes<Problem> place = block_offset(number);
            const char* const from = x + place;
#pragma unroll
            for (int j = 0; j < F::channel_block; ++j) {
                const int element = i * F::channel_block + j;
                const bool exists = Problem::group_c % F::channel_block == 0 || c + j < Problem::group_c;
                cp_async_4(to + element * 128 + (lane ^ element / 2 % 4 * 8) * 4, from + j * channel,
                           place != nowhere && exists);
            }
        }
    }

    __device__ __forceinline__ void copy(int stage) const {
        if constexpr (Tuning::rows) copy_rows(stage);
        else copy_columns(stage);
    }

    // The four elements of a thread in a k16 step of pixel `row`.
    __device__ __forceinline__ void load_four(float (&four)[4], int row, int t, int k16) const {
        if constexpr (Tuning::rows) {
            const int unit = (k16 % 2 * 4 + t) ^ row % 2 * 4;
            const float4 v = *reinterpret_cast<const float4*>(shared + row * 256 + k16 / 2 * 128 + unit * 16);
            four[0] = v.x, four[1] = v.y, four[2] = v.z, four[3] = v.w;
        } else {
            const unsigned char* const column = shared + t * 256 + (row ^ t * 8) * 4;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                four[j] = *reinterpret_cast<const float*>(column + (k16 * 16 + fragment_element<Tuning>(0, j)) * 128);
        }
    }
};

// Operand A of one stage and 16 pixels: two rows of a thread, four k16 steps.
template <class Problem, class Tuning>
struct WarpFragments {
    static constexpr bool exact = Tuning::products == 3;
    unsigned high[4][4], low[exact ? 4 : 1][4];
    float inverse_scale[2];  // of the two rows

    // Pixels are multiplied by the `factors` of the stage's elements where they are `scaled`.
    __device__ __forceinline__ void load(const WarpPixels<Problem, Tuning>& pixels, int row, int t, bool scaled,
                                         const float* factors, const SplitHeader& header) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float x[4][4];
#pragma unroll
            for (int k16 = 0; k16 < 4; ++k16) pixels.load_four(x[k16], row + i * 8, t, k16);
            if (scaled) {
#pragma unroll
                for (int j = 0; j < 16; ++j) {
                    const float factor = factors[j / 4 * 16 + fragment_element<Tuning>(t, j % 4)];
                    x[j / 4][j % 4] = x[j / 4][j % 4] * factor * factor;
                }
            }
            inverse_scale[i] = split_row<exact>(high, low, i, x, header);
        }
    }
};

}  // namespace leanconv
