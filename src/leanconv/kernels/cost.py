"""The cost model: what predictions of times have in common, and what was measured on a GPU.

A kernel predicts clock cycles from a problem, a configuration and a target, by formulas: multiply-adds, bytes, waves
of blocks, launches. What was measured on a GPU is data. ``perf/<gpu>/speeds.json`` has the numbers that the formulas of
one kernel need (`Speeds`); ``perf/<gpu>/fits.json`` says by how much whole calls differ from what is predicted, for
each algorithm, layout and operation (`Fit`); `python -m report refit` makes it from timed candidates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from math import gcd, prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from leanconv.dtypes import item_bytes
from leanconv.kernels.contract import Algorithm, ceil_div
from leanconv.perf import tables
from leanconv.plan import Target
from leanconv.problem import ConvProblem, Problem
from leanconv.runtime.files import read_bytes, read_json

S = TypeVar("S", bound="Speeds")

#: Where `Speeds` are read.
FOLDER = Path(tables.__file__).resolve().parent
#: The GPU whose speeds are assumed for one that nobody has measured.
REFERENCE = "nvidia-h200"


@dataclass(frozen=True)
class Speeds:
    """Base of what was measured for the predictions of one module: its fields are the numbers of that module in
    ``perf/<gpu>/speeds.json``, and say what they mean."""

    @classmethod
    def of(cls: type[S], target: Target, part: str = "") -> S:
        """The numbers of a GPU; those of `REFERENCE` for one without a file. ``part``: those of a part of the module's
        section, such as a layout."""
        return _speeds(cls, target.model, part)  # type: ignore[arg-type]


@cache
def _speeds(kind: type[S], model: str, part: str) -> S:
    path = FOLDER / tables.slug(model) / "speeds.json"
    if not model or not path.exists():
        path = FOLDER / REFERENCE / "speeds.json"
    record = json.loads(path.read_text(encoding="utf-8"))[kind.__module__.rpartition(".")[2]]
    record = record[part] if part else record
    return kind(**{field.name: _frozen(record[field.name]) for field in fields(kind)})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class GpuSpeeds(Speeds):
    """Of a GPU, whatever runs there."""

    #: clock cycles from the end of one launch to the work of the next, and for filling the machine
    launch_cycles: int
    #: multiprocessors of a processing cluster, in which a cluster of blocks lies, at least
    processing_cluster: int
    #: the share of its places for blocks that is counted on: where clusters filled all of an H200, some waited
    cluster_places: float
    #: clusters of 4 and 8 blocks are dealt out unevenly: where they fill more than this share of the places for blocks,
    #: the busiest multiprocessor gets one block more than the mean. Clusters of 2 are dealt evenly. Explored (H200,
    #: 4f4e305, 28 layers in CHWN): for a mean of 4.0, 6.1, 11.9 and 24.2 blocks the time of 5.5, 7.0, 12.9 and 25.0.
    even_clusters: float
    #: clock cycles that the launch that writes zeros takes for an element of the gradient, channels last and in other
    #: layouts, where it writes each by itself: fitted to six measured layers
    zeros: tuple[float, float]
    #: clock cycles more for an element that a phase writes in NCHW, where its neighbours along the row are of other
    #: phases: 0.004 to 0.018 on 29 measured layers, of five kernels
    scattered: float
    #: clock cycles that a call takes less where its filters stay packed: of each call, and of each clock cycle in which
    #: memory would bring their bytes. With these least is lost by choosing on 742 layers of suites; most spare more
    packing: tuple[float, float]


def pixels_read(extent: int, taps: int, stride: int, dilation: int, before: int, outputs: int) -> int:
    """Pairs of a tap and an output along an axis of ``extent`` pixels whose pixel is not padding."""
    total = 0
    for begin in range(-before, taps * dilation - before, dilation):
        first, last = max(0, ceil_div(-begin, stride)), min(outputs - 1, (extent - 1 - begin) // stride)
        total += max(0, last - first + 1)
    return total


def launch_cycles(target: Target) -> int:
    """Clock cycles from the end of one launch to the work of the next, and for filling the machine."""
    return GpuSpeeds.of(target).launch_cycles


@lru_cache(maxsize=64)
def mean_products(problem: ConvProblem) -> int:
    """Products that an output of a forward convolution sums on average: of pixels, not of padding."""
    (sh, sw), (dh, dw), (top, _, left, _) = problem.stride, problem.dilation, problem.padding
    rows = pixels_read(problem.h, problem.r, sh, dh, top, problem.p)
    columns = pixels_read(problem.w, problem.s, sw, dw, left, problem.q)
    front, stride, dilation = problem.padding_d[0], problem.stride_d, problem.dilation_d
    slices = pixels_read(problem.d, problem.t, stride, dilation, front, problem.z)
    return problem.group_c * slices * rows * columns // max(1, problem.z * problem.p * problem.q)


def fma_cycles(problem: ConvProblem, target: Target, fewer: float = 1) -> float:
    """Cycles of a layer's multiply-adds, ``fewer`` times fewer than by its definition, on all FP32 cores of a GPU."""
    return problem.flops / 2 / fewer / (target.multiprocessors * target.fma_lanes)


