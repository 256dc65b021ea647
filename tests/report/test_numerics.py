"""The errors of the kernels of Im2col-Winograd, as docs/numerics.md publishes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from leanconv.cpu import CPU_ALGORITHMS, oracle
from leanconv.kernels.simt.winograd1d import Winograd1d
from leanconv.kernels.winograd_matrices import segments
from report import numerics
from report.__main__ import main
from tests import made_up
from tests.conftest import HostDevice

GOAL = 3e-5


@pytest.mark.parametrize(("alpha", "width"), numerics.KERNELS)
def test_layers_of_kernels_need_no_other_kernel(alpha: int, width: int) -> None:
    problem = numerics.kernel_layer(alpha, width, 64)
    assert (problem.p, problem.k, problem.c, problem.r) == (16, 32, 64, width)
    cut = segments(problem.q, width, (16, 8, 4) if alpha == 16 else (8, 4))
    assert [segment.alpha for segment in cut] == [alpha]


def test_errors_of_kernels_keep_their_precision_and_stand_on_the_page() -> None:
    entries = numerics.measure_kernels(channels=(32,), gpu=False)
    assert len(entries) == len(numerics.KERNELS) * len(numerics.KERNEL_DATA)
    for entry in entries:
        assert entry.error <= (GOAL if entry.precision == "relaxed" else 4 * entry.sequential), entry
        assert (entry.precision == "relaxed") == entry.problem.startswith("Γ16")
    page = numerics.section(numerics.record("the CPU", entries))
    for words in ("zero-mean data", "data in [1, 2]"):
        assert f"### Kernels of Im2col-Winograd, {words}\n" in page
    assert page.count("| Γ8(6,3), 32 channels |") == page.count("| Γ16(8,9), 32 channels |") == 2
    assert "### Layers" not in page


def test_on_a_gpu_the_plain_kernel_stands_beside(host_device: HostDevice) -> None:
    entries = numerics.measure_kernels(kernels=((8, 3), (16, 9)), channels=(4,), gpu=True)
    ours = {(e.algorithm, e.precision) for e in entries if e.where == "GPU" and e.problem.startswith("Γ16")}
    assert ("implicit_gemm", "ieee") in ours
    table = numerics.kernel_table([e for e in entries if e.data == "zero-mean"])
    assert "`winograd1d` CPU" in table and "`implicit_gemm` GPU" in table and "Γ16(8,9), 4 channels" in table


def test_another_kernel_of_the_family_stands_under_its_own_name_only(
    host_device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numerics, "_kernel_algorithms", lambda problem: [Winograd1d()])
    monkeypatch.setattr(
        numerics, "_on_gpu", lambda plan, problem: lambda x, w: oracle.conv2d(problem, x, w).astype(np.float32)
    )
    layers = {8: numerics.kernel_layer(8, 3, 16), 2: numerics.kernel_layer(8, 2, 64)}
    seen = []
    monkeypatch.setattr(
        Winograd1d, "plan", lambda self, problem, config, target, plan=Winograd1d.plan: (
            seen.append(config.states), plan(self, problem, config, target)
        )[1],
    )  # fmt: skip
    monkeypatch.setattr(numerics, "kernel_layer", lambda alpha, *_: layers[8])
    for alpha in (4, 8):
        found = numerics.measure_kernels(((alpha, 3),), (16,), gpu=True)
        assert {e.where for e in found} == {"CPU", "GPU"} and set(seen) == {alpha}
        seen.clear()
    # 8 states do not serve filters 2 wide in this precision, and 4 states shall not stand for them
    monkeypatch.setattr(numerics, "kernel_layer", lambda *_: layers[2])
    assert {e.where for e in numerics.measure_kernels(((8, 2),), (64,), gpu=True)} == {"CPU"} and not seen


def test_the_command_writes_the_record_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = numerics.measure_kernels(kernels=((4, 2),), channels=(4,), gpu=False)
    monkeypatch.setattr(numerics, "why_no_gpu", lambda: "none")
    monkeypatch.setattr(numerics, "measured", lambda gpu: [])
    monkeypatch.setattr(numerics, "measure_kernels", lambda gpu: entries)
    with pytest.raises(SystemExit) as stopped:
        main(["numerics", "--results", str(tmp_path), "--revision", "abc" + 37 * "0"])
    assert not stopped.value.code and "numerics.json" in capsys.readouterr().out
    text = made_up.filled(tmp_path, "numerics numerics")
    assert "## Measured on the CPU" in text and "revision abc" in text and "Γ4(3,2), 4 channels" in text


def test_numerics_page_has_every_algorithm_and_its_bound_holds() -> None:
    entries = numerics.measured(layers=((3, 20), (3, 1)), filters=(5,), gpu=False)
    for entry in entries:
        assert entry.error <= 4 * max(entry.sequential, 2**-24), entry
    for algorithm in CPU_ALGORITHMS:
        assert {e.data for e in entries if e.algorithm == algorithm.name} == {"zero-mean", "positive"}, algorithm.name
    page = numerics.section(numerics.record("the CPU", entries))
    assert "layer 3×3×20" in page and "filter 5×5" in page
    assert all(f"`{algorithm.name}` CPU" in page for algorithm in CPU_ALGORITHMS)
