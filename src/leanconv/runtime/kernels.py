"""The kernels that are loaded on a GPU: compiled side by side, kept while something uses them, unloaded afterwards."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from ctypes import byref, c_int, c_void_p

from leanconv.plan import Launch
from leanconv.runtime import cache
from leanconv.runtime.bounded_cache import BoundedCache
from leanconv.runtime.compile import Compiled
from leanconv.runtime.driver import CudaError, Driver, OutOfMemoryError

#: kernels that stay loaded although no ready call uses them; some 100 kB of GPU memory each
KEPT = 512
_MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER = 8, 14
#: shared memory that a kernel may use without raising the driver's limit
_SHARED_WITHOUT_ASKING = 48 * 1024
#: blocks of a cluster that every GPU with clusters allows without an attribute
PORTABLE_CLUSTER = 8
_CAPTURE_RELAXED = 2


class Kernel:
    """A kernel on a GPU. When nothing refers to it any more, its module is unloaded."""

    def __init__(self, function: int) -> None:
        #: the driver's handle
        self.function = function
        #: bytes of dynamic shared memory that a launch of it may take
        self.shared_bytes = _SHARED_WITHOUT_ASKING
        self.large_clusters = False


class Kernels:
    """The kernels of one device. Every method is called with the device's context current.

    Compiling is by kernel: threads that want different ones compile at the same time, threads that want the same one
    wait for the first. NVRTC scales. Explored (16 cores, f7dc94c): 30 kernels 11.2 s on one thread, 1.4 on sixteen.
    """

    def __init__(self, driver: Driver, arch: str) -> None:
        self._driver, self._arch = driver, arch
        self._kept: BoundedCache[str, Kernel] = BoundedCache(KEPT)
        #: every kernel that something refers to, kept or not
        self._alive: weakref.WeakValueDictionary[str, Kernel] = weakref.WeakValueDictionary()
        self._captured: set[Kernel] = set()
        self._loading: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        #: modules whose kernel is gone. NOTE: a finalizer may run anywhere, so it only appends here
        self._gone: list[int] = []

    def is_loaded(self, launch: Launch) -> bool:
        """Whether `get` is a look-up."""
        return self._find(cache.key(launch, self._arch, "")) is not None

    def get(self, launch: Launch) -> Kernel:
        """The kernel of a launch, compiled and loaded if it is not. Raises CompileError and OutOfMemoryError."""
        name = cache.key(launch, self._arch, "")
        kernel = self._find(name)
        if kernel is None:
            with self._loading.setdefault(name, threading.Lock()):
                kernel = self._find(name)
                if kernel is None:
                    kernel = self._load(cache.compiled(launch, self._arch))
                    self._alive[name] = kernel
                self._loading.pop(name, None)
        self._kept.keep(name, kernel)
        with self._lock:
            # only ever raised: another plan may use the same function with more
            if launch.cluster > PORTABLE_CLUSTER and not kernel.large_clusters:
                self._driver.check("cuFuncSetAttribute", kernel.function, _NON_PORTABLE_CLUSTER, 1)
                kernel.large_clusters = True
            if launch.shared_bytes > kernel.shared_bytes:
                self._driver.check("cuFuncSetAttribute", kernel.function, _MAX_DYNAMIC_SHARED, launch.shared_bytes)
                kernel.shared_bytes = launch.shared_bytes
        return kernel

    def _find(self, name: str) -> Kernel | None:
        return self._kept.recall(name) or self._alive.get(name)

    def keep_for_graphs(self, kernels: Iterable[Kernel]) -> None:
        """Never unload these: a CUDA graph that captures a launch may run it at any later time."""
        self._captured.update(kernels)

    def _load(self, code: Compiled) -> Kernel:
        self._unload()
        module, function = c_void_p(), c_void_p()
        try:
            with self._beside_captures():
                self._driver.check("cuModuleLoadData", byref(module), code.cubin)
        except OutOfMemoryError as error:
            raise OutOfMemoryError(f"no GPU memory for a kernel of {len(code.cubin)} bytes. {error}") from error
        self._driver.check("cuModuleGetFunction", byref(function), module, code.symbol.encode())
        assert function.value is not None and module.value is not None
        kernel = Kernel(function.value)
        # at the process' end the driver unloads everything
        weakref.finalize(kernel, self._gone.append, module.value).atexit = False
        return kernel

    def _unload(self) -> None:
        """Unload the modules of kernels that nothing can launch any more; the driver waits for what still runs."""
        while self._gone:
            try:
                module = self._gone.pop()
            except IndexError:  # another thread was quicker
                return
            with self._beside_captures(), suppress(CudaError):
                self._driver.check("cuModuleUnload", module)

    @contextmanager
    def _beside_captures(self) -> Iterator[None]:
        """What this thread does meanwhile leaves captures of CUDA graphs valid."""
        mode = c_int(_CAPTURE_RELAXED)
        self._driver.check("cuThreadExchangeStreamCaptureMode", byref(mode))
        try:
            yield
        finally:
            self._driver.check("cuThreadExchangeStreamCaptureMode", byref(mode))
