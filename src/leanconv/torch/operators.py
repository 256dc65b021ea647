"""The operators ``leanconv::conv2d``, ``conv2d_input`` and ``conv2d_weight`` in PyTorch's library, with autograd.

Each is a sum of products of two tensors, so the derivative of each is one of the others, to any order:

- ``conv2d(x, w)``: by x ``conv2d_input(g, w)``, by w ``conv2d_weight(x, g)``, by the bias the sum of g;
- ``conv2d_input(g, w)``: by g ``conv2d(u, w)``, by w ``conv2d_weight(u, g)``, by the bias, which it has as a
  transposed layer, the sum of u;
- ``conv2d_weight(x, g)``: by x ``conv2d_input(g, v)``, by g ``conv2d(x, v)``.

There are two ways in. What traces (torch.compile, fake tensors) or casts (autocast) calls the operators.
A plain call goes to `Convolution` and its like, whose forward is leanconv's own call: PyTorch's dispatcher with its
Python kernels takes longer. Explored (one core of an x86 server, no kernel at all, a37ec04): 59 µs a call, this 11.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.autograd import forward_ad

from leanconv.arrays.memory import lies_channels_last
from leanconv.call import lookup
from leanconv.options import LayerOptions, layer_options
from leanconv.torch import vmap
from leanconv.torch.vmap import Ways

_OPTIONS = "int[] stride, int[] padding, int[] dilation, SymInt groups, str precision, bool batch_invariant) -> Tensor"
_SCHEMAS = {
    "conv2d": f"(Tensor x, Tensor w, Tensor? bias, {_OPTIONS}",
    "conv2d_input": f"(Tensor grad, Tensor w, Tensor? bias, SymInt[] input_shape, {_OPTIONS}",
    "conv2d_weight": f"(Tensor x, Tensor grad, SymInt[] weight_shape, {_OPTIONS}",
}
_library = torch.library.Library("leanconv", "DEF")
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
_ops = torch.ops.leanconv

_is_compiling = torch.compiler.is_compiling
_PLAIN_TYPES = torch.Tensor, torch.nn.Parameter
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_transforms: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_FUNCTIONALIZE = torch._C._functorch.TransformType.Functionalize
_is_batch: Callable[[Any], bool] = torch._C._functorch.is_legacy_batchedtensor
_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
_tracing: Callable[[], Any] = torch._C._get_tracing_state
_is_meta: Callable[[Any], bool] = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


def is_plain(*tensors: Any) -> bool:
    """Whether nothing but autograd and torch.func looks at a call: no tracer, mode, autocast, class or meta tensor.

    Inside torch.func and forward-mode derivatives, which would pass an operator by, autocast is `_by_rules`' work.
    """
    if _is_compiling() or _dispatch_modes() or _tracing() is not None or (_any_autocast() and not _wants_rules()):
        return False
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN_TYPES or _is_meta(tensor)):
            return False
    return True


def _wants_rules() -> bool:
    """Whether a plain call is inside torch.func, or forward-mode derivatives are on."""
    return _transforms() is not None or forward_ad._current_level >= 0


def needs_operators(*tensors: Any) -> bool:
    """Whether anything looks at a call or records it, so that it must be one of an operator with a derivative."""
    if not is_plain(*tensors) or _wants_rules():
        return True
    return _grad_enabled() and any([tensor.requires_grad for tensor in tensors])


def takes_rules() -> bool:
    """Whether an operator's call must be one of a function with rules: operators have none for torch.func's gradients
    and for forward-mode derivatives. Of the transforms, functionalize knows operators only."""
    if _is_compiling() or not _wants_rules():
        return False
    interpreter = _transforms()
    return interpreter is None or interpreter.key() != _FUNCTIONALIZE


def requested_of(
    function: str, shape: Any, stride: Any, padding: Any, dilation: Any, groups: Any, precision: Any,
    batch_invariant: Any,
) -> LayerOptions:  # fmt: skip
    """The options of a call whose gradients are ours to compute."""
    return layer_options(
        function, stride, padding, dilation, groups, None, "auto", precision, None, None, None, batch_invariant, shape,
        differentiated=True,
    )  # fmt: skip


# What autograd keeps, and the derivatives. They serve the operators and the plain way


def _set_up(ctx: Any, inputs: Any, output: Any) -> None:
    first, second, *_, requested = inputs
    needed = ctx.needs_input_grad
    ctx.save_for_backward(first if needed[1] else None, second if needed[0] else None)
    ctx.about = first.shape, second.shape, requested


def _conv2d_backward(ctx: Any, grad: Any, ways: Ways) -> Any:
    (x, w), (x_shape, w_shape, requested) = ctx.saved_tensors, ctx.about
    by_x, by_w, by_bias, *_ = ctx.needs_input_grad
    dx = ways[1](grad, w, None, requested.of("conv2d_input", x_shape)) if by_x else None
    dw = ways[2](x, grad, requested.of("conv2d_weight", w_shape)) if by_w else None
    return dx, dw, grad.sum((0, 2, 3)) if by_bias else None, None


def _input_backward(ctx: Any, u: Any, ways: Ways) -> Any:
    (grad, w), (_, w_shape, requested) = ctx.saved_tensors, ctx.about
    by_grad, by_w, by_bias, *_ = ctx.needs_input_grad
    first = ways[0](u, w, None, requested.of("conv2d")) if by_grad else None
    second = ways[2](u, grad, requested.of("conv2d_weight", w_shape)) if by_w else None
    return first, second, u.sum((0, 2, 3)) if by_bias else None, None


def _weight_backward(ctx: Any, v: Any, ways: Ways) -> Any:
    (x, grad), (x_shape, _, requested) = ctx.saved_tensors, ctx.about
    by_x, by_grad, *_ = ctx.needs_input_grad
    first = ways[1](grad, v, None, requested.of("conv2d_input", x_shape)) if by_x else None
    second = ways[0](x, v, None, requested.of("conv2d")) if by_grad else None
    return first, second, None


# The plain way


def conv2d(x: Any, w: Any, bias: Any, *options: Any) -> Any:
    """``leanconv::conv2d``, the quick way where there is nothing but autograd to tell."""
    if not is_plain(x, w, bias):
        return _ops.conv2d(x, w, bias, *options)
    requested = requested_of("conv2d", None, *options)
    if _wants_rules():
        return _by_rules("conv2d", x, w, bias, requested)
    try:
        return _apply_convolution(x, w, bias, requested) if _grad_enabled() else lookup.run(requested, x, w, bias)
    except TypeError:
        return Convolution.apply(x, w, bias, requested)


def conv2d_input(grad: Any, w: Any, bias: Any, input_shape: Sequence[int], *options: Any) -> Any:
    """``leanconv::conv2d_input``, the quick way where there is nothing but autograd to tell."""
    if not is_plain(grad, w, bias):
        return _ops.conv2d_input(grad, w, bias, input_shape, *options)
    return _plain_gradient(grad, w, bias, requested_of("conv2d_input", input_shape, *options))


def conv2d_weight(x: Any, grad: Any, weight_shape: Sequence[int], *options: Any) -> Any:
    """``leanconv::conv2d_weight``, the quick way where there is nothing but autograd to tell."""
    if not is_plain(x, grad):
        return _ops.conv2d_weight(x, grad, weight_shape, *options)
    return _plain_gradient(x, grad, requested_of("conv2d_weight", weight_shape, *options))


def _plain_gradient(*given: Any) -> Any:
    requested: LayerOptions = given[-1]
    if _wants_rules():
        return _by_rules(requested.function, *given)
    return _PLAIN[requested.function].apply(*given) if _grad_enabled() else _run(*given)


def _by_rules(function: str, *given: Any) -> Any:
    """A call inside torch.func: of its transforms, functionalize knows operators only."""
    if _any_autocast():
        *tensors, requested = given
        given = *_lowered(tensors), requested
    if not takes_rules():
        return _OPERATORS[tuple(_SCHEMAS).index(function)](*given)
    return _TRANSFORMED[function].apply(*given)


def _run(*given: Any) -> Any:
    """leanconv's own call; the last argument is its options."""
    *arrays, requested = given
    return lookup.run(requested, *arrays)


