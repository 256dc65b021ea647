// From a warpgroup's accumulators of 64 filters to the output of native_gemm_pointwise: what follows the sums, rounding to 16 bits,
// stores.
//
// A thread holds pairs of neighbouring pixels of two filters, and pixels of a filter are neighbours in NCHW. A warp's pairs go
// through shared memory of its own, 16 filters x 64 pixels at a time, so that its lanes store as many pixels at once as are aligned
// in every image. Residuals come the same way in the other direction. Where four pixels or more are stored at once, but for outputs
// at a stride, those of the next 64 pixels are loaded while these are stored. Before the products most of their lines are fetched to
// the L2 cache, one for each 32 columns.
#pragma once

#include <device/epilogue.cuh>
#include <device/index.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/sync.cuh>
#include <kernels/hopper_native/accumulators.cuh>

namespace leanconv {

// A warp's stores. `Tiles` says which image and pixel a tile's column has.
template <class Problem, class Tiles>
struct PointwiseOutput {
    using T = typename Problem::result;
    // Filters lie 36 words apart: pairs of eight filters meet each bank once.
    static constexpr int pitch = 72, bytes = 16 * pitch * sizeof(T);
    // Pixels stored at once. The gradient of a layer of stride 2 has every second pixel of every second row: a lane stores the zeros
    // beside and below them too.
    static constexpr int pixels = output_pixels<Problem>, spread = Tiles::spread;
    static constexpr int together = spread ? gcd(spread / 2, 4) : gcd(Tiles::strided ? Problem::q : pixels, Tiles::strided ? 4 : 8);
    static constexpr int words = together / 2;
    int lane;
    T* staging;
    Bias<Problem> bias;

