// How x and dy come into shared memory for the filters' gradient, in stages of 64 pixels.
#pragma once

#include <device/index.cuh>
#include <device/ptx/bulk_copy.cuh>
#include <device/ptx/copy.cuh>
#include <kernels/hopper_fp32/tensor_weight_factors.cuh>
#include <kernels/hopper_fp32/tensor_weight_tiles.cuh>

namespace leanconv {

// One thread's copies of a stage of x in rows: 64 pixels of 32 channels of a tap each.
template <class Problem, class Tuning>
__device__ __forceinline__ void copy_x_rows(const TensorMap& x, long long batch, const WeightTiles<Problem, Tuning>& tile,
                                            const WeightRings<Problem, Tuning>& rings, int stage, int place) {
    using Tiles = WeightTiles<Problem, Tuning>;
    using Rings = WeightRings<Problem, Tuning>;
    Mbarrier* const full = rings.x_full(place);
    mbarrier_arrive_expect_tx(full, Rings::x_bytes);
    const GridPixel<Problem, Tuning> from(static_cast<Offset<Problem>>(stage) * split_depth, batch);
    const int h = from.h(), w = from.w();
    for (int i = 0; i < Tiles::rows / 32; ++i) {
        // NOTE: pieces past the last repeat it; what is computed from them is never stored.
        const int next = tile.first_row + 32 * i;
        const WeightRow<Problem, Tuning> row(next < Tiles::all_rows ? next : Tiles::all_rows - 32);
        cp_async_bulk_tensor_im2col_shared_global(rings.x(place) + i * Rings::piece_bytes, x, full,
                                                  tile.group * Problem::group_c + row.channel, w, h,
                                                  static_cast<int>(from.n), static_cast<unsigned short>(row.right()),
                                                  static_cast<unsigned short>(row.down()));
    }
}

// And of a chunk of dy in rows.
template <class Problem, class Tuning>
__device__ __forceinline__ void copy_dy_rows(const TensorMap& dy, long long batch, const WeightTiles<Problem, Tuning>& tile,
                                             const WeightRings<Problem, Tuning>& rings, int stage, int chunk, int place) {
    using Tiles = WeightTiles<Problem, Tuning>;
    using Rings = WeightRings<Problem, Tuning>;
    Mbarrier* const full = rings.dy_full(place);
    mbarrier_arrive_expect_tx(full, Rings::dy_bytes);
    const int first = tile.group * Problem::group_k + tile.first_filter + chunk * Tiles::chunk;
    if constexpr (WeightGrid<Problem, Tuning>::shared) {
        const GridPixel<Problem, Tuning> from(static_cast<Offset<Problem>>(stage) * split_depth, batch);
        for (int i = 0; i < Tiles::chunk / 32; ++i)
            cp_async_bulk_tensor_im2col_shared_global(rings.dy(place) + i * Rings::dy_piece_bytes, dy, full, first + i * 32,
                                                      from.column - WeightGrid<Problem, Tuning>::lead, from.p,
                                                      static_cast<int>(from.n), 0, 0);
        return;
    }
    for (int i = 0; i < Tiles::chunk / 32; ++i)
        cp_async_bulk_tensor_shared_global(rings.dy(place) + i * Rings::dy_piece_bytes, dy, full, first + i * 32,
                                           stage * split_depth);
}

// The two pixels of a stage that a lane copies, 32 apart, for columns; and, behind them, one of dy's window.
template <class Problem, class Tuning>
struct StagePixels {
    using Grid = WeightGrid<Problem, Tuning>;
    static constexpr int count = Grid::shared ? 3 : 2;
    int64 n[count];
    int p[count], column[count];
    bool exists[count];
    __device__ __forceinline__ StagePixels(int stage, int lane, long long batch) {
        const auto all = static_cast<Offset<Problem>>(Grid::count(batch));
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const int of_stage = 32 * i + (i < 2 ? lane : lane % 8);
            const Offset<Problem> number = static_cast<Offset<Problem>>(stage) * split_depth + of_stage;
            exists[i] = number < all;
            const GridPixel<Problem, Tuning> pixel(exists[i] ? number : 0, batch);
            n[i] = pixel.n, p[i] = pixel.p, column[i] = pixel.column;
        }
    }
};

