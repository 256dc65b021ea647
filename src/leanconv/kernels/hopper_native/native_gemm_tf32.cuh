// native_gemm_tf32: native_gemm_16bit for float32 elements whose factors are rounded to TF32; float32 sums; NHWC.
//
// Requires   as native_gemm_16bit. Filters are rounded before (round_filters; of a gradient where they are rearranged), once a
//            call or once for all calls; or, with `in_place`, in shared memory by each CTA, so that no launch prepares them.
// Numerics   The tensor core drops the digits that it does not read, which would make results smaller by some
//            1.4 * 2^-11. So both factors are rounded to the nearest before.
// Roles      as native_gemm_16bit, but consumers load pixels to registers: ldmatrix, four elements a thread and wgmma, each
//            rounded by one instruction. With `in_place` the producer's three other warps round filters, each those of every
//            third stage.
// Gradient   of an input: a launch has rearranged the filters. Two to four phases of images are one launch, as in
//            native_gemm_16bit; each has a map of its pixels and one of its filters.
// Pipelines  as native_gemm_16bit; with `in_place` also rounded: a lane of the warp -> consumers
// One stage  wgmma of the stage from registers; commit; wait for the copies of the next stage, load and round its pixels; wait for
//            the wgmma; release the stage.
// Work       2 C/g R S flops an output; peak 2048 flops a cycle and multiprocessor, 495 TFLOP/s at 1.83 GHz. A wgmma of 64 pixels x
//            n filters x 8 takes n / 2 cycles and reads as many bytes as one of 16 elements of 2 bytes.
// Measured   figure: opencnn-nhwc-tf32 native_gemm_tf32/tf32 mean = 1.01
//            figure: opencnn-nhwc-tf32 native_gemm_tf32 tflops-most = 358
//            figure: opencnn-nhwc-tf32 native_gemm_tf32 error-most = 2.9e-04
#pragma once

#include <kernels/hopper_native/native_gemm_16bit.cuh>

namespace leanconv {

// Filters rounded to TF32, four a thread. 8 bytes an element.
template <class Problem, class Tuning>
__device__ __forceinline__ void round_filters(const float* w, float* prepared) {
    const int64 first = static_cast<int64>(blockIdx.x) * (4 * Tuning::threads) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int64 at = first + i * Tuning::threads;
        if (at < Problem::elements) prepared[at] = round_to_tf32(w[at]);
    }
}

// The fragments of 64 pixels of one channel block: rows of row_bytes, swizzled as a copy leaves them.
template <int row_bytes, int steps>
__device__ __forceinline__ void load_rounded(unsigned (&a)[steps][4], const unsigned char* pixels) {
    constexpr int units = row_bytes / 16;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
    const unsigned char* const from = pixels + row * row_bytes;
#pragma unroll
    for (int i = 0; i < steps; ++i) {
        unsigned bits[4];
        ldmatrix(bits, from + ((2 * i + lane / 16) ^ row * units / 8 % units) * 16);
#pragma unroll
        for (int j = 0; j < 4; ++j) a[i][j] = cvt_rn_tf32_f32(__uint_as_float(bits[j]));
    }
}

// One warpgroup's products of all tiles of the CTA. While those of a stage are under way, it loads the pixels of the next. And
// how filters are rounded in place.
template <class Problem, class Tuning>
struct ConsumerTf32 {
    using Ring = GemmRing<Problem, Tuning>;
    static constexpr int steps = Ring::row_bytes / 32, count = Tuning::m_tiles * Tuning::stage_blocks;
    static constexpr int row_bytes = Ring::row_bytes;
    using Fragments = unsigned[count][steps][4];
    static constexpr int rounders = Tuning::in_place ? 3 : 0;

    // The filters of all stages, rounded where copies have left them: each warp takes every third stage.
    static __device__ __forceinline__ void round(const GemmTiles<Problem, Tuning>& tiles, const Ring& ring,
                                                 Offset<Problem> first_tile, Offset<Problem> step) {
        constexpr int vectors = Tuning::stage_blocks * Ring::filter_bytes / 16, unrolled = vectors % 128 == 0 ? 4 : 2;
        static_assert(vectors % 64 == 0, "a lane rounds as many vectors as the others");
        static_assert(Tuning::stages >= rounders, "a warp is less than a turn of the ring ahead");
        const int lane = threadIdx.x % 32;
        int next = threadIdx.x % 128 / 32 - 1;
        RingPlace<Tuning::stages> place;
        for (Offset<Problem> tile = first_tile; tile < tiles.count(); tile += step) {
            for (int stage = ring.first; stage < ring.end; ++stage, place.advance()) {
                if (next-- > 0) continue;
                next = rounders - 1;
                // NOTE: copies land in any order. Where those that another warp waits for are late, the parity of the stage's next
                // phase passes before that has begun; so a warp first waits until the filters of the phase before are rounded.
                mbarrier_wait_parity(ring.rounded(place.stage), place.parity ^ 1);
                mbarrier_wait_parity(ring.full(place.stage), place.parity);
                float4* const filters = reinterpret_cast<float4*>(ring.filters_of(place.stage, 0)) + lane;
#pragma unroll 1
                for (int first = 0; first < vectors; first += 32 * unrolled) {
                    float4 v[unrolled];
#pragma unroll
                    for (int i = 0; i < unrolled; ++i) v[i] = filters[first + 32 * i];
#pragma unroll
                    for (int i = 0; i < unrolled; ++i)
                        filters[first + 32 * i] = {round_to_tf32(v[i].x), round_to_tf32(v[i].y), round_to_tf32(v[i].z),
                                                   round_to_tf32(v[i].w)};
                }
                fence_proxy_async();
                __syncwarp();
                mbarrier_arrive_warp(ring.rounded(place.stage), lane);
            }
        }
    }

