// The gradient of the filters as a matrix on tensor cores: its tiles, the share of the pixels that a block sums, and the
// rings between those that copy, convert and multiply.
//
// Rows of the matrix are weights of one filter, in pieces of some channels of one tap; columns are filters. The reduction
// goes over all output pixels, in stages of 64.
#pragma once

#include <device/index.cuh>
#include <device/ptx/cluster.cuh>
#include <device/ptx/mbarrier.cuh>
#include <device/ptx/shared.cuh>
#include <device/pipeline/rings.cuh>
#include <kernels/hopper_fp32/tensor_split.cuh>

namespace leanconv {

// The pixels that the reduction counts, 64 a stage: those of dy. Or, where the `taps` of a filter's row share what is
// converted of x, pixels of x: tap s then multiplies pixel u of x by pixel u + (taps - 1 - s) dilation of dy, so that a stage
// of dy has a window of some pixels more. Rows are made wider for that, with zeros in x or dy, so that what runs over the end
// of a row meets a zero: x has Problem::w columns from `ahead` on, dy those from `lead` on. Of a row of more than three taps
// a tile has a part of `taps`, for which x lies as much further left; what then lies before the row is `ahead` of it.
template <class Problem, class Tuning>
struct WeightGrid {
    static constexpr bool shared = Tuning::taps > 1;
    static_assert(!shared || (Problem::stride_w == 1 && !Problem::chwn), "the taps of a row see neighbouring pixels");
    static constexpr int parts = ceil_div(Problem::s, Tuning::taps);  // of a row of taps
    static constexpr int reach = (Tuning::taps - 1) * Problem::dilation_w;
    static constexpr int last = (parts - 1) * Tuning::taps * Problem::dilation_w;
    static constexpr int ahead = !shared ? 0 : last < Problem::pad_left ? last : Problem::pad_left;
    static constexpr int lead = shared ? reach - Problem::pad_left + ahead : 0;
    static_assert(lead >= 0, "no tap sees only what lies beside the image");
    static constexpr int right_of_x = Problem::w + Problem::pad_left, right_of_dy = lead + Problem::q;
    static constexpr int width = !shared ? Problem::q : right_of_x > right_of_dy ? right_of_x : right_of_dy;
    static constexpr int used = split_depth + reach, window = ceil_div(used, 8) * 8;

    static __device__ __forceinline__ int64 count(long long batch) {
        return static_cast<int64>(batch) * (Problem::p * width);
    }
    // By how many rows of the window tap s sees dy moved.
    static __host__ __device__ constexpr int moved(int s) { return shared ? reach - s * Problem::dilation_w : 0; }
};

// Such a pixel from its number: a row of outputs, and a column.
template <class Problem, class Tuning>
struct GridPixel {
    using Grid = WeightGrid<Problem, Tuning>;
    Offset<Problem> n;
    int p, column;
    __device__ __forceinline__ GridPixel(Offset<Problem> number, long long batch) {
        if constexpr (Grid::shared) {
            n = number / (Problem::p * Grid::width);
            const int rest = static_cast<int>(number - n * (Problem::p * Grid::width));
            p = rest / Grid::width, column = rest % Grid::width;
        } else {
            const Pixel<Problem> pixel(number, batch);
            n = pixel.n, p = pixel.p, column = pixel.q;
        }
    }
    // Where x lies that the first tap sees, or all of a row.
    __device__ __forceinline__ int h() const { return p * Problem::stride_h - Problem::pad_top; }
    __device__ __forceinline__ int w() const {
        return Grid::shared ? column - Grid::ahead : column * Problem::stride_w - Problem::pad_left;
    }
    // Whether dy has it.
    __device__ __forceinline__ bool seen(long long batch) const {
        return n < static_cast<Offset<Problem>>(batch) && static_cast<unsigned>(column - Grid::lead) < Problem::q;
    }
};

template <class Problem, class Tuning>
struct WeightTiles {
    static constexpr int piece = Tuning::piece, chunk = 64, taps = Problem::r * WeightGrid<Problem, Tuning>::parts;
    static constexpr int of_tap = ceil_div(Problem::group_c, piece), all_rows = taps * of_tap * piece;
    static constexpr int rows = 64 * Tuning::warpgroups, filters = chunk * Tuning::chunks;
    static constexpr int of_rows = ceil_div(all_rows, rows), of_filters = ceil_div(Problem::group_k, filters);
    static constexpr int count = of_rows * of_filters * Problem::groups;
    int group, first_row, first_filter;  // the filter in its group

