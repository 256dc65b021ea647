"""Options of a call: one form for equal ones, the key and the argument in one; the public names, old and new."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import leanconv
from leanconv import conv1d, conv1d_input, conv2d
from leanconv.call import lookup
from leanconv.options import FUNCTIONS, filter_options, layer_options
from leanconv.runtime.bounded_cache import BoundedCache
from tests.messages import says
from tests.oracles import relative_error

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    "one, other",
    [
        ({"stride": 2}, {"stride": [np.int64(2), 2]}),
        ({"padding": 1}, {"padding": (1, 1, 1, 1)}),
        ({"padding": (1, 2)}, {"padding": [1, 1, 2, 2]}),
        ({"dilation": (3,)}, {"dilation": (3, 3)}),
        ({"groups": np.uint8(4)}, {"groups": 4}),
        ({"shape": torch.Size((1, 2, 3, 4))}, {"shape": [1, 2, 3, np.int32(4)]}),
        ({"workspace_limit": np.int64(7)}, {"workspace_limit": 7}),
        ({"batch_invariant": np.bool_(True)}, {"batch_invariant": True}),
    ],
)
def test_equal_calls_have_equal_options(one: Any, other: Any) -> None:
    first, second = (layer_options("conv2d_input", **given) for given in (one, other))
    assert first == second and hash(first) == hash(second) and first != layer_options("conv2d_input")


def test_signals_are_images_of_one_row() -> None:
    asked = layer_options("conv1d", stride=2, padding=(3, 1), dilation=[2])
    assert (asked.stride, asked.padding, asked.dilation) == ((1, 2), (0, 0, 3, 1), (1, 2))


def test_one_is_not_true() -> None:
    """What was checked is known by identity, since 1, True and 1.0 are equal."""
    for _ in range(2):
        layer_options("conv2d", stride=1, padding=(1, 1))
        for name, wrong in (("stride", True), ("stride", (1, 1.0)), ("padding", True), ("padding", (True, 1))):
            with says(TypeError, f"{name}=", "is not an integer"):
                layer_options("conv2d", **{name: wrong})
    with says(ValueError, "stride=0 is below 1"):
        layer_options("conv2d", stride=(1, 0))


def test_a_list_that_changes_is_looked_at_again() -> None:
    stride = [1, 1]
    assert layer_options("conv2d", stride=stride).stride == (1, 1)
    stride[0] = 2
    assert layer_options("conv2d", stride=stride).stride == (2, 1)


def test_what_is_kept_is_bounded() -> None:
    for i in range(5000):
        layer_options("conv2d", stride=(1, 1 + i), padding=(i, i))
    from leanconv import options

    assert all(len(store) <= options._MOST_CHECKED for stores in options._STORES.values() for store in stores)


def test_a_gradient_of_a_layer_has_its_options() -> None:
    asked = layer_options("conv2d", 2, 1, precision="tf32", batch_invariant=True)
    assert asked.of("dgrad", (1, 2, 3, 4)) == asked._replace(function="conv2d_input", shape=(1, 2, 3, 4))
    assert not asked.of("wgrad", (1, 2, 3, 4)).batch_invariant, "a sum over the images"


def test_one_ready_call_for_equal_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_calls", BoundedCache(8))
    x, w = np.ones((2, 4, 6, 6), np.float32), np.ones((8, 4, 3, 3), np.float32)
    for padding in (1, (1, 1), [1, 1], (1, 1, 1, 1), np.int8(1)):
        conv2d(x, w, padding=padding, stride=(1, 1))
    assert len(lookup._calls) == 1


def test_borders_have_one_name() -> None:
    assert (
        filter_options("mirror", [1, 0]) == filter_options(4, (1, 0)) == filter_options("reflect101", (1, np.int8(0)))
    )


@pytest.mark.parametrize("layout, order", [("NCW", (0, 1, 2)), ("NWC", (0, 2, 1)), ("CWN", (1, 2, 0))])
def test_the_gradient_of_signals(layout: Any, order: tuple[int, ...], rng: np.random.Generator) -> None:
    x, w = rng.standard_normal((3, 4, 11), np.float32), rng.standard_normal((6, 2, 3), np.float32)
    y = torch.nn.functional.conv1d(torch.from_numpy(x), torch.from_numpy(w), stride=2, padding=1, groups=2)
    grad = rng.standard_normal(y.shape, np.float32)
    expected = torch.nn.grad.conv1d_input(
        x.shape, torch.from_numpy(w).double(), torch.from_numpy(grad).double(), 2, 1, groups=2
    ).numpy()
    shape = tuple(x.shape[axis] for axis in order)
    got = conv1d_input(
        grad.transpose(order), w.transpose(order), shape, stride=2, padding=1, groups=2, layout=layout
    )  # fmt: skip
    assert got.shape == shape and relative_error(got, expected.transpose(order)) < 1e-6
    with says(
        ValueError, "grad has shape (3, 6, 5), but the output has (3, 6, 6) for input_shape=(3, 4, 11)", "stride=2"
    ):
        conv1d_input(grad[..., 1:], w, x.shape, stride=2, padding=1, groups=2)
    assert conv1d_input(grad[0], w, x.shape[1:], 2, 1, groups=2).shape == (4, 11)
    assert leanconv.explain(conv1d_input, grad, w, x.shape, 2, 1, groups=2).problem.op == "dgrad"


def test_explain_takes_a_function() -> None:
    x, w = np.ones((2, 4, 6, 6), np.float32), np.ones((8, 4, 3, 3), np.float32)
    assert leanconv.explain(conv2d, x, w, padding=1).chosen and leanconv.explain(conv1d, x[:, :, 0], w[:, :, 0]).chosen
    with says(TypeError, "explain takes a problem, or a function and its arguments; a ndarray is none of conv2d, "):
        leanconv.explain(x, w)
    with says(TypeError, "tune is none of conv2d"):
        leanconv.explain(leanconv.tune, x)
    assert {each.__name__ for each in leanconv.api._EXPLAINED} == {*FUNCTIONS, "filter2d", "filter3d"}


@pytest.mark.parametrize(
    "old, new",
    [
        ("compile", "precompile"), ("tuning", "record_tuning"), ("Tuning", "TuningResult"),
        ("Compilation", "PrecompileResult"), ("algorithms", "list_algorithms"),
    ],
)  # fmt: skip
def test_old_names_tell_the_new_ones(old: str, new: str) -> None:
    with says(AttributeError, f"leanconv.{old} is now leanconv.{new}"):
        getattr(leanconv, old)
    assert hasattr(leanconv, new) and new in dir(leanconv) and old not in dir(leanconv)


def test_public_names() -> None:
    assert [*dir(leanconv)] == sorted([*leanconv.__all__, "__version__"])
    with says(AttributeError, "module 'leanconv' has no attribute 'conv4d'"):
        leanconv.conv4d  # noqa: B018
    errors = [each for each in vars(leanconv).values() if isinstance(each, type) and issubclass(each, Exception)]
    assert len(errors) > 6 and all(issubclass(each, leanconv.LeanconvError) for each in errors)
