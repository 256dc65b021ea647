"""Parameters that a model gets while `enable` lasts are none of those that it had."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stand_ins import HostDevice

torch = pytest.importorskip("torch")

import leanconv.torch  # noqa: E402

nn = torch.nn
ODD = ["1", "3", "5", "7"]


def replaced(model: Any) -> None:
    """As ``load_state_dict(assign=True)`` does: each is freed before the next one is made."""
    for layer in model:
        layer.weight = nn.Parameter(torch.randn(layer.weight.shape))


@pytest.mark.parametrize("given", [{}, {"include": ODD}, {"exclude": ODD}])
def test_they_have_neither_the_names_nor_the_places_of_others(given: Any, device: HostDevice) -> None:
    model = nn.Sequential(*(nn.Conv2d(4, 4, 1 + 2 * (at % 2), padding=at % 2) for at in range(8)))
    x = torch.randn(2, 4, 6, 6)
    with leanconv.torch.enable(model, **given) as taken, torch.no_grad():
        for _ in range(5):
            replaced(model)
            model(x)
    lines = taken.report().lines
    assert {line.layer for line in lines} == {""} and sum(line.calls for line in lines) == 40
    assert {line.runs != "PyTorch" for line in lines} == {not given}


def test_they_are_named_by_another_enable(device: HostDevice) -> None:
    model, x = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3)), torch.randn(2, 4, 6, 6)
    with leanconv.torch.enable(model, exclude="1"):
        replaced(model)
        with leanconv.torch.enable(model, exclude="1") as taken, torch.no_grad():
            model(x)
    assert [(line.layer, line.runs != "PyTorch") for line in taken.report().lines] == [("0", True), ("1", False)]


def test_filters_that_are_computed_in_each_call_are_not_kept(device: HostDevice) -> None:
    model, x = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3))), torch.randn(2, 4, 6, 6)
    with leanconv.torch.enable(model, exclude="0") as taken, torch.no_grad():
        for _ in range(5):
            model(x)
    (line,) = taken.report().lines
    assert (line.layer, line.why) == ("", "it cannot be told whether these filters are excluded")
