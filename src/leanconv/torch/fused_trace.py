"""How `leanconv.torch.fuse` follows the code of a model: torch.fx, but for what its graph would not do."""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.fx.immutable_collections import immutable_dict
from torch.fx.proxy import Attribute
from torch.overrides import TorchFunctionMode

from leanconv.torch import in_place, patterns
from leanconv.torch.fused_kinds import OURS, has_own_call, is_conv, is_frozen, wraps
from leanconv.torch.layers import tf32_allowed

#: what makes tensors of no others: calls of the graph, as random numbers are other ones each time
_MAKERS = {
    getattr(torch, name)
    for name in (
        "arange", "as_tensor", "blackman_window", "empty", "empty_strided", "eye", "full", "hamming_window",
        "hann_window", "linspace", "logspace", "normal", "ones", "rand", "randint", "randn", "randperm",
        "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
    )
}  # fmt: skip
_CONTEXT = "it changes what PyTorch is set to, such as autocast or whether gradients are recorded"
#: of attributes of a traced value itself
_OWN = "tracer", "node", "root", "attr", "_node"


class _Recorded:
    """What is recorded of a value beside what torch.fx records."""

    tracer: Any

    def __getattr__(self, name: str) -> _Part:
        return _Part(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _OWN:
            raise TypeError(f"it sets the attribute {name} of a value")
        super().__setattr__(name, value)


def _record(function: Any) -> Any:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _each in in_place.FUNCTIONS:
    setattr(_Recorded, f"__{_each.__name__}__", _record(_each))


class _Value(_Recorded, fx.Proxy):  # type: ignore[misc]
    """A value of a trace."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Asked for by isinstance, which a trace cannot answer; and by PyTorch of its arguments."""
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__") == "torch.nn.parameter" and frame.f_back is not None:
            frame = frame.f_back
        own = str(frame.f_globals.get("__name__")).startswith(("torch.", "leanconv."))
        if not own and {"isinstance", "__class__"} & {*frame.f_code.co_names}:
            raise TypeError("it asks for the type of a value")
        return type(self)


class _Part(_Recorded, Attribute):  # type: ignore[misc]
    """An attribute of one, or a method."""


class _Functions(TorchFunctionMode):
    """Sees the functions that get no traced value."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:
            raise TypeError(_CONTEXT)
        if func in _MAKERS:
            return self.tracer.create_proxy("call_function", func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _settings() -> tuple[Any, ...]:
    """What code may change for a while. Autocast within autocast is seen by how deep it is."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    kinds = "cpu", "cuda"
    return (
        depth, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds],
        torch._C._get_cudnn_enabled(), torch._C._get_cudnn_deterministic(), tf32_allowed(),
        getattr(torch.utils._device, "CURRENT_DEVICE", None),
    )  # fmt: skip


class Tracer(fx.Tracer):  # type: ignore[misc]
    """One that keeps modules whole that it could not follow before, and remembers the innermost that fails.

    ``whole``: their names; None while torch.fx reads the code of a graph anew. ``given``: what a model is called with,
    as far as that is known, if its graph is to ask for it; ``known``: tensors that were there before.
    """

    proxy_buffer_attributes = True

    def __init__(
        self, whole: Collection[str] | None = None, given: Mapping[str, Any] | None = None, known: Collection[int] = ()
    ) -> None:
        super().__init__()
        self.whole, self.given, self.known, self.failed = whole, given, known, ""
        self._settings: tuple[Any, ...] | None = None

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        """The graph of a module."""
        with torch.inference_mode(False), torch.enable_grad():
            self._settings = _settings()
            with _Functions(self):
                return super().trace(root, concrete_args)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in (self.whole or ()) or is_frozen(m) or isinstance(m, OURS) or is_conv(m) or wraps(m):
            return True
        return bool(super().is_leaf_module(m, module_qualified_name)) or patterns.has_hooks(m)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        name = self.path_of_module(m)
        self._check_settings()
        if has_own_call(m) and not wraps(m) and self.is_leaf_module(m, name):
            # the call that is traced is within its own, which would run again in the graph
            raise TypeError(f"{name} has a __call__ of its own")
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or name
            raise

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def create_node(self, *given: Any, **named: Any) -> fx.Node:
        self._check_settings()
        return super().create_node(*given, **named)

    def _check_settings(self) -> None:
        if self._settings is not None and _settings() != self._settings:
            raise TypeError(_CONTEXT)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, dict) and type(a) not in (dict, immutable_dict):
            if type(a) is not OrderedDict:
                raise TypeError(f"it makes a {type(a).__name__}")
            items = [(self.create_arg(key), self.create_arg(value)) for key, value in a.items()]
            return self.create_node("call_function", OrderedDict, (items,), {})
        if isinstance(a, torch.Tensor) and not self._is_known(a):
            raise TypeError("it makes a tensor that would be a constant of the graph")
        return super().create_arg(a)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, nn.Parameter) or tensor in self.tensor_attrs or id(tensor) in self.known:
            return True
        return any(tensor is each for each in self.root.buffers())

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Placeholders; in their place those arguments themselves on which code may depend without a trace of it."""
        flags = inspect.unwrap(root_fn).__code__.co_flags
        if self.whole is not None and flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
            raise TypeError("its arguments are not known one by one")
        function, args = super().create_args_for_root(root_fn, is_module, concrete_args)
        nodes = [each.node for each in args if isinstance(each, fx.Proxy)]
        if self.given is None or not nodes:
            return function, args
        fixed = {}
        for node in nodes:
            if node.target in self.given:
                if _is_fixed(self.given[node.target]):
                    fixed[node.target] = self.given[node.target]
            elif node.args and type(node.args[0]) not in (int, float):
                fixed[node.target] = node.args[0]
        self.create_node("call_function", as_followed, (tuple(nodes), tuple(each.target for each in nodes), fixed), {})
        own = (each.node.target if isinstance(each, fx.Proxy) else "" for each in args)
        return function, [fixed.get(name, each) for name, each in zip(own, args, strict=True)]


def _is_fixed(value: Any) -> bool:
    return value is None or value is True or value is False or type(value) is str


def as_followed(values: Any, names: Any, fixed: Any) -> Any:
    """Refuse arguments on which a model's code may depend in a way that its graph does not have."""
    for value in values:
        if isinstance(value, fx.Proxy):
            return value.tracer.create_proxy("call_function", as_followed, (values, names, fixed), {})
    for name, value in zip(names, values, strict=True):
        if name in fixed:
            was = fixed[name]
            if value is not was and (type(value) is not type(was) or value != was):
                raise TypeError(
                    f"the model was followed with {name}={was!r}, and is called with "
                    f"{_words(value)}; fuse(model, example) follows it as the example calls it"
                )
        elif _is_fixed(value):
            raise TypeError(
                f"the model was followed with {name} a tensor or a number, and is called with {name}={value!r}; "
                "fuse(model, example) follows it as the example calls it"
            )
    return None


def _words(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)
