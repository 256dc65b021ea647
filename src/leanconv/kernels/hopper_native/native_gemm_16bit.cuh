// native_gemm_16bit: implicit GEMM on Hopper tensor cores (wgmma) for float16 and bfloat16 in NHWC, float32 sums.
//
//   y[m, k] = sum over r, s, c of x[m + (r, s), c] * w[k, r, s, c]        m: output pixel, k: filter
//
// Requires   sm_90a; NHWC; rows of channels of whole 16 bytes; with groups, whole channel blocks of 32, 64 or 128 bytes a group.
// Volumes    an im2col map of five axes; slices of a filter are rows behind one another.
// Numerics   Products are exact. Sums stay in the tensor core over the whole reduction; it rounds toward zero: of a sum of one sign
//            less than 2^-27 is lost for each element, under 2^-11, half a unit of float16, for fewer than 2^16 of them.
// CTA tile   64 * m_tiles * warpgroups pixels x filters; a stage has stage_blocks * channel_block reduction elements of each.
//            Persistent. Where tiles are few, a cluster of `split` CTAs shares the reduction of one (split-K), and each CTA
//            stores its share of the filters.
// Roles      warpgroups 0..n-1  consumers: wgmma with both operands in shared memory, epilogue, stores
//            warpgroup n        producer: one thread issues all TMA copies, pixels by an im2col map, filters by a tiled map of w
// Gradient   of an input: filters are read as they lie in the layer (`mirrored`), where channels of dx are adjacent: boxes of 64
//            or 32 of them, of channel_block filters of a tap each, an operand that is MN-major. Where the layer's channels of a group are
//            no whole 16 bytes, a launch rearranges filters before. Strides make phases, each with taps, outputs and a map of its
//            own. Where filters are read so, two to four phases of images are one launch, and CTAs take turns over all their tiles.
// Pipelines  stages   full: bytes of the copies -> consumers, empty: a lane of each consumer warp -> producer
// One stage  wait full; for each channel block and k16 step m_tiles wgmma; commit; wait for the wgmma of the stage before and
//            release that one. The copies of the next tile overlap the stores of this one.
// Registers  m_tiles * filters / 2 sums of 240 with two consumers, of 160 with three.
// Work       2 C/g R S flops an output; peak 4096 flops a cycle and multiprocessor, 989 TFLOP/s at 1.83 GHz; two thirds of it at
//            the power limit. Copied for a stage of depth d: (pixels + filters) * 2 d bytes for 2 * pixels * filters * d flops,
//            at full speed 48 bytes a cycle for 128 x 256 and 37 for 256 x 192. A wgmma of 64 pixels x n filters x 16 takes n / 2
//            cycles and reads (64 + n) * 32 bytes: 80 bytes a cycle for 256 filters, 96 for 128, all 128 for 64.
// Measured   figure: opencnn-nhwc-float16 native_gemm_16bit/16-bit mean = 1.19
//            figure: opencnn-nhwc-bfloat16 native_gemm_16bit/16-bit mean = 1.18
//            figure: opencnn-nhwc-float16 native_gemm_16bit tflops-most = 760
#pragma once

#include <device/index.cuh>
#include <device/pipeline/rings.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/mma.cuh>
#include <device/ptx/sync.cuh>
#include <device/ptx/tma.cuh>
#include <kernels/hopper_native/accumulators.cuh>
#include <kernels/hopper_native/filter_blocks.cuh>
#include <kernels/hopper_native/outputs_nhwc.cuh>

