"""leanconv for PyTorch: functions and modules with gradients; `enable` patches the convolutions of whole models."""

from leanconv.torch.functional import conv1d, conv2d, conv_transpose1d, conv_transpose2d
from leanconv.torch.modules import Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d
from leanconv.torch.patch import Takeover
from leanconv.torch.recording import warm_up
from leanconv.torch.report import Report
from leanconv.torch.switch import disable, enable, report

__all__ = [
    "Conv1d",
    "Conv2d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "Report",
    "Takeover",
    "conv1d",
    "conv2d",
    "conv_transpose1d",
    "conv_transpose2d",
    "disable",
    "enable",
    "report",
    "warm_up",
]
