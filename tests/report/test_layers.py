"""The layers of torchvision's networks: their order, rows of several runs in one file, and the page's tables."""

from __future__ import annotations

import sys
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


def layer(k: int, layout: Any = "NCHW", **shares: float) -> study.Layer:
    return study.Layer(ConvProblem(1, 4, 6, 6, k, 3, 3, layout=layout), None, shares)


def test_the_layers_of_a_model_come_by_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")

    def build(name: str) -> Any:
        convolutions = [torch.nn.Conv2d(3, 64, 3, padding=1), torch.nn.Conv2d(64, 64, 3, padding=1, bias=False)]
        return torch.nn.Sequential(*convolutions, *(convolutions[1:] if name == "resnet18" else []))

    monkeypatch.setattr("report.models.build", build)
    found = study.layers(TARGETS[0], ("vgg16", "resnet18"))
    assert {(each.problem.c, each.problem.layout) for each in found[:2]} == {(64, "NCHW"), (64, "NHWC")}
    assert len(found) == 4 and all(set(each.shares) == {"vgg16", "resnet18"} for each in found)
    shares = [max(each.shares.values()) for each in found]
    assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(2, abs=1e-4)


def test_layers_of_videos_are_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")

    def build(name: str) -> Any:
        return torch.nn.Sequential(
            torch.nn.Conv3d(3, 8, (1, 7, 7), padding=(0, 3, 3)), torch.nn.Conv3d(8, 16, (3, 1, 1), padding=(1, 0, 0))
        )

    monkeypatch.setattr("report.models.build", build)
    found = study.other_layers(TARGETS[0], ("r3d_18",))
    kinds = {(each.problem.dtype, each.problem.layout, each.problem.op) for each in found}
    assert len(kinds) == 12 and len(found) == 20, "the gradient of the first layer's input is wanted by nobody"
    assert all(each.problem.is_volume and each.problem.n == 8 and each.problem.d == 16 for each in found)


def test_groups_have_one_limit_and_keep_the_order() -> None:
    every = [layer(8 * i) for i in range(1, 31)]
    every[3].limit = every[29].limit = 1 << 20
    groups = list(study._groups(every))
    assert [len(group) for group in groups] == [23, 1, 5, 1] and groups[1] == [every[3]]
    assert sum(groups, []) != every and {id(each) for group in groups for each in group} == {id(each) for each in every}


def test_rows_of_earlier_runs_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first run has time for one group; the second times another layer anew, and finds the rest in its table."""
    pytest.importorskip("torch")
    every = [layer(8, vgg16=0.6, resnet18=0.2), layer(16, vgg16=0.4), layer(8, "NHWC", resnet18=0.3)]
    monkeypatch.setattr(study, "layers", lambda target: every)
    monkeypatch.setattr(study, "_TOGETHER", 2)
    monkeypatch.setattr(launch, "open_device", lambda index: SimpleNamespace(target=TARGETS[0]))
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(__version__="0.1"))
    timed: dict[Any, int] = {each.problem: 4 for each in every[:2]}
    revision = "first"

    def tune(problems: list[ConvProblem], **how: Any) -> Any:
        assert how["peers"] and how["seconds"] <= 100
        winner = SimpleNamespace(algorithm=SimpleNamespace(name="tensor_gemm"))
        peers = {"torch-fp32": 30.0, "torch-tf32": 8.0}
        made = [
            SimpleNamespace(problem=p, winner=winner, us=10.0, model_us=10.0, timed=timed.get(p, 0), peers=peers)
            for p in problems
        ]
        return SimpleNamespace(problems=made)

    def described(*_: Any) -> dict[str, Any]:
        return {"gpu": "NVIDIA X", "git_revision": revision, "date": "2026-11-22", "torch": "2.11"}

    monkeypatch.setattr(search, "tune", tune)
    monkeypatch.setattr(study.machine, "describe", described)
    clock = iter([0.0, 1.0, 101.0])
    monkeypatch.setattr(study, "perf_counter", lambda: next(clock))
    path = study.measure(tmp_path, 100)
    assert [row["problem"] for row in _rows(path)] == [study.format_problem(each.problem) for each in every[:2]]

    revision, timed = "second", {every[1].problem: 3}
    monkeypatch.setattr(study, "perf_counter", lambda: 0.0)
    assert study.measure(tmp_path, 100) == path
    rows = _rows(path)
    assert [row["revision"] for row in rows] == ["first", "second", records.EARLIER]
    text = study.section(records.read(path))
    assert "2026-11-22, revision first; 2026-11-22, revision second. 3 of 3 different layers are tuned." in text
    assert "are 3.00 times as fast" in text and "; 0 are below 0.97" in text
    assert "| vgg16 | NCHW | 2 | 3.00 | 3.00 | 0.80 | 0.80 | 0 |" in text
    assert "| resnet18 | NHWC | 1 | 3.00 |" in text and "| all different layers | NCHW | 2 |" in text


def test_the_tuner_fills_the_rows(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command on a GPU that a test holds, where PyTorch has none; the second run finds all in the table."""
    pytest.importorskip("torch")
    monkeypatch.setattr(study, "_of_network", lambda network, layout: ((each, None) for each in LAYERS))
    monkeypatch.setattr(study.machine, "describe", lambda *_: {"gpu": MODEL, "git_revision": "a", "date": "2026-11-22"})
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(__version__="0.1"))
    path = study.measure(tmp_path / "results", 100)
    rows = _rows(path)
    assert {row["problem"] for row in rows} == {study.format_problem(each) for each in LAYERS}
    assert all((row["us"], row["revision"]) == (300, "a") and set(row["shares"]) == set(study.NETWORKS) for row in rows)
    path.unlink()
    assert {row["revision"] for row in _rows(study.measure(tmp_path / "results"))} == {records.EARLIER}
    assert "revision a. 3 of 3 different layers are tuned." in study.section(records.read(path))


def test_the_committed_record_is_of_known_layers() -> None:
    for path in (Path(__file__).resolve().parents[2] / "benchmarks" / "results").glob("*/torchvision-layers.json"):
        record = records.read(path)
        assert 0 < len(record["rows"]) <= record["layers"]
        assert all(set(row["shares"]) <= set(study.NETWORKS) and row["us"] > 0 for row in record["rows"])
