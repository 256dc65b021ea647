// box: what all pixels of a box of r x s make: their sum times a weight, the least, or the largest.
//
//   h[i, j] = op over v of x[i, j + v - anchor_x]                                                the row pass
//   y[i, j] = delta + w * op over u of h[i + u - anchor_y, j]                                    the column pass
//
// Requires   types as for register_cache; the rows of a box fit into shared memory. Channels are filtered one by one.
// Numerics   no difference of sums is taken: a sum of r x s pixels is off by at most r + 2 log2(s) + 8 roundings of its
//            type relative to the sum of their sizes, wherever it lies in the image, and an Inf or a NaN reaches the
//            outputs whose boxes hold it. Sums of integers are exact up to 2^24 in float32, 2^53 in float64.
// CTA tile   a strip of 128 columns, which it marches down, `rows` rows in a step. The column pass is made by four warps,
//            all else by all.
// Row pass   a warp makes a row. A lane has groups of four neighbours; a box is the end of a group, whole groups, and the
//            beginning of one. Whole groups are added up by doubling, in shuffles: their number is a sum of powers of two.
// Column     (van Herk, Gil and Werman) a thread has a column, whose rows are cut into blocks of r. A box is the end of a
// pass       block and the beginning of the next: sums from each row to the end of its block wait in shared memory, the
//            running sum is in a register. At its end a block is summed up once more, from its last row to its first.
// One step   input rows have landed | barrier | row pass | barrier | copies of the next step's rows are issued | column
//            pass | barrier | results are written.
// Work       an output takes three operations and five accesses of shared memory in the column pass, and about
//            log2(s) shuffles in the row pass: hardly more for a larger box. Bound by the memory.
// Predicted  in units of a copy of the image, float32 on an H200: 0.43 for the 27 instructions of an output of 63x63, at
//            their full rate. Input is read 1 + (s + 6) / 128 times by neighbours at one time, which L2 serves.
#pragma once

#include <kernels/image_filter/image_rows.cuh>

namespace leanconv {

struct SumOf {
    template <class T> static __device__ __forceinline__ T of(T a, T b) { return a + b; }
};
// NaN counts as smaller and as larger than any number: it reaches the output.
struct LeastOf {
    template <class T> static __device__ __forceinline__ T of(T a, T b) { return a < b || a != a ? a : b; }
};
struct LargestOf {
    template <class T> static __device__ __forceinline__ T of(T a, T b) { return a > b || a != a ? a : b; }
};

// A warp's row of windows of `taps` places: outputs 4 * lane ... 4 * lane + 3, whose windows begin `lead` places on.
template <class Op, int taps, int lead, int elements, class T>
struct RowOfBoxes {
    // Of shorter windows the places are gone through one by one.
    static constexpr int direct = 12;
    static constexpr int chunks = ceil_div(lead + 127 + taps, 128);
    // The group in which the window of output 0 ends; groups 2 ... last - 1 are in the windows of all outputs.
    static constexpr int last = (lead + taps) / 4;

    static __device__ __forceinline__ T of(const T (&v)[4], int begin, int end) {
        T result = v[begin];
#pragma unroll
        for (int e = 1; e < 4; ++e)
            if (e > begin && e < end) result = Op::of(result, v[e]);
        return result;
    }

    // The value of group lane + d. Those beyond the last chunk are not part of any window.
    static __device__ __forceinline__ T at(const T (&of_chunk)[chunks], int d, int lane) {
        const int chunk = d / 32, ahead = d % 32;
        if (chunk >= chunks) return of_chunk[chunks - 1];
        if (ahead == 0) return of_chunk[chunk];
        const int from = lane + ahead;
        const T here = __shfl_sync(0xffffffffu, of_chunk[chunk], from % 32);
        if (chunk + 1 >= chunks) return here;
        const T next = __shfl_sync(0xffffffffu, of_chunk[chunk + 1 < chunks ? chunk + 1 : chunk], from % 32);
        return from < 32 ? here : next;
    }

