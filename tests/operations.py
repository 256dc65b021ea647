"""The public functions that compute a layer or a gradient of it, in one table: how each is called, and what is right.

Arrays of tests have four axes and lie as the problem's layout says; signals are images of one row, whose axis is left
out where a function is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import leanconv
from leanconv import ConvProblem
from leanconv.options import Layout
from tests.oracles import oracle_conv

#: Float32 sums of this size differ from float64 by less.
TOLERANCE = 2e-6
LAYOUTS: tuple[Layout, ...] = ("NCHW", "NHWC", "CHWN")
#: the axes N, C, H, W of an array that lies as a layout, and the other way round
TO_NCHW = {"NCHW": (0, 1, 2, 3), "NHWC": (0, 3, 1, 2), "CHWN": (3, 0, 1, 2)}
FROM_NCHW = {"NCHW": (0, 1, 2, 3), "NHWC": (0, 2, 3, 1), "CHWN": (1, 2, 3, 0)}

Arrays = Sequence[np.ndarray | None]
#: arguments as a caller writes them, and the problem they mean
Calls = tuple[tuple[dict[str, Any], ConvProblem], ...]


def draw(rng: np.random.Generator, problem: ConvProblem) -> list[np.ndarray | None]:
    """What the problem reads, as it lies: two arrays, and of a layer the bias or None."""
    arrays: list[np.ndarray | None] = [
        rng.standard_normal(each.shape).astype(each.dtype) for each in problem.operands[:-1]
    ]
    return [*arrays, None] if problem.op == "fprop" and not problem.bias else arrays


@dataclass(frozen=True)
class Operation:
    """A public function, and how tests call it."""

    name: str
    calls: Calls

    @property
    def function(self) -> Any:
        return getattr(leanconv, self.name)

    @property
    def signals(self) -> bool:
        return self.name.startswith("conv1d")

    @property
    def base(self) -> ConvProblem:
        return self.calls[0][1]

    def __str__(self) -> str:
        return self.name

    def word(self, layout: str | None) -> Any:
        """What a caller calls the layout."""
        return layout and layout.replace("H", "" if self.signals else "H")

    def shape(self, problem: ConvProblem, tensors: bool = False) -> tuple[int, ...]:
        """The result's shape as it lies, or as PyTorch shows it."""
        found = problem.operands[-1].shape
        layout: Layout = "NCHW" if tensors else problem.layout
        if tensors:
            found = tuple(found[axis] for axis in TO_NCHW[problem.layout])
        row = layout.index("H")
        return found[:row] + found[row + 1 :] if self.signals else found

    def lying(self, layout: Layout, arrays: Arrays) -> list[Any]:
        """The arrays as they lie, without the axis of rows where they are signals."""
        row = layout.index("H")
        return [a.squeeze(row) if self.signals and a is not None and a.ndim == 4 else a for a in arrays]

    def tensors(self, layout: Layout, arrays: Arrays) -> list[Any]:
        """The arrays as PyTorch shows them: N, C, H, W."""
        import torch

        found = [None if array is None else torch.from_numpy(array) for array in arrays]
        found = [each if each is None or each.dim() != 4 else each.permute(TO_NCHW[layout]) for each in found]
        return [each.squeeze(2) if self.signals and each is not None and each.dim() == 4 else each for each in found]

    def in_memory(self, layout: Layout, tensor: Any) -> Any:
        """The view of a tensor that shows it as it lies, with four axes; it must have no gaps."""
        seen = (tensor.unsqueeze(2) if self.signals else tensor).permute(FROM_NCHW[layout])
        assert seen.is_contiguous(), f"strides {tensor.stride()} are not those of {layout}"
        return seen.detach().cpu().numpy()

    def __call__(self, problem: ConvProblem, given: Sequence[Any], layout: str | None, **arguments: Any) -> Any:
        """What the function returns for arrays of any library; tensors show their axes as PyTorch does."""
        shape = () if problem.op == "fprop" else (self.shape(problem, tensors=hasattr(given[0], "permute")),)
        return self.function(*given, *shape, layout=self.word(layout), **arguments)


def by_pytorch(problem: ConvProblem, arrays: Arrays) -> np.ndarray:
    """The result in float64 and NCHW: PyTorch's of a layer, and gradients by differentiation."""
    import torch

    first, second, bias = (None if a is None else torch.from_numpy(a).double() for a in (*arrays, None)[:3])
    assert first is not None and second is not None
    leaf = None
    if problem.op != "fprop":
        leaf = torch.zeros(problem.operands[-1].shape, dtype=torch.float64, requires_grad=True)
    x, w = leaf if problem.op == "dgrad" else first, leaf if problem.op == "wgrad" else second
    top, bottom, left, right = problem.padding
    padded = torch.nn.functional.pad(x, (left, right, top, bottom))
    y = torch.nn.functional.conv2d(padded, w, bias, problem.stride, 0, problem.dilation, problem.groups)
    if leaf is None:
        return np.asarray((y.relu() if problem.activation else y).numpy())
    y.backward(first if problem.op == "dgrad" else second)
    assert leaf.grad is not None
    return np.asarray(leaf.grad.numpy())


def expect(problem: ConvProblem, arrays: Arrays) -> np.ndarray:
    """The result by the definition, in float64, as it lies."""
    first, second, bias = (*arrays, None)[:3]
    assert first is not None and second is not None
    return oracle_conv(problem, first, second, bias)


