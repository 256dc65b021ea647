"""leanconv for PyTorch: functions and modules with gradients, and convolutions of whole models taken over."""

from leanconv.torch.functional import conv1d, conv2d, conv_transpose1d, conv_transpose2d
from leanconv.torch.modules import Conv1d, Conv2d, ConvTranspose2d

__all__ = [
    "Conv1d",
    "Conv2d",
    "ConvTranspose2d",
    "conv1d",
    "conv2d",
    "conv_transpose1d",
    "conv_transpose2d",
]
