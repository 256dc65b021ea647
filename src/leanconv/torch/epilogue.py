"""The operators ``leanconv::fused_conv2d`` and ``fused_conv3d``: a layer with what follows it, in one kernel.

``y = activation(scale[k] * conv(x, w) + bias[k] + add)``. They have no derivative of their own. Where a gradient is
recorded, and inside transforms of torch.func, a call is the convolution operator of `operators` and then PyTorch's own
functions (`composed`), which autograd and the transforms know to any order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import conv_flop_count, register_flop_formula

from leanconv import options as rules
from leanconv.arrays.operands import together
from leanconv.call import lookup
from leanconv.call.host_call import torch_epilogue
from leanconv.call.weights import PreparedWeights
from leanconv.options import LayerOptions, layer_options
from leanconv.torch import operators, vmap
from leanconv.torch.packed import PackedFilters, signature
from leanconv.torch.switches import capturing, without_axis

_SCHEMA = (
    "(Tensor x, Tensor w, Tensor? bias, Tensor? scale, Tensor? add, str? activation, int[] stride, int[] padding, "
    "int[] dilation, SymInt groups, str precision, bool batch_invariant) -> Tensor"
)
#: by the number of axes of the images
_NAMES = {2: "fused_conv2d", 3: "fused_conv3d"}
_library = torch.library.Library("leanconv", "FRAGMENT")
for _name in _NAMES.values():
    _library.define(_name + _SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
_ops = torch.ops.leanconv
#: the operators, by the number of axes
OPERATORS: dict[int, Any] = {axes: getattr(_ops, name).default for axes, name in _NAMES.items()}
_CONVOLUTIONS: dict[int, Callable[..., Any]] = {2: operators.conv2d, 3: operators.conv3d}
_is_compiling = torch.compiler.is_compiling
_tracing: Callable[[], Any] = torch._C._get_tracing_state
_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled


def of_axes(
    recorded: Callable[..., Any] | None, axes: int, x: Any, w: Any, bias: Any, scale: Any, add: Any, activation: Any,
    stride: Any, padding: Any, dilation: Any, *options: Any,
) -> Any:  # fmt: skip
    """A layer of so many axes with its epilogue, perhaps without a batch; signals are images of one row.

    Where a file of ONNX is written it is what is made of the convolution ``recorded``.
    """
    for name, each in (("scale", scale), ("add", add)):
        if each is not None and not isinstance(each, torch.Tensor):
            raise TypeError(f"{name} is of type {type(each).__qualname__}; it must be a tensor of PyTorch, or None")
    alone = x.dim() == axes + 1
    if add is not None and _tracing() is None:
        around = len(padding) // len(stride) * axes
        sizes = (1, *x.shape) if alone else x.shape
        n, *shape = operators.output_shape(sizes, w.shape, stride[-axes:], padding[-around:], dilation[-axes:])
        if tuple(add.shape) != (wanted := tuple(shape if alone else (n, *shape))):
            raise ValueError(f"add has shape {tuple(add.shape)}; it must have that of the result, {wanted}")
    x, add = (each.unsqueeze(0) if alone and each is not None else each for each in (x, add))
    if axes == 1:
        x, w, add = (None if each is None else each.unsqueeze(-2) for each in (x, w, add))
    given = bias, scale, add, rules.activation_of(activation), stride, padding, dilation, *options
    y = fused(x, w, *given) if recorded is None else composed(recorded, x, w, *given)
    y = without_axis(y, -2) if axes == 1 else y
    return without_axis(y, 0) if alone else y


def fused(
    x: Any, w: Any, bias: Any, scale: Any, add: Any, activation: Any, stride: Any, padding: Any, dilation: Any,
    groups: Any, precision: Any, batch_invariant: Any,
) -> Any:  # fmt: skip
    """A layer of images or volumes with its epilogue: one kernel, or, where a gradient is recorded, what it is made
    of. ``activation`` is as `options.activation_of` returns it."""
    given = stride, padding, dilation, groups, precision, batch_invariant
    tensors = bias, scale, add
    if isinstance(w, PreparedWeights):
        if torch.is_grad_enabled() and any(_records(each) for each in (x, w.array, *tensors)):
            raise ValueError("packed weights are for calls without gradients: call it under torch.no_grad(), or pass w")
        with torch.no_grad():
            return lookup.run(requested_of(activation, *given), x, w, together(*tensors))
    # a trace holds the operator, which finds out by itself whether a gradient is recorded: it may differ at each use
    if operators.takes_rules() or (_tracing() is None and _is_recorded(x, w, *tensors)):
        return composed(_CONVOLUTIONS[len(stride)], x, w, *tensors, activation, *given)
    if not operators.is_plain(x, w, *tensors):
        return OPERATORS[len(stride)](x, w, *tensors, activation, *given)
    return lookup.run(requested_of(activation, *given), x, w, together(*tensors))


def requested_of(
    activation: str | None, stride: Any, padding: Any, dilation: Any, groups: Any, precision: Any, batch_invariant: Any
) -> LayerOptions:
    """The options of a call of the core function."""
    return layer_options(
        "conv2d" if len(stride) == 2 else "conv3d", stride, padding, dilation, groups, None, "auto", precision,
        activation, None, None, batch_invariant, differentiated=True,
    )  # fmt: skip


def composed(
    convolve: Callable[..., Any], x: Any, w: Any, bias: Any, scale: Any, add: Any, activation: str | None,
    stride: Any, *options: Any,
) -> Any:  # fmt: skip
    """The same by a convolution and PyTorch's functions. 16 bits are rounded after each of them."""
    y = convolve(x, w, bias if scale is None else None, stride, *options)
    if _any_autocast() and add is not None and add.dtype != y.dtype and add.is_floating_point():
        add = add.to(y.dtype)
    if _tracing() is None:
        checktogether(scale, add, y)
    return torch_epilogue(y, len(stride), None if scale is None else bias, scale, add, activation)


