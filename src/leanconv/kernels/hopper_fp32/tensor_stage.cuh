// What a consumer does with one stage: it loads its pixels from shared memory, splits them into operand A in registers,
// multiplies with the filters in shared memory, and promotes the partial sums.
#pragma once

#include <device/ptx/memory.cuh>
#include <device/ptx/mma.cuh>
#include <device/ptx/sync.cuh>
#include <device/pipeline/pixels.cuh>
#include <device/pipeline/split.cuh>

namespace leanconv {

// Operand A of one stage: two rows of a thread, four k16 steps.
template <bool three_products>
struct SplitFragments {
    static constexpr bool exact = three_products;
    static constexpr int k_steps = 4;
    unsigned high[k_steps][4], low[exact ? k_steps : 1][4];
    float inverse_scale[2];  // of the two rows

    // A dependency token: it is known when every fragment is.
    __device__ __forceinline__ unsigned token() const {
        unsigned bits = 0;
#pragma unroll
        for (int i = 0; i < 4 * k_steps; ++i) {
            bits ^= high[i / 4][i % 4];
            if constexpr (exact) bits ^= low[i / 4][i % 4];
        }
        return bits;
    }
};

// The products of one stage with the filters of one MMA tile, in two parts: the small ones, with low halves, come first.
template <class Fragments, int count>
__device__ __forceinline__ void begin_products(float (&partial)[count], const Fragments& pixels,
                                               const unsigned char* filters) {
    constexpr int mma_n = 2 * count;
    const MatrixDescriptor high = matrix_descriptor(filters, 0, 1024, 128);
    if constexpr (!Fragments::exact) {
#pragma unroll
        for (int i = 0; i < Fragments::k_steps; ++i) wgmma_f16(partial, pixels.high[i], high + 32 * i, i > 0);
    } else {
        const MatrixDescriptor low = matrix_descriptor(filters + mma_n * split_depth * 2, 0, 1024, 128);
#pragma unroll
        for (int i = 0; i < Fragments::k_steps; ++i) wgmma_f16(partial, pixels.low[i], high + 32 * i, i > 0);
#pragma unroll
        for (int i = 0; i < Fragments::k_steps; ++i) wgmma_f16(partial, pixels.high[i], low + 32 * i, true);
    }
}
template <class Fragments, int count>
__device__ __forceinline__ void end_products(float (&partial)[count], const Fragments& pixels, const unsigned char* filters) {
    if constexpr (Fragments::exact) {
        const MatrixDescriptor high = matrix_descriptor(filters, 0, 1024, 128);
#pragma unroll
        for (int i = 0; i < Fragments::k_steps; ++i) wgmma_f16(partial, pixels.high[i], high + 32 * i, true);
    }
}

// Adds partial sums to the float32 sums.
template <int count>
__device__ __forceinline__ void promote(float (&sums)[count], const float (&partial)[count], const float (&inverse_scale)[2]) {
#pragma unroll
    for (int i = 0; i < count; ++i) sums[i] = fmaf(partial[i], inverse_scale[i / 2 % 2], sums[i]);
}

// The ping-pong schedule: the warpgroups multiply one after the other, a stage each, so that one multiplies while the others
// load and convert. Without it they convert at the same time, and the tensor cores wait.
template <int warpgroups, bool wanted>
struct PingPong {
    int warpgroup;
    static constexpr bool active = wanted && warpgroups > 1;

    // The last warpgroup starts the first one.
    __device__ __forceinline__ explicit PingPong(int warpgroup) : warpgroup(warpgroup) {
        if constexpr (active)
            if (warpgroup == warpgroups - 1) barrier_arrive(1, 256);
    }
    // NOTE: after the conversion, or nothing would overlap it (zero_after says how that can fail).
    template <class Fragments>
    __device__ __forceinline__ void wait(const Fragments& pixels) const {
        if constexpr (active) barrier_sync(1 + warpgroup + zero_after(pixels.token()), 256);
    }
    __device__ __forceinline__ void wait() const {
        if constexpr (active) barrier_sync(1 + warpgroup, 256);
    }
    // NOTE: nobody waits after the last stage of all.
    __device__ __forceinline__ void pass(bool last) const {
        if constexpr (active) {
            const int next = warpgroup + 1 < warpgroups ? warpgroup + 1 : 0;
            if (next != 0 || !last) barrier_arrive(1 + next, 256);
        }
    }
};
template <class Tuning> using PingPongOf = PingPong<Tuning::warpgroups, Tuning::ping_pong>;

// Multiplies each of a thread's 16 values of its rows by the square of its channel's factor, which `factor_of` finds.
template <int rows, class FactorOf>
__device__ __forceinline__ void scale_channels(float (&x)[rows][4][4], const FactorOf& factor_of) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float factor = factor_of(i);
#pragma unroll
        for (int row = 0; row < rows; ++row) x[row][i / 4][i % 4] = x[row][i / 4][i % 4] * factor * factor;
    }
}

