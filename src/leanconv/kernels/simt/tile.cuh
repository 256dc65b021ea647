// The tile of a matrix product on FP32 cores: how warps, lanes and registers divide it, how a thread accumulates its outer
// products, and how sums reach the output.
//
// A thread owns thread_k x thread_pixels outputs and spends thread_k * thread_pixels FMAs per reduction step on
// (thread_k + thread_pixels) / 4 shared loads of 128 bits: 8x8 makes 16 FMAs a load, 8x12 makes 19.
#pragma once

#include <device/element.cuh>
#include <device/epilogue.cuh>
#include <device/index.cuh>
#include <device/ptx/sync.cuh>

namespace leanconv {

// Position in the tile of component i of a lane's fragment f, along one axis with `lanes` lanes.
// Fragments of four are adjacent (one 128-bit store) or interleaved lane by lane, so that the lanes of one scalar store
// write adjacent elements: the choice for a contiguous output axis whose rows are no multiple of four.
template <int lanes, bool interleaved>
__device__ __forceinline__ int position(int f, int lane, int i) {
    return f * lanes * 4 + (interleaved ? i * lanes + lane : lane * 4 + i);
}

// Where tile position p lies in a shared-memory row: fragments are always adjacent there. The inverse of position().
template <int lanes, bool interleaved>
__device__ __forceinline__ int slot_of(int p) {
    constexpr int group = lanes * 4;
    const int in = p % group;
    return interleaved ? p - in + (in % lanes) * 4 + in / lanes : p;
}

template <int lanes, bool interleaved>
__device__ __forceinline__ int position_of(int slot) {
    constexpr int group = lanes * 4;
    const int in = slot % group;
    return interleaved ? slot - in + (in % 4) * lanes + in / 4 : slot;
}

template <class Tuning>
struct Tiling {
    static constexpr int lanes_k = Tuning::lanes_k;
    static constexpr int lanes_pixels = 32 / lanes_k;
    static constexpr int warp_k = lanes_k * Tuning::thread_k;
    static constexpr int warp_pixels = lanes_pixels * Tuning::thread_pixels;
    static constexpr int warps_k = Tuning::tile_k / warp_k;
    static constexpr int warps_pixels = Tuning::tile_pixels / warp_pixels;
    static constexpr int threads = 32 * warps_k * warps_pixels;

    static_assert(32 % lanes_k == 0, "the lanes of a warp form a lanes_k x (32 / lanes_k) grid");
    static_assert(Tuning::thread_k % 4 == 0 && Tuning::thread_pixels % 4 == 0, "fragments are read four at a time");
    static_assert(Tuning::tile_k % warp_k == 0 && Tuning::tile_pixels % warp_pixels == 0, "warps divide the tile");

    int k, pixel;  // first tile position of this thread's warp
    int lane_k, lane_pixel;

    __device__ __forceinline__ Tiling() {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        k = warp / warps_pixels * warp_k;
        pixel = warp % warps_pixels * warp_pixels;
        // NOTE: the lowest lane bit goes to k, the next ones to pixels. A 128-bit shared load of a warp takes two
        // cycles where lanes that differ in bit 0, or in bit 1, read the same address, and four otherwise: so either
        // fragment takes two. Explored (H200, 56391c2).
        lane_k = lanes_k == 1 ? 0 : lane % 2 + lane / (2 * lanes_pixels) * 2;
        lane_pixel = lanes_k == 1 ? lane : lane / 2 % lanes_pixels;
    }
};

// `count` floats of one shared-memory row, four adjacent ones every `step`.
template <int step, int count>
__device__ __forceinline__ void load_fragments(float (&fragment)[count], const float* row) {
#pragma unroll
    for (int f = 0; f < count / 4; ++f) {
        const float4 v = *reinterpret_cast<const float4*>(row + f * step);
        fragment[4 * f] = v.x, fragment[4 * f + 1] = v.y, fragment[4 * f + 2] = v.z, fragment[4 * f + 3] = v.w;
    }
}

// Calls multiply(i, j) for each of a thread's filters i and pixels j. NOTE: to and fro along the filters (`along_k`) or
// the pixels: an FMA at full rate keeps one operand of the FMA before, as the register file has two banks, even and odd
// registers, each with one operand a cycle. Explored (H200, 470fe53): 1 to 4 % of the time, with transforms 2 to 8.
template <bool along_k, int thread_k, int thread_pixels, class Multiply>
__device__ __forceinline__ void outer_product(const Multiply& multiply) {
    constexpr int outer = along_k ? thread_pixels : thread_k, inner = along_k ? thread_k : thread_pixels;
#pragma unroll
    for (int o = 0; o < outer; ++o)
#pragma unroll
        for (int n = 0; n < inner; ++n) {
            const int in = o % 2 == 0 ? n : inner - 1 - n;
            multiply(along_k ? in : o, along_k ? o : in);
        }
}

// A thread's part of the tile; first_k and first_pixel say where the block's tile begins, `row` and `column` which part
// of the thread's tile acc is. `interleaved` says how fragments lie along the contiguous output axis (filters in NHWC, pixels
// otherwise); `aligned` that four outputs of a fragment are adjacent and aligned if the tensor is.
template <class Problem, class Tuning, bool interleaved, bool aligned, class Pixels, int rows, int columns>
__device__ __forceinline__ void store_tile(const typename Problem::sum (&acc)[rows][columns], int row, int column,
                                           const Tiling<Tuning>& tiling, Bias<Problem> bias,
                                           typename Problem::result* y, const Pixels& pixels,
                                           Offset<Problem> first_pixel, int group, int first_k) {
    using T = typename Problem::result;
    using Sum = typename Problem::sum;
    constexpr int lanes_k = Tiling<Tuning>::lanes_k, lanes_pixels = Tiling<Tuning>::lanes_pixels;
    int64 image = Phase<Problem>::D::out * Problem::out_h * Problem::out_w;
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
                const Term<Problem> term = term_of<Problem>(bias, filter);
                T* const to = y + filter * image;
                T v[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const Place& at = place[interleaved ? j : 0];
                    const T* const output = to + at.offset + (interleaved ? 0 : j);
                    const Sum held = held_by<Problem>(bias, output, interleaved ? at.count > 0 : j < at.count);
                    v[j] = from_sum<T>(finish<Problem>(acc[i][4 * f + j], term, held));
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
                    const Term<Problem> term = term_of<Problem>(bias, group * Problem::group_k + k + i * step, exists);
                    v[i] = from_sum<T>(
                        finish<Problem>(acc[4 * f + i][j], term, held_by<Problem>(bias, to + k + i * step, exists)));
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
    }
};

}  // namespace leanconv
