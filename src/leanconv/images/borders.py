"""The borders of image filters: which pixels stand for those outside the image, and what every library calls them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
