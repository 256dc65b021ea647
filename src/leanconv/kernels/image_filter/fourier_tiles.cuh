// fourier_tiles: a large filter that is no product, by Fourier transforms of tiles.
//
//   y[f, i, j] = delta + sum over u, v of w[f, u, v] * x[i + u - anchor_y, j + v - anchor_x]
//
// Requires   sums in float32 or float64; filters of at most 8128 rows and columns (float64 4032), 64 less than
//            the largest tile; any image and border.
// Numerics   as fourier_lines, by the pixels of a tile. An Inf or a NaN reaches all results of its tile and of the tile
//            that is transformed with it.
// Method     overlap-save: n x n pixels give (n - r + 1) x (n - s + 1) outputs. Two tiles are the real and the imaginary
//            part of one, and so are their results.
// Launches   rows of tiles are transformed into the workspace; columns there, times the filter's spectrum, and back, in
//            place or, for several filters, beside it; rows back, of which those of results are written. The filter's
//            rows and columns are transformed before, into `prepared`, behind the twiddle factors.
// CTA tile   a row of two tiles; `lines` columns of them.
// Memory     frequencies lie in the order in which threads hold them: [of the column][of the row], each number
//            j * threads + t for element j of thread t. So all accesses are of neighbours.
// Work       a pixel of a tile: 16 bytes of workspace in float32, and 2 transforms there and back.
#pragma once

#include <kernels/image_filter/border.cuh>
#include <kernels/image_filter/transform.cuh>

namespace leanconv {

// A thread's part of a line whose neighbours lie `apart`: elements t, t + threads, ...
template <class Line, class T>
__device__ __forceinline__ void load_line(typename Line::Values& v, const Complex<T>* from, int64 apart) {
#pragma unroll
    for (int j = 0; j < Line::elements; ++j) {
        const Complex<T>* const at = from + (static_cast<int>(threadIdx.x) + j * Line::threads) * apart;
#pragma unroll
        for (int k = 0; k < Line::lines; ++k) v[k][j] = at[k];
    }
}
template <class Line, class T>
__device__ __forceinline__ void store_line(Complex<T>* to, int64 apart, const typename Line::Values& v) {
#pragma unroll
    for (int j = 0; j < Line::elements; ++j) {
        Complex<T>* const at = to + (static_cast<int>(threadIdx.x) + j * Line::threads) * apart;
#pragma unroll
        for (int k = 0; k < Line::lines; ++k) at[k] = v[k][j];
    }
}

// Block b transforms row b % r of filter b / r, and block 0 writes the table of twiddle factors.
template <class Problem, class Tuning>
__device__ __forceinline__ void fourier_tiles_prepare_rows(const typename Problem::sum* w, typename Problem::sum* prepared,
                                                           int r, int s) {
    using T = typename Problem::sum;
    using Line = Transform<Tuning::length, Tuning::elements, 1, T>;
    const int t = threadIdx.x, row = blockIdx.x % r, filter = blockIdx.x / r;
    const Line line{reinterpret_cast<Complex<T>*>(shared_memory()), t};
    Complex<T>* const table = reinterpret_cast<Complex<T>*>(prepared);
    if (blockIdx.x == 0) line.write_table(table);
    typename Line::Values v;
#pragma unroll
    for (int j = 0; j < Line::elements; ++j) {
        const int i = t + j * Line::threads;
        v[0][j] = {i < s ? w[static_cast<int64>(blockIdx.x) * s + i] : T(0), T(0)};
    }
    line.forward(v, ComputedTwiddles<T>{});
    store_line<Line>(table + Line::table() + (static_cast<int64>(filter) * Line::n + row) * Line::n, 1, v);
}

// Block b transforms columns of filter b / groups, of which rows 0 ... r - 1 are there, to the conjugate spectrum.
template <class Problem, class Tuning>
__device__ __forceinline__ void fourier_tiles_prepare_columns(typename Problem::sum* prepared, int r, int groups) {
    using T = typename Problem::sum;
    using Line = Transform<Tuning::length, Tuning::elements, Tuning::lines, T>;
    const Line line{reinterpret_cast<Complex<T>*>(shared_memory()), static_cast<int>(threadIdx.x)};
    Complex<T>* const table = reinterpret_cast<Complex<T>*>(prepared);
    const int filter = blockIdx.x / groups, column = blockIdx.x % groups * Line::lines;
    Complex<T>* const at = table + Line::table() + static_cast<int64>(filter) * Line::n * Line::n + column;
    typename Line::Values v;
#pragma unroll
    for (int j = 0; j < Line::elements; ++j) {
        const int i = line.t + j * Line::threads;
#pragma unroll
        for (int k = 0; k < Line::lines; ++k) v[k][j] = i < r ? at[static_cast<int64>(i) * Line::n + k] : Complex<T>{};
    }
    line.forward(v, TwiddleTable<T>{table});
    // 1 / n for each transform back
    constexpr T scale = T(1) / Line::n;
#pragma unroll
    for (int k = 0; k < Line::lines; ++k)
#pragma unroll
        for (int j = 0; j < Line::elements; ++j)
            v[k][j] = {v[k][j].re * scale * scale, -v[k][j].im * scale * scale};
    store_line<Line>(at, Line::n, v);
}

// Tile number `number` of all: of a channel of an image, `down` rows of `across` tiles. `exists` for those that are.
template <class Problem>
struct Tile {
    int64 image;
    int channel, i, j;  // of the first output
    bool exists;
    __device__ __forceinline__ Tile(int64 number, int64 count, int across, int down, int out_rows, int out_columns)
        : exists(number < count) {
        const int64 plane = number / (across * down);
        const int rest = static_cast<int>(number % (across * down));
        image = plane / Problem::channels, channel = static_cast<int>(plane % Problem::channels);
        i = rest / across * out_rows, j = rest % across * out_columns;
    }
};

// A row of a tile's pixels, `count` of which its outputs read; those outside the image of a constant border are its value.
template <class Problem, class T>
struct TileRow {
    using In = typename Problem::element;
    using Border = typename Problem::border;
    const In* x;
    int first, width, count;
    bool real;
    T value;

