// box_scans: what all pixels of a large box make (box.cuh), in one launch: rows by two scans, columns from a ring of rows.
//
//   h[i, j] = op over v of x[i, j + v - anchor_x]                                                the row pass
//   y[i, j] = delta + w * op over u of h[i + u - anchor_y, j]                                    the column pass
//
// Requires   boxes of 33 x 33 and more, wider than a strip; r - 1 filtered rows of a strip fit into shared memory. Channels
//            are filtered one by one.
// Numerics   as box.cuh, no difference is taken: a sum of r x s pixels is off by at most s / 32 + r / 16 + 48 roundings.
// CTA tile   a strip of 32 * columns columns, which it marches down, 16 rows in a step.
// Row pass   a warp makes a row. All windows of a strip hold the place where its outputs end: a window is an end of the
//            strip and a beginning of what lies behind it, so one scan from there to the left and one to the right give all
//            outputs. Lanes have neighbours; the scan to the right is read by other lanes, from shared memory.
// Column     a thread has a column. Windows of 16 rows have groups of 16 rows in common, as in box_passes.cuh: filtered rows
// pass       are read when they enter the windows, and once more when they leave them. The ring has a place for the r - 1
//            rows between: a row that enters is written where one has left.
// One step   row pass, from registers | the next step's rows are on their way | barrier | column pass, then what leaves in the
//            next step is read | barrier
// Edges      strips that reach beyond the image, or are not aligned, load element by element, in whole lines, and exchange
//            these through shared memory.
// Work       an output takes about s / W + 12 operations for its row, W the strip's columns, and 4 shared loads and
//            3 + r / 256 operations for its column. L2 brings 1 + s / W times the image, the memory once.
#pragma once

#include <kernels/image_filter/box_passes.cuh>

namespace leanconv {

// Neighbours of a lane in a row, `count` a lane, from shared or global memory at a multiple of 16 bytes.
template <class T, int count>
__device__ __forceinline__ void load_neighbours(T (&to)[count], const T* row, int lane) {
    row += lane * count;
    if constexpr (count % 4 == 0 && sizeof(T) == 4) {
#pragma unroll
        for (int e = 0; e < count; e += 4) {
            T four[4];
            load_vector(four, row + e);
#pragma unroll
            for (int k = 0; k < 4; ++k) to[e + k] = four[k];
        }
    } else if constexpr (count % 2 == 0 && same_type<T, float>) {
#pragma unroll
        for (int e = 0; e < count; e += 2) {
            const float2 two = *reinterpret_cast<const float2*>(row + e);
            to[e] = two.x, to[e + 1] = two.y;
        }
    } else {
#pragma unroll
        for (int e = 0; e < count; ++e) to[e] = row[e];
    }
}
template <class T, int count>
__device__ __forceinline__ void store_neighbours(T* row, const T (&from)[count], int lane) {
    row += lane * count;
    if constexpr (count % 4 == 0 && sizeof(T) == 4) {
#pragma unroll
        for (int e = 0; e < count; e += 4) {
            const T four[4] = {from[e], from[e + 1], from[e + 2], from[e + 3]};
            store_vector(row + e, four);
        }
    } else if constexpr (count % 2 == 0 && same_type<T, float>) {
#pragma unroll
        for (int e = 0; e < count; e += 2) *reinterpret_cast<float2*>(row + e) = make_float2(from[e], from[e + 1]);
    } else {
#pragma unroll
        for (int e = 0; e < count; ++e) row[e] = from[e];
    }
}

// Scans of a warp's neighbours, in place: what all from each one to the last make, or all from the first to each one.
template <class Op, class T, int count>
__device__ __forceinline__ void scan_to_last(T (&v)[count], int lane) {
#pragma unroll
    for (int e = count - 2; e >= 0; --e) v[e] = Op::of(v[e], v[e + 1]);
    T behind = v[0];  // of this lane and those behind it
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const T more = __shfl_down_sync(0xffffffffu, behind, d);
        if (lane + d < 32) behind = Op::of(behind, more);
    }
    behind = __shfl_down_sync(0xffffffffu, behind, 1);
    if (lane == 31) return;
#pragma unroll
    for (int e = 0; e < count; ++e) v[e] = Op::of(v[e], behind);
}
template <class Op, class T, int count>
__device__ __forceinline__ void scan_from_first(T (&v)[count], int lane) {
#pragma unroll
    for (int e = 1; e < count; ++e) v[e] = Op::of(v[e - 1], v[e]);
    T before = v[count - 1];
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const T more = __shfl_up_sync(0xffffffffu, before, d);
        if (lane >= d) before = Op::of(more, before);
    }
    before = __shfl_up_sync(0xffffffffu, before, 1);
    if (lane == 0) return;
#pragma unroll
    for (int e = 0; e < count; ++e) v[e] = Op::of(before, v[e]);
}

