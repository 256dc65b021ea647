// Packed filters by speculation: prepare, validate, fall back.
//
//   prepare    a launch packs the filters as if no channel needed a factor (split.cuh). It marks what contradicts that.
//   validate   a second launch, or the consumers of the main kernel, read the marks. If there are none, only
//              scales are missing.
//   fall back  otherwise all CTAs pack the filters once more, with factors (tensor_filters.cuh).
//
// A CTA of the first launch has `speculative_block` filters, so many that few of their channels are small by chance. The
// speculation fails where one of these channels is more than 2^12 smaller than their greatest element. If it fails in no CTA,
// no channel of the whole group is that small: the CTA with the greatest element has an element of each channel. One product
// leaves a row of pixels 2^35 below its largest, and keeps 2^-11 of each product; so there the bound is 2^19.
// Of 512 filters of 512 x 3 x 3 (9.4 MB read, 9.4 or 12.6 written) latency costs more than bytes. So a lane writes 16
// bytes, eight of them a line, and the CTAs that fall back share its two steps.
// Validation in the main kernel: consumers read the greatest magnitudes, 16 bytes a lane, each warp all of them, and every CTA
// writes the same header and scales. Producers copy pixels meanwhile: these were there before the call's first launch.
#pragma once

#include <device/ptx/memory.cuh>
#include <device/ptx/sync.cuh>
#include <device/ptx/tma.cuh>
#include <kernels/hopper_fp32/tensor_filters.cuh>

namespace leanconv {

// Behind the maxima (filter_layout.cuh): the greatest magnitude of each filter, negative in a CTA whose speculation failed, and
// three counters: work items taken, channel maxima found, and filters packed again.
template <class Problem, class Tuning>
struct Speculation {
    using F = TensorFilters<Problem, Tuning>;
    using P = ChannelFactors<Problem, Tuning>;
    static constexpr int of_block = Problem::speculative_block;
    static constexpr int of_group = F::tiles * F::filters, rows = Problem::groups * of_group;
    static constexpr int64 greatest_at = P::end, counters_at = greatest_at + rows;
    static constexpr int most_spread = Tuning::products == 3 ? spread : 19;
    static_assert(of_group % of_block == 0, "a block's filters are of one group");
    // The scale of a filter. All sums keep the scale of the greatest filter until the end.
    static __device__ __forceinline__ unsigned scale(float greatest, unsigned none) {
        return greatest > 0 ? least_scale(greatest) : none;
    }
};

// First launch: a CTA packs `speculative_block` filters; those that fill up the last tile are zeros.
template <class Problem, class Tuning>
__device__ __forceinline__ void speculative_filters(const typename Problem::filter* w, float* prepared_filters) {
    using F = TensorFilters<Problem, Tuning>;
    using State = Speculation<Problem, Tuning>;
    constexpr int of_block = State::of_block, warps = Tuning::threads / 32;
    using Filters = FilterElements<Problem, Tuning, of_block>;
    static_assert(Filters::copied && !Problem::by_element && (of_block + 1) * warps <= 96, "a block holds its filters");
    float* const prepared = prepared_filters + Problem::first_prepared;
    float* const of_warps = reinterpret_cast<float*>(shared_memory());
    const int first = blockIdx.x * of_block, padded = first % State::of_group, group = first / State::of_group;
    const Filters filters{w, of_warps + 96, group, padded};
    filters.begin();
    cp_async_wait_group<0>();
    __syncthreads();
    // The greatest of each filter; and the smallest of the channels' maxima, negative.
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
    unsigned scales[of_block];
#pragma unroll
    for (int f = 0; f < of_block; ++f) of_all = fmaxf(of_all, greatest[f]), scales[f] = State::scale(greatest[f], 127);
    if (threadIdx.x == 0) {
        const float least = -greatest[of_block];
        const bool invalid =
            of_all > 0 && (least == 0 || whole_exponent(of_all) - whole_exponent(least) > State::most_spread);
#pragma unroll
        for (int f = 0; f < of_block; ++f)
            prepared[State::greatest_at + first + f] = invalid ? -of_all : greatest[f];
        if (blockIdx.x == 0) {
            unsigned* const counters = reinterpret_cast<unsigned*>(prepared + State::counters_at);
            counters[0] = counters[1] = counters[2] = 0;
        }
    }
    write_fragments<false>(filters, prepared, group, padded, scales, [](int, int) { return 1.0f; });
}

// What depends on all filters. Each warp computes it, from the greatest magnitude of each filter.
template <class Problem, class Tuning>
struct FilterRange {
    using F = TensorFilters<Problem, Tuning>;
    using State = Speculation<Problem, Tuning>;
    static_assert(State::rows % 4 == 0 && State::greatest_at % 4 == 0, "four are loaded at once");
    float* prepared;
    unsigned sum_scale;
    bool valid;  // what the first launch has written holds

