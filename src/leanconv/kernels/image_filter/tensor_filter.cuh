// tensor_filter: a small filter over images as products of matrices, a warp's (mma.sync), without shared memory for pixels.
//
//   y[i, j] = delta + sum over u, v of w[u, v] * x[i + u - anchor_y, j + v - anchor_x]      borders by rule, no padded copy
//
// Transform  a row of 128 outputs is 16 blocks of 8. With one row of the filter they are the product of
//              A  16 x 16 k  row m has the window of block m: 16 k elements of the image's row from 8 m - pad on
//              B  16 k x 8   column n has the filter's row from n + pad - anchor_x on, zeros above and below (a band)
//            The order of the window's elements is free. Lane t of four has four neighbours of it, a vector in memory.
// Requires   tensor cores of sm_80 or newer; filters of at most 32x32; up to four channels side by side; float32 sums.
// Numerics   operands are float16 (bfloat16 where the image is), sums float32. Weights, scaled by one power of two, are
//            sums of two float16, or of three bfloat16; a piece that is zero everywhere is left out. Elements of 8 and 16 bits
//            are exact in one piece, int16 and uint16 in two; float32 is scaled by a power of two for each row of a warp, and
//            cut in two. Of the products of pieces the smallest is left out. Results of 16 integer bits and of float32 are
//            rounded to nearest once for a row of the filter; the tensor core's own sums round toward zero.
// Warp       marches down a strip of 128 * tiles columns, `rows` rows of outputs. An input row is loaded once, `depth` rows
//            ahead, and multiplied with all r rows of the filter: sums[u] is the output row that this input row is row u
//            of. Then each moves one on; the last one is complete.
// Inf, NaN   zeros of the band times infinity would reach other outputs: rows of outputs with sums that are not finite
//            are made again by FMAs in direct order.
// Registers  4 r sums a tile, 4 r weights for each k16 step unless they lie in shared memory, 2 * depth vectors of pixels.
// Work       r * k16 steps * products of pieces: 7x7 of uint8 14 mma for 128 outputs, of float32 21.
#pragma once

#include <device/ptx/mma.cuh>
#include <kernels/image_filter/image_rows.cuh>
#include <kernels/image_filter/tensor_pixels.cuh>

namespace leanconv {

// The numbers of a strip: columns are pixels, each of `channels` elements.
template <class Problem, class Tuning>
struct TensorStrip {
    using In = typename Problem::element;
    using Out = typename Problem::result;
    using Pixels = TensorPixels<In>;
    static constexpr int r = Problem::r, s = Problem::s, channels = Problem::channels;
    static constexpr int width = 128 * Tuning::tiles, tiles = Tuning::tiles * channels;  // of one channel each
    static constexpr int pad = round_up(Problem::anchor_x, 4), lead = pad - Problem::anchor_x;
    static constexpr int steps = ceil_div(lead + 8 + s - 1, 16);  // of k16, in a window
    static constexpr int pieces = same_type<In, bfloat16> ? 3 : 2;  // of a weight
    // A row of inputs in shared memory, in elements: whole vectors of 16 bytes, which begin at multiples of as many in the
    // image's row.
    static constexpr int in_vector = 16 / sizeof(In), left = round_up(pad * channels, in_vector);
    static constexpr int vectors = ceil_div(left + (width - pad - 8 + 16 * steps) * channels, in_vector);
    static constexpr int row = vectors * in_vector;
    // Whether products of one filter row are summed apart, and rounded to nearest when they are added to the others.
    static constexpr bool promoted = Pixels::split || (sizeof(Out) == 4 || (small_integer<Out> && sizeof(Out) == 2));
    // A result that is rounded anyway begins with delta.
    static constexpr bool begins_with_delta = !same_type<Out, float>;
    static constexpr int fragment_bytes = 8 * 32 * pieces * r * steps;
    static_assert(Problem::planes == 1, "channels are filtered side by side");
    static_assert(0 <= Problem::anchor_x && Problem::anchor_x < s, "the anchor lies inside the filter");
    static_assert(0 <= Problem::anchor_y && Problem::anchor_y < r, "the anchor lies inside the filter");
};

// The filter as fragments of operand B.
template <class Problem, class Tuning>
struct TensorWeights {
    using Strip = TensorStrip<Problem, Tuning>;
    static constexpr int r = Strip::r, steps = Strip::steps, pieces = Strip::pieces;
    static constexpr bool kept = !Tuning::shared;  // in registers
    unsigned fragments[kept ? pieces : 1][kept ? r : 1][kept ? steps : 1][2];
    const unsigned char* shared;
    float scale, inverse;
    bool finite;
    bool several;  // pieces besides the first that are not zero everywhere

