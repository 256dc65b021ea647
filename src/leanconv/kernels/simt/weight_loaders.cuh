// Tile loaders of the filters' gradient: they bring a step of output pixels, the reduction, into shared memory, a row a
// pixel: dy of a tile of filters, and what a tile of weights, taps and channels, reads of x.
//
// Where channels are innermost (NHWC) neighbouring lanes copy neighbouring filters, or weights, four at once where they come
// in fours. Otherwise pixels are neighbours in memory: eight lanes copy eight pixels, a sector, of one filter or weight, and
// the rows' padding of four floats puts what a warp writes into banks of their own.
#pragma once

#include <device/index.cuh>
#include <device/ptx/memory.cuh>
#include <kernels/simt/tile.cuh>
#include <kernels/simt/filter_loader.cuh>

namespace leanconv {

// How the threads of a block share `tile` columns of `depth` pixels.
template <class Problem, class Tuning, int tile, bool fours>
struct WeightShare {
    static constexpr int threads = Tiling<Tuning>::threads, depth = Tuning::tile_reduction;
    static constexpr int at_once = Problem::nhwc && fours ? 4 : 1;
    static constexpr int lanes = Problem::nhwc ? gcd(tile / at_once, threads) : threads / 8;  // side by side on columns
    static constexpr int pieces = ceil_div(tile / at_once, lanes);                           // columns of a thread
    static constexpr int per_pass = threads / lanes, passes = ceil_div(depth, per_pass);     // pixels
    int column, row;
    __device__ __forceinline__ WeightShare()
        : column((Problem::nhwc ? threadIdx.x % lanes : threadIdx.x / 8) * at_once),
          row(Problem::nhwc ? threadIdx.x / lanes : threadIdx.x % 8) {}
    __device__ __forceinline__ int place(int i, int pass, int pitch) const {
        return (row + pass * per_pass) * pitch + column + i * lanes * at_once;
    }
    __device__ __forceinline__ bool has(int i, int pass) const {
        const bool in_tile = tile / at_once % lanes == 0 || column + i * lanes * at_once < tile;
        return in_tile && (depth % per_pass == 0 || row + pass * per_pass < depth);
    }
    template <class Held>
    __device__ __forceinline__ void store(const Held& held, float* stage, int pitch) const {
#pragma unroll
        for (int pass = 0; pass < passes; ++pass)
#pragma unroll
            for (int i = 0; i < pieces; ++i)
                if (has(i, pass)) held.store(pass, i, stage + place(i, pass, pitch));
    }
};

template <class Problem, class Tuning>
struct GradientLoader {
    using Share = WeightShare<Problem, Tuning, Tuning::tile_k, Problem::k % 4 == 0 && Problem::group_k % 4 == 0>;
    static constexpr int pitch = filter_pitch<Tuning>, stage_floats = Share::depth * pitch;
    const Share share;
    using T = typename Problem::element;
    Held<Problem, Share::at_once, Share::passes, Share::pieces> held;
    const OutputStrides<Problem> stride;
    const T* from;  // of this thread's first filter
    long long batch;
    int left;  // filters of the group from there on
    Offset<Problem> count, next;

    __device__ __forceinline__ GradientLoader(const T* dy, int group, int first_k, Offset<Problem> first_pixel, long long batch)
        : stride(batch), batch(batch), left(Problem::group_k - first_k - share.column),
          count(static_cast<Offset<Problem>>(batch) * output_pixels<Problem>), next(first_pixel + share.row) {
        from = dy + static_cast<int64>(group * Problem::group_k + first_k + share.column) * static_cast<int64>(stride.channel);
    }

