// From sums to the output tensor: y = activation(scale[k] * sum + bias[k] + residual); stores of four elements where rows
// allow them.
#pragma once

#include <device/element.cuh>
#include <device/index.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/sync.cuh>

namespace leanconv {

// Activations, by the names and formulas of torch.nn.functional. Each is a type, so that a layer has one as a constant.
// NOTE: all are written so that NaN stays NaN, as in PyTorch; fmaxf and fminf would turn it into a number.
struct Identity {
    template <class T> static __device__ __forceinline__ T of(T v) { return v; }
};
template <class T> constexpr bool identity = false;
template <> constexpr bool identity<Identity> = true;
struct Relu {
    template <class T> static __device__ __forceinline__ T of(T v) { return v < 0 ? 0 : v; }
};
struct Relu6 {
    template <class T> static __device__ __forceinline__ T of(T v) { return v < 0 ? T(0) : v > 6 ? T(6) : v; }
};
// What has a number has the bits of a float.
template <unsigned slope>
struct LeakyRelu {
    static __device__ __forceinline__ float of(float v) { return v < 0 ? v * __uint_as_float(slope) : v; }
};
template <unsigned alpha>
struct Elu {
    static __device__ __forceinline__ float of(float v) { return v < 0 ? __uint_as_float(alpha) * expm1f(v) : v; }
};
// Divided by __fdividef: `/` has a branch for each value, so that a warp computes one after the other. It is 0 below -87.3.
struct Sigmoid {
    static __device__ __forceinline__ float of(float v) { return __fdividef(1.0f, 1.0f + expf(-v)); }
};
struct Silu {
    static __device__ __forceinline__ float of(float v) { return __fdividef(v, 1.0f + expf(-v)); }
};
struct Tanh {
    static __device__ __forceinline__ float of(float v) { return tanhf(v); }
};
struct Hardswish {
    static __device__ __forceinline__ float of(float v) { return v * Relu6::of(v + 3.0f) * (1.0f / 6.0f); }
};
// v times the normal distribution's probability of a number below it.
struct Gelu {
    static __device__ __forceinline__ float of(float v) { return 0.5f * v * (1.0f + erff(v * 0.7071067811865475f)); }
};
struct GeluTanh {
    static __device__ __forceinline__ float of(float v) {
        return 0.5f * v * (1.0f + tanhf(0.7978845608028654f * (v + 0.044715f * v * v * v)));
    }
};

// The sum that the `split` blocks of a cluster have at `shared`, each in its own shared memory, added in the order of ranks.
template <int split>
__device__ __forceinline__ float cluster_sum(const float* shared) {
    float sum = cluster_load(shared, 0);
#pragma unroll
    for (int rank = 1; rank < split; ++rank) sum += cluster_load(shared, rank);
    return sum;
}

// What a layer reads beside x and w where that is more than a bias. It is a kernel's argument in place of the bias.
template <class Problem>
struct Epilogue {
    const typename Problem::result* bias;
    const float* scale;
    // bytes from an output to the residual that is added to it
    long long to_residual;

