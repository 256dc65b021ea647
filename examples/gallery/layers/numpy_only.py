"""
A convolution with NumPy alone
==============================

`leanconv.conv2d` takes the arguments of :func:`!torch.nn.functional.conv2d` and NumPy's
arrays; neither PyTorch nor a GPU is needed. Here a bank of eight filters finds edges by their
direction.
"""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import cbook

import leanconv

photo = plt.imread(cbook.get_sample_data("grace_hopper.jpg")).astype(np.float32) / 255
x = photo.transpose(2, 0, 1)[None]  # one image, 3 channels, height, width

rows, columns = np.mgrid[-4:5, -4:5]
angles = np.arange(8) * np.pi / 8
waves = [np.sin(0.9 * (columns * np.cos(a) + rows * np.sin(a))) for a in angles]
w = np.stack(waves) * np.exp(-(rows**2 + columns**2) / 8)
w = np.repeat(w[:, None], 3, axis=1).astype(np.float32)  # 8 filters, 3 channels, 9 by 9
y = leanconv.conv2d(x, w, stride=2, padding=4, activation="relu")
print(x.shape, "→", y.shape)

figure, axes = plt.subplots(
    2, 8, figsize=(10, 3.4), layout="constrained", height_ratios=(1, 3)
)
for i in range(8):
    axes[0, i].imshow(w[i, 0], cmap="gray")
    axes[1, i].imshow(y[0, i], cmap="magma", vmax=y.max() / 2)
for axis in axes.flat:
    axis.set_axis_off()
plt.show()
