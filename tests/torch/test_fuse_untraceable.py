"""`leanconv.torch.fuse` of models that torch.fx cannot follow, or would not follow as they are called."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import leanconv.torch as ours  # noqa: E402
from leanconv.torch import fused_layer  # noqa: E402
from tests.torch.test_fuse import Block, made  # noqa: E402

nn, F = torch.nn, torch.nn.functional


def layers(c: int = 4) -> Any:
    return nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU())


class Held(nn.Module):
    """A block with more than a call."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.scale = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), 2.0
        self.register_buffer("offset", torch.ones(4, 1, 1))
        self.calls = 0

    def forward(self, x: Any) -> Any:
        return self.norm(self.conv(x)).relu() + self.offset

    def decode(self, x: Any) -> Any:
        return self.conv(x) - self.offset

    def reset(self) -> None:
        self.calls = 0


class Odd(nn.Module):
    """Whose code torch.fx cannot follow, and which uses its parts in one of several ways."""

    def __init__(self, way: str = "called") -> None:
        super().__init__()
        self.seq, self.held, self.conv, self.way = layers(), Held(), nn.Conv2d(4, 4, 3, padding=1), way
        self.several = nn.ModuleList([layers(), Held()])

    def forward(self, x: Any) -> Any:
        if x.sum() > 1e9:
            return x
        return WAYS[self.way](self, x)


def in_turn(parts: Any, x: Any) -> Any:
    read = []
    for each in parts:
        x = each(x)
        read.append(x)
    return sum(read)


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "called": lambda self, x: self.held(self.seq(x)) + in_turn(self.several, x),
    "iterated": lambda self, x: in_turn(self.seq, x),
    "indexed": lambda self, x: self.seq[0](x) + self.seq[:2](x) * len(self.seq),
    "attribute": lambda self, x: self.held(x) * self.held.scale,
    "buffer": lambda self, x: self.held(x) * self.held.offset,
    "method": lambda self, x: self.held.decode(self.held(x)),
    "option": lambda self, x: self.conv(x) * self.conv.stride[0],
    "inner": lambda self, x: (
        self.conv._conv_forward(x, self.conv.weight, None) + F.conv2d(x, self.held.conv.weight)[..., :1]
    ),
    "class": lambda self, x: self.held(x) if isinstance(self.held, Held) and hasattr(self.held, "scale") else x,
    "children": lambda self, x: in_turn([each for each in self.children() if isinstance(each, nn.Sequential)], x),
}


@pytest.mark.parametrize("way", WAYS)
def test_parts_are_what_they_were(way: str) -> None:
    """For a module that indexes them, iterates over them or asks for what they have."""
    model, x = made(Odd, way), torch.randn(2, 4, 6, 5)
    fused = ours.fuse(model, x)
    torch.testing.assert_close(fused(x), model(x))
    assert fused.report.counts == {"conv+bn+relu": 4}
    left = dict(fused.report.left)
    assert left.keys() == {"Odd", "conv"} and "cannot trace" in left["Odd"]
    assert fused.state_dict().keys() == {f"model.{name}" for name in model.state_dict()}
    assert len(list(fused.parameters())) == len(list(model.parameters()))


