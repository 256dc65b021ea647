"""`leanconv.torch.enable`: models taken over, what is left to PyTorch, the report, and switching it off.

Without a GPU the kernels are registered for the CPU, whose tensors `torch_on_device` lays on the stand-in for a GPU.
"""

from __future__ import annotations

import copy
import gc
import statistics
import weakref
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TimedOut
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.messages import says
from tests.stand_ins import HostDevice

torch = pytest.importorskip("torch")

import leanconv.torch  # noqa: E402
from leanconv.bench.results import Results  # noqa: E402
from leanconv.bench.suites import parse_problem  # noqa: E402
from leanconv.call.precompile import PrecompileResult  # noqa: E402
from leanconv.plan import Target  # noqa: E402
from leanconv.torch import deciding, patch, recording, registration  # noqa: E402
from leanconv.torch.expected_time import pytorch_cycles  # noqa: E402
from leanconv.torch.layers import tf32_allowed  # noqa: E402
from tests.torch.versions import before  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
nn = torch.nn
NAMES = ("convolution", "convolution_backward")


class Net(nn.Module):
    """Every kind of layer that is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 8, (3, 2), stride=(2, 1), groups=2, bias=False)
        self.signal = nn.Conv1d(8, 6, 3, padding=2, dilation=2)
        self.up = nn.ConvTranspose2d(6, 4, 3, stride=2, output_padding=1)
        self.solid = nn.Conv3d(1, 2, (3, 1, 1))

    def forward(self, x: Any) -> Any:
        x = self.grouped(nn.functional.leaky_relu(self.first(x)))
        n, c, h, w = x.shape
        x = self.signal(x.reshape(n, c, h * w)).reshape(n, 6, h, w)
        return self.solid(self.up(x).unsqueeze(1)).square().mean()


def step(model: Any, x: Any) -> list[Any]:
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    model.zero_grad(set_to_none=True)
    y = model(x)
    y.backward()
    return [y.detach(), x.grad, *(each.grad for each in model.parameters())]


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_a_model_computes_the_same(device: HostDevice, form: Any) -> None:
    model, x = Net(), torch.randn(2, 3, 9, 8).contiguous(memory_format=form)
    for layer in (model.first, model.grouped, model.up):
        layer.to(memory_format=form)
    expected = step(model, x)
    with leanconv.torch.enable(model, exclude="up") as taken:
        for _ in range(2):
            before = len(device.launches)
            got = step(model, x)
            assert len(device.launches) - before == 12, "four layers of three operations"
            for one, other in zip(got, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
                assert one.stride() == other.stride()
    report = taken.report()
    assert [line.layer for line in report.taken][:4] == ["first", "grouped", "signal", "solid"]
    assert len(report.taken) == 12 and all(line.calls == 2 for line in report.lines)
    assert {line.layer for line in report.left} == {"up"} and report.left[0].why == "excluded"
    assert "12 of 15 operations run on leanconv" in str(report) and str(report) == str(leanconv.torch.report())
    launched = len(device.launches)
    assert all(map(torch.equal, step(model, x), expected)) and len(device.launches) == launched


def test_equal_calls_are_decided_once(device: HostDevice) -> None:
    """Whichever tuples the options come in: PyTorch makes them anew for each call."""
    x, w = torch.randn(2, 3, 9, 8), torch.randn(4, 3, 3, 3)
    with leanconv.torch.enable() as taken:
        for _ in range(3):
            torch.ops.aten.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
            same = [1, 1]
            torch.ops.aten.convolution(x, w, None, same, same, same, False, [0, 0], 1)
        assert len(taken._choices) == 1 and [line.calls for line in taken.report().taken] == [6]


def test_keys_are_equal_for_equal_options_only(device: HostDevice) -> None:
    """Whichever objects the numbers are: shared or not, small or large, of NumPy. 1 is not True, and not 1.0."""
    x, w = torch.randn(2, 3, 9, 8), torch.randn(4, 3, 3, 3)
    with leanconv.torch.enable() as taken:
        pair = [1000, 1000]
        shared = taken._key(x, w, None, (pair, pair, pair, False, pair, 1))
        apart = taken._key(x, w, None, ([int("1000")] * 2, [1000, 1000], [int("1000"), 1000], False, [1000, 1000], 1))
        assert shared is not None and shared == apart and hash(shared) == hash(apart)
        keys = [taken._key(x, w, None, ([1, 1], [1, 1], [1, 1], last, [0, 0], 1)) for last in (False, 0, 0.0)]
        assert len(set(keys)) == 3
        integers = [taken._key(x, w, None, ([number, number], 1)) for number in (1, np.int64(1), np.int32(1))]
        assert integers[0] not in integers[1:], "NumPy's integers have bytes of their own: decided again, never wrongly"


def test_suspending_waits_for_who_enables(device: HostDevice) -> None:
    with registration._lock, ThreadPoolExecutor(1) as pool:
        entered = pool.submit(registration.suspended().__enter__)
        with pytest.raises(TimedOut):
            entered.result(0.05)
        registration._lock.release()
        try:
            entered.result(5)
        finally:
            registration._lock.acquire()


@pytest.mark.parametrize("threads", [1, 2])
def test_switched_off_it_hands_on_and_keeps_no_model(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """The kernels stay registered: another thread may be on its way to them."""

    monkeypatch.setattr(registration.threading, "active_count", lambda: threads)

    def kernels() -> list[str]:
        return [torch._C._dispatch_dump(f"aten::{name}") for name in NAMES]

    before = kernels()
    first = leanconv.torch.enable()
    second = leanconv.torch.enable()
    registered = kernels()
    assert registered != before
    first.disable()
    conv, x = nn.Conv2d(3, 4, 3), torch.randn(1, 3, 5, 5)
    conv(x)
    assert len(second.report().taken) == 1 and not first.report().lines, "the last one decides"
    first.disable(), second.disable()
    launched = len(device.launches)
    conv(x).sum().backward()
    assert len(device.launches) == launched
    with pytest.raises(ZeroDivisionError), leanconv.torch.enable():
        _ = 1 / 0
    leanconv.torch.enable(), leanconv.torch.enable()
    leanconv.torch.disable()
    with leanconv.torch.enable(conv):
        conv(x)
    weight = weakref.ref(conv.weight)
    del conv
    gc.collect()
    assert weight() is None and leanconv.torch.report().taken, "the report holds no model"
    # another thread may be on its way to a kernel, which PyTorch frees with its registration
    assert kernels() == (before if threads == 1 else registered) and deciding.current() is None


def test_a_registration_that_fails_leaves_nothing(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [torch._C._dispatch_dump(f"aten::{name}") for name in NAMES]
    conv, x = nn.Conv2d(3, 4, 3), torch.randn(1, 3, 5, 5)
    impl = torch.library.Library.impl

    def refuse(library: Any, name: str, *given: Any, **options: Any) -> Any:
        if name in refused:
            raise RuntimeError("taken")
        return impl(library, name, *given, **options)

    refused = NAMES[:1]
    with monkeypatch.context() as refusing:
        refusing.setattr(torch.library.Library, "impl", refuse)
        with says(RuntimeError, "taken"):
            leanconv.torch.enable()
    assert [torch._C._dispatch_dump(f"aten::{name}") for name in NAMES] == before and deciding.current() is None
    with leanconv.torch.enable() as taken:
        conv(x)
    assert taken.report().taken

    refused = NAMES[1:]
    monkeypatch.setattr(torch.library.Library, "impl", refuse)
    with leanconv.torch.enable() as taken:
        with pytest.warns(RuntimeWarning, match="leaves these gradients to PyTorch: taken"):
            y = torch.conv2d(x, conv.weight)
        torch.conv2d(x, conv.weight)
        y.sum().backward()
    assert [line.when for line in taken.report().taken] == ["forward"] and conv.weight.grad is not None


def test_which_layers(device: HostDevice) -> None:
    model, x = Net(), torch.randn(2, 3, 9, 8)

    def taken(**options: Any) -> set[str]:
        with leanconv.torch.enable(model, **options) as on, torch.no_grad():
            model(x)
        return {line.layer for line in on.report().taken}

    assert taken(include="g*") == {"grouped"} and taken(include=["first", model.up]) == {"first", "up"}
    assert taken(exclude=model) == set() and taken(exclude=lambda problem: problem.groups > 1) >= {"first", "up"}
    with leanconv.torch.enable(include=model.first) as on, torch.no_grad():
        model(x)
    assert len(on.report().taken) == 1 and on.report().left[0].why == "not included"
    with says(ValueError, "include='g*' is the name of a layer: give the model"):
        leanconv.torch.enable(include="g*")
    with says(ValueError, "exclude='h*' fits the name of no convolution"):
        leanconv.torch.enable(model, exclude=["h*"])
    with says(TypeError, "include has a int"):
        leanconv.torch.enable(model, include=[3])  # type: ignore[list-item]
    with says(TypeError, "include is of type int; give names, modules, or a function"):
        leanconv.torch.enable(model, include=3)  # type: ignore[arg-type]
    with says(ValueError, "exclude has a ReLU in which there is no convolution"):
        leanconv.torch.enable(model, exclude=torch.nn.ReLU())
    with says(TypeError, "model is a str; it must be a torch.nn.Module"):
        leanconv.torch.enable("resnet18")  # type: ignore[arg-type]
    with says(TypeError, "model is a type; it must be a torch.nn.Module"):
        recording.problems_of(torch.nn.Conv2d, x)  # type: ignore[arg-type]
    with says(ValueError, "precision='fp16'"):
        leanconv.torch.enable(precision="fp16")  # type: ignore[arg-type]
    for train in (False, True):
        with leanconv.torch.enable(exclude=lambda problem: int("a")), torch.set_grad_enabled(train):
            with says(RuntimeError, "exclude raised ValueError: invalid literal"):
                model(x)
    assert deciding.current() is None, "a mistake switches nothing on"


def test_only_what_is_faster_and_as_precise(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []

    def expected(problem: Any, target: Any, tf32: bool) -> float:
        asked.append((problem.precision, tf32))
        return 1.0

    monkeypatch.setattr(patch, "pytorch_cycles", expected)
    conv, x = nn.Conv2d(3, 4, 3), torch.randn(1, 3, 5, 5)
    assert tf32_allowed(), "PyTorch's default"
    with leanconv.torch.enable(conv, precision="tf32") as taken, torch.no_grad():
        conv(x)
        assert "is expected to take" in taken.report().left[0].why and "TF32" in taken.report().left[0].why
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
        assert not tf32_allowed()
        conv(x)
        conv.half(), conv(x.half())
    assert asked == [("tf32", True), ("fp32", False), ("fp32", False)], "a new setting is a new choice"
    assert not device.launches and not taken.report().taken


def test_what_is_left_to_pytorch(device: HostDevice) -> None:
    with leanconv.torch.enable() as taken:
        nn.functional.conv2d(torch.randn(1, 2, 5, 5).double(), torch.randn(3, 2, 3, 3).double())
        nn.functional.conv2d(torch.randn(0, 2, 5, 5), torch.randn(3, 2, 3, 3))
        nn.functional.conv_transpose2d(torch.randn(1, 2, 5, 5), torch.randn(2, 3, 3, 3), dilation=2, output_padding=1)
        with pytest.raises(RuntimeError, match="Half"):
            nn.functional.conv2d(torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3).half())
        with pytest.raises(RuntimeError, match="expected input"):
            nn.functional.conv2d(torch.randn(1, 3, 5, 5), torch.randn(3, 2, 3, 3))
    why = [line.why for line in taken.report().left]
    assert "torch.float64" in why[0] and why[1] == "it has no elements" and "output_padding" in why[2]
    assert not device.launches


def test_autocast_checkpoints_and_compile(device: HostDevice) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), torch.randn(2, 3, 8, 8)
    with leanconv.torch.enable(model) as taken:
        with torch.autocast("cpu", torch.float16):
            model(x).float().sum().backward()
        assert {(line.layer, "float16" in line.problem) for line in taken.report().taken} == {("0", True), ("2", True)}
        launched = len(device.launches)
        plain = step(lambda_of(model), x)
        assert len(device.launches) - launched == 6
        checkpointed = step(lambda_of(model, checkpoint=True), x)
        again = 8 if before("2.10") else 7
        assert len(device.launches) - launched == 6 + again, "the first layer runs twice, before PyTorch 2.10 both do"
        compiled = step(lambda_of(torch.compile(model, fullgraph=True, backend="aot_eager")), x)
        assert len(device.launches) - launched == 6 + again + 6, "compiled code meets the same kernels"
        for one, two, three in zip(plain, checkpointed, compiled, strict=True):
            assert torch.equal(one, two)
            torch.testing.assert_close(one, three)


def lambda_of(model: Any, checkpoint: bool = False) -> Any:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Any) -> Any:
            if checkpoint:
                return torch.utils.checkpoint.checkpoint(self.model, x, use_reentrant=False).sum()
            return self.model(x).sum()

    return Sum()


def test_gradients_of_gradients(device: HostDevice) -> None:
    x, w = torch.randn(2, 3, 6, 6, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)

    def penalty() -> list[Any]:
        (dx,) = torch.autograd.grad(nn.functional.conv2d(x, w).pow(2).sum(), x, create_graph=True)
        return list(torch.autograd.grad(dx.pow(2).sum(), (x, w)))

    expected = penalty()
    with leanconv.torch.enable():
        for one, other in zip(penalty(), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
    assert device.launches


def test_warm_up_compiles_what_will_run(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Net(), nn.Identity(), leanconv.torch.Conv2d(1, 1, 1))
    model.forward = lambda x: model[0](x) + model[2](x[:1, :1]).sum()  # type: ignore[method-assign]
    x, before = torch.randn(2, 3, 9, 8), copy.deepcopy(model.state_dict())
    compiled: list[Any] = []
    limits: set[Any] = set()

    def compile(problems: Any, workspace_limit: Any, **options: Any) -> PrecompileResult:
        compiled.extend(problems)
        limits.update((each.op, workspace_limit) for each in problems)
        return PrecompileResult(len(problems), 0, 0, 0.0)

    monkeypatch.setattr(recording, "precompile", compile)
    leanconv.torch.warm_up(model, x)
    # with the workspace that a gradient of filters will have
    assert {limit for op, limit in limits if op != "wgrad"} == {None} and ("wgrad", 32 << 20) in limits
    assert all(each.grad is None for each in model.parameters()) and not device.launches
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    with leanconv.torch.enable(model) as taken:
        step(model, x[:, :, :, :])
    ran = {line.problem for line in taken.report().taken}
    # the gradient of the first layer's input is wanted by this step alone
    assert ran - {str(each) for each in compiled} == {
        line.problem for line in taken.report().taken if (line.layer, line.when) == ("0.first", "backward, input")
    }
    assert next(str(each) for each in compiled if each.c == each.taps == 1).startswith("fprop NCHW")
    compiled.clear()
    leanconv.torch.warm_up(model.eval(), (x,))
    assert compiled and all(each.op == "fprop" or each.c == 4 for each in compiled)


def test_one_line_that_measures(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, tuned = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 9, 9), []

    def tune(problems: Any, **options: Any) -> None:
        tuned.append(([problem.op for problem in problems], options))

    monkeypatch.setattr(recording.search, "tune", tune)
    monkeypatch.setattr(recording, "precompile", lambda problems, **options: PrecompileResult(0, 0, 0, 0.0))
    # what is expected to be left is timed too
    monkeypatch.setattr(patch, "pytorch_cycles", lambda problem, target, tf32: 1e-6)
    with leanconv.torch.enable(model, tune=x):
        ops = [op for each, _ in tuned for op in each]
        assert ops == ["fprop", "wgrad"], "the gradient of what needs none is not computed"
        assert all(options["device"] == "cuda:0" and options["peers"] for _, options in tuned)
        assert [options["workspace_limit"] for _, options in tuned] == [None, 32 << 20]
        tuned.clear()
        leanconv.torch.warm_up(model.eval(), x, tune=True)
        assert [each for each, _ in tuned] == [["fprop"]]
    with says(ValueError, "tune= is an example for a model"):
        leanconv.torch.enable(tune=x)

    def fail(problems: Any, **options: Any) -> None:
        raise RuntimeError("no time")

    monkeypatch.setattr(recording.search, "tune", fail)
    with says(RuntimeError, "no time"):
        leanconv.torch.enable(model, tune=x)
    assert deciding.current() is None


def test_warm_up_of_one_of_several_processes(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the others, in DistributedDataParallel and SyncBatchNorm, is left out."""
    from torch.distributed import HashStore, destroy_process_group, init_process_group

    def wait(*given: Any) -> Any:
        raise AssertionError("this waits for other processes")

    compiled: list[Any] = []

    def compile(problems: Any, **options: Any) -> PrecompileResult:
        compiled.extend(problems)
        return PrecompileResult(len(problems), 0, 0, 0.0)

    monkeypatch.setattr(recording, "precompile", compile)
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Identity(), nn.Conv2d(4, 4, 3))
        model = nn.parallel.DistributedDataParallel(net)
        net[1] = nn.SyncBatchNorm(4)  # on the CPU it is refused at first
        for kind in (nn.SyncBatchNorm, nn.parallel.DistributedDataParallel):
            monkeypatch.setattr(kind, "forward", wait)
        leanconv.torch.warm_up(model, torch.randn(2, 3, 9, 9))
        assert len(compiled) == 5 and "forward" not in vars(net[1])
    finally:
        destroy_process_group()


