"""vmap of the operators: what is mapped over becomes images where only the images have it, else groups of channels.

A rule takes the number of examples, the axes they lie on, tensors, the options of one example, and a function that
computes with these what options say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from leanconv.options import FUNCTIONS, LayerOptions, Op

Way = Callable[..., Any]


def images(tensor: Any, axis: int) -> Any:
    """(b, n, ...) as (b * n, ...)."""
    return tensor.movedim(axis, 0).flatten(0, 1)


def channels(tensor: Any, axis: int | None, count: int) -> Any:
    """(n, c, ...) of each as (n, count * c, ...); a tensor that is not mapped over is repeated."""
    tensor = tensor.unsqueeze(1).expand(-1, count, *tensor.shape[1:]) if axis is None else tensor.movedim(axis, 1)
    return tensor.flatten(1, 2)


def filters(tensor: Any, axis: int | None, count: int) -> Any:
    """(k, ...) of each as (count * k, ...)."""
    tensor = tensor.expand(count, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
    return tensor.flatten(0, 1)


def _split_channels(y: Any, count: int) -> tuple[Any, int]:
    return y.unflatten(1, (count, y.shape[1] // count)), 1


def with_one_more(tensor: Any, axis: int | None) -> Any:
    """A tensor with an example of zeros more, where it is mapped over."""
    if axis is None:
        return tensor
    return torch.cat([tensor, tensor.new_zeros([*tensor.shape[:axis], 1, *tensor.shape[axis + 1 :]])], axis)


def mapped(function: str, info: Any, axes: Any, *given: Any) -> Any:
    """By the rule for ``function``. A mapping over no examples is one over an example of zeros, whose result is
    dropped."""
    rule = RULES[FUNCTIONS[function].op]
    if info.batch_size:
        return rule(info.batch_size, axes, *given)

    count = len(given) - 2  # the last two are options and the way
    y, axis = rule(1, axes, *map(with_one_more, given[:count], axes), *given[count:])
    return y.narrow(axis, 0, 0), axis


def _grouped(requested: LayerOptions, count: int, shape: Any = None) -> LayerOptions:
    return requested._replace(groups=requested.groups * count, shape=shape)


def _vmap_conv2d(count: int, axes: Any, x: Any, w: Any, bias: Any, requested: LayerOptions, way: Way) -> Any:
    x_axis, w_axis, bias_axis, *_ = axes
    if w_axis is None and bias_axis is None:
        y = way(images(x, x_axis), w, bias, requested)
        return y.unflatten(0, (count, y.shape[0] // count)), 0
    bias = None if bias is None else filters(bias, bias_axis, count)
    given = channels(x, x_axis, count), filters(w, w_axis, count), bias
    return _split_channels(way(*given, _grouped(requested, count)), count)


def _vmap_input(count: int, axes: Any, grad: Any, w: Any, bias: Any, requested: LayerOptions, way: Way) -> Any:
    grad_axis, w_axis, bias_axis, *_ = axes
    assert requested.shape is not None
    n, c, *sides = requested.shape
    if w_axis is None and bias_axis is None:
        dx = way(images(grad, grad_axis), w, bias, requested._replace(shape=(n * count, c, *sides)))
        return dx.unflatten(0, (count, n)), 0
    bias = None if bias is None else filters(bias, bias_axis, count)
    given = channels(grad, grad_axis, count), filters(w, w_axis, count), bias
    return _split_channels(way(*given, _grouped(requested, count, (n, c * count, *sides))), count)


def _vmap_weight(count: int, axes: Any, x: Any, grad: Any, requested: LayerOptions, way: Way) -> Any:
    x_axis, grad_axis, *_ = axes
    assert requested.shape is not None
    k, *rest = requested.shape
    given = channels(x, x_axis, count), channels(grad, grad_axis, count)
    dw = way(*given, _grouped(requested, count, (k * count, *rest)))
    return dw.unflatten(0, (count, k)), 0


RULES: dict[Op, Callable[..., Any]] = {"fprop": _vmap_conv2d, "dgrad": _vmap_input, "wgrad": _vmap_weight}
