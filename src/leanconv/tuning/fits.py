"""Cost models fitted to a GPU: by how much the times of an algorithm differ there from what it predicts.

``fits/<gpu>.json`` has a factor for each algorithm, layout and operation; `python -m report refit` makes it from the
tables of tuned problems. Without one a prediction stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from leanconv.plan import Target
from leanconv.problem import Problem
from leanconv.tuning.tables import file_name

FITS = Path(__file__).resolve().parent / "fits"


def group(algorithm: str, problem: Problem) -> str:
    """What shares a factor, such as ``tensor_gemm NHWC fprop``; empty for image filters, which predict no times."""
    if problem.kind == "filter2d":
        return ""
    words = [algorithm, problem.layout, problem.op]
    words += [problem.dtype] if problem.dtype != "float32" else []
    words += ["tf32"] if problem.precision == "tf32" else []
    return " ".join(words)


def factor(algorithm: str, problem: Problem, target: Target) -> float:
    """Times measured on ``target`` over those predicted, in the geometric mean; 1 where nobody has measured."""
    return factors(target.model).get(group(algorithm, problem), 1.0) if target.model else 1.0


@cache
def factors(model: str) -> Mapping[str, float]:
    """The factors of a GPU model by group; none where there is no such file, or a damaged one."""
    found: dict[str, float] = {}
    with suppress(OSError, ValueError, TypeError, AttributeError):
        record = json.loads((FITS / file_name(model)).read_text(encoding="utf-8"))
        found = {str(name): float(value) for name, value in record["factors"].items()}
    return found
