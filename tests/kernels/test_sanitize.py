"""scripts/sanitize.py without a GPU: what it would run, how it reads reports, and its copy of the kernels."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from math import inf
from pathlib import Path
from types import ModuleType

import pytest

from leanconv.runtime import compile as compiler
from tests.cases import TARGETS
from tests.variants import NAMED

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "sanitize.py"


@pytest.fixture(scope="module")
def sanitize() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("sanitize", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules["sanitize"] = importlib.util.module_from_spec(spec)
    path = sys.path[:]
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path
    del sys.modules["sanitize"]


def test_every_variant_has_a_run(sanitize: ModuleType) -> None:
    runs = sanitize.runs()
    assert {run.algorithm.stem for run in runs} == set(NAMED)
    assert len({run.name for run in runs}) == len(runs)
    ways = {run.kind for run in runs if run.algorithm.stem == "tensor_gemm"}
    for way in ("rows", "linear", "spacing", "split", "ping_pong", "row_pixels"):
        assert any(way in kind for kind in ways), way
    assert any(not {"rows", "linear", "spacing"} & set(kind.replace(",", "").split()) for kind in ways), "columns"
    joined = {run.algorithm.stem for run in runs if "phases" in run.kind.split(", ")}
    assert joined == {"native_gemm_16bit", "native_gemm_nchw", "native_gemm_tf32"}
    long = [run for run in runs if run.algorithm.stem == "tensor_gemm" and run.problem.terms >= 4 * 64]
    assert len(long) > len(ways) / 2, "rings go round"


def test_the_committed_table_has_every_kernel(sanitize: ModuleType) -> None:
    table = SCRIPT.parents[1] / "benchmarks" / "results" / "nvidia-h200" / "sanitize.md"
    rows = [line.strip("| \n").split(" | ") for line in table.read_text("utf-8").splitlines() if line.startswith("|")][
        2:
    ]
    not_run = re.findall(r"`(\w+)`", "".join(re.findall(r"Not run yet([^;.]*)", table.read_text("utf-8"))))
    assert sorted([*{row[0] for row in rows}, *not_run]) == sorted(NAMED)
    runs = [run for run in sanitize.runs() if run.algorithm.stem in not_run]
    assert {run.algorithm.stem for run in runs} == set(not_run)
    for run in runs:  # and no call chooses them
        times = (time for time, _ in run.algorithm.within(run.problem, TARGETS[0]))
        assert run.algorithm.by_name_only or all(time == inf for time in times)
    assert all(row[-2:] == ["clean", "clean"] for row in rows) == ("All are clean" in table.read_text("utf-8"))


def test_the_list_of_commands(
    sanitize: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--list", "--only", "depthwise_row", "--sanitizer", "/opt/cs", "--option=--print-limit=1"]
    monkeypatch.setattr(sys, "argv", ["sanitize.py", *given])
    assert sanitize.main() == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [line[:3] for line in lines] == [["/opt/cs", "--tool", tool] for tool in ("racecheck", "memcheck")]
    assert "--print-limit=1" in lines[0] and "--print-limit=1" not in lines[1]
    names = [run.name for run in sanitize.runs()]
    assert all(line[line.index("--run") + 1] in names for line in lines)


@pytest.mark.parametrize(
    ("code", "report", "cell"),
    [
        (0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", "clean"),
        (9, "========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)\n",
         "3 hazards displayed (1 error, 2 warnings)"),
        (0, "========= ERROR SUMMARY: 0 errors\n", "clean"),
        (1, "WrongAnswer: error 1\n========= ERROR SUMMARY: 0 errors\n", "0 errors; ended with 1"),
        (127, "compute-sanitizer: not found", "ended with 127: compute-sanitizer: not found"),
        (None, "", "more than 600 s"),
    ],
)  # fmt: skip
def test_reports_are_read(sanitize: ModuleType, code: int | None, report: str, cell: str) -> None:
    assert sanitize.verdict("racecheck", code, report) == cell


def test_the_table(sanitize: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the sanitizer finds something in one of two runs."""
    tool = tmp_path / "sanitizer"
    tool.write_text(
        "#!/bin/sh\ncase \"$*\" in *racecheck*fixed*) echo '=== RACECHECK SUMMARY: 1 hazard'; exit 9;; "
        "*) echo '=== ERROR SUMMARY: 0 errors';; esac\n"
    )
    tool.chmod(0o755)
    table = tmp_path / "table.md"
    given = ["sanitize.py", "--only", "depthwise_large", "--sanitizer", str(tool), "--write", str(table)]
    monkeypatch.setattr(sys, "argv", given)
    assert sanitize.main() == 1
    head, _, *rows = table.read_text().splitlines()
    assert head == "| kernel | case | configuration | racecheck | memcheck |"
    assert sorted(row.split(" | ", 3)[3] for row in rows) == ["1 hazard | clean |", "clean | clean |"]


@pytest.fixture(scope="module")
def edited(sanitize: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = sanitize.edited_headers(tmp_path_factory.mktemp("edited"))
    return folder


def test_every_lane_arrives_in_the_kernels_that_racecheck_sees(sanitize: ModuleType, edited: Path) -> None:
    """Barriers count 32 times as many; who arrives for others counts 32, a lane of a warp one."""
    text = (edited / "device/ptx/sync.cuh").read_text()
    assert text.count("[%0], 32;") == 3 and re.search(r"\(\s*32 \* count\)", text)
    warp = text[text.index("void mbarrier_arrive_warp") :].split("}")[0]
    assert "[%0];" in warp and "lane ==" not in warp
    guarded = re.compile(r"== 0\) \{?\s*mbarrier_arrive\(")
    assert not [path for path in edited.rglob("*.cuh") if guarded.search(path.read_text()) and path.name != "sync.cuh"]


@pytest.mark.parametrize("stem", ["tensor_weight", "native_weight_nchw"])
def test_kernels_that_racecheck_sees_compile(
    sanitize: ModuleType, edited: Path, monkeypatch: pytest.MonkeyPatch, stem: str
) -> None:
    monkeypatch.setattr(compiler, "INCLUDE", edited)
    run = next(run for run in sanitize.runs() if run.algorithm.stem == stem)
    launch = run.algorithm.plan(run.problem, run.config, sanitize.TARGET).launches[-1]
    assert compiler.compile_launch(launch, "sm_90a").registers > 0