// Block b computes strip b % strips of band (b / strips) % bands of plane b / strips / bands. `w` is the weight.
template <class Problem, class Tuning>
__device__ __forceinline__ void box_scans(const typename Problem::element* x, const typename Problem::sum* w,
                                          typename Problem::result* y, typename Problem::sum value, typename Problem::sum delta,
                                          int height, int width, int64 x_pitch, int64 x_step, int64 y_pitch, int64 y_step,
                                          int strips, int bands, int band_rows) {
    using T = typename Arithmetic<typename Problem::sum>::type;
    using In = typename InMemory<typename Problem::element, T>::type;
    using Out = typename InMemory<typename Problem::result, T>::type;
    using Op = typename Problem::op;
    using Border = typename Problem::border;
    constexpr int r = Problem::r, s = Problem::s, planes = Problem::planes, warps = Tuning::warps;
    // A lane has `columns` neighbours of the strip, and `behind` of the s - 1 columns behind it.
    constexpr int columns = Tuning::columns, strip_width = 32 * columns;
    constexpr int least = ceil_div(s - 1, 32), behind = least > 1 ? round_up(least, 2) : 1;
    constexpr int elements = strip_width + 32 * behind, wider = behind > columns ? behind : columns;
    constexpr int own = 16 / warps;  // rows that a warp makes in a step
    // Strips begin where loads are aligned, `shift` columns further to the left.
    constexpr int shift = round_up(Problem::anchor_x, 4) - Problem::anchor_x;
    // Rows come in groups of 16, so many groups `ahead` of the windows that they leave. What enters windows is the end of one
    // group and the beginning of the next.
    using G = Groups<r>;
    constexpr int ahead = G::whole + (G::rest > 0), ring_rows = 16 * ahead, slots = G::whole + 1;
    static_assert(strip_width < s, "all windows of a strip have a place in common");
    static_assert(16 % warps == 0, "warps make rows by turns");
    static_assert(32 * warps >= strip_width, "a thread has a column");
    static_assert(Problem::channels == 1, "neighbours are of one plane");
    static_assert(0 <= Problem::anchor_y && Problem::anchor_y < r, "the anchor lies inside the box");

    const int warp = warp_number(), lane = threadIdx.x % 32;
    const int rest = blockIdx.x / strips, plane = rest / bands, image = plane / planes;
    const int top = rest % bands * band_rows, j = (blockIdx.x % strips) * strip_width - shift;
    const int out_height = Problem::valid ? height - (r - 1) : height;
    const int out_width = Problem::valid ? width - (s - 1) : width;
    const int rows = min(band_rows, out_height - top), inputs = rows + r - 1;
    if (rows <= 0) return;
    const In* const from = reinterpret_cast<const In*>(x) + image * x_step + plane % planes;
    T* const ring = reinterpret_cast<T*>(shared_memory());
    T* const kept_all = ring + ring_rows * strip_width + threadIdx.x;
    T* const kept_last = kept_all + slots * strip_width;
    T* const scratch = ring + (ring_rows + 2 * slots) * strip_width + warp * 32 * wider;
    int* const column = reinterpret_cast<int*>(ring + (ring_rows + 2 * slots) * strip_width + warps * 32 * wider);

    const int first_column = j - Problem::anchor_x;
    const bool inside = same_type<In, T> && sizeof(T) == 4 && planes == 1 && first_column >= 0 &&
                        first_column + elements <= width && aligned(from, x_pitch);
    if (!inside) {
#pragma unroll 1
        for (int k = threadIdx.x; k < elements; k += 32 * warps) column[k] = border_index<Border>(first_column + k, width);
        __syncthreads();
    }

    // The columns of the strip, and those behind it: of a lane neighbours, or not `inside` 32 apart.
    T before_cut[own][columns], behind_cut[own][behind];
    const auto fetch = [&](int q, int n) {
        const int i = border_index<Border>(top - Problem::anchor_y + n, height);
        const In* const row = from + i * x_pitch;
        if (!Border::maps_inside && i < 0) {
#pragma unroll
            for (int e = 0; e < columns; ++e) before_cut[q][e] = static_cast<T>(value);
#pragma unroll
            for (int e = 0; e < behind; ++e) behind_cut[q][e] = static_cast<T>(value);
            return;
        }
        if constexpr (same_type<In, T> && sizeof(T) == 4) {
            if (inside) {
                load_neighbours(before_cut[q], row + first_column, lane);
                load_neighbours(behind_cut[q], row + first_column + strip_width, lane);
                return;
            }
        }
        const auto element = [&](int k) {
            const int at = column[k];
            return Border::maps_inside || at >= 0 ? widen<T>(row[at * planes]) : static_cast<T>(value);
        };
#pragma unroll
        for (int e = 0; e < columns; ++e) before_cut[q][e] = element(32 * e + lane);
#pragma unroll
        for (int e = 0; e < behind; ++e) behind_cut[q][e] = element(strip_width + 32 * e + lane);
    };
    // A row of the ring from what was fetched.
    const auto filter = [&](T* to, T (&left)[columns], T (&right)[behind]) {
        if (!inside) {
#pragma unroll
            for (int e = 0; e < columns; ++e) scratch[32 * e + lane] = left[e];
            __syncwarp();
            load_neighbours(left, scratch, lane);
            __syncwarp();
#pragma unroll
            for (int e = 0; e < behind; ++e) scratch[32 * e + lane] = right[e];
            __syncwarp();
            load_neighbours(right, scratch, lane);
            __syncwarp();
        }
        scan_to_last<Op>(left, lane);
        scan_from_first<Op>(right, lane);
        store_neighbours(scratch, right, lane);
        __syncwarp();
        T ends[columns];
        constexpr int skipped = s - 1 - strip_width;
        if constexpr (skipped % 4 == 0 || (skipped % 2 == 0 && columns % 4 != 0)) {
            load_neighbours(ends, scratch + skipped, lane);
        } else {
#pragma unroll
            for (int e = 0; e < columns; ++e) ends[e] = scratch[skipped + lane * columns + e];
        }
#pragma unroll
        for (int e = 0; e < columns; ++e) left[e] = Op::of(left[e], ends[e]);
        store_neighbours(to, left, lane);
        __syncwarp();  // `scratch` has been read
    };
    const T weight = reinterpret_cast<const T*>(w)[0];
    const int groups = ceil_div(rows, 16), to_column = j + static_cast<int>(threadIdx.x);
    Out* to = reinterpret_cast<Out*>(y) + image * y_step + plane % planes + top * y_pitch + to_column * planes;
    const bool writes = to_column >= 0 && to_column < out_width;
    T leaves[16][1];
    const auto row_of = [&](int group, int q) { return 16 * group + warp * own + q; };
#pragma unroll
    for (int q = 0; q < own; ++q)
        if (row_of(0, q) < inputs) fetch(q, row_of(0, q));
    int slot = 0, kept = 0;  // of the group of rows, and of the sums of those that enter
#pragma unroll 1
    for (int group = 0; group < groups + ahead; ++group) {
        const int g = group - ahead;  // of windows
#pragma unroll
        for (int q = 0; q < own; ++q)
            if (row_of(group, q) < inputs)
                filter(ring + row_of(slot, q) * strip_width, before_cut[q], behind_cut[q]);
#pragma unroll
        for (int q = 0; q < own; ++q)
            if (row_of(group + 1, q) < inputs) fetch(q, row_of(group + 1, q));
        __syncthreads();  // the step's rows are in the ring
        const int next = slot + 1 == ahead ? 0 : slot + 1;
        if (threadIdx.x < strip_width) {
            if (g >= -G::whole) {
                const T* const here = ring + 16 * slot * strip_width + threadIdx.x;
                const T* const before = ring + 16 * (slot == 0 ? ahead - 1 : slot - 1) * strip_width + threadIdx.x;
                T enters[16][1], all[1], last[1];
#pragma unroll
                for (int e = 0; e < 16; ++e)
                    enters[e][0] = G::rest == 0          ? here[e * strip_width]
                                   : G::rest + e < 16 ? before[(G::rest + e) * strip_width]
                                                      : here[(G::rest + e - 16) * strip_width];
                sums_of<Op, G::rest>(all, last, enters);
                kept_all[kept * strip_width] = all[0];
                if (G::rest > 0) kept_last[kept * strip_width] = last[0];
                const int oldest = kept + 1 == slots ? 0 : kept + 1;
                if (g >= 0) {
                    // From the oldest sums, which are of the last rows alone, to those before this step's.
                    const int from = G::first == 0 || oldest + 1 < slots ? oldest + G::first : 0;
                    T middle[1] = {(G::first == 0 ? kept_last : kept_all)[from * strip_width]};
                    const int end = from < kept ? kept : slots;
#pragma unroll 4
                    for (int k = from + 1; k < end; ++k) middle[0] = Op::of(middle[0], kept_all[k * strip_width]);
                    if (from > kept) {
#pragma unroll 4
                        for (int k = 0; k < kept; ++k) middle[0] = Op::of(middle[0], kept_all[k * strip_width]);
                    }
                    join<Op>(enters, leaves, middle);
#pragma unroll
                    for (int e = 0; e < 16; ++e, to += y_pitch) {
                        if (!writes || 16 * g + e >= rows) continue;
                        T result = enters[e][0];
                        if constexpr (Problem::weighted) result *= weight;
                        *to = narrow_sum<Out>(result + static_cast<T>(delta));
                    }
                }
                kept = oldest;
            }
            if (g >= -1) {
#pragma unroll
                for (int e = 0; e < 16; ++e) leaves[e][0] = ring[(16 * next + e) * strip_width + threadIdx.x];
            }
        }
        slot = next;
        __syncthreads();  // what leaves next has been read
    }
}

}  // namespace leanconv
