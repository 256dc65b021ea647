"""A tour on real input: a photograph through the filters, real layers through every algorithm, all of it checked.

    leanconv demo

filters the photograph that ships inside matplotlib, runs layers of known networks with every algorithm that this
machine can run, compares each result with a float64 convolution, prints the table, and draws what it saw.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from leanconv import api
from leanconv.bench.format import duration
from leanconv.bench.plots import blank, save
from leanconv.bench.suites import dense_filter
from leanconv.bench.tables import console
from leanconv.call.bind import load
from leanconv.call.choose import algorithms_of, choose, consider
from leanconv.cpu import oracle
from leanconv.images import filters
from leanconv.images.api import filter2d
from leanconv.plan import Target
from leanconv.problem import ConvProblem, Problem
from leanconv.runtime import env, launch
from leanconv.runtime.launch import why_no_gpu
from leanconv.runtime.progress import progress
from leanconv.runtime.timing import time_cpu, time_gpu

#: What the picture shows of each filter: a title, the kernels whose results are combined, and what is added.
SHOWN = (
    ("gaussian:15", ("gaussian:15",), 0.0),
    ("sharpen", ("sharpen",), 0.0),
    ("|sobel|", ("sobel-x", "sobel-y"), 0.0),
    ("laplacian + 128", ("laplacian",), 128.0),
    ("emboss", ("emboss",), 0.0),
)


def _layer(n: int, c: int, h: int, k: int, r: int, stride: int = 1, groups: int = 1) -> ConvProblem:
    return ConvProblem(
        n, c, h, h, k, r, r, (stride, stride), (r // 2,) * 4, groups=groups, bias=True, activation="relu"
    )


#: Layers as the networks have them, with bias and ReLU; those with three channels get the photograph.
LAYERS = (
    ("ResNet conv1, 7×7 stride 2", _layer(1, 3, 224, 64, 7, 2)),
    ("VGG conv1_2, 3×3", _layer(1, 64, 224, 64, 3)),
    ("VGG conv3_2, 3×3", _layer(1, 256, 56, 256, 3)),
    ("ResNet conv2, 3×3", _layer(4, 64, 56, 64, 3)),
    ("ResNet conv4, 3×3", _layer(4, 256, 14, 256, 3)),
    ("ResNet conv5, 3×3", _layer(4, 512, 7, 512, 3)),
    ("ResNet-50 conv3, 1×1", _layer(2, 512, 28, 128, 1)),
    ("Inception, 5×5", _layer(4, 48, 28, 64, 5)),
    ("MobileNet, depthwise 3×3", _layer(2, 96, 56, 96, 3, groups=96)),
)
_QUICK = ("ResNet conv5, 3×3", "ResNet-50 conv3, 1×1", "MobileNet, depthwise 3×3")


def photograph() -> np.ndarray:
    """Rear Admiral Grace Hopper, as she ships with matplotlib: float32 (3, 600, 512) in [0, 255].

    Raises ImportError where matplotlib or Pillow is missing.
    """
    try:
        from matplotlib import cbook
        from PIL import Image
    except ImportError as error:
        raise ImportError("the demo needs matplotlib and Pillow: pip install 'leanconv[bench]'") from error
    with Image.open(cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)) as image:
        pixels = np.asarray(image.convert("RGB"), np.float32)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def gpu_name() -> str | None:
    """The first GPU, None where none can be used."""
    return None if why_no_gpu() else launch.open_device(0).name


def run(folder: Path = Path("demo-output"), *, quick: bool = False) -> bool:
    """The whole tour; pictures go to ``folder``, the table to the terminal. Returns whether every result passed."""
    out = console()
    folder.mkdir(parents=True, exist_ok=True)
    photo = photograph()
    gpu = gpu_name()
    budget_s = 0.05 if quick else 0.2
    layers = [(name, replace(p, n=1) if quick else p) for name, p in LAYERS if not quick or name in _QUICK]
    steps = [words for _, used, _ in SHOWN for words in used]
    results: dict[str, np.ndarray] = {}
    by_filter: list[Measured] = []
    by_layer: list[Measured] = []
    with progress(len(steps) + len(layers)) as begin:
        for words in steps:
            begin(words)
            results[words], lines = measure_filter(words, photo, gpu is not None, budget_s)
            by_filter += lines
        for what, problem in layers:
            begin(what)
            by_layer += measure_layer(what, problem, photo, gpu is not None, budget_s)
    _print(out, "the photograph, filtered", by_filter)
    _print(out, "layers, each with every algorithm that can run it", by_layer)
    pictures = [folder / "filters.png", folder / "layers.png"]
    draw_filters(photo, _composed(results), pictures[0])
    draw_layers(by_layer, gpu, pictures[1])
    failed = [line for line in (*by_filter, *by_layer) if not line.passes]
    total = len(by_filter) + len(by_layer)
    where = f"the CPU and {gpu}" if gpu else f"the CPU; no GPU can be used here, `{_command()} doctor` says why"
    out.print(f"{total - len(failed)} of {total} results pass the check against float64, on {where}.", highlight=False)
    for line in failed:
        text = f"FAIL: {line.algorithm} on {line.what}: error {line.error:.2e}, allowed {line.bound:.2e}"
        out.print(text, style="bold red", highlight=False)
    out.print(f"pictures: {' '.join(map(str, pictures))}", highlight=False, soft_wrap=True)
    return not failed


def _command() -> str:
    """What to type for the command line, which `make demo` leaves in an environment that is not active."""
    beside = Path(sys.executable).with_name("leanconv")
    return "leanconv" if shutil.which("leanconv") or not beside.exists() else os.path.relpath(beside)


def _composed(results: dict[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
    """Title and result of each shown filter, in the photograph's range; of several kernels it is the length."""
    shown = []
    for title, used, add in SHOWN:
        planes = results[used[0]] if len(used) == 1 else np.sqrt(sum(results[words] ** 2 for words in used))
        shown.append((title, planes + np.float32(add)))
    return shown


