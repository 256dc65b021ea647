// cutlass: one implicit GEMM of CUTLASS behind five C functions, for the benchmark.
//
//   y[m, k] = sum over r, s, c of x[m + (r, s), c] * w[k, r, s, c]        m: output pixel, k: filter; NHWC
//
// Requires   CUTLASS 3.5 or later (compiled with 4.2); channels and filters that are multiples of 16 bytes.
// Built by   nvcc, one library for each kernel; cutlass.py has the list of kernels and passes these macros:
//            ELEMENT                        type of x, w and y; sums are float
//            TILE_M, TILE_N, TILE_K         tile of a thread block: pixels, filters, reduction elements
//            STAGES, WARP_M, WARP_N, OPERATOR         CUTLASS 2: mma.sync and cp.async, from sm_80 on; the operator
//                                                     multiplies float as one TF32 product or as three (3xTF32)
//            HOPPER, CLUSTER_M                        CUTLASS 3: wgmma and TMA im2col; as many stages as fit
//
// NOTE: CUTLASS 3 has convolution on sm_90a with one consumer warpgroup alone, without a persistent schedule and
// without 3xTF32.

#include "cutlass/cutlass.h"

#ifdef HOPPER
#include "cute/tensor.hpp"
// NOTE: before the convolutions, which do not include it
#include "cutlass/kernel_hardware_info.hpp"
#include "cutlass/conv/collective/collective_builder.hpp"
#include "cutlass/conv/convnd_problem_shape.hpp"
#include "cutlass/conv/device/conv_universal_adapter.hpp"
#include "cutlass/conv/dispatch_policy.hpp"
#include "cutlass/conv/kernel/conv_universal.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#else
#include "cutlass/conv/kernel/default_conv2d_fprop.h"
// NOTE: after the kernel, which it does not include
#include "cutlass/conv/device/implicit_gemm_convolution.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#endif

/// A layer, in the order of the numbers that cutlass.py passes.
struct Layer {
    int n, h, w, c, k, r, s, p, q;
    int top, bottom, left, right;
    int stride_h, stride_w, dilation_h, dilation_w;
    int slices;  // of the reduction (serial split-K); 1 for none
};

