// fourier_lines: a large filter that is given as products of a column and a row, by Fourier transforms of lines.
//
//   h[p, i, j] = sum over v of row[p, v] * x[i, j + v - anchor_x]                                  the rows' launch
//   y[i, j] = delta + sum over p, u of column[p, u] * h[p, i + u - anchor_y, j]                    the columns' launch
//
// Requires   sums in float32 or float64; any filter, image and border.
// Numerics   sums are taken by transforms: the error of an output is relative to the root mean square of the pixels of
//            its segment, not to its own window. A block whose results are not all finite computes them anew by their
//            definition, so an Inf or a NaN reaches the outputs whose windows hold it, and no others.
// Method     overlap-save: a line is cut into segments of n pixels, each of which gives n - taps + 1 outputs. Two real
//            lines are the real and the imaginary part of one: their spectrum times that of a real filter has their
//            results as its parts. Of a filter longer than a segment's transform can take, or of several products,
//            spectra are added up before they are transformed back.
// CTA tile   a segment of 2 * lines lines: of rows, or of neighbouring columns, whose sectors it then reads whole.
// Memory     the rows' results in a workspace, for a strip of columns of some images at a time; spectra of the filter
//            and the twiddle factors in `prepared`, which the first launch writes.
// Work       a pixel of a segment costs some 80 FMA units and 16 accesses of shared memory in each direction, for any
//            filter: 4 exchanges of a pair of lines for n = 4096.
// Measured   figure: filter-large fourier_lines/cucim mean = 3.39
#pragma once

#include <kernels/image_filter/border.cuh>
#include <kernels/image_filter/transform.cuh>

