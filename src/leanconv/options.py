"""What a caller requests besides arrays: `LayerOptions`, `FilterOptions`, and the rules on single arguments.

Options are frozen and hashable: the same object is the argument that a call is resolved with and a part of the key that
finds its ready call. Numbers are in one form, so equal calls have equal options: strides and dilations are pairs,
padding has four sides or is a word, NumPy's integers are Python's.

Raises ValueError (a value breaks a rule) or TypeError (a thing of the wrong kind), naming argument, value and rule.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np

from leanconv.dtypes import DTYPES, FILTERS, DtypeName, is_integer
from leanconv.images.borders import ALIASES, BORDERS, OPENCV_NUMBERS, BorderName, OpencvName, ScipyMode
from leanconv.runtime import env
from leanconv.runtime.env import raw_workspace_limit

#: The operations of a layer: forward, gradient of the input, gradient of the filters.
Op = Literal["fprop", "dgrad", "wgrad"]
#: The order of the axes in memory, slowest first. Of filters N is the filter, C its channels.
Layout = Literal["NCHW", "NHWC", "CHWN"]
#: The same of signals, the layouts of images of one row; and of volumes, which have slices before the rows.
Layout1d = Literal["NCW", "NWC", "CWN"]
Layout3d = Literal["NCDHW", "NDHWC"]
#: What is applied to each result: one of `ACTIVATIONS`, or a pair of one in `ACTIVATION_NUMBERS` and its number.
Activation = str | tuple[str, float] | None
#: Whether filters stay packed between calls: no; yes, with results of the same bits; yes, with what is quickest then.
Kept = Literal["", "same bits", "quickest"]
#: Precision levels, strictest first. An algorithm may serve its own level and every looser one.
Precision = Literal["ieee", "fp32", "relaxed", "tf32"]
Padding = int | Sequence[int] | Literal["same", "valid"]
#: Our names of borders, SciPy's, OpenCV's, and OpenCV's numbers.
Border = BorderName | ScipyMode | OpencvName | int

OPS: tuple[Op, ...] = get_args(Op)
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
#: By the number of axes: what a function calls the layouts of the same place in `LAYOUTS`.
LAYOUTS_OF: dict[int, tuple[str, ...]] = {1: get_args(Layout1d), 2: LAYOUTS, 3: get_args(Layout3d)}
#: PyTorch's functions of these names; ``gelu_tanh`` is gelu with ``approximate="tanh"``.
ACTIVATIONS: tuple[str | None, ...] = (
    None, "relu", "relu6", "leaky_relu", "elu", "gelu", "gelu_tanh", "silu", "hardswish", "sigmoid", "tanh",
)  # fmt: skip
#: Those with a number, PyTorch's ``negative_slope`` and ``alpha``, and its default.
ACTIVATION_NUMBERS = {"leaky_relu": 0.01, "elu": 1.0}
#: Those of layers of integers.
INTEGER_ACTIVATIONS = (None, "relu", "relu6")
#: What the pixels of a window make.
Reduction = Literal["sum", "min", "max", "median"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

#: The largest stride, padding, ...: kernels count them in 32 bits.
MOST = 2**31 - 1
#: The largest finite numbers of types that are narrower than Python's own.
_LARGEST = {"float32": float.fromhex("0x1.fffffep127"), "float16": 65504.0, "bfloat16": float.fromhex("0x1.fep127")}
Word = TypeVar("Word")


class Function(NamedTuple):
    """A public function on layers."""

    op: Op
    #: 2 for images, 1 for signals, 3 for volumes
    axes: int
    #: what it calls its two arrays
    names: tuple[str, str]
    #: what it calls the shape of its result, where the caller gives it
    shape: str = ""


FUNCTIONS = {
    "conv2d": Function("fprop", 2, ("x", "w")),
    "conv1d": Function("fprop", 1, ("x", "w")),
    "conv3d": Function("fprop", 3, ("x", "w")),
    "conv2d_input": Function("dgrad", 2, ("grad", "w"), "input_shape"),
    "conv1d_input": Function("dgrad", 1, ("grad", "w"), "input_shape"),
    "conv3d_input": Function("dgrad", 3, ("grad", "w"), "input_shape"),
    "conv2d_weight": Function("wgrad", 2, ("x", "grad"), "weight_shape"),
    "conv1d_weight": Function("wgrad", 1, ("x", "grad"), "weight_shape"),
    "conv3d_weight": Function("wgrad", 3, ("x", "grad"), "weight_shape"),
}
_BY_OP = {(function.op, function.axes): name for name, function in FUNCTIONS.items()}
#: What they call the first array that an operation reads.
FIRST: dict[Op, str] = {function.op: function.names[0] for function in FUNCTIONS.values()}
#: The usual mode. It is looked for by identity, which is quick: an array is compared element by element.
_SAME = "same"
#: Quicker than a NamedTuple's own constructor.
_new_tuple = tuple.__new__


class LayerOptions(NamedTuple):
    """All that a caller of a function on layers requests besides arrays; made by `layer_options`."""

    #: one of `FUNCTIONS`
    function: str
    #: of rows and columns; of volumes that of slices comes first, as in padding and dilation
    stride: tuple[int, ...]
    #: top, bottom, left, right; or "same" or "valid"
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int
    layout: Any = None
    algorithm: str = "auto"
    precision: Precision = "fp32"
    activation: Activation = None
    device: object = None
    #: bytes; None where neither the caller nor the environment says
    workspace_limit: int | None = None
    batch_invariant: bool = False
    #: of the result, as the caller has given it: of gradients
    shape: tuple[int, ...] | None = None
    #: whether the gradient of the bias comes with that of the filters
    grad_bias: bool = False
    #: whether the caller computes gradients, as `leanconv.torch` does: tensors that require one are taken
    differentiated: bool = False

    def of(self, op: Op, shape: tuple[int, ...] | None = None) -> LayerOptions:
        """The same layer's options for another operation; a gradient of filters knows no ``batch_invariant``."""
        function = _BY_OP[op, FUNCTIONS[self.function].axes]
        return self._replace(function=function, shape=shape, batch_invariant=self.batch_invariant and op != "wgrad")


