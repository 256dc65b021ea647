// Pixels between memory and sums: an element of any type becomes a float, a double or an unsigned (int32 that wraps
// around), and a sum becomes an element of the result. Four neighbours at once where they are aligned to all four.
#pragma once

#include <device/element.cuh>
#include <device/ptx/pack.cuh>

namespace leanconv {

template <class A, class B> constexpr bool same_type = false;
template <class A> constexpr bool same_type<A, A> = true;

// The type of sums as kernels compute in it: int32 wraps around, and signed overflow is undefined.
template <class T> struct Arithmetic { using type = T; };
template <> struct Arithmetic<int> { using type = unsigned; };
// Elements in memory: where sums wrap around they are the same words.
template <class Element, class T> struct InMemory { using type = Element; };
template <class Element> struct InMemory<Element, unsigned> { using type = unsigned; };

// The least and the largest value of the integers that results are rounded to.
template <class T> struct Range;
template <> struct Range<unsigned char> { static constexpr int low = 0, high = 255; };
template <> struct Range<signed char> { static constexpr int low = -128, high = 127; };
template <> struct Range<unsigned short> { static constexpr int low = 0, high = 65535; };
template <> struct Range<short> { static constexpr int low = -32768, high = 32767; };
template <> struct Range<int> { static constexpr int low = -2147483647 - 1, high = 2147483647; };

// Integers of 8 and 16 bits, which float holds exactly.
template <class T> constexpr bool small_integer = false;
template <> constexpr bool small_integer<unsigned char> = true;
template <> constexpr bool small_integer<signed char> = true;
template <> constexpr bool small_integer<unsigned short> = true;
template <> constexpr bool small_integer<short> = true;

template <class T> constexpr bool half_type = same_type<T, float16> || same_type<T, bfloat16>;

// An element as sums have it.
template <class T, class In>
__device__ __forceinline__ T widen(In value) {
    if constexpr (half_type<In>) return static_cast<T>(to_float(value));
    else return static_cast<T>(value);
}

// A sum as an int, to the nearest, of two the even one; what is beyond int is at its end, and NaN is 0.
__device__ __forceinline__ int rounded_int(float sum) { return __float2int_rn(sum); }
// NOTE: a double that is NaN would be the smallest int.
__device__ __forceinline__ int rounded_int(double sum) { return sum == sum ? __double2int_rn(sum) : 0; }

// A sum as an element of the result: the one rounding. Integers saturate.
template <class Out, class T>
__device__ __forceinline__ Out narrow_sum(T sum) {
    if constexpr (same_type<T, unsigned>) {
        return static_cast<Out>(sum);
    } else if constexpr (half_type<Out>) {
        return from_float<Out>(static_cast<float>(sum));
    } else if constexpr (small_integer<Out> || same_type<Out, int>) {
        return static_cast<Out>(min(max(rounded_int(sum), Range<Out>::low), Range<Out>::high));
    } else {
        return static_cast<Out>(sum);
    }
}

// Four adjacent doubles, at a multiple of 16 bytes.
__device__ __forceinline__ void load_vector(double (&to)[4], const double* from) {
    const double2 first = reinterpret_cast<const double2*>(from)[0], second = reinterpret_cast<const double2*>(from)[1];
    to[0] = first.x, to[1] = first.y, to[2] = second.x, to[3] = second.y;
}
__device__ __forceinline__ void store_vector(double* to, const double (&v)[4]) {
    reinterpret_cast<double2*>(to)[0] = make_double2(v[0], v[1]);
    reinterpret_cast<double2*>(to)[1] = make_double2(v[2], v[3]);
}

// Bytes at whose multiples four adjacent elements are loaded and stored.
template <class T> constexpr int vector_bytes = sizeof(T) == 8 ? 16 : 4 * sizeof(T);

// Four adjacent elements in the words that loads bring.
template <class In>
struct FourElements {
    static constexpr int count = sizeof(In);
    unsigned words[count];

    __device__ __forceinline__ void load(const In* from) {
        if constexpr (count == 1) {
            words[0] = *reinterpret_cast<const unsigned*>(from);
        } else if constexpr (count == 2) {
            const uint2 v = *reinterpret_cast<const uint2*>(from);
            words[0] = v.x, words[1] = v.y;
        } else {
#pragma unroll
            for (int k = 0; k < count; k += 4) {
                const uint4 v = reinterpret_cast<const uint4*>(from)[k / 4];
                words[k] = v.x, words[k + 1] = v.y, words[k + 2] = v.z, words[k + 3] = v.w;
            }
        }
    }

