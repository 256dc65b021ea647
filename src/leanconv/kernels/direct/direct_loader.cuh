// Bring a step of a direct convolution into shared memory: tile_c channels of the image, row by row, and of the filters,
// which are transposed on the way so that neighbouring filters are adjacent. Floats are copied with cp.async; elements of
// 16 bits pass registers, where they become floats.
#pragma once

#include <device/element.cuh>
#include <device/ptx/memory.cuh>
#include <kernels/direct/direct_tile.cuh>

namespace leanconv {

// `count` adjacent elements, one or four, to shared memory as floats; zeros where they are not `valid`.
template <int count, class T>
__device__ __forceinline__ void bring(float* to, const T* from, bool valid) {
    if constexpr (sizeof(T) == 4 && count == 4) {
        cp_async_16(to, from, valid);
    } else if constexpr (sizeof(T) == 4) {
        cp_async_4(to, from, valid);
    } else if constexpr (count == 4) {
        Packed<T, 4> four;
        four.load(from, valid);
        const float v[4] = {four.value(0), four.value(1), four.value(2), four.value(3)};
        store_vector(to, v);
    } else {
        *to = valid ? to_float(*from) : 0.0f;
    }
}

// A step brings tile_c channels; after the last one the loader goes on to the tile below.
template <class Problem, class Tuning>
struct DirectImageLoader {
    using Tile = DirectTile<Problem, Tuning>;
    using B = Bytes<Problem>;
    using T = typename Problem::element;
    static constexpr int threads = Tile::threads, tile_c = Tile::tile_c;
    static constexpr bool whole = Problem::group_c % tile_c == 0;
    static constexpr B bytes = sizeof(T), pixel = bytes * (Problem::nhwc ? Problem::c : 1), row = pixel * Problem::w;
    static constexpr B channel = bytes * (Problem::nhwc ? 1 : Problem::h * Problem::w);

    // NCHW: units of a row, of one or four pixels; a thread keeps its units and takes some of the channels.
    static constexpr int unit = Tuning::vector ? 4 : 1, row_units = ceil_div(Tile::columns, unit);
    static constexpr int units = Tile::rows * row_units;
    __host__ __device__ static constexpr int channels_beside() {
        int beside = 1;
        while (tile_c % (2 * beside) == 0 && threads % (2 * beside) == 0 && units * 2 * beside <= threads) beside *= 2;
        return beside;
    }
    static constexpr int beside = channels_beside(), side = threads / beside, passes = ceil_div(units, side);
    // NOTE: code for all passes of a large tile at once would hold their addresses in registers.
    static constexpr int at_once = passes <= 8 ? passes : 4;
    // NHWC: the channels of a pixel are adjacent, and so are the lanes that copy them. A thread keeps its channel and its
    // columns and walks down the rows.
    static constexpr int pixels_beside = Problem::nhwc ? threads / tile_c : threads;
    static constexpr int columns_beside = pixels_beside < Tile::columns ? pixels_beside : Tile::columns;
    static constexpr int rows_beside = pixels_beside / columns_beside;
    static constexpr int rows_at_once = Tile::rows <= 16 * rows_beside ? 16 : 8;
    static_assert(pixels_beside > 0, "a thread has one channel of a pixel");

    const T* x;
    B offset;  // of the next step's first channel in the first row and column of the tile, in bytes
    int i, j;  // this row and column
    int next;  // channel

    __device__ __forceinline__ DirectImageLoader(const T* image, int64 n, int group, int p, int q)
        : x(image), i(p * Problem::stride_h - Problem::pad_top),
          j(q * Problem::stride_w - Problem::pad_left - Problem::shift), next(0) {
        const B first = static_cast<B>(group) * Problem::group_c * channel;
        offset = static_cast<B>(n) * (Problem::h * row * (Problem::nhwc ? 1 : Problem::c)) + first +
            static_cast<B>(i) * row + static_cast<B>(j) * pixel;
    }

