"""A part of a module that torch.fx cannot follow: a call computes its fused graph; all else finds what it was."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import fx, nn
from torch.autograd import forward_ad

from leanconv.torch.patterns import HOOKS
from leanconv.torch.switches import compiling, dispatch_modes, tracing, transforms

#: a layer of the graph, and the convolution and the batch normalisation, or None, that its parameters are made of
Fold = tuple[nn.Module, nn.Module, nn.Module | None]


_HOOKS_OF = itemgetter(*HOOKS)


def folded(conv: Any, norm: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Filters and bias of a convolution with a batch normalisation behind it, rounded once; those of the convolution
    itself, in the same memory, where that is None."""
    w = conv.weight.detach()
    if norm is None:
        return w, None if conv.bias is None else conv.bias.detach()
    # the CPU and CUDA have float64, not every device has
    wide = torch.float64 if w.device.type in ("cpu", "cuda") else torch.float32

    def of(tensor: Any, otherwise: float) -> torch.Tensor:
        if tensor is None:
            return torch.full((w.shape[0],), otherwise, dtype=wide, device=w.device)
        return tensor.detach().to(wide)

    scale = of(norm.weight, 1.0) * (of(norm.running_var, 1.0) + norm.eps).rsqrt()
    shift = of(norm.bias, 0.0) + (of(conv.bias, 0.0) - of(norm.running_mean, 0.0)) * scale
    made = torch.empty_like(w, memory_format=torch.preserve_format)
    made.copy_(w.to(wide) * scale.view(-1, *(1,) * (w.dim() - 1)))
    return made, shift.to(w.dtype)


class Part:
    """What stands in place of a part's ``forward``. The part keeps its class, attributes, modules and parameters.

    Filters and biases of the graph are made anew when what they are made of has changed: in place, by
    ``load_state_dict`` or by ``.to()``. The part's own forward computes where modules in it were replaced, have got
    hooks or train; where an argument is None, True, False, a word or left out, which torch.fx has not seen; and for
    what compiles or traces.
    """

    def __init__(self, module: nn.Module, made: fx.GraphModule, folds: Sequence[Fold]) -> None:
        self.module, self.made, self.folds = module, made, list(folds)
        self.arguments = sum(node.op == "placeholder" for node in made.graph.nodes)
        # what is within a ScriptModule is not one of Python's
        self.inside = [each for each in module.modules() if not isinstance(each, torch.jit.ScriptModule)]
        self.read = list(dict.fromkeys(each for _, *sources in folds for each in sources if each is not None))
        self.structure = self._structure()
        self._tensors: tuple[list[Any], list[Any]] | None = None
        self.look()

    def look(self) -> None:
        """Take the layers of the graph for made of the parameters of now."""
        with suppress(RuntimeError):  # tensors without memory, with which nothing is computed
            self._tensors = self._tensors_now()

    def __getstate__(self) -> dict[str, Any]:
        """A copy looks at its own parameters first."""
        return {**self.__dict__, "_tensors": None}

    def __call__(self, *given: Any, **named: Any) -> Any:
        """The part's result."""
        as_traced = len(given) + len(named) == self.arguments and not any(
            each is None or isinstance(each, (fx.Proxy, bool, str)) for each in (*given, *named.values())
        )
        if as_traced and not _is_looked_at() and self._is_as_it_was():
            return self.made(*given, **named)
        return type(self.module).forward(self.module, *given, **named)

    def _is_as_it_was(self) -> bool:
        """Whether the graph computes the part, with the parameters of today."""
        structure = self._structure()
        if len(structure) != len(self.structure) or not all(map(is_, structure, self.structure)):
            return False
        try:
            held, counts = tensors = self._tensors_now()
        except RuntimeError:  # one without memory
            return False
        kept = self._tensors
        if kept is None or counts != kept[1] or len(held) != len(kept[0]) or not all(map(is_, held, kept[0])):
            if dispatch_modes():  # which would make other tensors of them
                return False
            self._refresh()
            self._tensors = tensors
        return True

    def _structure(self) -> list[Any]:
        """The modules of the part, and what of each decides whether the graph computes it."""
        own = [each.__dict__ for each in self.inside]
        found = [value for each in own for value in each["_modules"].values()]
        found += [each["training"] or any(_HOOKS_OF(each)) for each in own]
        # that of a part within computes the same
        return found + [None if isinstance(each.get("forward"), Part) else each.get("forward") for each in own]

    def _tensors_now(self) -> tuple[list[Any], list[Any]]:
        """All tensors of the part; and where those that layers are made of lie, and how often they have changed."""
        own = [each.__dict__ for each in self.inside]
        held = [tensor for each in own for kind in ("_parameters", "_buffers") for tensor in each[kind].values()]
        read = [
            tensor
            for each in self.read
            for kind in (each._parameters, each._buffers)
            for tensor in kind.values()
            if tensor is not None
        ]
        return held, [(each.data_ptr(), 0 if each.is_inference() else each._version) for each in read]

    def _refresh(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for layer, conv, norm in self.folds:
                for name, tensor in zip(("weight", "bias"), folded(conv, norm), strict=True):
                    layer._parameters[name] = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
        for node in self.made.graph.nodes:
            if node.op == "get_attr":
                place, _, name = node.target.rpartition(".")
                setattr(self.made.get_submodule(place), name, attrgetter(node.target)(self.module))


def _is_looked_at() -> bool:
    """Whether a call is compiled, traced or transformed."""
    return compiling() or tracing() is not None or transforms() is not None or forward_ad._current_level >= 0
