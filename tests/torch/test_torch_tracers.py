"""leanconv.torch where PyTorch records calls: torch.fx, torch.jit.trace, torch.export, ONNX, meta tensors, modes."""

from __future__ import annotations

import io
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import leanconv.torch as ours  # noqa: E402
from tests.torch.versions import since  # noqa: E402

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


def test_symbolic_tracing_leaves_sizes_to_be_computed() -> None:
    """As of PyTorch's modules, which tracers do not look into."""

    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = ours.ConvTranspose2d(4, 3, 3, stride=2)

        def forward(self, x: Any, like: Any) -> Any:
            return self.up(x, output_size=like.shape[2:])

    net, like = Sized(), torch.empty(1, 1, 10, 11)
    traced = torch.fx.symbolic_trace(net)
    for x in torch.randn(2, 4, 4, 5), torch.randn(1, 4, 4, 5):
        assert traced(x, like).shape[2:] == (10, 11)
        torch.testing.assert_close(traced(x, like), net(x, like))
    assert traced(torch.randn(1, 4, 4, 5), torch.empty(9, 11)[None, None]).shape[2:] == (9, 11)


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


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_trace_of_a_fused_layer_is_one_operator(axes: int, grad: bool) -> None:
    """Whether or not a gradient is recorded while it is traced: PyTorch traces twice, and compares."""
    layer = getattr(ours, f"Conv{axes}d")(4, 4, 3, padding=1, activation="silu")
    x = torch.randn(2, 4, *range(5, 5 + axes))
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(layer, x)
    names = [node.kind() for node in traced.inlined_graph.nodes() if node.kind().startswith("leanconv")]
    assert names == [f"leanconv::fused_conv{max(2, axes)}d"]
    same(traced, layer, torch.cat([x, x], -1).requires_grad_())


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


def _pair(groups: int = 2) -> tuple[Any, Any, Any]:
    """Layers of leanconv, the same of PyTorch, and images."""
    made = ours.Conv2d(4, 6, 3, padding=1, stride=2, groups=groups), ours.ConvTranspose2d(6, 4, 3, stride=2), nn.ReLU()
    net = nn.Sequential(*made, ours.Conv2d(4, 2, (2, 3), padding="same", bias=False))
    theirs = nn.Conv2d(4, 6, 3, padding=1, stride=2, groups=groups), nn.ConvTranspose2d(6, 4, 3, stride=2), nn.ReLU()
    peer = nn.Sequential(*theirs, nn.Conv2d(4, 2, (2, 3), padding="same", bias=False))
    peer.load_state_dict(net.state_dict())
    return net, peer, torch.randn(2, 4, 9, 9)


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_exported_program_holds_operators(dynamic: bool) -> None:
    net, peer, x = _pair()
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},) if dynamic else None
    program = torch.export.export(net, (x,), dynamic_shapes=shapes)
    named = [str(node.target) for node in program.graph.nodes if "leanconv" in str(node.target)]
    assert named == [f"leanconv.{name}.default" for name in ("conv2d", "conv2d_input", "conv2d")]
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    again = torch.export.load(file).module()
    for images in (x, torch.randn(5, 4, 9, 9)) if dynamic else (x,):
        torch.testing.assert_close(again(images), peer(images))


def test_operations_are_counted_as_pytorch_counts_its_own() -> None:
    """Forward and backward; a layer whose input wants no gradient computes none.

    Of gradients of grouped filters PyTorch counts products of all channels, and this those of each group.
    """
    from torch.utils.flop_counter import FlopCounterMode

    net, peer, x = _pair(groups=1)
    for wanted in (False, True):
        counts = []
        for each in (net, peer):
            with FlopCounterMode(display=False) as counter:
                each(x.clone().requires_grad_(wanted)).sum().backward()
            counts.append(counter.get_total_flops())
        assert counts[0] == counts[1] > 0
    grouped = ours.Conv2d(4, 6, 3, groups=2)
    with FlopCounterMode(display=False) as counter:
        grouped(x).sum().backward()
    assert counter.get_total_flops() == 2 * (2 * 2 * 6 * 7 * 7 * 2 * 9)
    volume = ours.Conv3d(2, 3, 3), nn.Conv3d(2, 3, 3)
    counts = []
    for each in volume:
        with FlopCounterMode(display=False) as counter:
            each(torch.randn(1, 2, 5, 6, 7))
        counts.append(counter.get_total_flops())
    assert counts == [2 * 3 * 3 * 4 * 5 * 2 * 27] * 2


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_what_is_recorded_for_onnx_is_pytorchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exporter says so while it traces, in both of its ways; it knows no operators of ours."""
    net, peer, x = _pair()
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    program = torch.export.export(net, (x,))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert not [name for name in targets if "leanconv" in name] and sum("conv" in name for name in targets) == 3
    torch.testing.assert_close(program.module()(x), peer(x))
    traced = torch.jit.trace(net, x)
    kinds = [node.kind() for node in traced.inlined_graph.nodes()]
    assert kinds.count("aten::_convolution") == 3 and not [kind for kind in kinds if kind.startswith("leanconv")]
    torch.testing.assert_close(traced(x), peer(x))


def test_what_is_recorded_of_volumes_for_onnx_is_pytorchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it pads one side more than the other."""
    net = nn.Sequential(ours.Conv3d(4, 6, 3, padding=1, groups=2), ours.CausalConv3d(6, 4, (3, 2, 2), padding="same"),
                        ours.ConvTranspose3d(4, 2, 2, 2), ours.Conv3d(2, 2, 1, activation="relu"))  # fmt: skip
    x = torch.randn(1, 4, 3, 5, 6)
    y = net(x)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    program = torch.export.export(net, (x,))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert not [name for name in targets if "leanconv" in name] and sum("conv" in name for name in targets) == 4
    torch.testing.assert_close(program.module()(x), y)
    traced = torch.jit.trace(net, x)
    kinds = [node.kind() for node in traced.inlined_graph.nodes()]
    assert kinds.count("aten::_convolution") == 4 and not [kind for kind in kinds if kind.startswith("leanconv")]
    torch.testing.assert_close(traced(x), y)


@since("2.10", "its exporter knows no operators but PyTorch's")
def test_an_onnx_file_has_conv(tmp_path: Any) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    net, _, x = _pair()
    torch.onnx.export(net.eval(), (x,), tmp_path / "net.onnx", dynamo=True)
    model = onnx.load(tmp_path / "net.onnx")
    assert [node.op_type for node in model.graph.node if "Conv" in node.op_type] == ["Conv", "ConvTranspose", "Conv"]
    (y,) = ReferenceEvaluator(model).run(None, {model.graph.input[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), net(x).detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.exhaustive
def test_aotinductor_packages_the_operators(tmp_path: Any) -> None:
    net, peer, x = _pair()
    program = torch.export.export(net, (x,))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "net.pt2"))
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), peer(x))
