"""The demo: it runs here, and what it says comes from what it ran."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the demo draws with matplotlib")
Image = pytest.importorskip("PIL.Image", reason="the demo reads a photograph with Pillow")

from leanconv.bench.format import duration  # noqa: E402
from leanconv.cli import demo  # noqa: E402
from leanconv.cpu import CPU_ALGORITHMS  # noqa: E402
from leanconv.kernels import ALGORITHMS  # noqa: E402
from leanconv.runtime.timing import Timing  # noqa: E402
from tests.cases import TARGETS  # noqa: E402


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "gpu_name", lambda: None)


def test_the_tour(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.run(tmp_path / "pictures", quick=True)
    out = capsys.readouterr().out
    assert "results pass the check against float64" in out and "FAIL" not in out
    assert max(len(line) for line in out.partition("pass the check")[0].splitlines()) <= 80, "as wide as a terminal"
    for algorithm in CPU_ALGORITHMS:
        if not algorithm.volumes:
            told = algorithm.name in out
            assert told or (algorithm.solves == "filter2d" and algorithm.name != "opencv"), algorithm.name
    for name in ("filters.png", "layers.png"):
        picture = np.array(Image.open(tmp_path / "pictures" / name).convert("L"))
        assert min(picture.shape) > 250 and picture.std() > 20  # something is drawn
        assert name in out


def test_the_layers_are_sound() -> None:
    photo = demo.photograph()
    assert photo.shape == (3, 600, 512) and photo.min() >= 0 and 200 < photo.max() <= 255
    for name, problem in demo.LAYERS:
        assert problem.p == (problem.h - 1) // problem.stride[0] + 1, name
        assert problem.n <= 4 and not ALGORITHMS[0].reasons(problem, TARGETS[0])


def test_a_wrong_result_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = demo.api.conv2d
    monkeypatch.setattr(demo.api, "conv2d", lambda *a, **o: honest(*a, **o) * np.float32(1.001))
    monkeypatch.setattr(demo, "LAYERS", demo.LAYERS[-1:])
    assert not demo.run(tmp_path, quick=True)
    assert "FAIL: im2col on MobileNet" in capsys.readouterr().out


def test_on_a_gpu(host_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines take part; the launch that is timed is the one that a call makes."""

    def time_once(call: Any, **options: Any) -> Timing:
        call()
        return Timing(5.0, 5.0, 5.0, 1)

    monkeypatch.setattr(demo, "time_gpu", time_once)
    photo = demo.photograph()
    problem = replace(demo.LAYERS[-1][1], h=9, w=9)
    lines = demo.measure_layer("small", problem, photo, True, 0.01)
    assert {line.where for line in lines} == {"CPU", "GPU"} and all(line.passes for line in lines)
    able = [algorithm.stem for algorithm in ALGORITHMS if not algorithm.reasons(problem, TARGETS[0])]
    on_gpu = [line for line in lines if line.where == "GPU"]
    assert [line.algorithm for line in on_gpu] == able and all(line.us == 5.0 for line in on_gpu)
    assert sum(line.chosen for line in on_gpu) == 1
    launches = len(host_device.launches)
    assert launches >= 2 * len(able)
    result, lines = demo.measure_filter("gaussian:5", photo[:, :40, :50].copy(), True, 0.01)
    assert [line.where for line in lines] == ["CPU", "GPU"] and all(line.passes for line in lines)
    assert result.shape == (3, 40, 50)
    assert not host_device.memory, "memory of the device was not given back"
    assert len(host_device.launches) == launches + 2


def test_nan_is_wrong() -> None:
    line = demo.Measured("layer", "name", "CPU", True, 1.0, float("nan"), 1e-6)
    assert not line.passes and replace(line, error=1e-7).passes


def test_durations() -> None:
    assert [duration(us) for us in (0.5, 12.34, 999.4, 1234, 45678, 3.2e6)] == [
        "0.500 µs", "12.3 µs", "999 µs", "1.23 ms", "45.7 ms", "3.20 s",
    ]  # fmt: skip


def test_bars_of_both_places(tmp_path: Path) -> None:
    line = demo.Measured("layer", "implicit_gemm", "GPU", True, 12.0, 1e-7, 1e-6)
    demo.draw_layers([line, replace(line, algorithm="im2col", where="CPU", us=9e3)], "a GPU", tmp_path / "bars.png")
    assert np.array(Image.open(tmp_path / "bars.png").convert("L")).std() > 20
