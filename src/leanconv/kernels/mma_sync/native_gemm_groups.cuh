// native_gemm_groups: grouped convolution on tensor cores by mma.sync; float16 or bfloat16, sums in float32. From sm_80 on.
//
//   y[m, k] = sum over r, s, c of x[m + (r, s), c] * w[k, r, s, c]        c: the channels of k's group
//
// Requires   NHWC or NCHW; numbers of channels and filters that are multiples of 8, those of a group of 4; a filter that registers
//            hold.
// Layouts    In NCHW eight channels of a pixel are loaded one by one on their way to shared memory, and results transposed eight
//            by eight on their way out (movmatrix); between these all is as in NHWC.
// Numerics   Products are exact. Sums stay in the tensor core over the whole reduction, of some hundreds, as in
//            native_gemm_16bit. Where eight filters span groups, others' channels meet zeros: a sum that is not finite is taken
//            again on FP32 cores, from its own group's channels alone.
// CTA tile   rows x columns outputs of an image x `filters`: some groups, or a part of one. The pixels that they read lie in
//            shared memory, each once (group_pixels.cuh).
// Product    16 pixels x 8 filters x 16 reduction elements. The reduction of eight filters is a list of units of 8 channels,
//            all of the first tap, then of the next; two units, of one tap or of two, are one mma. So groups of 8 and more
//            multiply no zero but the last half mma of an odd list; groups of 4 are eight filters x 8 channels, half of them
//            zeros.
// Roles      all threads copy. A warp has `blocks` times eight filters, and every `warps_m`-th 16 outputs; its fragments of
//            filters are in registers as long as the CTA lives.
// Pipelines  `stages` tiles of pixels, cp.async groups and two __syncthreads a tile; several CTAs a multiprocessor.
// Registers  2 * blocks * steps of filters, 4 * blocks sums, 4 of pixels.
// Work       an mma of 4096 flops for each ldmatrix, or `blocks` where these share a group. ldmatrix takes 4 cycles of shared
//            memory: 16 pixels x 8 filters of groups of 4 and 8 with 3 x 3 taps take 20, their copies and stores some 6; memory
//            takes 32 for 512 bytes (H200). So they are bound by memory.
#pragma once

#include <device/epilogue.cuh>
#include <device/index.cuh>
#include <device/ptx/arithmetic.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/mma.cuh>
#include <kernels/mma_sync/group_pixels.cuh>

namespace leanconv {

// One weight, and two of neighbouring channels as a register of operand B holds them. `c` counts in the group. The filters of
// the input's gradient are those of the layer with their channels and filters exchanged and their taps reversed: they are read
// where they lie.
template <class Problem>
struct GroupFilters {
    using T = typename Problem::element;
    const T* w;

    __device__ __forceinline__ T weight(int k, int tap, int c) const {
        if constexpr (Problem::mirrored) {
            const int group = k / Problem::group_k, row = Problem::last_row - tap / Problem::s * Problem::apart_h;
            const int column = Problem::last_column - tap % Problem::s * Problem::apart_w;
            return w[at<Problem::layer_r * Problem::layer_s, Problem::group_k>(
                group * Problem::group_c + c, row * Problem::layer_s + column, k - group * Problem::group_k)];
        } else {
            return w[at<Problem::r * Problem::s, Problem::group_c>(k, tap, c)];
        }
    }
    __device__ __forceinline__ unsigned pair(int k, int tap, int c) const {
        if constexpr (Problem::mirrored || !Problem::nhwc)
            return weight(k, tap, c).bits | static_cast<unsigned>(weight(k, tap, c + 1).bits) << 16;
        else return *reinterpret_cast<const unsigned*>(w + at<Problem::r * Problem::s, Problem::group_c>(k, tap, c));
    }
    // Where a weight lies, among filters of so many taps and channels.
    template <int taps, int channels>
    static __device__ __forceinline__ int64 at(int k, int tap, int c) {
        return static_cast<int64>(k) * (taps * channels) + (Problem::nhwc ? tap * channels + c : c * taps + tap);
    }
};

// One warp: its filters, and the products of 16 outputs at a time.
template <class Problem, class Tuning>
struct GroupWarp {
    using T = typename Problem::element;
    using Tile = GroupTile<Problem, Tuning>;
    using Pixels = GroupPixels<Problem, Tuning>;
    using Reduction = GroupReduction<Problem, Tuning>;
    static constexpr int blocks = Tuning::blocks, warps_k = Tile::blocks / blocks, warps_m = Tuning::threads / 32 / warps_k;
    static_assert(Tile::blocks % blocks == 0 && warps_m * warps_k * 32 == Tuning::threads, "each warp has a share");
    static constexpr int tiles_m = ceil_div(Tile::outputs, 16);

