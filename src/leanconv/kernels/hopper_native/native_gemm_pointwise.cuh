// native_gemm_pointwise: 1x1 convolution on Hopper tensor cores (wgmma): a matrix product for each image; float16 or bfloat16 in
// NCHW, sums in float32.
//
//   y[n, k, p] = sum over c of w[k, c] * x[n, c, p]        p: pixel of an image
//
// Filters are the rows of a product and pixels its columns. So both operands are read as they lie, x MN-major and w K-major, and
// the sums of a filter are neighbours in y: nothing is transposed, no launch packs filters.
//
// Requires   sm_90a; NCHW; filters of one tap, stride 1, no padding; rows of w of whole 16 bytes.
// Gradient   of an input: w is read as it lies too, an operand that is MN-major. Where the number of pixels is odd, the filters of
//            a group must be even.
// Odd        numbers of pixels: even and odd channels have sums of their own (odd_pixels.cuh). Forward, operand A comes from
//            registers then: filters' rows are loaded and sorted there.
// Numerics   as native_gemm_16bit: exact products, sums stay in the tensor core over the whole reduction; of an odd number of
//            pixels two sums are added at the end.
// CTA tile   64 * m_tiles * warpgroups filters x `segments` times `columns` pixels, each segment of one image; a stage has
//            channel_block channels of both. Persistent. Where tiles are few, a cluster of `split` CTAs shares the reduction of one
//            (split-K), and each CTA stores its share of the pixels.
// Roles      warpgroups 0..n-1  consumers: wgmma with both operands in shared memory, epilogue, stores
//            warpgroup n        producer: one thread copies filters by TMA. Pixels come by TMA too where an image has whole 16
//                               bytes of them, a row of a channel each; else all lanes copy them (cp.async), 8 or 4 bytes at a
//                               time, to where TMA would.
// Pipelines  stages   full: bytes of the copies, and producer warps with cp.async -> consumers
//                     empty: a lane of each consumer warp -> producer
// One stage  wait full; for each k16 step m_tiles * segments wgmma, m_tiles more where `columns` are no multiple of 64; commit;
//            wait for the wgmma of the stage before and release that one. With operand A in registers: load it, wait for the wgmma of
//            the stage before, sort it, multiply.
// Columns    past the last pixel of an image hold what lay there before, or its neighbours; they are multiplied and not stored.
// Registers  m_tiles * segments * columns / 2 sums, of an odd number of pixels twice as many, of 232 where TMA copies pixels, else
//            of 216.
// Work       2 C/g flops an output; peak 4096 flops a cycle and multiprocessor. Copied for a stage of 64 channels: 128 bytes a
//            filter, and 8 KiB for each 64 pixels: for 128 x 256 at full speed 48 bytes a cycle. A wgmma of 64 filters x n pixels x
//            16 takes n / 2 cycles and reads (64 + n) * 32 bytes.
#pragma once

#include <device/element.cuh>
#include <device/epilogue.cuh>
#include <device/index.cuh>
#include <device/pipeline/rings.cuh>
#include <device/ptx/copy_pairs.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/mma.cuh>
#include <device/ptx/sync.cuh>
#include <device/ptx/tma.cuh>
#include <kernels/hopper_native/accumulators.cuh>
#include <kernels/hopper_native/odd_pixels.cuh>
#include <kernels/hopper_native/outputs_pointwise.cuh>

