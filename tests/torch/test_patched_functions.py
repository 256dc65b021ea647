"""torch.nn.functional while `enable` lasts: layers decided before PyTorch's dispatcher."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.messages import says
from tests.stand_ins import HostDevice

torch = pytest.importorskip("torch")

import leanconv.torch  # noqa: E402
from leanconv.torch import decided, functions, patch, registration, switches  # noqa: E402
from leanconv.torch.deciding import Decision  # noqa: E402
from leanconv.torch.expected_time import CYCLES_PER_US  # noqa: E402
from leanconv.torch.layers import tf32_allowed  # noqa: E402
from tests.torch.versions import before  # noqa: E402

nn, F = torch.nn, torch.nn.functional
ORIGINAL = F.conv2d


@pytest.fixture
def left(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> HostDevice:
    """Everything is left to PyTorch."""
    monkeypatch.setattr(patch, "pytorch_cycles", lambda problem, target, tf32: 1e-6)
    return device


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels below the dispatcher are never called."""

    def refuse(*given: Any) -> None:
        raise AssertionError("the dispatcher was asked")

    monkeypatch.setattr(registration, "_convolution", refuse)
    monkeypatch.setattr(patch.Patch, "convolution", refuse)


def pytorch(*given: Any) -> Any:
    """What PyTorch computes."""
    with registration.suspended():
        return ORIGINAL(*given)


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert one.stride() == other.stride()


def launched(device: HostDevice, layer: Any, x: Any, expected: Any, times: int) -> int:
    """How many kernels of leanconv's so many calls of a layer launch, whose result is about the expected one."""
    before = len(device.launches)
    for _ in range(times):
        torch.testing.assert_close(layer(x), expected, rtol=1e-2, atol=1e-2)
    return len(device.launches) - before