    int lane, warp_m, block, first_k, first_c;
    unsigned filters[blocks][Reduction::steps][2];
    Term<Problem> terms[blocks][2];

    __device__ __forceinline__ GroupWarp(const T* w, Bias<Problem> bias, int first_filter)
        : lane(threadIdx.x % 32), warp_m(threadIdx.x / 32 / warps_k), block(threadIdx.x / 32 % warps_k * blocks),
          first_k(first_filter + block * 8), first_c(Tile::first_channel(first_filter)) {
        const GroupFilters<Problem> from{w};
#pragma unroll
        for (int j = 0; j < blocks; ++j) {
            const int k = first_k + 8 * j + lane / 4, group = k / Problem::group_k;
            const int channel = first_c + Reduction::first_unit(block + j) * unit_channels - group * Problem::group_c;
#pragma unroll
            for (int i = 0; i < 2 * Reduction::steps; ++i) {
                const int c = channel + i % Reduction::units * unit_channels + lane % 4 * 2;
                bool exists = i < Reduction::count && k < Problem::k;
                if constexpr (Reduction::mixed) exists = exists && c >= 0 && c < Problem::group_c;
                filters[j][i / 2][i % 2] = exists ? from.pair(k, i / Reduction::units, c) : 0;
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int filter = first_k + 8 * j + lane % 4 * 2 + i;
                terms[j][i] = term_of<Problem>(bias, filter, filter < Problem::k);
            }
        }
    }

    // Sums of 16 outputs, of which this lane's row of ldmatrix is the one at `pixel`.
    __device__ __forceinline__ void sum(float (&sums)[blocks][4], const unsigned char* pixel) const {
#pragma unroll
        for (int i = 0; i < Reduction::steps; ++i) {
            const int first = Pixels::tap(2 * i / Reduction::units) + 2 * i % Reduction::units * 16;
            const int number = 2 * i + 1, second = Pixels::tap(number / Reduction::units) + number % Reduction::units * 16;
            unsigned a[Reduction::reads][4];
#pragma unroll
            for (int j = 0; j < Reduction::reads; ++j) {
                const unsigned char* const from = pixel + Reduction::first_unit(block + j) * 16;
                if (number < Reduction::count) {
                    ldmatrix(a[j], from + first + lane / 16 * (second - first));
                } else {
                    unsigned half[2];
                    ldmatrix(half, from + first);
                    a[j][0] = half[0], a[j][1] = half[1], a[j][2] = 0, a[j][3] = 0;
                }
            }
#pragma unroll
            for (int j = 0; j < blocks; ++j) multiply(T{}, sums[j], a[Reduction::shared ? 0 : j], filters[j][i]);
        }
    }

    // A sum of the group's own products, without the zeros that the tensor cores multiplied with.
    __device__ __forceinline__ float own_sum(const unsigned char* pixel, const T* w, int k) const {
        float sum = 0;
        if (k >= Problem::k) return sum;
        const T* const from = reinterpret_cast<const T*>(pixel) + k / Problem::group_k * Problem::group_c - first_c;
        for (int tap = 0; tap < Problem::r * Problem::s; ++tap)
            for (int c = 0; c < Problem::group_c; ++c)
                sum = fmaf(to_float(from[Pixels::tap(tap) / 2 + c]), to_float(GroupFilters<Problem>{w}.weight(k, tap, c)), sum);
        return sum;
    }

