"""The ablation, the figures of the im2win paper, and the blocks of the pages that are filled from results files."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import cases
import pytest
from conftest import HostDevice

from leanconv.algorithms import ALGORITHMS
from leanconv.algorithms.base import Config, GpuAlgorithm
from leanconv.bench import default_path, load_suite, run_suite, show
from leanconv.bench.results import Results, Row
from leanconv.bench.suites import LAYOUTS, Case, format_problem
from leanconv.bench.tables import standings
from leanconv.call import choose as registry
from leanconv.problem import ConvProblem
from leanconv.runtime import launch
from leanconv.runtime.probe import why_no_gpu
from report import ablation, comparisons, figures, pages, performance
from report.__main__ import main
from report.ablation import AblationPeer, Variant, run_ablation, variants
from report.studies import BASELINE, FULL, STUDIES, Study

ROOT = Path(__file__).resolve().parent.parent
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


@pytest.mark.parametrize("name", ["conv5", "conv9"])
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


@pytest.mark.parametrize("layout", LAYOUTS)
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
            if case.name in ("conv2-n32", "conv5-n32"):
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
    tensor = registry.choose(problem, "im2win", ALGORITHMS).workspace_bytes(problem)
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
    legal = list(registry.choose(problem, "implicit_gemm", ALGORITHMS).configs(problem, H200))  # type: ignore[attr-defined]
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


def test_the_command_writes_file_and_figure(
    variants_measured: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
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


# what is made of figures

MACHINE = {
    "gpu": "NVIDIA H200",
    "date": "2026-01-02T03:04:05",
    "git_revision": "0123456789abcdef",
    "ceilings": {"fp32_tflops": 50.0, "tf32_tflops": 400.0, "copy_tbytes": 4.0, "how": "made up"},
}
LAYERS = {"narrow": ConvProblem(1, 2, 9, 9, 3, 3, 3), "wide": ConvProblem(1, 2, 20, 20, 3, 5, 5)}


def made_up(problem: str, engine: str, algorithm: str, tflops: float, workspace: int = 0, **rest: Any) -> Row:
    us = 1000 / tflops
    values = {"ceiling": "fp32", "ceiling_share": 0.5, "l2": "warm", "error": 1e-7, "checked": "all"} | rest
    return Row(problem, engine, algorithm, us, us, us, 5, tflops, workspace_bytes=workspace, **values)


def empty() -> Results:
    about = {
        name: {"words": format_problem(p), "layout": "NCHW", "flops": 10**9, "bytes": 1000, "floor_us": 1.0}
        for name, p in LAYERS.items()
    }
    return Results(dict(MACHINE), "im2win", "NCHW", problems=about)


@pytest.fixture
def suite() -> Results:
    results = empty()
    results.rows = [
        made_up("narrow", "leanconv", "im2win_fused", 40),
        made_up("narrow", "leanconv", "im2win", 20, 500),
        made_up("narrow", "leanconv", "implicit_gemm", 50),
        made_up("narrow", "cudnn:implicit_gemm-nchw", "implicit_gemm", 10),
        made_up("narrow", "cudnn:fft_tiling-nchw", "fft_tiling", 80, 10**6),
        made_up("narrow", "cudnn:winograd_nonfused-nchw", "winograd_nonfused", 90, 10, error=0.5),
        made_up("narrow", "im2col+cublas", "unfold, bmm", 5, 1000),
        made_up("wide", "leanconv", "im2win_fused", 20),
        made_up("wide", "leanconv", "im2win", 30, 600),
        made_up("wide", "leanconv", "implicit_gemm", 10),
        made_up("wide", "cudnn:implicit_gemm-nchw", "implicit_gemm", 15),
        made_up("wide", "im2col+cublas", "unfold, bmm", 5, 3000),
    ]
    return results


@pytest.fixture
def variants_measured() -> Results:
    results = empty()
    shares = dict(zip(VARIANTS, (1.0, 0.5, 0.25, 0.1), strict=True))
    for problem, speed in (("narrow", 40), ("wide", 20)):
        results.rows += [made_up(problem, "leanconv", name, 2, variant=BASELINE) for name in ("direct", "im2win_basic")]
        for algorithm in ABLATED:
            for name, share in shares.items():
                row = made_up(problem, "leanconv", algorithm, speed * share, variant=name, registers=100, spill_bytes=0)
                results.rows.append(row)
        results.problems[problem] |= {"transform_us": 5.0, "transform_bytes": 1000}
    results.rows[2] = replace(results.rows[2], registers=168)
    return results


def rows_of(table: tuple[list[str], list[list[str]]]) -> dict[str, dict[str, str]]:
    columns, lines = table
    return {line[0]: dict(zip(columns, line, strict=True)) for line in lines}


def test_standings_are_geometric_means_and_the_least(suite: Results) -> None:
    found = rows_of(standings(suite, [("im2win", "im2win_fused")]))
    assert list(found) == ["im2win_fused", "im2win", "implicit_gemm", "best of im2win, im2win_fused", "best of all"]
    assert found["im2win_fused"]["× lean"] == "2.31 (1.33)"  # 40/10 and 20/15
    assert found["im2win"]["× lean"] == "2.00 (2.00)"
    assert found["best of im2win, im2win_fused"]["× lean"] == "2.83 (2.00)"
    assert found["best of all"]["× lean"] == "3.16 (2.00)"
    assert found["best of im2win, im2win_fused"]["× im2col"] == "6.93 (6.00)"
    assert found["implicit_gemm"]["× best"] == "0.65 (0.62)"  # 50/80 and 10/15: a wrong answer is no peer
    assert found["im2win"]["problems"] == "2"
    suite.rows = [row for row in suite.rows if (row.problem, row.algorithm) != ("wide", "im2win")]
    assert rows_of(standings(suite))["im2win"]["problems"] == "1"
    suite.rows = [row for row in suite.rows if row.engine != "leanconv"]
    assert standings(suite)[1] == [], "no line without an own algorithm"


def test_memory_is_compared_with_im2col_on_3x3_layers(suite: Results) -> None:
    found = rows_of(comparisons.memory(suite, "im2win", "im2win_fused"))
    assert found["narrow"] == {
        "problem": "narrow", "tensors": "1.00 kB", "im2win_fused": "0", "im2win": "500", "of im2col's": "50%",
        "im2col + cuBLAS": "1.00 kB", "cuDNN's fastest": "1.00 MB",
    }  # fmt: skip
    assert found["wide"]["of im2col's"] == "20%"
    assert found["layers with 3×3 filters"]["of im2col's"] == "50% (50%)", "5×5 layers are no part of it"
    # (1 - 1000/2000 + 1 - 1000/4000) / 2 and (1 - 1500/2000 + 1 - 1600/4000) / 2
    assert found["im2win_fused, all memory, against"]["im2col + cuBLAS"] == "62% less"
    assert found["im2win, all memory, against"]["im2col + cuBLAS"] == "43% less"
    suite.rows = [replace(r, workspace_bytes=10**6) if r.algorithm == "im2win" else r for r in suite.rows]
    assert (
        "more"
        in rows_of(comparisons.memory(suite, "im2win", "im2win_fused"))["im2win, all memory, against"][
            "im2col + cuBLAS"
        ]
    )


def test_speeds_name_the_largest_error(suite: Results) -> None:
    suite.rows[1] = replace(suite.rows[1], error=3e-7)
    found = rows_of(comparisons.speeds(suite, ["im2win_fused", "im2win", "absent"]))
    assert found["narrow"] == {
        "problem": "narrow", "im2win_fused": "40.0", "im2win": "20.0", "cuDNN without workspace": "10.0",
        "cuDNN's fastest": "80.0", "im2col + cuBLAS": "5.00", "our largest error": "3.0e-07",
    }  # fmt: skip


def test_ablation_table(variants_measured: Results) -> None:
    found = rows_of(comparisons.ablation(variants_measured, "im2win_fused"))
    assert found["narrow"] == {
        "problem": "narrow", "direct": "2.00", "im2win_basic": "2.00", "full": "40.0", "no prefetch": "20.0",
        "no vector loads": "10.0", "no micro-kernel": "4.00",
    }  # fmt: skip
    assert [*found["of full, geometric mean"].values()][3:] == ["1.00", "0.50", "0.25", "0.10"]
    assert found["of full, geometric mean"]["direct"] == "0.07"
    assert found["registers"]["full"] == "100–168" and found["registers"]["no prefetch"] == "100"
    explicit = rows_of(comparisons.ablation(variants_measured, "im2win"))
    assert explicit["narrow"]["transform, µs"] == "5.00" and explicit["narrow"]["of the time"] == "20%"
    fewer = replace(variants_measured, rows=[row for row in variants_measured.rows if row.variant != "no prefetch"])
    assert list(rows_of(comparisons.ablation(fewer, "im2win_fused"))["narrow"])[3:5] == ["full", "no vector loads"]
    wrong = [replace(row, error=None) if row.variant == FULL else row for row in variants_measured.rows]
    assert rows_of(comparisons.ablation(replace(variants_measured, rows=wrong), "im2win"))["narrow"]["full"] == "–"


def test_results_print_and_keep_their_variants(variants_measured: Results, tmp_path: Path, capsys: Any) -> None:
    path = default_path(variants_measured, False, tmp_path, "-ablation")
    assert path == tmp_path / "nvidia-h200" / "im2win-ablation.json"
    variants_measured.write(path)
    assert Results.read(path) == variants_measured
    assert performance.results_files(tmp_path) == [], "an ablation is no suite of docs/performance.md"
    ablation.show(variants_measured)
    shown = capsys.readouterr().out
    assert "im2win_fused, TFLOP/s" in shown and "no micro-kernel" in shown and "transform" in shown


def test_performance_page_has_the_standings(suite: Results, tmp_path: Path, capsys: Any) -> None:
    path = default_path(suite, False, tmp_path)
    suite.write(path)
    assert "| best of all | 2 | 3.16 (2.00) |" in performance.page([path])
    show(suite)
    assert "best of all" in capsys.readouterr().out


def test_figures_show_what_was_measured(suite: Results, variants_measured: Results, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = figures.speed_rows(suite)
    assert list(rows) == [
        "im2win_fused", "im2win", "implicit_gemm", "im2col + cuBLAS", "cuDNN implicit GEMM", "cuDNN FFT tiling",
    ], "in the order of the legend, without the wrong answer"  # fmt: skip
    assert rows["im2win"]["wide"].tflops == 30 and set(rows["cuDNN FFT tiling"]) == {"narrow"}
    there = replace(suite, problems={name: about | {"layout": "CHWN"} for name, about in suite.problems.items()})
    there.rows = [*suite.rows, made_up("narrow", "cudnn:fft_tiling-nhwc", "fft_tiling", 90, 10**6)]
    assert figures.speed_rows(there)["cuDNN FFT tiling"]["narrow"].tflops == 90, (
        "the fastest, where none is of the layout"
    )
    factors = figures.memory_factors(suite)
    assert factors["im2win"] == {"narrow": 0.5, "wide": 0.6} and factors["im2win_fused"]["wide"] == 0
    assert factors["cuDNN's fastest"] == {"narrow": 1000.0, "wide": 0.0}

    for draw, results in (
        (figures.speed, suite),
        (figures.memory, suite),
        (figures.ablation, variants_measured),
    ):
        path = tmp_path / f"{draw.__name__}.png"
        draw(results, path)
        assert path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 10_000
        with pytest.raises(ValueError, match="nothing to draw"):
            draw(replace(results, rows=[]), path)
    with pytest.raises(ValueError, match="nothing to draw"):
        figures.ablation(suite, tmp_path / "none.png")
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("study", STUDIES.values(), ids=[*STUDIES])
def test_every_variant_has_a_colour(study: Study, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results, (algorithm, *_) = empty(), study.algorithms
    results.rows = [made_up("narrow", "leanconv", name, 2, variant=BASELINE) for name in study.baselines]
    results.rows += [made_up("narrow", "leanconv", algorithm, 9, variant=name) for name in study.variants]
    figures.ablation(results, tmp_path / "a.svg")
    shown = (tmp_path / "a.svg").read_text()
    assert all(f"<!-- {name} -->" in shown for name in (*study.baselines, *study.variants))


# blocks of documents

PAGE = """# A page

