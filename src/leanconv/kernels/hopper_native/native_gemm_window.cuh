// native_gemm_window: native_gemm_16bit with pixels that all taps of a filter read at one place; float16 or bfloat16 in NHWC.
//
//   y[m, k] = sum over r, s, c of x[m + (r, s), c] * w[k, r, s, c]        m: output pixel, k: filter
//
// A copy brings the window of a block of outputs, all pixels that its taps read, once for all taps: of 8 x 8 outputs and 3 x 3 taps
// 100 pixels, where native_gemm_16bit copies 64 for each tap. A tap's operand is the same window, begun at another pixel: eight
// neighbours along a row are eight rows of a swizzle pattern, and the stride between eights is that of the window's rows.
//
// Requires   as native_gemm_16bit; of images, unit stride, five taps or more: with fewer, copies of windows come too late.
// Numerics   as native_gemm_16bit: exact products, sums stay in the tensor core over the whole reduction.
// CTA tile   64 * m_tiles * warpgroups pixels x filters. An MMA tile is a block of 8 x 8 outputs; box_w x box_h of them share a window.
//            Persistent.
// Roles      warpgroups 0..n-1  consumers: wgmma with both operands in shared memory, epilogue, stores
//            warpgroup n        producer: one thread issues all TMA copies, windows by a tiled map of x, filters by one of w
// Pipelines  windows  full, empty: those of a channel block of the tile
//            stages   full, empty: stage_taps taps of its filters; both as in native_gemm_16bit
// One stage  wait full, at the first tap of the window's too; for each tap and k16 step m_tiles wgmma; commit; wait for the wgmma of
//            the stage before and release that one, after the last tap the window too.
//            With `resident` the stages hold all filters: copied for the CTA's first tile, they stay.
// Registers  m_tiles * filters / 2 sums of 240.
// Work       2 C/g R S flops an output. Copied for a tap of 64 channels of 256 pixels and 64 filters, 3 x 3: 44 + 64 rows of 128 bytes,
//            where native_gemm_16bit has 256 + 64; its products take 512 cycles.
// Explored (H200, 50452dcc with this kernel, float16, 3x3): 64 channels, 16 images of 112 x 112: 16 filters 21.1 us, native_gemm_16bit
//            35.6; 64 filters 31.2 and 35.4. 256 channels, 64 filters, 4 of 128 x 128: 30.1 and 44.9, 643 TFLOP/s. Of 128 filters 57.7
//            and 59.1: there copies bound neither.
#pragma once

#include <kernels/hopper_native/native_gemm_16bit.cuh>

namespace leanconv {

// The tiles of the output: MMA tiles are blocks of 8 x 8 pixels, those of a box of box_w x box_h have consecutive numbers, and boxes
// go through the images row by row. Pixels are numbered in this order.
template <class Problem, class Tuning>
struct WindowTiles {
    static constexpr int of_box = Tuning::box_w * Tuning::box_h, boxes = Tuning::m_tiles * Tuning::warpgroups / of_box;
    static constexpr int of_group = ceil_div(Problem::group_k, Tuning::filters), pixels = 64 * of_box * boxes;
    static constexpr int across = ceil_div(Problem::q, 8 * Tuning::box_w), down = ceil_div(Problem::p, 8 * Tuning::box_h);
    static_assert(boxes * of_box == Tuning::m_tiles * Tuning::warpgroups, "a tile has whole boxes");
    static_assert(Phase<Problem>::whole && !Depth<Problem>::volume, "outputs are whole images");
    // The first output of a box.
    struct Corner {
        Offset<Problem> n;
        int p, q;
    };
    long long batch;
    Offset<Problem> all, of_pixels;  // boxes, tiles of one channel group's filters

