"""
Filter a volume
===============

`leanconv.filter3d` correlates volumes with a kernel of three axes: here noise is taken off a
hollow ball. The kernel is a product of a column, a row and a line, which leanconv finds by
itself and runs as passes.
"""

import matplotlib.pyplot as plt
import numpy as np

import leanconv

z, y, x = np.ogrid[-1:1:64j, -1:1:64j, -1:1:64j]
radius = np.sqrt(x**2 + y**2 + z**2)
ball = ((radius < 0.8) & (radius > 0.5)).astype(np.float32)
noisy = ball + np.random.default_rng(0).normal(0, 1, ball.shape).astype(np.float32)

bell = np.exp(-(np.arange(-4, 5) ** 2) / (2 * 1.5**2))
kernel = np.einsum("i,j,k->ijk", bell, bell, bell) / bell.sum() ** 3
smooth = leanconv.filter3d(noisy, kernel, border="replicate")
for name, volume in (("noisy", noisy), ("filtered", smooth)):
    away = np.sqrt(np.mean((volume - ball) ** 2))
    print(f"{name}: {away:.2f} away from the ball, root mean square")

figure, axes = plt.subplots(1, 3, figsize=(9, 3.3), layout="constrained")
for axis, title, volume in zip(
    axes, ("the ball", "with noise", "filtered"), (ball, noisy, smooth), strict=True
):
    axis.imshow(volume[32], cmap="gray", vmin=-0.5, vmax=1.5)
    axis.set(title=f"{title}, slice 32", xticks=[], yticks=[])
plt.show()