namespace {

using Element = ELEMENT;
using Layout = cutlass::layout::TensorNHWC;
constexpr int kAlignment = 128 / cutlass::sizeof_bits<Element>::value;

struct Arrays {
    Element *x, *w, *y;
};

#ifdef HOPPER

using cute::Shape, cute::_1, cute::Int;
constexpr auto kOperator = cutlass::conv::Operator::kFprop;
using Tile = Shape<Int<TILE_M>, Int<TILE_N>, Shape<Int<TILE_K>>>;
using Cluster = Shape<Int<CLUSTER_M>, _1, _1>;

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, Element, Layout, kAlignment, Element, Layout,
    kAlignment, cutlass::epilogue::TmaWarpSpecialized>::CollectiveOp;
using Mainloop = typename cutlass::conv::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, kOperator, Element, Layout, kAlignment, Element, Layout,
    kAlignment, float, Tile, Cluster,
    cutlass::conv::collective::StageCountAutoCarveout<sizeof(typename Epilogue::SharedStorage)>,
    cutlass::conv::KernelImplicitTmaWarpSpecializedSm90>::CollectiveOp;
using ProblemShape = cutlass::conv::ConvProblemShape<kOperator, Mainloop::NumSpatialDimensions>;
using Kernel = cutlass::conv::kernel::ConvUniversal<ProblemShape, Mainloop, Epilogue>;
using Convolution = cutlass::conv::device::ConvUniversalAdapter<Kernel>;

Convolution::Arguments arguments(const Layer &layer, const Arrays &arrays) {
    ProblemShape shape(cutlass::conv::Mode::kCrossCorrelation, {layer.n, layer.h, layer.w, layer.c},
                       {layer.k, layer.r, layer.s, layer.c}, {layer.top, layer.left}, {layer.bottom, layer.right},
                       {layer.stride_h, layer.stride_w}, {layer.dilation_h, layer.dilation_w}, 1);
    // of y: ((q, p, n), filters)
    typename Kernel::StrideD stride{};
    cute::for_each(cute::make_seq<cute::rank<0>(typename Kernel::StrideD{})>{},
                   [&](auto i) { cute::get<0, i>(stride) = shape.stride_C[ProblemShape::RankT - 2 - i]; });
    typename Epilogue::Arguments epilogue{{}, arrays.y, stride, arrays.y, stride};
    epilogue.thread.alpha = 1.0f;
    epilogue.thread.beta = 0.0f;
    return {shape, {arrays.x, arrays.w}, epilogue, {}, {}};
}

#else

using Convolution =
    cutlass::conv::device::ImplicitGemmConvolution<typename cutlass::conv::kernel::DefaultConv2dFprop<
        Element, Layout, Element, Layout, Element, Layout, float, cutlass::arch::OpClassTensorOp,
        cutlass::arch::Sm80, cutlass::gemm::GemmShape<TILE_M, TILE_N, TILE_K>,
        cutlass::gemm::GemmShape<WARP_M, WARP_N, TILE_K>, cutlass::gemm::GemmShape<16, 8, 2 * kAlignment>,
        cutlass::epilogue::thread::LinearCombination<Element, kAlignment, float, float>,
        cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<4>, STAGES, cutlass::arch::OPERATOR,
        cutlass::conv::IteratorAlgorithm::kOptimized, cutlass::conv::StrideSupport::kStrided, kAlignment,
        kAlignment>::Kernel>;

Convolution::Arguments arguments(const Layer &layer, const Arrays &arrays) {
    // NOTE: bottom and right padding follow from p and q
    cutlass::conv::Conv2dProblemSize size(layer.n, layer.h, layer.w, layer.c, layer.k, layer.r, layer.s, layer.p,
                                          layer.q, layer.top, layer.left, layer.stride_h, layer.stride_w,
                                          layer.dilation_h, layer.dilation_w,
                                          cutlass::conv::Mode::kCrossCorrelation, layer.slices);
    auto y = Layout::packed({layer.n, layer.p, layer.q, layer.k});
    return {size,
            {arrays.x, Layout::packed({layer.n, layer.h, layer.w, layer.c})},
            {arrays.w, Layout::packed({layer.k, layer.r, layer.s, layer.c})},
            {arrays.y, y},
            {arrays.y, y},
            {1.0f, 0.0f}};
}

#endif

int code(cutlass::Status status) { return static_cast<int>(status); }

}  // namespace

extern "C" {

/// What a status means.
const char *leanconv_cutlass_text(int status) {
    return cutlass::cutlassGetStatusString(static_cast<cutlass::Status>(status));
}

/// Whether the kernel takes a layer (status 0), and the bytes of workspace that it needs.
int leanconv_cutlass_size(const Layer *layer, void *x, void *w, void *y, size_t *bytes) {
    auto given = arguments(*layer, {static_cast<Element *>(x), static_cast<Element *>(w), static_cast<Element *>(y)});
    *bytes = Convolution::get_workspace_size(given);
    return code(Convolution::can_implement(given));
}

/// A kernel ready to run on these arrays; null, and its status, where that fails.
void *leanconv_cutlass_open(const Layer *layer, void *x, void *w, void *y, void *workspace, int *status) {
    auto *made = new Convolution;
    Arrays arrays{static_cast<Element *>(x), static_cast<Element *>(w), static_cast<Element *>(y)};
    *status = code(made->initialize(arguments(*layer, arrays), workspace));
    if (*status == 0) return made;
    delete made;
    return nullptr;
}

/// Launch it on a stream.
int leanconv_cutlass_run(void *opened, cudaStream_t stream) {
    return code(static_cast<Convolution *>(opened)->run(stream));
}

void leanconv_cutlass_close(void *opened) { delete static_cast<Convolution *>(opened); }
}