    __device__ __forceinline__ bool inside(int n) const { return real && n <= count && first >= 0 && first + n <= width; }
    __device__ __forceinline__ T at(int place) const { return widen<T>(x[place * Problem::channels]); }
    __device__ __forceinline__ T get(int i) const {
        if (i >= count) return T(0);
        const int place = border_index<Border>(first + i, width);
        return real && (Border::maps_inside || place >= 0) ? at(place) : value;
    }
};

// Block b transforms row b % n of pair b / n of tiles.
template <class Problem, class Tuning>
__device__ __forceinline__ void fourier_tiles_rows(
    const typename Problem::element* x, const typename Problem::sum* prepared, typename Problem::sum* workspace,
    typename Problem::sum value, int height, int width, int64 x_pitch, int64 x_step, int64 tiles, int first_pair, int across,
    int down, int out_rows, int out_columns, int out_height, int out_width, int anchor_y, int anchor_x) {
    using T = typename Problem::sum;
    using Line = Transform<Tuning::length, Tuning::elements, 1, T>;
    using Border = typename Problem::border;
    const int t = threadIdx.x, row = blockIdx.x % Line::n, pair = blockIdx.x / Line::n;
    const Line line{reinterpret_cast<Complex<T>*>(shared_memory()), t};
    const auto row_of = [&](int64 number) {
        const Tile<Problem> tile(number, tiles, across, down, out_rows, out_columns);
        const int i = border_index<Border>(tile.i - anchor_y + row, height);
        const bool real = tile.exists && (Border::maps_inside || i >= 0);
        // what no output reads is 0, so that it adds nothing to the errors
        const bool read = tile.exists && row < out_height - tile.i + (Line::n - out_rows);
        const int count = read ? out_width - tile.j + (Line::n - out_columns) : 0;
        return TileRow<Problem, T>{real ? x + tile.image * x_step + i * x_pitch + tile.channel : x, tile.j - anchor_x, width,
                                   count, real, value};
    };
    const int64 number = 2 * (static_cast<int64>(first_pair) + pair);
    const auto a = row_of(number), b = row_of(number + 1);
    typename Line::Values v;
    if (a.inside(Line::n) && b.inside(Line::n)) {
#pragma unroll
        for (int j = 0; j < Line::elements; ++j) {
            const int i = t + j * Line::threads;
            v[0][j] = {a.at(a.first + i), b.at(b.first + i)};
        }
    } else {
        // by way of shared memory, so that the code of a border is there once
#pragma unroll 1
        for (int j = 0; j < Line::elements; ++j) {
            const int i = t + j * Line::threads;
            *line.template place<Line::n>(0, j) = {a.get(i), b.get(i)};
        }
#pragma unroll
        for (int j = 0; j < Line::elements; ++j) v[0][j] = *line.template place<Line::n>(0, j);
    }
    line.forward(v, TwiddleTable<T>{reinterpret_cast<const Complex<T>*>(prepared)});
    store_line<Line>(reinterpret_cast<Complex<T>*>(workspace) + static_cast<int64>(blockIdx.x) * Line::n, 1, v);
}

// Block b filters columns b % groups of pair b / groups with filter number `filter`; results lie `beside` numbers on.
template <class Problem, class Tuning>
__device__ __forceinline__ void fourier_tiles_columns(const typename Problem::sum* prepared, typename Problem::sum* workspace,
                                                      int64 beside, int filter, int groups) {
    using T = typename Problem::sum;
    using Line = Transform<Tuning::length, Tuning::elements, Tuning::lines, T>;
    constexpr int64 tile = static_cast<int64>(Line::n) * Line::n;
    const Line line{reinterpret_cast<Complex<T>*>(shared_memory()), static_cast<int>(threadIdx.x)};
    const Complex<T>* const table = reinterpret_cast<const Complex<T>*>(prepared);
    const int pair = blockIdx.x / groups, column = blockIdx.x % groups * Line::lines;
    Complex<T>* const at = reinterpret_cast<Complex<T>*>(workspace) + pair * tile + column;
    typename Line::Values v;
    load_line<Line>(v, at, Line::n);
    line.forward(v, TwiddleTable<T>{table});
    const Complex<T>* const spectrum = table + Line::table() + filter * tile + column + static_cast<int64>(line.t) * Line::n;
#pragma unroll
    for (int j = 0; j < Line::elements; ++j)
#pragma unroll
        for (int k = 0; k < Line::lines; ++k)
            v[k][j] = v[k][j] * spectrum[static_cast<int64>(j * Line::threads) * Line::n + k];
    line.inverse(v, TwiddleTable<T>{table});
    store_line<Line>(at + beside, Line::n, v);
}

// Block b writes row b % out_rows of pair b / out_rows, of the results of filter number `filter`.
template <class Problem, class Tuning>
__device__ __forceinline__ void fourier_tiles_results(
    const typename Problem::sum* prepared, const typename Problem::sum* workspace, typename Problem::result* y,
    typename Problem::sum delta, int out_height, int out_width, int64 y_pitch, int64 y_step, int64 beside, int64 tiles,
    int first_pair, int filters, int filter, int across, int down, int out_rows, int out_columns) {
    using T = typename Problem::sum;
    using Out = typename Problem::result;
    using Line = Transform<Tuning::length, Tuning::elements, 1, T>;
    const int row = blockIdx.x % out_rows, pair = blockIdx.x / out_rows;
    const Line line{reinterpret_cast<Complex<T>*>(shared_memory()), static_cast<int>(threadIdx.x)};
    typename Line::Values v;
    load_line<Line>(v, reinterpret_cast<const Complex<T>*>(workspace) + beside +
                           (static_cast<int64>(pair) * Line::n + row) * Line::n, 1);
    line.inverse(v, TwiddleTable<T>{reinterpret_cast<const Complex<T>*>(prepared)});
    const auto write = [&](int64 number, bool imaginary) {
        const Tile<Problem> tile(number, tiles, across, down, out_rows, out_columns);
        if (!tile.exists || tile.i + row >= out_height) return;
        Out* const to = y + (tile.image * filters + filter) * y_step + (tile.i + row) * y_pitch +
                        static_cast<int64>(tile.j) * Problem::channels + tile.channel;
        const int count = min(out_columns, out_width - tile.j);
#pragma unroll
        for (int j = 0; j < Line::elements; ++j) {
            const int i = line.t + j * Line::threads;
            if (i < count) to[i * Problem::channels] = narrow_sum<Out>((imaginary ? v[0][j].im : v[0][j].re) + delta);
        }
    };
    const int64 number = 2 * (static_cast<int64>(first_pair) + pair);
    write(number, false);
    write(number + 1, true);
}

}  // namespace leanconv
