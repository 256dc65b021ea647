// implicit_gemm_weight: gradient of the filters as a matrix product on FP32 cores. No im2col matrix is ever written.
//
//   dw[k, j] = sum over m of dy[m, k] * x[m * stride + (r, s) * dilation, c]      m: output pixel, j: weight (r, s, c)
//
// Requires   nothing: any shape, group count and layout, images and volumes; float32, float16 or bfloat16.
// Numerics   one chain of float32 FMAs a block and weight; split-K adds the chains in a fixed order, no atomics.
// CTA tile   tile_k filters x tile_pixels weights x tile_reduction output pixels a stage; a thread has 8 x 8 sums or 4 x 8.
//            The reduction is long and the output small: split-K by cluster (`split`), or through a workspace (`split_k`),
//            whose partial sums a second launch adds (split_k.cuh).
// Roles      all warps load, multiply and store.
// Pipelines  as implicit_gemm: `stages` steps of cp.async
// Work       16 FMAs a shared load for 8 x 8 of a thread.
// Measured   figure: im2win-nhwc-wgrad implicit_gemm_weight tflops-most = 42.3
//            figure: opencnn-nhwc-wgrad implicit_gemm_weight/pytorch mean = 0.52
#pragma once

#include <device/ptx/memory.cuh>
#include <device/ptx/sync.cuh>
#include <kernels/common/split_k.cuh>
#include <kernels/simt/tile.cuh>
#include <kernels/simt/tile_product.cuh>
#include <kernels/simt/weight_loaders.cuh>

namespace leanconv {

// `sums` of a thread from number `first` on, thread_pixels of them a filter; fours are adjacent weights.
template <class Problem, class Tuning, class T, int count>
__device__ __forceinline__ void store_gradient(T* dw, const float (&sums)[count], int first, const Tiling<Tuning>& tiling,
                                               int group, int first_k, int first_weight) {
    constexpr int weights = WeightNumber<Problem>::count;
    constexpr int unit = count % 4 == 0 ? 4 : 2;
    static_assert(count % unit == 0, "fours, or twos, are stored together");
#pragma unroll
    for (int i = 0; i < count; i += unit) {
        const int number = first + i, row = number / Tuning::thread_pixels, column = number % Tuning::thread_pixels;
        const int in_group = first_k + tiling.k + position<Tiling<Tuning>::lanes_k, false>(row / 4, tiling.lane_k, row % 4);
        const int weight =
            first_weight + tiling.pixel + position<Tiling<Tuning>::lanes_pixels, false>(column / 4, tiling.lane_pixel, column % 4);
        if (in_group >= Problem::group_k) continue;
        const int64 k = group * Problem::group_k + in_group;
        T* const to = dw + (Problem::chwn ? static_cast<int64>(weight) * Problem::k + k : k * weights + weight);
        constexpr int step = Problem::chwn ? Problem::k : 1;
        T v[unit];
#pragma unroll
        for (int j = 0; j < unit; ++j) {
            const float sum = sums[i + j];
            if constexpr (Tuning::split_k > 1) {
                v[j] = sum;
            } else {
                const T* const at = to + static_cast<int64>(j) * step;
                v[j] = from_float<T>(finish<Problem>(sum, 0.0f, held_by<Problem>(at, weight + j < weights)));
            }
        }
        if constexpr (!Problem::chwn && weights % 4 == 0) {
            if (weight < weights) store_adjacent(to, v);
        } else {
#pragma unroll
            for (int j = 0; j < unit; ++j)
                if (weight + j < weights) to[static_cast<int64>(j) * step] = v[j];
        }
    }
}

// `dw` is the gradient, or with `split_k` above 1 room for as many partial sums.
template <class Problem, class Tuning, class Result>
__device__ __forceinline__ void implicit_gemm_weight(ElementsIn<Problem> x, ElementsIn<Problem> dy,
                                                     Result* __restrict__ dw, long long batch) {
    using Filters = GradientLoader<Problem, Tuning>;
    using Windows = WindowLoader<Problem, Tuning>;
    using Product = TileProduct<Problem, Tuning, Filters, Windows>;
    constexpr int split = Tuning::split, depth = Tuning::tile_reduction, weights = WeightNumber<Problem>::count;
    constexpr int tiles_k = ceil_div(Problem::group_k, Tuning::tile_k), tiles_w = ceil_div(weights, Tuning::tile_pixels);
    constexpr int tiles = tiles_k * tiles_w * Problem::groups, count = Tuning::thread_k * Tuning::thread_pixels;

    const int rank = static_cast<int>(blockIdx.x) % split, number = static_cast<int>(blockIdx.x) / split;
    const int tile = number % tiles, slice = number / tiles;
    const int first_k = tile % tiles_k * Tuning::tile_k, first_weight = tile / tiles_k % tiles_w * Tuning::tile_pixels;
    const int group = tile / (tiles_k * tiles_w);
    const int64 pixels = static_cast<int64>(batch) * output_pixels<Problem>, all = (pixels + (depth - 1)) / depth;
    constexpr int shares = split * Tuning::split_k;
    const int64 share = (all + (shares - 1)) / shares, begin = share * (slice * split + rank);
    const int steps = static_cast<int>(begin >= all ? 0 : begin + share < all ? share : all - begin);

    float* const shared = reinterpret_cast<float*>(shared_memory());
    const Tiling<Tuning> tiling;
    float acc[Tuning::thread_k][Tuning::thread_pixels] = {};
    if (steps > 0) {
        const auto first = static_cast<Offset<Problem>>(begin * depth);
        Filters filters(dy, group, first_k, first, batch);
        Windows windows(x, group, first_weight, first, batch);
        Product(shared, filters, windows, tiling).run(acc, steps);
    }
    if constexpr (Tuning::split_k > 1) dw += slice * (static_cast<int64>(Problem::k) * weights);
    const float (&sums)[count] = reinterpret_cast<const float (&)[count]>(acc);
    if constexpr (split == 1) {
        store_gradient<Problem, Tuning>(dw, sums, 0, tiling, group, first_k, first_weight);
    } else {
        constexpr int threads = Tiling<Tuning>::threads, own = count / split;
        static_assert(count % split == 0, "the blocks of a cluster share a thread's tile evenly");
        float* const mine = shared + threadIdx.x;
        __syncthreads();  // the stages have been read
#pragma unroll
        for (int i = 0; i < count; ++i) mine[i * threads] = sums[i];
        cluster_barrier();
        float total[own];
#pragma unroll
        for (int i = 0; i < own; ++i) {
            const float* const at = mine + (rank * own + i) * threads;
            total[i] = cluster_load(at, 0);
#pragma unroll
            for (int other = 1; other < split; ++other) total[i] += cluster_load(at, other);
        }
        cluster_barrier();
        store_gradient<Problem, Tuning>(dw, total, rank * own, tiling, group, first_k, first_weight);
    }
}

}  // namespace leanconv
