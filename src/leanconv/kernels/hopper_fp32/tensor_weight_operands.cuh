// How x and dy of tensor_weight become operands, in stages of 64 pixels: copies into shared memory, and dy converted to pairs
// of float16 there, the only place of operand B. (Operand A, from x, lies in registers: tensor_weight.cuh.) Nothing is
// transposed: pixels that are rows (TMA, NHWC) are rows of B too (MN-major), columns of pixels are columns of B (K-major).
#pragma once

#include <device/index.cuh>
#include <device/pipeline/split.cuh>
#include <device/ptx/arithmetic.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/mma.cuh>
#include <device/ptx/tma.cuh>
#include <kernels/hopper_fp32/tensor_weight_tiles.cuh>

namespace leanconv {

// The two pixels of a stage that a lane copies into columns, 32 apart; and, behind them, one of dy's window.
template <class Problem, class Tuning>
struct StagePixels {
    static constexpr int count = ReductionPixels<Problem, Tuning>::shared ? 3 : 2;
    int64 n[count];
    int z[count], p[count], column[count];
    bool exists[count];
    __device__ __forceinline__ StagePixels(int stage, int lane, long long batch) {
        const auto all = static_cast<Offset<Problem>>(ReductionPixels<Problem, Tuning>::count(batch));
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const int of_stage = 32 * i + (i < 2 ? lane : lane % 8);
            const Offset<Problem> number = static_cast<Offset<Problem>>(stage) * split_depth + of_stage;
            exists[i] = number < all;
            const ReductionPixel<Problem, Tuning> pixel(exists[i] ? number : 0, batch);
            n[i] = pixel.n, z[i] = pixel.z, p[i] = pixel.p, column[i] = pixel.column;
        }
    }
};

// The stages that lanes copy: each warp arrives at a stage's barrier when `depth` more groups of copies are under way.
template <int depth>
struct Landing {
    Mbarrier* under_way[depth];
    int count = 0;
    __device__ __forceinline__ void commit(Mbarrier* full) {
        cp_async_commit_group();
        if (count == depth) {
            cp_async_wait_group<depth>();
            warp_arrive(under_way[0], threadIdx.x % 32);
#pragma unroll
            for (int i = 0; i + 1 < depth; ++i) under_way[i] = under_way[i + 1];
            --count;
        }
#pragma unroll
        for (int i = 0; i < depth; ++i)
            if (i == count) under_way[i] = full;
        ++count;
    }
    __device__ __forceinline__ void finish() {
        cp_async_wait_group<0>();
        __syncwarp();
#pragma unroll
        for (int i = 0; i < depth; ++i)
            if (i < count) mbarrier_arrive_warp(under_way[i], threadIdx.x % 32);
    }
};

// A thread of the producers.
template <class Problem, class Tuning>
struct WeightProducer {
    using Tiles = WeightTiles<Problem, Tuning>;
    using Rings = WeightRings<Problem, Tuning>;
    using Pixels = StagePixels<Problem, Tuning>;
    using D = Depth<Problem>;
    static constexpr bool shared = ReductionPixels<Problem, Tuning>::shared;
    const Tiles& tile;
    const Rings& rings;
    long long batch;
    int thread;

    // One thread's copies of a stage of x by TMA: boxes of 64 pixels and 32 channels of a tap.
    __device__ __forceinline__ void copy_x(const TensorMap& x, int stage, int place) const {
        Mbarrier* const full = rings.x_full(place);
        mbarrier_arrive_expect_tx(full, Rings::x_bytes);
        const ReductionPixel<Problem, Tuning> from(static_cast<Offset<Problem>>(stage) * split_depth, batch);
        const int h = from.h(), w = from.w();
        for (int i = 0; i < Tiles::rows / 32; ++i) {
            // NOTE: boxes past the last repeat it; what is computed from them is never stored.
            const int next = tile.first_row + 32 * i;
            const WeightRow<Problem, Tuning> row(next < Tiles::all_rows ? next : Tiles::all_rows - 32);
            unsigned char* const to = rings.x(place) + i * Rings::x_box_bytes;
            const int c = tile.group * Problem::group_c + row.channel, n = static_cast<int>(from.n);
            const auto right = static_cast<unsigned short>(row.right()), down = static_cast<unsigned short>(row.down());
            if constexpr (D::volume)
                cp_async_bulk_tensor_im2col_shared_global(to, x, full, c, w, h, from.d(), n, right, down,
                                                          static_cast<unsigned short>(row.deep()));
            else
                cp_async_bulk_tensor_im2col_shared_global(to, x, full, c, w, h, n, right, down);
        }
    }

