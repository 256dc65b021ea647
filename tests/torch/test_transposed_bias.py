"""The bias of transposed layers: part of one call, and of its one rounding."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes  # noqa: F401 - so that NumPy knows bfloat16
import pytest

from tests.stand_ins import HostDevice

torch = pytest.importorskip("torch")

import leanconv.torch as ours  # noqa: E402
from leanconv.kernels import ALGORITHMS  # noqa: E402
from leanconv.perf import tables  # noqa: E402
from leanconv.plan import Target  # noqa: E402
from leanconv.problem import ConvProblem  # noqa: E402
from leanconv.words import format_problem  # noqa: E402

F, func = torch.nn.functional, torch.func
LAYERS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "signals": ("conv_transpose1d", (2, 8, 11), (8, 6, 3), {"stride": 2, "padding": 1}),
    "images": ("conv_transpose2d", (2, 8, 5, 6), (8, 3, 3, 4), {"padding": (1, 2), "groups": 2}),
    "strides": ("conv_transpose2d", (2, 8, 5, 6), (8, 6, 3, 2), {"stride": (2, 3), "output_padding": (1, 0)}),
    "unread rows": ("conv_transpose2d", (1, 8, 5, 4), (8, 6, 2, 1), {"stride": 3, "output_padding": 2}),
    # rows that only the output padding has
    "padding beyond the stride": (
        "conv_transpose2d", (1, 8, 3, 2), (8, 6, 2, 3),
        {"stride": (1, 2), "output_padding": (2, 3), "dilation": (3, 4)},
    ),
}  # fmt: skip


def layer(name: str, dtype: Any) -> tuple[str, Any, tuple[Any, ...], dict[str, Any]]:
    """Whole numbers, whose sums are exact in float32, and a bias that moves them between neighbours of 16 bits."""
    function, shape, window, options = LAYERS[name]
    x, w = torch.randint(-40, 41, shape).float(), torch.randint(-40, 41, window).float()
    bias = torch.randn(window[1] * options.get("groups", 1)).mul(16).to(dtype)
    exact = getattr(F, function)(x.double(), w.double(), bias.double(), **options)
    return function, exact.to(dtype), (x.to(dtype), w.to(dtype), bias), options


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_pytorchs_own_on_the_cpu(name: str, dtype: Any) -> None:
    function, nearest, given, options = layer(name, dtype)
    y = getattr(ours, function)(*given, **options)
    # PyTorch gets another layer where the output is padded beyond the stride; its own is rounded twice on some CPUs
    once = name == "padding beyond the stride" and torch.equal(y, nearest)
    assert once or torch.equal(y, getattr(F, function)(*given, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_one_rounding_on_a_device(device: HostDevice, name: str, dtype: Any) -> None:
    function, nearest, given, options = layer(name, dtype)
    with torch.no_grad():
        assert torch.equal(getattr(ours, function)(*given, **options), nearest)
        if name != "padding beyond the stride":  # which is PyTorch's
            with ours.enable() as taken:
                for _ in range(3):
                    assert torch.equal(getattr(F, function)(*given, **options), nearest)
            assert len(taken.report().taken) == 1
    assert all(values["bias"] for _, values in device.launches if "dx" in values)


@pytest.mark.parametrize("last", [False, True])
def test_memory_order(last: bool) -> None:
    _, shape, window, options = LAYERS["padding beyond the stride"]
    x, w, bias = torch.randn(shape), torch.randn(window), torch.randn(window[1])
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    with_bias, without = (ours.conv_transpose2d(x, w, each, **options) for each in (bias, None))
    assert with_bias.stride() == without.stride()


def tensors() -> tuple[Any, ...]:
    torch.manual_seed(1)
    return tuple(torch.randn(each, dtype=torch.float64) for each in ((2, 4, 3, 4), (4, 3, 2, 3), (3,)))


def same(compute: Any) -> None:
    mine, theirs = (
        compute(lambda *given, f=f: f(*given, stride=2)) for f in (ours.conv_transpose2d, F.conv_transpose2d)
    )
    torch.testing.assert_close(mine, theirs)


def test_transforms() -> None:
    x, w, bias = tensors()
    same(lambda conv: func.jvp(lambda bias: conv(x, w, bias), (bias,), (bias.cos(),)))
    same(lambda conv: func.grad(lambda bias: conv(x, w, bias).pow(3).sum())(bias))
    same(lambda conv: func.hessian(lambda bias: conv(x, w, bias).pow(3).sum())(bias))
    for axes in (0, None, None), (None, None, 0), (0, None, 0), (0, 0, 0), (None, 0, None):
        given = [each if axis is None else torch.stack([each, -each]) for each, axis in zip((x, w, bias), axes)]  # noqa: B905
        same(lambda conv, given=given, axes=axes: torch.vmap(conv, axes)(*given))
    with torch.autocast("cpu", torch.bfloat16):
        y = ours.conv_transpose2d(x.float(), w.float(), bias.float())
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, F.conv_transpose2d(x.float(), w.float(), bias.float()))


def test_a_compiled_graph_has_no_break() -> None:
    x, w, bias = (each.float().requires_grad_() for each in tensors())
    compiled = torch.compile(
        lambda *given: ours.conv_transpose2d(*given, stride=2), backend="aot_eager", fullgraph=True
    )
    mine, theirs = compiled(x, w, bias), F.conv_transpose2d(x, w, bias, stride=2)
    torch.testing.assert_close(mine, theirs)
    for one, other in zip(*(torch.autograd.grad(y.sum(), (x, w, bias)) for y in (mine, theirs)), strict=True):
        torch.testing.assert_close(one, other)


def test_the_times_of_the_gradient_are_those_of_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(tables, "table_of", lambda folder, target: SimpleNamespace(get=asked.append))
    gradient = ConvProblem(2, 8, 9, 9, 16, 3, 3, op="dgrad")
    for problem in gradient, replace(gradient, bias=True):
        assert not list(tables.known(problem, Target("sm_90a", 132, model="NVIDIA H200")))
    assert set(asked) == {format_problem(gradient)}


def test_nothing_is_added_to_a_transposed_layer_with_a_bias() -> None:
    problem = ConvProblem(2, 8, 9, 9, 16, 3, 3, op="dgrad", bias=True, accumulate=True)
    for algorithm in ALGORITHMS:
        assert algorithm.solves != "conv2d" or algorithm.reasons(problem, Target("sm_90a", 132)), algorithm.stem
