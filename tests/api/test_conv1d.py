"""conv1d: the values of PyTorch's, for every kind of array and argument, read in place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from leanconv import ConvProblem, conv1d, explain, prepare_weights
from leanconv.options import Layout
from tests.conftest import HostDevice, oracle_conv, relative_error, says

torch = pytest.importorskip("torch")

TOLERANCE = 2e-6
#: layouts of signals, those of the images of one row, and where the axes N, C, W lie
LAYOUTS: dict[str, Layout] = {"NCW": "NCHW", "NWC": "NHWC", "CWN": "CHWN"}
FROM_NCW = {"NCW": (0, 1, 2), "NWC": (0, 2, 1), "CWN": (1, 2, 0)}
TO_NCW = {"NCW": (0, 1, 2), "NWC": (0, 2, 1), "CWN": (2, 0, 1)}
BASE = ConvProblem(n=2, c=4, h=1, w=23, k=6, r=1, s=5)
#: arguments as a caller writes them, and the problem they mean
CALLS: list[tuple[dict[str, Any], ConvProblem]] = [
    ({}, BASE),
    ({"stride": 3, "padding": 2}, replace(BASE, stride=(1, 3), padding=(0, 0, 2, 2))),
    ({"stride": (2,), "padding": (1,), "dilation": [3]},
     replace(BASE, stride=(1, 2), padding=(0, 0, 1, 1), dilation=(1, 3))),
    ({"padding": (4, 0)}, replace(BASE, padding=(0, 0, 4, 0))),
    ({"padding": "same", "dilation": 3}, replace(BASE, padding=(0, 0, 6, 6), dilation=(1, 3))),
    ({"padding": "valid", "groups": 2}, replace(BASE, groups=2)),
    ({"activation": "relu", "padding": np.int64(1)},
     replace(BASE, padding=(0, 0, 1, 1), bias=True, activation="relu")),
]  # fmt: skip


def draw(rng: np.random.Generator, problem: ConvProblem) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """x, w and bias, channels first."""
    x = rng.standard_normal((problem.n, problem.c, problem.w)).astype(problem.dtype)
    w = rng.standard_normal((problem.k, problem.group_c, problem.s)).astype(problem.dtype)
    return x, w, rng.standard_normal(problem.k).astype(problem.dtype) if problem.bias else None


def expect(problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """PyTorch's result in float64, channels first."""
    _, _, left, right = problem.padding
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (left, right)))
    given = (None if a is None else torch.from_numpy(a).double() for a in (padded, w, bias))
    y = torch.nn.functional.conv1d(*given, problem.stride[1], 0, problem.dilation[1], problem.groups)
    return (y.relu() if problem.activation else y).numpy()


def lying(layout: str, array: np.ndarray) -> np.ndarray:
    """An array N, C, W as one that lies as ``layout``."""
    return np.ascontiguousarray(array.transpose(FROM_NCW[layout]))


def as_tensor(layout: str, array: np.ndarray) -> Any:
    """An array N, C, W as a tensor of that shape which lies as ``layout``."""
    return torch.from_numpy(lying(layout, array)).permute(TO_NCW[layout])


each_call = pytest.mark.parametrize(
    "arguments, problem", CALLS, ids=lambda value: str(value) if isinstance(value, dict) else ""
)


@each_call
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("device", [None, "cuda"])
def test_numpy(
    arguments: Any, problem: ConvProblem, layout: str, device: Any, rng: np.random.Generator, host_device: HostDevice
) -> None:
    x, w, bias = draw(rng, problem)
    expected = expect(problem, x, w, bias)
    assert relative_error(oracle_conv(problem, x[:, :, None], w[:, :, None], bias)[:, :, 0], expected) < 1e-14
    x, w, expected = (lying(layout, array) for array in (x, w, expected))
    y = conv1d(x, w, bias, layout=layout, device=device, **arguments)
    assert y.shape == expected.shape and y.dtype == np.float32
    assert relative_error(y, expected) < TOLERANCE
    wanted = replace(problem, layout=LAYOUTS[layout])
    assert list(host_device.problems.values()) == ([wanted] if device else [])
    assert host_device.memory == {}


@each_call
@pytest.mark.parametrize("order", LAYOUTS)
def test_pytorch_cpu_tensors(arguments: Any, problem: ConvProblem, order: str, rng: np.random.Generator) -> None:
    x, w, bias = draw(rng, problem)
    given = as_tensor(order, x)
    filters = torch.from_numpy(w), None if bias is None else torch.from_numpy(bias)
    y = conv1d(given, *filters, **arguments)
    assert relative_error(y.numpy(), expect(problem, x, w, bias)) < TOLERANCE
    assert y.permute(FROM_NCW["NWC" if order == "NWC" else "NCW"]).is_contiguous(), "the result lies as x does"
    for layout in LAYOUTS:
        z = conv1d(given, *filters, layout=layout, **arguments)
        assert relative_error(z.numpy(), expect(problem, x, w, bias)) < TOLERANCE
        assert z.permute(FROM_NCW[layout]).is_contiguous(), "the layout that was asked for"


