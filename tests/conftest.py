"""What all tests share: a cache folder of their own, fixtures of stand-ins, and the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from leanconv import arrays
from leanconv.bench import run as bench_run
from leanconv.bench.ceilings import measure_cpu
from leanconv.call import choose, lookup, weights
from leanconv.kernels.common import split_gemm as tensor_filters
from leanconv.kernels.contract import GpuAlgorithm
from leanconv.plan import Plan, Target
from leanconv.problem import Problem
from leanconv.runtime import cache as disk_cache
from leanconv.runtime import launch
from tests.collection import (
    _what_is_frozen_stays,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_sessionstart,
)
from tests.stand_ins import HOMES, HostDevice, make_cupy, on_gpu


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


@pytest.fixture
def fake_cupy(monkeypatch: pytest.MonkeyPatch, host_device: HostDevice) -> Any:
    """A module like CuPy whose arrays lie on the `host_device`."""
    module = make_cupy(host_device)
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
        return HOMES[array.untyped_storage().data_ptr()][0] if HOMES else 0

    def allocates(self: Any, shape: Any, dtype: str, index: int | None, order: Any = None) -> Any:
        allocate = allocator(self, shape, dtype, index, order)
        return (lambda: on_gpu(index or 0, allocate())) if HOMES else allocate

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
    # PyTorch for CUDA raises where there is no driver
    from leanconv.torch import quick

    monkeypatch.setattr(quick, "_current_device", lambda: 0)
    HOMES.clear()
    yield host_device
    HOMES.clear()


__all__ = [
    "_what_is_frozen_stays",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_sessionstart",
]


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
