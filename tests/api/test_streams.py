"""On which GPU and on which stream a call runs, without a GPU: the arrays' GPU, and its caller's current stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from leanconv import conv2d, conv2d_weight, explain, filter2d, prepare_weights
from tests.operations import BASE, TOLERANCE, conv_arrays
from tests.oracles import oracle_conv, relative_error
from tests.stand_ins import HostDevice, on_gpu

torch = pytest.importorskip("torch")

X, W, _ = conv_arrays(np.random.default_rng(3), BASE)
EXPECTED = oracle_conv(BASE, X, W, None)


class Library:
    """An array library on a machine with several GPUs."""

    def __init__(self, name: str, request: pytest.FixtureRequest) -> None:
        self.name = name
        self.module = request.getfixturevalue("torch_on_device" if name == "PyTorch" else "fake_cupy")
        self.gpu: HostDevice = request.getfixturevalue("host_device")

    def lay(self, index: int, array: np.ndarray) -> Any:
        if self.name == "PyTorch":
            return on_gpu(index, torch.from_numpy(array.copy()))
        with self.module.cuda.Device(index):
            return self.module.asarray(array)

    def set_stream(self, index: int, stream: int) -> None:
        """The current stream of a GPU."""
        self.gpu.at(index).stream = stream
        if self.name == "CuPy":
            with self.module.cuda.Device(index):
                self.module.cuda.get_current_stream().ptr = stream

    def home(self, array: Any) -> int:
        from leanconv.arrays import arrays_of

        found = arrays_of(array)
        assert found is not None
        return found.device(array) or 0

    def values(self, array: Any) -> np.ndarray:
        return array.host if self.name == "CuPy" else array.numpy()  # type: ignore[no-any-return]


@pytest.fixture(params=["PyTorch", "CuPy"])
def library(request: pytest.FixtureRequest) -> Library:
    return Library(request.param, request)


def streams(gpu: HostDevice) -> list[int]:
    """Those of the launches since the last question."""
    found = [stream for stream, _ in gpu.launches]
    gpu.launches.clear()
    return found


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "conv2d": lambda x, w: conv2d(x, w),
    "algorithm": lambda x, w: conv2d(x, w, algorithm="winograd1d"),
    "conv2d_weight": lambda x, w: conv2d_weight(x, conv2d(x, w), BASE.w_shape),
    "filter2d": lambda x, w: filter2d(x[0, 0], w[0, 0]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_runs_on_its_arrays_gpu_and_current_stream(name: str, library: Library) -> None:
    given = {index: (library.lay(index, X), library.lay(index, W)) for index in (0, 1, 2)}
    call = CALLS[name]
    for index in (1, 0, 1, 2, 0):  # of equal shapes: a warm call of one GPU is not one of another
        for stream in (0x100 + index, 0x200, 0):
            library.set_stream(index, stream)
            y = call(*given[index])
            assert library.home(y) == index
            launched = {at: streams(library.gpu.at(at)) for at in given}
            assert set(launched.pop(index)) == {stream} and not any(launched.values()), (index, stream)
    if name == "conv2d":
        assert relative_error(library.values(y), EXPECTED) < TOLERANCE


def test_what_cannot_be_read_in_place_is_copied_on_its_gpu(library: Library) -> None:
    x, w = library.lay(1, np.ascontiguousarray(X.transpose(0, 1, 3, 2))), library.lay(1, W)
    if library.name == "CuPy":
        x.host = x.host.transpose(0, 1, 3, 2)
        copied: list[int] = []
        plain = type(x).copy
        type(x).copy = lambda self, order="C": copied.append(library.home(made := plain(self, order))) or made
    else:
        x = x.transpose(2, 3)
    for _ in range(2):
        y = conv2d(x, w)
        assert library.home(y) == 1 and relative_error(library.values(y), EXPECTED) < TOLERANCE
    out = library.lay(1, np.zeros((*EXPECTED.shape[:3], 2 * EXPECTED.shape[3]), np.float32))[..., ::2]
    assert conv2d(x, w, out=out) is out and relative_error(library.values(out), EXPECTED) < TOLERANCE
    assert streams(library.gpu.at(1)) == [library.gpu.at(1).stream] * 3 and library.gpu.launches == []
    if library.name == "CuPy":
        assert copied == [1, 1, 1]


def test_packed_weights_are_made_on_their_gpu(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    from leanconv.arrays import arrays_of

    told: list[tuple[int, int]] = []
    given = {index: (library.lay(index, X), prepare_weights(library.lay(index, W))) for index in (0, 1)}
    found: Any = arrays_of(given[0][0])
    monkeypatch.setattr(
        type(found), "in_use", lambda self, array, index: told.append((library.home(array), self.stream(index)))
    )
    for index, stream in ((1, 5), (1, 6), (0, 7), (1, 6), (0, 8)):
        library.set_stream(index, stream)
        y = conv2d(*given[index], algorithm="winograd1d")
        assert library.home(y) == index and relative_error(library.values(y), EXPECTED) < TOLERANCE
    gpus = [library.gpu.at(index) for index in (0, 1)]
    # what prepares, and the layer: the preparation waits for its stream, so that every other may read
    assert [streams(gpu) for gpu in gpus] == [[7, 7, 8], [5, 5, 6, 6]]
    assert [(gpu.prepared, gpu.waited) for gpu in gpus] == [(1, [7]), (1, [5])]
    assert told == [(1, 6), (0, 8)], "the allocator knows each further stream that reads what is kept"


@pytest.mark.parametrize("index", [0, 1])
def test_numpy_arrays_run_on_the_gpu_that_is_named(index: int, host_device: HostDevice) -> None:
    for _ in range(2):
        assert relative_error(conv2d(X, W, device=f"cuda:{index}"), EXPECTED) < TOLERANCE
    assert streams(host_device.at(index)) == [0, 0] and host_device.at(1 - index).launches == []
    assert host_device.at(index).allocations == 6 and host_device.at(1 - index).allocations == 0
    where = explain(conv2d, X, W, device=f"cuda:{index}").where
    assert where.startswith(f"cuda:{index} ({host_device.at(index).name},")


def test_a_kernel_of_numpy_waits_on_its_images_gpu(fake_cupy: Any, host_device: HostDevice) -> None:
    for index in (1, 0):
        with fake_cupy.cuda.Device(index):
            image = fake_cupy.asarray(X[0, 0])
        for _ in range(2):
            filter2d(image, W[0, 0])
        assert streams(host_device.at(index)) == [host_device.at(index).stream] * 2
    assert fake_cupy.waited == [1, 0], "copied once for each GPU, perhaps on another stream than that of a later call"


def test_autograd_and_packing_stay_on_the_callers_stream(torch_on_device: HostDevice) -> None:
    import leanconv.torch as lt

    x, w = torch.from_numpy(X).requires_grad_(), torch.from_numpy(W).requires_grad_()
    for stream in (0x70, 0x71):
        torch_on_device.stream = stream
        lt.conv2d(x, w, padding=1).sum().backward()
        found = streams(torch_on_device)
        assert len(found) == 3 and set(found) == {stream}
