"""What the driver is asked to do: on which GPU, on which stream, in which context, in which order. Without a GPU."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from leanconv import CudaError, OutOfMemoryError, conv2d, filter2d
from leanconv.call import lookup
from leanconv.plan import Launch, Number, Plan, Pointer, TensorMap, in_chain
from leanconv.runtime import launch
from leanconv.runtime.bounded_cache import BoundedCache
from tests.messages import says
from tests.runtime.fake_driver import CONTEXT, DEVICE, FakeDriver, Started

X, Y, PREPARED = Pointer("x"), Pointer("y", written=True), Pointer("prepared", written=True)
#: what calls that have nothing to do with the context do before
ASKS = ("cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2")


def kernel(name: str, *arguments: Any, **more: Any) -> Launch:
    return Launch("f.cuh", f"leanconv::{name}", (), (), arguments or (X, Y), **{"grid": 3, "block": 64, **more})


PLAN = Plan(
    in_chain((kernel("first", X, PREPARED, Number("int", "n", 7)), kernel("second", PREPARED, Y, grid=5, block=96))),
    prepare=(kernel("packs", Pointer("w"), PREPARED),), prepared_bytes=64,
)  # fmt: skip


@pytest.fixture
def device(gpus: FakeDriver) -> launch.CudaDevice:
    opened = launch.open_device(1)
    assert isinstance(opened, launch.CudaDevice)
    return opened


# Which GPU


@pytest.mark.parametrize("index, name, arch", [(0, "NVIDIA H100", "sm_90a"), (1, "NVIDIA A100", "sm_80")])
def test_a_gpu_is_opened_by_its_number(index: int, name: str, arch: str, gpus: FakeDriver) -> None:
    opened: Any = launch.open_device(index)
    assert (opened.index, opened.name, opened.target.model, opened.target.arch) == (index, name, name, arch)
    assert {call.arguments[-1] for call in gpus.named("cuDeviceGetAttribute", "cuDeviceGetName")} == {DEVICE + index}
    (retained,) = gpus.named("cuDevicePrimaryCtxRetain")
    assert retained.arguments[1] == DEVICE + index
    assert launch.open_device(index) is opened and len(gpus.named("cuDevicePrimaryCtxRetain")) == 1
    assert gpus.stack == [], "opening leaves no context behind"


def test_threads_open_a_gpu_once(gpus: FakeDriver) -> None:
    begin, opened = threading.Barrier(8), []

    def work() -> None:
        begin.wait()
        opened.append(launch.open_device(1))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, opened))) == 1 and len(gpus.named("cuDevicePrimaryCtxRetain")) == 1


@pytest.mark.parametrize("where, index", [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_numpy_arrays_go_to_the_gpu_that_is_named(where: Any, index: int, gpus: FakeDriver) -> None:
    lookup.forget()
    x, w = np.ones((2, 4, 6, 6), np.float32), np.ones((8, 4, 3, 3), np.float32)
    for _ in range(2):
        conv2d(x, w, device=where, algorithm="implicit_gemm")
        filter2d(x[0, 0], w[0, 0], device=where)
    lookup.forget()
    assert len(gpus.started) == 4 and {(each.device, each.stream) for each in gpus.started} == {(index, 0)}
    used = gpus.named("cuMemAlloc_v2", "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2", "cuMemFree_v2", "cuModuleLoadData")
    assert {call.device for call in used} == {index} and gpus.memory == {} and gpus.stack == []


# Contexts


@pytest.fixture(params=["none", "its own", "another's"])
def before(request: pytest.FixtureRequest, gpus: FakeDriver, device: launch.CudaDevice) -> Iterator[list[int]]:
    """The contexts that are current before a call."""
    stack = {"none": [], "its own": [CONTEXT + 1], "another's": [CONTEXT]}[request.param]
    gpus.stack[:] = stack
    gpus.calls.clear()
    yield list(stack)
    gpus.stack.clear()


def test_each_call_runs_in_the_gpus_context(before: list[int], gpus: FakeDriver, device: launch.CudaDevice) -> None:
    array = np.arange(3, dtype=np.int16)
    pointer = device.allocate(array.nbytes)
    device.upload(pointer, array)
    device.download(back := np.zeros_like(array), pointer)
    assert back.tolist() == [0, 1, 2] and pointer % 256 == 0
    device.free(pointer)
    assert gpus.memory == {}
    device.capturing(5)
    device.wait(6)
    device.load(kernel("f"))
    done = [call for call in gpus.calls if call.name not in ASKS]
    assert [call.name for call in done] == [
        "cuMemAlloc_v2", "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2", "cuMemFree_v2", "cuStreamIsCapturing",
        "cuStreamSynchronize", "cuThreadExchangeStreamCaptureMode", "cuModuleLoadData",
        "cuThreadExchangeStreamCaptureMode", "cuModuleGetFunction",
    ]  # fmt: skip
    assert {call.device for call in done} == {1}
    assert [call.arguments[-1] for call in done[:4]] == [6, 6, 6, pointer]
    assert done[4].arguments[0] == 5 and done[5].arguments == (6,)
    entered = 0 if before == [CONTEXT + 1] else 7
    assert [len(gpus.named(name)) for name in ASKS[1:]] == [entered, entered] and gpus.stack == before


def test_launches_run_in_the_gpus_context(before: list[int], gpus: FakeDriver, device: launch.CudaDevice) -> None:
    run = device.executable(Plan((kernel("f"),)), ("x", "y"))
    assert gpus.stack == before

    def twice() -> None:
        for at in (16, 32):
            run(0, (at, 64))

    twice()
    assert gpus.stack == before
    # a thread that has not met the device has no context either
    thread = threading.Thread(target=twice)
    thread.start()
    thread.join()
    assert [(each.device, each.values) for each in gpus.started] == [(1, (16, 64)), (1, (32, 64))] * 2
    assert len(gpus.named("cuCtxPushCurrent_v2")) == len(gpus.named("cuCtxPopCurrent_v2"))


def test_a_launch_that_takes_the_context_to_be_current(
    before: list[int], gpus: FakeDriver, device: launch.CudaDevice
) -> None:
    """It asks for none, and where that is another it raises."""
    run = device.executable(Plan((kernel("f"),)), ("x", "y"))
    gpus.calls.clear()
    if gpus.device == 1:
        run(0, (32, 64), True)
    else:
        with pytest.raises(CudaError):
            run(0, (32, 64), True)
    assert [call.name for call in gpus.calls if not call.name.startswith("cuGetError")] == ["cuLaunchKernelEx"]
    run(0, (48, 64))
    assert gpus.stack == before and gpus.started[-1].device == 1


def test_the_context_is_restored_when_a_call_fails(
    before: list[int], gpus: FakeDriver, device: launch.CudaDevice
) -> None:
    gpus.failing = {"cuLaunchKernelEx": 719, "cuStreamSynchronize": 719}
    run = device.executable(Plan((kernel("f", shared_bytes=8),)), ("x", "y"))
    for _ in range(2):  # the first call of a thread takes another way than later ones
        with says(
            CudaError, "launching f (3 blocks of 64 threads, 8 bytes of shared", "CUDA_ERROR_LAUNCH_FAILED (719)"
        ):
            run(0, (16, 32))
    with says(CudaError, "cuStreamSynchronize failed: CUDA_ERROR_LAUNCH_FAILED (719)"):
        device.wait(0)
    gpus.most_bytes = 99
    with says(OutOfMemoryError, "cuda:1 (NVIDIA A100) has no 100 bytes left"):
        device.allocate(100)
    assert gpus.stack == before
    device.free(device.allocate(0))
    assert gpus.named("cuMemAlloc_v2")[-1].arguments[1] == 1, "the driver refuses 0 bytes"


# Launches


@pytest.mark.parametrize(
    "index, version, early", [(0, 13000, True), (0, 12030, False), (1, 13000, False)], ids=["H100", "old", "A100"]
)
def test_launches_start_in_order_on_the_callers_stream(index: int, version: int, early: bool, gpus: FakeDriver) -> None:
    gpus.version = version
    run = launch.open_device(index).executable(PLAN, ("x", "w", "y", "prepared"))
    assert gpus.started == []
    for stream, at in ((0, 16), (0x51, 32), (0x52, 48)):
        gpus.started.clear()
        run(stream, (at, 64, 80, 96))
        assert gpus.started == [
            Started("packs", index, stream, 3, 64, 0, False, (64, 96)),
            Started("first", index, stream, 3, 64, 0, False, (at, 96, 7)),
            Started("second", index, stream, 5, 96, 0, early, (96, 80)),
        ]


def test_maps_are_those_of_the_calls_pointers(device: launch.CudaDevice, gpus: FakeDriver) -> None:
    made = kernel("f", TensorMap("x", "float32", (32, 8), (128,), box=(32, 8)), Y)
    run = device.executable(Plan((made,)), ("x", "y"))
    for values in ((16, 32), (48, 64)):
        run(7, values)
    assert [(each.stream, each.values) for each in gpus.started] == [(7, (16, 32)), (7, (48, 64))]


def test_a_launch_over_no_blocks_is_left_out(device: launch.CudaDevice, gpus: FakeDriver) -> None:
    device.executable(Plan((kernel("f", grid=0), kernel("g"))), ("x", "y"))(0, (16, 32))
    assert [each.symbol for each in gpus.started] == ["g"] and len(gpus.modules) == 1


@pytest.mark.parametrize("cluster, more", [(8, []), (16, [(14, 1)])])
def test_what_a_kernel_may_use_is_only_raised(cluster: int, more: list[Any], gpus: FakeDriver) -> None:
    device: Any = launch.open_device(0)
    for kilobytes in (48, 100, 64, 100, 101):
        device.load(kernel("f", shared_bytes=kilobytes << 10, cluster=cluster))
    assert len(gpus.modules) == 1
    # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES and CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    told = [call.arguments[1:] for call in gpus.named("cuFuncSetAttribute")]
    assert told == [*more, (8, 100 << 10), (8, 101 << 10)]


# Graphs


def test_only_a_stream_is_asked_whether_it_captures(
    before: list[int], gpus: FakeDriver, device: launch.CudaDevice
) -> None:
    def asked(run: launch.Executable, *streams: int) -> list[int]:
        gpus.calls.clear()
        for stream in streams:
            run(stream, (16, 32))
        return [call.arguments[0] for call in gpus.named("cuStreamIsCapturing")]

    gpus.captures = {7}
    plan, roles = Plan((kernel("f"),)), ("x", "y")
    assert asked(device.executable(plan, roles), 0, 5, 7, 7, 5) == [5, 7], "once captured, kernels are kept for good"
    assert [device.capturing(stream) for stream in (5, 7)] == [False, True]
    # a thread's first launch may be the one that is captured
    run = device.executable(plan, roles)
    thread = threading.Thread(target=asked, args=(run, 7))
    thread.start()
    thread.join()
    assert len(gpus.named("cuStreamIsCapturing")) == 1 and asked(run, 5) == []


def test_kernels_are_unloaded_on_their_gpu_unless_a_graph_has_captured_them(
    gpus: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = [launch.open_device(index) for index in (0, 1)]
    gpus.captures = {7}
    for each in opened:
        monkeypatch.setattr(each._kernels, "_kept", BoundedCache(1))
        for name, stream in (("captured", 7), ("used", 5), ("next", 5), ("last", 5)):
            each.executable(Plan((kernel(name),)), ("x", "y"))(stream, (16, 32))
    for each in opened:
        each.load(kernel("another"))
    relaxed = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, so that captures of other threads stay valid
    assert sorted(gpus.unloaded)[-2:] == [("used", 0, relaxed), ("used", 1, relaxed)]
    assert {name for name, *_ in gpus.unloaded} <= {"used", "next", "last"} and gpus.stack == []
    modes = [
        call.name for call in gpus.named("cuThreadExchangeStreamCaptureMode", "cuModuleUnload", "cuModuleLoadData")
    ]
    assert modes[::3] == modes[2::3] == ["cuThreadExchangeStreamCaptureMode"] * (len(modes) // 3)
    assert Counter(modes[1::3]) == {"cuModuleUnload": len(gpus.unloaded), "cuModuleLoadData": 10}
    assert gpus.mode == 0, "as it was before"