namespace leanconv {

// The tiles of the output. Filters change fastest, so that CTAs that run side by side read the same pixels.
template <class Problem, class Tuning>
struct GemmTiles {
    static constexpr int pixels = 64 * Tuning::m_tiles * Tuning::warpgroups, of_group = ceil_div(Problem::group_k, Tuning::filters);
    long long batch;
    Offset<Problem> of_pixels;
    __device__ __forceinline__ explicit GemmTiles(long long batch)
        : batch(batch), of_pixels((static_cast<Offset<Problem>>(batch) * output_pixels<Problem> + (pixels - 1)) / pixels) {}
    __device__ __forceinline__ Offset<Problem> count() const { return of_pixels * (of_group * Problem::groups); }
    static __device__ __forceinline__ int filters(Offset<Problem> tile) { return static_cast<int>(tile % of_group); }
    __device__ __forceinline__ int group(Offset<Problem> tile) const {
        return Problem::groups == 1 ? 0 : static_cast<int>(tile / of_group / of_pixels);
    }
    __device__ __forceinline__ Offset<Problem> first_pixel(Offset<Problem> tile) const {
        const Offset<Problem> number = tile / of_group;
        return (Problem::groups == 1 ? number : number % of_pixels) * pixels;
    }
    // Where an output pixel lies; its count is 0 where there is none.
    __device__ __forceinline__ Place place(Offset<Problem> pixel) const {
        const FlatPixels<Problem> all(batch, Phase<Problem>(0));
        if (pixel >= all.count) return {0, 0};
        if constexpr (Phase<Problem>::whole) return {pixel, 1};
        return all.place(pixel);
    }
};

// Shared memory: a ring of stages, each `stage_blocks` times the pixels and the filters of `channel_block` channels of one tap;
// a staging buffer for each consumer warp's outputs; the barriers.
template <class Problem, class Tuning>
struct GemmRing : FilterBlock<Problem, Tuning> {
    using Filters = FilterBlock<Problem, Tuning>;
    using Output = OutputNhwc<Problem, Tuning::filters / Tuning::split>;  // of the filters that a CTA stores
    static constexpr int pixels = GemmTiles<Problem, Tuning>::pixels;
    using Filters::row_bytes, Filters::filter_bytes, Filters::copied_bytes;
    static constexpr int pixel_bytes = pixels * row_bytes;
    static constexpr int stage_bytes = Tuning::stage_blocks * (pixel_bytes + filter_bytes);
    static_assert(pixel_bytes % 1024 == 0, "operands begin where swizzle patterns do");
    static constexpr int of_tap = ceil_div(Problem::group_c, Tuning::channel_block);
    static constexpr int all = filter_taps<Problem> * of_tap;  // channel blocks of the reduction
    static_assert(all % Tuning::stage_blocks == 0, "a reduction has whole stages");
    static_assert(Problem::groups == 1 || Problem::group_c % Tuning::channel_block == 0, "a row has channels of one group");
    // Stages of one CTA: all of them, or its share where the CTAs of a cluster split them.
    static constexpr int stages = all / Tuning::stage_blocks, share = ceil_div(stages, Tuning::split);
    static_assert(share * (Tuning::split - 1) < stages, "each CTA of a cluster has stages");
    static constexpr int outputs_at = Tuning::stages * stage_bytes;
    static_assert(outputs_at + 4 * Tuning::warpgroups * Output::warp_bytes == Tuning::barriers_at, "the host counts as many bytes");
    static constexpr int sums = Tuning::m_tiles * Tuning::filters / 2, threads = 128 * Tuning::warpgroups;
    static_assert(Tuning::split == 1 || sums * threads * 4 <= outputs_at, "the ring takes the sums of a tile");
    unsigned char* base;
    int first, end;

    __device__ __forceinline__ GemmRing() : base(shared_memory_for_swizzles()), first(0), end(stages) {
        if constexpr (Tuning::split > 1) {
            first = static_cast<int>(cluster_rank()) * share;
            end = min(first + share, stages);
        }
    }
    __device__ __forceinline__ unsigned char* pixels_of(int stage, int block) const {
        return base + stage * stage_bytes + block * pixel_bytes;
    }
    __device__ __forceinline__ unsigned char* filters_of(int stage, int block) const {
        return base + stage * stage_bytes + Tuning::stage_blocks * pixel_bytes + block * filter_bytes;
    }
    __device__ __forceinline__ Descriptor<Tuning::mirrored> filter_operand(int stage, int block) const {
        return Filters::operand(filters_of(stage, block));
    }
    __device__ __forceinline__ unsigned char* outputs_of(int warp) const {
        return base + outputs_at + warp * Output::warp_bytes;
    }
    __device__ __forceinline__ Mbarrier* full(int stage) const {
        return reinterpret_cast<Mbarrier*>(base + Tuning::barriers_at) + stage;
    }
    __device__ __forceinline__ Mbarrier* empty(int stage) const { return full(Tuning::stages) + stage; }
    // Complete when the filters of the stage have been rounded.
    __device__ __forceinline__ Mbarrier* rounded(int stage) const { return empty(Tuning::stages) + stage; }
    // By one thread, before a barrier of the CTA; with `rounds` a warp rounds the filters of a stage.
    template <bool rounds>
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < Tuning::stages; ++i) {
            mbarrier_init(full(i), 1);
            mbarrier_init(empty(i), 4 * Tuning::warpgroups);
            if constexpr (rounds) mbarrier_init(rounded(i), 1);
        }
        fence_mbarrier_init();
    }
};

