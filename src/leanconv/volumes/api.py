"""The public functions on layers of volumes: what they take, and what they mean. `leanconv.call` carries them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from leanconv.arrays import arrays_of, carried, way_back
from leanconv.arrays.operands import together
from leanconv.call import lookup
from leanconv.call.resolve import check_axes, transposed_axis
from leanconv.call.weights import PreparedWeights
from leanconv.options import Activation, Layout3d, Padding, Precision, each_axis, integer, layer_options

Array = TypeVar("Array")


def conv3d(
    x: Array,
    w: Any,
    bias: Any = None,
    stride: int | Sequence[int] = 1,
    padding: Padding = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    layout: Layout3d | None = None,
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
    """Convolve a batch of volumes with a bank of filters, as ``torch.nn.functional.conv3d`` does.

    ``y[n,k,z,p,q] = activation(bias[k] + sum over c,t,r,s of w[k,c,t,r,s] * x[n,c, z*stride - front + t*dilation])``

    Args:
        x: float32, float16 or bfloat16 array (n, c, d, h, w) of NumPy, CuPy, PyTorch, or of any library with DLPack; or
            one volume (c, d, h, w), for a result (k, z, p, q). The CPU takes float64 too.
        w: filters (k, c / groups, t, r, s), of the same library, dtype and device; or what `leanconv.prepare_weights`
            made of them.
        stride: voxels between outputs, for all axes or (depth, vertical, horizontal).
        padding: zeros around the volume: one number, (depth, vertical, horizontal), (front, back, top, bottom, left,
            right), ``"valid"`` or ``"same"``, as in `leanconv.conv2d`.
        dilation: voxels between filter taps, like ``stride``.
        layout: ``"NDHWC"``: x is (n, d, h, w, c), w (k, t, r, s, c / groups) and y (n, z, p, q, k). Without a batch
            there is no n. PyTorch tensors keep their logical shapes; for them it is the order in memory, by default
            that of x if that is NCDHW or NDHWC (channels_last_3d). All else as in `leanconv.conv2d`.
        bias, groups, algorithm, precision, activation, scale, add, out, device, workspace_limit, batch_invariant: as in
            `leanconv.conv2d`.

    Returns:
        y of shape (n, k, z, p, q), of x's library, computed on the caller's current stream; ``out`` if given.

    Raises:
        As `leanconv.conv2d`.

    Some layers are computed as ones of images, on the same memory: such as those with filters of one row and one column
    at unit stride along both, or, channels last, of one slice at unit stride along the depth (docs/volumes.md).

    >>> import numpy as np
    >>> x, w = np.ones((1, 1, 3, 4, 4), np.float32), np.ones((1, 1, 3, 3, 3), np.float32)
    >>> conv3d(x, w, padding=1)[0, 0, 0, 0].tolist()
    [8.0, 12.0, 12.0, 8.0]
    """
    requested = layer_options(
        "conv3d", stride, padding, dilation, groups, layout, algorithm, precision, activation, device, workspace_limit,
        batch_invariant,
    )  # fmt: skip
    return lookup.run(requested, x, w, together(bias, scale, add), out)


def conv3d_input(
    grad: Array,
    w: Any,
    input_shape: Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: Padding = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    layout: Layout3d | None = None,
    algorithm: str = "auto",
    precision: Precision = "fp32",
    out: Any = None,
    device: str | None = None,
    workspace_limit: int | None = None,
    batch_invariant: bool = False,
) -> Array:
    """Gradient of `conv3d` with respect to its input, as ``torch.nn.grad.conv3d_input`` computes it.

    ``dx[n,c,f,i,j] = sum over k,t,r,s of w[k,c,t,r,s] * grad[n,k,z,p,q]`` where ``z*stride - front + t*dilation = f``,
    and so on: the transposed convolution.

    Args:
        grad: gradient of conv3d's result, of that shape: (n, k, z, p, q), or (k, z, p, q); an array as in `conv3d`.
        w: the layer's filters (k, c / groups, t, r, s), not rotated; or what `leanconv.prepare_weights` made of them.
        input_shape: shape of conv3d's x, as that call had it: (n, c, d, h, w), or (n, d, h, w, c) with
            ``layout="NDHWC"``. PyTorch's is always (n, c, d, h, w). Without n where grad has none.
        stride, padding, dilation, groups: those of the layer, as in `conv3d`.
        layout: as in `conv3d`, of grad, w and dx; for PyTorch tensors by default that of grad, as there that of x.
        algorithm, precision, out, device, workspace_limit, batch_invariant: as in `leanconv.conv2d`.

    Returns:
        dx of shape ``input_shape``, of grad's library, computed on the caller's current stream; ``out`` if given.

    Raises:
        As `leanconv.conv2d_input`.

    >>> import numpy as np
    >>> grad, w = np.ones((1, 1, 2, 1, 1), np.float32), np.arange(3, dtype=np.float32).reshape(1, 1, 3, 1, 1)
    >>> conv3d_input(grad, w, (1, 1, 5, 1, 1), stride=(2, 1, 1)).ravel().tolist()
    [0.0, 1.0, 2.0, 1.0, 2.0]
    """
    requested = layer_options(
        "conv3d_input", stride, padding, dilation, groups, layout, algorithm, precision, None, device, workspace_limit,
        batch_invariant, input_shape,
    )  # fmt: skip
    return lookup.run(requested, grad, w, None, out)


def conv3d_weight(
    x: Array,
    grad: Any,
    weight_shape: Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: Padding = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    layout: Layout3d | None = None,
    algorithm: str = "auto",
    precision: Precision = "fp32",
    out: Any = None,
    device: str | None = None,
    workspace_limit: int | None = None,
    grad_bias: bool = False,
    batch_invariant: bool = False,
) -> Any:
    """Gradient of `conv3d` with respect to its filters, as ``torch.nn.grad.conv3d_weight`` computes it.

    ``dw[k,c,t,r,s] = sum over n,z,p,q of grad[n,k,z,p,q] * x[n,c, z*stride - front + t*dilation, ...]``

    Args:
        x: conv3d's x, as that call had it: (n, c, d, h, w), or (c, d, h, w); an array as in `conv3d`.
        grad: gradient of conv3d's result, of that shape, library, dtype and device.
        weight_shape: shape of conv3d's w: (k, c / groups, t, r, s), or (k, t, r, s, c / groups) with
            ``layout="NDHWC"``. PyTorch's is always (k, c / groups, t, r, s).
        stride, padding, dilation, groups: those of the layer, as in `conv3d`.
        layout: as in `conv3d`, of x, grad and dw; for PyTorch tensors by default that of x.
        algorithm, precision, out, device, workspace_limit, grad_bias, batch_invariant: as in `leanconv.conv2d_weight`.

    Returns:
        dw of shape ``weight_shape``, with ``grad_bias`` a tuple, as `leanconv.conv2d_weight`.

    Raises:
        As `leanconv.conv2d_weight`.

    >>> import numpy as np
    >>> x, grad = np.arange(5, dtype=np.float32).reshape(1, 1, 5, 1, 1), np.ones((1, 1, 2, 1, 1), np.float32)
    >>> conv3d_weight(x, grad, (1, 1, 3, 1, 1), stride=(2, 1, 1)).ravel().tolist()
    [2.0, 4.0, 6.0]
    """
    requested = layer_options(
        "conv3d_weight", stride, padding, dilation, groups, layout, algorithm, precision, None, device, workspace_limit,
        batch_invariant, weight_shape, grad_bias,
    )  # fmt: skip
    return lookup.run(requested, x, grad, None, out)


def conv_transpose3d(
    x: Array,
    w: Any,
    bias: Any = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    layout: Layout3d | None = None,
    algorithm: str = "auto",
    precision: Precision = "fp32",
    out: Any = None,
    device: str | None = None,
    workspace_limit: int | None = None,
    batch_invariant: bool = False,
) -> Array:
    """The transposed convolution of volumes, as ``torch.nn.functional.conv_transpose3d``: `conv3d_input` with a bias.

    Args:
        x: volumes (n, c, d, h, w), or (c, d, h, w); an array as in `conv3d`.
        w: filters (c, k / groups, t, r, s), as PyTorch has them; or what `leanconv.prepare_weights` made of them.
        bias: (k,) or None.
        stride, padding, dilation: a number for all axes, or (depth, vertical, horizontal).
        output_padding: voxels more at the end of each axis; less than ``stride`` or ``dilation``. Where it is as much
            as ``stride`` and more than ``padding``, the result is copied once.
        layout: as in `conv3d`; with ``"NDHWC"`` x is (n, d, h, w, c) and w (c, t, r, s, k / groups).
        groups, algorithm, precision, out, device, workspace_limit, batch_invariant: as in `leanconv.conv2d`.

    Returns:
        y of shape (n, k, ...), of x's library; each axis has
        ``(size - 1) * stride - 2 * padding + dilation * (taps - 1) + output_padding + 1`` voxels.

    Raises:
        As `leanconv.conv2d_input`.

    >>> import numpy as np
    >>> x, w = np.ones((1, 1, 2, 1, 1), np.float32), np.arange(3, dtype=np.float32).reshape(1, 1, 3, 1, 1)
    >>> conv_transpose3d(x, w, np.ones(1, np.float32), stride=(2, 1, 1)).ravel().tolist()
    [1.0, 2.0, 3.0, 2.0, 3.0]
    """
    steps, apart, around, more = (
        each_axis(name, value, least, 3)
        for name, value, least in (
            ("stride", stride, 1), ("dilation", dilation, 1), ("padding", padding, 0),
            ("output_padding", output_padding, 0),
        )
    )  # fmt: skip
    if any(rest >= max(pair) for rest, *pair in zip(more, steps, apart, strict=True)):
        raise ValueError(
            f"output_padding={output_padding!r} must be less than stride={stride!r} or dilation={dilation!r}"
        )
    groups = integer("groups", groups, 1)
    first, taken = _shape(x, "x"), _shape(w.array if isinstance(w, PreparedWeights) else w, "w")
    last = layout == "NDHWC" and not getattr(arrays_of(x), "keeps_shape", False)
    if len(first) not in (4, 5) or len(taken) != 5:
        check_axes("x", first, 5)
        check_axes("w", taken, 5, batch=False)
    channels, sizes = (first[-1], first[-4:-1]) if last else (first[-4], first[-3:])
    filters, taps = (taken[-1], taken[1:4]) if last else (taken[1], taken[2:])
    if taken[0] != channels:
        raise ValueError(f"w has {taken[0]} channels, but x has {channels}: they must be the same")
    if channels % groups:
        raise ValueError(f"in_channels={channels} is not divisible by groups={groups}")
    along = [transposed_axis(*each) for each in zip(sizes, steps, around, apart, taps, more, strict=True)]
    extent = [each.extent for each in along]
    if min(extent) < 1:
        raise ValueError(
            f"the output would be {'x'.join(map(str, extent))} for x of shape {first}, w of shape {taken}, "
            f"stride={stride!r}, padding={padding!r}, dilation={dilation!r} and output_padding={output_padding!r}"
        )
    batch, filters = first[: len(first) - 4], filters * groups
    shape, inner = (
        (*batch, *sides, filters) if last else (*batch, filters, *sides)
        for sides in (extent, [each.inner for each in along])
    )
    ends = tuple(side for each in along for side in each.padding)
    requested = layer_options(
        "conv3d_input", steps, ends, apart, groups, layout, algorithm, precision, None, device, workspace_limit,
        batch_invariant, inner,
    )  # fmt: skip
    cut = [each.cut for each in along]
    if not any(map(any, cut)):
        return lookup.run(requested, x, w, bias, out)
    back = way_back(x) if arrays_of(x) is None else None
    given: Any = carried(x, "x")
    bias = bias if bias is None else carried(bias, "bias")
    w = w if isinstance(w, PreparedWeights) else carried(w, "w")
    if out is not None and (_shape(out, "out") != shape or out.dtype != given.dtype):
        there = f"{tuple(out.shape)} and type {out.dtype}"
        raise ValueError(f"out has shape {there}; the result has {shape} and {given.dtype}")
    y = _with_ends(lookup.run(requested, given, w, bias), shape, cut, bias, 4 if last else 3, out)
    return y if back is None or out is not None else back(y)


def _with_ends(y: Any, shape: tuple[int, ...], cut: list[tuple[int, int]], bias: Any, behind: int, out: Any) -> Any:
    """A result without what is to be cut in front of each axis, and with voxels behind that no tap reaches: zeros, or
    the bias. The axes begin so far from the end of its shape."""
    arrays: Any = arrays_of(y)
    if out is None:
        axes = range(len(shape))
        last = *axes[:-4], *axes[-3:], axes[-4]
        order = last if arrays.keeps_shape and arrays.is_contiguous(y, last) else None
        out = arrays.empty(shape, arrays.dtype(y), arrays.device(y), order)
    read, written = [slice(None)] * len(shape), [slice(None)] * len(shape)
    for axis, (front, rest) in enumerate(cut, len(shape) - behind):
        read[axis], written[axis] = slice(front, None), slice(shape[axis] - rest)
    out[...] = 0 if bias is None else bias if behind == 4 else bias.reshape(-1, 1, 1, 1)
    out[tuple(written)] = y[tuple(read)]
    return out


def _shape(array: Any, name: str) -> tuple[int, ...]:
    if not hasattr(array, "shape"):
        raise TypeError(f"{name} is a {type(array).__qualname__}; it must be an array")
    return tuple(array.shape)
