"""conv3d and conv_transpose3d of leanconv.torch: values, derivatives, memory formats, transforms, modules.

On the CPU PyTorch itself computes, in float64 too; on `torch_on_device` leanconv's calls for a GPU run.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401 - so that NumPy knows bfloat16
import pytest

from tests.messages import says
from tests.stand_ins import HostDevice

torch = pytest.importorskip("torch")

import leanconv.torch as ours  # noqa: E402
from leanconv import prepare_weights  # noqa: E402

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
