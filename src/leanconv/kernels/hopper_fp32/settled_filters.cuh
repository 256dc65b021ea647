// Filters that one launch has written as plain ones for this call (plain_filters.cuh): the main kernel finds out whether
// they are, so that no launch in between has to.
//
// Consumers read the filters' greatest magnitudes, 16 bytes a lane, each warp all of them, and write the same header and
// scales as the consumers of every other block. In doubt the consumers of all blocks prepare the filters once more. Meanwhile
// the producers copy pixels, which were there before the call's first launch: even while that still prepares filters.
#pragma once

#include <kernels/hopper_fp32/plain_filters.cuh>
#include <device/ptx/barrier.cuh>
#include <device/ptx/launches.cuh>
#include <device/pipeline/rings.cuh>

namespace leanconv {

// Whether the filters are settled here. If not, they have been checked before, and the launch has waited for that.
template <class Tuning> __host__ __device__ constexpr bool settles(decltype(Tuning::settles)*) { return Tuning::settles; }
template <class Tuning> __host__ __device__ constexpr bool settles(...) { return false; }

// Consumers, and the producers' warps that copy filters: all of them where pixels are copied by lanes.
template <class Tuning>
__host__ __device__ constexpr int settling_producers() {
    return Tuning::rows || Tuning::flat || spacing_of<Tuning>(nullptr) > 0 ? 96 : 128;
}
template <class Tuning>
__device__ __forceinline__ void meet_settled() { barrier_sync(13, 128 * Tuning::warpgroups + settling_producers<Tuning>()); }

// NOTE: a function of its own, which the compiler puts behind the kernel's code.
template <class Problem, class Tuning>
__device__ __noinline__ void settle_doubt(const typename Problem::filter* w, float* prepared) {
    prepare_again<Problem, Tuning, true>(w, prepared);
}

// By all consumers. `w`: as plain_filters had them, or none where these are rearranged within the prepared ones. `Rings`:
// preparing again takes the shared memory of the ring of filters.
template <class Problem, class Tuning, class Rings, class... Filters>
__device__ __forceinline__ void settle_filters(const float* prepared, const Filters*... w) {
    if constexpr (settles<Tuning>(nullptr)) {
        using Settling = Small<Tuning, 128 * Tuning::warpgroups, Tuning::pixel_stages * Rings::pixel_bytes>;
        griddepcontrol_wait();
        float* const written = const_cast<float*>(prepared);
        const FilterRange<Problem, Settling> range(written + Problem::first_prepared);
        if (range.plain) range.write();
        else if constexpr (sizeof...(w) > 0) settle_doubt<Problem, Settling>(w..., written);
        else settle_doubt<Problem, Settling>(written + Problem::first_weight, written);
        meet_settled<Tuning>();
    }
}

// By all producers.
template <class Tuning>
__device__ __forceinline__ void wait_for_settled_filters(int thread) {
    if constexpr (settles<Tuning>(nullptr)) {
        if (thread < 128 - settling_producers<Tuning>()) return;
        griddepcontrol_wait();
        meet_settled<Tuning>();
    }
}

}  // namespace leanconv
