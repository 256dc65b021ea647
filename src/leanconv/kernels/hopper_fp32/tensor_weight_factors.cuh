// Factors of pixels: what the split of x and dy needs where both vary by much among the 64 pixels of a stage.
//
// A scale of x holds for the 64 pixels of a weight, one of dy for those of a filter, and a pair of float16 keeps what is
// above 2^-40 of the largest. So a product of a small x and a large dy is lost where another pixel has a large x and a small
// dy. With b the largest magnitude of a pixel's dy in the tile, x b and dy / b have the same products, and their scales
// lose nothing: no x b of a row is larger than the products that the row has in the tile, and each pixel's dy / b
// reaches 1. As b stands a power of four, so that its root h, from 2^-75 to 2^63, is a power of two in one byte, and x h h
// and dy / h / h are exact.
//
// Where all pixels' dy reach 2^-10 of the largest, x cannot lose by it, and factors are left out. Pixels without dy have
// factor 0: their x counts for nothing, and must not decide a scale.
//
// The codes of a stage's pixels are found while the stage before is converted, by warps that have nothing to copy.
// NOTE: by the converters themselves, who then wait for all of a stage's dy and for each other, tiles of 128 filters took 1.6
// times as long (H200, 256 to 256 filters 3 x 3, NHWC), by idle warps 1.16 times, tiles of 64 filters 1.02 times.
#pragma once

#include <device/ptx/load.cuh>
#include <kernels/hopper_fp32/tensor_filters.cuh>
#include <kernels/hopper_fp32/tensor_weight_tiles.cuh>

namespace leanconv {

// The biased exponent of h for a largest magnitude b: h^2 <= b < 4 h^2. 0 stands for no dy at all.
__device__ __forceinline__ unsigned root_code(float largest) {
    return largest > 0 ? static_cast<unsigned>(whole_exponent(largest) + 127) / 2 : 0;
}
constexpr unsigned infinite_code = (255 + 127) / 2;
// Of pixels that dy does not have, which decide nothing. No magnitude has this code.
constexpr unsigned absent_code = 1;

// The largest dy of a pixel in half of a chunk's filters. `finite`: of numbers alone.
template <class Problem, class Tuning, bool finite>
__device__ __forceinline__ float largest_of_half(const unsigned char* dy, int chunk, const WeightTiles<Problem, Tuning>& tile,
                                                 int pixel, int half) {
    using Rings = WeightRings<Problem, Tuning>;
    const auto magnitude = [](float value) { return finite ? finite_magnitude(value) : fabsf(value); };
    float largest = 0.0f;
    if constexpr (Tuning::dy_rows) {
        // NOTE: behind the filters of a group bulk copies bring those of the next.
        constexpr bool foreign = Problem::groups > 1 && Problem::group_k % WeightTiles<Problem, Tuning>::chunk != 0;
        const int left = Problem::group_k - tile.first_filter - chunk * WeightTiles<Problem, Tuning>::chunk - half * 32;
        const unsigned char* const row = dy + half * Rings::dy_piece_bytes + pixel * 128;
        // NOTE: four loads under way at a time: one by one, as few registers make them, they took longer than all the rest.
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            unsigned four[4][4];
#pragma unroll
            for (int j = 0; j < 4; ++j) ld_shared_v4_u32(four[j], row + (i + j ^ pixel % 8) * 16);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const auto value = [&](int filter) { return magnitude(__uint_as_float(four[j][filter])); };
                const float most = fmaxf(fmaxf(value(0), value(1)), fmaxf(value(2), value(3)));
                if (!foreign || 4 * (i + j) < left) largest = fmaxf(largest, most);
            }
        }
    } else {
        // NOTE: four filters further on (eight with a pitch of 74) a column lies 16 banks further on: the halves of a warp meet
        // each bank once.
        constexpr int apart = WeightGrid<Problem, Tuning>::shared ? 8 : 4;
        const float* const first = reinterpret_cast<const float*>(dy) + apart * half * Rings::dy_pitch + pixel;
#pragma unroll
        for (int i = 0; i < 32; ++i)
            largest = fmaxf(largest, magnitude(first[(i / apart * 2 * apart + i % apart) * Rings::dy_pitch]));
    }
    return largest;
}

