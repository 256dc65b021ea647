// native_weight_kmajor: gradient of the filters on Hopper tensor cores (wgmma); float16 or bfloat16 in NCHW, both operands
// loaded by TMA, sums in float32.
//
//   dw[k, c, r, s] = sum over rows h and columns j of x of x[h, j, c] * dy[p, j + pad - s * dilation, k]
//
// Requires   sm_90a; NCHW; rows of x and of dy of whole 16 bytes; a stride along the row of 1.
// Volumes    each output slice is an image; a tile has taps of one slice of the filters.
// Numerics   products are exact; a block sums up to 2^17 pixels in the tensor core, which rounds toward zero: less than 2^-10 of
//            a sum of one sign is lost. Columns outside the image are multiplied as zeros, and rows behind the last output, up
//            to the stage's end. NOTE: so an infinite pixel of x or dy makes NaN of the gradients of taps that do not read it,
//            of its channel or filter: one next to the image's edge, and of x also one that no window reads.
// CTA tile   filters x channels x (tap_rows x columns of taps) of weights; a stage has `rows` output rows x `columns` columns of
//            x. Pixels are the reduction and neighbours in memory: both operands are K-major, nothing is transposed. Split-K by
//            cluster (`split`, in the order of ranks), or through a workspace (`split_k`, added by split_k.cuh).
// Sharing    a stage has each row of x once, channels of it as a tile of swizzled rows. The rows that the taps of a filter
//            column read lie behind each other: they are the columns of one wgmma. Of taps along a row dy moves instead of x,
//            in registers, by words and by a byte permutation: an operand in shared memory, and what TMA copies, begin at
//            multiples of 16 bytes.
// Roles      warpgroups 0..n-1  consumers: dy of 64 filters by 32-bit loads, moved for each filter column; wgmma with x; stores
//            warpgroup n        producer: one thread issues both TMA copies of a stage
// Pipelines  stages   full: bytes of the copies -> consumers, empty: a lane of each consumer warp -> producer
// One stage  wait full; for each k16 step: 4 or 8 loads and 0 or 4 permutations for a filter column, wgmma for each of these;
//            commit; wait for the step before; in the first step release the stage before.
// Registers  tap_columns * tap_rows * channels / 2 sums, 8 * tap_columns of fragments, of 232 with two consumers, of 160 with
//            three.
// Work       2 N P W flops a weight, W a multiple of 16; tensor cores start 4096 flops a cycle and multiprocessor. 64 filters,
//            64 channels, 3x3, two rows of 64 columns: 54 KiB copied in 2304 cycles. A wgmma reads 64 bytes of x a cycle; loads
//            of dy 21 to 43 more, of 128.
#pragma once

#include <device/element.cuh>
#include <device/epilogue.cuh>
#include <device/index.cuh>
#include <device/pipeline/rings.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/mma.cuh>
#include <device/ptx/sync.cuh>
#include <device/ptx/tma.cuh>
#include <kernels/hopper_native/accumulators.cuh>

