// The stages of native_gemm_pointwise: the tiles, the ring in shared memory, and the producers that fill it, filters by TMA, pixels
// by TMA, by copies of lanes, or through their registers.
#pragma once

#include <device/epilogue.cuh>
#include <device/index.cuh>
#include <device/pipeline/rings.cuh>
#include <device/ptx/cp_async.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/mma.cuh>
#include <device/ptx/sync.cuh>
#include <device/ptx/tma.cuh>
#include <kernels/hopper_native/odd_pixels.cuh>
#include <kernels/hopper_native/outputs_pointwise.cuh>

namespace leanconv {

// The tiles of the output: filters first, then groups, then pixels, so that CTAs side by side read the same pixels. The pixels of
// all images are columns behind one another: boxes of 64 that TMA copies, each of one image; single ones that lanes copy; or rows
// of outputs at a stride, in fours.
template <class Problem, class Tuning>
struct PointwiseTiles {
    static constexpr int pixels = output_pixels<Problem>;
    static constexpr bool by_tma = Tuning::copied == 8, strided = Tuning::copied == 0;
    // Of an odd number, columns of odd channels are one pixel behind (odd_pixels.cuh): an image has one more, and the last one of a
    // tile is not complete.
    static constexpr bool odd = !strided && pixels % 2 == 1;
    static constexpr int of_row = ceil_div(Problem::q, 4) * 4;  // columns of a row of outputs at a stride
    static constexpr int of_image = by_tma ? ceil_div(pixels, 64) * 64 : strided ? Problem::p * of_row : pixels + odd;
    static constexpr int step = Tuning::columns - 2 * odd;
    static constexpr int spread = Tuning::spread;  // columns of the pixels of a layer of stride 2 whose gradient this is, or 0
    static constexpr int filters = 64 * Tuning::m_tiles * Tuning::warpgroups, of_filters = ceil_div(Problem::group_k, filters);
    static constexpr int sharing = of_filters * Problem::groups;  // tiles of the same pixels
    int count;
    __device__ __forceinline__ explicit PointwiseTiles(long long batch)
        : count((static_cast<int>(batch) * of_image + step - 1) / step * sharing) {}
    static __device__ __forceinline__ int first_filter(int tile) { return tile % of_filters * filters; }
    static __device__ __forceinline__ int group(int tile) { return tile / of_filters % Problem::groups; }
    // The image and the pixel of a column of a tile, which need not exist.
    struct Place {
        int image, pixel;
    };
    static __device__ __forceinline__ Place place(int tile, int column) {
        const int number = tile / sharing * step + column, image = number / of_image, in_image = number - image * of_image;
        if constexpr (strided) {
            const int column_of_row = in_image % of_row;
            return {image, column_of_row < Problem::q ? in_image / of_row * Problem::q + column_of_row : pixels};
        } else {
            return {image, in_image};
        }
    }
};

// Shared memory: a ring of stages, each a tile's filters and pixels of some channels; a staging buffer for each consumer warp's
// outputs; the barriers.
template <class Problem, class Tuning>
struct PointwiseRing {
    using Tiles = PointwiseTiles<Problem, Tuning>;
    // Of 64 pixels a channel is a row of 128 bytes. Rows of a filter's channels, or of 64 filters of a channel as they lie in a
    // layer whose gradient this is.
    static constexpr int row_bytes = 2 * Tuning::channel_block, box_bytes = 128 * Tuning::channel_block;
    static constexpr int boxes = Tuning::columns / 64, filter_bytes = Tiles::filters * row_bytes;
    static_assert(row_bytes == 128 || row_bytes == 64 || row_bytes == 32, "a filter's row is as long as a swizzle's span");
    static_assert(filter_bytes % 1024 == 0 && box_bytes % 1024 == 0, "operands begin where swizzle patterns do");
    static_assert(Tuning::columns % 64 == 0, "boxes are whole");
    static constexpr int stage_bytes = filter_bytes + boxes * box_bytes;
    static constexpr bool by_tma = Tiles::by_tma;  // pixels too
    static constexpr int tma_bytes = by_tma ? stage_bytes : filter_bytes;  // of a stage
    static constexpr int all = ceil_div(Problem::group_c, Tuning::channel_block), share = ceil_div(all, Tuning::split);
    static_assert(share * (Tuning::split - 1) < all, "each CTA of a cluster has stages");
    static constexpr int threads = 128 * Tuning::warpgroups, producers = 128, outputs_at = Tuning::stages * stage_bytes;
    using Output = PointwiseOutput<Problem, Tiles>;
    static_assert(outputs_at + 4 * Tuning::warpgroups * Output::bytes == Tuning::barriers_at, "the host counts as many bytes");
    static_assert(Tuning::split == 1 || Tiles::filters * Tuning::columns * 4 <= outputs_at,
                  "the ring takes the sums of a tile");
    unsigned char* base;
    int first, end;

