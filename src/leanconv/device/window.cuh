// The window of an output pixel: where it begins, and which of its taps lie inside the image.
#pragma once

#include <device/index.cuh>

namespace leanconv {

// The bits of a tap: column s is bit s, row r is bit 16 + r, each up to 16 of them. With the slices of volumes there is
// room for ten: row r is bit 10 + r, slice t bit 20 + t.
template <class Problem>
struct TapBits {
    using D = Depth<Problem>;
    static constexpr int most = D::volume ? 10 : 16;
    static constexpr unsigned row = 1u << most, slice = row << most;
    static constexpr bool enough = D::t <= most && Problem::r <= most && Problem::s <= most;
};

// Which filter slices, rows and columns of a window lie inside the image, as bits.
template <class Problem>
__device__ __forceinline__ unsigned inside_bits(int d, int h, int w) {
    using D = Depth<Problem>;
    unsigned bits = 0;
    if constexpr (D::volume) {
#pragma unroll 1
        for (int t = 0; t < D::t; ++t) {
            const int slice = d + t * D::dilation;
            if (slice >= 0 && slice < D::d) bits |= TapBits<Problem>::slice << t;
        }
    }
#pragma unroll 1
    for (int r = 0; r < Problem::r; ++r) {
        const int row = h + r * Problem::dilation_h;
        if (row >= 0 && row < Problem::h) bits |= TapBits<Problem>::row << r;
    }
#pragma unroll 1
    for (int s = 0; s < Problem::s; ++s) {
        const int column = w + s * Problem::dilation_w;
        if (column >= 0 && column < Problem::w) bits |= 1u << s;
    }
    return bits;
}

// One window of the input: where its first element would lie, and what of it is inside the image.
template <class Problem>
struct Window : SliceOf<Depth<Problem>::volume> {
    using D = Depth<Problem>;
    static constexpr bool bitwise = TapBits<Problem>::enough;
    int h, w;
    unsigned bits;

    Window() = default;
    __device__ __forceinline__ Window(const Pixel<Problem>& pixel, const Phase<Problem>& phase)
        : h(pixel.p * Problem::stride_h - phase.pad_top), w(pixel.q * Problem::stride_w - phase.pad_left), bits(0) {
        if constexpr (D::volume) this->slice = pixel.slice * D::stride - phase.pad_front;
        if constexpr (Problem::padded && bitwise) bits = inside_bits<Problem>(this->slice, h, w);
    }
    static __device__ __forceinline__ unsigned tap_bits(int t, int r, int s) {
        using Bits = TapBits<Problem>;
        if constexpr (D::volume) return bitwise ? Bits::slice << t | Bits::row << r | 1u << s : 0;
        else return bitwise ? Bits::row << r | 1u << s : 0;
    }
    // The row of all images, of one channel, in which the window begins.
    __device__ __forceinline__ Bytes<Problem> row(Offset<Problem> n) const {
        Bytes<Problem> image = static_cast<Bytes<Problem>>(n);
        if constexpr (D::volume) image = image * D::d + this->slice;
        return image * Problem::h + h;
    }

    __device__ __forceinline__ bool holds(int t, int r, int s, unsigned tap) const {
        if constexpr (!Problem::padded) return true;
        else if constexpr (bitwise) return (bits & tap) == tap;
        else {
            const int slice = this->slice + t * D::dilation;
            const int row = h + r * Problem::dilation_h, column = w + s * Problem::dilation_w;
            const bool in_volume = !D::volume || (slice >= 0 && slice < D::d);
            return in_volume && row >= 0 && row < Problem::h && column >= 0 && column < Problem::w;
        }
    }
};

}  // namespace leanconv
