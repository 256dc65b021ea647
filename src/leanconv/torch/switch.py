"""What switches the patched convolution on and off."""

from __future__ import annotations

from typing import Any

import torch

from leanconv.options import Precision
from leanconv.torch import deciding, registration
from leanconv.torch.layers import Selection
from leanconv.torch.patch import Patch
from leanconv.torch.recording import warm_up
from leanconv.torch.report import Report


def enable(
    model: torch.nn.Module | None = None,
    *,
    include: Selection = None,
    exclude: Selection = None,
    precision: Precision = "fp32",
    batch_invariant: bool = False,
    tune: Any = None,
) -> Patch:
    """Let leanconv compute the convolutions of all models on CUDA, forward and backward, where it expects to be faster.

    Nothing of a model changes: PyTorch's operators for convolution get another kernel on CUDA, until `disable`, or
    until the ``with`` that this opens is left. A call is taken if it is a layer of one, two or three axes in float32,
    float16 or bfloat16 whose time is less than PyTorch's, both as a table of tuned problems has them, or else as
    predicted and expected (where a gradient is recorded, by so much that it is worth the host's time); and if it keeps
    the precision that PyTorch was asked for: float32's accuracy, also where PyTorch is allowed TF32. Within float32's
    accuracy its error may be some times PyTorch's. Where Python launches each kernel, outside of CUDA graphs and
    compiled models, the GPU waits for the host in short layers: there, without a gradient, some are taken that the GPU
    computes in a little more time. Everything else runs as before. On the CPU nothing changes.

    Args:
        model: gives the layers in `Patch.report` their names, and ``include`` and ``exclude`` names to go by. Other
            models are patched as well; it is not changed.
        include, exclude: which layers: a pattern of names as in a shell (``"layer1.*"``; needs ``model``), a module, a
            sequence of both, or a function that is given the `leanconv.ConvProblem` and returns whether it belongs.
        precision: the least precise arithmetic that is allowed, as in `leanconv.conv2d`; where PyTorch may not use
            TF32, never below ``"fp32"``.
        batch_invariant: an image has the same bits in the result of a layer in any batch, and so has its gradient (see
            `leanconv.conv2d`). Then each layer that leanconv can compute is taken, whether PyTorch would be faster or
            not; what is left to PyTorch, as ``report()`` says, has no such promise.
        tune: an example of what the model is called with, on the GPU: what no table has is timed first, leanconv's and
            PyTorch's, by ``warm_up(model, tune, tune=True)``; once, since the times are kept.

    Returns:
        Patch: a context manager with ``report()``, ``refresh()`` and ``disable()``. Of several, the last one that is
        enabled decides. It holds for all threads.

    Raises:
        ValueError: a name of a layer without ``model``, or one that fits no layer; an unknown precision.

    Without gradients, filters that have not changed since the call before are packed once, and kept: at most 512 MiB in
    all, and not more than LEANCONV_WORKSPACE_LIMIT. A change of a parameter in place is followed, and so is new memory.
    What PyTorch does not count is not, but for steps of its optimisers: after changes through ``parameter.data``, or by
    a collective of torch.distributed, call ``refresh()``, unless the layer has had a backward pass since. A CUDA graph
    packs at each replay. Of filters whose training a graph has captured while this was on nothing is kept, since
    replays change them uncounted. Under autocast the same holds for filters and biases in its 16-bit type: they are
    kept, within the same bound, beyond the context in which autocast would keep them, and a change inside the context
    is followed too. While it lasts, parameters cannot be exchanged by ``torch.utils.swap_tensors``, nor modules be
    converted so (``torch.__future__.set_swap_module_params_on_conversion``).

    Results are deterministic: equal calls give equal bits, whatever PyTorch's switches say. Those of a layer may be
    others in a CUDA graph than outside, and others where its gradient is recorded: it may be taken in one case alone.

    >>> import torch
    >>> import leanconv.torch
    >>> model = torch.nn.Conv2d(3, 8, 3)
    >>> with leanconv.torch.enable(model) as taken:
    ...     y = model(torch.randn(1, 3, 9, 9))  # on the CPU: PyTorch's own
    >>> len(taken.report().lines)
    0
    """
    patch = Patch(model, include, exclude, precision, batch_invariant)
    if model is None and tune is not None:
        raise ValueError("tune= is an example for a model: give the model too, enable(model, tune=example)")
    registration.add(patch)
    if model is not None and tune is not None:
        try:
            warm_up(model, tune, tune=True)
        except BaseException:
            patch.disable()
            raise
    return patch


def disable() -> None:
    """Switch off all that `enable` has switched on."""
    for patch in reversed(deciding.active[:]):
        patch.disable()


def report() -> Report:
    """What ran under the last `enable`, which may be switched off by now, layer by layer."""
    latest = registration.latest()
    return Report(()) if latest is None else latest.report()
