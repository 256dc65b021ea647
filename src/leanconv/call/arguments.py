"""What a caller may write, made into problems: every rule on the arguments of the public functions that no algorithm
decides. Works on shapes and names only; arrays are not touched here.

Raises ValueError (a value breaks a rule) or TypeError (a thing of the wrong kind), naming argument, value and rule.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from leanconv import dtypes
from leanconv.problem import BORDERS, PRECISIONS, ConvProblem, FilterProblem, Layout, Problem
from leanconv.runtime import env

Padding = int | Sequence[int] | str

#: Names of the axes in the order of memory, slowest first. Of filters N is the filter, C its channels.
LAYOUTS: tuple[Layout, ...] = ("NCHW", "NHWC", "CHWN")
#: The same of signals, the layouts of images of one row.
LAYOUTS_1D = ("NCW", "NWC", "CWN")
ACTIVATIONS = (None, "relu")

#: Names of the borders in SciPy's ndimage and in OpenCV (with or without ``cv2.``). SciPy's ``reflect``, ``constant``
#: and ``wrap`` are ours by the same name; its ``mirror`` is OpenCV's BORDER_REFLECT_101 and our reflect101.
BORDER_ALIASES = {
    "nearest": "replicate",
    "mirror": "reflect101",
    "grid-mirror": "reflect",
    "grid-wrap": "wrap",
    "grid-constant": "constant",
    "BORDER_CONSTANT": "constant",
    "BORDER_REPLICATE": "replicate",
    "BORDER_REFLECT": "reflect",
    "BORDER_REFLECT_101": "reflect101",
    "BORDER_REFLECT101": "reflect101",
    "BORDER_DEFAULT": "reflect101",
    "BORDER_WRAP": "wrap",
}


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


def check_dtypes(arrays: dict[str, str], taken: Sequence[str] = dtypes.LAYERS) -> str:
    """The dtype that all named arrays share; it must be one that layers take, or filters (`dtypes.FILTERS`)."""
    (first, dtype), *others = arrays.items()
    if dtype not in taken:
        *most, last = (name for name in taken if name not in dtypes.CPU_ONLY)
        raise TypeError(
            f"{first} has dtype {dtype}; supported are {', '.join(most)} and {last}, and "
            f"{' and '.join(dtypes.CPU_ONLY)} on the CPU only"
        )
    for name, other in others:
        if other != dtype:
            raise TypeError(f"{name} has dtype {other} and {first} {dtype}; they must be the same")
    return dtype


def conv_problem(
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    bias_shape: Sequence[int] | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: Any,
    *,
    dtype: str,
    layout: Layout,
    precision: str,
    activation: str | None,
    name: str = "x",
) -> ConvProblem:
    """The problem of a convolution; ``x_shape`` is (n, c, h, w) and ``w_shape`` (k, c / groups, r, s).

    Messages call ``x_shape`` by ``name``.
    """
    check_axes({name: x_shape, "w": w_shape}, 4)
    one_of("precision", precision, PRECISIONS)
    one_of("activation", activation, ACTIVATIONS)
    groups = integer("groups", groups, 1)
    stride, dilation = pair("stride", stride, 1), pair("dilation", dilation, 1)
    n, c, h, w = x_shape
    k, group_c, r, s = w_shape
    if min(c, h, w) < 1:
        raise ValueError(
            f"{name} has {n} images of {c} channels, {h} rows and {w} columns; only its batch may be empty"
        )
    if min(w_shape) < 1:
        raise ValueError(f"w has {k} filters of {group_c} channels, {r} rows and {s} columns; it must not be empty")
    if c % groups:
        raise ValueError(f"in_channels={c} is not divisible by groups={groups}")
    if k % groups:
        raise ValueError(f"out_channels={k} is not divisible by groups={groups}")
    if group_c != c // groups:
        raise ValueError(
            f"w has {group_c} channels, but {name} has in_channels={c} and groups={groups}: "
            f"each filter must have {c // groups}"
        )
    if bias_shape is not None and tuple(bias_shape) != (k,):
        raise ValueError(f"bias has shape {tuple(bias_shape)}; it must have shape ({k},), a number a filter")
    sides = four_sides(padding, (r, s), stride, dilation)
    problem = ConvProblem(
        n=n, c=c, h=h, w=w, k=k, r=r, s=s, stride=stride, padding=sides, dilation=dilation, groups=groups, dtype=dtype,
        layout=layout, precision=precision, bias=bias_shape is not None,
        activation="relu" if activation == "relu" else None,
    )  # fmt: skip
    if problem.p < 1 or problem.q < 1:
        top, bottom, left, right = sides
        raise ValueError(
            f"the output would be {max(problem.p, 0)}x{max(problem.q, 0)}: a {r}x{s} filter with dilation {dilation} "
            f"covers {dilation[0] * (r - 1) + 1}x{dilation[1] * (s - 1) + 1} pixels, the padded input has "
            f"{h + top + bottom}x{w + left + right}"
        )
    return problem


def check_axes(shapes: dict[str, Sequence[int]], axes: int) -> None:
    """Raise ValueError unless all named shapes have that many axes."""
    for name, shape in shapes.items():
        if len(shape) != axes:
            raise ValueError(f"{name} has {len(shape)} dimensions, shape {tuple(shape)}; it must have {axes}")


def conv1d_problem(
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    bias_shape: Sequence[int] | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: Any,
    **options: Any,
) -> ConvProblem:
    """The problem of a convolution along one axis, as images of one row; ``x_shape`` is (n, c, w).

    ``padding`` is a number, (left, right) or a word; everything else is as in `conv_problem`.
    """
    check_axes({"x": x_shape, "w": w_shape}, 3)
    if isinstance(padding, (tuple, list)):
        if len(padding) not in (1, 2):
            raise ValueError(f"padding={padding!r} must be an integer, (left, right), 'same' or 'valid'")
        padding = (0, 0, padding[0], padding[-1])
    elif not isinstance(padding, str):
        padding = (0, padding)
    (n, c, w), (k, group_c, s) = x_shape, w_shape
    return conv_problem(
        (n, c, 1, w), (k, group_c, 1, s), bias_shape, (1, single("stride", stride, 1)), padding,
        (1, single("dilation", dilation, 1)), groups, **options,
    )  # fmt: skip


def border_name(border: Any) -> str:
    """Our name of a border, given ours, SciPy's or OpenCV's."""
    if isinstance(border, str):
        name = border.removeprefix("cv2.")
        name = BORDER_ALIASES.get(name, name)
        if name in BORDERS:
            return name
    known = ", ".join(map(repr, (*BORDERS, *BORDER_ALIASES)))
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


def scalar(name: str, value: Any, dtype: str) -> float | int:
    """``value`` or ``delta`` as a number that ``dtype`` can hold."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}={value!r} is not a number") from None
    except OverflowError:
        raise ValueError(f"{name}={value!r} is beyond {dtype}, the dtype of the image") from None
    if dtype == "float32" and _FLOAT32_MAX < abs(number) < math.inf:
        raise ValueError(f"{name}={value!r} is beyond float32, the dtype of the image")
    if dtype != "int32":
        return number
    if not number.is_integer() or not -(2**31) <= number < 2**31:
        raise ValueError(f"{name}={value!r} is no int32, the dtype of the image")
    return int(number)


