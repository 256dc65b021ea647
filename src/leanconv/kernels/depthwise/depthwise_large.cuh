// depthwise_large: one filter for each channel (or several), of many taps; images in shared memory, whole rows of taps.
//
//   y[n, k, p, q] = sum over r, s of x[n, k / group_k, p * stride + r * dilation - pad, ...] * w[k, r, s]
//
// Requires   one channel a group; NCHW or NHWC; a tile of the image and a filter in shared memory.
// Numerics   float32 FMAs in direct order; float16 and bfloat16 are widened on the way to shared memory, and rounded once.
// CTA tile   `rows` x (strips * columns) outputs of images x filters output planes; their pixels and filters lie in shared
//            memory as floats, and results pass through it, so that stores are whole lines.
// Thread     `columns` adjacent outputs of a row. Rows of the filter outside the image are skipped, and so are its columns
//            where a row has few strips: code for each strip knows them (`fixed`). 27x27 taps on 14x14 pixels are 196
//            products an output, not 729.
// One step   (a row of the filter) columns + S - 1 pixels of the image's row, as float4 (31 taps, 28 columns: 15 loads of 4
//            cycles); S taps, as float4 (8 loads, of one cycle where the lanes' filter is the same); columns * S FMAs (868:
//            217 cycles of a multiprocessor). The eight lanes that read at once are planes, strips and rows whose
//            distances, in float4, are prime to each other modulo eight: no bank conflict.
// Registers  columns sums, the window of four taps, 4 taps, 13 to 29 for addresses.
// Work       2 * R * S flops for 8 bytes an output: from about 9x9 taps on FMA issue is the bound.
// Measured   figure: depthwise-wide depthwise_large/pytorch mean = 5.67
//            figure: depthwise-wide depthwise_large/pytorch least = 2.32
#pragma once

#include <device/epilogue.cuh>
#include <device/ptx/memory.cuh>

namespace leanconv {

// What lies where in shared memory; numbers of floats.
template <class Problem, class Tuning>
struct LargeTile {
    static constexpr int columns = Tuning::columns, output_planes = Tuning::images * Tuning::filters;
    static constexpr int tile_p = Tuning::rows, tile_q = Tuning::strips * columns;
    static constexpr int tiles_p = ceil_div(Problem::p, tile_p), tiles_q = ceil_div(Problem::q, tile_q);

    // A row of taps is summed whole, or in segments.
    static constexpr int segment = Problem::segment;
    static constexpr int segments = (Problem::s - 1) / segment, rest = Problem::s - segments * segment;
    static constexpr int segment_pixels = segment * Problem::dilation_w;

    // Rows of the tile begin at a column that is a multiple of four, `lead` before the first window. Fixed tiles hold
    // the image's own columns and nothing else.
    static constexpr int lead = Tuning::fixed ? 0 : ((-Problem::pad_left) % 4 + 4) % 4;
    static constexpr int window = (columns - 1) * Problem::stride_w + (Problem::s - 1) * Problem::dilation_w + 1;
    static constexpr int width =
        Tuning::fixed ? Problem::w : lead + (tile_q - columns) * Problem::stride_w + window;
    static constexpr int tile_floats = output_planes * Tuning::image_pitch;

    static_assert(Problem::group_c == 1 && !Problem::chwn, "one channel a group, images outermost");
    static_assert(!Tuning::fixed || tiles_q == 1, "code for each strip knows its place in the row");
    static_assert(Tuning::fixed || columns % 4 == 0, "strips begin at multiples of four pixels");
    static_assert(Tuning::strips == 1 || columns % 4 == 0, "results of a strip begin at multiples of four");
    static_assert(Tuning::row_pitch % 4 == 0 && Tuning::image_pitch % 4 == 0 && Tuning::row_pitch >= width,
                  "rows are read as float4");
    static_assert(Tuning::image_pitch >= Tuning::tile_h * Tuning::row_pitch, "an image's channel holds its rows");