@each_call
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pytorch_tensors_on_a_gpu_are_read_as_they_lie(
    arguments: Any, problem: ConvProblem, layout: str, rng: np.random.Generator, torch_on_device: HostDevice
) -> None:
    x, w, bias = draw(rng, problem)
    expected = expect(problem, x, w, bias)
    given, filters = as_tensor(layout, x), as_tensor(layout, w)
    added = None if bias is None else torch.from_numpy(bias)
    for weights in (filters, prepare_weights(filters), torch.from_numpy(w), prepare_weights(torch.from_numpy(w))):
        for _ in range(2):
            y = conv1d(given, weights, added, layout=layout, **arguments)
            assert y.permute(FROM_NCW[layout]).is_contiguous()
            assert relative_error(y.numpy(), expected) < TOLERANCE
            x_at, _, _, y_at, *_ = torch_on_device.launches[-1][1].values()
            assert (x_at, y_at) == (given.data_ptr(), y.data_ptr()), "neither copied before nor after"
    copied = conv1d(torch.from_numpy(x), filters, added, layout=layout, **arguments)
    assert torch.equal(copied, y) and copied.stride() == y.stride()
    assert set(torch_on_device.problems.values()) == {replace(problem, layout=LAYOUTS[layout])}


def test_pytorch_keeps_gradients() -> None:
    x, w = torch.ones(1, 1, 4), torch.ones(1, 1, 2, requires_grad=True)
    conv1d(x, w).sum().backward()
    assert w.grad is not None and w.grad.tolist() == [[[3.0, 3.0]]]


@each_call
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cupy_arrays_are_read_in_place(
    arguments: Any, problem: ConvProblem, layout: str, rng: np.random.Generator, fake_cupy: Any, host_device: HostDevice
) -> None:
    x, w, bias = draw(rng, problem)
    expected = expect(problem, x, w, bias)
    x, w, expected = (lying(layout, array) for array in (x, w, expected))
    given = [None if a is None else fake_cupy.asarray(a) for a in (x, w, bias)]
    conv1d(*given, layout=layout, **arguments)
    fake_cupy.allocations = 0
    y = conv1d(*given, layout=layout, **arguments)
    assert y.shape == expected.shape and relative_error(y.host, expected) < TOLERANCE
    assert fake_cupy.allocations == 1 + bool(host_device.prepared) and fake_cupy.copies == 0
    assert host_device.executables == 1
    assert host_device.launches[-1][1]["x"] == given[0].data.ptr
    out = fake_cupy.asarray(np.full(expected.shape, np.nan, np.float32))
    assert conv1d(*given, layout=layout, out=out, **arguments) is out
    assert relative_error(out.host, expected) < TOLERANCE


def test_strange_arrays_and_out(rng: np.random.Generator, fake_cupy: Any) -> None:
    x, w, _ = draw(rng, BASE)
    expected = expect(BASE, x, w, None)
    strided = np.full((*expected.shape, 2), np.nan, np.float32)[..., 0]
    for given in (np.asfortranarray(x), x[:, :, ::-1].copy()[:, :, ::-1]):
        assert conv1d(given, w, out=strided) is strided
        assert relative_error(strided, expected) < TOLERANCE
    reversed_x = fake_cupy.asarray(x[:, :, ::-1].copy())[:, :, ::-1]
    inside = fake_cupy.asarray(np.zeros((2, 6, 40), np.float32))[:, :, 1:20]
    assert conv1d(reversed_x, fake_cupy.asarray(w), out=inside) is inside
    assert relative_error(inside.host, expected) < TOLERANCE and fake_cupy.copies == 1
    tensor = torch.zeros(expected.shape)
    assert conv1d(torch.from_numpy(x), torch.from_numpy(w), out=tensor) is tensor
    assert relative_error(tensor.numpy(), expected) < TOLERANCE
    with says(ValueError, "out overlaps x in memory"):
        conv1d(x, w[:4, :, :1], out=x)


def test_float64_empty_batches_and_prepared_filters(rng: np.random.Generator) -> None:
    x, w, _ = draw(rng, replace(BASE, dtype="float64"))
    assert relative_error(conv1d(x, w), expect(BASE, x, w, None)) < 1e-14
    assert relative_error(conv1d(x, prepare_weights(w)), expect(BASE, x, w, None)) < 1e-14
    for layout in ("NWC", "CWN"):
        y = conv1d(lying(layout, x), lying(layout, w), layout=layout)
        assert relative_error(y, lying(layout, expect(BASE, x, w, None))) < 1e-14
    assert conv1d(x[:0], w).shape == (0, 6, 19)
    assert conv1d(lying("CWN", x[:0]), lying("CWN", w), layout="CWN").shape == (6, 19, 0)
    assert conv1d(torch.from_numpy(x[:0]), torch.from_numpy(w)).shape == (0, 6, 19)