// The same in all chunks of a stage, the first of which lies at `place`.
template <class Problem, class Tuning, bool finite>
__device__ __forceinline__ float largest_of_pixel(const WeightRings<Problem, Tuning>& rings,
                                                  const WeightTiles<Problem, Tuning>& tile, RingPlace<Tuning::dy_stages> place,
                                                  int thread) {
    using Rings = WeightRings<Problem, Tuning>;
    float largest = 0.0f;
#pragma unroll 1
    for (int chunk = 0; chunk < Tuning::chunks; ++chunk, place.advance()) {
        mbarrier_wait_parity(rings.dy_full(place.stage), place.parity);
        const unsigned char* const dy = rings.dy(place.stage);
#pragma unroll 1
        for (int half = Rings::idle ? 0 : thread / 16 % 2; half < 2; half += Rings::idle ? 1 : 2)
            largest = fmaxf(largest, largest_of_half<Problem, Tuning, finite>(dy, chunk, tile, Rings::scanned(thread), half));
    }
    if constexpr (!Rings::idle) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 16));
    return largest;
}

// The same of a pixel behind the 64, of which each warp has some: several lanes look at one. The stage has one chunk.
template <class Problem, class Tuning, bool finite>
__device__ __forceinline__ float largest_behind(const WeightRings<Problem, Tuning>& rings,
                                                const WeightTiles<Problem, Tuning>& tile, int stage, int pixel, int thread) {
    using Rings = WeightRings<Problem, Tuning>;
    const auto magnitude = [](float value) { return finite ? finite_magnitude(value) : fabsf(value); };
    const unsigned char* const dy = rings.dy(stage);
    const int share = thread % 32 / Rings::behind;
    float largest = 0.0f;
    if constexpr (Tuning::dy_rows) {
        constexpr bool foreign = Problem::groups > 1 && Problem::group_k % WeightTiles<Problem, Tuning>::chunk != 0;
        constexpr int shares = 32 / Rings::behind;
        const int left = Problem::group_k - tile.first_filter;
#pragma unroll
        for (int i = 0; i < 16 / shares; ++i) {
            const int unit = share + shares * i;
            unsigned four[4];
            ld_shared_v4_u32(four, dy + unit / 8 * Rings::dy_piece_bytes + pixel * 128 + (unit % 8 ^ pixel % 8) * 16);
            const auto value = [&](int filter) { return magnitude(__uint_as_float(four[filter])); };
            const float most = fmaxf(fmaxf(value(0), value(1)), fmaxf(value(2), value(3)));
            if (!foreign || 4 * unit < left) largest = fmaxf(largest, most);
        }
    } else {
        const float* const first = reinterpret_cast<const float*>(dy) + share * Rings::dy_pitch + pixel;
#pragma unroll
        for (int i = 0; i < 64; i += 32 / Rings::behind) largest = fmaxf(largest, magnitude(first[i * Rings::dy_pitch]));
    }
#pragma unroll
    for (int apart = Rings::behind; apart < 32; apart *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, apart));
    return largest;
}

// Finds the codes of a stage's pixels: warp `thread` / 32 of the scanners those of some pixels.
template <class Problem, class Tuning>
__device__ __forceinline__ void find_codes(const WeightRings<Problem, Tuning>& rings, const WeightTiles<Problem, Tuning>& tile,
                                           RingPlace<Tuning::dy_stages> place, int stage, long long batch, int to,
                                           int thread) {
    using Rings = WeightRings<Problem, Tuning>;
    using Grid = WeightGrid<Problem, Tuning>;
    unsigned code = root_code(largest_of_pixel<Problem, Tuning, false>(rings, tile, place, thread));
    unsigned most, least;
    unsigned char* const codes = rings.codes(to);
    if constexpr (Grid::shared) {
        const auto is_seen = [&](int pixel) {
            const Offset<Problem> number = static_cast<Offset<Problem>>(stage) * split_depth + pixel;
            return pixel < Grid::used && GridPixel<Problem, Tuning>(number, batch).seen(batch);
        };
        const int pixel = Rings::scanned(thread), next = split_depth + thread / 32 * Rings::behind + thread % Rings::behind;
        const bool seen = is_seen(pixel), next_seen = is_seen(next);
        unsigned after = root_code(largest_behind<Problem, Tuning, false>(rings, tile, place.stage, next, thread));
        const auto both = [](bool first, bool second, unsigned other, unsigned a, unsigned b) {
            const unsigned one = first ? a : other, two = second ? b : other;
            return other == 0 ? max(one, two) : min(one, two);
        };
        most = __reduce_max_sync(0xffffffffu, both(seen, next_seen, 0, code, after));
        if (most == infinite_code) {
            code = root_code(largest_of_pixel<Problem, Tuning, true>(rings, tile, place, thread));
            after = root_code(largest_behind<Problem, Tuning, true>(rings, tile, place.stage, next, thread));
            most = __reduce_max_sync(0xffffffffu, both(seen, next_seen, 0, code, after));
        }
        least = __reduce_min_sync(0xffffffffu, both(seen, next_seen, 255, code, after));
        codes[pixel] = static_cast<unsigned char>(seen ? code : absent_code);
        if (thread % 32 < Rings::behind) codes[next] = static_cast<unsigned char>(next_seen ? after : absent_code);
    } else {
        most = __reduce_max_sync(0xffffffffu, code);
        if (most == infinite_code) {
            // An infinity says nothing about what else its pixel has.
            code = root_code(largest_of_pixel<Problem, Tuning, true>(rings, tile, place, thread));
            most = __reduce_max_sync(0xffffffffu, code);
        }
        least = __reduce_min_sync(0xffffffffu, code);
        codes[Rings::scanned(thread)] = static_cast<unsigned char>(code);
    }
    if (thread % 32 == 0) {
        codes[Grid::window + thread / 32] = static_cast<unsigned char>(most);
        codes[Grid::window + 4 + thread / 32] = static_cast<unsigned char>(least);
    }
    __syncwarp();
    if (thread % 32 == 0) mbarrier_arrive(rings.codes_full(to));
}

