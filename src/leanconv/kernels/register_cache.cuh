// A small filter over single-channel images, the pixels held in registers (Chen et al., register cache).
//
// Arithmetic per output: 2 * R * S flops for 8 bytes (one pixel read, one written), so at 4.25 TB/s and 67 TFLOP/s
// copying the image is the bound up to about 7x7 and FMA issue above it. Small filters should approach a device copy,
// large ones what a well-tuned SGEMM reaches (75 % of the peak).
//
// Two schemes with 32 * columns outputs side by side to a warp, `columns` to a lane, and the published one:
//   register_cache_walk   for filters whose weights fit into registers: a warp walks down its strip, each input row is
//                         fetched once and added to the r output rows that it reaches. Nothing but FMAs between loads.
//   register_cache_tile   for larger ones: a warp makes `rows` rows of outputs; per filter row it fetches one more input
//                         row and issues rows * columns * s FMAs, each weight read from shared memory once for
//                         rows * columns of them.
//   register_cache_partial_sums   one column a lane, and the sums move from lane to lane; kept to be compared with.
#pragma once

#include <lib/index.cuh>
#include <lib/ptx.cuh>
#include <lib/row_windows.cuh>

namespace leanconv {

template <bool given> struct Constant { static constexpr bool value = given; };

// The warp's number in its block.
// NOTE: the shuffle tells the compiler that all lanes have the same one, so that branches on it do not part them.
__device__ __forceinline__ int warp_number() {
    return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
}

template <class Problem, class Tuning>
struct WarpWalk : Strip<Problem, Tuning::columns> {
    using Base = Strip<Problem, Tuning::columns>;
    using T = typename Base::T;
    static constexpr int r = Problem::r, s = Problem::s, columns = Tuning::columns, depth = Tuning::depth;
    static_assert(depth >= 2, "the ring holds the row in use and at least one that is under way");

    // One input row: each sum moves one output row on while it takes the products of the next filter row, so that
    // acc[k] belongs to output row n - k. With `checked`, only output rows in [0, outputs) are worked on.
    template <bool checked>
    static __device__ __forceinline__ void multiply(T (&acc)[r][columns], const T (&w)[r][s],
                                                    const T (&x)[Base::window], int n, int outputs) {
#pragma unroll
        for (int k = r - 1; k >= 0; --k) {
#pragma unroll
            for (int c = 0; c < columns; ++c) acc[k][c] = k > 0 ? acc[k > 0 ? k - 1 : 0][c] : T(0);
            if (checked && (n < k || n - k >= outputs)) continue;
#pragma unroll
            for (int e = 0; e < s; ++e)
#pragma unroll
                for (int c = 0; c < columns; ++c) acc[k][c] += w[k][e] * x[e + c];
        }
    }

    // `outputs` rows of outputs; store(row, number) is called for each. depth - 1 input rows are under way at a time.
    template <class Rows, class Store>
    static __device__ __forceinline__ void walk(Rows& source, const T* weights, int outputs, const Store& store) {
        const int inputs = outputs + r - 1;
        typename Rows::Raw ring[depth];
#pragma unroll
        for (int n = 0; n < depth - 1; ++n)
            if (n < inputs) source.load(ring[n], n);
        T w[r][s];
#pragma unroll
        for (int k = 0; k < r * s; ++k) w[k / s][k % s] = weights[k];
        T acc[r][columns] = {};

        const auto turn = [&](int first, auto checked) {
#pragma unroll
            for (int u = 0; u < depth; ++u) {
                const int n = first + u, next = n + depth - 1;
                // An unchecked turn ends with r - 1 input rows or more to come.
                if ((!checked.value && depth <= r) || next < inputs) source.load(ring[(u + depth - 1) % depth], next);
                T x[Base::window];
                source.deliver(ring[u], x);
                multiply<checked.value>(acc, w, x, n, outputs);
                if (!checked.value || (n >= r - 1 && n < inputs)) store(acc[r - 1], n - (r - 1));
            }
        };
#pragma unroll 1
        for (int first = 0; first < inputs; first += depth) {
            if (first >= r - 1 && first + depth <= outputs) turn(first, Constant<false>{});
            else turn(first, Constant<true>{});
        }
    }
};

// Warp g walks down strip g % strips of band (g / strips) % bands of image g / strips / bands, `walk` rows of outputs.
template <class Problem, class Tuning>
__device__ __forceinline__ void register_cache_walk(const typename Problem::element* x,
                                                    const typename Problem::element* w, typename Problem::element* y,
                                                    typename Problem::element value, typename Problem::element delta,
                                                    int height, int width, int64 x_pitch, int64 x_step, int64 y_pitch,
                                                    int64 y_step, int images, int walk, int strips, int bands) {
    using Walk = WarpWalk<Problem, Tuning>;
    using T = typename Walk::T;
    const int warp = warp_number(), lane = threadIdx.x % 32;
    const int64 number = static_cast<int64>(blockIdx.x) * Tuning::warps + warp;
    if (number >= static_cast<int64>(strips) * bands * images) return;
    const unsigned rest = static_cast<unsigned>(number) / strips;
    const int image = rest / bands;
    const int i = (rest % bands) * walk, j = (static_cast<unsigned>(number) % strips) * Walk::width;
    const Plane<T> plane{reinterpret_cast<const T*>(x) + image * x_step, reinterpret_cast<T*>(y) + image * y_step,
                         height, width, x_pitch, y_pitch, static_cast<T>(value)};
    const T* const weights = reinterpret_cast<const T*>(w);
    const T shift = static_cast<T>(delta);
    const int outputs = min(walk, height - i);
    typename Walk::Buffers staging(reinterpret_cast<T*>(shared_memory()) + warp * Walk::Buffers::elements);

    T* const to = plane.y + i * y_pitch + j;
    if (Walk::inside(plane, i, j, outputs)) {
        using Rows = typename Select<Tuning::shuffle, typename Walk::ShuffledRows, typename Walk::DirectRows>::type;
        Rows source(plane, i, j, lane, staging);
        Walk::walk(source, weights, outputs, [&](const T(&row)[Tuning::columns], int n) {
            Walk::store_vectors(to + n * y_pitch, row, shift, lane);
        });
    } else {
        typename Walk::StagedRows source(plane, i, j, lane, staging);
        Walk::walk(source, weights, outputs, [&](const T(&row)[Tuning::columns], int n) {
            Walk::store_staged(to + n * y_pitch, row, shift, lane, width - j, staging);
        });
    }
}

template <class Problem, class Tuning>
struct WarpTile : Strip<Problem, Tuning::columns> {
    using Base = Strip<Problem, Tuning::columns>;
    using T = typename Base::T;
    static constexpr int r = Problem::r, s = Problem::s, columns = Tuning::columns, depth = Tuning::depth;
    static constexpr int rows = Tuning::rows, inputs = rows + r - 1;
    static constexpr int weight_pitch = round_up(s, 4);
    static_assert(depth > rows, "the ring holds the rows in use and at least one that is under way");

