"""The study of the bank width: its kernel on the emulator, every way in every type; its tables."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (NumPy's bfloat16)
import numpy as np
import pytest

from leanconv.dtypes import DTYPES
from report import records
from research import bank_width as study
from research import pages
from research.studies import KERNELS
from tests import emulator
from tests.kernels.patching import Patch, patched
from tests.made_up import ABOUT, filled

EVERY = [(d, e, config) for d in study.DTYPES_TAKEN for e in study.FILTERS for config in study.configs(d)]
#: Every way in every type, the extents by turns.
SOME = [
    (dtype, study.FILTERS[(turn + way) % 3], config)
    for turn, dtype in enumerate(study.DTYPES_TAKEN)
    for way, config in enumerate(study.configs(dtype))
]


def filtered(
    dtype: str, extent: int, config: Any, height: int = 13, kernels: Path = KERNELS
) -> tuple[np.ndarray, np.ndarray]:
    """The kernel's result and the right one, on two strips and three bands, the last of them lower."""
    small = replace(config, tile=32 * config.pixels, rows=5)
    rng, shape = np.random.default_rng(1), (height, 128)
    integer = dtype == "uint8"
    x = rng.integers(0, 256, shape, np.uint8) if integer else rng.uniform(-1, 1, shape).astype(dtype)
    w = study.draw_filter(dtype, extent)
    y = np.full(x.shape, 77, x.dtype)
    launch = study.study_launch(dtype, extent, small, height, 128)
    emulator.run_launch(replace(launch, header=str(kernels / "bank_width.cuh")), {"x": x, "w": w, "y": y})
    return y, study.expected(x, w)


def right(dtype: str, y: np.ndarray, wanted: np.ndarray) -> bool:
    most = 0.0 if dtype == "uint8" else 4 * DTYPES[dtype].roundoff
    return bool(np.abs(y.astype(np.float64) - wanted).max() <= most)


@pytest.mark.parametrize(("dtype", "extent", "config"), SOME, ids=lambda v: str(getattr(v, "name", v)))
def test_every_way_is_right(dtype: str, extent: int, config: Any) -> None:
    y, wanted = filtered(dtype, extent, config)
    assert right(dtype, y, wanted)


def test_every_way_is_among_those_that_are_tried() -> None:
    assert {(d, config) for d, _, config in SOME} == {(d, config) for d, _, config in EVERY}
    assert {(d, e) for d, e, _ in SOME} == {(d, e) for d, e, _ in EVERY}


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ("{{__syncthreads();}}", False),
        ("threadIdx.x < _ {{+ _}} &&", True),
        ("(_ {{+ 1}} + _) % _", True),
        ("_ < _ {{&& _ + _ < _}}", False),
        ("% {{(}} _ {{+ 1)}}", False),
    ],
    ids=["barrier", "halo", "window", "height", "slots"],
)
def test_kernels_broken_on_purpose_are_caught(change: str, kept: bool, tmp_path: Path) -> None:
    path = KERNELS / "bank_width.cuh"
    (text,) = patched(Patch("a break", "bank_width", change), {path: path.read_text("utf-8")}).values()
    (tmp_path / path.name).write_text(text, "utf-8")
    try:
        y, wanted = filtered("float16", 3, study.BankConfig(2, 2, kept), kernels=tmp_path)
    except emulator.EmulatorError:
        return
    assert not right("float16", y, wanted)


def test_the_model_counts_accesses() -> None:
    one, four = study.BankConfig(1, 1, False), study.BankConfig(4, 4, False)
    assert study.accesses(3, one) == 9 and study.accesses(3, four) == 3 * 2 / 4
    assert study.accesses(5, study.BankConfig(2, 2, True)) == 3 / 2
    assert [study.matched(d) for d in study.DTYPES_TAKEN] == [1, 2, 2, 4]
    with pytest.raises(ValueError, match="width=100 is not a multiple of tile=256"):
        study.study_launch("uint8", 3, one, 10, 100)


def a_file(folder: Path) -> None:
    """Results in which n neighbours take a fourth less time than one, dp4a half, and small images nothing more."""
    rows = []
    for dtype, extent, config in EVERY:
        for size in (2048, 8192):
            us = (50 if config.dot else 100 if config.unit == 1 else 75) * (size / 2048) ** 2
            about = {"name": config.name, "registers": 40, "spill_bytes": 0, "us": us}
            rows.append({"dtype": dtype, "extent": extent, "size": size, **asdict(config), **about})
    records.write(folder, "bank-width", ABOUT, rows)


def test_the_page_has_a_line_for_each_type_and_filter(tmp_path: Path) -> None:
    a_file(tmp_path)
    text = filled(tmp_path, "banks-figure bank-width", "banks bank-width", by=pages)
    assert "NVIDIA X, 2026-11-22, revision abc000000000. An image of 8192² pixels; the matched n in bold." in text
    assert text.count("| uint8, 7×7 | 1.33 | **1.33** | 1.33 | 2.00 |") == 2
    assert text.count("| float16, 3×3 | **1.33** | 1.33 | 1.33 | – |") == 2
    assert text.count("| float32, 5×5 | 1.33 | 1.33 | – | – |") == 2
    assert text.count("| uint8, 5×5 | 4 | 42 | 56 | 56 |") == 2 and text.count("| – | 42 | 56 | 84 |") == 6
    assert text.count("| float32, 3×3 | 1 | 42 | 56 | 56 | – |") == 2
    assert (tmp_path / "nvidia-x-bank-width-banks.png").stat().st_size > 10000
    assert "](nvidia-x-bank-width-banks.png)" in text
