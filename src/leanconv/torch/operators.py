"""The operators ``leanconv::conv2d``, ``conv2d_input`` and ``conv2d_weight`` in PyTorch's library, with autograd; and
the same of volumes, ``conv3d``.

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
from torch.utils.flop_counter import conv_flop_count, register_flop_formula

from leanconv.arrays.memory import lies_channels_last
from leanconv.call import lookup
from leanconv.options import FUNCTIONS, LayerOptions, Op, layer_options
from leanconv.torch import vmap
from leanconv.torch.vmap import Way

_OPTIONS = "int[] stride, int[] padding, int[] dilation, SymInt groups, str precision, bool batch_invariant) -> Tensor"
_OF_OP: dict[Op, str] = {
    "fprop": f"(Tensor x, Tensor w, Tensor? bias, {_OPTIONS}",
    "dgrad": f"(Tensor grad, Tensor w, Tensor? bias, SymInt[] input_shape, {_OPTIONS}",
    "wgrad": f"(Tensor x, Tensor grad, SymInt[] weight_shape, {_OPTIONS}",
}
#: Signals are images of one row.
_SCHEMAS = {name: _OF_OP[function.op] for name, function in FUNCTIONS.items() if function.axes > 1}
NAMES = tuple(_SCHEMAS)
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
    return _grad_enabled() and any([tensor is not None and tensor.requires_grad for tensor in tensors])


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


def _convolution_backward(ctx: Any, grad: Any, way: Way) -> Any:
    (x, w), (x_shape, w_shape, requested) = ctx.saved_tensors, ctx.about
    by_x, by_w, by_bias, *_ = ctx.needs_input_grad
    dx = way(grad, w, None, requested.of("dgrad", x_shape)) if by_x else None
    dw = way(x, grad, requested.of("wgrad", w_shape)) if by_w else None
    return dx, dw, _of_each_channel(grad) if by_bias else None, None


def _of_each_channel(grad: Any) -> Any:
    """The sum over all images and pixels."""
    return grad.sum((0, *range(2, grad.dim())))


def _input_backward(ctx: Any, u: Any, way: Way) -> Any:
    (grad, w), (_, w_shape, requested) = ctx.saved_tensors, ctx.about
    by_grad, by_w, by_bias, *_ = ctx.needs_input_grad
    first = way(u, w, None, requested.of("fprop")) if by_grad else None
    second = way(u, grad, requested.of("wgrad", w_shape)) if by_w else None
    return first, second, _of_each_channel(u) if by_bias else None, None


def _weight_backward(ctx: Any, v: Any, way: Way) -> Any:
    (x, grad), (x_shape, _, requested) = ctx.saved_tensors, ctx.about
    by_x, by_grad, *_ = ctx.needs_input_grad
    first = way(grad, v, None, requested.of("dgrad", x_shape)) if by_x else None
    second = way(x, v, None, requested.of("fprop")) if by_grad else None
    return first, second, None


# The plain way


def _forward(name: str) -> Callable[..., Any]:
    operator = getattr(_ops, name)

    def forward(x: Any, w: Any, bias: Any, *options: Any) -> Any:
        """The forward operator, the quick way where there is nothing but autograd to tell."""
        if not is_plain(x, w, bias):
            return operator(x, w, bias, *options)
        requested = requested_of(name, None, *options)
        if _wants_rules():
            return _by_rules(name, x, w, bias, requested)
        try:
            return _apply_convolution(x, w, bias, requested) if _grad_enabled() else lookup.run(requested, x, w, bias)
        except TypeError:
            return Convolution.apply(x, w, bias, requested)

    return forward


def _gradient(name: str) -> Callable[..., Any]:
    operator = getattr(_ops, name)
    arrays = 2 if name.endswith("weight") else 3

    def gradient(*given: Any) -> Any:
        """A gradient's operator, the quick way where there is nothing but autograd to tell."""
        tensors, shape, options = given[:arrays], given[arrays], given[arrays + 1 :]
        if not is_plain(*tensors):
            return operator(*given)
        return _plain_gradient(*tensors, requested_of(name, shape, *options))

    return gradient


conv2d, conv2d_input, conv2d_weight = _forward("conv2d"), _gradient("conv2d_input"), _gradient("conv2d_weight")
conv3d, conv3d_input, conv3d_weight = _forward("conv3d"), _gradient("conv3d_input"), _gradient("conv3d_weight")


def _plain_gradient(*given: Any) -> Any:
    requested: LayerOptions = given[-1]
    if _wants_rules():
        return _by_rules(requested.function, *given)
    return _PLAIN[requested.function].apply(*given) if _grad_enabled() else _run(*given)


