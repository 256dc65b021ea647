"""
Sharpen in 16 bits
==================

X-ray and microscope images have more than 8 bits a pixel. `leanconv.unsharp_mask` takes uint16
as it is: through 8 bits, faint lines would drown in steps; through float32, it would take
twice the memory.
"""

import matplotlib.pyplot as plt
import numpy as np

import leanconv

rows, columns = np.mgrid[-1:1:300j, -1:1:300j]
body = 45000 * np.exp(-2 * (rows**2 + columns**2))
# fainter than a grey of 8 bits
vessels = 150 * np.exp(-((np.sin(7 * columns + 4 * np.sin(3 * rows)) / 0.15) ** 2))
image = np.round(body + vessels).astype(np.uint16)
sharp = leanconv.unsharp_mask(image, sigma=6, amount=40)
by_8_bits = leanconv.unsharp_mask((image >> 8).astype(np.uint8), sigma=6, amount=40)

figure, axes = plt.subplots(1, 3, figsize=(9, 3.3), layout="constrained")
shown = {
    "as it came": image,
    "sharpened in 16 bits": sharp,
    "sharpened through 8 bits": by_8_bits,
}
for axis, (title, each) in zip(axes, shown.items(), strict=True):
    axis.imshow(each, cmap="gray")
    axis.set(title=f"{title}, {each.dtype}", xticks=[], yticks=[])
plt.show()