def test_warm_up_under_autocast(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    conv, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 5, 5)
    compiled: list[Any] = []

    def compile(problems: Any, **options: Any) -> PrecompileResult:
        compiled.extend(problems)
        return PrecompileResult(len(problems), 0, 0, 0.0)

    monkeypatch.setattr(recording, "precompile", compile)
    with leanconv.torch.enable(conv) as taken, torch.autocast("cpu", torch.float16):
        leanconv.torch.warm_up(conv, x)
        # autocast keeps filters that it has cast, and must not have kept those without values
        assert type(conv(x)) is torch.Tensor
    assert {str(each) for each in compiled} == {line.problem for line in taken.report().taken} | {
        str(each) for each in compiled if each.op == "wgrad"
    }


def test_warm_up_needs_a_gpu() -> None:
    with says(ValueError, "the example has no tensor on a GPU"):
        leanconv.torch.warm_up(nn.Conv2d(3, 4, 3), torch.randn(1, 3, 5, 5))


@pytest.mark.parametrize("suite", ["im2win", "opencnn", "depthwise-wgrad"])
def test_what_pytorch_is_expected_to_take_is_what_it_took(suite: str) -> None:
    """The committed measurements of an H200."""
    measured = Results.read(ROOT / "benchmarks" / "results" / "nvidia-h200" / f"{suite}.json")
    target = Target("sm_90a", 132)
    ratios = []
    for row in measured.rows:
        if row.engine.startswith("torch-"):
            kind, layout = row.engine.removeprefix("torch-").split("-")
            layer = parse_problem(measured.problems[row.problem]["words"])
            problem = replace(layer, layout=layout.upper(), op="wgrad" if "wgrad" in suite else "fprop")  # type: ignore[call-arg]
            ratios.append(row.us * 1980 / pytorch_cycles(problem, target, kind == "tf32"))
    assert len(ratios) >= 40
    assert 0.6 < statistics.median(ratios) < 2.1 and min(ratios) > 0.25, "it may be slower than expected, not faster"