// One thread's copies of all stages of the CTA's tiles, from a place of the ring on; returns that of the next stage.
template <class Problem, class Tuning>
__device__ __forceinline__ RingPlace<Tuning::stages> produce(const TensorMap& x, const TensorMap& w, long long batch,
                                                             const GemmTiles<Problem, Tuning>& tiles,
                                                             const GemmRing<Problem, Tuning>& ring, Offset<Problem> first_tile,
                                                             Offset<Problem> step, RingPlace<Tuning::stages> place = {}) {
    using Ring = GemmRing<Problem, Tuning>;
    using D = Depth<Problem>;
    for (Offset<Problem> tile = first_tile; tile < tiles.count(); tile += step) {
        const Pixel<Problem> from(tiles.first_pixel(tile), batch);
        const int first_c = tiles.group(tile) * Problem::group_c, n = static_cast<int>(from.n);
        const int d0 = from.slice * D::stride - D::pad;
        const int h0 = from.p * Problem::stride_h - Problem::pad_top, w0 = from.q * Problem::stride_w - Problem::pad_left;
        const int filter = tiles.filters(tile) * Tuning::filters;
        for (int stage = ring.first; stage < ring.end; ++stage) {
            Mbarrier* const full = ring.full(place.stage);
            mbarrier_wait_parity(ring.empty(place.stage), place.parity ^ 1);
            mbarrier_arrive_expect_tx(full, Tuning::stage_blocks * (Ring::pixel_bytes + Ring::copied_bytes));
#pragma unroll
            for (int block = 0; block < Tuning::stage_blocks; ++block) {
                const int number = stage * Tuning::stage_blocks + block, tap = number / Ring::of_tap;
                const int c = number % Ring::of_tap * Tuning::channel_block;
                if constexpr (D::volume) {
                    const FilterTap<Problem> at(tap);
                    cp_async_bulk_tensor_im2col_shared_global(ring.pixels_of(place.stage, block), x, full, first_c + c, w0, h0,
                                                              d0, n, static_cast<unsigned short>(at.s * Problem::dilation_w),
                                                              static_cast<unsigned short>(at.r * Problem::dilation_h),
                                                              static_cast<unsigned short>(at.t * D::dilation));
                } else {
                    cp_async_bulk_tensor_im2col_shared_global(ring.pixels_of(place.stage, block), x, full, first_c + c, w0, h0, n,
                                                              static_cast<unsigned short>(tap % Problem::s * Problem::dilation_w),
                                                              static_cast<unsigned short>(tap / Problem::s * Problem::dilation_h));
                }
                copy_filters<Problem, Tuning>(ring.filters_of(place.stage, block), w, full, tiles.group(tile), filter, tap, c);
            }
            place.advance();
        }
    }
    return place;
}

// `count` sums of each of a warpgroup's MMA tiles along M to the output: filters from k on.
template <class Problem, class Tuning, int count, class Tiles, class Ring>
__device__ __forceinline__ void store_rows(const float (&sums)[Tuning::m_tiles][count], Bias<Problem> bias,
                                           typename Problem::result* y, const Tiles& tiles, const Ring& ring,
                                           Offset<Problem> first_pixel, int group, int k) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < Tuning::m_tiles; ++m)
        Ring::Output::store(sums[m], ring.outputs_of(warp), bias, y, tiles, first_pixel + m * 64, group, k, lane);
}

