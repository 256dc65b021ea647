"""workspace_limit: what it permits, what it refuses and how, wherever a call runs and wherever the limit comes from."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from leanconv import ConvProblem, NoAlgorithmError, conv2d, explain
from leanconv.api import resolve_call
from leanconv.bench import Case, run_suite
from leanconv.bench.peers.base import Candidate
from leanconv.bench.run import _Run
from leanconv.call import bind, choose, lookup
from leanconv.cli.command_line import MISTAKE
from leanconv.cli.main import main
from leanconv.cpu import CPU_ALGORITHMS
from leanconv.kernels import ALGORITHMS
from leanconv.kernels.papers.im2win import Im2win, tensor_elements
from leanconv.kernels.simt.tiles import TileConfig
from leanconv.plan import Target
from leanconv.runtime import env
from tests.cases import TARGETS
from tests.oracles import oracle_conv, relative_error
from tests.stand_ins import HostDevice, Other

NAME = "LEANCONV_WORKSPACE_LIMIT"
PROBLEM = ConvProblem(n=2, c=4, h=9, w=7, k=6, r=3, s=2, padding=(1, 1, 1, 1))
#: N * C * P * (columns of the padded row) * R floats: 2 * 4 * 9 * 9 * 3 * 4 bytes
NEEDED = 7776


@pytest.fixture(autouse=True)
def no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)


@pytest.fixture
def given(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    x, w = (rng.standard_normal(shape, np.float32) for shape in (PROBLEM.x_shape, PROBLEM.w_shape))
    return x, w


def last_workspace(device: HostDevice) -> int:
    """The workspace pointer of the last launch."""
    return int(device.launches[-1][1]["workspace"])


def refusal(limit: int) -> str:
    return rf"im2win: it needs {NEEDED} bytes of workspace, and workspace_limit is {limit}$"


# What the numbers are


def test_the_need_is_the_im2win_tensor() -> None:
    needed = {Im2win().workspace_bytes(PROBLEM, config) for config in Im2win().configs(PROBLEM, TARGETS[0])}
    assert needed == {NEEDED} == {4 * tensor_elements(PROBLEM)}


def test_plans_take_what_was_stated_and_the_cpu_engine_nothing() -> None:
    target = Target("sm_90a", 132)
    some = [
        PROBLEM, replace(PROBLEM, layout="NHWC", groups=2, stride=(2, 1), bias=True), replace(PROBLEM, n=0),
        replace(PROBLEM, layout="CHWN"),
    ]  # fmt: skip
    with_one = set()
    for problem in some:
        for algorithm in ALGORITHMS:
            if algorithm.reasons(problem, TARGETS[0]):
                continue
            for config in algorithm.configs(problem, target):
                stated = algorithm.workspace_bytes(problem, config)
                if stated:
                    with_one.add(algorithm.name)
                assert algorithm.plan(problem, config, target).workspace_bytes == stated, (algorithm.name, config)
        assert not any(a.workspace_bytes(problem, None) for a in CPU_ALGORITHMS if a.solves == "conv2d")
    assert "im2win" in with_one and not with_one & {"im2win_fused", "implicit_gemm", "direct"}


@pytest.mark.parametrize(
    "text, wanted",
    [("0", 0), ("1048576", 2**20), ("64MiB", 64 * 2**20), (" 3 kib ", 3072), ("2kB", 2000), ("7 B", 7), ("1GB", 10**9),
     ("5GiB", 5 * 2**30), ("2mb", 2 * 10**6), ("1TiB", 2**40), ("1TB", 10**12)],
)  # fmt: skip
def test_bytes_in_words(text: str, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.parse_bytes("limit", text) == wanted
    monkeypatch.setenv(NAME, text)
    assert env.workspace_limit() == wanted


@pytest.mark.parametrize("text", ["-1", "1.5MiB", "64 megs", "MiB", "1e6", "0x10", "1_000", "64M", "none", "٣", " "])
def test_bytes_that_are_none(text: str, given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, text)
    calls = env.workspace_limit, partial(conv2d, *given), partial(explain, conv2d, *given), partial(explain, PROBLEM)
    for call in calls:
        with pytest.raises(ValueError, match=f"^{NAME}={re.escape(repr(text))} is no number of bytes"):
            call()
    assert conv2d(*given, workspace_limit=0).shape == (2, 6, 7, 6), "a limit that is given asks no environment"


def test_a_number_that_python_does_not_read(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = (NAME, "LEANCONV_CACHE_LIMIT", "LEANCONV_THREADS")
    for name in names:
        monkeypatch.setenv(name, "9" * 5000)
    said = [f"{name} has 5000 digits, which are too many" for name in names]
    with pytest.raises(ValueError, match=said[0]):
        conv2d(*given)
    assert sorted(env.mistakes()) == sorted(said)


def test_an_empty_setting_is_none(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "")
    assert env.workspace_limit() is None
    assert explain(PROBLEM, algorithm="im2win").workspace_limit is None


@pytest.mark.parametrize(
    "value, kind, text",
    [(True, TypeError, "True is not an integer"), (1.0, TypeError, "1.0 is not an integer"),
     ("64MiB", TypeError, "'64MiB' is text; as bytes it is 67108864"), ([1], TypeError, r"\[1\] is not an integer"),
     (-1, ValueError, "-1 is below 0")],
)  # fmt: skip
@pytest.mark.parametrize("device", [None, "cuda"])
def test_values_that_are_no_limit(
    value: Any, kind: type[Exception], text: str, device: Any, given: Any, host_device: HostDevice
) -> None:
    for call in (conv2d, partial(explain, conv2d), partial(resolve_call, conv2d)):
        with pytest.raises(kind, match=f"^workspace_limit={text}"):
            call(*given, device=device, workspace_limit=value)
    with pytest.raises(kind, match=f"^workspace_limit={text}"):
        explain(PROBLEM, device=device, workspace_limit=value)
    assert host_device.launches == []


def test_numpys_integers_are_limits(given: Any) -> None:
    assert resolve_call(conv2d, *given, workspace_limit=np.int64(5)).workspace_limit == 5


# What is permitted and refused


def test_auto_allocates_the_output_and_nothing_else(fake_cupy: Any, host_device: HostDevice, given: Any) -> None:
    x, w = map(fake_cupy.asarray, given)
    for options in ({}, {"workspace_limit": 0}, {"workspace_limit": NEEDED - 1}):
        fake_cupy.allocations = 0
        for _ in range(3):
            y = conv2d(x, w, padding=1, **options)
            assert last_workspace(host_device) == 0
        assert fake_cupy.allocations == 3 and fake_cupy.copies == 0
        assert relative_error(y.host, oracle_conv(PROBLEM, *given, None)) < 2e-6


def test_auto_takes_a_workspace_where_it_is_permitted_and_pays(
    fake_cupy: Any, host_device: HostDevice, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = map(fake_cupy.asarray, given)
    chosen = explain(conv2d, x, w, padding=1).chosen
    able = [a for a in ALGORITHMS if not a.reasons(PROBLEM, TARGETS[0])]
    costs = {a.name: a.within(PROBLEM, TARGETS[0])[0][0] for a in able}
    monkeypatch.setattr(Im2win, "by_name_only", False)
    for cost, pays in ((max(costs.values()) + 1, False), (min(costs.values()) - 1, True)):
        monkeypatch.setattr(Im2win, "timed", lambda self, problem, target, cost=cost: [(cost, TileConfig())])
        for limit, taken in ((None, False), (0, False), (NEEDED - 1, False), (NEEDED, pays), (2**40, pays)):
            lookup.forget()
            told = explain(conv2d, x, w, padding=1, workspace_limit=limit)
            assert told.chosen == ("im2win" if taken else chosen), (cost, limit)
            assert told.workspace_limit == (limit or 0) and told.workspace_bytes == (NEEDED if taken else 0)
            y = conv2d(x, w, padding=1, workspace_limit=limit)
            assert bool(last_workspace(host_device)) is taken
            assert relative_error(y.host, oracle_conv(PROBLEM, *given, None)) < 2e-6


def test_by_name_it_takes_what_it_needs_unless_told_otherwise(
    fake_cupy: Any, host_device: HostDevice, given: Any
) -> None:
    x, w = map(fake_cupy.asarray, given)
    for options in ({}, {"workspace_limit": NEEDED}, {"workspace_limit": 2**40}):
        fake_cupy.allocations = 0
        y = conv2d(x, w, padding=1, algorithm="im2win", **options)
        assert fake_cupy.allocations == 2 and last_workspace(host_device) not in (0, y.data.ptr)
        assert relative_error(y.host, oracle_conv(PROBLEM, *given, None)) < 2e-6
    launched = len(host_device.launches)
    for limit in (NEEDED - 1, 0):
        with pytest.raises(NoAlgorithmError, match=refusal(limit)):
            conv2d(x, w, padding=1, algorithm="im2win", workspace_limit=limit)
    assert len(host_device.launches) == launched
    # the others need none
    assert conv2d(x, w, padding=1, algorithm="im2win_fused", workspace_limit=0).shape == PROBLEM.y_shape


def test_the_workspace_lives_until_the_launch_and_is_as_large_as_needed(
    fake_cupy: Any, host_device: HostDevice, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import weakref

    made: list[Any] = []
    empty = fake_cupy.empty

    def watched(shape: Any, dtype: Any) -> Any:
        array = empty(shape, dtype)
        made.append((weakref.ref(array), array.host.nbytes, array.data.ptr))
        return array

    x, w = map(fake_cupy.asarray, given)
    monkeypatch.setattr(fake_cupy, "empty", watched)
    executable = type(host_device).executable

    def checking(self: HostDevice, plan: Any, roles: Any) -> Any:
        run = executable(self, plan, roles)

        def checked(stream: int, values: Any) -> None:
            _, (workspace, nbytes, pointer) = made[-2:]
            assert workspace() is not None and nbytes >= NEEDED and values[roles.index("workspace")] == pointer
            run(stream, values)

        return checked

    monkeypatch.setattr(type(host_device), "executable", checking)
    for _ in range(2):
        conv2d(x, w, padding=1, algorithm="im2win")
    assert len(made) == 4 and all(array() is None for array, *_ in made), "the call keeps nothing"


def test_numpy_arrays_on_the_gpu(host_device: HostDevice, given: Any) -> None:
    y = conv2d(*given, padding=1, algorithm="im2win", device="cuda")
    assert last_workspace(host_device) and host_device.memory == {}
    assert relative_error(y, oracle_conv(PROBLEM, *given, None)) < 2e-6
    with pytest.raises(NoAlgorithmError, match=refusal(9)):
        conv2d(*given, padding=1, algorithm="im2win", device="cuda", workspace_limit=9)


def test_the_cpu_engine_and_pytorch_on_the_cpu_fit_any_limit(given: Any) -> None:
    expected = oracle_conv(PROBLEM, *given, None)
    for name in ("auto", "im2win", "im2col", "direct"):
        assert relative_error(conv2d(*given, padding=1, algorithm=name, workspace_limit=0), expected) < 2e-6
    torch = pytest.importorskip("torch")
    x, w = map(torch.from_numpy, given)
    assert relative_error(conv2d(x, w, padding=1, workspace_limit=0).numpy(), expected) < 2e-6


def test_arrays_that_are_carried_keep_their_limit(given: Any) -> None:
    with pytest.raises(ValueError, match="^workspace_limit=-2 is below 0"):
        conv2d(Other(given[0]), Other(given[1]), workspace_limit=-2)


@pytest.mark.gpu
def test_on_a_gpu_memory_and_graphs() -> None:
    torch = pytest.importorskip("torch")
    x, w = torch.randn(8, 16, 32, 32, device="cuda"), torch.randn(16, 16, 3, 3, device="cuda")
    needed = Im2win().workspace_bytes(resolve_call(conv2d, x, w, padding=1).problem, TileConfig())
    expected = conv2d(x, w, padding=1)
    for name, extra in (("auto", 0), ("im2win", needed)):
        y = conv2d(x, w, padding=1, algorithm=name)
        del y  # or the next one would take its place, and the balance would be even
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = conv2d(x, w, padding=1, algorithm=name)
        assert 0 <= torch.cuda.max_memory_allocated() - before - expected.nbytes - extra < 1024, name
        assert torch.cuda.memory_allocated() - before == expected.nbytes, "the workspace was not given back"
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = conv2d(x, w, padding=1, algorithm="im2win")
        second = conv2d(first, w, padding=1, algorithm="im2win")
    for _ in range(3):
        x.normal_()
        # what would be written over, if a workspace of the graph went back to everybody's pool
        others = [torch.full((needed // 4,), 7.0, device="cuda") for _ in range(4)]
        graph.replay()
        wanted = conv2d(x, w, padding=1, algorithm="im2win")
        assert torch.equal(first, wanted)
        assert torch.equal(second, conv2d(wanted, w, padding=1, algorithm="im2win"))
        assert all(bool((other == 7).all()) for other in others)


# Where the limit comes from


def test_the_setting_is_obeyed_by_calls_that_are_warm(
    fake_cupy: Any, host_device: HostDevice, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = map(fake_cupy.asarray, given)

    def call(**options: Any) -> Any:
        return conv2d(x, w, padding=1, algorithm="im2win", **options)

    for _ in range(2):
        monkeypatch.delenv(NAME, raising=False)
        call()
        monkeypatch.setenv(NAME, "7KiB")
        with pytest.raises(NoAlgorithmError, match=refusal(7168)):
            call()
        call(workspace_limit=NEEDED)  # the argument comes first
        monkeypatch.setenv(NAME, "8KiB")
        call()
        with pytest.raises(NoAlgorithmError, match=refusal(0)):
            call(workspace_limit=0)
    assert host_device.executables == 3, "one for each limit that permits it, made once"
    monkeypatch.setattr(Im2win, "by_name_only", False)
    monkeypatch.setattr(Im2win, "timed", lambda self, problem, target: [(-1.0, TileConfig())])
    conv2d(x, w, padding=1)
    assert last_workspace(host_device), "the setting holds for auto too"
    assert explain(conv2d, x, w, padding=1).chosen == explain(PROBLEM, device="cuda").chosen == "im2win"
    monkeypatch.delenv(NAME)
    conv2d(x, w, padding=1)
    assert not last_workspace(host_device)


def test_the_raw_setting_follows_os_environ(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = env._raw_reader("A_NAME_THAT_IS_NOT_SET")
    monkeypatch.setattr(os, "environ", {NAME: "3"})
    assert env._raw_reader(NAME)() == "3", "whatever os.environ is"
    monkeypatch.undo()
    assert slow() is None and env.raw_workspace_limit() is None
    os.environ[NAME] = "12"
    try:
        assert env.raw_workspace_limit() in ("12", b"12")
    finally:
        del os.environ[NAME]
    assert env.raw_workspace_limit() is None


# What is told


def test_explain_shows_bytes_and_limit(host_device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    told = explain(PROBLEM, device="cuda", algorithm="im2win")
    assert (told.chosen, told.workspace_bytes, told.workspace_limit) == ("im2win", NEEDED, None)
    assert f"workspace {NEEDED} bytes (no limit)" in str(told)
    told = explain(PROBLEM, device="cuda", algorithm="im2win", workspace_limit=8000)
    assert f"workspace {NEEDED} bytes (workspace_limit 8000)" in str(told)
    told = explain(PROBLEM, device="cuda", algorithm="im2win", workspace_limit=10)
    assert told.chosen is None and told.why == "algorithm='im2win' cannot run it"
    assert told.others["im2win"] == (f"it needs {NEEDED} bytes of workspace, and workspace_limit is 10",)
    assert "workspace_limit 10" in str(told)
    told = explain(PROBLEM, device="cuda", workspace_limit=NEEDED)
    assert told.others["im2win"] == (f"{choose.BY_NAME_ONLY}; algorithm='im2win' chooses it",)
    monkeypatch.setattr(Im2win, "by_name_only", False)
    told = explain(PROBLEM, device="cuda")
    assert told.chosen != "im2win" and told.workspace_limit == 0
    assert told.others["im2win"] == (f"it needs {NEEDED} bytes of workspace, and workspace_limit is 0",)
    assert "workspace 0 bytes (workspace_limit 0)" in str(told)
    told = explain(PROBLEM, device="cuda", workspace_limit=NEEDED)
    assert "it could" in told.others["im2win"][0]
    told = explain(PROBLEM, workspace_limit=77)
    assert told.workspace_bytes == 0 and told.workspace_limit == 77 and "workspace_limit 77" in str(told)


def test_explain_tells_of_what_is_ready_under_its_limit(host_device: HostDevice, given: Any) -> None:
    conv2d(*given, padding=1, algorithm="im2win", device="cuda", workspace_limit=8000)
    assert bind.is_loaded(PROBLEM, 0, "im2win", 8000) and not bind.is_loaded(PROBLEM, 0, "im2win")
    told = explain(conv2d, *given, padding=1, algorithm="im2win", device="cuda", workspace_limit=8000)
    assert len(told.kernels) == 2


def test_describe(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_call(conv2d, *given).workspace_limit is None
    monkeypatch.setenv(NAME, "1kB")
    assert resolve_call(conv2d, *given).workspace_limit == 1000
    assert resolve_call(conv2d, *given, workspace_limit=4).workspace_limit == 4


def run_cli(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    captured = capsys.readouterr()
    return int(stopped.value.code or 0), captured.out, captured.err


def test_the_command_line(host_device: HostDevice, capsys: pytest.CaptureFixture[str]) -> None:
    explain_it = ("explain", "conv:n2,c4,h9,w7,k6,r3,s2,pad1,NCHW", "--device", "cuda", "--algorithm", "im2win")
    code, out, _ = run_cli(capsys, *explain_it)
    assert code == 0 and "(no limit)" in out and f"workspace {NEEDED} bytes" in out
    code, out, _ = run_cli(capsys, *explain_it, "--workspace-limit", "7KiB")
    assert code == 0 and f"it needs {NEEDED} bytes of workspace, and workspace_limit is 7168" in out
    code, out, _ = run_cli(capsys, *explain_it, "--workspace-limit", "8KiB")
    assert code == 0 and "(workspace_limit 8192)" in out
    for words in (explain_it, ("bench", "conv:n1,c1,h4,k1,r1", "--device", "cpu")):
        code, _, error = run_cli(capsys, *words, "--workspace-limit", "much")
        assert code == MISTAKE and error.startswith("error: --workspace-limit='much' is no number of bytes")


# The benchmark


def test_the_benchmark_leaves_out_what_needs_more() -> None:
    def candidate(engine: str, needed: Any) -> Candidate:
        return Candidate(engine, "some", lambda: None, workspace_bytes=needed)

    run = _Run(True, True, (), None, 100)  # type: ignore[arg-type]
    assert run.refuses(candidate("leanconv", 101)) == "it needs 101 bytes of workspace, and workspace_limit is 100"
    assert all(run.refuses(candidate("leanconv", needed)) is None for needed in (0, 100, None))
    assert all(run.refuses(candidate("cudnn:gemm", needed)) is None for needed in (0, 10**9, "measure"))
    assert replace(run, workspace_limit=None).refuses(candidate("leanconv", 10**9)) is None


def test_a_run_names_what_the_limit_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from leanconv.bench.peers import own

    candidates = own.LeanconvPeer.candidates

    def heavy(self: Any, *arguments: Any) -> Any:
        for each in candidates(self, *arguments):
            yield replace(each, workspace_bytes=5000) if getattr(each, "algorithm", "") == "direct" else each

    monkeypatch.setattr(own.LeanconvPeer, "candidates", heavy)
    case = Case("small", ConvProblem(n=1, c=2, h=6, w=6, k=2, r=3, s=3))
    for limit in (4999, None):
        results = run_suite([case], engines=("leanconv",), quick=True, device="cpu", workspace_limit=limit)
        names = {row.algorithm for row in results.rows}
        reason = "it needs 5000 bytes of workspace, and workspace_limit is 4999"
        left_out = {"problem": "small", "engine": "leanconv direct", "reason": reason} in results.skipped
        assert "im2col" in names and ("direct" in names) is (limit is None) and left_out is (limit is not None)