    // And of 64 filters of dy.
    __device__ __forceinline__ void copy_dy(const TensorMap& dy, int stage, int mma_tile, int place) const {
        Mbarrier* const full = rings.dy_full(place);
        mbarrier_arrive_expect_tx(full, Rings::dy_bytes);
        const int first = tile.group * Problem::group_k + tile.first_filter + mma_tile * Tiles::mma_n;
        if constexpr (shared) {
            const ReductionPixel<Problem, Tuning> from(static_cast<Offset<Problem>>(stage) * split_depth, batch);
            for (int i = 0; i < Tiles::mma_n / 32; ++i)
                cp_async_bulk_tensor_im2col_shared_global(rings.dy(place) + i * Rings::dy_box_bytes, dy, full, first + i * 32,
                                                          from.column - Tuning::dy_lead, from.row(), static_cast<int>(from.n), 0, 0);
            return;
        }
        for (int i = 0; i < Tiles::mma_n / 32; ++i)
            cp_async_bulk_tensor_shared_global(rings.dy(place) + i * Rings::dy_box_bytes, dy, full, first + i * 32,
                                               stage * split_depth);
    }

    // All threads' copies of a stage of x into columns, 4 bytes each: a warp has a fourth of the rows, a lane two pixels.
    __device__ __forceinline__ void copy_x_columns(const float* x, const Pixels& pixels, unsigned char* to) const {
        constexpr int rows = Tiles::rows / Rings::producer_warps, run = Tiles::channel_block < 16 ? Tiles::channel_block : 16;
        const InputStrides<Problem> stride(batch);
        const int first = thread / 32 * rows, lane = thread % 32;
        int d[2], h[2], w[2];
        const char* from[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            w[i] = pixels.column[i];
            if (shared) w[i] -= Tuning::x_lead;
            else w[i] = w[i] * Problem::stride_w - Problem::pad_left;
            // NOTE: a pixel that does not exist lies above all images, so that zeros are read
            h[i] = pixels.exists[i] ? pixels.p[i] * Problem::stride_h - Problem::pad_top : -(1 << 30);
            int64 place = static_cast<int64>(h[i]) * Problem::w + w[i];
            d[i] = pixels.z[i] * D::stride - D::pad;
            if constexpr (D::volume) place += static_cast<int64>(d[i]) * (Problem::h * Problem::w);
            from[i] = reinterpret_cast<const char*>(x + pixels.n[i] * static_cast<int64>(stride.image) +
                                                    place * static_cast<int64>(stride.pixel));
        }
        float* const column = reinterpret_cast<float*>(to) + first * Tuning::x_pitch + lane;
#pragma unroll 1
        for (int i = 0; i < rows; i += run) {
            const WeightRow<Problem, Tuning> row(tile.first_row + first + i);
            int down = row.down();
            if constexpr (D::volume) down += row.deep() * Problem::h;
            const int64 tap = static_cast<int64>(down * Problem::w + row.right()) * static_cast<int64>(stride.pixel);
            const int64 of_x = tile.group * Problem::group_c + row.channel, channel = of_x * static_cast<int64>(stride.channel);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const bool in_volume = !D::volume || static_cast<unsigned>(d[half] + row.deep()) < D::d;
                const bool inside = row.tap < Tiles::taps && static_cast<unsigned>(h[half] + row.down()) < Problem::h &&
                                    static_cast<unsigned>(w[half] + row.right()) < Problem::w && in_volume;
                const char* const source = from[half] + (tap + channel) * 4;
#pragma unroll
                for (int j = 0; j < run; ++j) {
                    const bool known = Problem::group_c % Tiles::channel_block == 0 || row.channel + j < Problem::group_c;
                    cp_async_4(column + (i + j) * Tuning::x_pitch + 32 * half,
                               source + static_cast<int64>(j) * static_cast<int64>(stride.channel) * 4, inside && known);
                }
            }
        }
    }

    // And of 64 filters of dy: a warp has 16. Where images of NCHW have a multiple of four pixels, a lane copies four of every
    // second filter at once, otherwise two pixels of all.
    __device__ __forceinline__ void copy_dy_columns(const float* dy, const Pixels& pixels, int stage, int mma_tile,
                                                    unsigned char* to) const {
        const OutputStrides<Problem> stride(batch);
        const int own = thread / 32 * 16, lane = thread % 32;
        const int first = tile.first_filter + mma_tile * Tiles::mma_n + own;
        if constexpr (!shared && !Problem::nhwc && !Problem::chwn && output_pixels<Problem> % 4 == 0) {
            constexpr int image = output_pixels<Problem>;
            const Offset<Problem> number = static_cast<Offset<Problem>>(stage) * split_depth + lane % 16 * 4;
            const Offset<Problem> n = number / image;
            const float* const from = dy + static_cast<int64>(n) * static_cast<int64>(stride.image) + (number - n * image) +
                                      static_cast<int64>(tile.group * Problem::group_k + first + lane / 16) * image;
            float* const to_four = reinterpret_cast<float*>(to) + (own + lane / 16) * Tuning::dy_pitch + lane % 16 * 4;
#pragma unroll
            for (int j = 0; j < 16; j += 2)
                cp_async_16(to_four + j * Tuning::dy_pitch, from + static_cast<int64>(j) * image,
                            number < static_cast<Offset<Problem>>(batch) * image && first + lane / 16 + j < Problem::group_k);
            return;
        }
#pragma unroll
        for (int half = 0; half < Pixels::count; ++half) {
            // The few pixels behind the 64: eight lanes have them, of every fourth filter.
            const int step = half == 2 ? 4 : 1, start = half == 2 ? lane / 8 : 0, q = pixels.column[half] - Tuning::dy_lead;
            const bool exists = pixels.exists[half] && (!shared || static_cast<unsigned>(q) < Problem::q);
            const int row = D::volume ? pixels.z[half] * Problem::p + pixels.p[half] : pixels.p[half];
            const int64 place = static_cast<int64>(row) * Problem::q + q;
            const int64 filter = tile.group * Problem::group_k + first + start;
            const float* const from = dy + pixels.n[half] * static_cast<int64>(stride.image) +
                                      place * static_cast<int64>(stride.pixel) + filter * static_cast<int64>(stride.channel);
            const int of_window = 32 * half + (half == 2 ? lane % 8 : lane);
            float* const column = reinterpret_cast<float*>(to) + (own + start) * Tuning::dy_pitch + of_window;
#pragma unroll
            for (int j = 0; j < 16; j += step)
                cp_async_4(column + j * Tuning::dy_pitch, from + static_cast<int64>(j) * static_cast<int64>(stride.channel),
                           exists && first + start + j < Problem::group_k);
        }
    }

    // The producers. With TMA for both thread 0 copies x, thread 32 dy, and two warps find the codes of the pixels; otherwise all
    // threads copy. `X` and `DY` are tensor maps, or the tensors where lanes copy.
    template <class X, class DY>
    __device__ __forceinline__ void copy_operands(const X& x, const DY& dy, const StageRange<Problem, Tuning>& range) const {
        RingPlace<Tuning::x_stages> x_place;
        RingPlace<Tuning::dy_stages> dy_place;
        if constexpr (Rings::idle) {
            if (thread == 0) {
                for (int stage = range.first; stage < range.end; ++stage, x_place.advance()) {
                    mbarrier_wait_parity(rings.x_empty(x_place.stage), x_place.parity ^ 1);
                    copy_x(x, stage, x_place.stage);
                }
            } else if (thread == 32) {
                for (int stage = range.first; stage < range.end; ++stage)
                    for (int i = 0; i < Tuning::n_tiles; ++i, dy_place.advance()) {
                        mbarrier_wait_parity(rings.dy_empty(dy_place.stage), dy_place.parity ^ 1);
                        copy_dy(dy, stage, i, dy_place.stage);
                    }
            } else if (thread >= 64) {
                const int scanner = thread - 64;
                RingPlace<Rings::code_stages> to;
#pragma unroll 1
                for (int stage = range.first; stage < range.end; ++stage, to.advance()) {
                    find_codes(rings, tile.first_filter, dy_place, stage, batch, to.stage, scanner);
                    for (int i = 0; i < Tuning::n_tiles; ++i, dy_place.advance())
                        mbarrier_arrive_warp(rings.dy_empty(dy_place.stage), scanner % 32);
                }
            }
        } else {
            // NOTE: with more copies under way than this, a wait below could be one for a stage that only they would release.
            Landing<Tuning::dy_tma || Tuning::x_tma ? 1 : 2> landing;
#pragma unroll 1
            for (int stage = range.first; stage < range.end; ++stage, x_place.advance()) {
                const Pixels pixels(stage, thread % 32, batch);
                // NOTE: dy first: x is converted when the factors of its pixels have been found.
#pragma unroll 1
                for (int i = 0; i < Tuning::n_tiles; ++i, dy_place.advance()) {
                    mbarrier_wait_parity(rings.dy_empty(dy_place.stage), dy_place.parity ^ 1);
                    if constexpr (Tuning::dy_tma) {
                        if (thread == 0) copy_dy(dy, stage, i, dy_place.stage);
                    } else {
                        copy_dy_columns(dy, pixels, stage, i, rings.dy(dy_place.stage));
                        landing.commit(rings.dy_full(dy_place.stage));
                    }
                }
                mbarrier_wait_parity(rings.x_empty(x_place.stage), x_place.parity ^ 1);
                if constexpr (Tuning::x_tma) {
                    if (thread == 0) copy_x(x, stage, x_place.stage);
                } else {
                    copy_x_columns(x, pixels, rings.x(x_place.stage));
                    landing.commit(rings.x_full(x_place.stage));
                }
            }
            landing.finish();
        }
    }
};

