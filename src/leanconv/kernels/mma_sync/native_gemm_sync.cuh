// native_gemm_sync: implicit GEMM on tensor cores by mma.sync, float16 or bfloat16, channels last. From sm_80 on.
//
//   y[m, k] = sum over t, r, s, c of x[m * stride + (t, r, s) * dilation, c] * w[k, t, r, s, c]       m: output pixel, k: filter
//
// Requires   tensor cores of sm_80 or newer; NHWC.
// Numerics   products and sums of the tensor core, in float32, rounded once, in the order of the filters' memory.
// CTA tile   16 * m_tiles * warps_pixels pixels x 16 * n16s * warps_k filters x 64 reduction elements a stage; one tile a CTA.
// Roles      all warps load both operands, multiply and store.
// Pipelines  both operands, `stages` steps: cp.async groups, or registers that hold the step after the next; one __syncthreads a
//            step.
// Shared     a row of 128 bytes for each pixel and filter, whose units of 16 bytes are permuted so that ldmatrix meets each bank
//            once; of each pixel where its window begins, and which taps lie inside the image.
// Loads      of as many neighbouring elements as divide the channels of a group: eight by cp.async, four, two or one through
//            registers. A filter is one run of memory, a tap's channels are one of x: only the last step has elements past
//            the end.
// One stage  wait for the copies; barrier; begin those of a later step; four times 16 elements: m_tiles + n16s ldmatrix for
//            2 * m_tiles * n16s products.
// Explored (H200, 81bb595): 512 channels and filters, 3x3: 1390 of the 4096 flops of 16 bits in a cycle and multiprocessor.
#pragma once

#include <device/element.cuh>
#include <device/epilogue.cuh>
#include <device/pipeline/split.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/mma.cuh>
#include <device/ptx/sync.cuh>
#include <device/window.cuh>
#include <kernels/mma_sync/native_product.cuh>
#include <kernels/mma_sync/shared_windows.cuh>

namespace leanconv {

template <class Problem, class Tuning>
struct SyncTiling {
    static constexpr int threads = 32 * Tuning::warps_pixels * Tuning::warps_k, m_tiles = Tuning::m_tiles, n16s = Tuning::n16s;
    static constexpr int pixels = 16 * m_tiles * Tuning::warps_pixels, filters = 16 * n16s * Tuning::warps_k;
    static constexpr int depth = 64, row_bytes = 2 * depth, stage_bytes = (pixels + filters) * row_bytes;
    static constexpr int channels = Problem::group_c, size = channels * filter_taps<Problem>, steps = ceil_div(size, depth);
    // Elements that lie aligned in every tap, those that a thread brings at once, and whether they pass registers.
    static constexpr int aligned = aligned_in(gcd(channels, Problem::first_weight)), at_once = aligned > 2 ? aligned : 2;
    static constexpr bool held = aligned < 8;
    static_assert(Tuning::stages == (held ? 2 : 3), "the host counts stages as loads need them");
    // Threads side by side on a row, and rows that all threads bring at once.
    static constexpr int columns = depth / at_once, rows = threads / columns;
    static_assert(pixels % rows == 0, "all threads bring equally many pixels");
    static constexpr int tiles_k = ceil_div(Problem::group_k, filters);
    // Behind the stages the windows of the tile's pixels.
    static constexpr int windows_at = Tuning::stages * stage_bytes;
    using Windows = SharedWindows<Problem, pixels>;
};

// A reduction element of a thread in a step: its tap, and where it lies in a window and in a filter.
template <class Problem, class Tuning>
struct SyncElement {
    using W = SyncTiling<Problem, Tuning>;
    bool real;
    int number;
    FilterTap<Problem> tap;
    unsigned bits;
    Bytes<Problem> offset;

