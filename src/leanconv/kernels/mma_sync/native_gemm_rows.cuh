// native_gemm_rows: layers of few channels (first layers) on tensor cores by mma.sync, float16 or bfloat16, channels last. From
// sm_80 on.
//
//   y[n, p, q, k] = sum over r, e of x[n, p * stride - pad + r, (q * stride - pad) * C + e] * w[k, r, e]        e = s * C + c
//
// A window's row of S pixels is one run of S * C neighbours in memory. So the reduction has rows of neighbours, cut into eights,
// and the tensor core's pairs are pairs of a run: one 32-bit load of shared memory each, wherever a window begins.
//
// Requires   tensor cores of sm_80 or newer; NHWC; one group; neighbouring columns (dilation 1); few channels.
// Numerics   products and sums of the tensor core, in float32, rounded once. What lies behind a run is no part of a sum.
// CTA tile   tile_rows x tile_columns outputs x mma_n filters, 16 * m_tiles outputs a warp; CTAs are persistent.
// Shared     filters in the order of operand B, once for a CTA; the rows of x that a tile reads (of volumes those of one slice of
//            the filters), a pixel each `pitch` elements apart: runs begin at even elements.
// Pipelines  none: other CTAs of the multiprocessor multiply while one copies.
// Bytes      x (1 + halo) times from L2, y once.
#pragma once

#include <device/element.cuh>
#include <device/epilogue.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/mma.cuh>
#include <device/ptx/sync.cuh>

namespace leanconv {

template <class Problem, class Tuning>
struct WindowRows {
    using D = Depth<Problem>;
    static constexpr int threads = 32 * Tuning::warps, m_tiles = Tuning::m_tiles;
    static constexpr int rows = Tuning::tile_rows, columns = Tuning::tile_columns;
    static_assert(rows * columns == 16 * m_tiles * Tuning::warps && columns % 16 == 0, "warps share the outputs evenly");
    // Elements between pixels, and between neighbouring outputs: an even number.
    static constexpr int pixel = Problem::stride_w * Problem::c % 2 == 0 ? Problem::c : Problem::c + 1;
    static constexpr int step = Problem::stride_w * pixel, run = Problem::s * pixel;
    static_assert(Problem::groups == 1 && Problem::dilation_w == 1 && Problem::nhwc, "a window's row is a run of memory");
    // Eights of a run, of all rows of a slice, and of a filter; two are a step of the tensor core.
    static constexpr int eights = ceil_div(run, 8), of_slice = Problem::r * eights, steps = ceil_div(of_slice, 2);
    static constexpr int tiles_k = ceil_div(Problem::k, Tuning::mma_n), n16s = Tuning::mma_n / 16;
    static constexpr int filter_words = D::t * steps * n16s * 128;
    // Rows of x in shared memory, with room for the last run.
    static constexpr int read_rows = (rows - 1) * Problem::stride_h + (Problem::r - 1) * Problem::dilation_h + 1;
    static constexpr int pitch = ceil_div((columns - 1) * step + 8 * eights, 2) * 2;
    static constexpr int tiles_p = ceil_div(Problem::p, rows), tiles_q = ceil_div(Problem::q, columns);
    // Of the last eight of a run so many elements belong to it.
    static constexpr int last = run - 8 * (eights - 1);
};

__device__ __forceinline__ void mma_rows(float16, float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    mma_f16(sums, a, b);
}
__device__ __forceinline__ void mma_rows(bfloat16, float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    mma_bf16(sums, a, b);
}

// Puts the filters of a tile into shared memory as lanes read them: for 16 filters and a step four words each, operand B of two
// times eight filters. Filters are permuted within 16: a lane has four neighbours' sums.
template <class Problem, class Tuning>
__device__ __forceinline__ void share_filters(unsigned* shared, ElementsIn<Problem> w, int tile_k) {
    using W = WindowRows<Problem, Tuning>;
    for (int i = threadIdx.x; i < W::filter_words; i += W::threads) {
        const int word = i % 4, lane = i / 4 % 32, n16 = i / 128 % W::n16s, step = i / 128 / W::n16s % W::steps;
        const int t = i / 128 / W::n16s / W::steps, g = lane / 4;
        const int k = tile_k * Tuning::mma_n + n16 * 16 + g / 2 * 4 + word / 2 * 2 + g % 2;
        const int eight = 2 * step + word % 2, r = eight / W::eights;
        unsigned two = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int e = eight % W::eights * 8 + lane % 4 * 2 + half, s = e / W::pixel, c = e % W::pixel;
            if (k < Problem::k && r < Problem::r && s < Problem::s && c < Problem::c) {
                const int64 row = (static_cast<int64>(k) * W::D::t + t) * Problem::r + r;
                two |= static_cast<unsigned>(w[(row * Problem::s + s) * Problem::c + c].bits) << 16 * half;
            }
        }
        shared[i] = two;
    }
}

