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
    int64 image = Problem::out_h * Problem::out_w;
    if constexpr (Problem::chwn) image *= batch;
    const int group = tiles.group(tile), of_tile = tiles.filters(tile) * F::filters;
    const float* const scales = prepared + F::scales_at + (group * F::tiles + tiles.filters(tile)) * F::filters;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Place place = tiles.numbers.place(tiles.first_pixel(tile) + row + 8 * half);
        if (place.count == 0) continue;
#pragma unroll
        for (int chunk = 0; chunk < chunks; ++chunk)
#pragma unroll
            for (int sixteen = 0; sixteen < count / 8; ++sixteen) {
                const int k = chunk * F::chunk + sixteen * 16 + 4 * t, in_group = of_tile + k;
                const float4 scale = *reinterpret_cast<const float4*>(scales + k);
                const float* const part = sums[chunk] + 8 * sixteen + 2 * half;
                const float v[4] = {part[0] * scale.x, part[1] * scale.y, part[4] * scale.z, part[5] * scale.w};
                const int filter = group * Problem::group_k + in_group;
                float result[4];
                float* const to = y + (Problem::nhwc ? place.offset * Problem::k + filter : filter * image + place.offset);
                const int64 step = Problem::nhwc ? 1 : image;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const bool exists = in_group + i < Problem::group_k;
                    const float b = Problem::bias && exists ? bias[filter + i] : 0.0f;
                    result[i] = finish<Problem>(v[i], b, held_by<Problem>(to + i * step, exists));
                }
                if constexpr (Problem::nhwc && Problem::group_k % 4 == 0) {
                    if (in_group < Problem::group_k) store_vector_of(to, result);
                } else {
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (in_group + i < Problem::group_k) to[i * step] = result[i];
                }
            }
    }
}

}  // namespace leanconv
