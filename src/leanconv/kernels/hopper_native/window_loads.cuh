// Pixels of NCHW on their way to shared memory: loaded, turned around in registers, and stored as lines of eight channels, 16 bytes.
//
// What is loaded is a `Source`: a tensor's images of h x w pixels and c channels, group_c of each group, and how its pixels are
// numbered (pixel_windows.cuh): `lines` of each of `planes` make a window, whose eights of channels lie `pitch` lines apart.
#pragma once

#include <device/index.cuh>
#include <kernels/hopper_native/pixel_windows.cuh>
#include <device/ptx/bulk_copy.cuh>
#include <device/ptx/mbarrier.cuh>
#include <device/pipeline/rings.cuh>

namespace leanconv {

// What a source says of x.
template <class Problem>
struct InputTensor {
    using T = typename Problem::element;
    static constexpr int h = Problem::h, w = Problem::w, c = Problem::c, group_c = Problem::group_c;
    static constexpr int stride_h = Problem::stride_h, stride_w = Problem::stride_w;
};

// `count` neighbouring pixels of eight channels, and the eight channels of each.
template <int count>
struct EightChannels {
    static constexpr int words = count == 4 ? 2 : 1;
    unsigned four[8][words];

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
            for (int i = 0; i < words; ++i) four[c][i] = two[i];
        }
    }
    // Which of its pixels a lane stores first: eight lanes that store together meet each bank once.
    static __device__ __forceinline__ int first_pixel(int lane) { return count == 1 ? 0 : lane * count / 8 % count; }
    // Brings that one to the front.
    __device__ __forceinline__ void turn(int first) {
        if constexpr (count == 1) return;
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            const unsigned front = four[c][0], back = four[c][words - 1];
            const unsigned low = first & 2 ? back : front, high = first & 2 ? front : back;
            const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
            const unsigned long long other = static_cast<unsigned long long>(low) << 32 | high;
            const int bits = first % 2 * 16;
            four[c][0] = static_cast<unsigned>(both >> bits);
            four[c][words - 1] = static_cast<unsigned>((words == 1 ? both : other) >> bits);
        }
    }
    __device__ __forceinline__ uint4 pixel(int i) const {
        unsigned out[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const unsigned a = four[2 * j][i / 2], b = four[2 * j + 1][i / 2];
            out[j] = i % 2 == 0 ? (a & 0xffffu) | b << 16 : a >> 16 | (b & 0xffff0000u);
        }
        return make_uint4(out[0], out[1], out[2], out[3]);
    }
};

// What a lane loads at once of a window: a unit of neighbouring pixels, `at_once` times eight channels.
template <class Source>
struct WindowUnit {
    using Down = typename Source::Down;
    using Right = typename Source::Right;
    static constexpr int apart = Source::h * Source::w;
    // Neighbours that lie aligned in every row.
    static constexpr int count = Source::stride_w > 1 ? 1 : Source::w % 4 == 0 ? 4 : Source::w % 2 == 0 ? 2 : 1;
    static constexpr int at_once = gcd(Source::eights, Source::registers < 100 ? 1 : count == 4 ? 2 : 4);
    // Units of a row, and of the lines of a plane at most: these begin and end within a unit, and cut one where a row ends.
    static constexpr int of_row = ceil_div(Source::row, count);
    static constexpr int of_lines = count == 1 ? Source::lines
                                               : (Source::lines - 1) / Source::row * of_row +
                                                     (Source::lines - 1) % Source::row / count + 3;
    static constexpr int of_eights = Source::planes * of_lines, of_window = of_eights * (Source::eights / at_once);
    // What a window takes of a warp's time: of each load the registers that it fills, and as much as eight of them beside.
    static constexpr int work = ceil_div(of_window, 32) * (8 + at_once * 8 * EightChannels<count>::words);
    EightChannels<count> channels[at_once];
    int line, column, plane, eight;

