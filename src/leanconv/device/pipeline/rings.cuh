// The tiles of the tensor-core kernels, and the rings of stages between their producers and consumers.
#pragma once

#include <device/epilogue.cuh>
#include <kernels/hopper_fp32/filter_layout.cuh>
#include <device/index.cuh>
#include <device/ptx/cluster.cuh>
#include <device/ptx/mbarrier.cuh>
#include <device/ptx/shared.cuh>

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

// Flat pixels, or pairs of them, that a copy brings: 32 where Tuning names no number.
template <class Tuning> __host__ __device__ constexpr int granule_of(decltype(Tuning::granule)*) { return Tuning::granule; }
template <class Tuning> __host__ __device__ constexpr int granule_of(...) { return 32; }

// How output pixels are numbered: as they lie in memory, and flat pixels of NCHW with each image rounded up to granules;
// so are pairs, where Problem::q counts these.
template <class Problem, class Tuning>
struct TensorPixels {
    static constexpr int image = Problem::p * Problem::q, granule = granule_of<Tuning>(nullptr);
    static constexpr bool rounded = Tuning::flat && !Problem::chwn && spacing_of<Tuning>(nullptr) == 0;
    static constexpr int of_image = rounded ? ceil_div(image, granule) * granule : image;
    static_assert(!Tuning::flat || Phase<Problem>::whole, "flat pixels are those of whole images");
    long long batch;

    __device__ __forceinline__ Offset<Problem> count() const { return static_cast<Offset<Problem>>(batch) * of_image; }
    // The place of a number's output, whose count is 0 where there is none.
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
    // Its row and column, 0 where there is none: those of any pixel do.
    __device__ __forceinline__ void position(Offset<Problem> number, int& p, int& q) const {
        if constexpr (rounded) {
            const int in_image = static_cast<int>(number % of_image);
            p = in_image / Problem::q, q = in_image % Problem::q;
        } else {
            const Pixel<Problem> pixel(number < count() ? number : 0, batch);
            p = pixel.p, q = pixel.q;
        }
    }
};

// How far below its window's corner, and how far right of it, the pixel lies that a tap sees; of a segment the first one.
template <class Problem, class Tuning>
__device__ __forceinline__ int tap_down(int tap) {
    using F = TensorFilters<Problem, Tuning>;
    return F::row_of(tap, F::seen_rows) * Problem::dilation_h;
}
template <class Problem, class Tuning>
__device__ __forceinline__ int tap_right(int tap) {
    using F = TensorFilters<Problem, Tuning>;
    const int of_row = F::segment_of(tap, F::seen_rows);
    if constexpr (F::rest > 0) return 3 * of_row;
    return F::states > 1 ? segment_begin(of_row, Problem::s) : of_row * Problem::dilation_w;
}

// How far from an output pixel's number that of this pixel lies where both images are of one size; `apart` is the distance
// of neighbours.
template <class Problem, class Tuning>
__device__ __forceinline__ int flat_shift(int tap, int apart) {
    const int down = tap_down<Problem, Tuning>(tap) - Problem::pad_top;
    const int right = tap_right<Problem, Tuning>(tap) - Problem::pad_left;
    return (down * Problem::w + right) * apart;
}

// Blocks of a cluster, side by side, that receive stages of filters together, as each copies a part to all of them: 1 where
// Tuning names none.
template <class Tuning> __host__ __device__ constexpr int receivers_of(decltype(Tuning::receivers)*) { return Tuning::receivers; }
template <class Tuning> __host__ __device__ constexpr int receivers_of(...) { return 1; }

// Whether the pixels of a tile are of one row of all images: false where Tuning does not say.
template <class Tuning> __host__ __device__ constexpr bool one_row_of(decltype(Tuning::one_row)*) { return Tuning::one_row; }
template <class Tuning> __host__ __device__ constexpr bool one_row_of(...) { return false; }

