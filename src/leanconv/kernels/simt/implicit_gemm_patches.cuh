// implicit_gemm_patches: gradient of the input of patches on FP32 cores: where no pixel meets two taps, it is one matrix product.
//
//   dx[n, c, z * stride - pad + t * dilation, ...] = sum over k of dy[n, k, z, p, q] * w[k, c, t, r, s]
//
// and bias[c], where it is a transposed layer. A row of the product is a tap of a channel, in the order of a filter in memory.
//
// Requires   volumes; one group; NCHW or NHWC; at most one tap for each pixel, and no slices, rows or columns behind
//            the last filter and its stride; float32, float16 or bfloat16.
// Numerics   one chain of float32 FMAs for each pixel.
// CTA tile   tile_k taps of channels x tile_pixels outputs of the layer, as implicit_gemm has them; dy and w are read in place.
// Stores     four taps beside each other are four pixels of a row (NCHW), or values of neighbouring pixels (NHWC): one store
//            where rows allow it. Neighbouring lanes have neighbouring patches, whose rows are adjacent.
// Work       2 * K flops a pixel of dx. As phases dy would be read once for each of T * R * S taps, and three channels would
//            fill a tile of four; here 3 channels of 2x4x4 taps are 96 rows: the FMAs, or memory with few filters, bound it.
#pragma once

#include <kernels/simt/tiled_convolution.cuh>

namespace leanconv {

// A row of the product: the pixel of a patch, and its channel.
template <class Problem>
struct PatchTap {
    int c, d, h, w;
    __device__ __forceinline__ explicit PatchTap(int number) {
        constexpr int taps = Problem::layer_t * Problem::layer_r * Problem::layer_s;
        const int tap = Problem::nhwc ? number / Problem::layer_c : number % taps;
        c = Problem::nhwc ? number % Problem::layer_c : number / taps;
        d = tap / (Problem::layer_r * Problem::layer_s) * Problem::layer_dilation_d;
        h = tap / Problem::layer_s % Problem::layer_r * Problem::layer_dilation_h;
        w = tap % Problem::layer_s * Problem::layer_dilation_w;
    }
};

// Where an output of the layer begins to read its input.
template <class Problem>
struct PatchPlace {
    int64 n;
    int d, h, w;
    __device__ __forceinline__ explicit PatchPlace(const Pixel<Problem>& at)
        : n(at.n), d(at.p / Problem::layer_p * Problem::layer_stride_d - Problem::layer_front),
          h(at.p % Problem::layer_p * Problem::layer_stride_h - Problem::layer_top),
          w(at.q * Problem::layer_stride_w - Problem::layer_left) {}
    __device__ __forceinline__ bool holds(const PatchTap<Problem>& tap) const {
        return static_cast<unsigned>(d + tap.d) < static_cast<unsigned>(Problem::layer_d) &&
               static_cast<unsigned>(h + tap.h) < static_cast<unsigned>(Problem::layer_h) &&
               static_cast<unsigned>(w + tap.w) < static_cast<unsigned>(Problem::layer_w);
    }
    __device__ __forceinline__ int64 element(const PatchTap<Problem>& tap) const {
        const int64 slice = (Problem::nhwc ? n : n * Problem::layer_c + tap.c) * Problem::layer_d + d + tap.d;
        const int64 pixel = (slice * Problem::layer_h + h + tap.h) * Problem::layer_w + w + tap.w;
        return Problem::nhwc ? pixel * Problem::layer_c + tap.c : pixel;
    }
};

template <class Problem, class Tuning>
__device__ __forceinline__ void store_patches(const float (&acc)[Tuning::thread_k][Tuning::thread_pixels],
                                              const Tiling<Tuning>& tiling, const typename Problem::result* bias,
                                              typename Problem::result* dx, const FlatPixels<Problem>& places,
                                              Offset<Problem> first_pixel, int first_k) {
    using T = typename Problem::result;
    using Tap = PatchTap<Problem>;
    const auto result = [&](float sum, int64 at, const Tap& tap) {
        const float b = Problem::bias ? to_float(bias[tap.c]) : 0.0f;
        return from_float<T>(finish<Problem>(sum, b, held_by<Problem>(dx + at, true)));
    };
#pragma unroll
    for (int j = 0; j < Tuning::thread_pixels; ++j) {
        const Offset<Problem> pixel = first_pixel + tiling.pixel +
            position<Tiling<Tuning>::lanes_pixels, true>(j / 4, tiling.lane_pixel, j % 4);
        if (pixel >= places.count) continue;
        const PatchPlace<Problem> patch(Pixel<Problem>(pixel, places.batch));
#pragma unroll
        for (int f = 0; f < Tuning::thread_k / 4; ++f) {
            const int k = first_k + tiling.k + position<Tiling<Tuning>::lanes_k, false>(f, tiling.lane_k, 0);
            if constexpr (Problem::fours) {
                const Tap first(k);
                if (k >= Problem::k || !patch.holds(first)) continue;
                const int64 at = patch.element(first);
                T v[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) v[i] = result(acc[4 * f + i][j], at + i, Problem::bias ? Tap(k + i) : first);
                store_vector(dx + at, v);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const Tap tap(k + i);
                    if (k + i >= Problem::k || !patch.holds(tap)) continue;
                    const int64 at = patch.element(tap);
                    dx[at] = result(acc[4 * f + i][j], at, tap);
                }
            }
        }
    }
}

template <class Problem, class Tuning>
__device__ __forceinline__ void implicit_gemm_patches(ElementsIn<Problem> dy, ElementsIn<Problem> w, ElementsIn<Problem> bias,
                                                      ElementsOut<Problem> dx, long long batch) {
    constexpr bool interleaved = true;
    using Filters = FilterLoaderAcross<Problem, Tuning>;
    using Pixels = typename Select<Problem::nhwc, PixelLoaderAlong<Problem, Tuning, interleaved, ImageNHWC<Problem>>,
                                   PixelLoaderAcross<Problem, Tuning, interleaved>>::type;
    using Product = TileProduct<Problem, Tuning, Filters, Pixels>;
    static_assert(Problem::groups == 1 && Problem::r == 1 && Problem::s == 1, "a product of outputs and rows of taps");
    static_assert(Tuning::split == 1, "a block has all filters");
    constexpr int tiles_k = ceil_div(Problem::k, Tuning::tile_k);
    const FlatPixels<Problem> places(batch, Phase<Problem>(0));
    float* const shared = reinterpret_cast<float*>(shared_memory());
    const Tiling<Tuning> tiling;
    const int tile_k = static_cast<int>(blockIdx.x) % tiles_k;
    const Offset<Problem> first_pixel = static_cast<Offset<Problem>>(blockIdx.x / tiles_k) * Tuning::tile_pixels;
    Filters filters(w, 0, tile_k, 0);
    Pixels pixels(dy, places, first_pixel, 0, shared + Product::stages * Product::stage_floats, 0);
    __syncthreads();  // the pixel loader's table
    float acc[Tuning::thread_k][Tuning::thread_pixels] = {};
    Product(shared, filters, pixels, tiling).run(acc, Pixels::steps);
    store_patches<Problem, Tuning>(acc, tiling, bias, dx, places, first_pixel, tile_k * Tuning::tile_k);
}

}  // namespace leanconv