    // Unit `unit` of the window whose lines begin with the pixel of number `first`, from channel `first_c` of the group on.
    __device__ __forceinline__ void load(const typename Source::T* x, long long batch, int first, int group, int first_c,
                                         int unit) {
        eight = unit / of_eights * at_once, plane = unit % of_eights / of_lines;
        const int down = Down::numbered(plane / Right::planes()), right = Right::numbered(plane % Right::planes());
        // NOTE: counted from two images before, as windows reach back by less than an image and a row. What they see before
        // the first image are zeros at the end of the one before, so n needs no test for less than 0.
        const int from = first + 2 * Source::image + Down::moved(Down::first_tap(down)) * Source::row +
                         Right::moved(Right::first_tap(right));
        const int place = from % Source::row / count + unit % of_lines, row = from / Source::row + place / of_row;
        column = place % of_row * count, line = row * Source::row + column - from;
        const int n = row / Source::rows - 2, h = row % Source::rows * Source::stride_h + down;
        const int w = column * Source::stride_w + right, c = first_c + eight * 8;
        const bool inside = n < batch && h < Source::h && w < Source::w && unit < of_window;
        const int64 channel = static_cast<int64>(n) * Source::c + group * Source::group_c + c;
        const typename Source::T* const at = x + channel * apart + h * Source::w + w;
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            const int exist = Source::whole ? 8 : Source::group_c - c - i * 8;
            channels[i].load(at + static_cast<int64>(i) * 8 * apart, apart, inside ? exist : 0);
        }
    }
    __device__ __forceinline__ void store(unsigned char* window, int lane) {
        // NOTE: past the last unit `eight` is past the last channels: what is of no window goes to a line that no tap sees.
        unsigned char* const to = window + min(eight, Source::eights - at_once) * Source::pitch * 16;
        const int own = EightChannels<count>::first_pixel(lane);
        int lines[count];
#pragma unroll
        for (int j = 0; j < count; ++j) {
            const int pixel = (own + j) % count, place = line + pixel;
            const bool seen = place >= 0 && place < Source::lines && column + pixel < Source::row && eight < Source::eights;
            lines[j] = seen ? plane * Source::lines + place : Source::all_lines;
        }
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            channels[i].turn(own);
#pragma unroll
            for (int j = 0; j < count; ++j)
                *reinterpret_cast<uint4*>(to + (i * Source::pitch + lines[j]) * 16) = channels[i].pixel(j);
        }
    }
};

// The share of one of `warps` in all windows: units by 32, which go round the warps and on to the next window, as many for
// each. NOTE: where a warp has nothing of a window, it has a unit past the last.
template <class Source, int warps, int windows>
struct UnitWalk {
    static constexpr int of_window = ceil_div(WindowUnit<Source>::of_window, 32);
    RingPlace<windows> place;
    int first, unit;  // the warp's first units in the window, and those that it is at, by 32

    __device__ __forceinline__ explicit UnitWalk(int warp) : first(warp), unit(warp) {}
    __device__ __forceinline__ bool is_last() const { return unit + warps >= of_window; }
    // Whether it goes on to the next window.
    __device__ __forceinline__ bool advance() {
        const bool last = is_last();
        unit += warps;
        if (!last) return false;
        first = (first + warps - of_window % warps) % warps;
        unit = first;
        place.advance();
        return true;
    }
};

// All that a warp loads, where `walk` goes: while it stores what it loaded, its next loads are under way. load(unit) loads
// where the walk is, window(stage) is where windows lie.
template <class Source, class Walk, class Rings, class Load, class Window>
__device__ __forceinline__ void load_units(Walk& walk, const Rings& rings, int lane, const Load& load, const Window& window) {
    using Unit = WindowUnit<Source>;
    // Whether there is another unit.
    const auto step = [&](Unit& now, Unit& next) {
        const auto place = walk.place;
        const bool last = walk.is_last();
        walk.advance();
        const bool more = walk.valid();
        if (more) load(next);
        mbarrier_wait_parity(rings.window_free(place.stage), place.parity ^ 1);
        now.store(window(place.stage), lane);
        if (last) {
            fence_proxy_async();
            __syncwarp();
            if (lane == 0) mbarrier_arrive(rings.window_full(place.stage));
        }
        return more;
    };
    if (!walk.valid()) return;
    Unit even, odd;
    load(even);
    while (step(even, odd) && step(odd, even)) {}
}

}  // namespace leanconv
