// depthwise_weight: gradient of a depthwise layer's filters; x and dy pass through registers once, the sums stay there.
//
//   dw[k, r, s] = sum over n, p, q of dy[n, k, p, q] * x[n, k / group_k, p * stride + r * dilation - pad, ...]
//
// Requires   one channel a group; NCHW or NHWC; at most 81 taps.
// Volumes    a walk has the rows of one slice of dy, and windows of x in all slices that this slice meets.
// Numerics   float32 FMAs; every 16 rows the sums are promoted: added to totals in shared memory, and begun anew, so that no
//            chain of additions is as long as the reduction. Sums over lanes (shuffles), warps (shared memory), the blocks
//            of a cluster (distributed shared memory) or partial sums (split-K) in a fixed order: no atomics, the same bits
//            in every run.
// CTA tile   a filter (NCHW), or `channels` neighbouring ones (NHWC), which `split` blocks of a cluster or split-K share.
// Thread     a filter: R * S sums. It walks down strips of `columns` columns of one channel, `rows` rows of dy each; walks
//            are dealt out to threads in a fixed order.
// One step   load a strip of dy and the next row of x; multiply the row of x with all rows of dy that it overlaps:
//            R * S * columns FMAs; 7 columns of a 7x7 filter: 20 loads for 343 FMAs.
// Registers  R * S sums, (span + unrolled) * columns of dy, 2 windows of x, 40 for addresses.
// Work       2 * R * S flops for 8 bytes an output pixel: reading both tensors once bounds filters up to about 8x8, FMA
//            issue larger ones.
// Measured   figure: depthwise-wgrad depthwise_weight/pytorch mean = 1.89
//            figure: depthwise-nchw-wgrad depthwise_weight/pytorch mean = 1.97
#pragma once

#include <device/ptx/sync.cuh>
#include <kernels/depthwise/window.cuh>