// For linear pixels, whose copies ignore the sides of the image: which taps of a thread's two pixels lie outside.
template <class Problem, class Tuning>
struct TapMask {
    static constexpr bool any = Tuning::linear && Problem::padded;
    int p[any ? 2 : 1], q[any ? 2 : 1], apart;

    __device__ __forceinline__ TapMask(const TensorTiles<Problem, Tuning>& tiles, Offset<Problem> tile, int row)
        : apart(Problem::chwn ? static_cast<int>(tiles.numbers.batch) : 1) {
        if constexpr (any) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                tiles.numbers.position(tiles.first_pixel(tile) + row + 8 * i, p[i], q[i]);
                p[i] -= Problem::pad_top, q[i] -= Problem::pad_left;
            }
        }
    }
    // Where in its box the 32 linear pixels of channel block `number` begin.
    __device__ __forceinline__ int first(int number) const {
        const int tap = number / TensorFilters<Problem, Tuning>::tap_blocks;
        return Tuning::linear ? linear_shift<Problem, Tuning>(tap, apart) & 3 : 0;
    }
    // Whether channel block `number` of the reduction lies inside the image for pixel i.
    __device__ __forceinline__ bool inside(int i, int number) const {
        const int tap = number / TensorFilters<Problem, Tuning>::tap_blocks;
        const FilterTap<Problem> at(tap);  // slices outside a volume are zeros: they lie before all its pixels, or behind
        return static_cast<unsigned>(p[i] + at.r * Problem::dilation_h) < Problem::h &&
               static_cast<unsigned>(q[i] + at.s * Problem::dilation_w) < Problem::w;
    }
};

// A thread's values of a stage: two rows of pixels, a quarter of the 64 reduction elements of each.
template <class Problem, class Tuning>
struct StageValues {
    using Rings = TensorRings<Problem, Tuning>;

    // Element j of a thread's four of a k16 step. In rows they are neighbours, as the filters are permuted.
    static __device__ __forceinline__ int element(int t, int j) { return Tuning::rows ? 4 * t + j : 2 * t + j % 2 + j / 2 * 8; }

    static __device__ __forceinline__ void load4(float (&v)[4], const unsigned char* stage, int row, int t, int k16,
                                                     int first) {
        const unsigned char* const half = stage + k16 / 2 * Rings::half_bytes;
        if constexpr (Tuning::rows) {
            const int unit = (k16 % 2 * 4 + t) ^ row % 8;
            ld_shared_v4(v, reinterpret_cast<const float*>(half + row * 128 + unit * 16));
            return;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int channel = element(t, j);
            if constexpr (Tuning::linear) {
                const unsigned char* const box_width = half + row / 32 * Rings::box_bytes;
                const float* const column = reinterpret_cast<const float*>(box_width) + row % 32 + first;
                v[j] = __uint_as_float(ld_shared_u32(column + (k16 % 2 * 16 + channel) * Rings::linear_pitch));
            } else {
                const float* const column = reinterpret_cast<const float*>(stage) + row;
                v[j] = __uint_as_float(ld_shared_u32(column + (k16 * 16 + channel) * Rings::pitch));
            }
        }
    }

    // `rows`: the slots of the two rows.
    static __device__ __forceinline__ void load(float (&x)[2][4][4], const unsigned char* shared, const float* factors,
                                                bool scaled, const int (&rows)[2], int t,
                                                const TapMask<Problem, Tuning>& mask, int stage) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int first = mask.first(2 * stage + half);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                load4(x[i % 2][2 * half + i / 2], shared, rows[i % 2], t, 2 * half + i / 2, first);
        }
        if constexpr (TapMask<Problem, Tuning>::any) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const bool inside = mask.inside(i, 2 * stage + half);
