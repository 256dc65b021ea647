// separable_tensor: a filter that is a column times a row, on tensor cores (mma.sync), in one pass over the image.
//
//   h[i, j] = sum over v of row[v] * x[i, j + v - anchor_x]                                      the row pass
//   y[i, j] = delta + sum over u of column[u] * h[i + u - anchor_y, j]                           the column pass
//
// Requires   tensor cores of sm_80 or newer; one product of a column and a row; sums in float32.
// Numerics   a number times a power of two = hi + lo, two float16, which keep 22 bits down to 2^-17 of the largest; one product
//            = 3 mma (hi hi + hi lo + lo hi), small ones first. Pixels of 8 bits, float16 and bfloat16 are one float16,
//            but with a constant border. A warp's rows of a step have a scale of their own, the 16 filtered rows have one: errors are those of float32
//            relative to the largest pixels there. The tensor core rounds toward zero: of the column pass it adds up 16 rows,
//            and float32 additions these. Where an Inf or a NaN is in reach, outputs are summed by FMAs.
// Products   both passes multiply with Toeplitz matrices, whose entry (k, m) is the weight k - m:
//              row pass     h^T[16 columns, 8 rows]  = Toeplitz[16, k] x^T[k columns, 8 rows]
//              column pass  y^T[16 columns, 8 rows] += h^T[16 columns, 16 rows] Toeplitz[16, 8]
//            What the row pass leaves in a lane's registers is operand A of the column pass. Row m of an operand is column
//            2 m, or 2 (m - 8) + 1 from 8 on, of its 16, so that a lane has two neighbours.
// CTA tile   a strip of 16 * tiles * warps columns, which it marches down, 16 rows in a step. A warp has 16 * tiles columns.
// Registers  the sums of all outputs that a step's rows are part of: 8 for each 16 x 16 of them, but for the last 16 rows.
// Shared     the input rows of a step, split, twice; the Toeplitz matrices as operands; outputs on their way to whole lines,
//            where they are not float32.
// One step   barrier: the step's rows are there, and all have read the step before | loads of the next step's rows are issued |
//            row pass | column pass, outputs | the next step's rows are split and stored.
// Work       for 128 outputs 3 * (ceil((r + 15) / 16) + ceil((s + 15) / 16)) mma, two thirds of those of the row pass where
//            pixels are one float16.
// Measured   figure: filter-separable separable_tensor/cucim mean = 3.38
//            figure: filter-separable separable_tensor us only=8192-63x63 = 319
#pragma once

#include <device/ptx/mma.cuh>
#include <kernels/image_filter/split_rows.cuh>

namespace leanconv {

// A Toeplitz matrix of so many blocks of 16 reduction elements, whose weights take places lead ... span: operands of a lane,
// four registers a block, its high halves and then its low ones.
template <int blocks, int lead, int span>
struct Toeplitz {
    static constexpr int words = 128 * blocks;

    // Block k as operand A of 16 outputs, or as operand B of two times 8.
    static __device__ __forceinline__ void load(unsigned (&to)[4], const unsigned* from, int k, int piece, int lane) {
        load_vector(to, from + words * piece + 128 * k + 4 * lane);
    }
    // Whether block k has no weight for outputs first ... last.
    static __device__ constexpr bool empty(int k, int first, int last) {
        return 16 * k + 15 - first < lead || 16 * k - last > span;
    }
};

// What scales weights: the biased exponent of the largest of them, and a number e such that the sizes of all add up to less
// than 2^e; whether all are finite.
struct WeightScale {
    int exponent, sum;
    bool finite;

