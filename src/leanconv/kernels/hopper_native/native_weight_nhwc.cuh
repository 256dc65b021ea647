// native_weight_nhwc: gradient of the filters on Hopper tensor cores (wgmma); float16 or bfloat16 in NHWC, sums in float32.
//
//   dw[k, tap, c] = sum over output pixels of dy[pixel, k] * x[pixel + tap, c]
//
// Requires   sm_90a; NHWC; rows of channels and filters of whole 16 bytes, with groups in each group; a filter's reach of at most
//            255 pixels, of 31 in volumes, and of 128 (16) beyond the padding, which is as long at most; strides up to 8.
// Volumes    slices of outputs are rows of dy, which lie behind each other; maps of x have five axes; the rows of all slices of
//            a filter are its rows.
// Numerics   products are exact; a block sums up to 2^17 pixels in the tensor core, which rounds toward zero: less than 2^-10 of
//            a sum of one sign is lost. NOTE: where taps share x, columns of the linear order without an output have zeros of
//            dy: an infinite pixel next to the image's edge makes NaN of the gradients of taps of its row that do not read it.
// CTA tile   64 * m_tiles * filter_groups filters x column_groups * blocks column blocks; 64 pixels a stage. A column block has
//            channel_block channels of one tap, or of the `taps` of a filter row that read neighbouring pixels. Split-K by
//            cluster (`split`, in the order of ranks), or through a workspace (`split_k`, added by split_k.cuh).
//            Both operands lie in shared memory as in the tensors, a pixel a row, and are MN-major: nothing is transposed.
// Sharing    pixels have a linear index with a row pitch, in which a tap further right reads one row of shared memory further.
//            So one wgmma has the columns of all taps, whose groups of channels begin a row (times the dilation) apart.
// Roles      warpgroups 0..n-1  consumers: wgmma with both operands in shared memory, stores
//            warpgroup n        producer: one thread issues all TMA copies, im2col boxes of x and of dy
// Pipelines  stages   full: bytes of the copies -> consumers, empty: a lane of each consumer warp -> producer
// One stage  wait full; for each k16 step a wgmma for every product and m_tile; commit; wait for the wgmma of the stage before
//            and release that one.
// Registers  m_tiles * (columns of a warpgroup) / 2 sums of 232 with one or two consumers, of 160 with three.
// Work       2 N P Q flops a weight; tensor cores start 4096 flops a cycle and multiprocessor. Copied for a stage of 128 filters
//            x 128 channels x 3 taps: 33 KiB in 1536 cycles; of 128 x 256 columns without sharing 48 KiB in 1024.
// Measured   figure: opencnn-nhwc-float16-wgrad native_weight_nhwc/16-bit mean = 1.16
//            figure: opencnn-nhwc-float16-wgrad native_weight_nhwc/16-bit least = 0.94
//            figure: opencnn-nhwc-float16-wgrad native_weight_nhwc-split-K/16-bit least = 1.17
// Explored   H200, e3ec3a9: burst, 3x3, 56x56, 256 channels and filters: 725 TFLOP/s; 64: 580; without sharing 656 and 490.
#pragma once

#include <device/element.cuh>
#include <device/epilogue.cuh>
#include <device/index.cuh>
#include <device/pipeline/rings.cuh>
#include <device/ptx/cluster.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/mma.cuh>
#include <device/ptx/sync.cuh>
#include <device/ptx/tma.cuh>
#include <kernels/hopper_native/accumulators.cuh>

