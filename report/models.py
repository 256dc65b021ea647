"""Networks that torchvision does not have: a U-Net, the decoder of an image autoencoder, and one for super-resolution.

In the sizes that are usual for them; weights are random.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class UNet(nn.Module):
    """Ronneberger et al. 2015, padded: two 3x3 convolutions a level, down to 1/16, and up by transposed ones of 2x2."""

    def __init__(self, channels: tuple[int, ...] = (64, 128, 256, 512, 1024), classes: int = 21) -> None:
        super().__init__()
        pairs = list(zip((3, *channels), channels, strict=False))
        self.down = nn.ModuleList(self._level(c, k) for c, k in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(k, c, 2, 2) for c, k in pairs[:0:-1])
        self.merge = nn.ModuleList(self._level(2 * c, c) for c, _ in pairs[:0:-1])
        self.last = nn.Conv2d(channels[0], classes, 1)

    @staticmethod
    def _level(c: int, k: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for channels in (c, k):
            layers += [nn.Conv2d(channels, k, 3, padding=1, bias=False), nn.BatchNorm2d(k), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> Any:
        kept = []
        for i, level in enumerate(self.down):
            x = level(functional.max_pool2d(x, 2) if i else x)
            kept.append(x)
        for up, merge, beside in zip(self.up, self.merge, kept[-2::-1], strict=True):
            x = merge(torch.cat([beside, up(x)], 1))
        return self.last(x)


class Residual(nn.Module):
    """Two 3x3 convolutions beside a short cut; ``normalised`` by groups before each, as in autoencoders."""

    def __init__(self, c: int, k: int, normalised: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels in (c, k):
            layers += [nn.GroupNorm(32, channels), nn.SiLU()] if normalised else [nn.ReLU()] if layers else []
            layers.append(nn.Conv2d(channels, k, 3, padding=1))
        self.layers = nn.Sequential(*layers)
        self.short = nn.Identity() if c == k else nn.Conv2d(c, k, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.short(x) + self.layers(x)


def decoder(channels: tuple[int, ...] = (512, 512, 256, 128)) -> nn.Sequential:
    """Of latent diffusion models (Rombach et al. 2022), without its one layer of attention.

    Three residual blocks a level with GroupNorm; 4 channels become an image eight times as high and wide.
    """
    layers: list[nn.Module] = [nn.Conv2d(4, channels[0], 3, padding=1)]
    c = channels[0]
    for i, k in enumerate(channels):
        if i:
            layers += [nn.Upsample(scale_factor=2), nn.Conv2d(c, c, 3, padding=1)]
        layers += [Residual(each, k, True) for each in (c, k, k)]
        c = k
    return nn.Sequential(*layers, nn.GroupNorm(32, c), nn.SiLU(), nn.Conv2d(c, 3, 3, padding=1))


def edsr(blocks: int = 16, channels: int = 64) -> nn.Sequential:
    """The baseline of Lim et al. 2017: residual blocks without normalisation, and twice the size by a shuffle."""
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
    layers += [Residual(channels, channels, False) for _ in range(blocks)]
    layers += [nn.Conv2d(channels, 4 * channels, 3, padding=1), nn.PixelShuffle(2)]
    return nn.Sequential(*layers, nn.Conv2d(channels, 3, 3, padding=1))


def build(name: str) -> nn.Module:
    ours: dict[str, Callable[[], nn.Module]] = {"unet": UNet, "vae_decoder": decoder, "edsr": edsr}
    if name in ours:
        return ours[name]()
    import torchvision

    # drawn from a truncated normal distribution on the CPU, its weights take half a minute
    slow = {"init_weights": False} if name == "inception_v3" else {}
    model: nn.Module = torchvision.models.get_model(name, weights=None, **slow)
    return model
