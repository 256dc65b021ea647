// native_weight_sync: the gradient of the filters on tensor cores by mma.sync, float16 or bfloat16, channels last. From sm_80 on.
//
//   dw[k, e] = sum over m of dy[m, k] * x[m * stride + (t, r, s) * dilation, c]       e = (t, r, s, c), m: output pixel
//
// Requires   tensor cores of sm_80 or newer; NHWC.
// Numerics   products and sums of the tensor core, in float32, of 64 * steps_at_once pixels; these are added in shared memory where
//            a CTA has more, then over a cluster and split-K, all in fixed order.
// CTA tile   16 * m_tiles * warps_k filters x 16 * n16s * warps_n columns e x 64 output pixels a stage. `split` CTAs of a cluster,
//            and `split_k` of them, share the pixels.
// Roles      all warps load both operands, multiply and store.
// Pipelines  both operands, `stages` steps, as in native_gemm_sync; where the windows of a step's pixels begin, three steps.
// Shared     a row for each pixel of each operand, filters or columns, whose units of 16 bytes are permuted by the pixel; both
//            operands come by ldmatrix.trans as they lie. At the end the sums.
// Loads      of 16 bytes by cp.async where channels and filters of a group are multiples of 8; else through registers, of as many
//            elements as divide each.
// Work       2 flops of 16 bits for 2.
#pragma once

#include <device/element.cuh>
#include <device/epilogue.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/mma.cuh>
#include <device/ptx/sync.cuh>
#include <device/window.cuh>
#include <kernels/common/split_k.cuh>
#include <kernels/mma_sync/native_product.cuh>
#include <kernels/mma_sync/shared_windows.cuh>

namespace leanconv {

// One operand in shared memory: a row of `width` elements for each pixel of a step, of which a thread brings `at_once` neighbours;
// through registers by loads of `Held`, `parts` of them.
template <class T, int width, int aligned, int threads, int depth>
struct StepRows {
    static constexpr int at_once = aligned > 2 ? aligned : 2, across = width / at_once, rows = threads / across;
    static constexpr int bytes = depth * width * 2, count = depth / rows, parts = aligned == 8 ? 2 : 1;
    using Held = HeldElements<T, gcd(aligned, 4)>;
    static_assert(depth % rows == 0, "all threads bring equally much");
    static __device__ __forceinline__ int row() { return static_cast<int>(threadIdx.x) / across; }
    static __device__ __forceinline__ int column() { return static_cast<int>(threadIdx.x) % across * at_once; }
    static __device__ __forceinline__ int place(int pixel, int element) { return swizzled<width>(pixel, element); }
};

template <class Problem, class Tuning>
struct WeightSync {
    static constexpr int threads = 32 * Tuning::warps_k * Tuning::warps_n, m_tiles = Tuning::m_tiles, n16s = Tuning::n16s;
    static constexpr int filters = 16 * m_tiles * Tuning::warps_k, columns = 16 * n16s * Tuning::warps_n, depth = 64;
    static constexpr int size = Problem::group_c * filter_taps<Problem>;
    static constexpr int tiles_k = ceil_div(Problem::group_k, filters), tiles_n = ceil_div(size, columns);
    static constexpr int aligned_x = aligned_in(Problem::group_c), aligned_dy = aligned_in(Problem::group_k);
    static constexpr bool held = aligned_x < 8 || aligned_dy < 8;
    static_assert(Tuning::stages == (held ? 2 : 3), "the host counts stages as loads need them");
    using Dy = StepRows<typename Problem::element, filters, aligned_dy, threads, depth>;
    using X = StepRows<typename Problem::element, columns, aligned_x, threads, depth>;
    static constexpr int stage_bytes = Dy::bytes + X::bytes;
    // Behind the stages the windows of the pixels of three steps.
    static constexpr int tables = 3, windows_at = Tuning::stages * stage_bytes;
    using Windows = SharedWindows<Problem, depth>;
    static_assert(filters * columns * 4 <= windows_at, "the stages take the sums of a tile");
    // Behind them, where a CTA has many pixels, what it has summed before.
    static constexpr int totals_at = windows_at + tables * Windows::bytes;
};

template <class Problem, class Tuning>
struct WeightSyncLoader {
    using W = WeightSync<Problem, Tuning>;
    using T = typename Problem::element;
    using B = Bytes<Problem>;
    const T* x;
    const T* dy;  // of the tile's first filter
    unsigned char* shared;
    const FlatPixels<Problem>& places;
    int filters, first_column, first_channel;
    typename W::X::Held held_x[W::held ? W::X::count : 1][W::X::parts];
    typename W::Dy::Held held_dy[W::held ? W::Dy::count : 1][W::Dy::parts];

