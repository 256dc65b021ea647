// Packed filters with factors: filters are split into two float16 (split.cuh) and written in the order of operand B
// (filter_layout.cuh), in two launches: the largest magnitude of each channel, then the filters.
#pragma once

#include <device/element.cuh>
#include <device/index.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/sync.cuh>
#include <device/pipeline/filter_layout.cuh>
#include <device/pipeline/split.cuh>

namespace leanconv {

// The Tuning of a fallback within a main kernel: the first `count` threads of a CTA, whose shared memory begins at
// `first_byte`. Its code is small rather than fast: it seldom runs. Explored (H200, 06665a8): a main kernel of 106 KB
// took 47 us instead of 37 behind a launch of some 30 KB of code.
template <class Tuning, int count, int first_byte = 0>
struct Small : Tuning {
    static constexpr int threads = count, shared_at = first_byte;
    static constexpr bool small = true;
};

template <class Tuning>
__device__ __forceinline__ float* shared_floats() {
    return reinterpret_cast<float*>(shared_memory() + Tuning::shared_at);
}
template <class Tuning>
__device__ __forceinline__ void sync_threads() {
    if constexpr (Tuning::small) barrier_sync(12, Tuning::threads);
    else __syncthreads();
}

// The maximum over a warp, of each value.
template <int count>
__device__ __forceinline__ void largest_of_warp(float (&values)[count]) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2)
#pragma unroll
        for (int i = 0; i < count; ++i) values[i] = fmaxf(values[i], __shfl_xor_sync(0xffffffffu, values[i], lanes));
}

// And over a block of threads. `shared` takes `count` floats a warp, and may be reused after the next barrier.
template <class Tuning, int count>
__device__ __forceinline__ void largest_of_block(float (&values)[count], float* shared) {
    constexpr int warps = Tuning::threads / 32;
    largest_of_warp(values);
    sync_threads<Tuning>();
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int i = 0; i < count; ++i) shared[i * warps + threadIdx.x / 32] = values[i];
    }
    sync_threads<Tuning>();
#pragma unroll
    for (int i = 0; i < count; ++i)
#pragma unroll
        for (int warp = 0; warp < warps; ++warp) values[i] = fmaxf(values[i], shared[i * warps + warp]);
}

// Channels down to 2^-12 of the greatest need no factor: the pair of float16 has bits enough.
constexpr int spread = 12;

// Filters in memory: `w`; or those of an input's gradient, read from the layer's (`mirrored`): filter k is its channel k,
// channel c its filter c, and row i of the taps is row last_row - i * apart_h of the layer_r
// (kernels/common/input_gradient.py).
template <class Problem>
struct FiltersInMemory {
    static constexpr bool mirrored = Problem::mirrored;
    static constexpr int weights = filter_taps<Problem>;
    // What is contiguous: channels of a filter, or filters; in NCHW it is taps.
    static constexpr bool channels_adjacent = mirrored ? Problem::chwn : Problem::nhwc;
    static constexpr bool filters_adjacent = mirrored ? Problem::nhwc : Problem::chwn;

    // Where element c, weight of filter k lies.
    static __device__ __forceinline__ int64 source(int group, int k, int c, int weight) {
        if constexpr (mirrored) {
            constexpr int all = Problem::layer_r * Problem::layer_s, filters = Problem::groups * Problem::group_c;
            const int row = Problem::last_row - weight / Problem::s * Problem::apart_h;
            const int tap = row * Problem::layer_s + Problem::last_column - weight % Problem::s * Problem::apart_w;
            const int64 of_layer = static_cast<int64>(group) * Problem::group_c + c;
            if constexpr (Problem::chwn) return (static_cast<int64>(k) * all + tap) * filters + of_layer;
            return Problem::nhwc ? (of_layer * all + tap) * Problem::group_k + k
                                 : (of_layer * Problem::group_k + k) * all + tap;
        }
        const int64 filter = static_cast<int64>(group) * Problem::group_k + k;
        if constexpr (Problem::chwn) return (static_cast<int64>(c) * weights + weight) * Problem::k + filter;
        return Problem::nhwc ? (filter * weights + weight) * Problem::group_c + c
                             : (filter * Problem::group_c + c) * weights + weight;
    }
};

