"""leanconv for PyTorch: functions and modules with gradients; `enable` patches the convolutions of whole models."""

from leanconv.torch.causal import CausalConv3d
from leanconv.torch.compile_report import CompileReport, fused_report
from leanconv.torch.functional import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d
from leanconv.torch.fused_backend import fused
from leanconv.torch.fusing import FuseReport, fuse
from leanconv.torch.images import filter2d
from leanconv.torch.modules import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from leanconv.torch.patch import Patch
from leanconv.torch.recording import warm_up
from leanconv.torch.report import Report
from leanconv.torch.switch import disable, enable, report

__all__ = [
    "CausalConv3d",
    "CompileReport",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "FuseReport",
    "Patch",
    "Report",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "disable",
    "enable",
    "filter2d",
    "fuse",
    "fused",
    "fused_report",
    "report",
    "warm_up",
]


def __getattr__(name: str) -> object:
    if name == "Takeover":
        raise AttributeError("leanconv.torch.Takeover is now leanconv.torch.Patch")
    raise AttributeError(f"module 'leanconv.torch' has no attribute {name!r}")
