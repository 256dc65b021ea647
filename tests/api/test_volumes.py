"""Layers of volumes: values against PyTorch, SciPy and float64, what is computed as images, and users' mistakes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes  # noqa: F401 - so that NumPy knows bfloat16
import numpy as np
import pytest
import scipy.ndimage
from hypothesis import given, settings
from hypothesis import strategies as st

from leanconv import (
    ConvProblem,
    conv2d,
    conv2d_input,
    conv2d_weight,
    conv3d,
    conv3d_input,
    conv3d_weight,
    conv_transpose3d,
    explain,
    prepare_weights,
)
from leanconv.call.resolve import check_problem
from leanconv.cpu import oracle
from leanconv.cpu import slices as engine
from leanconv.dtypes import DTYPES
from leanconv.volumes.images import as_images
from leanconv.words import format_problem, parse_problem
from tests.messages import says

torch = pytest.importorskip("torch")
functional, gradients = torch.nn.functional, torch.nn.grad

#: x, w, stride, padding, dilation, groups
LAYERS = {
    "plain": ((2, 4, 5, 6, 7), (6, 4, 3, 3, 3), 1, 1, 1, 1),
    "uneven": ((2, 4, 5, 6, 9), (6, 2, 2, 3, 2), (2, 1, 3), (1, 0, 2), (1, 2, 1), 2),
    "depthwise": ((1, 3, 6, 7, 5), (6, 1, 3, 2, 3), (1, 2, 2), (2, 1, 0), 1, 3),
    "far-slices": ((1, 2, 7, 4, 4), (3, 2, 3, 2, 2), (3, 1, 1), (4, 0, 1), (3, 1, 1), 1),
    "slices-alone": ((2, 4, 5, 6, 7), (6, 4, 3, 1, 1), (2, 1, 1), (1, 0, 0), (2, 1, 1), 1),
    "slices-strided": ((2, 4, 5, 6, 7), (6, 4, 3, 1, 1), (1, 2, 2), (1, 0, 0), 1, 1),
    "images-alone": ((2, 4, 5, 6, 7), (6, 2, 1, 3, 3), (1, 2, 1), (0, 1, 1), (1, 1, 2), 2),
    "images-strided": ((2, 4, 5, 6, 7), (6, 4, 1, 3, 3), (2, 2, 1), (0, 1, 1), 1, 1),
    "rows-alone": ((2, 4, 5, 6, 7), (6, 4, 1, 1, 3), (1, 1, 2), (0, 0, 1), 1, 1),
    "points": ((2, 4, 5, 6, 7), (6, 4, 1, 1, 1), 1, 0, 1, 1),
    "points-strided": ((2, 4, 5, 6, 7), (6, 4, 1, 1, 1), 2, 0, 1, 1),
    "patches": ((2, 3, 2, 8, 8), (5, 3, 2, 4, 4), (2, 4, 4), 0, 1, 1),
    "one-slice-padded": ((2, 4, 1, 6, 7), (6, 4, 1, 3, 3), 1, 1, 1, 1),
}
LAYOUTS = ("NCDHW", "NDHWC")


def placed(array: np.ndarray, layout: str) -> np.ndarray:
    """An array (n, c, d, h, w), or a shape, in the layout."""
    return array if layout == "NCDHW" else np.ascontiguousarray(np.moveaxis(array, 1, -1))


def placed_shape(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    return shape if layout == "NCDHW" else (shape[0], *shape[2:], shape[1])


class Expected:
    """A layer's arrays, and what PyTorch computes of them in float64."""

    def __init__(self, name: str, dtype: str = "float32") -> None:
        self.x_shape, self.w_shape, *numbers = LAYERS[name]
        self.options = dict(zip(("stride", "padding", "dilation", "groups"), numbers, strict=True))
        rng = np.random.default_rng(3)
        self.x, self.w, self.bias = (
            rng.standard_normal(shape).astype(dtype) for shape in (self.x_shape, self.w_shape, self.w_shape[:1])
        )
        x, w, bias = (torch.from_numpy(each.astype(np.float64)) for each in (self.x, self.w, self.bias))
        self.y = functional.conv3d(x, w, bias, *numbers).numpy()
        self.grad = rng.standard_normal(self.y.shape).astype(dtype)
        grad = torch.from_numpy(self.grad.astype(np.float64))
        self.dx = gradients.conv3d_input(self.x_shape, w, grad, *numbers).numpy()
        self.dw = gradients.conv3d_weight(x, self.w_shape, grad, *numbers).numpy()
        self.db = grad.sum((0, 2, 3, 4)).numpy()