    __device__ __forceinline__ WeightSyncLoader(const T* x, const T* dy, unsigned char* shared, const FlatPixels<Problem>& places,
                                                int filters, int first_column, int first_channel)
        : x(x), dy(dy), shared(shared), places(places), filters(filters), first_column(first_column),
          first_channel(first_channel) {}

    __device__ __forceinline__ typename W::Windows windows(int table) const {
        return {shared + W::windows_at + table * W::Windows::bytes};
    }
    // Decodes the pixels of a step, those from `first` on.
    __device__ __forceinline__ void find_windows(Offset<Problem> first, int table) const {
        windows(table).template find<W::threads>(places, first, first_channel);
    }

    // Where a pixel's elements from `column` on lie, and whether they exist.
    struct Source {
        const T* from;
        bool exists;
    };
    __device__ __forceinline__ Source of_dy(Offset<Problem> first, int pixel, int column) const {
        return {dy + (static_cast<int64>(first + pixel) * Problem::k + column), first + pixel < places.count && column < filters};
    }
    // A column of the gradient: its tap, and where it lies in a window.
    struct Column {
        bool real;
        FilterTap<Problem> tap;
        B offset;
        // NOTE: one past the last stands for the first, whose tap has bits.
        __device__ __forceinline__ explicit Column(int at) : Column(at < W::size, at < W::size ? at : 0) {}
        __device__ __forceinline__ Column(bool real, int e)
            : real(real), tap(e / Problem::group_c),
              offset((tap.template pixels<B>() * Problem::c + e % Problem::group_c) * 2) {}
    };
    __device__ __forceinline__ Source of_x(Offset<Problem> first, int pixel, const Column& column, int table) const {
        const FilterTap<Problem>& tap = column.tap;
        const unsigned bits = Window<Problem>::tap_bits(tap.t, tap.r, tap.s);
        const bool exists = column.real && first + pixel < places.count;
        const bool inside = exists && windows(table).window(pixel).holds(tap.t, tap.r, tap.s, bits);
        return {at_byte(x, windows(table).begin(pixel) + column.offset), inside};
    }

    // By cp.async.
    __device__ __forceinline__ void copy(Offset<Problem> first, int table, int stage) const {
        unsigned char* const to = shared + stage * W::stage_bytes;
        const Column column(first_column + W::X::column());
#pragma unroll
        for (int i = 0; i < W::Dy::count; ++i) {
            const int pixel = i * W::Dy::rows + W::Dy::row();
            const Source source = of_dy(first, pixel, W::Dy::column());
            cp_async_16(to + W::Dy::place(pixel, W::Dy::column()), source.from, source.exists);
        }
#pragma unroll
        for (int i = 0; i < W::X::count; ++i) {
            const int pixel = i * W::X::rows + W::X::row();
            const Source source = of_x(first, pixel, column, table);
            cp_async_16(to + W::Dy::bytes + W::X::place(pixel, W::X::column()), source.from, source.exists);
        }
    }

