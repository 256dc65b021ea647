// native_weight_rows: gradient of the filters of layers of few channels (first layers) on tensor cores by mma.sync, float16 or
// bfloat16, channels last. From sm_80 on.
//
//   dw[k, r, e] = sum over n, p, q of dy[n, p, q, k] * x[n, p * stride - pad + r, (q * stride - pad) * C + e]     e = s * C + c
//
// Rows of windows are runs of memory (window_rows.cuh). Output pixels are the reduction: filters come from dy, as it lies, by
// ldmatrix.trans; of x a lane loads the same pair of a run for two neighbouring outputs, and exchanges halves: two words make
// operand B's of two columns.
//
// Requires   tensor cores of sm_80 or newer; NHWC; one group; neighbouring columns (dilation 1); few channels.
// Numerics   products and sums of the tensor core, in float32, of up to 2^17 pixels of a warp, 2^16 but on Hopper; it rounds
//            toward zero: under 2^-10 of a sum of one sign is lost. Then sums of warps, of a cluster, of split-K, in fixed order.
// CTA tile   16 * m16s filters x warps_n * n16s * 16 columns of one slice; warps_p of the warps share output pixels.
//            `split` CTAs of a cluster, and `split_k` of them, share the tiles of tile_rows x tile_columns outputs.
// Shared     the rows of dy and of x of one tile; at the end the sums.
// Pipelines  none: other CTAs of the multiprocessor multiply while one copies.
// Explored (H200, 8f9b15fb): a product takes 1.6 cycles of a multiprocessor, two elements of x 0.75. A CTA alone takes 2.6 times
//            as long for a tile as three take for one each: clusters alone leave most of a GPU idle.
#pragma once

#include <device/element.cuh>
#include <device/epilogue.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/sync.cuh>
#include <kernels/common/split_k.cuh>
#include <kernels/mma_sync/native_product.cuh>
#include <kernels/mma_sync/window_rows.cuh>