    // NOTE: one past the last stands for the first, whose tap has bits.
    __device__ __forceinline__ explicit SyncElement(int at)
        : real(W::size % W::depth == 0 || at < W::size), number(real ? at : 0), tap(number / W::channels),
          bits(Window<Problem>::tap_bits(tap.t, tap.r, tap.s)),
          offset((tap.template pixels<Bytes<Problem>>() * Problem::c + number % W::channels) * 2) {}
    __device__ __forceinline__ bool inside(const Window<Problem>& window) const {
        return real && window.holds(tap.t, tap.r, tap.s, bits);
    }
};

// Both operands' way to shared memory: a thread brings the same elements of a step of every so many pixels and filters.
template <class Problem, class Tuning>
struct SyncLoader {
    using W = SyncTiling<Problem, Tuning>;
    using T = typename Problem::element;
    using Held = HeldElements<T, W::held ? W::aligned : 1>;
    static constexpr int rows_x = W::pixels / W::rows, rows_w = ceil_div(W::filters, W::rows);
    const T* x;
    const T* w;  // of the tile's first filter
    unsigned char* shared;
    int filters;  // of the tile, that exist
    int row, column;
    Held held[W::held ? rows_x + rows_w : 1];

    __device__ __forceinline__ SyncLoader(const T* x, const T* w, unsigned char* shared, int filters)
        : x(x), w(w), shared(shared), filters(filters), row(threadIdx.x / W::columns),
          column(static_cast<int>(threadIdx.x) % W::columns * W::at_once) {}

    __device__ __forceinline__ typename W::Windows windows() const { return {shared + W::windows_at}; }

    // Row i of this thread in a stage, and whether the tile has it.
    __device__ __forceinline__ int place_x(int i) const { return swizzled<W::depth>(i * W::rows + row, column); }
    __device__ __forceinline__ int place_w(int i) const {
        const int filter = i * W::rows + row;
        return swizzled<W::depth>(W::pixels + filter / 16 * 16 + place_of(filter % 16), column);
    }
    __device__ __forceinline__ bool has_w(int i) const { return W::filters % W::rows == 0 || i * W::rows + row < W::filters; }

    // By cp.async.
    __device__ __forceinline__ void copy(int step, int stage) const {
        const SyncElement<Problem, Tuning> at(step * W::depth + column);
        unsigned char* const to = shared + stage * W::stage_bytes;
#pragma unroll
        for (int i = 0; i < rows_x; ++i) {
            const int pixel = i * W::rows + row;
            cp_async_16(to + place_x(i), at_byte(x, windows().begin(pixel) + at.offset), at.inside(windows().window(pixel)));
        }
#pragma unroll
        for (int i = 0; i < rows_w; ++i) {
            const int filter = i * W::rows + row;
            if (!has_w(i)) break;
            cp_async_16(to + place_w(i), w + static_cast<int64>(filter) * W::size + at.number, at.real && filter < filters);
        }
    }

