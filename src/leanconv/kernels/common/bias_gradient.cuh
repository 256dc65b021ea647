// Gradient of the bias: db[k] = sum over n, p, q of dy. Each element of dy is read once: bound by memory.
//
// A block has `channels` neighbouring filters, each of its threads one of them and every so many-th pixel; threads, and the
// blocks of a cluster, are added in a fixed order.
#pragma once

#include <device/epilogue.cuh>  // a type in Problem
#include <device/element.cuh>
#include <device/index.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/sync.cuh>

namespace leanconv {

template <class Problem, class Tuning>
__device__ __forceinline__ void bias_gradient(ElementsIn<Problem> dy, ElementsOut<Problem> bias, long long batch) {
    constexpr int split = Tuning::split, channels = Tuning::channels, workers = Tuning::threads / channels;
    constexpr int image = output_pixels<Problem>;
    static_assert((workers & (workers - 1)) == 0, "threads are added in pairs");
    const int rank = static_cast<int>(blockIdx.x) % split, own = static_cast<int>(threadIdx.x) % channels;
    const int k = static_cast<int>(blockIdx.x) / split * channels + own;
    float* const shared = reinterpret_cast<float*>(shared_memory());
    const int64 count = batch * image;
    float total = 0.0f;
    if (k < Problem::k) {
#pragma unroll 8
        for (int64 number = rank * workers + static_cast<int>(threadIdx.x) / channels; number < count; number += split * workers) {
            int64 at = number * Problem::k + k;
            if constexpr (Problem::chwn) at = k * count + number;
            else if constexpr (!Problem::nhwc) at = (number / image * Problem::k + k) * image + number % image;
            total += to_float(dy[at]);
        }
    }
    shared[threadIdx.x] = total;
#pragma unroll
    for (int half = workers / 2; half > 0; half /= 2) {
        __syncthreads();
        if (static_cast<int>(threadIdx.x) < half * channels) shared[threadIdx.x] += shared[threadIdx.x + half * channels];
    }
    const bool stores = static_cast<int>(threadIdx.x) < channels && k < Problem::k && rank == 0;
    if constexpr (split == 1) {
        if (stores) bias[k] = from_float<typename Problem::element>(shared[own]);
    } else {
        cluster_barrier();
        if (stores) {
            total = shared[own];
#pragma unroll
            for (int other = 1; other < split; ++other) total += cluster_load(shared + own, other);
            bias[k] = from_float<typename Problem::element>(total);
        }
        cluster_barrier();
    }
}

}  // namespace leanconv