// All threads' copies of a stage of x in columns, 4 bytes each: a warp has every fourth of the rows, a lane two pixels.
template <class Problem, class Tuning>
__device__ __forceinline__ void copy_x_columns(const float* x, long long batch, const WeightTiles<Problem, Tuning>& tile,
                                               const StagePixels<Problem, Tuning>& pixels, unsigned char* to, int thread) {
    using Tiles = WeightTiles<Problem, Tuning>;
    using Rings = WeightRings<Problem, Tuning>;
    constexpr int rows = Tiles::rows / Rings::producer_warps, run = Tiles::piece < 16 ? Tiles::piece : 16;
    const InputStrides<Problem> stride(batch);
    const int first = thread / 32 * rows, lane = thread % 32;
    int h[2], w[2];
    const char* from[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        w[i] = pixels.column[i];
        if (WeightGrid<Problem, Tuning>::shared) w[i] -= WeightGrid<Problem, Tuning>::ahead;
        else w[i] = w[i] * Problem::stride_w - Problem::pad_left;
        // NOTE: a pixel that does not exist lies above all images, so that zeros are read
        h[i] = pixels.exists[i] ? pixels.p[i] * Problem::stride_h - Problem::pad_top : -(1 << 30);
        const int64 place = static_cast<int64>(h[i]) * Problem::w + w[i];
        from[i] = reinterpret_cast<const char*>(x + pixels.n[i] * static_cast<int64>(stride.image) +
                                                place * static_cast<int64>(stride.pixel));
    }
    float* const column = reinterpret_cast<float*>(to) + first * Rings::x_pitch + lane;
#pragma unroll 1
    for (int i = 0; i < rows; i += run) {
        const WeightRow<Problem, Tuning> row(tile.first_row + first + i);
        const int64 tap = static_cast<int64>(row.down() * Problem::w + row.right()) * static_cast<int64>(stride.pixel);
        const int64 channel = static_cast<int64>(tile.group * Problem::group_c + row.channel) * static_cast<int64>(stride.channel);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const bool inside = row.tap < Tiles::taps && static_cast<unsigned>(h[half] + row.down()) < Problem::h &&
                                static_cast<unsigned>(w[half] + row.right()) < Problem::w;
            const char* const source = from[half] + (tap + channel) * 4;
#pragma unroll
            for (int j = 0; j < run; ++j) {
                const bool known = Problem::group_c % Tiles::piece == 0 || row.channel + j < Problem::group_c;
                cp_async_4(column + (i + j) * Rings::x_pitch + 32 * half,
                           source + static_cast<int64>(j) * static_cast<int64>(stride.channel) * 4, inside && known);
            }
        }
    }
}

// And of a chunk of dy: a warp has 16 filters. Where images of NCHW come in fours of pixels, a lane copies four of every
// second filter at once, otherwise two pixels of all.
template <class Problem, class Tuning>
__device__ __forceinline__ void copy_dy_columns(const float* dy, long long batch, const WeightTiles<Problem, Tuning>& tile,
                                                const StagePixels<Problem, Tuning>& pixels, int stage, int chunk,
                                                unsigned char* to, int thread) {
    using Rings = WeightRings<Problem, Tuning>;
    const OutputStrides<Problem> stride(batch);
    const int own = thread / 32 * 16, lane = thread % 32;
    const int first = tile.first_filter + chunk * WeightTiles<Problem, Tuning>::chunk + own;
    using Grid = WeightGrid<Problem, Tuning>;
    if constexpr (!Grid::shared && !Problem::nhwc && !Problem::chwn && Problem::p * Problem::q % 4 == 0) {
        constexpr int image = Problem::p * Problem::q;
        const Offset<Problem> number = static_cast<Offset<Problem>>(stage) * split_depth + lane % 16 * 4;
        const Offset<Problem> n = number / image;
        const float* const from = dy + static_cast<int64>(n) * static_cast<int64>(stride.image) + (number - n * image) +
                                  static_cast<int64>(tile.group * Problem::group_k + first + lane / 16) * image;
        float* const to_four = reinterpret_cast<float*>(to) + (own + lane / 16) * Rings::dy_pitch + lane % 16 * 4;
#pragma unroll
        for (int j = 0; j < 16; j += 2)
            cp_async_16(to_four + j * Rings::dy_pitch, from + static_cast<int64>(j) * image,
                        number < static_cast<Offset<Problem>>(batch) * image && first + lane / 16 + j < Problem::group_k);
        return;
    }
#pragma unroll
    for (int half = 0; half < StagePixels<Problem, Tuning>::count; ++half) {
        // The few pixels behind the 64: eight lanes have them, of every fourth filter.
        const int step = half == 2 ? 4 : 1, start = half == 2 ? lane / 8 : 0, q = pixels.column[half] - Grid::lead;
        const bool seen = pixels.exists[half] && (!Grid::shared || static_cast<unsigned>(q) < Problem::q);
        const int64 place = static_cast<int64>(pixels.p[half]) * Problem::q + q;
        const int64 filter = tile.group * Problem::group_k + first + start;
        const float* const from = dy + pixels.n[half] * static_cast<int64>(stride.image) +
                                  place * static_cast<int64>(stride.pixel) + filter * static_cast<int64>(stride.channel);
        const int of_window = 32 * half + (half == 2 ? lane % 8 : lane);
        float* const column = reinterpret_cast<float*>(to) + (own + start) * Rings::dy_pitch + of_window;
#pragma unroll
        for (int j = 0; j < 16; j += step)
            cp_async_4(column + j * Rings::dy_pitch, from + static_cast<int64>(j) * static_cast<int64>(stride.channel),
                       seen && first + start + j < Problem::group_k);
    }
}