namespace leanconv {

// A tile of weights: taps first, then channels, then filters. Of volumes the taps are those of one slice of the filters.
template <class Problem, class Tuning>
struct WeightTile : SliceOf<Depth<Problem>::volume> {
    static constexpr int filters = 64 * Tuning::filter_groups, channels = Tuning::channels;
    static constexpr int tap_rows = Tuning::tap_rows, tap_columns = Tuning::tap_columns * Tuning::column_groups;
    static constexpr int of_columns = ceil_div(Problem::s, tap_columns), of_taps = ceil_div(Problem::r, tap_rows) * of_columns;
    static constexpr int of_channels = ceil_div(Problem::group_c, channels), of_filters = ceil_div(Problem::group_k, filters);
    static constexpr int slices = FilterDepth<Problem>::t;
    static constexpr int of_group = of_taps * of_channels * of_filters * slices, count = of_group * Problem::groups;
    int group, first_filter, first_channel, r, s;
    __device__ __forceinline__ explicit WeightTile(int number)
        : group(number / of_group),
          first_filter(number / (of_taps * of_channels) % of_filters * filters),
          first_channel(number / of_taps % of_channels * channels),
          r(number % of_taps / of_columns * tap_rows),
          s(number % of_columns * tap_columns) {
        if constexpr (Depth<Problem>::volume) this->slice = number % of_group / (of_taps * of_channels * of_filters);
    }
    // Where a row of dy begins in shared memory, from the first column of x on: a multiple of 16 bytes before what the last
    // tap of the tile reads.
    __device__ __forceinline__ int window_begin() const {
        return (Problem::pad_left - (s + tap_columns - 1) * Problem::dilation_w) & ~7;
    }
};

// The stages of a block: those of all images are shared evenly. A stage is some rows of outputs, as far apart as it takes for
// their taps to read the same rows of x, of some columns of x.
template <class Problem, class Tuning>
struct StageShare {
    static constexpr int spacing = Tuning::row_spacing, of_columns = ceil_div(Problem::w, Tuning::columns);
    static constexpr int of_rows = ceil_div(Problem::p, Tuning::rows * spacing) * spacing;
    static constexpr int of_image = of_columns * of_rows * Depth<Problem>::z;
    int first, end;
    __device__ __forceinline__ StageShare(long long batch, int slice) {
        const long long all = batch * of_image;
        const int number = Tuning::split == 1 ? slice : slice * Tuning::split + static_cast<int>(cluster_rank());
        first = static_cast<int>(all * number / (Tuning::split_k * Tuning::split));
        end = static_cast<int>(all * (number + 1) / (Tuning::split_k * Tuning::split));
    }
};

// Shared memory: a ring of stages, each the rows of x as tiles of channels x columns, and those of dy; at the end the sums;
// the barriers.
template <class Problem, class Tuning>
struct WeightStages {
    using Tile = WeightTile<Problem, Tuning>;
    static constexpr int span = 2 * Tuning::columns, x_tile = Tile::channels * span, x_bytes = Tuning::x_rows * x_tile;
    static_assert(span == 128 || span == 64 || span == 32, "a row is as long as a swizzle's span");
    static_assert(Tuning::x_rows == (Tuning::rows - 1) * Tuning::row_step + Tuning::tap_rows, "the rows that taps read");
    static constexpr int dy_row = 2 * Tuning::window, dy_tile = Tile::filters * dy_row, dy_bytes = Tuning::rows * dy_tile;
    static_assert(dy_row % 32 == 16, "rows of eight filters meet each bank once");
    static constexpr int copied = x_bytes + dy_bytes, stage_bytes = ceil_div(copied, 1024) * 1024;
    static constexpr int bytes = Tuning::barriers_at;
    // Steps of 16 columns: none that has no pixel.
    static constexpr int all_steps = Tuning::columns / 16, held_steps = ceil_div(Problem::w, 16);
    static constexpr int steps = held_steps < all_steps ? held_steps : all_steps;
    static constexpr int consumers = Tuning::filter_groups * Tuning::column_groups;
    // Sums of a filter, an odd number of words apart.
    static constexpr int taps = Tile::tap_rows * Tile::tap_columns, of_filter = Tile::channels * taps, pitch = of_filter | 1;
    static_assert(Tuning::stages * stage_bytes <= bytes && Tile::filters * pitch * 4 <= bytes, "the host counts as many bytes");
    unsigned char* base;

