// native_gemm_nchw: implicit GEMM on Hopper tensor cores (wgmma) for float16 and bfloat16 in NCHW, float32 sums.
//
//   y[m, k] = sum over r, s, c of x[m + (r, s), c] * w[k, r, s, c]        m: output pixel, k: filter
//
// Channels of a pixel lie far apart in NCHW, and wgmma takes them side by side. Input pixels lie in shared memory once, transposed
// to channels-last, in a padded linear order (linear_pixels.cuh); every tap reads them at a constant offset: a descriptor that
// begins at another pixel.
//
// Requires   sm_90a; NCHW; packed weights (packed_filters.cuh); the tile's pixels with their halo in shared memory.
// Volumes    each output slice is an image; the channel blocks of all slices that it reads follow each other.
// Split      where tiles are few a cluster of `split` CTAs shares the stages of one, and the filters whose sums each then adds up.
// Phases     of an input's gradient at strides of 2 share a launch: they read the same pixels, each with taps and sums of its own
//            (packed_filters.cuh).
// Numerics   as native_gemm_16bit: exact products, sums stay in the tensor core over the whole reduction.
// CTA tile   64 * m_tiles * warpgroups pixels x filters; a stage of pixels has channel_block channels and serves all taps; a stage
//            of filters has channel_block channels of one tap. Persistent. With `turns`, a ping-pong schedule, a tile is one
//            warpgroup's, 64 * m_tiles pixels: it multiplies while the other one stores.
// Roles      warpgroups 0..n-1  consumers: wgmma with both operands in shared memory, epilogue, stores
//            the rest           producers: all warps but the last load and transpose pixels (transposed_loads.cuh); one thread of
//                               the last issues bulk copies of filters.
// Pipelines  pixels   pixel_stages    full: producer warps -> consumers,   empty: consumer warps -> producers
//            filters  filter_stages   full: bytes of a copy -> consumers,  empty: consumer warps -> producer
// One stage  wait full(pixels); for each tap: wait full(filters); channel_block / 16 k16 steps x m_tiles wgmma; commit; wait for
//            the wgmma of the tap before, release its filters, after the last tap its pixels. The pixels of the next stage are
//            loaded meanwhile. Without swizzle eight 16-byte vectors are eight neighbouring pixels: wgmma and stores meet each
//            bank once.
// Work       2 C/g R S flops an output; peak 4096 flops a cycle and multiprocessor, 989 TFLOP/s at 1.83 GHz; two thirds of it at
//            the power limit. Loaded: (pixels + halo) * channel_block * 2 bytes for R S * pixels * filters * channel_block * 2
//            flops: of 128 pixels of 56 x 56 and 256 filters 3.4 bytes a cycle at full speed with 3 x 3, 16 with 1 x 1. Copied:
//            filters * channel_block * 2 bytes a tap, 32 bytes a cycle for 128 pixels. Read by a wgmma of 64 pixels x n filters x
//            16: (64 + n) * 32 bytes in n / 2 cycles, all that shared memory gives where n is 64.
// Explored (H200, 390e90a9): with few taps the compiler knows where each reads, and descriptors stay in uniform registers: a
//            gradient of 512 channels takes 23 microseconds in place of 28. Ping-pong takes 0.94 of the time of shared tiles on 64 and
//            128 channels, and as long on more. Pixels that begin at multiples of 128 bytes, or filters that are not copied, save
//            nothing.
// Measured   figure: opencnn-float16 native_gemm_nchw/16-bit mean = 0.90
//            figure: opencnn-float16 native_gemm_nchw:prepared tflops-most = 568
#pragma once

#include <device/pipeline/rings.cuh>
#include <device/ptx/cluster.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/mma.cuh>
#include <device/ptx/sync.cuh>
#include <device/ptx/tma.cuh>
#include <kernels/hopper_native/accumulators.cuh>
#include <kernels/hopper_native/linear_pixels.cuh>
#include <kernels/hopper_native/outputs_nchw.cuh>
#include <kernels/hopper_native/packed_filters.cuh>
#include <kernels/hopper_native/transposed_loads.cuh>

