"""leanconv.torch's operators, functions and modules: values, derivatives, and what PyTorch does to them.

On the CPU PyTorch itself computes, in float64 too; on `torch_on_device` leanconv's calls for a GPU run.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest

from tests.messages import says
from tests.stand_ins import HostDevice

torch = pytest.importorskip("torch")

import leanconv.torch as ours  # noqa: E402
from leanconv import options  # noqa: E402

F = torch.nn.functional
ops = torch.ops.leanconv
FORMS = torch.contiguous_format, torch.channels_last
#: stride, padding, dilation, groups, precision
OPTIONS = (1, 2), (1, 0, 2, 1), (1, 1), 2, "fp32", False
FUNCTIONS = "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"


def tensors(dtype: Any = torch.float64, form: Any = torch.contiguous_format) -> tuple[Any, ...]:
    """x, w, bias, and a gradient of the result of `OPTIONS`."""
    generator = torch.Generator().manual_seed(11)
    shapes = (2, 4, 6, 5), (6, 2, 3, 3), (6,), (2, 6, 5, 3)
    x, w, bias, grad = (torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes)
    x, grad = (each.contiguous(memory_format=form) for each in (x, grad))
    return tuple(each.requires_grad_() for each in (x, w, bias, grad))


def plain(x: Any, w: Any, bias: Any) -> Any:
    return ours.operators.conv2d(x, w, bias, *OPTIONS)


def expected(x: Any, w: Any, bias: Any) -> Any:
    return F.conv2d(F.pad(x, (2, 1, 1, 0)), w, bias, (1, 2), groups=2)


@pytest.mark.parametrize("form", FORMS)
def test_operators_are_what_pytorch_takes_them_for(form: Any) -> None:
    x, w, bias, grad = tensors(form=form)
    for operator, given in (
        (ops.conv2d, (x, w, bias)),
        (ops.conv2d_input, (grad, w, None, list(x.shape))),
        (ops.conv2d_input, (grad, w, torch.ones(4, dtype=x.dtype, requires_grad=True), list(x.shape))),
        (ops.conv2d_weight, (x, grad, list(w.shape))),
    ):
        torch.library.opcheck(operator.default, (*given, *OPTIONS))


@pytest.mark.parametrize("way", [plain, lambda *given: ops.conv2d(*given, *OPTIONS)], ids=["plain", "operator"])
def test_derivatives(way: Any) -> None:
    x, w, bias, grad = tensors()
    assert torch.autograd.gradcheck(way, (x, w, bias)) and torch.autograd.gradgradcheck(
        way, (x, w, bias), fast_mode=True
    )
    torch.testing.assert_close(way(x, w, bias), expected(x, w, bias))

    def transposed(grad: Any, w: Any, bias: Any = None) -> Any:
        return ours.conv_transpose2d(grad, w, bias, (1, 2), 1, (0, 1), 2)

    bias = torch.randn(x.shape[1], dtype=x.dtype, requires_grad=True)
    assert torch.autograd.gradcheck(transposed, (grad, w, bias))
    assert torch.autograd.gradgradcheck(transposed, (grad, w), fast_mode=True)
    assert torch.autograd.gradgradcheck(transposed, (grad, w, bias), fast_mode=True)


@pytest.mark.parametrize("form", FORMS)
def test_derivatives_on_a_device(torch_on_device: HostDevice, form: Any) -> None:
    """Sums of products: differences of any width are right, so float32 is enough."""
    x, w, bias, _ = tensors(torch.float32, form)
    options = {"eps": 0.25, "atol": 1e-3, "rtol": 1e-3, "nondet_tol": 0.0, "check_undefined_grad": False}
    # PyTorch warns of float32, which is all that a GPU has
    with pytest.warns(UserWarning, match="double precision"):
        assert torch.autograd.gradcheck(plain, (x, w, bias), fast_mode=True, **options)
        assert torch.autograd.gradgradcheck(plain, (x, w, bias), fast_mode=True, **options)
    assert torch_on_device.launches
    y = plain(x, w, bias)
    grads = torch.autograd.grad(y.sum(), (x, w, bias))
    assert y.is_contiguous(memory_format=form)
    theirs = torch.autograd.grad(expected(x, w, bias).sum(), (x, w, bias))
    for one, other in zip((y, *grads), (expected(x, w, bias), *theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_pytorchs_own_samples(name: str, device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("expecttest", reason="PyTorch's samples need it")
    # what the import forbids for good: to set flags of backends
    monkeypatch.setattr(torch.backends, "disable_global_flags", lambda: None)
    from torch.testing._internal.common_methods_invocations import op_db

    (info,) = (each for each in op_db if each.name == f"nn.functional.{name}")
    for sample in info.sample_inputs("cpu", torch.float32, requires_grad=True):
        given = [sample.input, *sample.args]
        wanted = [each for each in given if each is not None]

        def results(module: Any, given: Any = given, wanted: Any = wanted, sample: Any = sample) -> Any:
            y = getattr(module, name)(*given, **sample.kwargs)
            return y, *torch.autograd.grad(y.square().sum(), wanted)

        expected = results(F)
        with ours.enable():
            taken = results(F)
        for theirs, mine, taken_over in zip(expected, results(ours), taken, strict=True):
            most = 1e-2 if "3d" in name else 1e-3  # of longer sums
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=most)
            torch.testing.assert_close(taken_over, theirs, rtol=1e-4, atol=most, check_stride=True)
    assert len(device.launches) > 20 and len(ours.report().taken) in (2, 3)
    if info.error_inputs_func is not None:
        for error in info.error_inputs("cpu"):
            sample = error.sample_input
            with pytest.raises((ValueError, TypeError, RuntimeError)):
                getattr(ours, name)(sample.input, *sample.args, **sample.kwargs)


@pytest.mark.parametrize("axes", [a for a in itertools.product((0, None), repeat=3) if a != (None, None, None)])
def test_vmap(axes: Any) -> None:
    x, w, bias, _ = tensors()
    given = [each if axis is None else torch.stack([each, 2 * each, -each]) for each, axis in zip((x, w, bias), axes)]  # noqa: B905

    def derivatives(function: Any) -> Any:
        return torch.func.grad(lambda *given: function(*given).pow(2).sum(), argnums=(0, 1, 2))

    for wrap in lambda function: function, derivatives:
        got, theirs = (torch.vmap(wrap(function), axes)(*given) for function in (plain, expected))
        torch.testing.assert_close(got, theirs)
    operator = torch.vmap(lambda *given: ops.conv2d(*given, *OPTIONS), axes)(*given)
    torch.testing.assert_close(operator, torch.vmap(expected, axes)(*given))


class Net(torch.nn.Module):
    """The same layers of PyTorch's modules or of ours."""

    def __init__(self, nn: Any) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding="same", padding_mode="circular")
        self.b = nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=4, bias=False)
        self.c = nn.Conv1d(8, 4, 3, padding=1, dilation=2, padding_mode="reflect")
        self.d = nn.ConvTranspose2d(4, 2, 3, stride=2)
        self.e = nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1)

    def forward(self, x: Any) -> Any:
        x = self.b(self.a(x).relu())
        x = self.of_rows(self.c, x)
        x = self.d(x, output_size=(12, 7))
        return self.of_rows(self.e, x, output_size=(14,))

    @staticmethod
    def of_rows(signals: Any, x: Any, **options: Any) -> Any:
        """The rows of an image are so many signals: one batch."""
        rows = signals(x.transpose(1, 2).flatten(0, 1), **options)
        return rows.unflatten(0, (-1, x.shape[2])).transpose(1, 2)


