"""Make the table that a release ships: of a GPU's table of all timed candidates the winners, with their machine code.

``python scripts/ship_table.py TABLE`` reads a table that `leanconv tune` has written (or the committed one,
``benchmarks/results/<gpu>/timed-candidates.json``, which `python -m report refit` fits the cost model to), compiles
every winner and writes ``src/leanconv/perf/<gpu>/winners.json``. Winners that are no configuration any more are named
and left out. Needs NVRTC, no GPU.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from leanconv import words
from leanconv.bench import candidates
from leanconv.call.explain import NOMINAL
from leanconv.perf import tables
from leanconv.perf.tables import Entry, Table, Timed
from leanconv.runtime import cache
from leanconv.runtime.files import write_text
from leanconv.runtime.threads import cores
from leanconv.tuning.verify import code_of, todays, winners

TARGETS = {NOMINAL.model: NOMINAL}


def main() -> int:
    """Read, compile, write."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    whole = candidates.read(Path(sys.argv[1]))
    target = TARGETS[str(whole.gpu["name"])]

    def shipped(found: tuple[str, int | None, Timed]) -> tuple[str, int | None, Timed | str]:
        key, limit, winner = found
        candidate = todays(key, limit, winner, target, tables.SHIPPED_TABLE)
        if isinstance(candidate, str):
            return key, limit, candidate
        code = code_of(candidate.plan(words.parse_problem(key), target), target.arch)
        return key, limit, replace(winner, kernels={}, code=code)

    entries: dict[str, Entry] = {}
    with ThreadPoolExecutor(cores()) as pool:
        for key, limit, winner in pool.map(shipped, winners(whole)):
            if isinstance(winner, str):
                print(f"{key}: {winner}")
                continue
            before, known = entries.get(key, Entry()), whole.get(key)
            assert known is not None
            entries[key] = before.merged(
                Entry((winner,), {tables.limit_key(limit): winner}, known.peers, known.versions)
            )
    path = tables.path_of(tables.SHIPPED, target.model)
    write_text(path, Table(whole.gpu, entries, compiler=cache.compiler_version()).text())
    print(f"{path}: {len(entries)} problems")
    return 0


if __name__ == "__main__":
    sys.exit(main())
