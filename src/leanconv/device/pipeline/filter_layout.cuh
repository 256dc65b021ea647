// Packed filters, as the tensor-core kernels read them: split into two float16 (split.cuh), in stages of 64 reduction elements,
// in the order and swizzle of wgmma's operand B. One bulk copy brings the filters of one MMA tile.
//
// The reduction is cut into channel blocks: `channel_block` channels of one tap. 64 / channel_block of them are a stage;
// channels change fastest. Packed filters, in floats from first_prepared on:
//   SplitHeader | flags [groups] | scales [groups][tiles * filters] | factors [groups][stages * 64] | fragments | maxima
//   flags      whether some channel of this group has a factor
//   scales     what the sums of a filter are multiplied by at the end
//   factors    the roots of what pixels are multiplied by, powers of two, in the order of the reduction
//   fragments  [groups][tiles][stages][n_tiles]: 64 elements of `mma_n` filters, hi; with three products lo behind it
//   maxima     the largest finite magnitude of each channel in each row block of filters, from one launch to the next; behind
//              them the state of a speculation (speculative_filters.cuh)
// With `states` the filter rows are transformed for F(2, 3), each segment of three columns into four states. A tap is a segment
// then, and fragments are [groups][tiles][stages][states * n_tiles]. Stages of the column that segments leave come last, with
// states 0 and 3 alone.
#pragma once

#include <device/index.cuh>
#include <device/pipeline/split.cuh>