def _by_rules(function: str, *given: Any) -> Any:
    """A call inside torch.func: of its transforms, functionalize knows operators only."""
    if _any_autocast():
        *tensors, requested = given
        given = *as_autocast(tensors), requested
    if not takes_rules():
        return _operator(*given)
    return _TRANSFORMED[function].apply(*given)


def _run(*given: Any) -> Any:
    """leanconv's own call; the last argument is its options."""
    *arrays, requested = given
    return lookup.run(requested, *arrays)


_options = attrgetter("stride", "padding", "dilation", "groups", "precision", "batch_invariant")


def _spread(functions: dict[str, Callable[..., Any]]) -> Way:
    """What calls the function that the options name, with these one by one; it has one argument for them, the last."""

    def spread(*given: Any) -> Any:
        *tensors, requested = given
        shape = () if requested.shape is None else (requested.shape,)
        return functions[requested.function](*tensors, *shape, *_options(requested))

    return spread


#: How a derivative calls: leanconv's calls (`_run`), calls with a graph of their own, and the operators.
_recorded = _spread({name: globals()[name] for name in _SCHEMAS})
_operator = _spread({name: getattr(_ops, name) for name in _SCHEMAS})


def _way(first: Any, second: Any = None) -> Way:
    """For a derivative, by what is given to it.

    Batches of gradients (``is_grads_batched=True``) are tensors of PyTorch's older vmap, which knows operators only.
    """
    if _is_batch(first) or (second is not None and _is_batch(second)):
        return _operator
    return _recorded if _grad_enabled() or _wants_rules() else _run


class Convolution(torch.autograd.Function):
    """conv2d."""

    @staticmethod
    def forward(ctx: Any, first: Any, second: Any, third: Any, requested: Any) -> Any:
        _set_up(ctx, (first, second, requested), None)
        return lookup.run(requested, first, second, third)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _convolution_backward(ctx, grad, _way(grad))


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
        return _input_backward(ctx, u, _way(u))


class FilterGradient(InputGradient):
    """conv2d_weight."""

    @staticmethod
    def backward(ctx: Any, v: Any) -> Any:
        return _weight_backward(ctx, v, _way(v))


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
        return vmap.mapped(name, info, axes, *given, _recorded)

    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Of a sum of products: one factor's tangent by the other factor, each; and the bias's."""
        first, second = (forward_ad.unpack_dual(each).primal for each in ctx.saved_tensors)
        requested = ctx.requested
        by_first, by_second, by_bias = tangents[:3]
        ones = (1,) * (len(ctx.output_shape) - 2)
        parts = [] if by_bias is None else [by_bias.view(-1, *ones).expand(ctx.output_shape)]
        # PyTorch switches tangents off here, those of an outer jvp too, which would get lost
        with forward_ad._set_fwd_grad_enabled(True):
            for factors in (by_first, second), (first, by_second):
                if all(each is not None for each in factors):
                    bias = () if name.endswith("weight") else (None,)
                    parts.append(_way(*factors)(*factors, *bias, requested))
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
    """Whether leanconv takes a tensor (n, c, h, w), or (n, c, d, h, w), for one that lies channels last."""
    return lies_channels_last(tuple(x.shape), tuple(x.stride()))


#: by the number of axes: what PyTorch calls channels last
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def memory_format(x: Any) -> Any:
    """What PyTorch calls the memory order that leanconv takes a tensor for."""
    return CHANNELS_LAST[x.dim()] if is_channels_last(x) else torch.contiguous_format


def like(x: Any, shape: Sequence[Any]) -> Any:
    """A tensor of ``shape`` in the memory order of x, as the kernels return it."""
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format(x))


def output_shape(x_shape: Any, w_shape: Any, stride: Any, padding: Any, dilation: Any) -> tuple[Any, ...]:
    """Shape of a convolution's result; ``padding`` has a number for each axis, or two: top, bottom, left, right."""
    twice = len(padding) == 2 * len(stride)
    around = [sum(padding[2 * i : 2 * i + 2]) if twice else 2 * padding[i] for i in range(len(stride))]
    sides = tuple(
        (x_shape[2 + i] + pads - dilation[i] * (w_shape[2 + i] - 1) - 1) // stride[i] + 1
        for i, pads in enumerate(around)
    )
    return x_shape[0], w_shape[0], *sides


def _empty(shape: Sequence[Any]) -> bool:
    return any(isinstance(length, int) and length < 1 for length in shape[1:])


