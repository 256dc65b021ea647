"""leanconv.torch where PyTorch records calls: torch.fx, torch.jit.trace, meta tensors, function modes."""

from __future__ import annotations

import io
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import leanconv.torch as ours  # noqa: E402

nn = torch.nn


class Net(nn.Module):
    """All modules, with sizes that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.a = ours.Conv2d(3, 4, 3, padding=1, padding_mode="circular", precision="ieee")
        self.b = ours.ConvTranspose2d(4, 4, 3, stride=2)
        self.c = ours.Conv1d(4, 4, 3, padding="same")
        self.d = ours.ConvTranspose1d(4, 2, 3, stride=2, output_padding=1)

    def forward(self, x: Any) -> Any:
        return self.d(self.c(self.b(self.a(x)).flatten(2)))


def same(one: Any, other: Any, x: Any) -> None:
    results = [(y := each(x), *torch.autograd.grad(y.square().sum(), x)) for each in (one, other)]
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_symbolic_tracing_records_the_functions() -> None:
    net, x = Net(), torch.randn(2, 3, 6, 5, requires_grad=True)
    traced = torch.fx.symbolic_trace(net)
    functions = [
        node.target for node in traced.graph.nodes if "leanconv" in str(getattr(node.target, "__module__", ""))
    ]
    assert functions == [ours.conv2d, ours.conv_transpose2d, ours.conv1d, ours.conv_transpose1d]
    assert [node.kwargs["precision"] for node in traced.graph.nodes if node.target is ours.conv2d] == ["ieee"]
    same(traced, net, x)
    function = torch.fx.symbolic_trace(lambda x, w: ours.conv2d(x, w, stride=2))
    torch.testing.assert_close(function(x, net.a.weight), ours.conv2d(x, net.a.weight, stride=2))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("grad", [False, True])
def test_a_trace_holds_operators_for_any_size(grad: bool) -> None:
    """It is saved, loaded, and differentiated; images may be others than those it was made with."""
    net = Net()
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(net, torch.randn(1, 3, 6, 5))
    names = [node.kind() for node in traced.inlined_graph.nodes() if node.kind().startswith("leanconv")]
    functions = "conv2d", "conv_transpose2d", "conv2d", "conv_transpose2d"
    assert names == [f"leanconv::{name}" for name in functions]
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    same(torch.jit.load(file), net, torch.randn(2, 3, 7, 5, requires_grad=True))


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_meta_tensors_have_shapes(form: Any) -> None:
    net = Net()
    x = torch.randn(2, 3, 6, 5).contiguous(memory_format=form)
    expected = net(x)
    meta = net.to("meta")(x.to("meta").requires_grad_())
    assert meta.is_meta and meta.shape == expected.shape and meta.stride() == expected.stride()
    meta.sum().backward()
    assert all(each.grad.is_meta and each.grad.shape == each.shape for each in net.parameters())


def test_a_function_mode_sees_a_call() -> None:
    calls = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
            calls.append(function)
            return function(*given, **(named or {}))

    with Mode():
        y = ours.conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3), precision="ieee")
    assert y.item() == 9 and ours.conv2d in calls
