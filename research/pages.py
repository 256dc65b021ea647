"""The blocks of the documents that hold what studies have found, those ``made by research:``; see report/pages.py."""

from __future__ import annotations

from functools import partial

from report import pages, records
from report.pages import on_a_gpu
from research import ablation_pages, bank_width, batches, design_space, precision, tensor_ablation

_ABLATION, _PARTS = "python -m research ablation {}", "python -m research tensor-ablation"
#: What studies have found stays as it was then: pages say when that was.
Maker = partial(pages.Maker, read=records.read)
_BANKS, _SPACE = "python -m research bank-width", "python -m research design-space"

MAKERS = {
    "ablation": Maker(ablation_pages.section, _ABLATION, read=on_a_gpu),
    "ablation-figure": Maker(
        ablation_pages.draw, _ABLATION, "Bars: TFLOP/s with all techniques, and without each of them", read=on_a_gpu
    ),
    "banks": Maker(bank_width.section, _BANKS),
    "banks-figure": Maker(
        bank_width.draw, _BANKS, "Lines: the speed by n over that of n = 1, for each type and filter"
    ),
    "batches": Maker(batches.section, "python -m research batch-invariance"),
    "configurations": Maker(design_space.section, _SPACE),
    "configurations-figure": Maker(
        design_space.draw, _SPACE, "Points: TFLOP/s of each configuration over FMAs a cycle of loads from shared memory"
    ),
    "energy": Maker(tensor_ablation.energy_section, _PARTS),
    "energy-figure": Maker(tensor_ablation.draw_energy, _PARTS, "Bars: energy of an operation by engine and layer"),
    "parts": Maker(tensor_ablation.parts_section, _PARTS),
    "parts-figure": Maker(
        tensor_ablation.draw_parts, _PARTS, "Bars: TFLOP/s of each kernel, whole and without one part"
    ),
    "precision": Maker(precision.section, "python -m research precision"),
}

fill = partial(pages.fill, makers=MAKERS, mark="made by research")
fill_all = partial(pages.fill_all, makers=MAKERS, mark="made by research")
