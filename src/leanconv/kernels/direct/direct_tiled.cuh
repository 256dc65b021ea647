// direct_tiled: direct convolution with the pixels of a row in registers; the general case of Chen et al., Optimizing
// Memory Efficiency for Convolution Kernels on Kepler GPUs (2017).
//
//   y[n, k, p, q] = sum over c, r, s of x[n, c, p * stride + r * dilation - pad, ...] * w[k, c, r, s]
//
// Requires   NCHW or NHWC; a tile of pixels and filters in shared memory.
// Numerics   float32 FMAs in direct order; float16 and bfloat16 are widened on the way to shared memory, and rounded once.
// CTA tile   tile_k filters x (tile_w x tile_h) pixels x tile_c channels a step; `walk` tiles down a column, the filters
//            resident where one step has all channels.
// Thread     thread_k filters x thread_pixels adjacent pixels of a row. For a row of a filter it reads the pixels of all its
//            windows once, thread_pixels + S - 1 of them, and uses them for all S taps.
// Pipelines  `stages` steps in shared memory, by cp.async; copies run stages - 1 steps ahead, from one tile into the next.
// One step   wait for its copies; barrier; issue the copies of a later step; for `unrolled_rows` rows of a filter at a time,
//            tap by tap: read the next tap's filters and the next segment's pixels, thread_k * thread_pixels FMAs.
// Registers  thread_k * thread_pixels sums, one segment of pixels or two, 2 * thread_k weights, 10 to 26 for addresses.
// Work       2 * C/g * R * S flops an output, bound by FMA issue. 8 filters x 8 pixels of 3x3 filters take 3 + 6 loads of
//            128 bits for 192 FMAs, where a tiled matrix product takes 12.
// Measured   figure: general-direct direct_tiled/pytorch mean = 1.04
//            figure: general-direct direct_tiled tflops-most = 49.8
//            figure: first-layers direct_tiled/pytorch mean = 1.52
#pragma once

#include <device/epilogue.cuh>
#include <kernels/direct/direct_loader.cuh>

namespace leanconv {

// The products of one step. The code holds so many `rows` of a filter in one channel, one tap after the other; the filters
// of the next tap and the pixels of the next segment are read while this tap is multiplied.
template <class Problem, class Tuning>
struct DirectProduct {
    using Tile = DirectTile<Problem, Tuning>;
    using Taps = DirectTaps<Problem, Tuning>;
    using Filters = DirectFilterLoader<Problem, Tuning>;
    static constexpr int thread_k = Tuning::thread_k, pixels = Tuning::thread_pixels, rows = Tuning::unrolled_rows;
    static constexpr int all_rows = Tuning::tile_c * Problem::r, all_taps = rows * Problem::s;
    static constexpr int all_segments = rows * Taps::segments, longest = Taps::longest();
    // Long segments leave no registers for a second one.
    static constexpr int buffers = longest <= 20 ? 2 : 1;
    // The last tap of the code reads ahead for the first of its next iteration, into the same registers each time.
    static constexpr bool ahead = rows < all_rows && rows % 2 == 0 && buffers == 2;
    static_assert(rows <= all_rows, "the code holds no more rows than a step has");

    int at_k, at_pixel;
    const float *filters, *image;
    float w[2][thread_k], x[buffers][longest];

    __device__ __forceinline__ explicit DirectProduct(const DirectPlace<Tile>& place)
        : at_k(place.k()), at_pixel(place.row() * Problem::pitch + place.column() * Tile::step) {}

    // Row `number` of the code, in an iteration that begins with row `first`; the last one of the step instead of those
    // behind it.
    template <int number>
    static __device__ __forceinline__ int row_of(int first) {
        const int row = first + number;
        return number == 0 || (all_rows % rows == 0 && number < rows) ? row : min(row, all_rows - 1);
    }

    template <int tap>
    __device__ __forceinline__ void read_filters(int first) {
        if constexpr (tap < all_taps + (ahead ? 1 : 0)) {
            constexpr int s = Taps::tap(tap % Problem::s).s;
            const int row = row_of<tap / Problem::s>(first), c = row / Problem::r, r = row % Problem::r;
            const float* const from = filters + Filters::filter_row(c, r, s) * Problem::filter_pitch + at_k;
#pragma unroll
            for (int k = 0; k < thread_k; k += 4) {
                const float4 v = *reinterpret_cast<const float4*>(from + k * Tile::lanes_k);
                w[tap % 2][k] = v.x, w[tap % 2][k + 1] = v.y, w[tap % 2][k + 2] = v.z, w[tap % 2][k + 3] = v.w;
            }
        }
    }

    template <int segment>
    __device__ __forceinline__ void read_pixels(int first) {
        if constexpr (segment < all_segments + (ahead ? 1 : 0)) {
            constexpr typename Taps::Tap opening = Taps::opening(segment % Taps::segments);
            const int row = row_of<segment / Taps::segments>(first), c = row / Problem::r, r = row % Problem::r;
            const float* const from = image + at_pixel + c * Problem::channel_pitch +
                Tile::row_place(r * Problem::dilation_h) * Problem::pitch + opening.phase * Tile::phase_columns +
                opening.begin;
#pragma unroll
            for (int j = 0; j < opening.length; j += 4) {
                const float4 v = *reinterpret_cast<const float4*>(from + j);
                float(&to)[longest] = x[segment % buffers];
                to[j] = v.x, to[j + 1] = v.y, to[j + 2] = v.z, to[j + 3] = v.w;
            }
        }
    }

