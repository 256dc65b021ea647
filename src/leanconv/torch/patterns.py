"""What follows a convolution in a graph of torch.fx: which nodes a fused kernel computes with it.

`leanconv.torch.fuse` and the backend of torch.compile read graphs with it, of modules and of functions.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph, Node

from leanconv.options import activation_of
from leanconv.torch import in_place
from leanconv.torch.fused_layer import FusedConv

F, nn = torch.nn.functional, torch.nn

#: By function: the activation, and place and name of its number.
_FUNCTIONS: dict[Any, str] = {
    F.relu: "relu", torch.relu: "relu", torch.relu_: "relu", F.relu6: "relu6", F.leaky_relu: "leaky_relu",
    F.leaky_relu_: "leaky_relu", F.elu: "elu", F.elu_: "elu", F.gelu: "gelu", F.silu: "silu",
    F.hardswish: "hardswish", F.sigmoid: "sigmoid", torch.sigmoid: "sigmoid", torch.sigmoid_: "sigmoid",
    F.tanh: "tanh", torch.tanh: "tanh", torch.tanh_: "tanh",
}  # fmt: skip
_METHODS = {name + end: name for name in ("relu", "sigmoid", "tanh") for end in ("", "_")}
_NUMBERS = {"leaky_relu": ("negative_slope", 0.01), "elu": ("alpha", 1.0)}
_MODULES: dict[type, str] = {
    nn.ReLU: "relu", nn.ReLU6: "relu6", nn.LeakyReLU: "leaky_relu", nn.ELU: "elu", nn.GELU: "gelu", nn.SiLU: "silu",
    nn.Hardswish: "hardswish", nn.Sigmoid: "sigmoid", nn.Tanh: "tanh",
}  # fmt: skip
_ADDS = operator.add, operator.iadd, in_place.iadd, torch.add
#: modules that do nothing in evaluation
_IDENTITIES = nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout
HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


@dataclass(eq=False)
class Chain:
    """A convolution and what follows it, each node the only user of the one before."""

    conv: Node
    norm: Node | None = None
    #: the residual
    add: Node | None = None
    activation: str | None = None
    nodes: list[Node] = field(default_factory=list)

    @property
    def last(self) -> Node:
        return self.nodes[-1]

    @property
    def what(self) -> str:
        """Its parts, such as "conv+bn+add+relu"."""
        parts = "conv", "bn" * (self.norm is not None), "add" * (self.add is not None), self.activation
        return "+".join(part for part in parts if part)


def module_of(node: Node, modules: dict[str, nn.Module]) -> nn.Module | None:
    """The module that a node calls; None for others, and where somebody's hooks look at it."""
    if node.op != "call_module":
        return None
    module = modules.get(str(node.target))
    return None if module is None or has_hooks(module) else module


def has_hooks(module: nn.Module) -> bool:
    """Whether a module's results are somebody else's business too."""
    return any(getattr(module, name, None) for name in HOOKS)


def activation(node: Node, modules: dict[str, nn.Module]) -> str | None:
    """The activation that a node computes, as `options.activation_of` writes it."""
    module = module_of(node, modules)
    if module is not None:
        name = _MODULES.get(type(module))
        if name is None:
            return None
        if name == "gelu":
            return _gelu(module.approximate)
        return _numbered(name, getattr(module, _NUMBERS[name][0])) if name in _NUMBERS else name
    table: dict[Any, str] = {"call_function": _FUNCTIONS, "call_method": _METHODS}.get(node.op, {})
    try:
        name = table.get(node.target)
    except TypeError:  # a target that cannot be hashed
        return None
    given = dict(node.kwargs)
    given.pop("inplace", None)
    given.pop("input", None)
    if name is None:
        return None
    if name == "gelu":
        approximate = given.pop("approximate", "none")
        return None if given else _gelu(approximate)
    if name in _NUMBERS:
        key, default = _NUMBERS[name]
        number = given.pop(key, node.args[1] if len(node.args) > 1 else default)
        return None if given else _numbered(name, number)
    return None if given else name


def _gelu(approximate: Any) -> str | None:
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate)


