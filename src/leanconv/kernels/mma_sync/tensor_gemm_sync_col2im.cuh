// tensor_gemm_sync_col2im: gradient of the input of few channels (first layers) on tensor cores by mma.sync. From sm_80 on.
//
//   dx[n, c, h, w] = sum over k, r, s of dy[n, k, p, q] * w[k, c, r, s]        p * stride - pad + r = h, as for q
//
// as col2im along rows: a product of dy with all columns (s, c) of filter rows, whose sums are added where they overlap.
//
//   columns   u = (h + pad) / stride is a coarse row, a = (h + pad) % stride its phase. Coarse row u reads rows u - m of dy, and of
//             the filter rows a + m * stride:
//             sums[u, q, (a, s, c)] = sum over m, k of dy[u - m, q, k] * w[k, c, a + m * stride, s].
//   col2im    dx[row a of u, column v * stride + b - pad, c] = sum over l of sums[u, v - l, (a, b + l * stride, c)]
// Slices of volumes as rows. So three channels are many filters of one product (2 * 7 * 3 for 7x7 at stride 2), no pixel of dy is
// multiplied for a column that it does not meet, and one block reads it once for each of its tiles.
//
// Requires   tensor cores of sm_80 or newer; NCHW or NHWC; one group; unit dilation; 96 columns (s, c) at most, that fit tiles.
// Numerics   float32 = hi + lo (two float16, scaled per pixel and 64 filters, split.cuh); one product = 3 mma; partial sums of 64
//            promoted to float32. With `products` 1 hi alone; 16 bits as they are. col2im adds in float32, in the order of l.
// CTA tile   tile_rows coarse rows x tile_columns pixels of dy x `phases` phases, of mma_n columns.
// Roles      all threads copy (and convert) the rows of dy that the tile reads, 64 channels at a time; a warp multiplies
//            16 * m_tiles pixels with all columns. Filters come by cp.async in stages of one filter row and 64 channels.
// Pipelines  two stages of filters, one __syncthreads each; other CTAs of the multiprocessor multiply while one copies dy.
// Epilogue   sums pass shared memory, as many phases at a time as fit; a thread gathers those of an element of dx.
// Bytes      dy (tile_rows + taps_h - 1) / tile_rows times from L2, dx once.
// Explored (H200, 2e3d685f): a product of 16 x 8 x 16 takes 2.4 cycles of a multiprocessor, copying eight channels 1.5 (float32) or
//            0.2 (16 bits, NHWC), a sum of the epilogue 0.3: 7x7 at stride 2 in float32 is products for half of its time.
//            Two or three CTAs of four warps are faster than one of eight.
#pragma once

#include <device/epilogue.cuh>
#include <device/pipeline/split.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/mma.cuh>
#include <device/ptx/sync.cuh>
#include <kernels/mma_sync/filter_columns.cuh>

namespace leanconv {

// The rows of dy that a tile reads, 64 channels of them.
template <class Problem, class Tuning>
struct GradientPixels {
    using C = Columns<Problem, Tuning>;
    using T = typename Problem::element;
    static constexpr bool nhwc = Problem::nhwc;
    // Lanes that share a pixel, and units of eight channels that each has.
    static constexpr int lanes = nhwc ? C::line_units : 1, own = C::line_units / lanes, at_once = nhwc ? 4 : 1;
    const T* dy;
    Offset<Problem> image;
    int first_p, first_q;
    unsigned char* shared;

