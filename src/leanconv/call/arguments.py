"""What a caller may write: the rules on single arguments of the public functions. Arrays are not touched here.

Raises ValueError (a value breaks a rule) or TypeError (a thing of the wrong kind), naming argument, value and rule.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from leanconv.images.borders import ALIASES, BORDERS, OPENCV_NUMBERS, BorderName, OpencvName, ScipyMode
from leanconv.problem import Activation, Layout
from leanconv.runtime import env

Word = TypeVar("Word")
Padding = int | Sequence[int] | Literal["same", "valid"]
#: Our names of borders, SciPy's, OpenCV's, and OpenCV's numbers.
Border = BorderName | ScipyMode | OpencvName | int

#: Names of the axes in the order of memory, slowest first. Of filters N is the filter, C its channels.
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
#: The same of signals, the layouts of images of one row.
Layout1d = Literal["NCW", "NWC", "CWN"]
LAYOUTS_1D: tuple[Layout1d, ...] = get_args(Layout1d)
ACTIVATIONS: tuple[Activation, ...] = (None, "relu")

_PLAIN = (int, str, bool, float, type(None))
#: The largest stride, padding, ...: kernels count them in 32 bits.
MOST = 2**31 - 1
_FLOAT32_MAX = float.fromhex("0x1.fffffep127")


def integer(name: str, value: Any, least: int, most: float = MOST) -> int:
    """``value`` as an int from ``least`` to ``most``; takes what is an integer by itself (NumPy's too), no floats."""
    try:
        index = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} is not an integer") from None
    if isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is not an integer")
    if index < least:
        raise ValueError(f"{name}={value!r} is below {least}")
    if index > most:
        raise ValueError(f"{name}={value!r} is above {most}")
    return index


def plain(value: Any) -> Any:
    """An option in Python's own types: integers of other kinds as int, text as str, also in tuples; all else as it is.

    It is ``value`` itself where nothing changes.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (tuple, list)):
        kind = list if isinstance(value, list) else tuple
        parts = kind(map(plain, value))
        return value if type(value) is kind and all(map(operator.is_, parts, value)) else parts
    if isinstance(value, str):
        return str.__str__(value)
    try:
        return operator.index(value)
    except TypeError:
        return value


def workspace_limit(value: Any) -> int | None:
    """The bytes of workspace that a caller allows: the argument, else LEANCONV_WORKSPACE_LIMIT; None for neither."""
    if value is None:
        return env.workspace_limit()
    if isinstance(value, str):
        raise TypeError(
            f"workspace_limit={value!r} is text; as bytes it is {env.parse_bytes('workspace_limit', value)}"
        )
    return integer("workspace_limit", value, 0, math.inf)


def pair(name: str, value: Any, least: int) -> tuple[int, int]:
    """An int for both axes, or (vertical, horizontal)."""
    if isinstance(value, (tuple, list)):
        if len(value) == 1:
            value = (*value, *value)
        if len(value) != 2:
            raise ValueError(f"{name}={value!r} must be an integer or two: (vertical, horizontal)")
        return integer(name, value[0], least), integer(name, value[1], least)
    number = integer(name, value, least)
    return number, number


def single(name: str, value: Any, least: int) -> int:
    """An int, or a tuple of one."""
    if isinstance(value, (tuple, list)):
        if len(value) != 1:
            raise ValueError(f"{name}={value!r} must be an integer: there is one axis")
        value = value[0]
    return integer(name, value, least)


def sizes(name: str, value: Any) -> tuple[int, ...]:
    """A shape, as ints."""
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"{name}={value!r} is no shape; give a tuple of integers")
    return tuple(integer(name, length, 0, math.inf) for length in value)


def four_sides(
    padding: Any, window: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Padding as (top, bottom, left, right) for a filter of ``window`` rows and columns."""
    if isinstance(padding, str):
        vertical, horizontal = (
            _sides_of_word(padding, size, step, stride) for size, step in zip(window, dilation, strict=True)
        )
        return *vertical, *horizontal
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


def two_sides(padding: Any, window: int, stride: int, dilation: int) -> tuple[int, int]:
    """Padding as (left, right) for a filter of ``window`` taps along one axis."""
    if isinstance(padding, str):
        return _sides_of_word(padding, window, dilation, stride)
    sides = padding if isinstance(padding, (tuple, list)) else (padding,)
    if len(sides) not in (1, 2):
        raise ValueError(f"padding={padding!r} must be an integer, (left, right), 'same' or 'valid'")
    return integer("padding", sides[0], 0), integer("padding", sides[-1], 0)


def _sides_of_word(word: str, window: int, dilation: int, stride: int | tuple[int, int]) -> tuple[int, int]:
    """Padding before and after along one axis, as a word says it. ``stride`` is that of all axes."""
    if word == "valid":
        return 0, 0
    if word != "same":
        raise ValueError(f"padding={word!r} is not known; choose 'same', 'valid' or numbers")
    if stride not in (1, (1, 1)):
        raise ValueError(f"padding='same' needs stride=1, got stride={stride}")
    reach = dilation * max(0, window - 1)
    # the odd one goes to the end, as in PyTorch
    return reach // 2, reach - reach // 2


def one_of(name: str, value: Any, known: Sequence[Word]) -> Word:
    """The one among ``known`` that ``value`` is."""
    for item in known:
        if isinstance(value, type(item)) and value == item:
            return item
    raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(map(repr, known))}")


def yes_or_no(name: str, value: Any) -> bool:
    """``value``, which must be True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r} is not True or False")
    return bool(value)


def border_name(border: Any) -> BorderName:
    """Our name of a border, given ours, SciPy's or OpenCV's, or OpenCV's number."""
    if isinstance(border, str):
        word = border.removeprefix("cv2.")
        word = ALIASES.get(word, word)
        if word in BORDERS:
            return BORDERS[word].name
    elif not isinstance(border, bool) and hasattr(border, "__index__") and operator.index(border) in OPENCV_NUMBERS:
        return OPENCV_NUMBERS[operator.index(border)]
    known = ", ".join(map(repr, (*BORDERS, *ALIASES)))
    numbers = ", ".join(map(str, sorted(OPENCV_NUMBERS)))
    raise ValueError(f"border={border!r} is not known; choose one of {known}, or of OpenCV's numbers {numbers}")


def anchor_of(anchor: Any, kh: int, kw: int) -> tuple[int, int]:
    """The kernel element that lies on the output pixel; the middle, or right and below of it, by default and for -1."""
    if anchor is None:
        return kh // 2, kw // 2
    if not isinstance(anchor, (tuple, list)) or len(anchor) != 2:
        raise ValueError(f"anchor={anchor!r} must be None or (row, column), with -1 for the middle")
    y, x = (integer("anchor", part, -1) for part in anchor)
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


def scalar(name: str, value: Any, dtype: str) -> float | int:
    """``value`` or ``delta`` as a number that ``dtype`` can hold."""
    given = number(name, value)
    if math.isinf(given) and given != value:
        raise ValueError(f"{name}={value!r} is beyond {dtype}, the dtype of the image")
    if dtype == "float32" and _FLOAT32_MAX < abs(given) < math.inf:
        raise ValueError(f"{name}={value!r} is beyond float32, the dtype of the image")
    if dtype != "int32":
        return given
    if not given.is_integer() or not -(2**31) <= given < 2**31:
        raise ValueError(f"{name}={value!r} is no int32, the dtype of the image")
    return int(given)