    // Weight (u, position of the window, column of the output in its block), scaled.
    __device__ __forceinline__ float banded(const float* w, int u, int position, int n) const {
        const int v = position - Strip::lead - n;
        return v >= 0 && v < Strip::s ? w[u * Strip::s + v] * scale : 0.0f;
    }

    __device__ __forceinline__ void make(unsigned (&to)[pieces][2], const float* w, int u, int step, int lane) const {
        float rest[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) rest[e] = banded(w, u, 16 * step + 4 * (lane % 4) + e, lane / 4);
#pragma unroll
        for (int p = 0; p < pieces; ++p) cut_piece<Strip::Pixels::is_bfloat16>(to[p], rest);
    }

    __device__ __forceinline__ TensorWeights(const float* w, unsigned char* shared_, int lane) : shared(shared_) {
        unsigned largest = 0;
#pragma unroll 1
        for (int k = lane; k < r * Strip::s; k += 32) largest = max(largest, __float_as_uint(w[k]) & 0x7fffffffu);
        largest = __reduce_max_sync(0xffffffffu, largest);
        finite = largest < 0x71800000u;  // 2^100
        // The largest becomes one between 2^13 and 2^14; delta times the scale stays a float.
        const unsigned exponent = min(267u - min(largest >> 23, 226u), 237u);
        scale = __uint_as_float(exponent << 23);
        inverse = __uint_as_float((254u - exponent) << 23);
        bool more = false;
#pragma unroll 1
        for (int k = lane; k < r * Strip::s; k += 32) {
            float rest[4] = {w[k] * scale, 0.0f, 0.0f, 0.0f};
            unsigned first[2];
            cut_piece<Strip::Pixels::is_bfloat16>(first, rest);
            more |= rest[0] != 0.0f;
        }
        several = __any_sync(0xffffffffu, more);
        if constexpr (kept) {
#pragma unroll
            for (int k = 0; k < r * steps; ++k) {
                unsigned made[pieces][2];
                make(made, w, k / steps, k % steps, lane);
#pragma unroll
                for (int i = 0; i < 2 * pieces; ++i) fragments[i / 2][k / steps][k % steps][i % 2] = made[i / 2][i % 2];
            }
        } else {
            uint2* const to = reinterpret_cast<uint2*>(shared_);
#pragma unroll 1
            for (int k = threadIdx.x; k < r * steps * 32; k += 32 * Tuning::warps) {
                unsigned made[pieces][2];
                make(made, w, k / (32 * steps), k / 32 % steps, lane);
#pragma unroll
                for (int p = 0; p < pieces; ++p) to[p * r * steps * 32 + k] = make_uint2(made[p][0], made[p][1]);
            }
            __syncthreads();
        }
    }