def axes_of(problem: ConvProblem) -> list[tuple[int, int, int]]:
    """Taps, stride and dilation along each axis."""
    slices = problem.t, problem.stride_d, problem.dilation_d
    return [slices, *zip((problem.r, problem.s), problem.stride, problem.dilation, strict=True)]


def leaves_pixels(problem: ConvProblem) -> bool:
    """Whether a gradient of the input has pixels that no phase writes: no filter reads them, so they are zeros."""
    whole = all(gcd(stride, dilation) == 1 and taps >= stride for taps, stride, dilation in axes_of(problem))
    return problem.op == "dgrad" and not problem.accumulate and not whole


def zeros_at_once(problem: ConvProblem) -> int:
    """Elements that a thread of the launch that writes zeros stores: channels last 16 bytes, where they are whole."""
    vector = 16 // item_bytes(problem.dtype)
    return vector if problem.layout == "NHWC" and problem.c % vector == 0 else 1


def moved_bytes(problem: ConvProblem) -> float:
    """Bytes of a layer's tensors, without the pixels of the input that strides pass over."""
    elements = problem.n * problem.c * problem.d * problem.h * problem.w
    return problem.bytes - (1 - _read(problem)) * elements * item_bytes(problem.dtype)


def residual_cycles(problem: ConvProblem, share: float, target: Target) -> float:
    """Clock cycles that a residual takes besides its bytes at the memory's speed: it comes at this ``share`` of it."""
    if not problem.add:
        return 0.0
    outputs = problem.pixels * problem.k * item_bytes(problem.dtype)
    return (1 / share - 1) * outputs / target.bytes_per_cycle


