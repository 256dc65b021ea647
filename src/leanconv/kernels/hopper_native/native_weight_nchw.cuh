// native_weight_nchw: gradient of the filters on Hopper tensor cores (wgmma); float16 or bfloat16 in NCHW, sums in float32.
//
//   dw[k, c, tap] = sum over output pixels of dy[pixel, k] * x[pixel + tap, c]
//
// Requires   sm_90a; NCHW; strides up to 64; a stage of x and dy that fits shared memory twice.
// Volumes    each output slice is an image; a tile has taps of one slice of the filters.
// Numerics   products are exact; a block sums up to 2^17 pixels in the tensor core, which rounds toward zero: less than 2^-10 of
//            a sum of one sign is lost. Pixels of the linear order without an output have zeros of dy. NOTE: so an infinite
//            pixel next to the image's edge makes NaN of the gradients of taps that do not read it, of its channel.
// CTA tile   filters x channels x taps of weights; `pixels` outputs a stage. Pixels of x lie in shared memory once, in the padded
//            linear order of native_gemm_nchw, as rows of eight channels; every tap reads them at a constant offset, as an
//            operand whose 16 reduction elements are 16 neighbouring rows. Split-K by cluster (`split`, in the order of ranks),
//            or through a workspace (`split_k`, added by split_k.cuh).
// Roles      warpgroups 0..n-1  consumers: dy by ldmatrix, once for all taps; wgmma with x
//            the others         producers: load x and dy, transpose them in registers, store
// Pipelines  windows  stages    full: producers -> consumers, empty: consumers -> producers
// One stage  loads (pixels + reach) * channels + pixels * filters elements. A consumer has 64 filters; a product of n channels
//            reads 16 * n * 2 bytes in n / 2 cycles: 64 bytes a cycle. 128 pixels of 56x56, 128 filters, 32 channels, 3x3:
//            48 KiB loaded, 2304 cycles of products.
// Work       2 N P Q flops a weight; tensor cores start 4096 flops a cycle and multiprocessor: 989 TFLOP/s at 1.83 GHz, two
//            thirds of it at the power limit.
// Explored (H200, 7767c43, when a product took three times as many instructions): burst, 3x3, 56x56, 256 channels and
//            filters: 400 TFLOP/s; products alone 647, loads alone 589.
#pragma once

#include <device/element.cuh>
#include <device/epilogue.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/mma.cuh>
#include <device/ptx/sync.cuh>
#include <kernels/hopper_native/accumulators.cuh>
#include <kernels/hopper_native/linear_pixels.cuh>
#include <kernels/hopper_native/transposed_loads.cuh>

