"""`leanconv.torch.fuse`, and the backend of torch.compile that does the same."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest

from tests.messages import says
from tests.stand_ins import HostDevice

torch = pytest.importorskip("torch")

import leanconv.torch as ours  # noqa: E402
from leanconv.torch import comparing, expected_time, fused_backend, fused_layer, fusing  # noqa: E402
from leanconv.torch.deciding import Decision  # noqa: E402

nn, F = torch.nn, torch.nn.functional
#: what the backend decides of a convolution that it takes
TAKEN: Any = fused_layer.Way("leanconv: it", "a problem", "said so", kernel="a problem", device=0)


class Block(nn.Module):
    """As those of residual networks, additions and activations in place."""

    def __init__(self, c: int, k: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c, k, 3, stride, 1, bias=False), nn.BatchNorm2d(k)
        self.conv2, self.bn2 = nn.Conv2d(k, k, 3, 1, 1, bias=False), nn.BatchNorm2d(k)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Sequential(nn.Conv2d(c, k, 1, stride, bias=False), nn.BatchNorm2d(k)) if stride > 1 else None

    def forward(self, x: Any) -> Any:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.down is None else self.down(x)
        return self.relu(y)


class Odd(nn.Module):
    """Whose code torch.fx cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(8, 8, 1, groups=2), nn.BatchNorm2d(8, affine=False), nn.Dropout(), nn.SiLU()
        )

    def forward(self, x: Any) -> Any:
        return self.layers(x) if x.sum() < 1e9 else x


class Net(nn.Module):
    """Chains of several kinds, and what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b, self.odd = nn.Conv2d(3, 4, 3), Block(4, 4), Block(4, 8, 2), Odd()
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.circular = nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")
        self.signal = nn.Sequential(nn.Conv1d(4, 6, 3, padding="same"), nn.BatchNorm1d(6), nn.LeakyReLU(0.2))
        self.last = nn.Conv1d(6, 2, 1)

    def forward(self, x: Any) -> Any:
        x = F.elu(self.stem(x), 0.5, inplace=True)
        x = self.circular(self.up(self.odd(self.b(self.a(x)))))
        x = self.signal(x.flatten(2))
        return torch.add(self.last(x), x[:, :2]).tanh()


FUSED = {
    "conv+bn+relu": 2, "conv+bn+add+relu": 2, "conv+elu:0.5": 1, "conv+bn": 1, "conv+bn+silu": 1,
    "conv+bn+leaky_relu:0.2": 1, "conv+add+tanh": 1,
}  # fmt: skip


def made(kind: Any, *sizes: int) -> Any:
    """A model whose normalisations change what they are given."""
    torch.manual_seed(5)
    model = kind(*sizes)
    for each in model.modules():
        if isinstance(each, (nn.BatchNorm1d, nn.BatchNorm2d)):
            each.running_mean.normal_()
            each.running_var.uniform_(0.5, 2)
            if each.affine:
                nn.init.uniform_(each.weight, 0.5, 2)
                nn.init.normal_(each.bias)
    return model.eval()


def test_a_model_computes_the_same() -> None:
    model, x = made(Net), torch.randn(2, 3, 18, 16)
    kept, expected = copy.deepcopy(model.state_dict()), model(x)
    fused = ours.fuse(model, x)
    torch.testing.assert_close(fused(x), expected, rtol=1e-4, atol=1e-5)
    report = fused.report
    assert report.counts == FUSED and str(report).startswith("2 conv+bn+relu\n2 conv+bn+add+relu\n")
    left = dict(report.left)
    assert left.keys() == {"odd", "up", "circular"} and "cannot trace" in left["odd"]
    assert "left: circular: its padding_mode is 'circular'" in str(report)
    # nothing of the model has changed, and nothing is shared
    assert all(map(torch.equal, kept.values(), model.state_dict().values()))
    mine = {each.data_ptr() for each in fused.state_dict().values()}
    assert mine.isdisjoint(each.data_ptr() for each in model.state_dict().values())
    assert {"stem.weight", "a.conv1.weight", "a.conv1.bias", "odd.layers.0.bias"} <= fused.state_dict().keys()


def test_sixteen_bits_are_rounded_once() -> None:
    """What is folded is not rounded in between: no worse than the model itself in its type."""
    model, x = made(Block, 4, 8, 2), torch.randn(2, 4, 12, 12)
    half = copy.deepcopy(model).bfloat16()
    exact = copy.deepcopy(half).double()(x.bfloat16().double())
    fused = ours.fuse(half)
    errors = [
        float((each(x.bfloat16()).double() - exact).norm().detach() / exact.norm().detach()) for each in (fused, half)
    ]
    assert errors[0] <= 1.1 * errors[1] < 0.02


def test_a_class_that_makes_a_convolution_in_another_way_is_one() -> None:
    """As torchvision's networks of videos have; one that computes otherwise is left."""

    class Simple(nn.Conv3d):
        def __init__(self, c: int, k: int) -> None:
            super().__init__(c, k, (1, 3, 3), padding=(0, 1, 1), bias=False)

    class Twice(nn.Conv3d):
        def forward(self, input: Any) -> Any:
            return 2 * super().forward(input)

    model = nn.Sequential(Simple(2, 4), nn.BatchNorm3d(4), nn.ReLU(), Twice(4, 4, 1)).eval()
    model[1].running_mean.fill_(0.5)
    x, fused = torch.randn(1, 2, 3, 6, 5), ours.fuse(model)
    assert fused.report.counts == {"conv+bn+relu": 1}
    torch.testing.assert_close(fused(x), model(x))
    model[0].forward = lambda input: model[3](input)
    assert not ours.fuse(model).report.counts


