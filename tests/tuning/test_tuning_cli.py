"""``leanconv tune``: suites, problems in words and models; tables shown, checked, exported and imported."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import leanconv
from leanconv.bench import candidates
from leanconv.call.choose import choose
from leanconv.cli import doctor
from leanconv.cli import tune as tuner
from leanconv.cli.command_line import MISTAKE
from leanconv.cli.main import main
from leanconv.perf import tables
from leanconv.perf.tables import Entry, Table, Timed
from leanconv.runtime import launch
from leanconv.runtime.driver import CudaUnavailableError
from leanconv.tuning.search import TuningResult
from leanconv.words import format_problem
from tests.messages import line_of
from tests.tuning_stage import LAYER, LAYERS, MODEL, Stage, stage

__all__ = ["stage"]
FILE = f"{tables.slug(MODEL)}.json"
WORDS = format_problem(LAYER)
NETWORK = """
import torch
from torch.nn import Conv2d, Sequential

example_inputs = torch.empty(1, 4, 6, 6)

def small():
    return Sequential(Conv2d(4, 8, 3, padding=1, bias=False))

with_inputs = small().eval(), torch.empty(2, 4, 6, 6)
number = 3
"""


@pytest.mark.parametrize("command", [(WORDS,), ("--verify",), ("--refresh",)])
def test_the_cpu_is_not_tuned(run: Any, command: tuple[str, ...]) -> None:
    code, _, err = run("tune", *command, "--device", "cpu")
    assert code == MISTAKE and line_of(err) == "error: device='cpu' is no GPU; give 'cuda' or 'cuda:N'"


def test_a_problem_is_tuned_shown_exported_and_imported(
    run: Any, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run("tune", WORDS, "--no-peers")
    assert code == 0 and "1 problems tuned" in out and str(tmp_path / FILE) in out
    assert choose(LAYER, stage.target).source == tables.USER
    code, out, _ = run("tune", "--show")
    assert code == 0 and "your table" in out and "300.00" in out
    code, out, _ = run("tune", "--verify")
    assert code == 0 and "1 of 1 entries valid, and take 1.000 of their times" in out
    exported = tmp_path / "other" / "mine.json"
    assert run("tune", "--export", exported)[0] == 0 and len(Table.read(exported)) == 1
    (tmp_path / FILE).unlink()
    monkeypatch.setenv("LEANCONV_TUNING", "frozen")
    assert "LEANCONV_TUNING=frozen" in line_of(run("tune", "--import", exported)[2])
    assert "1 problems are in no table" not in run("tune", WORDS)[1], "this process knows it"
    monkeypatch.delenv("LEANCONV_TUNING")
    code, out, _ = run("tune", "--import", exported)
    assert code == 0 and (tmp_path / FILE).exists() and "1 of them imported" in out
    assert "imported: 1 of 1 entries are of today's kernels" in out
    # the form in which the repository has timed candidates is taken too
    candidates.write(exported, Table.read(exported))
    (tmp_path / FILE).unlink()
    code, out, _ = run("tune", "--import", exported)
    assert code == 0 and "1 of them imported" in out and set(Table.read(tmp_path / FILE)) == {WORDS}


def test_a_winner_that_is_wrong_by_now_is_told(run: Any, stage: Stage, tmp_path: Path) -> None:
    stage.search(tmp_path).run([LAYER])
    stage.factor = lambda plan: 3.0 if plan.launches[0].header != "kernels/direct/direct.cuh" else 1.0
    code, out, _ = run("tune", "--verify")
    assert code == 1 and f"{WORDS}, " in out and "differs from direct" in out and "0 of 1 entries valid" in out


def test_the_seconds_are_those_of_the_whole_command(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two limits of workspace the second has what the first leaves."""
    given: list[float | None] = []
    moments = iter([100.0, 101.0, 107.0, 200.0])

    def tune(problems: Any, seconds: float | None, **more: Any) -> Any:
        given.append(seconds)
        return TuningResult((), (), 0.0, None)

    monkeypatch.setattr(tuner, "tune", tune)
    monkeypatch.setattr(tuner, "perf_counter", lambda: next(moments))
    work: Any = {None: [LAYER], 0: [LAYER]}
    tuner.run(work, "cuda", None, False, False, 5.0)
    assert given == [4.0, 0.0]
    tuner.run(work, "cuda", None, False, False, None)
    assert given[2:] == [None, None]


