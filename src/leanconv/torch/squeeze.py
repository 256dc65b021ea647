"""Squeeze-and-excite in a fused model: found in its graph, and computed by one kernel where that is quicker."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from leanconv.arrays import arrays_of
from leanconv.dtypes import DTYPES
from leanconv.kernels.common import squeeze_excite as kernel
from leanconv.plan import Plan
from leanconv.runtime import launch
from leanconv.runtime.bounded_cache import BoundedCache
from leanconv.runtime.compile import CompileError
from leanconv.runtime.driver import CudaUnavailableError
from leanconv.torch import comparing, operators, patterns
from leanconv.torch.fused_layer import FusedConv
from leanconv.torch.packed import signature
from leanconv.torch.switches import compiling, on_gpu

F, nn = torch.nn.functional, torch.nn
#: torch.fx takes a product in place for one of these
_MULTIPLIES = operator.mul, torch.mul
_POOLS: tuple[type, ...] = nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d
_POOLED = F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d
_ROLES = "x", "w1", "b1", "w2", "b2", "y"


class Way(NamedTuple):
    """How a block is computed with images of one kind."""

    runs: str
    problem: Any
    why: str
    #: the kernel's; None where PyTorch computes
    plan: Plan | None = None
    device: int | None = None


class Squeeze(NamedTuple):
    """A block in a graph: ``x * gate(second(first(mean of x)))``."""

    x: Node
    first: Node
    second: Node
    #: whether the gate is a hardsigmoid behind the second layer, which has its activation otherwise
    hard: bool
    #: all of it, in order
    nodes: tuple[Node, ...]


class SqueezeExcite(torch.nn.Module):
    """What `fuse` puts in place of squeeze-and-excite: ``y = input * gate(second(first(mean of input)))``.

    Its layers are the `FusedConv` that the model has otherwise. On a GPU one kernel computes all of it for images of
    which that is expected to be quicker; else they do, with PyTorch's mean and product.
    """

    def __init__(self, first: FusedConv, second: FusedConv, hard: bool, names: tuple[str, str], name: str) -> None:
        super().__init__()
        self.names, self.hard, self.name, self.axes = ("first", "second"), hard, name, first.weight.dim() - 2
        self.what = "+".join(("mean", first.what, second.what, *(("hardsigmoid",) * hard), "mul"))
        if names[0] != names[1] and {*names}.isdisjoint(dir(self)):
            self.names = names
        for each, layer in zip(self.names, (first, second), strict=True):
            self.add_module(each, layer)
        self.train(False)
        self._begin()

    def _begin(self) -> None:
        self._ways: BoundedCache[Any, tuple[Way, Any, Any]] = BoundedCache(256)

    def __getstate__(self) -> dict[str, Any]:
        """What is decided is not copied."""
        return {name: value for name, value in self.__dict__.items() if name != "_ways"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    @property
    def layers(self) -> tuple[Any, Any]:
        """The two layers of the means: `FusedConv`, or what somebody has put in their place."""
        first, second = (self._modules[name] for name in self.names)
        return first, second

    @property
    def ways(self) -> tuple[Any, ...]:
        """How it has been computed so far on a GPU, and its layers by themselves."""
        own = (way for way, _, _ in self._ways.values())
        return (*own, *(way for layer in self.layers for way in getattr(layer, "ways", ())))

    def forward(self, input: Any) -> Any:
        """The block's result."""
        if compiling() or type(input) is not torch.Tensor or not on_gpu(input):
            return self._composed(input)
        first, second = self.layers
        if any(type(each) is not FusedConv or patterns.has_hooks(each) for each in (first, second)):
            return self._composed(input)
        given: tuple[Any, ...] = input, first.weight, first.bias, second.weight, second.bias
        if operators.needs_operators(*(each for each in given if each is not None)):
            return self._composed(input)
        try:
            addresses = [0 if each is None else each.data_ptr() for each in given]
            usable = all(each is None or (at and not at & 15) for at, each in zip(addresses, given, strict=True))
            signatures = (None if each is None else signature(each) for each in given[1:])
            key = usable, input.shape, input.stride(), input.dtype, input.device, input.is_neg(), *signatures
        except (RuntimeError, AttributeError):  # a tensor without memory or sizes
            return self._composed(input)
        ready = self._ways.get(key) or self._ways.recall(key)
        if ready is None:
            ready = self._ready(input, usable)
            self._ways.keep(key, ready)
        _, stream, run = ready
        if run is None:
            return self._composed(input)
        y = torch.empty_like(input)
        run(stream(), (*addresses, y.data_ptr()))
        return y

    def _composed(self, input: Any) -> Any:
        first, second = self.layers
        pixels = tuple(range(-self.axes, 0))  # of images without a batch too
        gates = second(first(input.mean(pixels, keepdim=True)))
        return (F.hardsigmoid(gates) if self.hard else gates) * input

    def _ready(self, input: Any, usable: bool) -> tuple[Way, Any, Any]:
        """How, the stream, and what runs it there. ``usable``: whether all addresses are multiples of 16."""
        way, arrays = self.decide(input), arrays_of(input)
        if not usable:
            way = Way("PyTorch", way.problem, "its memory starts at no multiple of 16 bytes")
        if way.plan is None or way.device is None or arrays is None:
            return way, None, None
        try:
            run = launch.open_device(way.device).executable(way.plan, _ROLES)
        except (CudaUnavailableError, CompileError) as error:
            warnings.warn(f"leanconv leaves {way.problem} to PyTorch: {error}", RuntimeWarning, stacklevel=2)
            return Way("PyTorch", way.problem, str(error).splitlines()[0]), None, None
        return way, arrays.fast_stream(way.device), run

    def decide(self, input: Any) -> Way:
        """How it is computed with such images, of which only what is beside values matters."""
        first, second = self.layers
        arrays = arrays_of(input)
        index = None if arrays is None else arrays.device(input)
        dtype = DTYPES.get(str(input.dtype).removeprefix("torch."))
        c, squeezed, window = input.shape[1:2], first.weight.shape[:1], (1,) * (first.weight.dim() - 2)
        shapes = {
            first.weight: (*squeezed, *c, *window), first.bias: squeezed,
            second.weight: (*c, *squeezed, *window), second.bias: c,
        }  # fmt: skip
        given = [each for each in shapes if each is not None]
        what = f"squeeze-excite of {tuple(input.shape)}"
        kinds = {(each.dtype, each.device) for each in (input, *given)}
        if index is None or dtype is None or len(kinds) > 1:
            return Way("PyTorch", what, f"images of {input.dtype} on {input.device}, or layers of something else")
        last = _is_last(input)
        dense = [_is_last(each) is not None and not each.is_neg() for each in (input, *given)]
        fits = input.dim() == first.weight.dim() and all(each.shape == shapes[each] for each in given)
        if not fits or not input.numel() or not all(dense):
            return Way("PyTorch", what, "its shape or its memory is not one for leanconv")
        problem = kernel.SqueezeExciteProblem(
            input.shape[0], input.shape[1], input.shape[2:].numel(), first.weight.shape[0], dtype.name, bool(last),
            first.activation, "hardsigmoid" if self.hard else str(second.activation), first.bias is not None,
            second.bias is not None,
        )  # fmt: skip
        try:
            target = launch.open_device(index).target
        except CudaUnavailableError as error:
            return Way("PyTorch", problem, str(error).splitlines()[0])
        if reasons := kernel.why_not(problem, target):
            return Way("PyTorch", problem, reasons[0])
        share = kernel.predicted_cycles(problem, target) / comparing.squeeze_cycles(problem, target)
        why = f"one launch is expected to take {share:.2f} of the time of PyTorch's four"
        if share >= 1:
            return Way("PyTorch", problem, why)
        return Way("leanconv: squeeze_excite", problem, why, kernel.plan(problem, target), index)


