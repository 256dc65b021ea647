// From accumulators to the output tensor: the sum over the blocks that shared a reduction, bias, activation, the one
// rounding to the element type, and stores of four elements where rows allow them.
#pragma once

#include <device/element.cuh>
#include <device/index.cuh>
#include <device/micro_kernel.cuh>
#include <device/ptx/cluster.cuh>

namespace leanconv {

// A result before its rounding: bias and activation; `held` is what the output holds, where results are added to it.
template <class Problem, class Sum>
__device__ __forceinline__ Sum finish(Sum value, Sum bias, Sum held = 0) {
    if constexpr (Problem::bias) value = add(value, bias);
    if constexpr (Problem::accumulate) value = add(value, held);
    // NOTE: written so that NaN stays NaN, as in PyTorch; fmaxf would turn it into zero.
    return Problem::relu ? (value < 0 ? 0 : value) : value;
}

// What the output holds at `at`, which is read only where it exists and results are added to it.
template <class Problem, class T>
__device__ __forceinline__ auto held_by(const T* at, bool exists) {
    using Sum = decltype(to_sum(*at));
    if constexpr (Problem::accumulate) return exists ? to_sum(*at) : Sum(0);
    else return Sum(0);
}

// Four values along the contiguous axis, `step` elements apart, of which those below `count` elements exist.
__device__ __forceinline__ void store_vector_of(float* to, const float (&v)[4]) {
    *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
}
__device__ __forceinline__ void store_vector_of(int* to, const int (&v)[4]) {
    *reinterpret_cast<int4*>(to) = make_int4(v[0], v[1], v[2], v[3]);
}
template <class T>
__device__ __forceinline__ void store_vector_of(T* to, const T (&v)[4]) {
    static_assert(sizeof(T) == 2, "four elements of 16 bits");
    *reinterpret_cast<uint2*>(to) = make_uint2(v[0].bits | v[1].bits << 16, v[2].bits | v[3].bits << 16);
}

// One value, or two or four adjacent ones, aligned to all of them.
template <class T>
__device__ __forceinline__ void store_unit(T* to, const T (&v)[1]) {
    *to = v[0];
}
__device__ __forceinline__ void store_unit(float* to, const float (&v)[2]) {
    *reinterpret_cast<float2*>(to) = make_float2(v[0], v[1]);
}
template <class T>
__device__ __forceinline__ void store_unit(T* to, const T (&v)[2]) {
    static_assert(sizeof(T) == 2, "two elements of 16 bits");
    *reinterpret_cast<unsigned*>(to) = v[0].bits | v[1].bits << 16;
}
template <class T>
__device__ __forceinline__ void store_unit(T* to, const T (&v)[4]) {
    store_vector_of(to, v);
}

template <class T>
__device__ __forceinline__ void store_four(T* to, const T (&v)[4], int step, int count, bool vector) {
    if (vector) {
        if (count > 0) store_vector_of(to, v);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i * step < count) to[i * step] = v[i];
    }
}

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
        : phase(phase), batch(batch), count(static_cast<Offset<Problem>>(batch) * (Problem::p * Problem::q)) {}

    // NOTE: pixels past the end repeat the last one, or four of them; what is computed from them is never stored.
    __device__ __forceinline__ Pixel<Problem> pixel(Offset<Problem> number) const {
        return Pixel<Problem>(number < count ? number : count - (images_in_fours<Problem> ? 4 : 1), batch);
    }

    __device__ __forceinline__ Place place(Offset<Problem> pixel) const {
        constexpr int image = Problem::out_h * Problem::out_w;
        if constexpr (P::whole && Problem::chwn) {
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
            return {offset, pixel < count && inside ? 4 : 0};
        }
    }
};

