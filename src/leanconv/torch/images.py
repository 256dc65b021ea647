"""`filter2d` with gradients: the operators ``leanconv::filter2d``, ``filter2d_image`` and ``filter2d_kernel``.

A filter is a sum of products of pixels and weights, as a convolution is, so the derivative of each operator is made of
the two others, to any order:

- ``filter2d(x, k)``: by x ``filter2d_image(g, k)``, by k ``filter2d_kernel(x, g)``;
- ``filter2d_image(g, k)``: by g ``filter2d(u, k)``, by k ``filter2d_kernel(u, g)``;
- ``filter2d_kernel(x, g)``: by x ``filter2d_image(g, v)``, by g ``filter2d(x, v)``.

In them images are (n, h, w) or (n, h, w, c), kernels (f, kh, kw) or, for each image its own, (n, f, kh, kw), and
results (n, f, h, w) or (n, f, h, w, c).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.nn.functional import pad
from torch.overrides import handle_torch_function, has_torch_function_variadic

from leanconv.call import lookup
from leanconv.call.resolve import filter_problem
from leanconv.call.weights import given_kernel
from leanconv.dtypes import DTYPES, FILTERS, check_weights, filter_sum, is_integer, one_of
from leanconv.images import api
from leanconv.images.borders import BorderName, Run, runs
from leanconv.options import Border, FilterOptions, anchor_of, filter_numbers, filter_options, layer_options
from leanconv.runtime import env
from leanconv.torch import operators

#: Bytes that the gradient of a kernel may take while it runs, for partial sums, where LEANCONV_WORKSPACE_LIMIT says
#: nothing.
_WORKSPACE = 32 << 20


def filter2d(
    image: torch.Tensor,
    kernel: Any,
    *,
    border: Border = "reflect101",
    value: float = 0,
    anchor: Sequence[int] | None = None,
    delta: float = 0,
    dtype: torch.dtype | None = None,
    channels_last: bool | None = None,
    mode: Literal["same", "valid"] = "same",
    per_image: bool = False,
) -> torch.Tensor:
    """Correlate images with a small kernel, as `leanconv.filter2d`; differentiable by both, to any order.

    ``y[i,j] = delta + sum over u,v of kernel[u,v] * image[i + u - anchor_y, j + v - anchor_x]``

    Args:
        image: tensor (..., height, width), or (..., height, width, channels) with ``channels_last=True``.
        kernel: (kh, kw), or (f, kh, kw); with ``per_image=True`` (..., kh, kw) or (..., f, kh, kw). A tensor of any
            real dtype on the image's device, or numbers.
        dtype: of the result; that of the image by default. It must be of floating-point numbers: pictures of integers
            are taken with ``dtype=torch.float32``.
        All else as in `leanconv.filter2d`.

    Returns:
        Tensor of the image's shape, (..., f, height, width) with f kernels, on the current stream.

    Raises:
        ValueError, TypeError: an argument breaks a rule, which the message names.

    The gradient by the image is a filter with the mirrored kernel, which takes no memory beside the gradient for
    ``constant`` and ``wrap``, and strips as wide as the kernel for the other borders; with f kernels it is f filters.
    ``mode="valid"`` takes a copy of the result's gradient. The gradient by the kernel is that of a layer of one
    channel; it takes a copy of the image with its border, except for a constant border of 0, and copies of what is in
    another dtype than the sums or has channels. Works inside torch.compile and torch.func.vmap and grad.

    >>> import torch
    >>> from leanconv.torch import filter2d
    >>> image, kernel = torch.ones(1, 4), torch.ones(1, 3, requires_grad=True)
    >>> filter2d(image, kernel, border="constant").sum().backward()
    >>> kernel.grad.tolist()
    [[3.0, 4.0, 3.0]]
    """
    if has_torch_function_variadic(image, kernel):
        return handle_torch_function(
            filter2d, (image, kernel), image, kernel, border=border, value=value, anchor=anchor, delta=delta,
            dtype=dtype, channels_last=channels_last, mode=mode, per_image=per_image,
        )  # fmt: skip
    if not isinstance(image, torch.Tensor):
        raise TypeError(
            f"image is of type {type(image).__qualname__}; leanconv.torch takes tensors of PyTorch, leanconv.filter2d "
            "those of NumPy and CuPy too"
        )
    requested = filter_options(border, anchor, None, dtype, channels_last, mode, per_image)
    own = one_of("image", _name(image.dtype), FILTERS)
    result = requested.dtype or own
    if is_integer(result):
        raise TypeError(
            f"the result would have dtype {result}, which has no gradient; give dtype=torch.float32, or call "
            "leanconv.filter2d"
        )
    given = (image, kernel) if isinstance(kernel, torch.Tensor) else (image,)
    if not operators.needs_operators(*given):
        return api.filter2d(
            image, kernel, border=border, value=value, anchor=anchor, delta=delta, dtype=dtype,
            channels_last=channels_last, mode=mode, per_image=per_image,
        )  # fmt: skip
    sums = filter_sum(own, result)
    if not isinstance(kernel, torch.Tensor):
        kernel = given_kernel(kernel)
        if isinstance(kernel, np.ndarray):
            check_weights("kernel", kernel.dtype.name)
            kernel = kernel.astype(sums)  # native, and without negative strides
        kernel = torch.as_tensor(kernel, dtype=_dtype(sums), device=image.device)
    check_weights("kernel", _name(kernel.dtype))
    if kernel.device != image.device:
        raise ValueError(f"kernel lies on {kernel.device} and image on {image.device}; they must be on one device")
    value, delta = filter_numbers(value, delta, own, sums, result)
    size = tuple(kernel.shape[-2:])
    filter_problem(requested, tuple(image.shape), tuple(kernel.shape), own)
    pixel = 3 if requested.channels_last else 2
    # NOTE: no size is a number here, so that a trace is one for images of other sizes
    leading, batch = image.dim() - pixel, image.shape[:-pixel]
    several = kernel.dim() - (leading if requested.per_image else 0) == 3
    filters = kernel if several else kernel.unsqueeze(-3)
    filters = _one_axis(filters, leading) if requested.per_image else filters
    how = requested.border, anchor_of(requested.anchor, *size), requested.valid
    y = _call("filter2d", _one_axis(image, leading), filters, *how, value, delta, _dtype(result))
    y = y if several else y.squeeze(1)
    if leading == 1:
        return y
    return y.reshape(*batch, *y.shape[1:]) if leading else y.squeeze(0)


def _one_axis(tensor: Any, leading: int) -> Any:
    """The tensor with one axis in place of so many leading ones."""
    return tensor.flatten(0, leading - 1) if leading else tensor.unsqueeze(0)


_OPTIONS = "str border, int[] anchor, bool valid"
_SCHEMAS = {
    "filter2d": f"(Tensor x, Tensor k, {_OPTIONS}, Scalar value, Scalar delta, ScalarType dtype) -> Tensor",
    "filter2d_image": f"(Tensor grad, Tensor k, {_OPTIONS}, ScalarType dtype) -> Tensor",
    "filter2d_kernel": f"(Tensor x, Tensor grad, SymInt[] size, {_OPTIONS}, bool per_image, Scalar value, "
    "ScalarType dtype) -> Tensor",
}
_library = torch.library.Library("leanconv", "FRAGMENT")
for _operator, _schema in _SCHEMAS.items():
    _library.define(_operator + _schema, tags=(torch.Tag.pt2_compliant_tag,))
_ops = torch.ops.leanconv


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


# The kernels. They run below autograd, with its recording switched off


def _filter(x: Any, k: Any, border: Any, anchor: Any, valid: bool, value: Any, delta: Any, dtype: torch.dtype) -> Any:
    requested = _requested(border, anchor, valid, dtype, x.dim() == 4, k.dim() == 4)
    return lookup.run(requested, x, k, None, None, (value, delta) if value or delta else ())


def _requested(
    border: BorderName, anchor: Any, valid: bool, dtype: torch.dtype, channels_last: bool, per_image: bool
) -> FilterOptions:
    given = border, tuple(anchor), None, DTYPES[_name(dtype)].name, channels_last, valid, per_image
    return FilterOptions(*given, workspace_limit=env.workspace_limit())


class _Plane:
    """The gradient of one filter's result, (n, oh, ow) or (n, oh, ow, c), with the filter's mirrored weights."""

    def __init__(self, grad: Any, mirrored: Any, dtype: torch.dtype) -> None:
        self.grad, self.mirrored = grad, mirrored
        self._rest = dtype, grad.dim() == 4, mirrored.dim() == 3

    def filter(self, border: BorderName, anchor: tuple[int, int]) -> Any:
        return lookup.run(_requested(border, anchor, False, *self._rest), self.grad, self.mirrored)

    def scattered(self, rows: tuple[int, int], columns: tuple[int, int]) -> Any:
        """What reaches those rows and columns of the extended image, whose first windows begin at row and column 0."""
        grad, around = self.grad, [0, 0] * (self.grad.dim() - 3)
        for axis, (first, end) in ((2, columns), (1, rows)):
            first -= self.mirrored.shape[axis - 3] - 1
            low, high = max(first, 0), min(end, grad.shape[axis])
            grad = grad.narrow(axis, low, high - low)
            around += [low - first, end - high]
        grad = pad(grad, around)
        return lookup.run(_requested("constant", (0, 0), True, *self._rest), grad, self.mirrored)


def _image_gradient(grad: Any, k: Any, border: Any, anchor: Any, valid: bool, dtype: torch.dtype) -> Any:
    """The adjoint of a filter: each gradient goes to the pixels that its window has read."""
    (kh, kw), (oh, ow) = k.shape[-2:], grad.shape[2:4]
    h, w = (oh + kh - 1, ow + kw - 1) if valid else (oh, ow)
    if not grad.numel():
        return grad.new_zeros((grad.shape[0], h, w, *grad.shape[4:]), dtype=dtype)
    # what a border adds to pixels is added before they are rounded
    folded = border not in ("constant", "wrap") and not valid
    alone = grad.shape[1] == 1 and not folded
    sums = dtype if alone else _dtype(filter_sum(_name(grad.dtype), _name(dtype)))
    (top, left), mirrored = anchor, k.flip(-2, -1)
    total: Any = None
    for i in range(grad.shape[1]):
        plane = _Plane(grad[:, i], mirrored[..., i, :, :], sums)
        if valid:
            part = plane.scattered((0, h), (0, w))
        else:
            opposite = kh - 1 - top, kw - 1 - left
            part = plane.filter("wrap" if border == "wrap" else "constant", opposite)
        if folded:
            rows, columns = runs(border, h, top, kh - 1 - top), runs(border, w, left, kw - 1 - left)
            for run in _outside(rows, top):
                strip = plane.scattered((run.start, run.start + run.length), (0, w + kw - 1))
                inside = strip.narrow(2, left, w).clone()
                for across in _outside(columns, left):
                    _fold(inside, strip.narrow(2, across.start, across.length), across, 2)
                _fold(part, inside, run, 1)
            for run in _outside(columns, left):
                strip = plane.scattered((top, top + h), (run.start, run.start + run.length))
                _fold(part, strip, run, 2)
        total = part if total is None else total.add_(part)
    return total.to(dtype)


def _outside(line: Sequence[Run], before: int) -> list[Run]:
    """The runs of a line but the line itself."""
    return [run for run in line if run.start != before]


def _fold(image: Any, strip: Any, run: Run, axis: int) -> None:
    """Add what has reached places outside an image to the pixels that stand for them."""
    if run.step == 0:
        strip = strip.sum(axis, keepdim=True)
    elif run.step < 0:
        strip = strip.flip(axis)
    image.narrow(axis, run.low, run.width).add_(strip)


def _extended(x: Any, line: Sequence[Run], axis: int, value: float) -> Any:
    """Images with what a border shows around them, along one axis."""
    parts = []
    for run in line:
        part = x.new_full((), value) if run.pixel is None else x.narrow(axis, run.low, run.width)
        shape = *x.shape[:axis], run.length, *x.shape[axis + 1 :]
        parts.append(part.flip(axis) if run.step < 0 else part.expand(shape))
    return torch.cat(parts, axis)


def _kernel_gradient(
    x: Any, grad: Any, size: Any, border: Any, anchor: Any, valid: bool, per_image: bool, value: Any,
    dtype: torch.dtype,
) -> Any:  # fmt: skip
    """For each weight the sum over pixels of the gradient times the pixel that the weight reads: that of a layer."""
    (kh, kw), (images, filters) = size, grad.shape[:2]
    shape = (images, filters, kh, kw) if per_image else (filters, kh, kw)
    if not grad.numel():
        return grad.new_zeros(shape, dtype=dtype)
    sums = _dtype(filter_sum(_name(grad.dtype), _name(x.dtype)))
    x, grad = x.to(sums), grad.to(sums)
    (top, left), padding = anchor, (0, 0, 0, 0)
    if not valid:
        around = top, kh - 1 - top, left, kw - 1 - left
        if border == "constant" and not value:
            padding = around
        else:
            x = _extended(x, runs(border, x.shape[1], *around[:2]), 1, value)
            x = _extended(x, runs(border, x.shape[2], *around[2:]), 2, value)
    # channels are images, of which each filter's gradient is the sum; images are groups where each has its own filters
    x = x.movedim(3, 0) if x.dim() == 4 else x.unsqueeze(0)
    grad = grad.movedim(4, 0) if grad.dim() == 5 else grad.unsqueeze(0)
    groups = images if per_image else 1
    x = x.reshape(-1, groups, *x.shape[2:]).contiguous()
    grad = grad.reshape(-1, groups * filters, *grad.shape[3:]).contiguous()
    return _layer_gradient(x, grad, (groups * filters, 1, kh, kw), padding, groups).reshape(shape).to(dtype)


def _layer_gradient(x: Any, grad: Any, shape: Any, padding: tuple[int, int, int, int], groups: int) -> Any:
    if x.is_cuda and x.dtype == torch.float64:  # layers of float64 are PyTorch's
        top, bottom, left, right = padding
        x = pad(x, (left, right, top, bottom))
        return torch.nn.grad.conv2d_weight(x, shape, grad, groups=groups)
    limit = env.workspace_limit()
    requested = layer_options(
        "conv2d_weight", 1, padding, 1, groups, workspace_limit=_WORKSPACE if limit is None else limit, shape=shape,
        differentiated=True,
    )  # fmt: skip
    return lookup.run(requested, x, grad)


_KERNELS: dict[str, Callable[..., Any]] = {
    "filter2d": _filter,
    "filter2d_image": _image_gradient,
    "filter2d_kernel": _kernel_gradient,
}


def _without_recording(function: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*given: Any) -> Any:
        with torch.no_grad():
            return function(*given)

    return kernel


# Shapes without values


def _fake_filter(x: Any, k: Any, border: Any, anchor: Any, valid: bool, value: Any, delta: Any, dtype: Any) -> Any:
    less = (k.shape[-2] - 1, k.shape[-1] - 1) if valid else (0, 0)
    shape = x.shape[0], k.shape[-3], x.shape[1] - less[0], x.shape[2] - less[1], *x.shape[3:]
    return x.new_empty(shape, dtype=dtype)


def _fake_image(grad: Any, k: Any, border: Any, anchor: Any, valid: bool, dtype: Any) -> Any:
    more = (k.shape[-2] - 1, k.shape[-1] - 1) if valid else (0, 0)
    shape = grad.shape[0], grad.shape[2] + more[0], grad.shape[3] + more[1], *grad.shape[4:]
    return grad.new_empty(shape, dtype=dtype)


def _fake_kernel(
    x: Any, grad: Any, size: Any, border: Any, anchor: Any, valid: bool, per_image: bool, value: Any, dtype: Any
) -> Any:
    return grad.new_empty((*grad.shape[0 if per_image else 1 : 2], *size), dtype=dtype)


_FAKES: dict[str, Callable[..., Any]] = {
    "filter2d": _fake_filter,
    "filter2d_image": _fake_image,
    "filter2d_kernel": _fake_kernel,
}


# Derivatives


def _call(name: str, *given: Any) -> Any:
    """An operator, or what stands for it inside torch.func."""
    return _TRANSFORMED[name].apply(*given) if operators.takes_rules() else getattr(_ops, name)(*given)


def _set_up(ctx: Any, inputs: Any, output: Any) -> None:
    first, second, *ctx.options = inputs
    by_first, by_second, *_ = ctx.needs_input_grad
    ctx.save_for_backward(first if by_second else None, second if by_first else None)
    ctx.first, ctx.second = (first.shape, first.dtype), (second.shape, second.dtype)


def _filter_backward(ctx: Any, grad: Any) -> Any:
    (x, k), (*how, value, _, _) = ctx.saved_tensors[:2], ctx.options
    (_, x_dtype), (shape, dtype) = ctx.first, ctx.second
    by_x, by_k, *_ = ctx.needs_input_grad
    dx = _call("filter2d_image", grad, k, *how, x_dtype) if by_x else None
    dk = _call("filter2d_kernel", x, grad, shape[-2:], *how, len(shape) == 4, value, dtype) if by_k else None
    return dx, dk, *(None,) * 6


def _image_backward(ctx: Any, u: Any) -> Any:
    (grad, k), (*how, _) = ctx.saved_tensors[:2], ctx.options
    (_, g_dtype), (shape, dtype) = ctx.first, ctx.second
    by_grad, by_k, *_ = ctx.needs_input_grad
    first = _call("filter2d", u, k, *how, 0, 0, g_dtype) if by_grad else None
    second = _call("filter2d_kernel", u, grad, shape[-2:], *how, len(shape) == 4, 0, dtype) if by_k else None
    return first, second, *(None,) * 4


def _kernel_backward(ctx: Any, v: Any) -> Any:
    (x, grad), (_, *how, _, value, _) = ctx.saved_tensors[:2], ctx.options
    by_x, by_grad, *_ = ctx.needs_input_grad
    first = _call("filter2d_image", grad, v, *how, ctx.first[1]) if by_x else None
    second = _call("filter2d", x, v, *how, value, 0, ctx.second[1]) if by_grad else None
    return first, second, *(None,) * 7


_BACKWARD: dict[str, Callable[..., Any]] = {
    "filter2d": _filter_backward,
    "filter2d_image": _image_backward,
    "filter2d_kernel": _kernel_backward,
}


#: The options, by their places, that are no factor's: of what the first tensor changes, and of what the second does.
_ADDED = {"filter2d": ((3, 4), (4,)), "filter2d_image": ((), ()), "filter2d_kernel": ((5,), ())}


def _transformed(name: str) -> Any:
    """What computes an operator inside transforms of torch.func, and with forward-mode derivatives."""

    def set_up(ctx: Any, inputs: Any, output: Any) -> None:
        _set_up(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:2])

    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Of a sum of products: one factor's tangent by the other factor, each."""
        first, second = (forward_ad.unpack_dual(each).primal for each in ctx.saved_tensors)
        factors = (tangents[0], second), (first, tangents[1])
        parts = []
        # PyTorch switches tangents off here, those of an outer jvp too, which would get lost
        with forward_ad._set_fwd_grad_enabled(True):
            for pair, added in zip(factors, _ADDED[name], strict=True):
                if all(each is not None for each in pair):
                    options = [0 if at in added else option for at, option in enumerate(ctx.options)]
                    parts.append(_call(name, *pair, *options))
            return sum(parts[1:], parts[0])

    ways = {"forward": _KERNELS[name], "setup_context": set_up, "backward": _BACKWARD[name], "jvp": jvp}
    ways["vmap"] = _VMAP[name]
    return type(
        f"Transformed_{name}", (torch.autograd.Function,), {key: staticmethod(way) for key, way in ways.items()}
    )