class FilterOptions(NamedTuple):
    """All that a caller of `filter2d` requests besides arrays and numbers; made by `filter_options`."""

    border: BorderName
    anchor: tuple[int, int] | None
    device: object = None
    #: of the result; None where the caller does not say
    dtype: DtypeName | None = None
    channels_last: bool | None = None
    #: only windows that lie inside the image
    valid: bool = False
    #: each image has a kernel of its own
    per_image: bool = False
    #: rows and columns of a window whose kernel is not given whole, but as products of a column and a row
    window: tuple[int, int] | None = None
    #: or has one weight: what the pixels of the window make
    reduction: Reduction | None = None
    #: images are slices of volumes, and so are kernels; this is the anchor among slices, -1 for the middle
    slice_anchor: int | None = None
    #: bytes; None where the environment does not say
    workspace_limit: int | None = None


Options = LayerOptions | FilterOptions


def layer_options(
    function: str, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: Any = 1, layout: Any = None,
    algorithm: Any = "auto", precision: Any = "fp32", activation: Any = None, device: Any = None,
    workspace_limit: Any = None, batch_invariant: Any = False, shape: Any = None, grad_bias: Any = False,
    differentiated: bool = False,
) -> LayerOptions:  # fmt: skip
    """The options of a call of ``function``. Words are not looked at here, only numbers."""
    # NOTE: each warm call comes by: what was checked once is known by its identity, which tells 1 from True and 1.0
    strides, paddings = _CHECKED[function]
    found = strides.get(id(stride))
    stride = found[1] if found and found[0] is stride else _checked(function, "stride", stride)
    found = strides.get(id(dilation))
    dilation = found[1] if found and found[0] is dilation else _checked(function, "dilation", dilation)
    known = paddings.get(id(padding))
    padding = known[1] if known and known[0] is padding else _checked(function, "padding", padding)
    activation = tuple(activation) if type(activation) is list else activation  # a list is no key
    if type(groups) is not int or not 1 <= groups <= MOST:
        groups = integer("groups", groups, 1)
    if batch_invariant is not False and batch_invariant is not True:
        batch_invariant = yes_or_no("batch_invariant", batch_invariant)
    if grad_bias is not False and grad_bias is not True:
        grad_bias = yes_or_no("grad_bias", grad_bias)
    if workspace_limit is None:
        raw = raw_workspace_limit()
        if raw is not None:
            workspace_limit = _parsed_limit(raw)
    elif type(workspace_limit) is not int or workspace_limit < 0:
        workspace_limit = limit_of(workspace_limit)
    if shape is not None:
        shape = sizes(FUNCTIONS[function].shape, shape)
    given = (
        function, stride, padding, dilation, groups, layout, algorithm, precision, activation, device, workspace_limit,
        batch_invariant, shape, grad_bias, differentiated,
    )  # fmt: skip
    return _new_tuple(LayerOptions, given)