    // NOTE: bytes are put under the exponent of 2^23, whose floats are whole, and 2^23 is taken off: two instructions at
    // full rate; conversions of integers have a quarter of it. A signed one is offset first, so that it is not negative.
    template <class T>
    __device__ __forceinline__ void widen_to(T (&to)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (small_integer<In>) {
                constexpr bool negative = Range<In>::low < 0, bytes = sizeof(In) == 1;
                constexpr unsigned offset = !negative ? 0u : bytes ? 0x80808080u : 0x80008000u;
                const unsigned selector = bytes ? 0x7440u | i : i % 2 ? 0x7432u : 0x7410u;
                const unsigned bits = __byte_perm(words[bytes ? 0 : i / 2] ^ offset, 0x4b000000u, selector);
                to[i] = static_cast<T>(__uint_as_float(bits) - (8388608.0f - Range<In>::low));
            } else if constexpr (half_type<In>) {
                to[i] = static_cast<T>(to_float(In{static_cast<unsigned short>(words[i / 2] >> i % 2 * 16)}));
            } else if constexpr (same_type<In, float>) {
                to[i] = static_cast<T>(__uint_as_float(words[i]));
            } else if constexpr (same_type<In, double>) {
                to[i] = __hiloint2double(static_cast<int>(words[2 * i + 1]), static_cast<int>(words[2 * i]));
            } else {
                to[i] = static_cast<T>(static_cast<int>(words[i]));
            }
        }
    }
};

// Two and four sums as saturated integers of 16 and 8 bits, the first in the lowest.
template <class Out, class T>
__device__ __forceinline__ unsigned pack_two(T a, T b) {
    if constexpr (Range<Out>::low < 0) return cvt_pack_sat_s16_s32(rounded_int(b), rounded_int(a));
    else return cvt_pack_sat_u16_s32(rounded_int(b), rounded_int(a));
}
template <class Out, class T>
__device__ __forceinline__ unsigned pack_four(const T (&v)[4]) {
    const int a = rounded_int(v[0]), b = rounded_int(v[1]), c = rounded_int(v[2]), d = rounded_int(v[3]);
    if constexpr (Range<Out>::low < 0) return cvt_pack_sat_s8_s32(b, a, cvt_pack_sat_s8_s32(d, c, 0));
    else return cvt_pack_sat_u8_s32(b, a, cvt_pack_sat_u8_s32(d, c, 0));
}

// Four adjacent sums as elements of the result, to global memory, as data that will not be read soon.
template <class Out, class T>
__device__ __forceinline__ void stream_sums(Out* to, const T (&v)[4]) {
    if constexpr (same_type<Out, T> && sizeof(T) == 4) {
        stream_vector(to, v);
    } else if constexpr (small_integer<Out> && sizeof(Out) == 1) {
        __stcs(reinterpret_cast<unsigned*>(to), pack_four<Out>(v));
    } else if constexpr (small_integer<Out>) {
        __stcs(reinterpret_cast<uint2*>(to), make_uint2(pack_two<Out>(v[0], v[1]), pack_two<Out>(v[2], v[3])));
    } else if constexpr (sizeof(Out) == 8) {
        __stcs(reinterpret_cast<double2*>(to), make_double2(v[0], v[1]));
        __stcs(reinterpret_cast<double2*>(to) + 1, make_double2(v[2], v[3]));
    } else {
        const Out four[4] = {narrow_sum<Out>(v[0]), narrow_sum<Out>(v[1]), narrow_sum<Out>(v[2]), narrow_sum<Out>(v[3])};
        if constexpr (half_type<Out>) {
            __stcs(reinterpret_cast<uint2*>(to),
                   make_uint2(four[0].bits | four[1].bits << 16, four[2].bits | four[3].bits << 16));
        } else if constexpr (same_type<Out, float>) {
            stream_vector(to, four);
        } else {
            static_assert(same_type<Out, int>, "an element type of results");
            __stcs(reinterpret_cast<int4*>(to), make_int4(four[0], four[1], four[2], four[3]));
        }
    }
}

}  // namespace leanconv
