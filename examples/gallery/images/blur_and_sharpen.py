"""
Blur and sharpen a photograph
=============================

Two calls: `leanconv.gaussian_blur` and `leanconv.unsharp_mask`. Results have the type of the
photograph: they are rounded, and kept within 0 to 255.
"""

import matplotlib.pyplot as plt
from matplotlib import cbook

import leanconv

# matplotlib comes with this photograph: uint8, (height, width, 3)
photo = plt.imread(cbook.get_sample_data("grace_hopper.jpg"))
soft = leanconv.gaussian_blur(photo, sigma=4, channels_last=True)
sharp = leanconv.unsharp_mask(photo, sigma=2, amount=2, channels_last=True)

# %%
# These ran on the CPU. ``device="cuda"`` runs the same calls on a GPU; arrays of CuPy and
# PyTorch run where they lie.

figure, axes = plt.subplots(1, 3, figsize=(9, 3.8), layout="constrained")
for axis, title, image in zip(
    axes, ("photograph", "blurred", "sharpened"), (photo, soft, sharp), strict=True
):
    axis.imshow(image)
    axis.set(title=title, xticks=[], yticks=[])
plt.show()