namespace leanconv {

// Taps of a filter along one axis, in `parts` pieces; so many `outputs` of a segment.
struct Pieces {
    int taps, parts, outputs;
    __device__ __forceinline__ int piece() const { return ceil_div(taps, parts); }
};

// Block b transforms piece b % parts of a product's row or column, and block 0 writes the table of twiddle factors.
template <class Problem, class Tuning>
__device__ __forceinline__ void fourier_lines_prepare(const typename Problem::sum* w, typename Problem::sum* prepared_,
                                                      int rank, int r, int s, int row_parts, int column_parts) {
    using T = typename Problem::sum;
    Complex<T>* const prepared = reinterpret_cast<Complex<T>*>(prepared_);
    using Line = Transform<Tuning::length, Tuning::elements, 1, T>;
    constexpr int n = Line::n;
    const Line line{reinterpret_cast<Complex<T>*>(shared_memory()), static_cast<int>(threadIdx.x)};
    const int t = threadIdx.x;
    const ComputedTwiddles<T> twiddles;
    if (blockIdx.x == 0) line.write_table(prepared);
    // the rows of all products come first
    const int block = static_cast<int>(blockIdx.x);
    const bool of_rows = block < rank * row_parts;
    const int number = of_rows ? block : block - rank * row_parts;
    const int parts = of_rows ? row_parts : column_parts, piece = ceil_div(of_rows ? s : r, parts);
    const int begin = number % parts * piece, taps = min(piece, (of_rows ? s : r) - begin);
    const T* const from = w + number / parts * (r + s) + (of_rows ? r : 0) + begin;
    typename Line::Values v;
#pragma unroll
    for (int j = 0; j < Line::elements; ++j) {
        const int i = t + j * Line::threads;
        v[0][j] = {i < taps ? from[i] : T(0), T(0)};
    }
    line.forward(v, twiddles);
    Complex<T>* const to = prepared + Line::table() + static_cast<int64>(blockIdx.x) * n;
#pragma unroll
    for (int j = 0; j < Line::elements; ++j) {
        // the conjugate, for a correlation; 1 / n for the transform back
        const Complex<T> value = conjugate(v[0][j]);
        to[j * Line::threads + t] = {value.re / n, value.im / n};
    }
}

// What both launches do to a segment. `Lines` has the lines: `get` their pixels at a place, inside or not, `put` a result.
// With `several` of them the spectra of all pieces and products are added up.
template <class Tuning, bool several, class T, class Lines>
__device__ __forceinline__ void filter_segment(const Lines& of, const Complex<T>* table, const Complex<T>* spectra,
                                               const T* weights, int weights_apart, const Pieces& pieces, int products,
                                               int anchor, int segment, int extent) {
    constexpr int elements = Tuning::elements, lines = Tuning::lines;
    using Line = Transform<Tuning::length, elements, lines, T>;
    constexpr int threads = Line::threads;
    const int t = threadIdx.x;
    const Line line{reinterpret_cast<Complex<T>*>(shared_memory()), t};
    int* const not_finite = reinterpret_cast<int*>(shared_memory() + Line::shared_bytes);
    const TwiddleTable<T> twiddles{table};
    if (t == 0) *not_finite = 0;
    const int begin = segment * pieces.outputs, outputs = min(pieces.outputs, extent - begin);
    const int steps = several ? products * pieces.parts : 1;
    typename Line::Values v, sum;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        const int product = several ? step / pieces.parts : 0;
        const int from = begin - anchor + (several ? step % pieces.parts * pieces.piece() : 0);
        if (several) __syncthreads();  // the step before has left shared memory
        if (of.inside(from, Line::n)) {
            of.load(v, from + t, threads, product);
        } else {
            // by way of shared memory, so that the code of a border is there once
#pragma unroll 1
            for (int j = 0; j < elements; ++j) {
                Complex<T> pixels[lines] = {};
                const int i = t + j * threads;
                // what no output reads is 0, so that it adds nothing to the errors
                if (i < outputs + pieces.piece() - 1) of.get(pixels, from + i, product);
#pragma unroll
                for (int k = 0; k < lines; ++k) *line.template place<Line::n>(k, j) = pixels[k];
            }
#pragma unroll
            for (int k = 0; k < lines; ++k)
#pragma unroll
                for (int j = 0; j < elements; ++j) v[k][j] = *line.template place<Line::n>(k, j);
        }
        line.forward(v, twiddles);
        const Complex<T>* const spectrum = spectra + step * Line::n + t;
#pragma unroll
        for (int j = 0; j < elements; ++j) {
            const Complex<T> h = spectrum[j * threads];
#pragma unroll
            for (int k = 0; k < lines; ++k) {
                v[k][j] = v[k][j] * h;
                if constexpr (several) sum[k][j] = step == 0 ? v[k][j] : sum[k][j] + v[k][j];
            }
        }
    }
    if constexpr (several) {
#pragma unroll
        for (int k = 0; k < lines; ++k)
#pragma unroll
            for (int j = 0; j < elements; ++j) v[k][j] = sum[k][j];
    }
    line.inverse(v, twiddles);
    bool finite = true;
#pragma unroll
    for (int k = 0; k < lines; ++k)
#pragma unroll
        for (int j = 0; j < elements; ++j) finite &= v[k][j].re - v[k][j].re == T(0) && v[k][j].im - v[k][j].im == T(0);
    if (!finite) *not_finite = 1;
    __syncthreads();
    if (*not_finite == 0) {
#pragma unroll
        for (int j = 0; j < elements; ++j) {
            const int i = t + j * threads;
            Complex<T> results[lines];
#pragma unroll
            for (int k = 0; k < lines; ++k) results[k] = v[k][j];
            if (i < outputs) of.put(begin + i, results);
        }
        return;
    }
#pragma unroll 1
    for (int i = t; i < outputs; i += threads) {
        Complex<T> results[lines] = {};
#pragma unroll 1
        for (int product = 0; product < products; ++product) {
#pragma unroll 1
            for (int tap = 0; tap < pieces.taps; ++tap) {
                const T weight = weights[product * weights_apart + tap];
                Complex<T> pixels[lines];
                of.get(pixels, begin + i - anchor + tap, product);
#pragma unroll
                for (int k = 0; k < lines; ++k) {
                    results[k].re = fma(weight, pixels[k].re, results[k].re);
                    results[k].im = fma(weight, pixels[k].im, results[k].im);
                }
            }
        }
        of.put(begin + i, results);
    }
}

// Rows 2 * lines * group, ... of an image's channels, or as many as there are.
template <class Problem, int lines, class T>
struct ImageRows {
    using In = typename Problem::element;
    using Border = typename Problem::border;
    static constexpr int channels = Problem::channels;
    const In* x[2 * lines];
    T* to[2 * lines];
    int count, width;
    T value;

    __device__ __forceinline__ T pixel(int line, int place) const { return widen<T>(x[line][place * channels]); }