    static __device__ __forceinline__ void make(T (&out)[4], const T* row, int lane) {
        if constexpr (taps <= direct) {
            constexpr int loads = ceil_div(lead + taps + 3, 4);
            T v[loads][4];
#pragma unroll
            for (int k = 0; k < loads; ++k) load_vector(v[k], row + 4 * (lane + k));
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                out[e] = v[(lead + e) / 4][(lead + e) % 4];
#pragma unroll
                for (int t = 1; t < taps; ++t) out[e] = Op::of(out[e], v[(lead + e + t) / 4][(lead + e + t) % 4]);
            }
        } else {
            T v[chunks][4], whole[chunks], power[chunks];
#pragma unroll
            for (int c = 0; c < chunks; ++c) {
                // what lies behind the row is in no window
                const int place = min(128 * c + 4 * lane, elements - 4);
                load_vector(v[c], row + place);
                power[c] = whole[c] = of(v[c], 0, 4);
            }
            // Groups 2 ... last - 1: those of each binary digit of their number.
            constexpr int inner = last - 2;
            T middle{};
            int begin = 2;
#pragma unroll
            for (int width = 1; width <= inner; width *= 2) {
                if (inner & width) {
                    const T some = at(power, begin, lane);
                    middle = begin == 2 ? some : Op::of(middle, some);
                    begin += width;
                }
                if (2 * width > inner) continue;
                T twice[chunks];
#pragma unroll
                for (int c = 0; c < chunks; ++c) twice[c] = Op::of(power[c], at(power, 32 * c + width, lane));
#pragma unroll
                for (int c = 0; c < chunks; ++c) power[c] = twice[c];
            }
            const T second = at(whole, 1, lane), ends = at(whole, last, lane);
            // Beginnings and ends of groups, by the place where they end or begin.
            const auto part = [&](int d, int first, int behind) {
                T some[chunks];
#pragma unroll
                for (int c = 0; c < chunks; ++c) some[c] = of(v[c], first, behind);
                return at(some, d, lane);
            };
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int first = lead + e, behind = first + taps;
                T result = part(first / 4, first % 4, 4);
                if (first / 4 == 0) result = Op::of(result, second);
                result = Op::of(result, middle);
                if (behind / 4 > last) result = Op::of(result, ends);
                if (behind % 4 > 0) result = Op::of(result, part(behind / 4, 0, behind % 4));
                out[e] = result;
            }
        }
    }
};

// A thread's column: the sums from each row of a block of `taps` rows to its end, `pitch` apart.
template <class Op, int taps, int pitch, class T>
__device__ __forceinline__ void sum_from_the_end(T* column) {
    constexpr int at_once = 8;
    T sum = column[(taps - 1) * pitch];
    int row = taps - 2;
#pragma unroll 1
    for (; row >= at_once - 1; row -= at_once) {
        T some[at_once];
#pragma unroll
        for (int k = 0; k < at_once; ++k) some[k] = column[(row - k) * pitch];
#pragma unroll
        for (int k = 0; k < at_once; ++k) column[(row - k) * pitch] = sum = Op::of(some[k], sum);
    }
#pragma unroll 1
    for (; row >= 0; --row) column[row * pitch] = sum = Op::of(column[row * pitch], sum);
}

