// native_gemm_window_tf32: native_gemm_window for float32 elements whose factors are rounded to TF32; float32 sums; NHWC.
//
// Requires   as native_gemm_window. Filters are rounded before (round_filters; of a gradient where they are rearranged).
// Numerics   as native_gemm_tf32: both factors are rounded to the nearest before the tensor core drops the digits it does not read.
// Roles      as native_gemm_window, and the producer's three other warps round the pixels of a window where they lie, once for all
//            taps, where native_gemm_tf32's consumers round them for each tap on their way to registers.
// Pipelines  as native_gemm_window, and windows rounded: a lane of each of these warps -> consumers
// Work       2 C/g R S flops an output; peak 2048 flops a cycle and multiprocessor. Of 3 x 3 taps, 256 pixels and 64 filters the products
//            of 32 channels take 4608 cycles; rounding 400 pixels reads and writes 100 KiB of shared memory: 800 cycles.
// Explored (H200, be2fb28d with this kernel, 3x3): 96 channels and filters, 8 images of 128 x 128: 71.6 us, native_gemm_tf32 88.7,
//            tensor_winograd 83.0; 64 and 64, 16 of 112 x 112: 59.2, 73.1 and 52.9.
#pragma once

#include <kernels/hopper_native/native_gemm_window.cuh>

namespace leanconv {

// Three warps, each of which rounds a third of every window.
template <class Problem, class Tuning>
struct WindowRounder {
    static constexpr int warps = 3;

    static __device__ __forceinline__ void round(const WindowTiles<Problem, Tuning>& tiles, const WindowRing<Problem, Tuning>& ring) {
        using Ring = WindowRing<Problem, Tuning>;
        constexpr int vectors = Ring::copied / 16;
        const int first = threadIdx.x % 128 - 32, lane = threadIdx.x % 32;
        RingPlace<Tuning::windows> window;
        for (Offset<Problem> tile = blockIdx.x; tile < tiles.count(); tile += gridDim.x) {
            for (int block = 0; block < Ring::of_tap; ++block, window.advance()) {
                mbarrier_wait_parity(ring.window_full(window.stage), window.parity);
#pragma unroll
                for (int box = 0; box < WindowTiles<Problem, Tuning>::boxes; ++box) {
                    float4* const pixels = reinterpret_cast<float4*>(ring.windows_of(window.stage) + box * Ring::window_bytes);
#pragma unroll 4
                    for (int i = first; i < vectors; i += 32 * warps) {
                        const float4 v = pixels[i];
                        pixels[i] = {round_to_tf32(v.x), round_to_tf32(v.y), round_to_tf32(v.z), round_to_tf32(v.w)};
                    }
                }
                fence_proxy_async();
                __syncwarp();
                mbarrier_arrive_warp(ring.window_rounded(window.stage), lane);
            }
        }
    }
};

template <class Problem, class Tuning>
__device__ __forceinline__ void native_gemm_window_tf32(const TensorMap& x, const TensorMap& w, Bias<Problem> bias, float* y,
                                                        long long batch) {
    run_windows<Problem, Tuning, WindowRounder<Problem, Tuning>>(x, w, bias, y, batch);
}

}  // namespace leanconv
