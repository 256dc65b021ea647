"""
A median takes off single pixels
================================

A Gaussian spreads a wrong pixel over its neighbours; `leanconv.median_blur` drops it and keeps
edges sharp.
"""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import cbook

import leanconv

photo = plt.imread(cbook.get_sample_data("grace_hopper.jpg"))[40:300, 120:400]
random = np.random.default_rng(0)
spoiled = np.where(
    random.random(photo.shape[:2])[..., None] < 0.05,
    random.choice([0, 255], photo.shape),
    photo,
)
spoiled = spoiled.astype(np.uint8)
images = {
    "one pixel in 20 is wrong": spoiled,
    "gaussian_blur": leanconv.gaussian_blur(spoiled, sigma=1.2, channels_last=True),
    "median_blur": leanconv.median_blur(spoiled, 3, channels_last=True),
}
for name, image in images.items():
    away = np.sqrt(np.mean((image.astype(float) - photo) ** 2))
    print(f"{name}: {away:.1f} away from the photograph, root mean square")

figure, axes = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained")
for axis, (title, image) in zip(axes, images.items(), strict=True):
    axis.imshow(image)
    axis.set(title=title, xticks=[], yticks=[])
plt.show()