def checktogether(scale: Any, add: Any, y: Any, shape: Any = None) -> None:
    """Raise ValueError or TypeError unless scale and residual fit a result, of the ``shape`` that the caller sees."""
    if scale is not None:
        if scale.dim() != 1 or scale.shape[0] != y.shape[1]:
            raise ValueError(
                f"scale has shape {tuple(scale.shape)}; it must have shape ({y.shape[1]},), a number a filter"
            )
        wanted = torch.float64 if y.dtype == torch.float64 else torch.float32
        if scale.dtype != wanted:
            raise TypeError(f"scale has dtype {scale.dtype}; with {y.dtype} it must be {wanted}")
    shape = y.shape if shape is None else shape
    if add is not None:
        if tuple(add.shape) != tuple(shape):
            raise ValueError(f"add has shape {tuple(add.shape)}; it must have that of the result, {tuple(shape)}")
        if add.dtype != y.dtype:
            raise TypeError(f"add has dtype {add.dtype} and input {y.dtype}; they must be the same")
    for name, each in (("scale", scale), ("add", add)):
        if each is not None and each.device != y.device:
            raise ValueError(f"{name} lies on {each.device} and input on {y.device}; they must be on one device")


def _records(tensor: Any) -> bool:
    return tensor is not None and bool(tensor.requires_grad)


def _is_recorded(*tensors: Any) -> bool:
    if forward_ad._current_level >= 0 and not _is_compiling():
        return True
    return torch.is_grad_enabled() and any([_records(each) for each in tensors])


# The kernels: leanconv's own calls


#: what compiled graphs keep of their filters, by identity, and its bytes at most
_kept: dict[int, tuple[Callable[[], Any], PackedFilters]] = {}
_MOST_KEPT = 512 << 20


def _filters(w: Any) -> Any:
    """Filters packed from the second call on between two of their changes; in a CUDA graph, which may outlive these, as
    they are."""
    if w.is_inference() or capturing():
        return w
    at = id(w)
    of, packed = _kept.get(at) or (None, None)
    if of is None or packed is None or of() is not w or packed.signature != signature(w):
        if sum(each.nbytes for _, each in list(_kept.values())) < _MOST_KEPT:
            _kept[at] = weakref.ref(w, lambda _: _kept.pop(at, None)), PackedFilters(w, len(w.shape) - 2)
        return w
    if packed.version != w._version:
        packed.version = w._version
        return w
    return packed.weights