    // Where channel 0 of a pixel of the tile lies, and whether it exists.
    __device__ __forceinline__ Offset<Problem> place(int pixel, int z, bool& exists) const {
        const OutputStrides<Problem> stride(1);
        const int p = first_p + pixel / C::columns, q = first_q + pixel % C::columns;
        exists = static_cast<unsigned>(p) < Problem::p && static_cast<unsigned>(q) < Problem::q;
        return image + (static_cast<Offset<Problem>>(z * Problem::p + p) * Problem::q + q) * stride.pixel;
    }
    // Eight channels as they are, zeros past the last.
    __device__ __forceinline__ void read(T (&to)[8], Offset<Problem> from, int channel, bool exists) const {
        const OutputStrides<Problem> stride(1);
        if constexpr (nhwc && C::split && Problem::k % 4 == 0) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float four[4];
                load_adjacent(four, dy + from + channel + 4 * i, exists && channel + 4 * i < Problem::k);
#pragma unroll
                for (int j = 0; j < 4; ++j) to[4 * i + j] = four[j];
            }
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const bool there = exists && channel + j < Problem::k;
                to[j] = there ? dy[from + (channel + j) * stride.channel] : T{};
            }
        }
    }
    __device__ __forceinline__ void store(int at, const unsigned (&words)[4]) const {
        *reinterpret_cast<uint4*>(shared + at) = make_uint4(words[0], words[1], words[2], words[3]);
    }

    __device__ __forceinline__ void load_narrow(int z, int chunk) const {
        constexpr bool copied = nhwc && Problem::k % 8 == 0;
        for (int i = threadIdx.x; i < C::pixels * C::line_units; i += C::threads) {
            // in NCHW neighbouring lanes have neighbouring pixels
            const int pixel = nhwc ? i / C::line_units : i % C::pixels, unit = nhwc ? i % C::line_units : i / C::pixels;
            const int channel = chunk * split_depth + unit * 8;
            bool exists;
            const Offset<Problem> from = place(pixel, z, exists);
            if constexpr (copied) {
                exists = exists && channel < Problem::k;
                cp_async_16(shared + C::unit_at(pixel, unit), dy + (exists ? from + channel : 0), exists);
            } else {
                T x[8];
                read(x, from, channel, exists);
                unsigned words[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) words[j] = x[2 * j].bits | static_cast<unsigned>(x[2 * j + 1].bits) << 16;
                store(C::unit_at(pixel, unit), words);
            }
        }
        cp_async_commit_group();
    }

    __device__ __forceinline__ void load_split(int z, int chunk, const float* factors, bool scaled,
                                               const SplitHeader& header) const {
        float* const inverse_scales = reinterpret_cast<float*>(shared + C::scales_at);
        const int lane = threadIdx.x % lanes, mine = threadIdx.x / lanes;
        for (int first = 0; first < C::pixels; first += C::threads / lanes * at_once) {
            float x[at_once][8 * own];
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const int pixel = first + i * (C::threads / lanes) + mine;
                bool exists;
                const Offset<Problem> from = place(pixel, z, exists);
#pragma unroll
                for (int unit = 0; unit < own; ++unit)
                    read(reinterpret_cast<float(&)[8]>(x[i][8 * unit]), from, chunk * split_depth + (lane + unit) * 8,
                         exists && pixel < C::pixels);
            }
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const int pixel = first + i * (C::threads / lanes) + mine;
                float largest = 0;
#pragma unroll
                for (int j = 0; j < 8 * own; ++j) {
                    if (scaled) {
                        const int channel = lane * 8 + j;
                        const float factor = factors[chunk * split_depth + channel];
                        x[i][j] = x[i][j] * factor * factor;
                    }
                    largest = fmaxf(largest, fabsf(x[i][j]));
                }
#pragma unroll
                for (int other = 1; other < lanes; other *= 2)
                    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, other));
                if (pixel >= C::pixels) continue;
                const RowScale scale(largest, header);
                if (lane == 0) inverse_scales[pixel] = scale.inverse_scale;
#pragma unroll
                for (int unit = 0; unit < own; ++unit) {
                    unsigned high[4], low[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const float a = x[i][8 * unit + 2 * j], b = x[i][8 * unit + 2 * j + 1];
                        high[j] = split_high(a, b, scale.scale);
                        low[j] = split_low(a, b, scale.scale, high[j]);
                    }
                    store(C::unit_at(pixel, lane + unit), high);
                    if constexpr (C::exact) store(C::half_bytes + C::unit_at(pixel, lane + unit), low);
                }
            }
        }
    }
};

