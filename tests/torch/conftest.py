"""What tests of PyTorch share: a patched convolution without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.stand_ins import HostDevice, patched_cpu

with suppress(ImportError):
    import torch.utils.checkpoint  # noqa: F401 - older PyTorch leaves it out of `import torch`


@pytest.fixture
def device(torch_on_device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDevice]:
    """`leanconv.torch.enable` takes PyTorch's CPU tensors, and expects PyTorch to be slow."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(3)
    with patched_cpu(monkeypatch):
        yield torch_on_device
