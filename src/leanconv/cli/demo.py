"""A tour on real input: a photograph through the filters, real layers through every algorithm, all of it checked.

    leanconv demo

filters the photograph that ships inside matplotlib, runs layers of known networks with every algorithm that this
machine can run, compares each result with a float64 convolution, prints the table, and draws what it saw.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from leanconv.bench.format import duration, quantity
from leanconv.bench.terminal import console
from leanconv.cli.demo_measure import Measured, measure_filter, measure_layer
from leanconv.problem import ConvProblem
from leanconv.runtime import launch
from leanconv.runtime.probe import why_no_gpu
from leanconv.runtime.progress import progress

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
    from leanconv.cli.demo_pictures import draw_filters, draw_layers

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


def _print(out: Any, title: str, lines: Iterable[Measured]) -> None:
    from rich.table import Table

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
            duration(line.us), quantity(line.gflops),
            f"{line.error:.1e}", f"{line.bound:.1e}", "[green]pass[/]" if line.passes else "[bold red]FAIL[/]",
        )  # fmt: skip
        before = line.what
    out.print(table)
