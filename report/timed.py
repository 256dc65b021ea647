"""Times of calls beside each other, each on the GPU or on the host that launches it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

#: Rounds in which both sides are timed one after the other, and microseconds of each side in a round.
_ROUNDS, _ROUND_US = 7, 15000.0
#: The same of what is launched by Python: as many rounds as take so many microseconds, within these numbers. Hosts are
#: faster and slower by the second, so samples are short and many, and the quickest one counts. Explored (H200,
#: c66c81e2, 6c7a8148): of 111 single steps of EfficientNet-B0 the quickest of PyTorch's and of the same step timed once
#: more differ by 0.5 %, the medians by 1.1 %; of 31 samples of two steps the quickest differ by 0 to 14 %.
_EAGER_ROUNDS, _EAGER_ROUND_US, _EAGER_US = (9, 111), 6000.0, 3e6


def elapsed_us(call: Callable[[], Any], count: int) -> float:
    """Microseconds of one of ``count`` calls: the GPU's time, or the host's where the GPU waits for it."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / count


def in_turn(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Microseconds of each call, the median of rounds in which all are timed, so that all see the same clocks."""
    counts = {name: max(1, ceil(_ROUND_US / max(elapsed_us(call, 2), 1.0))) for name, call in calls.items()}
    rounds = [{name: elapsed_us(call, counts[name]) for name, call in calls.items()} for _ in range(_ROUNDS)]
    return {name: statistics.median(each[name] for each in rounds) for name in calls}


def captured(call: Callable[[], Any]) -> tuple[Any, Any]:
    """A CUDA graph of ``call``, and what the graph computes when it is replayed. Its memory is the graph's own."""
    import torch

    here, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        call()
    here.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def eager(
    calls: Mapping[str, Callable[[], Any]], patches: Mapping[str, Any], most_us: float = _EAGER_US
) -> dict[str, float]:
    """Microseconds of each call, the least of rounds in which all are timed: those that ``patches`` names each with its
    patch alone, the others without leanconv. All have equally many samples, whose first call is not timed.

    ``most_us``: microseconds of all rounds together."""
    us = {}
    for who, call in calls.items():
        only(patches.get(who))
        for _ in range(3):  # the third is as the ones that are timed
            call()
        us[who] = elapsed_us(call, 2)
    counts = {who: ceil(_EAGER_ROUND_US / each) for who, each in us.items()}
    least, most = _EAGER_ROUNDS
    rounds = min(most, max(least, int(most_us / sum((counts[who] + 1) * us[who] for who in calls))))
    samples: dict[str, list[float]] = {who: [] for who in calls}
    for i in range(rounds):
        for who in list(calls)[:: 1 if i % 2 else -1]:
            only(patches.get(who))
            calls[who]()
            samples[who].append(elapsed_us(calls[who], counts[who]))
    return {who: min(each) for who, each in samples.items()}


def only(patch: Any) -> None:
    """Let this patch decide; None: nothing of leanconv is registered with PyTorch."""
    from leanconv.torch import deciding, registration

    for other in deciding.active[:]:
        registration.remove(other)
    while registration._libraries:  # kept for other threads, of which none computes
        registration._libraries.popitem()[1]._destroy()
    if patch is not None:
        registration.add(patch)
