"""What tests of PyTorch share: a patched convolution without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stand_ins import HostDevice, patch_the_cpu


@pytest.fixture
def device(torch_on_device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDevice]:
    """`leanconv.torch.enable` takes PyTorch's CPU tensors, and expects PyTorch to be slow."""
    torch = pytest.importorskip("torch")
    import leanconv.torch
    from leanconv.torch import patch, registration

    patch_the_cpu(monkeypatch)
    monkeypatch.setattr(registration, "_libraries", {})
    monkeypatch.setattr(patch, "pytorch_cycles", lambda problem, target, tf32: 1e12)
    torch.manual_seed(3)
    yield torch_on_device
    leanconv.torch.disable()
    for library in registration._libraries.values():
        library._destroy()  # no other thread is left
