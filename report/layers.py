"""The layers of torchvision's networks, tuned and beside PyTorch's own convolution.

``python -m report layers`` needs a GPU, PyTorch and torchvision. It tunes the different layers of eight networks, in
both layouts, into the user's table (LEANCONV_TUNING_DIR): those first that take most of their network's time. It writes
benchmarks/results/<machine>/torchvision-layers.json, a row for each layer, as it goes on. Rows of an earlier run stay,
with its revision, until their layer is timed again.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product, zip_longest
from pathlib import Path
from time import perf_counter
from typing import Any

from leanconv.bench import machine
from leanconv.bench.format import Table
from leanconv.bench.results import PEER_LAYOUTS as LAYOUTS
from leanconv.bench.suites import format_problem, parse_problem
from leanconv.call.choose import choose
from leanconv.options import Layout
from leanconv.plan import Target
from leanconv.problem import ConvProblem, Problem
from leanconv.volumes.images import computed
from report import records
from report.networks import NETWORKS as SHAPES
from report.networks import VIDEOS, memory_format

#: Names for `models.build`, and batches of images of 224 x 224.
NETWORKS = {
    "vgg16": 64, "resnet18": 64, "resnet50": 64, "densenet121": 32, "googlenet": 64, "mobilenet_v3_large": 64,
    "efficientnet_b0": 32, "convnext_tiny": 32,
}  # fmt: skip
#: The results files: of layers that are tuned; of gradients, 16 bits and groups, with the model's choice alone.
NAME, OTHERS = "torchvision-layers", "other-layers"
OTHER_NETWORKS = "resnet50 resnext50_32x4d efficientnet_b0 convnext_tiny densenet121 mobilenet_v3_large".split()
#: The layers of networks of videos, as the others.
VOLUMES = "volume-layers"
PEERS = {"torch-fp32": "strict FP32", "torch-tf32": "TF32"}
#: Candidates of a layer that are timed at most, and problems that are handed to the tuner together.
_MOST, _TOGETHER = 7, 24


@dataclass
class Layer:
    """A layer, the limit of workspace that a patch gives it, and its share of each network's predicted time."""

    problem: ConvProblem
    limit: int | None
    shares: dict[str, float] = field(default_factory=dict)


def layers(target: Target, networks: Sequence[str] = tuple(NETWORKS)) -> list[Layer]:
    """The different layers in both layouts, those first that have the largest share in a network."""
    found: dict[tuple[ConvProblem, int | None], Layer] = {}
    for network in networks:
        for layout in LAYOUTS:
            mine = list(_of_network(network, layout))
            us = [choose(problem, replace(target, model=""), limit=limit).cost for problem, limit in mine]
            for key, each in zip(mine, us, strict=True):
                layer = found.setdefault(key, Layer(*key))
                layer.shares[network] = round(each / sum(us), 5)
    return sorted(found.values(), key=lambda layer: -max(layer.shares.values()))