namespace leanconv {

// The columns of the gradient, a matrix whose rows are filters: blocks of channels of a tap group, `taps` taps of a filter row.
template <class Problem, class Tuning>
struct WeightColumns {
    static constexpr int taps = Tuning::taps, block = Tuning::channel_block, width = taps * block;
    static constexpr int of_row = ceil_div(Problem::s, taps), of_group = ceil_div(Problem::group_c, block);
    static constexpr int count = filter_rows<Problem> * of_row * of_group;
    int r, s, channel;  // the first tap and channel; r counts the rows of all slices
    __device__ __forceinline__ explicit WeightColumns(int number)
        : r(number / of_group / of_row), s(number / of_group % of_row * taps), channel(number % of_group * block) {}
};

// A tile: filters change fastest, so that CTAs that run side by side read the same pixels.
template <class Problem, class Tuning>
struct WeightTile {
    using Columns = WeightColumns<Problem, Tuning>;
    static constexpr int filters = 64 * Tuning::m_tiles * Tuning::filter_groups, blocks = Tuning::blocks * Tuning::column_groups;
    static constexpr int of_filters = ceil_div(Problem::group_k, filters), of_columns = ceil_div(Columns::count, blocks);
    static constexpr int count = of_filters * of_columns * Problem::groups;
    int group, first_filter, first_block;
    __device__ __forceinline__ explicit WeightTile(int number)
        : group(number / (of_filters * of_columns)), first_filter(number % of_filters * filters),
          first_block(number / of_filters % of_columns * blocks) {}
};

// The stages of a block: those of all pixels are shared evenly.
template <class Problem, class Tuning>
struct StageShare {
    int first, end;
    __device__ __forceinline__ StageShare(long long batch, int pixels, int slice) {
        const long long all = (batch * (output_rows<Problem> * Tuning::row_pitch) + pixels - 1) / pixels;
        const int number = Tuning::split == 1 ? slice : slice * Tuning::split + static_cast<int>(cluster_rank());
        first = static_cast<int>(all * number / (Tuning::split_k * Tuning::split));
        end = static_cast<int>(all * (number + 1) / (Tuning::split_k * Tuning::split));
    }
};

// Shared memory: a ring of stages, each 64 pixels of dy in boxes of 64 filters and the pixels of x in boxes of a channel block;
// at the end the sums; the barriers.
template <class Problem, class Tuning>
struct WeightStages {
    using Tile = WeightTile<Problem, Tuning>;
    static constexpr int pixels = 64, dy_box = pixels * 128, dy_bytes = Tile::filters / 64 * dy_box;
    // Pixels of x that the taps of a row read, and bytes of a pixel's channels.
    static constexpr int window = pixels + (Tuning::taps - 1) * Problem::dilation_w, span = 2 * Tuning::channel_block;
    static_assert(span == 128 || span == 64, "a row is as long as a swizzle's span");
    static constexpr int x_box = ceil_div(window * span, 1024) * 1024, stage_bytes = dy_bytes + Tile::blocks * x_box;
    static constexpr int copied = dy_bytes + Tile::blocks * window * span;
    static constexpr int bytes = Tuning::stages * stage_bytes;
    static_assert(bytes == Tuning::barriers_at, "the host counts as many bytes");
    static constexpr int consumers = Tuning::filter_groups * Tuning::column_groups;
    // Products of a k16 step and 64 filters, and their columns: all blocks of one tap, or all taps of one block.
    static constexpr int products = Tuning::taps > 1 ? Tuning::blocks : 1;
    static constexpr int columns = Tuning::channel_block * (Tuning::taps > 1 ? Tuning::taps : Tuning::blocks);
    // Sums of a filter, so far apart that a warp's stores of pairs meet each bank once.
    static constexpr int tile_columns = Tile::blocks * Tuning::taps * Tuning::channel_block, sum_pitch = tile_columns + 8;
    static_assert(Tile::filters * sum_pitch * 4 <= bytes && tile_columns % 32 == 0, "the ring takes the sums of a tile");
    unsigned char* base;

    __device__ __forceinline__ WeightStages() : base(shared_memory_for_swizzles()) {}
    __device__ __forceinline__ unsigned char* dy(int stage, int box) const { return base + stage * stage_bytes + box * dy_box; }
    __device__ __forceinline__ unsigned char* x(int stage, int block) const {
        return base + stage * stage_bytes + dy_bytes + block * x_box;
    }
    __device__ __forceinline__ float* sums() const { return reinterpret_cast<float*>(base); }
    __device__ __forceinline__ Mbarrier* full(int stage) const { return reinterpret_cast<Mbarrier*>(base + bytes) + stage; }
    __device__ __forceinline__ Mbarrier* empty(int stage) const { return full(Tuning::stages) + stage; }
    // By one thread, before a barrier of the CTA.
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < Tuning::stages; ++i) {
            mbarrier_init(full(i), 1);
            mbarrier_init(empty(i), 4 * consumers);
        }
        fence_mbarrier_init();
    }
};