def filter_problem(
    image_shape: Sequence[int], kernel_shape: Sequence[int], border: Any, anchor: Any, dtype: str
) -> FilterProblem:
    """The problem of filtering contiguous images (…, h, w)."""
    if len(image_shape) < 2:
        raise ValueError(f"image has shape {tuple(image_shape)}; it must have 2 dimensions or more (..., h, w)")
    if len(kernel_shape) != 2:
        raise ValueError(f"kernel has {len(kernel_shape)} dimensions, shape {tuple(kernel_shape)}; it must have 2")
    kh, kw = kernel_shape
    if kh < 1 or kw < 1:
        raise ValueError(f"kernel has shape {tuple(kernel_shape)}; it must not be empty")
    *leading, h, w = image_shape
    batch = 1
    for length in leading:
        batch *= length
    return FilterProblem(
        batch=batch, h=h, w=w, kh=kh, kw=kw, anchor=anchor_of(anchor, kh, kw), border=border_name(border), dtype=dtype,
        x_pitch=w, x_step=h * w, y_pitch=w, y_step=h * w,
    )  # fmt: skip


def check_problem(problem: Problem) -> None:
    """Raise what a call with the arguments of ``problem`` would; a caller may have written it by hand."""
    if isinstance(problem, ConvProblem):
        one_of("layout", problem.layout, LAYOUTS)
        if problem.op == "dgrad" and (problem.bias or problem.activation):
            raise ValueError("op='dgrad', the gradient of a layer's input, has no bias and no activation")
        integer("groups", problem.groups, 1)
        conv_problem(
            (problem.n, problem.c, problem.h, problem.w), (problem.k, problem.group_c, problem.r, problem.s), None,
            problem.stride, problem.padding, problem.dilation, problem.groups, dtype=problem.dtype,
            layout=problem.layout, precision=problem.precision, activation=problem.activation,
        )  # fmt: skip
    else:
        filter_problem(
            (problem.batch, problem.h, problem.w), (problem.kh, problem.kw), problem.border, problem.anchor,
            problem.dtype,
        )  # fmt: skip
