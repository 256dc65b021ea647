"""
A Gaussian that is larger than the image
========================================

The larger a blur, the more of what it reads lies outside the image: ``border=`` says what is
there. A kernel may reach farther than the image is wide.
"""

import matplotlib.pyplot as plt
from matplotlib import cbook

import leanconv

photo = plt.imread(cbook.get_sample_data("grace_hopper.jpg"))[::8, ::8]  # 75 rows, 64 columns
borders = ("reflect", "replicate", "wrap", "constant")
blurred = {
    each: leanconv.gaussian_blur(photo, sigma=20, border=each, channels_last=True)
    for each in borders
}
print(
    "a Gaussian of sigma 20 has",
    leanconv.filters.gaussian(161, 20).shape,
    "taps; the photograph",
    photo.shape[:2],
)

# %%
# ``wrap`` takes what lies outside from the other side, ``constant`` takes black, or
# ``value=``.

figure, axes = plt.subplots(1, 5, figsize=(10, 2.7), layout="constrained")
for axis, (title, image) in zip(axes, {"photograph": photo, **blurred}.items(), strict=True):
    axis.imshow(image)
    axis.set(title=title, xticks=[], yticks=[])
plt.show()
