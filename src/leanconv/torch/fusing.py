"""`fuse`: batch normalisations folded into the convolutions of a model, residuals and activations in their kernels."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from leanconv.call.precompile import precompile
from leanconv.options import PRECISIONS, Precision, one_of
from leanconv.torch import patterns, squeeze, squeeze_graph
from leanconv.torch.fused_kinds import CONVS, can_fold, has_modes, has_own_call, is_conv, why_not_followed, wraps
from leanconv.torch.fused_layer import FusedConv
from leanconv.torch.fused_part import Fold, Part, folded
from leanconv.torch.fused_trace import Tracer
from leanconv.torch.layers import check_model
from leanconv.torch.module_state import State
from leanconv.torch.modules import _Module as OurModule
from leanconv.torch.patterns import Chain
from leanconv.torch.squeeze import SqueezeExcite

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
            called without. Arguments of other types than None, bool and str may have any values later; those, and
            arguments left out, are fixed as in the example, or by their defaults.
        precision: the least precise arithmetic that is allowed where PyTorch allows TF32, as in `enable`.

    Returns:
        A ``torch.fx.GraphModule`` of `leanconv.torch` modules, with a `FuseReport` in its ``report``. Parameters are
        called ``weight`` and ``bias`` as in the model's convolutions; copies, pickles and ``.to()`` work as of any.
        A model that cannot be followed as a whole is its ``model``.

    Raises:
        ValueError: the model, or a normalisation in it, is in training mode. TypeError: it is no torch.nn.Module. A
        call of the result raises a TypeError where an argument that is fixed has another value.

    The model is traced by torch.fx. Modules whose code it cannot follow stay as they are, and their parts are fused by
    themselves; so are those that ask for the type of a value, that change what PyTorch is set to (autocast, no_grad),
    or that change their attributes or assign to their buffers. A call of a part is fused, and code that indexes it or
    asks for its attributes finds what it was. Folded filters of parts are kept beside the parameters, and follow their
    changes. Left are transposed convolutions, borders other than zeros, modules with hooks or a replaced call, what
    wraps a model (DataParallel, torch.compile, TorchScript), results that somebody else reads before what follows; the
    report names them. A residual whose shape or type is not that of the result is added by PyTorch.

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
    training = [name for name, each in model.named_modules() if each.training and (not name or has_modes(each))]
    if training:
        which = f"its layer {training[0]}" if training[0] else "model"
        raise ValueError(f"{which} is in training mode; fuse is for inference: call model.eval() before")
    work = _Work(precision)
    given = example if isinstance(example, tuple) else (example,)
    made = work.whole(copy.deepcopy(model), _named(model, () if example is None else given))
    if example is not None:
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

    # what cannot run so is compiled by the first call
    with suppress(Exception):
        # one that has the same tensors, since code may keep what has no values
        inside = [part.made for each in made.modules() if (part := _part_of(each)) is not None]
        tensors = [tensor for each in (made, *inside) for tensor in (*each.parameters(), *each.buffers())]
        again = copy.deepcopy(made, {id(each): each for each in tensors})
        for part in filter(None, map(_part_of, again.modules())):
            part.look()
        layers = [each for layer in _layers_of(again) for each in layer.modules()]
        for each in layers:
            if isinstance(each, (FusedConv, SqueezeExcite)):
                each.register_forward_pre_hook(look)
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as fake:
            again(*(fake.from_tensor(each.detach()) if isinstance(each, torch.Tensor) else each for each in given))
    for index, problems in found.items():
        precompile(problems, device=f"cuda:{index}", progress=False)
    if blocks:
        squeeze.load(blocks)


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

    def whole(self, model: nn.Module, given: dict[str, Any]) -> Fused:
        """The model, if need be as one call of itself with fused parts; it is followed as it is called with what is
        ``given``."""
        found = self.fused(model, "", given)
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

    def fused(
        self, model: nn.Module, prefix: str, given: dict[str, Any] | None = None
    ) -> tuple[Fused, list[Fold]] | None:
        """The model fused, and what its layers are made of; None for one that stays as it is, with fused parts."""
        whole: set[str] = set()
        state = State(model)
        while True:
            tracer = Tracer(whole, given, state.tensors)
            failed = ""
            why = why_not_followed(model)
            try:
                if why:
                    raise TypeError(why)
                graph = tracer.trace(model)
                why = _why_no_names(graph)
                if why:
                    raise TypeError(why)
            except Exception as error:
                failed = tracer.failed
                said = str(error).splitlines()[0] if str(error) else type(error).__name__
                said = why or f"torch.fx cannot trace it: {said}"
            else:
                changed = state.changed()
                if not changed:
                    break
                failed = next((name for name in changed if name not in whole), "")
                said = "a call changes its attributes or buffers, or draws random numbers of Python"
            state.restore()
            self.left.append(((prefix + failed).strip(".") or type(model).__name__, said))
            if not failed:
                self._parts_of(model, prefix)
                return None
            whole.add(failed)
        for name in whole:
            self._parts_of(model.get_submodule(name), f"{prefix}{name}.")
        for node in graph.nodes:
            if isinstance(node.type, str):  # an annotation that is not evaluated, which pickles cannot import
                node.type = None
        return self._rewritten(fx.GraphModule(model, graph), graph, prefix)

    def _parts_of(self, model: nn.Module, prefix: str) -> None:
        """Fuse what is called in a module that stays as it is. What is in the parts stays for those who look into
        them."""
        if wraps(model):
            return
        for name, child in model.named_children():
            if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                self._parts_of(child, f"{prefix}{name}.")
            elif isinstance(child, (*CONVS, *_OTHERS)):
                self.left.append((prefix + name, "what calls it is left"))
            elif _part_of(child) is None and any(isinstance(each, (*CONVS, *_OTHERS)) for each in child.modules()):
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
            return module is not None and can_fold(module)

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
        # names of convolutions that calls are left of
        kept = {str(each.target) for each in nodes if each.op == "call_module" and each not in taken}
        made: dict[tuple[Any, ...], str] = {}
        folds: list[Fold] = []
        calls: dict[fx.Node | None, fx.Node] = {}
        for chain in reversed(chains):
            name = self._layer(model, modules, chain, made, kept, folds, prefix)
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
        if not isinstance(module, CONVS) or isinstance(module, OurModule):
            return False
        why = ""
        if not is_conv(module):
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
        kept: set[str], folds: list[Fold], prefix: str,
    ) -> str:  # fmt: skip
        """The name of the layer that computes a chain; one convolution that is called in two ways becomes two. Names
        that are ``kept`` are those of modules that are called as before."""
        name = str(chain.conv.target)
        norm = None if chain.norm is None else modules[str(chain.norm.target)]
        into = patterns.added_into(chain, modules)
        key = name, chain.norm and chain.norm.target, chain.activation, chain.add is None, into
        if key not in made:
            conv = modules[name]
            weight, bias = folded(conv, norm)
            layer = FusedConv(conv, weight, bias, chain.activation, chain.what, prefix + name, self.precision)
            layer.into, layer.needs_batch = into, norm is not None
            parent, _, last = name.rpartition(".")
            place, at, count = model.get_submodule(parent), last, 1
            if name in kept or name in made.values():
                while hasattr(place, at):
                    count += 1
                    at = f"{last}_{count}"
            setattr(place, at, layer)
            folds.append((layer, conv, norm))
            made[key] = f"{parent}.{at}".strip(".")
        return made[key]

    def _say_left(self, graph: fx.Graph, modules: dict[str, nn.Module], prefix: str) -> None:
        for node in graph.nodes:
            module = modules.get(str(node.target)) if node.op == "call_module" else None
            name = prefix + str(node.target)
            if isinstance(module, _OTHERS):
                self.left.append((name, "transposed convolutions are left"))
            elif isinstance(module, OurModule):
                self.left.append((name, "it is a module of leanconv"))
            elif module is not None and wraps(module):
                self.left.append((name, why_not_followed(module)))
            elif module is not None and patterns.has_hooks(module) and not isinstance(module, CONVS):
                self.left.append((name, "it has hooks"))
            elif module is not None and can_fold(module):
                self.left.append((name, "no convolution stands before it, or others read that one's result"))


def _within(name: str, other: str) -> bool:
    """Whether one name is of something within what has the other name."""
    return name.startswith(f"{other}.")


def _why_no_names(graph: fx.Graph) -> str:
    """Why a fused model cannot have what a graph reads; empty if it can."""
    for node in graph.nodes:
        name = str(node.target).partition(".")[0]
        if node.op in ("call_module", "get_attr") and (name in _NAMES or hasattr(Fused, name)):
            return f"a fused model has an attribute {name} of its own"
    return ""


#: of an instance of `Fused`
_NAMES = vars(Fused(nn.Module(), fx.Graph())).keys() - vars(nn.Module()).keys()


def _named(model: nn.Module, given: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments by their names; nothing where they are not known one by one."""
    with suppress(ValueError, TypeError):
        return dict(inspect.signature(model.forward).bind_partial(*given).arguments)
    return {}


def _parameters_of(model: nn.Module) -> list[inspect.Parameter] | None:
    """Those of a call; None where they are not known one by one."""
    try:
        found = list(inspect.signature(model.forward).parameters.values())
    except (ValueError, TypeError):  # a compiled function has no signature
        return None
    if has_own_call(model) or any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in found):
        return None
    # a default is written into the graph's code
    return found if all(type(each.default) in _WRITTEN or each.default is each.empty for each in found) else None