namespace leanconv {

// The tiles of the output: filters first, then groups, then segments of images, so that CTAs side by side read the same pixels.
template <class Problem, class Tuning>
struct PointwiseTiles {
    static constexpr int pixels = Problem::w;
    // Of an odd number, columns of odd channels are one pixel behind (odd_pixels.cuh).
    static constexpr bool odd = pixels % 2 == 1;
    static constexpr int step = odd ? Tuning::columns - 8 : Tuning::columns, of_image = ceil_div(pixels, step);
    static constexpr int filters = 64 * Tuning::m_tiles * Tuning::warpgroups, of_filters = ceil_div(Problem::group_k, filters);
    static constexpr int sharing = of_filters * Problem::groups;  // tiles of the same images and pixels
    int count;
    __device__ __forceinline__ explicit PointwiseTiles(long long batch)
        : count((static_cast<int>(batch) * of_image + Tuning::segments - 1) / Tuning::segments * sharing) {}
    static __device__ __forceinline__ int first_filter(int tile) { return tile % of_filters * filters; }
    static __device__ __forceinline__ int group(int tile) { return tile / of_filters % Problem::groups; }
    // The image of a segment of a tile, and its first pixel there.
    static __device__ __forceinline__ int image(int tile, int segment) {
        return (tile / sharing * Tuning::segments + segment) / of_image;
    }
    static __device__ __forceinline__ int first_pixel(int tile, int segment) {
        return (tile / sharing * Tuning::segments + segment) % of_image * step;
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
    static constexpr int boxes = ceil_div(Tuning::columns, 64), filter_bytes = Tiles::filters * row_bytes;
    static_assert(row_bytes == 128 || row_bytes == 64 || row_bytes == 32, "a filter's row is as long as a swizzle's span");
    static_assert(filter_bytes % 1024 == 0 && box_bytes % 1024 == 0, "operands begin where swizzle patterns do");
    static constexpr int segment_bytes = boxes * box_bytes, stage_bytes = filter_bytes + Tuning::segments * segment_bytes;
    static constexpr bool by_tma = Tuning::copied == 8;  // pixels too
    static constexpr int tma_bytes = by_tma ? stage_bytes : filter_bytes;  // of a stage
    static constexpr int all = ceil_div(Problem::group_c, Tuning::channel_block), share = ceil_div(all, Tuning::split);
    static_assert(share * (Tuning::split - 1) < all, "each CTA of a cluster has stages");
    static constexpr int threads = 128 * Tuning::warpgroups, outputs_at = Tuning::stages * stage_bytes;
    using Output = PointwiseOutput<Problem, Tiles>;
    static_assert(outputs_at + 4 * Tuning::warpgroups * Output::bytes == Tuning::barriers_at, "the host counts as many bytes");
    static_assert(Tuning::split == 1 || Tiles::filters * Tuning::segments * Tuning::columns * 4 <= outputs_at,
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
    __device__ __forceinline__ unsigned char* pixels_of(int stage, int segment) const {
        return filters_of(stage) + filter_bytes + segment * segment_bytes;
    }
    // Operand A of 64 filters, and bytes from it to that of the next 16 channels and of the next 64 filters.
    static constexpr int filter_step = Tuning::mirrored ? 16 * 128 : 32, m64 = 64 * row_bytes;
    __device__ __forceinline__ Descriptor<Tuning::mirrored> filter_operand(int stage, int number) const {
        const unsigned char* const from = filters_of(stage) + number * m64;
        if constexpr (Tuning::mirrored) return transposed_descriptor(from, box_bytes, 1024, 128);
        else return matrix_descriptor(from, 0, 8 * row_bytes, row_bytes);
    }
    // Operand B of a segment, from one of its boxes on.
    __device__ __forceinline__ TransposedDescriptor pixel_operand(int stage, int segment, int box) const {
        return transposed_descriptor(pixels_of(stage, segment) + box * box_bytes, box_bytes, 1024, 128);
    }
    __device__ __forceinline__ unsigned char* outputs_of(int warp) const { return base + outputs_at + warp * Output::bytes; }
    __device__ __forceinline__ Mbarrier* full(int stage) const {
        return reinterpret_cast<Mbarrier*>(base + Tuning::barriers_at) + stage;
    }
    __device__ __forceinline__ Mbarrier* empty(int stage) const { return full(Tuning::stages) + stage; }
    // By one thread, before a barrier of the CTA.
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < Tuning::stages; ++i) {
            mbarrier_init(full(i), by_tma ? 1 : 5);
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

// The copies of all stages of the CTA's tiles, by one thread: pixels by a tensor map of x.
template <class Problem, class Tuning>
__device__ __forceinline__ void produce(const TensorMap& x, const TensorMap& w, const PointwiseTiles<Problem, Tuning>& tiles,
                                        const PointwiseRing<Problem, Tuning>& ring, long long) {
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
            for (int segment = 0; segment < Tuning::segments; ++segment)
#pragma unroll
                for (int box = 0; box < Ring::boxes; ++box)
                    cp_async_bulk_tensor_shared_global(ring.pixels_of(place.stage, segment) + box * Ring::box_bytes, x, full,
                                                       tiles.first_pixel(tile, segment) + box * 64, c, group,
                                                       tiles.image(tile, segment));
        }
}

// The same where an image's pixels are no whole 16 bytes: by all lanes of the producers, `copied` pixels at a time, to the places
// of a swizzled box. A lane has the same pixels of every few channels. Channels past the last are zeros.
template <class Problem, class Tuning>
struct LanePixels {
    using Ring = PointwiseRing<Problem, Tuning>;
    using Tiles = PointwiseTiles<Problem, Tuning>;
    using Odd = OddPixels<Tiles::odd ? Tuning::channel_block : 32>;
    static constexpr int copies = ceil_div(Tuning::columns, Tuning::copied);  // of a row
    static constexpr int rows = 128 / copies < Tuning::channel_block ? 128 / copies : Tuning::channel_block;  // at once
    static constexpr int steps = ceil_div(Tuning::channel_block, rows), late = 2;
    static_assert(copies <= 128, "a row is copied at once");
    // A stage is announced when `late` more have been begun. Their places are free when the consumers are done with the stage
    // before the one that they wait for.
    static_assert(late + 2 <= Tuning::stages, "or producers and consumers wait for each other");
    int row, pixel, place;  // its first row, its pixel of a segment, and where that lies in a row, but for the swizzle

    __device__ __forceinline__ explicit LanePixels(int thread)
        : row(thread / copies), pixel(thread % copies * Tuning::copied), place(pixel / 64 * Ring::box_bytes + pixel % 8 * 2) {}
    __device__ __forceinline__ void copy(unsigned char* to, const typename Problem::element* x, long long batch, int image, int first,
                                         int group, int c) const {
        const bool there = image < batch && first + pixel < Tiles::pixels;
        const int64 channel = static_cast<int64>(there ? image : 0) * Problem::c + group * Problem::group_c + c;
        const typename Problem::element* const from = x + (channel * Tiles::pixels + first + pixel);
#pragma unroll 4
        for (int step = 0; step < steps; ++step) {
            const int line = step * rows + row;
            if (!there || row >= rows || (steps * rows > Tuning::channel_block && line >= Tuning::channel_block)) continue;
            const bool exists = Problem::group_c % Tuning::channel_block == 0 || c + line < Problem::group_c;
            const int to_line = Tiles::odd ? Odd::row(line) : line, moved = Tiles::odd ? line % 2 : 0;
            unsigned char* const at = to + place + to_line * 128 + (pixel / 8 % 8 ^ to_line % 8) * 16;
            const typename Problem::element* const own = exists ? from + (static_cast<int64>(line) * Tiles::pixels - moved) : x;
            if constexpr (Tuning::copied == 4) cp_async_8(at, own, exists);
            else cp_async_4(at, own, exists);
        }
    }
};
template <class Problem, class Tuning>
__device__ __forceinline__ void produce(const typename Problem::element* x, const TensorMap& w,
                                        const PointwiseTiles<Problem, Tuning>& tiles,
                                        const PointwiseRing<Problem, Tuning>& ring, long long batch) {
    using Ring = PointwiseRing<Problem, Tuning>;
    using Lanes = LanePixels<Problem, Tuning>;
    const int thread = threadIdx.x % 128, lane = thread % 32;
    const Lanes lanes(thread);
    RingPlace<Tuning::stages> place, before;
    int open = 0;  // stages whose copies are not announced
    const auto announce = [&] {
        fence_proxy_async();
        __syncwarp();
        mbarrier_arrive_warp(ring.full(before.stage), lane);
        before.advance();
        --open;
    };
    for (int tile = blockIdx.x / Tuning::split; tile < tiles.count; tile += gridDim.x / Tuning::split)
        for (int stage = ring.first; stage < ring.end; ++stage, place.advance()) {
            const int c = stage * Tuning::channel_block, group = tiles.group(tile);
            mbarrier_wait_parity(ring.empty(place.stage), place.parity ^ 1);
            if (thread == 0) {
                mbarrier_arrive_expect_tx(ring.full(place.stage), Ring::tma_bytes);
                copy_filters<Problem, Tuning>(ring.filters_of(place.stage), w, ring.full(place.stage), group,
                                              tiles.first_filter(tile), c);
            }
#pragma unroll
            for (int segment = 0; segment < Tuning::segments; ++segment)
                lanes.copy(ring.pixels_of(place.stage, segment), x, batch, tiles.image(tile, segment),
                           tiles.first_pixel(tile, segment), group, c);
            cp_async_commit_group();
            if (++open > Lanes::late) {
                cp_async_wait_group<Lanes::late>();
                announce();
            }
        }
    cp_async_wait_group<0>();
    while (open > 0) announce();
}

// A warpgroup's sums of a tile: of whole boxes of each segment, and of the pixels of a segment behind the last of these.
template <class Problem, class Tuning>
struct PointwiseSums {
    using Ring = PointwiseRing<Problem, Tuning>;
    using Tiles = PointwiseTiles<Problem, Tuning>;
    using T = typename Problem::result;
    static constexpr int whole = Tuning::columns / 64 * 64, rest = Tuning::columns - whole, count = whole / 2;
    static constexpr int m_tiles = Tuning::m_tiles, segments = Tuning::segments, split = Tuning::split;
    static_assert(rest == 0 || (segments == 1 && split == 1), "several segments, and shares of one, are whole boxes");
    static constexpr bool odd = Tiles::odd;
    using Odd = OddPixels<odd ? Tuning::channel_block : 32>;
    static constexpr bool in_registers = odd && !Tuning::mirrored;  // operand A
    static_assert(rest == 0 || !odd, "odd channels have sums of whole boxes");
    float sums[m_tiles][segments][count], more[m_tiles][rest > 0 ? rest / 2 : 1];
    // Of odd channels, where their columns are one pixel behind.
    float behind[odd ? m_tiles : 1][odd ? segments : 1][odd ? count : 1];
    unsigned a[in_registers ? 2 * m_tiles : 1][Odd::pairs][4];

    __device__ __forceinline__ void fence() {
        if constexpr (rest > 0) wgmma_fence(sums, more);
        else if constexpr (odd) wgmma_fence(sums, behind);
        else wgmma_fence(sums);
    }
    // Waits for all products.
    __device__ __forceinline__ void finish() {
        if constexpr (rest > 0) wgmma_wait_group<0>(sums, more);
        else if constexpr (in_registers) wgmma_wait_group<0>(sums, behind, a);
        else if constexpr (odd) wgmma_wait_group<0>(sums, behind);
        else wgmma_wait_group<0>(sums);
        if constexpr (odd) {
#pragma unroll
            for (int m = 0; m < m_tiles; ++m)
#pragma unroll
                for (int segment = 0; segment < segments; ++segment)
                    add_moved(sums[m][segment], behind[m][segment], threadIdx.x % 32);
        }
    }
    // The products of a stage: first of even channels, then of odd ones.
    __device__ __forceinline__ void multiply_sorted(const Ring& ring, int stage, int warpgroup, bool add) {
#pragma unroll
        for (int i = 0; i < 2 * Odd::pairs; ++i)
#pragma unroll
            for (int m = 0; m < m_tiles; ++m)
#pragma unroll
                for (int segment = 0; segment < segments; ++segment) {
                    const int parity = i / Odd::pairs, pair = i % Odd::pairs;
                    auto& to = parity ? behind[m][segment] : sums[m][segment];
                    const auto b = ring.pixel_operand(stage, segment, 0) + 16 * 128 * i;
                    if constexpr (in_registers) {
                        multiply(typename Problem::element{}, to, a[2 * m + parity][pair], b, add || pair > 0);
                    } else {
                        const auto filters = ring.filter_operand(stage, warpgroup * m_tiles + m) + Ring::filter_step * i;
                        multiply(typename Problem::element{}, to, filters, b, add || pair > 0);
                    }
                }
    }
    // Waits for the products of the stage before, and loads the filters of this one.
    __device__ __forceinline__ void load_filters(const Ring& ring, int stage, int warpgroup) {
        OddFilters<Tuning::channel_block> loaded[m_tiles];
#pragma unroll
        for (int m = 0; m < m_tiles; ++m)
            loaded[m].load(ring.filters_of(stage) + (warpgroup * m_tiles + m) * Ring::m64, threadIdx.x / 32 % 4, threadIdx.x % 32);
        wgmma_wait_group<0>(sums, behind, a);
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) loaded[m].sort(a[2 * m], a[2 * m + 1]);
        wgmma_fence(sums, behind, a);
    }
    // The products of a stage.
    __device__ __forceinline__ void multiply_stage(const Ring& ring, int stage, int warpgroup, bool add) {
#pragma unroll
        for (int i = 0; i < Tuning::channel_block / 16; ++i)
#pragma unroll
            for (int m = 0; m < m_tiles; ++m) {
                const auto a = ring.filter_operand(stage, warpgroup * m_tiles + m) + Ring::filter_step * i;
#pragma unroll
                for (int segment = 0; segment < segments; ++segment)
                    multiply(typename Problem::element{}, sums[m][segment], a,
                             ring.pixel_operand(stage, segment, 0) + 16 * 128 * i, add || i > 0);
                if constexpr (rest > 0)
                    multiply(typename Problem::element{}, more[m], a, ring.pixel_operand(stage, 0, whole / 64) + 16 * 128 * i,
                             add || i > 0);
            }
    }
    // To the output; those of a cluster are added before, and each CTA stores its share of the pixels.
    __device__ __forceinline__ void store(const typename Ring::Output& output, T* y, const Ring& ring, long long batch,
                                          int tile, int warpgroup) const {
        const int first_k = Tiles::first_filter(tile) + warpgroup * m_tiles * 64 + threadIdx.x / 32 % 4 * 16;
        if constexpr (split == 1) {
#pragma unroll
            for (int m = 0; m < m_tiles; ++m)
#pragma unroll
                for (int segment = 0; segment < segments; ++segment) {
                    const int k = first_k + m * 64;
                    if (Tiles::image(tile, segment) >= batch || k >= Problem::group_k) continue;
                    output.template store<0, whole>(sums[m][segment], y, tile, segment, 0, k);
                    if constexpr (rest > 0) output.template store<0, rest>(more[m], y, tile, segment, whole, k);
                }
        } else {
            // The ring is not needed any more: this is the only tile of the cluster.
            constexpr int all = segments * count, columns = 2 * all / split, piece = columns < whole ? columns : whole;
            static_assert(whole % piece == 0 && columns % piece == 0, "a share is some segments, or a part of one");
            float* const own = reinterpret_cast<float*>(ring.base);
            barrier_sync(1, Ring::threads);  // the stages of this CTA have been read
#pragma unroll
            for (int i = 0; i < m_tiles * all; ++i)
                own[i * Ring::threads + threadIdx.x] = sums[i / all][i % all / count][i % count];
            meet_in_cluster();
            float added[m_tiles][all / split];
            add_shares<split, Ring::threads>(added, own);
            meet_in_cluster();
            const int first = static_cast<int>(cluster_rank()) * columns;
#pragma unroll
            for (int m = 0; m < m_tiles; ++m)
                store_pieces<piece>(output, added[m], y, batch, tile, first_k + m * 64, first);
        }
    }
    // Sums of a share, whose first column of the tile is `first`: some columns of one segment at a time.
    template <int piece, int number = 0, int count>
    static __device__ __forceinline__ void store_pieces(const typename Ring::Output& output, const float (&sums)[count],
                                                        T* y, long long batch, int tile, int k, int first) {
        const int column = first + number * piece, segment = column / whole;
        if (Tiles::image(tile, segment) < batch && k < Problem::group_k)
            output.template store<number * piece / 2, piece>(sums, y, tile, segment, column % whole, k);
        if constexpr ((number + 1) * piece / 2 < count)
            store_pieces<piece, number + 1>(output, sums, y, batch, tile, k, first);
    }
};

// One warpgroup's products of all tiles of the CTA.
template <class Problem, class Tuning>
__device__ __forceinline__ void consume(Bias<Problem> bias, typename Problem::result* y,
                                        const PointwiseTiles<Problem, Tuning>& tiles,
                                        const PointwiseRing<Problem, Tuning>& ring, long long batch, int warpgroup) {
    using Ring = PointwiseRing<Problem, Tuning>;
    const int lane = threadIdx.x % 32;
    const typename Ring::Output output{
        lane, reinterpret_cast<typename Problem::result*>(ring.outputs_of(threadIdx.x / 32)), bias};
    RingPlace<Tuning::stages> place;
    for (int tile = blockIdx.x / Tuning::split; tile < tiles.count; tile += gridDim.x / Tuning::split) {
        PointwiseSums<Problem, Tuning> tile_sums;
        int before = 0;
        tile_sums.fence();
        for (int stage = ring.first; stage < ring.end; ++stage) {
            mbarrier_wait_parity(ring.full(place.stage), place.parity);
            if constexpr (tile_sums.in_registers) tile_sums.load_filters(ring, place.stage, warpgroup);
            else wgmma_fence();
            if constexpr (tile_sums.odd) tile_sums.multiply_sorted(ring, place.stage, warpgroup, stage > ring.first);
            else tile_sums.multiply_stage(ring, place.stage, warpgroup, stage > ring.first);
            wgmma_commit_group();
            if (stage > ring.first) {
                // The products of the stage before are done while these are under way.
                if constexpr (!tile_sums.in_registers) wgmma_wait_group<1>();
                mbarrier_arrive_warp(ring.empty(before), lane);
            }
            before = place.stage;
            place.advance();
        }
        tile_sums.finish();
        mbarrier_arrive_warp(ring.empty(before), lane);
        tile_sums.store(output, y, ring, batch, tile, warpgroup);
    }
}

// `x` is a tensor map, or the tensor where images have no whole 16 bytes of pixels.
template <class Problem, class Tuning, class Source>
__device__ __forceinline__ void native_gemm_pointwise(const Source& x, const TensorMap& w, Bias<Problem> bias,
                                                      typename Problem::result* y, long long batch) {
    static_assert(!Problem::nhwc && !Problem::chwn && Problem::h == 1, "the pixels of a channel are one row");
    const PointwiseRing<Problem, Tuning> ring;
    const PointwiseTiles<Problem, Tuning> tiles(batch);
    if (threadIdx.x == 0) ring.init();
    __syncthreads();
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == Tuning::warpgroups) {
        set_registers_down<Tuning::producer_registers>();
        produce<Problem, Tuning>(x, w, tiles, ring, batch);
        if constexpr (Tuning::split > 1) {
            // NOTE: the warp of the thread that copied converges before the barriers that all threads take part in.
            __syncwarp();
            meet_in_cluster();
            meet_in_cluster();
        }
    } else {
        set_registers_up<Tuning::consumer_registers>();
        consume<Problem, Tuning>(bias, y, tiles, ring, batch, warpgroup);
    }
}

}  // namespace leanconv
