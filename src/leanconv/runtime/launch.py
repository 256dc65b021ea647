"""From a plan to running kernels: a device, machine code loaded on it, and launches on the caller's stream.

The rest of the package sees a GPU only through `Device` and reaches it only through `open_device`, so a test that
replaces that function runs everything above it on whatever executes plans (the emulator does).

Threads: everything here may be called from any number of threads at once.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ctypes import byref, c_int, c_uint, c_void_p
from typing import Any, Protocol

import numpy as np

from leanconv.plan import Launch, Plan, Target
from leanconv.runtime import cache
from leanconv.runtime.compile import Compiled
from leanconv.runtime.driver import CudaError, CudaUnavailableError, OutOfMemoryError, driver

#: ``run(stream, values)`` starts a plan: a raw stream handle, and the bound arguments in the order of their names.
Executable = Callable[[int, Sequence[int | float]], None]

#: What a kernel argument may be called and bound to at a call, in the order in which values are passed.
BOUND_NAMES = ("x", "w", "bias", "y", "workspace", "prepared", "value", "delta")

#: Kernels may assume that every array starts at a multiple of this many bytes (one 128-bit load). NOTE: all but the
#: image and the result of a filter, which may be crops of larger ones and start at any element.
ALIGNMENT = 16


class Device(Protocol):
    """A GPU, or what stands in for one."""

    name: str
    target: Target

    def executable(self, plan: Plan) -> Executable:
        """The plan, what it prepares included, compiled and loaded.

        Values are ordered as BOUND_NAMES, absent pointers are 0.
        """

    def compiled(self, plan: Plan) -> list[Compiled]:
        """Machine code of ``plan.every_launch``, with the compiler's figures."""

    def capturing(self, stream: int) -> bool:
        """Whether work on a stream is being captured in a CUDA graph instead of run."""

    def wait(self, stream: int) -> None:
        """Wait until a stream has done all its work."""

    def allocate(self, nbytes: int) -> int:
        """Pointer to new memory, aligned to ALIGNMENT. Raises OutOfMemoryError naming the bytes."""

    def free(self, pointer: int) -> None:
        """Give memory back."""

    def upload(self, pointer: int, array: np.ndarray) -> None:
        """Copy a contiguous array to the device; done when it returns."""

    def download(self, array: np.ndarray, pointer: int) -> None:
        """Copy from the device to a contiguous array, after all work of the default stream; done when it returns."""


_ATTRIBUTES = {
    "multiprocessors": 16,
    "major": 75,
    "minor": 76,
    "shared_per_multiprocessor": 81,
    "registers_per_multiprocessor": 82,
    "shared_per_block": 97,
}
_MAX_DYNAMIC_SHARED = 8
#: shared memory that a kernel may use without asking the driver for more
_SHARED_WITHOUT_ASKING = 48 * 1024
_MAX_GRID = 2**31 - 1
#: oldest major compute capability that runs the kernels: they copy to shared memory asynchronously
_OLDEST_MAJOR = 8

#: architectures whose own instructions need the suffix
_SPECIFIC = {(9, 0): "sm_90a", (10, 0): "sm_100a"}

_SLOT_TYPES: dict[str, Any] = {
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "int": ctypes.c_int32,
    "unsigned": ctypes.c_uint32,
    "unsigned int": ctypes.c_uint32,
    "long long": ctypes.c_int64,
    "unsigned long long": ctypes.c_uint64,
    "bool": ctypes.c_bool,
}


def arch_name(major: int, minor: int) -> str:
    """The compiler's name of a compute capability: ``sm_90a`` for 9.0."""
    return _SPECIFIC.get((major, minor), f"sm_{major}{minor}")


def slot_type(ctype: str) -> Any:
    """The ctypes type of a kernel parameter, given its C++ type."""
    if "*" in ctype:
        return ctypes.c_uint64
    plain = ctype.replace("const", "").strip()
    if plain not in _SLOT_TYPES:
        raise AssertionError(f"kernel argument type {ctype!r} is not among {sorted(_SLOT_TYPES)}")
    return _SLOT_TYPES[plain]


