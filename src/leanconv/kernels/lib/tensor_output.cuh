// From the sums of a warpgroup's rows to the output tensor: the filters' scales, bias, activation, and stores.
#pragma once

#include <lib/epilogue.cuh>
#include <lib/tensor_rings.cuh>

namespace leanconv {

// Two pixels of a thread, `row` and 8 behind it, and of each sixteen filters the four from 4t on.
template <class Problem, class Tuning, int chunks, int count>
__device__ __forceinline__ void store_sums(const float (&sums)[chunks][count], const float* prepared, const float* bias,
                                           float* y, long long batch, const TensorTiles<Problem, Tuning>& tiles,
                                           Offset<Problem> tile, int row, int t) {
    using F = TensorFilters<Problem, Tuning>;
    constexpr int sixteens = count / 8;
    int64 image = Problem::out_h * Problem::out_w;
    if constexpr (Problem::chwn) image *= batch;
    const int group = tiles.group(tile), first_k = tiles.filters(tile) * F::filters + 4 * t;
    const float* const scales = prepared + F::scales_at + group * F::tiles * F::filters + first_k;
    // NOTE: all loads come before the first store, which they could not pass: y might be where the scales are.
    float4 scale[chunks][sixteens];
#pragma unroll
    for (int i = 0; i < chunks * sixteens; ++i)
        scale[i / sixteens][i % sixteens] =
            *reinterpret_cast<const float4*>(scales + i / sixteens * F::chunk + i % sixteens * 16);
    const Place places[2] = {tiles.numbers.place(tiles.first_pixel(tile) + row),
                             tiles.numbers.place(tiles.first_pixel(tile) + row + 8)};
#pragma unroll
    for (int i = 0; i < chunks * sixteens; ++i) {
        const int in_group = first_k + i / sixteens * F::chunk + i % sixteens * 16;
        const int filter = group * Problem::group_k + in_group;
        float b[4] = {};
        if constexpr (Problem::bias) {
#pragma unroll
            for (int j = 0; j < 4; ++j) b[j] = in_group + j < Problem::group_k ? bias[filter + j] : 0.0f;
        }
        const float4 by = scale[i / sixteens][i % sixteens];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (places[half].count == 0) continue;
            const float* const part = sums[i / sixteens] + i % sixteens * 8 + 2 * half;
            const float v[4] = {part[0] * by.x, part[1] * by.y, part[4] * by.z, part[5] * by.w};
            const int64 at = places[half].offset, step = Problem::nhwc ? 1 : image;
            float* const to = y + (Problem::nhwc ? at * Problem::k + filter : filter * image + at);
            float result[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                result[j] = finish<Problem>(v[j], b[j], held_by<Problem>(to + j * step, in_group + j < Problem::group_k));
            if constexpr (Problem::nhwc && Problem::group_k % 4 == 0) {
                if (in_group < Problem::group_k) store_vector_of(to, result);
            } else {
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (in_group + j < Problem::group_k) to[j * step] = result[j];
            }
        }
    }
}

}  // namespace leanconv
