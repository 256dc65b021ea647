"""The public functions: what they take, and what they mean. `leanconv.call` carries them out."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from leanconv.arrays import arrays_of
from leanconv.arrays.operands import together
from leanconv.call import lookup
from leanconv.call.explain import Explanation, explain_call, explain_problem
from leanconv.call.gpu_call import types_of
from leanconv.call.resolve import Resolved, resolve
from leanconv.dtypes import FILTERS, one_of
from leanconv.images.api import filter2d, filter3d, requested_filter, requested_volume_filter
from leanconv.options import FUNCTIONS, Activation, Layout, Layout1d, Padding, Precision, filter_numbers, layer_options
from leanconv.problem import Problem
from leanconv.volumes.api import conv3d, conv3d_input, conv3d_weight

Array = TypeVar("Array")


def conv2d(
    x: Array,
    w: Any,
    bias: Any = None,
    stride: int | Sequence[int] = 1,
    padding: Padding = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    layout: Layout | None = None,
    algorithm: str = "auto",
    precision: Precision = "fp32",
    activation: Activation = None,
    scale: Any = None,
    add: Any = None,
    out: Any = None,
    device: str | None = None,
    workspace_limit: int | None = None,
    batch_invariant: bool = False,
) -> Array:
    """Convolve a batch of images with a bank of filters, as ``torch.nn.functional.conv2d`` does.

    ``y[n,k,p,q] = activation(bias[k] + sum over c,r,s of w[k,c,r,s] * x[n,c, p*stride - top + r*dilation, ...])``

    With ``scale`` the sum is multiplied by ``scale[k]``, and with ``add`` a residual is added before the activation.

    Args:
        x: float32, float16 or bfloat16 array (n, c, h, w) of NumPy, CuPy, PyTorch, or of any library with DLPack; or
            one image (c, h, w), for a result (k, p, q). The CPU takes float64 too. 16-bit elements are summed in
            float32, and the result is rounded once. Or int8 or uint8, with int8 filters, int32 bias and an int32
            result: integers are exact. A filter whose sum could leave int32 is refused, 131072 products of int8 and
            65794 of uint8; a sum with its bias wraps around.
        w: filters (k, c / groups, r, s), of the same library, dtype and device; or what `prepare_weights` made of them.
        bias: (k,) or None.
        stride: pixels between outputs, for both axes or (vertical, horizontal).
        padding: zeros around the image, in pixels: one number, (vertical, horizontal), (top, bottom, left, right),
            ``"valid"`` (none) or ``"same"`` (output as large as the input; stride 1; an odd pixel goes to the end).
        dilation: pixels between filter taps, like ``stride``.
        groups: c and k are divided into this many groups; a filter reads the channels of its own group.
        layout: ``"NHWC"``: x is (n, h, w, c), w (k, r, s, c / groups) and y (n, p, q, k). ``"CHWN"``: x is
            (c, h, w, n), w (c / groups, r, s, k) and y (k, p, q, n); batch innermost, it is for large batches,
            best a multiple of four. Without a batch there is no n in these: x is (h, w, c) or, with ``"CHWN"``,
            (c, h, w). PyTorch tensors keep their logical shapes; for them it is the order in memory, by default that of
            x if that is NCHW or NHWC (channels_last). A tensor is in CHWN order if its ``permute(1, 2, 3, 0)`` is
            contiguous: with ``layout="CHWN"`` it is read in place, and y has that order.
        algorithm: ``"auto"`` or a name from `list_algorithms`.
        precision: ``"ieee"``, ``"fp32"``, ``"relaxed"`` or ``"tf32"``; the result is never less precise than this.
            Levels bound the norm of all errors. Winograd's transforms round relative to the largest pixel nearby, so a
            huge pixel among zeros leaves errors where the answer is 0; with ``"ieee"`` it is 0. Layers of integers
            are exact in each.
        activation: None, ``"relu"``, ``"relu6"``, ``"leaky_relu"``, ``"elu"``, ``"gelu"``, ``"gelu_tanh"``, ``"silu"``,
            ``"hardswish"``, ``"sigmoid"`` or ``"tanh"``, as PyTorch computes them; or a pair,
            ``("leaky_relu", negative_slope)`` or ``("elu", alpha)``. The same kernel applies it, before the result is
            rounded. Layers of integers take ``"relu"`` and ``"relu6"``.
        scale: (k,) of float32, of float64 for float64, or None. A batch normalisation in inference is scale and bias.
        add: a residual, an array with the shape and the dtype of y, or None. ``out`` may be this array itself, and no
            other that overlaps it.
        out: array for the result; must not share memory with the inputs, but it may be ``add``.
        device: ``"cuda"`` or ``"cuda:1"`` runs NumPy arrays on that GPU and waits for the result.
        workspace_limit: bytes of GPU memory that the algorithm may take besides x, w, bias and y, from the allocator
            of x's library: for scratch and for packed weights. None: what LEANCONV_WORKSPACE_LIMIT says; without
            that, ``"auto"`` takes packed weights but no scratch, and an algorithm called by name takes what it needs.
        batch_invariant: an image has the same bits in the result of any batch, alone or among 128. The choice is made
            for all batches at once, so one may take longer than without (docs/batch-invariance.md).

    Returns:
        y of shape (n, k, p, q), of x's library, computed on the caller's current stream; ``out`` if given.

    Raises:
        ValueError, TypeError: an argument breaks a rule, which the message names; NoAlgorithmError, a ValueError,
            where nothing fits. CudaUnavailableError: no driver, GPU or compiler.

    Calls with PyTorch's CPU tensors are forwarded to PyTorch's own convolution, but for integers, which it does not
    take: those run on the NumPy engine. On the GPU no gradient is computed, and a tensor that requires one is refused:
    `leanconv.torch.conv2d` computes it.
    The first call with a shape compiles. Later ones do not wait, and allocate only the result and the memory that
    ``workspace_limit`` limits; they may be captured in a CUDA graph (with CuPy, only where there is no such memory:
    CuPy's pool keeps none for a graph).

    >>> import numpy as np
    >>> x, w = np.ones((1, 1, 4, 4), np.float32), np.ones((1, 1, 3, 3), np.float32)
    >>> conv2d(x, w, padding=1)[0, 0, 0].tolist()
    [4.0, 6.0, 6.0, 4.0]
    """
    requested = layer_options(
        "conv2d", stride, padding, dilation, groups, layout, algorithm, precision, activation, device, workspace_limit,
        batch_invariant,
    )  # fmt: skip
    return lookup.run(requested, x, w, together(bias, scale, add), out)


def conv1d(
    x: Array,
    w: Any,
    bias: Any = None,
    stride: int | Sequence[int] = 1,
    padding: Padding = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    layout: Layout1d | None = None,
    algorithm: str = "auto",
    precision: Precision = "fp32",
    activation: Activation = None,
    scale: Any = None,
    add: Any = None,
    out: Any = None,
    device: str | None = None,
    workspace_limit: int | None = None,
    batch_invariant: bool = False,
) -> Array:
    """Convolve a batch of signals with a bank of filters, as ``torch.nn.functional.conv1d`` does.

    ``y[n,k,q] = activation(bias[k] + sum over c,s of w[k,c,s] * x[n,c, q*stride - left + s*dilation])``

    Args:
        x: float32, float16 or bfloat16 array (n, c, w) of NumPy, CuPy, PyTorch, or of any library with DLPack; or one
            signal (c, w), for a result (k, q). The CPU takes float64 too. Or int8 or uint8, as in `conv2d`.
        w: filters (k, c / groups, s), of the same library, dtype and device; or what `prepare_weights` made of them.
        stride: samples between outputs.
        padding: zeros around the signal: one number, (left, right), ``"valid"`` or ``"same"``, as in `conv2d`.
        dilation: samples between filter taps.
        layout: ``"NWC"``: x is (n, w, c), w (k, s, c / groups) and y (n, q, k). ``"CWN"``: x is (c, w, n), w
            (c / groups, s, k) and y (k, q, n). Without a batch there is no n in these. PyTorch tensors keep their
            logical shapes; for them it is the order in memory, by default that of x if that is NCW or NWC. All else as
            in `conv2d`.
        bias, groups, algorithm, precision, activation, scale, add, out, device, workspace_limit, batch_invariant: as in
            `conv2d`.

    Returns:
        y of shape (n, k, q), of x's library, computed on the caller's current stream; ``out`` if given.

    Raises:
        As `conv2d`, which computes this as images of one row: without copies, by the same algorithms.

    >>> import numpy as np
    >>> x, w = np.arange(5, dtype=np.float32).reshape(1, 1, 5), np.ones((1, 1, 3), np.float32)
    >>> conv1d(x, w, padding=(2, 0))[0, 0].tolist()
    [0.0, 1.0, 3.0, 6.0, 9.0]
    """
    requested = layer_options(
        "conv1d", stride, padding, dilation, groups, layout, algorithm, precision, activation, device, workspace_limit,
        batch_invariant,
    )  # fmt: skip
    return lookup.run(requested, x, w, together(bias, scale, add), out)


def conv2d_input(
    grad: Array,
    w: Any,
    input_shape: Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: Padding = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    layout: Layout | None = None,
    algorithm: str = "auto",
    precision: Precision = "fp32",
    out: Any = None,
    device: str | None = None,
    workspace_limit: int | None = None,
    batch_invariant: bool = False,
) -> Array:
    """Gradient of `conv2d` with respect to its input, as ``torch.nn.grad.conv2d_input`` computes it.

    ``dx[n,c,i,j] = sum over k,r,s of w[k,c,r,s] * grad[n,k,p,q]`` where ``p*stride - top + r*dilation = i``, and so on:
    the transposed convolution.

    Args:
        grad: gradient of conv2d's result, of that shape: (n, k, p, q), or (k, p, q); a float32, float16 or bfloat16
            array of NumPy, CuPy, PyTorch, or of any library with DLPack. The CPU takes float64 too.
        w: the layer's filters (k, c / groups, r, s), not rotated; or what `prepare_weights` made of them.
        input_shape: shape of conv2d's x, as that call had it: (n, c, h, w), (n, h, w, c) with ``layout="NHWC"``, or
            (c, h, w, n) with ``"CHWN"``. PyTorch's is always (n, c, h, w). Without n where grad has none.
        stride, padding, dilation, groups: those of the layer, as in `conv2d`.
        layout: as in `conv2d`, of grad, w and dx; for PyTorch tensors by default that of grad, as there that of x.
        algorithm, precision, out, device, workspace_limit, batch_invariant: as in `conv2d`.

    Returns:
        dx of shape ``input_shape``, of grad's library, computed on the caller's current stream; ``out`` if given.

    Raises:
        As `conv2d`; also ValueError where the shape of grad is not that of the layer's result for ``input_shape``.

    >>> import numpy as np
    >>> grad, w = np.ones((1, 1, 1, 2), np.float32), np.arange(3, dtype=np.float32).reshape(1, 1, 1, 3)
    >>> conv2d_input(grad, w, (1, 1, 1, 5), stride=(1, 2)).ravel().tolist()
    [0.0, 1.0, 2.0, 1.0, 2.0]
    """
    requested = layer_options(
        "conv2d_input", stride, padding, dilation, groups, layout, algorithm, precision, None, device, workspace_limit,
        batch_invariant, input_shape,
    )  # fmt: skip
    return lookup.run(requested, grad, w, None, out)


def conv1d_input(
    grad: Array,
    w: Any,
    input_shape: Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: Padding = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    layout: Layout1d | None = None,
    algorithm: str = "auto",
    precision: Precision = "fp32",
    out: Any = None,
    device: str | None = None,
    workspace_limit: int | None = None,
    batch_invariant: bool = False,
) -> Array:
    """Gradient of `conv1d` with respect to its input, as ``torch.nn.grad.conv1d_input`` computes it.

    ``dx[n,c,i] = sum over k,s of w[k,c,s] * grad[n,k,q]`` where ``q*stride - left + s*dilation = i``: the transposed
    convolution of signals.

    Args:
        grad: gradient of conv1d's result, of that shape: (n, k, q), or (k, q); an array as in `conv2d_input`.
        w: the layer's filters (k, c / groups, s), not rotated; or what `prepare_weights` made of them.
        input_shape: shape of conv1d's x, as that call had it: (n, c, w), (n, w, c) with ``layout="NWC"``, or (c, w, n)
            with ``"CWN"``. PyTorch's is always (n, c, w). Without n where grad has none.
        stride, padding, dilation, groups: those of the layer, as in `conv1d`.
        layout: as in `conv1d`, of grad, w and dx; for PyTorch tensors by default that of grad, as there that of x.
        algorithm, precision, out, device, workspace_limit, batch_invariant: as in `conv2d`.

    Returns:
        dx of shape ``input_shape``, of grad's library, computed on the caller's current stream; ``out`` if given.

    Raises:
        As `conv2d_input`, which computes this as images of one row.

    >>> import numpy as np
    >>> grad, w = np.ones((1, 1, 2), np.float32), np.arange(3, dtype=np.float32).reshape(1, 1, 3)
    >>> conv1d_input(grad, w, (1, 1, 5), stride=2).ravel().tolist()
    [0.0, 1.0, 2.0, 1.0, 2.0]
    """
    requested = layer_options(
        "conv1d_input", stride, padding, dilation, groups, layout, algorithm, precision, None, device, workspace_limit,
        batch_invariant, input_shape,
    )  # fmt: skip
    return lookup.run(requested, grad, w, None, out)


def conv2d_weight(
    x: Array,
    grad: Any,
    weight_shape: Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: Padding = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    layout: Layout | None = None,
    algorithm: str = "auto",
    precision: Precision = "fp32",
    out: Any = None,
    device: str | None = None,
    workspace_limit: int | None = None,
    grad_bias: bool = False,
    batch_invariant: bool = False,
) -> Any:
    """Gradient of `conv2d` with respect to its filters, as ``torch.nn.grad.conv2d_weight`` computes it.

    ``dw[k,c,r,s] = sum over n,p,q of grad[n,k,p,q] * x[n,c, p*stride - top + r*dilation, ...]``

    Args:
        x: conv2d's x, as that call had it: (n, c, h, w), or (c, h, w); a float32, float16 or bfloat16 array of NumPy,
            CuPy, PyTorch, or of any library with DLPack. The CPU takes float64 too.
        grad: gradient of conv2d's result, of that shape, library, dtype and device.
        weight_shape: shape of conv2d's w: (k, c / groups, r, s), (k, r, s, c / groups) with ``layout="NHWC"``, or
            (c / groups, r, s, k) with ``"CHWN"``. PyTorch's is always (k, c / groups, r, s).
        stride, padding, dilation, groups: those of the layer, as in `conv2d`.
        layout: as in `conv2d`, of x, grad and dw; for PyTorch tensors by default that of x.
        algorithm, precision, out, device, workspace_limit: as in `conv2d`.
        grad_bias: also sum grad over its images and pixels, which is the gradient of the bias.
        batch_invariant: refused: dw is a sum over the images of a batch, and has no part that is one image's.

    Returns:
        dw of shape ``weight_shape``, of x's library, computed on the caller's current stream; ``out`` if given. With
        ``grad_bias`` a tuple, dw and the gradient of the bias, (k,). Sums are taken in a fixed order: equal calls on
        one GPU give equal bits.

    Raises:
        As `conv2d`; also ValueError where the shape of grad is not that of the layer's result for ``weight_shape``, and
        TypeError for ``grad_bias`` with arrays of a library that is none of NumPy, CuPy and PyTorch.

    >>> import numpy as np
    >>> x, grad = np.arange(5, dtype=np.float32).reshape(1, 1, 1, 5), np.ones((1, 1, 1, 2), np.float32)
    >>> conv2d_weight(x, grad, (1, 1, 1, 3), stride=(1, 2)).ravel().tolist()
    [2.0, 4.0, 6.0]
    """
    requested = layer_options(
        "conv2d_weight", stride, padding, dilation, groups, layout, algorithm, precision, None, device, workspace_limit,
        batch_invariant, weight_shape, grad_bias,
    )  # fmt: skip
    return lookup.run(requested, x, grad, None, out)


def conv1d_weight(
    x: Array,
    grad: Any,
    weight_shape: Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: Padding = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    layout: Layout1d | None = None,
    algorithm: str = "auto",
    precision: Precision = "fp32",
    out: Any = None,
    device: str | None = None,
    workspace_limit: int | None = None,
    grad_bias: bool = False,
    batch_invariant: bool = False,
) -> Any:
    """Gradient of `conv1d` with respect to its filters, as ``torch.nn.grad.conv1d_weight`` computes it.

    ``dw[k,c,s] = sum over n,q of grad[n,k,q] * x[n,c, q*stride - left + s*dilation]``

    Args:
        x: conv1d's x, as that call had it: (n, c, w), or (c, w); a float32, float16 or bfloat16 array, as in
            `conv2d_weight`.
        grad: gradient of conv1d's result, of that shape, library, dtype and device.
        weight_shape: shape of conv1d's w: (k, c / groups, s), (k, s, c / groups) with ``layout="NWC"``, or
            (c / groups, s, k) with ``"CWN"``. PyTorch's is always (k, c / groups, s).
        stride, padding, dilation, groups: those of the layer, as in `conv1d`.
        layout: as in `conv1d`, of x, grad and dw; for PyTorch tensors by default that of x.
        algorithm, precision, out, device, workspace_limit, grad_bias, batch_invariant: as in `conv2d_weight`.

    Returns:
        dw of shape ``weight_shape``, with ``grad_bias`` a tuple, as `conv2d_weight`.

    Raises:
        As `conv2d_weight`, which computes this as images of one row.

    >>> import numpy as np
    >>> x, grad = np.arange(5, dtype=np.float32).reshape(1, 1, 5), np.ones((1, 1, 2), np.float32)
    >>> conv1d_weight(x, grad, (1, 1, 3), stride=2, grad_bias=True)[0].ravel().tolist()
    [2.0, 4.0, 6.0]
    """
    requested = layer_options(
        "conv1d_weight", stride, padding, dilation, groups, layout, algorithm, precision, None, device, workspace_limit,
        batch_invariant, weight_shape, grad_bias,
    )  # fmt: skip
    return lookup.run(requested, x, grad, None, out)


def explain(what: Any, /, *arguments: Any, **options: Any) -> Explanation:
    """Say what a call would run for these arguments, and why not the others. Runs nothing.

    Give a function and the arguments of its call: ``explain(conv2d, x, w, padding=1)``; any of `conv2d`, `conv1d`,
    `conv3d`, their gradients, `filter2d` and `filter3d`. Or give a ConvProblem or FilterProblem with, if wanted,
    ``device="cuda"`` (the CPU is the default), ``algorithm=`` and ``workspace_limit=``. Registers and spills are given
    for what this process has compiled already, or with ``compile=True``. Where no GPU can be opened, the choice is the
    one for an H200.

    Raises ValueError and TypeError as the call itself would, but not NoAlgorithmError: "nothing fits" is an answer.
    Tensors may require a gradient, and ``out`` of a filter in several passes (a separable kernel of volumes, several
    separable kernels) is not checked.

    >>> from leanconv import ConvProblem
    >>> print(explain(ConvProblem(1, 3, 8, 8, 4, 3, 3)))  # doctest: +SKIP
    """
    compile_now = bool(options.pop("compile", False))
    if isinstance(what, Problem):
        device, name = options.pop("device", None), options.pop("algorithm", "auto")
        limit = options.pop("workspace_limit", None)
        if options or arguments:
            raise TypeError("explain(problem) takes only device=, algorithm=, workspace_limit= and compile= besides it")
        return explain_problem(what, device, name, limit, compile_now=compile_now)
    if not any(what is each for each in _EXPLAINED):
        raise TypeError(f"explain takes a problem, or a function and its arguments; {_why_not_explained(what)}")
    return explain_call(resolve_call(what, *arguments, **options), compile_now=compile_now)


def _why_not_explained(what: Any) -> str:
    if isinstance(what, str):
        return "problems in words are for the command line (leanconv explain); make a ConvProblem"
    known, name = [each.__name__ for each in _EXPLAINED], getattr(what, "__name__", None)
    said, instead = f"a {type(what).__name__}", None
    if callable(what) and isinstance(name, str):
        said = _public_name(what, name)
        if said.rpartition(".")[0] in ("leanconv", "leanconv.torch", "torch", "torch.nn.functional"):
            instead = f"leanconv.{name}" if name in known else _TAKEN_INSTEAD.get(name)
    return f"{said} is none of {', '.join(known)} of leanconv" + (f"; take {instead}" if instead else "")


def _public_name(function: Any, name: str) -> str:
    """A function's name with the outermost module that has it."""
    module = ""
    for part in (getattr(function, "__module__", None) or "").split("."):
        module = f"{module}.{part}".lstrip(".")
        if getattr(sys.modules.get(module), name, None) is function:
            break
    return f"{module}.{name}".lstrip(".")


def resolve_call(function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Resolved:
    """What a call of ``function``, a public one, with these arguments computes and where. Raises as the call does."""
    call = inspect.signature(function).bind(*arguments, **options)
    call.apply_defaults()
    given = call.arguments
    first, second, *_ = given.values()
    out = given.pop("out")
    if function is filter2d or function is filter3d:
        wanted, kernel = (requested_filter if function is filter2d else requested_volume_filter)(**given, out=out)
        several = wanted.window is not None and len(np.shape(second)) == 3
        if several or (function is filter3d and wanted.slice_anchor is None):
            # one of several passes, whose result is not the whole
            library = arrays_of(out)
            if wanted.dtype is None and library is not None:
                wanted = wanted._replace(dtype=one_of("out", library.dtype(out), FILTERS))
            out = None
        resolved = resolve(wanted, first, kernel, None, out)
        filter_numbers(given["value"], given["delta"], *types_of(resolved.problem))
        return resolved
    name = function.__name__
    shape = given.pop(FUNCTIONS[name].shape, None)
    numbers = {key: given[key] for key in _LAYER_OPTIONS if key in given}
    requested = layer_options(name, shape=shape, **numbers)
    return resolve(requested, first, second, together(given.get("bias"), given.get("scale"), given.get("add")), out)


_EXPLAINED = (
    conv2d, conv1d, conv3d, conv2d_input, conv1d_input, conv3d_input, conv2d_weight, conv1d_weight, conv3d_weight,
    filter2d, filter3d,
)  # fmt: skip
#: What computes the same as functions that `explain` does not take.
_TAKEN_INSTEAD = (
    {f"conv_transpose{axes}d": f"leanconv.conv{axes}d_input, with the shape of the result" for axes in (1, 2, 3)}
    | dict.fromkeys(
        ("gaussian_blur", "laplacian", "prewitt", "scharr", "sep_filter2d", "sobel", "unsharp_mask"),
        "leanconv.filter2d and the filter's kernel, as leanconv.filters.gaussian(7) is one",
    )
    | {
        name: f"a leanconv.FilterProblem with reduction={reduction!r}"
        for name, reduction in (("box_blur", "sum"), ("dilate", "max"), ("erode", "min"), ("median_blur", "median"))
    }
)
_LAYER_OPTIONS = inspect.signature(layer_options).parameters
