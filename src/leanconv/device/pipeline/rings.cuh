// The tiles of the tensor-core kernels, the walk of a CTA over them, and the rings of stages between producers and consumers.
#pragma once

#include <device/index.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/sync.cuh>
#include <device/pipeline/filter_layout.cuh>

namespace leanconv {

// A stage of a ring, and the parity of its barriers' phase.
template <int stages>
struct RingPlace {
    int stage = 0;
    unsigned parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

// Where the CTAs of a cluster synchronise: consumers and producers arrive from different places in the code.
__device__ __forceinline__ void meet_in_cluster() { cluster_barrier(); }

// The linear index of output pixels: as they lie in memory; linear pixels of NCHW with each image rounded up to whole boxes.
// Pairs have one too, where Problem::q counts pairs.
template <class Problem, class Tuning>
struct TensorPixels {
    static constexpr int image = output_pixels<Problem>, box_width = Tuning::box_width;
    static constexpr bool rounded = Tuning::linear && !Problem::chwn && Tuning::spacing == 0;
    static constexpr int of_image = rounded ? ceil_div(image, box_width) * box_width : image;
    static_assert(!Tuning::linear || Phase<Problem>::whole, "linear pixels are those of whole images");
    long long batch;

    __device__ __forceinline__ Offset<Problem> count() const { return static_cast<Offset<Problem>>(batch) * of_image; }
    // The place of an output by its index; its count is 0 where there is none.
    __device__ __forceinline__ Place place(Offset<Problem> number) const {
        if constexpr (rounded) {
            const Offset<Problem> n = number / of_image;
            const int in_image = static_cast<int>(number - n * of_image);
            return {static_cast<int64>(n) * Problem::k * image + in_image, number < count() && in_image < image};
        } else {
            const FlatPixels<Problem> pixels(batch, Phase<Problem>(0));
            if (number >= pixels.count) return {0, 0};
            if constexpr (Problem::nhwc && Phase<Problem>::whole) return {number, 1};
            return pixels.place(number);
        }
    }
    // Its row and column; 0 where there is none.
    __device__ __forceinline__ void position(Offset<Problem> number, int& p, int& q) const {
        if constexpr (rounded) {
            const int in_image = static_cast<int>(number % of_image);
            p = in_image / Problem::q, q = in_image % Problem::q;
            if constexpr (Depth<Problem>::volume) p %= Problem::p;
        } else {
            const Pixel<Problem> pixel(number < count() ? number : 0, batch);
            p = pixel.p, q = pixel.q;
        }
    }
};

// Slices behind the window's corner, rows below it, and columns right of it, of the pixel that a tap reads; of a segment the
// first one.
template <class Problem, class Tuning>
__device__ __forceinline__ int tap_deep(int tap) {
    using F = TensorFilters<Problem, Tuning>;
    return F::row_of(tap, F::read_rows) / Problem::r * Depth<Problem>::dilation;
}
template <class Problem, class Tuning>
__device__ __forceinline__ int tap_down(int tap) {
    using F = TensorFilters<Problem, Tuning>;
    static_assert(!Depth<Problem>::volume || F::output_rows == 1, "output rows of one slice share no filter rows");
    int row = F::row_of(tap, F::read_rows);
    if constexpr (Depth<Problem>::volume) row %= Problem::r;
    return row * Problem::dilation_h;
}
template <class Problem, class Tuning>
__device__ __forceinline__ int tap_right(int tap) {
    using F = TensorFilters<Problem, Tuning>;
    const int of_row = F::segment_of(tap, F::read_rows);
    if constexpr (F::rest > 0) return 3 * of_row;
    return F::states > 1 ? segment_begin(of_row, Problem::s) : of_row * Problem::dilation_w;
}

// How far its index lies from the output pixel's where both images are of one size; neighbours are `apart` apart.
template <class Problem, class Tuning>
__device__ __forceinline__ int linear_shift(int tap, int apart) {
    int down = tap_down<Problem, Tuning>(tap) - Problem::pad_top;
    if constexpr (Depth<Problem>::volume) down += (tap_deep<Problem, Tuning>(tap) - Depth<Problem>::pad) * Problem::h;
    const int right = tap_right<Problem, Tuning>(tap) - Problem::pad_left;
    return (down * Problem::w + right) * apart;
}

// The CTA tiles of the output. Filters change fastest, so that CTAs that run side by side read the same pixels. Tiles of pixels
// are rounded up to the CTAs of a multicast; pixels past the last one are zero, and not stored.
// With `one_row` a tile has pixels of one output row of all images, indexed within it, which use the same filter rows. Rows
// that use most of the filter come first: those in the middle of the image, then outwards.
template <class Problem, class Tuning>
struct TensorTiles {
    using F = TensorFilters<Problem, Tuning>;
    static constexpr int pixels = 64 * Tuning::warpgroups / sharers_of(F::states);
    static constexpr int multicast = Tuning::multicast;
    static constexpr bool both = false;  // outputs of a pair are stored together
    static constexpr bool one_row = Tuning::one_row;
    TensorPixels<Problem, Tuning> numbers;
    Offset<Problem> of_row, of_pixels;
    __device__ __forceinline__ explicit TensorTiles(long long batch)
        : numbers{batch}, of_row(tiles_of(one_row ? static_cast<Offset<Problem>>(batch) * Problem::q : numbers.count())),
          of_pixels(one_row ? of_row * Problem::p : of_row) {}
    static __device__ __forceinline__ Offset<Problem> tiles_of(Offset<Problem> count) {
        return (count + (pixels * multicast - 1)) / (pixels * multicast) * multicast;
    }
    __device__ __forceinline__ int row(Offset<Problem> tile) const {
        const int i = static_cast<int>((Problem::groups == 1 ? tile / F::tiles : tile / F::tiles % of_pixels) / of_row);
        return (Problem::p - 1) / 2 + (i % 2 == 1 ? (i + 1) / 2 : -(i / 2));
    }
    // The stages of filters that this row uses, whole or in part: the first, and the one behind the last.
    static __device__ __forceinline__ int first_stage(int row) {
        const int above = Problem::pad_top - row * Problem::stride_h;
        const int outside = above > 0 ? ceil_div(above, Problem::dilation_h) : 0;
        return min(outside * F::of_row * F::tap_blocks / F::stage_blocks, F::stages - 1);
    }
    static __device__ __forceinline__ int end_stage(int row) {
        const int below = Problem::h - 1 + Problem::pad_top - row * Problem::stride_h;
        const int rows = below < 0 ? 0 : min(below / Problem::dilation_h + 1, Problem::r);
        return max(min(ceil_div(rows * F::of_row * F::tap_blocks, F::stage_blocks), F::stages), first_stage(row) + 1);
    }
    __device__ __forceinline__ Offset<Problem> count() const { return of_pixels * (F::tiles * Problem::groups); }
    static __device__ __forceinline__ int filters(Offset<Problem> tile) { return static_cast<int>(tile % F::tiles); }
    __device__ __forceinline__ int group(Offset<Problem> tile) const {
        return Problem::groups == 1 ? 0 : static_cast<int>(tile / F::tiles / of_pixels);
    }
    __device__ __forceinline__ Offset<Problem> first_pixel(Offset<Problem> tile) const {
        const Offset<Problem> number = tile / F::tiles;
        if constexpr (one_row) return number % of_row * pixels;
        return (Problem::groups == 1 ? number : number % of_pixels) * pixels;
    }
};

// Where resident images of pairs begin: a multiple of four pixels, so that taps above the image read zeros.
template <class Problem>
__host__ __device__ constexpr int resident_begin() {
    return -ceil_div(Problem::pad_top * Problem::w + Problem::pad_left, 4) * 4;
}
// Where a tile's first image begins: not before the windows of its first pair.
template <class Problem>
__device__ __forceinline__ int resident_begin(int first_pair, int pairs) {
    return resident_begin<Problem>() + (pairs < Problem::p * Problem::q ? 2 * first_pair & ~3 : 0);
}

// Whether lanes copy rows of channels, which no tensor map describes where pixels are no multiples of 16 bytes.
template <class Problem, class Tuning>
__host__ __device__ constexpr bool rows_by_lanes() { return Tuning::rows && Problem::c % 4 != 0; }

// Shared memory: the ring of pixels, the ring of filters, and the barriers of both.
template <class Problem, class Tuning>
struct TensorRings {
    using F = TensorFilters<Problem, Tuning>;
    static constexpr int pixels = TensorTiles<Problem, Tuning>::pixels, pitch = pixels + 4;
    static constexpr bool by_maps = Tuning::linear || (Tuning::rows && !rows_by_lanes<Problem, Tuning>());
    // Images that a tile's pixels may belong to; 32 channels of them are a resident stage.
    static constexpr int image = output_pixels<Problem>, images = (image - gcd(pixels, image) + pixels - 1) / image + 1;
    static constexpr int channel_pixels = Tuning::resident_pixels / images, image_bytes = 32 * channel_pixels * 4;
    static_assert(Tuning::resident_pixels == images * channel_pixels, "a stage has all images of a tile");
    // A box of linear pixels: columns of `box_width` pixels, or pairs, and what their windows read besides; 32 channels.
    static constexpr int box_width = TensorPixels<Problem, Tuning>::box_width;
    static constexpr int linear_pitch = F::states > 1 ? 2 * box_width + 8 : box_width + 4, box_bytes = linear_pitch * 32 * 4;
    static constexpr int pixel_bytes = Tuning::pixel_stage_bytes, half_bytes = pixel_bytes / 2;
    static_assert(pixel_bytes % 1024 == 0 && F::stage_bytes % 1024 == 0, "stages begin where swizzle patterns do");
    static constexpr int bytes = Tuning::pixel_stages * pixel_bytes + Tuning::filter_stages * F::stage_bytes;
    static constexpr int multicast = Tuning::multicast;
    static constexpr int shared_bytes =
        bytes + (2 * Tuning::pixel_stages + (multicast > 1 ? 3 : 2) * Tuning::filter_stages) * 8;
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
    __device__ __forceinline__ Mbarrier* pixels_empty(int stage) const { return pixels_full(Tuning::pixel_stages) + stage; }
    __device__ __forceinline__ Mbarrier* filters_full(int stage) const {
        return pixels_empty(Tuning::pixel_stages) + stage;
    }
    __device__ __forceinline__ Mbarrier* filters_empty(int stage) const {
        return filters_full(Tuning::filter_stages) + stage;
    }
    // Complete when the stage is empty in all CTAs of the multicast.
    __device__ __forceinline__ Mbarrier* multicast_empty(int stage) const {
        return filters_empty(Tuning::filter_stages) + stage;
    }
    // By one thread, before a barrier of the CTA. Each warp releases a stage when its own products are done.
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < Tuning::pixel_stages; ++i) {
            mbarrier_init(pixels_full(i), by_maps || F::resident ? 1 : producer_warps);
            mbarrier_init(pixels_empty(i), consumer_warps);
        }
        for (int i = 0; i < Tuning::filter_stages; ++i) {
            mbarrier_init(filters_full(i), 1);
            mbarrier_init(filters_empty(i), consumer_warps / sharers_of(F::states));
            if (multicast > 1) mbarrier_init(multicast_empty(i), multicast);
        }
        fence_mbarrier_init();
    }
};