// Block b computes strip b % strips of band (b / strips) % bands of plane b / strips / bands. `w` is the weight.
template <class Problem, class Tuning>
__device__ __forceinline__ void box(const typename Problem::element* x, const typename Problem::sum* w,
                                    typename Problem::result* y, typename Problem::sum value, typename Problem::sum delta,
                                    int height, int width, int64 x_pitch, int64 x_step, int64 y_pitch, int64 y_step,
                                    int strips, int bands, int band_rows) {
    using Rows = RowLoader<Problem, 4>;
    using In = typename Rows::In;
    using Out = typename Rows::Out;
    using T = typename Rows::T;
    using Op = typename Problem::op;
    constexpr int r = Problem::r, s = Problem::s, step = Tuning::rows, warps = Tuning::warps, planes = Problem::planes;
    static_assert(step % warps == 0, "warps make rows by turns");
    static_assert(32 * warps >= Rows::width, "a thread has a column");
    static_assert(Problem::channels == 1, "neighbours are of one plane");
    static_assert(0 <= Problem::anchor_y && Problem::anchor_y < r, "the anchor lies inside the box");

    const int warp = warp_number(), lane = threadIdx.x % 32;
    const int rest = blockIdx.x / strips, plane = rest / bands, image = plane / planes;
    const int top = rest % bands * band_rows, j = (blockIdx.x % strips) * Rows::width;
    const int out_height = Problem::valid ? height - (r - 1) : height;
    const int out_width = Problem::valid ? width - (s - 1) : width;
    const int rows = min(band_rows, out_height - top);
    if (rows <= 0) return;
    const typename Rows::View view{reinterpret_cast<const In*>(x) + image * x_step + plane % planes,
                                   reinterpret_cast<Out*>(y) + image * y_step + plane % planes,
                                   height, width, out_height, out_width, x_pitch, y_pitch, static_cast<T>(value)};
    T* const inputs = reinterpret_cast<T*>(shared_memory());
    T* const filtered = inputs + step * Rows::row;
    T* const staging = filtered + step * Rows::width + warp * Rows::width;
    T* const column = filtered + (step + warps) * Rows::width + threadIdx.x;  // of the block of rows

    const auto load_step = [&](int first) {
        const Rows source(view, top - Problem::anchor_y + first, j, lane);
        if (source.inside(step)) {
            const In* from = source.vector_of(warp);
            T* to = inputs + warp * Rows::row;
#pragma unroll
            for (int k = 0; k < step; k += warps, from += warps * x_pitch)
                source.load_vectors(to + k * Rows::row, from);
        } else {
#pragma unroll 1
            for (int n = warp; n < step; n += warps) source.load(inputs + n * Rows::row, n);
        }
        cp_async_commit_group();
    };
    load_step(0);
    const T weight = reinterpret_cast<const T*>(w)[0];
    T running{};
    int place = 0;  // of a row in its block
#pragma unroll 1
    for (int first = 0; first < rows + r - 1; first += step) {
        cp_async_wait_group<0>();
        __syncthreads();  // the rows have landed, and the last step's results are written
#pragma unroll
        for (int n = 0; n < step; n += warps) {
            T four[4];
            RowOfBoxes<Op, s, Rows::lead, Rows::row, T>::make(four, inputs + (n + warp) * Rows::row, lane);
            store_vector(filtered + (n + warp) * Rows::width + 4 * lane, four);
        }
        __syncthreads();  // all have read the input, and the step's rows are filtered
        if (first + step < rows + r - 1) load_step(first + step);
        if (threadIdx.x < Rows::width) {
            T some[step];
            T* const mine = filtered + threadIdx.x;
#pragma unroll
            for (int n = 0; n < step; ++n) some[n] = mine[n * Rows::width];
#pragma unroll
            for (int n = 0; n < step; ++n) {
                running = place == 0 ? some[n] : Op::of(running, some[n]);
                T result = running;
                if (first + n >= r && place + 1 < r) result = Op::of(column[(place + 1) * Rows::width], running);
                column[place * Rows::width] = some[n];
                mine[n * Rows::width] = result;
                if (++place == r) {
                    place = 0;
                    sum_from_the_end<Op, r, Rows::width>(column);
                }
            }
        }
        __syncthreads();  // the results are there
#pragma unroll
        for (int n = 0; n < step; n += warps) {
            const int i = first + n + warp - (r - 1);
            if (i < 0 || i >= rows) continue;
            T row[4];
            load_vector(row, filtered + (n + warp) * Rows::width + 4 * lane);
            if constexpr (Problem::weighted) {
#pragma unroll
                for (int e = 0; e < 4; ++e) row[e] *= weight;
            }
            RowWriter<Out, T, 4, planes>(view, top + i, j, lane, static_cast<T>(delta), staging).store(row, 0);
        }
    }
}

}  // namespace leanconv
