"""Problems in words, as command lines and tuning tables have them.

A problem in words is ``conv:`` or ``filter:`` and a list of settings between commas, in any order, none of them twice
with different values::

    conv:n128,c64,h56,w56,k64,r3,s3,stride1,pad1,NHWC
    conv:n1,c32,h112,k32,r3,stride2x1,pad0x1x0x1,dil2,groups32,bias,relu
    conv:n8,c64,d16,h56,k64,t3,r3,stride1x2x2,pad1,NDHWC
    filter:8192x8192,7x7
    filter:480x640,5x1,batch16,anchor0x0,replicate,int32
    filter:1080x1920,3x3,channels3,uint8,int16
    filter:64x256x256,3x3x3,valid
    filter:8192x8192,31x31,separable

For ``conv``: ``n c h w k r s`` are the paper letters (n is 1, w is h and s is r where they are left out). ``stride``,
``dil`` and ``pad`` take one number, two as ``rows x columns``, and ``pad`` four as ``top x bottom x left x right``.
Layers of volumes have ``d`` slices and filters of ``t``, and their numbers are one for all axes, three as
``depth x rows x columns``, or six of ``pad``, front and back before the others; their layouts are ``NCDHW`` and
``NDHWC``. Then ``groups``, and the words ``NCHW``, ``NHWC``, ``CHWN``, a precision (``ieee``, ``fp32``, ``relaxed``,
``tf32``), ``bias``, ``scale``, ``add``, an activation (``relu``, ``silu``, ``leaky_relu:0.2``) and ``accumulate``, the
element type (``float16``, ``bfloat16``), and the operation where it is not the forward pass: ``dgrad``, the gradient of
the input, or ``wgrad``, that of the filters.
For ``filter``: the image's height x width and the filter's height x width, in this order, with the slices of volumes
before them; ``batch``, ``filters`` and
``channels`` (of a pixel), how many there are; ``anchor`` as row x column; then a border (``constant``, ``replicate``,
``reflect``, ``reflect101``, ``wrap``) or ``valid``, ``per-image``, and the image's type and the result's, if it is
another; a third type is that of the sums of int32. A filter may be given as a column times a row, ``separable``, or as
a sum of two such products, ``rank2``; or it has no weights: ``box``,
``erode``, ``dilate`` or ``median``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, get_args

from leanconv.dtypes import FILTERS, LAYERS
from leanconv.images.borders import BORDERS
from leanconv.options import (
    ACTIVATION_NUMBERS,
    ACTIVATIONS,
    LAYOUTS,
    LAYOUTS_OF,
    PRECISIONS,
    Op,
    Reduction,
    activation_of,
)
from leanconv.problem import ConvProblem, FilterProblem, Problem


def dense_filter(
    batch: int,
    h: int,
    w: int,
    kh: int,
    kw: int,
    border: Any = "reflect101",
    dtype: Any = "float32",
    anchor: tuple[int, int] | None = None,
    filters: int = 1,
    **rest: Any,
) -> FilterProblem:
    """A FilterProblem on images without gaps between rows, anchored at the filter's centre by default."""
    anchor = anchor or (kh // 2, kw // 2)
    return FilterProblem(batch, h, w, kh, kw, anchor, border, dtype, filters=filters, **rest).dense()


def parse_problem(text: str) -> Problem:
    """The problem that ``text`` describes, in the words this module's documentation lists.

    Raises ValueError naming the part that is not understood or missing.

    >>> parse_problem("conv:n8,c64,h56,k64,r3,pad1").y_shape
    (8, 64, 56, 56)
    """
    kind, colon, rest = text.partition(":")
    tokens = [token.strip() for token in rest.split(",") if token.strip()]
    if not colon or kind not in ("conv", "filter"):
        raise ValueError(f"problem={text!r} must start with 'conv:' or 'filter:'")
    return _parse_conv(text, tokens) if kind == "conv" else _parse_filter(text, tokens)


def format_problem(problem: Problem) -> str:
    """``problem`` in the words that parse_problem reads, defaults left out."""
    if problem.kind == "filter2d":
        return _format_filter(problem)
    deep, axes = problem.is_volume, 3 if problem.is_volume else 2
    stride, dilation = (problem.stride_d, *problem.stride)[-axes:], (problem.dilation_d, *problem.dilation)[-axes:]
    padding = (*problem.padding_d, *problem.padding)[-2 * axes :]
    words = [f"{letter}{getattr(problem, letter)}" for letter in ("ncdhwktrs" if deep else "nchwkrs")]
    words += ["stride" + _numbers(stride)] if set(stride) != {1} else []
    sides = padding[::2] if padding[::2] == padding[1::2] else padding
    words += ["pad" + _numbers(sides)] if any(padding) else []
    words += ["dil" + _numbers(dilation)] if set(dilation) != {1} else []
    words += [f"groups{problem.groups}"] if problem.groups != 1 else []
    words.append(LAYOUTS_OF[3][LAYOUTS.index(problem.layout)] if deep else problem.layout)
    words += [word for word in (problem.precision, problem.dtype) if word not in ("fp32", "float32")]
    words += [word for word in ("bias", "scale", "add") if getattr(problem, word)]
    words += [problem.activation] if problem.activation else []
    words += [problem.op] if problem.op != "fprop" else []
    words += ["accumulate"] if problem.accumulate else []
    return "conv:" + ",".join(words)


def _numbers(values: tuple[int, ...]) -> str:
    return str(values[0]) if len(set(values)) == 1 else "x".join(map(str, values))


#: What a problem in words may hold, for those who wrote something else.
_CONV_WORDS = (
    "n, c, d, h, w, k, t, r, s, stride, pad, dil and groups with numbers, "
    f"a layout ({', '.join(dict.fromkeys((*LAYOUTS, *LAYOUTS_OF[3])))}), a precision ({', '.join(PRECISIONS)}), "
    f"an element type ({', '.join(LAYERS)}), bias, scale, add, accumulate, "
    f"an activation ({', '.join(map(str, ACTIVATIONS[1:]))}), dgrad or wgrad"
)
#: Windows without weights, and what their pixels make.
BOXES: dict[str, Reduction] = {"box": "sum", "erode": "min", "dilate": "max", "median": "median"}
_FILTER_WORDS = (
    "image and filter as HEIGHTxWIDTH, batch, filters, channels and anchor with numbers, a border, valid, per-image, "
    "element types"
)


def _not_understood(text: str, token: str) -> ValueError:
    known = _CONV_WORDS if text.startswith("conv") else _FILTER_WORDS
    return ValueError(f"problem={text!r}: {token!r} is not understood; known are {known}")


class _Given:
    """What the tokens of a problem have set so far. None may set it once more to something else."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._known: dict[str, tuple[Any, str]] = {}

    def once(self, key: str, value: Any, token: str) -> Any:
        """``value``. Raises ValueError where an earlier token gave ``key`` another one."""
        known, earlier = self._known.setdefault(key, (value, token))
        if known != value:
            raise ValueError(f"problem={self._text!r}: {earlier!r} and {token!r} cannot both be given")
        return value


def _split(text: str, token: str, counts: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """A setting such as ``stride2x1`` as its word and its numbers."""
    match = re.fullmatch(r"([a-z]*)([0-9]+(?:x[0-9]+)*)", token)
    if not match:
        raise _not_understood(text, token)
    values = tuple(int(part) for part in match[2].split("x"))
    if len(values) not in counts:
        raise ValueError(f"problem={text!r}: {token!r} must have {' or '.join(map(str, counts))} numbers")
    return match[1], values


def _parse_conv(text: str, tokens: list[str]) -> ConvProblem:
    sizes: dict[str, Any] = {"n": 1, "groups": 1}
    steps: dict[str, tuple[int, ...]] = {}
    settings: dict[str, Any] = {}
    given = _Given(text)
    choices = {
        "layout": LAYOUTS,
        "precision": PRECISIONS,
        "dtype": LAYERS,
        "op": get_args(Op),
        "activation": ACTIVATIONS[1:],
    }
    words: dict[str, tuple[str, Any]] = {word: (key, word) for key, known in choices.items() for word in known}
    words |= {flag: (flag, True) for flag in ("bias", "scale", "add", "accumulate")}
    words |= {deep: ("layout", plain) for deep, plain in zip(LAYOUTS_OF[3], LAYOUTS, strict=False)}
    # volumes say so by their slices, or by their layout
    axes = 3 if any(re.fullmatch(r"[dt][0-9]+", token) or token in LAYOUTS_OF[3] for token in tokens) else 2
    for token in tokens:
        if token in words:
            key, value = words[token]
            settings[key] = given.once(key, value, token)
            continue
        if token.partition(":")[0] in ACTIVATION_NUMBERS:
            settings["activation"] = given.once("activation", activation_of(token), token)
            continue
        word, numbers = _split(text, token, (1, axes, 2 * axes))
        if word in (*"ncdhwktrs", "groups") and len(numbers) == 1:
            sizes[word] = given.once(word, numbers[0], token)
        elif word in ("stride", "dil", "pad") and len(numbers) <= (2 * axes if word == "pad" else axes):
            steps[word] = given.once(word, numbers if len(numbers) > 1 else numbers * axes, token)
        else:
            raise _not_understood(text, token)
    for word, name in (("stride", "stride"), ("dil", "dilation")):
        if word in steps:
            settings[name] = steps[word][-2:]
            settings |= {f"{name}_d": steps[word][0]} if axes == 3 else {}
    if "pad" in steps:
        sides = steps["pad"]
        sides = sides if len(sides) == 2 * axes else tuple(side for side in sides for _ in range(2))
        settings["padding"] = sides[-4:]
        settings |= {"padding_d": sides[:2]} if axes == 3 else {}
    sizes.setdefault("w", sizes.get("h", 0))
    sizes.setdefault("s", sizes.get("r", 0))
    missing = [letter for letter in "chkr" if letter not in sizes]
    if missing:
        raise ValueError(f"problem={text!r}: {', '.join(missing)} must be given")
    problem = ConvProblem(**sizes, **settings)
    counts = [getattr(problem, name) for name in (*"cdktrs", "groups", "stride_d", "dilation_d")]
    if min(*counts, *problem.stride, *problem.dilation) < 1:
        raise ValueError(f"problem={text!r}: every size, stride, dilation and group count must be at least 1")
    if problem.c % problem.groups or problem.k % problem.groups:
        raise ValueError(f"problem={text!r}: c={problem.c} and k={problem.k} must be divisible by {problem.groups}")
    if min(problem.z, problem.p, problem.q) < 1:
        raise ValueError(f"problem={text!r}: the filter does not fit the padded image")
    return problem


def _parse_filter(text: str, tokens: list[str]) -> FilterProblem:
    shapes: list[tuple[int, ...]] = []
    counts = {"batch": 1, "filters": 1, "channels": 1}
    anchor, border, types = None, "reflect101", []
    words = {"valid": False, "per-image": False}
    rank, reduction = None, None
    given = _Given(text)
    for token in tokens:
        if token in BORDERS:
            border = given.once("border", token, token)
        elif token in FILTERS:
            types.append(token)
        elif token in words:
            words[token] = True
        elif token == "separable":
            given.once("weights", True, token)
            rank = given.once("rank", 1, token)
        elif token in BOXES:
            given.once("weights", False, token)
            reduction = given.once("reduction", BOXES[token], token)
        else:
            word, numbers = _split(text, token, (1, 2, 3))
            if not word and len(numbers) > 1:
                shapes.append(numbers)
            elif word == "rank" and len(numbers) == 1:
                given.once("weights", True, token)
                rank = given.once("rank", numbers[0], token)
            elif word in counts and len(numbers) == 1:
                counts[word] = given.once(word, numbers[0], token)
            elif word == "anchor" and len(numbers) > 1:
                anchor = given.once("anchor", numbers, token)
            else:
                raise _not_understood(text, token)
    if len(shapes) != 2:
        raise ValueError(f"problem={text!r}: it must give the image as HxW and the filter as HxW, in this order")
    image, taps = shapes
    if len(image) != len(taps) or (anchor and len(anchor) != len(taps)):
        raise ValueError(f"problem={text!r}: image, filter and anchor must have two axes each, or three")
    if min(*counts.values(), *image, *taps) < 1:
        raise ValueError(f"problem={text!r}: every size must be at least 1")
    if anchor and not all(at < size for at, size in zip(anchor, taps, strict=True)):
        shown = "x".join(map(str, anchor)), "x".join(map(str, taps))
        raise ValueError(f"problem={text!r}: anchor {shown[0]} lies outside the {shown[1]} filter")
    (d, h, w), (kd, kh, kw) = (1, *image)[-3:], (1, *taps)[-3:]
    slices, *within = (0, *(anchor or (size // 2 for size in taps)))[-3:]
    if rank is not None and not 1 <= rank <= min(kh, kw):
        raise ValueError(f"problem={text!r}: the rank of a {kh}x{kw} filter is from 1 to {min(kh, kw)}, not {rank}")
    if len(types) > 3:
        raise ValueError(f"problem={text!r}: it must give at most three types, of the image, the result and the sums")
    dtype, result, sums = (*types, *(None,) * 3)[:3]
    return dense_filter(
        counts["batch"], h, w, kh, kw, border, dtype or "float32", (within[0], within[1]), counts["filters"],
        out_dtype=result, sum_dtype=sums, channels=counts["channels"], valid=words["valid"],
        per_image=words["per-image"], rank=rank or 0, reduction=reduction, d=d, kd=kd, anchor_z=slices,
    )  # fmt: skip


def _format_filter(problem: FilterProblem) -> str:
    slices, taps = (f"{problem.d}x", f"{problem.kd}x") if problem.is_volume else ("", "")
    words = [f"{slices}{problem.h}x{problem.w}", f"{taps}{problem.kh}x{problem.kw}"]
    words += [f"batch{problem.batch}"] if problem.batch != 1 else []
    words += [f"filters{problem.filters}"] if problem.filters != 1 else []
    words += [f"channels{problem.channels}"] if problem.channels != 1 else []
    anchor = ((problem.anchor_z,) * problem.is_volume) + problem.anchor
    middle = ((problem.kd // 2,) * problem.is_volume) + (problem.kh // 2, problem.kw // 2)
    if problem.valid:
        words.append("valid")
    else:
        words += ["anchor" + "x".join(map(str, anchor))] if anchor != middle else []
        words += [problem.border] if problem.border != "reflect101" else []
    words += ["per-image"] if problem.per_image else []
    words += [word for word, reduction in BOXES.items() if reduction == problem.reduction]
    words += ["separable" if problem.rank == 1 else f"rank{problem.rank}"] if problem.rank else []
    types = [problem.dtype, problem.result, problem.sums][: 3 if problem.sum_dtype else 2 if problem.out_dtype else 1]
    words += types if types != ["float32"] else []
    return "filter:" + ",".join(words)


def with_batch(problem: Problem, batch: int) -> Problem:
    return replace(problem, n=batch) if problem.kind == "conv2d" else replace(problem, batch=batch)
