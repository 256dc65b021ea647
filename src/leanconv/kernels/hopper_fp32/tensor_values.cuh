// What a consumer's thread loads of a stage of pixels: two rows, a quarter of the 64 reduction elements of each.
#pragma once

#include <device/ptx/load.cuh>
#include <kernels/hopper_fp32/tensor_pixels.cuh>

namespace leanconv {

// The two pixels of a thread where taps may see beyond the sides of the image that flat copies do not know.
template <class Problem, class Tuning>
struct SeenTaps {
    static constexpr bool any = Tuning::flat && Problem::padded;
    int p[any ? 2 : 1], q[any ? 2 : 1], apart;

    __device__ __forceinline__ SeenTaps(const TensorTiles<Problem, Tuning>& tiles, Offset<Problem> tile, int row)
        : apart(Problem::chwn ? static_cast<int>(tiles.numbers.batch) : 1) {
        if constexpr (any) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                tiles.numbers.position(tiles.first_pixel(tile) + row + 8 * i, p[i], q[i]);
                p[i] -= Problem::pad_top, q[i] -= Problem::pad_left;
            }
        }
    }
    // Where in its box of flat pixels the 32 of piece `number` begin.
    __device__ __forceinline__ int first(int number) const {
        return Tuning::flat ? flat_shift<Problem, Tuning>(number / TensorFilters<Problem, Tuning>::of_tap, apart) & 3 : 0;
    }
    // Whether piece `number` of the reduction lies inside the image for pixel i.
    __device__ __forceinline__ bool inside(int i, int number) const {
        const int tap = number / TensorFilters<Problem, Tuning>::of_tap;
        return static_cast<unsigned>(p[i] + tap / Problem::s * Problem::dilation_h) < Problem::h &&
               static_cast<unsigned>(q[i] + tap % Problem::s * Problem::dilation_w) < Problem::w;
    }
};

template <class Problem, class Tuning>
struct StageValues {
    using Rings = TensorRings<Problem, Tuning>;

    // Element j of the four of a sixteen, which the host permuted where they are neighbours in shared memory.
    static __device__ __forceinline__ int element(int t, int j) { return Tuning::rows ? 4 * t + j : 2 * t + j % 2 + j / 2 * 8; }

    static __device__ __forceinline__ void load_four(float (&four)[4], const unsigned char* stage, int row, int t, int sixteen,
                                                     int first) {
        const unsigned char* const half = stage + sixteen / 2 * Rings::half_bytes;
        if constexpr (Tuning::rows) {
            const int unit = (sixteen % 2 * 4 + t) ^ row % 8;
            ld_shared_v4(four, reinterpret_cast<const float*>(half + row * 128 + unit * 16));
            return;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int channel = element(t, j);
            if constexpr (Tuning::flat) {
                const unsigned char* const granule = half + row / 32 * Rings::granule_bytes;
                const float* const column = reinterpret_cast<const float*>(granule) + row % 32 + first;
                four[j] = __uint_as_float(ld_shared_u32(column + (sixteen % 2 * 16 + channel) * Rings::flat_pitch));
            } else {
                const float* const column = reinterpret_cast<const float*>(stage) + row;
                four[j] = __uint_as_float(ld_shared_u32(column + (sixteen * 16 + channel) * Rings::pitch));
            }
        }
    }

    // `lines`: where the two rows lie.
    static __device__ __forceinline__ void load(float (&x)[2][4][4], const unsigned char* shared, const float* factors,
                                                bool scaled, const int (&lines)[2], int t,
                                                const SeenTaps<Problem, Tuning>& seen, int stage) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int first = seen.first(2 * stage + half);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                load_four(x[i % 2][2 * half + i / 2], shared, lines[i % 2], t, 2 * half + i / 2, first);
        }
        if constexpr (SeenTaps<Problem, Tuning>::any) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const bool inside = seen.inside(i, 2 * stage + half);