namespace leanconv {

// What warps load of x.
template <class Problem, class Tuning>
struct GemmSource : LinearPixels<Problem, Tuning>, InputTensor<Problem> {
    static constexpr int vectors = Tuning::channel_block / 8, registers = Tuning::producer_registers;
    static constexpr bool whole = Problem::group_c % 16 == 0;  // all channels of all stages exist
    static constexpr bool wide = true;
};

// Operand A: 64 resident pixels from one on, and where its next 16 channels and its next 64 pixels lie.
template <class Problem, class Tuning>
struct PixelOperand {
    static constexpr int pitch = LinearPixels<Problem, Tuning>::pitch, k16 = 2 * pitch * 16, m64 = 64 * 16;
    static __device__ __forceinline__ MatrixDescriptor at(const unsigned char* stage, int pixel) {
        return matrix_descriptor(stage + pixel * 16, pitch * 16, 128, 0);
    }
};

// Stages of pixels of a CTA: its share where the CTAs of a cluster split them, or all, which the compiler knows.
template <int split, int blocks>
struct BlockShare {
    static constexpr int share = ceil_div(blocks, split);
    static_assert(share * (split - 1) < blocks, "each CTA of a cluster has stages");
    int first_block, end_block;
    __device__ __forceinline__ BlockShare()
        : first_block(static_cast<int>(cluster_rank()) * share), end_block(min(first_block + share, blocks)) {}
};
template <int blocks>
struct BlockShare<1, blocks> {
    static constexpr int first_block = 0, end_block = blocks;
};

// What a CTA computes and how its shared memory is laid out: a ring of pixels, a ring of filters, the pixel offsets of all taps,
// a staging buffer for each consumer warpgroup's outputs, the barriers.
template <class Problem, class Tuning>
struct NchwGemm : BlockShare<Tuning::split, PackedFilters<Problem, Tuning>::all_blocks> {
    using Share = BlockShare<Tuning::split, PackedFilters<Problem, Tuning>::all_blocks>;
    using Share::first_block, Share::end_block;
    using T = typename Problem::element;
    using Result = typename Problem::result;
    using Pixels = LinearPixels<Problem, Tuning>;
    using Filters = PackedFilters<Problem, Tuning>;
    using Phases = GradientPhases<Problem>;
    // Of volumes each output slice is an image, and the taps are those of one slice of the filters: the stages of a tile are the
    // channel blocks of the first slice, then those of the next.
    static constexpr int taps = Filters::taps, blocks = Filters::all_blocks;
    // Warpgroups share a tile's pixels, or ping-pong: each has tiles of its own, and multiplies while the other one stores.
    static constexpr bool turns = Tuning::turns;
    static constexpr int sharing = turns ? 1 : Tuning::warpgroups;
    static constexpr int pixels = 64 * sharing * Tuning::m_tiles;  // of a tile
    static constexpr int pixel_bytes = Tuning::channel_block / 8 * Pixels::pitch * 16;
    static constexpr int filter_bytes = Tuning::channel_block / 8 * Tuning::filters * 16;
    static constexpr int output_bytes = (Tuning::barriers_at - Tuning::outputs_at) / Tuning::warpgroups;
    static constexpr int loading_warps = 4 * Tuning::producers - 1, consumer_warps = 4 * sharing;  // of a stage
    static_assert(Tuning::pixel_stages * pixel_bytes == Tuning::filters_at, "the host counts as many bytes");
    static_assert(Tuning::filters_at + Tuning::filter_stages * filter_bytes == Tuning::taps_at, "the host counts as many bytes");
    static_assert(!Problem::nhwc && !Problem::chwn, "channels of a pixel lie apart");

    static constexpr int split = Tuning::split;
    static_assert(split == 1 || !turns, "the warpgroups of a tile add its sums up together");
    static_assert(split == 1 || pixels * Tuning::filters * 4 <= Tuning::taps_at, "the rings take the sums of a tile");

    unsigned char* base;
    long long batch;

    __device__ __forceinline__ explicit NchwGemm(long long batch)
        : base(shared_memory()), batch(batch * Depth<Problem>::z) {}
    static __device__ __forceinline__ int first_tile() { return static_cast<int>(blockIdx.x) / split; }
    static __device__ __forceinline__ int tile_step() { return static_cast<int>(gridDim.x) / split; }

    // Tiles: filters first, then groups, then pixels. Those of the same pixels follow each other.
    __device__ __forceinline__ int tiles() const {
        return (static_cast<int>(batch) * Pixels::image + pixels - 1) / pixels * (Filters::tiles * Problem::groups);
    }
    static __device__ __forceinline__ int filter_tile(int tile) { return tile % Filters::tiles; }
    static __device__ __forceinline__ int group(int tile) { return tile / Filters::tiles % Problem::groups; }
    static __device__ __forceinline__ int first_pixel(int tile) { return tile / (Filters::tiles * Problem::groups) * pixels; }

