// Filters whose channels need no factors, prepared at the least cost: a launch that writes them as if all were such. Then a
// second launch, or the main kernel (settled_filters.cuh), finds out whether they are, and else prepares all again
// (tensor_filters.cuh).
//
// A block of the first launch has `plain_first` filters, so many that few of its channels are small by chance. It doubts
// where a channel of these is below the spread of their greatest. If no block doubts, no channel of the whole group is below
// it either: the block that has its largest element has others as large. One product leaves a pixel 2^35 of room below its
// row's largest and keeps 2^-11 of each product, so it doubts later, at 2^-19.
// What it costs, on an H200 (512 filters of 512 x 3 x 3, 9.4 MB read and 9.4 or 12.6 written): latencies more than bytes. So
// a lane writes 16 bytes, eight of them a line, and the blocks that prepare again share its two steps.
#pragma once

#include <device/ptx/atomic.cuh>
#include <device/ptx/bulk_copy.cuh>
#include <kernels/hopper_fp32/tensor_filters.cuh>

namespace leanconv {

// Behind the parts (filter_layout.cuh): the largest magnitude of each filter, those of a block that doubts negative, and three
// counters: pieces of work that blocks have taken, channels' maxima that are there, and filters that are written again.
template <class Problem, class Tuning>
struct PlainFilters {
    using F = TensorFilters<Problem, Tuning>;
    using P = FactorParts<Problem, Tuning>;
    static constexpr int of_block = Problem::plain_first;
    static constexpr int of_group = F::tiles * F::filters, rows = Problem::groups * of_group;
    static constexpr int64 greatest_at = P::end, counters_at = greatest_at + rows;
    static constexpr int doubt = Tuning::products == 3 ? spread : 19;
    static_assert(of_group % of_block == 0, "a block's filters are of one group");
    // The scale of a filter, whose exponent all sums keep less that of the greatest.
    static __device__ __forceinline__ unsigned scale(float greatest, unsigned none) {
        return greatest > 0 ? least_scale(greatest) : none;
    }
};

// First launch: a block writes `plain_first` filters, those that fill up the last tile as zeros.
template <class Problem, class Tuning>
__device__ __forceinline__ void plain_filters(const typename Problem::filter* w, float* prepared_filters) {
    using F = TensorFilters<Problem, Tuning>;
    using Plain = PlainFilters<Problem, Tuning>;
    constexpr int of_block = Plain::of_block, warps = Tuning::threads / 32;
    using Filters = FilterElements<Problem, Tuning, of_block>;
    static_assert(Filters::copied && !Problem::by_element && (of_block + 1) * warps <= 96, "a block holds its filters");
    float* const prepared = prepared_filters + Problem::first_prepared;
    float* const of_warps = reinterpret_cast<float*>(shared_memory());
    const int first = blockIdx.x * of_block, padded = first % Plain::of_group, group = first / Plain::of_group;
    const Filters filters{w, of_warps + 96, group, padded};
    filters.begin();
    cp_async_wait_group<0>();
    __syncthreads();
    // The greatest of each filter, and last, negative, the least of the channels' largest.
    float greatest[of_block + 1] = {};
    greatest[of_block] = -3.402823466e38f;
    for (int c = threadIdx.x; c < Problem::group_c; c += Tuning::threads) {
        float of_channel = 0;
#pragma unroll
        for (int f = 0; f < of_block; ++f) {
            float largest = 0;
#pragma unroll 9
            for (int weight = 0; weight < F::weights; ++weight)
                largest = fmaxf(largest, finite_magnitude(filters.one(f)(c, weight)));
            greatest[f] = fmaxf(greatest[f], largest);
            of_channel = fmaxf(of_channel, largest);
        }
        greatest[of_block] = fmaxf(greatest[of_block], -of_channel);
    }
    largest_of_block<Tuning>(greatest, of_warps);
    float of_all = 0;
    unsigned ups[of_block];
#pragma unroll
    for (int f = 0; f < of_block; ++f) of_all = fmaxf(of_all, greatest[f]), ups[f] = Plain::scale(greatest[f], 127);
    if (threadIdx.x == 0) {
        const float least = -greatest[of_block];
        const bool doubted = of_all > 0 && (least == 0 || whole_exponent(of_all) - whole_exponent(least) > Plain::doubt);
#pragma unroll
        for (int f = 0; f < of_block; ++f)
            prepared[Plain::greatest_at + first + f] = doubted ? -of_all : greatest[f];
        if (blockIdx.x == 0) {
            unsigned* const counters = reinterpret_cast<unsigned*>(prepared + Plain::counters_at);
            counters[0] = counters[1] = counters[2] = 0;
        }
    }
    write_fragments<false>(filters, prepared, group, padded, ups, [](int, int) { return 1.0f; });
}

// What all filters together decide. Each warp finds it for itself, from the greatest of each filter.
template <class Problem, class Tuning>
struct FilterRange {
    using F = TensorFilters<Problem, Tuning>;
    using Plain = PlainFilters<Problem, Tuning>;
    static_assert(Plain::rows % 4 == 0 && Plain::greatest_at % 4 == 0, "four are loaded at once");
    float* prepared;
    unsigned least_up;
    bool plain;  // what the first launch has written holds

