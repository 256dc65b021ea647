// From the sums of a warpgroup's rows to the output tensor: adds the sums of a split reduction, multiplies by the powers of two
// that the filters were divided by, applies the layer's epilogue, and stores.
#pragma once

#include <device/epilogue.cuh>
#include <device/pipeline/rings.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/sync.cuh>

namespace leanconv {

// Stores both outputs of two pairs of a thread in NCHW. sums[2 * i] and sums[2 * i + 1] are the even and the odd outputs of 16
// filters: group i of the warpgroup's half, from filter `first` on, in the order of store_sums.
template <class Problem, class Tuning, int entries, class Tiles>
__device__ __forceinline__ void store_pairs(const float (&sums)[entries][8], int first, const float* prepared,
                                            Bias<Problem> bias, float* y, const Tiles& tiles, Offset<Problem> tile, int row,
                                            int t, int apart) {
    using F = TensorFilters<Problem, Tuning>;
    constexpr int n16 = entries / 2, image = DepthPhases<Problem>::out * Problem::out_h * Problem::out_w;
    static_assert(entries % 2 == 0 && image % 2 == 0, "both outputs of a pair are stored together");
    const int group = tiles.group(tile), first_of_half = tiles.numbers.odd * (F::filters / 2) + 8 * first;
    const int first_k = tiles.filters(tile) * F::filters + first_of_half + 4 * t;
    const float* const scales = prepared + F::scales_at + group * F::tiles * F::filters + first_k;
    // NOTE: scales and terms are loaded before the first store, as in store_sums.
    float4 scale[n16];
    Term<Problem> terms[n16][4] = {};
#pragma unroll
    for (int i = 0; i < n16; ++i) {
        scale[i] = *reinterpret_cast<const float4*>(scales + 16 * i);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int in_group = first_k + 16 * i + j;
            terms[i][j] = term_of<Problem>(bias, group * Problem::group_k + in_group, in_group < Problem::group_k);
        }
    }
    const Place at[2] = {tiles.numbers.place(tiles.first_pixel(tile) + row),
                         tiles.numbers.place(tiles.first_pixel(tile) + row + apart)};
#pragma unroll
    for (int i = 0; i < n16; ++i) {
        const float factor[4] = {scale[i].x, scale[i].y, scale[i].z, scale[i].w};
        const int filter = group * Problem::group_k + first_k + 16 * i;
        // The residuals of 16 filters are under way together.
        unsigned residual[Problem::add ? 8 : 1][2] = {};
        if constexpr (Problem::add) {
#pragma unroll
            for (int of = 0; of < 8; ++of)
                if (at[of % 2].count > 0 && first_k + 16 * i + of / 2 < Problem::group_k)
                    load_residual<Problem>(residual[of], bias, y + static_cast<int64>(filter + of / 2) * image + at[of % 2].offset);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (first_k + 16 * i + j >= Problem::group_k) continue;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (at[half].count == 0) continue;
                float* const to = y + static_cast<int64>(filter + j) * image + at[half].offset;
                const int from = j / 2 * 4 + j % 2 + 2 * half;
                float held[2];
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    if constexpr (Problem::add) held[odd] = __uint_as_float(residual[2 * j + half][odd]);
                    else held[odd] = held_by<Problem>(bias, to + odd, true);
                }
                const float even = finish<Problem>(sums[2 * i][from] * factor[j], terms[i][j], held[0]);
                const float odd = finish<Problem>(sums[2 * i + 1][from] * factor[j], terms[i][j], held[1]);
                st_global_v2(to, even, odd);
            }
        }
    }
}

// Whether four filters of a pixel, from a multiple of four on, are aligned to 16 bytes and exist or not together.
template <class Problem> constexpr bool four_together = Problem::nhwc && Problem::group_k % 4 == 0;

// The residuals of a thread's outputs, as `store_sums` stores them: four filters of two pixels in each 16 filters, `step` elements
// apart. `ahead` groups of 16 are under way at a time. Explored (H200, 479ad8cc): with one at a time 205 MB of residuals made
// a layer of 80 us take 300.
template <class Problem, class Tuning, int n16, int ahead>
struct ResidualLoads {
    using F = TensorFilters<Problem, Tuning>;
    unsigned words[ahead][2][4] = {};
    const Epilogue<Problem>& bias;
    const float* at[2];
    int64 step;
    int in_group;

    // NOTE: in place of a pixel that does not exist the first one is read, so that no load waits for a branch; what it holds
    // is not used.
    __device__ __forceinline__ ResidualLoads(const Epilogue<Problem>& bias, const float* y, const Place (&places)[2], int64 step,
                                             int filter, int in_group)
        : bias(bias), step(step), in_group(in_group) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int64 pixel = places[half].count > 0 ? places[half].offset : 0;
            at[half] = y + (Problem::nhwc ? pixel * Problem::k + filter : filter * step + pixel);
        }