    __device__ __forceinline__ unsigned char* pixels_of(int stage) const { return base + stage * pixel_bytes; }
    __device__ __forceinline__ unsigned char* filters_of(int stage) const {
        return base + Tuning::filters_at + stage * filter_bytes;
    }
    __device__ __forceinline__ int* tap_offsets() const { return reinterpret_cast<int*>(base + Tuning::taps_at); }
    __device__ __forceinline__ Mbarrier* pixels_full(int stage) const {
        return reinterpret_cast<Mbarrier*>(base + Tuning::barriers_at) + stage;
    }
    __device__ __forceinline__ Mbarrier* pixels_empty(int stage) const { return pixels_full(Tuning::pixel_stages) + stage; }
    __device__ __forceinline__ Mbarrier* filters_full(int stage) const { return pixels_empty(Tuning::pixel_stages) + stage; }
    __device__ __forceinline__ Mbarrier* filters_empty(int stage) const { return filters_full(Tuning::filter_stages) + stage; }
    // Where few products are of all taps, the compiler knows which pixels each tap reads.
    static constexpr bool unrolled = Phases::count > 1 || taps * (Tuning::channel_block / 16) * Tuning::m_tiles <= 80;
    static constexpr __device__ __forceinline__ int offset_of(int tap) {
        return Pixels::tap_offset(Phases::row(tap), Phases::column(tap));
    }
    // By all threads, before a barrier of the CTA.
    __device__ __forceinline__ void init() const {
        for (int tap = unrolled ? taps : threadIdx.x; tap < taps; tap += blockDim.x)
            tap_offsets()[Phases::place(tap)] = offset_of(tap);
        if (threadIdx.x > 0) return;
        for (int i = 0; i < Tuning::pixel_stages; ++i) {
            mbarrier_init(pixels_full(i), loading_warps);
            mbarrier_init(pixels_empty(i), consumer_warps);
        }
        for (int i = 0; i < Tuning::filter_stages; ++i) {
            mbarrier_init(filters_full(i), 1);
            mbarrier_init(filters_empty(i), consumer_warps);
        }
        fence_mbarrier_init();
    }

    // The share of a warp in all stages of pixels of the CTA's tiles.
    struct Walk : UnitWalk<GemmSource<Problem, Tuning>, loading_warps, Tuning::pixel_stages> {
        using Base = UnitWalk<GemmSource<Problem, Tuning>, loading_warps, Tuning::pixel_stages>;
        const NchwGemm& gemm;
        int tile, block;
        __device__ __forceinline__ Walk(const NchwGemm& gemm, int warp)
            : Base(warp), gemm(gemm), tile(first_tile()), block(gemm.first_block) {}
        __device__ __forceinline__ bool valid() const { return tile < gemm.tiles(); }
        __device__ __forceinline__ void advance() {
            if (!Base::advance() || ++block != gemm.end_block) return;
            block = gemm.first_block;
            // NOTE: written out: with a call here the compiler makes other code of layers of images.
            if constexpr (split == 1) tile += gridDim.x;
            else tile += tile_step();
        }
    };
    // Loads of pixels, by the loading warps.
    __device__ __forceinline__ void load_pixels(const T* x, int thread) const {
        const int lane = thread % 32;
        Walk walk(*this, thread / 32);
        const auto load = [&](PixelUnit<GemmSource<Problem, Tuning>>& unit) {
            const int block = Filters::slices > 1 ? walk.block % Filters::blocks : walk.block;
            unit.load(x, batch, first_pixel(walk.tile), group(walk.tile), block * Tuning::channel_block, walk.round * 32 + lane,
                      walk.block / Filters::blocks);
        };
        load_units<GemmSource<Problem, Tuning>>(walk, *this, lane, load, [&](int stage) { return pixels_of(stage); });
    }
    // One thread's copies of filters, which the launch before may still be packing. Nothing else needs what it writes.
    __device__ __forceinline__ void copy_filters(const T* prepared) const {
        griddepcontrol_wait();
        const uint4* const all = reinterpret_cast<const uint4*>(prepared + Problem::first_prepared);
        RingPlace<Tuning::filter_stages> place;
        for (int tile = first_tile(); tile < tiles(); tile += tile_step())
            for (int block = first_block; block < end_block; ++block)
                for (int tap = 0; tap < taps; ++tap) {
                    mbarrier_wait_parity(filters_empty(place.stage), place.parity ^ 1);
                    mbarrier_arrive_expect_tx(filters_full(place.stage), filter_bytes);
                    cp_async_bulk_shared_global(filters_of(place.stage),
                                                all + Filters::stage(group(tile), filter_tile(tile), block, tap), filter_bytes,
                                                filters_full(place.stage));
                    place.advance();
                }
    }

