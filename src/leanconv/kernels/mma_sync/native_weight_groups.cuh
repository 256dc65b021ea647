// native_weight_groups: gradient of the filters of grouped layers on tensor cores by mma.sync; float16 or bfloat16 from sm_80 on,
// float32 rounded to TF32 from sm_90 on; sums in float32.
//
//   dw[k, tap, c] = sum over output pixels of dy[pixel, k] * x[pixel + tap, c]        c: the channels of k's group
//
// Requires   as native_gemm_groups; sums of a filter that registers hold.
// Numerics   products are exact; a warp sums up to 2^17 pixels in Hopper's tensor core, elsewhere 2^16; it rounds toward zero:
//            under 2^-10 of a sum of one sign is lost. In TF32 factors are rounded to the nearest before; half as many are summed.
//            NOTE: tiles that reach over the image's end have zeros of dy there: an infinite pixel next to that end makes NaN of
//            the gradients of taps that do not read it.
// CTA tile   `filters`, of some groups or a part of one, and an even share of all tiles of rows x columns outputs. The pixels
//            that a tile reads lie in shared memory as native_gemm_groups has them, and dy beside them.
// Product    16 rows, which are two units of 8 channels of one tap or of two, x 8 filters x 16 output pixels; both operands are
//            transposed by ldmatrix. Of TF32 rows are four units of 4 channels, and sixteen outputs two mma; lanes load their
//            elements, two channels at once. Of groups of 4 only the half of an mma's sums that lie on the diagonal is stored.
// Roles      all threads copy. A warp has `blocks` times eight filters with all their channels and taps, and every `warps_m`-th
//            16 outputs. At the end sums are added over these warps, and over the CTAs of a cluster (`split`, in the order of
//            ranks), in shared memory; or through a workspace (`split_k`, added by split_k.cuh).
// Pipelines  two tiles, of which one is copied while the other is summed, as native_gemm_groups.
// Registers  4 * blocks * steps sums.
// Work       an mma for each ldmatrix, or `blocks` where these share a group: as native_gemm_groups. Of TF32 two loads of 64 bits
//            a lane, which take as long as an ldmatrix, for each mma.
#pragma once

#include <device/element.cuh>
#include <device/epilogue.cuh>
#include <device/index.cuh>
#include <device/ptx/memory.cuh>
#include <device/ptx/mma.cuh>
#include <device/ptx/sync.cuh>
#include <kernels/mma_sync/group_pixels.cuh>

namespace leanconv {

// The gradient of the outputs of a tile, in shared memory, with zeros outside the image.
template <class Problem, class Tuning>
struct GroupOutputs {
    using Tile = GroupTile<Problem, Tuning>;
    using T = typename Problem::element;
    static constexpr bool by_lanes = sizeof(T) == 4;
    static constexpr int count = Tile::positions, units = Tile::filters / unit_channels<Problem>;
    static constexpr int pitch = 16 * pitch_of(units, by_lanes), bytes = count * pitch;

    static __device__ __forceinline__ void copy(unsigned char* shared, const T* dy, const Tile& tile, int first_filter) {
        const T* const image = dy + static_cast<int64>(tile.n) * Problem::p * Problem::q * Problem::k;
#pragma unroll 4
        for (int i = threadIdx.x; i < count * units; i += Tuning::threads) {
            const UnitPlace<Problem::nhwc, units, count, 1> at(i);
            const int p = tile.p + at.column / Tile::columns, q = tile.q + at.column % Tile::columns;
            const int filter = first_filter + at.unit * unit_channels<Problem>;
            bool exists = p < Problem::p && q < Problem::q;
            if constexpr (Problem::k % Tile::filters != 0) exists = exists && filter < Problem::k;
            copy_unit<Problem, Problem::k, Problem::p * Problem::q>(shared + at.column * pitch + at.unit * 16, image,
                                                                    p * Problem::q + q, filter, exists);
        }
    }
};

// One warp's sums.
template <class Problem, class Tuning>
struct GroupSums {
    using T = typename Problem::element;
    using Tile = GroupTile<Problem, Tuning>;
    using Outputs = GroupOutputs<Problem, Tuning>;
    using Pixels = GroupPixels<Problem, Tuning, Outputs::by_lanes>;
    using Units = GroupUnits<Problem, Tuning>;
    static_assert(!Problem::gradient, "the windows are those of the layer");
    // A step has 16 channels.
    static constexpr int of_step = 16 / unit_channels<Problem>;
    static constexpr int count = Problem::r * Problem::s * Units::units, steps = ceil_div(count, of_step);
    static constexpr int blocks = Tuning::blocks, warps_k = Tile::blocks / blocks, warps_m = Tuning::threads / 32 / warps_k;
    static_assert(Tile::blocks % blocks == 0 && warps_m * warps_k * 32 == Tuning::threads, "each warp has a share");
    // Of all warps, in shared memory: those of one warp and register are neighbours.
    static constexpr int of_warp = blocks * steps * 4 * 32, of_tile = warps_k * of_warp;
    static constexpr int bytes = warps_m * of_tile * 4;

