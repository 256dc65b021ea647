// The tiles of tensor_weight, the stages that a block sums, its shared memory, and the factors of pixels.
//
// The gradient is a matrix: a row is a weight of one filter, a column a filter. Rows come in blocks of `channel_block` channels
// of one tap. The reduction runs over output pixels, 64 a stage.
#pragma once

#include <device/index.cuh>
#include <device/pipeline/rings.cuh>
#include <device/pipeline/split.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/sync.cuh>

namespace leanconv {

// One arrival of a warp, when all of its lanes are here.
__device__ __forceinline__ void warp_arrive(Mbarrier* barrier, int lane) {
    __syncwarp();
    mbarrier_arrive_warp(barrier, lane);
}

// The linear pixel index that the reduction counts. Tiles of one tap count the pixels of dy.
//
// Tiles of several taps of a filter's row count pixels of x, which are converted once for all of them: tap s multiplies pixel
// u of x by pixel u + (taps - 1 - s) dilation of dy, so a stage of dy has some pixels more (`window`). Rows are `row_pitch`
// pixels apart, with zeros in x or dy between them, so that a tap that runs over the end of a row reads a zero. x begins
// `x_lead` columns before the image, the first column of dy is number `dy_lead`. A filter's row of more than three taps is cut
// into `groups` of `taps`, for each of which x begins further left. The host computes pitch and leads (weight_grid).
template <class Problem, class Tuning>
struct ReductionPixels {
    static constexpr bool shared = Tuning::taps > 1;
    static_assert(!shared || (Problem::stride_w == 1 && !Problem::chwn), "the taps of a row read neighbouring pixels");
    static constexpr int groups = ceil_div(Problem::s, Tuning::taps);
    static constexpr int reach = (Tuning::taps - 1) * Problem::dilation_w, used = split_depth + reach;
    static constexpr int row_pitch = Tuning::row_pitch, window = Tuning::window, image = Depth<Problem>::z * Problem::p * row_pitch;
    static_assert(Tuning::dy_lead >= 0, "no tap reads padding alone");
    static_assert(used <= window && window <= split_depth + 8, "a stage of dy has all pixels that its taps read");

    static __device__ __forceinline__ int64 count(long long batch) { return static_cast<int64>(batch) * image; }
    // By how many pixels the dy that tap s reads is shifted.
    static __host__ __device__ constexpr int shift(int s) { return shared ? reach - s * Problem::dilation_w : 0; }
};

// One of them: an image, a row of outputs, of volumes a slice, and a column.
template <class Problem, class Tuning>
struct ReductionPixel {
    using Pixels = ReductionPixels<Problem, Tuning>;
    using D = Depth<Problem>;
    Offset<Problem> n;
    int z = 0, p, column;
    __device__ __forceinline__ ReductionPixel(Offset<Problem> number, long long batch) {
        if constexpr (Pixels::shared) {
            n = number / Pixels::image;
            const int rest = static_cast<int>(number - n * Pixels::image);
            p = rest / Pixels::row_pitch, column = rest % Pixels::row_pitch;
            if constexpr (D::volume) z = p / Problem::p, p %= Problem::p;
        } else {
            const Pixel<Problem> pixel(number, batch);
            n = pixel.n, z = pixel.slice, p = pixel.p, column = pixel.q;
        }
    }
    // Its row among those of all slices.
    __device__ __forceinline__ int row() const { return D::volume ? z * Problem::p + p : p; }
    // The pixel of x that the first tap reads.
    __device__ __forceinline__ int d() const { return z * D::stride - D::pad; }
    __device__ __forceinline__ int h() const { return p * Problem::stride_h - Problem::pad_top; }
    __device__ __forceinline__ int w() const {
        return Pixels::shared ? column - Tuning::x_lead : column * Problem::stride_w - Problem::pad_left;
    }
    // Whether dy has it.
    __device__ __forceinline__ bool in_dy(long long batch) const {
        return n < static_cast<Offset<Problem>>(batch) && static_cast<unsigned>(column - Tuning::dy_lead) < Problem::q;
    }
};

template <class Problem, class Tuning>
struct WeightTiles {
    static constexpr int channel_block = Tuning::channel_block, mma_n = 64;  // filters of one wgmma
    static constexpr int taps = filter_rows<Problem> * ReductionPixels<Problem, Tuning>::groups;
    static constexpr int of_tap = ceil_div(Problem::group_c, channel_block), all_rows = taps * of_tap * channel_block;
    static constexpr int rows = 64 * Tuning::warpgroups, filters = mma_n * Tuning::n_tiles;
    static constexpr int of_rows = ceil_div(all_rows, rows), of_filters = ceil_div(Problem::group_k, filters);
    static constexpr int count = of_rows * of_filters * Problem::groups;
    int group, first_row, first_filter;  // the filter in its group