    __device__ __forceinline__ WeightStages() : base(shared_memory_for_swizzles()) {}
    __device__ __forceinline__ unsigned char* x(int stage) const { return base + stage * stage_bytes; }
    __device__ __forceinline__ unsigned char* dy(int stage) const { return x(stage) + x_bytes; }
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
    using Share = StageShare<Problem, Tuning>;
    using D = Depth<Problem>;
    const int k = tile.group * Problem::group_k + tile.first_filter, c = tile.group * Problem::group_c + tile.first_channel;
    const int begin = tile.window_begin(), above = tile.r * Problem::dilation_h - Problem::pad_top;
    RingPlace<Tuning::stages> place;
    for (int stage = share.first; stage < share.end; ++stage, place.advance()) {
        const int column = stage % Share::of_columns * Tuning::columns;
        const int rows = stage / Share::of_columns % Share::of_rows;
        const int p = rows / Share::spacing * (Tuning::rows * Share::spacing) + rows % Share::spacing;
        const int n = stage / Share::of_image, row = p * Problem::stride_h + above;
        Mbarrier* const full = ring.full(place.stage);
        mbarrier_wait_parity(ring.empty(place.stage), place.parity ^ 1);
        mbarrier_arrive_expect_tx(full, Ring::copied);
        if constexpr (D::volume) {
            const int z = stage / (Share::of_columns * Share::of_rows) % D::z;
            const int from = z * D::stride - D::pad + tile.slice * D::dilation;
            cp_async_bulk_tensor_shared_global(ring.x(place.stage), x, full, column, c, row, from, n);
            cp_async_bulk_tensor_shared_global(ring.dy(place.stage), dy, full, column + begin, k, p, z, n);
        } else {
            cp_async_bulk_tensor_shared_global(ring.x(place.stage), x, full, column, c, row, n);
            cp_async_bulk_tensor_shared_global(ring.dy(place.stage), dy, full, column + begin, k, p, n);
        }
    }
}

// Fragments of dy for the filter columns of a warpgroup. Column i reads `shift(i)` pixels further than an even pixel of the
// window, which is the same for all: whole words, and of a pair the halves of two neighbours.
template <class Problem, class Tuning, int odd>
struct MovedPixels {
    static constexpr int columns = Tuning::tap_columns;
    static __host__ __device__ constexpr int shift(int i) { return odd - i * Problem::dilation_w; }
    static __host__ __device__ constexpr int half(int i) { return shift(i) & 1; }
    static __host__ __device__ constexpr int word(int i) { return (shift(i) - half(i)) / 2; }
    static constexpr int first = word(columns - 1), count = word(0) + half(0) - first + 1;
    static __host__ __device__ constexpr bool reads(int number) {
        for (int i = 0; i < columns; ++i)
            if (number == word(i) - first || number == word(i) + half(i) - first) return true;
        return false;
    }
    // `from`: the word of the lane's first pair, of its first filter.
    static __device__ __forceinline__ void load(unsigned (&fragments)[columns][4], const unsigned char* from) {
        using Ring = WeightStages<Problem, Tuning>;
        unsigned words[4][count] = {};
#pragma unroll
        for (int e = 0; e < 4; ++e)
#pragma unroll
            for (int i = 0; i < count; ++i)
                if (reads(i)) words[e][i] = ld_shared_u32(from + e % 2 * 8 * Ring::dy_row + e / 2 * 16 + (first + i) * 4);
#pragma unroll
        for (int i = 0; i < columns; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const unsigned low = words[e][word(i) - first], high = words[e][word(i) + half(i) - first];
                fragments[i][e] = half(i) ? __byte_perm(low, high, 0x5432) : low;
            }
    }
};

// One warpgroup's products of all stages: 64 filters, and `tap_columns` columns of taps, of all tap rows and channels.
// `own`: where in a stage of dy the lane's first word lies.
template <int odd, class Problem, class Tuning, int columns, int count>
__device__ __forceinline__ void sum_stages(float (&sums)[columns][count], const StageShare<Problem, Tuning>& share,
                                           const WeightStages<Problem, Tuning>& ring, int own) {
    using Ring = WeightStages<Problem, Tuning>;
    constexpr int steps = Tuning::rows * Ring::steps;
    static_assert(steps % 2 == 0, "fragments are of two steps in turn");
    const int lane = threadIdx.x % 32;
    unsigned pixels[2][columns][4];
    RingPlace<Tuning::stages> place;
    int before = 0;
    wgmma_fence(sums);
    for (int stage = share.first; stage < share.end; ++stage) {
        mbarrier_wait_parity(ring.full(place.stage), place.parity);
        const MatrixDescriptor x = matrix_descriptor(ring.x(place.stage), 0, 8 * Ring::span, Ring::span);
        const unsigned char* const dy = ring.dy(place.stage) + own;
#pragma unroll
        for (int step = 0; step < steps; ++step) {
            const int row = step / Ring::steps, of_row = step % Ring::steps;
            MovedPixels<Problem, Tuning, odd>::load(pixels[step % 2], dy + row * Ring::dy_tile + of_row * 32);
            wgmma_fence(pixels[step % 2]);
#pragma unroll
            for (int i = 0; i < columns; ++i)
                multiply(typename Problem::element{}, sums[i], pixels[step % 2][i],
                         x.further(row * Tuning::row_step * Ring::x_tile + of_row * 32), true);
            wgmma_commit_group();
            // The products of the step before are done while these are under way.
            wgmma_wait_group<1>(pixels[(step + 1) % 2]);
            if (step == 0 && stage > share.first) mbarrier_arrive_warp(ring.empty(before), lane);
        }
        before = place.stage;
        place.advance();
    }
    wgmma_wait_group<0>(sums, pixels[1]);
}

// The tile's weights, in shared memory, to the gradient: those of some filters, a warp one after the other, added over the
// cluster.
template <class Problem, class Tuning, class Result>
__device__ __forceinline__ void store_sums(Result* dw, const WeightTile<Problem, Tuning>& tile,
                                           const WeightStages<Problem, Tuning>& ring) {
    using Ring = WeightStages<Problem, Tuning>;
    using Tile = WeightTile<Problem, Tuning>;
    constexpr int share = ceil_div(Tile::filters, Tuning::split), all_taps = Problem::r * Problem::s;
    constexpr int64 of_channel = static_cast<int64>(Tile::slices) * all_taps, of_filter = of_channel * Problem::group_c;
    const int first = Tuning::split == 1 ? 0 : static_cast<int>(cluster_rank()) * share, lane = threadIdx.x % 32;
    const int end = min(min(first + share, Tile::filters), Problem::group_k - tile.first_filter);
    Result* const to = dw + (static_cast<int64>(tile.group) * Problem::group_k + tile.first_filter) * of_filter +
                       tile.first_channel * of_channel + tile.slice * all_taps + tile.r * Problem::s + tile.s;
    for (int filter = first + static_cast<int>(threadIdx.x) / 32; filter < end; filter += 4 * Ring::consumers) {
        const float* const from = ring.sums() + filter * Ring::pitch;
#pragma unroll 4
        for (int i = lane; i < Ring::of_filter; i += 32) {
            const int channel = i / Ring::taps, r = i % Ring::taps / Tile::tap_columns, s = i % Tile::tap_columns;
            if (tile.first_channel + channel >= Problem::group_c) continue;
            if (Problem::r % Tile::tap_rows != 0 && tile.r + r >= Problem::r) continue;
            if (Problem::s % Tile::tap_columns != 0 && tile.s + s >= Problem::s) continue;
            const float sum = Tuning::split == 1 ? from[i] : cluster_sum<Tuning::split>(from + i);
            Result* const at = to + filter * of_filter + channel * of_channel + r * Problem::s + s;
            if constexpr (Tuning::split_k > 1) *at = sum;
            else *at = from_float<Result>(finish<Problem>(sum, 0.0f, held_by<Problem>(at, true)));
        }
    }
}

// One warpgroup's share of the tile, and its way to the gradient through shared memory, where the ring was.
template <class Problem, class Tuning, class Result>
__device__ __forceinline__ void sum_tile(Result* dw, const WeightTile<Problem, Tuning>& tile,
                                         const WeightStages<Problem, Tuning>& ring, const StageShare<Problem, Tuning>& share,
                                         int warpgroup) {
    using Ring = WeightStages<Problem, Tuning>;
    using Tile = WeightTile<Problem, Tuning>;
    constexpr int columns = Tuning::tap_columns, channels = Tuning::channels, count = Tuning::tap_rows * channels / 2;
    const int lane = threadIdx.x % 32, filter = warpgroup % Tuning::filter_groups * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
    const int column = warpgroup / Tuning::filter_groups * columns;  // the first of the warpgroup, in the tile
    // What the first column reads, from the begin of the window on.
    const int shift = Problem::pad_left - (tile.s + column) * Problem::dilation_w - tile.window_begin();
    const int own = filter * Ring::dy_row + (shift / 2 + lane % 4) * 4;
    constexpr bool all_alike = columns * Problem::dilation_w % 2 == 0 || (Tuning::column_groups == 1 && Tile::of_columns == 1);
    float sums[columns][count] = {};
    if constexpr (all_alike) {
        sum_stages<Problem::pad_left & 1, Problem, Tuning>(sums, share, ring, own);
    } else {
        if (shift % 2 == 1) sum_stages<1, Problem, Tuning>(sums, share, ring, own);
        else sum_stages<0, Problem, Tuning>(sums, share, ring, own);
    }
    barrier_sync(1, 128 * Ring::consumers);  // the stages of this CTA have been read
    // A thread has two filters, and of every eight channels of a row of taps a pair.
    float* const to = ring.sums() + filter * Ring::pitch + lane % 4 * 2 * Ring::taps + column;
#pragma unroll
    for (int s = 0; s < columns; ++s)
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const int line = i / 4 * 8, r = line / channels, channel = line % channels + i % 2;
            to[i / 2 % 2 * 8 * Ring::pitch + channel * Ring::taps + r * Tile::tap_columns + s] = sums[s][i];
        }
    if constexpr (Tuning::split > 1) meet_in_cluster();
    else barrier_sync(1, 128 * Ring::consumers);
    store_sums<Problem, Tuning>(dw, tile, ring);
    if constexpr (Tuning::split > 1) meet_in_cluster();
}