    int lane, warp_m, block;
    float sums[blocks][steps][4];

    __device__ __forceinline__ GroupSums()
        : lane(threadIdx.x % 32), warp_m(threadIdx.x / 32 / warps_k), block(threadIdx.x / 32 % warps_k * blocks), sums{} {}

    // Where a unit lies from a window's place.
    static __host__ __device__ constexpr int place(int unit) {
        const int number = unit < count ? unit : count - 1;
        return Pixels::tap(0, 0, number / Units::units) + number % Units::units * 16;
    }

    // No instruction transposes float32, so a lane loads its elements from two of eight outputs, t and t + 4: two neighbouring
    // channels of a step's sixteen, which become rows g and g + 8; and one filter of each block.
    __device__ __forceinline__ void add_by_lanes(const unsigned char* x, const unsigned char* dy) {
        const int unit = lane / 8;
        for (int m_tile = warp_m; m_tile < Tile::m_tiles; m_tile += warps_m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const unsigned char* pixels[2];
                unsigned b[blocks][2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int number = half * 8 + i * 4 + lane % 4;
                    const int output = Tile::row(m_tile, number) * Tile::columns + Tile::column(m_tile, number);
                    const unsigned char* const from = dy + output * Outputs::pitch + block * 32 + lane / 4 * 4;
                    pixels[i] = x + Pixels::place(m_tile, number) + lane / 4 % 2 * 8;
#pragma unroll
                    for (int j = 0; j < blocks; ++j) b[j][i] = cvt_rn_tf32_f32(*reinterpret_cast<const float*>(from + j * 32));
                }
#pragma unroll
                for (int step = 0; step < steps; ++step) {
                    const int p0 = place(4 * step), p1 = place(4 * step + 1), p2 = place(4 * step + 2), p3 = place(4 * step + 3);
                    const int at = p0 + unit / 2 * (p2 - p0) + unit % 2 * (p1 - p0) + unit / 3 * (p3 - p2 - (p1 - p0));
                    unsigned a[Units::reads][4];
#pragma unroll
                    for (int j = 0; j < Units::reads; ++j) {
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            const auto two =
                                *reinterpret_cast<const uint2*>(pixels[i] + Units::first_unit(block + j) * 16 + at);
                            a[j][2 * i] = two.x, a[j][2 * i + 1] = two.y;
                        }
                        round_fragment(T{}, a[j]);
                    }
#pragma unroll
                    for (int j = 0; j < blocks; ++j) multiply(T{}, sums[j][step], a[Units::shared ? 0 : j], b[j]);
                }
            }
        }
    }

    __device__ __forceinline__ void add(const unsigned char* x, const unsigned char* dy) {
        if constexpr (Outputs::by_lanes) return add_by_lanes(x, dy);
        for (int m_tile = warp_m; m_tile < Tile::m_tiles; m_tile += warps_m) {
            const int row = Tile::row(m_tile, lane % 16), column = Tile::column(m_tile, lane % 16);
            unsigned b[blocks][2];
#pragma unroll
            for (int j = 0; j < blocks; j += 2) {
                const unsigned char* const from = dy + (row * Tile::columns + column) * Outputs::pitch + (block + j) * 16;
                if (j + 1 < blocks) {
                    unsigned four[4];
                    ldmatrix_trans(four, from + lane / 16 * 16);
                    b[j][0] = four[0], b[j][1] = four[1], b[j + 1][0] = four[2], b[j + 1][1] = four[3];
                } else {
                    ldmatrix_trans(b[j], from);
                }
            }
            const unsigned char* const pixel = x + Pixels::place(m_tile, lane / 16 * 8 + lane % 8);
#pragma unroll
            for (int i = 0; i < steps; ++i) {
                const int first = place(2 * i), second = place(2 * i + 1);
                unsigned a[Units::reads][4];
#pragma unroll
                for (int j = 0; j < Units::reads; ++j)
                    ldmatrix_trans(a[j], pixel + Units::first_unit(block + j) * 16 + first + lane / 8 % 2 * (second - first));
#pragma unroll
                for (int j = 0; j < blocks; ++j) multiply(T{}, sums[j][i], a[Units::shared ? 0 : j], b[j]);
            }
        }
    }

    __device__ __forceinline__ void keep(float* shared) const {
        float* const to = shared + warp_m * of_tile + block / blocks * of_warp + lane;
#pragma unroll
        for (int i = 0; i < blocks * steps * 4; ++i)
            to[i * 32] = sums[i / (steps * 4)][i / 4 % steps][i % 4];
    }
};

