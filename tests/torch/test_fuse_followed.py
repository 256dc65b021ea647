"""What of a model's code a graph of torch.fx would not do, and `leanconv.torch.fuse` does not let it."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
from collections import OrderedDict, defaultdict
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import leanconv.torch as ours  # noqa: E402
from tests.messages import says  # noqa: E402
from tests.torch.test_fuse import made  # noqa: E402

nn, F = torch.nn, torch.nn.functional


class Layers(nn.Module):
    """What all have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.part = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
        self.register_buffer("n", torch.zeros(()))
        self.k, self.kept, self.feature = 0, [], None
        self.grid: dict[int, Any] = {}


# Arguments


class Mask(Layers):
    def forward(self, x: Any, mask: Any = None, times: Any = 2.0) -> Any:
        if mask is not None:
            x = x * mask
        return self.conv(x) * times


class Flag(Layers):
    def forward(self, x: Any, /, aux: Any = False, *, kind: Any = "one") -> Any:
        return self.conv(x) if aux is True or kind == "two" else self.part(x)


class OfImages(Layers):
    def forward(self, x: Any) -> Any:
        return self.conv(x * 2 if isinstance(x, torch.Tensor) else x["image"])


class Asking(Layers):
    def forward(self, x: Any) -> Any:
        return self.conv(x * 2 if torch.is_tensor(x) else x[0])


class AnyOthers(Layers):
    def forward(self, x: Any, *more: Any, **named: Any) -> Any:
        return self.conv(x) if more or named else self.part(x)


X = torch.randn(2, 4, 6, 5)


@pytest.mark.parametrize(
    "kind, calls",
    [
        (Mask, [((X,), {}), ((X, None), {}), ((X,), {"times": 3.0}), ((X, None, X), {})]),
        (Flag, [((X,), {}), ((X, False), {"kind": "one"})]),
        (OfImages, [((X,), {}), (({"image": X},), {})]),
        (Asking, [((X,), {}), (((X,),), {})]),
        (AnyOthers, [((X,), {}), ((X, 1), {}), ((X,), {"a": 2})]),
    ],
)
def test_arguments(kind: Any, calls: Any) -> None:
    model = made(kind)
    fused = ours.fuse(model)
    for each in (fused, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        for given, named in calls:
            torch.testing.assert_close(each(*given, **named), model(*given, **named))


def test_arguments_that_a_graph_does_not_follow_are_refused() -> None:
    mask = torch.rand(6, 5)
    for each in (fused := ours.fuse(made(Mask)), pickle.loads(pickle.dumps(fused)), torch.fx.symbolic_trace(fused)):
        with says(TypeError, "followed with mask=None, and is called with a Tensor", "fuse(model, example)"):
            each(X, mask)
        with says(TypeError, "followed with x a tensor or a number, and is called with x=None"):
            each(None)
    with says(TypeError, "followed with aux=False, and is called with True"):
        ours.fuse(made(Flag))(X, True)
    with says(TypeError, "followed with kind='one', and is called with 'two'"):
        ours.fuse(made(Flag))(X, kind="two")


def test_an_example_says_what_arguments_are() -> None:
    mask, model = torch.rand(6, 5), made(Mask)
    torch.testing.assert_close(ours.fuse(model, (X, mask))(X, mask + 1), model(X, mask + 1))
    flagged = ours.fuse(made(Flag), (X, True))
    torch.testing.assert_close(flagged(X, True), made(Flag)(X, True))
    with says(TypeError, "followed with aux=True, and is called with False"):
        flagged(X)


class Wrapped(nn.Module):
    """Whose parts are called with words."""

    def __init__(self) -> None:
        super().__init__()
        self.flag, self.images = Flag(), OfImages()

    def forward(self, x: Any) -> Any:
        if x.sum() > 1e9:
            return x
        return self.flag(x, kind="two") + self.flag(x, True) + self.images(x) + self.images({"image": x})


def test_arguments_of_parts() -> None:
    model = made(Wrapped)
    torch.testing.assert_close(ours.fuse(model)(X), model(X))


# What PyTorch is set to


class Autocast(Layers):
    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.bn(self.conv(x))


class Decorated(Layers):
    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, x: Any) -> Any:
        return self.conv(x)


class Off(Layers):
    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return self.bn(self.conv(x.float()))


class NoGrad(Layers):
    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            y = self.conv(x)
        return y + x


class Grad(Layers):
    def forward(self, x: Any) -> Any:
        with torch.enable_grad():
            return self.conv(x)


class Inference(Layers):
    @torch.inference_mode()
    def forward(self, x: Any) -> Any:
        return self.conv(x)


class Inside(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.inner, self.last = kind(), nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())

    def forward(self, x: Any) -> Any:
        return self.last(self.inner(x).float())


