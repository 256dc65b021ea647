// What the width of a bank is worth: the special case of the memory-efficient direct convolution (one channel), with the
// number of elements that a thread reads from shared memory at once as a parameter. For a study; no call runs it.
//
// A block walks down a strip of `tile` columns. Each row of the image is stored to shared memory once, a row ahead, and
// threads read windows of s + pixels - 1 elements of it, `unit` at a time. With `kept` a window of r rows stays in
// registers, as in the paper, and a thread reads a row once; without, it reads all r rows again for each row of outputs,
// and shared memory is the bound. With `dot` four 8-bit pixels are one word for arithmetic too.
//
// A warp's access takes a cycle of the load unit whether its lanes read words or bytes of words, so per 32 outputs the
// unit is busy for r * s cycles with pixels = unit = 1 and for r * ceil((s + n - 1) / n) / n with n, without `kept`.
// Explored (H200, fb40235, 8192 x 8192, 3x3 to 7x7): n of a word is 1.6 to 1.8 times as fast as 1 for 16 bits, 1.5 to
// 2.2 for 8, of which the width of the accesses alone is 1.01 to 1.15 and 0.94 to 1.01; with `dot` it is 2.0 to 4.4.
#pragma once

#include <device/element.cuh>
#include <device/index.cuh>
#include <device/ptx/arithmetic.cuh>
#include <device/ptx/memory.cuh>

namespace leanconv {

// `count` adjacent elements that are loaded and stored at once.
template <class T, int count>
struct Unit {
    static constexpr int bytes = sizeof(T) * count;
    static_assert(bytes <= 16 && (bytes & (bytes - 1)) == 0, "one access of 1, 2, 4, 8 or 16 bytes");
    unsigned words[bytes < 4 ? 1 : bytes / 4];

    __device__ __forceinline__ void load(const T* from) {
        if constexpr (bytes == 1) words[0] = *reinterpret_cast<const unsigned char*>(from);
        else if constexpr (bytes == 2) words[0] = *reinterpret_cast<const unsigned short*>(from);
        else if constexpr (bytes == 4) words[0] = *reinterpret_cast<const unsigned*>(from);
        else if constexpr (bytes == 8) {
            const uint2 v = *reinterpret_cast<const uint2*>(from);
            words[0] = v.x, words[1] = v.y;
        } else {
            const uint4 v = *reinterpret_cast<const uint4*>(from);
            words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
        }
    }
    // From shared memory, by one access and no other: the compiler would join neighbours to wider ones.
    __device__ __forceinline__ void read(const T* from) {
        if constexpr (bytes == 1) words[0] = *reinterpret_cast<const volatile unsigned char*>(from);
        else if constexpr (bytes == 2) words[0] = ld_shared_u16(from);
        else if constexpr (bytes == 4) words[0] = ld_shared_u32(from);
        else if constexpr (bytes == 8) ld_shared_v2_u32(words, from);
        else ld_shared_v4_u32(words, from);
    }
    __device__ __forceinline__ void store(T* to) const {
        if constexpr (bytes == 1) *reinterpret_cast<unsigned char*>(to) = words[0];
        else if constexpr (bytes == 2) *reinterpret_cast<unsigned short*>(to) = words[0];
        else if constexpr (bytes == 4) *reinterpret_cast<unsigned*>(to) = words[0];
        else if constexpr (bytes == 8) *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
        else *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (unsigned& word : words) word = 0;
    }
    __device__ __forceinline__ T element(int i) const {
        const unsigned bits = words[i * sizeof(T) / 4] >> i * sizeof(T) % 4 * 8;
        if constexpr (sizeof(T) == 4) return __uint_as_float(bits);
        else if constexpr (sizeof(T) == 2) return {static_cast<unsigned short>(bits)};
        else return static_cast<T>(bits);
    }
    // The unit has been cleared.
    __device__ __forceinline__ void set(int i, T value) {
        unsigned bits;
        if constexpr (sizeof(T) == 4) bits = __float_as_uint(value);
        else if constexpr (sizeof(T) == 2) bits = value.bits;
        else bits = value;
        words[i * sizeof(T) / 4] |= bits << i * sizeof(T) % 4 * 8;
    }
};

// The filter, in registers; with `dot` four taps of a row are a word, behind the last ones zeros.
template <class Problem, bool dot>
struct Taps {
    static constexpr int columns = dot ? ceil_div(Problem::s, 4) : Problem::s;
    typename Problem::sum tap[Problem::r][columns];

