"""Commands that measure files of earlier kernels anew: made from records, in their order, and a run of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leanconv.bench import cases_of, columns, provenance
from leanconv.bench.results import Results
from leanconv.bench.suites import suite_names
from leanconv.cli.main import main as leanconv_main
from leanconv.runtime import launch
from report import older, records
from report.__main__ import main
from tests import made_up

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "benchmarks/results"
NEW = 40 * "f"


def listed(results: Path, *files: str) -> None:
    (results / "older.json").write_text(json.dumps(dict.fromkeys(files, "Earlier kernels.")), encoding="utf-8")


def suite(**more: Any) -> Results:
    """Two layers, in 4 and 8 seconds, of which one is of a kernel that has changed."""
    content = replace(made_up.suite(), **more)
    content.machine["kernels"] = provenance.kernels(["im2win_fused"]) | {"implicit_gemm": "earlier"}
    content.rows = [
        made_up.row("narrow", "leanconv:auto", "implicit_gemm", 10),
        made_up.row("narrow", "torch-fp32-nchw", "fprop", 10),
        made_up.row("wide", "leanconv:auto", "im2win_fused", 10),
    ]
    for about, seconds in zip(content.problems.values(), (4.0, 8.0), strict=True):
        about["seconds"] = seconds
    return content


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A suite, of whose three layers one was not measured; networks of two revisions; a file of another GPU."""
    where = tmp_path / "results"
    suite(op="dgrad", layout="NHWC", missing=["long"]).write(where / "nvidia-h200" / "some.json")
    about = made_up.ABOUT | {"gpu": "NVIDIA H200", "kernels": provenance.kernels(["im2win_fused"])}
    rows = [
        {"network": "unet", "mode": "fp32", "pass": "forward", "revision": "old", "date": "d", "warm_up_s": 20.5},
        {"network": "unet", "mode": "fp32", "pass": "training", "revision": "old", "date": "d", "seconds": 40.0},
        {"network": "vgg16", "mode": "fp32", "pass": "forward", "revision": "old", "date": "d", "torch_compile_us": 1},
        {"network": "vgg16", "mode": "tf32", "pass": "forward"},
        {"network": "edsr", "mode": "fp32", "pass": "forward", "revision": "old", "date": "d", "torch_compile_us": 1},
    ]
    records.write(where, "modes", about, rows)
    records.write(where, "large", about | {"gpu": "NVIDIA X"}, [{"layer": "a"}])
    listed(where, "nvidia-x/large.json", "nvidia-h200/modes.json", "nvidia-h200/some.json")
    monkeypatch.setattr(provenance, "same_headers", lambda commit: False)
    monkeypatch.setattr(launch, "open_device", lambda index: SimpleNamespace(name="NVIDIA H200"))
    return where


def test_commands_come_from_the_records(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["older", "--results", str(results), "--out", "new"])
    assert not stopped.value.code
    # of the networks those of the file's own revision, whose kernels are today's, are not listed
    assert capsys.readouterr().out == (
        "modes vgg16 fp32 forward: 1 rows, about 6 s\n"
        "    python -m report modes vgg16 --mode fp32 --pass forward --compile --results new\n"
        "modes edsr fp32 forward: 1 rows, about 6 s\n"
        "    python -m report modes edsr --mode fp32 --pass forward --compile --results new\n"
        "some: 3 rows (2 of earlier kernels or missing), about 18 s\n"
        "    python -m leanconv bench im2win --layout NHWC --op dgrad --engines 'leanconv:auto,torch*' "
        "--out new/nvidia-h200/some.json\n"
        "modes unet fp32 forward: 1 rows, about 26 s\n"
        "    python -m report modes unet --mode fp32 --pass forward --results new\n"
        "modes unet fp32 training: 1 rows, about 40 s\n"
        "    python -m report modes unet --mode fp32 --pass training --results new\n"
        "large: 1 rows, its record does not say how long\n"
        "    python -m report large --results new\n"
        "95 s, without starts and what is unknown\n"
    )


