"""A tour on real input: a photograph through the filters, real layers through every algorithm, all of it checked.

    python -m leanconv.demo

filters the photograph that ships inside matplotlib, runs layers of known networks with every algorithm that this
machine can run, compares each result with a float64 convolution, prints the table, and draws what it saw.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from leanconv import api, filters
from leanconv.bench.suites import dense_filter
from leanconv.call.choose import algorithms_of, choose
from leanconv.problem import ConvProblem, Problem
from leanconv.reference import oracle
from leanconv.runtime import env, launch
from leanconv.runtime.driver import CudaUnavailableError, driver
from leanconv.runtime.timing import Timing, time_cpu, time_gpu

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


#: Layers as the networks have them, with bias and ReLU; those with three channels see the photograph.
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


@dataclass(frozen=True)
class Measured:
    """One algorithm on one problem: its time, its error against float64, and the error that it may have."""

    what: str
    algorithm: str
    where: str
    chosen: bool
    us: float
    gflops: float
    error: float
    bound: float

    @property
    def right(self) -> bool:
        """Whether the error keeps its bound; NaN does not."""
        return self.error <= self.bound


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
    try:
        driver()
        return launch.open_device(0).name
    except CudaUnavailableError:
        return None


def measure_layer(what: str, problem: ConvProblem, photo: np.ndarray, gpu: bool, budget_s: float) -> list[Measured]:
    """Run every algorithm that takes the layer, on the CPU and, with ``gpu``, on the first GPU."""
    random = np.random.default_rng(0)
    x = _input(problem, photo, random)
    fan_in = problem.group_c * problem.r * problem.s
    w = random.standard_normal(problem.w_shape, np.float32) * np.float32((2 / fan_in) ** 0.5)
    bias = random.standard_normal(problem.k, np.float32) * np.float32(0.1)
    answer, bound = oracle.conv2d(problem, x, w, bias), oracle.error_bound(problem, x, w, bias)
    found = []
    limit = env.workspace_limit()  # the calls below obey it too
    for where in ("CPU", "GPU") if gpu else ("CPU",):
        target = launch.open_device(0).target if where == "GPU" else None
        chosen = choose(problem, target, limit=limit).algorithm
        for algorithm in algorithms_of(target):
            if algorithm.reasons(problem, target, limit):
                continue
            call = partial(
                api.conv2d, x, w, bias, problem.stride, problem.padding, problem.dilation, problem.groups,
                algorithm=algorithm.name, activation=problem.activation, device="cuda" if where == "GPU" else None,
            )  # fmt: skip
            y = call()
            if where == "GPU":
                us = _time_on_gpu(problem, algorithm.name, {"x": x, "w": w, "bias": bias}, y, budget_s).median_us
            else:
                us = time_cpu(call, budget_s=budget_s, warm_up=False).median_us
            error = oracle.relative_error(y, answer)
            gflops = problem.flops / us * 1e-3
            found.append(Measured(what, algorithm.name, where, algorithm is chosen, us, gflops, error, bound))
    return found


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
    answer, bound = oracle.filter2d(problem, photo, kernel), oracle.filter_error_bound(problem, photo, kernel)
    found = []
    result = photo
    for where in ("CPU", "GPU") if gpu else ("CPU",):
        call = partial(api.filter2d, photo, kernel, device="cuda" if where == "GPU" else None)
        result = call()
        if where == "GPU":
            chosen = choose(problem, launch.open_device(0).target).algorithm.name
            us = _time_on_gpu(problem, "auto", {"x": photo, "w": kernel}, result, budget_s).median_us
        else:
            chosen = choose(problem, None).algorithm.name
            us = time_cpu(call, budget_s=budget_s, warm_up=False).median_us
        error = oracle.relative_error(result, answer)
        what = f"{words}, {problem.batch}×{problem.h}×{problem.w}"
        found.append(Measured(what, chosen, where, True, us, problem.flops / us * 1e-3, error, bound))
    return result, found


def _time_on_gpu(problem: Problem, name: str, inputs: dict[str, np.ndarray], y: np.ndarray, budget_s: float) -> Timing:
    """GPU time of one call, the arrays lying there already."""
    from leanconv.call.bind import load

    loaded = load(problem, 0, name)
    values = {"bias": None, **inputs, "y": y.copy(), **dict.fromkeys(problem.scalars, 0)}
    with launch.resident(loaded.device, loaded.plan, values) as call:
        return time_gpu(call, cold=problem.kind == "filter2d", budget_s=budget_s)


def run(folder: Path = Path("demo-output"), *, quick: bool = False) -> bool:
    """The whole tour; pictures go to ``folder``, the table to the terminal. Returns whether every result was right."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    folder.mkdir(parents=True, exist_ok=True)
    photo = photograph()
    gpu = gpu_name()
    budget_s = 0.05 if quick else 0.2
    layers = [(name, replace(p, n=1) if quick else p) for name, p in LAYERS if not quick or name in _QUICK]
    steps = [words for _, used, _ in SHOWN for words in used]
    results: dict[str, np.ndarray] = {}
    by_filter: list[Measured] = []
    by_layer: list[Measured] = []
    with _progress(console, len(steps) + len(layers)) as advance:
        for words in steps:
            advance(words)
            results[words], lines = measure_filter(words, photo, gpu is not None, budget_s)
            by_filter += lines
        for what, problem in layers:
            advance(what)
            by_layer += measure_layer(what, problem, photo, gpu is not None, budget_s)
    _print(console, "the photograph, filtered", by_filter)
    _print(console, "layers, each with every algorithm that can run it", by_layer)
    from leanconv.cli.demo_pictures import draw_filters, draw_layers

    pictures = [folder / "filters.png", folder / "layers.png"]
    draw_filters(photo, _composed(results), pictures[0])
    draw_layers(by_layer, gpu, pictures[1])
    wrong = [line for line in (*by_filter, *by_layer) if not line.right]
    total = len(by_filter) + len(by_layer)
    where = f"the CPU and {gpu}" if gpu else f"the CPU; no GPU can be used here, `{_command()} doctor` says why"
    console.print(f"{total - len(wrong)} of {total} results are right against float64, on {where}.", highlight=False)
    for line in wrong:
        text = f"WRONG: {line.algorithm} on {line.what}: error {line.error:.2e}, allowed {line.bound:.2e}"
        console.print(text, style="bold red", highlight=False)
    console.print(f"pictures: {' '.join(map(str, pictures))}", highlight=False, soft_wrap=True)
    return not wrong


