"""Which tests are collected, by their markers; and what the garbage collector need not look through again."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator

import pytest

from leanconv.bench import run as bench_run
from leanconv.runtime.driver import CudaError
from leanconv.runtime.launch import why_no_gpu
from tests import proof


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU; skipped, with the reason, where there is none")
    config.addinivalue_line("markers", "slow: compares speed, so it wants the machine to itself")
    config.addinivalue_line("markers", "exhaustive: one more of many that are alike; `make test-all` runs it")


def pytest_sessionstart(session: pytest.Session) -> None:
    proof.every_order = "not exhaustive" not in session.config.option.markexpr


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU each function of a marked test is skipped once, with the reason, for all of its parameters."""
    marked = [item for item in items if "gpu" in item.keywords]
    if not marked:
        return
    try:
        why = why_no_gpu()
    except CudaError:
        return  # there is one that does not work, as the marked tests will tell
    if not why:
        return
    shown = {item.nodeid.partition("[")[0]: item for item in reversed(marked)}.values()
    for item in shown:
        item.add_marker(pytest.mark.skip(reason=f"no usable GPU: {why}"))
    left = set(marked).difference(shown)
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]


def pytest_collection_finish() -> None:
    """What is there to stay is not looked through again: of tests that collect garbage that is most of their time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _what_is_frozen_stays() -> Iterator[None]:
    """A run of the benchmark freezes what is there, and lets it go behind it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_run, "gc", types.SimpleNamespace(collect=gc.collect, freeze=gc.freeze, unfreeze=int))
        yield
