"""The fit of cost models to tables: what it finds, what it is told of, and that the choice obeys it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from leanconv.bench import candidates, columns
from leanconv.call.choose import by_model
from leanconv.call.explain import NOMINAL
from leanconv.kernels import cost
from leanconv.perf import tables
from leanconv.perf.tables import Entry, Table, Timed
from leanconv.problem import ConvProblem
from leanconv.tuning.trials import candidates_of
from leanconv.words import format_problem
from report import refit
from tests import made_up
from tests.variants import NAMED, VARIANTS

ROOT = Path(__file__).resolve().parents[2]
LAYER = ConvProblem(32, 256, 14, 14, 256, 3, 3, padding=(1, 1, 1, 1), layout="NHWC")
LAYERS = [replace(LAYER, n=n) for n in range(8, 80, 8)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A table in which tensor_winograd took twice what it predicts, and all others what they do."""
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "perf")
    cost.known.cache_clear()
    plain = replace(NOMINAL, model="")
    entries = {}
    for layer in LAYERS:
        timed = []
        for each in candidates_of(layer, plain, None):
            us = each.cost / refit.CYCLES * (2 if each.algorithm.name == "tensor_winograd" else 1)
            timed.append(Timed(each.algorithm.stem, dict(each.config.constants()), us, {"": "0"}))  # type: ignore[union-attr]
        won = min(timed, key=lambda each: each.us or 0)
        entries[format_problem(layer)] = Entry(
            tuple(timed), {"auto": won}, {"torch-fp32": 3 * (won.us or 0)}, "torch 9"
        )
    path = tmp_path / "results" / "nvidia-h200" / refit.TIMED
    tables.update(path, Table(tables.gpu_record(NOMINAL), entries))
    yield path.parent
    cost.known.cache_clear()


def _over(name: str, layer: ConvProblem) -> float:
    """What is expected of the quickest configuration, over what it predicts."""
    algorithm = NAMED[name]
    cycles = algorithm.within(layer, NOMINAL)[0][0]
    return cost.fitted(algorithm, layer, NOMINAL).cycles(cycles) / cycles


def test_a_fit_is_found_and_obeyed(folder: Path, tmp_path: Path) -> None:
    assert by_model(LAYER, NOMINAL).algorithm.name == "tensor_winograd"
    table = (folder / refit.TIMED).read_text()
    written = refit.measure(tmp_path / "results")
    assert (folder / refit.TIMED).read_text() != table, "it is kept in columns"
    assert written == [tmp_path / "perf" / "nvidia-h200" / "fits.json", folder / "tuning.json"]
    assert 1.7 < _over("tensor_winograd", LAYER) < 2, "drawn to no fit: nine layers are few"
    assert _over("tensor_gemm", LAYER) == pytest.approx(1)
    assert by_model(LAYER, NOMINAL).algorithm.name == "tensor_gemm"
    assert by_model(LAYER, replace(NOMINAL, model="")).algorithm.name == "tensor_winograd", "of that GPU alone"
    assert by_model(replace(LAYER, op="dgrad"), NOMINAL).algorithm.name == "tensor_gemm", "the same kernel"
    assert _over("tensor_winograd", replace(LAYER, precision="tf32")) == 1, "not measured"
    record = columns.read(written[1])
    assert record["without a fit"]["mean"] > 1.05 and record["fitted to others"]["worst"] == pytest.approx(1)
    page = made_up.filled(tmp_path / "results", "tuning tuning")
    assert "| tensor_gemm NHWC fprop | " in page
    assert "NVIDIA H200: 9 problems" in page and "| tensor_winograd NHWC fprop | " in page


def test_times_of_earlier_kernels_are_left_out_where_others_suffice(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table.read(folder / refit.TIMED)
    every = refit.points(table, NOMINAL)
    assert every and {point.age for point in every} == {1}
    kernels = {True: {"": "0"}, False: {"": "new"}}
    monkeypatch.setattr(tables, "kernels_of", lambda plan: kernels["winograd" in plan.launches[0].header])
    monkeypatch.setattr(refit, "_ENOUGH", 9)
    some = refit.points(table, NOMINAL)
    assert len(some) == len(every), "others have no times of today's kernels"
    assert {p.age for p in some if "winograd" in p.algorithm} == {0}
    monkeypatch.setattr(tables, "kernels_of", lambda plan: kernels[plan.launches[0].block == 384])
    fewer = refit.points(table, NOMINAL)
    assert all(p.age == 0 for p in fewer if p.algorithm == "tensor_gemm") and 0 < len(fewer) < len(every)
    monkeypatch.setattr(refit, "_ENOUGH", 10)
    assert len(refit.points(table, NOMINAL)) == len(every)


def test_an_algorithm_without_times_begins_as_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that cannot run a problem is not asked what it prepares."""
    known = {cost.OTHERS: cost.Fit(1.0, 12000.0, 0.0)}
    known |= {cost.group(a, LAYER): cost.Fit(1.0, 0.0, 1.0) for a in VARIANTS if a.name.startswith("winograd")}
    monkeypatch.setattr(cost, "known", lambda model: known)
    direct = NAMED["direct_tiled"]
    tensor = NAMED["tensor_gemm"]
    assert cost.fitted(direct, LAYER, NOMINAL) == (1.0, 12000.0, True)
    assert (
        cost.fitted(tensor, LAYER, NOMINAL) == cost.fitted(direct, replace(LAYER, op="wgrad"), NOMINAL) == (1, 0, False)
    )
    assert by_model(replace(LAYER, r=1, s=1, padding=(0, 0, 0, 0)), NOMINAL).algorithm is tensor


def test_a_damaged_fit_is_none(folder: Path, tmp_path: Path) -> None:
    cost.file_of(NOMINAL.model).parent.mkdir(parents=True)
    cost.file_of(NOMINAL.model).write_text('{"fits": [1]}')
    assert cost.known(NOMINAL.model) == {} and _over("tensor_gemm", LAYER) == 1


def test_the_shipped_fit_is_that_of_the_timed_candidates() -> None:
    """`python -m report refit` after every change of the table or of a cost model; what was reached is kept."""
    path = ROOT / "benchmarks/results/nvidia-h200" / refit.TIMED
    some = refit.points(candidates.read(path), NOMINAL)
    shipped, fitted = cost.known(NOMINAL.model), refit.fitted(some)
    both = [p for p in some if p.group in shipped and p.group in fitted]
    assert len(both) > 0.8 * len(some)
    assert np.mean([refit.expected(p, shipped) / refit.expected(p, fitted) for p in both]) == pytest.approx(1, abs=0.1)
    reached = refit.summary(refit.validated(some))
    assert reached["mean"] < 1.035 and reached["most"] < 1.15, "the goals are 1.05 and 1.15"
    published = columns.read(ROOT / "benchmarks/results/nvidia-h200/tuning.json")
    assert published["fitted to others"]["mean"] == pytest.approx(reached["mean"], abs=0.02)