// Operand A of 16 pixels, from number `first` on.
template <class C, int steps>
__device__ __forceinline__ void load_pixels(unsigned (&to)[steps][4], const unsigned char* half, int first, int lane) {
    const int pixel = first + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
    for (int i = 0; i < steps; ++i) ldmatrix(to[i], half + C::unit_at(pixel, 2 * i + lane / 16));
}

// Operand B of 8 columns: two registers for each k16 step, in the order of tensor_filters.cuh.
template <int steps>
__device__ __forceinline__ void load_columns(unsigned (&to)[4][2], const unsigned char* rows, int lane) {
#pragma unroll
    for (int half = 0; half < ceil_div(steps, 2); ++half) {
        unsigned four[4];
        ldmatrix(four, rows + lane % 8 * 128 + ((4 * half + lane / 8) ^ lane % 8) * 16);
        to[2 * half][0] = four[0], to[2 * half][1] = four[1];
        to[2 * half + 1][0] = four[2], to[2 * half + 1][1] = four[3];
    }
}

__device__ __forceinline__ void mma(float16, float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    mma_f16(sums, a, b);
}
__device__ __forceinline__ void mma(bfloat16, float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    mma_bf16(sums, a, b);
}

// Operand A of a stage: of m_tiles x 16 pixels.
template <class C, int steps>
struct ColumnPixels {
    static constexpr int m_tiles = C::m_tiles;
    unsigned high[m_tiles][steps][4], low[C::exact ? m_tiles : 1][steps][4];
    float inverse[m_tiles][2];

    __device__ __forceinline__ void load(const unsigned char* shared, const int (&first)[m_tiles], int lane) {
        const float* const inverse_scales = reinterpret_cast<const float*>(shared + C::scales_at);
#pragma unroll
        for (int i = 0; i < m_tiles; ++i) {
            load_pixels<C>(high[i], shared, first[i], lane);
            if constexpr (C::exact) load_pixels<C>(low[i], shared + C::half_bytes, first[i], lane);
            if constexpr (C::split) {
#pragma unroll
                for (int j = 0; j < 2; ++j) inverse[i][j] = inverse_scales[first[i] + lane / 4 + 8 * j];
            }
        }
    }
};

// Adds to sums the products of two operands, of n8s times 8 columns.
template <class T, int m_tiles, int n8s, int steps>
__device__ __forceinline__ void add_products(float (&sums)[n8s][m_tiles][4], const unsigned (&a)[m_tiles][steps][4],
                                             const unsigned (&b)[n8s][4][2]) {
#pragma unroll
    for (int k16 = 0; k16 < steps; ++k16)
#pragma unroll
        for (int n8 = 0; n8 < n8s; ++n8)
#pragma unroll
            for (int i = 0; i < m_tiles; ++i) mma(T{}, sums[n8][i], a[i][k16], b[n8][k16]);
}

