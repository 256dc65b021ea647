"""What the backend of torch.compile has made of the graphs that it was given: words alone, of the last graphs."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch.fx import Node

from leanconv.torch import patterns
from leanconv.torch.fused_layer import FusedConv
from leanconv.torch.fusing import FuseReport
from leanconv.torch.squeeze_graph import Block

nn = torch.nn
_CONVS = nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
_LAYERS = *_CONVS, *patterns.NORMS, FusedConv
#: what the backend does not rewrite, and what it says of it
_OTHERS: dict[Any, str] = {
    torch.conv1d: "convolutions of signals are left",
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
                    "transposed convolutions are left"),
}  # fmt: skip
#: how Dynamo begins the name of a module, which is the variable that holds the model; and parts, as it writes some
_VARIABLE = re.compile(r"^[LG]\['\w+'\](\.__closure__\[\d+\]\.cell_contents)?")
_PART = re.compile(r"(?:\._modules)?\['?([^\]']+)'?\]")


@dataclass(frozen=True)
class CompileReport:
    """What the backend `fused` has made of the graphs that it was given; ``str`` of it is a table."""

    #: a report of each graph, in the order in which they were compiled
    graphs: tuple[FuseReport, ...]
    #: how many graphs came before these, of which nothing is kept
    dropped: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """How many layers of all graphs were fused, by their parts, such as "conv+bn+add+relu"."""
        return dict(Counter(what for graph in self.graphs for _, what, _ in graph.layers).most_common())

    def __str__(self) -> str:
        if not self.graphs:
            return "no graph has been compiled"
        total = self.dropped + len(self.graphs)
        lines = (f"graph {at} of {total}\n{graph}" for at, graph in enumerate(self.graphs, self.dropped + 1))
        return "\n".join(lines)


#: of the last graphs, and how many there have been
_MOST_GRAPHS = 64
_kept: deque[FuseReport] = deque(maxlen=_MOST_GRAPHS)
_count = [0]
_lock = Lock()


def fused_report(*, reset: bool = False) -> CompileReport:
    """What the backend `fused` has made of the graphs that Dynamo gave it, as `FuseReport` says it of a model.

    A row of ``layers`` is an operator that the backend put into the graph: the convolution's name, what was fused with
    it, and why. ``left`` has the other convolutions, squeeze-and-excite blocks and batch normalisations, and why each
    is as it was. A name is that of the module in the model, or, of a function that no such module calls, that of the
    node in the graph.

    Args:
        reset: whether all graphs are forgotten then, so that the next report begins with the next one compiled.

    A graph is added whenever it is compiled, in any thread. So a recompile, for other sizes or after
    ``torch._dynamo.reset()``, adds the same layers once more; calls of compiled code add nothing and cost nothing. The
    last 64 graphs are kept, as words: no tensor and no graph stays alive for them.

    >>> import torch
    >>> import leanconv.torch
    >>> _ = leanconv.torch.fused_report(reset=True)
    >>> print(leanconv.torch.fused_report())
    no graph has been compiled
    """
    with _lock:
        report = CompileReport(tuple(_kept), _count[0] - len(_kept))
        if reset:
            _kept.clear()
            _count[0] = 0
    return report


def keep(report: FuseReport) -> None:
    """Add the report of one graph."""
    with _lock:
        _kept.append(report)
        _count[0] += 1


class Rows:
    """What becomes of the nodes of one graph, while it is rewritten."""

    def __init__(self, nodes: Sequence[Node], modules: Mapping[str, nn.Module]) -> None:
        self._nodes, self._modules = nodes, modules
        self._layers: dict[Node, tuple[str, str, tuple[str, ...]]] = {}
        self._left: dict[Node, tuple[str, str]] = {}

    def fuse(self, node: Node, name: str, what: str, way: Any) -> None:
        """An operator computes what ends or begins with a node. ``way`` is of `fused_layer` or of `squeeze`."""
        self._layers[node] = name, what, (f"{way.runs}, {way.problem}: {way.why}",)

    def leave(self, node: Node, name: str, way: Any) -> None:
        """A node stays as it is. ``way`` as of `fuse`."""
        self._left[node] = name, f"{way.problem}: {way.why}" if way.problem else way.why

    def leave_all(self, why: str) -> None:
        """The graph stays as it is: all convolutions of it."""
        for node in self._nodes:
            if _is_conv(node, self._modules):
                self._left[node] = name_of(node), why

    def leave_others(self, covered: set[Node]) -> None:
        """Those convolutions and normalisations stay that nothing has been said of, and that are not ``covered`` by
        what has."""
        for node in self._nodes:
            why = "" if node in covered else _why_other(node, self._modules)
            if why:
                self._left[node] = name_of(node), why

    def report(self) -> FuseReport:
        """All rows, in the graph's order."""
        layers, left = self._layers, self._left
        return FuseReport(
            tuple(layers[node] for node in self._nodes if node in layers),
            tuple(left[node] for node in self._nodes if node in left),
        )


def name_of(node: Node) -> str:
    """The name of the layer that a node is, as `fuse` writes it, or else that of the node in its graph."""
    stack = [*(node.meta.get("nn_module_stack") or {}).values()]
    path, kind = stack[-1][:2] if stack else ("", None)
    name = _PART.sub(r".\1", _VARIABLE.sub("", path)) if isinstance(kind, type) and issubclass(kind, _LAYERS) else ""
    return name.removeprefix(".") or str(node.name)


def name_of_block(block: Block) -> str:
    """The name of the module that has both layers of squeeze-and-excite, or that of the first layer."""
    first, second = (name_of(layer.conv) for layer in (block.first, block.second))
    parents = {each.rpartition(".")[0] for each in (first, second)}
    parent = parents.pop()
    return first if parents or not parent else parent


def _is_conv(node: Node, modules: Mapping[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return isinstance(modules.get(str(node.target)), _CONVS)
    if node.op != "call_function":
        return False
    return node.target in (torch.conv2d, torch.conv3d) or bool(_why_left(node.target))


def _why_left(function: Any) -> str:
    try:
        return _OTHERS.get(function, "")
    except TypeError:  # a target that cannot be hashed
        return ""


def _why_other(node: Node, modules: Mapping[str, nn.Module]) -> str:
    """Why the backend has not looked at a convolution or a normalisation; empty for all else."""
    if node.op == "call_module" and _is_conv(node, modules):
        return "its module is one node of the graph"
    if node.op != "call_function":
        return ""
    if node.target is nn.functional.batch_norm:
        training = node.kwargs.get("training", node.args[5] if len(node.args) > 5 else False)
        if training is not False:
            return "it takes the statistics of the batch, as in training"
        return "no convolution stands before it, or others read that one's result"
    if str(node.target).startswith("leanconv.conv"):
        return "it is a call of leanconv, without what follows it"
    return _why_left(node.target)
