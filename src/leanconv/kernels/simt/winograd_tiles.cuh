// How a block of the fused Winograd kernels divides its work: filters, tiles of outputs, states, channels.
//
// A block computes tile_k filters x `tiles` output tiles in all states of the transform; a warp has one state (or two
// or four, with a part of its lanes each) and multiplies transformed filters with transformed tiles as an outer
// product. The tiles are `rows` output rows of `columns` tiles each. An input row is needed by every output row whose
// filter reaches it, so its tiles are transformed once for all of them: rows + taps - 1 rows of transformed tiles
// ("positions") serve rows * taps.
#pragma once

#include <device/element.cuh>
#include <device/index.cuh>
#include <device/ptx/sync.cuh>

namespace leanconv {

// What of a filter and channel is transformed: `rows` times `column_blocks` blocks of height x width weights. In 2-D that
// is the whole filter. In 1-D it is a filter row, or a column block of a wide one: column block j of row r is one more
// row to sum over, whose pixels begin j * width further right. Rows are filled up with zeros to whole row blocks of
// `taps`, the last column block to its width. Of volumes each slice of a filter is a row block: its rows, or in 2-D its
// one transform.
template <class Problem>
struct FilterBlocks {
    static constexpr int height = Problem::tile_h - Problem::out_h + 1, width = Problem::tile_w - Problem::out_w + 1;
    static constexpr int rows = FilterDepth<Problem>::t * (ceil_div(Problem::r / height, Problem::taps) * Problem::taps);
    static constexpr int column_blocks = ceil_div(Problem::s, width);
    static_assert(Problem::r % height == 0, "several rows are transformed as a whole or not at all");
    static_assert(!FilterDepth<Problem>::volume || Problem::r / height == Problem::taps, "slices are row blocks");
};

// The host computes the sizes (`geometry` in winograd_tiles.py). Of a block: tile_k filters, `tiles` tiles of outputs in
// rows of `columns`. In shared memory, in floats:
//   positions, slice            transformed tiles of a channel; those that one filter row's step prepares
//   run_width, run_pixels       columns and pixels of `run` neighbouring tiles, which share those in which they overlap
//   step_sources                copies of pixels in a step
//   *_pitch                     of raw pixels: channels innermost in NHWC, pixels of a tile in NCHW, tiles in CHWN. The
//                               lanes of a warp transform `side_by_side` channels of neighbouring tiles: the paddings
//                               let them read pixels from, and write states to, 32 different banks
//   plane, channel_floats       a state of a channel's transformed tiles, and all of them: states that a warp reads at
//                               once lie in different banks
//   exchange_pitch, _plane      the sums of a part of the filters, exchanged between the states
template <class Problem, class Tuning>
struct WinogradTiles {
    static constexpr int states = Problem::states, lane_states = Tuning::lane_states;
    static constexpr int lanes_k = Tuning::lanes_k, lanes_tiles = 32 / lane_states / lanes_k;
    static constexpr int threads = 32 * states / lane_states;  // that multiply
    // Producers are further warps: they bring pixels and filters and transform, and the others do nothing but multiply.
    // All are launched with as many registers; then producers give up those that the others need for their sums.
    static constexpr int producers = 32 * Tuning::producers, all_threads = threads + producers;
    static constexpr int registers = 216, launched = 65536 / all_threads / 8 * 8;
    static constexpr int producer_registers =
        producers == 0 ? 0 : (launched * all_threads - registers * threads) / producers / 8 * 8;
    static_assert(threads % 128 == 0 && producers % 128 == 0 || producers == 0, "four warps at once change registers");
    static constexpr int columns = Tuning::columns, channels = Tuning::channels;
    static constexpr int chunks = ceil_div(Problem::group_c, channels);

    // Filter rows that are computed together: all of them, or a row block of high filters.
    static constexpr int taps = Problem::taps, column_blocks = FilterBlocks<Problem>::column_blocks;
    static constexpr int tap_blocks = FilterBlocks<Problem>::rows / taps * column_blocks;