BASE = ConvProblem(n=2, c=4, h=9, w=7, k=6, r=3, s=2)
FORWARD: Calls = (
    ({}, BASE),
    ({"stride": 2, "padding": 1}, replace(BASE, stride=(2, 2), padding=(1, 1, 1, 1))),
    ({"stride": (1, 3), "padding": (2, 0)}, replace(BASE, stride=(1, 3), padding=(2, 2, 0, 0))),
    ({"padding": (1, 2, 0, 3)}, replace(BASE, padding=(1, 2, 0, 3))),
    ({"padding": [1, 2], "dilation": [2, 1]}, replace(BASE, padding=(1, 1, 2, 2), dilation=(2, 1))),
    ({"padding": "same"}, replace(BASE, padding=(1, 1, 0, 1))),
    ({"padding": "same", "dilation": (2, 3)}, replace(BASE, padding=(2, 2, 1, 2), dilation=(2, 3))),
    ({"padding": "valid", "groups": 2}, replace(BASE, groups=2)),
    ({"padding": np.int64(1), "groups": 2}, replace(BASE, groups=2, padding=(1, 1, 1, 1))),
    ({"activation": "relu"}, replace(BASE, bias=True, activation="relu")),
    ({"precision": "ieee"}, replace(BASE, bias=True, precision="ieee")),
)


def _gradients(op: Any) -> Calls:
    base = replace(BASE, w=8, op=op)
    return (
        ({}, base),
        ({"padding": 1}, replace(base, padding=(1, 1, 1, 1))),
        ({"padding": (0, 3, 2, 1)}, replace(base, padding=(0, 3, 2, 1))),
        ({"padding": "same", "dilation": (2, 1)}, replace(base, padding=(2, 2, 0, 1), dilation=(2, 1))),
        ({"padding": 4}, replace(base, padding=(4, 4, 4, 4))),
        ({"stride": 2, "padding": 1}, replace(base, stride=(2, 2), padding=(1, 1, 1, 1))),
        # rows and columns that no window reaches
        ({"stride": (4, 3)}, replace(base, stride=(4, 3))),
        ({"stride": (1, 2), "dilation": [2, 3]}, replace(base, stride=(1, 2), dilation=(2, 3))),
        ({"groups": 2, "padding": (1, 0)}, replace(base, groups=2, padding=(1, 1, 0, 0))),
        ({"groups": np.int64(2), "stride": 3}, replace(base, groups=2, stride=(3, 3))),
        ({"groups": 4, "padding": 1}, replace(base, k=8, groups=4, padding=(1, 1, 1, 1))),
    )


SIGNAL = ConvProblem(n=2, c=4, h=1, w=23, k=6, r=1, s=5)
SIGNALS: Calls = (
    ({}, SIGNAL),
    ({"stride": 3, "padding": 2}, replace(SIGNAL, stride=(1, 3), padding=(0, 0, 2, 2))),
    (
        {"stride": (2,), "padding": (1,), "dilation": [3]},
        replace(SIGNAL, stride=(1, 2), padding=(0, 0, 1, 1), dilation=(1, 3)),
    ),
    ({"padding": (4, 0)}, replace(SIGNAL, padding=(0, 0, 4, 0))),
    ({"padding": "same", "dilation": 3}, replace(SIGNAL, padding=(0, 0, 6, 6), dilation=(1, 3))),
    ({"padding": "valid", "groups": 2}, replace(SIGNAL, groups=2)),
    (
        {"activation": "relu", "padding": np.int64(1)},
        replace(SIGNAL, padding=(0, 0, 1, 1), bias=True, activation="relu"),
    ),
)


def _signals(op: Any) -> Calls:
    base = replace(SIGNAL, op=op)
    return (
        ({}, base),
        ({"stride": 2, "padding": (1, 0), "groups": 2}, replace(base, stride=(1, 2), padding=(0, 0, 1, 0), groups=2)),
    )


OPERATIONS = {
    each.name: each
    for each in (
        Operation("conv2d", FORWARD),
        Operation("conv2d_input", _gradients("dgrad")),
        Operation("conv2d_weight", _gradients("wgrad")),
        Operation("conv1d", SIGNALS),
        Operation("conv1d_input", _signals("dgrad")),
        Operation("conv1d_weight", _signals("wgrad")),
    )
}
CONV2D = OPERATIONS["conv2d"]
in_memory = CONV2D.in_memory


def as_tensors(layout: Layout, *arrays: np.ndarray | None) -> list[Any]:
    """Arrays of images that lie as ``layout``, as PyTorch shows them."""
    return CONV2D.tensors(layout, arrays)


def conv_arrays(rng: np.random.Generator, problem: ConvProblem) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """x, w and bias of a layer, or what a gradient reads, and None."""
    first, second, bias = (*draw(rng, problem), None)[:3]
    assert first is not None and second is not None
    return first, second, bias


def each_call(*names: str) -> Any:
    """The calls of these operations, or of all, as parameters of a test."""
    found = [OPERATIONS[name] for name in names or OPERATIONS]
    return pytest.mark.parametrize(
        "operation, arguments, problem",
        [pytest.param(each, *call, id=f"{each}-{call[0]}") for each in found for call in each.calls],
    )


each_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=str)
