// Windows of few channels in NHWC: a window's row of S pixels is one run of S * C neighbours in memory, which tensor cores read
// where it lies. A CTA copies the rows of x that its outputs read into shared memory, a pixel each `pixel` elements apart, so
// that runs begin at even elements: a pair of a run is one word.
#pragma once

#include <device/element.cuh>
#include <device/index.cuh>
#include <device/ptx/mma.cuh>

namespace leanconv {

// Windows of rows x columns neighbouring outputs.
template <class Problem, int rows, int columns>
struct WindowRows {
    using D = Depth<Problem>;
    static_assert(columns % 16 == 0, "16 neighbours of a row are the tensor core's");
    static_assert(Problem::groups == 1 && Problem::dilation_w == 1 && Problem::nhwc, "a window's row is a run of memory");
    // Elements between pixels, and between neighbouring outputs: an even number.
    static constexpr int pixel = Problem::stride_w * Problem::c % 2 == 0 ? Problem::c : Problem::c + 1;
    static constexpr int step = Problem::stride_w * pixel, run = Problem::s * pixel;
    // Eights of a run, and of all rows of a slice; of the last eight of a run so many elements belong to it.
    static constexpr int eights = ceil_div(run, 8), of_slice = Problem::r * eights, last = run - 8 * (eights - 1);
    // Rows of x in shared memory, with room for the last run.
    static constexpr int read_rows = (rows - 1) * Problem::stride_h + (Problem::r - 1) * Problem::dilation_h + 1;
    static constexpr int pitch = ceil_div((columns - 1) * step + 8 * eights, 2) * 2;
    static constexpr int tiles_p = ceil_div(Problem::p, rows), tiles_q = ceil_div(Problem::q, columns);
    static constexpr int pixel_words = read_rows * pitch / 2;

    // Where an eight of a slice lies behind the beginning of a window.
    static __host__ __device__ constexpr int eight_at(int number) {
        return number / eights * Problem::dilation_h * pitch + number % eights * 8;
    }

    // The outputs of a tile: its image, slice, and first row and column.
    struct Tile {
        int p, q, z;
        Offset<Problem> n;
        __device__ __forceinline__ explicit Tile(int64 number) {
            q = static_cast<int>(number % tiles_q) * columns, number /= tiles_q;
            p = static_cast<int>(number % tiles_p) * rows, number /= tiles_p;
            z = static_cast<int>(number % D::z);
            n = static_cast<Offset<Problem>>(number / D::z);
        }
        // The slice of x that slice t of the filters reads.
        __device__ __forceinline__ int slice(int t) const { return z * D::stride - D::pad + t * D::dilation; }
    };

    // Copies the rows that a tile reads, of one slice; zeros outside the image.
    template <int threads>
    static __device__ __forceinline__ void copy(unsigned* shared, ElementsIn<Problem> x, const Tile& tile, int slice) {
        constexpr int words = pitch / 2;
        const int h0 = tile.p * Problem::stride_h - Problem::pad_top, w0 = tile.q * Problem::stride_w - Problem::pad_left;
        const Bytes<Problem> image = static_cast<Bytes<Problem>>(tile.n) * D::d + slice;
#pragma unroll 4
        for (int i = threadIdx.x; i < read_rows * words; i += threads) {
            const int h = h0 + i / words, e = i % words * 2;
            const bool inside = static_cast<unsigned>(h) < Problem::h;
            const Bytes<Problem> row = (image * Problem::h + h) * Problem::w;
            unsigned two = 0;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int w = w0 + (e + half) / pixel, c = (e + half) % pixel;
                if (inside && static_cast<unsigned>(w) < Problem::w && c < Problem::c)
                    two |= static_cast<unsigned>(x[(row + w) * Problem::c + c].bits) << 16 * half;
            }
            shared[i] = two;
        }
    }
};

}  // namespace leanconv
