"""conv3d and conv_transpose3d of leanconv.torch: values, derivatives, memory formats, transforms, modules; and patched.

On the CPU PyTorch itself computes, in float64 too; on `torch_on_device` leanconv's calls for a GPU run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes  # noqa: F401 - so that NumPy knows bfloat16
import pytest

from tests.messages import says
from tests.stand_ins import HostDevice

torch = pytest.importorskip("torch")

import leanconv.torch as ours  # noqa: E402
from leanconv import ConvProblem, prepare_weights  # noqa: E402
from leanconv.call.precompile import PrecompileResult  # noqa: E402
from leanconv.torch import comparing, measured_time, patch, recording  # noqa: E402

F = torch.nn.functional
ops = torch.ops.leanconv
FORMS = torch.contiguous_format, torch.channels_last_3d
#: stride, padding, dilation, groups, precision
OPTIONS = (2, 1, 2), (1, 0, 1, 1, 2, 1), (1, 2, 1), 2, "fp32", False
#: filters; with those of one slice, or one row and column, a layer is one of images
WINDOWS = (2, 3, 2), (1, 3, 3), (3, 1, 1)


def tensors(dtype: Any = torch.float64, form: Any = torch.contiguous_format) -> tuple[Any, ...]:
    """x, w, bias, and a gradient of the result of `OPTIONS`."""
    generator = torch.Generator().manual_seed(13)
    shapes = (2, 4, 4, 5, 6), (6, 2, 2, 3, 2), (6,), (2, 6, 2, 3, 4)
    x, w, bias, grad = (torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes)
    x, w, grad = (each.contiguous(memory_format=form) for each in (x, w, grad))
    return tuple(each.requires_grad_() for each in (x, w, bias, grad))


def plain(x: Any, w: Any, bias: Any) -> Any:
    return ours.operators.conv3d(x, w, bias, *OPTIONS)


def expected(x: Any, w: Any, bias: Any) -> Any:
    return F.conv3d(F.pad(x, (2, 1, 1, 1, 1, 0)), w, bias, (2, 1, 2), 0, (1, 2, 1), 2)


@pytest.mark.parametrize("form", FORMS)
def test_operators_are_what_pytorch_takes_them_for(form: Any) -> None:
    x, w, bias, grad = tensors(form=form)
    for operator, given in (
        (ops.conv3d, (x, w, bias)),
        (ops.conv3d_input, (grad, w, None, list(x.shape))),
        (ops.conv3d_weight, (x, grad, list(w.shape))),
    ):
        torch.library.opcheck(operator.default, (*given, *OPTIONS))


@pytest.mark.parametrize("way", [plain, lambda *given: ops.conv3d(*given, *OPTIONS)], ids=["plain", "operator"])
def test_derivatives(way: Any) -> None:
    x, w, bias, grad = tensors()
    assert torch.autograd.gradcheck(way, (x, w, bias), fast_mode=True)
    assert torch.autograd.gradgradcheck(way, (x, w, bias), fast_mode=True)
    torch.testing.assert_close(way(x, w, bias), expected(x, w, bias))

    def transposed(grad: Any, w: Any, bias: Any = None) -> Any:
        return ours.conv_transpose3d(grad, w, bias, (2, 1, 2), 1, (1, 0, 1), 2)

    bias = torch.randn(x.shape[1], dtype=x.dtype, requires_grad=True)
    assert torch.autograd.gradcheck(transposed, (grad, w, bias), fast_mode=True)
    assert torch.autograd.gradgradcheck(transposed, (grad, w, bias), fast_mode=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", WINDOWS)
def test_values_and_gradients_on_a_device(torch_on_device: HostDevice, window: Any, form: Any) -> None:
    generator = torch.Generator().manual_seed(17)
    x, w, bias = (torch.randn(s, generator=generator) for s in ((2, 4, 4, 5, 6), (6, 2, *window), (6,)))
    x, w, bias = x.contiguous(memory_format=form).requires_grad_(), w.requires_grad_(), bias.requires_grad_()
    given = dict(stride=(1, 1, 1), padding=tuple(taps // 2 for taps in window), groups=2)
    y = ours.conv3d(x, w, bias, **given)
    assert y.is_contiguous(memory_format=form)
    grads = torch.autograd.grad(y.square().sum(), (x, w, bias))
    assert len(torch_on_device.launches) == 3
    theirs = F.conv3d(x, w, bias, **given)
    for one, other in zip(
        (y, *grads), (theirs, *torch.autograd.grad(theirs.square().sum(), (x, w, bias))), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
    alone = ours.conv3d(x[0], w, bias, padding="same" if 2 not in window else 1, groups=2)
    torch.testing.assert_close(alone, F.conv3d(x[0], w, bias, padding="same" if 2 not in window else 1, groups=2))


@pytest.mark.parametrize("form", FORMS)
def test_volumes_are_read_in_place(torch_on_device: HostDevice, form: Any) -> None:
    x, w, *_ = (each.detach() for each in tensors(torch.float32, form))
    ours.conv3d(x, w, padding=1, groups=2)
    (_, values), *_ = torch_on_device.launches
    assert values["x"] == x.data_ptr()


def test_transposed_layers_have_every_size_that_strides_leave_open(torch_on_device: HostDevice) -> None:
    x, w, bias = torch.randn(1, 4, 2, 3, 2), torch.randn(4, 3, 2, 3, 3), torch.randn(3)
    for stride, padding, more, dilation in (
        ((2, 1, 3), 0, (1, 0, 2), 1), (1, (0, 1, 1), 0, (2, 1, 2)), ((1, 2, 2), 1, (1, 1, 1), (2, 2, 2)),
    ):  # fmt: skip
        given = x, w, bias, stride, padding, more, 1, dilation
        torch.testing.assert_close(ours.conv_transpose3d(*given), F.conv_transpose3d(*given), rtol=1e-4, atol=1e-4)
        given = x[0], *given[1:]
        torch.testing.assert_close(ours.conv_transpose3d(*given), F.conv_transpose3d(*given), rtol=1e-4, atol=1e-4)


def test_modules_are_pytorchs_with_our_arithmetic(torch_on_device: HostDevice) -> None:
    x = torch.randn(2, 4, 3, 5, 6)
    for mine, theirs in (
        (ours.Conv3d(4, 6, (1, 3, 3), padding=1, padding_mode="circular"), torch.nn.Conv3d),
        (ours.Conv3d(4, 6, 3, stride=2, padding="valid", groups=2, precision="ieee"), torch.nn.Conv3d),
        (ours.ConvTranspose3d(4, 6, 3, stride=2, padding=1), torch.nn.ConvTranspose3d),
    ):
        more = {"padding_mode": "circular"} if getattr(mine, "padding_mode", "zeros") == "circular" else {}
        other = theirs(4, 6, mine.kernel_size, mine.stride, mine.padding, groups=mine.groups, **more)
        other.load_state_dict(mine.state_dict())
        torch.testing.assert_close(mine(x), other(x), rtol=1e-4, atol=1e-4)
    sized = ours.ConvTranspose3d(4, 6, 3, stride=2)
    assert sized(x, output_size=(8, 12, 14)).shape == (2, 6, 8, 12, 14)


def test_transforms_and_forward_derivatives() -> None:
    x, w, bias, _ = (each.detach() for each in tensors())
    many = torch.stack([x, 2 * x])
    mapped = torch.func.vmap(lambda one: plain(one, w, bias))(many)
    torch.testing.assert_close(mapped, torch.stack([expected(x, w, bias), expected(2 * x, w, bias)]))
    each = torch.func.vmap(lambda one, filters: plain(one, filters, None))(many, torch.stack([w, w + 1]))
    torch.testing.assert_close(each[1], expected(2 * x, w + 1, None))
    _, tangent = torch.func.jvp(lambda b: plain(x, w, b), (bias,), (torch.ones_like(bias),))
    torch.testing.assert_close(tangent, torch.ones_like(tangent))


def test_autocast_computes_in_the_lower_precision(torch_on_device: HostDevice) -> None:
    x, w, bias, _ = (each.detach() for each in tensors(torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        y = ours.conv3d(x, w, bias, groups=2)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), F.conv3d(x, w, bias, groups=2), rtol=3e-2, atol=0.1)


def test_packed_weights_are_taken_without_gradients(torch_on_device: HostDevice) -> None:
    x, w, bias, _ = (each.detach() for each in tensors(torch.float32))
    y = ours.conv3d(x, prepare_weights(w), bias, padding=1, groups=2)
    torch.testing.assert_close(y, F.conv3d(x, w, bias, padding=1, groups=2), rtol=1e-4, atol=1e-4)


def test_a_model_of_volumes_is_warmed_up_and_compiled_without_a_break() -> None:
    model = torch.nn.Sequential(ours.Conv3d(4, 6, 3, padding=1), torch.nn.ReLU(), ours.Conv3d(6, 4, (1, 3, 3)))
    x = torch.randn(1, 4, 3, 6, 6)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))


def test_mistakes_are_named() -> None:
    x, w, *_ = (each.detach() for each in tensors(torch.float32))
    with says(ValueError, "input has 3 dimensions", "it must have 5, or 4 without a batch"):
        ours.conv3d(x[0, 0], w)
    with says(ValueError, "weight has 4 dimensions"):
        ours.conv3d(x, w[0])
    with says(ValueError, "stride=(1, 2)", "or three: (depth, vertical, horizontal)"):
        ours.conv3d(x, w, stride=(1, 2), groups=2)
    with says(ValueError, "weight has 6 channels, but input has 4"):
        ours.conv_transpose3d(x, w)
    with says(ValueError, "the output would be 1x-1x2"):
        ours.conv_transpose3d(torch.ones(1, 6, 1, 1, 1), w[:, :, :1, :1], padding=(0, 1, 0))


class Clip(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Layers as networks for videos have them: whole, factorised, strided, and one that makes volumes larger."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv3d(3, 8, 3, (1, 2, 2), padding=1)
        self.rows = torch.nn.Conv3d(8, 6, (1, 3, 3), padding=(0, 1, 1), bias=False)
        self.slices = torch.nn.Conv3d(6, 4, (3, 1, 1), padding=(1, 0, 0), groups=2)
        self.up = torch.nn.ConvTranspose3d(4, 2, 2, stride=2)

    def forward(self, x: Any) -> Any:
        return self.up(self.slices(self.rows(torch.relu(self.stem(x)))))


def gradients(model: Any, x: Any) -> list[Any]:
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = model(x)
    return [y, *torch.autograd.grad(y.float().square().mean(), [x, *model.parameters()])]


@pytest.mark.parametrize("form", FORMS)
def test_a_patched_network_of_volumes(device: HostDevice, form: Any) -> None:
    model, x = Clip().to(memory_format=form), torch.randn(2, 3, 4, 6, 8).contiguous(memory_format=form)
    expected = gradients(model, x)
    with ours.enable(model) as taken:
        got = gradients(model, x)
        assert len(device.launches) == 12, "four layers of three operations"
        compiled = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), x)
        assert len(device.launches) == 24
        for one, two, other in zip(got, compiled, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(two, one)
            # as on CUDA; on the CPU PyTorch's order depends on its threads: with one, small layers lie channels first
            assert one.dim() < 5 or one.stride() == torch.empty_like(one, memory_format=form).stride()
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(model(x), expected[0], rtol=1e-4, atol=1e-5)
    lines = taken.report().taken
    assert {(line.layer, line.when) for line in lines} == {
        (layer, when) for layer in ("stem", "rows", "slices", "up")
        for when in ("forward", "backward, input", "backward, filters")
    }  # fmt: skip
    assert all("NCDHW" in line.problem if form is FORMS[0] else "NDHWC" in line.problem for line in lines)


def test_filters_of_volumes_are_packed_once(device: HostDevice) -> None:
    """Also those that autocast has cast."""
    layer, x = torch.nn.Conv3d(16, 32, 3, padding=1), torch.randn(2, 16, 4, 6, 8)
    x = x.contiguous(memory_format=torch.channels_last_3d)
    expected = layer(x).detach()
    with ours.enable(layer) as taken, torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
        kept, prepared = taken.report().packed_bytes, device.prepared
        layer(x)
        assert kept > 0 and device.prepared == prepared
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(3):
                torch.testing.assert_close(layer(x).float(), expected, rtol=3e-2, atol=3e-2)
        assert taken.report().packed_bytes > kept
    assert {"bfloat16" in line.problem for line in taken.report().taken} == {True, False}


def test_what_pytorch_takes_for_volumes_is_looked_up_as_volumes(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes them as volumes, whatever leanconv computes them as."""
    asked: list[Any] = []
    monkeypatch.setattr(comparing.tables, "peer_us", lambda problem, target, engine: asked.append(problem))
    monkeypatch.setattr(patch, "pytorch_cycles", lambda problem, target, tf32: asked.append(problem) or 1e12)
    x, w = torch.randn(2, 4, 3, 5, 6), torch.randn(6, 4, 3, 1, 1)
    with ours.enable() as taken, torch.no_grad():
        F.conv3d(x, w)
    assert taken.report().taken and asked and all((each.d, each.t, each.h) == (3, 3, 5) for each in asked)


