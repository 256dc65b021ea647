// native_gemm_skinny: 1x1 layers of few channels and few filters on tensor cores by mma.sync, float16 or bfloat16 in NHWC. From sm_90
// on.
//
//   y[m, k] = sum over c of x[m, c] * w[k, c]        m: pixel
//
// Pixels and outputs of such a layer are tall and skinny matrices, whose neighbouring rows are neighbours in memory. So a tile's
// pixels are one run of bytes, and so are its outputs: a bulk copy each, whatever the length of a row. Copies of boxes of a tensor
// bring each row by itself instead, which takes longer where rows are no whole 64 bytes.
//
// Requires   sm_90 or newer; NHWC; one group, one tap, unit stride, no padding; even numbers of channels and filters, 16 to 256;
//            images of whole 16 bytes.
// Gradient   of an input: w is read as it lies too.
// Numerics   products and sums of the tensor core, in float32, rounded once.
// CTA tile   16 * m_tiles * warps pixels x all filters. Persistent; several CTAs of a multiprocessor.
// Roles      all warps multiply 16 * m_tiles pixels each; one thread issues all copies.
// Shared     `stages` of a tile's pixels, as they lie in memory; the tile's outputs, as they will lie there (before, filters as they
//            lie in memory; residuals, where outputs will be); filters in the order of operand B: four words of a lane for 16 filters
//            and 16 channels.
// Pipelines  stages   full: bytes of the copy -> all warps; a barrier of the CTA -> the thread that copies
//            outputs  a barrier of the CTA -> that thread; its wait for the bulk group, and a barrier of the CTA -> all warps
// Banks      eight rows of a fragment begin C / 2 words apart: reads and writes meet each bank once where that is four times an odd
//            number, as for 24, 40, 72, 120 channels; of 16, 48, 144 twice, of 64 eight times.
// Bytes      x once, y once: 2 (C + K) a pixel for 2 C K flops.
// Explored (H200, e507758b with this kernel, float16): 64 images of 56 x 56, 24 channels, 72 filters 12.2 us, native_gemm_16bit 23.4,
//            the bytes alone 9.2; 24 and 58 10.9, native_gemm_sync 35.3. Of 64 and 64, whose banks meet, 24.7, native_gemm_16bit 15.9.
#pragma once

#include <device/element.cuh>
#include <device/epilogue.cuh>
#include <device/index.cuh>
#include <device/pipeline/rings.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/sync.cuh>
#include <device/ptx/tma.cuh>
#include <kernels/mma_sync/native_product.cuh>

namespace leanconv {

template <class Problem, class Tuning>
struct SkinnyTiling {
    static constexpr int c = Problem::c, k = Problem::k, threads = 32 * Tuning::warps, m_tiles = Tuning::m_tiles;
    static constexpr int pixels = 16 * m_tiles * Tuning::warps, steps = ceil_div(c, 16), n16s = ceil_div(k, 16);
    static constexpr int at_once = n16s < 4 ? n16s : 4;  // 16 filters each, whose sums a thread holds
    static constexpr int pixel_bytes = pixels * c * 2, output_bytes = pixels * k * 2;
    static constexpr int copied_filters = c * k / 8 * 8, filter_bytes = copied_filters * 2;  // whole units of 16 bytes
    static constexpr int outputs_at = Tuning::stages * pixel_bytes;
    static constexpr int fragments_at = outputs_at + (output_bytes > filter_bytes ? output_bytes : filter_bytes);
    static constexpr int barriers_at = fragments_at + steps * n16s * 512;
    static_assert(c % 2 == 0 && k % 2 == 0, "pairs of neighbours are words");
    static_assert(output_pixels<Problem> * c % 8 == 0 && output_pixels<Problem> * k % 8 == 0, "images are whole units of 16 bytes");
    static_assert(barriers_at == Tuning::barriers_at, "the host counts as many bytes");
    unsigned char* shared;

