// From a warpgroup's accumulators of 64 filters to the output of native_gemm_pointwise: what follows the sums, rounding to 16 bits,
// stores.
//
// A thread holds pairs of neighbouring pixels of two filters, and pixels of a filter are neighbours in NCHW. A warp's pairs go
// through shared memory of its own, 16 filters x 64 pixels at a time, so that its lanes store as many pixels at once as are aligned
// in every image. Residuals come the same way in the other direction.
#pragma once

#include <device/epilogue.cuh>
#include <device/index.cuh>
#include <device/ptx/sync.cuh>
#include <kernels/hopper_native/accumulators.cuh>

namespace leanconv {

// A warp's stores. `Tiles` says which image and pixels a tile's segments have.
template <class Problem, class Tiles>
struct PointwiseOutput {
    using T = typename Problem::result;
    // Filters lie 36 words apart: pairs of eight filters meet each bank once.
    static constexpr int pitch = 72, bytes = 16 * pitch * sizeof(T);
    static constexpr int pixels = Problem::w, together = gcd(pixels, 8), words = together / 2;
    int lane;
    T* staging;
    Bias<Problem> bias;

    static __device__ __forceinline__ void copy_unit(T* to, const T* from) {
        if constexpr (together == 8) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
        else if constexpr (together == 4) *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
        else if constexpr (together == 2) *reinterpret_cast<unsigned*>(to) = *reinterpret_cast<const unsigned*>(from);
        else *to = *from;
    }
    // Calls `act` with the unit of each of the lane's turns that exists: where it lies in the staging buffer and in y.
    template <int units, class Act>
    __device__ __forceinline__ void for_units(T* y, int filters, int left, const Act& act) const {
        constexpr int turns = ceil_div(16 * units, 32), at_once = turns < 16 ? turns : 8;
#pragma unroll at_once
        for (int i = 0; i < turns; ++i) {
            const int at = i * 32 + lane, filter = at / units, pixel = at % units * together;
            if (filter < filters && pixel < left)
                act(staging + filter * pitch + pixel, y + (static_cast<Offset<Problem>>(filter) * pixels + pixel));
        }
    }
    // The sums from `first` on of `columns` columns of a segment, from `begin` on; of the filters of the group from k on.
    template <int first, int columns, int count>
    __device__ __forceinline__ void store(const float (&sums)[count], T* y, int tile, int segment, int begin, int k) const {
        constexpr int width = gcd(columns, 64), units = width / together;
        const int filters = min(16, Problem::group_k - k), filter = Tiles::group(tile) * Problem::group_k + k;
        const int from = Tiles::first_pixel(tile, segment), exist = min(pixels - from, Tiles::step) - begin;
        Term<Problem> terms[2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
            terms[half] = term_of<Problem>(bias, filter + lane / 4 + 8 * half, lane / 4 + 8 * half < filters);
        T* const to = y + ((static_cast<int64>(Tiles::image(tile, segment)) * Problem::k + filter) * pixels + from + begin);
#pragma unroll
        for (int column = 0; column < columns; column += width) {
            const int left = exist - column;
            if (left <= 0) break;
            __syncwarp();  // the pixels before have been read
            if constexpr (adds<Problem>) {
                for_units<units>(to + column, filters, left, [&](T* shared, const T* at) {
                    if constexpr (Problem::add && words == 0) {
                        *shared = load_read_only(residual_of(bias, at));
                    } else if constexpr (Problem::add) {
                        unsigned held[words];
                        load_residual<Problem>(held, bias, at);
#pragma unroll
                        for (int i = 0; i < words; ++i) reinterpret_cast<unsigned*>(shared)[i] = held[i];
                    } else {
                        copy_unit(shared, at);
                    }
                });
                __syncwarp();
            }
#pragma unroll
            for (int i = 0; i < width / 4; ++i) {
                const int half = i % 2;
                unsigned* const pair =
                    reinterpret_cast<unsigned*>(staging + (lane / 4 + 8 * half) * pitch + i / 2 * 8 + lane % 4 * 2);
                const unsigned residual = adds<Problem> ? *pair : 0;
                float v[2];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float held = adds<Problem> ? to_float(T{static_cast<unsigned short>(residual >> 16 * j)}) : 0.0f;
                    v[j] = finish<Problem>(sums[first + column / 2 + 2 * i + j], terms[half], held);
                }
                *pair = rounded_pair(T{}, v);
            }
            __syncwarp();
            for_units<units>(to + column, filters, left, [](const T* shared, T* at) { copy_unit(at, shared); });
        }
    }
};

}  // namespace leanconv
