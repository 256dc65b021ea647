// Words of four 8-bit integers where four does not divide a filter's channels (a first layer has three): bytes are loaded
// into registers and made into words there, and a tap's last word ends with zeros.
#pragma once

#include <kernels/simt/tile_loader.cuh>

namespace leanconv {

// ImageNHWC for loose words: a pixel has channel_bytes, of which a group has group_bytes.
template <class Problem>
struct ImageLoose {
    using B = Bytes<Problem>;
    static constexpr bool checked = true;
    static constexpr int run = Problem::group_c;  // words of a tap
    static __device__ __forceinline__ B first(const Pixel<Problem>& pixel, const Window<Problem>& window, int group) {
        return ((static_cast<B>(pixel.n) * Problem::h + window.h) * Problem::w + window.w) * Problem::channel_bytes +
            group * Problem::group_bytes;
    }
    static __device__ __forceinline__ B tap(int number, int in_run) {
        const int r = number / Problem::s, s = number % Problem::s;
        const B pixel = static_cast<B>(r) * Problem::dilation_h * Problem::w + s * Problem::dilation_w;
        return pixel * Problem::channel_bytes + 4 * in_run;
    }
};

// The counterpart of FilterLoader, whose places in shared memory it has.
template <class Problem, class Tuning, bool interleaved>
struct LooseFilterLoader {
    static constexpr int threads = Tiling<Tuning>::threads;
    static constexpr int depth = Tuning::tile_reduction;
    static constexpr int columns = gcd(depth, 16);
    static constexpr int per_pass = threads / columns;
    static constexpr int passes = ceil_div(Tuning::tile_k, per_pass);
    static constexpr int pitch = filter_pitch<Tuning>;
    static constexpr int stage_floats = depth * pitch;
    static constexpr int filter_bytes = Problem::r * Problem::s * Problem::group_bytes;
    static_assert(depth == columns, "a thread has one reduction index of a step");
    using T = typename Problem::filter;

    const T* w;
    int row, slot, first_k, next, group;
    LooseHeld<Problem, 1, passes> held;

    // Starts at reduction step `first_step`.
    __device__ __forceinline__ LooseFilterLoader(const T* filters, int group, int tile, int first_step)
        : w(filters), row(threadIdx.x % columns), slot(threadIdx.x / columns), first_k(tile * Tuning::tile_k),
          next(first_step * depth), group(group) {}

    __device__ __forceinline__ bool has(int pass) const {
        return Tuning::tile_k % per_pass == 0 || slot + pass * per_pass < Tuning::tile_k;
    }

    // Bring the next reduction step into registers.
    __device__ __forceinline__ void load(float*) {
        const int index = next + row, in_tap = index % Problem::group_c;
        const int element = index / Problem::group_c * Problem::group_bytes + 4 * in_tap;
        const bool real = index < Reduction<Problem>::size;
#pragma unroll
        for (int i = 0; i < passes; ++i) {
            // NOTE: filters past the end repeat the last one; what they compute is never stored.
            int k = first_k + position_of<Tiling<Tuning>::lanes_k, interleaved>(slot + i * per_pass);
            if (k >= Problem::group_k) k = Problem::group_k - 1;
            const auto filter = static_cast<Bytes<Problem>>(group) * Problem::group_k + k;
            held.elements[0][i].load(at_byte(w, filter * filter_bytes + element), real && has(i), in_tap);
        }
        next += depth;
    }

    // Put what was brought last into `stage`.
    __device__ __forceinline__ void store(float* stage) const {
#pragma unroll
        for (int i = 0; i < passes; ++i)
            if (has(i)) stage[row * pitch + slot + i * per_pass] = held.elements[0][i].value();
    }
};

}  // namespace leanconv
