"""The algorithms that run on a GPU, in order of preference."""

from __future__ import annotations

from leanconv.kernels.contract import GpuAlgorithm
from leanconv.kernels.depthwise.depthwise_input import DepthwiseInput
from leanconv.kernels.depthwise.depthwise_large import DepthwiseLarge
from leanconv.kernels.depthwise.depthwise_row import DepthwiseRow
from leanconv.kernels.depthwise.depthwise_weight import DepthwiseWeight
from leanconv.kernels.depthwise.depthwise_weight_large import DepthwiseWeightLarge
from leanconv.kernels.depthwise.depthwise_window import DepthwiseWindow
from leanconv.kernels.direct.direct import Direct
from leanconv.kernels.direct.direct_tiled import DirectTiled
from leanconv.kernels.direct.single_channel import SingleChannel
from leanconv.kernels.hopper_fp32.tensor_gemm import TensorGemm
from leanconv.kernels.hopper_fp32.tensor_weight import TensorWeight
from leanconv.kernels.hopper_fp32.tensor_weight_images import TensorWeightImages
from leanconv.kernels.hopper_fp32.tensor_winograd import TensorWinograd
from leanconv.kernels.hopper_native.native_gemm_16bit import NativeGemm16bit
from leanconv.kernels.hopper_native.native_gemm_nchw import NativeGemmNchw
from leanconv.kernels.hopper_native.native_gemm_planes import NativeGemmPlanes
from leanconv.kernels.hopper_native.native_gemm_pointwise import NativeGemmPointwise
from leanconv.kernels.hopper_native.native_gemm_tf32 import NativeGemmTf32
from leanconv.kernels.hopper_native.native_gemm_window import NativeGemmWindow
from leanconv.kernels.hopper_native.native_gemm_window_tf32 import NativeGemmWindowTf32
from leanconv.kernels.hopper_native.native_weight_kmajor import NativeWeightKMajor
from leanconv.kernels.hopper_native.native_weight_nchw import NativeWeightNchw
from leanconv.kernels.hopper_native.native_weight_nhwc import NativeWeightNhwc
from leanconv.kernels.image_filter.box import Box
from leanconv.kernels.image_filter.box_passes import BoxPasses
from leanconv.kernels.image_filter.fourier_lines import FourierLines
from leanconv.kernels.image_filter.fourier_tiles import FourierTiles
from leanconv.kernels.image_filter.median import Median
from leanconv.kernels.image_filter.register_cache import RegisterCache
from leanconv.kernels.image_filter.separable import Separable
from leanconv.kernels.image_filter.separable_tensor import SeparableTensor
from leanconv.kernels.image_filter.tensor_filter import TensorFilter
from leanconv.kernels.mma_sync.native_gemm_groups import NativeGemmGroups
from leanconv.kernels.mma_sync.native_gemm_rows import NativeGemmRows
from leanconv.kernels.mma_sync.native_gemm_skinny import NativeGemmSkinny
from leanconv.kernels.mma_sync.native_gemm_sync import NativeGemmSync
from leanconv.kernels.mma_sync.native_weight_groups import NativeWeightGroups
from leanconv.kernels.mma_sync.native_weight_rows import NativeWeightRows
from leanconv.kernels.mma_sync.native_weight_sync import NativeWeightSync
from leanconv.kernels.mma_sync.tensor_gemm_sync import TensorGemmSync
from leanconv.kernels.mma_sync.tensor_gemm_sync_col2im import TensorGemmSyncCol2im
from leanconv.kernels.papers.direct_weight import DirectWeight
from leanconv.kernels.papers.im2win import Im2win
from leanconv.kernels.papers.im2win_basic import Im2winBasic
from leanconv.kernels.simt.im2win_fused import Im2winFused
from leanconv.kernels.simt.implicit_gemm import ImplicitGemm
from leanconv.kernels.simt.implicit_gemm_dp4a import ImplicitGemmDp4a
from leanconv.kernels.simt.implicit_gemm_patches import ImplicitGemmPatches
from leanconv.kernels.simt.implicit_gemm_weight import ImplicitGemmWeight
from leanconv.kernels.simt.winograd1d import Winograd1d
from leanconv.kernels.simt.winograd2d import Winograd2d

#: What runs on a GPU. A new algorithm is one line here.
ALGORITHMS: tuple[GpuAlgorithm, ...] = (
    Im2winFused(),
    ImplicitGemm(),
    TensorGemm(),
    NativeGemm16bit(),
    NativeGemmWindow(),
    NativeGemmGroups(),
    NativeGemmRows(),
    NativeGemmSkinny(),
    NativeGemmSync(),
    TensorGemmSync(),
    TensorGemmSyncCol2im(),
    NativeGemmTf32(),
    NativeGemmWindowTf32(),
    NativeGemmPointwise(),
    NativeGemmPlanes(),
    NativeGemmNchw(),
    TensorWinograd(),
    Winograd1d(),
    Im2win(),
    Im2winBasic(),
    Winograd2d(),
    DepthwiseWindow(),
    DepthwiseLarge(),
    DepthwiseRow(),
    ImplicitGemmDp4a(),
    ImplicitGemmPatches(),
    DepthwiseInput(),
    DepthwiseWeight(),
    DepthwiseWeightLarge(),
    TensorWeight(),
    TensorWeightImages(),
    NativeWeightNchw(),
    NativeWeightKMajor(),
    NativeWeightNhwc(),
    NativeWeightGroups(),
    NativeWeightRows(),
    NativeWeightSync(),
    ImplicitGemmWeight(),
    SingleChannel(),
    DirectTiled(),
    Direct(),
    DirectWeight(),
    RegisterCache(),
    TensorFilter(),
    Separable(),
    SeparableTensor(),
    FourierLines(),
    FourierTiles(),
    Box(),
    BoxPasses(),
    Median(),
)