# vmap: examples are more images; where they have weights of their own, each image has


def _images(tensor: Any, axis: int | None, count: int) -> Any:
    """(n, ...) of each example as (count * n, ...); a tensor that is not mapped over is repeated."""
    tensor = tensor.expand(count, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
    return tensor.flatten(0, 1)


def _filters(k: Any, axis: int | None, images: int, count: int) -> Any:
    """Those of each image of each example; as they are where they are the same for all."""
    whole = k.dim() - (axis is not None)
    if whole == 3 and axis is None:
        return k
    if whole == 3:
        k = k.movedim(axis, 0).unsqueeze(1)
        return k.expand(-1, images, *k.shape[2:]).flatten(0, 1)
    return _images(k, axis, count)


def _map_filter(name: str) -> Callable[..., Any]:
    """Of ``filter2d`` and ``filter2d_image``, whose first argument has the images."""

    def mapped(info: Any, axes: Any, first: Any, k: Any, *options: Any) -> Any:
        count = info.batch_size
        images = first.shape[0] if axes[0] is None else first.movedim(axes[0], 0).shape[1]
        given = _images(first, axes[0], count), _filters(k, axes[1], images, count)
        return _call(name, *given, *options).unflatten(0, (count, images)), 0

    return mapped


def _map_kernel(
    info: Any, axes: Any, x: Any, grad: Any, size: Any, border: Any, anchor: Any, valid: bool, per_image: bool,
    value: Any, dtype: Any,
) -> Any:  # fmt: skip
    count = info.batch_size
    x, grad = _images(x, axes[0], count), _images(grad, axes[1], count)
    each = _call("filter2d_kernel", x, grad, size, border, anchor, valid, True, value, dtype)
    each = each.unflatten(0, (count, each.shape[0] // count))
    return each if per_image else each.sum(1), 0


_VMAP: dict[str, Callable[..., Any]] = {
    "filter2d": _map_filter("filter2d"),
    "filter2d_image": _map_filter("filter2d_image"),
    "filter2d_kernel": _map_kernel,
}

_TRANSFORMED = {name: _transformed(name) for name in _SCHEMAS}

for _operator, _kernel in _KERNELS.items():
    for _key in ("CPU", "CUDA"):
        _library.impl(_operator, _without_recording(_kernel), _key)
    _full = f"leanconv::{_operator}"
    torch.library.register_fake(_full, _FAKES[_operator], lib=_library)
    torch.library.register_autograd(_full, _BACKWARD[_operator], setup_context=_set_up, lib=_library)
    if hasattr(torch.library, "register_vmap"):  # from PyTorch 2.5 on
        torch.library.register_vmap(_full, _VMAP[_operator], lib=_library)
