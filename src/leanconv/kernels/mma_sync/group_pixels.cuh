// Groups of channels on tensor cores: which pixels an output is computed from, and how those of a tile of outputs lie in shared
// memory.
#pragma once

#include <device/element.cuh>
#include <device/index.cuh>
#include <device/ptx/arithmetic.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/mma.cuh>
#include <device/ptx/mma_tf32.cuh>

namespace leanconv {

// Units of 16 bytes, a row of ldmatrix: 8 channels of 16 bits, or 4 of float32.
template <class Problem> constexpr int unit_channels = 16 / static_cast<int>(sizeof(typename Problem::element));

__device__ __forceinline__ void multiply(float16, float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    mma_f16(sums, a, b);
}
__device__ __forceinline__ void multiply(bfloat16, float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    mma_bf16(sums, a, b);
}
__device__ __forceinline__ void multiply(float, float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    mma_tf32(sums, a, b);
}

// Elements of a fragment as the tensor core reads them: float32 is rounded to TF32.
template <class T, int count>
__device__ __forceinline__ void round_fragment(T, unsigned (&)[count]) {}
template <int count>
__device__ __forceinline__ void round_fragment(float, unsigned (&a)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) a[i] = cvt_rn_tf32_f32(__uint_as_float(a[i]));
}

// Two neighbours, rounded, as they lie in memory.
__device__ __forceinline__ unsigned rounded_pair(float16, const float (&v)[2]) { return cvt_rn_f16x2_f32(v[0], v[1]); }
__device__ __forceinline__ unsigned rounded_pair(bfloat16, const float (&v)[2]) { return cvt_rn_bf16x2_f32(v[0], v[1]); }
__device__ __forceinline__ float2 rounded_pair(float, const float (&v)[2]) { return make_float2(v[0], v[1]); }
template <class T> struct PairOf { using type = unsigned; };
template <> struct PairOf<float> { using type = float2; };

// The taps of a filter along an axis, by phases. A layer has one: output j reads the inputs stride * j + offset(0, i) by taps
// i. Its input's gradient has as many as the stride, unless dilation shares a factor with it: of phase a the inputs place(a) +
// stride * j get what the outputs j + offset(a, i) give them by taps a + apart * i; so all phases read neighbouring outputs.
template <bool gradient, int extent, int outputs, int taps, int stride, int dilation, int padding>
struct TapAxis {
    static constexpr int apart = gradient ? stride / gcd(stride, dilation) : 1, phases = apart < taps ? apart : taps;
    // Of what is read: how far windows of neighbouring j are apart; of what is written, its extent and the same.
    static constexpr int step = gradient ? 1 : stride, written = gradient ? extent : outputs, written_step = gradient ? stride : 1;
    static __host__ __device__ constexpr int count(int phase) { return (taps - phase + apart - 1) / apart; }
    static __host__ __device__ constexpr int tap(int phase, int i) { return phase + apart * i; }
    static __host__ __device__ constexpr int moved(int phase) {
        const int at = phase * dilation - padding;
        return at >= 0 ? at / stride : -((stride - 1 - at) / stride);
    }
    static __host__ __device__ constexpr int place(int phase) {
        return gradient ? phase * dilation - padding - stride * moved(phase) : 0;
    }
    static __host__ __device__ constexpr int offset(int phase, int i) {
        return gradient ? -moved(phase) - dilation * apart / stride * i : i * dilation - padding;
    }
    // The nearest offset, or minus the furthest; the most j of any phase.
    static __host__ __device__ constexpr int least(int sign) {
        int found = sign * offset(0, 0);
        for (int phase = 0; phase < phases; ++phase)
            for (int i = 0; i < count(phase); ++i)
                if (sign * offset(phase, i) < found) found = sign * offset(phase, i);
        return found;
    }
    static constexpr int first = least(1), reach = -least(-1) - least(1);
    static __host__ __device__ constexpr int most_positions() {
        int most = gradient ? 0 : outputs;
        for (int phase = 0; gradient && phase < phases; ++phase)
            if (extent - place(phase) > most * stride) most = (extent - place(phase) + stride - 1) / stride;
        return most;
    }
    static constexpr int positions = most_positions();
};

