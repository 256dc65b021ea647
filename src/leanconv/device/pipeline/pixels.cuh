// The producers: how pixels come into shared memory, in stages of 64 reduction elements (filter_layout.cuh) of all pixels of a
// tile, as float32; and the copies of packed filters. Pixels come in one of four ways:
//
//   rows      a TMA copy in im2col mode brings 32 channels of all pixels, 128 swizzled bytes a pixel; two copies are a stage.
//             For NHWC. Where pixels are no multiples of 16 bytes, no tensor map describes them: the lanes of a warp copy the
//             channels of one pixel after the other.
//   linear    TMA boxes of 36 pixels x 32 channels. For NCHW and CHWN at unit stride, with an output as large as the input:
//             output pixel i reads input pixel i + shift, and each tap has a shift of its own. A box begins at a multiple of
//             16 bytes; so 32 pixels lie anywhere in 36. Columns of 36 floats are loaded without bank conflicts. Where a
//             window leaves the image at a side, the box has pixels of other rows; consumers take zeros instead. Of pairs a
//             box has 16, 32 or 64.
//   columns   each producer lane copies one pixel, element by element, with cp.async. Neighbouring lanes have neighbouring
//             pixels, so NCHW and CHWN are read in whole lines. Nothing is transposed: consumers read columns too. A column has
//             `pitch` floats, 4 more than the tile has pixels, and is loaded without bank conflicts.
//   resident  a bulk copy brings 32 channels of a whole image, which are contiguous in NCHW, and all taps read them there. For
//             small images, of which a tile covers few. Taps are the inner loop, so a stage of pixels serves r * s / 2 stages
//             of filters. Consumers take zeros outside the image. The four lanes of a row have channels `spacing` apart, so
//             that loads of eight pixels have no bank conflicts. Of pairs a tensor map brings what a tile reads of each image,
//             with zeros above and below.
#pragma once

#include <device/index.cuh>
#include <device/pipeline/rings.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/sync.cuh>
#include <device/ptx/tma.cuh>

namespace leanconv {

// One thread's copies of packed filters: MMA tile after MMA tile, stage after stage.
template <class Problem, class Tuning>
struct FilterCopies {
    using F = TensorFilters<Problem, Tuning>;
    static constexpr int multicast = Tuning::multicast, part = F::stage_bytes / multicast;
    static_assert(part % 16 == 0, "multicast CTAs copy equal parts of a stage");
    const unsigned char* fragments;
    const TensorTiles<Problem, Tuning>& tiles;
    const TensorRings<Problem, Tuning>& rings;
    RingPlace<Tuning::filter_stages> place;

    __device__ __forceinline__ FilterCopies(const float* prepared, const TensorTiles<Problem, Tuning>& tiles,
                                            const TensorRings<Problem, Tuning>& rings)
        : fragments(reinterpret_cast<const unsigned char*>(prepared + Problem::first_prepared + F::fragments_at)),
          tiles(tiles), rings(rings) {}

