"""What the kernels of the filters' gradient are proven on: layers of their own, and data of every range."""

from __future__ import annotations

import numpy as np

from leanconv.problem import ConvProblem
from tests.cases import ALL, USUAL, Case, Layers


def _weight_cases() -> list[Case]:
    """Layers that the loaders of the kernels tell apart, with several tiles."""
    layers = Layers("filters-", op="wgrad", precision="fp32")
    pad = {"padding": (1, 1, 1, 1)}
    layers.add("same", 2, 40, 6, 8, 72, 3, 3, layouts=ALL, **pad)
    layers.add("odd", 3, 38, 7, 7, 70, 3, 3, layouts=USUAL, **pad)
    layers.add("odd-filters", 2, 36, 7, 7, 70, 2, 3, layouts=USUAL, **pad)
    layers.add("stride", 2, 48, 9, 9, 68, 3, 3, layouts=USUAL, stride=(2, 1), padding=(1, 0, 1, 2))
    layers.add("dilation", 1, 36, 11, 9, 40, 3, 2, layouts=USUAL, dilation=(2, 3), padding=(2, 2, 2, 1))
    layers.add("groups", 2, 64, 6, 8, 96, 3, 3, layouts=USUAL, groups=2, **pad)
    layers.add("small-groups", 2, 60, 6, 5, 60, 3, 3, layouts=USUAL, groups=3, **pad)
    layers.add("few-channels", 2, 3, 13, 12, 64, 7, 7, layouts=ALL, stride=(2, 2), padding=(3, 3, 3, 3))
    layers.add("accumulate", 1, 32, 8, 8, 64, 3, 3, layouts=USUAL, accumulate=True, **pad)
    layers.add("five-columns", 2, 36, 5, 9, 40, 2, 5, layouts=USUAL, padding=(0, 0, 2, 2))
    layers.add("many-pixels", 9, 32, 12, 12, 64, 1, 1, layouts=USUAL)
    one = Layers("filters-", op="wgrad", precision="tf32")
    one.add("one-product", 2, 40, 6, 8, 72, 3, 3, layouts=USUAL, **pad)
    return layers.cases + one.cases


def _image_cases() -> list[Case]:
    """Layers of many small images, that `tensor_weight_images` takes: each has several tiles or blocks of images."""
    layers = Layers("images-", op="wgrad", precision="fp32")
    pad = {"padding": (1, 1, 1, 1)}
    only = {"layouts": ("NHWC",)}
    layers.add("same", 20, 40, 3, 4, 72, 3, 3, **only, **pad)
    layers.add("many", 70, 72, 2, 3, 40, 3, 3, **only, **pad)
    layers.add("stride", 33, 64, 5, 4, 32, 3, 3, stride=(2, 1), **only, **pad)
    layers.add("wide", 16, 32, 2, 5, 32, 3, 5, padding=(1, 1, 2, 2), **only)
    layers.add("dilation", 16, 36, 5, 6, 32, 3, 2, dilation=(2, 3), padding=(2, 1, 1, 0), **only)
    layers.add("groups", 17, 64, 3, 3, 72, 3, 3, groups=2, **only, **pad)
    layers.add("unpadded", 33, 32, 4, 4, 32, 3, 3, **only)
    layers.add("column-stride", 16, 32, 3, 7, 32, 1, 3, stride=(1, 2), padding=(0, 0, 3, 2), **only)
    layers.add("accumulate", 16, 32, 3, 3, 64, 2, 3, accumulate=True, **only, **pad)
    one = Layers("images-", op="wgrad", precision="tf32")
    one.add("one-product", 16, 40, 3, 3, 36, 3, 3, **only, **pad)
    return layers.cases + one.cases


WEIGHT_CASES = _weight_cases()
IMAGE_CASES = _image_cases()

#: 1152 products a weight, in 18 stages of 64 pixels.
LAYER = ConvProblem(8, 32, 12, 12, 64, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", op="wgrad")
RANGES = (
    "normal", "positive", "log-normal", "outlier", "channels-apart", "filters-apart", "images-apart", "sparse", "tiny",
    "huge", "denormal", "zeros", "opposed", "unseen",
)  # fmt: skip
#: The same number, of many small images.
IMAGES = ConvProblem(128, 32, 3, 4, 64, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", op="wgrad")


def opposed(problem: ConvProblem, reach: float) -> np.ndarray:
    """Factors of dy's pixels, (n, p, q): ramps of 10^-reach to 10^reach and back, each over 64 neighbours."""
    number = np.arange(problem.n * problem.p * problem.q)
    return np.power(10.0, reach * (1 - abs(number % 128 - 64) / 32)).reshape(problem.n, problem.p, problem.q)


def as_seen(problem: ConvProblem, factors: np.ndarray) -> np.ndarray:
    """Factors of x's pixels, (n, h, w): those of the output's that lie there."""
    rows = np.minimum(np.arange(problem.h) // problem.stride[0], problem.p - 1)
    columns = np.minimum(np.arange(problem.w) // problem.stride[1], problem.q - 1)
    return factors[:, rows][:, :, columns]


def drawn(kind: str, problem: ConvProblem = LAYER) -> tuple[np.ndarray, np.ndarray]:
    """x and dy in NHWC. In channels-apart and filters-apart each channel, or filter, has a scale of its own; in
    images-apart each image, dy's the other way round; in images-opposed by far more; in opposed each pixel. In unseen x
    is largest where dy is 0."""
    random = np.random.default_rng(5)
    shape = problem.operands[1].shape
    x, dy = random.standard_normal(problem.x_shape), random.standard_normal(shape)
    if kind == "positive":
        x, dy = abs(x), abs(dy)
    elif kind == "log-normal":
        x, dy = np.exp(3 * x), dy * np.exp(2 * random.standard_normal(shape))
    elif kind == "outlier":
        x[0, 3 % problem.h, 4 % problem.w, 5], dy[3, 2, 2, 7] = 1e6, 1e5
    elif kind == "channels-apart":
        x = x * np.power(10.0, random.uniform(-9, 9, problem.c))
    elif kind == "filters-apart":
        dy = dy * np.power(10.0, random.uniform(-9, 9, problem.k))
    elif kind == "images-apart":
        scales = np.power(10.0, random.uniform(-1, 1, problem.n)).reshape(-1, 1, 1, 1)
        x, dy = x * scales, dy / scales
    elif kind == "images-opposed":
        ramp = np.power(10.0, 8 - abs(np.arange(problem.n) % 64 - 32) / 2).reshape(-1, 1, 1, 1)
        x, dy = x * ramp, dy / ramp
    elif kind == "sparse":
        x, dy = x * (random.random(x.shape) < 0.1), dy * (random.random(shape) < 0.1)
    elif kind == "tiny":
        x = x * 1e-38
    elif kind == "huge":
        x, dy = x * 1e34, dy * 1e2
    elif kind == "denormal":
        x = np.round(x * 1000) * 2.0**-149
    elif kind == "opposed":
        ramps = opposed(problem, 8)
        x, dy = x * as_seen(problem, ramps)[..., None], dy / ramps[..., None]
    elif kind == "unseen":
        x[1, :6], dy[1, :8] = x[1, :6] * 1e12, 0
    elif kind == "zeros":
        x[0, 2:5], dy[..., 7], x[..., 3] = 0, 0, 0
    return x.astype(np.float32), dy.astype(np.float32)
