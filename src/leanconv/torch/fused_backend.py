"""The same for torch.compile: in the graph that Dynamo gives, convolutions with what follows them become one operator
each, and squeeze-and-excite another."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.autograd import forward_ad

from leanconv.arrays import arrays_of
from leanconv.call import bind
from leanconv.call.choose import NoAlgorithmError
from leanconv.call.precompile import precompile
from leanconv.call.resolve import layer_problem
from leanconv.dtypes import DTYPES
from leanconv.options import PRECISIONS, Layout, Precision, layer_options, one_of, padding_word, sides_for
from leanconv.problem import ConvProblem
from leanconv.runtime.compile import CompileError
from leanconv.runtime.driver import CudaUnavailableError
from leanconv.torch import comparing, compile_report, epilogue, operators, patterns, squeeze, squeeze_graph
from leanconv.torch.fused_layer import Way
from leanconv.torch.fusing import FuseReport
from leanconv.torch.layers import is_channels_last, stricter, tf32_allowed
from leanconv.torch.operators import CHANNELS_LAST
from leanconv.torch.patterns import Chain
from leanconv.torch.squeeze_graph import Block, Layer

F = torch.nn.functional
_CONVS = {torch.conv2d: 2, torch.conv3d: 3}
_SQUEEZED = {torch.conv1d: 1, **_CONVS}
_NAMES = "input", "weight", "bias", "stride", "padding", "dilation", "groups"
_NORM = "input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"
_DTYPES = torch.float32, torch.float16, torch.bfloat16


def fused(
    graph: fx.GraphModule, example_inputs: Sequence[Any], *, compiler: Callable[..., Any] | str | None = None,
    precision: Precision = "fp32", mode: str | None = None, options: dict[str, Any] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """A backend of torch.compile for inference, ``torch.compile(model, backend=leanconv.torch.fused)``.

    Each convolution of images or volumes, with the batch normalisation in evaluation, the residual and the activation
    that follow it, becomes one call of an operator whose kernel computes all of it, where leanconv is expected to be
    quicker than PyTorch's convolution and one pass over the result. The normalisation is ``scale`` and ``bias`` of that
    call, computed in the graph, so changed parameters are followed. Squeeze-and-excite of signals, images or volumes,
    ``x * sigmoid(conv(activation(conv(mean of x))))``, or with a hardsigmoid, becomes one call too, where one launch is
    expected to be quicker than inductor's kernels. All else is inductor's. Graphs in which a gradient is recorded, or a
    derivative taken, are not changed. A model that `fuse` has made may be compiled so too: then nothing is left to
    compute of its normalisations, and filters that have not changed stay packed, but in CUDA graphs.

    Args:
        graph, example_inputs: what Dynamo gives.
        compiler: what compiles the rest: the name of another backend, such as ``"aot_eager"``, or a function like this
            one; None: inductor.
        precision: the least precise arithmetic that is allowed where PyTorch allows TF32, as in `enable`.
        mode, options: those of torch.compile, for inductor; ``options`` may have ``"precision"`` too.

    Returns:
        What Dynamo calls in the graph's place.

    Where leanconv is installed, ``backend="leanconv"`` is this function with its defaults. `fused_report` says what
    became of each graph.

    >>> import torch
    >>> import leanconv.torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
    >>> compiled = torch.compile(model, backend=leanconv.torch.fused)  # on the CPU all of it is inductor's
    """
    options = dict(options or {})
    precision = one_of("precision", options.pop("precision", precision), PRECISIONS)
    given = *example_inputs, *graph.parameters()
    recorded = torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in given)
    if recorded:
        report = _unchanged(graph, "a gradient is recorded, as it is not under torch.no_grad()")
    elif forward_ad._current_level >= 0 or _records(graph.graph):
        report = _unchanged(graph, "a derivative is taken")
    else:
        report = rewrite(graph, precision)
    compile_report.keep(report)
    if callable(compiler):
        return compiler(graph, example_inputs)
    from torch._dynamo import lookup_backend

    if compiler is not None:
        return lookup_backend(compiler)(graph, example_inputs)
    from torch._inductor import compile_fx, list_mode_options

    patches = {**(list_mode_options(mode) if mode else {}), **options}
    return compile_fx.compile_fx(graph, example_inputs, config_patches=patches or None)


def _records(graph: fx.Graph) -> bool:
    """Whether a derivative of what a node computes is taken inside of the graph, as torch.func does."""
    # NOTE: without a gradient too, views of parameters and what returns its argument, such as ``weight.to(x.dtype)``,
    # require one
    given = {id(_value(node)) for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    values = [each for node in graph.nodes if (each := _value(node)) is not None and id(each) not in given]
    try:
        recorded = any(each.grad_fn is not None for each in values)
    except RuntimeError:  # of such a view that is changed in place
        recorded = True
    return recorded or any(getattr(node.target, "__name__", "") == "_make_dual" for node in graph.nodes)


def _unchanged(graph: fx.GraphModule, why: str) -> FuseReport:
    rows = compile_report.Rows(list(graph.graph.nodes), dict(graph.named_modules()))
    rows.leave_all(why)
    return rows.report()


def rewrite(graph: fx.GraphModule, precision: Precision) -> FuseReport:
    """Put operators in place of what they compute; returns which, and what was left."""
    modules = dict(graph.named_modules())
    nodes = list(graph.graph.nodes)
    rows = compile_report.Rows(nodes, modules)
    blocks = _blocks(graph.graph, modules, rows)
    taken = {node for block in blocks for node in block.nodes}
    covered = set(taken)
    calls: dict[fx.Node | None, fx.Node] = {}
    chains: list[Chain] = []
    problems: dict[int, dict[ConvProblem, None]] = {}
    for node in reversed(nodes):
        if node.op != "call_function" or node.target not in _CONVS or node in taken:
            continue
        chain = patterns.chain_of(node, modules, _is_norm, taken, plain=True)
        covered.update(chain.nodes)
        why = _why_not(chain, nodes, modules)
        way = _left(why) if why else _decide(chain, precision)
        if len(chain.nodes) == 1 and len(node.users) > 1:
            way = way._replace(why=f"others read its result; {way.why}")
        if way.kernel is None or way.device is None:
            rows.leave(node, compile_report.name_of(node), way)
            continue
        rows.fuse(node, compile_report.name_of(node), chain.what, way)
        problems.setdefault(way.device, {})[way.kernel] = None
        taken.update(chain.nodes)
        chains.append(chain)
    rows.leave_others(covered)
    for index, each in problems.items():
        precompile(each, device=f"cuda:{index}", progress=False)
    for block in blocks:
        last = block.nodes[-1]
        with graph.graph.inserting_before(last):
            call = graph.graph.call_function(squeeze.OPERATOR, (*_operands(block), *block.functions))
        calls[last] = _replaced(graph.graph, block.nodes, call)
    scaled = _scaled(graph.graph, chains)
    for chain in reversed(chains):
        _replace(graph.graph, chain, calls, scaled[chain], precision)
    if chains or blocks:
        graph.graph.lint()
        graph.recompile()
    return rows.report()


def _why_not(chain: Chain, nodes: Sequence[fx.Node], modules: dict[str, torch.nn.Module]) -> str:
    """Why no operator can take the place of a chain; empty if one can."""
    if _value(chain.conv) is None:
        return "nobody knows the shape of its result"
    if why := patterns.movable(chain, nodes, modules):
        return why
    if not _adds(chain):
        return "its residual has not the shape, type and place of its result"
    if chain.norm is not None and not _is_parameters(chain):
        return "what its normalisation is computed from is no parameter that layers alone read"
    return ""


def _value(node: Any) -> Any:
    """What stands for a node's tensor while Dynamo traces; None for anything else."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _given(node: fx.Node, names: Sequence[str], defaults: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names."""
    return {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def _of_conv(node: fx.Node) -> dict[str, Any]:
    return _given(node, _NAMES, {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1})


def _of_norm(node: fx.Node) -> dict[str, Any]:
    return _given(node, _NORM, {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5})


def _is_norm(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is not F.batch_norm:
        return False
    given = _of_norm(node)
    known = all(_value(given[name]) is not None for name in ("running_mean", "running_var"))
    return known and given["training"] is False and type(given["eps"]) is float


def _is_parameters(chain: Chain) -> bool:
    """Whether all that the scale and the bias are computed from is an input of the graph that stays as it is, as
    parameters do."""
    assert chain.norm is not None
    norm = _of_norm(chain.norm)
    given = *(norm[name] for name in ("running_mean", "running_var", "weight", "bias")), _of_conv(chain.conv)["bias"]
    return all(each is None or (_value(each) is not None and _is_constant(each)) for each in given)


def _is_constant(node: fx.Node) -> bool:
    """Whether a node is an input of the graph that layers alone read: others may change it in place, before or after
    the place where the scale is computed."""
    return node.op == "placeholder" and all(_is_norm(user) or user.target in _SQUEEZED for user in node.users)


def _adds(chain: Chain) -> bool:
    """Whether a residual, if there is one, is like the result."""
    if chain.add is None:
        return True
    y, add = _value(chain.conv), _value(chain.add)
    return add is not None and (add.shape, add.dtype, add.device) == (y.shape, y.dtype, y.device)


def _numbers(given: dict[str, Any], axes: int) -> tuple[tuple[int, ...], ...] | None:
    """Stride, padding and dilation, a number for each axis, of padding also two; None for anything else."""
    found: list[Any] = []
    for name in ("stride", "padding", "dilation"):
        value = given[name]
        value = (value,) if type(value) is int else value
        if isinstance(value, str):
            found.append(value)
            continue
        if not all(type(each) is int for each in value):
            return None
        found.append(tuple(value) * axes if len(value) == 1 else tuple(value))
    stride, padding, dilation = found
    if isinstance(padding, str):
        window = tuple(map(int, _value(given["weight"]).shape[2:]))
        padding = sides_for(padding_word(padding), window, stride, dilation)
    return stride, padding, dilation


def _hints(shape: Any) -> tuple[int, ...]:
    """Sizes, those that may change as they are now."""
    return tuple(each if type(each) is int else int(each.node.hint) for each in shape)


def _precision(dtype: Any, precision: Precision) -> Precision:
    return precision if dtype is torch.float32 and tf32_allowed() else stricter(precision, "fp32")


def _decide(chain: Chain, precision: Precision) -> Way:
    """Who computes a chain: leanconv, if it is expected to be quicker."""
    given, axes = _of_conv(chain.conv), _CONVS[chain.conv.target]
    x, w, numbers = _value(given["input"]), _value(given["weight"]), _numbers(given, axes)
    if x is None or w is None or numbers is None or type(given["groups"]) is not int or x.dim() != axes + 2:
        return _left("its stride, padding, dilation, groups or batch is not one for leanconv")
    arrays = arrays_of(x)
    index = None if arrays is None or x.device.type not in ("cpu", "cuda") else arrays.device(x)
    if index is None:
        return _left(f"its images are on {x.device}")
    if x.dtype not in _DTYPES or w.dtype != x.dtype:
        return _left(f"its dtypes are {x.dtype} and {w.dtype}")
    if torch.is_autocast_enabled(x.device.type):
        return _left("autocast is enabled")
    try:
        shapes = _hints(x.shape), _hints(w.shape)
    except TypeError:
        return _left("a size of its images depends on values")
    layout: Layout = "NHWC" if is_channels_last(x, w) else "NCHW"
    stride, padding, dilation = numbers
    requested = layer_options(
        f"conv{axes}d", stride, padding, dilation, given["groups"], precision=_precision(x.dtype, precision),
        activation=chain.activation,
    )  # fmt: skip
    biased = given["bias"] is not None or chain.norm is not None
    bias = (int(w.shape[0]),) if biased else None
    try:
        dtype = DTYPES[str(x.dtype).removeprefix("torch.")].name
        problem = layer_problem(requested, *shapes, bias, dtype, layout)
        problem = replace(problem, scale=chain.norm is not None, add=chain.add is not None)
        loaded = bind.load(problem, index, "auto", requested.workspace_limit)
    except NoAlgorithmError:
        return _left("no algorithm can run it")
    except (CudaUnavailableError, ValueError, TypeError) as error:
        return _left(str(error).split("\n")[0])
    tf32 = tf32_allowed() and problem.dtype == "float32"
    passes = comparing.passes_cycles(problem, loaded.device.target, compiled=True)
    decision = comparing.fused(loaded, problem, tf32, passes)
    if not decision.name:
        return Way("PyTorch", problem, decision.why)
    return Way(f"leanconv: {decision.name}", problem, decision.why, kernel=problem, device=index)


def _left(why: str) -> Way:
    return Way("PyTorch", "", why)


def _replace(
    graph: fx.Graph, chain: Chain, calls: dict[fx.Node | None, fx.Node], scaled: tuple[Any, Any], precision: Precision
) -> None:
    given, axes = _of_conv(chain.conv), _CONVS[chain.conv.target]
    numbers = _numbers(given, axes)
    assert numbers is not None
    dtype = _value(chain.conv).dtype
    scale, bias = scaled
    last = is_channels_last(_value(given["input"]), _value(given["weight"]))
    with graph.inserting_before(chain.last):
        options = *map(list, numbers), given["groups"], _precision(dtype, precision), False
        x, add = (_lies(graph, each, last) for each in (given["input"], calls.get(chain.add, chain.add)))
        tensors = x, given["weight"], bias, scale, add
        call = graph.call_function(epilogue.OPERATORS[axes], (*tensors, chain.activation, *options))
    calls[chain.last] = _replaced(graph, chain.nodes, call)


def _lies(graph: fx.Graph, node: Any, last: bool) -> Any:
    """A tensor of the graph, channels last if its layer computes so, as PyTorch does where the filters alone lie so:
    behind a group normalisation, which returns images channels first. Inductor lets what computes it store it so."""
    if not last or node is None or operators.is_channels_last(_value(node)):
        return node
    form = CHANNELS_LAST[_value(node).dim()]
    made = graph.call_method("contiguous", (node,), {"memory_format": form})
    made.meta["example_value"] = _value(node).contiguous(memory_format=form)
    return made


def _replaced(graph: fx.Graph, nodes: Sequence[fx.Node], call: fx.Node) -> fx.Node:
    call.meta["example_value"] = _value(nodes[-1])
    patterns.replace(graph, nodes, call)
    return call


def _scaled(graph: fx.Graph, chains: Sequence[Chain]) -> dict[Chain, tuple[Any, Any]]:
    """Scale and bias of each chain's call: a batch normalisation as a scale in float32, and a bias in the result's
    type. Those of all normalisations of a kind are computed together, by functions of lists: a launch for each of them
    takes as long as that of a short layer."""
    found: dict[Chain, tuple[Any, Any]] = {}
    alike: dict[Any, list[Chain]] = {}
    for chain in chains:
        if chain.norm is None:
            found[chain] = None, _of_conv(chain.conv)["bias"]
            continue
        norm, bias = _of_norm(chain.norm), _of_conv(chain.conv)["bias"]
        kind = norm["eps"], norm["weight"] is None, norm["bias"] is None, bias is None
        alike.setdefault((kind, _value(chain.conv).device), []).append(chain)

    def each(function: Any, *given: Any) -> list[fx.Node]:
        made = graph.call_function(function, given)
        return [graph.call_function(operator.getitem, (made, at)) for at in range(len(given[0]))]

    for together in alike.values():
        norms = [_of_norm(chain.norm) for chain in together if chain.norm is not None]

        def wide(name: str, norms: Sequence[dict[str, Any]] = norms) -> list[Any]:
            return [_as(graph, norm[name], torch.float32) for norm in norms]

        with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
            scales = each(torch._foreach_add, wide("running_var"), norms[0]["eps"])
            scales = each(torch._foreach_reciprocal, each(torch._foreach_sqrt, scales))
            if norms[0]["weight"] is not None:
                scales = each(torch._foreach_mul, scales, wide("weight"))
            middles = wide("running_mean")
            biases = [_of_conv(chain.conv)["bias"] for chain in together]
            if biases[0] is not None:
                middles = each(torch._foreach_sub, middles, [_as(graph, bias, torch.float32) for bias in biases])
            shifts = each(torch._foreach_neg, each(torch._foreach_mul, middles, scales))
            if norms[0]["bias"] is not None:
                shifts = each(torch._foreach_add, shifts, wide("bias"))
            for chain, scale, shift in zip(together, scales, shifts, strict=True):
                dtype = _value(chain.conv).dtype
                found[chain] = scale, shift if dtype is torch.float32 else graph.call_method("to", (shift, dtype))
    return found


def _as(graph: fx.Graph, tensor: Any, dtype: Any) -> Any:
    return tensor if _value(tensor).dtype is dtype else graph.call_method("to", (tensor, dtype))


# Squeeze-and-excite


def _blocks(graph: fx.Graph, modules: dict[str, torch.nn.Module], rows: compile_report.Rows) -> list[Block]:
    """Those that one launch is expected to compute in less time than inductor's kernels. Their kernels are compiled."""
    taken: dict[Block, squeeze.Way] = {}
    for block in squeeze_graph.blocks(graph, modules, partial(_layer, modules=modules)):
        way, name = _way(block), compile_report.name_of_block(block)
        if way.plan is None:
            rows.leave(block.nodes[-1], name, way)
        else:
            rows.fuse(block.nodes[-1], name, block.what, way)
            taken[block] = way
    with suppress(CudaUnavailableError, CompileError):  # of which the operator warns, and is PyTorch's functions
        squeeze.load(taken.values())
    return list(taken)


def _layer(node: fx.Node, modules: dict[str, torch.nn.Module]) -> Layer | None:
    """The layer that ends with a node, if it is the product of a matrix with a single pixel."""
    activation = patterns.activation(node, modules)
    conv = node if activation is None else squeeze_graph.given(node)
    if conv is None or conv.op != "call_function" or conv.target not in _SQUEEZED:
        return None
    given = _of_conv(conv)
    w = _value(given["weight"])
    if w is None or not isinstance(given["input"], fx.Node) or not all(type(each) is int for each in w.shape):
        return None
    numbers = _numbers(given, _SQUEEZED[conv.target])
    if numbers is None:
        return None
    if not squeeze_graph.is_matrix(w.shape, numbers[1], given["groups"]):
        return None
    return Layer(given["input"], tuple(w.shape), activation, tuple(dict.fromkeys((conv, node))))


def _operands(block: Block) -> list[Any]:
    layers = [_of_conv(layer.conv) for layer in (block.first, block.second)]
    return [block.x, *(layer[name] for layer in layers for name in ("weight", "bias"))]


def _way(block: Block) -> squeeze.Way:
    """How a block would be computed; PyTorch does where something of it is not known or has another type, as in
    autocast."""
    operands = _operands(block)
    values = [_value(each) for each in (*block.nodes, *operands) if each is not None]
    x = _value(block.x)
    if x is None or x.device.type not in ("cpu", "cuda"):
        return squeeze.Way("PyTorch", "", "its images are not known, or on no GPU")
    if any(value is None or value.dtype is not x.dtype for value in values):
        return squeeze.Way("PyTorch", "", f"something of it is not known, or not {x.dtype}")
    try:
        tensors = [None if each is None else _as_now(_value(each)) for each in operands]
    except TypeError:  # a size that depends on values
        return squeeze.Way("PyTorch", "", "a size of its images depends on values")
    return squeeze.decide(*block.functions, *tensors, compiled=True)


def _as_now(value: Any) -> Any:
    """A tensor whose sizes that may change are numbers, as they are now."""
    if all(type(each) is int for each in (*value.shape, *value.stride())):
        return value
    with value.fake_mode:
        return torch.empty_strided(_hints(value.shape), _hints(value.stride()), dtype=value.dtype, device=value.device)
