// Windows along a line, cut into groups of 16: what box_groups and box_passes share.
//
// Let n - 1 = 16 * whole + rest for windows of n places. Those of the 16 outputs that begin at group a are: an end of group a,
// which leaves | `rest` places and whole - 1 groups, in all of them | a beginning of the 16 places from 16 * (a + whole) + rest
// on, which enter. Of what enters, the sums of all 16 and of the last `rest` are kept: of these the middle of later windows
// consists. No difference is taken.
#pragma once

namespace leanconv {

template <int taps>
struct Groups {
    static constexpr int whole = (taps - 1) / 16, rest = (taps - 1) % 16;
    // Whether windows have a middle, and of what it consists: the last places of one group, then all of others.
    static constexpr bool begins = rest > 0, middle = begins || whole > 1;
    static constexpr int first = begins ? 0 : 1;
    static_assert(whole >= 1, "windows of 17 places at least");
};

// The sums that groups keep for others: of all 16, and of the last `rest`.
template <class Op, int rest, class T, int columns>
__device__ __forceinline__ void sums_of(T (&all)[columns], T (&last)[columns], const T (&v)[16][columns]) {
#pragma unroll
    for (int c = 0; c < columns; ++c) {
        T first = v[0][c], second = v[15][c];
#pragma unroll
        for (int e = 1; e < 16 - rest; ++e) first = Op::of(first, v[e][c]);
#pragma unroll
        for (int e = 14; e >= 16 - rest; --e) second = Op::of(v[e][c], second);
        all[c] = rest == 0 ? first : Op::of(first, second);
        last[c] = second;
    }
}

// The results of 16 windows, in place of what enters: `middle` is what all of them have.
template <class Op, bool has_middle, class T, int columns>
__device__ __forceinline__ void join(T (&enters)[16][columns], const T (&leaves)[16][columns], const T (&middle)[columns]) {
#pragma unroll
    for (int c = 0; c < columns; ++c) {
#pragma unroll
        for (int e = 1; e < 16; ++e) enters[e][c] = Op::of(enters[e - 1][c], enters[e][c]);
        T end = has_middle ? Op::of(leaves[15][c], middle[c]) : leaves[15][c];
#pragma unroll
        for (int e = 15; e >= 0; --e) {
            enters[e][c] = Op::of(end, enters[e][c]);
            if (e > 0) end = Op::of(leaves[e - 1][c], end);
        }
    }
}

}  // namespace leanconv
