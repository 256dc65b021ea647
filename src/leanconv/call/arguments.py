"""What a caller may write: the rules on single arguments of the public functions. Arrays are not touched here.

Raises ValueError (a value breaks a rule) or TypeError (a thing of the wrong kind), naming argument, value and rule.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from leanconv.images.borders import ALIASES, BORDERS
from leanconv.problem import Layout
from leanconv.runtime import env

Padding = int | Sequence[int] | str

#: Names of the axes in the order of memory, slowest first. Of filters N is the filter, C its channels.
LAYOUTS: tuple[Layout, ...] = ("NCHW", "NHWC", "CHWN")
#: The same of signals, the layouts of images of one row.
LAYOUTS_1D = ("NCW", "NWC", "CWN")
ACTIVATIONS = (None, "relu")

_FLOAT32_MAX = float.fromhex("0x1.fffffep127")


def integer(name: str, value: Any, least: int) -> int:
    """``value`` as an int of at least ``least``; takes whatever is an integer by itself (NumPy's too), no floats."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} is not an integer") from None
    if isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is not an integer")
    if number < least:
        raise ValueError(f"{name}={value!r} is below {least}")
    return number


def workspace_limit(value: Any) -> int | None:
    """The bytes of workspace that a caller allows: the argument, else LEANCONV_WORKSPACE_LIMIT; None for neither."""
    return env.workspace_limit() if value is None else integer("workspace_limit", value, 0)


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


def sizes(name: str, value: Any, count: int) -> tuple[int, ...]:
    """A shape of ``count`` axes, as ints."""
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"{name}={value!r} is no shape; give {count} integers")
    if len(value) != count:
        raise ValueError(f"{name}={tuple(value)} has {len(value)} dimensions; it must have {count}")
    return tuple(integer(name, length, 0) for length in value)


def four_sides(
    padding: Any, window: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Padding as (top, bottom, left, right) for a filter of ``window`` rows and columns."""
    if isinstance(padding, str):
        if padding == "valid":
            return 0, 0, 0, 0
        if padding != "same":
            raise ValueError(f"padding={padding!r} is not known; choose 'same', 'valid' or numbers")
        if stride != (1, 1):
            raise ValueError(f"padding='same' needs stride=1, got stride={stride}")
        vertical, horizontal = (d * (size - 1) for d, size in zip(dilation, window, strict=True))
        # the odd one goes to the end, as in PyTorch
        return vertical // 2, vertical - vertical // 2, horizontal // 2, horizontal - horizontal // 2
    if isinstance(padding, (tuple, list)) and len(padding) == 4:
        top, bottom, left, right = (integer("padding", side, 0) for side in padding)
        return top, bottom, left, right
    if isinstance(padding, (tuple, list)) and len(padding) not in (1, 2):
        raise ValueError(
            f"padding={padding!r} must be an integer, (vertical, horizontal), (top, bottom, left, right), "
            "'same' or 'valid'"
        )
    vertical, horizontal = pair("padding", padding, 0)
    return vertical, vertical, horizontal, horizontal


def one_of(name: str, value: Any, known: Sequence[Any]) -> Any:
    """``value`` if it is among ``known``."""
    if not any(value == item for item in known):
        raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(map(repr, known))}")
    return value


def border_name(border: Any) -> str:
    """Our name of a border, given ours, SciPy's or OpenCV's."""
    if isinstance(border, str):
        name = border.removeprefix("cv2.")
        name = ALIASES.get(name, name)
        if name in BORDERS:
            return name
    known = ", ".join(map(repr, (*BORDERS, *ALIASES)))
    raise ValueError(f"border={border!r} is not known; choose one of {known}")


def anchor_of(anchor: Any, kh: int, kw: int) -> tuple[int, int]:
    """The kernel element that lies on the output pixel; the middle, or right and below of it, by default."""
    if anchor is None:
        return kh // 2, kw // 2
    if not isinstance(anchor, (tuple, list)) or len(anchor) != 2:
        raise ValueError(f"anchor={anchor!r} must be None or two integers (row, column)")
    y, x = (integer("anchor", part, 0) for part in anchor)
    if y >= kh or x >= kw:
        raise ValueError(f"anchor={anchor!r} lies outside the {kh}x{kw} kernel")
    return y, x


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
