"""Whole networks in each arithmetic that people run, with leanconv's convolutions and without.

``python -m report modes`` needs a GPU, PyTorch and torchvision, and writes benchmarks/results/<machine>/modes.json: a
row for each network, mode and kind of pass. PyTorch runs in both layouts; leanconv channels last, and also channels
first where PyTorch is quicker so. Of each side the quicker layout counts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from leanconv.bench.peers.torch_peer import arithmetic
from report import networks, records
from report.forward_passes import METERED, measure_forward
from report.forward_passes import measure_way as measure_forward_way
from report.networks import MODES, NETWORKS, OF_STEPS, TRAINED, UNCAPTURED, network
from report.training_steps import measure_step
from report.training_steps import measure_way as measure_step_way

#: leanconv's error at most, in PyTorch's: of what was right 5.6.
_MOST_ERROR = 10


def measure(
    results: Path, revision: str | None, names: Sequence[str], modes: Sequence[str], passes: Sequence[str],
    seconds: float | None, compiled: bool, tuned: bool, way: str = "",
) -> Path:  # fmt: skip
    """Measure on this machine's GPU what the results file does not have of this revision; other rows stay.

    ``way``: one of `networks.WAYS`, of training steps of `networks.OF_STEPS`; of rows that the file has, its times
    alone, which then have a revision and a date of their own.

    Raises WrongResultError at the end where a result was wrong, of which the file has no row, or with ``way`` the row
    that it had.
    """
    import torch

    from leanconv.tuning.search import WrongResultError

    about = records.with_torch(revision)
    path, rows = records.begun(results, "modes", about)
    begin, wrong = time.monotonic(), list[str]()
    for kind, key, name in product(passes, modes, names):
        mine, mode = {"network": name, "mode": key, "pass": kind}, MODES[key]
        old = next((row for row in rows if mine.items() <= row.items()), None)
        known = old is not None and about["git_revision"] in (old["revision"], way and old.get(f"{way}_revision"))
        missing = old is not None and bool(way) and f"leanconv_{way}_us" not in old
        if (known and not missing) or (kind != "forward" and name not in TRAINED):
            continue
        graph, forward = name not in UNCAPTURED, kind == "forward"
        if way and (old is None or not (graph or way == "eager") or not (forward or way in OF_STEPS)):
            continue
        if seconds is not None and time.monotonic() - begin > seconds:
            break
        started = time.monotonic()
        with arithmetic(mode.tf32):
            model, x = network(name, mode, not forward)
            if way and old is not None and forward:
                found = measure_forward_way(model, x, mode, way, old["quicker"], old.get("ours", "NHWC"))
            elif way and old is not None:
                best = [networks.quicker(old, side, "graph") for side in ("torch", "leanconv")]
                found = measure_step_way(model, x, mode, way, (best[0], best[1].replace("leanconv", "torch")))
            elif forward:
                found = measure_forward(model, x, mode, compiled and graph, tuned and graph, graph)
            else:
                found = measure_step(model, x, mode, ("eager", "graph") if graph else ("eager",))
        took = {"seconds": round(time.monotonic() - started, 1)}
        when = {"revision": about["git_revision"], "date": about["date"]}
        row = {**mine, "batch": len(x), **found, **took, **when}
        if way and old is not None:
            # a meter's readings of the times before are not of these
            rest = {name: each for name, each in old.items() if way != "sustained" or not name.endswith(METERED)}
            row = rest | found | {f"{way}_{name}": each for name, each in when.items()}
        print(f"{time.monotonic() - begin:.0f} s: {row}", flush=True)
        del model, x
        torch.cuda.empty_cache()
        kept = [row] if is_right(row) else [old] if way and old is not None else []
        rows = [row for row in rows if row is not old] + kept
        rows.sort(key=_place)
        records.write(results, "modes", about, rows)
        if not is_right(row):
            most = networks.largest(_errors(row).values())
            wrong.append(f"{name}, {key}: error {most:.1e}, PyTorch's {row['torch_error']:.1e}")
    if wrong:
        raise WrongResultError("\n".join(wrong))
    return path


def is_right(row: Mapping[str, Any]) -> bool:
    """Whether leanconv's results were about as exact as PyTorch's; of training steps nobody knows."""
    return all(bool(each <= _MOST_ERROR * row["torch_error"]) for each in _errors(row).values())


def _errors(row: Mapping[str, Any]) -> dict[str, float]:
    """leanconv's errors by the way in which it was run."""
    return {name: each for name, each in row.items() if name.startswith("leanconv") and name.endswith("_error")}


def _place(row: dict[str, Any]) -> tuple[bool, int, int]:
    return row["pass"] != "forward", list(NETWORKS).index(row["network"]), list(MODES).index(row["mode"])
