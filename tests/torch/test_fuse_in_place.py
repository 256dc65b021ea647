"""What `leanconv.torch.fuse` and the backend of torch.compile make of changes in place, and of names."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import leanconv.torch as ours  # noqa: E402
from leanconv.torch import fused_backend  # noqa: E402
from tests.torch.test_fuse import TAKEN, made  # noqa: E402

nn, F = torch.nn, torch.nn.functional


class Changing(nn.Module):
    """Two convolutions, and some code."""

    def __init__(self, code: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.code = code
        self.short, self.full, self.bn = nn.Conv2d(2, 2, 1), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.same = nn.Identity()

    def forward(self, x: Any) -> Any:
        return self.code(self, torch.relu(x))


def chunked(self: Any, y: Any) -> Any:
    a, b = y.chunk(2, 1)
    a += self.short(b)
    return y


def by_function(self: Any, y: Any) -> Any:
    a, b = torch.chunk(y, 2, 1)
    a.add_(self.short(b))
    return y


def sliced(self: Any, y: Any) -> Any:
    y[:, :2].add_(self.short(y[:, 2:]))
    return y


def reshaped(self: Any, y: Any) -> Any:
    torch.reshape(y, y.shape).add_(self.full(y))
    return y


def dropped(self: Any, y: Any) -> Any:
    return F.dropout(y, 0.5, self.training).add_(self.full(y)) * y


def identical(self: Any, y: Any) -> Any:
    a = self.same(y)
    a += self.full(y)
    return a * y


def detached(self: Any, y: Any) -> Any:
    a = y.detach()
    a += self.full(y)
    return a * y


def viewed_before(self: Any, y: Any) -> Any:
    view = y[:, :1]
    y += self.full(y)
    return y * view


def named_twice(self: Any, y: Any) -> Any:
    skip = y
    y += self.full(y)
    return y * skip


def read_later(self: Any, y: Any) -> Any:
    z = self.full(y)
    also = z
    z += y
    return F.relu(z) + also


def of_numbers(self: Any, y: Any) -> Any:
    """Numbers and tuples do not change in place."""
    count = y.shape[1]
    before = count
    count += 1
    shape = y.shape
    shape += (1,)
    return self.full(y) * (count - before) * count + before + y.reshape(shape)[..., 0]


VIEWS = (
    chunked, by_function, sliced, reshaped, dropped, identical, detached, viewed_before, named_twice, read_later,
    of_numbers,
)  # fmt: skip


@pytest.mark.parametrize("code", VIEWS)
def test_a_change_in_place_is_seen_by_all_names(code: Any) -> None:
    model, x = made(lambda: Changing(code)), torch.randn(2, 4, 6, 5)
    fused = ours.fuse(model)
    with torch.no_grad():
        for each in (fused, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
            torch.testing.assert_close(each(x), model(x))
    assert fused.report.counts == {"conv": 1}


# F.dropout is a copy for torch.compile itself
@pytest.mark.parametrize("code", [code for code in VIEWS if code not in (dropped, of_numbers)])
def test_a_change_in_place_in_a_compiled_graph(code: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_backend, "_decide", lambda chain, precision: TAKEN)
    monkeypatch.setattr(fused_backend, "precompile", lambda *given, **options: None)
    model, x = made(lambda: Changing(code)), torch.randn(2, 4, 6, 5)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend=partial(ours.fused, compiler="eager"))
        torch.testing.assert_close(compiled(x), model(x))


def into_result(self: Any, y: Any) -> Any:
    z = self.bn(self.full(y))
    z += y
    return F.relu(z, inplace=True)


def into_residual(self: Any, y: Any) -> Any:
    y += self.bn(self.full(y))
    return y.relu_()


def into_activated(self: Any, y: Any) -> Any:
    z = F.silu(F.batch_norm(y, self.bn.running_mean, self.bn.running_var), inplace=True)
    return z.add_(self.bn(self.full(y))).relu()


@pytest.mark.parametrize("code", [into_result, into_residual, into_activated])
def test_what_nobody_else_reads_is_added_in_the_kernel(code: Any) -> None:
    model, x = made(lambda: Changing(code)), torch.randn(2, 4, 6, 5)
    fused = ours.fuse(model)
    torch.testing.assert_close(fused(x), model(x))
    assert fused.report.counts == {"conv+bn+add+relu": 1}


@pytest.mark.parametrize("code", [into_result, into_residual])
def test_an_addition_in_place_keeps_the_type_of_what_it_changes(code: Any) -> None:
    model, x = made(lambda: Changing(code)), torch.randn(2, 4, 6, 5)
    fused = ours.fuse(model)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected, y = model(x), fused(x)
        torch.testing.assert_close(y, expected, rtol=3e-2, atol=3e-2)
        fused = torch.compile(fused, backend="eager")
        assert expected.dtype is y.dtype is fused(x).dtype


class Gated(nn.Module):
    """Squeeze-and-excite by a product in place."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.conv, self.one, self.two, self.view = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1), view

    def forward(self, x: Any) -> Any:
        y = self.conv(x)
        view = y[:, :1] if self.view else 1
        y *= torch.sigmoid(self.two(torch.relu(self.one(F.adaptive_avg_pool2d(y, 1)))))
        return y * view


@pytest.mark.parametrize("view", [False, True])
def test_a_product_in_place(view: bool) -> None:
    model, x = made(lambda: Gated(view)), torch.randn(2, 4, 6, 5)
    fused = ours.fuse(model)
    torch.testing.assert_close(fused(x), model(x))
    assert ("mean+conv+relu+conv+sigmoid+mul" in fused.report.counts) is not view


# Names


class CalledInTwoWays(nn.Module):
    """Beside something that has the name of a second layer."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.conv, self.bns = nn.Conv2d(4, 4, 1), nn.ModuleList([nn.BatchNorm2d(4) for _ in range(3)])
        self.conv_2 = other

    def forward(self, x: Any) -> Any:
        for bn in self.bns:
            x = bn(self.conv(x))
        return self.conv_2(x) if "conv_2" in self._modules else x * self.conv_2


@pytest.mark.parametrize("other", ["linear", "pool", "parameter", "convolution"])
def test_names_of_the_model_stay(other: str) -> None:
    kinds = {
        "linear": lambda: nn.Linear(6, 6),
        "pool": lambda: nn.MaxPool2d(2),
        "parameter": lambda: nn.Parameter(torch.rand(4, 1, 1)),
        "convolution": lambda: nn.Conv2d(4, 3, 1),
    }
    model, x = made(lambda: CalledInTwoWays(kinds[other]())), torch.randn(2, 4, 6, 6)
    fused = ours.fuse(model)
    torch.testing.assert_close(fused(x), model(x))
    assert fused.report.counts["conv+bn"] == 3


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Any) -> Any:
        return self.bn(self.conv(x)) * self.conv(input=x) + self.conv(x)


def test_a_call_that_is_left_finds_its_convolution() -> None:
    model, x = made(ByName), torch.randn(2, 4, 6, 5)
    fused = ours.fuse(model)
    torch.testing.assert_close(fused(x), model(x))
    assert fused.report.counts == {"conv+bn": 1, "conv+add": 1}
    torch.testing.assert_close(copy.deepcopy(fused)(x), model(x))