// The products of a stage with n8s times 8 columns, whose filters begin at `filters`.
template <class Problem, class Tuning, int n8s, int steps>
__device__ __forceinline__ void multiply_eights(float (&sums)[n8s][Tuning::m_tiles][4],
                                                const ColumnPixels<Columns<Problem, Tuning>, steps>& pixels,
                                                const unsigned char* filters, int lane) {
    using C = Columns<Problem, Tuning>;
    unsigned b[n8s][4][2];
#pragma unroll
    for (int n8 = 0; n8 < n8s; ++n8) load_columns<steps>(b[n8], filters + n8 * 1024, lane);
    if constexpr (!C::split) {
        add_products<typename Problem::element>(sums, pixels.high, b);
    } else {
        float partial[n8s][Tuning::m_tiles][4] = {};
        if constexpr (C::exact) {
            // Where sums take most registers the high halves of the filters are read twice.
            constexpr bool twice = Tuning::mma_n > 64;
            unsigned low[n8s][4][2];
            add_products<float16>(partial, pixels.low, b);
#pragma unroll
            for (int n8 = 0; n8 < n8s; ++n8) load_columns<steps>(low[n8], filters + C::F::half_bytes + n8 * 1024, lane);
            add_products<float16>(partial, pixels.high, low);
            if constexpr (twice) {
#pragma unroll
                for (int n8 = 0; n8 < n8s; ++n8) load_columns<steps>(b[n8], filters + n8 * 1024, lane);
            }
        }
        add_products<float16>(partial, pixels.high, b);
#pragma unroll
        for (int i = 0; i < Tuning::m_tiles; ++i)
#pragma unroll
            for (int j = 0; j < 4 * n8s; ++j) {
                float& sum = sums[j / 4][i][j % 4];
                sum = fmaf(partial[j / 4][i][j % 4], pixels.inverse[i][j / 2 % 2], sum);
            }
    }
}

// The products of one stage: of the warp's pixels, which begin at first[i], with the columns of the phases that `having` names.
template <class Problem, class Tuning, int steps>
__device__ __forceinline__ void multiply_columns(float (&sums)[Tuning::mma_n / 16][2][Tuning::m_tiles][4],
                                                 const unsigned char* shared, const int (&first)[Tuning::m_tiles],
                                                 const unsigned char* filters, unsigned having, int lane) {
    using C = Columns<Problem, Tuning>;
    ColumnPixels<C, steps> pixels;
    pixels.load(shared, first, lane);
#pragma unroll
    for (int n16 = 0; n16 < Tuning::mma_n / 16; ++n16) {
        constexpr int of = C::phase_columns;
        const int phase = n16 * 16 / of, next = (n16 * 16 + 8) / of;
        if (C::alike || phase == next) {
            if (C::alike || having >> phase & 1) multiply_eights<Problem, Tuning>(sums[n16], pixels, filters + n16 * 2048, lane);
        } else {
            using One = float (&)[1][Tuning::m_tiles][4];
            if (having >> phase & 1)
                multiply_eights<Problem, Tuning>(reinterpret_cast<One>(sums[n16][0]), pixels, filters + n16 * 2048, lane);
            if (having >> next & 1)
                multiply_eights<Problem, Tuning>(reinterpret_cast<One>(sums[n16][1]), pixels, filters + n16 * 2048 + 1024, lane);
        }
    }
}

// Puts the sums of the warp's pixels, of phases_at_once phases of the tile, where col2im finds them.
template <class Problem, class Tuning>
__device__ __forceinline__ void share_sums(float* shared, const float (&sums)[Tuning::mma_n / 16][2][Tuning::m_tiles][4],
                                           int first_phase, int warp, int lane, const float* scales) {
    using C = Columns<Problem, Tuning>;
#pragma unroll
    for (int i = 0; i < Tuning::mma_n / 8; ++i) {
        // a lane has two neighbours of each eight columns
        const int column = 8 * i + lane % 4 * 2, phase = column / C::phase_columns - first_phase;
        if (8 * i + 8 <= first_phase * C::phase_columns || phase < 0 || phase >= C::phases_at_once) continue;
        const int filter = i / 2 * 16 + lane % 4 * 4 + i % 2 * 2;
        const float one = C::split ? scales[filter] : 1.0f, next = C::split ? scales[filter + 1] : 1.0f;
        float* const to = shared + phase * C::of_sums + column % C::phase_columns;
#pragma unroll
        for (int m = 0; m < Tuning::m_tiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int pixel = (warp * Tuning::m_tiles + m) * 16 + half * 8 + lane / 4;
                const float* const sum = sums[i / 2][i % 2][m] + 2 * half;
                *reinterpret_cast<float2*>(to + pixel * C::pitch) = make_float2(sum[0] * one, sum[1] * next);
            }
    }
}