// Where the producers copy nothing but bulks: two of their warps look at dy.
template <class Problem, class Tuning>
__device__ __forceinline__ void scan_dy(const WeightTiles<Problem, Tuning>& tile, const WeightRings<Problem, Tuning>& rings,
                                        const PartRange<Problem, Tuning>& range, long long batch, int thread) {
    using Rings = WeightRings<Problem, Tuning>;
    RingPlace<Tuning::dy_stages> place;
    RingPlace<Rings::code_stages> to;
#pragma unroll 1
    for (int stage = range.first; stage < range.end; ++stage, to.advance()) {
        find_codes(rings, tile, place, stage, batch, to.stage, thread);
        for (int chunk = 0; chunk < Tuning::chunks; ++chunk, place.advance())
            if (thread % 32 == 0) mbarrier_arrive(rings.dy_free(place.stage));
    }
}

// The factors of a stage's pixels, as converters and consumers find them.
template <class Problem, class Tuning>
struct PixelFactors {
    using Rings = WeightRings<Problem, Tuning>;
    static constexpr unsigned least_apart = 4;  // in powers of four
    const unsigned char* codes;
    bool apart;
    unsigned most;  // the code of the largest dy, of numbers alone

    __device__ __forceinline__ PixelFactors(const Rings& rings, RingPlace<Rings::code_stages> place)
        : codes(rings.codes(place.stage)) {
        mbarrier_wait_parity(rings.codes_full(place.stage), place.parity);
        unsigned most_and_least[2], least = 255;
        most = 0;
        ld_shared_v2_u32(most_and_least, codes + WeightGrid<Problem, Tuning>::window);
#pragma unroll
        for (int i = 0; i < Rings::scanners; ++i) {
            most = max(most, most_and_least[0] >> 8 * i & 255);
            least = min(least, most_and_least[1] >> 8 * i & 255);
        }
        apart = least + least_apart < most;
    }

    // 1 / h of a pixel; any number where it has no dy.
    __device__ __forceinline__ float down(int pixel) const { return power_of_two(254 - codes[pixel]); }

    // Multiplies x of two rows and the pixels that lane t of four has.
    __device__ __forceinline__ void multiply(float (&x)[2][4][4], int t) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const unsigned two = ld_shared_u16(codes + 8 * i + 2 * t);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float h = power_of_two(two >> 8 * j & 255);
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    float& value = x[row][i / 2][i % 2 * 2 + j];
                    value = value * h * h;
                }
            }
        }
    }

    // The same for a tap that sees dy moved by so many pixels. What meets no dy is zero then, so that an infinity beside it
    // does not make NaN of a weight that does not see it.
    __device__ __forceinline__ void multiply_moved(float (&x)[2][4][4], int t, int moved) const {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const unsigned code = codes[8 * (i / 2) + 2 * t + i % 2 + moved];
            const float h = power_of_two(apart ? code : 127);
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                float& value = x[row][i / 4][i % 4];
                value = code == absent_code ? 0.0f : value * h * h;
            }
        }
    }
};

}  // namespace leanconv
