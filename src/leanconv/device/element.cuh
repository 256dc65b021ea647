// The elements of tensors and the way from them to float, or int, in which kernels compute, and back.
#pragma once

#include <device/index.cuh>
#include <device/ptx/arithmetic.cuh>

namespace leanconv {

// Types of our own: NVRTC runs without the headers of the toolkit.
struct float16 { unsigned short bits; };
struct bfloat16 { unsigned short bits; };

// Four adjacent integers of 8 bits as one word, the width of a bank: an element of a convolution of a fourth of the
// channels, whose product is the sum of four.
struct int8x4 { unsigned bits; };
struct uint8x4 { unsigned bits; };
// The same where four does not divide a filter's channels: words are not aligned, and a tap's last one is not full.
struct loose_int8x4 : int8x4 {};
struct loose_uint8x4 : uint8x4 {};
template <class T> constexpr bool loose = false;
template <> constexpr bool loose<loose_int8x4> = true;
template <> constexpr bool loose<loose_uint8x4> = true;

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(float16 value) { return cvt_f32_f16(value.bits); }
__device__ __forceinline__ float to_float(bfloat16 value) {
    return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}

// Integers of 8 bits are summed in int, which is exact: the host refuses filters whose sums could leave it.
template <class T> constexpr bool integer = false;
template <> constexpr bool integer<signed char> = true;
template <> constexpr bool integer<unsigned char> = true;
template <> constexpr bool integer<int> = true;

// An element as products and sums have it.
template <class T>
__device__ __forceinline__ auto to_sum(T value) {
    if constexpr (integer<T>) return static_cast<int>(value);
    else return to_float(value);
}

__device__ __forceinline__ float multiply_add(float a, float b, float sum) { return fmaf(a, b, sum); }
__device__ __forceinline__ int multiply_add(int a, int b, int sum) { return a * b + sum; }
__device__ __forceinline__ int multiply_add(int8x4 a, int8x4 b, int sum) { return dp4a_s32_s32(b.bits, a.bits, sum); }
__device__ __forceinline__ int multiply_add(int8x4 a, uint8x4 b, int sum) { return dp4a_u32_s32(b.bits, a.bits, sum); }

__device__ __forceinline__ float add(float a, float b) { return a + b; }
// A bias is any int: what leaves 32 bits wraps around.
__device__ __forceinline__ int add(int a, int b) {
    return static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b));
}

// The one rounding of a result.
template <class T>
__device__ __forceinline__ T from_float(float value);
template <> __device__ __forceinline__ float from_float<float>(float value) { return value; }
template <> __device__ __forceinline__ float16 from_float<float16>(float value) { return {cvt_rn_f16_f32(value)}; }
template <> __device__ __forceinline__ bfloat16 from_float<bfloat16>(float value) { return {cvt_rn_bf16_f32(value)}; }

template <class T, class Sum>
__device__ __forceinline__ T from_sum(Sum value) {
    if constexpr (integer<T>) return value;
    else return from_float<T>(value);
}

// A kernel's operands, and what it writes, which overlaps with none of them.
template <class Problem> using ElementsIn = const typename Problem::element* __restrict__;
template <class Problem> using ElementsOut = typename Problem::element* __restrict__;

// Bytes of an element.
// NOTE: an int, for what is multiplied with it shall stay of 32 bits.
template <class Problem> constexpr int item = static_cast<int>(sizeof(typename Problem::element));

// Elements of 16 bits pass registers, where they become floats, on their way to shared memory; floats are copied.
template <class Problem> constexpr bool narrow = item<Problem> == 2;

// What passes registers, rather than being copied.
template <class Problem> constexpr bool through_registers = narrow<Problem> || loose<typename Problem::element>;

// `count` adjacent 16-bit elements as one load brings them: two in a register.
template <class T, int count>
struct Packed {
    static_assert(sizeof(T) == 2, "elements of 16 bits");
    unsigned words[(count + 1) / 2];