// Brings to the L2 cache what `store_tile` will add to a tile.
template <class Problem, class Tuning, class Tiles>
__device__ __forceinline__ void prefetch_tile(Bias<Problem> bias, const typename Problem::result* y, const Tiles& tiles,
                                              int first_row, Offset<Problem> tile) {
    if constexpr (Problem::add) {
        const Offset<Problem> first_pixel = tiles.first_pixel(tile) + first_row + threadIdx.x / 32 % 4 * 16;
        int k = tiles.filters(tile) * Tuning::filters;
        if constexpr (Tuning::split > 1) k += static_cast<int>(cluster_rank()) * (Tuning::filters / Tuning::split);
#pragma unroll
        for (int m = 0; m < Tuning::m_tiles; ++m)
            prefetch_residuals<Problem, Tuning::filters / Tuning::split>(bias, y, tiles, first_pixel + m * 64, tiles.group(tile), k,
                                                                         threadIdx.x % 32);
    }
}

// A warpgroup's sums of a tile, whose pixels begin at `first_row`, to the output; those of a cluster are added before.
template <class Problem, class Tuning, class Tiles, class Ring>
__device__ __forceinline__ void store_tile(const float (&sums)[Tuning::m_tiles][Tuning::filters / 2],
                                           Bias<Problem> bias, typename Problem::result* y, const Tiles& tiles, const Ring& ring,
                                           int first_row, Offset<Problem> tile) {
    const Offset<Problem> first_pixel = tiles.first_pixel(tile) + first_row + threadIdx.x / 32 % 4 * 16;
    const int group = tiles.group(tile), first_k = tiles.filters(tile) * Tuning::filters;
    if constexpr (Tuning::split == 1) {
        store_rows<Problem, Tuning>(sums, bias, y, tiles, ring, first_pixel, group, first_k);
    } else {
        // The ring is not needed any more: this is the only tile of the cluster.
        constexpr int count = Tuning::filters / 2;
        float* const own = reinterpret_cast<float*>(ring.base);
        barrier_sync(1, Ring::threads);  // the stages of this CTA have been read
#pragma unroll
        for (int i = 0; i < Ring::sums; ++i) own[i * Ring::threads + threadIdx.x] = sums[i / count][i % count];
        meet_in_cluster();
        float share[Tuning::m_tiles][count / Tuning::split];
        add_shares<Tuning::split, Ring::threads>(share, own);
        meet_in_cluster();
        const int own_k = first_k + static_cast<int>(cluster_rank()) * (Tuning::filters / Tuning::split);
        store_rows<Problem, Tuning>(share, bias, y, tiles, ring, first_pixel, group, own_k);
    }
}

// One warpgroup's products of all tiles of the CTA.
template <class Problem, class Tuning>
struct Consumer16bit {
    static constexpr int rounders = 0;
    static __device__ __forceinline__ RingPlace<Tuning::stages> consume(
        Bias<Problem> bias, typename Problem::result* y, const GemmTiles<Problem, Tuning>& tiles,
        const GemmRing<Problem, Tuning>& ring, int warpgroup, Offset<Problem> first_tile, Offset<Problem> step,
        RingPlace<Tuning::stages> place = {}) {
        using Ring = GemmRing<Problem, Tuning>;
        const int lane = threadIdx.x % 32, first_row = warpgroup * Tuning::m_tiles * 64;
        for (Offset<Problem> tile = first_tile; tile < tiles.count(); tile += step) {
            prefetch_tile<Problem, Tuning>(bias, y, tiles, first_row, tile);
            float sums[Tuning::m_tiles][Tuning::filters / 2];
            int before = 0;
            wgmma_fence(sums);
            for (int stage = ring.first; stage < ring.end; ++stage) {
                mbarrier_wait_parity(ring.full(place.stage), place.parity);
                wgmma_fence();
#pragma unroll
                for (int block = 0; block < Tuning::stage_blocks; ++block) {
                    const MatrixDescriptor a = matrix_descriptor(
                        ring.pixels_of(place.stage, block) + first_row * Ring::row_bytes, 0, 8 * Ring::row_bytes, Ring::row_bytes);
                    const auto b = ring.filter_operand(place.stage, block);
#pragma unroll
                    for (int i = 0; i < Tuning::channel_block / 16; ++i)
#pragma unroll
                        for (int m = 0; m < Tuning::m_tiles; ++m)
                            multiply(typename Problem::element{}, sums[m], a + (m * 64 * Ring::row_bytes + 32 * i),
                                     b + Ring::filter_step * i, stage > ring.first || block > 0 || i > 0);
                }
                wgmma_commit_group();
                if (stage > ring.first) {
                    // The products of the stage before are done while these are under way.
                    wgmma_wait_group<1>();
                    mbarrier_arrive_warp(ring.empty(before), lane);
                }
                before = place.stage;
                place.advance();
            }
            wgmma_wait_group<0>(sums);
            mbarrier_arrive_warp(ring.empty(before), lane);
            store_tile<Problem, Tuning>(sums, bias, y, tiles, ring, first_row, tile);
        }
        return place;
    }
};