    static constexpr int run = Tuning::run, runs = Tuning::slice / run;
    // In CHWN neighbouring tiles are those of neighbouring images: four may have one source.
    static constexpr int at_once = images_in_fours<Problem> ? 4 : 1;
    // The order in which runs are copied. Of half as many pixels as a warp has lanes, NCHW, two are copied at once: two
    // that lie in different halves of the banks.
    static constexpr int far = Tuning::run_pixels == 16 && Tuning::run_pitch % 32 != 0 &&
        16 % (Tuning::run_pitch % 32) == 0 && !Problem::nhwc && !Problem::chwn ? 16 / (Tuning::run_pitch % 32) : 1;
    static __device__ __forceinline__ constexpr int run_of(int number) {
        return far == 1 || runs % (2 * far) != 0
                   ? number : number / (2 * far) * (2 * far) + number / 2 % far + number % 2 * far;
    }
    // The run, and the pixel in it, of a step's source: pixel by pixel of every run, in CHWN tile by tile of every pixel.
    static __device__ __forceinline__ constexpr int source_run(int number) {
        return Problem::chwn ? number % (runs / at_once) * at_once : run_of(number / Tuning::run_pixels);
    }
    static __device__ __forceinline__ constexpr int source_pixel(int number) {
        return Problem::chwn ? number / (runs / at_once) : number % Tuning::run_pixels;
    }

    static constexpr int filter_floats = channels * states * Tuning::tile_k;       // of a stage
    static constexpr int tile_floats = channels * Tuning::channel_floats;  // of a chunk of channels; there are two
    static constexpr int round_k = lanes_k * 4, rounds = Tuning::thread_k / 4;  // of the exchange
    static constexpr int exchange_pitch = Tuning::exchange_pitch, exchange_plane = Tuning::exchange_plane;
    // Where column `column` of a row lies, which is a tile of a filter in NCHW, a filter of a tile in NHWC. Eight lanes
    // store at once, in rows 4, 8 and 12 below the first one's: the padding leads half of them to other banks, exchanged
    // columns the rest.
    static __device__ __forceinline__ constexpr int exchange_at(int row, int column) {
        constexpr bool deep = Problem::nhwc ? lanes_tiles >= 4 : lanes_tiles == 2;
        constexpr bool exchanged = deep && (Problem::nhwc ? round_k : Tuning::tiles) % 16 == 0;
        return row * exchange_pitch + (exchanged ? column ^ row / 8 % 2 * 8 : column);
    }
    static __device__ __forceinline__ void exchange_put(float* plane, int row, int column, const float (&v)[4]) {
        store_vector(plane + exchange_at(row, column), v);
    }

    static_assert(lane_states == 1 || lane_states == 2 || lane_states == 4, "a warp has one, two or four states");
    static_assert(32 / lane_states % lanes_k == 0, "the lanes of a state form a lanes_k x lanes_tiles grid");
    static_assert(lane_states == 1 || Tuning::tile_k % 32 == 0, "odd states exchange the halves of their rows of filters");
    static_assert(Tuning::thread_k % 4 == 0 && Tuning::thread_tiles % 4 == 0, "fragments are read four at a time");
    static_assert(states % lane_states == 0, "every warp has as many states");
    static_assert(Tuning::tiles % Tuning::rows == 0 && columns % 4 == 0, "fragments of four tiles do not straddle rows");
    static_assert(Tuning::slice % run == 0 && columns % run == 0, "tiles that share pixels are of one row and one step");
    static_assert(run == 1 || !Problem::chwn, "neighbouring tiles are of neighbouring images, which share no pixels");
    static_assert(channels % 4 == 0, "channels are copied four at a time");

    int state, lane_k, lane_tile;

    // NOTE: the lowest lane bit goes to k, the next ones to tiles, as in tile.cuh and for its reason.
    __device__ __forceinline__ WinogradTiles() {
        constexpr int lanes = 32 / lane_states;
        const int lane = threadIdx.x % lanes;
        state = threadIdx.x / lanes;
        lane_k = lanes_k == 1 ? 0 : lane % 2 + lane / (2 * lanes_tiles) * 2;
        lane_tile = lanes_k == 1 ? lane : lane / 2 % lanes_tiles;
    }

