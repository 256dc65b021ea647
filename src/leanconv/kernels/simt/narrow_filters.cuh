// The loader of filters of 16-bit elements that lie along the reduction: the counterpart of FilterLoader.
#pragma once

#include <device/element.cuh>
#include <kernels/simt/tile_loader.cuh>

namespace leanconv {

// A thread brings `at_once` adjacent elements of four neighbouring filters into registers and turns them around there,
// so that each row of shared memory takes four floats in one store.
template <class Problem, class Tuning, bool interleaved>
struct NarrowFilterLoader {
    using T = typename Problem::element;
    static constexpr int threads = Tiling<Tuning>::threads;
    static constexpr int depth = Tuning::tile_reduction;
    static constexpr int size = Reduction<Problem>::size;
    static constexpr int pitch = filter_pitch<Tuning>;
    static constexpr int stage_floats = depth * pitch;
    static constexpr int fours = Tuning::tile_k / 4;
    // Whether most threads have something to load, or half of the warps, four by four: as many for each scheduler.
    template <int count>
    static constexpr bool occupies = count * 4 >= threads * 3 || (count % 128 == 0 && count * 2 >= threads);
    template <int count>
    static constexpr bool serves = size % count == 0 && Problem::first_weight % count == 0 && depth % count == 0 &&
                                   occupies<fours * depth / count>;
    // As many as lie aligned in every filter.
    static constexpr int at_once = serves<4> ? 4 : serves<2> ? 2 : 1;
    static constexpr int columns = depth / at_once;    // threads along the reduction
    static constexpr int pieces = fours * columns;     // of at_once x 4 elements
    static constexpr int passes = ceil_div(pieces, threads);
    static constexpr int per_pass = threads / columns * 4;  // filters
    // NOTE: eight threads that store together write `near` pieces of four filters side by side, so that their 128 bits
    // fall into different banks: rows begin four banks apart.
    static constexpr int near = gcd(columns, 8 / at_once);
    static_assert(threads % 8 == 0 && threads / 8 % (columns / near) == 0, "a thread keeps its column in every pass");
    // Whole tiles of filters lie at a constant stride; otherwise the last ones repeat.
    static constexpr bool regular = Problem::group_k % Tuning::tile_k == 0 && !interleaved;
    using B = Bytes<Problem>;

    const T* w;
    B offset;  // of this thread's first filter where they are regular, of the group's otherwise; in bytes
    int row, slot;
    int first_k, next;
    Packed<T, at_once> held[passes][4];

    // Starts at reduction step `first_step`.
    __device__ __forceinline__ NarrowFilterLoader(const T* filters, int group, int tile, int first_step)
        : w(filters), first_k(tile * Tuning::tile_k), next(first_step * depth) {
        const int eighth = threadIdx.x % 8, octet = threadIdx.x / 8;
        row = (eighth % near + octet % (columns / near) * near) * at_once;
        slot = (eighth / near + octet / (columns / near) * (8 / near)) * 4;
        const int k = regular ? first_k + slot : 0;
        offset = ((static_cast<B>(group) * Problem::group_k + k) * size + next + row) * item<Problem>;
    }

    __device__ __forceinline__ bool has(int pass) const {
        return Tuning::tile_k % per_pass == 0 || slot + pass * per_pass < Tuning::tile_k;
    }

    // Bring the next reduction step into registers.
    __device__ __forceinline__ void load(float*) {
        const bool real = size % depth == 0 || next + row < size;
#pragma unroll
        for (int pass = 0; pass < passes; ++pass)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int filter = pass * per_pass + i;
                const T* from = at_byte(w, offset) + static_cast<int64>(filter) * size;
                if constexpr (!regular) {
                    // NOTE: filters past the end repeat the last one; what they compute is never stored.
                    int k = first_k + position_of<Tiling<Tuning>::lanes_k, interleaved>(slot + filter);
                    if (k >= Problem::group_k) k = Problem::group_k - 1;
                    from = at_byte(w, offset + static_cast<B>(k) * (size * item<Problem>));
                }
                held[pass][i].load(from, real && has(pass));
            }
        offset += depth * item<Problem>;
        next += depth;
    }

    // Put what was brought last into `stage`.
    __device__ __forceinline__ void store(float* stage) const {
#pragma unroll
        for (int pass = 0; pass < passes; ++pass)
#pragma unroll
            for (int e = 0; e < at_once; ++e) {
                const auto& four = held[pass];
                const float v[4] = {four[0].value(e), four[1].value(e), four[2].value(e), four[3].value(e)};
                if (has(pass)) store_vector(stage + (row + e) * pitch + slot + pass * per_pass, v);
            }
    }
};

}  // namespace leanconv
