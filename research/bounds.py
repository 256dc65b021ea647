"""What errors may be on data of any kind: sparse, of any range, with outliers. docs/numerics.md publishes it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from leanconv.cpu.oracle import FLOAT32_UNIT, conv2d
from leanconv.dtypes import DTYPES, accumulator, is_narrow
from leanconv.kernels.contract import Arithmetic, ceil_div
from leanconv.kernels.winograd_matrices import Matrices, transforms
from leanconv.problem import ConvProblem


def magnitude(problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> float:
    """‖|w| ∗ |x|‖, the Frobenius norm that errors are measured by on data of any kind; with ‖|bias|‖ added to it.

    It is taken over all windows that touch a pixel, those beyond the output too: an error at the edge of an image may
    stem from a pixel that outputs read through other weights only. For a stride above 1, and of filters, over the
    result.
    """
    plain = replace(problem, bias=False, activation=None, accumulate=False)
    if problem.stride == (1, 1) and problem.op == "dgrad":
        top, bottom, left, right = problem.padding
        plain = replace(plain, h=problem.h + top + bottom, w=problem.w + left + right, padding=(0, 0, 0, 0))
    elif problem.stride == (1, 1) and problem.op == "fprop":
        reach = np.repeat([(problem.r - 1) * problem.dilation[0], (problem.s - 1) * problem.dilation[1]], 2)
        padding = tuple(int(pixels) for pixels in np.maximum(problem.padding, reach))
        plain = replace(plain, padding=padding)  # type: ignore[arg-type]
    result = float(np.linalg.norm(conv2d(plain, abs(x), abs(w)).ravel()))
    if bias is not None:
        of_each = problem.n * (problem.h * problem.w if problem.op == "dgrad" else problem.p * problem.q)
        result += float(np.sqrt(of_each) * np.linalg.norm(bias.astype(np.float64)))
    return result


def absolute_error(
    problem: ConvProblem, out: np.ndarray, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None
) -> float:
    """‖out − exact‖ / ‖|w| ∗ |x|‖ in unit roundoffs of the type that is summed in: 2⁻²⁴, for float64 2⁻⁵³.

    0 where the result is exact; NaN or infinite where ``out`` has a NaN or an Inf.
    """
    error = float(np.linalg.norm((out.astype(np.float64) - conv2d(problem, x, w, bias)).ravel()))
    return error and error / (magnitude(problem, x, w, bias) * accumulator(problem.dtype).roundoff)


def absolute_bound(
    problem: ConvProblem, transform: Matrices | None = None, square: bool = False, worst: bool = False
) -> float:
    """The `absolute_error` that a plain sum, or Winograd by ``transform``, may have on data of any kind.

    With K the roundings between an operand and an output (the terms of a sum, and what transforms, bias and promotion
    add), it is ``transform.lone_growth · √K``: roundings are as likely up as down, and grow as from a lone pixel. The
    data that break it make all sums round the same way, as one constant times another does. ``worst`` gives what no
    data exceed: ``transform.worst_growth · K``, by the usual bound of an error of K roundings. Growth is that of rows
    and columns where ``square``, and 1 for plain sums. Results of 16 bits are rounded once more.
    """
    unit = accumulator(problem.dtype).roundoff
    once_more = DTYPES[problem.dtype].roundoff / unit if is_narrow(problem.dtype) else 0.0
    if transform is None:
        roundings, growth = problem.terms + 2, 1.0
    else:
        ways = 2 if square else 1
        summed = problem.terms // (problem.r * problem.s)
        if not square:
            summed *= problem.r * ceil_div(problem.s, transform.r)
        # the filter's transform, the tile's and the sums' of at most r + 1, alpha and alpha
        roundings = summed + ways * (2 * transform.alpha + transform.r + 1) + 6
        growth = (transform.worst_growth if worst else transform.lone_growth) ** ways
    if not worst:
        return growth * float(np.sqrt(roundings)) + once_more
    return growth * roundings / (1 - roundings * unit) + 1.01 * once_more


def precision_bound(problem: ConvProblem, worst: bool = False) -> float:
    """The largest `absolute_bound` of what may compute ``problem`` at its precision level.

    ``"tf32"`` rounds both operands to 11 bits: 2⁻¹¹ of each product for either, which is 2¹³ units.
    """
    plain = absolute_bound(problem, worst=worst) + (2 * 2.0**13 if problem.precision == "tf32" else 0.0)
    if problem.op == "wgrad":
        return plain
    served = transforms(problem.s, problem.r, problem.precision)
    return max([plain, *(absolute_bound(problem, *way, worst=worst) for way in served)])


def output_bound(
    problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, arithmetic: Arithmetic
) -> np.ndarray:
    """How far each output may be off on data of any kind, of a kernel without transforms that multiplies by
    ``arithmetic``.

    In units of the output's own |w| ∗ |x|: K for float32 FMAs. Three products of float16: K + 160, of which 12 are bits
    that the split and the fourth product leave out, and 136 what the tensor core cuts off in the 4 steps of a stage's
    large products, each 17 terms. Sums that stay in the tensor core: 3 K. Operands rounded to 11 bits: 2⁻¹⁰ more.

    A float16 below 2⁻¹⁴ is subnormal. So of a float32 that is split, or rounded to one, 2⁻³⁹ of the largest number with
    the same scale may be lost, 2⁻³⁵ where sums stay in the tensor core: both operands together 2⁻³⁸ and 2⁻³⁴ of the
    largest product, for each term.
    """
    terms, unit = problem.terms + 2, FLOAT32_UNIT
    narrow = is_narrow(problem.dtype)
    units, rounded, spread = {
        "fp32": (terms, 0.0, 0.0),
        "fp16x3": (terms + 160, 0.0, 2.0**-38),
        "tf32": (3 * terms, 2.0**-10, 0.0),
        "fp16": (3 * terms, 0.0, 0.0) if narrow else (3 * terms, 2.0**-10, 2.0**-34),
    }[arithmetic]
    plain = replace(problem, activation=None)
    own = conv2d(plain, abs(x), abs(w), None if bias is None else abs(bias))
    largest = float(abs(x).max(initial=0)) * float(abs(w).max(initial=0))
    bound: np.ndarray = own * (units * unit / (1 - units * unit) + 1.01 * rounded) + terms * spread * largest
    if narrow:
        bound += DTYPES[problem.dtype].roundoff * (own + bound) + 2.0**-25
    return bound