    using Sums = float[Phases::count * Tuning::m_tiles][Tuning::filters / 2];
    // Where a warpgroup is in the rings, and the stages of the tap before.
    struct Cursor {
        RingPlace<Tuning::pixel_stages> source, source_before;
        RingPlace<Tuning::filter_stages> filters;
        int filters_before = 0;
    };
    // Adds a tap's products of the pixels of a stage. Those of the tap before are done then, and its filters are released.
    template <class Tap>
    __device__ __forceinline__ void multiply_tap(Tap tap, Sums& sums, MatrixDescriptor pixels, Cursor& at, int block,
                                                 int lane) const {
        using Operand = PixelOperand<Problem, Tuning>;
        const MatrixDescriptor a = pixels + (unrolled ? offset_of(tap.of_layer) : tap_offsets()[tap.place]) * 16;
        mbarrier_wait_parity(filters_full(at.filters.stage), at.filters.parity);
        const MatrixDescriptor b = matrix_descriptor(filters_of(at.filters.stage), Tuning::filters * 16, 128, 0);
        if (Phases::count > 1 && tap.first) wgmma_fence(sums[tap.phase]);
        else wgmma_fence();
#pragma unroll
        for (int i = 0; i < Tuning::channel_block / 16; ++i)
#pragma unroll
            for (int m = 0; m < Tuning::m_tiles; ++m)
                multiply(T{}, sums[tap.phase * Tuning::m_tiles + m], a + (i * Operand::k16 + m * Operand::m64),
                         b + 2 * i * Tuning::filters * 16, block > first_block || !tap.first || i > 0);
        wgmma_commit_group();
        if (block > first_block || tap.place > 0) {
            if (Phases::count > 1 && tap.first) wgmma_wait_group<1>(sums[tap.phase_before]);
            else wgmma_wait_group<1>();
            mbarrier_arrive_warp(filters_empty(at.filters_before), lane);
            if (tap.place == 0) {
                mbarrier_arrive_warp(pixels_empty(at.source_before.stage), lane);
                at.source_before.advance();
            }
        }
        at.filters_before = at.filters.stage;
        at.filters.advance();
    }
    // All taps of several phases.
    template <int place = 0>
    __device__ __forceinline__ void multiply_taps(Sums& sums, MatrixDescriptor pixels, Cursor& at, int block, int lane) const {
        if constexpr (place < taps) {
            multiply_tap(PhaseTap<Phases, place>{}, sums, pixels, at, block, lane);
            multiply_taps<place + 1>(sums, pixels, at, block, lane);
        }
    }
    // The named barrier at which the first warpgroup waits for its turn; the other one's is the next. NOTE: a stage is waited for by
    // the parity of its phase, so that a warpgroup must not wait before the other one has seen the phase before.
    static constexpr int own_turn = 1 + Tuning::warpgroups;
    // Goes past the stages of a tile that the other warpgroup takes.
    template <int count, int stages>
    static __device__ __forceinline__ void pass(RingPlace<stages>& place) {
        place.stage += count % stages, place.parity ^= count / stages % 2;
        if (place.stage >= stages) place.stage -= stages, place.parity ^= 1;
    }
    // One warpgroup's products of all tiles of the CTA, or of every second one.
    __device__ __forceinline__ void consume(Bias<Problem> bias, Result* y, int warpgroup) const {
        using Operand = PixelOperand<Problem, Tuning>;
        const int lane = threadIdx.x % 32, first_row = turns ? 0 : warpgroup * Tuning::m_tiles * 64;
        Cursor at;
        const auto pass_tile = [&] {
            pass<blocks>(at.source), pass<blocks>(at.source_before), pass<blocks * taps>(at.filters);
        };
        int first = first_tile(), step = tile_step();
        if constexpr (turns) {
            if (warpgroup == 1) first += step, pass_tile();
            step *= 2;
        }
        for (int tile = first; tile < tiles(); tile += step) {
            Sums sums;
            if (turns && tile > first_tile()) barrier_sync(own_turn + warpgroup, 256);
            wgmma_fence(sums);
            for (int block = first_block; block < end_block; ++block) {
                mbarrier_wait_parity(pixels_full(at.source.stage), at.source.parity);
                const auto pixels = Operand::at(pixels_of(at.source.stage), first_row);
                if constexpr (Phases::count > 1) {
                    multiply_taps(sums, pixels, at, block, lane);
                } else {
#pragma unroll(unrolled ? taps : 1)
                    for (int tap = 0; tap < taps; ++tap) multiply_tap(OnlyPhaseTap(tap), sums, pixels, at, block, lane);
                }
                at.source.advance();
            }
            if (turns && tile + tile_step() < tiles()) barrier_arrive(own_turn + 1 - warpgroup, 256);
            wgmma_wait_group<0>(sums);
            mbarrier_arrive_warp(filters_empty(at.filters_before), pixels_empty(at.source_before.stage), lane);
            at.source_before.advance();
            if constexpr (turns) pass_tile();
            store(sums, bias, y, warpgroup, first_pixel(tile) + first_row, group(tile), filter_tile(tile) * Tuning::filters);
        }
    }
    // The sums of a warpgroup to the output; those of a cluster, of which this is the only tile, are added before.
    __device__ __forceinline__ void store(const Sums& sums, Bias<Problem> bias, Result* y, int warpgroup, int first, int group,
                                          int first_k) const {
        unsigned char* const staging = base + Tuning::outputs_at + warpgroup * output_bytes;
        if constexpr (Phases::count > 1) {
            static_assert(Tuning::m_tiles == 1 && split == 1, "a thread has registers for the sums of all phases");
            OutputPhases<Problem, Tuning>::store(sums, bias, y, batch, first, group, first_k);
        } else if constexpr (split == 1) {
#pragma unroll
            for (int m = 0; m < Tuning::m_tiles; ++m)
                OutputNchw<Problem, Tuning>::store(sums[m], staging, bias, y, batch, first + m * 64, group, first_k, warpgroup);
        } else {
            constexpr int count = Tuning::filters / 2, threads = 32 * consumer_warps, own_filters = Tuning::filters / split;
            float* const own = reinterpret_cast<float*>(base);
            barrier_sync(1 + Tuning::warpgroups, threads);  // the stages of this CTA have been read
#pragma unroll
            for (int i = 0; i < Tuning::m_tiles * count; ++i) own[i * threads + threadIdx.x] = sums[i / count][i % count];
            meet_in_cluster();
            float added[Tuning::m_tiles][count / split];
            add_shares<split, threads>(added, own);
            meet_in_cluster();
            first_k += static_cast<int>(cluster_rank()) * own_filters;
#pragma unroll
            for (int m = 0; m < Tuning::m_tiles; ++m)
                OutputNchw<Problem, Tuning, own_filters>::store(added[m], staging, bias, y, batch, first + m * 64, group, first_k,
                                                                warpgroup);
        }
    }
};

template <class Problem, class Tuning>
__device__ __forceinline__ void native_gemm_nchw(const typename Problem::element* x, const typename Problem::element* prepared,
                                                 Bias<Problem> bias, typename Problem::result* y, long long batch) {
    const NchwGemm<Problem, Tuning> gemm(batch);
    gemm.init();
    __syncthreads();
    // The same for all lanes, which the compiler knows of a shuffle.
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), thread = threadIdx.x - 128 * Tuning::warpgroups;
    constexpr int loading = 32 * gemm.loading_warps;
    if (warpgroup >= Tuning::warpgroups) {
        set_registers_down<Tuning::producer_registers>();
        if (thread < loading) gemm.load_pixels(x, thread);
        else if (thread == loading) gemm.copy_filters(prepared);
        if constexpr (gemm.split > 1) {
            // NOTE: lanes that copied alone converge before the barriers that all threads take part in.
            __syncwarp();
            meet_in_cluster();
            meet_in_cluster();
        }
    } else {
        set_registers_up<Tuning::consumer_registers>();
        gemm.consume(bias, y, warpgroup);
    }
}

}  // namespace leanconv