namespace leanconv {

// A strip of a row of dy as a window of itself, whose vectors begin with it.
template <class Problem, class Window>
struct DepthwiseStrip {
    static constexpr int window = Window::columns, lead = 0;
    static constexpr bool vectors = Window::vector_stores;
};

// A strip of a row of dy that begins at `row`, from column `first_q` on; zeros past the row's end, and everywhere unless
// the row `exists`.
template <class Problem, class Strip, class T>
__device__ __forceinline__ void load_strip(WindowPixels<Strip, T>& strip, const T* row, int first_q, bool exists) {
    if constexpr (Strip::vectors) {
#pragma unroll
        for (int q = 0; q < Strip::window; q += 4) {
            const bool inside = exists && first_q + q < Problem::q;
            if constexpr (sizeof(T) == 2) {
                strip.fours[q / 4].load(row + first_q + q, inside);
            } else {
                float four[4] = {};
                if (inside) load_adjacent(four, row + first_q + q);
#pragma unroll
                for (int i = 0; i < 4; ++i) strip.pixels[q + i] = four[i];
            }
        }
    } else {
        constexpr int pixel = Problem::nhwc ? Problem::k : 1;
#pragma unroll
        for (int q = 0; q < Strip::window; ++q) {
            const bool inside = Problem::q % Strip::window == 0 || first_q + q < Problem::q;
            strip.pixels[q] = exists && inside ? row[(first_q + q) * pixel] : T{};
        }
    }
}

// A thread's share of the sums of filter k, added to `totals`, Tuning::threads apart: walks `worker`, worker + workers, ... of
// all strips, bands and images.
// NOTE: `most_rows` is an argument. Where the compiler knew how many steps a walk has it unrolled them all, 270 kB of code.
template <class Problem, class Tuning, class Window = DepthwiseWindow<Problem, Tuning::columns>>
__device__ __forceinline__ void walk_strips(float* totals, ElementsIn<Problem> x, ElementsIn<Problem> dy, int k,
                                            int worker, int workers, long long batch, int most_rows) {
    using T = typename Problem::element;
    using D = Depth<Problem>;
    constexpr int columns = Window::columns, span = Window::span, stride = Problem::stride_h;
    // Rows of dy that an iteration takes, windows of x that are here or in flight, and steps that rows are brought to the
    // L2 cache before they are loaded. Explored (H200, 152a946, one row an iteration): 11 % faster in NCHW, 11 % slower
    // in NHWC, where it takes as many instructions as the loads do.
    constexpr int unrolled = Problem::unrolled, windows = 2, ahead = Problem::nhwc ? 0 : 3;
    constexpr int promoted = 16;  // rows of dy after which sums are promoted
    static_assert(promoted % unrolled == 0, "iterations end where sums are promoted");
    constexpr int x_row = Problem::w * Window::pixel;
    constexpr int dy_pixel = Problem::nhwc ? Problem::k : 1, dy_row = Problem::q * dy_pixel;
    const int c = k / Problem::group_k;
    const int bands = (Problem::p + most_rows - 1) / most_rows;
    const int of_slice = bands * Window::strips, of_image = D::z * of_slice;
    const int64 walks = batch * of_image;
    float sum[Window::taps] = {};
    const auto promote = [&] {
#pragma unroll
        for (int i = 0; i < Window::taps; ++i) {
            totals[i * Tuning::threads] += sum[i], sum[i] = 0.0f;
            if (i % 4 == 3) asm volatile("" ::: "memory");  // no more loads ahead than registers are free for
        }
    };

#pragma unroll 1
    for (int64 walk = worker; walk < walks; walk += workers) {
        const int64 n = walk / of_image;
        int in_image = static_cast<int>(walk - n * of_image), z = 0;
        if constexpr (D::volume) z = in_image / of_slice, in_image -= z * of_slice;
        const int first_d = z * D::stride - D::pad;
        const int first_q = in_image % Window::strips * columns, first_p = in_image / Window::strips * most_rows;
        const int column = first_q * Problem::stride_w - Problem::pad_left;
        const int first_i = first_p * stride - Problem::pad_top;
        const int rows = min(most_rows, Problem::p - first_p), steps = rows + span;
        constexpr int x_rows = D::d * Problem::h, dy_rows = output_rows<Problem>;
        const T* image = x + (Problem::nhwc ? n * x_rows * x_row + c : (n * Problem::c + c) * x_rows * x_row);
        const T* grad = dy + static_cast<int64>(first_p) * dy_row +
            (Problem::nhwc ? n * dy_rows * dy_row + k : (n * Problem::k + k) * dy_rows * dy_row);
        if constexpr (D::volume) {
            image += static_cast<int64>(first_d) * Problem::h * x_row;
            grad += static_cast<int64>(z) * Problem::p * dy_row;
        }
        // Row `at` of x from the first that the band reads.
        const auto inside = [&](int at) { return static_cast<unsigned>(first_i + at) < static_cast<unsigned>(Problem::h); };
        const auto row_of_x = [&](int at) { return image + static_cast<int64>(first_i + at) * x_row; };
        const auto exists = [&](int tap) {
            return !D::volume || static_cast<unsigned>(first_d + tap * D::dilation) < static_cast<unsigned>(D::d);
        };
        // Its window in each slice.
        const auto load = [&](WindowPixels<Window, T>(&to)[D::t], int at) {
            if constexpr (!D::volume) return load_window(to[0], row_of_x(at), column, inside(at));
#pragma unroll
            for (int tap = 0; tap < D::t; ++tap)
                load_window(to[tap], row_of_x(at) + static_cast<int64>(tap * D::dilation) * Problem::h * x_row, column,
                            inside(at) && exists(tap));
        };
        const auto prefetch = [&](int t) {
            if constexpr (ahead > 0) {
                if (t < rows)
                    prefetch_pixels<columns, Problem::q, dy_pixel>(grad + static_cast<int64>(t) * dy_row, first_q);
#pragma unroll
                for (int at = t * stride; at < (t + 1) * stride; ++at)
#pragma unroll
                    for (int tap = 0; tap < D::t; ++tap)
                        if (t < steps && inside(at) && exists(tap))
                            prefetch_pixels<columns * Problem::stride_w, Problem::w, Window::pixel>(
                                row_of_x(at) + static_cast<int64>(tap * D::dilation) * Problem::h * x_row,
                                first_q * Problem::stride_w);
            }
        };
#pragma unroll 1
        for (int t = 0; t < ahead; ++t) prefetch(t);

        // Rows of dy that those of x in one iteration overlap; above the band and below it they are zeros.
        float passed[span + unrolled][columns] = {};
        WindowPixels<Window, T> window[windows][D::t];
#pragma unroll
        for (int i = 0; i < windows - 1; ++i) load(window[i], i);
        const auto step = [&](int t, int slot) {
            prefetch(t + ahead);
            // used last, with the first row of taps
            WindowPixels<DepthwiseStrip<Problem, Window>, T> strip;
            load_strip<Problem>(strip, grad + static_cast<int64>(t) * dy_row, first_q, t < rows);
#pragma unroll
            for (int j = 0; j < stride; ++j) {
                const int at = t * stride + j, now = (slot * stride + j) % windows, next = at + windows - 1;
                load(window[(now + windows - 1) % windows], next);
                if (Problem::padded && !inside(at)) continue;
#pragma unroll
                for (int r = Problem::r - 1; r >= 0; --r) {
                    if (r * Problem::dilation_h % stride != j) continue;
                    const int back = r * Problem::dilation_h / stride;
#pragma unroll
                    for (int tap = 0; tap < D::t; ++tap)
#pragma unroll
                        for (int q = 0; q < columns; ++q)
#pragma unroll
                            for (int s = 0; s < Problem::s; ++s) {
                                const float pixel = window[now][tap][q * Problem::stride_w + s * Problem::dilation_w];
                                const float of_dy = back == 0 ? strip[q] : passed[span + slot - back][q];
                                float& to = sum[(tap * Problem::r + r) * Problem::s + s];
                                to = fmaf(of_dy, pixel, to);
                            }
                }
            }
#pragma unroll
            for (int q = 0; q < columns; ++q) passed[span + slot][q] = strip[q];
        };
#pragma unroll 1
        for (int t = 0; t < steps; t += unrolled) {
#pragma unroll
            for (int slot = 0; slot < unrolled; ++slot)
                if (t + slot < steps) step(t + slot, slot);
            // The window of the next row becomes the first.
            constexpr int moved = unrolled * stride % windows;
            WindowPixels<Window, T> old[windows][D::t];
#pragma unroll
            for (int i = 0; i < windows; ++i)
#pragma unroll
                for (int tap = 0; tap < D::t; ++tap) old[i][tap] = window[i][tap];
#pragma unroll
            for (int i = 0; i < windows; ++i)
#pragma unroll
                for (int tap = 0; tap < D::t; ++tap) window[i][tap] = old[(i + moved) % windows][tap];
#pragma unroll
            for (int i = 0; i < span; ++i)
#pragma unroll
                for (int q = 0; q < columns; ++q) passed[i][q] = passed[i + unrolled][q];
            if ((t + unrolled) % promoted == 0 || t + unrolled >= steps) promote();
        }
    }
}

// What the block's threads have summed together: `shared`, a float for each thread and weight, has it first, for each of
// Tuning::channels filters its weights, and thread t has written the places t, t + threads, ... itself. The block is the
// `rank`-th of those that share its filters.
template <class Problem, class Tuning>
__device__ __forceinline__ void sum_block(float* shared, ElementsIn<Problem> x, ElementsIn<Problem> dy, int first_k,
                                          int rank, long long batch, int rows) {
    constexpr int channels = Tuning::channels, taps = filter_taps<Problem>, warps = Tuning::threads / 32, sums = channels * taps;
    static_assert(Problem::group_c == 1 && !Problem::chwn, "one channel a group, images outermost");
    static_assert(channels <= 32 && 32 % channels == 0 && Tuning::threads % 32 == 0, "a warp has whole tiles of filters");
    static_assert(!Problem::bias && identity<typename Problem::activation>, "a gradient is stored as it is");

    // Neighbouring threads have neighbouring filters in NHWC, and neighbouring walks of one filter in NCHW.
    constexpr int in_block = Tuning::threads / channels;
    // threads past the last filter compute that one again
    const int k = min(first_k + static_cast<int>(threadIdx.x) % channels, Problem::k - 1);
    const int worker = rank * in_block + static_cast<int>(threadIdx.x) / channels;
    float* const totals = shared + threadIdx.x;
    float sum[taps];
#pragma unroll
    for (int i = 0; i < taps; ++i) totals[i * Tuning::threads] = 0.0f;
    walk_strips<Problem, Tuning>(totals, x, dy, k, worker, Tuning::split * Tuning::split_k * in_block, batch, rows);
#pragma unroll
    for (int i = 0; i < taps; ++i) sum[i] = totals[i * Tuning::threads];
    __syncthreads();  // the sums of warps lie where totals did

    // Lanes of one filter, then warps.
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < taps; ++i) {
#pragma unroll
        for (int apart = 16; apart >= channels; apart /= 2) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], apart);
        if (lane < channels) shared[threadIdx.x / 32 * sums + lane * taps + i] = sum[i];
    }
    __syncthreads();
