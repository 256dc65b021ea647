// NCHW: a linear pixel index in which every filter tap reads the pixels of a tile's outputs at a constant offset.
//
// Each row has as many zeros behind it as taps reach beyond it, and each image as many rows of zeros. Outputs have the indices of
// the pixels of such an image: output i reads pixel i + shift, for each tap another shift. The zeros behind a row are also those
// before the next one. Of 56 x 56 pixels and 3 x 3 filters a row has 57 indices and an image 57 rows, so 113 of 3249
// indices are of no output; of 14 x 14 29 of 225.
//
// With a stride, pixels fall into stride phases: those of every stride-th row and column are one, and all that a tap reads is of
// one phase. A tile needs `Tuning::phase_pixels` of each phase: its own pixels and the halo of all taps. They are its resident
// pixels, [8-channel vector][phase][pixel] in shared memory, 16 bytes each, loaded once for all taps.
#pragma once

#include <device/index.cuh>

namespace leanconv {

// The taps of one axis: for output 0, which phase the pixel is of, and which pixel of that phase.
template <int taps, int stride, int dilation, int pad>
struct TapAxis {
    static __host__ __device__ constexpr int shift(int tap) {
        const int at = tap * dilation - pad;
        return at >= 0 ? at / stride : -((stride - 1 - at) / stride);
    }
    static __host__ __device__ constexpr int phase(int tap) { return tap * dilation - pad - stride * shift(tap); }
    // The first tap that reads a phase; `taps` where none does.
    static __host__ __device__ constexpr int first_tap(int of_phase) {
        for (int tap = 0; tap < taps; ++tap)
            if (phase(tap) == of_phase) return tap;
        return taps;
    }
    // Only phases that taps read are resident: the index of one among them, how many there are, which one has an index.
    static __host__ __device__ constexpr int index_of(int phase) {
        int index = 0;
        for (int i = 0; i < phase; ++i) index += first_tap(i) < taps;
        return index;
    }
    static __host__ __device__ constexpr int phases() { return index_of(stride); }
    static __host__ __device__ constexpr int phase_at(int index) {
        if (phases() == stride) return index;
        int phase = 0;
        while (first_tap(phase) == taps || index_of(phase) < index) ++phase;
        return phase;
    }
};

template <class Problem, class Tuning>
struct LinearPixels {
    using AxisH = TapAxis<Problem::r, Problem::stride_h, Problem::dilation_h, Problem::pad_top>;
    using AxisW = TapAxis<Problem::s, Problem::stride_w, Problem::dilation_w, Problem::pad_left>;
    static constexpr int row = Tuning::row_pitch, rows = Tuning::image_rows, image = row * rows;
    static constexpr int phases = AxisH::phases() * AxisW::phases(), phase_pixels = Tuning::phase_pixels;
    // Pixels from one vector of channels to the next: all resident ones, and a spare one that no tap reads.
    static constexpr int spare = phases * phase_pixels, pitch = Tuning::pixel_pitch;
    static_assert(pitch == spare + 1, "the host counts as many pixels");

    // The resident pixel that a tap reads for the first output of a tile.
    static constexpr __device__ __forceinline__ int tap_offset(int r, int s) {
        const int h = AxisH::phase(r), w = AxisW::phase(s), index = AxisH::index_of(h) * AxisW::phases() + AxisW::index_of(w);
        return index * phase_pixels + (AxisH::shift(r) - AxisH::shift(AxisH::first_tap(h))) * row + AxisW::shift(s) -
               AxisW::shift(AxisW::first_tap(w));
    }
};

// An output from its linear index.
template <class Problem, class Tuning>
struct LinearOutput {
    using Pixels = LinearPixels<Problem, Tuning>;
    int n, p, q;
    __device__ __forceinline__ explicit LinearOutput(int index) : n(index / Pixels::image) {
        const int rest = index - n * Pixels::image;
        p = rest / Pixels::row, q = rest % Pixels::row;
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
