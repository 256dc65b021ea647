// Pixels and sums of tensor_filter: vectors of an image's row become fragments of operand A, and rows of sums, as the
// tensor core leaves them, become elements of the result.
#pragma once

#include <device/ptx/mma.cuh>
#include <kernels/image_filter/image_rows.cuh>

namespace leanconv {

// The next piece of four floats, as two registers of an operand; `rest` is what it leaves of them.
template <bool is_bfloat16>
__device__ __forceinline__ void cut_piece(unsigned (&to)[2], float (&rest)[4]) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        float &a = rest[2 * k], &b = rest[2 * k + 1];
        if constexpr (is_bfloat16) {
            to[k] = cvt_rn_bf16x2_f32(a, b);
            a -= __uint_as_float(to[k] << 16);
            b -= __uint_as_float(to[k] & 0xffff0000u);
        } else {
            to[k] = cvt_rn_f16x2_f32(a, b);
            a -= cvt_f32_f16(static_cast<unsigned short>(to[k]));
            b -= cvt_f32_f16(static_cast<unsigned short>(to[k] >> 16));
        }
    }
}

// Fragments of operand A of a k16 step, one for each piece. A lane's vector of block g is in registers 0 and 2, that of block
// g + 8 in 1 and 3.
template <class In>
struct TensorPixels {
    static constexpr bool bytes = small_integer<In> && sizeof(In) == 1;
    static constexpr bool split = !bytes && !half_type<In>;  // into two pieces
    static constexpr bool scaled = same_type<In, float>;     // by the row
    static constexpr bool is_bfloat16 = same_type<In, bfloat16>;
    static constexpr float scale = split && !scaled ? 0.25f : 1.0f;  // so that uint16 stays within float16
    unsigned pieces[split ? 2 : 1][4];

    // Of two vectors, times `up`.
    __device__ __forceinline__ void make(const FourElements<In> (&vectors)[2], float up) {
#pragma unroll
        for (int block = 0; block < 2; ++block) {
            const FourElements<In>& four = vectors[block];
            if constexpr (half_type<In>) {
                pieces[0][block] = four.words[0], pieces[0][2 + block] = four.words[1];
            } else if constexpr (bytes) {
                // Under the exponent of 2^10 a byte is a float16 less 1024; a signed one is offset first.
                constexpr bool negative = Range<In>::low < 0;
                const unsigned word = negative ? four.words[0] ^ 0x80808080u : four.words[0];
                constexpr unsigned less = negative ? 0xe480e480u : 0xe400e400u;
                pieces[0][block] = add_rn_f16x2(__byte_perm(word, 0x64646464u, 0x4140), less);
                pieces[0][2 + block] = add_rn_f16x2(__byte_perm(word, 0x64646464u, 0x4342), less);
            } else {
                float rest[4];
                four.widen_to(rest);
#pragma unroll
                for (int e = 0; e < 4; ++e) rest[e] *= up * scale;
#pragma unroll
                for (int p = 0; p < 2; ++p) {
                    unsigned two[2];
                    cut_piece<false>(two, rest);
                    pieces[p][block] = two[0], pieces[p][2 + block] = two[1];
                }
            }
        }
    }

    static __device__ __forceinline__ void multiply(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
        if constexpr (is_bfloat16) mma_bf16(sums, a, b);
        else mma_f16(sums, a, b);
    }
};

// The power of two that brings the largest of a warp's elements between 2^14 and 2^15, and its inverse. Infinities and
// NaN stay what they are.
template <class Row>
__device__ __forceinline__ float row_scale(const Row& row, float& inverse) {
    constexpr int count = sizeof(Row) / sizeof(FourElements<float>);
    const FourElements<float>* const vectors = &row[0][0][0];
    float largest = 0.0f;
#pragma unroll
    for (int k = 0; k < 4 * count; ++k)
        largest = fmaxf(largest, fabsf(__uint_as_float(vectors[k / 4].words[k % 4])));
    const unsigned bits = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
    const unsigned exponent = min(268u - (bits >> 23), 253u);
    inverse = __uint_as_float((254u - exponent) << 23);
    return __uint_as_float(exponent << 23);
}