// What has a factor: a channel; or, at strides, each element of a filter in the order of memory, which is then a channel of a
// filter with one weight. The maximum of each is found in row blocks: `row_block` filters at a time.
template <class Problem, class Tuning>
struct ChannelFactors {
    using F = TensorFilters<Problem, Tuning>;
    static constexpr bool by_element = Problem::by_element;
    static constexpr int weights = by_element ? 1 : F::weights;
    static constexpr int of_filter = by_element ? Problem::group_c * F::weights : Problem::group_c;
    // The host chooses row blocks that keep many warps busy.
    static constexpr int all = Problem::groups * of_filter, row_block = Problem::row_block;
    static constexpr int row_blocks = ceil_div(Problem::group_k, row_block);
    static constexpr bool kept = of_filter <= Problem::copied_elements;  // in shared memory
    static constexpr int64 end = F::maxima_at + ceil_div(row_blocks * all, 4) * 4;
    // Whether neighbouring lanes have neighbouring channels.
    static constexpr bool side_by_side = FiltersInMemory<Problem>::channels_adjacent || (by_element && !Problem::chwn);

    static __device__ __forceinline__ int64 source(int group, int k, int c, int weight) {
        const int64 filter = static_cast<int64>(group) * Problem::group_k + k;
        if constexpr (!by_element) return FiltersInMemory<Problem>::source(group, k, c, weight);
        return Problem::chwn ? static_cast<int64>(c) * Problem::k + filter : filter * of_filter + c;
    }
    // The largest magnitude of channel c of all groups.
    static __device__ __forceinline__ float largest(const float* prepared, int c) {
        float largest = 0;
#pragma unroll (Tuning::small ? 2 : 16)
        for (int i = 0; i < row_blocks; ++i) largest = fmaxf(largest, prepared[F::maxima_at + i * all + c]);
        return largest;
    }
};

// First launch: the largest magnitude of each channel in a row block of filters. In NHWC a lane has a channel, and the warps
// share the filters; otherwise a warp has a channel. `block` is the work item.
template <class Problem, class Tuning>
__device__ __forceinline__ void largest_channels_of(int block, const typename Problem::filter* w, float* prepared) {
    using P = ChannelFactors<Problem, Tuning>;
    constexpr bool lanes_apart = P::side_by_side, by_filter = FiltersInMemory<Problem>::filters_adjacent;
    constexpr int warps = Tuning::threads / 32, channels = lanes_apart ? 32 : warps;
    constexpr int of_group = ceil_div(P::of_filter, channels);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int c = block % of_group * channels + (lanes_apart ? lane : warp), rest = block / of_group;
    const int row_block = rest % P::row_blocks, group = rest / P::row_blocks;
    if (!lanes_apart && c >= P::of_filter) return;
    float largest = 0;
    // NOTE: past the end the last element is read again, so that no load waits for the condition of another.
    constexpr int all = P::row_block * P::weights, at_once = Tuning::small ? 2 : lanes_apart ? 12 : 8,
                  step = lanes_apart ? warps : 32;
    for (int first = lanes_apart ? warp : lane; first < all; first += step * at_once) {
#pragma unroll
        for (int j = 0; j < at_once; ++j) {
            const int i = min(first + step * j, all - 1);
            const int k = row_block * P::row_block + (by_filter ? i % P::row_block : i / P::weights);
            const int weight = by_filter ? i / P::row_block : i % P::weights;
            const float value = to_float(w[P::source(group, min(k, Problem::group_k - 1), min(c, P::of_filter - 1), weight)]);
            largest = fmaxf(largest, finite_magnitude(value));
        }
    }
    float* const to = prepared + Problem::first_prepared + TensorFilters<Problem, Tuning>::maxima_at + row_block * P::all +
        group * P::of_filter + c;
    if constexpr (lanes_apart) {
        float* const of_warps = shared_floats<Tuning>();
        of_warps[threadIdx.x] = largest;
        sync_threads<Tuning>();
        if (warp > 0 || c >= P::of_filter) return;
#pragma unroll
        for (int i = 1; i < warps; ++i) largest = fmaxf(largest, of_warps[32 * i + lane]);
        *to = largest;
    } else {
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
        if (lane == 0) *to = largest;
    }
}