def test_modules() -> None:
    torch.manual_seed(4)
    theirs, mine, x = Net(torch.nn), Net(ours), torch.randn(2, 3, 9, 10, requires_grad=True)
    mine.load_state_dict(theirs.state_dict())
    for one, other in zip(mine.children(), theirs.children(), strict=True):
        assert isinstance(one, type(other)) and repr(one) == repr(other)
    assert "precision='ieee'" in repr(ours.Conv2d(3, 4, 3, precision="ieee"))
    results = [(y := net(x), *torch.autograd.grad(y.sum(), [x, *net.parameters()])) for net in (mine, theirs)]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    assert copy.deepcopy(mine).a.precision == "fp32"


@pytest.mark.parametrize(
    "name", ["Conv1d", "Conv2d", "Conv3d", "CausalConv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]
)
def test_modules_are_made_where_asked(name: str) -> None:
    kind = getattr(ours, name)
    made = torch.nn.utils.skip_init(kind, 3, 4, 3, precision="ieee", dtype=torch.float64)
    assert made.weight.dtype == torch.float64 and made.weight.device.type == "cpu" and made.precision == "ieee"
    assert kind(3, 4, 3, device="meta").weight.is_meta


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_a_compiled_graph_has_no_break(dynamic: bool) -> None:
    net = Net(ours)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for batch in (2, 3):
        x = torch.randn(batch, 3, 9, 10, requires_grad=True)
        results = [torch.autograd.grad(each(x).square().sum(), [x, *net.parameters()]) for each in (compiled, net)]
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)