LAYERS = {
    "conv1d": (nn.Conv1d(4, 6, 3, padding=1, dilation=2, groups=2), (2, 4, 12)),
    "conv2d": (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=1), (2, 4, 9, 8)),
    "conv2d without bias": (nn.Conv2d(4, 6, 1, bias=False), (2, 4, 9, 8)),
    "conv2d same": (nn.Conv2d(4, 6, 3, padding="same"), (2, 4, 9, 8)),
    "conv2d of one image": (nn.Conv2d(4, 6, 3), (4, 9, 8)),
    "conv3d": (nn.Conv3d(4, 6, (3, 2, 3), stride=(1, 2, 1), padding=(1, 0, 1), groups=2), (2, 4, 3, 5, 6)),
    "conv3d that is one of images": (nn.Conv3d(4, 6, (3, 1, 1), padding=(1, 0, 0), bias=False), (2, 4, 3, 5, 6)),
    "conv3d of one slice": (nn.Conv3d(4, 6, (1, 3, 3)), (2, 4, 1, 5, 6)),
    "conv_transpose3d": (nn.ConvTranspose3d(4, 6, (3, 2, 2), (1, 2, 2), output_padding=(0, 1, 0)), (2, 4, 3, 5, 6)),
    "conv_transpose1d": (nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), (2, 4, 7)),
    "conv_transpose2d": (nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2, bias=False, dilation=2), (2, 4, 5, 4)),
    "conv_transpose2d with bias": (nn.ConvTranspose2d(4, 6, 3, stride=2), (2, 4, 5, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("taken", [True, False])
def test_every_function(device: HostDevice, monkeypatch: pytest.MonkeyPatch, name: str, taken: bool) -> None:
    layer, shape = LAYERS[name]
    monkeypatch.setattr(patch, "pytorch_cycles", lambda problem, target, tf32: 1e12 if taken else 1e-6)
    x = torch.randn(shape)
    with torch.no_grad():
        expected = layer(x)
        with leanconv.torch.enable(layer) as enabled:
            for _ in range(3):
                close(layer(x), expected)
    (line,) = enabled.report().lines
    assert line.calls == 3 and (line.runs != "PyTorch") is taken
    assert sum(len(values) > 3 for _, values in device.launches) == 3 * taken


def test_what_is_left_does_not_reach_the_dispatcher(left: HostDevice, no_kernel: None) -> None:
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    expected = layer(x)
    with leanconv.torch.enable(layer) as enabled:
        with torch.no_grad():
            close(layer(x), expected)
        close(layer(x), expected)
    assert [(line.layer, line.calls) for line in enabled.report().left] == [("weight", 2)] or enabled.report().left


def test_what_is_taken_without_gradients_does_not_reach_the_dispatcher(device: HostDevice, no_kernel: None) -> None:
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    with torch.no_grad():
        expected = layer(x)
        with leanconv.torch.enable(layer):
            close(layer(x), expected)
    frozen = layer.requires_grad_(False)
    with leanconv.torch.enable(frozen):
        close(frozen(x), expected)
    with torch.inference_mode(), leanconv.torch.enable(layer):
        assert layer(x).is_inference()


def test_gradients_of_what_is_left(left: HostDevice) -> None:
    layer = nn.Conv2d(4, 6, 3)

    def gradients() -> list[Any]:
        x = torch.linspace(-1, 1, 2 * 4 * 9 * 8).reshape(2, 4, 9, 8).requires_grad_()
        y = layer(x).square().sum()
        first = torch.autograd.grad(y, [x, *layer.parameters()], create_graph=True)
        return [*first, *torch.autograd.grad(first[0].square().sum(), [x, layer.weight])]

    expected = gradients()
    with leanconv.torch.enable():
        for one, other in zip(gradients(), expected, strict=True):
            close(one.detach(), other.detach())


def test_what_pytorch_gives_to_cudnn_goes_there_at_once(left: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of images without a bias, where cuDNN is what PyTorch chooses, and switched on."""
    asked: list[Any] = []

    def cudnn(x: Any, w: Any, padding: Any, stride: Any, dilation: Any, groups: Any, *switches: Any) -> Any:
        asked.append((padding, stride, dilation, groups, *switches))
        return pytorch(x, w, None, stride, padding, dilation, groups)

    monkeypatch.setattr(switches, "_cudnn_convolution", cudnn)
    monkeypatch.setattr(switches, "_backend", lambda *given: torch._C._ConvBackend.Cudnn)
    x = torch.randn(2, 4, 9, 8)
    layer = nn.Conv2d(4, 6, 3, (2, 1), padding=1, groups=2, bias=False)
    others = nn.Conv2d(4, 6, 3), nn.ConvTranspose2d(4, 6, 3, bias=False), nn.Conv1d(4, 6, 3, bias=False)
    flags = torch.backends.cudnn.flags
    with torch.no_grad(), leanconv.torch.enable():
        with flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=True):
            close(layer(x), pytorch(x, layer.weight, None, (2, 1), 1, 1, 2))
        with flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            layer(x)
        assert asked == [
            ((1, 1), (2, 1), (1, 1), 2, True, False, True),
            ((1, 1), (2, 1), (1, 1), 2, False, True, False),
        ]
        with flags(enabled=False):
            layer(x)
        for each in others:
            each(x if each.weight.dim() == 4 else x.flatten(2))
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)
    layer(x)
    assert len(asked) == 2


@pytest.mark.parametrize(("us", "saved", "taken"), [(110, 99, False), (110, 101, True), (140, 1, True)])
def test_a_recorded_gradient_must_be_worth_its_python(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch, us: float, saved: float, taken: bool
) -> None:
    """By what all three operations save, or where PyTorch takes so long that the host waits anyway."""
    decision = Decision("it", "", (us - saved) * CYCLES_PER_US, us * CYCLES_PER_US)
    monkeypatch.setattr(patch.Patch, "decide", lambda *given: decision)
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8, requires_grad=True)

    def gradients() -> Any:
        return torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])

    expected = gradients()
    with leanconv.torch.enable(layer) as patched:
        for one, other in zip(gradients(), expected, strict=True):
            close(one, other)
        assert bool(device.launches) is taken
        if not taken:
            assert [line.why for line in patched.report().left if line.calls] == [
                "leanconv saves 297 µs, too little for a gradient that Python records"
            ] * 3
        with torch.no_grad():
            close(layer(x), pytorch(x.detach(), layer.weight.detach(), layer.bias))
    assert device.launches, "without a gradient it is taken"


def test_changed_tensors_are_not_taken_for_those_before(device: HostDevice) -> None:
    """Memory, shapes and types of filters may change under the same parameter."""
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    shifted = torch.randn(x.numel() + 1)[1:].view(x.shape)
    with torch.no_grad(), leanconv.torch.enable():
        for change in (
            lambda: None,
            lambda: setattr(layer.weight, "data", torch.randn(6, 4, 3, 3)),
            lambda: (
                setattr(layer.weight, "data", layer.weight.data[:3]),
                setattr(layer.bias, "data", layer.bias.data[:3]),
            ),
            lambda: setattr(layer.weight, "data", layer.weight.data.transpose(2, 3)),
            lambda: setattr(layer, "bias", None),
            lambda: setattr(layer, "bias", nn.Parameter(torch.randn(3))),
            lambda: setattr(layer, "stride", (2, 1)),
        ):
            change()
            for given in (x, shifted, x.contiguous(memory_format=torch.channels_last), torch._neg_view(x), x):
                for _ in range(3):
                    expected = pytorch(given.clone(), layer.weight.clone(), layer.bias, layer.stride)
                    close(layer(given).contiguous(), expected.contiguous())
        zero = torch._efficientzerotensor(x.shape)
        close(layer(zero), pytorch(torch.zeros_like(x), layer.weight, layer.bias, layer.stride))


def test_new_filters_with_the_identity_of_old_ones(device: HostDevice) -> None:
    x = torch.randn(2, 4, 9, 8)
    with torch.no_grad(), leanconv.torch.enable():
        for _ in range(20):  # freed memory and identities are used again
            w = torch.randn(6, 4, 3, 3)
            close(F.conv2d(x, w), pytorch(x, w))
            del w


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Image(torch.Tensor):
    pass


@pytest.mark.parametrize("taken", [True, False])
def test_what_looks_at_a_call_sees_pytorchs_function(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    monkeypatch.setattr(patch, "pytorch_cycles", lambda problem, target, tf32: 1e12 if taken else 1e-6)
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    with torch.no_grad():
        expected = layer(x)
        with leanconv.torch.enable():
            layer(x)
            with Mode():
                close(layer(x), expected)
            assert type(layer(x.as_subclass(Image))) is Image
            if not taken:  # the stand-in for a GPU has no bfloat16
                with torch.autocast("cpu", torch.bfloat16):
                    assert layer(x).dtype == torch.bfloat16
            close(torch.func.vmap(lambda each: F.conv2d(each, layer.weight, layer.bias))(x[None])[0], expected)
            close(F.conv2d(x, layer.weight, bias=layer.bias, stride=1), expected)
            graph = torch.fx.symbolic_trace(layer)
            assert any(node.target in (ORIGINAL, "") or node.op == "call_module" for node in graph.graph.nodes)
            close(torch.jit.trace(layer, x)(x), expected)
            close(torch.jit.script(layer)(x), expected)
            close(torch.compile(layer, backend="eager")(x), expected)


def test_functions_are_put_back(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    with leanconv.torch.enable():
        assert F.conv2d is not ORIGINAL and F.conv2d.__name__ == "conv2d"
        with leanconv.torch.enable():
            pass
        assert F.conv2d is not ORIGINAL
    assert F.conv2d is ORIGINAL

    def other(*given: Any) -> Any:
        return ORIGINAL(*given)

    monkeypatch.setattr(F, "conv2d", other)
    with leanconv.torch.enable():
        assert F.conv2d is other, "somebody else's function stays"
    assert F.conv2d is other


def test_left_again_when_tuning_or_switches_change(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    with torch.no_grad(), leanconv.torch.enable() as enabled:
        layer(x)
        with registration.suspended():
            layer(x)
        assert len(device.launches) == 1
        monkeypatch.setattr(patch, "pytorch_cycles", lambda problem, target, tf32: 1e-6)
        layer(x)
        patch.bind.forget()
        layer(x)
        assert len(device.launches) == 2 and [line.calls for line in enabled.report().lines] == [2, 1]
        with torch.backends.cudnn.flags(allow_tf32=not tf32_allowed()):
            layer(x)
        assert len(enabled._choices) == 2, "TF32 is part of what was decided"


def test_the_old_name_of_the_patch_tells_the_new_one() -> None:
    with says(AttributeError, "leanconv.torch.Takeover is now leanconv.torch.Patch"):
        leanconv.torch.Takeover  # noqa: B018


@pytest.mark.parametrize("left", ["", "forward", "backward", "both"])
def test_gradients_are_recorded_without_a_kernel_for_all(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    """Layers of which nothing is taken keep autograd's own node, and no kernel of ours is there for all."""
    decide = patch.Patch.decide

    def decided(self: Any, weight: Any, problem: Any, index: Any) -> Decision:
        decision = decide(self, weight, problem, index)
        wanted = left not in ("both", "forward" if problem.op == "fprop" else "backward")
        return decision if wanted else Decision("", decision.why)

    monkeypatch.setattr(patch.Patch, "decide", decided)
    conv, x = torch.nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8, requires_grad=True)
    expected = torch.autograd.grad(conv(x).square().sum(), [x, *conv.parameters()])
    second = torch.autograd.grad(
        torch.autograd.grad(conv(x).square().sum(), x, create_graph=True)[0].square().sum(), conv.weight
    )
    with leanconv.torch.enable(conv) as enabled:
        y = conv(x)
        assert (type(y.grad_fn).__name__ == "RecordedBackward") is (left != "both")
        got = torch.autograd.grad(y.square().sum(), [x, *conv.parameters()])
        assert not registration._with_backward
        lines = {line.when: (line.runs != "PyTorch", line.calls) for line in enabled.report().lines}
        taken = left not in ("both", "backward")
        assert lines["backward, input"] == lines["backward, filters"] == (taken, 1)
        assert lines["forward"] == (left not in ("both", "forward"), 1)
        again = torch.autograd.grad(
            torch.autograd.grad(conv(x).square().sum(), x, create_graph=True)[0].square().sum(), conv.weight
        )
    for one, other in zip((*got, *again), (*expected, *second), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_runs_nothing_twice_that_it_need_not(device: HostDevice) -> None:
    """A node of Python saves its tensors after the call: the last layer would be computed again for them."""
    model, x = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 4, 3)), torch.randn(2, 3, 8, 8)
    with leanconv.torch.enable(model) as enabled:
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
        forward = sum(line.calls for line in enabled.report().lines if line.when == "forward")
    assert forward == (4 if before("2.10") else 3)


def test_tensors_that_lie_otherwise_do_not_ask_the_dispatcher(device: HostDevice) -> None:
    """Another alignment of images, and other memory of filters: its kernel would bring that of all gradients."""
    conv, x = nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8)
    shifted = torch.randn(x.numel() + 1)[1:].view(x.shape)
    expected, aligned = conv(shifted), conv(x)
    with leanconv.torch.enable(conv) as enabled, torch.no_grad():
        conv(x)
        torch.testing.assert_close(conv(shifted), expected, rtol=1e-4, atol=1e-5)
        conv.weight.data = conv.weight.data.clone()
        torch.testing.assert_close(conv(shifted), expected, rtol=1e-4, atol=1e-5)
        conv.weight.data = conv.weight.data * 2
        conv.bias.data = conv.bias.data * 2
        torch.testing.assert_close(conv(x), 2 * aligned, rtol=1e-4, atol=1e-5)
        assert not registration._with_backward and sum(line.calls for line in enabled.report().taken) == 4


