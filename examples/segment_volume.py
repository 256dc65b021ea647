"""A small 3-D network that finds a ball in noise, trained with leanconv.torch.

    python examples/segment_volume.py [--steps 60] [--size 16] [--device cuda]

Prints the loss, and at the end how much of the ball and of what was found they share (Dice).
"""

from __future__ import annotations

import argparse

import torch

from leanconv.torch import Conv3d, ConvTranspose3d


class Net(torch.nn.Module):
    """One level down and up again, as in a 3-D U-Net."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.first = Conv3d(1, channels, 3, padding=1)
        self.down = Conv3d(channels, 2 * channels, 2, stride=2)
        self.middle = Conv3d(2 * channels, 2 * channels, 3, padding=1)
        self.up = ConvTranspose3d(2 * channels, channels, 2, stride=2)
        self.last = Conv3d(2 * channels, 1, 1)

    def forward(self, volumes: torch.Tensor) -> torch.Tensor:
        fine = self.first(volumes).relu()
        coarse = self.middle(self.down(fine).relu()).relu()
        return self.last(torch.cat([fine, self.up(coarse).relu()], 1))


def balls(count: int, size: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Volumes of noise with a ball in each, and where it is: (count, 1, size, size, size)."""
    radius = size / 5
    centre = radius + (size - 2 * radius) * torch.rand(count, 3, generator=random)
    axes = torch.meshgrid(*[torch.arange(size)] * 3, indexing="ij")
    places = torch.stack(axes, -1).float()
    inside = ((places - centre[:, None, None, None]) ** 2).sum(-1) < radius**2
    truth = inside[:, None].float()
    return truth + torch.randn(truth.shape, generator=random), truth


def overlap(found: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Dice: twice what both have, over what each has."""
    return 2 * (found * truth).sum() / (found.sum() + truth.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--size", type=int, default=16, help="voxels along each axis, an even number")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    random = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    net = Net().to(given.device, memory_format=torch.channels_last_3d)
    optimiser = torch.optim.Adam(net.parameters(), 3e-3)
    for step in range(given.steps):
        volumes, truth = (
            each.to(given.device, memory_format=torch.channels_last_3d) for each in balls(4, given.size, random)
        )
        loss = 1 - overlap(net(volumes).sigmoid(), truth)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 10 == 0 or step == given.steps - 1:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    volumes, truth = (each.to(given.device) for each in balls(8, given.size, random))
    with torch.no_grad():
        found = (net(volumes) > 0).float()
    print(f"Dice {overlap(found, truth).item():.3f}")


if __name__ == "__main__":
    main()