def near(got: np.ndarray, expected: np.ndarray, dtype: str = "float32") -> None:
    assert got.dtype == dtype
    # sums of up to 840 products; PyTorch rounds to float64 too
    assert oracle.relative_error(got.astype(np.float64), expected) <= 16 * DTYPES[dtype].roundoff


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_values_are_those_of_pytorch(name, dtype, layout):
    layer = Expected(name, dtype)
    x, w, grad = (placed(each, layout) for each in (layer.x, layer.w, layer.grad))
    options = {**layer.options, "layout": layout}
    near(conv3d(x, w, layer.bias, **options), placed(layer.y, layout), dtype)
    near(conv3d(x, w, layer.bias, activation="relu", **options), placed(np.maximum(layer.y, 0), layout), dtype)
    near(conv3d_input(grad, w, placed_shape(layer.x_shape, layout), **options), placed(layer.dx, layout), dtype)
    dw, db = conv3d_weight(x, grad, placed_shape(layer.w_shape, layout), grad_bias=True, **options)
    near(dw, placed(layer.dw, layout), dtype)
    near(db, layer.db, dtype)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("name", LAYERS)
def test_tensors_of_pytorch_on_the_cpu(name, memory):
    layer = Expected(name)
    x, w, grad = (torch.from_numpy(each).contiguous(memory_format=memory) for each in (layer.x, layer.w, layer.grad))
    y = conv3d(x, w, torch.from_numpy(layer.bias), **layer.options)
    near(y.numpy(), layer.y)
    assert y.is_contiguous(memory_format=memory)
    near(conv3d(x[0], w, torch.from_numpy(layer.bias), **layer.options).numpy(), layer.y[0])
    near(conv3d_input(grad, w, layer.x_shape, **layer.options).numpy(), layer.dx)
    dw, db = conv3d_weight(x, grad, layer.w_shape, grad_bias=True, **layer.options)
    near(dw.numpy(), layer.dw)
    near(db.numpy(), layer.db)
    sided = {**layer.options, "padding": (1, 2, 0, 1, 2, 0)}
    expected = conv3d(layer.x, layer.w, **sided)
    near(conv3d(x, w, **sided).numpy(), expected.astype(np.float64))
    back = np.random.default_rng(4).standard_normal(expected.shape).astype(np.float32)
    expected = conv3d_input(back, layer.w, layer.x_shape, **sided).astype(np.float64)
    near(conv3d_input(torch.from_numpy(back), w, layer.x_shape, **sided).numpy(), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("more", [0, (1, 0, 1)])
def test_transposed_layers(layout, more):
    rng = np.random.default_rng(5)
    x, w, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 4, 3, 4, 5), (4, 3, 3, 2, 3), (6,)))
    numbers = (2, 3, 2), (1, 0, 1), more, 2, (1, 2, 1)
    tensors = [torch.from_numpy(each.astype(np.float64)) for each in (x, w, bias)]
    expected = functional.conv_transpose3d(*tensors, *numbers).numpy()
    near(
        conv_transpose3d(placed(x, layout), placed(w, layout), bias, *numbers, layout=layout), placed(expected, layout)
    )
    near(conv_transpose3d(placed(x, layout)[0], placed(w, layout), bias, *numbers, layout=layout),
         placed(expected, layout)[0])  # fmt: skip
    memory = torch.contiguous_format if layout == "NCDHW" else torch.channels_last_3d
    tensors = [torch.from_numpy(each) for each in (x, w, bias)]
    x_there = tensors[0].contiguous(memory_format=memory)
    near(conv_transpose3d(x_there, *tensors[1:], *numbers).numpy(), expected)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("stride", "padding", "more"), [(1, 1, 1), (1, 0, (2, 1, 0)), ((1, 2, 1), (2, 0, 1), (2, 2, 2)), (1, 3, 2)]
)
def test_a_transposed_layer_may_end_where_no_tap_reaches(stride, padding, more, biased):
    """Output padding as long as a stride, and less than a dilation, as PyTorch takes it."""
    rng = np.random.default_rng(8)
    x, w, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 2, 2, 3, 4), (2, 3, 2, 3, 2), (3,)))
    bias = bias if biased else None
    given = stride, padding, more, 1, 3
    tensors = [None if each is None else torch.from_numpy(each) for each in (x, w, bias)]
    expected = functional.conv_transpose3d(*tensors, *given).numpy()
    for layout in LAYOUTS:
        near(conv_transpose3d(placed(x, layout), placed(w, layout), bias, *given, layout=layout),
             placed(expected, layout))  # fmt: skip
        near(conv_transpose3d(placed(x, layout)[0], placed(w, layout), bias, *given, layout=layout),
             placed(expected, layout)[0])  # fmt: skip
    out = np.full(expected.shape, np.nan, np.float32)
    assert conv_transpose3d(x, prepare_weights(w), bias, *given, out=out) is out
    near(out, expected)
    last = tensors[0].contiguous(memory_format=torch.channels_last_3d)
    got = conv_transpose3d(last, *tensors[1:], *given)
    assert got.is_contiguous(memory_format=torch.channels_last_3d)
    near(got.numpy(), expected)


