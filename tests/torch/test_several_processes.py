"""Two processes that train together: DistributedDataParallel, and FSDP with sharded parameters, give one's results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
distributed = pytest.importorskip("torch.distributed")
ROOT = Path(__file__).resolve().parents[2]

#: One step of SGD on half of the images, side by side with one process that has all of them.
PROCESS = """
import sys
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
import leanconv.torch as ours

rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

def made():
    torch.manual_seed(0)
    layers = ours.Conv2d(3, 6, 3, padding=1), nn.ReLU(), ours.ConvTranspose2d(6, 4, 3, stride=2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(4 * 13 * 13, 2))

def step(model, x):
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(x).square().mean()
    loss.backward()
    optimiser.step()
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]

x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))
expected = step(made(), x)
mesh = distributed.device_mesh.init_device_mesh("cpu", (2,))

def sharded():
    model = made()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)

for model in (nn.parallel.DistributedDataParallel(made()), sharded()):
    found = step(model, x[2 * rank : 2 * rank + 2])
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)
    print("the same")
distributed.destroy_process_group()
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not distributed.is_available(), reason="this PyTorch has no torch.distributed")
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip("fully_shard came with PyTorch 2.6")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(rank), str(tmp_path / "store")],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    told = [process.communicate(timeout=300) for process in processes]
    assert [out.split("\n")[:2] for out, _ in told] == [["the same"] * 2] * 2, told