#pragma unroll
                    for (int j = 0; j < 8; ++j) {
                        float& value = x[i][2 * half + j / 4][j % 4];
                        value = inside ? value : 0.0f;
                    }
                }
        }
        if (scaled) {
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const float factor = factors[i / 4 * 16 + element(t, i % 4)];
                x[0][i / 4][i % 4] = x[0][i / 4][i % 4] * factor * factor;
                x[1][i / 4][i % 4] = x[1][i / 4][i % 4] * factor * factor;
            }
        }
    }
};

// The same of resident images.
template <class Problem, class Tuning>
struct ResidentValues {
    using F = TensorFilters<Problem, Tuning>;
    using Rings = TensorRings<Problem, Tuning>;
    static constexpr int taps = F::taps;
    static_assert(taps <= 32, "a pixel's taps that lie inside the image are bits");
    ResidentStages<Problem, Tuning> stages;
    int at[2];           // in floats, where the window of both rows begins
    unsigned inside[2];  // taps that lie inside the image, as bits
    bool valid[2][2];    // whether the pixels of both channel blocks of this stage do

    __device__ __forceinline__ void begin(const TensorTiles<Problem, Tuning>& tiles, const TileWalk<Problem, Tuning>& walk,
                                          int row) {
        const Offset<Problem> from = tiles.first_pixel(walk.tile), count = tiles.numbers.count();
        const Offset<Problem> first_n = from / Rings::image;
        stages.begin(walk);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Offset<Problem> number = from + row + 8 * i;
            const Pixel<Problem> pixel(number < count ? number : from, tiles.numbers.batch);
            const int h = pixel.p * Problem::stride_h - Problem::pad_top, w = pixel.q * Problem::stride_w - Problem::pad_left;
            at[i] = static_cast<int>(pixel.n - first_n) * (32 * Rings::channel_pixels) + h * Problem::w + w;
            inside[i] = 0;
#pragma unroll
            for (int j = 0; j < taps; ++j) {
                const bool is_inside = static_cast<unsigned>(h + j / Problem::s * Problem::dilation_h) < Problem::h &&
                                       static_cast<unsigned>(w + j % Problem::s * Problem::dilation_w) < Problem::w;
                if (is_inside && number < count) inside[i] |= 1u << j;
            }
        }
    }

    // Values that are not `valid` are arbitrary.
    __device__ __forceinline__ void load(float (&x)[2][4][4], const Rings& rings, const float* factors, bool scaled, int t,
                                         int stage) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int tap = stages.enter(rings, stage, half);
            const float* const channels =
                reinterpret_cast<const float*>(rings.base + stages.at) + t * (F::spacing * Rings::channel_pixels);
            const int shift = tap / Problem::s * (Problem::dilation_h * Problem::w) + tap % Problem::s * Problem::dilation_w;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                valid[i][half] = stages.exists(stage, half) && (inside[i] >> tap & 1) != 0;
                const float* const from = channels + (valid[i][half] ? at[i] + shift : 0);
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    x[i][2 * half + j / 4][j % 4] =
                        __uint_as_float(ld_shared_u32(from + F::lane_channel(0, j) * Rings::channel_pixels));
            }
        }
        if (scaled) scale_channels(x, [&](int i) { return factors[i / 8 * 32 + F::lane_channel(t, i % 8)]; });
    }
    // Zeros outside the image. Not in `load`, so that the loads stay in flight until their values are needed.
    __device__ __forceinline__ void zero_outside(float (&x)[2][4][4]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < 16; ++j) x[i][j / 4][j % 4] = valid[i][j / 8] ? x[i][j / 4][j % 4] : 0.0f;
    }
};

// For kernels without resident images.
struct NoResident {};
template <class Problem, class Tuning>
using ResidentValuesOf =
    typename Select<TensorFilters<Problem, Tuning>::resident, ResidentValues<Problem, Tuning>, NoResident>::type;

}  // namespace leanconv
