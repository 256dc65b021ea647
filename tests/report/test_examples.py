"""Every Python block of the pages runs as it stands; those that need a GPU say so, and fail for want of one alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from leanconv import CudaUnavailableError
from leanconv.runtime.launch import why_no_gpu

ROOT = Path(__file__).resolve().parents[2]
NEEDS = "# needs a GPU"
#: a page whose blocks are steps, which its own test takes
STEPS = "add-an-algorithm.md"
BLOCKS = [
    pytest.param(text, id=f"{page.name}-{i}")
    for page in sorted(ROOT.glob("docs/**/*.md"))
    for i, text in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL))
    if page.name != STEPS
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_is_complete(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It runs by itself, and prints what the comments at its end say."""
    for library in ("torch", "dask"):
        if library in block:
            pytest.importorskip(library)
    if NEEDS in block and why_no_gpu():
        with pytest.raises(CudaUnavailableError):
            exec(compile(block, "a page", "exec"), {})
        return
    exec(compile(block, "a page", "exec"), {})
    if wanted := re.search(r"((?:^# .*\n)+)\Z", block, re.MULTILINE):
        assert capsys.readouterr().out.split() == re.sub(r"^# ", "", wanted[1], flags=re.MULTILINE).split()


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 10 and sum(NEEDS in str(block.values[0]) for block in BLOCKS) == 3