def other_layers(target: Target, networks: Sequence[str] = OTHER_NETWORKS) -> list[Layer]:
    """Gradients, and layers in 16 bits, of groups or of volumes, those first that take long, of each kind in turn."""
    by_kind: dict[Any, dict[Problem, Layer]] = {}
    for network in networks:
        for dtype, layout in product(("float16", "float32"), LAYOUTS):
            for problem, limit in _of_network(network, layout, dtype, backward=True):
                if dtype == "float32" and problem.op == "fprop" and problem.groups == 1 and network not in VIDEOS:
                    continue
                kind, images = (dtype, layout, problem.op, problem.groups > 1), computed(problem)
                layer = by_kind.setdefault(kind, {}).setdefault(images, Layer(problem, limit))
                layer.shares[network] = choose(images, replace(target, model=""), limit=limit).cost
    ordered = [sorted(each.values(), key=lambda layer: -max(layer.shares.values())) for each in by_kind.values()]
    # of each kind long and short ones in turn, then the kinds in turn
    mixed = _in_turn(*(_in_turn(each[: len(each) // 2], each[len(each) // 2 :]) for each in ordered))
    return [Layer(layer.problem, layer.limit, dict.fromkeys(layer.shares, 0.0)) for layer in mixed]


def _in_turn(*lists: list[Layer]) -> list[Layer]:
    return [layer for together in zip_longest(*lists) for layer in together if layer]


def _of_network(
    network: str, layout: Layout, dtype: str = "float32", backward: bool = False
) -> Iterator[tuple[ConvProblem, int | None]]:
    import torch

    from leanconv.torch.recording import problems_of
    from report import models

    shape = SHAPES[network] if network in VIDEOS else (NETWORKS.get(network, 32), 3, 224, 224)
    with torch.device("meta"):
        x = torch.empty(shape, dtype=getattr(torch, dtype))
        form = memory_format(x, layout)
        model: Any = models.build(network).train(backward)
        model, x = model.to(x.dtype, memory_format=form), x.contiguous(memory_format=form)
    for limit, problems in problems_of(model, x, backward=backward).items():
        for problem in problems:
            if problem.dtype == dtype and not problem.is_empty:
                yield problem, limit


def measure(results: Path, seconds: float | None = None, revision: str | None = None, name: str = NAME) -> Path:
    """Tune, begin no further layer after ``seconds``; returns the results file. Raises WrongResultError, at the end.

    For `OTHERS` and `VOLUMES` one candidate of each of `other_layers` is timed.
    """
    from leanconv.runtime import launch
    from leanconv.tuning.search import WrongResultError, tune

    begun = perf_counter()
    target = launch.open_device(0).target
    about = records.with_torch(revision)
    path = results / machine.slug(about) / f"{name}.json"
    rows = {(row["problem"], row["limit"]): row for row in records.read(path).get("rows", ())}
    every = layers(target) if name == NAME else other_layers(target, VIDEOS if name == VOLUMES else OTHER_NETWORKS)
    shares = {(format_problem(layer.problem), layer.limit): layer.shares for layer in every}
    for key, row in rows.items():
        row["shares"] = shares.get(key, {})
    wrong: list[str] = []
    for group in _groups(every):
        left = None if seconds is None else seconds - (perf_counter() - begun)
        if left is not None and left <= 0:
            break
        problems = [layer.problem for layer in group]
        most = _MOST if name == NAME else 1
        timed = partial(tune, problems, workspace_limit=group[0].limit, most=most, peers=True, seconds=left)
        try:
            done = timed()
        except WrongResultError as error:
            # all other times are in the table: they are read there
            wrong.append(str(error))
            done = timed()
        for each in done.problems:
            layer = next(layer for layer in group if computed(layer.problem) == each.problem)
            key = format_problem(layer.problem), layer.limit
            if each.timed or key not in rows:
                rows[key] = {
                    "problem": key[0], "limit": key[1], "layout": layer.problem.layout, "shares": layer.shares,
                    "algorithm": each.winner.algorithm.name, "us": each.us, "model_us": each.model_us,
                    "timed": each.timed, "peers": dict(each.peers), "date": about["date"],
                    # what was not timed now stands in the table, with kernels that have not changed since
                    "revision": about["git_revision"] if each.timed else records.EARLIER,
                }  # fmt: skip
        records.write(results, name, about, rows.values(), layers=len(every))
    if wrong:
        raise WrongResultError("\n".join(wrong))
    return path


def _groups(every: Sequence[Layer]) -> Iterator[list[Layer]]:
    """Layers of one limit that follow each other closely, as many as are tuned together."""
    for first in range(0, len(every), _TOGETHER):
        part = every[first : first + _TOGETHER]
        for limit in dict.fromkeys(layer.limit for layer in part):
            yield [layer for layer in part if layer.limit == limit]


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """By network and layout, then all: layers, and times as fast as PyTorch in strict FP32 and in TF32."""
    lines = []
    networks = [name for name in NETWORKS if any(name in row["shares"] for row in rows)]
    for name in (*networks, ""):
        for layout in LAYOUTS:
            mine = [row for row in rows if row["layout"] == layout and (not name or name in row["shares"])]
            mine = [row for row in mine if set(PEERS) <= set(row["peers"])]
            if not mine:
                continue
            cells = [name or "all different layers", layout, str(len(mine))]
            for peer in PEERS:
                each = [row["peers"][peer] / row["us"] for row in mine]
                cells += [f"{statistics.geometric_mean(each):.2f}", f"{min(each):.2f}"]
            lines.append([*cells, str(sum(row["peers"]["torch-fp32"] < row["us"] for row in mine))])
    heads = [f"× {words}{more}" for words in PEERS.values() for more in ("", ", least")]
    return ["network", "layout", "layers", *heads, "left to PyTorch"], lines


def others(record: dict[str, Any]) -> str:
    """By operation, kind of layer and PyTorch's arithmetic: how many layers, and times as fast as PyTorch."""
    found: dict[tuple[str, ...], list[float]] = {}
    for row in record["rows"]:
        problem: Any = parse_problem(row["problem"])
        groups = "" if problem.groups == 1 else "depthwise" if problem.group_c == 1 else "grouped"
        for peer in set(row["peers"]) & {"torch-float16", *PEERS}:
            key = PEERS.get(peer, "16 bits"), groups, problem.op, row["layout"]
            found.setdefault(key, []).append(row["peers"][peer] / row["us"])
    lines = [[*key, str(len(each)), f"{statistics.geometric_mean(each):.2f}", f"{min(each):.2f}"]
             for key, each in sorted(found.items())]  # fmt: skip
    heads = ["PyTorch in", "groups", "operation", "layout", "layers", "× PyTorch", "least"]
    return f"{records.origin_of_rows(record)}.\n\n{records.table((heads, lines))}"


def section(record: dict[str, Any]) -> str:
    rows = record["rows"]
    said = f"{records.origin_of_rows(record)}. {len(rows)} of {record['layers']} different layers are tuned."
    if strict := [row["peers"]["torch-fp32"] / row["us"] for row in rows if "torch-fp32" in row["peers"]]:
        said += (
            f" Their winners are {statistics.geometric_mean(strict):.2f} times as fast as strict FP32 in the "
            f"geometric mean (PyTorch {record['machine']['torch']}), {min(strict):.2f} times at worst; "
            f"{sum(each < 0.97 for each in strict)} are below 0.97. Layers where PyTorch is quicker in strict FP32 "
            "`leanconv.torch.enable` leaves to it."
        )
    return f"{said}\n\n{records.table(table(rows))}"