// The tiles of one CTA, one after the other. With split-K, the tiles that are left when all CTAs have had equally many are
// shared: each cluster of `split` CTAs has one of them at most, and each CTA a share of its stages.
template <class Problem, class Tuning>
struct TileWalk {
    using F = TensorFilters<Problem, Tuning>;
    static constexpr int split = Tuning::split, all = F::read_stages, multicast = Tuning::multicast;
    static constexpr int share = ceil_div(all / F::tap_stages, split) * F::tap_stages;
    static constexpr bool one_row = TensorTiles<Problem, Tuning>::one_row;
    static_assert(share * (split - 1) < all, "each CTA of a cluster has stages");
    static_assert(split == 1 || multicast == 1, "a cluster shares filters or tiles");
    static_assert(!one_row || (F::tap_stages == 1 && F::output_rows == 1 && !F::resident),
                  "an output row uses whole filter rows");
    const TensorTiles<Problem, Tuning>& tiles;
    const Offset<Problem> count, step, left;  // `left`: the first tile that is shared
    Offset<Problem> tile;
    int first, end;  // stages of the tile
    bool shared_tile;

    __device__ __forceinline__ explicit TileWalk(const TensorTiles<Problem, Tuning>& tiles)
        : tiles(tiles), count(tiles.count()), step(gridDim.x), left(split > 1 ? count / step * step : count),
          tile(blockIdx.x), first(0), end(all), shared_tile(false) {
        if (split > 1 && tile >= left) take_share();
        else find_stages();
    }
    __device__ __forceinline__ void find_stages() {
        if constexpr (one_row) {
            const int row = tiles.row(place());
            first = tiles.first_stage(row), end = tiles.end_stage(row);
        }
    }
    __device__ __forceinline__ bool valid() const { return tile < count; }
    // The output tile. The CTAs of a multicast have tiles of neighbouring pixels.
    __device__ __forceinline__ Offset<Problem> place() const {
        if constexpr (multicast == 1) return tile;
        const Offset<Problem> first = tile / multicast;
        return (first / F::tiles * multicast + tile % multicast) * F::tiles + first % F::tiles;
    }
    __device__ __forceinline__ bool shares_tile() const { return split > 1 && left + blockIdx.x / split < count; }
    __device__ __forceinline__ bool is_last() const {
        return split == 1 ? tile + step >= count : shared_tile || (tile + step >= left && !shares_tile());
    }
    __device__ __forceinline__ void advance() {
        if constexpr (split == 1) {
            tile += step;
            find_stages();
        } else if (shared_tile) {
            tile = count;
        } else {
            tile += step;
            if (tile >= left) take_share();
            else find_stages();
        }
    }
    __device__ __forceinline__ void take_share() {
        if constexpr (split > 1) {
            shared_tile = true;
            tile = left + blockIdx.x / split;
            if constexpr (one_row) {
                // NOTE: each CTA of the cluster has a stage: the host splits by the tile that has fewest (`_least_stages`).
                find_stages();
                const int rank = static_cast<int>(cluster_rank()), stages = end - first;
                end = first + (rank + 1) * stages / split;
                first += rank * stages / split;
            } else {
                first = static_cast<int>(cluster_rank()) * share;
                end = first + share < all ? first + share : all;
            }
        }
    }
};

