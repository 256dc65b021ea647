"""PyTorch's convolution modules, computed by leanconv. Parameters, names and state_dict are those of PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from leanconv.options import PRECISIONS, Activation, Precision, activation_of, one_of, yes_or_no
from leanconv.torch import functional


class _Module(torch.nn.Module):
    """What the modules share: how exact they are. Defaults are the class's, since old pickles have none."""

    precision: Precision = "fp32"
    batch_invariant: bool = False
    _function: ClassVar[Callable[..., torch.Tensor]]

    def __init__(
        self, *arguments: Any, device: Any = None, dtype: Any = None, precision: Precision = "fp32",
        batch_invariant: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        # device and dtype are in the signature since torch.nn.utils.skip_init looks for them there
        where = {name: value for name, value in (("device", device), ("dtype", dtype)) if value is not None}
        super().__init__(*arguments, **where, **options)
        self.precision = one_of("precision", precision, PRECISIONS)
        self.batch_invariant = yes_or_no("batch_invariant", batch_invariant)

    def _compute(self, *given: Any, **beside: Any) -> torch.Tensor:
        return type(self)._function(*given, precision=self.precision, batch_invariant=self.batch_invariant, **beside)

    def extra_repr(self) -> str:
        """That of PyTorch's module, and what of precision and batch_invariant is not the default."""
        more = "" if self.precision == "fp32" else f", precision={self.precision!r}"
        return super().extra_repr() + more + (", batch_invariant=True" if self.batch_invariant else "")


class _Forward(_Module):
    activation: str | None = None

    def __init__(
        self, *arguments: Any, device: Any = None, dtype: Any = None, activation: Activation = None, **options: Any
    ) -> None:
        super().__init__(*arguments, device=device, dtype=dtype, **options)
        self.activation = activation_of(activation)

    def forward(self: Any, input: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """The convolution; ``add`` is a residual of the shape of its result, added before the activation."""
        return self._conv_forward(input, self.weight, self.bias, add)

    def extra_repr(self) -> str:
        """That of PyTorch's module, and what is not the default."""
        return super().extra_repr() + (f", activation={self.activation!r}" if self.activation else "")

    def _conv_forward(
        self: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":  # that border is put around the input before
            border = self._reversed_padding_repeated_twice
            input, padding = torch.nn.functional.pad(input, border, mode=self.padding_mode), 0
        given = input, weight, bias, self.stride, padding, self.dilation, self.groups
        return self._compute(*given, activation=self.activation, add=add)


def _padding_for(
    input: torch.Tensor, output_size: Sequence[int], stride: Any, padding: Any, kernel_size: Any, dilation: Any
) -> list[int]:
    """What PyTorch's transposed modules add to the output so that it has a size."""
    padding_of: Any = torch.nn.ConvTranspose1d._output_padding  # the same for all three modules
    lists = map(list, (stride, padding, kernel_size))
    more: list[int] = padding_of(None, input, list(output_size), *lists, len(stride), list(dilation))
    return more


torch.fx.wrap("_padding_for")  # tracers record the call: its sizes are numbers when the graph runs


class _Transposed(_Module):
    def forward(self: Any, input: torch.Tensor, output_size: Sequence[int] | None = None) -> torch.Tensor:
        """The transposed convolution; ``output_size`` chooses among the sizes that ``stride`` leaves open."""
        more = self.output_padding
        if output_size is not None:
            more = _padding_for(input, output_size, self.stride, self.padding, self.kernel_size, self.dilation)
        return self._compute(input, self.weight, self.bias, self.stride, self.padding, more, self.groups, self.dilation)


class Conv1d(_Forward, torch.nn.Conv1d):
    """``torch.nn.Conv1d`` by `leanconv.torch.conv1d`.

    Besides its arguments: ``precision=``, ``batch_invariant=`` and ``activation=``; ``layer(x, add=residual)`` adds.
    """

    _function = functional.conv1d


class Conv2d(_Forward, torch.nn.Conv2d):
    """``torch.nn.Conv2d`` by `leanconv.torch.conv2d`.

    Besides its arguments: ``precision=``, ``batch_invariant=`` and ``activation=``; ``layer(x, add=residual)`` adds.
    """

    _function = functional.conv2d


class Conv3d(_Forward, torch.nn.Conv3d):
    """``torch.nn.Conv3d`` by `leanconv.torch.conv3d`.

    Besides its arguments: ``precision=``, ``batch_invariant=`` and ``activation=``; ``layer(x, add=residual)`` adds.
    """

    _function = functional.conv3d


class ConvTranspose1d(_Transposed, torch.nn.ConvTranspose1d):
    """``torch.nn.ConvTranspose1d`` by `leanconv.torch.conv_transpose1d`.

    Besides its arguments: ``precision=`` and ``batch_invariant=``.
    """

    _function = functional.conv_transpose1d


class ConvTranspose2d(_Transposed, torch.nn.ConvTranspose2d):
    """``torch.nn.ConvTranspose2d`` by `leanconv.torch.conv_transpose2d`.

    Besides its arguments: ``precision=`` and ``batch_invariant=``.
    """

    _function = functional.conv_transpose2d


class ConvTranspose3d(_Transposed, torch.nn.ConvTranspose3d):
    """``torch.nn.ConvTranspose3d`` by `leanconv.torch.conv_transpose3d`.

    Besides its arguments: ``precision=`` and ``batch_invariant=``.
    """

    _function = functional.conv_transpose3d