CONTEXTS = Autocast, Decorated, Off, NoGrad, Grad, Inference


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("kind", CONTEXTS)
def test_contexts(kind: Any, within: bool) -> None:
    """Wherever fuse is called."""
    model = made(lambda: Inside(kind) if within else kind())
    for context in (contextlib.nullcontext, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)):
        with context():
            fused = ours.fuse(model)
        for around in (contextlib.nullcontext, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)):
            with around():
                x = X.clone().requires_grad_(kind is not Inference)
                if kind is Inference and within and torch.is_grad_enabled():  # which PyTorch refuses
                    continue
                y, expected = fused(x), model(x)
            assert y.dtype is expected.dtype and y.requires_grad is expected.requires_grad
            torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
            if y.requires_grad:
                torch.testing.assert_close(*(torch.autograd.grad(each.sum(), x)[0] for each in (y, expected)),
                                           rtol=2e-2, atol=2e-2)  # fmt: skip
        left = dict(fused.report.left)
        assert "what PyTorch is set to" in left["inner" if within else kind.__name__]
        assert fused.report.counts == ({"conv+relu": 2} if within else {"conv+relu": 1})


# What a call changes, and what it makes


class Counter(Layers):
    def forward(self, x: Any) -> Any:
        self.n += 1
        return self.part(self.conv(x) * self.n)


class CounterInPlace(Layers):
    def forward(self, x: Any) -> Any:
        self.n.add_(1)
        return self.part(self.conv(x) * self.n)


class Behind(Layers):
    """A buffer that is changed without the name of it."""

    def forward(self, x: Any) -> Any:
        self._buffers["n"].add_(1)
        return self.part(self.conv(x) * self.n)


class Average(Layers):
    def forward(self, x: Any) -> Any:
        y = self.conv(x)
        self.n = 0.5 * self.n + y.mean()
        return self.part(y - self.n)


class Number(Layers):
    def forward(self, x: Any) -> Any:
        self.k += 1
        return self.part(self.conv(x) * self.k)


class Appending(Layers):
    def forward(self, x: Any) -> Any:
        self.kept.append(1)
        return self.part(self.conv(x) * len(self.kept))


class Feature(Layers):
    def forward(self, x: Any) -> Any:
        self.feature = self.conv(x)
        return self.part(self.feature)


