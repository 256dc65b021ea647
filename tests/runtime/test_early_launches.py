"""Launches that start while the one before them still runs: how the driver is asked, and that they wait first."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from leanconv.plan import Launch, Pointer, in_chain
from leanconv.runtime import launch
from leanconv.runtime.compile import source
from tests.runtime.fake_driver import launch_config


def test_launches_that_start_early() -> None:
    first, second = in_chain(Launch("f.cuh", name, (), (), (Pointer("y", written=True),), 3, 64, 5) for name in "fg")
    assert (first.early, first.opens, second.early, second.opens) == (False, True, True, False)
    begun: list[Any] = []

    def start(config: Any, function: Any, parameters: Any, extra: None) -> int:
        address = ctypes.c_uint64.from_address(parameters.value).value
        sizes, *more = launch_config(config.value)
        assert sizes == [3, 1, 1, 64, 1, 1, 5]
        begun.append((function.value, *more, ctypes.c_uint64.from_address(address).value))
        return 0

    for early in False, True:
        run = launch.make_launcher(start, pytest.fail, [(1, first), (2, second)], ("y",), early)
        run(0x51, (32,))
        run(0x52, (48,))
        assert begun == [(1, 0x51, False, 32), (2, 0x51, early, 32), (1, 0x52, False, 48), (2, 0x52, early, 48)]
        begun.clear()


def test_an_early_launch_waits_before_anything_else() -> None:
    first, second = (
        source(each) for each in in_chain(Launch("f.cuh", "leanconv::f", (), (), (), 1, 32) for _ in range(2))
    )
    body = second[second.index("f(") :]
    assert "griddepcontrol.wait" in body and body.index("griddepcontrol.wait") < body.index("leanconv::f")
    assert "griddepcontrol.wait" not in first and "griddepcontrol.launch_dependents" in first
    waiting = Launch("f.cuh", "leanconv::f", (), (), (), 1, 32, early=True, waits=True)
    assert "griddepcontrol.wait" not in source(waiting)