namespace leanconv {

template <class Problem, class Tuning>
struct WeightRows : WindowRows<Problem, Tuning::tile_rows, Tuning::tile_columns> {
    static constexpr int threads = 32 * Tuning::warps_n * Tuning::warps_p, outputs = Tuning::tile_rows * Tuning::tile_columns;
    static constexpr int filters = 16 * Tuning::m16s, tiles_k = ceil_div(Problem::k, filters);
    // Columns: the eights of a slice, two for each 16 of a warp.
    static constexpr int columns = 16 * Tuning::n16s * Tuning::warps_n,
                         tiles_n = ceil_div(WeightRows::of_slice * 8, columns);
    static constexpr int tiles = tiles_k * tiles_n * WeightRows::D::t;
    // dy: an output's filters are a line of 128 bytes, whose units of 16 bytes are permuted by the output.
    static constexpr int dy_bytes = outputs * 128, steps = outputs / 16;
    static_assert(Tuning::m16s <= 4 && steps % Tuning::warps_p == 0, "a line has 64 filters, and warps share the outputs evenly");
};

// Copies the filters of the outputs of a tile; zeros where there are none.
template <class Problem, class Tuning>
__device__ __forceinline__ void copy_gradient(unsigned char* shared, ElementsIn<Problem> dy,
                                              const typename WeightRows<Problem, Tuning>::Tile& tile, int first_k) {
    using W = WeightRows<Problem, Tuning>;
    constexpr int units = 2 * Tuning::m16s;
    const Bytes<Problem> image = static_cast<Bytes<Problem>>(tile.n) * W::D::z + tile.z;
    for (int i = threadIdx.x; i < W::outputs * units; i += W::threads) {
        const int number = i / units, unit = i % units, k = first_k + unit * 8;
        const int p = tile.p + number / Tuning::tile_columns, q = tile.q + number % Tuning::tile_columns;
        const bool exists = p < Problem::p && q < Problem::q;
        const Bytes<Problem> at = ((image * Problem::p + p) * Problem::q + q) * Problem::k + k;
        unsigned char* const to = shared + number * 128 + (unit ^ number % 8) * 16;
        if constexpr (Problem::k % 8 == 0) {
            const bool there = exists && k < Problem::k;
            cp_async_16(to, dy + (there ? at : 0), there);
        } else {
            unsigned words[4] = {};
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (exists && k + j < Problem::k) words[j / 2] |= static_cast<unsigned>(dy[at + j].bits) << j % 2 * 16;
            *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
    cp_async_commit_group();
}

// Adds the products of a tile to the sums of a warp.
template <class Problem, class Tuning>
__device__ __forceinline__ void add_outputs(float (&sums)[Tuning::m16s][Tuning::n16s][2][4], const unsigned char* gradient,
                                            const unsigned* pixels, const int (&column)[Tuning::n16s], int first_step, int lane) {
    using W = WeightRows<Problem, Tuning>;
#pragma unroll 2
    for (int step = first_step; step < W::steps; step += Tuning::warps_p) {
        const int first = step * 16, row = first / Tuning::tile_columns, q = first % Tuning::tile_columns;
        unsigned a[Tuning::m16s][4];
#pragma unroll
        for (int m = 0; m < Tuning::m16s; ++m) {
            const int number = first + lane / 16 * 8 + lane % 8, unit = 2 * m + lane / 8 % 2;
            ldmatrix_trans(a[m], gradient + number * 128 + (unit ^ number % 8) * 16);
        }
        const unsigned* const window = pixels + (row * Problem::stride_h * W::pitch + (q + lane % 4 * 2) * W::step) / 2;
#pragma unroll
        for (int n16 = 0; n16 < Tuning::n16s; ++n16) {
            unsigned b[2][2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const unsigned one = window[column[n16] + i * 4 * W::step], next = window[column[n16] + (8 * i + 1) * W::step / 2];
                b[0][i] = (one & 0xffff) | next << 16;
                b[1][i] = one >> 16 | (next & 0xffff0000u);
            }
#pragma unroll
            for (int n8 = 0; n8 < 2; ++n8)
#pragma unroll
                for (int m = 0; m < Tuning::m16s; ++m)
                    mma_native(typename Problem::element{}, sums[m][n16][n8], a[m], b[n8]);
        }
    }
}

// `dw` is the gradient, or with `split_k` above 1 room for as many partial sums.
template <class Problem, class Tuning, class Result>
__device__ __forceinline__ void native_weight_rows(ElementsIn<Problem> x, ElementsIn<Problem> dy, Result* __restrict__ dw,
                                                   long long batch) {
    using W = WeightRows<Problem, Tuning>;
    constexpr int split = Tuning::split, shares = split * Tuning::split_k;
    const int rank = static_cast<int>(blockIdx.x) % split, number = static_cast<int>(blockIdx.x) / split;
    const int tile = number % W::tiles, slice = number / W::tiles;
    const int first_column = tile % W::tiles_n * W::columns, first_k = tile / W::tiles_n % W::tiles_k * W::filters;
    const int t = tile / (W::tiles_n * W::tiles_k), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_n = warp % Tuning::warps_n, warp_p = warp / Tuning::warps_n;
    unsigned char* const gradient = shared_memory();
    unsigned* const pixels = reinterpret_cast<unsigned*>(gradient + W::dy_bytes);

    // Where the lane's pair of each 16 columns lies, in words; of columns past the last, those of the first.
    int column[Tuning::n16s];
#pragma unroll
    for (int n16 = 0; n16 < Tuning::n16s; ++n16) {
        const int at = first_column + (warp_n * Tuning::n16s + n16) * 16 + lane / 4 * 2;
        column[n16] = at / 8 < W::of_slice ? (W::eight_at(at / 8) + at % 8) / 2 : 0;
    }
    float sums[Tuning::m16s][Tuning::n16s][2][4] = {};
    const int64 tiles = static_cast<int64>(batch) * W::D::z * W::tiles_p * W::tiles_q;
#pragma unroll 1
    for (int64 i = slice * split + rank; i < tiles; i += shares) {
        const typename W::Tile outputs(i);
        const int of_x = outputs.slice(t);
        if (static_cast<unsigned>(of_x) >= W::D::d) continue;
        __syncthreads();  // the tile before has been read
        copy_gradient<Problem, Tuning>(gradient, dy, outputs, first_k);
        W::template copy<W::threads>(pixels, x, outputs, of_x);
        cp_async_wait_group<0>();
        __syncthreads();
        add_outputs<Problem, Tuning>(sums, gradient, pixels, column, warp_p, lane);
    }

    // The sums of all warps, then of their outputs' shares and of the cluster.
    float* const shared = reinterpret_cast<float*>(gradient);
    __syncthreads();  // the last tile has been read
#pragma unroll
    for (int m = 0; m < Tuning::m16s; ++m)
#pragma unroll
        for (int n16 = 0; n16 < Tuning::n16s; ++n16)
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int row = warp_p * W::filters + m * 16 + i / 2 % 2 * 8 + lane / 4;
                const int at = (warp_n * Tuning::n16s + n16) * 16 + lane % 4 * 4 + i % 2 * 2 + i / 4;
                shared[row * W::columns + at] = sums[m][n16][i / 4][i % 4];
            }
    if constexpr (split > 1) cluster_barrier();
    else __syncthreads();
    if constexpr (Tuning::split_k > 1) dw += slice * (static_cast<int64>(Problem::k) * Problem::c * filter_taps<Problem>);
    for (int i = rank * W::threads + threadIdx.x; i < W::filters * W::columns; i += split * W::threads) {
        const int k = first_k + i / W::columns, at = first_column + i % W::columns, r = at / 8 / W::eights;
        const int e = at / 8 % W::eights * 8 + at % 8, s = e / W::pixel, c = e % W::pixel;
        if (k >= Problem::k || r >= Problem::r || s >= Problem::s || c >= Problem::c) continue;
        float sum = 0;
#pragma unroll
        for (int other = 0; other < split; ++other)
#pragma unroll
            for (int p = 0; p < Tuning::warps_p; ++p) {
                const float* const from = shared + p * (W::filters * W::columns) + i;
                sum += split > 1 ? cluster_load(from, other) : *from;
            }
        const int64 row = (static_cast<int64>(k) * W::D::t + t) * Problem::r + r;
        Result* const to = dw + ((row * Problem::s + s) * Problem::c + c);
        if constexpr (Tuning::split_k > 1) *to = sum;
        else *to = from_float<Result>(finish<Problem>(sum, 0.0f, held_by<Problem>(to, true)));
    }
    if constexpr (split > 1) cluster_barrier();  // what others read stays until they have
}

}  // namespace leanconv