    __device__ __forceinline__ void fragment(unsigned (&to)[2], int piece, int u, int step, int lane) const {
        if constexpr (kept) {
            to[0] = fragments[piece][u][step][0], to[1] = fragments[piece][u][step][1];
        } else {
            ld_shared_v2_u32(to, shared + 8 * (((piece * r + u) * steps + step) * 32 + lane));
        }
    }
};

// Input rows of a strip on their way to a warp's registers, by a ring of rows in shared memory.
template <class Problem, class Tuning>
struct TensorRows {
    using Strip = TensorStrip<Problem, Tuning>;
    using In = typename Strip::In;
    using Border = typename Problem::border;
    using View = Image<In, typename Strip::Out, float>;
    // Of each block of 8 columns, a lane's four pixels of each step of its window.
    using Row = FourElements<In>[Tuning::tiles][Strip::steps][2][Strip::channels];
    static constexpr int depth = Tuning::depth, vectors = Strip::vectors;
    static constexpr int unroll = Tuning::unroll, lane_pixels = ceil_div(Strip::row, 32);
    static_assert(depth % unroll == 0, "rows of an iteration are neighbours in the ring");
    static constexpr int ring_bytes = depth * Strip::row * static_cast<int>(sizeof(In)), bytes = ring_bytes + 4 * Strip::row;

    const View& image;
    const int first_row, lane;
    const bool inside;   // all elements lie inside the image, and on vector edges
    const In* next;      // this lane's first vector in the next row, where they do
    In* const ring;
    int* const column;   // of each element of a row, where they are loaded one by one
    In one[lane_pixels];

    __device__ __forceinline__ TensorRows(const View& image_, int first_row_, int rows, int j, int lane_, unsigned char* shared)
        : image(image_), first_row(first_row_), lane(lane_),
          inside(j >= Strip::left && j - Strip::left + Strip::row <= image.width && first_row >= 0 &&
                 first_row + rows <= image.height && image.x_pitch % Strip::in_vector == 0 &&
                 reinterpret_cast<unsigned long long>(image.x) % 16 == 0),
          next(image.x + first_row * image.x_pitch + (j - Strip::left + lane * Strip::in_vector)),
          ring(reinterpret_cast<In*>(shared)), column(reinterpret_cast<int*>(shared + ring_bytes)) {
        if (inside) return;
#pragma unroll 1
        for (int k = lane; k < Strip::row; k += 32)
            column[k] = border_element<Border, Strip::channels>(j - Strip::left + k, image.width);
        __syncwarp();
    }

    // Issues the copy of the next row, where all lie inside, if it is `wanted`, and closes its group.
    __device__ __forceinline__ void copy(In* to, bool wanted) {
#pragma unroll
        for (int k = 0; k < vectors; k += 32)
            cp_async_16_if(wanted && (k + 32 <= vectors || k + lane < vectors), to + (k + lane) * Strip::in_vector,
                           next + k * Strip::in_vector);
        cp_async_commit_group();
        next += image.x_pitch;
    }

    // Loads row n one by one, and stores it.
    __device__ __forceinline__ void load(int n) {
        const int i = border_index<Border>(first_row + n, image.height);
        const In outside = narrow_sum<In>(image.value);
        const In* const from = image.x + i * image.x_pitch;
#pragma unroll
        for (int k = 0; k < lane_pixels; ++k) {
            one[k] = outside;
            if (k + 1 == lane_pixels && 32 * k + lane >= Strip::row) continue;
            const int c = column[32 * k + lane];
            if (Border::maps_inside || (i >= 0 && c >= 0)) one[k] = from[c];
        }
    }
    __device__ __forceinline__ void store(In* to) const {
#pragma unroll
        for (int k = 0; k < lane_pixels; ++k)
            if (k + 1 < lane_pixels || 32 * k + lane < Strip::row) to[32 * k + lane] = one[k];
    }

