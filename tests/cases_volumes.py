"""The layers of volumes that algorithms are proven on: slices, rows and columns that no tile divides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from leanconv.problem import ConvProblem
from tests.cases import ALL_OF, USUAL, Case, Layers

#: Named by what they vary; 16-bit elements and the gradients take the same ones.
_LAYERS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    #            n  c   h  w   k   r  s
    "plain": ((1, 8, 6, 8, 16, 3, 3), dict(d=4, t=3, padding=(1, 1, 1, 1), padding_d=(1, 1))),
    "odd": ((2, 5, 7, 5, 7, 3, 2), dict(d=5, t=2, padding=(1, 0, 1, 1), padding_d=(1, 0), bias=True)),
    "strides": (
        (2, 6, 9, 8, 10, 3, 3),
        dict(d=7, t=3, stride_d=2, stride=(2, 3), padding=(1, 1, 0, 1), padding_d=(2, 1)),
    ),
    "far": ((1, 4, 6, 7, 6, 2, 3), dict(d=9, t=3, stride_d=3, dilation_d=2, dilation=(1, 2), padding=(0, 1, 2, 2))),
    "over-filter": ((1, 4, 7, 6, 5, 2, 2), dict(d=8, t=2, stride_d=3, stride=(3, 3), padding_d=(1, 1))),
    "groups": ((2, 6, 5, 6, 9, 3, 3), dict(d=4, t=3, groups=3, padding=(1, 1, 1, 1), padding_d=(1, 1))),
    "depthwise": ((1, 6, 6, 5, 6, 3, 3), dict(d=5, t=3, groups=6, padding=(1, 1, 1, 1), padding_d=(1, 1))),
    "depthwise-strides": (
        (2, 6, 9, 13, 12, 3, 3),
        dict(d=5, t=3, groups=6, stride=(2, 2), padding=(1, 1, 1, 1), padding_d=(2, 1), bias=True),
    ),
    "depthwise-far": (
        (2, 5, 11, 8, 5, 2, 3),
        dict(d=9, t=2, groups=5, stride_d=2, dilation_d=3, dilation=(2, 1), padding=(0, 1, 1, 1), padding_d=(1, 2)),
    ),
    "images": ((2, 8, 6, 7, 12, 3, 3), dict(d=3, t=1, padding=(1, 1, 1, 1))),
    "images-strided": ((1, 8, 6, 7, 12, 3, 3), dict(d=5, t=1, stride_d=2, padding=(1, 1, 1, 1))),
    "slices-strided": ((2, 8, 6, 7, 12, 1, 1), dict(d=6, t=3, stride=(2, 2), stride_d=2, padding_d=(1, 1))),
    "many-taps": ((1, 2, 12, 13, 3, 11, 2), dict(d=12, t=11, padding=(5, 5, 0, 1), padding_d=(5, 5))),
    "two-slices": ((2, 4, 4, 4, 8, 2, 2), dict(d=2, t=2, stride_d=2, stride=(2, 2))),
    "patches": ((2, 3, 8, 12, 10, 4, 4), dict(d=4, t=2, stride_d=2, stride=(4, 4), bias=True)),
    "apart": (
        (1, 2, 9, 13, 7, 2, 2),
        dict(d=7, t=2, stride_d=4, stride=(2, 5), dilation=(1, 3), padding=(1, 0, 2, 1), padding_d=(1, 1)),
    ),
    "padding-alone": ((1, 3, 5, 6, 4, 3, 3), dict(d=1, t=1, padding=(1, 1, 1, 1), padding_d=(1, 1), bias=True)),
    "empty": ((0, 4, 5, 5, 6, 3, 3), dict(d=4, t=3)),
    "tensor": ((1, 32, 5, 6, 24, 3, 3), dict(d=4, t=3, padding=(1, 1, 1, 1), padding_d=(1, 1), bias=True)),
    "tensor-strides": (
        (2, 16, 7, 6, 32, 3, 3),
        dict(d=5, t=3, stride_d=2, stride=(2, 2), padding=(1, 1, 1, 1), padding_d=(1, 1)),
    ),
    "tensor-plain": ((1, 32, 4, 4, 20, 3, 3), dict(d=3, t=3, padding=(1, 1, 1, 1), padding_d=(1, 1))),
    "tensor-lanes": ((1, 34, 4, 5, 22, 3, 2), dict(d=4, t=2, padding=(1, 1, 0, 1), padding_d=(1, 1), bias=True)),
    "tensor-patches": ((1, 16, 4, 4, 32, 2, 2), dict(d=4, t=2, stride_d=2, stride=(2, 2))),
    "tensor-dilated": (
        (1, 16, 6, 5, 16, 2, 3),
        dict(d=7, t=3, dilation_d=2, dilation=(2, 1), padding=(1, 1, 1, 1), padding_d=(2, 2)),
    ),
    "tensor-wide": ((1, 32, 4, 9, 24, 2, 5), dict(d=3, t=2, padding=(1, 0, 2, 2), padding_d=(0, 1), bias=True)),
    "deep": ((1, 16, 3, 4, 8, 3, 3), dict(d=20, t=3, padding=(1, 1, 1, 1), padding_d=(1, 1))),
}


def _cases() -> list[Case]:
    cases = []
    for number, (name, (shape, rest)) in enumerate(_LAYERS.items()):
        layer = ConvProblem(*shape, **rest)
        for i, layout in enumerate(("NCHW", "NHWC")):
            placed = replace(layer, layout=layout)
            turn = number % 2 == i
            after: dict[str, Any] = {"activation": "relu"} if layer.bias else {}
            if name in ("odd", "depthwise-strides", "tensor"):
                after = {"activation": "silu", "scale": True, "add": True}
            of, end = f"volume-{name}", layout.lower()
            cases.append(Case(f"{of}-{end}", replace(placed, **after), name in ("plain", "odd"), turn))
            cases.append(Case(f"{of}-dgrad-{end}", replace(placed, op="dgrad", bias=False), name == "strides", turn))
            cases.append(Case(f"{of}-wgrad-{end}", replace(placed, op="wgrad", bias=False), name == "odd", turn))
            if name in ("plain", "strides", "groups", "depthwise", "tensor", "tensor-strides"):
                for op in ("fprop", "dgrad", "wgrad"):
                    for dtype in ("float16", "bfloat16"):
                        cases.append(
                            Case(
                                f"{of}-{op}-{dtype}-{end}", replace(placed, op=op, dtype=dtype, bias=False), False, turn
                            )
                        )
    for name in ("images-strided", "strides"):  # slices that no product reaches, and a dozen kernels
        shape, rest = _LAYERS[name]
        transposed = ConvProblem(*shape, **rest, op="dgrad", bias=True)
        cases.append(Case(f"volume-transposed-{name}-nchw", transposed))
        cases.append(Case(f"volume-transposed-{name}-nhwc", replace(transposed, layout="NHWC")))
    added = replace(transposed, bias=False, accumulate=True)
    cases += [Case(f"volume-added-{op}-nchw", replace(added, op=op)) for op in ("fprop", "dgrad", "wgrad")]
    return cases


VOLUME_CASES = _cases()


def _transform_cases() -> list[Case]:
    """As `tests.cases.TRANSFORM_CASES`: rows of whole tiles, of narrower ones and a rest, in slices of volumes."""
    layers = Layers("transform-volume-")
    add, padded, far = layers.add, dict[str, Any](padding=(1, 1, 1, 1)), dict[str, Any](stride_d=2, padding_d=(1, 2))
    #                     n  c   h  w   k   r  s
    add("width-3", 2, 12, 5, 15, 36, 3, 3, thorough=USUAL, d=4, t=3, padding_d=(2, 0), **padded, **ALL_OF)
    add("far", 2, 13, 6, 14, 35, 2, 4, d=7, t=2, dilation_d=3, dilation=(2, 1), bias=True, **far)
    add("pieces-8", 1, 9, 4, 17, 37, 2, 8, d=5, t=3, padding=(1, 0, 4, 3), **far)
    add("width-9", 1, 5, 3, 21, 9, 2, 9, d=3, t=2, precision="relaxed", padding=(1, 1, 4, 4), padding_d=(0, 1))
    add("tiles-relaxed", 1, 7, 5, 10, 37, 3, 3, d=3, t=2, precision="relaxed", padding_d=(1, 0), dilation_d=2, **padded)
    gradient = dict[str, Any](op="dgrad", padding_d=(2, 0))
    add("gradient-width-3", 1, 36, 5, 15, 12, 3, 3, d=4, t=3, **padded, **gradient)
    add("gradient-pieces-9", 1, 9, 4, 17, 20, 1, 9, d=5, t=3, dilation_d=2, padding=(0, 0, 4, 4), **gradient)
    add("gradient-groups", 2, 10, 4, 9, 24, 3, 4, d=3, t=2, groups=2, padding=(1, 1, 2, 1), **gradient)
    return layers.cases


TRANSFORM_VOLUMES = _transform_cases()