def _fake_forward(x: Any, w: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: Any, *rest: Any) -> Any:
    axes = 2 + len(stride)
    torch._check(
        x.dim() == axes and w.dim() == axes,
        lambda: f"x has {x.dim()} dimensions and w {w.dim()}; both must have {axes}",
    )
    torch._check(
        x.shape[1] == w.shape[1] * groups,
        lambda: f"w has {w.shape[1]} channels, but x has in_channels={x.shape[1]} and groups={groups}",
    )
    torch._check(x.dtype == w.dtype, lambda: f"w has dtype {w.dtype} and x {x.dtype}; they must be the same")
    shape = output_shape(x.shape, w.shape, stride, padding, dilation)
    torch._check(not _empty(shape), lambda: f"the output would have shape {shape}")
    return like(x, shape)


_FAKES: dict[Op, Callable[..., Any]] = {
    "fprop": _fake_forward,
    "dgrad": lambda grad, w, bias, input_shape, *options: like(grad, input_shape),
    "wgrad": lambda x, grad, weight_shape, *options: like(x, weight_shape),
}
for _name in _SCHEMAS:
    torch.library.register_fake(f"leanconv::{_name}", _FAKES[FUNCTIONS[_name].op], lib=_library)


# What they cost, for torch.utils.flop_counter: as many as PyTorch's convolutions, whose gradients multiply as much

_FLOPS: dict[Op, Callable[..., int]] = {
    "fprop": lambda x, w, *rest, out_shape: conv_flop_count(x, w, out_shape),
    "dgrad": lambda grad, w, *rest, out_shape: conv_flop_count(out_shape, w, grad),
    "wgrad": lambda x, grad, *rest, out_shape: conv_flop_count(x, out_shape, grad),
}
for _name in _SCHEMAS:
    register_flop_formula(getattr(_ops, _name))(_FLOPS[FUNCTIONS[_name].op])


def _requested(name: str, inputs: Any, shaped: bool = True) -> tuple[Any, ...]:
    """The inputs of an operator with its options as one; without the result's shape unless ``shaped``."""
    op = FUNCTIONS[name].op
    if op == "fprop":
        return *inputs[:3], requested_of(name, None, *inputs[3:])
    at = 3 if op == "dgrad" else 2
    return *inputs[:at], requested_of(name, tuple(inputs[at]) if shaped else None, *inputs[at + 1 :])


def _autograd(name: str, backward: Callable[..., Any]) -> None:
    """The operators have their options one by one, the plain way as one."""
    # what of the operator's inputs has no gradient beside the one for all options
    more = (None,) * (5 if FUNCTIONS[name].op == "fprop" else 6)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        # NOTE: derivatives do not need the shape. Its numbers may be symbols of what traces, which a check would fix
        _set_up(ctx, _requested(name, inputs, shaped=False), output)

    def backward_of(ctx: Any, grad: Any) -> Any:
        return *backward(ctx, grad, _operator), *more

    torch.library.register_autograd(f"leanconv::{name}", backward_of, setup_context=setup_context, lib=_library)


_BACKWARD: dict[Op, Callable[..., Any]] = {
    "fprop": _convolution_backward,
    "dgrad": _input_backward,
    "wgrad": _weight_backward,
}
for _name in _SCHEMAS:
    _autograd(_name, _BACKWARD[FUNCTIONS[_name].op])


# Autocast: as PyTorch's convolutions, in the lower precision


def as_autocast(arguments: Sequence[Any]) -> list[Any]:
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
        lowered = as_autocast(arguments)  # before the guard, under which autocast is off
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return operator(*lowered)

    _library.impl(name, kernel, key)


for _name in _SCHEMAS:
    _autocast(_name, "AutocastCUDA")
    _autocast(_name, "AutocastCPU")


_KINDS: dict[Op, Any] = {"fprop": Convolution, "dgrad": InputGradient, "wgrad": FilterGradient}
_PLAIN = {name: _KINDS[FUNCTIONS[name].op] for name in _SCHEMAS}
_TRANSFORMED = {name: _transformed(name) for name in _SCHEMAS}


def _register_vmap(name: str) -> None:
    def of_operator(info: Any, axes: Any, *inputs: Any) -> Any:
        return vmap.mapped(name, info, axes, *_requested(name, inputs), _operator)

    torch.library.register_vmap(f"leanconv::{name}", of_operator, lib=_library)


# from PyTorch 2.5 on
if hasattr(torch.library, "register_vmap"):
    for _name in _SCHEMAS:
        _register_vmap(_name)