namespace leanconv {

// What warps load of x, and of dy, which has the linear order of the outputs.
template <class Problem, class Tuning>
struct InputWindows : LinearPixels<Problem, Tuning>, InputTensor<Problem> {
    static constexpr int channels = Tuning::channels * Tuning::channel_groups, vectors = channels / 8;
    static constexpr int registers = Tuning::producer_registers;
    static constexpr bool wide = false;
    static constexpr int bytes = vectors * InputWindows::pitch * 16;
    static constexpr bool whole = Problem::group_c % channels == 0;
};
// The slices of dy, each an image.
template <class Problem>
struct OutputDepth {
    static constexpr bool volume = Depth<Problem>::volume;
    static constexpr int d = Depth<Problem>::z, z = d, stride = 1, pad = 0, dilation = 1;
};
// One tap that reads the pixel of its own place.
struct OwnPixel {
    static __host__ __device__ constexpr int phases() { return 1; }
    static __host__ __device__ constexpr int phase_at(int) { return 0; }
    static __host__ __device__ constexpr int first_tap(int) { return 0; }
    static __host__ __device__ constexpr int shift(int) { return 0; }
};
template <class Problem, class Tuning>
struct OutputWindows {
    using T = typename Problem::element;
    using Input = InputWindows<Problem, Tuning>;
    using D = OutputDepth<Problem>;
    using AxisH = OwnPixel;
    using AxisW = OwnPixel;
    static constexpr int row = Input::row, rows = Input::rows, image = Input::image;
    static constexpr int phases = 1, phase_pixels = Tuning::pixels, spare = phase_pixels, pitch = spare + 1;
    static constexpr int h = Problem::p, w = Problem::q, c = Problem::k, group_c = Problem::group_k, stride_h = 1, stride_w = 1;
    static constexpr int channels = 64 * Tuning::filter_groups, vectors = channels / 8;
    static constexpr int registers = Tuning::producer_registers;
    static constexpr bool wide = false;
    static constexpr int bytes = vectors * pitch * 16;
    static constexpr bool whole = group_c % channels == 0;
};

// A tile of weights: taps first, then channels, then filters. Of volumes the taps are those of one slice of the filters.
template <class Problem, class Tuning>
struct WeightTile : SliceOf<Depth<Problem>::volume> {
    static constexpr int filters = OutputWindows<Problem, Tuning>::channels, channels = InputWindows<Problem, Tuning>::channels;
    static constexpr int all_taps = Problem::r * Problem::s, of_taps = ceil_div(all_taps, Tuning::taps);
    static constexpr int of_channels = ceil_div(Problem::group_c, channels), of_filters = ceil_div(Problem::group_k, filters);
    static constexpr int slices = FilterDepth<Problem>::t;
    static constexpr int of_group = of_taps * of_channels * of_filters * slices, count = of_group * Problem::groups;
    int group, first_filter, first_channel, first_tap;
    __device__ __forceinline__ explicit WeightTile(int number)
        : group(number / of_group),
          first_filter(number / (of_taps * of_channels) % of_filters * filters),
          first_channel(number / of_taps % of_channels * channels),
          first_tap(number % of_taps * Tuning::taps) {
        if constexpr (Depth<Problem>::volume) this->slice = number % of_group / (of_taps * of_channels * of_filters);
    }
};

// The stages of a block: those of all pixels are shared evenly.
template <class Problem, class Tuning>
struct PixelShare {
    int first, end;
    __device__ __forceinline__ PixelShare(long long batch, int slice) {
        constexpr int image = InputWindows<Problem, Tuning>::image;
        const long long all = (batch * image + Tuning::pixels - 1) / Tuning::pixels;
        const int number = Tuning::split == 1 ? slice : slice * Tuning::split + static_cast<int>(cluster_rank());
        first = static_cast<int>(all * number / (Tuning::split_k * Tuning::split));
        end = static_cast<int>(all * (number + 1) / (Tuning::split_k * Tuning::split));
    }
};

// Shared memory: the barriers, the offsets at which taps read, and a ring of windows of x and dy, or at the end the sums.
template <class Problem, class Tuning>
struct WeightRing {
    using Input = InputWindows<Problem, Tuning>;
    using Output = OutputWindows<Problem, Tuning>;
    using Weights = WeightTile<Problem, Tuning>;
    static constexpr int consumers = Tuning::filter_groups * Tuning::channel_groups * Tuning::tap_groups;
    static constexpr int loading_warps = 4 * Tuning::producers;
    // Warps that load x: as many as its share of all loads.
    static constexpr int x_work = PixelUnit<Input>::work, dy_work = PixelUnit<Output>::work;
    static constexpr int even_warps = (loading_warps * x_work + (x_work + dy_work) / 2) / (x_work + dy_work);
    static constexpr int x_warps = even_warps < 1 ? 1 : even_warps < loading_warps ? even_warps : loading_warps - 1;
    static constexpr int offsets_at = 16 * Tuning::stages, ring_at = ceil_div(offsets_at + 4 * Tuning::taps, 128) * 128;
    static constexpr int stage_bytes = Input::bytes + Output::bytes, ring_bytes = Tuning::stages * stage_bytes;
    // Sums of a filter, an odd number of words apart.
    static constexpr int of_filter = Weights::channels * Tuning::taps, pitch = of_filter | 1;
    static constexpr int sums_bytes = Weights::filters * pitch * 4;
    static_assert(ring_at + (ring_bytes > sums_bytes ? ring_bytes : sums_bytes) == Tuning::bytes, "the host counts as many bytes");
    unsigned char* base;

