// native_gemm_groups: grouped convolution on tensor cores by mma.sync; float16 or bfloat16 from sm_80 on, float32 rounded to TF32
// from sm_90 on; sums in float32.
//
//   y[m, k] = sum over r, s, c of x[m + (r, s), c] * w[k, r, s, c]        c: the channels of k's group
//
// Requires   NHWC or NCHW; numbers of channels and filters that are multiples of 8 (of float32 of 4), those of a group of 4; a
//            filter that registers hold.
// Layouts    In NCHW eight channels of a pixel are loaded one by one on their way to shared memory, and results transposed eight
//            by eight on their way out (movmatrix); between these all is as in NHWC.
// Numerics   Products are exact. Sums stay in the tensor core over the whole reduction, of some hundreds, as in
//            native_gemm_16bit. Where eight filters span groups, others' channels meet zeros: a sum that is not finite is taken
//            again on FP32 cores, from its own group's channels alone. Float32 is rounded to the nearest TF32: filters when they
//            are loaded, pixels after each ldmatrix.
// CTA tile   rows x columns outputs of an image x `filters`: some groups, or a part of one. The pixels that they read lie in
//            shared memory, each once (group_pixels.cuh).
// Product    16 pixels x 8 filters x 16 reduction elements. The reduction of eight filters is a list of units of 8 channels,
//            all of the first tap, then of the next; two units, of one tap or of two, are one mma. So groups of
//            multiples of 8 multiply no zero but the last half mma of an odd list; those of 4 are eight filters x 8 channels, half
//            of them zeros, and those of 12, 20 and 28 multiply some of their neighbours' channels by zeros. Of TF32 a unit has 4 channels, and two units are an mma of 8 elements.
// Roles      all threads copy. A warp has `blocks` times eight filters, and every `warps_m`-th 16 outputs; its fragments of
//            filters are in registers as long as the CTA lives.
// Pipelines  two tiles of pixels: the next is copied (cp.async) while this one is computed; two __syncthreads a tile; several
//            CTAs a multiprocessor.
// Registers  2 * blocks * steps of filters, 4 * blocks sums, 4 of pixels.
// Work       an mma of 4096 flops for each ldmatrix, or `blocks` where these share a group. ldmatrix takes 4 cycles of shared
//            memory: 16 pixels x 8 filters of groups of 4 and 8 with 3 x 3 taps take 20, their copies and stores some 6; memory
//            takes 32 for 512 bytes (H200). So memory bounds them at best.
//            TF32, counted: an mma of 2048 flops for each ldmatrix, at half the rate, and twice the bytes. The
//            same outputs take 36 cycles of ldmatrix, about 12 of copies and stores, and 64 of memory. The four roundings after
//            an ldmatrix, of 2 cycles each in a partition's conversion unit, take at most as long as the mma.
// Explored   H200, 3859a523: 128 channels of 56 x 56, 32 images, groups of 4: 25.9 us, twice what memory takes for their bytes; the
//            time of a tile's bytes and that of its products add up. TF32, 13330f93: 45.3 us.
#pragma once

#include <device/epilogue.cuh>
#include <device/index.cuh>
#include <device/ptx/arithmetic.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/mma.cuh>
#include <device/ptx/movmatrix.cuh>
#include <device/ptx/sync.cuh>
#include <kernels/mma_sync/group_pixels.cuh>

namespace leanconv {

// One weight, and what a register of operand B holds: two of neighbouring channels, or one rounded to TF32. k and c are those of
// what is written and read, c counts in the group. Filters are read where they lie, those of a gradient with channels and filters
// exchanged.
template <class Problem>
struct GroupFilters {
    using T = typename Problem::element;
    using W = GroupWindows<Problem>;
    const T* w;

    __device__ __forceinline__ T weight(int k, int tap, int c) const {
        if constexpr (W::gradient) {
            const int group = k / W::group_k;
            return w[at(group * W::group_c + c, tap, k - group * W::group_k)];
        } else {
            return w[at(k, tap, c)];
        }
    }
    __device__ __forceinline__ unsigned fragment(int k, int tap, int c) const {
        if constexpr (sizeof(T) == 4) return cvt_rn_tf32_f32(weight(k, tap, c));
        else if constexpr (W::gradient || !Problem::nhwc)
            return weight(k, tap, c).bits | static_cast<unsigned>(weight(k, tap, c + 1).bits) << 16;
        else return *reinterpret_cast<const unsigned*>(w + at(k, tap, c));
    }
    static __device__ __forceinline__ int64 at(int filter, int tap, int c) {
        constexpr int taps = Problem::r * Problem::s, channels = Problem::group_c;
        return static_cast<int64>(filter) * (taps * channels) + (Problem::nhwc ? tap * channels + c : c * taps + tap);
    }
};

// The reduction of a phase. Its fragments come behind those of the phases before.
template <class Problem, class Tuning, int number>
struct GroupPhase {
    using W = GroupWindows<Problem>;
    using Rows = typename W::Rows;
    using Columns = typename W::Columns;
    static constexpr int units = GroupUnits<Problem, Tuning>::units;
    static constexpr int row = number / Columns::phases, column = number % Columns::phases;
    static constexpr int count = Rows::count(row) * Columns::count(column) * units, steps = (count + 1) / 2;
    static constexpr int first_step = GroupPhase<Problem, Tuning, number - 1>::end, end = first_step + steps;