// Two neighbouring results, to global memory, as data that will not be read soon.
template <class Out>
__device__ __forceinline__ void stream_pair(Out* to, float a, float b) {
    if constexpr (same_type<Out, float>) {
        __stcs(reinterpret_cast<float2*>(to), make_float2(a, b));
    } else if constexpr (sizeof(Out) == 1) {
        __stcs(reinterpret_cast<unsigned short*>(to), static_cast<unsigned short>(__byte_perm(
            __float_as_uint(a), __float_as_uint(b), 0x40)));
    } else if constexpr (small_integer<Out>) {
        __stcs(reinterpret_cast<unsigned*>(to), pack_two<Out>(a, b));
    } else if constexpr (same_type<Out, float16>) {
        __stcs(reinterpret_cast<unsigned*>(to), cvt_rn_f16x2_f32(a, b));
    } else {
        static_assert(same_type<Out, bfloat16>, "an element type of results");
        __stcs(reinterpret_cast<unsigned*>(to), cvt_rn_bf16x2_f32(a, b));
    }
}

// Stores rows of sums: pairs of neighbours where the image allows it, else one by one.
template <class Out, int tiles>
struct TensorWriter {
    Out* to;  // this lane's first sum in the next row
    const int64 pitch;
    const int lane, count;  // so many columns from this lane's first on lie inside the image
    const bool pairs;

    template <class In>
    __device__ __forceinline__ TensorWriter(const Image<In, Out, float>& image, int i, int j, int lane_)
        : pitch(image.y_pitch), lane(lane_), count(image.out_width - j - column(0)),
          pairs(image.out_width - j >= 128 * tiles && image.y_pitch % 2 == 0 &&
                reinterpret_cast<unsigned long long>(image.y) % (2 * sizeof(Out)) == 0) {
        go_to(image, i, j);
    }

    template <class In>
    __device__ __forceinline__ void go_to(const Image<In, Out, float>& image, int i, int j) {
        to = image.y + i * image.y_pitch + (j + column(0));
    }

    // Of the lane's sum k in its strip, and from its first sum on.
    __device__ __forceinline__ int column(int k) const { return lane / 4 * 8 + lane % 4 * 2 + apart(k); }
    static __device__ __forceinline__ constexpr int apart(int k) { return 128 * (k / 4) + 64 * (k / 2 % 2) + k % 2; }

    // Sums that begin with delta times their scale, or have it added; `plain`: where `pairs` are known to be possible.
    template <bool plain>
    __device__ __forceinline__ void store(const float (&sums)[tiles][4], float inverse, float delta) {
#pragma unroll
        for (int k = 0; k < 4 * tiles; k += 2) {
            const float a = sums[k / 4][k % 4], b = sums[k / 4][k % 4 + 1];
            if (!plain && !pairs) {
                store_one(finished(a, inverse, delta), k);
                store_one(finished(b, inverse, delta), k + 1);
            } else if constexpr (sizeof(Out) == 1) {
                stream_pair(to + apart(k), whole(a, inverse), whole(b, inverse));
            } else {
                stream_pair(to + apart(k), finished(a, inverse, delta), finished(b, inverse, delta));
            }
        }
        to += pitch;
    }

    __device__ __forceinline__ void store_one(float value, int k) const {
        if (apart(k) < count) to[apart(k)] = narrow_sum<Out>(value);
    }

    static __device__ __forceinline__ float finished(float sum, float inverse, float delta) {
        return same_type<Out, float> ? fmaf(sum, inverse, delta) : sum * inverse;
    }

    // A saturated integer of 8 bits: the lowest bits of the float, which is 3 * 2^22 more, whose unit is one.
    // NOTE: four instructions; a conversion has a quarter of the rate or less.
    static __device__ __forceinline__ float whole(float sum, float inverse) {
        constexpr float zero = 12582912.0f;
        return fminf(fmaxf(fmaf(sum, inverse, zero), zero + Range<Out>::low), zero + Range<Out>::high);
    }
};

}  // namespace leanconv
