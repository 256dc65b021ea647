// How pixels come into shared memory for the tensor-core kernels: stages of 64 reduction elements (lib/tensor_filters.cuh)
// for all pixels of a tile, as float32.
//
//   rows: a bulk copy in im2col mode brings 32 channels of all pixels, 128 bytes a pixel, swizzled; two are a stage. For
//     NHWC whose pixels have whole rows of 16 bytes.
//   columns: each lane of the producers copies one pixel, element by element, with cp.async. Neighbouring lanes have
//     neighbouring pixels, so that NCHW and CHWN are read in whole lines; nothing is transposed, as the consumers read
//     columns as well. A column is `pitch` floats long: 4 more than the tile has pixels, so that loads meet each bank once.
#pragma once

#include <lib/epilogue.cuh>
#include <lib/index.cuh>
#include <lib/ptx/bulk_copy.cuh>
#include <lib/ptx/copy.cuh>
#include <lib/ptx/load.cuh>
#include <lib/ptx/mbarrier.cuh>
#include <lib/tensor_filters.cuh>

namespace leanconv {

// A place in a ring of stages, and the parity of the barriers' phase there.
template <int stages>
struct RingPlace {
    int stage = 0;
    unsigned parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

// The tiles of the output: filters change fastest, so that blocks that run side by side read the same pixels.
template <class Problem, class Tuning>
struct TensorTiles {
    using F = TensorFilters<Problem, Tuning>;
    static constexpr int pixels = 64 * Tuning::warpgroups;
    Offset<Problem> of_pixels;
    __device__ __forceinline__ explicit TensorTiles(long long batch)
        : of_pixels(static_cast<Offset<Problem>>((batch * (Problem::p * Problem::q) + pixels - 1) / pixels)) {}
    __device__ __forceinline__ Offset<Problem> count() const { return of_pixels * (F::tiles * Problem::groups); }
    static __device__ __forceinline__ int filters(Offset<Problem> tile) { return static_cast<int>(tile % F::tiles); }
    __device__ __forceinline__ int group(Offset<Problem> tile) const {
        return Problem::groups == 1 ? 0 : static_cast<int>(tile / F::tiles / of_pixels);
    }
    __device__ __forceinline__ Offset<Problem> first_pixel(Offset<Problem> tile) const {
        const Offset<Problem> number = tile / F::tiles;
        return (Problem::groups == 1 ? number : number % of_pixels) * pixels;
    }
};

// Shared memory: the ring of pixels, the ring of filters, and the barriers of both.
template <class Problem, class Tuning>
struct TensorRings {
    using F = TensorFilters<Problem, Tuning>;
    static constexpr int pixels = TensorTiles<Problem, Tuning>::pixels, pitch = pixels + 4;
    static constexpr int half_bytes = pixels * 128;  // 32 channels, in rows
    static constexpr int pixel_bytes = Tuning::rows ? 2 * half_bytes : split_depth * pitch * 4;
    static_assert(pixel_bytes % 1024 == 0 && F::stage_bytes % 1024 == 0, "stages begin where swizzle patterns do");
    static constexpr int bytes = Tuning::pixel_stages * pixel_bytes + Tuning::filter_stages * F::stage_bytes;
    static constexpr int shared_bytes = bytes + 2 * (Tuning::pixel_stages + Tuning::filter_stages) * 8;
    static constexpr int producer_warps = 4, consumer_warps = 4 * Tuning::warpgroups;
    unsigned char* base;

    __device__ __forceinline__ TensorRings() : base(shared_memory_for_swizzles()) {}
    __device__ __forceinline__ unsigned char* pixel_stage(int stage) const { return base + stage * pixel_bytes; }
    __device__ __forceinline__ unsigned char* filter_stage(int stage) const {
        return base + Tuning::pixel_stages * pixel_bytes + stage * F::stage_bytes;
    }
    __device__ __forceinline__ Mbarrier* pixels_full(int stage) const {
        return reinterpret_cast<Mbarrier*>(base + bytes) + stage;
    }
    __device__ __forceinline__ Mbarrier* pixels_free(int stage) const { return pixels_full(Tuning::pixel_stages) + stage; }
    __device__ __forceinline__ Mbarrier* filters_full(int stage) const {
        return pixels_free(Tuning::pixel_stages) + stage;
    }
    __device__ __forceinline__ Mbarrier* filters_free(int stage) const {
        return filters_full(Tuning::filter_stages) + stage;
    }
    // By one thread, before a barrier of the block. A warp declares a stage free when its own products are done.
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < Tuning::pixel_stages; ++i) {
            mbarrier_init(pixels_full(i), Tuning::rows ? 1 : producer_warps);
            mbarrier_init(pixels_free(i), consumer_warps);
        }
        for (int i = 0; i < Tuning::filter_stages; ++i) {
            mbarrier_init(filters_full(i), 1);
            mbarrier_init(filters_free(i), consumer_warps);
        }
        fence_mbarrier_init();
    }
};

