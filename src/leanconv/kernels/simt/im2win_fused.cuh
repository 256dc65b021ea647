// im2win_fused: im2win without its tensor (after Lu et al. 2023). Windows are formed in shared memory as overlapping runs.
// No workspace.
//
//   y[m, k] = sum over c, r, s of x[m * stride + (r, s) * dilation, c] * w[k, c, r, s]      m: output pixel, k: filter
//
// Requires   float32; NCHW or NHWC. Tuning::runs: NCHW. Without runs it is implicit_gemm.
// Numerics   one chain of float32 FMAs for each output; blocks of a cluster add their chains in the order of their ranks.
// CTA tile   tile_k filters x tile_pixels pixels x lines: a line is one input row of one channel, in which every four
//            adjacent outputs have one run of 3 * stride + (S - 1) * dilation + 1 pixels instead of 4 * S.
// Roles      all warps load, multiply and store.
// Pipelines  as implicit_gemm: `stages` steps of cp.async
// One stage  per line read a thread's runs into registers by 128-bit loads, once; multiply them S times, each time with
//            the pixels that lie a dilation further on (constant registers)
// Work       2 * C/g * R * S flops an output. For 3x3 filters a half of the pixel traffic into and a third less out of
//            shared memory than implicit GEMM, unless padding shifts the run. Where rows are a multiple of four long, runs
//            arrive in copies of 128 bits, a quarter of the instructions. Outputs per row are rounded up to four: where
//            that wastes too much, and in NHWC, where a row of a window is a run in memory anyway, runs are off.
// Measured   figure: im2win im2win_fused/pytorch mean = 1.04
//            figure: im2win im2win_fused/implicit_gemm mean = 1.00
//            figure: im2win im2win_fused/im2win mean = 1.14
// Explored (H200, ed863f8): 55 TFLOP/s of 67 with nothing but FMAs, fragment loads and barriers.
#pragma once

#include <device/ptx/memory.cuh>
#include <kernels/simt/implicit_gemm.cuh>
#include <kernels/simt/tiled_convolution.cuh>

namespace leanconv {

// Pixels numbered by fragments of four adjacent outputs; the last fragment of a row may be partly empty.
template <class Problem>
struct FragmentPixels {
    static constexpr int a_row = ceil_div(Problem::q, 4);
    static_assert(Phase<Problem>::whole, "fragments are counted in whole rows");
    Offset<Problem> count;
    __device__ __forceinline__ FragmentPixels(long long batch, const Phase<Problem>&)
        : count(static_cast<Offset<Problem>>(batch) * Problem::p * (a_row * 4)) {}
    __device__ __forceinline__ Place place(Offset<Problem> pixel) const {
        const Offset<Problem> fragment = pixel / 4, line = fragment / a_row;
        const int q = static_cast<int>(fragment - line * a_row) * 4;
        const Offset<Problem> n = line / Problem::p;
        const int64 at = (static_cast<int64>(n) * Problem::k * Problem::p + (line - n * Problem::p)) * Problem::q + q;
        return {at, pixel >= count ? 0 : Problem::q - q < 4 ? Problem::q - q : 4};
    }
};

// How a run lies in shared memory: line by line, in each the first four pixels of every run, then the next four, so
// that the lanes of a load read adjacent addresses.
template <class Problem, class Tuning>
struct Runs {
    static constexpr int fragments = Tuning::tile_pixels / 4;
    static constexpr int lines = Tuning::tile_reduction / Problem::s;
    static constexpr bool vector = Problem::w % 4 == 0;
    // Copies of 128 bits begin at multiples of four: a run begins `shift` pixels early.
    static constexpr int shift = vector ? (4 - Problem::pad_left % 4) % 4 : 0;
    static constexpr int length = shift + 3 * Problem::stride_w + (Problem::s - 1) * Problem::dilation_w + 1;
    static constexpr int chunks = ceil_div(length, 4);
    static constexpr int line_floats = chunks * fragments * 4;
    static constexpr int stage_floats = lines * line_floats;
    static_assert(Tuning::tile_reduction % Problem::s == 0 && lines % 2 == 0, "a step is an even number of lines");
};

// A thread's runs in registers: the taps of a line slide along them. Two buffers where they fit, so that the next line
// is read while this one is multiplied.
template <class Problem, class Tuning>
struct RunRows {
    using R = Runs<Problem, Tuning>;
    static constexpr int stage_floats = R::stage_floats;
    static constexpr int lanes = Tiling<Tuning>::lanes_pixels;
    static constexpr int mine = Tuning::thread_pixels / 4;
    static constexpr bool along_k = false;  // the order of a thread's products: see TileProduct
    static constexpr int buffers = R::chunks * Tuning::thread_pixels <= 24 ? 2 : 1;

