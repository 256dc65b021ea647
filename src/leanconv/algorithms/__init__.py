"""The algorithms that run on a GPU, in order of preference."""

from __future__ import annotations

from leanconv.algorithms.base import GpuAlgorithm
from leanconv.algorithms.depthwise import Depthwise
from leanconv.algorithms.depthwise_input import DepthwiseInput
from leanconv.algorithms.depthwise_row import DepthwiseRow
from leanconv.algorithms.depthwise_weight import DepthwiseWeight
from leanconv.algorithms.depthwise_wide import DepthwiseWide
from leanconv.algorithms.direct import Direct
from leanconv.algorithms.direct_dp4a import DirectDp4a
from leanconv.algorithms.direct_tiled import DirectTiled
from leanconv.algorithms.direct_weight import DirectWeight
from leanconv.algorithms.im2win import Im2win
from leanconv.algorithms.im2win_basic import Im2winBasic
from leanconv.algorithms.im2win_fused import Im2winFused
from leanconv.algorithms.implicit_gemm import ImplicitGemm
from leanconv.algorithms.implicit_gemm_weight import ImplicitGemmWeight
from leanconv.algorithms.register_cache import RegisterCache
from leanconv.algorithms.single_channel import SingleChannel
from leanconv.algorithms.tensor_gemm import TensorGemm
from leanconv.algorithms.tensor_gemm_narrow import TensorGemmNarrow
from leanconv.algorithms.tensor_gemm_sync import TensorGemmSync
from leanconv.algorithms.tensor_gemm_tf32 import TensorGemmTf32
from leanconv.algorithms.tensor_weight import TensorWeight
from leanconv.algorithms.tensor_weight_images import TensorWeightImages
from leanconv.algorithms.tensor_window import TensorWindow
from leanconv.algorithms.tensor_window_weight import TensorWindowWeight
from leanconv.algorithms.tensor_winograd import TensorWinograd
from leanconv.algorithms.winograd1d import Winograd1d
from leanconv.algorithms.winograd2d import Winograd2d

#: What runs on a GPU. A new algorithm is one line here.
ALGORITHMS: tuple[GpuAlgorithm, ...] = (
    Im2winFused(),
    ImplicitGemm(),
    TensorGemm(),
    TensorGemmNarrow(),
    TensorGemmSync(),
    TensorGemmTf32(),
    TensorWindow(),
    TensorWinograd(),
    Winograd1d(),
    Im2win(),
    Im2winBasic(),
    Winograd2d(),
    Depthwise(),
    DepthwiseWide(),
    DepthwiseRow(),
    DirectDp4a(),
    DepthwiseInput(),
    DepthwiseWeight(),
    TensorWeight(),
    TensorWeightImages(),
    TensorWindowWeight(),
    ImplicitGemmWeight(),
    SingleChannel(),
    DirectTiled(),
    Direct(),
    DirectWeight(),
    RegisterCache(),
)