// A CTA: one warpgroup copies and, with `Consumer::rounders`, rounds filters; the others do as `Consumer` says.
template <class Problem, class Tuning, class Consumer>
__device__ __forceinline__ void run_roles(const TensorMap& x, const TensorMap& w, Bias<Problem> bias,
                                          typename Problem::result* y, long long batch) {
    const GemmRing<Problem, Tuning> ring;
    const GemmTiles<Problem, Tuning> tiles(batch);
    if (threadIdx.x == 0) ring.template init<(Consumer::rounders > 0)>();
    __syncthreads();
    const int warpgroup = threadIdx.x / 128;
    const Offset<Problem> first = blockIdx.x / Tuning::split, step = gridDim.x / Tuning::split;
    if (warpgroup == Tuning::warpgroups) {
        set_registers_down<Tuning::producer_registers>();
        if (threadIdx.x % 128 == 0) produce<Problem, Tuning>(x, w, batch, tiles, ring, first, step);
        if constexpr (Consumer::rounders > 0) {
            static_assert(Consumer::rounders == 3, "all warps of the producer but the one that copies");
            if (threadIdx.x % 128 >= 32) Consumer::round(tiles, ring, first, step);
        }
        if constexpr (Tuning::split > 1) {
            // NOTE: the warp of the thread that copied converges before the barriers that all threads take part in.
            __syncwarp();
            meet_in_cluster();
            meet_in_cluster();
        }
    } else {
        set_registers_up<Tuning::consumer_registers>();
        Consumer::consume(bias, y, tiles, ring, warpgroup, first, step);
    }
}

template <class Problem, class Tuning>
__device__ __forceinline__ void native_gemm_16bit(const TensorMap& x, const TensorMap& w, Bias<Problem> bias,
                                                  typename Problem::result* y, long long batch) {
    run_roles<Problem, Tuning, Consumer16bit<Problem, Tuning>>(x, w, bias, y, batch);
}

// A number for each phase of a gradient that one launch computes.
template <int64... numbers>
struct OfPhases {
    static constexpr int count = sizeof...(numbers);
    static __host__ __device__ constexpr int64 at(int phase) {
        constexpr int64 all[] = {numbers...};
        return all[phase];
    }
};

// One of several phases, as a problem of its own. Filters that are read as they lie have taps back from `last_row` and
// `last_column`; those that were rearranged begin at `first_weight`.
template <class Problem, int number>
struct PhaseProblem : Problem {
    static constexpr int r = Problem::phase_r::at(number), s = Problem::phase_s::at(number);
    static constexpr int p = Problem::phase_p::at(number), q = Problem::phase_q::at(number);
    static constexpr int pad_top = Problem::phase_pad_top::at(number), pad_left = Problem::phase_pad_left::at(number);
    static constexpr int first_p = Problem::phase_first_p::at(number), first_q = Problem::phase_first_q::at(number);
    static constexpr int last_row = Problem::phase_last_row::at(number), last_column = Problem::phase_last_column::at(number);
    static constexpr int64 first_weight = Problem::phase_first_weight::at(number);
};

