"""`leanconv.torch.enable` and `disable` while other threads run convolutions."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.stand_ins import HostDevice

torch = pytest.importorskip("torch")

import leanconv.torch  # noqa: E402
from leanconv.torch import patch  # noqa: E402


@pytest.mark.parametrize("exclude", [None, lambda problem: True], ids=["taken", "excluded"])
def test_switching_while_other_threads_compute(device: HostDevice, exclude: Any) -> None:
    """Every call has the right numbers, and none is taken that is excluded."""
    x, w = torch.randn(1, 2, 5, 5), torch.randn(2, 2, 3, 3, requires_grad=True)

    def step() -> list[Any]:
        y = torch.nn.functional.conv2d(x, w)
        return [y, *torch.autograd.grad(y.sum(), w)]

    expected, done, failed = step(), threading.Event(), []

    def work() -> None:
        try:
            while not done.is_set():
                for one, other in zip(step(), expected, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(150):
            with leanconv.torch.enable(exclude=exclude):
                step()
            if failed:
                break
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not failed and bool(device.launches) == (exclude is None)


def test_a_call_under_way_while_it_is_switched_off(device: HostDevice) -> None:
    """What is being decided is left to PyTorch, whatever the selection was."""
    taken = leanconv.torch.enable(exclude=lambda problem: True)
    taken.disable()
    x, w = torch.randn(1, 2, 5, 5), torch.randn(2, 2, 3, 3)
    patch.Patch.convolution(taken, x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert not device.launches and not taken.report().taken