#: For each number of axes, by identity, the strides (dilations) and the paddings that were checked, and what they mean.
_Known = dict[int, tuple[object, Any]]
_STORES: dict[int, tuple[_Known, _Known]] = {1: ({}, {}), 2: ({}, {}), 3: ({}, {})}
_CHECKED = {name: _STORES[function.axes] for name, function in FUNCTIONS.items()}
_MOST_CHECKED = 1024


def _checked(function: str, name: str, value: Any) -> Any:
    """What an option means, kept if it can never change. The object is kept too, so that no other has its identity."""
    (strides, paddings), axes = _CHECKED[function], FUNCTIONS[function].axes
    store = paddings if name == "padding" else strides
    if name == "padding":
        other = _sides_1d if axes == 1 else _sides_3d
        result: Any = sides_of(value) if axes == 2 or isinstance(value, str) else other(value)
    else:
        result = (1, single(name, value, 1)) if axes == 1 else each_axis(name, value, 1, axes)
    if type(value) in (int, str) or (type(value) is tuple and all([type(each) is int for each in value])):
        if len(store) >= _MOST_CHECKED:
            store.clear()
        store[id(value)] = (value, result)
    return result


def filter_options(
    border: Any = "reflect101", anchor: Any = None, device: Any = None, dtype: Any = None, channels_last: Any = None,
    mode: Any = "same", per_image: Any = False,
) -> FilterOptions:  # fmt: skip
    if type(border) is not str or border not in BORDERS:
        border = border_name(border)
    if anchor is not None:
        if not isinstance(anchor, (tuple, list)) or len(anchor) != 2:
            raise ValueError(f"anchor={anchor!r} must be None or (row, column), with -1 for the middle")
        anchor = (integer("anchor", anchor[0], -1), integer("anchor", anchor[1], -1))
    if dtype is not None and (type(dtype) is not str or dtype not in FILTERS):
        dtype = dtype_name(dtype)
    if channels_last is not None and type(channels_last) is not bool:
        channels_last = yes_or_no("channels_last", channels_last)
    if type(per_image) is not bool:
        per_image = yes_or_no("per_image", per_image)
    if mode is not _SAME and (not isinstance(mode, str) or (mode != "valid" and mode != "same")):
        raise ValueError(f"mode={mode!r} is not known; choose 'same' or 'valid'")
    raw = raw_workspace_limit()
    limit = None if raw is None else _parsed_limit(raw)
    given = border, anchor, device, dtype, channels_last, mode == "valid", per_image, None, None, None, limit
    return _new_tuple(FilterOptions, given)


def dtype_name(dtype: Any) -> DtypeName:
    """Our name of an element type of filters: a name, or a dtype of NumPy, CuPy or PyTorch."""
    name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        with suppress(TypeError):
            name = np.dtype(dtype).name
    if name not in FILTERS:
        raise TypeError(f"dtype={dtype!r} is no type of a result; supported are {', '.join(FILTERS)}")
    return DTYPES[name].name


@lru_cache(maxsize=64)
def _parsed_limit(raw: Any) -> int | None:
    """What the variable says; ``raw`` is its key here."""
    return env.workspace_limit()


def limit_of(value: object) -> int | None:
    """The bytes of workspace that a caller allows: the argument, else LEANCONV_WORKSPACE_LIMIT; None for neither."""
    if value is None:
        return env.workspace_limit()
    if isinstance(value, str):
        count = env.parse_bytes("workspace_limit", value)
        raise TypeError(f"workspace_limit={value!r} is text; as bytes it is {count}")
    return integer("workspace_limit", value, 0, math.inf)


# Rules on single arguments