    // Blocks that run side by side read the same pixels.
    __device__ __forceinline__ explicit WeightTiles(int tile)
        : group(tile / (of_rows * of_filters)), first_row(tile / of_filters % of_rows * rows),
          first_filter(tile % of_filters * filters) {}
};

// What a row of the matrix stands for: a tap (or a group of taps of one filter row) and a channel. Rows past the last have a
// tap that no filter has.
template <class Problem, class Tuning>
struct WeightRow {
    using Tiles = WeightTiles<Problem, Tuning>;
    static constexpr int of_row = ReductionPixels<Problem, Tuning>::groups;
    int tap, channel;
    __device__ __forceinline__ explicit WeightRow(int row)
        : tap(row / Tiles::channel_block / Tiles::of_tap),
          channel(row / Tiles::channel_block % Tiles::of_tap * Tiles::channel_block + row % Tiles::channel_block) {}
    __device__ __forceinline__ int deep() const { return tap / of_row / Problem::r * Depth<Problem>::dilation; }
    __device__ __forceinline__ int down() const {
        const int row = tap / of_row;
        return (Depth<Problem>::volume ? row % Problem::r : row) * Problem::dilation_h;
    }
    __device__ __forceinline__ int right() const { return tap % of_row * (Tuning::taps * Problem::dilation_w); }
};

// The stages of 64 pixels that a block sums: its share among the `split_k` x `split` blocks of a tile.
template <class Problem, class Tuning>
struct StageRange {
    int first, end;
    __device__ __forceinline__ StageRange(long long batch, int slice) {
        const int64 pixels = ReductionPixels<Problem, Tuning>::count(batch);
        const int all = static_cast<int>((pixels + (split_depth - 1)) / split_depth);
        const int share = ceil_div(all, Tuning::split_k * Tuning::split);
        const int64 begin = static_cast<int64>(share) *
            (slice * Tuning::split + (Tuning::split > 1 ? static_cast<int>(cluster_rank()) : 0));
        first = static_cast<int>(begin < all ? begin : all);
        end = first + share < all ? first + share : all;
    }
};

// Shared memory: stages of x and dy as float32; of dy split into high and low halves, with inverse scales of its filters;
// codes of the pixels' factors (below); and the barriers of each. The host counts the bytes of a stage.
//   by TMA     a pixel's 32 channels are a row of 128 bytes, swizzled; 64 pixels or a window are one box
//   by lanes   the 64 pixels of a weight, or of a filter, are a column; lanes copy them one by one
template <class Problem, class Tuning>
struct WeightRings {
    using Tiles = WeightTiles<Problem, Tuning>;
    using Pixels = ReductionPixels<Problem, Tuning>;
    static constexpr int x_box_bytes = split_depth * 128, dy_box_bytes = Pixels::window * 128;
    static constexpr int x_bytes = Tuning::x_stage_bytes, dy_bytes = Tuning::dy_stage_bytes;
    static_assert(x_bytes % 1024 == 0 && dy_bytes % 1024 == 0, "stages begin where swizzle patterns do");
    static_assert(!Tuning::x_tma || Tiles::channel_block == 32, "a box has 32 channels of one tap");
    static constexpr int half_bytes = Pixels::window * Tiles::mma_n * 2;
    static constexpr int split_bytes = half_bytes * (Tuning::products == 3 ? 2 : 1);
    // The 16 scales of lane t of four begin at float 20 t, so its four loads have no bank conflicts.
    static constexpr int scale_pitch = 20, scale_bytes = 4 * 4 * scale_pitch;
    static constexpr int dy_at = Tuning::x_stages * x_bytes, split_at = dy_at + Tuning::dy_stages * dy_bytes;
    static constexpr int scales_at = split_at + Tuning::split_stages * split_bytes;
    // A code a pixel, and the largest and the least that each of up to four warps has found.
    static constexpr int codes_at = scales_at + Tuning::split_stages * scale_bytes, code_bytes = Pixels::window + 8;
    static constexpr int code_stages = Tuning::code_stages, bytes = codes_at + code_stages * code_bytes;
    static_assert(code_stages > Tuning::dy_stages + Tuning::split_stages + 1,
                  "codes are overwritten only when their readers have released what came with them");
    static constexpr int producer_warps = 4, converter_warps = 4, consumer_warps = 4 * Tuning::warpgroups;
    // Who finds the codes: two producer warps where TMA does all copies, a pixel a lane; otherwise the converters.
    static constexpr bool idle = Tuning::x_tma && Tuning::dy_tma;
    static constexpr int scanners = idle ? 2 : converter_warps;
    static constexpr int behind = 8 / scanners;  // pixels behind the 64 that each of them looks at
    static __device__ __forceinline__ int scanned(int thread) { return idle ? thread : thread / 32 * 16 + thread % 16; }
    unsigned char* base;

