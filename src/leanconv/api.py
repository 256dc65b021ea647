"""The public functions: check, describe, choose, run.

Each call is described once: a dictionary keyed by the arrays' signatures and the other arguments leads straight to a
ready call the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from leanconv.algorithms import ALGORITHMS
from leanconv.arrays import TorchArrays, arrays_of, give_back
from leanconv.call import arguments, describe
from leanconv.call import choose as registry
from leanconv.call import run as calls
from leanconv.call.describe import Described
from leanconv.call.weights import PreparedCall, PreparedWeights, UnpreparedCall, work_of
from leanconv.problem import ConvProblem
from leanconv.reference import CPU_ALGORITHMS
from leanconv.runtime.env import raw_workspace_limit

Array = TypeVar("Array")

_conv_calls: dict[Any, calls.Call] = {}
_filter_calls: dict[Any, calls.Call] = {}
#: more different calls than this in one process, and the look-up starts over
_MAX_CALLS = 8192


def conv2d(
    x: Array,
    w: Any,
    bias: Any = None,
    stride: int | Sequence[int] = 1,
    padding: arguments.Padding = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    layout: str | None = None,
    algorithm: str = "auto",
    precision: str = "fp32",
    activation: str | None = None,
    out: Any = None,
    device: str | None = None,
    workspace_limit: int | None = None,
) -> Array:
    """Convolve a batch of images with a bank of filters, as ``torch.nn.functional.conv2d`` does.

    ``y[n,k,p,q] = activation(bias[k] + sum over c,r,s of w[k,c,r,s] * x[n,c, p*stride - top + r*dilation, ...])``

    Args:
        x: float32, float16 or bfloat16 array (n, c, h, w) of NumPy, CuPy, PyTorch, or of any library with DLPack. The
            CPU takes float64 too. Sums are of float32, and a result of 16 bits is rounded once.
        w: filters (k, c / groups, r, s), of the same library, dtype and device; or what `prepare_weights` made of them.
        bias: (k,) or None.
        stride: pixels between outputs, for both axes or (vertical, horizontal).
        padding: zeros around the image, in pixels: one number, (vertical, horizontal), (top, bottom, left, right),
            ``"valid"`` (none) or ``"same"`` (output as large as the input; stride 1; an odd pixel goes to the end).
        dilation: pixels between filter taps, like ``stride``.
        groups: c and k are cut into this many parts that do not see each other.
        layout: ``"NHWC"``: x is (n, h, w, c), w (k, r, s, c / groups) and y (n, p, q, k). ``"CHWN"``: x is
            (c, h, w, n), w (c / groups, r, s, k) and y (k, p, q, n); with the images innermost it is for large batches,
            best of a multiple of four. PyTorch tensors keep their logical shapes; for them it is the order in memory,
            by default that of x if that is one of the first two (channels_last is NHWC). A tensor that lies as CHWN is
            one whose ``permute(1, 2, 3, 0)`` is contiguous: read in place if ``layout`` says so, and y lies alike.
        algorithm: ``"auto"`` or a name from `algorithms`.
        precision: ``"ieee"``, ``"fp32"``, ``"relaxed"`` or ``"tf32"``; the result is never less precise than this.
        activation: None or ``"relu"``.
        out: array for the result; must not share memory with the inputs.
        device: ``"cuda"`` or ``"cuda:1"`` runs NumPy arrays on that GPU and waits for the result.
        workspace_limit: bytes of GPU memory that the algorithm may take besides x, w, bias and y, from the allocator
            of x's library: for scratch, and for what it prepares of the filters. None: what LEANCONV_WORKSPACE_LIMIT
            says, else no scratch but prepared filters for ``"auto"``, and as much as it needs for one by name.

    Returns:
        y of shape (n, k, p, q), of x's library, computed on the caller's current stream; ``out`` if given.

    Raises:
        ValueError, TypeError: an argument breaks a rule, which the message names; NoAlgorithmError, a ValueError,
            where nothing fits. CudaUnavailableError: no driver, GPU or compiler.

    PyTorch's CPU tensors go to PyTorch's own convolution. On the GPU no gradient is computed, and a tensor that
    requires one is refused. The first call of a shape compiles; later ones neither allocate anything but the result
    and the memory that ``workspace_limit`` is about nor wait, and may be captured in a CUDA graph (of CuPy's, only
    where there is no such memory: CuPy's pool keeps none for a graph).

    >>> import numpy as np
    >>> x, w = np.ones((1, 1, 4, 4), np.float32), np.ones((1, 1, 3, 3), np.float32)
    >>> conv2d(x, w, padding=1)[0, 0, 0].tolist()
    [4.0, 6.0, 6.0, 4.0]
    """
    arrays = arrays_of(x)
    call = key = None
    if arrays is not None:
        signature = arrays.signature
        try:
            key = (
                type(x), signature(x), type(w), signature(w),
                None if bias is None else (type(bias), signature(bias)),
                None if out is None else (type(out), signature(out)),
                stride, padding, dilation, groups, layout, algorithm, precision, activation, device,
                raw_workspace_limit() if workspace_limit is None else workspace_limit,
            )  # fmt: skip
            call = _conv_calls.get(key)
        except (TypeError, AttributeError, RuntimeError):
            key = None  # arrays of several libraries, or a list; the slow path sorts it out
    if call is None:
        if _foreign(x, w, bias):
            _refuse_out(out)
            result = conv2d(
                *_carried("x", x, w, bias), stride, padding, dilation, groups,
                layout=layout, algorithm=algorithm, precision=precision, activation=activation, device=device,
                workspace_limit=workspace_limit,
            )  # fmt: skip
            return give_back(result, x)
        described = describe.conv2d(
            x, w, bias, stride, padding, dilation, groups, layout=layout, algorithm=algorithm, precision=precision,
            activation=activation, out=out, device=device, workspace_limit=workspace_limit,
        )  # fmt: skip
        call = _bind(described, x, w, bias, out)
        if key is not None:
            _remember(_conv_calls, key, call)
    return call(x, w, bias, out)


def conv1d(
    x: Array,
    w: Any,
    bias: Any = None,
    stride: int | Sequence[int] = 1,
    padding: arguments.Padding = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    layout: str | None = None,
    algorithm: str = "auto",
    precision: str = "fp32",
    activation: str | None = None,
    out: Any = None,
    device: str | None = None,
    workspace_limit: int | None = None,
) -> Array:
    """Convolve a batch of signals with a bank of filters, as ``torch.nn.functional.conv1d`` does.

    ``y[n,k,q] = activation(bias[k] + sum over c,s of w[k,c,s] * x[n,c, q*stride - left + s*dilation])``

    Args:
        x: float32, float16 or bfloat16 array (n, c, w) of NumPy, CuPy, PyTorch, or of any library with DLPack. The CPU
            takes float64 too.
        w: filters (k, c / groups, s), of the same library, dtype and device; or what `prepare_weights` made of them.
        bias: (k,) or None.
        stride: samples between outputs.
        padding: zeros around the signal: one number, (left, right), ``"valid"`` or ``"same"``, as in `conv2d`.
        dilation: samples between filter taps.
        groups: c and k are cut into this many parts that do not see each other.
        layout: ``"NWC"``: x is (n, w, c), w (k, s, c / groups) and y (n, q, k). ``"CWN"``: x is (c, w, n), w
            (c / groups, s, k) and y (k, q, n). PyTorch tensors keep their logical shapes; for them it is the order in
            memory, by default that of x if that is NCW or NWC. All else as in `conv2d`.
        algorithm, precision, activation, out, device, workspace_limit: as in `conv2d`.

    Returns:
        y of shape (n, k, q), of x's library, computed on the caller's current stream; ``out`` if given.

    Raises:
        As `conv2d`, which computes this as images of one row: without copies, by the same algorithms.

    >>> import numpy as np
    >>> x, w = np.arange(5, dtype=np.float32).reshape(1, 1, 5), np.ones((1, 1, 3), np.float32)
    >>> conv1d(x, w, padding=(2, 0))[0, 0].tolist()
    [0.0, 1.0, 3.0, 6.0, 9.0]
    """
    return _layer(
        describe.conv1d, "x", x, w, bias, out, workspace_limit, stride=stride, padding=padding, dilation=dilation,
        groups=groups, layout=layout, algorithm=algorithm, precision=precision, activation=activation, device=device,
    )  # fmt: skip


def conv2d_input(
    grad: Array,
    w: Any,
    input_shape: Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: arguments.Padding = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    layout: str | None = None,
    algorithm: str = "auto",
    precision: str = "fp32",
    out: Any = None,
    device: str | None = None,
    workspace_limit: int | None = None,
) -> Array:
    """Gradient of `conv2d` with respect to its input, as ``torch.nn.grad.conv2d_input`` computes it.

    ``dx[n,c,i,j] = sum over k,r,s of w[k,c,r,s] * grad[n,k,p,q]`` where ``p*stride - top + r*dilation = i``, and so on:
    the transposed convolution.

    Args:
        grad: gradient of conv2d's result, of that shape: (n, k, p, q); a float32, float16 or bfloat16 array of NumPy,
            CuPy, PyTorch, or of any library with DLPack. The CPU takes float64 too.
        w: the layer's filters (k, c / groups, r, s), not rotated; or what `prepare_weights` made of them.
        input_shape: shape of conv2d's x, as that call had it: (n, c, h, w), (n, h, w, c) with ``layout="NHWC"``, or
            (c, h, w, n) with ``"CHWN"``. PyTorch's is always (n, c, h, w).
        stride, padding, dilation, groups: those of the layer, as in `conv2d`.
        layout: as in `conv2d`, of grad, w and dx; for PyTorch tensors by default that of grad, as there that of x.
        algorithm, precision, out, device, workspace_limit: as in `conv2d`.

    Returns:
        dx of shape ``input_shape``, of grad's library, computed on the caller's current stream; ``out`` if given.

    Raises:
        As `conv2d`; ValueError also where grad has not the shape that the layer's result has for ``input_shape``.

    >>> import numpy as np
    >>> grad, w = np.ones((1, 1, 1, 2), np.float32), np.arange(3, dtype=np.float32).reshape(1, 1, 1, 3)
    >>> conv2d_input(grad, w, (1, 1, 1, 5), stride=(1, 2)).ravel().tolist()
    [0.0, 1.0, 2.0, 1.0, 2.0]
    """
    return _layer(
        describe.conv2d_input, "grad", grad, w, None, out, workspace_limit, input_shape=input_shape, stride=stride,
        padding=padding, dilation=dilation, groups=groups, layout=layout, algorithm=algorithm, precision=precision,
        device=device,
    )  # fmt: skip


def filter2d(
    image: Array,
    kernel: Any,
    *,
    border: str = "reflect101",
    value: float = 0,
    anchor: Sequence[int] | None = None,
    delta: float = 0,
    out: Any = None,
    device: str | None = None,
) -> Array:
    """Correlate images with one small kernel, as ``cv2.filter2D`` does; the result is as large as the image.

    ``y[i,j] = delta + sum over u,v of kernel[u,v] * image[i + u - anchor_y, j + v - anchor_x]``

    Args:
        image: array (..., height, width), float32 or int32 (the CPU takes float64 too); leading axes are a batch.
            Rows may lie apart: a crop of a larger image is read in place.
        kernel: array (kh, kw) of the same dtype, up to 32x32 on the GPU. With an image on the GPU it may be a NumPy
            array; a copy on the GPU is then kept for each content, for the first 256 of them.
        border: what lies outside the image ``a b c d``: ``"constant"`` ``v|abcd|v``, ``"replicate"`` ``a|abcd|d``,
            ``"reflect"`` ``ba|abcd|dc``, ``"reflect101"`` ``cb|abcd|cb``, ``"wrap"`` ``cd|abcd|ab``. SciPy's names
            (``nearest``, ``mirror``, ``grid-mirror``, ``grid-wrap``, ``grid-constant``) and OpenCV's
            (``BORDER_REFLECT_101``, ...) are taken too; see `arguments.BORDER_ALIASES`.
        value: the constant border's pixel.
        anchor: (row, column) of the kernel element that lies on the output pixel, by default (kh // 2, kw // 2).
        delta: added to every output pixel.
        out: array for the result; must not share memory with the inputs.
        device: ``"cuda"`` or ``"cuda:1"`` runs NumPy arrays on that GPU and waits for the result.

    Returns:
        Array of the image's shape, dtype and library, computed on the caller's current stream; ``out`` if given.

    Raises:
        ValueError, TypeError: an argument breaks a rule, which the message names. CudaUnavailableError: see `conv2d`.

    The kernel is not flipped; ``kernel[::-1, ::-1]`` makes it a convolution. PyTorch's CPU tensors are filtered by the
    NumPy engine.

    >>> import numpy as np
    >>> filter2d(np.arange(4, dtype=np.float32)[None], np.ones((1, 3), np.float32), border="replicate").tolist()
    [[1.0, 3.0, 6.0, 8.0]]
    """
    arrays = arrays_of(image)
    call = key = None
    if arrays is not None:
        if type(kernel) is np.ndarray:
            kernel = describe.kernel_beside(image, kernel)
        signature = arrays.signature
        try:
            key = (
                type(image), signature(image), type(kernel), signature(kernel),
                None if out is None else (type(out), signature(out)),
                border, anchor, device,
            )  # fmt: skip
            call = _filter_calls.get(key)
        except (TypeError, AttributeError, RuntimeError):
            key = None
    if call is None:
        if _foreign(image, kernel):
            _refuse_out(out)
            result = filter2d(
                describe.carried(image, "image"), describe.carried(kernel, "kernel"), border=border, value=value,
                anchor=anchor, delta=delta, device=device,
            )  # fmt: skip
            return give_back(result, image)
        described = describe.filter2d(image, kernel, border=border, anchor=anchor, out=out, device=device)
        call = _bind(described, image, kernel, None, out)
        if key is not None:
            _remember(_filter_calls, key, call)
    # NOTE: 0.0 and False are no int, and a launch packs the numbers of an int32 image as int32
    if type(value) is not int or type(delta) is not int or value or delta:
        assert arrays is not None  # a carried image has returned above
        dtype = arrays.dtype(image)
        value, delta = arguments.scalar("value", value, dtype), arguments.scalar("delta", delta, dtype)
    return call(image, kernel, None, out, value, delta)


def _layer(
    described_by: Callable[..., Described],
    name: str,
    x: Any,
    w: Any,
    bias: Any,
    out: Any,
    workspace_limit: int | None,
    **given: Any,
) -> Any:
    """A call of a layer: what `conv2d` does, which has it written out because each microsecond counts there.

    ``name`` is that of ``x``; ``given`` are the arguments of ``described_by`` but for the arrays and the limit.
    """
    arrays = arrays_of(x)
    call = key = None
    if arrays is not None:
        signature = arrays.signature
        try:
            key = (
                described_by, type(x), signature(x), type(w), signature(w),
                None if bias is None else (type(bias), signature(bias)),
                None if out is None else (type(out), signature(out)),
                raw_workspace_limit() if workspace_limit is None else workspace_limit, *given.values(),
            )  # fmt: skip
            call = _conv_calls.get(key)
        except (TypeError, AttributeError, RuntimeError):
            key = None
    if call is None:
        if _foreign(x, w, bias):
            _refuse_out(out)
            carried = _carried(name, x, w, bias)
            return give_back(_layer(described_by, name, *carried, None, workspace_limit, **given), x)
        more = given if bias is None else {"bias": bias, **given}
        described = described_by(x, w, out=out, workspace_limit=workspace_limit, **more)
        call = _bind(described, x, w, bias, out)
        if key is not None:
            _remember(_conv_calls, key, call)
    return call(x, w, bias, out)


def _foreign(x: Any, w: Any, bias: Any = None) -> bool:
    """Whether an array has to be carried."""
    w = w.array if isinstance(w, PreparedWeights) else w
    return any(array is not None and arrays_of(array) is None for array in (x, w, bias))


def _carried(name: str, x: Any, w: Any, bias: Any) -> tuple[Any, Any, Any]:
    """The arrays of a layer as arrays of a library that is served; filters that keep their preparation stay so."""
    array, plain, bias = describe.operands(name, x, w, bias)
    return array, w if isinstance(w, PreparedWeights) else plain, bias


def _refuse_out(out: Any) -> None:
    if out is not None:
        raise TypeError("out is taken for arrays of NumPy, CuPy and PyTorch only")


def _bind(described: Described, x: Any, w: Any, bias: Any, out: Any) -> calls.Call:
    """Choose, compile and load what a described call needs. The arrays stand for all that lie like them."""
    if isinstance(w, PreparedWeights):
        on_array = _bind(described, x, w.array, bias, out)
        if isinstance(on_array, calls.GpuCall):
            return _without_preparing(described, on_array, x, w.array, bias, out) or UnpreparedCall(on_array)
        return UnpreparedCall(on_array)
    arrays, problem = described.arrays, described.problem
    empty = calls.is_empty(problem)
    if described.device is not None:
        ready = None
        if empty:  # nothing to compile, but what nothing could run is refused all the same
            registry.choose(problem, described.algorithm, ALGORITHMS, described.workspace_limit)
        else:
            ready = _ready(described)
        if described.home is None:
            return calls.HostOnGpuCall(problem, ready, described.shape, described.names)
        return _gpu_call(described, ready, (x, w, bias, out), described.copies)
    if isinstance(arrays, TorchArrays) and isinstance(problem, ConvProblem):
        calls.check_torch_algorithm(described.algorithm)
        return calls.TorchCpuConv(arrays, problem, described.shape, described.names)
    chosen = registry.choose(problem, described.algorithm, CPU_ALGORITHMS, described.workspace_limit)
    return calls.CpuCall(arrays, problem, None if empty else chosen, described.shape, described.names)


def _ready(described: Described) -> calls.Ready:
    assert described.device is not None
    return calls.ready(described.problem, described.device, described.algorithm, described.workspace_limit)


def _gpu_call(
    described: Described, ready: calls.Ready | None, given: tuple[Any, Any, Any, Any], copies: tuple[bool, bool, bool]
) -> calls.GpuCall:
    assert described.device is not None
    return calls.GpuCall(
        described.arrays, described.device, described.problem, ready, described.shape, given=given,
        names=described.names, order=described.order, copies=copies, out_direct=described.out_direct,
    )  # fmt: skip


def _without_preparing(
    described: Described, whole: calls.GpuCall, x: Any, w: Any, bias: Any, out: Any
) -> PreparedCall | None:
    """A call that finds its filters prepared, where ``whole`` makes something of them; else None."""
    if described.device is None or calls.is_empty(described.problem):
        return None
    ready, (copy_x, copy_w, copy_bias) = _ready(described), described.copies
    work = work_of(ready.device, described.device, ready.plan, copy_w, described.order)
    if work is None:
        return None
    plan = replace(ready.plan, prepare=(), prepared_bytes=0)
    rest = _gpu_call(
        described, replace(ready, plan=plan, run=ready.device.executable(plan)),
        # a copy is ours alone, so it cannot overlap out
        (x, None if copy_w else w, bias, out), (copy_x, False, copy_bias),
    )  # fmt: skip
    return PreparedCall(described.arrays, work, whole, rest, described.arrays.requires_gradient(w))


def _remember(known: dict[Any, calls.Call], key: Any, call: calls.Call) -> None:
    if len(known) >= _MAX_CALLS:
        known.clear()
    known[key] = call


def forget() -> None:
    """Drop every ready call, so that the next one chooses anew. For tests, and after tuning."""
    _conv_calls.clear()
    _filter_calls.clear()
    calls.forget()
