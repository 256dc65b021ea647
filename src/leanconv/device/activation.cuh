// Activations, by the names and formulas of torch.nn.functional. Each is a type, so that a layer has one as a constant.
#pragma once

#include <device/element.cuh>

namespace leanconv {

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
struct Sigmoid {
    static __device__ __forceinline__ float of(float v) { return 1.0f / (1.0f + expf(-v)); }
};
struct Silu {
    static __device__ __forceinline__ float of(float v) { return v / (1.0f + expf(-v)); }
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

}  // namespace leanconv
