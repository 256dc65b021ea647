"""`fuse`: batch normalisations folded into the convolutions of a model, residuals and activations in their kernels."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from leanconv.call.precompile import precompile
from leanconv.options import PRECISIONS, Precision, one_of
from leanconv.torch import patterns, squeeze, squeeze_graph
from leanconv.torch.fused_layer import FusedConv
from leanconv.torch.fused_part import Fold, Part, folded
from leanconv.torch.layers import check_model
from leanconv.torch.modules import _Module as OurModule
from leanconv.torch.patterns import Chain
from leanconv.torch.squeeze import SqueezeExcite

_CONVS = nn.Conv1d, nn.Conv2d, nn.Conv3d
_OURS = OurModule, FusedConv, SqueezeExcite
_WRAPPERS = torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel, torch.jit.ScriptModule
#: of defaults that the code of a graph can say
_WRITTEN = type(None), bool, int, float, str
#: left, and said so
_OTHERS = nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d


@dataclass(frozen=True)
class FuseReport:
    """What `fuse` has made of a model, or the backend `fused` of a graph; ``str`` of it is a table."""

    #: name of the convolution, what was fused with it, and how it has run so far on a GPU, or will in a graph
    layers: tuple[tuple[str, str, tuple[str, ...]], ...]
    #: what was left as it is, and why
    left: tuple[tuple[str, str], ...]

    @property
    def counts(self) -> dict[str, int]:
        """How many layers were fused, by their parts, such as "conv+bn+add+relu"."""
        return dict(Counter(what for _, what, _ in self.layers).most_common())

    def __str__(self) -> str:
        lines = [f"{count} {what}" for what, count in self.counts.items()] or ["nothing was fused"]
        ran = [(name, what, way) for name, what, ways in self.layers for way in ways]
        lines += [f"{name}: {what}: {way}" for name, what, way in ran]
        return "\n".join((*lines, *(f"left: {name}: {why}" for name, why in self.left)))


class Fused(fx.GraphModule):  # type: ignore[misc]
    """A fused model: what `fuse` returns."""

    _left: tuple[tuple[str, str], ...] = ()

    @property
    def report(self) -> FuseReport:
        """What was fused and what was left; after calls on a GPU, also who computed each layer."""
        layers = _layers_of(self)
        rows = ((each.name, each.what, tuple(f"{w.runs}, {w.problem}: {w.why}" for w in each.ways)) for each in layers)
        return FuseReport(tuple(rows), self._left)

    def train(self, mode: bool = True) -> Fused:
        """Only ``train(False)``: batch normalisations have been folded."""
        if mode:
            raise ValueError("a fused model is for inference: its batch normalisations are folded into its filters")
        super().train(False)
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        made = super().__deepcopy__(memo)
        made._left = self._left
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (super().__reduce__()[:2], self._left)


def _restored(reduced: Any, left: Any) -> Fused:
    function, given = reduced
    plain = function(*given)
    return _fused(plain, plain.graph, left)


def _fused(root: nn.Module, graph: fx.Graph, left: Any) -> Fused:
    made = Fused(root, graph)
    made._left = tuple(left)
    made.training = False
    return made


def fuse(model: nn.Module, example: Any = None, *, precision: Precision = "fp32") -> Fused:
    """A copy of a model for inference whose convolutions compute what follows them in the same kernel.

    Batch normalisations behind convolutions are folded into their filters and biases, in float64, rounded once to the
    type of the filters. Activations (relu, relu6, leaky_relu, elu, gelu, silu, hardswish, sigmoid and tanh, as modules,
    functions or methods) and the additions of residuals are computed by the kernel of the convolution before them:
    ``y = activation(conv(x) + bias + residual)``. Filters stay packed as the kernel reads them. Squeeze-and-excite,
    ``x * sigmoid(conv(activation(conv(mean of x))))``, or with a hardsigmoid, is one kernel.

    Args:
        model: in evaluation mode (``model.eval()``). It is not changed, and shares no memory with the result.
        example: what it is called with, a tensor or a tuple of arguments: the fused model then runs once, so that its
            kernels are compiled, its filters packed, and its report says who computes which layer. Every shape may be
            called without.
        precision: the least precise arithmetic that is allowed where PyTorch allows TF32, as in `enable`.

    Returns:
        A ``torch.fx.GraphModule`` of `leanconv.torch` modules, with a `FuseReport` in its ``report``. Parameters are
        called ``weight`` and ``bias`` as in the model's convolutions; copies, pickles and ``.to()`` work as of any.
        A model that cannot be followed as a whole is its ``model``.

    Raises:
        ValueError: the model, or a normalisation in it, is in training mode. TypeError: it is no torch.nn.Module.

    The model is traced by torch.fx. Modules whose code it cannot follow stay as they are, and their parts are fused by
    themselves: a call of a part is fused, and code that indexes it or asks for its attributes finds what it was. Folded
    filters of parts are kept beside the parameters, and follow their changes. Left are transposed convolutions, borders
    other than zeros, modules with hooks or a replaced call, what wraps a model (DataParallel, torch.compile,
    TorchScript), results that somebody else reads before what follows; the report names them. A residual whose shape or
    type is not that of the result is added by PyTorch.

    On a GPU each layer asks, as `enable` does, whether leanconv is expected to be quicker than PyTorch's convolution
    and what follows it; if not, PyTorch convolves with the folded filters, and what follows is one pass over its
    result, or PyTorch's functions in place.
    On the CPU PyTorch does always. Where a gradient of the input is recorded it is PyTorch's; under torch.compile,
    torch.export and torch.jit.trace the model is PyTorch's functions.

    >>> import torch
    >>> import leanconv.torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()).eval()
    >>> fused = leanconv.torch.fuse(model)
    >>> print(fused.report)
    1 conv+bn+relu
    >>> x = torch.randn(1, 3, 9, 9)
    >>> bool((fused(x) - model(x)).abs().max() < 1e-5)
    True
    """
    check_model(model)
    one_of("precision", precision, PRECISIONS)
    training = [name for name, each in model.named_modules() if each.training and (not name or _has_modes(each))]
    if training:
        which = f"its layer {training[0]}" if training[0] else "model"
        raise ValueError(f"{which} is in training mode; fuse is for inference: call model.eval() before")
    work = _Work(precision)
    made = work.whole(copy.deepcopy(model))
    if example is not None:
        given = example if isinstance(example, tuple) else (example,)
        _compile(made, given)
        with torch.no_grad():
            made(*given)
    return made


def _layers_of(made: nn.Module) -> list[FusedConv | SqueezeExcite]:
    """The layers of a fused model; those of a block count as the block."""
    if isinstance(made, (FusedConv, SqueezeExcite)):
        return [made]
    part = _part_of(made)
    inside = made.children() if part is None else [part.made]
    return list(dict.fromkeys(each for child in inside for each in _layers_of(child)))


def _part_of(module: nn.Module) -> Part | None:
    """What computes a module that is kept where it is called; None for others."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, Part) else None


