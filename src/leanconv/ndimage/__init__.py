"""The linear filters of ``scipy.ndimage``, with its signatures and its meaning, on arrays of several libraries.

Arrays on the CPU, of NumPy and of other libraries (PyTorch), and everything that NumPy converts to an array, may have
any number of dimensions and any dtype that SciPy takes. They are computed in float64 and cast to the output's dtype, as
SciPy does, on several threads (LEANCONV_THREADS). For integer and boolean outputs the order of the sum is SciPy's too,
each product and each sum rounded, so that truncation gives the same integers: SciPy's own routine does it where SciPy
is installed. For float outputs the order is free, which moves results by a few units of float64 roundoff; filters of
more than some 200 taps along an axis are computed by transforms, whose errors are relative to the largest numbers
nearby. Several passes over a float32 array are rounded once, not after each pass.

Arrays on a GPU (CuPy, PyTorch, DLPack) stay there: `leanconv.filter2d` computes them, those of float32, float16 and
bfloat16 with float32 sums, int32 with integer weights exactly, all else in float64. Two passes of a filter along axes
of one border are one launch, unless integers are truncated in between.

Every function raises, as SciPy does, ValueError for axes and origins that do not fit, TypeError for a cval that is no
number, or complex where the input is real, `MistakeError` (a RuntimeError that is a ValueError too) for modes, shapes
and sequences that do not fit, and `DtypeError` (a RuntimeError and a TypeError) for dtypes that cannot be computed.
"""

from leanconv.ndimage.arguments import DtypeError, MistakeError
from leanconv.ndimage.derivatives import (
    gaussian_gradient_magnitude,
    gaussian_laplace,
    generic_gradient_magnitude,
    generic_laplace,
    laplace,
    prewitt,
    sobel,
)
from leanconv.ndimage.smoothing import (
    convolve1d,
    correlate1d,
    gaussian_filter,
    gaussian_filter1d,
    uniform_filter,
    uniform_filter1d,
)
from leanconv.ndimage.windows import convolve, correlate

__all__ = [
    "DtypeError",
    "MistakeError",
    "convolve",
    "convolve1d",
    "correlate",
    "correlate1d",
    "gaussian_filter",
    "gaussian_filter1d",
    "gaussian_gradient_magnitude",
    "gaussian_laplace",
    "generic_gradient_magnitude",
    "generic_laplace",
    "laplace",
    "prewitt",
    "sobel",
    "uniform_filter",
    "uniform_filter1d",
]

#: Filters of SciPy's that are not linear, and what computes the same.
_INSTEAD = {"maximum_filter": "dilate", "median_filter": "median_blur", "minimum_filter": "erode"}


def __getattr__(name: str) -> object:
    said = f"module 'leanconv.ndimage' has no attribute {name!r}"
    if name in _INSTEAD:
        said += f": of images leanconv.{_INSTEAD[name]}(image, size, border='reflect') computes it"
    raise AttributeError(said)
