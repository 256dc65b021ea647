// separable: a filter that is a column times a row, or a sum of few such products, in one pass over the image.
//
//   h_k[i, j] = sum over v of row_k[v] * x[i, j + v - anchor_x]                                  the row pass
//   y[i, j]   = delta + sum over k, u of column_k[u] * h_k[i + u - anchor_y, j]                  the column pass
//
// Requires   kernels given as `rank` columns of r weights and rows of s weights: w is (rank, r + s); types as for
//            register_cache.
// Numerics   FMAs in float32 or float64, each row of a window first, then its column; or wrapping int32; one rounding to
//            the type of the result, none in between.
// CTA tile   a strip of 128 columns, which it marches down; a step makes warps * outputs rows of it.
// Shared     the input rows of a step; a ring of filtered rows, as many as the columns of a step reach; the weights.
// One step   input rows have landed | barrier | row pass: input rows -> ring | barrier | copies of the next step's rows
//            are issued | column pass: ring -> outputs, while they are under way.
// Thread     4 x outputs sums in either pass: in the row pass `outputs` neighbours in each of four rows, in the column
//            pass `outputs` rows of four neighbours. Of the weights it holds a window of outputs + 4, which slides.
// Lanes      of the row pass: eight rows by four groups of columns. Rows lie 4 words off a multiple of 32, so that the
//            eight lanes that load 128 bits in a cycle of the banks read all of them.
// Work       r + s FMAs an output, for 8 bytes. Four inputs take 5 shared loads of 128 bits for 16 * outputs FMAs: with
//            8 outputs five cycles of the shared memory for eight of the FMAs, with 16 for sixteen.
// Predicted  in units of a copy of the image, float32 on an H200: FMAs 0.46 for 15x15, 0.95 for 31x31, 1.93 for 63x63, at
//            their full rate; shared memory 0.34, 0.7 and 1.3 beside them, with 8 outputs. Input is read
//            1 + (s + 6) / 128 times by neighbours at one time, which L2 serves, and the row pass is done again for r - 1
//            rows of each band.
#pragma once

#include <kernels/image_filter/image_rows.cuh>

namespace leanconv {

// Adds to acc[v][n], for each of 4 lines v and all n, the sum over t of weights[lead + t] * line v[lead + n + t]. `load`
// brings four places of all lines, the next ones at each call; `weights` has `lead` places before the first, which are
// not used, so that both begin at a vector.
// NOTE: no product that is not part of the sum is taken, not even with a weight of zero: a line may hold an Inf.
template <int taps, int lead, int outputs, class T, class Load>
__device__ __forceinline__ void slide(T (&acc)[4][outputs], const T* weights, Load&& load) {
    constexpr int groups = ceil_div(lead + taps + outputs - 1, 4);
    // Groups of four places of which each output uses all: they are looped over, a whole ring at a time.
    constexpr int ring = outputs / 4 + 1;
    constexpr int first_whole = ceil_div(lead + outputs - 1, 4), whole = (lead + taps) / 4 - first_whole;
    constexpr int rounds = whole < 2 * ring ? 0 : whole / ring;
    T window[ring][4];  // the weights of this group and of those before it
    const auto step = [&](int group, int slot, bool inside) {
        T in[4][4];
        load(in, group);
        if (inside || 4 * group < lead + taps) load_vector(window[slot], weights + 4 * group);
#pragma unroll
        for (int e = 0; e < 4; ++e)
#pragma unroll
            for (int n = 0; n < outputs; ++n) {
                // e - n is the place of the weight from the group's first on
                const int tap = 4 * group + e - n;
                if (!inside && (tap < lead || tap >= lead + taps)) continue;
                const T weight = window[(slot + ring + (e - n + 4 * ring) / 4 - ring) % ring][(e - n + 4 * ring) % 4];
#pragma unroll
                for (int v = 0; v < 4; ++v) acc[v][n] += weight * in[v][e];
            }
    };
    constexpr int looped = rounds == 0 ? 0 : first_whole + rounds * ring;
#pragma unroll
    for (int group = 0; group < (rounds == 0 ? 0 : first_whole); ++group) step(group, group % ring, false);
    if constexpr (rounds != 0) {
#pragma unroll 1
        for (int group = first_whole; group < looped; group += ring) {
#pragma unroll
            for (int k = 0; k < ring; ++k) step(group + k, (first_whole + k) % ring, true);
        }
    }
#pragma unroll
    for (int group = looped; group < groups; ++group) step(group, group % ring, false);
}

// The same where the taps of an output lie `channels` places apart; `weights` begins with the first.
template <int taps, int lead, int channels, int outputs, class T, class Load>
__device__ __forceinline__ void slide_channels(T (&acc)[4][outputs], const T* weights, Load&& load) {
    T window[round_up(taps, 4)];  // those that lie between the first and the last place of a group are in registers
#pragma unroll
    for (int group = 0; group < ceil_div(lead + (taps - 1) * channels + outputs, 4); ++group) {
        T in[4][4];
        load(in, group);
#pragma unroll
        for (int e = 0; e < 4; ++e)
#pragma unroll
            for (int n = 0; n < outputs; ++n) {
                const int place = 4 * group + e - lead - n, tap = place / channels;
                if (place < 0 || place % channels != 0 || tap >= taps) continue;
                if (n == 0 && tap % 4 == 0) {  // output 0 is the first that needs it
                    T four[4];
                    load_vector(four, weights + tap);
#pragma unroll
                    for (int k = 0; k < 4; ++k) window[tap + k] = four[k];
                }
#pragma unroll
                for (int v = 0; v < 4; ++v) acc[v][n] += window[tap] * in[v][e];
            }
    }
}

// A row's place in a ring of so many, of which it is at most once beyond the end.
template <int ring_rows>
__device__ __forceinline__ int next_in_ring(int row) { return row < ring_rows ? row : row - ring_rows; }

// The sizes of a block, from Problem (rank, r, s, anchors) and Tuning (warps, outputs).
template <class Problem, class Tuning>
struct SeparableTile {
    using Rows = RowLoader<Problem, 4>;
    static constexpr int r = Problem::r, s = Problem::s, outputs = Tuning::outputs;
    static constexpr int step_rows = Tuning::warps * outputs;
    // Outputs lag behind the rows that are filtered, by whole groups of a thread's outputs.
    static constexpr int lag = round_up(r - 1, outputs), ring_rows = lag + step_rows;
    static constexpr int input_pitch = Rows::row + 4, ring_pitch = Rows::width + 4;
    // Places before a row's weights, so that weights and pixels begin at a vector.
    static constexpr int lead = Rows::channels == 1 ? Rows::lead : 0;
    static constexpr int row_weights = round_up(lead + s, 4), column_weights = round_up(r, 4);