class ArgumentBlock:
    """Memory that the driver reads the kernel parameters of a whole plan from, and the calls that point into it.

    The values of a call lie in front, in the order of BOUND_NAMES, written by one ``pack_into``; behind them the
    numbers that the plan fixes; then for each kernel the addresses of its parameters. The arguments of
    cuLaunchKernel are kept as ctypes objects, which saves their conversion at each call.
    """

    def __init__(self, launches: Sequence[tuple[int, Launch]]) -> None:
        fixed = [argument for _, each in launches for argument in each.arguments if argument.value is not None]
        self.memory = (ctypes.c_uint64 * (len(BOUND_NAMES) + len(fixed)))()
        base = ctypes.addressof(self.memory)
        self.stream = c_void_p()
        self._keep: list[Any] = []
        self.calls: list[tuple[Any, ...]] = []
        free = len(BOUND_NAMES)
        for function, each in launches:
            addresses = (c_void_p * max(len(each.arguments), 1))()
            for i, argument in enumerate(each.arguments):
                if argument.value is None:
                    slot = BOUND_NAMES.index(argument.name)
                else:
                    slot_type(argument.ctype).from_buffer(self.memory, 8 * free).value = argument.value
                    slot, free = free, free + 1
                addresses[i] = base + 8 * slot
            self._keep.append(addresses)
            shape = (c_uint(number) for number in (each.grid, 1, 1, each.block, 1, 1, each.shared_bytes))
            self.calls.append((c_void_p(function), *shape, self.stream, c_void_p(ctypes.addressof(addresses)), None))


def value_format(launches: Sequence[Launch]) -> str:
    """How ``struct`` writes the values of a call into 8-byte slots: six pointers, and ``value`` and ``delta``."""
    codes = {"value": "f4x", "delta": "f4x"}
    for each in launches:
        for argument in each.arguments:
            if argument.value is None and "*" not in argument.ctype:
                kind = slot_type(argument.ctype)
                codes[argument.name] = f"{kind._type_}{8 - ctypes.sizeof(kind)}x"
    return "=6Q" + codes["value"] + codes["delta"]


def make_launcher(
    start: Callable[..., int], fail: Callable[[int, Launch], None], launches: Sequence[tuple[int, Launch]]
) -> Executable:
    """``run(stream, values)`` for loaded kernels: fill a block of arguments, call the driver's ``start`` for each.

    A block serves one call at a time. Blocks wait in a list whose pop and append are atomic, so threads and signal
    handlers that call in between get another one.
    """
    blocks = [ArgumentBlock(launches)]
    pack_into = struct.Struct(value_format([each for _, each in launches])).pack_into

    def run(stream: int, values: Sequence[int | float]) -> None:
        try:
            block = blocks.pop()
        except IndexError:
            block = ArgumentBlock(launches)
        pack_into(block.memory, 0, *values)
        block.stream.value = stream
        for i, call in enumerate(block.calls):
            code = start(*call)
            if code:
                fail(code, launches[i][1])
        blocks.append(block)

    return run


