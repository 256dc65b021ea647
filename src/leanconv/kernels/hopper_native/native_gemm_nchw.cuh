// Implicit GEMM on tensor cores for float16 and bfloat16 in NCHW, sums in float32, for sm_90a.
//
// y[pixel, k] = sum over taps and channels of x[pixel + tap, c] w[k, tap, c], 2 C/g R S flops an output, where the tensor cores
// start 4096 flops a cycle and multiprocessor: 989 TFLOP/s at 1.83 GHz, of which power leaves two thirds. Channels of a pixel
// lie far apart in NCHW, and a product wants them side by side. So `producers` warpgroups load the pixels that a tile's
// windows see, `chunk` channels of them, turn them around in registers, and store eight channels of a pixel as 16 bytes.
// Pixels have such numbers (pixel_windows.cuh) that each tap sees the whole tile's pixels side by side, some lines further
// on: so each pixel is loaded once for all taps, and the operand of a tap is a descriptor that begins at another line.
//   loaded:     (pixels + reach) · chunk · 2 bytes for R S · pixels · filters · chunk · 2 flops: for 128 pixels of 56 x 56,
//               256 filters of 3 x 3: 3.4 bytes a cycle at full speed; 1 x 1: 16
//   copied:     filters · chunk · 2 bytes a tap, prepared (window_filters.cuh): 32 bytes a cycle for 128 pixels
//   multiplied: a product of 64 pixels x n filters x 16 takes n / 2 cycles and reads (64 + n) · 32 bytes
// Where a layer has one tap and whole images lie aligned, tensor copies bring windows as they lie: a channel of 64 pixels is a
// row, which a transposed descriptor reads.
// Without swizzle eight lines of 16 bytes are eight neighbouring pixels, so products and stores meet each bank once.
// Sums stay in the tensor core over the whole reduction, as in native_gemm_16bit.
// A block computes tile after tile; the windows of the next one are loaded while this one's are multiplied.
//
// On an H200, 3 x 3, prepared filters, burst: 256 channels and filters 589 TFLOP/s, 128 400, 64 277; 1 x 1 at 2 TB/s,
// copied 2.8.
#pragma once

#include <device/element.cuh>
#include <kernels/hopper_native/narrow_product.cuh>
#include <kernels/hopper_native/pixel_windows.cuh>
#include <device/ptx/bulk_copy.cuh>
#include <device/ptx/registers.cuh>
#include <device/ptx/shared.cuh>
#include <device/ptx/wgmma.cuh>
#include <device/pipeline/rings.cuh>
#include <kernels/hopper_native/window_filters.cuh>
#include <kernels/hopper_native/window_loads.cuh>
#include <kernels/hopper_native/window_outputs.cuh>

namespace leanconv {

// Which tiles there are: filters first, then groups, then pixels. Those of the same pixels are side by side.
template <class Problem, class Tuning>
struct WindowTiles {
    using Windows = PixelWindows<Problem, Tuning>;
    static constexpr int of_group = ceil_div(Problem::group_k, Tuning::filters), side_by_side = of_group * Problem::groups;
    long long batch;
    __device__ __forceinline__ int count() const {
        return (static_cast<int>(batch) * Windows::image + Windows::pixels - 1) / Windows::pixels * side_by_side;
    }
    static __device__ __forceinline__ int filters(int tile) { return tile % of_group; }
    static __device__ __forceinline__ int group(int tile) { return tile / of_group % Problem::groups; }
    static __device__ __forceinline__ int first_pixel(int tile) { return tile / side_by_side * Windows::pixels; }
};

// Shared memory: a ring of windows, each `chunk` channels of all lines; a ring of filters, each `chunk` channels of one tap; the
// lines that taps begin with; what warpgroups turn their outputs around in; the barriers.
template <class Problem, class Tuning>
struct WindowRings {
    using Windows = PixelWindows<Problem, Tuning>;
    static constexpr int taps = Problem::r * Problem::s, eights = Tuning::chunk / 8;
    static constexpr int window_bytes = eights * Windows::pitch * 16, filter_bytes = eights * Tuning::filters * 16;
    static constexpr int chunks = WindowFilters<Problem, Tuning>::chunks;
    static constexpr int filters_at = Tuning::windows * window_bytes, lines_at = filters_at + Tuning::stages * filter_bytes;
    static constexpr int outputs_at = lines_at + ceil_div(4 * taps, 16) * 16;
    static constexpr int outputs_bytes = WindowOutputs<Problem, Tuning>::bytes;  // of a warpgroup
    static constexpr int barriers_at = outputs_at + Tuning::warpgroups * outputs_bytes;
    static constexpr int loading_warps = 4 * Tuning::producers - 1, consumer_warps = 4 * Tuning::warpgroups;
    static_assert(barriers_at + 16 * (Tuning::windows + Tuning::stages) == Tuning::bytes, "the host counts as many bytes");
    unsigned char* base;