def _is_last(tensor: Any) -> bool | None:
    """Whether a dense tensor has its channels last; None for others."""
    if tensor.is_contiguous():
        return False
    form = operators.CHANNELS_LAST.get(tensor.dim())
    return True if form and tensor.is_contiguous(memory_format=form) else None


# In the graph


def rewrite(graph: Graph, model: nn.Module, prefix: str) -> None:
    """Put a `SqueezeExcite` in place of each block in a graph whose convolutions are `FusedConv` of ``model``."""
    modules = dict(model.named_modules())
    found = [each for node in graph.nodes if (each := _block(node, modules)) is not None]
    called = [node for node in graph.nodes if node.op in ("call_module", "get_attr")]
    made: dict[tuple[str, str, bool], str] = {}
    calls: dict[Node, Node] = {}
    for each in found:
        key = _key(each)
        if key not in made:
            inside = {node for other in found if _key(other) == key for node in other.nodes}
            others = [str(node.target) for node in called if node not in inside]
            made[key] = _add(model, modules, each, others, prefix)
        last = each.nodes[-1]
        with graph.inserting_after(last):
            # the images may be the result of another block, which has been replaced
            calls[last] = graph.call_module(made[key], (calls.get(each.x, each.x),))
        last.replace_all_uses_with(calls[last])
        for node in reversed(each.nodes):
            graph.erase_node(node)


def _key(block: Squeeze) -> tuple[str, str, bool]:
    """What blocks have in common that one module computes."""
    return str(block.first.target), str(block.second.target), block.hard


