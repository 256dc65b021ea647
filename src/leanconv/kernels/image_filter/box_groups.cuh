// box_groups: what all pixels of a box of r x s make, as box.cuh, by sums of groups of 16 (line_groups.cuh), in one launch.
//
//   h[i, j] = op over v of x[i, j + v - anchor_x]                                                the row pass
//   y[i, j] = delta + w * op over u of h[i + u - anchor_y, j]                                    the column pass
//
// Requires   types as for register_cache; boxes of 17 x 17 and more, whose rows fit into shared memory. Channels one by one.
// Numerics   no difference is taken: a sum of n along an axis is off by at most n / 16 + 32 roundings; as for box.cuh an Inf or
//            a NaN reaches the outputs whose boxes hold it.
// CTA tile   a strip of 16 * groups columns, which it marches down, 16 * row_groups rows in a step; a thread for each column and
//            16 rows.
// Shared     the input rows of a step, once or twice; sums of their groups; a ring of rows of h; sums of groups of these.
// One step   input rows have landed | barrier | sums of their groups | barrier | row pass: a thread makes 16 neighbours, which
//            go into the ring | barrier | copies of the next step's rows are issued | a thread reads the 16 rows that enter
//            its column's windows, keeps their sums | barrier | reads the 16 that leave, stores 16 results.
// Banks      Of group a, vector v lies in place v ^ (a / 2 % 4): eight threads that read the same vector of neighbouring groups
//            meet all banks, and so do 32 neighbouring columns.
// Work       an output takes five operations along an axis, and 36 bytes of shared memory for a box of 127 x 127 in strips of
//            256 columns; s / 256 and r / 256 shared loads besides.
#pragma once

#include <kernels/image_filter/box.cuh>
#include <kernels/image_filter/line_groups.cuh>

namespace leanconv {

// The sizes of a block, from Problem and Tuning (groups, row_groups, buffers).
template <class Problem, class Tuning>
struct GroupTile {
    using T = typename Arithmetic<typename Problem::sum>::type;
    using In = typename InMemory<typename Problem::element, T>::type;
    using Out = typename InMemory<typename Problem::result, T>::type;
    using Border = typename Problem::border;
    using X = Groups<Problem::s>;
    using Y = Groups<Problem::r>;
    static constexpr int planes = Problem::planes, groups = Tuning::groups, row_groups = Tuning::row_groups;
    static constexpr int width = 16 * groups, step = 16 * row_groups, threads = width * row_groups;
    // A row begins `left` places before the strip, at a vector edge of the image.
    static constexpr int left = round_up(Problem::anchor_x, 4), lead = left - Problem::anchor_x;
    static constexpr int enters = lead + X::rest;  // place of the first window's 16 that enter, from 16 * whole on
    static constexpr int row_sums = groups + X::whole;
    static constexpr int input_groups = row_sums - 1 + ceil_div(enters / 4 * 4 + 20, 16);
    static constexpr int input_row = 16 * input_groups, vectors = 4 * input_groups, buffer = step * input_row;
    // Rows of h in groups: those that enter in this step, those that leave, and what lies between.
    static constexpr int ring = Y::whole + row_groups + (Y::rest > 0), kept = Y::whole + row_groups;

    static_assert(Tuning::buffers == 1 || Tuning::buffers == 2, "the next step's rows have a place of their own, or wait");
    static_assert(Problem::channels == 1, "neighbours are of one plane");
};

// Where vector v of group a begins in a row.
__device__ __forceinline__ int vector_place(int a, int v) { return 16 * a + 4 * (v ^ (a / 2 % 4)); }

// 16 neighbours from place 16 * group + offset of a row on.
template <int offset, class T>
__device__ __forceinline__ void load_group(T (&v)[16][1], const T* row, int group) {
    constexpr int lead = offset % 4, vectors = lead == 0 ? 4 : 5;
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
        T four[4];
        const int at = offset / 4 + k;
        load_vector(four, row + vector_place(group + at / 4, at % 4));
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (4 * k + e >= lead && 4 * k + e - lead < 16) v[4 * k + e - lead][0] = four[e];
    }
}

// What all 16 windows from a group on have: of the kept sums of `whole` groups, `apart` words apart in a ring of which `at`
// is the oldest.
template <class Op, class G, int ring, int apart, class T>
__device__ __forceinline__ T middle_of(const T* all, const T* last, int at) {
    const auto wrapped = [](int place) { return ring > 0 && place >= ring ? place - ring : place; };
    T sum{};
    if (!G::middle) return sum;
    sum = (G::begins ? last : all)[wrapped(at + G::first) * apart];
#pragma unroll
    for (int k = G::first + 1; k < G::whole; ++k) sum = Op::of(sum, all[wrapped(at + k) * apart]);
    return sum;
}