    __device__ __forceinline__ WindowRings() : base(Tuning::copied ? shared_memory_for_swizzles() : shared_memory()) {}
    __device__ __forceinline__ unsigned char* window(int stage) const { return base + stage * window_bytes; }
    __device__ __forceinline__ unsigned char* filters(int stage) const { return base + filters_at + stage * filter_bytes; }
    __device__ __forceinline__ int* lines() const { return reinterpret_cast<int*>(base + lines_at); }
    __device__ __forceinline__ unsigned char* outputs(int warpgroup) const {
        return base + outputs_at + warpgroup * outputs_bytes;
    }
    __device__ __forceinline__ Mbarrier* window_full(int stage) const {
        return reinterpret_cast<Mbarrier*>(base + barriers_at) + stage;
    }
    __device__ __forceinline__ Mbarrier* window_free(int stage) const { return window_full(Tuning::windows) + stage; }
    __device__ __forceinline__ Mbarrier* filters_full(int stage) const { return window_free(Tuning::windows) + stage; }
    __device__ __forceinline__ Mbarrier* filters_free(int stage) const { return filters_full(Tuning::stages) + stage; }
    // By all threads, before a barrier of the block.
    __device__ __forceinline__ void init() const {
        for (int tap = threadIdx.x; tap < taps; tap += blockDim.x)
            lines()[tap] = Windows::line(tap / Problem::s, tap % Problem::s);
        if (threadIdx.x > 0) return;
        for (int i = 0; i < Tuning::windows; ++i) {
            mbarrier_init(window_full(i), Tuning::copied ? 1 : loading_warps);
            mbarrier_init(window_free(i), consumer_warps);
        }
        for (int i = 0; i < Tuning::stages; ++i) {
            mbarrier_init(filters_full(i), 1);
            mbarrier_init(filters_free(i), consumer_warps);
        }
        fence_mbarrier_init();
    }
};

// What warps load of x.
template <class Problem, class Tuning>
struct WindowSource : PixelWindows<Problem, Tuning>, InputTensor<Problem> {
    static constexpr int eights = Tuning::chunk / 8, registers = Tuning::producer_registers;
    static constexpr bool whole = Problem::group_c % 16 == 0;  // all channels of all windows exist
};

// The share of a warp in all windows of the block's tiles.
template <class Problem, class Tuning>
struct WindowWalk : UnitWalk<WindowSource<Problem, Tuning>, WindowRings<Problem, Tuning>::loading_warps, Tuning::windows> {
    using Rings = WindowRings<Problem, Tuning>;
    using Walk = UnitWalk<WindowSource<Problem, Tuning>, Rings::loading_warps, Tuning::windows>;
    const WindowTiles<Problem, Tuning>& tiles;
    int tile, chunk = 0;

