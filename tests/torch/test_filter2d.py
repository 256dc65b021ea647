"""leanconv.torch.filter2d: values, gradients of any order, adjoints, and what looks at calls."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import leanconv  # noqa: E402
import leanconv.torch as ours  # noqa: E402
from leanconv.images.borders import BORDERS  # noqa: E402
from tests.torch.versions import since  # noqa: E402

F = torch.nn.functional
#: Sizes of images and kernels, and anchors: odd and even, at an end, kernels larger than the image
SIZES = [
    ((5, 6), (3, 3), None), ((4, 5), (2, 4), (1, 0)), ((3, 4), (3, 1), (2, 0)), ((2, 3), (5, 8), (1, 6)),
    ((1, 1), (3, 2), None), ((2, 1), (1, 3), (0, 0)),
]  # fmt: skip
each_border = pytest.mark.parametrize("border", [*BORDERS])


def random(*shape: int, dtype: Any = torch.float64, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()


def by_definition(
    image: Any, kernel: Any, border: str, anchor: Any, value: float = 0, valid: bool = False
) -> Any:  # images (n, h, w) and kernels (f, kh, kw)
    """PyTorch's own operations, whose gradients are autograd's."""
    (kh, kw), x = kernel.shape[-2:], image
    if not valid:
        y0, x0 = (kh // 2, kw // 2) if anchor is None else anchor
        sides = (y0, kh - 1 - y0), (x0, kw - 1 - x0)
        if border == "constant":
            x = F.pad(x, (*sides[1], *sides[0]), value=value)
        else:
            for axis in (0, 1):
                places = np.pad(np.arange(x.shape[1 + axis]), sides[axis], mode=BORDERS[border].numpy)
                x = x.index_select(1 + axis, torch.from_numpy(places))
    return F.conv2d(x.unsqueeze(1), kernel.unsqueeze(1))


def gradients(y: Any, given: Any) -> Any:
    """Of the first and of the second order."""
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)
    first = torch.autograd.grad((y.pow(2) * weights).sum(), given, create_graph=True)
    second = torch.autograd.grad(sum(each.pow(2).sum() for each in first), given)
    return [y, *first, *second]


@pytest.mark.parametrize(("border", "value"), [("constant", 1.5), *((border, 0) for border in BORDERS)])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values_and_gradients_are_pytorchs(border: Any, value: float, sizes: Any) -> None:
    size, taps, anchor = sizes
    image, kernel = random(2, *size), random(3, *taps)
    y = ours.filter2d(image, kernel, border=border, anchor=anchor, value=value, channels_last=False)
    expected = by_definition(image, kernel, border, anchor, value)
    for mine, theirs in zip(gradients(y, (image, kernel)), gradients(expected, (image, kernel)), strict=True):
        torch.testing.assert_close(mine, theirs)


@each_border
def test_gradients_are_the_slopes_to_the_second_order(border: Any) -> None:
    image, kernel = random(1, 3, 4), random(2, 2, 3)

    def call(image: Any, kernel: Any) -> Any:
        return ours.filter2d(image, kernel, border=border, anchor=(0, 2), delta=1, value=2, channels_last=False)

    assert torch.autograd.gradcheck(call, (image, kernel), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (image, kernel), fast_mode=True)


def test_a_third_order() -> None:
    image, kernel = random(3, 3), random(2, 2)
    y = ours.filter2d(image, kernel)
    assert torch.equal(y, leanconv.filter2d(image.detach(), kernel.detach()))
    (first,) = torch.autograd.grad(y.pow(2).sum(), image, create_graph=True)
    assert torch.autograd.gradgradcheck(
        lambda image, kernel: torch.autograd.grad(ours.filter2d(image, kernel).pow(3).sum(), image, create_graph=True),
        (image, kernel),
    )
    assert first.requires_grad


@each_border
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_adjoint(border: Any, sizes: Any) -> None:
    """⟨filter(x), g⟩ = ⟨x, adjoint(g)⟩ = ⟨k, gradient by the kernel⟩."""
    size, taps, anchor = sizes
    image, kernel = random(*size), random(*taps)
    y = ours.filter2d(image, kernel, border=border, anchor=anchor)
    grad = random(*y.shape, seed=9).detach()
    back, weights = torch.autograd.grad(y, (image, kernel), grad)
    product = (y * grad).sum()
    torch.testing.assert_close((image * back).sum(), product)
    torch.testing.assert_close((kernel * weights).sum(), product)


@pytest.mark.parametrize(("border", "mode"), [("reflect101", "same"), ("replicate", "valid")])
@pytest.mark.parametrize(("last", "per_image", "several"), [*itertools.product([False, True], repeat=3)])
def test_every_form_is_that_of_single_planes(
    border: Any, last: bool, per_image: bool, several: bool, mode: Any
) -> None:
    image = random(2, 2, 4, 5, 2) if last else random(2, 2, 4, 5)
    kernel = random(*(2, 2) * per_image, *(2,) * several, 3, 2)
    options = {"border": border, "channels_last": last, "per_image": per_image, "mode": mode}
    y = ours.filter2d(image, kernel, **options)
    assert torch.equal(y, leanconv.filter2d(image.detach(), kernel.detach(), **options))
    rows = []
    for i, j in itertools.product(range(2), range(2)):
        planes = image[i, j].movedim(2, 0) if last else image[i, j][None]
        own = kernel[i, j] if per_image else kernel
        each = by_definition(planes, own if several else own[None], border, None, valid=mode == "valid")
        each = each.movedim(0, 3) if last else each[0]
        rows.append(each if several else each[0])
    expected = torch.stack(rows).reshape(y.shape)
    for mine, theirs in zip(gradients(y, (image, kernel)), gradients(expected, (image, kernel)), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("border", ["constant", "reflect"])
def test_other_types(dtype: Any, border: Any) -> None:
    """Sums are float32; gradients have the types of what they are of."""
    image, kernel = random(2, 6, 7, dtype=dtype), random(2, 3, 3, dtype=torch.float32)
    y = ours.filter2d(image, kernel, border=border)
    assert y.dtype == dtype
    image64, kernel64 = (each.detach().double().requires_grad_() for each in (image, kernel))
    expected = by_definition(image64, kernel64, border, None)
    grad = random(*y.shape, dtype=dtype)
    mine = torch.autograd.grad(y, (image, kernel), grad)
    theirs = torch.autograd.grad(expected, (image64, kernel64), grad.double())
    assert [each.dtype for each in mine] == [dtype, torch.float32]
    bound = 8 * torch.finfo(dtype).eps if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(mine[0].double(), theirs[0], rtol=bound, atol=bound)
    torch.testing.assert_close(mine[1].double(), theirs[1], rtol=1e-5, atol=1e-5)


def test_pictures_of_integers() -> None:
    picture = torch.arange(60, dtype=torch.uint8).reshape(4, 5, 3)
    kernel = random(3, 3, dtype=torch.float32)
    y = ours.filter2d(picture, kernel, dtype=torch.float32, channels_last=True)
    (mine,) = torch.autograd.grad(y.pow(2).sum(), kernel)
    planes = picture.movedim(2, 0).float()
    (theirs,) = torch.autograd.grad(by_definition(planes, kernel[None], "reflect101", None).pow(2).sum(), kernel)
    torch.testing.assert_close(mine, theirs)
    with pytest.raises(TypeError, match="the result would have dtype uint8, which has no gradient"):
        ours.filter2d(picture, kernel, channels_last=True)


def test_lists_and_what_cannot_be() -> None:
    image = random(4, 5)
    y = ours.filter2d(image, [[0.1, 0.2, 0.3]])
    expected = leanconv.filter2d(image.detach(), [[0.1, 0.2, 0.3]])
    assert torch.equal(y, expected)
    with torch.no_grad():
        assert torch.equal(ours.filter2d(image, [[0.1, 0.2, 0.3]]), expected)
    with pytest.raises(TypeError, match="image is of type ndarray"):
        ours.filter2d(image.detach().numpy(), [[1]])
    with pytest.raises(ValueError, match="channels_last=True filters it as a picture of 3 channels"):
        ours.filter2d(random(4, 5, 3), [[1]])
    with pytest.raises(ValueError, match="anchor=\\(3, 0\\) lies outside the 1x1 kernel"):
        ours.filter2d(image, [[1]], anchor=(3, 0))
    complex_one = torch.ones(1, 1, dtype=torch.complex64)
    for first, second, word in ((image, complex_one, "kernel"), (complex_one, image, "image")):
        with pytest.raises(TypeError, match=f"{word} has dtype complex64"):
            ours.filter2d(first, second)
    for weird in np.array([[1, 2], [3, 4]])[::-1], np.array([[1, 2.5]], ">f4"):
        assert torch.equal(ours.filter2d(image, weird), leanconv.filter2d(image.detach(), weird))
    for wrong, error, words in (
        (np.ones((1, 1)) * 1j, TypeError, "kernel has dtype complex128"),
        (None, TypeError, "kernel=None is no array"),
        ([[1], [1, 2]], ValueError, "kernel is a list whose rows are not alike"),
    ):
        with pytest.raises(error, match=words):
            ours.filter2d(image, wrong)
    with pytest.raises(ValueError, match="kernel lies on meta and image on cpu"):
        ours.filter2d(image, torch.ones(1, 1, device="meta"))
    with pytest.raises(ValueError, match="value=1e\\+39 is beyond float32"):
        ours.filter2d(image.float(), [[1]], border="constant", value=1e39)
    y = ours.filter2d(image, [[1, 0, 0]], border="constant", value=np.float32(3), delta=np.int8(1))
    assert (y[:, 0] == 4).all()


@pytest.mark.parametrize("shape", [(0, 4, 5), (2, 0, 5), (2, 4, 0)])
def test_empty_images(shape: Any) -> None:
    image, kernel = random(*shape), random(2, 3, 3)
    y = ours.filter2d(image, kernel, channels_last=False)
    dx, dk = torch.autograd.grad(y.sum(), (image, kernel))
    assert dx.shape == shape and not dk.any()


@since("2.13", "Dynamo cannot read the environment")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_has_no_breaks(dynamic: bool) -> None:
    def call(image: Any, kernel: Any) -> Any:
        return ours.filter2d(image, kernel, border="replicate", anchor=(0, 1), delta=0.5, channels_last=False).sin()

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for shape in ((2, 4, 5), (3, 6, 7)) if dynamic else ((2, 4, 5),):
        given = random(*shape), random(2, 3, 3)
        mine, theirs = ([f(*given), *torch.autograd.grad(f(*given).sum(), given)] for f in (compiled, call))
        torch.testing.assert_close(mine, theirs)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("shape", "other"), [((5, 6), (6, 5)), ((2, 5, 6), (4, 5, 3)), ((2, 3, 5, 6), (3, 2, 6, 5))])
def test_a_trace_is_one_for_any_size(shape: Any, other: Any) -> None:
    def call(image: Any, kernel: Any) -> Any:
        return ours.filter2d(image, kernel, channels_last=False)

    kernel = random(2, 3, 3)
    traced = torch.jit.trace(call, (random(*shape), kernel))
    assert [node.kind() for node in traced.inlined_graph.nodes()].count("leanconv::filter2d") == 1
    image = random(*other)
    torch.testing.assert_close(
        gradients(traced(image, kernel), (image, kernel)), gradients(call(image, kernel), (image, kernel))
    )


def test_the_operators_pass_pytorchs_own_checks() -> None:
    image, kernel = random(2, 4, 5), random(2, 3, 3)
    how = "reflect", [1, 1], False
    ops = torch.ops.leanconv
    torch.library.opcheck(ops.filter2d.default, (image, kernel, *how, 0, 1.5, torch.float64))
    torch.library.opcheck(ops.filter2d_image.default, (random(2, 2, 4, 5), kernel, *how, torch.float64))
    given = image, random(2, 2, 4, 5), [3, 3], *how, False, 0, torch.float64
    torch.library.opcheck(ops.filter2d_kernel.default, given)


def test_meta_tensors_have_shapes() -> None:
    image, kernel = (each.detach().to("meta").requires_grad_() for each in (random(2, 4, 5, 3), random(2, 3, 2)))
    y = ours.filter2d(image, kernel, channels_last=True, mode="valid")
    assert y.is_meta and y.shape == (2, 2, 2, 4, 3)
    y.sum().backward()
    assert image.grad.shape == image.shape and kernel.grad.shape == kernel.shape


@pytest.mark.parametrize("per_image", [False, True])
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (1, -1)])
def test_vmap(per_image: bool, axes: Any) -> None:
    shapes = (2, 4, 5), (*(2,) * per_image, 3, 2)
    image, kernel = (
        random(*shape) if axis is None else torch.stack([random(*shape, seed=i) for i in range(3)], axis)
        for shape, axis in zip(shapes, axes, strict=True)
    )

    def slopes(image: Any, kernel: Any) -> Any:
        def loss(image: Any, kernel: Any) -> Any:
            return ours.filter2d(image, kernel, per_image=per_image, channels_last=False).pow(2).sum()

        return torch.func.grad(loss, (0, 1))(image, kernel)

    mapped = torch.func.vmap(slopes, axes)(image, kernel)
    for i in range(3):
        given = (
            each if axis is None else each.select(axis, i) for each, axis in zip((image, kernel), axes, strict=True)
        )
        for mine, theirs in zip(mapped, slopes(*given), strict=True):
            torch.testing.assert_close(mine[i], theirs)


def test_other_ways_to_look_at_a_call() -> None:
    image, kernel = random(2, 4, 5), random(3, 3)
    traced = torch.fx.symbolic_trace(lambda image, kernel: ours.filter2d(image, kernel, channels_last=False))
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [ours.filter2d]
    torch.testing.assert_close(traced(image, kernel), ours.filter2d(image, kernel, channels_last=False))
    grads = random(3, 2, 4, 5).detach()
    y = ours.filter2d(image, kernel, channels_last=False)
    batch = torch.autograd.grad(y, (image, kernel), grads, is_grads_batched=True, retain_graph=True)
    for i, grad in enumerate(grads):
        for mine, theirs in zip(batch, torch.autograd.grad(y, (image, kernel), grad, retain_graph=True), strict=True):
            torch.testing.assert_close(mine[i], theirs)


def test_forward_mode_derivatives() -> None:
    image, kernel = random(2, 3, 4), random(2, 3)

    def call(image: Any, kernel: Any) -> Any:
        return ours.filter2d(image, kernel, border="constant", value=2, delta=1, channels_last=False)

    assert torch.autograd.gradcheck(call, (image, kernel), check_forward_ad=True, check_batched_grad=True)
    image, kernel = image.detach(), kernel.detach()
    for function in (lambda k: call(image, k).pow(3).sum(), lambda k: call(image, k).pow(2).sum()):
        hessian = torch.func.hessian(function)(kernel)
        torch.testing.assert_close(hessian, torch.autograd.functional.hessian(function, kernel))
        torch.testing.assert_close(torch.func.jacfwd(torch.func.jacfwd(function))(kernel), hessian)


@pytest.mark.parametrize(("border", "launches"), [("wrap", 1 + 2 + 1), ("reflect", 1 + 2 * (1 + 4) + 1)])
def test_on_a_device_the_gradients_are_launches(border: Any, launches: int, torch_on_device: Any) -> None:
    """Kernels read what autograd gives them: slices of gradients, expanded ones, mirrored weights. Each of two filters
    has a launch for the image, and one for each strip outside it."""
    image, kernel = random(2, 6, 7, dtype=torch.float32), random(2, 3, 3, dtype=torch.float32)
    y = ours.filter2d(image, kernel, border=border)
    mine = y, *torch.autograd.grad(y.sum(), (image, kernel), retain_graph=True)
    expected = by_definition(image, kernel, border, None)
    theirs = expected, *torch.autograd.grad(expected.sum(), (image, kernel))
    for own, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)
    assert len(torch_on_device.launches) == launches


#: channels last, a kernel for each image, several kernels
FORMS = (False, False, False), (True, False, True), (False, True, True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("border", "dtype", "form"),
    [
        *((border, torch.float32, form) for border in BORDERS for form in FORMS),
        *(("reflect", dtype, FORMS[1]) for dtype in (torch.float64, torch.float16, torch.bfloat16)),
    ],
)
def test_a_gpu_has_the_cpus_gradients(border: Any, dtype: Any, form: Any) -> None:
    last, per_image, several = form
    shape, taps = (2, 65, 70, 3) if last else (2, 65, 70), (*(2,) * per_image, *(3,) * several, 4, 7)
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    given = random(*shape, dtype=dtype).detach(), random(*taps, dtype=sums).detach()

    def slopes(*given: Any) -> Any:
        given = tuple(each.requires_grad_() for each in given)
        y = ours.filter2d(*given, border=border, per_image=per_image, channels_last=last)
        return y, *torch.autograd.grad(y, given, random(*y.shape, dtype=dtype).detach().to(y))

    expected = slopes(*(each.double() for each in given))
    bound = 64 * torch.finfo(dtype).eps
    for mine, exact in zip(slopes(*(each.cuda() for each in given)), expected, strict=True):
        assert (mine.cpu().double() - exact).norm() <= bound * exact.norm()


@pytest.mark.gpu
def test_a_gpus_compiled_code() -> None:
    image, kernel = (random(*shape, dtype=torch.float32).detach().cuda() for shape in ((2, 40, 50), (5, 5)))
    image.requires_grad_()
    compiled = torch.compile(lambda image: ours.filter2d(image, kernel, channels_last=False).relu().sum())
    mine, theirs = (
        torch.autograd.grad(call(image), image)[0]
        for call in (compiled, lambda image: ours.filter2d(image, kernel, channels_last=False).relu().sum())
    )
    torch.testing.assert_close(mine, theirs)