    // An output of a tile: whether it exists, and where it lies in the first filter of NCHW, or which pixel it is of NHWC.
    struct Output {
        bool exists;
        Offset<Problem> at;
        __device__ __forceinline__ Output(const Tile& tile, int number) {
            const int p = tile.p + number / Tile::columns, q = tile.q + number % Tile::columns;
            exists = number < Tile::outputs && p < Problem::p && q < Problem::q;
            const int row = Problem::first_p + p * Problem::step_p, column = Problem::first_q + q * Problem::step_q;
            at = static_cast<Offset<Problem>>(row) * Problem::out_w + column;
        }
    };

    // The results of two neighbouring filters of each block, rounded, of the output `half` 8 further.
    __device__ __forceinline__ void finished(unsigned (&words)[blocks], const float (&sums)[blocks][4], int half,
                                             Bias<Problem> bias, const T* image, const Output& output) const {
        constexpr int apart = Problem::nhwc ? 1 : Problem::out_h * Problem::out_w;
        const T* const at = image + output.at * (Problem::nhwc ? Problem::k : 1);
#pragma unroll
        for (int j = 0; j < blocks; ++j) {
            const int first = first_k + 8 * j + lane % 4 * 2;
            const Held<Problem, Problem::nhwc && Problem::k % 2 == 0, 2, T> both(
                bias, at + static_cast<Offset<Problem>>(first) * apart, output.exists && first < Problem::k);
            float v[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int k = first + i;
                const T* const place = at + static_cast<Offset<Problem>>(k) * apart;
                const float held = both.value(i, place, output.exists && k < Problem::k);
                v[i] = finish<Problem>(sums[j][2 * half + i], terms[j][i], held);
            }
            words[j] = rounded_pair(T{}, v);
        }
    }

    // Two lanes exchange halves of two blocks: each stores four neighbouring filters of one, and four lanes a sector.
    __device__ __forceinline__ void store_filters(const unsigned (&words)[blocks], T* to, bool exists) const {
        const int t = lane % 4;
        const bool odd = t % 2;
#pragma unroll
        for (int j = 0; j + 1 < blocks; j += 2) {
            const unsigned other = __shfl_xor_sync(0xffffffffu, odd ? words[j] : words[j + 1], 1);
            const int k = (j + t % 2) * 8 + t / 2 * 4;
            // NOTE: an instruction of its own, because the compiler split an ordinary store into two branches of two.
            const unsigned low = odd ? other : words[j], high = odd ? words[j + 1] : other;
            if (exists && first_k + k < Problem::k)
                st_global_v2(reinterpret_cast<float*>(to + k), __uint_as_float(low), __uint_as_float(high));
        }
        if constexpr (blocks % 2 == 1) {
            const int k = (blocks - 1) * 8 + 2 * t;
            if (exists && first_k + k < Problem::k) *reinterpret_cast<unsigned*>(to + k) = words[blocks - 1];
        }
    }

    // NCHW: the lane gets two neighbouring outputs of one filter of each block instead.
    __device__ __forceinline__ void store_outputs(const unsigned (&words)[blocks], T* image, const Tile& tile, int number) const {
        constexpr int pixels = Problem::out_h * Problem::out_w;
        constexpr bool pairs = Problem::step_q == 1 && (Problem::first_q | Problem::out_w | Problem::q | Tile::columns) % 2 == 0;
        const Output first(tile, number + lane % 4 * 2), second(tile, number + lane % 4 * 2 + 1);
#pragma unroll
        for (int j = 0; j < blocks; ++j) {
            const unsigned word = movmatrix_trans(words[j]);
            const int k = first_k + 8 * j + lane / 4;
            if (k >= Problem::k) continue;
            T* const to = image + static_cast<Offset<Problem>>(k) * pixels;
            if constexpr (pairs) {
                if (first.exists) *reinterpret_cast<unsigned*>(to + first.at) = word;
            } else {
                if (first.exists) to[first.at] = T{static_cast<unsigned short>(word)};
                if (second.exists) to[second.at] = T{static_cast<unsigned short>(word >> 16)};
            }
        }
    }

