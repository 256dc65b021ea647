// The pixels that a tile of outputs reads, for a few groups of channels, in shared memory: what kernels of groups share.
#pragma once

#include <device/element.cuh>
#include <device/index.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/mma.cuh>

namespace leanconv {

// Units of 8 channels, 16 bytes: a row of ldmatrix.
constexpr int unit_channels = 8;

__device__ __forceinline__ void multiply(float16, float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    mma_f16(sums, a, b);
}
__device__ __forceinline__ void multiply(bfloat16, float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    mma_bf16(sums, a, b);
}

// What a CTA has at once: `filters` neighbouring filters, which are those of whole groups or a part of one group's, and all
// channels of these groups; rows x columns outputs of an image.
template <class Problem, class Tuning>
struct GroupTile {
    static constexpr int filters = Tuning::filters, rows = Tuning::rows, columns = Tuning::columns, outputs = rows * columns;
    static constexpr bool whole_groups = filters >= Problem::group_k;
    static_assert(whole_groups ? filters % Problem::group_k == 0 : Problem::group_k % filters == 0, "tiles do not cut groups");
    static constexpr int groups = whole_groups ? filters / Problem::group_k : 1, channels = groups * Problem::group_c;
    static constexpr int units = channels / unit_channels, blocks = filters / 8;
    static_assert(channels % unit_channels == 0 && filters % 8 == 0, "tiles begin at multiples of 16 bytes");
    static constexpr int filter_tiles = ceil_div(Problem::k, filters);
    static constexpr int tiles_p = ceil_div(Problem::p, rows), tiles_q = ceil_div(Problem::q, columns);