def integer(name: str, value: object, least: float, most: float = MOST) -> int:
    """``value`` as an int from ``least`` to ``most``; takes what is an integer by itself (NumPy's too), no floats."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        index = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}={value!r} is not an integer") from None
    if index < least:
        raise ValueError(f"{name}={value!r} is below {least}")
    if index > most:
        raise ValueError(f"{name}={value!r} is above {most}")
    return index


#: What the axes of images and volumes are called in messages.
_AXES = {2: "two: (vertical, horizontal)", 3: "three: (depth, vertical, horizontal)"}


def pair(name: str, value: object, least: int, of: str = "") -> tuple[int, int]:
    """An int for both axes, or (vertical, horizontal); or for another pair, which messages call ``of``."""
    first, second = each_axis(name, value, least, of=of)
    return first, second


def each_axis(name: str, value: object, least: int, axes: int = 2, of: str = "") -> tuple[int, ...]:
    """An int for all axes of images, or volumes, or one for each; ``of`` as in `pair`."""
    if isinstance(value, (tuple, list)):
        if len(value) == 1:
            value = (*value,) * axes
        if len(value) != axes:
            raise ValueError(f"{name}={value!r} must be an integer or {of or _AXES[axes]}")
        return tuple([integer(name, each, least) for each in value])
    return (integer(name, value, least),) * axes


def single(name: str, value: object, least: int) -> int:
    """An int, or a tuple of one."""
    if isinstance(value, (tuple, list)):
        if len(value) != 1:
            raise ValueError(f"{name}={value!r} must be an integer: there is one axis")
        value = value[0]
    return integer(name, value, least)


def sizes(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)):
        if len(shape := tuple(getattr(value, "shape", ()))) > 1:
            raise TypeError(f"{name} is an array of shape {shape}, and must be a tuple: arrays come first here")
        raise TypeError(f"{name}={value!r} is no shape; give a tuple of integers")
    return tuple([each if type(each) is int and each >= 0 else integer(name, each, 0, math.inf) for each in value])


def sides_of(padding: object) -> tuple[int, int, int, int] | str:
    """Padding as (top, bottom, left, right), or the word that it is."""
    if isinstance(padding, str):
        return padding_word(padding)
    if isinstance(padding, (tuple, list)) and len(padding) == 4:
        top, bottom, left, right = (integer("padding", side, 0) for side in padding)
        return top, bottom, left, right
    if isinstance(padding, (tuple, list)) and len(padding) not in (1, 2):
        raise ValueError(
            f"padding={padding!r} must be an integer, (vertical, horizontal), (top, bottom, left, right), "
            "'same' or 'valid'"
        )
    down, across = pair("padding", padding, 0)
    return down, down, across, across


def _sides_1d(padding: object) -> tuple[int, ...]:
    """Padding of signals, a number or (left, right), as that of images of one row."""
    sides = padding if isinstance(padding, (tuple, list)) else (padding,)
    if len(sides) not in (1, 2):
        raise ValueError(f"padding={padding!r} must be an integer, (left, right), 'same' or 'valid'")
    return 0, 0, integer("padding", sides[0], 0), integer("padding", sides[-1], 0)


def _sides_3d(padding: object) -> tuple[int, ...]:
    """Padding of volumes as (front, back, top, bottom, left, right)."""
    if isinstance(padding, (tuple, list)) and len(padding) == 6:
        return tuple([integer("padding", side, 0) for side in padding])
    if isinstance(padding, (tuple, list)) and len(padding) not in (1, 3):
        raise ValueError(
            f"padding={padding!r} must be an integer, (depth, vertical, horizontal), (front, back, top, bottom, left, "
            "right), 'same' or 'valid'"
        )
    return tuple([side for side in each_axis("padding", padding, 0, 3) for _ in range(2)])


def padding_word(padding: str) -> str:
    if padding not in ("same", "valid"):
        raise ValueError(f"padding={padding!r} is not known; choose 'same', 'valid' or numbers")
    return "same" if padding == "same" else "valid"  # a string that is no subclass, in words that Dynamo knows


def sides_for(
    padding: tuple[int, ...] | str, window: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    """Padding before and after each axis, as (top, bottom, left, right), for a filter of ``window`` taps along each."""
    if not isinstance(padding, str):
        return padding
    if padding == "valid":
        return (0, 0) * len(window)
    if any(step != 1 for step in stride):
        raise ValueError(f"padding='same' needs stride=1, got stride={stride}")
    covered = [step * max(0, taps - 1) for step, taps in zip(dilation, window, strict=True)]
    # the odd one goes to the end, as in PyTorch
    return tuple([side for both in covered for side in (both // 2, both - both // 2)])


def one_of(name: str, value: object, known: Sequence[Word]) -> Word:
    for item in known:
        if isinstance(value, type(item)) and value == item:
            return item
    raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(map(repr, known))}")


def activation_of(value: Any) -> str | None:
    """An activation in one form: None, its name, or its name and its number as ``leaky_relu:0.2``.

    Raises ValueError for what is none, TypeError for a number that is none.
    """
    if value is None or (type(value) is str and value in ACTIVATIONS):
        return value
    name, given = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value, None)
    if isinstance(name, str) and given is None and name.partition(":")[0] in ACTIVATION_NUMBERS and ":" in name:
        name, _, text = name.partition(":")
        try:
            given = float(text)
        except ValueError:
            raise ValueError(f"activation={value!r}: {text!r} is not a number") from None
    if not (name is None or isinstance(name, str)) or name not in ACTIVATIONS:
        raise ValueError(f"activation={value!r} is not known; choose one of {', '.join(map(repr, ACTIVATIONS))}")
    if given is None:
        return name
    if name not in ACTIVATION_NUMBERS:
        raise ValueError(f"activation={value!r}: {name!r} has no number; {' and '.join(ACTIVATION_NUMBERS)} have one")
    return _with_number(name, number("activation", given))


@lru_cache(maxsize=256)
def _with_number(name: str, given: float) -> str:
    with np.errstate(over="ignore"):
        single = np.float32(given)
    if not np.isfinite(single):
        raise ValueError(f"activation={(name, given)!r}: its number must be finite in float32")
    return name if single == np.float32(ACTIVATION_NUMBERS[name]) else f"{name}:{single!s}"


def activation_parts(activation: str) -> tuple[str, float]:
    """The name of an activation as `activation_of` returns it, and its number, 0 where it has none."""
    name, _, text = activation.partition(":")
    return name, float(text) if text else ACTIVATION_NUMBERS.get(name, 0.0)


def yes_or_no(name: str, value: object) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r} is not True or False")
    return bool(value)


def device_index(device: object, *, gpu_only: bool = False) -> int:
    """The number in ``"cuda"`` or ``"cuda:1"``; ValueError for others, which names the CPU too unless ``gpu_only``."""
    match = re.fullmatch(r"cuda(?::(\d+))?", str(device))
    if match is None:
        known = "'cuda' or 'cuda:N'" if gpu_only else "'cuda', 'cuda:N', 'cpu', or None for where the arrays lie"
        raise ValueError(f"device={device!r} is {'no GPU' if gpu_only else 'not known'}; give {known}")
    return int(match.group(1) or 0)


def border_name(border: Any) -> BorderName:
    """Our name of a border, given ours, SciPy's or OpenCV's, or OpenCV's number."""
    if isinstance(border, str):
        word = border.removeprefix("cv2.")
        if (word := ALIASES.get(word, word)) in BORDERS:
            return BORDERS[word].name
    elif not isinstance(border, bool):
        with suppress(TypeError, KeyError):  # what is no integer, as most arrays; or none of these
            return OPENCV_NUMBERS[operator.index(border)]
    known = ", ".join(map(repr, (*BORDERS, *ALIASES)))
    numbers = ", ".join(map(str, sorted(OPENCV_NUMBERS)))
    raise ValueError(f"border={border!r} is not known; choose one of {known}, or of OpenCV's numbers {numbers}")


