// Filters split into halves of 16 bits (tensor_split.cuh) and written as the tensor-core kernels read them
// (filter_layout.cuh), in two launches: the largest magnitude of each channel, then the filters, with factors.
#pragma once

#include <device/element.cuh>
#include <kernels/hopper_fp32/filter_layout.cuh>
#include <device/index.cuh>
#include <kernels/hopper_fp32/preparing_block.cuh>
#include <device/ptx/copy.cuh>
#include <kernels/hopper_fp32/tensor_split.cuh>

namespace leanconv {

// Channels whose largest filter element is 2^-12 of the greatest need no factor: the pair has bits enough.
constexpr int spread = 12;

// What has a factor of its own, and the parts of the filters in which its largest magnitude is found: channels, or each of a
// filter's elements in the order of memory, which are then the channels of a filter of one weight.
template <class Problem, class Tuning>
struct FactorParts {
    using F = TensorFilters<Problem, Tuning>;
    static constexpr bool by_element = Problem::by_element;
    static constexpr int weights = by_element ? 1 : F::weights;
    static constexpr int of_filter = by_element ? Problem::group_c * F::weights : Problem::group_c;
    static constexpr int all = Problem::groups * of_filter;
    // Layers of few channels and large filters, which few warps would read, are cut into smaller parts.
    static constexpr int filters_of_part = by_element                ? 256
                                           : all >= 64 || weights <= 16 ? 32
                                           : weights <= 128             ? 512 / weights
                                                                        : 4;
    static constexpr int parts = ceil_div(Problem::group_k, filters_of_part);
    static constexpr bool kept = of_filter <= F::copied_elements;  // in shared memory
    static constexpr int64 end = TensorFilters<Problem, Tuning>::parts_at + ceil_div(parts * all, 4) * 4;
    // Whether neighbouring lanes have neighbouring channels.
    static constexpr bool side_by_side = F::channels_adjacent || (by_element && !Problem::chwn);

