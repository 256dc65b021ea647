"""Convolution on NVIDIA GPUs without the workspace, for neural-network layers and for images."""

from leanconv import ndimage, signal
from leanconv.api import (
    conv1d,
    conv1d_input,
    conv1d_weight,
    conv2d,
    conv2d_input,
    conv2d_weight,
    explain,
)
from leanconv.call.choose import NoAlgorithmError
from leanconv.call.explain import Explanation, list_algorithms
from leanconv.call.precompile import PrecompileResult, precompile
from leanconv.call.weights import PreparedWeights, prepare_weights
from leanconv.images import filters
from leanconv.images.api import filter2d, filter3d
from leanconv.images.named import (
    gaussian_blur,
    laplacian,
    prewitt,
    scharr,
    sep_filter2d,
    sobel,
    unsharp_mask,
)
from leanconv.images.windows import box_blur, dilate, erode, median_blur
from leanconv.perf.tables import TableError
from leanconv.problem import ConvProblem, FilterProblem
from leanconv.runtime.compile import CompileError
from leanconv.runtime.driver import CudaError, CudaUnavailableError, OutOfMemoryError
from leanconv.runtime.errors import LeanconvError
from leanconv.tuning.search import TuningResult, WrongResultError, record_tuning, tune
from leanconv.volumes.api import conv3d, conv3d_input, conv3d_weight, conv_transpose3d

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "ConvProblem",
    "CudaError",
    "CudaUnavailableError",
    "Explanation",
    "FilterProblem",
    "LeanconvError",
    "NoAlgorithmError",
    "OutOfMemoryError",
    "PrecompileResult",
    "PreparedWeights",
    "TableError",
    "TuningResult",
    "WrongResultError",
    "box_blur",
    "conv1d",
    "conv1d_input",
    "conv1d_weight",
    "conv2d",
    "conv2d_input",
    "conv2d_weight",
    "conv3d",
    "conv3d_input",
    "conv3d_weight",
    "conv_transpose3d",
    "dilate",
    "erode",
    "explain",
    "filter2d",
    "filter3d",
    "filters",
    "gaussian_blur",
    "laplacian",
    "list_algorithms",
    "median_blur",
    "ndimage",
    "precompile",
    "prepare_weights",
    "prewitt",
    "record_tuning",
    "scharr",
    "sep_filter2d",
    "signal",
    "sobel",
    "tune",
    "unsharp_mask",
]

#: Names of earlier versions, and what they are called now.
_RENAMED = {
    "Compilation": "PrecompileResult",
    "Tuning": "TuningResult",
    "algorithms": "list_algorithms",
    "compile": "precompile",
    "tuning": "record_tuning",
}
#: Names that a caller may look for, and what computes the same.
_INSTEAD = {
    f"conv_transpose{axes}d": f"leanconv.conv{axes}d_input(x, w, shape of the result) computes it, without a bias; of "
    f"tensors leanconv.torch.conv_transpose{axes}d, with one"
    for axes in (1, 2)
}
# NOTE: the import above has set it, and it was a function: whoever calls it shall be told the new name
del tuning  # type: ignore[name-defined]  # noqa: F821


def __getattr__(name: str) -> object:
    if name in _RENAMED:
        raise AttributeError(f"leanconv.{name} is now leanconv.{_RENAMED[name]}")
    if name in _INSTEAD:
        raise AttributeError(f"module 'leanconv' has no attribute {name!r}: {_INSTEAD[name]}")
    raise AttributeError(f"module 'leanconv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