namespace leanconv {

// Winograd's F(2, 3) along the rows of an image: two neighbouring outputs, a pair, from four pixels d0 to d3 and a filter row
// g0 to g2, by four products instead of six.
//
//   states of pixels   s0 = d0 - d2   s1 = d1 + d2            s2 = d2 - d1            s3 = d1 - d3
//   states of filters  t0 = g0        t1 = (g0 + g1 + g2)/2   t2 = (g0 - g1 + g2)/2   t3 = g2
//   outputs            y0 = s0 t0 + s1 t1 + s2 t2             y1 = s1 t1 - s2 t2 - s3 t3
//
// A wider filter row is a sum of segments of three columns, each like one more filter row whose pixels begin further right.
// Where they leave one column g, and channels fill whole stages, g is a segment of its own with two products: d0 g in the sum
// of s0 t0, and -d1 g in that of s3 t3. Otherwise, and where all segments read the same pixels (resident images), the last
// segment ends where the row does, and has zeros for the columns of the segment before. So no product of an output has a pixel
// outside its window.
//
// Each state has a sum of its own over channels, filter rows and segments until the end. Two warpgroups share the pairs of a
// tile: the first has states 0 and 1, the second states 3 and 2, in this order. Three pixels make both states of a warpgroup;
// at the end each sends the sums of its second.

// Warpgroups that share a tile's pixels, each with some of the states.
__host__ __device__ constexpr int sharers_of(int states) { return states > 1 ? 2 : 1; }

// Segments of a filter row of s columns, the columns that have products of their own where segments leave one, and the column
// that a segment of three begins with.
__host__ __device__ constexpr int segments_of(int s) { return (s + 2) / 3; }
__host__ __device__ constexpr int rest_of(int s) { return s > 3 && s % 3 == 1 ? 1 : 0; }
__host__ __device__ constexpr int segment_begin(int segment, int s) { return 3 * segment < s - 3 ? 3 * segment : s - 3; }

// The order of a stage's MMA tiles: alternately of the two warpgroups, the first state of each first.
template <int states, int n_tiles>
__device__ __forceinline__ int states_order(int state, int n_tile) {
    if constexpr (states == 1) return n_tile;
    const int sharer = state / 2, own = sharer == 0 ? state : 3 - state;
    return (own * n_tiles + n_tile) * 2 + sharer;
}

__device__ __forceinline__ float filter_state(const float (&row)[3], int state) {
    // NOTE: halves before the sum, as the sum may be more than a float holds.
    const float outer = 0.5f * row[0] + 0.5f * row[2], inner = 0.5f * row[1];
    const float middle = state == 1 ? outer + inner : outer - inner;
    return state == 0 ? row[0] : state == 3 ? row[2] : middle;
}

template <class Problem, class Tuning>
struct TensorFilters {
    static constexpr int states = Tuning::states;
    static_assert(states == 1 || (states == 4 && Problem::s >= 3), "the states are those of F(2, 3)");
    // Slices of a filter are rows behind one another.
    static constexpr int rows = filter_rows<Problem>, weights = filter_taps<Problem>;
    static constexpr int of_row = states > 1 ? segments_of(Problem::s) : Problem::s, taps = rows * of_row;
    static constexpr int channel_block = Tuning::channel_block, stage_blocks = split_depth / channel_block;
    static constexpr int tap_blocks = ceil_div(Problem::group_c, channel_block);
    static_assert(split_depth % channel_block == 0, "a stage has whole channel blocks");
    static constexpr int stages = ceil_div(taps * tap_blocks, stage_blocks);
    // Consecutive stages with the same pixels: those of the taps of a filter row.
    static constexpr bool by_row = Tuning::row_pixels > 0;
    static constexpr int tap_stages = by_row ? Problem::s : 1;
    static_assert(!by_row || (stage_blocks == 2 && tap_blocks % 2 == 0 && states == 1), "a stage has channels of one tap");
    // Resident images: all taps read the same 32 channels.
    static constexpr int spacing = Tuning::spacing;
    static constexpr bool resident = spacing > 0;
    static_assert(!resident || (channel_block == 32 && Problem::group_c % 32 == 0), "resident images come by 32 channels");
    // Where segments leave a column, taps and stages of whole segments of all rows come first, then those of the column.
    static constexpr int rest = states > 1 && !resident && tap_blocks % stage_blocks == 0 ? rest_of(Problem::s) : 0;
    static constexpr int whole_of_row = of_row - rest, rest_stages = rows * rest * tap_blocks / stage_blocks;
    static constexpr int whole_stages = stages - rest_stages;
    // With two output rows a tile reads one more row of pixels than filters have rows: all rows of a segment and its channels,
    // then those of the next.
    static constexpr int output_rows = Tuning::output_rows, row_stages = whole_of_row * tap_blocks / stage_blocks;
    static constexpr int read_rows = rows + output_rows - 1, read_taps = read_rows * of_row;
    static constexpr int read_stages = ceil_div(read_taps * tap_blocks, stage_blocks);
    static constexpr int rest_row_stages = rest * tap_blocks / stage_blocks;
    static constexpr int read_whole = read_stages - read_rows * rest_row_stages;
    static_assert(output_rows == 1 || (output_rows == 2 && of_row * tap_blocks % stage_blocks == 0),
                  "rows of filters are whole stages");
    static __device__ __forceinline__ int read_order(int stage) {
        if constexpr (rest > 0 && output_rows > 1) {
            const int of_rest = stage - read_whole;
            if (of_rest >= 0) return read_whole + of_rest % read_rows * rest_row_stages + of_rest / read_rows;
        }
        return output_rows > 1 ? stage % read_rows * row_stages + stage / read_rows : stage;
    }
    // The stage of filters for a stage of pixels; `stages` or more in the last row, which uses those of the row before alone.
    static __device__ __forceinline__ int filters_of(int stage) {
        const int number = read_order(stage);
        if constexpr (rest == 0 || output_rows == 1) return number;
        if (number >= read_whole) return number - (read_whole - whole_stages);
        return number < whole_stages ? number : stages;
    }
    static __device__ __forceinline__ bool is_rest(int stage) { return rest > 0 && stage >= whole_stages; }
    // The row of a tap, and its segment, where filters have, or pixels are read in, `rows` rows.
    static __device__ __forceinline__ int row_of(int tap, int rows) {
        return rest > 0 && tap >= rows * whole_of_row ? tap - rows * whole_of_row : tap / whole_of_row;
    }
    static __device__ __forceinline__ int segment_of(int tap, int rows) {
        return rest > 0 && tap >= rows * whole_of_row ? whole_of_row : tap % whole_of_row;
    }
    static constexpr int mma_n = Tuning::mma_n, n_tiles = Tuning::n_tiles, filters = mma_n * n_tiles;
    static constexpr int stage_n_tiles = states * n_tiles, rest_n_tiles = 2 * n_tiles;
    static constexpr int cta_n_tiles = whole_stages * stage_n_tiles + rest_stages * rest_n_tiles;
    static __device__ __forceinline__ int n_tiles_of(int stage) { return is_rest(stage) ? rest_n_tiles : stage_n_tiles; }
    static_assert(mma_n % 16 == 0, "filters are permuted within 16");
    static constexpr int tiles = ceil_div(Problem::group_k, filters);
    static constexpr int halves = Tuning::products == 3 ? 2 : 1;
    static constexpr int half_bytes = mma_n * split_depth * 2, stage_bytes = halves * half_bytes;