def test_copies_pickles_and_state() -> None:
    x = torch.randn(2, 3, 18, 16)
    fused = ours.fuse(made(Net))
    for again in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert torch.equal(again(x), fused(x)) and again.report == fused.report
    again.stem.weight.data.zero_()
    again.load_state_dict(fused.state_dict())
    assert torch.equal(again(x), fused(x))
    assert torch.equal(again.double()(x.double()).float(), again(x.double()).float())
    x.requires_grad_()
    torch.testing.assert_close(
        *(torch.autograd.grad(each(x).sum(), x) for each in (fused, made(Net))), rtol=1e-3, atol=1e-4
    )
    program = torch.export.export(ours.fuse(made(Block, 4, 4)), (torch.randn(1, 4, 6, 6),))
    named = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert named == [
        f"aten.{name}" for name in ("conv2d.default", "relu.default", "conv2d.default", "add.Tensor", "relu.default")
    ]


def test_what_is_refused() -> None:
    with says(ValueError, "model is in training mode", "model.eval()"):
        ours.fuse(Block(2, 2))
    model = made(Net)
    model.b.bn2.train()
    with says(ValueError, "its layer b.bn2 is in training mode"):
        ours.fuse(model)
    with says(TypeError, "model is a function", "torch.nn.Module"):
        ours.fuse(lambda x: x)
    with says(ValueError, "a fused model is for inference"):
        ours.fuse(made(Block, 2, 2)).train()
    with says(ValueError, "precision='exact' is not known"):
        ours.fuse(made(Block, 2, 2), precision="exact")


