"""The ablation, the figures of the im2win paper, and the blocks of the pages that are filled from results files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from leanconv.algorithms.base import Config, GpuAlgorithm
from leanconv.bench import load_suite, run_suite
from leanconv.bench.results import Results
from leanconv.bench.suites import Case
from leanconv.call.choose import choose
from leanconv.problem import ConvProblem
from leanconv.runtime import launch
from leanconv.runtime.probe import why_no_gpu
from report import ablation
from report.__main__ import main
from report.ablation import AblationPeer, Variant, run_ablation, variants
from report.studies import BASELINE, FULL, STUDIES, Study
from tests import cases, made_up
from tests.conftest import HostDevice

ROOT = Path(__file__).resolve().parents[2]
H200 = cases.TARGETS[0]
IM2WIN = STUDIES["im2win"]
ABLATED, VARIANTS = IM2WIN.algorithms, IM2WIN.variants
SMALL = ConvProblem(2, 5, 9, 12, 7, 3, 3, padding=(1, 1, 1, 1))


def best_guess(problem: ConvProblem) -> Callable[[GpuAlgorithm], Config]:
    return lambda algorithm: next(iter(algorithm.configs(problem, H200)))


def taken_apart(problem: ConvProblem, study: Any = IM2WIN) -> list[Variant]:
    return list(variants(study, problem, H200, best_guess(problem)))


# the variants


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_a_variant_differs_by_its_switch_and_fits_the_machine(layout: str) -> None:
    for case in load_suite("im2win", layout):
        problem = case.problem
        assert isinstance(problem, ConvProblem)
        found = taken_apart(problem)
        assert [(v.algorithm.name, v.name) for v in found] == [
            ("direct", BASELINE),
            ("im2win_basic", BASELINE),
            *((name, variant) for name in ABLATED for variant in VARIANTS),
        ]
        whole = {v.algorithm.name: v.config for v in found if v.name == FULL}
        for variant in found:
            plan = variant.algorithm.plan(problem, variant.config, H200)
            for each in plan.launches:
                assert each.shared_bytes <= H200.shared_per_block, (case.name, variant)
                assert each.block <= 1024 and each.grid % each.cluster == 0, (case.name, variant)
            if variant.name in IM2WIN.switches:
                full = whole[variant.algorithm.name]
                off = [f.name for f in fields(full) if getattr(full, f.name) != getattr(variant.config, f.name)]
                assert off == [*IM2WIN.switches[variant.name]] and not getattr(variant.config, off[0])
                assert plan.launches[-1].grid == variant.algorithm.plan(problem, full, H200).launches[-1].grid


@pytest.mark.parametrize("name", ["conv9", pytest.param("conv5", marks=pytest.mark.exhaustive)])
def test_variants_compile_without_spills_to_different_code(name: str) -> None:
    pytest.importorskip("cuda.core", reason="NVRTC comes with the extra leanconv[cu13] or [cu12]")
    from leanconv.runtime.compile import compile_launch

    problem = next(case.problem for case in load_suite("im2win") if case.name == name)
    assert isinstance(problem, ConvProblem)
    code = set()
    for variant in taken_apart(problem):
        compiled = compile_launch(variant.algorithm.plan(problem, variant.config, H200).launches[-1], H200.arch)
        assert compiled.spill_bytes == 0 and compiled.registers > 0, variant
        code.add(compiled.cubin)
    assert len(code) == 2 + len(ABLATED) * len(VARIANTS)


@pytest.mark.parametrize(
    "layout", ["NHWC", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("NCHW", "CHWN"))]
)
def test_output_stages_of_winograd2d_differ_by_their_switch_alone(layout: str) -> None:
    pytest.importorskip("cuda.core", reason="NVRTC comes with the extra leanconv[cu13] or [cu12]")
    from leanconv.runtime.compile import compile_launch

    study = STUDIES["opencnn"]
    for case in load_suite("opencnn", layout)[:4]:
        problem = case.problem
        assert isinstance(problem, ConvProblem)
        (_, full, *variants) = taken_apart(problem, study)
        # Which of the two is full is the algorithm's choice.
        left_out = {"staged" if getattr(full.config, "staged", None) else "direct stores"}
        left_out |= {name for name, known in study.layouts.items() if layout not in known}
        assert [v.name for v in variants] == [name for name in study.switches if name not in left_out], case.name
        assert len(variants) == {"NCHW": 4, "NHWC": 3, "CHWN": 2}[layout]
        for variant in (full, *variants):
            if variant is not full:
                assert variant.config == replace(full.config, **study.switches[variant.name]), variant
            (main,) = variant.algorithm.plan(problem, variant.config, H200).launches
            assert main.shared_bytes <= H200.shared_per_block and main.block <= 1024, variant
            if case.name == "conv2-n32":
                assert compile_launch(main, H200.arch).spill_bytes == 0, variant


class HostAblation(AblationPeer):
    """The variants on a device that plays a GPU on the host."""

    needs_gpu = False


@pytest.mark.parametrize("problem", [SMALL, replace(SMALL, layout="NHWC", bias=True)], ids=str)
def test_a_run_has_a_row_for_each_variant(problem: ConvProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = {v.algorithm.plan(problem, v.config, H200): problem for v in taken_apart(problem)}
    device = HostDevice(plans)
    monkeypatch.setattr(device, "target", H200)
    monkeypatch.setattr(launch, "open_device", lambda index: device)
    case = Case("small", problem)
    results = run_suite([case], device="cpu", quick=True, progress=False, peers=(HostAblation(IM2WIN),))
    assert not results.failed and not results.skipped
    expected = [(v.algorithm.name, v.name) for v in taken_apart(problem)]
    assert [(row.algorithm, row.variant) for row in results.rows] == expected
    tensor = choose(problem, H200, "im2win").algorithm.workspace_bytes(problem)
    for row in results.rows:
        assert row.error is not None and row.error < 1e-6 and row.registers == 96, row
        assert row.workspace_bytes == (0 if row.algorithm in ("direct", "im2win_fused") else tensor)
    off = next(row for row in results.rows if row.variant == "no prefetch")
    assert "prefetch=False" in off.note and "vector_loads=True" in off.note


@pytest.mark.parametrize("study", STUDIES.values(), ids=[*STUDIES])
def test_switches_are_fields_of_the_configurations(study: Study) -> None:
    problem = ConvProblem(8, 64, 56, 56, 64, 3, 3, padding=(1, 1, 1, 1), layout="NHWC")
    found = taken_apart(problem, study)
    assert [v.name for v in found][: len(study.baselines)] == [BASELINE] * len(study.baselines)
    assert {v.algorithm.name for v in found} == {*study.baselines, *study.algorithms}
    for variant in found:
        assert all(getattr(variant.config, key) == v for key, v in study.switches.get(variant.name, {}).items())


def test_a_switch_takes_a_legal_configuration() -> None:
    """Where an algorithm has such configurations, the rest of the numbers may have to follow."""
    problem = next(case.problem for case in load_suite("im2win") if case.name == "conv9")
    assert isinstance(problem, ConvProblem)
    legal = list(choose(problem, H200, "implicit_gemm").algorithm.configs(problem, H200))  # type: ignore[attr-defined]
    whole = legal[0]
    other = next(config for config in legal if config.tile_k != whole.tile_k)
    study = Study(("implicit_gemm",), ("direct",), {"tile": {"tile_k": other.tile_k}, "same": {"tile_k": whole.tile_k}})
    base, full, off = taken_apart(problem, study)
    assert (base.name, full.name, off.name) == (BASELINE, FULL, "tile"), "what changes nothing is no variant"
    assert off.config in legal and off.config.tile_k == other.tile_k  # type: ignore[attr-defined]

    alike = [config for config in legal if config.tile_k == other.tile_k]
    wanted = replace(whole, tile_k=other.tile_k)
    assert off.config == (wanted if wanted in legal else alike[0])


def test_a_switch_keeps_the_states() -> None:
    """Runs of two tiles are no configuration of Γ8(6,3); those of other kernels shall not stand for it."""
    problem = ConvProblem(8, 64, 48, 48, 64, 3, 3, padding=(1, 1, 1, 1), layout="NHWC")
    *_, full, off = taken_apart(problem, Study(("winograd1d",), (), {"runs of 2": {"run": 2}}))
    assert full.name == FULL and off.config == replace(full.config, run=2)


def test_an_algorithm_that_cannot_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(SMALL, layout="CHWN")
    device = HostDevice({v.algorithm.plan(problem, v.config, H200): problem for v in taken_apart(problem)})
    monkeypatch.setattr(device, "target", H200)
    monkeypatch.setattr(launch, "open_device", lambda index: device)
    case = Case("small", problem)
    results = run_suite([case], device="cpu", quick=True, progress=False, peers=(HostAblation(IM2WIN),))
    assert [(row.algorithm, row.variant) for row in results.rows] == [("direct", BASELINE)] and not results.failed
    assert [entry["engine"] for entry in results.skipped] == [f"leanconv {name}" for name in ABLATED]
    assert all("layout='CHWN'" in entry["reason"] for entry in results.skipped)


def test_a_variant_too_large_for_a_block_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    device = HostDevice({})
    monkeypatch.setattr(device, "target", replace(H200, shared_per_block=1000))
    monkeypatch.setattr(launch, "open_device", lambda index: device)
    study = Study(("im2win_fused",), (), {})
    monkeypatch.setattr(HostAblation, "_variants", lambda self, problem, device: taken_apart(problem, study))
    results = run_suite([Case("small", SMALL)], device="cpu", progress=False, peers=(HostAblation(study),))
    (entry,) = results.skipped
    assert entry["engine"] == "leanconv im2win_fused, full" and "bytes of shared memory" in entry["reason"]


@pytest.mark.gpu
def test_ablation_on_the_gpu() -> None:
    pytest.importorskip("torch")
    results = run_ablation([Case("small", SMALL)], quick=True, progress=False)
    assert len(results.rows) == 2 + len(ABLATED) * len(VARIANTS) and not results.failed
    assert all(row.error is not None and row.error < 1e-6 for row in results.rows)
    assert results.problems["small"]["transform_us"] > 0


def test_what_the_ablation_does_not_take_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leanconv.bench.machine.gpu_usable", lambda: (True, ""))
    with pytest.raises(ValueError, match="'direct,im2c.*' has no ablation; these have: im2win_fused, im2win"):
        run_ablation("im2win", algorithms=("direct", "im2c*"))
    for what in ("filters", "filter:64x64,3x3"):
        with pytest.raises(ValueError, match="has no layers"):
            run_ablation(what)


def report(*words: str) -> int:
    """Run ``python -m report`` with these words; returns its exit code."""
    with pytest.raises(SystemExit) as stopped:
        main(words)
    return int(stopped.value.code or 0)


@pytest.mark.skipif(not why_no_gpu(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so(capsys: Any) -> None:
    for words in ([], ["--quick"]):
        assert report("ablation", "im2win", *words) == 2
        assert capsys.readouterr().err.startswith("error: the ablation times kernels on a GPU, and there is none: ")


def test_the_command_writes_file_and_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    variants_measured = made_up.variants()
    pytest.importorskip("matplotlib")
    asked: dict[str, Any] = {}

    def measured(what: str, **options: Any) -> Results:
        asked.update(options, what=what)
        return variants_measured

    monkeypatch.setattr(ablation, "run_ablation", measured)
    monkeypatch.chdir(tmp_path)
    assert report("ablation", "im2win", "--layout", "NHWC", "--algorithms", "im2win,x*", "--plot", "bars.png") == 0
    assert (asked["what"], asked["layout"], asked["algorithms"]) == ("im2win", "NHWC", ("im2win", "x*"))
    (file,) = tmp_path.glob("benchmarks/results/nvidia-h200/*.json")
    assert file.stem == "im2win-ablation-part" and Results.read(file) == variants_measured
    assert Path("bars.png").read_bytes()[:4] == b"\x89PNG" and "no micro-kernel" in capsys.readouterr().out
    variants_measured.failed.append({"problem": "a", "engine": "leanconv im2win", "reason": "it fell over"})
    assert report("ablation", "im2win", "--out", "r.json") == 1 and Path("r.json").exists()