    __device__ __forceinline__ bool inside_column(int at_row) const {
        return static_cast<unsigned>(i + at_row) < static_cast<unsigned>(Problem::h);
    }
    __device__ __forceinline__ bool inside_row(int at_column) const {
        return static_cast<unsigned>(j + at_column) < static_cast<unsigned>(Problem::w);
    }

    __device__ __forceinline__ void load(float* stage) {
        if constexpr (Problem::nhwc) load_pixels(stage);
        else load_rows(stage);
        next += tile_c;
        offset += tile_c * channel;
        if (next >= Problem::group_c) {
            next = 0;
            i += Tuning::tile_h * Problem::stride_h;
            offset += Tuning::tile_h * Problem::stride_h * row - Tile::steps * tile_c * channel;
        }
    }

    __device__ __forceinline__ void load_rows(float* stage) {
        const int first_c = threadIdx.x / side;
#pragma unroll at_once
        for (int n = 0; n < passes; ++n) {
            const int number = threadIdx.x % side + n * side, at_row = number / row_units;
            const int at_column = number % row_units * unit;
            if (units % side != 0 && number >= units) continue;
            const bool exists = inside_column(at_row) && inside_row(at_column);
            const B from = offset + static_cast<B>(first_c) * channel + static_cast<B>(at_row) * row +
                static_cast<B>(at_column) * pixel;
            float* const to =
                stage + first_c * Problem::channel_pitch + Tile::row_place(at_row) * Problem::pitch + Tile::column_place(at_column);
#pragma unroll
            for (int c = 0; c < tile_c; c += beside) {
                const bool valid = exists && (whole || next + c + first_c < Problem::group_c);
                const T* const source = at_byte(x, from) + static_cast<int64>(c) * Problem::h * Problem::w;
                bring<unit>(to + c * Problem::channel_pitch, source, valid);
            }
        }
    }

    __device__ __forceinline__ void load_pixels(float* stage) {
        const int c = threadIdx.x % tile_c, place = threadIdx.x / tile_c;
        const int first_row = place / columns_beside, first_column = place % columns_beside;
        if (first_row >= rows_beside) return;
        const bool real = whole || next + c < Problem::group_c;
#pragma unroll
        for (int from_column = 0; from_column < Tile::columns; from_column += columns_beside) {
            const int at_column = from_column + first_column;
            if (Tile::columns % columns_beside != 0 && at_column >= Tile::columns) continue;
            const bool exists = real && inside_row(at_column);
            const B from = offset + static_cast<B>(c) * channel + static_cast<B>(first_row) * row +
                static_cast<B>(at_column) * pixel;
            float* const to = stage + c * Problem::channel_pitch + Tile::column_place(at_column);
#pragma unroll rows_at_once
            for (int n = 0; n < Tile::rows; n += rows_beside) {
                const int at_row = n + first_row;
                if (Tile::rows % rows_beside != 0 && at_row >= Tile::rows) continue;
                const T* const source = at_byte(x, from + static_cast<B>(n) * row);
                bring<1>(to + Tile::row_place(at_row) * Problem::pitch, source, exists && inside_column(at_row));
            }
        }
    }
};

// Filters lie in shared memory by channel and tap, tile_k of them adjacent: by tap and channel where the channels of a
// tap are adjacent in memory. With Problem::reversed, the gradient of the input, `w` holds the filters of the layer:
// its filters are channels here and its channels filters, and taps stand in their own order (see filter_row).
template <class Problem, class Tuning>
struct DirectFilterLoader {
    using Tile = DirectTile<Problem, Tuning>;
    using T = typename Problem::element;
    static constexpr int threads = Tile::threads, tile_c = Tile::tile_c, taps = Tile::taps, tile_k = Tuning::tile_k;
    static constexpr bool whole_c = Problem::group_c % tile_c == 0, whole_k = Problem::group_k % tile_k == 0;
    static constexpr bool channels_inside = Problem::nhwc && !Problem::reversed;
    static constexpr bool filters_inside = Problem::nhwc && Problem::reversed;
    // Neighbouring lanes take elements adjacent in memory: of a run of `run`, of which a filter has `runs` in a step.
    static constexpr int run = channels_inside ? tile_c : Problem::reversed ? taps : tile_c * taps;
    static constexpr int runs = tile_c * taps / run;
    static constexpr int run_step = channels_inside ? Problem::group_c : Problem::group_k * taps;
    static constexpr int filter_step = Problem::reversed ? taps : Problem::group_c * taps;
    // NOTE: sixteen lanes side by side, as FilterLoader in filter_loader.cuh has measured.
    static constexpr int lanes = run > 8 ? 16 : run > 4 ? 8 : run > 2 ? 4 : run;
    static constexpr int per_pass = threads / lanes, passes = ceil_div(tile_k, per_pass);
    static constexpr int step_elements = tile_c * (channels_inside ? 1 : Problem::reversed ? Problem::group_k * taps : taps);