// Row of 8 that the lanes of group g have: loads of 16 bytes by a quarter of a warp, and stores of 8 by a half, have no bank
// conflicts under the swizzle of 128 bytes.
__device__ __forceinline__ int bit_reversed(int g) { return g % 2 * 4 + g / 2 % 2 * 2 + g / 4; }

// Scales that know nothing of the other operand.
__device__ __forceinline__ SplitHeader unscaled_header() { return {1.0f, 253, {0, 0}}; }

// Where the inverse scale of a filter goes: lane t of a product has filters 8 i + 2 t and one more in its sums.
template <class Problem, class Tuning>
__device__ __forceinline__ int scale_place(int filter) {
    return filter % 8 / 2 * WeightRings<Problem, Tuning>::scale_pitch + filter / 8 * 2 + filter % 2;
}
// And where a warp says which scale all of its filters have, or 0: lane t reads those of four warps.
template <class Problem, class Tuning>
__device__ __forceinline__ int same_scale_place(int t, int warp) {
    return t * WeightRings<Problem, Tuning>::scale_pitch + 16 + warp;
}

// The scales of a lane's filters. Where all of a warp's filters reach 2^-8 of the stage's largest dy, of code `most`, they
// have one scale, that of all other warps too: pairs of float16 have digits enough.
template <int count>
struct FilterScales {
    float up[count], down[count];
    bool same;
    __device__ __forceinline__ FilterScales(const float (&largest)[count], unsigned most) {
        const unsigned top = 2 * most - 126;  // the largest biased exponent that dy of this code can have
        const float of_all = most > 63 ? power_of_two(top) : 0.0f, least = of_all * power_of_two(127 - 8);
        bool near = of_all > 0.0f;
#pragma unroll
        for (int j = 0; j < count; ++j) near = near && (largest[j] == 0.0f || (largest[j] >= least && largest[j] < 2 * of_all));
        same = __all_sync(0xffffffffu, near);
#pragma unroll
        for (int j = 0; j < count; ++j) {
            const RowScale scale(same ? of_all : largest[j], unscaled_header());
            up[j] = scale.scale, down[j] = scale.inverse_scale;
        }
    }
};