    Offset<Problem> n;
    int p, q;  // of the first output
    __device__ __forceinline__ explicit GroupTile(Offset<Problem> number)
        : n(number / (tiles_p * tiles_q)), p(static_cast<int>(number / tiles_q % tiles_p) * rows),
          q(static_cast<int>(number % tiles_q) * columns) {}
    static __device__ __forceinline__ Offset<Problem> count(long long batch) {
        return static_cast<Offset<Problem>>(batch) * (tiles_p * tiles_q);
    }
    static __device__ __forceinline__ int first_channel(int first_filter) {
        return first_filter / Problem::group_k * Problem::group_c;
    }
};

// What `Tuning::blocks` times eight filters are multiplied with: units of 8 channels of each tap, two in a step.
template <class Problem, class Tuning>
struct GroupReduction {
    using Tile = GroupTile<Problem, Tuning>;
    static constexpr int group_c = Problem::group_c, group_k = Problem::group_k;
    // Whether eight filters have the same channels, and all channels of a unit belong to one group.
    static constexpr bool mixed = group_c % unit_channels != 0 || group_k % 8 != 0;
    // The first unit of the channels that eight filters read, from the tile's first on, and how many units that are.
    static __host__ __device__ constexpr int begin(int block) { return block * 8 / group_k * group_c / unit_channels; }
    static __host__ __device__ constexpr int most_units() {
        int most = 0;
        for (int block = 0; block < Tile::blocks; ++block) {
            const int end = ceil_div(((block * 8 + 7) / group_k + 1) * group_c, unit_channels);
            if (end - begin(block) > most) most = end - begin(block);
        }
        return most;
    }
    static __host__ __device__ constexpr int first_unit(int block) {
        return begin(block) < Tile::units - most_units() ? begin(block) : Tile::units - most_units();
    }
    static constexpr int units = most_units(), count = Problem::r * Problem::s * units, steps = (count + 1) / 2;
    // The filters of a warp read the same channels.
    static constexpr bool shared = group_k % (8 * Tuning::blocks) == 0;
    static constexpr int reads = shared ? 1 : Tuning::blocks;
};

// Which unit of which pixel a thread copies: what lies next to each other in memory changes fastest.
template <bool nhwc, int units, int columns, int rows>
struct UnitPlace {
    int unit, row, column;
    __device__ __forceinline__ explicit UnitPlace(int i)
        : unit(nhwc ? i % units : i / (columns * rows)), row(nhwc ? i / (units * columns) : i / columns % rows),
          column(nhwc ? i / units % columns : i % columns) {}
};

// A unit of a pixel, from `channel` on, of an image of `channels` of so many pixels; zeros where it does not exist. In NCHW its
// channels are loaded one by one.
template <class Problem, int channels, int pixels, class T>
__device__ __forceinline__ void copy_unit(unsigned char* to, const T* image, int pixel, int channel, bool exists) {
    if constexpr (Problem::nhwc) {
        const Offset<Problem> at = static_cast<Offset<Problem>>(pixel) * channels + channel;
        cp_async_16(to, image + (exists ? at : 0), exists);
    } else {
        const T* const from = image + static_cast<Offset<Problem>>(channel) * pixels + pixel;
        unsigned words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            words[i] = 0;
            if (exists) words[i] = from[2 * i * pixels].bits | static_cast<unsigned>(from[(2 * i + 1) * pixels].bits) << 16;
        }
        *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// Shared memory of the pixels: in_rows rows; in each the columns that the first tap of a filter reads, side by side, then those
// one further right, as many times as the stride. So neighbouring outputs read neighbouring pixels. A pixel has an odd number
// of units: eight neighbours meet each bank once.
template <class Problem, class Tuning>
struct GroupPixels {
    using Tile = GroupTile<Problem, Tuning>;
    using T = typename Problem::element;
    static constexpr int in_rows = (Tile::rows - 1) * Problem::stride_h + (Problem::r - 1) * Problem::dilation_h + 1;
    static constexpr int in_columns = (Tile::columns - 1) * Problem::stride_w + (Problem::s - 1) * Problem::dilation_w + 1;
    static constexpr int pitch = 16 * (Tile::units | 1), apart = ceil_div(in_columns, Problem::stride_w) * pitch;
    static constexpr int row_bytes = Problem::stride_w * apart, bytes = in_rows * row_bytes;
    static_assert(!Problem::chwn && sizeof(T) == 2, "images are outermost, and units have eight channels of 16 bits");

    // Where a tap's pixel lies, from that of the first tap; and that of an output's first tap.
    static __host__ __device__ constexpr int tap(int number) {
        const int right = number % Problem::s * Problem::dilation_w;
        return number / Problem::s * Problem::dilation_h * row_bytes + right % Problem::stride_w * apart +
               right / Problem::stride_w * pitch;
    }
    static __device__ __forceinline__ int place(int output) {
        return output / Tile::columns * (Problem::stride_h * row_bytes) + output % Tile::columns * pitch;
    }

    // All threads copy; what lies outside the image, or behind the last channel, becomes zero.
    static __device__ __forceinline__ void copy(unsigned char* shared, const T* x, const Tile& tile, int first_channel) {
        constexpr int count = in_rows * in_columns * Tile::units, threads = Tuning::threads;
        const int h0 = tile.p * Problem::stride_h - Problem::pad_top, w0 = tile.q * Problem::stride_w - Problem::pad_left;
        const T* const image = x + static_cast<int64>(tile.n) * Problem::h * Problem::w * Problem::c;
#pragma unroll 4
        for (int i = threadIdx.x; i < count; i += threads) {
            const UnitPlace<Problem::nhwc, Tile::units, in_columns, in_rows> at(i);
            const int h = h0 + at.row, w = w0 + at.column, channel = first_channel + at.unit * unit_channels;
            bool exists = static_cast<unsigned>(h) < Problem::h && static_cast<unsigned>(w) < Problem::w;
            if constexpr (Problem::k % Tile::filters != 0) exists = exists && channel < Problem::c;
            unsigned char* const to = shared + at.row * row_bytes + at.column % Problem::stride_w * apart +
                                      at.column / Problem::stride_w * pitch + at.unit * 16;
            copy_unit<Problem, Problem::c, Problem::h * Problem::w>(to, image, h * Problem::w + w, channel, exists);
        }
    }
};

}  // namespace leanconv