    // Where the window of a strip begins in the tile, relative to the thread's pointer.
    static __host__ __device__ constexpr int first(int strip) {
        return Tuning::fixed ? strip * columns * Problem::stride_w - Problem::pad_left : lead;
    }
    static __host__ __device__ constexpr bool holds(int at) { return !Tuning::fixed || (at >= 0 && at < Problem::w); }
};

// Adds the products of `taps` taps of a filter's row; `pixels` and `filter` are where the segment begins.
template <class Problem, class Tuning, int strip, int taps>
__device__ __forceinline__ void add_products(float (&sum)[Tuning::columns], const float* pixels, const float* filter) {
    using Tile = LargeTile<Problem, Tuning>;
    constexpr int columns = Tuning::columns, stride = Problem::stride_w, dilation = Problem::dilation_w;
    constexpr int first = Tile::first(strip), begin = first >= 0 ? first / 4 * 4 : (first - 3) / 4 * 4;
    constexpr int reach = first - begin + (columns - 1) * stride;  // of the first tap, from `begin` on
    constexpr int vectors = (reach + (taps - 1) * dilation) / 4 + 1;
    float window[vectors][4];
#pragma unroll
    for (int s = 0; s < taps; s += 4) {
        // the pixels that these taps read, and earlier ones did not
#pragma unroll
        for (int v = 0; v < vectors; ++v) {
            const int before = s == 0 ? -1 : (reach + (s - 1) * dilation) / 4;
            if (v > before && v <= (reach + (s + 3) * dilation) / 4 && Tile::holds(begin + 4 * v))
                load_vector(window[v], pixels + begin + 4 * v);
        }
        float tap[4];
        load_vector(tap, filter + s);
#pragma unroll
        for (int t = 0; t < 4; ++t)
#pragma unroll
            for (int q = 0; q < columns; ++q) {
                const int at = first + q * stride + (s + t) * dilation;
                if (s + t < taps && Tile::holds(at))
                    sum[q] = fmaf(tap[t], window[(at - begin) / 4][(at - begin) % 4], sum[q]);
            }
    }
}

// The sums of a thread whose strip is `mine`: rows low ... high of the filter, and of each row the segments that read
// pixels, from first_segment up to last_segment, and the rest.
template <class Problem, class Tuning, int strip = 0>
__device__ __forceinline__ void add_rows(float (&sum)[Tuning::columns], int mine, const float* pixels,
                                         const float* filter, int low, int high, int first_segment, int last_segment) {
    using Tile = LargeTile<Problem, Tuning>;
    if constexpr (Tuning::fixed && strip + 1 < Tuning::strips) {
        if (mine != strip) {
            add_rows<Problem, Tuning, strip + 1>(sum, mine, pixels, filter, low, high, first_segment, last_segment);
            return;
        }
    }
#pragma unroll 1
    for (int row = low; row < high; ++row) {
        const float* const from = pixels + row * (Problem::dilation_h * Tuning::row_pitch);
        const float* const taps = filter + row * Problem::tap_pitch;
        if constexpr (Tile::segments > 0) {
#pragma unroll 1
            for (int i = first_segment; i < last_segment; ++i)
                add_products<Problem, Tuning, strip, Tile::segment>(sum, from + i * Tile::segment_pixels,
                                                                    taps + i * Tile::segment);
        }
        add_products<Problem, Tuning, strip, Tile::rest>(sum, from + Tile::segments * Tile::segment_pixels,
                                                         taps + Tile::segments * Tile::segment);
    }
}

// What a block computes: its first outputs, filter and image, and the image's pixel that its tile begins with.
struct LargePlace {
    int p, q, k, h, w;
    int64 n;
};

// Item `number` of the block's output planes, each of rows x width pixels: `unit` columns of a row, or filters of a pixel.
// Neighbouring items are neighbours in memory.
template <class Problem, class Tuning, int rows, int width, int unit>
struct LargeItem {
    static constexpr int across = Problem::nhwc ? Tuning::filters / unit : ceil_div(width, unit);
    static constexpr int count = across * rows * Tuning::images * (Problem::nhwc ? width : Tuning::filters);
    int filter, image, row, column;

