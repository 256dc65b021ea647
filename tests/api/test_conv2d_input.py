"""conv2d_input: the gradient of a layer's input, against PyTorch's and the definition, wherever it is computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from leanconv import ConvProblem, conv2d, conv2d_input, explain, prepare_weights
from leanconv.options import Layout
from leanconv.problem import lay_out
from leanconv.runtime import launch
from tests.api.test_api import FROM_NCHW, LAYOUTS, as_tensors, in_memory
from tests.conftest import HostDevice, oracle_conv, relative_error, says
from tests.runtime.test_runtime import EmulatedDevice

torch = pytest.importorskip("torch")

TOLERANCE = 2e-6
BASE = ConvProblem(n=2, c=4, h=9, w=8, k=6, r=3, s=2, op="dgrad")
#: arguments as a caller writes them, and the problem they mean
CALLS: list[tuple[dict[str, Any], ConvProblem]] = [
    ({}, BASE),
    ({"padding": 1}, replace(BASE, padding=(1, 1, 1, 1))),
    ({"padding": (0, 3, 2, 1)}, replace(BASE, padding=(0, 3, 2, 1))),
    ({"padding": "same", "dilation": (2, 1)}, replace(BASE, padding=(2, 2, 0, 1), dilation=(2, 1))),
    ({"padding": 4}, replace(BASE, padding=(4, 4, 4, 4))),
    ({"stride": 2, "padding": 1}, replace(BASE, stride=(2, 2), padding=(1, 1, 1, 1))),
    # rows and columns that no window reaches
    ({"stride": (4, 3)}, replace(BASE, stride=(4, 3))),
    ({"stride": (1, 2), "dilation": [2, 3]}, replace(BASE, stride=(1, 2), dilation=(2, 3))),
    ({"groups": 2, "padding": (1, 0)}, replace(BASE, groups=2, padding=(1, 1, 0, 0))),
    ({"groups": np.int64(2), "stride": 3}, replace(BASE, groups=2, stride=(3, 3))),
]


def draw(rng: np.random.Generator, problem: ConvProblem) -> tuple[np.ndarray, np.ndarray]:
    """grad and w as they lie in memory."""
    grad, w = (rng.standard_normal(shape).astype(problem.dtype) for shape in (problem.x_shape, problem.w_shape))
    return grad, w


each_call = pytest.mark.parametrize(
    "arguments, problem", CALLS, ids=lambda value: str(value) if isinstance(value, dict) else ""
)


@each_call
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("device", [None, "cuda"])
def test_numpy(
    arguments: Any, problem: ConvProblem, layout: Any, device: Any, rng: np.random.Generator, host_device: HostDevice
) -> None:
    problem = replace(problem, layout=layout)
    grad, w = draw(rng, problem)
    y = conv2d_input(grad, w, problem.y_shape, layout=layout, device=device, **arguments)
    assert y.shape == problem.y_shape and y.dtype == np.float32
    assert relative_error(y, oracle_conv(problem, grad, w, None)) < TOLERANCE
    assert problem in host_device.problems.values() or not device
    assert host_device.memory == {}


@each_call
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pytorch_cpu_tensors(arguments: Any, problem: ConvProblem, layout: Layout, rng: np.random.Generator) -> None:
    grad, w = draw(rng, problem)
    # what the gradient is, by differentiation
    x = torch.zeros(problem.y_shape, dtype=torch.float64, requires_grad=True)
    top, bottom, left, right = problem.padding
    padded = torch.nn.functional.pad(x, (left, right, top, bottom))
    y = torch.nn.functional.conv2d(
        padded, torch.from_numpy(w).double(), None, problem.stride, 0, problem.dilation, problem.groups
    )
    y.backward(torch.from_numpy(grad).double())
    assert x.grad is not None
    assert relative_error(oracle_conv(problem, grad, w, None), x.grad.numpy()) < 1e-14
    (given,) = as_tensors(layout, np.ascontiguousarray(grad.transpose(FROM_NCHW[layout])))
    for named, order in ((layout, layout), (None, "NHWC" if layout == "NHWC" else "NCHW")):
        found = conv2d_input(given, torch.from_numpy(w), problem.y_shape, layout=named, **arguments)
        assert relative_error(found.numpy(), x.grad.numpy()) < TOLERANCE
        in_memory(order, found)


@each_call
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pytorch_tensors_on_a_gpu_are_read_as_they_lie(
    arguments: Any, problem: ConvProblem, layout: Layout, rng: np.random.Generator, torch_on_device: HostDevice
) -> None:
    problem = replace(problem, layout=layout)
    grad, w = draw(rng, problem)
    expected, shape = oracle_conv(problem, grad, w, None), (problem.n, problem.c, problem.h, problem.w)
    given, filters = as_tensors(layout, grad, w)
    for weights in (filters, prepare_weights(filters), filters.contiguous(), prepare_weights(filters.contiguous())):
        for _ in range(2):
            found = conv2d_input(given, weights, shape, layout=layout, **arguments)
            assert found.shape == shape and relative_error(in_memory(layout, found), expected) < TOLERANCE
            x_at, _, _, y_at, *_ = torch_on_device.launches[-1][1].values()
            assert (x_at, y_at) == (given.data_ptr(), found.data_ptr()), "neither copied before nor after"
    assert set(torch_on_device.problems.values()) == {problem}


def test_it_is_called_as_pytorchs() -> None:
    grad, w = torch.randn(2, 6, 4, 4), torch.randn(6, 2, 3, 3)
    expected = torch.nn.grad.conv2d_input((2, 4, 8, 9), w, grad, (2, 2), (1, 0), (1, 1), 2)
    found = conv2d_input(grad, w, torch.Size((2, 4, 8, 9)), (2, 2), (1, 0), (1, 1), 2)
    torch.testing.assert_close(found, expected)


@each_call
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cupy_arrays_are_read_in_place(
    arguments: Any, problem: ConvProblem, layout: Layout, rng: np.random.Generator, fake_cupy: Any,
    host_device: HostDevice,
) -> None:  # fmt: skip
    problem, arguments = replace(problem, layout=layout), {"layout": layout, **arguments}
    grad, w = draw(rng, problem)
    given = fake_cupy.asarray(grad), fake_cupy.asarray(w)
    expected = oracle_conv(problem, grad, w, None)
    out = fake_cupy.asarray(np.full(problem.y_shape, np.nan, np.float32))
    for _ in range(2):
        assert relative_error(conv2d_input(*given, problem.y_shape, **arguments).host, expected) < TOLERANCE
        assert conv2d_input(*given, problem.y_shape, out=out, **arguments) is out
        assert relative_error(out.host, expected) < TOLERANCE
    assert host_device.executables == 1, "made ready once, with and without out"
    assert fake_cupy.copies == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prepared_filters_serve_both_directions(
    layout: Layout, rng: np.random.Generator, fake_cupy: Any, host_device: HostDevice
) -> None:
    problem = replace(BASE, padding=(1, 1, 1, 1), layout=layout)
    grad, w = draw(rng, problem)
    forward = replace(problem, op="fprop")
    x = rng.standard_normal(forward.x_shape).astype(np.float32)
    weights = prepare_weights(fake_cupy.asarray(w))
    for _ in range(3):
        dx = conv2d_input(fake_cupy.asarray(grad), weights, problem.y_shape, padding=1, layout=layout)
        assert relative_error(dx.host, oracle_conv(problem, grad, w, None)) < TOLERANCE
        y = conv2d(fake_cupy.asarray(x), weights, padding=1, layout=layout)
        assert relative_error(y.host, oracle_conv(forward, x, w, None)) < TOLERANCE
    assert host_device.prepared <= 2, "at most one for each direction"


@pytest.mark.parametrize(
    "arguments, layout",
    [
        ({"padding": 1}, "NCHW"),
        ({"padding": 1, "groups": 2}, "NHWC"),
        ({"stride": 2, "padding": (1, 0, 0, 1)}, "NHWC"),
        ({"padding": (1, 2), "groups": 2}, "CHWN"),
        ({"stride": (2, 1), "padding": 1}, "CHWN"),
    ],
)
def test_the_kernels_on_the_emulated_gpu(
    arguments: Any, layout: Any, rng: np.random.Generator, host_device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated = EmulatedDevice()
    monkeypatch.setattr(launch, "open_device", lambda index: emulated)
    shape = lay_out(layout, 2, 4, 7, 9)
    w = rng.standard_normal(lay_out(layout, 6, 4 // arguments.get("groups", 1), 3, 3), np.float32)
    grad = rng.standard_normal(conv2d(np.zeros(shape, np.float32), w, layout=layout, **arguments).shape, np.float32)
    y = conv2d_input(grad, w, shape, layout=layout, device="cuda", **arguments)
    expected = conv2d_input(grad.astype(np.float64), w.astype(np.float64), shape, layout=layout, **arguments)
    assert relative_error(y, expected) < TOLERANCE
    assert emulated.memory == {}


def test_float64_empty_batches_and_other_libraries(rng: np.random.Generator) -> None:
    class Other:
        def __init__(self, array: np.ndarray) -> None:
            self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__

    grad, w = draw(rng, replace(BASE, dtype="float64"))
    expected = oracle_conv(BASE, grad, w, None)
    for given in ((grad, w), (grad, prepare_weights(w)), (Other(grad), Other(w))):
        assert relative_error(np.asarray(conv2d_input(*given, BASE.y_shape)), expected) < 1e-14
    assert conv2d_input(grad[:0], w, (0, 4, 9, 8)).shape == (0, 4, 9, 8)
    assert conv2d_input(torch.from_numpy(grad[:0]), torch.from_numpy(w), (0, 4, 9, 8)).shape == (0, 4, 9, 8)


GRAD, W = np.ones((2, 6, 7, 7), np.float32), np.ones((6, 4, 3, 2), np.float32)


@pytest.mark.parametrize(
    "change, kind, parts",
    [
        ({"grad": GRAD[:, :, 1:]}, ValueError,
         ("grad has shape (2, 6, 6, 7), but the output has (2, 6, 7, 7) for input_shape=(2, 4, 9, 8), w of shape "
          "(6, 4, 3, 2), stride=1, padding=0, dilation=1 and groups=1",)),
        ({"stride": 2}, ValueError, ("grad has shape (2, 6, 7, 7), but the output has (2, 6, 4, 4)", "stride=2")),
        ({"grad": GRAD[0]}, ValueError,
         ("grad has shape (6, 7, 7) and input_shape=(2, 4, 9, 8): either both have a batch axis, or neither",)),
        ({"grad": GRAD[0, 0]}, ValueError, ("grad has 2 dimensions, shape (7, 7); it must have 4, or 3 without",)),
        ({"grad": GRAD[0, :, 1:], "input_shape": (4, 9, 8)}, ValueError,
         ("grad has shape (6, 6, 7), but the output has (6, 7, 7) for input_shape=(4, 9, 8)",)),
        ({"input_shape": (1, 4, 9, 8)}, ValueError, ("but the output has (1, 6, 7, 7)",)),
        ({"input_shape": (4, 9, 8)}, ValueError, ("grad has shape (2, 6, 7, 7) and input_shape=(4, 9, 8)",)),
        ({"input_shape": 4}, TypeError, ("input_shape=4 is no shape; give a tuple of integers",)),
        ({"input_shape": (2, 4, 9, 8.0)}, TypeError, ("input_shape=8.0 is not an integer",)),
        ({"input_shape": (2, 4, -9, 8)}, ValueError, ("input_shape=-9 is below 0",)),
        ({"input_shape": (2, 4, 0, 8)}, ValueError,
         ("input_shape has 2 images of 4 channels, 0 rows and 8 columns; only its batch",)),
        ({"input_shape": (2, 3, 9, 8)}, ValueError, ("w has 4 channels, but input_shape has in_channels=3",)),
        ({"input_shape": (2, 4, 2, 8)}, ValueError, ("the output would be 0x7",)),
        ({"w": W[0]}, ValueError, ("w has 3 dimensions",)),
        ({"w": W.astype(np.float64)}, TypeError, ("w has dtype float64 and grad float32",)),
        ({"w": torch.ones(6, 4, 3, 2)}, ValueError, ("grad is an array of NumPy", "w one of PyTorch")),
        ({"grad": [1.0]}, TypeError, ("grad is a list",)),
        ({"out": np.zeros((2, 4, 9, 9), np.float32)}, ValueError, ("out has shape (2, 4, 9, 9); the result has",)),
        ({"layout": "NHWC"}, ValueError, ("w has 2 channels, but input_shape has in_channels=8",)),
        ({"layout": "CHWN"}, ValueError, ("w has 6 channels, but input_shape has in_channels=2",)),
        ({"layout": "CHWN", "input_shape": (6, 9, 8, 4)}, ValueError,
         ("grad has shape (2, 6, 7, 7), but the output has (2, 6, 6, 4) for input_shape=(6, 9, 8, 4)",)),
        ({"layout": "NWC"}, ValueError, ("layout='NWC' is not known",)),
    ],
)  # fmt: skip
def test_what_is_refused(change: dict[str, Any], kind: type[Exception], parts: tuple[str, ...]) -> None:
    for _ in range(2):
        with says(kind, *parts):
            conv2d_input(**{"grad": GRAD, "w": W, "input_shape": (2, 4, 9, 8), **change})


def test_out_must_lie_elsewhere() -> None:
    grad = np.ones((2, 4, 5, 5), np.float32)
    with says(ValueError, "out overlaps grad in memory"):
        conv2d_input(grad, np.ones((4, 4, 1, 1), np.float32), grad.shape, out=grad)


def test_explain(host_device: HostDevice) -> None:
    told = explain(conv2d_input, GRAD, W, input_shape=(2, 4, 9, 8), device="cuda")
    assert told.problem == BASE and told.chosen and told.others
    assert explain(BASE, device="cuda").chosen == told.chosen
    assert explain(conv2d_input, GRAD, W, input_shape=(2, 4, 9, 8)).chosen
    images_last = [np.ascontiguousarray(array.transpose(1, 2, 3, 0)) for array in (GRAD, W)]
    for device in (None, "cuda"):
        told = explain(conv2d_input, *images_last, input_shape=(4, 9, 8, 2), layout="CHWN", device=device)
        assert told.problem == replace(BASE, layout="CHWN") and told.chosen
    told = explain(conv2d_input, torch.from_numpy(GRAD), torch.from_numpy(W), input_shape=(2, 4, 9, 8))
    assert told.chosen == "torch.nn.grad.conv2d_input"
    with says(ValueError, "op='dgrad'", "no bias and no activation"):
        explain(replace(BASE, bias=True))
