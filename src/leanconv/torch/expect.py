"""How long PyTorch's own convolution would take: what a takeover compares leanconv's predicted time with."""

from __future__ import annotations

from leanconv.algorithms.base import ceil_div
from leanconv.plan import Target
from leanconv.problem import ConvProblem

#: Shares of the peak of the FP32 cores, and of the tensor cores at 10 bits and at 16, that cuDNN reaches on layers of
#: many channels, channels first and last: fitted to an H200 (PyTorch 2.11, cuDNN 9.19)
_FP32, _TF32, _NARROW = (0.58, 0.58), (0.38, 0.53), (0.24, 0.55)
#: of depthwise layers' multiply-adds, of the peak of the FP32 cores
_DEPTHWISE = {"fprop": (0.06, 0.15), "dgrad": (0.035, 0.12), "wgrad": (0.03, 0.07)}
#: of the memory's speed that large tensors pass at
_MEMORY, _MEMORY_DEPTHWISE = 0.6, 0.5
#: clock cycles of a launch, 3 µs at 1.98 GHz: of PyTorch's time, and of leanconv's, whose predictions leave it out
LAUNCH = 5940


def pytorch_cycles(problem: ConvProblem, target: Target, tf32: bool) -> float:
    """Clock cycles that PyTorch's convolution is expected to take, in the unit of `Candidate.cost`.

    ``tf32``: whether PyTorch may round float32 factors to 10 bits. The figures are for an H200; other GPUs are taken to
    reach the same shares of their peaks. On 611 forward and depthwise measurements (benchmarks/results/nvidia-h200) the
    time is within a factor of two for most; large filters, for which cuDNN may take an FFT, are the least certain.
    """
    last = problem.layout == "NHWC"
    lanes = target.multiprocessors * target.fma_lanes
    products = problem.flops / 2
    if problem.group_c == 1 and problem.groups > 1:
        work = products / (lanes * _DEPTHWISE[problem.op][last])
        return max(work, problem.bytes / (_MEMORY_DEPTHWISE * target.bytes_per_cycle)) + LAUNCH
    narrow = problem.dtype != "float32"
    if narrow or tf32:
        # a tensor core multiplies at least 16 channels, a tile 64 filters
        products *= ceil_div(problem.group_k, 64) * 64 / problem.group_k
        products *= ceil_div(problem.group_c, 16) * 16 / problem.group_c
        peak = target.multiprocessors * target.tensor_flops / (2 if narrow else 4)
        work = products / (peak * (_NARROW if narrow else _TF32)[last])
    else:
        products *= ceil_div(problem.group_k, 32) * 32 / problem.group_k
        work = products / (lanes * _FP32[last] * _transformed(problem))
    return max(work, problem.bytes / (_MEMORY * target.bytes_per_cycle)) + LAUNCH


def _transformed(problem: ConvProblem) -> float:
    """What cuDNN's FFT saves of the products of large filters; its Winograd saves nothing that was measured."""
    if problem.stride != (1, 1) or problem.dilation != (1, 1) or problem.group_c < 32 or problem.op == "wgrad":
        return 1.0
    return max(1.0, min(problem.r * problem.s / 9, 8.0) ** 0.75)