    static_assert(outputs % 4 == 0 && 32 % outputs == 0, "groups of outputs are vectors, and a warp has whole rows of them");
    static_assert(step_rows % 32 == 0, "the row pass shares out 32 rows by 4 * outputs columns to a warp");
};

// Block b computes strip b % strips of band (b / strips) % bands of image b / strips / bands.
template <class Problem, class Tuning>
__device__ __forceinline__ void separable(const typename Problem::element* x, const typename Problem::sum* w,
                                          typename Problem::result* y, typename Problem::sum value,
                                          typename Problem::sum delta, int height, int width, int64 x_pitch, int64 x_step,
                                          int64 y_pitch, int64 y_step, int strips, int bands, int band_rows) {
    using Tile = SeparableTile<Problem, Tuning>;
    using Rows = typename Tile::Rows;
    using In = typename Rows::In;
    using Out = typename Rows::Out;
    using T = typename Rows::T;
    constexpr int rank = Problem::rank, r = Problem::r, s = Problem::s, outputs = Tuning::outputs;
    constexpr int channels = Problem::channels, planes = Problem::planes;
    constexpr int ring_elements = Tile::ring_rows * Tile::ring_pitch;
    static_assert(0 <= Problem::anchor_y && Problem::anchor_y < r, "the anchor lies inside the filter");

    const int warp = warp_number(), lane = threadIdx.x % 32;
    const int rest = blockIdx.x / strips, plane = rest / bands, image = plane / planes;
    const int top = rest % bands * band_rows, j = (blockIdx.x % strips) * Rows::width;
    const int out_height = Problem::valid ? height - (r - 1) : height;
    const int out_width = Problem::valid ? width - (s - 1) : width;
    const int rows = min(band_rows, out_height - top);
    if (rows <= 0) return;
    const typename Rows::View view{reinterpret_cast<const In*>(x) + image * x_step + plane % planes,
                                   reinterpret_cast<Out*>(y) + image * y_step + plane % planes,
                                   height, width * channels, out_height, out_width * channels,
                                   x_pitch, y_pitch, static_cast<T>(value)};
    T* const inputs = reinterpret_cast<T*>(shared_memory());
    T* const ring = inputs + Tile::step_rows * Tile::input_pitch;
    T* const weights = ring + rank * ring_elements;
    T* const staging = weights + rank * (Tile::row_weights + Tile::column_weights) + warp * Rows::width;

    const auto load_step = [&](int first) {
        const Rows source(view, top - Problem::anchor_y + first, j, lane);
        if (source.inside(Tile::step_rows)) {
            const In* from = source.vector_of(warp);
            T* to = inputs + warp * Tile::input_pitch;
#pragma unroll
            for (int k = 0; k < outputs; ++k, from += Tuning::warps * x_pitch)
                source.load_vectors(to + k * Tuning::warps * Tile::input_pitch, from);
        } else {
#pragma unroll 1
            for (int n = warp; n < Tile::step_rows; n += Tuning::warps) source.load(inputs + n * Tile::input_pitch, n);
        }
        cp_async_commit_group();
    };
    load_step(0);
    // Of each product the row's weights, which begin `lead` places on, then the column's.
#pragma unroll 1
    for (int k = threadIdx.x; k < rank * (Tile::row_weights + Tile::column_weights); k += 32 * Tuning::warps) {
        const int product = k / (Tile::row_weights + Tile::column_weights);
        const int place = k % (Tile::row_weights + Tile::column_weights) - Tile::lead;
        const int down = place + Tile::lead - Tile::row_weights;
        const T* from = reinterpret_cast<const T*>(w) + product * (r + s);
        weights[k] = down >= 0 ? (down < r ? from[down] : T(0)) : place >= 0 && place < s ? from[r + place] : T(0);
    }
    // A warp's part of the row pass, from the first of its rows and columns on.
    constexpr int across = 32 / outputs;
    const int my_row = warp / across * 32 + lane % 8, my_column = (warp % across * 4 + lane / 8) * outputs;
    // Where the step's filtered rows begin in the ring, and where the rows begin that this warp's outputs need.
    int to_row = 0, from_row = (Tile::step_rows + warp * outputs) % Tile::ring_rows;
#pragma unroll 1
    for (int first = 0; first < rows + Tile::lag; first += Tile::step_rows) {
        cp_async_wait_group<0>();
        __syncthreads();  // the rows have landed, and all have read the ring
#pragma unroll 1
        for (int product = 0; product < rank; ++product) {
            const T* const taps = weights + product * (Tile::row_weights + Tile::column_weights);
            T acc[4][outputs] = {};
            const T* const from = inputs + my_row * Tile::input_pitch + my_column;
            const auto load = [&](T (&in)[4][4], int group) {
#pragma unroll
                for (int v = 0; v < 4; ++v) load_vector(in[v], from + 8 * v * Tile::input_pitch + 4 * group);
            };
            if constexpr (channels == 1) slide<s, Rows::lead>(acc, taps, load);
            else slide_channels<s, Rows::lead, channels>(acc, taps, load);
#pragma unroll
            for (int v = 0; v < 4; ++v) {
                const int slot = to_row + my_row + 8 * v;
                T* const to = ring + product * ring_elements + my_column +
                              next_in_ring<Tile::ring_rows>(slot) * Tile::ring_pitch;
#pragma unroll
                for (int n = 0; n < outputs; n += 4) {
                    const T four[4] = {acc[v][n], acc[v][n + 1], acc[v][n + 2], acc[v][n + 3]};
                    store_vector(to + n, four);
                }
            }
        }
        __syncthreads();  // the ring has the step's rows, and all have read the input
        if (first + Tile::step_rows < rows + Tile::lag) load_step(first + Tile::step_rows);
        const int i = first - Tile::lag + warp * outputs;
        if (i >= 0 && i < rows) {
            T acc[4][outputs] = {};
#pragma unroll 1
            for (int product = 0; product < rank; ++product) {
                const T* const end = ring + (product + 1) * ring_elements;
                const T* from = end - ring_elements + from_row * Tile::ring_pitch + 4 * lane;
                const T* const taps = weights + product * (Tile::row_weights + Tile::column_weights) + Tile::row_weights;
                slide<r, 0>(acc, taps, [&](T (&in)[4][4], int) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        T four[4];
                        load_vector(four, from + e * Tile::ring_pitch);
#pragma unroll
                        for (int v = 0; v < 4; ++v) in[v][e] = four[v];
                    }
                    from += 4 * Tile::ring_pitch;
                    if (from >= end) from -= ring_elements;
                });
            }
            const RowWriter<Out, T, 4, planes> writer(view, top + i, j, lane, static_cast<T>(delta), staging);
            const auto row_of = [&](T (&row)[4], int n) {
#pragma unroll
                for (int v = 0; v < 4; ++v) row[v] = acc[v][n];
            };
            if (writer.vectors && i + outputs <= rows) {
                Out* to = writer.vector_of(0);
#pragma unroll
                for (int n = 0; n < outputs; ++n, to += y_pitch) {
                    T row[4];
                    row_of(row, n);
                    writer.store_vectors(to, row);
                }
            } else {
#pragma unroll
                for (int n = 0; n < outputs; ++n) {
                    T row[4];
                    row_of(row, n);
                    if (i + n < rows) writer.store(row, n);
                }
            }
        }
        to_row = next_in_ring<Tile::ring_rows>(to_row + Tile::step_rows);
        from_row = next_in_ring<Tile::ring_rows>(from_row + Tile::step_rows);
    }
}

}  // namespace leanconv
