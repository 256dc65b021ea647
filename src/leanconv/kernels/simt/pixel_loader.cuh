// Loaders of pixels: they bring one reduction step of the im2col matrix into shared memory, element by element with
// cp.async, forming it on the way. Rows of shared memory run along pixels, or filters (filter_loader.cuh), one row a
// reduction index. Reduction order: (c, r, s) for NCHW and CHWN, (r, s, c) for NHWC, which is the order of the filters in
// memory, with the slices t of a filter before its rows r; over the im2win tensor (c, s, r) and (s, r, c), its window order.
//
// A loader begins with reduction step `first_step`; load() brings the next one into a stage. Shared memory holds floats. load()
// copies floats there; elements of 16 bits, less than cp.async moves, it brings into registers, and store(), called later in the
// step, converts them and writes them: see TileProduct.
#pragma once

#include <device/element.cuh>
#include <device/index.cuh>
#include <device/ptx/memory.cuh>
#include <device/window.cuh>
#include <kernels/simt/tile.cuh>

namespace leanconv {

// `count` adjacent values from shared memory, 128 bits at a time where that is possible.
template <class T, int count>
__device__ __forceinline__ void read_adjacent(T (&to)[count], const T* from) {
    if constexpr (sizeof(T) == 4 && count % 4 == 0) {
#pragma unroll
        for (int i = 0; i < count; i += 4) {
            const uint4 v = *reinterpret_cast<const uint4*>(from + i);
            to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < count; ++i) to[i] = from[i];
    }
}

template <class Problem>
struct Reduction {
    static constexpr int taps = filter_taps<Problem>;
    static constexpr int size = Problem::group_c * taps;
    static_assert(size < 1 << 29, "the bytes of one filter are counted in an int");
};

// What loose words are counted in: bytes, as their channels do not fill whole words; all others in elements.
template <class Problem, bool bytes = loose<typename Problem::element>>
struct Units {
    static constexpr int bytes_each = item<Problem>, pixel = Problem::c, group = Problem::group_c, element = 1;
};
template <class Problem>
struct Units<Problem, true> {
    static constexpr int bytes_each = 1, pixel = Problem::channel_bytes, group = Problem::group_bytes, element = 4;
};

// Loose words that a thread holds: loose_words.cuh.
template <class Problem>
struct LooseWord;

// The way of `count` adjacent elements to shared memory. Floats and words are copied by load(). Elements of 16 bits, and
// loose words, stay in registers between load() and store().
template <class Problem, int count, int rows, int columns, bool held = through_registers<Problem>>
struct Held {
    __device__ __forceinline__ void load(int, int, float* to, const void* from, bool valid, int = 0) {
        if constexpr (count == 4) cp_async_16(to, from, valid);
        else cp_async_4(to, from, valid);
    }
};
template <class Problem, int count, int rows, int columns>
struct Held<Problem, count, rows, columns, true> {
    using T = typename Problem::element;
    typename Select<loose<T>, LooseWord<Problem>, Packed<T, count>>::type elements[rows][columns];

    // `in_tap`: the number of a loose word in its tap.
    __device__ __forceinline__ void load(int i, int j, float*, const void* from, bool valid, int in_tap = 0) {
        if constexpr (loose<T>) elements[i][j].load(from, valid, in_tap);
        else elements[i][j].load(static_cast<const T*>(from), valid);
    }

    // Elements that lie along a row of shared memory.
    __device__ __forceinline__ void store(int i, int j, float* to) const {
        const auto& from = elements[i][j];
        if constexpr (count == 4) {
            const float v[4] = {from.value(0), from.value(1), from.value(2), from.value(3)};
            store_vector(to, v);
        } else {
            static_assert(count == 1, "four elements, or one");
            *to = from.value(0);
        }
    }
};

// Pixels of the im2col matrix in shared memory: a row a reduction index, four floats of padding so that the rows that a
// warp writes at once fall into different banks; and what a thread holds of them in registers.
template <class Tuning>
struct PixelRows {
    static constexpr int pitch = Tuning::tile_pixels + 4;
    static constexpr int stage_floats = Tuning::tile_reduction * pitch;
    static constexpr int lanes = Tiling<Tuning>::lanes_pixels;
    static constexpr bool along_k = true;  // the order of a thread's products: see TileProduct