    __device__ __forceinline__ void all_stages(TileWalk<Problem, Tuning>& walk) {
        for (; walk.valid(); walk.advance())
            for (int number = walk.first; number < walk.end; ++number) stage(walk.place(), number);
    }
    __device__ __forceinline__ void stage(Offset<Problem> tile, int stage) {
        // The last row of pixels uses filters of the row before alone.
        const int own = F::filters_of(stage);
        if (F::output_rows > 1 && own >= F::stages) return;
        for (int n_tile = 0; n_tile < F::n_tiles_of(own); ++n_tile) {
            const int64 at = F::fragment(tiles.group(tile), tiles.filters(tile), own, n_tile);
            if constexpr (multicast > 1) {
                copy_multicast(fragments + at);
                place.advance();
                continue;
            }
            mbarrier_wait_parity(rings.filters_empty(place.stage), place.parity ^ 1);
            mbarrier_arrive_expect_tx(rings.filters_full(place.stage), F::stage_bytes);
            cp_async_bulk_shared_global(rings.filter_stage(place.stage), fragments + at, F::stage_bytes,
                                        rings.filters_full(place.stage));
            place.advance();
        }
    }
    // This CTA's part of a stage, to all destinations.
    __device__ __forceinline__ void copy_multicast(const unsigned char* from) const {
        const unsigned first = cluster_rank() / multicast * multicast;
        const int own = static_cast<int>(cluster_rank() - first) * part;
        mbarrier_wait_parity(rings.multicast_empty(place.stage), place.parity);
        cp_async_bulk_multicast_shared_global(rings.filter_stage(place.stage) + own, from + own, part,
                                              rings.filters_full(place.stage),
                                              static_cast<unsigned short>(((1 << multicast) - 1) << first));
    }
    // By another thread: tells all CTAs that copy to this one that its stage is empty. Their copies may land before its own
    // bytes are expected.
    __device__ __forceinline__ void announce_empty(int stage) {
        const int own = F::filters_of(stage);
        if (F::output_rows > 1 && own >= F::stages) return;
        const unsigned first = cluster_rank() / multicast * multicast;
        for (int n_tile = 0; n_tile < F::n_tiles_of(own); ++n_tile) {
            mbarrier_wait_parity(rings.filters_empty(place.stage), place.parity ^ 1);
            mbarrier_arrive_expect_tx(rings.filters_full(place.stage), F::stage_bytes);
            for (int i = 0; i < multicast; ++i) mbarrier_arrive_cluster(rings.multicast_empty(place.stage), first + i);
            place.advance();
        }
    }
};

// One thread's TMA copies of pixels in rows. A stage is two copies of 32 channels.
template <class Problem, class Tuning>
struct RowCopies : SliceOf<Depth<Problem>::volume> {
    using F = TensorFilters<Problem, Tuning>;
    using Rings = TensorRings<Problem, Tuning>;
    using Tiles = TensorTiles<Problem, Tuning>;
    using D = Depth<Problem>;
    int n, h, w, first_c, down = 0;

    __device__ __forceinline__ RowCopies(const Tiles& tiles, Offset<Problem> tile, long long batch)
        : first_c(tiles.group(tile) * Problem::group_c) {
        if constexpr (Tiles::one_row) {
            // The copies walk over one row of each image; the offset chooses it.
            const Offset<Problem> first = tiles.first_pixel(tile);
            n = static_cast<int>(first / Problem::q);
            h = -Problem::pad_top;
            w = static_cast<int>(first % Problem::q) * Problem::stride_w - Problem::pad_left;
            down = tiles.row(tile) * Problem::stride_h;
            return;
        }
        const Pixel<Problem> from(tiles.first_pixel(tile), batch);
        n = static_cast<int>(from.n);
        if constexpr (D::volume) this->slice = from.slice * D::stride - D::pad;
        h = from.p * Problem::stride_h - Problem::pad_top;
        w = from.q * Problem::stride_w - Problem::pad_left;
    }
    __device__ __forceinline__ void half(unsigned char* to, const TensorMap& x, Mbarrier* full, int tap, int c) const {
        if constexpr (D::volume) {
            cp_async_bulk_tensor_im2col_shared_global(to, x, full, first_c + c, w, h, this->slice, n,
                                                      static_cast<unsigned short>(tap_right<Problem, Tuning>(tap)),
                                                      static_cast<unsigned short>(tap_down<Problem, Tuning>(tap)),
                                                      static_cast<unsigned short>(tap_deep<Problem, Tuning>(tap)));
        } else {
            cp_async_bulk_tensor_im2col_shared_global(to, x, full, first_c + c, w, h, n,
                                                      static_cast<unsigned short>(tap_right<Problem, Tuning>(tap)),
                                                      static_cast<unsigned short>(down + tap_down<Problem, Tuning>(tap)));
        }
    }
};

// And of linear pixels: the boxes of the tile.
template <class Problem, class Tuning>
struct LinearCopies {
    using Rings = TensorRings<Problem, Tuning>;
    using Numbers = TensorPixels<Problem, Tuning>;
    static constexpr int boxes = Rings::pixels / Numbers::box_width;
    static constexpr int of_number = TensorFilters<Problem, Tuning>::states > 1 ? 2 : 1;
    static_assert(Depth<Problem>::stride == 1 && Problem::stride_h == 1 && Problem::stride_w == of_number &&
                      Depth<Problem>::d == Depth<Problem>::z && Problem::h == Problem::p && Problem::w == Problem::q * of_number,
                  "flat pixels move by the same shift all over the image");
    int n[boxes], pixel[boxes], first_c, apart;

