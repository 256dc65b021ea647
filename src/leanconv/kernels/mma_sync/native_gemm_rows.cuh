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
// Explored (H200, 8f9b15fb): a product of 16 x 8 x 16 takes 1.8 cycles of a multiprocessor, two elements of x 0.7, a result 0.07
//            (0.7 where filters come in no fours): 7x7 at stride 2 is products for two thirds of its time.
#pragma once

#include <device/element.cuh>
#include <device/epilogue.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/sync.cuh>
#include <kernels/mma_sync/native_product.cuh>
#include <kernels/mma_sync/window_rows.cuh>

namespace leanconv {

template <class Problem, class Tuning>
struct RowsTiling : WindowRows<Problem, Tuning::tile_rows, Tuning::tile_columns> {
    static constexpr int threads = 32 * Tuning::warps, m_tiles = Tuning::m_tiles, columns = Tuning::tile_columns;
    static_assert(Tuning::tile_rows * columns == 16 * m_tiles * Tuning::warps, "warps share the outputs evenly");
    // Steps of the tensor core, two eights each, and filters of a tile.
    static constexpr int steps = ceil_div(RowsTiling::of_slice, 2), n16s = Tuning::mma_n / 16;
    static constexpr int tiles_k = ceil_div(Problem::k, Tuning::mma_n), slice_words = steps * n16s * 128;
};

// Puts the filters of a tile into shared memory as lanes read them: for 16 filters and a step four words each, operand B of two
// times eight filters. Filters are permuted within 16: a lane has four neighbours' sums.
template <class Problem, class Tuning>
__device__ __forceinline__ void share_filters(unsigned* shared, ElementsIn<Problem> w, int tile_k) {
    using W = RowsTiling<Problem, Tuning>;
    for (int i = threadIdx.x; i < W::D::t * W::slice_words; i += W::threads) {
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

// The products of a tile and one slice of the filters. `pixels`: where the lane's first window begins.
template <class Problem, class Tuning>
__device__ __forceinline__ void multiply_rows(float (&sums)[Tuning::m_tiles][RowsTiling<Problem, Tuning>::n16s][2][4],
                                              const unsigned* const (&pixels)[Tuning::m_tiles], const unsigned* filters,
                                              unsigned mask) {
    using W = RowsTiling<Problem, Tuning>;
#pragma unroll
    for (int step = 0; step < W::steps; ++step) {
        unsigned a[W::m_tiles][4] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int eight = 2 * step + i;
            if (eight >= W::of_slice) continue;
            const int offset = W::eight_at(eight) / 2;
            const bool cut = W::last < 8 && eight % W::eights == W::eights - 1;
#pragma unroll
            for (int m = 0; m < W::m_tiles; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const unsigned two = pixels[m][offset + half * 4 * W::step];
                    a[m][2 * i + half] = cut ? two & mask : two;
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
                    mma_native(typename Problem::element{}, sums[m][n16][n8], a[m], {four[2 * n8], four[2 * n8 + 1]});
        }
    }
}

// Stores the sums of the warp's outputs: of each 16 filters a thread has four neighbours, of two outputs eight apart.
template <class Problem, class Tuning>
__device__ __forceinline__ void store_rows(const float (&sums)[Tuning::m_tiles][RowsTiling<Problem, Tuning>::n16s][2][4],
                                           const typename RowsTiling<Problem, Tuning>::Tile& tile, int tile_k, int warp, int lane,
                                           BiasIn<Problem> bias, ElementsOut<Problem> y) {
    using W = RowsTiling<Problem, Tuning>;
    using T = typename Problem::element;
    const int first_k = tile_k * Tuning::mma_n + lane % 4 * 4;
#pragma unroll
    for (int n16 = 0; n16 < W::n16s; ++n16) {
        const int k = first_k + 16 * n16;
        Term<Problem> terms[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) terms[j] = term_of<Problem>(bias, k + j, k + j < Problem::k);
#pragma unroll
        for (int m = 0; m < W::m_tiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int number = (warp * W::m_tiles + m) * 16 + half * 8 + lane / 4;
                const int p = tile.p + number / W::columns, q = tile.q + number % W::columns;
                if (p >= Problem::p || q >= Problem::q || k >= Problem::k) continue;
                const Bytes<Problem> row = (static_cast<Bytes<Problem>>(tile.n) * W::D::z + tile.z) * Problem::p + p;
                T* const to = y + ((row * Problem::q + q) * Problem::k + k);
                store_neighbours<Problem>(to, sums[m][n16], half, terms, bias, Problem::k - k);
            }
    }
}

template <class Problem, class Tuning>
__device__ __forceinline__ void native_gemm_rows(ElementsIn<Problem> x, ElementsIn<Problem> w, BiasIn<Problem> bias,
                                                 ElementsOut<Problem> y, long long batch) {
    using W = RowsTiling<Problem, Tuning>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile_k = static_cast<int>(blockIdx.x) % W::tiles_k;
    unsigned* const filters = reinterpret_cast<unsigned*>(shared_memory());
    unsigned* const pixels = filters + W::D::t * W::slice_words;
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
        const typename W::Tile tile(number);
        float sums[W::m_tiles][W::n16s][2][4] = {};
#pragma unroll 1
        for (int t = 0; t < W::D::t; ++t) {
            const int slice = tile.slice(t);
            if (static_cast<unsigned>(slice) >= W::D::d) continue;
            __syncthreads();  // the rows before have been read
            W::template copy<W::threads>(pixels, x, tile, slice);
            __syncthreads();
            multiply_rows<Problem, Tuning>(sums, windows, filters + t * W::slice_words + lane * 4, mask);
        }
        store_rows<Problem, Tuning>(sums, tile, tile_k, warp, lane, bias, y);
    }
}

}  // namespace leanconv