// One warp's share of 64 filters of dy whose pixels become rows: 16 filters of 64 pixels or a window. A lane has four filters,
// and every eighth pixel.
template <class Problem, class Tuning>
struct SplitRows {
    using Rings = WeightRings<Problem, Tuning>;
    using Pixels = ReductionPixels<Problem, Tuning>;
    using Factors = PixelFactors<Problem, Tuning>;
    static constexpr int loads = Pixels::window / 8;
    int warp, t, row;
    bool first;  // of the lanes that have the same filters
    float v[loads][4];

    __device__ __forceinline__ explicit SplitRows(int thread)
        : warp(thread / 32), t(thread % 4), row(bit_reversed(thread % 32 / 4)), first(thread % 32 < 4) {}

    __device__ __forceinline__ void load(const unsigned char* dy, const Factors& factors) {
        if constexpr (Tuning::dy_tma) {
            const unsigned char* const box = dy + warp / 2 * Rings::dy_box_bytes + row * 128;
            const int unit = (warp % 2 * 4 + t) ^ row;
#pragma unroll
            for (int i = 0; i < loads; ++i) {
                const float4 four = *reinterpret_cast<const float4*>(box + i * 1024 + unit * 16);
                v[i][0] = four.x, v[i][1] = four.y, v[i][2] = four.z, v[i][3] = four.w;
            }
        } else {
            // NOTE: columns of four filters further on lie 8 banks further on: a load of a warp has no bank conflicts.
            const float* const column = reinterpret_cast<const float*>(dy) + (16 * warp + 4 * t) * Tuning::dy_pitch + row;
#pragma unroll
            for (int i = 0; i < loads; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) v[i][j] = column[j * Tuning::dy_pitch + 8 * i];
        }
        // NOTE: what no tap reads must not decide a scale.
        if constexpr (Pixels::used % 8 != 0)
#pragma unroll
            for (int j = 0; j < 4; ++j) v[loads - 1][j] = row < Pixels::used % 8 ? v[loads - 1][j] : 0.0f;
        if (!factors.apart) return;
#pragma unroll
        for (int i = 0; i < loads; ++i) {
            const float inverse = factors.inverse(8 * i + row);
#pragma unroll
            for (int j = 0; j < 4; ++j) v[i][j] = v[i][j] * inverse * inverse;
        }
    }

