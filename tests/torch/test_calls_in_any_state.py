"""Layers and gradients under `enable`, called in any order and in any state, give what PyTorch gives without it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.stand_ins import HostDevice, set_capturing

torch = pytest.importorskip("torch")

import leanconv.torch  # noqa: E402
from leanconv.torch import patch, quick, recorded, registration  # noqa: E402

nn = torch.nn
Change = Callable[[Any], Any]

CONVOLUTIONS = {
    "signals": lambda: nn.Conv1d(4, 6, 3, padding=1),
    "images": lambda: nn.Conv2d(4, 6, 3),
    "without a bias": lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False),
    "channels last": lambda: nn.Conv2d(4, 6, 1).to(memory_format=torch.channels_last),
    "16 bits": lambda: nn.Conv2d(8, 8, 3, groups=2).half(),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3, stride=2),
    "volumes": lambda: nn.Conv3d(4, 6, (1, 3, 3), padding=(0, 1, 1)),
}
FORMATS = {3: torch.contiguous_format, 4: torch.channels_last, 5: torch.channels_last_3d}
#: how tensors lie, which have the same values but where they are new ones
LIES: dict[str, Change] = {
    "as they are": lambda x: x,
    "copied": lambda x: x.clone(),
    "channels last": lambda x: x.contiguous(memory_format=FORMATS[x.dim()]),
    "elsewhere in a unit of 16 bytes": lambda x: torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape),
    "a part of larger ones": lambda x: torch.cat((x, x), 1)[:, x.shape[1] :],
    "one for all": lambda x: x[:1].expand(x.shape),
    "negated": lambda x: torch._neg_view(-x),
    "zeros without memory": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
}


def moved(parameter: Any) -> None:
    parameter.data = LIES["elsewhere in a unit of 16 bytes"](parameter.data)


#: what may change in a layer between two calls
CHANGES: dict[str, Change] = {
    "in place": lambda layer: layer.weight.mul_(0.9),
    "other memory": lambda layer: setattr(layer.weight, "data", layer.weight.data * 1.1),
    "a negated view": lambda layer: setattr(layer.weight, "data", torch._neg_view(layer.weight.data)),
    "another parameter": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.clone())),
    "filters elsewhere in a unit of 16 bytes": lambda layer: moved(layer.weight),
    "a bias elsewhere": lambda layer: layer.bias is None or moved(layer.bias),
    "rows as columns": lambda layer: (
        setattr(layer.weight, "data", layer.weight.data.transpose(-1, -2)) if layer.weight.dim() > 3 else None
    ),
    "frozen filters": lambda layer: layer.weight.requires_grad_(not layer.weight.requires_grad),
    "a frozen bias": lambda layer: layer.bias is None or layer.bias.requires_grad_(not layer.bias.requires_grad),
    "channels last": lambda layer: layer.to(memory_format=FORMATS[layer.weight.dim()]),
}
#: of which of the images and parameters gradients are wanted
PARTS = [slice(None), slice(None), slice(1), slice(-1, None)]
#: relative to the largest number
TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}


def outcome(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        return None, error


def strides(tensor: Any) -> list[int]:
    """Of axes along which there is more than one element. PyTorch's volumes lie otherwise on the CPU than on GPUs."""
    found = zip(tensor.stride(), tensor.shape, strict=True)
    return [] if tensor.dim() == 5 else [stride for stride, length in found if length > 1]


