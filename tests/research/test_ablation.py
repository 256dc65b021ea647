"""The ablation: its variants, which compute the same in other ways, its command, and what pages make of its results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leanconv.bench import default_path, load_suite, run_suite
from leanconv.bench.results import Results
from leanconv.bench.suites import Case
from leanconv.call.choose import choose
from leanconv.kernels.contract import Config, GpuAlgorithm
from leanconv.plan import Plan
from leanconv.problem import ConvProblem
from leanconv.runtime import launch
from leanconv.runtime.compile import compile_launch
from leanconv.runtime.launch import why_no_gpu
from report.pages import suites
from research import ablation, ablation_pages, pages
from research.__main__ import main
from research.ablation import AblationPeer, Variant, run_ablation, variants
from research.studies import BASELINE, FULL, KERNELS, STUDIES, Study
from tests import cases, emulator, made_up, proof
from tests.kernels.test_im2win import FUSED, RUNS, WITH_TENSOR
from tests.stand_ins import HostDevice
from tests.variants import NAMED

H200 = cases.TARGETS[0]
IM2WIN = STUDIES["im2win"]
ABLATED, VARIANTS = IM2WIN.algorithms, IM2WIN.variants
SMALL = ConvProblem(2, 5, 9, 12, 7, 3, 3, padding=(1, 1, 1, 1))


def best_guess(problem: ConvProblem) -> Callable[[GpuAlgorithm], Config]:
    return lambda algorithm: next(iter(algorithm.configs(problem, H200)))


def taken_apart(problem: ConvProblem, study: Any = IM2WIN) -> list[Variant]:
    return list(variants(study, problem, H200, best_guess(problem)))


def measured_variants() -> Results:
    """The ablation of im2win on two layers."""
    results = made_up.layers()
    shares = dict(zip(STUDIES["im2win"].variants, (1.0, 0.5, 0.25, 0.1), strict=True))
    for problem, speed in (("narrow", 40), ("wide", 20)):
        results.rows += [
            made_up.row(problem, "leanconv", name, 2, variant=BASELINE) for name in ("direct", "im2win_basic")
        ]
        for algorithm in STUDIES["im2win"].algorithms:
            for name, share in shares.items():
                values = {"variant": name, "registers": 100, "spill_bytes": 0}
                results.rows.append(made_up.row(problem, "leanconv", algorithm, speed * share, **values))
        results.problems[problem] |= {"transform_us": 5.0, "transform_bytes": 1000}
    results.rows[2] = replace(results.rows[2], registers=168)
    return results


# the variants


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "CHWN"])
@pytest.mark.parametrize("suite", STUDIES)
def test_variants_are_those_of_the_study_and_fit_the_machine(suite: str, layout: str) -> None:
    study = STUDIES[suite]
    for case in load_suite(suite, layout)[:12:3]:
        problem = case.problem
        assert isinstance(problem, ConvProblem)
        found = taken_apart(problem, study)
        if suite != "im2win" or layout != "CHWN":
            assert [v.name for v in found][: len(study.baselines)] == [BASELINE] * len(study.baselines)
            assert {v.algorithm.name for v in found} == {*study.baselines, *study.algorithms}
        whole = {v.algorithm.name: v for v in found if v.name == FULL}
        for algorithm, full in whole.items():
            # what is other in no layout, and what the whole kernel is already
            left_out = {name for name, known in study.layouts.items() if layout not in known}
            for name, values in study.switches.items():
                if not isinstance(values, str) and replace(full.config, **values) == full.config:
                    left_out.add(name)
            names = [v.name for v in found if v.algorithm.name == algorithm]
            assert names == [name for name in study.variants if name not in left_out], (case.name, algorithm)
        for variant in found:
            values = study.switches.get(variant.name, {})
            last = variant.plan(problem, H200).launches[-1]
            assert last.shared_bytes <= H200.shared_per_block and last.block <= 1024 and last.grid % last.cluster == 0
            if isinstance(values, str):
                full = whole[variant.algorithm.name].plan(problem, H200).launches[-1]
                assert last == replace(full, header=str(KERNELS / values)), variant
            else:
                assert all(getattr(variant.config, key) == value for key, value in values.items()), variant
                if study.alone and values:
                    assert variant.config == replace(whole[variant.algorithm.name].config, **values), variant


@pytest.mark.parametrize(("suite", "name"), [("im2win", "conv9"), ("im2win", "conv5"), ("opencnn", "conv2-n32")])
def test_variants_compile_without_spills_to_different_code(suite: str, name: str, nvrtc: None) -> None:
    problem = next(case.problem for case in load_suite(suite) if case.name == name)
    assert isinstance(problem, ConvProblem)
    found = taken_apart(problem, STUDIES[suite])
    compiled = [compile_launch(variant.plan(problem, H200).launches[-1], H200.arch) for variant in found]
    assert all(code.spill_bytes == 0 and code.registers > 0 for code in compiled)
    assert len({code.cubin for code in compiled}) == len(found) > 4


#: Runs of every kind are played in tests of their own.
SOME_RUNS = RUNS[3:-2:9]
LAYERS = [case.problem for case in cases.CONV_CASES if case.name in ("tails-nchw", "groups-nhwc", "plain-nhwc")]


def without(header: str, kernels: Path = KERNELS) -> Callable[[Plan], Plan]:
    """What changes a plan as a variant does, with the file in ``kernels``."""

    def change(plan: Plan) -> Plan:
        *before, last = plan.launches
        return replace(plan, launches=(*before, replace(last, header=str(kernels / header))))

    return change


@pytest.mark.parametrize("header", IM2WIN.switches.values())
def test_variants_of_im2win_are_right(header: Any) -> None:
    for runs in SOME_RUNS:
        proof.check(FUSED, runs.problem, runs.config, kinds=cases.KINDS[:1], change=without(header))
    for problem in LAYERS:
        for algorithm in (FUSED, WITH_TENSOR):
            proof.check(algorithm, problem, kinds=cases.KINDS[:1], change=without(header))


@pytest.mark.parametrize("header", [each for each in STUDIES["opencnn"].switches.values() if isinstance(each, str)])
def test_variants_of_winograd2d_are_right(header: str) -> None:
    algorithm = NAMED["winograd2d"]
    for case in cases.CONV_CASES:
        if case.name in ("plain-nchw", "tails-nhwc", "plain-chwn"):
            proof.check(algorithm, case.problem, kinds=cases.KINDS[:1], change=without(header))


@pytest.mark.parametrize(
    ("header", "text", "by"),
    [
        (
            "im2win_no_prefetch.cuh",
            "cp_async_wait_group<0>();\n            __syncthreads();",
            "cp_async_wait_group<0>();",
        ),
        ("im2win_no_prefetch.cuh", "            __syncthreads();\n        }", "        }"),
        ("im2win_no_vector_loads.cuh", "i / 4 * step + i % 4", "i / 4 * step"),
        ("im2win_no_micro_kernel.cuh", "stage_pixels(step), row, j)", "stage_pixels(step), row, 0)"),
        ("winograd2d_narrow_exchange.cuh", "store_pair(to + 2, v[2], v[3]);", "store_pair(to, v[2], v[3]);"),
    ],
    ids=["before", "after", "words", "pixels", "pairs"],
)
def test_variants_broken_on_purpose_are_caught(header: str, text: str, by: str, tmp_path: Path) -> None:
    source = (KERNELS / header).read_text()
    assert source.count(text) == 1, "adapt the patch"
    (tmp_path / header).write_text(source.replace(text, by))
    problem = next(case.problem for case in cases.CONV_CASES if case.name == "plain-nchw")
    algorithm = NAMED[header.partition("_")[0]]
    with pytest.raises((emulator.EmulatorError, proof.WrongAnswer)):
        proof.check(algorithm, problem, change=without(header, tmp_path))


class HostAblation(AblationPeer):
    """The variants on a device that plays a GPU on the host."""

    needs_gpu = False


def on_the_host(problem: ConvProblem, monkeypatch: pytest.MonkeyPatch, study: Study = IM2WIN, **limits: int) -> Results:
    """A run on the device, with a GPU's limits but for these."""
    device = HostDevice({v.plan(problem, H200): problem for v in taken_apart(problem, study)})
    monkeypatch.setattr(device, "target", replace(H200, **limits))
    monkeypatch.setattr(launch, "open_device", lambda index: device)
    case = Case("small", problem)
    return run_suite([case], device="cpu", quick=True, progress=False, peers=(HostAblation(study),))


