// Index arithmetic that kernels share. Divisors are compile-time constants: a division is a multiply and a shift.
#pragma once

namespace leanconv {

using int64 = long long;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }

// Whether one of `outputs` neighbouring outputs of an axis reads place `at` of the window that they share.
__host__ __device__ constexpr bool reads_place(int at, int outputs, int taps, int stride, int dilation) {
    for (int tap = 0; tap < taps; ++tap) {
        const int from = at - tap * dilation;
        if (from >= 0 && from % stride == 0 && from / stride < outputs) return true;
    }
    return false;
}

template <bool condition, class A, class B> struct Select { using type = A; };
template <class A, class B> struct Select<false, A, B> { using type = B; };
template <class...> using Void = void;

// The slices of a layer: of its filters, of its input and output, and of the phases of a gradient. The constants of a layer
// of images have none of these: its images are volumes of one slice, and so are its filters.
template <class Problem, class = void>
struct FilterDepth {
    static constexpr bool volume = false;
    static constexpr int t = 1;
};
template <class Problem>
struct FilterDepth<Problem, Void<decltype(Problem::t)>> {
    static constexpr bool volume = true;
    static constexpr int t = Problem::t;
};
template <class Problem, class = void>
struct Depth {
    static constexpr bool volume = false;
    static constexpr int d = 1, t = 1, z = 1, stride = 1, pad = 0, dilation = 1;
};
template <class Problem>
struct Depth<Problem, Void<decltype(Problem::d)>> {
    static constexpr bool volume = true;
    static constexpr int d = Problem::d, t = Problem::t, z = Problem::z, stride = Problem::stride_d, pad = Problem::pad_front,
                         dilation = Problem::dilation_d;
};
template <class Problem, class = void>
struct DepthPhases {
    static constexpr int out = 1, first = 0, step = 1, count = 1, phase_step = 1;
};
template <class Problem>
struct DepthPhases<Problem, Void<decltype(Problem::phases_d)>> {
    static constexpr int out = Problem::out_d, first = Problem::first_z, step = Problem::step_z, count = Problem::phases_d,
                         phase_step = Problem::phase_step_d;
};
// Rows of a filter, of all its slices, and taps; pixels of an input, rows and pixels of an output, of all slices.
template <class Problem> constexpr int filter_rows = FilterDepth<Problem>::t * Problem::r;
template <class Problem> constexpr int filter_taps = filter_rows<Problem> * Problem::s;
template <class Problem> constexpr int input_pixels = Depth<Problem>::d * Problem::h * Problem::w;
template <class Problem> constexpr int output_rows = Depth<Problem>::z * Problem::p;
template <class Problem> constexpr int output_pixels = Depth<Problem>::z * Problem::p * Problem::q;

// Numbers of pixels and elements, and offsets in bytes. A problem whose largest tensor stays under 4 GiB counts bytes
// in 32 unsigned bits: one register and one addition, and the load adds the tensor's base by itself.
template <class Problem> using Offset = typename Select<Problem::wide, int64, int>::type;
template <class Problem> using Bytes = typename Select<Problem::wide, int64, unsigned>::type;

template <class T, class B>
__device__ __forceinline__ const T* at_byte(const T* base, B bytes) {
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(base) + bytes);
}

// How far apart neighbours lie in a tensor of `channels` channels of `pixels` pixels, in elements: pixels of a row,
// channels of a pixel, images. Constants after inlining, but in CHWN, where the batch is a factor of most of them.
template <class Problem, int channels, int pixels, class T>
struct Strides {
    T pixel, channel, image;
    __device__ __forceinline__ explicit Strides(long long batch)
        : pixel(Problem::nhwc ? channels : Problem::chwn ? static_cast<T>(batch) : 1),
          channel(Problem::nhwc ? 1 : Problem::chwn ? static_cast<T>(batch) * pixels : pixels),
          image(Problem::chwn ? 1 : static_cast<T>(channels) * pixels) {}
};
template <class Problem>
using InputStrides = Strides<Problem, Problem::c, input_pixels<Problem>, Bytes<Problem>>;
template <class Problem>
using OutputStrides = Strides<Problem, Problem::k, output_pixels<Problem>, Offset<Problem>>;

// CHWN: four neighbouring images are one copy, or one store.
template <class Problem> constexpr bool images_in_fours = Problem::chwn && Problem::vector_store;

// A tap of the filter by its number, and how many pixels of the input lie between it and the first.
template <class Problem>
struct FilterTap {
    using D = Depth<Problem>;
    int t = 0, r, s;
    __device__ __forceinline__ explicit FilterTap(int number) : r(number / Problem::s), s(number % Problem::s) {
        if constexpr (D::volume) t = r / Problem::r, r %= Problem::r;
    }
    template <class T>
    __device__ __forceinline__ T pixels() const {
        T rows = static_cast<T>(r) * Problem::dilation_h;
        if constexpr (D::volume) rows += static_cast<T>(t) * D::dilation * Problem::h;
        return rows * Problem::w + s * Problem::dilation_w;
    }
};

// What only volumes have to store; of images it is 0. `slice`: of an output, or where a window begins.
template <bool volume>
struct SliceOf {
    static constexpr int slice = 0;
};
template <>
struct SliceOf<true> {
    int slice;
};