    __device__ __forceinline__ explicit FilterRange(float* prepared) : prepared(prepared) {
        // The greatest of all filters, and negative, the least of those that have weights; above zero in doubt.
        float ends[2] = {0, -3.402823466e38f};
#pragma unroll 4
        for (int row = threadIdx.x % 32 * 4; row < Plain::rows; row += 128) {
            const float4 four = *reinterpret_cast<const float4*>(prepared + Plain::greatest_at + row);
            const float each[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                ends[0] = fmaxf(ends[0], each[i]);
                if (each[i] != 0) ends[1] = fmaxf(ends[1], -each[i]);
            }
        }
        largest_of_warp(ends);
        least_up = least_scale(ends[0]);
        // Where a filter is so much smaller than another that its scale could be no number, others have the last word too.
        plain = ends[1] < 0 && (ends[0] == 0 || least_scale(-ends[1]) <= least_up + 126);
    }
    // By all threads of a block.
    __device__ __forceinline__ void write() const {
#pragma unroll 1
        for (int row = threadIdx.x; row < Plain::rows; row += Tuning::threads) {
            const unsigned up = Plain::scale(prepared[Plain::greatest_at + row], least_up);
            prepared[F::scales_at + row] = power_of_two(127 + least_up - up);
        }
#pragma unroll 1
        for (int group = threadIdx.x; group < Problem::groups; group += Tuning::threads)
            reinterpret_cast<unsigned*>(prepared)[F::flags_at + group] = 0;
        if (threadIdx.x == 0) write_header(prepared, least_up);
    }
};

// All filters once more, with factors, by all blocks of a grid: the channels' largest magnitudes, then the filters. A block
// takes one piece of work after the other, and those of the second step wait for all of the first. These have been taken
// before, by blocks that run: so blocks that have not been started, as another grid has the multiprocessors, keep nobody
// waiting for ever. Where the grid goes on to read the filters (`reads`), its blocks wait until all are written.
template <class Problem, class Tuning, bool reads>
__device__ __forceinline__ void prepare_again(const typename Problem::filter* w, float* prepared_filters) {
    using P = FactorParts<Problem, Tuning>;
    constexpr int channels = P::side_by_side ? 32 : Tuning::threads / 32, rows = PlainFilters<Problem, Tuning>::rows;
    constexpr unsigned firsts = Problem::groups * P::parts * ceil_div(P::of_filter, channels);
    float* const prepared = prepared_filters + Problem::first_prepared;
    unsigned* const counters = reinterpret_cast<unsigned*>(prepared + PlainFilters<Problem, Tuning>::counters_at);
    unsigned& taken = *reinterpret_cast<unsigned*>(shared_floats<Tuning>());
    while (true) {
        sync_threads<Tuning>();
        if (threadIdx.x == 0) taken = atom_add_acq_rel(counters, 1);
        sync_threads<Tuning>();
        const unsigned work = taken;
        if (work >= firsts + rows) break;
        if (work >= firsts && threadIdx.x == 0)
            while (ld_acquire(counters + 1) < firsts) {}
        sync_threads<Tuning>();
        if (work < firsts) {
            largest_channels_of<Problem, Tuning>(static_cast<int>(work), w, prepared_filters);
        } else {
            tensor_filters_of<Problem, Tuning>(static_cast<int>(work - firsts), w, prepared_filters);
            if constexpr (reads) fence_proxy_async_global();
        }
        sync_threads<Tuning>();
        if ((reads || work < firsts) && threadIdx.x == 0) atom_add_acq_rel(counters + (work < firsts ? 1 : 2), 1);
    }
    if constexpr (reads) {
        if (threadIdx.x == 0)
            while (ld_acquire(counters + 2) < rows) {}
        sync_threads<Tuning>();
        fence_proxy_async_global();
        fence_proxy_async();  // bulk copies take the shared memory next
    }
}

// Second launch, for filters that are kept: one block writes what all filters together decide.
template <class Problem, class Tuning>
__device__ __forceinline__ void check_filters(const typename Problem::filter* w, float* prepared_filters) {
    const FilterRange<Problem, Tuning> range(prepared_filters + Problem::first_prepared);
    if (!range.plain) prepare_again<Problem, Small<Tuning, Tuning::threads>, false>(w, prepared_filters);
    else if (blockIdx.x == 0) range.write();
}

// The same of filters that another launch has rearranged within the prepared ones, from element first_weight on.
template <class Problem, class Tuning>
__device__ __forceinline__ void plain_rearranged_filters(float* prepared) {
    plain_filters<Problem, Tuning>(prepared + Problem::first_weight, prepared);
}
template <class Problem, class Tuning>
__device__ __forceinline__ void check_rearranged_filters(float* prepared) {
    check_filters<Problem, Tuning>(prepared + Problem::first_weight, prepared);
}

}  // namespace leanconv