def anchor_of(anchor: tuple[int, int] | None, kh: int, kw: int) -> tuple[int, int]:
    """The kernel element that lies on the output pixel; the middle, or right and below of it, by default and for -1."""
    if anchor is None:
        return kh // 2, kw // 2
    y, x = anchor
    if y >= kh or x >= kw:
        raise ValueError(f"anchor={anchor!r} lies outside the {kh}x{kw} kernel")
    return kh // 2 if y == -1 else y, kw // 2 if x == -1 else x


def number(name: str, value: Any) -> float:
    """``value`` as a float, infinite where it is beyond float64; text is no number."""
    try:
        if isinstance(value, (str, bytes, bytearray)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}={value!r} is not a number") from None
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def filter_numbers(value: Any, delta: Any, dtype: str, sums: str, result: str) -> tuple[float | int, float | int]:
    """``value``, a pixel of the image, and ``delta``, which is added to its sums, as numbers that a kernel takes."""
    pixel = _scalar("value", value, dtype, "image")
    if sums == "int32" and math.isfinite(given := number("delta", delta)) and not given.is_integer():
        raise ValueError(
            f"delta={delta!r} is no integer: an int32 image and an integer kernel make sums in int32; dtype='float64' "
            "makes them in float64, as does, where a kernel is given, one of fractions, kernel * 1.0"
        )
    added = _scalar("delta", delta, sums, "sums")
    if math.isnan(added) and is_integer(result):
        raise ValueError(f"delta={delta!r} is no number, and the result has dtype {result}")
    return pixel, added


def _scalar(name: str, value: Any, dtype: str, of: str) -> float | int:
    """A number that ``dtype`` can hold."""
    given, kind = number(name, value), DTYPES[dtype]
    if (math.isinf(given) and given != value) or _LARGEST.get(dtype, math.inf) < abs(given) < math.inf:
        raise ValueError(f"{name}={value!r} is beyond {dtype}, the dtype of the {of}")
    if not is_integer(dtype):
        return given
    if not given.is_integer() or not kind.low <= given <= kind.high:
        raise ValueError(f"{name}={value!r} is no {dtype}, the dtype of the {of}")
    return int(given)