// The place of a tile: its image, coarse slice, and first coarse row and column.
template <class Problem, class Tuning>
struct ColumnTile {
    using C = Columns<Problem, Tuning>;
    int n_tile, slice, row, column;
    Offset<Problem> image;
    __device__ __forceinline__ explicit ColumnTile(int64 number) {
        n_tile = static_cast<int>(number % C::tiles), number /= C::tiles;
        column = C::first_w + static_cast<int>(number % C::tiles_w) * C::whole_columns, number /= C::tiles_w;
        row = C::first_h + static_cast<int>(number % C::tiles_h) * C::rows, number /= C::tiles_h;
        slice = C::first_d + static_cast<int>(number % C::count_d);
        image = static_cast<Offset<Problem>>(number / C::count_d);
    }
};

// col2im: each element of dx gathers the sums that meet it, and is stored. A warp has a row of a phase.
template <class Problem, class Tuning>
__device__ __forceinline__ void gather_columns(const float* shared, const ColumnTile<Problem, Tuning>& tile, int first_phase,
                                               ElementsIn<Problem> bias, ElementsOut<Problem> dx) {
    using C = Columns<Problem, Tuning>;
    using T = typename Problem::element;
    constexpr int channels = Problem::c, width = C::whole_columns * Problem::stride_w, of_row = width * channels;
    const InputStrides<Problem> stride(1);
    const int first_w = tile.column * Problem::stride_w - Problem::pad_left, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int i = warp; i < C::rows * C::phases_at_once; i += Tuning::warps) {
        const int row = i % C::rows, of_tile = first_phase + i / C::rows, phase = tile.n_tile * Tuning::phases + of_tile;
        const int d = tile.slice * C::D::stride + phase / Problem::stride_h - C::D::pad;
        const int h = (tile.row + row) * Problem::stride_h + phase % Problem::stride_h - Problem::pad_top;
        if (of_tile >= Tuning::phases || phase >= C::phases || static_cast<unsigned>(d) >= C::D::d ||
            static_cast<unsigned>(h) >= Problem::h)
            continue;
        const auto pixels = (static_cast<Bytes<Problem>>(d) * Problem::h + h) * Problem::w;
        T* const line = dx + (static_cast<Bytes<Problem>>(tile.image) * stride.image + pixels * stride.pixel);
        const float* const sums = shared + i / C::rows * C::of_sums + (row * C::columns + C::taps_w - 1) * C::pitch;
#pragma unroll 4
        for (int at = lane; at < of_row; at += 32) {
            const int c = Problem::nhwc ? at % channels : at / width, right = Problem::nhwc ? at / channels : at % width;
            const int v = right / Problem::stride_w, b = right % Problem::stride_w, w = first_w + right;
            if (static_cast<unsigned>(w) >= Problem::w) continue;
            const float* const from = sums + v * C::pitch + b * channels + c;
            float sum = 0;
#pragma unroll
            for (int l = 0; l < C::taps_w; ++l)
                if ((l + 1) * Problem::stride_w <= Problem::s || b + l * Problem::stride_w < Problem::s)
                    sum += from[l * (Problem::stride_w * channels - C::pitch)];
            T* const to = line + (w * stride.pixel + c * stride.channel);
            *to = from_float<T>(finish<Problem>(sum, Problem::bias ? to_float(bias[c]) : 0.0f, held_by<Problem>(to, true)));
        }
    }
}

