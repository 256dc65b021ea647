// winograd2d whose sums are exchanged in plain rows: nothing leads them to different banks.
#pragma once

#define WinogradTiles WinogradTilesOfCalls
#include <kernels/simt/winograd_tiles.cuh>
#undef WinogradTiles

namespace leanconv {

template <class Problem, class Tuning>
struct WinogradTiles : WinogradTilesOfCalls<Problem, Tuning> {
    using Calls = WinogradTilesOfCalls<Problem, Tuning>;
    static constexpr int exchange_pitch = Problem::nhwc ? Calls::round_k : Tuning::tiles;
    static constexpr int exchange_plane = (Problem::nhwc ? Tuning::tiles : Calls::round_k) * exchange_pitch;
    static __device__ __forceinline__ constexpr int exchange_at(int row, int column) {
        return row * exchange_pitch + column;
    }
    static __device__ __forceinline__ void exchange_put(float* plane, int row, int column, const float (&v)[4]) {
        store_vector(plane + exchange_at(row, column), v);
    }
};

}  // namespace leanconv

#include <kernels/simt/winograd2d.cuh>