    // Splits the columns with a scale for each, from the largest of its pixels.
    __device__ __forceinline__ void store(unsigned char* to, float* scales, const Factors& factors) const {
        float up[4], largest[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            largest[j] = fabsf(v[0][j]);
#pragma unroll
            for (int i = 1; i < loads; ++i) largest[j] = fmaxf(largest[j], fabsf(v[i][j]));
#pragma unroll
            for (int apart = 4; apart < 32; apart *= 2)
                largest[j] = fmaxf(largest[j], __shfl_xor_sync(0xffffffffu, largest[j], apart));
        }
        const FilterScales<4> scale(largest, factors.most);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            up[j] = scale.up[j];
            if (first) scales[scale_place<Problem, Tuning>(16 * warp + 4 * t + j)] = scale.down[j];
        }
        if (first) scales[same_scale_place<Problem, Tuning>(t, warp)] = scale.same ? scale.down[0] : 0.0f;
        unsigned char* const high = to + row * 128 + ((2 * warp + t / 2) ^ row) * 16 + t % 2 * 8;
#pragma unroll
        for (int i = 0; i < loads; ++i) {
            uint2 packed;
            packed.x = cvt_rn_f16x2_f32(v[i][0] * up[0], v[i][1] * up[1]);
            packed.y = cvt_rn_f16x2_f32(v[i][2] * up[2], v[i][3] * up[3]);
            *reinterpret_cast<uint2*>(high + i * 1024) = packed;
            if constexpr (Tuning::products == 3) {
                uint2 rest;
                rest.x = rest_of(v[i][0], v[i][1], up[0], up[1], packed.x);
                rest.y = rest_of(v[i][2], v[i][3], up[2], up[3], packed.y);
                *reinterpret_cast<uint2*>(high + Rings::half_bytes + i * 1024) = rest;
            }
        }
    }

    // As split_low, for neighbours of different scales.
    static __device__ __forceinline__ unsigned rest_of(float a, float b, float up_a, float up_b, unsigned high) {
        const float first = cvt_f32_f16(static_cast<unsigned short>(high));
        const float second = cvt_f32_f16(static_cast<unsigned short>(high >> 16));
        return cvt_rn_f16x2_f32(fmaf(a, up_a, -first), fmaf(b, up_b, -second));
    }
};

// One warp's share of 64 filters of dy in columns: 16 filters of 64 pixels. A lane has half of a filter's.
template <class Problem, class Tuning>
struct SplitColumns {
    using Rings = WeightRings<Problem, Tuning>;
    using Factors = PixelFactors<Problem, Tuning>;
    int filter, half;
    float v[32];

    __device__ __forceinline__ explicit SplitColumns(int thread)
        : filter(thread / 32 * 16 + thread % 32 / 16 * 8 + thread % 8), half(thread / 8 % 2) {}