// Filters in shared memory, one after the other, where they are small enough; otherwise one, read from global memory.
template <class Problem, class Tuning, int filters = 1>
struct FilterElements {
    using F = TensorFilters<Problem, Tuning>;
    using Memory = FiltersInMemory<Problem>;
    static constexpr int count = F::weights * Problem::group_c;
    static constexpr bool copied = filters * count <= Problem::copied_elements;
    static_assert(copied || filters == 1, "a block holds its filters");
    // In NHWC four floats are skipped behind each 32, so that the lanes of `load8` have no bank conflicts.
    static constexpr int pitch = Problem::copied_floats;
    // Whether eight elements of a unit are four pairs that lie in one such 32.
    static constexpr bool in_pairs = copied && Problem::nhwc && Tuning::rows && Problem::group_c % 16 == 0 && F::whole_units;
    const float* w;
    float* copy;
    int group, k;

    static __device__ __forceinline__ int at(int c, int weight) {
        return Problem::nhwc ? weight * Problem::group_c + c : c * F::weights + weight;
    }
    static __device__ __forceinline__ int place(int at) { return Problem::nhwc ? at + at / 32 * 4 : at; }
    __device__ __forceinline__ void begin() const {
        if constexpr (copied && Memory::mirrored) {
            begin_mirrored();
        } else if constexpr (copied) {
            const float* const from = w + Memory::source(group, min(k, Problem::group_k - 1), 0, 0);
            if (!Problem::chwn && count % 4 == 0 && reinterpret_cast<unsigned long long>(from) % 16 == 0) {
                for (int i = 4 * threadIdx.x; i < filters * count; i += 4 * Tuning::threads) {
                    const int which = filters > 1 ? i / count : 0;
                    const bool exists = k + which < Problem::group_k;
                    cp_async_16(copy + which * pitch + place(i - which * count), from + (exists ? i : 0), exists);
                }
            } else {
                for (int i = threadIdx.x; i < filters * count; i += Tuning::threads) {
                    const int which = filters > 1 ? i / count : 0, at = i - which * count;
                    const int c = Problem::nhwc ? at % Problem::group_c : at / F::weights;
                    const int weight = Problem::nhwc ? at / Problem::group_c : at % F::weights;
                    cp_async_4(copy + which * pitch + place(at),
                               w + Memory::source(group, min(k + which, Problem::group_k - 1), c, weight),
                               k + which < Problem::group_k);
                }
            }
        }
        cp_async_commit_group();
    }
    // Where filters are contiguous, a lane loads one element of all filters: no sector of memory is read by two lanes of a
    // warp, and stores to shared memory have no bank conflicts.
    __device__ __forceinline__ void begin_mirrored() const {
        if constexpr (Memory::filters_adjacent && filters > 1) {
            static_assert(Problem::group_k % filters == 0 && (filters == 2 || filters == 4),
                          "a lane loads all filters at once");
            const float* const from = w + (k < Problem::group_k ? k : 0);
            if (reinterpret_cast<unsigned long long>(from) % (4 * filters) == 0) {
                constexpr int rounds = ceil_div(count, Tuning::threads), at_once = rounds < 9 ? rounds : 9;
                for (int first = threadIdx.x; first < count; first += at_once * Tuning::threads) {
                    float values[at_once][filters] = {};
#pragma unroll
                    for (int j = 0; j < at_once; ++j) {
                        const int i = min(first + j * Tuning::threads, count - 1);
                        const float* const at = from + Memory::source(group, 0, i % Problem::group_c, i / Problem::group_c);
                        if (k < Problem::group_k) {
                            if constexpr (filters == 4) {
                                const float4 four = *reinterpret_cast<const float4*>(at);
                                values[j][0] = four.x, values[j][1] = four.y, values[j][2] = four.z, values[j][3] = four.w;
                            } else {
                                const float2 two = *reinterpret_cast<const float2*>(at);
                                values[j][0] = two.x, values[j][1] = two.y;
                            }
                        }
                    }
#pragma unroll
                    for (int j = 0; j < at_once; ++j) {
                        const int i = first + j * Tuning::threads;
#pragma unroll
                        for (int f = 0; f < filters; ++f)
                            if (i < count) copy[f * pitch + place(i)] = values[j][f];
                    }
                }
                return;
            }
        }
        for (int i = threadIdx.x; i < filters * count; i += Tuning::threads) {
            const int which = Memory::filters_adjacent   ? i % filters
                              : Memory::channels_adjacent ? i / count
                                                     : i / F::weights % filters;
            const int of_one = Memory::filters_adjacent ? i / filters : i % count;
            constexpr bool taps_adjacent = !Memory::filters_adjacent && !Memory::channels_adjacent;
            const int c = taps_adjacent ? i / (filters * F::weights) : of_one % Problem::group_c;
            const int weight = taps_adjacent ? i % F::weights : of_one / Problem::group_c;
            cp_async_4(copy + which * pitch + place(at(c, weight)),
                       w + Memory::source(group, min(k + which, Problem::group_k - 1), c, weight),
                       k + which < Problem::group_k);
        }
    }
    __device__ __forceinline__ FilterElements<Problem, Tuning> one(int which) const {
        return {w, copy + which * pitch, group, k + which};
    }
    __device__ __forceinline__ float operator()(int c, int weight) const {
        if constexpr (copied) return copy[place(at(c, weight))];
        else return k < Problem::group_k ? w[Memory::source(group, k, c, weight)] : 0.0f;
    }
    // The eight elements of a unit from channel c on, of one weight.
    __device__ __forceinline__ void load8(float (&to)[8], int c, int weight) const {
        if constexpr (in_pairs) {
            const float* const from = copy + place(at(c, weight));
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const float2 two = *reinterpret_cast<const float2*>(from + F::element_of(0, 2 * pair));
                to[2 * pair] = two.x, to[2 * pair + 1] = two.y;
            }
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int own = c + F::element_of(0, j);
                to[j] = Problem::group_c % 16 == 0 || own < Problem::group_c ? (*this)(own, weight) : 0.0f;
            }
        }
    }
};