def test_values_are_those_of_scipy():
    rng = np.random.default_rng(6)
    volume, kernel = rng.standard_normal((6, 7, 8)), rng.standard_normal((3, 5, 3))
    expected = scipy.ndimage.correlate(volume, kernel, mode="constant")
    got = conv3d(volume[None, None], kernel[None, None], padding="same")[0, 0]
    assert np.allclose(got, expected)


def test_same_puts_the_odd_voxel_at_the_end():
    rng = np.random.default_rng(7)
    x, w = rng.standard_normal((1, 2, 5, 6, 7)), rng.standard_normal((3, 2, 2, 3, 4))
    expected = functional.conv3d(*map(torch.from_numpy, (x, w)), padding="same", dilation=(3, 1, 1)).numpy()
    assert np.allclose(conv3d(x, w, padding="same", dilation=(3, 1, 1)), expected)


def test_a_batch_may_be_empty_and_out_is_written():
    x, w = np.ones((0, 2, 3, 4, 5), np.float32), np.ones((4, 2, 2, 3, 3), np.float32)
    assert conv3d(x, w).shape == (0, 4, 2, 2, 3)
    assert conv3d_input(np.ones((0, 4, 2, 2, 3), np.float32), w, (0, 2, 3, 4, 5)).shape == x.shape
    dw = conv3d_weight(x, np.ones((0, 4, 2, 2, 3), np.float32), w.shape)
    assert dw.shape == w.shape and not dw.any()
    out = np.full((1, 4, 2, 2, 3), np.nan, np.float32)
    assert conv3d(np.ones((1, 2, 3, 4, 5), np.float32), w, out=out) is out
    assert (out == 36).all()


def test_images_of_a_batch_have_equal_bits_alone_and_together():
    layer = Expected("uneven")
    y = conv3d(layer.x, layer.w, batch_invariant=True, **layer.options)
    assert np.array_equal(y[1:], conv3d(layer.x[1:], layer.w, batch_invariant=True, **layer.options))


def test_packed_weights_are_taken():
    layer = Expected("plain")
    near(conv3d(layer.x, prepare_weights(layer.w), layer.bias, **layer.options), layer.y)


def test_slices_are_gathered_in_blocks(monkeypatch):
    layer = Expected("uneven")
    whole = conv3d(layer.x, layer.w, **layer.options)
    dw = conv3d_weight(layer.x, layer.grad, layer.w_shape, **layer.options)
    monkeypatch.setattr(engine, "BLOCK_BYTES", 1)  # a slice at a time
    assert np.allclose(whole, conv3d(layer.x, layer.w, **layer.options), atol=1e-5)
    assert np.allclose(dw, conv3d_weight(layer.x, layer.grad, layer.w_shape, **layer.options), atol=1e-5)
    near(conv3d_input(layer.grad, layer.w, layer.x_shape, **layer.options), layer.dx)


# Layers of volumes that are layers of images