    // Blocks that run side by side read the same pixels.
    __device__ __forceinline__ explicit WeightTiles(int tile)
        : group(tile / (of_rows * of_filters)), first_row(tile / of_filters % of_rows * rows),
          first_filter(tile % of_filters * filters) {}
};

// What a row of the matrix stands for, `tap` being a part of a row of taps where these share x; rows past the last have a tap
// that no filter has.
template <class Problem, class Tuning>
struct WeightRow {
    using Tiles = WeightTiles<Problem, Tuning>;
    int tap, channel;
    __device__ __forceinline__ explicit WeightRow(int row)
        : tap(row / Tiles::piece / Tiles::of_tap), channel(row / Tiles::piece % Tiles::of_tap * Tiles::piece + row % Tiles::piece) {}
    static constexpr int of_row = WeightGrid<Problem, Tuning>::parts;
    __device__ __forceinline__ int down() const { return tap / of_row * Problem::dilation_h; }
    __device__ __forceinline__ int right() const { return tap % of_row * (Tuning::taps * Problem::dilation_w); }
};

// The stages of 64 pixels that a block sums: those of its place among the `parts` x `split` blocks of a tile.
template <class Problem, class Tuning>
struct PartRange {
    int first, end;
    __device__ __forceinline__ PartRange(long long batch, int part) {
        const int64 pixels = WeightGrid<Problem, Tuning>::count(batch);
        const int all = static_cast<int>((pixels + (split_depth - 1)) / split_depth);
        const int share = ceil_div(all, Tuning::parts * Tuning::split);
        const int64 begin = static_cast<int64>(share) *
            (part * Tuning::split + (Tuning::split > 1 ? static_cast<int>(cluster_rank()) : 0));
        first = static_cast<int>(begin < all ? begin : all);
        end = first + share < all ? first + share : all;
    }
};

// Shared memory: x and dy as float32, dy split into high and low halves with the inverse scales of its columns; codes of
// the pixels' factors (tensor_weight_factors.cuh); and barriers for each stage of each ring.
//   in rows: pixels are rows of 32 channels, 128 bytes, swizzled, 64 of them a piece; bulk copies bring them
//   in columns: a weight's, or a filter's, 64 pixels lie together; lanes copy them one by one
template <class Problem, class Tuning>
struct WeightRings {
    using Tiles = WeightTiles<Problem, Tuning>;
    using Grid = WeightGrid<Problem, Tuning>;
    static constexpr int piece_bytes = split_depth * 128, dy_piece_bytes = Grid::window * 128;
    // Columns of x are read 8 bytes a lane, those of dy 16, or 4 where taps share x: all meet each bank once.
    static constexpr int x_pitch = 72, dy_pitch = Grid::shared ? 74 : 68;
    static constexpr int x_bytes = Tiles::rows * (Tuning::x_rows ? split_depth : x_pitch) * 4;
    static constexpr int dy_bytes = Tuning::dy_rows ? Tiles::chunk * Grid::window * 4
                                                    : ceil_div(Tiles::chunk * dy_pitch, 256) * 1024;
    static_assert(x_bytes % 1024 == 0 && dy_bytes % 1024 == 0, "stages begin where swizzle patterns do");
    static_assert(!Tuning::x_rows || Tiles::piece == 32, "a bulk copy brings the 32 channels of a piece");
    static constexpr int half_bytes = Grid::window * Tiles::chunk * 2;
    static constexpr int split_bytes = half_bytes * (Tuning::products == 3 ? 2 : 1);
    // The 16 scales of lane t of four lie 20 t floats further: its four loads meet each bank once.
    static constexpr int scale_pitch = 20, scale_bytes = 4 * 4 * scale_pitch;
    static constexpr int dy_at = Tuning::x_stages * x_bytes, split_at = dy_at + Tuning::dy_stages * dy_bytes;
    static constexpr int scales_at = split_at + Tuning::split_stages * split_bytes;
    // A code a pixel, and the largest and the least that each of up to four warps has found.
    static constexpr int codes_at = scales_at + Tuning::split_stages * scale_bytes, code_bytes = Grid::window + 8;
    static constexpr int code_stages = 16, bytes = codes_at + code_stages * code_bytes;
    static_assert(code_stages > Tuning::dy_stages + Tuning::split_stages + 1,
                  "codes are written anew only when those who read them have freed what came with them");
    static constexpr int producer_warps = 4, converter_warps = 4, consumer_warps = 4 * Tuning::warpgroups;
    // Who finds the codes: two warps of producers who do not copy themselves, a pixel a lane; otherwise the converters.
    static constexpr bool idle = Tuning::x_rows && Tuning::dy_rows;
    static constexpr int scanners = idle ? 2 : converter_warps;
    // Pixels behind the 64 that each of them looks at.
    static constexpr int behind = 8 / scanners;
    static_assert(Grid::window <= split_depth + 8, "so many pixels at most");
    static __device__ __forceinline__ int scanned(int thread) { return idle ? thread : thread / 32 * 16 + thread % 16; }
    unsigned char* base;