#pragma unroll 1
    for (int at = threadIdx.x; at < sums; at += Tuning::threads) {
        float total = shared[at];
#pragma unroll
        for (int warp = 1; warp < warps; ++warp) total += shared[warp * sums + at];
        shared[at] = total;
    }
}

// Stores the gradient of the block's filters, the sums over the blocks of its cluster.
template <class Problem, class Tuning>
__device__ __forceinline__ void store_filters(ElementsOut<Problem> dw, const float* shared, int first_k, int rank) {
    constexpr int split = Tuning::split, taps = filter_taps<Problem>, sums = Tuning::channels * taps;
    const auto store = [&](int at, float value) {
        typename Problem::element* const to = dw + static_cast<int64>(first_k) * taps + at;
        if (at >= (Problem::k - first_k) * taps) return;
        *to = from_float<typename Problem::element>(finish<Problem>(value, 0.0f, held_by<Problem>(to, true)));
    };
    if constexpr (split == 1) {
#pragma unroll 1
        for (int at = threadIdx.x; at < sums; at += Tuning::threads) store(at, shared[at]);
    } else {
        cluster_barrier();
#pragma unroll 1
        for (int at = rank * Tuning::threads + threadIdx.x; at < sums; at += split * Tuning::threads)
            store(at, cluster_sum<split>(shared + at));
        cluster_barrier();
    }
}