def test_what_changed_kernels_have_made_void_is_tuned_anew(run: Any, stage: Stage, tmp_path: Path) -> None:
    assert "nothing to tune anew" in run("tune", "--refresh")[1]
    run("tune", WORDS, "--no-peers")
    assert "nothing to tune anew" in run("tune", "--refresh")[1]
    file = tmp_path / FILE
    file.write_text(re.sub(r'"kernels":\{"(\w+)":"\w+"', r'"kernels":{"\1":"old"', file.read_text()))
    tables.forget()
    assert choose(LAYER, stage.target).source == tables.MODEL
    code, out, _ = run("tune", "--verify")
    assert code == 0 and "0 of 1 entries valid; leanconv tune --refresh" in out and "kernels have changed: " in out
    told = str(leanconv.explain(LAYER, device="cuda"))
    code, out, _ = run("tune", "--show")
    assert code == 0 and " (stale) " in out and "leanconv tune --refresh tunes it anew" in out
    exported = tmp_path / "other" / "mine.json"
    run("tune", "--export", exported)
    assert "imported: 0 of 1 entries are of today's kernels" in run("tune", "--import", exported)[1]
    assert "stale, of kernels before today's: " in told and "measured on such a GPU" not in told
    code, out, err = run("tune", "--refresh", "--no-peers")
    assert code == 0 and "1 problems tuned" in out, err
    assert choose(LAYER, stage.target).source == tables.USER
    assert "stale" not in run("tune", "--show")[1]


def test_an_export_is_a_copy(run: Any, stage: Stage, tmp_path: Path) -> None:
    """An earlier export makes way for it, any other file stays, and no lock is left beside it."""
    exported = tmp_path / "other" / "mine.json"
    stage.search(tmp_path).run(LAYERS[:2])
    assert run("tune", "--export", exported)[0] == 0 and len(Table.read(exported)) == 2
    (tmp_path / FILE).unlink()
    tables.forget()
    stage.search(tmp_path).run(LAYERS[:1])
    code, out, _ = run("tune", "--export", exported)
    assert code == 0 and f"{exported}: 1 problems of {MODEL}" in out and set(Table.read(exported)) == {WORDS}
    assert [path.name for path in exported.parent.iterdir()] == ["mine.json"]
    foreign = Table({"name": "another"}).text()
    for text, why in (
        ("my notes", "is no table of tuned problems"),
        ("", "is no table"),
        (foreign, "is for another, "),
    ):
        exported.write_text(text)
        code, _, err = run("tune", "--export", exported)
        assert code == 2 and why in line_of(err) and "it is not overwritten" in err, err
        assert exported.read_text() == text and len([*exported.parent.iterdir()]) == 1


