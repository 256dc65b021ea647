// Pixels of one warp for products of warps (mma.sync): 32 pixels, in stages of 64 reduction elements (filter_layout.cuh)
// that lie in shared memory as float32 until the warp makes operand A of them, in registers. No other warp sees them, so
// that they need no barrier: one stage is enough, as the copies of the next one are under way while this one multiplies.
//
//   rows: eight lanes copy 32 channels of a pixel, 16 bytes each: for NHWC whose pixels have whole rows of 16 bytes. A pixel
//     takes 256 bytes; odd ones exchange the halves of each 128, so that loads of 16 bytes meet each bank once.
//   columns: each lane copies one pixel, element by element. Neighbouring lanes have neighbouring pixels, so that NCHW and
//     CHWN are read in whole lines. A column takes 32 floats, permuted so that loads meet each bank once.
#pragma once

#include <kernels/hopper_fp32/filter_layout.cuh>
#include <device/index.cuh>
#include <device/ptx/barrier.cuh>
#include <device/ptx/copy.cuh>
#include <device/pipeline/rings.cuh>
#include <kernels/hopper_fp32/tensor_split.cuh>

namespace leanconv {

// Element j of the four that a thread has of a sixteen; in rows the host permuted them to be neighbours.
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
    int lane, h, w;         // of the lane's pixel: what its window begins with
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

    // Where piece `number` of the reduction begins for the lane's pixel.
    __device__ __forceinline__ Bytes<Problem> piece(int number) const {
        const int tap = number / F::of_tap;
        const int down = tap / Problem::s * Problem::dilation_h, right = tap % Problem::s * Problem::dilation_w;
        const bool inside = tap < F::taps && static_cast<unsigned>(h + down) < Problem::h &&
                            static_cast<unsigned>(w + right) < Problem::w;
        const auto moved = static_cast<Bytes<Problem>>(down * Problem::w + right) * stride.pixel;
        const auto channel = static_cast<Bytes<Problem>>(number % F::of_tap * F::piece) * stride.channel;
        return inside ? offset + (moved + channel) * 4 : nowhere;
    }

    // NOTE: the zero is in the way of compilers that keep the addresses of all copies in registers, and then have too few.
    __device__ __forceinline__ void copy_rows(int stage) const {
        constexpr int units = F::piece / 4, of_half = 8 / units;  // copies of a piece, pieces of 32 elements
        static_assert(F::piece % 4 == 0 && F::piece <= 32, "a piece has whole units of 16 bytes");
        const int mine = lane % 8 / units, unit = lane % units;
        unsigned char* const to = shared + zero_after(stage) + lane / 8 * 256 + (lane % 8 ^ lane / 8 % 2 * 4) * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int first = stage * F::pieces + half * of_half;
            Bytes<Problem> place[of_half];
#pragma unroll
            for (int i = 0; i < of_half; ++i) place[i] = piece(first + i);
            const int c = (first + mine) % F::of_tap * F::piece + unit * 4;
            const bool exists = Problem::group_c % F::piece == 0 || c < Problem::group_c;
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
        for (int i = 0; i < F::pieces; ++i) {
            const int number = stage * F::pieces + i, c = number % F::of_tap * F::piece;
            const Bytes<Problem> place = piece(number);
            const char* const from = x + place;
#pragma unroll
            for (int j = 0; j < F::piece; ++j) {
                const int element = i * F::piece + j;
                const bool exists = Problem::group_c % F::piece == 0 || c + j < Problem::group_c;
                cp_async_4(to + element * 128 + (lane ^ element / 2 % 4 * 8) * 4, from + j * channel,
                           place != nowhere && exists);
            }
        }
    }

    __device__ __forceinline__ void copy(int stage) const {
        if constexpr (Tuning::rows) copy_rows(stage);
        else copy_columns(stage);
    }

    // The four elements of a thread in a sixteen of pixel `row`.
    __device__ __forceinline__ void load_four(float (&four)[4], int row, int t, int sixteen) const {
        if constexpr (Tuning::rows) {
            const int unit = (sixteen % 2 * 4 + t) ^ row % 2 * 4;
            const float4 v = *reinterpret_cast<const float4*>(shared + row * 256 + sixteen / 2 * 128 + unit * 16);
            four[0] = v.x, four[1] = v.y, four[2] = v.z, four[3] = v.w;
        } else {
            const unsigned char* const column = shared + t * 256 + (row ^ t * 8) * 4;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                four[j] = *reinterpret_cast<const float*>(column + (sixteen * 16 + fragment_element<Tuning>(0, j)) * 128);
        }
    }
};

// Operand A of one stage and 16 pixels: two rows of a thread, four sixteens of reduction elements.
template <class Problem, class Tuning>
struct WarpFragments {
    static constexpr bool exact = Tuning::products == 3;
    unsigned high[4][4], low[exact ? 4 : 1][4];
    float down[2];  // what the products of the two rows are multiplied by

    // `factors` of the stage's elements are looked at where pixels are `scaled`.
    __device__ __forceinline__ void load(const WarpPixels<Problem, Tuning>& pixels, int row, int t, bool scaled,
                                         const float* factors, const SplitHeader& header) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float x[4][4];
#pragma unroll
            for (int sixteen = 0; sixteen < 4; ++sixteen) pixels.load_four(x[sixteen], row + i * 8, t, sixteen);
            if (scaled) {
#pragma unroll
                for (int j = 0; j < 16; ++j) {
                    const float factor = factors[j / 4 * 16 + fragment_element<Tuning>(t, j % 4)];
                    x[j / 4][j % 4] = x[j / 4][j % 4] * factor * factor;
                }
            }
            down[i] = split_row<exact>(high, low, i, x, header);
        }
    }
};

}  // namespace leanconv
