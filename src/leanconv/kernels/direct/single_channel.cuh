// single_channel: several filters over images of one channel (Chen et al. 2017, the special case), or over each channel;
// every pixel is read once for all of its filters.
//
//   y[n, k, p, q] = sum over r, s of x[n, k / group_k, p * stride + r * dilation - pad, ...] * w[k, r, s]
//
// Requires   one channel a group, of several groups several filters; NCHW or NHWC; at most 128 taps, whose window fits registers.
// Numerics   float32 FMAs in direct order; float16 and bfloat16 are widened, and rounded once.
// CTA tile   threads / lanes strips of `unit` columns x `rows` rows; filters in shared memory, `rounds` of them one after
//            the other.
// Thread     `unit` adjacent columns; it walks down `rows` rows of outputs, `at_once` at a time. The pixels that these read
//            are a window in registers. Adjacent lanes have adjacent columns, so that a warp stores whole sectors: `unit`
//            is 4 or 2 where rows of outputs keep four or two elements aligned.
// One step   load the rows that the next step adds to the window; for each filter: read its weights, R * S * unit *
//            at_once FMAs, bias, store; move the window down.
//            NCHW: all lanes read the same weights, four of them by a load from shared memory; 5x5 filters on 4 x 2
//            outputs make 200 FMAs on 7 such loads and 2 stores.
//            NHWC: adjacent lanes have adjacent `filters`, and after these adjacent columns: each reads its own weights.
// Registers  width * (height + fresh) pixels, unit * at_once * filters sums, the weights where they are `held`.
// Work       2 * R * S flops for 4 bytes written, and 4 / F read for F filters a channel: writing the outputs bounds
//            filters up to 5x5, FMA issue larger ones.
// Measured   figure: single-channel single_channel/pytorch mean = 3.60
//            figure: single-channel single_channel/pytorch least = 1.19
//            figure: single-channel single_channel tflops only=n4096-k5-f32 = 42.1
#pragma once

#include <device/epilogue.cuh>
#include <device/ptx/memory.cuh>

namespace leanconv {

// What a thread keeps, which pixels it reads, and how filters lie in shared memory.
template <class Problem, class Tuning>
struct SingleChannelShape {
    static constexpr int unit = Tuning::unit, at_once = Tuning::at_once, taps = Problem::r * Problem::s;
    static constexpr int filters = Tuning::filters;
    static constexpr int width = (unit - 1) * Problem::stride_w + (Problem::s - 1) * Problem::dilation_w + 1;
    static constexpr int height = (at_once - 1) * Problem::stride_h + (Problem::r - 1) * Problem::dilation_h + 1;
    // A step moves the window by so many rows: what it keeps, and what is new.
    static constexpr int step = at_once * Problem::stride_h, kept = height > step ? height - step : 0;
    static constexpr int fresh = height - kept;

    // Rows of the image are read in aligned vectors; the first begins `lead` pixels before the window.
    static constexpr int pixel = Problem::nhwc ? Problem::c : 1;
    static constexpr int vector = pixel > 1 ? 1 : gcd(gcd(Problem::w, unit * Problem::stride_w), 4);
    static constexpr int lead = ceil_div(Problem::pad_left, vector) * vector - Problem::pad_left;
    static constexpr int vectors = ceil_div(lead + width, vector);
    static constexpr int last_column = (Problem::q - unit) * Problem::stride_w - Problem::pad_left - lead;
    static constexpr bool checked = Problem::pad_left > 0 || last_column + vectors * vector > Problem::w;

    // With `whole_sectors` each warp has a segment of 32 units to itself, of which it stores only whole sectors of 32 bytes:
    // those that begin in it. Its neighbour computes the `seam` too.
    static constexpr int seam = Tuning::whole_sectors ? 32 / item<Problem> : 0, segment = 32 * unit - seam;
    static constexpr int bands = ceil_div(Problem::p, Tuning::rows);

    // NCHW: filter by filter, each padded to whole vectors, its bias and scale behind its weights. NHWC: tap by tap, those last.
    // A block applies `side` of them at the same time, in `rounds`.
    static constexpr int side = Tuning::lanes * filters, in_block = side * Tuning::rounds;
    static __device__ __forceinline__ int weight(int filter, int tap) {
        return Problem::nhwc ? tap * Problem::filter_pitch + filter : filter * Problem::filter_pitch + tap;
    }

