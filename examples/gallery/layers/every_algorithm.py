"""
One layer by every algorithm
============================

A layer may be computed in several ways; ``algorithm=`` names one. Each is compared with a
convolution in float64. These are the algorithms of the CPU. On a GPU there are others:
`leanconv.list_algorithms` has them all.
"""

import time

import matplotlib.pyplot as plt
import numpy as np

import leanconv

random = np.random.default_rng(0)
x = random.standard_normal((2, 64, 56, 56), np.float32)
w = random.standard_normal((64, 64, 3, 3), np.float32)
exact = leanconv.conv2d(
    x.astype(np.float64), w.astype(np.float64), padding=1, algorithm="direct"
)

names = [
    each.name
    for each in leanconv.list_algorithms()
    if each.where == "CPU" and each.solves == "conv2d"
]
errors, times = {}, {}
for name in names:
    try:
        y = leanconv.conv2d(x, w, padding=1, algorithm=name)
    except leanconv.NoAlgorithmError as error:
        print("not", str(error).splitlines()[-1].strip())
        continue
    errors[name] = np.linalg.norm(y - exact) / np.linalg.norm(exact)
    begin = time.perf_counter()
    leanconv.conv2d(x, w, padding=1, algorithm=name)
    times[name] = 1e3 * (time.perf_counter() - begin)

figure, axes = plt.subplots(1, 2, figsize=(10, 3), layout="constrained", sharey=True)
axes[0].barh([*errors], [*errors.values()], color="#0072b2")
axes[0].set(title="relative error against float64", xlim=(0, None))
axes[1].barh([*times], [*times.values()], color="#e69f00")
axes[1].set(title="ms of a call on the machine of this page", xlim=(0, None))
axes[0].invert_yaxis()
plt.show()
