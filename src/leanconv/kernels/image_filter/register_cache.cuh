// register_cache: a small filter over images, the pixels held in registers (Chen et al., register cache).
//
//   y[i, j] = delta + sum over u, v of w[u, v] * x[i + u - anchor_y, j + v - anchor_x]      borders by rule, no padded copy
//
// Requires   filters of at most 32x32; an image and a result of any type of pixels.cuh; pixels of one element or of several.
// Numerics   FMAs in direct order, in float32 or float64, or wrapping int32; rounded once to the type of the result.
// CTA tile   `warps` strips, one below the other, of `rows` rows of 32 * columns outputs. They share the input rows, which
//            come into shared memory once, for all of the image's filters that fit there.
// Thread     rows x columns outputs. It holds the windows of rows + 1 input rows, columns + s - 1 pixels each, in a ring of
//            registers.
// One step   (a filter row) read one more window; rows * columns * s FMAs, for which each weight is read once. 4 x 4
//            outputs and a 9x9 filter make 1296 FMAs on 36 + 27 shared loads of 128 bits.
// Types      shared memory, windows and sums have the type of the sums: image_rows.cuh converts on the way in and out.
// Volumes    a block makes a tile of one slice of the result and goes over the slices of the filter; sums stay in registers.
// Registers  rows * columns sums, (rows + 1) windows, 14 for weights and addresses.
// Work       2 * R * S flops for 8 bytes an output of float32, 2 of uint8: the memory copy bandwidth bounds filters up to about 7x7, FMA
//            issue larger ones.
// Measured   figure: filters register_cache/npp mean = 4.39
//            figure: filters register_cache/npp least = 1.20
//
// register_cache_partial_sums: the published scheme, one column a lane, sums that move from lane to lane; kept to be
// compared with.
#pragma once

#include <kernels/image_filter/image_rows.cuh>