    static __device__ __forceinline__ void copy_unit(T* to, const T* from) {
        if constexpr (together == 8) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
        else if constexpr (together == 4) *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
        else if constexpr (together == 2) *reinterpret_cast<unsigned*>(to) = *reinterpret_cast<const unsigned*>(from);
        else *to = *from;
    }
    // Pixels with a zero behind each, and a row of zeros below.
    static __device__ __forceinline__ void store_apart(T* to, const T* from) {
        unsigned w[together] = {};
#pragma unroll
        for (int row = 0; row < 2; ++row) {
#pragma unroll
            for (int i = 0; i < together; ++i) w[i] = row == 0 ? from[i].bits : 0u;
            unsigned* const at = reinterpret_cast<unsigned*>(to + row * spread);
            if constexpr (together == 4) *reinterpret_cast<uint4*>(at) = make_uint4(w[0], w[1], w[2], w[3]);
            else if constexpr (together == 2) *reinterpret_cast<uint2*>(at) = make_uint2(w[0], w[1]);
            else *at = w[0];
        }
    }
    template <int columns>
    static constexpr int turns = ceil_div(16 * (columns / together), 32);  // of a lane, each with a unit of 16 filters
    // Calls `act` with each of the lane's turns whose unit exists, and where it lies in the staging buffer and in y. `columns` of a
    // tile, from `begin` on; `filters`, from number `filter` of all groups on.
    template <int columns, class Act>
    __device__ __forceinline__ void for_units(T* y, long long batch, int tile, int begin, int filter, int filters,
                                              const Act& act) const {
        constexpr int units = columns / together, all = turns<columns>, at_once = all < 16 || Problem::add ? all : 8;
#pragma unroll at_once
        for (int i = 0; i < all; ++i) {
            const int at = i * 32 + lane, line = at / units, column = at % units * together;
            const auto place = Tiles::place(tile, begin + column);
            if (line >= filters || begin + column >= Tiles::step || place.image >= batch || place.pixel >= pixels) continue;
            const Offset<Problem> channel = static_cast<Offset<Problem>>(place.image) * Problem::k + filter + line;
            if constexpr (spread > 0) {
                constexpr int q = spread / 2;
                act(i, staging + line * pitch + column,
                    y + (channel * (4 * pixels) + place.pixel / q * (2 * spread) + place.pixel % q * 2));
            } else {
                act(i, staging + line * pitch + column, y + (channel * pixels + place.pixel));
            }
        }
    }
    // A lane's residuals of 16 filters and `columns`: on their way from memory to the staging buffer.
    template <int columns>
    struct Residuals {
        unsigned held[Problem::add ? turns<columns> : 1][words > 0 ? words : 1];
        __device__ __forceinline__ void load(const PointwiseOutput& output, T* y, long long batch, int tile, int begin, int filter,
                                             int filters) {
            output.template for_units<columns>(y, batch, tile, begin, filter, filters, [&](int i, T*, const T* at) {
                if constexpr (words > 0) load_residual<Problem>(held[i], output.bias, at);
                else held[i][0] = load_read_only(residual_of(output.bias, at)).bits;
            });
        }
        __device__ __forceinline__ void stage(const PointwiseOutput& output, T* y, long long batch, int tile, int begin, int filter,
                                              int filters) const {
            output.template for_units<columns>(y, batch, tile, begin, filter, filters, [&](int i, T* shared, const T*) {
                if constexpr (words == 0) {
                    shared->bits = static_cast<unsigned short>(held[i][0]);
                } else {
#pragma unroll
                    for (int j = 0; j < words; ++j) reinterpret_cast<unsigned*>(shared)[j] = held[i][j];
                }
            });
        }
    };
    // Fetches to the L2 cache the lines of the residuals of a tile's columns, and of 16 filters of the group from k on.
    __device__ __forceinline__ void fetch_residuals(const T* y, long long batch, int tile, int k, int columns) const {
        const int filters = min(16, Problem::group_k - k), filter = Tiles::group(tile) * Problem::group_k + k;
        for (int i = lane; i < columns / 2; i += 32) {  // 32 columns are 64 bytes
            const auto place = Tiles::place(tile, i / 16 * 32);
            if (i % 16 < filters && place.image < batch && place.pixel < pixels) {
                const Offset<Problem> channel = static_cast<Offset<Problem>>(place.image) * Problem::k + filter + i % 16;
                prefetch_l2(residual_of(bias, y + (channel * pixels + place.pixel)));
            }
        }
    }
    // The sums of `columns` columns of a tile, from `begin` on; of the filters of the group from k on.
    template <int columns>
    __device__ __forceinline__ void store(const float (&sums)[columns / 2], T* y, long long batch, int tile, int begin, int k) const {
        constexpr int width = columns < 64 ? columns : 64;
        static_assert(columns % width == 0, "a warp stages whole parts of the columns");
        const int filters = min(16, Problem::group_k - k), filter = Tiles::group(tile) * Problem::group_k + k;
        if (filters <= 0) return;
        Term<Problem> terms[2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
            terms[half] = term_of<Problem>(bias, filter + lane / 4 + 8 * half, lane / 4 + 8 * half < filters);
        // Where a thread has registers for them, the next residuals are on their way.
        constexpr bool ahead = Problem::add && columns > width && together >= 4 && !Tiles::strided;
        Residuals<width> residuals[ahead ? 2 : 1];
        if constexpr (ahead) residuals[0].load(*this, y, batch, tile, begin, filter, filters);
#pragma unroll
        for (int column = 0; column < columns; column += width) {
            const int own = ahead ? column / width % 2 : 0, loaded = ahead ? column + width : column;
            if constexpr (Problem::add) {
                if (loaded < columns) residuals[ahead ? 1 - own : 0].load(*this, y, batch, tile, begin + loaded, filter, filters);
            }
            __syncwarp();  // the pixels before have been read
            if constexpr (adds<Problem>) {
                if constexpr (Problem::add) {
                    residuals[own].stage(*this, y, batch, tile, begin + column, filter, filters);
                } else {
                    for_units<width>(y, batch, tile, begin + column, filter, filters,
                                     [](int, T* shared, const T* at) { copy_unit(shared, at); });
                }
                __syncwarp();
            }
#pragma unroll
            for (int i = 0; i < width / 4; ++i) {
                const int half = i % 2;
                unsigned* const pair =
                    reinterpret_cast<unsigned*>(staging + (lane / 4 + 8 * half) * pitch + i / 2 * 8 + lane % 4 * 2);
                const unsigned residual = adds<Problem> ? *pair : 0;
                float v[2];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float held = adds<Problem> ? to_float(T{static_cast<unsigned short>(residual >> 16 * j)}) : 0.0f;
                    v[j] = finish<Problem>(sums[column / 2 + 2 * i + j], terms[half], held);
                }
                *pair = rounded_pair(T{}, v);
            }
            __syncwarp();
            for_units<width>(y, batch, tile, begin + column, filter, filters, [](int, const T* shared, T* at) {
                if constexpr (spread > 0) store_apart(at, shared);
                else copy_unit(at, shared);
            });
        }
    }
};

}  // namespace leanconv
