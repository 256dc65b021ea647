"""A CUDA driver without a GPU: what libcuda does, as far as leanconv asks it, on the host's memory, each call recorded.

It is stricter than NVIDIA's: memory and kernels can be used in the context of their own GPU alone.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Mapping
from ctypes import c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, NamedTuple

from leanconv.plan import Launch, Number, TensorMap
from leanconv.runtime import driver, launch
from leanconv.runtime.compile import Compiled

OUT_OF_MEMORY, NO_CONTEXT, ANOTHER_CONTEXT = 2, 201, 400
#: calls that work without a context
FREE = (
    "cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain", "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuGetErrorName", "cuGetErrorString",
    "cuTensorMapEncodeTiled", "cuTensorMapEncodeIm2col", "cuThreadExchangeStreamCaptureMode",
)  # fmt: skip
#: handles: of devices, of their contexts, of modules and of functions, which never are the number of another kind
DEVICE, CONTEXT, MODULE, FUNCTION = 0x100, 0xC000, 0x10000, 0x20000


class Call(NamedTuple):
    """A call of the driver: integers as they were given, addresses of results too; ``device`` is the current one."""

    name: str
    device: int | None
    arguments: tuple[int, ...]


class Started(NamedTuple):
    """A kernel that was launched."""

    symbol: str
    device: int | None
    stream: int
    grid: int
    block: int
    shared_bytes: int
    early: bool
    #: of its parameters; of a tensor map the array's address
    values: tuple[Any, ...]


def code_of(made: Launch, arch: str) -> Compiled:
    """Stands for ``cache.compiled``: machine code that tells the fake driver the types of the parameters."""
    kinds = "".join(
        launch.slot_type(each.ctype)._type_ if isinstance(each, Number) else "M" if isinstance(each, TensorMap) else "P"  # type: ignore[attr-defined]
        for each in made.arguments
    )
    return Compiled(f"{made.symbol} {kinds} {arch}".encode(), made.symbol, arch, 40, 0, 0)


class FakeDriver:
    """libcuda on a machine with ``devices`` GPUs; every attribute of theirs that ``attributes`` lacks is 9."""

    def __init__(
        self, version: int = 13000, init: int = 0, devices: int = 1, missing: tuple[str, ...] = (),
        attributes: Mapping[int, Mapping[int, int]] = {}, names: tuple[str, ...] = ("", ""),
    ) -> None:  # fmt: skip
        self.version, self.init, self.devices, self.missing = version, init, devices, missing
        self.attributes, self.names = attributes, names
        self.calls: list[Call] = []
        self.started: list[Started] = []
        #: error codes of functions that fail, by name
        self.failing: dict[str, int] = {}
        #: streams that capture a graph
        self.captures: set[int] = set()
        #: by address: the GPU, and what keeps the memory
        self.memory: dict[int, tuple[int | None, Any]] = {}
        #: by handle: the GPU, and the code
        self.modules: dict[int, tuple[int | None, list[str]]] = {}
        #: (symbol, GPU, what the thread may do to captures of others: CU_STREAM_CAPTURE_MODE_RELAXED is 2)
        self.unloaded: list[tuple[str, int | None, int]] = []
        #: largest allocation that fits: none, unless a test says so
        self.most_bytes = 0
        self._local, self._next, self._texts = threading.local(), 0, {719: b"CUDA_ERROR_LAUNCH_FAILED"}
        self._functions = {
            "cuInit": lambda flags: self.init, "cuDriverGetVersion": lambda to: _set(to, self.version),
            "cuDeviceGetCount": lambda to: _set(to, self.devices),
            "cuDeviceGet": lambda to, index: _set(to, DEVICE + index),
            "cuDeviceGetName": self._name, "cuDeviceGetAttribute": self._attribute,
            "cuDevicePrimaryCtxRetain": lambda to, device: _set(to, CONTEXT + device - DEVICE, c_void_p),
            "cuCtxGetCurrent": lambda to: _set(to, self.stack[-1] if self.stack else 0, c_void_p),
            "cuCtxPushCurrent_v2": lambda context: self.stack.append(context) or 0, "cuCtxPopCurrent_v2": self._pop,
            "cuModuleLoadData": self._load, "cuModuleGetFunction": self._function, "cuModuleUnload": self._unload,
            "cuFuncSetAttribute": lambda function, *rest: self._of_another(self.modules[function - FUNCTION + MODULE]),
            "cuMemAlloc_v2": self._allocate, "cuMemFree_v2": self._free, "cuMemcpyHtoD_v2": self._copy,
            "cuMemcpyDtoH_v2": lambda to, pointer, count: self._copy(pointer, to, count, back=True),
            "cuLaunchKernelEx": self._launch,
            "cuTensorMapEncodeTiled": self._encode, "cuTensorMapEncodeIm2col": self._encode,
            "cuStreamIsCapturing": lambda stream, to: _set(to, int(stream in self.captures)),
            "cuGetErrorName": self._describe, "cuThreadExchangeStreamCaptureMode": self._exchange,
        }  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        if name in self.missing or name not in driver._SIGNATURES:
            raise AttributeError(name)

        def called(*arguments: int | None) -> int:
            given = tuple(each or 0 for each in arguments)
            self.calls.append(Call(name, self.device, given))
            if name in self.failing:
                return self.failing[name]
            if name not in FREE and not self.stack:
                return NO_CONTEXT
            return int(self._functions.get(name, lambda *a: 0)(*given))

        plain = (c_int, c_uint, c_size_t, c_uint64)
        types = (kind if kind in plain else c_void_p for kind in driver._SIGNATURES[name])
        return ctypes.CFUNCTYPE(c_int, *types)(called)

    @property
    def stack(self) -> list[int]:
        """The contexts of this thread, the current one last."""
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack  # type: ignore[no-any-return]

    @property
    def device(self) -> int | None:
        """The GPU whose context is current in this thread."""
        return self.stack[-1] - CONTEXT if self.stack else None

    @property
    def mode(self) -> int:
        """What this thread's calls may do to captures of other threads."""
        return getattr(self._local, "mode", 0)

    def named(self, *names: str) -> list[Call]:
        """The calls of these functions so far."""
        return [call for call in self.calls if call.name in names]

    def _of_another(self, owned: tuple[int | None, Any]) -> int:
        return 0 if owned[0] == self.device else ANOTHER_CONTEXT

    def _name(self, to: int, size: int, device: int) -> int:
        text = self.names[device - DEVICE].encode() + b"\0"
        ctypes.memmove(to, text, len(text))
        return 0

    def _attribute(self, to: int, number: int, device: int) -> int:
        return _set(to, self.attributes.get(device - DEVICE, {}).get(number, 9))

    def _pop(self, to: int) -> int:
        return _set(to, self.stack.pop(), c_void_p)

    def _load(self, to: int, image: int) -> int:
        self._next += 1
        self.modules[MODULE + self._next] = self.device, ctypes.string_at(image).decode().split(" ")
        return _set(to, MODULE + self._next, c_void_p)

    def _function(self, to: int, module: int, name: int) -> int:
        assert self.modules[module][1][0] == ctypes.string_at(name).decode()
        return _set(to, module - MODULE + FUNCTION, c_void_p) or self._of_another(self.modules[module])

    def _unload(self, module: int) -> int:
        owned = self.modules.pop(module)
        self.unloaded.append((owned[1][0], self.device, self.mode))
        return self._of_another(owned)

    def _exchange(self, to: int) -> int:
        before, self._local.mode = self.mode, c_int.from_address(to).value
        return _set(to, before)

    def _allocate(self, to: int, count: int) -> int:
        if count > self.most_bytes:
            return OUT_OF_MEMORY
        kept = (ctypes.c_byte * (count + 256))()
        pointer = -(-ctypes.addressof(kept) // 256) * 256
        self.memory[pointer] = self.device, kept
        return _set(to, pointer, c_uint64)

    def _free(self, pointer: int) -> int:
        return self._of_another(self.memory.pop(pointer))

    def _copy(self, pointer: int, host: int, count: int, back: bool = False) -> int:
        ctypes.memmove(*((host, pointer) if back else (pointer, host)), count)
        return self._of_another(self.memory[pointer])

    def _encode(self, to: int, element: int, rank: int, pointer: int, *rest: int) -> int:
        return _set(to, pointer, c_uint64)

    def _launch(self, config: int, function: int, parameters: int, extra: int) -> int:
        sizes, stream, early = launch_config(config)
        grid, _y, _z, block, _by, _bz, shared_bytes = sizes
        module = self.modules[function - FUNCTION + MODULE]
        symbol, kinds, _ = module[1]
        values = []
        for kind, at in zip(kinds, (c_void_p * len(kinds)).from_address(parameters), strict=True):
            of = "P" if kind == "M" else kind
            values += struct.unpack(of, ctypes.string_at(at, struct.calcsize(of)))
        self.started.append(Started(symbol, self.device, stream, grid, block, shared_bytes, early, tuple(values)))
        return self._of_another(module)

    def _describe(self, code: int, to: int) -> int:
        ctypes.c_char_p.from_address(to).value = self._texts.get(code)
        return 0


def launch_config(at: int) -> tuple[list[int], int, bool]:
    """Of a CUlaunchConfig: grid, block and shared memory, the stream, and whether the launch starts early.

    A CUlaunchAttribute is a number, and behind eight bytes an int.
    """
    stream, attributes = (c_uint64 * 2).from_address(at + 32)
    count = c_uint.from_address(at + 48).value
    started = [(c_int * 3).from_address(attributes + 72 * i)[::2] for i in range(count)]
    assert started in ([], [[6, 1]])
    return [*(c_uint * 7).from_address(at)], stream, bool(started)


def _set(to: int, value: int, kind: Any = c_int) -> int:
    kind.from_address(to).value = value
    return 0
