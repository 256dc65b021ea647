"""The element types: what each is called in C++, NumPy and PyTorch, how large it is, and what it is summed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

DtypeName = Literal[
    "float32", "float64", "float16", "bfloat16", "int32", "int16", "uint16", "int8", "uint8"
]  # fmt: skip


@dataclass(frozen=True)
class ElementType:
    """One type of the elements of arrays.

    ``ctype`` is its C++ type in kernels; ``accumulator`` the name of the type that products are summed in. ``numpy`` is
    NumPy's name where NumPy has it by itself. ``roundoff`` is the largest relative error of one
    rounding to it; 0 for integers. ``weights`` and ``result`` are the types that a layer with pixels of this type has
    of its filters, and of its bias and output; None where they are the same. ``most`` is the largest absolute value of
    an integer of 8 bits. ``low`` and ``high`` are the least and the largest value of any integer type.
    """

    name: DtypeName
    bytes: int
    ctype: str
    accumulator: str
    numpy: str | None
    roundoff: float = 0.0
    weights: DtypeName | None = None
    result: DtypeName | None = None
    most: int = 0
    low: int = 0
    high: int = 0


#: NOTE: PyTorch names every one of them as we do; NumPy knows bfloat16 only once ml_dtypes has been imported.
DTYPES: dict[str, ElementType] = {
    kind.name: kind
    for kind in (
        ElementType("float32", 4, "float", "float32", "float32", 2.0**-24),
        ElementType("float64", 8, "double", "float64", "float64", 2.0**-53),
        ElementType("float16", 2, "leanconv::float16", "float32", "float16", 2.0**-11),
        ElementType("bfloat16", 2, "leanconv::bfloat16", "float32", None, 2.0**-8),
        ElementType("int32", 4, "int", "int32", "int32", low=-(2**31), high=2**31 - 1),
        ElementType("int16", 2, "short", "int32", "int16", low=-(2**15), high=2**15 - 1),
        ElementType("uint16", 2, "unsigned short", "int32", "uint16", high=2**16 - 1),
        ElementType("int8", 1, "signed char", "int32", "int8", 0.0, "int8", "int32", 128, -128, 127),
        ElementType("uint8", 1, "unsigned char", "int32", "uint8", 0.0, "int8", "int32", 255, 0, 255),
    )
}

#: What layers take on a GPU, and on the CPU only. Layers of integers have exact sums, and no gradients.
GPU_LAYERS = ("float32", "float16", "bfloat16")
INTEGER_LAYERS = ("int8", "uint8")
CPU_ONLY = ("float64",)
LAYERS = GPU_LAYERS + INTEGER_LAYERS + CPU_ONLY
#: What image filters take, here and there.
FILTERS = tuple(DTYPES)
#: of layers that have gradients
FLOAT_LAYERS = GPU_LAYERS + CPU_ONLY
#: What the filters of layers may be.
WEIGHTS = tuple(name for name in LAYERS if DTYPES[name].weights in (None, name))


def item_bytes(dtype: str) -> int:
    return DTYPES[dtype].bytes


def accumulator(dtype: str) -> ElementType:
    """The type that products of elements are summed in."""
    return DTYPES[DTYPES[dtype].accumulator]


def is_narrow(dtype: str) -> bool:
    """Whether elements are widened to float32 for the arithmetic, and results rounded once."""
    return dtype in DTYPES and DTYPES[dtype].accumulator == "float32" != dtype


def is_integer(dtype: str) -> bool:
    """Whether sums are integers, and exact."""
    return dtype in DTYPES and DTYPES[dtype].roundoff == 0


def check_weights(name: str, dtype: str) -> None:
    """Raise TypeError unless arrays of ``dtype`` hold real numbers, which the weights of a filter may be."""
    if not dtype.startswith(("bool", "int", "uint", "float", "bfloat", "longdouble")):
        raise TypeError(f"{name} has dtype {dtype}; it must hold real numbers")


def filter_sum(dtype: str, result: str, integer_weights: bool = True) -> DtypeName:
    """The type in which a filter from ``dtype`` to ``result`` sums; it can hold each element of both.

    Only from int32 to int32 it depends on the weights: integers make exact sums, which wrap around.
    """
    wide = ("int32", "float64")
    if dtype == result == "int32" and integer_weights:
        return "int32"
    return "float64" if dtype in wide or result in wide else "float32"


def weights_of(dtype: DtypeName) -> DtypeName:
    """The type of the filters of a layer with pixels of this type."""
    return DTYPES[dtype].weights or dtype if dtype in DTYPES else dtype


def result_of(dtype: DtypeName) -> DtypeName:
    """The type of the bias and the output of a layer with pixels of this type."""
    return DTYPES[dtype].result or dtype if dtype in DTYPES else dtype


def largest_product(dtype: DtypeName) -> int:
    """The largest absolute value of a product of a pixel of 8 bits and a filter's weight."""
    return DTYPES[dtype].most * DTYPES[weights_of(dtype)].most


def most_products(dtype: DtypeName) -> int:
    """How many products of pixels of 8 bits and weights int32 can sum, whatever their values."""
    return (2**31 - 1) // largest_product(dtype)


def one_of(name: str, dtype: str, taken: Sequence[str]) -> DtypeName:
    """The element type of the array that a caller calls ``name``. Raises TypeError unless it is one of those taken."""
    if not isinstance(dtype, str) or dtype not in taken:
        here = CPU_ONLY if taken is not FILTERS else ()
        *most, last = (each for each in taken if each not in here)
        remedy = "; convert it, as to float32" if isinstance(dtype, str) else "; give its name, which is a string"
        raise TypeError(
            f"{name} has dtype {dtype}; supported are {', '.join(most)} and {last}"
            + f", and {' and '.join(here)} on the CPU only" * bool(here)
            + ("; take real and imaginary part" if str(dtype).startswith("complex") else remedy)
        )
    return DTYPES[dtype].name


def none_of(dtype: str, taken: Sequence[str]) -> list[str]:
    """A sentence where ``dtype`` is not among those that an algorithm takes."""
    if dtype in taken:
        return []
    if len(taken) == 1:
        return [f"dtype={dtype!r} is not {taken[0]}"]
    if len(taken) == 2:
        return [f"dtype={dtype!r} is neither {taken[0]} nor {taken[1]}"]
    return [f"dtype={dtype!r} is none of {', '.join(taken)}"]