#pragma unroll
        for (int i = 0; i < ahead; ++i) load(i);
    }
    __device__ __forceinline__ void load(int i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unsigned (&to)[4] = words[i % ahead][half];
            if constexpr (four_together<Problem>) {
                if (exists(16 * i)) load_residual<Problem>(to, bias, at[half] + 16 * i);
            } else {
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (exists(16 * i + j))
                        to[j] = __float_as_uint(load_read_only(residual_of(bias, at[half] + (16 * i + j) * step)));
            }
        }
    }
    __device__ __forceinline__ bool exists(int k) const {
        return Problem::group_k % F::filters == 0 || in_group + k < Problem::group_k;
    }
    __device__ __forceinline__ float value(int i, int half, int j) const { return __uint_as_float(words[i % ahead][half][j]); }
    __device__ __forceinline__ void advance(int i) {
        if (i + ahead < n16) load(i + ahead);
    }
};

// In place of ResidualLoads where there is no residual.
struct NoResiduals {
    template <class... Given> __device__ __forceinline__ explicit NoResiduals(const Given&...) {}
    __device__ __forceinline__ void advance(int) {}
};

// Brings to the L2 cache what `store_tile` will add to the 16 pixels of a warp from `first_row` on, while the tile's products are
// computed.
template <class Problem, class Tuning, class Tiles>
__device__ __forceinline__ void prefetch_tile(Bias<Problem> bias, const float* y, const Tiles& tiles, Offset<Problem> tile,
                                              int first_row, int lane) {
    if constexpr (Problem::add) {
        constexpr int filters = TensorFilters<Problem, Tuning>::filters;
        prefetch_residuals<Problem, filters>(bias, y, tiles.numbers, tiles.first_pixel(tile) + first_row, tiles.group(tile),
                                             tiles.filters(tile) * filters, lane);
    }
}