// Stores the sums of the block's filters: with split-K, where Tuning::split_k blocks share a tile of filters, to its place in
// the workspace `dw`, whose partial sums split_k.cuh adds in the order of the blocks.
template <class Problem, class Tuning, class Result>
__device__ __forceinline__ void store_share(Result* __restrict__ dw, const float* shared, int first_k, int rank) {
    static_assert(Tuning::split == 1 || Tuning::split_k == 1, "blocks share a filter through a cluster, or a workspace");
    if constexpr (Tuning::split_k == 1) {
        store_filters<Problem, Tuning>(dw, shared, first_k, rank);
    } else {
        constexpr int taps = filter_taps<Problem>, sums = Tuning::channels * taps;
        float* const to = dw + (static_cast<int64>(rank) * Problem::k + first_k) * taps;
#pragma unroll 1
        for (int at = threadIdx.x; at < sums && at < (Problem::k - first_k) * taps; at += Tuning::threads) to[at] = shared[at];
    }
}

// The Tuning::split blocks of a cluster, or Tuning::split_k blocks, share one tile of filters. The latter is for NHWC: 8
// channels are the least that a block can read without waste, and 32 are a line of memory, so that a layer of 32 channels
// keeps 32 multiprocessors busy at most where 8 blocks share a filter.
template <class Problem, class Tuning, class Result>
__device__ __forceinline__ void depthwise_weight(ElementsIn<Problem> x, ElementsIn<Problem> dy, Result* __restrict__ dw,
                                                 long long batch, int rows) {
    constexpr int shares = Tuning::split * Tuning::split_k;
    const int first_k = static_cast<int>(blockIdx.x) / shares * Tuning::channels;
    const int rank = static_cast<int>(blockIdx.x) % shares;
    float* const shared = reinterpret_cast<float*>(shared_memory());
    sum_block<Problem, Tuning>(shared, x, dy, first_k, rank, batch, rows);
    store_share<Problem, Tuning>(dw, shared, first_k, rank);
}

}  // namespace leanconv
