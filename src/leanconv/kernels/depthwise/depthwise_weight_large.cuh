// depthwise_weight_large: gradient of a depthwise layer's large filters; tiles of x and dy in shared memory, of taps in registers.
//
//   dw[k, r, s] = sum over n, p, q of dy[n, k, p, q] * x[n, k / group_k, p + r - pad_top, q + s - pad_left]
//
// Requires   one channel a group; NCHW or NHWC; unit stride, no dilation; more taps than depthwise_weight keeps.
// Numerics   float32 FMAs; after each tile of pixels a thread's sums are promoted: added to totals in shared memory, and begun
//            anew. Sums over the images and the workers of a block, the blocks of a cluster (distributed shared memory) or
//            partial sums (split-K) in a fixed order: no atomics, the same bits in every run.
// CTA tile   `channels` filters, which `split` blocks of a cluster or split-K share; in shared memory at a time tile_p x tile_q
//            pixels of dy of `images` images, and the pixels of x that they meet. A plane is an image of a filter.
// Thread     tap_rows x 8 taps of one plane; of every `workers`-th strip of 4 columns of dy it goes down one of `bands` bands.
// One step   a row of x: 12 pixels of it and 4 of the next row of dy (4 loads of 16 bytes: 16 cycles), which meet all rows of
//            dy that the thread has in registers: 32 FMAs for each row of taps (8: 64 cycles of a multiprocessor).
// Registers  64 sums, (7 + 2) * 4 of dy, 12 of x.
// Work       2 * R * S flops for 8 bytes an output pixel: FMA issue is the bound. Rows and strips that meet nothing but padding
//            are left out.
#pragma once

#include <kernels/depthwise/depthwise_weight.cuh>

namespace leanconv {

// What lies where in shared memory, in floats, and what each thread has.
template <class Problem, class Tuning>
struct TapTiles {
    // columns of a strip of dy; taps of a thread
    static constexpr int columns = 4, rows = Problem::tap_rows, wide = 8, taps = rows * wide;
    // Taps of a row begin `lead` before the first, so that windows begin at multiples of four pixels of the image.
    static constexpr int lead = ((-Problem::pad_left) % 4 + 4) % 4;
    static constexpr int tiles_r = ceil_div(Problem::r, rows), tiles_s = ceil_div(Problem::s + lead, wide);
    static constexpr int planes = Tuning::images * Tuning::channels, workers = Tuning::bands * Tuning::workers;
    static constexpr int threads = planes * workers * tiles_s * tiles_r;
    static constexpr int tiles_p = ceil_div(Problem::p, Tuning::tile_p), tiles_q = ceil_div(Problem::q, Tuning::tile_q);
    static constexpr int strips = Tuning::tile_q / columns, width = Tuning::tile_q + tiles_s * wide;
    // Where a tile has whole rows only what lies inside the image is copied: beside it there are zeros from the beginning.
    static constexpr bool whole = tiles_q == 1 && Problem::pad_left >= 0;
    static constexpr int first_w = whole ? Problem::pad_left + lead : 0;
    static constexpr int width_x = whole ? (Problem::w < width - first_w ? Problem::w : width - first_w) : width;
    static constexpr int width_dy = whole ? Problem::q : Tuning::tile_q;
    static constexpr int dy = planes * Problem::x_plane, zeros = dy + planes * Problem::dy_plane, totals = Problem::totals;

