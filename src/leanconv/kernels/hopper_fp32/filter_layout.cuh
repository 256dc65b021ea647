// Filters as the tensor-core kernels read them: split into halves of 16 bits (tensor_split.cuh), in stages of 64
// reduction elements that one bulk copy brings, in the order and swizzle of wgmma's operand B.
//
// The reduction is cut into pieces of `piece` channels of one tap; 64 / piece of them are a stage, channels change fastest.
// Prepared filters, in floats from first_prepared on:
//   SplitHeader | flags [groups] | scales [groups][tiles * filters] | factors [groups][stages * 64] | fragments | parts
//   flags: whether the factors of this group's channels are not all one
//   scales: what the sums of a filter are multiplied by at the end
//   factors: what pixels are multiplied by, in the order of the reduction: their roots, which are powers of two
//   parts: the largest finite magnitude of each channel in some filters, which one launch leaves to the next; they lie
//     behind the fragments, and behind them what plain filters leave (plain_filters.cuh)
//   fragments [groups][tiles][stages][chunks]: 64 elements of `chunk` filters, hi and, with three products, lo behind it
// Where Tuning has `states`, the rows of the filters are transformed for F(2, 3) on the way, each segment of three columns
// into four states; a tap is a segment then, and fragments are those [groups][tiles][stages][states * chunks]
// (pair_states.cuh). Stages of the column that segments leave come last, with states 0 and 3 alone.
#pragma once

#include <device/index.cuh>
#include <kernels/hopper_fp32/pair_states.cuh>
#include <kernels/hopper_fp32/tensor_split.cuh>