// An output position (n, z, p, q) from its number in the order of a tensor of one channel: n-z-p-q, in CHWN p-q-n. z is
// `slice`.
template <class Problem>
struct Pixel : SliceOf<Depth<Problem>::volume> {
    Offset<Problem> n;
    int p, q;
    __device__ __forceinline__ Pixel(Offset<Problem> number, long long batch) {
        int rest;
        if constexpr (Problem::chwn) {
            rest = static_cast<int>(number / static_cast<Offset<Problem>>(batch));
            n = number - rest * static_cast<Offset<Problem>>(batch);
        } else {
            n = number / output_pixels<Problem>;
            rest = static_cast<int>(number - n * output_pixels<Problem>);
        }
        if constexpr (Depth<Problem>::volume) {
            this->slice = rest / (Problem::p * Problem::q);
            rest -= this->slice * (Problem::p * Problem::q);
        }
        p = rest / Problem::q;
        q = rest % Problem::q;
    }
};

// Which outputs a block of a tiled kernel computes. A launch may write only some pixels of its output images: its p x q outputs lie
// in rows first_p, first_p + step_p, ... and columns first_q, first_q + step_q, ... of images of out_h x out_w.
//
// It may also serve phases_h x phases_w such phases at once, which differ in where they begin and in their filters, all
// of them with p x q outputs, of which those outside the image are not stored. Phase i begins `phase_step * i` rows
// below the first: as many whole steps as that makes move its windows instead. Volumes have phases of slices as well.
template <bool volume>
struct PhaseSlices {
    static constexpr int pad_front = 0, first_z = 0;
};
template <>
struct PhaseSlices<true> {
    int pad_front, first_z;
};
template <class Problem>
struct Phase : PhaseSlices<Depth<Problem>::volume> {
    using D = DepthPhases<Problem>;
    static constexpr int count = D::count * Problem::phases_h * Problem::phases_w;
    static constexpr bool whole = count == 1 && D::out == Depth<Problem>::z && Problem::out_h == Problem::p &&
                                  Problem::out_w == Problem::q;
    int number, pad_top, pad_left, first_p, first_q;

    __device__ __forceinline__ explicit Phase(int number)
        : number(number), pad_top(Problem::pad_top), pad_left(Problem::pad_left), first_p(Problem::first_p),
          first_q(Problem::first_q) {
        int of_slice = number;
        if constexpr (Depth<Problem>::volume) {
            constexpr int of_each = Problem::phases_h * Problem::phases_w;
            const int slice = D::first + number / of_each * D::phase_step;
            of_slice %= of_each;
            this->pad_front = Depth<Problem>::pad + (D::count > 1 ? slice / D::step : 0);
            this->first_z = D::count > 1 ? slice % D::step : D::first;
        }
        if constexpr (count > 1) {
            const int row = first_p + of_slice / Problem::phases_w * Problem::phase_step_h;
            const int column = first_q + number % Problem::phases_w * Problem::phase_step_w;
            pad_top += row / Problem::step_p, first_p = row % Problem::step_p;
            pad_left += column / Problem::step_q, first_q = column % Problem::step_q;
        }
    }
};

// Where an output pixel lies, counted in elements of the first filter of an NCHW or CHWN tensor, in pixels of an NHWC
// tensor; and how many of four from there on are adjacent outputs that exist.
struct Place {
    int64 offset;
    int count;
};

// Pixels numbered as they lie in memory.
template <class Problem>
struct FlatPixels {
    using P = Phase<Problem>;
    P phase;
    long long batch;
    Offset<Problem> count;

    __device__ __forceinline__ FlatPixels(long long batch, const P& phase)
        : phase(phase), batch(batch), count(static_cast<Offset<Problem>>(batch) * output_pixels<Problem>) {}

    // NOTE: pixels past the end repeat the last one, or four of them; what is computed from them is never stored.
    __device__ __forceinline__ Pixel<Problem> pixel(Offset<Problem> number) const {
        return Pixel<Problem>(number < count ? number : count - (images_in_fours<Problem> ? 4 : 1), batch);
    }

    __device__ __forceinline__ Place place(Offset<Problem> pixel) const {
        constexpr int image = P::D::out * Problem::out_h * Problem::out_w;
        if constexpr (P::whole && (Problem::chwn || Problem::nhwc)) {
            return {pixel, pixel < count ? 4 : 0};
        } else if constexpr (P::whole) {
            const Offset<Problem> n = pixel / image;
            return {static_cast<int64>(n) * Problem::k * image + (pixel - n * image), pixel < count ? 4 : 0};
        } else {
            const Pixel<Problem> at(pixel, batch);
            const int row = phase.first_p + at.p * Problem::step_p, column = phase.first_q + at.q * Problem::step_q;
            const bool inside = P::count == 1 || (row < Problem::out_h && column < Problem::out_w);
            const int64 in_image = static_cast<int64>(row) * Problem::out_w + column;
            const int64 offset = Problem::chwn
                ? in_image * batch + at.n
                : static_cast<int64>(at.n) * (Problem::nhwc ? 1 : Problem::k) * image + in_image;
            if constexpr (!Depth<Problem>::volume) return {offset, pixel < count && inside ? 4 : 0};
            const int slice = phase.first_z + at.slice * P::D::step;
            const bool in_volume = inside && (P::count == 1 || slice < P::D::out);
            const int64 of_slice = static_cast<int64>(slice) * (Problem::out_h * Problem::out_w);
            return {offset + of_slice, pixel < count && in_volume ? 4 : 0};
        }
    }
};

}  // namespace leanconv