@st.composite
def problems(draw: Any) -> ConvProblem:
    """Small layers, most of them with an axis or two that filters do not reach along."""
    groups = draw(st.sampled_from((1, 1, 2)))
    taps, sizes, strides, sides, dilations = [], [], [], [], []
    for _ in range(3):
        alone = draw(st.booleans())
        taps.append(1 if alone else draw(st.integers(1, 3)))
        dilations.append(draw(st.integers(1, 2)))
        sizes.append(draw(st.sampled_from((taps[-1], 4, 5))))
        patches = not alone and draw(st.booleans())
        strides.append(taps[-1] if patches else 1 if alone else draw(st.integers(1, 3)))
        sides.append((0, 0) if alone or patches else (draw(st.integers(0, 2)), draw(st.integers(0, 2))))
    op = draw(st.sampled_from(("fprop", "dgrad", "wgrad")))
    problem = ConvProblem(
        draw(st.integers(1, 2)), 2 * groups, sizes[1], sizes[2], 3 * groups, taps[1], taps[2], tuple(strides[1:]),
        (*sides[1], *sides[2]), tuple(dilations[1:]), groups, layout=draw(st.sampled_from(("NCHW", "NHWC"))), op=op,
        bias=op != "wgrad" and draw(st.booleans()), d=sizes[0], t=taps[0], stride_d=strides[0], padding_d=sides[0],
        dilation_d=dilations[0],
    )  # fmt: skip
    return (
        problem if min(problem.z, problem.p, problem.q) >= 1 else replace(problem, padding_d=(9, 9), padding=(9,) * 4)
    )


@given(problems())
@settings(max_examples=150)
def test_as_images_is_the_same_layer_on_the_same_memory(problem):
    images = as_images(problem)
    assert as_images(images) == images
    assert images.flops == problem.flops and images.bytes == problem.bytes
    rng = np.random.default_rng(8)
    x, w = (rng.standard_normal(each.shape) for each in problem.operands[:2])
    bias = rng.standard_normal(problem.operands[2].shape) if problem.bias else None
    expected = oracle.conv2d(problem, x, w, bias)
    got = oracle.conv2d(images, *(a.reshape(o.shape) for a, o in zip((x, w), images.operands, strict=False)), bias)
    assert np.allclose(got.ravel(), expected.ravel())


PATCH = ConvProblem(2, 3, 32, 16, 5, 16, 8, stride=(16, 8), layout="NHWC", dtype="float16")


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({}, "NHWC float16 4x24x16x2 k5 16x1 stride 1,1 "),
        ({"op": "wgrad"}, "wgrad NHWC float16 4x24x16x2 k5 16x1 stride 1,1 "),
        ({"op": "dgrad"}, "dgrad NHWC float16 2x24x32x2 k5 16x1 stride 16,1 "),
        ({"r": 15}, "NHWC float16 2x24x32x2 k5 15x1 stride 16,1 "),
        ({"h": 33}, "NHWC float16 2x24x33x2 k5 16x1 stride 16,1 "),
        ({"dtype": "float32"}, "NHWC float32 2x3x32x16 k5 16x8 "),
        ({"c": 8}, "NHWC float16 2x8x32x16 k5 16x8 "),
        ({"s": 4, "stride": (16, 4)}, "NHWC float16 2x3x32x16 k5 16x4 "),
        ({"layout": "NCHW"}, "NCHW float16 2x3x32x16 k5 16x8 "),
        ({"padding": (1, 0, 0, 0)}, "NHWC float16 2x24x32x2 k5 16x1 stride 16,1 padding 1,0,0,0 "),
    ],
)
def test_patches_of_16_bits_are_channels(change: dict[str, Any], shown: str) -> None:
    problem = replace(PATCH, **change)
    computed = as_images(problem)
    assert shown in str(computed) and as_images(computed) == computed
    assert computed.flops == problem.flops and computed.bytes == problem.bytes
    rng = np.random.default_rng(8)
    x, w = (rng.standard_normal(each.shape).astype(problem.dtype) for each in problem.operands[:2])
    expected = oracle.conv2d(problem, x, w, None)
    got = oracle.conv2d(computed, *(a.reshape(o.shape) for a, o in zip((x, w), computed.operands, strict=False)), None)
    assert np.allclose(got.ravel(), expected.ravel())