    __device__ __forceinline__ explicit WindowTiles(long long batch)
        : batch(batch), all(static_cast<Offset<Problem>>(batch) * (across * down)), of_pixels((all + (boxes - 1)) / boxes) {}
    __device__ __forceinline__ Offset<Problem> count() const { return of_pixels * (of_group * Problem::groups); }
    static __device__ __forceinline__ int filters(Offset<Problem> tile) { return static_cast<int>(tile % of_group); }
    __device__ __forceinline__ int group(Offset<Problem> tile) const {
        return Problem::groups == 1 ? 0 : static_cast<int>(tile / of_group / of_pixels);
    }
    __device__ __forceinline__ Offset<Problem> first_pixel(Offset<Problem> tile) const {
        const Offset<Problem> number = tile / of_group;
        return (Problem::groups == 1 ? number : number % of_pixels) * pixels;
    }
    static __device__ __forceinline__ Corner corner(Offset<Problem> box) {
        const Offset<Problem> n = box / (across * down);
        const int in_image = static_cast<int>(box - n * (across * down));
        return {n, in_image / across * (8 * Tuning::box_h), in_image % across * (8 * Tuning::box_w)};
    }
    // Where an output pixel lies; its count is 0 where there is none.
    __device__ __forceinline__ Place place(Offset<Problem> pixel) const {
        const Offset<Problem> box = pixel / (64 * of_box);
        const int in_box = static_cast<int>(pixel - box * (64 * of_box)), block = in_box / 64;
        const Corner from = corner(box);
        const int p = from.p + block / Tuning::box_w * 8 + in_box % 64 / 8, q = from.q + block % Tuning::box_w * 8 + in_box % 8;
        const bool exists = box < all && (Problem::p % (8 * Tuning::box_h) == 0 || p < Problem::p) &&
                            (Problem::q % (8 * Tuning::box_w) == 0 || q < Problem::q);
        return {static_cast<int64>(from.n) * (Problem::p * Problem::q) + p * Problem::q + q, exists};
    }
};

// Shared memory: `windows` times the windows of a channel block of a tile; `stages` times `stage_taps` taps of a channel block of
// filters; a staging buffer for each consumer warp's outputs; the barriers.
template <class Problem, class Tuning>
struct WindowRing : FilterBlock<Problem, Tuning> {
    using Filters = FilterBlock<Problem, Tuning>;
    using Tiles = WindowTiles<Problem, Tuning>;
    using Output = OutputNhwc<Problem, Tuning::filters>;
    using Filters::row_bytes, Filters::filter_bytes;
    static constexpr int of_box_w = 8 * Tuning::box_w + (Problem::s - 1) * Problem::dilation_w;
    static constexpr int of_box_h = 8 * Tuning::box_h + (Problem::r - 1) * Problem::dilation_h;
    static constexpr int copied = of_box_w * of_box_h * row_bytes;  // bytes of a window
    static constexpr int window_bytes = ceil_div(copied, 128) * 128, windows_bytes = Tiles::boxes * window_bytes;
    static constexpr int stage_bytes = Tuning::stage_taps * filter_bytes;
    static constexpr int of_tap = ceil_div(Problem::group_c, Tuning::channel_block), taps = filter_taps<Problem>;
    static_assert(taps % Tuning::stage_taps == 0, "a window has whole stages");
    static_assert(!Tuning::resident || (Tuning::stages == of_tap * taps / Tuning::stage_taps && Tiles::of_group * Problem::groups == 1),
                  "every tile takes the filters of all stages");
    static_assert(Problem::groups == 1 || Problem::group_c % Tuning::channel_block == 0, "a row has channels of one group");
    static constexpr int filters_at = ceil_div(Tuning::windows * windows_bytes, 1024) * 1024;
    static constexpr int outputs_at = filters_at + Tuning::stages * stage_bytes;
    static_assert(outputs_at + 4 * Tuning::warpgroups * Output::warp_bytes == Tuning::barriers_at, "the host counts as many bytes");
    unsigned char* base;

