"""Who is quicker: a kernel of leanconv, by measured or predicted time, or PyTorch's convolution."""

from __future__ import annotations

import math

import torch

from leanconv.call.gpu_call import Loaded
from leanconv.dtypes import item_bytes
from leanconv.kernels import cost
from leanconv.kernels.common.squeeze_excite import SqueezeExciteProblem
from leanconv.perf import tables
from leanconv.plan import Target
from leanconv.problem import ConvProblem
from leanconv.torch import expected_time
from leanconv.torch.deciding import Decision
from leanconv.torch.expected_time import CYCLES_PER_US, LAUNCH, engine, launched_sooner, most_share

#: Clock cycles that a pass over a result takes besides what it moves at the memory's speed. Assumed, on the low side:
#: a layer is taken only where that pays.
_PASS_LAUNCH = LAUNCH / 2
#: Of squeeze-and-excite by PyTorch, channels last: clock cycles besides what its passes move, and how fast they are, in
#: elements of 16 bits, as a share of the memory's speed. Explored (H200, 3641591): within a seventh of the 16 blocks of
#: EfficientNet-B0, float16, 32 images; float32 is taken to move as many elements.
_SQUEEZE_BESIDE, _SQUEEZE_SPEED = 28200, 0.38


def compared(
    loaded: Loaded, problem: ConvProblem, tf32: bool, pytorch: float, passes: float = 0.0, packed: bool = False
) -> Decision:
    """Whether what was chosen for a problem is quicker than PyTorch's convolution in ``pytorch`` clock cycles, where no
    table has a time of it, and in ``passes`` clock cycles of what follows it there. ``packed``: filters stay packed."""
    algorithm, target = loaded.choice.algorithm, loaded.device.target
    name, preparing = algorithm.name, cost.kept_cycles(algorithm, loaded.problem, loaded.choice.config, target)
    # as PyTorch runs now; or else at its best
    searched = {bool(torch.backends.cudnn.benchmark), True}
    times = [tables.peer_us(problem, target, engine(problem, tf32, way)) for way in sorted(searched)]
    measured = next((us for us in times if us is not None), None)
    if measured is not None and loaded.choice.us is not None:
        ours, theirs, most = loaded.choice.us * CYCLES_PER_US, measured * CYCLES_PER_US, 1.0
        if isinstance(loaded.problem, ConvProblem) and loaded.problem.add:  # which was timed without
            ours += _result_cycles(loaded.problem, target)
        ours -= packed * preparing
        why = f"{name} took {ours / theirs:.2f} of the time of PyTorch" + " in TF32" * tf32 + " when both were timed"
    else:
        ours, theirs = expected_cycles(loaded) - packed * preparing, pytorch
        why = f"{name} is expected to take {ours / theirs:.2f} of the time of PyTorch" + " in TF32" * tf32
        if math.isinf(ours):
            why = f"nobody knows how long {name} takes"
        most = most_share(problem, algorithm.stem, tf32, pytorch)
        if passes:
            most = max(most, 1.0)
    if passes:
        why += f", which needs {passes / CYCLES_PER_US:.0f} µs more for what follows"
    if ours < most * theirs + passes:
        return Decision(name, why, ours, theirs + passes)
    # where nothing captures a CUDA graph filters stay packed, and the GPU may wait for the host
    kept = ours - preparing
    eager = problem.op == "fprop" and not passes and (kept < most * theirs or launched_sooner(kept, theirs))
    return Decision("", why, ours, theirs + passes, name if eager else "")


def expected_cycles(loaded: Loaded) -> float:
    """The predicted clock cycles of what was chosen, its launch included."""
    algorithm, problem = loaded.choice.algorithm, loaded.problem
    fitted = cost.fitted(algorithm, problem, loaded.device.target).measured
    return loaded.choice.cost + (LAUNCH if cost.leaves_out_launch(algorithm, problem) and not fitted else 0)


def fused(loaded: Loaded, problem: ConvProblem, tf32: bool, passes: float, packed: bool = False) -> Decision:
    """The same for a layer with its epilogue, which takes so many clock cycles behind PyTorch's convolution."""
    plain = problem.plain
    pytorch = expected_time.pytorch_cycles(plain, loaded.device.target, tf32)
    return compared(loaded, plain, tf32, pytorch, passes, packed)


def passes_cycles(problem: ConvProblem, target: Target, compiled: bool = False) -> float:
    """Clock cycles of what PyTorch computes behind a layer's sums: a pass over the result for a bias, one for a
    residual, which is read, and one for an activation; or one ``compiled`` for all of them."""
    count = min(parts(problem), 1) if compiled else parts(problem)
    return count * _PASS_LAUNCH + (2 * count + problem.add) * _result_cycles(problem, target)


def parts(problem: ConvProblem) -> int:
    """Of how many functions of PyTorch the epilogue of a layer is made."""
    return problem.bias + problem.add + (problem.activation is not None)


def _result_cycles(problem: ConvProblem, target: Target) -> float:
    """To read the result of a layer once, or to write it."""
    return math.prod(problem.y_shape) * item_bytes(problem.dtype) / target.bytes_per_cycle


def one_pass(problem: ConvProblem) -> ConvProblem:
    """A layer's epilogue as a layer by itself: filters of one tap, each for one channel, all of them 1."""
    return ConvProblem(
        problem.n, problem.k, problem.p, problem.q, problem.k, 1, 1, groups=problem.k, d=problem.z,
        dtype=problem.dtype, layout=problem.layout, bias=problem.bias, activation=problem.activation, add=problem.add,
    )  # fmt: skip


def one_pass_cycles(loaded: Loaded, problem: ConvProblem) -> float:
    """Clock cycles of `one_pass`: its kernel's prediction leaves out the residual."""
    return expected_cycles(loaded) + problem.add * _result_cycles(problem, loaded.device.target)


def squeeze_cycles(problem: SqueezeExciteProblem, target: Target, compiled: bool = False) -> float:
    """Clock cycles of squeeze-and-excite by PyTorch: a mean, two layers of one pixel and a product.

    They read the images twice and write them once, channels last at `_SQUEEZE_SPEED`. Channels first, and what inductor
    has ``compiled``, were not measured: the memory's speed is assumed, on the low side.
    """
    passes = 3 * problem.n * problem.image_bytes / target.bytes_per_cycle
    if compiled or not problem.nhwc:
        return 2 * (LAUNCH + _PASS_LAUNCH) + passes
    return _SQUEEZE_BESIDE + passes / (_SQUEEZE_SPEED * item_bytes(problem.dtype) / 2)
