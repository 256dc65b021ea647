// Pixels and sums of tensor_filter: vectors of an image's row become fragments of operand A, and rows of sums, as the
// tensor core leaves them, become elements of the result.
#pragma once

#include <device/ptx/mma.cuh>
#include <device/ptx/packed_half.cuh>
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

// Channel c of four pixels, whose elements lie side by side.
template <class In, int channels>
__device__ __forceinline__ FourElements<In> four_of_channel(const FourElements<In> (&pixels)[channels], int c) {
    if constexpr (channels == 1) return pixels[0];
    constexpr int in_word = 4 / sizeof(In);
    const auto word = [&](int element) { return pixels[element / 4].words[element % 4 / in_word]; };
    FourElements<In> four;
    if constexpr (in_word == 1) {
#pragma unroll
        for (int e = 0; e < 4; ++e) four.words[e] = word(e * channels + c);
    } else if constexpr (in_word == 2) {
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            const int a = e * channels + c, b = a + channels;
            four.words[e / 2] = __byte_perm(word(a), word(b), (a % 2 ? 0x32 : 0x10) | (b % 2 ? 0x7600 : 0x5400));
        }
    } else {
        // Two at a time, or three where they lie in two words.
        const int at[4] = {c, channels + c, 2 * channels + c, 3 * channels + c};
        if constexpr (channels == 4) {
            const unsigned both = c | (4 + c) << 4;
            four.words[0] = __byte_perm(__byte_perm(word(at[0]), word(at[1]), both),
                                        __byte_perm(word(at[2]), word(at[3]), both), 0x5410);
        } else {
            const unsigned first = at[0] | at[1] << 4 | at[2] << 8;
            const unsigned three = __byte_perm(word(0), word(4), first & 0x777);
            four.words[0] = channels == 2 ? __byte_perm(word(0), word(4), first | at[3] << 12)
                            : at[2] < 8   ? __byte_perm(three, word(8), 0x210 | (at[3] - 4) << 12)
                                          : __byte_perm(three, word(8), 0x010 | (at[2] - 4) << 8 | (at[3] - 4) << 12);
        }
    }
    return four;
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

    // Of channel c of two vectors, times `up`.
    template <int channels>
    __device__ __forceinline__ void make(const FourElements<In> (&vectors)[2][channels], int c, float up) {
#pragma unroll
        for (int block = 0; block < 2; ++block) half_of<channels>(vectors[block], block, c, up);
    }
    template <int channels>
    __device__ __forceinline__ void half_of(const FourElements<In> (&vector)[channels], int block, int c, float up) {
        {
            const FourElements<In> four = four_of_channel(vector, c);
            if constexpr (half_type<In>) {
                pieces[0][block] = four.words[0], pieces[0][2 + block] = four.words[1];
            } else if constexpr (bytes) {
                // Under the exponent of 2^10 a byte is a float16, 1024 more; a signed one is offset first.
                constexpr bool negative = Range<In>::low < 0;
                const unsigned word = negative ? four.words[0] ^ 0x80808080u : four.words[0];
                const unsigned times = cvt_rn_f16x2_f32(up, up);
                const float least = -up * (negative ? 1152.0f : 1024.0f);
                const unsigned plus = cvt_rn_f16x2_f32(least, least);
                pieces[0][block] = fma_rn_f16x2(__byte_perm(word, 0x64646464u, 0x4140), times, plus);
                pieces[0][2 + block] = fma_rn_f16x2(__byte_perm(word, 0x64646464u, 0x4342), times, plus);
            } else {
                float rest[4];
                four.widen_to(rest);
#pragma unroll
                for (int e = 0; e < 4; ++e) rest[e] *= up;
#pragma unroll
                for (int p = 0; p < 2; ++p) {
                    unsigned two[2];
                    cut_piece<false>(two, rest);
                    pieces[p][block] = two[0], pieces[p][2 + block] = two[1];
                }
            }
        }
    }

    // Channel c of four pixels that begin `shifted` elements into words; of pairs two in each of two rows.
    template <int shifted, int channels, int words>
    __device__ __forceinline__ void of_words(const unsigned (&from)[words], int block, int c, float up) {
        if constexpr (half_type<In> && channels == 1) {
#pragma unroll
            for (int row = 0; row < 2; ++row)
                pieces[0][2 * row + block] =
                    shifted ? __byte_perm(from[2 * row], from[2 * row + 1], 0x5432) : from[2 * row];
        } else {
            FourElements<In> four;
            constexpr int size = sizeof(In);
            if constexpr (channels == 1 && size == 1) {
                four.words[0] = shifted ? __byte_perm(from[0], from[words - 1], 0x3210 + 0x1111 * shifted) : from[0];
            } else
#pragma unroll
            for (int k = 0; k < size; ++k) {
                // four bytes of a word of results, two at a time
                unsigned two[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int element = 4 / size * k + (size == 1 ? 2 * e : e);
                    const int a = (shifted + element * channels + c) * size;
                    const int b = size == 1 ? a + channels : a + 1;
                    two[e] = __byte_perm(from[a / 4], from[b / 4], a % 4 | (a / 4 == b / 4 ? b % 4 : 4 + b % 4) << 4);
                }
                four.words[k] = __byte_perm(two[0], two[1], 0x5410);
            }
            FourElements<In> one[1] = {four};
            half_of<1>(one, block, 0, up);
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
    const FourElements<float>* const vectors = &row[0][0][0][0];
    float largest = 0.0f;
#pragma unroll
    for (int k = 0; k < 4 * count; ++k)
        largest = fmaxf(largest, fabsf(__uint_as_float(vectors[k / 4].words[k % 4])));
    const unsigned bits = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
    const unsigned exponent = min(268u - (bits >> 23), 253u);
    inverse = __uint_as_float((254u - exponent) << 23);
    return __uint_as_float(exponent << 23);
}

// Two neighbouring results.
template <class Out>
__device__ __forceinline__ auto pack_pair(float a, float b) {
    if constexpr (same_type<Out, float>) {
        return make_float2(a, b);
    } else if constexpr (sizeof(Out) == 1) {
        constexpr bool negative = Range<Out>::low < 0;
        const int first = rounded_int(a), second = rounded_int(b);
        return static_cast<unsigned short>(negative ? cvt_pack_sat_s8_s32(second, first, 0)
                                                    : cvt_pack_sat_u8_s32(second, first, 0));
    } else if constexpr (small_integer<Out>) {
        return pack_two<Out>(a, b);
    } else if constexpr (same_type<Out, float16>) {
        return cvt_rn_f16x2_f32(a, b);
    } else {
        static_assert(same_type<Out, bfloat16>, "an element type of results");
        return cvt_rn_bf16x2_f32(a, b);
    }
}

// Stores rows of sums: as vectors where the image allows it, else one by one. A vector is a pair of neighbours; of several
// channels 16 bytes, which the warp puts together in shared memory. `unscaled`: the sums are results.
template <class Out, int tiles, int channels, bool unscaled, bool two>
struct TensorWriter {
    static constexpr int rows = two ? 2 : 1;  // stored at a time
    static constexpr int sums = 4 * rows * tiles * channels, row = 128 * tiles * channels, size = sizeof(Out);
    static constexpr int bytes = channels == 1 ? 0 : rows * row * size, vector = (channels == 1 ? 2 * size : 16) / size;
    Out* const image;
    Out* const staging;
    const unsigned pitch;  // in bytes
    const int lane, height, count;  // so many rows of the band, and columns of the strip, in elements, lie inside the image
    const bool vectors;     // those are aligned
    // Of 8 bits two lanes exchange pairs, such that each stores four neighbours: where these are aligned.
    static constexpr bool exchanges = channels == 1 && size == 1;
    const bool fours;
    unsigned to;            // this lane's first sum in the next row: bytes from the image's first on

    template <class In>
    __device__ __forceinline__ TensorWriter(const Image<In, Out, float>& view, int i, int height_, int j, int lane_,
                                            unsigned char* shared)
        : image(view.y), staging(reinterpret_cast<Out*>(shared)), pitch(static_cast<unsigned>(view.y_pitch) * size),
          lane(lane_), height(height_), count(view.out_width - j),
          vectors(view.y_pitch % vector == 0 && reinterpret_cast<unsigned long long>(view.y) % (vector * size) == 0),
          fours(!exchanges || (view.y_pitch % 4 == 0 && reinterpret_cast<unsigned long long>(view.y) % 4 == 0)) {
        go_to(i, j);
    }

    // Whether all outputs are in vectors inside the image.
    __device__ __forceinline__ bool whole() const { return vectors && fours && count >= row; }

    __device__ __forceinline__ void go_to(int i, int j) {
        to = static_cast<unsigned>(i + row_of_lane()) * pitch + (j + column(0)) * size;
    }
    __device__ __forceinline__ void go_on() { to += rows * pitch; }
    // Which of the rows that are stored at a time the lane has.
    __device__ __forceinline__ int row_of_lane() const { return two ? lane % 4 / 2 : 0; }

    // Where the lane's sum k lies in its strip, and from its first sum on, in elements.
    __device__ __forceinline__ int column(int k) const {
        return (two ? lane / 4 * 4 + lane % 2 * 2 : lane / 4 * 8 + lane % 4 * 2) * channels + apart(k);
    }
    static constexpr int half_tile = two ? 32 : 64;
    static __device__ __forceinline__ constexpr int apart(int k) {
        return (2 * half_tile * (k / 4 / channels) + half_tile * (k / 2 % 2) + k % 2) * channels + k / 4 % channels;
    }
    __device__ __forceinline__ Out* at(int elements) const {
        return reinterpret_cast<Out*>(reinterpret_cast<char*>(image) + to) + elements;
    }

    // Sums that begin with delta times their scale, or have it added, if they are `wanted`, as `all` are; `plain`: where
    // they are `whole`.
    // NOTE: a __syncwarp() must lie between two calls, which put rows together in one place.
    template <bool plain, bool all>
    __device__ __forceinline__ void store(const float (&done)[rows * tiles * channels][4], int i, float inverse, float delta) {
        // Of rows that come one by one the first ones belong to no output.
        const bool wanted = all || (two ? i + row_of_lane() < height : i >= 0);
        if (!two && (!plain || channels > 1) && !wanted) return;
        if (!plain && !vectors) {
#pragma unroll
            for (int k = 0; k < sums; ++k)
                if (wanted) store_one(finished(done[k / 4][k % 4], inverse, delta), k);
            go_on();
            return;
        }
        if constexpr (plain && exchanges) {
            const bool odd = lane % 2 != 0;
#pragma unroll
            for (int k = 0; k < sums; k += 4) {
                float four[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) four[e] = finished(done[k / 4][e], inverse, delta);
                // A lane's pairs lie 64 columns apart: the first ones of two lanes are for the first of these, the others
                // for the second.
                const unsigned mine = pack_four<Out>(four), other = __shfl_xor_sync(0xffffffffu, mine, 1);
                const unsigned both = __byte_perm(mine, other, odd ? 0x3276 : 0x5410);
                if (wanted) __stcs(reinterpret_cast<unsigned*>(at(2 * half_tile * (k / 4)) + (odd ? half_tile - 2 : 0)), both);
            }
            if (two || wanted) go_on();
            return;
        }
#pragma unroll
        for (int k = 0; k < sums; k += 2) {
            // The elements of two pixels, two at a time.
            const int first = k / (4 * channels) * channels, half = k / 2 / channels % 2, pair = k % (2 * channels);
            float both_sums[2];
#pragma unroll
            for (int e = 0; e < 2; ++e)
                both_sums[e] = finished(done[first + (pair + e) % channels][2 * half + (pair + e) / channels], inverse, delta);
            const int place = (2 * half_tile * (k / (4 * channels)) + half_tile * half) * channels + pair;
            if constexpr (channels > 1) {
                const auto both = pack_pair<Out>(both_sums[0], both_sums[1]);
                *reinterpret_cast<decltype(pack_pair<Out>(0.0f, 0.0f))*>(staging + row_of_lane() * row + column(0) + place) = both;
            } else if (plain || column(0) + place + 1 < count) {
                const auto both = pack_pair<Out>(both_sums[0], both_sums[1]);
                if (wanted) __stcs(reinterpret_cast<decltype(pack_pair<Out>(0.0f, 0.0f))*>(at(place)), both);
            } else {
                if (wanted) store_one(both_sums[0], k);
            }
        }
        if constexpr (channels > 1) {
            __syncwarp();
#pragma unroll
            for (int n = 0; n < rows; ++n) {
                if (two && !all && i + n >= height) continue;
                const Out* const from = staging + n * row;
                // from the lane's place to the first of row n
                Out* const out = two ? reinterpret_cast<Out*>(reinterpret_cast<char*>(at(-column(0))) +
                                                              (n - row_of_lane()) * static_cast<int64>(pitch))
                                     : at(-column(0));
#pragma unroll
                for (int k = 0; k < row / vector; k += 32) {
                    const int first = (k + lane) * vector;
                    if (plain ? k + 32 <= row / vector || k + lane < row / vector : first + vector <= min(count, row))
                        __stcs(reinterpret_cast<uint4*>(out + first), *reinterpret_cast<const uint4*>(from + first));
                }
                const int rest = count / vector * vector + lane;
                if (!plain && rest < min(count, row)) out[rest] = from[rest];
            }
        }
        if (two || wanted) go_on();
    }

    __device__ __forceinline__ void store_one(float value, int k) const {
        if (column(k) < count) *at(apart(k)) = narrow_sum<Out>(value);
    }

    static __device__ __forceinline__ float finished(float sum, float inverse, float delta) {
        if constexpr (same_type<Out, float>) return unscaled ? sum + delta : fmaf(sum, inverse, delta);
        else return unscaled ? sum : sum * inverse;
    }
};

}  // namespace leanconv