_options = attrgetter("stride", "padding", "dilation", "groups", "precision", "batch_invariant")


def _spread(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which takes options one by one, with one argument for all of them, the last."""

    def spread(*given: Any) -> Any:
        *tensors, requested = given
        shape = () if requested.shape is None else (requested.shape,)
        return function(*tensors, *shape, *_options(requested))

    return spread


#: The three functions for a derivative: leanconv's calls, calls with a graph of their own, and the operators.
_CALLS: Ways = _run, _run, _run
_RECORDED: Ways = _spread(conv2d), _spread(conv2d_input), _spread(conv2d_weight)
_OPERATORS: Ways = _spread(_ops.conv2d), _spread(_ops.conv2d_input), _spread(_ops.conv2d_weight)


def _ways(first: Any, second: Any = None) -> Ways:
    """For a derivative, by what is given to it.

    Batches of gradients (``is_grads_batched=True``) are tensors of PyTorch's older vmap, which knows operators only.
    """
    if _is_batch(first) or (second is not None and _is_batch(second)):
        return _OPERATORS
    return _RECORDED if _grad_enabled() or _wants_rules() else _CALLS


class Convolution(torch.autograd.Function):
    """conv2d."""

    @staticmethod
    def forward(ctx: Any, first: Any, second: Any, third: Any, requested: Any) -> Any:
        _set_up(ctx, (first, second, requested), None)
        return lookup.run(requested, first, second, third)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _conv2d_backward(ctx, grad, _ways(grad))


#: NOTE: `apply` of PyTorch's class, in Python, looks for transforms, which have been ruled out where this is called,
#: and for tensors that have outlived one. These have no memory, which raises TypeError.
_apply_convolution = super(torch.autograd.Function, Convolution).apply


class InputGradient(torch.autograd.Function):
    """conv2d_input."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        _set_up(ctx, given, None)
        return _run(*given)

    @staticmethod
    def backward(ctx: Any, u: Any) -> Any:
        return _input_backward(ctx, u, _ways(u))


class FilterGradient(InputGradient):
    """conv2d_weight."""

    @staticmethod
    def backward(ctx: Any, v: Any) -> Any:
        return _weight_backward(ctx, v, _ways(v))


# The same for torch.func, which wants what is saved in a function of its own, and with forward-mode derivatives. NOTE:
# only there. PyTorch then inspects the signature of ``forward`` in each call. Explored (x86 server, a37ec04): 68 µs in
# place of 11.


def _transformed(name: str) -> Any:
    """What computes the function ``name`` inside transforms of torch.func."""
    kind = _PLAIN[name]

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _set_up(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:2])
        ctx.requested, ctx.output_shape = inputs[-1], output.shape

    def over_a_batch(info: Any, axes: Any, *given: Any) -> Any:
        return vmap.mapped(vmap.RULES[name], info, axes, *given, _RECORDED)

    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Of a sum of products: one factor's tangent by the other factor, each; and the bias's."""
        first, second = (forward_ad.unpack_dual(each).primal for each in ctx.saved_tensors)
        requested = ctx.requested
        by_first, by_second, by_bias = tangents[:3]
        parts = [] if by_bias is None else [by_bias[:, None, None].expand(ctx.output_shape)]
        # PyTorch switches tangents off here, those of an outer jvp too, which would get lost
        with forward_ad._set_fwd_grad_enabled(True):
            for factors in (by_first, second), (first, by_second):
                if all(each is not None for each in factors):
                    function = _ways(*factors)[tuple(_SCHEMAS).index(name)]
                    parts.append(function(*factors, *((None,) if name != "conv2d_weight" else ()), requested))
            return sum(parts[1:], parts[0])

    ways = {"forward": _run, "setup_context": setup_context, "vmap": over_a_batch, "jvp": jvp}
    return type(f"Transformed{kind.__name__}", (kind,), {key: staticmethod(way) for key, way in ways.items()})


# The kernels: leanconv's own calls. They run without autograd, since they compute no gradient


def _kernel(function: str) -> Callable[..., Any]:
    def kernel(*given: Any) -> Any:
        *tensors, requested = _requested(function, given)
        with torch.no_grad():
            return lookup.run(requested, *tensors)

    return kernel


for _name in _SCHEMAS:
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _kernel(_name), _key)


def define_composite(schema: str, function: Callable[..., Any]) -> None:
    """An operator that calls others: torch.jit.trace records it as one."""
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(schema.partition("(")[0], function, "CompositeImplicitAutograd")


# Shapes and strides without values


def is_channels_last(x: Any) -> bool:
    """Whether leanconv takes a tensor (n, c, h, w) for one that lies channels last."""
    return lies_channels_last(tuple(x.shape), tuple(x.stride()))


def _like(x: Any, shape: Sequence[Any]) -> Any:
    """A tensor of ``shape`` in the memory order of x, as the kernels return it."""
    form = torch.channels_last if is_channels_last(x) else torch.contiguous_format
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=form)


def output_shape(x_shape: Any, w_shape: Any, stride: Any, padding: Any, dilation: Any) -> tuple[Any, ...]:
    """Shape of conv2d's result; ``padding`` has two numbers, or four: top, bottom, left, right."""
    down, across = (padding[:2], padding[2:]) if len(padding) == 4 else ((padding[0],) * 2, (padding[1],) * 2)
    sides = tuple(
        (x_shape[2 + i] + sum(pads) - dilation[i] * (w_shape[2 + i] - 1) - 1) // stride[i] + 1
        for i, pads in enumerate((down, across))
    )
    return x_shape[0], w_shape[0], *sides


