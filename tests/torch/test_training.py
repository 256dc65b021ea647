"""examples/train_cnn.py: it trains, alike with every engine and on several processes; and the page made of its rows."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import made_up
from tests.stand_ins import HostDevice

torch = pytest.importorskip("torch")

from leanconv.bench import columns  # noqa: E402
from report import records  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train_cnn.py"


@pytest.fixture(scope="module")
def example() -> Any:
    return runpy.run_path(str(SCRIPT))


def convolutions(net: Any) -> list[Any]:
    return [each for each in net.modules() if isinstance(each, torch.nn.Conv2d)]


def test_the_networks_are_the_papers(example: Any) -> None:
    layers = {name: convolutions(example["network"](name, 32)) for name in example["NETWORKS"]}
    assert {name: len(each) for name, each in layers.items()} == {
        "resnet18": 20, "resnet34": 36, "vgg16": 13, "vgg19": 16, "vgg16x5": 13, "vgg16x7": 13,
    }  # fmt: skip
    assert {each.kernel_size for each in layers["vgg16x5"]} == {(5, 5)}
    assert [each.kernel_size[0] for each in layers["vgg16x7"]] == [7] * 4 + [3] * 9
    for name, size in (("resnet18", 128), ("vgg16x7", 32)):
        assert example["network"](name, size)(torch.zeros(2, 3, size, size)).shape == (2, 10)


def test_engines_train_alike(example: Any, device: HostDevice) -> None:
    images, classes, source = example["digits"](None)
    assert source and len(images) > 1000 and set(classes) == set(range(10)) and 0.2 < images.mean() < 0.8
    given = torch.from_numpy(images), torch.from_numpy(classes)
    rows = [
        example["train"]("tiny", 8, engine, *given, batch=4, optimiser=optimiser, steps=3, warm=1)
        for optimiser in ("adam", "sgdm")
        for engine in ("torch-fp32-nchw", "leanconv", "leanconv")
    ]
    operations = 3 * len(convolutions(example["network"]("tiny", 8))) - 1
    assert device.launches and rows[1]["taken"] > 4 and rows[1]["taken"] + rows[1]["left"] == operations
    for theirs, ours, again in (rows[:3], rows[3:]):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4) and ours["weights"] == again["weights"]
        assert len(set(ours["losses"])) == 4


@pytest.mark.exhaustive
def test_several_processes_train_as_one(tmp_path: Path) -> None:
    """Without BatchNorm, whose statistics on the CPU are each process's own."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import runpy, torch\ntorch.nn.BatchNorm2d = lambda k: torch.nn.Identity()\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    path, rows = tmp_path / "training.json", []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]):
        command = [sys.executable, *launcher, str(script), "tiny", "--size", "8", "--batch", "16", "--steps", "8"]
        command += ["--engine", "leanconv", "--json", str(path)]
        for _ in range(3):
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
            # how PyTorch 2.13's gloo now and then ends a process under load, also one that has nothing of leanconv
            if "terminate called without an active exception" not in done.stderr:
                break
        assert done.returncode == 0, done.stderr
    rows = columns.read(path)["rows"]
    assert [row["gpus"] for row in rows] == [1, 2]
    assert rows[0]["losses"] == pytest.approx(rows[1]["losses"], rel=1e-4)


def test_every_kernel_is_of_a_sort(example: Any) -> None:
    """Ours by the algorithms' names, cuDNN's and PyTorch's by names that a profile of VGG-16 had."""
    named = {
        "filters' gradient": [
            "tensor_weight", "sum_split_k", "sum_image_slots", "sm90_xmma_wgrad_indexed_implicit_gemm_f32f32",
        ],
        "preparing filters": ["validate_filters", "speculative_filters", "gradient_filters", "round_filters"],
        "convolution": ["tensor_winograd", "tensor_gemm", "direct_tiled", "sm90_xmma_dgrad_implicit_gemm_f32f32"],
        "normalisation": ["void cudnn::batchnorm_bwtr_nhwc_semiPersist<float>", "at::native::batch_norm_backward_cuda"],
        "other": ["Memset (Device)", "void at::native::vectorized_elementwise_kernel<4, FillFunctor<float>>"],
    }  # fmt: skip
    assert {sort: [example["sort_of"](name) for name in names] for sort, names in named.items()} == {
        sort: [sort] * len(names) for sort, names in named.items()
    }


def row(engine: str, us: float, **others: Any) -> dict[str, Any]:
    fixed = {"problem": "vgg16-b512-32", "optimiser": "adam", "seed": 0, "gpus": 1, "steps": 30}
    return {**fixed, "engine": engine, "us": us, "peak_bytes": us * 2**10, "loss": 0.5, "losses": [2.0] * 30, **others}


def test_the_page(tmp_path: Path) -> None:
    rows = [row("torch-fp32-nchw", 8e4), row("torch-fp32-nhwc", 6e4, loss=0.25), row("leanconv", 2e4)]
    rows += [row("torch-tf32-nhwc", 1e4), row("leanconv", 3e4, gpus=2, own_statistics=True)]
    rows += [row("leanconv", 2.5e4, gpus=2, problem="vgg16-b1024-32", losses=[2.04] * 29 + [2.06])]
    rows += [row("leanconv", 5e4, problem="vgg16-b1024-32"), row("leanconv", 2e4, seed=1, loss=0.375, repeats=True)]
    rows += [row("torch-fp32-nhwc", 6e4, seed=1, loss=0.75)]
    rows += [row("leanconv-tf32", 8e3, losses=[2.0, 2.1] + [2.0] * 28), row("torch-fp32-nhwc", 9e4, seed=2)]
    rows[2] |= {"scratch_bytes": 2**24, "left": 7}
    records.write(tmp_path, "training", made_up.ABOUT, rows, images="digits")
    page = made_up.filled(tmp_path, "training training")
    assert "NVIDIA X, 2026-11-22, revision abc000000000. Images: digits." in page
    assert (
        "| vgg16-b512-32 | adam | 20.0 | 60.0 | 10.0 | 8.0 | 3.00 | 0.50 | 1.25 | 7 | 20 / 59 | 16 / – | 0.5 / 0.25 |"
        in page
    )


def test_a_step_that_is_pytorchs_has_no_time_of_ours(tmp_path: Path) -> None:
    """Of what `enable` left whole at precision tf32 the first losses are PyTorch's."""
    rows = [row("torch-tf32-nhwc", 1e4), row("torch-fp32-nhwc", 6e4), row("leanconv", 2e4, left=0)]
    rows += [row("leanconv-tf32", 1.1e4, losses=[2.0] * 3 + [2.1] * 27)]
    records.write(tmp_path, "training", made_up.ABOUT, rows, images="digits")
    page = made_up.filled(tmp_path, "training training")
    assert "left every convolution of a step to PyTorch: vgg16-b512-32." in page and "11.0" not in page
    assert "| vgg16-b512-32 | adam | 20.0 | 60.0 | 10.0 | 3.00 | 0.50 | 0 | 20 / 59 |" in page