    __device__ __forceinline__ PointwiseRing() : base(shared_memory_for_swizzles()), first(0), end(all) {
        if constexpr (Tuning::split > 1) {
            first = static_cast<int>(cluster_rank()) * share;
            end = min(first + share, all);
        }
    }
    __device__ __forceinline__ unsigned char* filters_of(int stage) const { return base + stage * stage_bytes; }
    __device__ __forceinline__ unsigned char* pixels_of(int stage) const { return filters_of(stage) + filter_bytes; }
    // Operand A of 64 filters, and bytes from it to that of the next 16 channels and of the next 64 filters.
    static constexpr int filter_step = Tuning::mirrored ? 16 * 128 : 32, m64 = 64 * row_bytes;
    __device__ __forceinline__ Descriptor<Tuning::mirrored> filter_operand(int stage, int number) const {
        const unsigned char* const from = filters_of(stage) + number * m64;
        if constexpr (Tuning::mirrored) return transposed_descriptor(from, box_bytes, 1024, 128);
        else return matrix_descriptor(from, 0, 8 * row_bytes, row_bytes);
    }
    __device__ __forceinline__ TransposedDescriptor pixel_operand(int stage) const {
        return transposed_descriptor(pixels_of(stage), box_bytes, 1024, 128);
    }
    __device__ __forceinline__ unsigned char* outputs_of(int warp) const { return base + outputs_at + warp * Output::bytes; }
    __device__ __forceinline__ Mbarrier* full(int stage) const {
        return reinterpret_cast<Mbarrier*>(base + Tuning::barriers_at) + stage;
    }
    __device__ __forceinline__ Mbarrier* empty(int stage) const { return full(Tuning::stages) + stage; }
    // By one thread, before a barrier of the CTA.
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < Tuning::stages; ++i) {
            mbarrier_init(full(i), by_tma ? 1 : Tiles::strided ? 5 : 1 + producers);
            mbarrier_init(empty(i), 4 * Tuning::warpgroups);
        }
        fence_mbarrier_init();
    }
};

// One thread's copies of the filters of a stage: channels from `c` on.
template <class Problem, class Tuning>
__device__ __forceinline__ void copy_filters(unsigned char* to, const TensorMap& w, Mbarrier* full, int group, int filter, int c) {
    using Ring = PointwiseRing<Problem, Tuning>;
    if constexpr (Tuning::mirrored) {
#pragma unroll
        for (int i = 0; i < Ring::Tiles::filters / 64; ++i) {
            if constexpr (Ring::Tiles::odd)
                cp_async_bulk_tensor_shared_global(to + i * Ring::m64, w, full, filter + i * 64, c / 2, 0, group);
            else cp_async_bulk_tensor_shared_global(to + i * Ring::m64, w, full, filter + i * 64, c, group);
        }
    } else {
        cp_async_bulk_tensor_shared_global(to, w, full, c, filter, group);
    }
}

