// Rows of one channel that a thread walks down: the window of an input row that a strip of outputs reads, and how it is
// loaded.
#pragma once

#include <device/element.cuh>
#include <device/epilogue.cuh>
#include <device/index.cuh>
#include <device/ptx/memory.cuh>

namespace leanconv {

// The window of a strip of so many outputs of a layer: the pixels of an input row that it reads.
template <class Problem, int columns_>
struct DepthwiseWindow {
    static constexpr int columns = columns_, taps = filter_taps<Problem>;
    // pixels of a window, and rows of outputs besides one that an input row reaches or lies between
    static constexpr int window = (columns - 1) * Problem::stride_w + (Problem::s - 1) * Problem::dilation_w + 1;
    static constexpr int span = (Problem::r - 1) * Problem::dilation_h / Problem::stride_h;
    static constexpr int strips = ceil_div(Problem::q, columns);
    // pixels of an image row, and elements from one to the next
    static constexpr int row_pixels = Problem::w, pixel = Problem::nhwc ? Problem::c : 1;
    // Some window of a strip leaves the image, or the last strip is not whole.
    static constexpr bool checked = Problem::padded || Problem::q % columns != 0;
    // Rows of NCHW whose strips begin at multiples of four pixels are read by vectors of four. Pixel `at` of a window is
    // element `lead + at` of them.
    static constexpr bool vectors = !Problem::nhwc && columns * Problem::stride_w % 4 == 0 && Problem::w % 4 == 0;
    static constexpr int lead = (4 - Problem::pad_left % 4) % 4;
    static constexpr bool vector_stores = !Problem::nhwc && columns % 4 == 0 && Problem::q % 4 == 0;

    // Whether some output reads pixel `at` of the window.
    __host__ __device__ static constexpr bool read(int at) {
        return reads_place(at, columns, Problem::s, Problem::stride_w, Problem::dilation_w);
    }
};

// The pixels of a window as loads bring them; they become floats where they are used.
// NOTE: a pixel of 16 bits that becomes a float behind its load waits for it, so that no two loads are in flight.
// Explored (H200, 61b0ad1): walking kernels took up to 5 times as long as in float32.
template <class Window, class T, bool packed = Window::vectors && sizeof(T) == 2>
struct WindowPixels {
    T pixels[Window::window];
    __device__ __forceinline__ float operator[](int at) const { return to_float(pixels[at]); }
};
template <class Window, class T>
struct WindowPixels<Window, T, true> {
    Packed<T, 4> fours[ceil_div(Window::lead + Window::window, 4)];
    __device__ __forceinline__ float operator[](int at) const {
        return fours[(Window::lead + at) / 4].value((Window::lead + at) % 4);
    }
};

// Loads the window whose first column is `column`, of an image row that begins at `row`; zeros outside, and everywhere
// unless the row is `inside` the image.
template <class Window, class T>
__device__ __forceinline__ void load_window(WindowPixels<Window, T>& window, const T* row, int column, bool inside) {
#pragma unroll
    for (int v = -Window::lead; v < Window::window; v += 4) {
        const int needed = Window::read(v) + Window::read(v + 1) + Window::read(v + 2) + Window::read(v + 3);
        if constexpr (Window::vectors) {
            const bool exists =
                !Window::checked || static_cast<unsigned>(column + v) < static_cast<unsigned>(Window::row_pixels);
            if constexpr (sizeof(T) == 2) {
                if (needed > 0) window.fours[(Window::lead + v) / 4].load(row + column + v, inside && exists);
                continue;
            } else if (needed > 1) {
                float four[4] = {};
                if (inside && exists) load_adjacent(four, row + column + v);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (Window::read(v + i)) window.pixels[v + i] = four[i];
                continue;
            }
        }
        if constexpr (!Window::vectors || sizeof(T) != 2) {
#pragma unroll
            for (int k = v; k < v + 4; ++k) {
                if (!Window::read(k)) continue;
                const bool exists =
                    !Window::checked || static_cast<unsigned>(column + k) < static_cast<unsigned>(Window::row_pixels);
                window.pixels[k] = inside && exists ? row[(column + k) * Window::pixel] : T{};
            }
        }
    }
}

// The output slices of a thread, and those of the input that it reads a row of at once; one of each of images, whose Tuning
// says nothing of them.
template <class Problem, class Tuning, bool volume = Depth<Problem>::volume>
struct ThreadSlices {
    static constexpr int slices = 1, deep = 1, tiles = 1;
    __host__ __device__ static constexpr bool read(int) { return true; }
};
template <class Problem, class Tuning>
struct ThreadSlices<Problem, Tuning, true> {
    using D = Depth<Problem>;
    static constexpr int slices = Tuning::slices, deep = (slices - 1) * D::stride + (D::t - 1) * D::dilation + 1;
    static constexpr int tiles = ceil_div(D::z, slices);
    // Whether some output reads slice `at` of those.
    __host__ __device__ static constexpr bool read(int at) { return reads_place(at, slices, D::t, D::stride, D::dilation); }
};

// Brings `count` pixels of a row that begins at `row`, from column `first` on, to the L2 cache: those that exist.
// `apart` is the distance of pixels in elements. Neighbours share a sector of 32 bytes where they are adjacent.
template <int count, int pixels, int apart, class T>
__device__ __forceinline__ void prefetch_pixels(const T* row, int first) {
    constexpr int step = apart == 1 ? 32 / static_cast<int>(sizeof(T)) : 1;
#pragma unroll
    for (int i = 0; i < count; i += step)
        if (static_cast<unsigned>(first + i) < static_cast<unsigned>(pixels)) prefetch_l2(row + (first + i) * apart);
}

}  // namespace leanconv