class Calls(RuleBasedStateMachine):
    """Each call runs twice: under `enable`, and without leanconv."""

    device: HostDevice
    monkeypatch: pytest.MonkeyPatch

    results = Bundle("results")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.during = ExitStack()
        self.during.callback(setattr, torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
        self.during.enter_context(leanconv.torch.enable())
        self.layer: Any = None

    @initialize(
        name=st.sampled_from(list(CONVOLUTIONS)),
        taken=st.sets(st.sampled_from(["fprop", "dgrad", "wgrad"]), min_size=1).filter(lambda ops: len(ops) != 2)
        | st.just({"fprop", "dgrad", "wgrad"}),
    )
    def begin(self, name: str, taken: set[str]) -> None:
        expected = {op: 1e12 if op in taken else 1e-6 for op in ("fprop", "dgrad", "wgrad")}
        self.monkeypatch.setattr(patch, "pytorch_cycles", lambda problem, target, tf32: expected[problem.op])
        self.layer = CONVOLUTIONS[name]()
        size = [5, 4, 4][: self.layer.weight.dim() - 2]
        shapes = [[n, self.layer.in_channels, *size] for n in (1, 2)]
        self.images = [torch.randn(shape).to(self.layer.weight.dtype) for shape in shapes]

    def teardown(self) -> None:
        self.during.close()
        self.device.stream, self.device.without_context = 0x51, False
        self.monkeypatch.setattr(quick, "_current_device", lambda: 0)

    def both(self, call: Callable[[], Any], captured: bool = False) -> tuple[Any, Any]:
        """Results with leanconv and without; the same, or None where both raise."""
        with self.monkeypatch.context() as during:
            if captured:
                set_capturing(during, True)
            found, error = outcome(call)
        with registration.suspended():
            expected, their_error = outcome(call)
        if (error is None) is not (their_error is None):
            raise AssertionError(f"with leanconv: {error!r}; without: {their_error!r}") from error or their_error
        return found, expected

    def check(self, one: Any, other: Any, rounded: Any) -> None:
        assert (one is None) is (other is None)
        if one is not None:
            assert (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
            assert strides(one) == strides(other)
            most = TOLERANCES[rounded] * max(float(other.detach().abs().max()), 1e-2)
            torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=most)

    @precondition(lambda self: self.layer is not None)
    @rule(
        target=results, image=st.integers(0, 1), lies=st.sampled_from(["as they are", *LIES]), wanted=st.booleans(),
        mode=st.sampled_from(["grad", "grad", "no_grad", "inference_mode"]),
        dtype=st.sampled_from([None, None, torch.float16, torch.bfloat16]),
        captured=st.sampled_from([False] * 7 + [True]), saved=st.sampled_from([False] * 7 + [True]),
    )  # fmt: skip
    def call(self, image: int, lies: str, wanted: bool, mode: str, dtype: Any, captured: bool, saved: bool) -> Any:
        """``saved``: a hook sees the tensors that autograd saves."""
        x = LIES[lies](self.images[image]).detach()
        x = x.requires_grad_(wanted and lies != "zeros without memory")

        def convolution() -> Any:
            with ExitStack() as during:
                if mode != "grad":
                    during.enter_context(getattr(torch, mode)())
                if saved:
                    during.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
                during.enter_context(torch.autocast("cpu", dtype or torch.float16, dtype is not None))
                return self.layer(x)

        one, other = self.both(convolution, captured)
        rounded = dtype or x.dtype
        self.check(one, other, rounded)
        if one is None or not one.requires_grad:
            return None
        return one, other, [each for each in (x, *self.layer.parameters()) if each.requires_grad], rounded

    @rule(
        result=results, lies=st.sampled_from(["as they are", *LIES]), part=st.sampled_from(PARTS), again=st.booleans(),
        captured=st.sampled_from([False] * 7 + [True]), autocast=st.sampled_from([False] * 7 + [True]),
    )  # fmt: skip
    def gradients(self, result: Any, lies: str, part: slice, again: bool, captured: bool, autocast: bool) -> None:
        if result is None:
            return
        ours, theirs, wanted, rounded = result
        wanted = wanted[part]
        grad = LIES[lies](torch.randn(ours.shape).to(ours.dtype))
        of = iter((ours, theirs))

        def backward() -> Any:
            with torch.autocast("cpu", torch.float16, autocast):
                return torch.autograd.grad(next(of), wanted, grad, retain_graph=again, allow_unused=True)

        found, expected = self.both(backward, captured)
        for one, other in zip(found or (), expected or (), strict=True):
            self.check(one, other, rounded)

    @precondition(lambda self: self.layer is not None)
    @rule(
        image=st.integers(0, 1), dtype=st.sampled_from([None, None, torch.float16]), lies=st.sampled_from(list(LIES)),
        name=st.sampled_from([None, *CHANGES]), part=st.sampled_from(PARTS), grad_lies=st.sampled_from(list(LIES)),
    )  # fmt: skip
    def steps(self, image: int, dtype: Any, lies: str, name: str | None, part: Any, grad_lies: str) -> None:
        """Three that are alike, so that the next one like them is known, and one that may be otherwise."""
        for _ in range(3):
            made = self.call(image, "as they are", True, "grad", dtype, False, False)
            self.gradients(made, "as they are", slice(None), False, False, False)
        if name is not None:
            self.change(name)
        made = self.call(image, lies, True, "grad", dtype, False, False)
        self.gradients(made, grad_lies, part, False, False, False)

    @precondition(lambda self: self.layer is not None)
    @rule(name=st.sampled_from(list(CHANGES)))
    def change(self, name: str) -> None:
        with torch.no_grad():
            CHANGES[name](self.layer)

    @rule(
        what=st.sampled_from(["precision", "patch", "another GPU", "no context", "stream", "refresh"]), on=st.booleans()
    )
    def switch(self, what: str, on: bool) -> None:
        if what == "precision":
            torch.backends.cudnn.allow_tf32 = on
        elif what == "patch":
            self.during.enter_context(leanconv.torch.enable())
        elif what == "another GPU":
            self.monkeypatch.setattr(quick, "_current_device", lambda: int(on))
        elif what == "no context":
            self.device.without_context = on
        elif what == "stream":
            self.device.stream = 0x77 if on else 0x51
        else:
            registration.latest().refresh()  # type: ignore[union-attr]


def test_calls_in_any_state(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    backward, long = recorded.Recorded.backward, recorded.RecordedCall.gradients
    counts = {"recorded": 0, "long": 0}

    def counted(name: str, function: Any) -> Any:
        def call(*given: Any) -> Any:
            counts[name] += 1
            return function(*given)

        return call

    monkeypatch.setattr(recorded.Recorded, "backward", staticmethod(counted("recorded", backward)))
    monkeypatch.setattr(recorded.RecordedCall, "gradients", counted("long", long))
    Calls.device, Calls.monkeypatch = device, monkeypatch
    few = "not exhaustive" in request.config.option.markexpr
    run_state_machine_as_test(
        Calls,
        settings=settings(
            max_examples=40 if few else 800, stateful_step_count=40, deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
    assert counts["recorded"] - counts["long"] > 100 < counts["long"], "gradients as the ones before, and others"