    // NOTE: in floats, and multiples of four, which is what bulk copies and vector loads take.
    static constexpr int flags_at = 4, scales_at = flags_at + ceil_div(Problem::groups, 4) * 4;
    static constexpr int factors_at = scales_at + Problem::groups * tiles * filters;
    static constexpr int fragments_at = factors_at + Problem::groups * stages * split_depth;
    static constexpr int64 maxima_at =
        fragments_at + static_cast<int64>(Problem::groups) * tiles * cta_n_tiles * (stage_bytes / 4);

    // Which reduction element of a stage lies at a place of operand B's 16.
    static __device__ __forceinline__ int element_of(int k16, int place) {
        if constexpr (resident) return k16 / 2 * 32 + lane_channel(place % 8 / 2, k16 % 2 * 4 + place % 2 + place / 8 * 2);
        else if constexpr (Tuning::rows) return k16 * 16 + element_at(place);
        else return k16 * 16 + (states > 1 ? column_at(place) : place);
    }
    // The j-th of 8 channels, of 32, that lane t of a row has.
    static __host__ __device__ constexpr int lane_channel(int t, int j) {
        return j % spacing + (t + j / spacing * 4) * spacing;
    }
    // Tap and first channel of a channel block of the reduction.
    static __device__ __forceinline__ int tap_of(int number) {
        if constexpr (by_row) return number / (tap_blocks * tap_stages) * tap_stages + number / 2 % tap_stages;
        else if constexpr (resident) return number % taps;
        else return number / tap_blocks;
    }
    static __device__ __forceinline__ int channel_of(int number) {
        if constexpr (by_row) return (number / (2 * tap_stages) % (tap_blocks / 2) * 2 + number % 2) * channel_block;
        else if constexpr (resident) return number / taps * channel_block;
        else return number % tap_blocks * channel_block;
    }
    // Whether the elements of a unit (UnitElements) belong to one tap.
    static constexpr bool whole_units = channel_block % 16 == 0;
    // The stages with taps fastest: in NCHW the lanes of a warp then read different banks.
    static __device__ __forceinline__ int taps_first(int i) {
        if constexpr (by_row || tap_blocks % stage_blocks != 0) return i;
        else return i % taps * (tap_blocks / stage_blocks) + i / taps;
    }
    // Column 0 to 2 of a segment: whether the segment before lacks it, and which weight it is. Other taps have one. The column
    // that segments leave is both the first and the third, of which states 0 and 3 are made.
    static __device__ __forceinline__ bool has(int tap, int column) {
        if constexpr (states == 1) return true;
        if constexpr (rest > 0) return true;
        const int segment = tap % of_row;
        return segment_begin(segment, Problem::s) + column >= 3 * segment;
    }
    static __device__ __forceinline__ int weight_of(int tap, int column) {
        if constexpr (states == 1) return tap;
        if constexpr (rest > 0)
            return row_of(tap, rows) * Problem::s + min(3 * segment_of(tap, rows) + column, Problem::s - 1);
        return tap / of_row * Problem::s + segment_begin(tap % of_row, Problem::s) + column;
    }
    static __device__ __forceinline__ int64 fragment(int group, int tile, int stage, int n_tile) {
        if constexpr (rest > 0) {
            const int less = max(stage - whole_stages, 0) * (stage_n_tiles - rest_n_tiles);
            const int64 of_tile = static_cast<int64>(group * tiles + tile) * cta_n_tiles;
            return (of_tile + stage * stage_n_tiles - less + n_tile) * stage_bytes;
        }
        return ((static_cast<int64>(group * tiles + tile) * stages + stage) * stage_n_tiles + n_tile) * stage_bytes;
    }
};

}  // namespace leanconv
