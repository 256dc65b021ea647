"""Arrays that can be the filters of no layer: `prepare_weights` refuses them."""

from __future__ import annotations

import numpy as np
import pytest

from leanconv import prepare_weights
from tests.messages import says


@pytest.mark.parametrize("shape", [(0, 4, 3, 3), (8, 0, 3), (8, 4, 3, 0, 3)])
def test_no_filters(shape: tuple[int, ...]) -> None:
    with says(ValueError, f"w has shape {shape}; it must not be empty"):
        prepare_weights(np.ones(shape, np.float32))


def test_filters_of_volumes_are_of_floats() -> None:
    with says(TypeError, "w has dtype int8; layers of volumes are of float32, float16, bfloat16"):
        prepare_weights(np.ones((2, 2, 3, 3, 3), np.int8))
    assert prepare_weights(np.ones((2, 2, 3, 3), np.int8)).dtype == "int8"