    __device__ __forceinline__ void load(float* stage) {
#pragma unroll
        for (int pass = 0; pass < Share::passes; ++pass) {
            const Offset<Problem> number = next + pass * Share::per_pass;
            int64 at = static_cast<int64>(number) * static_cast<int64>(stride.pixel);
            if constexpr (!Problem::nhwc && !Problem::chwn) {
                const Offset<Problem> n = number / output_pixels<Problem>;
                at = static_cast<int64>(n) * static_cast<int64>(stride.image) + (number - n * output_pixels<Problem>);
            } else if constexpr (Problem::chwn) {
                at = number;
            }
#pragma unroll
            for (int i = 0; i < Share::pieces; ++i) {
                constexpr int apart = Share::lanes * Share::at_once;
                if (!share.has(i, pass)) continue;
                held.load(pass, i, stage + share.place(i, pass, pitch),
                          from + at + static_cast<int64>(i * apart) * static_cast<int64>(stride.channel),
                          number < count && i * apart < left);
            }
        }
        next += Share::depth;
    }
    __device__ __forceinline__ void store(float* stage) const { share.store(held, stage, pitch); }
};

// Weights of a filter in the order of memory: (t, r, s, c) in NHWC, (c, t, r, s) otherwise.
template <class Problem>
struct WeightNumber {
    static constexpr int taps = filter_taps<Problem>, count = Problem::group_c * taps;
    int tap, channel;
    __device__ __forceinline__ explicit WeightNumber(int number)
        : tap(Problem::nhwc ? number / Problem::group_c : number % taps),
          channel(Problem::nhwc ? number % Problem::group_c : number / taps) {}
    WeightNumber() = default;
};

template <class Problem, class Tuning>
struct WindowLoader {
    using Share = WeightShare<Problem, Tuning, Tuning::tile_pixels, Problem::group_c % 4 == 0>;
    using Rows = PixelRows<Tuning>;
    using D = Depth<Problem>;
    static constexpr int pitch = Rows::pitch;
    const Share share;
    using T = typename Problem::element;
    Held<Problem, Share::at_once, Share::passes, Share::pieces> held;
    const InputStrides<Problem> stride;
    const T* x;
    long long batch;
    int64 from[Share::pieces];  // of this thread's weights: the pixel that output 0 reads without padding
    int deep[Share::pieces], down[Share::pieces], right[Share::pieces];
    Offset<Problem> count, next;

    __device__ __forceinline__ WindowLoader(const T* x, int group, int first_weight, Offset<Problem> first_pixel,
                                            long long batch)
        : stride(batch), x(x), batch(batch),
          count(static_cast<Offset<Problem>>(batch) * output_pixels<Problem>), next(first_pixel + share.row) {
#pragma unroll
        for (int i = 0; i < Share::pieces; ++i) {
            const int number = first_weight + share.column + i * Share::lanes * Share::at_once;
            const WeightNumber<Problem> weight(number);
            const FilterTap<Problem> tap(weight.tap);
            // NOTE: weights past the last read a row below all images: zeros.
            down[i] = number < WeightNumber<Problem>::count ? tap.r * Problem::dilation_h : 1 << 30;
            right[i] = tap.s * Problem::dilation_w;
            deep[i] = tap.t * D::dilation;
            int64 place = static_cast<int64>(tap.r * Problem::dilation_h) * Problem::w + right[i];
            if constexpr (D::volume) place += static_cast<int64>(deep[i]) * (Problem::h * Problem::w);
            from[i] = place * static_cast<int64>(stride.pixel) +
                      static_cast<int64>(group * Problem::group_c + weight.channel) * static_cast<int64>(stride.channel);
        }
    }

    __device__ __forceinline__ void fetch() {}

    __device__ __forceinline__ void load(float* stage) {
#pragma unroll
        for (int pass = 0; pass < Share::passes; ++pass) {
            const Offset<Problem> number = next + pass * Share::per_pass;
            const Pixel<Problem> pixel(number, batch);
            const int h = pixel.p * Problem::stride_h - Problem::pad_top, w = pixel.q * Problem::stride_w - Problem::pad_left;
            const int d = pixel.slice * D::stride - D::pad;
            const T* image = x + static_cast<int64>(pixel.n) * static_cast<int64>(stride.image) +
                             (static_cast<int64>(h) * Problem::w + w) * static_cast<int64>(stride.pixel);
            if constexpr (D::volume) image += static_cast<int64>(d) * (Problem::h * Problem::w) * static_cast<int64>(stride.pixel);
#pragma unroll
            for (int i = 0; i < Share::pieces; ++i) {
                if (!share.has(i, pass)) continue;
                const bool in_volume = !D::volume || static_cast<unsigned>(d + deep[i]) < D::d;
                const bool inside = number < count && static_cast<unsigned>(h + down[i]) < Problem::h &&
                                    static_cast<unsigned>(w + right[i]) < Problem::w && in_volume;
                held.load(pass, i, stage + share.place(i, pass, pitch), image + from[i], inside);
            }
        }
        next += Share::depth;
    }
    __device__ __forceinline__ void store(float* stage) const { share.store(held, stage, pitch); }
};

}  // namespace leanconv