class Unfit(nn.Module):
    """Chains that only look like ones."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.wide, self.moved, self.added = (nn.Conv2d(4, 4, 1) for _ in range(4))
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x: Any) -> Any:
        a = self.read(x)
        a = self.bn(a) + a  # somebody else reads what the normalisation is given
        b = self.wide(x[:1]) + a  # of one image
        c, x = self.moved(b), b.relu()
        b.mul_(2)  # in place, what the convolution has read
        c = c.relu()
        d = self.added(c)
        x += d  # in place, a residual that is read again
        return d.sum() + x.sigmoid() * c


def test_what_only_looks_alike_is_not_fused() -> None:
    model, x = made(Unfit), torch.randn(3, 4, 5, 5)
    fused = ours.fuse(model)
    torch.testing.assert_close(fused(x.clone()), model(x.clone()))
    assert fused.report.counts == {"conv": 3, "conv+add": 1}
    said = str(fused.report)
    assert "left: moved: mul_ changes something in place" in said and "left: bn: no convolution stands before" in said


#: the problems whose kernels would have been compiled
compiled: list[Any] = []


@pytest.fixture
def on_stand_in(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> HostDevice:
    monkeypatch.setattr(fused_layer, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(expected_time, "pytorch_cycles", lambda problem, target, tf32: 1e12)
    for module in (fusing, fused_backend):
        monkeypatch.setattr(module, "precompile", lambda problems, **options: compiled.extend(problems))
    compiled.clear()
    return device


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_on_a_gpu(form: Any, on_stand_in: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chain is one launch, of a kernel that is chosen with its residual and its activation."""
    model, x = made(Block, 4, 8, 2).to(memory_format=form), torch.randn(2, 4, 12, 10).contiguous(memory_format=form)
    expected = model(x)
    fused = ours.fuse(model, x)
    before = len(on_stand_in.launches)
    with torch.no_grad():
        y = fused(x)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    assert y.is_contiguous(memory_format=form) and len(on_stand_in.launches) - before == 3
    ways = [way for each in fused.modules() if isinstance(each, fused_layer.FusedConv) for way in each.ways]
    problems = [way.problem for way in ways]
    assert problems == compiled
    assert [(each.bias, each.add, each.activation) for each in problems] == [
        (True, False, "relu"), (True, False, None), (True, True, "relu"),
    ]  # fmt: skip
    assert all(way.runs.startswith("leanconv: ") for way in ways) and "conv1: conv+bn+relu: leanconv" in str(
        fused.report
    )
    # where PyTorch is quicker, it computes; so it does with a residual that is no residual, and with a gradient
    launched = len(on_stand_in.launches)
    monkeypatch.setattr(expected_time, "pytorch_cycles", lambda problem, target, tf32: 1e-6)
    monkeypatch.setattr(comparing, "passes_cycles", lambda *given: 0.0)
    torch.testing.assert_close(ours.fuse(model)(x), expected, rtol=1e-4, atol=1e-4)
    last = fused.get_submodule("down.0")
    with torch.no_grad():
        torch.testing.assert_close(last(x, torch.ones(8, 1, 1)), torch.relu(last._convolved(x, last.bias) + 1))
    fused(x.requires_grad_()).sum().backward()
    assert len(on_stand_in.launches) == launched