    template <int number>
    __device__ __forceinline__ void multiply(float (&acc)[thread_k][pixels], int first) {
        if constexpr (number < all_taps) {
            constexpr typename Taps::Tap tap = Taps::tap(number % Problem::s);
            constexpr int row = number / Problem::s, segment = row * Taps::segments + tap.segment;
            if (all_rows % rows != 0 && row > 0 && number % Problem::s == 0 && first + row >= all_rows) return;
            read_filters<number + 1>(first);
            if constexpr (tap.opens) read_pixels<segment + buffers - 1>(first);
            // NOTE: the pixel stays while the filters run to and fro, so that an FMA keeps one operand of the one before:
            // see TileProduct. Sums and filters can then lie in different banks of the register file for every tap.
#pragma unroll
            for (int j = 0; j < pixels; ++j)
#pragma unroll
                for (int n = 0; n < thread_k; ++n) {
                    const int k = j % 2 == 0 ? n : thread_k - 1 - n;
                    acc[k][j] = fmaf(w[number % 2][k], x[segment % buffers][tap.at + j * Tile::step], acc[k][j]);
                }
            multiply<number + 1>(acc, first);
        }
    }

    // Add the products of the step in `stage_image` and `stage_filters` to acc.
    __device__ __forceinline__ void run(float (&acc)[thread_k][pixels], const float* stage_image,
                                        const float* stage_filters) {
        image = stage_image, filters = stage_filters;
        if constexpr (ahead) read_pixels<0>(0), read_filters<0>(0);
#pragma unroll 1
        for (int first = 0; first < all_rows; first += rows) {
            if constexpr (!ahead && buffers == 2) read_pixels<0>(first);
            if constexpr (!ahead) read_filters<0>(first);
            multiply<0>(acc, first);
        }
    }
};

// NHWC: stores a thread's sums, its filters from first_k and its pixels from (p, q) on, four filters at once.
template <class Problem, class Tile, class T>
__device__ __forceinline__ void store_filters(const float (&acc)[Tile::thread_k][Tile::thread_pixels], Bias<Problem> bias, T* y,
                                              int64 n, int group, int first_k, int p, int q) {
    if (p >= Problem::p) return;
    const bool vector = Problem::vector_store && reinterpret_cast<unsigned long long>(y) % (4 * item<Problem>) == 0;
#pragma unroll
    for (int f = 0; f < Tile::thread_k; f += 4) {
        const int first = first_k + f * Tile::lanes_k, filter = group * Problem::group_k + first;
        Term<Problem> terms[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) terms[i] = term_of<Problem>(bias, filter + i, first + i < Problem::group_k);
        T* const to = y + ((n * Problem::p + p) * Problem::q + q) * Problem::k + filter;
#pragma unroll
        for (int j = 0; j < Tile::thread_pixels; ++j) {
            if (q + j >= Problem::q) continue;
            T v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float held = held_by<Problem>(bias, to + j * Problem::k + i, first + i < Problem::group_k);
                v[i] = from_float<T>(finish<Problem>(acc[f + i][j], terms[i], held));
            }
            store_four(to + j * Problem::k, v, 1, Problem::group_k - first, vector);
        }
    }
}

