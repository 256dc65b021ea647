// native_gemm_rows: layers of few channels (first layers) on tensor cores by mma.sync, float16 or bfloat16. From sm_80 on.
//
//   y[n, p, q, k] = sum over r, e of x[n, p * stride - pad + r, (q * stride - pad) * C + e] * w[k, r, e]        e = s * C + c
//
// With the channels last, a window's row of S pixels is one run of S * C neighbours. So the reduction has rows of neighbours, cut
// into eights, and the tensor core's pairs are pairs of a run: one 32-bit load of shared memory each, wherever a window begins.
// In NCHW the copy to shared memory makes these runs (window_rows.cuh); the products are the same.
//
// Requires   tensor cores of sm_80 or newer; NHWC or NCHW; one group; neighbouring columns (dilation 1); few channels.
// Numerics   products and sums of the tensor core, in float32, rounded once. What lies behind a run is no part of a sum.
// CTA tile   tile_rows x tile_columns outputs x mma_n filters, 16 * m_tiles outputs a warp; CTAs are persistent.
// Shared     filters in the order of operand B (NCHW: A), once for a CTA; the rows of x that a tile reads (of volumes those of one
//            slice of the filters), a pixel each `pixel` elements apart: runs begin at even elements; in NCHW 1 KB of outputs a warp.
// Stores     NHWC: a thread has four neighbouring filters of an output.
//            NCHW: outputs are columns of the product, so a thread has pairs of neighbouring outputs. A warp stages its 32
//            outputs of 16 filters in its own shared memory. Then each lane stores as many neighbours of a filter as are aligned
//            in every row: eight, four, two or one. A filter's outputs are 64 neighbouring bytes, or 32 in each of two rows.
//            Residuals are loaded into the same places before.
// Pipelines  none: other CTAs of the multiprocessor multiply while one copies.
// Bytes      x (1 + halo) times from L2, y once.
// Counted    (sm_90a, machine code, 7x7 at stride 2 of 3 channels) for 16 filters of a warp's 32 outputs NCHW has 8 stores to
//            shared memory, 2 loads and 2 stores of 16 bytes, NHWC 4 stores of 8. A lane copies 6 elements with one division,
//            in NHWC 2.
// Explored (H200, 8f9b15fb): a product of 16 x 8 x 16 takes 1.8 cycles of a multiprocessor, two elements of x 0.7, a result 0.07
//            (0.7 where filters come in no fours): 7x7 at stride 2 is products for two thirds of its time. NCHW: 1.6, 0.5,
//            and 0.1 to 0.3; where rows begin inside of sectors, each row of a tile and filter costs memory 93 bytes more.
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
    // NCHW: words in which a warp stages its outputs of 16 filters.
    static constexpr int staged_words = Problem::nhwc ? 0 : 16 * 16 * m_tiles / 2;
};

// Puts the filters of a tile into shared memory as lanes read them: for 16 filters and a step four words each. In NHWC they are
// operand B of two times eight filters, which are permuted within 16: a lane has four neighbours' sums. In NCHW operand A.
template <class Problem, class Tuning>
__device__ __forceinline__ void share_filters(unsigned* shared, ElementsIn<Problem> w, int tile_k) {
    using W = RowsTiling<Problem, Tuning>;
    for (int i = threadIdx.x; i < W::D::t * W::slice_words; i += W::threads) {
        const int word = i % 4, lane = i / 4 % 32, n16 = i / 128 % W::n16s, step = i / 128 / W::n16s % W::steps;
        const int t = i / 128 / W::n16s / W::steps, g = lane / 4;
        const int of_16 = Problem::nhwc ? g / 2 * 4 + word / 2 * 2 + g % 2 : word % 2 * 8 + g;
        const int k = tile_k * Tuning::mma_n + n16 * 16 + of_16;
        const int eight = 2 * step + (Problem::nhwc ? word % 2 : word / 2), r = eight / W::eights;
        unsigned two = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int e = eight % W::eights * 8 + lane % 4 * 2 + half, s = e / W::pixel, c = e % W::pixel;
            if (k < Problem::k && r < Problem::r && s < Problem::s && c < Problem::c) {
                const int64 slices = Problem::nhwc ? static_cast<int64>(k) : static_cast<int64>(k) * Problem::c + c;
                const int64 tap = ((slices * W::D::t + t) * Problem::r + r) * Problem::s + s;
                const int64 at = Problem::nhwc ? tap * Problem::c + c : tap;
                two |= static_cast<unsigned>(w[at].bits) << 16 * half;
            }
        }
        shared[i] = two;
    }
}

// The products of a tile and one slice of the filters. `pixels`: where the lane's first window begins. In NHWC pixels are operand
// A, and a lane has sums of neighbouring filters. In NCHW they are operand B, from the same words: sums of neighbouring outputs.
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
                    if constexpr (Problem::nhwc)
                        mma_native(typename Problem::element{}, sums[m][n16][n8], a[m], {four[2 * n8], four[2 * n8 + 1]});
                    else mma_native(typename Problem::element{}, sums[m][n16][n8], four, {a[m][n8], a[m][2 + n8]});
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

// Two neighbours, rounded, as they lie in memory.
__device__ __forceinline__ unsigned rounded_pair(float16, float first, float second) { return cvt_rn_f16x2_f32(first, second); }
__device__ __forceinline__ unsigned rounded_pair(bfloat16, float first, float second) { return cvt_rn_bf16x2_f32(first, second); }