def _command() -> str:
    """What to type for the command line, which `make demo` leaves in an environment that is not active."""
    beside = Path(sys.executable).with_name("leanconv")
    return "leanconv" if shutil.which("leanconv") or not beside.exists() else os.path.relpath(beside)


def _composed(results: dict[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
    """Title and result of each shown filter, in the photograph's range; of several kernels it is the length."""
    found = []
    for title, used, add in SHOWN:
        planes = results[used[0]] if len(used) == 1 else np.sqrt(sum(results[words] ** 2 for words in used))
        found.append((title, planes + np.float32(add)))
    return found


def _print(console: Any, title: str, lines: Iterable[Measured]) -> None:
    from rich.table import Table

    from leanconv.cli.demo_pictures import duration

    table = Table(title=title, title_justify="left", caption="* is what a call runs by itself", caption_justify="left")
    for name in ("", "on", "algorithm"):
        table.add_column(name)
    for name in ("time", "GFLOP/s", "error", "allowed", ""):
        table.add_column(name, justify="right", no_wrap=True)
    before = None
    for line in lines:
        if before not in (None, line.what):
            table.add_section()
        table.add_row(
            line.what if line.what != before else "", line.where, line.algorithm + (" *" if line.chosen else ""),
            duration(line.us), f"{line.gflops:.1f}" if line.gflops < 100 else f"{line.gflops:.0f}",
            f"{line.error:.1e}", f"{line.bound:.1e}", "[green]right[/]" if line.right else "[bold red]WRONG[/]",
        )  # fmt: skip
        before = line.what
    console.print(table)


class _progress:  # noqa: N801 - reads as the function that it is
    """One bar on a terminal, nothing elsewhere."""

    def __init__(self, console: Any, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=total)
        self._started = False

    def __enter__(self) -> Any:
        self._bar.start()
        return self._advance

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def _advance(self, description: str) -> None:
        self._bar.update(self._task, advance=int(self._started), description=description)
        self._started = True


if __name__ == "__main__":
    sys.exit(0 if run() else 1)
