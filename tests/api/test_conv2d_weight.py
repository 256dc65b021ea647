"""conv2d_weight: the gradient of a layer's filters, against PyTorch's and the definition, wherever it is computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from leanconv import ConvProblem, conv1d_weight, conv2d, conv2d_weight, explain, prepare_weights
from leanconv.call import choose
from leanconv.options import Layout
from leanconv.problem import lay_out
from leanconv.runtime import launch
from tests.api.test_api import FROM_NCHW, LAYOUTS, as_tensors, in_memory
from tests.conftest import HostDevice, oracle_conv, relative_error, says
from tests.runtime.test_runtime import EmulatedDevice
from tests.variants import VARIANTS

torch = pytest.importorskip("torch")

TOLERANCE = 2e-6
BASE = ConvProblem(n=2, c=4, h=9, w=8, k=6, r=3, s=2, op="wgrad")
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
    ({"groups": 4, "padding": 1}, replace(BASE, k=8, groups=4, padding=(1, 1, 1, 1))),
]


def draw(rng: np.random.Generator, problem: ConvProblem) -> tuple[np.ndarray, np.ndarray]:
    """x and grad as they lie in memory."""
    x, grad, _ = problem.operands
    first, second = (rng.standard_normal(each.shape).astype(problem.dtype) for each in (x, grad))
    return first, second


each_call = pytest.mark.parametrize(
    "arguments, problem", CALLS, ids=lambda value: str(value) if isinstance(value, dict) else ""
)


def test_the_problem_names_its_operands() -> None:
    x, dy, dw = replace(BASE, padding=(1, 0, 2, 0)).operands
    assert [each.role for each in (x, dy, dw)] == ["x", "dy", "dw"]
    assert (x.shape, dy.shape, dw.shape) == ((2, 4, 9, 8), (2, 6, 8, 9), (6, 4, 3, 2))
    assert [each.written for each in (x, dy, dw)] == [False, False, True]
    assert replace(BASE, layout="NHWC").y_shape == (6, 3, 2, 4) and replace(BASE, layout="CHWN").y_shape == (4, 3, 2, 6)
    assert BASE.terms == 2 * 7 * 7 and BASE.flops == replace(BASE, op="fprop").flops
    elements = 2 * 4 * 9 * 8 + 2 * 6 * 7 * 7 + 6 * 4 * 3 * 2
    assert BASE.bytes == 4 * elements and replace(BASE, accumulate=True).bytes == 4 * (elements + 6 * 4 * 3 * 2)
    assert str(BASE).startswith("wgrad NCHW float32 2x4x9x8 k6 3x2")


@each_call
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("device", [None, "cuda"])
def test_numpy(
    arguments: Any, problem: ConvProblem, layout: Any, device: Any, rng: np.random.Generator, host_device: HostDevice
) -> None:
    problem = replace(problem, layout=layout)
    x, grad = draw(rng, problem)
    dw = conv2d_weight(x, grad, problem.y_shape, layout=layout, device=device, **arguments)
    assert dw.shape == problem.y_shape and dw.dtype == np.float32
    assert relative_error(dw, oracle_conv(problem, x, grad, None)) < TOLERANCE
    assert problem in host_device.problems.values() or not device
    assert host_device.memory == {}


@each_call
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pytorch_cpu_tensors(arguments: Any, problem: ConvProblem, layout: Layout, rng: np.random.Generator) -> None:
    x, grad = draw(rng, problem)
    # what the gradient is, by differentiation
    w = torch.zeros(problem.y_shape, dtype=torch.float64, requires_grad=True)
    top, bottom, left, right = problem.padding
    padded = torch.nn.functional.pad(torch.from_numpy(x).double(), (left, right, top, bottom))
    y = torch.nn.functional.conv2d(padded, w, None, problem.stride, 0, problem.dilation, problem.groups)
    y.backward(torch.from_numpy(grad).double())
    assert w.grad is not None
    assert relative_error(oracle_conv(problem, x, grad, None), w.grad.numpy()) < 1e-14
    (given,) = as_tensors(layout, np.ascontiguousarray(x.transpose(FROM_NCHW[layout])))
    for named, order in ((layout, layout), (None, "NHWC" if layout == "NHWC" else "NCHW")):
        found = conv2d_weight(given, torch.from_numpy(grad), problem.y_shape, layout=named, **arguments)
        assert relative_error(found.numpy(), w.grad.numpy()) < TOLERANCE
        in_memory(order, found)


@each_call
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pytorch_tensors_on_a_gpu_are_read_as_they_lie(
    arguments: Any, problem: ConvProblem, layout: Layout, rng: np.random.Generator, torch_on_device: HostDevice
) -> None:
    problem = replace(problem, layout=layout)
    x, grad = draw(rng, problem)
    expected, shape = oracle_conv(problem, x, grad, None), (problem.k, problem.group_c, problem.r, problem.s)
    given, passed = as_tensors(layout, x, grad)
    for _ in range(2):
        found = conv2d_weight(given, passed, shape, layout=layout, **arguments)
        assert found.shape == shape and relative_error(in_memory(layout, found), expected) < TOLERANCE
        x_at, dy_at, _, dw_at, *_ = torch_on_device.launches[-1][1].values()
        assert (x_at, dy_at, dw_at) == (given.data_ptr(), passed.data_ptr(), found.data_ptr()), "nothing is copied"
    # a gradient in another order of memory is copied
    found = conv2d_weight(given, passed.contiguous(), shape, layout=layout, **arguments)
    assert relative_error(in_memory(layout, found), expected) < TOLERANCE
    assert set(torch_on_device.problems.values()) == {problem}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("device", [None, "cuda"])
def test_the_gradient_of_the_bias(
    layout: Layout, device: Any, rng: np.random.Generator, host_device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated = EmulatedDevice()
    monkeypatch.setattr(launch, "open_device", lambda index: emulated)
    problem = replace(BASE, k=10, layout=layout, padding=(1, 0, 2, 0))
    x, grad = draw(rng, problem)
    axes = tuple(axis for axis in range(4) if axis != layout.index("C"))
    for _ in range(2):
        dw, db = conv2d_weight(
            x, grad, problem.y_shape, padding=(1, 0, 2, 0), layout=layout, device=device, grad_bias=True
        )
        assert relative_error(dw, oracle_conv(problem, x, grad, None)) < TOLERANCE
        assert db.shape == (10,) and db.dtype == np.float32
        assert relative_error(db, grad.sum(axes, dtype=np.float64)) < TOLERANCE
    none = x.take([], layout.index("N")), grad.take([], layout.index("N"))
    for part in conv2d_weight(
        *none, problem.y_shape, padding=(1, 0, 2, 0), layout=layout, device=device, grad_bias=True
    ):
        assert not part.any()
    assert emulated.memory == {}


def test_the_gradient_of_the_bias_of_tensors(
    rng: np.random.Generator, torch_on_device: HostDevice, fake_cupy: Any
) -> None:
    x, grad = draw(rng, BASE)
    expected = grad.sum((0, 2, 3), dtype=np.float64)
    for order in (torch.contiguous_format, torch.channels_last):
        tensors = [torch.from_numpy(each).contiguous(memory_format=order) for each in (x, grad)]
        for given in (tensors, [each[:1] for each in tensors], [each[0] for each in tensors]):
            dw, db = conv2d_weight(*given, (6, 4, 3, 2), grad_bias=True)
            assert dw.shape == (6, 4, 3, 2) and db.shape == (6,)
            if given is tensors:
                assert relative_error(db.numpy(), expected) < TOLERANCE
    dw, db = conv2d_weight(fake_cupy.asarray(x), fake_cupy.asarray(grad), BASE.y_shape, grad_bias=True)
    assert relative_error(db.host, expected) < TOLERANCE
    with says(ValueError, "weight_shape has 3 dimensions"):
        conv2d_weight(x, grad, (6, 4, 3), grad_bias=True)
    with says(TypeError, "grad_bias is taken for arrays of NumPy, CuPy and PyTorch only"):
        conv2d_weight([1.0], grad, (6, 4, 3, 2), grad_bias=True)
    told = explain(conv2d_weight, x, grad, weight_shape=(6, 4, 3, 2), grad_bias=True, device="cuda")
    assert told.problem == replace(BASE, bias=True)


@pytest.mark.parametrize("layout", ["NCW", "NWC", "CWN"])
@pytest.mark.parametrize("device", [None, "cuda"])
def test_signals(layout: Any, device: Any, rng: np.random.Generator, host_device: HostDevice) -> None:
    x, grad = torch.randn(2, 4, 13), torch.randn(2, 6, 6)
    expected = torch.nn.grad.conv1d_weight(
        torch.nn.functional.pad(x.double(), (1, 0)), (6, 2, 3), grad.double(), 2, 0, 1, 2
    ).numpy()
    order = {"NCW": (0, 1, 2), "NWC": (0, 2, 1), "CWN": (1, 2, 0)}[layout]
    given = [np.ascontiguousarray(each.numpy().transpose(order)) for each in (x, grad)]
    shape = tuple(np.array((6, 2, 3))[list(order)])
    more = {"stride": 2, "padding": (1, 0), "groups": 2, "layout": layout}
    dw = conv1d_weight(*given, shape, device=device, **more)
    assert dw.shape == shape and relative_error(dw, expected.transpose(order)) < TOLERANCE
    if layout != "CWN":
        tensors = [torch.from_numpy(each).permute(np.argsort(order).tolist()) for each in given]
        dw, db = conv1d_weight(*tensors, (6, 2, 3), stride=2, padding=(1, 0), groups=2, grad_bias=True)
        assert relative_error(dw.numpy(), expected) < TOLERANCE
        assert relative_error(db.numpy(), grad.double().sum((0, 2)).numpy()) < TOLERANCE
        alone = conv1d_weight(*(each[0] for each in tensors), (6, 2, 3), stride=2, padding=(1, 0), groups=2)
        assert alone.shape == (6, 2, 3)
    told = explain(conv1d_weight, *given, weight_shape=shape, device=device, **more)
    assert (told.problem.op, told.problem.h, told.problem.s) == ("wgrad", 1, 3)
    with says(ValueError, "weight_shape has 4 dimensions"):
        conv1d_weight(*given, (*shape, 1), **more)


def test_it_gives_what_pytorchs_gives() -> None:
    x, grad = torch.randn(2, 4, 8, 9), torch.randn(2, 6, 4, 4)
    expected = torch.nn.grad.conv2d_weight(x, (6, 2, 3, 3), grad, (2, 2), (1, 0), (1, 1), 2)
    found = conv2d_weight(x, grad, torch.Size((6, 2, 3, 3)), (2, 2), (1, 0), (1, 1), 2)
    torch.testing.assert_close(found, expected)


def test_gradients_pass_through_pytorchs_own() -> None:
    x, grad = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 2, 5, 4), (2, 3, 3, 3)))
    torch.autograd.gradcheck(lambda x, grad: conv2d_weight(x, grad, (3, 2, 3, 2)), (x, grad))


@each_call
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cupy_arrays_are_read_in_place(
    arguments: Any, problem: ConvProblem, layout: Layout, rng: np.random.Generator, fake_cupy: Any,
    host_device: HostDevice,
) -> None:  # fmt: skip
    problem, arguments = replace(problem, layout=layout), {"layout": layout, **arguments}
    x, grad = draw(rng, problem)
    given = fake_cupy.asarray(x), fake_cupy.asarray(grad)
    expected = oracle_conv(problem, x, grad, None)
    out = fake_cupy.asarray(np.full(problem.y_shape, np.nan, np.float32))
    for _ in range(2):
        assert relative_error(conv2d_weight(*given, problem.y_shape, **arguments).host, expected) < TOLERANCE
        assert conv2d_weight(*given, problem.y_shape, out=out, **arguments) is out
        assert relative_error(out.host, expected) < TOLERANCE
    assert host_device.executables == 1, "made ready once, with and without out"
    assert fake_cupy.copies == 0


@pytest.mark.parametrize(
    "arguments, layout, groups",
    [
        ({"padding": 1}, "NCHW", 1),
        ({"padding": 1}, "NHWC", 4),
        ({"stride": 2, "padding": (1, 0, 0, 1)}, "NHWC", 4),
        ({"padding": (1, 2)}, "CHWN", 2),
        ({"padding": (1, 2), "algorithm": "depthwise_weight_split_k"}, "NHWC", 4),
    ],
)
def test_the_kernels_on_the_emulated_gpu(
    arguments: Any, layout: Any, groups: int, rng: np.random.Generator, host_device: HostDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    emulated = EmulatedDevice()
    monkeypatch.setattr(launch, "open_device", lambda index: emulated)
    monkeypatch.setattr(choose, "ALGORITHMS", VARIANTS)
    x = rng.standard_normal(lay_out(layout, 2, 4, 7, 9), np.float32)
    shape = lay_out(layout, 4, 4 // groups, 3, 3)
    layer = {name: value for name, value in arguments.items() if name != "algorithm"} | {"groups": groups}
    grad = rng.standard_normal(conv2d(x, np.zeros(shape, np.float32), layout=layout, **layer).shape, np.float32)
    dw = conv2d_weight(x, grad, shape, layout=layout, groups=groups, device="cuda", **arguments)
    expected = conv2d_weight(x.astype(np.float64), grad.astype(np.float64), shape, layout=layout, **layer)
    assert relative_error(dw, expected) < TOLERANCE
    assert emulated.memory == {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_without_a_batch(layout: Layout, rng: np.random.Generator, torch_on_device: HostDevice) -> None:
    problem = replace(BASE, n=1, layout=layout)
    x, grad = draw(rng, problem)
    axis = layout.index("N")
    alone = x.take(0, axis), grad.take(0, axis)
    expected = oracle_conv(problem, x, grad, None)
    assert relative_error(conv2d_weight(*alone, problem.y_shape, layout=layout), expected) < TOLERANCE
    without = {"NCHW": (0, 1, 2), "NHWC": (2, 0, 1), "CHWN": (0, 1, 2)}[layout]
    tensors = [torch.from_numpy(np.ascontiguousarray(each)).permute(without) for each in alone]
    found = conv2d_weight(*tensors, (6, 4, 3, 2), layout=layout)
    assert found.shape == (6, 4, 3, 2) and relative_error(in_memory(layout, found), expected) < TOLERANCE


def test_float64_other_libraries_and_no_images_at_all(rng: np.random.Generator, fake_cupy: Any) -> None:
    class Other:
        def __init__(self, array: np.ndarray) -> None:
            self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__

    x, grad = draw(rng, replace(BASE, dtype="float64"))
    expected = oracle_conv(BASE, x, grad, None)
    for given in ((x, grad), (Other(x), Other(grad))):
        assert relative_error(np.asarray(conv2d_weight(*given, BASE.y_shape)), expected) < 1e-14
    # filters that have seen no image have no gradient: zeros, everywhere
    out = np.full(BASE.y_shape, np.nan)
    assert conv2d_weight(x[:0], grad[:0], BASE.y_shape, out=out) is out and not out.any()
    x, grad = x[:0].astype(np.float32), grad[:0].astype(np.float32)
    for device in (None, "cuda"):
        assert not conv2d_weight(x, grad, BASE.y_shape, device=device).any()
    assert not conv2d_weight(torch.from_numpy(x), torch.from_numpy(grad), BASE.y_shape).any()
    assert not conv2d_weight(fake_cupy.asarray(x), fake_cupy.asarray(grad), BASE.y_shape).host.any()


X, GRAD = np.ones((2, 4, 9, 8), np.float32), np.ones((2, 6, 7, 7), np.float32)


@pytest.mark.parametrize(
    "change, kind, parts",
    [
        ({"grad": GRAD[:, :, 1:]}, ValueError,
         ("grad has shape (2, 6, 6, 7), but the output has (2, 6, 7, 7) for x of shape (2, 4, 9, 8), "
          "weight_shape=(6, 4, 3, 2), stride=1, padding=0, dilation=1 and groups=1",)),
        ({"stride": 2}, ValueError, ("grad has shape (2, 6, 7, 7), but the output has (2, 6, 4, 4)", "stride=2")),
        ({"grad": GRAD[:1]}, ValueError, ("grad has shape (1, 6, 7, 7), but the output has (2, 6, 7, 7)",)),
        ({"grad": GRAD[0]}, ValueError,
         ("x has shape (2, 4, 9, 8) and grad (6, 7, 7): either both have a batch axis, or neither",)),
        ({"grad": GRAD[0, 0]}, ValueError, ("grad has 2 dimensions, shape (7, 7); it must have 4, or 3 without",)),
        ({"x": X[0, 0]}, ValueError, ("x has 2 dimensions, shape (9, 8); it must have 4, or 3 without",)),
        ({"weight_shape": (7, 4, 3, 2)}, ValueError, ("grad has shape (2, 6, 7, 7), but the output has (2, 7, 7, 7)",)),
        ({"weight_shape": (6, 4, 3)}, ValueError, ("weight_shape has 3 dimensions, shape (6, 4, 3); it must have 4",)),
        ({"weight_shape": 4}, TypeError, ("weight_shape=4 is no shape; give a tuple of integers",)),
        ({"weight_shape": (6, 4, 3, 2.0)}, TypeError, ("weight_shape=2.0 is not an integer",)),
        ({"weight_shape": (6, 4, -3, 2)}, ValueError, ("weight_shape=-3 is below 0",)),
        ({"weight_shape": (6, 4, 0, 2)}, ValueError, ("weight_shape has 6 filters of 4 channels, 0 rows and 2",)),
        ({"weight_shape": (6, 2, 3, 2)}, ValueError,
         ("weight_shape has 2 channels, but x has in_channels=4 and groups=1, read as NCHW: each filter must have 4",)),
        ({"groups": 2}, ValueError,
         ("weight_shape has 4 channels, but x has in_channels=4 and groups=2, read as NCHW: each filter must have 2",)),
        ({"groups": 4}, ValueError, ("out_channels=6 is not divisible by groups=4",)),
        ({"groups": 3}, ValueError, ("in_channels=4 is not divisible by groups=3",)),
        ({"weight_shape": (6, 4, 10, 2)}, ValueError, ("the output would be 0x7",)),
        ({"grad": GRAD.astype(np.float64)}, TypeError, ("grad has dtype float64 and x float32",)),
        ({"grad": torch.ones(2, 6, 7, 7)}, ValueError, ("x is an array of NumPy", "grad one of PyTorch")),
        ({"grad": prepare_weights(GRAD)}, TypeError, ("grad is a", "PreparedWeights")),
        ({"x": [1.0]}, TypeError, ("x is a list",)),
        ({"out": np.zeros((6, 4, 3, 3), np.float32)}, ValueError, ("out has shape (6, 4, 3, 3); the result has",)),
        ({"layout": "NHWC"}, ValueError, ("weight_shape has 2 channels, but x has in_channels=8",)),
        ({"layout": "NWC"}, ValueError, ("layout='NWC' is not known",)),
        ({"algorithm": "direct"}, ValueError, ("direct: on the CPU it computes op 'fprop', not 'wgrad'",)),
    ],
)  # fmt: skip
def test_what_is_refused(change: dict[str, Any], kind: type[Exception], parts: tuple[str, ...]) -> None:
    for _ in range(2):
        with says(kind, *parts):
            conv2d_weight(**{"x": X, "grad": GRAD, "weight_shape": (6, 4, 3, 2), **change})


def test_out_must_lie_elsewhere() -> None:
    both, grad = np.ones((4, 4, 5, 5), np.float32), np.ones((1, 4, 1, 1), np.float32)
    with says(ValueError, "out overlaps x in memory"):
        conv2d_weight(both[:1], grad, both.shape, out=both)


def test_explain(host_device: HostDevice) -> None:
    told = explain(conv2d_weight, X, GRAD, weight_shape=(6, 4, 3, 2), device="cuda")
    assert told.problem == BASE and told.chosen == "implicit_gemm_weight" and told.others
    assert "op='wgrad' is not the forward pass" in told.others["im2win_fused"]
    assert "a group has more than one channel" in told.others["depthwise_weight"][0]
    assert explain(BASE, device="cuda").chosen == told.chosen
    assert explain(conv2d_weight, X, GRAD, weight_shape=(6, 4, 3, 2)).chosen == "im2col"
    depthwise = replace(BASE, k=4, groups=4)
    assert explain(depthwise, device="cuda").chosen == "depthwise_weight"
    images_last = [np.ascontiguousarray(array.transpose(1, 2, 3, 0)) for array in (X, GRAD)]
    for device in (None, "cuda"):
        told = explain(conv2d_weight, *images_last, weight_shape=(4, 3, 2, 6), layout="CHWN", device=device)
        assert told.problem == replace(BASE, layout="CHWN") and told.chosen
    told = explain(conv2d_weight, torch.from_numpy(X), torch.from_numpy(GRAD), weight_shape=(6, 4, 3, 2))
    assert told.chosen == "torch.nn.grad.conv2d_weight"
    with says(ValueError, "op='wgrad'", "the gradient of a layer's filters, has no activation"):
        explain(replace(BASE, activation="relu"))