    // By registers: load(), and store() in the step after. Eight elements are two times four.
    __device__ __forceinline__ void load(Offset<Problem> first, int table) {
#pragma unroll
        for (int i = 0; i < W::Dy::count; ++i)
#pragma unroll
            for (int part = 0; part < W::Dy::parts; ++part)
#pragma unroll
                for (int j = 0; j < W::Dy::Held::loads; ++j) {
                    const Source source = of_dy(first, i * W::Dy::rows + W::Dy::row(), W::Dy::column() + 4 * part + j);
                    held_dy[i][part].load(j, source.from, source.exists);
                }
#pragma unroll
        for (int part = 0; part < W::X::parts; ++part)
#pragma unroll
            for (int j = 0; j < W::X::Held::loads; ++j) {
                const Column column(first_column + W::X::column() + 4 * part + j);
#pragma unroll
                for (int i = 0; i < W::X::count; ++i) {
                    const Source source = of_x(first, i * W::X::rows + W::X::row(), column, table);
                    held_x[i][part].load(j, source.from, source.exists);
                }
            }
    }
    __device__ __forceinline__ void store(int stage) const {
        unsigned char* const to = shared + stage * W::stage_bytes;
#pragma unroll
        for (int i = 0; i < W::Dy::count; ++i)
#pragma unroll
            for (int part = 0; part < W::Dy::parts; ++part)
                held_dy[i][part].store(to + W::Dy::place(i * W::Dy::rows + W::Dy::row(), W::Dy::column() + 4 * part));
#pragma unroll
        for (int i = 0; i < W::X::count; ++i)
#pragma unroll
            for (int part = 0; part < W::X::parts; ++part)
                held_x[i][part].store(to + W::Dy::bytes +
                                      W::X::place(i * W::X::rows + W::X::row(), W::X::column() + 4 * part));
    }
};

// The products of a step with the filters and columns of a warp.
template <class Problem, class Tuning>
__device__ __forceinline__ void multiply_pixels(float (&sums)[Tuning::m_tiles][Tuning::n16s][2][4], const unsigned char* stage,
                                                int filter, int column, int lane) {
    using W = WeightSync<Problem, Tuning>;
#pragma unroll
    for (int k16 = 0; k16 < W::depth / 16; ++k16) {
        unsigned a[W::m_tiles][4], b[W::n16s][4];
#pragma unroll
        for (int m = 0; m < W::m_tiles; ++m)
            ldmatrix_trans(a[m], stage + W::Dy::place(k16 * 16 + lane / 16 * 8 + lane % 8, filter + m * 16 + lane / 8 % 2 * 8));
#pragma unroll
        for (int n = 0; n < W::n16s; ++n)
            ldmatrix_trans(b[n], stage + W::Dy::bytes +
                                     W::X::place(k16 * 16 + lane / 8 % 2 * 8 + lane % 8, column + n * 16 + lane / 16 * 8));
        multiply_fragments<typename Problem::element>(sums, a, b);
    }
}

// What a thread has summed before, each number `threads` apart: sums that went through the tensor core for long lose digits.
template <class Problem, class Tuning>
struct SyncTotals {
    using W = WeightSync<Problem, Tuning>;
    static constexpr int count = W::m_tiles * W::n16s * 8;
    float* mine;