    __device__ __forceinline__ WeightRing() : base(shared_memory()) {}
    __device__ __forceinline__ unsigned char* input(int stage) const { return base + ring_at + stage * stage_bytes; }
    __device__ __forceinline__ unsigned char* output(int stage) const { return input(stage) + Input::bytes; }
    __device__ __forceinline__ int* offsets() const { return reinterpret_cast<int*>(base + offsets_at); }
    __device__ __forceinline__ float* sums() const { return reinterpret_cast<float*>(base + ring_at); }
    __device__ __forceinline__ Mbarrier* pixels_full(int stage) const { return reinterpret_cast<Mbarrier*>(base) + stage; }
    __device__ __forceinline__ Mbarrier* pixels_empty(int stage) const { return pixels_full(Tuning::stages) + stage; }
    // By all threads, before a barrier of the block. Taps past the last read what the first one does.
    __device__ __forceinline__ void init(const Weights& weights) const {
        for (int i = threadIdx.x; i < Tuning::taps; i += blockDim.x) {
            const int tap = weights.first_tap + i < Weights::all_taps ? weights.first_tap + i : 0;
            offsets()[i] = Input::tap_offset(tap / Problem::s, tap % Problem::s);
        }
        if (threadIdx.x > 0) return;
        for (int i = 0; i < Tuning::stages; ++i) {
            mbarrier_init(pixels_full(i), loading_warps);
            mbarrier_init(pixels_empty(i), 4 * consumers);
        }
        fence_mbarrier_init();
    }
};

// The share of a warp in all windows of the block.
template <class Source, int warps, int stages>
struct StageWalk : UnitWalk<Source, warps, stages> {
    using Walk = UnitWalk<Source, warps, stages>;
    int stage, end;
    __device__ __forceinline__ StageWalk(int warp, int first, int end) : Walk(warp), stage(first), end(end) {}
    __device__ __forceinline__ bool valid() const { return stage < end; }
    __device__ __forceinline__ void advance() {
        if (Walk::advance()) ++stage;
    }
};

// All that a warp loads, of x or of dy.
template <class Source, int warps, class Problem, class Tuning, class Window>
__device__ __forceinline__ void load_stages(const typename Source::T* from, long long batch,
                                            const PixelShare<Problem, Tuning>& share,
                                            const WeightRing<Problem, Tuning>& windows, int group, int first_channel,
                                            int warp, const Window& window, int t = 0) {
    const int lane = threadIdx.x % 32;
    StageWalk<Source, warps, Tuning::stages> walk(warp, share.first, share.end);
    const auto load = [&](PixelUnit<Source>& unit) {
        unit.load(from, batch, walk.stage * Tuning::pixels, group, first_channel, walk.round * 32 + lane, t);
    };
    load_units<Source>(walk, windows, lane, load, window);
}

// One warpgroup's products, to shared memory: 64 filters, `channels`, and `taps` of the tile's from number `first_tap` on.
template <int first_tap, int taps, class Problem, class Tuning>
__device__ __forceinline__ void sum_windows(const PixelShare<Problem, Tuning>& share,
                                            const WeightRing<Problem, Tuning>& windows, int filters, int channels) {
    using Windows = WeightRing<Problem, Tuning>;
    using Input = typename Windows::Input;
    using Output = typename Windows::Output;
    constexpr int count = Tuning::channels / 2, steps = Tuning::pixels / 16;
    static_assert(steps % 2 == 0, "fragments are of two steps in turn");
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    // The line of a lane: of four matrices of eight pixels and eight filters.
    const int own = (filters * 8 + warp * 2 + lane / 8 % 2) * Output::pitch + lane / 16 * 8 + lane % 8;
    int offsets[taps];
#pragma unroll
    for (int i = 0; i < taps; ++i) {
        const int tap = first_tap + i;
        offsets[i] = Windows::Weights::of_taps == 1 ? Input::tap_offset(tap / Problem::s, tap % Problem::s) : windows.offsets()[tap];
    }
    float sums[taps][count] = {};
    unsigned pixels[2][4];
    RingPlace<Tuning::stages> place;
    int before = 0;
    wgmma_fence(sums);
    for (int stage = share.first; stage < share.end; ++stage) {
        mbarrier_wait_parity(windows.pixels_full(place.stage), place.parity);
        const TransposedDescriptor x = transposed_descriptor(
            windows.input(place.stage) + channels * (Tuning::channels / 8) * Input::pitch * 16, 128, Input::pitch * 16, 0);
        const unsigned char* const dy = windows.output(place.stage) + own * 16;
#pragma unroll
        for (int step = 0; step < steps; ++step) {
            ldmatrix_trans(pixels[step % 2], dy + step * 256);
            wgmma_fence(pixels[step % 2]);
#pragma unroll
            for (int tap = 0; tap < taps; ++tap)
                multiply(typename Problem::element{}, sums[tap], pixels[step % 2],
                         x.further((offsets[tap] + step * 16) * 16), true);
            wgmma_commit_group();
            // The products of the step before are done while these are under way.
            wgmma_wait_group<1>(pixels[(step + 1) % 2]);
            if (step == 0 && stage > share.first) mbarrier_arrive_warp(windows.pixels_empty(before), lane);
        }
        before = place.stage;
        place.advance();
    }
    wgmma_wait_group<0>(sums, pixels[1]);
    barrier_sync(1, 128 * Windows::consumers);  // all windows have been read
    // A thread has two filters, and of every eight channels a pair.
    float* const to = windows.sums() + (filters * 64 + warp * 16 + lane / 4) * Windows::pitch +
                      (channels * Tuning::channels + lane % 4 * 2) * Tuning::taps + first_tap;
#pragma unroll
    for (int tap = 0; tap < taps; ++tap)
#pragma unroll
        for (int i = 0; i < count; ++i)
            to[i / 2 % 2 * 8 * Windows::pitch + (i / 4 * 8 + i % 2) * Tuning::taps + tap] = sums[tap][i];
}

// The same of warpgroup number `warpgroup`.
template <class Problem, class Tuning>
__device__ __forceinline__ void sum_windows(const PixelShare<Problem, Tuning>& share,
                                            const WeightRing<Problem, Tuning>& windows, int warpgroup) {
    constexpr int taps = ceil_div(Tuning::taps, Tuning::tap_groups), rest = Tuning::taps - taps;
    static_assert(Tuning::tap_groups <= 2, "one group has all taps, or two share them");
    const int filters = warpgroup % Tuning::filter_groups, others = warpgroup / Tuning::filter_groups;
    const int channels = others % Tuning::channel_groups;
    if (Tuning::tap_groups == 1 || others < Tuning::channel_groups)
        sum_windows<0, taps, Problem, Tuning>(share, windows, filters, channels);
    else if constexpr (Tuning::tap_groups == 2)
        sum_windows<taps, rest, Problem, Tuning>(share, windows, filters, channels);
}

// The block's share of a tile's weights, by all threads: those of some filters, a warp one after the other, added over the
// cluster.
template <class Problem, class Tuning, class Result>
__device__ __forceinline__ void store_windows(Result* dw, const WeightTile<Problem, Tuning>& weights,
                                              const WeightRing<Problem, Tuning>& windows) {
    using Windows = WeightRing<Problem, Tuning>;
    using Weights = WeightTile<Problem, Tuning>;
    constexpr int filters = Weights::filters / Tuning::split;
    static_assert(filters * Tuning::split == Weights::filters, "blocks of a cluster share filters evenly");
    const int first = Tuning::split == 1 ? 0 : static_cast<int>(cluster_rank()) * filters, lane = threadIdx.x % 32;
    const int exist = min(first + filters, Problem::group_k - weights.first_filter);
    for (int filter = first + static_cast<int>(threadIdx.x) / 32; filter < exist; filter += blockDim.x / 32) {
        const float* const from = windows.sums() + filter * Windows::pitch;
        const int64 row = static_cast<int64>(weights.group) * Problem::group_k + weights.first_filter + filter;
        constexpr int of_channel = Weights::slices * Weights::all_taps;
        Result* const to =
            dw + (row * Problem::group_c + weights.first_channel) * of_channel + weights.slice * Weights::all_taps + weights.first_tap;
#pragma unroll 4
        for (int i = lane; i < Windows::of_filter; i += 32) {
            const int channel = i / Tuning::taps, tap = i % Tuning::taps;
            if (weights.first_channel + channel >= Problem::group_c) continue;
            if (Weights::all_taps % Tuning::taps != 0 && weights.first_tap + tap >= Weights::all_taps) continue;
            const float sum = Tuning::split == 1 ? from[i] : cluster_sum<Tuning::split>(from + i);
            // NOTE: where a tile has all taps, its channels' weights lie as in shared memory.
            Result* const at = to + (Weights::of_taps * Weights::slices == 1 ? i : channel * of_channel + tap);
            if constexpr (Tuning::split_k > 1) *at = sum;
            else *at = from_float<Result>(finish<Problem>(sum, 0.0f, held_by<Problem>(at, true)));
        }
    }
}

// `dw` is the gradient, or with `split_k` above 1 room for as many partial sums.
template <class Problem, class Tuning, class Result>
__device__ __forceinline__ void native_weight_nchw(const typename Problem::element* x, const typename Problem::element* dy,
                                                     Result* dw, long long batch) {
    static_assert(!Problem::nhwc && !Problem::chwn, "channels of a pixel lie apart");
    using Windows = WeightRing<Problem, Tuning>;
    using Weights = WeightTile<Problem, Tuning>;
    const Windows windows;
    const int number = static_cast<int>(blockIdx.x) / Tuning::split, slice = number / Weights::count;
    const Weights weights(number % Weights::count);
    windows.init(weights);
    __syncthreads();
    batch *= Depth<Problem>::z;
    const PixelShare<Problem, Tuning> share(batch, slice);
    // NOTE: the same number from the first lane: so the compiler knows that a warp's threads agree, and counts descriptors in
    // uniform registers: 2.5 instructions for a product instead of 7.5.
    const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
    const int warp = static_cast<int>(threadIdx.x) / 32 - 4 * Windows::consumers;
    if (warpgroup < Windows::consumers) {
        set_registers_up<Tuning::consumer_registers>();
        sum_windows<Problem, Tuning>(share, windows, warpgroup);
    } else {
        set_registers_down<Tuning::producer_registers>();
        constexpr int x_warps = Windows::x_warps, dy_warps = Windows::loading_warps - x_warps;
        if (warp < x_warps)
            load_stages<typename Windows::Input, x_warps>(x, batch, share, windows, weights.group, weights.first_channel, warp,
                                                          [&](int stage) { return windows.input(stage); }, weights.slice);
        else
            load_stages<typename Windows::Output, dy_warps>(dy, batch, share, windows, weights.group, weights.first_filter,
                                                            warp - x_warps, [&](int stage) { return windows.output(stage); });
    }
    if constexpr (Tuning::split > 1) cluster_barrier();
    else __syncthreads();
    constexpr int64 all = static_cast<int64>(Problem::k) * Problem::group_c * Weights::slices * Weights::all_taps;
    store_windows<Problem, Tuning>(dw + slice * all, weights, windows);
    if constexpr (Tuning::split > 1) cluster_barrier();
}

}  // namespace leanconv
