"""Filters as few products of a column and a row: found by rank, and taken where that is faster.

A kernel of rank k is a sum of k outer products, and filtering with it is k passes along rows and k along columns.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from leanconv.runtime.bounded_cache import BoundedCache

#: How much of a kernel its products may leave out, as a share of its norm: one rounding of float32, of which the kernel
#: of a separable filter is made already where it holds float32 products of a column and a row.
TOLERANCE = 2.0**-24
#: Most products.
RANKS = 3
#: Most rows and columns of a kernel that is taken whole.
DIRECT = 32
#: What a product costs besides its taps, in taps, and what a tap of the whole kernel costs in taps of a product.
PRODUCT_TAPS, WHOLE_TAP = 16, 0.6

#: Rows and columns of which random combinations of columns are tried before a singular value decomposition, whose time
#: grows with their third power; how many combinations; and the share of the square of the kernel's norm that these
#: leave out only where no few products come near the kernel.
MANY, COMBINATIONS, FAR = 64, 16, 1e-6

_found: BoundedCache[Hashable, tuple[np.ndarray | None]] = BoundedCache(256)


def products(kernel: np.ndarray, dtype: str = "float32", most: int = RANKS, exact: bool = False) -> np.ndarray | None:
    """The products of a column and a row whose sum is ``kernel`` (kh, kw): an array (rank, kh + kw) of ``dtype``, each
    column before its row. None where more than ``most`` are needed, or the kernel is not finite.

    A kernel of one product whose weights are integers, times a power of two, gives such factors without an error. Of
    others the singular values, in float64, say how many products leave out at most `TOLERANCE` of the kernel's norm.
    With ``exact``, and for ``dtype="int32"``, there is such a product without an error or none. For ``"float64"`` a few
    roundings are left out at most, as the decomposition has some itself: 2⁻⁵⁴ times the root of the weights' number,
    less than the error of their sum.

    >>> products(np.array([[1, 2, 1], [2, 4, 2], [1, 2, 1]])).tolist()
    [[4.0, 8.0, 4.0, 0.25, 0.5, 0.25]]
    >>> products(np.eye(5)) is None
    True
    """
    kh, kw = kernel.shape
    # int32 wraps around: here in weights, below in factors, of which one may be 2**31
    given = np.asarray(kernel.astype(np.int32) if dtype == "int32" else kernel, np.float64)
    if not np.isfinite(given).all():
        return None
    if not given.any():
        return np.zeros((1, kh + kw), dtype)
    factors = _exact_product(given)
    if factors is None and (exact or dtype == "int32"):
        return None
    if factors is not None:
        product = np.concatenate(factors)[None]
        if dtype == "int32":
            return product.astype(np.int64).astype(dtype)
        with np.errstate(over="ignore"):  # as of the kernel itself
            return balanced(product, kh).astype(dtype)
    largest = np.abs(given).max()
    if min(kh, kw) > MANY and most <= RANKS and _far_from_few(given / largest):
        return None
    columns, sizes, rows = np.linalg.svd(given / largest, full_matrices=False)
    left_out = np.sqrt(np.cumsum(sizes[::-1] ** 2))[::-1] / np.linalg.norm(sizes)
    # what a column times a row leaves out in float64 is within a third of that (explored, 9x9 to 301x301)
    allowed = 2.0**-52 * max(1.0, (kh * kw) ** 0.5 / 4) if dtype == "float64" else TOLERANCE
    rank = int(np.argmax(np.append(left_out, 0.0) <= allowed))
    if rank > most:
        return None
    scale = np.sqrt(sizes[:rank, None]) * np.sqrt(largest)
    return balanced(np.concatenate([columns.T[:rank] * scale, rows[:rank] * scale], axis=1), kh).astype(dtype)


def _far_from_few(kernel: np.ndarray) -> bool:
    """Whether no sum of `RANKS` products comes near ``kernel``. Where one does, 16 random combinations of the columns
    span all of its columns but for a few times what it leaves out, which is below `TOLERANCE`."""
    combinations = kernel @ np.random.default_rng(0).standard_normal((kernel.shape[1], COMBINATIONS))
    basis = np.linalg.qr(combinations)[0]
    return bool(1 - (np.linalg.norm(basis.T @ kernel) / np.linalg.norm(kernel)) ** 2 > FAR)


def balanced(products: np.ndarray, kh: int) -> np.ndarray:
    """The same products with rows whose sizes add up to 1/2 at least and to 1 at most: what a row makes of pixels is no
    larger than they are, and overflows only where the result does. Powers of two go to the columns, which is exact."""
    size = np.abs(products[:, kh:]).sum(axis=1, keepdims=True)
    # a Gaussian's weights add up to 1 but for their rounding
    exponent = np.ceil(np.log2(size, where=size > 0, out=np.zeros_like(size)) - 2.0**-20).astype(int)
    shift = np.concatenate([np.repeat(exponent, kh, 1), np.repeat(-exponent, products.shape[1] - kh, 1)], axis=1)
    return np.ldexp(products, shift)


def _exact_product(kernel: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The column and the row, of small integers times a power of two, whose product is exactly ``kernel``."""
    mantissas, exponents = np.frexp(kernel[kernel != 0])
    bits = np.ldexp(mantissas, 53).astype(np.int64)
    unit = int((exponents - 54 + np.frexp((bits & -bits).astype(np.float64))[1]).min())  # the lowest bit that is set
    if exponents.max() - unit > 62:
        return None  # no int64
    with np.errstate(over="ignore"):
        whole = np.ldexp(kernel, -unit)
    if not np.isfinite(whole).all():
        return None
    integers = whole.astype(np.int64)
    p, q = np.unravel_index(np.abs(integers).argmax(), integers.shape)
    row = integers[p] // np.gcd.reduce(integers[p])
    column, rest = np.divmod(integers[:, q], row[q])
    if rest.any() or not np.array_equal(np.multiply.outer(column, row), integers):
        return None
    # what the integers cannot have wrapped around to
    factors = np.ldexp(column.astype(np.float64), unit), row.astype(np.float64)
    return factors if np.allclose(np.multiply.outer(*factors), kernel, rtol=1e-9, atol=0) else None


