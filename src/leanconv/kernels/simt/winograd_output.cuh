// From the sums in the transform domain to the output tensor. The states of a tile lie in different warps and are
// exchanged through shared memory; a thread transforms them back, applies what follows the sums, and stores.
#pragma once

#include <device/epilogue.cuh>
#include <kernels/simt/winograd_tiles.cuh>

namespace leanconv {

// `Transform::output(y, sums)` makes the outputs of one tile. A part of the filters at a time; all threads of the block
// take part, and nothing else uses `shared`.
template <class Problem, class Tuning, class Transform>
struct WinogradOutput {
    using Tiles = WinogradTiles<Problem, Tuning>;
    using Column = WinogradColumn<Problem>;
    static constexpr int states = Tiles::states, outputs = Problem::out_h * Problem::out_w;
    // Registers: width * (states + outputs) beside the sums that still wait.
    static constexpr int width = states <= 8 ? 4 : 2;

    const Tiles& tiles;
    const Column* columns;
    float* exchange;
    Bias<Problem> bias;
    float* y;
    int first_k;  // of the block, in its group
    int group;
    OutputStrides<Problem> strides;
    // In CHWN neighbouring tiles are adjacent in memory as they are.
    static constexpr bool staged = Tuning::staged && !Problem::nhwc && !Problem::chwn;

    template <class Sums>
    __device__ __forceinline__ void run(const Sums& sums) const {
#pragma unroll
        for (int round = 0; round < Tiles::rounds; ++round) {
            Tiles::barrier();  // the buffer has been read
            put(sums, round);
            Tiles::barrier();
            if constexpr (Problem::nhwc) {
                store_nhwc(round);
            } else {
                transform_tiles(round);
                if constexpr (staged) {
                    Tiles::barrier();
                    store_nchw(round);
                }
            }
        }
    }

    // Neighbours change places in each pair. NOTE: a store of 128 bits takes four adjacent registers, as loads of
    // fragments give them; in their own order sums would lie in the banks of the fragments they are made of.
    template <class Sums>
    __device__ __forceinline__ void put(const Sums& sums, int round) const {
        float* const plane = exchange + tiles.state * Tiles::exchange_plane;
#pragma unroll
        for (int f = 0; f < Tuning::thread_tiles; f += 4) {
            const int tile = f * Tiles::lanes_tiles + tiles.lane_tile * 4, k = tiles.lane_k * 4;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float v[4];
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    v[j] = Problem::nhwc ? sums[4 * round + (j ^ 1)][f + i] : sums[4 * round + i][f + (j ^ 1)];
                Tiles::exchange_put(plane, Problem::nhwc ? tile + i : k + i, Problem::nhwc ? k : tile, v);
            }
        }
    }

    // Whether the first output of tile `tile` exists, and where it lies, first filter of the group.
    __device__ __forceinline__ Column place(int tile) const {
        Column column = columns[tile % Tiles::columns];
        const int below = tile / Tiles::columns * Problem::dilation_h;
        column.y += static_cast<Offset<Problem>>(below) * Problem::q * strides.pixel;
        column.h = column.h == Column::absent ? Problem::p : column.h + Problem::pad_top + below;  // now p
        column.w += Problem::pad_left;                                                             // now q
        return column;
    }

    __device__ __forceinline__ void load(float (&sums)[width][states], const float* from) const {
#pragma unroll
        for (int s = 0; s < states; ++s) {
            float v[width];
            load_adjacent(v, from + s * Tiles::exchange_plane);
#pragma unroll
            for (int j = 0; j < width; ++j) sums[j ^ 1][s] = v[j];  // see put()
        }
    }

    // What is added to an output is read where it is stored: until then results wait without it and the activation.
    static __device__ __forceinline__ float to_store(float sum, Term<Problem> term) {
        if constexpr (adds<Problem>) return apply_term<Problem>(sum, term);
        else return finish<Problem>(sum, term);
    }
    __device__ __forceinline__ float stored(float value, const float* at, bool exists = true) const {
        if constexpr (adds<Problem>) return apply_held<Problem>(value, held_by<Problem>(bias, at, exists));
        else return value;
    }