def test_calls_as_before_ask_one_guard(on_stand_in: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other images, filters, residuals, switches and gradients the long way decides."""
    layer, x, add = ours.fuse(made(Block, 4, 4)).conv2, torch.randn(2, 4, 6, 7), torch.randn(2, 4, 6, 7)
    run, calls = fused_layer.lookup.run, []
    monkeypatch.setattr(fused_layer.lookup, "run", lambda *given: calls.append(given) or run(*given))

    def called(x: Any, add: Any) -> bool:
        before = len(calls)
        torch.testing.assert_close(layer(x, add), F.relu(layer._convolved(x, layer.bias) + add), rtol=1e-4, atol=1e-5)
        return len(calls) > before

    assert [called(x, add), called(x, add), called(-x, add + 1)] == [True, False, False]
    with torch.no_grad():
        layer.weight.mul_(2)
    assert not called(x, add)
    layer.weight.data = layer.weight.clone() * 2
    assert [called(x, add), called(x, add)] == [True, False]
    assert called(x[:1], add[:1]) and called(x, add.contiguous(memory_format=torch.channels_last))
    assert torch.equal(layer(x, 1.0), torch.relu(layer._convolved(x, layer.bias) + 1.0))
    assert layer(x.clone().requires_grad_(), add).requires_grad and called(x, add) and not called(x, add)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x, add.bfloat16()).dtype is torch.bfloat16
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert torch.autograd.forward_ad.unpack_dual(layer(dual, add)).tangent is not None
    again = copy.deepcopy(layer)
    torch.testing.assert_close(again(x, add), layer(x, add))


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_what_follows_pytorchs_convolution_is_one_pass(
    axes: int, on_stand_in: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that is more than a bias, and quicker than PyTorch's functions."""
    monkeypatch.setattr(comparing, "fused", lambda *given, packed: Decision("", "PyTorch convolves quicker"))
    conv = getattr(nn, f"Conv{axes}d")(3, 4, 3, padding=1)
    fused, x = ours.fuse(nn.Sequential(conv, nn.Hardswish()).eval()), torch.randn(2, 3, *(6,) * axes)
    expected = F.hardswish(conv(x))
    with torch.no_grad():
        for quicker in (True, False):
            monkeypatch.setattr(comparing, "passes_cycles", lambda *given, us=quicker: 1e12 * us)
            torch.testing.assert_close(copy.deepcopy(fused)(x), expected, rtol=1e-5, atol=1e-5)
            assert len(on_stand_in.launches) == 1
        monkeypatch.setattr(comparing, "passes_cycles", lambda *given: 1e12)
        ours.fuse(nn.Sequential(conv).eval())(x)
    assert len(on_stand_in.launches) == 1


def test_filters_stay_packed_until_they_change(on_stand_in: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    from leanconv.call import bind

    choose = bind.choose
    monkeypatch.setattr(
        bind, "choose", lambda problem, target, name, limit, kept: choose(problem, target, "winograd1d", limit, kept)
    )
    fused, x = ours.fuse(nn.Sequential(nn.Conv2d(32, 64, 3), nn.GELU()).eval()), torch.randn(1, 32, 10, 9)
    layer, counts = fused.get_submodule("0"), []
    with torch.no_grad():
        for factor in (1, 1, 2, 1):
            if factor > 1:
                layer.weight.mul_(factor)
            torch.testing.assert_close(fused(x), F.gelu(layer._convolved(x, layer.bias)), rtol=1e-3, atol=1e-4)
            counts.append(on_stand_in.prepared)
    assert counts == [1, 1, 2, 2]


def test_the_backend_of_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Dynamo gives becomes calls of the operator, but where a gradient is recorded."""
    model, x = made(Block, 4, 8, 2), torch.randn(2, 4, 10, 10)
    monkeypatch.setattr(fused_backend, "_decide", lambda chain, precision: TAKEN)
    monkeypatch.setattr(fused_backend, "precompile", lambda *given, **options: None)
    graphs = []

    def keeps(graph: Any, inputs: Any) -> Any:
        graphs.append(str(graph.code))
        return graph

    compiled = torch.compile(model, backend=partial(ours.fused, compiler=keeps))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        model.bn1.weight.mul_(2)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    code = graphs.pop()
    assert not graphs and code.count("leanconv.fused_conv2d") == 3 and "batch_norm" not in code
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    assert "leanconv" not in graphs.pop()


class Counting(nn.Module):
    """A layer that changes what its normalisation reads, before it."""

    def __init__(self, changes: str) -> None:
        super().__init__()
        self.conv, self.norm, self.changes = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), changes

    def forward(self, x: Any) -> Any:
        getattr(self.norm, self.changes)[1:].add_(1)
        return self.norm(self.conv(x)).relu()


@pytest.mark.parametrize("changes", ["weight", "bias", "running_mean", "running_var"])
def test_normalisations_that_change_in_a_graph_stay_in_their_place(
    changes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales are computed where the graph begins."""
    monkeypatch.setattr(fused_backend, "_decide", lambda chain, precision: TAKEN)
    monkeypatch.setattr(fused_backend, "precompile", lambda *given, **options: None)
    model, x = made(Counting, changes), torch.randn(2, 4, 6, 5)
    again = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(again, backend=partial(ours.fused, compiler="eager"))
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x))