    __device__ __forceinline__ WeightScale(const float* w, int taps, int lane) {
        float largest = 0.0f, total = 0.0f;
        for (int k = lane; k < taps; k += 32) {
            largest = max_nan_f32(largest, fabsf(w[k]));
            total += fabsf(w[k]);
        }
#pragma unroll
        for (int apart = 16; apart > 0; apart /= 2) total += __shfl_xor_sync(0xffffffffu, total, apart);
        const int found = static_cast<int>(__reduce_max_sync(0xffffffffu, __float_as_uint(largest)) >> 23);
        finite = found < 255;
        exponent = max(found, 13);
        // what a sum of many weights is rounded off is less than this share
        sum = static_cast<int>(biased_exponent(max(total * 1.0001f, power_of_two(13)))) - 126;
    }
    // Weights are multiplied by 2^of, which makes them less than 2^14.
    __device__ __forceinline__ int of() const { return 140 - exponent; }
};

// Writes the operands of a Toeplitz matrix of `taps` weights, `apart` places apart, of which the first is at place `lead`.
template <bool operand_a, int blocks, int taps, int lead, int apart>
__device__ __forceinline__ void make_toeplitz(unsigned* to, const float* w, int scale, int threads) {
    const float factor = exact_power(scale);
    const auto weight = [&](int place) {
        const bool exists = place >= 0 && place % apart == 0 && place / apart < taps;
        return exists ? w[place / apart] : 0.0f;
    };
#pragma unroll 1
    for (int k = threadIdx.x; k < 128 * blocks; k += threads) {
        const int g = k % 128 / 16, t = k / 4 % 4, i = k % 4, element = 2 * t + (operand_a ? i / 2 : i % 2) * 8;
        const int place = k / 128 * 16 + element - (operand_a ? 2 * g + i % 2 : g + i / 2 * 8) - lead;
        const float first = weight(place), second = weight(place + 1);
        const unsigned high = split_high(first, second, factor);
        to[k] = high;
        to[128 * blocks + k] = split_low(first, second, factor, high);
    }
}

// Outputs i ... i + 15 of this warp's columns by FMAs in float32, from global memory: for windows with an Inf or a NaN.
template <class Problem, class Tuning, class View>
__device__ __forceinline__ void filter_plainly(const View& image, const float* w, float* to, int first_row, int j, int lane) {
    using S = TensorStrip<Problem, Tuning>;
    using Border = typename S::Border;
#pragma unroll 1
    for (int c = lane; c < S::warp_width; c += 32) {
        float acc[16] = {};
#pragma unroll 1
        for (int u = 0; u < S::r + 15; ++u) {
            const int i = border_index<Border>(first_row + u, image.height);
            float h = 0.0f;
#pragma unroll 1
            for (int v = 0; v < S::s; ++v) {
                const int at = border_element<Border, S::channels>(j + c + v * S::channels - S::before, image.width);
                const bool inside = Border::maps_inside || (i >= 0 && at >= 0);
                h += w[S::r + v] * (inside ? widen<float>(image.x[i * image.x_pitch + at * S::planes]) : image.value);
            }
#pragma unroll
            for (int n = 0; n < 16; ++n)
                if (u - n >= 0 && u - n < S::r) acc[n] += w[u - n] * h;
        }
#pragma unroll
        for (int n = 0; n < 16; ++n) to[n * S::output_pitch + c] = acc[n];
    }
}

// Stores 16 rows of this warp's outputs by way of shared memory: what is complete of `sums`, or what FMAs make `plainly`.
template <class Problem, class Tuning, class View, class Out, int tiles, int y_blocks>
__device__ __forceinline__ void store_staged(const View& image, Out* to, float* outputs,
                                             const float (&sums)[tiles][y_blocks][2][4], float factor, float delta,
                                             const float* w, int count, int rows, bool vectors, bool plainly, int first_row,
                                             int j, int lane) {
    using S = TensorStrip<Problem, Tuning>;
    if (plainly) {
        filter_plainly<Problem, Tuning>(image, w, outputs, first_row, j, lane);
    } else {
#pragma unroll
        for (int m = 0; m < tiles; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float (&v)[4] = sums[m][y_blocks - 1][e / 2];
                float* const at = outputs + (e / 2 * 8 + lane % 4 * 2 + e % 2) * S::output_pitch + 16 * m + lane / 4 * 2;
                *reinterpret_cast<float2*>(at) = make_float2(v[e % 2] * factor, v[e % 2 + 2] * factor);
            }
    }
    __syncwarp();
    if (vectors) {
        constexpr int across = S::warp_width / 4, down = 32 / across;
#pragma unroll
        for (int k = 0; k < S::step; k += down) {
            const int row = k + lane / across;
            float v[4];
            load_vector(v, outputs + row * S::output_pitch + 4 * (lane % across));
#pragma unroll
            for (int e = 0; e < 4; ++e) v[e] += delta;
            if (row < rows) stream_sums(to + row * image.y_pitch + 4 * (lane % across), v);
        }
    } else {
#pragma unroll 1
        for (int k = lane; k < S::step * S::warp_width; k += 32) {
            const int row = k / S::warp_width, column = k % S::warp_width;
            if (row < rows && column < count)
                to[row * image.y_pitch + column * S::planes] =
                    narrow_sum<Out>(outputs[row * S::output_pitch + column] + delta);
        }
    }
    __syncwarp();
}

// Block b computes strip b % strips of band (b / strips) % bands of image b / strips / bands.
template <class Problem, class Tuning>
__device__ __forceinline__ void separable_tensor(const typename Problem::element* x, const typename Problem::sum* w,
                                                 typename Problem::result* y, typename Problem::sum value,
                                                 typename Problem::sum delta, int height, int width, int64 x_pitch,
                                                 int64 x_step, int64 y_pitch, int64 y_step, int strips, int bands,
                                                 int band_rows) {
    using S = TensorStrip<Problem, Tuning>;
    using In = typename S::In;
    using Out = typename S::Out;
    using Across = Toeplitz<S::x_blocks, S::lead, S::x_span>;
    using Down = Toeplitz<S::y_blocks, 0, S::y_span>;
    constexpr int r = S::r, s = S::s, tiles = S::tiles, y_blocks = S::y_blocks, planes = S::planes, pieces = S::pieces;
    static_assert(0 <= Problem::anchor_y && Problem::anchor_y < r, "the anchor lies inside the filter");

    const int warp = warp_number(), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int rest = blockIdx.x / strips, plane = rest / bands, image = plane / planes;
    const int top = rest % bands * band_rows, j = (blockIdx.x % strips) * S::width;
    const int out_height = Problem::valid ? height - (r - 1) : height;
    const int out_width = Problem::valid ? width - (s - 1) : width;
    const int rows = min(band_rows, out_height - top);
    if (rows <= 0) return;
    const Image<In, Out, float> view{reinterpret_cast<const In*>(x) + image * x_step + plane % planes,
                                     reinterpret_cast<Out*>(y) + image * y_step + plane % planes,
                                     height, width * S::channels, out_height, out_width * S::channels,
                                     x_pitch, y_pitch, static_cast<float>(value)};
    unsigned short* const halves = reinterpret_cast<unsigned short*>(shared_memory());
    unsigned* const x_weights = reinterpret_cast<unsigned*>(halves + 2 * S::buffer);
    unsigned* const y_weights = x_weights + 2 * Across::words;
    int* const exponents = reinterpret_cast<int*>(y_weights + 2 * Down::words);
    int* const columns = exponents + 2 * S::step;
    float* const outputs = reinterpret_cast<float*>(columns + S::input_width) + warp * S::step * S::output_pitch;

    const int first_row = top - Problem::anchor_y, my_column = warp * S::warp_width;
    SplitRows<Problem, Tuning> source(view, first_row, j, warp, lane, columns);
    const WeightScale of_column(w, r, lane), of_row(w + r, s, lane);
    make_toeplitz<true, S::x_blocks, s, S::lead, S::channels>(x_weights, w + r, of_row.of(), 32 * S::warps);
    make_toeplitz<false, y_blocks, r, 0, 1>(y_weights, w, of_column.of(), 32 * S::warps);
    __syncthreads();  // the columns are there
    source.load(0);
    source.store(halves, exponents);

    // h times 2^(141 - exponent - of_row.sum) is less than 2^15 where pixels are less than 2^(exponent - 126).
    int exponent = S::fixed_scale ? (sizeof(In) == 1 ? 134 : 142) : 16;
    int of_step[y_blocks] = {};
    // Sums of the outputs that more rows are part of, in the order of rows.
    float sums[tiles][y_blocks][2][4] = {};
    // Steps until which an Inf or a NaN is in reach.
    int plainly_until = of_row.finite && of_column.finite ? 0 : 0x7fffffff;
    const int steps = ceil_div(rows, S::step) + y_blocks - 1;
    // Lane l gives ldmatrix row l % 8 of an 8 x 8: two of a row, of either piece; of one piece those of 16 rows.
    const unsigned short* const fragment =
        halves + lane % 8 * S::pitch + lane / 8 % 2 * 8 + lane / 16 * (pieces == 2 ? S::piece : 8 * S::pitch) + my_column;
#pragma unroll 1
    for (int n = 0; n < steps; ++n) {
        __syncthreads();  // the step's rows are there, and all have read those of the step before
        if (n + 1 < steps) source.load((n + 1) * S::step);
        const unsigned short* const from = fragment + n % 2 * S::buffer;
        const int* const of_rows = exponents + n % 2 * S::step;
        float rescale = 1.0f;  // of the sums
        if constexpr (!S::fixed_scale) {
            int latest = static_cast<int>(__reduce_max_sync(0xffffffffu, static_cast<unsigned>(of_rows[lane % 16])));
            if (latest == 255) {
                if (plainly_until < n + y_blocks) plainly_until = n + y_blocks;
                latest = 16;
            }
            int largest = latest;
#pragma unroll
            for (int k = 0; k + 1 < y_blocks; ++k) {
                of_step[k] = of_step[k + 1];
                largest = max(largest, of_step[k]);
            }
            of_step[y_blocks - 1] = latest;
            // Of 18 binades in which halves keep all bits, ten at least are used; sums of larger pixels must not overflow.
            const int wanted = max(latest, largest - 80);
            if (wanted > exponent || wanted + 8 < exponent) {
                rescale = exact_power(exponent - wanted);
                exponent = wanted;
            }
        }
        unsigned high[tiles][4], low[tiles][4];  // h as operand A
        float row_factor[2][2];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int of_pixels = S::fixed_scale ? (sizeof(In) == 2 ? -1 : 0) : 141 - of_rows[e / 2 * 8 + 2 * t + e % 2];
            row_factor[e / 2][e % 2] = exact_power(141 - exponent - of_row.sum - of_row.of() - of_pixels);
        }
        constexpr int together = tiles <= 2 ? 2 : 1;  // halves of the step's rows
#pragma unroll
        for (int half = 0; half < 2; half += together) {
            float acc[tiles][together][4] = {}, small[tiles][together][4] = {};
            unsigned weights[S::x_blocks][2][4];
#pragma unroll
            for (int k = 0; k < S::x_blocks + tiles - 1; ++k) {
                unsigned pixels[together][2][2];
                const unsigned short* const at = from + half * 8 * S::pitch + 16 * k;
                if constexpr (pieces == 2) {
#pragma unroll
                    for (int a = 0; a < together; ++a) {
                        unsigned four[4];
                        ldmatrix(four, at + a * 8 * S::pitch);
#pragma unroll
                        for (int i = 0; i < 4; ++i) pixels[a][i / 2][i % 2] = four[i];
                    }
                } else if constexpr (together == 2) {
                    unsigned four[4];
                    ldmatrix(four, at);
#pragma unroll
                    for (int i = 0; i < 4; ++i) pixels[i / 2][0][i % 2] = four[i];
                } else {
                    ldmatrix(pixels[0][0], at);
                }
                if (k < S::x_blocks) {
                    Across::load(weights[k][0], x_weights, k, 0, lane);
                    Across::load(weights[k][1], x_weights, k, 1, lane);
                }
#pragma unroll
                for (int product = 0; product < 3; ++product)
#pragma unroll
                    for (int m = 0; m < tiles; ++m)
#pragma unroll
                        for (int a = 0; a < together; ++a) {
                            const int block = k - m;
                            if (block < 0 || block >= S::x_blocks || Across::empty(block, 0, 15)) continue;
                            if (product == 0) mma_f16(small[m][a], weights[block][1], pixels[a][0]);
                            else if (product == 1) mma_f16(acc[m][a], weights[block][0], pixels[a][0]);
                            else if (pieces == 2) mma_f16(small[m][a], weights[block][0], pixels[a][pieces - 1]);
                        }
            }
#pragma unroll
            for (int m = 0; m < tiles; ++m)
#pragma unroll
                for (int a = 0; a < together; ++a)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const float first = (acc[m][a][2 * i] + small[m][a][2 * i]) * row_factor[half + a][0];
                        const float second = (acc[m][a][2 * i + 1] + small[m][a][2 * i + 1]) * row_factor[half + a][1];
                        unsigned& to = high[m][2 * (half + a) + i];
                        to = split_high(first, second, 1.0f);
                        low[m][2 * (half + a) + i] = split_low(first, second, 1.0f, to);
                    }
        }
        // Block y_blocks - 1 completes the oldest outputs, block 0 begins the newest.
#pragma unroll
        for (int q = 0; q < y_blocks; ++q) {
            const int block = y_blocks - 1 - q;
            unsigned weights[2][4];
            Down::load(weights[0], y_weights, block, 0, lane);
            Down::load(weights[1], y_weights, block, 1, lane);
            float part[tiles][2][4] = {};
#pragma unroll
            for (int product = 0; product < 3; ++product)
#pragma unroll
                for (int m = 0; m < tiles; ++m)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        if (Down::empty(block, 8 * half, 8 * half + 7)) continue;
                        const unsigned b[2] = {weights[product == 0][2 * half], weights[product == 0][2 * half + 1]};
                        mma_f16(part[m][half], product == 1 ? low[m] : high[m], b);
                    }
            // The sums move up: those of the oldest outputs are at the end.
#pragma unroll
            for (int m = 0; m < tiles; ++m)
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const float added = part[m][i / 4][i % 4];
                    float& to = sums[m][q == 0 ? y_blocks - 1 : q - 1][i / 4][i % 4];
                    to = block == 0 ? added : fmaf(sums[m][q][i / 4][i % 4], rescale, added);
                }
        }
        const int i = (n - (y_blocks - 1)) * S::step;
        if (i >= 0) {
            const int count = min(S::warp_width, view.out_width - (j + my_column)), high_rows = min(S::step, rows - i);
            Out* const to = view.y + (top + i) * view.y_pitch + (j + my_column) * planes;
            const bool vectors = planes == 1 && count == S::warp_width && aligned(view.y, view.y_pitch);
            const bool plainly = n < plainly_until;
            const float factor = exact_power(exponent + of_row.sum - 141 - of_column.of());
            if (same_type<Out, float> && vectors && !plainly) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int row = e / 2 * 8 + 2 * t + e % 2;
                    if (row >= high_rows) continue;
#pragma unroll
                    for (int m = 0; m < tiles; ++m) {
                        const float (&v)[4] = sums[m][y_blocks - 1][e / 2];
                        __stcs(reinterpret_cast<float2*>(to + row * view.y_pitch + 16 * m + 2 * g),
                               make_float2(fmaf(v[e % 2], factor, delta), fmaf(v[e % 2 + 2], factor, delta)));
                    }
                }
            } else {
                store_staged<Problem, Tuning>(view, to, outputs, sums, factor, delta, w, count, high_rows, vectors, plainly,
                                              first_row + i, j + my_column, lane);
            }
        }
        if (n + 1 < steps) source.store(halves + (n + 1) % 2 * S::buffer, exponents + (n + 1) % 2 * S::step);
    }
}

}  // namespace leanconv
