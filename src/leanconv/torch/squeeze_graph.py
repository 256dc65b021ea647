"""Squeeze-and-excite in a graph of torch.fx: which nodes `leanconv.torch.squeeze` computes at once.

`leanconv.torch.fuse` and the backend of torch.compile find blocks with it; each says what a layer is in its graphs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from leanconv.torch import in_place, patterns
from leanconv.torch.fused_layer import FusedConv
from leanconv.torch.squeeze import SqueezeExcite

F, nn = torch.nn.functional, torch.nn
_MULTIPLIES = operator.mul, torch.mul, in_place.imul
_POOLS: tuple[type, ...] = nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d
_POOLED = F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d


class Layer(NamedTuple):
    """The product of a matrix with a single pixel, and an activation."""

    input: Node
    #: of the filters
    shape: tuple[int, ...]
    activation: str | None
    #: the convolution first
    nodes: tuple[Node, ...]

    @property
    def conv(self) -> Node:
        return self.nodes[0]


def is_matrix(shape: Sequence[Any], padding: Any, groups: Any) -> bool:
    """Whether a convolution with filters of such a shape is the product of a matrix with a single pixel."""
    return set(shape[2:]) == {1} and groups == 1 and not isinstance(padding, str) and {*padding} == {0}


#: The layer whose result a node is; None where it is no such layer's.
LayerOf = Callable[[Node], Layer | None]


class Block(NamedTuple):
    """Squeeze-and-excite: ``x * gate(second(first(mean of x)))``."""

    first: Layer
    second: Layer
    #: whether the gate is a hardsigmoid behind the second layer, which has its activation otherwise
    hard: bool
    #: all of it, in order, from the mean to the product
    nodes: tuple[Node, ...]

    @property
    def functions(self) -> tuple[str | None, str]:
        """The activation between the layers, and the gate."""
        return self.first.activation, "hardsigmoid" if self.hard else str(self.second.activation)

    @property
    def what(self) -> str:
        """Its parts, such as "mean+conv+relu+conv+sigmoid+mul"."""
        activation, gate = self.functions
        return "+".join(part for part in ("mean", "conv", activation, "conv", gate, "mul") if part)

    @property
    def x(self) -> Node:
        """The images, which may be the result of another block that has been replaced."""
        x = given(self.nodes[0])
        assert x is not None
        return x


def blocks(graph: Graph, modules: dict[str, nn.Module], layer_of: LayerOf) -> list[Block]:
    """All blocks of a graph, in its order."""
    found: list[Block | None] = []
    for node in filter(_is_product, graph.nodes):
        one, other = node.args
        found += (_gated(x, gates, node, modules, layer_of) for x, gates in ((one, other), (other, one)))
    return [each for each in found if each is not None]


def _is_product(node: Node) -> bool:
    multiplies = node.op == "call_function" and node.target in _MULTIPLIES
    multiplies = multiplies or (node.op == "call_method" and node.target == "mul")
    return multiplies and not node.kwargs and [isinstance(each, Node) for each in node.args] == [True, True]


def _gated(x: Node, gates: Node, product: Node, modules: dict[str, nn.Module], layer_of: LayerOf) -> Block | None:
    hard = _is_hardsigmoid(gates, modules)
    last = given(gates) if hard else gates
    second = None if last is None else layer_of(last)
    first = None if second is None else layer_of(second.input)
    if second is None or first is None:
        return None
    mean = first.input
    nodes = dict.fromkeys((mean, *first.nodes, *second.nodes, gates))
    if any(len(each.users) != 1 for each in nodes) or second.activation != (None if hard else "sigmoid"):
        return None
    if second.shape[:2] != first.shape[1::-1] or not _is_mean(mean, x, len(first.shape) - 2, modules):
        return None
    into = patterns.changed(product, modules)
    if into is not None and (into is not x or not patterns.is_spare(x, product, modules)):
        return None
    between = mean.next
    while between is not product:
        if between not in nodes and patterns.changed(between, modules) is not None:  # x, or what shares its memory
            return None
        between = between.next
    return Block(first, second, hard, (*nodes, product))


def given(node: Node) -> Node | None:
    """What a node is called with, where that is all it is called with besides options."""
    nodes = [each for each in (*node.args, *node.kwargs.values()) if isinstance(each, Node)]
    return nodes[0] if len(nodes) == 1 else None


def _is_hardsigmoid(node: Node, modules: dict[str, nn.Module]) -> bool:
    module = patterns.module_of(node, modules)
    return type(module) is nn.Hardsigmoid or (node.op == "call_function" and node.target is F.hardsigmoid)


def _is_mean(node: Node, x: Node, count: int, modules: dict[str, nn.Module]) -> bool:
    """Whether a node is the mean over all pixels of ``x``, which keeps their axes, so many."""
    if given(node) is not x:
        return False
    options = [each for each in (*node.args, *node.kwargs.values()) if each is not x]
    if node.op == "call_module":
        module = patterns.module_of(node, modules)
        return type(module) is _POOLS[count - 1] and _are_ones(getattr(module, "output_size", None))
    if (node.op, node.target) == ("call_function", _POOLED[count - 1]):
        return len(options) == 1 and _are_ones(options[0])
    if (node.op, node.target) not in (("call_method", "mean"), ("call_function", torch.mean)):
        return False
    axes = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    keeps = node.kwargs.get("keepdim", node.args[2] if len(node.args) > 2 else False)
    if not isinstance(axes, (tuple, list)) or len(options) != 2 or keeps is not True:
        return False
    return {*axes} in ({*range(2, 2 + count)}, {*range(-count, 0)})


def _are_ones(sizes: Any) -> bool:
    return set(sizes if isinstance(sizes, (tuple, list)) else (sizes,)) == {1}


# In the graph of `fuse`, whose layers are modules


def rewrite(graph: Graph, model: nn.Module, prefix: str) -> None:
    """Put a `SqueezeExcite` in place of each block in a graph whose convolutions are `FusedConv` of ``model``."""
    modules = dict(model.named_modules())
    found = blocks(graph, modules, partial(_fused_layer, modules=modules))
    called = [node for node in graph.nodes if node.op in ("call_module", "get_attr")]
    made: dict[tuple[str, str, bool], str] = {}
    for each in found:
        key = _key(each)
        if key not in made:
            inside = {node for other in found if _key(other) == key for node in other.nodes}
            others = [str(node.target) for node in called if node not in inside]
            made[key] = _add(model, modules, each, others, prefix)
        with graph.inserting_after(each.nodes[-1]):
            call = graph.call_module(made[key], (each.x,))
        patterns.replace(graph, each.nodes, call)


def _fused_layer(node: Node, modules: dict[str, nn.Module]) -> Layer | None:
    layer, input = modules.get(str(node.target)) if node.op == "call_module" else None, given(node)
    if not isinstance(layer, FusedConv) or input is None:
        return None
    if not is_matrix(layer.weight.shape, layer.padding, layer.groups):
        return None
    return Layer(input, tuple(layer.weight.shape), layer.activation, (node,))


def _key(block: Block) -> tuple[str, str, bool]:
    """What blocks have in common that one module computes."""
    return str(block.first.conv.target), str(block.second.conv.target), block.hard


def _add(
    model: nn.Module, modules: dict[str, nn.Module], block: Block, others: Sequence[str], prefix: str
) -> str:  # fmt: skip
    """The name of a new module with the block's layers: that of their parent, where nothing else is called in it, so
    that their parameters keep their names."""
    (parent, _, first), (other, _, second) = (
        str(each.conv.target).rpartition(".") for each in (block.first, block.second)
    )  # fmt: skip
    alone = bool(parent) and not any(f"{each}.".startswith(f"{parent}.") for each in others)
    at, count = parent if alone and parent == other else f"{parent}.squeeze_excite".strip("."), 1
    while at != parent and hasattr(model.get_submodule(parent), at.rpartition(".")[2]):
        count += 1
        at = f"{parent}.squeeze_excite_{count}".strip(".")
    one, two = (modules[str(each.conv.target)] for each in (block.first, block.second))
    assert isinstance(one, FusedConv) and isinstance(two, FusedConv)
    place, _, name = at.rpartition(".")
    setattr(model.get_submodule(place), name, SqueezeExcite(one, two, block.hard, (first, second), prefix + at))
    return at
