// A small filter over single-channel images, the pixels held in registers (Chen et al., register cache).
//
// Arithmetic per output: 2 * R * S flops for 8 bytes (one pixel read, one written), so at 4.25 TB/s and 67 TFLOP/s
// copying the image is the bound up to about 7x7 and FMA issue above it. A warp makes `rows` rows of 32 * columns
// outputs. Each lane keeps the windows of `rows` input rows, columns + S - 1 pixels each, in a ring of registers:
// per filter row one window is fetched and rows * columns * S FMAs are issued, every weight being read once for
// rows * columns of them. Large filters should approach what a well-tuned SGEMM reaches (75 % of the peak),
// small ones a device copy.
#pragma once

#include <lib/border.cuh>
#include <lib/index.cuh>
#include <lib/ptx.cuh>
#include <lib/vector.cuh>

namespace leanconv {

template <class T> struct Arithmetic { using type = T; };
template <> struct Arithmetic<int> { using type = unsigned; };  // int32 wraps around; signed overflow is undefined

// One image of the batch, and its place on the grid's plane.
template <class T>
struct Plane {
    const T* x;
    T* y;
    int height, width;
    int64 x_pitch, y_pitch;
    T value;
};

__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

// A warp's two row buffers in shared memory.
// NOTE: taken in turn they need one __syncwarp a row: a buffer is written again only after the barrier that follows
// every lane's reads of it.
template <class T, int size>
struct Staging {
    static constexpr int bytes = 2 * size * static_cast<int>(sizeof(T));
    T* base;
    int offset = 0;

    __device__ __forceinline__ explicit Staging(T* base_) : base(base_) {}
    __device__ __forceinline__ T* buffer() const { return base + offset; }
    __device__ __forceinline__ void next() { offset = size - offset; }
};

template <class Problem, class Tuning>
struct WarpTile {
    using T = typename Arithmetic<typename Problem::element>::type;
    static constexpr int r = Problem::r, s = Problem::s;
    static constexpr int rows = Tuning::rows, columns = Tuning::columns, depth = Tuning::depth;
    static constexpr int inputs = rows + r - 1;           // input rows a tile reads
    static constexpr int window = columns + s - 1;        // pixels of one of them that a lane needs
    static constexpr int left = round_up(Problem::anchor_x, columns);           // halo columns, in whole vectors
    static constexpr int right = round_up(s - 1 - Problem::anchor_x, columns);
    static constexpr int lead = round_up(Problem::anchor_x, 4) - Problem::anchor_x;  // unused pixels before a window
    static constexpr int chunks = ceil_div(lead + window, 4);
    static constexpr int span = 31 * columns + 4 * chunks;                      // pixels of a row that a warp reads
    static constexpr int pieces = ceil_div(span, 32);
    static constexpr int weight_pitch = round_up(s, 4);
    using Buffers = Staging<T, 32 * pieces>;

    static_assert(columns % 4 == 0, "a lane loads and stores whole 128-bit vectors");
    static_assert(sizeof(T) == 4, "vectors are counted in 4-byte elements");
    static_assert(0 <= Problem::anchor_x && Problem::anchor_x < s, "the anchor lies inside the filter");
    static_assert(0 <= Problem::anchor_y && Problem::anchor_y < r, "the anchor lies inside the filter");
    static_assert(depth > rows, "the ring holds the rows in use and one that is under way");
    static_assert((left + right) / columns <= 32, "each lane keeps at most one vector of the halo");

    // Windows straight from memory: overlapping 128-bit loads, which L1 serves. Needs the whole span inside the image.
    struct DirectRows {
        static constexpr bool into_ring = true;
        struct Raw {};
        const T* at;
        int64 pitch;

        __device__ __forceinline__ DirectRows(const Plane<T>& plane, int i, int j, int lane, Buffers&)
            : at(plane.x + (i - Problem::anchor_y) * plane.x_pitch + (j - Problem::anchor_x - lead + lane * columns)),
              pitch(plane.x_pitch) {}
        __device__ __forceinline__ void load(T (&to)[window], int n) const {
            const T* from = at + n * pitch;
#pragma unroll
            for (int k = 0; k < chunks; ++k) {
                const Vector<T, 4> v = load_vector<4>(from + 4 * k);
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (4 * k + e >= lead && 4 * k + e - lead < window) to[4 * k + e - lead] = v.v[e];
            }
        }
    };

    // Each pixel loaded once: a lane loads its own columns, a few lanes the halo, and neighbours come by shuffle.
    struct ShuffledRows {
        static constexpr bool into_ring = false;
        struct Raw {
            T own[columns], halo[columns];
        };
        const T* at;
        int64 pitch, to_halo;
        int lane;

