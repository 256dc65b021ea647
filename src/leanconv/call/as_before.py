"""Filters of small NumPy arrays on the CPU, called as before.

OpenCV needs some microseconds for 64 x 64 pixels, and what a call means takes longer to find out. A call with the
arguments of an earlier one goes straight to the routine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from threading import get_ident
from typing import Any, TypeVar, cast

import numpy as np

from leanconv.call import lookup
from leanconv.call.host_call import CpuCall

Filter = TypeVar("Filter", bound=Callable[..., Any])
#: Elements of an image, and of a kernel, at most.
_SMALL, _SMALL_KERNEL = 1 << 16, 1 << 10


def as_before(function: Filter) -> Filter:
    """A filter that returns what one call of `lookup.run` with its first argument makes."""

    @wraps(function)
    def called(image: Any, *given: Any, **options: Any) -> Any:
        if type(image) is not np.ndarray or image.size > _SMALL:
            return function(image, *given, **options)
        parts = given
        for each in given:
            if type(each) is np.ndarray:
                parts = tuple([_content(each) for each in given])
                break
        try:
            named: tuple[Any, ...] = (tuple(options), *options.values()) if options else ()
            key: Hashable = (
                function, image.shape, image.strides, image.dtype, image.flags.num, parts, named,
                # 1, 1.0 and True are equal, and not alike
                *map(type, given), *map(type, named),
            )  # fmt: skip
            routine = lookup.routines.get(key)
        except TypeError:  # a list, or an array as an option
            return function(image, *given, **options)
        if routine is not None:
            return routine(image)
        lookup.watched[me := get_ident()] = None
        try:
            result = function(image, *given, **options)
        finally:
            seen = lookup.watched.pop(me, None)
        if seen is not None and seen[0] is image and seen[-1] is result and all(map(_is_told_apart, (*given, *named))):
            _, call, w, numbers, _ = seen
            routine = call.routine(image, w, *numbers) if type(call) is CpuCall else None
            if routine is not None:
                lookup.routines.keep(key, routine)
        return result

    return cast(Filter, called)


def _content(value: Any) -> Any:
    """What tells an array from others, as a kernel may be one."""
    if type(value) is np.ndarray and value.size <= _SMALL_KERNEL:
        return value.tobytes(), value.dtype, value.shape
    return value


def _is_told_apart(value: Any) -> bool:
    """Whether equal values of a type mean the same: 0.0 and -0.0 do not, nor (1, 2) and (True, 2)."""
    return (
        type(value) in (int, str, bool, type(None), np.ndarray)
        or (type(value) is float and value != 0)
        or (type(value) is tuple and all(type(each) is str for each in value))
    )