def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the layers that compute from now on."""
    names, forward = [], fused_layer.FusedConv.forward
    monkeypatch.setattr(
        fused_layer.FusedConv, "forward", lambda self, *given: names.append(self.name) or forward(self, *given)
    )
    return names


ALL = ["seq.0", "held.conv", "several.0.0", "several.1.conv"]


def test_a_call_of_a_part_is_its_fused_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made(Odd), torch.randn(2, 4, 6, 5)
    fused, names = ours.fuse(model), fused_calls(monkeypatch)
    for each in (fused, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        torch.testing.assert_close(each(x), model(x))
        assert each.report == fused.report and names == ALL
        names.clear()
    # what traces a fused model follows the model's own code
    held = torch.fx.symbolic_trace(fused.model.held)
    torch.testing.assert_close(held(x), model.held(x))
    assert not names
    # also below a model that torch.fx follows
    around = ours.fuse(nn.Sequential(layers(), copy.deepcopy(model)).eval())
    around(x)
    assert names == ["0.0", *(f"1.{name}" for name in ALL)]


def test_a_part_follows_what_it_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other, x = made(Odd), made(Odd), torch.randn(2, 4, 6, 5)
    for each in other.parameters():
        nn.init.normal_(each, 0, 0.3)
    other.held.offset.fill_(3)
    fused, names = ours.fuse(model), fused_calls(monkeypatch)
    for copied in (fused, copy.deepcopy(fused)):
        copied.load_state_dict({f"model.{name}": each for name, each in other.state_dict().items()})
        torch.testing.assert_close(copied(x), other(x))
    with torch.no_grad():
        for each in (fused.model, other):
            each.seq[0].weight.mul_(2)
            each.held.norm.running_var.mul_(3)
            each.held.offset = each.held.offset * 2
    torch.testing.assert_close(fused(x), other(x))
    fused.load_state_dict({f"model.{name}": each for name, each in model.state_dict().items()}, assign=True)
    torch.testing.assert_close(fused(x), model(x))
    torch.testing.assert_close(fused.double()(x.double()), copy.deepcopy(model).double()(x.double()))
    assert names == ALL * 5
    names.clear()
    # what has been changed in a part otherwise, it computes itself
    fused.float().model.seq[2] = nn.SiLU()
    fused.model.held.norm.register_forward_hook(lambda module, given, y: 2 * y)
    changed = copy.deepcopy(model)
    changed.seq[2] = nn.SiLU()
    changed.held.norm.register_forward_hook(lambda module, given, y: 2 * y)
    torch.testing.assert_close(fused(x), changed(x))
    fused.model.several[0].train()
    fused(x)
    assert names == ["several.0.0", "several.1.conv", "several.1.conv"]


def test_a_compiled_call_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made(Odd), torch.randn(2, 4, 6, 5)
    fused, names = ours.fuse(model), fused_calls(monkeypatch)
    traced = torch.jit.trace(fused, (x,), check_trace=False)
    compiled = torch.compile(fused, backend="eager")
    for each in (traced, compiled):
        torch.testing.assert_close(each(x), model(x))
    ones = torch.ones_like(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, ones)
        tangent = torch.autograd.forward_ad.unpack_dual(fused(dual)).tangent
        torch.testing.assert_close(tangent, torch.autograd.forward_ad.unpack_dual(model(dual)).tangent)
    assert not names


class Options(nn.Module):
    """With arguments whose absence torch.fx does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Any, add: Any = None, twice: Any = False) -> Any:
        x = self.layers(x)
        if add is not None:
            x = x + add
        return x * 2 if twice is True else x


class Giving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Options()

    def forward(self, x: Any) -> Any:
        if x.sum() > 1e9:
            return x
        return self.part(x) + self.part(x, x, x) + self.part(x, None, twice=True) + self.part(x, add=x, twice=True)


def test_arguments_that_a_trace_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made(Giving), torch.randn(2, 4, 6, 5)
    fused, names = ours.fuse(model), fused_calls(monkeypatch)
    torch.testing.assert_close(fused(x), model(x))
    assert names == ["part.layers.0"]


def tripled(module: Any, given: Any, y: Any) -> Any:
    return 3 * y


def doubled(module: Any, given: Any) -> Any:
    return (given[0] * 2,)


