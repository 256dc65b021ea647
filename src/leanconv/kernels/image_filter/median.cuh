// median: the middle one of the pixels of a window of r x r, r odd.
//
//   y[i, j] = delta + median over u, v of x[i + u - r / 2, j + v - r / 2]                    borders by rule, no padded copy
//
// Requires   windows of 3x3, 5x5 and 7x7; types as for register_cache. Channels are filtered one by one.
// Numerics   none without delta: a result is one of the pixels. Where a window holds a NaN it may be any.
// CTA tile   `warps` strips, one below the other, of `rows` rows of 128 outputs. They share the input rows.
// Thread     four neighbours in a row at a time. Of 3x3 it sorts the columns of three, which the four share, and takes the
//            middle one of the largest least, the middle middle, and the least largest (Smith). Of larger windows it keeps
//            half of the pixels and one; the least and the largest of these are not the middle one, and make room for
//            another pixel, until three are left (forgetful selection).
// Work       minima and maxima, at half the rate of FMAs: 21 of them an output of 3x3, 262 of 5x5, 958 of 7x7.
// Predicted  in units of a copy of the image, float32 on an H200: 0.7 for 3x3, 8 for 5x5, 30 for 7x7.
#pragma once

#include <kernels/image_filter/image_rows.cuh>

namespace leanconv {

__device__ __forceinline__ float lesser(float a, float b) { return fminf(a, b); }
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double lesser(double a, double b) { return fmin(a, b); }
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }

template <class T>
__device__ __forceinline__ void exchange(T& low, T& high) {
    const T a = low, b = high;
    low = lesser(a, b), high = larger(a, b);
}

template <class T>
__device__ __forceinline__ T middle_of(T a, T b, T c) {
    exchange(a, b);
    return larger(a, lesser(b, c));
}

// Of the first `size` values that are kept, takes away the least and the largest and puts in the next one, until three are
// left. By recursion, so that every index is a constant.
template <int size, class T, int most, class Value>
__device__ __forceinline__ void keep_middle(T (&kept)[most], const Value& value) {
    if constexpr (size > 3) {
        // the least comes to the front, the largest to the end
#pragma unroll
        for (int i = 0; i < size / 2; ++i) exchange(kept[i], kept[size - 1 - i]);
#pragma unroll
        for (int i = 1; i < size - size / 2; ++i) exchange(kept[0], kept[i]);
#pragma unroll
        for (int i = size / 2; i < size - 1; ++i) exchange(kept[i], kept[size - 1]);
        kept[0] = value(2 * most - size);
        keep_middle<size - 1>(kept, value);
    }
}

// The middle one of n values, which come from `value`.
template <int n, class T, class Value>
__device__ __forceinline__ T selected(const Value& value) {
    constexpr int most = n / 2 + 2;
    T kept[most];
#pragma unroll
    for (int i = 0; i < most; ++i) kept[i] = value(i);
    keep_middle<most>(kept, value);
    return middle_of(kept[0], kept[1], kept[2]);
}

// Block b computes strip b % strips of band (b / strips) % bands of plane b / strips / bands.
template <class Problem, class Tuning>
__device__ __forceinline__ void median(const typename Problem::element* x, typename Problem::result* y,
                                       typename Problem::sum value, typename Problem::sum delta, int height, int width,
                                       int64 x_pitch, int64 x_step, int64 y_pitch, int64 y_step, int strips, int bands) {
    using Rows = RowLoader<Problem, 4>;
    using In = typename Rows::In;
    using Out = typename Rows::Out;
    using T = typename Rows::T;
    constexpr int r = Problem::r, rows = Tuning::rows, block_rows = rows * Tuning::warps, inputs = block_rows + r - 1;
    constexpr int planes = Problem::planes;
    static_assert(r % 2 == 1 && r == Problem::s, "windows are square, and have a middle");
    static_assert(Problem::channels == 1, "neighbours are of one plane");

    const int warp = warp_number(), lane = threadIdx.x % 32;
    const int rest = blockIdx.x / strips, plane = rest / bands, image = plane / planes;
    const int top = rest % bands * block_rows, j = (blockIdx.x % strips) * Rows::width;
    const int out_height = Problem::valid ? height - (r - 1) : height;
    const int out_width = Problem::valid ? width - (r - 1) : width;
    const typename Rows::View view{reinterpret_cast<const In*>(x) + image * x_step + plane % planes,
                                   reinterpret_cast<Out*>(y) + image * y_step + plane % planes,
                                   height, width, out_height, out_width, x_pitch, y_pitch, static_cast<T>(value)};
    T* const image_rows = reinterpret_cast<T*>(shared_memory());
    T* const staging = image_rows + inputs * Rows::row + warp * Rows::width;
    {
        const Rows source(view, top - Problem::anchor_y, j, lane);
        const int count = min(inputs, out_height - top + r - 1);
#pragma unroll 1
        for (int n = warp; n < count; n += Tuning::warps) source.load(image_rows + n * Rows::row, n);
        cp_async_commit_group();
    }
    cp_async_wait_group<0>();
    __syncthreads();
#pragma unroll 1
    for (int p = warp * rows; p < (warp + 1) * rows && top + p < out_height; ++p) {
        T window[r][Rows::window];
#pragma unroll
        for (int u = 0; u < r; ++u) Rows::read_window(window[u], image_rows + (p + u) * Rows::row, lane);
        T row[4];
        if constexpr (r == 3) {
#pragma unroll
            for (int v = 0; v < Rows::window; ++v) {
                exchange(window[0][v], window[1][v]);
                exchange(window[1][v], window[2][v]);
                exchange(window[0][v], window[1][v]);
            }
#pragma unroll
            for (int c = 0; c < 4; ++c)
                row[c] = middle_of(larger(larger(window[0][c], window[0][c + 1]), window[0][c + 2]),
                                   middle_of(window[1][c], window[1][c + 1], window[1][c + 2]),
                                   lesser(lesser(window[2][c], window[2][c + 1]), window[2][c + 2]));
        } else {
#pragma unroll
            for (int c = 0; c < 4; ++c)
                row[c] = selected<r * r, T>([&](int i) { return window[i / r][c + i % r]; });
        }
        RowWriter<Out, T, 4, planes>(view, top + p, j, lane, static_cast<T>(delta), staging).store(row, 0);
    }
}

}  // namespace leanconv
