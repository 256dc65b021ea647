"""PyTorch's convolution modules, computed by leanconv. Parameters, names and state_dict are those of PyTorch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from leanconv.options import PRECISIONS, Precision, one_of, yes_or_no
from leanconv.torch import functional


class _Precise(torch.nn.Module):
    """What modules share that say how exact they are. Defaults are the class's: old pickles know of none."""

    precision: Precision = "fp32"
    batch_invariant: bool = False

    def __init__(
        self, *arguments: Any, precision: Precision = "fp32", batch_invariant: bool = False, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.precision = one_of("precision", precision, PRECISIONS)
        self.batch_invariant = yes_or_no("batch_invariant", batch_invariant)

    @property
    def _exactness(self) -> dict[str, Any]:
        return {"precision": self.precision, "batch_invariant": self.batch_invariant}

    def extra_repr(self) -> str:
        """That of PyTorch's module, and what of precision and batch_invariant is not the default."""
        more = "" if self.precision == "fp32" else f", precision={self.precision!r}"
        return super().extra_repr() + more + (", batch_invariant=True" if self.batch_invariant else "")


class Conv1d(_Precise, torch.nn.Conv1d):
    """``torch.nn.Conv1d`` by `leanconv.torch.conv1d`; ``precision=`` and ``batch_invariant=`` besides its arguments."""

    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            input, padding = _pad(self, input), 0
        return functional.conv1d(
            input, weight, bias, self.stride, padding, self.dilation, self.groups, **self._exactness
        )


class Conv2d(_Precise, torch.nn.Conv2d):
    """``torch.nn.Conv2d`` by `leanconv.torch.conv2d`; ``precision=`` and ``batch_invariant=`` besides its arguments."""

    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            input, padding = _pad(self, input), 0
        return functional.conv2d(
            input, weight, bias, self.stride, padding, self.dilation, self.groups, **self._exactness
        )


class ConvTranspose2d(_Precise, torch.nn.ConvTranspose2d):
    """``torch.nn.ConvTranspose2d`` by `leanconv.torch.conv_transpose2d`; besides its arguments as `Conv2d`."""

    def forward(self, input: torch.Tensor, output_size: Sequence[int] | None = None) -> torch.Tensor:
        """The transposed convolution; ``output_size`` chooses among the sizes that ``stride`` leaves open."""
        more = self._output_padding(
            input, None if output_size is None else list(output_size), list(self.stride), self.padding,  # type: ignore[arg-type]
            list(self.kernel_size), 2, list(self.dilation),
        )  # fmt: skip
        return functional.conv_transpose2d(
            input, self.weight, self.bias, self.stride, self.padding, more, self.groups, self.dilation,  # type: ignore[arg-type]
            **self._exactness,
        )  # fmt: skip


class ConvTranspose1d(_Precise, torch.nn.ConvTranspose1d):
    """``torch.nn.ConvTranspose1d`` by `leanconv.torch.conv_transpose1d`; besides its arguments as `Conv2d`."""

    def forward(self, input: torch.Tensor, output_size: Sequence[int] | None = None) -> torch.Tensor:
        """The transposed convolution; ``output_size`` chooses among the sizes that ``stride`` leaves open."""
        more = self._output_padding(
            input, None if output_size is None else list(output_size), list(self.stride), self.padding,  # type: ignore[arg-type]
            list(self.kernel_size), 1, list(self.dilation),
        )  # fmt: skip
        return functional.conv_transpose1d(
            input, self.weight, self.bias, self.stride, self.padding, more, self.groups, self.dilation,  # type: ignore[arg-type]
            **self._exactness,
        )  # fmt: skip


def _pad(module: Any, input: torch.Tensor) -> torch.Tensor:
    """The input with the border that ``padding_mode`` names around it."""
    return torch.nn.functional.pad(input, module._reversed_padding_repeated_twice, mode=module.padding_mode)