    __device__ __forceinline__ unsigned char* pixels_of(int stage) const { return shared + stage * pixel_bytes; }
    __device__ __forceinline__ unsigned char* outputs() const { return shared + outputs_at; }
    __device__ __forceinline__ unsigned* fragments() const { return reinterpret_cast<unsigned*>(shared + fragments_at); }
    __device__ __forceinline__ Mbarrier* full(int stage) const { return reinterpret_cast<Mbarrier*>(shared + barriers_at) + stage; }
    // Of what a CTA copies to where the outputs will lie.
    __device__ __forceinline__ Mbarrier* arrived() const { return full(Tuning::stages); }
};

// Filters from where they lie as in memory, [k][c], of a gradient [c][k], to the order in which lanes read operand B. Channels and
// filters that do not exist are zeros. Behind the last 16 bytes that are whole they are read from memory.
template <class Problem, class Tuning>
__device__ __forceinline__ void share_skinny_filters(const SkinnyTiling<Problem, Tuning>& tile, ElementsIn<Problem> w) {
    using W = SkinnyTiling<Problem, Tuning>;
    const auto* const filters = reinterpret_cast<const typename Problem::element*>(tile.outputs());
    const auto bits = [&](int at) -> unsigned { return (at < W::copied_filters ? filters[at] : w[at]).bits; };
    for (int i = threadIdx.x; i < W::steps * W::n16s * 128; i += W::threads) {
        const int word = i % 4, lane = i / 4 % 32, n16 = i / 128 % W::n16s, step = i / 128 / W::n16s;
        const int k = n16 * 16 + word / 2 * 8 + lane / 4, c = step * 16 + word % 2 * 8 + lane % 4 * 2;
        unsigned two = 0;
        if (k < W::k && c < W::c) {
            const int at = Tuning::mirrored ? c * W::k + k : k * W::c + c;
            two = bits(at) | bits(at + (Tuning::mirrored ? W::k : 1)) << 16;
        }
        tile.fragments()[i] = two;
    }
}

// The products of a warp's pixels with 16 * `at_once` filters from 16 * `first` on. `pixels`: of the lane's first pixel.
template <class Problem, class Tuning>
__device__ __forceinline__ void multiply_skinny(
    float (&sums)[Tuning::m_tiles][SkinnyTiling<Problem, Tuning>::at_once][2][4], const unsigned char* pixels,
    const unsigned* filters, int first, int lane) {
    using W = SkinnyTiling<Problem, Tuning>;
#pragma unroll
    for (int step = 0; step < W::steps; ++step) {
        unsigned a[W::m_tiles][4] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int c = step * 16 + i * 8;
            if (c >= W::c) continue;
            // What lies behind a pixel's channels is the next pixel's.
            if (c + 8 > W::c && c + lane % 4 * 2 >= W::c) continue;
#pragma unroll
            for (int m = 0; m < W::m_tiles; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    a[m][2 * i + half] = ld_shared_u32(pixels + ((m * 16 + half * 8) * W::c + c) * 2);
        }
#pragma unroll
        for (int n = 0; n < W::at_once; ++n) {
            if (first + n >= W::n16s) continue;
            unsigned b[4];
            load_vector(b, filters + (step * W::n16s + first + n) * 128);
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int m = 0; m < W::m_tiles; ++m)
                    mma_native(typename Problem::element{}, sums[m][n][half], a[m], {b[2 * half], b[2 * half + 1]});
        }
    }
}

// Those sums to where the tile's outputs lie in shared memory; where something is added, it lies there. `outputs`: of the lane's
// first pixel and filter.
template <class Problem, class Tuning>
__device__ __forceinline__ void stage_skinny(
    const float (&sums)[Tuning::m_tiles][SkinnyTiling<Problem, Tuning>::at_once][2][4], unsigned char* outputs, Bias<Problem> bias,
    int first, int lane) {
    using W = SkinnyTiling<Problem, Tuning>;
    using T = typename Problem::result;
#pragma unroll
    for (int n8 = 0; n8 < 2 * W::at_once; ++n8) {
        const int eight = first * 16 + n8 * 8, k = eight + lane % 4 * 2;
        if (eight >= W::k || k >= W::k) continue;
        Term<Problem> terms[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) terms[i] = term_of<Problem>(bias, k + i);
#pragma unroll
        for (int m = 0; m < W::m_tiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                auto* const to = reinterpret_cast<unsigned*>(outputs + ((m * 16 + half * 8) * W::k + eight) * 2);
                const unsigned held = adds<Problem> ? ld_shared_u32(to) : 0;
                unsigned pair = 0;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float added = to_float(T{static_cast<unsigned short>(held >> 16 * i)});
                    const float v = finish<Problem>(sums[m][n8 / 2][n8 % 2][2 * half + i], terms[i], added);
                    pair |= static_cast<unsigned>(from_float<T>(v).bits) << 16 * i;
                }
                *to = pair;
            }
    }
}