    // 16 outputs from `number` on.
    __device__ __forceinline__ void store(const float (&sums)[blocks][4], Bias<Problem> bias, T* y, const Tile& tile,
                                          int number) const {
        T* const image = y + static_cast<int64>(tile.n) * (static_cast<int64>(Problem::out_h) * Problem::out_w * Problem::k);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Output output(tile, number + half * 8 + lane / 4);
            unsigned words[blocks];
            finished(words, sums, half, bias, image, output);
            if constexpr (Problem::nhwc) store_filters(words, image + output.at * Problem::k + first_k, output.exists);
            else store_outputs(words, image, tile, number + half * 8);
        }
    }

    // All of the warp's outputs of a tile, whose pixels lie at `shared`.
    __device__ __forceinline__ void compute(const unsigned char* shared, const T* w, Bias<Problem> bias, T* y,
                                            const Tile& tile) const {
        for (int m = warp_m; m < tiles_m; m += warps_m) {
            float sums[blocks][4] = {};
            // NOTE: past the end outputs repeat the last one, and are not stored.
            sum(sums, shared + Pixels::place(min(m * 16 + lane % 16, Tile::outputs - 1)));
            if constexpr (Reduction::mixed) {
                float zero = 0;
#pragma unroll
                for (int i = 0; i < 4 * blocks; ++i) zero = fmaf(0.0f, sums[i / 4][i % 4], zero);
                if (zero != 0.0f) {
#pragma unroll 1
                    for (int half = 0; half < 2; ++half) {
                        const unsigned char* const pixel =
                            shared + Pixels::place(min(m * 16 + half * 8 + lane / 4, Tile::outputs - 1));
#pragma unroll
                        for (int i = 0; i < 2 * blocks; ++i) {
                            const float again = own_sum(pixel, w, first_k + i / 2 * 8 + lane % 4 * 2 + i % 2);
                            (half ? sums[i / 2][2 + i % 2] : sums[i / 2][i % 2]) = again;
                        }
                    }
                }
            }
            store(sums, bias, y, tile, m * 16);
        }
    }
};

template <class Problem, class Tuning>
__device__ __forceinline__ void native_gemm_groups(const typename Problem::element* __restrict__ x,
                                                   const typename Problem::element* __restrict__ w,
                                                   BiasIn<Problem> bias,
                                                   typename Problem::result* __restrict__ y, long long batch) {
    using Tile = GroupTile<Problem, Tuning>;
    using Pixels = GroupPixels<Problem, Tuning>;
    unsigned char* const shared = shared_memory();
    const int first_filter = static_cast<int>(blockIdx.x % Tile::filter_tiles) * Tile::filters;
    const int first_channel = Tile::first_channel(first_filter);
    const Offset<Problem> count = Tile::count(batch), step = gridDim.x / Tile::filter_tiles;
    Offset<Problem> number = blockIdx.x / Tile::filter_tiles;
    Pixels::copy(shared, x, Tile(number), first_channel);
    cp_async_commit_group();
    const GroupWarp<Problem, Tuning> warp(w, bias, first_filter);
    int stage = 0;
    for (; number < count; number += step) {
        const bool more = number + step < count;
        if constexpr (Tuning::stages == 2) {
            if (more) Pixels::copy(shared + (stage ^ 1) * Pixels::bytes, x, Tile(number + step), first_channel);
            cp_async_commit_group();
        }
        cp_async_wait_group<Tuning::stages - 1>();
        __syncthreads();
        warp.compute(shared + stage * Pixels::bytes, w, bias, y, Tile(number));
        if (!more) break;
        __syncthreads();
        if constexpr (Tuning::stages == 1) {
            Pixels::copy(shared, x, Tile(number + step), first_channel);
            cp_async_commit_group();
        } else {
            stage ^= 1;
        }
    }
}

}  // namespace leanconv