def _compile(made: Fused, given: tuple[Any, ...]) -> None:
    """Compile the kernels of a model that is called so, side by side: it runs on tensors without values."""
    found: dict[int, dict[Any, None]] = {}
    blocks: list[squeeze.Way] = []
    # layers of blocks that are one launch
    within: set[FusedConv] = set()

    def look(layer: Any, arguments: Any) -> None:
        if layer in within:
            return
        way = layer.decide(*arguments)
        if isinstance(way, squeeze.Way):
            if way.plan is not None:
                blocks.append(way)
                within.update(layer.layers)
        elif way.requested is not None:
            found.setdefault(way.device, {})[way.kernel] = None

    layers = [each for layer in _layers_of(made) for each in layer.modules()]
    hooks = [each.register_forward_pre_hook(look) for each in layers if isinstance(each, (FusedConv, SqueezeExcite))]
    try:
        # what cannot run so is compiled by the first call
        with suppress(Exception), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as fake:
            made(*(fake.from_tensor(each.detach()) if isinstance(each, torch.Tensor) else each for each in given))
    finally:
        for hook in hooks:
            hook.remove()
    for index, problems in found.items():
        precompile(problems, device=f"cuda:{index}", progress=False)
    if blocks:
        squeeze.load(blocks)


def _has_modes(module: nn.Module) -> bool:
    """Whether what a module computes depends on its mode."""
    return isinstance(module, (*_CONVS, *patterns.NORMS, nn.modules.dropout._DropoutNd))


class _Tracer(fx.Tracer):  # type: ignore[misc]
    """One that keeps modules whole that it could not follow before, and remembers the innermost that fails."""

    def __init__(self, whole: Collection[str] = ()) -> None:
        super().__init__()
        self.whole, self.failed = whole, ""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self.whole or _is_frozen(m) or isinstance(m, _OURS) or _is_conv(m) or _wraps(m):
            return True
        return bool(super().is_leaf_module(m, module_qualified_name)) or patterns.has_hooks(m)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        name = self.path_of_module(m)
        if _has_own_call(m) and not _wraps(m) and self.is_leaf_module(m, name):
            # the call that is traced is within its own, which would run again in the graph
            raise TypeError(f"{name} has a __call__ of its own")
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or name
            raise