// The tensor maps of each phase: of its pixels and of its filters.
template <int count>
struct PhaseMaps {
    const TensorMap* x[count];
    const TensorMap* w[count];
};

// The tiles of the phases from `phase` on, `before` of which come before these; CTAs take turns over all of them.
template <class Problem, class Tuning, template <class, class> class Consumer, int phase, int count>
__device__ __forceinline__ void run_phases(const PhaseMaps<count>& maps, Bias<Problem> bias, typename Problem::result* y,
                                           long long batch, int warpgroup, Offset<Problem> before,
                                           RingPlace<Tuning::stages> place) {
    using P = PhaseProblem<Problem, phase>;
    const GemmRing<P, Tuning> ring;
    const GemmTiles<P, Tuning> tiles(batch);
    const Offset<Problem> step = gridDim.x / Tuning::split, first = (blockIdx.x / Tuning::split + step - before % step) % step;
    if (warpgroup == Tuning::warpgroups)
        place = produce<P, Tuning>(*maps.x[phase], *maps.w[phase], batch, tiles, ring, first, step, place);
    else place = Consumer<P, Tuning>::consume(bias, y, tiles, ring, warpgroup, first, step, place);
    if constexpr (phase + 1 < count)
        run_phases<Problem, Tuning, Consumer, phase + 1>(maps, bias, y, batch, warpgroup, before + tiles.count(), place);
}

// A CTA of a launch that computes several phases.
template <class Problem, class Tuning, template <class, class> class Consumer, int count>
__device__ __forceinline__ void run_roles(const PhaseMaps<count>& maps, Bias<Problem> bias, typename Problem::result* y,
                                          long long batch) {
    using First = PhaseProblem<Problem, 0>;
    static_assert(Problem::phase_r::count == count, "each phase has maps");
    static_assert(Consumer<First, Tuning>::rounders == 0, "filters need no rounding");
    if (threadIdx.x == 0) GemmRing<First, Tuning>().template init<false>();
    __syncthreads();
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == Tuning::warpgroups) {
        set_registers_down<Tuning::producer_registers>();
        if (threadIdx.x % 128 == 0) run_phases<Problem, Tuning, Consumer, 0>(maps, bias, y, batch, warpgroup, 0, {});
        if constexpr (Tuning::split > 1) {
            __syncwarp();
            meet_in_cluster();
            meet_in_cluster();
        }
    } else {
        set_registers_up<Tuning::consumer_registers>();
        run_phases<Problem, Tuning, Consumer, 0>(maps, bias, y, batch, warpgroup, 0, {});
    }
}

template <class Problem, class Tuning>
__device__ __forceinline__ void native_gemm_16bit(const TensorMap& x, const TensorMap& x1, const TensorMap& w, Bias<Problem> bias,
                                                  typename Problem::result* y, long long batch) {
    const PhaseMaps<2> maps = {{&x, &x1}, {&w, &w}};
    run_roles<Problem, Tuning, Consumer16bit>(maps, bias, y, batch);
}
template <class Problem, class Tuning>
__device__ __forceinline__ void native_gemm_16bit(const TensorMap& x, const TensorMap& x1, const TensorMap& x2, const TensorMap& w,
                                                  Bias<Problem> bias, typename Problem::result* y, long long batch) {
    const PhaseMaps<3> maps = {{&x, &x1, &x2}, {&w, &w, &w}};
    run_roles<Problem, Tuning, Consumer16bit>(maps, bias, y, batch);
}
template <class Problem, class Tuning>
__device__ __forceinline__ void native_gemm_16bit(const TensorMap& x, const TensorMap& x1, const TensorMap& x2,
                                                  const TensorMap& x3, const TensorMap& w, Bias<Problem> bias,
                                                  typename Problem::result* y, long long batch) {
    const PhaseMaps<4> maps = {{&x, &x1, &x2, &x3}, {&w, &w, &w, &w}};
    run_roles<Problem, Tuning, Consumer16bit>(maps, bias, y, batch);
}

}  // namespace leanconv