    // Synchronises the threads that multiply, once the producers have left.
    static __device__ __forceinline__ void barrier() {
        if constexpr (producers == 0) __syncthreads();
        else barrier_sync(0, threads);
    }

    // Where four filters lie in a row of transformed filters: of the states that a warp reads at once, the odd ones have
    // the halves of every 32 filters exchanged, so that the warp reads different banks.
    static __device__ __forceinline__ int swapped(int state, int k) { return lane_states == 1 ? k : k ^ state % 2 * 16; }
};

// The axis along which pixels move from one row block of the filters to the next, by `taps` times the dilation: the rows of
// an image, the slices of a volume. Neighbours along it are `pixels` apart.
template <class Problem>
struct BlockAxis {
    using D = Depth<Problem>;
    static constexpr int extent = D::volume ? D::d : Problem::h;
    static constexpr int pixels = D::volume ? Problem::h * Problem::w : Problem::w;
    static constexpr int taps = D::volume ? 1 : Problem::taps;
    static constexpr int dilation = D::volume ? D::dilation : Problem::dilation_h;
};

// One column of a block's tiles: where its first tile reads and writes.
template <class Problem, bool volume = Depth<Problem>::volume>
struct alignas(16) WinogradColumn {
    Bytes<Problem> x;   // of its first pixel, first channel of the group; in bytes
    int h, w;           // of its first pixel; far outside the image where the column does not exist
    Offset<Problem> y;  // of its first output, first filter of the group; in elements

    static constexpr int absent = -(1 << 30);

    // Columns are numbered along the tiles of a row, then over groups of rows, then over images; in CHWN over images
    // first. A group of rows are Tuning::rows output rows, dilation_h apart.
    template <class Tuning>
    static constexpr int row_groups =
        ceil_div(ceil_div(Problem::p, Problem::dilation_h), Tuning::rows * Problem::out_h) * Problem::dilation_h;
    template <class Tuning>
    static __device__ __forceinline__ WinogradColumn make(Offset<Problem> number, long long batch, int group) {
        const Offset<Problem> of_image = Problem::chwn ? number / static_cast<Offset<Problem>>(batch) : number;
        const Offset<Problem> line = of_image / Problem::row_tiles, beyond = line / row_groups<Tuning>;
        const Offset<Problem> n = Problem::chwn ? number - of_image * static_cast<Offset<Problem>>(batch) : beyond;
        const int at = static_cast<int>(of_image - line * Problem::row_tiles);
        const int row_group = static_cast<int>(line - beyond * row_groups<Tuning>);
        const int p = row_group % Problem::dilation_h +
            row_group / Problem::dilation_h * (Tuning::rows * Problem::out_h * Problem::dilation_h);
        const int q = Problem::first_q + at * Problem::out_w;
        WinogradColumn c;
        c.h = p - Problem::pad_top;
        c.w = q - Problem::pad_left;
        const InputStrides<Problem> in(batch);
        const OutputStrides<Problem> out(batch);
        c.x = (static_cast<Bytes<Problem>>(n) * in.image + group * Problem::group_c * in.channel +
               (static_cast<Bytes<Problem>>(c.h) * Problem::w + c.w) * in.pixel) * 4;
        c.y = n * out.image + group * Problem::group_k * out.channel +
            static_cast<Offset<Problem>>(p * Problem::q + q) * out.pixel;
        if ((Problem::chwn ? beyond > 0 : n >= batch) || q >= Problem::last_q) c.h = absent;
        return c;
    }
};
// The same of volumes, of which each output slice has as many columns as an image. `slice` is the first that windows read.
template <class Problem>
struct alignas(16) WinogradColumn<Problem, true> : WinogradColumn<Problem, false> {
    int slice;

