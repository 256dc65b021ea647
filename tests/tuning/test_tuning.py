"""Tuning, with a clock that a test holds: what is chosen, what is kept, and what happens when something goes wrong."""

from __future__ import annotations

import json
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import leanconv
from leanconv.call import bind
from leanconv.call.choose import by_model, choose
from leanconv.perf import tables
from leanconv.plan import Plan
from leanconv.runtime import errors
from leanconv.runtime.compile import CompileError
from leanconv.runtime.driver import CudaError
from leanconv.tuning import search, trials
from leanconv.tuning.trials import candidates_of, tolerance
from tests.cases import TARGETS, filter_problem
from tests.messages import says
from tests.tuning_stage import LAYER, LAYERS, MODEL, Stage, stage

__all__ = ["stage"]
FILE = f"{tables.slug(MODEL)}.json"


def stem(plan: Plan) -> str:
    return plan.launches[0].header.removesuffix(".cuh")


def quick(stage: Stage, place: int, us: float) -> tuple[Any, Any]:
    """Let one of the candidates take so long, all others 300 µs; gives its algorithm and configuration."""
    candidate = stage.candidates()[place]
    plan = stage.plan(candidate)
    stage.times = lambda given: us if given == plan else 300.0
    return candidate.algorithm, candidate.config


def picked(stage: Stage, problem: Any = LAYER) -> tuple[Any, Any]:
    chosen = choose(problem, stage.target)
    return chosen.algorithm, chosen.config


@pytest.mark.parametrize("us, displaces", [(297, False), (293, True)])
def test_a_winner_must_be_two_percent_quicker(stage: Stage, tmp_path: Path, us: float, displaces: bool) -> None:
    model = by_model(LAYER, stage.target)
    rival = quick(stage, 2, us)
    done = stage.search(tmp_path).run([LAYER])
    assert picked(stage) == (rival if displaces else (model.algorithm, model.config))
    assert done.problems[0].us == (us if displaces else 300) and done.problems[0].model_us == 300
    assert done.timed == 4 and str(tmp_path / FILE) in str(done)
    assert {path.name for path in tmp_path.iterdir()} - {f"{FILE}.lock", f"{FILE}.tuning.lock"} == {FILE}
    # what was chosen before is what has to be displaced later, not the cost model's choice
    quick(stage, 1, 290)
    stage.search(tmp_path, again=True).run([LAYER])
    assert picked(stage) == (stage.candidates()[1].algorithm, stage.candidates()[1].config)


def test_every_time_is_kept_and_a_new_candidate_is_timed_alone(stage: Stage, tmp_path: Path) -> None:
    assert stage.search(tmp_path, most=3).run([LAYER]).timed == 3
    begun = len(stage.started)
    again = stage.search(tmp_path, most=3).run([LAYER])
    assert again.timed == 0 and len(stage.started) == begun
    quick(stage, 3, 100)
    assert stage.search(tmp_path, most=4).run([LAYER]).timed == 1
    assert choose(LAYER, stage.target).us == 100
    entry = tables.Table.read(tmp_path / FILE).get(LAYER)
    assert entry is not None and sorted(each.us or 0 for each in entry.timed) == [100, 300, 300, 300]
    assert choose(LAYER, stage.target, limit=0).us is None, "another limit is another choice"


def test_a_strategy_is_timed_under_its_own_name(stage: Stage, tmp_path: Path) -> None:
    """Strategies of one algorithm share its name: a candidate is found again by the name of its kernel's files."""
    layer = replace(LAYER, c=256, h=14, w=14, k=256, groups=256, layout="NHWC")
    tried = [each.algorithm for each in stage.candidates(layer)]
    assert any(each.stem != each.name for each in tried)
    done = stage.search(tmp_path).run([layer])
    assert done.timed == len(tried) and done.problems[0].model_us == 300
    assert stage.search(tmp_path).run([layer]).timed == 0


def test_a_loser_is_stopped_early(stage: Stage, tmp_path: Path) -> None:
    plan = stage.plan(stage.candidates()[3])
    stage.times = lambda given: 3000.0 if given == plan else 300.0
    stage.search(tmp_path).run([LAYER])
    entry = tables.Table.read(tmp_path / FILE).get(LAYER)
    assert entry is not None
    runs = {each.us: each.runs for each in entry.timed}
    assert runs == {3000: 1, 300: 9}


