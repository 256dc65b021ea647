"""
Switch a ResNet over
====================

`leanconv.torch.enable` changes no model: while it is on, leanconv computes the convolutions of
PyTorch on a GPU, and its report says what ran, layer by layer. This page was made without a
GPU, so the report is empty; below stands what would run on an H200.
"""

import matplotlib.pyplot as plt
import torch

import leanconv.torch


class Block(torch.nn.Module):
    """Two convolutions beside a short cut, as in ResNet-18."""

    def __init__(self, c: int, k: int) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(c, k, 3, 1 if c == k else 2, 1)
        self.second = torch.nn.Conv2d(k, k, 3, padding=1)
        self.short = torch.nn.Identity() if c == k else torch.nn.Conv2d(c, k, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.short(x) + self.second(self.first(x).relu())).relu()


device = "cuda" if torch.cuda.is_available() else "cpu"
stem = [torch.nn.Conv2d(3, 64, 7, 2, 3), torch.nn.MaxPool2d(3, 2, 1)]
model = torch.nn.Sequential(*stem, Block(64, 64), Block(64, 128), Block(128, 256)).to(device)
x = torch.randn(1, 3, 128, 128, device=device)
with leanconv.torch.enable(model) as taken, torch.no_grad():
    y = model(x)
print(taken.report())

# %%
# What would run on an H200, with a batch of 64 images? A hook sees what each layer is given,
# and `leanconv.explain` says which algorithm a call would choose.

work, chosen = {}, {}
names = {layer: name for name, layer in model.named_modules()}


def look(layer, inputs, output):
    _, c, h, w = inputs[0].shape
    k, _, r, s = layer.weight.shape
    pad = (layer.padding[0],) * 4
    problem = leanconv.ConvProblem(64, c, h, w, k, r, s, layer.stride, pad, layout="NHWC")
    work[names[layer]] = problem.flops / 1e9
    chosen[names[layer]] = leanconv.explain(problem, device="cuda").chosen


for layer in model.modules():
    if isinstance(layer, torch.nn.Conv2d):
        layer.register_forward_hook(look)
model(x)

figure, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
axis.barh([*work], [*work.values()], color="#d55e00")
for i, name in enumerate(work):
    axis.text(work[name], i, f" {chosen[name]}", va="center", fontsize=8)
axis.set(xlabel="10⁹ operations of a layer, by its name", xlim=(0, 1.3 * max(work.values())))
axis.invert_yaxis()
plt.show()