// A unit is what a lane writes of one filter and state: eight places of a stage, 16 bytes. This says which elements they hold.
template <class Problem, class Tuning>
struct UnitElements {
    using F = TensorFilters<Problem, Tuning>;
    int c[8], tap[8];

    __device__ __forceinline__ UnitElements(int stage, int unit) {
        const int first = F::element_of(unit / 2, unit % 2 * 8);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int element = first + F::element_of(0, j);
            const int number = stage * F::stage_blocks + (F::whole_units ? first : element) / F::channel_block;
            tap[j] = F::tap_of(number);
            c[j] = F::channel_of(number) +
                (F::whole_units ? first % F::channel_block + F::element_of(0, j) : element % F::channel_block);
        }
    }
    __device__ __forceinline__ bool meant(int j) const {
        constexpr bool whole_stages = F::taps * F::tap_blocks % F::stage_blocks == 0;
        return (whole_stages || tap[j] < F::taps) &&
               ((whole_stages && Problem::group_c % F::channel_block == 0) || c[j] < Problem::group_c);
    }
    // One weight of all: that of the tap, or a column of its segment; zeros where the segment before has that column.
    __device__ __forceinline__ void load(float (&to)[8], const FilterElements<Problem, Tuning>& filter, int column) const {
        if constexpr (F::whole_units) {
            if (meant(0) && F::has(tap[0], column)) {
                filter.load8(to, c[0], F::weight_of(tap[0], column));
            } else {
#pragma unroll
                for (int j = 0; j < 8; ++j) to[j] = 0.0f;
            }
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j)
                to[j] = meant(j) && F::has(tap[j], column) ? filter(c[j], F::weight_of(tap[j], column)) : 0.0f;
        }
    }
};

