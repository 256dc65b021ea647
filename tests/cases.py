"""The problems that every algorithm is proven on, built to break things, and random arrays for them.

Small, because the emulator plays every thread: a handful of blocks each, but with tails in every direction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes  # noqa: F401 - so that NumPy knows bfloat16
import numpy as np

from leanconv.dtypes import is_integer
from leanconv.images.borders import BORDERS
from leanconv.options import Layout
from leanconv.plan import Target
from leanconv.problem import ConvProblem, FilterProblem, Problem

KIB = 1024
#: GPUs as their compute capability describes them; plans are made for the first one.
TARGETS = (
    Target("sm_90a", 132, 227 * KIB, 228 * KIB),
    Target("sm_80", 108, 163 * KIB, 164 * KIB),
    Target("sm_100a", 148, 227 * KIB, 228 * KIB),
    Target("sm_120", 170, 99 * KIB, 100 * KIB),
)


@dataclass(frozen=True)
class Case:
    """A problem with a name. ``thorough`` ones also run in an algorithm's extreme configurations.

    ``in_turn``: of the layouts that a layer has cases in, this is the one to meet where one is enough.
    """

    name: str
    problem: Problem
    thorough: bool = False
    in_turn: bool = True


#: Every layer has a case in each of these. With images innermost a third of the layers is enough to meet what differs:
#: every kernel takes a second to build.
USUAL: tuple[Layout, ...] = ("NCHW", "NHWC")
INNERMOST: tuple[Layout, ...] = ("CHWN",)
ALL_OF = {"bias": True, "scale": True, "add": True}
ALL = USUAL + INNERMOST


class Layers:
    """Collects cases, each layer in its layouts, and deals out whose turn it is."""

    def __init__(self, prefix: str = "", **common: Any) -> None:
        self.prefix, self.common = prefix, common
        self.cases: list[Case] = []
        self._layers = 0

    def add(
        self,
        name: str,
        *shape: int,
        layouts: tuple[Layout, ...] = USUAL,
        thorough: tuple[Layout, ...] = (),
        **rest: Any,
    ) -> None:
        """One more layer, in ``layouts``; those in ``thorough`` also meet extreme configurations."""
        for i, layout in enumerate(layouts):
            problem = ConvProblem(*shape, layout=layout, **self.common, **rest)
            in_turn = self._layers % len(layouts) == i
            self.cases.append(Case(f"{self.prefix}{name}-{layout.lower()}", problem, layout in thorough, in_turn))
        self._layers += 1


def _conv_cases() -> list[Case]:
    layers = Layers()
    add = layers.add
    same = {"padding": (1, 1, 1, 1)}
    #                n  c   h   w   k   r  s
    add("plain", 2, 8, 12, 16, 16, 3, 3, layouts=ALL, thorough=USUAL, **same)
    add("odd", 3, 5, 13, 11, 7, 3, 3, layouts=ALL, thorough=ALL, activation="silu", **ALL_OF, **same)
    add("tails", 2, 19, 8, 9, 133, 3, 3, layouts=ALL, thorough=USUAL, bias=True, add=True, padding=(1, 0, 2, 1))
    add("whole-tiles", 2, 16, 8, 16, 128, 1, 1, thorough=USUAL)
    add("long-reduction", 1, 90, 5, 8, 12, 3, 3, layouts=ALL, thorough=USUAL, add=True, activation="relu6", **same)
    add("one-by-one", 2, 13, 9, 7, 21, 1, 1, bias=True, activation="sigmoid")
    add("one-by-one-strided", 2, 6, 9, 8, 9, 1, 1, layouts=ALL, stride=(2, 3), padding=(1, 1, 0, 0))
    add("single-pixel", 1, 1, 1, 1, 1, 1, 1, layouts=ALL)
    add("single-output", 1, 37, 3, 3, 5, 3, 3, bias=True)
    add("single-pixel-padded", 2, 3, 1, 1, 4, 3, 3, scale=True, activation="tanh", **same)
    add("one-channel", 2, 1, 15, 18, 6, 5, 5, activation="gelu_tanh", **ALL_OF, padding=(2, 2, 2, 2))
    add("one-filter", 2, 6, 15, 18, 1, 3, 3)
    add("empty-batch", 0, 4, 9, 9, 6, 3, 3, layouts=ALL, **same)
    add("one-row", 3, 4, 1, 70, 5, 1, 3, layouts=ALL, padding=(0, 0, 1, 1))
    add("one-column", 3, 4, 70, 1, 5, 3, 1, padding=(1, 1, 0, 0))
    add("even-filter", 2, 4, 10, 13, 6, 2, 4, padding=(1, 0, 1, 2))
    add("wide-filter", 1, 3, 6, 41, 4, 1, 19, padding=(0, 0, 9, 9))
    add("tall-filter", 1, 3, 41, 6, 4, 19, 1, padding=(9, 9, 0, 0))
    add("big-filter", 1, 2, 24, 25, 3, 17, 18, layouts=ALL, padding=(8, 3, 2, 9))
    add("eleven", 1, 3, 31, 30, 10, 11, 11, stride=(4, 4), padding=(2, 2, 2, 2))
    add("filter-over-image", 2, 3, 4, 3, 5, 7, 6, layouts=ALL, padding=(4, 3, 3, 4))
    add("all-padding-corner", 1, 2, 3, 3, 3, 2, 2, padding=(3, 3, 3, 3))
    add("stride", 2, 5, 14, 15, 9, 3, 3, layouts=ALL, stride=(2, 2), **same)
    add("stride-uneven", 2, 3, 17, 14, 8, 3, 2, stride=(1, 3), padding=(0, 1, 1, 0))
    add("stride-over-filter", 2, 4, 19, 23, 5, 2, 3, stride=(5, 4))
    add("padding-top-left", 1, 3, 8, 9, 4, 3, 3, padding=(2, 0, 1, 0))
    add("padding-bottom-right", 1, 3, 8, 9, 4, 3, 3, padding=(0, 2, 0, 1))
    add("dilation", 2, 4, 15, 14, 6, 3, 3, dilation=(2, 2), padding=(2, 2, 2, 2))
    add("dilation-uneven", 1, 4, 18, 19, 6, 3, 2, layouts=ALL, dilation=(1, 5), stride=(2, 1), padding=(1, 3, 4, 2))
    add("groups", 2, 6, 9, 10, 9, 3, 3, layouts=ALL, groups=3, bias=True, **same)
    add("groups-vector", 2, 16, 8, 8, 24, 3, 3, groups=2, thorough=USUAL, activation="relu", **same)
    add("depthwise", 2, 7, 9, 12, 7, 3, 3, groups=7, activation="hardswish", **ALL_OF, **same)
    add("depthwise-multiplier", 1, 5, 9, 8, 15, 5, 3, layouts=ALL, groups=5, stride=(2, 2), padding=(2, 2, 1, 1))
    add("depthwise-wide", 2, 3, 6, 44, 3, 3, 40, groups=3, **ALL_OF, padding=(1, 1, 20, 19))
    add("depthwise-row", 2, 3, 1, 72, 6, 1, 4, groups=3, activation="elu:0.5", **ALL_OF, padding=(0, 0, 3, 0))
    add(
        "everything",
        2,
        10,
        16,
        13,
        14,
        3,
        4,
        stride=(2, 3),
        padding=(3, 1, 0, 4),
        dilation=(3, 2),
        groups=2,
        bias=True,
        activation="relu",
        layouts=ALL,
    )
    add("precision-ieee", 1, 6, 9, 9, 5, 3, 3, layouts=ALL, precision="ieee", **same)
    # Four images, and eight, are adjacent where images are innermost.
    add("images-4", 4, 6, 5, 7, 9, 3, 2, layouts=INNERMOST, bias=True, stride=(1, 2), **same)
    add("images-8", 8, 33, 3, 4, 20, 3, 3, layouts=INNERMOST, thorough=INNERMOST, activation="elu", **ALL_OF, **same)
    # Results that are added to what the output holds, in vectors and one by one, and over a cluster.
    add("accumulate", 2, 16, 6, 8, 16, 3, 3, layouts=ALL, thorough=ALL, accumulate=True, **same)
    add("accumulate-odd", 2, 3, 5, 7, 9, 3, 2, layouts=ALL, accumulate=True, bias=True, activation="relu")
    return layers.cases


def _gradient_cases() -> list[Case]:
    """Layers whose input's gradient is asked for: no activation; with a bias they are transposed layers."""
    layers = Layers("gradient-", op="dgrad")
    add = layers.add
    same = {"padding": (1, 1, 1, 1)}
    #                n  c   h   w   k   r  s
    add("plain", 2, 16, 12, 16, 8, 3, 3, layouts=ALL, thorough=USUAL, **same)
    add("odd", 3, 7, 13, 11, 5, 3, 3, **same)
    add("tails", 2, 35, 8, 9, 19, 3, 2, layouts=ALL, padding=(1, 0, 2, 1))
    add("long-reduction", 1, 12, 5, 8, 90, 3, 3, thorough=USUAL, **same)
    add("one-by-one", 2, 21, 9, 7, 13, 1, 1)
    add("single-pixel", 1, 1, 1, 1, 1, 1, 1)
    add("single-output", 1, 5, 3, 3, 37, 3, 3)
    add("empty-batch", 0, 6, 9, 9, 4, 3, 3, layouts=ALL, **same)
    add("one-row", 3, 5, 1, 70, 4, 1, 3, layouts=ALL, padding=(0, 0, 1, 1))
    add("big-filter", 1, 3, 24, 25, 2, 17, 18, padding=(8, 3, 2, 9))
    add("filter-over-image", 2, 5, 4, 3, 3, 7, 6, padding=(4, 3, 3, 4))
    # Windows of the gradient begin inside the image where the layer pads by more than its filter reaches.
    add("padding-over-filter", 2, 4, 7, 9, 6, 2, 3, layouts=ALL, padding=(4, 2, 3, 5))
    add("padding-over-filter-one-side", 1, 4, 8, 8, 8, 1, 3, layouts=ALL, padding=(3, 0, 0, 4))
    add("dilation", 2, 6, 15, 14, 4, 3, 3, dilation=(2, 3), padding=(2, 1, 2, 0))
    add("groups", 2, 9, 9, 10, 6, 3, 3, layouts=ALL, groups=3, **same)
    add("depthwise", 2, 7, 9, 12, 7, 3, 3, groups=7, **same)
    add("depthwise-row", 2, 5, 3, 44, 5, 1, 7, groups=5, padding=(0, 0, 5, 1))
    # Strides: rows and columns fall into phases, with as many taps or with one more or less.
    add("stride", 2, 18, 14, 15, 9, 3, 3, layouts=ALL, stride=(2, 2), thorough=ALL, **same)
    add("stride-equal-phases", 2, 8, 12, 16, 6, 4, 4, layouts=ALL, stride=(2, 2), **same)
    add("stride-rows", 2, 8, 12, 16, 8, 5, 3, layouts=ALL, stride=(2, 1), **same)
    add("stride-uneven", 2, 8, 17, 14, 3, 3, 2, stride=(1, 3), padding=(0, 1, 1, 0))
    add("stride-unread-rows", 2, 5, 18, 19, 4, 3, 3, layouts=ALL, stride=(4, 3))
    add("stride-over-filter", 2, 5, 19, 23, 4, 2, 3, layouts=ALL, stride=(5, 4), padding=(0, 0, 3, 2))
    add("stride-patches", 1, 3, 16, 16, 20, 4, 4, stride=(4, 4))
    add("stride-patches-odd", 1, 5, 15, 14, 4, 4, 4, layouts=ALL, stride=(4, 4), padding=(1, 1, 1, 2))
    add("stride-sparse", 1, 3, 14, 17, 4, 2, 3, stride=(3, 5), dilation=(2, 3))
    add("stride-one-by-one", 2, 9, 9, 8, 6, 1, 1, stride=(2, 3), padding=(1, 1, 0, 0))
    add("stride-over-image", 1, 4, 3, 2, 3, 2, 2, stride=(7, 5), padding=(2, 3, 0, 4))
    add("stride-one-pixel", 2, 4, 1, 1, 3, 4, 4, stride=(4, 4), padding=(3, 1, 2, 3))
    add("stride-one-row", 2, 4, 1, 8, 6, 2, 3, stride=(2, 1), padding=(1, 1, 1, 1))
    add("stride-padding-only", 1, 2, 1, 1, 3, 1, 1, stride=(4, 4), padding=(1, 3, 1, 3))
    add(
        "stride-shares-dilation",
        2,
        4,
        20,
        22,
        5,
        3,
        4,
        layouts=ALL,
        stride=(4, 6),
        dilation=(6, 4),
        padding=(3, 2, 1, 4),
    )
    add("stride-is-dilation", 1, 4, 15, 13, 4, 3, 3, stride=(3, 2), dilation=(3, 4), padding=(1, 0, 2, 2))
    add("stride-eleven", 1, 6, 31, 30, 5, 11, 11, stride=(4, 4), padding=(2, 2, 2, 2))
    add("stride-groups", 2, 16, 8, 11, 24, 3, 3, stride=(2, 3), groups=2, **same)
    add("stride-depthwise", 2, 9, 14, 15, 9, 3, 3, stride=(2, 2), groups=9, thorough=USUAL, **same)
    add("depthwise-multiplier", 2, 5, 9, 11, 15, 3, 5, stride=(1, 2), groups=5, padding=(1, 2, 0, 3))
    add(
        "everything",
        2,
        14,
        16,
        13,
        10,
        3,
        4,
        layouts=ALL,
        stride=(2, 3),
        padding=(3, 1, 0, 4),
        dilation=(3, 2),
        groups=2,
    )
    add("precision-ieee", 1, 5, 9, 9, 6, 3, 3, stride=(2, 1), precision="ieee", **same)
    add("images-4", 4, 40, 5, 6, 35, 3, 3, layouts=INNERMOST, stride=(2, 1), **same)
    add("accumulate", 1, 7, 6, 8, 9, 3, 3, accumulate=True, **same)
    add("accumulate-unread-rows", 2, 5, 11, 12, 4, 3, 3, layouts=ALL, accumulate=True, stride=(4, 3))
    add("images-8", 8, 9, 4, 5, 33, 3, 2, layouts=INNERMOST, thorough=INNERMOST, padding=(1, 1, 0, 1))
    add("bias", 2, 20, 7, 9, 16, 3, 3, layouts=ALL, bias=True, **same)
    add("bias-stride", 2, 18, 9, 8, 9, 4, 3, layouts=ALL, bias=True, stride=(2, 2), **same)
    add("bias-unread-rows", 2, 5, 10, 11, 6, 2, 3, layouts=ALL, bias=True, stride=(4, 3), padding=(1, 0, 0, 2))
    add("bias-padding-only", 1, 2, 1, 1, 3, 1, 1, bias=True, stride=(4, 4), padding=(1, 3, 1, 3))
    add("bias-groups", 2, 16, 6, 7, 24, 3, 3, bias=True, stride=(1, 2), groups=2, **same)
    add("bias-depthwise", 2, 7, 9, 12, 7, 3, 3, bias=True, groups=7, **same)
    add("bias-depthwise-stride", 2, 5, 9, 11, 10, 3, 3, bias=True, stride=(2, 2), groups=5, **same)
    return layers.cases


