// How a warp gets the pixels of an image row into registers: lane l of a strip of 32 * columns outputs needs a window of
// columns + s - 1 pixels, which overlaps its neighbours'. Three ways, with one interface: load(raw, n) sends for input
// row n of the strip, deliver(raw, window) makes the window of what has come.
#pragma once

#include <lib/border.cuh>
#include <lib/index.cuh>
#include <lib/vector.cuh>

namespace leanconv {

__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

template <class T> struct Arithmetic { using type = T; };
template <> struct Arithmetic<int> { using type = unsigned; };  // int32 wraps around; signed overflow is undefined

// One image of the batch. Pitches are in elements.
template <class T>
struct Plane {
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

// A warp's two row buffers in shared memory.
// NOTE: taken in turn they need one __syncwarp a row: a buffer is written again only after the barrier that follows
// every lane's reads of it.
template <class T, int size>
struct Staging {
    static constexpr int elements = 2 * size;
    T* base;
    int offset = 0;

    __device__ __forceinline__ explicit Staging(T* base_) : base(base_) {}
    __device__ __forceinline__ T* buffer() const { return base + offset; }
    __device__ __forceinline__ void next() { offset = size - offset; }
};

// The numbers of a strip, from Problem (r, s, anchor) and the columns of a lane.
template <class Problem, int columns>
struct Strip {
    using T = typename Arithmetic<typename Problem::element>::type;
    static constexpr int s = Problem::s, anchor_x = Problem::anchor_x, anchor_y = Problem::anchor_y;
    static constexpr int width = 32 * columns;
    static constexpr int window = columns + s - 1;
    static constexpr int left = round_up(anchor_x, columns), right = round_up(s - 1 - anchor_x, columns);  // the halo
    static constexpr int lead = round_up(anchor_x, 4) - anchor_x;          // pixels before a window's first vector edge
    static constexpr int chunks = ceil_div(lead + window, 4);              // vectors that hold a window
    static constexpr int pieces = ceil_div(31 * columns + 4 * chunks, 32); // 32-pixel pieces that hold all windows
    using Buffers = Staging<T, 32 * pieces>;

    static_assert(columns % 4 == 0, "a lane loads and stores whole 128-bit vectors");
    static_assert(sizeof(T) == 4, "vectors are counted in 4-byte elements");
    static_assert(0 <= anchor_x && anchor_x < s, "the anchor lies inside the filter");
    static_assert(0 <= anchor_y && anchor_y < Problem::r, "the anchor lies inside the filter");
    static_assert((left + right) / columns <= 32, "each lane keeps at most one vector of the halo");

    // May outputs of rows [i, i + rows) and columns [j, j + width) be made with vector accesses alone, without a border?
    static __device__ __forceinline__ bool inside(const Plane<T>& plane, int i, int j, int rows) {
        return i >= anchor_y && i - anchor_y + rows + Problem::r - 1 <= plane.height && j >= left &&
               j + width + right <= plane.width && aligned(plane.x, plane.x_pitch) && aligned(plane.y, plane.y_pitch);
    }

    // Take the window's pixels from `chunks` vectors at `from`.
    static __device__ __forceinline__ void load_window(T (&to)[window], const T* from) {
#pragma unroll
        for (int k = 0; k < chunks; ++k) {
            T v[4];
            load_vector(v, from + 4 * k);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (4 * k + e >= lead && 4 * k + e - lead < window) to[4 * k + e - lead] = v[e];
        }
    }

    // Whole windows by overlapping 128-bit loads, which L1 serves. Only inside the image.
    struct DirectRows {
        struct Raw {
            T v[window];
        };
        const T* at;
        int64 pitch;

        __device__ __forceinline__ DirectRows(const Plane<T>& plane, int i, int j, int lane, Buffers&)
            : at(plane.x + (i - anchor_y) * plane.x_pitch + (j - anchor_x - lead + lane * columns)),
              pitch(plane.x_pitch) {}
        __device__ __forceinline__ void load(Raw& raw, int n) const { load_window(raw.v, at + n * pitch); }
        __device__ __forceinline__ void deliver(const Raw& raw, T (&to)[window]) const {
#pragma unroll
            for (int e = 0; e < window; ++e) to[e] = raw.v[e];
        }
    };

    // Each pixel loaded once: a lane loads its own columns, a few lanes the halo, and neighbours come by warp shuffle.
    // Only inside the image.
    struct ShuffledRows {
        struct Raw {
            T own[columns], halo[columns];
        };
        const T* at;
        int64 pitch;
        int lane;

