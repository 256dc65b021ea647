"""Options that are equal to a right one, or nearly: a call that has run before does not let them pass."""

from __future__ import annotations

from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest

from leanconv import (
    ConvProblem,
    box_blur,
    conv1d,
    conv2d,
    conv2d_input,
    explain,
    filter2d,
    gaussian_blur,
    laplacian,
)
from leanconv.call import lookup, resolve
from leanconv.call.choose import choose
from leanconv.call.explain import NOMINAL
from leanconv.runtime.bounded_cache import BoundedCache
from tests.messages import says
from tests.stand_ins import HostDevice

torch = pytest.importorskip("torch")

X, W = np.ones((2, 4, 6, 6), np.float32), np.ones((8, 4, 3, 3), np.float32)
ONES = [True, 1.0, Decimal(1), Fraction(1), 1 + 0j, np.float64(1), np.bool_(True), b"\1", np.ones(1, np.int8)]


class Count(IntEnum):
    one = 1


@pytest.mark.parametrize("one", ONES, ids=repr)
@pytest.mark.parametrize("device", [None, "cuda"])
def test_what_equals_one_is_refused_after_one(one: Any, device: Any, host_device: HostDevice) -> None:
    grad = np.ones((2, 8, 6, 6), np.float32)
    for _ in range(2):
        conv2d(X, W, stride=1, padding=1, groups=1, dilation=1, workspace_limit=1, device=device)
        conv2d(X, W, stride=(1, 1), padding=(1, 1), dilation=(1, 1), device=device)
        for name in ("stride", "padding", "dilation", "groups", "workspace_limit"):
            options = {"stride": 1, "padding": 1, "groups": 1, "dilation": 1, "workspace_limit": 1, name: one}
            with says(TypeError, f"{name}={one!r} is not an integer"):
                conv2d(X, W, device=device, **options)
        for pair in ((one, 1), (1, one), [1, one]):
            for name in ("stride", "padding", "dilation"):
                options = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), name: pair}
                with says(TypeError, f"{name}={one!r} is not an integer"):
                    conv2d(X, W, device=device, **options)
        assert conv2d_input(grad, W, (2, 4, 6, 6), padding=1, device=device).shape == X.shape
        with says(TypeError, f"padding={one!r} is not an integer"):
            conv2d_input(grad, W, (2, 4, 6, 6), padding=one, device=device)
        assert conv1d(X[:, :, 0], W[:, :, 0], stride=1, device=device).shape == (2, 8, 4)
        with says(TypeError, f"stride={one!r} is not an integer"):
            conv1d(X[:, :, 0], W[:, :, 0], stride=one, device=device)
        assert filter2d(X[0, 0], W[0, 0], border=1, anchor=(1, 1), device=device).shape == (6, 6)
        with says(TypeError, f"anchor={one!r} is not an integer"):
            filter2d(X[0, 0], W[0, 0], border=1, anchor=(1, one), device=device)
        with says(ValueError, f"border={one!r} is not known"):
            filter2d(X[0, 0], W[0, 0], border=one, anchor=(1, 1), device=device)


@pytest.mark.parametrize("array", [np.arange(2), np.array(["same", "NCHW"]), np.ones(1), torch.ones(2)], ids=repr)
def test_an_array_is_no_word(array: Any) -> None:
    for name in ("layout", "algorithm"):
        for call in (conv2d, partial(explain, conv2d), partial(explain, conv2d, device="cuda")):
            with says(ValueError, f"{name}={array!r} is not known"):
                call(X, W, **{name: array})
    filters = (
        partial(filter2d, X[0, 0], W[0, 0]), partial(gaussian_blur, X[0, 0], 1.0), partial(laplacian, X[0, 0]),
        partial(box_blur, X[0, 0], 3),
    )  # fmt: skip
    for name in ("border", "mode", "device"):
        for each in filters:
            with says(ValueError, f"{name}={array!r} is not known"):
                each(**{name: array})
    with says(ValueError, f"algorithm={array!r} is not known"):
        choose(ConvProblem(1, 3, 9, 11, 4, 3, 3), NOMINAL, array)
    with pytest.raises(ValueError, match="algorithm=.*takes algorithm='auto' only"):
        conv2d(torch.ones(1, 3, 9, 9), torch.ones(4, 3, 3, 3), algorithm=array)


@pytest.mark.parametrize("word", [np.arange(2), ["direct"]], ids=repr)
def test_what_is_no_algorithm_on_a_gpu(word: Any, torch_on_device: HostDevice) -> None:
    with says(ValueError, f"algorithm={word!r} is not known"):
        conv2d(torch.ones(1, 3, 9, 9), torch.ones(4, 3, 3, 3), algorithm=word)


def test_words_of_other_kinds_of_text() -> None:
    for mode in ("".join(["sa", "me"]), np.str_("same"), np.str_("valid")):
        side = 6 if mode == "same" else 4
        assert filter2d(X[0, 0], W[0, 0], mode=mode, border=np.str_("cv2.BORDER_REFLECT")).shape == (side, side)
    assert conv2d(X, W, layout=np.str_("NCHW"), algorithm=np.str_("auto")).shape == (2, 8, 4, 4)


def test_zeros_and_shapes() -> None:
    conv2d(X, W, padding=0)
    for zero in (False, 0.0, -0.0, Decimal(0)):
        with says(TypeError, f"padding={zero!r} is not an integer"):
            conv2d(X, W, padding=zero)
    grad = np.ones((2, 8, 4, 4), np.float32)
    conv2d_input(grad, W, (2, 4, 6, 6))
    with says(TypeError, "input_shape=6.0 is not an integer"):
        conv2d_input(grad, W, (2, 4, 6, 6.0))  # type: ignore[arg-type]


def test_a_limit_in_words_is_for_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANCONV_WORKSPACE_LIMIT", "64")
    conv2d(X, W)
    monkeypatch.delenv("LEANCONV_WORKSPACE_LIMIT")
    with says(TypeError, "workspace_limit='64' is text; as bytes it is 64"):
        conv2d(X, W, workspace_limit="64")


@pytest.mark.parametrize(
    "options",
    [
        {"stride": np.int64(1)}, {"stride": [1, 1]}, {"stride": (np.uint8(1), 1)}, {"groups": Count.one},
        {"padding": np.array(0)}, {"padding": torch.tensor(0)}, {"padding": np.str_("valid")},
        {"workspace_limit": np.int32(1000)},
    ],
    ids=repr,
)  # fmt: skip
def test_integers_of_other_kinds_are_described_once(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = []
    monkeypatch.setattr(lookup, "_calls", BoundedCache(8))
    actual = resolve.resolve
    monkeypatch.setattr(lookup, "resolve", lambda *given: resolved.append(given) or actual(*given))
    results = [conv2d(X, W, **options) for _ in range(3)]
    assert len(resolved) == 1 and all((result == conv2d(X, W)).all() for result in results)


def test_a_shape_of_pytorch_is_no_slower() -> None:
    grad, w = torch.ones(2, 8, 4, 4), torch.ones(8, 4, 3, 3)
    before = len(lookup._calls)
    for _ in range(2):
        conv2d_input(grad, w, torch.Size((2, 4, 6, 6)))
        conv2d_input(grad, w, (2, 4, 6, 6))
    assert len(lookup._calls) <= before + 1