    __device__ __forceinline__ void load(const unsigned char* dy, const Factors& factors) {
        const float4* const column = reinterpret_cast<const float4*>(dy + (filter * Tuning::dy_pitch + 32 * half) * 4);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float4 four = column[i];
            v[4 * i] = four.x, v[4 * i + 1] = four.y, v[4 * i + 2] = four.z, v[4 * i + 3] = four.w;
        }
        if (!factors.apart) return;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const float inverse = factors.inverse(32 * half + i);
            v[i] = v[i] * inverse * inverse;
        }
    }

    __device__ __forceinline__ void store(unsigned char* to, float* scales, const Factors& factors) const {
        float largest[1] = {fabsf(v[0])};
#pragma unroll
        for (int i = 1; i < 32; ++i) largest[0] = fmaxf(largest[0], fabsf(v[i]));
        largest[0] = fmaxf(largest[0], __shfl_xor_sync(0xffffffffu, largest[0], 8));
        const FilterScales<1> scale(largest, factors.most);
        if (half == 0) {
            scales[scale_place<Problem, Tuning>(filter)] = scale.down[0];
            const int t = filter % 16;
            if (t < 4) scales[same_scale_place<Problem, Tuning>(t, filter / 16)] = scale.same ? scale.down[0] : 0.0f;
        }
        unsigned char* const line = to + filter * 128;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint4 high, low;
            unsigned* const highs = &high.x;
            unsigned* const lows = &low.x;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float a = v[8 * i + 2 * j], b = v[8 * i + 2 * j + 1];
                highs[j] = split_high(a, b, scale.up[0]);
                if constexpr (Tuning::products == 3) lows[j] = split_low(a, b, scale.up[0], highs[j]);
            }
            const int unit = (4 * half + i) ^ filter % 8;
            *reinterpret_cast<uint4*>(line + unit * 16) = high;
            if constexpr (Tuning::products == 3) *reinterpret_cast<uint4*>(line + Rings::half_bytes + unit * 16) = low;
        }
    }
};

// Operand B of a k16 step: 16 rows of 128 bytes where pixels are rows, otherwise 32 bytes of each row.
template <class Tuning>
constexpr bool split_in_rows = Tuning::dy_tma || Tuning::taps > 1;
template <class Tuning>
constexpr int k16_bytes = split_in_rows<Tuning> ? 2048 : 32;
template <class Tuning>
__device__ __forceinline__ auto split_operand(const unsigned char* split) {
    if constexpr (split_in_rows<Tuning>) return transposed_descriptor(split, 0, 1024, 128);
    else return matrix_descriptor(split, 0, 1024, 128);
}

// Converts a stage of dy into those of `place`: `values` is a SplitRows or SplitColumns of each of the 128 converters.
template <class Problem, class Tuning, class Values>
__device__ __forceinline__ void convert_dy(Values& values, const WeightRings<Problem, Tuning>& rings,
                                           const PixelFactors<Problem, Tuning>& factors, RingPlace<Tuning::dy_stages> dy_place,
                                           RingPlace<Tuning::split_stages> place, int thread) {
    mbarrier_wait_parity(rings.dy_full(dy_place.stage), dy_place.parity);
    values.load(rings.dy(dy_place.stage), factors);
    mbarrier_wait_parity(rings.split_empty(place.stage), place.parity ^ 1);
    values.store(rings.split(place.stage), rings.scales(place.stage), factors);
    fence_proxy_async();
    __syncwarp();
    // NOTE: dy is free after the stores that the loaded values went into, which an arrival does not pass.
    mbarrier_arrive_warp(rings.split_full(place.stage), rings.dy_empty(dy_place.stage), thread % 32);
}

// The converters.
template <class Problem, class Tuning>
__device__ __forceinline__ void split_dy(const WeightTiles<Problem, Tuning>& tile, const WeightRings<Problem, Tuning>& rings,
                                         const StageRange<Problem, Tuning>& range, long long batch, int thread) {
    using Rings = WeightRings<Problem, Tuning>;
    static_assert(Tuning::dy_stages > Tuning::n_tiles, "all filters of a stage are looked at before the first are converted, "
                                                         "and lanes report a copy when the next is under way");
    RingPlace<Tuning::dy_stages> dy_place;
    RingPlace<Tuning::split_stages> place;
    RingPlace<Rings::code_stages> code_place;
    typename Select<split_in_rows<Tuning>, SplitRows<Problem, Tuning>, SplitColumns<Problem, Tuning>>::type values(thread);
#pragma unroll 1
    for (int stage = range.first; stage < range.end; ++stage, code_place.advance()) {
        if constexpr (!Rings::idle) find_codes(rings, tile.first_filter, dy_place, stage, batch, code_place.stage, thread);
        const PixelFactors<Problem, Tuning> factors(rings, code_place);
#pragma unroll 1
        for (int i = 0; i < Tuning::n_tiles; ++i, dy_place.advance(), place.advance())
            convert_dy(values, rings, factors, dy_place, place, thread);
    }
}

}  // namespace leanconv
