"""Convolution on NVIDIA GPUs without the workspace, for neural-network layers and for images."""

from leanconv import filters, ndimage
from leanconv.api import conv1d, conv1d_weight, conv2d, conv2d_input, conv2d_weight, explain, filter2d
from leanconv.call.ahead import Compilation, compile
from leanconv.call.choose import NoAlgorithmError
from leanconv.call.explain import algorithms
from leanconv.call.weights import PreparedWeights, prepare_weights
from leanconv.perf.tables import TableError
from leanconv.problem import ConvProblem, FilterProblem
from leanconv.runtime.compile import CompileError
from leanconv.runtime.driver import CudaError, CudaUnavailableError, OutOfMemoryError
from leanconv.tuning.record import tuning
from leanconv.tuning.search import Tuning, WrongResultError, tune

__version__ = "0.1.0"

__all__ = [
    "Compilation",
    "CompileError",
    "ConvProblem",
    "CudaError",
    "CudaUnavailableError",
    "FilterProblem",
    "NoAlgorithmError",
    "OutOfMemoryError",
    "PreparedWeights",
    "TableError",
    "Tuning",
    "WrongResultError",
    "algorithms",
    "compile",
    "conv1d",
    "conv1d_weight",
    "conv2d",
    "conv2d_input",
    "conv2d_weight",
    "explain",
    "filter2d",
    "filters",
    "ndimage",
    "prepare_weights",
    "tune",
    "tuning",
]
