// What the consumers of the tensor-core kernels do with a stage: products of fragments in registers with filters in shared
// memory, in turns, and the sums of their partial sums.
#pragma once

#include <device/ptx/barrier.cuh>
#include <device/ptx/wgmma.cuh>
#include <kernels/hopper_fp32/tensor_split.cuh>

namespace leanconv {

// Operand A of one stage, or of half of one: two rows of a thread, four sixteens of reduction elements, or two.
template <bool three_products, int sixteens_ = 4>
struct SplitFragments {
    static constexpr bool exact = three_products;
    static constexpr int sixteens = sixteens_;
    unsigned high[sixteens][4], low[exact ? sixteens : 1][4];
    float down[2];  // what the products of the two rows are multiplied by

    // Something of row i of every fragment.
    __device__ __forceinline__ unsigned of_row(int i) const {
        unsigned bits = 0;
#pragma unroll
        for (int j = 0; j < 2 * sixteens; ++j) {
            bits ^= high[j / 2][j % 2 * 2 + i];
            if constexpr (exact) bits ^= low[j / 2][j % 2 * 2 + i];
        }
        return bits;
    }
    // Something of every fragment.
    __device__ __forceinline__ unsigned all() const {
        unsigned bits = 0;
#pragma unroll
        for (int i = 0; i < 4 * sixteens; ++i) {
            bits ^= high[i / 4][i % 4];
            if constexpr (exact) bits ^= low[i / 4][i % 4];
        }
        return bits;
    }
};

// The products of one stage and one chunk of filters, in two parts: first the small ones of the low halves. Where fragments
// have two sixteens, `filters` begins with the first or the third.
template <class Fragments, int count>
__device__ __forceinline__ void begin_products(float (&partial)[count], const Fragments& pixels,
                                               const unsigned char* filters) {
    constexpr int chunk = 2 * count;
    const MatrixDescriptor high = matrix_descriptor(filters, 0, 1024, 128);
    if constexpr (!Fragments::exact) {
#pragma unroll
        for (int i = 0; i < Fragments::sixteens; ++i) wgmma_f16(partial, pixels.high[i], high + 32 * i, i > 0);
    } else {
        const MatrixDescriptor low = matrix_descriptor(filters + chunk * split_depth * 2, 0, 1024, 128);
#pragma unroll
        for (int i = 0; i < Fragments::sixteens; ++i) wgmma_f16(partial, pixels.low[i], high + 32 * i, i > 0);
#pragma unroll
        for (int i = 0; i < Fragments::sixteens; ++i) wgmma_f16(partial, pixels.high[i], low + 32 * i, true);
    }
}
template <class Fragments, int count>
__device__ __forceinline__ void end_products(float (&partial)[count], const Fragments& pixels, const unsigned char* filters) {
    if constexpr (Fragments::exact) {
        const MatrixDescriptor high = matrix_descriptor(filters, 0, 1024, 128);
#pragma unroll
        for (int i = 0; i < Fragments::sixteens; ++i) wgmma_f16(partial, pixels.high[i], high + 32 * i, true);
    }
}

template <int count>
__device__ __forceinline__ void promote(float (&sums)[count], const float (&partial)[count], const float (&down)[2]) {
#pragma unroll
    for (int i = 0; i < count; ++i) sums[i] = fmaf(partial[i], down[i / 2 % 2], sums[i]);
}

// The consumers take turns with the tensor cores, a stage at a time: while one multiplies, the others convert. Without, they
// finish together and convert together, and the tensor cores wait.
template <class Tuning>
struct Turns {
    int warpgroup;
    static constexpr bool taken = Tuning::turns && Tuning::warpgroups > 1;

    // The first one's first turn is given by the last one.
    __device__ __forceinline__ explicit Turns(int warpgroup) : warpgroup(warpgroup) {
        if constexpr (taken)
            if (warpgroup == Tuning::warpgroups - 1) barrier_arrive(1, 256);
    }
    // NOTE: after the conversion, or nothing would overlap it (zero_after says how that can fail).
    template <class Fragments>
    __device__ __forceinline__ void wait(const Fragments& pixels) const {
        if constexpr (taken) barrier_sync(1 + warpgroup + zero_after(pixels.all()), 256);
    }
    __device__ __forceinline__ void wait() const {
        if constexpr (taken) barrier_sync(1 + warpgroup, 256);
    }
    // NOTE: nobody waits for the turn after the very last.
    __device__ __forceinline__ void pass(bool last) const {
        if constexpr (taken) {
            const int next = warpgroup + 1 < Tuning::warpgroups ? warpgroup + 1 : 0;
            if (next != 0 || !last) barrier_arrive(1 + next, 256);
        }
    }
};

}  // namespace leanconv