    static __device__ __forceinline__ void load(Fragments& a, const Ring& ring, const RingPlace<Tuning::stages>& place,
                                                int first_row) {
        mbarrier_wait_parity(ring.full(place.stage), place.parity);
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const int row = first_row + i / Tuning::stage_blocks * 64;
            load_rounded<row_bytes>(a[i], ring.pixels_of(place.stage, i % Tuning::stage_blocks) + row * row_bytes);
        }
    }

    static __device__ __forceinline__ RingPlace<Tuning::stages> consume(Bias<Problem> bias, float* y,
                                                                        const GemmTiles<Problem, Tuning>& tiles, const Ring& ring,
                                                                        int warpgroup, Offset<Problem> first_tile,
                                                                        Offset<Problem> step,
                                                                        RingPlace<Tuning::stages> place = {}) {
        const int lane = threadIdx.x % 32, first_row = warpgroup * Tuning::m_tiles * 64;
        for (Offset<Problem> tile = first_tile; tile < tiles.count(); tile += step) {
            prefetch_tile<Problem, Tuning>(bias, y, tiles, first_row, tile);
            float sums[Tuning::m_tiles][Tuning::filters / 2];
            Fragments even, odd;
            int stage = ring.first;
            const auto multiply = [&](Fragments& now, Fragments& next) {
                const int here = place.stage;
                if constexpr (Tuning::in_place) mbarrier_wait_parity(ring.rounded(here), place.parity);
                wgmma_fence(sums, now);
#pragma unroll
                for (int i = 0; i < count; ++i) {
                    const int block = i % Tuning::stage_blocks;
                    const MatrixDescriptor b = matrix_descriptor(ring.filters_of(here, block), 0, 8 * row_bytes, row_bytes);
#pragma unroll
                    for (int j = 0; j < steps; ++j)
                        wgmma_tf32(sums[i / Tuning::stage_blocks], now[i][j], b + 32 * j, stage > ring.first || block > 0 || j > 0);
                }
                wgmma_commit_group();
                place.advance();
                if (stage + 1 < ring.end) load(next, ring, place, first_row);
                wgmma_wait_group<0>(sums, now);
                mbarrier_arrive_warp(ring.empty(here), lane);
            };
            load(even, ring, place, first_row);
            while (true) {
                multiply(even, odd);
                if (++stage == ring.end) break;
                multiply(odd, even);
                if (++stage == ring.end) break;
            }
            store_tile<Problem, Tuning>(sums, bias, y, tiles, ring, first_row, tile);
        }
        return place;
    }
};

template <class Problem, class Tuning>
__device__ __forceinline__ void native_gemm_tf32(const TensorMap& x, const TensorMap& w, Bias<Problem> bias, float* y,
                                                 long long batch) {
    run_roles<Problem, Tuning, ConsumerTf32<Problem, Tuning>>(x, w, bias, y, batch);
}

// The phases of a gradient, whose filters were rearranged: those of each have a map of their own.
template <class Problem, class Tuning>
__device__ __forceinline__ void native_gemm_tf32(const TensorMap& x, const TensorMap& x1, const TensorMap& w, const TensorMap& w1,
                                                 Bias<Problem> bias, float* y, long long batch) {
    const PhaseMaps<2> maps = {{&x, &x1}, {&w, &w1}};
    run_roles<Problem, Tuning, ConsumerTf32>(maps, bias, y, batch);
}
template <class Problem, class Tuning>
__device__ __forceinline__ void native_gemm_tf32(const TensorMap& x, const TensorMap& x1, const TensorMap& x2, const TensorMap& w,
                                                 const TensorMap& w1, const TensorMap& w2, Bias<Problem> bias, float* y,
                                                 long long batch) {
    const PhaseMaps<3> maps = {{&x, &x1, &x2}, {&w, &w1, &w2}};
    run_roles<Problem, Tuning, ConsumerTf32>(maps, bias, y, batch);
}
template <class Problem, class Tuning>
__device__ __forceinline__ void native_gemm_tf32(const TensorMap& x, const TensorMap& x1, const TensorMap& x2,
                                                 const TensorMap& x3, const TensorMap& w, const TensorMap& w1,
                                                 const TensorMap& w2, const TensorMap& w3, Bias<Problem> bias, float* y,
                                                 long long batch) {
    const PhaseMaps<4> maps = {{&x, &x1, &x2, &x3}, {&w, &w1, &w2, &w3}};
    run_roles<Problem, Tuning, ConsumerTf32>(maps, bias, y, batch);
}

}  // namespace leanconv
