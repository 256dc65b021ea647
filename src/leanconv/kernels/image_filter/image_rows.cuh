// Rows of an image on their way to the registers of a warp that makes a strip of 32 * columns outputs: brought to shared
// memory in the type of the sums, borders and misalignment dealt with on the way, and read from there as windows, one for
// each lane. Elements of that type do not pass a register (cp.async, of 4 bytes); others are converted on their way.
//
// A row is a line of elements. Where pixels have `channels` elements side by side, the taps of an output lie so many
// apart, and a window has columns + (s - 1) * channels of them. With `planes` the elements of one channel lie so many
// apart instead, and blocks take one channel each.
#pragma once

#include <device/index.cuh>
#include <device/ptx/memory.cuh>
#include <kernels/image_filter/border.cuh>
#include <kernels/image_filter/pixels.cuh>

namespace leanconv {

__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

// The warp's number in its block.
// NOTE: the shuffle tells the compiler that all lanes have the same one, so that branches on it do not diverge.
__device__ __forceinline__ int warp_number() {
    return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
}

// One image of the batch. Widths and pitches are in elements; results may be fewer, those of whole windows alone.
template <class In, class Out, class T>
struct Image {
    const In* x;
    Out* y;
    int height, width;
    int out_height, out_width;
    int64 x_pitch, y_pitch;
    T value;  // of the pixels outside, for a constant border
};

// Whether four elements at multiples of four from here are aligned, in each row.
template <class T>
__device__ __forceinline__ bool aligned(const T* pointer, int64 pitch) {
    return reinterpret_cast<unsigned long long>(pointer) % vector_bytes<T> == 0 && pitch % 4 == 0;
}

// The numbers of a strip, from Problem (types, s, anchor_x, channels, planes) and the columns of a lane, in elements.
template <class Problem, int columns>
struct Strip {
    using T = typename Arithmetic<typename Problem::sum>::type;
    using In = typename InMemory<typename Problem::element, T>::type;
    using Out = typename InMemory<typename Problem::result, T>::type;
    static constexpr int s = Problem::s, anchor_x = Problem::anchor_x, channels = Problem::channels;
    static constexpr int width = 32 * columns;
    static constexpr int window = columns + (s - 1) * channels;
    static constexpr int before = anchor_x * channels, after = (s - 1 - anchor_x) * channels;
    // The halo, in whole vectors, so that a row of the strip starts at a vector edge wherever the image does.
    static constexpr int left = round_up(before, 4), right = round_up(after, 4);
    static constexpr int vectors = (left + width + right) / 4;
    static constexpr int lane_pixels = ceil_div(4 * vectors, 32);  // of a row, that a lane copies one by one
    static constexpr int row = 32 * lane_pixels;                   // elements that a row takes in shared memory
    static constexpr int lead = left - before, loads = ceil_div(lead + window, 4);

    static_assert(columns % 4 == 0, "a lane reads and stores whole 128-bit vectors");
    static_assert(sizeof(T) >= 4, "sums are floats, doubles or words");
    static_assert(channels == 1 || Problem::planes == 1, "channels are filtered side by side, or one by one");
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

// The element to read for element e of a row, as `border_index` maps its pixel; -1 for none.
template <class Border, int channels>
__device__ __forceinline__ int border_element(int e, int width) {
    if constexpr (channels == 1) return border_index<Border>(e, width);
    const int pixel = e >= 0 ? e / channels : -((channels - 1 - e) / channels);
    const int from = border_index<Border>(pixel, width / channels);
    return from < 0 ? -1 : from * channels + e - pixel * channels;
}

// Brings input rows of the strip that begins at column j; row 0 is the one that `first_row` names, inside or not.
template <class Problem, int columns>
struct RowLoader : Strip<Problem, columns> {
    using Base = Strip<Problem, columns>;
    using In = typename Base::In;
    using T = typename Base::T;
    using View = Image<In, typename Base::Out, T>;
    using Border = typename Problem::border;
    static constexpr bool copied = same_type<In, T> && sizeof(T) == 4;

    const View& image;
    int first_row, lane;
    bool vectors;  // all pixels of a row lie inside the image and on vector edges
    const In* first_vector;
    int column[Base::lane_pixels];

    __device__ __forceinline__ RowLoader(const View& image_, int first_row_, int j, int lane_)
        : image(image_), first_row(first_row_), lane(lane_), first_vector(image_.x + (j - Base::left + 4 * lane_)) {
        vectors = Problem::planes == 1 && j >= Base::left && j + Base::width + Base::right <= image.width &&
                  aligned(image.x, image.x_pitch);
        if (vectors) return;
#pragma unroll
        for (int k = 0; k < Base::lane_pixels; ++k)
            column[k] = border_element<Border, Base::channels>(j - Base::left + 32 * k + lane, image.width);
    }

