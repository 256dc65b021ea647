// What the consumers of tensor_winograd load of a stage of pixels, and the states that they compute (filter_layout.cuh).
#pragma once

#include <device/ptx/memory.cuh>
#include <device/pipeline/filter_layout.cuh>
#include <device/pipeline/pixels.cuh>
#include <kernels/hopper_fp32/tensor_stage.cuh>

namespace leanconv {

// The problem as copies and tiles see it: a pixel is a pair of outputs, two columns apart; or the pairs of several rows.
template <class Problem, class Tuning>
struct Pairs : Problem {
    static constexpr int q = ceil_div(Problem::q, 2), out_w = ceil_div(Problem::out_w, 2), stride_w = 2;
    static constexpr int p = ceil_div(Problem::p, Tuning::output_rows), out_h = ceil_div(Problem::out_h, Tuning::output_rows);
    static constexpr int stride_h = Tuning::output_rows;
};

// Pixels in rows: where those of a thread's two pairs lie in a stage, and the factors of their channels. The second warpgroup
// takes pairs and pixels backwards: its states are d3 - d1 and d2 - d1, where those of the first are d0 - d2 and d1 + d2. So
// both do the same additions.
template <class Problem, class Tuning>
struct PairPixels {
    using P = Pairs<Problem, Tuning>;
    using F = TensorFilters<P, Tuning>;
    using Rings = TensorRings<P, Tuning>;
    static constexpr bool same_row = P::q % 2 == 0;  // both pairs are in one row
    const float* prepared;
    const float* factors;
    int pair, apart;  // one of two neighbouring pairs, and how far on the other one is
    int first[2][2];  // where the first and the third pixel of both lie in a stage, in bytes

    __device__ __forceinline__ PairPixels(const float* prepared, int warp, int lane, int sharer)
        : prepared(prepared), pair(warp * 16 + lane / 4 * 2 + sharer), apart(1 - 2 * sharer) {
        factors = prepared + F::factors_at;
    }
    __device__ __forceinline__ void begin(const TensorTiles<P, Tuning>& tiles, Offset<Problem> tile) {
        if constexpr (Problem::groups > 1) factors = prepared + F::factors_at + tiles.group(tile) * F::stages * split_depth;
        const int in_row = static_cast<int>(tiles.first_pixel(tile) % P::q);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int number = pair + apart * i;
            const int slot = 2 * number + (in_row + number) / P::q * 2 + (apart < 0 ? 3 : 0);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int at = slot + 2 * apart * j;
                first[i][j] = at * 128 + (threadIdx.x % 4 ^ at % 8) * 16;
            }
        }
    }
    // Four channels of pixel j of pair i in the stage at `place`. In one row, the second pair's pixels are those of the first
    // pair from the third on.
    // NOTE: slots of 128 bytes are swizzled in eights, and stages begin with one. The first pixel's slot is even (backwards
    // odd): the next one's differs in its last bit, and that of the fifth, 4 slots on, in its third.
    __device__ __forceinline__ int where(int place, int i, int j, int k16) const {
        const int number = same_row ? 2 * i + j : j, next = number % 2, fifth = number / 4;
        const int even = place + first[same_row ? 0 : i][number / 2 % 2];
        const int at = (even ^ next * (128 + 16) ^ (k16 % 2 + fifth) % 2 * 64) + fifth * 512 * apart;
        return at + k16 / 2 * Rings::half_bytes;
    }
    __device__ __forceinline__ void load4(float (&v)[4], const unsigned char* base, int place, int i, int j,
                                              int k16) const {
        ld_shared_v4(v, reinterpret_cast<const float*>(base + where(place, i, j, k16)));
    }
    // The state of half a stage of the column that segments leave: d0, or d1 for the second warpgroup.
    __device__ __forceinline__ void load_rest(float (&x)[2][4][4], const unsigned char* base, int place, int half) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int pair = i / 2, k16 = 2 * half + i % 2;
            const int at = apart > 0 ? where(place, pair, 0, k16) : where(place, pair, 2, k16);
            ld_shared_v4(x[pair][k16], reinterpret_cast<const float*>(base + at));
        }
    }
};