// Stores two pixels of a thread, `row` and `row` + `apart`. Of each 16 filters, from group `first` on, a thread has four, from
// 4t on: sums[i][0, 1, 4, 5] of the first pixel, [2, 3, 6, 7] of the second. `early`: there are registers for terms and residuals
// that are loaded long before they are used.
template <class Problem, class Tuning, bool early = true, int n16, class Tiles>
__device__ __forceinline__ void store_sums(const float (&sums)[n16][8], int first, const float* prepared,
                                           Bias<Problem> bias, float* y, long long batch,
                                           const Tiles& tiles, Offset<Problem> tile, int row, int t,
                                           int apart = 8) {
    using F = TensorFilters<Problem, Tuning>;
    if constexpr (Tiles::both) {
        store_pairs<Problem, Tuning>(sums, first, prepared, bias, y, tiles, tile, row, t, apart);
        return;
    }
    int64 image = DepthPhases<Problem>::out * Problem::out_h * Problem::out_w;
    if constexpr (Problem::chwn) image *= batch;
    const int group = tiles.group(tile), first_k = tiles.filters(tile) * F::filters + 16 * first + 4 * t;
    const float* const scales = prepared + F::scales_at + group * F::tiles * F::filters + first_k;
    constexpr bool terms_first = early && (Problem::bias || Problem::scale);
    // NOTE: scales, and early terms, are loaded before the first store, which they could not pass: y might be where scales are.
    float4 scale[n16];
#pragma unroll
    for (int i = 0; i < n16; ++i) scale[i] = *reinterpret_cast<const float4*>(scales + 16 * i);
    const Place places[2] = {tiles.numbers.place(tiles.first_pixel(tile) + row),
                             tiles.numbers.place(tiles.first_pixel(tile) + row + apart)};
    const int64 step = Problem::nhwc ? 1 : image;
    constexpr int most = early ? 8 : 2, ahead = n16 < most ? n16 : most;
    typename Select<Problem::add, ResidualLoads<Problem, Tuning, n16, ahead>, NoResiduals>::type residuals(
        bias, y, places, step, group * Problem::group_k + first_k, first_k);
    const auto scaled = [&](int i, int from, float factor) { return sums[i][from] * factor; };
    float termed[terms_first ? n16 : 1][8];
    if constexpr (terms_first) {
#pragma unroll
        for (int i = 0; i < n16; ++i) {
            const float factor[4] = {scale[i].x, scale[i].y, scale[i].z, scale[i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int in_group = first_k + 16 * i + j;
                const int filter = group * Problem::group_k + in_group;
                const auto term = term_of<Problem, true>(bias, filter, in_group < Problem::group_k);
#pragma unroll
                for (int from = j / 2 * 4 + j % 2, half = 0; half < 2; ++half)
                    termed[i][from + 2 * half] = apply_term<Problem>(scaled(i, from + 2 * half, factor[j]), term);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < n16; ++i) {
        const int in_group = first_k + 16 * i, filter = group * Problem::group_k + in_group;
        Term<Problem> terms[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if constexpr (!terms_first) terms[j] = term_of<Problem>(bias, filter + j, in_group + j < Problem::group_k);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (places[half].count == 0) continue;
            float v[4];
            if constexpr (terms_first) {
#pragma unroll
                for (int j = 0; j < 4; ++j) v[j] = termed[i][j / 2 * 4 + j % 2 + 2 * half];
            } else {
                const float factor[4] = {scale[i].x, scale[i].y, scale[i].z, scale[i].w};
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    v[j] = apply_term<Problem>(scaled(i, j / 2 * 4 + j % 2 + 2 * half, factor[j]), terms[j]);
            }
            const int64 at = places[half].offset;
            float* const to = y + (Problem::nhwc ? at * Problem::k + filter : filter * image + at);
            float result[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float held;
                if constexpr (Problem::add) held = residuals.value(i, half, j);
                else held = held_by<Problem>(bias, to + j * step, in_group + j < Problem::group_k);
                result[j] = apply_held<Problem>(v[j], held);
            }
            if constexpr (four_together<Problem>) {
                // NOTE: written out, because the compiler split these stores into four each in tensor_winograd.
                if (in_group < Problem::group_k) st_global_v4(to, result);
            } else if constexpr (Problem::nhwc && Problem::group_k % 2 == 0) {
#pragma unroll
                for (int j = 0; j < 4; j += 2)
                    if (in_group + j < Problem::group_k) st_global_v2(to + j, result[j], result[j + 1]);
            } else {
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (in_group + j < Problem::group_k) to[j * step] = result[j];
            }
        }
        residuals.advance(i);
    }
}

// A thread's sums, by groups of 16 filters.
template <int n_tiles, int count>
__device__ __forceinline__ const float (&as_n16(const float (&sums)[n_tiles][count]))[n_tiles * count / 8][8] {
    return reinterpret_cast<const float (&)[n_tiles * count / 8][8]>(sums);
}

// The groups of 16 filters that this CTA of a cluster stores, summed over the CTAs in the order of their ranks. The rings are
// no longer read, and hold the sums of all consumers.
template <class Rings, class Tuning, int all>
struct SharedSums {
    static_assert(all % Tuning::split == 0, "the blocks of a cluster share a thread's filters evenly");
    static constexpr int n16 = all / Tuning::split, threads = 128 * Tuning::warpgroups;
    static_assert(all * 8 * threads * 4 <= Rings::bytes, "the rings take the sums of a tile");
    float sums[n16][8];
    int first;

    // Between two barriers of the cluster, in which all its threads take part.
    __device__ __forceinline__ void gather(const float* mine, int thread) {
        first = static_cast<int>(cluster_rank()) * n16;
#pragma unroll
        for (int i = 0; i < n16; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float* const at = mine + ((first + i) * 8 + j) * threads + thread;
                sums[i][j] = cluster_load(at, 0);
#pragma unroll
                for (int other = 1; other < Tuning::split; ++other) sums[i][j] += cluster_load(at, other);
            }
    }
};

// Stores a tile, by all consumers. Where the CTAs of a cluster split its reduction (`shared_tile`), their producers arrive at
// the same two cluster barriers.
template <class Problem, class Tuning, int n16, class Rings, class Tiles>
__device__ __forceinline__ void store_tile(const float (&sums)[n16][8], bool shared_tile, const Rings& rings,
                                           const float* prepared, Bias<Problem> bias, float* y, long long batch,
                                           const Tiles& tiles, Offset<Problem> tile, int row, int t, int apart = 8) {
    if (!shared_tile) {
        store_sums<Problem, Tuning>(sums, 0, prepared, bias, y, batch, tiles, tile, row, t, apart);
    } else if constexpr (Tuning::split > 1) {
        float* const mine = reinterpret_cast<float*>(rings.base);
        const int at = threadIdx.x;
        barrier_sync(15, 128 * Tuning::warpgroups);  // the stages of this block have been read
#pragma unroll
        for (int i = 0; i < n16 * 8; ++i) mine[i * 128 * Tuning::warpgroups + at] = sums[i / 8][i % 8];
        meet_in_cluster();
        SharedSums<Rings, Tuning, n16> share;
        share.gather(mine, at);
        meet_in_cluster();
        store_sums<Problem, Tuning>(share.sums, share.first, prepared, bias, y, batch, tiles, tile, row, t, apart);
    }
}

}  // namespace leanconv
