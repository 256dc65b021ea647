// The small constant matrices of Winograd's transforms, and products with them that skip zeros and share what the
// rows of two opposite points have in common.
#pragma once

#include <device/index.cuh>

namespace leanconv {

// A matrix of ratios, alternate numerators and denominators, row by row; exact, from winograd_matrices.py.
template <int rows_, int columns_, int64... ratios>
struct Matrix {
    static constexpr int rows = rows_, columns = columns_;
    static_assert(sizeof...(ratios) == 2 * rows * columns, "a numerator and a denominator for each element");

    static __host__ __device__ constexpr float at(int i, int j) {
        constexpr int64 ratio[] = {ratios...};
        return static_cast<float>(static_cast<double>(ratio[2 * (i * columns + j)]) /
                                  static_cast<double>(ratio[2 * (i * columns + j) + 1]));
    }
    // Whether row i + 1 is row i with the signs of every other element changed: of the odd ones (+1), of the even
    // ones (-1), or neither (0).
    static __host__ __device__ constexpr int mirrored_row(int i) {
        bool odd = true, even = true;
        for (int j = 0; j < columns; ++j) {
            odd = odd && at(i + 1, j) == (j % 2 ? -at(i, j) : at(i, j));
            even = even && at(i + 1, j) == (j % 2 ? at(i, j) : -at(i, j));
        }
        return odd ? 1 : even ? -1 : 0;
    }
    // Points in the order 0, pairs of opposite ones, infinity.
    static __host__ __device__ constexpr bool rows_in_pairs() {
        bool all = rows % 2 == 0;
        for (int i = 1; i + 2 < rows; i += 2) all = all && mirrored_row(i) != 0;
        return all;
    }
    static __host__ __device__ constexpr bool columns_in_pairs() {
        bool all = columns % 2 == 0;
        for (int j = 1; j + 2 < columns; j += 2)
            for (int i = 0; i < rows; ++i) all = all && at(i, j + 1) == (i % 2 ? -at(i, j) : at(i, j));
        return all;
    }
    // Where a sum over columns first, first + step, ... of row i begins: at an element of one, if there is any.
    static __host__ __device__ constexpr int start(int i, int first, int step) {
        int found = -1;
        for (int j = first; j < columns; j += step) {
            if (at(i, j) == 0.0f) continue;
            if (found < 0 || (at(i, j) == 1.0f && at(i, found) != 1.0f)) found = j;
        }
        return found;
    }
};

// NOTE: rows and columns are template parameters and not loops, so that the front end computes every element: left to
// the optimizer, the tables of ratios and their divisions stayed in the machine code.

// sum plus the part of row i of M times x that takes columns j, j + step, ... but `skip`.
template <class M, int i, int j, int step, int skip>
__device__ __forceinline__ float row_plus(float sum, const float (&x)[M::columns]) {
    if constexpr (j < M::columns) {
        constexpr float m = M::at(i, j);
        if constexpr (j != skip && m != 0.0f) sum = fmaf(m, x[j], sum);
        return row_plus<M, i, j + step, step, skip>(sum, x);
    } else {
        return sum;
    }
}

// The part of row i of M times x that takes columns first, first + step, ...
template <class M, int i, int first, int step>
__device__ __forceinline__ float row_times(const float (&x)[M::columns]) {
    constexpr int start = M::start(i, first, step);
    if constexpr (start < 0) {
        return 0.0f;
    } else {
        constexpr float m = M::at(i, start);
        return row_plus<M, i, first, step, start>(m * x[start], x);
    }
}

// y = M x for a matrix whose rows come in pairs: both rows of a pair take the same two sums.
template <class M, int i = 1>
__device__ __forceinline__ void multiply_row_pairs(float (&y)[M::rows], const float (&x)[M::columns]) {
    static_assert(M::rows_in_pairs(), "the rows are of the points 0, opposite pairs, and infinity");
    if constexpr (i + 2 < M::rows) {
        const float even = row_times<M, i, 0, 2>(x), odd = row_times<M, i, 1, 2>(x);
        y[i] = even + odd;
        y[i + 1] = M::mirrored_row(i) > 0 ? even - odd : odd - even;
        multiply_row_pairs<M, i + 2>(y, x);
    } else {
        y[0] = row_times<M, 0, 0, 1>(x);
        y[i] = row_times<M, i, 0, 1>(x);
    }
}

// Row i of M times x, given the sums and the differences of the pairs in `halves`.
template <class M, int i, int j = 3>
__device__ __forceinline__ float row_of_pairs(float sum, const float (&halves)[M::columns]) {
    if constexpr (j + 2 < M::columns) {
        constexpr float m = M::at(i, j);
        return row_of_pairs<M, i, j + 2>(fmaf(m, halves[j + i % 2], sum), halves);
    } else {
        constexpr float first = M::at(i, 0), last = M::at(i, M::columns - 1);
        if constexpr (first != 0.0f) sum = fmaf(first, halves[0], sum);
        if constexpr (last != 0.0f) sum = fmaf(last, halves[M::columns - 1], sum);
        return sum;
    }
}

template <class M, int i = 0>
__device__ __forceinline__ void multiply_halves(float (&y)[M::rows], const float (&halves)[M::columns]) {
    if constexpr (i < M::rows) {
        constexpr float m = M::at(i, 1);
        y[i] = row_of_pairs<M, i>(m * halves[1 + i % 2], halves);
        multiply_halves<M, i + 1>(y, halves);
    }
}

// y = M x for a matrix whose columns come in pairs: rows alternate between the sums and the differences of x.
template <class M>
__device__ __forceinline__ void multiply_column_pairs(float (&y)[M::rows], const float (&x)[M::columns]) {
    static_assert(M::columns_in_pairs(), "the columns are of the points 0, opposite pairs, and infinity");
    float halves[M::columns];
    halves[0] = x[0];
    halves[M::columns - 1] = x[M::columns - 1];
#pragma unroll
    for (int j = 1; j + 2 < M::columns; j += 2) {
        halves[j] = x[j] + x[j + 1];
        halves[j + 1] = x[j] - x[j + 1];
    }
    multiply_halves<M>(y, halves);
}

}  // namespace leanconv