def test_engines_are_those_that_took_part() -> None:
    content = suite()
    own = made_up.row("narrow", "leanconv", "im2win", 10)
    skipped = {"problem": "narrow", "engine": "cudnn:fft-nchw fft", "reason": "too large"}
    assert older._engines(content) == "leanconv:auto,torch*"
    assert older._engines(replace(content, rows=[*content.rows, own], skipped=[skipped])) == "leanconv*,torch*,cudnn:*"
    # a library that was not installed was asked all the same; what comes by request alone was not
    absent = dict.fromkeys(("cudnn", "cudnn-graph", "cufft", "causal_conv1d", "cutlass", "tensorrt"), "not installed")
    unfolded = made_up.row("wide", "im2col+cublas", "unfold, bmm", 10)
    every = replace(content, rows=[*content.rows, own, unfolded], absent=absent)
    assert older._engines(every) is None
    compiled = replace(every, rows=[*every.rows, made_up.row("wide", "compile-fp32-nchw", "default", 9)])
    assert older._engines(compiled) == "leanconv*,torch*,compile-fp32-nchw,im2col+cublas"


def test_every_committed_file_has_a_command_that_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    found = older.plan(COMMITTED, Path("new"))
    files = {each.file for each in found}
    of_networks = {"nvidia-h200/modes.json"} & set(provenance.older(COMMITTED))
    assert files | of_networks == set(provenance.older(COMMITTED))
    for each in found:
        assert 0 < each.stale <= each.rows, each
        if each.command[:2] == ("python", "-m"):
            of = leanconv_main if each.command[2] == "leanconv" else main
            with pytest.raises(SystemExit) as stopped:
                # what a run adds
                added = ["--revision", NEW] if not each.by_hand else []
                of([*each.words[3:], *added, *["--seconds", "9"] * each.resumes, "--help"])
            assert not stopped.value.code, each.words
        if "bench" in each.command:
            content = Results.read(COMMITTED / each.file)
            cases, suite, layout, precision = cases_of(
                each.command[4], **{name: _option(each, name) for name in ("layout", "precision", "dtype", "op")}
            )
            assert suite in suite_names() and (layout, precision) == (content.layout, content.precision)
            assert {*content.problems, *content.missing} <= {case.name for case in cases}, each.file
    capsys.readouterr()


def _option(each: older.Again, name: str) -> str | None:
    return each.options[each.options.index(f"--{name}") + 1] if f"--{name}" in each.options else None


def test_trainings_that_differ_in_numbers_stay_apart(tmp_path: Path) -> None:
    """Of a network by its name, and of a start of several processes; equal ones are one process."""
    row = {"optimiser": "adam", "steps": 20, "seed": 0, "gpus": 1, "engine": "leanconv"}
    rows = [row | {"problem": "vgg16-b512-32"}, row | {"problem": "vgg16-b512-32", "seed": 1},
            row | {"problem": "vgg16-b512-32", "gpus": 2}, row | {"problem": "vgg19-b512-32"}]  # fmt: skip
    records.write(tmp_path, "training", made_up.ABOUT | {"gpu": "NVIDIA H200"}, rows)
    listed(tmp_path, "nvidia-h200/training.json")
    found = older.plan(tmp_path, Path("new"))
    assert [each.title for each in older.chosen(found, ["training"])] == [
        "training vgg16-b512-32 adam steps=20 seed=0 gpus=1",
        "training vgg16-b512-32 adam steps=20 seed=1 gpus=1",
        "training vgg16-b512-32 adam steps=20 seed=0 gpus=2",
        "training vgg19-b512-32 adam steps=20 seed=0 gpus=1",
    ]
    assert [(each.command[0], each.names) for each in older._joined(found)] == [
        ("python", ("vgg16", "vgg19")), ("python", ("vgg16",)), ("torchrun", ("vgg16",)),
    ]  # fmt: skip


def test_a_suite_that_measured_nothing_is_measured_whole(results: Path) -> None:
    nothing = replace(suite(op="dgrad", layout="NHWC"), problems={}, rows=[], missing=["narrow", "wide"])
    nothing.write(results / "nvidia-h200/some.json")
    again = next(each for each in older.plan(results, Path("new")) if each.title == "some")
    assert (again.rows, again.stale, again.seconds) == (2, 2, None)


def test_only_what_is_named_in_its_order(results: Path) -> None:
    found = older.plan(results, Path("new"))
    assert [each.title for each in older.chosen(found, ["some", "modes [ue]*", "modes"])] == [
        "some", "modes edsr fp32 forward", "modes unet fp32 forward", "modes unet fp32 training",
        "modes vgg16 fp32 forward",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="--only 'vgg16' is none of modes vgg16 fp32 forward, "):
        older.chosen(found, ["vgg16"])