    __device__ __forceinline__ explicit Taps(const typename Problem::sum* w) {
#pragma unroll
        for (int r = 0; r < Problem::r; ++r) {
            if constexpr (dot) {
#pragma unroll
                for (int s = 0; s < columns; ++s) tap[r][s] = 0;
#pragma unroll
                for (int s = 0; s < Problem::s; ++s) tap[r][s / 4] |= (w[r * Problem::s + s] & 255) << s % 4 * 8;
            } else {
#pragma unroll
                for (int s = 0; s < columns; ++s) tap[r][s] = w[r * Problem::s + s];
            }
        }
    }
};

// A row of a thread's window, as what its elements are multiplied as.
template <class Problem, class Tuning, bool dot>
struct WindowRow {
    using T = typename Problem::element;
    using Sum = typename Problem::sum;
    static constexpr int units = ceil_div(Problem::s + Tuning::pixels - 1, Tuning::unit);
    Sum value[units * Tuning::unit];

    __device__ __forceinline__ void read(const T* row) {
#pragma unroll
        for (int u = 0; u < units; ++u) {
            Unit<T, Tuning::unit> unit;
            unit.read(row + u * Tuning::unit);
#pragma unroll
            for (int i = 0; i < Tuning::unit; ++i) value[u * Tuning::unit + i] = to_sum(unit.element(i));
        }
    }
    __device__ __forceinline__ void add(Sum (&sum)[Tuning::pixels], const Taps<Problem, dot>& taps, int r) const {
#pragma unroll
        for (int s = 0; s < Problem::s; ++s)
#pragma unroll
            for (int j = 0; j < Tuning::pixels; ++j) sum[j] = multiply_add(taps.tap[r][s], value[j + s], sum[j]);
    }
};

template <class Problem, class Tuning>
struct WindowRow<Problem, Tuning, true> {
    using T = typename Problem::element;
    static constexpr int words = ceil_div(Problem::s + Tuning::pixels - 1, 4);
    static_assert(Tuning::unit == 4 && sizeof(T) == 1, "four integers of 8 bits are a word");
    unsigned word[words];

