// The im2win tensor: for every output row the input rows it reads, stored column by column, so that a window is one run
// of S * R elements and neighbouring windows share what they have in common (im2win paper, section 3).
// NCHW: win[n][c][p][j * R + u] = x[n][c][p * stride - top + u * dilation][j - left], zero outside the image; NHWC has
// the channels innermost. `Problem::columns` columns suffice for the last window.
#pragma once

#include <device/index.cuh>
#include <kernels/simt/filter_loader.cuh>

namespace leanconv {

// Elements of one output row of the tensor: of one channel in NCHW, of all channels in NHWC.
template <class Problem>
constexpr int window_row = Problem::columns * Problem::r * (Problem::nhwc ? Problem::c : 1);

// The launch that writes the tensor. A thread writes Tuning::elements, Tuning::threads apart: the lanes of a warp read
// and write neighbours.
// Bytes: the tensor once for writing, the input R / stride times for reading, all but one of them from the caches: the
// tensor's size and the input's at copy bandwidth. Some thirty instructions an element take most of that time to issue:
// so all offsets below the block's first line are of 32 bits.
template <class Problem, class Tuning>
__device__ __forceinline__ void im2win_transform(const float* __restrict__ x, float* __restrict__ windows,
                                                 long long batch) {
    constexpr int row = window_row<Problem>, threads = Tuning::threads, elements = Tuning::elements;
    constexpr int block = threads * elements;
    static_assert(row < 1 << 30, "places in the lines of a block are of 32 bits");
    constexpr int channels = Problem::nhwc ? Problem::c : 1;
    const int64 count = batch * (Problem::nhwc ? 1 : Problem::c) * Problem::p * row;
    const int64 first = static_cast<int64>(blockIdx.x) * block;
    // The block's first line is row first_p of a plane: a channel in NCHW, an image in NHWC.
    const int64 line = first / row, plane = line / Problem::p;
    const int in_line = static_cast<int>(first - line * row), first_p = static_cast<int>(line - plane * Problem::p);
    const int left = count - first < block ? static_cast<int>(count - first) : block;
    const float* const from = x + plane * Problem::h * Problem::w * channels;
    float* const to = windows + first + threadIdx.x;
    float v[elements];
    // All loads before the first store: they are under way together.
#pragma unroll
    for (int e = 0; e < elements; ++e) {
        // What lies past the end, or outside the image, reads the first element instead: no branches between the loads.
        const int number = threadIdx.x + e * threads, place = in_line + (number < left ? number : 0);
        const int below = place / row, at = place % row, tap = at / channels;
        const int p = (first_p + below) % Problem::p, next_plane = (first_p + below) / Problem::p;
        const int i = p * Problem::stride_h - Problem::pad_top + tap % Problem::r * Problem::dilation_h;
        const int j = tap / Problem::r - Problem::pad_left;
        const bool inside = !Problem::padded || (i >= 0 && i < Problem::h && j >= 0 && j < Problem::w);
        // NOTE: planes beyond the first add up to more than 32 bits only where a plane alone is that large.
        const Offset<Problem> pixel = (static_cast<Offset<Problem>>(next_plane) * Problem::h + i) * Problem::w + j;
        const float value = from[inside ? pixel * channels + at % channels : 0];
        v[e] = inside ? value : 0.0f;
    }
#pragma unroll
    for (int e = 0; e < elements; ++e)
        if (threadIdx.x + e * threads < left) to[e * threads] = v[e];
}

// The tensor as PixelLoaderAlong reads it, in window order.
template <class Problem>
struct WindowTensor {
    using B = Bytes<Problem>;
    static constexpr bool checked = false;
    // Undilated windows are whole runs in NCHW, others have a run for each column.
    static constexpr int in_plane = Problem::dilation_w == 1 ? Problem::r * Problem::s : Problem::r;
    static constexpr int run = Problem::nhwc ? Problem::group_c : in_plane;

    static __device__ __forceinline__ B first(const Pixel<Problem>& pixel, const Window<Problem>&, int group) {
        const B at = static_cast<B>(pixel.q) * Problem::stride_w * Problem::r;
        const B n = static_cast<B>(pixel.n);
        const int c = group * Problem::group_c;
        return Problem::nhwc ? ((n * Problem::p + pixel.p) * window_row<Problem> + at * Problem::c + c) * item<Problem>
                             : (((n * Problem::c + c) * Problem::p + pixel.p) * window_row<Problem> + at) * item<Problem>;
    }
    static __device__ __forceinline__ B tap(int number, int in_run) {
        if constexpr (Problem::nhwc) {
            const int column = number / Problem::r * Problem::dilation_w, u = number % Problem::r;
            return ((static_cast<B>(column) * Problem::r + u) * Problem::c + in_run) * item<Problem>;
        } else if constexpr (Problem::dilation_w == 1) {
            return (static_cast<B>(number) * Problem::p * window_row<Problem> + in_run) * item<Problem>;
        } else {
            const int c = number / Problem::s, column = number % Problem::s * Problem::dilation_w;
            return (static_cast<B>(c) * Problem::p * window_row<Problem> + column * Problem::r + in_run) * item<Problem>;
        }
    }
};

}  // namespace leanconv
