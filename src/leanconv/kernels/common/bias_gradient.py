"""The gradient of a layer's bias, in the same call as that of its filters: one more launch, whatever computes those."""

from __future__ import annotations

from dataclasses import replace

from leanconv.dtypes import DTYPES
from leanconv.kernels.common.layers import conv_constants
from leanconv.kernels.contract import ceil_div
from leanconv.plan import Launch, Number, Plan, Pointer, Target
from leanconv.problem import ConvProblem

#: Threads of a block; filters of a block in NHWC, where 8 floats are the least that memory reads; blocks of a cluster.
THREADS, CHANNELS, SPLIT = 512, 8, 8


def without_bias(problem: ConvProblem) -> ConvProblem:
    return replace(problem, bias=False)


def with_bias(plan: Plan, problem: ConvProblem, target: Target) -> Plan:
    """``plan``, which computes the gradient of the filters, and after it the sums of dy."""
    element = DTYPES[problem.dtype].ctype
    channels = CHANNELS if problem.layout == "NHWC" else 1
    split = SPLIT if target.clusters else 1
    launch = Launch(
        header="kernels/common/bias_gradient.cuh",
        function="leanconv::bias_gradient",
        problem=conv_constants(without_bias(problem)),
        tuning=(("threads", THREADS), ("channels", channels), ("split", split)),
        arguments=(Pointer("dy", element), Pointer("bias", element, True), Number("long long", "batch", problem.n)),
        grid=ceil_div(problem.k, channels) * split,
        block=THREADS,
        shared_bytes=4 * THREADS,
        cluster=split,
    )
    return replace(plan, launches=(*plan.launches, launch))
