// The tensor-core kernels without some of their parts, to measure what each is worth (`python -m research tensor-ablation`).
// No call runs this.
//
// A variant is a header of a few lines: it defines what is left out, and includes this file before the kernels. Here the
// files of lib/ that define such a part are included with its name changed, and what stands in its place follows. So the
// kernels of calls are compiled as they are, from the same files; their own machine code cannot change.
//   LEANCONV_FIXED_SCALES       all rows of pixels have one scale: nobody looks for the largest values
//   LEANCONV_UNCONVERTED        fragments are the pixels' bits as they were loaded (the result means nothing)
//   LEANCONV_TWO_PRODUCTS       pixels lose their low halves: hi·hi + hi·lo
//   LEANCONV_NO_FILTER_COPIES   stages of filters, and of pixels, are declared full and hold what was there before (the
//   LEANCONV_NO_PIXEL_COPIES    result means nothing)
// Without sums of partial sums: tensor_unpromoted.cuh.
#pragma once

#if defined(LEANCONV_FIXED_SCALES) || defined(LEANCONV_UNCONVERTED)
#define split_row split_row_of_calls
#include <device/pipeline/split.cuh>
#undef split_row
namespace leanconv {

// Pixels below 64 become float16 below 2^16, those of a normal distribution at 14 bits below the largest keep 22 bits.
template <bool exact, bool strict = false, int lows, int k_steps>
__device__ __forceinline__ float split_row(unsigned (&high)[k_steps][4], unsigned (&low)[lows][4], int row,
                                           const float (&x)[k_steps][4], const SplitHeader& header) {
    const float scale = power_of_two(127 + 10);
#pragma unroll
    for (int j = 0; j < 2 * k_steps; ++j) {
        const float a = x[j / 2][j % 2 * 2], b = x[j / 2][j % 2 * 2 + 1];
        unsigned& packed = high[j / 2][j % 2 * 2 + row];
#ifdef LEANCONV_UNCONVERTED
        packed = __float_as_uint(a);
        if constexpr (exact) low[j / 2][j % 2 * 2 + row] = __float_as_uint(b);
#else
        packed = split_high(a, b, scale);
        if constexpr (exact) low[j / 2][j % 2 * 2 + row] = split_low(a, b, scale, packed);
#endif
    }
    return power_of_two(127 - 10) * header.inverse_scale;
}

}  // namespace leanconv
#endif

#if defined(LEANCONV_NO_FILTER_COPIES) || defined(LEANCONV_NO_PIXEL_COPIES)
#define produce produce_of_calls
#include <device/pipeline/pixels.cuh>
#undef produce
namespace leanconv {

// The producers of pixels by tensor maps, where thread 0 copies pixels and thread 32 filters: those that are left copy.
template <class Problem, class Tuning>
__device__ __forceinline__ void produce(const TensorMap& x, const float* prepared, long long batch,
                                        const TensorTiles<Problem, Tuning>& tiles,
                                        const TensorRings<Problem, Tuning>& rings, int thread) {
    using F = TensorFilters<Problem, Tuning>;
    static_assert(Tuning::multicast == 1, "blocks that bring each other filters are not taken apart");
    TileWalk<Problem, Tuning> walk(tiles);
#ifdef LEANCONV_NO_PIXEL_COPIES
    if (thread == 0) {
        RingPlace<Tuning::pixel_stages> place;
        for (; walk.valid(); walk.advance())
            for (int stage = walk.first; stage < walk.end; ++stage, place.advance()) {
                mbarrier_wait_parity(rings.pixels_empty(place.stage), place.parity ^ 1);
                mbarrier_arrive(rings.pixels_full(place.stage));
            }
        return;
    }
#endif
#ifdef LEANCONV_NO_FILTER_COPIES
    if (thread == 32) {
        RingPlace<Tuning::filter_stages> place;
        for (; walk.valid(); walk.advance())
            for (int stage = walk.first; stage < walk.end; ++stage) {
                // As in FilterCopies: the last row of pixels meets filters of the one before alone.
                if (F::output_rows > 1 && F::filters_of(stage) >= F::stages) continue;
                for (int n_tile = 0; n_tile < F::n_tiles_of(F::filters_of(stage)); ++n_tile, place.advance()) {
                    mbarrier_wait_parity(rings.filters_empty(place.stage), place.parity ^ 1);
                    mbarrier_arrive(rings.filters_full(place.stage));
                }
            }
        return;
    }
#endif
    produce_of_calls<Problem, Tuning>(x, prepared, batch, tiles, rings, thread);
}

}  // namespace leanconv
#endif

#ifdef LEANCONV_TWO_PRODUCTS
#define begin_products begin_products_of_calls
#include <kernels/hopper_fp32/tensor_stage.cuh>
#undef begin_products
namespace leanconv {

template <class Fragments, int count>
__device__ __forceinline__ void begin_products(float (&partial)[count], const Fragments& pixels,
                                               const unsigned char* filters) {
    static_assert(Fragments::exact, "two products are left of three");
    const MatrixDescriptor low = matrix_descriptor(filters + 2 * count * split_depth * 2, 0, 1024, 128);
#pragma unroll
    for (int i = 0; i < Fragments::k_steps; ++i) wgmma_f16(partial, pixels.high[i], low + 32 * i, i > 0);
}

}  // namespace leanconv
#endif

#include <kernels/hopper_fp32/tensor_gemm.cuh>
#include <kernels/hopper_fp32/tensor_winograd.cuh>