    __device__ __forceinline__ explicit FilterRange(float* prepared) : prepared(prepared) {
        // The greatest of all filters; and the smallest of those that have weights, negative: above zero if a CTA failed.
        float ends[2] = {0, -3.402823466e38f};
#pragma unroll 4
        for (int row = threadIdx.x % 32 * 4; row < State::rows; row += 128) {
            const float4 v = *reinterpret_cast<const float4*>(prepared + State::greatest_at + row);
            const float each[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                ends[0] = fmaxf(ends[0], each[i]);
                if (each[i] != 0) ends[1] = fmaxf(ends[1], -each[i]);
            }
        }
        largest_of_warp(ends);
        sum_scale = least_scale(ends[0]);
        // Where a filter is so much smaller than another that its scale would be no number, the fallback decides.
        valid = ends[1] < 0 && (ends[0] == 0 || least_scale(-ends[1]) <= sum_scale + 126);
    }
    // By all threads of a CTA.
    __device__ __forceinline__ void write() const {
#pragma unroll 1
        for (int row = threadIdx.x; row < State::rows; row += Tuning::threads) {
            const unsigned scale = State::scale(prepared[State::greatest_at + row], sum_scale);
            prepared[F::scales_at + row] = power_of_two(127 + sum_scale - scale);
        }
#pragma unroll 1
        for (int group = threadIdx.x; group < Problem::groups; group += Tuning::threads)
            reinterpret_cast<unsigned*>(prepared)[F::flags_at + group] = 0;
        if (threadIdx.x == 0) write_header(prepared, sum_scale);
    }
};

// The fallback, by all CTAs of a grid: the channels' maxima, then all filters with factors. A CTA takes one work item after the
// other; those of the second step wait for all of the first. These were taken before, by CTAs that run; so CTAs that have not
// started, because another grid has the multiprocessors, block nobody. Where the grid goes on to read the filters (`reads`),
// its CTAs wait until all are written.
template <class Problem, class Tuning, bool reads>
__device__ __forceinline__ void fall_back(const typename Problem::filter* w, float* prepared_filters) {
    using P = ChannelFactors<Problem, Tuning>;
    constexpr int channels = P::side_by_side ? 32 : Tuning::threads / 32, rows = Speculation<Problem, Tuning>::rows;
    constexpr unsigned firsts = Problem::groups * P::row_blocks * ceil_div(P::of_filter, channels);
    float* const prepared = prepared_filters + Problem::first_prepared;
    unsigned* const counters = reinterpret_cast<unsigned*>(prepared + Speculation<Problem, Tuning>::counters_at);
    unsigned& next = *reinterpret_cast<unsigned*>(shared_floats<Tuning>());
    while (true) {
        sync_threads<Tuning>();
        if (threadIdx.x == 0) next = atom_add_acq_rel(counters, 1);
        sync_threads<Tuning>();
        const unsigned work = next;
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

// Second launch, for filters that are kept: one CTA writes what depends on all filters.
template <class Problem, class Tuning>
__device__ __forceinline__ void validate_filters(const typename Problem::filter* w, float* prepared_filters) {
    const FilterRange<Problem, Tuning> range(prepared_filters + Problem::first_prepared);
    if (!range.valid) fall_back<Problem, Small<Tuning, Tuning::threads>, false>(w, prepared_filters);
    else if (blockIdx.x == 0) range.write();
}

// Both launches for filters that an earlier launch has rearranged within the packed ones, from element first_weight on.
template <class Problem, class Tuning>
__device__ __forceinline__ void speculative_filters(float* prepared) {
    speculative_filters<Problem, Tuning>(prepared + Problem::first_weight, prepared);
}
template <class Problem, class Tuning>
__device__ __forceinline__ void validate_filters(float* prepared) {
    validate_filters<Problem, Tuning>(prepared + Problem::first_weight, prepared);
}

// Threads that synchronise with the consumers: the producer warps that copy filters, or all where lanes copy pixels.
template <class Rings>
__host__ __device__ constexpr int validated_producers() {
    return Rings::by_maps || Rings::F::resident ? 96 : 128;
}
template <class Rings, class Tuning>
__device__ __forceinline__ void sync_validated() { barrier_sync(13, 128 * Tuning::warpgroups + validated_producers<Rings>()); }

// NOTE: a function of its own, which the compiler puts behind the kernel's code.
template <class Problem, class Tuning>
__device__ __noinline__ void fall_back_in_place(const typename Problem::filter* w, float* prepared) {
    fall_back<Problem, Tuning, true>(w, prepared);
}

// By all consumers. `w`: the filters of speculative_filters, or nothing where they are rearranged within the packed ones. The
// fallback uses the shared memory of the ring of filters.
template <class Problem, class Tuning, class Rings, class... Filters>
__device__ __forceinline__ void validate_in_place(const float* prepared, const Filters*... w) {
    if constexpr (Tuning::validates) {
        using Validating = Small<Tuning, 128 * Tuning::warpgroups, Tuning::pixel_stages * Rings::pixel_bytes>;
        griddepcontrol_wait();
        float* const written = const_cast<float*>(prepared);
        const FilterRange<Problem, Validating> range(written + Problem::first_prepared);
        if (range.valid) range.write();
        else if constexpr (sizeof...(w) > 0) fall_back_in_place<Problem, Validating>(w..., written);
        else fall_back_in_place<Problem, Validating>(written + Problem::first_weight, written);
        sync_validated<Rings, Tuning>();
    }
}

// By all producers.
template <class Rings, class Tuning>
__device__ __forceinline__ void wait_for_validated_filters(int thread) {
    if constexpr (Tuning::validates) {
        if (thread < 128 - validated_producers<Rings>()) return;
        griddepcontrol_wait();
        sync_validated<Rings, Tuning>();
    }
}

}  // namespace leanconv