def _read(problem: ConvProblem) -> float:
    """The part of the input's pixels that strides do not pass over. With dilation 2 and stride 2 all taps read the same
    every second pixel."""
    return prod(min(taps, stride // gcd(stride, dilation)) / stride for taps, stride, dilation in axes_of(problem))


def blocks_that_fit(registers: int, threads: int, target: Target) -> int:
    """Blocks that a multiprocessor holds: registers come in multiples of 8 a thread, warps in multiples of four."""
    warps = min(64, target.registers_per_multiprocessor // (ceil_div(registers, 8) * 8 * 32)) // 4 * 4
    return max(1, min(32, (32 * warps + 31) // threads))


def busy_cycles(blocks: int, fitting: int, target: Target, cycles: Callable[[int], float]) -> float:
    """Cycles of the busiest multiprocessor, which holds ``fitting`` of all ``blocks``: so many together take
    ``cycles``."""
    rounds, rest = divmod(ceil_div(max(1, blocks), target.multiprocessors), fitting)
    return rounds * cycles(fitting) + (cycles(rest) if rest else 0)


def overlapped(one: float, other: float, share: float) -> float:
    """The time of two things at once: the greater, and this ``share`` of the lesser."""
    return max(one, other) + share * min(one, other)


def clusters_at_once(split: int, fitting: int, target: Target) -> int:
    """Clusters of ``split`` blocks that run at the same time, where a multiprocessor holds ``fitting`` blocks."""
    speeds = GpuSpeeds.of(target)
    of_one = speeds.processing_cluster
    places = max(1, target.multiprocessors // of_one) * (of_one * fitting // split)
    return max(1, int(speeds.cluster_places * places))


#: Algorithms of all layers that were timed on enough depthwise ones for a fit of these.
_DEPTHWISE, _WITH_DEPTHWISE = "depthwise", ("direct_tiled",)
#: What is fitted to algorithms of which too few times are known, and whose predictions leave out a launch.
OTHERS = "others"


class Fit(NamedTuple):
    """``factor`` times the prediction, ``start`` clock cycles of a call apart from its work, and ``preparing`` times
    as long as memory takes for the bytes of packed weights."""

    factor: float = 1.0
    start: float = 0.0
    preparing: float = 0.0


class Fitted(NamedTuple):
    """What a `Fit` is for one problem: ``factor`` times the prediction, and ``beside`` clock cycles. Where it was
    ``measured`` that is the time of a whole call, its launches included."""

    factor: float = 1.0
    beside: float = 0.0
    measured: bool = False

    def cycles(self, predicted: float) -> float:
        """The time that is expected where ``predicted`` clock cycles are predicted."""
        return self.factor * predicted + self.beside


def group(algorithm: Algorithm, problem: Problem, op: str = "") -> str:
    """What shares a fit, such as ``tensor_gemm NHWC fprop``; empty for image filters, whose times are not fitted.

    ``op`` takes the place of the problem's operation.
    """
    if problem.kind == "filter2d":
        return ""
    words = [algorithm.stem, problem.layout, op or problem.op]
    words += [_DEPTHWISE] if algorithm.stem in _WITH_DEPTHWISE and 1 == problem.group_c < problem.groups else []
    words += [problem.dtype] if problem.dtype != "float32" else []
    # the FP32 cores do the same whatever precision is asked for
    words += ["tf32"] if problem.precision == "tf32" and algorithm.arithmetic(problem) != "fp32" else []
    return " ".join(words)


def whole(name: str) -> str:
    """The group of all layers of an algorithm, also those that are depthwise."""
    return name.replace(f" {_DEPTHWISE}", "")


def leaves_out_launch(algorithm: Algorithm, problem: Problem) -> bool:
    """Whether a prediction leaves out the launch of a call's last kernel: those of FP32 cores do, but for gradients of
    filters."""
    return problem.kind == "conv2d" and problem.op != "wgrad" and algorithm.arithmetic(problem) == "fp32"


def preparing_cycles(algorithm: Algorithm, problem: Problem, target: Target, config: object = None) -> float:
    """Clock cycles that memory takes for the bytes of packed weights."""
    return algorithm.prepared_bytes(problem, config) / target.bytes_per_cycle


def kept_cycles(algorithm: Algorithm, problem: Problem, config: object, target: Target) -> float:
    """Clock cycles that a call takes less, at least, where its filters stay packed."""
    of_call, of_bytes = GpuSpeeds.of(target).packing
    packed = preparing_cycles(algorithm, problem, target, config)
    return of_call + of_bytes * packed if packed else 0.0


def fitted(algorithm: Algorithm, problem: Problem, target: Target, *, runs: bool = True) -> Fitted:
    """What makes of a prediction what was measured on ``target``.

    Without fits predictions count as they are. What zeros and scattered stores of strided gradients take is
    added in each case (`Algorithm.writes_phases`).

    Where no gradients of the input were timed it is what holds for the forward pass: the kernels are the same. Where
    none of an algorithm's times are known, its calls begin as those of others do. It need not be one that ``runs`` the
    problem: without that preparing does not count.
    """
    phases = 0.0
    if algorithm.writes_phases and problem.kind == "conv2d":
        phases = _phase_cycles(problem, target, not algorithm.counts_scattered(problem))
    fits = known(target.model) if target.model else {}
    names = [group(algorithm, problem)]
    if problem.kind == "conv2d" and problem.op == "dgrad":
        names.append(group(algorithm, problem, "fprop"))
    fit = next((fits[each] for name in names for each in (name, whole(name)) if each in fits), None)
    if fit is None and leaves_out_launch(algorithm, problem):
        fit = fits.get(OTHERS)
    if fit is None:
        return Fitted(beside=phases)
    prepared = preparing_cycles(algorithm, problem, target) if runs and fit.preparing else 0.0
    return Fitted(fit.factor, fit.start + fit.preparing * prepared + phases, measured=True)


def _phase_cycles(problem: ConvProblem, target: Target, scattered: bool) -> float:
    """What a strided gradient of the input takes more: zeros where no phase writes, and pixels that lie apart."""
    if problem.op != "dgrad":
        return 0.0
    speeds, elements = GpuSpeeds.of(target), prod(problem.y_shape)
    each = 0.0
    if leaves_pixels(problem) and zeros_at_once(problem) > 1:
        each = (1 - _read(problem)) * item_bytes(problem.dtype) / target.bytes_per_cycle
    elif leaves_pixels(problem):
        each = speeds.zeros[problem.layout != "NHWC"]
    if scattered and problem.layout == "NCHW" and problem.stride[1] > 1:
        each += speeds.scattered * _read(problem)
    return each * elements


def file_of(model: str) -> Path:
    """Where the fits of a GPU model are."""
    return tables.SHIPPED / tables.slug(model) / "fits.json"


@cache
def known(model: str) -> Mapping[str, Fit]:
    """The fits of a GPU model by group; none where there is no such file, or a damaged one."""
    found: dict[str, Fit] = {}
    with suppress(OSError, ValueError, TypeError, AttributeError):
        record = read_json(read_bytes(file_of(model)))
        found = {
            str(name): Fit(*(float(each.get(field, default)) for field, default in Fit._field_defaults.items()))
            for name, each in record["fits"].items()
        }
    return found