    __device__ __forceinline__ void get(Complex<T> (&pixels)[lines], int i, int) const {
        const int place = border_index<Border>(i, width);
        const bool inside = Border::maps_inside || place >= 0;
#pragma unroll
        for (int k = 0; k < lines; ++k) {
            pixels[k].re = inside ? pixel(2 * k, place) : value;
            pixels[k].im = inside ? pixel(2 * k + 1, place) : value;
        }
    }
    // Whether n pixels from `first` on lie in the image.
    __device__ __forceinline__ bool inside(int first, int n) const { return first >= 0 && first + n <= width; }
    // Pixels i, i + apart, ... that do.
    template <int elements>
    __device__ __forceinline__ void load(Complex<T> (&v)[lines][elements], int i, int apart, int) const {
#pragma unroll
        for (int k = 0; k < lines; ++k)
#pragma unroll
            for (int j = 0; j < elements; ++j) v[k][j] = {pixel(2 * k, i + j * apart), pixel(2 * k + 1, i + j * apart)};
    }
    __device__ __forceinline__ void put(int i, const Complex<T> (&results)[lines]) const {
#pragma unroll
        for (int k = 0; k < lines; ++k) {
            if (2 * k < count) to[2 * k][i * channels] = results[k].re;
            if (2 * k + 1 < count) to[2 * k + 1][i * channels] = results[k].im;
        }
    }
};

// The rows' launch: block b makes segment b % segments of group b / segments % groups of product b / segments / groups.
// Rows of channels are numbered through `images` images; results are of columns first ... first + columns - 1.
template <class Problem, class Tuning>
__device__ __forceinline__ void fourier_lines_rows(
    const typename Problem::element* x, const typename Problem::sum* w, const typename Problem::sum* prepared_,
    typename Problem::sum* workspace, typename Problem::sum value, int height, int width, int64 x_pitch, int64 x_step,
    int64 pitch, int first_image, int images, int first, int columns, int r, int s, int anchor, int parts, int outputs,
    int segments, int groups) {
    using T = typename Problem::sum;
    constexpr int lines = Tuning::lines;
    using Line = Transform<Tuning::length, Tuning::elements, lines, T>;
    const Complex<T>* const prepared = reinterpret_cast<const Complex<T>*>(prepared_);
    const int group = blockIdx.x / segments % groups, product = blockIdx.x / segments / groups;
    const int64 rows = static_cast<int64>(images) * height;
    ImageRows<Problem, lines, T> of;
    of.width = width;
    of.value = value;
    const int64 all = rows * Problem::channels, begin = static_cast<int64>(group) * (2 * lines);
    of.count = static_cast<int>(all - begin < 2 * lines ? all - begin : 2 * lines);
#pragma unroll
    for (int k = 0; k < 2 * lines; ++k) {
        // those past the end repeat the last one
        const int64 number = k < of.count ? begin + k : all - 1, row = number / Problem::channels;
        const int channel = static_cast<int>(number % Problem::channels);
        const int image = static_cast<int>(row / height), i = static_cast<int>(row % height);
        of.x[k] = x + (first_image + image) * x_step + i * x_pitch + channel;
        of.to[k] = workspace + (product * rows + row) * pitch + channel;
    }
    filter_segment<Tuning, Problem::several_of_rows, T>(
        of, prepared, prepared + Line::table() + static_cast<int64>(product) * (parts * Line::n),
        w + product * (r + s) + r, 0, Pieces{s, parts, outputs}, 1, anchor - first, blockIdx.x % segments, columns);
}

// 2 * lines neighbouring columns of the rows' results.
template <class Problem, int lines, class T>
struct ResultColumns {
    using Out = typename Problem::result;
    using Border = typename Problem::border;
    const T* from;
    Out* to;
    int64 pitch, product_step, y_pitch;
    int count, height;
    T value, delta;
    const T* row_sums;  // of a product's row of weights, divided by the length of transforms
    int row_sums_apart, row_parts, length;
    bool vectors;

