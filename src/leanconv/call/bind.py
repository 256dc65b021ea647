"""From a described call to a ready one: choose, plan, and make an object of the class for the call's device."""

from __future__ import annotations

import threading
from collections.abc import Callable

from leanconv.call.choose import choose
from leanconv.call.describe import Described
from leanconv.call.run import (
    Call,
    CpuCall,
    GpuCall,
    HostOnGpuCall,
    Loaded,
    PreparedCall,
    TorchCpuConv,
    UnpreparedCall,
    check_torch_algorithm,
    left_to_the_library,
)
from leanconv.problem import Problem
from leanconv.runtime import launch
from leanconv.runtime.recent import Recent

#: what was chosen for a problem, with its kernels; 8 kB each besides the kernels
_loaded: Recent[tuple[Problem, int, str, int | None], Loaded] = Recent(1024)
_lock = threading.Lock()
#: called with problem, GPU, algorithm and limit of whatever is newly chosen for
listeners: list[Callable[[Problem, int, str, int | None], None]] = []
#: called by `forget`: what keeps ready calls elsewhere
also_forget: list[Callable[[], None]] = []


def bind(described: Described) -> Call:
    """The ready call for arrays of the same shape, memory order and device as those of ``described``.

    Raises NoAlgorithmError where nothing fits, CudaUnavailableError, CompileError.
    """
    if described.device is None:
        call = _on_cpu(described)
    else:
        # nothing is compiled for an empty result, but what nothing could run is refused all the same
        loaded = load(described.problem, described.device, described.algorithm, described.workspace_limit)
        if described.operands.device is None:
            call = HostOnGpuCall(described, loaded)
        elif described.weights is not None and loaded.prepares(described):
            return PreparedCall(described, loaded)
        else:
            call = GpuCall(described, loaded)
    return call if described.weights is None else UnpreparedCall(call)


def load(problem: Problem, device_index: int, algorithm: str = "auto", limit: int | None = None) -> Loaded:
    """What is chosen for a problem on a GPU; from the second time on, a look-up. ``limit`` is that of `choose`."""
    key = (problem, device_index, algorithm, limit)
    loaded = _loaded.recall(key)
    if loaded is None:
        with _lock:
            loaded = _loaded.recall(key)
            if loaded is None:
                device = launch.open_device(device_index)
                chosen = choose(problem, device.target, algorithm, limit)
                loaded = Loaded(problem, chosen, chosen.plan(problem, device.target), device)
                _loaded.keep(key, loaded)
                for listener in listeners:
                    listener(*key)
    return loaded


def is_loaded(problem: Problem, device_index: int, algorithm: str = "auto", limit: int | None = None) -> bool:
    """Whether `load` is a look-up in this process."""
    return _loaded.recall((problem, device_index, algorithm, limit)) is not None


def forget() -> None:
    """Drop what has been loaded; for tests and after tuning. Graphs captured before stay valid."""
    _loaded.clear()
    for each in also_forget:
        each()


def _on_cpu(described: Described) -> Call:
    if left_to_the_library(described):
        check_torch_algorithm(described.algorithm)
        return TorchCpuConv(described)
    return CpuCall(described, choose(described.problem, None, described.algorithm, described.workspace_limit))