    static_assert(Problem::group_c == 1 && !Problem::chwn, "one channel a group, images outermost");
    static_assert(Problem::stride_h == 1 && Problem::stride_w == 1 && Problem::dilation_h == 1 && Problem::dilation_w == 1,
                  "a pixel of x meets neighbouring taps with neighbouring pixels of dy");
    static_assert(!Problem::bias && identity<typename Problem::activation>, "a gradient is stored as it is");
    static_assert(threads <= Tuning::threads && Tuning::threads % 32 == 0, "each thread has one tile of taps at most");
    static_assert(Tuning::tile_q % columns == 0, "a tile has whole strips");
    static_assert(Problem::x_pitch % 4 == 0 && Problem::dy_pitch % 4 == 0 && Problem::x_plane % 4 == 0 &&
                  Problem::dy_plane % 4 == 0 && Problem::x_pitch >= width && Problem::dy_pitch >= Tuning::tile_q,
                  "rows are read as float4");
    static_assert(totals >= zeros + 4 && totals >= Tuning::channels * Problem::r * Problem::s, "results lie where tiles did");
};

// A tensor of which planes are copied: its channels, of which `group` filters share one, its height and width; tile_h rows of
// tile_w pixels of it in shared memory, from column `at` of rows `pitch` apart, and planes `plane` apart.
template <int channels_, int group_, int h_, int w_, int tile_h_, int tile_w_, int at_, int pitch_, int plane_>
struct PlanesOf {
    static constexpr int channels = channels_, group = group_, h = h_, w = w_, tile_h = tile_h_, tile_w = tile_w_, at = at_,
                         pitch = pitch_, plane = plane_;
};

// Copies `rows` rows of the block's planes from (first_row, first_column) on, widened to floats: zeros in columns outside the
// image, and for planes that do not exist.
template <class Problem, class Tuning, class Planes>
__device__ __forceinline__ void copy_planes(float* tile, ElementsIn<Problem> from, int first_k, int64 first_n, int first_row,
                                            int rows, int first_column, long long batch) {
    constexpr bool of_channel = Problem::nhwc && Planes::group == 1 && Planes::channels % 4 == 0 && Tuning::channels % 4 == 0;
    constexpr bool of_row = !Problem::nhwc && Planes::w % 4 == 0 && Planes::tile_w % 4 == 0, copied = of_row && !narrow<Problem>;
    // whole planes: vectors may end in another row than they begin in
    constexpr bool of_plane = !Problem::nhwc && !of_row && Planes::tile_w == Planes::w && Tuning::tile_p >= Problem::p &&
                              Planes::h * Planes::w % 4 == 0;
    constexpr int unit = of_channel || of_row || of_plane ? 4 : 1, pixels = Planes::tile_h * Planes::tile_w;
    // neighbouring items are neighbours in memory
    constexpr int across = Problem::nhwc ? Tuning::channels / unit : pixels / unit;
    constexpr int count = across * Tuning::images * (Problem::nhwc ? pixels : Tuning::channels);
    // loads that a thread has in flight where pixels pass registers
    constexpr int at_once = copied ? 1 : 8;
#pragma unroll 1
    for (int number = threadIdx.x; number < count; number += at_once * Tuning::threads) {
        float values[at_once][unit];
        int to[at_once], places[at_once];
#pragma unroll
        for (int b = 0; b < at_once; ++b) {
            const int item = number + b * Tuning::threads, rest = item / across, within = item % across * unit;
            const int place = Problem::nhwc ? rest % pixels : within, row = place / Planes::tile_w, column = place % Planes::tile_w;
            const int image = Problem::nhwc ? rest / pixels : rest % Tuning::images;
            const int filter = Problem::nhwc ? within : rest / Tuning::images, k = first_k + filter, j = first_column + column;
            const int64 n = first_n + image;
            const bool exists = item < count && row < rows;
            const bool inside = k < Problem::k && n < batch && static_cast<unsigned>(j) < static_cast<unsigned>(Planes::w);
            const int pixel = (first_row + row) * Planes::w + j, c = k / Planes::group;
            constexpr int of_image = Planes::h * Planes::w;
            const auto* const source = !(exists && inside) ? from
                : Problem::nhwc                            ? from + (n * of_image + pixel) * Planes::channels + c
                                                           : from + (n * Planes::channels + c) * of_image + pixel;
            to[b] = (filter * Tuning::images + image) * Planes::plane, places[b] = place;
            if constexpr (copied) {
                if (exists) cp_async_16(tile + to[b] + row * Planes::pitch + Planes::at + column, source, inside);
            } else {
                load_adjacent(values[b], source, exists && inside);
                if (!exists) to[b] = -1;
            }
        }
        if constexpr (!copied) {
#pragma unroll
            for (int b = 0; b < at_once; ++b) {
                if (to[b] < 0) continue;
                const auto at = [&](int place) {
                    return tile + to[b] + place / Planes::tile_w * Planes::pitch + Planes::at + place % Planes::tile_w;
                };
                if constexpr (of_row) {
                    store_vector(at(places[b]), values[b]);
                } else if constexpr (of_plane) {
#pragma unroll
                    for (int e = 0; e < unit; ++e) *at(places[b] + e) = values[b][e];
                } else {
#pragma unroll
                    for (int e = 0; e < unit; ++e) at(places[b])[e * (Tuning::images * Planes::plane)] = values[b][e];
                }
            }
        }
    }
}

// What a thread adds from the tiles in shared memory: the rows of x that lie there, the rows of dy, and the row of x that the
// first row of dy meets with the thread's first row of taps. `column` is that of the image where the first window begins.
template <class Problem, class Tuning, class Tiles = TapTiles<Problem, Tuning>>
__device__ __forceinline__ void add_tiles(float (&sum)[Tiles::taps], const float* pixels, const float* grads, const float* zeros,
                                          int band, int worker, int rows_x, int rows_dy, int first, int tap_rows,
                                          int column) {
    constexpr int columns = Tiles::columns, wide = Tiles::wide, rows = Tiles::rows, window = columns + wide - 1;
    constexpr int unrolled = Problem::unrolled;  // rows of x of an iteration
    const int begin = max(0, first), count = max(0, min(rows_x, first + tap_rows - 1 + rows_dy) - begin);
    // rows of dy that the first row of taps meets, in the band: some lie above or below the tile's
    const int low = begin - first + count * band / Tuning::bands, high = begin - first + count * (band + 1) / Tuning::bands;
#pragma unroll 1
    for (int strip = worker; strip < Tiles::strips; strip += Tuning::workers) {
        const int at = column + strip * columns;
        if (at + window <= 0 || at >= Problem::w) continue;
        const auto row_of_dy = [&](int row) {
            return static_cast<unsigned>(row) < static_cast<unsigned>(rows_dy) ? grads + row * Problem::dy_pitch + strip * columns
                                                                               : zeros;
        };
        // rows of dy that the row of x in hand meets, the last of them with the first row of taps
        float passed[rows - 1 + unrolled][columns];
#pragma unroll
        for (int i = 0; i < rows - 1; ++i) load_vector(passed[i], row_of_dy(low - (rows - 1) + i));
        const float* from = pixels + (low + first) * Problem::x_pitch + strip * columns;
#pragma unroll 1
        for (int t = low; t < high; t += unrolled) {
#pragma unroll
            for (int slot = 0; slot < unrolled; ++slot) {
                if (t + slot >= high) break;
                float pixel[columns + wide];
#pragma unroll
                for (int v = 0; v < columns + wide; v += 4) {
                    float four[4];
                    load_vector(four, from + slot * Problem::x_pitch + v);
#pragma unroll
                    for (int i = 0; i < 4; ++i) pixel[v + i] = four[i];
                }
                load_vector(passed[rows - 1 + slot], row_of_dy(t + slot));
#pragma unroll
                for (int r = rows - 1; r >= 0; --r)
#pragma unroll
                    for (int q = 0; q < columns; ++q)
#pragma unroll
                        for (int s = 0; s < wide; ++s)
                            sum[r * wide + s] = fmaf(passed[rows - 1 + slot - r][q], pixel[q + s], sum[r * wide + s]);
            }
            from += unrolled * Problem::x_pitch;
#pragma unroll
            for (int i = 0; i < rows - 1; ++i)
#pragma unroll
                for (int q = 0; q < columns; ++q) passed[i][q] = passed[i + unrolled][q];
        }
    }
}

template <class Problem, class Tuning, class Result>
__device__ __forceinline__ void depthwise_weight_large(ElementsIn<Problem> x, ElementsIn<Problem> dy, Result* __restrict__ dw,
                                                       long long batch) {
    using Tiles = TapTiles<Problem, Tuning>;
    using PlanesOfX = PlanesOf<Problem::c, Problem::group_k, Problem::h, Problem::w, Tuning::tile_h, Tiles::width_x,
                               Tiles::first_w, Problem::x_pitch, Problem::x_plane>;
    using PlanesOfDy = PlanesOf<Problem::k, 1, Problem::p, Problem::q, Tuning::tile_p, Tiles::width_dy, 0,
                                Problem::dy_pitch, Problem::dy_plane>;
    constexpr int shares = Tuning::split * Tuning::split_k;
    float* const shared = reinterpret_cast<float*>(shared_memory());
    const int first_k = static_cast<int>(blockIdx.x) / shares * Tuning::channels;
    const int rank = static_cast<int>(blockIdx.x) % shares;

    // Neighbouring lanes have neighbouring planes, then bands of rows and strips; what meets padding alone is the same for most
    // of a warp.
    int rest = static_cast<int>(threadIdx.x);
    const int plane = rest % Tiles::planes;
    rest /= Tiles::planes;
    const int band = rest % Tuning::bands, worker = rest / Tuning::bands % Tuning::workers;
    rest /= Tiles::workers;
    const int tile_s = rest % Tiles::tiles_s, tile_r = rest / Tiles::tiles_s;
    const bool works = tile_r < Tiles::tiles_r;
    const float* const pixels = shared + plane * Problem::x_plane + tile_s * Tiles::wide;
    const float* const grads = shared + Tiles::dy + plane * Problem::dy_plane;
    float* const totals = shared + Tiles::totals + threadIdx.x;
    const int first_row = tile_r * Tiles::rows, tap_rows = min(Tiles::rows, Problem::r - first_row);

    float sum[Tiles::taps] = {};
#pragma unroll
    for (int i = 0; i < Tiles::taps; ++i) totals[i * Tuning::threads] = 0.0f;
#pragma unroll 1
    for (int i = threadIdx.x; i < Tiles::zeros + 4; i += Tuning::threads) shared[i] = 0.0f;

    constexpr int of_image = Tiles::tiles_p * Tiles::tiles_q;
    const int tiles = static_cast<int>((batch + Tuning::images - 1) / Tuning::images) * of_image;
#pragma unroll 1
    for (int tile = rank; tile < tiles; tile += shares) {
        const int64 n = tile / of_image * Tuning::images;
        const int in_image = tile % of_image;
        const int first_p = in_image / Tiles::tiles_q * Tuning::tile_p, first_q = in_image % Tiles::tiles_q * Tuning::tile_q;
        const int rows_dy = min(Tuning::tile_p, Problem::p - first_p);
        const int above = first_p - Problem::pad_top, first_i = max(0, above);
        const int rows_x = min(Problem::h, above + rows_dy - 1 + Problem::r) - first_i;
        const int first_j = first_q - Problem::pad_left - Tiles::lead, copied_j = Tiles::whole ? 0 : first_j;
        __syncthreads();  // the tiles before have been read
        copy_planes<Problem, Tuning, PlanesOfX>(shared, x, first_k, n, first_i, rows_x, copied_j, batch);
        copy_planes<Problem, Tuning, PlanesOfDy>(shared + Tiles::dy, dy, first_k, n, first_p, rows_dy, first_q, batch);
        cp_async_commit_group();
        cp_async_wait_group<0>();
        __syncthreads();
        if (!works) continue;
        add_tiles<Problem, Tuning>(sum, pixels, grads, shared + Tiles::zeros, band, worker, rows_x, rows_dy,
                                   above - first_i + first_row, tap_rows, first_j + tile_s * Tiles::wide);
#pragma unroll
        for (int i = 0; i < Tiles::taps; ++i) {
            totals[i * Tuning::threads] += sum[i], sum[i] = 0.0f;
            if (i % 4 == 3) asm volatile("" ::: "memory");  // no more loads ahead than registers are free for
        }
    }
    __syncthreads();

    // The sums of all images, bands and workers: neighbouring threads have neighbouring tiles of taps.
    constexpr int of_filter = Tiles::tiles_s * Tiles::tiles_r, sums = Tuning::channels * of_filter * Tiles::taps;
#pragma unroll 1
    for (int at = threadIdx.x; at < sums; at += Tuning::threads) {
        const int filter = at % Tuning::channels, number = at / Tuning::channels % of_filter, tap = at / (Tuning::channels * of_filter);
        const int r = number / Tiles::tiles_s * Tiles::rows + tap / Tiles::wide;
        const int s = number % Tiles::tiles_s * Tiles::wide + tap % Tiles::wide - Tiles::lead;
        if (r >= Problem::r || s < 0 || s >= Problem::s) continue;
        const float* const from = shared + Tiles::totals + tap * Tuning::threads + number * (Tiles::workers * Tiles::planes) +
            filter * Tuning::images;
        float total = 0.0f;
#pragma unroll 1
        for (int worker = 0; worker < Tiles::workers; ++worker)
#pragma unroll 4
            for (int image = 0; image < Tuning::images; ++image) total += from[worker * Tiles::planes + image];
        shared[(filter * Problem::r + r) * Problem::s + s] = total;
    }
    __syncthreads();
    store_share<Problem, Tuning>(dw, shared, first_k, rank);
}

}  // namespace leanconv