namespace leanconv {

// Pixels that lie side by side in shared memory for all taps of a filter row: 0 where Tuning names none, as each tap has
// pixels of its own.
template <class Tuning> __host__ __device__ constexpr int row_lines_of(decltype(Tuning::row_lines)*) { return Tuning::row_lines; }
template <class Tuning> __host__ __device__ constexpr int row_lines_of(...) { return 0; }

// Channels that the four lanes of a product's row have are so many apart where pixels come in planes: 0 where they do not.
template <class Tuning> __host__ __device__ constexpr int spacing_of(decltype(Tuning::spacing)*) { return Tuning::spacing; }
template <class Tuning> __host__ __device__ constexpr int spacing_of(...) { return 0; }

// Whether the filters are those of an input's gradient, read from the layer's: filter k is its channel k, channel c its filter c,
// and the taps are mirrored (kernels/common/input_gradient.py). Row i of the taps is row last_row - i * apart_h of the layer_r.
template <class Problem> __host__ __device__ constexpr bool is_mirrored(decltype(Problem::layer_r)*) { return true; }
template <class Problem> __host__ __device__ constexpr bool is_mirrored(...) { return false; }

template <class Problem, class Tuning>
struct TensorFilters {
    static constexpr bool mirrored = is_mirrored<Problem>(nullptr);
    // What is adjacent in memory: channels of a filter, or filters; in NCHW it is taps.
    static constexpr bool channels_adjacent = mirrored ? Problem::chwn : Problem::nhwc;
    static constexpr bool filters_adjacent = mirrored ? Problem::nhwc : Problem::chwn;
    static constexpr int states = states_of<Tuning>(nullptr);
    static_assert(states == 1 || (states == 4 && Problem::s >= 3), "the states are those of F(2, 3)");
    static constexpr int weights = Problem::r * Problem::s;
    static constexpr int of_row = states > 1 ? segments_of(Problem::s) : Problem::s, taps = Problem::r * of_row;
    static constexpr int piece = Tuning::piece, pieces = split_depth / piece, of_tap = ceil_div(Problem::group_c, piece);
    static_assert(split_depth % piece == 0, "a stage has whole pieces");
    static constexpr int stages = ceil_div(taps * of_tap, pieces);
    // Stages that have the same pixels: those of the taps of a filter row, which follow each other then.
    static constexpr bool by_row = row_lines_of<Tuning>(nullptr) > 0;
    static constexpr int tap_stages = by_row ? Problem::s : 1;
    static_assert(!by_row || (pieces == 2 && of_tap % 2 == 0 && states == 1), "a stage has channels of one tap");
    // Or 32 channels of whole images, which all taps see.
    static constexpr int spacing = spacing_of<Tuning>(nullptr);
    static constexpr bool planes = spacing > 0;
    static_assert(!planes || (piece == 32 && Problem::group_c % 32 == 0), "planes come by 32 channels");
    // Where segments leave a column, taps and stages of whole segments of all rows come first, then those of the column.
    static constexpr int rest = states > 1 && !planes && of_tap % pieces == 0 ? rest_of(Problem::s) : 0;
    static constexpr int whole_of_row = of_row - rest, rest_stages = Problem::r * rest * of_tap / pieces;
    static constexpr int whole_stages = stages - rest_stages;
    // Where pairs of two rows of outputs share their states, a tile sees one more row of pixels than filters have: all rows of a
    // segment and its channels, then those of the next.
    static constexpr int heights = heights_of<Tuning>(nullptr), row_stages = whole_of_row * of_tap / pieces;
    static constexpr int seen_rows = Problem::r + heights - 1, seen_taps = seen_rows * of_row;
    static constexpr int seen_stages = ceil_div(seen_taps * of_tap, pieces);
    static constexpr int rest_row_stages = rest * of_tap / pieces, seen_whole = seen_stages - seen_rows * rest_row_stages;
    static_assert(heights == 1 || (heights == 2 && of_row * of_tap % pieces == 0), "rows of filters are whole stages");
    static __device__ __forceinline__ int seen(int stage) {
        if constexpr (rest > 0 && heights > 1) {
            const int of_rest = stage - seen_whole;
            if (of_rest >= 0) return seen_whole + of_rest % seen_rows * rest_row_stages + of_rest / seen_rows;
        }
        return heights > 1 ? stage % seen_rows * row_stages + stage / seen_rows : stage;
    }
    // The filters that come with these pixels; `stages` or more with the last row, which meets those of the one before alone.
    static __device__ __forceinline__ int seen_filters(int stage) {
        const int number = seen(stage);
        if constexpr (rest == 0 || heights == 1) return number;
        if (number >= seen_whole) return number - (seen_whole - whole_stages);
        return number < whole_stages ? number : stages;
    }
    static __device__ __forceinline__ bool is_rest(int stage) { return rest > 0 && stage >= whole_stages; }
    // Row of a tap, and which segment of it, where filters have so many rows or pixels are seen in so many.
    static __device__ __forceinline__ int row_of(int tap, int rows) {
        return rest > 0 && tap >= rows * whole_of_row ? tap - rows * whole_of_row : tap / whole_of_row;
    }
    static __device__ __forceinline__ int segment_of(int tap, int rows) {
        return rest > 0 && tap >= rows * whole_of_row ? whole_of_row : tap % whole_of_row;
    }
    static constexpr int chunk = Tuning::chunk, chunks = Tuning::chunks, filters = chunk * chunks;
    static constexpr int stage_chunks = states * chunks, rest_chunks = 2 * chunks;
    static constexpr int tile_chunks = whole_stages * stage_chunks + rest_stages * rest_chunks;
    static __device__ __forceinline__ int chunks_of(int stage) { return is_rest(stage) ? rest_chunks : stage_chunks; }
    static_assert(chunk % 16 == 0, "filters are permuted in sixteens");
    static constexpr int tiles = ceil_div(Problem::group_k, filters);
    static constexpr int halves = Tuning::products == 3 ? 2 : 1;
    static constexpr int half_bytes = chunk * split_depth * 2, stage_bytes = halves * half_bytes;

    // Of filters that a preparing block keeps in shared memory (MIRRORED_ELEMENTS, COPIED_ELEMENTS of
    // filters.py).
    static constexpr int copied_elements = mirrored ? 20480 : 9216;
    static __host__ __device__ constexpr int copied_floats(int count) {
        return ceil_div(Problem::nhwc ? count + ceil_div(count, 32) * 4 : count, 4) * 4;
    }
    // NOTE: in floats, and multiples of four, which is what bulk copies and vector loads take.
    static constexpr int flags_at = 4, scales_at = flags_at + ceil_div(Problem::groups, 4) * 4;
    static constexpr int factors_at = scales_at + Problem::groups * tiles * filters;
    static constexpr int fragments_at = factors_at + Problem::groups * stages * split_depth;
    static constexpr int64 parts_at =
        fragments_at + static_cast<int64>(Problem::groups) * tiles * tile_chunks * (stage_bytes / 4);

