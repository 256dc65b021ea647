"""Small kernels for `leanconv.filter2d`, and the words that name them for ``leanconv filter --kernel``.

Formulas are meant as filter2d computes, by correlation: ``y[i,j] = sum over u,v of kernel[u,v] * image[i+u-a, j+v-b]``.
All kernels are float32 arrays (rows, columns), anchored at their middle.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from leanconv.options import integer, number

#: OpenCV's kernels for odd sizes up to 9 where no sigma is given, in units of 1/256.
_FIXED_GAUSSIANS = {
    size: np.array(weights) / 256
    for size, weights in {
        1: (256,),
        3: (64, 128, 64),
        5: (16, 64, 96, 64, 16),
        7: (8, 28, 56, 72, 56, 28, 8),
        9: (4, 13, 30, 51, 60, 51, 30, 13, 4),
    }.items()
}


def box(size: int) -> np.ndarray:
    """The mean of size × size pixels: ``kernel[u,v] = 1 / size²``.

    Raises ValueError for a size below 1, TypeError for one that is not an integer.

    >>> float(box(4)[0, 0])
    0.0625
    """
    size = integer("size", size, 1)
    return np.full((size, size), 1 / size**2, np.float32)


def gaussian(size: int, sigma: float | None = None) -> np.ndarray:
    """A bell: ``kernel[u,v] ∝ exp(-((u-m)² + (v-m)²) / (2 sigma²))`` with ``m = (size-1)/2``; the weights sum to 1.

    ``sigma`` is in pixels. Without it the kernel is the one that OpenCV takes for an odd size: up to 9 a fixed one, for
    3 the products of [1, 2, 1] / 4; above, and for even sizes, the bell with ``sigma = 0.3 * ((size-1)/2 - 1) + 0.8``.

    Raises:
        ValueError: a size below 1, or a sigma that is not positive and finite.
        TypeError: a size that is not an integer, or a sigma that is not a number.

    >>> gaussian(3)[1].tolist()
    [0.125, 0.25, 0.125]
    """
    line = gaussian_line(size, sigma)
    return np.outer(line, line).astype(np.float32)


def gaussian_line(size: int, sigma: float | None = None) -> np.ndarray:
    """One row of `gaussian`, in float64. Raises as that does."""
    size = integer("size", size, 1)
    if sigma is None:
        return _FIXED_GAUSSIANS[size] if size in _FIXED_GAUSSIANS else _bell(size, 0.3 * ((size - 1) / 2 - 1) + 0.8)
    pixels = number("sigma", sigma)
    if not 0 < pixels < np.inf:
        raise ValueError(f"sigma={sigma!r} must be a positive, finite number of pixels")
    return _bell(size, pixels)


def _bell(size: int, sigma: float) -> np.ndarray:
    """One row of a Gaussian, of any positive sigma; its weights sum to 1."""
    distance = np.arange(size) - (size - 1) / 2
    # NOTE: the smallest square is taken off, so that a tiny sigma leaves the middle at 1 and no sum at 0; sigma divides
    # before the square, since its own square may be 0 or beyond float64
    square = distance**2 - (distance**2).min()
    with np.errstate(over="ignore"):
        line = np.exp(-((np.sqrt(square) / sigma) ** 2) / 2)
    weights: np.ndarray = line / line.sum()
    return weights


def sobel_x() -> np.ndarray:
    """The slope along a row, smoothed across: positive where the image gets brighter to the right."""
    return np.outer([1, 2, 1], [-1, 0, 1]).astype(np.float32)


def sobel_y() -> np.ndarray:
    """The slope down a column, smoothed across: positive where the image gets brighter downwards."""
    return np.ascontiguousarray(sobel_x().T)


def laplacian() -> np.ndarray:
    """The sum of the four neighbours less four times the pixel: the five-point second derivative."""
    return np.array([[0, 1, 0], [1, -4, 1], [0, 1, 0]], np.float32)


def sharpen() -> np.ndarray:
    """The pixel less its `laplacian`; the weights sum to 1."""
    return np.array([[0, -1, 0], [-1, 5, -1], [0, -1, 0]], np.float32)


def emboss() -> np.ndarray:
    """Relief lit from the upper left: the slope along the diagonal, added to the pixel; the weights sum to 1."""
    return np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]], np.float32)


_FIXED: dict[str, Callable[[], np.ndarray]] = {
    "sobel-x": sobel_x,
    "sobel-y": sobel_y,
    "laplacian": laplacian,
    "sharpen": sharpen,
    "emboss": emboss,
}

#: How each kernel is written on a command line.
WORDS = ("gaussian:SIZE[:SIGMA]", "box:SIZE", *_FIXED)
#: The largest SIZE: more would be a slip of the finger, and gigabytes.
_MOST = 4096


def from_words(text: str) -> np.ndarray:
    """The kernel that ``text`` names: ``gaussian:7``, ``gaussian:7:1.5``, ``box:5``, ``sobel-x``, …; see WORDS.

    Raises ValueError naming what is not understood, TypeError for anything but a string.

    >>> float(from_words("sharpen").sum())
    1.0
    """
    if not isinstance(text, str):
        raise TypeError(f"kernel={text!r} must be a string; choose one of {', '.join(WORDS)}")
    name, *numbers = text.split(":")
    if name in _FIXED and not numbers:
        return _FIXED[name]()
    if name in ("gaussian", "box") and 1 <= len(numbers) <= (2 if name == "gaussian" else 1):
        try:
            size, sigma = int(numbers[0]), (float(numbers[1]) if len(numbers) == 2 else None)
        except ValueError:
            raise ValueError(f"kernel={text!r}: what follows {name!r} must be numbers") from None
        if size > _MOST:
            raise ValueError(f"kernel={text!r}: the size must be at most {_MOST} pixels")
        return box(size) if name == "box" else gaussian(size, sigma)
    raise ValueError(f"kernel={text!r} is not known; choose one of {', '.join(WORDS)}, or a file FILE.npy")
