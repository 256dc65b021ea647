"""`leanconv.torch.enable` and `disable` while other threads run convolutions."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.stand_ins import HostDevice

torch = pytest.importorskip("torch")

import leanconv.torch  # noqa: E402
from leanconv.torch import patch, registration  # noqa: E402


def test_kernels_stay_registered_while_another_thread_lives(device: HostDevice) -> None:
    """It may be on its way to one, which PyTorch would free."""
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        leanconv.torch.enable().disable()
        (key,) = registration._libraries
        assert key == registration._KEY
    finally:
        done.set()
        other.join()


@pytest.mark.parametrize("exclude", [None, lambda problem: True], ids=["taken", "excluded"])
@pytest.mark.parametrize("where", [torch.nn.functional, torch], ids=["function", "dispatcher"])
def test_switching_while_other_threads_compute(device: HostDevice, where: Any, exclude: Any) -> None:
    """Every call has the right numbers, and none is taken that is excluded.

    What torch.nn.functional has is decided before the dispatcher is asked, torch.conv2d by what is registered there.
    """
    x, w = torch.randn(1, 2, 5, 5), torch.randn(2, 2, 3, 3, requires_grad=True)

    def step() -> list[Any]:
        y = where.conv2d(x, w)
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
    assert not failed, failed
    assert bool(device.launches) == (exclude is None)


def test_a_call_under_way_while_it_is_switched_off(device: HostDevice) -> None:
    """What is being decided is left to PyTorch, whatever the selection was."""
    taken = leanconv.torch.enable(exclude=lambda problem: True)
    taken.disable()
    x, w = torch.randn(1, 2, 5, 5), torch.randn(2, 2, 3, 3)
    patch.Patch.convolution(taken, x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert not device.launches and not taken.report().taken