def test_a_crash_in_the_middle_loses_nothing_that_was_timed(stage: Stage, tmp_path: Path) -> None:
    last = stage.plan(stage.candidates(LAYERS[2])[1], LAYERS[2]).launches[-1]
    stage.fails = lambda launch: CudaError("the bus is gone") if launch == last else None
    with says(CudaError, "the bus is gone"):
        stage.search(tmp_path).run(LAYERS)
    table = tables.Table.read(tmp_path / FILE)
    assert table.get(LAYERS[0]) and table.get(LAYERS[1]) and not table.get(LAYERS[2])
    stage.fails = lambda launch: None
    done = stage.search(tmp_path).run(LAYERS)
    assert [each.timed for each in done.problems] == [0, 0, 4]


def test_no_problem_is_begun_when_the_time_is_up(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 1.0, 9.0, 11.0, 12.0])
    monkeypatch.setattr(search, "perf_counter", lambda: next(moments))
    done = stage.search(tmp_path).run(LAYERS, seconds=10)
    assert [each.problem for each in done.problems] == list(LAYERS[:2]) and done.missing == LAYERS[2:]
    assert "1 problems are in no table" in str(done)
    monkeypatch.undo()


def test_only_what_runs_out_of_resources_is_skipped(stage: Stage, tmp_path: Path) -> None:
    bad = stage.plan(stage.candidates()[1]).launches[-1]
    too_much = CompileError("ptxas error: Entry function 'k' uses too much shared data (0x3c000 bytes)", "-o", "code")
    stage.fails = lambda launch: too_much if launch == bad else None
    done = stage.search(tmp_path).run([LAYER])
    assert (done.timed, done.problems[0].skipped) == (3, 1)
    (skipped,) = (e for e in tables.Table.read(tmp_path / FILE).get(LAYER).timed if e.us is None)  # type: ignore[union-attr]
    assert "too much shared data" in skipped.why
    stage.fails = lambda launch: CompileError("expected a ';'", "-o", "code") if launch == bad else None
    with says(CompileError, "expected a ';'"):
        stage.search(tmp_path, again=True).run([LAYER])


def test_wrong_values_are_told_and_never_chosen(stage: Stage, tmp_path: Path) -> None:
    """The first element of the result is a quarter too large."""
    algorithm, config = quick(stage, 2, 50)
    bad = stage.plan(stage.candidates()[2])
    stage.factor = lambda plan: 1.25 if plan == bad else 1.0
    with says(search.WrongResultError, "conv:n1,c4,h6", algorithm.name, "differs from"):
        stage.search(tmp_path).run([LAYER])
    assert picked(stage) != (algorithm, config) and choose(LAYER, stage.target).us == 300
    assert '"why":"wrong: ' in (tmp_path / FILE).read_text()


def test_a_filter_is_compared_with_the_cpu_engine(stage: Stage, tmp_path: Path) -> None:
    problem = leanconv.FilterProblem(1, 9, 20, 3, 3, (1, 1), x_pitch=20, x_step=180, y_pitch=20, y_step=180)
    assert stage.search(tmp_path).run([problem]).timed == 4
    assert choose(problem, stage.target).us == 300
    stage.factor = lambda plan: 2.0
    with says(search.WrongResultError, "register_cache", "the CPU engine"):
        stage.search(tmp_path, again=True).run([problem])


def test_a_filter_may_take_a_workspace_that_nobody_limits(stage: Stage, tmp_path: Path) -> None:
    problem = filter_problem(1, 9, 20, 35, 35)
    (tuned,) = stage.search(tmp_path).run([problem]).problems
    assert tuned.winner.algorithm.stem == "fourier_tiles" and tuned.winner.source == tables.USER
    assert choose(problem, stage.target).us == tuned.us