    __device__ __forceinline__ void read(const T* row) {
#pragma unroll
        for (int u = 0; u < words; ++u) word[u] = ld_shared_u32(row + 4 * u);
    }
    // The four elements from `first` on; those behind the window meet taps of zero.
    __device__ __forceinline__ unsigned four(int first) const {
        const int at = first / 4, shift = first % 4 * 8;
        const unsigned low = at < words ? word[at] : 0, high = at + 1 < words ? word[at + 1] : 0;
        return shift == 0 ? low : low >> shift | high << (32 - shift);
    }
    __device__ __forceinline__ void add(int (&sum)[Tuning::pixels], const Taps<Problem, true>& taps, int r) const {
#pragma unroll
        for (int s = 0; s < ceil_div(Problem::s, 4); ++s)
#pragma unroll
            for (int j = 0; j < Tuning::pixels; ++j) sum[j] = dp4a_u32_s32(four(j + 4 * s), taps.tap[r][s], sum[j]);
    }
};

// A result as an element: floats are rounded; integers have eight bits behind the point, and saturate.
template <class T>
__device__ __forceinline__ T from_total(float sum) { return from_float<T>(sum); }
template <class T>
__device__ __forceinline__ T from_total(int sum) {
    const int whole = sum >> 8;
    return static_cast<T>(whole < 0 ? 0 : whole > 255 ? 255 : whole);
}

// y[i,j] = sum of w[u,v] * x[i + u, j + v], where what lies below the image or right of it is zero.
//
// The threads of the last warp bring the pixels right of the strip, and compute nothing. A row is in registers for as
// many rows of outputs as the loop is unrolled for before it is stored to shared memory: one row alone would leave the
// time to the latency of memory.
template <class Problem, class Tuning>
__device__ __forceinline__ void bank_width(const typename Problem::element* __restrict__ x,
                                           const typename Problem::sum* __restrict__ w,
                                           typename Problem::element* __restrict__ y, int height, int width) {
    using T = typename Problem::element;
    using Sum = typename Problem::sum;
    using Piece = Unit<T, Tuning::pixels>;
    constexpr int pixels = Tuning::pixels, threads = Tuning::tile / pixels;
    constexpr int rows = Problem::r, pitch = Tuning::tile + 32 * pixels;
    constexpr int halo = ceil_div(Problem::s - 1, pixels);   // pieces right of the strip
    constexpr int period = Tuning::kept ? rows : rows + 1;   // of what is unrolled
    static_assert(threads % 32 == 0 && halo <= 32, "whole warps compute, and one brings the halo");
    static_assert(Problem::s + pixels - 1 + Tuning::unit <= 32 * pixels, "windows end within a row of shared memory");
    static_assert(pixels % Tuning::unit == 0, "a thread's window begins with a unit");

    T* const shared = reinterpret_cast<T*>(shared_memory());
    const int strips = width / Tuning::tile, at = threadIdx.x * pixels;
    const int first_column = static_cast<int>(blockIdx.x) % strips * Tuning::tile;
    const int first_row = static_cast<int>(blockIdx.x) / strips * Tuning::rows;
    const int outputs = height - first_row < Tuning::rows ? height - first_row : Tuning::rows;
    const int all_rows = outputs + rows - 1;
    const bool computes = threadIdx.x < threads;
    const bool brings = threadIdx.x < threads + halo && first_column + at < width;
    const Taps<Problem, Tuning::dot> taps(w);

    Piece ahead[period];
    const auto fetch = [&](Piece& piece, int row) {
        piece.clear();
        if (brings && row < all_rows && first_row + row < height)
            piece.load(x + static_cast<int64>(first_row + row) * width + first_column + at);
    };
    const auto slot_of_row = [](int row, int turn) { return Tuning::kept ? row % 2 : turn % (rows + 1); };

    WindowRow<Problem, Tuning, Tuning::dot> window[Tuning::kept ? rows : 1];
#pragma unroll
    for (int row = 0; row < period; ++row) fetch(ahead[row], row);
    ahead[0].store(shared + at);
    fetch(ahead[0], period);
#pragma unroll 1
    for (int first = 0; first < all_rows; first += period) {
#pragma unroll
        for (int turn = 0; turn < period; ++turn) {
            const int row = first + turn;
            if (row >= all_rows) break;
            __syncthreads();  // this row is there for all, and the one whose place the next one takes has been read
            ahead[(turn + 1) % period].store(shared + slot_of_row(row + 1, turn + 1) * pitch + at);
            fetch(ahead[(turn + 1) % period], row + 1 + period);
            if (!computes) continue;
            if constexpr (Tuning::kept) window[turn].read(shared + slot_of_row(row, turn) * pitch + at);
            if (row < rows - 1) continue;
            Sum sum[pixels] = {};
#pragma unroll
            for (int r = 0; r < rows; ++r) {
                if constexpr (!Tuning::kept) window[0].read(shared + slot_of_row(0, turn + 2 + r) * pitch + at);
                window[Tuning::kept ? (turn + 1 + r) % rows : 0].add(sum, taps, r);
            }
            Piece result;
            result.clear();
#pragma unroll
            for (int j = 0; j < pixels; ++j) result.set(j, from_total<T>(sum[j]));
            result.store(y + static_cast<int64>(first_row + row - rows + 1) * width + first_column + at);
        }
    }
}

}  // namespace leanconv
