"""Squeeze-and-excite in networks that `leanconv.torch.fuse` makes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from leanconv.options import layer_options
from tests.torch.conftest import Played

torch = pytest.importorskip("torch")

import leanconv.torch as ours  # noqa: E402
from leanconv.torch import comparing, fused_layer, fusing  # noqa: E402

nn, F = torch.nn, torch.nn.functional


class SqueezeExcitation(nn.Module):
    """torchvision's."""

    def __init__(self, c: int, squeezed: int, activation: Any = nn.ReLU, scale_activation: Any = nn.Sigmoid) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(c, squeezed, 1), nn.Conv2d(squeezed, c, 1)
        self.activation, self.scale_activation = activation(), scale_activation()

    def _scale(self, input: Any) -> Any:
        return self.scale_activation(self.fc2(self.activation(self.fc1(self.avgpool(input)))))

    def forward(self, input: Any) -> Any:
        return self._scale(input) * input


class Net(nn.Module):
    """Blocks as torchvision and timm write them, one of them called twice, and what follows one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.silu, self.hard = SqueezeExcitation(8, 2, nn.SiLU), SqueezeExcitation(8, 3, nn.ReLU, nn.Hardsigmoid)
        self.parts = nn.ModuleList([nn.Conv2d(8, 4, 1, bias=False), nn.Conv2d(4, 8, 1, bias=False)])
        self.last = nn.Conv2d(8, 8, 1)

    def forward(self, x: Any) -> Any:
        y = self.silu(F.relu6(self.bn(self.conv(x))))
        y = self.hard(self.silu(y))
        gates = F.hardsigmoid(self.parts[1](self.parts[0](y.mean((3, 2), keepdim=True)).relu()))
        y = torch.mul(y, gates)
        z = self.last(y)
        z *= torch.sigmoid(self.parts[1](F.gelu(self.parts[0](F.adaptive_avg_pool2d(z, (1, 1))))))
        return z + x[:, :1]


BLOCKS = {
    "mean+conv+silu+conv+sigmoid+mul": 1, "mean+conv+relu+conv+hardsigmoid+mul": 2,
    "mean+conv+gelu+conv+sigmoid+mul": 1, "conv+bn+relu6": 1, "conv": 1,
}  # fmt: skip


def made(kind: Any, *given: Any) -> Any:
    torch.manual_seed(4)
    return kind(*given).eval()


def test_a_model_computes_the_same() -> None:
    model, x = made(Net).double(), torch.randn(2, 3, 6, 5, dtype=torch.float64)
    fused = ours.fuse(model)
    torch.testing.assert_close(fused(x), model(x))
    assert fused.report.counts == BLOCKS and not fused.report.left
    # parameters keep their names where a block is a module by itself
    assert {"silu.fc1.weight", "hard.fc2.bias", "conv.bias"} <= fused.state_dict().keys()
    for again in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), ours.fuse(fused)):
        assert torch.equal(again(x), fused(x)) and again.report.counts == BLOCKS
    program = torch.export.export(ours.fuse(made(SqueezeExcitation, 8, 2)), (torch.randn(1, 8, 6, 5),))
    assert sum(str(node.target) == "aten.conv2d.default" for node in program.graph.nodes) == 2
    for followed in (torch.compile(fused, backend="eager", fullgraph=True), torch.jit.trace(fused, x)):
        torch.testing.assert_close(followed(x), model(x))
    torch.testing.assert_close(torch.func.vmap(fused)(x.unsqueeze(1)).squeeze(1), model(x))
    # of one image without a batch the pixels are the last axes
    block, x = made(SqueezeExcitation, 8, 2), torch.randn(8, 6, 5)
    torch.testing.assert_close(ours.fuse(block)(x), block(x))


class Unfit(nn.Module):
    """Products that only look like blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.wide, self.conv = (nn.Conv2d(4, 4, size) for size in (1, 1, (1, 3), 1))
        self.pool = nn.AdaptiveAvgPool2d((1, 3))

    def forward(self, x: Any) -> Any:
        gates = torch.sigmoid(self.fc2(self.fc1(F.adaptive_avg_pool2d(x, 1)).relu()))
        a = x * gates + gates  # which others read
        a = a * torch.sigmoid(self.fc2(self.wide(self.pool(a)).relu()))  # of more than the mean
        a = a * self.fc2(self.fc1(F.adaptive_avg_pool2d(a, 1)).relu())  # no gate
        a = a.abs() * torch.sigmoid(self.fc2(self.fc1(F.adaptive_avg_pool2d(a, 1)).relu()))  # of something else
        b = torch.sigmoid(self.fc2(self.fc1(a.mean((2, 3), keepdim=True)).relu()))
        a.mul_(2)  # in place, what the mean has read
        a = a * b
        part = a[:, :2]
        b = torch.sigmoid(self.fc2(self.fc1(a.mean((2, 3), keepdim=True)).relu()))
        part.mul_(2)  # the same by another name
        a = a * b
        a = a * torch.sigmoid(self.fc2(self.fc1(a.mean(2, keepdim=True)).relu()))  # of columns
        return a * torch.sigmoid(self.fc2(self.fc1(a.mean((a.dim() - 2, 3), keepdim=True)).relu()))  # of who knows


