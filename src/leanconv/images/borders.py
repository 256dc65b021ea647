"""The borders of image filters: which pixels stand for those outside the image, and what every library calls them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

#: Our names.
BorderName = Literal["constant", "replicate", "reflect", "reflect101", "wrap"]
#: SciPy's modes.
ScipyMode = Literal["constant", "grid-constant", "nearest", "reflect", "grid-mirror", "mirror", "wrap", "grid-wrap"]
#: OpenCV's names; its numbers are taken as well.
OpencvName = Literal[
    "BORDER_CONSTANT", "BORDER_REPLICATE", "BORDER_REFLECT", "BORDER_REFLECT_101", "BORDER_REFLECT101",
    "BORDER_DEFAULT", "BORDER_WRAP",
]  # fmt: skip


@dataclass(frozen=True)
class Border:
    """How a filter reads pixels that lie outside the image.

    ``reads`` shows two pixels on either side of the image ``a b c d``; ``v`` is the value that the caller gives.
    ``kernel`` is the C++ type in ``kernels/image_filter/border.cuh``, ``scipy`` and ``opencv`` are the names of the
    border in ``scipy.ndimage`` and in OpenCV, the usual one first, and ``number`` is the value of OpenCV's. ``numpy``
    and ``torch`` are the modes of ``numpy.pad`` and ``torch.nn.functional.pad``; ``torch`` is None where PyTorch has
    no such mode.
    """

    name: BorderName
    reads: str
    kernel: str
    scipy: tuple[ScipyMode, ...]
    opencv: tuple[OpencvName, ...]
    number: int
    numpy: str
    torch: str | None


#: Every border by its name.
BORDERS: dict[str, Border] = {
    border.name: border
    for border in (
        Border(
            "constant", "vv|abcd|vv", "leanconv::ConstantBorder", ("constant", "grid-constant"), ("BORDER_CONSTANT",),
            0, "constant", "constant",
        ),
        Border(
            "replicate", "aa|abcd|dd", "leanconv::ReplicateBorder", ("nearest",), ("BORDER_REPLICATE",),
            1, "edge", "replicate",
        ),
        Border(
            "reflect", "ba|abcd|dc", "leanconv::ReflectBorder", ("reflect", "grid-mirror"), ("BORDER_REFLECT",),
            2, "symmetric", None,
        ),
        Border(
            "reflect101", "cb|abcd|cb", "leanconv::Reflect101Border", ("mirror",),
            ("BORDER_REFLECT_101", "BORDER_REFLECT101", "BORDER_DEFAULT"), 4, "reflect", "reflect",
        ),
        # SciPy's 'wrap' and 'grid-wrap' are the same for filters, not for its interpolation.
        Border(
            "wrap", "cd|abcd|ab", "leanconv::WrapBorder", ("wrap", "grid-wrap"), ("BORDER_WRAP",),
            3, "wrap", "circular",
        ),
    )
}  # fmt: skip

#: SciPy's names, and ours for each.
SCIPY_NAMES: dict[str, BorderName] = {theirs: border.name for border in BORDERS.values() for theirs in border.scipy}

#: SciPy's and OpenCV's names where they are not ours, and ours for each.
ALIASES: dict[str, BorderName] = {
    theirs: border.name
    for border in BORDERS.values()
    for theirs in (*border.scipy, *border.opencv)
    if theirs != border.name
}

#: OpenCV's numbers, and our name for each.
OPENCV_NUMBERS = {border.number: border.name for border in BORDERS.values()}


class Run(NamedTuple):
    """Neighbouring places of a line that a border has extended, and the neighbouring pixels that stand for them."""

    #: the first place, and how many
    start: int
    length: int
    #: the pixel of the first place; None where the constant border's value stands
    pixel: int | None
    #: from a place's pixel to the next one's: 1 forwards, -1 backwards, 0 where one stands for all
    step: int

    @property
    def low(self) -> int:
        """The first of its pixels in the line."""
        assert self.pixel is not None
        return self.pixel if self.step >= 0 else self.pixel - self.length + 1

    @property
    def width(self) -> int:
        """How many pixels of the line it has."""
        return self.length if self.step else 1


@lru_cache(maxsize=256)
def runs(border: BorderName, size: int, before: int, after: int) -> tuple[Run, ...]:
    """A line of ``size`` pixels with ``before`` and ``after`` places around it, as runs; the line itself is one.

    >>> for run in runs("reflect", 4, 2, 1):
    ...     print(run.start, run.length, run.pixel, run.step)
    0 2 1 -1
    2 4 0 1
    6 1 3 1
    """
    found: list[Run] = []
    for first, end in ((-before, 0), (size, size + after)):
        pixels = [_pixel(border, size, place) for place in range(first, end)]
        at = 0
        while at < len(pixels):
            length, step = 1, 1
            if at + 1 < len(pixels) and _step(pixels, at) in (-1, 0, 1):
                step = _step(pixels, at)
                while at + length < len(pixels) and _step(pixels, at + length - 1) == step:
                    length += 1
            found.append(Run(first + before + at, length, pixels[at], step))
            at += length
        if end == 0:
            found.append(Run(before, size, 0, 1))
    return tuple(found)


def _step(pixels: list[int | None], at: int) -> int:
    """From one pixel of a list to the next; all or none are of the constant border."""
    here, following = pixels[at], pixels[at + 1]
    return 0 if here is None or following is None else following - here


def _pixel(border: BorderName, size: int, place: int) -> int | None:
    """The pixel that stands for a place outside a line; None for the constant border's value."""
    if border == "constant":
        return None
    if border == "replicate":
        return min(max(place, 0), size - 1)
    if border == "wrap" or size == 1:
        return place % size
    # forwards, and backwards with or without the pixels at the ends
    end = 2 * size - 1 if border == "reflect" else 2 * size - 2
    place %= end + 1 if border == "reflect" else end
    return place if place < size else end - place