        __device__ __forceinline__ ShuffledRows(const Plane<T>& plane, int i, int j, int lane_, Buffers&)
            : at(plane.x + (i - anchor_y) * plane.x_pitch + j + lane_ * columns), pitch(plane.x_pitch), lane(lane_) {}
        __device__ __forceinline__ void load(Raw& raw, int n) const {
            const T* from = at + n * pitch;
            const bool right_halo = lane < right / columns, left_halo = lane >= 32 - left / columns;
#pragma unroll
            for (int k = 0; k < columns; k += 4) {
                T own[4], halo[4] = {};
                load_vector(own, from + k);
                if (right_halo || left_halo) load_vector(halo, from + (right_halo ? width : -width) + k);
#pragma unroll
                for (int e = 0; e < 4; ++e) raw.own[k + e] = own[e], raw.halo[k + e] = halo[e];
            }
        }
        __device__ __forceinline__ void deliver(const Raw& raw, T (&to)[window]) const {
#pragma unroll
            for (int e = 0; e < window; ++e) {
                const int from = e - anchor_x + left;  // counted from the left end of the halo
                const int distance = from / columns - left / columns, element = from % columns;
                // NOTE: lanes wrap around: who looks past lane 31 finds the right halo in the lanes counted from 0,
                // who looks before lane 0 the left halo in those counted from 31. The giver selects.
                const bool gives_halo = distance > 0 ? lane < distance : lane >= 32 + distance;
                const T given = distance != 0 && gives_halo ? raw.halo[element] : raw.own[element];
                to[e] = distance == 0 ? given : __shfl_sync(0xffffffffu, given, (lane + distance) & 31);
            }
        }
    };

    // Any rows of any image: read element by element as the border says, coalesced, and turned into windows through
    // shared memory.
    struct StagedRows {
        struct Raw {
            T v[pieces];
        };
        const Plane<T>& plane;
        Buffers& staging;
        int first_row, lane;
        int column[pieces];

        __device__ __forceinline__ StagedRows(const Plane<T>& plane_, int i, int j, int lane_, Buffers& staging_)
            : plane(plane_), staging(staging_), first_row(i - anchor_y), lane(lane_) {
#pragma unroll
            for (int k = 0; k < pieces; ++k)
                column[k] = border_index<typename Problem::border>(j - anchor_x - lead + 32 * k + lane, plane.width);
        }
        __device__ __forceinline__ void load(Raw& raw, int n) const {
            const int i = border_index<typename Problem::border>(first_row + n, plane.height);
            const T* from = plane.x + i * plane.x_pitch;
#pragma unroll
            for (int k = 0; k < pieces; ++k) {
                const bool reads = Problem::border::maps_inside || (i >= 0 && column[k] >= 0);
                raw.v[k] = reads ? from[column[k]] : plane.value;
            }
        }
        __device__ __forceinline__ void deliver(const Raw& raw, T (&to)[window]) {
#pragma unroll
            for (int k = 0; k < pieces; ++k) staging.buffer()[32 * k + lane] = raw.v[k];
            __syncwarp();
            load_window(to, staging.buffer() + lane * columns);
            staging.next();
        }
    };

    // One row of outputs, to `to` of an image.
    static __device__ __forceinline__ void store_vectors(T* to, const T (&row)[columns], T delta, int lane) {
#pragma unroll
        for (int c = 0; c < columns; c += 4) {
            const T v[4] = {row[c] + delta, row[c + 1] + delta, row[c + 2] + delta, row[c + 3] + delta};
            stream_vector(to + lane * columns + c, v);
        }
    }

    // The first `count` of one row of outputs, coalesced by way of shared memory.
    static __device__ __forceinline__ void store_staged(T* to, const T (&row)[columns], T delta, int lane, int count,
                                                        Buffers& staging) {
#pragma unroll
        for (int c = 0; c < columns; c += 4) {
            const T v[4] = {row[c] + delta, row[c + 1] + delta, row[c + 2] + delta, row[c + 3] + delta};
            store_vector(staging.buffer() + lane * columns + c, v);
        }
        __syncwarp();
#pragma unroll
        for (int k = 0; k < columns; ++k)
            if (32 * k + lane < count) to[32 * k + lane] = staging.buffer()[32 * k + lane];
        staging.next();
    }
};

}  // namespace leanconv
