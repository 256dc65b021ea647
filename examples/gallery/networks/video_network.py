"""
A network for video
===================

`leanconv.torch.Conv3d` convolves along time too: three layers learn which way a dot moves,
which no single frame tells. Clips are ``channels_last_3d``, the order that leanconv's kernels
like best. On the CPU of this page PyTorch computes them.
"""

import matplotlib.pyplot as plt
import torch

from leanconv.torch import Conv3d

device = "cuda" if torch.cuda.is_available() else "cpu"
random = torch.Generator().manual_seed(0)
NAMES, STEPS = (
    ("up", "down", "left", "right"),
    torch.tensor([(-1, 0), (1, 0), (0, -1), (0, 1)]),
)


def clips(count):
    """Clips (count, 1, 6 frames, 12, 12) of a dot that moves, and which way."""
    way = torch.randint(0, 4, (count,), generator=random)
    start = torch.randint(0, 12, (count, 2), generator=random)
    places = (start[:, None] + torch.arange(6)[None, :, None] * STEPS[way][:, None]) % 12
    found = 0.2 * torch.randn(count, 1, 6, 12, 12, generator=random)
    each, frame = torch.arange(count)[:, None], torch.arange(6)[None]
    found[each, 0, frame, places[..., 0], places[..., 1]] += 1
    return found.to(device, memory_format=torch.channels_last_3d), way.to(device)


torch.manual_seed(0)
layers = [
    Conv3d(1, 12, 3, padding=1),
    torch.nn.ReLU(),
    Conv3d(12, 16, 3, padding=1),
    torch.nn.ReLU(),
]
head = [Conv3d(16, 4, 1), torch.nn.AdaptiveMaxPool3d(1), torch.nn.Flatten()]
model = torch.nn.Sequential(*layers, *head).to(device, memory_format=torch.channels_last_3d)
optimiser, shares = torch.optim.Adam(model.parameters(), 1e-2), []
for _ in range(40):
    clip, way = clips(16)
    scores = model(clip)
    optimiser.zero_grad()
    torch.nn.functional.cross_entropy(scores, way).backward()
    optimiser.step()
    shares.append(100 * (scores.argmax(1) == way).float().mean().item())

clip, way = clips(1)
found = NAMES[model(clip).argmax().item()]
figure, axes = plt.subplots(
    1, 7, figsize=(10, 2), layout="constrained", width_ratios=(1,) * 6 + (2.5,)
)
for i, axis in enumerate(axes[:6]):
    axis.imshow(clip[0, 0, i].cpu(), cmap="gray", vmin=0, vmax=1)
    axis.set(title=f"frame {i}", xticks=[], yticks=[])
axes[6].plot(shares, color="#d55e00")
axes[6].set(title=f"% right; this clip: {found}", xlabel="step", ylim=(0, 105))
plt.show()