def test_autocast() -> None:
    x, w, bias, _ = tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, theirs = plain(x, w, bias), expected(x, w, bias)
        double = plain(*(each.double() for each in (x, w, bias)))
    assert y.dtype == torch.bfloat16 and double.dtype == torch.float64, "as PyTorch's: float64 stays"
    torch.testing.assert_close(y, theirs, rtol=2e-2, atol=2e-2)
    y.float().sum().backward()
    assert x.grad.dtype == w.grad.dtype == torch.float32


def test_what_users_get_wrong(torch_on_device: HostDevice) -> None:
    x, w, bias, _ = tensors(torch.float32)
    y = plain(x, w, bias)
    with torch.no_grad():
        w.mul_(2)
    with says(RuntimeError, "modified by an inplace operation"):
        y.sum().backward()
    with says(TypeError, "weight has dtype float16 and input float32; they must be the same"):
        ours.conv2d(x, w.half(), groups=2)
    with says(TypeError, "int8; leanconv.torch takes floating-point numbers"):
        ours.conv2d(x.detach().to(torch.int8), w.detach().to(torch.int8), groups=2)
    with says(ValueError, "output_padding=(2, 2) must be less than stride=(2, 2)"):
        ours.conv_transpose2d(x, w[:4], stride=2, output_padding=2)
    with says(ValueError, "stride=-1 is below 1"):
        ours.conv_transpose2d(x, w[:4], stride=-1)
    with says(TypeError, "input is of type ndarray; leanconv.torch takes tensors of PyTorch, leanconv.conv2d"):
        ours.conv2d(x.detach().numpy(), w)  # type: ignore[arg-type]
    with says(ValueError, "precision='fpp'"):
        ours.Conv2d(3, 8, 3, precision="fpp")  # type: ignore[arg-type]
    with says(ValueError, "weight has 6 channels, but input has 4"):
        ours.conv_transpose2d(x, w)
    with says(ValueError, "stride=(1, 2, 3) must be an integer or two"):
        ours.conv2d(x, w, stride=(1, 2, 3), groups=2)
    with says(ValueError, "padding='same' needs stride=1"):
        ours.conv2d(x, w, stride=2, padding="same", groups=2)


