"""What the launches of filters by Fourier transforms ask of a multiprocessor."""

from __future__ import annotations

import pytest

from leanconv.kernels.image_filter.transform import transform_launch
from tests.cases import TARGETS, filter_problem
from tests.variants import NAMED


@pytest.mark.parametrize(
    ("beside", "fitting"), [(0, 4), (32, 2), (33, 1), (96, 1), (200, 1)], ids="registers beside {}".format
)
def test_as_many_blocks_fit_as_registers_are_there_for(beside: int, fitting: int) -> None:
    """Of 65536, with 512 threads whose 16 complex numbers are in 32 of them each. One block always fits."""
    algorithm, target = NAMED["fourier_tiles"], TARGETS[0]
    problem = filter_problem(1, 9000, 9000, 255, 255)
    config = next(each for each in algorithm.configs(problem, target) if dict(each.constants())["length"] == 8192)
    assert (config.threads, target.registers_per_multiprocessor) == (512, 65536)
    made = transform_launch(algorithm, "tiles_rows", config, (), 1, 1, 4, beside, (), 1, target)
    assert made.min_blocks == fitting and made.function == "leanconv::fourier_tiles_rows"