@pytest.mark.parametrize("device", [None, "cuda"])
def test_arrays_of_such_patches_keep_their_shapes(device: str | None, host_device: Any) -> None:
    rng = np.random.default_rng(9)
    x, w = rng.standard_normal((2, 32, 16, 3)), rng.standard_normal((6, 16, 8, 3))
    half = [a.astype(np.float16) for a in (x, w)]
    y = conv2d(*half, stride=(16, 8), layout="NHWC", device=device)
    assert y.shape == (2, 2, 2, 6)
    right = np.einsum("nphqwc,khwc->npqk", half[0].astype(float).reshape(2, 2, 16, 2, 8, 3), half[1].astype(float))
    assert np.allclose(y, right, rtol=2e-3, atol=2e-2)
    dx = conv2d_input(y, half[1], x.shape, stride=(16, 8), layout="NHWC", device=device)
    dw = conv2d_weight(half[0], y, w.shape, stride=(16, 8), layout="NHWC", device=device)
    assert dx.shape == x.shape and dw.shape == w.shape


@given(problems())
@settings(max_examples=60)
def test_words_and_checks_know_volumes(problem):
    check_problem(replace(problem, bias=False))
    assert parse_problem(format_problem(problem)) == problem


PATCHES: dict[str, Any] = dict(
    t=2, r=2, s=2, stride=(2, 2), stride_d=2, padding=(0, 0, 0, 0), padding_d=(0, 0), layout="NHWC", op="dgrad"
)
VOLUME = ConvProblem(2, 16, 14, 14, 32, 3, 3, padding=(1, 1, 1, 1), d=8, t=3, padding_d=(1, 1))


@pytest.mark.parametrize(
    "change, shown",
    [
        ({}, "NCDHW float32 2x16x8x14x14 k32 3x3x3 stride 1,1,1 padding 1,1,1,1,1,1 "),
        ({"t": 1, "padding_d": (0, 0)}, "NCDHW float32 2x16x8x14x14 k32 1x3x3 "),
        ({"t": 1, "padding_d": (0, 0), "layout": "NHWC"}, "NHWC float32 16x16x14x14 k32 3x3 stride 1,1 "),
        ({"t": 1, "padding_d": (0, 0), "layout": "NHWC", "stride_d": 2}, "NDHWC float32 2x16x8x14x14 k32 1x3x3 "),
        ({"r": 1, "s": 1, "padding": (0, 0, 0, 0)}, "NCHW float32 2x16x8x196 k32 3x1 stride 1,1 padding 1,1,0,0 "),
        ({"t": 8, "padding_d": (0, 0)}, "NCHW float32 2x128x14x14 k32 3x3 "),
        ({"t": 8, "padding_d": (0, 0), "op": "dgrad", "bias": True}, "NCDHW float32 2x16x8x14x14 k32 8x3x3 "),
        ({"r": 1, "t": 1, "padding_d": (0, 0), "padding": (0, 0, 1, 1)}, "NCHW float32 2x16x112x14 k32 1x3 "),
        (PATCHES, "dgrad NDHWC float32 2x32x8x14x7 k32 2x2x1 stride 2,2,1 "),
        (PATCHES | {"bias": True}, "dgrad NDHWC float32 2x16x8x14x14 k32 2x2x2 stride 2,2,2 "),
        (PATCHES | {"w": 15}, "dgrad NDHWC float32 2x16x8x14x15 k32 2x2x2 stride 2,2,2 "),
        (PATCHES | {"layout": "NCHW"}, "dgrad NCDHW float32 2x16x8x14x14 k32 2x2x2 "),
    ],
)
def test_explain_shows_what_is_computed_as_images(change, shown):
    explanation = explain(replace(VOLUME, **change))
    assert shown in str(explanation.problem)
    assert (explanation.chosen == "slices") == ("NCDHW" in shown or "NDHWC" in shown)


# Mistakes


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


X, W = ones(2, 4, 6, 6, 6), ones(8, 4, 3, 3, 3)