    __device__ __forceinline__ Epilogue(const typename Problem::result* bias, const float* scale,
                                        const typename Problem::result* add, const typename Problem::result* y)
        : bias(bias), scale(scale), to_residual(reinterpret_cast<long long>(add) - reinterpret_cast<long long>(y)) {}
};

template <bool more, class Problem> struct BiasOf {
    using type = const typename Problem::result*;
    using restricted = const typename Problem::result* __restrict__;
};
template <class Problem> struct BiasOf<true, Problem> {
    using type = const Epilogue<Problem>&;
    using restricted = type;
};
// The parameter `bias` of kernels: a pointer, or an Epilogue where there is a scale or a residual. BiasIn: with nothing
// written where it points.
template <class Problem> using Bias = typename BiasOf<Problem::scale || Problem::add, Problem>::type;
template <class Problem> using BiasIn = typename BiasOf<Problem::scale || Problem::add, Problem>::restricted;

// What a filter's sums are multiplied by, and what is added to them.
template <class Sum>
struct Affine {
    Sum bias = 0, scale = 1;
};
template <bool scaled, class Sum> struct TermOf { using type = Sum; };
template <class Sum> struct TermOf<true, Sum> { using type = Affine<Sum>; };
// The same as a value, which is the bias alone where there is no scale. Term<Problem>{} is that of a filter without.
template <class Problem> using Term = typename TermOf<Problem::scale, typename Problem::sum>::type;

// By the path of read-only data, which stores before do not hold back.
template <class T>
__device__ __forceinline__ T load_read_only(const T* at) {
    if constexpr (sizeof(T) == 2) return T{__ldg(&at->bits)};
    else return __ldg(at);
}

template <bool read_only, class T>
__device__ __forceinline__ T load(const T* at) {
    if constexpr (read_only) return load_read_only(at);
    else return *at;
}

// The term of filter k, which is read only where it exists. `read_only`: by ld.global.nc, for data that this launch does not
// write; such loads may pass stores.
template <class Problem, bool read_only = false>
__device__ __forceinline__ Term<Problem> term_of(Bias<Problem> bias, int64 k, bool exists = true) {
    using Sum = typename Problem::sum;
    const typename Problem::result* pointer;
    if constexpr (Problem::scale || Problem::add) pointer = bias.bias;
    else pointer = bias;
    const Sum b = Problem::bias && exists ? to_sum(load<read_only>(pointer + k)) : Sum(0);
    if constexpr (Problem::scale) return {b, exists ? load<read_only>(bias.scale + k) : 1.0f};
    else return b;
}

// Whether something is added to each output: a residual, or what the output holds.
template <class Problem> constexpr bool adds = Problem::add || Problem::accumulate;

// A result before its rounding, in two steps for kernels that know a filter before they know where the output lies. `held` is
// what is added to it.
template <class Problem, class Sum>
__device__ __forceinline__ Sum apply_term(Sum value, Term<Problem> term) {
    if constexpr (Problem::scale) return multiply_add(value, term.scale, term.bias);
    else if constexpr (Problem::bias) return add(value, term);
    else return value;
}
template <class Problem, class Sum>
__device__ __forceinline__ Sum apply_held(Sum value, Sum held) {
    if constexpr (adds<Problem>) value = add(value, held);
    return Problem::activation::of(value);
}
template <class Problem, class Sum>
__device__ __forceinline__ Sum finish(Sum value, Term<Problem> term, Sum held = 0) {
    return apply_held<Problem>(apply_term<Problem>(value, term), held);
}

// Where the residual of the output `at` lies.
template <class Problem, class T>
__device__ __forceinline__ const T* residual_of(const Epilogue<Problem>& bias, const T* at) {
    return reinterpret_cast<const T*>(reinterpret_cast<long long>(at) + bias.to_residual);
}

// What is added to the output `at`: the residual, or, where results are accumulated, what the output holds; read only where
// the output exists.
template <class Problem, class T>
__device__ __forceinline__ auto held_by(Bias<Problem> bias, const T* at, bool exists) {
    using Sum = decltype(to_sum(*at));
    if constexpr (Problem::add) {
        return exists ? to_sum(load_read_only(residual_of(bias, at))) : Sum(0);
    } else if constexpr (Problem::accumulate) {
        return exists ? to_sum(*at) : Sum(0);
    } else {
        return Sum(0);
    }
}

__device__ __forceinline__ void load_read_only(unsigned (&to)[1], const unsigned* at) { to[0] = __ldg(at); }
__device__ __forceinline__ void load_read_only(unsigned (&to)[2], const unsigned* at) {
    const uint2 v = __ldg(reinterpret_cast<const uint2*>(at));
    to[0] = v.x, to[1] = v.y;
}
__device__ __forceinline__ void load_read_only(unsigned (&to)[4], const unsigned* at) {
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(at));
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

// The residuals of adjacent outputs from `at` on, which is aligned to all of them.
template <class Problem, int words, class T>
__device__ __forceinline__ void load_residual(unsigned (&to)[words], const Epilogue<Problem>& bias, const T* at) {
    load_read_only(to, reinterpret_cast<const unsigned*>(residual_of(bias, at)));
}

// Brings the residuals of 16 pixels from `first_pixel` on, and of `filters` from filter `first_k` of the group on, to the L2
// cache, by a warp: a lane asks for the line of 128 bytes that holds every 128th byte of a pixel's part. `pixels` tells where an
// output pixel lies.
template <class Problem, int filters, class T, class Pixels>
__device__ __forceinline__ void prefetch_residuals(Bias<Problem> bias, const T* y, const Pixels& pixels,
                                                   Offset<Problem> first_pixel, int group, int first_k, int lane) {
    constexpr int line = 128 / sizeof(T), lines = ceil_div(filters, line), rows = 16;
    if constexpr (Problem::add && Problem::nhwc) {
#pragma unroll
        for (int i = 0; i < ceil_div(rows * lines, 32); ++i) {
            const int at = i * 32 + lane, k = first_k + at % lines * line;
            const Place place = pixels.place(first_pixel + at / lines);
            if (at < rows * lines && place.count > 0 && k < Problem::group_k)
                prefetch_l2(residual_of(bias, y + place.offset * Problem::k + group * Problem::group_k + k));
        }
    }
}

// What is added to `count` outputs. `together`: they are adjacent from `at` on, all or none of them exist, and they are
// aligned to all of them; then residuals come by one load. What else is added is read when it is asked for.
template <class Problem, bool together, int count, class T>
struct HeldOutputs {
    static constexpr bool at_once = Problem::add && together;
    Bias<Problem> bias;
    unsigned words[at_once ? count * sizeof(T) / 4 : 1] = {};

    __device__ __forceinline__ HeldOutputs(Bias<Problem> bias, const T* at, bool exist) : bias(bias) {
        if constexpr (at_once) {
            if (exist) load_residual<Problem>(words, bias, at);
        }
    }
    // That of output i, which lies at `at`.
    __device__ __forceinline__ float value(int i, const T* at, bool exists) const {
        if constexpr (!at_once) return held_by<Problem>(bias, at, exists);
        else if constexpr (sizeof(T) == 4) return __uint_as_float(words[i]);
        else return to_float(T{static_cast<unsigned short>(words[i / 2] >> i % 2 * 16)});
    }
};

// The same of a gradient, which has no residual.
template <class Problem, class T>
__device__ __forceinline__ auto held_by(const T* at, bool exists) {
    static_assert(!Problem::add, "the residual is found by the bias");
    return held_by<Problem>(Bias<Problem>{}, at, exists);
}

// Four values along the contiguous axis, `step` elements apart, of which those below `count` elements exist.
template <class T>
__device__ __forceinline__ void store_four(T* to, const T (&v)[4], int step, int count, bool vector) {
    if (vector) {
        if (count > 0) store_vector(to, v);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i * step < count) to[i * step] = v[i];
    }
}

}  // namespace leanconv