// The outputs of a warp on their way to NCHW, 16 filters at a time: lanes have pairs of neighbours of two filters, and store
// neighbouring units, as many outputs as are aligned in every row. Residuals come the other way.
template <class Problem, class Tuning>
struct PlaneStores {
    using W = RowsTiling<Problem, Tuning>;
    using T = typename Problem::element;
    // A unit has `together` outputs, and the warp's outputs of a filter are `units`.
    static constexpr int together = gcd(Problem::q, 8), units = 32 / together;
    using Word = typename Select<together == 1, unsigned short, unsigned>::type;
    using Unit = typename Select<together == 8, uint4, typename Select<together == 4, uint2, Word>::type>::type;
    static constexpr int64 plane = static_cast<int64>(W::D::z) * Problem::p * Problem::q;
    static_assert(W::m_tiles == 2, "a row of the staging buffer has 32 outputs");

    // Where an output lies: eights of a filter are permuted, so that neither pairs nor units meet a bank twice. Eight filters
    // further the permutation is the same.
    static __device__ __forceinline__ int place(int filter, int output) {
        return filter * 32 + (output / 8 ^ filter / 2 % 4) * 8 + output % 8;
    }
    // `read_only`: from what this launch does not write.
    template <bool read_only = false>
    static __device__ __forceinline__ void copy_unit(T* to, const T* from) {
        const Unit* const unit = reinterpret_cast<const Unit*>(from);
        if constexpr (read_only) *reinterpret_cast<Unit*>(to) = __ldg(unit);
        else *reinterpret_cast<Unit*>(to) = *unit;
    }
    // Calls `act` with the lane's units that exist, of 16 filters from k on: where they lie in the staging buffer and in y.
    template <class Act>
    static __device__ __forceinline__ void for_units(T* staged, T* y, int k, int lane, bool exists, const Act& act) {
#pragma unroll
        for (int i = 0; i < 16; i += together) {
            const int filter = i + lane / units;
            const bool filters_end = Problem::k % Tuning::mma_n != 0 && k + filter >= Problem::k;
            if (exists && !filters_end) act(staged + place(filter, lane % units * together), y + i * plane);
        }
    }
    // The sums of the warp's outputs: of each 16 filters a thread has two, eight apart, of four pairs of outputs.
    static __device__ __forceinline__ void store(const float (&sums)[W::m_tiles][W::n16s][2][4], T* staged,
                                                 const typename W::Tile& tile, int tile_k, int warp, int lane,
                                                 BiasIn<Problem> bias, ElementsOut<Problem> y) {
        const int number = warp * 32 + lane % units * together;
        const int p = tile.p + number / W::columns, q = tile.q + number % W::columns, first_k = tile_k * Tuning::mma_n;
        const bool exists = p < Problem::p && q < Problem::q;
        const Bytes<Problem> filter = static_cast<Bytes<Problem>>(tile.n) * Problem::k + first_k + lane / units;
        T* to = y + (((filter * W::D::z + tile.z) * Problem::p + p) * Problem::q + q);
#pragma unroll
        for (int n16 = 0; n16 < W::n16s; ++n16, to += 16 * plane) {
            const int k = first_k + 16 * n16;
            Term<Problem> terms[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int own = k + 8 * i + lane / 4;
                terms[i] = term_of<Problem>(bias, own, own < Problem::k);
            }
            // in place of the lane's own units of the filters before
            if constexpr (adds<Problem>) {
                for_units(staged, to, k, lane, exists, [&](T* unit, const T* at) {
                    if constexpr (Problem::add) copy_unit<true>(unit, residual_of(bias, at));
                    else copy_unit(unit, at);
                });
            }
            __syncwarp();  // residuals are there, and the filters before have been read
#pragma unroll
            for (int m = 0; m < W::m_tiles; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const float* const two = sums[m][n16][half] + 2 * i;
                        const int at = place(lane / 4, 16 * m + 8 * half + lane % 4 * 2) + i * place(8, 0);
                        unsigned* const pair = reinterpret_cast<unsigned*>(staged + at);
                        const unsigned held = adds<Problem> ? *pair : 0;
                        const float first = to_float(T{static_cast<unsigned short>(held)});
                        const float second = to_float(T{static_cast<unsigned short>(held >> 16)});
                        *pair = rounded_pair(T{}, finish<Problem>(two[0], terms[i], first),
                                             finish<Problem>(two[1], terms[i], second));
                    }
            __syncwarp();
            for_units(staged, to, k, lane, exists, [](const T* unit, T* at) { copy_unit(at, unit); });
        }
    }
};

template <class Problem, class Tuning>
__device__ __forceinline__ void native_gemm_rows(ElementsIn<Problem> x, ElementsIn<Problem> w, BiasIn<Problem> bias,
                                                 ElementsOut<Problem> y, long long batch) {
    using W = RowsTiling<Problem, Tuning>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile_k = static_cast<int>(blockIdx.x) % W::tiles_k;
    unsigned* const filters = reinterpret_cast<unsigned*>(shared_memory());
    unsigned* const staged = filters + W::D::t * W::slice_words;
    unsigned* const pixels = staged + Tuning::warps * W::staged_words;
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
        if constexpr (Problem::nhwc) {
            store_rows<Problem, Tuning>(sums, tile, tile_k, warp, lane, bias, y);
        } else {
            auto* const own = reinterpret_cast<typename Problem::element*>(staged + warp * W::staged_words);
            PlaneStores<Problem, Tuning>::store(sums, own, tile, tile_k, warp, lane, bias, y);
        }
    }
}

}  // namespace leanconv
