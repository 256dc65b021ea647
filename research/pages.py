"""The blocks of the documents that hold what studies have found, those ``made by research:``; see report/pages.py."""

from __future__ import annotations

from functools import partial

from report import pages, records
from report.pages import Maker, on_a_gpu
from research import ablation_pages, bank_width, batches, design_space, precision, tensor_ablation

#: Files are checked as those of benchmarks/results; research/results/older.json says why earlier ones are used.
_suite = partial(on_a_gpu, read=records.checked_suite)

MAKERS = {
    "ablation": Maker(ablation_pages.section, read=_suite),
    "ablation-figure": Maker(
        ablation_pages.draw, shows="Bars: TFLOP/s with all techniques, and without each of them", read=_suite
    ),
    "banks": Maker(bank_width.section),
    "banks-figure": Maker(bank_width.draw, shows="Lines: the speed by n over that of n = 1, for each type and filter"),
    "batches": Maker(batches.section),
    "configurations": Maker(design_space.section),
    "configurations-figure": Maker(
        design_space.draw, shows="Points: TFLOP/s of each configuration over FMAs a cycle of loads from shared memory"
    ),
    "energy": Maker(tensor_ablation.energy_section),
    "energy-figure": Maker(tensor_ablation.draw_energy, shows="Bars: energy of an operation by engine and layer"),
    "parts": Maker(tensor_ablation.parts_section),
    "parts-figure": Maker(tensor_ablation.draw_parts, shows="Bars: TFLOP/s of each kernel, whole and without one part"),
    "precision": Maker(precision.section),
}

fill = partial(pages.fill, makers=MAKERS, mark="made by research")
fill_all = partial(pages.fill_all, makers=MAKERS, mark="made by research")