@pytest.mark.parametrize("suite", ["im2win-bfloat16", "opencnn-float16", "resnet-50-float16"])
def test_what_pytorch_is_expected_to_take_of_16_bits_is_what_it_took(suite: str) -> None:
    """Channels first within a factor of two, rearranged or not."""
    measured = Results.read(ROOT / "benchmarks" / "results" / "nvidia-h200" / f"{suite}.json")
    ratios = []
    for row in measured.rows:
        if row.engine.startswith("torch-") and row.engine.endswith("-nchw"):
            problem = parse_problem(measured.problems[row.problem]["words"])
            ratios.append(row.us * 1980 / pytorch_cycles(problem, Target("sm_90a", 132), False))  # type: ignore[arg-type]
    assert len(ratios) >= 12 and 0.5 < min(ratios) < max(ratios) < 2 and 0.8 < statistics.median(ratios) < 1.2


def test_models_on_the_cpu_are_left_alone() -> None:
    conv, x = nn.Conv2d(3, 4, 3), torch.randn(1, 3, 5, 5)
    expected = conv(x)
    with leanconv.torch.enable(conv) as taken:
        assert torch.equal(conv(x), expected)
    assert not taken.report().lines and str(taken.report()) == "no convolution has run on CUDA"


@pytest.mark.parametrize("transposed", [False, True])
def test_one_number_for_both_axes(device: HostDevice, transposed: bool) -> None:
    """PyTorch takes lists of one number for layers of two axes, and passes them on as they are."""
    function = nn.functional.conv_transpose2d if transposed else nn.functional.conv2d
    x, w = torch.randn(2, 4, 9, 8, requires_grad=True), torch.randn(4, 4, 3, 3, requires_grad=True)

    def run() -> list[Any]:
        y = function(x, w, stride=(2,), padding=(1,))
        return [y, *torch.autograd.grad(y.square().sum(), (x, w))]

    expected = run()
    with leanconv.torch.enable():
        for one, other in zip(run(), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert device.launches