def test_of_two_that_tune_at_once_one_does(stage: Stage, tmp_path: Path) -> None:
    """Each has its own lock on the file, as two processes have."""
    done: list[Any] = []
    workers = [threading.Thread(target=lambda: done.append(stage.search(tmp_path).run([LAYER]))) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(each.timed for each in done) == [0, 4]


def test_a_full_disk(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.search(tmp_path).run([LAYERS[0]])
    before = (tmp_path / FILE).read_bytes()
    real = Path.write_text

    def write_text(self: Path, text: str, **how: Any) -> int:
        if FILE.removesuffix(".json") in self.name and "k16," in text:
            raise OSError(28, "No space left on device", str(self))
        return real(self, text, **how)

    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.warns(RuntimeWarning, match="cannot be kept.*No space left"):
        done = stage.search(tmp_path).run(LAYERS[1:])
    assert len(done.problems) == 2 and (tmp_path / FILE).read_bytes() == before
    assert [choose(layer, stage.target).source for layer in LAYERS] == [tables.USER] * 3, "this process knows them"
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".json" and path.name != FILE]


def test_modes(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = leanconv.tune([LAYER], mode="frozen")
    assert frozen.missing == (LAYER,) and not stage.started and "1 problems are in no table" in str(frozen)
    monkeypatch.setenv("LEANCONV_TUNING", "read-only")
    assert leanconv.tune([LAYER], most=4).timed == 4
    assert not (tmp_path / FILE).exists() and choose(LAYER, stage.target).source == tables.USER
    monkeypatch.setenv("LEANCONV_TUNING", "off")
    assert choose(LAYER, stage.target).source == tables.MODEL
    monkeypatch.setenv("LEANCONV_TUNING", "sometimes")
    monkeypatch.setattr(errors, "_warned", set())
    with pytest.warns(RuntimeWarning, match="LEANCONV_TUNING='sometimes' is not known; .*frozen.*; on is taken"):
        assert choose(LAYER, stage.target).source == tables.USER


def test_the_recorder_times_what_calls_have_met(stage: Stage, tmp_path: Path, rng: np.random.Generator) -> None:
    x, w = rng.standard_normal((1, 4, 6, 6), np.float32), rng.standard_normal((8, 4, 3, 3), np.float32)
    first = leanconv.conv2d(x, w, padding=1, device="cuda")
    folder = tmp_path / "other"
    with leanconv.record_tuning(folder, progress=False) as recorded:
        leanconv.conv2d(x, w, padding=1, device="cuda")
        leanconv.conv2d(x, w, padding=1, device="cuda", algorithm="direct")
        leanconv.conv2d(x[:0], w, padding=1, device="cuda")
        leanconv.conv2d(x, w, device="cuda", workspace_limit=1 << 20)
        assert recorded.problems == (LAYER, replace(LAYER, padding=(0, 0, 0, 0))) and not recorded.results
    assert [len(each.problems) for each in recorded.results] == [1, 1]
    assert (folder / FILE).exists() and not (tmp_path / FILE).exists()
    assert choose(LAYER, stage.target).source == tables.USER, "its folder is asked from now on"
    assert choose(replace(LAYER, padding=(0, 0, 0, 0)), stage.target, limit=1 << 20).source == tables.USER
    told = leanconv.explain(LAYER, device="cuda")
    assert told.source == "your table" and set(told.times.values()) == {300.0}
    assert "measured on such a GPU: " in str(told) and "300 µs, says your table" in told.why
    np.testing.assert_allclose(leanconv.conv2d(x, w, padding=1, device="cuda"), first, rtol=1e-5, atol=1e-5)
    with pytest.raises(KeyError), leanconv.record_tuning(folder) as stopped:
        leanconv.conv2d(x, w, padding=2, device="cuda")
        raise KeyError
    assert len(stopped.problems) == 1 and not stopped.results
    assert not bind.listeners, "what ended records no further call"
    stage.fails = lambda launch: CudaError("gone")
    before, interval = sys.getswitchinterval(), 0.0625
    sys.setswitchinterval(interval)
    try:
        with says(CudaError, "gone"):
            stage.search(folder, again=True).run([LAYER])
        assert sys.getswitchinterval() == interval
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize(
    "changes, most", [({}, 2e-5), ({"precision": "tf32"}, 5e-3), ({"dtype": "bfloat16"}, 2e-2), ({"dtype": "int8"}, 0)]
)
def test_values_may_differ_by_what_precision_allows(changes: dict[str, Any], most: float) -> None:
    assert 0.4 * most <= tolerance(replace(LAYER, **changes), 36) <= most


def test_what_nothing_waits_for_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after Ctrl-C, or a failure: only what has begun is compiled to its end."""
    monkeypatch.setattr(trials, "cores", lambda: 3)  # one thread compiles
    device = SimpleNamespace(compiled=lambda plan: time.sleep(0.02))
    plans = [each.plan(LAYER, TARGETS[0]) for each in candidates_of(LAYER, TARGETS[0], None)[:8]]
    with trials.Compiler(device) as compiler:  # type: ignore[arg-type]
        futures = {future for plan in plans for future in compiler.begin(plan)}
    assert sum(future.cancelled() for future in futures) > 1 and all(future.done() for future in futures)


def test_mistakes(stage: Stage) -> None:
    with says(ValueError, "mode='maybe'"):
        leanconv.tune([LAYER], mode="maybe")
    # LEANCONV_TUNING alone keeps calls from reading tables
    with says(ValueError, "mode='off'", "'on', 'read-only', 'frozen'"):
        leanconv.tune([LAYER], mode="off")
    with says(ValueError, "seconds=-1 is less than 0"):
        leanconv.tune([LAYER], seconds=-1)
    with says(TypeError, "problems[0]", "must be a ConvProblem"):
        leanconv.tune([3])  # type: ignore[list-item]
    with says(TypeError, "problems is of type ndarray; give a list: leanconv.tune([problem])"):
        leanconv.tune(np.array(1))  # type: ignore[arg-type]
    stage.device.target = replace(stage.target, model="")
    with says(ValueError, "has no name"):
        leanconv.tune([LAYER])


def test_peers_are_in_the_table(stage: Stage, tmp_path: Path) -> None:
    def peers(problem: Any, clock: Any) -> Any:
        return {"torch-fp32": 123.4}, "torch 9"

    done = stage.search(tmp_path, peers=peers).run([LAYER])
    assert done.problems[0].peers == {"torch-fp32": 123.4}
    assert tables.peer_us(LAYER, stage.target, "torch-fp32") == 123.4
    assert tables.peer_us(LAYER, stage.target, "torch-tf32") is None
    assert json.loads((tmp_path / FILE).read_text())["problems"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "torch-fp32 123.4 µs" in str(leanconv.explain(LAYER, device="cuda"))


def test_what_was_far_behind_is_not_timed_with_new_kernels(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fair = stage.plan(stage.candidates()[3]), stage.plan(stage.candidates()[2])
    stage.times = lambda given: 900.0 if given == slow else 350.0 if given == fair else 300.0
    stage.search(tmp_path).run([LAYER])
    monkeypatch.setattr(tables, "kernels_of", lambda plan: {"": "changed"})
    assert stage.search(tmp_path).run([LAYER]).timed == 3
    assert stage.search(tmp_path, again=True).run([LAYER]).timed == 4


def test_a_card_with_little_memory_has_fewer_buffers(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = 7
    real = stage.device.allocate

    def allocate(nbytes: int) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise leanconv.OutOfMemoryError(f"no {nbytes} bytes left")
        return real(nbytes)

    monkeypatch.setattr(stage, "cache_bytes", 1 << 20)
    monkeypatch.setattr(stage.device, "allocate", allocate)
    assert stage.search(tmp_path).run([LAYER]).timed == 4
    assert not stage.device.memory, "all of it was given back"
    left = 2
    with says(leanconv.OutOfMemoryError, "bytes left"):
        stage.search(tmp_path, again=True).run([LAYER])


def test_layers_of_volumes_are_tuned_as_what_computes_them(stage: Stage, tmp_path: Path) -> None:
    volume = leanconv.ConvProblem(2, 16, 9, 10, 8, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", d=3, t=1)
    images = replace(volume, n=6, d=1)
    asked: list[Any] = []

    def peers(problem: Any, clock: Any) -> Any:
        asked.append(problem)
        return {"torch-fp32": 100.0 * len(asked)}, "torch 9"

    (done,) = stage.search(tmp_path, peers=peers).run([volume, images]).problems
    assert done.problem == images and done.peers == {"torch-fp32": 100.0}
    assert asked == [volume, images], "PyTorch computes volumes as volumes"
    table = tables.Table.read(tmp_path / FILE)
    assert not table.get(volume).winners and table.get(images).winners
    assert [tables.peer_us(each, stage.target, "torch-fp32") for each in (volume, images)] == [100.0, 200.0]
    stage.search(tmp_path, peers=peers).run([volume, images])
    assert len(asked) == 2
    whole = replace(volume, t=3, padding_d=(1, 1))
    assert stage.search(tmp_path, most=2).run([whole]).timed == 2
    assert tables.Table.read(tmp_path / FILE).get(whole) is not None
    assert choose(whole, stage.target).us == 300


def test_filters_may_differ_by_what_their_types_round() -> None:
    f = leanconv.FilterProblem(1, 9, 20, 3, 3, (1, 1))
    for dtype, most in ("float32", 2e-5), ("uint8", 2e-2), ("float16", 3e-3):
        assert tolerance(replace(f, dtype=dtype, out_dtype=dtype), 9) <= most


def test_what_a_candidate_takes_is_kept() -> None:
    target, kinds = TARGETS[0], set()
    for layer in replace(LAYER, n=16, op="wgrad"), replace(LAYER, c=256, h=14, w=14, k=256):
        device, compiler = SimpleNamespace(target=target), SimpleNamespace(begin=lambda plan: [])
        candidates = candidates_of(layer, target, 1 << 24, 40)
        work = trials.Work(layer, candidates, tables.Entry(), device, compiler)  # type: ignore[arg-type]
        for each in candidates:
            plan, timed = each.plan(layer, target), work.timed(each, 1.0, 1)
            assert (timed.workspace, timed.prepared) == (plan.workspace_bytes, plan.prepared_bytes)
            kinds.add((timed.workspace > 0, timed.prepared > 0))
    assert kinds == {(False, False), (True, False), (False, True)}
