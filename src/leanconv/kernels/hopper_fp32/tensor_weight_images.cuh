// tensor_weight_images: gradient of the filters on Hopper tensor cores where images are small and many; a stage is a pixel of each.
//
//   dw[k, tap, c] = sum over pixels of x[pixel + tap, c] * dy[pixel, k]        as tensor_weight, without products of padding
//
// Requires   sm_90a; NHWC; channels and filters of a group in multiples of 4, at least 16; at least 16 images; s > 1.
// Numerics   as tensor_weight.
// CTA tile   128 channels x the taps of a filter's row x 64 filters. A stage of x has one pixel of `image_rows` rows (1, 2 or 4) of
//            64 / `image_rows` images, and so has one of dy: column w of x is multiplied with columns w + pad - s of dy. Each
//            column of dy is converted once for a row of outputs, and stays in shared memory until the last tap has read it.
//            Padding is never read, converted or multiplied: of 3x3 filters over 2x2 pixels 16 products are left of 36, over 4x4
//            100 of 144, over 8x8 484 of 576.
// Work       a unit is `image_rows` rows of outputs (or a segment of them) of 64 / `image_rows` images for one tile; the units of
//            all tiles are one line, of which all blocks have equal shares. A block's sums of a tile go to slot block + tile of a
//            workspace; a second launch adds the slots of each tile in their order. With more tiles than blocks, a block has two
//            slots, and the tiles between its first and its last go to the gradient at once (`direct`).
// Roles      as tensor_weight; the consumers have a ping-pong schedule, a tap at a time.
// Measured   figure: opencnn-nhwc-wgrad tensor_weight_images/pytorch mean = 1.83
//            figure: opencnn-nhwc-wgrad tensor_weight_images/tensor_weight mean = 1.20 (which has no workspace there)
//            figure: opencnn-nhwc-wgrad tensor_weight_images/tensor_weight-split-K mean = 0.84 (which has one, too)
// Explored (H200, 45bf8f2): a stage of x with three taps takes some 5500 cycles; 4700 in tensor_weight, whose taps look
//            for no column.
#pragma once

#include <kernels/hopper_fp32/tensor_weight.cuh>

namespace leanconv {

// The tuning as tensor_weight's rings and conversions know it: a stage of one tap.
template <class Tuning>
struct ImageStages : Tuning {
    static constexpr int taps = 1, n_tiles = 1, channel_block = 32, row_pitch = 0, x_lead = 0, dy_lead = 0;
    static constexpr bool x_tma = true, dy_tma = true, ping_pong = true;
};

template <int stages>
__device__ __forceinline__ RingPlace<stages> ring_place(unsigned number) {
    RingPlace<stages> place;
    place.stage = static_cast<int>(number % stages), place.parity = number / stages & 1;
    return place;
}

// How tiles and units are counted: the tiles of a row of taps follow each other, `of_row` of them.
template <class Problem, class Tuning>
struct ImageUnits {
    static constexpr int taps = Tuning::taps, filters = 64;
    static constexpr int rows = 64 * Tuning::warpgroups;  // of the matrix: channels
    static constexpr int of_channels = ceil_div(Problem::group_c, rows), of_filters = ceil_div(Problem::group_k, filters);
    static constexpr int of_taps = ceil_div(Problem::s, taps), of_row = of_taps * of_channels * of_filters * Problem::groups;
    static constexpr int of_stage = split_depth / Tuning::image_rows;  // images of a stage
    int images, share;  // blocks of images; units of a block

