"""What all tests share: a cache folder of their own, and stand-ins for a GPU and for CuPy."""

from __future__ import annotations

import ctypes
import re
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from leanconv import arrays
from leanconv.bench import run as bench_run
from leanconv.bench.ceilings import measure_cpu
from leanconv.call import choose, lookup, weights
from leanconv.dtypes import item_bytes
from leanconv.kernels.common import split_gemm as tensor_filters
from leanconv.kernels.contract import GpuAlgorithm
from leanconv.plan import ALIGNMENT, Plan, Target
from leanconv.problem import ConvProblem, FilterProblem, Problem
from leanconv.runtime import cache as disk_cache
from leanconv.runtime import launch
from leanconv.runtime.compile import Compiled
from tests.collection import (
    _what_is_frozen_stays,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's own compiled kernels and tables of tuned problems are neither read nor written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEANCONV_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("LEANCONV_TUNING_DIR", str(tmp_path_factory.mktemp("tables")))
        patch.delenv("LEANCONV_TUNING", raising=False)
        patch.delenv("LEANCONV_NO_CACHE", raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def _ceilings_are_measured_once() -> Iterator[None]:
    """A run of the benchmark takes a second of the CPU otherwise, before its first problem."""
    measured = cache(lambda: measure_cpu(0.1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_run, "measure_cpu", lambda budget_s: measured())
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240607)


@pytest.fixture
def nvrtc() -> None:
    """NVRTC as it is installed; without it, a test that compiles is skipped."""
    pytest.importorskip("cuda.core", reason="NVRTC comes with the extra leanconv[cu13] or [cu12]")


@pytest.fixture
def one_block_validates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are so small that a block alone finds out which filters need factors, and prepares them again."""
    monkeypatch.setattr(tensor_filters, "BLOCKS_VALIDATED", 64)


@pytest.fixture
def some_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of NVRTC, which need not be installed: it is part of the key of every kernel."""
    monkeypatch.setattr(disk_cache, "compiler_version", lambda: "nvrtc 13.0")


def oracle_conv(problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """Float64 convolution by the definition, one filter tap at a time; shares no code with the package's engines.

    For dgrad each element of x, a gradient, goes back to where the forward layer has read from; for wgrad ``w`` is the
    gradient of the output.
    """
    to_nchw = {"NCHW": (0, 1, 2, 3), "NHWC": (0, 3, 1, 2), "CHWN": (3, 0, 1, 2)}[problem.layout]
    from_nchw = {"NCHW": (0, 1, 2, 3), "NHWC": (0, 2, 3, 1), "CHWN": (1, 2, 3, 0)}[problem.layout]
    x, w = x.transpose(to_nchw), w.transpose(to_nchw)
    top, bottom, left, right = problem.padding
    if problem.op == "dgrad":
        y = _scatter(problem, x.astype(np.float64), w)[:, :, top : top + problem.h, left : left + problem.w]
        if bias is not None:
            y += bias.astype(np.float64)[:, None, None]
        return y.transpose(from_nchw)
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (top, bottom), (left, right)))
    if problem.op == "wgrad":
        return _correlate(problem, padded, w.astype(np.float64)).transpose(from_nchw)
    y = np.zeros((problem.n, problem.k, problem.p, problem.q))
    for k in range(problem.k):
        first = k // problem.group_k * problem.group_c
        for c in range(problem.group_c):
            for r in range(problem.r):
                for s in range(problem.s):
                    i, j = r * problem.dilation[0], s * problem.dilation[1]
                    taps = padded[
                        :, first + c, i : i + (problem.p - 1) * problem.stride[0] + 1 : problem.stride[0],
                        j : j + (problem.q - 1) * problem.stride[1] + 1 : problem.stride[1],
                    ]  # fmt: skip
                    y[:, k] += taps * float(w[k, c, r, s])
    if bias is not None:
        y += bias.astype(np.float64)[:, None, None]
    if problem.activation == "relu":
        y = np.where(np.isnan(y), y, np.maximum(y, 0))
    return y.transpose(from_nchw)


def _scatter(problem: ConvProblem, grad: np.ndarray, w: np.ndarray) -> np.ndarray:
    top, bottom, left, right = problem.padding
    padded = np.zeros((problem.n, problem.c, top + problem.h + bottom, left + problem.w + right))
    for k in range(problem.k):
        first = k // problem.group_k * problem.group_c
        for c in range(problem.group_c):
            for r in range(problem.r):
                for s in range(problem.s):
                    i, j = r * problem.dilation[0], s * problem.dilation[1]
                    padded[
                        :, first + c, i : i + (problem.p - 1) * problem.stride[0] + 1 : problem.stride[0],
                        j : j + (problem.q - 1) * problem.stride[1] + 1 : problem.stride[1],
                    ] += grad[:, k] * float(w[k, c, r, s])  # fmt: skip
    return padded


def _correlate(problem: ConvProblem, padded: np.ndarray, grad: np.ndarray) -> np.ndarray:
    """For each weight the products of what it saw and of the gradients of the outputs."""
    dw = np.zeros((problem.k, problem.group_c, problem.r, problem.s))
    for k in range(problem.k):
        for c in range(problem.group_c):
            image = padded[:, k // problem.group_k * problem.group_c + c]
            for r in range(problem.r):
                for s in range(problem.s):
                    rows = r * problem.dilation[0] + problem.stride[0] * np.arange(problem.p)
                    columns = s * problem.dilation[1] + problem.stride[1] * np.arange(problem.q)
                    dw[k, c, r, s] = (image[:, rows[:, None], columns] * grad[:, k]).sum()
    return dw


_PAD_MODES = {"replicate": "edge", "reflect": "symmetric", "reflect101": "reflect", "wrap": "wrap"}


def oracle_filter(
    problem: FilterProblem, x: np.ndarray, kernel: np.ndarray, value: float = 0, delta: float = 0
) -> np.ndarray:
    """Float64 correlation of images (batch, h, w) by the definition, borders made by numpy.pad; of several kernels
    (f, kh, kw) as (batch, f, h, w). Pixels of several channels are the last axis of both."""
    if problem.rank:
        kernel = np.einsum("ku,kv->uv", kernel[:, : problem.kh], kernel[:, problem.kh :], dtype=np.float64)
        problem = replace(problem, rank=0)
    if problem.reduction == "sum":
        kernel, problem = np.full((problem.kh, problem.kw), float(kernel[0])), replace(problem, reduction=None)
    if problem.per_image:
        one = replace(problem, batch=1, per_image=False)
        results = [oracle_filter(one, x[i : i + 1], kernel[i], value, delta) for i in range(problem.batch)]
        return np.concatenate(results)
    if problem.is_volume:
        return _oracle_volumes(problem, x, kernel, value, delta)
    if problem.channels > 1:
        one = replace(problem, channels=1)
        results = [oracle_filter(one, x[..., c], kernel, value, delta) for c in range(problem.channels)]
        return np.stack(results, axis=-1)
    if kernel.ndim == 3:
        return np.stack([oracle_filter(problem, x, each, value, delta) for each in kernel], axis=1)
    (ay, ax), kh, kw = problem.anchor, problem.kh, problem.kw
    widths = ((0, 0), (ay, kh - 1 - ay), (ax, kw - 1 - ax))
    image = x.astype(np.float64)
    if problem.border == "constant":
        padded = np.pad(image, widths, constant_values=value)
    else:
        padded = np.pad(image, widths, mode=_PAD_MODES[problem.border])  # type: ignore[call-overload]
    y = np.full(x.shape, float(delta))
    for u in range(kh):
        for v in range(kw):
            y += float(kernel[u, v]) * padded[:, u : u + x.shape[1], v : v + x.shape[2]]
    return y[:, : problem.out_h, : problem.out_w]


def _oracle_volumes(
    problem: FilterProblem, x: np.ndarray, kernel: np.ndarray, value: float, delta: float
) -> np.ndarray:
    """The sum over the slices of a kernel (kd, kh, kw), or of several, each by `oracle_filter`."""
    if kernel.ndim == 4:
        return np.stack([_oracle_volumes(problem, x, each, value, delta) for each in kernel], axis=1)
    widths = [(0, 0)] * x.ndim
    widths[1] = (problem.anchor_z, problem.kd - 1 - problem.anchor_z)
    if problem.border == "constant":
        padded = np.pad(x.astype(np.float64), widths, constant_values=value)
    else:
        padded = np.pad(x.astype(np.float64), widths, mode=_PAD_MODES[problem.border])  # type: ignore[call-overload]
    one = replace(problem, batch=problem.out_d, d=1, kd=1, anchor_z=0, filters=1)
    y = np.full((problem.batch, *one.y_shape), float(delta))
    for n in range(problem.batch):
        for t in range(problem.kd):
            y[n] += oracle_filter(one, padded[n, t : t + problem.out_d], kernel[t], value)
    return y


def as_result(sums: np.ndarray, dtype: str) -> np.ndarray:
    """Float64 sums as elements of a result; integers are rounded and saturate."""
    if np.dtype(dtype).kind in "iu":
        limits = np.iinfo(dtype)
        sums = np.rint(sums).clip(limits.min, limits.max)
    with np.errstate(over="ignore"):
        return sums.astype(dtype)


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """Frobenius norm of the difference over that of what was expected."""
    return float(np.linalg.norm(got.astype(np.float64) - expected) / max(np.linalg.norm(expected), 1e-30))


def at_address(
    pointer: int, shape: Sequence[int], strides: Sequence[int], dtype: str, alignment: int = ALIGNMENT
) -> np.ndarray:
    """Host memory as an array; strides are in elements."""
    assert pointer % alignment == 0, f"a kernel was given {pointer:#x}, which is not aligned"
    item = item_bytes(dtype)
    count = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    flat = np.frombuffer((ctypes.c_byte * (count * item)).from_address(pointer), dtype)
    return np.lib.stride_tricks.as_strided(flat, shape, [stride * item for stride in strides])


def _dense(shape: Sequence[int]) -> list[int]:
    return [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]


class HostDevice:
    """Plays a GPU whose memory is the host's and whose kernels are the oracles above; all but the kernels is real.

    What a plan prepares is a copy of its filters, and the launches that find something prepared read no others.
    ``launches`` has the stream and the values of each run, by role; ``prepared`` counts those that prepared.
    ``at`` gives the other GPUs of the machine.
    """

    name = "stand-in"
    target = Target("sm_90a", 132)

    def __init__(self, problems: dict[Plan, Problem], index: int = 0) -> None:
        self.problems, self.index = problems, index
        if index:
            self.name = f"stand-in {index}"
        self._machine = {index: self}
        #: the current stream of its callers, as PyTorch and CuPy tell it, and the arrays they know to be used on one
        self.stream = 0x51 if index == 0 else 0x60 + index
        self.used: list[tuple[int, Any]] = []
        self.memory: dict[int, Any] = {}
        self.launches: list[tuple[int, dict[str, float]]] = []
        self.executables = self.prepared = self.allocations = 0
        self.waited: list[int] = []
        #: streams that capture a graph
        self.captures: set[int] = set()

    def at(self, index: int) -> HostDevice:
        """GPU number ``index`` of the same machine."""
        if index not in self._machine:
            self._machine[index] = HostDevice(self.problems, index)
            self._machine[index]._machine = self._machine
        return self._machine[index]

    def capturing(self, stream: int) -> bool:
        return stream in self.captures

    def wait(self, stream: int) -> None:
        assert stream not in self.captures, "a stream that captures cannot be waited for"
        self.waited.append(stream)

    def compiled(self, plan: Plan) -> list[Compiled]:
        return [Compiled(b"", each.symbol, self.target.arch, 96, 0, 0) for each in plan.every_launch]

    def executable(self, plan: Plan, roles: Sequence[str]) -> launch.Executable:
        # a plan may be run in two parts: what prepares, and the rest; the gradient of a bias comes behind a plan
        def belongs(made: Plan) -> bool:
            return plan.launches in (made.launches, made.prepare) or plan.launches[:-1] == made.launches

        made = plan if plan in self.problems else next(filter(belongs, self.problems))
        problem = self.problems[made]
        prepares = bool(made.prepare) and plan.every_launch != made.launches
        computes = plan.every_launch != made.prepare
        self.executables += 1

        def run(stream: int, values: Sequence[float]) -> None:
            given = dict(zip(roles, values, strict=True))
            self.launches.append((stream, dict(given)))
            if isinstance(problem, ConvProblem):
                if prepares:
                    self.prepared += 1
                    nbytes = item_bytes(problem.dtype) * int(np.prod(problem.w_shape))
                    ctypes.memmove(int(given["prepared"]), int(given["w"]), nbytes)
                if not computes:
                    return
                if made.prepare:
                    given["w"] = given["prepared"]
                arrays = {
                    each.role: at_address(int(given[each.role]), each.shape, _dense(each.shape), each.dtype)
                    for each in problem.operands
                }
                x, w, *_, y = arrays.values()
                bias = arrays.get("bias")
                y[...] = oracle_conv(problem, x, w, bias)
                if problem.op == "wgrad" and given["bias"]:
                    images = tuple(axis for axis in range(4) if axis != problem.layout.index("C"))
                    sums = at_address(int(given["bias"]), (problem.k,), (1,), problem.dtype)
                    sums[...] = w.sum(images, dtype=np.float64)
            else:
                wide = problem.w * problem.channels
                shape = (problem.batch * problem.d, problem.h, wide)
                item = item_bytes(problem.dtype)
                x = at_address(int(given["x"]), shape, (problem.x_step, problem.x_pitch, 1), problem.dtype, item)
                results = (
                    problem.batch * problem.filters * problem.out_d,
                    problem.out_h,
                    problem.out_w * problem.channels,
                )
                strides, item = (problem.y_step, problem.y_pitch, 1), item_bytes(problem.result)
                y = at_address(int(given["y"]), results, strides, problem.result, item)
                kernel = at_address(int(given["w"]), problem.w_shape, _dense(problem.w_shape), problem.sums)
                sums = oracle_filter(problem, x.reshape(problem.x_shape), kernel, given["value"], given["delta"])
                y[...] = as_result(sums, problem.result).reshape(results)

        return run

    def allocate(self, nbytes: int) -> int:
        self.allocations += 1
        buffer = (ctypes.c_byte * (nbytes + 64))()
        pointer = -(-ctypes.addressof(buffer) // 64) * 64
        self.memory[pointer] = buffer
        return pointer

    def free(self, pointer: int) -> None:
        del self.memory[pointer]

    def upload(self, pointer: int, array: np.ndarray) -> None:
        ctypes.memmove(pointer, array.ctypes.data, array.nbytes)

    def download(self, array: np.ndarray, pointer: int) -> None:
        ctypes.memmove(array.ctypes.data, pointer, array.nbytes)


@pytest.fixture
def host_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDevice]:
    """Calls with device="cuda", and on `fake_cupy` arrays, run on a HostDevice; the plans are the real algorithms'."""
    problems: dict[Plan, Problem] = {}
    device = HostDevice(problems)

    def recording(plan: Any) -> Any:
        def wrapper(self: GpuAlgorithm, problem: Problem, config: Any, target: Target) -> Plan:
            made: Plan = plan(self, problem, config, target)
            problems[made] = problem
            return made

        return wrapper

    for algorithm in choose.ALGORITHMS:
        monkeypatch.setattr(type(algorithm), "plan", recording(type(algorithm).plan))
    monkeypatch.setattr(launch, "open_device", device.at)
    lookup.forget()
    yield device
    lookup.forget()


class _Devices:
    current = 0


def _make_cupy(host_device: HostDevice) -> types.ModuleType:
    """As much of CuPy as leanconv uses, on host memory; each device has a current stream, which tests may change."""
    module = types.ModuleType("cupy")

    class ndarray:  # noqa: N801 - CuPy's own name
        def __init__(self, host: np.ndarray, device: int) -> None:
            self.host = host
            self.data = types.SimpleNamespace(ptr=host.ctypes.data, device_id=device)

        shape = property(lambda self: self.host.shape)
        strides = property(lambda self: self.host.strides)
        dtype = property(lambda self: self.host.dtype)
        ndim = property(lambda self: self.host.ndim)
        flags = property(lambda self: types.SimpleNamespace(c_contiguous=self.host.flags.c_contiguous))

        def __getitem__(self, index: Any) -> ndarray:
            return ndarray(self.host[index], self.data.device_id)

        def __setitem__(self, index: Any, value: Any) -> None:
            self.host[index] = getattr(value, "host", value)

        def copy(self, order: str = "C") -> ndarray:
            module.copies += 1  # type: ignore[attr-defined]
            return asarray(self.host)

        def astype(self, dtype: Any, order: str = "C") -> ndarray:
            module.copies += 1  # type: ignore[attr-defined]
            return asarray(self.host.astype(dtype))

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            self.before, _Devices.current = _Devices.current, self.index

        def __exit__(self, *exception: object) -> None:
            _Devices.current = self.before

    def empty(shape: Sequence[int], dtype: Any) -> ndarray:
        module.allocations += 1  # type: ignore[attr-defined]
        dtype = np.dtype(dtype)
        raw = np.full(int(np.prod(shape)) * dtype.itemsize + 64, 0xFF, np.uint8)
        start = -raw.ctypes.data % 64
        host = raw[start : start + int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)
        return ndarray(host, _Devices.current)

    def asarray(host: np.ndarray) -> ndarray:
        made = empty(host.shape, host.dtype)
        made.host[...] = host
        return made

    streams: dict[int, Any] = {}

    def current_stream() -> Any:
        index = _Devices.current
        wait = partial(module.waited.append, index)  # type: ignore[attr-defined]
        return streams.setdefault(index, types.SimpleNamespace(ptr=host_device.at(index).stream, synchronize=wait))

    ndarray.__module__ = "cupy"
    module.ndarray, module.empty, module.asarray = ndarray, empty, asarray  # type: ignore[attr-defined]
    module.allocations = module.copies = 0  # type: ignore[attr-defined]
    module.waited = []  # type: ignore[attr-defined]
    module.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        Device=Device,
        runtime=types.SimpleNamespace(getDevice=lambda: _Devices.current),
        get_current_stream=current_stream,
    )
    return module


@pytest.fixture
def fake_cupy(monkeypatch: pytest.MonkeyPatch, host_device: HostDevice) -> Any:
    """A module like CuPy whose arrays lie on the `host_device`."""
    module = _make_cupy(host_device)
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(arrays, "_libraries", {})
    monkeypatch.setattr(arrays, "by_type", {np.ndarray: arrays.NUMPY})
    monkeypatch.setattr(weights, "_kernels", {})
    return module


@pytest.fixture
def torch_on_device(monkeypatch: pytest.MonkeyPatch, host_device: HostDevice) -> Iterator[HostDevice]:
    """PyTorch's CPU tensors lie on the `host_device`: what PyTorch is asked about a GPU is answered for it.

    `on_gpu` lays one on another GPU of the same machine.
    """
    torch = pytest.importorskip("torch")
    library = arrays.TorchArrays
    signature, allocator = library.signature, library.allocator

    def home(self: Any, array: Any) -> int:
        return _HOMES[array.untyped_storage().data_ptr()][0] if _HOMES else 0

    def allocates(self: Any, shape: Any, dtype: str, index: int | None, order: Any = None) -> Any:
        allocate = allocator(self, shape, dtype, index, order)
        return (lambda: on_gpu(index or 0, allocate())) if _HOMES else allocate

    monkeypatch.setattr(arrays, "_libraries", {})
    monkeypatch.setattr(arrays, "by_type", {np.ndarray: arrays.NUMPY})
    monkeypatch.setattr(library, "device", home)
    monkeypatch.setattr(library, "signature", lambda self, array: (signature(self, array), home(self, array)))
    monkeypatch.setattr(library, "allocator", allocates)
    monkeypatch.setattr(library, "_device", lambda self, index: torch.device("cpu"))
    monkeypatch.setattr(library, "from_numpy", lambda self, array, index: torch.from_numpy(array.copy()))
    monkeypatch.setattr(library, "stream", lambda self, index: host_device.at(index).stream)
    monkeypatch.setattr(library, "fast_stream", lambda self, index: lambda: host_device.at(index).stream)
    monkeypatch.setattr(
        library, "in_use", lambda self, array, index: host_device.at(index).used.append((self.stream(index), array))
    )
    _HOMES.clear()
    yield host_device
    _HOMES.clear()


#: by address of their memory, tensors that lie on a certain GPU, and its number; where there are none all lie on 0
_HOMES: dict[int, tuple[int, Any]] = {}


def on_gpu(index: int, tensor: Any) -> Any:
    """The tensor, which from now on lies on a GPU of `torch_on_device`; then every tensor has to be laid on one."""
    _HOMES[tensor.untyped_storage().data_ptr()] = index, tensor
    return tensor


def patch_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`leanconv.torch.enable` patches what runs on the CPU, whose tensors `torch_on_device` lays on its device.

    Autocast of the CPU casts aten::_convolution only without its last argument, TF32.
    """
    from leanconv.torch import functions, registration, switches

    convolution = switches._convolution
    monkeypatch.setattr(registration, "_KEY", "CPU")
    monkeypatch.setattr(functions, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(switches, "_KIND", "cpu")
    monkeypatch.setattr(switches, "_convolution", lambda *given: convolution(*given[:-1]))


__all__ = [
    "HostDevice",
    "_what_is_frozen_stays",
    "oracle_conv",
    "oracle_filter",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "relative_error",
]


def says(kind: type[Exception], *parts: str) -> Any:
    """pytest.raises, with every part in the message, in order."""
    return pytest.raises(kind, match="(?s)" + ".*".join(map(re.escape, parts)))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """``run("cache", "path")`` gives exit code, standard output, standard error."""
    from leanconv.cli.main import main

    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return run


def line_of(error: str) -> str:
    """The one line that a mistake is told in."""
    assert error.startswith("error: ") and error.count("\n") == 1 and "Traceback" not in error, error
    return error.strip()