// The outputs of a tile: its image, slice, and first row and column.
template <class Problem, class Tuning>
struct RowsTile {
    using W = WindowRows<Problem, Tuning>;
    int p, q, z;
    Offset<Problem> n;
    __device__ __forceinline__ explicit RowsTile(int64 number) {
        q = static_cast<int>(number % W::tiles_q) * W::columns, number /= W::tiles_q;
        p = static_cast<int>(number % W::tiles_p) * W::rows, number /= W::tiles_p;
        z = static_cast<int>(number % W::D::z);
        n = static_cast<Offset<Problem>>(number / W::D::z);
    }
};

// Copies the rows of x that a tile reads, of one slice; zeros outside the image.
template <class Problem, class Tuning>
__device__ __forceinline__ void share_pixels(unsigned* shared, ElementsIn<Problem> x, const RowsTile<Problem, Tuning>& tile,
                                             int slice) {
    using W = WindowRows<Problem, Tuning>;
    constexpr int words = W::pitch / 2;
    const int h0 = tile.p * Problem::stride_h - Problem::pad_top, w0 = tile.q * Problem::stride_w - Problem::pad_left;
    const Bytes<Problem> image = static_cast<Bytes<Problem>>(tile.n) * W::D::d + slice;
#pragma unroll 4
    for (int i = threadIdx.x; i < W::read_rows * words; i += W::threads) {
        const int h = h0 + i / words, e = i % words * 2;
        const bool inside = static_cast<unsigned>(h) < Problem::h;
        const Bytes<Problem> row = (image * Problem::h + h) * Problem::w;
        unsigned two = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int w = w0 + (e + half) / W::pixel, c = (e + half) % W::pixel;
            if (inside && static_cast<unsigned>(w) < Problem::w && c < Problem::c)
                two |= static_cast<unsigned>(x[(row + w) * Problem::c + c].bits) << 16 * half;
        }
        shared[i] = two;
    }
}

// The products of a tile and one slice of the filters. `pixels`: where the lane's first window begins.
template <class Problem, class Tuning>
__device__ __forceinline__ void multiply_rows(float (&sums)[Tuning::m_tiles][WindowRows<Problem, Tuning>::n16s][2][4],
                                              const unsigned* const (&pixels)[Tuning::m_tiles], const unsigned* filters,
                                              unsigned mask) {
    using W = WindowRows<Problem, Tuning>;
#pragma unroll
    for (int step = 0; step < W::steps; ++step) {
        unsigned a[W::m_tiles][4] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int eight = 2 * step + i, at = eight % W::eights;
            if (eight >= W::of_slice) continue;
            const int offset = (eight / W::eights * Problem::dilation_h * W::pitch + at * 8) / 2;
#pragma unroll
            for (int m = 0; m < W::m_tiles; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const unsigned two = pixels[m][offset + half * 4 * W::step];
                    a[m][2 * i + half] = W::last < 8 && at == W::eights - 1 ? two & mask : two;
                }
        }
#pragma unroll
        for (int n16 = 0; n16 < W::n16s; ++n16) {
            unsigned four[4];
            load_vector(four, filters + (step * W::n16s + n16) * 128);
#pragma unroll
            for (int n8 = 0; n8 < 2; ++n8)
#pragma unroll
                for (int m = 0; m < W::m_tiles; ++m)
                    mma_rows(typename Problem::element{}, sums[m][n16][n8], a[m], {four[2 * n8], four[2 * n8 + 1]});
        }
    }
}

