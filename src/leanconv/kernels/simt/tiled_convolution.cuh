// A block's work in the tiled convolutions: find its tile, multiply, store.
#pragma once

#include <device/ptx/memory.cuh>
#include <kernels/simt/tile.cuh>
#include <kernels/simt/filter_loader.cuh>
#include <kernels/simt/tile_product.cuh>

namespace leanconv {

// Tile b % tiles_k of filters, of group (b / tiles_k) % groups and of a phase, for pixel tile b / tiles_k / groups /
// phases: tiles that are computed together share their pixels. The Tuning::split blocks of a cluster compute one tile b,
// each a part of the reduction. `Places` numbers the pixels: its `count` of them, and where each lies. The filters begin
// first_weight elements behind w, those of one phase after the other.
template <class Problem, class Tuning, bool interleaved, bool aligned, class Filters, class Pixels, class Places>
__device__ __forceinline__ void tiled_convolution(const typename Problem::element* x,
                                                  const typename Problem::filter* w,
                                                  Bias<Problem> bias,
                                                  typename Problem::result* y, long long batch) {
    using Product = TileProduct<Problem, Tuning, Filters, Pixels>;
    constexpr int tiles_k = ceil_div(Problem::group_k, Tuning::tile_k);
    constexpr int split = Tuning::split;

    const Phase<Problem> phase(blockIdx.x / split / tiles_k / Problem::groups % Phase<Problem>::count);
    const Places places(batch, phase);
    float* const shared = reinterpret_cast<float*>(shared_memory());
    const Tiling<Tuning> tiling;
    const int tile = blockIdx.x / split, part = blockIdx.x % split;
    const int tile_k = tile % tiles_k;
    const int group = tile / tiles_k % Problem::groups;
    const Offset<Problem> first_pixel =
        static_cast<Offset<Problem>>(tile / tiles_k / Problem::groups / Phase<Problem>::count) * Tuning::tile_pixels;
    const int first_step = Pixels::steps * part / split, last_step = Pixels::steps * (part + 1) / split;

    const int64 first_weight = Problem::first_weight;
    w += first_weight + static_cast<int64>(phase.number) * Problem::k * Reduction<Problem>::size;
    Filters filters(w, group, tile_k, first_step);
    Pixels pixels(x, places, first_pixel, group, shared + Product::stages * Product::stage_floats, first_step);
    __syncthreads();  // the pixel loader's table

    typename Problem::sum acc[Tuning::thread_k][Tuning::thread_pixels] = {};
    Product(shared, filters, pixels, tiling).run(acc, last_step - first_step);

    if constexpr (split == 1) {
        store_tile<Problem, Tuning, interleaved, aligned>(acc, 0, 0, tiling, bias, y, places, first_pixel, group,
                                                    tile_k * Tuning::tile_k);
    } else {
        const Share<Problem, Tuning> share(acc, shared);
        store_tile<Problem, Tuning, interleaved, aligned>(share.sum, share.row, share.column, tiling, bias, y, places,
                                                    first_pixel, group, tile_k * Tuning::tile_k);
    }
}

}  // namespace leanconv