// The stages of resident images that a consumer reads. A stage of filters has two channel blocks: two taps of the same 32
// channels; or, where the number of taps is odd, the last tap of these channels and the first of the next.
template <class Problem, class Tuning>
struct ResidentStages {
    using F = TensorFilters<Problem, Tuning>;
    using Rings = TensorRings<Problem, Tuning>;
    static constexpr int taps = F::taps, blocks = taps * F::tap_blocks;
    RingPlace<Tuning::pixel_stages> next, release_place;
    int at = 0;                    // where the current one lies
    int tap = 0, release_tap = 0;  // of the stage of filters that is loaded next, and of the one that is released next
    int first = 0, end = 0;        // stages of filters of the CTA's share of a tile


    __device__ __forceinline__ void begin(const TileWalk<Problem, Tuning>& walk) {
        first = walk.first, end = walk.end;
        tap = release_tap = 2 * first % taps;
    }
    static __device__ __forceinline__ int after(int tap, int more) {
        return taps == 1 ? 0 : tap + more < taps ? tap + more : tap + more - taps;
    }
    // NOTE: past the last channel block filters are zeros, and pixels must be finite.
    static __device__ __forceinline__ bool exists(int stage, int half) {
        return blocks % 2 == 0 || 2 * stage + half < blocks;
    }
    // The tap of a channel block, whose pixels have landed.
    __device__ __forceinline__ int enter(const Rings& rings, int stage, int half) {
        const int now = half == 0 ? tap : after(tap, 1);
        if (exists(stage, half) && (now == 0 || (Tuning::split > 1 && half == 0 && stage == first))) {
            mbarrier_wait_parity(rings.pixels_full(next.stage), next.parity);
            at = next.stage * Rings::pixel_bytes;
            next.advance();
        }
        if (half == 1) tap = after(tap, 2);
        return now;
    }
    // Releases those that this stage was the last to read. NOTE: after the products that read the values were issued.
    __device__ __forceinline__ void release(const Rings& rings, int stage, int lane) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int now = half == 0 ? release_tap : after(release_tap, 1);
            const bool is_last = Tuning::split > 1 && 2 * stage + half == min(2 * end, blocks) - 1;
            if (exists(stage, half) && (now == taps - 1 || is_last)) {
                mbarrier_arrive_warp(rings.pixels_empty(release_place.stage), lane);
                release_place.advance();
            }
        }
        release_tap = after(release_tap, 2);
    }
};

}  // namespace leanconv
