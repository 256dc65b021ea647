// Loaders of filters: they bring one reduction step of the filter matrix into shared memory, a row a reduction index.
#pragma once

#include <device/element.cuh>
#include <kernels/simt/pixel_loader.cuh>

namespace leanconv {

// Where reduction index `index` of a filter lies in memory. Natural order is memory order; window order runs down the
// columns of the window, as the im2win tensor does: (c, s, r) in NCHW, (s, r, c) in NHWC.
template <class Problem, bool window_order>
__device__ __forceinline__ int filter_element(int index) {
    if constexpr (!window_order) return index;
    constexpr int taps = Reduction<Problem>::taps;
    const int tap = Problem::nhwc ? index / Problem::group_c : index % taps;
    const int natural = tap % Problem::r * Problem::s + tap / Problem::r;
    return Problem::nhwc ? natural * Problem::group_c + index % Problem::group_c : index - tap + natural;
}

// Floats from one reduction index of a tile of filters to the next in shared memory. The padding makes the rows that a
// warp writes at once fall into different banks, as far as they can.
template <class Tuning>
constexpr int filter_pitch = Tuning::tile_k + (gcd(Tuning::tile_reduction, 16) == 4 ? 8 : 4);

// Filters lie along the reduction: `columns` neighbouring lanes read adjacent floats and scatter them over rows.
// NOTE: sixteen columns read twice as fast as eight, and a warp's whole run of twelve or twenty is slower than four:
// either the reads touch more lines or the writes conflict in the banks.
// Explored (H200, 3a4ef04): 47 against 44 TFLOP/s.
template <class Problem, class Tuning, bool interleaved, bool window_order = false>
struct FilterLoader {
    static constexpr int threads = Tiling<Tuning>::threads;
    static constexpr int depth = Tuning::tile_reduction;
    static constexpr int columns = gcd(depth, 16);
    static constexpr int per_pass = threads / columns;
    static constexpr int passes = ceil_div(Tuning::tile_k, per_pass);
    static constexpr int pitch = filter_pitch<Tuning>;
    static constexpr int stage_floats = depth * pitch;
    using T = typename Problem::filter;
    using B = Bytes<Problem>;
    // Whole tiles of filters lie at a constant stride; otherwise the last ones repeat.
    static constexpr bool regular = Problem::group_k % Tuning::tile_k == 0 && !interleaved && !loose<T>;
    static constexpr bool decoded = window_order || loose<T>;  // indices are not memory order
    static constexpr int filter_bytes = Reduction<Problem>::taps * Units<Problem>::group * Units<Problem>::bytes_each;
    static_assert(sizeof(T) == 4, "NarrowFilterLoader loads elements of 16 bits");

    const T* w;
    B offset;  // of this thread's first filter where they are regular, of the group's otherwise; in bytes
    int row, slot;
    int first_k, next;
    Held<Problem, 1, depth / columns, passes> held;

    __device__ __forceinline__ FilterLoader(const T* filters, int group, int tile, int first_step)
        : w(filters), row(threadIdx.x % columns), slot(threadIdx.x / columns), first_k(tile * Tuning::tile_k),
          next(first_step * depth) {
        const int k = regular ? first_k + slot : 0;
        offset = (static_cast<B>(group) * Problem::group_k + k) * filter_bytes;
        if constexpr (!decoded) offset += (next + row) * item<Problem>;
    }

    __device__ __forceinline__ bool has(int pass) const {
        return Tuning::tile_k % per_pass == 0 || slot + pass * per_pass < Tuning::tile_k;
    }