namespace leanconv {

template <class T, int rows, int columns>
__device__ __forceinline__ void copy_sums(T (&to)[rows][columns], const T (&from)[rows][columns]) {
#pragma unroll
    for (int k = 0; k < rows * columns; ++k) to[k / columns][k % columns] = from[k / columns][k % columns];
}

// Block b computes strip b % strips of band (b / strips) % bands of image b / strips / bands; where not all filters fit
// into shared memory, first come the tiles of filters.
template <class Problem, class Tuning>
__device__ __forceinline__ void register_cache(const typename Problem::element* x, const typename Problem::sum* w,
                                               typename Problem::result* y, typename Problem::sum value,
                                               typename Problem::sum delta, int height, int width, int64 x_pitch,
                                               int64 x_step, int64 y_pitch, int64 y_step, int strips, int bands,
                                               int slices = 1) {
    using Rows = RowLoader<Problem, Tuning::columns>;
    using In = typename Rows::In;
    using Out = typename Rows::Out;
    using T = typename Rows::T;
    constexpr int r = Problem::r, s = Problem::s, rows = Tuning::rows, columns = Tuning::columns;
    constexpr int depth = rows + 1;  // windows in registers: those in use and the one that comes next
    constexpr int weight_pitch = round_up(s, 4), block_rows = rows * Tuning::warps, inputs = block_rows + r - 1;
    constexpr int channels = Problem::channels, planes = Problem::planes;
    // Where results are rounded to another type anyway, sums begin with delta, which saves an addition.
    constexpr bool begins_with_delta = !same_type<Out, T>;
    using Writer = RowWriter<Out, T, columns, planes, !begins_with_delta>;
    constexpr bool volumes = Problem::volumes;
    constexpr int tiles = ceil_div(Problem::all_filters, Problem::filters);
    // The first row of shared memory where warps put together rows of outputs: with several filters the input rows stay
    // in use, and each warp has a row of its own behind the filters.
    constexpr int staging = Problem::filters > 1 ? inputs + ceil_div(Problem::filters * r * weight_pitch, Rows::row) : 0;
    static_assert(0 <= Problem::anchor_y && Problem::anchor_y < r, "the anchor lies inside the filter");

    const int warp = warp_number(), lane = threadIdx.x % 32;
    const unsigned block = blockIdx.x / tiles;
    const int first_filter = blockIdx.x % tiles * Problem::filters;
    const int filters = tiles == 1 ? Problem::filters : min(Problem::filters, Problem::all_filters - first_filter);
    const int rest = block / strips, plane = rest / bands, image = plane / planes;
    const int top = rest % bands * block_rows, i = top + warp * rows, j = (block % strips) * Rows::width;
    const int out_height = Problem::valid ? height - (r - 1) : height;
    const int out_width = Problem::valid ? width - (s - 1) : width;
    // Of volumes an image is a slice of the result; a block goes over the slices of the filter, which it has alone.
    const int out_slices = !volumes ? 1 : Problem::valid ? slices - (Problem::depth - 1) : slices;
    const int volume = image / out_slices, slice = image % out_slices;
    static_assert(!volumes || Problem::filters == 1, "the sums of one filter stay in registers");
    typename Rows::View view{
        reinterpret_cast<const In*>(x) + image * x_step + plane % planes,
        reinterpret_cast<Out*>(y) + plane % planes +
            ((static_cast<int64>(volume) * Problem::all_filters + first_filter) * out_slices + slice) * y_step,
        height, width * channels, out_height, out_width * channels, x_pitch, y_pitch, static_cast<T>(value)};
    // Shared memory: the input rows, then the filters, their rows padded to whole vectors, then `staging`.
    T* const image_rows = reinterpret_cast<T*>(shared_memory());
    T* const weights = image_rows + inputs * Rows::row;
    if (Problem::per_image) w += static_cast<int64>(volumes ? volume : image) * Problem::all_filters * Problem::depth * r * s;
    T sums[volumes ? rows : 1][volumes ? columns : 1];  // from one slice to the next
#pragma unroll 1
    for (int t = 0; t < Problem::depth; ++t) {
        if constexpr (volumes) {
            const int from = border_index<typename Problem::border>(slice + t - Problem::anchor_z, slices);
            view.x = reinterpret_cast<const In*>(x) + plane % planes +
                     (static_cast<int64>(volume) * slices + max(from, 0)) * x_step;
            view.height = from < 0 ? 0 : height;  // outside all rows are `value`
        }
        {
            const Rows source(view, top - Problem::anchor_y, j, lane);
            if (source.inside(inputs)) {
                const In* from = source.vector_of(warp);
                T* to = image_rows + warp * Rows::row;
#pragma unroll
                for (int k = 0; k < inputs; k += Tuning::warps, from += Tuning::warps * x_pitch)
                    if (k + Tuning::warps <= inputs || k + warp < inputs) source.load_vectors(to + k * Rows::row, from);
            } else {
                const int count = min(inputs, out_height - top + r - 1);
#pragma unroll 1
                for (int n = warp; n < count; n += Tuning::warps) source.load(image_rows + n * Rows::row, n);
            }
            cp_async_commit_group();
        }
#pragma unroll 1
        for (int k = threadIdx.x; k < filters * r * weight_pitch; k += 32 * Tuning::warps) {
            const int column = k % weight_pitch;
            const int from = (first_filter * Problem::depth + t) * r * s + k / weight_pitch * s + column;
            weights[k] = column < s ? reinterpret_cast<const T*>(w)[from] : T(0);
        }
        cp_async_wait_group<0>();
        __syncthreads();

        const T* const mine = image_rows + warp * rows * Rows::row;
        // One filter after the other, for all outputs of the lane.
#pragma unroll 1
        for (int filter = 0; filter < filters; ++filter, view.y += volumes ? 0 : y_step) {
            const T* const taps = weights + filter * r * weight_pitch;
            T acc[rows][columns] = {};
            if constexpr (begins_with_delta) {
#pragma unroll
                for (int k = 0; k < rows * columns; ++k) acc[k / columns][k % columns] = delta;
            }
            if constexpr (volumes) {
                if (t > 0) copy_sums(acc, sums);
            }
            T ring[depth][Rows::window];
#pragma unroll
            for (int n = 0; n < rows; ++n) Rows::read_window(ring[n], mine + n * Rows::row, lane);
            // One row of it; the row's first input row is in ring position `slot`.
            const auto step = [&](int filter_row, int slot) {
                if (filter_row < r - 1)
                    Rows::read_window(ring[(slot + rows) % depth], mine + (filter_row + rows) * Rows::row, lane);
#pragma unroll
                for (int k = 0; k < s; k += 4) {
                    T four[4];
                    load_vector(four, taps + filter_row * weight_pitch + k);
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        if (k + e >= s) continue;
#pragma unroll
                        for (int p = 0; p < rows; ++p)
#pragma unroll
                            for (int c = 0; c < columns; ++c) acc[p][c] += four[e] * ring[(slot + p) % depth][(k + e) * channels + c];
                    }
                }
            };
            // Whole rounds of the ring as a loop, so that the code stays within the instruction cache; the rest unrolled.
            constexpr int looped = (r - 1) / depth * depth;
#pragma unroll 1
            for (int filter_row = 0; filter_row < looped; filter_row += depth) {
#pragma unroll
                for (int slot = 0; slot < depth; ++slot) step(filter_row + slot, slot);
            }
#pragma unroll
            for (int slot = 0; slot < r - looped; ++slot) step(looped + slot, slot);

            if constexpr (volumes) {
                if (t + 1 < Problem::depth) {
                    copy_sums(sums, acc);
                    __syncthreads();  // the input rows have been read
                    continue;
                }
            }
            if constexpr (Problem::filters == 1) __syncthreads();  // the input rows have been read and become `staging`
            const Writer writer(view, i, j, lane, static_cast<T>(delta), image_rows + (staging + warp) * Rows::row);
            if (writer.vectors && i + rows <= out_height) {
                Out* to = writer.vector_of(0);
#pragma unroll
                for (int p = 0; p < rows; ++p, to += y_pitch) writer.store_vectors(to, acc[p]);
            } else {
#pragma unroll
                for (int p = 0; p < rows; ++p)
                    if (i + p < out_height) writer.store(acc[p], p);
            }
        }
    }
}