    __device__ __forceinline__ WindowRing() : base(shared_memory_for_swizzles()) {}
    __device__ __forceinline__ unsigned char* windows_of(int number) const { return base + number * windows_bytes; }
    __device__ __forceinline__ unsigned char* filters_of(int stage) const { return base + filters_at + stage * stage_bytes; }
    __device__ __forceinline__ unsigned char* outputs_of(int warp) const { return base + outputs_at + warp * Output::warp_bytes; }
    __device__ __forceinline__ Mbarrier* full(int stage) const {
        return reinterpret_cast<Mbarrier*>(base + Tuning::barriers_at) + stage;
    }
    __device__ __forceinline__ Mbarrier* empty(int stage) const { return full(Tuning::stages) + stage; }
    __device__ __forceinline__ Mbarrier* window_full(int number) const { return empty(Tuning::stages) + number; }
    __device__ __forceinline__ Mbarrier* window_empty(int number) const { return window_full(Tuning::windows) + number; }
    // Complete when the pixels of a window have been rounded.
    __device__ __forceinline__ Mbarrier* window_rounded(int number) const { return window_empty(Tuning::windows) + number; }
    // By one thread, before a barrier of the CTA; so many warps round windows.
    template <int rounders>
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < Tuning::stages; ++i) {
            mbarrier_init(full(i), 1);
            mbarrier_init(empty(i), 4 * Tuning::warpgroups);
        }
        for (int i = 0; i < Tuning::windows; ++i) {
            mbarrier_init(window_full(i), 1);
            mbarrier_init(window_empty(i), 4 * Tuning::warpgroups);
            if constexpr (rounders > 0) mbarrier_init(window_rounded(i), rounders);
        }
        fence_mbarrier_init();
    }
    // Bytes from a tile's first window to the pixels that the first tap of an MMA tile reads, from there to those of another tap.
    static __device__ __forceinline__ int block_at(int block) {
        const int in_box = block % Tiles::of_box, row = in_box / Tuning::box_w, column = in_box % Tuning::box_w;
        return block / Tiles::of_box * window_bytes + (row * of_box_w + column) * (8 * row_bytes);
    }
    static __device__ __forceinline__ int tap_at(int tap) {
        const FilterTap<Problem> at(tap);
        return (at.r * Problem::dilation_h * of_box_w + at.s * Problem::dilation_w) * row_bytes;
    }
};

// One thread's copies of all windows and stages of the CTA's tiles.
template <class Problem, class Tuning>
__device__ __forceinline__ void copy_windows(const TensorMap& x, const TensorMap& w, const WindowTiles<Problem, Tuning>& tiles,
                                             const WindowRing<Problem, Tuning>& ring) {
    using Ring = WindowRing<Problem, Tuning>;
    using Tiles = WindowTiles<Problem, Tuning>;
    RingPlace<Tuning::stages> place;
    RingPlace<Tuning::windows> window;
    for (Offset<Problem> tile = blockIdx.x; tile < tiles.count(); tile += gridDim.x) {
        const Offset<Problem> first_box = tiles.first_pixel(tile) / (64 * Tiles::of_box);
        const int group = tiles.group(tile), filter = tiles.filters(tile) * Tuning::filters;
        for (int block = 0; block < Ring::of_tap; ++block) {
            const int c = block * Tuning::channel_block;
            mbarrier_wait_parity(ring.window_empty(window.stage), window.parity ^ 1);
            Mbarrier* const window_full = ring.window_full(window.stage);
            mbarrier_arrive_expect_tx(window_full, Tiles::boxes * Ring::copied);
#pragma unroll
            for (int i = 0; i < Tiles::boxes; ++i) {
                // Behind the last image are zeros.
                const typename Tiles::Corner from = tiles.corner(first_box + i);
                cp_async_bulk_tensor_shared_global(ring.windows_of(window.stage) + i * Ring::window_bytes, x, window_full,
                                                   group * Problem::group_c + c, from.q - Problem::pad_left,
                                                   from.p - Problem::pad_top, static_cast<int>(from.n));
            }
            window.advance();
            if (Tuning::resident && tile != blockIdx.x) continue;
            for (int tap = 0; tap < Ring::taps; tap += Tuning::stage_taps) {
                Mbarrier* const full = ring.full(place.stage);
                if constexpr (!Tuning::resident) mbarrier_wait_parity(ring.empty(place.stage), place.parity ^ 1);
                mbarrier_arrive_expect_tx(full, Tuning::stage_taps * Ring::copied_bytes);
#pragma unroll
                for (int i = 0; i < Tuning::stage_taps; ++i)
                    copy_filters<Problem, Tuning>(ring.filters_of(place.stage) + i * Ring::filter_bytes, w, full, group, filter,
                                                  tap + i, c);
                place.advance();
            }
        }
    }
}

