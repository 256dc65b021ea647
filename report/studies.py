"""Which kernels the ablation takes apart, what is switched off in them, and what they are compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from leanconv.options import Layout

#: Variants: a kernel that the idea starts from, and a whole one.
BASELINE, FULL = "baseline", "full"


@dataclass(frozen=True)
class Study:
    """Which algorithms are taken apart, what is switched off in them, and what they are compared with.

    ``switches`` holds for each variant the fields of the configuration that it sets, and to what. With ``alone`` they
    are all that differs; otherwise other fields follow to the best configuration that the algorithm has with them.
    ``layouts`` are those that a variant differs in, for variants that do not in all.
    """

    algorithms: tuple[str, ...]
    baselines: tuple[str, ...]
    switches: dict[str, dict[str, Any]] = field(hash=False)
    alone: bool = False
    layouts: dict[str, tuple[Layout, ...]] = field(default_factory=dict, hash=False)

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
            "no prefetch": {"prefetch": False},
            "no vector loads": {"vector_loads": False},
            "no micro-kernel": {"micro_kernel": False},
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
            "64-bit exchange": {"wide_exchange": False},
            "unpadded exchange": {"padded_exchange": False},
            "runs of 4": {"run": 4},
        },
        alone=True,
        layouts={"staged": ("NCHW",), "direct stores": ("NCHW",), "runs of 4": ("NCHW", "NHWC")},
    ),
}


def study_of(algorithm: str) -> Study:
    """The study that takes an algorithm apart. Raises ValueError where there is none."""
    for study in STUDIES.values():
        if algorithm in study.algorithms:
            return study
    names = ", ".join(name for study in STUDIES.values() for name in study.algorithms)
    raise ValueError(f"algorithm={algorithm!r} has no ablation; these have: {names}")
