"""What a kernel at work draws: time, power and clock while calls follow one another, by the driver's own meters."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

#: Seconds between two readings of a meter.
_PAUSE_S = 0.002
#: Seconds of a chunk of calls; two of them are queued at any time, so that the GPU never waits for the host.
_CHUNK_S = 0.02
#: Share of a window that the first and the last change of the energy counter must lie apart.
_LEAST_SPAN = 0.5

#: Seconds on the host's clock, and what the meter said then.
Reading = tuple[float, float]


class Meter(Protocol):
    """A card's meter: of its energy since some time in joules where ``counts``, else of its power in watts."""

    counts: bool

    def read(self) -> float:
        """What it says now."""

    def clock_mhz(self) -> float:
        """The clock of the multiprocessors now."""


class NvmlMeter:
    """The first GPU's meter, by NVIDIA's management library (the package nvidia-ml-py)."""

    def __init__(self) -> None:
        """Raises whatever the library raises where the driver gives no figures."""
        import pynvml
        import torch

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        self._nvml, self._gpu = pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self.counts = True
        try:
            self.read()
        except pynvml.NVMLError:
            self.counts = False
            self.read()

    def read(self) -> float:
        if self.counts:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu)) * 1e-3
        return float(self._nvml.nvmlDeviceGetPowerUsage(self._gpu)) * 1e-3

    def clock_mhz(self) -> float:
        return float(self._nvml.nvmlDeviceGetClockInfo(self._gpu, self._nvml.NVML_CLOCK_SM))


def open_meter() -> tuple[NvmlMeter | None, str]:
    """The first GPU's meter and what it reads, or None and why there is none."""
    try:
        meter = NvmlMeter()
    except (
        Exception
    ) as error:  # no library, no permission, a driver without meters: times are worth having all the same
        return None, f"none ({type(error).__name__}: {error})"
    return meter, "the driver's energy counter" if meter.counts else "the driver's power samples"


def watts(readings: Sequence[Reading], counts: bool) -> float | None:
    """The mean power over readings that follow one another; None where they say too little.

    An energy counter moves in steps: the power is that between its first and its last step. Power samples are means of
    some time before: those of the second half count.
    """
    if len(readings) < 2:
        return None
    begin, end = readings[0][0], readings[-1][0]
    if not counts:
        late = [value for moment, value in readings if moment >= (begin + end) / 2]
        return sum(late) / len(late)
    steps = [now for before, now in itertools.pairwise(readings) if now[1] != before[1]]
    if len(steps) < 2 or steps[-1][0] - steps[0][0] < _LEAST_SPAN * (end - begin):
        return None
    return (steps[-1][1] - steps[0][1]) / (steps[-1][0] - steps[0][0])


class Watch:
    """Reads a meter from a thread of its own while the block runs."""

    def __init__(self, meter: Meter) -> None:
        self._meter, self._done = meter, threading.Event()
        self.readings: list[Reading] = []
        self.clocks: list[float] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._done.is_set():
            self.readings.append((time.perf_counter(), self._meter.read()))
            if len(self.readings) % 16 == 1:
                self.clocks.append(self._meter.clock_mhz())
            time.sleep(_PAUSE_S)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


@dataclass(frozen=True)
class Work:
    """Microseconds of one call among others, the card's power in watts and clock in MHz meanwhile, where it tells."""

    us: float
    watts: float | None
    mhz: float | None


def at_work(call: Callable[[], Any], meter: Meter | None, *, warm_s: float, run_s: float) -> Work:
    """Run ``call`` without a pause: the figures are those of ``run_s`` seconds after ``warm_s`` seconds of it."""
    import torch

    def event() -> Any:
        return torch.cuda.Event(enable_timing=True)

    def queued(count: int) -> Any:
        for _ in range(count):
            call()
        last = event()
        last.record()
        return last

    call()
    begin = event()
    begin.record()
    end = queued(5)
    end.synchronize()
    each = max(1, round(_CHUNK_S / max(begin.elapsed_time(end) * 1e-3 / 5, 1e-6)))

    def for_seconds(seconds: float, before: Any) -> tuple[Any, int]:
        """The last event, and the calls since the event ``before``."""
        waiting, calls, until = deque([before]), 0, time.perf_counter() + seconds
        while time.perf_counter() < until:
            waiting.append(queued(each))
            calls += each
            if len(waiting) > 2:
                waiting.popleft().synchronize()
        return waiting[-1], calls

    warm, _ = for_seconds(warm_s, end)
    if meter is None:
        last, calls = for_seconds(run_s, warm)
        last.synchronize()
        return Work(warm.elapsed_time(last) * 1e3 / calls, None, None)
    warm.synchronize()
    with Watch(meter) as watch:
        last, calls = for_seconds(run_s, warm)
    last.synchronize()
    mhz = sum(watch.clocks) / len(watch.clocks) if watch.clocks else None
    return Work(warm.elapsed_time(last) * 1e3 / calls, watts(watch.readings, meter.counts), mhz)


def idle(meter: Meter | None, seconds: float) -> float | None:
    """The power of a card that has nothing to do."""
    if meter is None:
        return None
    with Watch(meter) as watch:
        time.sleep(seconds)
    return watts(watch.readings, meter.counts)