template <class Problem, class Tuning>
__device__ __forceinline__ void tensor_gemm_sync_col2im(ElementsIn<Problem> dy, ElementsIn<Problem> prepared,
                                                        ElementsIn<Problem> bias, ElementsOut<Problem> dx, long long) {
    using C = Columns<Problem, Tuning>;
    using F = typename C::F;
    constexpr int m_tiles = Tuning::m_tiles, of_slice = C::taps_h * C::chunks;
    const ColumnTile<Problem, Tuning> tile(blockIdx.x);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned char* const shared = shared_memory();
    const GradientPixels<Problem, Tuning> pixels{dy, tile.image * OutputStrides<Problem>(1).image, tile.row - C::taps_h + 1,
                                                 tile.column - C::taps_w + 1, shared};
    SplitHeader header{};
    const float* packed = nullptr;
    bool scaled = false;
    const unsigned char* fragments = reinterpret_cast<const unsigned char*>(prepared);
    if constexpr (C::split) {
        packed = prepared + Problem::first_prepared;
        header = *reinterpret_cast<const SplitHeader*>(packed);
        scaled = reinterpret_cast<const unsigned*>(packed)[F::flags_at] != 0;
        fragments = reinterpret_cast<const unsigned char*>(packed + F::fragments_at);
    }

    // Slice by slice of dy, 64 channels at a time, a row of the filters: a stage of filters each.
    const int first_slice = max(0, tile.slice - Depth<Problem>::z + 1), end = min(C::taps_d, tile.slice + 1) * of_slice;
    const auto copy_filters = [&](int number) {
        if (number < end) {
            const int tap = number / of_slice * C::taps_h + number % C::taps_h, chunk = number / C::taps_h % C::chunks;
            const unsigned char* const from = fragments + F::fragment(0, tile.n_tile, tap * C::chunks + chunk, 0);
            unsigned char* const to = shared + C::filters_at + number % 2 * F::stage_bytes;
            for (int i = threadIdx.x * 16; i < F::stage_bytes; i += C::threads * 16) cp_async_16(to + i, from + i, true);
        }
        cp_async_commit_group();
    };
    float sums[Tuning::mma_n / 16][2][m_tiles][4] = {};
    copy_filters(first_slice * of_slice);
#pragma unroll 1
    for (int number = first_slice * of_slice; number < end;) {
        const int z = tile.slice - number / of_slice, chunk = number / C::taps_h % C::chunks;
        __syncthreads();  // the pixels before have been read
        if constexpr (C::split) pixels.load_split(z, chunk, packed + F::factors_at, scaled, header);
        else pixels.load_narrow(z, chunk);
#pragma unroll 1
        for (int m = 0; m < C::taps_h; ++m, ++number) {
            cp_async_wait_group<0>();
            __syncthreads();  // pixels and filters are there, and the filters before have been read
            copy_filters(number + 1);
            int first[m_tiles];
#pragma unroll
            for (int i = 0; i < m_tiles; ++i) {
                const int pixel = (warp * m_tiles + i) * 16;
                first[i] = (pixel / C::columns + C::taps_h - 1 - m) * C::columns + pixel % C::columns;
            }
            const unsigned char* const filters = shared + C::filters_at + number % 2 * F::stage_bytes;
            const unsigned having = C::having(tile.n_tile, tile.slice - z, m);
            if (C::last_steps < C::k_steps && chunk == C::chunks - 1)
                multiply_columns<Problem, Tuning, C::last_steps>(sums, shared, first, filters, having, lane);
            else
                multiply_columns<Problem, Tuning, C::k_steps>(sums, shared, first, filters, having, lane);
        }
    }

    float* const exchanged = reinterpret_cast<float*>(shared);
    const float* const scales = C::split ? packed + F::scales_at + tile.n_tile * Tuning::mma_n : nullptr;
#pragma unroll
    for (int phase = 0; phase < Tuning::phases; phase += C::phases_at_once) {
        __syncthreads();  // what lay there has been read
        share_sums<Problem, Tuning>(exchanged, sums, phase, warp, lane, scales);
        __syncthreads();
        gather_columns<Problem, Tuning>(exchanged, tile, phase, bias, dx);
    }
}

}  // namespace leanconv