@pytest.mark.parametrize("problem", [SMALL, replace(SMALL, layout="NHWC", bias=True)], ids=str)
def test_a_run_has_a_row_for_each_variant(problem: ConvProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    results = on_the_host(problem, monkeypatch)
    assert not results.failed and not results.skipped
    expected = [(v.algorithm.name, v.name) for v in taken_apart(problem)]
    assert [(row.algorithm, row.variant) for row in results.rows] == expected
    by_name = choose(problem, H200, "im2win")
    tensor = by_name.algorithm.workspace_bytes(problem, by_name.config)
    for row in results.rows:
        assert row.error is not None and row.error < 1e-6 and row.registers == 96, row
        assert row.workspace_bytes == (0 if row.algorithm in ("direct", "im2win_fused") else tensor)
    assert all("stages=" in row.note for row in results.rows if row.variant == "no prefetch")


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
    results = on_the_host(replace(SMALL, layout="CHWN"), monkeypatch)
    assert [(row.algorithm, row.variant) for row in results.rows] == [("direct", BASELINE)] and not results.failed
    assert [entry["engine"] for entry in results.skipped] == [f"leanconv {name}" for name in ABLATED]
    assert all("layout='CHWN'" in entry["reason"] for entry in results.skipped)


def test_a_variant_too_large_for_a_block_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    study = Study(("im2win_fused",), (), {})
    monkeypatch.setattr(HostAblation, "_variants", lambda self, problem, device: taken_apart(problem, study))
    (entry,) = on_the_host(SMALL, monkeypatch, study, shared_per_block=1000).skipped
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


def research(*words: str) -> int:
    """Run ``python -m research`` with these words; returns its exit code."""
    with pytest.raises(SystemExit) as stopped:
        main(words)
    return int(stopped.value.code or 0)


@pytest.mark.skipif(not why_no_gpu(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so(capsys: Any) -> None:
    for words in ([], ["--quick"]):
        assert research("ablation", "im2win", *words) == 2
        assert capsys.readouterr().err.startswith("error: the ablation times kernels on a GPU, and there is none: ")


def test_the_command_writes_file_and_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    variants_measured = measured_variants()
    pytest.importorskip("matplotlib")
    asked: dict[str, Any] = {}

    def measured(what: str, **options: Any) -> Results:
        asked.update(options, what=what)
        return variants_measured

    monkeypatch.setattr(ablation, "run_ablation", measured)
    monkeypatch.chdir(tmp_path)
    assert research("ablation", "im2win", "--layout", "NHWC", "--algorithms", "im2win,x*", "--plot", "bars.png") == 0
    assert (asked["what"], asked["layout"], asked["algorithms"]) == ("im2win", "NHWC", ("im2win", "x*"))
    (file,) = tmp_path.glob("research/results/nvidia-h200/*.json")
    assert file.stem == "im2win-ablation-part" and Results.read(file) == variants_measured
    assert Path("bars.png").read_bytes()[:4] == b"\x89PNG" and "no micro-kernel" in capsys.readouterr().out
    variants_measured.failed.append({"problem": "a", "engine": "leanconv im2win", "reason": "it fell over"})
    assert research("ablation", "im2win", "--out", "r.json") == 1 and Path("r.json").exists()
    asked.clear()
    for given in (["--out", "."], ["--plot", "r.json/bars.png"]):
        assert research("ablation", "im2win", *given) == 2 and not asked, "refused before it measures"


def test_ablation_table() -> None:
    variants_measured = measured_variants()
    found = made_up.rows_of(ablation_pages.table(variants_measured, "im2win_fused"))
    assert found["narrow"] == {
        "problem": "narrow", "direct": "2.00", "im2win_basic": "2.00", "full": "40.0", "no prefetch": "20.0",
        "no vector loads": "10.0", "no micro-kernel": "4.00",
    }  # fmt: skip
    assert [*found["of full, geometric mean"].values()][3:] == ["1.00", "0.50", "0.25", "0.10"]
    assert found["of full, geometric mean"]["direct"] == "0.07"
    assert found["registers"]["full"] == "100–168" and found["registers"]["no prefetch"] == "100"
    explicit = made_up.rows_of(ablation_pages.table(variants_measured, "im2win"))
    assert explicit["narrow"]["transform, µs"] == "5.00" and explicit["narrow"]["of the time"] == "20%"
    fewer = replace(variants_measured, rows=[row for row in variants_measured.rows if row.variant != "no prefetch"])
    assert list(made_up.rows_of(ablation_pages.table(fewer, "im2win_fused"))["narrow"])[3:5] == [
        "full",
        "no vector loads",
    ]
    wrong = [replace(row, error=None) if row.variant == FULL else row for row in variants_measured.rows]
    assert (
        made_up.rows_of(ablation_pages.table(replace(variants_measured, rows=wrong), "im2win"))["narrow"]["full"] == "–"
    )


def test_results_print_and_keep_their_variants(tmp_path: Path, capsys: Any) -> None:
    variants_measured = measured_variants()
    path = default_path(variants_measured, False, tmp_path, "-ablation")
    assert path == tmp_path / "nvidia-h200" / "im2win-ablation.json"
    variants_measured.write(path)
    assert Results.read(path) == variants_measured
    assert suites(tmp_path) == [], "an ablation is no suite of docs/performance.md"
    ablation.show(variants_measured)
    shown = capsys.readouterr().out
    assert "im2win_fused, TFLOP/s" in shown and "no micro-kernel" in shown and "transform" in shown


@pytest.mark.parametrize("study", STUDIES.values(), ids=[*STUDIES])
def test_every_variant_has_a_colour(study: Study, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results, (algorithm, *_) = made_up.layers(), study.algorithms
    results.rows = [made_up.row("narrow", "leanconv", name, 2, variant=BASELINE) for name in study.baselines]
    results.rows += [made_up.row("narrow", "leanconv", algorithm, 9, variant=name) for name in study.variants]
    ablation_pages.draw(results, tmp_path / "a.svg")
    shown = (tmp_path / "a.svg").read_text()
    assert all(f"<!-- {name} -->" in shown for name in (*study.baselines, *study.variants))


def test_the_page_has_the_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = measured_variants()
    results.write(default_path(results, False, tmp_path, "-ablation"))
    page = made_up.filled(tmp_path, "ablation-figure im2win-ablation", by=pages)
    assert "](nvidia-h200-im2win-ablation-ablation.png)" in page
    assert (tmp_path / "nvidia-h200-im2win-ablation-ablation.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="nothing to draw"):
        ablation_pages.draw(made_up.suite(), tmp_path / "none.png")