// One thread's copies of all stages.
template <class Problem, class Tuning>
__device__ __forceinline__ void copy_stages(const TensorMap& x, const TensorMap& dy, const WeightTile<Problem, Tuning>& tile,
                                            const WeightStages<Problem, Tuning>& ring,
                                            const StageShare<Problem, Tuning>& share) {
    using Ring = WeightStages<Problem, Tuning>;
    using Columns = WeightColumns<Problem, Tuning>;
    using D = Depth<Problem>;
    constexpr int row = Tuning::row_pitch, image = output_rows<Problem> * row;
    RingPlace<Tuning::stages> place;
    for (int stage = share.first; stage < share.end; ++stage, place.advance()) {
        const Offset<Problem> number = static_cast<Offset<Problem>>(stage) * Ring::pixels;
        const int n = static_cast<int>(number / image), rest = static_cast<int>(number % image), p = rest / row, q = rest % row;
        Mbarrier* const full = ring.full(place.stage);
        mbarrier_wait_parity(ring.empty(place.stage), place.parity ^ 1);
        mbarrier_arrive_expect_tx(full, Ring::copied);
        for (int i = 0; i < WeightTile<Problem, Tuning>::filters / 64; ++i)
            cp_async_bulk_tensor_im2col_shared_global(ring.dy(place.stage, i), dy, full,
                                                      tile.group * Problem::group_k + tile.first_filter + i * 64, q, p, n, 0, 0);
        for (int i = 0; i < WeightTile<Problem, Tuning>::blocks; ++i) {
            // NOTE: blocks past the last repeat it; what is computed from them is not stored.
            const Columns columns(min(tile.first_block + i, Columns::count - 1));
            const int c = tile.group * Problem::group_c + columns.channel, w = q * Problem::stride_w - Problem::pad_left;
            const auto right = static_cast<unsigned short>(columns.s * Problem::dilation_w);
            if constexpr (D::volume) {
                cp_async_bulk_tensor_im2col_shared_global(
                    ring.x(place.stage, i), x, full, c, w, p % Problem::p * Problem::stride_h - Problem::pad_top,
                    p / Problem::p * D::stride - D::pad, n, right,
                    static_cast<unsigned short>(columns.r % Problem::r * Problem::dilation_h),
                    static_cast<unsigned short>(columns.r / Problem::r * D::dilation));
            } else {
                cp_async_bulk_tensor_im2col_shared_global(ring.x(place.stage, i), x, full, c, w,
                                                          p * Problem::stride_h - Problem::pad_top, n, right,
                                                          static_cast<unsigned short>(columns.r * Problem::dilation_h));
            }
        }
    }
}

