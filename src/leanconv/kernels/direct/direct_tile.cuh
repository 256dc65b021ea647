// The tile of a direct convolution: how a block's outputs are divided among warps and lanes, how its pixels of the image
// lies in shared memory, and which pixels a thread holds in registers for which taps of a filter row.
#pragma once

#include <device/index.cuh>

namespace leanconv {

// A block computes tile_k filters x (tile_w x tile_h) pixels, a thread thread_k filters x thread_pixels adjacent pixels
// of a row. The lanes of a warp form a lanes_k x lanes_w x lanes_h grid.
template <class Problem, class Tuning>
struct DirectTile {
    static constexpr int thread_k = Tuning::thread_k, thread_pixels = Tuning::thread_pixels, tile_c = Tuning::tile_c;
    static constexpr int lanes_k = Tuning::lanes_k, lanes_w = Tuning::lanes_w, lanes_h = 32 / (lanes_k * lanes_w);
    static constexpr int warps_k = Tuning::tile_k / (lanes_k * thread_k);
    static constexpr int warps_w = Tuning::tile_w / (lanes_w * thread_pixels);
    static constexpr int warps_h = Tuning::tile_h / lanes_h;
    static constexpr int threads = 32 * warps_k * warps_w * warps_h;
    static constexpr int taps = Problem::r * Problem::s;
    static constexpr int steps = ceil_div(Problem::group_c, tile_c);  // of a tile
    static constexpr bool resident = steps == 1;  // the filters are the same for all tiles of a block

    // Input rows and columns that the block's windows read. Copies of four pixels begin at multiples of four:
    // Problem::shift pixels early.
    static constexpr int rows = (Tuning::tile_h - 1) * Problem::stride_h + (Problem::r - 1) * Problem::dilation_h + 1;
    static constexpr int columns =
        Problem::shift + (Tuning::tile_w - 1) * Problem::stride_w + (Problem::s - 1) * Problem::dilation_w + 1;

    // In shared memory rows i, i + stride, i + 2 * stride, ... follow each other; so do columns where pixels are copied
    // one by one: the pixels that a tap reads in neighbouring windows are then adjacent, and otherwise `step` apart.
    static constexpr int phases = Tuning::vector ? 1 : Problem::stride_w, step = Tuning::vector ? Problem::stride_w : 1;
    static constexpr int phase_rows = ceil_div(rows, Problem::stride_h);
    static constexpr int phase_columns = Tuning::vector
        ? ceil_div(columns, 4) * 4
        : Tuning::tile_w + ceil_div((Problem::s - 1) * Problem::dilation_w / phases, 4) * 4;
    static constexpr int image_floats = tile_c * Problem::channel_pitch;
    static constexpr int filter_floats = tile_c * taps * Problem::filter_pitch;
    static constexpr int stage_floats = image_floats + (resident ? 0 : filter_floats);

    static_assert(32 % (lanes_k * lanes_w) == 0, "the lanes of a warp form a lanes_k x lanes_w x lanes_h grid");
    static_assert(thread_k % 4 == 0 && thread_pixels % 4 == 0, "filters and pixels are read four at a time");
    static_assert(Tuning::tile_k % (lanes_k * thread_k) == 0 && Tuning::tile_w % (lanes_w * thread_pixels) == 0 &&
                      Tuning::tile_h % lanes_h == 0, "warps divide the tile");
    static_assert(Problem::pitch % 4 == 0 && Problem::pitch >= phases * phase_columns, "a row holds its columns");
    static_assert(Problem::channel_pitch % 4 == 0 &&
                      Problem::channel_pitch >= Problem::stride_h * phase_rows * Problem::pitch, "a channel holds its rows");
    static_assert(Problem::filter_pitch % 4 == 0 && Problem::filter_pitch >= Tuning::tile_k, "a tap holds its filters");
    static_assert(!Tuning::vector || (!Problem::nhwc && Problem::w % 4 == 0),
                  "copies of four pixels need aligned rows of NCHW");

