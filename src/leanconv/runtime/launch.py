"""From a plan to running kernels: a device, machine code loaded on it, and launches on the caller's stream.

The rest of the package sees a GPU only through `Device` and reaches it only through `open_device`, so a test that
replaces that function can run everything above it on another executor of plans, such as the emulator.

Threads: everything here may be called from any number of threads at once.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from ctypes import byref, c_int, c_uint, c_void_p
from functools import partial
from typing import Any, ClassVar, Protocol

import numpy as np

from leanconv.plan import Launch, Number, Plan, Target, TensorMap, role_of
from leanconv.runtime import cache
from leanconv.runtime.compile import Compiled
from leanconv.runtime.driver import CudaError, CudaUnavailableError, OutOfMemoryError, driver
from leanconv.runtime.kernels import Kernel, Kernels
from leanconv.runtime.tensor_map import Slot, encoder
from leanconv.runtime.threads import side_by_side

#: ``run(stream, values)`` starts a plan: a raw stream handle, and a value for each of the roles it was made for. With a
#: third argument, True, it takes the GPU's context to be current, and raises CudaError, having started nothing, if not.
Executable = Callable[..., None]
#: NumPy arrays and numbers by role; None where a role has none.
Values = Mapping[str, np.ndarray | float | None]


class Device(Protocol):
    """A GPU, or what stands in for one."""

    name: str
    target: Target

    def executable(self, plan: Plan, roles: Sequence[str]) -> Executable:
        """The plan, what it prepares included, compiled and loaded.

        Each run takes values in the order of ``roles``: addresses, 0 where there is none, and numbers. ``roles``
        include all of ``plan.roles``, and may include others.
        """

    def compiled(self, plan: Plan) -> list[Compiled]:
        """Machine code of ``plan.every_launch``, with the compiler's figures."""

    def load(self, launch: Launch) -> object:
        """Compile and load one kernel, unless it is loaded; several threads may do so at the same time."""

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
    "clock_khz": 13,
    "memory_clock_khz": 36,
    "memory_bus_bits": 37,
}
#: What copies reach of the memory's nominal speed, measured on an H200.
_COPY_SHARE = 0.855
_MAX_GRID = 2**31 - 1
#: oldest major compute capability that runs the kernels: they copy to shared memory asynchronously
_OLDEST_MAJOR = 8

#: architectures whose own instructions need the suffix
_SPECIFIC = {(9, 0): "sm_90a", (10, 0): "sm_100a"}

