"""Tables of the pages on algorithms: speeds and memory layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from leanconv.bench.format import Table, quantity, size
from leanconv.bench.results import AUTO, Results, Row, geometric_mean
from leanconv.bench.suites import parse_problem
from report.fields import ratio

#: Groups of peers that stand in the table of speeds, and what they are called there.
SPEED_PEERS = {"lean": "cuDNN without workspace", "best": "cuDNN's fastest", "PyTorch": "PyTorch",
               "im2col": "im2col + cuBLAS"}  # fmt: skip
#: The same beside what a call picks.
PICK_PEERS = {"PyTorch": "PyTorch, strict FP32", "TF32": "its TF32", "PyTorch, 16 bits": "PyTorch, 16 bits"}
#: The same for memory: the unrolled image, cuDNN's fastest algorithm, and what PyTorch picks.
MEMORY_PEERS = {"im2col": "im2col + cuBLAS", "best": "cuDNN's fastest", "PyTorch": "PyTorch's pick"}


def speeds(results: Results, algorithms: Sequence[str]) -> Table:
    """TFLOP/s of leanconv's algorithms and of the peers, layer by layer, with our largest error."""
    names = [name for name in algorithms if name in results.own_algorithms()]
    groups = [name for name in SPEED_PEERS if name in results.groups()]
    lines = []
    for problem in results.problems:
        peers = results.peers(problem)
        rows = [results.own(problem, [name]) for name in names]
        errors = [row.error for row in rows if row and row.error is not None]
        figures = (quantity(row.tflops) if row else "–" for row in (*rows, *map(peers.get, groups)))
        lines.append([problem, *figures, f"{max(errors):.1e}" if errors else "–"])
    return ["problem", *names, *(SPEED_PEERS[name] for name in groups), "our largest error"], lines


def picks(results: Results, only: Sequence[str]) -> Table:
    """What a call picks on the layers whose names are like one of ``only``: the algorithm, microseconds and ratios."""
    groups = [name for name in PICK_PEERS if name in results.groups()]
    chosen = [problem for problem in results.problems if any(fnmatchcase(problem, pattern) for pattern in only)]
    lines = []
    for problem in chosen:
        ours, peers = results.own(problem, [AUTO]), results.peers(problem)
        if ours is None:
            continue
        ratios = [ratio(peers[name].us / ours.us) if name in peers else "–" for name in groups]
        lines.append([problem, f"`{ours.algorithm}`", quantity(ours.us), *ratios])
    return ["problem", "a call picks", "µs", *(f"× {PICK_PEERS[name]}" for name in groups)], lines


def memory(results: Results, algorithms: Sequence[str]) -> Table:
    """Memory beyond input, filters and output, layer by layer, and that of the first algorithm as a share of im2col's.

    The last line is the share on layers with 3×3 filters: geometric mean, largest in brackets.
    """
    groups = [name for name in MEMORY_PEERS if name in results.groups()]
    columns = ["problem", "tensors", *algorithms, "of im2col's", *(MEMORY_PEERS[name] for name in groups)]
    lines, small = [], []
    for problem, about in results.problems.items():
        peers = results.peers(problem)
        rows = [results.own(problem, [name]) for name in algorithms]
        share = _share(rows[0], peers.get("im2col"))
        parsed = parse_problem(about["words"])
        if share is not None and parsed.kind == "conv2d" and parsed.r == parsed.s == 3:
            small.append(share)
        cells = [size(row.workspace_bytes) if row else "–" for row in (*rows, *(peers.get(name) for name in groups))]
        percent = "–" if share is None else f"{100 * share:.0f}%"
        lines.append([problem, size(about["bytes"]), *cells[: len(algorithms)], percent, *cells[len(algorithms) :]])
    if small:
        mean = f"{100 * geometric_mean(small):.0f}% ({100 * max(small):.0f}%)"
        lines.append(["layers with 3×3 filters", "", *[""] * len(algorithms), mean, *[""] * len(groups)])
    return columns, lines


def _share(row: Row | None, other: Row | None) -> float | None:
    if row is None or other is None or row.workspace_bytes is None or not other.workspace_bytes:
        return None
    return row.workspace_bytes / other.workspace_bytes
