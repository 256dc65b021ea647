"""What kernels of 16-bit and of 8-bit elements are proven on."""

from __future__ import annotations

from typing import Any

from leanconv.options import Layout
from tests.cases import ALL, INNERMOST, USUAL, Case, Layers


def _cases_16bit() -> list[Case]:
    """Layers of 16-bit elements: what differs is how these are loaded, by fours, in pairs or one by one, and stored."""
    half, brain = Layers("float16-", dtype="float16"), Layers("bfloat16-", dtype="bfloat16")
    same = {"padding": (1, 1, 1, 1)}
    both: dict[str, Any] = {"bias": True, "activation": "relu"}
    more: dict[str, Any] = {"bias": True, "scale": True, "add": True}
    #                       n  c   h   w   k   r  s
    half.add("odd", 3, 5, 13, 11, 7, 3, 3, layouts=ALL, thorough=ALL, activation="gelu", **more, **same)
    brain.add("tails", 2, 19, 8, 9, 133, 3, 3, layouts=ALL, bias=True, padding=(1, 0, 2, 1))
    half.add("pairs", 2, 6, 9, 8, 20, 3, 3, layouts=ALL, add=True, activation="relu", stride=(2, 1), **same)
    brain.add("fours", 2, 16, 8, 16, 128, 3, 3, thorough=USUAL, bias=True, **same)
    half.add("groups", 2, 6, 9, 10, 9, 3, 3, layouts=ALL, groups=3, bias=True, **same)
    half.add("several-filters", 2, 3, 5, 94, 12, 3, 3, groups=3, activation="leaky_relu:0.2", **more, **same)
    brain.add("groups-pairs", 2, 12, 8, 8, 24, 3, 2, groups=2, add=True, **both, **same)
    half.add("long-reduction", 1, 90, 5, 8, 12, 3, 3, layouts=ALL, thorough=USUAL, **same)
    brain.add("few-filters", 2, 6, 15, 18, 3, 3, 3, layouts=ALL, dilation=(2, 1), padding=(2, 2, 1, 1))
    half.add("big-filter", 1, 2, 24, 25, 3, 17, 18, padding=(8, 3, 2, 9))
    brain.add("images-4", 4, 6, 5, 7, 9, 3, 2, layouts=INNERMOST, bias=True, stride=(1, 2), **same)
    half.add("images-8", 8, 33, 3, 4, 20, 3, 3, layouts=INNERMOST, thorough=INNERMOST, **both, **same)
    brain.add("empty-batch", 0, 4, 9, 9, 6, 3, 3)
    half.add("accumulate", 2, 6, 9, 8, 20, 3, 3, layouts=ALL, accumulate=True, activation="relu", **same)
    gradient: dict[str, Any] = {"op": "dgrad"}
    half.add("gradient-tails", 2, 35, 8, 9, 19, 3, 2, layouts=ALL, padding=(1, 0, 2, 1), **gradient)
    brain.add("gradient-stride", 2, 18, 14, 15, 9, 3, 3, layouts=ALL, stride=(2, 2), **same, **gradient)
    half.add("gradient-unread-rows", 2, 5, 18, 19, 4, 3, 3, stride=(4, 3), **gradient)
    brain.add("gradient-groups", 2, 8, 9, 10, 12, 3, 3, groups=2, **same, **gradient)
    weight: dict[str, Any] = {"op": "wgrad"}
    half.add("weight-depthwise", 2, 6, 9, 12, 6, 3, 3, groups=6, **same, **weight)
    brain.add("weight-groups", 2, 6, 7, 8, 4, 3, 2, layouts=ALL, groups=2, stride=(2, 1), **same, **weight)
    # NCHW: several channel blocks; pixels loaded as four neighbours, one by one, or by tensor copies.
    first: tuple[Layout, ...] = ("NCHW",)
    half.add("blocks", 3, 80, 9, 12, 72, 3, 3, layouts=first, activation="silu", **more, **same)
    brain.add("blocks-one-by-one", 3, 144, 6, 6, 40, 1, 1, layouts=first, bias=True, add=True)
    brain.add("blocks-tma", 3, 96, 8, 9, 40, 1, 1, layouts=first, **both)
    # One tap: images of whole 16 bytes, 8 or 4 bytes of pixels, and of an odd number of them.
    half.add("images-fours", 2, 72, 14, 14, 136, 1, 1, layouts=first, activation="silu", **more)
    brain.add("images-pairs", 3, 24, 6, 5, 40, 1, 1, layouts=first, accumulate=True)
    half.add("images-odd", 5, 328, 7, 7, 72, 1, 1, layouts=first, activation="relu", **more)
    half.add("images-long", 1, 328, 6, 8, 136, 1, 1, layouts=first, add=True)
    brain.add("images-groups", 3, 64, 2, 12, 80, 1, 1, layouts=first, groups=2, bias=True)
    strided: dict[str, Any] = {"layouts": first, "stride": (2, 2)}
    half.add("images-strided", 3, 72, 16, 28, 136, 1, 1, activation="silu", **more, **strided)
    brain.add("images-strided-odd", 2, 40, 13, 14, 72, 1, 1, bias=True, **strided)
    half.add("images-strided-long", 1, 328, 4, 16, 72, 1, 1, **strided)
    half.add("gradient-images-strided", 3, 136, 8, 28, 72, 1, 1, **strided, **gradient)
    brain.add("gradient-images-strided-odd", 3, 72, 14, 14, 200, 1, 1, **strided, **gradient)
    half.add("gradient-images", 3, 136, 5, 8, 72, 1, 1, layouts=first, **gradient)
    brain.add("gradient-images-odd", 3, 200, 13, 13, 70, 1, 1, layouts=first, **gradient)
    half.add("gradient-images-groups", 3, 64, 6, 6, 36, 1, 1, layouts=first, groups=2, accumulate=True, **gradient)
    half.add("blocks-stride", 2, 20, 9, 11, 40, 3, 4, layouts=first, stride=(2, 3), padding=(1, 0, 3, 2))
    brain.add("blocks-stride-fours", 2, 48, 9, 16, 72, 3, 3, layouts=first, stride=(2, 2), padding=(1, 0, 1, 2), **both)
    half.add("blocks-stride-pairs", 3, 40, 8, 10, 72, 2, 3, layouts=first, stride=(1, 2), dilation=(2, 3), **more)
    half.add("gradient-blocks-stride", 2, 72, 15, 20, 80, 3, 3, layouts=first, stride=(2, 2), **same, **gradient)
    brain.add(
        "gradient-blocks-rows", 2, 40, 9, 8, 96, 5, 2, layouts=first, stride=(2, 1), padding=(3, 2, 1, 0),
        accumulate=True, **gradient,
    )  # fmt: skip
    half.add("weight-windows", 3, 40, 9, 12, 72, 3, 3, layouts=first, **same, **weight)
    brain.add(
        "weight-windows-stride", 2, 20, 9, 11, 40, 3, 4, layouts=first, stride=(2, 3), padding=(1, 0, 3, 2), **weight
    )
    brain.add("weight-copied-rows", 2, 24, 9, 16, 72, 3, 3, layouts=first, padding=(1, 0, 1, 1), **weight)
    half.add(
        "weight-copied-rows-groups", 2, 96, 7, 24, 80, 3, 5, layouts=first, groups=2, stride=(2, 1), dilation=(3, 1),
        padding=(3, 3, 2, 2), accumulate=True, **weight,
    )  # fmt: skip
    half.add("weight-copied-rows-of-taps", 1, 8, 6, 8, 8, 5, 3, layouts=first, padding=(2, 2, 1, 1), **weight)
    brain.add("weight-windows-accumulate", 5, 9, 6, 7, 70, 1, 1, layouts=first, accumulate=True, **weight)
    # Whole rows of 16 bytes, which tensor copies bring: 16, 32 or 64 channels long; groups.
    last: tuple[Layout, ...] = ("NHWC",)
    half.add("copies", 2, 24, 9, 11, 133, 3, 3, layouts=last, padding=(1, 0, 2, 1), activation="gelu", **more)
    brain.add("copies-more", 2, 72, 7, 9, 40, 3, 3, layouts=last, **same)
    half.add("copies-long", 1, 192, 5, 6, 72, 3, 3, layouts=last, activation="silu", **more, **same)
    half.add("copies-one-by-one", 3, 80, 5, 4, 264, 1, 1, layouts=last, bias=True)
    half.add("copies-groups", 2, 64, 6, 8, 96, 3, 3, layouts=last, groups=2, bias=True, **same)
    # tall and skinny matrices: rows of whole 16 bytes and of pairs
    half.add("skinny", 3, 24, 14, 12, 72, 1, 1, layouts=last, activation="silu", **more)
    brain.add("skinny-pairs", 3, 58, 6, 8, 58, 1, 1, layouts=last, accumulate=True)
    half.add("gradient-skinny", 3, 40, 9, 8, 120, 1, 1, layouts=last, **gradient)
    # more tiles than an H200 has multiprocessors
    half.add("copies-many", 3, 8, 75, 80, 8, 3, 2, layouts=last)
    brain.add(
        "copies-stride", 2, 32, 14, 15, 40, 3, 3, layouts=last, stride=(2, 3), dilation=(2, 1), padding=(2, 1, 0, 2)
    )
    half.add("weight-copies", 3, 72, 9, 12, 136, 3, 3, layouts=last, **same, **weight)
    brain.add("weight-copies-one-by-one", 3, 80, 5, 6, 72, 1, 1, layouts=last, **weight)
    brain.add(
        "weight-copies-stride", 2, 32, 19, 26, 40, 3, 4, layouts=last, stride=(2, 3), padding=(1, 0, 3, 2), **weight
    )
    half.add("weight-copies-groups", 5, 48, 7, 6, 32, 3, 5, layouts=last, groups=2, accumulate=True, **weight)
    half.add("copies-accumulate", 1, 8, 8, 9, 20, 3, 3, layouts=last, accumulate=True, activation="relu", **same)
    half.add("gradient-copies", 2, 40, 6, 8, 64, 3, 3, layouts=last, **same, **gradient)
    brain.add("gradient-copies-stride", 2, 21, 9, 8, 40, 3, 3, layouts=last, stride=(2, 3), **same, **gradient)
    half.add("gradient-copies-groups", 2, 32, 9, 8, 64, 4, 3, layouts=last, groups=2, stride=(2, 2), **same, **gradient)
    brain.add("gradient-copies-phases", 2, 32, 9, 8, 64, 4, 4, layouts=last, stride=(2, 2), **same, **gradient)
    half.add("gradient-copies-zeros", 2, 24, 9, 8, 16, 1, 1, layouts=last, stride=(3, 2), **gradient)
    # Groups of few channels: eight filters of one group or of several, units of eight channels of one or of two.
    half.add("groups-fours", 2, 24, 9, 11, 24, 3, 3, groups=6, activation="silu", **more, **same)
    brain.add("groups-eights", 2, 40, 9, 11, 40, 3, 3, layouts=last, groups=5, stride=(2, 2), bias=True, **same)
    half.add("groups-twelves", 2, 48, 6, 7, 48, 3, 2, layouts=last, groups=4, dilation=(2, 1), **same)
    brain.add("groups-24", 1, 72, 7, 8, 72, 3, 3, groups=3, accumulate=True, activation="relu", **same)
    half.add("groups-fewer-filters", 2, 32, 7, 6, 16, 1, 3, layouts=last, groups=4, stride=(2, 3))
    half.add("gradient-groups-fours", 2, 24, 9, 11, 24, 3, 3, groups=6, stride=(2, 2), **same, **gradient)
    brain.add("gradient-groups-eights", 2, 40, 7, 9, 40, 3, 2, layouts=last, groups=5, **same, **gradient)
    half.add(
        "gradient-groups-bias", 1, 32, 7, 6, 64, 1, 1, layouts=last, groups=4, stride=(2, 1), bias=True, **gradient
    )
    half.add("weight-groups-fours", 3, 24, 9, 11, 24, 3, 3, layouts=last, groups=6, **same, **weight)
    brain.add("weight-groups-eights", 3, 40, 9, 8, 40, 3, 3, groups=5, stride=(2, 1), **same, **weight)
    half.add("weight-groups-24", 2, 72, 6, 7, 72, 3, 2, layouts=last, groups=3, accumulate=True, **same, **weight)
    # Transposed layers with a bias.
    half.add("gradient-bias", 2, 35, 8, 9, 20, 3, 3, layouts=ALL, stride=(2, 1), bias=True, **same, **gradient)
    brain.add("gradient-bias-copies", 2, 40, 9, 8, 64, 3, 3, layouts=last, bias=True, **same, **gradient)
    half.add("gradient-bias-copies-zeros", 2, 24, 9, 8, 16, 1, 1, layouts=last, stride=(3, 2), bias=True, **gradient)
    half.add("gradient-bias-blocks", 3, 72, 9, 12, 80, 3, 3, layouts=first, bias=True, **same, **gradient)
    brain.add("gradient-bias-depthwise", 2, 6, 9, 8, 6, 3, 3, groups=6, stride=(2, 2), bias=True, **same, **gradient)
    # Phases with three taps, of an odd number of weights, come before those with two, whose filters would lie in pairs.
    brain.add("gradient-odd-phases", 1, 65, 14, 9, 3, 5, 1, stride=(2, 1), padding=(2, 2, 0, 0), **gradient)
    # Few channels in planes: pixels are copied one by one or in pairs; of a row eight, four, two outputs or one are
    # stored at once.
    half.add(
        "planes", 1, 3, 13, 31, 20, 7, 7, layouts=first, stride=(2, 2), padding=(3, 3, 3, 3), activation="silu", **more
    )
    brain.add("planes-fours", 2, 1, 9, 12, 33, 3, 3, layouts=first, accumulate=True, activation="relu", **same)
    half.add("planes-pairs", 2, 4, 8, 18, 100, 3, 5, layouts=first, **both)
    brain.add(
        "planes-odd", 3, 3, 13, 38, 17, 5, 3, layouts=first, stride=(3, 3), padding=(2, 2, 1, 1), activation="gelu",
        **more,
    )  # fmt: skip
    return half.cases + brain.cases


