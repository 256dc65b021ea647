"""Where filters stay packed between calls another configuration or algorithm may run; on stand-ins for a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from leanconv import ConvProblem, PreparedWeights, conv2d, explain, prepare_weights
from leanconv.call import bind, choose
from leanconv.kernels.contract import variant
from leanconv.kernels.simt.winograd1d import Winograd1d
from leanconv.plan import Plan, Target
from tests.oracles import oracle_conv, relative_error
from tests.stand_ins import HostDevice

PROBLEM = ConvProblem(n=2, c=4, h=9, w=7, k=6, r=3, s=3, padding=(1, 1, 1, 1))


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    monkeypatch.delenv("LEANCONV_WORKSPACE_LIMIT", raising=False)
    x, w = (rng.standard_normal(shape, np.float32) for shape in (PROBLEM.x_shape, PROBLEM.w_shape))
    return x, w


def right(y: Any, x: np.ndarray, w: np.ndarray) -> bool:
    return relative_error(y if isinstance(y, np.ndarray) else y.host, oracle_conv(PROBLEM, x, w, None)) < 2e-6


def test_a_configuration_of_its_own(
    host_device: HostDevice, fake_cupy: Any, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But under a limit, which counts what is kept, and where arrays are the host's."""
    planned, usual_plan = list[int](), Winograd1d.plan

    def plan(self: Winograd1d, problem: ConvProblem, config: Any, target: Target) -> Plan:
        planned.append(config.min_blocks)
        return usual_plan(self, problem, config, target)

    def run(x: Any, w: Any, **options: Any) -> Any:
        return conv2d(x, w, padding=1, algorithm="winograd1d", **options)

    def told(x: Any, w: Any, **options: Any) -> str:
        return str(explain(conv2d, x, w, padding=1, algorithm="winograd1d", **options).config)

    monkeypatch.setattr(Winograd1d, "plan", plan)
    monkeypatch.setattr(Winograd1d, "for_kept_filters", lambda self, config: variant(config, min_blocks=1))
    x, w = map(fake_cupy.asarray, given)
    assert right(run(x, w), *given)
    (usual,) = planned
    assert usual > 1
    assert right(run(x, prepare_weights(w)), *given) and planned == [usual, 1]
    assert f"min_blocks={usual}," in told(x, w) and "min_blocks=1," in told(x, prepare_weights(w))
    for image, filters, options in ((x, w, {"workspace_limit": 1 << 20}), (*given, {"device": "cuda"})):
        bind.forget()
        planned.clear()
        assert right(run(image, prepare_weights(filters), **options), *given) and planned == [usual]
        assert f"min_blocks={usual}," in told(image, prepare_weights(filters), **options)


def test_an_algorithm_of_its_own(
    host_device: HostDevice, fake_cupy: Any, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a CUDA graph too that is captured before any is kept: the same bits."""
    names = {"": "implicit_gemm", "same bits": "implicit_gemm", "quickest": "winograd1d"}
    monkeypatch.setattr(
        bind, "choose", lambda problem, target, name, limit, kept: choose.choose(problem, target, names[kept], limit)
    )
    x, w = map(fake_cupy.asarray, given)
    # filters that are packed for calls with the bits of those that pack have ready calls of their own
    for filters in (w, PreparedWeights(w, "same bits")):
        assert right(conv2d(x, filters, padding=1), *given) and host_device.prepared == 0
    for capturing in (True, False):
        monkeypatch.setattr(host_device, "capturing", lambda stream, now=capturing: now)
        prepared, before = prepare_weights(w), host_device.prepared
        assert right(conv2d(x, prepared, padding=1), *given)
        assert (prepared.nbytes == 0) == capturing and host_device.prepared > before