def _weight_cases() -> list[Case]:
    """Layers whose filters' gradient is asked for: no bias, no activation."""
    layers = Layers("weight-", op="wgrad")
    add = layers.add
    same = {"padding": (1, 1, 1, 1)}
    #                n  c   h   w   k   r  s
    add("plain", 2, 4, 9, 12, 8, 3, 3, layouts=ALL, thorough=USUAL, **same)
    add("odd", 3, 5, 7, 9, 7, 3, 2, layouts=ALL, padding=(1, 0, 2, 1))
    add("one-by-one", 2, 13, 5, 6, 11, 1, 1)
    add("single-pixel", 1, 1, 1, 1, 1, 1, 1, layouts=ALL)
    add("empty-batch", 0, 4, 9, 9, 6, 3, 3, layouts=ALL, **same)
    add("one-row", 3, 4, 1, 40, 5, 1, 3, padding=(0, 0, 1, 1))
    add("filter-over-image", 2, 3, 4, 3, 5, 7, 6, padding=(4, 3, 3, 4))
    add("padding-over-filter", 2, 4, 7, 9, 6, 2, 3, padding=(4, 2, 3, 5))
    add("stride", 2, 5, 14, 15, 6, 3, 3, layouts=ALL, stride=(2, 2), **same)
    add("stride-over-filter", 2, 4, 19, 23, 5, 2, 3, stride=(5, 4))
    add("dilation", 2, 4, 15, 14, 6, 3, 3, dilation=(2, 3), padding=(2, 1, 2, 0))
    add("groups", 2, 6, 9, 10, 9, 3, 3, layouts=ALL, groups=3, **same)
    add("depthwise", 2, 7, 9, 12, 7, 3, 3, groups=7, thorough=USUAL, **same)
    add("depthwise-stride", 2, 9, 13, 16, 9, 5, 3, groups=9, stride=(2, 3), padding=(2, 1, 0, 2))
    add("depthwise-large", 3, 3, 12, 14, 6, 11, 13, groups=3, padding=(5, 4, 7, 5))
    add("depthwise-large-fours", 2, 3, 9, 16, 3, 9, 11, groups=3, padding=(4, 4, 5, 5))
    add("depthwise-multiplier", 1, 5, 9, 8, 15, 5, 3, layouts=ALL, groups=5, stride=(2, 2), padding=(2, 2, 1, 1))
    add("depthwise-dilation", 2, 3, 17, 15, 3, 3, 3, groups=3, dilation=(3, 2), padding=(3, 2, 1, 2))
    add("accumulate", 2, 6, 6, 8, 6, 3, 3, layouts=ALL, groups=6, accumulate=True, **same)
    add("precision-ieee", 1, 6, 9, 9, 5, 3, 3, layouts=ALL, precision="ieee", **same)
    add("images", 16, 16, 2, 3, 20, 2, 3, layouts=("NHWC",), padding=(1, 0, 1, 1))
    return layers.cases