    __device__ __forceinline__ explicit LargeItem(int number) {
        const int rest = number / across;
        if constexpr (Problem::nhwc) {
            filter = number % across * unit, column = rest % width;
            row = rest / width % rows, image = rest / (width * rows);
        } else {
            column = number % across * unit, row = rest % rows;
            image = rest / rows % Tuning::images, filter = rest / (rows * Tuning::images);
        }
    }
    // Its output plane, in the order of threads: images of a filter are neighbours.
    __device__ __forceinline__ int plane() const { return filter * Tuning::images + image; }
};

// The pixels of the tile, widened to floats; zeros in columns outside the image.
template <class Problem, class Tuning>
__device__ __forceinline__ void copy_tile(float* tile, const typename Problem::element* x, const LargePlace& first,
                                          long long batch) {
    using Tile = LargeTile<Problem, Tuning>;
    using T = typename Problem::element;
    constexpr bool of_channel = Problem::nhwc && Problem::group_k == 1 && Problem::c % 4 == 0 && Tuning::filters % 4 == 0;
    constexpr bool of_row = !Problem::nhwc && Problem::w % 4 == 0, copied = of_row && !narrow<Problem>;
    constexpr int unit = of_channel || of_row ? 4 : 1;
    // loads that a thread has in flight where pixels pass registers
    constexpr int at_once = copied ? 1 : 4;
    using Item = LargeItem<Problem, Tuning, Tuning::tile_h, Tile::width, unit>;
#pragma unroll 1
    for (int number = threadIdx.x; number < Item::count; number += at_once * Tuning::threads) {
        float pixels[at_once][unit];
        int to[at_once];
#pragma unroll
        for (int b = 0; b < at_once; ++b) {
            const Item item(number + b * Tuning::threads);
            const int k = first.k + item.filter, i = first.h + item.row, j = first.w + item.column;
            const int64 n = first.n + item.image;
            const bool exists = number + b * Tuning::threads < Item::count && k < Problem::k && n < batch && i < Problem::h;
            const bool inside = exists && static_cast<unsigned>(j) < static_cast<unsigned>(Problem::w);
            const int c = k / Problem::group_k, pixel = i * Problem::w + j;
            const T* const from = !inside ? x
                : Problem::nhwc           ? x + (n * (Problem::h * Problem::w) + pixel) * Problem::c + c
                                          : x + (n * Problem::c + c) * (Problem::h * Problem::w) + pixel;
            to[b] = item.plane() * Tuning::image_pitch + item.row * Tuning::row_pitch + item.column;
            if constexpr (copied) {
                if (exists) cp_async_16(tile + to[b], from, inside);
            } else {
                load_adjacent(pixels[b], from, inside);
                if (!exists) to[b] = -1;
            }
        }
        if constexpr (!copied) {
#pragma unroll
            for (int b = 0; b < at_once; ++b) {
                if (to[b] < 0) continue;
#pragma unroll
                for (int e = 0; e < unit; ++e)
                    tile[to[b] + e * (Problem::nhwc ? Tuning::images * Tuning::image_pitch : 1)] = pixels[b][e];
            }
        }
    }
    cp_async_commit_group();
}

// The block's results, from shared memory to the output: what follows the sums, and the one rounding.
template <class Problem, class Tuning>
__device__ __forceinline__ void store_results(const float* results, Bias<Problem> bias,
                                              typename Problem::element* y, const LargePlace& first, long long batch) {
    using Tile = LargeTile<Problem, Tuning>;
    using T = typename Problem::element;
    constexpr bool vectors = Problem::nhwc ? Problem::k % 4 == 0 && Tuning::filters % 4 == 0 : Problem::q % 4 == 0;
    constexpr int unit = vectors ? 4 : 1;
    using Item = LargeItem<Problem, Tuning, Tile::tile_p, (Tile::tile_q < Problem::q ? Tile::tile_q : Problem::q), unit>;
#pragma unroll 2
    for (int number = threadIdx.x; number < Item::count; number += Tuning::threads) {
        const Item item(number);
        const int k = first.k + item.filter, p = first.p + item.row, q = first.q + item.column;
        const int64 n = first.n + item.image;
        if (k >= Problem::k || n >= batch || p >= Problem::p || q >= Problem::q) continue;
        const float* const from = results + item.plane() * Problem::result_plane + item.row * Problem::result_pitch + item.column;
        const int pixel = p * Problem::q + q;
        T* const to = Problem::nhwc ? y + (n * (Problem::p * Problem::q) + pixel) * Problem::k + k
                                    : y + (n * Problem::k + k) * (Problem::p * Problem::q) + pixel;
        T v[unit];
#pragma unroll
        for (int e = 0; e < unit; ++e) {
            const float sum = from[e * (Problem::nhwc ? Tuning::images * Problem::result_plane : 1)];
            const Term<Problem> term = term_of<Problem>(bias, Problem::nhwc ? k + e : k);
            v[e] = from_float<T>(finish<Problem>(sum, term, held_by<Problem>(bias, to + e, true)));
        }
        if constexpr (vectors) store_vector(to, v);
        else *to = v[0];
    }
}

template <class Problem, class Tuning>
__device__ __forceinline__ void depthwise_large(ElementsIn<Problem> x, ElementsIn<Problem> w, BiasIn<Problem> bias,
                                                ElementsOut<Problem> y, long long batch) {
    using Tile = LargeTile<Problem, Tuning>;
    constexpr int columns = Tuning::columns, taps = Problem::r * Problem::s;
    float* const tile = reinterpret_cast<float*>(shared_memory());
    float* const filters = tile + Tile::tile_floats;

    // Blocks are numbered along tiles of an output plane, then filters, then images.
    LargePlace first;
    int number = blockIdx.x;
    first.q = number % Tile::tiles_q * Tile::tile_q, number /= Tile::tiles_q;
    first.p = number % Tile::tiles_p * Tile::tile_p, number /= Tile::tiles_p;
    constexpr int of_filters = ceil_div(Problem::k, Tuning::filters);
    first.k = number % of_filters * Tuning::filters;
    first.n = static_cast<int64>(number / of_filters) * Tuning::images;
    first.h = max(0, first.p * Problem::stride_h - Problem::pad_top);
    first.w = Tuning::fixed ? 0 : first.q * Problem::stride_w - Problem::pad_left - Tile::lead;

    copy_tile<Problem, Tuning>(tile, x, first, batch);
    const int count = min(Tuning::filters, Problem::k - first.k) * taps;
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += Tuning::threads) {
        const int f = i / taps, at = Problem::reversed ? taps - 1 - i % taps : i % taps;
        filters[f * Problem::filter_pitch + at / Problem::s * Problem::tap_pitch + at % Problem::s] =
            to_float(w[static_cast<int64>(first.k) * taps + i]);
    }
    cp_async_wait_group<0>();
    __syncthreads();

