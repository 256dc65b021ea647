// The columns of filter rows, as tensor_gemm_sync_col2im multiplies with them, and the launch that writes them.
#pragma once

#include <device/epilogue.cuh>
#include <device/element.cuh>
#include <device/index.cuh>
#include <device/pipeline/filter_layout.cuh>
#include <device/pipeline/split.cuh>

namespace leanconv {

// The columns of the filters and the tile of a block. `taps` are filter rows of a phase (slices, of volumes, times rows).
template <class Problem, class Tuning>
struct Columns {
    using D = Depth<Problem>;
    static constexpr int taps_d = ceil_div(D::t, D::stride), taps_h = ceil_div(Problem::r, Problem::stride_h),
                         taps_w = ceil_div(Problem::s, Problem::stride_w), taps = taps_d * taps_h;
    static constexpr int of_phase = Problem::s * Problem::c, phases = D::stride * Problem::stride_h;
    static constexpr int tiles = ceil_div(phases, Tuning::phases);
    // Where a phase has fewer taps than others, its columns are eights of their own, and products that it lacks are left out.
    static constexpr bool alike = Problem::r % Problem::stride_h == 0 && D::t % D::stride == 0;
    static constexpr int phase_columns = ceil_div(of_phase, alike ? 2 : 8) * (alike ? 2 : 8);
    static_assert(Tuning::phases * phase_columns <= Tuning::mma_n, "a tile has the columns of its phases");
    // Filters are permuted within 16: a filter's column of the tensor core.
    static __device__ __forceinline__ int column_of(int filter) { return filter / 16 * 16 + place_of(filter % 16); }
    // A bit for each phase of a tile that has this tap.
    static __device__ __forceinline__ unsigned having(int n_tile, int tap_d, int tap_h) {
        unsigned bits = 0;
#pragma unroll
        for (int i = 0; i < Tuning::phases; ++i) {
            const int phase = n_tile * Tuning::phases + i;
            const bool has = phase < phases && phase % Problem::stride_h + tap_h * Problem::stride_h < Problem::r &&
                phase / Problem::stride_h + tap_d * D::stride < D::t;
            bits |= (alike || has ? 1u : 0u) << i;
        }
        return bits;
    }
    // Coarse slices, rows and columns: the first, and how many.
    static constexpr int first_d = D::pad / D::stride, first_h = Problem::pad_top / Problem::stride_h,
                         first_w = Problem::pad_left / Problem::stride_w;
    static constexpr int count_d = (D::d - 1 + D::pad) / D::stride - first_d + 1,
                         count_h = (Problem::h - 1 + Problem::pad_top) / Problem::stride_h - first_h + 1,
                         count_w = (Problem::w - 1 + Problem::pad_left) / Problem::stride_w - first_w + 1;
    static constexpr int rows = Tuning::tile_rows, columns = Tuning::tile_columns, whole_columns = columns - taps_w + 1;
    static_assert(columns % 16 == 0 && whole_columns > 0, "a tile has whole columns of dx");
    static constexpr int tiles_h = ceil_div(count_h, rows), tiles_w = ceil_div(count_w, whole_columns);
    static constexpr int threads = 32 * Tuning::warps, m_tiles = Tuning::m_tiles;
    static_assert(rows * columns == 16 * m_tiles * Tuning::warps, "warps share the pixels evenly");

    // What TensorFilters asks of a problem: the columns are its filters, dy's channels its channels.
    static constexpr int groups = 1, group_c = Problem::k, group_k = tiles * Tuning::mma_n, r = taps, s = 1;

    // Pixels of dy in shared memory: a line of `line_units` times 16 bytes each, whose units are permuted so that ldmatrix meets
    // each bank once.
    static constexpr int read_rows = rows + taps_h - 1, pixels = read_rows * columns;
    static constexpr int k_steps = Problem::k > 48 ? 4 : ceil_div(Problem::k, 16), line_units = k_steps == 3 ? 8 : 2 * k_steps;
    // Of the last channels. NOTE: a second loop of so many products spills where sums take most registers.
    static constexpr bool shorter = Problem::k > split_depth && !(Tuning::products == 3 && Tuning::mma_n > 80);
    static constexpr int last_steps = shorter ? ceil_div((Problem::k - 1) % split_depth + 1, 16) : k_steps;
    static constexpr int half_bytes = pixels * line_units * 16;
    static constexpr bool split = !narrow<Problem>, exact = Tuning::products == 3;
    static constexpr int halves = exact ? 2 : 1, chunks = ceil_div(Problem::k, split_depth);
    static __device__ __forceinline__ int unit_at(int pixel, int unit) {
        return (pixel * line_units + (unit ^ pixel * line_units / 8 % line_units)) * 16;
    }
    static constexpr int filters_at = halves * half_bytes;
    using F = TensorFilters<Columns, Tuning>;
    static constexpr int scales_at = filters_at + 2 * F::stage_bytes;  // of pixels
    // Sums between products and col2im: a row of `pitch` floats for each pixel and phase, 8 or 24 banks from the next one, and as
    // many phases at once as there was room for pixels and filters.
    static constexpr int pitch = ceil_div(phase_columns - 8, 16) * 16 + 8, of_sums = rows * columns * pitch;
    static constexpr int room = (scales_at + (split ? 4 * pixels : 0)) / (4 * of_sums);
    static constexpr int phases_at_once = room < 1 ? 1 : room < Tuning::phases ? room : Tuning::phases;
};

// Writes the columns of the filters: of float32 as a layer's filters, channels innermost, which tensor_filters.cuh splits; of 16
// bits in the order of its fragments. A thread an element.
template <class Problem, class Tuning>
__device__ __forceinline__ void column_filters(ElementsIn<Problem> w, ElementsOut<Problem> prepared) {
    using C = Columns<Problem, Tuning>;
    using F = typename C::F;
    constexpr int channels = C::split ? Problem::k : F::tap_blocks * split_depth;
    const int number = static_cast<int>(blockIdx.x) * Tuning::threads + threadIdx.x;
    if (number >= C::group_k * C::taps * channels) return;
    const int k = number % channels, tap = number / channels % C::taps, filter = number / channels / C::taps;
    const int tile = filter / Tuning::mma_n, of_tile = C::column_of(filter % Tuning::mma_n);
    const int phase = tile * Tuning::phases + of_tile / C::phase_columns;
    const int of_phase = of_tile % C::phase_columns, s = of_phase / Problem::c, c = of_phase % Problem::c;
    const int t = phase / Problem::stride_h + tap / C::taps_h * C::D::stride;
    const int r = phase % Problem::stride_h + tap % C::taps_h * Problem::stride_h;
    const bool exists = k < Problem::k && of_tile < Tuning::phases * C::phase_columns && of_phase < C::of_phase && t < C::D::t &&
        r < Problem::r;
    const int64 from = Problem::nhwc
        ? (((static_cast<int64>(k) * C::D::t + t) * Problem::r + r) * Problem::s + s) * Problem::c + c
        : (((static_cast<int64>(k) * Problem::c + c) * C::D::t + t) * Problem::r + r) * Problem::s + s;
    const auto value = exists ? w[from] : typename Problem::element{};
    if constexpr (C::split) {
        prepared[number] = value;
    } else {
        const int stage = tap * F::tap_blocks + k / split_depth, unit = k % split_depth / 8;
        prepared[F::fragment(0, tile, stage, 0) / 2 + of_tile * split_depth + (unit ^ of_tile % 8) * 8 + k % 8] = value;
    }
}

}  // namespace leanconv
