"""Kinds of PyTorch's tensors that share shape, strides, type and device, and yet cannot be read alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from leanconv import conv1d, conv2d, conv2d_input, filter2d, prepare_weights
from leanconv.arrays import TorchArrays
from leanconv.plan import ALIGNMENT
from tests.messages import says
from tests.stand_ins import HostDevice

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode  # noqa: E402

X, W, BIAS = torch.arange(2 * 4 * 6 * 6.0).reshape(2, 4, 6, 6), torch.ones(8, 4, 3, 3), torch.ones(8)


class Wrapper(torch.Tensor):
    """As libraries define them: shape and type of the tensor that it holds, but no memory."""

    @staticmethod
    def __new__(cls, held: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


class Named(torch.Tensor):
    """A subclass that adds nothing to how values are stored."""


@contextmanager
def functional(tensor: Any) -> Iterator[Any]:
    with FunctionalTensorMode():
        yield FunctionalTensor.to_functional(tensor)


@contextmanager
def fake(tensor: Any) -> Iterator[Any]:
    yield FakeTensorMode().from_tensor(tensor)


@contextmanager
def just(tensor: Any) -> Iterator[Any]:
    yield tensor


#: a tensor of each kind with the shape, strides and type of a given one, and how messages call it
KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "fake": (fake, "a FakeTensor: torch.compile and torch.export"),
    "functional": (functional, "a FunctionalTensor: torch.compile"),
    "meta": (lambda t: just(t.to("meta")), "a meta tensor"),
    "wrapper": (lambda t: just(Wrapper(t)), "a Wrapper, whose class replaces PyTorch's operations"),
    "functionalized": (lambda t: just(torch._to_functional_tensor(t)), "without memory of its own"),
    "zero": (lambda t: just(torch._efficientzerotensor(t.shape)), "without memory of its own"),
}

#: each public function, by the arguments that are arrays
CALLS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (conv2d, {"x": X, "w": W, "bias": BIAS, "out": torch.empty(2, 8, 4, 4)}),
    (conv1d, {"x": X[0], "w": torch.ones(4, 6, 3), "out": torch.empty(4, 4, 4)}),
    (lambda **given: conv2d_input(input_shape=(2, 4, 8, 8), **given), {"grad": X, "w": torch.ones(4, 4, 3, 3)}),
    (filter2d, {"image": X[0], "kernel": W[0, 0], "out": torch.empty(4, 6, 6)}),
]


@pytest.fixture(params=["on the CPU", "on a GPU"])
def somewhere(request: pytest.FixtureRequest) -> None:
    if request.param == "on a GPU":
        request.getfixturevalue("torch_on_device")


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call, given", CALLS, ids=["conv2d", "conv1d", "conv2d_input", "filter2d"])
def test_tensors_without_values_are_refused_by_name(
    call: Callable[..., Any], given: dict[str, Any], kind: str, somewhere: None
) -> None:
    make, words = KINDS[kind]
    given = {name: array.contiguous() for name, array in given.items()}
    for _ in "cold", "warm":
        for name, array in given.items():
            with make(array) as odd, says(TypeError, f"{name} is ", words, "leanconv reads a tensor's memory"):
                call(**(given | {name: odd}))
        call(**given)


@pytest.mark.filterwarnings("error:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("kind", KINDS)
def test_filters_without_values_are_not_prepared(kind: str) -> None:
    make, words = KINDS[kind]
    with make(W) as odd, says(TypeError, "w is ", words):
        prepare_weights(odd)


def test_an_image_without_values_beside_a_kernel_of_numpy() -> None:
    image, kernel = torch.ones(6, 7), np.full((3, 3), 0.123, np.float32)
    for _ in "cold", "warm":
        with warnings.catch_warnings(), fake(image) as odd, says(TypeError, "image is a FakeTensor"):
            warnings.simplefilter("ignore")
            filter2d(odd, kernel)
        filter2d(image, kernel)


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "functionalize"])
def test_transforms_of_functions_are_refused_by_name(transform: str, somewhere: None) -> None:
    def summed(x: Any) -> Any:
        return conv2d(x, W).sum()

    conv2d(X, W)
    words, run = {
        "vmap": ("inside torch.func.vmap", lambda: torch.func.vmap(summed)(X[None])),
        "grad": ("inside torch.func.grad, vjp or jvp", lambda: torch.func.grad(summed)(X)),
        "jvp": ("inside torch.func.grad, vjp or jvp", lambda: torch.func.jvp(summed, (X,), (X,))),
        "functionalize": ("inside a transform of torch.func", lambda: torch.func.functionalize(summed)(X)),
    }[transform]
    for _ in "cold", "warm":
        with says(TypeError, "x is a tensor", words, "outside the transform"):
            run()
        conv2d(X, W)


def test_under_a_mode_that_only_traces_nothing_is_launched(torch_on_device: HostDevice) -> None:
    weights = prepare_weights(W)
    conv2d(X, W), conv2d(X, weights)
    launched = len(torch_on_device.launches)
    for w in (W, weights, prepare_weights(W)):
        with warnings.catch_warnings(), FakeTensorMode(), says(TypeError, "without memory", "FakeTensorMode"):
            warnings.simplefilter("ignore")
            conv2d(X, w, algorithm="winograd1d")
    assert len(torch_on_device.launches) == launched


def test_parameters_and_plain_subclasses_are_ordinary(somewhere: None) -> None:
    expected = conv2d(X, W)
    with torch.no_grad():
        for make in (torch.nn.Parameter, lambda t: t.as_subclass(Named), torch.nn.Buffer):
            assert torch.equal(conv2d(make(X), make(W)), expected)
    with torch.inference_mode():
        assert torch.equal(conv2d(X.clone(), W.clone()), expected)


def imaginary(tensor: Any) -> Any:
    """As the imaginary part of a conjugate is: the sign is applied when it is read."""
    view = torch.complex(torch.zeros_like(tensor), tensor).conj().imag
    assert view.is_neg()
    return view


@pytest.mark.parametrize("negated", [imaginary, torch._neg_view], ids=["imaginary", "contiguous"])
@pytest.mark.parametrize("call, given", CALLS, ids=["conv2d", "conv1d", "conv2d_input", "filter2d"])
def test_lazily_negated_tensors_after_plain_ones(
    call: Callable[..., Any], given: dict[str, Any], negated: Callable[[Any], Any], somewhere: None
) -> None:
    given = {name: array for name, array in given.items() if name != "out"}
    for name, array in given.items():
        view = negated(array)
        plain = torch.complex(torch.zeros_like(array), -array).imag if negated is imaginary else -array
        assert view.is_neg() and view.stride() == plain.stride() and torch.equal(view, plain)
        expected = call(**(given | {name: plain}))
        assert torch.equal(call(**(given | {name: view})), expected), f"{name} negated, after a plain one"
        if name == "w":
            assert torch.equal(call(**(given | {name: prepare_weights(view)})), expected)


def test_a_lazily_negated_result(somewhere: None) -> None:
    expected = conv2d(X, W)
    plain = torch.empty_like(expected)
    for out in (plain, torch._neg_view(torch.empty_like(plain)), plain):
        conv2d(X, W, out=out)
        assert torch.equal(out, expected)


def test_what_signatures_tell_apart() -> None:
    signature = TorchArrays().signature
    without_memory = torch._efficientzerotensor(X.shape), torch._to_functional_tensor(X)
    for other in (torch._neg_view(X), X.to("meta"), *without_memory):
        assert other.stride() == X.stride() and signature(other) != signature(X)


def test_tensors_at_another_alignment_after_aligned_ones(torch_on_device: HostDevice) -> None:
    flat = torch.zeros(X.numel() + 1)
    shifted = flat[1:].view(X.shape)
    shifted.copy_(X)
    expected = conv2d(X, W)
    assert shifted.stride() == X.stride() and torch.equal(conv2d(shifted, W), expected)
    assert torch_on_device.launches[-1][1]["x"] % ALIGNMENT == 0


def test_arrays_of_cupy_at_another_alignment_after_aligned_ones(fake_cupy: Any, host_device: HostDevice) -> None:
    x, w, bias = (fake_cupy.asarray(each.numpy()) for each in (X, W, torch.ones(len(W))))
    expected = conv2d(x, w, bias).host
    for role, array in (("x", x), ("w", w), ("bias", bias)):
        shifted = fake_cupy.asarray(np.zeros(array.host.size + 1, np.float32))[1:]
        shifted = fake_cupy.ndarray(shifted.host.reshape(array.shape), 0)
        shifted[...] = array
        assert shifted.strides == array.strides and shifted.data.ptr % ALIGNMENT
        np.testing.assert_array_equal(
            conv2d(*({"x": x, "w": w, "bias": bias} | {role: shifted}).values()).host, expected
        )
        assert host_device.launches[-1][1][role] % ALIGNMENT == 0


def test_a_gradient_is_refused_after_a_call_without(torch_on_device: Any) -> None:
    """What was found out for tensors that require none is not known of others."""
    x, w = torch.randn(1, 4, 9, 9), torch.randn(8, 4, 3, 3)
    for _ in range(2):
        conv2d(x, w)
        for given in (x.clone().requires_grad_(), w), (x, w.clone().requires_grad_()):
            with says(ValueError, "requires a gradient"):
                conv2d(*given)
            with torch.no_grad():
                conv2d(*given)