HOOKS = {
    "forward": lambda module: module.register_forward_hook(tripled),
    "pre": lambda module: module.register_forward_pre_hook(doubled),
    "kwargs": lambda module: module.register_forward_hook(lambda m, given, named, y: 3 * y, with_kwargs=True),
    "patched": lambda module: setattr(module, "forward", lambda x, was=module.forward: 3 * was(x)),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("at", ["root", "conv", "part", "inner", "followed", "activation"])
def test_hooks_and_replaced_calls_are_left(at: str, hook: str) -> None:
    """Wherever a trace begins, and the report names them."""
    model, name = {
        "root": lambda: (made(layers), "Sequential"),
        "conv": lambda: (nn.Conv2d(4, 4, 1).eval(), "Conv2d"),
        "part": lambda: (made(Odd), "seq"),
        "inner": lambda: (made(Odd), "held.conv"),
        "followed": lambda: (nn.Sequential(made(Block, 4, 4), made(layers)).eval(), "0"),
        "activation": lambda: (made(layers), "2"),
    }[at]()
    of = model if at in ("root", "conv") else model.get_submodule(name)
    HOOKS[hook](of)
    x = torch.randn(2, 4, 6, 5)
    fused = ours.fuse(model)
    torch.testing.assert_close(fused(x), model(x))
    if hook != "patched" or at in ("root", "conv", "part"):
        assert dict(fused.report.left)[name] == ("it has hooks" if hook != "patched" else "its forward is not that of "
                                                 "its class")  # fmt: skip
    if at == "part":
        assert fused.report.counts == {"conv+bn+relu": 3}


class OwnCall(nn.Sequential):
    def __call__(self, x: Any) -> Any:
        return 2 * super().__call__(x)


class OwnCallConv(nn.Conv2d):
    def __call__(self, x: Any, times: int = 2) -> Any:
        return times * super().__call__(x)


class CallsOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.own = layers(), OwnCallConv(4, 4, 1)

    def forward(self, x: Any) -> Any:
        return self.own(self.first(x), times=3)


def test_a_call_that_a_class_has_replaced() -> None:
    x = torch.randn(2, 4, 6, 5)
    model = made(lambda: OwnCall(*layers(), layers()))
    for each in (model, nn.Sequential(model).eval(), nn.Sequential(OwnCallConv(4, 4, 1), nn.ReLU()).eval()):
        torch.testing.assert_close(ours.fuse(each)(x), each(x))
    assert dict(ours.fuse(model).report.left) == {"OwnCall": "it has a __call__ of its own",
                                                  "0": "what calls it is left"}  # fmt: skip
    conv, calls = OwnCallConv(4, 4, 1).eval(), made(CallsOwn)
    torch.testing.assert_close(ours.fuse(conv)(x, times=5), conv(x, times=5))
    fused = ours.fuse(calls)
    torch.testing.assert_close(fused(x), calls(x))
    assert fused.report.counts == {"conv+bn+relu": 1} and "__call__ of its own" in str(fused.report)


class AnyArguments(nn.Module):
    """Which takes any arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, *given: Any, **named: Any) -> Any:
        x = given[0] if given else named["x"]
        return self.layers(x) * (3 if len(given) > 1 else 1) + sum(named.values())


def test_any_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made(AnyArguments), torch.randn(2, 4, 6, 5)
    fused = ours.fuse(model, (x, x))
    names = fused_calls(monkeypatch)
    for each in (fused, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        for given, named in (((x,), {}), ((x, x), {}), ((), {"x": x}), ((x,), {"more": x, "most": 2})):
            torch.testing.assert_close(each(*given, **named), model(*given, **named))
    assert names == ["layers.0"] * 12 and dict(fused.report.left).keys() == {"AnyArguments"}


@pytest.mark.parametrize("way", ["compiled", "parallel", "scripted", "traced"])
def test_what_calls_a_model_in_another_way_is_left(way: str) -> None:
    net, x = made(layers), torch.randn(2, 4, 6, 5)
    model = {
        "compiled": lambda: torch.compile(net, backend="eager"),
        "parallel": lambda: nn.DataParallel(net),
        "scripted": lambda: torch.jit.script(net),
        "traced": lambda: torch.jit.trace(net, (x,)),
    }[way]().eval()
    name = type(copy.deepcopy(model)).__name__
    for each, at in ((model, name), (nn.Sequential(model, nn.Conv2d(4, 4, 1), nn.ReLU()).eval(), "0")):
        fused = ours.fuse(each, x)
        torch.testing.assert_close(fused(x), each(x))
        assert dict(fused.report.left) == {at: f"it is a {name}; fuse the model that is in it"}


class Tied(nn.Module):
    """Which reads the filters of a layer that it calls, and calls a layer of a block that is left."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.block = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), Block(4, 4)

    def forward(self, x: Any) -> Any:
        y = self.norm(self.conv(x)).relu()
        y = F.conv_transpose2d(y, self.conv.weight, padding=1)
        return self.block(y) + self.block.conv1(x).relu()


def test_layers_that_others_read_are_left() -> None:
    model, x = made(Tied), torch.randn(2, 4, 6, 5)
    model.block.register_forward_hook(tripled)
    fused = ours.fuse(model)
    torch.testing.assert_close(fused(x), model(x))
    left = dict(fused.report.left)
    assert left["conv"] == left["block.conv1"] == "others read its parameters" and left["block"] == "it has hooks"


def test_an_example_compiles_the_layers_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They decide for it as tensors without values, and compute with their own filters after that."""
    decided, decide = [], fused_layer.FusedConv.decide
    monkeypatch.setattr(
        fused_layer.FusedConv, "decide", lambda self, *given: decided.append(type(given[0])) or decide(self, *given)
    )
    model, x = made(AnyArguments), torch.randn(2, 4, 6, 5)
    fused = ours.fuse(model, x)
    assert decided == [torch._subclasses.FakeTensor]
    torch.testing.assert_close(fused(x), model(x))
    assert all(type(each) is nn.Parameter for part in fused.model.module.layers.forward.made.modules()
               for each in part.parameters(recurse=False))  # fmt: skip


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(layers(), torch.jit.script(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())))

    def forward(self, x: Any) -> Any:
        return x if x.sum() > 1e9 else self.part(x)


def test_a_part_with_a_script_in_it() -> None:
    model, x = made(Scripted), torch.randn(2, 4, 6, 5)
    fused = ours.fuse(model)
    torch.testing.assert_close(fused(x), model(x))
    assert fused.report.counts == {"conv+bn+relu": 1} and "RecursiveScriptModule; fuse" in str(fused.report)


class Shared(nn.Module):
    """One part under two names, alone and within another."""

    def __init__(self) -> None:
        super().__init__()
        part = layers()
        self.both, self.one = nn.Sequential(part, nn.Conv2d(4, 4, 1), nn.ReLU()), part

    def forward(self, x: Any) -> Any:
        return x if x.sum() > 1e9 else self.both(x) + self.one(x)


def test_a_part_of_two_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made(Shared), torch.randn(2, 4, 6, 5)
    fused, names = ours.fuse(model), fused_calls(monkeypatch)
    torch.testing.assert_close(fused(x), model(x))
    assert names == ["both.0.0", "both.1", "one.0"]
