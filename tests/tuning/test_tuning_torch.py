"""Tuned layers under a patch: PyTorch's measured time decides, and tuning changes what has been decided before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.stand_ins import HostDevice, patched_cpu
from tests.tuning_stage import LAYER, Stage, stage

torch = pytest.importorskip("torch")

import leanconv.torch  # noqa: E402
from leanconv.torch import deciding, measured_time, registration  # noqa: E402
from leanconv.torch.expected_time import engine  # noqa: E402
from leanconv.tuning import search  # noqa: E402

__all__ = ["stage"]


@pytest.fixture
def taken(torch_on_device: HostDevice, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with patched_cpu(monkeypatch), leanconv.torch.enable() as active:
        yield active


@pytest.mark.parametrize("us, runs", [(310.0, "leanconv"), (290.0, "PyTorch")])
def test_pytorch_keeps_what_it_was_quicker_with(
    taken: Any, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, us: float, runs: str
) -> None:
    layer = torch.nn.Conv2d(4, 8, 3, padding=1, bias=False)
    x = torch.randn(1, 4, 6, 6)
    monkeypatch.setattr(measured_time, "times", lambda problem, clock: {"torch-tf32": us, "torch-fp32": 1.0})
    with torch.no_grad(), leanconv.record_tuning(peers=True) as recorded:
        first = layer(x)
    assert recorded.problems == (LAYER,) and taken.report().lines[-1].runs.startswith("leanconv")
    assert "is expected to take" in taken.report().lines[-1].why
    with torch.no_grad():
        torch.testing.assert_close(layer(x), first)
    line = taken.report().lines[-1]
    assert line.runs.startswith(runs) and "in TF32 when both were timed" in line.why
    assert f"{300 / us:.2f}" in line.why


def test_layers_of_volumes_are_recorded_as_pytorch_computes_them(
    taken: Any, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """leanconv computes them as images."""
    layer, x = torch.nn.Conv3d(4, 8, (3, 1, 1), padding=(1, 0, 0), bias=False), torch.randn(1, 4, 3, 2, 3)
    asked: list[Any] = []
    monkeypatch.setattr(measured_time, "times", lambda problem, clock: asked.append(problem) or {"torch-tf32": 310.0})
    with torch.no_grad(), leanconv.record_tuning(peers=True) as recorded:
        layer(x)
    (volume,) = recorded.problems
    assert (volume.d, volume.t, volume.w) == (3, 3, 3) and asked == [volume]
    assert [each.problem.is_volume for each in recorded.results[0].problems] == [False]
    with torch.no_grad():
        layer(x)
    assert "when both were timed" in taken.report().lines[-1].why


@pytest.mark.parametrize("searches, runs", [(True, "PyTorch"), (False, "leanconv")])
def test_pytorchs_time_is_that_of_its_own_switch(
    taken: Any, stage: Stage, monkeypatch: pytest.MonkeyPatch, searches: bool, runs: str
) -> None:
    """Without its search PyTorch is slower; what was timed with it alone holds for both."""
    layer, x = torch.nn.Conv2d(4, 8, 3, padding=1, bias=False), torch.randn(1, 4, 6, 6)
    found = {"torch-tf32": 290.0, "torch-tf32-unsearched": 400.0}
    monkeypatch.setattr(measured_time, "times", lambda problem, clock: found)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", searches)
    with torch.no_grad(), leanconv.record_tuning(peers=True):
        layer(x)
    with torch.no_grad():
        layer(x)
    assert taken.report().lines[-1].runs.startswith(runs)


def test_pytorch_is_timed_as_it_is_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways where its search is off, once where it is on; afterwards the switches are as they were."""
    used: list[tuple[bool, bool]] = []
    cudnn = torch.backends.cudnn

    class Clock:
        cache_bytes = 1

        def sample(self, calls: Any) -> float:
            used.append((cudnn.benchmark, cudnn.allow_tf32))
            return 5.0 if cudnn.benchmark else 9.0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 1))
    monkeypatch.setattr(measured_time, "_call", lambda problem, seed: lambda: None)
    for searches in (False, True):
        monkeypatch.setattr(cudnn, "benchmark", searches)
        found = measured_time.times(LAYER, Clock())  # type: ignore[arg-type]
        assert cudnn.benchmark is searches
        assert {name: us for name, us in found.items() if "un" not in name} == {"torch-fp32": 5.0, "torch-tf32": 5.0}
        assert len(found) == (2 if searches else 4) and set(found.values()) == ({5.0} if searches else {5.0, 9.0})
    assert {(True, True), (False, True), (True, False), (False, False)} == set(used)


def test_a_patch_can_be_suspended(taken: Any) -> None:
    """So that PyTorch's time is PyTorch's."""
    layer, x = torch.nn.Conv2d(4, 8, 3), torch.randn(1, 4, 6, 6)
    with torch.no_grad():
        with registration.suspended():
            layer(x)
            assert deciding.current() is None
        assert not taken.report().lines
        layer(x)
    assert len(taken.report().taken) == 1


def test_every_layer_of_a_model_is_found_without_running_it() -> None:
    from leanconv.torch.recording import problems_of

    model = torch.nn.Sequential(
        torch.nn.Conv2d(4, 8, 1), torch.nn.ConvTranspose2d(8, 2, 2, 2), torch.nn.Conv2d(2, 2, 3)
    )
    with torch.device("meta"):
        x = torch.empty(3, 4, 6, 6)
    for form, layout in ((torch.contiguous_format, "NCHW"), (torch.channels_last, "NHWC")):
        found = problems_of(model.to("meta").to(memory_format=form), x.contiguous(memory_format=form))
        assert {problem.layout for each in found.values() for problem in each} == {layout}
        assert [problem.op for problem in found[None]].count("fprop") == 3, "the gradient of one is a forward pass"
        assert {problem.op for problem in found[32 << 20]} == {"wgrad"} and len(found[32 << 20]) == 3
    found = problems_of(model.eval(), x)
    assert found.keys() == {None}
    same = torch.nn.Sequential(model, torch.nn.Conv2d(2, 2, 3, padding="same", device="meta")).eval()
    found = problems_of(same, x)
    with torch.inference_mode():
        assert problems_of(same, x) == found and len(found[None]) == 4


def test_pytorch_is_timed_by_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [engine(LAYER, tf32) for tf32 in (False, True)] == ["torch-fp32", "torch-tf32"]
    assert engine(replace(LAYER, dtype="float16"), True) == "torch-float16"
    assert engine(LAYER, True, searched=False) == "torch-tf32-unsearched"
    clock: Any = None
    assert measured_time.times(replace(LAYER, layout="CHWN"), clock) == {}
    assert torch.cuda.is_available() or measured_time.times(LAYER, clock) == {}
    assert "torch" in measured_time.versions()
    times = search._pytorch(False), search._pytorch(True)
    assert times[0] is None and times[1] is not None