#pragma unroll
                    for (int j = 0; j < 8; ++j) {
                        float& value = x[i][2 * half + j / 4][j % 4];
                        value = inside ? value : 0.0f;
                    }
                }
        }
        if (scaled) {
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                const float factor = factors[j / 4 * 16 + element(t, j % 4)];
                x[0][j / 4][j % 4] = x[0][j / 4][j % 4] * factor * factor;
                x[1][j / 4][j % 4] = x[1][j / 4][j % 4] * factor * factor;
            }
        }
    }
};

// The same of planes: what of them a thread loads.
template <class Problem, class Tuning>
struct PlaneValues {
    using F = TensorFilters<Problem, Tuning>;
    using Rings = TensorRings<Problem, Tuning>;
    static constexpr int taps = F::taps;
    static_assert(taps <= 32, "a pixel's taps that lie inside the image are bits");
    PlaneStages<Problem, Tuning> stages;
    int at[2];           // in floats, where the window of both rows begins
    unsigned inside[2];  // its taps that lie inside the image
    bool seen[2][2];     // rows whose pixels of both pieces lie there

    __device__ __forceinline__ void begin(const TensorTiles<Problem, Tuning>& tiles, const TileWalk<Problem, Tuning>& walk, int row) {
        const Offset<Problem> from = tiles.first_pixel(walk.tile), count = tiles.numbers.count();
        const Offset<Problem> first_n = from / Rings::image;
        stages.begin(walk);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Offset<Problem> number = from + row + 8 * i;
            const Pixel<Problem> pixel(number < count ? number : from, tiles.numbers.batch);
            const int h = pixel.p * Problem::stride_h - Problem::pad_top, w = pixel.q * Problem::stride_w - Problem::pad_left;
            at[i] = static_cast<int>(pixel.n - first_n) * (32 * Rings::plane) + h * Problem::w + w;
            inside[i] = 0;
#pragma unroll
            for (int j = 0; j < taps; ++j) {
                const bool is_inside = static_cast<unsigned>(h + j / Problem::s * Problem::dilation_h) < Problem::h &&
                                       static_cast<unsigned>(w + j % Problem::s * Problem::dilation_w) < Problem::w;
                if (is_inside && number < count) inside[i] |= 1u << j;
            }
        }
    }

    // Values of rows that are not `seen` are any.
    __device__ __forceinline__ void load(float (&x)[2][4][4], const Rings& rings, const float* factors, bool scaled, int t,
                                         int stage) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int tap = stages.enter(rings, stage, half);
            const float* const planes =
                reinterpret_cast<const float*>(rings.base + stages.at) + t * (F::spacing * Rings::plane);
            const int shift = tap / Problem::s * (Problem::dilation_h * Problem::w) + tap % Problem::s * Problem::dilation_w;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                seen[i][half] = stages.exists(stage, half) && (inside[i] >> tap & 1) != 0;
                const float* const from = planes + (seen[i][half] ? at[i] + shift : 0);
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    x[i][2 * half + j / 4][j % 4] =
                        __uint_as_float(ld_shared_u32(from + F::plane_channel(0, j) * Rings::plane));
            }
        }
        if (scaled) {
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                const float factor = factors[j / 8 * 32 + F::plane_channel(t, j % 8)];
                x[0][j / 4][j % 4] = x[0][j / 4][j % 4] * factor * factor;
                x[1][j / 4][j % 4] = x[1][j / 4][j % 4] * factor * factor;
            }
        }
    }
    // Zeros for what lies outside the image. Apart from the loads, which are under way until their values are needed.
    __device__ __forceinline__ void hide(float (&x)[2][4][4]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < 16; ++j) x[i][j / 4][j % 4] = seen[i][j / 8] ? x[i][j / 4][j % 4] : 0.0f;
    }
};

// For kernels that may have no planes.
struct NoPlanes {};
template <class Problem, class Tuning>
using PlaneValuesOf = typename Select<TensorFilters<Problem, Tuning>::planes, PlaneValues<Problem, Tuning>, NoPlanes>::type;

}  // namespace leanconv
