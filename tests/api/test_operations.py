"""conv2d, conv1d and their gradients, one suite: right values for every kind of array and argument, without a GPU.

What is asked of each of them alike; `tests.operations` has the table.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from leanconv import ConvProblem, conv1d, conv1d_weight, conv2d, conv2d_input, conv2d_weight, explain, prepare_weights
from leanconv.arrays.memory import lay_out
from leanconv.call import choose
from leanconv.options import Layout
from leanconv.runtime import launch
from tests.messages import says
from tests.operations import (
    FROM_NCHW,
    LAYOUTS,
    OPERATIONS,
    TOLERANCE,
    Operation,
    by_pytorch,
    draw,
    each_call,
    each_operation,
    expect,
    in_memory,
)
from tests.oracles import oracle_conv, relative_error
from tests.runtime.test_runtime import EmulatedDevice
from tests.stand_ins import HostDevice, Other
from tests.variants import VARIANTS

torch = pytest.importorskip("torch")

each_layout = pytest.mark.parametrize("layout", LAYOUTS)
BACKWARD, WEIGHT = OPERATIONS["conv2d_input"].base, OPERATIONS["conv2d_weight"].base


@each_call()
@each_layout
@pytest.mark.parametrize("device", [None, "cuda"])
def test_numpy(
    operation: Operation, arguments: Any, problem: ConvProblem, layout: Layout, device: Any,
    rng: np.random.Generator, host_device: HostDevice,
) -> None:  # fmt: skip
    problem = replace(problem, layout=layout)
    arrays = draw(rng, problem)
    y = operation(problem, operation.lying(layout, arrays), layout, device=device, **arguments)
    assert y.shape == operation.shape(problem) and y.dtype == np.float32
    assert relative_error(y.reshape(problem.y_shape), expect(problem, arrays)) < TOLERANCE
    assert list(host_device.problems.values()) == ([problem] if device else [])
    assert host_device.memory == {}, "device memory was not given back"


@each_call()
@each_layout
def test_pytorch_cpu_tensors(
    operation: Operation, arguments: Any, problem: ConvProblem, layout: Layout, rng: np.random.Generator
) -> None:
    arrays = draw(rng, problem)
    expected = by_pytorch(problem, arrays)
    assert relative_error(expect(problem, arrays), expected) < 1e-14, "the definition is PyTorch's"
    lying = [a if a is None or a.ndim == 1 else np.ascontiguousarray(a.transpose(FROM_NCHW[layout])) for a in arrays]
    plain, given = operation.tensors("NCHW", arrays), operation.tensors(layout, lying)
    # by default the order of x, if it is one that PyTorch has a word for
    for named, order in ((None, "NHWC" if layout == "NHWC" else "NCHW"), *zip(LAYOUTS, LAYOUTS, strict=True)):
        for second in (given[1], plain[1]) if named == layout else (plain[1],):
            y = operation(problem, [given[0], second, *given[2:]], named, **arguments)
            assert relative_error(operation.in_memory(order, y), expected.transpose(FROM_NCHW[order])) < TOLERANCE


@each_call()
@each_layout
def test_pytorch_tensors_on_a_gpu_are_read_as_they_lie(
    operation: Operation, arguments: Any, problem: ConvProblem, layout: Layout, rng: np.random.Generator,
    torch_on_device: HostDevice,
) -> None:  # fmt: skip
    problem = replace(problem, layout=layout)
    arrays = draw(rng, problem)
    expected = expect(problem, arrays)
    first, second, *bias = operation.tensors(layout, arrays)
    (out,) = operation.tensors(layout, [np.full(problem.y_shape, np.nan, np.float32)])
    seconds = [second, second.contiguous()]
    if problem.op != "wgrad":
        seconds += [prepare_weights(each) for each in seconds]
    for given in seconds:
        for into in (None, out):
            y = operation(problem, [first, given, *bias], layout, out=into, **arguments)
            assert y.shape == operation.shape(problem, tensors=True) and (into is None or y is into)
            assert relative_error(operation.in_memory(layout, y), expected) < TOLERANCE
            first_at, second_at, _, y_at, *_ = torch_on_device.launches[-1][1].values()
            assert (first_at, y_at) == (first.data_ptr(), y.data_ptr()), "neither copied before nor after"
            assert given is not second or second_at == second.data_ptr()
            if into is None:
                found = y
            out.fill_(torch.nan)
    copied = operation(problem, [first.contiguous(), second, *bias], layout, **arguments)
    assert torch.equal(copied, found) and copied.stride() == found.stride()
    assert set(torch_on_device.problems.values()) == {problem}


@each_call()
@each_layout
def test_cupy_arrays_are_read_in_place(
    operation: Operation, arguments: Any, problem: ConvProblem, layout: Layout, rng: np.random.Generator,
    fake_cupy: Any, host_device: HostDevice,
) -> None:  # fmt: skip
    problem = replace(problem, layout=layout)
    arrays = draw(rng, problem)
    expected = expect(problem, arrays)
    given = [None if a is None else fake_cupy.asarray(a) for a in operation.lying(layout, arrays)]
    out = fake_cupy.asarray(np.full(operation.shape(problem), np.nan, np.float32))
    for warm in (False, True):
        fake_cupy.allocations = 0
        y = operation(problem, given, layout, **arguments)
        assert not warm or fake_cupy.allocations == 1 + bool(host_device.prepared)
        assert host_device.launches[-1][1][problem.operands[0].role] == given[0].data.ptr
        assert y.shape == operation.shape(problem)
        assert relative_error(y.host.reshape(problem.y_shape), expected) < TOLERANCE
        assert operation(problem, given, layout, out=out, **arguments) is out
        assert relative_error(out.host.reshape(problem.y_shape), expected) < TOLERANCE
    assert host_device.executables == 1, "made ready once, with and without out"
    assert fake_cupy.copies == 0


@each_operation
@each_layout
def test_float64_and_other_libraries(operation: Operation, layout: Layout, rng: np.random.Generator) -> None:
    problem = replace(operation.base, dtype="float64", layout=layout)
    arrays = draw(rng, problem)
    first, second, *bias = operation.lying(layout, arrays)
    others = [prepare_weights(second)] if problem.op != "wgrad" and layout == "NCHW" else []
    for given in ((first, second), *((first, other) for other in others), (Other(first), Other(second))):
        y = np.asarray(operation(problem, [*given, *bias], layout))
        assert y.dtype == np.float64
        assert relative_error(y.reshape(problem.y_shape), expect(problem, arrays)) < 1e-14
    with says(TypeError, "out is taken for arrays of NumPy, CuPy and PyTorch only"):
        operation(problem, [Other(first), second, *bias], layout, out=np.zeros(1))


@each_operation
@each_layout
def test_empty_batches(
    operation: Operation, layout: Layout, rng: np.random.Generator, fake_cupy: Any, host_device: HostDevice
) -> None:
    """Filters that have seen no image have no gradient: zeros, everywhere."""
    problem = replace(operation.base, n=0, layout=layout)
    arrays = draw(rng, problem)
    given = operation.lying(layout, arrays)
    shape = operation.shape(problem)
    for device in (None, "cuda"):
        out = np.full(shape, np.nan, np.float32)
        for into in (None, out):
            y = operation(problem, given, layout, device=device, out=into)
            assert y.shape == shape and not y.any() and (into is None or y is out)
    on_gpu = operation(problem, [None if a is None else fake_cupy.asarray(a) for a in given], layout)
    assert on_gpu.shape == shape and not on_gpu.host.any()
    tensor = operation(problem, operation.tensors(layout, arrays), layout)
    assert tensor.shape == operation.shape(problem, tensors=True) and not tensor.any()


@pytest.mark.parametrize(
    "operation, first, second",
    [
        ("conv2d", (2, 4, 5, 5), (4, 4, 1, 1)),
        ("conv1d", (2, 4, 9), (4, 4, 1)),
        ("conv2d_input", (2, 4, 5, 5), (4, 4, 1, 1)),
        ("conv1d_input", (2, 4, 5), (4, 4, 1)),
        ("conv2d_weight", (1, 4, 5, 5), (1, 4, 1, 1)),
        ("conv1d_weight", (1, 4, 5), (1, 4, 1)),
    ],
)
def test_out_must_lie_elsewhere(operation: str, first: Any, second: Any) -> None:
    shape = (4, *first[1:]) if operation.endswith("weight") else first
    both, other = np.ones(shape, np.float32), np.ones(second, np.float32)
    given = [both[: first[0]], other] + ([shape] if "_" in operation else [])
    with says(ValueError, f"out overlaps {'grad' if operation.endswith('input') else 'x'} in memory"):
        OPERATIONS[operation].function(*given, out=both)


@pytest.mark.parametrize("name", ["conv2d", "conv1d"])
def test_they_are_called_as_pytorchs(name: str) -> None:
    """All but the order of a gradient's arrays."""
    axes = int(name[4])
    x, w = torch.randn(2, 4, *(8, 9)[:axes]), torch.randn(6, 2, *(3, 3)[:axes])
    how = ((2, 2), (1, 0), (1, 1), 2) if axes == 2 else (2, 1, 1, 2)
    y = getattr(torch.nn.functional, name)(x, w, None, *how)
    grad = torch.randn_like(y)
    functions = [OPERATIONS[each].function for each in (name, f"{name}_input", f"{name}_weight")]
    theirs = getattr(torch.nn.grad, f"{name}_input"), getattr(torch.nn.grad, f"{name}_weight")
    torch.testing.assert_close(functions[0](x, w, None, *how), y)
    torch.testing.assert_close(functions[1](grad, w, x.shape, *how), theirs[0](x.shape, w, grad, *how))
    torch.testing.assert_close(functions[2](x, grad, w.shape, *how), theirs[1](x, w.shape, grad, *how))


