"""leanconv.torch inside PyTorch's transforms: batches of gradients, forward-mode derivatives, functionalize."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402

import leanconv.torch as ours  # noqa: E402

F, func = torch.nn.functional, torch.func


def tensors() -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(5)
    shapes = (2, 2, 3, 3), (2, 1, 2, 2), (2,)
    x, w, bias = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return x.requires_grad_(), w.requires_grad_(), bias.requires_grad_()


def same(compute: Any) -> None:
    """``compute`` of our function and of PyTorch's."""
    torch.testing.assert_close(
        *(compute(lambda *given, f=f: f(*given, padding=1, groups=2)) for f in (ours.conv2d, F.conv2d))
    )


def test_batches_of_gradients() -> None:
    given = tensors()
    grads = torch.randn(3, 2, 2, 4, 4, dtype=torch.float64)
    same(lambda conv: torch.autograd.grad(conv(*given), given, grads, is_grads_batched=True))
    same(lambda conv: torch.autograd.functional.jacobian(conv, given, vectorize=True))
    same(lambda conv: torch.autograd.functional.jacobian(conv, given, vectorize=True, strategy="forward-mode"))
    cubed = given[0][:1], *given[1:]
    same(lambda conv: torch.autograd.functional.hessian(lambda *g: conv(*g).pow(3).sum(), cubed, vectorize=True))


def test_derivatives_of_either_mode_and_of_batches() -> None:
    x, w, bias = tensors()
    modes = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(lambda x, w, bias: ours.conv2d(x, w, bias, groups=2), (x, w, bias), **modes)
    assert torch.autograd.gradcheck(lambda x, w: ours.conv_transpose2d(x, w, stride=2), (x, w), **modes)


def test_tangents() -> None:
    x, w, bias = tensors()

    def tangent(conv: Any, w: Any) -> Any:
        return func.jvp(lambda x: conv(x, w, bias).pow(2), (x,), (x.cos(),))[1]

    same(lambda conv: func.jvp(lambda w: tangent(conv, w), (w,), (w.cos(),)))
    same(lambda conv: func.grad(lambda w: tangent(conv, w).sum())(w))
    same(lambda conv: func.jvp(lambda bias: conv(x, w, bias), (bias,), (bias,)))
    same(lambda conv: func.hessian(lambda bias: conv(x, w, bias).pow(3).sum())(bias))


def test_mapped_over_nothing() -> None:
    x, w, bias = tensors()
    for axes in (0, None), (None, 0), (0, 0):
        given = [each if axis is None else each.new_zeros(0, *each.shape) for each, axis in zip((x, w), axes)]  # noqa: B905
        y = torch.vmap(lambda x, w: ours.conv2d(x, w, bias, groups=2), axes)(*given)
        assert y.shape == (0, 2, 2, 2, 2)
        grads = torch.vmap(func.grad(lambda x, w: ours.conv2d(x, w, bias, groups=2).sum(), (0, 1)), axes)(*given)
        assert [each.shape for each in grads] == [(0, *x.shape), (0, *w.shape)]


def test_functionalized() -> None:
    x, w, bias = tensors()
    same(lambda conv: func.functionalize(lambda x: conv(x, w, bias))(x))


def test_under_autocast() -> None:
    """Derivatives of either mode are those of the casts too."""
    x, w, bias = (each.detach().float() for each in tensors())

    def casting(compute: Any) -> None:
        def inside(conv: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return compute(conv)

        mine, theirs = (inside(lambda *given, f=f: f(*given, padding=1, groups=2)) for f in (ours.conv2d, F.conv2d))
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)

    casting(lambda conv: func.jvp(lambda x: conv(x, w, bias), (x,), (x.cos(),)))
    casting(lambda conv: func.grad(lambda w: conv(x, w, bias).float().pow(2).sum())(w))
    casting(lambda conv: torch.vmap(lambda x: conv(x, w, bias).float())(torch.stack([x, -x])))

    def dual(conv: Any) -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(conv(forward_ad.make_dual(x, x.cos()), w, bias)).tangent

    casting(dual)