def test_an_export_without_a_gpu_takes_the_only_table(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(index: int) -> Any:
        raise CudaUnavailableError("no NVIDIA driver was found (a test)")

    monkeypatch.setattr(launch, "open_device", missing)
    monkeypatch.setenv("LEANCONV_TUNING_DIR", str(tmp_path))
    export = "tune", "--export", tmp_path / "other" / "mine.json"
    told = line_of(run(*export)[2])
    assert told == f"error: {tmp_path} has no table of tuned problems; leanconv tune writes one"
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(Table({"name": name}).text())
    told = line_of(run(*export)[2])
    assert told.endswith("has tables of several GPUs, and no GPU is here to say which; copy one of a.json, b.json")
    (tmp_path / "a.json").unlink()
    assert "mine.json: 0 problems of b" in run(*export)[1]


def test_shown_problems_are_whole_where_programs_read_them(run: Any, stage: Stage, tmp_path: Path) -> None:
    long = replace(
        LAYER, c=40000, k=40000, groups=10000, stride=(100, 101), padding=(1000, 1001, 1002, 1003), dilation=(2, 3),
        precision="relaxed", bias=True, scale=True, add=True, activation="leaky_relu:0.125", layout="NHWC",
    )  # fmt: skip
    won = Timed("direct", {"a": 1}, 1.0)
    entry = Entry((won,), {"auto": won, "123456789": won}, {f"torch-{i}": 1.0 for i in range(9)})
    table = Table({"name": "another"}, {format_problem(long): entry})
    (tmp_path / FILE).write_text(table.text())
    code, out, err = run("tune", "--show")
    assert code == 0 and f" {format_problem(long)} " in out, err
    assert f" {format_problem(long)} (workspace_limit 123456789) " in out


def test_a_model_of_a_file(run: Any, stage: Stage, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path, beside = tmp_path / "network.py", tmp_path / "beside_the_network.py"
    path.write_text(f"import {beside.stem}\n{NETWORK}")
    beside.write_text("")
    code, out, err = run("tune", f"{path}:small", "--no-peers")
    assert code == 0, err
    known = Table.read(tmp_path / FILE)
    # the image needs no gradient; that of the filters has the workspace that `leanconv.torch.enable` gives it
    assert set(known) == {WORDS, f"{WORDS},wgrad"}
    assert set(known.get(f"{WORDS},wgrad").winners) == {str(32 << 20)}  # type: ignore[union-attr]
    assert "workspace_limit 33554432" in out
    run("tune", f"{path}:with_inputs", "--no-peers", "--layout", "NHWC")
    run("tune", f"{path}:small", "--no-peers", "--no-backward", "--input", "3x4x7x7", "--batch", "5")
    more = {key.removeprefix("conv:") for key in Table.read(tmp_path / FILE)} - {k.removeprefix("conv:") for k in known}
    assert more == {"n2,c4,h6,w6,k8,r3,s3,pad1,NHWC", "n5,c4,h7,w7,k8,r3,s3,pad1,NCHW"}


def test_mistakes(run: Any, stage: Stage, tmp_path: Path) -> None:
    path = tmp_path / "network.py"
    path.write_text(NETWORK.replace("example_inputs", "other"))
    for arguments, words in (
        ((), "give one thing to tune"),
        (("resnet-50", "--show"), "give one thing to tune"),
        (("alexnet",), "'alexnet' is no suite"),
        (("resnet-50", "--input", "1x2"), "are for models"),
        ((f"{path}:small",), "give --input 8x3x224x224"),
        ((f"{path}:small", "--input", "many"), "'many' is no shape"),
        ((f"{path}:large",), "has no large"),
        ((f"{path}:number",), "neither a torch.nn.Module"),
        ((f"{tmp_path}/none.py:x",), "there is no file"),
        (("--export", "x.json"), f"{tmp_path} has no table of tuned problems of {MODEL}; leanconv tune writes one"),
        ((WORDS, "--refresh"), "give one thing to tune"),
        (("--import", str(path)), "network.py is damaged: "),
        ((WORDS, "--mode", "maybe"), "mode='maybe'"),
        ((WORDS, "--seconds", "-1"), "Invalid value for '--seconds'"),
    ):
        code, _, err = run("tune", *arguments)
        assert code == 2 and words in line_of(err), (arguments, err)
    assert "there is no table; leanconv tune writes one" in run("tune", "--show")[1]


def test_the_page_runs(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "tuning.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, "docs/tuning.md", "exec"), {})
    told = capsys.readouterr().out
    assert "the cost model {}" in told and "1 problems tuned" in told and "300.0, 300.0)]" in told
    commands = [line for line in re.findall(r"^leanconv (tune .*)$", text, re.MULTILINE)]
    assert len(commands) == 8
    for command in commands:
        with pytest.raises(SystemExit) as stopped:
            main([*shlex.split(command, comments=True), "--help"])
        assert not stopped.value.code, command


def test_the_doctor_looks_at_the_tables(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._tables().text.startswith("there is none")
    stage.search(tmp_path).run([LAYER])
    assert doctor._tables().text == f"your table has 1 for {MODEL}, 1 of 1 entries are of today's kernels"
    shipped = tables.path_of(tables.SHIPPED, MODEL)
    shipped.parent.mkdir(parents=True)
    shutil.copy(tmp_path / FILE, shipped)
    assert doctor._tables().text.endswith(
        f"; the shipped table has 1 for {MODEL}, "
        "1 of 1 entries can run (leanconv tune --verify compares their machine code)"
    )
    shipped.unlink()
    path = tmp_path / FILE
    path.write_text(re.sub(r'"kernels":\{"(\w+)":"', r'"kernels":{"\1":"0', path.read_text()))
    assert doctor._tables().text.endswith("0 of 1 entries are of today's kernels")
    path.write_text(path.read_text().replace('"winners":{', '"winners":[{'))
    with pytest.warns(RuntimeWarning):
        text = doctor._tables().text
    assert text == f"your table has 1 for {MODEL}, 1 of which cannot be read, 0 of 0 entries are of today's kernels"
    (tmp_path / FILE).write_text("{")
    assert doctor._tables().state == "broken" and FILE in doctor._tables().text
    monkeypatch.setenv("LEANCONV_TUNING", "off")
    assert doctor._tables().state == "absent"