def test_the_backend_asks_who_is_quicker(on_stand_in: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made(Block, 4, 8, 2), torch.randn(2, 4, 10, 10)
    with torch.no_grad():
        expected, before = model(x), len(on_stand_in.launches)
        compiled = torch.compile(model, backend=partial(ours.fused, compiler="aot_eager"))
        torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-4)
        assert len(on_stand_in.launches) - before == 3
        monkeypatch.setattr(fused_backend, "_DTYPES", ())
        torch._dynamo.reset()
        torch.testing.assert_close(compiled(x), expected)
        assert len(on_stand_in.launches) - before == 3


class Normalised(nn.Module):
    """Behind a group normalisation images lie channels first on a GPU, wherever they lay before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = (
            nn.Conv2d(4, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.Conv2d(8, 8, 3, padding=1),
        )

    def forward(self, x: Any) -> Any:
        x = self.first(x).contiguous()
        return self.second(F.silu(self.norm(x).contiguous())) + x


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_a_compiled_layer_lies_as_pytorchs_does(form: Any, compiler: str, on_stand_in: HostDevice) -> None:
    """Channels last where its images or its filters do."""
    model, x = made(Normalised).to(memory_format=form), torch.randn(2, 4, 10, 10).contiguous(memory_format=form)
    with torch.no_grad():
        expected, before = model(x), len(on_stand_in.launches)
        torch._dynamo.reset()
        y = torch.compile(model, backend=partial(ours.fused, compiler=compiler))(x)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    assert len(on_stand_in.launches) - before == 2
    layout = "NHWC" if form == torch.channels_last else "NCHW"
    assert [(each.layout, each.add) for each in compiled] == [(layout, True), (layout, False)]
    assert expected.is_contiguous(memory_format=form) and y.stride() == expected.stride()


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_derivatives_in_a_graph_are_those_of_pytorch(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients and tangents that are taken in what is compiled, and tangents that are taken around it."""
    monkeypatch.setattr(fused_backend, "_decide", lambda chain, precision: TAKEN)
    monkeypatch.setattr(fused_backend, "precompile", lambda *given, **options: None)
    model, x, forward = nn.Sequential(nn.Conv2d(4, 8, 3), nn.SiLU()), torch.randn(2, 4, 6, 5), torch.autograd.forward_ad
    ones = torch.ones_like(x)

    def along(model: Any, x: Any) -> Any:
        with forward.dual_level():
            return forward.unpack_dual(model(forward.make_dual(x, ones))).tangent

    functions = (
        lambda x: torch.func.grad(lambda x: model(x).square().sum())(x),
        lambda x: torch.func.jvp(model, (x,), (ones,))[1],
        partial(along, model),
    )
    with torch.no_grad():
        for function in functions:
            torch._dynamo.reset()
            compiled = torch.compile(function, backend=partial(ours.fused, compiler=compiler))
            torch.testing.assert_close(compiled(x), function(x))
        for before in (False, True):
            torch._dynamo.reset()
            compiled = torch.compile(model, backend=partial(ours.fused, compiler=compiler))
            if before:
                compiled(x)
            torch.testing.assert_close(along(compiled, x), along(model, x))


def test_a_layer_remembers_a_bounded_number_of_ways() -> None:
    """With images of ever other sizes it would keep one for each."""
    (layer,) = (each for each in ours.fuse(nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU()).eval()).modules()
                if isinstance(each, fused_layer.FusedConv))  # fmt: skip
    kept = []
    for number in range(600):
        layer._ways.keep(number, TAKEN)
        kept.append(len(layer.ways))
    assert max(kept) == 256 and kept[256] == 1
