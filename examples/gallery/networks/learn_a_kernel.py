"""
Learn a kernel from two pictures
================================

`leanconv.torch.filter2d` differentiates with respect to the kernel as well. So a kernel is
found from a photograph and what it has made of it.
"""

import matplotlib.pyplot as plt
import torch
from matplotlib import cbook

from leanconv.torch import filter2d

device = "cuda" if torch.cuda.is_available() else "cpu"
photo = (
    torch.tensor(plt.imread(cbook.get_sample_data("grace_hopper.jpg"))[::3, ::3, 1] / 255.0)
    .float()
    .to(device)
)
kernel = torch.zeros(7, 7, device=device)
kernel[range(7), range(6, -1, -1)] = 1 / 7  # the camera moved aslant
blurred = filter2d(photo, kernel)

learned = torch.zeros(7, 7, device=device, requires_grad=True)
optimiser = torch.optim.LBFGS(
    [learned], max_iter=40, tolerance_change=0, line_search_fn="strong_wolfe"
)


def loss():
    optimiser.zero_grad()
    far = 1e3 * (filter2d(photo, learned) - blurred).square().mean()
    far.backward()
    return far


optimiser.step(loss)
print(f"largest difference of a tap: {(learned - kernel).abs().max():.3f}")

figure, axes = plt.subplots(1, 4, figsize=(10, 3), layout="constrained")
shown = {
    "photograph": photo,
    "what was taken": blurred,
    "the kernel": kernel,
    "the kernel that was learned": learned,
}
for axis, (title, image) in zip(axes, shown.items(), strict=True):
    axis.imshow(image.detach().cpu(), cmap="gray")
    axis.set(title=title, xticks=[], yticks=[])
plt.show()