// Linear pixels, in columns (pixels.cuh). The copies of a tap begin at multiples of four pixels; so all pairs begin with an
// even pixel of their column, or all with an odd one. Two loads of two pixels bring four neighbours, of which three are used.
// The columns lie so that these loads have no bank conflicts.
template <class Problem, class Tuning>
struct LinearPairPixels {
    static constexpr int apart = 8;
    using P = Pairs<Problem, Tuning>;
    using F = TensorFilters<P, Tuning>;
    using Rings = TensorRings<P, Tuning>;
    static constexpr int warps = Rings::box_width / 16;  // of a box
    static_assert(!Tuning::linear || Rings::linear_pitch % 32 == 8, "the four channels of a load lie eight banks apart");
    const float* prepared;
    const float* factors;
    int pair, sharer, place, column[2];  // columns that the windows begin with
    // And rows, in volumes: above and below a slice are the rows of others. Around an image a copy brings zeros.
    static constexpr bool volume = Depth<Problem>::volume;
    int row[volume ? 2 : 1];
    int in_resident[F::resident ? 2 : 1];  // or where they begin in resident images, in the thread's first channel, for tap 0

    __device__ __forceinline__ LinearPairPixels(const float* prepared, int warp, int lane, int sharer)
        : prepared(prepared), pair(warp * 16 + lane / 4), sharer(sharer),
          place(warp / warps * Rings::box_bytes +
                (warp % warps * 32 + lane % 4 * Rings::linear_pitch + lane / 4 * 2) * 4) {
        factors = prepared + F::factors_at;
    }
    __device__ __forceinline__ void begin(const TensorTiles<P, Tuning>& tiles, Offset<Problem> tile) {
        if constexpr (Problem::groups > 1) factors = prepared + F::factors_at + tiles.group(tile) * F::stages * split_depth;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int p;
            tiles.numbers.position(tiles.first_pixel(tile) + pair + apart * i, p, column[i]);
            column[i] = column[i] * 2 - Problem::pad_left + sharer;
            if constexpr (volume) row[i] = p - Problem::pad_top;
        }
    }
    // Whether the filter row `down` below a window's first one lies in the image for pair i, as far as copies do not tell.
    __device__ __forceinline__ bool in_rows(int i, int down) const {
        if constexpr (volume) return static_cast<unsigned>(row[i] + down) < Problem::h;
        else return true;
    }
    // The states of half a stage for warpgroup `own`, whose three pixels begin with an even or an odd one of a column.
    template <bool odd, int own>
    __device__ __forceinline__ void load_half(float (&x)[2][2][4][4], const unsigned char* pixels, int half, int right,
                                              int down) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool seen = in_rows(i, down);
            bool inside[3];
#pragma unroll
            for (int j = 0; j < 3; ++j) {
                // With 3 columns the middle pixels are inside for all pairs.
                constexpr bool one_segment = Problem::s == 3;
                const int least = own + j - Problem::pad_left;
                inside[j] = seen && ((one_segment && (least == 0 || least == 1)) ||
                                     static_cast<unsigned>(column[i] + right + j) < Problem::w);
            }
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                const unsigned char* at;
                if constexpr (F::resident) at = pixels + (in_resident[i] + F::lane_channel(0, n) * Rings::channel_pixels) * 4;
                else at = pixels + (4 * n * Rings::linear_pitch + 2 * apart * i) * 4;
                unsigned v[2][2];
                ld_shared_v2_u32(v[0], at);
                ld_shared_v2_u32(v[1], at + 8);
                float d[3];
