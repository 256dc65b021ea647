"""The only timer: medians with their quartiles, by CUDA events on a GPU and by the wall clock on a CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

#: Launches shorter than this are timed in batches, so that the events' own cost disappears.
_BATCH_US = 200.0
_MAX_BATCH = 50
#: Work put before a timed region so that the host stays ahead of the GPU is never longer than this.
_MAX_SHIELD_US = 5000.0


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median of ``runs`` samples, and their lower and upper quartiles."""

    median_us: float
    low: float
    high: float
    runs: int


def summarise(samples: Sequence[float]) -> Timing:
    """Median and quartiles of ``samples``, in microseconds. Raises ValueError when there are none."""
    if not samples:
        raise ValueError("samples is empty: there is nothing to take a median of")
    if len(samples) == 1:
        return Timing(samples[0], samples[0], samples[0], 1)
    import statistics  # random, decimal and more: not when leanconv is imported

    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(median, low, high, len(samples))


def time_cpu(
    call: Callable[[], Any],
    *,
    budget_s: float = 0.5,
    min_runs: int = 3,
    max_runs: int = 200,
    warm_up: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time ``call`` by the wall clock, after one warm-up call unless the caller has made one.

    Samples are taken until ``budget_s`` is spent, at least ``min_runs`` and at most ``max_runs``; a sample is one call.
    A call that alone outlasts twice the budget is sampled once.

    >>> time_cpu(lambda: sum(range(1000)), budget_s=0.01).runs >= 3
    True
    """
    if warm_up:
        call()
    samples: list[float] = []
    spent = 0.0
    while len(samples) < max_runs and (len(samples) < min_runs or spent < budget_s):
        start = clock()
        call()
        took = clock() - start
        samples.append(took * 1e6)
        spent += took
        if took > 2 * budget_s:
            break
    return summarise(samples)


def time_in_turn(calls: dict[str, Callable[[], Any]], number: int, sample_s: float) -> dict[str, float]:
    """Microseconds of processor time of each call, the least of ``number`` samples of so many seconds: all calls are
    timed one after the other, again and again, since other work of the machine comes and goes."""

    def sample(call: Callable[[], Any], count: int) -> float:
        begin = time.process_time()
        _repeat(call, count)
        return (time.process_time() - begin) / count * 1e6

    for call in calls.values():
        call()
    counts = {name: max(1, int(sample_s * 1e6 / max(sample(call, 1), 1.0))) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(number):
        for name in list(calls)[:: 1 if i % 2 else -1]:
            samples[name].append(sample(calls[name], counts[name]))
    return {name: round(min(each), 1) for name, each in samples.items()}


def time_gpu(
    call: Callable[[], Any],
    *,
    stream: int = 0,
    cold: bool = False,
    budget_s: float = 0.25,
    min_runs: int = 5,
    max_runs: int = 100,
) -> Timing:
    """Time the GPU work that ``call`` puts on ``stream`` (a CUstream handle; 0 is the default stream).

    The first call is a warm-up: compilation, allocation and handle creation stay outside. Then:

    * With ``cold`` each sample is one call after a buffer of twice the L2 cache has been overwritten, outside the timed
      region, so that inputs come from memory. Use it for memory-bound work on data that would fit the cache.
    * Otherwise a sample is a batch of back-to-back calls when one is short, and one call when it is long.
    * Where the host needs longer to submit a call than the GPU to run it, the same overwriting keeps the GPU busy until
      everything timed is queued. What is reported is GPU time, not Python's.

    Samples are taken until ``budget_s`` seconds are spent, within ``min_runs`` and ``max_runs``. A call that waits for
    the GPU by itself cannot be shielded so, and its waiting is part of its time.
    """
    gpu = _Gpu(stream)
    with gpu.flusher() as flush:
        call()
        gpu.synchronize()
        host_us, estimate_us = _estimate(gpu, call)
        if estimate_us > 1e6 * budget_s:
            min_runs = min(min_runs, 3)
        batch = 1 if cold else max(1, min(_MAX_BATCH, math.ceil(_BATCH_US / estimate_us)))
        flush_us = gpu.elapsed(lambda: _repeat(flush, 4)) / 4
        # A call that takes the GPU much longer than the host hides the submission of the next one.
        shield_us = 1.5 * host_us * (batch + 1) + 20 if host_us > 0.3 * estimate_us else 0.0
        shields = math.ceil(min(shield_us, _MAX_SHIELD_US) / flush_us)
        samples: list[float] = []
        begin = time.perf_counter()
        while len(samples) < max_runs and (len(samples) < min_runs or time.perf_counter() - begin < budget_s):
            _repeat(flush, max(shields, int(cold)))
            if not cold:
                call()  # keeps the GPU busy while the host submits what is timed, and fills the cache after a shield
            samples.append(gpu.elapsed(lambda: _repeat(call, batch)) / batch)
    return summarise(samples)


def time_gpu_sustained(call: Callable[[], Any]) -> float:
    """Microseconds of one call, the mean of 0.15 seconds of calls back to back, after 0.2 seconds of them.

    Tensor cores at work bring a card to its limit of power within some tens of milliseconds; then its clocks drop.
    """
    gpu = _Gpu(0)
    call()
    _, each_us = _estimate(gpu, call)
    _repeat(call, max(1, round(0.2e6 / each_us)))
    count = max(1, round(0.15e6 / each_us))
    return gpu.elapsed(lambda: _repeat(call, count)) / count


def _repeat(call: Callable[[], Any], count: int) -> None:
    for _ in range(count):
        call()


def _estimate(gpu: _Gpu, call: Callable[[], Any]) -> tuple[float, float]:
    """Microseconds that one call takes the host to submit and the GPU to finish, warming both up on the way."""
    count, spent = 1, 0.0
    while True:
        host = 0.0

        def calls(count: int = count) -> None:
            nonlocal host
            start = time.perf_counter()
            _repeat(call, count)
            host = (time.perf_counter() - start) * 1e6

        device = gpu.elapsed(calls)
        spent += device
        if spent > 5000 or count >= 64:
            return host / count, max(device / count, 0.5)
        count *= 4


class _Gpu:
    """Events and memory of the current CUDA context, by the driver's own calls: needs neither PyTorch nor CuPy."""

    def __init__(self, stream: int) -> None:
        from cuda.bindings import driver

        self._driver, self._check = driver, partial(_checked, driver)
        self._check(driver.cuInit(0))
        if not int(self._check(driver.cuCtxGetCurrent())):
            device = self._check(driver.cuDeviceGet(0))
            self._check(driver.cuCtxSetCurrent(self._check(driver.cuDevicePrimaryCtxRetain(device))))
        self._stream = driver.CUstream(stream)
        self._events = [self._check(driver.cuEventCreate(0)) for _ in range(2)]

    def __del__(self) -> None:
        for event in getattr(self, "_events", []):
            self._driver.cuEventDestroy(event)

    def synchronize(self) -> None:
        self._check(self._driver.cuStreamSynchronize(self._stream))

    def elapsed(self, work: Callable[[], Any]) -> float:
        """Microseconds between an event before ``work`` and one after it."""
        begin, end = self._events
        self._check(self._driver.cuEventRecord(begin, self._stream))
        work()
        self._check(self._driver.cuEventRecord(end, self._stream))
        self._check(self._driver.cuEventSynchronize(end))
        return float(self._check(self._driver.cuEventElapsedTime(begin, end))) * 1e3

    def cache_bytes(self) -> int:
        driver = self._driver
        device = self._check(driver.cuCtxGetDevice())
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
        return int(self._check(driver.cuDeviceGetAttribute(attribute, device)))

    @contextmanager
    def flusher(self) -> Iterator[Callable[[], None]]:
        """A function that overwrites twice the L2 cache, with the buffer that it needs."""
        driver = self._driver
        size = 2 * max(self.cache_bytes(), 32 << 20)
        pointer = self._check(driver.cuMemAlloc(size))
        try:
            yield lambda: self._check(driver.cuMemsetD32Async(pointer, 0, size // 4, self._stream))
        finally:
            self.synchronize()
            self._check(driver.cuMemFree(pointer))


class Clock(Protocol):
    """What tuning measures with; a test has one without a GPU."""

    #: bytes of the cache that what is timed has to get past
    cache_bytes: int

    def warm_up(self, call: Callable[[], Any]) -> None:
        """Bring the card to the clocks of a card at work."""

    def sample(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Microseconds of one of ``calls``, which run one after another: their mean."""


#: Seconds of calls that a card is warmed up with.
_WARM_S = 0.3
#: How often a sample is taken again where the host came to a halt between two launches, as it does beside compilations.
_MOST_RETRIES = 4


class GpuClock:
    """A `Clock` on the default stream of a GPU."""

    def __init__(self, gpu: _Gpu, flush: Callable[[], None]) -> None:
        self._gpu, self._flush = gpu, flush
        #: ``flush`` overwrites twice the cache
        self.cache_bytes = gpu.cache_bytes()
        self._flush_us = gpu.elapsed(lambda: _repeat(flush, 8)) / 8
        #: microseconds that the host took to submit a call
        self._host_us = 10.0

    @classmethod
    @contextmanager
    def opened(cls, index: int) -> Iterator[GpuClock]:
        """A clock; the GPU's context is current until the end."""
        from cuda.bindings import driver

        _checked(driver, driver.cuInit(0))
        context = _checked(driver, driver.cuDevicePrimaryCtxRetain(_checked(driver, driver.cuDeviceGet(index))))
        _checked(driver, driver.cuCtxPushCurrent(context))
        try:
            gpu = _Gpu(0)
            with gpu.flusher() as flush:
                yield cls(gpu, flush)
        finally:
            _checked(driver, driver.cuCtxPopCurrent())

    def warm_up(self, call: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        while time.perf_counter() - begin < _WARM_S:
            self._gpu.elapsed(lambda: _repeat(call, 4))

    def sample(self, calls: Sequence[Callable[[], Any]]) -> float:
        """A buffer of twice the cache is overwritten before, until everything timed is queued."""
        host_us = took = 0.0

        def work() -> None:
            nonlocal host_us
            begin = time.perf_counter()
            for call in calls:
                call()
            host_us = (time.perf_counter() - begin) * 1e6

        for _ in range(_MOST_RETRIES):
            shield_us = min(1.5 * self._host_us * len(calls) + 20, _MAX_SHIELD_US)
            _repeat(self._flush, math.ceil(shield_us / self._flush_us))
            took = self._gpu.elapsed(work)
            self._host_us = max(host_us / len(calls), 0.8 * self._host_us)
            if host_us < shield_us + 0.5 * took:
                break
        return took / len(calls)


def _checked(driver: Any, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        raise RuntimeError(f"the CUDA driver says {status.name}: {text.decode() if text else 'no text'}")
    return values[0] if values else None
