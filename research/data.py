"""Random data of every kind on which errors are measured and bounds are held: dense, sparse, of any range."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from leanconv.problem import ConvProblem

#: Data of `draw` that bounds are held to, and those that break a bound for roundings that go up as likely as down.
KINDS = (
    "zero-mean", "positive", "ReLU 50 %", "ReLU 90 %", "ReLU 97 %", "ReLU 99 %", "one-hot", "lone product",
    "log-normal", "outlier", "channel-scaled",
)  # fmt: skip
ONE_WAY = "constant"
#: Data over 12 decades: what splits float32 keeps small numbers less accurately beside large ones.
DECADES = ("12 decades", "12 decades, sparse")


def draw(problem: ConvProblem, kind: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Pixels and filters of ``problem``; of a gradient, what takes their places.

    ``"ReLU 90 %"`` and its like: max(0, normal − threshold), so many of them zeros. ``"one-hot"``: one pixel of one
    channel. ``"lone product"``: that, and filters with one weight for each channel. ``"log-normal"``: exp(2 · normal).
    ``"12 decades"``: both ± 10^U(−6, 6); ``sparse``: most of the filters (97 of 100) and 30 of 100 pixels are zeros.
    ``"outlier"``: normal, but one pixel is 1e6. ``"channel-scaled"``: normal, times 10^U(−3, 3) for each channel.
    Filters are normal but for ``"positive"`` (both uniform) and ``"constant"`` (all numbers 1/3).
    """
    random = np.random.default_rng(seed)
    x, w = random.standard_normal(problem.x_shape), random.standard_normal(problem.operands[1].shape)
    if kind == "positive":
        x, w = random.random(x.shape), random.random(w.shape)
    elif kind == "constant":
        x[...], w[...] = 1 / 3, 1 / 3
    elif kind.startswith("ReLU"):
        x = np.maximum(0, x - np.quantile(x, float(kind.split()[1]) / 100))
    elif kind in ("one-hot", "lone product"):
        x *= _one_of(x.shape, random)
        if kind == "lone product":
            places = problem.r * problem.s
            chosen = random.integers(places, size=(problem.k, problem.group_c))
            alone = np.where(np.arange(places) == chosen[..., None], 1, 0)
            alone = alone.reshape(problem.k, problem.group_c, problem.r, problem.s)
            w *= alone.transpose(["NCHW".index(axis) for axis in problem.layout])
    elif kind == "log-normal":
        x = np.exp(2 * x)
    elif kind in DECADES:
        x, w = (np.sign(each) * np.power(10, random.uniform(-6, 6, each.shape)) for each in (x, w))
        if kind == DECADES[1]:
            x, w = x * (random.random(x.shape) < 0.7), w * (random.random(w.shape) < 0.03)
    elif kind == "outlier":
        x[_one_of(x.shape, random)] = 1e6
    elif kind == "channel-scaled":
        axis = problem.layout.index("C")
        exponents = random.uniform(-3, 3, x.shape[axis])
        x *= np.power(10, exponents).reshape([-1 if i == axis else 1 for i in range(4)])
    elif kind != "zero-mean":
        raise ValueError(f"kind={kind!r} is none of {', '.join((*KINDS, ONE_WAY, *DECADES))}")
    return x.astype(problem.dtype), w.astype(problem.dtype)


def _one_of(shape: Sequence[int], random: np.random.Generator) -> np.ndarray:
    """True at one place, chosen at random."""
    chosen = np.zeros(shape, bool)
    chosen.flat[random.integers(chosen.size)] = True
    return chosen