// What is read and what is written, and from which pixels: x and y of a layer, dy and dx of its input's gradient.
template <class Problem>
struct GroupWindows {
    static constexpr bool gradient = Problem::gradient;
    static constexpr int c = gradient ? Problem::k : Problem::c, group_c = gradient ? Problem::group_k : Problem::group_c;
    static constexpr int k = gradient ? Problem::c : Problem::k, group_k = gradient ? Problem::group_c : Problem::group_k;
    static constexpr int h = gradient ? Problem::p : Problem::h, w = gradient ? Problem::q : Problem::w;
    using Rows = TapAxis<gradient, Problem::h, Problem::p, Problem::r, Problem::stride_h, Problem::dilation_h, Problem::pad_top>;
    using Columns =
        TapAxis<gradient, Problem::w, Problem::q, Problem::s, Problem::stride_w, Problem::dilation_w, Problem::pad_left>;
    static constexpr int phases = Rows::phases * Columns::phases;
};

// What a CTA has at once: `filters` neighbouring filters, which are those of whole groups or a part of one group's, and all
// channels of these groups; rows x columns positions of windows of an image.
template <class Problem, class Tuning>
struct GroupTile {
    using W = GroupWindows<Problem>;
    static constexpr int filters = Tuning::filters, rows = Tuning::rows, columns = Tuning::columns, positions = rows * columns;
    // Sixteen positions are multiplied at once: a square, or the widest rectangle that the columns allow.
    static constexpr int across = columns % 16 == 0 ? 16 : columns & -columns, down = 16 / across;
    static constexpr int m_tiles_across = columns / across, m_tiles = positions / 16;
    static_assert(rows % down == 0, "tiles are whole m tiles of 16");
    static constexpr bool whole_groups = filters >= W::group_k;
    static_assert(whole_groups ? filters % W::group_k == 0 : W::group_k % filters == 0, "tiles do not cut groups");
    static constexpr int groups = whole_groups ? filters / W::group_k : 1, channels = groups * W::group_c;
    static constexpr int units = channels / unit_channels<Problem>, blocks = filters / 8;
    static_assert(channels % unit_channels<Problem> == 0 && filters % 8 == 0, "tiles begin at multiples of 16 bytes");
    static constexpr int filter_tiles = ceil_div(W::k, filters);
    static constexpr int tiles_p = ceil_div(W::Rows::positions, rows), tiles_q = ceil_div(W::Columns::positions, columns);

    Offset<Problem> n;
    int p, q;  // of the first position
    __device__ __forceinline__ explicit GroupTile(Offset<Problem> number)
        : n(number / (tiles_p * tiles_q)), p(static_cast<int>(number / tiles_q % tiles_p) * rows),
          q(static_cast<int>(number % tiles_q) * columns) {}
    static __device__ __forceinline__ Offset<Problem> count(long long batch) {
        return static_cast<Offset<Problem>>(batch) * (tiles_p * tiles_q);
    }
    // Row and column of a tile's position, from the number of its m tile (16 windows) and the position in it.
    static __device__ __forceinline__ int row(int m_tile, int number) {
        return m_tile / m_tiles_across * down + number / across;
    }
    static __device__ __forceinline__ int column(int m_tile, int number) {
        return m_tile % m_tiles_across * across + number % across;
    }
    static __device__ __forceinline__ int first_channel(int first_filter) { return first_filter / W::group_k * W::group_c; }
};

// What `Tuning::blocks` times eight filters are multiplied with in a phase: units of channels of each tap, two in a step.
template <class Problem, class Tuning>
struct GroupUnits {
    using Tile = GroupTile<Problem, Tuning>;
    using W = GroupWindows<Problem>;
    static constexpr int group_c = W::group_c, group_k = W::group_k, of_unit = unit_channels<Problem>;
    // Whether eight filters have several groups, or a unit's channels do.
    static constexpr bool mixed = group_c % of_unit != 0 || group_k % 8 != 0;
    // The first unit of the channels that eight filters read, from the tile's first on, and how many units that are.
    static __host__ __device__ constexpr int begin(int block) { return block * 8 / group_k * group_c / of_unit; }
    static __host__ __device__ constexpr int most_units() {
        int most = 0;
        for (int block = 0; block < Tile::blocks; ++block) {
            const int end = ceil_div(((block * 8 + 7) / group_k + 1) * group_c, of_unit);
            if (end - begin(block) > most) most = end - begin(block);
        }
        return most;
    }
    static __host__ __device__ constexpr int first_unit(int block) {
        return begin(block) < Tile::units - most_units() ? begin(block) : Tile::units - most_units();
    }
    static constexpr int units = most_units();
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
        constexpr Offset<Problem> apart = pixels;
        const T* const from = image + channel * apart + pixel;
        unsigned words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            words[i] = 0;
            if constexpr (sizeof(T) == 4) {
                if (exists) words[i] = __float_as_uint(from[i * apart]);
            } else if (exists) words[i] = from[2 * i * apart].bits | static_cast<unsigned>(from[(2 * i + 1) * apart].bits) << 16;
        }
        *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// Units from one pixel to the next in shared memory, so that loads have no bank conflicts: an odd number for ldmatrix, whose
