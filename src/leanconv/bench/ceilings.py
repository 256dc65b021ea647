"""What the machine can do at best, measured in the same run as everything that is compared with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from leanconv.dtypes import is_integer
from leanconv.kernels.contract import Arithmetic
from leanconv.problem import Problem
from leanconv.runtime.timing import time_cpu, time_gpu


@dataclass(frozen=True)
class Ceilings:
    """TFLOP/s of matrix products, TB/s of a copy (bytes read plus bytes written), and how they were measured."""

    fp32_tflops: float
    tf32_tflops: float | None
    copy_tbytes: float
    how: str
    fp16_tflops: float | None = None

    def floor_us(self, problem: Problem, arithmetic: Arithmetic) -> float:
        """The least time a problem can take: by its direct arithmetic or by its bytes, whichever is longer. Of layers
        of integers, whose arithmetic has no ceiling measured here, by their bytes.
        """
        return max(self._arithmetic_us(problem, arithmetic), self._bytes_us(problem))

    def bound(self, problem: Problem, arithmetic: Arithmetic = "fp32") -> Arithmetic | Literal["copy"]:
        if self._bytes_us(problem) >= self._arithmetic_us(problem, arithmetic):
            return "copy"
        return arithmetic

    def _arithmetic_us(self, problem: Problem, arithmetic: Arithmetic) -> float:
        if problem.kind == "conv2d" and is_integer(problem.dtype):
            return 0.0
        rates = {"tf32": self.tf32_tflops, "fp16": self.fp16_tflops}
        rate = rates.get(arithmetic.removesuffix("x3"))
        products = 3 if rate and arithmetic.endswith("x3") else 1
        return products * problem.flops / (rate or self.fp32_tflops) * 1e-6

    def _bytes_us(self, problem: Problem) -> float:
        return problem.bytes / self.copy_tbytes * 1e-6


def measure_gpu(budget_s: float = 0.3) -> Ceilings:
    """cuBLAS on 8192×8192×8192 random matrices without and with TF32 and in float16, and a device copy of 1 GiB."""
    import torch

    from leanconv.bench.peers.torch_peer import arithmetic

    size = 8192
    a, b = (torch.randn(size, size, device="cuda") for _ in range(2))
    y = torch.empty_like(a)
    rates = []
    for tf32, kind in ((False, torch.float32), (True, torch.float32), (False, torch.float16)):
        a, b, y = a.to(kind), b.to(kind), y.to(kind)
        with arithmetic(tf32):
            us = time_gpu(lambda: torch.mm(a, b, out=y), budget_s=budget_s).median_us  # noqa: B023
        rates.append(2 * size**3 / us * 1e-6)
    elements = 1 << 28
    source = torch.randn(elements, device="cuda")
    target = torch.empty_like(source)
    us = time_gpu(lambda: target.copy_(source), cold=True, budget_s=budget_s).median_us
    how = "cuBLAS 8192³ in FP32, TF32 and FP16; device copy of 1 GiB, bytes read plus written"
    return Ceilings(rates[0], rates[1], 8 * elements / us * 1e-6, how, rates[2])


def measure_cpu(budget_s: float = 0.3) -> Ceilings:
    """NumPy's BLAS on 1536×1536×1536 random matrices, and a copy of 128 MiB."""
    size = 1536
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((size, size), np.float32) for _ in range(2))
    y = np.empty_like(a)
    us = time_cpu(lambda: np.matmul(a, b, out=y), budget_s=budget_s).median_us
    rate = 2 * size**3 / us * 1e-6
    source = random.standard_normal(1 << 25, np.float32)
    target = np.empty_like(source)
    us = time_cpu(lambda: np.copyto(target, source), budget_s=budget_s).median_us
    how = "NumPy's matrix product 1536³ in FP32; copy of 128 MiB by one thread, bytes read plus written"
    return Ceilings(rate, None, 2 * source.nbytes / us * 1e-6, how)