    __device__ __forceinline__ WindowWalk(const WindowTiles<Problem, Tuning>& tiles, int warp)
        : Walk(warp), tiles(tiles), tile(blockIdx.x) {}
    __device__ __forceinline__ bool valid() const { return tile < tiles.count(); }
    __device__ __forceinline__ void advance() {
        if (Walk::advance() && ++chunk == Rings::chunks) chunk = 0, tile += gridDim.x;
    }
};

// The warps that load pixels: all of the producers' but the last.
template <class Problem, class Tuning>
__device__ __forceinline__ void load_windows(const typename Problem::element* x, long long batch,
                                             const WindowTiles<Problem, Tuning>& tiles,
                                             const WindowRings<Problem, Tuning>& rings, int thread) {
    using Source = WindowSource<Problem, Tuning>;
    const int lane = thread % 32;
    WindowWalk<Problem, Tuning> walk(tiles, thread / 32);
    const auto load = [&](WindowUnit<Source>& unit) {
        unit.load(x, batch, tiles.first_pixel(walk.tile), tiles.group(walk.tile), walk.chunk * Tuning::chunk,
                  walk.unit * 32 + lane);
    };
    load_units<Source>(walk, rings, lane, load, [&](int stage) { return rings.window(stage); });
}

// One thread's tensor copies of windows of one tap, 64 pixels of `chunk` channels each: rows of 128 bytes of a channel, swizzled.
template <class Problem, class Tuning>
__device__ __forceinline__ void load_windows(const TensorMap& x, long long, const WindowTiles<Problem, Tuning>& tiles,
                                             const WindowRings<Problem, Tuning>& rings, int thread) {
    using Windows = PixelWindows<Problem, Tuning>;
    using Rings = WindowRings<Problem, Tuning>;
    static_assert(Problem::groups == 1 || Problem::group_c % Tuning::chunk == 0, "a window has channels of one group");
    if (thread > 0) return;
    RingPlace<Tuning::windows> place;
    for (int tile = blockIdx.x; tile < tiles.count(); tile += gridDim.x)
        for (int chunk = 0; chunk < Rings::chunks; ++chunk) {
            Mbarrier* const full = rings.window_full(place.stage);
            mbarrier_wait_parity(rings.window_free(place.stage), place.parity ^ 1);
            mbarrier_arrive_expect_tx(full, Rings::window_bytes);
#pragma unroll
            for (int i = 0; i < Windows::pixels / 64; ++i) {
                const int number = tiles.first_pixel(tile) + i * 64, n = number / Windows::image;
                cp_async_bulk_tensor_shared_global(rings.window(place.stage) + i * Tuning::chunk * 128, x, full,
                                                   number - n * Windows::image,
                                                   tiles.group(tile) * Problem::group_c + chunk * Tuning::chunk, n);
            }
            place.advance();
        }
}

// One thread's copies of filters.
template <class Problem, class Tuning>
__device__ __forceinline__ void copy_filters(const typename Problem::element* prepared,
                                             const WindowTiles<Problem, Tuning>& tiles,
                                             const WindowRings<Problem, Tuning>& rings) {
    using F = WindowFilters<Problem, Tuning>;
    using Rings = WindowRings<Problem, Tuning>;
    const uint4* const all = reinterpret_cast<const uint4*>(prepared + Problem::first_prepared);
    RingPlace<Tuning::stages> place;
    for (int tile = blockIdx.x; tile < tiles.count(); tile += gridDim.x)
        for (int chunk = 0; chunk < F::chunks; ++chunk)
            for (int tap = 0; tap < F::taps; ++tap) {
                mbarrier_wait_parity(rings.filters_free(place.stage), place.parity ^ 1);
                mbarrier_arrive_expect_tx(rings.filters_full(place.stage), Rings::filter_bytes);
                cp_async_bulk_shared_global(rings.filters(place.stage),
                                            all + F::stage(tiles.group(tile), tiles.filters(tile), chunk, tap),
                                            Rings::filter_bytes, rings.filters_full(place.stage));
                place.advance();
            }
}

// Operand A: 64 pixels of a window from line `line` on, and where its next sixteen channels and its next 64 pixels lie.
template <class Problem, class Tuning, bool copied>
struct WindowOperand {
    using Windows = PixelWindows<Problem, Tuning>;
    static constexpr int sixteen = 2 * Windows::pitch * 16, block = 64 * 16;
    static __device__ __forceinline__ MatrixDescriptor at(const unsigned char* window, int line) {
        return matrix_descriptor(window + line * 16, Windows::pitch * 16, 128, 0);
    }
};
template <class Problem, class Tuning>
struct WindowOperand<Problem, Tuning, true> {
    static constexpr int sixteen = 16 * 128, block = Tuning::chunk * 128;
    static __device__ __forceinline__ TransposedDescriptor at(const unsigned char* window, int line) {
        return transposed_descriptor(window + line / 64 * block, block, 1024, 128);
    }
};

// One warpgroup's products of all tiles of the block.
template <class Problem, class Tuning>
__device__ __forceinline__ void multiply_windows(const typename Problem::result* bias, typename Problem::result* y,
                                                 long long batch, const WindowTiles<Problem, Tuning>& tiles,
                                                 const WindowRings<Problem, Tuning>& rings, int warpgroup) {
    using Rings = WindowRings<Problem, Tuning>;
    using Operand = WindowOperand<Problem, Tuning, Tuning::copied>;
    const int lane = threadIdx.x % 32, first_row = warpgroup * Tuning::blocks * 64;
    const int* const lines = rings.lines();
    RingPlace<Tuning::windows> window, window_before;
    RingPlace<Tuning::stages> place;
    for (int tile = blockIdx.x; tile < tiles.count(); tile += gridDim.x) {
        float sums[Tuning::blocks][Tuning::filters / 2];
        int before = 0;
        wgmma_fence(sums);
        for (int chunk = 0; chunk < Rings::chunks; ++chunk) {
            mbarrier_wait_parity(rings.window_full(window.stage), window.parity);
            for (int tap = 0; tap < Rings::taps; ++tap) {
                const bool first = chunk == 0 && tap == 0;
                const auto a = Operand::at(rings.window(window.stage), lines[tap] + first_row);
                mbarrier_wait_parity(rings.filters_full(place.stage), place.parity);
                const MatrixDescriptor b = matrix_descriptor(rings.filters(place.stage), Tuning::filters * 16, 128, 0);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < Tuning::chunk / 16; ++i)
#pragma unroll
                    for (int block = 0; block < Tuning::blocks; ++block)
                        multiply(typename Problem::element{}, sums[block], a + (i * Operand::sixteen + block * Operand::block),
                                 b + 2 * i * Tuning::filters * 16, !first || i > 0);
                wgmma_commit_group();
                if (!first) {
                    // The products of the tap before are done while these are under way.
                    wgmma_wait_group<1>();
                    if (lane == 0) mbarrier_arrive(rings.filters_free(before));
                    if (tap == 0) {
                        if (lane == 0) mbarrier_arrive(rings.window_free(window_before.stage));
                        window_before.advance();
                    }
                }
                before = place.stage;
                place.advance();
            }
            window.advance();
        }
        wgmma_wait_group<0>(sums);
        if (lane == 0) {
            mbarrier_arrive(rings.filters_free(before));
            mbarrier_arrive(rings.window_free(window_before.stage));
        }
        window_before.advance();
#pragma unroll
        for (int block = 0; block < Tuning::blocks; ++block)
            WindowOutputs<Problem, Tuning>::store(sums[block], rings.outputs(warpgroup), bias, y, batch,
                                                  tiles.first_pixel(tile) + first_row + block * 64, tiles.group(tile),
                                                  tiles.filters(tile) * Tuning::filters, warpgroup);
    }
}

// `x` is the tensor, or a tensor map of windows that are copied.
template <class Problem, class Tuning, class Source>
__device__ __forceinline__ void native_gemm_nchw(const Source& x, const typename Problem::element* prepared,
                                              const typename Problem::result* bias, typename Problem::result* y,
                                              long long batch) {
    static_assert(!Problem::nhwc && !Problem::chwn, "channels of a pixel lie apart");
    const WindowRings<Problem, Tuning> rings;
    const WindowTiles<Problem, Tuning> tiles{batch};
    rings.init();
    __syncthreads();
    const int warpgroup = threadIdx.x / 128, thread = threadIdx.x - 128 * Tuning::warpgroups;
    constexpr int loading = 32 * WindowRings<Problem, Tuning>::loading_warps;
    if (warpgroup >= Tuning::warpgroups) {
        set_registers_down<Tuning::producer_registers>();
        if (thread < loading) load_windows<Problem, Tuning>(x, batch, tiles, rings, thread);
        else if (thread == loading) copy_filters<Problem, Tuning>(prepared, tiles, rings);
    } else {
        set_registers_up<Tuning::consumer_registers>();
        multiply_windows<Problem, Tuning>(bias, y, batch, tiles, rings, warpgroup);
    }
}

}  // namespace leanconv
