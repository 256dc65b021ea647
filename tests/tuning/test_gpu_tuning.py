"""Tuning on a GPU: times, values, and what is chosen afterwards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import leanconv
from leanconv.call.choose import choose
from leanconv.perf import tables
from leanconv.perf.tables import Table
from leanconv.runtime import launch
from leanconv.runtime.timing import GpuClock
from leanconv.tuning.verify import verify

pytestmark = pytest.mark.gpu

PROBLEMS = (
    leanconv.ConvProblem(2, 32, 30, 30, 48, 3, 3, padding=(1, 1, 1, 1), layout="NHWC"),
    leanconv.ConvProblem(2, 32, 30, 30, 48, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", op="wgrad", bias=True),
    leanconv.ConvProblem(2, 32, 30, 30, 48, 3, 3, padding=(1, 1, 1, 1), op="dgrad", accumulate=True),
    leanconv.FilterProblem(1, 200, 300, 5, 5, (2, 2), x_pitch=300, x_step=60000, y_pitch=300, y_step=60000),
)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("LEANCONV_TUNING_DIR", str(tmp_path))
    tables.forget()
    return tmp_path


def test_problems_are_tuned_chosen_by_and_verified(folder: Path, rng: np.random.Generator) -> None:
    x, w = rng.standard_normal((2, 30, 30, 32), np.float32), rng.standard_normal((48, 3, 3, 32), np.float32)
    before = leanconv.conv2d(x, w, padding=1, layout="NHWC", device="cuda")
    done = leanconv.tune(PROBLEMS, most=4, peers=False)
    assert [each.timed > 0 for each in done.problems] == [True] * len(PROBLEMS)
    device = launch.open_device(0)
    for problem, each in zip(PROBLEMS, done.problems, strict=True):
        chosen = choose(problem, device.target)
        assert (chosen.source, chosen.us) == (tables.USER, each.us) and 1 < each.us < 1e4
    assert leanconv.tune(PROBLEMS, most=4, peers=False).timed == 0
    after = leanconv.conv2d(x, w, padding=1, layout="NHWC", device="cuda")
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-3)
    table = Table.read(tables.path_of(folder, device.target.model))
    with GpuClock.opened(0) as clock:
        verdicts = list(verify(table, device.target, device, clock))
    assert [verdict.why for verdict in verdicts] == [""] * len(PROBLEMS)


def test_pytorch_is_timed_beside(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    done = leanconv.tune(PROBLEMS[:3], most=1, peers=True)
    peers = {f"torch-{kind}{way}" for kind in ("fp32", "tf32") for way in ("", "-unsearched")}
    assert [set(each.peers) for each in done.problems] == [peers] * 3
    assert all(1 < us < 1e4 for each in done.problems for us in each.peers.values())
