"""A photograph and what four filters make of it: the picture of docs/filtering.md.

    python examples/photograph.py [PHOTOGRAPH] [--out PICTURE] [--device cuda]

Needs Pillow. Without arguments it filters docs/pictures/photograph.jpg into photograph-filtered.jpg.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

import leanconv

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"


def edges(photo: np.ndarray, device: str | None = None) -> np.ndarray:
    """The size of the slope at each pixel, from int16 slopes along both axes; uint8 like the photograph."""
    across, down = (
        leanconv.sobel(photo, dx, 1 - dx, dtype=np.int16, channels_last=True, device=device).astype(np.float32)
        for dx in (1, 0)
    )
    return np.minimum(np.rint(np.hypot(across, down)), 255).astype(np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photograph", nargs="?", type=Path, default=PICTURES / "photograph.jpg")
    parser.add_argument("--out", type=Path, default=Path("photograph-filtered.jpg"))
    parser.add_argument("--device", help="cuda, or nothing for the CPU")
    given = parser.parse_args()
    photo = np.asarray(Image.open(given.photograph).convert("RGB"))
    panels = [
        photo,
        leanconv.gaussian_blur(photo, sigma=3, channels_last=True, device=given.device),
        leanconv.unsharp_mask(photo, sigma=2, amount=1.5, channels_last=True, device=given.device),
        edges(photo, given.device),
    ]
    rows = [np.concatenate(panels[i : i + 2], axis=1) for i in (0, 2)]
    Image.fromarray(np.concatenate(rows)).save(given.out, quality=88)
    print(given.out)


if __name__ == "__main__":
    main()
