// The elements of tensors and the way from them to float, or int, in which kernels compute, and back.
#pragma once

#include <device/index.cuh>
#include <device/ptx/convert.cuh>
#include <device/ptx/dot.cuh>

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

// Bytes of an element.
// NOTE: an int, for what is multiplied with it shall stay of 32 bits.
template <class Problem> constexpr int item = static_cast<int>(sizeof(typename Problem::element));

// Elements of 16 bits pass registers, where they become floats, on their way to shared memory; floats are copied.
template <class Problem> constexpr bool narrow = item<Problem> == 2;

// What passes registers, rather than being copied.
template <class Problem> constexpr bool through_registers = narrow<Problem> || loose<typename Problem::element>;

// A loose word as it is loaded: in as large pieces as lie aligned, without what is no channel of its tap.
template <class Problem>
struct LooseWord {
    static constexpr int piece_bytes = gcd(gcd(Problem::channel_bytes, Problem::group_bytes), 2);
    unsigned pieces[4 / piece_bytes];

    // Word number `in_tap` of a tap; zeros where it is not valid.
    __device__ __forceinline__ void load(const void* from, bool valid, int in_tap) {
        using Piece = typename Select<piece_bytes == 2, unsigned short, unsigned char>::type;
#pragma unroll
        for (int i = 0; i < 4 / piece_bytes; ++i) {
            const bool exists = valid && 4 * in_tap + i * piece_bytes < Problem::group_bytes;
            pieces[i] = exists ? static_cast<const Piece*>(from)[i] : 0;
        }
    }
    __device__ __forceinline__ float value(int = 0) const {
        unsigned word = 0;
#pragma unroll
        for (int i = 0; i < 4 / piece_bytes; ++i) word |= pieces[i] << i * piece_bytes * 8;
        return __uint_as_float(word);
    }
};

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

}  // namespace leanconv