def _kernel(x: Any, w: Any, bias: Any, scale: Any, add: Any, activation: Any, *options: Any) -> Any:
    with torch.no_grad():
        return lookup.run(requested_of(activation, *options), x, _filters(w), together(bias, scale, add))


def _fake(x: Any, w: Any, bias: Any, scale: Any, add: Any, activation: Any, *options: Any) -> Any:
    rules.activation_of(activation)
    y = operators._fake_forward(x, w, bias, *options)
    checktogether(scale, add, y)
    return y


def _decomposed(axes: int) -> Callable[..., Any]:
    convolve = _CONVOLUTIONS[axes]

    def decomposed(*given: Any) -> Any:
        return composed(convolve, *given)

    return decomposed


def unless_recorded(operator: Any, decomposed: Callable[..., Any], count: int) -> Callable[..., Any]:
    """What the dispatcher calls first of an operator, whose first so many arguments are tensors: a gradient is that of
    the parts."""

    def kernel(*given: Any) -> Any:
        if _is_recorded(*given[:count]):
            return decomposed(*given)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*given)

    return kernel


def _autocast(axes: int, key: str) -> Callable[..., Any]:
    operator = OPERATORS[axes]
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def kernel(x: Any, w: Any, bias: Any, scale: Any, add: Any, *options: Any) -> Any:
        # the scale stays float32, as the sums are
        x, w, bias, add = operators.as_autocast((x, w, bias, add))
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return operator(x, w, bias, scale, add, *options)

    return kernel


def _vmap(axes: int) -> Callable[..., Any]:
    """As `leanconv.torch.vmap` maps the convolution: examples become images, else groups of channels."""
    operator = OPERATORS[axes]

    def mapped(info: Any, where: Any, *given: Any) -> Any:
        count = info.batch_size
        if not count:  # one of zeros, whose result is dropped
            tensors = (vmap.with_one_more(each, axis) for each, axis in zip(given[:5], where, strict=False))
            given = *tensors, *given[5:]
        return mapped_over(max(count, 1), count, where, *given)

    def mapped_over(
        count: int, kept: int, where: Any, x: Any, w: Any, bias: Any, scale: Any, add: Any, activation: Any,
        stride: Any, padding: Any, dilation: Any, groups: Any, *options: Any,
    ) -> Any:  # fmt: skip
        rest = activation, stride, padding, dilation
        if where[1:4] == (None,) * 3 and where[0] is not None:
            if add is not None and where[4] is None:
                add, where = add.expand(count, *add.shape), (*where[:4], 0)
            add = None if add is None else vmap.images(add, where[4])
            y = operator(vmap.images(x, where[0]), w, bias, scale, add, *rest, groups, *options)
            return y.unflatten(0, (count, y.shape[0] // count))[:kept], 0
        each = [
            None if one is None else vmap.filters(one, axis, count)
            for one, axis in zip((w, bias, scale), where[1:4], strict=True)
        ]
        add = None if add is None else vmap.channels(add, where[4], count)
        y = operator(vmap.channels(x, where[0], count), *each, add, *rest, groups * count, *options)
        return y.unflatten(1, (count, y.shape[1] // count))[:, :kept], 1

    return mapped


for _axes, _name in _NAMES.items():
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _kernel, _key)
    _library.impl(_name, unless_recorded(OPERATORS[_axes], _decomposed(_axes), 5), "Autograd")
    for _key in ("AutocastCPU", "AutocastCUDA"):
        _library.impl(_name, _autocast(_axes, _key), _key)
    torch.library.register_fake(f"leanconv::{_name}", _fake, lib=_library)
    register_flop_formula(getattr(_ops, _name))(lambda x, w, *rest, out_shape: conv_flop_count(x, w, out_shape))
    if hasattr(torch.library, "register_vmap"):  # from PyTorch 2.5 on
        torch.library.register_vmap(f"leanconv::{_name}", _vmap(_axes), lib=_library)