    // `from` is aligned to all of them; zeros where it is not valid.
    __device__ __forceinline__ void load(const T* from, bool valid) {
        if constexpr (count == 4) {
            uint2 v = make_uint2(0, 0);
            if (valid) v = *reinterpret_cast<const uint2*>(from);
            words[0] = v.x, words[1] = v.y;
        } else if constexpr (count == 2) {
            words[0] = valid ? *reinterpret_cast<const unsigned*>(from) : 0;
        } else {
            static_assert(count == 1, "one, two or four elements are loaded at once");
            words[0] = valid ? from->bits : 0;
        }
    }
    __device__ __forceinline__ float value(int i) const {
        return to_float(T{static_cast<unsigned short>(words[i / 2] >> i % 2 * 16)});
    }
};

// Four adjacent elements by one instruction, aligned to all of them.
__device__ __forceinline__ void load_vector(float (&to)[4], const float* from) {
    const float4 v = *reinterpret_cast<const float4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}
__device__ __forceinline__ void load_vector(unsigned (&to)[4], const unsigned* from) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

__device__ __forceinline__ void store_vector(float* to, const float (&v)[4]) {
    *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
}
__device__ __forceinline__ void store_vector(int* to, const int (&v)[4]) {
    *reinterpret_cast<int4*>(to) = make_int4(v[0], v[1], v[2], v[3]);
}
__device__ __forceinline__ void store_vector(unsigned* to, const unsigned (&v)[4]) {
    *reinterpret_cast<uint4*>(to) = make_uint4(v[0], v[1], v[2], v[3]);
}
template <class T>
__device__ __forceinline__ void store_vector(T* to, const T (&v)[4]) {
    static_assert(sizeof(T) == 2, "four elements of 16 bits");
    *reinterpret_cast<uint2*>(to) = make_uint2(v[0].bits | v[1].bits << 16, v[2].bits | v[3].bits << 16);
}

// To global memory, as data that will not be read soon.
// NOTE: an intrinsic, because the compiler split ordinary 128-bit stores of results into four of 32 bits.
__device__ __forceinline__ void stream_vector(float* to, const float (&v)[4]) {
    __stcs(reinterpret_cast<float4*>(to), make_float4(v[0], v[1], v[2], v[3]));
}
__device__ __forceinline__ void stream_vector(unsigned* to, const unsigned (&v)[4]) {
    __stcs(reinterpret_cast<uint4*>(to), make_uint4(v[0], v[1], v[2], v[3]));
}

// One, two or four adjacent elements, aligned to all of them, as one load or store. Loads widen them to floats; zeros
// where they are not valid.
template <int count>
__device__ __forceinline__ void load_adjacent(float (&v)[count], const float* from, bool valid = true) {
    static_assert(count == 1 || count == 2 || count == 4, "one, two or four elements are loaded at once");
#pragma unroll
    for (int i = 0; i < count; ++i) v[i] = 0.0f;
    if (!valid) return;
    if constexpr (count == 4) {
        load_vector(v, from);
    } else if constexpr (count == 2) {
        const float2 two = *reinterpret_cast<const float2*>(from);
        v[0] = two.x, v[1] = two.y;
    } else {
        v[0] = *from;
    }
}
template <int count, class T>
__device__ __forceinline__ void load_adjacent(float (&v)[count], const T* from, bool valid = true) {
    Packed<T, count> packed;
    packed.load(from, valid);
#pragma unroll
    for (int i = 0; i < count; ++i) v[i] = packed.value(i);
}

template <class T, int count>
__device__ __forceinline__ void store_adjacent(T* to, const T (&v)[count]) {
    static_assert(count == 1 || count == 2 || count == 4, "one, two or four elements are stored at once");
    if constexpr (count == 4) store_vector(to, v);
    else if constexpr (count == 1) *to = v[0];
    else if constexpr (sizeof(T) == 4) *reinterpret_cast<float2*>(to) = make_float2(v[0], v[1]);
    else *reinterpret_cast<unsigned*>(to) = v[0].bits | v[1].bits << 16;
}

}  // namespace leanconv