def _transform_cases() -> list[Case]:
    """Layers for algorithms that transform tiles: widths, heights and rows that their kernels know one by one.

    Sums of 128 products and more on average, as precision "fp32" asks of 8 states. Others meet such layers elsewhere.
    """
    layers = Layers("transform-")
    add = layers.add
    # Rows of whole tiles, of narrower ones, and a rest: 3·4 + 1, 6·3 + 2 + 1, 5·2 + 4, 4·7 + 2, 3·3 + 2, 2·5 + 1.
    #                      n  c   h   w   k   r  s
    add("width-2", 2, 9, 7, 13, 5, 3, 2, bias=True, activation="relu", padding=(1, 1, 1, 0))
    add("width-3", 1, 17, 6, 21, 40, 3, 3, layouts=ALL, thorough=USUAL, padding=(1, 1, 1, 1), **ALL_OF)
    add("width-4", 1, 19, 7, 14, 35, 2, 4, layouts=ALL, bias=True, padding=(0, 1, 2, 1))
    add("width-5-one-row", 3, 28, 1, 30, 70, 1, 5, bias=True, padding=(0, 0, 2, 2))
    add("width-6", 1, 14, 8, 11, 33, 2, 6, padding=(1, 0, 3, 2))
    add("width-7", 1, 25, 5, 11, 6, 1, 7, activation="relu", padding=(0, 0, 3, 3))
    # 10 + 2 + 1, 9·2 + 2, 8·2 + 5
    add("width-7-relaxed", 1, 9, 6, 13, 36, 3, 7, layouts=ALL, precision="relaxed", padding=(1, 1, 3, 3))
    add("width-8", 1, 10, 5, 20, 70, 2, 8, precision="relaxed", bias=True, activation="relu", padding=(1, 0, 4, 3))
    add(
        "width-9", 2, 5, 4, 21, 9, 3, 9, layouts=ALL, thorough=ALL, precision="relaxed", bias=True, padding=(1, 1, 4, 4)
    )
    # Rows of filters that are cut into pieces, of images that are no wider and wider, in parts of rows too.
    add("pieces-8", 2, 9, 4, 17, 40, 3, 8, layouts=ALL, bias=True, activation="relu", padding=(1, 1, 4, 3))
    add("pieces-9", 1, 11, 5, 19, 37, 2, 9, layouts=ALL, thorough=USUAL, bias=True, padding=(1, 0, 4, 4))
    add("pieces-high", 1, 3, 18, 16, 9, 14, 11, padding=(5, 6, 5, 5))
    add("pieces-groups", 2, 32, 5, 18, 10, 1, 13, layouts=ALL, groups=2, padding=(0, 0, 6, 6))
    # Filters of more rows than are in work together, in parts of the same height: two whole ones, three with a gap.
    add("high", 1, 5, 17, 9, 6, 14, 3, layouts=ALL, thorough=USUAL, padding=(5, 6, 1, 1))
    add("higher-dilated", 1, 2, 50, 8, 5, 26, 3, bias=True, padding=(3, 4, 1, 1), dilation=(2, 1))
    add("dilated-twice", 2, 14, 11, 9, 8, 3, 4, padding=(2, 2, 1, 1), dilation=(2, 1))
    add("dilated-thrice", 1, 13, 14, 10, 5, 3, 5, bias=True, padding=(3, 2, 2, 2), dilation=(3, 1))
    add("groups", 2, 26, 7, 9, 10, 3, 5, layouts=ALL, groups=2, bias=True, padding=(1, 1, 2, 2))
    add("short-row", 3, 11, 4, 5, 36, 3, 5)
    gradient: dict[str, Any] = {"op": "dgrad"}
    added = gradient | {"accumulate": True}
    add("gradient-width-3", 1, 40, 6, 21, 18, 3, 3, layouts=ALL, thorough=USUAL, padding=(1, 1, 1, 1), **gradient)
    add("tiles-of-images", 5, 9, 7, 7, 40, 3, 3, bias=True, padding=(1, 1, 1, 1))
    add("tiles-relaxed", 3, 19, 7, 10, 37, 3, 3, thorough=USUAL, precision="relaxed", add=True, padding=(1, 0, 2, 1))
    add("gradient-tiles-relaxed", 2, 6, 9, 7, 9, 3, 3, precision="relaxed", padding=(3, 1, 0, 2), **added)
    add("gradient-pieces-13", 2, 9, 6, 18, 10, 2, 13, layouts=ALL, padding=(1, 0, 6, 7), **gradient)
    add("gradient-width-9", 1, 6, 5, 21, 9, 2, 9, precision="relaxed", padding=(0, 1, 3, 5), **gradient)
    add("gradient-padding-over-filter", 2, 10, 7, 13, 18, 2, 4, layouts=ALL, padding=(3, 2, 4, 5), **gradient)
    add("gradient-high-dilated", 1, 3, 20, 8, 4, 14, 3, padding=(7, 5, 0, 2), dilation=(2, 1), **gradient)
    add("gradient-groups", 2, 10, 7, 9, 30, 3, 4, groups=2, padding=(1, 1, 2, 1), **gradient)
    add("images-4", 4, 11, 5, 9, 38, 3, 3, layouts=INNERMOST, bias=True, padding=(1, 1, 1, 1))
    add("images-8", 8, 13, 3, 7, 36, 3, 3, layouts=INNERMOST, thorough=INNERMOST, precision="relaxed", **ALL_OF)
    add("gradient-images-8", 8, 37, 4, 5, 13, 3, 3, layouts=INNERMOST, padding=(1, 1, 1, 1), **gradient)
    return layers.cases


