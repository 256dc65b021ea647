// The im2win tensor: for every output row the input rows it reads, stored column by column, so that a window is one run
// of S * R elements and neighbouring windows share what they have in common (im2win paper, section 3).
// NCHW: win[n][c][p][j * R + u] = x[n][c][p * stride - top + u * dilation][j - left], zero outside the image; NHWC has
// the channels innermost. `Problem::columns` columns suffice for the last window.
#pragma once

#include <lib/index.cuh>
#include <lib/tile_loader.cuh>

namespace leanconv {

// Elements of one output row of the tensor: of one channel in NCHW, of all channels in NHWC.
template <class Problem>
constexpr int window_row = Problem::columns * Problem::r * (Problem::nhwc ? Problem::c : 1);

// Elements that a thread writes, blockDim.x apart: the lanes of a warp read and write neighbours.
constexpr int window_elements = 8;

// Bytes: the tensor once for writing, the input R / stride times for reading, of which all but one come from the caches:
// the tensor's size and the input's over 4.25 TB/s on an H200.
template <class Problem>
__device__ __forceinline__ void transform_to_windows(const float* __restrict__ x, float* __restrict__ windows,
                                                     long long batch) {
    constexpr int row = window_row<Problem>;
    const int64 count = batch * (Problem::nhwc ? 1 : Problem::c) * Problem::p * row;
    const int64 first = static_cast<int64>(blockIdx.x) * blockDim.x * window_elements;
    // The block's first line, row p of plane `plane`; from there on offsets are small, and so are their divisions.
    const int64 line = first / row, plane = line / Problem::p;
    const int in_line = static_cast<int>(first - line * row), first_p = static_cast<int>(line - plane * Problem::p);
#pragma unroll
    for (int e = 0; e < window_elements; ++e) {
        const int to = threadIdx.x + e * blockDim.x;
        if (first + to >= count) return;
        const int below = (in_line + to) / row, at = (in_line + to) % row;
        const int64 image = plane + (first_p + below) / Problem::p;
        const int p = (first_p + below) % Problem::p;
        const int tap = Problem::nhwc ? at / Problem::c : at;
        const int i = p * Problem::stride_h - Problem::pad_top + tap % Problem::r * Problem::dilation_h;
        const int j = tap / Problem::r - Problem::pad_left;
        const int64 pixel = (image * Problem::h + i) * Problem::w + j;
        const bool inside = i >= 0 && i < Problem::h && j >= 0 && j < Problem::w;
        windows[first + to] = !inside ? 0.0f : x[Problem::nhwc ? pixel * Problem::c + at % Problem::c : pixel];
    }
}

// The tensor as PixelLoaderAlong reads it, in window order.
template <class Problem>
struct WindowTensor {
    using B = Bytes<Problem>;
    static constexpr bool checked = false;
    static constexpr int run = Problem::nhwc ? Problem::group_c : Problem::dilation_w == 1 ? Problem::r * Problem::s : Problem::r;

    static __device__ __forceinline__ B first(const Pixel<Problem>& pixel, const Window<Problem>&, int group) {
        const B at = static_cast<B>(pixel.q) * Problem::stride_w * Problem::r;
        const B n = static_cast<B>(pixel.n);
        return Problem::nhwc ? ((n * Problem::p + pixel.p) * window_row<Problem> + at * Problem::c + group * Problem::group_c) * 4
                             : (((n * Problem::c + group * Problem::group_c) * Problem::p + pixel.p) * window_row<Problem> + at) * 4;
    }
    static __device__ __forceinline__ B tap(int number, int in_run) {
        if constexpr (Problem::nhwc) {
            const int column = number / Problem::r * Problem::dilation_w, u = number % Problem::r;
            return ((static_cast<B>(column) * Problem::r + u) * Problem::c + in_run) * 4;
        } else if constexpr (Problem::dilation_w == 1) {
            return (static_cast<B>(number) * Problem::p * window_row<Problem> + in_run) * 4;
        } else {
            const int c = number / Problem::s, column = number % Problem::s * Problem::dilation_w;
            return (static_cast<B>(c) * Problem::p * window_row<Problem> + column * Problem::r + in_run) * 4;
        }
    }
};

}  // namespace leanconv
