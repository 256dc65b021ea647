// The gradient of a strided layer's input, in one launch: pixels of the input fall into phases, and each phase has taps of its own.
//
// Along an axis of stride s, tap r reads pixel s * i + phase, where r - pad = s * shift + phase, for output i + shift. So that
// pixel's gradient takes output i of the phase's order shifted by -shift. All phases read the same outputs' gradients, which are
// resident once; each has sums of its own. Packed filters have the taps of the first phase first.
#pragma once

#include <kernels/hopper_native/linear_pixels.cuh>

namespace leanconv {

// Where there is one phase, its taps are in the order of the filters.
template <class Problem, class = void>
struct GradientPhases {
    static constexpr int count = 1, taps = Problem::r * Problem::s;
    static __host__ __device__ constexpr int place(int tap) { return tap; }
    static __host__ __device__ constexpr int row(int tap) { return tap / Problem::s; }
    static __host__ __device__ constexpr int column(int tap) { return tap % Problem::s; }
};
// `Problem` is a convolution of unit stride that reads what all phases read; its phases_h and phases_w are the layer's stride.
template <class Problem>
struct GradientPhases<Problem, Void<decltype(Problem::layer_top)>> {
    static constexpr int layer_r = Problem::layer_r, layer_s = Problem::layer_s;
    using AxisH = TapAxis<layer_r, Problem::phases_h, 1, Problem::layer_top>;
    using AxisW = TapAxis<layer_s, Problem::phases_w, 1, Problem::layer_left>;
    static constexpr int count = Problem::phases_h * Problem::phases_w, taps = layer_r * layer_s;
    static_assert(AxisH::phases() == Problem::phases_h && AxisW::phases() == Problem::phases_w, "each phase has taps");

    template <class Axis>
    static __host__ __device__ constexpr int taps_of(int phase, int taps, int stride) {
        return (taps - 1 - Axis::first_tap(phase)) / stride + 1;
    }
    static __host__ __device__ constexpr int rows(int phase_h) { return taps_of<AxisH>(phase_h, layer_r, Problem::phases_h); }
    static __host__ __device__ constexpr int columns(int phase_w) { return taps_of<AxisW>(phase_w, layer_s, Problem::phases_w); }
    // How many taps the phases before have.
    static __host__ __device__ constexpr int begin(int phase) {
        int before = 0;
        for (int i = 0; i < phase; ++i) before += rows(i / Problem::phases_w) * columns(i % Problem::phases_w);
        return before;
    }
    // The phase whose tap comes at a place, and that tap of the layer.
    static __host__ __device__ constexpr int phase(int place) {
        int phase = 0;
        for (int i = 1; i < count; ++i) phase += place >= begin(i);
        return phase;
    }
    static __host__ __device__ constexpr int tap(int place) {
        const int phase_h = phase(place) / Problem::phases_w, phase_w = phase(place) % Problem::phases_w;
        const int number = place - begin(phase(place));
        const int r = AxisH::first_tap(phase_h) + number / columns(phase_w) * Problem::phases_h;
        return r * layer_s + AxisW::first_tap(phase_w) + number % columns(phase_w) * Problem::phases_w;
    }
    // Of a tap of the layer: its place among packed filters, and the row and column of `Problem` that it reads.
    static __host__ __device__ constexpr int place(int tap) {
        const int r = tap / layer_s, s = tap % layer_s, phase_h = AxisH::phase(r), phase_w = AxisW::phase(s);
        return begin(phase_h * Problem::phases_w + phase_w) + r / Problem::phases_h * columns(phase_w) + s / Problem::phases_w;
    }
    static __host__ __device__ constexpr int row(int tap) { return AxisH::shift(layer_r - 1) - AxisH::shift(tap / layer_s); }
    static __host__ __device__ constexpr int column(int tap) { return AxisW::shift(layer_s - 1) - AxisW::shift(tap % layer_s); }
};

// A tap by its place among packed filters: of several phases a constant, as its phase says which sums it adds to.
template <class Phases, int number>
struct PhaseTap {
    static constexpr int place = number, phase = Phases::phase(number), of_layer = Phases::tap(number);
    static constexpr bool first = number == Phases::begin(phase);  // of its phase
    static constexpr int phase_before = (phase + Phases::count - 1) % Phases::count;
};
struct OnlyPhaseTap {
    int place, of_layer;
    bool first;
    static constexpr int phase = 0, phase_before = 0;
    __device__ __forceinline__ explicit OnlyPhaseTap(int tap) : place(tap), of_layer(tap), first(tap == 0) {}
};

}  // namespace leanconv
