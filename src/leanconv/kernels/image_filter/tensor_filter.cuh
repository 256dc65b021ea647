// tensor_filter: a small filter over images as products of matrices, on tensor cores (mma.sync).
//
//   y[i, j] = delta + sum over u, v of w[u, v] * x[i + u - anchor_y, j + v - anchor_x]      borders by rule, no padded copy
//
// Transform  a row of 128 outputs is 16 blocks of 8. With one row of the filter they are the product of
//              A  16 x 16 k  row m has the window of block m: 16 k elements of the image's row from 8 m - pad on
//              B  16 k x 8   column n has the filter's row from n + pad - anchor_x on, zeros above and below (a band)
//            The order of the window's elements is free. Lane t of four has four neighbours of it, one load; of float16 and
//            bfloat16 two pairs, which need no moves. Taps of several channels that fit into a window stay where they lie.
// Two rows   results that are rounded, and filters of up to five columns: blocks are 2 x 4 outputs, a window is r + 1 rows of 8
//            columns, and a product has two rows of it. Pairs of rows stay in registers until the last window has them.
// Requires   tensor cores of sm_80 or newer; filters of at most 32x32; up to four channels side by side; float32 sums.
// Numerics   operands are float16 (bfloat16 where the image is), sums float32. Weights, scaled by one power of two, are
//            sums of two float16, or of three bfloat16; those after the first are left out where they are zero everywhere.
//            Elements of 8 bits and float16 are one piece, uint16 and int16 two, all exact; float32 is scaled by a power of
//            two for each row of a warp, and cut in two. The product of small pieces is left out. Where results keep their
//            digits, products of each filter row are summed apart, and added to the others by an addition that rounds to
//            nearest: the tensor core's own sums round toward zero.
// Warp       marches down a strip of 128 * tiles columns and a band of rows, by itself. An input row is multiplied with all r
//            rows of the filter: sums[u] is the output row that this input row is row u of. Then each moves on by one; the
//            last one is complete.
// Pipelines  rows     a ring of `depth` in shared memory, cp.async, one __syncwarp a row
//            row n    multiplied, while row n + 1 is converted and the results of row n - 1 are stored
// Inf, NaN   zeros of the band times infinity would reach other outputs: rows of outputs with sums that are not finite
//            are made again by FMAs in direct order.
// Registers  4 r sums a tile and channel, 4 r weights for each k16 step unless they lie in shared memory, pixels of two rows.
// Work       r * k16 steps * products of pieces: 7x7 of uint8 14 mma for 128 outputs, of float32 21. Of two rows r / 2 + 1 in
//            place of r: 5x5 of uint8 6 where rows alone take 10.
// Measured   figure: filter-types tensor_filter/cvcuda mean = 3.37
//            figure: filter-types tensor_filter/cvcuda least = 1.64
#pragma once

#include <device/ptx/mma.cuh>
#include <device/ptx/sync.cuh>
#include <kernels/image_filter/tensor_rows.cuh>

namespace leanconv {

// The filter as fragments of operand B.
template <class Problem, class Tuning>
struct TensorWeights {
    using Strip = TensorStrip<Problem, Tuning>;
    static constexpr int r = Strip::r, rows = Strip::rows, steps = Strip::steps, pieces = Strip::pieces;
    static constexpr bool kept = !Tuning::shared;  // in registers
    unsigned fragments[kept ? pieces : 1][kept ? rows : 1][kept ? steps : 1][2];
    const unsigned char* shared;
    float scale, inverse;  // of the weights; of the sums
    float pixel_scale;
    bool finite;           // that none is too large, or infinite
    bool several;          // pieces besides the first that are not zero everywhere

    // Weight (u, position of the window, column of the output in its block), scaled.
    __device__ __forceinline__ float banded(const float* w, int u, int position, int n) const {
        const int at = position - Strip::lead - n, v = at / Strip::apart;
        return at >= 0 && v < Strip::s && at % Strip::apart == 0 ? w[u * Strip::s + v] * scale : 0.0f;
    }
    // Of two rows of outputs: element e of the lane in pair u of the window's rows. Columns of B are 2 rows of 4 outputs.
    __device__ __forceinline__ float of_pair(const float* w, int pair, int e, int lane) const {
        const int n = lane / 4, t = lane % 4;
        const int row = 2 * pair + (Strip::pairs ? e / 2 : t / 2) - n / 4;
        const int position = (Strip::pairs ? 2 * t + e % 2 : 4 * (t % 2) + e);
        return row >= 0 && row < r ? banded(w, row, position, n % 4) : 0.0f;
    }

