// im2win and im2win_fused without vector loads: shared memory is read in words of 32 bits, and runs arrive pixel by pixel.
#pragma once

#define load_fragments load_fragments_of_calls
#include <kernels/simt/tile.cuh>
#undef load_fragments

namespace leanconv {

template <int step, int count>
__device__ __forceinline__ void load_fragments(float (&fragment)[count], const float* row) {
#pragma unroll
    for (int i = 0; i < count; ++i) fragment[i] = *static_cast<const volatile float*>(row + i / 4 * step + i % 4);
}

template <class Tuning>
struct OneByOne : Tuning {};

template <class Problem, class Tuning>
struct Runs;
// As that of calls where rows are no multiple of four long.
template <class Problem, class Tuning>
struct Runs<Problem, OneByOne<Tuning>> {
    static constexpr int fragments = Tuning::tile_pixels / 4;
    static constexpr int lines = Tuning::tile_reduction / Problem::s;
    static constexpr bool vector = false;
    static constexpr int shift = 0;
    static constexpr int length = 3 * Problem::stride_w + (Problem::s - 1) * Problem::dilation_w + 1;
    static constexpr int chunks = (length + 3) / 4;
    static constexpr int line_floats = chunks * fragments * 4;
    static constexpr int stage_floats = lines * line_floats;
};

}  // namespace leanconv

#include <kernels/papers/im2win.cuh>
#define im2win_fused im2win_fused_of_calls
#include <kernels/simt/im2win_fused.cuh>
#undef im2win_fused

namespace leanconv {

template <class Problem, class Tuning>
__device__ __forceinline__ void im2win_fused(const float* __restrict__ x, const float* __restrict__ w,
                                             BiasIn<Problem> bias, float* __restrict__ y, long long batch) {
    im2win_fused_of_calls<Problem, OneByOne<Tuning>>(x, w, bias, y, batch);
}

}  // namespace leanconv