    static __device__ __forceinline__ int row_place(int i) {
        return i % Problem::stride_h * phase_rows + i / Problem::stride_h;
    }
    static __device__ __forceinline__ int column_place(int j) {
        return j % phases * phase_columns + j / phases;
    }
};

// Where a thread's outputs lie: its warp's first filter, row and column in the tile, and its lane's place in the grid.
// NOTE: the lowest lane bit goes to filters, the next ones to pixels: either fragment of 128 bits takes two cycles then
// instead of four (see Tiling in kernels/simt/tile.cuh).
template <class Tile>
struct DirectPlace {
    int warp_k, warp_row, warp_column, lane_k, lane_row, lane_column;
    __device__ __forceinline__ DirectPlace() {
        constexpr int pixels = 32 / Tile::lanes_k;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int pixel = Tile::lanes_k == 1 ? lane : lane / 2 % pixels;
        lane_k = Tile::lanes_k == 1 ? 0 : lane % 2 + lane / (2 * pixels) * 2;
        lane_row = pixel / Tile::lanes_w, lane_column = pixel % Tile::lanes_w;
        warp_k = warp % Tile::warps_k * (Tile::lanes_k * Tile::thread_k);
        warp_column = warp / Tile::warps_k % Tile::warps_w * (Tile::lanes_w * Tile::thread_pixels);
        warp_row = warp / Tile::warps_k / Tile::warps_w * Tile::lanes_h;
    }
    // Of the tile: the thread's first filter (every four of them are 4 * lanes_k apart), row and column.
    __device__ __forceinline__ int k() const { return warp_k + lane_k * 4; }
    __device__ __forceinline__ int row() const { return warp_row + lane_row; }
    __device__ __forceinline__ int column() const { return warp_column + lane_column * Tile::thread_pixels; }
};

// The taps of a filter row in the order in which a thread takes them: by the phase of their columns. Neighbours in this
// order share a run of pixels in registers, a segment, as long as that is no longer than `most` pixels.
template <class Problem, class Tuning>
struct DirectTaps {
    using Tile = DirectTile<Problem, Tuning>;
    // pixels from the first to the last that a tap takes for a thread, and the most of a segment
    static constexpr int reach = (Tuning::thread_pixels - 1) * Tile::step + 1, most = (reach + 3) / 4 * 4 + 12;

    struct Tap {
        int s, segment, phase;
        int begin, length;  // of the segment: its first column in the phase, relative to the thread's, and its pixels
        int at;             // of the segment's pixels the first that this tap takes
        bool opens;
    };

    // Tap `place` in this order; `length` reaches to this tap's last pixel.
    __host__ __device__ static constexpr Tap tap(int place) {
        Tap now{};
        int number = -1, segment = -1;
        for (int phase = 0; phase < Tile::phases; ++phase) {
            bool open = false;
            for (int s = 0; s < Problem::s; ++s) {
                if (s * Problem::dilation_w % Tile::phases != phase) continue;
                const int column = Problem::shift + s * Problem::dilation_w / Tile::phases;
                const int end = (column + reach + 3) / 4 * 4;
                const bool opens = !open || end - now.begin > most;
                if (opens) ++segment, now.begin = column / 4 * 4, open = true;
                now.s = s, now.segment = segment, now.phase = phase, now.opens = opens;
                now.length = end - now.begin, now.at = column - now.begin;
                if (++number == place) return now;
            }
        }
        return now;
    }
    static constexpr int segments = tap(Problem::s - 1).segment + 1;
    // The first tap of a segment, with the pixels of the whole of it.
    __host__ __device__ static constexpr Tap opening(int segment) {
        Tap first{};
        for (int i = Problem::s - 1; i >= 0; --i) {
            const Tap now = tap(i);
            if (now.segment != segment) continue;
            const int length = first.length > now.length ? first.length : now.length;
            first = now, first.length = length;
        }
        return first;
    }
    __host__ __device__ static constexpr int longest() {
        int length = 0;
        for (int segment = 0; segment < segments; ++segment)
            if (opening(segment).length > length) length = opening(segment).length;
        return length;
    }
};

}  // namespace leanconv