// Writes the fragments of filters, and where they have factors, those of their group. `inverse`: the root of an element's
// inverse factor.
template <bool factors, class Problem, class Tuning, int filters, class Inverse>
__device__ __forceinline__ void write_fragments(const FilterElements<Problem, Tuning, filters>& all, float* prepared, int group,
                                                int first_padded, const unsigned (&scales)[filters], const Inverse& inverse) {
    using F = TensorFilters<Problem, Tuning>;
    constexpr int units = F::stages * 8, columns = F::states > 1 ? 3 : 1;
    // Several states of a unit at once, whose columns are then read once, where that leaves enough threads busy.
    constexpr int busy = Tuning::threads / 2,
                  most = Tuning::small ? 1 : filters * units >= busy ? 4 : filters * units >= busy / 2 ? 2 : 1;
    constexpr int all_states = F::states, at_once = all_states < most ? all_states : most, rounds = all_states / at_once;
    unsigned char* const fragments = reinterpret_cast<unsigned char*>(prepared + F::fragments_at);
    for (int i = threadIdx.x; i < filters * units * rounds; i += Tuning::threads) {
        const int unit = i % 8, round = i / 8 % rounds, which = filters > 1 ? i / (units * rounds) : 0;
        const int stage = F::taps_first(i / (8 * rounds) - which * F::stages);
        const int padded = first_padded + which, tile = padded / F::filters, of_tile = padded % F::filters;
        const int of_n_tile = of_tile % F::mma_n, row = of_n_tile / 16 * 16 + place_of(of_n_tile % 16);
        unsigned scale = scales[0];
#pragma unroll
        for (int f = 1; f < filters; ++f) scale = which == f ? scales[f] : scale;
        const UnitElements<Problem, Tuning> elements(stage, unit);
        float weights[columns][8], factor[8];
#pragma unroll
        for (int column = 0; column < columns; ++column) elements.load(weights[column], all.one(which), column);
#pragma unroll
        for (int j = 0; j < 8; ++j) factor[j] = factors && elements.meant(j) ? inverse(elements.c[j], elements.tap[j]) : 1.0f;
        if (factors && padded == 0 && round == 0) {
            const int first = F::element_of(unit / 2, unit % 2 * 8);
#pragma unroll
            for (int j = 0; j < 8; ++j)
                prepared[F::factors_at + (group * F::stages + stage) * split_depth + first + F::element_of(0, j)] =
                    factor[j] > 0 ? power_of_two(254 - biased_exponent(factor[j])) : 0.0f;
        }
#pragma unroll
        for (int next = 0; next < at_once; ++next) {
            const int state = next * rounds + round;
            if (F::is_rest(stage) && state % 3 != 0) continue;
            unsigned high[4], low[4];
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                float two[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int j = 2 * pair + half;
                    two[half] = weights[0][j];
                    if constexpr (F::states > 1) two[half] = filter_state({weights[0][j], weights[1][j], weights[2][j]}, state);
                    if (factors) two[half] = two[half] * factor[j] * factor[j];
                }
                high[pair] = split_high(two[0], two[1], power_of_two(scale));
                low[pair] = split_low(two[0], two[1], power_of_two(scale), high[pair]);
            }
            const int n_tile = states_order<F::states, F::n_tiles>(state, of_tile / F::mma_n);
            unsigned char* const to = fragments + F::fragment(group, tile, stage, n_tile) + row * 128 + (unit ^ row % 8) * 16;
            *reinterpret_cast<uint4*>(to) = make_uint4(high[0], high[1], high[2], high[3]);
            if constexpr (F::halves == 2)
                *reinterpret_cast<uint4*>(to + F::half_bytes) = make_uint4(low[0], low[1], low[2], low[3]);
        }
    }
}

// The scale of the greatest filter, which all sums keep until the end.
__device__ __forceinline__ unsigned least_scale(float greatest) { return min(253u, 268 - biased_exponent(greatest)); }
__device__ __forceinline__ void write_header(float* prepared, unsigned sum_scale) {
    SplitHeader* const header = reinterpret_cast<SplitHeader*>(prepared);
    header->inverse_scale = power_of_two(254 - sum_scale);
    header->most = min(253u, 403 - sum_scale);
}