// The tile's sums, in shared memory, to the gradient: each CTA of a cluster has some of its filters. A thread has four
// neighbouring channels of every so many-th filter.
template <class Problem, class Tuning, class Result>
__device__ __forceinline__ void store_sums(Result* dw, const WeightTile<Problem, Tuning>& tile,
                                           const WeightStages<Problem, Tuning>& ring) {
    using Ring = WeightStages<Problem, Tuning>;
    using Columns = WeightColumns<Problem, Tuning>;
    constexpr int units = Ring::tile_columns / 4, rows = 128 * Ring::consumers / units;  // filters at once
    constexpr int share = ceil_div(WeightTile<Problem, Tuning>::filters, Tuning::split);
    static_assert(rows > 0, "a thread has four channels");
    const int thread = threadIdx.x, own = thread / units, column = thread % units * 4;
    const int block = tile.first_block + column / Columns::width;
    const Columns columns(block);
    const int s = columns.s + column / Columns::block % Columns::taps, channel = columns.channel + column % Columns::block;
    if (own >= rows || block >= Columns::count || s >= Problem::s || channel >= Problem::group_c) return;
    constexpr int64 of_filter = static_cast<int64>(filter_taps<Problem>) * Problem::group_c;
    Result* const to = dw + (static_cast<int64>(tile.group) * Problem::group_k + tile.first_filter) * of_filter +
                       (columns.r * Problem::s + s) * Problem::group_c + channel;
    const int first = Tuning::split == 1 ? 0 : static_cast<int>(cluster_rank()) * share;
    const int end = min(min(first + share, WeightTile<Problem, Tuning>::filters), Problem::group_k - tile.first_filter);
#pragma unroll 4
    for (int filter = first + own; filter < end; filter += rows) {
        const float* const from = ring.sums() + filter * Ring::sum_pitch + column;
        float total[4];
        if constexpr (Tuning::split == 1) {
            load_vector(total, from);
        } else {
            cluster_load_v4(total, from, 0);
#pragma unroll
            for (int rank = 1; rank < Tuning::split; ++rank) {
                float more[4];
                cluster_load_v4(more, from, rank);
#pragma unroll
                for (int i = 0; i < 4; ++i) total[i] += more[i];
            }
        }
        Result* const at = to + filter * of_filter;
        if constexpr (Tuning::split_k > 1) {
            store_vector(at, total);
        } else {
            Result four[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                four[i] = from_float<Result>(finish<Problem>(total[i], 0.0f, held_by<Problem>(at + i, true)));
            store_vector(at, four);
        }
    }
}

// One warpgroup's products of the tile, and their way to the gradient: through shared memory, where the ring was, so that
// rows of channels are stored.
template <class Problem, class Tuning, class Result>
__device__ __forceinline__ void sum_stages(Result* dw, const WeightTile<Problem, Tuning>& tile,
                                           const WeightStages<Problem, Tuning>& ring, const StageShare<Problem, Tuning>& share,
                                           int warpgroup) {
    using Ring = WeightStages<Problem, Tuning>;
    using Columns = WeightColumns<Problem, Tuning>;
    constexpr int m_tiles = Tuning::m_tiles, products = Ring::products, span = Ring::span;
    const int lane = threadIdx.x % 32, filters = warpgroup % Tuning::filter_groups * m_tiles;
    const int block = warpgroup / Tuning::filter_groups * Tuning::blocks;
    float sums[m_tiles][products][Ring::columns / 2] = {};
    RingPlace<Tuning::stages> place;
    int before = 0;
    wgmma_fence(sums);
    for (int stage = share.first; stage < share.end; ++stage) {
        mbarrier_wait_parity(ring.full(place.stage), place.parity);
        wgmma_fence();
        const TransposedDescriptor a = transposed_descriptor(ring.dy(place.stage, filters), 0, 1024, 128);
        const TransposedDescriptor b = transposed_descriptor(
            ring.x(place.stage, block), Tuning::taps > 1 ? Problem::dilation_w * span : Ring::x_box, 8 * span, span);
#pragma unroll
        for (int i = 0; i < Ring::pixels / 16; ++i)
#pragma unroll
            for (int product = 0; product < products; ++product)
#pragma unroll
                for (int m = 0; m < m_tiles; ++m)
                    multiply(typename Problem::element{}, sums[m][product], a + (m * Ring::dy_box + i * 2048),
                             b + (product * Ring::x_box + i * 16 * span), true);
        wgmma_commit_group();
        if (stage > share.first) {
            // The products of the stage before are done while these are under way.
            wgmma_wait_group<1>();
            mbarrier_arrive_warp(ring.empty(before), lane);
        }
        before = place.stage;
        place.advance();
    }
    wgmma_wait_group<0>(sums);
    constexpr int threads = 128 * Ring::consumers;
    barrier_sync(1, threads);  // the stages of this CTA have been read
    // A thread has two filters in eight, and a pair in every eight columns.
    float* const to = ring.sums() + (filters * 64 + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / 4) * Ring::sum_pitch +
                      block * Columns::width + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
        for (int product = 0; product < products; ++product)
#pragma unroll
            for (int i = 0; i < Ring::columns / 2; i += 2)
                *reinterpret_cast<float2*>(to + (m * 64 + i / 2 % 2 * 8) * Ring::sum_pitch + product * Ring::columns + i / 4 * 8) =
                    make_float2(sums[m][product][i], sums[m][product][i + 1]);
    if constexpr (Tuning::split > 1) meet_in_cluster();
    else barrier_sync(1, threads);
    store_sums<Problem, Tuning>(dw, tile, ring);
    if constexpr (Tuning::split > 1) meet_in_cluster();
}

// `dw` is the gradient, or with `split_k` above 1 room for as many partial sums.
template <class Problem, class Tuning, class Result>
__device__ __forceinline__ void native_weight_nhwc(const TensorMap& x, const TensorMap& dy, Result* dw, long long batch) {
    using Tile = WeightTile<Problem, Tuning>;
    using Ring = WeightStages<Problem, Tuning>;
    static_assert(Problem::nhwc, "channels of a pixel are adjacent");
    static_assert(Tuning::taps == 1 || Problem::stride_w == 1, "the taps of a row read neighbouring pixels");
    const Ring ring;
    const int number = static_cast<int>(blockIdx.x) / Tuning::split, slice = number / Tile::count;
    const Tile tile(number % Tile::count);
    if (threadIdx.x == 128 * Ring::consumers) {
        prefetch_tensormap(x);
        prefetch_tensormap(dy);
        ring.init();
    }
    __syncthreads();
    const StageShare<Problem, Tuning> share(batch, Ring::pixels, slice);
    // NOTE: the same number from the first lane: so the compiler knows that a warp's threads agree, and keeps descriptors in
    // uniform registers.
    const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
    if (warpgroup < Ring::consumers) {
        set_registers_up<Tuning::consumer_registers>();
        constexpr int64 all = static_cast<int64>(Problem::k) * Problem::group_c * filter_taps<Problem>;
        sum_stages<Problem, Tuning>(dw + slice * all, tile, ring, share, warpgroup);
    } else {
        set_registers_down<Tuning::producer_registers>();
        if (threadIdx.x % 128 == 0) copy_stages<Problem, Tuning>(x, dy, tile, ring, share);
        if constexpr (Tuning::split > 1) {
            // NOTE: the warp of the thread that copied converges before the barriers that all threads take part in.
            __syncwarp();
            meet_in_cluster();
            meet_in_cluster();
        }
    }
}

}  // namespace leanconv