    float x[buffers][mine][R::chunks * 4];
    int at;

    __device__ __forceinline__ explicit RunRows(const Tiling<Tuning>& tiling)
        : at(tiling.pixel + tiling.lane_pixel * 4) {}

    __device__ __forceinline__ void read_line(const float* stage, int line) {
#pragma unroll
        for (int f = 0; f < mine; ++f)
            load_fragments<R::fragments * 4>(x[line % buffers][f],
                                             stage + line * R::line_floats + at + f * lanes * 4);
    }
    __device__ __forceinline__ void read(const float* stage, int row) {
        if (buffers == 2 && row % Problem::s == 0) read_line(stage, row / Problem::s);
    }
    __device__ __forceinline__ void read_late(const float* stage, int row) {
        if (buffers == 1 && row % Problem::s == 0) read_line(stage, row / Problem::s);
    }
    // Which pixel of its run output j takes for reduction index `row`.
    static __device__ __forceinline__ int element(int row, int j) {
        return R::shift + j % 4 * Problem::stride_w + row % Problem::s * Problem::dilation_w;
    }
    __device__ __forceinline__ float value(int row, int j) const {
        return x[row / Problem::s % buffers][j / 4][element(row, j)];
    }
};

// Brings lines into shared memory in copies of one or four pixels. A thread keeps its columns (a run and a place in its
// chunks) and serves some adjacent (line, chunk) pairs of every stage.
template <class Problem, class Tuning>
struct RunLoader {
    using R = Runs<Problem, Tuning>;
    using Rows = RunRows<Problem, Tuning>;
    using B = Bytes<Problem>;
    static constexpr int threads = Tiling<Tuning>::threads;
    static constexpr int unit = R::vector ? 4 : 1;                       // pixels of a copy
    static constexpr int width = R::fragments * 4 / unit;                // copies of one chunk of all runs
    static constexpr int side_by_side = gcd(width, threads);             // threads
    static constexpr int columns = width / side_by_side;                 // of a thread
    static constexpr int pairs = R::lines * R::chunks;
    static constexpr int groups = threads / side_by_side;
    static constexpr int mine = ceil_div(pairs, groups);                 // pairs of a thread
    static constexpr int total_lines = Problem::group_c * Problem::r;
    static constexpr int steps = ceil_div(total_lines, R::lines);
    static constexpr int period = Problem::r / gcd(Problem::r, R::lines) * R::lines;
    static_assert(mine <= 32, "whether a copy lies outside the image is a bit of 32");

    const float* image;
    B offset[columns];
    int h[columns];
    unsigned inside[columns];
    B* offsets;  // table: of a line in the image, in bytes
    int* rows;   // table: of a line, below the window's first row
    B line_offset[mine];
    int line_row[mine];
    int first_pair, next, tap;

    __device__ __forceinline__ int line_of(int i) const { return (first_pair + i) / R::chunks; }
    __device__ __forceinline__ bool exists(int i) const { return pairs % groups == 0 || first_pair + i < pairs; }