// `dw` is the gradient, or with `split_k` above 1 room for as many partial sums.
template <class Problem, class Tuning, class Result>
__device__ __forceinline__ void native_weight_kmajor(const TensorMap& x, const TensorMap& dy, Result* dw, long long batch) {
    using Tile = WeightTile<Problem, Tuning>;
    using Ring = WeightStages<Problem, Tuning>;
    static_assert(!Problem::nhwc && !Problem::chwn, "pixels of a channel are adjacent");
    static_assert(Problem::stride_w == 1, "neighbouring outputs read neighbouring pixels");
    const Ring ring;
    const int number = static_cast<int>(blockIdx.x) / Tuning::split, slice = number / Tile::count;
    const Tile tile(number % Tile::count);
    if (threadIdx.x == 128 * Ring::consumers) {
        prefetch_tensormap(x);
        prefetch_tensormap(dy);
        ring.init();
    }
    __syncthreads();
    const StageShare<Problem, Tuning> share(batch, slice);
    // NOTE: the same number from the first lane: so the compiler knows that a warp's threads agree, and keeps descriptors in
    // uniform registers.
    const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
    if (warpgroup < Ring::consumers) {
        set_registers_up<Tuning::consumer_registers>();
        constexpr int64 all = static_cast<int64>(Problem::k) * Problem::group_c * filter_taps<Problem>;
        sum_tile<Problem, Tuning>(dw + slice * all, tile, ring, share, warpgroup);
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