// Stores the sums of the warp's outputs: of each 16 filters a thread has four neighbours, of two outputs eight apart.
template <class Problem, class Tuning>
__device__ __forceinline__ void store_rows(const float (&sums)[Tuning::m_tiles][WindowRows<Problem, Tuning>::n16s][2][4],
                                           const RowsTile<Problem, Tuning>& tile, int tile_k, int warp, int lane,
                                           ElementsIn<Problem> bias, ElementsOut<Problem> y) {
    using W = WindowRows<Problem, Tuning>;
    using T = typename Problem::element;
    const int first_k = tile_k * Tuning::mma_n + lane % 4 * 4;
#pragma unroll
    for (int n16 = 0; n16 < W::n16s; ++n16) {
        const int k = first_k + 16 * n16;
        float b[4] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (Problem::bias && k + j < Problem::k) b[j] = to_float(bias[k + j]);
#pragma unroll
        for (int m = 0; m < W::m_tiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int number = (warp * W::m_tiles + m) * 16 + half * 8 + lane / 4;
                const int p = tile.p + number / W::columns, q = tile.q + number % W::columns;
                if (p >= Problem::p || q >= Problem::q || k >= Problem::k) continue;
                const Bytes<Problem> row = (static_cast<Bytes<Problem>>(tile.n) * W::D::z + tile.z) * Problem::p + p;
                T* const to = y + ((row * Problem::q + q) * Problem::k + k);
                T v[4];
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    v[j] = from_float<T>(finish<Problem>(sums[m][n16][j / 2][2 * half + j % 2], b[j],
                                                         held_by<Problem>(to + j, k + j < Problem::k)));
                store_four(to, v, 1, Problem::k - k, Problem::k % 4 == 0);
            }
    }
}

template <class Problem, class Tuning>
__device__ __forceinline__ void native_gemm_rows(ElementsIn<Problem> x, ElementsIn<Problem> w, ElementsIn<Problem> bias,
                                                 ElementsOut<Problem> y, long long batch) {
    using W = WindowRows<Problem, Tuning>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile_k = static_cast<int>(blockIdx.x) % W::tiles_k;
    unsigned* const filters = reinterpret_cast<unsigned*>(shared_memory());
    unsigned* const pixels = filters + W::filter_words;
    share_filters<Problem, Tuning>(filters, w, tile_k);
    const unsigned mask = (lane % 4 * 2 < W::last ? 0xffffu : 0) | (lane % 4 * 2 + 1 < W::last ? 0xffff0000u : 0);
    const unsigned* windows[W::m_tiles];
#pragma unroll
    for (int m = 0; m < W::m_tiles; ++m) {
        const int number = (warp * W::m_tiles + m) * 16, q = number % W::columns + lane / 4;
        windows[m] = pixels + (number / W::columns * Problem::stride_h * W::pitch + q * W::step) / 2 + lane % 4;
    }
    const int64 tiles = static_cast<int64>(batch) * W::D::z * W::tiles_p * W::tiles_q;
#pragma unroll 1
    for (int64 number = blockIdx.x / W::tiles_k; number < tiles; number += gridDim.x / W::tiles_k) {
        const RowsTile<Problem, Tuning> tile(number);
        float sums[W::m_tiles][W::n16s][2][4] = {};
#pragma unroll 1
        for (int t = 0; t < W::D::t; ++t) {
            const int slice = tile.z * W::D::stride - W::D::pad + t * W::D::dilation;
            if (static_cast<unsigned>(slice) >= W::D::d) continue;
            __syncthreads();  // the rows before have been read
            share_pixels<Problem, Tuning>(pixels, x, tile, slice);
            __syncthreads();
            multiply_rows<Problem, Tuning>(sums, windows, filters + t * (W::steps * W::n16s * 128) + lane * 4, mask);
        }
        store_rows<Problem, Tuning>(sums, tile, tile_k, warp, lane, bias, y);
    }
}

}  // namespace leanconv