#pragma unroll
                for (int j = 0; j < 3; ++j) d[j] = inside[j] ? __uint_as_float(v[(odd + j) / 2][(odd + j) % 2]) : 0.0f;
                x[0][i][2 * half + n / 4][n % 4] = d[0] - d[2];
                x[1][i][2 * half + n / 4][n % 4] = own == 0 ? d[1] + d[2] : d[1] - d[0];
            }
        }
    }
    // The column that segments leave (PairPixels); state 3 has its own sign.
    __device__ __forceinline__ void load_rest(float (&x)[2][4][4], const unsigned char* pixels, int first, int half,
                                              int right, int down) const {
        const float sign = sharer == 0 ? 1.0f : -1.0f;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool inside = in_rows(i, down) && static_cast<unsigned>(column[i] + right) < Problem::w;
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                const unsigned char* const at = pixels + (4 * n * Rings::linear_pitch + 2 * apart * i + first % 2) * 4;
                x[i][2 * half + n / 4][n % 4] = inside ? sign * __uint_as_float(ld_shared_u32(at)) : 0.0f;
            }
        }
    }
    // From pixel `first` of the columns on.
    __device__ __forceinline__ void load(float (&x)[2][2][4][4], const unsigned char* pixels, int first, int half,
                                         int right, int down) const {
        if (sharer == 0) {
            if (first % 2 == 0) load_half<false, 0>(x, pixels, half, right, down);
            else load_half<true, 0>(x, pixels, half, right, down);
        } else {
            if (first % 2 == 0) load_half<false, 1>(x, pixels, half, right, down);
            else load_half<true, 1>(x, pixels, half, right, down);
        }
    }
};

// Resident images of linear pixels: a thread's pairs may belong to two images.
template <class Problem, class Tuning>
struct ResidentPairPixels : LinearPairPixels<Problem, Tuning> {
    using Base = LinearPairPixels<Problem, Tuning>;
    using P = Pairs<Problem, Tuning>;
    using F = TensorFilters<P, Tuning>;
    using Rings = TensorRings<P, Tuning>;

    __device__ __forceinline__ ResidentPairPixels(const float* prepared, int warp, int lane, int sharer)
        : Base(prepared, warp, lane, sharer) {}

    __device__ __forceinline__ void begin(const TensorTiles<P, Tuning>& tiles, Offset<Problem> tile) {
        Base::begin(tiles, tile);
        const Offset<Problem> from = tiles.first_pixel(tile), first_n = from / Rings::image;
        const int in_image = static_cast<int>(from - first_n * Rings::image);
        const int moved = resident_begin<P>(in_image, Rings::pixels) - resident_begin<P>();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            // NOTE: a pair past the last one reads the pixels of the tile's first.
            const Offset<Problem> own = from + Base::pair + Base::apart * i, number = own < tiles.numbers.count() ? own : from;
            const Offset<Problem> n = number / Rings::image;
            Base::in_resident[i] = (static_cast<int>(n - first_n) * 32 + threadIdx.x % 4 * F::spacing) * Rings::channel_pixels +
                                 static_cast<int>(number - n * Rings::image) * 2 - (n == first_n ? moved : 0);
        }
    }
};

// The rows of both states.
__device__ __forceinline__ float (&all_rows(float (&x)[2][2][4][4]))[4][4][4] {
    return reinterpret_cast<float (&)[4][4][4]>(x);
}

template <class Fragments>
__device__ __forceinline__ void split_state(Fragments& one, const float (&x)[2][4][4], const SplitHeader& header) {
#pragma unroll
    for (int i = 0; i < 2; ++i) one.inverse_scale[i] = split_row<Fragments::exact>(one.high, one.low, i, x[i], header);
}

// The warpgroup's two states of the stage of pixels at `place`, scaled by the factors of `stage` of the filters: linear pixels.
template <bool scaled, class Problem, class Tuning>
__device__ __forceinline__ void load_states(float (&x)[2][2][4][4], const LinearPairPixels<Problem, Tuning>& pixels,
                                            const unsigned char* base, int place, int stage, int t) {
    using P = Pairs<Problem, Tuning>;
    using Rings = TensorRings<P, Tuning>;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int number = 2 * stage + half, tap_blocks = TensorFilters<P, Tuning>::tap_blocks;
        // NOTE: past the last tap filters are zero, and the pixels those of tap 0 (pixels.cuh).
        const int tap = number / tap_blocks < TensorFilters<P, Tuning>::taps ? number / tap_blocks : 0;
        const int first = (linear_shift<P, Tuning>(tap, 1) & 3) + pixels.sharer;
        const unsigned char* const from = base + place + half * Rings::half_bytes + pixels.place + (first & ~1) * 4;
        pixels.load(x, from, first, half, tap_right<P, Tuning>(tap), tap_down<P, Tuning>(tap));
    }
    if constexpr (scaled)
        scale_channels(all_rows(x), [&](int i) {
            return pixels.factors[stage * split_depth + 16 * (i / 4) + t + 4 * (i % 4)];
        });
}

