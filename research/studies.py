"""Which kernels the ablation takes apart, what is taken away from them, and what they are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from leanconv.options import Layout
from leanconv.plan import Launch

#: Where the variants of kernels lie that calls do not have.
KERNELS = Path(__file__).resolve().with_name("kernels")
#: Variants: a kernel that the idea starts from, and a whole one.
BASELINE, FULL = "baseline", "full"


def compiled_from(launch: Launch, header: str, suffix: str = "") -> Launch:
    """The launch with its kernel from a file of research/kernels, where its name may have a ``suffix``."""
    return replace(launch, header=str(KERNELS / header), function=launch.function + suffix)


@dataclass(frozen=True)
class Study:
    """Which algorithms are taken apart, what is taken away from them, and what they are compared with.

    ``switches`` holds for each variant the fields of the configuration that it sets, and to what, or the file in
    research/kernels that its kernel is compiled from, with the configuration and the shared memory of the whole one.
    With ``alone`` the fields are all that differs; otherwise others follow to the best configuration that the algorithm
    has with them. ``layouts`` are those that a variant differs in, for variants that do not in all.
    """

    algorithms: tuple[str, ...]
    baselines: tuple[str, ...]
    switches: Mapping[str, dict[str, Any] | str] = field(hash=False)
    alone: bool = False
    layouts: Mapping[str, tuple[Layout, ...]] = field(default_factory=dict, hash=False)

    @property
    def variants(self) -> tuple[str, ...]:
        """Every variant of an ablated algorithm, in the order of tables and figures."""
        return (FULL, *self.switches)


#: By the suite that they are run on; the first is for problems of any other suite.
STUDIES = {
    "im2win": Study(
        ("im2win_fused", "im2win"),
        ("direct", "im2win_basic"),
        {
            "no prefetch": "im2win_no_prefetch.cuh",
            "no vector loads": "im2win_no_vector_loads.cuh",
            "no micro-kernel": "im2win_no_micro_kernel.cuh",
        },
    ),
    # One output row to a block: input rows are transformed once for each filter row, as in the paper. Runs of two
    # tiles are its variant ruse. A variant that is what a call has anyway is left out.
    "winograd1d": Study(
        ("winograd1d",),
        ("implicit_gemm",),
        {
            "one row": {"rows": 1},
            "runs of 2": {"run": 2},
            "plain sums": {"promoted": False},
            "no producers": {"producers": 0},
            "segments": {"segments": True},
            "whole rows": {"segments": False},
        },
        layouts={"runs of 2": ("NCHW", "NHWC")},
    ),
    # The layouts of the output stage, which its paper compares; in NCHW a call has one of the first two anyway, and in
    # the others outputs lie side by side as they are. Runs are of the raw pixels; neighbouring tiles of CHWN are of
    # different images and have none in common. A list of configurations that are good as they are would not hold these.
    "opencnn": Study(
        ("winograd2d",),
        ("implicit_gemm",),
        {
            "staged": {"staged": True},
            "direct stores": {"staged": False},
            "64-bit exchange": "winograd2d_narrow_exchange.cuh",
            "unpadded exchange": "winograd2d_unpadded_exchange.cuh",
            "runs of 4": {"run": 4},
        },
        alone=True,
        layouts={"staged": ("NCHW",), "direct stores": ("NCHW",), "runs of 4": ("NCHW", "NHWC")},
    ),
}


def study_of(*patterns: str) -> Study:
    """The first study that takes apart an algorithm whose name is like one of ``patterns``, with none but those.

    Raises ValueError where there is none.
    """
    for study in STUDIES.values():
        names = tuple(name for name in study.algorithms if any(fnmatchcase(name, pattern) for pattern in patterns))
        if names:
            return replace(study, algorithms=names)
    known = ", ".join(name for study in STUDIES.values() for name in study.algorithms)
    raise ValueError(f"algorithm={','.join(patterns)!r} has no ablation; these have: {known}")