    __device__ __forceinline__ explicit ImageUnits(long long batch)
        : images(static_cast<int>((batch + of_stage - 1) / of_stage)) {
        int all = 0;
#pragma unroll
        for (int r = 0; r < Problem::r; ++r) all += units_of(r) * of_row;
        share = ceil_div(all, Tuning::blocks);
    }
    // Rows of outputs for which the taps of row r lie inside the image.
    static __device__ __forceinline__ int first_inside(int r) {
        const int above = Problem::pad_top - r * Problem::dilation_h;
        return above > 0 ? ceil_div(above, Problem::stride_h) : 0;
    }
    static __device__ __forceinline__ int rows_inside(int r) {
        const int last = Problem::h - 1 + Problem::pad_top - r * Problem::dilation_h;
        const int end = last < 0 ? 0 : last / Problem::stride_h + 1;
        return max(0, min(end, Problem::p) - first_inside(r));
    }
    // Stages that have them all, and the first one's first row.
    // NOTE: surplus rows of a stage are rows of dy outside x (zeros), not the reverse: x might be infinite there.
    static __device__ __forceinline__ int stages_of(int r) { return ceil_div(rows_inside(r), Tuning::image_rows); }
    static __device__ __forceinline__ int first_p(int r) {
        const int more = stages_of(r) * Tuning::image_rows - rows_inside(r), first = first_inside(r);
        return first < more ? first : first - more;
    }
    // Units of a tile of row r.
    __device__ __forceinline__ int units_of(int r) const { return stages_of(r) * (images * Tuning::segments); }
    __device__ __forceinline__ int units_before(int r) const {
        int before = 0;
        for (int other = 0; other < r; ++other) before += units_of(other) * of_row;
        return before;
    }
};

// What a tile computes.
template <class Problem, class Tuning>
struct ImageTile {
    using Units = ImageUnits<Problem, Tuning>;
    int number, r, first_tap, first_channel, first_filter, group;  // channel and filter in their group

    __device__ __forceinline__ explicit ImageTile(int number)
        : number(number), r(number / Units::of_row),
          first_tap(number / (Units::of_filters * Units::of_channels) % Units::of_taps * Units::taps),
          first_channel(number / Units::of_filters % Units::of_channels * Units::rows),
          first_filter(number % Units::of_filters * Units::filters),
          group(number % Units::of_row / (Units::of_filters * Units::of_channels * Units::of_taps)) {}

    // The column of dy that a tap multiplies with column w of x, negative where there is none.
    __device__ __forceinline__ int dy_column(int w, int tap) const {
        const int s = first_tap + tap, at = w + Problem::pad_left - s * Problem::dilation_w;
        if (s >= Problem::s || at < 0 || at % Problem::stride_w != 0 || at / Problem::stride_w >= Problem::q) return -1;
        return at / Problem::stride_w;
    }
    // Whether any tap reads column w of x.
    __device__ __forceinline__ bool is_read(int w) const {
        bool any = false;
#pragma unroll
        for (int tap = 0; tap < Units::taps; ++tap) any |= dy_column(w, tap) >= 0;
        return any;
    }
    // The last column of dy that is multiplied with columns of x up to w.
    __device__ __forceinline__ int last_dy_column(int w) const {
        const int at = w + Problem::pad_left - first_tap * Problem::dilation_w;
        return at < 0 ? -1 : at / Problem::stride_w;
    }
    // And the first one with columns of x from w on.
    __device__ __forceinline__ int first_dy_column(int w) const {
        const int at = w + Problem::pad_left - (first_tap + Units::taps - 1) * Problem::dilation_w;
        return at <= 0 ? 0 : min(ceil_div(at, Problem::stride_w), Problem::q);
    }
};

// The columns of a unit: of x from w on, and of dy from q on, which are multiplied with them.
template <class Problem, class Tuning>
struct ImageColumns {
    int w, w_end, q, q_end;
    __device__ __forceinline__ ImageColumns(const ImageTile<Problem, Tuning>& tile, int segment) {
        constexpr int each = ceil_div(Problem::w, Tuning::segments);
        w = min(segment * each, Problem::w), w_end = min(w + each, Problem::w);
        q = tile.first_dy_column(w), q_end = w == w_end ? q : max(q, min(tile.last_dy_column(w_end - 1) + 1, Problem::q));
    }
    __device__ __forceinline__ int stages() const { return q_end - q; }
};

// A block's units of one tile, from `unit` on.
template <class Problem, class Tuning>
struct ImageRun {
    using Units = ImageUnits<Problem, Tuning>;
    int number, start, end, stages, first_p;  // the tile; its first unit; where it ends, or the block's share
    bool whole;                               // whether the block has all of the tile