// The sums that all warps have kept, over these and the CTAs of a cluster, to the gradient or the partial sums. Eight threads have
// neighbouring channels.
template <class Problem, class Tuning, class Result>
__device__ __forceinline__ void store_sums(Result* dw, const float* shared, int first_filter) {
    using Sums = GroupSums<Problem, Tuning>;
    using Outputs = GroupOutputs<Problem, Tuning>;
    using Units = GroupUnits<Problem, Tuning>;
    constexpr int taps = Problem::r * Problem::s, split = Tuning::split, share = ceil_div(Sums::of_tile / 32, split) * 32;
    const int first_channel = GroupTile<Problem, Tuning>::first_channel(first_filter);
    const int first = split > 1 ? static_cast<int>(cluster_rank()) * share : 0, end = min(first + share, Sums::of_tile);
    for (int i = first + threadIdx.x; i < end; i += Tuning::threads) {
        const int g = i % 8, t = i / 8 % 4, number = i / 32, half = number / 2 % 2, step = number / 4 % Sums::steps;
        // where lanes load, rows g and g + 8 are neighbouring channels
        const int block = number / (4 * Sums::steps), unit = Outputs::by_lanes ? 4 * step + g / 2 : 2 * step + half;
        const int channel = Outputs::by_lanes ? g % 2 * 2 + half : g, k = first_filter + block * 8 + 2 * t + number % 2;
        const int group = k / Problem::group_k;
        const int c = first_channel + (Units::first_unit(block) + unit % Units::units) * unit_channels<Problem> + channel -
                      group * Problem::group_c;
        if (unit >= Sums::count || k >= Problem::k || c < 0 || c >= Problem::group_c) continue;
        const float* const from = shared + number * 32 + 4 * g + t;
        float total = 0;
#pragma unroll
        for (int warp = 0; warp < Sums::warps_m; ++warp) {
            const float* const at = from + warp * Sums::of_tile;
            if constexpr (split > 1) total += cluster_sum<split>(at);
            else total += *at;
        }
        const int tap = unit / Units::units, place = Problem::nhwc ? tap * Problem::group_c + c : c * taps + tap;
        Result* const to = dw + static_cast<int64>(k) * (taps * Problem::group_c) + place;
        if constexpr (Tuning::split_k > 1) *to = total;
        else *to = from_float<Result>(finish<Problem>(total, 0.0f, held_by<Problem>(to, true)));
    }
}

// `dw` is the gradient, or with `split_k` above 1 room for as many partial sums.
template <class Problem, class Tuning, class Result>
__device__ __forceinline__ void native_weight_groups(const typename Problem::element* __restrict__ x,
                                                     const typename Problem::element* __restrict__ dy, Result* __restrict__ dw,
                                                     long long batch) {
    using Tile = GroupTile<Problem, Tuning>;
    using Outputs = GroupOutputs<Problem, Tuning>;
    using Pixels = GroupPixels<Problem, Tuning, Outputs::by_lanes>;
    constexpr int bytes = Pixels::bytes + Outputs::bytes;
    unsigned char* const shared = shared_memory();
    const int number = static_cast<int>(blockIdx.x) / Tuning::split, slice = number / Tile::filter_tiles;
    const int first_filter = number % Tile::filter_tiles * Tile::filters, first_channel = Tile::first_channel(first_filter);
    const int worker = slice * Tuning::split + (Tuning::split > 1 ? static_cast<int>(cluster_rank()) : 0);
    constexpr int workers = Tuning::split * Tuning::split_k;
    const auto all = static_cast<long long>(Tile::count(batch));
    const auto end = static_cast<Offset<Problem>>(all * (worker + 1) / workers);
    auto tile = static_cast<Offset<Problem>>(all * worker / workers);
    const auto copy = [&](Offset<Problem> next, int stage) {
        if (next < end) {
            Pixels::copy(shared + stage * bytes, x, Tile(next), first_channel);
            Outputs::copy(shared + stage * bytes + Pixels::bytes, dy, Tile(next), first_filter);
        }
        cp_async_commit_group();
    };
    GroupSums<Problem, Tuning> sums;
    copy(tile, 0);
    for (int stage = 0; tile < end; ++tile, stage ^= 1) {
        copy(tile + 1, stage ^ 1);
        cp_async_wait_group<1>();
        __syncthreads();
        sums.add(shared + stage * bytes, shared + stage * bytes + Pixels::bytes);
        __syncthreads();
    }
    cp_async_wait_group<0>();
    sums.keep(reinterpret_cast<float*>(shared));
    if constexpr (Tuning::split > 1) cluster_barrier();
    else __syncthreads();
    constexpr int64 weights = static_cast<int64>(Problem::k) * Problem::group_c * Problem::r * Problem::s;
    store_sums<Problem, Tuning>(dw + slice * weights, reinterpret_cast<const float*>(shared), first_filter);
    if constexpr (Tuning::split > 1) cluster_barrier();  // others read this CTA's sums
}

}  // namespace leanconv