    float x[2][Tuning::thread_pixels];
    int at;

    __device__ __forceinline__ explicit PixelRows(const Tiling<Tuning>& tiling)
        : at(tiling.pixel + tiling.lane_pixel * 4) {}
    __device__ __forceinline__ void read(const float* stage, int row) {
        load_fragments<lanes * 4>(x[row % 2], stage + row * pitch + at);
    }
    __device__ __forceinline__ void read_late(const float*, int) {}
    __device__ __forceinline__ float value(int row, int j) const { return x[row % 2][j]; }
};

// NCHW and CHWN: a lane keeps its pixel and walks down the reduction, so the lanes of a warp read neighbouring pixels
// and share the reduction index; in CHWN it may keep four, of neighbouring images. What an index means (offset in the
// image, filter row and column) repeats every `period` indices but for whole channels: a table in shared memory replaces
// the arithmetic.
template <class Problem, class Tuning, bool interleaved>
struct PixelLoaderAcross {
    static constexpr int threads = Tiling<Tuning>::threads;
    static constexpr int depth = Tuning::tile_reduction;
    static constexpr int tile = Tuning::tile_pixels;
    using Rows = PixelRows<Tuning>;
    static constexpr int at_once = images_in_fours<Problem> ? 4 : 1;
    static constexpr int columns = gcd(tile / at_once, threads);   // threads side by side on a row
    static constexpr int pixels = tile / at_once / columns;        // of a thread, or fours of them
    static constexpr int rows = depth / (threads / columns);       // of a thread, adjacent
    static_assert(columns % 32 == 0 || at_once == 4, "the lanes of a warp read adjacent pixels");
    static_assert(at_once == 1 || !interleaved, "four pixels that are copied at once stay together");
    static_assert(depth % (threads / columns) == 0, "every thread has its share of the rows");

    static constexpr int steps = ceil_div(Reduction<Problem>::size, depth);
    static constexpr int taps = Reduction<Problem>::taps;
    static constexpr int period = taps / gcd(taps, depth) * depth;
    static constexpr int period_channels = period / taps;
    using B = Bytes<Problem>;
    // NOTE: the table serves filters of at most 16 x 16 taps, of volumes 10 x 10 x 10, as the bits do; larger ones decode every index.
    static constexpr bool tabled = Window<Problem>::bitwise;
    using T = typename Problem::element;
    const T* image;
    InputStrides<Problem> strides;
    B offset[pixels];
    Window<Problem> window[pixels];
    B* offsets;        // table: of a tap in the image, in bytes
    unsigned* bits;    // table: of a tap, for the test whether it lies inside; only in padded problems
    B tap_offset[rows];
    unsigned tap_bits[rows];
    int slot[pixels];
    int row;
    int next, tap;
    Held<Problem, at_once, rows, pixels> held;

    static constexpr bool volume = Depth<Problem>::volume;
    static __device__ __forceinline__ int tap_t(int index) { return index % taps / (Problem::r * Problem::s); }
    static __device__ __forceinline__ int tap_r(int index) {
        return volume ? index % taps / Problem::s % Problem::r : index % taps / Problem::s;
    }
    static __device__ __forceinline__ int tap_s(int index) { return index % Problem::s; }
    __device__ __forceinline__ B decode(int index) const {
        using Pixels = typename Select<volume, B, int>::type;
        Pixels pixel = tap_r(index) * Problem::dilation_h * Problem::w + tap_s(index) * Problem::dilation_w;
        if constexpr (volume) pixel += static_cast<B>(tap_t(index)) * (Depth<Problem>::dilation * Problem::h) * Problem::w;
        return (static_cast<B>(index / taps) * strides.channel + pixel * strides.pixel) * item<Problem>;
    }