    __device__ __forceinline__ ImageRun(const Units& units, int unit, int last) {
        int r = 0, before = 0;
#pragma unroll 1
        for (; r + 1 < Problem::r; ++r) {
            const int all = units.units_of(r) * Units::of_row;
            if (unit < before + all) break;
            before += all;
        }
        const int each = units.units_of(r), of_row = (unit - before) / each;
        number = r * Units::of_row + of_row;
        start = before + of_row * each;
        end = min(start + each, last), whole = unit == start && end == start + each;
        stages = Units::stages_of(r), first_p = Units::first_p(r);
    }
    __device__ __forceinline__ int p(int unit) const {
        return first_p + (unit - start) / Tuning::segments % stages * Tuning::image_rows;
    }
    __device__ __forceinline__ int segment(int unit) const { return (unit - start) % Tuning::segments; }
    // The first image.
    __device__ __forceinline__ int image(int unit) const {
        return (unit - start) / (stages * Tuning::segments) * Units::of_stage;
    }
};

// One thread's copies: of x, or of dy.
template <class Problem, class Tuning>
__device__ __forceinline__ void copy_images_of_x(const TensorMap& x, const ImageUnits<Problem, Tuning>& units,
                                                 const WeightRings<Problem, ImageStages<Tuning>>& rings, int first, int last) {
    using Rings = WeightRings<Problem, ImageStages<Tuning>>;
    RingPlace<Tuning::x_stages> place;
    for (int unit = first; unit < last;) {
        const ImageRun<Problem, Tuning> run(units, unit, last);
        const ImageTile<Problem, Tuning> tile(run.number);
        for (; unit < run.end; ++unit) {
            const int h = run.p(unit) * Problem::stride_h - Problem::pad_top + tile.r * Problem::dilation_h;
            const int channel = tile.group * Problem::group_c + tile.first_channel;
            const ImageColumns<Problem, Tuning> columns(tile, run.segment(unit));
            for (int w = columns.w; w < columns.w_end; ++w) {
                if (!tile.is_read(w)) continue;
                Mbarrier* const full = rings.x_full(place.stage);
                mbarrier_wait_parity(rings.x_empty(place.stage), place.parity ^ 1);
                mbarrier_arrive_expect_tx(full, Rings::x_bytes);
                for (int i = 0; i < Rings::x_bytes / Rings::x_box_bytes; ++i)
                    cp_async_bulk_tensor_shared_global(rings.x(place.stage) + i * Rings::x_box_bytes, x, full, channel + 32 * i,
                                                       w, h, run.image(unit));
                place.advance();
            }
        }
    }
}

template <class Problem, class Tuning>
__device__ __forceinline__ void copy_images_of_dy(const TensorMap& dy, const ImageUnits<Problem, Tuning>& units,
                                                  const WeightRings<Problem, ImageStages<Tuning>>& rings, int first, int last) {
    using Rings = WeightRings<Problem, ImageStages<Tuning>>;
    RingPlace<Tuning::dy_stages> place;
    for (int unit = first; unit < last;) {
        const ImageRun<Problem, Tuning> run(units, unit, last);
        const ImageTile<Problem, Tuning> tile(run.number);
        for (; unit < run.end; ++unit) {
            const ImageColumns<Problem, Tuning> columns(tile, run.segment(unit));
            for (int q = columns.q; q < columns.q_end; ++q, place.advance()) {
                Mbarrier* const full = rings.dy_full(place.stage);
                mbarrier_wait_parity(rings.dy_empty(place.stage), place.parity ^ 1);
                mbarrier_arrive_expect_tx(full, Rings::dy_bytes);
                for (int i = 0; i < 2; ++i)
                    cp_async_bulk_tensor_shared_global(rings.dy(place.stage) + i * Rings::dy_box_bytes, dy, full,
                                                       tile.group * Problem::group_k + tile.first_filter + 32 * i, q,
                                                       run.p(unit), run.image(unit));
            }
        }
    }
}

// Two warps find the factors of each stage's images.
template <class Problem, class Tuning>
__device__ __forceinline__ void scan_images(const ImageUnits<Problem, Tuning>& units,
                                            const WeightRings<Problem, ImageStages<Tuning>>& rings, int first, int last,
                                            int thread) {
    using Rings = WeightRings<Problem, ImageStages<Tuning>>;
    RingPlace<Tuning::dy_stages> place;
    RingPlace<Rings::code_stages> to;
#pragma unroll 1
    for (int unit = first; unit < last;) {
        const ImageRun<Problem, Tuning> run(units, unit, last);
        const ImageTile<Problem, Tuning> tile(run.number);
        for (; unit < run.end; ++unit) {
            const int stages = ImageColumns<Problem, Tuning>(tile, run.segment(unit)).stages();
#pragma unroll 1
            for (int i = 0; i < stages; ++i, place.advance(), to.advance()) {
                find_codes(rings, tile.first_filter, place, 0, 0, to.stage, thread);
                mbarrier_arrive_warp(rings.dy_empty(place.stage), thread % 32);
            }
        }
    }
}

// The converters: 128 threads.
template <class Problem, class Tuning>
__device__ __forceinline__ void split_images(const ImageUnits<Problem, Tuning>& units,
                                             const WeightRings<Problem, ImageStages<Tuning>>& rings, int first, int last,
                                             int thread) {
    using Rings = WeightRings<Problem, ImageStages<Tuning>>;
    RingPlace<Tuning::dy_stages> dy_place;
    RingPlace<Tuning::split_stages> place;
    RingPlace<Rings::code_stages> code_place;
    SplitRows<Problem, ImageStages<Tuning>> values(thread);
#pragma unroll 1
    for (int unit = first; unit < last;) {
        const ImageRun<Problem, Tuning> run(units, unit, last);
        const ImageTile<Problem, Tuning> tile(run.number);
        for (; unit < run.end; ++unit) {
            const int stages = ImageColumns<Problem, Tuning>(tile, run.segment(unit)).stages();
#pragma unroll 1
            for (int i = 0; i < stages; ++i, dy_place.advance(), place.advance(), code_place.advance()) {
                const PixelFactors<Problem, ImageStages<Tuning>> factors(rings, code_place);
                convert_dy(values, rings, factors, dy_place, place, thread);
            }
        }
    }
}

// Stores four sums of a thread, two channels of two filters: number `i` of the fours of all its taps.
template <class Problem, class Tuning>
__device__ __forceinline__ void store_image_sums(float* dw, const ImageTile<Problem, Tuning>& tile, int warpgroup, int i,
                                                 int thread, const float (&sums)[4]) {
    const int s = tile.first_tap + i / 8;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const int channel = tile.first_channel + warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4 * 2 + j / 2;
        const int in_group = tile.first_filter + i % 8 * 8 + thread % 4 * 2 + j % 2;
        if (s >= Problem::s || channel >= Problem::group_c || in_group >= Problem::group_k) continue;
        const int64 k = tile.group * Problem::group_k + in_group;
        float* const to = dw + ((k * Problem::r + tile.r) * Problem::s + s) * Problem::group_c + channel;
        *to = finish<Problem>(sums[j], 0.0f, held_by<Problem>(to, true));
    }
}

