"""The suites of problems."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, get_args

from leanconv.dtypes import LAYERS
from leanconv.options import LAYOUTS, PRECISIONS, Op
from leanconv.problem import Problem
from leanconv.words import dense_filter, format_problem, parse_problem, with_batch

__all__ = [
    "LAYOUTS", "SUITE_ALGORITHMS", "Case", "dense_filter", "format_problem", "load_suite", "parse_problem",
    "suite_layout", "suite_names", "with_batch",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A problem and the name it has in tables."""

    name: str
    problem: Problem


#: leanconv's algorithms, as patterns of names, that a suite measures by default: what it is about, and what that has to
#: beat. Kernels that an idea is compared with (one thread, one output) take far longer.
SUITE_ALGORITHMS = {
    "winograd1d": ("winograd1d", "implicit_gemm", "tensor_*", "native_*"),
    "wide-filters": ("winograd1d", "implicit_gemm", "tensor_*", "native_*"),
    "opencnn": ("winograd*", "implicit_gemm", "implicit_gemm_weight*", "tensor_*", "native_*"),
    "depthwise": ("depthwise*", "direct"),
    "depthwise-wide": ("depthwise*",),
    "single-channel": ("single_channel", "depthwise", "direct"),
    "general-direct": ("direct_tiled", "im2win_fused", "implicit_gemm", "winograd*"),
    "first-layers": (
        "direct_tiled",
        "im2win_fused",
        "implicit_gemm",
        "tensor_gemm_sync_col2im",
        "native_*_rows",
        "native_*_sync",
    ),
    "grouped": ("implicit_gemm*", "direct_tiled", "tensor_gemm*", "native_*"),
}
#: What a suite's own layout, precision, element type and operation may be replaced by.
_SETTINGS: dict[str, tuple[str, ...]] = {
    "layout": LAYOUTS, "precision": PRECISIONS, "dtype": LAYERS, "op": get_args(Op),
}  # fmt: skip


@cache
def _shipped() -> dict[str, Any]:
    suites: dict[str, Any] = {}
    for name in ("suites.json", "filter_suites.json", "volume_suites.json"):
        suites |= json.loads(resources.files("leanconv.bench").joinpath(name).read_text(encoding="utf-8"))
    return suites


def suite_names() -> tuple[str, ...]:
    return tuple(_shipped())


def suite_layout(name: str) -> str | None:
    """The layout a suite is stated in, None for a suite of image filters."""
    return getattr(load_suite(name)[0].problem, "layout", None)


def load_suite(
    name: str, layout: str | None = None, precision: str | None = None, dtype: str | None = None, op: str | None = None
) -> tuple[Case, ...]:
    """The cases of a suite, in its own layout, precision, element type and operation, or in those given.

    Raises ValueError for an unknown suite, layout, precision, type or operation, and for one of them where a suite has
    no layers.
    """
    if name not in _shipped():
        raise ValueError(f"suite={name!r} is not known; choose one of {', '.join(suite_names())}")
    cases = tuple(Case(each, parse_problem(words)) for each, words in _shipped()[name]["problems"].items())
    settings: dict[str, Any] = {"layout": layout, "precision": precision, "dtype": dtype, "op": op}
    settings = {setting: given for setting, given in settings.items() if given is not None}
    for setting, given in settings.items():
        if cases[0].problem.kind == "filter2d":
            raise ValueError(f"{setting}={given!r} does not apply: suite {name!r} filters single-channel images")
        if given not in _SETTINGS[setting]:
            raise ValueError(f"{setting}={given!r} is not known; choose one of {', '.join(_SETTINGS[setting])}")
    return tuple(replace(case, problem=replace(case.problem, **settings)) for case in cases)
