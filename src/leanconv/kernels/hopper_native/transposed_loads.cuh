// Pixels of NCHW on their way to shared memory: loaded, transposed to channels-last in registers, stored as vectors of eight
// channels, 16 bytes.
//
// What is loaded is a `Source`: a tensor's images of h x w pixels and c channels, group_c of each group, and the linear order of
// its pixels (linear_pixels.cuh). A stage has `vectors` of channels, `pitch` pixels apart, of `phase_pixels` of each of `phases`.
// `wide`: what a lane loads together may be of both phases of columns, and of two vectors where registers are few.
#pragma once

#include <device/index.cuh>
#include <device/pipeline/rings.cuh>
#include <device/ptx/sync.cuh>
#include <device/ptx/tma.cuh>
#include <kernels/hopper_native/linear_pixels.cuh>

namespace leanconv {

// What a source says of x.
template <class Problem>
struct InputTensor {
    using T = typename Problem::element;
    static constexpr int h = Problem::h, w = Problem::w, c = Problem::c, group_c = Problem::group_c;
    static constexpr int stride_h = Problem::stride_h, stride_w = Problem::stride_w;
    using D = Depth<Problem>;
};

// Eight channels of `count` neighbouring pixels: loaded by channels, read by pixels.
template <int count>
struct ChannelVector {
    static constexpr int words = count == 4 ? 2 : 1;
    unsigned channels[8][words];

    // Channels lie `apart` elements apart, and `exist` of them do.
    template <class T>
    __device__ __forceinline__ void load(const T* from, int apart, int exist) {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            const T* const at = from + static_cast<int64>(c) * apart;
            unsigned two[2] = {};
            if (c < exist) {
                if constexpr (count == 4) {
                    const uint2 both = *reinterpret_cast<const uint2*>(at);
                    two[0] = both.x, two[1] = both.y;
                } else if constexpr (count == 2) {
                    two[0] = *reinterpret_cast<const unsigned*>(at);
                } else {
                    two[0] = at->bits;
                }
            }
#pragma unroll
            for (int i = 0; i < words; ++i) channels[c][i] = two[i];
        }
    }
    // Which of its pixels a lane stores first, so that eight lanes that store together meet each bank once.
    // With `both` its pixels are alternately of two phases, which lie apart.
    template <bool both>
    static __device__ __forceinline__ int first_pixel(int lane) {
        if constexpr (both) return count == 4 ? lane / 4 % 2 * 2 : 0;
        else return count == 1 ? 0 : lane * count / 8 % count;
    }
    // Rotates that one to the front.
    __device__ __forceinline__ void rotate(int first) {
        if constexpr (count == 1) return;
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            const unsigned front = channels[c][0], back = channels[c][words - 1];
            const unsigned low = first & 2 ? back : front, high = first & 2 ? front : back;
            const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
            const unsigned long long other = static_cast<unsigned long long>(low) << 32 | high;
            const int bits = first % 2 * 16;
            channels[c][0] = static_cast<unsigned>(both >> bits);
            channels[c][words - 1] = static_cast<unsigned>((words == 1 ? both : other) >> bits);
        }
    }
    __device__ __forceinline__ uint4 pixel(int i) const {
        unsigned out[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const unsigned a = channels[2 * j][i / 2], b = channels[2 * j + 1][i / 2];
            out[j] = i % 2 == 0 ? (a & 0xffffu) | b << 16 : a >> 16 | (b & 0xffff0000u);
        }
        return make_uint4(out[0], out[1], out[2], out[3]);
    }
};

