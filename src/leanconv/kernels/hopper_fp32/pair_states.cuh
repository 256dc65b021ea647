// Winograd's F(2, 3) along the rows of an image: two neighbouring outputs, a pair, from four pixels d0 to d3 and a filter row
// g0 to g2, by four products instead of six.
//
//   states of pixels   s0 = d0 - d2   s1 = d1 + d2            s2 = d2 - d1            s3 = d1 - d3
//   states of filters  t0 = g0        t1 = (g0 + g1 + g2)/2   t2 = (g0 - g1 + g2)/2   t3 = g2
//   outputs            y0 = s0 t0 + s1 t1 + s2 t2             y1 = s1 t1 - s2 t2 - s3 t3
//
// A wider filter row is a sum of segments of three columns, each like one more filter row whose pixels begin further right.
// Where they leave one column g, and channels fill whole stages, that is a segment of its own of two products, d0 g in the sum
// of s0 t0 and -d1 g in that of s3 t3. Else, and where all segments see the same copy of the pixels (planes), the last ends
// where the row does, and what it has of the one before are zeros. So no product of an output has a pixel that its window does
// not hold.
//
// Sums over channels, filter rows and segments stay apart for each state until the end. Two warpgroups share the pairs of a tile: the
// first has states 0 and 1, the second states 3 and 2, in this order. The second state of each takes two neighbours of
// which its first has one, so that three pixels make both; and at the end each sends the sums of its second.
#pragma once

namespace leanconv {

// States that a kernel's filters are transformed into: 1 where Tuning names none.
template <class Tuning> __host__ __device__ constexpr int states_of(decltype(Tuning::states)*) { return Tuning::states; }
template <class Tuning> __host__ __device__ constexpr int states_of(...) { return 1; }

// Rows of outputs whose pairs share their states: 1 where Tuning names none.
template <class Tuning> __host__ __device__ constexpr int heights_of(decltype(Tuning::heights)*) { return Tuning::heights; }
template <class Tuning> __host__ __device__ constexpr int heights_of(...) { return 1; }

// Warpgroups that share a tile's pixels, each with some of the states.
__host__ __device__ constexpr int sharers_of(int states) { return states > 1 ? 2 : 1; }

// Segments of a filter row of s columns, the columns that have products of their own where segments leave one, and the column
// that a segment of three begins with.
__host__ __device__ constexpr int segments_of(int s) { return (s + 2) / 3; }
__host__ __device__ constexpr int rest_of(int s) { return s > 3 && s % 3 == 1 ? 1 : 0; }
__host__ __device__ constexpr int segment_begin(int segment, int s) { return 3 * segment < s - 3 ? 3 * segment : s - 3; }

// State `own` of warpgroup `sharer`.
__host__ __device__ constexpr int state_of(int sharer, int own) { return sharer == 0 ? own : 3 - own; }

// Which chunk of filters of a stage comes when: the two warpgroups by turns, each its first state first.
template <int states, int chunks>
__device__ __forceinline__ int states_order(int state, int chunk) {
    if constexpr (states == 1) return chunk;
    const int sharer = state / 2, own = sharer == 0 ? state : 3 - state;
    return (own * chunks + chunk) * 2 + sharer;
}

__device__ __forceinline__ float filter_state(const float (&row)[3], int state) {
    // NOTE: halves before the sum, as the sum may be more than a float holds.
    const float outer = 0.5f * row[0] + 0.5f * row[2], inner = 0.5f * row[1];
    const float middle = state == 1 ? outer + inner : outer - inner;
    return state == 0 ? row[0] : state == 3 ? row[2] : middle;
}

}  // namespace leanconv