    // Neighbouring lanes are neighbouring output planes, then strips, then rows. Strips with code of their own come last.
    const int plane = threadIdx.x % Tile::output_planes, rest = threadIdx.x / Tile::output_planes;
    const int strip = Tuning::fixed ? rest / Tuning::rows : rest % Tuning::strips;
    const int row = Tuning::fixed ? rest % Tuning::rows : rest / Tuning::strips;
    const int p = first.p + row, q = first.q + strip * columns;
    const bool works = rest < Tuning::rows * Tuning::strips && p < Problem::p && q < Problem::q &&
        first.k + plane / Tuning::images < Problem::k && first.n + plane % Tuning::images < batch;

    float sum[columns] = {};
    if (works) {
        // rows of the filter that lie inside the image
        const int i = p * Problem::stride_h - Problem::pad_top;
        const int low = i >= 0 ? 0 : ceil_div(-i, Problem::dilation_h);
        const int high = i >= Problem::h ? 0 : min(Problem::r, ceil_div(Problem::h - i, Problem::dilation_h));
        // segments of which some pixel lies inside the image
        const int j = q * Problem::stride_w - Problem::pad_left;
        constexpr int step = Tile::segment_pixels;
        constexpr int reach = (columns - 1) * Problem::stride_w + (Tile::segment - 1) * Problem::dilation_w;
        const int first_segment = j + reach >= 0 ? 0 : ceil_div(-j - reach, step);
        const int last_segment = j >= Problem::w ? 0 : min(Tile::segments, ceil_div(Problem::w - j, step));
        const float* const pixels = tile + plane * Tuning::image_pitch + (i - first.h) * Tuning::row_pitch +
            (Tuning::fixed ? 0 : strip * columns * Problem::stride_w);
        add_rows<Problem, Tuning>(sum, strip, pixels, filters + plane / Tuning::images * Problem::filter_pitch, low, high,
                                  first_segment, last_segment);
    }
    __syncthreads();  // the tile has been read
    if (works) {
        float* const to = tile + plane * Problem::result_plane + row * Problem::result_pitch + strip * columns;
#pragma unroll
        for (int q = 0; q < columns; q += 4) {
            float v[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) v[e] = q + e < columns ? sum[q + e] : 0.0f;
            store_vector(to + q, v);
        }
    }
    __syncthreads();
    store_results<Problem, Tuning>(tile, bias, y, first, batch);
}

}  // namespace leanconv