// Brings the input rows of a step to shared memory, border and misalignment dealt with on the way.
template <class Problem, class Tuning>
struct GroupRows : GroupTile<Problem, Tuning> {
    using Base = GroupTile<Problem, Tuning>;
    using T = typename Base::T;
    using In = typename Base::In;
    using Border = typename Base::Border;
    static constexpr bool copied = same_type<In, T> && sizeof(T) == 4;

    const Image<In, typename Base::Out, T>& image;
    const int first_row, j;
    const bool whole;  // all elements of a row lie inside the image and on vector edges
    const int* const columns;

    __device__ __forceinline__ GroupRows(const Image<In, typename Base::Out, T>& image_, int first_row_, int j_, int* columns_)
        : image(image_), first_row(first_row_), j(j_),
          whole(Base::planes == 1 && j_ >= Base::left && j_ - Base::left + Base::input_row <= image_.width &&
                aligned(image_.x, image_.x_pitch)),
          columns(columns_) {
        if (whole) return;
        for (int k = threadIdx.x; k < Base::input_row; k += Base::threads)
            columns_[k] = border_index<Border>(j - Base::left + k, image.width);
    }

    // Rows first ... first + step - 1 of the band's input.
    __device__ __forceinline__ void load(T* to, int first) const {
#pragma unroll
        for (int k = 0; k < Base::step * Base::vectors; k += Base::threads) {
            const int n = (k + threadIdx.x) / Base::vectors, vector = (k + threadIdx.x) % Base::vectors;
            if (k + Base::threads > Base::step * Base::vectors && n >= Base::step) continue;
            T* const at = to + n * Base::input_row + vector_place(vector / 4, vector % 4);
            const int i = border_index<Border>(first_row + first + n, image.height);
            const In* const from = image.x + i * image.x_pitch;
            if (whole && (Border::maps_inside || i >= 0)) {
                const In* const source = from + (j - Base::left + 4 * vector);
                if constexpr (copied) {
                    cp_async_16(at, source, true);
                } else {
                    FourElements<In> four;
                    four.load(source);
                    T v[4];
                    four.widen_to(v);
                    store_vector(at, v);
                }
            } else {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int column = whole ? -1 : columns[4 * vector + e];
                    const bool inside = Border::maps_inside || (i >= 0 && column >= 0);
                    if constexpr (copied) {
                        if (inside) cp_async_4(at + e, from + column * Base::planes, true);
                        else at[e] = image.value;
                    } else {
                        at[e] = inside ? widen<T>(from[column * Base::planes]) : image.value;
                    }
                }
            }
        }
        cp_async_commit_group();
    }
};