    __device__ __forceinline__ explicit SyncTotals(unsigned char* shared)
        : mine(reinterpret_cast<float*>(shared + W::totals_at) + threadIdx.x) {
        if constexpr (Tuning::totals)
            for (int i = 0; i < count; ++i) mine[i * W::threads] = 0.0f;
    }
    // Adds the sums, which begin anew; or, at the end, adds to them.
    template <bool last>
    __device__ __forceinline__ void add(float (&sums)[Tuning::m_tiles][Tuning::n16s][2][4]) const {
        if constexpr (Tuning::totals) {
#pragma unroll
            for (int i = 0; i < count; ++i) {
                float& sum = sums[i / 8 / W::n16s][i / 8 % W::n16s][i / 4 % 2][i % 4];
                const float total = mine[i * W::threads] + sum;
                if constexpr (!last) mine[i * W::threads] = total;
                sum = last ? total : 0.0f;
            }
        }
    }
    __device__ __forceinline__ void after(int step, float (&sums)[Tuning::m_tiles][Tuning::n16s][2][4]) const {
        if (Tuning::totals && step % Tuning::steps_at_once == Tuning::steps_at_once - 1) add<false>(sums);
    }
};

// `dw` is the gradient, or with `split_k` above 1 room for as many partial sums.
template <class Problem, class Tuning, class Result>
__device__ __forceinline__ void native_weight_sync(ElementsIn<Problem> x, ElementsIn<Problem> dy, Result* __restrict__ dw,
                                                   long long batch) {
    using W = WeightSync<Problem, Tuning>;
    constexpr int split = Tuning::split, shares = split * Tuning::split_k, tiles = W::tiles_k * W::tiles_n * Problem::groups;
    const int rank = static_cast<int>(blockIdx.x) % split, number = static_cast<int>(blockIdx.x) / split;
    const int tile = number % tiles, slice = number / tiles, group = tile / (W::tiles_k * W::tiles_n);
    const int first_column = tile % W::tiles_n * W::columns, first_k = tile / W::tiles_n % W::tiles_k * W::filters;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_filter = warp % Tuning::warps_k * (16 * W::m_tiles), warp_column = warp / Tuning::warps_k * (16 * W::n16s);
    const FlatPixels<Problem> places(batch, Phase<Problem>(0));
    unsigned char* const shared = shared_memory();
    WeightSyncLoader<Problem, Tuning> loader(x, dy + (group * Problem::group_k + first_k), shared, places,
                                             Problem::group_k - first_k, first_column, group * Problem::group_c);

    // This CTA's steps: every so many of all.
    const auto all = static_cast<Offset<Problem>>((places.count + W::depth - 1) / W::depth);
    const Offset<Problem> begin = slice * split + rank;
    const int steps = begin < all ? static_cast<int>((all - begin + shares - 1) / shares) : 0;
    const auto first_of = [&](int step) { return (begin + static_cast<Offset<Problem>>(step) * shares) * W::depth; };
#pragma unroll
    for (int i = 0; i < W::tables; ++i)
        if (i < steps) loader.find_windows(first_of(i), i);
    __syncthreads();
    float sums[W::m_tiles][W::n16s][2][4] = {};
    const SyncTotals<Problem, Tuning> totals(shared);
    const auto multiply = [&](int step, int stage) {
        multiply_pixels<Problem, Tuning>(sums, shared + stage * W::stage_bytes, warp_filter, warp_column, lane);
        totals.after(step, sums);
    };
    int table = 0;  // of this step, in which the windows of the third step from here are written
    if constexpr (W::held) {
        if (steps > 0) loader.load(first_of(0), 0), loader.store(0);
        if (steps > 1) loader.load(first_of(1), 1);
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            __syncthreads();
            if (step + 1 < steps) loader.store((step + 1) % 2);
            if (step + 2 < steps) loader.load(first_of(step + 2), table == 0 ? 2 : table - 1);
            if (step + 3 < steps) loader.find_windows(first_of(step + 3), table);
            multiply(step, step % 2);
            table = table == 2 ? 0 : table + 1;
        }
    } else {
        static_assert(Tuning::stages == W::tables, "stages and tables are as many");
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (i < steps) loader.copy(first_of(i), i, i);
            cp_async_commit_group();
        }
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            cp_async_wait_group<1>();
            __syncthreads();
            const int ahead = table == 0 ? 2 : table - 1;
            if (step + 2 < steps) loader.copy(first_of(step + 2), ahead, ahead);
            cp_async_commit_group();
            if (step + 3 < steps) loader.find_windows(first_of(step + 3), table);
            multiply(step, table);
            table = table == 2 ? 0 : table + 1;
        }
    }

    // The sums of all warps, then of the cluster.
    totals.template add<true>(sums);
    float* const all_sums = reinterpret_cast<float*>(shared);
    cp_async_wait_group<0>();
    __syncthreads();  // the last stage has been read
#pragma unroll
    for (int m = 0; m < W::m_tiles; ++m)
#pragma unroll
        for (int n = 0; n < W::n16s; ++n)
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int filter = warp_filter + m * 16 + i / 2 % 2 * 8 + lane / 4;
                all_sums[filter * W::columns + warp_column + n * 16 + i / 4 * 8 + lane % 4 * 2 + i % 2] = sums[m][n][i / 4][i % 4];
            }
    if constexpr (split > 1) cluster_barrier();
    else __syncthreads();
    if constexpr (Tuning::split_k > 1) dw += slice * (static_cast<int64>(Problem::k) * W::size);
    for (int i = rank * W::threads + threadIdx.x; i < W::filters * W::columns; i += split * W::threads) {
        const int k = first_k + i / W::columns, e = first_column + i % W::columns;
        if (k >= Problem::group_k || e >= W::size) continue;
        float sum;
        if constexpr (split > 1) sum = cluster_sum<split>(all_sums + i);
        else sum = all_sums[i];
        Result* const to = dw + (static_cast<int64>(group * Problem::group_k + k) * W::size + e);
        if constexpr (Tuning::split_k > 1) *to = sum;
        else *to = from_float<Result>(finish<Problem>(sum, 0.0f, held_by<Problem>(to, true)));
    }
    if constexpr (split > 1) cluster_barrier();  // what others read stays until they have
}

}  // namespace leanconv
