"""The benchmark: its timer, its suites and problems in words, and errors against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from leanconv.bench import load_suite, parse_problem, suite_names
from leanconv.bench.operands import Check, Operands, as_nchw, in_order, poison
from leanconv.bench.peers import torch_peer
from leanconv.bench.suites import LAYOUTS, Case, dense_filter, format_problem
from leanconv.cpu import oracle
from leanconv.images.borders import BORDERS
from leanconv.problem import ConvProblem, FilterProblem
from leanconv.runtime import timing as gpu_timing
from leanconv.runtime.timing import summarise, time_cpu

COUNTS = {
    **{"im2win": 12, "opencnn": 16, "winograd1d": 90, "single-channel": 48, "general-direct": 36, "filters": 80},
    # what differs among the layers of whole networks
    **{"resnet-50": 23, "inception-v3": 43},
    **{"filter-separable": 33, "filter-types": 36, "filter-large": 35},
    "wide-filters": 17,
    "depthwise": 34,
    "depthwise-wide": 30,
    "first-layers": 18,
    "grouped": 27,
    "batch-1": 70,
    "conv3d": 32,
}

TINY = (
    Case("layer", ConvProblem(1, 4, 9, 10, 6, 3, 3, padding=(1, 1, 1, 1))),
    Case("picture", dense_filter(1, 40, 31, 5, 4, border="constant")),
)


# the timer


def test_summary_of_samples_is_median_and_quartiles() -> None:
    timing = summarise([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (timing.median_us, timing.low, timing.high, timing.runs) == (3.0, 2.0, 4.0, 5)
    assert summarise([7.0]).low == summarise([7.0]).high == 7.0
    with pytest.raises(ValueError, match="samples is empty"):
        summarise([])


class Clock:
    """Time that only passes when a call says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_cpu_timer_warms_up_and_spends_its_budget() -> None:
    clock, durations = Clock(), iter([5.0, *[0.01] * 500])
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        clock.now += next(durations)

    timing = time_cpu(call, budget_s=0.5, clock=clock)
    assert timing.median_us == pytest.approx(1e4)
    assert timing.high == pytest.approx(1e4), "the slow first call must not be among the samples"
    assert 50 <= timing.runs <= 51 and calls == timing.runs + 1
    assert time_cpu(call, budget_s=100, max_runs=7, clock=clock).runs == 7
    assert time_cpu(call, budget_s=0.0001, min_runs=4, max_runs=9, clock=Clock()).runs == 9, "a clock that stands still"


def test_cpu_timer_takes_one_sample_of_a_call_that_outlasts_the_budget() -> None:
    clock = Clock()

    def call() -> None:
        clock.now += 3.0

    timing = time_cpu(call, budget_s=0.5, clock=clock, warm_up=False)
    assert timing.runs == 1 and clock.now == 3.0 and timing.median_us == pytest.approx(3e6)