// A thread's part of the tile; first_k and first_pixel say where the block's tile begins, `row` and `column` which part
// of the thread's tile acc is. `interleaved` says how fragments lie along the contiguous output axis (filters in NHWC, pixels
// otherwise); `aligned` that four outputs of a fragment are adjacent and aligned if the tensor is.
template <class Problem, class Tuning, bool interleaved, bool aligned, class Pixels, int rows, int columns>
__device__ __forceinline__ void store_tile(const typename Problem::sum (&acc)[rows][columns], int row, int column,
                                           const Tiling<Tuning>& tiling, const typename Problem::result* bias,
                                           typename Problem::result* y, const Pixels& pixels,
                                           Offset<Problem> first_pixel, int group, int first_k) {
    using T = typename Problem::result;
    using Sum = typename Problem::sum;
    constexpr int lanes_k = Tiling<Tuning>::lanes_k, lanes_pixels = Tiling<Tuning>::lanes_pixels;
    int64 image = Problem::out_h * Problem::out_w;
    if constexpr (Problem::chwn) image *= pixels.batch;
    const bool vector = aligned && reinterpret_cast<unsigned long long>(y) % (4 * sizeof(T)) == 0;

    if constexpr (!Problem::nhwc) {
#pragma unroll
        for (int f = 0; f < columns / 4; ++f) {
            const int at = tiling.pixel + position<lanes_pixels, interleaved>(f, tiling.lane_pixel, 0);
            Place place[interleaved ? 4 : 1];
#pragma unroll
            for (int j = 0; j < (interleaved ? 4 : 1); ++j) place[j] = pixels.place(first_pixel + at + j * lanes_pixels);
#pragma unroll
            for (int i = 0; i < rows; ++i) {
                const int at_k = position<lanes_k, false>((row + i) / 4, tiling.lane_k, (row + i) % 4);
                const int k = first_k + tiling.k + at_k;
                if (k >= Problem::group_k) continue;
                const int filter = group * Problem::group_k + k;
                const Sum b = Problem::bias ? to_sum(bias[filter]) : Sum(0);
                T* const to = y + filter * image;
                T v[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const Place& at = place[interleaved ? j : 0];
                    const T* const output = to + at.offset + (interleaved ? 0 : j);
                    const Sum held = held_by<Problem>(output, interleaved ? at.count > 0 : j < at.count);
                    v[j] = from_sum<T>(finish<Problem>(acc[i][4 * f + j], b, held));
                }
                if constexpr (!interleaved) {
                    store_four(to + place[0].offset, v, 1, place[0].count, vector);
                } else {
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        if (place[j].count > 0) to[place[j].offset] = v[j];
                }
            }
        }
    } else {
        constexpr int step = interleaved ? lanes_k : 1;
#pragma unroll
        for (int j = 0; j < columns; ++j) {
            const int at = position<lanes_pixels, false>((column + j) / 4, tiling.lane_pixel, (column + j) % 4);
            const Offset<Problem> pixel = first_pixel + tiling.pixel + at;
            if (pixel >= pixels.count) continue;
            int64 number = pixel;
            if constexpr (!Phase<Problem>::whole) {
                const Place place = pixels.place(pixel);
                if (place.count == 0) continue;
                number = place.offset;
            }
            T* to = y + number * Problem::k + group * Problem::group_k;
#pragma unroll
            for (int f = 0; f < rows / 4; ++f) {
                const int k = first_k + tiling.k + position<lanes_k, interleaved>(f, tiling.lane_k, 0);
                T v[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const bool exists = k + i * step < Problem::group_k;
                    const Sum b =
                        Problem::bias && exists ? to_sum(bias[group * Problem::group_k + k + i * step]) : Sum(0);
                    v[i] = from_sum<T>(finish<Problem>(acc[4 * f + i][j], b, held_by<Problem>(to + k + i * step, exists)));
                }
                store_four(to + k, v, step, Problem::group_k - k, vector);
            }
        }
    }
}

// The sums of the Tuning::split blocks of a cluster, added in the order of their ranks: each block gets its share of
// every thread's tile, columns of it in NHWC and rows otherwise, so that its stores stay whole. `shared` takes the tile.
template <class Problem, class Tuning>
struct Share {
    static constexpr int rows = Problem::nhwc ? Tuning::thread_k : Tuning::thread_k / Tuning::split;
    static constexpr int columns = Problem::nhwc ? Tuning::thread_pixels / Tuning::split : Tuning::thread_pixels;
    static_assert((Problem::nhwc ? Tuning::thread_pixels : Tuning::thread_k) % Tuning::split == 0,
                  "the blocks of a cluster share a thread's tile evenly");
    using Sum = typename Problem::sum;
    static_assert(sizeof(Sum) == 4, "sums pass between blocks as words");
    Sum sum[rows][columns];
    int row, column;

    static __device__ __forceinline__ Sum load(const Sum* from, int rank) {
        const float word = cluster_load(reinterpret_cast<const float*>(from), rank);
        if constexpr (integer<Sum>) return __float_as_int(word);
        else return word;
    }

    __device__ __forceinline__ Share(const Sum (&acc)[Tuning::thread_k][Tuning::thread_pixels], float* shared) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
        constexpr int threads = Tiling<Tuning>::threads;
        Sum* const mine = reinterpret_cast<Sum*>(shared) + threadIdx.x;
        __syncthreads();  // the stages have been read
#pragma unroll
        for (int i = 0; i < Tuning::thread_k; ++i)
#pragma unroll
            for (int j = 0; j < Tuning::thread_pixels; ++j) mine[(i * Tuning::thread_pixels + j) * threads] = acc[i][j];
        cluster_barrier();
        const int rank = cluster_rank();
        row = Problem::nhwc ? 0 : rank * rows;
        column = Problem::nhwc ? rank * columns : 0;
#pragma unroll
        for (int i = 0; i < rows; ++i)
#pragma unroll
            for (int j = 0; j < columns; ++j) {
                const Sum* at = mine + ((row + i) * Tuning::thread_pixels + column + j) * threads;
                sum[i][j] = load(at, 0);
#pragma unroll
                for (int other = 1; other < Tuning::split; ++other) sum[i][j] += load(at, other);
            }
        cluster_barrier();
#else
        static_assert(Tuning::split == 1, "clusters of blocks need compute capability 9.0");
#endif
    }
};

}  // namespace leanconv
