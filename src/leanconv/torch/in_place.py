"""Python's operators in place as functions, which graphs of torch.fx call.

An assignment ``y += x`` in the code of a graph would change the names of numbers and tuples too, which have others; a
function that returns the result does not.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any


def _function(name: str) -> Callable[[Any, Any], Any]:
    operate = getattr(operator, name)

    def function(a: Any, b: Any) -> Any:
        return operate(a, b)

    function.__name__ = function.__qualname__ = name
    return function


iadd = _function("iadd")
isub = _function("isub")
imul = _function("imul")
itruediv = _function("itruediv")
ifloordiv = _function("ifloordiv")
imod = _function("imod")
ipow = _function("ipow")
iand = _function("iand")
ior = _function("ior")
ixor = _function("ixor")
imatmul = _function("imatmul")
ilshift = _function("ilshift")
irshift = _function("irshift")

FUNCTIONS = (
    iadd, isub, imul, itruediv, ifloordiv, imod, ipow, iand, ior, ixor, imatmul, ilshift, irshift,
)  # fmt: skip