class OfParent(nn.Module):
    """Which changes another module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.k = Mask(), 0
        self.n, self.kept, self.feature = 0, [], None

    def forward(self, x: Any) -> Any:
        self.inner.k += 1
        return self.inner(x) * self.inner.k


STATES = Counter, CounterInPlace, Behind, Average, Number, Appending, Feature, OfParent


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("kind", STATES)
def test_state_changes_with_each_call(kind: Any, within: bool) -> None:
    model = made(lambda: nn.Sequential(kind(), nn.Conv2d(4, 4, 1)) if within else kind())
    fused, again = ours.fuse(model), copy.deepcopy(model)
    for _ in range(3):
        torch.testing.assert_close(fused(X), again(X))
    inner = model[0] if within else model
    assert [*map(float, (inner.n, inner.k, len(inner.kept)))] == [0, 0, 0] and inner.feature is None
    if kind is not CounterInPlace:
        assert any("a call changes its attributes" in why or "cannot assign" in why for _, why in fused.report.left)


class Noise(Layers):
    def forward(self, x: Any) -> Any:
        return self.conv(x) + torch.randn(1) + torch.rand((x.size(0), 1, 1, 1), device=x.device)


class PythonsNoise(Layers):
    def forward(self, x: Any) -> Any:
        return self.conv(x) * random.random()


class Literals(Layers):
    def forward(self, x: Any) -> Any:
        return self.conv(x - torch.tensor([0.5, 0.4, 0.3, 0.2]).view(4, 1, 1)) + torch.arange(x.shape[-1])


class Old(Layers):
    """Tensors that no trace can know."""

    def forward(self, x: Any) -> Any:
        return self.conv(x) + torch.Tensor([self.k + 1.0])


class Listed(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [torch.rand(4, 1, 1)]

    def forward(self, x: Any) -> Any:
        return self.conv(x) * self.scales[0]


@pytest.mark.parametrize("kind", [Noise, PythonsNoise, Literals, Old, Listed])
def test_tensors_that_a_call_makes(kind: Any) -> None:
    model = made(kind)
    fused = ours.fuse(model)
    for each in (fused, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        for seed in (1, 2):
            results = []
            for net in (each, model):
                torch.manual_seed(seed)
                random.seed(seed)
                results.append(net(X))
            torch.testing.assert_close(*results)
    assert bool(fused.report.left) is (kind in (PythonsNoise, Old))


class Lazily(Layers):
    def forward(self, x: Any) -> Any:
        size = int(x.shape[-1])
        if size not in self.grid:
            self.grid[size] = torch.linspace(0, 1, size, device=x.device)
        self.n = self.n + 1
        return self.part(self.conv(x)) + self.grid[size]


def test_an_example_leaves_no_tensors_without_values() -> None:
    model = made(Lazily)
    fused = ours.fuse(model, X)
    assert type(fused(X)) is torch.Tensor and float(fused.model.n) == 2
    torch.testing.assert_close(fused(X), model(X))
    assert not model.feature and list(model.grid) == [5]


def test_buffers_are_followed_where_they_are_read() -> None:
    class Reads(Layers):
        def forward(self, x: Any) -> Any:
            return self.conv(x) * (self.n + 1)

    fused = ours.fuse(made(Reads))
    before = fused(X)
    fused.n.fill_(1)
    torch.testing.assert_close(fused(X), 2 * before)


# What a model has and returns


@pytest.mark.parametrize("what", ["child", "buffer"])
@pytest.mark.parametrize("name", ["report", "_left", "graph", "code", "meta", "recompile", "_graph"])
def test_names_that_a_fused_model_has_itself(name: str, what: str) -> None:
    class Named(Layers):
        def __init__(self) -> None:
            super().__init__()
            if what == "child":
                self.add_module(name, nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()))
            else:
                self.register_buffer(name, torch.rand(1))

        def forward(self, x: Any) -> Any:
            y, each = self.part(x), getattr(self, name)
            return each(y) if what == "child" else y * each

    for model in (made(Named), made(lambda: Inside(Named))):
        fused = ours.fuse(model)
        for each in (fused, copy.deepcopy(fused)):
            torch.testing.assert_close(each(X), model(X))
    assert dict(ours.fuse(made(Named)).report.left)["Named"] == f"a fused model has an attribute {name} of its own"


@pytest.mark.parametrize("kind", [dict, OrderedDict, defaultdict])
def test_dictionaries_keep_their_type(kind: Any) -> None:
    class Returning(Layers):
        def forward(self, x: Any) -> Any:
            y = kind()
            y["out"], y["more"] = self.part(x), {"x": x}
            return y

    model = made(Returning)
    fused = ours.fuse(model)
    y, expected = fused(X), model(X)
    assert type(y) is kind and list(y) == ["out", "more"]
    torch.testing.assert_close(y["out"], expected["out"])
    assert fused.report.counts == {"conv+relu": 1}


def test_a_symbolic_trace_of_a_fused_model() -> None:
    for model in (made(Mask), nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.ReLU()).eval()):
        fused, x = ours.fuse(model), X if isinstance(model, Mask) else X[..., 0]
        torch.testing.assert_close(torch.fx.symbolic_trace(fused)(x), fused(x))


def test_signals_without_a_batch() -> None:
    """A normalisation takes their channels for samples."""
    plain, folded = nn.Conv1d(4, 6, 1), nn.Sequential(nn.Conv1d(4, 6, 1), nn.BatchNorm1d(6)).eval()
    x = torch.randn(4, 6)
    torch.testing.assert_close(ours.fuse(nn.Sequential(plain, nn.ReLU()).eval())(x), F.relu(plain(x)))
    with says(ValueError, "0 has a batch normalisation folded into it: its signals need an axis of samples"):
        ours.fuse(folded)(x)
    torch.testing.assert_close(ours.fuse(folded)(x[None]), folded(x[None]))


class Dense(nn.Module):
    """Which asks for the type of a list, as the layers of DenseNet do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Conv2d(c, 4, 1), nn.ReLU()) for c in (4, 8))
        self.last = Joined(self.second)

    def forward(self, x: Any) -> Any:
        return self.last([x, self.first(x)])


class Joined(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, given: Any) -> Any:
        given = [given] if isinstance(given, torch.Tensor) else given
        return self.layer(torch.cat(given, 1))


def test_the_type_of_a_list_is_known() -> None:
    model = made(Dense)
    fused = ours.fuse(model)
    torch.testing.assert_close(fused(X), model(X))
    assert fused.report.counts == {"conv+relu": 2} and not fused.report.left


def test_what_a_graph_asks_of_its_arguments_compiles() -> None:
    fused = ours.fuse(made(Mask))
    expected = fused(X)
    torch._dynamo.reset()
    compiled = torch.compile(fused, backend="eager", fullgraph=True)
    for each in (compiled, torch.export.export(fused, (X,)).module(), torch.jit.trace(fused, (X,))):
        torch.testing.assert_close(each(X), expected)


# Hooks of the backward pass


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("at", ["", "0", "1", "2"])
def test_backward_hooks(at: str, kind: str) -> None:
    model, seen = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()).eval(), []
    getattr(model.get_submodule(at), kind)(lambda *given: seen.append(1))
    fused = ours.fuse(model)
    fused(X.clone().requires_grad_()).sum().backward()
    assert seen == [1] and dict(fused.report.left)[at or "Sequential"] == "it has hooks"


def test_backward_hooks_of_parts() -> None:
    fused, seen = ours.fuse(made(Wrapped)), []
    fused.model.flag.part[0].register_full_backward_hook(lambda *given: seen.append(1))
    assert fused.model.flag(X.clone().requires_grad_()).sum().backward() is None and seen == [1]
