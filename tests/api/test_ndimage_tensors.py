"""leanconv.ndimage of other libraries' arrays on the CPU: gradients, lazy values, dtypes and outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from leanconv import ndimage
from tests.api.test_api import OtherLibrary

WEIGHTED = ("correlate", "convolve", "correlate1d", "convolve1d")


@pytest.mark.parametrize("input_is", ["array", "tensor"])
@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_that_require_a_gradient_are_refused(name: str, input_is: str) -> None:
    torch = pytest.importorskip("torch")
    x = np.ones(9) if input_is == "array" else torch.ones(9)
    weights = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="requires a gradient"):
        getattr(ndimage, name)(x, weights)
    with torch.no_grad():
        assert np.asarray(getattr(ndimage, name)(x, weights)).tolist() == [3.0] * 9


@pytest.mark.parametrize("lazy", ["conj", "_neg_view"])
@pytest.mark.parametrize("argument", ["input", "weights", "output"])
@pytest.mark.parametrize("name", WEIGHTED)
def test_lazy_conjugates_and_signs_are_resolved(name: str, argument: str, lazy: str) -> None:
    torch = pytest.importorskip("torch")
    rng, function = np.random.default_rng(1), getattr(ndimage, name)
    x, weights, out = (torch.from_numpy(rng.standard_normal(n) + 1j * rng.standard_normal(n)) for n in (9, 3, 9))
    given = {"input": x, "weights": weights, "output": out}
    given[argument] = getattr(torch, lazy)(given[argument])
    assert given[argument].is_conj() or given[argument].is_neg()
    plain = {each: tensor.resolve_conj().resolve_neg().numpy() for each, tensor in given.items()}
    assert function(**given) is given["output"]
    assert np.array_equal(given["output"].resolve_conj().resolve_neg(), function(plain["input"], plain["weights"]))


@pytest.mark.parametrize("argument", ["input", "weights", "output"])
def test_dtypes_that_numpy_does_not_have_are_named(argument: str) -> None:
    torch = pytest.importorskip("torch")
    given = {name: torch.ones(5) for name in ("input", "weights", "output")}
    given[argument] = given[argument].bfloat16()
    with pytest.raises(ndimage.DtypeError, match=f"{argument} has dtype bfloat16.*convert"):
        ndimage.correlate(**given)
    with pytest.raises(ndimage.DtypeError, match="input has dtype bfloat16"):
        ndimage.sobel(torch.ones(5, 5).bfloat16())


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("correlate", ([[1, 2, 1]],)), ("correlate1d", ([1, 2, 1],)), ("uniform_filter", (3,)), ("sobel", (0,)),
     ("gaussian_filter", (1.0,)), ("laplace", ()), ("gaussian_gradient_magnitude", (1.0,))],
)  # fmt: skip
def test_an_output_of_numpy_is_returned_itself(name: str, arguments: tuple[Any, ...]) -> None:
    torch = pytest.importorskip("torch")
    x, out = np.random.default_rng(2).random((6, 7)), np.zeros((6, 7))
    function = getattr(ndimage, name)
    for given in (torch.from_numpy(x), OtherLibrary(x)):
        out[...] = 0
        assert function(given, *arguments, output=out) is out
        np.testing.assert_array_equal(out, function(x, *arguments))