    __device__ __forceinline__ LinearCopies(const TensorTiles<Problem, Tuning>& tiles, Offset<Problem> tile, long long batch)
        : first_c(tiles.group(tile) * Problem::group_c), apart(Problem::chwn ? static_cast<int>(batch) : 1) {
#pragma unroll
        for (int i = 0; i < boxes; ++i) {
            const Offset<Problem> number = tiles.first_pixel(tile) + i * Numbers::box_width;
            n[i] = Problem::chwn ? 0 : static_cast<int>(number / Numbers::of_image);
            pixel[i] = static_cast<int>(Problem::chwn ? number : number % Numbers::of_image) * of_number;
        }
    }
    __device__ __forceinline__ void half(unsigned char* to, const TensorMap& x, Mbarrier* full, int tap, int c) const {
        const int shift = linear_shift<Problem, Tuning>(tap, apart) & ~3;
#pragma unroll
        for (int i = 0; i < boxes; ++i)
            cp_async_bulk_tensor_shared_global(to + i * Rings::box_bytes, x, full, pixel[i] + shift, first_c + c, n[i]);
    }
};

template <class Problem, class Tuning>
struct TileImages {
    using Rings = TensorRings<Problem, Tuning>;
    Offset<Problem> first;
    int count;

    __device__ __forceinline__ TileImages(Offset<Problem> begin, long long batch) {
        const Offset<Problem> all = static_cast<Offset<Problem>>(batch) * Rings::image;
        const Offset<Problem> end = begin + Rings::pixels < all ? begin + Rings::pixels : all;
        first = begin / Rings::image;
        count = static_cast<int>((end - 1) / Rings::image - first) + 1;
    }
};

// One thread's bulk copies of resident images: 32 channels of each image at once.
template <class Problem, class Tuning>
struct ResidentCopies {
    using Rings = TensorRings<Problem, Tuning>;
    static constexpr int64 of_image = static_cast<int64>(Problem::c) * Rings::channel_pixels;
    const float* from;
    int count;

    // From channel block `channel_block` of the tile's group on.
    __device__ __forceinline__ ResidentCopies(const float* x, const TensorTiles<Problem, Tuning>& tiles, Offset<Problem> tile,
                                           long long batch, int channel_block) {
        const TileImages<Problem, Tuning> images(tiles.first_pixel(tile), batch);
        count = images.count;
        const int first_c = tiles.group(tile) * Problem::group_c + channel_block * 32;
        from = x + images.first * of_image + first_c * Rings::channel_pixels;
    }
    // The next 32 channels.
    __device__ __forceinline__ void stage(const float*, unsigned char* to, Mbarrier* full) {
        mbarrier_arrive_expect_tx(full, count * Rings::image_bytes);
        const float* image = from;
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            cp_async_bulk_shared_global(to, image, Rings::image_bytes, full);
            to += Rings::image_bytes, image += of_image;
        }
        from += 32 * Rings::channel_pixels;
    }
};

// And by a tensor map, with zeros above and below.
template <class Problem, class Tuning>
struct ResidentBoxCopies {
    using Rings = TensorRings<Problem, Tuning>;
    int first, count, c, begin;

    __device__ __forceinline__ ResidentBoxCopies(const TensorMap&, const TensorTiles<Problem, Tuning>& tiles,
                                               Offset<Problem> tile, long long batch, int channel_block)
        : c(tiles.group(tile) * Problem::group_c + channel_block * 32) {
        const TileImages<Problem, Tuning> images(tiles.first_pixel(tile), batch);
        first = static_cast<int>(images.first), count = images.count;
        const int in_image = static_cast<int>(tiles.first_pixel(tile) - images.first * Rings::image);
        begin = resident_begin<Problem>(in_image, Rings::pixels);
    }
    __device__ __forceinline__ void stage(const TensorMap& x, unsigned char* to, Mbarrier* full) {
        mbarrier_arrive_expect_tx(full, count * Rings::image_bytes);
#pragma unroll 1
        for (int i = 0; i < count; ++i)
            cp_async_bulk_tensor_shared_global(to + i * Rings::image_bytes, x, full,
                                               i == 0 ? begin : resident_begin<Problem>(), c,
                                               first + i);
        c += 32;
    }
};

