// Tile loaders: they bring one reduction step of filters or of im2col pixels into shared memory, element by element
// with cp.async, forming the im2col matrix on the way. Shared rows run along filters or pixels; one row per reduction
// index. Reduction order: (c, r, s) for NCHW, (r, s, c) for NHWC, which is the order of the filters in memory.
#pragma once

#include <lib/index.cuh>
#include <lib/micro_kernel.cuh>
#include <lib/ptx.cuh>

namespace leanconv {

template <class Problem>
struct Reduction {
    static constexpr int taps = Problem::r * Problem::s;
    static constexpr int size = Problem::group_c * taps;
};

// A padded row: the four floats make a column of eight rows fall into different banks for the transposing stores.
template <int tile> constexpr int row_pitch = tile + 4;

// Which filter rows and columns of a window lie inside the image, as bits: row r is bit 16 + r, column s is bit s.
template <class Problem>
__device__ __forceinline__ unsigned inside_bits(int h, int w) {
    unsigned bits = 0;
#pragma unroll 1
    for (int r = 0; r < Problem::r; ++r) {
        const int row = h + r * Problem::dilation_h;
        if (row >= 0 && row < Problem::h) bits |= 0x10000u << r;
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
struct Window {
    static constexpr bool bitwise = Problem::r <= 16 && Problem::s <= 16;
    int h, w;
    unsigned bits;

    Window() = default;
    __device__ __forceinline__ Window(int p, int q)
        : h(p * Problem::stride_h - Problem::pad_top), w(q * Problem::stride_w - Problem::pad_left), bits(0) {
        if constexpr (Problem::padded && bitwise) bits = inside_bits<Problem>(h, w);
    }
    static __device__ __forceinline__ unsigned tap_bits(int r, int s) { return bitwise ? 0x10000u << r | 1u << s : 0; }

    __device__ __forceinline__ bool holds(int r, int s, unsigned tap) const {
        if constexpr (!Problem::padded) return true;
        else if constexpr (bitwise) return (bits & tap) == tap;
        else {
            const int row = h + r * Problem::dilation_h, column = w + s * Problem::dilation_w;
            return row >= 0 && row < Problem::h && column >= 0 && column < Problem::w;
        }
    }
};

// Filters lie along the reduction: eight neighbouring lanes read 32 adjacent bytes and scatter them over eight rows.
template <class Problem, class Tuning, bool dealt>
struct FilterLoader {
    static constexpr int threads = Tiling<Tuning>::threads;
    static constexpr int depth = Tuning::tile_reduction;
    static constexpr int per_pass = threads / depth;
    static constexpr int pitch = row_pitch<Tuning::tile_k>;
    static_assert(threads % depth == 0, "a pass of the filter loader covers whole filters");

    const float* w[ceil_div(Tuning::tile_k, per_pass)];
    int row, slot;
    int next = 0;

    __device__ __forceinline__ FilterLoader(const float* filters, int group, int tile) {
        row = threadIdx.x % depth;
        slot = threadIdx.x / depth;
#pragma unroll
        for (int i = 0; i < ceil_div(Tuning::tile_k, per_pass); ++i) {
            // NOTE: filters past the end repeat the last one; what they compute is never stored.
            int k = tile * Tuning::tile_k + position_of<Tiling<Tuning>::lanes_k, dealt>(slot + i * per_pass);
            if (k >= Problem::group_k) k = Problem::group_k - 1;
            w[i] = filters + (static_cast<int64>(group) * Problem::group_k + k) * Reduction<Problem>::size + row;
        }
    }

    // Bring the next reduction step into `stage`.
    __device__ __forceinline__ void load(float* stage) {
        constexpr bool ragged = Reduction<Problem>::size % depth != 0;
        const bool valid = !ragged || next + row < Reduction<Problem>::size;
#pragma unroll
        for (int i = 0; i < ceil_div(Tuning::tile_k, per_pass); ++i)
            if (Tuning::tile_k % per_pass == 0 || slot + i * per_pass < Tuning::tile_k)
                cp_async_4(stage + row * pitch + slot + i * per_pass, w[i] + next, valid);
        next += depth;
    }
};

// NCHW: a lane keeps its pixel and walks down the reduction, so the lanes of a warp read neighbouring pixels and share
// the reduction index. What an index means (offset in the image, filter row and column) repeats every `period` indices
// but for whole channels: a table in shared memory replaces the arithmetic.
template <class Problem, class Tuning, bool dealt>
struct PixelLoaderNCHW {
    static constexpr int threads = Tiling<Tuning>::threads;
    static constexpr int depth = Tuning::tile_reduction;
    static constexpr int tile = Tuning::tile_pixels;
    static constexpr int pitch = row_pitch<tile>;
    static constexpr int pixels = tile > threads ? tile / threads : 1;     // of a thread
    static constexpr int rows_a_pass = tile > threads ? 1 : threads / tile;
    static constexpr int rows = ceil_div(depth, rows_a_pass);              // of a thread
    static_assert(tile % threads == 0 || threads % tile == 0, "a thread keeps its pixels for the whole reduction");
    static_assert(depth % rows_a_pass == 0, "every pass fills whole rows");

    static constexpr int taps = Reduction<Problem>::taps;
    static constexpr int period = taps / gcd(taps, depth) * depth;
    static constexpr int period_channels = period / taps;
    struct Tap { Offset<Problem> offset; unsigned bits; };
    static constexpr bool tabled = Window<Problem>::bitwise;               // at most 16 x 16 taps: 2048 entries of 8
    static constexpr int table_bytes = tabled ? period * static_cast<int>(sizeof(Tap)) : 0;

    const float* image[pixels];
    Window<Problem> window[pixels];
    Tap* table;
    int slot[pixels];
    int row;
    int next = 0, tap = 0;

    static __device__ __forceinline__ Tap decode(int index) {
        const int c = index / taps, r = index % taps / Problem::s, s = index % Problem::s;
        return {static_cast<Offset<Problem>>(c) * (Problem::h * Problem::w) +
                    r * Problem::dilation_h * Problem::w + s * Problem::dilation_w,
                Window<Problem>::tap_bits(r, s)};
    }

    // `scratch` takes the table; the caller puts a barrier between construction and the first load.
    __device__ __forceinline__ PixelLoaderNCHW(const float* x, Offset<Problem> count, Offset<Problem> first, int group,
                                               void* scratch)
        : table(static_cast<Tap*>(scratch)), row(tile > threads ? 0 : threadIdx.x / tile) {
#pragma unroll
        for (int j = 0; j < pixels; ++j) {
            const int at = threadIdx.x % tile + j * threads;
            // NOTE: pixels past the end repeat the last one; what is computed from them is never stored.
            const Pixel<Problem> pixel(first + at < count ? first + at : count - 1);
            window[j] = Window<Problem>(pixel.p, pixel.q);
            image[j] = x + ((static_cast<int64>(pixel.n) * Problem::c + group * Problem::group_c) * Problem::h +
                            window[j].h) * Problem::w + window[j].w;
            slot[j] = slot_of<Tiling<Tuning>::lanes_pixels, dealt>(at);
        }
        if constexpr (tabled)
            for (int i = threadIdx.x; i < period; i += threads) table[i] = decode(i);
    }

    // Bring the next reduction step into `stage`.
    __device__ __forceinline__ void load(float* stage) {
        constexpr int size = Reduction<Problem>::size;
#pragma unroll
        for (int i = 0; i < rows; ++i) {
            const int at = row + i * rows_a_pass;
            const bool real = size % depth == 0 || next + at < size;
            Tap t;
            if constexpr (tabled) t = table[tap + at];
            else t = decode(tap + at);
            const int r = (tap + at) % taps / Problem::s, s = (tap + at) % Problem::s;
#pragma unroll
            for (int j = 0; j < pixels; ++j)
                cp_async_4(stage + at * pitch + slot[j], image[j] + t.offset, real && window[j].holds(r, s, t.bits));
        }
        next += depth;
        tap += depth;
        if (tap == period) {
            tap = 0;
#pragma unroll
            for (int j = 0; j < pixels; ++j) image[j] += static_cast<int64>(period_channels) * Problem::h * Problem::w;
        }
    }
};

// NHWC: a lane keeps its place in the reduction step and serves several pixels, so that eight neighbouring lanes read
// 32 adjacent bytes of a pixel's channels. One decoding of the reduction index serves all its pixels.
template <class Problem, class Tuning, bool dealt>
struct PixelLoaderNHWC {
    static constexpr int threads = Tiling<Tuning>::threads;
    static constexpr int depth = Tuning::tile_reduction;
    static constexpr int tile = Tuning::tile_pixels;
    static constexpr int pitch = row_pitch<tile>;
    static constexpr int per_pass = threads / depth;
    static constexpr int pixels = ceil_div(tile, per_pass);                // of a thread
    static constexpr int table_bytes = 0;
    static_assert(threads % depth == 0, "a pass of the pixel loader covers whole pixels");

    const float* image[pixels];
    Window<Problem> window[pixels];
    int row, slot;
    int next = 0;

    __device__ __forceinline__ PixelLoaderNHWC(const float* x, Offset<Problem> count, Offset<Problem> first, int group,
                                               void*)
        : row(threadIdx.x % depth), slot(threadIdx.x / depth) {
#pragma unroll
        for (int j = 0; j < pixels; ++j) {
            const int at = position_of<Tiling<Tuning>::lanes_pixels, dealt>(slot + j * per_pass);
            // NOTE: pixels past the end repeat the last one; what is computed from them is never stored.
            const Pixel<Problem> pixel(first + at < count ? first + at : count - 1);
            window[j] = Window<Problem>(pixel.p, pixel.q);
            image[j] = x + ((static_cast<int64>(pixel.n) * Problem::h + window[j].h) * Problem::w + window[j].w) *
                               Problem::c + group * Problem::group_c;
        }
    }

    // Bring the next reduction step into `stage`.
    __device__ __forceinline__ void load(float* stage) {
        constexpr int size = Reduction<Problem>::size;
        const bool real = size % depth == 0 || next + row < size;
        int tap, c;
        if constexpr (Problem::group_c % depth == 0) {
            // A step stays within one tap: the decoding is the same for all threads.
            tap = next / Problem::group_c;
            c = next % Problem::group_c + row;
        } else {
            tap = (next + row) / Problem::group_c;
            c = (next + row) % Problem::group_c;
        }
        const int r = tap / Problem::s, s = tap % Problem::s;
        const unsigned bits = Window<Problem>::tap_bits(r, s);
        const Offset<Problem> offset =
            (static_cast<Offset<Problem>>(r) * Problem::dilation_h * Problem::w + s * Problem::dilation_w) * Problem::c + c;
#pragma unroll
        for (int j = 0; j < pixels; ++j)
            if (tile % per_pass == 0 || slot + j * per_pass < tile)
                cp_async_4(stage + row * pitch + slot + j * per_pass, image[j] + offset,
                           real && window[j].holds(r, s, bits));
        next += depth;
    }
};

}  // namespace leanconv
