"""What a model is once it has run on tensors without values: what it was before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.stand_ins import HostDevice

torch = pytest.importorskip("torch")

import leanconv.torch  # noqa: E402
from leanconv.torch import recording, switch  # noqa: E402

nn = torch.nn


class Changes(nn.Module):
    """A convolution, before whose result is returned something changes."""

    def __init__(self, change: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.conv, self.change = nn.Conv2d(3, 4, 3), change
        self.register_buffer("mean", torch.full((4,), 10.0))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.grid: Any = None
        self.plain, self.beside = torch.full((2,), 5.0), torch.full((2,), 7.0)
        self.seen: list[Any] = []
        self.cache: dict[str, list[Any]] = {"seen": []}
        self.count = 0

    def forward(self, x: Any) -> Any:
        y = self.conv(x)
        self.change(self, y)
        return y


def assign_mean(model: Any, y: Any) -> None:
    model.mean = 0.9 * model.mean + 0.1 * y.detach().mean((0, 2, 3))


def assign_grid(model: Any, y: Any) -> None:
    model.grid = torch.linspace(0, 1, y.shape[-1], device=y.device)


def replace(model: Any, y: Any) -> None:
    model.conv.bias = nn.Parameter(model.conv.bias * 2)
    model.another = nn.Linear(2, 2)


def count(model: Any, y: Any) -> None:
    model.steps += 1
    model.count += int(model.steps)
    if model.steps.item() != 1:
        raise RuntimeError("it has another value")


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "a buffer by a number": lambda model, y: model.mean.mul_(0.9),
    "a buffer by a result": lambda model, y: model.mean.mul_(0.9).add_(y.detach().mean((0, 2, 3)), alpha=0.1),
    "another buffer": assign_mean,
    "a filter": lambda model, y: model.conv.weight.data.mul_(0.5),
    "other parameters": replace,
    "a tensor that is no buffer": lambda model, y: model.plain.add_(1),
    "a part of a tensor": lambda model, y: model.beside[:1].fill_(0),
    "a tensor that is kept": assign_grid,
    "a list": lambda model, y: model.seen.append(y),
    "a list in a dictionary": lambda model, y: model.cache["seen"].append(y),
    "a counter that is read": count,
    "a counter by a result": lambda model, y: model.steps.add_(y.sum().long()),
}


def state(model: Any) -> dict[str, Any]:
    """Everything that it has, by names; copies of the values of tensors."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        parts = {**vars(module), **module._parameters, **module._buffers}
        parts |= {f"seen of {key}": list(parts[key]) for key in ("seen",) if key in parts}
        if "cache" in parts:
            parts["in cache"] = {key: list(value) for key, value in parts["cache"].items()}
        for key, value in parts.items():
            found[f"{name}.{key}"] = value if not isinstance(value, torch.Tensor) else (value, value.detach().clone())
    return found


def check(model: Any, before: dict[str, Any]) -> None:
    after = state(model)
    assert [*after] == [*before]
    for name, was in before.items():
        if isinstance(was, tuple) and was and isinstance(was[0], torch.Tensor):
            assert after[name][0] is was[0], name
            torch.testing.assert_close(after[name][0].detach(), was[1], rtol=0, atol=0)
        else:
            assert after[name] == was, name


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("backward", [True, False])
def test_a_model_is_as_before(name: str, backward: bool) -> None:
    model, x = Changes(CHANGES[name]), torch.randn(2, 3, 9, 8)
    before = state(model)
    found = recording.problems_of(model, x, backward=backward)
    assert sum(map(len, found.values())) == 1 + backward  # the images need no gradient
    check(model, before)
    assert type(model(x)) is torch.Tensor


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("way", ["warm_up", "tune", "fails"])
def test_batch_normalisation_counts_no_step(
    momentum: Any, way: str, device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recording.PrecompileResult(1, 0, 0, 0.0)
    monkeypatch.setattr(recording, "precompile", lambda problems, **given: made)
    monkeypatch.setattr(recording.search, "tune", lambda problems, **given: None)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum)), torch.randn(2, 3, 9, 8)
    before = state(model)
    if way == "warm_up":
        leanconv.torch.warm_up(model, x)
    elif way == "tune":
        leanconv.torch.enable(model, tune=x).disable()
    else:
        with pytest.raises(RuntimeError):
            leanconv.torch.warm_up(nn.Sequential(model, nn.Linear(1000, 1)), x)
    check(model, before)


def test_lazy_modules_are_named() -> None:
    model, x = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d()), torch.randn(2, 3, 9, 8)
    with pytest.raises(ValueError, match="0 is a lazy module, .* call the model once"):
        recording.problems_of(model, x)
    with torch.no_grad():
        model(x)
    assert recording.problems_of(model, x)
    with pytest.raises(ValueError, match="LazyConv2d is a lazy module"):
        recording.problems_of(nn.LazyConv2d(4, 3), x)


@pytest.mark.parametrize("asks", [lambda y: y.sum().item() > 0, lambda y: y.nonzero().shape[0] + 1])
def test_a_model_that_asks_for_values_is_told_what_to_do(asks: Any, device: HostDevice) -> None:
    model, x = Changes(lambda model, y: 1 / asks(y)), torch.randn(2, 3, 9, 8)
    before = state(model)
    for run in (recording.problems_of, leanconv.torch.warm_up):
        with pytest.raises(ValueError, match="asks for values of tensors .*the first calls of the model compile"):
            run(model, x)
    with pytest.raises(ValueError, match="asks for values"):
        leanconv.torch.enable(model, tune=x)
    assert not switch.deciding.active
    check(model, before)
