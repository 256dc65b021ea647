"""The convolutions of a model, forward and backward, as problems that can be tuned or compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from leanconv.options import Precision
from leanconv.problem import ConvProblem
from leanconv.torch import ahead, layers, takeover


class _Every(ahead._Recorder):
    """Records what a takeover would leave to PyTorch as well, on any device."""

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), options: Any = None) -> Any:
        result = super().__torch_dispatch__(function, types, given, options)
        if function is torch.ops.aten.convolution.default and result.dim() == 4:
            # as on CUDA: the CPU's convolution may lay its result out otherwise
            last = layers.is_channels_last(given[0], given[1])
            result = result.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
        return result

    def _taken(self, x: Any, w: Any, bias: bool, rest: Any, wanted: Any) -> None:
        options = layers.options_of(rest, x.dim() - 2)
        if layers.why_never(x, w, options):
            return
        for operation, is_wanted in zip(layers.operations(x, w, options, bias), wanted, strict=True):
            if is_wanted:
                self.taken.append(self._active.problem(operation, options, x.dtype))


def problems_of(
    model: torch.nn.Module, example: Any, *, backward: bool | None = None, precision: Precision = "fp32"
) -> dict[int | None, list[ConvProblem]]:
    """The different convolutions of a model, by the limit of workspace that `enable` gives them.

    The model runs on tensors without values: nothing is computed, and it may be on the CPU.

    Args:
        model: what is called.
        example: what it is called with: a tensor, or a tuple of arguments; only shapes, dtypes and memory order matter.
        backward: whether to record the backward pass too; None: if the model is in training mode.
        precision: as for `enable`.
    """
    given = example if isinstance(example, tuple) else (example,)
    found = _Every(takeover.active() or takeover.Takeover(None, None, None, precision), None)
    with ahead._no_autocast_cache(), FakeTensorMode(allow_non_fake_inputs=True) as fake, found:
        inputs = [ahead._stand_in(fake, each) if isinstance(each, torch.Tensor) else each for each in given]
        outputs = model(*inputs)
        if model.training if backward is None else backward:
            ahead._differentiate(model, outputs)
    by_limit: dict[int | None, list[ConvProblem]] = {}
    for problem in dict.fromkeys(found.taken):
        by_limit.setdefault(takeover.workspace(problem), []).append(problem)
    for problem in dict.fromkeys(found.problems):
        by_limit.setdefault(None, []).append(problem)
    return by_limit


def example_of(shapes: list[tuple[int, ...]], model: torch.nn.Module) -> tuple[Any, ...]:
    """Tensors of these shapes, of the type and in the memory order of the model's parameters."""
    first = next(model.parameters(), torch.empty(0))
    last = any(p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last) and not p.is_contiguous()
               for p in model.parameters())  # fmt: skip
    made = [torch.empty(shape, dtype=first.dtype, device=first.device) for shape in shapes]
    if last:
        made = [each.contiguous(memory_format=torch.channels_last) if each.dim() == 4 else each for each in made]
    return tuple(made)
