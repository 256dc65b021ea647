"""The decoder of a video autoencoder, whole and in parts: layers that look back only keep the frames they need.

    python examples/decode_video.py [--latents 6] [--size 8] [--channels 16] [--part 2] [--device cuda]

Weights are random. Prints how many frames were decoded, in which time and, on a GPU, in which memory, and how far the
video in parts is from the whole one.
"""

from __future__ import annotations

import argparse
import time

import torch

from leanconv.torch import CausalConv3d


def normalised(x: torch.Tensor) -> torch.Tensor:
    """Over the channels of each pixel: nothing is shared along time, so a video may come in parts."""
    return torch.nn.functional.normalize(x, dim=1) * x.shape[1] ** 0.5


class Residual(torch.nn.Module):
    """Two layers of 3x3x3 taps beside a short cut."""

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        self.first = CausalConv3d(channels, filters, 3, padding=1, time_padding="replicate")
        self.second = CausalConv3d(filters, filters, 3, padding=1, time_padding="replicate")
        self.short = torch.nn.Identity() if channels == filters else CausalConv3d(channels, filters, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(torch.nn.functional.silu(normalised(x)))
        return self.short(x) + self.second(torch.nn.functional.silu(normalised(y)))


class Decoder(torch.nn.Module):
    """A latent frame of 4 channels becomes two frames, four times as high and wide."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = CausalConv3d(4, channels, 3, padding=1, time_padding="replicate")
        self.levels = torch.nn.ModuleList([Residual(channels, channels), Residual(channels, channels // 2)])
        self.last = CausalConv3d(channels // 2, 3, 3, padding=1, time_padding="replicate")

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        x = self.first(latents)
        for i, level in enumerate(self.levels):
            scale = (1 if i else 2, 2, 2)
            x = level(torch.nn.functional.interpolate(x, scale_factor=scale, mode="nearest-exact"))
        return self.last(torch.nn.functional.silu(normalised(x))).tanh()


def decode(decoder: Decoder, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A video from its latents, part by part; where there is one it is the whole."""
    for layer in decoder.modules():
        if isinstance(layer, CausalConv3d):
            layer.streaming = len(parts) > 1
            layer.reset()
    with torch.no_grad():
        return torch.cat([decoder(part) for part in parts], 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--latents", type=int, default=6, help="latent frames, of which each becomes two frames")
    parser.add_argument("--size", type=int, default=8, help="rows and columns of a latent frame")
    parser.add_argument("--channels", type=int, default=16, help="an even number")
    parser.add_argument("--part", type=int, default=2, help="latent frames of a part")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.manual_seed(0)
    decoder = Decoder(given.channels).to(given.device, memory_format=torch.channels_last_3d)
    latents = torch.randn(1, 4, given.latents, given.size, given.size)
    latents = latents.to(given.device, memory_format=torch.channels_last_3d)
    on_gpu = latents.is_cuda
    videos = []
    for what, parts in (("whole", (latents,)), (f"parts of {given.part}", latents.split(given.part, 2))):
        decode(decoder, parts)  # compiles kernels
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        begin = time.perf_counter()
        videos.append(decode(decoder, parts))
        if on_gpu:
            torch.cuda.synchronize()
        memory = f", {torch.cuda.max_memory_allocated() / 1e6:.0f} MB" if on_gpu else ""
        print(f"{what}: {tuple(videos[-1].shape)} in {time.perf_counter() - begin:.3f} s{memory}")
    print(f"largest difference: {(videos[0] - videos[1]).abs().max():.1e}")


if __name__ == "__main__":
    main()