        __device__ __forceinline__ ShuffledRows(const Plane<T>& plane, int i, int j, int lane_, Buffers&)
            : at(plane.x + (i - Problem::anchor_y) * plane.x_pitch + j + lane_ * columns), pitch(plane.x_pitch),
              to_halo(lane_ < right / columns ? 32 * columns : -32 * columns), lane(lane_) {}
        __device__ __forceinline__ void load(Raw& raw, int n) const {
            const T* from = at + n * pitch;
            const bool has_halo = lane < right / columns || lane >= 32 - left / columns;
#pragma unroll
            for (int k = 0; k < columns; k += 4) {
                const Vector<T, 4> own = load_vector<4>(from + k);
                Vector<T, 4> halo{};
                if (has_halo) halo = load_vector<4>(from + to_halo + k);
#pragma unroll
                for (int e = 0; e < 4; ++e) raw.own[k + e] = own.v[e], raw.halo[k + e] = halo.v[e];
            }
        }
        __device__ __forceinline__ void deliver(const Raw& raw, T (&to)[window]) {
#pragma unroll
            for (int e = 0; e < window; ++e) {
                const int from = e - Problem::anchor_x + left;  // counted from the left end of the halo
                const int distance = from / columns - left / columns, element = from % columns;
                // NOTE: lanes wrap around: who looks past lane 31 finds the right halo in the lanes counted from 0,
                // who looks before lane 0 the left halo in those counted from 31. The giver selects.
                const bool gives_halo = distance > 0 ? lane < distance : lane >= 32 + distance;
                const T given = distance != 0 && gives_halo ? raw.halo[element] : raw.own[element];
                to[e] = distance == 0 ? given : __shfl_sync(0xffffffffu, given, (lane + distance) & 31);
            }
        }
    };

    // Any row of any image: mapped element by element, coalesced, and turned into windows through shared memory.
    struct StagedRows {
        static constexpr bool into_ring = false;
        struct Raw {
            T v[pieces];
        };
        const Plane<T>& plane;
        int first_row, lane;
        int column[pieces];
        Buffers& staging;

        __device__ __forceinline__ StagedRows(const Plane<T>& plane_, int i, int j, int lane_, Buffers& staging_)
            : plane(plane_), first_row(i - Problem::anchor_y), lane(lane_), staging(staging_) {
#pragma unroll
            for (int k = 0; k < pieces; ++k) {
                const int wanted = j - Problem::anchor_x - lead + 32 * k + lane;
                column[k] = border_index<typename Problem::border>(wanted, plane.width);
            }
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
#pragma unroll
            for (int k = 0; k < chunks; ++k) {
                const Vector<T, 4> v = load_vector<4>(staging.buffer() + lane * columns + 4 * k);
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (4 * k + e >= lead && 4 * k + e - lead < window) to[4 * k + e - lead] = v.v[e];
            }
            staging.next();
        }
    };

    // One filter row r (in ring position `turn`) for all outputs of the lane.
    static __device__ __forceinline__ void multiply(T (&acc)[rows][columns], const T (&ring)[depth][window],
                                                    const T* weights, int turn) {
#pragma unroll
        for (int k = 0; k < s; k += 4) {
            const Vector<T, 4> w = load_vector<4>(weights + k);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (k + e >= s) continue;
#pragma unroll
                for (int p = 0; p < rows; ++p)
#pragma unroll
                    for (int c = 0; c < columns; ++c) acc[p][c] += w.v[e] * ring[(turn + p) % depth][k + e + c];
            }
        }
    }

    template <class Rows>
    static __device__ __forceinline__ void accumulate(T (&acc)[rows][columns], Rows& source, const T* weights) {
        constexpr int ahead = depth - 1;  // rows between the first in use and the one fetched meanwhile
        constexpr int first = ahead < inputs ? ahead : inputs;
        T ring[depth][window];
        if constexpr (Rows::into_ring) {
#pragma unroll
            for (int n = 0; n < first; ++n) source.load(ring[n], n);
        } else {
            typename Rows::Raw raw[first];
#pragma unroll
            for (int n = 0; n < first; ++n) source.load(raw[n], n);
#pragma unroll
            for (int n = 0; n < first; ++n) source.deliver(raw[n], ring[n]);
        }
        const auto step = [&](int filter_row, int turn) {
            const bool more = filter_row + ahead < inputs;
            typename Rows::Raw raw;
            if constexpr (Rows::into_ring) {
                if (more) source.load(ring[(turn + ahead) % depth], filter_row + ahead);
            } else {
                if (more) source.load(raw, filter_row + ahead);
            }
            multiply(acc, ring, weights + filter_row * weight_pitch, turn);
            if constexpr (!Rows::into_ring) {
                if (more) source.deliver(raw, ring[(turn + ahead) % depth]);
            }
        };
        constexpr int looped = (r - 1) / depth * depth;
#pragma unroll 1
        for (int filter_row = 0; filter_row < looped; filter_row += depth) {
#pragma unroll
            for (int turn = 0; turn < depth; ++turn) step(filter_row + turn, turn);
        }
#pragma unroll
        for (int turn = 0; turn < r - looped; ++turn) step(looped + turn, turn);
    }

