"""Random layers, of images and of volumes, by every strategy in turn that can run them, on the emulator."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from random import Random
from typing import Any

import pytest

from leanconv.call.explain import NOMINAL
from leanconv.kernels import ALGORITHMS
from leanconv.problem import ConvProblem
from tests import cases, proof

LAYERS = [algorithm for algorithm in ALGORITHMS if algorithm.solves == "conv2d"]
#: The seed of `make test`, which draws fewer layers.
USUAL = 2
ACTIVATIONS = None, None, "relu", "silu", ("leaky_relu", 0.2), "sigmoid"


def drawn(random: Random, volumes: bool) -> ConvProblem | None:
    """A small layer; None where the numbers make none."""

    def some(*values: Any, count: int = 1) -> Any:
        found = tuple(random.choice(values) for _ in range(count))
        return found if count > 1 else found[0]

    groups, channels, filters = some(1, 1, 1, 2, 3), some(1, 2, 3, 4, 8, 16, 24, 40), some(1, 2, 6, 8, 16, 20)
    if random.random() < 0.2:
        groups, channels, filters = some(3, 8, 16), 1, some(1, 2)
    op, dtype = some("fprop", "dgrad", "wgrad"), some("float32", "float32", "float16", "bfloat16")
    (t, r, s), (d, h, w) = some(1, 2, 3, 3, 5, count=3), some(1, 2, 3, 5, 7, 8, count=3)
    depth: dict[str, Any] = {
        "d": d, "t": t, "stride_d": some(1, 1, 2, 3), "dilation_d": some(1, 1, 2), "padding_d": some(0, 1, 2, count=2)
    }  # fmt: skip
    behind: dict[str, Any] = {
        "scale": random.random() < 0.2,
        "add": random.random() < 0.2,
        "activation": some(*ACTIVATIONS),
    }
    try:
        problem = ConvProblem(
            some(1, 2), groups * channels, h, w, groups * filters, r, s, stride=some(1, 1, 2, 3, count=2),
            padding=some(0, 1, 1, 2, count=4), dilation=some(1, 1, 2, count=2), groups=groups, dtype=dtype, op=op,
            layout=some(*(("NCHW", "NHWC") if volumes else ("NCHW", "NHWC", "CHWN"))),
            precision=some("fp32", "ieee", "tf32") if dtype == "float32" else "fp32",
            bias=op != "wgrad" and random.random() < 0.5, **(depth if volumes else {}),
            **(behind if op == "fprop" else {}),
        )  # fmt: skip
    except ValueError:
        return None
    return problem if min(problem.z, problem.p, problem.q) > 0 and problem.is_volume == volumes else None


@pytest.mark.parametrize("volumes", [False, True], ids=["images", "volumes"])
@pytest.mark.parametrize("seed", [USUAL, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in range(3, 11))])
def test_every_strategy_computes_what_it_can(seed: int, volumes: bool) -> None:
    random, ran = Random(f"{seed} {volumes}"), Counter[str]()
    while ran.total() < (30 if seed == USUAL else 45):
        problem = drawn(random, volumes)
        able = [each for each in LAYERS if problem is not None and not each.reasons(problem, NOMINAL)]
        if problem is None or not able:
            continue
        algorithm = min(able, key=lambda each: (ran[each.stem], random.random()))
        if configs := list(islice(algorithm.configs(problem, NOMINAL), 40)):
            ran[algorithm.stem] += 1
            proof.check(algorithm, problem, random.choice(configs), kinds=cases.KINDS[:1])
    assert len(ran) > (10 if volumes else 15)
