"""What follows the sums of a layer, on NumPy arrays: scale, bias, residual, activation."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from leanconv.options import activation_parts


def finish(
    y: np.ndarray, axis: int, bias: np.ndarray | None, scale: np.ndarray | None, add: np.ndarray | None,
    activation: str | None,
) -> np.ndarray:  # fmt: skip
    """``activation(scale[k] * y + bias[k] + add)`` of sums whose filters are at ``axis``; they are overwritten."""
    each = [1] * y.ndim
    each[axis] = y.shape[axis]
    if scale is not None:
        y *= scale.reshape(each)
    if bias is not None:
        y += bias.astype(y.dtype, copy=False).reshape(each)
    if add is not None:
        y += add.astype(y.dtype, copy=False).reshape(y.shape)
    return y if activation is None else activated(activation, y)


def activated(activation: str, y: np.ndarray) -> np.ndarray:
    """An activation, as `options.activation_of` returns it, of each element."""
    name, value = activation_parts(activation)
    with np.errstate(over="ignore", invalid="ignore"):
        return _FUNCTIONS[name](y, y.dtype.type(value))


@cache
def _erf() -> Any:
    """SciPy's error function, imported when it is first needed; where it is missing Python's, number by number."""
    try:
        return importlib.import_module("scipy.special").erf
    except ImportError:
        return np.vectorize(math.erf, "d")


def _sigmoid(y: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-y))


def _gelu_tanh(y: np.ndarray) -> np.ndarray:
    return 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))


#: Functions of an array and the activation's number, which most do not have.
_FUNCTIONS: dict[str, Callable[[np.ndarray, np.generic], np.ndarray]] = {
    "relu": lambda y, _: np.maximum(y, 0, out=y),
    "relu6": lambda y, _: np.clip(y, 0, 6, out=y),
    "leaky_relu": lambda y, slope: np.where(y < 0, y * slope, y),
    "elu": lambda y, alpha: np.where(y < 0, alpha * np.expm1(y), y),
    "gelu": lambda y, _: (0.5 * y * (1 + _erf()(y * math.sqrt(0.5)))).astype(y.dtype, copy=False),
    "gelu_tanh": lambda y, _: _gelu_tanh(y),
    "silu": lambda y, _: y * _sigmoid(y),
    "hardswish": lambda y, _: y * np.clip(y + 3, 0, 6) / 6,
    "sigmoid": lambda y, _: _sigmoid(y),
    "tanh": lambda y, _: np.tanh(y),
}