// Producers of resident images: thread 0 copies pixels, thread 32 filters.
template <class Copies, class Problem, class Tuning, class Source>
__device__ __forceinline__ void produce_resident(const Source& x, const float* prepared, long long batch,
                                               const TensorTiles<Problem, Tuning>& tiles,
                                               const TensorRings<Problem, Tuning>& rings, int thread) {
    using F = TensorFilters<Problem, Tuning>;
    TileWalk<Problem, Tuning> walk(tiles);
    if (thread == 0) {
        RingPlace<Tuning::pixel_stages> place;
        for (; walk.valid(); walk.advance()) {
            int channel_block = 2 * walk.first / F::taps;
            const int end = ceil_div(min(2 * walk.end, F::taps * F::tap_blocks), F::taps);
            Copies copies(x, tiles, walk.tile, batch, channel_block);
#pragma unroll 1
            for (; channel_block < end; ++channel_block) {
                mbarrier_wait_parity(rings.pixels_empty(place.stage), place.parity ^ 1);
                copies.stage(x, rings.pixel_stage(place.stage), rings.pixels_full(place.stage));
                place.advance();
            }
        }
    } else if (thread == 32) {
        FilterCopies<Problem, Tuning>(prepared, tiles, rings).all_stages(walk);
    }
}

// Producers of pixels by TMA: thread 0 copies pixels, thread 32 filters. With multicast, thread 64 announces empty stages.
template <class Problem, class Tuning>
__device__ __forceinline__ void produce(const TensorMap& x, const float* prepared, long long batch,
                                        const TensorTiles<Problem, Tuning>& tiles,
                                        const TensorRings<Problem, Tuning>& rings, int thread) {
    using F = TensorFilters<Problem, Tuning>;
    using Rings = TensorRings<Problem, Tuning>;
    using Copies = typename Select<Tuning::linear, LinearCopies<Problem, Tuning>, RowCopies<Problem, Tuning>>::type;
    static_assert(F::channel_block == 32, "a copy brings the 32 channels of a piece");
    if constexpr (F::resident) {
        produce_resident<ResidentBoxCopies<Problem, Tuning>>(x, prepared, batch, tiles, rings, thread);
        return;
    }
    TileWalk<Problem, Tuning> walk(tiles);
    if (thread == 0) {
        RingPlace<Tuning::pixel_stages> place;
        for (; walk.valid(); walk.advance()) {
            const Copies copies(tiles, walk.place(), batch);
            for (int stage = walk.first; stage < walk.end; stage += F::tap_stages) {
                mbarrier_wait_parity(rings.pixels_empty(place.stage), place.parity ^ 1);
                mbarrier_arrive_expect_tx(rings.pixels_full(place.stage), Rings::pixel_bytes);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    // NOTE: past the last tap filters are zero, and pixels must be finite or equal to those of tap 0: these
                    // are read.
                    const int number = 2 * F::read_order(stage) + half;
                    const int tap = F::tap_of(number) < F::read_taps ? F::tap_of(number) : 0;
                    copies.half(rings.pixel_stage(place.stage) + half * Rings::half_bytes, x,
                                rings.pixels_full(place.stage), tap, F::channel_of(number));
                }
                place.advance();
            }
        }
    } else if (thread == 32) {
        FilterCopies<Problem, Tuning>(prepared, tiles, rings).all_stages(walk);
    } else if (Tuning::multicast > 1 && thread == 64) {
        FilterCopies<Problem, Tuning> filters(prepared, tiles, rings);
        for (; walk.valid(); walk.advance())
            for (int stage = walk.first; stage < walk.end; ++stage) filters.announce_empty(stage);
    }
}