    // Whether rows 0 ... rows - 1 consist of vectors alone.
    __device__ __forceinline__ bool inside(int rows) const {
        return vectors && first_row >= 0 && first_row + rows <= image.height;
    }

    // Issues the copies of row n, or stores it. It has landed after cp_async_wait_group and a barrier of the threads that read it.
    __device__ __forceinline__ void load(T* to, int n) const {
        const int i = border_index<Border>(first_row + n, image.height);
        if (!Border::maps_inside && i < 0) {
#pragma unroll
            for (int k = 0; k < Base::lane_pixels; ++k) to[32 * k + lane] = image.value;
        } else if (vectors) {
            load_vectors(to, first_vector + i * image.x_pitch);
        } else {
            const In* from = image.x + i * image.x_pitch;
#pragma unroll
            for (int k = 0; k < Base::lane_pixels; ++k) {
                const bool inside = Border::maps_inside || column[k] >= 0;
                if constexpr (copied) {
                    if (inside) cp_async_4(to + 32 * k + lane, from + column[k] * Problem::planes, true);
                    else to[32 * k + lane] = image.value;
                } else {
                    to[32 * k + lane] = inside ? widen<T>(from[column[k] * Problem::planes]) : image.value;
                }
            }
        }
    }

    // Where `inside`, rows can be copied by the address of this lane's first vector in them, image.x_pitch apart.
    __device__ __forceinline__ const In* vector_of(int n) const {
        return first_vector + (first_row + n) * image.x_pitch;
    }

    __device__ __forceinline__ void load_vectors(T* to, const In* from) const {
        to += 4 * lane;
#pragma unroll
        for (int k = 0; k < Base::vectors; k += 32) {
            if (k + 32 > Base::vectors && k + lane >= Base::vectors) continue;
            if constexpr (copied) {
                cp_async_16(to + 4 * k, from + 4 * k, true);
            } else {
                FourElements<In> four;
                four.load(from + 4 * k);
                T v[4];
                four.widen_to(v);
                store_vector(to + 4 * k, v);
            }
        }
    }
};

// Stores rows of outputs: as vectors where the image allows it, else coalesced by way of a row of shared memory. Without
// `adds_delta` the sums have begun with it.
template <class Out, class T, int columns, int planes, bool adds_delta = true>
struct RowWriter {
    Out* const to;
    T* const staging;
    const int64 pitch;
    const int lane, count;  // `count` columns of the strip lie inside the image
    const T delta;
    const bool vectors;

    template <class In>
    __device__ __forceinline__ RowWriter(const Image<In, Out, T>& image, int i, int j, int lane_, T delta_, T* staging_)
        : to(image.y + i * image.y_pitch + j * planes), staging(staging_), pitch(image.y_pitch), lane(lane_),
          count(image.out_width - j), delta(delta_),
          vectors(planes == 1 && count >= 32 * columns && aligned(image.y, image.y_pitch)) {}

    __device__ __forceinline__ void store(const T (&row)[columns], int n) const {
        if (vectors) {
            store_vectors(vector_of(n), row);
            return;
        }
        __syncwarp();
#pragma unroll
        for (int c = 0; c < columns; c += 4) {
            const T v[4] = {total(row[c]), total(row[c + 1]), total(row[c + 2]), total(row[c + 3])};
            store_vector(staging + lane * columns + c, v);
        }
        __syncwarp();
#pragma unroll
        for (int k = 0; k < columns; ++k)
            if (32 * k + lane < count)
                to[n * pitch + 32 * k * planes + lane * planes] = narrow_sum<Out>(staging[32 * k + lane]);
    }

    __device__ __forceinline__ T total(T sum) const { return adds_delta ? sum + delta : sum; }

    // Where `vectors`, rows can be stored by the address of this lane's first vector in them, `pitch` apart.
    __device__ __forceinline__ Out* vector_of(int n) const { return to + n * pitch + lane * columns; }

    __device__ __forceinline__ void store_vectors(Out* out, const T (&row)[columns]) const {
#pragma unroll
        for (int c = 0; c < columns; c += 4) {
            const T v[4] = {total(row[c]), total(row[c + 1]), total(row[c + 2]), total(row[c + 3])};
            stream_sums(out + c, v);
        }
    }
};

}  // namespace leanconv
