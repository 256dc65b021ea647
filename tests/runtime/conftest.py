"""Tests of what lies below `open_device`: a driver that they replace."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from leanconv.runtime import cache, driver, launch
from tests.runtime.fake_driver import FakeDriver, code_of

#: by the numbers of attributes: multiprocessors, capability, shared memory, registers, and clocks
H100 = {16: 132, 75: 9, 76: 0, 81: 233472, 82: 65536, 97: 232448, 13: 1980000, 36: 2619000, 37: 5120}
A100 = {16: 108, 75: 8, 76: 0, 81: 167936, 82: 65536, 97: 166912, 13: 1410000, 36: 1215000, 37: 5120}


@pytest.fixture
def fresh_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Forget the driver and devices met so far, before and after."""
    driver.driver.cache_clear()
    monkeypatch.setattr(launch, "_devices", {})
    yield monkeypatch
    driver.driver.cache_clear()


@pytest.fixture
def gpus(fresh_driver: pytest.MonkeyPatch, some_compiler: None) -> FakeDriver:
    """The driver of a machine with an H100 and an A100; nothing is compiled."""
    fake = FakeDriver(devices=2, attributes={0: H100, 1: A100}, names=("NVIDIA H100", "NVIDIA A100"))
    fake.most_bytes = 1 << 30
    fresh_driver.setattr(driver, "_open_library", lambda: fake)
    fresh_driver.setattr(cache, "compiled", code_of)
    return fake