    // What a row outside makes of a constant border.
    __device__ __forceinline__ T outside(int product) const {
        T sum = T(0);
        for (int part = 0; part < row_parts; ++part) sum += row_sums[(product * row_parts + part) * row_sums_apart];
        return value * (sum * length);
    }
    __device__ __forceinline__ void row(Complex<T> (&pixels)[lines], const T* at) const {
        const Complex<T>* const pairs = reinterpret_cast<const Complex<T>*>(at);
#pragma unroll
        for (int k = 0; k < lines; ++k) {
            const Complex<T> pair = pairs[k];
            pixels[k] = {2 * k < count ? pair.re : T(0), 2 * k + 1 < count ? pair.im : T(0)};
        }
    }
    __device__ __forceinline__ void get(Complex<T> (&pixels)[lines], int i, int product) const {
        const int place = border_index<Border>(i, height);
        if (Border::maps_inside || place >= 0) {
            row(pixels, from + product * product_step + place * pitch);
        } else {
            const T beyond = outside(product);
#pragma unroll
            for (int k = 0; k < lines; ++k) pixels[k] = {beyond, beyond};
        }
    }
    __device__ __forceinline__ bool inside(int first, int n) const { return first >= 0 && first + n <= height; }
    template <int elements>
    __device__ __forceinline__ void load(Complex<T> (&v)[lines][elements], int i, int apart, int product) const {
        const T* const at = from + product * product_step + i * pitch;
#pragma unroll
        for (int j = 0; j < elements; ++j) {
            Complex<T> pixels[lines];
            row(pixels, at + j * (apart * pitch));
#pragma unroll
            for (int k = 0; k < lines; ++k) v[k][j] = pixels[k];
        }
    }
    __device__ __forceinline__ void put(int i, const Complex<T> (&results)[lines]) const {
        Out* const row = to + i * y_pitch;
        if constexpr (lines == 2) {
            if (vectors) {
                const T four[4] = {results[0].re + delta, results[0].im + delta, results[1].re + delta, results[1].im + delta};
                stream_sums(row, four);
                return;
            }
        }
#pragma unroll
        for (int k = 0; k < lines; ++k) {
            if (2 * k < count) row[2 * k] = narrow_sum<Out>(results[k].re + delta);
            if (2 * k + 1 < count) row[2 * k + 1] = narrow_sum<Out>(results[k].im + delta);
        }
    }
};

// The columns' launch: block b makes group b % groups of segment b / groups % segments of image b / groups / segments.
// `columns` elements of a row begin at number `first` of the result's rows.
template <class Problem, class Tuning>
__device__ __forceinline__ void fourier_lines_columns(
    const typename Problem::sum* workspace, const typename Problem::sum* w, const typename Problem::sum* prepared_,
    typename Problem::result* y, typename Problem::sum value, typename Problem::sum delta, int height, int out_height,
    int64 pitch, int64 y_pitch, int64 y_step, int first_image, int images, int first, int columns, int r, int s, int anchor,
    int rank, int row_parts, int parts, int outputs, int segments, int groups) {
    using T = typename Problem::sum;
    constexpr int lines = Tuning::lines;
    using Line = Transform<Tuning::length, Tuning::elements, lines, T>;
    const Complex<T>* const prepared = reinterpret_cast<const Complex<T>*>(prepared_);
    const int group = blockIdx.x % groups, image = blockIdx.x / groups / segments;
    const Complex<T>* const of_rows = prepared + Line::table();
    ResultColumns<Problem, lines, T> of;
    const int column = 2 * lines * group;
    of.from = workspace + static_cast<int64>(image) * height * pitch + column;
    of.to = y + (first_image + image) * y_step + first + column;
    of.pitch = pitch, of.product_step = static_cast<int64>(images) * height * pitch, of.y_pitch = y_pitch;
    of.count = min(2 * lines, columns - column), of.height = height;
    of.value = value, of.delta = delta;
    of.row_sums = &of_rows->re, of.row_sums_apart = 2 * Line::n, of.row_parts = row_parts, of.length = Line::n;
    of.vectors = of.count == 4 && reinterpret_cast<unsigned long long>(of.to) % vector_bytes<typename Problem::result> == 0 &&
                 y_pitch % 4 == 0;
    filter_segment<Tuning, Problem::several_of_columns, T>(
        of, prepared, of_rows + static_cast<int64>(rank) * row_parts * Line::n, w, r + s, Pieces{r, parts, outputs}, rank,
        anchor, blockIdx.x / groups % segments, out_height);
}

}  // namespace leanconv