def _integer_cases() -> list[Case]:
    """Layers of 8-bit integers, whose answers are exact: filters in words of four channels and others."""
    signed, unsigned = Layers("int8-", dtype="int8"), Layers("uint8-", dtype="uint8")
    same = {"padding": (1, 1, 1, 1)}
    both: dict[str, Any] = {"bias": True, "activation": "relu"}
    last: tuple[Layout, ...] = ("NHWC",)
    #                          n  c   h   w   k   r  s
    signed.add("odd", 3, 5, 13, 11, 7, 3, 3, layouts=ALL, add=True, **both, **same)
    unsigned.add("tails", 2, 20, 8, 9, 133, 3, 3, layouts=ALL, add=True, padding=(1, 0, 2, 1))
    signed.add("words", 2, 16, 8, 16, 128, 3, 3, thorough=last, bias=True, **same)
    signed.add("groups", 2, 24, 9, 10, 12, 3, 3, layouts=ALL, groups=3, **both, **same)
    unsigned.add("stride", 2, 8, 14, 15, 20, 3, 2, stride=(2, 1), dilation=(1, 2), activation="relu6", **same)
    signed.add("bias", 1, 4, 6, 7, 5, 1, 1, bias=True)
    # words that begin at odd bytes, at even ones, and in groups; with a last word of one, two and three channels
    unsigned.add("three", 2, 3, 17, 18, 20, 7, 7, layouts=last, thorough=last, stride=(2, 2), padding=(3, 3, 3, 3))
    unsigned.add("pairs", 2, 12, 9, 8, 10, 3, 3, layouts=last, thorough=last, groups=2, **both, **same)
    signed.add("loose", 1, 39, 7, 8, 33, 3, 2, layouts=last, groups=3, padding=(1, 1, 0, 1))
    signed.add("long-reduction", 1, 360, 5, 8, 12, 3, 3, layouts=last, thorough=last, add=True, **both, **same)
    unsigned.add("big-filter", 1, 4, 24, 25, 3, 17, 18, layouts=last, padding=(8, 3, 2, 9))
    signed.add("accumulate", 2, 8, 9, 8, 20, 3, 3, layouts=ALL, accumulate=True, activation="relu", **same)
    signed.add("empty-batch", 0, 4, 9, 9, 6, 3, 3)
    return signed.cases + unsigned.cases


#: Of 16-bit elements, forward and backward, and of 8-bit integers; met by the algorithms that take them.
NATIVE_CASES = tuple(_cases_16bit() + _integer_cases())