// What lanes copy is there some groups of copies later: then each warp arrives.
template <int depth>
struct Landing {
    Mbarrier* under_way[depth];
    int count = 0;
    __device__ __forceinline__ void commit(Mbarrier* full, int thread) {
        cp_async_commit_group();
        if (count == depth) {
            cp_async_wait_group<depth>();
            __syncwarp();
            if (thread % 32 == 0) mbarrier_arrive(under_way[0]);
#pragma unroll
            for (int i = 0; i + 1 < depth; ++i) under_way[i] = under_way[i + 1];
            --count;
        }
#pragma unroll
        for (int i = 0; i < depth; ++i)
            if (i == count) under_way[i] = full;
        ++count;
    }
    __device__ __forceinline__ void finish(int thread) {
        cp_async_wait_group<0>();
        __syncwarp();
#pragma unroll
        for (int i = 0; i < depth; ++i)
            if (i < count && thread % 32 == 0) mbarrier_arrive(under_way[i]);
    }
};

// The producers: for rows thread 0 copies x, thread 32 dy, and two warps look at it; for columns all threads copy. `X` and
// `DY` are tensor maps, or the tensors where they are copied in columns.
template <class Problem, class Tuning, class X, class DY>
__device__ __forceinline__ void copy_operands(const X& x, const DY& dy, long long batch,
                                              const WeightTiles<Problem, Tuning>& tile,
                                              const WeightRings<Problem, Tuning>& rings,
                                              const PartRange<Problem, Tuning>& range, int thread) {
    RingPlace<Tuning::x_stages> x_place;
    RingPlace<Tuning::dy_stages> dy_place;
    if constexpr (Tuning::x_rows && Tuning::dy_rows) {
        if (thread == 0) {
            for (int stage = range.first; stage < range.end; ++stage, x_place.advance()) {
                mbarrier_wait_parity(rings.x_free(x_place.stage), x_place.parity ^ 1);
                copy_x_rows(x, batch, tile, rings, stage, x_place.stage);
            }
        } else if (thread == 32) {
            for (int stage = range.first; stage < range.end; ++stage)
                for (int chunk = 0; chunk < Tuning::chunks; ++chunk, dy_place.advance()) {
                    mbarrier_wait_parity(rings.dy_free(dy_place.stage), dy_place.parity ^ 1);
                    copy_dy_rows(dy, batch, tile, rings, stage, chunk, dy_place.stage);
                }
        } else if (thread >= 64) {
            scan_dy(tile, rings, range, batch, thread - 64);
        }
    } else {
        // NOTE: with more copies under way than this, a wait below could be one for a stage that only they would free.
        Landing<Tuning::dy_rows || Tuning::x_rows ? 1 : 2> landing;
#pragma unroll 1
        for (int stage = range.first; stage < range.end; ++stage, x_place.advance()) {
            const StagePixels<Problem, Tuning> pixels(stage, thread % 32, batch);
            // NOTE: dy first: x is converted when the factors of its pixels have been found.
#pragma unroll 1
            for (int chunk = 0; chunk < Tuning::chunks; ++chunk, dy_place.advance()) {
                mbarrier_wait_parity(rings.dy_free(dy_place.stage), dy_place.parity ^ 1);
                if constexpr (Tuning::dy_rows) {
                    if (thread == 0) copy_dy_rows(dy, batch, tile, rings, stage, chunk, dy_place.stage);
                } else {
                    copy_dy_columns(dy, batch, tile, pixels, stage, chunk, rings.dy(dy_place.stage), thread);
                    landing.commit(rings.dy_full(dy_place.stage), thread);
                }
            }
            mbarrier_wait_parity(rings.x_free(x_place.stage), x_place.parity ^ 1);
            if constexpr (Tuning::x_rows) {
                if (thread == 0) copy_x_rows(x, batch, tile, rings, stage, x_place.stage);
            } else {
                copy_x_columns(x, batch, tile, pixels, rings.x(x_place.stage), thread);
                landing.commit(rings.x_full(x_place.stage), thread);
            }
        }
        landing.finish(thread);
    }
}

}  // namespace leanconv
