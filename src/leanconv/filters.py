"""Small kernels for `leanconv.filter2d`, and the words that name them for ``leanconv filter --kernel``.

Formulas are meant as filter2d computes, by correlation: ``y[i,j] = sum over u,v of kernel[u,v] * image[i+u-a, j+v-b]``.
All kernels are float32 arrays (rows, columns), anchored at their middle.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def box(size: int) -> np.ndarray:
    """The mean of size × size pixels: ``kernel[u,v] = 1 / size²``. Raises ValueError for a size below 1.

    >>> float(box(4)[0, 0])
    0.0625
    """
    _check_size(size)
    return np.full((size, size), 1 / size**2, np.float32)


def gaussian(size: int, sigma: float | None = None) -> np.ndarray:
    """A bell: ``kernel[u,v] ∝ exp(-((u-m)² + (v-m)²) / (2 sigma²))`` with ``m = (size-1)/2``; the weights sum to 1.

    ``sigma`` is in pixels. By default it is OpenCV's for the size, ``0.3 * ((size-1)/2 - 1) + 0.8``.
    Raises ValueError for a size below 1 or a sigma that is not positive.

    >>> gaussian(3, 0.85)[1].round(2).tolist()
    [0.13, 0.25, 0.13]
    """
    _check_size(size)
    if sigma is None:
        sigma = 0.3 * ((size - 1) / 2 - 1) + 0.8
    if not sigma > 0 or not np.isfinite(sigma):
        raise ValueError(f"sigma={sigma} must be a positive number of pixels")
    distance = np.arange(size) - (size - 1) / 2
    # NOTE: the smallest square is taken off, so that a tiny sigma leaves the middle at 1 and no sum at 0
    square = distance**2 - (distance**2).min()
    line = np.exp(-square / (2 * float(sigma) ** 2))
    line /= line.sum()
    return np.outer(line, line).astype(np.float32)


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

    Raises ValueError naming what is not understood.

    >>> float(from_words("sharpen").sum())
    1.0
    """
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


def _check_size(size: int) -> None:
    if size < 1:
        raise ValueError(f"size={size} must be at least 1")