def filter_problem(
    batch: int,
    h: int,
    w: int,
    kh: int,
    kw: int,
    *,
    anchor: tuple[int, int] | None = None,
    gap: int = 0,
    rows_between: int = 0,
    y_gap: int = 0,
    **rest: Any,
) -> FilterProblem:
    """A FilterProblem whose rows lie ``gap`` elements and whose images ``rows_between`` rows apart in memory."""
    if anchor is None:
        anchor = (kh // 2, kw // 2)
    problem = FilterProblem(batch, h, w, kh, kw, anchor, **rest)
    x_pitch, y_pitch = w * problem.channels + gap, problem.out_w * problem.channels + y_gap
    return replace(
        problem,
        x_pitch=x_pitch,
        x_step=x_pitch * (h + rows_between),
        y_pitch=y_pitch,
        y_step=y_pitch * (problem.out_h + rows_between),
    )


def _filter_cases() -> list[Case]:
    found = []

    def add(name: str, *shape: int, thorough: bool = False, **rest: Any) -> None:
        found.append(Case(name, filter_problem(*shape, **rest), thorough))

    # Wide enough for strips whose windows lie wholly inside, odd enough for tails.
    for border in BORDERS:
        add(f"border-{border}", 1, 37, 403, 3, 3, border=border, thorough=border == "reflect101")
        add(f"border-{border}-large", 2, 21, 141, 8, 13, border=border)
        add(f"border-{border}-over-image", 1, 5, 3, 17, 14, border=border)
        add(f"border-{border}-one-pixel", 2, 1, 1, 5, 4, border=border)
        add(f"border-{border}-int32", 1, 19, 300, 5, 5, border=border, dtype="int32")
    shapes = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 5), (5, 3), (4, 4), (7, 7), (6, 11), (9, 9), (15, 15), (20, 20)]
    shapes += [(1, 32), (32, 1), (31, 17), (32, 32), (25, 4), (3, 29)]
    for kh, kw in shapes:
        thorough = (kh, kw) in ((7, 7), (1, 32))
        add(f"shape-{kh}x{kw}", 1, 45, 404, kh, kw, border="constant", thorough=thorough)
    for i, (h, w) in enumerate(
        [(1, 1), (1, 517), (263, 1), (2, 3), (16, 128), (17, 129), (33, 127), (9, 131), (64, 260)]
    ):
        add(f"size-{h}x{w}", 1, h, w, 3, 3, border=tuple(BORDERS)[i % 5])
        add(f"size-{h}x{w}-5x5", 1, h, w, 5, 5, border=tuple(BORDERS)[(i + 2) % 5])
    add("empty-batch", 0, 9, 9, 3, 3)
    add("batch", 5, 18, 133, 3, 3, border="wrap")
    add("pitch-aligned", 2, 23, 390, 5, 5, gap=10, y_gap=2, rows_between=1)
    add("pitch-odd", 2, 23, 390, 5, 5, gap=3, y_gap=1, rows_between=2, border="reflect")
    add("pitch-odd-in", 3, 18, 260, 3, 3, gap=1, border="replicate")
    add("pitch-odd-out", 3, 18, 260, 3, 3, y_gap=1, border="replicate")
    for anchor in ((0, 0), (0, 6), (4, 0), (4, 6), (1, 5)):
        add(f"anchor-{anchor[0]}-{anchor[1]}", 1, 22, 280, 5, 7, anchor=anchor, thorough=anchor == (0, 6))
    add("anchor-corner-32", 1, 40, 330, 32, 32, anchor=(31, 0), border="wrap")
    add("anchor-other-corner-32", 1, 40, 330, 32, 32, anchor=(0, 31), border="reflect")
    # Several filters: all in a block; in parts of 4, 4 and 2; a rest of the last part; rows that are staged.
    add("filters", 2, 21, 260, 5, 5, filters=7, thorough=True)
    add("filters-odd-rows", 1, 18, 133, 3, 4, filters=3, y_gap=1, rows_between=1, border="constant")
    add("filters-in-tiles", 1, 9, 132, 32, 32, filters=10, border="reflect")
    add("filters-in-tiles-int32", 2, 6, 35, 31, 32, filters=9, dtype="int32", border="wrap")
    add("int32-32x32", 1, 39, 300, 32, 32, dtype="int32", border="wrap", thorough=True)
    # Types of images and results, which are converted on the way to shared memory and back; wide enough for vectors.
    for dtype, result, border in (
        ("uint8", None, "reflect101"),
        ("uint8", "float32", "constant"),
        ("int8", None, "reflect"),
        ("int8", "int16", "wrap"),
        ("uint16", None, "replicate"),
        ("int16", None, "constant"),
        ("int16", "uint8", "reflect101"),
        ("float16", None, "constant"),
        ("bfloat16", None, "wrap"),
        ("float32", "uint8", "replicate"),
        ("float32", "float16", "reflect"),
        ("float32", "float64", "reflect"),
        ("float64", None, "reflect101"),
        ("float64", "float32", "constant"),
        ("float64", "uint16", "constant"),
        ("float64", "bfloat16", "constant"),
        ("int32", "float64", "wrap"),
        ("int32", "int16", "constant"),
        ("uint8", "int32", "constant"),
    ):
        name = f"type-{dtype}" + f"-{result}" * bool(result)
        thorough = name in ("type-uint8", "type-float64")
        add(name, 2, 19, 403, 3, 4, border=border, dtype=dtype, out_dtype=result, gap=2, y_gap=2, thorough=thorough)
        add(f"{name}-vectors", 1, 21, 264, 5, 3, border=border, dtype=dtype, out_dtype=result)
    add("type-int32-sums-float64", 1, 19, 300, 3, 3, dtype="int32", sum_dtype="float64", border="constant")
    add("type-float64-32x32", 1, 35, 200, 32, 32, dtype="float64", border="wrap", anchor=(0, 31))
    add("type-uint8-filters", 2, 18, 264, 5, 5, dtype="uint8", filters=3)
    add("type-uint8-one-pixel", 2, 1, 1, 5, 4, dtype="uint8", border="constant")
    # Channels side by side, in vectors and one by one, and those filtered one by one: many, or of wide filters.
    for channels in (2, 3, 4, 5):
        for border in ("reflect101", "constant"):
            dtype = "uint8" if border == "reflect101" else "float32"
            add(f"channels-{channels}-{border}", 2, 19, 120, 3, 5, border=border, dtype=dtype, channels=channels)
    add("channels-3-borders", 1, 18, 300 // 3, 7, 7, dtype="uint16", channels=3, border="wrap", y_gap=2, thorough=True)
    add("channels-3-over-image", 1, 4, 2, 9, 6, dtype="uint8", channels=3, border="reflect", anchor=(8, 0))
    add("channels-4-replicate", 2, 17, 66, 4, 3, dtype="float16", channels=4, border="replicate", gap=8, rows_between=1)
    add("channels-3-wide", 1, 17, 50, 3, 31, dtype="uint8", channels=3, border="reflect", filters=2)
    add("channels-3-float64", 1, 17, 90, 3, 3, dtype="float64", channels=3, border="wrap", anchor=(2, 0))
    # Whole windows alone, and filters of each image.
    add("valid", 2, 24, 270, 4, 5, valid=True, y_gap=2)
    add("valid-uint8-channels", 1, 20, 100, 3, 3, valid=True, dtype="uint8", channels=3, filters=2)
    add("valid-one-output", 2, 7, 9, 7, 9, valid=True)
    # Volumes: slices outside, one alone, results of several filters.
    for border in BORDERS:
        add(f"volume-{border}", 2, 9, 133, 3, 4, d=4, kd=3, anchor_z=1, border=border, gap=1, rows_between=1)
    add("volume-over-image", 2, 5, 9, 3, 3, d=2, kd=7, anchor_z=5, border="reflect", dtype="uint8")
    add("volume-filters", 1, 18, 264, 5, 5, d=3, kd=2, anchor_z=0, filters=3, dtype="uint8", border="wrap")
    add("volume-valid", 2, 9, 40, 3, 3, d=5, kd=3, valid=True, filters=2, dtype="int16", out_dtype="float32")
    add("volume-one-slice-filter", 2, 9, 40, 3, 3, d=3, kd=1, filters=2, dtype="float64", channels=2)
    add("volume-int32", 1, 9, 40, 3, 3, d=3, kd=3, anchor_z=2, dtype="int32", border="constant", channels=3)
    add("volume-per-image", 2, 9, 40, 3, 3, d=3, kd=2, per_image=True, filters=2, channels=2, border="reflect")
    add("per-image", 3, 18, 133, 3, 3, per_image=True, border="wrap")
    add("per-image-filters", 2, 5, 20, 31, 31, per_image=True, filters=5, dtype="uint8", channels=5, border="reflect")
    return found


CONV_CASES = tuple(_conv_cases())
FILTER_CASES = tuple(_filter_cases())
GRADIENT_CASES = tuple(_gradient_cases())
WEIGHT_CASES = tuple(_weight_cases())
#: Only for algorithms that transform, which are those of a precision above "ieee".
TRANSFORM_CASES = tuple(_transform_cases())
CASES = CONV_CASES + GRADIENT_CASES + WEIGHT_CASES + FILTER_CASES

#: Problems that no algorithm solves, each with a word that the refusal must contain.
REFUSED = (
    (replace(CONV_CASES[0].problem, dtype="float64"), "float64"),
    (replace(CONV_CASES[0].problem, h=2**16, w=2**15), "65536x32768"),
    (replace(CONV_CASES[0].problem, padding=(2**15, 2**15, 2**15, 2**15)), "output of 65546x65550"),
    # of sums that transforms do not make
    (filter_problem(1, 50, 50, 33, 3, dtype="int32"), "33x3"),
    (filter_problem(1, 50, 50, 3, 33, dtype="int32"), "3x33"),
    (filter_problem(1, 50, 50, 3, 3, anchor=(3, 0)), "anchor"),
)

#: zero-mean data cancels, positive data accumulates; both are needed (design: Precision is a contract)
KINDS = ("zero-mean", "positive")


def draw(rng: np.random.Generator, shape: tuple[int, ...], kind: str, dtype: str = "float32") -> np.ndarray:
    """Random data; int32 draws span the whole range, so that sums wrap around.

    Integers of 8 bits are all values that they have, or (``positive``) the one of largest size: signs are alike, and
    sums as large as they can be.
    """
    if dtype in ("int8", "uint8", "int16", "uint16"):
        limits = np.iinfo(dtype)
        if kind == "positive":
            return np.full(shape, limits.max if limits.min == 0 else limits.min, dtype)
        return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    if dtype == "int32":
        low = -(2**31) if kind == "zero-mean" else 0
        return rng.integers(low, 2**31, shape, np.int32)
    low = -1.0 if kind == "zero-mean" else 1.0
    return rng.uniform(low, low + 2 if low < 0 else 2.0, shape).astype(dtype)


def draw_conv(problem: ConvProblem, kind: str, seed: int = 0) -> dict[str, np.ndarray | None]:
    """What the problem reads, by role and in its layout; the bias is None where it has none."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray | None] = {"bias": None}
    for operand in problem.operands[:-1]:
        array = draw(rng, operand.shape, kind, operand.dtype)
        # what is added to sums of integers is beyond 16 bits, and with it no result of the tests beyond 32
        arrays[operand.role] = array >> 1 + problem.add if operand.dtype == "int32" else array
    return arrays


def draw_filter(problem: FilterProblem, kind: str, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Dense images ``x`` (batch, h, w) and ``w`` (kh, kw), or several, and the scalars ``value`` and ``delta``.

    Weights of integer images are so large that some results leave the range of their type, and most do not.
    """
    rng, shapes = np.random.default_rng(seed), (problem.x_shape, problem.w_shape)
    types = problem.dtype, problem.sums
    arrays = {name: draw(rng, *each) for name, *each in zip("xw", shapes, (kind, kind), types, strict=True)}
    if problem.sums != "int32" and is_integer(problem.dtype):
        if kind == "positive":  # all values of one sign
            x = draw(rng, problem.x_shape, "zero-mean", problem.dtype)
            arrays["x"] = np.where(x < 0, ~x, x)
        arrays["w"] *= 1.5 / (problem.kh * problem.kw) ** (0.5 if kind == "zero-mean" else 1.0)
    whole = problem.sums == "int32", is_integer(problem.dtype)
    return arrays, {"value": 3 if any(whole) else 1.25, "delta": -7 if whole[0] else -0.5}