// One consumer warpgroup: the products of all units of the block.
// NOTE: it waits once for each column of dy, and looks once at its factors, not once for each tap.
template <class Problem, class Tuning>
__device__ __forceinline__ void sum_images(float* workspace, float* dw, const ImageUnits<Problem, Tuning>& units,
                                           const WeightRings<Problem, ImageStages<Tuning>>& rings, int first, int last,
                                           int warpgroup) {
    using Stages = ImageStages<Tuning>;
    using Rings = WeightRings<Problem, Stages>;
    constexpr int taps = Tuning::taps, reach = (taps - 1) * Problem::dilation_w / Problem::stride_w + 1;
    static_assert(Tuning::split_stages > reach,
                  "the ring has all columns of dy that a column of x meets, and one that is being converted");
    static_assert((Tuning::split_stages & (Tuning::split_stages - 1)) == 0, "places in the ring are found without a division");
    const int lane = threadIdx.x % 32, t = lane % 4, row = row_of_thread<Stages>(warpgroup);
    unsigned dy_number = 0;  // of the first column of the unit, among all that the block has
    RingPlace<Tuning::x_stages> x_place;
    float sums[taps][32];
    const PingPongOf<Stages> ping_pong(warpgroup);
#pragma unroll 1
    for (int unit = first; unit < last;) {
        const ImageRun<Problem, Tuning> run(units, unit, last);
        const ImageTile<Problem, Tuning> tile(run.number);
        const int block = static_cast<int>(blockIdx.x);
        const int place = Tuning::direct ? 2 * block + (unit > first) : block + run.number;
#pragma unroll
        for (int i = 0; i < 32 * taps; ++i) sums[i / 32][i % 32] = 0.0f;
#pragma unroll 1
        for (; unit < run.end; ++unit) {
            const ImageColumns<Problem, Tuning> columns(tile, run.segment(unit));
            // Columns of dy before these have been released, have been waited for, have had their factors looked at.
            int released = columns.q, waited = released, looked = released;
            unsigned apart = 0;  // whether factors stand between x and the columns looked at, the last one in bit 0
            const auto number_of = [&](int q) { return dy_number + (q - columns.q); };
            const auto wait_for = [&](int q) {
                if (q < waited) return;
                const auto place = ring_place<Tuning::split_stages>(number_of(q));
                mbarrier_wait_parity(rings.split_full(place.stage), place.parity);
                waited = q + 1;
            };
            const auto release_until = [&](int end) {
                for (; released < end; ++released) {
                    wait_for(released);
                    __syncwarp();
                    if (lane == 0) mbarrier_arrive(rings.split_empty(number_of(released) % Tuning::split_stages));
                }
            };
            const auto factors_of = [&](int q) {
                return PixelFactors<Problem, Stages>(rings, ring_place<Rings::code_stages>(number_of(q)));
            };
#pragma unroll 1
            for (int w = columns.w; w < columns.w_end; ++w) {
                if (!tile.is_read(w)) continue;
                release_until(tile.first_dy_column(w));
                for (const int end = min(tile.last_dy_column(w) + 1, columns.q_end); looked < end; ++looked)
                    apart = apart << 1 | static_cast<unsigned>(factors_of(looked).apart);
                // Where factors of images stand between x and one of the columns, x is converted anew for each.
                const bool anew = (apart & ((1u << reach) - 1)) != 0;
                const unsigned char* const x = rings.x(x_place.stage);
                mbarrier_wait_parity(rings.x_full(x_place.stage), x_place.parity);
                WeightFragments<Problem, Stages> weights;
                // NOTE: as in tensor_weight.cuh.
                const int fresh = row + zero_after(static_cast<unsigned>(w));
                if (!anew) weights.load_unscaled(x, fresh, t);
                bool held = true;
                float partial[32];
#pragma unroll
                for (int tap = taps - 1; tap >= 0; --tap) {
                    const int q = tile.dy_column(w, tap);
                    if (q < 0) continue;
                    if (anew) weights.load(x, factors_of(q), row, t);
                    wait_for(q);
                    const int stage = static_cast<int>(number_of(q) % Tuning::split_stages);
                    ping_pong.wait();
                    wgmma_fence(partial, weights.high, weights.low);
                    multiply_weights(partial, weights, rings.split(stage));
                    wgmma_commit_group();
                    ping_pong.pass(false);
                    if (held && !anew) {
                        warp_arrive(rings.x_empty(x_place.stage), lane);
                        held = false;
                    }
                    wgmma_wait_group<0>(partial, weights.high, weights.low);
                    promote_scaled(sums[tap], partial, weights.inverse_scale, rings.scales(stage) + t * Rings::scale_pitch);
                }
                if (held) warp_arrive(rings.x_empty(x_place.stage), lane);
                x_place.advance();
            }
            release_until(columns.q_end);
            dy_number += columns.stages();
        }
        float4* const slot = reinterpret_cast<float4*>(workspace) +
                             (static_cast<int64>(place) * Tuning::warpgroups + warpgroup) * (taps * 8 * 128);
#pragma unroll
        for (int i = 0; i < 8 * taps; ++i) {
            const float(&from)[32] = sums[i / 8];
            const int j = i % 8 * 4;
            if (Tuning::direct && run.whole) {
                const float four[4] = {from[j], from[j + 1], from[j + 2], from[j + 3]};
                store_image_sums(dw, tile, warpgroup, i, static_cast<int>(threadIdx.x) % 128, four);
                continue;
            }
            slot[i * 128 + threadIdx.x % 128] = make_float4(from[j], from[j + 1], from[j + 2], from[j + 3]);
        }
    }
    // The turn after the very last.
    if (warpgroup == 0) ping_pong.wait();
}

