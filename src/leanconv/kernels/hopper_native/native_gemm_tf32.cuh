// Implicit GEMM on tensor cores in TF32: float32 whose factors are rounded to 10 digits, sums in float32, for sm_90a. NHWC.
//
// The loop of native_gemm_16bit with elements of 4 bytes: 2 C/g R S flops an output; the tensor cores start 2048 flops a
// cycle and multiprocessor, 495 TFLOP/s at 1.83 GHz. A product of 64 pixels x n filters x 8 takes n / 2 cycles, as long as
// one of 16 elements of 2 bytes, and reads as many bytes; so do the copies of a stage.
//
// The tensor core drops the digits that it does not read, which would make results smaller by 7e-4. So both factors are
// rounded to the nearest before: filters by round_filters, once a call or once for all calls; pixels on their way from
// shared memory to registers, four a thread and product, by one instruction each. Errors are those of PyTorch's TF32, 3e-4.
#pragma once

#include <device/ptx/mma.cuh>
#include <kernels/hopper_native/native_gemm_16bit.cuh>

namespace leanconv {

// Filters rounded to TF32, four a thread. 8 bytes an element.
template <class Problem, class Tuning>
__device__ __forceinline__ void round_filters(const float* w, float* prepared) {
    const int64 first = static_cast<int64>(blockIdx.x) * (4 * Tuning::threads) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int64 at = first + i * Tuning::threads;
        if (at < Problem::elements) prepared[at] = __uint_as_float(cvt_rn_tf32_f32(w[at]));
    }
}

// The same of filters that have been rearranged for a gradient.
template <class Problem, class Tuning>
__device__ __forceinline__ void round_rearranged_filters(float* prepared) {
    round_filters<Problem, Tuning>(prepared, prepared);
}

// The fragments of one piece of 64 pixels: rows of row_bytes, swizzled as a copy leaves them.
template <int row_bytes, int steps>
__device__ __forceinline__ void load_rounded(unsigned (&a)[steps][4], const unsigned char* pixels) {
    constexpr int units = row_bytes / 16;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
    const unsigned char* const from = pixels + row * row_bytes;
#pragma unroll
    for (int i = 0; i < steps; ++i) {
        unsigned bits[4];
        ldmatrix(bits, from + ((2 * i + lane / 16) ^ row * units / 8 % units) * 16);
#pragma unroll
        for (int j = 0; j < 4; ++j) a[i][j] = cvt_rn_tf32_f32(__uint_as_float(bits[j]));
    }
}

// One warpgroup's products of all tiles of the block. While those of a stage are under way, it loads the pixels of the next.
template <class Problem, class Tuning>
struct Tf32Consumer {
    using Ring = NarrowRing<Problem, Tuning>;
    static constexpr int steps = Ring::row_bytes / 32, pieces = Tuning::blocks * Tuning::pieces;
    static constexpr int row_bytes = Ring::row_bytes;
    using Fragments = unsigned[pieces][steps][4];

    static __device__ __forceinline__ void load(Fragments& a, const Ring& ring, const RingPlace<Tuning::stages>& place,
                                                int first_row) {
        mbarrier_wait_parity(ring.full(place.stage), place.parity);
#pragma unroll
        for (int i = 0; i < pieces; ++i) {
            const int row = first_row + i / Tuning::pieces * 64;
            load_rounded<row_bytes>(a[i], ring.pixels_of(place.stage, i % Tuning::pieces) + row * row_bytes);
        }
    }

    static __device__ __forceinline__ void consume(const float* bias, float* y, const NarrowTiles<Problem, Tuning>& tiles,
                                                   const Ring& ring, int warpgroup, Offset<Problem> first_tile,
                                                   Offset<Problem> step) {
        const int lane = threadIdx.x % 32, first_row = warpgroup * Tuning::blocks * 64;
        RingPlace<Tuning::stages> place;
        for (Offset<Problem> tile = first_tile; tile < tiles.count(); tile += step) {
            float sums[Tuning::blocks][Tuning::filters / 2];
            Fragments even, odd;
            int stage = ring.first;
            const auto multiply = [&](Fragments& now, Fragments& next) {
                const int here = place.stage;
                wgmma_fence(sums, now);
#pragma unroll
                for (int i = 0; i < pieces; ++i) {
                    const int piece = i % Tuning::pieces;
                    const MatrixDescriptor b = matrix_descriptor(ring.filters_of(here, piece), 0, 8 * row_bytes, row_bytes);
#pragma unroll
                    for (int j = 0; j < steps; ++j)
                        wgmma_tf32(sums[i / Tuning::pieces], now[i][j], b + 32 * j, stage > ring.first || piece > 0 || j > 0);
                }
                wgmma_commit_group();
                place.advance();
                if (stage + 1 < ring.end) load(next, ring, place, first_row);
                wgmma_wait_group<0>(sums, now);
                if (lane == 0) mbarrier_arrive(ring.free(here));
            };
            load(even, ring, place, first_row);
            while (true) {
                multiply(even, odd);
                if (++stage == ring.end) break;
                multiply(odd, even);
                if (++stage == ring.end) break;
            }
            store_narrow<Problem, Tuning>(sums, bias, y, tiles, ring, first_row, tile);
        }
    }
};

template <class Problem, class Tuning>
__device__ __forceinline__ void native_gemm_tf32(const TensorMap& x, const TensorMap& w, const float* bias, float* y,
                                                 long long batch) {
    narrow_block<Problem, Tuning, Tf32Consumer<Problem, Tuning>>(x, w, bias, y, batch);
}

}  // namespace leanconv
