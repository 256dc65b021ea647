"""Options of a call: one form for equal ones, the key and the argument in one; the public names, old and new."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

import leanconv
from leanconv import ConvProblem, FilterProblem, conv1d, conv1d_input, conv2d
from leanconv.call import lookup
from leanconv.options import FUNCTIONS, Reduction, filter_options, layer_options
from leanconv.runtime.bounded_cache import BoundedCache
from tests.messages import says
from tests.oracles import relative_error

torch = pytest.importorskip("torch")
ours = pytest.importorskip("leanconv.torch")


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


@pytest.mark.parametrize("function", [leanconv.tune, leanconv.precompile])
def test_what_needs_a_gpu_offers_no_cpu(function: Any) -> None:
    for device in (None, "gpu"):
        with says(ValueError, f"device={device!r} is no GPU; give 'cuda' or 'cuda:N'") as told:
            function([], device=device)
        assert "cpu" not in str(told.value)


LAYER = np.ones((2, 4, 6, 6), np.float32), np.ones((8, 4, 3, 3), np.float32)
TAKES_ACTIVATION = [
    lambda activation: conv2d(*LAYER, activation=activation),
    lambda activation: ours.conv2d(*map(torch.from_numpy, LAYER), activation=activation).numpy(),
    lambda activation: ours.Conv2d(4, 8, 3, activation=activation).activation,
    lambda activation: ConvProblem(1, 4, 6, 6, 8, 3, 3, activation=activation).activation,
]


@pytest.mark.parametrize("function", TAKES_ACTIVATION, ids=["conv2d", "torch.conv2d", "torch.Conv2d", "ConvProblem"])
def test_an_activation_and_its_number_in_a_list(function: Any) -> None:
    np.testing.assert_array_equal(function(["elu", 2]), function(("elu", 2)))
    for wrong in (["relu"], {"elu": 2}, np.ones(2), [["elu"], 2]):
        with says(ValueError, "activation=", " is not known; choose one of None, 'relu'"):
            function(wrong)
    with says(TypeError, "activation=[2] is not a number"):
        function(["elu", [2]])


@pytest.mark.parametrize("name", ["sobel", "scharr", "prewitt", "laplacian"])
def test_a_fraction_added_to_sums_in_int32(name: str) -> None:
    image, slope = np.arange(42, dtype=np.int32).reshape(6, 7), () if name == "laplacian" else (1, 0)
    function = getattr(leanconv, name)
    with says(ValueError, "delta=0.5 is no integer", "dtype='float64' makes them in float64, as does, where a kernel"):
        function(image, *slope, delta=0.5)
    np.testing.assert_array_equal(function(image, *slope, delta=0.5, dtype="float64"), function(image, *slope) + 0.5)


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
    with says(TypeError, "problems in words are for the command line", "make a ConvProblem"):
        leanconv.explain("1x3x8x8")
    assert {each.__name__ for each in leanconv.api._EXPLAINED} == {*FUNCTIONS, "filter2d", "filter3d"}


@pytest.mark.parametrize(
    "function, name, instead",
    [
        (ours.conv2d, "leanconv.torch.conv2d", "take leanconv.conv2d"),
        (torch.nn.functional.conv2d, "torch.conv2d", "take leanconv.conv2d"),
        (ours.filter2d, "leanconv.torch.filter2d", "take leanconv.filter2d"),
        (torch.conv_transpose1d, "torch.conv_transpose1d", "take leanconv.conv1d_input, with the shape of the result"),
        (leanconv.conv_transpose3d, "leanconv.conv_transpose3d", "take leanconv.conv3d_input, with the shape"),
        (leanconv.gaussian_blur, "leanconv.gaussian_blur", "take leanconv.filter2d and the filter's kernel"),
        (leanconv.median_blur, "leanconv.median_blur", "take a leanconv.FilterProblem with reduction='median'"),
        (leanconv.ndimage.sobel, "leanconv.ndimage.sobel", ""),
        (np.convolve, "numpy.convolve", ""),
    ],
)  # fmt: skip
def test_explain_says_what_to_take(function: Any, name: str, instead: str) -> None:
    with says(TypeError, f"arguments; {name} is none of conv2d, ", instead) as told:
        leanconv.explain(function, np.ones((6, 6), np.float32))
    assert ("; take " in str(told.value)) == bool(instead)


def test_explain_takes_every_window_function_as_a_problem() -> None:
    for reduction in get_args(Reduction):
        assert leanconv.explain(FilterProblem(1, 8, 8, 3, 3, (1, 1), reduction=reduction)).chosen


@pytest.mark.parametrize("axes", [1, 2])
def test_a_missing_transposed_layer_says_what_computes_it(axes: int, rng: np.random.Generator) -> None:
    name = f"conv_transpose{axes}d"
    with says(AttributeError, f"has no attribute '{name}': leanconv.conv{axes}d_input(x, w, shape of the result)"):
        getattr(leanconv, name)
    assert not hasattr(leanconv, name) and name not in dir(leanconv)
    x, w = rng.standard_normal((2, 4, *(7,) * axes), np.float32), rng.standard_normal((4, 3, *(3,) * axes), np.float32)
    wanted = getattr(torch.nn.functional, name)(torch.from_numpy(x), torch.from_numpy(w), stride=2, padding=1)
    got = getattr(leanconv, f"conv{axes}d_input")(x, w, tuple(wanted.shape), stride=2, padding=1)
    assert relative_error(got, wanted.numpy()) < 1e-6


@pytest.mark.parametrize(
    "name, ours", [("median_filter", "median_blur"), ("minimum_filter", "erode"), ("maximum_filter", "dilate")]
)
def test_a_missing_filter_of_scipy_says_what_computes_it(name: str, ours: str, rng: np.random.Generator) -> None:
    with says(AttributeError, f"'leanconv.ndimage' has no attribute '{name}'", f"leanconv.{ours}(image, size, border="):
        getattr(leanconv.ndimage, name)
    assert not hasattr(leanconv.ndimage, name)
    with says(AttributeError, "module 'leanconv.ndimage' has no attribute 'rank_filter'"):
        leanconv.ndimage.rank_filter  # noqa: B018
    scipy = pytest.importorskip("scipy.ndimage")
    image = rng.integers(0, 255, (12, 17), np.uint8)
    np.testing.assert_array_equal(getattr(leanconv, ours)(image, 3, border="reflect"), getattr(scipy, name)(image, 3))


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