    // `scratch` takes the table; the caller puts a barrier between construction and the first fetch.
    template <class Places>
    __device__ __forceinline__ PixelLoaderAcross(const T* x, const Places& places, Offset<Problem> first, int group,
                                                 void* scratch, int first_step)
        : image(x), strides(places.batch), offsets(static_cast<B*>(scratch)),
          bits(reinterpret_cast<unsigned*>(offsets + period)), row(threadIdx.x / columns * rows),
          next(first_step * depth), tap(next % period) {
        const int first_channel = group * Problem::group_c + next / period * period_channels;
#pragma unroll
        for (int j = 0; j < pixels; ++j) {
            const int at = (threadIdx.x % columns + j * columns) * at_once;
            const Pixel<Problem> pixel = places.pixel(first + at);
            window[j] = Window<Problem>(pixel, places.phase);
            offset[j] = (static_cast<B>(pixel.n) * strides.image + first_channel * strides.channel +
                         (window[j].row(0) * Problem::w + window[j].w) * strides.pixel) * item<Problem>;
            slot[j] = slot_of<Tiling<Tuning>::lanes_pixels, interleaved>(at);
        }
        if constexpr (tabled)
            for (int i = threadIdx.x; i < period; i += threads) {
                offsets[i] = decode(i);
                if constexpr (Problem::padded) bits[i] = Window<Problem>::tap_bits(tap_t(i), tap_r(i), tap_s(i));
            }
    }

    // Look up the taps of the next step: called some way ahead of load(), so that the table's latency is hidden.
    __device__ __forceinline__ void fetch() {
        if constexpr (tabled) {
            read_adjacent(tap_offset, offsets + tap + row);
            if constexpr (Problem::padded) read_adjacent(tap_bits, bits + tap + row);
        } else {
#pragma unroll
            for (int i = 0; i < rows; ++i) tap_offset[i] = decode(tap + row + i);
        }
    }

    __device__ __forceinline__ void load(float* stage) {
        constexpr int size = Reduction<Problem>::size;
#pragma unroll
        for (int i = 0; i < rows; ++i) {
            const bool real = size % depth == 0 || next + row + i < size;
            const int t = tap_t(tap + row + i), r = tap_r(tap + row + i), s = tap_s(tap + row + i);
#pragma unroll
            for (int j = 0; j < pixels; ++j) {
                float* const to = stage + (row + i) * Rows::pitch + slot[j];
                const T* const from = at_byte(image, offset[j] + tap_offset[i]);
                held.load(i, j, to, from, real && window[j].holds(t, r, s, tap_bits[i]));
            }
        }
        next += depth;
        tap += depth;
        if (tap == period) {
            tap = 0;
#pragma unroll
            for (int j = 0; j < pixels; ++j) offset[j] += period_channels * strides.channel * item<Problem>;
        }
    }