// The first launch: sums of each block's units, to slots of the workspace.
template <class Problem, class Tuning>
__device__ __forceinline__ void tensor_weight_images(const TensorMap& x, const TensorMap& dy, float* workspace, float* dw,
                                                     long long batch) {
    static_assert(Tuning::converter_registers <= 65536 / (128 * (Tuning::warpgroups + 2)) / 8 * 8,
                  "setmaxnreg.dec is no legal instruction for more registers than a thread has");
    const WeightRings<Problem, ImageStages<Tuning>> rings;
    if (threadIdx.x == 0) rings.init();
    __syncthreads();
    const ImageUnits<Problem, Tuning> units(batch);
    const int all = units.units_before(Problem::r), first = min(static_cast<int>(blockIdx.x) * units.share, all);
    const int last = min(first + units.share, all);
    const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
    if (warpgroup < Tuning::warpgroups) {
        set_registers_up<Tuning::consumer_registers>();
        sum_images<Problem, Tuning>(workspace, dw, units, rings, first, last, warpgroup);
    } else if (warpgroup == Tuning::warpgroups) {
        set_registers_down<Tuning::converter_registers>();
        split_images<Problem, Tuning>(units, rings, first, last, thread);
    } else {
        set_registers_down<Tuning::producer_registers>();
        if (thread == 0) copy_images_of_x<Problem, Tuning>(x, units, rings, first, last);
        else if (thread == 32) copy_images_of_dy<Problem, Tuning>(dy, units, rings, first, last);
        else if (thread >= 64) scan_images<Problem, Tuning>(units, rings, first, last, thread - 64);
    }
}

