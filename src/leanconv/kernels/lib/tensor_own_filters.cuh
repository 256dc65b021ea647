// Where the two warpgroups of tensor_winograd.cuh find their filters.
#pragma once

#include <lib/tensor_rings.cuh>

namespace leanconv {

// Where a warpgroup finds its filters in their ring, of which every other stage is its own.
template <class Problem, class Tuning>
struct OwnFilters {
    using F = TensorFilters<Problem, Tuning>;
    static constexpr int steps = 2 * F::chunks, all = Tuning::filter_stages;
    // Those of a row are in half of the ring for two rows of pixels: for the second row of outputs in the next one.
    static constexpr bool kept = F::heights > 1;
    // Or stages of pixels take all stages of filters, and find each where it was.
    static constexpr bool fixed = !kept && all == 2 * steps;
    static_assert(all % 2 == 0, "every other stage of filters is a warpgroup's own");
    static_assert(!kept || all == 4 * steps, "the ring has the filters of two rows");
    int warpgroup;
    RingPlace<kept ? 2 : fixed ? 1 : all / 2> place;

    __device__ __forceinline__ explicit OwnFilters(int warpgroup) : warpgroup(warpgroup) {}
    // The stage of the i-th products, those with filters of this row of pixels, or of the one `before`.
    __device__ __forceinline__ int stage(int i, bool before) const {
        if constexpr (kept) return (place.stage ^ static_cast<int>(before)) * (2 * steps) + 2 * i + warpgroup;
        return 2 * (fixed ? i : place.stage) + warpgroup;
    }
    __device__ __forceinline__ void advance(bool of_row) {
        if (of_row == (kept || fixed)) place.advance();
    }
};

}  // namespace leanconv