@pytest.mark.parametrize("host_us, gpu_us", [(60.0, 420.0), (60.0, 150.0), (60.0, 30.0), (5.0, 2000.0)])
def test_gpu_timer_leaves_out_the_hosts_part(host_us: float, gpu_us: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now, idle = 0.0, 0.0  # microseconds: the host's clock, and when the GPU has done all that was submitted

    class Gpu:
        def __init__(self, stream: int) -> None:
            pass

        def work(self, host: float, gpu: float) -> None:
            nonlocal now, idle
            now += host
            idle = max(idle, now) + gpu

        def synchronize(self) -> None:
            nonlocal now
            now = max(now, idle)

        def elapsed(self, timed: Callable[[], Any]) -> float:
            begin = max(now, idle)
            timed()
            self.synchronize()
            return idle - begin

        @contextmanager
        def flusher(self) -> Iterator[Callable[[], None]]:
            yield partial(self.work, 5.0, 40.0)

    monkeypatch.setattr(gpu_timing, "_Gpu", Gpu)
    monkeypatch.setattr(gpu_timing, "time", SimpleNamespace(perf_counter=lambda: now / 1e6))
    assert gpu_timing.time_gpu(partial(Gpu(0).work, host_us, gpu_us)).median_us == pytest.approx(gpu_us, rel=0.02)


@pytest.mark.gpu
def test_gpu_timer_agrees_with_the_bytes_moved() -> None:
    torch = pytest.importorskip("torch")
    from leanconv.runtime.timing import time_gpu

    source = torch.randn(1 << 26, device="cuda")
    target = torch.empty_like(source)
    cold = time_gpu(lambda: target.copy_(source), cold=True)
    twice = time_gpu(lambda: (target.copy_(source), target.copy_(source)))
    assert 1.7 < twice.median_us / cold.median_us < 2.3
    assert cold.low <= cold.median_us <= cold.high and cold.runs >= 5
    small = torch.zeros(1, device="cuda")
    assert time_gpu(lambda: small.add_(1)).median_us < 5, "the host's part of a short call must not be counted"


# suites and problems in words


def test_suites_are_whole() -> None:
    assert {name: len(load_suite(name)) for name in suite_names()} == COUNTS
    for name in suite_names():
        names = [case.name for case in load_suite(name)]
        assert len(set(names)) == len(names)


def test_suite_problems_have_the_papers_shapes() -> None:
    conv1 = load_suite("im2win")[0].problem
    assert isinstance(conv1, ConvProblem)
    assert (conv1.x_shape, conv1.w_shape, conv1.y_shape) == ((128, 3, 227, 227), (96, 3, 11, 11), (128, 96, 55, 55))
    for layout in LAYOUTS:
        moved = load_suite("im2win", layout)[0].problem
        assert moved == replace(conv1, layout=layout)  # type: ignore[arg-type]
    assert isinstance(moved, ConvProblem) and moved.x_shape == (3, 227, 227, 128)
    padded = load_suite("opencnn")[0].problem
    assert isinstance(padded, ConvProblem)
    assert padded.padding == (1, 1, 1, 1) and padded.y_shape == (32, 64, 56, 56)
    for case in load_suite("winograd1d"):
        assert isinstance(case.problem, ConvProblem)
        assert case.problem.layout == "NHWC" and case.problem.p > 0
        assert case.problem.precision == ("relaxed" if case.name.startswith("g16") else "fp32")
    first = load_suite("filters")[0].problem
    assert isinstance(first, FilterProblem)
    assert (first.h, first.kh, first.border, first.anchor, first.x_pitch) == (1024, 2, "constant", (1, 1), 1024)


def test_suites_are_asked_in_another_precision() -> None:
    for name in ("opencnn", "winograd1d"):
        for own, asked in zip(load_suite(name), load_suite(name, precision="relaxed"), strict=True):
            assert asked == Case(own.name, replace(own.problem, precision="relaxed"))  # type: ignore[arg-type]
    assert load_suite("opencnn", precision="fp32") == load_suite("opencnn")


def test_unknown_suite_layout_and_precision_are_named() -> None:
    with pytest.raises(ValueError, match="im2wim.*im2win"):
        load_suite("im2wim")
    with pytest.raises(ValueError, match="layout='HWCN' is not known; choose one of NCHW, NHWC, CHWN"):
        load_suite("im2win", "HWCN")
    with pytest.raises(ValueError, match="precision='fp16' is not known; choose one of ieee, fp32, relaxed, tf32"):
        load_suite("im2win", precision="fp16")
    for setting in ({"layout": "NHWC"}, {"precision": "relaxed"}):
        with pytest.raises(ValueError, match="does not apply"):
            load_suite("filters", **setting)


@pytest.mark.parametrize(
    "problem",
    [
        ConvProblem(128, 64, 56, 56, 64, 3, 3, padding=(1, 1, 1, 1), layout="NHWC"),
        ConvProblem(1, 8, 9, 30, 4, 1, 5, (2, 1), (0, 1, 2, 3), (1, 3), 4, bias=True, activation="relu"),
        ConvProblem(2, 8, 9, 30, 4, 1, 5, padding=(0, 0, 2, 2), precision="tf32"),
        ConvProblem(4, 8, 9, 30, 4, 3, 3, layout="CHWN", precision="relaxed"),
        dense_filter(1, 8192, 4096, 7, 5),
        dense_filter(3, 10, 11, 4, 5, "wrap", "int32", (0, 4)),
        *(case.problem for name in COUNTS for case in load_suite(name)[::13]),
    ],
    ids=str,
)
def test_problems_survive_their_words(problem: Any) -> None:
    assert parse_problem(format_problem(problem)) == problem


def test_words_of_the_documentation() -> None:
    read = parse_problem("conv:n128,c64,h56,w56,k64,r3,s3,stride1,pad1,NHWC")
    assert read == ConvProblem(128, 64, 56, 56, 64, 3, 3, padding=(1, 1, 1, 1), layout="NHWC")
    assert parse_problem("filter:8192x8192,7x7") == dense_filter(1, 8192, 8192, 7, 7)
    short = parse_problem("conv:n1,c32,h112,k32,r3,stride2x1,pad0x1x0x1,dil2,groups32,bias,relu")
    assert short == ConvProblem(
        1, 32, 112, 112, 32, 3, 3, (2, 1), (0, 1, 0, 1), (2, 2), 32, bias=True, activation="relu"
    )
    assert parse_problem("filter:480x640,5x1,batch16,anchor0x0,replicate,int32") == dense_filter(
        16, 480, 640, 5, 1, "replicate", "int32", (0, 0)
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("conf:n1", "must start with 'conv:'"),
        ("conv:n1,c2,h5,k3", "r must be given"),
        ("conv:n1,c2,h5,k3,r3,x7", "'x7' is not understood"),
        ("conv:n1,c2,h5,k3,r3,pad1x2x3", "'pad1x2x3' must have 1 or 2 or 4 numbers"),
        ("conv:n1,c2,h5,k3,r7", "does not fit"),
        ("conv:n1,c3,h5,k4,r1,groups2", "c=3 and k=4 must be divisible by 2"),
        ("conv:n1,c3,h5,k4,r1,stride0", "stride=0 is below 1"),
        ("filter:5x5", "in this order"),
        ("filter:5x5,3x3,mirror", "'mirror' is not understood"),
        ("filter:5x5,3x3,anchor3x0", "outside the 3x3 filter"),
        ("conv:n1,n2,c8,h5,k4,r3", "'n1' and 'n2' cannot both be given"),
        ("conv:c8,h5,k4,r3,stride2,stride1", "'stride2' and 'stride1' cannot both be given"),
        ("conv:c8,h5,k4,r3,pad1,pad1x2", "'pad1' and 'pad1x2' cannot both be given"),
        ("conv:c8,h5,k4,r3,float32,float16", "'float32' and 'float16' cannot both be given"),
        ("conv:c8,h5,k4,r3,NHWC,CHWN", "'NHWC' and 'CHWN' cannot both be given"),
        ("conv:c8,h5,k4,r3,dgrad,wgrad", "'dgrad' and 'wgrad' cannot both be given"),
        ("conv:c8,h5,k4,r3,relu,leaky_relu:0.2", "'relu' and 'leaky_relu:0.2' cannot both be given"),
        ("filter:5x5,3x3,batch2,batch3", "'batch2' and 'batch3' cannot both be given"),
        ("filter:5x5,3x3,wrap,reflect", "'wrap' and 'reflect' cannot both be given"),
        ("filter:5x5,3x3,separable,rank2", "'separable' and 'rank2' cannot both be given"),
        ("filter:5x5,3x3,box,erode", "'box' and 'erode' cannot both be given"),
        ("filter:5x5,3x3,anchor0x0,anchor1x1", "'anchor0x0' and 'anchor1x1' cannot both be given"),
    ],
)
def test_bad_words_are_named(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_problem(text)


def test_words_that_say_the_same_may_be_given_twice() -> None:
    assert parse_problem("conv:c8,h5,k4,r3,stride2,stride2x2,NHWC,NHWC") == parse_problem(
        "conv:c8,h5,k4,r3,stride2,NHWC"
    )


# errors against float64


def test_check_finds_errors_and_holes() -> None:
    from leanconv.cpu import oracle

    for case in TINY:
        operands = Operands(case.problem, gpu=False)
        layout = case.problem.layout if isinstance(case.problem, ConvProblem) else None
        y = operands.output(layout)
        assert np.isnan(Check(operands).error(y, layout)), "an output nobody wrote"
        if isinstance(case.problem, ConvProblem):
            y[...] = oracle.conv2d(case.problem, operands.x("NCHW"), operands.w("NCHW"))
        else:
            y[...] = oracle.filter2d(case.problem, operands.image, operands.kernel)
        assert Check(operands).error(y, layout) < 1e-7
        norm = float(np.linalg.norm(y))
        y.flat[-1] += 0.01 * norm
        assert Check(operands).error(y, layout) == pytest.approx(0.01, rel=1e-3)


def test_arrays_are_brought_into_a_layout_and_back() -> None:
    layer = ConvProblem(5, 3, 6, 7, 4, 2, 3)
    operands = Operands(layer, gpu=False)
    for layout in LAYOUTS:
        there = replace(layer, layout=layout)  # type: ignore[arg-type]
        for array, plain, shape in (
            (operands.x(there.layout), operands.x("NCHW"), there.x_shape),
            (operands.w(there.layout), operands.w("NCHW"), there.w_shape),
        ):
            assert array.shape == shape and array.flags.c_contiguous
            assert np.array_equal(as_nchw(array, there.layout), plain)
        assert operands.output(there.layout).shape == there.y_shape
    assert np.array_equal(operands.x("CHWN")[2, 4, 1], operands.x("NCHW")[:, 2, 4, 1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_check_on_parts_of_the_output_agrees_with_the_whole(monkeypatch: Any, layout: Any) -> None:
    from leanconv.bench import operands as module
    from leanconv.cpu import oracle

    problem = ConvProblem(5, 3, 40, 9, 4, 5, 3, (2, 1), (2, 1, 1, 0), layout=layout, bias=True)
    operands = Operands(problem, gpu=False)
    plain = replace(problem, layout="NCHW")
    y = np.ascontiguousarray(
        in_order(oracle.conv2d(plain, operands.x("NCHW"), operands.w("NCHW"), operands.bias), layout)
    )
    assert y.shape == problem.y_shape
    for part, words in ((0.6, "3 of 5 images"), (0.1, "1 of 5 images, 9 of 20 rows")):
        monkeypatch.setattr(module, "_CPU_LIMITS", (problem.flops * part, 1e9))
        check = Check(operands)
        assert check.checked == words
        assert check.error(y, layout) < 1e-12
        poison(as_nchw(y, layout)[0 if part > 0.5 else check._blocks[0].images[0]])
        assert np.isnan(check.error(y, layout)) or (part > 0.5 and 0 not in check._blocks[0].images)


@pytest.mark.parametrize("op", ["dgrad", "wgrad"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_gradients_are_checked_on_parts_too(monkeypatch: Any, op: Any, layout: Any, library: str) -> None:
    from leanconv.bench import operands as module
    from leanconv.cpu import oracle

    problem = ConvProblem(5, 6, 12, 9, 12, 3, 2, (2, 1), (2, 1, 1, 0), (1, 2), groups=3, layout=layout, op=op)
    operands = Operands(problem, gpu=False)
    plain = replace(problem, layout="NCHW")
    first, second = (array.astype(np.float64) for array in (operands.x("NCHW"), operands.w("NCHW")))
    assert (first.shape, second.shape) == tuple(each.shape for each in plain.operands[:2])
    y: Any = np.ascontiguousarray(in_order(oracle.conv2d(plain, first, second), layout))
    assert y.shape == operands.output(layout).shape == problem.y_shape
    if library == "torch":  # what is computed of tensors on a GPU
        torch = pytest.importorskip("torch")
        y, operands.gpu = torch.from_numpy(y), True
        operands._layouts = {"NCHW": tuple(map(torch.from_numpy, (operands.x("NCHW"), operands.w("NCHW"))))}
    count, things = (5, "images") if op == "dgrad" else (12, "filters")
    for part, taken in ((2.0, count), (0.5, count // 2), (0.01, 1)):
        for limits in ("_CPU_LIMITS", "_GPU_LIMITS"):
            monkeypatch.setattr(module, limits, (problem.flops * part, 1e9))
        check = Check(operands)
        assert check.checked == f"{taken} of {count} {things}"
        assert check.error(y, layout) < 1e-12
    poison(as_nchw(y, layout)[int(check._blocks[0].images[0])])
    assert np.isnan(check.error(y, layout))


@pytest.mark.parametrize("border", ["constant", "replicate", "reflect", "reflect101", "wrap"])
def test_check_of_filters_on_bands_agrees_with_the_oracle(monkeypatch: Any, border: str) -> None:
    from leanconv.bench import operands as module
    from leanconv.cpu import oracle

    problem = dense_filter(2, 60, 17, 6, 3, border, anchor=(1, 2))
    operands = Operands(problem, gpu=False)
    y = oracle.filter2d(problem, operands.image, operands.kernel)
    monkeypatch.setattr(module, "_CPU_LIMITS", (problem.flops / 10, 1e9))
    check = Check(operands)
    assert check.checked == "1 of 2 images, 12 of 60 rows"
    assert check.error(y) < 1e-12
    y[check._blocks[0].images[0], 59, 0] += 1
    assert check.error(y) > 1e-3, "the last row is always among what is checked"
    assert check.error(y, frame=1) < 1e-12, "an edge that is left out"
    y[check._blocks[0].images[0], 58, 1] += 1
    assert check.error(y, frame=1) > 1e-3 > 1e-12 > check.error(y, frame=2)


@pytest.mark.parametrize("border", BORDERS)
def test_pytorch_filters_with_the_borders_that_it_pads(border: Any, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    problem = dense_filter(2, 9, 11, 3, 4, border=border)
    image, kernel = (rng.standard_normal(shape, np.float32) for shape in ((2, 9, 11), (3, 4)))
    call = torch_peer._filter(problem, *map(torch.from_numpy, (image, kernel, kernel)))
    if BORDERS[border].torch is None and border != "constant":
        assert call == f"PyTorch pads no border {border!r}"
    else:
        assert not isinstance(call, str)
        np.testing.assert_allclose(call().numpy(), oracle.filter2d(problem, image, kernel), atol=1e-5)


def test_a_suite_in_another_operation() -> None:
    forward = load_suite("depthwise")
    for op in ("dgrad", "wgrad"):
        cases = load_suite("depthwise", op=op)
        assert [replace(case.problem, op="fprop") for case in cases] == [case.problem for case in forward]  # type: ignore[type-var]
        words = [format_problem(case.problem) for case in cases]
        assert all(text.endswith(f",{op}") for text in words)
        assert [parse_problem(text) for text in words] == [case.problem for case in cases]
    assert load_suite("depthwise", op="fprop") == forward
    with pytest.raises(ValueError, match="op='grad' is not known; choose one of fprop, dgrad, wgrad"):
        load_suite("depthwise", op="grad")
    with pytest.raises(ValueError, match="op='wgrad' does not apply: suite 'filters'"):
        load_suite("filters", op="wgrad")


@pytest.mark.parametrize("op", ["dgrad", "wgrad"])
def test_a_run_of_gradients(op: Any) -> None:
    pytest.importorskip("torch")
    from leanconv.bench import run_suite
    from leanconv.bench.run import default_path

    results = run_suite("depthwise", op=op, only="*960x7x7*", batch=1, device="cpu", quick=True, progress=False)
    assert results.op == op and results.title == f"depthwise NHWC {op}" and not results.failed
    assert default_path(results, False).name == f"depthwise-{op}.json"
    engines = {(row.engine, row.algorithm) for row in results.rows}
    assert {("leanconv", "im2col"), ("torch-cpu", "convolution_backward")} <= engines
    assert all(row.error is not None and row.error < 2e-6 for row in results.rows)
    uneven = f"conv:n2,c4,h9,k4,r3,pad0x1x2x0,groups2,NHWC,{op}"
    results = run_suite(uneven, device="cpu", quick=True, progress=False)
    assert {row.engine for row in results.rows} == {"leanconv", "torch-cpu"} and not results.failed
    assert all(row.error is not None and row.error < 2e-6 for row in results.rows)
    with pytest.raises(ValueError, match="write it into the problem"):
        run_suite(uneven, op=op, device="cpu")