// What a lane loads of a stage at once: `count` neighbouring pixels of x of `at_once` vectors of channels.
template <class Source>
struct PixelUnit {
    using AxisH = typename Source::AxisH;
    using AxisW = typename Source::AxisW;
    using D = typename Source::D;
    static constexpr int apart = D::d * Source::h * Source::w;
    // Neighbours that are aligned in every row. At a stride of two columns, where taps read both phases of these, a `wide` source's
    // units have pixels of both. NOTE: with few registers that would spill some.
    static constexpr bool few = Source::registers < 100, wide = Source::wide;
    static constexpr bool both = wide && Source::stride_w == 2 && AxisW::phases() == 2 && Source::w % 2 == 0 && !few;
    static constexpr int count = Source::stride_w > 1 && !both ? 1 : Source::w % 4 == 0 ? 4 : Source::w % 2 == 0 ? 2 : 1;
    static constexpr int together = both ? 2 : 1, in_phase = count / together;
    static constexpr int at_once =
        gcd(Source::vectors, few ? (wide && count < 4 && Source::stride_w == 1 ? 2 : 1) : count == 4 ? 2 : 4);
    // Which pixel of a phase of columns the first output reads first, and the least of these where a unit has both.
    static __host__ __device__ constexpr int shift_of(int phase_w) { return AxisW::shift(AxisW::first_tap(phase_w)); }
    static __host__ __device__ constexpr int least_shift() { return shift_of(0) < shift_of(1) ? shift_of(0) : shift_of(1); }
    // Units of a row, and of a phase's pixels at most: these begin and end within a unit, and cut one where a row ends.
    static constexpr int of_row = ceil_div(Source::row, in_phase);
    static __host__ __device__ constexpr int reach() {
        if constexpr (both) return Source::phase_pixels + shift_of(0) + shift_of(1) - 2 * least_shift();
        else return Source::phase_pixels;
    }
    static constexpr int of_phase =
        in_phase == 1 ? reach() : (reach() - 1) / Source::row * of_row + (reach() - 1) % Source::row / in_phase + 3;
    static constexpr int of_vector = Source::phases / together * of_phase, of_stage = of_vector * (Source::vectors / at_once);
    // What a stage takes of a warp's time: of each load the registers that it fills, and as much as eight of them besides.
    static constexpr int work = ceil_div(of_stage, 32) * (8 + at_once * 8 * ChannelVector<count>::words);
    ChannelVector<count> loaded[at_once];
    int first_pixel, column, phase, vector;

