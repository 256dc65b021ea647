"""What tests of PyTorch share: a patched convolution without a GPU."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

from leanconv.call import bind
from leanconv.plan import Plan, Target
from tests import emulator
from tests.stand_ins import HostDevice, at_address, patched_cpu

with suppress(ImportError):
    import torch.utils.checkpoint  # noqa: F401 - older PyTorch leaves it out of `import torch`


@pytest.fixture
def device(torch_on_device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDevice]:
    """`leanconv.torch.enable` takes PyTorch's CPU tensors, and expects PyTorch to be slow."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(3)
    with patched_cpu(monkeypatch):
        yield torch_on_device


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers run on an algorithm that packs filters."""
    choose = bind.choose

    def packs(problem: Any, target: Any, algorithm: str, limit: int | None, kept: str) -> Any:
        return choose(problem, target, "winograd1d" if problem.op == "fprop" else "implicit_gemm", limit, kept)

    monkeypatch.setattr(bind, "choose", packs)


class Played:
    """A GPU for squeeze-and-excite, whose kernels the emulator plays on the host's memory."""

    target = Target("sm_90a", 132)

    def __init__(self) -> None:
        self.launches: list[Any] = []
        self.loaded: list[Any] = []

    def load(self, launch: Any) -> None:
        self.loaded.append(launch)

    def executable(self, plan: Plan, roles: Sequence[str]) -> Any:
        (launch,) = plan.launches
        numbers = dict(launch.problem)
        c, s, pixels = (int(numbers[name]) for name in ("c", "squeezed", "pixels"))
        dtype = {"float": "float32", "leanconv::float16": "float16"}[str(numbers["element"])]
        images = launch.grid // launch.cluster
        sizes = {"x": images * c * pixels, "y": images * c * pixels, "w1": s * c, "w2": s * c, "b1": s, "b2": c}

        def run(stream: int, values: Sequence[int]) -> None:
            self.launches.append(plan)
            given = {
                role: at_address(at, (sizes[role],), (1,), dtype) if at else None
                for role, at in zip(roles, values, strict=True)
            }
            emulator.run_plan(plan, given, orders=("ascending",))

        return run


@pytest.fixture
def played(torch_on_device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> Played:
    """Squeeze-and-excite of PyTorch's CPU tensors runs on it."""
    from leanconv.torch import squeeze

    device = Played()
    monkeypatch.setattr(squeeze, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(squeeze, "launch", types.SimpleNamespace(open_device=lambda index: device))
    return device
