"""
Train, and compare the course of it
===================================

A module of `leanconv.torch` takes the place of PyTorch's and loads its state_dict. From the
same weights both learn the same: whether stripes lean to the left or to the right. On the CPU
of this page PyTorch computes both; on a GPU leanconv computes the one, and the curves stay
together as far as rounding lets them.
"""

import matplotlib.pyplot as plt
import torch

import leanconv.torch

device = "cuda" if torch.cuda.is_available() else "cpu"
random = torch.Generator().manual_seed(0)


def stripes(count):
    """Noisy images with stripes, and which way these lean."""
    right = torch.randint(0, 2, (count,), generator=random)
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    phase = 6.28 * torch.rand(count, 1, 1, generator=random)
    waves = torch.sin(columns + (2.0 * right - 1)[:, None, None] * rows + phase)
    return (waves + torch.randn(count, 16, 16, generator=random))[:, None].to(
        device
    ), right.to(device)


def network(conv):
    layers = [
        conv(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        conv(16, 16, 3, stride=2, padding=1),
        torch.nn.ReLU(),
    ]
    return torch.nn.Sequential(
        *layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 2)
    )


torch.manual_seed(0)
models = {
    "torch.nn": network(torch.nn.Conv2d).to(device),
    "leanconv.torch": network(leanconv.torch.Conv2d).to(device),
}
models["leanconv.torch"].load_state_dict(models["torch.nn"].state_dict())
optimisers = {
    name: torch.optim.Adam(model.parameters(), 3e-3) for name, model in models.items()
}
losses = {name: [] for name in models}
for _ in range(40):
    images, right = stripes(32)
    for name, model in models.items():
        loss = torch.nn.functional.cross_entropy(model(images), right)
        optimisers[name].zero_grad()
        loss.backward()
        optimisers[name].step()
        losses[name].append(loss.item())

images, right = stripes(200)
share = (models["leanconv.torch"](images).argmax(1) == right).float().mean()
print(f"right in {100 * share:.0f} % of new images")

figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
axis.plot(losses["torch.nn"], color="#8c8c8c", linewidth=4, label="torch.nn")
axis.plot(losses["leanconv.torch"], color="#d55e00", linewidth=1.5, label="leanconv.torch")
axis.set(xlabel="step", ylabel="loss", ylim=(0, None))
axis.legend()
plt.show()