    __device__ __forceinline__ WeightRings() : base(shared_memory_for_swizzles()) {}
    __device__ __forceinline__ unsigned char* x(int stage) const { return base + stage * x_bytes; }
    __device__ __forceinline__ unsigned char* dy(int stage) const { return base + dy_at + stage * dy_bytes; }
    __device__ __forceinline__ unsigned char* split(int stage) const { return base + split_at + stage * split_bytes; }
    __device__ __forceinline__ float* scales(int stage) const {
        return reinterpret_cast<float*>(base + scales_at + stage * scale_bytes);
    }
    __device__ __forceinline__ unsigned char* codes(int stage) const { return base + codes_at + stage * code_bytes; }
    __device__ __forceinline__ Mbarrier* x_full(int stage) const { return reinterpret_cast<Mbarrier*>(base + bytes) + stage; }
    __device__ __forceinline__ Mbarrier* x_empty(int stage) const { return x_full(Tuning::x_stages) + stage; }
    __device__ __forceinline__ Mbarrier* dy_full(int stage) const { return x_empty(Tuning::x_stages) + stage; }
    __device__ __forceinline__ Mbarrier* dy_empty(int stage) const { return dy_full(Tuning::dy_stages) + stage; }
    __device__ __forceinline__ Mbarrier* split_full(int stage) const { return dy_empty(Tuning::dy_stages) + stage; }
    __device__ __forceinline__ Mbarrier* split_empty(int stage) const { return split_full(Tuning::split_stages) + stage; }
    __device__ __forceinline__ Mbarrier* codes_full(int stage) const { return split_empty(Tuning::split_stages) + stage; }

    // By one thread, before a barrier of the block.
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < Tuning::x_stages; ++i) {
            mbarrier_init(x_full(i), Tuning::x_tma ? 1 : producer_warps);
            mbarrier_init(x_empty(i), consumer_warps);
        }
        for (int i = 0; i < Tuning::dy_stages; ++i) {
            mbarrier_init(dy_full(i), Tuning::dy_tma ? 1 : producer_warps);
            mbarrier_init(dy_empty(i), converter_warps + (idle ? scanners : 0));
        }
        for (int i = 0; i < Tuning::split_stages; ++i) {
            mbarrier_init(split_full(i), converter_warps);
            mbarrier_init(split_empty(i), consumer_warps);
        }
        for (int i = 0; i < code_stages; ++i) mbarrier_init(codes_full(i), scanners);
        fence_mbarrier_init();
    }
};

// Factors of pixels: what the split of x and dy needs where both vary by much among the 64 pixels of a stage.
//
// A scale of x holds for the 64 pixels of a weight, one of dy for those of a filter, and a pair of float16 keeps what is
// above 2^-40 of the largest. So a product of a small x and a large dy is lost where another pixel has a large x and a small
// dy. Let b be the largest magnitude of a pixel's dy in the tile. x b and dy / b have the same products, and their scales
// lose nothing: no x b of a row is larger than the products that the row has in the tile, and each pixel's dy / b
// reaches 1. b is a power of four. Its root h, from 2^-75 to 2^63, is a power of two in one byte, and x h h and dy / h / h
// are exact.
//
// Where all pixels' dy reach 2^-10 of the largest, x cannot lose by it, and factors are left out. Pixels without dy have
// factor 0: their x counts for nothing, and must not decide a scale.
//
// The codes of a stage's pixels are found while the stage before is converted, by warps that have nothing to copy.
// Explored (H200, 461e1e6, 256 to 256 filters 3 x 3, NHWC): by the converters themselves, who then wait for all of a
// stage's dy and for each other, tiles of 128 filters took 1.6 times as long; by idle warps 1.16 times, tiles of 64
// filters 1.02 times.

// The biased exponent of h for a largest magnitude b: h^2 <= b < 4 h^2. 0: no dy at all.
__device__ __forceinline__ unsigned root_code(float largest) {
    return largest > 0 ? static_cast<unsigned>(whole_exponent(largest) + 127) / 2 : 0;
}
constexpr unsigned infinite_code = (255 + 127) / 2;
// Of pixels that dy does not have, which decide nothing. No magnitude has this code.
constexpr unsigned absent_code = 1;