template <class Problem, class Tuning>
__device__ __forceinline__ void native_gemm_skinny(ElementsIn<Problem> x, ElementsIn<Problem> w, BiasIn<Problem> bias,
                                                   ElementsOut<Problem> y, long long batch) {
    using W = SkinnyTiling<Problem, Tuning>;
    const W tile{shared_memory()};
    const int64 all = static_cast<int64>(batch) * output_pixels<Problem>;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * (16 * W::m_tiles) + lane / 4;
    const bool copies = threadIdx.x == 0;
    const auto count = [&](int64 first) { return static_cast<int>(all - first < W::pixels ? all - first : W::pixels); };
    const auto copy = [&](int64 first, int stage) {
        const int bytes = count(first) * (W::c * 2);
        mbarrier_arrive_expect_tx(tile.full(stage), bytes);
        cp_async_bulk_shared_global(tile.pixels_of(stage), x + first * W::c, bytes, tile.full(stage));
    };
    const int64 begin = static_cast<int64>(blockIdx.x) * W::pixels, apart = static_cast<int64>(gridDim.x) * W::pixels;
    if (copies) {
        for (int i = 0; i <= Tuning::stages; ++i) mbarrier_init(tile.full(i), 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(tile.arrived(), W::filter_bytes);
        cp_async_bulk_shared_global(tile.outputs(), w, W::filter_bytes, tile.arrived());
        for (int i = 0; i < Tuning::stages; ++i)
            if (begin + i * apart < all) copy(begin + i * apart, i);
    }
    __syncthreads();
    mbarrier_wait_parity(tile.arrived(), 0);
    share_skinny_filters<Problem, Tuning>(tile, w);
    fence_proxy_async();
    __syncthreads();  // filters have left the outputs' place

    RingPlace<Tuning::stages> place;
    unsigned held = 1;
    for (int64 first = begin; first < all; first += apart, held ^= 1) {
        if (copies) {
            cp_async_bulk_wait_group_read<0>();
            if constexpr (adds<Problem>) {
                const auto* from = y + first * W::k;
                if constexpr (Problem::add) from = residual_of(bias, from);
                mbarrier_arrive_expect_tx(tile.arrived(), count(first) * (W::k * 2));
                cp_async_bulk_shared_global(tile.outputs(), from, count(first) * (W::k * 2), tile.arrived());
            }
        }
        __syncthreads();  // the outputs before have left their place
        if constexpr (adds<Problem>) mbarrier_wait_parity(tile.arrived(), held);
        mbarrier_wait_parity(tile.full(place.stage), place.parity);
#pragma unroll
        for (int n = 0; n < W::n16s; n += W::at_once) {
            float sums[W::m_tiles][W::at_once][2][4] = {};
            multiply_skinny<Problem, Tuning>(sums, tile.pixels_of(place.stage) + (row * W::c + lane % 4 * 2) * 2,
                                             tile.fragments() + 4 * lane, n, lane);
            stage_skinny<Problem, Tuning>(sums, tile.outputs() + (row * W::k + lane % 4 * 2) * 2, bias, n, lane);
        }
        fence_proxy_async();
        __syncthreads();
        if (copies) {
            cp_async_bulk_global_shared(y + first * W::k, tile.outputs(), count(first) * (W::k * 2));
            cp_async_bulk_commit_group();
            if (first + Tuning::stages * apart < all) copy(first + Tuning::stages * apart, place.stage);
        }
        place.advance();
    }
    if (copies) cp_async_bulk_wait_group_read<0>();
}

}  // namespace leanconv