def _add(
    model: nn.Module, modules: dict[str, nn.Module], block: Squeeze, others: Sequence[str], prefix: str
) -> str:  # fmt: skip
    """The name of a new module with the block's layers: that of their parent, where nothing else is called in it, so
    that their parameters keep their names."""
    (parent, _, first), (other, _, second) = (
        str(each.target).rpartition(".") for each in (block.first, block.second)
    )  # fmt: skip
    alone = bool(parent) and not any(f"{each}.".startswith(f"{parent}.") for each in others)
    at, count = parent if alone and parent == other else f"{parent}.squeeze_excite".strip("."), 1
    while at != parent and hasattr(model.get_submodule(parent), at.rpartition(".")[2]):
        count += 1
        at = f"{parent}.squeeze_excite_{count}".strip(".")
    one, two = (modules[str(each.target)] for each in (block.first, block.second))
    assert isinstance(one, FusedConv) and isinstance(two, FusedConv)
    place, _, name = at.rpartition(".")
    setattr(model.get_submodule(place), name, SqueezeExcite(one, two, block.hard, (first, second), prefix + at))
    return at


def _block(node: Node, modules: dict[str, nn.Module]) -> Squeeze | None:
    """The block that a product ends; None where it ends none."""
    multiplies = node.op == "call_function" and node.target in _MULTIPLIES and not node.kwargs
    if not (multiplies or (node.op == "call_method" and node.target == "mul" and not node.kwargs)):
        return None
    if len(node.args) != 2 or not all(isinstance(each, Node) for each in node.args):
        return None
    one, other = node.args
    for x, gates in ((one, other), (other, one)):
        assert isinstance(x, Node) and isinstance(gates, Node)
        block = _gated(x, gates, node, modules)
        if block is not None:
            return block
    return None


def _gated(x: Node, gates: Node, product: Node, modules: dict[str, nn.Module]) -> Squeeze | None:
    hard = _is_hardsigmoid(gates, modules)
    second = _given(gates) if hard else gates
    first = None if second is None else _given(second)
    mean = None if first is None else _given(first)
    if second is None or first is None or mean is None:
        return None
    nodes = dict.fromkeys((mean, first, second, gates))
    if any(len(each.users) != 1 for each in nodes):
        return None
    one, two = _dense(first, modules), _dense(second, modules)
    if one is None or two is None or two.activation != (None if hard else "sigmoid"):
        return None
    if two.weight.shape[:2] != one.weight.shape[1::-1] or not _is_mean(mean, x, one.weight.dim() - 2, modules):
        return None
    between = mean.next
    while between is not product:
        if between not in nodes and patterns.changed(between, modules) is not None:  # x, or what shares its memory
            return None
        between = between.next
    return Squeeze(x, first, second, hard, (*nodes, product))


def _given(node: Node) -> Node | None:
    """What a node is called with, where that is all it is called with besides options."""
    nodes = [each for each in (*node.args, *node.kwargs.values()) if isinstance(each, Node)]
    return nodes[0] if len(nodes) == 1 else None


def _dense(node: Node, modules: dict[str, nn.Module]) -> FusedConv | None:
    """The layer that a node calls, if it is the product with a matrix at each pixel."""
    layer = modules.get(str(node.target)) if node.op == "call_module" else None
    if not isinstance(layer, FusedConv) or set(layer.weight.shape[2:]) != {1} or layer.groups != 1:
        return None
    unit = not isinstance(layer.padding, str) and {*layer.stride} == {1} and {*layer.padding} == {0}
    return layer if unit else None


def _is_hardsigmoid(node: Node, modules: dict[str, nn.Module]) -> bool:
    module = patterns.module_of(node, modules)
    return type(module) is nn.Hardsigmoid or (node.op == "call_function" and node.target is F.hardsigmoid)


def _is_mean(node: Node, x: Node, count: int, modules: dict[str, nn.Module]) -> bool:
    """Whether a node is the mean over all pixels of ``x``, which keeps their axes, so many."""
    if _given(node) is not x:
        return False
    given = [each for each in (*node.args, *node.kwargs.values()) if each is not x]
    if node.op == "call_module":
        module = patterns.module_of(node, modules)
        return type(module) is _POOLS[count - 1] and _are_ones(getattr(module, "output_size", None))
    if (node.op, node.target) == ("call_function", _POOLED[count - 1]):
        return len(given) == 1 and _are_ones(given[0])
    if (node.op, node.target) not in (("call_method", "mean"), ("call_function", torch.mean)):
        return False
    axes = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    keeps = node.kwargs.get("keepdim", node.args[2] if len(node.args) > 2 else False)
    if not isinstance(axes, (tuple, list)) or len(given) != 2 or keeps is not True:
        return False
    return {*axes} in ({*range(2, 2 + count)}, {*range(-count, 0)})


def _are_ones(sizes: Any) -> bool:
    return set(sizes if isinstance(sizes, (tuple, list)) else (sizes,)) == {1}
