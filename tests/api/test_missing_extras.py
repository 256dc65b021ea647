"""Every command of the command line where an extra is not installed: it does without, or names the extra."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanconv.bench import machine
from leanconv.cli.command_line import FAILED
from leanconv.runtime import cache
from tests.messages import line_of

WORDS = "conv:c4,h12,k6,r3,pad1"
OPTIONAL = (
    "PIL",
    "matplotlib",
    "scipy",
    "torch",
    "cupy",
    "cv2",
    "cuda",
    "ml_dtypes",
    "dask",
    "imagecodecs",
    "tifffile",
)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``without("PIL")`` makes it a library that is not installed."""

    def without(*names: str) -> None:
        for module in list(sys.modules):
            if module.partition(".")[0] in names:
                monkeypatch.delitem(sys.modules, module)
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)

    return without


def test_pictures_name_the_extra_and_arrays_do_without(run: Any, tmp_path: Path, without: Any) -> None:
    (tmp_path / "in.png").touch()
    np.save(tmp_path / "in.npy", np.ones((4, 4), np.float32))
    without(*OPTIONAL)
    for source, target in (("in.png", "out.npy"), ("in.npy", "out.png")):
        code, _, err = run("filter", tmp_path / source, tmp_path / target, "-k", "box:3")
        assert code == FAILED and "pip install 'leanconv[pictures]'" in line_of(err), err
    assert run("filter", tmp_path / "in.npy", tmp_path / "out.npy", "-k", "box:3")[0] == 0


def test_plots_name_the_extra_before_anything_is_measured(
    run: Any, tmp_path: Path, without: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("leanconv.bench.run._measure", lambda *arguments: pytest.fail("it measured"))
    without("matplotlib", "PIL")
    code, _, err = run("bench", WORDS, "--device", "cpu", "--plot", "bars.png")
    assert code == FAILED and "plots need matplotlib: pip install 'leanconv[bench]'" in line_of(err)
    code, _, err = run("demo", "--out", tmp_path / "demo")
    assert code == FAILED and "pip install 'leanconv[bench]'" in line_of(err)
    assert not [*tmp_path.glob("**/*.*")]


def test_the_other_commands_do_without(run: Any, tmp_path: Path, without: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    without(*OPTIONAL)
    assert run("explain", WORDS, "--device", "cpu")[0] == 0
    assert run("cache")[0] == 0
    code, out, err = run("bench", WORDS, "--quick", "--device", "cpu", "--out", "r.json")
    assert code == 0 and "im2col" in out, err


def test_what_a_gpu_needs_is_named(without: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "why_no_gpu", lambda: None)
    monkeypatch.setattr("leanconv.bench.peers.base.missing_cuda_torch", lambda: None)
    without("cuda")
    usable, why = machine.gpu_usable()
    assert not usable and "leanconv[cu13]" in why
    assert "leanconv[cu13]" in str(cache._no_compiler(ImportError("No module named 'cuda'")))
    monkeypatch.undo()
    without("torch")
    usable, why = machine.gpu_usable()
    assert not usable and "pip install 'leanconv[torch]'" in why