@pytest.mark.parametrize(
    ("name", "given", "error", "message"),
    [
        ("conv2d", {"stride": None}, TypeError, "stride=None is not an integer"),
        ("conv2d", {"dilation": 1.5}, TypeError, "dilation=1.5 is not an integer"),
        ("conv2d", {"padding": (1.5, 0)}, TypeError, "padding=1.5 is not an integer"),
        ("conv2d", {"weight": np.ones((4, 4, 3, 3), "f")}, TypeError, "weight is of type ndarray; it must be a tensor"),
        ("conv2d", {"bias": np.ones(4, "f")}, TypeError, "bias is of type ndarray; it must be a tensor"),
        ("conv2d", {"weight": torch.ones(3), "padding": "same"}, ValueError, "weight has 1 dimensions, shape (3,); it"),
        (
            "conv1d",
            {"input": torch.ones(2, 4, 9, 8)},
            ValueError,
            "input has 4 dimensions, shape (2, 4, 9, 8); it must",
        ),
        ("conv1d", {"stride": (1, 2)}, ValueError, "stride=(1, 2) must be an integer: there is one axis"),
        ("conv1d", {"stride": (1.5,)}, TypeError, "stride=1.5 is not an integer"),
        ("conv1d", {"weight": torch.ones(4, 3, 3)}, ValueError, "in_channels=4 and groups=1, read as NCW: each filter"),
        ("conv1d", {"weight": torch.ones(4, 3, 3)}, ValueError, "weight has 3 channels, but input has in_channels=4"),
        ("conv1d", {"weight": torch.ones(4, 4, 3).double()}, TypeError, "weight has dtype float64 and input float32"),
        ("conv2d", {"weight": torch.ones(4, 3, 3, 3)}, ValueError, "weight has 3 channels, but input has in_channels"),
        ("conv2d", {"weight": torch.ones(4, 4, 3, 3).half()}, TypeError, "weight has dtype float16 and input float32"),
        ("conv_transpose2d", {"weight": torch.ones(4, 4, 3, 3).half()}, TypeError, "weight has dtype float16 and inpu"),
        ("conv1d", {"weight": torch.ones(4, 4, 19)}, ValueError, "19 taps with dilation 1 covers 19 samples"),
        ("conv1d", {"input": torch.ones(2, 4, 0)}, ValueError, "input has 2 signals of 4 channels and 0 samples"),
        (
            "conv_transpose1d",
            {"weight": torch.ones(4, 4)},
            ValueError,
            "weight has 2 dimensions, shape (4, 4); it must",
        ),
        (
            "conv_transpose2d",
            {"weight": torch.ones(4, 0, 3, 3)},
            ValueError,
            "weight has shape (4, 0, 3, 3); it must not",
        ),
        ("conv_transpose2d", {"input": torch.ones(2, 4, 0, 8)}, ValueError, "input has shape (2, 4, 0, 8); only its b"),
        ("conv_transpose1d", {"input": torch.ones(4, 0)}, ValueError, "input has shape (4, 0); only its batch may be"),
        ("conv_transpose2d", {"stride": (2, 1.5)}, TypeError, "stride=1.5 is not an integer"),
        ("conv_transpose2d", {"output_padding": (0.5, 0)}, TypeError, "output_padding=0.5 is not an integer"),
        ("conv_transpose2d", {"output_padding": -1}, ValueError, "output_padding=-1 is below 0"),
        ("conv_transpose2d", {"groups": None}, TypeError, "groups=None is not an integer"),
        ("conv_transpose2d", {"groups": 3}, ValueError, "in_channels=4 is not divisible by groups=3"),
        ("conv_transpose2d", {"padding": 9}, ValueError, "the output would be -7x-8 for input of shape (2, 4, 9, 8)"),
        ("conv_transpose2d", {"bias": torch.ones(1)}, ValueError, "bias has shape (1,); it must have shape (4,)"),
        ("conv_transpose2d", {"bias": torch.tensor(1.0)}, ValueError, "bias has shape (); it must have shape (4,)"),
        ("conv_transpose2d", {"bias": torch.ones(4, 1)}, ValueError, "bias has shape (4, 1); it must have shape (4,)"),
        (
            "conv_transpose2d",
            {"bias": torch.ones(4).double()},
            TypeError,
            "bias has dtype torch.float64 and input torch",
        ),
    ],
)
def test_a_refusal_names_the_argument(name: str, given: Any, error: Any, message: str) -> None:
    x, w = (torch.ones(each) for each in (((2, 4, 9), (4, 4, 3)) if "1d" in name else ((2, 4, 9, 8), (4, 4, 3, 3))))
    with pytest.raises((RuntimeError, TypeError)):  # PyTorch refuses it too
        getattr(F, name)(**{"input": x, "weight": w, **given})
    with says(error, message):
        getattr(ours, name)(**{"input": x, "weight": w, **given})