    const T* w;  // this thread's first element in the next step
    int next, first_k;

    __device__ __forceinline__ DirectFilterLoader(const T* filters, int group, int tile)
        : next(0), first_k(tile * tile_k) {
        constexpr int64 of_group = static_cast<int64>(Problem::group_k) * Problem::group_c * taps;
        w = filters + group * of_group;
        if constexpr (filters_inside) w += first_k;
        else w += threadIdx.x % lanes + static_cast<int64>(first_k + threadIdx.x / lanes) * filter_step;
    }

    __device__ __forceinline__ void load(float* stage) {
        if constexpr (filters_inside) load_across(stage);
        else load_along(stage);
        next += tile_c;
        w += step_elements;
        if (next >= Problem::group_c) {
            next = 0;
            w -= static_cast<int64>(Tile::steps) * step_elements;
        }
    }

    __device__ __forceinline__ void load_along(float* stage) {
        const int lane = threadIdx.x % lanes, filter = threadIdx.x / lanes, left = Problem::group_c - next;
        float* const to = stage + lane * Problem::filter_pitch + filter;
#pragma unroll
        for (int y = 0; y < runs; ++y)
#pragma unroll
            for (int e = 0; e < run; e += lanes) {
                if (run % lanes != 0 && e + lane >= run) continue;
                const bool real = whole_c ||
                    (channels_inside ? e + lane < left : Problem::reversed ? y < left : e + lane < left * taps);
#pragma unroll
                for (int n = 0; n < passes; ++n) {
                    const int k = filter + n * per_pass;
                    if (tile_k % per_pass != 0 && k >= tile_k) continue;
                    const bool valid = real && (whole_k || first_k + k < Problem::group_k);
                    const T* const from =
                        w + static_cast<int64>(y) * run_step + e + static_cast<int64>(n * per_pass) * filter_step;
                    bring<1>(to + (y * run + e) * Problem::filter_pitch + n * per_pass, from, valid);
                }
            }
    }

    // Filters are adjacent in memory: neighbouring lanes take neighbours.
    __device__ __forceinline__ void load_across(float* stage) {
        constexpr int side = gcd(tile_k, threads), rows = threads / side;
        const int first = threadIdx.x % side, row = threadIdx.x / side, left = Problem::group_c - next;
#pragma unroll
        for (int e = 0; e < tile_c * taps; e += rows) {
            if (tile_c * taps % rows != 0 && e + row >= tile_c * taps) continue;
            const bool real = whole_c || e + row < left * taps;
#pragma unroll
            for (int n = 0; n < tile_k; n += side) {
                const int k = first + n;
                const bool valid = real && (whole_k || first_k + k < Problem::group_k);
                const T* const from = w + static_cast<int64>(e + row) * Problem::group_k + k;
                bring<1>(stage + (e + row) * Problem::filter_pitch + k, from, valid);
            }
        }
    }

    // Which row of a stage holds tap (r, s) of channel c of all filters.
    static __device__ __forceinline__ int filter_row(int c, int r, int s) {
        const int tap = r * Problem::s + s, at = Problem::reversed ? taps - 1 - tap : tap;
        return channels_inside ? at * tile_c + c : c * taps + at;
    }
};

}  // namespace leanconv