    // One filter row, for all outputs of the lane; input row `turn` is the ring's first.
    static __device__ __forceinline__ void multiply(T (&acc)[rows][columns], const T (&ring)[depth][Base::window],
                                                    const T* weights, int turn) {
#pragma unroll
        for (int k = 0; k < s; k += 4) {
            T w[4];
            load_vector(w, weights + k);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (k + e >= s) continue;
#pragma unroll
                for (int p = 0; p < rows; ++p)
#pragma unroll
                    for (int c = 0; c < columns; ++c) acc[p][c] += w[e] * ring[(turn + p) % depth][k + e + c];
            }
        }
    }

    template <class Rows>
    static __device__ __forceinline__ void accumulate(T (&acc)[rows][columns], Rows& source, const T* weights) {
        constexpr int ahead = depth - 1, first = ahead < inputs ? ahead : inputs;
        T ring[depth][Base::window];
        typename Rows::Raw raw[first];
#pragma unroll
        for (int n = 0; n < first; ++n) source.load(raw[n], n);
#pragma unroll
        for (int n = 0; n < first; ++n) source.deliver(raw[n], ring[n]);
        const auto step = [&](int filter_row, int turn) {
            const bool more = filter_row + ahead < inputs;
            typename Rows::Raw next;
            if (more) source.load(next, filter_row + ahead);
            multiply(acc, ring, weights + filter_row * weight_pitch, turn);
            if (more) source.deliver(next, ring[(turn + ahead) % depth]);
        };
        // Whole turns of the ring as a loop, so that the code stays within the instruction cache; the rest unrolled.
        constexpr int looped = (r - 1) / depth * depth;
#pragma unroll 1
        for (int filter_row = 0; filter_row < looped; filter_row += depth) {
#pragma unroll
            for (int turn = 0; turn < depth; ++turn) step(filter_row + turn, turn);
        }
#pragma unroll
        for (int turn = 0; turn < r - looped; ++turn) step(looped + turn, turn);
    }
};