def _numbered(name: str, number: Any) -> str | None:
    return activation_of((name, number)) if type(number) in (int, float) else None


def residual(node: Node, of: Node) -> Node | None:
    """What a node adds to another one's result; None where it is no such sum."""
    adds = node.op == "call_function" and node.target in _ADDS
    adds = adds or (node.op == "call_method" and node.target in ("add", "add_"))
    pair = (*node.args, *node.kwargs.values())
    if not adds or not set(node.kwargs) <= {"input", "other"} or len(pair) != 2:
        return None
    first, second = pair
    if not isinstance(first, Node) or not isinstance(second, Node) or first is second:
        return None
    return second if first is of else first


def is_identity(node: Node, modules: dict[str, nn.Module]) -> bool:
    """Whether a node returns its input in evaluation: dropout, and torchvision's stochastic depth."""
    module = module_of(node, modules)
    if module is not None:
        return type(module) in _IDENTITIES
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    at = {"dropout": 2, "stochastic_depth": 3}.get(name)
    if at is None:
        return False
    return node.kwargs.get("training", node.args[at] if len(node.args) > at else None) is False


def chain_of(
    conv: Node, modules: dict[str, nn.Module], is_norm: Callable[[Node], bool], taken: Collection[Node], plain: bool
) -> Chain:
    """A convolution and all that follows it that a fused kernel computes. Nodes that are ``taken`` belong to others.

    ``plain``: whether an identity may be among them, since it is dropped.
    """
    chain = Chain(conv, nodes=[conv])
    while chain.activation is None and len(chain.last.users) == 1:
        (node,) = chain.last.users
        if node in taken:
            break
        if is_norm(node) and chain.norm is None and chain.add is None and node.args[:1] == (chain.last,):
            chain.norm = node
        elif (other := residual(node, chain.last)) is not None and chain.add is None:
            chain.add = other
        elif (name := activation(node, modules)) is not None:
            chain.activation = name
        elif not (plain and is_identity(node, modules)):
            break
        chain.nodes.append(node)
    while len(chain.nodes) > 1 and is_identity(chain.last, modules):  # nothing to fuse behind it
        chain.nodes.pop()
    return chain


def replace(graph: Graph, nodes: Sequence[Node], call: Node) -> None:
    """Put a call in place of nodes, whose last one's result it has."""
    nodes[-1].replace_all_uses_with(call)
    for node in reversed(nodes):
        graph.erase_node(node)


# Changes in place: the fused call stands where the last node of a chain stood, and reads what the first one read


def changed(node: Node, modules: dict[str, nn.Module]) -> Node | None:
    """What a node changes in place, as far as that can be seen; None for nothing."""
    target = node.target
    inplace = bool(node.kwargs.get("inplace"))
    if node.op == "call_module":
        inplace = bool(getattr(modules.get(str(target)), "inplace", False))
    elif node.op == "call_method":
        inplace = _says_so(str(target)) or str(target)[2:-2] in _CHANGING
    elif node.op == "call_function":
        name, place = getattr(target, "__name__", ""), _place_of_inplace(target)
        inplace = inplace or _says_so(name) or "out" in node.kwargs or _is_mutable(target)
        inplace = inplace or target in in_place.FUNCTIONS
        inplace = inplace or (getattr(operator, name, None) is target and name in _CHANGING)
        inplace = inplace or (place is not None and any(each is True for each in node.args[place : place + 1]))
    return next(iter(node.all_input_nodes), None) if inplace else None


_CHANGING = (
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "imatmul", "ilshift",
    "irshift", "setitem",
)  # fmt: skip