def test_what_only_looks_alike_is_not_fused() -> None:
    model, x = made(Unfit), torch.randn(2, 4, 5, 4)
    fused = ours.fuse(model)
    torch.testing.assert_close(fused(x), model(x))
    assert not any("mul" in what for what in fused.report.counts)


class Named(nn.Module):
    """Layers with names that a `SqueezeExcite` has otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.name, self.layers = nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 1)

    def forward(self, x: Any) -> Any:
        return x * torch.sigmoid(self.layers(self.name(x.mean((2, 3), keepdim=True)).relu()))


def test_layers_may_have_any_names() -> None:
    model, x = made(Named), torch.randn(2, 4, 5, 4)
    fused = ours.fuse(model)
    torch.testing.assert_close(fused(x), model(x))
    assert fused.report.counts == {"mean+conv+relu+conv+sigmoid+mul": 1}


@pytest.mark.parametrize("taken", [True, False])
def test_what_an_example_runs_is_compiled_before(taken: bool, played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block's kernel, or those of its layers, by which PyTorch's mean and product are quicker."""
    compiled: list[Any] = []
    way = fused_layer.Way("leanconv: any", "", "", layer_options("conv2d"), "a kernel", 0)
    monkeypatch.setattr(fused_layer.FusedConv, "decide", lambda layer, input, add=None: way._replace(kernel=layer.what))
    monkeypatch.setattr(fusing, "precompile", lambda problems, **options: compiled.extend(problems))
    monkeypatch.setattr(comparing, "squeeze_cycles", lambda *given: 1e12 * taken + 1)
    ours.fuse(made(SqueezeExcitation, 24, 5), torch.randn(2, 24, 6, 8))
    assert (compiled, len(played.loaded)) == (([], 1) if taken else (["conv+relu", "conv+sigmoid"], 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_on_a_gpu_a_block_is_one_launch(form: Any, dtype: Any, played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made(SqueezeExcitation, 24, 5, nn.SiLU, nn.Hardsigmoid), torch.randn(2, 24, 6, 8)
    expected = model(x)
    x = x.to(dtype).contiguous(memory_format=form)
    fused = ours.fuse(model.to(dtype), x)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 3e-3, "atol": 3e-3}
    with torch.no_grad():
        y = fused(x)
    torch.testing.assert_close(y.float(), expected, **tolerance)
    assert y.dtype is dtype and y.is_contiguous(memory_format=form)
    assert len(played.launches) == 2 and len(played.loaded) == 1
    said = str(fused.report)
    assert "squeeze_excite: mean+conv+silu+conv+hardsigmoid+mul: leanconv: squeeze_excite, squeeze-excite N" in said
    # a gradient, a view that is not dense, other memory, and images of which PyTorch is expected to be quicker
    block = fused.get_submodule("squeeze_excite")
    block(x.clone().requires_grad_()).sum().backward()
    with torch.no_grad():
        for other in (x[:, :, ::2], x.flatten()[1:].new_zeros(x.numel() + 1)[1:].view(x.shape)):
            assert block(other).shape == other.shape
        with torch.autocast("cpu", torch.bfloat16):
            block(x)
        monkeypatch.setattr(comparing, "squeeze_cycles", lambda *given: 1.0)
        block(x[:1])
    assert len(played.launches) == 2 and "PyTorch, squeeze-excite N" in str(fused.report)
    assert "its memory starts at no multiple of 16 bytes" in str(fused.report)
    assert not pickle.loads(pickle.dumps(block)).ways


def test_what_a_launch_would_miss_is_pytorchs(played: Played) -> None:
    fused, x = ours.fuse(made(SqueezeExcitation, 24, 5)), torch.randn(2, 24, 6, 8)
    block = fused.get_submodule("squeeze_excite")
    # derivatives along a tangent
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert torch.autograd.forward_ad.unpack_dual(fused(dual)).tangent is not None
    # a layer's hooks
    seen: list[Any] = []
    handle = block.fc1.register_forward_hook(lambda *given: seen.append(given))
    fused(x)
    handle.remove()
    assert len(seen) == 1 and not played.launches
    # other layers in their place
    expected, fc1 = fused(x), block.fc1
    block.fc1 = nn.Sequential(fc1)
    torch.testing.assert_close(fused(x), expected)
    block.fc1 = fc1
    assert len(played.launches) == 1
    played.launches.clear()
    # parameters that have moved, of which the memory may be another device's, and such as do not fit
    fused(x)
    block.fc1.weight = nn.Parameter(block.fc1.weight.detach().clone(), requires_grad=False)
    fused(x)
    assert len(played.launches) == 2 and sum(way.runs == "leanconv: squeeze_excite" for way in block.ways) == 2
    block.fc2.bias = nn.Parameter(torch.zeros(8), requires_grad=False)
    with pytest.raises(RuntimeError, match="bias"):
        fused(x)