// By one thread: pixels by a tensor map of x.
template <class Problem, class Tuning>
__device__ __forceinline__ void copy_by_tma(const TensorMap& x, const TensorMap& w, const PointwiseTiles<Problem, Tuning>& tiles,
                                            const PointwiseRing<Problem, Tuning>& ring) {
    using Ring = PointwiseRing<Problem, Tuning>;
    if (threadIdx.x % 128 > 0) return;
    RingPlace<Tuning::stages> place;
    for (int tile = blockIdx.x / Tuning::split; tile < tiles.count; tile += gridDim.x / Tuning::split)
        for (int stage = ring.first; stage < ring.end; ++stage, place.advance()) {
            const int c = stage * Tuning::channel_block, group = tiles.group(tile);
            Mbarrier* const full = ring.full(place.stage);
            mbarrier_wait_parity(ring.empty(place.stage), place.parity ^ 1);
            mbarrier_arrive_expect_tx(full, Ring::tma_bytes);
            copy_filters<Problem, Tuning>(ring.filters_of(place.stage), w, full, group, tiles.first_filter(tile), c);
#pragma unroll
            for (int box = 0; box < Ring::boxes; ++box) {
                const auto at = tiles.place(tile, box * 64);
                cp_async_bulk_tensor_shared_global(ring.pixels_of(place.stage) + box * Ring::box_bytes, x, full, at.pixel, c, group,
                                                   at.image);
            }
        }
}

// The same where an image's pixels are no whole 16 bytes: by all lanes of the producers, `copied` pixels at a time, to the places
// of swizzled boxes. The lanes of a turn have all units of a box's row, of some rows, so that their addresses differ from turn to
// turn by constants: a copy is one instruction. Channels past the last are zeros.
template <class Problem, class Tuning>
struct LanePixels {
    using Ring = PointwiseRing<Problem, Tuning>;
    using Tiles = PointwiseTiles<Problem, Tuning>;
    using Odd = OddPixels<Tiles::odd ? Tuning::channel_block : 32>;
    using T = typename Problem::element;
    static constexpr int units = 64 / Tuning::copied, rows = Ring::producers / units;  // of a row; rows at once
    static constexpr int turns = Tuning::channel_block / rows;
    static_assert(rows <= 8 && rows % 2 == 0 && turns * rows == Tuning::channel_block, "a lane's channels are all even or all odd");
    int row, pixel, at;  // its first row, its pixel of a box, and where in a box that lies
    const T* from[Ring::boxes];  // its pixels of the tile, of its first channel; null where there are none

    __device__ __forceinline__ explicit LanePixels(int thread) : row(thread / units), pixel(thread % units * Tuning::copied) {
        const int line = Tiles::odd ? Odd::row(row) : row;
        at = line * 128 + (pixel / 8 ^ line % 8) * 16 + pixel % 8 * 2;
    }
    // Begins a tile, at one of its channels.
    __device__ __forceinline__ void begin(const T* x, long long batch, int tile, int c) {
        const int first = Tiles::group(tile) * Problem::group_c + c + row, moved = Tiles::odd ? row % 2 : 0;
#pragma unroll
        for (int box = 0; box < Ring::boxes; ++box) {
            const auto place = Tiles::place(tile, box * 64 + pixel);
            const bool exists = place.image < batch && place.pixel < Tiles::pixels;
            from[box] = exists ? x + ((static_cast<int64>(place.image) * Problem::c + first) * Tiles::pixels + place.pixel - moved)
                               : nullptr;
        }
    }
    // The row of a stage, of those after a lane's first, that it copies to in a turn.
    static __device__ __forceinline__ constexpr int line_of(int turn) { return Tiles::odd ? turn * rows / 2 : turn * rows; }
    // Copies a stage, of which `left` channels exist, and goes on to the next.
    __device__ __forceinline__ void copy(unsigned char* to, int left) {
#pragma unroll
        for (int box = 0; box < Ring::boxes; ++box) {
            if (!from[box]) continue;
#pragma unroll
            for (int turn = 0; turn < turns; ++turn) {
                // A lane's lines of one pattern differ in bits that no line adds to: what is swizzled differs by a constant too.
                unsigned char* const shared = to + ((at ^ line_of(turn) % 8 * 16) + line_of(turn) * 128 + box * Ring::box_bytes);
                const bool exists = Problem::group_c % Tuning::channel_block == 0 || row + turn * rows < left;
                const T* const own = exists ? from[box] + static_cast<int64>(turn * rows) * Tiles::pixels : from[box];
                if constexpr (Tuning::copied == 4) cp_async_8(shared, own, exists);
                else cp_async_4(shared, own, exists);
            }
            from[box] += static_cast<int64>(Tuning::channel_block) * Tiles::pixels;
        }
    }
};
template <class Problem, class Tuning>
__device__ __forceinline__ void copy_by_lanes(const typename Problem::element* x, const TensorMap& w,
                                              const PointwiseTiles<Problem, Tuning>& tiles,
                                              const PointwiseRing<Problem, Tuning>& ring, long long batch) {
    using Ring = PointwiseRing<Problem, Tuning>;
    const int thread = threadIdx.x % Ring::producers;
    LanePixels<Problem, Tuning> lanes(thread);
    RingPlace<Tuning::stages> place;
    for (int tile = blockIdx.x / Tuning::split; tile < tiles.count; tile += gridDim.x / Tuning::split) {
        lanes.begin(x, batch, tile, ring.first * Tuning::channel_block);
        for (int stage = ring.first; stage < ring.end; ++stage, place.advance()) {
            const int c = stage * Tuning::channel_block;
            Mbarrier* const full = ring.full(place.stage);
            mbarrier_wait_parity(ring.empty(place.stage), place.parity ^ 1);
            if (thread == 0) {
                mbarrier_arrive_expect_tx(full, Ring::tma_bytes);
                copy_filters<Problem, Tuning>(ring.filters_of(place.stage), w, full, tiles.group(tile), tiles.first_filter(tile), c);
            }
            lanes.copy(ring.pixels_of(place.stage), Problem::group_c - c);
            cp_async_mbarrier_arrive(full);
        }
    }
    // The threads leave when their copies have landed.
    cp_async_commit_group();
    cp_async_wait_group<0>();
}