    static __device__ __forceinline__ void output_of(float (&v)[width], const float (&result)[width][outputs], int o) {
#pragma unroll
        for (int j = 0; j < width; ++j) v[j] = result[j][o];
    }

    // Neighbouring lanes take neighbouring filters of a tile.
    __device__ __forceinline__ void store_nhwc(int round) const {
        constexpr int a_tile = Tiles::round_k / width, items = Tuning::tiles * a_tile;
        const bool vector = Problem::vector_store && reinterpret_cast<unsigned long long>(y) % 16 == 0;
#pragma unroll 1
        for (int e = threadIdx.x; e < items; e += Tiles::threads) {
            const int tile = e / a_tile, in_round = e % a_tile * width;
            const int k = first_k + round * Tiles::round_k + in_round;
            const Column at = place(tile);
            if (k >= Problem::group_k || at.h >= Problem::p) continue;
            float sums[width][states], result[width][outputs];
            load(sums, exchange + Tiles::exchange_at(tile, in_round));
#pragma unroll
            for (int j = 0; j < width; ++j) {
                Transform::output(result[j], sums[j]);
                const bool exists = k + j < Problem::group_k;
                const Term<Problem> term = term_of<Problem>(bias, group * Problem::group_k + k + j, exists);
#pragma unroll
                for (int o = 0; o < outputs; ++o) result[j][o] = to_store(result[j][o], term);
            }
#pragma unroll
            for (int o = 0; o < outputs; ++o) {
                const int below = o / Problem::out_w, aside = o % Problem::out_w;
                if (at.h + below >= Problem::p || at.w + aside >= Problem::last_q) continue;
                float* const to = y + at.y + static_cast<int64>(below * Problem::q + aside) * Problem::k + k;
                float v[width];
                output_of(v, result, o);
#pragma unroll
                for (int j = 0; j < width; ++j) v[j] = stored(v[j], to + j, k + j < Problem::group_k);
                if (vector) {
                    store_adjacent(to, v);
                } else {
#pragma unroll
                    for (int j = 0; j < width; ++j)
                        if (k + j < Problem::group_k) to[j] = v[j];
                }
            }
        }
    }

    // NCHW and CHWN: neighbouring lanes take neighbouring tiles of a filter. Staged outputs take the place of the sums
    // they are made of.
    __device__ __forceinline__ void transform_tiles(int round) const {
        constexpr int a_filter = Tuning::tiles / width, items = Tiles::round_k * a_filter;
        static_assert(outputs <= states, "the outputs of a tile fit where its sums were");
#pragma unroll 1
        for (int e = threadIdx.x; e < items; e += Tiles::threads) {
            const int in_round = e / a_filter, tile = e % a_filter * width;
            const int k = first_k + round * Tiles::round_k + in_round;
            if (!staged && k >= Problem::group_k) continue;
            float* const at = exchange + Tiles::exchange_at(in_round, tile);
            float sums[width][states], result[width][outputs];
            load(sums, at);
            const Term<Problem> term = term_of<Problem>(bias, group * Problem::group_k + k, k < Problem::group_k);
#pragma unroll
            for (int j = 0; j < width; ++j) {
                Transform::output(result[j], sums[j]);
#pragma unroll
                for (int o = 0; o < outputs; ++o) result[j][o] = to_store(result[j][o], term);
            }
            if constexpr (Problem::chwn) {
                store_images(result, k, tile);
            } else if constexpr (!staged) {
                store_rows(result, k, tile);
            } else {
#pragma unroll
                for (int o = 0; o < outputs; ++o) {
                    float v[width];
                    output_of(v, result, o);
                    store_adjacent(at + o * Tiles::exchange_plane, v);
                }
            }
        }
    }