    // By registers: load(), and store() in the step after.
    __device__ __forceinline__ void load(int step) {
#pragma unroll
        for (int j = 0; j < Held::loads; ++j) {
            const SyncElement<Problem, Tuning> at(step * W::depth + column + j);
#pragma unroll
            for (int i = 0; i < rows_x; ++i) {
                const int pixel = i * W::rows + row;
                held[i].load(j, at_byte(x, windows().begin(pixel) + at.offset), at.inside(windows().window(pixel)));
            }
#pragma unroll
            for (int i = 0; i < rows_w; ++i) {
                const int filter = i * W::rows + row;
                const bool exists = at.real && filter < filters && has_w(i);
                held[rows_x + i].load(j, w + static_cast<int64>(filter) * W::size + at.number, exists);
            }
        }
    }
    __device__ __forceinline__ void store(int stage) const {
        unsigned char* const to = shared + stage * W::stage_bytes;
#pragma unroll
        for (int i = 0; i < rows_x; ++i) held[i].store(to + place_x(i));
#pragma unroll
        for (int i = 0; i < rows_w; ++i)
            if (has_w(i)) held[rows_x + i].store(to + place_w(i));
    }
};

// The products of a step with the pixels and filters of a warp. Rows are numbered within eight, as `swizzled` asks.
template <class Problem, class Tuning>
__device__ __forceinline__ void multiply_step(float (&sums)[Tuning::m_tiles][Tuning::n16s][2][4], const unsigned char* pixels,
                                              const unsigned char* filters, int lane) {
    using W = SyncTiling<Problem, Tuning>;
#pragma unroll
    for (int k16 = 0; k16 < W::depth / 16; ++k16) {
        unsigned a[W::m_tiles][4], b[W::n16s][4];
#pragma unroll
        for (int m = 0; m < W::m_tiles; ++m)
            ldmatrix(a[m], pixels + m * 16 * W::row_bytes + swizzled<W::depth>(lane % 16, k16 * 16 + lane / 16 * 8));
#pragma unroll
        for (int n = 0; n < W::n16s; ++n)
            ldmatrix(b[n], filters + n * 16 * W::row_bytes +
                               swizzled<W::depth>(lane / 16 * 8 + lane % 8, k16 * 16 + lane / 8 % 2 * 8));
        multiply_fragments<typename Problem::element>(sums, a, b);
    }
}

template <class Problem, class Tuning>
__device__ __forceinline__ void native_gemm_sync(ElementsIn<Problem> x, ElementsIn<Problem> w, BiasIn<Problem> bias,
                                                 ElementsOut<Problem> y, long long batch) {
    using W = SyncTiling<Problem, Tuning>;
    using P = Phase<Problem>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tile_k = static_cast<int>(blockIdx.x) % W::tiles_k, group = blockIdx.x / W::tiles_k % Problem::groups;
    const P phase(blockIdx.x / W::tiles_k / Problem::groups % P::count);
    const FlatPixels<Problem> places(batch, phase);
    const Offset<Problem> first_pixel =
        static_cast<Offset<Problem>>(blockIdx.x / W::tiles_k / Problem::groups / P::count) * W::pixels;
    unsigned char* const shared = shared_memory();
    const int first_k = tile_k * W::filters;
    const int64 first_weight = Problem::first_weight;
    const int64 filter = static_cast<int64>(phase.number) * Problem::k + group * Problem::group_k + first_k;
    SyncLoader<Problem, Tuning> loader(x, w + first_weight + filter * W::size, shared, Problem::group_k - first_k);
    loader.windows().template find<W::threads>(places, first_pixel, group * W::channels);
    __syncthreads();

    const int warp_pixel = warp % Tuning::warps_pixels * (16 * W::m_tiles);
    const int warp_filter = warp / Tuning::warps_pixels * (16 * W::n16s);
    if constexpr (Problem::add)
#pragma unroll
        for (int m = 0; m < W::m_tiles; ++m)
            prefetch_residuals<Problem, 16 * W::n16s>(bias, y, places, first_pixel + warp_pixel + 16 * m, group,
                                                      first_k + warp_filter, lane);
    float sums[W::m_tiles][W::n16s][2][4] = {};
    const auto multiply = [&](int stage) {
        const unsigned char* const rows = shared + stage * W::stage_bytes;
        multiply_step<Problem, Tuning>(sums, rows + warp_pixel * W::row_bytes, rows + (W::pixels + warp_filter) * W::row_bytes,
                                       lane);
    };
    if constexpr (W::held) {
        loader.load(0);
        loader.store(0);
        if (W::steps > 1) loader.load(1);
#pragma unroll 1
        for (int step = 0; step < W::steps; ++step) {
            __syncthreads();
            if (step + 1 < W::steps) loader.store((step + 1) % 2);
            if (step + 2 < W::steps) loader.load(step + 2);
            multiply(step % 2);
        }
    } else {
        constexpr int ahead = Tuning::stages - 1;
#pragma unroll
        for (int i = 0; i < ahead; ++i) {
            if (i < W::steps) loader.copy(i, i);
            cp_async_commit_group();
        }
        int stage = 0;
#pragma unroll 1
        for (int step = 0; step < W::steps; ++step) {
            cp_async_wait_group<ahead - 1>();
            __syncthreads();
            if (step + ahead < W::steps) loader.copy(step + ahead, stage == 0 ? ahead : stage - 1);
            cp_async_commit_group();
            multiply(stage);
            stage = stage == ahead ? 0 : stage + 1;
        }
    }

#pragma unroll
    for (int n16 = 0; n16 < W::n16s; ++n16) {
        const int in_group = first_k + warp_filter + 16 * n16 + lane % 4 * 4, k = group * Problem::group_k + in_group;
        Term<Problem> terms[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) terms[j] = term_of<Problem>(bias, k + j, in_group + j < Problem::group_k);
#pragma unroll
        for (int m = 0; m < W::m_tiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Place place = places.place(first_pixel + warp_pixel + m * 16 + half * 8 + lane / 4);
                if (place.count > 0 && in_group < Problem::group_k)
                    store_neighbours<Problem>(y + (place.offset * Problem::k + k), sums[m][n16], half, terms, bias,
                                              Problem::group_k - in_group);
            }
    }
}

}  // namespace leanconv