    static_assert(Problem::group_c == 1 && !Problem::chwn, "one channel a group, images outermost");
    static_assert(Problem::q % unit == 0, "units of columns are whole");
    static_assert(Tuning::rows % at_once == 0, "bands have whole steps");
    static_assert(Problem::nhwc ? Problem::group_k % filters == 0 && !Tuning::whole_sectors
                                : filters == 1 && Tuning::lanes == 1,
                  "adjacent outputs of a thread are columns in NCHW, filters of one group in NHWC");
    static_assert(!Problem::nhwc || Problem::groups == 1 || Tuning::rounds == 1, "all filters of a thread read one channel");
    static_assert(!Tuning::held || Tuning::rounds == 1, "a thread holds the weights of one round");
    static_assert(seam % unit == 0 && Tuning::threads % 32 == 0, "units lie in one sector, and segments of rows are a warp's");
    static_assert(Problem::pad_left >= 0, "the layer's own padding");

    // Whether some output reads column `at` of the window; and row `at`, in this step or when it has moved up.
    __host__ __device__ static constexpr bool reads(int at) {
        return reads_place(at, unit, Problem::s, Problem::stride_w, Problem::dilation_w);
    }
    __host__ __device__ static constexpr bool reads_row(int at) {
        for (; at >= 0; at -= step)
            if (reads_place(at, at_once, Problem::r, Problem::stride_h, Problem::dilation_h)) return true;
        return false;
    }
    __host__ __device__ static constexpr bool reads_vector(int number) {
        for (int e = 0; e < vector; ++e) {
            const int at = number * vector + e - lead;
            if (at >= 0 && at < width && reads(at)) return true;
        }
        return false;
    }
};

// A row of the window, whose first pixel is column `column` of the image and lies at `from`: zeros outside the image, and
// everywhere unless the row is `inside` it.
template <class Problem, class Tuning, class Shape = SingleChannelShape<Problem, Tuning>>
__device__ __forceinline__ void load_row(float (&to)[Shape::width], const typename Problem::element* from, int column,
                                         bool inside) {
#pragma unroll
    for (int k = 0; k < Shape::vectors; ++k) {
        if (!Shape::reads_vector(k)) continue;
        const int first = k * Shape::vector - Shape::lead;
        float v[Shape::vector] = {};
        if (inside && (!Shape::checked || static_cast<unsigned>(column + first) < static_cast<unsigned>(Problem::w)))
            load_adjacent(v, from + static_cast<int64>(first) * Shape::pixel);
#pragma unroll
        for (int e = 0; e < Shape::vector; ++e) {
            if (first + e >= 0 && first + e < Shape::width) to[first + e] = v[e];
        }
    }
}

template <class Problem, class Tuning>
__device__ __forceinline__ void single_channel(ElementsIn<Problem> x, ElementsIn<Problem> w, BiasIn<Problem> bias,
                                               ElementsOut<Problem> y, long long batch) {
    using Shape = SingleChannelShape<Problem, Tuning>;
    using T = typename Problem::element;
    constexpr int unit = Shape::unit, at_once = Shape::at_once, filters = Shape::filters, taps = Shape::taps;
    constexpr int height = Shape::height, width = Shape::width, kept = Shape::kept, fresh = Shape::fresh;
    constexpr int threads = Tuning::threads, of_lane = threads / Tuning::lanes;

    // Which filters of which channel; blocks with other filters for the same pixels are neighbours.
    int first_k, count, c;
    int64 positions;
    if constexpr (Problem::nhwc) {
        constexpr int tiles = ceil_div(Problem::k, Shape::in_block);
        first_k = static_cast<int>(blockIdx.x % tiles) * Shape::in_block;
        count = min(Shape::in_block, Problem::k - first_k);
        c = (first_k + static_cast<int>(threadIdx.x) % Tuning::lanes * filters) / Problem::group_k;
        positions = static_cast<int64>(blockIdx.x / tiles) * of_lane + threadIdx.x / Tuning::lanes;
    } else {
        constexpr int tiles = ceil_div(Problem::group_k, Shape::in_block);
        const int tile = blockIdx.x % tiles, rest = blockIdx.x / tiles;
        c = rest % Problem::c;
        first_k = c * Problem::group_k + tile * Shape::in_block;
        count = min(Shape::in_block, Problem::group_k - tile * Shape::in_block);
        positions = static_cast<int64>(rest / Problem::c) * threads + threadIdx.x;
    }
    // Which columns of which band of which image: neighbouring threads have neighbouring columns.
    const int in_row = static_cast<int>(positions % Problem::units), in_segment = in_row % 32 * unit;
    const int first_q = Tuning::whole_sectors ? in_row / 32 * Shape::segment - Shape::seam + in_segment : in_row * unit;
    const int band = static_cast<int>(positions / Problem::units % Shape::bands);
    const int64 n = positions / (static_cast<int64>(Problem::units) * Shape::bands);
    const int mine = Problem::nhwc ? static_cast<int>(threadIdx.x) % Tuning::lanes * filters : 0;
    // Blocks have whole warps, of which some threads may be left over; so may the ends of a row.
    const bool active = n < batch && mine < count && static_cast<int>(threadIdx.x) < of_lane * Tuning::lanes &&
        static_cast<unsigned>(first_q) < static_cast<unsigned>(Problem::q);
    const int first_p = band * Tuning::rows;
    const int last_p = min(first_p + Tuning::rows, Problem::p);
    const int column = first_q * Problem::stride_w - Problem::pad_left;
    constexpr int64 pixel = Shape::pixel, row_step = Problem::w * pixel;
    const T* const image =
        x + (Problem::nhwc ? n * Problem::h * row_step + c : (n * Problem::c + c) * Problem::h * row_step) + column * pixel;
    constexpr int64 out_pixel = Problem::nhwc ? Problem::k : 1, out_row = Problem::q * out_pixel;
    constexpr int64 out_filter = Problem::nhwc ? 1 : Problem::p * out_row;
    T* result = y + (Problem::nhwc ? n * Problem::p * out_row + first_k + mine : (n * Problem::k + first_k) * out_filter) +
        first_p * out_row + first_q * out_pixel;

    // Row `at` of the window for outputs p and on; zeros outside the image.
    const auto load = [&](float(&to)[width], int p, int at, bool needed) {
        const int i = p * Problem::stride_h - Problem::pad_top + at;
        const bool inside = needed && static_cast<unsigned>(i) < static_cast<unsigned>(Problem::h);
        load_row<Problem, Tuning>(to, image + i * row_step, column, inside);
    };
    float window[height][width];
#pragma unroll
    for (int i = 0; i < height; ++i)
        if (Shape::reads_row(i)) load(window[i], first_p, i, active);

    // The filters come while the first rows are in flight.
    float* const weights = reinterpret_cast<float*>(shared_memory());
#pragma unroll 1
    for (int i = threadIdx.x; i < count * taps; i += threads)
        weights[Shape::weight(i / taps, i % taps)] = to_float(w[static_cast<int64>(first_k) * taps + i]);
    constexpr int scale_at = taps + Problem::bias;
    if constexpr (Problem::scale || (Problem::bias && Problem::add)) {
#pragma unroll 1
        for (int i = threadIdx.x; i < count; i += threads) {
            const Term<Problem> term = term_of<Problem>(bias, first_k + i);
            if constexpr (!Problem::scale) {
                weights[Shape::weight(i, taps)] = term;
            } else {
                if (Problem::bias) weights[Shape::weight(i, taps)] = term.bias;
                weights[Shape::weight(i, scale_at)] = term.scale;
            }
        }
    } else if constexpr (Problem::bias) {
#pragma unroll 1
        for (int i = threadIdx.x; i < count; i += threads) weights[Shape::weight(i, taps)] = to_float(bias[first_k + i]);
    }
    __syncthreads();
    if (!active) return;

    // Weights of one filter, or of the thread's adjacent ones.
    constexpr int held_taps = Problem::nhwc ? taps : ceil_div(taps, 4) * 4;
    const auto read_filter = [&](float(&filter)[held_taps][filters], int round) {
        if constexpr (Problem::nhwc) {
#pragma unroll
            for (int i = 0; i < taps; ++i) load_adjacent(filter[i], weights + Shape::weight(round * Shape::side + mine, i));
        } else {
#pragma unroll
            for (int i = 0; i < taps; i += 4) {
                float four[4];
                load_vector(four, weights + Shape::weight(round, i));
#pragma unroll
                for (int e = 0; e < 4; ++e) filter[i + e][0] = four[e];
            }
        }
    };

    float filter[held_taps][filters];
    if constexpr (Tuning::held) read_filter(filter, 0);
    const int rounds = Tuning::held ? 1 : ceil_div(count - mine, Shape::side);

#pragma unroll 1
    for (int p = first_p; p < last_p; p += at_once, result += at_once * out_row) {
        float next[fresh][width];
        const auto load_next = [&] {
#pragma unroll
            for (int i = 0; i < fresh; ++i)
                if (Shape::reads_row(kept + i)) load(next[i], p + at_once, kept + i, p + at_once < last_p);
        };
        if constexpr (Tuning::prefetch) load_next();
        T* to = result;
#pragma unroll 1
        for (int round = 0; round < rounds; ++round, to += Shape::side * out_filter) {
            if constexpr (!Tuning::held) {
                // NOTE: without this the compiler reads the weights of a single round before the loop over rows, and spills.
                asm volatile("" ::: "memory");
                read_filter(filter, round);
            }
            float sum[at_once][unit][filters] = {};
#pragma unroll
            for (int r = 0; r < Problem::r; ++r)
#pragma unroll
                for (int s = 0; s < Problem::s; ++s)
#pragma unroll
                    for (int t = 0; t < at_once; ++t)
#pragma unroll
                        for (int u = 0; u < unit; ++u)
#pragma unroll
                            for (int f = 0; f < filters; ++f)
                                sum[t][u][f] = fmaf(
                                    filter[r * Problem::s + s][f],
                                    window[t * Problem::stride_h + r * Problem::dilation_h]
                                          [u * Problem::stride_w + s * Problem::dilation_w],
                                    sum[t][u][f]);
            constexpr int adjacent = Problem::nhwc ? filters : unit;
            float b[filters] = {}, scale[filters];
            if constexpr (Problem::bias) load_adjacent(b, weights + Shape::weight(round * Shape::side + mine, taps));
            if constexpr (Problem::scale) load_adjacent(scale, weights + Shape::weight(round * Shape::side + mine, scale_at));
#pragma unroll
            for (int t = 0; t < at_once; ++t) {
                if (at_once > 1 && p + t >= last_p) continue;
                if constexpr (Tuning::whole_sectors) {
                    // of the warp's segment, the elements before the first sector that begins in it
                    const unsigned address = static_cast<unsigned>(reinterpret_cast<unsigned long long>(to + t * out_row));
                    const unsigned before = (in_segment - address / item<Problem>) % Shape::seam;
                    if (in_segment - before >= static_cast<unsigned>(Shape::segment)) continue;
                }
#pragma unroll
                for (int first = 0; first < (Problem::nhwc ? unit : 1); ++first) {
                    T* const place = to + t * out_row + first * out_pixel;
                    T v[adjacent];
#pragma unroll
                    for (int e = 0; e < adjacent; ++e) {
                        const int u = Problem::nhwc ? first : e, f = Problem::nhwc ? e : 0;
                        const auto held = [&] { return held_by<Problem>(bias, place + e, true); };
                        if constexpr (Problem::scale)
                            v[e] = from_float<T>(finish<Problem>(sum[t][u][f], {b[f], scale[f]}, held()));
                        else v[e] = from_float<T>(finish<Problem>(sum[t][u][f], b[f], held()));
                    }
                    store_adjacent(place, v);
                }
            }
        }
        if constexpr (!Tuning::prefetch) load_next();
        // the window moves down
#pragma unroll
        for (int i = 0; i < height; ++i) {
            if (!Shape::reads_row(i)) continue;
#pragma unroll
            for (int k = 0; k < width; ++k)
                if (Shape::reads(k)) window[i][k] = i < kept ? window[i + Shape::step][k] : next[i - kept][k];
        }
    }
}

}  // namespace leanconv