def worth_it(rank: int, kh: int, kw: int) -> bool:
    """Whether ``rank`` products are expected to take less time than the whole kernel."""
    return max(kh, kw) > DIRECT or rank * (kh + kw + PRODUCT_TAPS) < WHOLE_TAP * kh * kw


def worth_it_in_volumes(kd: int, kh: int, kw: int) -> bool:
    """Whether a line across slices and a plane are expected to take less time than the whole kernel of a volume."""
    plane = min(WHOLE_TAP * kh * kw, kh + kw + PRODUCT_TAPS)
    return max(kh, kw) > DIRECT or kd + PRODUCT_TAPS + plane + PRODUCT_TAPS < WHOLE_TAP * kd * kh * kw


def split(kernel: np.ndarray, dtype: str, separable: bool | None, exact: bool = False) -> np.ndarray | None:
    """What `leanconv.filter2d` filters with in place of ``kernel`` (kh, kw): its `products`, which are kept for each
    content, or None, which means the kernel as it is. ``separable`` is what the caller says: True, or None, which means
    where it is faster. ``exact`` is as in `products`.

    Raises ValueError where it is True, and the kernel is no sum of so few products.
    """
    key = kernel.shape, kernel.dtype, dtype, exact, kernel.tobytes()
    kept = _found.get(key) or _found.recall(key)
    if kept is None:
        kept = (products(kernel, dtype, exact=exact),)
        _found.keep(key, kept)
    (found,) = kept
    if found is None:
        if separable:
            exactly = "exactly " if exact or dtype == "int32" else ""
            raise ValueError(
                f"separable=True: the {kernel.shape[0]}x{kernel.shape[1]} kernel is not {exactly}the sum of at most "
                f"{RANKS} products of a column and a row"
            )
        return None
    return found if separable or worth_it(len(found), *kernel.shape) else None
