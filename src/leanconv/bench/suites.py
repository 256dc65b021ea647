"""The suites of problems."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, get_args

from leanconv.dtypes import LAYERS
from leanconv.options import LAYOUTS, PRECISIONS, Op, Precision
from leanconv.problem import ConvProblem, FilterProblem, Problem
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
#: beat. Kernels that an idea is compared with (one thread, one output) take 20 times their time.
SUITE_ALGORITHMS = {
    "winograd1d": ("winograd1d", "implicit_gemm", "tensor_*", "native_*"),
    "wide-filters": ("winograd1d", "implicit_gemm", "tensor_*", "native_*"),
    "opencnn": ("winograd*", "implicit_gemm", "implicit_gemm_weight*", "tensor_*", "native_*"),
    "depthwise": ("depthwise*", "direct"),
    "depthwise-wide": ("depthwise*",),
    "single-channel": ("single_channel", "depthwise", "direct"),
    "general-direct": ("direct_tiled", "im2win_fused", "implicit_gemm", "winograd*"),
    "first-layers": ("direct_tiled", "im2win_fused", "implicit_gemm"),
}
#: Transforms with this many states and more round too much for precision fp32: such problems run at precision relaxed.
_RELAXED_STATES = 16


@cache
def _shipped() -> dict[str, Any]:
    text = resources.files("leanconv.bench").joinpath("suites.json").read_text(encoding="utf-8")
    suites: dict[str, Any] = json.loads(text)
    return suites


def suite_names() -> tuple[str, ...]:
    """Names of the suites that ship with the package."""
    return tuple(_shipped())


def suite_layout(name: str) -> str | None:
    """The layout a suite is stated in, None for a suite of image filters."""
    layout: str | None = _shipped()[name].get("layout")
    return layout


def load_suite(
    name: str,
    layout: str | None = None,
    precision: str | None = None,
    dtype: str | None = None,
    op: str | None = None,
) -> tuple[Case, ...]:
    """The cases of a suite, in its own layout, precision, element type and operation, or in those given.

    Raises ValueError for an unknown suite, layout, precision, type or operation, and for one of them where a suite has
    no layers.
    """
    if name not in _shipped():
        raise ValueError(f"suite={name!r} is not known; choose one of {', '.join(suite_names())}")
    suite = _shipped()[name]
    if suite["op"] == "filter2d":
        for setting, given in (("layout", layout), ("precision", precision), ("dtype", dtype), ("op", op)):
            if given is not None:
                raise ValueError(f"{setting}={given!r} does not apply: suite {name!r} filters single-channel images")
        return tuple(Case(entry["name"], _filter_problem(entry, suite)) for entry in suite["problems"])
    chosen = layout or suite["layout"]
    settings: tuple[tuple[str, str, tuple[str, ...]], ...] = (
        ("layout", chosen, LAYOUTS),
        ("precision", precision or "fp32", PRECISIONS),
        ("dtype", dtype or suite["dtype"], LAYERS),
        ("op", op or suite["op"], get_args(Op)),
    )
    for setting, value, known in settings:
        if value not in known:
            raise ValueError(f"{setting}={value!r} is not known; choose one of {', '.join(known)}")
    suite = {**suite, "dtype": dtype or suite["dtype"], "op": op or suite["op"]}
    return tuple(Case(entry["name"], _conv_problem(entry, suite, chosen, precision)) for entry in suite["problems"])


def _conv_problem(entry: dict[str, Any], suite: dict[str, Any], layout: Any, precision: Any) -> ConvProblem:
    padding = entry["padding"]
    states = entry.get("gamma", [0])[0]
    own: Precision = "relaxed" if states >= _RELAXED_STATES else "fp32"
    return ConvProblem(
        **{letter: entry[letter] for letter in "nchwkrs"},
        stride=(entry["stride"], entry["stride"]),
        # rows and columns, or all four sides
        padding=(padding[0], padding[0], padding[1], padding[1]) if len(padding) == 2 else tuple(padding),
        groups=entry.get("groups", 1),
        dtype=suite["dtype"],
        layout=layout,
        op=suite["op"],
        precision=precision or own,
    )


def _filter_problem(entry: dict[str, Any], suite: dict[str, Any]) -> FilterProblem:
    sizes = {key: entry[key] for key in ("h", "w", "kh", "kw")}
    return dense_filter(batch=1, border=suite["border"], dtype=suite["dtype"], **sizes)