    // Of the i-th unit: where it lies from a window's place, and which tap of the filter it meets.
    static __host__ __device__ constexpr int place(int i) {
        return GroupPixels<Problem, Tuning>::tap(row, column, i / units) + i % units * 16;
    }
    static __host__ __device__ constexpr int tap(int i) {
        const int of_row = Columns::count(column), at = i / units;
        return Rows::tap(row, at / of_row) * Problem::s + Columns::tap(column, at % of_row);
    }
};
template <class Problem, class Tuning>
struct GroupPhase<Problem, Tuning, -1> {
    static constexpr int end = 0;
};

// One warp: its filters, and the products of 16 windows at a time.
template <class Problem, class Tuning>
struct GroupWarp {
    using T = typename Problem::element;
    using W = GroupWindows<Problem>;
    using Tile = GroupTile<Problem, Tuning>;
    using Pixels = GroupPixels<Problem, Tuning>;
    using Units = GroupUnits<Problem, Tuning>;
    template <int phase> using Phase = GroupPhase<Problem, Tuning, phase>;
    using Pair = typename PairOf<T>::type;
    static constexpr int blocks = Tuning::blocks, warps_k = Tile::blocks / blocks, warps_m = Tuning::threads / 32 / warps_k;
    static constexpr int of_unit = unit_channels<Problem>, of_register = of_unit / 4;
    static_assert(Tile::blocks % blocks == 0 && warps_m * warps_k * 32 == Tuning::threads, "each warp has a share");

    int lane, warp_m, block, first_k, first_c;
    unsigned filters[blocks][Phase<W::phases - 1>::end][2];
    Term<Problem> terms[blocks][2];

    __device__ __forceinline__ GroupWarp(const T* w, Bias<Problem> bias, int first_filter)
        // NOTE: the zero keeps the compiler from asking for the thread's number again for each m tile.
        : lane(threadIdx.x % 32 + zero_after(threadIdx.x)), warp_m(threadIdx.x / 32 / warps_k),
          block(threadIdx.x / 32 % warps_k * blocks), first_k(first_filter + block * 8),
          first_c(Tile::first_channel(first_filter)) {
        load_filters<0>(GroupFilters<Problem>{w});
#pragma unroll
        for (int i = 0; i < 2 * blocks; ++i) {
            const int k = first_k + i / 2 * 8 + lane % 4 * 2 + i % 2;
            terms[i / 2][i % 2] = term_of<Problem>(bias, k, k < W::k);
        }
    }

    template <int phase>
    __device__ __forceinline__ void load_filters(const GroupFilters<Problem>& from) {
#pragma unroll
        for (int j = 0; j < blocks; ++j) {
            const int k = first_k + 8 * j + lane / 4;
            const int channel = first_c + Units::first_unit(block + j) * of_unit - k / W::group_k * W::group_c;
#pragma unroll
            for (int i = 0; i < 2 * Phase<phase>::steps; ++i) {
                const int c = channel + i % Units::units * of_unit + lane % 4 * of_register;
                bool exists = i < Phase<phase>::count && k < W::k;
                if constexpr (Units::mixed) exists = exists && c >= 0 && c < W::group_c;
                filters[j][Phase<phase>::first_step + i / 2][i % 2] = exists ? from.fragment(k, Phase<phase>::tap(i), c) : 0;
            }
        }
        if constexpr (phase + 1 < W::phases) load_filters<phase + 1>(from);
    }