// A magnitude; with `finite` that of numbers alone.
template <bool finite>
__device__ __forceinline__ float magnitude(float value) {
    return finite ? finite_magnitude(value) : fabsf(value);
}

// The largest dy of a pixel in half of 64 filters.
template <class Problem, class Tuning, bool finite>
__device__ __forceinline__ float largest_of_half(const unsigned char* dy, int first_filter, int pixel, int half) {
    using Rings = WeightRings<Problem, Tuning>;
    constexpr int mma_n = WeightTiles<Problem, Tuning>::mma_n;
    float largest = 0.0f;
    if constexpr (Tuning::dy_tma) {
        // NOTE: behind the filters of a group a box has those of the next.
        constexpr bool foreign = Problem::groups > 1 && Problem::group_k % mma_n != 0;
        const int left = Problem::group_k - first_filter - half * 32;
        const unsigned char* const row = dy + half * Rings::dy_box_bytes + pixel * 128;
        // NOTE: four loads under way at a time: one by one, as few registers make them, they took longer than all the rest.
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            unsigned four[4][4];
#pragma unroll
            for (int j = 0; j < 4; ++j) ld_shared_v4_u32(four[j], row + (i + j ^ pixel % 8) * 16);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const auto value = [&](int filter) { return magnitude<finite>(__uint_as_float(four[j][filter])); };
                const float most = fmaxf(fmaxf(value(0), value(1)), fmaxf(value(2), value(3)));
                if (!foreign || 4 * (i + j) < left) largest = fmaxf(largest, most);
            }
        }
    } else {
        // NOTE: four filters further on (eight with a pitch of 74) a column lies 16 banks further on, so the halves of a warp
        // have no bank conflicts.
        constexpr int apart = ReductionPixels<Problem, Tuning>::shared ? 8 : 4;
        const float* const first = reinterpret_cast<const float*>(dy) + apart * half * Tuning::dy_pitch + pixel;
#pragma unroll
        for (int i = 0; i < 32; ++i)
            largest = fmaxf(largest, magnitude<finite>(first[(i / apart * 2 * apart + i % apart) * Tuning::dy_pitch]));
    }
    return largest;
}

// The same of all filters of a stage, the first of which lie at `place`.
template <class Problem, class Tuning, bool finite>
__device__ __forceinline__ float largest_of_pixel(const WeightRings<Problem, Tuning>& rings, int first_filter,
                                                  RingPlace<Tuning::dy_stages> place, int thread) {
    using Rings = WeightRings<Problem, Tuning>;
    float largest = 0.0f;
#pragma unroll 1
    for (int i = 0; i < Tuning::n_tiles; ++i, place.advance()) {
        mbarrier_wait_parity(rings.dy_full(place.stage), place.parity);
        const unsigned char* const dy = rings.dy(place.stage);
#pragma unroll 1
        for (int half = Rings::idle ? 0 : thread / 16 % 2; half < 2; half += Rings::idle ? 1 : 2)
            largest = fmaxf(largest, largest_of_half<Problem, Tuning, finite>(dy, first_filter + i * Rings::Tiles::mma_n,
                                                                              Rings::scanned(thread), half));
    }
    if constexpr (!Rings::idle) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 16));
    return largest;
}

// The same of a pixel behind the 64, of which each warp has some: several lanes look at one. The stage has 64 filters.
template <class Problem, class Tuning, bool finite>
__device__ __forceinline__ float largest_behind(const WeightRings<Problem, Tuning>& rings, int first_filter, int stage, int pixel,
                                                int thread) {
    using Rings = WeightRings<Problem, Tuning>;
    constexpr int shares = 32 / Rings::behind;
    const unsigned char* const dy = rings.dy(stage);
    const int share = thread % 32 / Rings::behind;
    float largest = 0.0f;
    if constexpr (Tuning::dy_tma) {
        constexpr bool foreign = Problem::groups > 1 && Problem::group_k % WeightTiles<Problem, Tuning>::mma_n != 0;
        const int left = Problem::group_k - first_filter;
#pragma unroll
        for (int i = 0; i < 16 / shares; ++i) {
            const int unit = share + shares * i;
            unsigned four[4];
            ld_shared_v4_u32(four, dy + unit / 8 * Rings::dy_box_bytes + pixel * 128 + (unit % 8 ^ pixel % 8) * 16);
            const auto value = [&](int filter) { return magnitude<finite>(__uint_as_float(four[filter])); };
                const float most = fmaxf(fmaxf(value(0), value(1)), fmaxf(value(2), value(3)));
            if (!foreign || 4 * unit < left) largest = fmaxf(largest, most);
        }
    } else {
        const float* const first = reinterpret_cast<const float*>(dy) + share * Tuning::dy_pitch + pixel;
#pragma unroll
        for (int i = 0; i < 64; i += shares) largest = fmaxf(largest, magnitude<finite>(first[i * Tuning::dy_pitch]));
    }
#pragma unroll
    for (int apart = Rings::behind; apart < 32; apart *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, apart));
    return largest;
}