// rows are units of eight neighbours; two more than a multiple of four `by_lanes`, for loads of eight neighbouring words of
// four neighbours.
__host__ __device__ constexpr int pitch_of(int units, bool by_lanes) { return by_lanes ? units + ((2 - units) & 3) : units | 1; }

// Shared memory of the pixels: in_rows rows; in each the columns that the first tap of a filter reads, side by side, then those
// one further right, as many times as the stride. So neighbouring windows read neighbouring pixels.
template <class Problem, class Tuning, bool by_lanes = false>
struct GroupPixels {
    using Tile = GroupTile<Problem, Tuning>;
    using W = GroupWindows<Problem>;
    using T = typename Problem::element;
    static constexpr int step_h = W::Rows::step, step_w = W::Columns::step;
    static constexpr int in_rows = (Tile::rows - 1) * step_h + W::Rows::reach + 1;
    static constexpr int in_columns = (Tile::columns - 1) * step_w + W::Columns::reach + 1;
    static constexpr int pitch = 16 * pitch_of(Tile::units, by_lanes), apart = ceil_div(in_columns, step_w) * pitch;
    // Pixels added to a row so that eight windows of several rows have no bank conflicts either: in 16 bits for windows of unit
    // stride down, in TF32 for every stride that is no multiple of four.
    static __host__ __device__ constexpr int padding() {
        const int row = ceil_div(in_columns, step_w) * step_w, rows = sizeof(T) == 4 && step_h % 4 != 0 ? step_h : 1;
        int more = 0;
        while (Tile::across < 8 && more < 7 && (row + more) * rows % 8 != Tile::across) ++more;
        return more;
    }
    static constexpr int pad = padding();
    static constexpr int row_bytes = step_w * apart + pad * pitch, bytes = in_rows * row_bytes;
    static_assert(!Problem::chwn, "images are outermost");

    // Where the pixel of a phase's tap lies, from a window's place.
    static __host__ __device__ constexpr int tap(int phase_h, int phase_w, int number) {
        const int of_row = W::Columns::count(phase_w);
        const int down = W::Rows::offset(phase_h, number / of_row) - W::Rows::first;
        const int right = W::Columns::offset(phase_w, number % of_row) - W::Columns::first;
        return down * row_bytes + right % step_w * apart + right / step_w * pitch;
    }
    // Where the window of a position begins.
    static __device__ __forceinline__ int place(int m_tile, int number) {
        return Tile::row(m_tile, number) * (step_h * row_bytes) + Tile::column(m_tile, number) * pitch;
    }

    // All threads copy; what lies outside the image, or behind the last channel, becomes zero.
    static __device__ __forceinline__ void copy(unsigned char* shared, const T* x, const Tile& tile, int first_channel) {
        constexpr int count = in_rows * in_columns * Tile::units, threads = Tuning::threads;
        const int h0 = tile.p * step_h + W::Rows::first, w0 = tile.q * step_w + W::Columns::first;
        const T* const image = x + static_cast<int64>(tile.n) * W::h * W::w * W::c;
#pragma unroll 4
        for (int i = threadIdx.x; i < count; i += threads) {
            const UnitPlace<Problem::nhwc, Tile::units, in_columns, in_rows> at(i);
            const int h = h0 + at.row, w = w0 + at.column, channel = first_channel + at.unit * unit_channels<Problem>;
            bool exists = static_cast<unsigned>(h) < W::h && static_cast<unsigned>(w) < W::w;
            if constexpr (W::k % Tile::filters != 0) exists = exists && channel < W::c;
            unsigned char* const to =
                shared + at.row * row_bytes + at.column % step_w * apart + at.column / step_w * pitch + at.unit * 16;
            copy_unit<Problem, W::c, W::h * W::w>(to, image, h * W::w + w, channel, exists);
        }
    }
};

}  // namespace leanconv
