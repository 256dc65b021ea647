"""A layer of videos that looks back only, and computes a video whole or in parts."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import fx

from leanconv import options as rules
from leanconv.torch import functional, operators
from leanconv.torch.modules import Conv3d
from leanconv.torch.switches import without_axis
from leanconv.volumes.api import conv3d

#: What the frames before the first one are.
TimePadding = Literal["zeros", "replicate"]
_TIME_PADDINGS: tuple[TimePadding, ...] = ("zeros", "replicate")


class CausalConv3d(Conv3d):
    """``torch.nn.Conv3d`` whose outputs depend on no later frame: frame z of the result on frames up to z * stride.

    Frames are the depth. All that it pads along time are ``dilation * (taps - 1)`` frames before the first, inside the
    kernel; the parameters and the state_dict are those of ``torch.nn.Conv3d``.

    Args:
        in_channels, out_channels, kernel_size, stride, dilation, groups, bias, device, dtype: as of
            ``torch.nn.Conv3d``; a number for all axes, or (depth, vertical, horizontal).
        padding: of rows and columns, by zeros: a number, (vertical, horizontal), (top, bottom, left, right), ``"same"``
            or ``"valid"``.
        time_padding: what stands before the first frame: ``"zeros"``, or ``"replicate"``, the first frame again.
        streaming: whether each call goes on where the last one ended: a video may come in parts of any number of
            frames, and their results, one behind the other, are the result of the whole. May be set at any time.
        precision, batch_invariant, activation: as of `Conv2d`.

    Raises:
        ValueError: a stride along time that is greater than what a filter reaches, so that frames would be read by
        nobody; a part of a stream whose batch, channels, size, type or device is not that of the frames before.

    A layer that streams keeps the last ``dilation * (taps - 1)`` frames, fewer behind strides, until `reset`; they are
    constants for autograd. No kernel reads the frames of two tensors. So those that a part begins with are put behind
    the kept ones in a copy; the outputs that need no kept frame are computed from the part as it lies where that saves
    copying: without gradients, channels last, a batch of one, and parts of at least four times as many frames as are
    kept. Else all of the part is copied once. From the second part on the frames are kept in the same memory, which a
    CUDA graph of a part may read and write.

    >>> import torch
    >>> from leanconv.torch import CausalConv3d
    >>> layer = CausalConv3d(1, 1, (3, 1, 1), bias=False, streaming=True)
    >>> _ = torch.nn.init.ones_(layer.weight)
    >>> video = torch.arange(1.0, 6.0).reshape(1, 1, 5, 1, 1)
    >>> with torch.no_grad():
    ...     [layer(part).flatten().tolist() for part in video.split((1, 2, 2), 2)]
    [[1.0], [3.0, 6.0], [9.0, 12.0]]
    >>> layer.reset()
    """

    time_padding: TimePadding = "zeros"
    streaming: bool = False
    _frames: torch.Tensor | None = None

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1, bias: bool = True, *, time_padding: TimePadding = "zeros",
        streaming: bool = False, device: Any = None, dtype: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        taps, steps, apart = (
            rules.each_axis(name, value, 1, 3)
            for name, value in (("kernel_size", kernel_size), ("stride", stride), ("dilation", dilation))
        )
        if isinstance(padding, (tuple, list)) and len(padding) in (3, 6):
            raise ValueError(
                f"padding={padding!r} has numbers for the depth, which a causal layer pads by itself; give an integer, "
                "(vertical, horizontal), (top, bottom, left, right), 'same' or 'valid'"
            )
        around = rules.sides_for(rules.sides_of(padding), taps[1:], steps[1:], apart[1:])
        back = apart[0] * (taps[0] - 1)
        if steps[0] > back + 1:
            raise ValueError(
                f"stride={stride!r} is {steps[0]} along time, greater than the {back + 1} frames that a filter reaches "
                f"with kernel_size={kernel_size!r} and dilation={dilation!r}: frames would be read by nobody"
            )
        if options.get("padding_mode", "zeros") != "zeros":
            raise ValueError(
                f"padding_mode={options['padding_mode']!r}: rows and columns are padded by zeros; what stands before "
                "the first frame is time_padding"
            )
        self.time_padding = rules.one_of("time_padding", time_padding, _TIME_PADDINGS)
        self.streaming = rules.yes_or_no("streaming", streaming)
        super().__init__(
            in_channels, out_channels, taps, steps, (back, 0, *around), apart, groups, bias=bias, device=device,
            dtype=dtype, **options,
        )  # fmt: skip
        self._back, self._around = back, around

    def reset(self) -> None:
        """Forget the frames of the last call: the next part is the beginning of another video."""
        self._frames = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """The layer's result for a video (n, c, d, h, w), or (c, d, h, w), or for the next part of one; of a part that
        is too short for a further output, or empty, it has no frames."""
        if isinstance(input, fx.Proxy):
            return self._recorded(input)
        functional.check_input(3, input)
        if input.dim() == 4:
            return without_axis(self.forward(input.unsqueeze(0)), 0)
        if self.streaming and not input.shape[2]:
            return self._without_frames(input)
        back, step = self._back, self.stride[0]
        before = self._before(input) if back else None
        if before is None and not (back and self.streaming):
            return self._conv_forward(input, self.weight, self.bias)
        kept, given = back if before is None else before.shape[2], input.shape[2]
        outputs = max(0, (kept + given - back - 1) // step + 1)
        y = self._part(before, input, outputs)
        if self.streaming:
            self._keep(before, input, kept + given - outputs * step)
        return y

    def _recorded(self, input: Any) -> Any:
        """What torch.fx records: this module as a whole, whose way depends on shapes and on the frames that are kept;
        where it is all that is traced, the functions of one that does not stream."""
        tracer = input.tracer
        if isinstance(tracer, fx.Tracer) and tracer.root is not self:
            return tracer.create_proxy("call_module", tracer.path_of_module(self), (input,), {})
        if self.streaming:
            raise ValueError("torch.fx cannot trace a layer that streams by itself; trace a module that it is part of")
        if self.time_padding == "zeros" or not self._back:
            return self._conv_forward(input, self.weight, self.bias)
        padded = torch.nn.functional.pad(input, (0, 0, 0, 0, self._back, 0), mode="replicate")
        given = self.stride, (0, 0, *self._around), self.dilation, self.groups
        return self._compute(padded, self.weight, self.bias, *given, activation=self.activation)

    def _before(self, input: torch.Tensor) -> torch.Tensor | None:
        """The frames before those of a call; None where they are zeros."""
        frames = self._frames if self.streaming else None
        if frames is None:
            if self.time_padding == "zeros" or not input.shape[2]:  # which the convolution refuses
                return None
            return input[:, :, :1].expand(-1, -1, self._back, -1, -1)
        kept, given = ((each.shape[:2], each.shape[3:], each.dtype, each.device) for each in (frames, input))
        if kept != given:
            raise ValueError(
                f"input has shape {tuple(input.shape)} and is {input.dtype} on {input.device}, but the frames that are "
                f"kept of the last call have shape {tuple(frames.shape)} and are {frames.dtype} on {frames.device}; "
                "call reset() before another video"
            )
        return frames

    def _part(self, before: torch.Tensor | None, x: torch.Tensor, outputs: int) -> torch.Tensor:
        """So many outputs of the frames ``before`` and those of ``x`` together."""
        if before is None:
            return self._conv_forward(x, self.weight, self.bias)
        back, step, kept = self._back, self.stride[0], before.shape[2]
        # outputs whose windows begin among the kept frames
        few = -(-kept // step)
        if 0 < few < outputs and self._lies_as_needed(x, kept):
            y = operators.like(x, self._shape(x, outputs))
            edge = _joined(before, x[:, :, : (few - 1) * step + back + 1 - kept])
            for frames, place in (edge, y[:, :, :few]), (x[:, :, few * step - kept :], y[:, :, few:]):
                conv3d(
                    frames, self.weight.detach(), None if self.bias is None else self.bias.detach(), self.stride,
                    (0, 0, *self._around), self.dilation, self.groups, precision=self.precision,
                    batch_invariant=self.batch_invariant, activation=self.activation, out=place,
                )  # fmt: skip
            return y
        if not outputs:
            return self._without_frames(x)
        given = self.stride, (0, 0, *self._around), self.dilation, self.groups
        return self._compute(_joined(before, x), self.weight, self.bias, *given, activation=self.activation)

    def _lies_as_needed(self, x: torch.Tensor, kept: int) -> bool:
        """Whether frames behind others are an array that kernels read in place, and results one that they write; and
        whether most outputs need no kept frame."""
        if len(x) != 1 or x.shape[2] < 4 * kept or not operators.is_channels_last(x):
            return False
        return not operators.needs_operators(x, self.weight, self.bias)

    def _without_frames(self, x: torch.Tensor) -> torch.Tensor:
        return operators.like(operators.as_autocast([x])[0], self._shape(x, 0))

    def _shape(self, x: torch.Tensor, outputs: int) -> tuple[int, ...]:
        n, k, _, *sides = operators.output_shape(x.shape, self.weight.shape, self.stride, self.padding, self.dilation)
        return n, k, outputs, *sides

    def _keep(self, before: torch.Tensor | None, x: torch.Tensor, count: int) -> None:
        """Keep the last so many frames."""
        new = x.detach()[:, :, max(0, x.shape[2] - count) :]
        missing = count - new.shape[2]
        if missing and before is None:
            new = torch.nn.functional.pad(new, (0, 0, 0, 0, missing, 0))
        elif missing:
            assert before is not None
            new = _joined(before.detach()[:, :, before.shape[2] - missing :], new)
        old = None if torch.compiler.is_compiling() else self._frames
        # PyTorch changes tensors of inference mode nowhere else
        if old is not None and old.shape == new.shape and old.is_inference() is torch.is_inference_mode_enabled():
            old.copy_(new)
        else:
            self._frames = operators.like(x, new.shape).copy_(new)


def _joined(before: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Frames behind others, in the memory order of those."""
    return torch.cat([before, x], 2).contiguous(memory_format=operators.memory_format(x)) if before.shape[2] else x