// One stage of columns: what a lane copies, pixels `warps` groups of 32 apart.
template <class Problem, class Tuning>
struct ColumnCopies {
    using F = TensorFilters<Problem, Tuning>;
    using Rings = TensorRings<Problem, Tuning>;
    static constexpr int warps = Rings::producer_warps, most = ceil_div(Rings::pixels / 32, warps);
    const InputStrides<Problem> stride;
    using D = Depth<Problem>;
    const char* from[most];
    int d[most], h[most], w[most];

    __device__ __forceinline__ explicit ColumnCopies(long long batch) : stride(batch) {}

    __device__ __forceinline__ void begin(const float* x, Offset<Problem> first_pixel, int group, int thread,
                                          long long batch) {
        const auto count = static_cast<Offset<Problem>>(batch) * output_pixels<Problem>;
#pragma unroll
        for (int i = 0; i < most; ++i) {
            const Offset<Problem> number = first_pixel + i * warps * 32 + thread;
            const Pixel<Problem> pixel(number < count ? number : 0, batch);
            w[i] = pixel.q * Problem::stride_w - Problem::pad_left;
            // NOTE: a pixel past the last one lies above all images, so that nothing is read.
            h[i] = number < count ? pixel.p * Problem::stride_h - Problem::pad_top : -(1 << 30);
            int64 place = static_cast<int64>(h[i]) * Problem::w + w[i];
            if constexpr (D::volume) {
                d[i] = pixel.slice * D::stride - D::pad;
                place += static_cast<int64>(d[i]) * (Problem::h * Problem::w);
            }
            from[i] = reinterpret_cast<const char*>(x + static_cast<int64>(pixel.n) * stride.image + place * stride.pixel +
                                                    static_cast<int64>(group) * Problem::group_c * stride.channel);
        }
    }

    __device__ __forceinline__ void stage(float* to, int stage, int thread) const {
#pragma unroll
        for (int i = 0; i < most; ++i) {
            const int pixel = i * warps * 32 + thread;
            if (Rings::pixels % (warps * 32) != 0 && pixel >= Rings::pixels) break;
            for (int block = 0; block < F::stage_blocks; ++block) {
                const int number = stage * F::stage_blocks + block, tap = number / F::tap_blocks;
                const int first_c = number % F::tap_blocks * F::channel_block;
                const FilterTap<Problem> at(tap);
                const int down = at.r * Problem::dilation_h, right = at.s * Problem::dilation_w;
                const bool in_volume = !D::volume || static_cast<unsigned>(d[i] + at.t * D::dilation) < D::d;
                const bool inside = tap < F::taps && static_cast<unsigned>(h[i] + down) < Problem::h &&
                                    static_cast<unsigned>(w[i] + right) < Problem::w && in_volume;
                const char* source = from[i] + (static_cast<int64>(at.template pixels<int>()) * stride.pixel +
                                                static_cast<int64>(first_c) * stride.channel) * 4;
                float* const column = to + block * F::channel_block * Rings::pitch + pixel;
#pragma unroll
                for (int c = 0; c < F::channel_block; ++c) {
                    const bool exists = Problem::group_c % F::channel_block == 0 || first_c + c < Problem::group_c;
                    cp_async_4(column + c * Rings::pitch, source + static_cast<int64>(c) * stride.channel * 4,
                               inside && exists);
                }
            }
        }
    }
};

// And of rows: a warp copies the 32 channels of one pixel after the other, whose place the lane that has it tells.
template <class Problem, class Tuning>
struct LaneCopies : ColumnCopies<Problem, Tuning> {
    using Base = ColumnCopies<Problem, Tuning>;
    using F = typename Base::F;
    using Rings = typename Base::Rings;
    using D = typename Base::D;
    static_assert(Problem::groups == 1 && F::channel_block == 32, "a piece has 32 channels of one tap");
    using Base::Base;
    const float* x;

    __device__ __forceinline__ void begin(const float* first, Offset<Problem> first_pixel, int group, int thread,
                                          long long batch) {
        x = first;
        Base::begin(x, first_pixel, group, thread, batch);
    }
    // Where in x a tap reads pixel i of this lane; below 0 outside the image.
    __device__ __forceinline__ Offset<Problem> place(int i, int tap) const {
        const FilterTap<Problem> at(tap);
        const bool in_volume = !D::volume || static_cast<unsigned>(this->d[i] + at.t * D::dilation) < D::d;
        const bool inside = tap < F::taps && in_volume &&
                            static_cast<unsigned>(this->h[i] + at.r * Problem::dilation_h) < Problem::h &&
                            static_cast<unsigned>(this->w[i] + at.s * Problem::dilation_w) < Problem::w;
        const auto first = static_cast<Offset<Problem>>(reinterpret_cast<const float*>(this->from[i]) - x);
        return inside ? first + at.template pixels<Offset<Problem>>() * Problem::c : -1;
    }