@pytest.mark.parametrize("more", [{}, {"activation": "relu"}])
def test_signals_with_padding_of_their_own_left_and_right(more: Any) -> None:
    x, w = torch.randn(2, 4, 9), torch.randn(6, 4, 3)
    expected = F.conv1d(F.pad(x, (2, 0)), w, dilation=2)
    torch.testing.assert_close(
        ours.conv1d(x, w, padding=(2, 0), dilation=2, **more), expected.relu() if more else expected
    )


def arrays_for(name: str) -> tuple[Any, Any]:
    axes = int(name[-2])
    return torch.randn(2, 4, *(9, 8, 7)[:axes]), torch.randn(4, 4, *(3,) * axes)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_in_every_form_that_pytorch_takes(name: str) -> None:
    x, w = arrays_for(name)
    many = [[2], [np.int64(2)]] if "1d" in name else [[2, 1], (np.int64(2), 2), torch.Size([2, 2])]
    many = [[2, 1, 2], (np.int64(2), 2, 1), torch.Size([2, 2, 2])] if "3d" in name else many
    for stride in (np.int64(2), (2,), *many):
        mine, theirs = (getattr(module, name)(x, w, stride=stride) for module in (ours, F))
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("shape", "window", "stride", "padding", "output_padding", "dilation"),
    [
        ((2, 1), (1, 1), (2, 1), 1, (1, 2), 3),  # a column that only the output padding has
        ((1, 1), (1, 2), (1, 1), (0, 3), (0, 3), (1, 4)),
        ((3, 2), (2, 3), (1, 2), (1, 0), (2, 3), (3, 4)),
        ((3, 2), (2, 3), (1, 2), (3, 0), (2, 3), (3, 4)),
        ((2, 3), (3, 3), (3, 1), (0, 1), (2, 0), (1, 1)),
    ],
)
def test_output_padding_as_pytorchs(
    shape: Any, window: Any, stride: Any, padding: Any, output_padding: Any, dilation: Any
) -> None:
    generator = torch.Generator().manual_seed(2)
    x, w, bias = (
        torch.randn(each, dtype=torch.float64, generator=generator, requires_grad=True)
        for each in ((2, 4, *shape), (4, 3, *window), (6,))
    )
    results = []
    for module in (ours, F):
        y = module.conv_transpose2d(x, w, bias, stride, padding, output_padding, 2, dilation)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, w, bias))))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_gradient_keeps_only_what_it_needs(torch_on_device: HostDevice) -> None:
    x, w, bias, _ = tensors(torch.float32)
    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        plain(x.detach(), w, bias), plain(x, w.detach(), None), plain(x.detach(), w.detach(), bias)
    assert [each.shape for each in kept] == [x.shape, w.shape]
    before = len(torch_on_device.launches)
    plain(x.detach(), w, bias).sum().backward()
    assert len(torch_on_device.launches) - before == 2 and x.grad is None and bias.grad is not None


@pytest.mark.parametrize("given", [{}, {"stride": 2, "padding": 1}, {"stride": (2,), "padding": (1,), "dilation": 2}])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_warm_call_checks_no_number_again(
    name: str, given: Any, torch_on_device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = arrays_for(name)
    function = getattr(ours, name)
    expected = function(x, w, **given)
    monkeypatch.setattr(options, "_checked", None)
    if "transpose" not in name:
        torch.testing.assert_close(function(x, w, **given), expected)
