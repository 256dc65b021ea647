"""The layers of torchvision's networks beside PyTorch's own convolution, forward and backward, in each arithmetic.

``python -m report layers`` needs a GPU, PyTorch and torchvision. It times what the cost model chooses for each of the
different layers, and PyTorch in the same layout, and writes benchmarks/results/<machine>/layers.json, a row for each
layer, as it goes on. Layers are in float32's accuracy and in 16 bits, those in groups of ``group-layers`` in precision
``tf32`` too, and those of ``step-layers`` in bfloat16 and ``tf32``. What PyTorch is expected to take is fitted to
these (leanconv.torch.expected_time).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product, zip_longest
from pathlib import Path
from time import perf_counter
from typing import Any

from leanconv.bench import machine
from leanconv.bench.results import PEER_LAYOUTS as LAYOUTS
from leanconv.bench.suites import format_problem, parse_problem
from leanconv.call.choose import choose
from leanconv.options import Layout, Precision
from leanconv.plan import Target
from leanconv.problem import ConvProblem
from leanconv.volumes.images import as_images
from report import records
from report.networks import NETWORKS as SHAPES
from report.networks import VIDEOS, memory_format

#: Whose layers are timed, in the sizes of `modes`, by the name of the file.
NETWORKS = {
    "layers": (
        "resnet50", "mobilenet_v3_large", "vgg16", "resnext50_32x4d", "efficientnet_b0", "convnext_tiny", "densenet121",
    ),
    # those in groups of several channels alone
    "group-layers": ("resnext50_32x4d", "regnet_y_1_6gf"),
    "volume-layers": VIDEOS,
    "step-layers": ("resnet50", "unet", "convnext_tiny", "efficientnet_b0"),
}  # fmt: skip
_TF32: tuple[str, Precision] = ("float32", "tf32")
_USUAL: tuple[tuple[str, Precision], ...] = (("float16", "fp32"), ("float32", "fp32"))
#: Types and precisions of the layers of a file, where they are not `_USUAL`.
WAYS = {"group-layers": (*_USUAL, _TF32), "step-layers": (("bfloat16", "fp32"), _TF32)}
PEERS = {
    "torch-fp32": "strict FP32", "torch-tf32": "TF32", "torch-float16": "16 bits", "torch-bfloat16": "16 bits",
}  # fmt: skip
#: Problems that are handed to the tuner together.
_TOGETHER = 24


@dataclass(frozen=True)
class Layer:
    """A layer, and the limit of workspace that a patch gives it."""

    problem: ConvProblem
    limit: int | None


def layers(
    target: Target, networks: Sequence[str], grouped: bool = False, ways: Sequence[tuple[str, Precision]] = _USUAL
) -> list[Layer]:
    """The different layers: of each type, layout, operation and kind of groups in turn, long and short ones; with
    ``grouped`` those in groups of several channels alone."""
    by_kind: dict[Any, dict[ConvProblem, tuple[float, Layer]]] = {}
    for network, (dtype, precision), layout in product(networks, ways, LAYOUTS):
        for problem, limit in _of_network(network, layout, dtype, precision):
            if grouped and (problem.groups == 1 or problem.group_c == 1):
                continue
            kind = problem.dtype, problem.precision, problem.layout, problem.op, problem.groups > 1
            images = as_images(problem)
            cost = choose(images, replace(target, model=""), limit=limit).cost
            by_kind.setdefault(kind, {}).setdefault(images, (cost, Layer(problem, limit)))
    ordered = [[layer for _, layer in sorted(each.values(), key=lambda found: -found[0])] for each in by_kind.values()]
    # of each kind long and short ones in turn, then the kinds in turn
    return _in_turn(*(_in_turn(each[: len(each) // 2], each[len(each) // 2 :]) for each in ordered))


def _in_turn(*lists: list[Layer]) -> list[Layer]:
    return [layer for together in zip_longest(*lists) for layer in together if layer]


def _of_network(
    network: str, layout: Layout, dtype: str, precision: Precision
) -> Iterator[tuple[ConvProblem, int | None]]:
    import torch

    from leanconv.torch.recording import problems_of
    from report import models

    # torchvision's RegNets read values of what they make
    model: Any = models.build(network).train().to("meta")
    with torch.device("meta"):
        x = torch.empty(SHAPES[network], dtype=getattr(torch, dtype))
        form = memory_format(x, layout)
        model, x = model.to(x.dtype, memory_format=form), x.contiguous(memory_format=form)
    for limit, problems in problems_of(model, x, backward=True, precision=precision).items():
        for problem in problems:
            if problem.dtype == dtype and not problem.is_empty:
                yield problem, limit


def measure(results: Path, name: str, seconds: float | None = None, revision: str | None = None) -> Path:
    """Begin no further layers after ``seconds``; returns the results file. Raises WrongResultError, at the end.

    ``name`` is a key of `NETWORKS`. Layers that the file has of this revision stay, so that a second run goes on.
    """
    from leanconv.runtime import launch
    from leanconv.tuning.search import WrongResultError, tune

    begun = perf_counter()
    target = launch.open_device(0).target
    about = records.with_torch(revision)
    path = results / machine.slug(about) / f"{name}.json"
    earlier = records.read(path)
    same = bool(earlier) and earlier["machine"]["git_revision"] == about["git_revision"]
    rows = {(row["problem"], row["limit"]): row for row in (earlier["rows"] if same else ())}
    every = layers(target, NETWORKS[name], name == "group-layers", WAYS.get(name, _USUAL))
    wrong: list[str] = []
    for group in _groups([layer for layer in every if (format_problem(layer.problem), layer.limit) not in rows]):
        left = None if seconds is None else seconds - (perf_counter() - begun)
        if left is not None and left <= 0:
            break
        problems = [layer.problem for layer in group]
        timed = partial(tune, problems, workspace_limit=group[0].limit, most=1, peers=True, seconds=left)
        try:
            done = timed()
        except WrongResultError as error:
            # all other times are in the table: they are read there
            wrong.append(str(error))
            done = timed()
        # a layer of volumes is timed as what computes it, beside PyTorch's convolution of volumes
        given = {as_images(problem): problem for problem in problems}
        for each in done.problems:
            problem = given[each.problem]  # type: ignore[index]
            key = format_problem(problem), group[0].limit
            rows[key] = {
                "problem": key[0], "limit": key[1], "layout": problem.layout, "us": each.us,
                "algorithm": each.winner.algorithm.name,
                # as PyTorch runs with its search, which is what it is expected to take
                "peers": {peer: us for peer, us in each.peers.items() if not peer.endswith("-unsearched")},
            }  # fmt: skip
        took = round(perf_counter() - begun + (earlier.get("seconds", 0) if same else 0), 1)
        records.write(results, name, about, rows.values(), layers=len(every), seconds=took)
    if wrong:
        raise WrongResultError("\n".join(wrong))
    return path


def _groups(every: Sequence[Layer]) -> Iterator[list[Layer]]:
    """Layers of one limit that follow each other closely, as many as are tuned together."""
    for first in range(0, len(every), _TOGETHER):
        part = every[first : first + _TOGETHER]
        for limit in dict.fromkeys(layer.limit for layer in part):
            yield [layer for layer in part if layer.limit == limit]


def section(record: dict[str, Any]) -> str:
    """By operation, kind of layer and PyTorch's arithmetic: how many layers, and times as fast as PyTorch."""
    found: dict[tuple[str, ...], list[float]] = {}
    for row in record["rows"]:
        problem: Any = parse_problem(row["problem"])
        groups = "" if problem.groups == 1 else "depthwise" if problem.group_c == 1 else "grouped"
        # leanconv in TF32 is compared with PyTorch in TF32 alone
        tf32 = problem.precision == "tf32"
        for peer in set(row["peers"]) & ({"torch-tf32"} if tf32 else set(PEERS)):
            key = PEERS[peer] + ", leanconv too" * tf32, groups, problem.op, row["layout"]
            found.setdefault(key, []).append(row["peers"][peer] / row["us"])
    lines = [[*key, str(len(each)), f"{statistics.geometric_mean(each):.2f}", f"{min(each):.2f}"]
             for key, each in sorted(found.items())]  # fmt: skip
    heads = ["PyTorch in", "groups", "operation", "layout", "layers", "× PyTorch", "least"]
    said = f"{records.origin(record['machine'])}. {len(record['rows'])} of {record['layers']} different layers."
    return f"{said}\n\n{records.table((heads, lines))}"