    __device__ __forceinline__ void make(unsigned (&to)[pieces][2], const float* w, int u, int step, int lane) const {
        float rest[4];
#pragma unroll
        for (int e = 0; e < 4; ++e)
            rest[e] = Strip::two ? of_pair(w, u, e, lane)
                                 : banded(w, u, 16 * step + Strip::first_of(lane) + Strip::element(e), lane / 4);
#pragma unroll
        for (int p = 0; p < pieces; ++p) cut_piece<Strip::Pixels::is_bfloat16>(to[p], rest);
    }

    // `first` is the lane's first weight.
    __device__ __forceinline__ TensorWeights(const float* w, float first, unsigned char* shared_, int lane) : shared(shared_) {
        unsigned largest = __float_as_uint(first) & 0x7fffffffu;
#pragma unroll 1
        for (int k = lane + 32; k < r * Strip::s; k += 32) largest = max(largest, __float_as_uint(w[k]) & 0x7fffffffu);
        largest = __reduce_max_sync(0xffffffffu, largest);
        // The largest becomes one between 2^13 and 2^14; delta times the scale stays a float. Pixels of 8 bits have the
        // inverse of the scale, as a float16, and sums none.
        constexpr bool bytes = Strip::Pixels::bytes;
        finite = bytes ? largest == 0 || (largest >= 0x33800000u && largest < 0x49800000u) : largest < 0x71800000u;
        const unsigned power = 267u - min(largest >> 23, 226u), exponent = bytes ? min(max(power, 122u), 151u) : min(power, 237u);
        scale = __uint_as_float(exponent << 23);
        inverse = __uint_as_float((254u - exponent) << 23);
        pixel_scale = bytes ? inverse : Strip::Pixels::scale;
        inverse = bytes ? 1.0f : inverse * (1.0f / Strip::Pixels::scale);
        bool more = false;
#pragma unroll 1
        for (int k = lane; k < r * Strip::s; k += 32) {
            float rest[4] = {(k < 32 ? first : w[k]) * scale, 0.0f, 0.0f, 0.0f};
            unsigned piece[2];
            cut_piece<Strip::Pixels::is_bfloat16>(piece, rest);
            more |= rest[0] != 0.0f;
        }
        several = __any_sync(0xffffffffu, more);
        if constexpr (kept) {
#pragma unroll
            for (int k = 0; k < rows * steps; ++k) {
                unsigned made[pieces][2];
                make(made, w, k / steps, k % steps, lane);
#pragma unroll
                for (int i = 0; i < 2 * pieces; ++i) fragments[i / 2][k / steps][k % steps][i % 2] = made[i / 2][i % 2];
            }
        } else {
            uint2* const to = reinterpret_cast<uint2*>(shared_);
#pragma unroll 1
            for (int k = threadIdx.x; k < rows * steps * 32; k += 32 * Tuning::warps) {
                unsigned made[pieces][2];
                make(made, w, k / (32 * steps), k / 32 % steps, lane);
#pragma unroll
                for (int p = 0; p < pieces; ++p) to[p * rows * steps * 32 + k] = make_uint2(made[p][0], made[p][1]);
            }
            __syncthreads();
        }
    }

