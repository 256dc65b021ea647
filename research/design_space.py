"""The exploration of direct_tiled's configurations, as the paper on memory-efficient direct convolution has made one.

``python -m research design-space`` times a sample of all configurations that the resources of a multiprocessor allow,
on some layers of the suite ``general-direct``, and writes research/results/<machine>/design-space.json.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from leanconv.bench import machine
from leanconv.bench.format import Table
from leanconv.bench.suites import format_problem, load_suite, parse_problem
from leanconv.call.explain import NOMINAL
from leanconv.kernels.common.layers import forward_of
from leanconv.kernels.direct.direct_tiled import (
    PAPERS_BEST,
    DirectTiled,
    DirectTiledConfig,
    block,
    layout,
    pixel_cycles,
    segments,
)
from leanconv.plan import Target
from leanconv.problem import ConvProblem
from report import records
from report.drawing import INK, finish, panels, tidy

SUITE = "general-direct"
#: Of each size of filters the layers that are timed, by what their names begin and end with.
LAYERS = (("n64-", "-c32-f64"), ("n128-", "-c64-f128"), ("n256-", "-c32-f64"))
SIZES = (3, 5, 7)
#: Largest relative error against PyTorch's result: both sum in float32.
MOST_ERROR = 1e-5

#: What a block may have: filters, rows and columns of pixels; and a thread: filters and adjacent pixels.
TILES_K = (16, 32, 64, 96, 128)
TILES_PIXELS = (
    *((8, 4), (8, 8), (16, 4), (32, 2), (16, 8), (28, 8), (32, 4), (64, 2)),
    *((8, 16), (16, 16), (32, 8), (64, 4), (128, 2), (32, 16), (64, 8), (128, 4)),
)
THREADS = ((8, 8), (4, 16), (8, 4), (4, 8), (16, 4), (8, 16), (16, 8), (4, 4))

#: What makes a configuration: the rest follows from these and the layer.
Shape = tuple[tuple[int, int, int], tuple[int, int], int]


def design_space(problem: ConvProblem, target: Target) -> Iterator[DirectTiledConfig]:
    """Every configuration of the kernel that the resources of a multiprocessor allow: registers, shared memory, warps.

    Filters and pixels of a block and a thread, channels of a step, tiles that a block walks down; what follows from
    these (the lanes of a warp, lines in straight code, blocks on a multiprocessor) is chosen.
    """
    forward = forward_of(problem)
    taps = forward.r * forward.s
    channels = sorted({min(c, forward.group_c) for c in (1, 2, 4, 8, 16) if c == 1 or c * taps <= 160})
    for tile_k, pixels, thread in product(TILES_K, TILES_PIXELS, THREADS):
        if tile_k >= 2 * max(16, forward.group_k) or pixels[0] >= 2 * max(8, forward.q):
            continue
        threads = tile_k * pixels[0] * pixels[1] // (thread[0] * thread[1])
        if not 32 <= threads <= 256:
            continue
        for tile_c in channels:
            walks = (1, 4) if tile_c == forward.group_c else (1,)
            for walk in walks:
                config = block(problem, target, (tile_k, *pixels), thread, tile_c, walk)
                if config is not None and config.threads * config.min_blocks >= 128:
                    yield config


def layers(size: int) -> dict[str, ConvProblem]:
    """The layers with filters of size x size, by name."""
    names = {f"{begin}k{size}{end}" for begin, end in LAYERS}
    return {c.name: c.problem for c in load_suite(SUITE) if c.name in names and isinstance(c.problem, ConvProblem)}


def shape(config: DirectTiledConfig) -> Shape:
    """Filters, columns and rows of a block; filters and pixels of a thread; channels of a step."""
    tile = config.tile_k, config.tile_w, config.tile_h
    return tile, (config.thread_k, config.thread_pixels), config.tile_c


def picked(problem: ConvProblem, target: Target) -> Shape:
    """What a call of the algorithm takes."""
    return shape(DirectTiled().timed(problem, target)[0][1])


def sample(size: int, count: int, target: Target) -> tuple[list[Shape], int]:
    """``count`` shapes that all layers of a size can have, and how many there are.

    Among them the paper's and what a call takes; the others are drawn, with the size as the seed.
    """
    problems = layers(size).values()
    spaces = [dict.fromkeys(shape(c) for c in design_space(p, target)) for p in problems]
    common = [each for each in spaces[0] if all(each in space for space in spaces)]
    chosen = [picked(p, target) for p in problems]
    known = [each for each in dict.fromkeys((*PAPERS_BEST, *chosen)) if each in common]
    others = [each for each in common if each not in known]
    drawn = random.Random(size).sample(others, min(len(others), max(0, count - len(known))))
    return known + drawn, len(common)


def measure(results: Path, count: int, revision: str | None = None) -> Path:
    """Time ``count`` configurations for each size of filters; returns the results file. Raises RuntimeError where one
    gives a wrong answer."""
    from leanconv.runtime import cache
    from leanconv.runtime.launch import open_device
    from leanconv.runtime.threads import side_by_side

    device = open_device(0)
    sizes: dict[str, Any] = {}
    configs: dict[str, list[DirectTiledConfig]] = {}
    for size in SIZES:
        shapes, space = sample(size, count, device.target)
        sizes[str(size)] = {"layers": list(layers(size)), "space": space, "timed": len(shapes)}
        for name, problem in layers(size).items():
            made = (block(problem, device.target, *each) for each in shapes)
            configs[name] = [config for config in made if config is not None]
    problems = {name: problem for size in SIZES for name, problem in layers(size).items()}
    launches = [
        launch
        for name, problem in problems.items()
        for config in configs[name]
        for launch in DirectTiled().plan(problem, config, device.target).launches
    ]

    def compile_one(launch: Any) -> None:
        with suppress(Exception):  # whoever runs it hears why
            cache.compiled(launch, device.target.arch)

    side_by_side([partial(compile_one, launch) for launch in launches])
    rows = [row for name, problem in problems.items() for row in _timed(name, problem, configs[name], device)]
    about = machine.describe(True, None, {}, revision)
    words = {name: format_problem(problem) for name, problem in problems.items()}
    return records.write(results, "design-space", about, rows, sizes=sizes, problems=words, columns=COLUMNS)


#: What a row of the results file holds.
COLUMNS = ["problem", *(field.name for field in fields(DirectTiledConfig)), "us", "registers", "spill_bytes"]


def _timed(name: str, problem: ConvProblem, configs: Sequence[DirectTiledConfig], device: Any) -> list[list[Any]]:
    """Times in microseconds of configurations of one layer, each checked against PyTorch's result."""
    import torch

    from leanconv.bench.operands import Operands
    from leanconv.runtime.timing import time_gpu

    operands = Operands(problem, True)
    x, w, y = operands.x("NCHW"), operands.w("NCHW"), operands.output("NCHW")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        expected = torch.nn.functional.conv2d(x, w, stride=problem.stride)
    given = {"x": x.data_ptr(), "w": w.data_ptr(), "bias": 0, "y": y.data_ptr()}
    rows = []
    for config in configs:
        plan = DirectTiled().plan(problem, config, device.target)
        (code,) = device.compiled(plan)
        run = partial(device.executable(plan, plan.roles), 0, [given[role] for role in plan.roles])
        y.fill_(float("nan"))
        us = time_gpu(run, budget_s=0.004, min_runs=3, max_runs=20).median_us
        error = float((y - expected).norm() / expected.norm())
        if not error <= MOST_ERROR:
            raise RuntimeError(f"{name} {config}: error {error:.3g} exceeds {MOST_ERROR}")
        numbers = [value for _, value in config.constants()]
        rows.append([name, *numbers, round(us, 2), code.registers, code.spill_bytes])
    return rows


