"""Cost models fitted to a GPU: by how much the times of an algorithm differ there from what it predicts.

``perf/<gpu>/fits.json`` has three numbers for each algorithm, layout and operation (`Fit`); `python -m report refit`
makes it from timed candidates. Without them a prediction stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from leanconv.kernels.contract import Algorithm
from leanconv.perf import tables
from leanconv.plan import Target
from leanconv.problem import Problem

#: What is fitted to algorithms of which too few times are known, and whose predictions leave out a launch.
OTHERS = "others"


class Fit(NamedTuple):
    """``factor`` times the prediction, ``start`` clock cycles of a call apart from its work, and ``preparing`` times
    as long as memory takes for the bytes of prepared filters."""

    factor: float = 1.0
    start: float = 0.0
    preparing: float = 0.0

    def with_prepared(self, cycles: float) -> Fitted:
        """It for one problem, whose prepared filters take memory so many ``cycles``."""
        return Fitted(self.factor, self.start + self.preparing * cycles, measured=True)


class Fitted(NamedTuple):
    """What a `Fit` is for one problem: ``factor`` times the prediction, and ``beside`` clock cycles. Where it was
    ``measured`` that is the time of a whole call, its launches included."""

    factor: float = 1.0
    beside: float = 0.0
    measured: bool = False

    def cycles(self, predicted: float) -> float:
        """The time that is expected where ``predicted`` clock cycles are predicted."""
        return self.factor * predicted + self.beside


def group(algorithm: Algorithm, problem: Problem, op: str = "") -> str:
    """What shares a fit, such as ``tensor_gemm NHWC fprop``; empty for image filters, which predict no times.

    ``op`` takes the place of the problem's operation.
    """
    if problem.kind == "filter2d":
        return ""
    words = [algorithm.stem, problem.layout, op or problem.op]
    words += [problem.dtype] if problem.dtype != "float32" else []
    # the FP32 cores do the same whatever precision is asked for
    words += ["tf32"] if problem.precision == "tf32" and algorithm.arithmetic(problem) != "fp32" else []
    return " ".join(words)


def leaves_out_launch(algorithm: Algorithm, problem: Problem) -> bool:
    """Whether a prediction leaves out the launch of a call's last kernel: those of FP32 cores do, but for gradients of
    filters."""
    layer = problem.kind == "conv2d" and problem.op != "wgrad" and problem.dtype == "float32"
    return layer and algorithm.arithmetic(problem) == "fp32"


def preparing_cycles(algorithm: Algorithm, problem: Problem, target: Target) -> float:
    """Clock cycles that memory takes for the bytes of prepared filters."""
    return algorithm.prepared_bytes(problem) / target.bytes_per_cycle


def fitted(algorithm: Algorithm, problem: Problem, target: Target, *, runs: bool = True) -> Fitted:
    """What makes of a prediction what was measured on ``target``; nothing is changed where nobody has measured.

    Where no gradients of the input were timed it is what holds for the forward pass: the kernels are the same. Where
    none of an algorithm's times are known, its calls begin as those of others do. It need not be one that ``runs`` the
    problem: without that preparing does not count.
    """
    fits = known(target.model) if target.model else {}
    fit = fits.get(group(algorithm, problem)) if fits else None
    if fit is None and fits and problem.kind == "conv2d" and problem.op == "dgrad":
        fit = fits.get(group(algorithm, problem, "fprop"))
    if fit is None and leaves_out_launch(algorithm, problem):
        fit = fits.get(OTHERS)
    if fit is None:
        return Fitted()
    return fit.with_prepared(preparing_cycles(algorithm, problem, target) if runs and fit.preparing else 0.0)


def file_of(model: str) -> Path:
    """Where the fits of a GPU model are."""
    return tables.SHIPPED / tables.slug(model) / "fits.json"


@cache
def known(model: str) -> Mapping[str, Fit]:
    """The fits of a GPU model by group; none where there is no such file, or a damaged one."""
    found: dict[str, Fit] = {}
    with suppress(OSError, ValueError, TypeError, AttributeError):
        record = json.loads(file_of(model).read_text(encoding="utf-8"))
        found = {
            str(name): Fit(*(float(each.get(field, default)) for field, default in Fit._field_defaults.items()))
            for name, each in record["fits"].items()
        }
    return found
