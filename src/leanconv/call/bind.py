"""From a resolved call to a ready one: choose, plan, and make an object of the class for the call's device."""

from __future__ import annotations

import threading
from collections.abc import Callable

from leanconv.call.choose import choose
from leanconv.call.gpu_call import BiasGradientCall, Call, Loaded, PreparedCall, UnpreparedCall, gpu_call, writes_bias
from leanconv.call.host_call import (
    CpuCall,
    FusedCpuCall,
    HostOnGpuCall,
    TorchCpuConv,
    check_torch_algorithm,
    left_to_the_library,
)
from leanconv.call.resolve import Resolved
from leanconv.options import Kept
from leanconv.problem import Problem
from leanconv.runtime import launch
from leanconv.runtime.bounded_cache import BoundedCache
from leanconv.volumes.images import computed

#: what was chosen for a problem, with its kernels; 8 kB each besides the kernels
_loaded: BoundedCache[tuple[Problem, int, str, int | None, Kept], Loaded] = BoundedCache(1024)
_lock = threading.Lock()
#: called with problem, GPU, algorithm and limit of whatever is newly chosen for
listeners: list[Callable[[Problem, int, str, int | None], None]] = []
#: called by `forget`: what keeps ready calls elsewhere
also_forget: list[Callable[[], None]] = []


def bind(resolved: Resolved) -> Call:
    """The ready call for arrays of the same shape, memory order and device as those of ``resolved``.

    Raises NoAlgorithmError where nothing fits, CudaUnavailableError, CompileError.
    """
    if resolved.device is None:
        call = _on_cpu(resolved)
    else:
        # nothing is compiled for an empty result, but what nothing could run is refused all the same
        given = resolved.problem, resolved.device, resolved.algorithm, resolved.workspace_limit
        loaded = load(*given, resolved.kept)
        if resolved.operands.device is None:
            call = HostOnGpuCall(resolved, loaded)
        elif resolved.weights is not None and loaded.prepares(resolved):
            return PreparedCall(resolved, loaded)
        else:
            call = gpu_call(resolved, loaded)
    if writes_bias(resolved.problem):
        return BiasGradientCall(call, resolved)
    return call if resolved.weights is None else UnpreparedCall(call)


def load(
    problem: Problem, device_index: int, algorithm: str = "auto", limit: int | None = None, kept: Kept = ""
) -> Loaded:
    """What is chosen for what computes a problem on a GPU; from the second time on, a look-up. ``limit`` and ``kept``
    are those of `choose`."""
    given, problem = problem, computed(problem)
    # what is no word may be unhashable; `choose` refuses it
    key = (problem, device_index, algorithm if isinstance(algorithm, str) else repr(algorithm), limit, kept)
    loaded = _loaded.recall(key)
    if loaded is None:
        with _lock:
            loaded = _loaded.recall(key)
            if loaded is None:
                device = launch.open_device(device_index)
                chosen = choose(problem, device.target, algorithm, limit, kept)
                loaded = Loaded(problem, chosen, chosen.plan(problem, device.target), device)
                _loaded.keep(key, loaded)
                for listener in listeners:
                    listener(given, device_index, algorithm, limit)
    return loaded


def is_loaded(problem: Problem, device_index: int, algorithm: str = "auto", limit: int | None = None) -> bool:
    """Whether `load` is a look-up in this process."""
    return _loaded.recall((problem, device_index, algorithm, limit, "")) is not None


def forget() -> None:
    """Drop what has been loaded; for tests and after tuning. Graphs captured before stay valid."""
    _loaded.clear()
    for each in also_forget:
        each()


def _on_cpu(resolved: Resolved) -> Call:
    if left_to_the_library(resolved):
        check_torch_algorithm(resolved.algorithm)
        return TorchCpuConv(resolved)
    problem = resolved.problem
    if problem.kind == "conv2d" and problem.fuses:
        chosen = choose(problem.plain, None, resolved.algorithm, resolved.workspace_limit)
        return FusedCpuCall(resolved, chosen)
    return CpuCall(resolved, choose(problem, None, resolved.algorithm, resolved.workspace_limit))