def test_gradients_pass_through_pytorchs_own() -> None:
    for name, shapes in (("conv2d", ((1, 1, 3, 3), (1, 1, 2, 2))), ("conv1d", ((1, 1, 4), (1, 1, 2)))):
        x, w = torch.ones(shapes[0]), torch.ones(shapes[1], requires_grad=True)
        for layout in LAYOUTS:
            w.grad = None
            OPERATIONS[name].function(x, w, layout=OPERATIONS[name].word(layout)).sum().backward()
            assert w.grad is not None and (w.grad == (4 if name == "conv2d" else 3)).all()
    x, grad = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 2, 4, 3), (2, 3, 2, 2)))
    torch.autograd.gradcheck(lambda x, grad: conv2d_weight(x, grad, (3, 2, 3, 2)), (x, grad))


@each_layout
def test_prepared_filters_serve_both_directions(
    layout: Layout, rng: np.random.Generator, fake_cupy: Any, host_device: HostDevice
) -> None:
    problem = replace(BACKWARD, padding=(1, 1, 1, 1), layout=layout)
    grad, w = draw(rng, problem)
    assert grad is not None and w is not None
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
    "name, arguments, layout",
    [
        ("conv2d_input", {"padding": 1}, "NCHW"),
        ("conv2d_input", {"padding": 1, "groups": 2}, "NHWC"),
        ("conv2d_input", {"stride": 2, "padding": (1, 0, 0, 1)}, "NHWC"),
        ("conv2d_input", {"padding": (1, 2), "groups": 2}, "CHWN"),
        ("conv2d_input", {"stride": (2, 1), "padding": 1}, "CHWN"),
        ("conv2d_weight", {"padding": 1}, "NCHW"),
        ("conv2d_weight", {"padding": 1, "groups": 4}, "NHWC"),
        ("conv2d_weight", {"stride": 2, "padding": (1, 0, 0, 1), "groups": 4}, "NHWC"),
        ("conv2d_weight", {"padding": (1, 2), "groups": 2}, "CHWN"),
        ("conv2d_weight", {"padding": (1, 2), "groups": 4, "algorithm": "depthwise_weight_split_k"}, "NHWC"),
    ],
)
def test_the_kernels_on_the_emulated_gpu(
    name: str, arguments: Any, layout: Any, rng: np.random.Generator, host_device: HostDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    emulated = EmulatedDevice()
    monkeypatch.setattr(launch, "open_device", lambda index: emulated)
    monkeypatch.setattr(choose, "ALGORITHMS", VARIANTS)
    function, filters = OPERATIONS[name].function, 6 if name == "conv2d_input" else 4
    x = rng.standard_normal(lay_out(layout, 2, 4, 7, 9), np.float32)
    w = rng.standard_normal(lay_out(layout, filters, 4 // arguments.get("groups", 1), 3, 3), np.float32)
    layer = {key: value for key, value in arguments.items() if key != "algorithm"} | {"layout": layout}
    grad = rng.standard_normal(conv2d(x, w, **layer).shape, np.float32)
    given, shape = ((grad, w), x.shape) if name == "conv2d_input" else ((x, grad), w.shape)
    found = function(*given, shape, layout=layout, device="cuda", **arguments)
    expected = function(*(each.astype(np.float64) for each in given), shape, **layer)
    assert relative_error(found, expected) < TOLERANCE
    assert emulated.memory == {}


@each_operation
def test_explain(operation: Operation, rng: np.random.Generator, host_device: HostDevice) -> None:
    for layout in LAYOUTS:
        problem = replace(operation.base, layout=layout)
        arrays = draw(rng, problem)
        shaped = {"dgrad": "input_shape", "wgrad": "weight_shape"}.get(problem.op)
        for device in (None, "cuda"):
            more = {shaped: operation.shape(problem)} if shaped else {}
            given = operation.lying(layout, arrays)
            told = explain(operation.function, *given, layout=operation.word(layout), device=device, **more)
            assert told.problem == problem and told.chosen
            assert explain(problem, device=device).chosen == told.chosen
        assert told.others or operation.signals
        more = {shaped: operation.shape(problem, tensors=True)} if shaped else {}
        given = operation.tensors(layout, arrays)
        told = explain(operation.function, *given, layout=operation.word(layout), **more)
        assert told.where == "PyTorch on the CPU"
        of_images = operation.name.replace("1d", "2d")
        assert told.chosen == f"torch.nn.{'grad' if shaped else 'functional'}.{of_images}" or operation.signals


def test_explain_of_gradients(host_device: HostDevice) -> None:
    with says(ValueError, "op='dgrad'", "has no activation"):
        explain(replace(BACKWARD, activation="relu"))
    with says(ValueError, "op='wgrad'", "the gradient of a layer's filters, has no activation"):
        explain(replace(WEIGHT, activation="relu"))
    told = explain(WEIGHT, device="cuda")
    assert told.chosen == "implicit_gemm_weight" and explain(WEIGHT).chosen == "im2col"
    assert "op='wgrad' is not the forward pass" in told.others["im2win_fused"]
    assert "a group has more than one channel" in told.others["depthwise_weight"][0]
    assert explain(replace(WEIGHT, k=4, groups=4), device="cuda").chosen == "depthwise_weight"


# The gradient of the filters.


def test_the_problem_names_its_operands() -> None:
    x, dy, dw = replace(WEIGHT, padding=(1, 0, 2, 0)).operands
    assert [each.role for each in (x, dy, dw)] == ["x", "dy", "dw"]
    assert (x.shape, dy.shape, dw.shape) == ((2, 4, 9, 8), (2, 6, 8, 9), (6, 4, 3, 2))
    assert [each.written for each in (x, dy, dw)] == [False, False, True]
    assert replace(WEIGHT, layout="NHWC").y_shape == (6, 3, 2, 4)
    assert replace(WEIGHT, layout="CHWN").y_shape == (4, 3, 2, 6)
    assert WEIGHT.terms == 2 * 7 * 7 and WEIGHT.flops == replace(WEIGHT, op="fprop").flops
    elements = 2 * 4 * 9 * 8 + 2 * 6 * 7 * 7 + 6 * 4 * 3 * 2
    assert WEIGHT.bytes == 4 * elements and replace(WEIGHT, accumulate=True).bytes == 4 * (elements + 6 * 4 * 3 * 2)
    assert str(WEIGHT).startswith("wgrad NCHW float32 2x4x9x8 k6 3x2")


@each_layout
@pytest.mark.parametrize("device", [None, "cuda"])
def test_the_gradient_of_the_bias(
    layout: Layout, device: Any, rng: np.random.Generator, host_device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated = EmulatedDevice()
    monkeypatch.setattr(launch, "open_device", lambda index: emulated)
    problem = replace(WEIGHT, k=10, layout=layout, padding=(1, 0, 2, 0))
    x, grad = draw(rng, problem)
    assert x is not None and grad is not None
    how: dict[str, Any] = {"padding": (1, 0, 2, 0), "layout": layout, "device": device, "grad_bias": True}
    axes = tuple(axis for axis in range(4) if axis != layout.index("C"))
    for _ in range(2):
        dw, db = conv2d_weight(x, grad, problem.y_shape, **how)
        assert relative_error(dw, oracle_conv(problem, x, grad, None)) < TOLERANCE
        assert db.shape == (10,) and db.dtype == np.float32
        assert relative_error(db, grad.sum(axes, dtype=np.float64)) < TOLERANCE
    none = x.take([], layout.index("N")), grad.take([], layout.index("N"))
    for part in conv2d_weight(*none, problem.y_shape, **how):
        assert not part.any()
    assert emulated.memory == {}


def test_the_gradient_of_the_bias_of_tensors(
    rng: np.random.Generator, torch_on_device: HostDevice, fake_cupy: Any
) -> None:
    x, grad = draw(rng, WEIGHT)
    assert x is not None and grad is not None
    expected = grad.sum((0, 2, 3), dtype=np.float64)
    for order in (torch.contiguous_format, torch.channels_last):
        tensors = [torch.from_numpy(each).contiguous(memory_format=order) for each in (x, grad)]
        for given in (tensors, [each[:1] for each in tensors], [each[0] for each in tensors]):
            dw, db = conv2d_weight(*given, (6, 4, 3, 2), grad_bias=True)
            assert dw.shape == (6, 4, 3, 2) and db.shape == (6,)
            if given is tensors:
                assert relative_error(db.numpy(), expected) < TOLERANCE
    dw, db = conv2d_weight(fake_cupy.asarray(x), fake_cupy.asarray(grad), WEIGHT.y_shape, grad_bias=True)
    assert relative_error(db.host, expected) < TOLERANCE
    signals = torch.randn(2, 4, 13), torch.randn(2, 6, 11)
    for given in (signals, [each.permute(0, 2, 1).contiguous().permute(0, 2, 1) for each in signals]):
        dw, db = conv1d_weight(*given, (6, 4, 3), grad_bias=True)
        assert relative_error(db.numpy(), signals[1].double().sum((0, 2)).numpy()) < TOLERANCE
        assert torch.equal(dw, conv1d_weight(*given, (6, 4, 3)))
    none = [fake_cupy.asarray(each[:0]) for each in (x, grad)]
    for part in conv2d_weight(*none, WEIGHT.y_shape, grad_bias=True):
        assert not part.host.any()  # new memory holds NaN here
    told = explain(conv2d_weight, x, grad, weight_shape=(6, 4, 3, 2), grad_bias=True, device="cuda")
    assert told.problem == replace(WEIGHT, bias=True)


@pytest.mark.parametrize("layout", ["NCW", "NWC", "CWN"])
def test_the_gradient_of_the_bias_of_signals(layout: Any, rng: np.random.Generator) -> None:
    order = {"NCW": (0, 1, 2), "NWC": (0, 2, 1), "CWN": (1, 2, 0)}[layout]
    shapes = [tuple(shape[axis] for axis in order) for shape in ((2, 4, 13), (2, 6, 11), (6, 4, 3))]
    x, grad = (rng.standard_normal(shape).astype(np.float32) for shape in shapes[:2])
    dw, db = conv1d_weight(x, grad, shapes[2], layout=layout, grad_bias=True)
    assert dw.shape == shapes[2] and db.shape == (6,)
    np.testing.assert_allclose(db, grad.sum((order.index(0), order.index(2))), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["NumPy", "PyTorch"])
def test_mistakes_with_the_gradient_of_the_bias(library: Any) -> None:
    def call(dtype: str = "float32", shape: Any = (6, 4, 3, 2), grad_bias: Any = True, of: Any = conv2d_weight) -> Any:
        x, grad = (library(np.ones(each, dtype)) for each in ((2, 4, 9, 8), (2, 6, 7, 7)))
        return of(x, grad, shape, grad_bias=grad_bias)

    assert call()[1].shape == (6,)
    with says(TypeError, "x has dtype complex64; supported are float32"):
        call("complex64")
    with says(TypeError, "x has dtype int8; gradients are of floating-point layers"):
        call("int8")
    # nothing is allocated before shapes have been compared
    with says(ValueError, "grad has shape (2, 6, 7, 7), but the output has (2, 274877906944, 7, 7)"):
        call(shape=(2**38, 4, 3, 2))
    with says(ValueError, "weight_shape has 3 dimensions"):
        call(shape=(6, 4, 3))
    for no in ("no", 1, None):
        with says(TypeError, f"grad_bias={no!r} is not True or False"):
            call(grad_bias=no)
        with says(TypeError, f"grad_bias={no!r} is not True or False"):
            call(grad_bias=no, of=lambda *given, **how: explain(conv2d_weight, *given, **how))
    with says(TypeError, "grad_bias is taken for arrays of NumPy, CuPy and PyTorch only"):
        conv2d_weight([1.0], np.ones((2, 6, 7, 7), np.float32), (6, 4, 3, 2), grad_bias=True)


@each_layout
def test_images_without_a_batch(layout: Layout, rng: np.random.Generator, torch_on_device: HostDevice) -> None:
    problem = replace(WEIGHT, n=1, layout=layout)
    x, grad = draw(rng, problem)
    assert x is not None and grad is not None
    axis = layout.index("N")
    alone = x.take(0, axis), grad.take(0, axis)
    expected = oracle_conv(problem, x, grad, None)
    assert relative_error(conv2d_weight(*alone, problem.y_shape, layout=layout), expected) < TOLERANCE
    without = {"NCHW": (0, 1, 2), "NHWC": (2, 0, 1), "CHWN": (0, 1, 2)}[layout]
    tensors = [torch.from_numpy(np.ascontiguousarray(each)).permute(without) for each in alone]
    found = conv2d_weight(*tensors, (6, 4, 3, 2), layout=layout)
    assert found.shape == (6, 4, 3, 2) and relative_error(in_memory(layout, found), expected) < TOLERANCE
    if layout == "NCHW":
        assert conv1d_weight(torch.randn(4, 13), torch.randn(6, 11), (6, 4, 3)).shape == (6, 4, 3)


# Signals.


def test_strange_signals_and_out(rng: np.random.Generator, fake_cupy: Any) -> None:
    operation = OPERATIONS["conv1d"]
    arrays = draw(rng, operation.base)
    x, w, _ = operation.lying("NCHW", arrays)
    expected = by_pytorch(operation.base, arrays)[:, :, 0]
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
