// Rows of an image on their way to the registers of a warp that makes a strip of 32 * columns outputs: copied to shared
// memory without passing a register (cp.async), borders and misalignment dealt with on the way, and read from there as
// windows of columns + s - 1 pixels, one for each lane.
#pragma once

#include <device/element.cuh>
#include <device/index.cuh>
#include <device/ptx/memory.cuh>
#include <kernels/image_filter/border.cuh>

namespace leanconv {

__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

template <class T> struct Arithmetic { using type = T; };
template <> struct Arithmetic<int> { using type = unsigned; };  // int32 wraps around; signed overflow is undefined

// The warp's number in its block.
// NOTE: the shuffle tells the compiler that all lanes have the same one, so that branches on it do not diverge.
__device__ __forceinline__ int warp_number() {
    return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
}

// One image of the batch. Pitches are in elements.
template <class T>
struct Image {
    const T* x;
    T* y;
    int height, width;
    int64 x_pitch, y_pitch;
    T value;  // of the pixels outside, for a constant border
};

template <class T>
__device__ __forceinline__ bool aligned(const T* pointer, int64 pitch) {
    return reinterpret_cast<unsigned long long>(pointer) % 16 == 0 && pitch % 4 == 0;
}

// The numbers of a strip, from Problem (element, s, anchor_x) and the columns of a lane.
template <class Problem, int columns>
struct Strip {
    using T = typename Arithmetic<typename Problem::element>::type;
    static constexpr int s = Problem::s, anchor_x = Problem::anchor_x;
    static constexpr int width = 32 * columns;
    static constexpr int window = columns + s - 1;
    // The halo, in whole vectors, so that a row of the strip starts at a vector edge wherever the image does.
    static constexpr int left = round_up(anchor_x, 4), right = round_up(s - 1 - anchor_x, 4);
    static constexpr int vectors = (left + width + right) / 4;
    static constexpr int lane_pixels = ceil_div(4 * vectors, 32);  // of a row, that a lane copies one by one
    static constexpr int row = 32 * lane_pixels;                   // elements that a row takes in shared memory
    static constexpr int lead = left - anchor_x, loads = ceil_div(lead + window, 4);

    static_assert(columns % 4 == 0, "a lane reads and stores whole 128-bit vectors");
    static_assert(sizeof(T) == 4, "vectors are counted in 4-byte elements");
    static_assert(0 <= anchor_x && anchor_x < s, "the anchor lies inside the filter");
    static_assert(31 * columns + 4 * loads <= row, "the last lane's window ends inside the row");

    // A lane's window of a row that has arrived.
    static __device__ __forceinline__ void read_window(T (&to)[window], const T* row_of_strip, int lane) {
#pragma unroll
        for (int k = 0; k < loads; ++k) {
            T v[4];
            load_vector(v, row_of_strip + lane * columns + 4 * k);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (4 * k + e >= lead && 4 * k + e - lead < window) to[4 * k + e - lead] = v[e];
        }
    }
};

// Copies input rows of the strip that begins at column j; row 0 is the one that `first_row` names, inside or not.
template <class Problem, int columns>
struct RowLoader : Strip<Problem, columns> {
    using Base = Strip<Problem, columns>;
    using T = typename Base::T;
    using Border = typename Problem::border;

    const Image<T>& image;
    int first_row, lane;
    bool vectors;  // all pixels of a row lie inside the image and on vector edges
    const T* first_vector;
    int column[Base::lane_pixels];

    __device__ __forceinline__ RowLoader(const Image<T>& image_, int first_row_, int j, int lane_)
        : image(image_), first_row(first_row_), lane(lane_), first_vector(image_.x + (j - Base::left + 4 * lane_)) {
        vectors = j >= Base::left && j + Base::width + Base::right <= image.width && aligned(image.x, image.x_pitch);
        if (vectors) return;
#pragma unroll
        for (int k = 0; k < Base::lane_pixels; ++k)
            column[k] = border_index<Border>(j - Base::left + 32 * k + lane, image.width);
    }

    // Whether rows 0 ... rows - 1 consist of vectors alone.
    __device__ __forceinline__ bool inside(int rows) const {
        return vectors && first_row >= 0 && first_row + rows <= image.height;
    }

    // Issues the copies of row n. It has landed after cp_async_wait_group and a barrier of the threads that read it.
    __device__ __forceinline__ void load(T* to, int n) const {
        const int i = border_index<Border>(first_row + n, image.height);
        if (!Border::maps_inside && i < 0) {
#pragma unroll
            for (int k = 0; k < Base::lane_pixels; ++k) to[32 * k + lane] = image.value;
        } else if (vectors) {
            load_vectors(to, first_vector + i * image.x_pitch);
        } else {
            const T* from = image.x + i * image.x_pitch;
#pragma unroll
            for (int k = 0; k < Base::lane_pixels; ++k) {
                if (Border::maps_inside || column[k] >= 0) cp_async_4(to + 32 * k + lane, from + column[k], true);
                else to[32 * k + lane] = image.value;
            }
        }
    }

    // Where `inside`, rows can be copied by the address of this lane's first vector in them, image.x_pitch apart.
    __device__ __forceinline__ const T* vector_of(int n) const {
        return first_vector + (first_row + n) * image.x_pitch;
    }

    __device__ __forceinline__ void load_vectors(T* to, const T* from) const {
        to += 4 * lane;
#pragma unroll
        for (int k = 0; k < Base::vectors; k += 32)
            if (k + 32 <= Base::vectors || k + lane < Base::vectors) cp_async_16(to + 4 * k, from + 4 * k, true);
    }
};

// Stores rows of outputs: as vectors where the image allows it, else coalesced by way of a row of shared memory.
template <class T, int columns>
struct RowWriter {
    T* const to;
    T* const staging;
    const int64 pitch;
    const int lane, count;  // `count` columns of the strip lie inside the image
    const T delta;
    const bool vectors;

    __device__ __forceinline__ RowWriter(const Image<T>& image, int i, int j, int lane_, T delta_, T* staging_)
        : to(image.y + i * image.y_pitch + j), staging(staging_), pitch(image.y_pitch), lane(lane_),
          count(image.width - j), delta(delta_), vectors(count >= 32 * columns && aligned(image.y, image.y_pitch)) {}

    __device__ __forceinline__ void store(const T (&row)[columns], int n) const {
        if (vectors) {
            store_vectors(vector_of(n), row);
            return;
        }
        __syncwarp();
#pragma unroll
        for (int c = 0; c < columns; c += 4) {
            const T v[4] = {row[c] + delta, row[c + 1] + delta, row[c + 2] + delta, row[c + 3] + delta};
            store_vector(staging + lane * columns + c, v);
        }
        __syncwarp();
#pragma unroll
        for (int k = 0; k < columns; ++k)
            if (32 * k + lane < count) to[n * pitch + 32 * k + lane] = staging[32 * k + lane];
    }

    // Where `vectors`, rows can be stored by the address of this lane's first vector in them, `pitch` apart.
    __device__ __forceinline__ T* vector_of(int n) const { return to + n * pitch + lane * columns; }

    __device__ __forceinline__ void store_vectors(T* out, const T (&row)[columns]) const {
#pragma unroll
        for (int c = 0; c < columns; c += 4) {
            const T v[4] = {row[c] + delta, row[c + 1] + delta, row[c + 2] + delta, row[c + 3] + delta};
            stream_vector(out + c, v);
        }
    }
};

}  // namespace leanconv