def _print(out: Any, title: str, lines: Sequence[Measured]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    # narrow enough for terminals of 80 columns
    table = Table(title=title, title_justify="left", caption="* is what a call runs by itself", caption_justify="left")
    table.box, table.padding = SIMPLE_HEAD, (0, 0)
    for name in ("", "on", "algorithm"):
        table.add_column(name)
    for name in ("time", "error", "allowed", ""):
        table.add_column(name, justify="right", no_wrap=True)
    before = None
    several = len({line.what for line in lines}) < len(lines)
    for line in lines:
        if several and before not in (None, line.what):
            table.add_section()
        table.add_row(
            line.what if line.what != before else "", line.where, line.algorithm + (" *" if line.chosen else ""),
            duration(line.us),
            f"{line.error:.1e}", f"{line.bound:.1e}", "[green]pass[/]" if line.passes else "[bold red]FAIL[/]",
        )  # fmt: skip
        before = line.what
    out.print(table)


@dataclass(frozen=True)
class Measured:
    """One algorithm on one problem: its time, its error against float64, and the error that it may have."""

    what: str
    algorithm: str
    where: str
    chosen: bool
    us: float
    error: float
    bound: float

    @property
    def passes(self) -> bool:
        """Whether the error keeps its bound; NaN does not."""
        return self.error <= self.bound


def measure_layer(what: str, problem: ConvProblem, photo: np.ndarray, gpu: bool, budget_s: float) -> list[Measured]:
    """Run every algorithm that takes the layer, on the CPU and, with ``gpu``, on the first GPU."""
    random = np.random.default_rng(0)
    x = _input(problem, photo, random)
    fan_in = problem.group_c * problem.r * problem.s
    w = random.standard_normal(problem.w_shape, np.float32) * np.float32((2 / fan_in) ** 0.5)
    bias = random.standard_normal(problem.k, np.float32) * np.float32(0.1)
    right = oracle.conv2d(problem, x, w, bias), oracle.error_bound(problem, x, w, bias)
    lines = []
    limit = env.workspace_limit()  # the calls below obey it too
    for where, device, target in _places(gpu):
        chosen = choose(problem, target, limit=limit).algorithm
        for algorithm in algorithms_of(target):
            if consider(algorithm, problem, target, algorithm.stem, limit).reasons:
                continue
            call = partial(
                api.conv2d, x, w, bias, problem.stride, problem.padding, problem.dilation, problem.groups,
                algorithm=algorithm.stem, activation=problem.activation, device=device,
            )  # fmt: skip
            about = what, algorithm.stem, where, algorithm is chosen
            lines.append(_measured(call, problem, {"x": x, "w": w, "bias": bias}, right, about, budget_s)[1])
    return lines


def _places(gpu: bool) -> Iterator[tuple[str, str | None, Target | None]]:
    """Where things run: its name, the ``device`` of a call, and what an algorithm is chosen for."""
    yield "CPU", None, None
    if gpu:
        yield "GPU", "cuda", launch.open_device(0).target


def _input(problem: ConvProblem, photo: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """The middle of the photograph, normalised as networks want it, where the layer is a first one; else noise."""
    if problem.c != 3:
        return random.standard_normal(problem.x_shape, np.float32)
    top, left = (photo.shape[1] - problem.h) // 2, (photo.shape[2] - problem.w) // 2
    patch = photo[:, top : top + problem.h, left : left + problem.w]
    patch = (patch - patch.mean((1, 2), keepdims=True)) / patch.std((1, 2), keepdims=True)
    return np.ascontiguousarray(np.broadcast_to(patch, problem.x_shape))


def measure_filter(words: str, photo: np.ndarray, gpu: bool, budget_s: float) -> tuple[np.ndarray, list[Measured]]:
    """The photograph through one filter: the result, and a line for each place where it ran."""
    kernel = filters.from_words(words)
    problem = dense_filter(len(photo), *photo.shape[1:], *kernel.shape)
    right = oracle.filter2d(problem, photo, kernel), oracle.filter_error_bound(problem, photo, kernel)
    lines = []
    result = photo
    what = f"{words}, {problem.batch}×{problem.h}×{problem.w}"
    for where, device, target in _places(gpu):
        call = partial(filter2d, photo, kernel, separable=False, device=device)
        about = what, choose(problem, target).algorithm.name, where, True
        result, line = _measured(call, problem, {"x": photo, "w": kernel}, right, about, budget_s)
        lines.append(line)
    return result, lines


def _measured(
    call: Callable[[], np.ndarray], problem: Problem, inputs: dict[str, np.ndarray], right: tuple[np.ndarray, float],
    about: tuple[str, str, str, bool], budget_s: float,
) -> tuple[np.ndarray, Measured]:  # fmt: skip
    """The result of a call and its line, timed on the CPU, or on the GPU, the arrays lying there already.

    ``right`` are the answer and the error that is allowed, ``about`` the first four fields of the line.
    """
    y, (_, name, where, _) = call(), about
    if where == "CPU":
        us = time_cpu(call, budget_s=budget_s, warm_up=False).median_us
    else:
        loaded = load(problem, 0, name)
        values = {"bias": None, **inputs, "y": y.copy(), **dict.fromkeys(problem.scalars, 0)}
        with launch.resident(loaded.device, loaded.plan, values) as on_gpu:
            us = time_gpu(on_gpu, cold=problem.kind == "filter2d", budget_s=budget_s).median_us
    answer, bound = right
    return y, Measured(*about, us, oracle.relative_error(y, answer), bound)


#: A colour for each algorithm, in the order in which they appear; safe for colour-blind readers (Okabe and Ito).
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999", "#000000")
_INK, _PALE = "#222222", "#d9d9d9"


def draw_filters(photo: np.ndarray, shown: Sequence[tuple[str, np.ndarray]], path: Path) -> None:
    """The photograph (3, height, width) beside what the filters made of it, pixels in [0, 255]."""
    columns = 3
    rows = -(-(len(shown) + 1) // columns)
    height, width = photo.shape[1:]
    figure = blank((columns * 3.4, rows * (3.4 * height / width + 0.25)))
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes:
        axis.set_axis_off()
    for axis, (title, planes) in zip(axes, [("the photograph", photo), *shown], strict=False):
        axis.imshow(np.clip(np.rint(planes), 0, 255).astype(np.uint8).transpose(1, 2, 0))
        axis.set_title(title, fontsize=11, color=_INK, pad=5)
    save(figure, path)


def draw_layers(lines: Sequence[Measured], gpu: str | None, path: Path) -> None:
    """Points of time, and of error against what is allowed, for each layer and algorithm, on logarithmic axes."""
    layers = list(dict.fromkeys(line.what for line in lines))
    series = list(dict.fromkeys((line.algorithm, line.where) for line in lines))
    colour = {key: _COLOURS[i % len(_COLOURS)] for i, key in enumerate(series)}
    figure = blank((12.5, 0.2 * len(lines) + 0.24 * len(layers) + 1.3))
    times, errors = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    at, middle = 0.0, []
    for layer in layers:
        own = [line for line in lines if line.what == layer]
        middle.append(at + (len(own) - 1) / 2)
        for i, line in enumerate(own):
            paint = colour[line.algorithm, line.where]
            times.plot(line.us / 1e3, at + i, "o", color=paint, markersize=6.5)
            text = f"   {duration(line.us)}" + ("  ← chosen" if line.chosen else "")
            times.text(line.us / 1e3, at + i, text, va="center", fontsize=7.5, color=_INK)
            errors.plot([line.error, line.bound], [at + i] * 2, color=_PALE, linewidth=1, zorder=1)
            errors.plot(line.error, at + i, "o", color=paint, markersize=5.5)
            errors.plot(line.bound, at + i, "|", color=_INK, markersize=9, markeredgewidth=1.4)
        at += len(own) + 1.2
    times.set_yticks(middle, layers, fontsize=9)
    times.set_ylim(at - 1.2, -1)
    times.set_xscale("log")
    times.set_xlim(min(line.us for line in lines) / 2e3, 5 * max(line.us for line in lines) / 1e3)
    times.set_xlabel(f"time of a call in ms, on {'the CPU and ' + gpu if gpu else 'the CPU'}", fontsize=9)
    errors.set_xscale("log")
    errors.set_xlabel("relative error against float64; the stroke is what is allowed", fontsize=9)
    for axis in (times, errors):
        axis.tick_params(axis="y", length=0)
        axis.tick_params(axis="x", labelsize=8)
        axis.grid(axis="x", color=_PALE, linewidth=0.6)
        axis.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    from matplotlib.lines import Line2D

    names = [Line2D([], [], marker="o", linestyle="", color=colour[key], label=", ".join(key)) for key in series]
    figure.legend(handles=names, loc="outside upper center", ncols=min(5, len(names)), frameon=False, fontsize=9)
    save(figure, path)