// One warpgroup's products of all tiles of the CTA.
template <class Problem, class Tuning, class Rounder>
__device__ __forceinline__ void multiply_windows(Bias<Problem> bias, typename Problem::result* y,
                                                 const WindowTiles<Problem, Tuning>& tiles, const WindowRing<Problem, Tuning>& ring,
                                                 int warpgroup) {
    using Ring = WindowRing<Problem, Tuning>;
    const int lane = threadIdx.x % 32, first_block = warpgroup * Tuning::m_tiles;
    RingPlace<Tuning::stages> place;
    RingPlace<Tuning::windows> window;
    for (Offset<Problem> tile = blockIdx.x; tile < tiles.count(); tile += gridDim.x) {
        prefetch_tile<Problem, Tuning>(bias, y, tiles, 64 * first_block, tile);
        float sums[Tuning::m_tiles][Tuning::filters / 2];
        int before = 0;
        wgmma_fence(sums);
        for (int block = 0; block < Ring::of_tap; ++block) {
            Mbarrier* const ready = Rounder::warps > 0 ? ring.window_rounded(window.stage) : ring.window_full(window.stage);
            mbarrier_wait_parity(ready, window.parity);
            const unsigned char* const pixels = ring.windows_of(window.stage);
            for (int tap = 0; tap < Ring::taps; tap += Tuning::stage_taps) {
                mbarrier_wait_parity(ring.full(place.stage), Tuning::resident ? 0 : place.parity);
                wgmma_fence();
#pragma unroll
                for (int of_stage = 0; of_stage < Tuning::stage_taps; ++of_stage) {
                    const unsigned char* const from = pixels + Ring::tap_at(tap + of_stage);
                    const auto b = Ring::operand(ring.filters_of(place.stage) + of_stage * Ring::filter_bytes);
#pragma unroll
                    for (int i = 0; i < Ring::row_bytes / 32; ++i)
#pragma unroll
                        for (int m = 0; m < Tuning::m_tiles; ++m) {
                            const MatrixDescriptor a = matrix_descriptor(from + Ring::block_at(first_block + m), 0,
                                                                         Ring::of_box_w * Ring::row_bytes, Ring::row_bytes);
                            multiply(typename Problem::element{}, sums[m], a + 32 * i, b + Ring::filter_step * i,
                                     block > 0 || tap > 0 || of_stage > 0 || i > 0);
                        }
                }
                wgmma_commit_group();
                if (block > 0 || tap > 0) {
                    // The products of the stage before are done while these are under way.
                    wgmma_wait_group<1>();
                    if constexpr (!Tuning::resident) mbarrier_arrive_warp(ring.empty(before), lane);
                    if (tap == 0) mbarrier_arrive_warp(ring.window_empty((window.stage + Tuning::windows - 1) % Tuning::windows), lane);
                }
                before = place.stage;
                place.advance();
            }
            if (block + 1 < Ring::of_tap) window.advance();
        }
        wgmma_wait_group<0>(sums);
        if constexpr (!Tuning::resident) mbarrier_arrive_warp(ring.empty(before), lane);
        mbarrier_arrive_warp(ring.window_empty(window.stage), lane);
        window.advance();
        store_tile<Problem, Tuning>(sums, bias, y, tiles, ring, 64 * first_block, tile);
    }
}

// Pixels are multiplied as they are.
struct NoRounder {
    static constexpr int warps = 0;
};

// A CTA. With a rounder, the producer's other warps round windows.
template <class Problem, class Tuning, class Rounder>
__device__ __forceinline__ void run_windows(const TensorMap& x, const TensorMap& w, Bias<Problem> bias,
                                            typename Problem::result* y, long long batch) {
    const WindowRing<Problem, Tuning> ring;
    const WindowTiles<Problem, Tuning> tiles(batch);
    if (threadIdx.x == 0) ring.template init<Rounder::warps>();
    __syncthreads();
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == Tuning::warpgroups) {
        set_registers_down<Tuning::producer_registers>();
        if (threadIdx.x % 128 == 0) copy_windows<Problem, Tuning>(x, w, tiles, ring);
        if constexpr (Rounder::warps > 0) {
            static_assert(Rounder::warps == 3, "all warps of the producer but the one that copies");
            if (threadIdx.x % 128 >= 32) Rounder::round(tiles, ring);
        }
    } else {
        set_registers_up<Tuning::consumer_registers>();
        multiply_windows<Problem, Tuning, Rounder>(bias, y, tiles, ring, warpgroup);
    }
}

template <class Problem, class Tuning>
__device__ __forceinline__ void native_gemm_window(const TensorMap& x, const TensorMap& w, Bias<Problem> bias,
                                                   typename Problem::result* y, long long batch) {
    run_windows<Problem, Tuning, NoRounder>(x, w, bias, y, batch);
}

}  // namespace leanconv
