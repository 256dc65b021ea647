"""Launches that start while the one before them still runs: how the driver is asked, and that they wait first."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from leanconv.plan import Launch, Pointer, in_chain
from leanconv.runtime import launch
from leanconv.runtime.compile import source


def test_launches_that_start_early() -> None:
    first, second = in_chain(Launch("f.cuh", name, (), (), (Pointer("y", written=True),), 3, 64, 5) for name in "fg")
    assert (first.early, first.opens, second.early, second.opens) == (False, True, True, False)
    begun: list[Any] = []

    def start_early(config: Any, function: Any, parameters: Any, extra: None) -> int:
        # CUlaunchConfig; CUlaunchAttribute: a number, and behind eight bytes an int
        sizes, place = (ctypes.c_uint * 7).from_address(config.value), config.value + 32
        stream, attributes = (ctypes.c_uint64 * 2).from_address(place)
        count = ctypes.c_uint.from_address(place + 16).value
        number, _, value = (ctypes.c_int * 3).from_address(attributes)
        begun.append((function.value, list(sizes), stream, count, number, value))
        address = ctypes.c_uint64.from_address(parameters.value).value
        begun.append(ctypes.c_uint64.from_address(address).value)
        return 0

    def start(function: Any, *rest: Any) -> int:
        begun.append((function.value, rest[7].value))
        return 0

    run = launch.make_launcher(start, pytest.fail, [(1, first), (2, second)], ("y",), start_early)
    run(0x51, (32,))
    run(0x52, (48,))
    sizes = [3, 1, 1, 64, 1, 1, 5]
    assert begun == [(1, 0x51), (2, sizes, 0x51, 1, 6, 1), 32, (1, 0x52), (2, sizes, 0x52, 1, 6, 1), 48]


def test_an_early_launch_waits_before_anything_else() -> None:
    first, second = (
        source(each) for each in in_chain(Launch("f.cuh", "leanconv::f", (), (), (), 1, 32) for _ in range(2))
    )
    body = second[second.index("f(") :]
    assert "griddepcontrol.wait" in body and body.index("griddepcontrol.wait") < body.index("leanconv::f")
    assert "griddepcontrol.wait" not in first and "griddepcontrol.launch_dependents" in first
    waiting = Launch("f.cuh", "leanconv::f", (), (), (), 1, 32, early=True, waits=True)
    assert "griddepcontrol.wait" not in source(waiting)