// Block b computes strip b % strips of band (b / strips) % bands of plane b / strips / bands. `w` is the weight.
template <class Problem, class Tuning>
__device__ __forceinline__ void box_groups(const typename Problem::element* x, const typename Problem::sum* w,
                                           typename Problem::result* y, typename Problem::sum value,
                                           typename Problem::sum delta, int height, int width, int64 x_pitch, int64 x_step,
                                           int64 y_pitch, int64 y_step, int strips, int bands, int band_rows) {
    using S = GroupTile<Problem, Tuning>;
    using T = typename S::T;
    using In = typename S::In;
    using Out = typename S::Out;
    using X = typename S::X;
    using Y = typename S::Y;
    using Op = typename Problem::op;
    constexpr int r = Problem::r, s = Problem::s, planes = S::planes;
    static_assert(0 <= Problem::anchor_y && Problem::anchor_y < r, "the anchor lies inside the box");
    static_assert(0 <= Problem::anchor_x && Problem::anchor_x < s, "the anchor lies inside the box");

    const int rest = blockIdx.x / strips, plane = rest / bands, image = plane / planes;
    const int top = rest % bands * band_rows, j = (blockIdx.x % strips) * S::width;
    const int out_height = Problem::valid ? height - (r - 1) : height;
    const int out_width = Problem::valid ? width - (s - 1) : width;
    const int rows = min(band_rows, out_height - top);
    if (rows <= 0) return;
    const Image<In, Out, T> view{reinterpret_cast<const In*>(x) + image * x_step + plane % planes,
                                 reinterpret_cast<Out*>(y) + image * y_step + plane % planes,
                                 height, width, out_height, out_width, x_pitch, y_pitch, static_cast<T>(value)};
    T* const inputs = reinterpret_cast<T*>(shared_memory());
    T* const ring = inputs + Tuning::buffers * S::buffer;
    T* const row_all = ring + 16 * S::ring * S::width;
    T* const row_last = row_all + S::step * S::row_sums;
    T* const column_all = row_last + S::step * S::row_sums;
    T* const column_last = column_all + S::kept * S::width;
    const GroupRows<Problem, Tuning> source(view, top - Problem::anchor_y, j, reinterpret_cast<int*>(column_last + S::kept * S::width));
    const T weight = reinterpret_cast<const T*>(w)[0];

    // A thread's part of the row pass, and of the column pass.
    const int my_row = threadIdx.x / S::groups, my_group = threadIdx.x % S::groups;
    const int column = threadIdx.x % S::width, my_row_group = threadIdx.x / S::width;
    const int place = vector_place(column / 16, column % 16 / 4) + column % 4;
    // Outputs of group a of the band: rows 16 a ...; into their windows rows 16 (a + whole) + rest ... enter.
    const int groups = ceil_div(rows, 16);
    int first = -Y::whole - (Y::rest > 0);
    // Places of groups: of the step's rows in the ring, of the thread's column sums.
    int slot = 0, kept = my_row_group;
    __syncthreads();  // the columns are there
    source.load(inputs, 16 * first + r - 1);
#pragma unroll 1
    for (int n = 0; first < groups; ++n, first += S::row_groups) {
        const bool more = first + S::row_groups < groups;
        const int next_row = 16 * (first + S::row_groups) + r - 1;
        const T* const input = inputs + (Tuning::buffers == 2 ? n % 2 * S::buffer : 0);
        cp_async_wait_group<0>();
        __syncthreads();  // the rows have landed
        if (Tuning::buffers == 2 && more) source.load(inputs + (n + 1) % 2 * S::buffer, next_row);
#pragma unroll
        for (int k = 0; k < S::step * S::row_sums; k += S::threads) {
            const int task = k + threadIdx.x;
            if (k + S::threads > S::step * S::row_sums && task >= S::step * S::row_sums) continue;
            T v[16][1], all[1], last[1];
            load_group<S::enters>(v, input + task / S::row_sums * S::input_row, task % S::row_sums);
            sums_of<Op, X::rest>(all, last, v);
            row_all[task] = all[0];
            if (X::begins) row_last[task] = last[0];
        }
        __syncthreads();  // the sums of groups are there
        {
            T enters[16][1], leaves[16][1];
            const T* const row = input + my_row * S::input_row;
            load_group<S::enters>(enters, row, my_group + X::whole);
            load_group<S::lead>(leaves, row, my_group);
            const int sums = my_row * S::row_sums;
            const T middle[1] = {middle_of<Op, X, 0, 1>(row_all + sums, row_last + sums, my_group)};
            join<Op, X::middle>(enters, leaves, middle);
            int to = slot + my_row / 16;
            to = (to >= S::ring ? to - S::ring : to) * 16 + my_row % 16;
#pragma unroll
            for (int v = 0; v < 4; ++v) {
                const T four[4] = {enters[4 * v][0], enters[4 * v + 1][0], enters[4 * v + 2][0], enters[4 * v + 3][0]};
                store_vector(ring + to * S::width + vector_place(my_group, v), four);
            }
        }
        __syncthreads();  // the step's rows are in the ring, and all have read the input
        if (Tuning::buffers == 1 && more) source.load(inputs, next_row);
        const int group = first + my_row_group;
        T enters[16][1], all[1], last[1];
        int from = slot + my_row_group;
        from -= from >= S::ring ? S::ring : 0;
#pragma unroll
        for (int e = 0; e < 16; ++e) enters[e][0] = ring[(from * 16 + e) * S::width + place];
        sums_of<Op, Y::rest>(all, last, enters);
        column_all[kept * S::width + column] = all[0];
        if (Y::begins) column_last[kept * S::width + column] = last[0];
        if (S::row_groups > 1) __syncthreads();  // the step's column sums are there
        if (group >= 0 && group < groups) {
            // the oldest kept: of group - whole
            int oldest = kept + S::row_groups;
            oldest -= oldest >= S::kept ? S::kept : 0;
            const T middle[1] = {
                middle_of<Op, Y, S::kept, S::width>(column_all + column, column_last + column, oldest)};
            // Row e of those that leave lies `rest` before row e of a group of the ring, `whole` before what enters.
            int leaving = from + S::ring - Y::whole;
            leaving -= leaving >= S::ring ? S::ring : 0;
            const int before = leaving == 0 ? S::ring - 1 : leaving - 1;
            T leaves[16][1];
#pragma unroll
            for (int e = 0; e < 16; ++e) {
                const int at = e < Y::rest ? before * 16 + 16 - Y::rest + e : leaving * 16 + e - Y::rest;
                leaves[e][0] = ring[at * S::width + place];
            }
            join<Op, Y::middle>(enters, leaves, middle);
            const bool stored = j + column < out_width;
            Out* const to = view.y + (top + 16 * group) * y_pitch + (j + column) * planes;
#pragma unroll
            for (int e = 0; e < 16; ++e) {
                T result = enters[e][0];
                if constexpr (Problem::weighted) result *= weight;
                result += static_cast<T>(delta);
                if (!stored || 16 * group + e >= rows) continue;
                if constexpr (same_type<Out, float>) __stcs(to + e * y_pitch, static_cast<float>(result));
                else to[e * y_pitch] = narrow_sum<Out>(result);
            }
        }
        slot += S::row_groups;
        slot -= slot >= S::ring ? S::ring : 0;
        kept += S::row_groups;
        kept -= kept >= S::kept ? S::kept : 0;
    }
}

}  // namespace leanconv