// The second: the slots of each tile, in their order. A block's `sum_groups` of threads add every so many-th of them, then the
// first group adds what all have.
template <class Problem, class Tuning>
__device__ __forceinline__ void sum_image_slots(const float* __restrict__ workspace, float* __restrict__ dw, long long batch) {
    using Units = ImageUnits<Problem, Tuning>;
    constexpr int taps = Tuning::taps, groups = Tuning::sum_groups, threads = 256 / groups;
    constexpr int of_warpgroup = taps * 8 * 128, of_tile = of_warpgroup * Tuning::warpgroups;
    static_assert(of_tile % threads == 0, "blocks divide tiles");
    constexpr int blocks = of_tile / threads;
    const ImageTile<Problem, Tuning> tile(static_cast<int>(blockIdx.x) / blocks);
    const Units units(batch);
    const int own = static_cast<int>(blockIdx.x) % blocks * threads + static_cast<int>(threadIdx.x) % threads;
    const int group = static_cast<int>(threadIdx.x) / threads, each = units.units_of(tile.r);
    const int start = units.units_before(tile.r) + tile.number % Units::of_row * each;
    const int first = start / units.share, last = each > 0 ? (start + each - 1) / units.share : first - 1;
    // A tile that one block had all of is there already. Of the others the first block may have had one before.
    if (Tuning::direct && each > 0 && first == last) return;
    const int second = Tuning::direct && start % units.share != 0;
    const float4* const from = reinterpret_cast<const float4*>(workspace) +
                               static_cast<int64>(Tuning::direct ? 2 * first : first + tile.number) * of_tile + own;
    float total[4] = {};
    const auto add = [&](const float4& four) { total[0] += four.x, total[1] += four.y, total[2] += four.z, total[3] += four.w; };
#pragma unroll 4
    for (int i = group; i < last - first + 1; i += groups)
        add(from[static_cast<int64>(Tuning::direct ? 2 * i + (i == 0 && second) : i) * of_tile]);
    if constexpr (groups > 1) {
        float4* const shared = reinterpret_cast<float4*>(shared_memory());
        shared[threadIdx.x] = make_float4(total[0], total[1], total[2], total[3]);
        __syncthreads();
        if (group > 0) return;
#pragma unroll
        for (int other = 1; other < groups; ++other) add(shared[other * threads + threadIdx.x]);
    }
    store_image_sums(dw, tile, own / of_warpgroup, own / 128 % (8 * taps), own % 128, total);
}

}  // namespace leanconv