    __device__ __forceinline__ void stage(float* to, int stage, int thread) const {
        const int lane = thread % 32;
#pragma unroll
        for (int i = 0; i < Base::most; ++i) {
            const int first = i * Base::warps * 32 + thread / 32 * 32;
            if (Rings::pixels % (Base::warps * 32) != 0 && first >= Rings::pixels) break;
#pragma unroll 1
            for (int half = 0; half < 2; ++half) {
                const int number = 2 * stage + half, first_c = number % F::tap_blocks * 32;
                const Offset<Problem> own = place(i, number / F::tap_blocks);
                const bool exists = first_c + lane < Problem::group_c;
                const float* const channel = x + first_c + lane;
                float* const rows = to + (half * Rings::half_bytes + first * 128) / 4;
#pragma unroll 1
                for (int four = 0; four < 32; four += 4) {
                    // NOTE: all places come before the copies, which would wait for each in turn.
                    Offset<Problem> begin[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) begin[j] = __shfl_sync(0xffffffffu, own, four + j);
                    // a pixel is 32 floats, in swizzled units of four
                    const int at = four / 8 * 256 + (lane ^ four % 8 * 36);
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        cp_async_4(rows + (at ^ j * 36), channel + begin[j], begin[j] >= 0 && exists);
                }
            }
        }
    }
};

// Producers of columns, and of rows that lanes copy: all threads copy pixels; thread 0 copies filters besides, one stage
// behind.
template <class Problem, class Tuning>
__device__ __forceinline__ void produce(const float* x, const float* prepared, long long batch,
                                        const TensorTiles<Problem, Tuning>& tiles,
                                        const TensorRings<Problem, Tuning>& rings, int thread) {
    if constexpr (TensorFilters<Problem, Tuning>::resident) {
        produce_resident<ResidentCopies<Problem, Tuning>>(x, prepared, batch, tiles, rings, thread);
        return;
    }
    RingPlace<Tuning::pixel_stages> place;
    FilterCopies<Problem, Tuning> filters(prepared, tiles, rings);
    typename Select<Tuning::rows, LaneCopies<Problem, Tuning>, ColumnCopies<Problem, Tuning>>::type pixels(batch);
    TileWalk<Problem, Tuning> walk(tiles), behind = walk;
    int stage = walk.first, filter_stage = walk.first, previous = 0;
    bool begun = false;
    if (walk.valid()) pixels.begin(x, tiles.first_pixel(walk.tile), tiles.group(walk.tile), thread, batch);
    while (walk.valid()) {
        mbarrier_wait_parity(rings.pixels_empty(place.stage), place.parity ^ 1);
        pixels.stage(reinterpret_cast<float*>(rings.pixel_stage(place.stage)), stage, thread);
        cp_async_commit_group();
        if (begun) {
            cp_async_wait_group<1>();
            __syncwarp();
            mbarrier_arrive_warp(rings.pixels_full(previous), thread % 32);
            if (thread == 0) filters.stage(behind.tile, filter_stage);
            if (++filter_stage == behind.end) {
                behind.advance();
                filter_stage = behind.first;
            }
        }
        begun = true;
        previous = place.stage;
        place.advance();
        if (++stage == walk.end) {
            walk.advance();
            stage = walk.first;
            if (walk.valid()) pixels.begin(x, tiles.first_pixel(walk.tile), tiles.group(walk.tile), thread, batch);
        }
    }
    if (begun) {
        cp_async_wait_group<0>();
        __syncwarp();
        mbarrier_arrive_warp(rings.pixels_full(previous), thread % 32);
        if (thread == 0) filters.stage(behind.tile, filter_stage);
    }
}

}  // namespace leanconv
