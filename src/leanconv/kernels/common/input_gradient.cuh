// What goes with the convolutions that make the gradient of a layer's input (kernels/common/input_gradient.py): their
// filters, and zeros for the pixels that no filter tap falls on. Bytes: the filters read and written once, where each element
// takes part in N * P * Q FMAs; those pixels written once.
#pragma once

#include <device/epilogue.cuh>  // a type in Problem
#include <device/element.cuh>
#include <device/index.cuh>
#include <device/ptx/arithmetic.cuh>
#include <device/ptx/memory.cuh>

namespace leanconv {

// How the taps of one axis are assigned to phases: tap t belongs to phase t % apart, whose taps count from the last one,
// because the gradient runs through the filter backwards. Phases with one tap more come first.
template <int taps, int apart>
struct TapPhases {
    static constexpr int more = taps % apart, fewer_taps = taps / apart;
    int of_each;  // taps of each phase that is like this tap's
    int before;   // taps of all phases with more
    int all;      // taps of all phases like this one
    int phase;    // number among those
    int phases;   // how many they are
    int position;
    __device__ __forceinline__ explicit TapPhases(int tap) {
        const int number = tap % apart;
        const bool first = number < more;
        of_each = first ? fewer_taps + 1 : fewer_taps;
        before = first ? 0 : more * (fewer_taps + 1);
        phase = first ? number : number - more;
        phases = first ? more : apart - more;
        all = phases * of_each;
        position = of_each - 1 - tap / apart;
    }
};

// Writes the filters of all convolutions: for each its phases, for each phase one filter an input channel, in the order
// in which forward filters lie in memory. A block transposes a square of filters and their elements in shared memory,
// so that reads are adjacent in every layout, and writes in NHWC and CHWN. Elements are those of w, but in CHWN, where
// neighbouring filters are adjacent in it and neighbouring channels in what is written, counted as in NHWC. With `rounded`
// float32 is rounded to TF32.
template <class Problem, class Tuning>
__device__ __forceinline__ void gradient_filters(ElementsIn<Problem> w, ElementsOut<Problem> prepared) {
    constexpr int taps = filter_taps<Problem>, size = Problem::group_c * taps;
    constexpr int side = Tuning::side, rows = Tuning::threads / side, pitch = side + 1;
    constexpr int tiles_k = ceil_div(Problem::group_k, side), tiles_e = ceil_div(size, side);
    constexpr int64 filters = static_cast<int64>(Problem::groups) * Problem::group_k;
    constexpr int64 channels = static_cast<int64>(Problem::groups) * Problem::group_c;
    constexpr bool channels_inside = Problem::nhwc || Problem::chwn;
    static_assert(Tuning::threads % side == 0 && side % rows == 0, "a pass covers whole rows of a square");
    static_assert(size < 1 << 29, "the elements of a filter are counted in an int");

    auto* const square = reinterpret_cast<typename Problem::element*>(shared_memory());
    const int lane = threadIdx.x % side, row = threadIdx.x / side;
    const int first_e = blockIdx.x % tiles_e * side, first_k = blockIdx.x / tiles_e % tiles_k * side;
    const int group = blockIdx.x / tiles_e / tiles_k;
#pragma unroll
    for (int i = 0; i < side; i += rows) {
        const int k = first_k + (Problem::chwn ? lane : row + i), element = first_e + (Problem::chwn ? row + i : lane);
        const int64 filter = static_cast<int64>(group) * Problem::group_k + k;
        const int in_chwn = element % Problem::group_c * taps + element / Problem::group_c;
        const int64 at = Problem::chwn ? in_chwn * filters + filter : filter * size + element;
        if (k < Problem::group_k && element < size) square[(row + i) * pitch + lane] = w[at];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < side; i += rows) {
        const int k = first_k + (Problem::chwn ? row + i : lane), element = first_e + (Problem::chwn ? lane : row + i);
        if (k >= Problem::group_k || element >= size) continue;
        const int c = channels_inside ? element % Problem::group_c : element / taps;
        const int tap = channels_inside ? element / Problem::group_c : element % taps;
        const int of_rows = tap / Problem::s;
        const TapPhases<Problem::r, Problem::apart_h> down(FilterDepth<Problem>::volume ? of_rows % Problem::r : of_rows);
        const TapPhases<Problem::s, Problem::apart_w> right(tap % Problem::s);
        int here = down.of_each * right.of_each, at_tap = down.position * right.of_each + right.position;
        int before = down.before * Problem::s + down.all * right.before, phase = down.phase * right.phases + right.phase;
        if constexpr (FilterDepth<Problem>::volume) {
            const TapPhases<Problem::t, Problem::apart_d> deep(of_rows / Problem::r);
            at_tap += deep.position * here;
            here *= deep.of_each;
            phase += deep.phase * (down.phases * right.phases);
            before = deep.before * (Problem::r * Problem::s) + deep.all * before;
        }
        before += phase * here;
        const int64 channel = static_cast<int64>(group) * Problem::group_c + c;
        const int64 at = Problem::nhwc   ? (channel * here + at_tap) * Problem::group_k + k
                         : Problem::chwn ? (static_cast<int64>(k) * here + at_tap) * channels + channel
                                         : (channel * Problem::group_k + k) * here + at_tap;
        auto value = square[lane * pitch + row + i];
        if constexpr (Problem::rounded) value = __uint_as_float(cvt_rn_tf32_f32(value));
        prepared[Problem::first_weight + before * channels * Problem::group_k + at] = value;
    }
}

// Whether some tap of the filter reads pixel `at` of an axis for some output. `inverse` is that of
// dilation / gcd modulo stride / gcd.
template <int taps, int stride, int dilation, int pad, int inverse>
__device__ __forceinline__ bool is_covered(int at) {
    constexpr int common = gcd(stride, dilation), apart = stride / common;
    constexpr int moved = pad >= 0 ? pad : pad + ceil_div(-pad, stride) * stride;  // negative where pixels are left out
    const int rest = static_cast<int>((static_cast<int64>(at) + moved) % stride);
    return rest % common == 0 && static_cast<int64>(rest / common) * inverse % apart < taps;
}

// Where element `at` of dx is a pixel that no convolution writes.
template <class Problem>
__device__ __forceinline__ bool is_unwritten(int64 at, long long batch) {
    constexpr int image = input_pixels<Problem>;
    const Offset<Problem> element = static_cast<Offset<Problem>>(at);
    const auto images = static_cast<Offset<Problem>>(batch);
    const Offset<Problem> line = Problem::nhwc ? element / Problem::c : Problem::chwn ? element / images : element;
    const int pixel = static_cast<int>(line % image);
    const int row = pixel / Problem::w;
    bool covered = true;
    if constexpr (Depth<Problem>::volume) {
        using D = Depth<Problem>;
        covered = is_covered<D::t, D::stride, D::dilation, D::pad, Problem::inverse_d>(row / Problem::h);
    }
    covered = covered &&
        is_covered<Problem::r, Problem::stride_h, Problem::dilation_h, Problem::pad_top, Problem::inverse_h>(
            Depth<Problem>::volume ? row % Problem::h : row) &&
        is_covered<Problem::s, Problem::stride_w, Problem::dilation_w, Problem::pad_left, Problem::inverse_w>(
            pixel % Problem::w);
    return !covered;
}

// Writes zeros to the pixels that no convolution writes. A thread has an element, or `vector` neighbouring channels: 16 bytes.
template <class Problem, class Tuning>
__device__ __forceinline__ void gradient_zeros(ElementsOut<Problem> y, long long batch) {
    const int64 at = (static_cast<int64>(blockIdx.x) * Tuning::threads + threadIdx.x) * Tuning::vector;
    if (at >= batch * Problem::c * input_pixels<Problem> || !is_unwritten<Problem>(at, batch)) return;
    if constexpr (Tuning::vector > 1) *reinterpret_cast<uint4*>(y + at) = make_uint4(0, 0, 0, 0);
    else y[at] = from_float<typename Problem::element>(0.0f);
}

// The same with the bias of a transposed layer, a number for each channel.
template <class Problem, class Tuning>
__device__ __forceinline__ void gradient_zeros(ElementsIn<Problem> bias, ElementsOut<Problem> y, long long batch) {
    constexpr int image = input_pixels<Problem>;
    const int64 at = (static_cast<int64>(blockIdx.x) * Tuning::threads + threadIdx.x) * Tuning::vector;
    if (at >= batch * Problem::c * image || !is_unwritten<Problem>(at, batch)) return;
    const int64 channel = Problem::nhwc ? at : Problem::chwn ? at / (batch * image) : at / image;
    const auto* const from = bias + channel % Problem::c;
    if constexpr (Tuning::vector > 1) *reinterpret_cast<uint4*>(y + at) = *reinterpret_cast<const uint4*>(from);
    else y[at] = *from;
}

}  // namespace leanconv