// One thread's copies of prepared filters, a chunk at a time, tile after tile.
template <class Problem, class Tuning>
struct FilterCopies {
    using F = TensorFilters<Problem, Tuning>;
    const unsigned char* fragments;
    const TensorTiles<Problem, Tuning>& tiles;
    const TensorRings<Problem, Tuning>& rings;
    RingPlace<Tuning::filter_stages> place;

    __device__ __forceinline__ FilterCopies(const float* prepared, const TensorTiles<Problem, Tuning>& tiles,
                                            const TensorRings<Problem, Tuning>& rings)
        : fragments(reinterpret_cast<const unsigned char*>(prepared + Problem::first_prepared + F::fragments_at)),
          tiles(tiles), rings(rings) {}

    __device__ __forceinline__ void stage(Offset<Problem> tile, int stage) {
        for (int chunk = 0; chunk < F::chunks; ++chunk) {
            const int64 at = F::fragment(tiles.group(tile), tiles.filters(tile), stage, chunk);
            mbarrier_wait_parity(rings.filters_free(place.stage), place.parity ^ 1);
            mbarrier_arrive_expect_tx(rings.filters_full(place.stage), F::stage_bytes);
            cp_async_bulk_shared_global(rings.filter_stage(place.stage), fragments + at, F::stage_bytes,
                                        rings.filters_full(place.stage));
            place.advance();
        }
    }
};

// Stages of one block: all of a reduction, or its share where the blocks of a cluster split it.
template <class Problem, class Tuning>
struct StageRange {
    static constexpr int all = TensorFilters<Problem, Tuning>::stages, share = ceil_div(all, Tuning::split);
    int first, end;
    __device__ __forceinline__ StageRange() : first(0), end(all) {
        if constexpr (Tuning::split > 1) {
            first = static_cast<int>(cluster_rank()) * share;
            end = first + share < all ? first + share : all;
        }
    }
};

// The producers of pixels in rows: thread 0 copies pixels, thread 32 filters.
template <class Problem, class Tuning>
__device__ __forceinline__ void produce(const TensorMap& x, const float* prepared, long long batch,
                                        const TensorTiles<Problem, Tuning>& tiles,
                                        const TensorRings<Problem, Tuning>& rings, int thread, Offset<Problem> first_tile,
                                        Offset<Problem> step) {
    using F = TensorFilters<Problem, Tuning>;
    using Rings = TensorRings<Problem, Tuning>;
    static_assert(F::piece == 32, "a copy brings the 32 channels of a piece");
    const StageRange<Problem, Tuning> range;
    if (thread == 0) {
        RingPlace<Tuning::pixel_stages> place;
        for (Offset<Problem> tile = first_tile; tile < tiles.count(); tile += step) {
            const Pixel<Problem> from(tiles.first_pixel(tile), batch);
            const int w = from.q * Problem::stride_w - Problem::pad_left, n = static_cast<int>(from.n);
            const int h = from.p * Problem::stride_h - Problem::pad_top, first_c = tiles.group(tile) * Problem::group_c;
            for (int stage = range.first; stage < range.end; ++stage) {
                mbarrier_wait_parity(rings.pixels_free(place.stage), place.parity ^ 1);
                mbarrier_arrive_expect_tx(rings.pixels_full(place.stage), Rings::pixel_bytes);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    // NOTE: past the last tap filters are zero; any pixels that are numbers do, and the first are.
                    const int number = 2 * stage + half, tap = number / F::of_tap < F::taps ? number / F::of_tap : 0;
                    const int c = first_c + number % F::of_tap * 32;
                    cp_async_bulk_tensor_im2col_shared_global(
                        rings.pixel_stage(place.stage) + half * Rings::half_bytes, x, rings.pixels_full(place.stage), c, w,
                        h, n, static_cast<unsigned short>(tap % Problem::s * Problem::dilation_w),
                        static_cast<unsigned short>(tap / Problem::s * Problem::dilation_h));
                }
                place.advance();
            }
        }
    } else if (thread == 32) {
        FilterCopies<Problem, Tuning> filters(prepared, tiles, rings);
        for (Offset<Problem> tile = first_tile; tile < tiles.count(); tile += step)
            for (int stage = range.first; stage < range.end; ++stage) filters.stage(tile, stage);
    }
}

// One stage of columns: what a lane copies of pixels that lie `warps` groups of 32 apart.
template <class Problem, class Tuning>
struct ColumnCopies {
    using F = TensorFilters<Problem, Tuning>;
    using Rings = TensorRings<Problem, Tuning>;
    static constexpr int warps = Rings::producer_warps, most = ceil_div(Rings::pixels / 32, warps);
    const InputStrides<Problem> stride;
    const char* from[most];
    int h[most], w[most];