    static __device__ __forceinline__ void store(const T (&acc)[rows][columns], const Plane<T>& plane, int i, int j,
                                                 int lane, T delta, Buffers& staging) {
        const bool vectors = aligned(plane.y, plane.y_pitch) && j + 32 * columns <= plane.width;
        T* to = plane.y + i * plane.y_pitch + j;
#pragma unroll
        for (int p = 0; p < rows; ++p, to += plane.y_pitch) {
            if (i + p >= plane.height) continue;
            T* out = vectors ? to + lane * columns : staging.buffer() + lane * columns;
#pragma unroll
            for (int c = 0; c < columns; c += 4) {
                Vector<T, 4> v;
#pragma unroll
                for (int e = 0; e < 4; ++e) v.v[e] = acc[p][c + e] + delta;
                store_vector(out + c, v);
            }
            if (vectors) continue;
            __syncwarp();
#pragma unroll
            for (int k = 0; k < columns; ++k) {
                const int at = 32 * k + lane;
                if (j + at < plane.width) to[at] = staging.buffer()[at];
            }
            staging.next();
        }
    }

    static __device__ __forceinline__ bool aligned(const T* pointer, int64 pitch) {
        return reinterpret_cast<unsigned long long>(pointer) % 16 == 0 && pitch % 4 == 0;
    }
};

// A block's warps lie one below the other, `rows` apart: they read each other's input rows from L1.
// Block b computes strip b % strips of band (b / strips) % bands of image b / strips / bands.
template <class Problem, class Tuning>
__device__ __forceinline__ void register_cache(const typename Problem::element* x, const typename Problem::element* w,
                                               typename Problem::element* y, typename Problem::element value,
                                               typename Problem::element delta, int height, int width, int64 x_pitch,
                                               int64 x_step, int64 y_pitch, int64 y_step, int strips, int bands) {
    using Tile = WarpTile<Problem, Tuning>;
    using T = typename Tile::T;
    // The shuffle tells the compiler that the number is the same in all lanes, so that its branches do not part them.
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
    // Shared memory: the filter, rows padded to whole vectors, then each warp's buffers.
    T* const weights = reinterpret_cast<T*>(shared_memory());
    typename Tile::Buffers staging(weights + Tile::r * Tile::weight_pitch + warp * (Tile::Buffers::bytes / 4));
    const T* from = reinterpret_cast<const T*>(w);
    for (int k = threadIdx.x; k < Tile::r * Tile::weight_pitch; k += 32 * Tuning::warps) {
        const int column = k % Tile::weight_pitch;
        weights[k] = column < Tile::s ? from[k / Tile::weight_pitch * Tile::s + column] : T(0);
    }
    __syncthreads();

    const int strip = blockIdx.x % strips, rest = blockIdx.x / strips;
    const int image = rest / bands;
    const int i = (rest % bands * Tuning::warps + warp) * Tuning::rows, j = strip * 32 * Tuning::columns;
    if (i >= height) return;
    const Plane<T> plane{reinterpret_cast<const T*>(x) + image * x_step, reinterpret_cast<T*>(y) + image * y_step,
                         height, width, x_pitch, y_pitch, static_cast<T>(value)};

    T acc[Tuning::rows][Tuning::columns] = {};
    const bool inside = i >= Problem::anchor_y && i - Problem::anchor_y + Tile::inputs <= height && j >= Tile::left &&
                        j + 32 * Tuning::columns + Tile::right <= width && Tile::aligned(plane.x, x_pitch);
    if (inside) {
        using Rows = typename Select<Tuning::shuffle, typename Tile::ShuffledRows, typename Tile::DirectRows>::type;
        Rows source(plane, i, j, lane, staging);
        Tile::accumulate(acc, source, weights);
    } else {
        typename Tile::StagedRows source(plane, i, j, lane, staging);
        Tile::accumulate(acc, source, weights);
    }
    Tile::store(acc, plane, i, j, lane, static_cast<T>(delta), staging);
}

}  // namespace leanconv