class CudaDevice:
    """A GPU with its primary context, the one that PyTorch and CuPy use; what is current is left as it was found."""

    def __init__(self, index: int) -> None:
        self._driver = driver()
        self.index = index
        if not 0 <= index < self._driver.device_count:
            raise ValueError(f"device cuda:{index} does not exist; this machine has {self._driver.device_count} GPU(s)")
        handle = c_int()
        self._driver.check("cuDeviceGet", byref(handle), index)
        text = ctypes.create_string_buffer(256)
        self._driver.check("cuDeviceGetName", text, 256, handle)
        self.name = text.value.decode()
        number = {}
        for name, attribute in _ATTRIBUTES.items():
            value = c_int()
            self._driver.check("cuDeviceGetAttribute", byref(value), attribute, handle)
            number[name] = value.value
        if number["major"] < _OLDEST_MAJOR:
            raise CudaUnavailableError(
                f"cuda:{index} ({self.name}) has compute capability {number['major']}.{number['minor']}, and leanconv "
                f"needs {_OLDEST_MAJOR}.0 (Ampere) or newer. NumPy arrays run on the CPU without a GPU."
            )
        self.target = Target(arch=arch_name(number.pop("major"), number.pop("minor")), **number)
        context = c_void_p()
        self._driver.check("cuDevicePrimaryCtxRetain", byref(context), handle)
        self._context = context.value
        self._get_current = self._driver.unconverted("cuCtxGetCurrent")
        self._cells = threading.local()
        self._lock = threading.Lock()
        self._functions: dict[str, int] = {}
        self._shared: dict[int, int] = {}

    def _enter(self) -> bool:
        """Make the context current; returns whether it was not."""
        try:
            current, address = self._cells.cell
        except AttributeError:
            current = c_void_p()
            address = c_void_p(ctypes.addressof(current))
            self._cells.cell = current, address
        self._get_current(address)
        if current.value == self._context:
            return False
        self._driver.check("cuCtxPushCurrent_v2", self._context)
        return True

    def _leave(self, entered: bool) -> None:
        if entered:
            self._driver.check("cuCtxPopCurrent_v2", byref(c_void_p()))

    def compiled(self, plan: Plan) -> list[Compiled]:
        """Machine code of each launch, from disk or from NVRTC."""
        return [cache.compiled(launch, self.target.arch) for launch in plan.every_launch]

    def _function(self, launch: Launch) -> int:
        name = cache.key(launch, self.target.arch)
        # one at a time: NVRTC gains nothing from two, and a kernel shall be compiled once
        with self._lock:
            if name not in self._functions:
                self._functions[name] = self._load(cache.compiled(launch, self.target.arch))
            function = self._functions[name]
            # only ever raised: an earlier plan may use the same function with more
            if launch.shared_bytes > self._shared.get(function, _SHARED_WITHOUT_ASKING):
                self._driver.check("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, launch.shared_bytes)
                self._shared[function] = launch.shared_bytes
        return function

    def _load(self, code: Compiled) -> int:
        module, function = c_void_p(), c_void_p()
        try:
            self._driver.check("cuModuleLoadData", byref(module), code.cubin)
        except OutOfMemoryError as error:
            raise OutOfMemoryError(f"no GPU memory for a kernel of {len(code.cubin)} bytes. {error}") from error
        self._driver.check("cuModuleGetFunction", byref(function), module, code.symbol.encode())
        assert function.value is not None
        return function.value

    def executable(self, plan: Plan) -> Executable:
        """The plan's kernels, loaded. Calling it neither allocates nor synchronises."""
        loaded = []
        entered = self._enter()
        try:
            for launch in plan.every_launch:
                if launch.grid > _MAX_GRID:
                    raise AssertionError(f"{launch.symbol}: a grid of {launch.grid} blocks exceeds {_MAX_GRID}")
                if launch.grid:
                    loaded.append((self._function(launch), launch))
        finally:
            self._leave(entered)
        start = make_launcher(self._driver.unconverted("cuLaunchKernel"), self._fail, loaded)
        enter, leave = self._enter, self._leave

        def run(stream: int, values: Sequence[int | float]) -> None:
            if enter():
                try:
                    start(stream, values)
                finally:
                    leave(True)
            else:
                start(stream, values)

        return run

    def _fail(self, code: int, launch: Launch) -> None:
        size = f"{launch.grid} blocks of {launch.block} threads, {launch.shared_bytes} bytes of shared memory"
        self._driver.fail(code, f"launching {launch.symbol} ({size})")

    def capturing(self, stream: int) -> bool:
        """See Device."""
        status = c_int()
        self._check("cuStreamIsCapturing", stream, byref(status))
        return bool(status.value)

    def wait(self, stream: int) -> None:
        """See Device."""
        self._check("cuStreamSynchronize", stream)

    def allocate(self, nbytes: int) -> int:
        """Device memory, aligned to 256 bytes."""
        pointer = ctypes.c_uint64()
        entered = self._enter()
        try:
            self._driver.check("cuMemAlloc_v2", byref(pointer), max(nbytes, 1))
        except OutOfMemoryError as error:
            raise OutOfMemoryError(f"cuda:{self.index} ({self.name}) has no {nbytes} bytes left. {error}") from error
        finally:
            self._leave(entered)
        return pointer.value

    def free(self, pointer: int) -> None:
        """Give memory of `allocate` back."""
        self._check("cuMemFree_v2", pointer)

    def upload(self, pointer: int, array: np.ndarray) -> None:
        """Copy ``array``, which is contiguous, to the device."""
        self._check("cuMemcpyHtoD_v2", pointer, array.ctypes.data, array.nbytes)

    def download(self, array: np.ndarray, pointer: int) -> None:
        """Copy to ``array``, which is contiguous, once the default stream has finished."""
        self._check("cuMemcpyDtoH_v2", array.ctypes.data, pointer, array.nbytes)

    def _check(self, name: str, *arguments: Any) -> None:
        entered = self._enter()
        try:
            self._driver.check(name, *arguments)
        finally:
            self._leave(entered)


_devices: dict[int, CudaDevice] = {}
_devices_lock = threading.Lock()


def open_device(index: int) -> Device:
    """GPU number ``index``. Raises CudaUnavailableError where there is none, ValueError for a number too large."""
    found = _devices.get(index)
    if found is None:
        with _devices_lock:
            found = _devices.get(index) or CudaDevice(index)
            _devices[index] = found
    return found


def device_index(device: Any) -> int:
    """The number in ``"cuda"`` or ``"cuda:1"``. Raises ValueError for any other value."""
    match = re.fullmatch(r"cuda(?::(\d+))?", str(device))
    if match is None:
        raise ValueError(
            f"device={device!r} is not known; give 'cuda', 'cuda:N', 'cpu', or None for where the arrays lie"
        )
    return int(match.group(1) or 0)


def run_on_host_arrays(
    device: Device,
    run: Executable,
    inputs: Mapping[str, np.ndarray],
    y: np.ndarray,
    workspace_bytes: int = 0,
    scalars: Mapping[str, float] | None = None,
    prepared_bytes: int = 0,
) -> None:
    """Copy contiguous NumPy ``inputs`` to the device, run there on the default stream, and copy the result to ``y``."""
    pointers: dict[str, int] = {}
    try:
        for name, array in inputs.items():
            pointers[name] = device.allocate(array.nbytes)
            device.upload(pointers[name], array)
        pointers["y"] = device.allocate(y.nbytes)
        for name, nbytes in (("workspace", workspace_bytes), ("prepared", prepared_bytes)):
            if nbytes:
                pointers[name] = device.allocate(nbytes)
        given = {**pointers, **(scalars or {})}
        run(0, [given.get(name, 0) for name in BOUND_NAMES])
        device.download(y, pointers["y"])
    except BaseException:
        for pointer in pointers.values():
            # a kernel that failed makes every later call of the driver fail: the first error is the one to tell
            with suppress(CudaError):
                device.free(pointer)
        raise
    for pointer in pointers.values():
        device.free(pointer)


def run_plan(device: Device, plan: Plan, arrays: Mapping[str, np.ndarray], **scalars: float) -> None:
    """Run a plan on NumPy arrays named as its arguments are; the result is written to ``arrays["y"]``.

    For tests, tuning and the curious: it copies to the device and back, and waits.
    """
    inputs = {name: np.ascontiguousarray(array) for name, array in arrays.items() if name != "y"}
    run_on_host_arrays(
        device, device.executable(plan), inputs, arrays["y"], plan.workspace_bytes, scalars, plan.prepared_bytes
    )


__all__ = ["BOUND_NAMES", "ArgumentBlock", "CudaDevice", "CudaError", "Device", "Executable", "open_device", "run_plan"]
