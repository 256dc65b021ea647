"""The tensor-core kernels without one part: what they compute; the meter; the record and what pages make of it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanconv.bench import columns
from leanconv.cpu import oracle
from leanconv.problem import ConvProblem
from leanconv.runtime.compile import compile_launch
from report import energy
from research import pages
from research import tensor_ablation as study
from tests import emulator
from tests.cases import TARGETS
from tests.made_up import ABOUT, filled

HOPPER = TARGETS[0]
RESULTS = Path(__file__).resolve().parents[2] / "research" / "results"
LAYER = ConvProblem(1, 256, 6, 8, 64, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", precision="fp32")
#: Errors of 2304 products that each part leaves, at least and at most.
ERRORS = {
    study.WHOLE: (1e-7, 2e-7),
    "one product": (2e-4, 4e-4),
    "two products": (1e-4, 3e-4),
    "one scale": (1e-7, 2e-7),
    "sums in the tensor core": (2e-6, 1e-5),
    "no turns": (1e-7, 2e-7),
}


def kernels() -> dict[tuple[str, str], Any]:
    """The plans whose results mean something, by algorithm and part."""
    every = {(name, part): plan for name in study.TAKEN_APART for part, plan in study.plans(name, LAYER, HOPPER)}
    return {key: plan for key, plan in every.items() if study.PARTS[key[1]].right}


def error(plan: Any, scale: float = 1.0) -> float:
    """A plan's error on normal data, with pixels times ``scale``."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(LAYER.x_shape) * scale).astype(np.float32)
    w = rng.standard_normal(LAYER.w_shape).astype(np.float32)
    y = np.full(LAYER.y_shape, np.nan, np.float32)
    emulator.run_plan(plan, {"x": x, "w": w, "bias": None, "y": y}, orders=("ascending",))
    exact = oracle.conv2d(LAYER, x, w)
    return float(np.linalg.norm(y - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("key", kernels(), ids="-".join)
def test_what_is_left_without_a_part(key: tuple[str, str]) -> None:
    least, most = ERRORS[key[1]]
    assert least < error(kernels()[key]) < most
    if key[1] == "one scale":
        # It is the search for the largest value that small pixels need.
        assert error(kernels()[key], 2.0**-24) > 1e-4 > 1e-6 > error(kernels()[key[0], study.WHOLE], 2.0**-24)


#: With two rows of outputs that share states, and without; each block has several tiles.
ENDING = ConvProblem(4, 64, 8, 32, 64, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", precision="fp32")
FEW = replace(HOPPER, multiprocessors=2)


def meaningless() -> list[Any]:
    found = []
    for name in study.TAKEN_APART:
        for layer in (ENDING, replace(ENDING, k=128)):
            for part, plan in study.plans(name, layer, FEW):
                if not study.PARTS[part].right:
                    found.append(pytest.param(layer, plan, id=f"{name}-{layer.k}-{part}"))
    return found


@pytest.mark.parametrize(("layer", "plan"), meaningless())
def test_what_means_nothing_ends_all_the_same(layer: ConvProblem, plan: Any) -> None:
    """Producers declare as many stages full as are taken: a block would wait for ever."""
    x, w = np.ones(layer.x_shape, np.float32), np.ones(layer.w_shape, np.float32)
    y = np.zeros(layer.y_shape, np.float32)
    emulator.run_plan(plan, {"x": x, "w": w, "bias": None, "y": y}, orders=("ascending",))


def test_every_part_is_another_kernel_and_the_whole_one_is_a_calls() -> None:
    for name in study.TAKEN_APART:
        for layer, problem in study.PART_LAYERS.items():
            made = dict(study.plans(name, problem, HOPPER))
            (whole,) = made[study.WHOLE].launches
            assert whole.header == f"kernels/hopper_fp32/{name}.cuh" and whole.cluster == 1
            launches = [plan.launches for plan in made.values()]
            assert len(set(launches)) == len(launches) >= len(study.PARTS) - 1, (name, layer)


@pytest.mark.parametrize("name", study.TAKEN_APART)
def test_parts_compile(name: str) -> None:
    for problem in study.PART_LAYERS.values():
        for part, plan in study.plans(name, problem, HOPPER):
            code = compile_launch(plan.launches[0], "sm_90a")
            assert not code.advice and code.spill_bytes <= 200, part


def test_power_is_that_between_steps_of_the_counter() -> None:
    joules = [(0.01 * i, float(5 * (i // 10))) for i in range(100)]
    assert energy.watts(joules, True) == pytest.approx(50)
    assert energy.watts(joules[:15], True) is None, "one step tells nothing"
    assert energy.watts([(0.0, 1.0)], True) is None
    assert energy.watts([(0.0, 100.0), (1.0, 300.0), (2.0, 500.0)], False) == 400, "samples of the second half"


class Wall:
    """An event and a meter on the clock of the host: 100 W."""

    counts = True

    def __init__(self, **_: Any) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Wall) -> float:
        return (other.at - self.at) * 1e3

    def read(self) -> float:
        return 100 * time.perf_counter()

    def clock_mhz(self) -> float:
        return 1500.0


def test_work_has_time_power_and_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "Event", Wall)
    call = lambda: time.sleep(0.001)  # noqa: E731
    work = energy.at_work(call, Wall(), warm_s=0.02, run_s=0.1)
    assert 1000 < work.us < 20000 and work.mhz == 1500
    assert work.watts == pytest.approx(100, rel=0.02)
    alone = energy.at_work(call, None, warm_s=0.0, run_s=0.02)
    assert (alone.watts, alone.mhz) == (None, None) and 1000 < alone.us < 20000
    assert energy.idle(None, 1) is None and energy.idle(Wall(), 0.1) == pytest.approx(100, rel=0.05)


def test_without_a_meter_the_reason_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any) -> None:
        raise OSError("no libnvidia-ml.so.1")

    monkeypatch.setattr(energy.NvmlMeter, "__init__", broken)
    assert energy.open_meter() == (None, "none (OSError: no libnvidia-ml.so.1)")


def made_up(watts: float | None = 500.0) -> dict[str, Any]:
    """A record with every row."""
    figures = {"sustained_us": 600.0, "watts": watts, "mhz": watts and 1500.0, "error": 1.7e-7}
    parts = [
        {"problem": layer, "algorithm": name, "part": part, "us": 500.0, **figures, "registers": 168, "spill_bytes": 0}
        for layer, problem in study.PART_LAYERS.items()
        for name in study.TAKEN_APART
        for part, _ in study.plans(name, problem, HOPPER)
    ]
    labels = {
        layer: [label for label, asked, name in study._own_engines(p) if not study._unable(name, asked, HOPPER)]
        for layer, p in study.ENERGY_LAYERS.items()
    }
    rows = [
        {"problem": layer, "engine": label, "algorithm": "a", **figures}
        for layer, own in labels.items()
        for label in (*own, *study.PEER_ENGINES.values())
    ]
    words = {name: study.format_problem(problem) for name, problem in study.ENERGY_LAYERS.items()}
    meter = "the driver's energy counter" if watts else "none (ImportError)"
    return {
        "machine": ABOUT, "meter": meter, "idle_watts": watts and 90.0, "problems": words, "parts": parts,
        "energy": rows,
    }  # fmt: skip


def test_missing_rows_are_named() -> None:
    record = made_up()
    assert study.missing(record, HOPPER) == []
    lost = record["parts"].pop(1)
    assert study.missing(record, HOPPER) == [f"{lost['problem']}, {lost['algorithm']}, {lost['part']}"]
    record["energy"] = [row for row in record["energy"] if row["engine"] != "implicit_gemm, fp32"]
    assert "3×3, 256, implicit_gemm, fp32" in study.missing(record, HOPPER)
    assert not any("1×1, 256, tensor_winograd" in each for each in study.missing(record, HOPPER)), "it cannot run"


def test_the_committed_record_is_whole() -> None:
    for path in RESULTS.glob("*/tensor-ablation.json"):
        record = columns.read(path)
        assert study.missing(record, HOPPER) == [], path


@pytest.mark.parametrize("watts", [500.0, None])
def test_pages_have_tables_and_pictures(tmp_path: Path, watts: float | None) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "nvidia-x" / "tensor-ablation.json"
    file.parent.mkdir()
    file.write_text(json.dumps(made_up(watts)), encoding="utf-8")
    blocks = (f"{what} tensor-ablation" for what in ("parts-figure", "parts", "energy-figure", "energy"))
    page = filled(tmp_path, *blocks, by=pages)
    for what in ("parts", "energy"):
        assert (tmp_path / f"nvidia-x-tensor-ablation-{what}.png").stat().st_size > 10000
    flops = study.PART_LAYERS["3×3, 256"].flops
    assert f"| {flops / 500 * 1e-6:.0f} / {flops / 600 * 1e-6:.0f} | 1.00 | " in page
    picojoules = 500 * 600e-6 / flops * 1e12
    if watts:
        assert f"| 500 | 1500 | {500 * 600e-6:.3f} | {picojoules:.2f} | 1.7e-7 |" in page
        assert "draws 90 W" in page
    else:
        assert "| – | – | – | – | 1.7e-7 |" in page