    // Sums of 16 windows, of which this lane's row of ldmatrix is the one at `pixel`.
    template <int phase>
    __device__ __forceinline__ void sum(float (&sums)[blocks][4], const unsigned char* pixel) const {
        using P = Phase<phase>;
#pragma unroll
        for (int i = 0; i < P::steps; ++i) {
            unsigned a[Units::reads][4];
#pragma unroll
            for (int j = 0; j < Units::reads; ++j) {
                const unsigned char* const from = pixel + Units::first_unit(block + j) * 16 + P::place(2 * i);
                if (2 * i + 1 < P::count) {
                    ldmatrix(a[j], from + lane / 16 * (P::place(2 * i + 1) - P::place(2 * i)));
                } else {
                    unsigned half[2];
                    ldmatrix(half, from);
                    a[j][0] = half[0], a[j][1] = half[1], a[j][2] = 0, a[j][3] = 0;
                }
                round_fragment(T{}, a[j]);
            }
#pragma unroll
            for (int j = 0; j < blocks; ++j)
                multiply(T{}, sums[j], a[Units::shared ? 0 : j], filters[j][P::first_step + i]);
        }
    }

    // A sum of the group's own products, without the zeros that the tensor cores multiplied with.
    template <int phase>
    __device__ __forceinline__ float own_sum(const unsigned char* pixel, const GroupFilters<Problem>& filters, int k) const {
        float sum = 0;
        if (k >= W::k) return sum;
        const T* const from = reinterpret_cast<const T*>(pixel) + k / W::group_k * W::group_c - first_c;
#pragma unroll 1
        for (int i = 0; i < Phase<phase>::count; i += Units::units)
#pragma unroll 1
            for (int c = 0; c < W::group_c; ++c)
                sum = fmaf(to_float(from[Phase<phase>::place(i) / static_cast<int>(sizeof(T)) + c]),
                           to_float(filters.weight(k, Phase<phase>::tap(i), c)), sum);
        return sum;
    }
    template <int phase>
    __device__ __forceinline__ void sum_again(float (&sums)[blocks][4], const unsigned char* shared, const T* w, int m_tile) const {
#pragma unroll
        for (int i = 0; i < 4 * blocks; ++i) {
            const unsigned char* const pixel = shared + Pixels::place(m_tile, i / 2 % 2 * 8 + lane / 4);
            const int k = first_k + i / 4 * 8 + lane % 4 * 2 + i % 2;
            sums[i / 4][i % 4] = own_sum<phase>(pixel, GroupFilters<Problem>{w}, k);
        }
    }

    // A result: whether it exists, and which pixel of the image it is.
    template <int phase>
    struct Output {
        bool exists;
        Offset<Problem> pixel;
        __device__ __forceinline__ Output(const Tile& tile, int m_tile, int number) {
            using Rows = typename W::Rows;
            using Columns = typename W::Columns;
            const int p = tile.p + Tile::row(m_tile, number), q = tile.q + Tile::column(m_tile, number);
            const int row = Rows::place(Phase<phase>::row) + p * Rows::written_step;
            const int column = Columns::place(Phase<phase>::column) + q * Columns::written_step;
            exists = row < Rows::written && column < Columns::written;
            pixel = static_cast<Offset<Problem>>(row) * Columns::written + column;
        }
    };
    static constexpr int pixels = W::Rows::written * W::Columns::written;

