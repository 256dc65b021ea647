"""Squeeze-and-excite: the means of channels, two layers of them, and the image times what these give; one launch.

J. Hu, L. Shen, G. Sun, Squeeze-and-Excitation Networks (2018). It is no convolution, so `ALGORITHMS` does not have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from leanconv.dtypes import DTYPES, GPU_LAYERS, DtypeName, item_bytes, none_of
from leanconv.kernels.common.layers import activation_type
from leanconv.kernels.contract import ceil_div, named
from leanconv.kernels.cost import Speeds
from leanconv.plan import Launch, Plan, Pointer, Target

#: Threads of a block: as many as leave room for a second one, or all where a pixel needs more.
THREADS = 512, 1024
#: Bytes of an image that a block finds again in L1, and most blocks of a cluster that are taken for their sake.
KEPT_BYTES, MOST_FOR_L1 = 96 * 1024, 8


@dataclass(frozen=True)
class SqueezeSpeeds(Speeds):
    """Of a multiprocessor.

    Explored (H200, 3641591): the 16 blocks of EfficientNet-B0, float16, channels last, 32 images, are predicted within
    a tenth.
    """

    #: bytes of images that it reads or writes in a clock cycle, and of the layers' matrices that it reads
    image: float
    matrices: float
    #: clock cycles besides, of a launch and of what waits for other blocks
    start: int


@dataclass(frozen=True)
class SqueezeExciteProblem:
    """What is computed: ``n`` images of ``c`` channels, whose means ``squeezed`` numbers are computed from.

    ``y = x * gate(w2 @ activation(w1 @ mean(x) + b1) + b2)``. ``gate`` is an activation, or ``hardsigmoid``.
    """

    n: int
    c: int
    pixels: int
    squeezed: int
    dtype: DtypeName
    nhwc: bool
    activation: str | None
    gate: str
    bias1: bool = True
    bias2: bool = True

    @property
    def image_bytes(self) -> int:
        return self.c * self.pixels * item_bytes(self.dtype)

    @property
    def neighbours(self) -> int:
        """Elements that a thread loads at once."""
        return gcd(self.c if self.nhwc else self.pixels, 16 // item_bytes(self.dtype))

    def __str__(self) -> str:
        layout, gates = "NHWC" if self.nhwc else "NCHW", f"{self.activation or 'identity'} {self.gate}"
        return f"squeeze-excite {layout} {self.dtype} {self.n}x{self.c}x{self.pixels} by {self.squeezed} {gates}"


def why_not(problem: SqueezeExciteProblem, target: Target) -> list[str]:
    """Why the kernel cannot run a problem on a GPU; empty if it can."""
    reasons = none_of(problem.dtype, GPU_LAYERS)
    if reasons:
        return reasons
    if problem.nhwc and problem.c // problem.neighbours > THREADS[-1]:
        reasons.append(f"{problem.c} channels of a pixel are more than {THREADS[-1]} threads load at once")
    if problem.c * problem.pixels >= 2**31:
        reasons.append(f"an image of {problem.pixels} pixels of {problem.c} channels has 2**31 elements or more")
    shared = _shared_bytes(problem, _threads(problem))
    if shared > target.shared_per_block:
        reasons.append(f"it takes {shared} bytes of shared memory, and a block has {target.shared_per_block} at most")
    return reasons


def plan(problem: SqueezeExciteProblem, target: Target) -> Plan:
    """The launch; its arguments are x, w1, b1, w2, b2 and y."""
    element, threads, split = DTYPES[problem.dtype].ctype, _threads(problem), blocks_of_image(problem, target)
    hard = problem.gate == "hardsigmoid"
    launch = Launch(
        header="kernels/common/squeeze_excite.cuh",
        function="leanconv::squeeze_excite",
        problem=(
            ("element", element),
            *named(problem, "c pixels squeezed nhwc bias1 bias2"),
            ("activation", activation_type(problem.activation)),
            ("gate", "leanconv::Hardsigmoid" if hard else activation_type(problem.gate)),
        ),
        tuning=(("threads", threads), ("split", split)),
        arguments=(*(Pointer(role, element) for role in ("x", "w1", "b1", "w2", "b2")), Pointer("y", element, True)),
        grid=problem.n * split,
        block=threads,
        shared_bytes=_shared_bytes(problem, threads),
        min_blocks=THREADS[-1] // threads,
        cluster=split,
    )
    return Plan((launch,))


def blocks_of_image(problem: SqueezeExciteProblem, target: Target) -> int:
    """Blocks that share an image: a power of two, such that every multiprocessor has one, or that each block finds its
    share again in L1."""
    busy, kept = target.multiprocessors // max(1, problem.n), ceil_div(problem.image_bytes, KEPT_BYTES)
    split = 1
    while split < target.most_in_cluster and (2 * split <= busy or split < min(kept, MOST_FOR_L1)):
        split *= 2
    return split


def predicted_cycles(problem: SqueezeExciteProblem, target: Target) -> float:
    """Predicted time in clock cycles: an image passes its multiprocessors three times, memory twice, and the blocks of
    an image share the rows of the matrices."""
    speeds, split = SqueezeSpeeds.of(target), blocks_of_image(problem, target)
    busiest = ceil_div(problem.n * split, target.multiprocessors) * 3 * problem.image_bytes / split / speeds.image
    matrices = 2 * problem.c * problem.squeezed * item_bytes(problem.dtype) / split / speeds.matrices
    return max(busiest, 2 * problem.n * problem.image_bytes / target.bytes_per_cycle) + matrices + speeds.start


def _threads(problem: SqueezeExciteProblem) -> int:
    places = problem.c // problem.neighbours if problem.nhwc else 0
    return next((threads for threads in THREADS if places <= threads), THREADS[-1])


def _shared_bytes(problem: SqueezeExciteProblem, threads: int) -> int:
    """Means and gates, what lies between, and in NHWC the sums of all threads."""
    return 4 * (2 * (problem.c + problem.squeezed) + problem.nhwc * threads * problem.neighbours)
