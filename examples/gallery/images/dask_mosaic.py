"""
A mosaic that is larger than memory
===================================

`leanconv.dask.filter2d` takes a dask array and returns one. Nothing is computed before
somebody asks for it, and then only the chunks that are needed, with no seams between them.
"""

import dask.array as da
import matplotlib.pyplot as plt
import numpy as np
from matplotlib import cbook

import leanconv.dask

photo = plt.imread(cbook.get_sample_data("grace_hopper.jpg"))[..., 1]
mosaic = da.tile(da.from_array(np.tile(photo, (8, 8)), chunks=-1), (20, 20))
print(f"{mosaic.shape} pixels, {mosaic.nbytes / 1e9:.0f} GB, {mosaic.npartitions} chunks")

edges = leanconv.dask.filter2d(mosaic, leanconv.filters.laplacian(), dtype=np.int16)
window = (
    slice(48_000 - 200, 48_000 + 200),
    slice(40_960 - 300, 40_960 + 300),
)  # where four chunks meet
part = edges[window].compute()

figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
axes[0].imshow(mosaic[window].compute(), cmap="gray")
axes[1].imshow(np.abs(part), cmap="gray_r", vmax=60)
for axis, title in zip(
    axes, ("a window of the mosaic", "its edges, from four chunks"), strict=True
):
    axis.set(title=title, xticks=[], yticks=[])
plt.show()