    __device__ __forceinline__ void fragment(unsigned (&to)[2], int piece, int u, int step, int lane) const {
        if constexpr (kept) {
            to[0] = fragments[piece][u][step][0], to[1] = fragments[piece][u][step][1];
        } else {
            ld_shared_v2_u32(to, shared + 8 * (((piece * rows + u) * steps + step) * 32 + lane));
        }
    }
};

// One output by FMAs in direct order.
template <class Problem, class View>
__device__ __forceinline__ float direct_sum(const View& image, const float* w, int i, int j, float sum) {
    constexpr int channels = Problem::channels;
    const int at = j / channels, channel = j % channels;
#pragma unroll 1
    for (int k = 0; k < Problem::r * Problem::s; ++k) {
        const int row = border_index<typename Problem::border>(i + k / Problem::s - Problem::anchor_y, image.height);
        const int column =
            border_index<typename Problem::border>(at + k % Problem::s - Problem::anchor_x, image.width / channels);
        const float pixel = row < 0 || column < 0
                                ? image.value
                                : widen<float>(image.x[row * image.x_pitch + column * channels + channel]);
        sum = fmaf(w[k], pixel, sum);
    }
    return sum;
}

// Adds the products of an input row with each row u of the filter to sums[u], which becomes sums[u + 1]; the last one is
// complete. `several`: weights have several pieces.
// NOTE: from the last row to the first, so that a sum can be written where the next one was.
template <class Strip, bool several, class Weights>
__device__ __forceinline__ void add_products(float (&sums)[Strip::tiles][Strip::r + 1][4],
                                             const typename Strip::Pixels (&pixels)[Strip::tiles][Strip::steps],
                                             const Weights& weights, const float (&begin)[4], float inverse, int lane) {
    using Pixels = typename Strip::Pixels;
    constexpr int r = Strip::r, tiles = Strip::tiles, pieces = several ? Strip::pieces : 1;
    // Rows of the filter at a time, so that products that follow each other have sums of their own.
    // NOTE: weights in shared memory would otherwise all be loaded before the first product.
    constexpr int few = r > 24 ? 2 : tiles < 4 ? 4 / tiles : 1;
    constexpr int most = Strip::promoted || !Weights::kept ? few : r, group = most < r ? most : r;
#pragma unroll
    for (int first = r - 1; first >= 0; first -= group) {
        float apart[tiles][group][4] = {};
        if constexpr (!Strip::promoted) {
#pragma unroll
            for (int k = 0; k < group * tiles * 4; ++k)
                if (first >= k / 4 / tiles)
                    apart[k / 4 % tiles][k / 4 / tiles][k % 4] =
                        first == k / 4 / tiles ? begin[k % 4] : sums[k / 4 % tiles][first - k / 4 / tiles][k % 4];
        }
#pragma unroll
        for (int step = 0; step < Strip::steps; ++step) {
            unsigned filter[group][pieces][2];
#pragma unroll
            for (int k = 0; k < group * pieces; ++k)
                if (first >= k / pieces)
                    weights.fragment(filter[k / pieces][k % pieces], k % pieces, first - k / pieces, step, lane);
            // The small products first: low pixels, then low weights.
#pragma unroll
            for (int product = pieces - !Pixels::split; product >= 0; --product) {
                const int of_pixel = product == pieces ? 1 : 0, of_weight = product == pieces ? 0 : product;
#pragma unroll
                for (int k = 0; k < group * tiles; ++k)
                    if (first >= k / tiles)
                        Pixels::multiply(apart[k % tiles][k / tiles], pixels[k % tiles][step].pieces[of_pixel],
                                         filter[k / tiles][of_weight]);
            }
        }
#pragma unroll
        for (int k = 0; k < group * tiles * 4; ++k) {
            const int row = first - k / 4 / tiles;
            if (row < 0) continue;
            const float more = apart[k / 4 % tiles][k / 4 / tiles][k % 4];
            [[maybe_unused]] const float sum = row == 0 ? begin[k % 4] : sums[k / 4 % tiles][row][k % 4];
            sums[k / 4 % tiles][row + 1][k % 4] =
                !Strip::promoted ? more : Pixels::scaled ? fmaf(more, inverse, sum) : sum + more;
        }
    }
}

// What sums begin with.
template <class Strip, class Weights>
__device__ __forceinline__ void beginning(float (&begin)[4], float delta, const Weights& weights, int inputs) {
    const float first = Strip::begins_with_delta ? delta * weights.scale * weights.pixel_scale : 0.0f;
    // NOTE: the zeros keep the compiler from making four registers of one before each product.
#pragma unroll
    for (int e = 0; e < 4; ++e) begin[e] = Strip::promoted ? first : first + static_cast<float>(zero_after(inputs + e));
}

// Stores row i of outputs, if it is one; `all` are.
template <class Strip, bool whole, bool all = false, class Writer>
__device__ __forceinline__ void store_row(Writer& writer, const float (&done)[Strip::tiles][4], int i, float inverse, float delta,
                                      int (&doubtful)[2]) {
    if constexpr (!small_integer<typename Strip::In>) {
        float total = done[0][0];
#pragma unroll
        for (int k = 1; k < 4 * Strip::tiles; ++k) total += done[k / 4][k % 4];
        if (!__all_sync(0xffffffffu, fabsf(total) < __uint_as_float(0x7f800000u)) && i >= 0) {
            doubtful[0] = min(doubtful[0], i);
            doubtful[1] = Strip::two ? i + 1 : i;
        }
    }
    writer.template store<whole, all>(done, i, inverse, delta);
}

// Makes the outputs of a strip, row by row; `inputs` rows are read. `plain`: the rows have no edges. `whole`: all outputs lie
// inside the image, in vectors. `doubtful` become the first and the last output row, if any, whose sums are not finite.
template <class Strip, bool plain, bool whole, bool several, class Rows, class Weights, class Writer>
__device__ __forceinline__ void march(Rows& rows, const Weights& weights, Writer& writer, int inputs, float delta,
                                      int (&doubtful)[2]) {
    using Pixels = typename Strip::Pixels;
    using In = typename Strip::In;
    constexpr int r = Strip::r, tiles = Strip::tiles, steps = Strip::steps, channels = Strip::channels;
    constexpr int depth = Rows::depth;
    // NOTE: of float32 the code of edges would take registers from the other one.
    constexpr int unroll = plain || (whole && !Pixels::scaled) ? Rows::unroll : 1;
    float begin[4];
    beginning<Strip>(begin, delta, weights, inputs);
    float sums[tiles][r + 1][4];
#pragma unroll
    for (int k = 0; k < 4 * (r + 1) * tiles; ++k) sums[k / 4 / (r + 1)][k / 4 % (r + 1)][k % 4] = begin[k % 4];
    const auto convert = [&](Pixels(&pixels)[tiles][steps], float& down, const typename Rows::Row& raw) {
        float up = weights.pixel_scale;
        if constexpr (Pixels::scaled) up = row_scale(raw, down);
#pragma unroll
        for (int i = 0; i < tiles * steps; ++i)
            pixels[i / steps][i % steps].make(raw[i / steps / channels][i % steps], i / steps % channels, up);
    };
    cp_async_wait_group<depth - 1>();
    __syncwarp();
    Pixels pixels[tiles][steps];  // of a row
    float down = 1.0f;            // the inverse of its scale
    {
        typename Rows::Row raw;
        rows.read(raw, rows.ring);
        convert(pixels, down, raw);
    }
    int base = 0;  // place in the ring of the rows of an iteration
    // A row is multiplied while the next one is converted and the results of the one before are stored.
#pragma unroll 1
    for (int n0 = 0; n0 < inputs; n0 += unroll) {
#pragma unroll
        for (int k = 0; k < unroll; ++k) {
            const int n = n0 + k, at = (unroll == depth ? 0 : base) + k;
            if (unroll > 1 && n >= inputs) break;
            cp_async_wait_group<depth - 2>();
            __syncwarp();  // all lanes' copies of the next row have landed, and this one has been read
            typename Rows::Row raw;
            const In* const next_row = rows.ring + (at == depth - 1 ? 0 : at + 1) * Strip::pitch;
            if constexpr (plain) rows.read(raw, next_row);
            if constexpr (!plain) rows.store_one(rows.ring + (at == 0 ? depth - 1 : at - 1) * Strip::pitch);
            rows.template copy<plain>(rows.ring + at * Strip::pitch, n + depth, inputs);
            cp_async_commit_group();
            // NOTE: copies of edges need registers, which these would take.
            if constexpr (!plain) rows.read(raw, next_row);
            Pixels next[tiles][steps];
            float next_down = 1.0f;
            convert(next, next_down, raw);

            float done[tiles][4];  // before this row
#pragma unroll
            for (int i = 0; i < 4 * tiles; ++i) done[i / 4][i % 4] = sums[i / 4][r][i % 4];
            add_products<Strip, several>(sums, pixels, weights, begin, down, rows.lane);
            store_row<Strip, whole>(writer, done, n - r, weights.inverse, delta, doubtful);

#pragma unroll
            for (int i = 0; i < tiles * steps; ++i) pixels[i / steps][i % steps] = next[i / steps][i % steps];
            down = next_down;
        }
        base = base == depth - unroll ? 0 : base + unroll;
    }
    cp_async_wait_group<0>();
    __syncwarp();
    float done[tiles][4];
#pragma unroll
    for (int i = 0; i < 4 * tiles; ++i) done[i / 4][i % 4] = sums[i / 4][r][i % 4];
    store_row<Strip, whole>(writer, done, inputs - r, weights.inverse, delta, doubtful);
}

// The sums of two rows of outputs, from a window whose pairs of rows lie in `pixels`, the first one at place `at`.
template <class Strip, bool several, int pairs, class Weights>
__device__ __forceinline__ void add_pairs(float (&sums)[Strip::tiles][4], const typename Strip::Pixels (&pixels)[pairs][Strip::tiles],
                                          int at, const Weights& weights, const float (&begin)[4], int lane) {
    constexpr int tiles = Strip::tiles, pieces = several ? Strip::pieces : 1;
#pragma unroll
    for (int e = 0; e < 4 * tiles; ++e) sums[e / 4][e % 4] = begin[e % 4];
#pragma unroll
    for (int p = 0; p < pairs; ++p)
#pragma unroll
        for (int piece = pieces - 1; piece >= 0; --piece) {
            unsigned filter[2];
            weights.fragment(filter, piece, p, 0, lane);
#pragma unroll
            for (int m = 0; m < tiles; ++m) Strip::Pixels::multiply(sums[m], pixels[(at + p) % pairs][m].pieces[0], filter);
        }
}

// The same, two rows of outputs at a time: a product has two rows of a window, which stay in registers until the last window
// has them. Here the rows are plain, and `count` outputs whole iterations, in which places in the ring are constants.
template <class Strip, bool several, class Rows, class Weights, class Writer>
__device__ __forceinline__ void march_plain_pairs(Rows& rows, const Weights& weights, Writer& writer, int inputs, int count,
                                                  float delta, int (&doubtful)[2]) {
    using Pixels = typename Strip::Pixels;
    constexpr int pairs = Strip::rows, tiles = Strip::tiles, slots = Rows::depth / 2, unroll = Rows::pairs_unrolled;
    float begin[4];
    beginning<Strip>(begin, delta, weights, inputs);
    Pixels pixels[pairs][tiles];
    int more = inputs - Rows::depth;  // rows that are not on their way yet
    // What comes of pair n, once it has landed; the one before it makes place for another, if there are so `many` rows.
    const auto bring = [&](typename Rows::Pair& raw, int n, int many) {
        cp_async_wait_group<slots - 2>();
        __syncwarp();  // all lanes' copies of this pair have landed, and the one before has been read
        rows.read_pair(raw, rows.ring + n % slots * 2 * Strip::pitch);
        if (n > 0) rows.copy_pair(rows.ring + (n - 1) % slots * 2 * Strip::pitch, rows.behind, many);
    };
#pragma unroll
    for (int n = 0; n < pairs; ++n) {
        typename Rows::Pair raw;
        bring(raw, n, more - 2 * (n - 1));
        Rows::ready(pixels[n], raw, weights.pixel_scale);
    }
    more -= 2 * (pairs - 1);
#pragma unroll 1
    for (int i = 0; i < count; i += 2 * unroll, more -= 2 * unroll) {
#pragma unroll
        for (int k = 0; k < unroll; ++k) {
            typename Rows::Pair raw;
            bring(raw, pairs + k, more - 2 * k);
            float sums[tiles][4];
            add_pairs<Strip, several, pairs>(sums, pixels, k, weights, begin, rows.lane);
            Rows::ready(pixels[k % pairs], raw, weights.pixel_scale);
            store_row<Strip, true, true>(writer, sums, i + 2 * k, weights.inverse, delta, doubtful);
        }
    }
    cp_async_wait_group<0>();
    __syncwarp();
}

// Here rows may have edges, and the last outputs may be missing.
template <class Strip, bool whole, bool several, class Rows, class Weights, class Writer>
__device__ __forceinline__ void march_pairs(Rows& rows, const Weights& weights, Writer& writer, int inputs, int count,
                                            float delta, int (&doubtful)[2]) {
    using Pixels = typename Strip::Pixels;
    using In = typename Strip::In;
    constexpr int pairs = Strip::rows, tiles = Strip::tiles, depth = Rows::depth;
    static_assert(depth % 2 == 0 && depth >= 6, "an edge is stored an iteration after it was asked for");
    float begin[4];
    beginning<Strip>(begin, delta, weights, inputs);
    Pixels pixels[pairs][tiles];
    int slot = 0;  // of a pair's first row in the ring
    const auto before = [&](int rows_before) { return slot < rows_before ? slot + depth - rows_before : slot - rows_before; };
    // What comes of pair n, once it has landed; the one before it makes place for another.
    const auto bring = [&](typename Rows::Pair& raw, int n) {
        cp_async_wait_group<depth / 2 - 2>();
        __syncwarp();  // all lanes' copies of this pair have landed, and the one before has been read
        if (n > 0) {
            if (n > 1) {
                rows.store_one(rows.ring + before(4) * Strip::pitch, 0);
                rows.store_one(rows.ring + (before(4) + 1) * Strip::pitch, 1);
            }
#pragma unroll
            for (int k = 0; k < 2; ++k)
                rows.template copy<false>(rows.ring + (before(2) + k) * Strip::pitch, 2 * (n - 1) + depth + k, inputs, k);
            cp_async_commit_group();
        }
        // NOTE: copies of edges need registers, which these would take.
        rows.read_pair(raw, rows.ring + slot * Strip::pitch);
        slot = slot + 2 == depth ? 0 : slot + 2;
    };
#pragma unroll
    for (int n = 0; n < pairs; ++n) {
        typename Rows::Pair raw;
        bring(raw, n);
        Rows::ready(pixels[n], raw, weights.pixel_scale);
    }
    float done[tiles][4];
#pragma unroll 1
    for (int i0 = 0; i0 < count; i0 += 2 * pairs) {
#pragma unroll
        for (int k = 0; k < pairs; ++k) {
            const int i = i0 + 2 * k;
            if (i >= count) break;
            typename Rows::Pair raw;
            bring(raw, i / 2 + pairs);
            float sums[tiles][4];
            add_pairs<Strip, several, pairs>(sums, pixels, k, weights, begin, rows.lane);
            if (i > 0) store_row<Strip, whole>(writer, done, i - 2, weights.inverse, delta, doubtful);
#pragma unroll
            for (int e = 0; e < 4 * tiles; ++e) done[e / 4][e % 4] = sums[e / 4][e % 4];
            Rows::ready(pixels[k], raw, weights.pixel_scale);
        }
    }
    cp_async_wait_group<0>();
    __syncwarp();
    store_row<Strip, whole>(writer, done, (count - 1) / 2 * 2, weights.inverse, delta, doubtful);
}

template <class Problem, class Tuning>
__device__ __forceinline__ void tensor_filter(const typename Problem::element* x, const float* w,
                                              typename Problem::result* y, float value, float delta, int height,
                                              int width, int64 x_pitch, int64 x_step, int64 y_pitch, int64 y_step,
                                              int strips, int bands, int band_rows) {
    using Strip = TensorStrip<Problem, Tuning>;
    using Rows = TensorRows<Problem, Tuning>;
    using Out = typename Strip::Out;
    constexpr int r = Strip::r, filters = Problem::all_filters;

    const int warp = warp_number(), lane = threadIdx.x % 32;
    // Blocks have one filter and one image each. Strips of a band lie side by side.
    const unsigned block = blockIdx.x / filters, of_image = ceil_div(strips * bands, Tuning::warps);
    const int filter = blockIdx.x % filters, image = block / of_image;
    const int number = (block - image * of_image) * Tuning::warps + warp;
    // What has edges takes longer, and comes first: the strips at the sides, in blocks of their own, then the last band and
    // the first one.
    const int sides = min(strips, 2), of_sides = sides * bands, inner = max(strips - 2, 1);
    const bool side = number < of_sides;
    const int row = side ? number / sides : static_cast<unsigned>(number - of_sides) / inner;
    const int strip = side ? (number - row * sides) * (strips - 1) : number - of_sides - row * inner + 1;
    const int j = strip * (Strip::width * Strip::channels);  // in elements
    const int top = (row == 0 ? bands - 1 : row - 1) * band_rows;
    const int out_height = Problem::valid ? height - (r - 1) : height;
    const int out_width = (Problem::valid ? width - (Problem::s - 1) : width) * Problem::channels;
    const bool idle = number >= strips * bands;
    if constexpr (!Tuning::shared) {
        if (idle) return;
    }
    unsigned char* const shared = shared_memory();
    const typename Rows::View view{
        x + image * x_step, y + (static_cast<int64>(image) * filters + filter) * y_step, height, width * Problem::channels,
        out_height, out_width, x_pitch, y_pitch, value};
    const int count = min(band_rows, out_height - top), inputs = count + r - 1;
    using Writer = TensorWriter<Out, Tuning::tiles, Strip::channels, Strip::Pixels::bytes, Strip::two>;
    unsigned char* const mine =
        shared + (Tuning::shared ? Strip::fragment_bytes : 0) + warp * (Rows::bytes + Writer::bytes);
    Rows rows(view, top - Problem::anchor_y, j, lane, mine + Writer::bytes);
    Writer writer(view, top, count, j, lane, mine);
    const bool whole = writer.whole(), plain = whole && rows.plain(inputs) && count % Rows::rows_unrolled == 0;
    // The first weights, then the first rows are on their way while the weights are made.
    w += (Problem::per_image ? static_cast<int64>(image) * filters + filter : filter) * (r * Problem::s);
    const float first_weight = lane < r * Problem::s ? w[lane] : 0.0f;
    if (!idle && plain) rows.template start<true>(inputs);
    else if (!idle) rows.template start<false>(inputs);
    const TensorWeights<Problem, Tuning> weights(w, first_weight, shared, lane);
    if (Tuning::shared && idle) return;
    int doubtful[2] = {weights.finite ? count : 0, weights.finite ? -1 : count - 1};
    if (weights.finite) {
        if constexpr (Strip::two) {
            if (!whole) march_pairs<Strip, false, true>(rows, weights, writer, inputs, count, delta, doubtful);
            else if (!plain) march_pairs<Strip, true, true>(rows, weights, writer, inputs, count, delta, doubtful);
            else if (weights.several) march_plain_pairs<Strip, true>(rows, weights, writer, inputs, count, delta, doubtful);
            else march_plain_pairs<Strip, false>(rows, weights, writer, inputs, count, delta, doubtful);
        } else {
            if (!whole) march<Strip, false, false, true>(rows, weights, writer, inputs, delta, doubtful);
            else if (!plain) march<Strip, false, true, true>(rows, weights, writer, inputs, delta, doubtful);
            else if (weights.several) march<Strip, true, true, true>(rows, weights, writer, inputs, delta, doubtful);
            else march<Strip, true, true, false>(rows, weights, writer, inputs, delta, doubtful);
        }
    }
    writer.go_to(top + doubtful[0], j);
#pragma unroll 1
    for (int i = doubtful[0]; i <= min(doubtful[1], count - 1); i += Writer::rows, writer.go_on())
#pragma unroll 1
        for (int k = 0; k < 4 * Strip::tiles; ++k) {
            const float begin = Strip::begins_with_delta ? delta : 0.0f;
            const float sum = direct_sum<Problem>(view, w, top + i + writer.row_of_lane(), j + writer.column(k), begin);
            if (i + writer.row_of_lane() < count) writer.store_one(Strip::begins_with_delta ? sum : sum + delta, k);
        }
}

}  // namespace leanconv