    __device__ __forceinline__ void read(Row& to, const In* row) const {
        constexpr int channels = Strip::channels;
        row += Strip::left + (8 * (lane / 4) + 4 * (lane % 4) - Strip::pad) * channels;
#pragma unroll
        for (int k = 0; k < 2 * Strip::steps * Tuning::tiles; ++k) {
            const int tile = k / 2 / Strip::steps, step = k / 2 % Strip::steps;
#pragma unroll
            for (int c = 0; c < channels; ++c)
                to[tile][step][k % 2][c].load(row + (128 * tile + 16 * step + 64 * (k % 2)) * channels + 4 * c);
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
                                             const Weights& weights, float inverse, int lane) {
    using Pixels = typename Strip::Pixels;
    constexpr int r = Strip::r, tiles = Strip::tiles, pieces = several ? Strip::pieces : 1;
    // Rows of the filter at a time, so that products that follow each other have sums of their own.
    // NOTE: weights in shared memory would otherwise all be loaded before the first product.
    constexpr int most = Strip::promoted || !Weights::kept ? (tiles < 4 ? 4 / tiles : 1) : r, group = most < r ? most : r;
#pragma unroll
    for (int first = r - 1; first >= 0; first -= group) {
        float apart[tiles][group][4] = {};
        if constexpr (!Strip::promoted) {
#pragma unroll
            for (int k = 0; k < group * tiles * 4; ++k)
                if (first >= k / 4 / tiles)
                    apart[k / 4 % tiles][k / 4 / tiles][k % 4] = sums[k / 4 % tiles][first - k / 4 / tiles][k % 4];
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
            [[maybe_unused]] const float sum = sums[k / 4 % tiles][row][k % 4];
            sums[k / 4 % tiles][row + 1][k % 4] = !Strip::promoted ? more : Pixels::scaled ? fmaf(more, inverse, sum) : sum + more;
        }
    }
}

// Makes the outputs of a strip, row by row; `inputs` rows are read. `plain`: all pixels lie inside the image, on vector edges,
// and so do all outputs. `doubtful` become the first and the last output row, if any, whose sums are not finite.
template <class Strip, bool plain, bool several, class Rows, class Weights, class Writer>
__device__ __forceinline__ void march(Rows& rows, const Weights& weights, Writer& writer, int inputs, float delta,
                                      int (&doubtful)[2]) {
    using Pixels = typename Strip::Pixels;
    constexpr int r = Strip::r, tiles = Strip::tiles, steps = Strip::steps, channels = Strip::channels, depth = plain ? Rows::depth : 2;
    constexpr int unroll = plain ? Rows::unroll : 1;
    const float begin = Strip::begins_with_delta ? delta * weights.scale * Pixels::scale : 0.0f;
    const float inverse = weights.inverse * (1.0f / Pixels::scale);
    float sums[tiles][r + 1][4];
#pragma unroll
    for (int k = 0; k < 4 * (r + 1) * tiles; ++k) sums[k / 4 / (r + 1)][k / 4 % (r + 1)][k % 4] = begin;
    if constexpr (plain) {
#pragma unroll
        for (int n = 0; n < depth; ++n) rows.copy(rows.ring + n * Strip::row, n < inputs);
    } else {
        rows.load(0);
        rows.store(rows.ring);
    }
    int base = 0;  // of the rows of an iteration, in the ring
#pragma unroll 1
    for (int n0 = 0; n0 < inputs; n0 += unroll) {
#pragma unroll
        for (int k = 0; k < unroll; ++k) {
            const int n = n0 + k;
            if (unroll > 1 && n >= inputs) break;
            typename Strip::In* const row = rows.ring + (unroll == depth ? 0 : base) + k * Strip::row;
            typename Rows::Row raw;
            if constexpr (plain) cp_async_wait_group<depth - 1>();
            __syncwarp();
            rows.read(raw, row);
            if constexpr (plain) {
                __syncwarp();  // the row has been read
                rows.copy(row, n + depth < inputs);
            } else {
                rows.load(n + 1);
            }
            Pixels pixels[tiles][steps];
            float up = 1.0f, down = 1.0f;  // the row's scale and its inverse
            if constexpr (Pixels::scaled) up = row_scale(raw, down);
#pragma unroll
            for (int i = 0; i < tiles * steps; ++i)
                pixels[i / steps][i % steps].make(raw[i / steps / channels][i % steps], i / steps % channels, up);

            add_products<Strip, several>(sums, pixels, weights, down, rows.lane);

            if constexpr (!plain) rows.store(rows.ring + Strip::row - base);
            if (n < r - 1) continue;
            float done[tiles][4];
#pragma unroll
            for (int i = 0; i < 4 * tiles; ++i) done[i / 4][i % 4] = sums[i / 4][r][i % 4];
            if constexpr (!small_integer<typename Strip::In>) {
                float all = done[0][0];
#pragma unroll
                for (int i = 1; i < 4 * tiles; ++i) all += done[i / 4][i % 4];
                if (!__all_sync(0xffffffffu, fabsf(all) < __uint_as_float(0x7f800000u))) {
                    doubtful[0] = min(doubtful[0], n - (r - 1));
                    doubtful[1] = n - (r - 1);
                }
            }
            writer.template store<plain>(done, inverse, delta);
        }
        base = base == (depth - unroll) * Strip::row ? 0 : base + unroll * Strip::row;
    }
    if constexpr (plain) cp_async_wait_group<0>();
}

template <class Problem, class Tuning>
__device__ __forceinline__ void tensor_filter(const typename Problem::element* x, const float* w,
                                              typename Problem::result* y, float value, float delta, int height,
                                              int width, int64 x_pitch, int64 x_step, int64 y_pitch, int64 y_step,
                                              int strips, int bands, int band_rows, int images) {
    using Strip = TensorStrip<Problem, Tuning>;
    using Rows = TensorRows<Problem, Tuning>;
    using Out = typename Strip::Out;
    constexpr int r = Strip::r, filters = Problem::all_filters;

    const int warp = warp_number(), lane = threadIdx.x % 32;
    // In the order of memory: strips of a band side by side. Blocks have one filter each.
    const int filter = static_cast<unsigned>(blockIdx.x) % filters;
    const int64 number = static_cast<int64>(blockIdx.x / filters) * Tuning::warps + warp;
    const int j = static_cast<int>(number % strips) * (Strip::width * Strip::channels);  // in elements
    const int64 rest = number / strips;
    const int top = static_cast<int>(rest % bands) * band_rows, image = static_cast<int>(rest / bands);
    const int out_height = Problem::valid ? height - (r - 1) : height;
    const int out_width = (Problem::valid ? width - (Problem::s - 1) : width) * Strip::channels;
    const bool idle = image >= images;
    if constexpr (!Tuning::shared) {
        if (idle) return;
    }
    unsigned char* const shared = shared_memory();
    w += (Problem::per_image ? static_cast<int64>(min(image, images - 1)) * filters + filter : filter) * (r * Problem::s);
    const TensorWeights<Problem, Tuning> weights(w, shared, lane);
    if (Tuning::shared && idle) return;

    const typename Rows::View view{
        x + image * x_step, y + (static_cast<int64>(image) * filters + filter) * y_step, height, width * Strip::channels,
        out_height, out_width, x_pitch, y_pitch, value};
    const int count = min(band_rows, out_height - top), inputs = count + r - 1;
    using Writer = TensorWriter<Out, Tuning::tiles, Strip::channels>;
    unsigned char* const mine =
        shared + (Tuning::shared ? Strip::fragment_bytes : 0) + warp * (Rows::bytes + Writer::bytes);
    Rows rows(view, top - Problem::anchor_y, inputs, j, lane, mine + Writer::bytes);
    Writer writer(view, top, j, lane, mine);
    int doubtful[2] = {weights.finite ? count : 0, weights.finite ? -1 : count - 1};
    if (weights.finite) {
        if (!rows.inside || !writer.vectors) march<Strip, false, true>(rows, weights, writer, inputs, delta, doubtful);
        else if (weights.several) march<Strip, true, true>(rows, weights, writer, inputs, delta, doubtful);
        else march<Strip, true, false>(rows, weights, writer, inputs, delta, doubtful);
    }
    writer.go_to(view, top + doubtful[0], j);
#pragma unroll 1
    for (int i = doubtful[0]; i <= doubtful[1]; ++i, writer.to += y_pitch)
#pragma unroll 1
        for (int k = 0; k < 4 * Strip::tiles; ++k) {
            const float sum = direct_sum<Problem>(view, w, top + i, j + writer.column(k), Strip::begins_with_delta ? delta : 0.0f);
            writer.store_one(Strip::begins_with_delta ? sum : sum + delta, k);
        }
}

}  // namespace leanconv