class Study:
    """What was measured of one size of filters."""

    def __init__(self, record: dict[str, Any], size: int) -> None:
        about = record["sizes"][str(size)]
        self.size, self.names = size, about["layers"]
        self.space, self.timed = about["space"], about["timed"]
        self.problems = {name: parse_problem(record["problems"][name]) for name in self.names}
        self.configs: dict[Shape, dict[str, DirectTiledConfig]] = {}
        self.tflops: dict[Shape, dict[str, float]] = {}
        for row in record["rows"]:
            entry = dict(zip(record["columns"], row, strict=True))
            if entry["problem"] not in self.names:
                continue
            config = DirectTiledConfig(**{field.name: entry[field.name] for field in fields(DirectTiledConfig)})
            speed = self.problems[entry["problem"]].flops / entry["us"] * 1e-6
            self.configs.setdefault(shape(config), {})[entry["problem"]] = config
            self.tflops.setdefault(shape(config), {})[entry["problem"]] = speed
        self.tflops = {each: speeds for each, speeds in self.tflops.items() if len(speeds) == len(self.names)}

    def speed(self, each: Shape) -> float:
        """Geometric mean over the layers, in TFLOP/s."""
        return geometric_mean(self.tflops[each].values())

    def ranked(self) -> list[Shape]:
        """The shapes, the quickest first."""
        return sorted(self.tflops, key=self.speed, reverse=True)

    def intensity(self, each: Shape) -> float:
        """FMAs of a warp for each cycle of its loads from shared memory."""
        config, problem = self.configs[each][self.names[0]], self.problems[self.names[0]]
        assert isinstance(problem, ConvProblem)
        pitch = layout(problem, config).pitch
        pixels = sum(segments(problem, config.thread_pixels, config.vector)) / 4
        cycles = pixels * pixel_cycles(config.thread_pixels, config.lanes_w, config.lanes_h, pitch)
        cycles += problem.s * config.thread_k / 4 * (4 if config.lanes_k > 8 else 2)
        return problem.s * config.thread_k * config.thread_pixels / cycles