    __device__ __forceinline__ void load(float* stage) {
        constexpr int size = Reduction<Problem>::size;
#pragma unroll
        for (int at = 0; at < depth; at += columns) {
            const int index = next + row + at;
            // A constant distance is best added to the pointer: the copy takes it as part of its address.
            constexpr int apart = decoded ? 0 : 1;
            B element = offset;
            if constexpr (loose<T>)
                element += index / Problem::group_c * Units<Problem>::group + index % Problem::group_c * item<Problem>;
            else if constexpr (window_order)
                element += filter_element<Problem, window_order>(index) * item<Problem>;
#pragma unroll
            for (int i = 0; i < passes; ++i) {
                const int filter = slot + i * per_pass;
                if (!has(i)) continue;
                const T* from = at_byte(w, element) + apart * at + static_cast<int64>(i) * per_pass * size;
                if constexpr (!regular) {
                    // NOTE: filters past the end repeat the last one; what they compute is never stored.
                    int k = first_k + position_of<Tiling<Tuning>::lanes_k, interleaved>(filter);
                    if (k >= Problem::group_k) k = Problem::group_k - 1;
                    from = at_byte(w, element + static_cast<B>(k) * filter_bytes) + apart * at;
                }
                held.load(at / columns, i, stage + (row + at) * pitch + filter, from,
                          size % depth == 0 || index < size, index % Problem::group_c);
            }
        }
        if constexpr (!decoded) offset += depth * item<Problem>;
        next += depth;
    }

    __device__ __forceinline__ void store(float* stage) const {
#pragma unroll
        for (int at = 0; at < depth; at += columns)
#pragma unroll
            for (int i = 0; i < passes; ++i)
                if (has(i)) held.store(at / columns, i, stage + (row + at) * pitch + slot + i * per_pass);
    }
};

// CHWN: a row of the filter matrix, one reduction index of all filters, is one run in memory. A thread copies four
// filters of some rows at once, or one where four would straddle the end of a group.
template <class Problem, class Tuning>
struct FilterLoaderAcross {
    static constexpr int threads = Tiling<Tuning>::threads;
    static constexpr int depth = Tuning::tile_reduction;
    static constexpr int pitch = filter_pitch<Tuning>;
    static constexpr int stage_floats = depth * pitch;
    static constexpr int at_once = Problem::k % 4 == 0 && Problem::group_k % 4 == 0 ? 4 : 1;
    static constexpr int columns = gcd(Tuning::tile_k / at_once, threads);  // threads side by side on a row
    static constexpr int pieces = Tuning::tile_k / at_once / columns;       // of a thread on a row
    static constexpr int per_pass = threads / columns;                      // rows
    using T = typename Problem::element;
    using B = Bytes<Problem>;

    const T* w;
    B offset;  // of this thread's first filter in its first row of the next step, in bytes
    int column, row, first_k, next;
    Held<Problem, at_once, ceil_div(depth, per_pass), pieces> held;

    __device__ __forceinline__ FilterLoaderAcross(const T* filters, int group, int tile, int first_step)
        : w(filters), column(threadIdx.x % columns * at_once), row(threadIdx.x / columns),
          first_k(tile * Tuning::tile_k), next(first_step * depth) {
        offset = (static_cast<B>(next + row) * Problem::k + group * Problem::group_k + first_k + column) *
            item<Problem>;
    }

    // Bring the next reduction step into `stage`. Filters past the end are zeros, and never stored.
    __device__ __forceinline__ void load(float* stage) {
        constexpr int size = Reduction<Problem>::size;
#pragma unroll
        for (int i = 0; i < depth; i += per_pass) {
            if (depth % per_pass != 0 && row + i >= depth) break;
#pragma unroll
            for (int j = 0; j < pieces; ++j) {
                const int k = column + j * columns * at_once;
                const bool exists = (size % depth == 0 || next + row + i < size) &&
                    (Problem::group_k % Tuning::tile_k == 0 || first_k + k < Problem::group_k);
                const T* const from =
                    at_byte(w, offset) + static_cast<int64>(i) * Problem::k + j * columns * at_once;
                held.load(i / per_pass, j, stage + (row + i) * pitch + k, from, exists);
            }
        }
        offset += static_cast<B>(depth) * Problem::k * item<Problem>;
        next += depth;
    }

    __device__ __forceinline__ void store(float* stage) const {
#pragma unroll
        for (int i = 0; i < depth; i += per_pass) {
            if (depth % per_pass != 0 && row + i >= depth) break;
#pragma unroll
            for (int j = 0; j < pieces; ++j)
                held.store(i / per_pass, j, stage + (row + i) * pitch + column + j * columns * at_once);
        }
    }
};

// FilterLoader for elements of 16 bits. A thread brings `at_once` adjacent elements of four neighbouring filters into
// registers and transposes them there, so that each row of shared memory takes four floats in one store.
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
