// From accumulators to the output tensor: bias, activation, 128-bit stores where rows allow them.
#pragma once

#include <lib/index.cuh>
#include <lib/micro_kernel.cuh>

namespace leanconv {

template <class Problem>
__device__ __forceinline__ float finish(float value, float bias) {
    value += bias;
    // NOTE: written so that NaN stays NaN, as in PyTorch; fmaxf would turn it into zero.
    return Problem::relu ? (value < 0.0f ? 0.0f : value) : value;
}

// Four values along the contiguous axis, `step` elements apart, of which `count` exist.
__device__ __forceinline__ void store_four(float* to, const float (&v)[4], int step, int count, bool vector) {
    if (vector) {
        if (count > 0) *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i * step < count) to[i * step] = v[i];
    }
}

// Store a thread's tile of group `group`; tile and pixel offsets are where the block's tile begins.
// `dealt` says how fragments are laid out along the contiguous output axis (pixels in NCHW, filters in NHWC).
template <class Problem, class Tuning, bool dealt>
__device__ __forceinline__ void store_tile(const float (&acc)[Tuning::thread_k][Tuning::thread_pixels],
                                           const Tiling<Tuning>& tiling, const float* bias, float* y,
                                           Offset<Problem> count, Offset<Problem> first_pixel, int group, int first_k) {
    constexpr int lanes_k = Tiling<Tuning>::lanes_k, lanes_pixels = Tiling<Tuning>::lanes_pixels;
    constexpr int image = Problem::p * Problem::q;
    // A row of the output can be stored four at a time if no fragment is cut by its end and the pointer is aligned.
    const bool vector = !dealt && reinterpret_cast<unsigned long long>(y) % 16 == 0;

    if constexpr (!Problem::nhwc) {
        constexpr int step = dealt ? lanes_pixels : 1;
#pragma unroll
        for (int f = 0; f < Tuning::thread_pixels / 4; ++f) {
            const int at = tiling.pixel + position<lanes_pixels, dealt>(f, tiling.lane_pixel, 0);
#pragma unroll
            for (int i = 0; i < Tuning::thread_k; ++i) {
                const int k = first_k + tiling.k + position<lanes_k, false>(i / 4, tiling.lane_k, i % 4);
                if (k >= Problem::group_k) continue;
                const int filter = group * Problem::group_k + k;
                const float b = Problem::bias ? bias[filter] : 0.0f;
                float v[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) v[j] = finish<Problem>(acc[i][4 * f + j], b);
                if constexpr (!dealt) {
                    const Offset<Problem> pixel = first_pixel + at;
                    const Offset<Problem> n = pixel / image;
                    const int64 to = (static_cast<int64>(n) * Problem::k + filter) * image + (pixel - n * image);
                    store_four(y + to, v, step, pixel < count ? 4 : 0, vector);
                } else {
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const Offset<Problem> pixel = first_pixel + at + j * step;
                        const Offset<Problem> n = pixel / image;
                        const int64 to = (static_cast<int64>(n) * Problem::k + filter) * image + (pixel - n * image);
                        if (pixel < count) y[to] = v[j];
                    }
                }
            }
        }
    } else {
        constexpr int step = dealt ? lanes_k : 1;
#pragma unroll
        for (int j = 0; j < Tuning::thread_pixels; ++j) {
            const Offset<Problem> pixel =
                first_pixel + tiling.pixel + position<lanes_pixels, false>(j / 4, tiling.lane_pixel, j % 4);
            if (pixel >= count) continue;
            float* row = y + static_cast<int64>(pixel) * Problem::k + group * Problem::group_k;
#pragma unroll
            for (int f = 0; f < Tuning::thread_k / 4; ++f) {
                const int k = first_k + tiling.k + position<lanes_k, dealt>(f, tiling.lane_k, 0);
                float v[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const bool exists = k + i * step < Problem::group_k;
                    const float b = Problem::bias && exists ? bias[group * Problem::group_k + k + i * step] : 0.0f;
                    v[i] = finish<Problem>(acc[4 * f + i][j], b);
                }
                store_four(row + k, v, step, Problem::group_k - k, vector);
            }
        }
    }
}

}  // namespace leanconv
