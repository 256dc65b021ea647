"""The layers of torchvision's networks: their order, rows of several runs in one file, and the page's table."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leanconv.problem import ConvProblem
from leanconv.runtime import launch
from leanconv.tuning import search
from report import layers as study
from report import records
from tests.cases import TARGETS
from tests.tuning_stage import LAYERS, MODEL, Stage, stage

__all__ = ["stage"]


def _rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = records.read(path)["rows"]
    return rows


def layer(k: int, layout: Any = "NCHW") -> study.Layer:
    return study.Layer(ConvProblem(1, 4, 6, 6, k, 3, 3, layout=layout), None)


def test_layers_of_each_kind_come_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")

    def build(name: str) -> Any:
        convolutions = [torch.nn.Conv2d(3, 64, 3, padding=1), torch.nn.Conv2d(64, 64, 3, padding=1, groups=2)]
        return torch.nn.Sequential(*convolutions, *(convolutions[1:] if name == "resnet50" else []))

    monkeypatch.setattr("report.models.build", build)
    found = [each.problem for each in study.layers(TARGETS[0], ("vgg16", "resnet50"))]
    kinds = [(each.dtype, each.layout, each.op, each.groups > 1) for each in found]
    # of groups three operations, of the others two, as nobody asks for the gradient of an image
    assert len(found) == len(set(kinds)) == 2 * 2 * 5
    assert {each.n for each in found} == {64}
    # those in groups alone, in TF32 too, of which 16 bits have nothing
    grouped = [
        each.problem for each in study.layers(TARGETS[0], ("vgg16", "resnet50"), True, study.WAYS["group-layers"])
    ]
    ways = {(each.dtype, each.precision) for each in grouped}
    assert ways == {("float16", "fp32"), ("float32", "fp32"), ("float32", "tf32")}
    assert len(grouped) == 3 * 2 * 3 and all(each.groups == 2 for each in grouped)


def test_layers_in_tf32_stand_beside_tf32() -> None:
    layer = ConvProblem(1, 8, 6, 6, 8, 3, 3, groups=2)
    peers = {"torch-fp32": 30.0, "torch-tf32": 8.0}
    rows = [{"problem": study.format_problem(each), "layout": "NCHW", "us": 4.0, "peers": peers}
            for each in (layer, replace(layer, precision="tf32"))]  # fmt: skip
    machine = {"gpu": "NVIDIA X", "git_revision": "a", "date": "2026-11-22"}
    text = study.section({"rows": rows, "layers": 2, "machine": machine})
    assert "| TF32 | grouped | fprop | NCHW | 1 | 2.00 | 2.00 |" in text
    assert "| TF32, leanconv too | grouped | fprop | NCHW | 1 | 2.00 | 2.00 |" in text
    assert text.count("| strict FP32 |") == 1


def test_layers_of_videos_are_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")

    def build(name: str) -> Any:
        return torch.nn.Sequential(
            torch.nn.Conv3d(3, 8, (1, 7, 7), padding=(0, 3, 3)), torch.nn.Conv3d(8, 16, (3, 1, 1), padding=(1, 0, 0))
        )

    monkeypatch.setattr("report.models.build", build)
    found = study.layers(TARGETS[0], ("r3d_18",))
    kinds = {(each.problem.dtype, each.problem.layout, each.problem.op) for each in found}
    assert len(kinds) == 12 and len(found) == 20, "the gradient of the first layer's input is wanted by nobody"
    # layers of volumes, whatever computes them: PyTorch's own convolution of them is timed beside that
    assert all(each.problem.is_volume and each.problem.n * each.problem.d == 128 for each in found)


def test_groups_have_one_limit_and_keep_the_order() -> None:
    every = [layer(8 * i) for i in range(1, 31)]
    for each in (3, 29):
        every[each] = replace(every[each], limit=1 << 20)
    groups = list(study._groups(every))
    assert [len(group) for group in groups] == [23, 1, 5, 1] and groups[1] == [every[3]]
    assert sum(groups, []) != every and {id(each) for group in groups for each in group} == {id(each) for each in every}


def test_a_second_run_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first run has time for one group; the second, of the same revision, for the rest."""
    pytest.importorskip("torch")
    every = [layer(8), layer(16), layer(8, "NHWC")]
    monkeypatch.setattr(study, "layers", lambda target, networks, grouped, ways: every)
    monkeypatch.setattr(study, "_TOGETHER", 2)
    monkeypatch.setattr(launch, "open_device", lambda index: SimpleNamespace(target=TARGETS[0]))
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(__version__="0.1"))
    asked: list[int] = []
    revision = "first"

    def tune(problems: list[ConvProblem], **how: Any) -> Any:
        assert how["peers"] and how["most"] == 1 and how["seconds"] <= 100
        asked.append(len(problems))
        winner = SimpleNamespace(algorithm=SimpleNamespace(name="tensor_gemm"))
        peers = {"torch-fp32": 30.0, "torch-tf32": 8.0, "torch-fp32-unsearched": 40.0}
        made = [SimpleNamespace(problem=p, winner=winner, us=10.0, peers=peers) for p in problems]
        return SimpleNamespace(problems=made)

    def described(*_: Any) -> dict[str, Any]:
        return {"gpu": "NVIDIA X", "git_revision": revision, "date": "2026-11-22", "torch": "2.11"}

    monkeypatch.setattr(search, "tune", tune)
    monkeypatch.setattr(study.machine, "describe", described)
    clock = iter([0.0, 1.0, 2.0, 101.0])
    monkeypatch.setattr(study, "perf_counter", lambda: next(clock))
    path = study.measure(tmp_path, "layers", 100)
    assert [row["problem"] for row in _rows(path)] == [study.format_problem(each.problem) for each in every[:2]]
    assert "2 of 3 different layers" in study.section(records.read(path))

    monkeypatch.setattr(study, "perf_counter", lambda: 0.0)
    assert study.measure(tmp_path, "layers", 100) == path
    assert asked == [2, 1] and len(_rows(path)) == 3
    text = study.section(records.read(path))
    assert "2026-11-22, revision first. 3 of 3 different layers." in text
    assert "| TF32 |  | fprop | NCHW | 2 | 0.80 | 0.80 |" in text
    assert "| strict FP32 |  | fprop | NHWC | 1 | 3.00 | 3.00 |" in text and "unsearched" not in text
    revision = "second"
    study.measure(tmp_path, "layers", 100)
    assert asked == [2, 1, 2, 1]


def test_the_tuner_fills_the_rows(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command on a GPU that a test holds, where PyTorch has none."""
    pytest.importorskip("torch")
    monkeypatch.setattr(study, "_of_network", lambda *given: ((each, None) for each in LAYERS))
    monkeypatch.setattr(study.machine, "describe", lambda *_: {"gpu": MODEL, "git_revision": "a", "date": "2026-11-22"})
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(__version__="0.1"))
    path = study.measure(tmp_path / "results", "layers", 100)
    rows = _rows(path)
    assert {row["problem"] for row in rows} == {study.format_problem(each) for each in LAYERS}
    assert all(row["us"] == 300 for row in rows)
    assert "3 of 3 different layers." in study.section(records.read(path))