    // The outputs of `width` neighbouring tiles, row by row: joined where the tiles are of one row of tiles.
    __device__ __forceinline__ void store_rows(const float (&result)[width][outputs], int k, int tile) const {
        constexpr int joined = Problem::row_tiles % width == 0 ? width : 1, span = joined * Problem::out_w;
        constexpr int shared_factor = gcd(gcd(Problem::q, Problem::first_q), gcd(Problem::last_q, span));
        constexpr int at_once = shared_factor % 4 == 0 ? 4 : shared_factor % 2 == 0 ? 2 : 1;
        const bool vector = at_once > 1 && reinterpret_cast<unsigned long long>(y) % (at_once * 4) == 0;
#pragma unroll
        for (int first = 0; first < width; first += joined) {
            const Column at = place(tile + first);
            float* const to = y + at.y + static_cast<Offset<Problem>>(k) * output_pixels<Problem>;
#pragma unroll
            for (int below = 0; below < Problem::out_h; ++below) {
#pragma unroll
                for (int aside = 0; aside < span; aside += at_once) {
                    if (at.h + below >= Problem::p || at.w + aside >= Problem::last_q) continue;
                    float v[at_once];
#pragma unroll
                    for (int i = 0; i < at_once; ++i)
                        v[i] = stored(result[first + (aside + i) / Problem::out_w]
                                            [below * Problem::out_w + (aside + i) % Problem::out_w],
                                      to + below * Problem::q + aside + i);
                    if constexpr (at_once > 1) {
                        if (vector) {
                            store_adjacent(to + below * Problem::q + aside, v);
                            continue;
                        }
                    }
#pragma unroll
                    for (int i = 0; i < at_once; ++i) to[below * Problem::q + aside + i] = v[i];
                }
            }
        }
    }

    // The outputs of `width` neighbouring tiles, which are neighbouring images where images come in fours.
    __device__ __forceinline__ void store_images(const float (&result)[width][outputs], int k, int tile) const {
        const bool vector = images_in_fours<Problem> && reinterpret_cast<unsigned long long>(y) % 16 == 0;
        const Offset<Problem> filter = k * strides.channel;
        Column at[images_in_fours<Problem> ? 1 : width];
#pragma unroll
        for (int j = 0; j < (images_in_fours<Problem> ? 1 : width); ++j) at[j] = place(tile + j);
#pragma unroll
        for (int o = 0; o < outputs; ++o) {
            const int below = o / Problem::out_w, aside = o % Problem::out_w;
            const Offset<Problem> pixel = filter + (below * Problem::q + aside) * strides.pixel;
            float v[width];
            output_of(v, result, o);
            if constexpr (images_in_fours<Problem>) {
                if (at[0].h + below >= Problem::p || at[0].w + aside >= Problem::last_q) continue;
                float* const to = y + at[0].y + pixel;
#pragma unroll
                for (int j = 0; j < width; ++j) v[j] = stored(v[j], to + j);
                if (vector) {
                    store_adjacent(to, v);
                    continue;
                }
            }
#pragma unroll
            for (int j = 0; j < width; ++j) {
                const Column& tile_at = at[images_in_fours<Problem> ? 0 : j];
                if (tile_at.h + below >= Problem::p || tile_at.w + aside >= Problem::last_q) continue;
                float* const to = &y[tile_at.y + pixel + (images_in_fours<Problem> ? j : 0)];
                *to = images_in_fours<Problem> ? v[j] : stored(v[j], to);
            }
        }
    }

    // Neighbouring lanes store neighbouring outputs of a row. For any width of a tile, and at the price of reading staged
    // outputs one by one.
    __device__ __forceinline__ void store_nchw(int round) const {
        constexpr int a_row = Tiles::columns * Problem::out_w, a_filter = Tuning::tiles * outputs;
#pragma unroll 4
        for (int e = threadIdx.x; e < Tiles::round_k * a_filter; e += Tiles::threads) {
            const int in_round = e / a_filter, aside = e % Problem::out_w, row = e % a_filter / a_row;
            const int column = e % a_row / Problem::out_w, below = row % Problem::out_h;
            const int tile = row / Problem::out_h * Tiles::columns + column;
            const int k = first_k + round * Tiles::round_k + in_round;
            const Column at = place(tile);
            if (k >= Problem::group_k || at.h + below >= Problem::p || at.w + aside >= Problem::last_q) continue;
            const float value =
                exchange[(below * Problem::out_w + aside) * Tiles::exchange_plane + Tiles::exchange_at(in_round, tile)];
            float* const to =
                &y[at.y + static_cast<Offset<Problem>>(k) * output_pixels<Problem> + below * Problem::q + aside];
            *to = stored(value, to);
        }
    }
};

}  // namespace leanconv