// Finds the codes of a stage's pixels: warp `thread` / 32 of the scanners those of some pixels.
template <class Problem, class Tuning>
__device__ __forceinline__ void find_codes(const WeightRings<Problem, Tuning>& rings, int first_filter,
                                           RingPlace<Tuning::dy_stages> place, int stage, long long batch, int to,
                                           int thread) {
    using Rings = WeightRings<Problem, Tuning>;
    using Pixels = ReductionPixels<Problem, Tuning>;
    unsigned code = root_code(largest_of_pixel<Problem, Tuning, false>(rings, first_filter, place, thread));
    unsigned most, least;
    unsigned char* const codes = rings.codes(to);
    const int pixel = Rings::scanned(thread);
    if constexpr (Pixels::shared) {
        const auto is_read = [&](int pixel) {
            const Offset<Problem> number = static_cast<Offset<Problem>>(stage) * split_depth + pixel;
            return pixel < Pixels::used && ReductionPixel<Problem, Tuning>(number, batch).in_dy(batch);
        };
        const int next = split_depth + thread / 32 * Rings::behind + thread % Rings::behind;
        const bool read = is_read(pixel), next_read = is_read(next);
        unsigned after = root_code(largest_behind<Problem, Tuning, false>(rings, first_filter, place.stage, next, thread));
        const auto both = [](bool first, bool second, unsigned other, unsigned a, unsigned b) {
            const unsigned one = first ? a : other, two = second ? b : other;
            return other == 0 ? max(one, two) : min(one, two);
        };
        most = __reduce_max_sync(0xffffffffu, both(read, next_read, 0, code, after));
        if (most == infinite_code) {
            code = root_code(largest_of_pixel<Problem, Tuning, true>(rings, first_filter, place, thread));
            after = root_code(largest_behind<Problem, Tuning, true>(rings, first_filter, place.stage, next, thread));
            most = __reduce_max_sync(0xffffffffu, both(read, next_read, 0, code, after));
        }
        least = __reduce_min_sync(0xffffffffu, both(read, next_read, 255, code, after));
        codes[pixel] = static_cast<unsigned char>(read ? code : absent_code);
        if (thread % 32 < Rings::behind) codes[next] = static_cast<unsigned char>(next_read ? after : absent_code);
    } else {
        most = __reduce_max_sync(0xffffffffu, code);
        if (most == infinite_code) {
            // An infinity says nothing about what else its pixel has.
            code = root_code(largest_of_pixel<Problem, Tuning, true>(rings, first_filter, place, thread));
            most = __reduce_max_sync(0xffffffffu, code);
        }
        least = __reduce_min_sync(0xffffffffu, code);
        codes[pixel] = static_cast<unsigned char>(code);
    }
    if (thread % 32 == 0) {
        codes[Pixels::window + thread / 32] = static_cast<unsigned char>(most);
        codes[Pixels::window + 4 + thread / 32] = static_cast<unsigned char>(least);
    }
    warp_arrive(rings.codes_full(to), thread % 32);
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
        ld_shared_v2_u32(most_and_least, codes + ReductionPixels<Problem, Tuning>::window);
#pragma unroll
        for (int i = 0; i < Rings::scanners; ++i) {
            most = max(most, most_and_least[0] >> 8 * i & 255);
            least = min(least, most_and_least[1] >> 8 * i & 255);
        }
        apart = least + least_apart < most;
    }

    // 1 / h of a pixel; any number where it has no dy.
    __device__ __forceinline__ float inverse(int pixel) const { return power_of_two(254 - codes[pixel]); }

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

    // The same for a tap that reads dy shifted by so many pixels. What has no dy becomes zero, so that an infinity there makes
    // no NaN of a weight that does not read it.
    __device__ __forceinline__ void multiply_shifted(float (&x)[2][4][4], int t, int shift) const {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const unsigned code = codes[8 * (i / 2) + 2 * t + i % 2 + shift];
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
