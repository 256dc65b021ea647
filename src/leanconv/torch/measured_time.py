"""How long PyTorch's own convolution takes on this GPU: `enable` compares tuned layers with it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from math import ceil
from typing import Any

import torch
from torch.nn.functional import conv2d, conv3d, pad

from leanconv.call.host_call import torch_epilogue
from leanconv.problem import ConvProblem, Problem
from leanconv.runtime.timing import Clock
from leanconv.torch import registration
from leanconv.torch.expected_time import engine

_SAMPLES, _SAMPLE_US, _CALLS = 5, 300.0, (2, 24)
#: Algorithms that cuDNN tries: PyTorch's default are ten.
_SEARCHED = 4
#: Sets of tensors, and bytes that they take together, at most.
_MOST_SETS, _MOST_BYTES = 8, 4 << 30


def versions() -> str:
    """PyTorch's and cuDNN's."""
    return f"torch {torch.__version__}, cudnn {torch.backends.cudnn.version()}"


def times(problem: Problem, clock: Clock) -> dict[str, float]:
    """Microseconds of PyTorch's convolution by `engine`; empty for what it has not, or where there is no GPU for it.

    ``torch.backends.cudnn.benchmark`` is on, for the four algorithms that cuDNN puts first; where it is off, which is
    PyTorch's default, both ways are timed. Tensors are in the memory order of ``problem``, of 16 bits, or of float32,
    with and without TF32.
    """
    if problem.kind != "conv2d" or problem.layout == "CHWN" or problem.dtype not in ("float32", "float16", "bfloat16"):
        return {}
    if not torch.cuda.is_available():
        return {}
    found = {}
    calls = [_call(problem, i) for i in range(_sets(problem, clock))]
    ways = (True,) if torch.backends.cudnn.benchmark else (True, False)
    for tf32, searched in product((False, True) if problem.dtype == "float32" else (False,), ways):
        # NOTE: with a patch active, leanconv would be timed
        with registration.suspended(), _arithmetic(tf32, searched):
            calls[0]()
            torch.cuda.synchronize()
            first = max(clock.sample(calls[:1] * 2), 0.5)
            count = min(max(ceil(_SAMPLE_US / first), _CALLS[0]), _CALLS[1])
            each = [calls[i % len(calls)] for i in range(count)]
            found[engine(problem, tf32, searched)] = float(
                f"{statistics.median(clock.sample(each) for _ in range(_SAMPLES)):.5g}"
            )
    del calls
    free, total = torch.cuda.mem_get_info()
    if free < total // 2:
        torch.cuda.empty_cache()
    return found


def _sets(problem: ConvProblem, clock: Clock) -> int:
    return max(1, min(ceil(2 * clock.cache_bytes / problem.bytes) + 1, _MOST_SETS, _MOST_BYTES // problem.bytes))


@contextmanager
def _arithmetic(tf32: bool, searched: bool) -> Iterator[None]:
    how = {"enabled": True, "benchmark_limit": _SEARCHED, "deterministic": False}
    with torch.backends.cudnn.flags(benchmark=searched, allow_tf32=tf32, **how):
        yield


def _tensor(shape: tuple[int, ...], problem: ConvProblem, seed: int) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed)
    made = torch.randn(shape, generator=generator, device="cuda").to(getattr(torch, problem.dtype))
    return made.contiguous(memory_format=_form(problem))


def _form(problem: ConvProblem) -> Any:
    """The memory order of a layer's tensors, as PyTorch calls it."""
    last = torch.channels_last_3d if problem.is_volume else torch.channels_last
    return last if problem.layout == "NHWC" else torch.contiguous_format


def _call(problem: ConvProblem, seed: int) -> Callable[[], Any]:
    plain = replace(problem, layout="NCHW")
    first, second = (_tensor(operand.shape, problem, seed + 100 * i) for i, operand in enumerate(plain.operands[:2]))
    bias = _tensor((problem.k, 1, 1, 1, 1)[: len(first.shape)], problem, 200).flatten() if problem.bias else None
    return call_of(problem, first, second, bias)


def call_of(
    problem: ConvProblem, first: Any, second: Any, bias: Any = None, scale: Any = None, add: Any = None
) -> Callable[[], Any]:
    """PyTorch's convolution, or the gradient of it that is asked for, on the two tensors (n, c, h, w), of volumes
    (n, c, d, h, w), that are read.

    The memory order of ``problem`` is theirs. Of a gradient ``problem.bias`` asks for the bias's too; what follows a
    layer's sums are functions of PyTorch.
    """
    axes = 3 if problem.is_volume else 2
    sides = (*problem.padding_d, *problem.padding)[-2 * axes :]
    stride, dilation = (problem.stride_d, *problem.stride)[-axes:], (problem.dilation_d, *problem.dilation)[-axes:]
    even = sides[::2] == sides[1::2]
    inside = sides[::2] if even else (0,) * axes
    # the last axis first
    around = [side for at in range(2 * axes - 2, -1, -2) for side in sides[at : at + 2]]

    def padded(image: Any) -> Any:
        return image if even else pad(image, around)

    if problem.op == "fprop":

        def forward() -> Any:
            convolve = conv3d if problem.is_volume else conv2d
            given = bias if scale is None else None
            y = convolve(padded(first), second, given, stride, inside, dilation, problem.groups)
            if not problem.fuses:
                return torch.relu_(y) if problem.activation else y
            return torch_epilogue(y, axes, None if scale is None else bias, scale, add, problem.activation)

        return forward
    absent = torch.empty(
        replace(problem, layout="NCHW").y_shape, dtype=first.dtype, device=first.device,
        memory_format=_form(problem),
    )  # fmt: skip
    grad, x, w = (first, absent, second) if problem.op == "dgrad" else (second, first, absent)
    x = padded(x)
    layer = (stride, inside, dilation, False, (0,) * axes, problem.groups)
    sizes = [problem.k] if problem.bias else None
    wanted = (problem.op == "dgrad", problem.op == "wgrad", problem.bias)

    def backward() -> Any:
        dx, dw, _ = torch.ops.aten.convolution_backward(grad, x, w, sizes, *layer, wanted)
        if problem.op == "wgrad":
            return dw
        if even:
            return dx
        for axis, (before, size) in enumerate(zip(sides[::2], (problem.d, problem.h, problem.w)[-axes:], strict=True)):
            dx = dx.narrow(2 + axis, before, size)
        return dx

    return backward