// Outputs at a stride: every second pixel of a row. By all lanes of the producers: four outputs at a time, of which a lane loads the
// pixels, and those between, as they lie, and stores the pixels to where a copy would. While a stage is stored, the next is loaded.
template <class Problem, class Tuning>
struct StridedPixels {
    using Ring = PointwiseRing<Problem, Tuning>;
    using Tiles = PointwiseTiles<Problem, Tuning>;
    using T = typename Problem::element;
    static constexpr int rows = Ring::producers / 16, turns = Tuning::channel_block / rows;  // rows at once
    static constexpr int apart = Problem::h * Problem::w;  // pixels of a channel
    // Elements loaded at once: rows that are read are whole ones apart, and a channel is, so none lies behind the channel's end.
    static constexpr int piece = gcd(gcd(apart, Problem::stride_h * Problem::w), 8);
    static_assert(Problem::stride_w == 2, "every second pixel");
    int row, pixel, at;
    const T* from[Ring::boxes];
    int left[Ring::boxes];  // outputs of the row from the lane's first on

    __device__ __forceinline__ explicit StridedPixels(int thread) : row(thread / 16), pixel(thread % 16 * 4) {
        at = row * 128 + (pixel / 8 ^ row) * 16 + pixel % 8 * 2;
    }
    __device__ __forceinline__ void begin(const T* x, long long batch, int tile, int c) {
        const int first = Tiles::group(tile) * Problem::group_c + c + row;
#pragma unroll
        for (int box = 0; box < Ring::boxes; ++box) {
            const auto place = Tiles::place(tile, box * 64 + pixel);
            const bool exists = place.image < batch && place.pixel < Tiles::pixels;
            const int p = place.pixel / Problem::q, q = place.pixel % Problem::q;
            left[box] = exists ? Problem::q - q : 0;
            from[box] = x + ((static_cast<int64>(exists ? place.image : 0) * Problem::c + first) * apart +
                             (exists ? p * Problem::stride_h * Problem::w + 2 * q : 0));
        }
    }
    // What was loaded of a stage, as it lies.
    using Loaded = unsigned[Ring::boxes][turns][4];
    // The pixels of four outputs, of which `exist`.
    static __device__ __forceinline__ void load(unsigned (&w)[4], const T* pixels, int exist) {
        const auto* const words = reinterpret_cast<const unsigned*>(pixels);
        if constexpr (piece == 8) {
            if (exist > 0) load_read_only(w, words);
        } else if constexpr (piece == 4) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                unsigned pair[2] = {};
                if (exist > 2 * i) load_read_only(pair, words + 2 * i);
                w[2 * i] = pair[0], w[2 * i + 1] = pair[1];
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (exist > i) w[i] = piece == 2 ? __ldg(words + i) : __ldg(&pixels[2 * i].bits);
        }
    }
    // Loads a stage, of which `channels` exist, and goes on to the next.
    __device__ __forceinline__ void load_stage(Loaded& loaded, int channels) {
#pragma unroll
        for (int box = 0; box < Ring::boxes; ++box) {
#pragma unroll
            for (int turn = 0; turn < turns; ++turn) {
                const bool exists = Problem::group_c % Tuning::channel_block == 0 || row + turn * rows < channels;
#pragma unroll
                for (int i = 0; i < 4; ++i) loaded[box][turn][i] = 0;
                load(loaded[box][turn], from[box] + static_cast<int64>(turn * rows) * apart, exists ? left[box] : 0);
            }
            from[box] += static_cast<int64>(Tuning::channel_block) * apart;
        }
    }
    __device__ __forceinline__ void store_stage(unsigned char* to, const Loaded& loaded) const {
#pragma unroll
        for (int box = 0; box < Ring::boxes; ++box)
#pragma unroll
            for (int turn = 0; turn < turns; ++turn) {
                const auto& w = loaded[box][turn];
                *reinterpret_cast<uint2*>(to + at + turn * rows * 128 + box * Ring::box_bytes) =
                    make_uint2(__byte_perm(w[0], w[1], 0x5410), __byte_perm(w[2], w[3], 0x5410));
            }
    }
};
template <class Problem, class Tuning>
__device__ __forceinline__ void copy_strided(const typename Problem::element* x, const TensorMap& w,
                                             const PointwiseTiles<Problem, Tuning>& tiles,
                                             const PointwiseRing<Problem, Tuning>& ring, long long batch) {
    using Ring = PointwiseRing<Problem, Tuning>;
    using Strided = StridedPixels<Problem, Tuning>;
    const int thread = threadIdx.x % Ring::producers;
    Strided lanes(thread);
    RingPlace<Tuning::stages> place;
    for (int tile = blockIdx.x / Tuning::split; tile < tiles.count; tile += gridDim.x / Tuning::split) {
        lanes.begin(x, batch, tile, ring.first * Tuning::channel_block);
        // Loads the next stage, and stores this one.
        const auto pass = [&](int stage, const typename Strided::Loaded& loaded, typename Strided::Loaded& next) {
            const int c = stage * Tuning::channel_block;
            Mbarrier* const full = ring.full(place.stage);
            if (stage + 1 < ring.end) lanes.load_stage(next, Problem::group_c - c - Tuning::channel_block);
            mbarrier_wait_parity(ring.empty(place.stage), place.parity ^ 1);
            if (thread == 0) {
                mbarrier_arrive_expect_tx(full, Ring::tma_bytes);
                copy_filters<Problem, Tuning>(ring.filters_of(place.stage), w, full, tiles.group(tile), tiles.first_filter(tile), c);
            }
            lanes.store_stage(ring.pixels_of(place.stage), loaded);
            __syncwarp();
            mbarrier_arrive_warp(full, thread % 32);
            place.advance();
        };
        typename Strided::Loaded one, other;
        lanes.load_stage(one, Problem::group_c - ring.first * Tuning::channel_block);
        for (int stage = ring.first; stage < ring.end; stage += 2) {
            pass(stage, one, other);
            if (stage + 1 < ring.end) pass(stage + 1, other, one);
        }
    }
}

// The copies of all stages of the CTA's tiles. `x` is a tensor map, or the tensor where lanes copy.
template <class Problem, class Tuning, class Source>
__device__ __forceinline__ void produce(const Source& x, const TensorMap& w, const PointwiseTiles<Problem, Tuning>& tiles,
                                        const PointwiseRing<Problem, Tuning>& ring, long long batch) {
    using Tiles = PointwiseTiles<Problem, Tuning>;
    if constexpr (Tiles::by_tma) copy_by_tma<Problem, Tuning>(x, w, tiles, ring);
    else if constexpr (Tiles::strided) copy_strided<Problem, Tuning>(x, w, tiles, ring, batch);
    else copy_by_lanes<Problem, Tuning>(x, w, tiles, ring, batch);
}

}  // namespace leanconv