def words(each: Shape) -> str:
    """A shape as the paper writes it."""
    (tile_k, tile_w, tile_h), (thread_k, thread_pixels), tile_c = each
    return f"F_TB {tile_k}, {tile_w} × {tile_h}, F_T {thread_k}, W_T {thread_pixels}, C_SH {tile_c}"


def table(record: dict[str, Any], best: int = 3) -> Table:
    """For each size of filters the best shapes, the paper's, and those that calls take today."""
    lines = []
    for size, paper in zip(SIZES, PAPERS_BEST, strict=True):
        study = Study(record, size)
        ranked = study.ranked()
        calls = {name: picked(problem, NOMINAL) for name, problem in layers(size).items()}
        for place, each in enumerate(ranked):
            of_calls = [name.replace(f"-k{size}", "") for name, taken in calls.items() if taken == each]
            if place >= best and each != paper and not of_calls:
                continue
            config = study.configs[each][study.names[0]]
            speeds = [f"{study.tflops[each][name]:.1f}" for name in study.names]
            note = "; ".join(["the paper's"] * (each == paper) + [f"calls: {', '.join(of_calls)}"] * bool(of_calls))
            about = [f"{size}×{size}", str(place + 1), words(each), note, str(config.threads)]
            lines.append([*about, f"{study.speed(each):.1f}", *speeds])
    first = Study(record, SIZES[0]).names
    heads = [name.replace(f"-k{SIZES[0]}", "") for name in first]
    return ["filters", "place", "configuration", "", "threads", "TFLOP/s", *heads], lines


def section(record: dict[str, Any]) -> str:
    """The table of a machine, with what was sampled."""
    sizes = record["sizes"].items()
    counts = "; ".join(f"{size}×{size}: {entry['timed']} of {entry['space']}" for size, entry in sizes)
    said = f"Timed of all that fit: {counts}; drawn at random, beside the paper's and what calls took. "
    said += "“calls” names the layers for which a call of direct_tiled takes the configuration now."
    return f"{records.origin(record['machine'])}. {said}\n\n{records.table(table(record))}"


def draw(record: dict[str, Any], path: Path) -> None:
    """The landscape: speed over FMAs a cycle of shared memory, coloured by the outputs of a thread."""
    colours = {16: "#f0e442", 32: "#56b4e9", 64: "#009e73", 128: "#0072b2"}
    figure, axes = panels(1, len(SIZES), (10.5, 3.9), sharey=True)
    for axis, size, paper in zip(axes, SIZES, PAPERS_BEST, strict=True):
        study = Study(record, size)
        for outputs, colour in colours.items():
            mine = [each for each in study.tflops if each[1][0] * each[1][1] == outputs]
            at = [study.intensity(each) for each in mine], [study.speed(each) for each in mine]
            axis.scatter(*at, s=22, color=colour, edgecolors=INK, linewidths=0.3, label=f"{outputs} outputs a thread")
        for each, mark, area, label in ((study.ranked()[0], "D", 60, "the best"), (paper, "*", 130, "the paper's")):
            if each in study.tflops:
                ring = {"facecolors": "none", "edgecolors": "#d55e00", "linewidths": 1.4}
                axis.scatter([study.intensity(each)], [study.speed(each)], area, marker=mark, label=label, **ring)
        tidy(axis, f"{size} × {size} filters: {len(study.tflops)} of {study.space}", grid="both")
        axis.set_xlabel("FMAs a cycle of loads from shared memory", fontsize=8, color=INK)
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("TFLOP/s, geometric mean of three layers", fontsize=8, color=INK)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=6, fontsize=8, frameon=False)
    finish(figure, path, f"configurations of direct_tiled on {record['machine']['gpu']}")