    __device__ __forceinline__ WeightRings() : base(shared_memory_for_swizzles()) {}
    __device__ __forceinline__ unsigned char* x(int stage) const { return base + stage * x_bytes; }
    __device__ __forceinline__ unsigned char* dy(int stage) const { return base + dy_at + stage * dy_bytes; }
    __device__ __forceinline__ unsigned char* split(int stage) const { return base + split_at + stage * split_bytes; }
    __device__ __forceinline__ float* scales(int stage) const {
        return reinterpret_cast<float*>(base + scales_at + stage * scale_bytes);
    }
    __device__ __forceinline__ unsigned char* codes(int stage) const { return base + codes_at + stage * code_bytes; }
    __device__ __forceinline__ Mbarrier* x_full(int stage) const { return reinterpret_cast<Mbarrier*>(base + bytes) + stage; }
    __device__ __forceinline__ Mbarrier* x_free(int stage) const { return x_full(Tuning::x_stages) + stage; }
    __device__ __forceinline__ Mbarrier* dy_full(int stage) const { return x_free(Tuning::x_stages) + stage; }
    __device__ __forceinline__ Mbarrier* dy_free(int stage) const { return dy_full(Tuning::dy_stages) + stage; }
    __device__ __forceinline__ Mbarrier* split_full(int stage) const { return dy_free(Tuning::dy_stages) + stage; }
    __device__ __forceinline__ Mbarrier* split_free(int stage) const { return split_full(Tuning::split_stages) + stage; }

    __device__ __forceinline__ Mbarrier* codes_full(int stage) const { return split_free(Tuning::split_stages) + stage; }

    // By one thread, before a barrier of the block.
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < Tuning::x_stages; ++i) {
            mbarrier_init(x_full(i), Tuning::x_rows ? 1 : producer_warps);
            mbarrier_init(x_free(i), consumer_warps);
        }
        for (int i = 0; i < Tuning::dy_stages; ++i) {
            mbarrier_init(dy_full(i), Tuning::dy_rows ? 1 : producer_warps);
            mbarrier_init(dy_free(i), converter_warps + (idle ? scanners : 0));
        }
        for (int i = 0; i < Tuning::split_stages; ++i) {
            mbarrier_init(split_full(i), converter_warps);
            mbarrier_init(split_free(i), consumer_warps);
        }
        for (int i = 0; i < code_stages; ++i) mbarrier_init(codes_full(i), scanners);
        fence_mbarrier_init();
    }
};

}  // namespace leanconv
