"""
Find a sound in a long signal
=============================

`leanconv.signal` has SciPy's convolutions. Correlating with the sound that is sought makes a
peak where it is: a million samples with a kernel of four thousand, by transforms of segments.
"""

import matplotlib.pyplot as plt
import numpy as np

from leanconv import signal

random = np.random.default_rng(0)
seconds = np.arange(4000) / 8000
sound = np.sin(2 * np.pi * (400 + 1500 * seconds) * seconds).astype(
    np.float32
)  # its pitch rises
noise = random.standard_normal(1_000_000).astype(np.float32)
noise[600_000:604_000] += 0.5 * sound

found = signal.oaconvolve(noise, sound[::-1], mode="valid")
print("the sound begins at", int(found.argmax()))

figure, axes = plt.subplots(2, 1, figsize=(9, 3.6), layout="constrained", sharex=True)
for axis, title, line in zip(
    axes, ("what was recorded", "correlated with the sound"), (noise, found), strict=True
):
    highest = line[: len(line) // 500 * 500].reshape(-1, 500).max(1)  # of 500 samples each
    axis.plot(500 * np.arange(len(highest)), highest, linewidth=0.8, color="#0072b2")
    axis.set_title(title, loc="left")
plt.show()
