"""
Code for SciPy, with another import
===================================

`leanconv.ndimage` has the linear filters of :mod:`!scipy.ndimage` with SciPy's arguments and
results. The same line takes CuPy's and PyTorch's arrays on a GPU.
"""

import matplotlib.pyplot as plt
import numpy as np
import scipy.ndimage
from matplotlib import cbook

from leanconv import ndimage

heights = cbook.get_sample_data("jacksboro_fault_dem.npz")["elevation"].astype(np.float64)
slope = ndimage.gaussian_gradient_magnitude(heights, sigma=2, mode="nearest")
expected = scipy.ndimage.gaussian_gradient_magnitude(heights, sigma=2, mode="nearest")
print("largest difference from SciPy:", np.abs(slope - expected).max() / expected.max())

figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for axis, title, image in zip(
    axes, ("heights of a landscape", "how steep it is"), (heights, slope), strict=True
):
    axis.imshow(image, cmap="gist_earth" if image is heights else "magma")
    axis.set(title=title, xticks=[], yticks=[])
plt.show()