// A block's warps lie one below the other: they read each other's input rows from L1.
// Block b computes strip b % strips of band (b / strips) % bands of image b / strips / bands.
template <class Problem, class Tuning>
__device__ __forceinline__ void register_cache_tile(const typename Problem::element* x,
                                                    const typename Problem::element* w, typename Problem::element* y,
                                                    typename Problem::element value, typename Problem::element delta,
                                                    int height, int width, int64 x_pitch, int64 x_step, int64 y_pitch,
                                                    int64 y_step, int strips, int bands) {
    using Tile = WarpTile<Problem, Tuning>;
    using T = typename Tile::T;
    const int warp = warp_number(), lane = threadIdx.x % 32;
    // Shared memory: the filter, rows padded to whole vectors, then each warp's buffers.
    T* const weights = reinterpret_cast<T*>(shared_memory());
    constexpr int weight_elements = Tile::r * Tile::weight_pitch;
    for (int k = threadIdx.x; k < weight_elements; k += 32 * Tuning::warps) {
        const int column = k % Tile::weight_pitch;
        weights[k] =
            column < Tile::s ? reinterpret_cast<const T*>(w)[k / Tile::weight_pitch * Tile::s + column] : T(0);
    }
    __syncthreads();

    const int rest = blockIdx.x / strips, image = rest / bands;
    const int i = (rest % bands * Tuning::warps + warp) * Tuning::rows, j = (blockIdx.x % strips) * Tile::width;
    if (i >= height) return;
    const Plane<T> plane{reinterpret_cast<const T*>(x) + image * x_step, reinterpret_cast<T*>(y) + image * y_step,
                         height, width, x_pitch, y_pitch, static_cast<T>(value)};
    typename Tile::Buffers staging(weights + weight_elements + warp * Tile::Buffers::elements);

    T acc[Tuning::rows][Tuning::columns] = {};
    T* to = plane.y + i * y_pitch + j;
    if (Tile::inside(plane, i, j, Tuning::rows)) {
        using Rows = typename Select<Tuning::shuffle, typename Tile::ShuffledRows, typename Tile::DirectRows>::type;
        Rows source(plane, i, j, lane, staging);
        Tile::accumulate(acc, source, weights);
#pragma unroll
        for (int p = 0; p < Tuning::rows; ++p)
            Tile::store_vectors(to + p * y_pitch, acc[p], static_cast<T>(delta), lane);
    } else {
        typename Tile::StagedRows source(plane, i, j, lane, staging);
        Tile::accumulate(acc, source, weights);
#pragma unroll
        for (int p = 0; p < Tuning::rows; ++p)
            if (i + p < height)
                Tile::store_staged(to + p * y_pitch, acc[p], static_cast<T>(delta), lane, width - j, staging);
    }
}

// The published scheme (its Algorithm 1): a lane keeps one column of rows + r - 1 pixels. For each filter column it adds
// the products with its own pixels to its sums, and the sums move one lane up, so that lanes s - 1 ... 31 end with the
// outputs: 33 - s columns a warp, and a shuffle for every r FMAs.
// NOTE: the paper's listing loads one weight per thread; a filter may have more weights than the block has threads.
template <class Problem, class Tuning>
__device__ __forceinline__ void register_cache_partial_sums(
    const typename Problem::element* x, const typename Problem::element* w, typename Problem::element* y,
    typename Problem::element value, typename Problem::element delta, int height, int width, int64 x_pitch,
    int64 x_step, int64 y_pitch, int64 y_step, int strips, int bands) {
    using T = typename Arithmetic<typename Problem::element>::type;
    using Border = typename Problem::border;
    constexpr int r = Problem::r, s = Problem::s, rows = Tuning::rows, pitch = round_up(r, 4);
    static_assert(s <= 32, "at least one lane of a warp ends with an output");
    T* const weights = reinterpret_cast<T*>(shared_memory());  // column by column, each padded to whole vectors
    for (int k = threadIdx.x; k < s * pitch; k += 32 * Tuning::warps)
        weights[k] = k % pitch < r ? reinterpret_cast<const T*>(w)[k % pitch * s + k / pitch] : T(0);
    __syncthreads();

    const int warp = warp_number(), lane = threadIdx.x % 32;
    const int rest = blockIdx.x / strips, image = rest / bands;
    const int i = (rest % bands * Tuning::warps + warp) * rows, j = (blockIdx.x % strips) * (33 - s);
    if (i >= height) return;
    const T* const from = reinterpret_cast<const T*>(x) + image * x_step;
    const int column = border_index<Border>(j - Problem::anchor_x + lane, width);
    T pixels[rows + r - 1];
#pragma unroll
    for (int n = 0; n < rows + r - 1; ++n) {
        const int row = border_index<Border>(i - Problem::anchor_y + n, height);
        pixels[n] = row >= 0 && column >= 0 ? from[row * x_pitch + column] : static_cast<T>(value);
    }
    T sum[rows] = {};
#pragma unroll 1
    for (int k = 0; k < s; ++k) {
#pragma unroll
        for (int p = 0; p < rows; ++p) sum[p] = __shfl_up_sync(0xffffffffu, sum[p], 1);
#pragma unroll
        for (int m = 0; m < r; m += 4) {
            T column_weights[4];
            load_vector(column_weights, weights + k * pitch + m);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (m + e >= r) continue;
#pragma unroll
                for (int p = 0; p < rows; ++p) sum[p] += column_weights[e] * pixels[p + m + e];
            }
        }
    }
    const int to_column = j + lane - (s - 1);
    T* const to = reinterpret_cast<T*>(y) + image * y_step + i * y_pitch + to_column;
#pragma unroll
    for (int p = 0; p < rows; ++p)
        if (lane >= s - 1 && to_column < width && i + p < height) to[p * y_pitch] = sum[p] + static_cast<T>(delta);
}

}  // namespace leanconv