def test_volumes_are_timed_by_pytorchs_convolution_of_volumes(monkeypatch: pytest.MonkeyPatch) -> None:
    randn = torch.randn
    cpu = lambda shape, generator, device: randn(shape, generator=generator)  # noqa: E731
    monkeypatch.setattr(measured_time.torch, "Generator", lambda device: torch._C.Generator())
    monkeypatch.setattr(measured_time.torch, "randn", cpu)
    layer = ConvProblem(2, 4, 5, 6, 6, 3, 3, padding=(1, 1, 1, 1), d=4, t=3, padding_d=(2, 0), layout="NHWC", bias=True)
    y = measured_time._call(layer, 1)()
    assert y.shape == (2, 6, 4, 5, 6) and y.is_contiguous(memory_format=torch.channels_last_3d)
    dx = measured_time._call(replace(layer, op="dgrad", bias=False), 1)()
    dw = measured_time._call(replace(layer, op="wgrad", bias=False), 1)()
    assert dx.shape == (2, 4, 4, 5, 6) and dw.shape == (6, 4, 3, 3, 3)


def test_layers_of_volumes_are_found_and_warmed_up(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(
        recording, "precompile", lambda problems, **how: compiled.extend(problems) or PrecompileResult(0, 0, 0, 0.0)
    )
    model = Clip().to(memory_format=torch.channels_last_3d)
    (x,) = recording.example_of([(2, 3, 4, 6, 8)], model)
    assert x.normal_().is_contiguous(memory_format=torch.channels_last_3d)
    ours.warm_up(model, x)
    with ours.enable(model) as taken:
        gradients(model, x)
    ran = {line.problem for line in taken.report().taken}
    assert len(ran - {str(each) for each in compiled}) == 1, "the gradient of the first layer's input"
    found = recording.problems_of(model, x)
    assert all(each.is_volume and each.layout == "NHWC" for problems in found.values() for each in problems)