def _empty(shape: Sequence[Any]) -> bool:
    return any(isinstance(length, int) and length < 1 for length in shape[1:])


def _fake_conv2d(x: Any, w: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: Any, *rest: Any) -> Any:
    torch._check(x.dim() == 4 and w.dim() == 4, lambda: f"x has {x.dim()} dimensions and w {w.dim()}; both must have 4")
    torch._check(
        x.shape[1] == w.shape[1] * groups,
        lambda: f"w has {w.shape[1]} channels, but x has in_channels={x.shape[1]} and groups={groups}",
    )
    torch._check(x.dtype == w.dtype, lambda: f"w has dtype {w.dtype} and x {x.dtype}; they must be the same")
    shape = output_shape(x.shape, w.shape, stride, padding, dilation)
    torch._check(not _empty(shape), lambda: f"the output would have shape {shape}")
    return _like(x, shape)


_FAKES: dict[str, Callable[..., Any]] = {
    "conv2d": _fake_conv2d,
    "conv2d_input": lambda grad, w, bias, input_shape, *options: _like(grad, input_shape),
    "conv2d_weight": lambda x, grad, weight_shape, *options: _like(x, weight_shape),
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"leanconv::{_name}", _fake, lib=_library)


def _requested(name: str, inputs: Any) -> tuple[Any, ...]:
    """The inputs of an operator with its options as one."""
    if name == "conv2d":
        return *inputs[:3], requested_of(name, None, *inputs[3:])
    at = 3 if name == "conv2d_input" else 2
    return *inputs[:at], requested_of(name, tuple(inputs[at]), *inputs[at + 1 :])


