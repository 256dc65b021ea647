// The launch that packs the filters of the fused Winograd kernels: every filter row (1-D) or filter (2-D) is transformed
// once and stored as [group][row][column block][channel][state][filter], filters innermost, so that the main kernel reads
// whole lines. Channels and filters are padded with zeros to whole tiles.
// Bytes: the filters once for reading, states / (taps of a transform) times as many for writing, at copy speed.
#pragma once

#include <device/index.cuh>
#include <device/ptx/memory.cuh>
#include <kernels/simt/winograd_tiles.cuh>

namespace leanconv {

// Where weight number `place` of column blocks `first`, `first` + 1, ... lies in a filter; -1 where zeros fill rows and
// column blocks.
template <class Problem>
__device__ __forceinline__ int weight_of_block(int first, int place) {
    using Blocks = FilterBlocks<Problem>;
    constexpr int blocks = Blocks::column_blocks, width = Blocks::width;
    const int block = first + place / width;
    const int row = block / blocks, column = block % blocks * width + place % width;
    if (row >= filter_rows<Problem> || column >= Problem::s) return -1;
    const int at = row * Problem::s + column;
    return Problem::rotated ? filter_taps<Problem> - 1 - at : at;
}

// For the data gradient (Problem::rotated) filters rotate by 180 degrees, and what the forward pass sums over, its
// channels, are the outputs: `k` and `c` are those of the convolution that is computed, w lies as the layer has it.
// A block brings Tuning::filters x Tuning::channels of `rows` filter rows, or of as many column blocks, to shared memory
// in the order of memory, and transforms them with neighbouring lanes on neighbouring filters.
template <class Problem, class Tuning, class Transform>
__device__ __forceinline__ void winograd_filters(const float* w, float* prepared) {
    // Weights of one transform, and how many of them a filter has: its rows in 1-D, padded with rows of zeros.
    using Blocks = FilterBlocks<Problem>;
    constexpr int width = Blocks::height * Blocks::width, taps = Blocks::rows * Blocks::column_blocks;
    constexpr int rows = Tuning::rows, filters = Tuning::filters, channels = Tuning::channels;
    constexpr int outer = Problem::rotated ? channels : filters, inner = Problem::rotated ? filters : channels;
    constexpr int group_outer = Problem::rotated ? Problem::group_c : Problem::group_k;
    constexpr int group_inner = Problem::rotated ? Problem::group_k : Problem::group_c;
    constexpr int weights = rows * width, all = filter_taps<Problem>;
    constexpr int pitch = channels * weights | 1;  // of a filter in shared memory: odd, for 32 lanes on 32 banks
    constexpr int blocks_k = Problem::padded_k / filters, blocks_c = Problem::padded_c / channels;
    static_assert(Problem::padded_k % filters == 0 && Problem::padded_c % channels == 0, "padding fills the blocks");

    const int block_k = blockIdx.x % blocks_k * filters, block_c = blockIdx.x / blocks_k % blocks_c * channels;
    const int first_row = blockIdx.x / blocks_k / blocks_c % ceil_div(taps, rows) * rows;
    const int group = blockIdx.x / blocks_k / blocks_c / ceil_div(taps, rows);
    const int first_outer = Problem::rotated ? block_c : block_k, first_inner = Problem::rotated ? block_k : block_c;
    // Rotation counts filter rows from the end.
    const int first_weight = Problem::rotated ? all - first_row * width - weights : first_row * width;

    float* const tile = reinterpret_cast<float*>(shared_memory());
    for (int e = threadIdx.x; e < outer * inner * weights; e += Tuning::threads) {
        const int o = Problem::chwn ? e % outer : e / (inner * weights);
        const int in = Problem::chwn ? e / outer : e % (inner * weights);
        const int weight = Problem::nhwc ? in / inner : in % weights, i = Problem::nhwc ? in % inner : in / weights;
        const int place = Problem::rotated ? weights - 1 - weight : weight;
        const int at = Blocks::column_blocks == 1 ? first_weight + weight : weight_of_block<Problem>(first_row, place);
        const bool exists = first_outer + o < group_outer && first_inner + i < group_inner && at >= 0 && at < all;
        const int64 filter = static_cast<int64>(group) * group_outer + first_outer + o;
        const int64 from =
            Problem::nhwc   ? (filter * all + at) * group_inner + first_inner + i
            : Problem::chwn ? (static_cast<int64>(first_inner + i) * all + at) * (Problem::groups * group_outer) + filter
                            : (filter * group_inner + first_inner + i) * all + at;
        const int k = Problem::rotated ? i : o, c = Problem::rotated ? o : i;
        tile[k * pitch + c * weights + place] = exists ? w[from] : 0.0f;
    }
    __syncthreads();

    for (int e = threadIdx.x; e < filters * channels * rows; e += Tuning::threads) {
        const int k = e % filters, c = e / filters % channels, row = e / filters / channels;
        if (first_row + row >= taps) break;
        float weight[width], state[Problem::states];
#pragma unroll
        for (int i = 0; i < width; ++i) weight[i] = tile[k * pitch + c * weights + row * width + i];
        Transform::filter(state, weight);
        float* const to = prepared + Problem::prepared_offset +
            ((static_cast<int64>(group) * taps + first_row + row) * Problem::padded_c + block_c + c) *
                (Problem::states * Problem::padded_k) + block_k + k;
#pragma unroll
        for (int s = 0; s < Problem::states; ++s) to[s * Problem::padded_k] = state[s];
    }
}

}  // namespace leanconv