    __device__ __forceinline__ RunLoader(const float* x, const FragmentPixels<Problem>& places, Offset<Problem> first,
                                         int group, void* scratch, int first_step)
        : image(x), offsets(static_cast<B*>(scratch)), rows(reinterpret_cast<int*>(offsets + period)),
          first_pair(groups == 1 ? 0 : threadIdx.x / side_by_side * mine), next(first_step * R::lines),
          tap(next % period) {
        constexpr int a_row = FragmentPixels<Problem>::a_row;
#pragma unroll
        for (int c = 0; c < columns; ++c) {
            const int column = threadIdx.x % side_by_side + c * side_by_side;
            const Offset<Problem> fragment = first / 4 + column * unit / 4, line = fragment / a_row;
            const Offset<Problem> n = line / Problem::p;
            const int q = static_cast<int>(fragment - line * a_row) * 4, in_chunk = column * unit % 4;
            const int j = q * Problem::stride_w - Problem::pad_left - R::shift + in_chunk;
            h[c] = static_cast<int>(line - n * Problem::p) * Problem::stride_h - Problem::pad_top;
            const int channel = group * Problem::group_c + next / period * (period / Problem::r);
            offset[c] = (((static_cast<B>(n) * Problem::c + channel) * Problem::h + h[c]) * Problem::w + j) * 4;
            inside[c] = 0;
#pragma unroll
            for (int i = 0; i < mine; ++i) {
                const int at = (first_pair + i) % R::chunks * 4;
                const bool in_row = j + at >= 0 && j + at < Problem::w;
                if (in_row && at + in_chunk < R::length && fragment * 4 < places.count) inside[c] |= 1u << i;
            }
        }
        for (int i = threadIdx.x; i < period; i += threads) {
            rows[i] = i % Problem::r * Problem::dilation_h;
            offsets[i] = (static_cast<B>(i / Problem::r) * Problem::h + rows[i]) * Problem::w * 4;
        }
    }

    // Look up the lines of the next step: called some way ahead of load(), so that the table's latency is hidden.
    __device__ __forceinline__ void fetch() {
#pragma unroll
        for (int i = 0; i < mine; ++i) {
            if (!exists(i)) continue;
            line_offset[i] = offsets[tap + line_of(i)];
            line_row[i] = rows[tap + line_of(i)];
        }
    }

    __device__ __forceinline__ void load(float* stage) {
        float* const to = stage + (first_pair * width + threadIdx.x % side_by_side) * unit;
#pragma unroll
        for (int i = 0; i < mine; ++i) {
            if (!exists(i)) continue;
            const bool real = total_lines % R::lines == 0 || next + line_of(i) < total_lines;
            const int chunk = (first_pair + i) % R::chunks;
#pragma unroll
            for (int c = 0; c < columns; ++c) {
                const bool row = static_cast<unsigned>(h[c] + line_row[i]) < static_cast<unsigned>(Problem::h);
                const bool valid = real && (row || !Problem::padded) && (inside[c] & 1u << i);
                const float* const from = at_byte(image, offset[c] + (line_offset[i] + chunk * 16));
                float* const shared = to + (i * width + c * side_by_side) * unit;
                if constexpr (R::vector) cp_async_16(shared, from, valid);
                else cp_async_4(shared, from, valid);
            }
        }
        next += R::lines;
        tap += R::lines;
        if (tap == period) {
            tap = 0;
#pragma unroll
            for (int c = 0; c < columns; ++c)
                offset[c] += static_cast<B>(period / Problem::r) * Problem::h * Problem::w * 4;
        }
    }
};

template <class Problem, class Tuning>
__device__ __forceinline__ void im2win_fused(const float* __restrict__ x, const float* __restrict__ w,
                                             BiasIn<Problem> bias, float* __restrict__ y, long long batch) {
    if constexpr (Tuning::runs) {
        static_assert(!Problem::nhwc, "in NHWC a row of a window is one run in memory");
        using Filters = FilterLoader<Problem, Tuning, false>;
        using Pixels = RunLoader<Problem, Tuning>;
        using Places = FragmentPixels<Problem>;
        tiled_convolution<Problem, Tuning, false, Problem::q % 4 == 0, Filters, Pixels, Places>(x, w, bias, y, batch);
    } else {
        implicit_gemm<Problem, Tuning>(x, w, bias, y, batch);
    }
}

}  // namespace leanconv
