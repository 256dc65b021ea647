"""What conv1d, conv2d_input and conv2d_weight refuse, and what they say. conv2d's are in test_bad_input.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from leanconv import conv1d, conv1d_weight, conv2d_input, conv2d_weight, prepare_weights
from tests.messages import says

torch = pytest.importorskip("torch")

X, GRAD = np.ones((2, 4, 9, 8), np.float32), np.ones((2, 6, 7, 7), np.float32)
W = np.ones((6, 4, 3, 2), np.float32)
SIGNAL, TAPS = np.ones((2, 4, 9), np.float32), np.ones((6, 4, 3), np.float32)

Refused = list[tuple[dict[str, Any], type[Exception], tuple[str, ...]]]
INPUT: Refused = [
    ({"grad": GRAD[:, :, 1:]}, ValueError,
     ("grad has shape (2, 6, 6, 7), but the output has (2, 6, 7, 7) for input_shape=(2, 4, 9, 8), w of shape "
      "(6, 4, 3, 2), stride=1, padding=0, dilation=1 and groups=1",)),
    ({"stride": 2}, ValueError, ("grad has shape (2, 6, 7, 7), but the output has (2, 6, 4, 4)", "stride=2")),
    # the order of PyTorch's
    ({"grad": (2, 4, 9, 8), "input_shape": GRAD}, TypeError,
     ("input_shape is an array of shape (2, 6, 7, 7), and must be a tuple: arrays come first here",)),
    ({"input_shape": torch.ones(2, 6, 7, 7)}, TypeError, ("input_shape is an array of shape (2, 6, 7, 7)",)),
    ({"input_shape": np.array([2, 4])}, TypeError, ("input_shape=array([2, 4]) is no shape; give a tuple",)),
    ({"input_shape": 4}, TypeError, ("input_shape=4 is no shape; give a tuple of integers",)),
    ({"grad": GRAD[0]}, ValueError,
     ("grad has shape (6, 7, 7) and input_shape=(2, 4, 9, 8): either both have a batch axis, or neither",)),
    ({"grad": GRAD[0, 0]}, ValueError, ("grad has 2 dimensions, shape (7, 7); it must have 4, or 3 without",)),
    ({"grad": GRAD[0, :, 1:], "input_shape": (4, 9, 8)}, ValueError,
     ("grad has shape (6, 6, 7), but the output has (6, 7, 7) for input_shape=(4, 9, 8)",)),
    ({"input_shape": (1, 4, 9, 8)}, ValueError, ("but the output has (1, 6, 7, 7)",)),
    ({"input_shape": (4, 9, 8)}, ValueError, ("grad has shape (2, 6, 7, 7) and input_shape=(4, 9, 8)",)),
    ({"input_shape": 4}, TypeError, ("input_shape=4 is no shape; give a tuple of integers",)),
    ({"input_shape": (2, 4, 9, 8.0)}, TypeError, ("input_shape=8.0 is not an integer",)),
    ({"input_shape": (2, 4, -9, 8)}, ValueError, ("input_shape=-9 is below 0",)),
    ({"input_shape": (2, 4, 0, 8)}, ValueError,
     ("input_shape has 2 images of 4 channels, 0 rows and 8 columns; only its batch",)),
    ({"input_shape": (2, 3, 9, 8)}, ValueError, ("w has 4 channels, but input_shape has in_channels=3",)),
    ({"input_shape": (2, 4, 2, 8)}, ValueError, ("the output would be 0x7",)),
    ({"w": W[0]}, ValueError, ("w has 3 dimensions",)),
    ({"w": W.astype(np.float64)}, TypeError, ("w has dtype float64 and grad float32",)),
    ({"w": torch.ones(6, 4, 3, 2)}, ValueError, ("grad is an array of NumPy", "w one of PyTorch")),
    ({"grad": [1.0]}, TypeError, ("grad is a list",)),
    ({"out": np.zeros((2, 4, 9, 9), np.float32)}, ValueError, ("out has shape (2, 4, 9, 9); the result has",)),
    ({"layout": "NHWC"}, ValueError, ("w has 2 channels, but input_shape has in_channels=8",)),
    ({"layout": "CHWN"}, ValueError, ("w has 6 channels, but input_shape has in_channels=2",)),
    ({"layout": "CHWN", "input_shape": (6, 9, 8, 4)}, ValueError,
     ("grad has shape (2, 6, 7, 7), but the output has (2, 6, 6, 4) for input_shape=(6, 9, 8, 4)",)),
    ({"layout": "NWC"}, ValueError, ("layout='NWC' is not known",)),
]  # fmt: skip
WEIGHT: Refused = [
    ({"grad": GRAD[:, :, 1:]}, ValueError,
     ("grad has shape (2, 6, 6, 7), but the output has (2, 6, 7, 7) for x of shape (2, 4, 9, 8), "
      "weight_shape=(6, 4, 3, 2), stride=1, padding=0, dilation=1 and groups=1",)),
    ({"stride": 2}, ValueError, ("grad has shape (2, 6, 7, 7), but the output has (2, 6, 4, 4)", "stride=2")),
    ({"grad": GRAD[:1]}, ValueError, ("grad has shape (1, 6, 7, 7), but the output has (2, 6, 7, 7)",)),
    ({"grad": GRAD[0]}, ValueError,
     ("x has shape (2, 4, 9, 8) and grad (6, 7, 7): either both have a batch axis, or neither",)),
    ({"grad": GRAD[0, 0]}, ValueError, ("grad has 2 dimensions, shape (7, 7); it must have 4, or 3 without",)),
    ({"x": X[0, 0]}, ValueError, ("x has 2 dimensions, shape (9, 8); it must have 4, or 3 without",)),
    ({"weight_shape": (7, 4, 3, 2)}, ValueError, ("grad has shape (2, 6, 7, 7), but the output has (2, 7, 7, 7)",)),
    ({"weight_shape": (6, 4, 3)}, ValueError, ("weight_shape has 3 dimensions, shape (6, 4, 3); it must have 4",)),
    ({"weight_shape": 4}, TypeError, ("weight_shape=4 is no shape; give a tuple of integers",)),
    ({"weight_shape": (6, 4, 3, 2.0)}, TypeError, ("weight_shape=2.0 is not an integer",)),
    ({"weight_shape": (6, 4, -3, 2)}, ValueError, ("weight_shape=-3 is below 0",)),
    ({"weight_shape": (6, 4, 0, 2)}, ValueError, ("weight_shape has 6 filters of 4 channels, 0 rows and 2",)),
    ({"weight_shape": (6, 2, 3, 2)}, ValueError,
     ("weight_shape has 2 channels, but x has in_channels=4 and groups=1, read as NCHW: each filter must have 4",)),
    ({"groups": 2}, ValueError,
     ("weight_shape has 4 channels, but x has in_channels=4 and groups=2, read as NCHW: each filter must have 2",)),
    ({"groups": 4}, ValueError, ("out_channels=6 is not divisible by groups=4",)),
    ({"groups": 3}, ValueError, ("in_channels=4 is not divisible by groups=3",)),
    ({"weight_shape": (6, 4, 10, 2)}, ValueError, ("the output would be 0x7",)),
    ({"grad": GRAD.astype(np.float64)}, TypeError, ("grad has dtype float64 and x float32",)),
    ({"grad": torch.ones(2, 6, 7, 7)}, ValueError, ("x is an array of NumPy", "grad one of PyTorch")),
    ({"grad": prepare_weights(GRAD)}, TypeError, ("grad is a", "PreparedWeights")),
    ({"x": [1.0]}, TypeError, ("x is a list",)),
    ({"out": np.zeros((6, 4, 3, 3), np.float32)}, ValueError, ("out has shape (6, 4, 3, 3); the result has",)),
    ({"layout": "NHWC"}, ValueError, ("weight_shape has 2 channels, but x has in_channels=8",)),
    ({"layout": "NWC"}, ValueError, ("layout='NWC' is not known",)),
    ({"algorithm": "direct"}, ValueError, ("direct: on the CPU it computes op 'fprop', not 'wgrad'",)),
]  # fmt: skip
SIGNALS: Refused = [
    (
        {"x": SIGNAL[None]},
        ValueError,
        ("x has 4 dimensions, shape (1, 2, 4, 9); it must have 3, or 2 without a batch",),
    ),
    ({"w": TAPS[0]}, ValueError, ("w has 2 dimensions, shape (4, 3); it must have 3",)),
    ({"layout": "NCHW"}, ValueError, ("layout='NCHW' is not known; choose one of 'NCW', 'NWC', 'CWN'",)),
    ({"layout": "CHWN"}, ValueError, ("layout='CHWN' is not known; choose one of 'NCW', 'NWC', 'CWN'",)),
    ({"layout": "CWN"}, ValueError, ("w has 6 channels, but x has in_channels=2 and groups=1",)),
    ({"layout": "NWC"}, ValueError, ("w has 3 channels, but x has in_channels=9 and groups=1",)),
    ({"stride": (1, 2)}, ValueError, ("stride=(1, 2) must be an integer: there is one axis",)),
    ({"stride": 0}, ValueError, ("stride=0 is below 1",)),
    ({"dilation": 1.5}, TypeError, ("dilation=1.5 is not an integer",)),
    ({"padding": (1, 2, 3)}, ValueError, ("padding=(1, 2, 3) must be an integer, (left, right), 'same' or",)),
    ({"padding": -1}, ValueError, ("padding=-1 is below 0",)),
    ({"padding": (0, -1)}, ValueError, ("padding=-1 is below 0",)),
    ({"padding": "same", "stride": 2}, ValueError, ("padding='same' needs stride=1, got stride=2",)),
    ({"padding": "full"}, ValueError, ("padding='full' is not known",)),
    ({"padding": (2**31, 0)}, ValueError, ("padding=2147483648 is above",)),
    (
        {"dilation": 9},
        ValueError,
        ("a filter of 3 taps with dilation 9 covers 19 samples, the padded input has 9",),
    ),
    (
        {"x": SIGNAL[:, :, :0]},
        ValueError,
        ("x has 2 signals of 4 channels and 0 samples; only its batch may be empty",),
    ),
    ({"w": TAPS[:, :, :0]}, ValueError, ("w has 6 filters of 4 channels and 0 taps; it must not be empty",)),
    ({"w": TAPS[:, :, :0], "padding": "same"}, ValueError, ("w has 6 filters of 4 channels and 0 taps",)),
    ({"bias": SIGNAL[0, 0]}, ValueError, ("bias has shape (9,); it must have shape (6,)",)),
    ({"out": np.zeros((2, 6, 1, 7), np.float32)}, ValueError, ("out has shape (2, 6, 1, 7)", "(2, 6, 7)")),
    ({"w": torch.ones(6, 4, 3)}, ValueError, ("x is an array of NumPy", "w one of PyTorch")),
    ({"x": [1.0]}, TypeError, ("x is a list",)),
    ({"algorithm": "fft"}, ValueError, ("algorithm='fft' is not known",)),
]
WEIGHT_OF_SIGNALS: Refused = [
    ({"weight_shape": TAPS}, TypeError, ("weight_shape is an array of shape (6, 4, 3), and must be a tuple",)),
    ({"weight_shape": (6, 4, 3, 1)}, ValueError, ("weight_shape has 4 dimensions",)),
]
#: functions, what they are called with, and changes of it that are refused
CALLS: list[tuple[Any, dict[str, Any], Refused]] = [
    (conv2d_input, {"grad": GRAD, "w": W, "input_shape": (2, 4, 9, 8)}, INPUT),
    (conv2d_weight, {"x": X, "grad": GRAD, "weight_shape": (6, 4, 3, 2)}, WEIGHT),
    (conv1d, {"x": SIGNAL, "w": TAPS}, SIGNALS),
    (
        conv1d_weight,
        {"x": SIGNAL, "grad": np.ones((2, 6, 7), np.float32), "weight_shape": (6, 4, 3)},
        WEIGHT_OF_SIGNALS,
    ),
]


@pytest.mark.parametrize(
    "function, given, change, kind, parts",
    [
        pytest.param(function, given, *each, id=f"{function.__name__}-{i}-{'-'.join(each[0])}")
        for function, given, refused in CALLS
        for i, each in enumerate(refused)
    ],
)
def test_what_is_refused(
    function: Any, given: dict[str, Any], change: dict[str, Any], kind: type[Exception], parts: tuple[str, ...]
) -> None:
    for _ in range(2):
        with says(kind, *parts):
            function(**{**given, **change})