def _autograd(name: str, backward: Callable[..., Any]) -> None:
    """The operators have their options one by one, the plain way as one."""
    # what of the operator's inputs has no gradient beside the one for all options
    more = (None,) * (5 if name == "conv2d" else 6)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _set_up(ctx, _requested(name, inputs), output)

    def backward_of(ctx: Any, grad: Any) -> Any:
        return *backward(ctx, grad, _OPERATORS), *more

    torch.library.register_autograd(f"leanconv::{name}", backward_of, setup_context=setup_context, lib=_library)


_autograd("conv2d", _conv2d_backward)
_autograd("conv2d_input", _input_backward)
_autograd("conv2d_weight", _weight_backward)


# Autocast: as PyTorch's convolutions, in the lower precision


def _lowered(arguments: Sequence[Any]) -> list[Any]:
    """The same with what autocast casts in its lower precision: floating-point tensors of its devices, not float64."""

    def cast(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        device = tensor.device.type
        return tensor.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tensor

    return [cast(each) for each in arguments]


def _autocast(name: str, key: str) -> None:
    operator = getattr(_ops, name).default
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def kernel(*arguments: Any) -> Any:
        lowered = _lowered(arguments)  # before the guard, under which autocast is off
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return operator(*lowered)

    _library.impl(name, kernel, key)


for _name in _SCHEMAS:
    _autocast(_name, "AutocastCUDA")
    _autocast(_name, "AutocastCPU")


_PLAIN: dict[str, Any] = {"conv2d": Convolution, "conv2d_input": InputGradient, "conv2d_weight": FilterGradient}
_TRANSFORMED = {name: _transformed(name) for name in _SCHEMAS}


def _register_vmap(name: str) -> None:
    def of_operator(info: Any, axes: Any, *inputs: Any) -> Any:
        return vmap.mapped(vmap.RULES[name], info, axes, *_requested(name, inputs), _OPERATORS)

    torch.library.register_vmap(f"leanconv::{name}", of_operator, lib=_library)


# from PyTorch 2.5 on
if hasattr(torch.library, "register_vmap"):
    for _name in _SCHEMAS:
        _register_vmap(_name)