// The tiles of the output: filters change fastest, so that blocks that run side by side read the same pixels. Tiles of pixels
// are rounded up to as many as receive filters together; what lies past the last pixel is zero, and not stored.
// Where tiles are of one row of outputs, which sees the same rows of filters in all images, their pixels are numbered within
// it. Rows that see most of the filter come first: those in the middle of the image, then outwards.
template <class Problem, class Tuning>
struct TensorTiles {
    using F = TensorFilters<Problem, Tuning>;
    static constexpr int pixels = 64 * Tuning::warpgroups / sharers_of(F::states);
    static constexpr int receivers = receivers_of<Tuning>(nullptr);
    static constexpr bool both = false;  // outputs of pairs, side by side
    static constexpr bool one_row = one_row_of<Tuning>(nullptr);
    TensorPixels<Problem, Tuning> numbers;
    Offset<Problem> of_row, of_pixels;
    __device__ __forceinline__ explicit TensorTiles(long long batch)
        : numbers{batch}, of_row(tiles_of(one_row ? static_cast<Offset<Problem>>(batch) * Problem::q : numbers.count())),
          of_pixels(one_row ? of_row * Problem::p : of_row) {}
    static __device__ __forceinline__ Offset<Problem> tiles_of(Offset<Problem> count) {
        return (count + (pixels * receivers - 1)) / (pixels * receivers) * receivers;
    }
    // The row of outputs of a tile.
    __device__ __forceinline__ int row(Offset<Problem> tile) const {
        const int i = static_cast<int>((Problem::groups == 1 ? tile / F::tiles : tile / F::tiles % of_pixels) / of_row);
        return (Problem::p - 1) / 2 + (i % 2 == 1 ? (i + 1) / 2 : -(i / 2));
    }
    // The stages of filters that such a row sees, whole or in part: `from`, and the one behind the last.
    static __device__ __forceinline__ int first_stage(int row) {
        const int above = Problem::pad_top - row * Problem::stride_h;
        const int outside = above > 0 ? ceil_div(above, Problem::dilation_h) : 0;
        return min(outside * F::of_row * F::of_tap / F::pieces, F::stages - 1);
    }
    static __device__ __forceinline__ int end_stage(int row) {
        const int below = Problem::h - 1 + Problem::pad_top - row * Problem::stride_h;
        const int seen = below < 0 ? 0 : min(below / Problem::dilation_h + 1, Problem::r);
        return max(min(ceil_div(seen * F::of_row * F::of_tap, F::pieces), F::stages), first_stage(row) + 1);
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

// Input pixels that lie side by side in shared memory for `pairs` pairs of outputs (pair_states.cuh): two each, and two
// more at the end and wherever a row ends. The first pair's number is a multiple of `pairs`. Problem::q counts pairs.
template <class Problem>
__host__ __device__ constexpr int pair_lines(int pairs) {
    return ceil_div(2 * pairs + 2 + (Problem::q - gcd(pairs, Problem::q) + pairs - 1) / Problem::q * 2, 8) * 8;
}

// And for `pixels` outputs, all taps of a filter row: one each, and s - 1 more at the end and wherever a row ends.
template <class Problem>
__host__ __device__ constexpr int row_lines(int pixels) {
    const int ends = (Problem::q - gcd(pixels, Problem::q) + pixels - 1) / Problem::q;
    return ceil_div(pixels + (Problem::s - 1) * (1 + ends), 8) * 8;
}

// Where flat planes of pairs begin, and how long they are: all pixels of an image that windows see, of which those above and
// below are zeros, or those that the windows of `pairs` of them see, from the first one's on, if they are fewer. Multiples of
// four pixels; lanes' channels lie in different banks.
template <class Problem>
__host__ __device__ constexpr int flat_begin() {
    return -ceil_div(Problem::pad_top * Problem::w + Problem::pad_left, 4) * 4;
}
template <class Problem>
__host__ __device__ constexpr int flat_plane(int pairs) {
    const int right = segment_begin(segments_of(Problem::s) - 1, Problem::s) - Problem::pad_left;
    const int last = ((Problem::r - 1) * Problem::dilation_h - Problem::pad_top) * Problem::w + right + 3;
    const int image = Problem::p * Problem::q, seen = pairs < image ? 2 * pairs + 2 : 2 * image;
    const int plane = ceil_div(seen - 2 + last + 1 - flat_begin<Problem>(), 4) * 4;
    return plane % 16 == 0 ? plane + 4 : plane;
}
// Where that of a tile's first image begins, which is not before the windows of its first pair.
template <class Problem>
__device__ __forceinline__ int flat_begin(int first_pair, int pairs) {
    return flat_begin<Problem>() + (pairs < Problem::p * Problem::q ? 2 * first_pair & ~3 : 0);
}

// Shared memory: the ring of pixels, the ring of filters, and the barriers of both.
template <class Problem, class Tuning>
struct TensorRings {
    using F = TensorFilters<Problem, Tuning>;
    static constexpr int pixels = TensorTiles<Problem, Tuning>::pixels, pitch = pixels + 4;
    static constexpr bool by_maps = Tuning::rows || Tuning::flat;
    // Images that a tile's pixels may be of, whose planes of 32 channels are a stage.
    static constexpr int image = Problem::p * Problem::q, images = (image - gcd(pixels, image) + pixels - 1) / image + 1;
    static constexpr int plane = !F::planes ? 0 : F::states > 1 ? flat_plane<Problem>(pixels) : Problem::h * Problem::w;
    static constexpr int plane_bytes = 32 * plane * 4;
    // Flat columns of a granule and what its windows see besides, and the 32 of them that a copy brings; 32 channels of the
    // tile.
    static constexpr int granule = TensorPixels<Problem, Tuning>::granule;
    static constexpr int flat_pitch = F::states > 1 ? 2 * granule + 8 : granule + 4, granule_bytes = flat_pitch * 32 * 4;
    static constexpr int lines = F::states > 1 ? pair_lines<Problem>(pixels) : F::by_row ? row_lines<Problem>(pixels) : pixels;
    static_assert(!F::by_row || lines == row_lines_of<Tuning>(nullptr), "a copy brings what a row of taps sees");
    static constexpr int half_bytes = Tuning::flat ? pixels / granule * granule_bytes : lines * 128;
    static constexpr int pixel_bytes = F::planes ? ceil_div(images * plane_bytes, 1024) * 1024
                                       : by_maps ? 2 * half_bytes
                                                 : split_depth * pitch * 4;
    static_assert(pixel_bytes % 1024 == 0 && F::stage_bytes % 1024 == 0, "stages begin where swizzle patterns do");
    static constexpr int bytes = Tuning::pixel_stages * pixel_bytes + Tuning::filter_stages * F::stage_bytes;
    static constexpr int receivers = receivers_of<Tuning>(nullptr);
    static constexpr int shared_bytes =
        bytes + (2 * Tuning::pixel_stages + (receivers > 1 ? 3 : 2) * Tuning::filter_stages) * 8;
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
    // Complete when all receivers can take the stage.
    __device__ __forceinline__ Mbarrier* filters_wanted(int stage) const {
        return filters_free(Tuning::filter_stages) + stage;
    }
    // By one thread, before a barrier of the block. A warp declares a stage free when its own products are done.
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < Tuning::pixel_stages; ++i) {
            mbarrier_init(pixels_full(i), by_maps || F::planes ? 1 : producer_warps);
            mbarrier_init(pixels_free(i), consumer_warps);
        }
        for (int i = 0; i < Tuning::filter_stages; ++i) {
            mbarrier_init(filters_full(i), 1);
            mbarrier_init(filters_free(i), consumer_warps / sharers_of(F::states));
            if (receivers > 1) mbarrier_init(filters_wanted(i), receivers);
        }
        fence_mbarrier_init();
    }
};

