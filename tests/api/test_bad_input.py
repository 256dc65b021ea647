"""Arguments that break a rule: each a clear error that names argument, value and rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from leanconv import ConvProblem, FilterProblem, NoAlgorithmError, conv1d, conv2d, explain, filter2d, filter3d
from tests.messages import says
from tests.stand_ins import HostDevice

torch = pytest.importorskip("torch")


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


X, W = ones(2, 4, 6, 6), ones(8, 4, 3, 3)
IMAGE, KERNEL = ones(6, 7), ones(3, 3)
CONV, FILTER = ConvProblem(1, 3, 8, 8, 4, 3, 3), FilterProblem(1, 8, 8, 3, 3, (1, 1))


@pytest.mark.parametrize(
    "arguments, kind, parts",
    [
        (dict(x=ones(4, 6)), ValueError, ["x has 2 dimensions, shape (4, 6); it must have 4, or 3 without a batch"]),
        (dict(x=ones(1, 2, 4, 6, 6)), ValueError, ["x has 5 dimensions, shape (1, 2, 4, 6, 6)"]),
        (dict(x=ones(2, 4, 6)), ValueError, ["w has 4 channels, but x has in_channels=2"]),
        (dict(w=ones(4, 3, 3)), ValueError, ["w has 3 dimensions"]),
        (dict(w=ones(8, 3, 3, 3)), ValueError, ["w has 3 channels", "in_channels=4", "groups=1"]),
        (dict(groups=3), ValueError, ["in_channels=4 is not divisible by groups=3"]),
        (dict(x=ones(2, 6, 6, 6), w=ones(8, 2, 3, 3), groups=3), ValueError, ["out_channels=8", "groups=3"]),
        (dict(groups=0), ValueError, ["groups=0 is below 1"]),
        (dict(groups=2.0), TypeError, ["groups=2.0 is not an integer"]),
        (dict(stride=0), ValueError, ["stride=0 is below 1"]),
        (dict(stride=(1, 2, 3)), ValueError, ["stride=(1, 2, 3)", "or two"]),
        (dict(stride=1.5), TypeError, ["stride=1.5 is not an integer"]),
        (dict(stride=True), TypeError, ["stride=True"]),
        (dict(stride=2**63), ValueError, ["stride=9223372036854775808 is above 2147483647"]),
        (dict(padding=2**31), ValueError, ["padding=2147483648 is above 2147483647"]),
        (dict(padding=(0, 1, 2**80, 0)), ValueError, [f"padding={2**80} is above 2147483647"]),
        (dict(dilation=2**31), ValueError, ["dilation=2147483648 is above"]),
        (dict(groups=2**64), ValueError, ["groups=18446744073709551616 is above"]),
        (dict(dilation=-1), ValueError, ["dilation=-1"]),
        (dict(padding=-1), ValueError, ["padding=-1 is below 0"]),
        (dict(padding=(1, 2, 3)), ValueError, ["padding=(1, 2, 3)", "(top, bottom, left, right)"]),
        (dict(padding="full"), ValueError, ["padding='full'", "'same'"]),
        (dict(padding="same", stride=2), ValueError, ["padding='same' needs stride=1", "(2, 2)"]),
        (dict(w=ones(8, 4, 7, 3)), ValueError, ["0x4", "7x3 filter", "6x6"]),
        (dict(dilation=3), ValueError, ["0x0", "dilation (3, 3)", "7x7"]),
        (dict(bias=ones(4)), ValueError, ["bias has shape (4,)", "(8,)"]),
        (dict(bias=ones(8, 1)), ValueError, ["bias has shape (8, 1)"]),
        (dict(layout="nchw"), ValueError, ["layout='nchw'", "'NCHW', 'NHWC', 'CHWN'"]),
        (dict(layout="CWN"), ValueError, ["layout='CWN'", "'NCHW', 'NHWC', 'CHWN'"]),
        (dict(layout="CHWN"), ValueError, ["w has 8 channels", "in_channels=2"]),
        (dict(layout="NHWC"), ValueError, ["in_channels=6", "read as NHWC"]),
        (dict(precision="fp16"), ValueError, ["precision='fp16'", "'ieee', 'fp32', 'relaxed', 'tf32'"]),
        (dict(activation="swish"), ValueError, ["activation='swish' is not known", "'silu'"]),
        (dict(activation=("relu", 2)), ValueError, ["activation=('relu', 2): 'relu' has no number; leaky_relu"]),
        (dict(activation=("elu", "1")), TypeError, ["activation='1' is not a number"]),
        (dict(activation=("elu", 1e300)), ValueError, ["activation=('elu', 1e+300)", "finite in float32"]),
        (dict(activation="elu:x"), ValueError, ["activation='elu:x': 'x' is not a number"]),
        (dict(scale=ones(4)), ValueError, ["scale has shape (4,); it must have shape (8,)"]),
        (dict(scale=ones(8, dtype=np.float64)), TypeError, ["scale has dtype float64 and x float32"]),
        (dict(scale=3.0), TypeError, ["scale is a float"]),
        (dict(add=ones(2, 8, 4, 1)), ValueError, ["add has shape (2, 8, 4, 1)", "(2, 8, 4, 4)"]),
        (dict(add=ones(2, 8, 4, 4, dtype=np.int32)), TypeError, ["add has dtype int32 and x float32"]),
        (dict(algorithm="cudnn"), ValueError, ["algorithm='cudnn'", "'im2col'"]),
        (dict(algorithm="im2wim"), ValueError, ["did you mean 'im2win'?"]),
        (dict(algorithm="winograd1d", precision="ieee"), NoAlgorithmError, ["winograd1d: ", "'ieee' was requested"]),
        (dict(device="tpu"), ValueError, ["device='tpu'", "'cuda'"]),
        (dict(x=ones(2, 4, 6, 6, dtype=np.int32)), TypeError, ["x has dtype int32", "on the CPU only; convert it"]),
        (dict(x=ones(2, 4, 6, 6, dtype=np.float16)), TypeError, ["w has dtype float32 and x float16"]),
        (dict(w=ones(8, 4, 3, 3, dtype=np.float64)), TypeError, ["w has dtype float64", "x float32"]),
        (dict(bias=ones(8, dtype=np.float64)), TypeError, ["bias has dtype float64"]),
        (dict(x=[[1.0]]), TypeError, ["x is a list", "(numpy.asarray makes one)"]),
        (dict(w="filters"), TypeError, ["w is a str"]),
        (dict(x=None), TypeError, ["x is a NoneType"]),
        (dict(w=None), TypeError, ["w is a NoneType"]),
        (dict(x=ones(2, 0, 6, 6), w=ones(8, 0, 3, 3)), ValueError, ["x has 2 images of 0 channels, 6 rows and 6"]),
        (dict(w=ones(0, 4, 3, 3)), ValueError, ["w has 0 filters of 4 channels, 3 rows and 3 columns"]),
        (dict(x=ones(4, 0, 7, 2), layout="CHWN"), ValueError, ["x has 2 images of 4 channels, 0 rows and 7 columns"]),
        (dict(w=ones(4, 3, 0, 8), layout="CHWN"), ValueError, ["w has 8 filters", "4 channels, 3 rows and 0 columns"]),
        (dict(x=ones(6, 6, 6, 2), w=ones(4, 3, 3, 8), layout="CHWN"), ValueError,
         ["w has 4 channels, but x has in_channels=6 and groups=1"]),
        (dict(x=ones(4, 6, 6, 2), w=ones(4, 3, 3, 8), bias=ones(4), layout="CHWN"), ValueError,
         ["bias has shape (4,)", "(8,)"]),
        (dict(x=ones(4, 6, 6, 2), w=ones(4, 3, 3, 8), layout="CHWN", out=ones(2, 8, 4, 4)), ValueError,
         ["out has shape (2, 8, 4, 4); the result has (8, 4, 4, 2)"]),
        (dict(x=ones(6, 6), w=ones(4, 3, 3, 8), layout="CHWN"), ValueError, ["x has 2 dimensions"]),
        (dict(x=ones(4, 6, 6), w=ones(4, 3, 3, 8), layout="CHWN", out=ones(8, 4, 4, 1)), ValueError,
         ["out has shape (8, 4, 4, 1); the result has (8, 4, 4)"]),
        (dict(x=torch.ones(4, 6), w=torch.ones(8, 4, 3, 3), layout="NHWC"), ValueError, ["x has 2 dimensions"]),
        (dict(x=torch.ones(2, 4, 6, 6), w=torch.ones(4, 3, 3), layout="NHWC"), ValueError, ["w has 3 dimensions"]),
        (dict(w=torch.ones(8, 4, 3, 3)), ValueError, ["x is an array of NumPy", "w one of PyTorch"]),
        (dict(x=torch.ones(2, 4, 6, 6)), ValueError, ["x is an array of PyTorch", "w one of NumPy"]),
    ],
    ids=lambda value: str(list(value)) if isinstance(value, dict) else "",
)  # fmt: skip
@pytest.mark.parametrize("device", [None, "cuda"])
def test_conv2d_refuses(
    arguments: dict[str, Any], kind: type[Exception], parts: list[str], device: Any, host_device: HostDevice
) -> None:
    given = {"x": X, "w": W, "device": device, **arguments}
    if device is not None and "algorithm" in arguments and kind is not NoAlgorithmError:
        kind, parts = ValueError, [f"algorithm={arguments['algorithm']!r}", "'implicit_gemm'"]
    with says(kind, *parts):
        conv2d(**given)
    assert host_device.launches == []
    x, w = given.pop("x"), given.pop("w")
    if kind is NoAlgorithmError:
        assert explain(conv2d, x, w, **given).chosen is None
    else:
        with says(kind, *parts):
            explain(conv2d, x, w, **given)


@pytest.mark.parametrize(
    "arguments, kind, parts",
    [
        (dict(image=ones(5)), ValueError, ["image has shape (5,)"]),
        (dict(kernel=ones(3)), ValueError, ["kernel has 1 dimensions", "2, or 3 for several kernels (f, kh, kw)"]),
        (dict(kernel=ones(1, 1, 3, 3)), ValueError, ["kernel has 4 dimensions, shape (1, 1, 3, 3)"]),
        (dict(kernel=ones(0, 3)), ValueError, ["kernel has shape (0, 3)"]),
        (dict(kernel=ones(0, 3, 3)), ValueError, ["kernel has shape (0, 3, 3); it must not be empty"]),
        (dict(kernel=ones(4, 3, 3), out=ones(6, 7)), ValueError, ["out has shape (6, 7)", "the result has (4, 6, 7)"]),
        (dict(image=ones(6, 7, dtype=np.int32), kernel=ones(4, 33, 3, dtype=np.int32), separable=False), ValueError,
         ["33x3", "the limit is 32x32", "sums in int32 wrap around"]),
        (dict(kernel=ones(3, 3, dtype=np.complex64)), TypeError, ["kernel has dtype complex64", "real numbers"]),
        (dict(kernel=[[1j, 1]]), TypeError, ["kernel has dtype complex128", "real numbers"]),
        (dict(kernel=[["a"]]), TypeError, ["kernel has dtype str", "real numbers"]),
        (dict(kernel=[[1], [1, 2]]), ValueError, ["kernel is a list whose rows are not alike"]),
        (dict(kernel=2.0), TypeError, ["kernel=2.0 is no array; give its rows"]),
        (dict(kernel=np.broadcast_to(1.0, (10**6, 10**6))), ValueError, ["(1000000, 1000000)", "8000000000000 bytes"]),
        (dict(image=ones(6, 7, dtype=np.complex64)), TypeError, ["image has dtype complex64", "real and imaginary"]),
        (dict(image=ones(6, 7, dtype=np.int64)), TypeError, ["image has dtype int64; supported are float32, float64"]),
        (dict(image=ones(6, 7, dtype=bool)), TypeError, ["image has dtype bool"]),
        (dict(dtype="int64"), TypeError, ["dtype='int64' is no type of a result"]),
        (dict(dtype=torch.complex64), TypeError, ["dtype=torch.complex64 is no type of a result"]),
        (dict(dtype=3), TypeError, ["dtype=3 is no type of a result"]),
        (dict(out=ones(6, 7, dtype=np.int64)), TypeError, ["out has dtype int64"]),
        (dict(out=ones(6, 7), dtype="uint8"), ValueError, ["out has dtype float32; the result has uint8"]),
        (dict(out=ones(6, 8)), ValueError, ["out has shape (6, 8)", "the result has (6, 7)"]),
        (dict(image=ones(5, 6, 3)), ValueError, ["(5, 6, 3)", "channels_last=True", "3 channels",
                                                  "channels_last=False as 5 images of 6x3"]),
        (dict(image=ones(5, 6, 4, dtype=np.uint8)), ValueError, ["channels_last=True", "4 channels"]),
        (dict(channels_last=True), ValueError, ["image has shape (6, 7)", "(..., h, w, channels)"]),
        (dict(channels_last=1), TypeError, ["channels_last=1 is not True or False"]),
        (dict(mode="full"), ValueError, ["mode='full' is not known; choose 'same' or 'valid'"]),
        (dict(mode="valid", kernel=ones(7, 3)), ValueError, ["mode='valid'", "7x3", "6x7"]),
        (dict(per_image=True, image=ones(2, 6, 7), kernel=ones(3, 3, 3)), ValueError,
         ["kernel has shape (3, 3, 3)", "per_image=True", "(2,)"]),
        (dict(per_image=True, image=ones(2, 6, 7)), ValueError, ["kernel has 2 dimensions", "it must have 3, or 4"]),
        (dict(border="edge"), ValueError, ["border='edge'", "'replicate'", "'mirror'", "'BORDER_REFLECT_101'"]),
        (dict(border=5), ValueError, ["border=5", "OpenCV's numbers 0, 1, 2, 3, 4"]),
        (dict(border=True), ValueError, ["border=True"]),
        (dict(border=4.0), ValueError, ["border=4.0"]),
        (dict(anchor=(3, 0)), ValueError, ["anchor=(3, 0)", "3x3"]),
        (dict(anchor=(-2, 0)), ValueError, ["anchor=-2 is below -1"]),
        (dict(anchor=(True, 0)), TypeError, ["anchor=True is not an integer"]),
        (dict(anchor=1), ValueError, ["anchor=1", "(row, column)"]),
        (dict(image=None), TypeError, ["image is a NoneType"]),
        (dict(kernel=None), TypeError, ["kernel=None is no array"]),
        (dict(value="1"), TypeError, ["value='1' is not a number"]),
        (dict(value="red"), TypeError, ["value='red' is not a number"]),
        (dict(value=np.zeros(2)), TypeError, ["value=array([0., 0.]) is not a number"]),
        (dict(value=1e39), ValueError, ["value=1e+39 is beyond float32"]),
        (dict(delta=-(10**400)), ValueError, ["delta=-1000", "is beyond float32"]),
        (dict(delta=(1, 2)), TypeError, ["delta=(1, 2) is not a number"]),
        (dict(kernel=torch.ones(3, 3)), ValueError, ["image is an array of NumPy", "kernel one of PyTorch"]),
        (dict(image=ones(6, 7, dtype=np.int32), kernel=ones(3, 3, dtype=np.int32), delta=0.5), ValueError,
         ["delta=0.5 is no integer: an int32 image and an integer kernel", "kernel * 1.0"]),
        (dict(image=ones(6, 7, dtype=np.int32), kernel=ones(3, 3, dtype=np.int32), value=2**31), ValueError,
         ["value=2147483648 is no int32"]),
    ],
    ids=lambda value: str(list(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_filter2d_refuses(
    arguments: dict[str, Any], kind: type[Exception], parts: list[str], host_device: HostDevice
) -> None:
    with says(kind, *parts):
        filter2d(**{"image": IMAGE, "kernel": KERNEL, "device": "cuda", **arguments})
    assert host_device.launches == []


@pytest.mark.parametrize(
    "dtype, arguments, part",
    [
        ("uint8", {"value": np.nan}, "value=nan is no uint8"),
        ("uint8", {"value": 256}, "value=256 is no uint8"),
        ("int16", {"value": 0.5}, "value=0.5 is no int16"),
        ("float16", {"value": 65520}, "value=65520 is beyond float16"),
        ("uint8", {"delta": np.nan}, "delta=nan is no number, and the result has dtype uint8"),
        ("float32", {"delta": -np.nan, "dtype": "int8"}, "delta=nan is no number, and the result has dtype int8"),
    ],
)
def test_filter2d_refuses_numbers_that_its_types_cannot_hold(dtype: str, arguments: dict[str, Any], part: str) -> None:
    with says(ValueError, part):
        filter2d(ones(6, 7, dtype=dtype), KERNEL, border="constant", **arguments)


@pytest.mark.parametrize(
    "problem, parts",
    [
        (ConvProblem(1, 3, 2, 2, 4, 5, 5), ["the output would be 0x0"]),
        (ConvProblem(1, 3, 8, 8, 4, 3, 3, groups=2), ["in_channels=3", "groups=2"]),
        (ConvProblem(-1, 3, 8, 8, 4, 3, 3), ["n=-1 is below 0"]),
        (ConvProblem(1, 3, -8, 8, 4, 3, 3), ["h=-8 is below 0"]),
        (ConvProblem(1, 3, 8, 8, 4, 3, 3, padding=(0, 0, 0, 2**31)), ["padding=2147483648 is above"]),
        (FilterProblem(1, 8, 8, 3, 3, (5, 5)), ["anchor=(5, 5)", "3x3"]),
        (FilterProblem(1, 8, 8, 3, 3, (-1, -1)), ["anchor=-1 is below 0"]),
        (FilterProblem(-1, 8, 8, 3, 3, (1, 1)), ["batch=-1 is below 0"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", [None, "cuda"])
def test_explain_refuses_a_problem_that_no_call_can_have(problem: Any, parts: list[str], device: Any) -> None:
    with says(ValueError, *parts):
        explain(problem, device=device)


@pytest.mark.parametrize(
    "change, kind, parts",
    [
        ({"dtype": "floaty"}, TypeError, ["x has dtype floaty; supported are float32"]),
        ({"dtype": "int16"}, TypeError, ["x has dtype int16; supported are float32"]),
        ({"dtype": np.dtype("float32")}, TypeError, ["x has dtype float32; supported are"]),
        ({"dtype": 3, "op": "dgrad"}, TypeError, ["grad has dtype 3; supported are float32"]),
        ({"dtype": "int32", "op": "wgrad"}, TypeError, ["x has dtype int32; supported are float32"]),
        ({"precision": "fp16"}, ValueError, ["precision='fp16' is not known; choose one of 'ieee', 'fp32'"]),
        ({"precision": ["fp32"]}, ValueError, ["precision=['fp32'] is not known"]),
        ({"layout": "NWC"}, ValueError, ["layout='NWC' is not known; choose one of 'NCHW', 'NHWC', 'CHWN'"]),
        ({"layout": None}, ValueError, ["layout=None is not known"]),
        ({"op": "sgrad"}, ValueError, ["op='sgrad' is not known; choose one of 'fprop', 'dgrad', 'wgrad'"]),
        ({"activation": "swish"}, ValueError, ["activation='swish' is not known; choose one of None, 'relu'"]),
        ({"scale": 1}, TypeError, ["scale=1 is not True or False"]),
        ({"groups": 0}, ValueError, ["groups=0 is below 1"]),
        ({"groups": 2**31}, ValueError, ["groups=2147483648 is above"]),
        ({"stride": (0, 1)}, ValueError, ["stride=0 is below 1"]),
        ({"stride": (2**63, 1)}, ValueError, ["stride=9223372036854775808 is above"]),
        ({"dilation": (1, -1)}, ValueError, ["dilation=-1 is below 1"]),
        ({"bias": "no"}, TypeError, ["bias='no' is not True or False"]),
        ({"accumulate": 1}, TypeError, ["accumulate=1 is not True or False"]),
        ({"batch_invariant": None}, TypeError, ["batch_invariant=None is not True or False"]),
    ],
    ids=str,
)
def test_a_problem_refuses_what_conv2d_refuses(change: Any, kind: type[Exception], parts: list[str]) -> None:
    with says(kind, *parts):
        replace(CONV, **change)


@pytest.mark.parametrize("dtype", ["floaty", "int64", 3])
def test_an_image_filter_refuses_what_filter2d_refuses(dtype: Any) -> None:
    with says(TypeError, f"image has dtype {dtype}; supported are float32"):
        replace(FILTER, dtype=dtype)
    for border in ("edge", "mirror", None):
        with says(ValueError, f"border={border!r} is not known; choose one of", "'reflect101'"):
            replace(FILTER, border=border)


def test_words_of_a_problem_are_python_own() -> None:
    words = {"precision": "fp32", "layout": "NCHW", "op": "fprop", "dtype": "float32"}
    made = replace(CONV, **{name: np.str_(word) for name, word in words.items()}, bias=np.bool_(True))
    assert made == replace(CONV, bias=True) and made.bias is True
    assert all(type(getattr(made, name)) is str for name in words)


@pytest.mark.parametrize("name", ["n", "c", "h", "w", "k", "r", "s", "groups"])
def test_sizes_of_a_problem_are_integers(name: str) -> None:
    for value in (float("nan"), 2.0, True, None, "2"):
        with says(TypeError, f"{name}={value!r} is not an integer"):
            replace(CONV, **{name: value})
    small = replace(CONV, **{name: np.uint8(2)})
    assert small == replace(CONV, **{name: 2}) and type(getattr(small, name)) is int


def test_the_arithmetic_of_narrow_integers_does_not_overflow() -> None:
    sizes = [200, 3, 200, 200, 4, 3, 3]
    narrow = ConvProblem(*map(np.uint8, sizes), stride=(np.int8(1), 1), padding=[np.uint8(100)] * 4)
    plain = ConvProblem(*sizes, padding=(100,) * 4)
    assert narrow == plain and hash(narrow) == hash(plain) and narrow.flops == plain.flops > 2**31
    assert FilterProblem(*map(np.uint8, (9, 200, 200, 3, 3)), anchor=[1, np.int16(1)]).flops == 2 * 9 * 200 * 200 * 9


@pytest.mark.parametrize("name", ["bias", "scale", "add", "accumulate", "batch_invariant"])
def test_explain_takes_true_and_false_alone(name: str) -> None:
    for value in (3, "no", None):
        with says(TypeError, f"{name}={value!r} is not True or False"):
            explain(replace(CONV, **{name: value}))


@pytest.mark.parametrize("layout, channels", [("NCW", 4), ("NWC", 9), ("CWN", 2)])
def test_messages_on_signals_speak_of_signals(layout: Any, channels: int) -> None:
    x, w = np.ones((2, 4, 9), np.float32), np.ones((3, 3, 3), np.float32)
    with says(ValueError, f"w has 3 channels, but x has in_channels={channels}", f"read as {layout}: "):
        conv1d(x, w, layout=layout)
    with says(ValueError, "a filter of 70000 channels of 3 taps has 210000 products"):
        conv1d(np.ones((1, 70000, 3), np.int8), np.ones((1, 70000, 3), np.int8))


def test_the_work_of_a_problem() -> None:
    """A filter multiplies the channels of its own group."""
    for groups in (1, 2, 4):
        assert ConvProblem(1, 8, 5, 5, 4, 3, 3, groups=groups).flops == 2 * 4 * 9 * (8 // groups) * 9
    accumulated = ConvProblem(2, 8, 5, 5, 4, 3, 3, groups=4, bias=True, accumulate=True)
    assert accumulated.bytes == 4 * (2 * 8 * 25 + 4 * 2 * 9 + 4 + 2 * (2 * 4 * 9))


@pytest.mark.parametrize("name, count", [("stride", 2), ("padding", 4), ("dilation", 2)])
def test_a_problem_takes_numbers_as_a_call_does(name: str, count: int) -> None:
    assert getattr(replace(CONV, **{name: 2}), name) == (2,) * count
    assert replace(CONV, **{name: [2, 1]}) == replace(CONV, **{name: (2, 1)})
    with says(ValueError, f"{name}=(1, 1, 1) must be an integer"):
        replace(CONV, **{name: (1, 1, 1)})
    with says(TypeError, f"{name}=1.0 is not an integer"):
        replace(CONV, **{name: (1.0,) * count})
    with says(TypeError, "anchor=None is not an integer"):
        replace(FILTER, anchor=None)


def test_padding_of_a_problem_in_words() -> None:
    assert ConvProblem(1, 3, 9, 9, 4, 3, 2, padding="same").padding == (1, 1, 0, 1)
    assert ConvProblem(1, 3, 9, 9, 4, 3, 3, stride=2, padding="valid").padding == (0, 0, 0, 0)
    with says(ValueError, "padding='same' needs stride=1, got stride=(2, 2)"):
        ConvProblem(1, 3, 9, 9, 4, 3, 3, stride=2, padding="same")


def test_explain_of_an_operation_without_an_algorithm() -> None:
    told = explain(replace(CONV, op="wgrad", dtype="float64"), device="cuda")
    assert told.chosen is None and "float64" in told.others["direct_weight"][0]
    assert explain(replace(CONV, op="wgrad", accumulate=True)).chosen is None


def test_an_algorithm_of_the_other_device(host_device: HostDevice) -> None:
    x, w = ones(1, 3, 6, 6), ones(8, 3, 3, 3)
    with says(ValueError, "algorithm='tensor_gemm' runs on GPUs, and this call on the CPU"):
        conv2d(x, w, algorithm="tensor_gemm")
    with says(ValueError, "algorithm='im2col' runs on the CPU, and this call on a GPU"):
        conv2d(x, w, algorithm="im2col", device="cuda")


def test_a_filter_larger_than_the_limit(host_device: HostDevice) -> None:
    """Of int32, which transforms cannot filter."""
    image = ones(50, 50, dtype=np.int32)
    with says(NoAlgorithmError, "filter 33x5", "register_cache: ", "33x5", "32x32"):
        filter2d(image, ones(33, 5, dtype=np.int32), separable=False, device="cuda")
    with says(NoAlgorithmError, "filter of rank 1 512x5", "separable: ", "512x5", "511x511"):
        filter2d(image, ones(512, 5, dtype=np.int32), device="cuda")
    with says(NoAlgorithmError, "a block needs", "bytes of shared memory at least"):
        filter2d(image, ones(400, 400, dtype=np.int32), device="cuda")
    with says(NoAlgorithmError, "fourier_tiles: ", "9000x3", "the limit is 8128x8128"):
        filter2d(ones(50, 50), ones(9000, 3), separable=False, device="cuda")
    assert filter2d(ones(50, 50), ones(32, 32), device="cuda").max() == 1024
    assert filter2d(ones(50, 50), ones(33, 33), device="cuda").max() == 1089


@pytest.mark.parametrize("volume", [5, [[[1.0]]], None])
def test_filter3d_calls_its_argument_volume(volume: Any) -> None:
    with says(TypeError, f"volume is a {type(volume).__qualname__}; it must be an array of NumPy"):
        filter3d(volume, ones(1, 1, 1))
