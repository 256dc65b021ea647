"""
What a precision level promises
===============================

``precision=`` is what a call promises about its error, taken over the whole result. On
ordinary data ``"ieee"`` and ``"fp32"`` are as exact as float32 is, and ``"relaxed"`` is less.
One huge pixel shows what the whole result hides: Winograd's transform, which ``"fp32"``
allows, lets it spoil neighbours whose windows do not hold it; ``"ieee"`` does not.
"""

import matplotlib.pyplot as plt
import numpy as np

import leanconv

random = np.random.default_rng(0)
w = random.standard_normal((64, 64, 3, 3), np.float32)
ordinary = random.standard_normal((1, 64, 48, 48), np.float32)
outlier = ordinary.copy()
outlier[:, :, 24, 24] = 1e6

levels = {"ieee": "direct", "fp32": "winograd1d", "relaxed": "winograd2d"}
figure, axes = plt.subplots(2, 3, figsize=(9, 5.4), layout="constrained")
for row, (what, x) in zip(
    axes, (("ordinary data", ordinary), ("one huge pixel", outlier)), strict=True
):
    exact = leanconv.conv2d(
        x.astype(np.float64), w.astype(np.float64), padding=1, algorithm="direct"
    )
    for axis, (level, algorithm) in zip(row, levels.items(), strict=True):
        y = leanconv.conv2d(x, w, padding=1, precision=level, algorithm=algorithm)
        error = np.linalg.norm(y - exact) / np.linalg.norm(exact)
        print(f"{what}, {level} ({algorithm}): {error:.1e}")
        map_ = np.log10(np.abs(y - exact).max((0, 1)) + 1e-12)
        shown = axis.imshow(map_, cmap="magma", vmin=-6, vmax=1)
        axis.set(title=f"{level}: {what}", xticks=[], yticks=[])
_ = figure.colorbar(shown, ax=axes, label="largest error of a pixel, power of ten")
plt.show()