    __device__ __forceinline__ explicit ColumnCopies(long long batch) : stride(batch) {}

    __device__ __forceinline__ void begin(const float* x, Offset<Problem> first_pixel, int group, int thread,
                                          long long batch) {
        const auto count = static_cast<Offset<Problem>>(batch) * (Problem::p * Problem::q);
#pragma unroll
        for (int i = 0; i < most; ++i) {
            const Offset<Problem> number = first_pixel + i * warps * 32 + thread;
            const Pixel<Problem> pixel(number < count ? number : 0, batch);
            w[i] = pixel.q * Problem::stride_w - Problem::pad_left;
            // NOTE: a pixel that does not exist lies above all images, so that nothing is read
            h[i] = number < count ? pixel.p * Problem::stride_h - Problem::pad_top : -(1 << 30);
            const int64 place = static_cast<int64>(h[i]) * Problem::w + w[i];
            from[i] = reinterpret_cast<const char*>(x + static_cast<int64>(pixel.n) * stride.image + place * stride.pixel +
                                                    static_cast<int64>(group) * Problem::group_c * stride.channel);
        }
    }

    __device__ __forceinline__ void stage(float* to, int stage, int thread) const {
#pragma unroll
        for (int i = 0; i < most; ++i) {
            const int pixel = i * warps * 32 + thread;
            if (Rings::pixels % (warps * 32) != 0 && pixel >= Rings::pixels) break;
            for (int piece = 0; piece < F::pieces; ++piece) {
                const int number = stage * F::pieces + piece, tap = number / F::of_tap, first_c = number % F::of_tap * F::piece;
                const int down = tap / Problem::s * Problem::dilation_h, right = tap % Problem::s * Problem::dilation_w;
                const bool inside = tap < F::taps && static_cast<unsigned>(h[i] + down) < Problem::h &&
                                    static_cast<unsigned>(w[i] + right) < Problem::w;
                const char* source = from[i] + (static_cast<int64>(down * Problem::w + right) * stride.pixel +
                                                static_cast<int64>(first_c) * stride.channel) * 4;
                float* const column = to + piece * F::piece * Rings::pitch + pixel;
#pragma unroll
                for (int c = 0; c < F::piece; ++c) {
                    const bool exists = Problem::group_c % F::piece == 0 || first_c + c < Problem::group_c;
                    cp_async_4(column + c * Rings::pitch, source + static_cast<int64>(c) * stride.channel * 4,
                               inside && exists);
                }
            }
        }
    }
};

// The producers of pixels in columns: all threads copy pixels, thread 0 filters besides, one stage behind.
template <class Problem, class Tuning>
__device__ __forceinline__ void produce(const float* x, const float* prepared, long long batch,
                                        const TensorTiles<Problem, Tuning>& tiles,
                                        const TensorRings<Problem, Tuning>& rings, int thread, Offset<Problem> first_tile,
                                        Offset<Problem> step) {
    const StageRange<Problem, Tuning> range;
    RingPlace<Tuning::pixel_stages> place;
    FilterCopies<Problem, Tuning> filters(prepared, tiles, rings);
    ColumnCopies<Problem, Tuning> pixels(batch);
    Offset<Problem> tile = first_tile, filter_tile = first_tile;
    int stage = range.first, filter_stage = range.first, previous = 0;
    bool begun = false;
    if (tile < tiles.count() && range.first < range.end) pixels.begin(x, tiles.first_pixel(tile), tiles.group(tile), thread, batch);
    if (range.first >= range.end) return;
    while (tile < tiles.count()) {
        mbarrier_wait_parity(rings.pixels_free(place.stage), place.parity ^ 1);
        pixels.stage(reinterpret_cast<float*>(rings.pixel_stage(place.stage)), stage, thread);
        cp_async_commit_group();
        if (begun) {
            cp_async_wait_group<1>();
            __syncwarp();
            if (thread % 32 == 0) mbarrier_arrive(rings.pixels_full(previous));
            if (thread == 0) filters.stage(filter_tile, filter_stage);
            if (++filter_stage == range.end) filter_stage = range.first, filter_tile += step;
        }
        begun = true;
        previous = place.stage;
        place.advance();
        if (++stage == range.end) {
            stage = range.first, tile += step;
            if (tile < tiles.count()) pixels.begin(x, tiles.first_pixel(tile), tiles.group(tile), thread, batch);
        }
    }
    if (begun) {
        cp_async_wait_group<0>();
        __syncwarp();
        if (thread % 32 == 0) mbarrier_arrive(rings.pixels_full(previous));
        if (thread == 0) filters.stage(filter_tile, filter_stage);
    }
}

}  // namespace leanconv
