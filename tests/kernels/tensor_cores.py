"""Kernels on tensor cores as their tests run them: each with a layer, a configuration and a GPU; and its error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanconv.cpu import oracle
from leanconv.kernels.contract import GpuAlgorithm
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem
from leanconv.runtime.compile import INCLUDE
from tests import cases_tensor, cases_weight, emulator, selection
from tests.cases import TARGETS
from tests.cases_16bit import NATIVE_CASES
from tests.cases_tensor import PAIR_CASES, TENSOR_CASES, TF32_CASES, WIDE
from tests.cases_weight import IMAGE_CASES, IMAGES, WEIGHT_CASES
from tests.variants import NAMED, VARIANTS

HOPPER, AMPERE = TARGETS[:2]
#: Where the axes of NHWC are in each layout.
AXES = {"NHWC": (0, 1, 2, 3), "NCHW": (0, 3, 1, 2), "CHWN": (3, 1, 2, 0)}


def in_layout(layout: str, array: np.ndarray) -> np.ndarray:
    """An array of NHWC in another layout."""
    return np.ascontiguousarray(array.transpose(AXES[layout]))


@dataclass(frozen=True)
class Way:
    """A kernel on a layer, with the first of its configurations that has ``tuning``, of which ``forced`` is changed."""

    stem: str
    problem: ConvProblem
    tuning: Mapping[str, Any] = field(default_factory=dict)
    target: Target = HOPPER
    forced: Mapping[str, Any] = field(default_factory=dict)

    def on(self, **changes: Any) -> Way:
        """The same kernel on a layer that differs."""
        return replace(self, problem=replace(self.problem, **changes))

    def tuned(self, **tuning: Any) -> Way:
        """The same kernel in another configuration."""
        return replace(self, tuning={**self.tuning, **tuning})

    @property
    def last(self) -> ConvProblem:
        """The layer in NHWC: tests draw and compare all arrays in it."""
        return replace(self.problem, layout="NHWC")

    @property
    def plan(self) -> Plan:
        algorithm = NAMED[self.stem]
        configs = algorithm.configs(self.problem, self.target)
        config = next(c for c in configs if all(getattr(c, name) == value for name, value in self.tuning.items()))
        return algorithm.plan(self.problem, replace(config, **self.forced), self.target)

    def played(self, x: np.ndarray, w: np.ndarray, kernels: Path = INCLUDE) -> np.ndarray:
        """What the kernel computes of these operands, which lie in NHWC, as does the result."""
        first, second, *_, written = self.problem.operands
        inputs = {operand.role: in_layout(self.problem.layout, a) for operand, a in ((first, x), (second, w))}
        result = np.full(written.shape, np.nan, written.dtype)
        values = {**inputs, "bias": None, written.role: result}
        emulator.run_plan(self.plan, values, kernels=kernels, orders=("ascending",))
        return result.transpose(np.argsort(AXES[self.problem.layout]))

    def drawn(self, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """Operands in NHWC, of the data that tests of its direction know by this name."""
        drawn = cases_weight.drawn if self.problem.op == "wgrad" else cases_tensor.drawn
        x, w = drawn(kind, self.last)
        return x.astype(self.problem.dtype), w.astype(self.problem.dtype)

    def lost(self, kind: str, kernels: Path = INCLUDE) -> tuple[float, float]:
        """The error on such data in units of that of a sequential float32 sum: of all results, and of the filter (or
        the channel) where it is largest."""
        x, w = self.drawn(kind)
        y = self.played(x, w, kernels)
        reference, plain = _expected(self.last, kind)
        units = oracle.relative_error(plain, reference)
        return oracle.relative_error(y, reference) / units, _in_units(y, reference, plain, self.problem.op)

    def lost_by_one_product(self, kind: str, kernels: Path = INCLUDE) -> float:
        """The relative error at precision tf32."""
        way = self.on(precision="tf32")
        x, w = way.drawn(kind)
        return float(oracle.relative_error(way.played(x, w, kernels), oracle.conv2d(way.last, x, w)))


@cache
def _expected(problem: ConvProblem, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """What is right on such data, and what a sequential float32 sum makes of it."""
    x, w = Way("", problem).drawn(kind)
    return oracle.conv2d(problem, x, w), oracle.sequential_float32(problem, x, w)


def _in_units(y: np.ndarray, reference: np.ndarray, plain: np.ndarray, op: str) -> float:
    """The error of ``y`` in units of that of ``plain``, of the filter where it is largest; of a filter's gradient, of
    the filter or the channel."""
    found = []
    for axes in ((1, 2, 3), (0, 1, 2)) if op == "wgrad" else ((0, 1, 2),):
        error, yardstick = (np.sqrt(((each - reference) ** 2).sum(axes)) for each in (y, plain))
        assert not error[yardstick == 0].any()
        found.append((error[yardstick > 0] / yardstick[yardstick > 0]).max())
    return float(np.max(found))  # NaN where any is


def in_sequential_sums(y: np.ndarray, x: np.ndarray, w: np.ndarray, problem: ConvProblem) -> float:
    """The error of ``y``, in NHWC, in units of that of a sequential float32 sum, where it is largest."""
    return _in_units(y, oracle.conv2d(problem, x, w), oracle.sequential_float32(problem, x, w), problem.op)


WHOLE = {"filters": 64, "split": 1}
ONE_TAP = {"warpgroups": 2, "n_tiles": 1, "split": 1, "taps": 1}
#: Rows of two segments and a column.
SEVEN = replace(cases_tensor.LAYER, s=7, padding=(1, 1, 3, 3))

GEMM = Way("tensor_gemm", cases_tensor.LAYER, WHOLE)
SYNC = Way("tensor_gemm_sync", cases_tensor.LAYER, target=AMPERE)
WINOGRAD = Way("tensor_winograd", cases_tensor.LAYER, WHOLE)
WEIGHT = Way("tensor_weight", cases_weight.LAYER, ONE_TAP)
#: Those that compute in float32's accuracy.
WAYS = {
    "tensor_gemm": GEMM,
    "tensor_gemm_sync": SYNC,
    "tensor_gemm_sync-nchw": SYNC.on(layout="NCHW"),
    "tensor_winograd": WINOGRAD,
    "tensor_winograd-wide": replace(WINOGRAD, problem=WIDE),
    "tensor_winograd-seven": replace(WINOGRAD, problem=SEVEN),
    "tensor_winograd-nchw": WINOGRAD.on(layout="NCHW"),
    "tensor_winograd-seven-nchw": replace(WINOGRAD, problem=replace(SEVEN, layout="NCHW")),
    "tensor_weight": WEIGHT,
    "tensor_weight-taps": WEIGHT.tuned(taps=3),
    "tensor_weight-nchw": WEIGHT.on(layout="NCHW"),
    "tensor_weight_images": Way("tensor_weight_images", IMAGES),
}

BIG = ConvProblem(32, 256, 56, 56, 256, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", bias=True, activation="relu")
#: Of each kernel a layer that it accepts: large ones of those that multiply elements as they are.
LAYERS = {name: way.problem for name, way in WAYS.items() if name == way.stem} | {
    "native_gemm_16bit": replace(BIG, dtype="float16"),
    "native_gemm_window": replace(BIG, dtype="float16"),
    "native_gemm_nchw": replace(BIG, dtype="float16", layout="NCHW"),
    "native_gemm_tf32": replace(BIG, precision="tf32"),
    "native_gemm_window_tf32": replace(BIG, precision="tf32"),
    "native_weight_nhwc": replace(BIG, dtype="float16", op="wgrad", bias=False, activation=None),
    "native_weight_nchw": replace(BIG, dtype="float16", layout="NCHW", op="wgrad", bias=False, activation=None),
    "native_weight_kmajor": replace(BIG, dtype="float16", layout="NCHW", op="wgrad", bias=False, activation=None),
}
#: What a gradient of the input leaves out of a layer.
GRADIENT: dict[str, Any] = {"op": "dgrad", "bias": False, "activation": None}
LAYERS |= {
    "native_gemm_pointwise": replace(BIG, r=1, s=1, padding=(0, 0, 0, 0), dtype="float16", layout="NCHW"),
    "native_gemm_planes": replace(BIG, h=7, w=7, r=1, s=1, padding=(0, 0, 0, 0), dtype="float16", layout="NCHW"),
    "native_gemm_groups": replace(BIG, groups=BIG.c // 8, dtype="float16"),
    "native_weight_groups": replace(BIG, groups=BIG.c // 8, dtype="float16", **GRADIENT | {"op": "wgrad"}),
    "native_gemm_rows": replace(BIG, c=3, dtype="float16"),
    "native_gemm_skinny": replace(BIG, c=24, k=72, r=1, s=1, padding=(0, 0, 0, 0), dtype="float16"),
    "native_gemm_sync": replace(BIG, dtype="float16"),
    "native_weight_sync": replace(BIG, dtype="float16", **GRADIENT | {"op": "wgrad"}),
    "native_weight_rows": replace(BIG, c=3, dtype="float16", **GRADIENT | {"op": "wgrad"}),
    "tensor_gemm_sync_col2im": replace(BIG, c=3, **GRADIENT),
}
ONE_BY_ONE: dict[str, Any] = {"r": 1, "s": 1, "padding": (0, 0, 0, 0)}

#: Every case of kernels on tensor cores, and every such kernel.
CASES = (*TENSOR_CASES, *PAIR_CASES, *WEIGHT_CASES, *IMAGE_CASES, *TF32_CASES, *NATIVE_CASES)
KERNELS = [algorithm for algorithm in VARIANTS if algorithm.family in selection.TENSOR_CORES]


def each_kernel(argument: str = "algorithm") -> Any:
    return pytest.mark.parametrize(argument, KERNELS, ids=lambda algorithm: algorithm.stem)


def layer_of(algorithm: GpuAlgorithm) -> ConvProblem:
    return LAYERS[algorithm.stem.removesuffix("_split_k")]