class Machine:
    """What the commands would do on a GPU: each takes its time, and writes what it has."""

    def __init__(self, results: Path, out: Path) -> None:
        self.results, self.out, self.now, self.asked = results, out, 0.0, list[list[str]]()
        self.layers, self.code = 1, 0
        self.ahead: dict[str, float] = {}

    def run(self, words: list[str], stdout: Any = None, timeout: float | None = None) -> Any:
        assert words[0] == sys.executable
        if timeout is not None:  # what is thrown away
            assert stdout == subprocess.DEVNULL and words.count("--results") == 2 and words[-1] != str(self.out)
            self.ahead[words[4]] = timeout
            raise subprocess.TimeoutExpired(words, timeout)
        self.asked.append(words[1:])
        self.now += 50.0
        if "bench" in words:
            done = suite(op="dgrad", layout="NHWC", missing=["long"] if self.layers < 3 else [])
            done.machine["git_revision"] = NEW
            if self.layers == 3:
                done.problems["long"] = dict(done.problems["wide"])
            done.write(Path(words[words.index("--out") + 1]))
        elif "modes" in words:
            path = self.out / "nvidia-h200/modes.json"
            old = columns.read(path)
            for row in old["rows"]:
                row |= {"revision": NEW} if {row["network"], row["mode"], row["pass"]} <= {*words} else {}
            columns.write(path, old)
        return subprocess.CompletedProcess(words, self.code)


def test_a_run_keeps_its_time_and_a_later_one_goes_on(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new"
    gpu = Machine(results, out)
    monkeypatch.setattr(subprocess, "run", gpu.run)
    monkeypatch.setattr(time, "monotonic", lambda: gpu.now)

    def told(*arguments: str) -> list[str]:
        given = ["older", "--run", "--results", str(results), "--out", str(out), "--revision", NEW, *arguments]
        with pytest.raises(SystemExit) as stopped:
            main(given)
        assert not stopped.value.code
        return capsys.readouterr().out.splitlines()

    # two networks of equal options are one process; then the suite, which has time for two of its three layers
    assert told("--seconds", "60") == [
        "modes vgg16 fp32 forward: 50 s",
        "some: 50 s",
        "left: some, 1 of 3 rows",
        "left: modes unet fp32 forward, 1 of 1 rows",
        "left: modes unet fp32 training, 1 of 1 rows",
        "left: large, 1 of 1 rows; this GPU is nvidia-h200",
    ]
    first, second = gpu.asked
    assert first[:5] == ["-m", "report", "modes", "vgg16", "edsr"]
    assert first[-4:] == ["--seconds", "60", "--revision", NEW]
    assert second[-4:] == ["--seconds", "10", "--revision", NEW] and "--resume" not in second
    # rows of the other networks are still in the file
    assert [row.get("revision") for row in records.read(out / "nvidia-h200/modes.json")["rows"]] == [
        "old", "old", NEW, None, NEW
    ]  # fmt: skip

    gpu.asked.clear()
    assert told("--seconds", "80", "--ahead", "2", "--only", "modes unet*")[:2] == [
        "2 networks compiled: 0 s", "modes unet fp32 forward: 50 s"
    ]  # fmt: skip
    assert gpu.ahead == {"unet": 20.0}, "both passes"
    gpu.layers, gpu.asked, gpu.code = 3, [], 1
    assert told("--only", "some") == ["some: 50 s, exit code 1"]
    assert gpu.asked[0][-2:] == ["--resume", str(out / "nvidia-h200/some.json")]
    gpu.asked.clear()
    assert told("--only", "some") == [] == gpu.asked


def test_what_cannot_go_on_is_not_begun_without_the_time_that_it_takes(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = made_up.ABOUT | {"gpu": "NVIDIA H200"}
    records.write(results, "first-calls", about, [{"way": "one by one", "seconds": 30.0}])
    records.write(results, "tuning", about, [])
    (results / "nvidia-h200/tuning.json").write_text('{"groups": [{"group": "a"}]}', encoding="utf-8")
    listed(results, "nvidia-h200/first-calls.json", "nvidia-h200/tuning.json")
    asked: list[Any] = []

    def run(words: list[str]) -> Any:
        asked.append(words)
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", run)
    found = older.plan(results, tmp_path)
    assert list(older.run(found, results, tmp_path, 29.0, NEW)) == [
        "left: first-calls, 1 of 1 rows", "left: tuning, 1 of 1 rows; without a GPU, of timed-candidates.json",
    ]  # fmt: skip
    assert not asked
    lines = list(older.run(found, results, tmp_path, 31.0, NEW))
    assert lines[0] == "first-calls: 0 s" and asked[0][1:4] == ["-m", "report", "first-calls"]