def _says_so(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _place_of_inplace(function: Any) -> int | None:
    """Which of a function's arguments is ``inplace``; None where it has none."""
    try:
        return [*inspect.signature(function).parameters].index("inplace")
    except (ValueError, TypeError):  # one of C++ has no signature
        return None


def _is_mutable(target: Any) -> bool:
    """Whether an operator of torch.library changes an argument; of those of higher order nobody knows."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(_is_mutable(getattr(target, name)) for name in target.overloads())
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    return isinstance(target, torch._ops.HigherOrderOperator)


def movable(chain: Chain, order: Iterable[Node], modules: dict[str, nn.Module]) -> str:
    """Why the convolution cannot be computed where the last node of its chain stands; empty if it can."""
    inside, seen, places = {*chain.nodes}, False, dict[Node, int]()
    for place, node in enumerate(order):
        places[node] = place
        seen = seen or node is chain.conv
        if seen and chain.last not in places and node not in inside and changed(node, modules) is not None:
            return f"{node} changes something in place between the convolution and what follows it"
    if added_into(chain, modules) == "residual":
        assert chain.add is not None
        node = next(each for each in chain.nodes if changed(each, modules) is chain.add)
        if not is_spare(chain.add, node, modules):
            return f"{node} changes its residual in place, which others read, or may read"
    return ""


def added_into(chain: Chain, modules: dict[str, nn.Module]) -> str:
    """What the addition of a residual changes in place: that "residual", or the "result" before it; empty for
    neither."""
    for before, node in pairwise(chain.nodes):
        into = None if chain.add is None or residual(node, before) is not chain.add else changed(node, modules)
        if into is not None:
            return "residual" if into is chain.add else "result"
    return ""


# Whose memory it is

#: functions and methods whose result is new memory, unless they say that they change something in place
_NEW = {
    "abs", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "add", "avg_pool1d", "avg_pool2d",
    "avg_pool3d", "batch_norm", "bmm", "cat", "clamp", "clone", "concat", "concatenate", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "div", "elu", "exp", "gelu", "group_norm",
    "hardsigmoid", "hardswish", "hardtanh", "instance_norm", "interpolate", "layer_norm", "leaky_relu", "linear",
    "log", "max_pool1d", "max_pool2d", "max_pool3d", "maximum", "mean", "minimum", "mish", "mul", "multiply", "neg",
    "ones_like", "prelu", "relu", "relu6", "rsqrt", "selu", "sigmoid", "silu", "softmax", "softplus", "sqrt", "stack",
    "sub", "subtract", "tanh", "true_divide", "truediv", "zeros_like",
}  # fmt: skip
_NEW_MODULES = (
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d,
    nn.ConvTranspose2d, nn.ConvTranspose3d, nn.GroupNorm, nn.Hardsigmoid, nn.InstanceNorm1d, nn.InstanceNorm2d,
    nn.InstanceNorm3d, nn.LayerNorm, nn.Linear, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.Mish, nn.PReLU, nn.SELU,
    nn.Softmax, nn.Softplus, nn.SyncBatchNorm, nn.Upsample, FusedConv, *_MODULES,
)  # fmt: skip
_NEW_FUNCTIONS = {
    getattr(place, name)
    for place in (torch, F, torch._C._nn, operator)
    for each in _NEW
    for name in (each, f"_{each}")
    if hasattr(place, name)
}


def _is_new(node: Node, modules: dict[str, nn.Module]) -> bool:
    """Whether a node's result is certainly memory that nothing else had before."""
    if changed(node, modules) is not None:
        return False
    if node.op == "call_module":
        module = module_of(node, modules)
        return module is not None and type(module) in _NEW_MODULES and "forward" not in vars(module)
    if node.op == "call_method":
        return node.target in _NEW
    try:
        return node.op == "call_function" and node.target in _NEW_FUNCTIONS
    except TypeError:  # a target that cannot be hashed
        return False


def is_spare(node: Node, user: Node, modules: dict[str, nn.Module]) -> bool:
    """Whether a node's memory is new, and certainly read by nobody behind ``user``, which changes it in place."""
    later = user.next
    while later.op != "root":
        if later in node.users:
            return False
        later = later.next
    if not all(each is user or _is_new(each, modules) for each in node.users):
        return False
    if _is_new(node, modules):
        return True
    # what returns the memory that it is given
    same = given_first(node)
    if same is None or {*same.users} != {node} or not (changed(node, modules) is same or is_identity(node, modules)):
        return False
    return is_spare(same, node, modules)


def given_first(node: Node) -> Node | None:
    """What a node is called with first."""
    first = node.args[0] if node.args else node.kwargs.get("input")
    return first if isinstance(first, Node) else None