def test_a_batch_of_gradients(device: HostDevice) -> None:
    """autograd.grad(is_grads_batched=True), whose vmap is an older one, of a layer that is taken."""
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8, requires_grad=True)
    grads = torch.randn(3, 2, 6, 7, 6)

    def batch() -> Any:
        return torch.autograd.grad(layer(x), [x, layer.weight], grads, is_grads_batched=True)

    expected = batch()
    with leanconv.torch.enable(layer):
        for one, other in zip(batch(), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_what_is_pytorchs_alone(device: HostDevice) -> None:
    """Complex numbers, and a tensor that has outlived its transform."""
    x, w = torch.randn(2, 4, 9, 8, dtype=torch.complex64), torch.randn(6, 4, 3, 3, dtype=torch.complex64)
    layer, kept = nn.Conv2d(4, 6, 3), []
    torch.func.grad(lambda each: (kept.append(each), each.sum())[1])(torch.randn(2, 4, 9, 8))
    with torch.no_grad():
        expected = F.conv2d(x, w), layer(kept[0])
        with leanconv.torch.enable():
            for _ in range(2):
                torch.testing.assert_close(F.conv2d(x, w), expected[0])
                torch.testing.assert_close(layer(kept[0]), expected[1])
                layer(torch.randn(2, 4, 9, 8))


@pytest.mark.parametrize("taken", [True, False])
def test_functions_of_the_same_filters_are_told_apart(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    """conv2d and conv_transpose2d may be called with equal arguments, and compute different things."""
    if not taken:
        monkeypatch.setattr(patch, "pytorch_cycles", lambda problem, target, tf32: 1e-6)
    x, w = torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3)
    names = "conv2d", "conv_transpose2d"
    with torch.no_grad():
        expected = [getattr(F, name)(x, w) for name in names]
        with leanconv.torch.enable():
            for _ in range(3):
                for name, y in zip(names, expected, strict=True):
                    close(getattr(F, name)(x, w), y)


def test_a_call_as_before_reads_no_sizes(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading and comparing them is most of what a layer costs in a network whose host is behind."""
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    others = [
        torch.randn(2, 4, 9, 9), x.contiguous(memory_format=torch.channels_last), x.double(), x[:1], torch._neg_view(x),
    ]  # fmt: skip
    expected = [copy.deepcopy(layer).to(each.dtype)(each) for each in (x, *others)]
    with torch.no_grad(), leanconv.torch.enable():
        for _ in range(2):
            close(layer(x), expected[0])
        asked = []
        monkeypatch.setattr(functions, "any_autocast", lambda: asked.append("a key") or False)
        close(layer(x), expected[0])
        assert not asked, "no key was built"
        for each, y in zip(others, expected[1:], strict=True):
            close(layer.to(each.dtype)(each), y)
            close(layer.float()(x), expected[0])
        assert "a key" in asked


def test_a_torch_without_guards_builds_keys(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    assert switches.alike(x) is None
    with torch.no_grad():
        expected = layer(x)
        with leanconv.torch.enable() as taken:
            for _ in range(3):
                close(layer(x), expected)
    assert taken.report().taken[0].calls == 3


@pytest.mark.parametrize("guarded", [True, False])
def test_modes_and_transforms_are_seen_after_calls_without(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    if not guarded:
        monkeypatch.setattr(decided, "alike", lambda *tensors: None)
    layer, x = nn.Conv2d(4, 6, 3).requires_grad_(False), torch.randn(2, 4, 9, 8)
    seen: list[str] = []

    class Dispatch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    expected = layer(x)
    with leanconv.torch.enable():
        for _ in range(2):
            layer(x)
        with Dispatch():
            y = layer(x)
        close(y, expected)
        assert seen == ["aten.convolution.default"]
        close(torch.func.vmap(layer)(torch.stack([x, x]))[1], expected)
        y, tangent = torch.func.jvp(layer, (x,), (x,))
        close(y, expected)
        close(tangent, expected - layer.bias[:, None, None])
        assert "aten::_convolution" in str(torch.jit.trace(layer, x).inlined_graph)
        x.requires_grad_()
        assert layer(x).requires_grad


REFUSED: dict[str, Any] = {
    "no filters": lambda x, w, b: (x, None),
    "a number for filters": lambda x, w, b: (x, 3),
    "an array for filters": lambda x, w, b: (x, w.detach().numpy()),
    "no images": lambda x, w, b: (None, w),
    "a number for a bias": lambda x, w, b: (x, w, 3),
    "a list for a bias": lambda x, w, b: (x, w, [1.0] * 4),
    "a sparse bias": lambda x, w, b: (x, w, b.to_sparse()),
    "sparse filters": lambda x, w, b: (x, w.detach().to_sparse()),
    "no stride": lambda x, w, b: (x, w, b, None),
    "too many": lambda x, w, b: (x, w, b, 1, 0, 1, 1, 1),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("train", [True, False])
def test_what_pytorch_refuses_is_refused_by_it(name: str, train: bool, device: HostDevice) -> None:
    x, w, b = torch.randn(2, 3, 8, 7), nn.Parameter(torch.randn(4, 3, 3, 3)), torch.randn(4)
    given = REFUSED[name](x, w, b)
    with pytest.raises((TypeError, RuntimeError)) as theirs:
        F.conv2d(*given)
    with leanconv.torch.enable(), torch.set_grad_enabled(train):
        for calls in (0, 4):
            for _ in range(calls):
                F.conv2d(x, w, b)
            with pytest.raises(theirs.type) as ours:
                F.conv2d(*given)
            # what it was given it lists with a bias, be it none
            assert str(ours.value).partition(" - got")[0] == str(theirs.value).partition(" - got")[0]