_SLOT_TYPES: dict[str, type[ctypes._SimpleCData]] = {
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


def slot_type(ctype: str) -> type[ctypes._SimpleCData]:
    """The ctypes type of a kernel parameter, given its C++ type."""
    if "*" in ctype:
        return ctypes.c_uint64
    plain = ctype.replace("const", "").strip()
    if plain not in _SLOT_TYPES:
        raise AssertionError(f"kernel argument type {ctype!r} is not among {sorted(_SLOT_TYPES)}")
    return _SLOT_TYPES[plain]


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: its number, and a value of 64 bytes, of which an int is used."""

    _fields_: ClassVar = [("number", c_int), ("padding", c_int), ("value", c_int), ("rest", c_int * 15)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_: ClassVar = [
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("attribute_count", c_uint),
    ]


#: The oldest driver interface whose graphs keep early starts (CUDA 12.4).
_EARLY_VERSION = 12040
#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: blocks may start before the launch before has ended.
_EARLY = _Attribute(6, 0, 1)


class ArgumentBlock:
    """The arguments of a plan's launches in memory.

    A slot of 8 bytes for each role, then one for each number that the plan fixes; one of 128 bytes for each tensor map;
    then for each kernel the addresses of its parameters. The arguments of cuLaunchKernelEx are kept as ctypes objects,
    which saves their conversion at each call: four, where cuLaunchKernel has eleven.
    """

    __slots__ = ("_addresses", "calls", "configs", "maps", "memory")

    def __init__(
        self,
        launches: Sequence[tuple[int, Launch]],
        roles: Sequence[str],
        encoders: Mapping[TensorMap, Callable[[int], bytes]],
        early: bool,
    ) -> None:
        each = [argument for _, launch in launches for argument in launch.arguments]
        fixed = [argument for argument in each if isinstance(argument, Number) and argument.value is not None]
        self.memory = (ctypes.c_uint64 * (len(roles) + len(fixed)))()
        base = ctypes.addressof(self.memory)
        #: one for each launch
        self.configs: list[_Config] = []
        #: which role's pointer each tensor map follows
        self.maps: list[tuple[int, Slot]] = []
        self._addresses: list[ctypes.Array[c_void_p]] = []
        #: the arguments of cuLaunchKernelEx
        self.calls: list[tuple[Any, ...]] = []
        free = len(roles)
        for function, launch in launches:
            addresses = (c_void_p * max(len(launch.arguments), 1))()
            for i, argument in enumerate(launch.arguments):
                role = role_of(argument)
                if isinstance(argument, TensorMap):
                    self.maps.append((roles.index(argument.role), Slot(encoders[argument])))
                    addresses[i] = self.maps[-1][1].address
                elif role is not None:
                    addresses[i] = base + 8 * roles.index(role)
                elif isinstance(argument, Number):
                    slot_type(argument.ctype).from_buffer(self.memory, 8 * free).value = argument.value
                    addresses[i], free = base + 8 * free, free + 1
            self._addresses.append(addresses)
            parameters = c_void_p(ctypes.addressof(addresses))
            sizes = (launch.grid, 1, 1), (launch.block, 1, 1), launch.shared_bytes
            attributes = (ctypes.addressof(_EARLY), 1) if early and launch.early else (None, 0)
            self.configs.append(_Config(*sizes, None, *attributes))
            config = c_void_p(ctypes.addressof(self.configs[-1]))
            self.calls.append((config, c_void_p(function), parameters, None))


def value_format(launches: Sequence[Launch], roles: Sequence[str]) -> str:
    """How ``struct`` writes the values of ``roles`` into slots of 8 bytes: pointers, and numbers of the kernels' types.

    A number that no kernel takes is written as a float.
    """
    codes = {"value": "f4x", "delta": "f4x"}
    for launch in launches:
        for argument in launch.arguments:
            if isinstance(argument, Number) and argument.value is None:
                kind = slot_type(argument.ctype)
                codes[argument.name] = f"{kind._type_}{8 - ctypes.sizeof(kind)}x"  # type: ignore[attr-defined]
    return "=" + "".join(codes.get(role, "Q") for role in roles)


def make_launcher(
    start: Callable[..., int],
    fail: Callable[[int, Launch], None],
    launches: Sequence[tuple[int, Launch]],
    roles: Sequence[str],
    early: bool = False,
) -> Executable:
    """``run(stream, values)`` for loaded kernels: fill a block of arguments, call ``start`` for each.

    ``start`` is cuLaunchKernelEx; ``early``: whether those start early that may.

    A block serves one call at a time. Free blocks are in a list whose pop and append are atomic, so threads and signal
    handlers that call in between get another block.
    """
    arguments = [argument for _, launch in launches for argument in launch.arguments]
    encoders = {argument: encoder(argument) for argument in arguments if isinstance(argument, TensorMap)}
    blocks = [ArgumentBlock(launches, roles, encoders, early)]
    pack_into = struct.Struct(value_format([launch for _, launch in launches], roles)).pack_into

    def run(stream: int, values: Sequence[int | float]) -> None:
        try:
            block = blocks.pop()
        except IndexError:
            block = ArgumentBlock(launches, roles, encoders, early)
        pack_into(block.memory, 0, *values)
        for place, tensor_map in block.maps:
            tensor_map.point_to(int(values[place]))
        for config in block.configs:
            config.stream = stream
        for call in block.calls:
            code = start(*call)
            if code:
                fail(code, launches[block.calls.index(call)][1])
        blocks.append(block)

    return run


class CudaDevice:
    """A GPU with its primary context, the one that PyTorch and CuPy use. Calls restore the context that was current."""

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
        clock, memory_clock, bus = (number.pop(name) for name in ("clock_khz", "memory_clock_khz", "memory_bus_bits"))
        if clock and memory_clock:  # 0 where the driver does not say
            # two transfers in a clock cycle of the memory
            number["bytes_per_cycle"] = 100 * round(_COPY_SHARE * 2 * memory_clock * bus / 8 / clock / 100)
        arch = arch_name(number.pop("major"), number.pop("minor"))
        self.target = Target(arch=arch, **number, consumer="GeForce" in self.name, model=self.name)
        context = c_void_p()
        self._driver.check("cuDevicePrimaryCtxRetain", byref(context), handle)
        self._context = context.value
        self._get_current = self._driver.unconverted("cuCtxGetCurrent")
        self._cells = threading.local()
        self._kernels = Kernels(self._driver, self.target.arch)

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

    @contextmanager
    def _current(self) -> Iterator[None]:
        """The context is current; then again the one that was."""
        entered = self._enter()
        try:
            yield
        finally:
            if entered:
                self._driver.check("cuCtxPopCurrent_v2", byref(c_void_p()))

    def _in_context(self, run: Executable, stream: int, values: Sequence[int | float]) -> None:
        with self._current():
            run(stream, values)

    def compiled(self, plan: Plan) -> list[Compiled]:
        """Machine code of each launch, from disk or from NVRTC."""
        return [cache.compiled(launch, self.target.arch) for launch in plan.every_launch]

    def load(self, launch: Launch) -> Kernel:
        with self._current():
            return self._kernels.get(launch)

    def executable(self, plan: Plan, roles: Sequence[str]) -> Executable:
        """The plan's kernels, loaded. Calling it neither allocates nor synchronises."""
        if missing := [role for role in plan.roles if role not in roles]:
            raise AssertionError(f"a kernel takes {', '.join(missing)}, and a call gives {', '.join(roles)}")
        needed = [launch for launch in plan.every_launch if launch.grid]
        for launch in needed:
            if launch.grid > _MAX_GRID:
                raise AssertionError(f"{launch.symbol}: a grid of {launch.grid} blocks exceeds {_MAX_GRID}")
        side_by_side([partial(self.load, launch) for launch in needed if not self._kernels.is_loaded(launch)])
        kernels = [self.load(launch) for launch in needed]
        loaded = [(kernel.function, launch) for kernel, launch in zip(kernels, needed, strict=True)]
        early = self.target.clusters and self._driver.version >= _EARLY_VERSION
        start = make_launcher(self._driver.unconverted("cuLaunchKernelEx"), self._fail, loaded, roles, early)
        cells, get_current, context, run_in = self._cells, self._get_current, self._context, self._in_context
        captured, is_capturing = False, self._driver.unconverted("cuStreamIsCapturing")

        # NOTE: none of these functions refers to itself, so the kernels go as soon as `run` does
        def begin(stream: int, values: Sequence[int | float]) -> None:
            """Start, and keep the kernels for good once a graph has captured them."""
            nonlocal captured
            # the default stream, 0, cannot be captured
            if stream and not captured:
                found = c_int()
                is_capturing(c_void_p(stream), byref(found))
                if found.value:
                    self._kernels.keep_for_graphs(kernels)
                    captured = True
            start(stream, values)

        def run(stream: int, values: Sequence[int | float], here: bool = False) -> None:
            # what `_enter` does first, without calls of it, in each launch
            if not here:
                try:
                    current, address = cells.cell
                except AttributeError:
                    return run_in(begin, stream, values)
                get_current(address)
                if current.value != context:
                    return run_in(begin, stream, values)
            return begin(stream, values) if stream and not captured else start(stream, values)

        return run

    def _fail(self, code: int, launch: Launch) -> None:
        size = f"{launch.grid} blocks of {launch.block} threads, {launch.shared_bytes} bytes of shared memory"
        self._driver.fail(code, f"launching {launch.symbol} ({size})")

    def capturing(self, stream: int) -> bool:
        status = c_int()
        self._check("cuStreamIsCapturing", stream, byref(status))
        return bool(status.value)

    def wait(self, stream: int) -> None:
        self._check("cuStreamSynchronize", stream)

    def allocate(self, nbytes: int) -> int:
        """Device memory, aligned to 256 bytes."""
        pointer = ctypes.c_uint64()
        try:
            self._check("cuMemAlloc_v2", byref(pointer), max(nbytes, 1))
        except OutOfMemoryError as error:
            raise OutOfMemoryError(f"cuda:{self.index} ({self.name}) has no {nbytes} bytes left. {error}") from error
        return pointer.value

    def free(self, pointer: int) -> None:
        self._check("cuMemFree_v2", pointer)

    def upload(self, pointer: int, array: np.ndarray) -> None:
        self._check("cuMemcpyHtoD_v2", pointer, array.ctypes.data, array.nbytes)

    def download(self, array: np.ndarray, pointer: int) -> None:
        self._check("cuMemcpyDtoH_v2", array.ctypes.data, pointer, array.nbytes)

    def _check(self, name: str, *arguments: Any) -> None:
        with self._current():
            self._driver.check(name, *arguments)


_devices: dict[int, CudaDevice] = {}
_devices_lock = threading.Lock()


def open_device(index: int) -> Device:
    """GPU number ``index``. Raises CudaUnavailableError where there is none, ValueError for a number too large."""
    opened = _devices.get(index)
    if opened is None:
        with _devices_lock:
            opened = _devices.get(index) or CudaDevice(index)
            _devices[index] = opened
    return opened


def why_no_gpu(index: int = 0) -> str | None:
    """Why GPU number ``index`` cannot be used: no driver, too old a driver, no GPU, too old a GPU. None where it can.

    Opens the GPU. Raises CudaError where that fails for another reason.
    """
    try:
        open_device(index)
    except CudaUnavailableError as error:
        return str(error)
    return None


@contextmanager
def resident(
    device: Device, plan: Plan, values: Values, run: Executable | None = None, *, upload_outputs: bool = True
) -> Iterator[Callable[[], None]]:
    """NumPy arrays on the device, with memory for a plan; gives a function that runs it there on the default stream.

    Args:
        device: the GPU.
        plan: the launches, those that prepare included.
        values: by role, contiguous arrays, and numbers; None where a role has none. What the plan writes is copied back
            at the end. Workspace and packed weights are allocated where they are not among them.
        run: ``device.executable`` of the plan, for the roles in ``values``, then workspace and packed weights.
        upload_outputs: whether outputs have their contents on the device before the plan runs.
    """
    roles = tuple(dict.fromkeys((*values, "workspace", "prepared")))
    run = run or device.executable(plan, roles)
    outputs = plan.outputs
    pointers: dict[str, int] = {}
    try:
        for role, array in values.items():
            if isinstance(array, np.ndarray):
                pointers[role] = device.allocate(array.nbytes)
                if upload_outputs or role not in outputs:
                    device.upload(pointers[role], array)
        for role, nbytes in (("workspace", plan.workspace_bytes), ("prepared", plan.prepared_bytes)):
            if nbytes and role not in pointers:
                pointers[role] = device.allocate(nbytes)
        numbers = {role: value for role, value in values.items() if not isinstance(value, np.ndarray)}
        given = [pointers.get(role) or numbers.get(role) or 0 for role in roles]
        yield partial(run, 0, given)
        for role in outputs:
            array = values[role]
            assert isinstance(array, np.ndarray)
            device.download(array, pointers[role])
    except BaseException:
        for pointer in pointers.values():
            # a kernel that failed makes every later call of the driver fail: the first error is the one to report
            with suppress(CudaError):
                device.free(pointer)
        raise
    for pointer in pointers.values():
        device.free(pointer)


def run_on_host_arrays(
    device: Device, plan: Plan, values: Values, run: Executable | None = None, *, upload_outputs: bool = True
) -> None:
    """Run a plan once on NumPy arrays, and wait; arguments as in `resident`."""
    with resident(device, plan, values, run, upload_outputs=upload_outputs) as start:
        start()