// NCHW: the lanes of a warp transpose their sums in shared memory, two filters of a thread at a time, so that
// neighbouring lanes store neighbouring pixels of a row. first_k, p and q are those of the tile.
// NOTE: a thread that stores its own pixels does not write whole sectors. Explored (H200, 37ab552): 3x3 layers of 16
// and 32 channels took 1.3 to 1.5 times as long.
template <class Problem, class Tile, class T>
__device__ __forceinline__ void store_pixels(const float (&acc)[Tile::thread_k][Tile::thread_pixels], float* exchange,
                                             const DirectPlace<Tile>& place, Bias<Problem> bias, T* y, int64 n, int group,
                                             int first_k, int p, int q) {
    constexpr int pixels = Tile::thread_pixels, width = Tile::lanes_w * pixels, of_filter = 32 * pixels;
    constexpr int unit = Problem::q % 4 == 0 ? 4 : Problem::q % 2 == 0 ? 2 : 1;  // rows begin at multiples of it
    constexpr int64 image = static_cast<int64>(Problem::p) * Problem::q;
    T* const to = y + (n * Problem::k + group * Problem::group_k) * image;
    const auto store = [&](int filter, int row, int column, const float(&value)[unit]) {
        if (filter >= Problem::group_k || row >= Problem::p || column >= Problem::q) return;
        const Term<Problem> term = term_of<Problem>(bias, group * Problem::group_k + filter);
        T* const out = to + filter * image + row * Problem::q + column;
        T v[unit];
#pragma unroll
        for (int e = 0; e < unit; ++e)
            v[e] = from_float<T>(finish<Problem>(value[e], term, held_by<Problem>(bias, out + e, true)));
        store_adjacent(out, v);
    };
    if constexpr (pixels == unit) {  // a thread's pixels are one store, next to those of its neighbours
#pragma unroll
        for (int k = 0; k < Tile::thread_k; ++k)
            store(first_k + place.k() + k / 4 * (4 * Tile::lanes_k) + k % 4, p + place.row(), q + place.column(), acc[k]);
    } else {
        const int lane = threadIdx.x % 32;
        float* const mine = exchange + threadIdx.x / 32 * (2 * of_filter);
        float* const here = mine + (place.lane_k * Tile::lanes_h + place.lane_row) * width + place.lane_column * pixels;
#pragma unroll
        for (int k = 0; k < Tile::thread_k; k += 2) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < pixels; j += 4) {
                    const float v[4] = {acc[k + i][j], acc[k + i][j + 1], acc[k + i][j + 2], acc[k + i][j + 3]};
                    store_vector(here + i * of_filter + j, v);
                }
            __syncwarp();
            const int first = first_k + place.warp_k + k / 4 * (4 * Tile::lanes_k) + k % 4;
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int at = 0; at < of_filter; at += 32 * unit) {
                    const int row = (at + lane * unit) / width, column = (at + lane * unit) % width;
                    const float* const from = mine + i * of_filter + at + lane * unit;
                    float value[unit];
#pragma unroll
                    for (int e = 0; e < unit; ++e) value[e] = from[e];
                    store(first + row / Tile::lanes_h * 4 + i, p + place.warp_row + row % Tile::lanes_h,
                          q + place.warp_column + column, value);
                }
            __syncwarp();
        }
    }
}

// Block b: filters b % tiles_k of a group, then groups, tiles along a row, bands of rows, images.
template <class Problem, class Tuning>
__device__ __forceinline__ void direct_tiled(ElementsIn<Problem> x, ElementsIn<Problem> w, BiasIn<Problem> bias,
                                             ElementsOut<Problem> y, long long) {
    using Tile = DirectTile<Problem, Tuning>;
    constexpr int stages = Tuning::stages, walk = Tuning::walk;
    constexpr int tiles_k = ceil_div(Problem::group_k, Tuning::tile_k);
    constexpr int tiles_q = ceil_div(Problem::q, Tuning::tile_w), tiles_p = ceil_div(Problem::p, Tuning::tile_h);
    constexpr int bands = ceil_div(tiles_p, walk);
    static_assert(!Problem::chwn, "images are outermost");
    static_assert(stages >= 2, "one stage is computed on while others are in flight");

    const int tile_k = blockIdx.x % tiles_k, group = blockIdx.x / tiles_k % Problem::groups;
    const int rest = blockIdx.x / tiles_k / Problem::groups;
    const int q = rest % tiles_q * Tuning::tile_w, band = rest / tiles_q % bands;
    const int64 n = rest / tiles_q / bands;
    const int tiles = min(walk, tiles_p - band * walk), steps = tiles * Tile::steps;
    int p = band * walk * Tuning::tile_h;

    float* const shared = reinterpret_cast<float*>(shared_memory());
    float* const images = shared + (Tile::resident ? Tile::filter_floats : 0);
    DirectImageLoader<Problem, Tuning> image(x, n, group, p, q);
    DirectFilterLoader<Problem, Tuning> filters(w, group, tile_k);
    const auto load = [&](int step) {
        float* const stage = images + step % stages * Tile::stage_floats;
        image.load(stage);
        if constexpr (!Tile::resident) filters.load(stage + Tile::image_floats);
    };
    if constexpr (Tile::resident) filters.load(shared);
#pragma unroll
    for (int step = 0; step < stages - 1; ++step) {
        if (step < steps) load(step);
        cp_async_commit_group();
    }

    const DirectPlace<Tile> place;
    DirectProduct<Problem, Tuning> product(place);
    int step = 0;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        float acc[Tuning::thread_k][Tuning::thread_pixels] = {};
#pragma unroll 1
        for (int i = 0; i < Tile::steps; ++i, ++step) {
            // This step has landed for everybody, and everybody has read the one before: its stage is free.
            cp_async_wait_group<stages - 2>();
            __syncthreads();
            if (step + stages - 1 < steps) load(step + stages - 1);
            cp_async_commit_group();
            const float* const stage = images + step % stages * Tile::stage_floats;
            product.run(acc, stage, Tile::resident ? shared : stage + Tile::image_floats);
        }
        const int first_k = tile_k * Tuning::tile_k;
        if constexpr (Problem::nhwc) {
            const int row = p + place.row(), column = q + place.column();
            store_filters<Problem, Tile>(acc, bias, y, n, group, first_k + place.k(), row, column);
        } else {
            store_pixels<Problem, Tile>(acc, shared + Problem::exchange, place, bias, y, n, group, first_k, p, q);
        }
        p += Tuning::tile_h;
    }
}

}  // namespace leanconv