class _Whole(nn.Module):
    """A model that is called with any arguments, of which torch.fx knows two."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, args: Any, kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class _Work:
    """One call of `fuse`."""

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self.left: list[tuple[str, str]] = []

    def whole(self, model: nn.Module) -> Fused:
        """The model, if need be as one call of itself with fused parts."""
        found = self.fused(model, "")
        if found is not None:
            found[0]._left = tuple(self.left)
            return found[0]
        graph, root, parameters = fx.Graph(), nn.Module(), _parameters_of(model)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for each in parameters or ():
            node = graph.placeholder(each.name, default_value=each.default)
            if each.kind == each.KEYWORD_ONLY:
                kwargs[each.name] = node
            else:
                args.append(node)
        if parameters is None:
            args = [graph.placeholder("*args"), graph.placeholder("**kwargs")]
        root.add_module("model", _Whole(model) if parameters is None else model)
        graph.output(graph.call_module("model", tuple(args), kwargs))
        return _fused(root.eval(), graph, self.left)

    def fused(self, model: nn.Module, prefix: str) -> tuple[Fused, list[Fold]] | None:
        """The model fused, and what its layers are made of; None for one that stays as it is, with fused parts."""
        whole: set[str] = set()
        while True:
            tracer = _Tracer(whole)
            try:
                why = _why_not_followed(model)
                if why:
                    raise TypeError(why)
                graph = tracer.trace(model)
                break
            except Exception as error:
                said = str(error).splitlines()[0] if str(error) else type(error).__name__
                said = why or f"torch.fx cannot trace it: {said}"
                self.left.append(((prefix + tracer.failed).strip(".") or type(model).__name__, said))
                if not tracer.failed:
                    self._parts_of(model, prefix)
                    return None
                whole.add(tracer.failed)
        for name in whole:
            self._parts_of(model.get_submodule(name), f"{prefix}{name}.")
        for node in graph.nodes:
            if isinstance(node.type, str):  # an annotation that is not evaluated, which pickles cannot import
                node.type = None
        return self._rewritten(fx.GraphModule(model, graph), graph, prefix)

    def _parts_of(self, model: nn.Module, prefix: str) -> None:
        """Fuse what is called in a module that stays as it is. What is in the parts stays for those who look into
        them."""
        if _wraps(model):
            return
        for name, child in model.named_children():
            if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                self._parts_of(child, f"{prefix}{name}.")
            elif isinstance(child, (*_CONVS, *_OTHERS)):
                self.left.append((prefix + name, "what calls it is left"))
            elif _part_of(child) is None and any(isinstance(each, (*_CONVS, *_OTHERS)) for each in child.modules()):
                found = self.fused(child.eval(), f"{prefix}{name}.")
                if found is not None and found[1]:
                    child.forward = Part(child, *found)

    def _rewritten(self, model: nn.Module, graph: fx.Graph, prefix: str) -> tuple[Fused, list[Fold]]:
        """``model`` has nothing but what the graph calls and reads."""
        modules = dict(model.named_modules())
        # those that compute what their classes do
        plain = {name: each for name, each in modules.items() if "forward" not in vars(each) or _part_of(each)}

        def is_norm(node: fx.Node) -> bool:
            module = patterns.module_of(node, plain)
            return module is not None and _folds(module)

        nodes = list(graph.nodes)
        used = {str(node.target) for node in nodes if node.op in ("call_module", "get_attr")}
        convs = [node for node in nodes if node.op == "call_module" and self._is_taken(node, modules, used, prefix)]
        taken: set[fx.Node] = set()
        chains: list[Chain] = []
        for node in reversed(convs):
            chain = patterns.chain_of(node, plain, is_norm, taken, plain=True)
            why = patterns.movable(chain, nodes, modules)
            if why:
                self.left.append((prefix + str(node.target), why))
                chain = Chain(node, nodes=[node])
            taken.update(chain.nodes)
            chains.append(chain)
        made: dict[tuple[Any, ...], str] = {}
        folds: list[Fold] = []
        calls: dict[fx.Node | None, fx.Node] = {}
        for chain in reversed(chains):
            name = self._layer(model, modules, chain, made, folds, prefix)
            # a residual may be the result of another chain, which has been replaced
            beside = () if chain.add is None else (calls.get(chain.add, chain.add),)
            with graph.inserting_after(chain.last):
                calls[chain.last] = graph.call_module(name, (*chain.conv.args, *beside))
            patterns.replace(graph, chain.nodes, calls[chain.last])
        if used & modules.keys() <= plain.keys():
            squeeze_graph.rewrite(graph, model, prefix)
        self._say_left(graph, modules, prefix)
        graph.lint()
        return _fused(model, graph, ()), folds

    def _is_taken(self, node: fx.Node, modules: dict[str, nn.Module], used: set[str], prefix: str) -> bool:
        module = modules[str(node.target)]
        if not isinstance(module, _CONVS) or isinstance(module, OurModule):
            return False
        why = ""
        if not _is_conv(module):
            why = f"it is a {type(module).__name__}"
        elif module.padding_mode != "zeros":
            why = f"its padding_mode is {module.padding_mode!r}"
        elif patterns.has_hooks(module):
            why = "it has hooks"
        elif len(node.args) != 1 or node.kwargs:
            why = "it is called with other arguments than images"
        elif any(_within(each, str(node.target)) or _within(str(node.target), each) for each in used):
            why = "others read its parameters"
        if why:
            self.left.append((prefix + str(node.target), why))
        return not why

    def _layer(
        self, model: nn.Module, modules: dict[str, nn.Module], chain: Chain, made: dict[tuple[Any, ...], str],
        folds: list[Fold], prefix: str,
    ) -> str:  # fmt: skip
        """The name of the layer that computes a chain; one convolution that is called in two ways becomes two."""
        name = str(chain.conv.target)
        norm = None if chain.norm is None else modules[str(chain.norm.target)]
        key = name, chain.norm and chain.norm.target, chain.activation, chain.add is None
        if key not in made:
            conv = modules[name]
            weight, bias = folded(conv, norm)
            layer = FusedConv(conv, weight, bias, chain.activation, chain.what, prefix + name, self.precision)
            at, count = name, 1
            while at in made.values():
                count += 1
                at = f"{name}_{count}"
            parent, _, last = at.rpartition(".")
            setattr(model.get_submodule(parent), last, layer)
            folds.append((layer, conv, norm))
            made[key] = at
        return made[key]

    def _say_left(self, graph: fx.Graph, modules: dict[str, nn.Module], prefix: str) -> None:
        for node in graph.nodes:
            module = modules.get(str(node.target)) if node.op == "call_module" else None
            name = prefix + str(node.target)
            if isinstance(module, _OTHERS):
                self.left.append((name, "transposed convolutions are left"))
            elif isinstance(module, OurModule):
                self.left.append((name, "it is a module of leanconv"))
            elif module is not None and _wraps(module):
                self.left.append((name, _why_not_followed(module)))
            elif module is not None and patterns.has_hooks(module) and not isinstance(module, _CONVS):
                self.left.append((name, "it has hooks"))
            elif module is not None and _folds(module):
                self.left.append((name, "no convolution stands before it, or others read that one's result"))


def _within(name: str, other: str) -> bool:
    """Whether one name is of something within what has the other name."""
    return name.startswith(f"{other}.")


def _why_not_followed(module: nn.Module) -> str:
    """Why a trace of a module, which is one of its class's forward, is not what a call of it computes; empty if it
    is."""
    if _wraps(module):
        return f"it is a {type(module).__name__}; fuse the model that is in it"
    if patterns.has_hooks(module):
        return "it has hooks"
    if "forward" in vars(module):
        return "its forward is not that of its class"
    return "it has a __call__ of its own" if _has_own_call(module) else ""


def _wraps(module: nn.Module) -> bool:
    """Whether it calls a model in another way: copies of it, or code that was compiled from it."""
    return isinstance(module, _WRAPPERS) or type(module).__name__ == "OptimizedModule"


def _has_own_call(module: nn.Module) -> bool:
    """Whether a call does something else than hooks and forward."""
    mine = next(each for each in type(module).__mro__ if "__call__" in vars(each))
    return not mine.__module__.startswith(("torch.nn.", "torch.fx."))


def _parameters_of(model: nn.Module) -> list[inspect.Parameter] | None:
    """Those of a call; None where they are not known one by one."""
    try:
        found = list(inspect.signature(model.forward).parameters.values())
    except (ValueError, TypeError):  # a compiled function has no signature
        return None
    if _has_own_call(model) or any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in found):
        return None
    # a default is written into the graph's code
    return found if all(type(each.default) in _WRITTEN or each.default is each.empty for each in found) else None


def _is_conv(module: nn.Module) -> bool:
    """Whether it computes as PyTorch's convolution does: also one of a class that only makes it in another way, as
    those of torchvision's networks of videos."""
    kind = next((each for each in _CONVS if isinstance(module, each)), None)
    if kind is None or "weight" not in module._parameters or not {"forward", "_conv_forward"}.isdisjoint(vars(module)):
        return False
    mine: Any = type(module)
    return (mine.forward, mine._conv_forward) == (kind.forward, kind._conv_forward)


def _is_frozen(module: nn.Module) -> bool:
    """Whether it is a batch normalisation of detection models, whose statistics are constants."""
    return type(module).__name__ == "FrozenBatchNorm2d"


def _folds(module: nn.Module) -> bool:
    """Whether a module scales and shifts channels by numbers that do not depend on its input."""
    if _is_frozen(module):
        return all(hasattr(module, name) for name in ("weight", "bias", "running_mean", "running_var", "eps"))
    return type(module) in patterns.NORMS and getattr(module, "running_mean", None) is not None