    __device__ __forceinline__ void store(float* stage) const {
#pragma unroll
        for (int i = 0; i < rows; ++i)
#pragma unroll
            for (int j = 0; j < pixels; ++j) held.store(i, j, stage + (row + i) * Rows::pitch + slot[j]);
    }
};

// Where the elements of a window lie when a window's row, or all of it, is one run in memory. `first` is where the
// window of a pixel begins, `tap` where a reduction index lies in every window, in bytes.
template <class Problem>
struct ImageNHWC {
    using B = Bytes<Problem>;
    using U = Units<Problem>;
    static constexpr bool checked = true;
    static constexpr int run = Problem::group_c;  // reduction indices that share a tap
    static __device__ __forceinline__ B first(const Pixel<Problem>& pixel, const Window<Problem>& window, int group) {
        return ((window.row(pixel.n) * Problem::w + window.w) * U::pixel + group * U::group) * U::bytes_each;
    }
    static __device__ __forceinline__ B tap(int number, int in_run) {
        const int row = number / Problem::s, s = number % Problem::s, r = Depth<Problem>::volume ? row % Problem::r : row;
        B pixel = static_cast<B>(r) * Problem::dilation_h * Problem::w + s * Problem::dilation_w;
        if constexpr (Depth<Problem>::volume) pixel = FilterTap<Problem>(number).template pixels<B>();
        return (pixel * U::pixel + in_run * U::element) * U::bytes_each;
    }
};

// Pixels whose elements lie along the reduction: a lane keeps its place in the reduction step and serves several
// pixels, so that neighbouring lanes read adjacent bytes. One decoding of the reduction index serves all its pixels.
template <class Problem, class Tuning, bool interleaved, class Image>
struct PixelLoaderAlong {
    static constexpr int threads = Tiling<Tuning>::threads;
    static constexpr int depth = Tuning::tile_reduction;
    static constexpr int tile = Tuning::tile_pixels;
    using Rows = PixelRows<Tuning>;
    template <int count>
    static constexpr bool serves = narrow<Problem> && Image::run % count == 0 &&
                                   depth % count == 0 && tile % (threads * count / depth) == 0;
    // Of 16-bit elements as many as lie aligned in every run and leave no thread without a pixel.
    static constexpr int at_once = serves<4> ? 4 : serves<2> ? 2 : 1;
    static constexpr int columns = depth / at_once;  // threads along the reduction
    static constexpr int per_pass = threads / columns;
    static constexpr int pixels = ceil_div(tile, per_pass);                // of a thread
    static constexpr int steps = ceil_div(Reduction<Problem>::size, depth);
    static_assert(threads % columns == 0, "a pass of the pixel loader covers whole pixels");

    using T = typename Problem::element;
    using B = Bytes<Problem>;
    const T* image;
    B offset[pixels];
    Window<Problem> window[pixels];
    int row, slot;
    int next;
    Held<Problem, at_once, 1, pixels> held;

    template <class Places>
    __device__ __forceinline__ PixelLoaderAlong(const T* x, const Places& places, Offset<Problem> first, int group,
                                                void*, int first_step)
        : image(x), row(threadIdx.x % columns * at_once), slot(threadIdx.x / columns), next(first_step * depth) {
#pragma unroll
        for (int j = 0; j < pixels; ++j) {
            const int at = position_of<Tiling<Tuning>::lanes_pixels, interleaved>(slot + j * per_pass);
            const Pixel<Problem> pixel = places.pixel(first + at);
            window[j] = Window<Problem>(pixel, places.phase);
            offset[j] = Image::first(pixel, window[j], group);
        }
    }

    // The decoding is cheap here and needs no table.
    __device__ __forceinline__ void fetch() {}

    __device__ __forceinline__ void load(float* stage) {
        constexpr int size = Reduction<Problem>::size;
        const bool real = size % depth == 0 || next + row < size;
        int tap, in_run;
        if constexpr (Image::run % depth == 0) {
            // A step stays within one tap: the decoding is the same for all threads.
            tap = next / Image::run;
            in_run = next % Image::run + row;
        } else {
            tap = (next + row) / Image::run;
            in_run = (next + row) % Image::run;
        }
        const int of_rows = tap / Problem::s, s = tap % Problem::s, t = of_rows / Problem::r;
        const int r = Depth<Problem>::volume ? of_rows % Problem::r : of_rows;
        const unsigned bits = Image::checked ? Window<Problem>::tap_bits(t, r, s) : 0;
        const B at_tap = Image::tap(tap, in_run);
#pragma unroll
        for (int j = 0; j < pixels; ++j)
            if (tile % per_pass == 0 || slot + j * per_pass < tile) {
                const T* const from = at_byte(image, offset[j] + at_tap);
                const bool inside = real && (!Image::checked || window[j].holds(t, r, s, bits));
                held.load(0, j, stage + row * Rows::pitch + slot + j * per_pass, from, inside, in_run);
            }
        next += depth;
    }

    __device__ __forceinline__ void store(float* stage) const {
#pragma unroll
        for (int j = 0; j < pixels; ++j)
            if (tile % per_pass == 0 || slot + j * per_pass < tile)
#pragma unroll
                for (int e = 0; e < at_once; ++e)
                    stage[(row + e) * Rows::pitch + slot + j * per_pass] = held.elements[0][j].value(e);
    }
};

}  // namespace leanconv
