// A block's work in the fused Winograd kernels: find its tiles, multiply, transform back, store.
#pragma once

#include <device/ptx/memory.cuh>
#include <device/ptx/sync.cuh>
#include <kernels/simt/winograd_output.cuh>
#include <kernels/simt/winograd_product.cuh>

namespace leanconv {

// Tile b % tiles_k of filters, of group (b / tiles_k) % groups, for columns b / tiles_k / groups: blocks that run
// together share their pixels.
template <class Problem, class Tuning, class Transform>
__device__ __forceinline__ void winograd_convolution(const float* x, const float* prepared, Bias<Problem> bias, float* y,
                                                     long long batch) {
    using Tiles = WinogradTiles<Problem, Tuning>;
    using Column = WinogradColumn<Problem>;
    using Source = WinogradSource<Problem>;
    using Product = WinogradProduct<Problem, Tuning, Transform>;
    constexpr int tiles_k = ceil_div(Problem::group_k, Tuning::tile_k);
    const int tile_k = blockIdx.x % tiles_k, group = blockIdx.x / tiles_k % Problem::groups;
    const auto first = static_cast<Offset<Problem>>(blockIdx.x / tiles_k / Problem::groups) * Tiles::columns;

    Column* const columns = reinterpret_cast<Column*>(shared_memory());
    Source* const sources = reinterpret_cast<Source*>(columns + Tiles::columns);
    static_assert(sizeof(Column) == 16 * (1 + Problem::wide + Depth<Problem>::volume), "shared_bytes in winograd_tiles.py");
    constexpr int source_count = Problem::taps * Tuning::step_sources;
    float* const shared = reinterpret_cast<float*>(sources + (source_count + 1) / 2 * 2);
    for (int i = threadIdx.x; i < Tiles::columns; i += Tiles::all_threads)
        columns[i] = Column::template make<Tuning>(first + i, batch, group);
    __syncthreads();
    for (int i = threadIdx.x; i < source_count; i += Tiles::all_threads)
        sources[i] = Source::template make<Tuning>(i, columns, batch);
    const Tiles tiles;
    __syncthreads();

    typename Product::Sums sums = {};
    Product product(tiles, sources, shared, x, batch, prepared, group, tile_k);
    product.begin();
    if constexpr (Tuning::producers > 0) {
        if (threadIdx.x >= Tiles::threads) {
            set_registers_down<Tiles::producer_registers>();
            product.produce();
            return;
        }
        set_registers_up<Tiles::registers>();
    }
    product.run(sums);
    const OutputStrides<Problem> strides(batch);
    WinogradOutput<Problem, Tuning, Transform>{tiles,   columns, shared, bias, y, tile_k * Tuning::tile_k, group,
                                               strides}.run(sums);
}

}  // namespace leanconv