    // The results of two neighbouring filters of each block, rounded, of the output `half` 8 further.
    __device__ __forceinline__ void finished(Pair (&words)[blocks], const float (&sums)[blocks][4], int half,
                                             Bias<Problem> bias, const T* image, bool exists, Offset<Problem> pixel) const {
        constexpr int apart = Problem::nhwc ? 1 : pixels;
        const T* const at = image + pixel * (Problem::nhwc ? W::k : 1);
#pragma unroll
        for (int j = 0; j < blocks; ++j) {
            const int first = first_k + 8 * j + lane % 4 * 2;
            const HeldOutputs<Problem, Problem::nhwc && W::k % 2 == 0, 2, T> both(
                bias, at + static_cast<Offset<Problem>>(first) * apart, exists && first < W::k);
            float v[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int k = first + i;
                const float held = both.value(i, at + static_cast<Offset<Problem>>(k) * apart, exists && k < W::k);
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
            if (exists && first_k + k < W::k)
                st_global_v2(reinterpret_cast<float*>(to + k), __uint_as_float(low), __uint_as_float(high));
        }
        if constexpr (blocks % 2 == 1) {
            const int k = (blocks - 1) * 8 + 2 * t;
            if (exists && first_k + k < W::k) *reinterpret_cast<unsigned*>(to + k) = words[blocks - 1];
        }
    }

    // Two neighbours of float32 are 8 bytes, and those of four lanes a sector.
    __device__ __forceinline__ void store_filters(const float2 (&words)[blocks], T* to, bool exists) const {
#pragma unroll
        for (int j = 0; j < blocks; ++j) {
            const int k = 8 * j + lane % 4 * 2;
            if (exists && first_k + k < W::k) st_global_v2(to + k, words[j].x, words[j].y);
        }
    }

    // NCHW: the lane gets two neighbouring outputs of one filter of each block instead.
    template <int phase>
    __device__ __forceinline__ void store_outputs(const unsigned (&words)[blocks], T* image, const Tile& tile, int m_tile,
                                                  int half) const {
        constexpr bool pairs = W::phases == 1 && W::Columns::written_step == 1 && (W::Columns::written | Tile::across) % 2 == 0;
        const int number = half * 8 + lane % 4 * 2;
        const Output<phase> first(tile, m_tile, number), second(tile, m_tile, number + 1);
#pragma unroll
        for (int j = 0; j < blocks; ++j) {
            const unsigned word = movmatrix_trans(words[j]);
            const int k = first_k + 8 * j + lane / 4;
            if (k >= W::k) continue;
            T* const to = image + static_cast<Offset<Problem>>(k) * pixels;
            if constexpr (pairs) {
                if (first.exists) *reinterpret_cast<unsigned*>(to + first.pixel) = word;
            } else {
                if (first.exists) to[first.pixel] = T{static_cast<unsigned short>(word)};
                if (second.exists) to[second.pixel] = T{static_cast<unsigned short>(word >> 16)};
            }
        }
    }

    // In float32 the lanes of a filter store neighbouring outputs without an exchange.
    __device__ __forceinline__ void store_outputs(const float2 (&words)[blocks], T* image, Offset<Problem> pixel,
                                                  bool exists) const {
#pragma unroll
        for (int i = 0; i < 2 * blocks; ++i) {
            const int k = first_k + i / 2 * 8 + lane % 4 * 2 + i % 2;
            T* const to = image + static_cast<Offset<Problem>>(k) * pixels + pixel;
            if (exists && k < W::k) *to = i % 2 ? words[i / 2].y : words[i / 2].x;
        }
    }

    // The results of 16 windows, of one phase after the other. `pixel`: this lane's row of ldmatrix.
    template <int phase>
    __device__ __forceinline__ void compute(const unsigned char* pixel, const unsigned char* shared, const T* w,
                                            Bias<Problem> bias, T* image, const Tile& tile, int m_tile) const {
        float sums[blocks][4] = {};
        sum<phase>(sums, pixel);
        if constexpr (Units::mixed) {
            float zero = 0;
#pragma unroll
            for (int i = 0; i < 4 * blocks; ++i) zero = fmaf(0.0f, sums[i / 4][i % 4], zero);
            if (zero != 0.0f) sum_again<phase>(sums, shared, w, m_tile);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Output<phase> output(tile, m_tile, half * 8 + lane / 4);
            Pair words[blocks];
            finished(words, sums, half, bias, image, output.exists, output.pixel);
            if constexpr (Problem::nhwc) store_filters(words, image + output.pixel * W::k + first_k, output.exists);
            else if constexpr (sizeof(T) == 4) store_outputs(words, image, output.pixel, output.exists);
            else store_outputs<phase>(words, image, tile, m_tile, half);
        }
        if constexpr (phase + 1 < W::phases) compute<phase + 1>(pixel, shared, w, bias, image, tile, m_tile);
    }

    // All of the warp's results of a tile, whose pixels lie at `shared`.
    __device__ __forceinline__ void compute_tile(const unsigned char* shared, const T* w, Bias<Problem> bias, T* y,
                                                 const Tile& tile) const {
        T* const image = y + static_cast<int64>(tile.n) * (static_cast<int64>(pixels) * W::k);
        for (int m_tile = warp_m; m_tile < Tile::m_tiles; m_tile += warps_m)
            compute<0>(shared + Pixels::place(m_tile, lane % 16), shared, w, bias, image, tile, m_tile);
    }
};

template <class Problem, class Tuning>
__device__ __forceinline__ void native_gemm_groups(const typename Problem::element* __restrict__ x,
                                                   const typename Problem::element* __restrict__ w,
                                                   Bias<Problem> bias,
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
    for (int stage = 0; number < count; number += step, stage ^= 1) {
        if (number + step < count)
            Pixels::copy(shared + (stage ^ 1) * Pixels::bytes, x, Tile(number + step), first_channel);
        cp_async_commit_group();
        cp_async_wait_group<1>();
        __syncthreads();
        warp.compute_tile(shared + stage * Pixels::bytes, w, bias, y, Tile(number));
        __syncthreads();
    }
}

}  // namespace leanconv
