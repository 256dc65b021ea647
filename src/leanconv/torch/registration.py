"""The kernels below PyTorch's dispatcher, and which patch decides now.

That of aten::convolution is registered by the first `enable`; that of aten::convolution_backward when the first has
been called, which torch.nn.functional does not do: compiled graphs do, scripts, modes, and who calls torch.conv2d.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from leanconv.call import bind
from leanconv.torch import functions, module_call, recorded, switches
from leanconv.torch.deciding import Deciding, active, current
from leanconv.torch.layers import tf32_allowed

#: where the kernels are registered; tests, which have no GPU, register them for the CPU
_KEY = "CUDA"
_latest: Deciding | None = None
#: By dispatch key. NOTE: made by the first `enable`. The last `disable` keeps it where other threads run: one may be on
#: its way to a kernel, which PyTorch frees with its registration. Then the kernels hand on.
_libraries: dict[str, torch.library.Library] = {}
#: those that have the kernel of aten::convolution_backward
_with_backward: weakref.WeakSet[torch.library.Library] = weakref.WeakSet()
_lock = threading.Lock()


@contextmanager
def suspended() -> Iterator[None]:
    """While this lasts, PyTorch computes everything, whatever is enabled."""
    with _lock:
        kept = active[:]
        active.clear()
        functions.switched()
    try:
        yield
    finally:
        with _lock:
            active[:] = kept
            functions.switched()


def latest() -> Deciding | None:
    """The patch of the last `enable`, which may be switched off by now."""
    return _latest


def _choose_anew() -> None:
    for patch in active:
        patch.choose_anew()


bind.also_forget.append(_choose_anew)


def add(patch: Deciding) -> None:
    global _latest
    with _lock:
        if _KEY not in _libraries:
            library = torch.library.Library("aten", "IMPL")
            try:
                _replace(library, "convolution", _convolution)
            except Exception:  # another library has taken them
                library._destroy()
                raise
            _libraries[_KEY] = library
        functions.install()
        module_call.install()
        active.append(patch)
        functions.switched()
        _latest = patch


def _replace(library: torch.library.Library, name: str, kernel: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is a kernel already is what this is about
        library.impl(name, kernel, _KEY)


def add_backward() -> None:
    """Register the kernel of aten::convolution_backward too, whose cost every gradient bears."""
    with _lock:
        library = _libraries.get(_KEY)
        if library is not None and library not in _with_backward:
            _with_backward.add(library)
            try:
                _replace(library, "convolution_backward", _convolution_backward)
            except Exception as error:  # another library has taken it
                warnings.warn(f"leanconv leaves these gradients to PyTorch: {error}", RuntimeWarning, stacklevel=2)
                return
            for patch in active:
                patch.decide_recorded_anew()


def asked_for_gradients() -> bool:
    """Whether gradients that autograd's own node computes come to our kernel, which counts them."""
    return _libraries.get(_KEY) in _with_backward


recorded.before_differentiable.append(add_backward)


def remove(patch: Deciding) -> None:
    with _lock:
        if patch in active:
            active.remove(patch)
            functions.switched()
            if not active:
                functions.remove()
                module_call.remove()
                if threading.active_count() == 1:  # nobody else can be on the way to a kernel
                    while _libraries:
                        _libraries.popitem()[1]._destroy()


def _convolution(x: Any, w: Any, bias: Any, *given: Any) -> Any:
    patch = current()
    if patch is not None and _libraries.get(_KEY) not in _with_backward:
        add_backward()
    # torch.jit.trace records what PyTorch's kernel calls: of ours it would record an allocation
    if patch is None or switches.tracing() is not None:
        return switches.left_to_pytorch(x, w, bias, given, tf32_allowed())
    return patch.convolution(x, w, bias, *given)


def _convolution_backward(*given: Any) -> Any:
    patch = current()
    return original_backward(*given) if patch is None else patch.backward(*given)


def original_backward(*given: Any, kernel: Any = torch.ops.aten.convolution_backward.default._op_dk) -> Any:
    """PyTorch's own kernel, which chooses among cuDNN's and the others by the device of the tensors."""
    return kernel(torch._C.DispatchKey.CompositeExplicitAutograd, *given)