    static __device__ __forceinline__ int64 source(int group, int k, int c, int weight) {
        const int64 filter = static_cast<int64>(group) * Problem::group_k + k;
        if constexpr (!by_element) return F::source(group, k, c, weight);
        return Problem::chwn ? static_cast<int64>(c) * Problem::k + filter : filter * of_filter + c;
    }
    // The largest magnitude of channel c of all groups.
    static __device__ __forceinline__ float largest(const float* prepared, int c) {
        float largest = 0;
#pragma unroll (is_small<Tuning>(nullptr) ? 2 : 16)
        for (int part = 0; part < parts; ++part) largest = fmaxf(largest, prepared[F::parts_at + part * all + c]);
        return largest;
    }
};

// Magnitudes of finite numbers; what is not finite says nothing about the scale of its neighbours.
__device__ __forceinline__ float finite_magnitude(float value) {
    const float magnitude = fabsf(value);
    return magnitude <= 3.402823466e38f ? magnitude : 0.0f;
}

// First launch: the largest magnitude of each channel in filters_of_part filters. In NHWC a lane has a channel, and the warps
// of a block share the filters; otherwise a warp has a channel. `block` is one of those that share the work.
template <class Problem, class Tuning>
__device__ __forceinline__ void largest_channels_of(int block, const typename Problem::filter* w, float* prepared) {
    using P = FactorParts<Problem, Tuning>;
    constexpr bool lanes_apart = P::side_by_side, by_filter = TensorFilters<Problem, Tuning>::filters_adjacent;
    constexpr int warps = Tuning::threads / 32, channels = lanes_apart ? 32 : warps;
    constexpr int of_group = ceil_div(P::of_filter, channels);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int c = block % of_group * channels + (lanes_apart ? lane : warp), rest = block / of_group;
    const int part = rest % P::parts, group = rest / P::parts;
    if (!lanes_apart && c >= P::of_filter) return;
    float largest = 0;
    // NOTE: past the end the last element is read again, so that no load waits for the condition of another.
    constexpr int all = P::filters_of_part * P::weights, at_once = is_small<Tuning>(nullptr) ? 2 : lanes_apart ? 12 : 8,
                  step = lanes_apart ? warps : 32;
    for (int first = lanes_apart ? warp : lane; first < all; first += step * at_once) {
#pragma unroll
        for (int j = 0; j < at_once; ++j) {
            const int i = min(first + step * j, all - 1);
            const int k = part * P::filters_of_part + (by_filter ? i % P::filters_of_part : i / P::weights);
            const int weight = by_filter ? i / P::filters_of_part : i % P::weights;
            const float value = to_float(w[P::source(group, min(k, Problem::group_k - 1), min(c, P::of_filter - 1), weight)]);
            largest = fmaxf(largest, finite_magnitude(value));
        }
    }
    float* const to = prepared + Problem::first_prepared + TensorFilters<Problem, Tuning>::parts_at + part * P::all +
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

// Filters that follow each other in shared memory, where they are small enough; otherwise one, read where it is.
template <class Problem, class Tuning, int filters = 1>
struct FilterElements {
    using F = TensorFilters<Problem, Tuning>;
    static constexpr int count = F::weights * Problem::group_c;
    static constexpr bool copied = filters * count <= F::copied_elements;
    static_assert(copied || filters == 1, "a block holds its filters");
    // In NHWC four floats are left out behind each 32: the lanes of `eight` meet each bank once then.
    static constexpr int pitch = F::copied_floats(count);
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
        if constexpr (copied && F::mirrored) {
            begin_mirrored();
        } else if constexpr (copied) {
            const float* const from = w + F::source(group, min(k, Problem::group_k - 1), 0, 0);
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
                               w + F::source(group, min(k + which, Problem::group_k - 1), c, weight),
                               k + which < Problem::group_k);
                }
            }
        }
        cp_async_commit_group();
    }
    // Where filters are adjacent, a lane has one element of all: a sector of memory serves no other lane of a warp, and
    // shared memory no lane the bank of another.
    __device__ __forceinline__ void begin_mirrored() const {
        if constexpr (F::filters_adjacent && filters > 1) {
            static_assert(Problem::group_k % filters == 0 && (filters == 2 || filters == 4), "a lane loads all filters at once");
            const float* const from = w + (k < Problem::group_k ? k : 0);
            if (reinterpret_cast<unsigned long long>(from) % (4 * filters) == 0) {
                constexpr int turns = ceil_div(count, Tuning::threads), at_once = turns < 9 ? turns : 9;
                for (int first = threadIdx.x; first < count; first += at_once * Tuning::threads) {
                    float values[at_once][filters] = {};
#pragma unroll
                    for (int j = 0; j < at_once; ++j) {
                        const int i = min(first + j * Tuning::threads, count - 1);
                        const float* const at = from + F::source(group, 0, i % Problem::group_c, i / Problem::group_c);
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
            const int which = F::filters_adjacent   ? i % filters
                              : F::channels_adjacent ? i / count
                                                     : i / F::weights % filters;
            const int of_one = F::filters_adjacent ? i / filters : i % count;
            const int c = F::filters_adjacent || F::channels_adjacent ? of_one % Problem::group_c : i / (filters * F::weights);
            const int weight = F::filters_adjacent || F::channels_adjacent ? of_one / Problem::group_c : i % F::weights;
            cp_async_4(copy + which * pitch + place(at(c, weight)),
                       w + F::source(group, min(k + which, Problem::group_k - 1), c, weight), k + which < Problem::group_k);
        }
    }
    __device__ __forceinline__ FilterElements<Problem, Tuning> one(int which) const {
        return {w, copy + which * pitch, group, k + which};
    }
    __device__ __forceinline__ float operator()(int c, int weight) const {
        if constexpr (copied) return copy[place(at(c, weight))];
        else return k < Problem::group_k ? w[F::source(group, k, c, weight)] : 0.0f;
    }
    // The eight elements of a unit that begin with channel c, of one weight.
    __device__ __forceinline__ void eight(float (&to)[8], int c, int weight) const {
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

// A unit is what a lane writes of one filter and state: eight places of a stage, 16 bytes. Which elements lie there.
template <class Problem, class Tuning>
struct UnitElements {
    using F = TensorFilters<Problem, Tuning>;
    int c[8], tap[8];

    __device__ __forceinline__ UnitElements(int stage, int unit) {
        const int first = F::element_of(unit / 2, unit % 2 * 8);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int element = first + F::element_of(0, j);
            const int number = stage * F::pieces + (F::whole_units ? first : element) / F::piece;
            tap[j] = F::tap_of(number);
            c[j] = F::channel_of(number) + (F::whole_units ? first % F::piece + F::element_of(0, j) : element % F::piece);
        }
    }
    __device__ __forceinline__ bool meant(int j) const {
        constexpr bool whole_stages = F::taps * F::of_tap % F::pieces == 0;
        return (whole_stages || tap[j] < F::taps) &&
               ((whole_stages && Problem::group_c % F::piece == 0) || c[j] < Problem::group_c);
    }
    // One weight of all: that of the tap, or a column of its segment, zeros where the segment before has it.
    __device__ __forceinline__ void load(float (&to)[8], const FilterElements<Problem, Tuning>& filter, int column) const {
        if constexpr (F::whole_units) {
            if (meant(0) && F::has(tap[0], column)) {
                filter.eight(to, c[0], F::weight_of(tap[0], column));
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

// Writes the fragments of a block's filters, and where they have any, the factors of their group. `inverse`: what an element is
// multiplied by twice.
template <bool factors, class Problem, class Tuning, int filters, class Inverse>
__device__ __forceinline__ void write_fragments(const FilterElements<Problem, Tuning, filters>& all, float* prepared, int group,
                                                int first_padded, const unsigned (&ups)[filters], const Inverse& inverse) {
    using F = TensorFilters<Problem, Tuning>;
    constexpr int units = F::stages * 8, columns = F::states > 1 ? 3 : 1;
    // Several states of a unit at once, which reads its columns once, where that keeps threads enough at work.
    constexpr int busy = Tuning::threads / 2,
                  most = is_small<Tuning>(nullptr) ? 1 : filters * units >= busy ? 4 : filters * units >= busy / 2 ? 2 : 1;
    constexpr int all_states = F::states, at_once = all_states < most ? all_states : most, turns = all_states / at_once;
    unsigned char* const fragments = reinterpret_cast<unsigned char*>(prepared + F::fragments_at);
    for (int i = threadIdx.x; i < filters * units * turns; i += Tuning::threads) {
        const int unit = i % 8, turn = i / 8 % turns, which = filters > 1 ? i / (units * turns) : 0;
        const int stage = F::in_turn(i / (8 * turns) - which * F::stages);
        const int padded = first_padded + which, tile = padded / F::filters, of_tile = padded % F::filters;
        const int of_chunk = of_tile % F::chunk, row = of_chunk / 16 * 16 + place_of(of_chunk % 16);
        unsigned up = ups[0];
#pragma unroll
        for (int f = 1; f < filters; ++f) up = which == f ? ups[f] : up;
        const UnitElements<Problem, Tuning> elements(stage, unit);
        float weights[columns][8], factor[8];
#pragma unroll
        for (int column = 0; column < columns; ++column) elements.load(weights[column], all.one(which), column);
#pragma unroll
        for (int j = 0; j < 8; ++j) factor[j] = factors && elements.meant(j) ? inverse(elements.c[j], elements.tap[j]) : 1.0f;
        if (factors && padded == 0 && turn == 0) {
            const int first = F::element_of(unit / 2, unit % 2 * 8);
#pragma unroll
            for (int j = 0; j < 8; ++j)
                prepared[F::factors_at + (group * F::stages + stage) * split_depth + first + F::element_of(0, j)] =
                    factor[j] > 0 ? power_of_two(254 - biased_exponent(factor[j])) : 0.0f;
        }
#pragma unroll
        for (int next = 0; next < at_once; ++next) {
            const int state = next * turns + turn;
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
                high[pair] = split_high(two[0], two[1], power_of_two(up));
                low[pair] = split_low(two[0], two[1], power_of_two(up), high[pair]);
            }
            const int chunk = states_order<F::states, F::chunks>(state, of_tile / F::chunk);
            unsigned char* const to = fragments + F::fragment(group, tile, stage, chunk) + row * 128 + (unit ^ row % 8) * 16;
            *reinterpret_cast<uint4*>(to) = make_uint4(high[0], high[1], high[2], high[3]);
            if constexpr (F::halves == 2)
                *reinterpret_cast<uint4*>(to + F::half_bytes) = make_uint4(low[0], low[1], low[2], low[3]);
        }
    }
}

// The scale of the greatest filter is the one that all sums keep until the end.
__device__ __forceinline__ unsigned least_scale(float greatest) { return min(253u, 268 - biased_exponent(greatest)); }
__device__ __forceinline__ void write_header(float* prepared, unsigned least_up) {
    SplitHeader* const header = reinterpret_cast<SplitHeader*>(prepared);
    header->down = power_of_two(254 - least_up);
    header->most = min(253u, 403 - least_up);
}

// Second launch: a block writes one filter, those that fill up the last tile as zeros.
template <class Problem, class Tuning>
__device__ __forceinline__ void tensor_filters_of(int block, const typename Problem::filter* w, float* prepared_filters) {
    using F = TensorFilters<Problem, Tuning>;
    using P = FactorParts<Problem, Tuning>;
    float* const prepared = prepared_filters + Problem::first_prepared;
    float* const of_warp = shared_floats<Tuning>();
    float* const kept = of_warp + 64;  // the largest magnitude of each channel
    const int padded = block % (F::tiles * F::filters), group = block / (F::tiles * F::filters);
    const FilterElements<Problem, Tuning> filter{w, kept + (P::kept ? ceil_div(P::of_filter, 4) * 4 : 0), group, padded};
    filter.begin();

    // All blocks find the same header.
    float ends[3] = {0, 0, -3.402823466e38f};  // the greatest of all and of the group, and negative, its least
#pragma unroll (is_small<Tuning>(nullptr) ? 1 : 4)
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
    // The inverse root of a channel's factor. 0 where no filter has a weight.
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
#pragma unroll (is_small<Tuning>(nullptr) ? 1 : 8)
    for (int i = threadIdx.x; i < filter.count; i += Tuning::threads) {
        const int c = Problem::nhwc ? i % Problem::group_c : i / F::weights;
        const int weight = Problem::nhwc ? i / Problem::group_c : i % F::weights;
        const float up = inverse(c, weight);
        own[0] = fmaxf(own[0], finite_magnitude(filter(c, weight)) * up * up);
    }
    largest_of_block<Tuning>(own, of_warp);
    const unsigned least_up = least_scale(greatest);
    unsigned up = own[0] > 0 ? 268 - biased_exponent(own[0]) : least_up;
    up = min(max(up, least_up), min(253u, least_up + 126));
    if (threadIdx.x == 0) {
        prepared[F::scales_at + group * F::tiles * F::filters + padded] = power_of_two(127 + least_up - up);
        if (padded == 0) reinterpret_cast<unsigned*>(prepared)[F::flags_at + group] = scaled;
        if (block == 0) write_header(prepared, least_up);
    }

    write_fragments<true>(filter, prepared, group, padded, {up}, inverse);
}

template <class Problem, class Tuning>
__device__ __forceinline__ void largest_channels(const typename Problem::filter* w, float* prepared) {
    largest_channels_of<Problem, Tuning>(blockIdx.x, w, prepared);
}
template <class Problem, class Tuning>
__device__ __forceinline__ void tensor_filters(const typename Problem::filter* w, float* prepared) {
    tensor_filters_of<Problem, Tuning>(blockIdx.x, w, prepared);
}

// The same of filters that another launch has rearranged within the prepared ones, from element first_weight on.
template <class Problem, class Tuning>
__device__ __forceinline__ void largest_rearranged_channels(float* prepared) {
    largest_channels<Problem, Tuning>(prepared + Problem::first_weight, prepared);
}
template <class Problem, class Tuning>
__device__ __forceinline__ void rearranged_tensor_filters(float* prepared) {
    tensor_filters<Problem, Tuning>(prepared + Problem::first_weight, prepared);
}

}  // namespace leanconv