def test_other_libraries(rng: np.random.Generator) -> None:
    class Other:
        def __init__(self, array: np.ndarray) -> None:
            self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__

    problem = replace(BASE, bias=True)
    x, w, bias = draw(rng, problem)
    assert bias is not None
    for layout in LAYOUTS:
        y = conv1d(Other(lying(layout, x)), Other(lying(layout, w)), Other(bias), layout=layout)
        assert relative_error(np.asarray(y), lying(layout, expect(problem, x, w, bias))) < TOLERANCE
    with says(TypeError, "out is taken for arrays of NumPy, CuPy and PyTorch only"):
        conv1d(Other(x), w, out=np.zeros(1))


X, W = np.ones((2, 4, 9), np.float32), np.ones((6, 4, 3), np.float32)


@pytest.mark.parametrize(
    "change, kind, parts",
    [
        ({"x": X[None]}, ValueError, ("x has 4 dimensions, shape (1, 2, 4, 9); it must have 3, or 2 without a batch",)),
        ({"w": W[0]}, ValueError, ("w has 2 dimensions, shape (4, 3); it must have 3",)),
        ({"layout": "NCHW"}, ValueError, ("layout='NCHW' is not known; choose one of 'NCW', 'NWC', 'CWN'",)),
        ({"layout": "CHWN"}, ValueError, ("layout='CHWN' is not known; choose one of 'NCW', 'NWC', 'CWN'",)),
        ({"layout": "CWN"}, ValueError, ("w has 6 channels, but x has in_channels=2 and groups=1",)),
        ({"layout": "NWC"}, ValueError, ("w has 3 channels, but x has in_channels=9 and groups=1",)),
        ({"stride": (1, 2)}, ValueError, ("stride=(1, 2) must be an integer: there is one axis",)),
        ({"stride": 0}, ValueError, ("stride=0 is below 1",)),
        ({"dilation": 1.5}, TypeError, ("dilation=1.5 is not an integer",)),
        ({"padding": (1, 2, 3)}, ValueError, ("padding=(1, 2, 3) must be an integer, (left, right), 'same' or",)),
        ({"padding": -1}, ValueError, ("padding=-1 is below 0",)),
        ({"padding": (0, -1)}, ValueError, ("padding=-1 is below 0",)),
        ({"padding": "same", "stride": 2}, ValueError, ("padding='same' needs stride=1, got stride=2",)),
        ({"padding": "full"}, ValueError, ("padding='full' is not known",)),
        ({"padding": (2**31, 0)}, ValueError, ("padding=2147483648 is above",)),
        (
            {"dilation": 9},
            ValueError,
            ("a filter of 3 taps with dilation 9 covers 19 samples, the padded input has 9",),
        ),
        ({"x": X[:, :, :0]}, ValueError, ("x has 2 signals of 4 channels and 0 samples; only its batch may be empty",)),
        ({"w": W[:, :, :0]}, ValueError, ("w has 6 filters of 4 channels and 0 taps; it must not be empty",)),
        ({"w": W[:, :, :0], "padding": "same"}, ValueError, ("w has 6 filters of 4 channels and 0 taps",)),
        ({"bias": X[0, 0]}, ValueError, ("bias has shape (9,); it must have shape (6,)",)),
        ({"out": np.zeros((2, 6, 1, 7), np.float32)}, ValueError, ("out has shape (2, 6, 1, 7)", "(2, 6, 7)")),
        ({"w": torch.ones(6, 4, 3)}, ValueError, ("x is an array of NumPy", "w one of PyTorch")),
        ({"x": [1.0]}, TypeError, ("x is a list",)),
        ({"algorithm": "fft"}, ValueError, ("algorithm='fft' is not known",)),
    ],
)
def test_what_is_refused(change: dict[str, Any], kind: type[Exception], parts: tuple[str, ...]) -> None:
    for _ in range(2):
        with says(kind, *parts):
            conv1d(**{"x": X, "w": W, **change})


def test_explain() -> None:
    told = explain(conv1d, X, W, padding=(1, 0))
    assert told.problem == ConvProblem(2, 4, 1, 9, 6, 1, 3, padding=(0, 0, 1, 0)) and told.chosen
    assert explain(conv1d, torch.ones(1, 4, 9), torch.ones(6, 4, 3)).where == "PyTorch on the CPU"
    told = explain(conv1d, lying("CWN", X), lying("CWN", W), layout="CWN")
    assert told.problem == ConvProblem(2, 4, 1, 9, 6, 1, 3, layout="CHWN") and told.chosen