// The tiles of one block: tile after tile. Where blocks work in clusters of `split`, those tiles that are left when each block
// has had equally many are shared: each cluster has one of them at most, and each block a share of its stages.
template <class Problem, class Tuning>
struct TileWalk {
    using F = TensorFilters<Problem, Tuning>;
    static constexpr int split = Tuning::split, all = F::seen_stages, receivers = receivers_of<Tuning>(nullptr);
    static constexpr int share = ceil_div(all / F::tap_stages, split) * F::tap_stages;
    static constexpr bool one_row = TensorTiles<Problem, Tuning>::one_row;
    static_assert(share * (split - 1) < all, "each block of a cluster has stages");
    static_assert(split == 1 || receivers == 1, "a cluster shares filters or tiles");
    static_assert(!one_row || (F::tap_stages == 1 && F::heights == 1 && !F::planes), "a row of outputs sees rows of filters");
    const TensorTiles<Problem, Tuning>& tiles;
    const Offset<Problem> count, step, left;  // `left`: the first tile that is shared
    Offset<Problem> tile;
    int first, end;  // stages of the tile
    bool together;

    __device__ __forceinline__ explicit TileWalk(const TensorTiles<Problem, Tuning>& tiles)
        : tiles(tiles), count(tiles.count()), step(gridDim.x), left(split > 1 ? count / step * step : count),
          tile(blockIdx.x), first(0), end(all), together(false) {
        if (split > 1 && tile >= left) meet();
        else see();
    }
    // Which stages the tile has.
    __device__ __forceinline__ void see() {
        if constexpr (one_row) {
            const int row = tiles.row(place());
            first = tiles.first_stage(row), end = tiles.end_stage(row);
        }
    }
    __device__ __forceinline__ bool valid() const { return tile < count; }
    // The tile. Receivers of the same filters have tiles of pixels side by side.
    __device__ __forceinline__ Offset<Problem> place() const {
        if constexpr (receivers == 1) return tile;
        const Offset<Problem> first = tile / receivers;
        return (first / F::tiles * receivers + tile % receivers) * F::tiles + first % F::tiles;
    }
    // Whether the cluster shares a tile.
    __device__ __forceinline__ bool meets() const { return split > 1 && left + blockIdx.x / split < count; }
    __device__ __forceinline__ bool is_last() const {
        return split == 1 ? tile + step >= count : together || (tile + step >= left && !meets());
    }
    __device__ __forceinline__ void advance() {
        if constexpr (split == 1) {
            tile += step;
            see();
        } else if (together) {
            tile = count;
        } else {
            tile += step;
            if (tile >= left) meet();
            else see();
        }
    }
    __device__ __forceinline__ void meet() {
        if constexpr (split > 1) {
            together = true;
            tile = left + blockIdx.x / split;
            if constexpr (one_row) {
                // NOTE: each block of the cluster has a stage: the host splits by the tile that has fewest (`_least_stages`).
                see();
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

// The stages of planes that a consumer reads. A stage of filters meets two pieces of the reduction: two taps of the same 32
// channels, or, where the number of taps is odd, the last of these channels and the first of the next.
template <class Problem, class Tuning>
struct PlaneStages {
    using F = TensorFilters<Problem, Tuning>;
    using Rings = TensorRings<Problem, Tuning>;
    static constexpr int taps = F::taps, pieces = taps * F::of_tap;
    static_assert(Tuning::seen_pixels == Rings::images * Rings::plane, "a stage has all images that a tile's pixels are of");
    RingPlace<Tuning::pixel_stages> next, taken;
    int at = 0;                  // where the one that is read lies
    int tap = 0, tap_taken = 0;  // of the stage of filters that is loaded next, and of the one that is let go next

    int first = 0, end = 0;      // stages of filters of the block's share of a tile

    __device__ __forceinline__ void begin(const TileWalk<Problem, Tuning>& walk) {
        first = walk.first, end = walk.end;
        tap = tap_taken = 2 * first % taps;
    }
    static __device__ __forceinline__ int after(int tap, int more) {
        return taps == 1 ? 0 : tap + more < taps ? tap + more : tap + more - taps;
    }
    // NOTE: past the last piece filters are zeros, and pixels must be numbers.
    static __device__ __forceinline__ bool exists(int stage, int half) {
        return pieces % 2 == 0 || 2 * stage + half < pieces;
    }
    // The tap of a piece, whose planes have landed.
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
    // Lets those go that this stage was the last to read. NOTE: not before the products that take the values.
    __device__ __forceinline__ void release(const Rings& rings, int stage, int lane) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int now = half == 0 ? tap_taken : after(tap_taken, 1);
            const bool is_last = Tuning::split > 1 && 2 * stage + half == min(2 * end, pieces) - 1;
            if (exists(stage, half) && (now == taps - 1 || is_last)) {
                if (lane == 0) mbarrier_arrive(rings.pixels_free(taken.stage));
                taken.advance();
            }
        }
        tap_taken = after(tap_taken, 2);
    }
};

}  // namespace leanconv
