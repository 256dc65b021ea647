// How native_gemm_nchw numbers pixels, so that a tap sees the pixels of a tile's outputs side by side.
//
// Rows of pixels are made longer and images higher, by as many zeros as windows reach beyond them: outputs have the same
// numbers as the pixels of such an image, and output i sees pixel i + shift, for each tap another shift. At the end of a row a
// window sees the zeros there, and those are also the zeros before the next row. Of 56 x 56 pixels and 3 x 3 filters rows have
// 57 and images 57, so 3 % of the numbers are of no output; of 14 x 14 13 %.
//
// With a stride, pixels fall into planes: those of every stride-th row and column are one, and all that a tap sees is of one
// plane. `Tuning::lines` pixels of each plane are what the taps of a tile see.
#pragma once

#include <device/index.cuh>

namespace leanconv {

// One axis: `extent` pixels, `outputs`, and the taps of its filters.
template <int taps, int stride, int dilation, int pad, int extent, int outputs>
struct WindowAxis {
    // Of the pixel that a tap sees for output 0: which plane it is of, and where it lies there.
    static __host__ __device__ constexpr int moved(int tap) {
        const int at = tap * dilation - pad;
        return at >= 0 ? at / stride : -((stride - 1 - at) / stride);
    }
    static __host__ __device__ constexpr int plane(int tap) { return tap * dilation - pad - stride * moved(tap); }
    static __host__ __device__ constexpr int pixels_of(int plane) {
        return extent > plane ? (extent - plane + stride - 1) / stride : 0;
    }
    // The first and the last tap that see a plane; `taps` and -1 where none does.
    static __host__ __device__ constexpr int first_tap(int of_plane) {
        for (int tap = 0; tap < taps; ++tap)
            if (plane(tap) == of_plane) return tap;
        return taps;
    }
    static __host__ __device__ constexpr int last_tap(int of_plane) {
        for (int tap = taps - 1; tap >= 0; --tap)
            if (plane(tap) == of_plane) return tap;
        return -1;
    }
    // Planes that taps see are counted: how many come before one, how many there are, which one has a number.
    static __host__ __device__ constexpr int number_of(int plane) {
        int number = 0;
        for (int i = 0; i < plane; ++i) number += first_tap(i) < taps;
        return number;
    }
    static __host__ __device__ constexpr int planes() { return number_of(stride); }
    static __host__ __device__ constexpr int numbered(int number) {
        if (planes() == stride) return number;
        int plane = 0;
        while (first_tap(plane) == taps || number_of(plane) < number) ++plane;
        return plane;
    }
    // Pixels from one row or image to the next: windows that reach beyond one end see zeros, and not the other's.
    static __host__ __device__ constexpr int pitch() {
        int longest = outputs;
        for (int i = 0; i < stride; ++i) {
            if (first_tap(i) == taps) continue;
            const int before = -moved(first_tap(i)), after = outputs + moved(last_tap(i)) - pixels_of(i);
            const int zeros = before > after ? before : after;
            const int all = pixels_of(i) + (zeros > 0 ? zeros : 0);
            if (all > longest) longest = all;
        }
        return longest;
    }
    // By how much the taps of a plane move, at most.
    static __host__ __device__ constexpr int reach() {
        int most = 0;
        for (int i = 0; i < stride; ++i) {
            if (first_tap(i) == taps) continue;
            const int moves = moved(last_tap(i)) - moved(first_tap(i));
            if (moves > most) most = moves;
        }
        return most;
    }
};

template <class Problem, class Tuning>
struct PixelWindows {
    using Down = WindowAxis<Problem::r, Problem::stride_h, Problem::dilation_h, Problem::pad_top, Problem::h, Problem::p>;
    using Right = WindowAxis<Problem::s, Problem::stride_w, Problem::dilation_w, Problem::pad_left, Problem::w, Problem::q>;
    // Where tensor copies bring them, images are rows of pixels, and rounded up to as many as a copy brings.
    static constexpr bool copied = Tuning::copied;
    static_assert(!copied || (Problem::h == 1 && Problem::r == 1 && Problem::s == 1), "each output sees its own pixel");
    static constexpr int row = copied ? ceil_div(Problem::q, 64) * 64 : Right::pitch();
    static constexpr int rows = copied ? 1 : Down::pitch(), image = row * rows;
    static constexpr int pixels = 64 * Tuning::warpgroups * Tuning::blocks;  // of a tile
    static constexpr int lines = pixels + Down::reach() * row + Right::reach();
    static constexpr int planes = Down::planes() * Right::planes();
    static constexpr int all_lines = planes * lines, pitch = copied ? pixels : all_lines + 1;  // with one that no tap sees
    static_assert(pitch == Tuning::lines, "the host counts as many lines");

    // The line that the first pixel of a tile is for a tap.
    static constexpr __device__ __forceinline__ int line(int r, int s) {
        const int down = Down::plane(r), right = Right::plane(s);
        const int number = Down::number_of(down) * Right::planes() + Right::number_of(right);
        return number * lines + (Down::moved(r) - Down::moved(Down::first_tap(down))) * row + Right::moved(s) -
               Right::moved(Right::first_tap(right));
    }
};

// An output from its number.
template <class Problem, class Tuning>
struct WindowOutput {
    using Windows = PixelWindows<Problem, Tuning>;
    int n, p, q;
    __device__ __forceinline__ explicit WindowOutput(int number) : n(number / Windows::image) {
        const int rest = number - n * Windows::image;
        p = rest / Windows::row, q = rest % Windows::row;
    }
    __device__ __forceinline__ bool exists(long long batch) const {
        return n < batch && p < Problem::p && q < Problem::q;
    }
    // How many outputs come before, without the zeros.
    __device__ __forceinline__ int before(long long batch) const {
        const int all = static_cast<int>(batch) * (Problem::p * Problem::q);
        const int rows = n * Problem::p + min(p, Problem::p);
        return min(rows * Problem::q + (p < Problem::p ? min(q, Problem::q) : 0), all);
    }
};

}  // namespace leanconv
