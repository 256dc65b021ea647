"""What a headline counts, the algorithm that a call picks, is what it picks today; or its file is a listed one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from leanconv.bench import columns, provenance
from leanconv.bench.results import Results
from leanconv.bench.suites import parse_problem
from leanconv.call.choose import by_model
from leanconv.call.explain import NOMINAL
from leanconv.volumes.images import as_images

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
#: Predictions that are so near to each other are one: the GPU that was measured is not quite the nominal one.
NEAR = 1.03


def test_rows_of_what_a_call_picks_are_of_what_it_picks_today() -> None:
    older, rows, others = provenance.older(RESULTS), 0, list[str]()
    for path in sorted((RESULTS / "nvidia-h200").glob("*.json")):
        if f"nvidia-h200/{path.name}" in older or "suite" not in columns.read(path):
            continue
        results = Results.read(path)
        for row in results.rows:
            if row.engine != "leanconv:auto":
                continue
            rows += 1
            problem, ran = parse_problem(results.problems[row.problem]["words"]), row.algorithm.partition(" ")[0]
            if problem.kind == "conv2d":
                problem = as_images(replace(problem, op=results.op or "fprop"))
            picked = by_model(problem, NOMINAL, "auto", None)
            if picked.algorithm.stem != ran and by_model(problem, NOMINAL, ran, None).cost > NEAR * picked.cost:
                others.append(f"{path.stem}, {row.problem}: {ran} ran, {picked.algorithm.stem} is picked")
    assert rows > 800
    assert not others, "\n".join(others)