Words before.

<!-- made: standings im2win together=im2win,im2win_fused -->
old
<!-- /made -->

Words between.

<!-- made: ablation-figure im2win-ablation -->
<!-- /made -->
<!-- made: speeds im2win-nhwc algorithms=im2win -->
<!-- /made -->
"""


def test_blocks_are_filled_and_nothing_else(suite: Results, variants_measured: Results, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    docs, results = tmp_path / "docs", tmp_path / "results"
    page = docs / "algorithms" / "page.md"
    page.parent.mkdir(parents=True)
    page.write_text(PAGE)
    suite.write(default_path(suite, False, results))
    variants_measured.write(default_path(variants_measured, False, results, "-ablation"))
    assert report("pages", "--docs", str(docs), "--results", str(results)) == 0
    text = page.read_text()
    assert "NVIDIA H200, 2026-01-02, revision 0123456789ab." in text and "old" not in text
    assert "| best of im2win, im2win_fused | 2 | 2.83 (2.00) |" in text
    (link,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    picture = (page.parent / link).resolve()
    assert picture == (docs / "pictures" / "nvidia-h200-im2win-ablation-ablation.png").resolve() and picture.exists()
    assert "Not measured yet: `leanconv bench im2win --layout NHWC` on a GPU" in text
    outside = re.sub(r"(<!-- made[^\n]*\n).*?(<!-- /made)", r"\1\2", text, flags=re.DOTALL)
    assert outside == PAGE.replace("old\n", "")
    before = page.stat().st_mtime_ns
    assert [*pages.fill_all(docs, results)] == []
    assert page.read_text() == text and page.stat().st_mtime_ns == before, "what is right stays as it is"


def test_blocks_that_are_not_understood_are_named(suite: Results, tmp_path: Path, capsys: Any) -> None:
    page = tmp_path / "page.md"
    suite.write(default_path(suite, False, tmp_path))
    for block in ("poem im2win", "standings", "speeds im2win"):
        page.write_text(f"<!-- made: {block} -->\n<!-- /made -->\n")
        assert report("pages", "--docs", str(tmp_path), "--results", str(tmp_path)) == 2
        assert f"page.md: block '{block}'" in capsys.readouterr().err


def test_committed_documents_hold_the_committed_figures() -> None:
    """``make docs`` has been run after the last results file came."""
    found = 0
    for page in sorted((ROOT / "docs").glob("**/*.md")):
        text = page.read_text(encoding="utf-8")
        made = pages.fill(text, page, ROOT / "benchmarks" / "results", ROOT / "docs" / "pictures", draw=False)
        assert made == text, f"{page.relative_to(ROOT)} is not what `make docs` makes"
        found += text.count("<!-- made: ")
        for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
            assert (page.parent / link).exists(), f"{page.relative_to(ROOT)} shows {link}, which is not there"
    assert found >= 8
