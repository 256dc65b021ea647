// winograd2d whose sums are exchanged in stores of 64 bits instead of 128.
#pragma once

#define WinogradTiles WinogradTilesOfCalls
#include <kernels/simt/winograd_tiles.cuh>
#undef WinogradTiles

namespace leanconv {

// 64 bits in one access that stays by itself: volatile, because the compiler made 128 of two.
__device__ __forceinline__ void store_pair(float* to, float first, float second) {
    *reinterpret_cast<volatile unsigned long long*>(to) =
        static_cast<unsigned long long>(__float_as_uint(second)) << 32 | __float_as_uint(first);
}

template <class Problem, class Tuning>
struct WinogradTiles : WinogradTilesOfCalls<Problem, Tuning> {
    static __device__ __forceinline__ void exchange_put(float* plane, int row, int column, const float (&v)[4]) {
        float* const to = plane + WinogradTiles::exchange_at(row, column);
        store_pair(to, v[0], v[1]);
        store_pair(to + 2, v[2], v[3]);
    }
};

}  // namespace leanconv

#include <kernels/simt/winograd2d.cuh>