    // Where element c, weight of filter k lies in a tensor of filters.
    static __device__ __forceinline__ int64 source(int group, int k, int c, int weight) {
        if constexpr (mirrored) {
            constexpr int all = Problem::layer_r * Problem::layer_s, filters = Problem::groups * Problem::group_c;
            const int row = Problem::last_row - weight / Problem::s * Problem::apart_h;
            const int tap = row * Problem::layer_s + Problem::last_column - weight % Problem::s * Problem::apart_w;
            const int64 of_layer = static_cast<int64>(group) * Problem::group_c + c;
            if constexpr (Problem::chwn) return (static_cast<int64>(k) * all + tap) * filters + of_layer;
            return Problem::nhwc ? (of_layer * all + tap) * Problem::group_k + k
                                 : (of_layer * Problem::group_k + k) * all + tap;
        }
        const int64 filter = static_cast<int64>(group) * Problem::group_k + k;
        if constexpr (Problem::chwn) return (static_cast<int64>(c) * weights + weight) * Problem::k + filter;
        return Problem::nhwc ? (filter * weights + weight) * Problem::group_c + c
                             : (filter * Problem::group_c + c) * weights + weight;
    }
    // Which reduction element of a stage lies at a place of operand B's 16.
    static __device__ __forceinline__ int element_of(int sixteen, int place) {
        if constexpr (planes) return sixteen / 2 * 32 + plane_channel(place % 8 / 2, sixteen % 2 * 4 + place % 2 + place / 8 * 2);
        else if constexpr (Tuning::rows) return sixteen * 16 + element_at(place);
        else return sixteen * 16 + (states > 1 ? column_at(place) : place);
    }
    // Which of 32 channels lane t of a product's row has as its j-th of 8.
    static __host__ __device__ constexpr int plane_channel(int t, int j) {
        return j % spacing + (t + j / spacing * 4) * spacing;
    }
    // Tap and first channel of a piece of the reduction.
    static __device__ __forceinline__ int tap_of(int number) {
        if constexpr (by_row) return number / (of_tap * tap_stages) * tap_stages + number / 2 % tap_stages;
        else if constexpr (planes) return number % taps;
        else return number / of_tap;
    }
    static __device__ __forceinline__ int channel_of(int number) {
        if constexpr (by_row) return (number / (2 * tap_stages) % (of_tap / 2) * 2 + number % 2) * piece;
        else if constexpr (planes) return number / taps * piece;
        else return number % of_tap * piece;
    }
    // Whether the elements of a unit (UnitElements) have one tap. They lie as far from the first as those of unit 0 do.
    static constexpr bool whole_units = piece % 16 == 0;
    // The stages in another order, taps fastest: in NCHW the lanes of a warp then read other banks.
    static __device__ __forceinline__ int in_turn(int i) {
        if constexpr (by_row || of_tap % pieces != 0) return i;
        else return i % taps * (of_tap / pieces) + i / taps;
    }
    // Column 0 to 2 of a segment: whether it is its own, and which weight it is. Of other taps there is one. The column that
    // segments leave is both the first and the third, of which states 0 and 3 are.
    static __device__ __forceinline__ bool has(int tap, int column) {
        if constexpr (states == 1) return true;
        if constexpr (rest > 0) return true;
        const int segment = tap % of_row;
        return segment_begin(segment, Problem::s) + column >= 3 * segment;
    }
    static __device__ __forceinline__ int weight_of(int tap, int column) {
        if constexpr (states == 1) return tap;
        if constexpr (rest > 0)
            return row_of(tap, Problem::r) * Problem::s + min(3 * segment_of(tap, Problem::r) + column, Problem::s - 1);
        return tap / of_row * Problem::s + segment_begin(tap % of_row, Problem::s) + column;
    }
    static __device__ __forceinline__ int64 fragment(int group, int tile, int stage, int chunk_of_tile) {
        if constexpr (rest > 0) {
            const int less = max(stage - whole_stages, 0) * (stage_chunks - rest_chunks);
            const int64 of_tile = static_cast<int64>(group * tiles + tile) * tile_chunks;
            return (of_tile + stage * stage_chunks - less + chunk_of_tile) * stage_bytes;
        }
        return ((static_cast<int64>(group * tiles + tile) * stages + stage) * stage_chunks + chunk_of_tile) * stage_bytes;
    }
};

}  // namespace leanconv