@pytest.mark.parametrize(
    "arguments, kind, parts",
    [
        (dict(x=ones(4, 6, 6)), ValueError, ["x has 3 dimensions", "it must have 5, or 4 without a batch"]),
        (dict(w=ones(8, 4, 3, 3)), ValueError, ["w has 4 dimensions, shape (8, 4, 3, 3); it must have 5"]),
        (dict(w=ones(8, 3, 3, 3, 3)), ValueError, ["w has 3 channels", "in_channels=4", "read as NCDHW"]),
        (dict(layout="NDHWC"), ValueError, ["in_channels=6", "read as NDHWC"]),
        (dict(layout="NHWC"), ValueError, ["layout='NHWC' is not known", "'NCDHW', 'NDHWC'"]),
        (dict(stride=(1, 2)), ValueError, ["stride=(1, 2)", "or three: (depth, vertical, horizontal)"]),
        (dict(padding=(1, 2, 3, 4)), ValueError, ["padding=(1, 2, 3, 4)", "(front, back, top, bottom, left, right)"]),
        (dict(padding=(1, -1, 1)), ValueError, ["padding=-1 is below 0"]),
        (dict(padding="same", stride=2), ValueError, ["padding='same' needs stride=1", "(2, 2, 2)"]),
        (dict(dilation=(3, 1, 1)), ValueError, ["0x4x4", "3x3x3 filter", "(3, 1, 1)", "7x3x3", "6x6x6"]),
        (dict(x=ones(2, 4, 0, 6, 6)), ValueError, ["2 volumes of 4 channels, 0 slices, 6 rows and 6 columns"]),
        (dict(w=ones(8, 4, 3, 0, 3)), ValueError, ["8 filters of 4 channels, 3 slices, 0 rows and 3 columns"]),
        (dict(groups=3), ValueError, ["in_channels=4 is not divisible by groups=3"]),
        (dict(bias=ones(4)), ValueError, ["bias has shape (4,)", "(8,)"]),
        (dict(x=ones(2, 4, 6, 6, 6, dtype=np.int8), w=ones(8, 4, 3, 3, 3, dtype=np.int8)), TypeError, ["dtype int8"]),
        (dict(algorithm="im2col"), ValueError, ["im2col: it computes layers of images, and this one has filters of 3"]),
        (dict(algorithm="im2wim"), ValueError, ["did you mean 'im2win'?"]),
        (dict(out=ones(2, 8, 4, 4)), ValueError, ["out has shape (2, 8, 4, 4); the result has (2, 8, 4, 4, 4)"]),
    ],
)
def test_mistakes_are_named(arguments, kind, parts):
    with says(kind, *parts):
        conv3d(**{"x": X, "w": W, **arguments})


def test_mistakes_in_gradients_are_named():
    grad = ones(2, 8, 4, 4, 4)
    with says(ValueError, "grad has shape (2, 8, 4, 4, 4), but the output has (2, 8, 5, 4, 4)", "stride=1, padding=0"):
        conv3d_input(grad, W, (2, 4, 7, 6, 6))
    with says(ValueError, "input_shape has 3 dimensions, shape (4, 6, 6)"):
        conv3d_input(grad, W, (4, 6, 6))
    with says(ValueError, "input_shape=(2, 4, 6, 6)", "either both have a batch axis, or neither"):
        conv3d_input(grad, W, (2, 4, 6, 6))
    with says(ValueError, "grad has shape", "(2, 8, 4, 5, 4)", "stride=1, padding=(0, 0, 0, 1, 0, 0)"):
        conv3d_weight(X, grad, W.shape, padding=(0, 0, 0, 1, 0, 0))
    with says(ValueError, "batch_invariant=True"):
        conv3d_weight(X, grad, W.shape, batch_invariant=True)
    with says(ValueError, "output_padding=1 must be less than stride=1"):
        conv_transpose3d(grad, W, output_padding=1)
    with says(ValueError, "output_padding=2 must be less than stride=1 or dilation=2"):
        conv_transpose3d(grad, W, output_padding=2, dilation=2)
    with says(ValueError, "out has shape (1, 1, 2, 2, 2)", "the result has (1, 1, 3, 3, 3)"):
        given = {"output_padding": 1, "dilation": 2, "padding": 0}
        conv_transpose3d(ones(1, 1, 2, 2, 2), ones(1, 1, 1, 1, 1), out=ones(1, 1, 2, 2, 2), **given)
    with says(ValueError, "w has 4 channels, but x has 8"):
        conv_transpose3d(grad, W[:4])
    with says(ValueError, "in_channels=8 is not divisible by groups=3"):
        conv_transpose3d(grad, W, groups=3)
    with says(ValueError, "the output would be 0x4x4"):
        conv_transpose3d(ones(1, 4, 2, 2, 2), ones(4, 1, 3, 3, 3), padding=(2, 0, 0))
    with says(ValueError, "w has 4 dimensions"):
        conv_transpose3d(grad, W[0])
    with says(TypeError, "x is a list; it must be an array"):
        conv_transpose3d([1.0], W)
    with says(ValueError, "layout='CHWN' is of images"):
        ConvProblem(1, 1, 4, 4, 1, 1, 1, layout="CHWN", d=2)
