"""What a model keeps beside its parameters, which its code may change while a trace or a recording follows it."""

from __future__ import annotations

import copy
import functools
import random
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import KeysView
from contextlib import suppress
from typing import Any

import torch
from torch import nn

_CONTAINERS = dict, OrderedDict, defaultdict, list, deque, set
#: compared by their values
_PLAIN = type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device
_NO_STATE = (
    type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial,
    nn.Module,
)  # fmt: skip
#: how torch.fx begins the names of what it keeps in the module that it traces
_OF_A_TRACE = "_tensor_constant"


class State:
    """Attributes of all modules of a model, what is in their lists, dictionaries and objects, and values of buffers;
    and what Python's random numbers depend on."""

    def __init__(self, model: nn.Module) -> None:
        #: by identity: a container, what it held, and the module that has it
        self._held: dict[int, tuple[Any, Any, str]] = {}
        #: by identity: a tensor, its values where it is no parameter, its changes in place, and the module
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor | None, int, str]] = {}
        self._random = random.getstate()
        for name, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._look(vars(module), name)

    @property
    def tensors(self) -> KeysView[int]:
        """The identities of those that the model has."""
        return self._tensors.keys()

    def _look(self, first: Any, name: str) -> None:
        left = [first]
        while left:
            value = left.pop()
            if id(value) in self._held:
                continue
            if isinstance(value, torch.Tensor):
                self._tensors.setdefault(id(value), (value, _values(value), _changes(value), name))
            elif type(value) in _CONTAINERS:
                self._held[id(value)] = value, copy.copy(value), name
                left += value.values() if isinstance(value, dict) else value
            elif type(value) is tuple:
                left += value
            elif not isinstance(value, _NO_STATE) and type(getattr(value, "__dict__", None)) is dict:
                if not type(value).__module__.startswith(("torch.", "leanconv.")):
                    left.append(vars(value))

    def changed(self) -> list[str]:
        """Names of the modules that have other state now; an empty one is of the model itself."""
        names = [name for value, was, name in self._held.values() if not _alike(_kept(value), _kept(was))]
        names += [name for tensor, _, count, name in self._tensors.values() if _changes(tensor) != count]
        return list(dict.fromkeys(names + [""] * (random.getstate() != self._random)))

    def restore(self) -> None:
        """Undo what has changed."""
        random.setstate(self._random)
        for value, was, _ in self._held.values():
            if _alike(_kept(value), _kept(was)):
                continue
            if isinstance(value, dict):
                was = {**_of_a_trace(value), **was}
            value.clear()
            (value.extend if isinstance(value, (list, deque)) else value.update)(was)
        for key, (tensor, values, count, name) in self._tensors.items():
            if values is not None and _changes(tensor) != count:
                with torch.no_grad():
                    tensor.copy_(values)
                self._tensors[key] = tensor, values, _changes(tensor), name


def _values(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy; None of a parameter, which is a value of the trace, and of what has no values."""
    if not isinstance(tensor, nn.Parameter):
        with suppress(Exception):
            return tensor.detach().clone()
    return None


def _changes(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _of_a_trace(value: dict[Any, Any]) -> dict[Any, Any]:
    return {key: each for key, each in value.items() if str(key).startswith(_OF_A_TRACE)}


def _kept(value: Any) -> Any:
    return {key: value[key] for key in value.keys() - _of_a_trace(value)} if isinstance(value, dict) else value


def _alike(one: Any, other: Any) -> bool:
    """Whether two containers hold the same."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, set):
        return bool(one == other)
    return len(one) == len(other) and all(map(_same, one, other))


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) is tuple:
        return _alike(one, other)
    return type(one) in _PLAIN and bool(one == other)
