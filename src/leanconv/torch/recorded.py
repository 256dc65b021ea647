"""A convolution whose gradient is recorded in Python, for layers of which leanconv takes something.

Autograd's own node calls aten::convolution_backward. A kernel of ours there costs every layer, also those that it hands
on. So it is registered only where somebody calls aten::convolution by another way than torch.nn.functional (see
`registration`). Layers of which nothing is taken keep autograd's node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from leanconv.torch.deciding import current
from leanconv.torch.switches import compiling, is_lazy, materialized

_transforms: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
#: whether a tensor is the batch of gradients of ``is_grads_batched=True``
_is_batch: Callable[[Any], bool] = torch._C._functorch.is_legacy_batchedtensor
#: Called before aten::convolution_backward is asked for a gradient that is differentiable itself, or by a transform.
before_differentiable: list[Callable[[], None]] = []
#: ``gradients(grad, x, w, wanted)``: those of images, filters and bias that are wanted, and None for the call; or None
#: where the long way must compute them
Gradients = Callable[[Any, Any, Any, tuple[bool, ...]], "tuple[Any, ...] | None"]
#: how often a call looks for the short way of its gradients
_MOST_LOOKS = 8


class RecordedCall:
    """How a layer is computed: by ``forward(x, w, bias)``, and its gradients by the patch that is active.

    ``given`` are the other arguments of aten::convolution; ``looks`` is how often it looks for a short way, 0 for
    one that serves a single call.
    """

    __slots__ = ("forward", "given", "looks", "quick")

    def __init__(self, forward: Callable[..., Any], given: Any, looks: int = _MOST_LOOKS) -> None:
        self.forward, self.given, self.looks = forward, given, looks
        #: gradients that are wanted as before, of tensors that are alike
        self.quick: Gradients | None = None

    def gradients(self, grad: Any, x: Any, w: Any, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        """The long way."""
        *mask, _ = wanted
        bias_sizes = [grad.shape[1]] if mask[2] else None
        special = torch.compiler.is_compiling() or torch.is_grad_enabled() or _transforms() is not None
        patch = current()
        if patch is None or special or type(grad) is not torch.Tensor or _is_batch(grad):
            for each in before_differentiable:
                each()
            return *torch.ops.aten.convolution_backward(grad, x, w, bias_sizes, *self.given, mask), None
        lazy = is_lazy(grad) or is_lazy(x) or is_lazy(w)
        if lazy:
            grad, x, w = (materialized(each) for each in (grad, x, w))
        gradients = patch.backward(grad, x, w, bias_sizes, *self.given, mask)
        if self.looks and not lazy:
            self.looks -= 1
            self.quick = patch.quick_gradients(grad, x, w, self.given, mask)
        return *gradients, None


class Recorded(torch.autograd.Function):
    """The convolution of a `RecordedCall`."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, bias: Any, call: RecordedCall) -> Any:
        ctx.save_for_backward(x, w)
        ctx.call = call
        return call.forward(x, w, bias)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, w = ctx.saved_tensors
        call, wanted = ctx.call, ctx.needs_input_grad
        quick = call.quick
        gradients = None if quick is None or compiling() else quick(grad, x, w, wanted)
        return call.gradients(grad, x, w, wanted) if gradients is None else gradients


#: `Recorded.apply` without what it does for transforms of torch.func, which never come here.
record: Callable[..., Any] = super(torch.autograd.Function, Recorded).apply