// The published scheme (its Algorithm 1): a lane keeps one column of rows + r - 1 pixels. For each filter column it
// adds the products with its own pixels to its sums, and the sums move one lane up, so that lanes s - 1 ... 31 end with
// the outputs: 33 - s columns a warp, and a shuffle for every r FMAs.
// NOTE: the paper's listing loads one weight per thread; a filter may have more weights than the block has threads.
template <class Problem, class Tuning>
__device__ __forceinline__ void register_cache_partial_sums(
    const typename Problem::element* x, const typename Problem::element* w, typename Problem::element* y,
    typename Problem::element value, typename Problem::element delta, int height, int width, int64 x_pitch,
    int64 x_step, int64 y_pitch, int64 y_step, int strips, int bands) {
    using T = typename Arithmetic<typename Problem::element>::type;
    using Border = typename Problem::border;
    constexpr int r = Problem::r, s = Problem::s, rows = Tuning::rows, pitch = round_up(r, 4);
    static_assert(s <= 32, "at least one lane of a warp ends with an output");
    T* const weights = reinterpret_cast<T*>(shared_memory());  // column by column, each padded to whole vectors
    for (int k = threadIdx.x; k < s * pitch; k += 32 * Tuning::warps)
        weights[k] = k % pitch < r ? reinterpret_cast<const T*>(w)[k % pitch * s + k / pitch] : T(0);
    __syncthreads();

    const int warp = warp_number(), lane = threadIdx.x % 32;
    const int rest = blockIdx.x / strips, image = rest / bands;
    const int i = (rest % bands * Tuning::warps + warp) * rows, j = (blockIdx.x % strips) * (33 - s);
    if (i >= height) return;
    const T* const from = reinterpret_cast<const T*>(x) + image * x_step;
    const int column = border_index<Border>(j - Problem::anchor_x + lane, width);
    T pixels[rows + r - 1];
#pragma unroll
    for (int n = 0; n < rows + r - 1; ++n) {
        const int row = border_index<Border>(i - Problem::anchor_y + n, height);
        pixels[n] = row >= 0 && column >= 0 ? from[row * x_pitch + column] : static_cast<T>(value);
    }
    T sum[rows] = {};
#pragma unroll 1
    for (int k = 0; k < s; ++k) {
#pragma unroll
        for (int p = 0; p < rows; ++p) sum[p] = __shfl_up_sync(0xffffffffu, sum[p], 1);
#pragma unroll
        for (int m = 0; m < r; m += 4) {
            T column_weights[4];
            load_vector(column_weights, weights + k * pitch + m);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (m + e >= r) continue;
#pragma unroll
                for (int p = 0; p < rows; ++p) sum[p] += column_weights[e] * pixels[p + m + e];
            }
        }
    }
    const int to_column = j + lane - (s - 1);
    T* const to = reinterpret_cast<T*>(y) + image * y_step + i * y_pitch + to_column;
#pragma unroll
    for (int p = 0; p < rows; ++p)
        if (lane >= s - 1 && to_column < width && i + p < height) to[p * y_pitch] = sum[p] + static_cast<T>(delta);
}

}  // namespace leanconv