    template <class Tuning>
    static __device__ __forceinline__ WinogradColumn make(Offset<Problem> number, long long batch, int group) {
        using D = Depth<Problem>;
        using OfImage = WinogradColumn<Problem, false>;
        constexpr int of_slice = Problem::row_tiles * OfImage::template row_groups<Tuning>;
        const Offset<Problem> slices = number / of_slice, n = slices / D::z;
        const int z = static_cast<int>(slices - n * D::z);
        WinogradColumn c;
        static_cast<OfImage&>(c) = OfImage::template make<Tuning>(number - (slices - n) * of_slice, batch, group);
        c.slice = z * D::stride - D::pad;
        c.x += static_cast<Bytes<Problem>>(c.slice) * BlockAxis<Problem>::pixels * InputStrides<Problem>(batch).pixel * 4;
        c.y += static_cast<Offset<Problem>>(z) * (Problem::p * Problem::q) * OutputStrides<Problem>(batch).pixel;
        return c;
    }
};

// Where a raw pixel lies along the axis of blocks, and its column; far outside the image where it does not exist. Columns
// are known from the start unless filter rows are cut into column blocks, which read other columns one after the other;
// the rows of volumes are known from the start.
template <class Problem, bool in_blocks = (FilterBlocks<Problem>::column_blocks > 1)>
struct WinogradPlace {
    int at;

    static __device__ __forceinline__ WinogradPlace make(int at, int w, bool exists) {
        return {exists && static_cast<unsigned>(w) < Problem::w ? at : WinogradColumn<Problem>::absent};
    }
    __device__ __forceinline__ bool inside(int ahead, int) const {
        return static_cast<unsigned>(at + ahead) < BlockAxis<Problem>::extent;
    }
};
template <class Problem>
struct WinogradPlace<Problem, true> {
    int at, w;

    static __device__ __forceinline__ WinogradPlace make(int at, int w, bool exists) {
        return {exists ? at : WinogradColumn<Problem>::absent, w};
    }
    __device__ __forceinline__ bool inside(int ahead, int aside) const {
        return static_cast<unsigned>(at + ahead) < BlockAxis<Problem>::extent &&
            static_cast<unsigned>(w + aside) < Problem::w;
    }
};

// Where one raw pixel comes from. Computing that anew in every step took a tenth of the main loop's instructions.
template <class Problem>
struct alignas(FilterBlocks<Problem>::column_blocks > 1 ? 16 : 2 * sizeof(Bytes<Problem>)) WinogradSource {
    Bytes<Problem> x;  // first channel of the group, in bytes
    WinogradPlace<Problem> place;

    // Sources are numbered in the order in which steps copy them.
    template <class Tuning>
    static __device__ __forceinline__ WinogradSource make(int number, const WinogradColumn<Problem>* columns,
                                                          long long batch) {
        using Tiles = WinogradTiles<Problem, Tuning>;
        using Column = WinogradColumn<Problem>;
        const int part = number / Tuning::step_sources, in_step = number % Tuning::step_sources;
        const int position = part * Tuning::slice + Tiles::source_run(in_step) * Tiles::run;
        const int pixel = Tiles::source_pixel(in_step);
        const Column column = columns[position % Tiles::columns];
        const int below = position / Tiles::columns * Problem::dilation_h + pixel / Tuning::run_width;
        const int aside = pixel % Tuning::run_width;
        const bool exists = position < Tuning::positions && column.h != Column::absent;
        WinogradSource source;
        source.x = column.x +
            (static_cast<Bytes<Problem>>(below) * Problem::w + aside) * InputStrides<Problem>(batch).pixel * 4;
        if constexpr (Depth<Problem>::volume) {
            const bool in_slice = static_cast<unsigned>(column.h + below) < Problem::h;
            source.place = WinogradPlace<Problem>::make(column.slice, column.w + aside, exists && in_slice);
        } else {
            source.place = WinogradPlace<Problem>::make(column.h + below, column.w + aside, exists);
        }
        return source;
    }
};

}  // namespace leanconv
