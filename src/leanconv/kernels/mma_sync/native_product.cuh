// What kernels share that multiply elements of 16 bits as they are: elements on their way to shared memory, the product of a
// warp, and the store of its sums.
#pragma once

#include <device/element.cuh>
#include <device/epilogue.cuh>
#include <device/ptx/mma.cuh>

namespace leanconv {

// How many neighbours, eight at most, lie aligned in runs of `run` elements of 16 bits.
__host__ __device__ constexpr int aligned_in(int run) { return gcd(run, 8); }

// Where `element` of a row of `width` elements lies in shared memory: units of 16 bytes are permuted by the row, so that ldmatrix
// meets each bank once.
template <int width>
__device__ __forceinline__ int swizzled(int row, int element) {
    static_assert(width % 64 == 0, "a row has whole patterns of eight units");
    return row * (width * 2) + ((element / 8 ^ row % 8) * 16 + element % 8 * 2);
}

// Neighbouring elements that a thread holds on their way to shared memory: as many as lie `aligned` by one load, or two that are
// loaded one by one, for which `j` counts.
template <class T, int aligned>
struct HeldElements {
    static constexpr int loads = aligned == 1 ? 2 : 1, words = aligned == 4 ? 2 : 1;
    unsigned word[words];

    __device__ __forceinline__ void load(int j, const T* from, bool valid) {
        Packed<T, aligned> elements;
        elements.load(from, valid);
        if (j == 0) {
#pragma unroll
            for (int i = 0; i < words; ++i) word[i] = elements.words[i];
        } else {
            word[0] |= elements.words[0] << 16;
        }
    }
    __device__ __forceinline__ void store(unsigned char* to) const {
        if constexpr (words == 2) *reinterpret_cast<uint2*>(to) = make_uint2(word[0], word[1]);
        else *reinterpret_cast<unsigned*>(to) = word[0];
    }
};

// sums += a b, by the type of the elements.
__device__ __forceinline__ void mma_native(float16, float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    mma_f16(sums, a, b);
}
__device__ __forceinline__ void mma_native(bfloat16, float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    mma_bf16(sums, a, b);
}

// The products of a warp's fragments, as ldmatrix brings them: 16 x `m_tiles` rows, 16 x `n16s` columns, 16 reduction elements.
template <class T, int m_tiles, int n16s>
__device__ __forceinline__ void multiply_fragments(float (&sums)[m_tiles][n16s][2][4], const unsigned (&a)[m_tiles][4],
                                                   const unsigned (&b)[n16s][4]) {
#pragma unroll
    for (int n = 0; n < n16s; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int m = 0; m < m_tiles; ++m) mma_native(T{}, sums[m][n][half], a[m], {b[n][2 * half], b[n][2 * half + 1]});
}

// Stores what a thread has of an output pixel and 16 filters, permuted within 16: four neighbours, of which `count` exist. The
// first two are of sums[0], the others of sums[1]; `half` is 1 for the lower eight pixels of the product. By one store where four
// neighbours exist or none, and are aligned to all of them, or by pairs where two are.
template <class Problem, class T>
__device__ __forceinline__ void store_neighbours(T* to, const float (&sums)[2][4], int half, const Term<Problem> (&terms)[4],
                                                 Bias<Problem> bias, int count) {
    constexpr bool together = Problem::vector_store, pairs = gcd(Problem::k, Problem::group_k) % 2 == 0;
    static_assert(Problem::nhwc, "neighbouring filters of a pixel lie side by side");
    const HeldOutputs<Problem, together, 4, T> held(bias, to, true);
    T v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
        v[j] = from_float<T>(finish<Problem>(sums[j / 2][2 * half + j % 2], terms[j], held.value(j, to + j, j < count)));
    if constexpr (pairs && !together) {
#pragma unroll
        for (int j = 0; j < 4; j += 2)
            if (j < count) *reinterpret_cast<unsigned*>(to + j) = v[j].bits | static_cast<unsigned>(v[j + 1].bits) << 16;
    } else {
        store_four(to, v, 1, count, together);
    }
}

}  // namespace leanconv
