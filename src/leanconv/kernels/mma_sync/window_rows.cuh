// Windows of few channels: with the channels last, a window's row of S pixels is one run of S * C neighbours, which tensor cores
// read where it lies. A CTA copies the rows of x that its outputs read into shared memory, a pixel each `pixel` elements apart,
// so that runs begin at even elements: a pair of a run is one word. In NHWC x has these runs. In NCHW the copy makes them: a lane
// loads the channels of a pixel, or of two where a pixel is no whole words, from their planes, and stores them side by side;
// neighbouring lanes have neighbouring pixels, and consecutive words.
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
    static_assert(Problem::groups == 1 && Problem::dilation_w == 1 && !Problem::chwn, "a window's row is a run of pixels");
    // Elements between pixels, and between neighbouring outputs: an even number.
    static constexpr int pixel = Problem::stride_w * Problem::c % 2 == 0 ? Problem::c : Problem::c + 1;
    static constexpr int step = Problem::stride_w * pixel, run = Problem::s * pixel;
    // Eights of a run, and of all rows of a slice; of the last eight of a run so many elements belong to it.
    static constexpr int eights = ceil_div(run, 8), of_slice = Problem::r * eights, last = run - 8 * (eights - 1);
    // Elements that a lane copies at once.
    static constexpr int unit = Problem::nhwc ? 2 : pixel % 2 ? 2 * pixel : pixel;
    // Rows of x in shared memory, with room for the last run.
    static constexpr int read_rows = (rows - 1) * Problem::stride_h + (Problem::r - 1) * Problem::dilation_h + 1;
    static constexpr int pitch = ceil_div((columns - 1) * step + 8 * eights, unit) * unit;
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
        if constexpr (Problem::nhwc) copy_runs<threads>(shared, x, tile, slice);
        else copy_planes<threads>(shared, x, tile, slice);
    }

    // NHWC. A lane copies a pair of elements at a time.
    template <int threads>
    static __device__ __forceinline__ void copy_runs(unsigned* shared, ElementsIn<Problem> x, const Tile& tile, int slice) {
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

    // NCHW. Units lie side by side in a row. A thread has the loads of `at_once` units under way, of `held` words each.
    template <int threads>
    static __device__ __forceinline__ void copy_planes(unsigned* shared, ElementsIn<Problem> x, const Tile& tile, int slice) {
        constexpr int words = unit / 2, pixels = unit / pixel, units = pitch / unit, count = read_rows * units;
        constexpr int held = words <= 8 ? words : 4, most = words < 12 ? 12 / words : 1, rounds = ceil_div(count, threads);
        constexpr int at_once = most < rounds ? most : rounds;
        constexpr int64 plane = static_cast<int64>(D::d) * Problem::h * Problem::w;
        const int h0 = tile.p * Problem::stride_h - Problem::pad_top, w0 = tile.q * Problem::stride_w - Problem::pad_left;
        const Offset<Problem> image = tile.n * Problem::c * D::d + slice;
#pragma unroll 1
        for (int round = 0; round < rounds; round += at_once)
#pragma unroll 1
            for (int first = 0; first < words; first += held) {
                unsigned two[at_once][held] = {};
#pragma unroll
                for (int j = 0; j < at_once; ++j) {
                    const int i = (round + j) * threads + threadIdx.x, h = h0 + i / units, w = w0 + i % units * pixels;
                    const bool inside = i < count && static_cast<unsigned>(h) < Problem::h;
                    const Offset<Problem> row = (image * Problem::h + h) * Problem::w + w;
#pragma unroll
                    for (int of = 0; of < 2 * held; ++of) {
                        const int e = 2 * first + of, right = e / pixel, c = e % pixel;
                        if (inside && static_cast<unsigned>(w + right) < Problem::w && right < pixels && c < Problem::c)
                            two[j][of / 2] |= static_cast<unsigned>(x[row + c * plane + right].bits) << 16 * (of % 2);
                    }
                }
#pragma unroll
                for (int j = 0; j < at_once; ++j) {
                    const int i = (round + j) * threads + threadIdx.x;
                    if (i < count) store_words<words>(shared + (i * words + first), two[j], words - first);
                }
            }
    }

    // Stores those words of a unit of `words` that exist, by as many at once as are aligned in every unit.
    template <int words, int held>
    static __device__ __forceinline__ void store_words(unsigned* to, const unsigned (&two)[held], int exist) {
        constexpr int together = gcd(words, 4);
#pragma unroll
        for (int i = 0; i < held; i += together) {
            if (held < words && i >= exist) break;
            if constexpr (together == 4) *reinterpret_cast<uint4*>(to + i) = make_uint4(two[i], two[i + 1], two[i + 2], two[i + 3]);
            else if constexpr (together == 2) *reinterpret_cast<uint2*>(to + i) = make_uint2(two[i], two[i + 1]);
            else to[i] = two[i];
        }
    }
};

}  // namespace leanconv