// Second launch: a CTA packs one filter; those that fill up the last tile are zeros.
template <class Problem, class Tuning>
__device__ __forceinline__ void tensor_filters_of(int block, const typename Problem::filter* w, float* prepared_filters) {
    using F = TensorFilters<Problem, Tuning>;
    using P = ChannelFactors<Problem, Tuning>;
    float* const prepared = prepared_filters + Problem::first_prepared;
    float* const of_warp = shared_floats<Tuning>();
    float* const kept = of_warp + 64;  // the largest magnitude of each channel
    const int padded = block % (F::tiles * F::filters), group = block / (F::tiles * F::filters);
    const FilterElements<Problem, Tuning> filter{w, kept + (P::kept ? ceil_div(P::of_filter, 4) * 4 : 0), group, padded};
    filter.begin();

    // All CTAs find the same header.
    float ends[3] = {0, 0, -3.402823466e38f};  // the greatest of all and of the group, and negative, its least
#pragma unroll (Tuning::small ? 1 : 4)
    for (int c = threadIdx.x; c < P::all; c += Tuning::threads) {
        const float largest = P::largest(prepared, c);
        ends[0] = fmaxf(ends[0], largest);
        if (c / P::of_filter == group) {
            if constexpr (P::kept) kept[c % P::of_filter] = largest;
            ends[1] = fmaxf(ends[1], largest);
            ends[2] = fmaxf(ends[2], -largest);
        }
    }
    static_assert(3 * Tuning::threads / 32 <= 64, "of_warp takes three of each warp");
    largest_of_block<Tuning>(ends, of_warp);
    const float greatest = ends[0], of_group = ends[1], least = -ends[2];
    const int top = of_group > 0 ? whole_exponent(of_group) : 0;
    const bool scaled = of_group > 0 && (least == 0 || top - whole_exponent(least) > spread);
    cp_async_wait_group<0>();
    sync_threads<Tuning>();
    // The root of a channel's inverse factor; 0 where no filter has a weight.
    const auto root = [&](float largest) {
        if (!scaled) return 1.0f;
        return largest > 0 ? power_of_two(127 + min((top - whole_exponent(largest)) / 2, 126)) : 0.0f;
    };
    if constexpr (P::kept) {
#pragma unroll 1
        for (int c = threadIdx.x; c < P::of_filter; c += Tuning::threads) kept[c] = root(kept[c]);
        sync_threads<Tuning>();
    }
    const auto inverse = [&](int c, int weight) {
        const int own = P::by_element ? FilterElements<Problem, Tuning>::at(c, weight) : c;
        return P::kept ? kept[own] : root(P::largest(prepared, group * P::of_filter + own));
    };

    float own[1] = {};
#pragma unroll (Tuning::small ? 1 : 8)
    for (int i = threadIdx.x; i < filter.count; i += Tuning::threads) {
        const int c = Problem::nhwc ? i % Problem::group_c : i / F::weights;
        const int weight = Problem::nhwc ? i / Problem::group_c : i % F::weights;
        const float scale = inverse(c, weight);
        own[0] = fmaxf(own[0], finite_magnitude(filter(c, weight)) * scale * scale);
    }
    largest_of_block<Tuning>(own, of_warp);
    const unsigned sum_scale = least_scale(greatest);
    unsigned scale = own[0] > 0 ? 268 - biased_exponent(own[0]) : sum_scale;
    scale = min(max(scale, sum_scale), min(253u, sum_scale + 126));
    if (threadIdx.x == 0) {
        prepared[F::scales_at + group * F::tiles * F::filters + padded] = power_of_two(127 + sum_scale - scale);
        if (padded == 0) reinterpret_cast<unsigned*>(prepared)[F::flags_at + group] = scaled;
        if (block == 0) write_header(prepared, sum_scale);
    }

    write_fragments<true>(filter, prepared, group, padded, {scale}, inverse);
}

template <class Problem, class Tuning>
__device__ __forceinline__ void largest_channels(const typename Problem::filter* w, float* prepared) {
    largest_channels_of<Problem, Tuning>(blockIdx.x, w, prepared);
}
template <class Problem, class Tuning>
__device__ __forceinline__ void tensor_filters(const typename Problem::filter* w, float* prepared) {
    tensor_filters_of<Problem, Tuning>(blockIdx.x, w, prepared);
}

// Both launches for filters that an earlier launch has rearranged within the packed ones, from element first_weight on.
template <class Problem, class Tuning>
__device__ __forceinline__ void largest_channels(float* prepared) {
    largest_channels<Problem, Tuning>(prepared + Problem::first_weight, prepared);
}
template <class Problem, class Tuning>
__device__ __forceinline__ void tensor_filters(float* prepared) {
    tensor_filters<Problem, Tuning>(prepared + Problem::first_weight, prepared);
}

}  // namespace leanconv