    // Unit `unit` of the stage whose phases begin with linear index `first`, from channel `first_c` of the group on. Of volumes
    // each output slice is an image, of the input slice that slice `t` of the filters reads.
    __device__ __forceinline__ void load(const typename Source::T* x, long long batch, int first, int group, int first_c,
                                         int unit, int t = 0) {
        vector = unit / of_vector * at_once, phase = unit % of_vector / of_phase;
        constexpr int columns = AxisW::phases() / together;
        const int phase_h = AxisH::phase_at(phase / columns), phase_w = AxisW::phase_at(phase % columns);
        // NOTE: counted from two images before, as a halo reaches back by less than an image and a row. What taps read before the
        // first image are zeros at the end of the one before, so n needs no test for less than 0.
        const int from = first + 2 * Source::image + AxisH::shift(AxisH::first_tap(phase_h)) * Source::row +
                         (both ? least_shift() : AxisW::shift(AxisW::first_tap(phase_w)));
        const int place = from % Source::row / in_phase + unit % of_phase, row = from / Source::row + place / of_row;
        column = place % of_row * in_phase, first_pixel = row * Source::row + column - from;
        const int n = row / Source::rows - 2, h = row % Source::rows * Source::stride_h + phase_h;
        const int w = column * Source::stride_w + phase_w, c = first_c + vector * 8;
        const bool inside = n < batch && h < Source::h && w < Source::w && unit < of_stage;
        if constexpr (D::volume) {
            const int volume = n / D::z, slice = (n - volume * D::z) * D::stride - D::pad + t * D::dilation;
            const int64 of_slice = static_cast<int64>(slice) * (Source::h * Source::w) + h * Source::w + w;
            load_vectors(x, volume, group, c, of_slice, inside && static_cast<unsigned>(slice) < D::d);
        } else {
            load_vectors(x, n, group, c, h * Source::w + w, inside);
        }
    }
    __device__ __forceinline__ void load_vectors(const typename Source::T* x, int n, int group, int c, int64 pixel, bool inside) {
        const int64 channel = static_cast<int64>(n) * Source::c + group * Source::group_c + c;
        const typename Source::T* const at = x + channel * apart + pixel;
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            const int exist = Source::whole ? 8 : Source::group_c - c - i * 8;
            loaded[i].load(at + static_cast<int64>(i) * 8 * apart, apart, inside ? exist : 0);
        }
    }
    __device__ __forceinline__ void store(unsigned char* stage, int lane) {
        // NOTE: past the last unit `vector` is past the last channels; what belongs to no stage goes to the spare pixel.
        unsigned char* const to = stage + min(vector, Source::vectors - at_once) * Source::pitch * 16;
        const int own = ChannelVector<count>::template first_pixel<both>(lane);
        int places[count];
#pragma unroll
        for (int j = 0; j < count; ++j) {
            const int pixel = (own + j) % count / together;
            int place = first_pixel + pixel, of = phase;
            if constexpr (both) {
                // `own` is even.
                place -= shift_of(j % 2) - least_shift();
                of = phase * 2 + AxisW::index_of(j % 2);
            }
            const bool resident =
                place >= 0 && place < Source::phase_pixels && column + pixel < Source::row && vector < Source::vectors;
            places[j] = resident ? of * Source::phase_pixels + place : Source::spare;
        }
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            loaded[i].rotate(own);
#pragma unroll
            for (int j = 0; j < count; ++j)
                *reinterpret_cast<uint4*>(to + (i * Source::pitch + places[j]) * 16) = loaded[i].pixel(j);
        }
    }
};

// The share of one of `warps` in all stages: rounds of 32 units, which go round the warps and on to the next stage, as many for
// each. NOTE: where a warp has nothing of a stage, it has a unit past the last.
template <class Source, int warps, int stages>
struct UnitWalk {
    static constexpr int rounds = ceil_div(PixelUnit<Source>::of_stage, 32);
    RingPlace<stages> place;
    int first, round;  // the warp's first round in the stage, and the current one

    __device__ __forceinline__ explicit UnitWalk(int warp) : first(warp), round(warp) {}
    __device__ __forceinline__ bool is_last() const { return round + warps >= rounds; }
    // Whether it goes on to the next stage.
    __device__ __forceinline__ bool advance() {
        const bool last = is_last();
        round += warps;
        if (!last) return false;
        first = (first + warps - rounds % warps) % warps;
        round = first;
        place.advance();
        return true;
    }
};

// All that a warp loads, where `walk` goes: while it stores what it loaded, its next loads are under way. load(unit) loads
// where the walk is, pixels_of(stage) is where stages lie.
template <class Source, class Walk, class Rings, class Load, class PixelsOf>
__device__ __forceinline__ void load_units(Walk& walk, const Rings& rings, int lane, const Load& load, const PixelsOf& pixels_of) {
    using Unit = PixelUnit<Source>;
    // Whether there is another unit.
    const auto step = [&](Unit& now, Unit& next) {
        const auto place = walk.place;
        const bool last = walk.is_last();
        walk.advance();
        const bool more = walk.valid();
        if (more) load(next);
        mbarrier_wait_parity(rings.pixels_empty(place.stage), place.parity ^ 1);
        now.store(pixels_of(place.stage), lane);
        if (last) {
            fence_proxy_async();
            __syncwarp();
            mbarrier_arrive_warp(rings.pixels_full(place.stage), lane);
        }
        return more;
    };
    if (!walk.valid()) return;
    Unit even, odd;
    load(even);
    while (step(even, odd) && step(odd, even)) {}
}

}  // namespace leanconv