// Resident images, in `stages`.
template <bool scaled, class Problem, class Tuning>
__device__ __forceinline__ void load_states(float (&x)[2][2][4][4], const ResidentPairPixels<Problem, Tuning>& pixels,
                                            ResidentStages<Pairs<Problem, Tuning>, Tuning>& stages,
                                            const TensorRings<Pairs<Problem, Tuning>, Tuning>& rings, int stage, int t) {
    using P = Pairs<Problem, Tuning>;
    using F = TensorFilters<P, Tuning>;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        // NOTE: past the last tap filters are zero, and the pixels those of tap 0.
        const int entered = stages.enter(rings, stage, half), tap = stages.exists(stage, half) ? entered : 0;
        const int first = linear_shift<P, Tuning>(tap, 1) - resident_begin<P>() + pixels.sharer;
        const int right = tap_right<P, Tuning>(tap);
        const unsigned char* const from = rings.base + stages.at + (first & ~1) * 4;
        pixels.load(x, from, first, half, right, 0);
    }
    if constexpr (scaled)
        scale_channels(all_rows(x), [&](int i) {
            return pixels.factors[stage * split_depth + i / 8 * 32 + F::lane_channel(t, i % 8)];
        });
}

// Rows. Each pixel is loaded once; neighbouring pairs of a row share one.
template <bool scaled, class Problem, class Tuning>
__device__ __forceinline__ void load_states(float (&x)[2][2][4][4], const PairPixels<Problem, Tuning>& pixels,
                                            const unsigned char* base, int place, int stage, int t) {
    constexpr bool same_row = PairPixels<Problem, Tuning>::same_row;
    const float sign = static_cast<float>(pixels.apart);
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
        float d[2][3][4];
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < 3; ++j) {
                if (same_row && i == 1 && j == 0) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) d[1][0][e] = d[0][2][e];
                } else {
                    pixels.load4(d[i][j], base, place, i, j, k16);
                }
            }
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                x[0][i][k16][e] = d[i][0][e] - d[i][2][e];
                x[1][i][k16][e] = fmaf(sign, d[i][2][e], d[i][1][e]);
            }
        if constexpr (scaled) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float factor = pixels.factors[stage * split_depth + 16 * k16 + 4 * t + e];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float& value = x[i / 2][i % 2][k16][e];
                    value = value * factor * factor;
                }
            }
        }
    }
}

// The warpgroup's state of the column that segments leave: linear pixels or rows.
template <bool scaled, class Pixels, class P, class Tuning>
__device__ __forceinline__ void load_rest(float (&x)[2][4][4], const Pixels& pixels, const TensorRings<P, Tuning>& rings,
                                          int place, int stage, int t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if constexpr (Tuning::linear) {
            const int tap = TensorFilters<P, Tuning>::tap_of(2 * stage + half);
            const int first = (linear_shift<P, Tuning>(tap, 1) & 3) + pixels.sharer;
            const int from = place + half * TensorRings<P, Tuning>::half_bytes + pixels.place + (first & ~1) * 4;
            pixels.load_rest(x, rings.base + from, first, half, tap_right<P, Tuning>(tap), tap_down<P, Tuning>(tap));
        } else {
            pixels.load_rest(x, rings.base, place, half);
        }
    }
    if constexpr (scaled)
        scale_channels(x, [&](int i) {
            const int channel = 16 * (i / 4) + (Tuning::linear ? t + 4 * (i % 4) : 4 * t + i % 4);
            return pixels.factors[stage * split_depth + channel];
        });
}

}  // namespace leanconv
